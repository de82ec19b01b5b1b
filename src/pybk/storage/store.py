"""A live store: the log, the index and the tiers of one process, opened, recovered and closed."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from pybk.config import StoreConfig
from pybk.errors import ClosedError, CorruptError
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.flags import StorageHint
from pybk.metrics import Metrics
from pybk.storage.changes import ChangingView
from pybk.storage.compaction.scheduler import Scheduler
from pybk.storage.compaction.tier_policy import TierQueue
from pybk.storage.consistency import (
    OlderIndexError,
    compare_catalogs,
    older_environments,
    older_log_files,
    refuse_older,
    short_files,
)
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.directories import (
    INDEX,
    OpenEnvironment,
    catalog_ids,
    check_doubtful,
    check_index_present,
    check_present,
    check_reachable,
    checked_mark,
    create_store,
    find_cookie,
    forget_lost_environments,
    make_directory,
    mend_cookies,
    missing_files,
    note_lost_environments,
    remove_leftovers,
    store_directories,
)
from pybk.storage.format.catalog import CatalogState
from pybk.storage.format.cold_segment import check_codec
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.entries_mark import NO_MARK, EntriesMark, write_entries_mark
from pybk.storage.format.index_rows import Mark
from pybk.storage.format.watermark import Watermark
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.index import Index
from pybk.storage.io.failures import storage_error
from pybk.storage.io.filesystem import FileSystem, Lock, OsFileSystem
from pybk.storage.io.lmdb_environment import Environment, LmdbEnvironment
from pybk.storage.io.lmdb_file import LMDB_LOCK
from pybk.storage.io.permissions import PRIVATE, Access, access_of, excess_warning
from pybk.storage.log.commit import Commit
from pybk.storage.log.log import Log
from pybk.storage.log.preallocation import LogFileSupply
from pybk.storage.log.recovery import RecoveredLog, keep_log, recover_log
from pybk.storage.log.salvage import Salvage, keep_watermark, open_watermark, replace_missing, salvage_log
from pybk.storage.named_records import NamedChange
from pybk.storage.transaction_group import GroupAppend, GroupAppended, LedgerEntries
from pybk.storage.troubles import Troubles
from pybk.storage.volumes import ENTRIES, Directory, Volumes, save_directories

logger = logging.getLogger(__name__)


def open_environment(path: str, access: Access = PRIVATE) -> Environment:
    """Open an LMDB environment for a live store; what is missing of it is made for ``access``."""
    return LmdbEnvironment(path, access=access)


class _Opening:
    """One open of a store, up to the point where it is proven that its parts fit each other.

    Nothing on disk is changed here but the lock files of LMDB; salvaging notes which environments are missing.
    """

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        cookie: Cookie,
        tiers: Mapping[StorageHint, str | Sequence[str]] | None,
        environment: OpenEnvironment,
        lost: list[str] | None,
    ) -> None:
        self.fs = fs
        self.root = root
        self.cookie = cookie
        self.tiers = tiers
        self.environment = environment
        self.lost = lost

    def run(self, store_class: type[Store], lock: Lock, config: StoreConfig, metrics: Metrics) -> Store:
        """Open the store's parts, compare them and make the store.

        Raises:
            OlderIndexError: The index is older than the catalog and must be made again. All is closed again.
            PybkError, OSError: The store does not open; all but the lock is closed again.
        """
        with ExitStack() as undo:
            parts = self._open_parts(undo)
            try:
                self._compare(parts)
                store = store_class(lock, self.cookie, config, parts, metrics, self.lost)
            except CorruptError as error:
                if parts.newer is None or self.lost is not None:
                    raise
                raise OlderIndexError(str(error), parts.newer) from error
            undo.pop_all()
        return store

    def _open_parts(self, undo: ExitStack) -> Parts:
        fs, root, cookie = self.fs, self.root, self.cookie
        doubtful: list[Directory] = []
        volumes = Volumes(fs, root, store_directories(fs, root, cookie, self.tiers, doubtful))
        path = os.path.join(volumes.tier_paths(StorageHint.SSD)[0], INDEX)
        check_index_present(fs, path, root)
        index_environment = self.environment(path)
        undo.callback(index_environment.close)
        index = Index(index_environment)
        mark = checked_mark(index, cookie, root)
        watermark = open_watermark(fs, root, cookie.store_id, self.lost)
        undo.callback(watermark.close)
        new_watermark = bool(self.lost)
        files = index.files()
        check_reachable(volumes, files)
        for row in files.values():
            volumes.add(row)
        check_doubtful(volumes, doubtful, files, cookie.store_id)
        volumes.reserve_ids(max([mark.next_file_id, *(file_id + 1 for file_id in catalog_ids(fs, root))]))
        newer, problem = compare_catalogs(volumes, cookie, mark)
        try:
            (check_present if self.lost is None else note_lost_environments)(volumes)
        except CorruptError as error:
            if newer is None:
                raise
            raise OlderIndexError(str(error), newer) from error
        entries = {}
        for row in files.values():
            if row.kind == ENTRIES:
                entries[row.file_id] = self.environment(volumes.path_of(row))
                undo.callback(entries[row.file_id].close)
        if problem is None:
            catalog_and_index = CatalogAndIndex.open(volumes, index, mark, cookie)
        else:
            wrong = next(index.check(), None)
            if wrong is not None:
                raise CorruptError(f"{problem}; and the index, from which it might be made again, is damaged: {wrong}")
            logger.warning("the catalog of %s is made again from the index: %s", root, problem)
            catalog_and_index = CatalogAndIndex(volumes, index, mark, None, cookie)
        undo.callback(catalog_and_index.close)
        return Parts(volumes, index, index_environment, entries, watermark, catalog_and_index, newer, new_watermark)

    def _compare(self, parts: Parts) -> None:
        """Compare the files and the SSD tier with the index; what is older is refused, or noted for salvaging."""
        volumes, mark = parts.volumes, parts.catalog_and_index.mark
        files = parts.catalog_and_index.files
        if self.lost is None:
            refuse_older(volumes, files, parts.entries, mark)
            return
        if parts.newer is not None:
            self.lost.append(f"the index of {self.root} is older than its catalog")
        older = older_log_files(volumes, files.values())
        self.lost += [
            f"{volumes.path_of(row)} is older than the index: it ends after {older[row]} bytes" for row in older
        ]
        short = short_files(volumes, files.values())
        self.lost += [
            f"{volumes.path_of(row)} has {size} bytes, and the index says {row.bytes}" for row, size in short.items()
        ]
        gone = missing_files(volumes)
        there = [row for row in files.values() if row not in gone]
        self.lost += older_environments(volumes, there, parts.entries, mark).values()


def _make_again(opening: _Opening, error: OlderIndexError) -> None:
    """Make the index again from a newer catalog.

    Raises:
        CorruptError: That would lose entries, or the catalog does not fit the log either; nothing was changed.
    """
    from pybk.storage.repair.rebuild import rebuild_locked  # not before it is needed: hardly any open is

    root = opening.root
    logger.warning("the index of %s is older than its catalog, and is made again from it: %s", root, error)
    found = rebuild_locked(opening.fs, root, opening.cookie, opening.tiers, opening.environment, state=error.state)
    if not found.made:
        raise CorruptError(
            f"the index of {root} is older than its catalog, and making it again would lose "
            f"{sum(one.last_entry_id + 1 - one.first_entry_id for one in found.lost)} entries "
            f"({'; '.join(found.problems) or 'files are missing or older'}); nothing was changed: put the newer files "
            f"back, or run `pybk rebuild-index {root} --accept-loss`"
        ) from error


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of.

    ``newer`` is what a catalog says that is newer than the index, None for nothing; ``new_watermark`` says whether the
    watermark is another one, made because the store's own is lost.
    """

    volumes: Volumes
    index: Index
    index_environment: Environment
    entries: dict[int, Environment]
    watermark: Watermark
    catalog_and_index: CatalogAndIndex
    newer: CatalogState | None
    new_watermark: bool


