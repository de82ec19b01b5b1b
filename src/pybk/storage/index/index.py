"""The index: the ledgers, the locations of their entries, and the contents of each file.

It is derived from the catalog and the files, and checked on each use: every value has a checksum that includes its key,
and a missing key counts as absent only if other keys prove its absence. See ``docs/reference/format.md``.

Runs are arrays of ``location_dtype()``, and tile a ledger; no function here changes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from pybk.deferral import np
from pybk.errors import NoSuchEntryError, NoSuchLedgerError
from pybk.ledger.ledger_metadata import PolicyMetadata
from pybk.storage import index
from pybk.storage.format.index_rows import (
    CHAIN_HEAD,
    CHAIN_TAIL,
    LAST_KEY,
    MARK_KEY,
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
    key_ids,
    ledger_key,
    named_key,
    page_key,
    share_key,
    state_last_entry_id,
)
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, RunLocations, location_dtype
from pybk.storage.io.lmdb_environment import Environment, ReadTransaction

if TYPE_CHECKING:
    import numpy.typing as npt

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
    def update(self) -> Iterator[index.IndexUpdate]:
        """Change the index atomically: durably when the ``with`` ends, and not at all if it ends by an exception.

        The first update of an index must put its mark.

        Raises:
            CorruptError: The index contradicts the change or itself.
            StorageFullError: There is no space; the index was not changed.
            StorageFailedError: The commit failed; the index was changed completely or not at all.
        """
        with self._environment.write() as transaction:
            update = index.IndexUpdate(transaction)
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
