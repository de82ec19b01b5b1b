"""The index: the ledgers, the locations of their entries, and the contents of each file.

It is derived from the catalog and the files, and checked on each use: every value has a checksum that includes its key,
and a missing key counts as absent only if other keys prove its absence. See ``docs/reference/format.md``.

Runs are arrays of ``location_dtype()``, and tile a ledger; no function here changes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from pybk.deferral import np
from pybk.errors import NoSuchEntryError, NoSuchLedgerError, UsageError
from pybk.ledger.ledger_metadata import PolicyMetadata
from pybk.storage import index
from pybk.storage.format.index_rows import (
    CHAIN_HEAD,
    CHAIN_TAIL,
    LAST_KEY,
    MARK_KEY,
    PAGE_LOCATIONS_MAX,
    ChainRow,
    CheckpointMark,
    EncodedLedger,
    FileRow,
    FileUse,
    LedgerRow,
    NamedRow,
    Totals,
    damaged,
    decode_chain_row,
    decode_mark,
    decode_named_value,
    decode_page,
    decode_share,
    decode_state,
    decode_summary,
    decode_use,
    encode_chain_row,
    encode_mark,
    encode_named_value,
    encode_share,
    encode_state,
    encode_use,
    encode_value,
    file_key,
    key_ids,
    ledger_key,
    named_key,
    page_key,
    share_key,
    state_last_entry_id,
    state_metadata_bytes,
)
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, RunLocations, location_dtype
from pybk.storage.io.lmdb_environment import Environment, ReadTransaction, WriteTransaction

if TYPE_CHECKING:
    import numpy.typing as npt

LEDGERS_AT_A_TIME: Final = 1000
"""Rows of ledgers that one transaction reads."""

PAGES_AT_A_TIME: Final = 32
"""Pages that one transaction reads."""

_PAGES_CHANGED_AT_A_TIME: Final = 64
_ENTRIES_OF_A_RUN: Final = ("first", "count", "stride")
"""The fields of a run that say which entries it has."""


class Index:
    """The index of one store.

    Every method that reads raises CorruptError, with the remedy, for a damaged value and for a missing key whose
    existence other keys prove; and UnsupportedFormatError for a value of a newer format.

    Threads: any; at most one ``update`` at a time. A reader sees each update whole or not at all.
    """

    def __init__(self, environment: Environment) -> None:
        """Use an open environment; the caller closes it."""
        self._environment = environment
        self._decoded: tuple[bytes, CheckpointMark] | None = None
        """The mark that was decoded last, and its bytes: a store that is only read looks at it with each ledger."""

    def mark(self) -> CheckpointMark | None:
        """Return the mark of the last checkpoint; None for an index without any row."""
        with self._environment.read() as transaction:
            value, decoded = transaction.get(MARK_KEY), self._decoded
            if value is not None and decoded is not None and value == decoded[0]:
                return decoded[1]
            stored = stored_mark(transaction)
        if stored is None:
            return None
        if value is not None:
            self._decoded = bytes(value), stored[0]
        return stored[0]

    def totals(self) -> Totals:
        """Return the numbers of ledgers and files; zeros for an index without any row."""
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

    def checked_uses(self) -> dict[int, FileUse]:
        """Return all files with the bytes of the records that each still holds, by id.

        Reads every share, about 3 µs each, and checks that none is missing.
        """
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
            found = list(index.problems(transaction))
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
        """Return the bytes by which the index can grow without free space."""
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

    def files(self) -> dict[int, FileRow]:
        """Return all files, by id; checks that none is missing."""
        return {file_id: use.row for file_id, use in file_uses(self._transaction).items()}

    def named(self) -> list[NamedRow]:
        """Return the named records, sorted by name; checks that they are all."""
        return _named_in(self._transaction, "")


class _UnwrittenLedger(NamedTuple):
    """The row of a new ledger that is not written yet, because the next insert probably changes it as its neighbour."""

    ledger_id: int
    link: ChainRow


class IndexUpdate:
    """One update of the index; made by ``Index.update``, and usable only inside its ``with``.

    Any method may raise CorruptError if the index contradicts the change or itself, or StorageFullError; the whole
    update is discarded then.

    Threads: one. Durable: when the ``with`` ends.
    """

    def __init__(self, transaction: WriteTransaction) -> None:
        """Begin an update; an empty index gets the two ends of its chain."""
        self._transaction = transaction
        stored = stored_mark(transaction)
        self._stored = stored
        self._mark: CheckpointMark | None = None
        if stored is None:
            transaction.put(
                ledger_key(CHAIN_HEAD), encode_chain_row(ledger_key(CHAIN_HEAD), ChainRow(CHAIN_HEAD, CHAIN_TAIL, b""))
            )
            transaction.put(
                ledger_key(CHAIN_TAIL), encode_chain_row(ledger_key(CHAIN_TAIL), ChainRow(CHAIN_HEAD, CHAIN_TAIL, b""))
            )
        else:
            self._mark = stored[0]
        totals = Totals(0, 0, 0) if stored is None else stored[1]
        self._ledgers, self._metadata_bytes, self._files, self._named = totals
        self._waiting: _UnwrittenLedger | None = None
        self._uses: dict[int, tuple[int, int]] = {}

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def put_ledger(self, row: LedgerRow) -> None:
        """Insert or replace a ledger's row. Rows with ascending ids that follow each other cost one write each.

        Raises:
            UsageError: The id is not a valid ledger id.
        """
        ledger_id = row.metadata.ledger_id
        if not CHAIN_HEAD < ledger_id < CHAIN_TAIL:
            raise UsageError(f"ledger id {ledger_id} lies outside 0 to {CHAIN_TAIL - 1}")
        state = encode_state(row)
        waiting = self._waiting
        if waiting is not None and waiting.ledger_id < ledger_id < waiting.link.next:
            self._put_link(waiting.ledger_id, waiting.link._replace(next=ledger_id))
            self._insert(ledger_id, ChainRow(waiting.ledger_id, waiting.link.next, state))
            return
        self._write_waiting()
        link = find_ledger(self._transaction, ledger_id)
        if link is not None:
            self._metadata_bytes += len(state) - len(link.state)
            self._put_link(ledger_id, link._replace(state=state))
            return
        previous, following = neighbours(self._transaction, ledger_id)
        self._put_link(previous, chain_row(self._transaction, previous)._replace(next=ledger_id))
        self._insert(ledger_id, ChainRow(previous, following, state))

    def drop_ledger(self, ledger_id: int) -> dict[int, int]:
        """Remove a ledger with its pages and shares.

        Returns:
            The bytes that became free in each file, by file id; empty if the ledger does not exist. Costs O(pages).
        """
        self._write_waiting()
        transaction = self._transaction
        link = find_ledger(transaction, ledger_id)
        if link is None:
            return {}
        freed = self._drop_pages(ledger_id, state_last_entry_id(link.state))
        for file_id, size in freed.items():
            self._change_share(file_id, ledger_id, -size)
            if transaction.get(share_key(file_id, ledger_id)) is not None:
                raise damaged(
                    f"the index says that ledger {ledger_id} has more in file {file_id:016x} than the {size} bytes "
                    f"that its pages name"
                )
        self._put_link(link.previous, chain_row(transaction, link.previous)._replace(next=link.next))
        self._put_link(link.next, chain_row(transaction, link.next)._replace(previous=link.previous))
        transaction.delete(ledger_key(ledger_id))
        self._ledgers -= 1
        self._metadata_bytes -= state_metadata_bytes(link.state)
        return freed

    def _insert(self, ledger_id: int, link: ChainRow) -> None:
        self._waiting = _UnwrittenLedger(ledger_id, link)
        self._ledgers += 1
        self._metadata_bytes += state_metadata_bytes(link.state)

    def _write_waiting(self) -> None:
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            self._put_link(waiting.ledger_id, waiting.link)
            following = waiting.link.next
            self._put_link(following, chain_row(self._transaction, following)._replace(previous=waiting.ledger_id))

    def _put_link(self, ledger_id: int, link: ChainRow) -> None:
        key = ledger_key(ledger_id)
        self._transaction.put(key, encode_chain_row(key, link))

    def _drop_pages(self, ledger_id: int, last: int) -> dict[int, int]:
        """Delete all pages of a ledger, which must tile it up to entry ``last``; return their bytes by file."""
        freed: dict[int, int] = {}
        after = NOTHING
        start, stop = page_key(ledger_id, CHAIN_HEAD), page_key(ledger_id, CHAIN_TAIL)
        while found := list(islice(self._transaction.items(start, stop), _PAGES_CHANGED_AT_A_TIME)):
            for key, value in found:
                runs = decode_page(key, value)
                wrong = untiled(runs, after)
                if wrong is not None:
                    raise damaged(f"the pages of ledger {ledger_id} in the index do not fit: {wrong}")
                after = last_entry(runs)
                for file_id, size in bytes_by_file(runs).items():
                    freed[file_id] = freed.get(file_id, 0) + size
                self._transaction.delete(key)
        if after[0] != last:
            raise damaged(f"the pages of ledger {ledger_id} in the index end with entry {after[0]}, not with {last}")
        return freed

    # ---- runs ----------------------------------------------------------------------------------------------------

    def append_locations(self, ledger_id: int, runs: RunLocations) -> None:
        """Add runs that follow a ledger's last page; the caller puts the row that names the new last entry.

        Costs O(new runs), and the rewriting of at most one page.

        Args:
            ledger_id: The ledger.
            runs: ``(r,)``, sorted; the first follows the last entry that the index knows.
        """
        if not len(runs):
            return
        found = find_page(self._transaction, ledger_id, CHAIN_TAIL)
        wrong = untiled(runs, NOTHING if found is None else last_entry(found[1]))
        if wrong is not None:
            raise damaged(f"runs that do not follow what the index has of ledger {ledger_id}: {wrong}")
        low = 0
        if found is not None and len(found[1]) < PAGE_LOCATIONS_MAX:
            key, page = found
            low = PAGE_LOCATIONS_MAX - len(page)
            self._transaction.put(key, encode_value(key, page.tobytes() + runs[:low].tobytes()))
        self._put_pages(ledger_id, runs[low:])
        for file_id, size in bytes_by_file(runs).items():
            self._change_share(file_id, ledger_id, size)

    def replace_locations(self, ledger_id: int, old: RunLocations, new: RunLocations) -> None:
        """Replace the locations of entries.

        Costs O(runs) and the rewriting of each page that has one of the old runs.

        Args:
            ledger_id: The ledger.
            old: ``(r,)`` sorted runs as the index has them, not necessarily next to each other.
            new: ``(s,)`` sorted runs of the same entries.

        Raises:
            UsageError: The new runs do not hold exactly the entries of the old ones.
        """
        if not len(old) and not len(new):
            return
        if self.replace_places(ledger_id, old, new):
            return
        wrong = differing_entries(old, new) if len(old) and len(new) else f"{len(old)} runs replaced by {len(new)}"
        if wrong is not None:
            raise UsageError(f"ledger {ledger_id}: runs are replaced by runs of the same entries only: {wrong}")
        region: list[RunLocations] = []
        region_end = -1
        done = taken = 0
        while done < len(old):
            page = self._take_page(ledger_id, int(old["first"][done]))
            if int(page["first"][0]) != region_end + 1:
                self._put_region(ledger_id, region)
                region = []
            region_end = last_entry(page)[0]
            until = int(np.searchsorted(old["first"], region_end, side="right"))
            region.append(_without(page, old[done:until], ledger_id))
            upto = int(np.searchsorted(new["first"], region_end, side="right"))
            region.append(new[taken:upto])
            done, taken = until, upto
        self._put_region(ledger_id, region)
        self._change_shares(ledger_id, old, new)

    def replace_places(self, ledger_id: int, old: RunLocations, new: RunLocations) -> bool:
        """Replace runs of a ledger's first page one by one; return False if that is not possible.

        Small ledgers have one page and are moved run by run, which then needs one write and no arithmetic.
        """
        if len(old) != len(new) or any(old[name].tobytes() != new[name].tobytes() for name in _ENTRIES_OF_A_RUN):
            return False
        page = self._transaction.get(key := page_key(ledger_id, 0))
        if page is None:
            return False
        runs = decode_page(key, page)
        if last_entry(old)[0] > last_entry(runs)[0]:
            return False
        places = np.searchsorted(runs["first"], old["first"])
        if int(places[-1]) >= len(runs) or runs[places].tobytes() != old.tobytes():
            return False
        if len(places) > 1 and not (np.diff(places) > 0).all():
            return False
        runs = runs.copy()
        runs[places] = new
        self._transaction.put(key, encode_value(key, runs.tobytes()))
        self._change_shares(ledger_id, old, new)
        return True

    def _take_page(self, ledger_id: int, entry_id: int) -> RunLocations:
        """Remove the page that holds an entry and return its runs."""
        found = find_page(self._transaction, ledger_id, entry_id)
        if found is None or last_entry(found[1])[0] < entry_id:
            raise damaged(f"no page of the index holds ledger {ledger_id} entry {entry_id}, which is to be moved")
        self._transaction.delete(found[0])
        return found[1]

    def _put_region(self, ledger_id: int, parts: list[RunLocations]) -> None:
        """Write the runs that replace neighbouring pages; merge them with the preceding page if all fit one page."""
        runs = joined(parts)
        if not len(runs):
            return
        before = find_page(self._transaction, ledger_id, int(runs["first"][0]))
        if before is not None and len(before[1]) + len(runs) <= PAGE_LOCATIONS_MAX:
            self._transaction.delete(before[0])
            runs = joined([before[1], runs])
        self._put_pages(ledger_id, runs)

    def _put_pages(self, ledger_id: int, runs: RunLocations) -> None:
        for low in range(0, len(runs), PAGE_LOCATIONS_MAX):
            page = runs[low : low + PAGE_LOCATIONS_MAX]
            key = page_key(ledger_id, int(page["first"][0]))
            self._transaction.put(key, encode_value(key, page.tobytes()))

    # ---- files ---------------------------------------------------------------------------------------------------

    def put_file(self, row: FileRow) -> None:
        """Insert or replace a file's row; the shares of ledgers in the file are kept."""
        self._apply_share_changes(row.file_id)
        key = file_key(row.file_id)
        value = self._transaction.get(key)
        ledgers = live_bytes = 0
        if value is None:
            self._files += 1
        else:
            _, ledgers, live_bytes = decode_use(key, value)
        self._transaction.put(key, encode_use(key, FileUse(row, ledgers, live_bytes)))

    def drop_file(self, file_id: int) -> bool:
        """Remove a file's row; return whether it existed.

        Raises:
            UsageError: The file has live entries.
        """
        self._apply_share_changes(file_id)
        key = file_key(file_id)
        value = self._transaction.get(key)
        if value is None:
            return False
        _, ledgers, live_bytes = decode_use(key, value)
        if ledgers or live_bytes:
            raise UsageError(
                f"file {file_id:016x} still holds {live_bytes} bytes of {ledgers} ledgers; move or drop them first"
            )
        self._transaction.delete(key)
        self._files -= 1
        return True

    def _change_shares(self, ledger_id: int, old: RunLocations, new: RunLocations) -> None:
        """Subtract the bytes of removed runs of a ledger from their files, and add those of new runs to theirs."""
        sizes = bytes_by_file(new)
        for file_id, size in bytes_by_file(old).items():
            sizes[file_id] = sizes.get(file_id, 0) - size
        for file_id, size in sizes.items():
            self._change_share(file_id, ledger_id, size)

    def _change_share(self, file_id: int, ledger_id: int, size: int) -> None:
        """Change the number of bytes that a ledger has in a file."""
        if size == 0:
            return
        key = share_key(file_id, ledger_id)
        value = self._transaction.get(key)
        before = 0 if value is None else decode_share(key, value)
        share = before + size
        if share < 0:
            raise damaged(
                f"the index says that ledger {ledger_id} has {before} bytes in file {file_id:016x}, but {-size} are "
                f"to leave it"
            )
        if share:
            self._transaction.put(key, encode_share(key, share))
        else:
            self._transaction.delete(key)
        ledgers, live_bytes = self._uses.get(file_id, (0, 0))
        self._uses[file_id] = ledgers + (share > 0) - (before > 0), live_bytes + size

    def _apply_share_changes(self, file_id: int) -> None:
        """Update a file's row after changes of its shares."""
        change = self._uses.get(file_id)
        if change is None:
            return
        key = file_key(file_id)
        value = self._transaction.get(key)
        if value is not None:
            del self._uses[file_id]
            row, ledgers, live_bytes = decode_use(key, value)
            self._transaction.put(key, encode_use(key, FileUse(row, ledgers + change[0], live_bytes + change[1])))

    # ---- named records -------------------------------------------------------------------------------------------

    def put_named(self, row: NamedRow) -> None:
        """Insert or replace a named record; remove it if it has no value."""
        key = named_key(row.name)
        before = self._transaction.get(key) is not None
        if row.value is None:
            self._transaction.delete(key)
        else:
            self._transaction.put(key, encode_named_value(key, row))
        self._named += (row.value is not None) - before

    # ---- the whole -----------------------------------------------------------------------------------------------

    def put_mark(self, mark: CheckpointMark) -> None:
        """Set the mark."""
        self._mark = mark

    def finish(self) -> None:
        """Write the rows that are still in memory; called when the ``with`` ends.

        Raises:
            CorruptError: A run lies in a file without a row.
            UsageError: The index has no mark yet.
        """
        self._write_waiting()
        for file_id in list(self._uses):
            self._apply_share_changes(file_id)
        if self._uses:
            raise damaged(
                f"entries lie in file {min(self._uses):016x}, which has no row in the index, and none was put"
            )
        if self._mark is None:
            raise UsageError("the first update of an index must put its mark")
        totals = Totals(self._ledgers, self._metadata_bytes, self._files, self._named)
        if (self._mark, totals) != self._stored:
            self._transaction.put(b"M", encode_mark(self._mark, totals))


