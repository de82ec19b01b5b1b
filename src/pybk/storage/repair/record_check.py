"""Check the records of one ledger of an open store, a piece at a time, while the store is used.

The index says where a record lies, and a checkpoint, a compaction or a move may change that at any moment. So a record
counts as damaged only if the index, read again after the failed check, still names the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pybk.errors import NoSuchLedgerError, StorageError, StorageRefusedError
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, RunLocations
from pybk.storage.io.filesystem import PAGE_BYTES
from pybk.storage.repair.inspection import RecordReader
from pybk.storage.store_reader import READ_TRIES, StoreReader, take_locations

PIECE_BYTES: Final = 1 << 20
"""About how many bytes of records are checked at a time."""

_HEADERS: Final = 256
"""Records whose headers are checked at a time."""


class DamagedEntries(NamedTuple):
    """Entries of a ledger that are stored and cannot be read, or have a wrong checksum.

    Attributes:
        ledger_id: The ledger.
        first_entry_id: The first entry.
        last_entry_id: The last entry, inclusive.
        problem: The damage, with its place.
    """

    ledger_id: int
    first_entry_id: int
    last_entry_id: int
    problem: str


class CheckedPiece(NamedTuple):
    """The result of the check of some records.

    Attributes:
        next_entry_id: The entry to continue with; None if the ledger ends before, or is deleted.
        read_bytes: Bytes that were read, about.
        damaged: The damaged records.
    """

    next_entry_id: int | None
    read_bytes: int
    damaged: tuple[DamagedEntries, ...]


def check_piece(store: StoreReader, descriptor: LedgerDescriptor, first: int, *, deep: bool) -> CheckedPiece:
    """Check the records of a ledger from the one that holds an entry on, about ``PIECE_BYTES``, at least one record.

    Args:
        store: The store, live or read-only.
        descriptor: The ledger.
        first: The entry.
        deep: Read the records, past the page cache, and check their checksums. Otherwise only their headers are read,
            and compared with the index.

    Raises:
        StorageRefusedError: The operating system has no free descriptor or memory now; nothing was checked.
        UsageError: A record is compressed and the extra ``pybk[zstd]`` is not installed.

    Threads: any.
    """
    last = descriptor.last_durable
    check = _bodies if deep else _headers
    for attempt in range(READ_TRIES):
        if first > last or descriptor.deleted:
            return CheckedPiece(None, 0, ())
        try:
            runs = store.locations_from(descriptor, first)
        except NoSuchLedgerError:
            return CheckedPiece(None, 0, ())
        except StorageRefusedError:
            raise
        except StorageError as error:  # the index does not say where the rest is
            return CheckedPiece(None, 0, (DamagedEntries(descriptor.ledger_id, first, last, str(error)),))
        runs = take_locations(runs, PIECE_BYTES, span_max=PIECE_BYTES)[: None if deep else _HEADERS]
        try:
            size, damaged = check(store, descriptor.ledger_id, runs)
        except (KeyError, FileNotFoundError):
            if attempt < READ_TRIES - 1:
                store.refresh(descriptor)
                continue
            size, damaged = _one_by_one(check, store, descriptor.ledger_id, runs)
        if damaged and not _same(runs, store, descriptor, first):
            store.refresh(descriptor)
            continue
        found = tuple(
            DamagedEntries(descriptor.ledger_id, *_range_of(runs, number), problem) for number, problem in damaged
        )
        after = _range_of(runs, len(runs) - 1)[1] + 1
        return CheckedPiece(after if after <= last else None, size, found)
    return CheckedPiece(first, 0, ())  # the ledger is moved at this moment: the caller comes back


def _one_by_one(
    check: Callable[[StoreReader, int, RunLocations], tuple[int, list[tuple[int, str]]]],
    store: StoreReader,
    ledger_id: int,
    runs: RunLocations,
) -> tuple[int, list[tuple[int, str]]]:
    """Check records, at least one of whose files is missing, one by one; return as ``_bodies`` does."""
    size, damaged = 0, []
    for number in range(len(runs)):
        try:
            read, found = check(store, ledger_id, runs[number : number + 1])
        except (KeyError, FileNotFoundError) as error:
            damaged.append((number, f"its file is missing: {error}"))
        else:
            size += read
            damaged += [(number, problem) for _, problem in found]
    return size, damaged


def _bodies(store: StoreReader, ledger_id: int, runs: RunLocations) -> tuple[int, list[tuple[int, str]]]:
    """Check the checksums of some records; return the bytes read, and which records are damaged and why."""
    size = int(runs["body"].sum()) + RECORD_HEADER_BYTES * len(runs)
    tier = store.volumes.tier_of(store.volumes.rows[int(runs["file"][0])])

    def load(part: RunLocations) -> None:
        while len(part):
            part = part[len(tier.load(store, ledger_id, part, direct=True, check=True).runs) :]

    if _problem_of(lambda: load(runs)) is None:
        return size, []
    problems = [(number, _problem_of(lambda at=number: load(runs[at : at + 1]))) for number in range(len(runs))]  # type: ignore[misc]
    return size, [(number, problem) for number, problem in problems if problem is not None]


def _headers(store: StoreReader, ledger_id: int, runs: RunLocations) -> tuple[int, list[tuple[int, str]]]:
    """Check the headers of some records; return as ``_bodies`` does."""
    reader = RecordReader(store)
    damaged = []
    for number, run in enumerate(runs.tolist()):
        problem = _problem_of(lambda run=run: reader.check_header(ledger_id, run))  # type: ignore[misc]
        if problem is not None:
            damaged.append((number, problem))
    return PAGE_BYTES * len(runs), damaged


def _problem_of(check: Callable[[], None]) -> str | None:
    """Return the damage that a check found, None for none; a refusal of the system is raised, because it may pass."""
    try:
        check()
    except StorageRefusedError:
        raise
    except StorageError as error:
        return str(error)
    return None


def _same(runs: RunLocations, store: StoreReader, descriptor: LedgerDescriptor, first: int) -> bool:
    """Return whether the index still names the places of some records, from one that holds an entry on."""
    store.refresh(descriptor)
    try:
        now = store.locations_from(descriptor, first)[: len(runs)]
    except NoSuchLedgerError:
        return False
    return bool(len(now) == len(runs) and (now == runs).all())


def _range_of(runs: RunLocations, number: int) -> tuple[int, int]:
    first, count, stride = (int(runs[name][number]) for name in ("first", "count", "stride"))
    return first, first + (count - 1) * stride
