"""Reports that bookies miss entries, on their way to the metadata store (C13).

The driver adds reports and does not wait. One thread records them, each ledger's in order, and repeats a report that
fails after pauses that grow. A ledger whose report fails does not delay the reports of others. Before a writer changes
a ledger's metadata, it records the reports of that ledger. Reports are kept until they are recorded or the client
closes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Final

from pybk.errors import PybkError
from pybk.threads import Workers

if TYPE_CHECKING:
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.replication.messages import UnderReplicated

logger = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.1
_PAUSE_SECONDS_MAX: Final = 2.0
"""Seconds between two tries of reports that failed: at first and, after doubling, at most."""
_PAUSES_BEFORE_WRITE: Final = (0.1, 0.3)
"""Seconds between the tries before metadata are written; they bridge a short fault, because a recovery runs once."""


class Unrecorded:
    """The reports of one writer or recovery that are not recorded yet: which bookies miss which entries of its ledger.

    Args:
        ledger: The ledger.
    """

    def __init__(self, ledger: RemoteLedger) -> None:
        self.ledger: Final = ledger
        self._reports: Final[deque[UnderReplicated]] = deque()
        self._recording: Final = threading.Lock()
        """Held while reports are recorded, which keeps their order."""

    def __len__(self) -> int:
        """Return how many reports there are."""
        return len(self._reports)

    def add(self, report: UnderReplicated) -> None:
        """Add a report."""
        self._reports.append(report)

    def record(self, record: Callable[[RemoteLedger, UnderReplicated], None]) -> None:
        """Record all reports in order; if one fails, it and the later ones are kept, and the error is raised."""
        with self._recording:
            while self._reports:
                record(self.ledger, self._reports[0])
                self._reports.popleft()


class PendingReports:
    """Records in the metadata store which bookies miss entries, in a thread of its own.

    Args:
        record: Records one report in the metadata store; may take long.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: ``add`` one at a time, all else any.
    """

    def __init__(self, record: Callable[[RemoteLedger, UnderReplicated], None]) -> None:
        self._record: Final = record
        self.waiting: dict[Unrecorded, None] = {}
        """The ledgers with reports that are not recorded, in order."""
        self.news = threading.Event()
        """Set when there is a report to record."""
        self.closed = threading.Event()
        """Set by ``close``, which ends all pauses."""
        self.thread = Workers(1, "pybk-reports")
        """The thread that records."""

    def add(self, unrecorded: Unrecorded, report: UnderReplicated) -> None:
        """Add a report, and have the thread record it; does not wait."""
        unrecorded.add(report)
        self.waiting[unrecorded] = None
        self.news.set()
        self.thread.submit(self._record_waiting)

    def record_before_write(self, unrecorded: Unrecorded) -> None:
        """Record the reports of a ledger whose metadata are about to be written.

        A report that fails is repeated after short pauses, and at once after ``close``; the last error is raised.
        """
        for pause_s in _PAUSES_BEFORE_WRITE:
            try:
                return unrecorded.record(self._record)
            except PybkError:
                self.closed.wait(pause_s)
        return unrecorded.record(self._record)

    def _record_waiting(self) -> None:
        """Record until no report waits, or until the client is closed."""
        failing = set[Unrecorded]()
        pause_s = _PAUSE_SECONDS
        while self.waiting and not self.closed.is_set():
            self.news.clear()
            for unrecorded in list(self.waiting):
                self._try(unrecorded, failing)
            if self.waiting:
                pause_s = _PAUSE_SECONDS if self.news.wait(pause_s) else min(2 * pause_s, _PAUSE_SECONDS_MAX)

    def _try(self, unrecorded: Unrecorded, failing: set[Unrecorded]) -> None:
        """Record the reports of one ledger; the first failure in a row is logged."""
        try:
            unrecorded.record(self._record)
        except Exception as error:
            if unrecorded not in failing:
                ledger_id, trace = unrecorded.ledger.ledger_id, not isinstance(error, PybkError)
                logger.warning("ledger %d: what bookies miss is not recorded yet: %s", ledger_id, error, exc_info=trace)
            failing.add(unrecorded)
        else:
            failing.discard(unrecorded)
            del self.waiting[unrecorded]
            if unrecorded:  # one more was added since
                self.waiting[unrecorded] = None

    def close(self, timeout_s: float) -> None:
        """Try failed reports once more, and stop when all are recorded or the time is over; may be repeated.

        Args:
            timeout_s: Seconds to wait at most.
        """
        self.news.set()
        last = self.thread.submit(self._record_waiting)
        try:
            if last is not None:
                wait_for((last,), timeout_s)
            if self.waiting:
                logger.warning("of %d ledgers it may not be recorded what bookies miss", len(self.waiting))
        finally:
            self.closed.set()
            self.news.set()
            self.thread.close()
