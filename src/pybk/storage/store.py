"""A live store: the log, the index and the tiers of one process, opened, recovered and closed."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from pybk.config import StoreConfig
from pybk.errors import ClosedError
from pybk.flags import StorageHint
from pybk.metrics import Metrics
from pybk.storage.ahead import LogFileSupply
from pybk.storage.changes import ChangingView
from pybk.storage.cold import check_codec
from pybk.storage.commit import Commit
from pybk.storage.cookie import Cookie
from pybk.storage.creation import (
    INDEX,
    OpenEnvironment,
    check_present,
    check_reachable,
    checked_mark,
    create_store,
    forget_lost_environments,
    main_cookie,
    make_directory,
    missing_files,
    note_lost_environments,
    remove_leftovers,
    store_directories,
)
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.environment import Environment, LmdbEnvironment
from pybk.storage.failures import storage_error
from pybk.storage.filesystem import FileSystem, Lock, OsFileSystem
from pybk.storage.index import Index
from pybk.storage.index_rows import Mark
from pybk.storage.log import Log
from pybk.storage.maintenance import Maintenance
from pybk.storage.registry import Registry
from pybk.storage.salvage import Salvage, keep_watermark, open_watermark, replace_missing, salvage_log
from pybk.storage.tail import RecoveredLog, recover_log
from pybk.storage.tiering import TierQueue
from pybk.storage.troubles import Troubles
from pybk.storage.volumes import ENTRIES, Volumes, save_directories
from pybk.storage.watermark import Watermark

logger = logging.getLogger(__name__)


def open_environment(path: str) -> Environment:
    """Open an LMDB environment for a live store."""
    return LmdbEnvironment(path)


def _open_entries(
    volumes: Volumes, environment: OpenEnvironment, opened: list[Callable[[], None]]
) -> dict[int, Environment]:
    """Open those files of the index that are LMDB environments."""
    entries = {}
    for row in volumes.rows.values():
        if row.kind == ENTRIES:
            entries[row.file_id] = environment(volumes.path_of(row))
            opened.append(entries[row.file_id].close)
    return entries


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
        environment: OpenEnvironment = open_environment,
        salvage: bool = False,
    ) -> Store:
        """Open a store, making it if there is none, and bring it to the state of its last durable commit.

        With ``salvage``, what is missing or damaged of the log, the files and the watermark is passed over, and told in
        ``salvage``: for who has it elsewhere, records that in the store, and then calls ``keep_salvage``.

        Raises:
            UsageError: ``tiers`` is malformed, or a path is no directory.
            StoreLockedError: Another process has it open.
            CookieError: A directory is not what it should be, or is not named.
            CorruptError: Something that was durable is damaged or missing.
            UsageError: ``config.cold_compression`` needs a package that is not installed; nothing was touched.

        Durability: The tier directories are remembered once the store is open, and not if it does not open.
        """
        check_codec(config.cold_compression)
        fs = fs or OsFileSystem()
        root = os.path.abspath(root)
        opened: list[Callable[[], None]] = []
        try:
            make_directory(fs, root)
            fs.hold_spares()
            opened.append(fs.release_spares)
            lock = fs.lock(os.path.join(root, "LOCK"))
            opened.append(lock.release)
            cookie = main_cookie(fs, root)
            if cookie is None:
                cookie = create_store(fs, root, tiers, environment)
            volumes = Volumes(fs, root, store_directories(fs, root, cookie, tiers))
            index_environment = environment(os.path.join(volumes.tier_paths(StorageHint.SSD)[0], INDEX))
            opened.append(index_environment.close)
            index = Index(index_environment)
            mark = checked_mark(index, cookie, root)
            lost: list[str] | None = [] if salvage else None
            watermark = open_watermark(fs, root, cookie.store_id, lost)
            opened.append(watermark.close)
            volumes.reserve_ids(mark.next_file_id)
            files = index.files()
            check_reachable(volumes, mark, files)
            for row in files.values():
                volumes.add(row)
            (note_lost_environments if salvage else check_present)(volumes)
            entries = _open_entries(volumes, environment, opened)
            registry = Registry.open(volumes, index, mark, cookie)
            opened.append(registry.close)
            registry.clear()
            metrics = metrics or Metrics()
            store = cls(
                lock, cookie, config, volumes, index, index_environment, entries, watermark, registry, metrics, lost
            )
            opened[:] = [store.close]
            if tiers is not None:
                save_directories(fs, root, volumes.directories)
            return store
        except BaseException as error:
            for undo in reversed(opened):
                undo()
            if isinstance(error, OSError):
                raise storage_error(error, f"opening {root}") from error
            raise

    def __init__(
        self,
        lock: Lock,
        cookie: Cookie,
        config: StoreConfig,
        volumes: Volumes,
        index: Index,
        index_environment: Environment,
        entries: Mapping[int, Environment],
        watermark: Watermark,
        registry: Registry,
        metrics: Metrics,
        lost: list[str] | None,
    ) -> None:
        super().__init__(fs=volumes.fs, config=config, volumes=volumes, index=index, entries=entries, metrics=metrics)
        self.troubles = Troubles(volumes.root)
        self.cookie = cookie
        self.store_id = cookie.store_id
        self.feature_level = cookie.level
        self._lock_file = lock
        self._index_environment = index_environment
        self._watermark = watermark
        self._ids = threading.Lock()
        mark = registry.mark
        self._tail_added = 0  # by the log's driver alone
        self._tail_checked = 0  # by checkpoints alone
        self.next_ledger_id = mark.next_ledger_id
        self.next_creation_sequence = mark.next_creation_sequence
        self.began_clean = watermark.clean
        """Whether the last process ended by closing the store, so that nothing it had buffered can be lost."""
        self.salvage: Salvage | None = None
        """What opening passed over, until ``keep_salvage``; None for nothing."""
        remove_leftovers(self.volumes, mark)
        recovered = self._recover(mark, lost)
        for descriptor in self._dirty.values():
            descriptor.settle()
            self.next_ledger_id = max(self.next_ledger_id, descriptor.ledger_id + 1)
            self.next_creation_sequence = max(self.next_creation_sequence, descriptor.metadata.creation_sequence + 1)
        watermark.clean = False
        watermark.advance(recovered.next_lsn - 1)
        self.supply = LogFileSupply(volumes, config, self._wake_maintenance, self.troubles)
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
        policy = config.tier_policy
        self.tier_queue = None if policy is None else TierQueue(self, policy)
        self.maintenance = Maintenance(self, registry)
        if self.salvage is None:
            self.maintenance.start()

    def _recover(self, mark: Mark, lost: list[str] | None) -> RecoveredLog:
        """Bring the ledgers to the state of the last durable commit; ``lost`` is None unless asked to salvage."""
        volumes, watermark = self.volumes, self._watermark
        durable_lsn = max(mark.durable_lsn, watermark.durable_lsn())
        rewrite_beyond = None if watermark.clean else watermark.durable_lsn()
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
        new_watermark = bool(lost)
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
        self.salvage = Salvage(tuple(lost), tuple(missing), tuple(recovered.files), new_watermark)
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
            if salvage.new_watermark:
                keep_watermark(self.fs, self.volumes.root)
        except OSError as error:
            raise storage_error(error, f"salvaging {self.volumes.root}") from error
        self.maintenance.checkpoint()
        self.salvage = None
        self.maintenance.start()

    def release_dead_readers(self) -> None:
        """Free what killed read-only processes hold in the index and the SSD tier, so that pages are used again."""
        for environment in (self._index_environment, *self.entries.values()):
            freed = environment.release_dead_readers()
            if freed:
                logger.info("%s: %d readers that were killed hold nothing any more", self.volumes.root, freed)

    def _wake_maintenance(self) -> None:
        maintenance = getattr(self, "maintenance", None)
        if maintenance is not None:
            maintenance.wake()

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
            self.maintenance.wake()

    def tail_checked(self, tail_bytes: int) -> None:
        """Take note that a checkpoint took care of this much of the tail."""
        with self._lock:
            self._tail_checked += tail_bytes
            self._hold_or_release()

    def _hold_or_release(self) -> None:
        """Have the log refuse entries or take them again; the caller holds ``_lock``."""
        self.log.hold(self.maintenance.full is not None or self.tail_bytes >= self.config.unchecked_tail_bytes)

    def space_checked(self) -> None:
        """Have appends refused while there is no space, and taken again when there is; called by maintenance."""
        with self._lock:
            self._hold_or_release()
        if self.maintenance.full is None:
            self.log.readmit()

    def wait_for_room(self) -> None:
        """Return when an append that found too much outstanding, or the tail too long, may try again.

        Raises:
            StorageRefusedError: There is no space, or the tail cannot be shortened for now; nothing was appended.
        """
        self.check_space()
        if self.tail_bytes >= self.config.unchecked_tail_bytes:
            self.maintenance.wait_for_room()
        else:
            self.log.wait_for_space()

    def write_buffered(self) -> None:
        """Write and sync what deferred appends have buffered, without confirming it; a store that failed just reads."""
        if self.log.error is None:
            self.log.flush()

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
                    self.maintenance.stop()
                    self.end()
                    self.log.close()
                finally:
                    self.maintenance.close()
                    self.supply.close()
            except OSError as error:
                raise storage_error(error, f"closing {self.volumes.root}") from error
            if clean and self.salvage is None and isinstance(self.log.error, ClosedError):
                self._watermark.clean = True
