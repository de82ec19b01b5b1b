"""The progress of repairs, which the auditor reports as a JSON value in the metadata store, and as gauges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pybk.healing.plan import LEFT_TO_WRITER, WITHIN_GRACE, Counts
from pybk.healing.situation import Hold, HoldReason, Status
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.underreplication import RepairReason
from pybk.metrics import Gauge, MetricKey

LISTED_MAX: Final = 100
"""The most ledgers that a report names in each list."""

SHORT_REASONS: Final = (*(reason.value for reason in RepairReason), WITHIN_GRACE, LEFT_TO_WRITER)
COPIES: Final = ("0", "1", "2", "more")


class ReportedBookie(NamedTuple):
    """A bookie in a report: its name, its status, and the duration of its absence, in nanoseconds."""

    bookie: Bookie
    status: str
    absent_ns: int


class ReportedDrain(NamedTuple):
    """A drain that has not ended, in a report.

    Attributes:
        bookie: The bookie that is drained.
        since_ns: The time when the drain began.
        ledgers: The number of ledgers that name it still.
        writers: Open ledgers whose writers have not left it, at most ``LISTED_MAX``.
    """

    bookie: Bookie
    since_ns: int
    ledgers: int
    writers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The progress of repairs; repairs that can wait, such as moves of a rebalance, wait while there are ``holds``.

    Attributes:
        phase: ``following``, ``reading`` or ``leading``.
        holds: The reasons why only urgent repairs are made.
        paused_until_ns: The time when a pause by a person ends; 0 without one.
        frozen: Whether no mark is changed, because it is unknown which bookies are registered.
        counts: The ledgers that are not whole.
        planned_bytes: The bytes, about, that had to be copied since the cluster was whole last.
        done_bytes: The bytes that were copied since then.
        done_ledgers: The number of tasks that were done.
        rate: Bytes per second, over the last ten minutes.
        eta_s: Seconds until repairs will be done; None if nothing was copied recently.
        lost: Ledgers with entries that are lost, at most ``LISTED_MAX``.
        waiting: Ledgers that wait for their owner.
        no_target: Ledgers without a target, among those that were examined.
        stuck: Ledgers whose repair failed repeatedly.
        bookies: The bookies that are not live.
        drains: The drains that have not ended.
        read_ns: The time when all ledgers were read last; 0 for never.
        members: The number of bookies with each status.
        ensembles: The smallest and the largest ensemble of a ledger that is not closed; 0 and 0 if all are closed.
        ledgers: The numbers of ledgers, by whether they are closed, and by type (``ClusterMap.counts``).
    """

    phase: str
    holds: tuple[Hold, ...]
    paused_until_ns: int
    frozen: bool
    counts: Counts
    planned_bytes: int
    done_bytes: int
    done_ledgers: int
    rate: float
    eta_s: float | None
    lost: tuple[int, ...]
    waiting: tuple[int, ...]
    no_target: tuple[int, ...]
    stuck: tuple[int, ...]
    bookies: tuple[ReportedBookie, ...]
    drains: tuple[ReportedDrain, ...]
    read_ns: int
    members: Mapping[str, int]
    ensembles: tuple[int, int]
    ledgers: Mapping[tuple[bool, str], int]


def encode_report(report: Report, auditor: str, now_ns: int) -> dict[str, Any]:
    """Return a report.

    Args:
        report: The report.
        auditor: The name of the auditor's bookie.
        now_ns: The time, nanoseconds since 1970.
    """
    counts = report.counts
    return {
        "auditor": auditor,
        "reported_ns": now_ns,
        "phase": report.phase,
        "holds": [{"reason": hold.reason.value, "text": hold.text} for hold in report.holds],
        "paused_until_ns": report.paused_until_ns,
        "frozen": report.frozen,
        "short": dict(counts.short),
        "reasons": {reason.value: count for reason, count in counts.reasons.items()},
        "states": {state.value: count for state, count in counts.states.items()},
        "queued_bytes": counts.bytes,
        "lost_ledgers": counts.lost,
        "left_to_writer": counts.left_to_writer,
        "misplaced": counts.misplaced,
        "oldest_since_ns": counts.oldest_since_ns,
        "planned_bytes": report.planned_bytes,
        "done_bytes": report.done_bytes,
        "done_ledgers": report.done_ledgers,
        "rate": report.rate,
        "eta_s": report.eta_s,
        "lost": list(report.lost),
        "waiting": list(report.waiting),
        "no_target": list(report.no_target),
        "stuck": list(report.stuck),
        "bookies": [
            {"bookie_id": each.bookie.bookie_id, "status": each.status, "absent_ns": each.absent_ns}
            for each in report.bookies
        ],
        "drains": [
            {
                "bookie_id": each.bookie.bookie_id,
                "since_ns": each.since_ns,
                "ledgers": each.ledgers,
                "writers": list(each.writers),
            }
            for each in report.drains
        ],
        "read_ns": report.read_ns,
        "members": dict(report.members),
        "ensembles": list(report.ensembles),
    }


def report_gauges(report: Report, reported_ns: int) -> Iterator[Gauge]:
    """Yield the gauges of a report.

    Args:
        report: The report.
        reported_ns: The time when it was made, nanoseconds since 1970.
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