def _without(page: RunLocations, old: RunLocations, ledger_id: int) -> RunLocations:
    """Return a page's runs without some of them, each of which must be in the page unchanged."""
    places = np.searchsorted(page["first"], old["first"], side="right") - 1
    if page[places].tobytes() != old.tobytes():
        raise damaged(
            f"the index does not have the runs of ledger {ledger_id} from entry {int(old['first'][0])} that are to be "
            f"moved"
        )
    return np.delete(page, places)


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


def stored_mark(transaction: ReadTransaction) -> tuple[CheckpointMark, Totals] | None:
    """Return the mark and the totals; None for an index without any row.

    Raises:
        CorruptError: The mark is damaged, or missing although other rows exist.
    """
    value = transaction.get(MARK_KEY)
    if value is not None:
        return decode_mark(value)
    other = transaction.floor(LAST_KEY)
    if other is not None:
        raise damaged(f"the index has no mark, but other rows, as key {other[0].hex()}")
    return None


def find_ledger(transaction: ReadTransaction, ledger_id: int) -> ChainRow | None:
    """Return a ledger's row of the chain; None if its neighbours prove that it has none.

    Raises:
        CorruptError: The row is damaged, or it is missing although its neighbours do not name each other.
    """
    key = ledger_key(ledger_id)
    value = transaction.get(key)
    if value is not None:
        return decode_chain_row(key, value)
    neighbours(transaction, ledger_id)
    return None


