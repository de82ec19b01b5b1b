"""What a store does in the background: checkpoints, preallocation, collection, moves by policy, watching free space.

This file decides when a job runs, and what its failure means; ``checkpoint.py``, ``compaction.py`` and ``mover.py`` do
the work. One job runs at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk.errors import (
    CorruptError,
    PybkError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    UnsupportedFormatError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.storage.compaction.checkpoint import Checkpoint
from pybk.storage.compaction.compaction import Compaction
from pybk.storage.compaction.garbage import Garbage
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.io.failures import is_passing, is_refused, refused, start_thread, storage_error
from pybk.storage.log.preallocation import LARGE_COMMIT_BYTES

if TYPE_CHECKING:
    from pybk.storage.compaction.live_store import LiveStore
    from pybk.storage.compaction.tier_policy import TierQueue

logger = logging.getLogger(__name__)

_SPACE: Final = "looking for free space"
_SPARES: Final = "holding spare descriptors"
_READERS: Final = "freeing places of killed readers"
_PREALLOCATING: Final = "preallocating log files"
_CHECKPOINT: Final = "the checkpoint"
_COLLECTION: Final = "freeing the space of what is dead"
_POLICY: Final = "moving ledgers by the tier policy"
_DAMAGED: Final = "moving damaged records by the tier policy"

TICK_SECONDS: Final = 1.0
"""The pause of the thread while entries are committed."""

_REST_SECONDS: Final = 5.0
"""How often the thread looks for work while nothing is committed; the next commit wakes it."""

_MANY_COMMITS: Final = 256
"""So many small commits between two looks are worth log files with zeros."""

POLICY_SECONDS: Final = 60.0
"""The time between two applications of the tier policy."""

_PACKING_SECONDS: Final = 10.0
"""How often sparse files are packed while ledgers are being moved out of them."""
_READERS_SECONDS: Final = 10.0
"""How often places of killed readers in LMDB's reader tables are looked for."""


