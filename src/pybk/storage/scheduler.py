"""The background jobs of a store: checkpoints, preallocation, compaction, moves by policy, checks of free space.

This module decides when a job runs, and how its failure is handled; the modules of ``compaction/`` do the work. One
job runs at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final

from pybk import storage
from pybk.deferral import import_rest
from pybk.errors import (
    CorruptError,
    PybkError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    UnsupportedFormatError,
    without_frames,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.log_file import RESERVED_FILE_BYTES
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.io.failures import is_passing, is_refused, refused, storage_error
from pybk.storage.preallocation import LARGE_COMMIT_BYTES
from pybk.storage.space import Garbage
from pybk.threads import start_thread
from pybk.threads.interrupts import SLICE_SECONDS, checkpoint, is_guarded

if TYPE_CHECKING:
    from pybk.storage.compaction.checkpoint import Checkpoint
    from pybk.storage.compaction.compaction import Compaction
    from pybk.storage.compaction.tier_policy import TierQueue
    from pybk.storage.live_store import LiveStore

logger = logging.getLogger(__name__)

_SPACE: Final = "looking for free space"
_RESERVING: Final = "reserving space for deletes"
_SPARES: Final = "holding spare descriptors"
_READERS: Final = "freeing places of killed readers"
_IMPORTING: Final = "importing what background jobs need"
_PREALLOCATING: Final = "preallocating log files"
_CHECKPOINT: Final = "the checkpoint"
_COLLECTION: Final = "freeing the space of what is dead"
_POLICY: Final = "moving ledgers by the tier policy"
_DAMAGED: Final = "moving damaged records by the tier policy"

TICK_SECONDS: Final = 1.0
"""The pause of the thread while entries are committed."""

REST_SECONDS: Final = 5.0
"""The interval at which the thread looks for work while nothing is committed; the next commit wakes it."""

_MANY_COMMITS: Final = 256
"""The number of small commits between two looks from which on log files with zeros are worth their cost."""

POLICY_SECONDS: Final = 60.0
"""The time between two applications of the tier policy."""

_PACKING_SECONDS: Final = 10.0
"""The interval at which sparse files are packed while ledgers are being moved out of them."""
_READERS_SECONDS: Final = 10.0
"""The interval of searches for places of killed readers in LMDB's reader tables."""

_LOOK_SECONDS: Final = 0.1
"""The interval at which an append that waits for a checkpoint looks whether it has come to an end."""