def neighbours(transaction: ReadTransaction, ledger_id: int) -> tuple[int, int]:
    """Return the two ids around the gap after ``ledger_id``: the last row up to it, and the first after it.

    Raises:
        CorruptError: They do not name each other, so a row between them is missing.
    """
    found = transaction.floor(ledger_key(ledger_id))
    if found is None or found[0][:1] != b"L":
        raise damaged(f"the index has no ledger row up to id {ledger_id}, not even the chain's beginning")
    (previous,) = key_ids(found[0])
    following = decode_chain_row(*found).next
    back = chain_row(transaction, following).previous
    if back != previous:
        raise damaged(
            f"ledger {previous} names ledger {following} as the next in the index, but that names ledger {back} as "
            f"the one before"
        )
    return previous, following


def chain_row(transaction: ReadTransaction, ledger_id: int) -> ChainRow:
    """Return a row of the chain that another row names; raise CorruptError if it is missing."""
    key = ledger_key(ledger_id)
    value = transaction.get(key)
    if value is None:
        raise damaged(f"the index has no row for ledger {ledger_id}, which another row names")
    return decode_chain_row(key, value)


def find_page(transaction: ReadTransaction, ledger_id: int, entry_id: int) -> tuple[bytes, RunLocations] | None:
    """Return key and runs of the last page of a ledger that begins at or before an entry, None if none does."""
    found = transaction.floor(page_key(ledger_id, entry_id))
    if found is None or found[0][:9] != page_key(ledger_id, 0)[:9]:
        return None
    return found[0], decode_page(*found)


