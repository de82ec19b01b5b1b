"""A live store: one process's ledgers, appended to, read, checkpointed and moved.

Theory of operation
===================

A ``Store`` puts together the log, which makes entries durable; the index and catalog, which say where entries lie as of
the last checkpoint; the tier directories; and the scheduler, which runs checkpoints and compaction. The state of each
ledger since the last checkpoint is in its ``LedgerDescriptor``. Reading is inherited from ``StoreReader``, which is
also the base of ``ReadOnlyStore``: both read alike and differ in how they learn of new commits.

**Opening.** ``Store.open`` takes the lock file and then: ``PartsOpener`` opens the parts and compares them, without
changing anything; ``_recover`` replays the log from the index's checkpoint mark into descriptors; ``_become_live``
makes the first changes to disk, in an order that a stop may cut anywhere: the catalog's unfinished end, leftover files,
cookies, then the log, whose commits beyond the watermark are written again and synced before anything reads them. If
the index turns out to be older than the catalog, it is made again from the catalog once, and the open is repeated.

**Salvaging.** An ordinary open refuses a store that lost durable data. With ``salvage=True`` it opens
the rest and lists the losses in ``salvage``; no background job runs until the owner has recorded the loss and calls
``keep_salvage``. Bookies do so, because their peers have copies.

**Changes.** Creating, closing, fencing, forcing and deleting a ledger and naming another tier for it are control
records in the log. A change is staged while the caller holds the ledger's lock, becomes durable with its commit, and is
applied to the descriptor by the thread that writes the commit (``_changed``, ``_forced``, ``deleted``). A ledger that
changed stays in ``_dirty``, which also keeps its descriptor alive, until a checkpoint has brought it into the index.

**Failure.** ``log.error`` is final: a failed sync leaves unknown what is on disk, so the store serves reads alone until
it is opened again. ``scheduler.error`` fails the log as well, because without checkpoints the log would only grow.
``scheduler.full`` and ``troubles`` pass: appends raise StorageFullError, or wait, until space or descriptors are back.

**Closing.** The scheduler stops first, then reads end, then the log writes what is staged; only if all of that went
well is the watermark marked clean. The lock file is released last, whatever failed before.

Locks
-----

Locks are taken in this order; a thread that holds one takes only those below it. No lock is held during a sync.

==================================  ====================================================================================
lock                                guards
==================================  ====================================================================================
``Scheduler._job``                  one checkpoint, move or compaction at a time; the catalog and its mark
``LedgerDescriptor.lock``           order of a ledger's entries and changes; several only in ascending ledger id
``NamedRecords._lock``              changes of named records on their way into the log, and those since the checkpoint
locks of the log                    see ``log/log.py``; commits are written and applied by one leader at a time
``Store._ids``                      ``next_ledger_id`` and ``next_creation_sequence``
``StoreReader.lock``                ``_descriptors``, ``_dirty``, the page and table caches, ``_checkpointed_log_bytes``
``LedgerDescriptor.location_lock``  where a ledger's entries lie: its log locations and cached index pages
``Volumes._lock``                   files, their maps, and file ids
``Troubles._lock``                  troubles
==================================  ====================================================================================
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from pybk import storage
from pybk.config import StoreConfig
from pybk.errors import (
    ClosedError,
    CorruptError,
    DigestMismatchError,
    IllegalOperationError,
    LedgerExistsError,
    LedgerFencedError,
    NoSuchLedgerError,
    PybkError,
    StorageError,
    StorageFullError,
    StorageRefusedError,
    UsageError,
    without_frames,
)
from pybk.feature_level import NEWEST_STORE_LEVEL, FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger.keys import names
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.metrics import APPEND_ERRORS, Metrics, code_of
from pybk.storage import format as layouts
from pybk.storage import log as logs
from pybk.storage.descriptor import LedgerDescriptor, StagedDelete
from pybk.storage.directories import (
    ACCEPTED_LOSS,
    INDEX,
    OpenEnvironment,
    create_store,
    find_cookie,
    make_directory,
    mend_cookies,
    missing_files,
    remove_leftovers,
)
from pybk.storage.format.catalog import make_spare
from pybk.storage.format.cookie import COOKIE_FORMATS, Cookie
from pybk.storage.format.index_rows import CheckpointMark
from pybk.storage.format.log_file import RecordKind, encode_control
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.index import IndexSnapshot
from pybk.storage.io.failures import Troubles, is_full, refused, storage_error
from pybk.storage.io.filesystem import FileSystem, Lock, OsFileSystem
from pybk.storage.io.lmdb_environment import LMDB_LOCK, Environment, LmdbEnvironment
from pybk.storage.io.permissions import PRIVATE, Access, access_of, excess_warning
from pybk.storage.log.commit import Commit
from pybk.storage.log.log import Log
from pybk.storage.log.recovery import RecoveredLog, make_log_durable, recover_log
from pybk.storage.named_records import NamedChange
from pybk.storage.preallocation import LogFileSupply, PackReserve, ReserveUse
from pybk.storage.scheduler import Scheduler
from pybk.storage.space import (
    CHANGES_WHEN_FULL_BYTES,
    check_index_space,
    index_change_bytes,
    index_space,
)
from pybk.storage.store_opening import (
    OlderIndexError,
    PartsOpener,
    StoreParts,
    older_environments,
    older_log_files,
    short_files,
)
from pybk.storage.store_reader import StoreReader
from pybk.storage.tiers import ENTRIES
from pybk.storage.tiers.lmdb_tier import (
    ENTRIES_RESERVE_BYTES,
    NO_MARK,
    REFUGE_BYTES,
    EntriesMark,
    write_entries_mark,
)
from pybk.storage.volumes import Volumes, save_directories

if TYPE_CHECKING:
    from pybk.storage.compaction.mover import Unmoved
    from pybk.storage.store_cut import CutTail, StoreCut
    from pybk.storage.transaction_group import GroupAppend, GroupAppended, LedgerEntries

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRIES_WHEN_FULL: Final = 2
"""The number of retries of a change that frees space."""

CHANGED_LEDGERS_MAX: Final = 8192
"""Ledgers changed since the last checkpoint that are kept in memory before the next one is begun."""


def open_environment(path: str, access: Access = PRIVATE) -> Environment:
    """Open an LMDB environment for a live store, making what is missing of it with the permissions of ``access``."""
    return LmdbEnvironment(path, access=access)


def _open_environment_of(root: str, access: Access, path: str) -> Environment:
    """Open an LMDB environment of the store in a directory; IllegalOperationError if this process reads the store."""
    try:
        return open_environment(path, access)
    except IllegalOperationError as error:
        raise IllegalOperationError(
            f"the store {root} is open for reading in this process, which therefore cannot open it for writing: first "
            "close the manager, log, blob store or file system that reads it; a write-ahead log that was opened with "
            "mode='r' becomes the writer by promote()"
        ) from error


class Store(StoreReader):
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
        level: FeatureLevel | None = None,
    ) -> Store:
        """Open a store, making it if it does not exist, and bring it to the state of its last durable commit.

        Args:
            root: The store's directory.
            config: The settings.
            tiers: The directories of the tiers, if they are new or not where the store remembers them.
            metrics: Counts appends and reads; None counts them in an object of the store's own.
            fs: The file system; None uses the operating system's.
            environment: Opens LMDB environments; None opens them on disk.
            salvage: Open a store although log commits, files or the watermark are missing or damaged, and list the
                losses in ``Store.salvage``. The caller must have copies elsewhere: it records the loss in
                the store and then calls ``keep_salvage``.
            level: The feature level of a store that is made; None for the newest.

        Raises:
            UsageError: ``tiers`` is malformed, a path is not a directory, or ``config.group`` cannot be used; or
                ``config.cold_compression`` needs a package that is not installed, and nothing was touched.
            StoreLockedError: Another process has it open.
            IllegalOperationError: This process has it open for reading.
            CookieError: A directory belongs to another store or tier, or is not named.
            CorruptError: Something that was durable is damaged or missing.

        Durability: The tier directories are remembered once the store is open, and not if it does not open.
        """
        if config.cold_compression is not None:
            layouts.check_codec()
        root = os.path.abspath(root)
        fs = fs or OsFileSystem(access_of(os.path.join(root, "LOCK"), config.group))
        environment = environment or partial(_open_environment_of, root, fs.access)
        with ExitStack() as undo:
            try:
                fs.acquire_spares()
                undo.callback(fs.release_spares)
                if not fs.exists(os.path.join(root, "LOCK")):
                    make_directory(fs, root)
                lock = fs.lock(os.path.join(root, "LOCK"))
                undo.callback(lock.release)
                cookie = find_cookie(fs, root, tiers)
                if cookie is None:
                    cookie = create_store(fs, root, tiers, environment, level=level)
                opener = PartsOpener(fs, root, cookie, tiers, environment, [] if salvage else None)
                try:
                    store = cls._open_once(opener, lock, config, metrics or Metrics())
                except OlderIndexError as error:
                    _make_index_again(opener, error)
                    store = cls._open_once(opener, lock, config, metrics or Metrics())
                undo.pop_all()
                undo.callback(store.close)
                if tiers is not None:
                    save_directories(fs, root, store.volumes.directories)
                _warn_of_excess_access(store.volumes)
                undo.pop_all()
                return store
            except OSError as error:
                raise storage_error(error, f"opening {root}") from error

    @classmethod
    def _open_once(cls, opener: PartsOpener, lock: Lock, config: StoreConfig, metrics: Metrics) -> Store:
        """Open the parts and make the store.

        Raises:
            OlderIndexError: The index is older than the catalog and must be made again.
            PybkError, OSError: The store does not open. Everything but the lock is closed again.
        """
        with ExitStack() as undo:
            parts = opener.open(undo)
            try:
                store = cls(lock, opener.cookie, config, parts, metrics, opener.lost)
            except CorruptError as error:
                opener.raise_if_older(error, parts.newer)
                raise
            undo.pop_all()
        return store

    def __init__(
        self,
        lock: Lock,
        cookie: Cookie,
        config: StoreConfig,
        parts: StoreParts,
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
        self._meter = metrics.scope()
        self.troubles = Troubles(volumes.root)
        self.cookie = cookie
        self.store_id = cookie.store_id
        self.feature_level = cookie.level
        self.restored = bool(cookie.incarnation)
        self._lock_file = lock
        self._index_environment = parts.index_environment
        self._catalog_and_index = catalog_and_index
        self._watermark = watermark
        self._ids = threading.Lock()
        mark = catalog_and_index.mark
        self._tail_added = 0  # by the log's leader alone
        self._tail_checked = 0  # by checkpoints alone
        self.next_ledger_id = mark.next_ledger_id
        self.next_creation_sequence = mark.next_creation_sequence
        self.salvage: logs.SalvageReport | None = None
        """The losses that a salvaging open found, until ``keep_salvage``; None if it found none."""
        recovered = self._recover(mark, lost, parts)
        self.began_clean = watermark.clean and watermark.durable_lsn() == recovered.next_lsn - 1
        """True if the last process ended by closing the store; then nothing that it had buffered can be lost."""
        self._become_live(recovered, catalog_and_index)
        for descriptor in self._dirty.values():
            descriptor.reset_pushed()
            self.next_ledger_id = max(self.next_ledger_id, descriptor.ledger_id + 1)
            self.next_creation_sequence = max(self.next_creation_sequence, descriptor.metadata.creation_sequence + 1)
        watermark.clean = False
        watermark.advance(recovered.next_lsn - 1)
        self.supply = LogFileSupply(volumes, config, self._wake_scheduler, self.troubles)
        self.pack_reserve = PackReserve(volumes, config)
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
            on_span=config.on_span,
        )
        self.named.log = self.log
        with ExitStack() as undo:
            undo.callback(self.log.group.stop)  # else its thread keeps a store that does not open
            policy = config.tier_policy
            self.tier_queue = None if policy is None else storage.TierQueue(self, policy)
            self.scheduler = Scheduler(self, catalog_and_index, self.tier_queue)
            metrics.add_gauges(catalog_and_index.gauges)
            if self.salvage is None:
                self.scheduler.start()
            undo.pop_all()

    def _become_live(self, recovered: RecoveredLog, catalog_and_index: CatalogAndIndex) -> None:
        """Change the store for the first time, now that its parts are proven to fit each other."""
        volumes = self.volumes
        catalog_and_index.begin()
        remove_leftovers(volumes, catalog_and_index.mark)
        mend_cookies(self.fs, volumes.root, self.cookie, volumes.directories)
        make_log_durable(volumes, recovered)

    def _recover(self, mark: CheckpointMark, lost: list[str] | None, parts: StoreParts) -> RecoveredLog:
        """Bring the ledgers to the state of the last durable commit, in memory.

        Args:
            mark: The index's mark.
            lost: None unless asked to salvage.
            parts: The parts of the store; the log must reach what was durable when a newer catalog was written.
        """
        volumes, watermark, newer = self.volumes, self._watermark, parts.newer
        durable_lsn = max(mark.durable_lsn, watermark.durable_lsn(), 0 if newer is None else newer.mark.durable_lsn)
        rewrite_beyond = (
            watermark.durable_lsn()
        )  # after a clean end no commit is beyond the watermark, unless the watermark is an older copy
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
        recovered, more, next_ledger_id = logs.salvage_log(
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
        self.salvage = logs.SalvageReport(tuple(lost), tuple(missing), tuple(recovered.files), parts.new_watermark)
        return recovered

    def keep_salvage(self) -> None:
        """Accept what was salvaged as the store's content, durably; the next open is an ordinary one then.

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
            logs.replace_missing(self.volumes, salvage.missing)
            self._take_older_parts()
            if salvage.new_watermark:
                logs.keep_watermark(self.fs, self.volumes.root)
        except OSError as error:
            raise storage_error(error, f"salvaging {self.volumes.root}") from error
        self.scheduler.checkpoint()
        self.salvage = None
        self.scheduler.start()

    def has_accepted_loss(self) -> bool:
        """Return whether ``rebuild-index`` made an index without durable entries, and this was not forgotten since."""
        return self.fs.exists(os.path.join(self.volumes.root, ACCEPTED_LOSS))

    def forget_accepted_loss(self) -> None:
        """Forget it, once it is recorded, durably and in the store, that something is missing.

        Raises:
            StorageError: The next open may find it again.
        """
        path = os.path.join(self.volumes.root, ACCEPTED_LOSS)
        try:
            if self.fs.exists(path):
                self.fs.unlink(path)
        except OSError as error:
            raise storage_error(error, f"removing {path}") from error

    def _take_older_parts(self) -> None:
        """Let the index rely on files and environments as they are, although they are older or were cut."""
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

    # ---- changes of ledgers ------------------------------------------------------------------------------------------

    def new_ledger_id(self) -> int:
        """Return a ledger id that was never used before."""
        with self._ids:
            ledger_id = self.next_ledger_id
            self.next_ledger_id += 1
        return ledger_id

    def new_creation_sequence(self) -> int:
        """Return the next creation sequence."""
        with self._ids:
            sequence = self.next_creation_sequence
            self.next_creation_sequence += 1
        return sequence

    def create(
        self, metadata: LedgerMetadata, *, when_full: bool = False, entries_when_full: int = 0
    ) -> LedgerDescriptor:
        """Create a ledger; durable on return.

        Args:
            metadata: The metadata of the ledger.
            when_full: Create it even while the store refuses entries because space is short.
            entries_when_full: The number of its first entries that the store takes even then.

        Raises:
            LedgerExistsError: The id is taken.
            StorageFullError: There is no space.

        If a signal handler raises during the call, the ledger may be created nevertheless.
        """
        if not when_full:
            self.check_space()
        if entries_when_full:
            self._save_reserve(ReserveUse.FIRST_ENTRY if entries_when_full == 1 else ReserveUse.FURTHER_ENTRIES)
        descriptor = self._register(metadata)
        descriptor.entries_when_full = entries_when_full
        try:
            if when_full:
                self.with_reserve(lambda: self._finish_change(self._stage_change(descriptor, metadata)))
            else:
                self._finish_change(self._stage_change(descriptor, metadata, when_full=False))
        except BaseException:
            # After an interrupt, the record may be on its way: then the ledger exists as soon as it is durable.
            commit = descriptor.changing
            if commit is None or commit.error is not None:
                with self.lock:
                    self._descriptors.pop(metadata.ledger_id, None)
            raise
        return descriptor

    def stage_create(self, metadata: LedgerMetadata, *, when_full: bool = False) -> tuple[LedgerDescriptor, Commit]:
        """Stage the creation of a ledger in the commit that is forming, which may hold entries of it, too.

        If that commit fails, the ledger was never created, and its descriptor must not be used.

        Args:
            metadata: The metadata of the ledger.
            when_full: Create it even while the store refuses entries because space is short.

        Raises:
            LedgerExistsError: The id is taken.
            StorageFullError: There is no space.
        """
        if not when_full:
            self.check_space()
        descriptor = self._register(metadata)
        commit = self._stage_change(descriptor, metadata, creates=descriptor, when_full=when_full)
        assert commit is not None, "nothing was said that might have changed"
        return descriptor, commit

    def _register(self, metadata: LedgerMetadata) -> LedgerDescriptor:
        """Make the descriptor of a ledger to be created, and take its id."""
        descriptor = LedgerDescriptor(metadata)
        descriptor.created = False
        with self.lock:
            found = self._find(metadata.ledger_id)
            if found is not None:
                raise LedgerExistsError(f"ledger {metadata.ledger_id} exists; choose another id, or none to get one")
            self._descriptors[metadata.ledger_id] = descriptor
        with self._ids:
            self.next_ledger_id = max(self.next_ledger_id, metadata.ledger_id + 1)
        return descriptor

    def _save_reserve(self, use: ReserveUse) -> None:
        """Make a checkpoint, which puts back log files that hold nothing live, if too few reserved files are ready.

        The creation of the ledger takes one, and its entries another if a checkpoint in the background ends the log
        file between the two.
        """
        if len(self.supply.reserve.ready()) <= use.value + 1:
            with suppress(StorageRefusedError):
                self.scheduler.checkpoint()

    def with_reserve(self, change: Callable[[], T]) -> T:
        """Return the result of a change that frees space; if the log has no space for it, it is tried again.

        An attempt may be refused with entries that share its commit, or because all reserved log files are in use:
        a checkpoint puts those back in which nothing is live.

        Args:
            change: Raises StorageFullError if nothing was changed. The caller holds no lock.
        """
        for _ in range(RETRIES_WHEN_FULL):
            try:
                return change()
            except StorageFullError:
                with suppress(StorageRefusedError):
                    self.scheduler.checkpoint()
        return change()

    def _stage_change(
        self,
        descriptor: LedgerDescriptor,
        metadata: LedgerMetadata,
        *,
        unless_changed: tuple[LedgerDescriptor, PybkError | None] | None = None,
        creates: LedgerDescriptor | None = None,
        when_full: bool = True,
    ) -> Commit | None:
        """Stage new metadata; the caller holds ``descriptor.lock``, or is the only thread that knows the descriptor."""
        body = metadata.encode()

        def encode(lsn: int) -> bytes:
            return encode_control(RecordKind.LEDGER, metadata.ledger_id, metadata.version, body, lsn=lsn)

        def claim(commit: Commit) -> None:
            descriptor.changing = commit
            descriptor.metadata_pushed = metadata

        apply = partial(self._changed, descriptor, metadata)
        return self.log.stage_control(
            encode, apply, unless_changed=unless_changed, creates=creates, claim=claim, when_full=when_full
        )

    def _finish_change(self, commit: Commit | None) -> None:
        """Wait for a change that was staged."""
        if commit is None:
            return
        self.log.wait(commit)
        if commit.error is not None:
            raise without_frames(commit.error)

    def _changed(self, descriptor: LedgerDescriptor, metadata: LedgerMetadata) -> None:
        """Apply a durable metadata change; called by the log's leader."""
        descriptor.metadata = metadata
        if self.tier_queue is not None:
            self.tier_queue.changed(metadata)
        descriptor.created = True
        descriptor.meter = None
        descriptor.changed = True
        self._note_change(descriptor)
        if metadata.state is LedgerState.CLOSED:
            descriptor.confirm(metadata.last_entry_id)
        descriptor.wake_followers()

    @contextmanager
    def _undeleted(self, descriptor: LedgerDescriptor) -> Iterator[None]:
        """Hold a ledger's lock to change it, while no delete is on its way; the caller checks whether it was deleted.

        A record of the ledger after its delete would be one of an unknown ledger if the checkpoint falls between them.
        """
        while True:
            with descriptor.lock:
                deleting = descriptor.deleting
                if deleting is None or deleting.commit.done:
                    self._undo_failed_delete(descriptor)
                    descriptor.settle()
                    yield
                    return
            self.log.wait(deleting.commit)

    @staticmethod
    def _undo_failed_delete(descriptor: LedgerDescriptor) -> None:
        """Let a ledger whose delete has failed take entries again; the caller holds its lock."""
        deleting = descriptor.deleting
        if deleting is not None and not descriptor.deleted:
            # Not after another error: then entries of the ledger failed with it, and more would leave a gap.
            if isinstance(descriptor.error, NoSuchLedgerError):
                descriptor.error = deleting.before
            descriptor.deleting = None

    def close_ledger(self, descriptor: LedgerDescriptor, *, fence: bool) -> None:
        """Close a ledger after everything staged so far; durable on return. A closed ledger stays as it is.

        The end is sealed if a handle has opened the ledger with its password.

        Args:
            descriptor: The ledger.
            fence: Refuse a writer that may still be live: its appends raise ``LedgerFencedError`` from now on.
        """
        self.with_reserve(partial(self._close_ledger, descriptor, fence=fence))

    def _close_ledger(self, descriptor: LedgerDescriptor, *, fence: bool) -> None:
        commit = None
        while commit is None:
            with self._undeleted(descriptor):
                closing = descriptor.changing if descriptor.metadata_pushed.state is LedgerState.CLOSED else None
                if closing is None:
                    if descriptor.metadata.state is LedgerState.CLOSED:
                        return
                    if descriptor.deleted:
                        raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
                    if self.log.error is not None:
                        raise without_frames(self.log.error)
                    commit = self._stage_close(descriptor, fence=fence)
            if closing is not None:  # by another thread; if its commit fails, this call closes the ledger
                self.log.wait(closing)
        self._finish_change(commit)

    def _stage_close(self, descriptor: LedgerDescriptor, *, fence: bool) -> Commit | None:
        """Stage the metadata of a ledger that ends with its last pushed entry, or durable one if a push failed."""
        # A refusal may pass, and the writer would continue.
        if fence and isinstance(descriptor.error, StorageRefusedError):
            # Nothing more can be staged, so what is durable then is all.
            self.log.flush(kept=descriptor.deferred)
            descriptor.restart()
        failed = descriptor.error
        if fence and failed is None:
            descriptor.error = failed = LedgerFencedError(
                f"ledger {descriptor.ledger_id} was opened for recovery by another handle; stop writing to it"
            )
        if failed is None or isinstance(failed, LedgerFencedError):
            descriptor.account_staged()
            last, length = descriptor.last_pushed, descriptor.length_pushed
        else:
            # Nothing more can be staged, so what is durable then is all.
            self.log.flush(kept=descriptor.deferred)
            last, length = descriptor.last_durable, descriptor.length_durable
        metadata = descriptor.metadata_pushed
        closed = self._sealed(descriptor, metadata.closed_at(last, length))
        return self._stage_change(descriptor, closed, unless_changed=(descriptor, failed))

    def _sealed(self, descriptor: LedgerDescriptor, closed: LedgerMetadata) -> LedgerMetadata:
        """Return a ledger's last metadata with its seal, if it can be made here; the caller holds the ledger's lock."""
        sealer = descriptor.sealer
        if sealer is None or not (closed.key_format or self.feature_level >= FeatureLevel.SEALS):
            return closed
        self.log.prefix_staged(descriptor)
        if names(descriptor.last_prefix, closed):
            return sealer.sealed(closed, descriptor.last_prefix)
        last = closed.last_entry_id
        if last > descriptor.last_durable:
            self.log.flush()  # an entry can be read only once it is durable
            if last > descriptor.last_durable:
                return closed  # its commit failed meanwhile, so this is not staged: see ``unless_changed``
        try:
            batch = self.read_batch(descriptor, last, last, 1, digest_bytes=sealer.digest.size, direct=False)
            sealer.digest.check_many(batch)
        except (CorruptError, DigestMismatchError) as error:
            # Refusing to close would make the entries before it unreadable, too.
            logger.warning("ledger %d is closed without a seal, because of its last entry: %s", closed.ledger_id, error)
            return closed
        return sealer.sealed(closed, batch.buffer[int(batch.offsets[0]) :])

    def reseal(self, descriptor: LedgerDescriptor, sealed: LedgerMetadata) -> None:
        """Make the seal of a closed ledger durable.

        Args:
            descriptor: The ledger.
            sealed: Its metadata with the seal, as it was when the ledger was checked.

        Raises:
            IllegalOperationError: Its end has changed meanwhile.
            NoSuchLedgerError: It was deleted.
        """
        with self._undeleted(descriptor):
            if descriptor.deleted:
                raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
            metadata = descriptor.metadata_pushed
            wanted = metadata.with_seal(sealed.seal, sealed.last_digest)
            if replace(wanted, tier=sealed.tier, version=sealed.version) != sealed:
                raise IllegalOperationError(
                    f"ledger {descriptor.ledger_id} was changed while it was checked; try again"
                )
            commit = self._stage_change(descriptor, replace(wanted, version=metadata.version + 1))
        self._finish_change(commit)

    def force(self, descriptor: LedgerDescriptor) -> int:
        """Make everything pushed so far durable and confirmed; return the last add confirmed."""
        with descriptor.lock:
            if descriptor.error is not None:
                raise without_frames(descriptor.error)
            descriptor.account_staged()
            last = descriptor.last_pushed
            if last <= descriptor.last_add_confirmed:
                return descriptor.last_add_confirmed

            def encode(lsn: int) -> bytes:
                return encode_control(RecordKind.FORCE, descriptor.ledger_id, last, lsn=lsn)

            apply = partial(self._forced, descriptor, last)
            commit = self.log.stage_control(encode, apply, unless_changed=(descriptor, None))
        if commit is None:
            return self.force(descriptor)
        self._finish_change(commit)
        return last

    def _forced(self, descriptor: LedgerDescriptor, last: int) -> None:
        """Apply a durable force; called by the log's leader.

        The next checkpoint must write the ledger's row, because its mark goes past the record that says so.
        """
        descriptor.confirm(last)
        descriptor.changed = True
        self._note_change(descriptor)

    def delete(self, descriptor: LedgerDescriptor) -> None:
        """Delete a ledger; durable on return, its space comes back with the next checkpoint.

        Raises:
            NoSuchLedgerError: It was deleted; of several calls at the same time, one deletes it.
        """
        self.with_reserve(partial(self._delete, descriptor))
        self.scheduler.wake()

    def _delete(self, descriptor: LedgerDescriptor) -> None:
        def encode(lsn: int) -> bytes:
            return encode_control(RecordKind.DELETE, descriptor.ledger_id, 0, lsn=lsn)

        with self._undeleted(descriptor):
            if descriptor.deleted:
                raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
            before, gone = descriptor.error, NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")

            def claim(commit: Commit) -> None:
                descriptor.deleting = StagedDelete(commit, before)

            descriptor.error = gone
            try:
                commit = self.log.stage_control(encode, partial(self.deleted, descriptor), claim=claim)
            except BaseException:
                if descriptor.deleting is None:  # else it is staged, and nothing of the ledger may follow it
                    descriptor.error = before
                raise
        try:
            self._finish_change(commit)
        except StorageError as error:
            with descriptor.lock:
                self._undo_failed_delete(descriptor)
            if isinstance(error, StorageFullError):
                raise StorageFullError(
                    f"ledger {descriptor.ledger_id} was not deleted, because a delete is a record in the log: {error}; "
                    "free some space by other means first, and keep some with StoreConfig(free_bytes_low=...)"
                ) from error
            raise

    def deleted(self, descriptor: LedgerDescriptor) -> None:
        """Apply a durable delete; called by the log's leader."""
        descriptor.deleted = True
        descriptor.changed = True
        self._note_change(descriptor)
        descriptor.wake_followers()

    # ---- moves -------------------------------------------------------------------------------------------------------

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Move a ledger to another tier; durable on return. The ledger takes appends and reads during the move.

        Raises as ``move_all`` does.
        """
        if descriptor.deleted:
            raise NoSuchLedgerError(f"ledger {descriptor.ledger_id} was deleted")
        self.move_all([descriptor], tier)

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers to another tier, in ascending order of their ids; those that were deleted are left out.

        Durable on return. The ledgers take appends and reads during the move. Up to ``MOVED_LEDGERS_MAX`` ledgers or
        ``MOVED_BYTES_MAX`` bytes form a group, which shares files of the tier, one commit of the log, and one of
        catalog and index.

        Args:
            descriptors: The ledgers; only those of one group are held at a time.
            tier: The tier.

        Raises:
            StorageRefusedError: There was no space, descriptor or memory for a group now; groups before it were moved.
                Call it again for the same ledgers.
            UnmovedError: Damaged records stay where they are; everything else was moved. The metadata of their ledgers
                name the target, to which a ledger belongs from the moment its move is asked for. Call it again for the
                same ledgers and tier once the files are restored: it moves what lies elsewhere.
        """
        unmoved: list[Unmoved] = []
        with self.scheduler.moving():
            for group in _groups(descriptors):
                try:
                    self._move_group(group, tier)
                except storage.UnmovedError as error:
                    unmoved += error.unmoved
        if unmoved:
            raise storage.UnmovedError(unmoved, tier)

    def _move_group(self, descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
        staged = []
        for descriptor in descriptors:
            with self._undeleted(descriptor):
                metadata = descriptor.metadata_pushed
                if not descriptor.deleted and metadata.tier is not tier:
                    moved = replace(metadata, tier=tier, version=metadata.version + 1)
                    staged.append(self._stage_change(descriptor, moved))
        for commit in staged:
            self._finish_change(commit)
        self.scheduler.move(descriptors, tier)

    def change_all(self, changes: Iterable[tuple[LedgerDescriptor, LedgerMetadata]]) -> None:
        """Make new metadata of several ledgers durable, with shared commits, and then visible."""
        staged = [self._stage_change(descriptor, metadata) for descriptor, metadata in changes]
        for commit in staged:
            self._finish_change(commit)

    # ---- cuts --------------------------------------------------------------------------------------------------------

    def cut(self) -> StoreCut:
        """Return the state after one commit, with everything that was appended before the call, deferred entries, too.

        Raises:
            PybkError: The appended entries could not be made durable.

        Cost: The log stands still while ledgers that changed since the last checkpoint are copied, up to 8192 or so;
            the rest is as ``store_cut.merged``.
        """
        self.log.flush(kept=True)
        tails: list[CutTail] = []
        with ExitStack() as snapshots:
            found: list[IndexSnapshot] = []

            def look() -> None:
                # What is dirty comes first, because a checkpoint may end meanwhile: it writes the index, then cleans.
                # The index is not newer than the log, which stands still.
                rows = storage.rows_of(self.take_dirty().values())
                named = tuple(self.named.tail())
                numbers = self.next_ledger_id, self.next_creation_sequence
                tails[:] = [storage.CutTail(self.log.durable_lsn, *numbers, rows, named)]
                found[:] = [snapshots.enter_context(self.index.snapshot())]

            self.log.stand_still(look)
            return storage.merged(found[0], tails[0])

    # ---- groups ------------------------------------------------------------------------------------------------------

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
            StorageFullError: There is no space.
            StorageFailedError: Either all of it was appended or nothing; the store must be closed.

        Unless it raises StorageFailedError, nothing was changed.

        Cost: One synced write, shared with all concurrent appends. The group holds the locks of its ledgers while its
            entries get their ids and digests.
        """
        group = self.stage_group(entries, changes)
        return group.finish()

    def stage_group(self, entries: Sequence[LedgerEntries], changes: Sequence[NamedChange] = ()) -> GroupAppend:
        """Stage a group as ``append_group`` appends one; it is durable when the result's ``finish`` returns.

        Raises:
            DisplacedError: A ledger does not end with the entry that those of the group must follow.
            PybkError: As ``append_group``. Nothing was staged.
        """
        group = storage.GroupAppend(self, entries, changes)
        group.stage()
        return group

    # ---- what the log calls ------------------------------------------------------------------------------------------

    def changed(self, commit: Commit) -> None:
        """Let the next checkpoint write the ledgers of a durable commit; called by the log's leader."""
        dirty = self._dirty
        for run, _, _ in commit.written:
            # A ledger with a tail, as this one has, is not forgotten meanwhile.
            if run.descriptor.ledger_id not in dirty:
                self._note_change(run.descriptor)

    def committed(self, commit: Commit, now_ns: int, took_ns: int) -> None:
        """Count a durable commit; called by the log's leader."""
        self._meter.wrote(took_ns, commit.size)
        for run, _, _ in commit.written:
            descriptor = run.descriptor
            meter = descriptor.meter
            if meter is None:
                metadata = descriptor.metadata
                meter = descriptor.meter = self.metrics.scope(metadata.ledger_type, metadata.tier)
            meter.appended(len(run.sizes), run.encoded_bytes, now_ns - run.staged_ns)
        self._tail_added += commit.size
        if (self._tail_added - self._tail_checked) * 2 >= self.config.unchecked_tail_bytes:
            with self.lock:
                self._hold_or_release()
            self.scheduler.wake()
        elif self.scheduler.rests:
            self.scheduler.wake()

    def failed(self, commit: Commit, error: PybkError) -> None:
        """Count the entries of a failed commit as errors, except those that are kept for another attempt."""
        labels = (("code", code_of(error)),)
        for run in commit.staged:
            if run.completion is commit and run.sizes:
                metadata = run.descriptor.metadata
                self.metrics.add(APPEND_ERRORS, len(run.sizes), metadata.ledger_type, metadata.tier, labels)

    def write_buffered(self) -> None:
        """Write and sync buffered entries of deferred ledgers without confirming them; nothing if the store failed."""
        if self.log.error is None:
            self.log.flush(kept=True)

    # ---- admission and space -----------------------------------------------------------------------------------------

    def check_space(self) -> None:
        """Raise StorageFullError while the store is read-only because space is short."""
        full = self.scheduler.full
        if full is not None:
            raise StorageFullError(full)

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

    def space_checked(self) -> None:
        """Refuse appends while there is no space, and accept them again once there is; called by maintenance."""
        with self.lock:
            self._hold_or_release()
        if self.scheduler.full is None:
            self.log.readmit()

    def restore_reserve(self) -> None:
        """Allocate what the reserved space lacks: log files, and space for the catalog, the index and entries to grow.

        Raises:
            StorageRefusedError: There is too little space, or it was refused for another reason; a part may be there.
            OSError: Syncing a directory failed.
        """
        entries = ENTRIES_RESERVE_BYTES + REFUGE_BYTES
        parts: list[Callable[[], None]] = [
            self.supply.restore,
            partial(self._reserve, partial(self._catalog_and_index.reserve, self._changes_when_full())),
            self.pack_reserve.restore,
            partial(self._reserve, self._reserve_index),
            *(partial(self._reserve, partial(each.reserve, entries)) for each in self.entries.values()),
            partial(make_spare, self.fs, self.volumes.root),
            self._renew_catalog,
        ]
        lacking: StorageRefusedError | None = None
        for restore in parts:
            try:
                restore()
            except StorageRefusedError as error:  # another part may need less
                lacking = lacking or error
        if lacking is not None:
            raise lacking

    def _reserve(self, allocate: Callable[[], None]) -> None:
        try:
            allocate()
        except OSError as error:  # nothing is in it
            meaning = storage_error if is_full(error) else refused
            raise meaning(error, f"reserving space for {self.volumes.root}") from error

    def _changes_when_full(self) -> int:
        return CHANGES_WHEN_FULL_BYTES + self.change_bytes()

    def _reserve_index(self) -> None:
        changes = self._changes_when_full() + self.pack_reserve.index_bytes()
        self._index_environment.reserve(index_space(changes))

    def _renew_catalog(self) -> None:
        check_index_space(self, 0)
        self._catalog_and_index.renew_in_spare()

    def change_bytes(self) -> int:
        """Return the bytes that a checkpoint made now would change in the index at most."""
        with self.lock:
            changed = list(self._dirty.values())
        return index_change_bytes(len(changed), sum(len(each.tail_firsts) for each in changed), self.named.tail_bytes())

    def _hold_or_release(self) -> None:
        """Pause or resume staging of entries in the log; the caller holds ``_lock``."""
        full = self.scheduler.full is not None
        self.log.pause_staging(full or self.tail_bytes >= self.config.unchecked_tail_bytes, full=full)

    # ---- what checkpoints and the scheduler call ---------------------------------------------------------------------

    def _note_change(self, descriptor: LedgerDescriptor) -> None:
        with self.lock:
            self._dirty[descriptor.ledger_id] = descriptor
            count = len(self._dirty)
        if count % CHANGED_LEDGERS_MAX == 0:
            self.scheduler.wake()

    def has_deleted(self) -> bool:
        """Return whether a deleted ledger waits for the next checkpoint."""
        with self.lock:
            return any(descriptor.deleted for descriptor in self._dirty.values())

    @property
    def tail_bytes(self) -> int:
        """Bytes of log that the next open would have to read."""
        return self._tail_added - self._tail_checked

    def wants_checkpoint(self) -> bool:
        """Return whether the tail is long, or many ledgers changed, or one waits to be removed."""
        return (
            self.tail_bytes * 2 >= self.config.unchecked_tail_bytes
            or len(self._dirty) >= CHANGED_LEDGERS_MAX
            or self.has_deleted()
        )

    def take_dirty(self) -> dict[int, LedgerDescriptor]:
        """Return the ledgers changed since the last call; called while the log stands still."""
        with self.lock:
            return dict(self._dirty)

    def clean(self, descriptors: Sequence[LedgerDescriptor]) -> None:
        """Note that the index has all of these ledgers, except for appends and changes made meanwhile."""
        with self.lock:
            for descriptor in descriptors:
                with descriptor.location_lock:
                    if not descriptor.tail_firsts and not descriptor.changed:
                        self._dirty.pop(descriptor.ledger_id, None)

    def moved(self, ledger_id: int) -> None:
        """Drop the cached locations of a ledger's entries, because they moved."""
        with self.lock:
            descriptor = self._descriptors.get(ledger_id)
        if descriptor is not None:
            self.refresh(descriptor)

    def tail_checked(self, tail_bytes: int) -> None:
        """Note that a checkpoint covered this many bytes of the tail."""
        with self.lock:
            self._tail_checked += tail_bytes
            self._hold_or_release()

    def raise_level(self, level: FeatureLevel = NEWEST_STORE_LEVEL) -> None:
        """Write the store in the formats of a higher feature level from now on; durable on return.

        Older versions of pybk that do not know the level refuse the store from then on. A level is never lowered:
        asking for a lower one does nothing. After a stop at any point the next open completes the change.

        Raises:
            UsageError: It is not a level of stores.
            StorageFullError: There is no space for a new catalog; the level is raised nevertheless.
            StorageFailedError: Something else failed; the store should be closed.
        """
        if level not in COOKIE_FORMATS:
            raise UsageError(f"feature level {level!r} is not one of stores; these are {[*COOKIE_FORMATS]}")
        self.scheduler.raise_level(level)

    def release_dead_readers(self) -> None:
        """Free the slots of killed read-only processes in index and SSD tier, whose pages can be used again then."""
        for environment in (self._index_environment, *self.entries.values()):
            freed = environment.release_dead_readers()
            if freed:
                logger.info("%s: the slots of %d killed readers were freed", self.volumes.root, freed)

    def _wake_scheduler(self) -> None:
        scheduler = getattr(self, "scheduler", None)
        if scheduler is not None:
            scheduler.wake()

    # ---- closing -----------------------------------------------------------------------------------------------------

    def after_fork(self) -> None:
        """Disable the store in a forked child, appends included."""
        super().after_fork()
        self.log.after_fork(self.fork_error())

    def close(self, *, clean: bool = True) -> None:
        """Wait for outstanding commits, stop the threads and release the directory; open ledgers stay open.

        Args:
            clean: False makes the next open treat this end as a crash.
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


def _groups(descriptors: Iterable[LedgerDescriptor]) -> Iterator[list[LedgerDescriptor]]:
    """Yield ledgers in groups that are moved together."""
    group: list[LedgerDescriptor] = []
    nbytes = 0
    for descriptor in descriptors:
        group.append(descriptor)
        nbytes += descriptor.length_durable
        if len(group) >= storage.MOVED_LEDGERS_MAX or nbytes >= storage.MOVED_BYTES_MAX:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _make_index_again(opener: PartsOpener, error: OlderIndexError) -> None:
    """Make the index again from a newer catalog.

    Raises:
        CorruptError: That would lose entries, or the catalog does not fit the log either; nothing was changed.
    """
    root = opener.root
    logger.warning("the index of %s is older than its catalog, and is made again from it: %s", root, error)
    found = storage.rebuild_locked(opener.fs, root, opener.cookie, opener.tiers, opener.environment, state=error.state)
    if not found.made:
        raise CorruptError(
            f"the index of {root} is older than its catalog, and making it again would lose "
            f"{sum(one.last_entry_id + 1 - one.first_entry_id for one in found.lost)} entries or more "
            f"({'; '.join(found.problems) or 'files are missing or older'}); nothing was changed: put the newer files "
            f"back, or run `pybk store rebuild-index {root} --accept-loss`"
        ) from error


def _warn_of_excess_access(volumes: Volumes) -> None:
    """Log one warning if users that the store is not made for can reach its directories or take its locks."""
    tiers = [directory.path for directory in volumes.directories]
    locks = [os.path.join(tier, name, LMDB_LOCK) for tier in tiers for name in (INDEX, ENTRIES)]
    found = volumes.fs.paths_too_open([volumes.root, *tiers, os.path.join(volumes.root, "LOCK"), *locks])
    if found:
        logger.warning("%s", excess_warning(volumes.fs.access, volumes.root, found))
