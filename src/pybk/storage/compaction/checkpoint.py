"""What changes where entries lie: checkpoint, move, compaction, dropping what is dead.

Each keeps one order: data synced, catalog synced, index committed, and only then the old place dropped.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pybk.errors import CorruptError, StorageFullError, StorageRefusedError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger import LedgerState
from pybk.storage.compaction.mover import Mover, Unmoved, UnmovedError
from pybk.storage.directories import mend_cookies
from pybk.storage.format.cold_segment import ColdSegment
from pybk.storage.format.entries_mark import place_of, read_entries_mark, write_entries_mark
from pybk.storage.format.index_rows import FileRow, LedgerRow, Mark, NamedRow, entries_key
from pybk.storage.format.log_file import BLOCK_BYTES
from pybk.storage.format.record import RECORD_HEADER_BYTES, RUN_DTYPE, Runs
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.locations import bytes_by_file
from pybk.storage.io.failures import is_refused, undoing
from pybk.storage.volumes import COLD, ENTRIES, LOG

if TYPE_CHECKING:
    from pybk.storage.compaction.live_store import LiveStore
    from pybk.storage.descriptor import LedgerDescriptor
    from pybk.storage.index.update import IndexUpdate

logger = logging.getLogger(__name__)

_SPARE_SHARE: Final = 4
"""This part of what is free is left when records are packed: the index and the log need room, too."""
_MERGED_FILES_MIN: Final = 16
_MERGED_BYTES_MAX: Final = 8 << 20
_MERGED_BITS: Final = 3
"""Cold segments below 8 MiB are merged once there are 16 whose sizes are within a factor of 8."""
_INDEX_SPARE_BYTES: Final = 512 << 10
_INDEX_ROW_BYTES: Final = 1 << 10


class Window(NamedTuple):
    """What a checkpoint takes over: ledgers as they were when the log stood still, and the log files left by then."""

    next_lsn: int
    descriptors: list[LedgerDescriptor]
    rows: list[LedgerRow]
    dropped: list[LedgerDescriptor]
    tails: list[Runs]
    log_files: list[FileRow]
    tail_bytes: int
    named: list[NamedRow]


class Placed(NamedTuple):
    """Where the entries of a window are to lie: runs by ledger, and the files that the store has from then on."""

    runs: list[Runs]
    files: list[FileRow]


class Jobs:
    """The jobs of one store; whoever calls sees to it that there is one at a time.

    Every job raises StorageFullError, or OSError for want of room, when it could not do all, and what it did is whole;
    any other OSError, and StorageFailedError, when the store must be closed.

    Attributes:
        freed: Whether there may be something to collect: something died in files that live on, or there was no room.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._whole: dict[int, int] = {}
        self._mixed: set[int] = set()  # log files with entries of other tiers, for which there was no room there
        self._unmerged: set[int] = set()  # small cold segments with damaged records
        self._unpurged: dict[int, set[bytes]] = defaultdict(set)
        self.freed = False

    # ---- checkpoint ----------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Bring everything that is durable in the log so far into the index, and entries to their tiers."""
        self._purge()
        store = self._store
        window: list[Window] = []
        store.log.cut(lambda: window.append(self._snapshot()))
        taken = window[0]
        store.supply.tidy()
        if taken.descriptors or taken.dropped or taken.log_files:
            self._take_over(taken)
            self._purge()
        if not store.tail_bytes:
            store.supply.rest(store.volumes.disk_bytes)

    def _take_over(self, taken: Window) -> None:
        store = self._store
        self._check_index_space(sum(map(len, taken.tails)) * RUN_DTYPE.itemsize + len(taken.rows) * _INDEX_ROW_BYTES)
        dropped = [gone.ledger_id for gone in taken.dropped if store.index.ledger(gone.ledger_id) is not None]
        purge = self._keys_of_ledgers(dropped)
        placed = self._place(taken)

        def change(update: IndexUpdate) -> Counter[int]:
            counts: Counter[int] = Counter()
            for ledger_id in dropped:
                counts.subtract(update.drop_ledger(ledger_id))
            for row, runs in zip(taken.rows, placed.runs, strict=True):
                update.put_ledger(row)
                if len(runs):
                    update.append_locations(row.metadata.ledger_id, runs)
                    counts.update(bytes_by_file(runs))
            return counts

        self._catalog_and_index.commit(
            self._next_mark(taken), change, rows=taken.rows, dropped=dropped, added=placed.files, named=taken.named
        )
        self.freed = self.freed or bool(dropped)
        self._remember(purge)
        self._taken_over(taken, {row.file_id for row in placed.files})

    def _taken_over(self, taken: Window, kept: set[int]) -> None:
        """Forget what the index knows now."""
        store = self._store
        for descriptor, row in zip(taken.descriptors, taken.rows, strict=True):
            descriptor.checkpointed(row.last_entry_id)
            descriptor.indexed(row.metadata.version, row.last_add_confirmed)
        for descriptor in taken.dropped:
            descriptor.changed = False
            descriptor.checkpointed(descriptor.last_durable)
        store.clean([*taken.descriptors, *taken.dropped])
        store.named.checkpointed(taken.named)
        for log_file in taken.log_files:
            if log_file.file_id not in kept:
                store.supply.forget(log_file.file_id)
                store.volumes.drop(log_file.file_id)
        store.tail_checked(taken.tail_bytes)
        store.metrics.add("checkpoints", 1)

    def _snapshot(self) -> Window:
        """See what the log holds; called while it stands still."""
        store = self._store
        descriptors, rows, tails, dropped = [], [], [], []
        for _, descriptor in sorted(store.take_dirty().items()):
            if descriptor.deleted:
                dropped.append(descriptor)
                continue
            descriptors.append(descriptor)
            tails.append(descriptor.tail_snapshot())
            rows.append(
                LedgerRow(
                    descriptor.metadata,
                    descriptor.last_durable,
                    descriptor.last_add_confirmed,
                    descriptor.length_durable,
                )
            )
        log_files = []
        for file_id, row in sorted(store.volumes.rows.items()):
            used = store.supply.used_bytes(file_id)
            if row.kind == LOG and used is not None and file_id >= self._catalog_and_index.mark.first_log_file_id:
                log_files.append(row._replace(bytes=used))
        named = store.named.tail()
        return Window(store.log.durable_lsn + 1, descriptors, rows, dropped, tails, log_files, store.tail_bytes, named)

    def _next_mark(self, taken: Window) -> Mark:
        store = self._store
        mark = self._catalog_and_index.mark
        last = max((row.file_id for row in taken.log_files), default=mark.first_log_file_id - 1)
        return mark._replace(
            first_log_file_id=last + 1,
            next_lsn=taken.next_lsn,
            durable_lsn=taken.next_lsn - 1,
            next_file_id=store.volumes.next_file_id,
            next_ledger_id=store.next_ledger_id,
            next_creation_sequence=store.next_creation_sequence,
        )

    def _place(self, taken: Window) -> Placed:
        """Bring the entries of a window to their tiers; where there is no room for it, leave them in the log files.

        Then the files in which nothing lives are dropped all the same, and ``collect`` goes on file by file.
        """
        sizes = [len(runs) for runs in taken.tails]
        if not sum(sizes):
            return Placed(taken.tails, [])
        runs = np.concatenate(taken.tails)
        tiers = list(StorageHint)
        tier_of = np.repeat([tiers.index(row.metadata.tier) for row in taken.rows], sizes)
        in_tier = tier_of == tiers.index(StorageHint.NVME)
        stays = self._staying(runs, in_tier, taken.log_files)
        leaving = ~(in_tier & np.isin(runs["file"], list(stays)))
        try:
            for number in np.unique(tier_of[leaving]).tolist():
                self._check_tier_space(tiers[number], _record_bytes(runs[leaving]))
            return self._write_to_tiers(taken, stays)
        except (StorageRefusedError, OSError) as error:
            if not is_refused(error):
                raise
            logger.warning("entries stay in the log files until they can be packed: %s", error)
        live = set(np.unique(runs["file"]).tolist())
        self._mixed |= set(np.unique(runs["file"][~in_tier]).tolist())
        self.freed = True
        return Placed(taken.tails, [row for row in taken.log_files if row.file_id in live])

    def _write_to_tiers(self, taken: Window, stays: set[int]) -> Placed:
        """Write the entries of a window to their tiers, but for those of NVMe in the log files that stay."""
        placed: dict[int, list[Runs]] = defaultdict(list)
        movers: dict[StorageHint, Mover] = {}
        try:
            for number, row in enumerate(taken.rows):
                tier = row.metadata.tier
                for part in _by_file(taken.tails[number]):
                    if tier is StorageHint.NVME and int(part["file"][0]) in stays:
                        placed[number].append(part)
                        continue
                    mover = movers.get(tier)
                    if mover is None:
                        mover = movers[tier] = Mover(self._store, self._store.store_id, tier)
                    placed[number].append(mover.move(row.metadata.ledger_id, part))
            made = [file for mover in movers.values() for file in mover.finish()]
        except BaseException as error:
            for mover in movers.values():
                with undoing(error):
                    mover.abort()
            raise
        result = [np.concatenate(placed[n]) if n in placed else tail[:0] for n, tail in enumerate(taken.tails)]
        # A file with a damaged record stays, too: reading it must go on failing instead of finding nothing.
        held = {int(file_id) for part in result for file_id in np.unique(part["file"])} | stays
        return Placed(result, [*(row for row in taken.log_files if row.file_id in held), *made])

    def _check_tier_space(self, tier: StorageHint, nbytes: int) -> None:
        """Raise StorageFullError rather than fill a device with records that will not fit.

        Only trying tells where records are compressed, or where LMDB has pages to use again.
        """
        store = self._store
        if tier is StorageHint.SSD or (tier is StorageHint.HDD and store.config.cold_compression is not None):
            return
        path, free = max(
            ((path, store.fs.free_bytes(path)) for path in store.volumes.tier_paths(tier)), key=itemgetter(1)
        )
        if nbytes > free - free // _SPARE_SHARE:
            raise StorageFullError(
                f"{path} has {free} bytes free, too few to pack {nbytes} bytes of entries there; free space on the "
                "device or delete ledgers"
            )

    def _check_index_space(self, nbytes: int) -> None:
        """Raise StorageFullError if the index might find no room: LMDB may call that a failure, which is final."""
        path = self._store.volumes.tier_paths(StorageHint.SSD)[0]
        free = self._store.fs.free_bytes(path)
        needed = 2 * nbytes + _INDEX_SPARE_BYTES  # pages are not full, and are copied before they are changed
        if free < needed:
            raise StorageFullError(
                f"{path} has {free} bytes free, and changing the index may take {needed}; free space on the device or "
                "delete ledgers"
            )

    def _staying(
        self, runs: Runs, nvme: np.ndarray[tuple[int], np.dtype[np.bool_]], log_files: list[FileRow]
    ) -> set[int]:
        """Return the log files that are filled well enough by NVMe ledgers to stay as they are."""
        stays = set()
        for row in log_files:
            mine = nvme & (runs["file"] == row.file_id)
            live = int(runs["body"][mine].astype(np.int64).sum())
            if live and live >= self._store.config.fill_ratio * max(row.bytes - BLOCK_BYTES, 1):
                stays.add(row.file_id)
        return stays

    def raise_level(self, level: FeatureLevel) -> None:
        """Write the store in the formats of a higher level; durable on return.

        After a stop at any point the store has its old level or the new one, and the next open or checkpoint completes
        what is left.
        """
        store = self._store
        if level <= store.feature_level:
            return
        cookie = replace(store.cookie, level=level)
        mend_cookies(store.fs, store.volumes.root, cookie, store.volumes.directories)
        store.cookie = self._catalog_and_index.cookie = cookie
        store.feature_level = level
        self._catalog_and_index.commit(
            self._catalog_and_index.mark, lambda update: Counter()
        )  # in a new catalog, of the level's format

    # ---- moves and collection ------------------------------------------------------------------------------------

    def move(self, descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
        """Bring all entries of ledgers, given in order of their ids, up to those durable now, to a tier.

        A checkpoint ends the log file and writes every ledger that changed, so it is made only for entries that the
        index does not know yet: moving ledgers one by one then costs one commit of catalog and index each.

        Raises:
            UnmovedError: Damaged records stay where they are. Everything else was moved, durably.
        """
        if any(descriptor.last_checked < descriptor.last_durable for descriptor in descriptors):
            self.checkpoint()
        else:
            self._purge()
        store = self._store
        work = []
        index_bytes = 0
        changed: list[tuple[LedgerDescriptor, LedgerRow]] = []
        for descriptor in descriptors:
            if descriptor.deleted or descriptor.last_checked < 0:
                continue
            parts = []
            for page in store.index.pages(descriptor.ledger_id):
                parts += self._elsewhere(page, tier.value)
                index_bytes += page.nbytes
            if parts:
                work.append((descriptor.ledger_id, parts))
                row = _final_row(descriptor)
                changed += [] if row is None else [(descriptor, row)]
        if not work:
            return
        self._check_index_space(index_bytes + len(changed) * _INDEX_ROW_BYTES)
        unmoved = self._relocate(work, tier, [row for _, row in changed])
        for descriptor, row in changed:
            descriptor.indexed(row.metadata.version, row.last_add_confirmed)
        store.clean([descriptor for descriptor, _ in changed])
        if unmoved:
            raise UnmovedError(unmoved, tier)

    def _elsewhere(self, page: Runs, tier: str) -> list[Runs]:
        """Return the runs of a page that lie in files of other tiers, split by file."""
        rows = self._catalog_and_index.files
        files = page["file"].tolist()
        if files.count(files[0]) == len(files):
            return [] if rows[files[0]].tier == tier else [page]
        return _by_file(page[np.array([rows[file_id].tier != tier for file_id in files], np.bool_)])

    def _relocate(
        self, work: list[tuple[int, list[Runs]]], tier: StorageHint, rows: Sequence[LedgerRow] = ()
    ) -> list[Unmoved]:
        """Move runs of ledgers to a tier and record it in catalog and index, with the ledgers' rows that changed.

        Returns:
            The damaged records that stay where they are.
        """
        store = self._store
        mover = Mover(store, store.store_id, tier)
        try:
            moved = [
                (ledger_id, part, mover.move(ledger_id, part))
                for ledger_id, parts in work
                for part in parts
                if len(part)
            ]
            files = mover.finish()
        except BaseException as error:
            with undoing(error):
                mover.abort()
            raise
        if not moved:
            return []

        def change(update: IndexUpdate) -> Counter[int]:
            counts: Counter[int] = Counter()
            for row in rows:
                update.put_ledger(row)
            for ledger_id, old, new in moved:
                update.replace_locations(ledger_id, old, new)
                counts.subtract(bytes_by_file(old))
                counts.update(bytes_by_file(new))
            return counts

        mark = self._catalog_and_index.mark._replace(next_file_id=store.volumes.next_file_id)
        self._catalog_and_index.commit(mark, change, rows=rows, added=files)
        self.freed = True
        for ledger_id in {ledger_id for ledger_id, _, _ in moved}:
            store.moved(ledger_id)
        for ledger_id, old, new in moved:
            self._remember(_keys_of(store, ledger_id, old, new))
        self._purge()
        self._drop_dead()
        return list(mover.unmoved.values())

    def collect(self, *, packs: bool = True) -> None:
        """Free the space of deleted ledgers: drop files without live entries, pack those that are mostly dead.

        Files with little to keep come first: what they free makes room for the others. Where there is no room to pack
        one, it stays for another time.

        Args:
            packs: False only drops files, and merges small ones; ``freed`` stays set.

        Raises:
            StorageFullError: Entries of another tier are in a log file, and their tier has no room.
        """
        self._drop_dead()
        if not packs:
            self._merge_small()
            return
        self.freed = False
        refused: StorageRefusedError | OSError | None = None
        live = self._catalog_and_index.live
        for row in sorted(self._catalog_and_index.files.values(), key=lambda row: (live[row.file_id], row.file_id)):
            if row.kind == ENTRIES or not (row.file_id in self._mixed or self._is_sparse(row)):
                continue
            try:
                self._compact(row)
            except (StorageRefusedError, OSError) as error:
                if not is_refused(error):
                    raise
                self.freed = True
                if row.file_id in self._mixed:
                    refused = error
        self._merge_small()
        if refused is not None:
            raise refused

    def _is_sparse(self, row: FileRow) -> bool:
        """Tell whether packing a file anew would make it much smaller."""
        limit = self._store.config.fill_ratio
        live = self._catalog_and_index.live[row.file_id]
        if live >= limit * (row.bytes - BLOCK_BYTES):
            return False
        if row.kind != COLD:
            return True
        # Short records leave much of a segment to headers and padding, which packing would only write again.
        whole = self._whole.get(row.file_id)
        if whole is None:
            store = self._store
            try:
                segment = ColdSegment(store.fs, store.volumes.path_of(row), store.store_id, row.file_id)
            except CorruptError as error:
                logger.error("packing what can be read of a damaged segment: %s", error)
                return True
            whole = self._whole[row.file_id] = sum(bytes_by_file(segment.rows).values())
        return live < limit * whole

    def _merge_small(self) -> None:
        """Pack small cold segments of about one size into one, once there are many, so that there are never many.

        Each entry is written again some five times at most, as a merged segment is of another size.
        """
        groups: dict[tuple[str, int], list[FileRow]] = defaultdict(list)
        for row in self._catalog_and_index.files.values():
            if row.kind == COLD and row.bytes < _MERGED_BYTES_MAX and row.file_id not in self._unmerged:
                groups[row.tier, row.bytes.bit_length() // _MERGED_BITS].append(row)
        for (tier, _), rows in groups.items():
            if len(rows) >= _MERGED_FILES_MIN:
                try:
                    self._merge(StorageHint(tier), {row.file_id for row in rows})
                except (StorageRefusedError, OSError) as error:
                    if not is_refused(error):
                        raise
                    logger.warning("%d small cold segments are merged later: %s", len(rows), error)

    def _merge(self, tier: StorageHint, file_ids: set[int]) -> None:
        """Pack what lives in some cold segments of a tier together."""
        index = self._store.index
        wanted = sorted(file_ids)
        work = []
        index_bytes = 0
        for ledger_id in sorted(index.ledgers_in(wanted)):
            parts: list[Runs] = []
            for page in index.pages(ledger_id):
                mine = np.isin(page["file"], wanted)
                if mine.any():
                    parts += _by_file(page[mine])
                    index_bytes += page.nbytes
            work.append((ledger_id, parts))
        self._check_index_space(index_bytes)
        self._check_tier_space(tier, sum(_record_bytes(part) for _, parts in work for part in parts))
        self._relocate(work, tier)
        # What is damaged stays where it is, and would be tried again for ever.
        self._unmerged |= file_ids & self._catalog_and_index.files.keys()
        self._store.metrics.add("compactions", 1)

    def _compact(self, row: FileRow) -> None:
        """Pack what lives in a file anew, each ledger's entries in their own tier if it is a log file."""
        store = self._store
        work: dict[StorageHint, list[tuple[int, list[Runs]]]] = defaultdict(list)
        index_bytes = 0
        for ledger_id, _ in list(store.index.file_ledgers(row.file_id)):
            parts = []
            for page in store.index.pages(ledger_id):
                mine = page["file"] == row.file_id
                if mine.any():
                    parts.append(page[mine])
                    index_bytes += page.nbytes
            ledger = store.index.ledger(ledger_id) if row.kind == LOG else None
            work[StorageHint(row.tier) if ledger is None else ledger.metadata.tier].append((ledger_id, parts))
        self._check_index_space(index_bytes)
        for tier, ledgers in work.items():
            self._check_tier_space(tier, sum(_record_bytes(part) for _, parts in ledgers for part in parts))
            self._relocate(ledgers, tier)
        self._mixed.discard(row.file_id)
        store.metrics.add("compactions", 1)

    def _drop_dead(self) -> None:
        """Forget and unlink files in which nothing lives."""
        store = self._store
        live = self._catalog_and_index.live
        files = self._catalog_and_index.files.items()
        dead = [file_id for file_id, row in files if not live[file_id] and row.kind != ENTRIES]
        if not dead:
            return
        self._catalog_and_index.commit(self._catalog_and_index.mark, lambda update: Counter(), gone=dead)
        for file_id in dead:
            self._whole.pop(file_id, None)
            self._mixed.discard(file_id)
            store.supply.forget(file_id)
            store.volumes.drop(file_id)

    # ---- the SSD tier --------------------------------------------------------------------------------------------

    def _keys_of_ledgers(self, ledger_ids: Iterable[int]) -> list[tuple[int, bytes]]:
        """Return what ledgers keep in the SSD tier."""
        store = self._store
        return [
            key
            for ledger_id in ledger_ids
            for page in store.index.pages(ledger_id)
            for key in _keys_of(store, ledger_id, page, page[:0])
        ]

    def _remember(self, keys: Iterable[tuple[int, bytes]]) -> None:
        for file_id, key in keys:
            self._unpurged[file_id].add(key)

    def _purge(self) -> None:
        """Delete what nothing names any more.

        What fails for want of room is tried again before anything is put in the SSD tier: no key is in use again.
        """
        for file_id, keys in list(self._unpurged.items()):
            with self._store.entries[file_id].write() as transaction:
                for key in sorted(keys):
                    transaction.delete(key)
                if self._store.feature_level > FeatureLevel.BASE:
                    # An index from before now names these keys: it must be known as older than this environment.
                    mark = read_entries_mark(transaction)
                    write_entries_mark(transaction, mark._replace(removed_at=place_of(self._catalog_and_index.mark)))
            del self._unpurged[file_id]


def _by_file(runs: Runs) -> list[Runs]:
    """Split sorted runs where the file changes."""
    if not len(runs):
        return []
    return np.split(runs, np.flatnonzero(np.diff(runs["file"].astype(np.int64))) + 1)


def _final_row(descriptor: LedgerDescriptor) -> LedgerRow | None:
    """Return the row of a closed ledger whose metadata changed since the index took them; None for any other ledger.

    The row may be newer than the mark: replay applies only metadata of a higher version, and a closed ledger gets no
    entries. The row of an open ledger has to wait for a checkpoint.
    """
    metadata = descriptor.metadata
    last = descriptor.last_checked
    if not descriptor.changed or metadata.state is not LedgerState.CLOSED or last != metadata.last_entry_id:
        return None
    return LedgerRow(metadata, last, descriptor.last_add_confirmed, descriptor.length_durable)


def _record_bytes(runs: Runs) -> int:
    """Return the bytes of the records that runs stand for."""
    return int(runs["body"].astype(np.int64).sum()) + RECORD_HEADER_BYTES * len(runs)


def _keys_of(store: LiveStore, ledger_id: int, old: Runs, new: Runs) -> list[tuple[int, bytes]]:
    """Return file and key of what ``old`` has in the SSD tier and ``new`` does not use."""
    used = {(int(run["file"]), int(run["first"])) for run in new}
    return [
        (file_id, entries_key(ledger_id, first))
        for file_id, first in zip(old["file"].tolist(), old["first"].tolist(), strict=True)
        if file_id in store.entries and (file_id, first) not in used
    ]
