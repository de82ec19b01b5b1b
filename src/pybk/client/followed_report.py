"""The auditor's report as a client follows it; thanks to it, ``health`` of a client costs no request."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from pybk.errors import CorruptError, MetadataError, MetadataUnreachableError
from pybk.health import HealthReason, SeenReport

if TYPE_CHECKING:
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metadata.store import Watch

logger = logging.getLogger(__name__)


class FollowedReport:
    """Follows the auditor's report from the first call of ``now`` on.

    Args:
        metadata: The cluster's metadata.

    Threads: any; the metadata store calls ``_read`` in its own.
    """

    def __init__(self, metadata: ClusterMetadata) -> None:
        self._metadata = metadata
        self._lock = threading.Lock()
        """Guards the beginning and the end."""
        self._watches: list[Watch] | None = None
        self._closed = False
        self._seen: tuple[dict[str, Any] | None, float, HealthReason | None] = None, 0.0, None
        """The report, when it changed last by the monotonic clock, and why it cannot be read; replaced as a whole."""

    def now(self) -> SeenReport:
        """Return the report as it was last read.

        Cost: The first call reads it and watches it. From then on a thread of the metadata store reads it after each
        change, which is every ten seconds, and a call costs nothing.
        """
        with self._lock:
            if self._watches is None and not self._closed:
                self._begin()
        report, changed_at, trouble = self._seen
        return SeenReport(report, time.monotonic() - changed_at, trouble)

    def _begin(self) -> None:
        """Watch and read the report; if that fails, the next call tries again."""
        watches: list[Watch] = []
        try:
            watches.append(self._metadata.watch_auditor_report(self._read))
            watches.append(self._metadata.on_session_end(self._session_ended))
            self._read()
        except MetadataError as error:
            for watch in watches:
                watch.cancel()
            self._seen = None, time.monotonic(), _unreachable(error)
            return
        self._watches = watches

    def _session_ended(self) -> None:
        """Note that the session ended, until the store answers; called again while it does not."""
        report, changed_at, _ = self._seen
        self._seen = report, changed_at, _unreachable("the session with it has ended")
        self._read()

    def _read(self) -> None:
        """Read the report."""
        before, changed_at, _ = self._seen
        try:
            report = self._metadata.read_auditor_report()
        except MetadataUnreachableError as error:
            self._seen = before, changed_at, _unreachable(error)
            raise
        except (CorruptError, MetadataError) as error:
            logger.warning("the auditor's report cannot be used: %s", error)
            text = f"the auditor's report cannot be used: {error}"
            self._seen = None, time.monotonic(), HealthReason("report_unreadable", text)
            return
        self._seen = report, time.monotonic() if report != before else changed_at, None

    def close(self) -> None:
        """Stop following it; may be repeated."""
        with self._lock:
            self._closed = True
            for watch in self._watches or ():
                watch.cancel()


def _unreachable(why: object) -> HealthReason:
    return HealthReason("metadata_unreachable", f"the metadata store does not answer: {why}")