def file_uses(transaction: ReadTransaction) -> dict[int, FileUse]:
    """Return the rows of all files, by id.

    Raises:
        CorruptError: A row is damaged, or the number of rows differs from that in the mark.
    """
    stored = stored_mark(transaction)
    uses = {}
    for key, value in transaction.items(b"F", b"G"):
        use = decode_use(key, value)
        uses[use.row.file_id] = use
    counted = 0 if stored is None else stored[1].files
    if len(uses) != counted:
        raise damaged(f"the index has {len(uses)} files, but counts {counted}")
    return uses


NOTHING: Final = (-1, 1)
"""Last entry and stride before a ledger's first run."""

_FEW: Final = 64
"""The number of runs up to which Python adds numbers faster than numpy."""

_Ids: TypeAlias = "npt.NDArray[np.int64]"


def last_entry(runs: RunLocations) -> tuple[int, int]:
    """Return the last entry id of a non-empty run array, and the stride of its last run."""
    first, count, stride, *_ = runs[-1].item()
    return first + (count - 1) * stride, stride


def untiled(runs: RunLocations, after: tuple[int, int]) -> str | None:
    """Return where runs fail to tile a ledger: unsorted, overlapping, or with gaps other than those of a stride.

    Args:
        runs: ``(r,)``, not empty.
        after: Last entry and stride before them, as from ``last_entry``.

    Returns:
        The problem, None if there is none. Costs about a microsecond for one run.
    """
    first, count, stride, *_ = runs[0].item()
    if count < 1 or stride < 1:
        return f"a run of {count} entries by stride {stride} at entry {first}"
    if first != after[0] + 1 and (first <= after[0] or (stride == 1 and after[1] == 1)):
        return f"entry {first} follows entry {after[0]}"
    if len(runs) == 1:
        return None
    wrong = _disordered(runs)
    if wrong is None:
        firsts, counts, strides = _columns(runs)
        nexts = firsts + strides * (counts - 1) + 1
        gaps = np.flatnonzero((firsts[1:] != nexts[:-1]) & (strides[1:] == 1) & (strides[:-1] == 1))
        if gaps.size:
            wrong = f"entry {firsts[gaps[0] + 1]} follows entry {nexts[gaps[0]] - 1}"
    return wrong


