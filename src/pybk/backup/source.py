"""The sources of backups: a store of this or another process, or the ledgers of a cluster (``cluster_source``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from pybk.backup.manifest import STORE, SourceIdentity
from pybk.backup.pack import LedgerKey
from pybk.errors import CorruptError, NoSuchLedgerError
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.storage.format.index_rows import NamedRow
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.store import Store


class LedgerCut(NamedTuple):
    """A ledger as of a cut; see ``KeptLedger``."""

    metadata: LedgerMetadata
    last: int
    lac: int
    length: int


class Cut(NamedTuple):
    """The state that a run copies.

    Attributes:
        durable_lsn: As in ``Manifest``.
        next_ledger_id: As in ``Manifest``.
        next_creation_sequence: As in ``Manifest``.
        ledgers: The ledgers.
        named: The named records.
        left_out: A sentence for each ledger that the run cannot copy, by id; its last copy stays in the backup.
    """

    durable_lsn: int
    next_ledger_id: int
    next_creation_sequence: int
    ledgers: Sequence[LedgerCut]
    named: Sequence[NamedRow]
    left_out: Mapping[int, str] = MappingProxyType({})


class Source(Protocol):
    """The store or cluster that is backed up. Threads: one at a time.

    Attributes:
        has_replicas: Whether ``read`` tries every bookie that should have an entry; a ledger that still cannot be read
            is then left out, and the run does not end.
    """

    has_replicas: bool

    @property
    def identity(self) -> SourceIdentity:
        """The identity of the source."""

    def cut(self) -> Cut:
        """Return the present state, with everything that was acknowledged before the call."""

    def read(self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int) -> EntryBatch:
        """Return sound entries from ``first`` to at most ``last``, at least one, about ``max_bytes``.

        Raises:
            NoSuchLedgerError: The ledger was deleted.
            CorruptError, StorageError: The entries are damaged, or the device cannot read them.
        """


class StoreSource:
    """An embedded store or a bookie's directory; see ``Source``.

    Args:
        store: The store; live if this process has it open, read-only otherwise.
    """

    has_replicas = False

    def __init__(self, store: Store | ReadOnlyStore) -> None:
        self._store = store

    @property
    def identity(self) -> SourceIdentity:
        """The store's id, salt, cost and incarnation."""
        cookie = self._store.cookie
        assert cookie.salt is not None, "a store's own cookie carries its salt"
        return SourceIdentity(STORE, cookie.store_id, cookie.salt, cookie.scrypt_cost or 0, cookie.incarnation)

    def cut(self) -> Cut:
        """See ``Source``; the state after one commit of the log."""
        found = self._store.cut()
        ledgers = [
            LedgerCut(row.metadata, row.last_entry_id, row.last_add_confirmed, row.length) for row in found.ledgers
        ]
        return Cut(found.durable_lsn, found.next_ledger_id, found.next_creation_sequence, ledgers, found.named)

    def read(self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int) -> EntryBatch:
        """See ``Source``; reads bypass the page cache, so a backup does not evict the application's pages."""
        descriptor = self._store.descriptor(metadata.ledger_id)
        if LedgerKey.of(descriptor.metadata) != LedgerKey.of(metadata):
            raise NoSuchLedgerError(f"ledger {metadata.ledger_id} was deleted, and its id was given again")
        try:
            # A digest of size 0 makes the store check the checksums of whole records, also of those without a digest.
            return self._store.read_batch(descriptor, first, last, max_bytes, digest_bytes=0, direct=True)
        except CorruptError:
            self._store.catch_up()
            if descriptor.deleted:  # then a missing file is not damage
                raise NoSuchLedgerError(f"ledger {metadata.ledger_id} was deleted") from None
            raise
