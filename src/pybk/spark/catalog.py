"""Which ledgers a read is about, and how far each can be read now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pybk.errors import NoSuchLedgerError
from pybk.ledger import LedgerState
from pybk.spark.connection import Connection, connection
from pybk.spark.manifest import SINK_KEY, committed
from pybk.spark.planning import Readable, intersect, within

if TYPE_CHECKING:
    from pybk.ledger import LedgerMetadata
    from pybk.reader import LedgerReader
    from pybk.spark.options import Ranges, SourceOptions

_LIST_SHARE: Final = 10


class Catalog:
    """The ledgers of a read.

    Ledgers that a sink wrote and has not committed are hidden; those of the system are never shown.

    Args:
        options: What is read.
        ids: Only ledgers of these ids; None for all.

    Attributes:
        hidden: Creation times of the ledgers that were hidden when the ledgers were listed last, by id.

    Threads: one.
    """

    def __init__(self, options: SourceOptions, ids: Ranges | None = None) -> None:
        asked = options.ledgers
        self._where: Final = options.where
        self._password: Final = options.password.read() or b""
        self._type: Final = options.ledger_type
        self._ids: Final = asked if ids is None else ids if asked is None else intersect(asked, ids)
        self._named: Final = tuple(low for low, high in asked or () if low == high and within(low, ids))
        self._all_named: Final = asked is not None and all(low == high for low, high in asked)
        self._closed: dict[int, Readable] = {}
        self._open: dict[int, LedgerReader] = {}
        self._unlocked = False
        self._list_at = 0.0
        self.hidden: dict[int, int] = {}

    @property
    def missing(self) -> list[int]:
        """Ledgers that were asked for, each by itself, and were not there."""
        return [
            each for each in self._named if not any(each in some for some in (self._closed, self._open, self.hidden))
        ]

    def look(self, *, now: bool = True) -> dict[int, Readable]:
        """Return the ledgers by id, ascending, and how far each can be read.

        Args:
            now: List the ledgers; False: only if that would not be most of what is done.

        Raises:
            UnauthorizedError: The password is not that of a ledger.
            PybkError: As the metadata store and bookies.
        """
        began = time.monotonic()
        if now or began >= self._list_at:
            self._list(connection(self._where))
            ended = time.monotonic()
            self._list_at = ended + _LIST_SHARE * (ended - began)
        found = {**self._closed, **dict(self._advanced())}
        return dict(sorted(found.items()))

    def _list(self, found: Connection) -> None:
        before, self._open, self._closed, self.hidden = self._open, {}, {}, {}
        sinks: dict[str, set[int]] = {}
        for metadata in self._wanted(found):
            ledger_id = metadata.ledger_id
            app = metadata.custom_metadata.get(SINK_KEY, b"").decode(errors="replace")
            if app and found.metadata is not None:
                if app not in sinks:
                    sinks[app] = committed(found, app)
                if ledger_id not in sinks[app]:
                    self.hidden[ledger_id] = metadata.creation_time_ns
                    continue
            if metadata.state is LedgerState.CLOSED:
                self._check_password(found, ledger_id)
                end, length = metadata.last_entry_id + 1, metadata.length
                self._closed[ledger_id] = Readable(ledger_id, metadata.creation_time_ns, end, length, True)
            elif ledger_id in before:
                self._open[ledger_id] = before[ledger_id]
            else:
                self._open_ledger(found, ledger_id)

    def _wanted(self, found: Connection) -> Iterator[LedgerMetadata]:
        """Yield metadata of the ledgers that the options name and that are not the system's."""
        for metadata in self._there(found):
            kind = metadata.ledger_type
            wanted = not kind.is_system if self._type is None else kind == self._type
            if wanted and within(metadata.ledger_id, self._ids):
                yield metadata

    def _there(self, found: Connection) -> Iterator[LedgerMetadata]:
        if not self._all_named:
            found.manager._home.catch_up()
            yield from found.manager._home.ledgers()
            return
        for ledger_id in self._named:
            try:
                yield found.manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                continue

    def _check_password(self, found: Connection, ledger_id: int) -> None:
        """Open one ledger, so that a wrong password is told before anything is read."""
        if not self._unlocked:
            self._open_ledger(found, ledger_id)
            self._open.pop(ledger_id, None)

    def _open_ledger(self, found: Connection, ledger_id: int) -> None:
        try:
            self._open[ledger_id] = found.manager.open_ledger(ledger_id, password=self._password, recover=False)
        except NoSuchLedgerError:  # deleted since it was listed
            return
        self._unlocked = True

    def _advanced(self) -> Iterator[tuple[int, Readable]]:
        """Look how far the open ledgers are."""
        for ledger_id, reader in list(self._open.items()):
            try:
                last = reader.read_last_add_confirmed()
            except NoSuchLedgerError:
                del self._open[ledger_id]
                continue
            closed = reader.is_closed
            if closed:  # perhaps after the look
                last = reader.metadata.last_entry_id
            yield ledger_id, Readable(ledger_id, reader.metadata.creation_time_ns, last + 1, reader.length, closed)