def bytes_by_file(runs: RunLocations) -> dict[int, int]:
    """Return the bytes of the records of some runs, headers included, by the file they lie in."""
    if len(runs) > _FEW:
        files, inverse = np.unique(runs["file"], return_inverse=True)
        sums = np.bincount(inverse, weights=runs["body"].astype(np.float64) + RECORD_HEADER_BYTES)
        return dict(zip(files.tolist(), sums.astype(np.int64).tolist(), strict=True))
    found: dict[int, int] = {}
    for file_id, body in zip(runs["file"].tolist(), runs["body"].tolist(), strict=True):
        found[file_id] = found.get(file_id, 0) + RECORD_HEADER_BYTES + body
    return found


def differing_entries(one: RunLocations, other: RunLocations) -> str | None:
    """Return how the entries of two sorted, non-empty run arrays differ; None if they are the same.

    Costs O(runs) where strides are 1, else O(entries) in time and memory.
    """
    wrong = _disordered(one) or _disordered(other)
    if wrong is not None:
        return wrong
    if _plain(one) and _plain(other):
        same = np.array_equal(_stretches(one), _stretches(other))
    else:
        same = np.array_equal(_entry_ids(one), _entry_ids(other))
    if same:
        return None
    return (
        f"{len(one)} runs from entry {int(one['first'][0])} to {last_entry(one)[0]} hold other entries than "
        f"{len(other)} runs from {int(other['first'][0])} to {last_entry(other)[0]}"
    )


