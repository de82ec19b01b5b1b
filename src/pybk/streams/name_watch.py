"""Reports which logs were created, deleted and renamed, without reading all records at each change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from pybk.backend import LedgerBackend
from pybk.errors import ClosedError, PybkError
from pybk.streams.list_record import ListKind
from pybk.streams.list_writer import RETRY_SECONDS
from pybk.threads import background

logger = logging.getLogger(__name__)

NameCallback = Callable[[list[str], list[str]], None]
"""Called with the names that were added and those that were removed, each ascending, at least one of them."""


class NameWatch:
    """A watch of the names of all lists of a kind; made by ``Namespace.watch``.

    The backend reports a change, and a background thread finds the names that changed. A store names the changed
    record, which is then read. A cluster does not, so all names are listed, once for all changes meanwhile.

    Threads: any.
    """

    def __init__(self, backend: LedgerBackend, kind: ListKind, callback: NameCallback) -> None:
        self._backend = backend
        self._prefix = f"{kind.group}/"
        self._callback = callback
        self._lock = threading.Lock()
        self._changed: set[str | None] = set()
        """The records that may have been created or removed; None if that may be any record."""
        self._looking = True
        self._cancelled = False
        self._watch = backend.watch_group(kind.group, self._note)
        try:
            self._known = set(backend.record_names(self._prefix))
        except BaseException:
            self.cancel()
            raise
        self._look()

    def cancel(self) -> None:
        """Stop calling the callback; a call that has begun ends. Idempotent."""
        self._cancelled = True
        self._watch.cancel()

    def _note(self, name: str | None) -> None:
        """Note a change, and have it looked at; never blocks."""
        with self._lock:
            self._changed.add(name)
            if self._looking:
                return
            self._looking = True
        background().submit(self._look)

    def _look(self) -> None:
        """Report what changed; one thread at a time."""
        while True:
            with self._lock:
                changed, self._changed = self._changed, set()
                if not changed or self._cancelled:
                    self._looking = False
                    return
            try:
                present = self._present(changed)
            except ClosedError:
                return
            except PybkError as error:
                logger.info("names of logs could not be read, and are read again soon: %s", error)
                with self._lock:
                    self._changed |= changed
                background().call_later(RETRY_SECONDS, self._look)
                return
            self._report(present, self._known if None in changed else {each for each in changed if each is not None})

    def _present(self, changed: Iterable[str | None]) -> set[str]:
        """Return which of some records exist; of all, if any may have changed."""
        names = set(changed)
        if None in names:
            return set(self._backend.record_names(self._prefix))
        return {each for each in names if each is not None and self._backend.read_record(each) is not None}

    def _report(self, present: set[str], looked_at: set[str]) -> None:
        """Call the callback if records are there that were not, or the other way round."""
        added, removed = present - self._known, (looked_at & self._known) - present
        self._known = (self._known | added) - removed
        if (added or removed) and not self._cancelled:
            try:
                self._callback(self._names(added), self._names(removed))
            except Exception:
                logger.exception("the callback of a watch of logs failed")

    def _names(self, records: Iterable[str]) -> list[str]:
        return sorted(each.removeprefix(self._prefix) for each in records)
