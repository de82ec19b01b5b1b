"""Reads a colocated bookie's entries from its files: no request, no copy, no encryption (HDFS: short-circuit read).

Theory of operation. The bookie's directory is opened as another process opens an embedded store, up to the durable
watermark. Entries are verified by their digests. For an entry that is not found, cannot be read or is damaged, the
reader returns None, and the caller asks the bookies. So this reader never denies an entry. A ledger with an extent that
replaces damaged entries is left to the bookie, which knows which copy counts.
"""

from __future__ import annotations

import logging
import threading
from array import array
from typing import TYPE_CHECKING, NamedTuple, Self

from pybk.bookie.directory_identity import DirectoryIdentity
from pybk.errors import CookieError, PybkError
from pybk.flags import LedgerType
from pybk.ledger.entry import EntryBatch
from pybk.storage.format.extent import Extent
from pybk.storage.readonly import ReadOnlyStore

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.ledger.digest import EntryDigest
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.storage.descriptor import LedgerDescriptor

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """An extent of stride 1, so it holds every entry from ``first`` to ``last``."""

    first: int
    descriptor: LedgerDescriptor

    @property
    def last(self) -> int:
        """The last durable entry id of the replicated ledger."""
        return self.first + self.descriptor.last_durable


class LocalReader:
    """Reads a bookie's entries from its files while the bookie's process serves.

    An entry that it does not find is not denied, because the bookie may have it nevertheless.

    Threads: any.
    """

    @classmethod
    def open(cls, directory: str, *, cluster_id: bytes, bookie_id: str, config: StoreConfig) -> Self:
        """Open a bookie's directory.

        Raises:
            CookieError: The directory is not the one of this bookie and cluster.
            CorruptError: The index is damaged.
            OSError: This process cannot read it.
        """
        store = ReadOnlyStore.open(directory, config=config)
        try:
            found = cls(store)
            if not any(each[:2] == (cluster_id, bookie_id) for each in found._identities):
                raise CookieError(f"{directory} is not the directory of bookie {bookie_id!r} of this cluster")
        except BaseException:
            store.close()
            raise
        return found

    def __init__(self, store: ReadOnlyStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        """Guards ``_noted``, ``_parts`` and ``_identities``."""
        self._noted = -1
        """The highest ledger id of the store that was noted; later ledgers have higher ids."""
        self._parts: dict[int, array[int]] = {}
        """The store's ledgers that are extents, by the replicated ledger's id."""
        self._identities: list[DirectoryIdentity] = []
        """The identities found so far; each start of the bookie adds one."""
        self._look()

    def _look(self) -> None:
        """Catch up with the durable watermark and note the ledgers that are new since the last call."""
        self._store.catch_up()
        with self._lock:
            for metadata in self._store.ledgers(after=self._noted):
                self._note(metadata)
                self._noted = metadata.ledger_id

    def _note(self, metadata: LedgerMetadata) -> None:
        extent = Extent.of(metadata)
        if extent is None and metadata.ledger_type == LedgerType.BOOKIE:
            self._identities.append(DirectoryIdentity.of(metadata))
            return
        if extent is not None and metadata.ledger_type not in (LedgerType.FENCE, LedgerType.LIMBO):
            self._parts.setdefault(extent.ledger_id, array("q")).append(metadata.ledger_id)

    def read_verified(
        self, ledger_id: int, first: int, last: int, max_bytes: int, *, digest: EntryDigest, direct: bool
    ) -> EntryBatch | None:
        """Return entries ``first`` to at most ``last``, verified, about ``max_bytes``.

        Returns:
            At least one entry. None if the caller has to ask the bookie, because entry ``first`` was not found, cannot
            be read, is damaged, or lies in an extent with a stride above 1.

        Cost: As reading an embedded store while another process writes it.
        """
        try:
            part = self._holder(ledger_id, first)
            if part is None:
                self._look()
                part = self._holder(ledger_id, first)
            if part is None:
                return None
            low, high = first - part.first, min(last, part.last) - part.first
            batch = self._store.read_batch(
                part.descriptor, low, high, max_bytes, digest_bytes=digest.size, direct=direct
            )
            ids = batch.entry_ids + part.first
            found = EntryBatch(ledger_id, ids, batch.buffer, batch.offsets, batch.sizes, batch.digest_bytes)
            digest.check_many(found)
        except (PybkError, OSError) as error:
            logger.warning("ledger %d entry %d: the bookie is asked, as here %s", ledger_id, first, error)
            return None
        return found

    def _holder(self, ledger_id: int, entry_id: int) -> _Part | None:
        """Return the extent of stride 1 that holds an entry; None if there is none, or only the bookie can decide."""
        with self._lock:
            parts = list(self._parts.get(ledger_id, ()))
        found = None
        for number in parts:
            descriptor = self._store.descriptor(number)
            extent = Extent.of(descriptor.metadata)
            if extent is None or extent.replaces:
                return None  # only the bookie knows which copy of an entry is the valid one
            part = _Part(extent.first, descriptor)
            if extent.stride == 1 and part.first <= entry_id <= part.last:
                found = part
        return found

    def close(self) -> None:
        """Close the files."""
        self._store.close()
