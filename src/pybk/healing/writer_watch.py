"""The thread of the auditor's process that looks for signs of life of the writers of open ledgers (H12).

Only ledgers are asked about that are open and have places short, which are few. Their metadata are read in pages. The
bookies of the last fragment say whether the writer has a session there (``find_writer``), and the machine counts that
as a sign of life. Ledgers that already wait for their owner are asked about, too, because a writer may come back.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from pybk.client.broadcast import find_writer
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import ClosedError, PybkError
from pybk.threads.workers import start_thread

if TYPE_CHECKING:
    from pybk.client.backend import ClusterBackend
    from pybk.healing.auditing import Auditing
    from pybk.metadata.ledgers import StoredLedger

logger = logging.getLogger(__name__)

LOOK_MIN_S: Final = 1.0
LOOK_MAX_S: Final = 60.0
"""Bounds on the seconds between two looks, which are a tenth of ``repair.open_grace_s``."""

PAUSE_S: Final = 0.02
"""Seconds between two ledgers, so that bookies are asked about fifty per second at most."""

_PAGE: Final = 500


class WriterWatch:
    """Looks for signs of life of writers while this process leads, from its creation until ``stop``.

    Args:
        backend: The client of this process.
        auditing: The candidate for auditor, which takes what is found.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: its own; ``stop`` any.
    """

    def __init__(self, backend: ClusterBackend, auditing: Auditing) -> None:
        self._backend = backend
        self._metadata = backend.membership.metadata
        self._auditing = auditing
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-writer-watch", daemon=True)
        start_thread(self._thread)

    def _run(self) -> None:
        looked_at = float("-inf")
        while not self._stopping.wait(LOOK_MIN_S):
            try:
                pause_s = min(LOOK_MAX_S, self._metadata.settings.repair.open_grace_s / 10)
                if self._auditing.leads and time.monotonic() >= looked_at + pause_s:
                    looked_at = time.monotonic()
                    self._look()
            except ClosedError:
                return
            except PybkError as error:
                logger.warning("signs of life of writers are not looked for now: %s", error)
            except Exception:  # this thread must survive, or live writers would be taken to be gone
                logger.exception("signs of life of writers are not looked for now")

    def _look(self) -> None:
        """Ask about all open ledgers that have places short, and report each writer that lives."""
        ledger_ids = self._auditing.short_ledgers()
        for at in range(0, len(ledger_ids), _PAGE):
            page = ledger_ids[at : at + _PAGE]
            for stored in self._metadata.read_ledgers(page, damaged=_skipped):
                if self._stopping.wait(PAUSE_S) or not self._auditing.leads:
                    return
                if stored is not None and self._lives(stored):
                    self._auditing.report_writer(stored.metadata.ledger_id)

    def _lives(self, stored: StoredLedger) -> bool:
        """Return whether a bookie says that the writer lives; what is unknown is no sign of life."""
        ledger = RemoteLedger(stored.metadata, stored.version, self._metadata.describe(stored.metadata))
        return find_writer(self._backend.driver, ledger, self._backend.membership.find) is True

    def begin_stop(self) -> None:
        """Ask about no further ledger; returns at once."""
        self._stopping.set()

    def stop(self) -> None:
        """Stop; returns when the thread has ended."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()


def _skipped(ledger_id: int, error: PybkError) -> None:
    logger.warning("the writer of ledger %d is not asked for, as its metadata cannot be read: %s", ledger_id, error)
