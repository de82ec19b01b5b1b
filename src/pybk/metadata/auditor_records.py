"""The records of a cluster's auditor in the metadata store: its state for the next auditor, and a report for people.

Both are JSON that the auditor makes. The *report* is leased: it disappears with the auditor, because a reader must not
take an old report for the present state. The *state* stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pybk.metadata.authenticated_values import AuthenticatedValues, ValueKind
from pybk.metadata.store import Watch

AUDITOR_KEY: Final = "auditor"
REPORT_KEY: Final = "auditor-report"


class AuditorRecords(AuthenticatedValues):
    """The records of a cluster's auditor. Threads: any.

    Every method may raise MetadataUnreachableError; reading may also raise CorruptError, MetadataForgedError and
    UnsupportedFormatError.
    """

    def read_auditor_state(self) -> dict[str, Any] | None:
        """Return the state that the last auditor left; None if no auditor did."""
        return self.read_document(ValueKind.AUDITOR, AUDITOR_KEY)

    def write_auditor_state(self, values: Mapping[str, Any]) -> None:
        """Replace the state for the next auditor, durably; if two auditors run at once, the later write counts."""
        self.write_document(ValueKind.AUDITOR, AUDITOR_KEY, values, leased=False)

    def read_auditor_report(self) -> dict[str, Any] | None:
        """Return the auditor's last report; None if no auditor runs, or it has not reported yet."""
        return self.read_document(ValueKind.AUDITOR_REPORT, REPORT_KEY)

    def is_quiet(self, now_ns: int) -> bool:
        """Return whether an auditor leads, and neither holds repairs nor has a person paused them.

        At other times the metadata may not match the bookies, so work that can wait is not done.

        Args:
            now_ns: The time, nanoseconds since 1970.

        Cost: One read.
        """
        report = self.read_auditor_report()
        return report is not None and not report["holds"] and report["paused_until_ns"] <= now_ns

    def watch_auditor_report(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after each change of the report, as ``MetadataStore.watch`` does."""
        return self._store.watch(REPORT_KEY, callback)

    def write_auditor_report(self, values: Mapping[str, Any]) -> None:
        """Replace the auditor's report; it disappears with the session of the process that made it."""
        self.write_document(ValueKind.AUDITOR_REPORT, REPORT_KEY, values, leased=True)

    def watch_below(self, key: str, callback: Callable[[frozenset[str] | None], None]) -> Watch:
        """Call ``callback`` with the changed keys below a key, as ``MetadataStore.watch_below`` does."""
        return self._store.watch_below(key, callback)

    def on_session_end(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` when a session with the store has ended, as ``MetadataStore.on_session_end`` does."""
        return self._store.on_session_end(callback)
