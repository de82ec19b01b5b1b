"""Reads a colocated bookie's entries from its files: no request, no copy, no encryption (HDFS: short-circuit read).

Theory of operation. The bookie's directory is opened as another process opens an embedded store, up to the durable
watermark. Entries are verified by their digests. What is not found, cannot be read or is damaged returns None, and the
caller asks the bookies, so this reader never denies an entry. A ledger with an extent that replaces damaged entries is
left to the bookie, which knows which copy counts.
"""

from __future__ import annotations

import logging
import threading
from array import array
from typing import TYPE_CHECKING, NamedTuple, Self

from pybk.bookie.directory_identity import DirectoryIdentity
from pybk.entry import EntryBatch
from pybk.errors import CookieError, PybkError
from pybk.flags import LedgerType
from pybk.storage.format.extent import Extent
from pybk.storage.readonly import ReadOnlyStore

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.digest import EntryDigest
    from pybk.ledger import LedgerMetadata
    from pybk.storage.descriptor import LedgerDescriptor

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """An extent with every entry of its range."""

    first: int
    descriptor: LedgerDescriptor

    @property
    def last(self) -> int:
        """The last entry that is durable."""
        return self.first + self.descriptor.last_durable


class LocalReader:
    """The entries that a bookie has on disk, read from its files while its process serves.

    It says nothing of what it does not find, as the bookie may have it all the same.

    Threads: any.
    """

    @classmethod
    def open(cls, directory: str, *, cluster_id: bytes, bookie_id: str, config: StoreConfig) -> Self:
        """Open a bookie's directory.

        Raises:
            CookieError: It is not that of this bookie of this cluster.
            CorruptError: The index is damaged.
            OSError: It cannot be read by this process.
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
        self._noted = -1
        self._parts: dict[int, array[int]] = {}
        self._identities: list[DirectoryIdentity] = []
        self._look()

    def _look(self) -> None:
        """See what there is since the last look."""
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
            At least one entry; None if the bookie is to be asked: entry ``first`` was not found, cannot be read, is
            damaged, or lies among entries of which the bookie does not have each.

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
        """Return the extent that holds an entry, None if none does, or not for all to see."""
        with self._lock:
            parts = list(self._parts.get(ledger_id, ()))
        found = None
        for number in parts:
            descriptor = self._store.descriptor(number)
            extent = Extent.of(descriptor.metadata)
            if extent is None or extent.replaces:
                return None  # which copy counts is for the bookie to say
            part = _Part(extent.first, descriptor)
            if extent.stride == 1 and part.first <= entry_id <= part.last:
                found = part
        return found

    def close(self) -> None:
        """Close the files."""
        self._store.close()
