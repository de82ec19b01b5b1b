"""The state of a store as the rest of its log gives it, for a rebuild of the index that accepts the loss of commits.

Theory of operation. The catalog says what was true at the last checkpoint. ``SalvagedLog`` yields the commits after it
that are beyond doubt. Here they are applied to the catalog's rows, and the new index needs none of these commits any
more: its mark lies after them, and their log files are among its files. Nothing is guessed, and nothing that was
acknowledged is taken for absent:

- A ledger whose entries continue after a gap keeps both parts; the entries between them are lost ones, which the
  rebuild fills with placeholders.
- A ledger that is not closed and has no entries after the last gap may have had more. It gets one lost entry after its
  last known one. So a reader that reaches its end gets an error, and not a ledger that looks whole. Ledgers of a bookie
  get no lost entry: the bookie puts them all in limbo, and its peers know their ends.
- Ledgers may have been created in the lost commits. Their ids, LSNs and creation sequences are skipped, because none
  may be used twice. ``lost_ids`` has the ids of such ledgers: all ids of which nothing is known, also those of ledgers
  that were deleted before the checkpoint. Ids below the mark's are among them: an id is given out before its ledger's
  commit. That commit may come after the checkpoint's cut, although the mark, which is written later, names a higher id
  already. Applications choose ids, too. A store says of such an id that it is unknown.

Nothing here takes a lock or writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import CorruptError
from pybk.flags import WriteFlag, is_bookie_record
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.format.catalog import CatalogState
from pybk.storage.format.extent import EXTENT_KEY
from pybk.storage.format.index_rows import FileRow, LedgerRow
from pybk.storage.format.log_file import RecordKind
from pybk.storage.log.recovery import (
    OpenLogFile,
    ReplayedRecord,
    check_control,
    last_prefix,
    load_log_files,
    log_files,
    named_of,
    units_of,
)
from pybk.storage.log.salvage import SalvagedLog
from pybk.values import listed

if TYPE_CHECKING:
    from pybk.storage.volumes import Volumes

SKIPPED: Final = 1 << 32
"""Number of LSNs, ledger ids and creation sequences that lost commits may have used: more than a log ever holds."""


_UNKNOWN: Final = "ledgers that are not listed may have been created in missing commits, and stay unknown"


class LogRemains(NamedTuple):
    """The state of a store after what is left of its log.

    Attributes:
        state: Its ledgers, named records, files and mark. The mark lies after everything that the log may have held.
        open_ended: Ledgers that may have had more entries than are known; the last entry of each is a lost one.
        lost_ids: The ids of ledgers that may have been created in lost commits, ascending.
        problems: The losses, a sentence each.
    """

    state: CatalogState
    open_ended: tuple[int, ...]
    lost_ids: tuple[range, ...]
    problems: tuple[str, ...]


def read_remains(
    volumes: Volumes, state: CatalogState, *, store_id: bytes, durable_lsn: int, end_is_lost: bool
) -> LogRemains:
    """Apply what is left of the log to the state of the last checkpoint.

    Args:
        volumes: The store's directories.
        state: The state in the catalog.
        store_id: The 16 bytes of the store.
        durable_lsn: Highest LSN known to be durable.
        end_is_lost: Whether commits may be missing after the last one although no LSN says so.

    Raises:
        CorruptError: A log file belongs to another store.
        UnsupportedFormatError: A sound header is of another format.
    """
    mark = state.mark
    rows = log_files(volumes, mark.first_log_file_id)
    log = SalvagedLog(
        load_log_files(volumes, rows), first_lsn=mark.next_lsn, durable_lsn=durable_lsn, store_id=store_id
    )
    remains = _Remains(state)
    used: dict[int, FileRow] = {}
    following = mark.next_lsn
    for file, commit in log:
        if commit.lsn != following:
            remains.pass_gap()
        following = commit.lsn + 1
        for unit in units_of(commit.records):
            remains.apply(file, unit)
        used[file.file_id] = rows[file.file_id]._replace(bytes=commit.offset + commit.size)
    if end_is_lost or log.next_lsn != following:
        remains.pass_gap()
    next_ledger_id = remains.next_ledger_id + SKIPPED
    after = mark._replace(
        first_log_file_id=max([mark.first_log_file_id, *(file_id + 1 for file_id in rows)]),
        next_lsn=log.next_lsn + SKIPPED,
        durable_lsn=log.next_lsn + SKIPPED - 1,
        next_file_id=max([mark.next_file_id, *(file_id + 1 for file_id in rows)]),
        next_ledger_id=next_ledger_id,
        next_creation_sequence=remains.next_creation_sequence + SKIPPED,
    )
    open_ended = remains.end_open_ledgers()
    ledgers = dict(sorted(remains.ledgers.items()))
    return LogRemains(
        CatalogState(ledgers, {**state.files, **used}, remains.named, after),
        open_ended,
        tuple(_between(remains.known_ids(), next_ledger_id)),
        (*log.lost, *remains.problems(), _UNKNOWN),
    )


class _Remains:
    """The rows of ledgers and named records while commits are applied to them."""

    def __init__(self, state: CatalogState) -> None:
        self.ledgers = dict(state.ledgers)
        self.named = dict(state.named)
        self.next_ledger_id = state.mark.next_ledger_id
        self.next_creation_sequence = state.mark.next_creation_sequence
        self._passed_a_gap = False
        self._continued: set[int] = set()
        """Ledgers with entries after the last gap, whose last entry is therefore known."""
        self._nameless: set[int] = set()
        """Ledgers that have records but whose metadata are lost."""
        self._deleted: set[int] = set()
        self._dropped: list[str] = []
        self._open_ended: tuple[int, ...] = ()

    def pass_gap(self) -> None:
        """Note that commits are missing between the last one that was applied and the next one."""
        self._passed_a_gap = True
        self._continued.clear()

    def apply(self, file: OpenLogFile, unit: Sequence[ReplayedRecord]) -> None:
        """Apply the records of a unit, or none of them if a control record among them is damaged."""
        self.next_ledger_id = max([self.next_ledger_id, *(record.header.ledger_id + 1 for record in unit)])
        try:
            for record in unit:
                if record.header.kind != RecordKind.ENTRIES:
                    check_control(record, where=file.path)
        except CorruptError as error:
            self._dropped.append(str(error))
            self._passed_a_gap = True
            self._continued.difference_update(record.header.ledger_id for record in unit)
            return
        for record in unit:
            self._apply_record(file, record)

    def _apply_record(self, file: OpenLogFile, record: ReplayedRecord) -> None:
        header = record.header
        ledger_id = header.ledger_id
        if header.kind == RecordKind.NAMED:
            row = named_of(file, record)
            if row.value is None:
                self.named.pop(row.name, None)
            else:
                self.named[row.name] = row
        elif header.kind == RecordKind.LEDGER:
            body = bytes(file.data[record.body_start : record.body_end])
            self._apply_metadata(LedgerMetadata.decode(body, where=file.path))
        elif header.kind == RecordKind.DELETE:
            self.ledgers.pop(ledger_id, None)
            self._nameless.discard(ledger_id)
            self._deleted.add(ledger_id)
        elif header.kind == RecordKind.GROUP:
            return
        elif ledger_id not in self.ledgers:
            self._nameless.add(ledger_id)
        elif header.kind == RecordKind.FORCE:
            self._extend(ledger_id, header.first_entry_id, header.first_entry_id, None)
        else:
            self._apply_entries(file, record)

    def _apply_metadata(self, metadata: LedgerMetadata) -> None:
        row = self.ledgers.get(metadata.ledger_id)
        if row is None:
            if metadata.version and not self._passed_a_gap:
                return  # a change after a delete, which older versions wrote
            row = LedgerRow(metadata, -1, -1, 0)
        if metadata.version >= row.metadata.version:
            row = row._replace(metadata=metadata)
        self.ledgers[metadata.ledger_id] = row
        self._nameless.discard(metadata.ledger_id)
        self.next_creation_sequence = max(self.next_creation_sequence, metadata.creation_sequence + 1)
        if metadata.state is LedgerState.CLOSED:
            last = metadata.last_entry_id
            self._extend(metadata.ledger_id, last, last, metadata.length)

    def _apply_entries(self, file: OpenLogFile, record: ReplayedRecord) -> None:
        header = record.header
        last = header.first_entry_id + header.entry_count - 1
        found = last_prefix(file, record)
        confirmed, length = (-1, None) if found is None else found
        if WriteFlag.DEFERRED_FORCE not in self.ledgers[header.ledger_id].metadata.write_flags:
            confirmed = last
        self._extend(header.ledger_id, last, confirmed, length)
        self._continued.add(header.ledger_id)

    def _extend(self, ledger_id: int, last: int, confirmed: int, length: int | None) -> None:
        """Extend a ledger up to an entry; entries before it may be lost."""
        row = self.ledgers[ledger_id]
        if last > row.last_entry_id and length is not None:
            row = row._replace(length=length)
        self.ledgers[ledger_id] = row._replace(
            last_entry_id=max(row.last_entry_id, last), last_add_confirmed=max(row.last_add_confirmed, confirmed)
        )

    def end_open_ledgers(self) -> tuple[int, ...]:
        """Add a lost entry to each ledger that may have had more; return these ledgers."""
        found = []
        for ledger_id, row in self.ledgers.items():
            metadata = row.metadata
            of_bookie = is_bookie_record(metadata.ledger_type) or EXTENT_KEY in metadata.custom_metadata
            if metadata.state is not LedgerState.CLOSED and ledger_id not in self._continued and not of_bookie:
                end = row.last_entry_id + 1
                self.ledgers[ledger_id] = row._replace(last_entry_id=end, last_add_confirmed=end)
                found.append(ledger_id)
        self._open_ended = tuple(sorted(found))
        return self._open_ended

    def known_ids(self) -> list[int]:
        """Return the ids of the ledgers that exist or are known to be deleted, ascending."""
        return sorted(self._deleted.union(self.ledgers))

    def problems(self) -> list[str]:
        """Return a sentence for each kind of loss, besides the missing commits themselves."""
        found = list(self._dropped)
        if self._open_ended:
            found.append(
                f"{_listed(self._open_ended)} may have had more entries, so one after the last known entry is "
                "listed as lost"
            )
        if self._nameless:
            found.append(
                f"the log has entries of {_listed(sorted(self._nameless))}, but what created it is lost, so they "
                "cannot be read"
            )
        return found


def _between(known: Sequence[int], stop: int) -> Iterator[range]:
    """Yield the ranges of ids before ``stop`` that are not known."""
    start = 0
    for ledger_id in known:
        if start <= ledger_id < stop:
            if start < ledger_id:
                yield range(start, ledger_id)
            start = ledger_id + 1
    yield range(start, stop)


def _listed(ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"ledger {ids[0]}"
    return f"ledgers {listed(ids)}"
