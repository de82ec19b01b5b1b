"""Moves to another tier, and compaction: freeing the space of deleted and moved entries.

Theory of operation
===================

A move and a compaction are the same operation (``relocate``) for different reasons: a ``Mover`` reads the records,
checks them and writes them packed at the target; the new files are synced; catalog and index are committed with the new
locations; only then is the old location freed. A crash in between leaves either unused new files, which the next open
removes, or old files that nothing names any longer, which are dropped by the next collection.

Which files are freed:

- A file without live entries is unlinked (``_drop_dead``).
- A *sparse* file, of which less than ``fill_ratio`` is live, is packed: its live records are moved, then it is dropped.
  A log file that holds entries of other tiers (*mixed*, because those tiers had no space at the checkpoint) is packed
  whatever its fill.
- Small files of about one size are merged once there are many, so that their number stays bounded.

Damaged records are never moved: their index locations keep naming the old file, which stays, because reading them has
to fail instead of finding nothing. A move reports them by ``UnmovedError``.

Files with little to keep are packed first, because each frees space for the next.

Without free space a file is packed in the reserve of its directory (``_pack_in_reserve``, ``PackReserve``), and becomes
the next reserve when it is dropped. So the largest file that fits is packed first: it leaves a reserve that is as large
as itself, or as large as the reserve is to be, and that suffices for every smaller file. A pack is one commit, because
a stop between two would leave a file without a reserve for its other half. A file with damaged records would stay, and
take the reserve for good, so it waits for free space.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from pybk.errors import CorruptError, StorageFullError, StorageRefusedError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import LedgerState
from pybk.metrics import MOVED_BYTES
from pybk.storage.compaction.mover import Mover, Unmoved, UnmovedError
from pybk.storage.format.index_rows import FileRow, LedgerRow
from pybk.storage.format.log_file import BLOCK_BYTES, RunLocations
from pybk.storage.index.index import by_file, bytes_by_file
from pybk.storage.io.failures import is_full, is_refused, undoing
from pybk.storage.space import (
    INDEX_ROW_BYTES,
    check_index_space,
    check_packing_space,
    check_tier_space,
    record_bytes,
)
from pybk.storage.volumes import tier_of_kind

if TYPE_CHECKING:
    from pybk.storage.descriptor import LedgerDescriptor
    from pybk.storage.index.catalog_and_index import CatalogAndIndex
    from pybk.storage.index.index import IndexUpdate
    from pybk.storage.live_store import LiveStore
    from pybk.storage.space import Garbage
    from pybk.storage.tiers import ReservedFile

logger = logging.getLogger(__name__)

_MERGED_FILES_MIN: Final = 16
_MERGED_BYTES_MAX: Final = 8 << 20
_MERGED_BITS: Final = 3
"""Cold segments below 8 MiB are merged once there are 16 whose sizes are within a factor of 8."""


class _WaitingFile(NamedTuple):
    """A file that is not packed for lack of space.

    Attributes:
        row: The file.
        disk_bytes: The bytes of its blocks.
        live_bytes: The bytes of its live records without their headers: a segment of them takes a little more.
    """

    row: FileRow
    disk_bytes: int
    live_bytes: int


class _Needs(NamedTuple):
    """The space that packing a file takes, so that a file for which there is none is not read again to find that out.

    Attributes:
        live: The live bytes of the file when it was read; it is read again once they change.
        index_bytes: The bytes of its pages in the index.
        tiers: The bytes of its records by the tier that they belong in, in the order in which they are moved.
    """

    live: int
    index_bytes: int
    tiers: dict[StorageHint, int]


class Compaction:
    """The moves and compactions of one store.

    Every method raises StorageFullError, or OSError for lack of space, if it could not finish; its completed steps are
    consistent. Any other OSError, and StorageFailedError, mean that the store must be closed.

    Threads: one at a time, which the scheduler ensures.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex, garbage: Garbage) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._garbage = garbage
        self._whole: dict[int, int] = {}
        """Bytes of all records of cold segments that were looked at, live or not, by file id."""
        self._left: dict[int, int] = {}
        """Live bytes of the files in which damaged records stayed when they were packed or merged, by file id.

        They are not tried again, which would fail again, until some of them are dead.
        """
        self._needs: dict[int, _Needs] = {}
        """The space that is needed to pack files that were refused for lack of space, by file id."""
        self._unmerged: set[tuple[str, int]] = set()
        """The tiers and size classes whose small files could not be merged when it was tried last."""
        self._unfit: dict[int, int] = {}
        """The same of the files that the reserve had no space for, or that have damaged records, when it was tried."""

    # ---- moves ---------------------------------------------------------------------------------------------------

    def move(self, descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
        """Move the checkpointed entries of ledgers, given in order of their ids, to a tier.

        Raises:
            UnmovedError: Damaged records stay in their files. All others were moved durably.
        """
        self._garbage.purge()
        self._needs.clear()
        store = self._store
        work = []
        index_bytes = 0
        changed: list[tuple[LedgerDescriptor, LedgerRow]] = []
        for descriptor in descriptors:
            if descriptor.deleted or descriptor.last_indexed < 0:
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
        check_index_space(self._store, index_bytes + len(changed) * INDEX_ROW_BYTES)
        unmoved = self.relocate(work, tier, [row for _, row in changed], reason="move")
        for descriptor, row in changed:
            descriptor.indexed(row.metadata.version, row.last_add_confirmed)
        store.clean([descriptor for descriptor, _ in changed])
        if unmoved:
            raise UnmovedError(unmoved, tier)

    def _elsewhere(self, page: RunLocations, tier: str) -> list[RunLocations]:
        """Return the runs of a page that lie in files of other tiers, split by file."""
        rows = self._catalog_and_index.files
        files = page["file"].tolist()
        if files.count(files[0]) == len(files):
            return [] if rows[files[0]].tier == tier else [page]
        return by_file(page[np.array([rows[file_id].tier != tier for file_id in files], np.bool_)])

    def relocate(
        self,
        work: list[tuple[int, list[RunLocations]]],
        tier: StorageHint,
        rows: Sequence[LedgerRow] = (),
        *,
        reason: Literal["compaction", "move"] = "compaction",
        reserved: ReservedFile | None = None,
    ) -> list[Unmoved]:
        """Move runs of ledgers to a tier and record it in catalog and index, with the ledgers' rows that changed.

        Args:
            work: The runs by ledger; each array has the runs of one file.
            tier: The tier.
            rows: The rows.
            reason: Why, for ``MOVED_BYTES``.
            reserved: The reserve to write to instead of new files; then damaged records are refused.

        Returns:
            The damaged records, which stay in their files.

        Raises:
            StorageFullError: There is no space, or a record is damaged and there is only the reserve.
        """
        store = self._store
        mover = Mover(store, tier, reserved=reserved)
        try:
            moved = [
                (ledger_id, part, mover.move(ledger_id, part))
                for ledger_id, parts in work
                for part in parts
                if len(part)
            ]
            if reserved is not None and mover.unmoved:
                raise StorageFullError(f"a file with damaged records is not packed in {reserved.path}")
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
        self._garbage.freed = True
        moved_bytes = sum(int(new["body"][new["file"] != old["file"][0]].sum()) for _, old, new in moved)
        store.metrics.add(MOVED_BYTES, moved_bytes, tier=tier.value, labels=(("reason", reason),))
        for ledger_id in {ledger_id for ledger_id, _, _ in moved}:
            store.moved(ledger_id)
        for ledger_id, old, new in moved:
            self._garbage.remember(self._garbage.keys_of(ledger_id, old, new))
        self._garbage.purge()
        self._drop_dead()
        return list(mover.unmoved.values())

    def collect(self, *, packs: bool = True) -> None:
        """Free the space of deleted ledgers: drop files without live entries, pack those that are mostly dead.

        Files with few live bytes come first, because they free space for the others. Files for which there is no space
        are packed in the reserve; those that it does not take are tried again later.

        Args:
            packs: False only drops files, and merges small ones; ``freed`` stays set.

        Raises:
            StorageFullError: Entries of another tier are in a log file, and their tier has no space.
        """
        self._drop_dead()
        if not packs:
            self._merge_small()
            return
        self._garbage.freed = False
        refused: dict[int, StorageRefusedError | OSError] = {}
        live = self._catalog_and_index.live
        for row in sorted(self._catalog_and_index.files.values(), key=lambda row: (live[row.file_id], row.file_id)):
            if not tier_of_kind(row.kind).files_are_freed_whole or not (
                row.file_id in self._garbage.mixed or self._is_sparse(row)
            ):
                continue
            if self._left.get(row.file_id) == live[row.file_id]:
                continue
            try:
                self.compact_file(row)
                self._note_left([row.file_id])
            except (StorageRefusedError, OSError) as error:
                if not is_refused(error):
                    raise
                self._garbage.freed = True
                refused[row.file_id] = error
        self._pack_in_reserve([file_id for file_id, reason in refused.items() if _is_lack_of_space(reason)])
        self._merge_small()
        of_other_tiers = [reason for file_id, reason in refused.items() if file_id in self._garbage.mixed]
        if of_other_tiers:
            raise of_other_tiers[-1]

    def _pack_in_reserve(self, file_ids: Iterable[int]) -> None:
        """Pack files for which there is no free space, as far as their reserves suffice; the largest first.

        What a packed file frees may suffice, together with the reserve, for a file with more live records.
        """
        waiting = [waits for file_id in file_ids if (waits := self._waiting(file_id)) is not None]
        waiting.sort(key=lambda waits: waits.disk_bytes, reverse=True)
        reserve = self._store.pack_reserve
        while (fitting := self._first_that_fits(waiting)) is not None:
            waiting.remove(fitting)
            try:
                self._compact_in_reserve(fitting.row)
                with suppress(StorageFullError):  # another program was faster
                    reserve.renew(fitting.row)
            except (StorageRefusedError, OSError) as error:
                if not is_refused(error):
                    raise
                logger.info("a file is packed later: %s", error)

    def _first_that_fits(self, waiting: Sequence[_WaitingFile]) -> _WaitingFile | None:
        """Return the first file whose live records fit in the reserve of its directory."""
        by_directory = {(waits.row.tier, waits.row.directory): waits.row for waits in waiting}
        room = {each: self._store.pack_reserve.bytes_for(row) for each, row in by_directory.items()}
        fitting = (waits for waits in waiting if waits.live_bytes <= room[waits.row.tier, waits.row.directory])
        return next(fitting, None)

    def _waiting(self, file_id: int) -> _WaitingFile | None:
        """Return a file that waits for space; None if the reserve cannot be used for it."""
        row, live = self._catalog_and_index.files.get(file_id), self._catalog_and_index.live[file_id]
        if row is None or not live or self._unfit.get(file_id) == live or not self._store.pack_reserve.bytes_for(row):
            return None
        if set(self._needs_of(row).tiers) != {StorageHint(row.tier)}:
            return None  # its other entries find no space in their tiers, so it would stay
        volumes = self._store.volumes
        disk_bytes = volumes.tier_of(row).disk_bytes(self._store.fs, volumes.path_of(row))
        return _WaitingFile(row, disk_bytes, live)

    def _compact_in_reserve(self, row: FileRow) -> None:
        """Move the live entries of a file to the reserve of its directory."""
        work, index_bytes = self._live_entries(row)
        check_packing_space(self._store, self._catalog_and_index, index_bytes)
        reserved = self._store.pack_reserve.take(row)
        try:
            self.relocate(work[StorageHint(row.tier)], StorageHint(row.tier), reserved=reserved)
        except (StorageRefusedError, OSError) as error:
            if _is_lack_of_space(error):
                self._unfit[row.file_id] = self._catalog_and_index.live[row.file_id]
            raise
        self._garbage.mixed.discard(row.file_id)
        self._store.metrics.add("compactions", 1)

    def _is_sparse(self, row: FileRow) -> bool:
        """Return whether packing a file would make it much smaller."""
        limit = self._store.config.fill_ratio
        live = self._catalog_and_index.live[row.file_id]
        if live >= limit * (row.bytes - BLOCK_BYTES):
            return False
        whole = self._whole.get(row.file_id)
        if whole is None:
            try:
                whole = tier_of_kind(row.kind).all_record_bytes(self._store, row)
            except CorruptError as error:
                logger.error("packing the readable part of a damaged file: %s", error)
                return True
            if whole is None:
                return True
            self._whole[row.file_id] = whole
        return live < limit * whole

    def _merge_small(self) -> None:
        """Merge small cold segments of about one size once there are many, so that their number stays bounded.

        Each entry is written again about five times at most, because a merged segment belongs to a larger size class.
        """
        groups: dict[tuple[str, int], list[FileRow]] = defaultdict(list)
        for row in self._catalog_and_index.files.values():
            if (
                tier_of_kind(row.kind).files_are_merged
                and row.bytes < _MERGED_BYTES_MAX
                and self._left.get(row.file_id) != self._catalog_and_index.live[row.file_id]
            ):
                groups[row.tier, row.bytes.bit_length() // _MERGED_BITS].append(row)
        for group, rows in groups.items():
            if len(rows) < _MERGED_FILES_MIN:
                continue
            try:
                self._merge(StorageHint(group[0]), {row.file_id for row in rows})
                self._unmerged.discard(group)
            except (StorageRefusedError, OSError) as error:
                if not is_refused(error):
                    raise
                if group not in self._unmerged:
                    logger.warning("%d small cold segments are merged later: %s", len(rows), error)
                self._unmerged.add(group)

    def _merge(self, tier: StorageHint, file_ids: set[int]) -> None:
        """Merge some cold segments of a tier into one."""
        check_tier_space(self._store, tier, sum(self._catalog_and_index.live[each] for each in file_ids))
        index = self._store.index
        wanted = sorted(file_ids)
        work = []
        index_bytes = 0
        for ledger_id in sorted(index.ledgers_in(wanted)):
            parts: list[RunLocations] = []
            for page in index.pages(ledger_id):
                mine = np.isin(page["file"], wanted)
                if mine.any():
                    parts += by_file(page[mine])
                    index_bytes += page.nbytes
            work.append((ledger_id, parts))
        check_index_space(self._store, index_bytes)
        check_tier_space(self._store, tier, sum(record_bytes(part) for _, parts in work for part in parts))
        self.relocate(work, tier)
        self._note_left(file_ids)
        self._store.metrics.add("compactions", 1)

    def _note_left(self, file_ids: Iterable[int]) -> None:
        """Note the files that were packed or merged, and are still there."""
        live = self._catalog_and_index.live
        self._left.update({each: live[each] for each in file_ids if each in self._catalog_and_index.files})

    def compact_file(self, row: FileRow) -> None:
        """Move the live entries of a file to new files; those of a log file to the tiers of their ledgers."""
        if row.file_id in self._needs:
            self._check_space(self._needs_of(row))
        work, index_bytes = self._live_entries(row)
        self._note_needs(row, work, index_bytes)
        check_index_space(self._store, index_bytes)
        for tier, ledgers in work.items():
            check_tier_space(self._store, tier, _record_bytes_of(ledgers))
            self.relocate(ledgers, tier)
        self._needs.pop(row.file_id, None)
        self._garbage.mixed.discard(row.file_id)
        self._store.metrics.add("compactions", 1)

    def _needs_of(self, row: FileRow) -> _Needs:
        """Return what packing a file takes, from the last time that it was read if its live entries are the same."""
        noted = self._needs.get(row.file_id)
        if noted is None or noted.live != self._catalog_and_index.live[row.file_id]:
            return self._note_needs(row, *self._live_entries(row))
        return noted

    def _note_needs(
        self, row: FileRow, work: dict[StorageHint, list[tuple[int, list[RunLocations]]]], index_bytes: int
    ) -> _Needs:
        tiers = {tier: _record_bytes_of(ledgers) for tier, ledgers in work.items()}
        needs = _Needs(self._catalog_and_index.live[row.file_id], index_bytes, tiers)
        self._needs[row.file_id] = needs
        return needs

    def _check_space(self, needs: _Needs) -> None:
        """Raise StorageFullError if there is no space for the first entries of a file to be moved."""
        check_index_space(self._store, needs.index_bytes)
        for tier, nbytes in islice(needs.tiers.items(), 1):
            check_tier_space(self._store, tier, nbytes)

    def _live_entries(self, row: FileRow) -> tuple[dict[StorageHint, list[tuple[int, list[RunLocations]]]], int]:
        """Return the runs in a file by tier that they belong in and by ledger, and the bytes of their pages."""
        store = self._store
        work: dict[StorageHint, list[tuple[int, list[RunLocations]]]] = defaultdict(list)
        index_bytes = 0
        for ledger_id, _ in list(store.index.file_ledgers(row.file_id)):
            parts = []
            for page in store.index.pages(ledger_id):
                mine = page["file"] == row.file_id
                if mine.any():
                    parts.append(page[mine])
                    index_bytes += page.nbytes
            ledger = store.index.ledger(ledger_id) if tier_of_kind(row.kind).mixes_hints else None
            work[StorageHint(row.tier) if ledger is None else ledger.metadata.tier].append((ledger_id, parts))
        return work, index_bytes

    def _drop_dead(self) -> None:
        """Remove files without live entries from the index, and unlink them."""
        store = self._store
        live = self._catalog_and_index.live
        files = self._catalog_and_index.files.items()
        dead = [row for file_id, row in files if not live[file_id] and tier_of_kind(row.kind).files_are_freed_whole]
        if not dead:
            return
        gone = [row.file_id for row in dead]
        self._catalog_and_index.commit(self._catalog_and_index.mark, lambda update: Counter(), gone=gone)
        for row in dead:
            for noted in (self._whole, self._left, self._unfit, self._needs):
                noted.pop(row.file_id, None)
            self._garbage.mixed.discard(row.file_id)
            if store.pack_reserve.put_back(row):
                store.supply.forget(row.file_id)
                store.volumes.forget(row.file_id)
            else:
                store.supply.retire(row.file_id)


def _record_bytes_of(ledgers: Iterable[tuple[int, list[RunLocations]]]) -> int:
    return sum(record_bytes(part) for _, parts in ledgers for part in parts)


def _is_lack_of_space(error: StorageRefusedError | OSError) -> bool:
    return isinstance(error, StorageFullError) or (isinstance(error, OSError) and is_full(error))


def _final_row(descriptor: LedgerDescriptor) -> LedgerRow | None:
    """Return the row of a closed ledger whose metadata changed since they were indexed; None for any other ledger.

    The row may be newer than the mark: replay applies only metadata of a higher version, and a closed ledger gets no
    entries. The row of an open ledger has to wait for a checkpoint.
    """
    metadata = descriptor.metadata
    last = descriptor.last_indexed
    if not descriptor.changed or metadata.state is not LedgerState.CLOSED or last != metadata.last_entry_id:
        return None
    return LedgerRow(metadata, last, descriptor.last_add_confirmed, descriptor.length_durable)
