"""The backend of ``LedgerManager.open(path)``: ledgers in a store of this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from pybk import storage
from pybk.backend import AtomicGroups, BackendIdentity, NamedRecord, Quorums
from pybk.deferral import LateModule
from pybk.errors import IllegalOperationError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.ledger.digest import EntryDigest
from pybk.ledger.entry import EntryBatch
from pybk.ledger.keys import KeyRing, LedgerKeys, LedgerSeal
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log.log import Log
from pybk.storage.named_records import NamedChange, NamedRecords
from pybk.storage.store import Store
from pybk.threads import in_children, start_thread

if TYPE_CHECKING:
    from pybk import health
    from pybk.healing import scrub as store_scrub
    from pybk.healing.scrub import ScrubReport, ScrubStatus, StoreScrub
    from pybk.health import Health
    from pybk.storage.readonly import ReadOnlyStore
    from pybk.storage.transaction_group import LedgerEntries
else:
    health = LateModule("pybk.health")
    store_scrub = LateModule("pybk.healing.scrub")


logger = logging.getLogger(__name__)

FIRST_SCRUB_S: Final = 10.0
"""Seconds after the opening before any entry is checked."""

_RETRY_S: Final = 60.0
"""Seconds until the checks are begun again that could not be begun."""


class LocalWatch:
    """A watch of a named record of a store. Threads: any."""

    def __init__(self, named: NamedRecords, name: str, callback: Callable[[], None]) -> None:
        self._named = named
        self._name = name
        self._callback = callback
        named.watch(name, callback)

    def cancel(self) -> None:
        """Stop calling the callback. Idempotent."""
        self._named.unwatch(self._name, self._callback)


class LocalGroupWatch:
    """A watch of the named records of a group of a store. Threads: any."""

    def __init__(self, named: NamedRecords, group: str, callback: Callable[[str | None], None]) -> None:
        self._named = named
        self._group = group
        self._callback = callback
        named.watch_group(group, callback)

    def cancel(self) -> None:
        """Stop calling the callback. Idempotent."""
        self._named.unwatch_group(self._group, self._callback)


class LocalLock:
    """A lock among the users of a store; it ends with this object, which an interrupt may lose. Threads: any."""

    def __init__(self, locks: LocalLocks, name: str, owner: str) -> None:
        self._locks = locks
        self._name = name
        self.owner = owner

    @property
    def held(self) -> bool:
        """True if it was not released."""
        return self._locks.holder(self._name) is self

    def release(self) -> None:
        """Release it."""
        self._locks.release(self._name, self)

    def __del__(self) -> None:
        """Release it, and call its watches."""
        self.release()


class LocalLockWatch:
    """A watch of a lock among the users of a store. Threads: any."""

    def __init__(self, locks: LocalLocks, name: str, callback: Callable[[], None]) -> None:
        self._locks = locks
        self._name = name
        self._callback = callback
        locks.watch(name, self)

    def released(self) -> None:
        """Call the callback."""
        self._callback()

    def cancel(self) -> None:
        """Stop calling the callback. Idempotent."""
        self._locks.forget(self._name, self)


class LocalLocks:
    """The locks that are held among the users of a store. Threads: any."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._held: WeakValueDictionary[str, LocalLock] = WeakValueDictionary()
        self._watches: dict[str, dict[LocalLockWatch, None]] = {}
        in_children(self, LocalLocks._disable)

    def _disable(self) -> None:
        """Forget the watches in a forked child."""
        self._watches = {}

    def try_take(self, name: str, lock: LocalLock) -> bool:
        """Take a lock unless another one of its name is held; return whether it was taken."""
        with self._guard:
            return self._held.setdefault(name, lock) is lock

    def holder(self, name: str) -> LocalLock | None:
        """Return the lock of a name that is held."""
        return self._held.get(name)

    def release(self, name: str, lock: LocalLock | None = None) -> None:
        """Release a lock, or the one that has this name."""
        with self._guard:
            if lock is not None and self._held.get(name) is not lock:
                return
            self._held.pop(name, None)
            watches = list(self._watches.get(name, ()))
        for watch in watches:
            watch.released()

    def watch(self, name: str, watch: LocalLockWatch) -> None:
        """Report to a watch that a lock was released."""
        with self._guard:
            self._watches.setdefault(name, {})[watch] = None

    def forget(self, name: str, watch: LocalLockWatch) -> None:
        """Stop reporting to a watch."""
        with self._guard:
            watches = self._watches.get(name, {})
            watches.pop(watch, None)
            if not watches:
                self._watches.pop(name, None)


