"""The schedule of checks: what is due when, how fast, and what survives a restart."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from pybk.healing.scrub import status_of_quick
from pybk.healing.scrub_schedule import PARTS, RATE_MIN, ScrubKind, ScrubSchedule, part_of, rate_of

DAY_NS = 86_400 * 10**9
PERIOD_S = 30 * 86_400.0
PERIOD_NS = 30 * DAY_NS
BEGAN = 1_700_000_000 * 10**9


def check_due(schedule: ScrubSchedule, now_ns: int, period_s: float = PERIOD_S) -> list[int]:
    """Check all parts that are due, and return them in that order."""
    order = []
    while due := schedule.due(period_s, now_ns):
        schedule.begin(due[0], now_ns)
        schedule.finish()
        order.append(due[0])
    return order


def test_ledgers_are_spread_over_the_parts() -> None:
    for step in (1, 16, 64, 1 << 20):  # ids that an application chose, too
        found = Counter(part_of(number * step) for number in range(16_000))
        assert set(found) == set(range(PARTS))
        assert max(found.values()) < 2 * 1000


def test_each_part_is_checked_once_a_period_and_at_its_own_time() -> None:
    schedule = ScrubSchedule(BEGAN)
    checks: Counter[int] = Counter()
    most = 0
    for hour in range(3 * 30 * 24):
        order = check_due(schedule, BEGAN + hour * 3600 * 10**9)
        checks.update(order)
        most = max(most, len(order))
    assert set(checks.values()) == {3}
    assert most == 1
    assert schedule.oldest_ns > BEGAN + 2 * PERIOD_NS - DAY_NS


def test_what_is_overdue_runs_the_oldest_first() -> None:
    schedule = ScrubSchedule(BEGAN)
    for part in range(PARTS):
        schedule.begin(part, BEGAN + (part * 5 % PARTS) * DAY_NS)
        schedule.finish()
    now_ns = BEGAN + 2 * PERIOD_NS + PARTS * DAY_NS
    order = schedule.due(PERIOD_S, now_ns)
    assert [schedule.checked_ns[part] for part in order] == sorted(schedule.checked_ns)
    assert all(schedule.is_late(part, PERIOD_S, now_ns) for part in order)
    assert not schedule.is_late(order[0], PERIOD_S, schedule.checked_ns[order[0]] + PERIOD_NS + DAY_NS)


def test_a_clock_that_was_set_back_delays_a_check_by_a_period_at_most() -> None:
    schedule = ScrubSchedule(BEGAN)
    check_due(schedule, BEGAN + 1000 * DAY_NS)
    assert schedule.next_due_ns(PERIOD_S, BEGAN) <= BEGAN + PERIOD_NS


def test_a_request_is_met_once_whatever_the_clock_of_the_person_says() -> None:
    schedule = ScrubSchedule(BEGAN)
    now_ns = BEGAN + PERIOD_NS
    check_due(schedule, now_ns)
    ahead = now_ns + 3600 * 10**9
    for _ in range(2):
        schedule.ask(ahead, now_ns + 1)
    assert sorted(check_due(schedule, now_ns + 2)) == list(range(PARTS))
    schedule.ask(ahead, now_ns + 3)
    assert not schedule.due(PERIOD_S, now_ns + 4)


def test_a_part_that_was_asked_for_after_it_began_is_begun_again() -> None:
    schedule = ScrubSchedule(BEGAN)
    schedule.begin(0, BEGAN)
    schedule.reach(7, 9)
    schedule.begin(0, BEGAN + 1)
    assert (schedule.ledger_id, schedule.entry_id) == (7, 9)
    schedule.ask(5, BEGAN + 2)
    schedule.begin(0, BEGAN + 3)
    assert (schedule.ledger_id, schedule.entry_id) == (0, 0)


def test_a_check_continues_where_it_was_after_a_restart() -> None:
    schedule = ScrubSchedule(BEGAN)
    schedule.begin(3, BEGAN + DAY_NS)
    schedule.reach(70, 5)
    kept = ScrubSchedule.decode(json.loads(json.dumps(schedule.encode())))
    assert kept == schedule
    assert kept.due(PERIOD_S, BEGAN + DAY_NS)[0] == 3, "the part under way comes first"


@pytest.mark.parametrize(
    "change",
    [{"part": PARTS}, {"checked_ns": [0]}, {"entry_id": "1"}, {"begun_ns": -2}, {"asked_ns": 1 << 64}],
    ids=["part", "parts", "type", "negative", "large"],
)
def test_wrong_notes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"range|parts"):
        ScrubSchedule.decode({**ScrubSchedule(BEGAN).encode(), **change})


def test_the_rate_lets_a_part_end_in_its_share_of_the_period_and_grows_with_what_is_late() -> None:
    ten_tb = 10 * 10**12
    rate = rate_of(ten_tb // PARTS, 1, PERIOD_S, 32 << 20)
    assert ten_tb / rate == pytest.approx(PERIOD_S)
    assert rate_of(ten_tb // PARTS, 4, PERIOD_S, 32 << 20) == pytest.approx(4 * rate)
    assert rate_of(ten_tb, PARTS, PERIOD_S, 32 << 20) == 32 << 20
    assert rate_of(1000, 1, PERIOD_S, 32 << 20) == RATE_MIN
    assert rate_of(1000, 1, PERIOD_S, 64 << 10) == 64 << 10


def test_a_request_that_is_not_noted_yet_is_left_as_a_whole() -> None:
    schedule = ScrubSchedule(1)
    schedule.ask(7, 8)
    schedule.checked_ns = [9] * PARTS
    notes = {"quick": schedule.encode(), "noted_ns": 10}
    left = [status_of_quick(notes, {ScrubKind.QUICK: asked_ns}).kinds[ScrubKind.QUICK].asked for asked_ns in (0, 7, 8)]
    assert left == [0.0, 0.0, 1.0]
