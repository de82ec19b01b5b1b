"""``Opening``: a handle that a thread opens for an event loop."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class _Handle(Protocol):
    def close(self) -> None:
        """Close it."""


H = TypeVar("H", bound=_Handle)


class Opening(Generic[H], Awaitable[H]):
    """A handle to be opened in a thread: ``await`` it, or use it with ``async with`` to have it closed at the end.

    Nothing is opened before that. An ``Opening`` that is dropped unused warns, as a coroutine does.

    Args:
        name: The call that made it, for the warning.
        call: Opens the handle.
    """

    def __init__(self, name: str, call: Callable[[], H]) -> None:
        self._name = name
        self._call = call
        self._handle: H | None = None
        self._begun = False

    def __del__(self) -> None:
        """Warn if it was never awaited."""
        if not self._begun:
            warnings.warn(
                f"{self._name}() was never awaited, so it did nothing: await it, or use async with",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __await__(self) -> Generator[Any, None, H]:
        """Open it."""
        self._begun = True
        return self._open().__await__()

    async def __aenter__(self) -> H:
        """Open it."""
        self._handle = await self._open()
        return self._handle

    async def _open(self) -> H:
        self._begun = True
        delivery = _Delivery(self._call)
        try:
            return await asyncio.to_thread(delivery.make)
        except asyncio.CancelledError:
            delivery.refuse()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it as its own ``async with`` would."""
        handle: Any = self._handle
        await handle.__aexit__(kind, error, traceback)


class _Delivery(Generic[H]):
    """A handle on its way from the thread that opens it; it is closed if the awaiting task was cancelled meanwhile."""

    def __init__(self, call: Callable[[], H]) -> None:
        self._call = call
        self._lock = threading.Lock()
        """Guards ``_made`` and ``_refused``, so that exactly one thread closes a refused handle."""
        self._made: H | None = None
        self._refused = False

    def make(self) -> H:
        """Open the handle; called in the thread, which continues even if the caller was cancelled."""
        handle = self._call()
        with self._lock:
            self._made = handle
            refused = self._refused
        if refused:
            handle.close()
        return handle

    def refuse(self) -> None:
        """Have the handle closed: by the thread that opens it, or by another if that one is done."""
        with self._lock:
            self._refused = True
            made = self._made
        if made is not None:
            threading.Thread(target=made.close, name="pybk-close").start()
