"""``Handle``: what is opened and ends with ``close``, as a context manager for threads and for event loops."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from pybk.errors import LogFencedError
from pybk.threads.call_threads import asyncio_form, in_own_thread

logger = logging.getLogger(__name__)


class Handle(ABC):
    """An object that is opened, and let go of by ``close``, which leaving its ``with`` calls."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Let go of it; a second call does nothing."""

    close_async = asyncio_form(close, own_thread=True)

    def _has_unreported_failures(self) -> bool:
        """Return whether appends have failed because another owner has the log, and nothing has reported that."""
        return False

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; an exception that is on its way is not replaced by an error of the close.

        That another owner has taken a log or subscription is logged, because it does not change what the block has
        done. It is raised if appends have failed for that, and no call or future has reported it to the block.
        """
        try:
            self.close()
        except LogFencedError as fenced:
            if error is None and self._has_unreported_failures():
                fenced.outcome_unknown = True
                raise
            logger.warning("%r was closed after another owner had taken it: %s", self, fenced)
        except Exception:
            if error is None:
                raise

    async def __aenter__(self) -> Self:
        """Return the object itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it as ``__exit__`` does, in a thread."""
        await in_own_thread(self.__exit__, kind, error, traceback)
