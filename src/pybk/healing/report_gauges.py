"""What an auditor reports, as gauges; only the process that leads has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pybk.healing.plan import LEFT_TO_WRITER, WITHIN_GRACE
from pybk.healing.situation import HoldReason, Status
from pybk.metadata.underreplication import RepairReason
from pybk.metrics import Gauge, MetricKey

if TYPE_CHECKING:
    from pybk.healing.auditor import Report

SHORT_REASONS: Final = (*(reason.value for reason in RepairReason), WITHIN_GRACE, LEFT_TO_WRITER)
COPIES: Final = ("0", "1", "2", "more")


def report_gauges(report: Report, reported_ns: int) -> Iterator[Gauge]:
    """Yield the gauges of a report.

    Args:
        report: The report.
        reported_ns: When it was made, nanoseconds since 1970.
    """
    yield MetricKey("auditor_pass_timestamp_ns", labels=(("check", "bookies"),)), reported_ns
    yield MetricKey("auditor_pass_timestamp_ns", labels=(("check", "ledgers"),)), report.read_ns
    yield MetricKey("repair_paused_until_timestamp_ns"), report.paused_until_ns
    held = {hold.reason for hold in report.holds}
    for reason in HoldReason:
        yield MetricKey("repair_hold", labels=(("reason", reason.value),)), reason in held
    for status in Status:
        yield MetricKey("members", labels=(("state", status.value),)), report.members.get(status.value, 0)
    yield MetricKey("largest_ensemble"), report.ensembles[1]
    yield from _shortages(report)
    counts = report.counts
    yield MetricKey("ledgers_lost"), counts.lost
    yield MetricKey("ledgers_waiting_for_owner"), len(report.waiting)
    yield MetricKey("ledgers_without_target"), len(report.no_target)
    yield MetricKey("ledgers_stuck"), len(report.stuck)
    yield MetricKey("misplaced_ledgers"), counts.misplaced
    yield MetricKey("repair_planned_bytes"), report.planned_bytes
    yield MetricKey("repair_done_bytes"), report.done_bytes
    for (closed, ledger_type), count in report.ledgers.items():
        yield MetricKey("ledgers", ledger_type, labels=(("state", "closed" if closed else "open"),)), count


def _shortages(report: Report) -> Iterator[Gauge]:
    for reason in SHORT_REASONS:
        for copies in COPIES:
            labels = (("reason", reason), ("copies", copies))
            found = report.counts.shortages.get((reason, copies))
            yield MetricKey("under_replicated_ledgers", labels=labels), found.ledgers if found else 0
            yield MetricKey("under_replicated_bytes", labels=labels), found.bytes if found else 0
            if found and found.oldest_since_ns:
                yield MetricKey("under_replicated_oldest_timestamp_ns", labels=labels), found.oldest_since_ns
