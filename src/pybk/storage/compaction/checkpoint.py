"""The checkpoint: writes the state of changed ledgers to the index, and moves entries from the log to their tiers.

Theory of operation
===================

A checkpoint bounds the log that the next open must replay, and takes entries of SSD and HDD ledgers out of the log
files. Its steps, each durable before the next begins:

1. *Cut* the log. The commit being written is the last in its log file; while the log stands still, ``_snapshot`` copies
   the state of all changed ledgers (``_Window``). Appends then continue in the next log file and belong to the next
   checkpoint.
2. *Place* the window's entries: NVMe ledgers stay in log files that they fill well; all other entries are written to
   their tiers by a ``Mover`` and synced. If a tier has no space, all entries stay in the log files, which count as
   *mixed* from then on; compaction moves those entries later. Only those in log files of the reserve go to the SSD
   tier, which has space allocated for them: few and short ones, such as the first entries of logs that were taken over.
   So the reserve has its files again, however often processes are killed on a full disk.
3. *Commit* catalog and index (``CatalogAndIndex.commit``), with a mark that names the first log file after the cut.
4. *Forget*: descriptors drop the part of the tail that the index now has, log files that were emptied are unlinked, and
   records of deleted ledgers are deleted from the SSD tier.

After a crash before step 3, the next open removes files that no index names, and replays the log from the old mark.
A crash after it leaves files without live entries; the next open or compaction drops those. So an old location is never
dropped before the index that names the new one is durable.

``next_lsn`` of the mark is the LSN after the cut, so replay starts with entries that the index does not have. A ledger
that changes between cut and step 4 stays in the store's dirty set: ``descriptor.indexed`` and ``Store.clean`` compare
what the window has with what is current.

Locks: the scheduler runs one job at a time. The checkpoint itself holds a lock only inside the calls that it makes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pybk.errors import StorageRefusedError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.metrics import CHECKPOINT_TIME
from pybk.storage.compaction.mover import Mover
from pybk.storage.directories import mend_cookies
from pybk.storage.format.index_rows import CheckpointMark, FileRow, LedgerRow, NamedRow
from pybk.storage.format.log_file import BLOCK_BYTES, RunLocations
from pybk.storage.index.index import by_file, bytes_by_file
from pybk.storage.io.failures import is_refused, undoing
from pybk.storage.preallocation import was_reserved
from pybk.storage.space import (
    check_catalog_space,
    check_index_space,
    check_tier_space,
    index_change_bytes,
    record_bytes,
)
from pybk.storage.tiers import LOG
from pybk.storage.tiers.lmdb_tier import room_of

if TYPE_CHECKING:
    from pybk.storage.descriptor import LedgerDescriptor
    from pybk.storage.index.catalog_and_index import CatalogAndIndex
    from pybk.storage.index.index import IndexUpdate
    from pybk.storage.live_store import LiveStore
    from pybk.storage.space import Garbage

logger = logging.getLogger(__name__)


class _Window(NamedTuple):
    """The snapshot of the changed ledgers, taken while the log stood still.

    Attributes:
        next_lsn: The LSN of the first commit after the snapshot.
        descriptors: The changed ledgers, in order of their ids.
        rows: Their rows for the index.
        dropped: Deleted ledgers.
        tails: Where the entries of ``descriptors`` lie that the index does not have, an array for each ledger.
        log_files: The log files since the last checkpoint, with the bytes used in each.
        tail_bytes: The log since the last checkpoint, bytes.
        named: Named records that changed.
    """

    next_lsn: int
    descriptors: list[LedgerDescriptor]
    rows: list[LedgerRow]
    dropped: list[LedgerDescriptor]
    tails: list[RunLocations]
    log_files: list[FileRow]
    tail_bytes: int
    named: list[NamedRow]


class _Placed(NamedTuple):
    """The new locations of a window's entries, an array for each ledger, and the files to add to the index."""

    runs: list[RunLocations]
    files: list[FileRow]


