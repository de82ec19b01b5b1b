"""The space of a store's devices: what a job needs before it writes, and what checkpoints and moves have made obsolete.

Free space is checked first, because a job that runs out of space midway has written without result.

Compaction frees the space of obsolete records, ``Garbage``. Most tiers free whole files: a file is dropped once it has
no live entries, and packed when it has few. The SSD tier frees single records (``Tier.files_are_freed_whole`` is
False): they are noted once the index no longer names them, and deleted afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.deferral import np
from pybk.errors import StorageFullError
from pybk.flags import StorageHint
from pybk.storage.format.log_file import LOCATION_BYTES, RECORD_HEADER_BYTES, RunLocations
from pybk.storage.volumes import tier_for, tier_of_kind

if TYPE_CHECKING:
    from pybk.storage.index.catalog_and_index import CatalogAndIndex
    from pybk.storage.live_store import LiveStore

_SPARE_SHARE: Final = 4
"""This part of the free space is left when records are packed, because the index and the log need space, too."""
INDEX_SPARE_BYTES: Final = 512 << 10
_CATALOG_SPARE_BYTES: Final = 32 << 10
"""The bytes for the rows of files, the mark, and the next commit, which names the files that are removed."""

CHANGES_WHEN_FULL_BYTES: Final = 512 << 10
"""Bytes of changes of catalog and index that are allocated in advance, besides those of the next checkpoint."""

INDEX_ROW_BYTES: Final = 1 << 10
"""The bytes that a ledger's row is estimated to take in the index at most."""


def check_tier_space(store: LiveStore, tier: StorageHint, nbytes: int) -> None:
    """Raise StorageFullError if a tier's devices have too little space for records of ``nbytes``.

    Does nothing if the space that records take is not known before they are written: if they are compressed, or LMDB
    can reuse pages.
    """
    if not tier_for(tier).size_is_known(tier, store.config):
        return
    path, free = max(((path, store.fs.free_bytes(path)) for path in store.volumes.tier_paths(tier)), key=itemgetter(1))
    if nbytes > free - free // _SPARE_SHARE:
        raise StorageFullError(
            f"{path} has {free} bytes free, too few to pack {nbytes} bytes of entries there; free space on the "
            "device or delete ledgers"
        )


def check_index_space(store: LiveStore, nbytes: int) -> None:
    """Raise StorageFullError if the index might run out of space: LMDB may report that as a failure, which is final."""
    path = store.volumes.tier_paths(StorageHint.SSD)[0]
    free = store.fs.free_bytes(path) + store.index.reserved_bytes()
    needed = index_space(nbytes)
    if free < needed:
        raise StorageFullError(
            f"{path} has {free} bytes free, and changing the index may take {needed}; free space on the device or "
            "delete ledgers"
        )


def check_catalog_space(catalog_and_index: CatalogAndIndex, nbytes: int) -> None:
    """Raise StorageFullError if the catalog has too little space for a checkpoint that changes so much."""
    free, needed = catalog_and_index.free_bytes(), nbytes + _CATALOG_SPARE_BYTES
    if free < needed:
        raise StorageFullError(
            f"the catalog can grow by {free} bytes, and a checkpoint may take {needed}; free space on the device of "
            "the store's own directory"
        )


def check_packing_space(store: LiveStore, catalog_and_index: CatalogAndIndex, index_bytes: int) -> None:
    """Raise StorageFullError if packing a file on a full disk takes from catalog or index what a checkpoint needs."""
    left = CHANGES_WHEN_FULL_BYTES + store.change_bytes()
    check_index_space(store, index_bytes + left)
    check_catalog_space(catalog_and_index, store.change_bytes() + _CATALOG_SPARE_BYTES)


def index_change_bytes(ledgers: int, runs: int, named_bytes: int) -> int:
    """Return the bytes that a checkpoint changes in the index at most.

    Args:
        ledgers: The number of ledgers that changed or were deleted.
        runs: The number of runs of entries that were appended to them.
        named_bytes: Bytes of the named records that changed.
    """
    return ledgers * INDEX_ROW_BYTES + runs * LOCATION_BYTES + named_bytes


def index_space(nbytes: int) -> int:
    """Return the space that a change of so many bytes of the index may take."""
    return 2 * nbytes + INDEX_SPARE_BYTES  # pages are not full, and are copied before they are changed


def record_bytes(runs: RunLocations) -> int:
    """Return the bytes of the records of some runs, headers included."""
    return int(runs["body"].astype(np.int64).sum()) + RECORD_HEADER_BYTES * len(runs)


class RecordKey(NamedTuple):
    """A record of a tier that frees records one by one: its file, its ledger and its first entry."""

    file_id: int
    ledger_id: int
    first_entry_id: int


class Garbage:
    """The space that can be freed in one store.

    Threads: one at a time, under the scheduler's lock for jobs.

    Attributes:
        freed: Whether compaction may find space to free: entries died in files that also have live ones, or a tier had
            no space for entries, which are still in the log files.
        mixed: Log files that hold entries of other tiers, because those tiers had no space for them.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._unpurged: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.freed = False
        self.mixed: set[int] = set()

    def keys_of_ledgers(self, ledger_ids: Iterable[int]) -> list[RecordKey]:
        """Return the records of ledgers that lie in tiers which free records one by one."""
        return [
            key
            for ledger_id in ledger_ids
            for page in self._store.index.pages(ledger_id)
            for key in self.keys_of(ledger_id, page, page[:0])
        ]

    def keys_of(self, ledger_id: int, old: RunLocations, new: RunLocations) -> list[RecordKey]:
        """Return the records that ``old`` uses and ``new`` does not, of tiers that free records one by one."""
        rows = self._store.volumes.rows
        files = old["file"].tolist()
        single = {file_id for file_id in set(files) if not tier_of_kind(rows[file_id].kind).files_are_freed_whole}
        if not single:
            return []
        used = {(int(run["file"]), int(run["first"])) for run in new}
        return [
            RecordKey(file_id, ledger_id, first)
            for file_id, first in zip(files, old["first"].tolist(), strict=True)
            if file_id in single and (file_id, first) not in used
        ]

    def remember(self, keys: Iterable[RecordKey]) -> None:
        """Note records that the next ``purge`` frees, because the index names them no longer."""
        for key in keys:
            self._unpurged[key.file_id].add((key.ledger_id, key.first_entry_id))

    def purge(self) -> None:
        """Free the noted records.

        A purge that fails for lack of space is retried before anything else is written to the tier, so none of its
        records can be in use again by then.
        """
        for file_id, records in list(self._unpurged.items()):
            tier = tier_of_kind(self._store.volumes.rows[file_id].kind)
            tier.free_records(self._store, file_id, records, self._catalog_and_index.mark)
            del self._unpurged[file_id]
