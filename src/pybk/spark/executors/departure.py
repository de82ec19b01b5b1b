"""The drain of a bookie whose executor has ended, and its end when another executor takes the slot."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import Final

from pybk.bookie.server import BookieServer
from pybk.errors import IllegalOperationError, PybkError
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import BookieState
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.spark.executors.executor import forget, write_state

logger = logging.getLogger(__name__)


class Departure:
    """Empties a bookie while it lingers: its cluster copies the entries elsewhere, those with one copy as well.

    A file next to the slot says that the drain is the executor's end, and not a person's wish: the next bookie of the
    slot cancels it, and takes entries again.

    Args:
        manager: The manager of the bookie's process.
        bookie: The bookie.
        metadata: The metadata of the cluster.
        slot: The directory of the bookie.

    Threads: one thread calls; the drain begins in a thread of its own, because it may have to wait.
    """

    def __init__(self, manager: LedgerManager, bookie: BookieServer, metadata: ClusterMetadata, slot: str) -> None:
        self._admin: Final = ClusterAdmin(manager)
        self._bookie: Final = bookie
        self._metadata: Final = metadata
        self._mark: Final = f"{slot}.drains"

    def cancel(self) -> None:
        """End the drain that the last bookie of the slot began, if it did.

        Raises:
            PybkError: The metadata store cannot be reached.
        """
        if os.path.exists(self._mark):
            with suppress(IllegalOperationError):  # a person has put the bookie into maintenance since then
                self._admin.cancel_drain(self._bookie.bookie.bookie_id)
            forget(self._mark)

    def begin(self, wait_s: float) -> None:
        """Let writers leave, and begin the drain once the cluster allows it, within some seconds."""
        try:
            self._bookie.keeper.retire()
        except PybkError as error:
            logger.warning("%s is not registered as read-only yet: %s", self._bookie.bookie, error)
        threading.Thread(target=self._drain, args=(wait_s,), name="pybk-departure", daemon=True).start()

    def _drain(self, wait_s: float) -> None:
        write_state(self._mark, {})
        try:
            self._admin.drain(self._bookie.bookie.bookie_id, wait_s=wait_s)
        except (PybkError, OSError) as error:
            logger.warning("the entries of %s are not copied to other bookies: %s", self._bookie.bookie, error)

    @property
    def is_complete(self) -> bool:
        """True if the bookie has no entries any more that others need."""
        try:
            cookie = self._metadata.read_cookie(self._bookie.bookie.bookie_id)
        except PybkError:
            return False
        return cookie is not None and cookie.state is BookieState.DRAINED
