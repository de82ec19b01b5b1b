"""The thread that has a bookie look for surplus copies, and drop them while the cluster is quiet."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from pybk.client.surplus_drop import SurplusDrops
from pybk.errors import PybkError
from pybk.threads.workers import start_thread

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership

logger = logging.getLogger(__name__)

LOOK_S: Final = 10.0
"""Seconds between two looks at the settings, and the least pause between two pages."""


class SurplusDropping:
    """Drops surplus copies in the background, from its creation until ``stop``.

    Nothing is dropped while there is no auditor, while it holds repairs, or while repairs are paused: each of these
    says that what the metadata name may not be what there is.

    Args:
        driver: Runs the drops.
        membership: The cluster's metadata.
        bookie: The bookie of this process.

    Attributes:
        drops: What was found and dropped.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: its own; ``stop`` any.
    """

    def __init__(self, driver: Driver, membership: Membership, bookie: BookieServer) -> None:
        self._metadata = membership.metadata
        self.drops: Final = SurplusDrops(driver, membership, bookie)
        self._bookie = bookie
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-surplus", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopping.wait(LOOK_S):
            try:
                self.drops.delay_s = self._metadata.settings.repair.surplus_delay_s
                if time.monotonic() >= looked + self.drops.pause_s and self._metadata.is_quiet(time.time_ns()):
                    looked = time.monotonic()
                    self.drops.look()
                    if self.drops.passed:
                        self._metadata.record_orphans(self._bookie.bookie, self.drops.orphans)
            except PybkError as error:
                logger.warning("no surplus copies are dropped now: %s", error)
            except Exception:  # this thread must survive, or copies would fill up the disks
                logger.exception("no surplus copies are dropped now")

    def begin_stop(self) -> None:
        """Begin nothing more; returns at once."""
        self._stopping.set()
        self.drops.stopping.set()

    def stop(self) -> None:
        """Stop; returns when the drop under way has ended."""
        self.begin_stop()
        self._thread.join()