class BackgroundScrub:
    """Checks the entries of a live store in the background, from ``FIRST_SCRUB_S`` after its creation until ``stop``.

    A process that ends earlier does not even import the modules that check.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: its own; everything else any.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.begun: StoreScrub | None = None
        """The scrub, once it was made."""
        self._thread = threading.Thread(target=self._run, name="pybk-scrub", daemon=True)
        start_thread(self._thread)

    def begin(self) -> StoreScrub:
        """Return the scrub, made by the first call."""
        with self._lock:
            if self.begun is None:
                owner = store_scrub.EmbeddedScrub(self._store)
                self.begun = store_scrub.StoreScrub(owner, self._store.config.on_span)
            return self.begun

    def _run(self) -> None:
        wait_s = FIRST_SCRUB_S
        while not self._stopping.wait(wait_s):
            try:
                scrub = self.begin()
            except (OSError, MemoryError) as error:
                logger.warning("%s: entries are not checked now: %s", self._store.volumes.root, error)
                wait_s = _RETRY_S
                continue
            if self._stopping.is_set():  # ``stop`` may have seen nothing to stop
                scrub.begin_stop()
            scrub.run()

    def stop(self) -> None:
        """Stop; returns when the thread has ended."""
        self._stopping.set()
        if self.begun is not None:
            self.begun.begin_stop()
        if self._thread.is_alive():
            self._thread.join()


@runtime_checkable
class StoreUpkeep(Protocol):
    """A capability: the ledgers are on disks that the manager itself maintains. Threads: any."""

    def checkpoint(self) -> None:
        """Write all durable entries to their tiers, and free log files that are no longer needed."""

    def check_entries(self, progress: Callable[[int, int], None]) -> ScrubReport:
        """Check the checksum of each stored entry, in the calling thread; ``progress`` takes bytes done and in all."""

    def scrub_status(self) -> ScrubStatus:
        """Return how the checks of the entries proceed."""


class StoreBackend(AtomicGroups, StoreUpkeep):
    """A store, live or read-only, as a backend; ``LedgerBackend`` describes the calls.

    Threads: any.
    """

    changes_by_password = False
    single_writer = True

    def __init__(self, store: Store | ReadOnlyStore) -> None:
        self.store = store
        self.config = store.config
        self.metrics = store.metrics
        self.read_only = not isinstance(store, Store)
        self.catch_up = store.catch_up
        self.check_usable = store.check_usable
        self.descriptor = store.descriptor
        self.metadata = store.metadata
        self.ledgers = store.ledgers
        self.locate = store.locate
        store_id, salt, cost = self.identity
        self.key_ring = KeyRing(store_id, salt, cost=cost)
        self._locks = LocalLocks()
        """The advisory locks that are held, by name."""
        self.scrub: BackgroundScrub | None = None
        """The scrub that checks the entries in the background; stopped by ``close``."""

    def close(self) -> None:
        """Stop the checks in the background, and close the store."""
        with ExitStack() as closing:
            closing.callback(self.store.close)
            if self.scrub is not None:
                self.scrub.stop()

    @property
    def where(self) -> str:
        """The store's directory."""
        return self.store.volumes.root

    @property
    def ended(self) -> bool:
        """True if the store is closed; reads raise then."""
        return self.store.ended

    @property
    def forked(self) -> bool:
        """True if this process is a fork of the process that opened the store."""
        return self.store.forked

    @property
    def identity(self) -> BackendIdentity:
        """The identity of the store."""
        cookie = self.store.cookie
        assert cookie.salt is not None, "a store's own cookie carries its salt"
        return BackendIdentity(cookie.store_id, cookie.salt, cookie.scrypt_cost or 0)

    @property
    def feature_level(self) -> FeatureLevel:
        """The feature level of the store."""
        return self.store.feature_level

    def check_writable(self) -> None:
        """Raise unless the store is open for writing."""
        self._live()

    def _live(self) -> Store:
        """Return the store; raise if it is not open for writing."""
        self.store.check_usable()
        if not isinstance(self.store, Store):
            raise IllegalOperationError(
                f"{self.where} is open read-only; open it without read_only=True, or with mode='w', to change it"
            )
        return self.store

    def health(self) -> Health:
        """Return the health of the store."""
        store = self.store
        if isinstance(store, Store):
            return health.store_health(store)
        return health.read_only_store_health(store)

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def quorums(self, asked: tuple[int | None, int | None, int | None]) -> Quorums:
        """Return quorums of one; refuse more copies, because a store holds one."""
        self._live()
        if set(asked) - {None, 1}:
            raise UsageError(
                f"ensemble size, write quorum and ack quorum are {asked}; a store of one process keeps one copy: have "
                "bookies share the ledger, by LedgerManager.connect(URL), or by metadata= and listen= of the open"
            )
        return Quorums(1, 1, 1)

    def verifier(self, keys: LedgerKeys) -> bytes:
        """Return the verifier of the keys."""
        return keys.verifier

    def new_ledger_id(self) -> int:
        """Return an id that this store has never assigned."""
        return self._live().new_ledger_id()

    def new_creation_sequence(self) -> int:
        """Return the store's next creation sequence."""
        return self._live().new_creation_sequence()

    def create(self, metadata: LedgerMetadata, *, entries_when_full: int = 0) -> LedgerDescriptor:
        """Create a ledger."""
        return self._live().create(metadata, when_full=entries_when_full > 0, entries_when_full=entries_when_full)

    def unlock(self, descriptor: LedgerDescriptor, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Set the seal that is written when the ledger is closed."""
        if descriptor.sealer is None:
            descriptor.sealer = seal

    def log_of(self, descriptor: LedgerDescriptor) -> Log:
        """Return the store's log, which all ledgers share."""
        return self._live().log

    def recover(self, descriptor: LedgerDescriptor) -> None:
        """Fence the writer and close the ledger after its last durable entry."""
        self._live().close_ledger(descriptor, fence=True)

    def close_ledger(self, descriptor: LedgerDescriptor) -> None:
        """Close a ledger after the last entry staged so far."""
        self._live().close_ledger(descriptor, fence=False)

    def reseal(self, descriptor: LedgerDescriptor, sealed: LedgerMetadata) -> None:
        """Record the seal of a closed ledger."""
        self._live().reseal(descriptor, sealed)

    def force(self, descriptor: LedgerDescriptor) -> int:
        """Make everything pushed so far durable and confirmed."""
        return self._live().force(descriptor)

    def delete(self, descriptor: LedgerDescriptor) -> None:
        """Delete a ledger."""
        self._live().delete(descriptor)

    def move(self, descriptor: LedgerDescriptor, tier: StorageHint) -> None:
        """Move a ledger."""
        self._live().move(descriptor, tier)

    def move_all(self, descriptors: Iterable[LedgerDescriptor], tier: StorageHint) -> None:
        """Move ledgers, many of them with one commit."""
        self._live().move_all(descriptors, tier)

    def look(self, descriptor: LedgerDescriptor, *, follows: bool = False) -> None:
        """Read new commits if the store is read-only; a live store is always up to date."""
        self.store.catch_up()
        if follows:
            self.store.keep_looking()

    def moved(self, descriptors: Sequence[LedgerDescriptor]) -> list[LedgerDescriptor]:
        """Return all of the ledgers: to look at one costs no request."""
        self.check_usable()
        return list(descriptors)

    def confirmed(self, ledger_id: int) -> tuple[int, int | None]:
        """Return the last add confirmed, and the bytes up to there unless some durable entries are unconfirmed."""
        descriptor = self.descriptor(ledger_id)
        last = descriptor.last_add_confirmed
        if last == descriptor.last_durable:
            return last, descriptor.length_durable
        return last, None if last >= 0 else 0

    # ---- named records -------------------------------------------------------------------------------------------

    def read_record(self, name: str) -> NamedRecord | None:
        """Return a record of the store's catalog."""
        self.store.check_usable()
        self.store.catch_up()
        found = self.store.named.get(name)
        return None if found is None or found.value is None else NamedRecord(found.name, found.version, found.value)

    def read_records(self, names: Sequence[str]) -> list[NamedRecord | None]:
        """Return records of the store's catalog."""
        return [self.read_record(each) for each in names]

    def write_record(self, name: str, value: bytes | None, version: int | None) -> int:
        """Change a record with one synced write."""
        store = self._live()
        return store.with_reserve(lambda: store.named.compare_and_set(name, version, value, level=store.feature_level))

    def rename_record(self, name: str, target: str, value: bytes, version: int) -> None:
        """Rename a record with one synced write."""
        store = self._live()
        changes = (NamedChange(name, version, None), NamedChange(target, None, value))
        store.with_reserve(lambda: store.append_group((), changes))

    def watch_record(self, name: str, callback: Callable[[], None]) -> LocalWatch:
        """Watch a record of the store's catalog."""
        self.store.check_usable()
        watch = LocalWatch(self.store.named, name, callback)
        self.store.keep_looking()
        return watch

    def try_lock(self, name: str, owner: str) -> LocalLock | None:
        """Take a lock among the users of this store in this process; no other process can write to the store."""
        lock = LocalLock(self._locks, name, owner)
        return lock if self._locks.try_take(name, lock) else None

    def break_lock(self, name: str) -> None:
        """Take a lock away from its holder in this process."""
        self._locks.release(name)

    def watch_lock(self, name: str, callback: Callable[[], None]) -> LocalLockWatch:
        """Watch a lock among the users of this store in this process."""
        return LocalLockWatch(self._locks, name, callback)

    def lock_owner(self, name: str) -> str | None:
        """Return the owner of a lock in this process."""
        held = self._locks.holder(name)
        return None if held is None else held.owner

    def watch_group(self, group: str, callback: Callable[[str | None], None]) -> LocalGroupWatch:
        """Watch records of the store's catalog."""
        self.store.check_usable()
        watch = LocalGroupWatch(self.store.named, group, callback)
        self.store.keep_looking()
        return watch

    def record_names(self, prefix: str) -> list[str]:
        """Return names of records of the store's catalog."""
        return [each.name for each in self.records(prefix)]

    def records(self, prefix: str) -> list[NamedRecord]:
        """Return records of the store's catalog."""
        self.store.check_usable()
        self.store.catch_up()
        found = self.store.named.all(prefix)
        return [NamedRecord(each.name, each.version, each.value) for each in found if each.value is not None]

    def stage_group(self, entries: Sequence[LedgerEntries], changes: Sequence[NamedChange]) -> Callable[[], int]:
        """Stage a group in the store's log."""
        group = self._live().stage_group(entries, changes)
        return lambda: group.finish().version

    # ---- entries -------------------------------------------------------------------------------------------------

    def read_verified(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch:
        """Read and verify entries from the store."""
        batch = self.store.read_batch(descriptor, first, last, max_bytes, digest_bytes=digest.size, direct=direct)
        digest.check_many(batch)
        return batch

    def write_buffered(self, descriptor: LedgerDescriptor) -> None:
        """Write the buffered entries of all ledgers."""
        self.store.write_buffered()

    def check_space(self) -> None:
        """Raise while the store is read-only because space is short."""
        self._live().check_space()

    def wait_for_admission(self, descriptor: LedgerDescriptor) -> None:
        """Wait until the log admits appends: until staged entries were committed, or a checkpoint shortened the log."""
        self._live().wait_for_admission()

    def checkpoint(self) -> None:
        """Run a checkpoint and a compaction, and accept appends again if there is space now."""
        scheduler = self._live().scheduler
        scheduler.checkpoint()
        scheduler.collect()
        scheduler.look_for_space()

    def check_entries(self, progress: Callable[[int, int], None]) -> ScrubReport:
        """Check the entries now, as a check in the background if there is one."""
        if self.scrub is not None:
            return self.scrub.begin().check_all(progress)
        return store_scrub.check_store(self.store, progress)

    def scrub_status(self) -> ScrubStatus:
        """Return the status of the checks in the background, or what the process that writes the store noted last."""
        if self.scrub is not None and self.scrub.begun is not None:
            return store_scrub.status_of_notes(self.where, self.scrub.begun.notes())
        return store_scrub.status_of_notes(self.where, storage.load_notes(self.store.fs, self.store.volumes.root))
