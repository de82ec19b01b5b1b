"""The auditor's machine: which marks that are there already it changes, and when."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pybk.healing.auditor import (
    SAVE_NS,
    SUSPICION_NS,
    AuditorMachine,
    BookiesRead,
    ChangeMark,
    ChangesMissed,
    Check,
    Elected,
    Event,
    LedgersChanged,
    LedgersRead,
    MarksChanged,
    MarksRead,
    PublishMark,
    ReadEverything,
    ReplicaChecked,
    SavedState,
    SaveState,
    SettingsRead,
    Tick,
    WithdrawMark,
)
from pybk.healing.plan import STUCK_NS, WINDOW
from pybk.healing.repair_report import Report
from pybk.healing.situation import SECOND_NS, MarkKey
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from tests.healing.clusters import GRACE_NS, NOW, bookie, facts, ledger

LEASE_NS = 10 * STUCK_NS
KEY = MarkKey(1, bookie(0))
Changes = list[PublishMark | WithdrawMark | ChangeMark]


class Led:
    """A machine that leads, and ledgers on the first three bookies, of which the first is lost."""

    def __init__(self, *, bookies: int, ledgers: int = 1, window: int = WINDOW) -> None:
        self.machine = AuditorMachine(window=window)
        self.now_ns = NOW
        self.step(Elected(SavedState(), NOW + LEASE_NS, NOW - 3600 * SECOND_NS))
        self.step(SettingsRead(ClusterSettings()))
        self.step(MarksRead(()))
        self.see(range(bookies))
        made = {each: (ledger(each, (0, (0, 1, 2))), 0) for each in range(1, ledgers + 1)}
        self.step(LedgersRead(1, -1, None, made))
        self.see(range(1, bookies))
        self.now_ns += GRACE_NS

    def step(self, event: Event) -> Changes:
        effects = self.machine.step(event, self.now_ns)
        return [each for each in effects if isinstance(each, PublishMark | WithdrawMark | ChangeMark)]

    def see(self, registered: Iterable[int]) -> Changes:
        """Let the machine see which bookies are registered; the first one has a cookie in any case."""
        there = set(registered)
        return self.step(BookiesRead(tuple(facts(each, registered=each in there) for each in {0, *there})))

    def mark(self, state: RepairState, ledger_id: int = 1) -> UnderReplicatedLedger:
        """Make the mark that was asked for."""
        token = state.value.encode()
        return UnderReplicatedLedger(ledger_id, bookie(0), 0, RepairReason.LOST, state=state, token=token)

    def publish(self, changes: Changes) -> set[int]:
        """Make the marks that were asked for; return their ledgers."""
        asked = {each.key.ledger_id for each in changes if isinstance(each, PublishMark)}
        self.step(MarksChanged({MarkKey(each, bookie(0)): self.mark(RepairState.QUEUED, each) for each in asked}))
        return asked

    def repair(self, ledger_id: int, ensemble: Iterable[int] = (3, 1, 2)) -> Changes:
        """Let a ledger be repaired and its mark be removed; return what is asked for then."""
        asked = self.step(LedgersChanged({ledger_id: (ledger(ledger_id, (0, ensemble), version=1), 1)}))
        return asked + self.step(MarksChanged({MarkKey(ledger_id, bookie(0)): None}))


def test_a_change_of_the_holds_is_reported_at_once() -> None:
    machine = AuditorMachine()
    reports: list[list[str]] = []

    def step(event: Event, after_s: int = 0) -> None:
        effects = machine.step(event, NOW + after_s * SECOND_NS)
        reports.extend([hold.reason.value for hold in each.holds] for each in effects if isinstance(each, Report))

    def see(*registered: int, after_s: int = 0) -> None:
        step(BookiesRead(tuple(facts(each, registered=each in registered) for each in range(4))), after_s)

    step(Elected(SavedState(), NOW + LEASE_NS, NOW))
    step(SettingsRead(ClusterSettings()))
    step(MarksRead(()))
    see(0, 1, 2)
    assert reports == [], "nothing is known before everything was read"
    step(LedgersRead(1, -1, None, {1: (ledger(1, (0, (0, 1, 2))), 0)}))
    assert reports == [["session_young"]]
    see(0, 1, 2, after_s=1)
    see(0, 1, 2, 3, after_s=2)
    see(0, 1, 2, 3, after_s=3)
    assert reports == [["session_young"], []]


def test_a_bookie_that_comes_before_its_answer_is_a_target() -> None:
    led = Led(bookies=3)
    (asked,) = led.step(Tick())
    assert isinstance(asked, PublishMark)
    assert asked.state is RepairState.NO_TARGET
    led.see((1, 2, 3))
    answer = led.mark(RepairState.NO_TARGET)
    assert led.step(MarksChanged({KEY: answer})) == [ChangeMark(answer, RepairState.QUEUED)]


@pytest.mark.parametrize("seen", ["bookie", "hour"])
def test_a_stuck_mark_is_tried_again_when_its_bookies_have_changed_or_an_hour_later(seen: str) -> None:
    led = Led(bookies=4)
    (asked,) = led.step(Tick())
    assert isinstance(asked, PublishMark)
    assert asked.state is RepairState.QUEUED
    led.step(MarksChanged({KEY: led.mark(RepairState.QUEUED)}))
    stuck = led.mark(RepairState.STUCK)
    led.now_ns += STUCK_NS - led.now_ns % STUCK_NS  # a new hour begins
    assert led.step(MarksChanged({KEY: stuck})) == []
    led.now_ns += STUCK_NS // 2
    assert led.step(Tick()) == []
    assert led.see((1, 2, 3, 4)) == []  # a further bookie was not what it failed for
    if seen == "bookie":
        assert led.see((1, 3, 4)) == [ChangeMark(stuck, RepairState.QUEUED)]
    else:
        led.now_ns += STUCK_NS // 2
        assert led.step(Tick()) == [ChangeMark(stuck, RepairState.QUEUED)]


def denied(checked_ns: int) -> ReplicaChecked:
    """Return the check of a bookie that denies an entry of its ledger."""
    return ReplicaChecked(1, bookie(2), checked_ns, Check.MISSING, 5)


def test_the_times_of_checks_count_and_not_those_at_which_their_results_arrive() -> None:
    led = Led(bookies=4)
    first, early, second = (denied(led.now_ns + each) for each in (0, SUSPICION_NS - 1, SUSPICION_NS))
    for check, marked in ((first, []), (early, []), (second, [RepairReason.MISSING])):
        led.now_ns += SUSPICION_NS if check is early else 0  # the first two results are far enough apart
        asked = [each for each in led.step(check) if isinstance(each, PublishMark)]
        assert [each.reason for each in asked if each.key == MarkKey(1, bookie(2))] == marked


def test_what_was_found_at_a_bookie_that_lost_its_place_is_forgotten() -> None:
    led = Led(bookies=4)
    led.step(denied(led.now_ns))
    places = ((0, 1, 3), (0, 1, 2))  # it loses its place, and gets it back
    for version, ensemble in enumerate(places, 1):
        led.step(LedgersChanged({1: (ledger(1, (0, ensemble), version=version), version)}))
        effects = led.machine.step(ChangesMissed(), led.now_ns)
        (number,) = (each.reading for each in effects if isinstance(each, ReadEverything))
        led.step(LedgersRead(number, -1, None, {1: (ledger(1, (0, ensemble), version=version), version)}))
    for marked in ([], [RepairReason.MISSING]):
        led.now_ns += SUSPICION_NS
        asked = [each for each in led.step(denied(led.now_ns)) if isinstance(each, PublishMark)]
        assert [each.reason for each in asked if each.key == MarkKey(1, bookie(2))] == marked


def test_an_instance_that_was_replaced_and_repaired_is_forgotten() -> None:
    led = Led(bookies=4)
    old, new = bookie(0), bookie(0, 9)
    led.step(BookiesRead((facts(0, bookie=new), *map(facts, range(1, 4)))))
    assert led.machine.situation.absent_since_ns.keys() == {old}
    led.repair(1)
    led.now_ns += SAVE_NS
    assert not [each for each in led.machine.step(Tick(), led.now_ns) if isinstance(each, SaveState)], (
        "nobody is absent"
    )
    assert not led.machine.situation.absent_since_ns


def test_a_hold_withdraws_what_was_derived_and_leaves_what_was_observed() -> None:
    """H2: workers go by the marks, and fill up a damaged copy also during a hold."""
    led = Led(bookies=8)
    led.publish(led.step(Tick()))
    damaged = UnderReplicatedLedger(5, bookie(1), 0, RepairReason.DAMAGED, token=b"5")
    led.step(LedgersChanged({5: (ledger(5, (0, (1, 2, 6))), 0)}))
    assert led.step(MarksChanged({MarkKey(5, bookie(1)): damaged})) == []
    began = led.step(BookiesRead(tuple(facts(each, registered=each in (1, 2, 6, 7)) for each in range(8))))
    assert began == [WithdrawMark(KEY, frozenset({RepairReason.LOST}))]
    assert led.machine.holds
    led.step(MarksChanged({KEY: None}))
    (ended,) = led.step(BookiesRead(tuple(facts(each, registered=each > 0) for each in range(8))))
    assert isinstance(ended, PublishMark)
    assert (ended.key, led.machine.holds) == (KEY, ())


def test_marks_are_added_when_half_of_those_of_a_window_are_done() -> None:
    led = Led(bookies=4, ledgers=9, window=4)
    assert led.publish(led.step(Tick())) == {1, 2, 3, 4}
    assert led.publish(led.repair(1)) == set()
    assert led.publish(led.repair(2)) == {5, 6}


def test_a_mark_that_is_more_urgent_than_all_is_added_at_once() -> None:
    led = Led(bookies=4, ledgers=9, window=4)
    led.publish(led.step(Tick()))
    assert led.publish(led.repair(1)) == set()
    one_copy = ledger(20, (0, (0, 1)), version=1)
    asked = led.step(LedgersChanged({20: (one_copy, 1)}))
    assert [each.key.ledger_id for each in asked if isinstance(each, PublishMark)] == [20]


def test_a_bookie_that_was_drained_and_ended_is_not_reported() -> None:
    led = Led(bookies=4)
    for state, reported in ((BookieState.DRAINING, [("b0", "lost")]), (BookieState.DRAINED, [])):
        gone = facts(0, registered=False, state=state)
        led.step(BookiesRead((gone, *(facts(number) for number in range(1, 4)))))
        led.now_ns += GRACE_NS
        (report,) = (each for each in led.machine.step(Tick(), led.now_ns) if isinstance(each, Report))
        assert [(each.bookie.bookie_id, each.status) for each in report.bookies] == reported
