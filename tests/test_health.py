"""The rules of health: which reasons follow from what is known, and which state from the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pybk.healing.situation import HoldReason, Status
from pybk.health import (
    HEALTH_STATES,
    REASON_STATES,
    ClusterSight,
    Health,
    HealthReason,
    SeenReport,
    client_health,
    repair_reasons,
)
from pybk.storage.io.failures import CHECKING
from tests.internals import store_of
from tests.paths import ROOT
from tests.storage.real_store import open_quick

NOW = 10**18
QUIET: dict[str, Any] = {"auditor": "b0", "phase": "leading", "holds": [], "short": {}, "bookies": []}
"""The report of an auditor that has found nothing wrong."""

UNREACHABLE = HealthReason("metadata_unreachable", "it does not answer")


def sight(writable: int = 5, report: dict[str, Any] | None = QUIET, **changed: Any) -> ClusterSight:
    names = frozenset(f"b{number}" for number in range(writable))
    values = {"where": "lmdb:///m", "bookies": writable, "writable": names, "seen": SeenReport(report), **changed}
    return ClusterSight(**values)


def codes(health: Health) -> list[str]:
    return [reason.code for reason in health.reasons]


def test_the_worst_reason_decides() -> None:
    assert Health.of([]).state == "ok"
    assert (Health.of([]).reason, Health.of([]).reasons) == ("", ())
    for worse, state in enumerate(HEALTH_STATES[1:], 1):
        reasons = [HealthReason(code, code) for code, of in REASON_STATES.items() if of in HEALTH_STATES[: worse + 1]]
        health = Health.of(reasons)
        assert (health.state, REASON_STATES[health.reason]) == (state, state)
        assert sorted(health.reasons) == sorted(reasons)


def test_a_client_of_a_whole_cluster_is_ok() -> None:
    assert client_health(sight(), 7, NOW) == Health("ok", "", 7, 0, {})


@pytest.mark.parametrize(
    ("seen", "state", "code"),
    [
        (sight(0), "failed", "no_bookie"),
        (sight(1), "failed", "too_few_bookies"),
        (sight(2), "failed", "too_few_bookies"),  # the default ensemble has three
        (sight(2, away=frozenset({"b2"})), "degraded", "few_bookies"),
        (sight(1, away=frozenset({"b1", "b2"})), "failed", "too_few_bookies"),
        (sight(2, {**QUIET, "bookies": [{"bookie_id": "b2", "status": "draining"}]}), "failed", "too_few_bookies"),
        (sight(2, {**QUIET, "ensembles": [1, 3]}), "degraded", "few_bookies"),
        (sight(5, {**QUIET, "bookies": [{"bookie_id": "b4", "status": "read_only", "absent_ns": 0}]}), "degraded", ""),
        (sight(5, None), "degraded", "no_auditor"),
        (sight(5, seen=SeenReport(QUIET, 61.0)), "degraded", "auditor_silent"),
        (sight(5, seen=SeenReport(QUIET, 0.0, UNREACHABLE)), "degraded", "metadata_unreachable"),
        (sight(5, {**QUIET, "phase": "reading"}), "degraded", "auditor_reading"),
        (sight(5, paused_until_ns=NOW + 1), "degraded", "repairs_paused"),
        (sight(5, {**QUIET, "lost": [3]}), "degraded", "entries_lost"),
        (sight(5, {**QUIET, "short": {"0": 1}}), "degraded", "no_live_copy"),
        (sight(5, {**QUIET, "short": {"1": 1}}), "degraded", "one_copy_left"),
        (sight(5, {**QUIET, "short": {"2": 1}}), "degraded", "under_replicated"),
        (sight(5, {**QUIET, "short": {"more": 1}}), "degraded", "under_replicated"),
        (sight(5, {**QUIET, "misplaced": 2}), "degraded", "misplaced"),
        (sight(5, {**QUIET, "waiting": [3]}), "degraded", "waiting_for_owner"),
        (sight(5, {**QUIET, "no_target": [3]}), "degraded", "no_target"),
        (sight(5, {**QUIET, "stuck": [3]}), "degraded", "repair_stuck"),
    ],
)
def test_what_a_client_sees_of_its_cluster(seen: ClusterSight, state: str, code: str) -> None:
    health = client_health(seen, 0, NOW)
    assert health.state == state
    assert codes(health) == [code or "bookies_read_only"]


def test_bookies_that_the_auditor_waits_for_may_be_members_of_new_ledgers() -> None:
    report = {**QUIET, "bookies": [{"bookie_id": "b2", "status": "lost", "absent_ns": 9}]}
    health = client_health(sight(2, report), 0, NOW)
    assert (health.state, codes(health)) == ("degraded", ["few_bookies", "bookies_lost"])
    assert "under-replicated from their first entry on, because members are away or read-only (b2)" in health.reason
    assert health.reason == health.reasons[0].text


@pytest.mark.parametrize("known", [frozenset({"b2"}), frozenset()], ids=["by its registration", "by the report"])
def test_a_read_only_bookie_may_be_a_member_of_new_ledgers(known: frozenset[str]) -> None:
    report = {**QUIET, "bookies": [{"bookie_id": "b2", "status": "read_only", "absent_ns": 0}]}
    health = client_health(sight(2 if known else 3, report, away=known), 0, NOW)
    assert (health.state, codes(health)) == ("degraded", ["few_bookies", "bookies_read_only"])
    assert "because members are away or read-only (b2)" in health.reason


def test_a_cluster_without_a_spare_bookie_is_ok_as_long_as_none_is_missing() -> None:
    for seen in (sight(3), sight(5, ensembles=(5,))):
        health = client_health(seen, 0, NOW)
        assert (health.state, health.reason, codes(health)) == ("ok", "", ["no_spare_bookie"])
    absent = {**QUIET, "bookies": [{"bookie_id": "b3", "status": "absent", "absent_ns": 0}]}
    health = client_health(sight(3, absent), 0, NOW)
    assert (health.state, codes(health)) == ("degraded", ["bookies_absent", "no_spare_bookie"])
    assert health.reason == health.reasons[0].text


def test_a_bookie_that_refuses_entries_is_no_spare_one() -> None:
    draining = {**QUIET, "bookies": [{"bookie_id": "b0", "status": "draining", "absent_ns": 0}]}
    assert codes(client_health(sight(4, draining), 0, NOW)) == ["no_spare_bookie"]
    assert codes(client_health(sight(5, draining), 0, NOW)) == []  # it was asked for
    maintenance = {**QUIET, "bookies": [{"bookie_id": "b0", "status": "maintenance", "absent_ns": 0}]}
    assert codes(client_health(sight(4, maintenance), 0, NOW)) == []


def test_a_drain_that_has_not_ended_is_a_note_with_its_age() -> None:
    drain = {"bookie_id": "b0", "since_ns": NOW - 12 * 60 * 10**9, "ledgers": 7, "writers": [4, 9]}
    report = {**QUIET, "reported_ns": NOW, "drains": [drain]}
    health = client_health(sight(5, report), 0, NOW)
    assert (health.state, codes(health)) == ("ok", ["drain_waits"])
    text = health.reasons[0].text
    assert text.startswith("the drain of bookie b0 began 12 min ago: ledgers left 7; ")
    assert text.endswith("open ledgers whose writers have not left it: 4, 9")


def test_each_hold_and_status_has_its_code() -> None:
    holds = [{"reason": reason.value, "text": "text"} for reason in HoldReason]
    found = list(repair_reasons({**QUIET, "holds": holds}))
    assert [reason.code for reason in found] == [f"hold_{reason.value}" for reason in HoldReason]
    assert all(reason.code in REASON_STATES for reason in found)
    newer = next(repair_reasons({**QUIET, "holds": [{"reason": "that of a newer auditor", "text": "text"}]}))
    assert newer.code == "hold_other"
    asked = (Status.LIVE, Status.MAINTENANCE, Status.DRAINING, Status.REMOVED)
    for status in set(Status).difference(asked):
        bookies = [{"bookie_id": "b1", "status": status.value, "absent_ns": 0}]
        (reason,) = repair_reasons({**QUIET, "bookies": bookies})
        assert reason.code == f"bookies_{status.value}"
        assert reason.code in REASON_STATES
        assert "b1" in reason.text


def test_the_document_lists_all_codes() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    for state in HEALTH_STATES:
        listed = ", ".join(f"`{code}`" for code, of in REASON_STATES.items() if of == state)
        assert f"| `{state}` | {listed} |" in text


def test_damage_that_a_scrub_has_found_has_a_code_until_it_is_mended(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        assert manager.health().state == "ok"
        troubles = store_of(manager).troubles
        troubles.note(CHECKING, "1 damaged record in ledger 3")
        troubles.note("checkpoint", "no space")
        health = manager.health()
        assert (health.state, codes(health)) == ("degraded", ["damaged_records", "trouble"])
        assert "1 damaged record in ledger 3" in health.reason
        troubles.clear(CHECKING)
        assert codes(manager.health()) == ["trouble"]
