"""The auditor's saved state and report as JSON values, for the metadata store and for people."""

from __future__ import annotations

from typing import Any

from pybk.healing.auditor import Judged, Report, SavedAbsence, SavedState
from pybk.healing.situation import MarkKey
from pybk.ledger.ledger_metadata import Bookie
from pybk.values import from_base64, to_base64


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


def _encode_bookie(bookie: Bookie) -> dict[str, str]:
    return {"bookie_id": bookie.bookie_id, "instance": to_base64(bookie.instance)}


def _decode_bookie(values: dict[str, Any]) -> Bookie:
    return Bookie(str(values["bookie_id"]), from_base64(values["instance"]))