class Scheduler:
    """Runs a store's background jobs.

    Threads: its own, and any thread that requests a job; jobs exclude each other.

    Attributes:
        error: The error after which no more jobs run; None if there was none.
        full: The reason why the store refuses appends because space is short; None if it does not.
        rests: Whether the thread sleeps for long, because nothing was committed; the next commit wakes it.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex, tier_queue: TierQueue | None) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._garbage = Garbage(store, catalog_and_index)
        self._tier_queue = tier_queue
        self._troubles = store.troubles
        self._job = threading.Lock()
        self.wakeup = threading.Lock()  # an interrupt inside an Event could leave it locked
        """Released to wake the thread."""
        self.wakeup.acquire()
        self._progress = threading.Condition()
        self.stopping = False
        """Whether the thread should end."""
        self.thread: threading.Thread | None = None
        """The thread; None before ``start``."""
        self.policy_due = time.monotonic() + POLICY_SECONDS
        """The time when the tier policy is applied next."""
        self.readers_due = time.monotonic() + _READERS_SECONDS
        """The time when the slots of killed readers are freed next."""
        self._stuck: str | None = None
        self._movers: set[object] = set()
        self._packed_at = time.monotonic()
        self._moved_at = self._packed_at - TICK_SECONDS
        self.error: PybkError | None = None
        self.full: str | None = None
        self.rests = False
        self._seen_lsn = -1
        self._position = store.log.position()

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        """Makes checkpoints; made by the first job that needs it."""
        return storage.Checkpoint(self._store, self._catalog_and_index, self._garbage)

    @cached_property
    def compaction(self) -> Compaction:
        """Packs files, and moves ledgers between tiers; made by the first job that needs it."""
        return storage.Compaction(self._store, self._catalog_and_index, self._garbage)

    # ---- thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Restore the reserve, and start the thread, unless the configuration says that jobs run only when called."""
        self.restore_reserve()
        if self._store.config.background:
            thread = threading.Thread(target=self.run, name="pybk-maintenance", daemon=True)
            start_thread(thread)
            self.thread = thread

    def wake(self) -> None:
        """Wake the thread, which checks for due work then."""
        if self.wakeup.locked():
            with suppress(RuntimeError):  # another thread woke it meanwhile
                self.wakeup.release()

    def stop(self) -> None:
        """Stop the thread after its current job."""
        self.stopping = True
        self.wake()
        if self.thread is not None:
            self.thread.join()

    def close(self) -> None:
        """Wait for the running job, and close the catalog; called when the log accepts no more entries."""
        with self._job:
            self._catalog_and_index.close()

    def run(self) -> None:
        """Run due jobs and sleep, until the thread is stopped; the body of the thread."""
        while not self.stopping:
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001  # without this thread nothing frees space, and appends wait
                self._fail(error)
                return
            self.wakeup.acquire(timeout=self.pause())
            self.rests = False

    def pause(self) -> float:
        """Return how long to sleep: longer while nothing is committed and nothing has to be retried."""
        log = self._store.log
        self.rests = True  # set before the log is examined, so that a commit that is missed here ends the rest
        lsn = log.durable_lsn
        queue = self._tier_queue
        looking = queue is not None and queue.looking
        if lsn == self._seen_lsn and not (self.full or looking or log.refuses or self._troubles.all()):
            return REST_SECONDS
        self._seen_lsn = lsn
        self.rests = False
        return TICK_SECONDS

    def _fail(self, error: BaseException) -> None:
        """Refuse further jobs and appends."""
        root = self._store.volumes.root
        if self.error is None:
            logger.error("maintenance of %s failed, the store takes no more appends: %s", root, error, exc_info=error)
            self.error = (
                without_frames(error)
                if isinstance(error, PybkError)
                else StorageFailedError(f"maintenance of {root} ended by {error!r}; close the store and open it again")
            )
        self._store.log.fail(self.error)
        self._store.log.kick()
        with self._progress:
            self._progress.notify_all()

    def tick(self) -> None:
        """Run the due jobs: check of space, preallocation, checkpoint, compaction, policy.

        Raises:
            PybkError, OSError: A job failed. Lack of space does not raise, but makes the store read-only.
        """
        with self._attempting(_SPACE):
            self.check_space()
        self.restore_reserve()
        self._look_after_process()
        try:
            self._do_what_is_due()
            self._stuck = None
        except StorageFullError as error:
            self._stuck = str(error)
        self.restore_reserve()
        with self._attempting(_SPACE):
            self.check_space()

    def restore_reserve(self) -> None:
        """Allocate what the reserved space lacks, if there is space; the next tick tries again."""
        if self._store.log.error is None:
            with suppress(StorageFullError), self._attempting(_RESERVING):
                self._run_job(self._store.restore_reserve)

    def _look_after_process(self) -> None:
        """Reopen spare descriptors, free the LMDB slots of killed readers, and import modules not needed so far."""
        lacking = self._store.fs.fill_spares()
        if lacking is None:
            self._troubles.clear(_SPARES)
        else:
            self._troubles.note(_SPARES, lacking)
        if time.monotonic() >= self.readers_due:
            with self._attempting(_READERS):
                self._store.release_dead_readers()
            with self._attempting(_IMPORTING):
                import_rest("pybk.storage")
            self.readers_due = time.monotonic() + _READERS_SECONDS

    @contextmanager
    def _attempting(self, doing: str) -> Iterator[None]:
        """Report a failure as a trouble if it leaves no doubt about durable bytes; the job is retried later.

        Raises:
            StorageFullError: There is no space.
            StorageFailedError, CorruptError, UnsupportedFormatError: It is in doubt which bytes are durable.
        """
        try:
            yield
        except (StorageFullError, StorageFailedError, CorruptError, UnsupportedFormatError):
            raise
        except PybkError as error:
            self._troubles.note(doing, error)
        except OSError as error:
            if doing != _SPACE and not is_passing(error):
                raise
            self._troubles.note(doing, error)
        else:
            self._troubles.clear(doing)

    def _do_what_is_due(self) -> None:
        store = self._store
        if self.full is None:
            small = self._commits_are_small()
            with self._attempting(_PREALLOCATING):
                if small:
                    store.supply.prefer_zeros()
                store.supply.preallocate(pause=True)
                if small and store.log.error is None and store.supply.has_better():
                    store.log.cut(lambda: None)
                    store.supply.prefer_zeros()  # the last log file had large commits
        full = self.full is not None
        # Each checkpoint ends a log file, of which few are reserved.
        if store.wants_checkpoint() or (full and store.tail_bytes > RESERVED_FILE_BYTES):
            with self._attempting(_CHECKPOINT):
                self.checkpoint()
        packs = self._packs()
        if full or self._garbage.freed:
            with self._attempting(_COLLECTION):
                self._run_job(lambda: self.compaction.collect(packs=full or packs))
        queue = self._tier_queue
        if queue is not None:
            queue.look()
            if time.monotonic() >= self.policy_due:
                with self._attempting(_POLICY):
                    queue.move_due(lambda: self.stopping)
                self.policy_due = time.monotonic() + POLICY_SECONDS
            self._show_damaged(queue)

    def _show_damaged(self, queue: TierQueue) -> None:
        """Report in ``health()`` the ledgers that the policy could not move completely because of damaged records."""
        if queue.damaged:
            self._troubles.note(_DAMAGED, "; ".join(queue.damaged.values()))
        else:
            self._troubles.clear(_DAMAGED)

    def _commits_are_small(self) -> bool:
        """Return whether the log has made many commits since the last call, all small and in one file."""
        file_id, offset, lsn = self._store.log.position()
        seen_id, seen_offset, seen_lsn = self._position
        self._position = file_id, offset, lsn
        commits = lsn - seen_lsn
        return file_id == seen_id and commits >= _MANY_COMMITS and offset - seen_offset < LARGE_COMMIT_BYTES * commits

    # ---- space ---------------------------------------------------------------------------------------------------

    def check_space(self) -> None:
        """Make the store read-only if a device or the last job ran out of space, and writable again otherwise."""
        full = self._shortage()
        if (full or self._stuck) and self._store.supply.give_back():
            full = self._shortage()
        full = full or self._stuck
        if full != self.full:
            logger.warning("%s", full or f"{self._store.volumes.root} has space again and accepts appends")
        self.full = full
        self._store.space_checked()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Postpone packing while ledgers are moved, because it would pack entries that are moved next."""
        mover = object()
        self._movers.add(mover)
        try:
            yield
        finally:
            self._moved_at = time.monotonic()
            self._movers.discard(mover)

    def _packs(self) -> bool:
        """Return whether sparse files are packed now: not while ledgers are moved, unless that takes long."""
        now = time.monotonic()
        moving = bool(self._movers) or now < self._moved_at + TICK_SECONDS
        if moving and now < self._packed_at + _PACKING_SECONDS:
            return False
        self._packed_at = now
        return True

    def _shortage(self) -> str | None:
        """Return a text that names a device with too little free space; None if each has enough."""
        store = self._store
        name = "free_bytes_low" if self.full is None else "free_bytes_ok"
        limit: int = getattr(store.config, name)
        for directory in store.volumes.directories:
            free = store.fs.free_bytes(directory.path)
            if free < limit:
                return (
                    f"{directory.path} has {free} bytes free, fewer than {limit} ({name}): the store takes no appends "
                    f"until {store.config.free_bytes_ok} are free (free_bytes_ok); delete ledgers or free space"
                )
        return None

    def wait_for_admission(self) -> None:
        """Wait until the log that is not checkpointed is within its limit again; called by appends that found it full.

        Raises:
            StorageFullError: There is no space for the checkpoint.
            StorageRefusedError: The checkpoint was refused for now.
            PybkError: The checkpoint failed, so the store has failed.
        """
        store = self._store
        if not store.config.background:
            self.checkpoint()
            return
        self.wake()
        with self._progress:
            while store.tail_bytes >= store.config.unchecked_tail_bytes and self.error is None and not self.stopping:
                checkpoint()
                store.check_space()
                trouble = self._troubles.of(_CHECKPOINT)
                if trouble is not None:
                    raise StorageRefusedError(f"the log is as long as it may be, and {trouble}")
                self._progress.wait(SLICE_SECONDS if is_guarded() else _LOOK_SECONDS)
        if self.error is not None:
            raise without_frames(self.error)

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def _run_job(self, job: Callable[[], None]) -> None:
        """Run a job in a thread other than the main thread, so that no interrupt hits it. Raises as the job.

        An interrupt while the main thread waits is raised there at once, and the job continues.
        """
        if threading.current_thread() is not threading.main_thread():
            with self._running():
                job()
            return
        raised: list[BaseException] = []

        def body() -> None:
            try:
                with self._running():
                    job()
            except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asked
                raised.append(error)

        thread = threading.Thread(target=body, name="pybk-job", daemon=True)
        start_thread(thread)
        while thread.is_alive():
            checkpoint()
            thread.join(SLICE_SECONDS if is_guarded() else None)
        if raised:
            raise raised[0]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Exclude other jobs; a failure of the job fails the store, because its state in memory may be inconsistent.

        Raises:
            StorageRefusedError: The job found no space, descriptor, memory or thread; it changed nothing.
            StorageFailedError: The job failed, or the store had failed before.
        """
        with self._job:
            if self._store.log.error is not None:
                raise without_frames(self._store.log.error)
            try:
                yield
            except StorageRefusedError:
                raise
            except OSError as error:
                meaning = storage_error(error, f"maintenance of {self._store.volumes.root}")
                if not is_refused(error):
                    self._fail(meaning)
                raise meaning from error
            except MemoryError as error:
                raise refused(error, f"maintenance of {self._store.volumes.root}") from error
            except StorageFailedError as error:
                self._fail(error)
                raise
            except PybkError:
                raise
            except BaseException as error:
                self._fail(error)
                raise
        with self._progress:
            self._progress.notify_all()

    def checkpoint(self) -> None:
        """Write all state that is durable in the log to the index, and all durable entries to their tiers.

        If a tier has no space, its entries stay in the log files, and ``collect`` moves them once there is space.

        Raises:
            StorageFullError: The index has no space; nothing was changed.
            StorageFailedError: The checkpoint failed in another way; the store should be closed.
        """
        self._run_job(lambda: self._checkpoint.run())  # the job makes it, because no interrupt hits that
        self.restore_reserve()

    def move(self, descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
        """Move all durable entries of ledgers to a tier; raises as ``checkpoint`` does.

        Raises:
            UnmovedError: Damaged records stay in their files; all others were moved.
        """

        def move() -> None:
            # A checkpoint ends the log file and writes every changed ledger, so it is made only if entries need it.
            if any(descriptor.last_indexed < descriptor.last_durable for descriptor in descriptors):
                self._checkpoint.run()
            self.compaction.move(descriptors, tier)

        self._run_job(move)

    def collect(self) -> None:
        """Free the space of deleted and moved entries; raises as ``checkpoint`` does, and if a tier has no space."""
        self._run_job(lambda: self.compaction.collect())

    def raise_level(self, level: FeatureLevel) -> None:
        """Write the store in the formats of a higher level; durable on return. Raises as ``checkpoint`` does."""
        self._run_job(lambda: self._checkpoint.raise_level(level))

    def look_for_space(self) -> None:
        """Check the free space, and make the store read-only or writable accordingly; raises as ``checkpoint`` does."""
        self._run_job(self.check_space)
