"""The index: the ledgers, the locations of their entries, and the contents of each file.

It is derived from the catalog and the files, and checked on each use: every value has a checksum that includes its key,
and a missing key counts as absent only if other keys prove its absence. See ``docs/reference/format.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from pybk.errors import NoSuchEntryError, NoSuchLedgerError
from pybk.ledger.ledger_metadata import PolicyMetadata
from pybk.storage.format.index_rows import (
    CHAIN_HEAD,
    CHAIN_TAIL,
    CheckpointMark,
    EncodedLedger,
    FileRow,
    FileUse,
    LedgerRow,
    NamedRow,
    Totals,
    damaged,
    decode_chain_row,
    decode_named_value,
    decode_page,
    decode_share,
    decode_state,
    decode_summary,
    entries_key,
    key_ids,
    ledger_key,
    named_key,
    page_key,
    share_key,
    state_last_entry_id,
)
from pybk.storage.format.record import RunLocations
from pybk.storage.index.check import problems
from pybk.storage.index.locations import NOTHING, last_entry, untiled
from pybk.storage.index.search import file_uses, find_ledger, find_page, neighbours, stored_mark
from pybk.storage.index.update import IndexUpdate
from pybk.storage.io.lmdb_environment import Environment, ReadTransaction

LEDGERS_AT_A_TIME: Final = 1000
"""Rows of ledgers that one transaction reads."""

PAGES_AT_A_TIME: Final = 32
"""Pages that one transaction reads."""


class Index:
    """The index of one store.

    Every method that reads raises CorruptError, with the remedy, for a damaged value and for a missing key whose
    existence other keys prove; and UnsupportedFormatError for a value of a newer format.

    Threads: any; at most one ``update`` at a time. A reader sees each update whole or not at all.
    """

    def __init__(self, environment: Environment) -> None:
        """Use an open environment; the caller closes it."""
        self._environment = environment

    def mark(self) -> CheckpointMark | None:
        """Return the mark of the last checkpoint; None for an index without any row."""
        with self._environment.read() as transaction:
            stored = stored_mark(transaction)
        return None if stored is None else stored[0]

    def totals(self) -> Totals:
        """Return how many ledgers and files there are; zeros for an index without any row."""
        with self._environment.read() as transaction:
            stored = stored_mark(transaction)
        return Totals(0, 0, 0) if stored is None else stored[1]

    def ledger(self, ledger_id: int) -> LedgerRow | None:
        """Return a ledger's row, None if its neighbours prove that it has none."""
        if not CHAIN_HEAD < ledger_id < CHAIN_TAIL:
            return None
        with self._environment.read() as transaction:
            link = find_ledger(transaction, ledger_id)
        return None if link is None else decode_state(ledger_id, link.state, where="index")

    def ledgers(self, after: int = -1) -> Iterator[LedgerRow]:
        """Yield the rows of all ledgers with an id above ``after``, ascending.

        Reads 1000 at a time, each time from one snapshot; ledgers that are created or dropped meanwhile may be missing.
        """
        for ledger_id, state in self._states(after):
            yield decode_state(ledger_id, state, where="index")

    def encoded_ledgers(self) -> Iterator[EncodedLedger]:
        """Yield the encoded rows of all ledgers, as ``ledgers`` does, but in a fifth of the time."""
        for ledger_id, state in self._states(-1):
            yield EncodedLedger(ledger_id, decode_summary(ledger_id, state, where="index").version, state)

    def _states(self, after: int) -> Iterator[tuple[int, bytes]]:
        while after < CHAIN_TAIL:
            with self._environment.read() as transaction:
                found, after = _ledgers_after(transaction, max(after, CHAIN_HEAD), LEDGERS_AT_A_TIME)
            yield from found

    def summaries(self, after: int, count: int) -> list[PolicyMetadata]:
        """Return the next ledgers with an id above ``after``, ascending, at most ``count``; none at the end."""
        if after >= CHAIN_TAIL:
            return []
        with self._environment.read() as transaction:
            found, _ = _ledgers_after(transaction, max(after, CHAIN_HEAD), count)
        return [decode_summary(ledger_id, state, where="index") for ledger_id, state in found]

    def page(self, ledger_id: int, entry_id: int) -> RunLocations:
        """Return the page of runs whose range holds an entry that was checkpointed.

        Returns:
            Up to 1024 runs, sorted and read-only. One lookup.

        Raises:
            NoSuchLedgerError: There is no such ledger, perhaps no more.
            NoSuchEntryError: The ledger has no such entry, or it is not checkpointed.
        """
        with self._environment.read() as transaction:
            found = find_page(transaction, ledger_id, entry_id)
            if found is not None and last_entry(found[1])[0] >= entry_id:
                return found[1]
            link = find_ledger(transaction, ledger_id)
        if link is None:
            raise NoSuchLedgerError(f"ledger {ledger_id} is not in the index: never created, or deleted")
        last = state_last_entry_id(link.state)
        if not 0 <= entry_id <= last:
            raise NoSuchEntryError(
                f"ledger {ledger_id} entry {entry_id} is not in the index, which knows entries 0 to {last}"
            )
        raise damaged(
            f"no page of the index holds ledger {ledger_id} entry {entry_id}, though it knows entries 0 to {last}"
        )

    def pages(self, ledger_id: int) -> Iterator[RunLocations]:
        """Yield all pages of a ledger's runs, by ascending entry id; checks that none is missing.

        Reads 32 pages (1 MiB) at a time, each time from one snapshot. Entries that are moved meanwhile may come twice.

        Raises:
            NoSuchLedgerError: There is no such ledger, perhaps no more.
        """
        after = NOTHING
        while True:
            with self._environment.read() as transaction:
                link = find_ledger(transaction, ledger_id)
                if link is None:
                    raise NoSuchLedgerError(f"ledger {ledger_id} is not in the index: never created, or deleted")
                last = state_last_entry_id(link.state)
                found = _pages_after(transaction, ledger_id, after, last)
            if not found:
                return
            after = last_entry(found[-1])
            yield from found
            if after[0] == last:
                return

    def files(self) -> dict[int, FileRow]:
        """Return all files, by id; checks that none is missing."""
        with self._environment.read() as transaction:
            return {file_id: use.row for file_id, use in file_uses(transaction).items()}

    def file_ledgers(self, file_id: int) -> Iterator[tuple[int, int]]:
        """Yield the ledgers that have entries in a file, ascending, with the bytes of their records there.

        Checks that none is missing; yields nothing for an unknown file. Takes memory for all of them.
        """
        with self._environment.read() as transaction:
            shares = _shares_of_file(transaction, file_id, file_uses(transaction))
        for (_, ledger_id), share in shares.items():
            yield ledger_id, share

    def ledgers_in(self, file_ids: Iterable[int]) -> set[int]:
        """Return the ledgers that have entries in any of these files; checks that none is missing."""
        with self._environment.read() as transaction:
            uses = file_uses(transaction)
            return {ledger for file_id in file_ids for _, ledger in _shares_of_file(transaction, file_id, uses)}

    def file_bytes_live(self) -> dict[int, int]:
        """Return the bytes of the records that each file still holds, by file id.

        Reads every share, about 3 µs each, and checks that none is missing.
        """
        return {file_id: use.live_bytes for file_id, use in self.checked_uses().items()}

    def checked_uses(self) -> dict[int, FileUse]:
        """Return all files with their live bytes, by id; checked as ``file_bytes_live`` does."""
        with self._environment.read() as transaction:
            uses = file_uses(transaction)
            shares = _shares(transaction, b"X", b"Y")
        by_file: dict[int, dict[tuple[int, ...], int]] = {file_id: {} for file_id in uses}
        for ids, share in shares.items():
            by_file.setdefault(ids[0], {})[ids] = share
        for file_id, mine in by_file.items():
            _check_shares(file_id, uses.get(file_id), mine)
        return uses

    def check(self) -> Iterator[str]:
        """Read a snapshot of the whole index and yield its problems, each as a sentence.

        Holds one read transaction until all is read; memory grows with the ledgers and shares, not with the entries.
        """
        with self._environment.read() as transaction:
            found = list(problems(transaction))
        yield from found

    def named(self, name: str) -> NamedRow | None:
        """Return a named record as of the last checkpoint, None if it does not exist."""
        key = named_key(name)
        with self._environment.read() as transaction:
            value = transaction.get(key)
        return None if value is None else decode_named_value(key, value)

    def all_named(self, prefix: str = "") -> list[NamedRow]:
        """Return the named records whose names begin with ``prefix``, sorted by name.

        Without a prefix they are checked to be all.
        """
        with self._environment.read() as transaction:
            return _named_in(transaction, prefix)

    def reserved_bytes(self) -> int:
        """Return by how many bytes the index can grow without free space."""
        return self._environment.reserved_bytes()

    @contextmanager
    def snapshot(self) -> Iterator[IndexSnapshot]:
        """Provide a snapshot of the index, for one thread; LMDB keeps its pages until the ``with`` ends."""
        with self._environment.read() as transaction:
            yield IndexSnapshot(transaction)

    @contextmanager
    def update(self) -> Iterator[IndexUpdate]:
        """Change the index atomically: durably when the ``with`` ends, and not at all if it ends by an exception.

        The first update of an index must put its mark.

        Raises:
            CorruptError: The index contradicts the change or itself.
            StorageFullError: There is no space; the index was not changed.
            StorageFailedError: The commit failed; the index was changed completely or not at all.
        """
        with self._environment.write() as transaction:
            update = IndexUpdate(transaction)
            yield update
            update.finish()