def by_file(runs: RunLocations) -> list[RunLocations]:
    """Split sorted runs where the file changes."""
    if not len(runs):
        return []
    return np.split(runs, np.flatnonzero(np.diff(runs["file"].astype(np.int64))) + 1)


def joined(parts: list[RunLocations]) -> RunLocations:
    """Return runs of several arrays as one sorted array, empty for none."""
    runs = np.concatenate([np.empty(0, location_dtype()), *parts])
    return runs[np.argsort(runs["first"], kind="stable")]


def _columns(runs: RunLocations) -> tuple[_Ids, _Ids, _Ids]:
    return runs["first"].astype(np.int64), runs["count"].astype(np.int64), runs["stride"].astype(np.int64)


def _disordered(runs: RunLocations) -> str | None:
    """Return where runs are empty, unsorted or overlap; None if nowhere."""
    firsts, counts, strides = _columns(runs)
    empty = np.flatnonzero((counts < 1) | (strides < 1))
    if empty.size:
        return f"a run of {counts[empty[0]]} entries by stride {strides[empty[0]]} at entry {firsts[empty[0]]}"
    lasts = firsts + strides * (counts - 1)
    overlaps = np.flatnonzero(firsts[1:] <= lasts[:-1])
    if overlaps.size:
        return f"entry {firsts[overlaps[0] + 1]} follows entry {lasts[overlaps[0]]}"
    return None


def _plain(runs: RunLocations) -> bool:
    return bool(((runs["stride"] == 1) | (runs["count"] == 1)).all())


def _stretches(runs: RunLocations) -> _Ids:
    """Return first and last entry of each stretch of consecutive entries, ``(2, s)``, of plain runs."""
    firsts, counts, _ = _columns(runs)
    ends = firsts + counts
    breaks = np.flatnonzero(firsts[1:] != ends[:-1])
    return np.stack((firsts[np.r_[0, breaks + 1]], ends[np.r_[breaks, len(runs) - 1]]))


def _entry_ids(runs: RunLocations) -> _Ids:
    firsts, counts, strides = _columns(runs)
    starts = np.cumsum(counts) - counts
    number = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return np.asarray(np.repeat(firsts, counts) + number * np.repeat(strides, counts), np.int64)