def _warn_of_others(volumes: Volumes) -> None:
    """Log one warning if more users than those of the store can reach its directories or take its locks."""
    tiers = [directory.path for directory in volumes.directories]
    locks = [os.path.join(tier, name, LMDB_LOCK) for tier in tiers for name in (INDEX, ENTRIES)]
    found = volumes.fs.exceeding([volumes.root, *tiers, os.path.join(volumes.root, "LOCK"), *locks])
    if found:
        logger.warning("%s", excess_warning(volumes.fs.access, volumes.root, found))


class Store(ChangingView):
    """One directory's ledgers, open for appending.

    Threads: any.
    """

    @classmethod
    def open(
        cls,
        root: str,
        *,
        config: StoreConfig,
        tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
        metrics: Metrics | None = None,
        fs: FileSystem | None = None,
        environment: OpenEnvironment | None = None,
        salvage: bool = False,
    ) -> Store:
        """Open a store, making it if there is none, and bring it to the state of its last durable commit.

        With ``salvage``, what is missing or damaged of the log, the files and the watermark is passed over, and told in
        ``salvage``: for who has it elsewhere, records that in the store, and then calls ``keep_salvage``.

        Raises:
            UsageError: ``tiers`` is malformed, a path is no directory, or ``config.group`` cannot be used.
            StoreLockedError: Another process has it open.
            CookieError: A directory is not what it should be, or is not named.
            CorruptError: Something that was durable is damaged or missing.
            UsageError: ``config.cold_compression`` needs a package that is not installed; nothing was touched.

        Durability: The tier directories are remembered once the store is open, and not if it does not open.
        """
        check_codec(config.cold_compression)
        root = os.path.abspath(root)
        fs = fs or OsFileSystem(access_of(os.path.join(root, "LOCK"), config.group))
        environment = environment or partial(open_environment, access=fs.access)
        with ExitStack() as undo:
            try:
                fs.hold_spares()
                undo.callback(fs.release_spares)
                make_directory(fs, root)
                lock = fs.lock(os.path.join(root, "LOCK"))
                undo.callback(lock.release)
                cookie = find_cookie(fs, root, tiers)
                if cookie is None:
                    cookie = create_store(fs, root, tiers, environment)
                opening = _Opening(fs, root, cookie, tiers, environment, [] if salvage else None)
                try:
                    store = opening.run(cls, lock, config, metrics or Metrics())
                except OlderIndexError as error:
                    _make_again(opening, error)
                    store = opening.run(cls, lock, config, metrics or Metrics())
                undo.pop_all()
                undo.callback(store.close)
                if tiers is not None:
                    save_directories(fs, root, store.volumes.directories)
                _warn_of_others(store.volumes)
                undo.pop_all()
                return store
            except OSError as error:
                raise storage_error(error, f"opening {root}") from error

    def __init__(
        self,
        lock: Lock,
        cookie: Cookie,
        config: StoreConfig,
        parts: Parts,
        metrics: Metrics,
        lost: list[str] | None,
    ) -> None:
        volumes, watermark, catalog_and_index = parts.volumes, parts.watermark, parts.catalog_and_index
        super().__init__(
            fs=volumes.fs,
            config=config,
            volumes=volumes,
            index=parts.index,
            entries=parts.entries,
            metrics=metrics,
        )
        self.troubles = Troubles(volumes.root)
        self.cookie = cookie
        self.store_id = cookie.store_id
        self.feature_level = cookie.level
        self._lock_file = lock
        self._index_environment = parts.index_environment
        self._catalog_and_index = catalog_and_index
        self._watermark = watermark
        self._ids = threading.Lock()
        mark = catalog_and_index.mark
        self._tail_added = 0  # by the log's driver alone
        self._tail_checked = 0  # by checkpoints alone
        self.next_ledger_id = mark.next_ledger_id
        self.next_creation_sequence = mark.next_creation_sequence
        self.salvage: Salvage | None = None
        """What opening passed over, until ``keep_salvage``; None for nothing."""
        recovered = self._recover(mark, lost, parts)
        self.began_clean = watermark.clean and watermark.durable_lsn() == recovered.next_lsn - 1
        """Whether the last process ended by closing the store, so that nothing it had buffered can be lost."""
        self._become_live(recovered, catalog_and_index)
        for descriptor in self._dirty.values():
            descriptor.settle()
            self.next_ledger_id = max(self.next_ledger_id, descriptor.ledger_id + 1)
            self.next_creation_sequence = max(self.next_creation_sequence, descriptor.metadata.creation_sequence + 1)
        watermark.clean = False
        watermark.advance(recovered.next_lsn - 1)
        self.supply = LogFileSupply(volumes, config, self._wake_scheduler, self.troubles)
        for row, used in recovered.files:
            volumes.add(row)
            if self.salvage is None:
                self.supply.adopt(row, used)
            self._tail_added += used
        self.log = Log(
            store_id=self.store_id,
            files=self.supply,
            watermark=watermark,
            observer=self,
            next_lsn=recovered.next_lsn,
            outstanding_bytes_max=config.max_outstanding_bytes,
            writes_by_time=config.background,
        )
        self.named.log = self.log
        policy = config.tier_policy
        self.tier_queue = None if policy is None else TierQueue(self, policy)
        self.scheduler = Scheduler(self, catalog_and_index)
        if self.salvage is None:
            self.scheduler.start()

    def _become_live(self, recovered: RecoveredLog, catalog_and_index: CatalogAndIndex) -> None:
        """Change the store for the first time, now that its parts are proven to fit each other."""
        volumes = self.volumes
        catalog_and_index.begin()
        remove_leftovers(volumes, catalog_and_index.mark)
        mend_cookies(self.fs, volumes.root, self.cookie, volumes.directories)
        keep_log(volumes, recovered)

    def _recover(self, mark: Mark, lost: list[str] | None, parts: Parts) -> RecoveredLog:
        """Bring the ledgers to the state of the last durable commit, in memory.

        Args:
            mark: The index's mark.
            lost: None unless asked to salvage.
            parts: The store's; the log must reach what was durable when a newer catalog was written.
        """
        volumes, watermark, newer = self.volumes, self._watermark, parts.newer
        durable_lsn = max(mark.durable_lsn, watermark.durable_lsn(), 0 if newer is None else newer.mark.durable_lsn)
        rewrite_beyond = watermark.durable_lsn()  # after a clean end there is nothing beyond, unless it is an older one
        if lost is None:
            return recover_log(
                self,
                volumes,
                store_id=self.store_id,
                first_file_id=mark.first_log_file_id,
                first_lsn=mark.next_lsn,
                durable_lsn=durable_lsn,
                rewrite_beyond=rewrite_beyond,
            )
        recovered, more, next_ledger_id = salvage_log(
            self,
            volumes,
            store_id=self.store_id,
            first_file_id=mark.first_log_file_id,
            first_lsn=mark.next_lsn,
            durable_lsn=durable_lsn,
            rewrite_beyond=rewrite_beyond,
        )
        missing = missing_files(volumes)
        lost += [*more, *(f"{volumes.path_of(row)} is missing" for row in missing)]
        self.next_ledger_id = max(self.next_ledger_id, next_ledger_id)
        self.salvage = Salvage(tuple(lost), tuple(missing), tuple(recovered.files), parts.new_watermark)
        return recovered

    def keep_salvage(self) -> None:
        """Take what was salvaged for the store: durable on return, and the next open is an ordinary one.

        Call it once it is recorded, durably and in the store, that something is missing.

        Raises:
            StorageError: It may not be durable; the next open salvages again.
        """
        salvage = self.salvage
        assert salvage is not None, "nothing was salvaged"
        # A checkpoint removes the log files that it moved the mark past, and punches holes in them before.
        for row, used in salvage.files:
            self.supply.adopt(row, used)
        try:
            replace_missing(self.volumes, [row for row in salvage.missing if row.kind != ENTRIES])
            forget_lost_environments(self.volumes, salvage.missing)
            self._take_older_parts()
            if salvage.new_watermark:
                keep_watermark(self.fs, self.volumes.root)
        except OSError as error:
            raise storage_error(error, f"salvaging {self.volumes.root}") from error
        self.scheduler.checkpoint()
        self.salvage = None
        self.scheduler.start()

    def release_dead_readers(self) -> None:
        """Free what killed read-only processes hold in the index and the SSD tier, so that pages are used again."""
        for environment in (self._index_environment, *self.entries.values()):
            freed = environment.release_dead_readers()
            if freed:
                logger.info("%s: %d readers that were killed hold nothing any more", self.volumes.root, freed)

    def _take_older_parts(self) -> None:
        """Have the index rely on files and environments as they are, although they are older than it, or were cut."""
        catalog_and_index, files = self._catalog_and_index, self.index.files()
        ends = older_log_files(self.volumes, files.values()) | short_files(self.volumes, files.values())
        if ends:
            added = [row._replace(bytes=ends[row]) for row in ends]
            catalog_and_index.commit(catalog_and_index.mark, lambda update: Counter(), added=added)
            for row in added:
                self.volumes.add(row)
        for row in older_environments(self.volumes, files.values(), self.entries, catalog_and_index.mark):
            with self.entries[row.file_id].write() as transaction:
                write_entries_mark(transaction, EntriesMark(row.bytes, NO_MARK.removed_at))

    def _wake_scheduler(self) -> None:
        scheduler = getattr(self, "scheduler", None)
        if scheduler is not None:
            scheduler.wake()

    # ---- what the log tells --------------------------------------------------------------------------------------

    def committed(self, commit: Commit, now_ns: int) -> None:
        """Count a durable commit; called by the log's driver."""
        dirty = self._dirty
        for run, _, _ in commit.places:
            descriptor = run.descriptor
            meter = descriptor.meter
            if meter is None:
                metadata = descriptor.metadata
                meter = descriptor.meter = self.metrics.scope(metadata.ledger_type, metadata.tier)
            meter.appended(len(run.sizes), run.encoded_bytes, now_ns - run.staged_ns)
            # A ledger with a tail, as this one has, is not forgotten meanwhile.
            if descriptor.ledger_id not in dirty:
                self._note_change(descriptor)
        self._tail_added += commit.size
        if self.tail_bytes * 2 >= self.config.unchecked_tail_bytes:
            with self._lock:
                self._hold_or_release()
            self.scheduler.wake()
        elif self.scheduler.rests:
            self.scheduler.wake()

    def raise_level(self, level: FeatureLevel = NEWEST_LEVEL) -> None:
        """Write the store in the formats of a higher feature level from now on; durable on return.

        Older versions of pybk that do not know the level refuse the store from then on. A level is never lowered:
        asking for a lower one does nothing. After a stop at any point the next open completes what is left.

        Raises:
            StorageFullError: There is no room for a new catalog; the level is raised all the same.
            StorageFailedError: Something else failed; the store should be closed.
        """
        self.scheduler.raise_level(level)

    def tail_checked(self, tail_bytes: int) -> None:
        """Take note that a checkpoint took care of this much of the tail."""
        with self._lock:
            self._tail_checked += tail_bytes
            self._hold_or_release()

    def _hold_or_release(self) -> None:
        """Have the log refuse entries or take them again; the caller holds ``_lock``."""
        self.log.hold(self.scheduler.full is not None or self.tail_bytes >= self.config.unchecked_tail_bytes)

    def space_checked(self) -> None:
        """Have appends refused while there is no space, and taken again when there is; called by maintenance."""
        with self._lock:
            self._hold_or_release()
        if self.scheduler.full is None:
            self.log.readmit()

    def wait_for_admission(self) -> None:
        """Return when an append that found too much outstanding, or the tail too long, may try again.

        Raises:
            StorageRefusedError: There is no space, or the tail cannot be shortened for now; nothing was appended.
        """
        self.check_space()
        if self.tail_bytes >= self.config.unchecked_tail_bytes:
            self.scheduler.wait_for_admission()
        else:
            self.log.wait_for_space()

    def append_group(self, entries: Sequence[LedgerEntries], changes: Sequence[NamedChange] = ()) -> GroupAppended:
        """Append entries to several ledgers and change named records, all of it or nothing; durable on return.

        After a stop at any point the next open finds the whole group or nothing of it. While the store is open, another
        thread may see one ledger's entries a moment before those of another.

        Args:
            entries: The entries, each ledger once, in any order.
            changes: Changes of named records, each name once, as for ``NamedRecords.compare_and_set``.

        Raises:
            UsageError: The group is empty or larger than ``GROUP_BYTES_MAX``, names more than ``GROUP_LEDGERS_MAX``
                ledgers, or names one twice; or an entry, a name or a value is too long.
            IllegalOperationError: The store's feature level has no groups, or a ledger is advanced or DEFERRED_FORCE.
            LedgerClosedError, LedgerFencedError, NoSuchLedgerError: A ledger takes no more entries.
            VersionConflictError: A named record has another version.
            StorageFullError: There is no room.
            StorageFailedError: All of it may be there or nothing; the store must be closed.

        Unless it raises StorageFailedError, nothing was changed.

        Cost: One synced write, shared by all who append meanwhile. The group holds the locks of its ledgers while its
            entries get their ids and digests.
        """
        return GroupAppend(self, entries, changes).run()

    def write_buffered(self) -> None:
        """Write and sync what deferred appends have buffered, without confirming it; a store that failed just reads."""
        if self.log.error is None:
            self.log.flush(kept=True)

    def take_dirty(self) -> dict[int, LedgerDescriptor]:
        """Return the ledgers changed since the last call; called while the log stands still."""
        with self._lock:
            return dict(self._dirty)

    def moved(self, ledger_id: int) -> None:
        """Take note that entries of a ledger lie elsewhere."""
        with self._lock:
            descriptor = self._descriptors.get(ledger_id)
        if descriptor is not None:
            self.refresh(descriptor)

    def clean(self, descriptors: Sequence[LedgerDescriptor]) -> None:
        """Take note that the index knows all of these ledgers, except what was appended or changed meanwhile."""
        with self._lock:
            for descriptor in descriptors:
                with descriptor.place_lock:
                    if not descriptor.tail_firsts and not descriptor.changed:
                        self._dirty.pop(descriptor.ledger_id, None)

    # ---- closing -------------------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Be of no use in a forked child, for appending either."""
        super().after_fork()
        self.log.after_fork(self.fork_error())

    def close(self, *, clean: bool = True) -> None:
        """Wait for what is outstanding, stop the threads and give the directory free; open ledgers stay open.

        Args:
            clean: False has the next process take this end for one by accident.
        """
        with ExitStack() as closing:
            closing.callback(self.fs.release_spares)
            closing.callback(self._lock_file.release)
            for environment in (self._index_environment, *self.entries.values()):
                closing.callback(environment.close)
            closing.callback(self._watermark.close)
            closing.callback(self.volumes.close)
            try:
                try:
                    self.scheduler.stop()
                    self.end()
                    self.log.close()
                finally:
                    self.scheduler.close()
                    self.supply.close()
            except OSError as error:
                raise storage_error(error, f"closing {self.volumes.root}") from error
            if clean and self.salvage is None and isinstance(self.log.error, ClosedError):
                self._watermark.clean = True