class IndexSnapshot:
    """One state of the index. Threads: one. Its methods raise as those of ``Index``."""

    def __init__(self, transaction: ReadTransaction) -> None:
        self._transaction = transaction

    def mark(self) -> CheckpointMark | None:
        """Return the mark of the last checkpoint; None for an index without any row."""
        stored = stored_mark(self._transaction)
        return None if stored is None else stored[0]

    def ledgers(self) -> Iterator[LedgerRow]:
        """Yield the rows of all ledgers, ascending."""
        after = -1
        while after < CHAIN_TAIL:
            found, after = _ledgers_after(self._transaction, max(after, CHAIN_HEAD), LEDGERS_AT_A_TIME)
            for ledger_id, state in found:
                yield decode_state(ledger_id, state, where="index")

    def named(self) -> list[NamedRow]:
        """Return the named records, sorted by name; checks that they are all."""
        return _named_in(self._transaction, "")


def _named_in(transaction: ReadTransaction, prefix: str) -> list[NamedRow]:
    """Return the named records whose names begin with ``prefix``, sorted; without a prefix checked to be all."""
    start = named_key(prefix)
    stored = stored_mark(transaction)
    rows = []
    for key, value in transaction.items(start, b"O"):
        if not key.startswith(start):
            break
        rows.append(decode_named_value(key, value))
    count = 0 if stored is None else stored[1].named
    if not prefix and len(rows) != count:
        raise damaged(f"the index counts {count} named records, but has {len(rows)}")
    return rows


