"""Ledgers that live in a store of this process: what ``LedgerManager.open(path)`` uses."""

from __future__ import annotations

from collections.abc import Iterable

from pybk.backend import BackendIdentity, Quorums, Replicated
from pybk.digest import EntryDigest
from pybk.entry import EntryBatch
from pybk.errors import IllegalOperationError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.health import Health, read_only_store_health, store_health
from pybk.keys import KeyRing, LedgerKeys
from pybk.ledger import LedgerMetadata
from pybk.metadata.registration import BookieRegistration
from pybk.seal import LedgerSeal
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log.log import Log
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.store import Store


class StoreBackend:
    """A store, live or read-only, as a backend; ``LedgerBackend`` describes the calls.

    Threads: any.
    """

    changes_by_password = False
    is_cluster = False

    def __init__(self, store: Store | ReadOnlyStore) -> None:
        self.store = store
        self.config = store.config
        self.metrics = store.metrics
        self.read_only = isinstance(store, ReadOnlyStore)
        self.catch_up = store.catch_up
        self.check_usable = store.check_usable
        self.descriptor = store.descriptor
        self.metadata = store.metadata
        self.ledgers = store.ledgers
        self.locate = store.locate
        self.close = store.close
        store_id, salt, cost = self.identity
        self.key_ring = KeyRing(store_id, salt, cost=cost)

    @property
    def where(self) -> str:
        """The store's directory."""
        return self.store.volumes.root

    @property
    def ended(self) -> bool:
        """Whether reading is over."""
        return self.store.ended

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened the store."""
        return self.store.forked

    @property
    def identity(self) -> BackendIdentity:
        """That of the store."""
        cookie = self.store.cookie
        assert cookie.salt is not None, "a store's own cookie carries its salt"
        return BackendIdentity(cookie.store_id, cookie.salt, cookie.scrypt_cost or 0)

    @property
    def feature_level(self) -> FeatureLevel:
        """That of the store."""
        return self.store.feature_level

    def check_writable(self) -> None:
        """Raise unless the store is open and live."""
        self._live()

    def _live(self) -> Store:
        """Return the store for writing."""
        self.store.check_usable()
        if isinstance(self.store, ReadOnlyStore):
            raise IllegalOperationError(
                f"{self.where} is open read-only; LedgerManager.open(path) without read_only=True can change it"
            )
        return self.store

    def health(self) -> Health:
        """Return how the store is."""
        store = self.store
        if isinstance(store, Store):
            return store_health(store)
        return read_only_store_health(store)

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def quorums(self, asked: tuple[int | None, int | None, int | None]) -> Quorums:
        """Refuse more than one copy: this process is the only bookie."""
        self._live()
        if set(asked) - {None, 1}:
            raise UsageError(
                f"ensemble size, write quorum and ack quorum are {asked}; a store of one process keeps one copy: open "
                "the manager with metadata=... to have bookies share a ledger"
            )
        return Quorums(1, 1, 1)

    def verifier(self, keys: LedgerKeys) -> bytes:
        """Return the keys' own."""
        return keys.verifier

    def new_ledger_id(self) -> int:
        """Return an id that this store never gave."""
        return self._live().new_ledger_id()

    def new_creation_sequence(self) -> int:
        """Return this store's next."""
        return self._live().new_creation_sequence()

    def create(self, metadata: LedgerMetadata) -> LedgerDescriptor:
        """Create a ledger."""
        return self._live().create(metadata)

    def unlock(self, descriptor: LedgerDescriptor, keys: LedgerKeys, seal: LedgerSeal) -> None:
        """Have the ledger sealed when it is closed."""
        if descriptor.sealer is None:
            descriptor.sealer = seal

    def log_of(self, descriptor: LedgerDescriptor) -> Log:
        """Return the store's one log."""
        return self._live().log

    def recover(self, descriptor: LedgerDescriptor) -> None:
        """Fence and close: what is durable here is all there is."""
        self._live().close_ledger(descriptor, fence=True)

    def close_ledger(self, descriptor: LedgerDescriptor) -> None:
        """Close a ledger behind everything staged so far."""
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
        """Move ledgers, many with one commit."""
        self._live().move_all(descriptors, tier)

    def look(self, descriptor: LedgerDescriptor, *, follows: bool = False) -> None:
        """See what was appended since; a live store always knows."""
        self.store.catch_up()
        if follows:
            self.store.keep_looking()

    def replicate(self, what: int | str) -> Replicated:
        """Refuse: there is one copy, here."""
        raise IllegalOperationError(
            f"{self.where} is a store of one process and keeps one copy; only a cluster's ledgers can be replicated"
        )

    def confirmed(self, ledger_id: int) -> tuple[int, int | None]:
        """Return how far a ledger is; the bytes are known if nothing durable is unconfirmed."""
        descriptor = self.descriptor(ledger_id)
        last = descriptor.last_add_confirmed
        if last == descriptor.last_durable:
            return last, descriptor.length_durable
        return last, None if last >= 0 else 0

    def bookies(self) -> list[BookieRegistration]:
        """Refuse: a store of one process has no bookies."""
        raise IllegalOperationError(
            f"{self.where} is a store of one process; only a cluster has bookies: LedgerManager.connect"
        )

    # ---- entries -------------------------------------------------------------------------------------------------

    def read_verified(
        self, descriptor: LedgerDescriptor, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch:
        """Read the only copy there is."""
        batch = self.store.read_batch(descriptor, first, last, max_bytes, digest_bytes=digest.size, direct=direct)
        digest.check_many(batch)
        return batch

    def write_buffered(self, descriptor: LedgerDescriptor) -> None:
        """Write what any ledger has buffered."""
        self.store.write_buffered()

    def check_space(self) -> None:
        """Raise while the store is read-only for want of space."""
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