class Checkpoint:
    """The checkpoints of one store.

    Every method raises StorageFullError, or OSError for lack of space, if it could not finish; its completed steps are
    consistent. Any other OSError, and StorageFailedError, mean that the store must be closed.

    Threads: one at a time, which the scheduler ensures.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex, garbage: Garbage) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._garbage = garbage

    def run(self) -> None:
        """Write all state that is durable in the log to the index, and all durable entries to their tiers."""
        began_ns = time.monotonic_ns()
        self._garbage.purge()
        store = self._store
        if store.tail_bytes:
            # Before the log is cut, because that leaves a log file of the reserve, of which there are few.
            check_index_space(store, store.change_bytes())
            check_catalog_space(self._catalog_and_index, store.change_bytes())
        window: list[_Window] = []
        store.log.cut(lambda: window.append(self._snapshot()))
        taken = window[0]
        store.supply.tidy()
        if taken.descriptors or taken.dropped or taken.log_files:
            self.take_over(taken)
            self._garbage.purge()
            store.metrics.observe(CHECKPOINT_TIME, time.monotonic_ns() - began_ns)
        if not store.tail_bytes:
            store.supply.rest(store.volumes.disk_bytes)

    def take_over(self, taken: _Window) -> None:
        """Move the entries of a window to their tiers, and record that in the catalog and the index."""
        store = self._store
        named_bytes = sum(len(row.value or b"") for row in taken.named)
        ledgers = len(taken.rows) + len(taken.dropped)
        check_index_space(store, index_change_bytes(ledgers, sum(map(len, taken.tails)), named_bytes))
        dropped = [gone.ledger_id for gone in taken.dropped if store.index.ledger(gone.ledger_id) is not None]
        purge = self._garbage.keys_of_ledgers(dropped)
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
        self._garbage.freed = self._garbage.freed or bool(dropped)
        self._garbage.remember(purge)
        self._taken_over(taken, {row.file_id for row in placed.files})

    def _taken_over(self, taken: _Window, kept: set[int]) -> None:
        """Drop the state that the index has now."""
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
                store.supply.retire(log_file.file_id)
        store.tail_checked(taken.tail_bytes)
        store.metrics.add("checkpoints", 1)

    def _snapshot(self) -> _Window:
        """Return the snapshot of the changed ledgers; called while the log stands still."""
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
        return _Window(store.log.durable_lsn + 1, descriptors, rows, dropped, tails, log_files, store.tail_bytes, named)

    def _next_mark(self, taken: _Window) -> CheckpointMark:
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

    def _place(self, taken: _Window) -> _Placed:
        """Write the entries of a window to their tiers; without space, leave them in the log files.

        In the latter case files without live entries are dropped nevertheless, those of the reserve are emptied, and
        ``collect`` continues file by file.
        """
        sizes = [len(runs) for runs in taken.tails]
        if not sum(sizes):
            return _Placed(taken.tails, [])
        runs = np.concatenate(taken.tails)
        tiers = list(StorageHint)
        tier_of = np.repeat([tiers.index(row.metadata.tier) for row in taken.rows], sizes)
        in_tier = tier_of == tiers.index(StorageHint.NVME)
        reserved = {row.file_id for row in taken.log_files if was_reserved(self._store.volumes, row)}
        stays = self._staying(runs, in_tier, taken.log_files) - reserved
        leaving = ~(in_tier & np.isin(runs["file"], list(stays)))
        try:
            for number in np.unique(tier_of[leaving]).tolist():
                check_tier_space(self._store, tiers[number], record_bytes(runs[leaving]))
            return self._write(
                taken, lambda tier, file_id: None if tier is StorageHint.NVME and file_id in stays else tier
            )
        except (StorageRefusedError, OSError) as error:
            if not is_refused(error):
                raise
            logger.warning("entries stay in the log files until they can be packed: %s", error)
        self._garbage.mixed |= set(np.unique(runs["file"][~in_tier]).tolist())
        self._garbage.freed = True
        emptied = self._emptied(runs, reserved)
        try:
            return self._write(
                taken, lambda _, file_id: StorageHint.SSD if file_id in emptied else None, when_full=True
            )
        except (StorageRefusedError, OSError) as error:
            if not is_refused(error):
                raise
            logger.warning("log files of the reserve stay in use: %s", error)
        return self._write(taken, lambda _, __: None)

    def _emptied(self, runs: RunLocations, reserved: set[int]) -> set[int]:
        """Return the log files of the reserve whose entries the SSD tier takes although there is no free space.

        Each takes a quarter of the space at most, so that it lasts for many with few entries.
        """
        store = self._store
        room = min((room_of(store, file_id) for file_id in store.entries), default=0) // 2
        emptied = set()
        for nbytes, file_id in sorted((record_bytes(runs[runs["file"] == each]), each) for each in reserved):
            if 4 * nbytes <= room:
                emptied.add(file_id)
                room -= nbytes
        return emptied

    def _write(
        self, taken: _Window, target: Callable[[StorageHint, int], StorageHint | None], *, when_full: bool = False
    ) -> _Placed:
        """Write entries of a window to tiers.

        Args:
            taken: The window.
            target: Returns where entries of a ledger of a tier go that lie in a file; None if they stay there.
            when_full: As for ``Tier.writer``.
        """
        placed: dict[int, list[RunLocations]] = defaultdict(list)
        movers: dict[StorageHint, Mover] = {}
        try:
            for number, row in enumerate(taken.rows):
                for part in by_file(taken.tails[number]):
                    tier = target(row.metadata.tier, int(part["file"][0]))
                    if tier is None:
                        placed[number].append(part)
                        continue
                    mover = movers.get(tier)
                    if mover is None:
                        mover = movers[tier] = Mover(self._store, tier, when_full=when_full)
                    placed[number].append(mover.move(row.metadata.ledger_id, part))
            made = [file for mover in movers.values() for file in mover.finish()]
        except BaseException as error:
            for mover in movers.values():
                with undoing(error):
                    mover.abort()
            raise
        result = [np.concatenate(placed[n]) if n in placed else tail[:0] for n, tail in enumerate(taken.tails)]
        # A file with a damaged record stays as well: reading the record must raise CorruptError, not NoSuchEntryError.
        held = {int(file_id) for part in result for file_id in np.unique(part["file"])}
        return _Placed(result, [*(row for row in taken.log_files if row.file_id in held), *made])

    def _staying(
        self, runs: RunLocations, nvme: np.ndarray[tuple[int], np.dtype[np.bool_]], log_files: list[FileRow]
    ) -> set[int]:
        """Return the log files that NVMe ledgers fill well enough for the files to stay."""
        stays = set()
        for row in log_files:
            mine = nvme & (runs["file"] == row.file_id)
            live = int(runs["body"][mine].astype(np.int64).sum())
            if live and live >= self._store.config.fill_ratio * max(row.bytes - BLOCK_BYTES, 1):
                stays.add(row.file_id)
        return stays

    def raise_level(self, level: FeatureLevel) -> None:
        """Write the store in the formats of a higher level; durable on return.

        After a crash the store has its old level or the new one, and the next open or checkpoint completes the change.
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