def _ledgers_after(transaction: ReadTransaction, after: int, count: int) -> tuple[list[tuple[int, bytes]], int]:
    """Return the next ledgers with their encoded rows, and the id to continue after, ``CHAIN_TAIL`` at the end."""
    found: list[tuple[int, bytes]] = []
    previous, expected = neighbours(transaction, after)
    for key, value in transaction.items(ledger_key(after + 1), b"M"):
        (ledger_id,) = key_ids(key)
        link = decode_chain_row(key, value)
        if ledger_id != expected or link.previous != previous:
            raise damaged(
                f"the index names ledger {expected} after ledger {previous}, but has ledger {ledger_id} after ledger "
                f"{link.previous}"
            )
        if ledger_id == CHAIN_TAIL:
            return found, CHAIN_TAIL
        found.append((ledger_id, link.state))
        if len(found) == count:
            return found, ledger_id
        previous, expected = ledger_id, link.next
    raise damaged(f"the index ends after ledger {previous}, which names ledger {expected} as the next")


def _pages_after(transaction: ReadTransaction, ledger_id: int, after: tuple[int, int], last: int) -> list[RunLocations]:
    """Return the next pages, from the one that holds or follows the entry after ``after``; none at the end."""
    found: list[RunLocations] = []
    start = after[0] + 1
    if start > last:
        return found
    holding = find_page(transaction, ledger_id, start)
    if holding is not None and last_entry(holding[1])[0] >= start:
        start = int(holding[1]["first"][0])
        after = (start - 1, 1)
    for key, value in transaction.items(page_key(ledger_id, start), page_key(ledger_id, CHAIN_TAIL)):
        runs = decode_page(key, value)
        wrong = untiled(runs, after)
        if wrong is not None:
            raise damaged(f"the pages of ledger {ledger_id} in the index do not fit: {wrong}")
        found.append(runs)
        after = last_entry(runs)
        if len(found) == PAGES_AT_A_TIME and after[0] < last:
            return found
    if after[0] != last:
        raise damaged(f"the pages of ledger {ledger_id} in the index end with entry {after[0]}, not with {last}")
    return found


def _shares(transaction: ReadTransaction, start: bytes, stop: bytes) -> dict[tuple[int, ...], int]:
    """Return the shares between two keys by (file id, ledger id)."""
    return {key_ids(key): decode_share(key, value) for key, value in transaction.items(start, stop)}


def _shares_of_file(
    transaction: ReadTransaction, file_id: int, uses: Mapping[int, FileUse]
) -> dict[tuple[int, ...], int]:
    """Return the shares of one file by (file id, ledger id); checks that none is missing."""
    shares = _shares(transaction, share_key(file_id, CHAIN_HEAD), share_key(file_id, CHAIN_TAIL))
    _check_shares(file_id, uses.get(file_id), shares)
    return shares


def _check_shares(file_id: int, use: FileUse | None, shares: dict[tuple[int, ...], int]) -> None:
    """Raise CorruptError unless these are all the shares that a file's row counts."""
    counted = (0, 0) if use is None else (use.ledgers, use.live_bytes)
    there = (len(shares), sum(shares.values()))
    if there != counted:
        raise damaged(
            f"the index counts {counted[0]} ledgers with {counted[1]} bytes in file {file_id:016x}, but names "
            f"{there[0]} with {there[1]} bytes"
        )


__all__ = ["FileRow", "Index", "IndexUpdate", "LedgerRow", "CheckpointMark", "Totals", "entries_key"]
