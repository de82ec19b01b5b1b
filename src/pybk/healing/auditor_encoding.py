"""The auditor's saved state and report as JSON values, for the metadata store and for people, and as gauges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pybk.healing.auditor import Judged, Report, SavedAbsence, SavedState
from pybk.healing.plan import LEFT_TO_WRITER, WITHIN_GRACE
from pybk.healing.situation import HoldReason, MarkKey, Status
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.underreplication import RepairReason
from pybk.metrics import Gauge, MetricKey
from pybk.values import from_base64, to_base64

SHORT_REASONS: Final = (*(reason.value for reason in RepairReason), WITHIN_GRACE, LEFT_TO_WRITER)
COPIES: Final = ("0", "1", "2", "more")


def encode_state(state: SavedState) -> dict[str, Any]:
    """Return what the next auditor needs."""
    return {
        "absences": [
            {
                **_encode_bookie(bookie),
                "boots": saved.boots,
                "absent_ns": saved.absent_ns,
                "absences_ns": list(saved.absences_ns),
            }
            for bookie, saved in state.absences.items()
        ],
        "since_read_ns": state.since_read_ns,
        "judged": [
            {
                "ledger_id": key.ledger_id,
                **_encode_bookie(key.bookie),
                "token": to_base64(judged.token),
                "signature": judged.signature,
            }
            for key, judged in state.judged.items()
        ],
    }


def decode_state(values: dict[str, Any] | None) -> SavedState:
    """Return what the previous auditor has left; raises ValueError, KeyError or TypeError if it is damaged."""
    if values is None:
        return SavedState()
    absences = {
        _decode_bookie(each): SavedAbsence(
            int(each["boots"]),
            None if each["absent_ns"] is None else int(each["absent_ns"]),
            tuple(int(absence) for absence in each["absences_ns"]),
        )
        for each in values["absences"]
    }
    judged = {
        MarkKey(int(each["ledger_id"]), _decode_bookie(each)): Judged(
            from_base64(each["token"]), int(each["signature"])
        )
        for each in values["judged"]
    }
    return SavedState(absences, int(values["since_read_ns"]), judged)


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


def _encode_bookie(bookie: Bookie) -> dict[str, str]:
    return {"bookie_id": bookie.bookie_id, "instance": to_base64(bookie.instance)}


def _decode_bookie(values: dict[str, Any]) -> Bookie:
    return Bookie(str(values["bookie_id"]), from_base64(values["instance"]))
