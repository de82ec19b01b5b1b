"""The changes that a feed of the metadata store has reported, until the thread of a query asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from pybk.metadata.store import Watch

K = TypeVar("K", int, str)

_FIRST_REPORT_S: Final = 1.0
"""The longest wait for the first report of a feed, which says that it has begun."""


class NotedChanges(Generic[K]):
    """Collects the ids or names that a feed reports as changed.

    Args:
        watch: Begins the feed, with the function to call; None as its argument means that changes may have been missed.

    Threads: any; the metadata store calls ``note`` in a thread of its own.
    """

    def __init__(self, watch: Callable[[Callable[[Iterable[K] | None], None]], Watch]) -> None:
        self._lock: Final = threading.Lock()
        self._changed: set[K] = set()
        self._missed = True
        self._begun: Final = threading.Event()
        self._watch: Final = watch(self._report)

    def _report(self, changed: Iterable[K] | None) -> None:
        self.note(changed)
        self._begun.set()

    def note(self, changed: Iterable[K] | None) -> None:
        """Note changes; None if some may have been missed."""
        with self._lock:
            if changed is None:
                self._missed = True
            else:
                self._changed.update(changed)

    def take(self) -> set[K] | None:
        """Return what has changed since the last call; None the first time, and if some changes may have been missed.

        What is read afterwards shows these changes, and perhaps later ones, which the next call returns nevertheless.
        """
        # The first report comes soon, and says no more than that nothing is known: without it all is read twice.
        self._begun.wait(_FIRST_REPORT_S)
        with self._lock:
            changed, missed = self._changed, self._missed
            self._changed, self._missed = set(), False
        return None if missed else changed

    def close(self) -> None:
        """End the feed."""
        self._watch.cancel()
