"""Reading a store: from a ledger and an entry id to bytes, whichever tier they lie in."""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final
from weakref import WeakSet, WeakValueDictionary

from pybk.config import StoreConfig
from pybk.deferral import np
from pybk.errors import ClosedError, CorruptError, ForkedProcessError, NoSuchLedgerError, PybkError
from pybk.feature_level import FeatureLevel
from pybk.ledger import CORE
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metrics import Metrics
from pybk.storage.descriptor import LedgerDescriptor, Page
from pybk.storage.directories import may_be_lost
from pybk.storage.format.index_rows import NamedRow
from pybk.storage.format.log_file import (
    RECORD_HEADER_BYTES,
    RunLocations,
)
from pybk.storage.index.index import Index
from pybk.storage.io.filesystem import PAGE_BYTES, FileSystem
from pybk.storage.io.lmdb_environment import Environment
from pybk.storage.named_records import NamedRecords
from pybk.storage.tiers import Loaded, checked_record
from pybk.storage.volumes import Volumes, tiers_by_kind

if TYPE_CHECKING:
    import numpy.typing as npt

logger = logging.getLogger(__name__)

_one_end = struct.Struct("<I").unpack_from
_two_ends = struct.Struct("<II").unpack_from

READ_TRIES: Final = 8
"""Tries of a read or a check of a store whose records another thread or process moves meanwhile."""

SPAN_FACTOR: Final = 4
"""The multiple of ``max_bytes`` that one direct read may span, when other ledgers' records lie between."""

_TAIL_RUNS_MAX: Final = 16_384
_PAGE_BYTES: Final = 48 << 10
_PAGE_MASK: Final = -PAGE_BYTES
_POINT_BYTES: Final = 64 << 10
"""A record of up to this size is populated whole for one entry."""
_TABLE_ENTRIES_MAX: Final = 16_384
"""Entries of a record whose table is remembered."""
_TABLES_SHARE: Final = 4
"""The part of the index cache that tables of long records may take: a table has 4 bytes per entry."""
TABLE_OVERHEAD_BYTES: Final = 128
"""Memory of a table without its entries: the headers of two objects, 65 bytes, and an item of a dictionary, which has
some 36 to 105 bytes for each, depending on when it last grew. Records of few large entries have small tables."""

_VIEWS: Final[WeakSet[StoreReader]] = WeakSet()


def _mark_forked() -> None:
    for view in _VIEWS:
        view.after_fork()


os.register_at_fork(after_in_child=_mark_forked)


