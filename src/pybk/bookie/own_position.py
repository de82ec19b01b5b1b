"""The durable end of a bookie's log, recorded outside the bookie's directory, and the check of it at a start.

A thread for which no append waits writes the record, at most once a second and only if the log moved, and at close. It
shows a directory that was put back to an older state in two ways: the log ends before the recorded position, or the
files ``watermark`` and newest log are not the files that were recorded. Either way the bookie may lack entries that it
acknowledged, so it starts with all its ledgers in limbo. One case is not recognised: a state that is younger than the
last record and was put back with its inodes, as by a snapshot of the block device. It can be at most a second old, or
as old as the time for which the metadata store could not be reached.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pybk.errors import PybkError
from pybk.metadata.durable_positions import DurablePosition
from pybk.storage.tiers import LOG

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.storage.store import Store

logger = logging.getLogger(__name__)


def find_losses(store: Store, metadata: ClusterMetadata, bookie: Bookie, *, moved: bool) -> list[str]:
    """Return the evidence that a bookie's directory may lack durable entries; empty without any.

    Call it before the bookie appends anything to its log, because an append could hide a log that ends too early.

    Args:
        store: The bookie's store, as it was opened.
        metadata: The cluster's metadata.
        bookie: The bookie that the directory is of.
        moved: Whether the directory was moved without loss; its files may have other inodes then.
    """
    recorded = metadata.read_position(bookie.bookie_id)
    if recorded is None or recorded.bookie != bookie:
        return []
    root = store.volumes.root
    losses = []
    if store.log.durable_lsn < recorded.lsn:
        losses.append(
            f"the log in {root} ends at LSN {store.log.durable_lsn}, but it was durable up to LSN {recorded.lsn} in "
            f"start {recorded.boots}: the directory was put back to an older state"
        )
    if not moved and _watermark_inode(store) not in (0, recorded.watermark_inode):
        losses.append(f"{os.path.join(root, 'watermark')} is not the file that was used last, but a copy")
    if not moved and _log_inode(store, recorded.log_file_id) not in (0, recorded.log_inode):
        losses.append(f"log file {recorded.log_file_id} in {root} is not the file that was used last, but a copy")
    return losses


class PositionRecorder:
    """Records the durable position of one bookie. Threads: one at a time.

    Args:
        store: The bookie's store.
        metadata: The cluster's metadata.
        bookie: The bookie.
        boots: The number of this start, as in ``DirectoryIdentity``.
    """

    def __init__(self, store: Store, metadata: ClusterMetadata, bookie: Bookie, boots: int) -> None:
        self._store = store
        self._metadata = metadata
        self._bookie = bookie
        self._boots = boots
        self._recorded: int | None = None
        """The LSN recorded last by this start; None before the first record."""

    def record(self) -> bool:
        """Record the position if it moved since the last record; an unreachable metadata store is logged.

        Returns:
            False if it has not moved.

        Durability: The record is durable on return, unless a warning was logged.
        """
        if self._store.log.durable_lsn == self._recorded:
            return False
        try:
            position = self._position()
            self._metadata.record_position(position)
        except (PybkError, OSError) as error:
            logger.warning(
                "bookie %s: its durable position was not recorded, the next record is tried later: %s",
                self._bookie,
                error,
            )
        else:
            self._recorded = position.lsn
        return True

    def _position(self) -> DurablePosition:
        """Return where the log durably ends now, and in which files."""
        store = self._store
        lsn = store.log.durable_lsn
        log_file_id = max((row.file_id for row in list(store.volumes.rows.values()) if row.kind == LOG), default=0)
        log_inode = _log_inode(store, log_file_id)
        return DurablePosition(self._bookie, self._boots, lsn, _watermark_inode(store), log_file_id, log_inode)


def _watermark_inode(store: Store) -> int:
    """Return the inode of the watermark; 0 if it was lost, because a salvage then puts all ledgers in limbo."""
    return _inode(store, os.path.join(store.volumes.root, "watermark"))


def _log_inode(store: Store, file_id: int) -> int:
    """Return the inode of a log file; 0 if the store has no such file, because it was compacted or lost."""
    row = store.volumes.rows.get(file_id)
    return 0 if row is None or row.kind != LOG else _inode(store, store.volumes.path_of(row))


def _inode(store: Store, path: str) -> int:
    try:
        return store.fs.inode_number(path)
    except FileNotFoundError:
        return 0