class Scheduler:
    """Runs a store's background jobs.

    Threads: its own, and any thread that asks for a job; jobs exclude each other.

    Attributes:
        error: Why there are no more jobs, or None.
        full: Why the store takes no appends, for want of space, or None.
        rests: Whether the thread sleeps for long, as nothing was committed; the next commit wakes it.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex, tier_queue: TierQueue | None) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._garbage = Garbage(store, catalog_and_index)
        self._checkpoint = Checkpoint(store, catalog_and_index, self._garbage)
        self.compaction = Compaction(store, catalog_and_index, self._garbage)
        """Packs files, and moves ledgers between tiers."""
        self._tier_queue = tier_queue
        self._troubles = store.troubles
        self._job = threading.Lock()
        self.wakeup = threading.Lock()  # an Event is Python code: an interrupt inside it would leave it locked for ever
        """Released to wake the thread."""
        self.wakeup.acquire()
        self._progress = threading.Condition()
        self.stopping = False
        """The thread is to end."""
        self.thread: threading.Thread | None = None
        """The thread; None before ``start``."""
        self.policy_due = time.monotonic() + POLICY_SECONDS
        """When the tier policy is applied next."""
        self.readers_due = time.monotonic() + _READERS_SECONDS
        """When the slots of killed readers are freed next."""
        self._stuck: str | None = None
        self._movers: set[object] = set()
        self._packed_at = time.monotonic()
        self._moved_at = self._packed_at - TICK_SECONDS
        self.error: PybkError | None = None
        self.full: str | None = None
        self.rests = False
        self._seen_lsn = -1
        self._position = store.log.position()

    # ---- thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless the configuration says that jobs run only when called."""
        if self._store.config.background:
            thread = threading.Thread(target=self.run, name="pybk-maintenance", daemon=True)
            start_thread(thread)
            self.thread = thread

    def wake(self) -> None:
        """Have the thread look for work now."""
        if self.wakeup.locked():
            with suppress(RuntimeError):  # somebody else woke it meanwhile
                self.wakeup.release()

    def stop(self) -> None:
        """Stop the thread after its current job."""
        self.stopping = True
        self.wake()
        if self.thread is not None:
            self.thread.join()

    def close(self) -> None:
        """Wait for a job that is running, and close what the jobs keep open; the log takes nothing more by now."""
        with self._job:
            self._catalog_and_index.close()

    def run(self) -> None:
        """Run the thread: look for something to do, and sleep."""
        while not self.stopping:
            try:
                self.tick()
            except Exception as error:  # noqa: BLE001  # without this thread nothing frees space, and appends wait
                self._fail(error)
                return
            self.wakeup.acquire(timeout=self.pause())
            self.rests = False

    def pause(self) -> float:
        """Return how long to sleep: longer while nothing is committed, and nothing is to be tried again."""
        log = self._store.log
        self.rests = True  # before the log is looked at, so that a commit that is not seen here ends the rest
        lsn = log.durable_lsn
        queue = self._tier_queue
        looking = queue is not None and queue.looking
        if lsn == self._seen_lsn and not (self.full or looking or log.refuses or self._troubles.all()):
            return _REST_SECONDS
        self._seen_lsn = lsn
        self.rests = False
        return TICK_SECONDS

    def _fail(self, error: BaseException) -> None:
        """Take no more jobs and no more appends."""
        root = self._store.volumes.root
        if self.error is None:
            logger.error("maintenance of %s failed, the store takes no more appends: %s", root, error, exc_info=error)
            self.error = (
                error
                if isinstance(error, PybkError)
                else StorageFailedError(f"maintenance of {root} ended by {error!r}; close the store and open it again")
            )
        self._store.log.fail(self.error)
        self._store.log.kick()
        with self._progress:
            self._progress.notify_all()

    def tick(self) -> None:
        """Do what is due: space, preallocation, checkpoint, collection, policy.

        Raises:
            PybkError, OSError: Not for want of space, which turns the store read-only until it has passed.
        """
        with self._attempting(_SPACE):
            self.check_space()
        self._look_after_process()
        try:
            self._do_what_is_due()
            self._stuck = None
        except StorageFullError as error:
            self._stuck = str(error)
        with self._attempting(_SPACE):
            self.check_space()

    def _look_after_process(self) -> None:
        """Make up for spare descriptors, and free what killed readers hold."""
        lacking = self._store.fs.fill_spares()
        if lacking is None:
            self._troubles.clear(_SPARES)
        else:
            self._troubles.note(_SPARES, lacking)
        if time.monotonic() >= self.readers_due:
            with self._attempting(_READERS):
                self._store.release_dead_readers()
            self.readers_due = time.monotonic() + _READERS_SECONDS

    @contextmanager
    def _attempting(self, doing: str) -> Iterator[None]:
        """Note a failure that leaves no doubt about durable bytes as a trouble; what was tried is tried again.

        Raises:
            StorageFullError: There is no space.
            StorageFailedError, CorruptError, UnsupportedFormatError: What is durable is in doubt.
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
                    store.supply.prefer_zeros()  # the file that was left had large commits
        full = self.full is not None
        if full or store.wants_checkpoint():
            with self._attempting(_CHECKPOINT):
                self.checkpoint()
        packs = self._packs()
        if full or self._garbage.freed:
            with self._attempting(_COLLECTION):
                self._run_job(partial(self.compaction.collect, packs=full or packs))
        queue = self._tier_queue
        if queue is not None:
            queue.look()
            if time.monotonic() >= self.policy_due:
                with self._attempting(_POLICY):
                    queue.move_due(lambda: self.stopping)
                self.policy_due = time.monotonic() + POLICY_SECONDS
            self._show_damaged(queue)

    def _show_damaged(self, queue: TierQueue) -> None:
        """Have ``health()`` show which ledgers the policy did not move whole, because of damaged records."""
        if queue.damaged:
            self._troubles.note(_DAMAGED, "; ".join(queue.damaged.values()))
        else:
            self._troubles.clear(_DAMAGED)

    def _commits_are_small(self) -> bool:
        """Return whether the log made many commits since the last look, in one file, and small ones."""
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
        """Put off the packing of sparse files while ledgers are moved: it would pack what is moved next."""
        mover = object()
        self._movers.add(mover)
        try:
            yield
        finally:
            self._moved_at = time.monotonic()
            self._movers.discard(mover)

    def _packs(self) -> bool:
        """Return whether sparse files are packed now: not while ledgers are moved out of them, unless that lasts."""
        now = time.monotonic()
        moving = bool(self._movers) or now < self._moved_at + TICK_SECONDS
        if moving and now < self._packed_at + _PACKING_SECONDS:
            return False
        self._packed_at = now
        return True

    def _shortage(self) -> str | None:
        """Say which device has too little free space; None if each has enough."""
        store = self._store
        limit = store.config.free_bytes_low if self.full is None else store.config.free_bytes_ok
        for directory in store.volumes.directories:
            free = store.fs.free_bytes(directory.path)
            if free < limit:
                return (
                    f"{directory.path} has {free} bytes free, fewer than {limit}: the store takes no appends until "
                    "there is more; delete ledgers or free space"
                )
        return None

    def wait_for_admission(self) -> None:
        """Return when the unchecked tail is within its bound again; called by appends that found it full.

        Raises:
            StorageFullError: There is no space to bring it there.
            StorageRefusedError: The checkpoint was refused for now.
            PybkError: The checkpoint failed, and with it the store.
        """
        store = self._store
        if not store.config.background:
            self.checkpoint()
            return
        self.wake()
        with self._progress:
            while store.tail_bytes >= store.config.unchecked_tail_bytes and self.error is None and not self.stopping:
                store.check_space()
                trouble = self._troubles.of(_CHECKPOINT)
                if trouble is not None:
                    raise StorageRefusedError(f"the log is as long as it may be, and {trouble}")
                self._progress.wait(0.1)
        if self.error is not None:
            raise self.error

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def _run_job(self, job: Callable[[], None]) -> None:
        """Do a job where no interrupt comes: not in the main thread. Raises what the job raises.

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
        thread.join()
        if raised:
            raise raised[0]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Exclude other jobs; a failure ends the store, for what it knows may be half the truth.

        Raises:
            StorageRefusedError: The job found no space, descriptor, memory or thread; it changed nothing.
            StorageFailedError: The job failed, or something before it did.
        """
        with self._job:
            if self._store.log.error is not None:
                raise self._store.log.error
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
        """Bring everything that is durable in the log so far into the index, and entries to their tiers.

        Where a tier has no space, they stay in the log files, and ``collect`` brings them there when it has.

        Raises:
            StorageFullError: The index has no space; nothing was changed.
            StorageFailedError: Something else failed; the store should be closed.
        """
        self._run_job(self._checkpoint.run)

    def move(self, descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
        """Bring all entries of ledgers, up to those durable now, to a tier; raises as ``checkpoint`` does.

        Raises:
            UnmovedError: Damaged records stay where they are; everything else was moved.
        """

        def move() -> None:
            # A checkpoint ends the log file and writes every changed ledger, so it is made only if entries need it.
            if any(descriptor.last_indexed < descriptor.last_durable for descriptor in descriptors):
                self._checkpoint.run()
            self.compaction.move(descriptors, tier)

        self._run_job(move)

    def collect(self) -> None:
        """Free the space of deleted and moved entries; raises as ``checkpoint`` does, and where a tier has no space."""
        self._run_job(self.compaction.collect)

    def raise_level(self, level: FeatureLevel) -> None:
        """Write the store in the formats of a higher level; durable on return. Raises as ``checkpoint`` does."""
        self._run_job(lambda: self._checkpoint.raise_level(level))

    def look_for_space(self) -> None:
        """Turn the store read-only, or back, as it is now; raises as ``checkpoint`` does."""
        self._run_job(self.check_space)

    def apply_policy(self) -> None:
        """Move the closed ledgers that the policy says are due; those that find no space stay until the next time."""
        queue = self._tier_queue
        if queue is None:
            return
        queue.look(at_all=True)
        try:
            queue.move_due(lambda: self.stopping)
        except StorageRefusedError as error:
            self._troubles.note(_POLICY, error)
        else:
            self._troubles.clear(_POLICY)
        self._show_damaged(queue)