class StoreReader:
    """The parts of a store that reading uses; live and read-only stores add how they learn of new commits.

    Threads: any.
    """

    store_id: bytes
    """The 16 bytes of the store."""

    def __init__(
        self,
        *,
        fs: FileSystem,
        config: StoreConfig,
        volumes: Volumes,
        index: Index,
        entries: Mapping[int, Environment],
        metrics: Metrics,
    ) -> None:
        self.fs = fs
        self.config = config
        self.feature_level = FeatureLevel.BASE
        """The level whose formats the store is written in."""
        self.restored = False
        """True if the store was restored from a backup."""
        self.volumes = volumes
        self.index = index
        self.entries = entries
        """The LMDB environments of the SSD tier, by file id."""
        self._tiers = tiers_by_kind()
        """The tiers by the kind of their files."""
        self.named = NamedRecords(index)
        """The store's named records."""
        self.metrics = metrics
        self.lock = threading.Lock()
        """Guards the descriptors and the cached pages."""
        self._descriptors: WeakValueDictionary[int, LedgerDescriptor] = WeakValueDictionary()
        self._dirty: dict[int, LedgerDescriptor] = {}
        self._cached: deque[tuple[int, int]] = deque()
        self._cached_max = max(8, config.index_cache_bytes // _PAGE_BYTES)
        self.tables: dict[int, bytes] = {}
        """Tables of long records by location, the oldest first."""
        self.tables_bytes = 0
        """The bytes of ``tables``."""
        self._tables_bytes_max = config.index_cache_bytes // _TABLES_SHARE
        self.ended = False
        """True if reading is over: the store was closed, or this process is a fork of the one that opened it."""
        self._forked = False
        _VIEWS.add(self)

    # ---- processes -----------------------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """True if this process was forked from the one that opened the store."""
        return self._forked

    def after_fork(self) -> None:
        """Be of no use in a forked child; called in it before anything else.

        A fork has none of its parent's threads, so the locks that they may hold are replaced.
        """
        self._forked = self.ended = True
        self.lock = threading.Lock()
        self.metrics.after_fork()
        self.volumes.after_fork()
        self.named.after_fork()
        for descriptor in self._descriptors.values():
            descriptor.lock = threading.Lock()
            descriptor.location_lock = threading.Lock()

    def end(self) -> None:
        """Refuse further reads, and wake the readers that follow a ledger."""
        self.ended = True
        with self.lock:
            descriptors = list(self._descriptors.values())
        for descriptor in descriptors:
            descriptor.wake_followers()

    def check_usable(self) -> None:
        """Raise unless the store may be read.

        Raises:
            ForkedProcessError: This process was forked from the one that opened the store.
            ClosedError: The store was closed.
        """
        if self._forked:
            raise self.fork_error()
        if self.ended:
            raise ClosedError(f"the manager of {self.volumes.root} is closed; open it again")

    def fork_error(self) -> ForkedProcessError:
        """Return the error that a forked child gets."""
        return ForkedProcessError(
            f"{self.volumes.root} was opened before this process was forked; open it here again: read-only while the "
            "process that writes it runs, or after that one has closed it"
        )

    def keep_looking(self) -> None:
        """Wake followers when a ledger gets entries from now on; a live store always does so."""

    def catch_up(self) -> None:
        """Learn of new commits; nothing to do in a live store, which makes them."""

    def write_buffered(self) -> None:
        """Write buffered entries; does nothing in a store that does not append."""

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def descriptor(self, ledger_id: int) -> LedgerDescriptor:
        """Return the one descriptor of a ledger.

        Raises:
            NoSuchLedgerError: It never existed or was deleted.
            CorruptError: It may have been created in commits of the log that are lost.
        """
        with self.lock:
            descriptor = self._find(ledger_id)
        if descriptor is None and may_be_lost(self.fs, self.volumes.root, ledger_id):
            raise CorruptError(
                f"it is unknown whether ledger {ledger_id} was in {self.volumes.root}: commits of the log that "
                "may have created it are lost, and a rebuild of the index accepted that; restore the store from a "
                "backup"
            )
        if descriptor is None or descriptor.deleted or not descriptor.created:
            raise NoSuchLedgerError(
                f"ledger {ledger_id} does not exist in {self.volumes.root}: never created, or deleted"
            )
        return descriptor

    def _find(self, ledger_id: int) -> LedgerDescriptor | None:
        """Return the descriptor, deleted or not; the caller holds the lock."""
        descriptor = self._descriptors.get(ledger_id)
        if descriptor is None:
            row = self.index.ledger(ledger_id)
            if row is None:
                return None
            descriptor = LedgerDescriptor(
                row.metadata,
                last_indexed=row.last_entry_id,
                last_add_confirmed=row.last_add_confirmed,
                length=row.length,
            )
            self._descriptors[ledger_id] = descriptor
        return descriptor

    def replayed_ledger(self, ledger_id: int) -> LedgerDescriptor | None:
        """Return the descriptor of a ledger that the log names since the checkpoint, deleted or not."""
        with self.lock:
            descriptor = self._dirty.get(ledger_id)
            if descriptor is None:
                descriptor = self._find(ledger_id)
                if descriptor is not None:
                    self._dirty[ledger_id] = descriptor
        return descriptor

    def replayed_named(self, row: NamedRow) -> None:
        """Take a named record that the log's tail changes."""
        self.named.changed(row)

    def replayed_created(self, metadata: LedgerMetadata) -> LedgerDescriptor:
        """Make the descriptor of a ledger that the log's tail creates."""
        descriptor = LedgerDescriptor(metadata)
        with self.lock:
            self._descriptors[metadata.ledger_id] = descriptor
            self._dirty[metadata.ledger_id] = descriptor
        return descriptor

    def metadata(self, ledger_id: int) -> LedgerMetadata:
        """Return a ledger's metadata as of its last durable change; raises as ``descriptor`` does."""
        return self.descriptor(ledger_id).metadata

    def ledgers(self, after: int = -1) -> Iterator[LedgerMetadata]:
        """Yield the metadata of all ledgers above an id, ascending; ledgers made or deleted meanwhile may appear."""
        with self.lock:
            recent = {ledger_id: found for ledger_id, found in sorted(self._dirty.items()) if ledger_id > after}
        pending = iter(recent.values())
        waiting = next(pending, None)
        for row in self.index.ledgers(after):
            ledger_id = row.metadata.ledger_id
            while waiting is not None and waiting.ledger_id < ledger_id:
                if not waiting.deleted:
                    yield waiting.metadata
                waiting = next(pending, None)
            if ledger_id not in recent:
                yield row.metadata
        while waiting is not None:
            if not waiting.deleted:
                yield waiting.metadata
            waiting = next(pending, None)

    # ---- entries -------------------------------------------------------------------------------------------------

    def read_batch(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest_bytes: int, direct: bool
    ) -> EntryBatch:
        """Return entries ``first`` to at most ``last``, at least one, about ``max_bytes``; digests are not checked.

        Args:
            descriptor: The ledger; it is known to hold ``first`` to ``last``.
            first: First entry id.
            last: Last entry id, inclusive.
            max_bytes: Entry bytes at most, unless the first entry alone is longer.
            digest_bytes: Size of the ledger's digest; records are checked whole when it is 0.
            direct: Read into private memory, past the page cache.

        Raises:
            CorruptError: The entries are known to exist and cannot be read.
        """
        for _ in range(READ_TRIES):
            try:
                runs = self.locations_from(descriptor, first)
                runs = runs[: max(1, int(np.searchsorted(runs["first"], last, side="right")))]
                span_max = max(SPAN_FACTOR * max_bytes, 1 << 20) if direct else 1 << 62
                runs = take_locations(runs, max_bytes, span_max=span_max)
                loaded = self._tiers[self.volumes.rows[int(runs["file"][0])].kind].load(
                    self,
                    descriptor.ledger_id,
                    runs,
                    direct=direct,
                    check=digest_bytes == 0,
                    bytes_max=max_bytes,
                )
            except (KeyError, FileNotFoundError):
                self.refresh(descriptor)
                continue
            where = f"ledger {descriptor.ledger_id} in file {int(loaded.runs['file'][0]):016x}"
            located = locate_entries(loaded.buffer, loaded.runs, loaded.body_starts, where=where)
            return make_batch(
                descriptor.ledger_id,
                loaded.buffer,
                located,
                first=first,
                last=last,
                max_bytes=max_bytes,
                digest_bytes=digest_bytes,
            )
        raise CorruptError(
            f"ledger {descriptor.ledger_id} entry {first}: the file it lies in is not there; run "
            f"`pybk store verify {self.volumes.root}` and restore the file from a backup"
        )

    def refresh(self, descriptor: LedgerDescriptor) -> None:
        """Forget where a ledger's entries lay, because they moved."""
        with descriptor.location_lock:
            descriptor.forget_pages()

    def locations_from(self, descriptor: LedgerDescriptor, first: int) -> RunLocations:
        """Return runs of the ledger, the first of them holding ``first``.

        Raises:
            NoSuchLedgerError: The ledger was deleted.
            CorruptError: The index is damaged.
        """
        runs = descriptor.tail_from(first, _TAIL_RUNS_MAX)
        if runs is None:
            runs = self.index.page(descriptor.ledger_id, first)
            runs = runs[int(np.searchsorted(runs["first"], first, side="right")) - 1 :]
        return runs

    def locate(self, descriptor: LedgerDescriptor, entry_id: int) -> tuple[memoryview, int, int] | None:
        """Return a buffer that holds one entry plain, and where it starts and ends; None: ``read_batch`` will say.

        Raises:
            CorruptError, StorageError: As ``Volumes.populate``, or the record is damaged.

        Cost: 2.2 microseconds for an entry whose location is cached and whose file is mapped; 2.7 without
            the native core.
        """
        words = descriptor.find(entry_id)
        if words is None:
            words = self.location_of(descriptor, entry_id)
        _, _, place, body = words
        mapped = None if body >> 32 else self.volumes.views.get(place >> 32)
        if mapped is None:
            row = self.volumes.rows.get(place >> 32)
            if row is None or body >> 32:  # the file is gone, or the record is compressed
                return None
            found = self._tiers[row.kind].plain_record(self, descriptor.ledger_id, words)
            if found is None:
                return None
            if found[1] is not words:
                return found[0], *entry_span(*found, entry_id)
            view, populate = found[0], self.fs.populator(found[0])
        else:
            view, populate, _, _ = mapped
        table = None
        start = place & 0xFFFFFFFF
        stop = start + RECORD_HEADER_BYTES + body
        if body > _POINT_BYTES:
            table = self.tables.get(place)
            if table is None:
                table = self.table(view, words)
            start, stop = entry_span(view, words, entry_id, table)
        first = start & _PAGE_MASK
        try:
            populate(first, stop - first)
        except (OSError, ValueError):
            self.volumes.populate(view, start, stop)
        if table is None:
            if CORE is not None:  # as in ``entry_span``, which would be one more call for each entry
                try:
                    start, stop = CORE.span(view, None, words, entry_id)
                except ValueError:
                    pass
                else:
                    return view, start, stop
            start, stop = entry_span(view, words, entry_id)
        return view, start, stop

    def table(self, view: memoryview, words: tuple[int, int, int, int]) -> bytes:
        """Return the table of a long record, and remember it: to look at it in the map, it has to be populated first.

        A location is never used for another record, so a remembered table stays valid.
        """
        start = (words[2] & 0xFFFFFFFF) + RECORD_HEADER_BYTES
        count = words[1] & 0xFFFFFFFF
        end = start + min(4 * count, words[3])
        self.volumes.populate(view, start, end)
        table = bytes(view[start:end])
        if 1 < count <= _TABLE_ENTRIES_MAX:
            with self.lock:
                if words[2] not in self.tables:
                    self.tables[words[2]] = table
                    self.tables_bytes += len(table) + TABLE_OVERHEAD_BYTES
                while self.tables_bytes > self._tables_bytes_max:
                    oldest = self.tables.pop(next(iter(self.tables)))
                    self.tables_bytes -= len(oldest) + TABLE_OVERHEAD_BYTES
        return table

    def location_of(self, descriptor: LedgerDescriptor, entry_id: int) -> tuple[int, int, int, int]:
        """Return the four words of the run that holds an entry, remembering the index page it came from."""
        words = descriptor.find(entry_id)
        if words is None:
            generation = descriptor.generation
            page = Page.of(self.index.page(descriptor.ledger_id, entry_id))
            descriptor.remember(page, generation)
            with self.lock:
                self._cached.append((descriptor.ledger_id, page.firsts[0]))
                evicted = self._cached.popleft() if len(self._cached) > self._cached_max else None
                victim = self._descriptors.get(evicted[0]) if evicted is not None else None
            if evicted is not None and victim is not None:
                victim.forget(evicted[1])
            words = _find_in(page, entry_id)
        return words

    def load(self, ledger_id: int, runs: RunLocations) -> Loaded:
        """Return the plain bodies of some records of one file, read through the page cache and not checked.

        Raises:
            KeyError, FileNotFoundError: The file is gone, because its entries were moved.
            CorruptError: A record is damaged.
        """
        return self._tiers[self.volumes.rows[int(runs["file"][0])].kind].load(self, ledger_id, runs)

    def still_there(self, ledger_id: int, first: int, file_id: int) -> bool:
        """Return whether the index, read anew, still names the record in this file."""
        row = self.index.ledger(ledger_id)
        if row is None or row.last_entry_id < first:
            return False
        page = self.index.page(ledger_id, first)
        return bool(((page["first"] == first) & (page["file"] == file_id)).any())

    def sound_locations(self, ledger_id: int, loaded: Loaded) -> tuple[npt.NDArray[np.bool_], PybkError | None]:
        """Check records that lie plain in their file.

        Returns:
            Which are sound, ``(r,)`` bool; and what is wrong with the first that is not, None if all are.
        """
        sound = np.ones(len(loaded.runs), np.bool_)
        problem: PybkError | None = None
        for number, (start, run) in enumerate(zip(loaded.body_starts.tolist(), loaded.runs, strict=True)):
            try:
                checked_record(
                    loaded.buffer,
                    start - RECORD_HEADER_BYTES,
                    ledger_id,
                    int(run["first"]),
                    int(run["file"]),
                    self.volumes.root,
                )
            except PybkError as error:
                problem = problem or error
                sound[number] = False
        return sound, problem


def _find_in(page: Page, entry_id: int) -> tuple[int, int, int, int]:
    at = 4 * (int(np.searchsorted(np.frombuffer(page.firsts, np.int64), entry_id, side="right")) - 1)
    words = page.words
    return words[at], words[at + 1], words[at + 2], words[at + 3]


def take_locations(runs: RunLocations, max_bytes: int, *, span_max: int) -> RunLocations:
    """Return the leading runs of one file that hold about ``max_bytes``, at least one run.

    Args:
        runs: Sorted runs, not empty.
        max_bytes: Entry bytes wanted.
        span_max: Longest distance in bytes from the first to the last byte.
    """
    if len(runs) == 1:
        return runs
    other = np.flatnonzero(runs["file"] != runs["file"][0])
    if other.size:
        runs = runs[: other[0]]
    ends = np.cumsum(runs["body"].astype(np.int64))
    count = int(np.searchsorted(ends, max_bytes)) + 1
    starts = runs["offset"].astype(np.int64)
    low = np.minimum.accumulate(starts)
    high = np.maximum.accumulate(starts + runs["body"])
    wide = np.flatnonzero(high - low > span_max)
    if wide.size:
        count = min(count, max(1, int(wide[0])))
    return runs[:count]


def locate_entries(
    buffer: memoryview, runs: RunLocations, body_starts: npt.NDArray[np.int64], *, where: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Locate every entry of some plain records.

    Args:
        buffer: Holds the records' bodies.
        runs: The records, ``(r,)`` runs in entry order.
        body_starts: The place where each body starts in ``buffer``, ``(r,)`` int64, bytes.
        where: Names the place in errors.

    Returns:
        Entry ids, offsets and sizes, each ``(n,)`` int64, offsets and sizes in bytes of ``buffer``.

    Raises:
        CorruptError: A record does not fit the buffer, or its table does not fit the record.
    """
    counts = runs["count"].astype(np.int64)
    bodies = runs["body"].astype(np.int64)
    if not len(runs) or min(np.count_nonzero(counts), np.count_nonzero(runs["stride"])) < len(runs):
        raise CorruptError(f"{where}: a run without entries, or of stride 0")
    if int((body_starts + bodies).max()) > len(buffer):
        raise CorruptError(f"{where}: a record ends beyond the {len(buffer)} bytes that are there")
    several = np.flatnonzero(counts > 1)
    wide = several[4 * counts[several] > bodies[several]]
    if len(wide):
        count, body = counts[wide[0]], bodies[wide[0]]
        raise CorruptError(f"{where}: a table of {count} entries does not fit a record of {body} bytes")
    starts = np.cumsum(counts) - counts
    total = int(counts.sum())
    if len(runs) == 1:
        first, stride = int(runs["first"][0]), int(runs["stride"][0])
        ids = np.arange(first, first + stride * total, stride)
    else:
        ids = np.repeat(runs["stride"].astype(np.int64), counts)
        ids *= np.arange(total) - np.repeat(starts, counts)
        ids += np.repeat(runs["first"].astype(np.int64), counts)
    offsets = np.repeat(body_starts, counts)
    sizes = np.repeat(bodies, counts)
    rows = zip(*(each[several].tolist() for each in (starts, counts, body_starts, bodies)), strict=True)
    for low, count, base, body in rows:
        if not _take_table(buffer, base, body, offsets[low : low + count], sizes[low : low + count]):
            raise _damaged_table(ids[low : low + count], where)
    if int(sizes.min()) < 0:
        number = int(np.searchsorted(starts, int(np.argmax(sizes < 0)), side="right")) - 1
        raise _damaged_table(ids[starts[number] :][: counts[number]], where)
    return ids, offsets, sizes


def _take_table(
    buffer: memoryview, base: int, body: int, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> bool:
    """Set where the entries of one record lie, from the table at ``base``; return whether it ends with the record."""
    count = len(offsets)
    first = base + 4 * count
    ends = np.frombuffer(buffer, "<u4", count, base).astype(np.int64)
    ends += first
    offsets[0] = first
    offsets[1:] = ends[:-1]
    np.subtract(ends, offsets, sizes)
    return int(ends[-1]) == base + body


def _damaged_table(ids: npt.NDArray[np.int64], where: str) -> CorruptError:
    return CorruptError(f"{where}: the table of entries {ids[0]} to {ids[-1]} is damaged")


def make_batch(
    ledger_id: int,
    buffer: memoryview,
    located: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    *,
    first: int,
    last: int,
    max_bytes: int,
    digest_bytes: int,
) -> EntryBatch:
    """Make a batch of the located entries ``first`` to ``last`` that fit ``max_bytes``, at least one."""
    ids, offsets, sizes = located
    low = int(np.searchsorted(ids, first))
    high = int(np.searchsorted(ids, last, side="right"))
    fits = int(np.searchsorted(np.cumsum(sizes[low:high]), max_bytes, side="right"))
    high = min(high, low + max(1, fits))
    return EntryBatch(ledger_id, ids[low:high], buffer, offsets[low:high], sizes[low:high], digest_bytes)


def entry_span(
    view: memoryview, words: tuple[int, int, int, int], entry_id: int, table: bytes | None = None
) -> tuple[int, int]:
    """Return where one entry starts and ends in the map of the file its run lies in.

    Args:
        view: The map; with ``table`` only its length is looked at.
        words: The run.
        entry_id: The entry.
        table: A copy of the record's table of ends; None to look at the one in the map.

    Raises:
        CorruptError: The record does not fit the file, or its table does not fit the record.
    """
    if CORE is not None:
        try:
            return CORE.span(view, table, words, entry_id)
        except ValueError:
            pass  # the following finds out what is wrong
    first, count_stride, place, body_bytes = words
    start = (place & 0xFFFFFFFF) + RECORD_HEADER_BYTES
    end = start + body_bytes
    count = count_stride & 0xFFFFFFFF
    if count > 1:
        base = start + 4 * count
        number = (entry_id - first) // (count_stride >> 32 or 1)
        if base > end or end > len(view) or not 0 <= number < count:
            raise CorruptError(f"file {place >> 32:016x}: no entry {entry_id} in the record at {place & 0xFFFFFFFF}")
        ends, at = (view, start) if table is None else (table, 0)
        if number:
            low, high = _two_ends(ends, at + 4 * number - 4)
            start, end = base + low, min(end, base + high)
        else:
            start, end = base, min(end, base + _one_end(ends, at)[0])
    if end > len(view) or start > end:
        raise CorruptError(f"file {place >> 32:016x}: entry {entry_id} ends beyond its record or its file")
    return start, end
