"""Checks of free space before a job writes, because a job that runs out of space midway has written without result."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

from pybk.deferral import np
from pybk.errors import StorageFullError
from pybk.flags import StorageHint
from pybk.storage.format.record import LOCATION_BYTES, RECORD_HEADER_BYTES, RunLocations
from pybk.storage.tiers.registry import tier_for

if TYPE_CHECKING:
    from pybk.storage.compaction.live_store import LiveStore

_SPARE_SHARE: Final = 4
"""This part of the free space is left when records are packed, because the index and the log need space, too."""
_INDEX_SPARE_BYTES: Final = 512 << 10
CHANGES_WHEN_FULL_BYTES: Final = 512 << 10
"""Changes of catalog and index for which space is allocated in advance, besides those that the next checkpoint has."""

INDEX_ROW_BYTES: Final = 1 << 10
"""What a ledger's row takes in the index at most, as far as space is estimated."""


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


def index_change_bytes(ledgers: int, runs: int, named_bytes: int) -> int:
    """Return the bytes that a checkpoint changes in the index at most.

    Args:
        ledgers: How many ledgers changed or were deleted.
        runs: How many runs of entries were appended to them.
        named_bytes: Bytes of the named records that changed.
    """
    return ledgers * INDEX_ROW_BYTES + runs * LOCATION_BYTES + named_bytes


def index_space(nbytes: int) -> int:
    """Return the space that a change of so many bytes of the index may take."""
    return 2 * nbytes + _INDEX_SPARE_BYTES  # pages are not full, and are copied before they are changed


def record_bytes(runs: RunLocations) -> int:
    """Return the bytes of the records of some runs, headers included."""
    return int(runs["body"].astype(np.int64).sum()) + RECORD_HEADER_BYTES * len(runs)
