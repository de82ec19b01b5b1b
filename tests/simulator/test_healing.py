"""A cluster that repairs itself, in virtual time: scenarios, a short campaign, and mutants that it has to notice.

A scenario has the number of ``python -m tests.cluster.scenarios``; 10 and 11 are in ``tests/healing/test_throttle.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from pybk.healing.auditor import Check
from pybk.healing.situation import SECOND_NS, HoldReason
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import RepairSettings
from pybk.metadata.underreplication import RepairState
from tests.sampling import some
from tests.simulator.healing import BEGIN_NS, GRACE_NS, LEASE_NS, World, run
from tests.simulator.healing_mutants import AWAY_MUTANTS, HEALING_MUTANTS, KILLED_AT, notices
from tests.simulator.mutating import Mutant, mutated

SEEDS = sorted({*range(some(3, 40)), *KILLED_AT.values()})  # a seed that fails by itself notices no mutant
LATE = frozenset({"H5", "H6b", "H7"})
"""Mutants that are noticed long after the beginning of a run."""

NAMES = ["b0", "b1", "b2", "b3", "b4"]
REPAIR = RepairSettings(grace_s=60, open_grace_s=300)


def world(bookies: int = 5, *, repair: RepairSettings = REPAIR, window: int = 1000) -> World:
    """Return a cluster without faults and ledgers, that has an auditor."""
    return World(1, faults=False, bookies=bookies, ledgers=0, repair=repair, window=window)


def add(made: World, count: int, ensemble: list[str], *, closed: bool = True) -> list[int]:
    found = [made.add_ledger(closed=closed, ensemble=ensemble) for _ in range(count)]
    return [each for each in found if each is not None]


def held_bytes(made: World, name: str) -> int:
    """Return about how many bytes a bookie holds."""
    return sum(made.ledgers[ledger_id][0].length for ledger_id, _ in made.bookies[name].units)


def seconds(made: World) -> float:
    return (made.now - BEGIN_NS) / SECOND_NS


def hold_reasons(made: World) -> set[HoldReason]:
    return set() if made.report is None else {each.reason for each in made.report.holds}


def test_scenario_01_a_killed_bookie_is_repaired_after_its_grace_and_no_more_is_copied_than_it_held() -> None:
    made = world()
    for first in range(5):
        add(made, 8, [NAMES[(first + each) % 5] for each in range(3)])
    made.pass_time(60)
    held = held_bytes(made, "b0")
    made.kill("b0")
    made.pass_time(60)
    assert made.done["copy"] == 0
    made.pass_time(7 + 10)  # the lease, and at most one tick more
    assert made.done["publish"] > 0
    made.pass_time(120)
    assert made.done["repaired"] == 24
    assert made.copied_bytes <= 1.05 * held
    assert made.marks == {}
    assert all(made.bookies["b0"].bookie not in metadata.fragments[0].ensemble for metadata, _ in made.ledgers.values())


def test_scenario_02_a_bookie_that_returns_within_its_grace_costs_nothing() -> None:
    made = world()
    add(made, 20, NAMES[:3])
    made.pass_time(60)
    made.kill("b0")
    made.pass_time(20)
    made.start("b0")
    made.pass_time(600)
    assert (made.done["publish"], made.copied_bytes) == (0, 0)


def test_scenario_03_the_marks_of_a_bookie_that_returns_late_are_dropped() -> None:
    made = world()
    add(made, 100, NAMES[:3])
    made.pass_time(60)
    made.kill("b0")
    made.run(made.now + 600 * SECOND_NS, lambda: made.done["repaired"] >= 50)
    assert len(made.marks) > 30
    made.start("b0")
    made.pass_time(30)
    assert made.marks == {}
    assert made.done["repaired"] < 70


def test_scenario_04_many_failures_hold_all_but_urgent_repairs_until_enough_return() -> None:
    made = world()
    add(made, 10, NAMES[:3])
    add(made, 10, ["b0", "b3", "b4"])
    made.pass_time(60)
    for name in NAMES[:2]:
        made.kill(name)
    made.kill("b3")
    made.pass_time(LEASE_NS / SECOND_NS + 10)
    assert HoldReason.FEW_REGISTERED in hold_reasons(made)
    made.pass_time(300)
    assert made.done["repaired"] == 20  # one copy more of each, and no third one
    assert made.report is not None
    assert made.report.counts.short == {"2": 20}
    made.start("b1")
    made.start("b3")
    made.pass_time(300)
    assert hold_reasons(made) == set()
    assert made.report.counts.short == {}
    assert made.unhealthy() == ""


def test_scenario_05_a_zone_that_fails_is_waited_for_until_its_loss_is_accepted() -> None:
    made = world(7)
    add(made, 10, ["b0", "b1", "b2"])
    add(made, 10, ["b3", "b4", "b5"])
    made.pass_time(60)
    made.kill("b1")
    made.kill("b4")
    made.pass_time(3600)
    assert HoldReason.ZONE_ABSENT in hold_reasons(made)
    assert made.done["copy"] == 0
    made.set_settings(replace(REPAIR, accepted_losses=("b1", "b4")))
    made.pass_time(300)
    assert made.done["repaired"] == 20


def test_scenario_06_the_next_auditor_continues_and_copies_nothing_twice() -> None:
    made = world()
    add(made, 100, NAMES[:3])
    made.pass_time(60)
    held = held_bytes(made, "b0")
    made.kill("b0")
    made.run(made.now + 600 * SECOND_NS, lambda: made.done["repaired"] >= 30)
    since = made.saved.absences[made.bookies["b0"].bookie].absent_ns
    assert since is not None
    made.kill_auditor()
    began = made.now
    made.run(made.now + 60 * SECOND_NS, lambda: made.leader is not None and made.leader.machine.leading)
    assert made.now - began <= LEASE_NS + 10 * SECOND_NS
    made.pass_time(300)
    assert made.done["repaired"] == 100
    assert made.copied_bytes <= 1.1 * held
    assert made.saved.since_read_ns < 3600 * SECOND_NS


def test_scenario_06_an_absence_is_counted_across_auditors() -> None:
    made = world()
    add(made, 5, NAMES[:3])
    made.pass_time(60)
    made.kill("b0")
    made.pass_time(LEASE_NS / SECOND_NS + 40)
    made.kill_auditor()
    made.pass_time(55)  # a new count would take the whole grace of 60 s
    assert made.done["publish"] > 0


def test_scenario_07_an_auditor_that_was_suspended_changes_nothing() -> None:
    made = world()
    add(made, 50, NAMES[:3])
    made.pass_time(60)
    made.kill("b0")
    made.pass_time(30)
    first = made.leader
    made.suspend_auditor(120)
    made.pass_time(240)  # the world checks the effects of the auditor that wakes up
    assert made.leader is not first
    assert made.done["elected"] == 2
    assert made.unhealthy() == ""


def test_scenario_08_nobody_is_lost_while_the_metadata_store_cannot_be_reached() -> None:
    made = world()
    add(made, 50, NAMES[:3])
    made.pass_time(60)
    made.lose_store(120)
    made.pass_time(120 + 30)
    assert made.done["publish"] == 0
    made.pass_time(600)
    assert (made.done["publish"], made.copied_bytes) == (0, 0)


def test_scenario_09_a_ledger_with_one_copy_is_among_the_first_five() -> None:
    paused = replace(REPAIR, accepted_losses=("b1", "b2"), paused_until_ns=BEGIN_NS + 180 * SECOND_NS)
    made = world(9, repair=paused)
    add(made, 150, ["b0", "b3", "b6"])
    (last,) = add(made, 1, ["b1", "b2", "b4"])
    made.set_state("b0", BookieState.DRAINING)
    made.pass_time(60)
    made.kill("b1")
    made.kill("b2")
    made.pass_time(119)
    assert made.copied == []
    made.pass_time(31)
    assert len(made.copied) > 20
    assert last in [ledger_id for ledger_id, *_ in made.copied[:5]]


def test_scenario_12_a_ledger_of_one_copy_is_lost_once_and_not_tried_again() -> None:
    made = world()
    (lost,) = add(made, 1, ["b0"])
    add(made, 5, NAMES[:3])
    made.pass_time(60)
    made.kill("b0")
    made.pass_time(1200)
    assert [(mark.ledger_id, mark.state) for mark in made.marks.values()] == [(lost, RepairState.LOST)]
    assert made.done["failed"] == 0
    assert made.report is not None
    assert made.report.lost == (lost,)
    made.start("b0")
    made.pass_time(60)
    assert made.marks == {}
    assert made.unhealthy() == ""


@pytest.mark.parametrize("closed", [True, False])
def test_scenario_13_empty_ledgers_block_no_drain(closed: bool) -> None:
    made = world()
    empty = add(made, 10, NAMES[:3], closed=closed)
    for ledger_id in empty:
        metadata, version = made.ledgers[ledger_id]
        made.ledgers[ledger_id] = (replace(metadata, last_entry_id=-1, length=0), version)
    made.writers.clear()
    full = add(made, 10, NAMES[:3])
    made.pass_time(60)
    made.set_state("b0", BookieState.DRAINING)
    made.pass_time(300)
    leaving = made.bookies["b0"].bookie
    left = [each for each, (metadata, _) in made.ledgers.items() if leaving in metadata.fragments[0].ensemble]
    assert left == ([] if closed else empty)
    assert made.done["repaired"] == len(full) + (len(empty) if closed else 0)
    assert made.copied_bytes == sum(made.ledgers[each][0].length for each in full)
    made.pass_time(300)
    states = {mark.state for mark in made.marks.values()}
    assert states == (set() if closed else {RepairState.WAITING_FOR_OWNER})


@pytest.mark.parametrize("allowed", [False, True])
def test_scenario_14_an_abandoned_ledger_waits_for_its_owner_or_is_recovered(allowed: bool) -> None:
    made = world(repair=replace(REPAIR, recover_abandoned=allowed))
    (ledger_id,) = add(made, 1, NAMES[:3], closed=False)
    made.writers.clear()
    made.pass_time(60)
    made.kill("b0")
    made.pass_time(200)
    assert made.marks == {}
    made.pass_time(200)
    if allowed:
        assert made.done["recover"] == 1
        assert made.unhealthy() == ""
    else:
        assert [mark.state for mark in made.marks.values()] == [RepairState.WAITING_FOR_OWNER]
        assert made.report is not None
        assert made.report.waiting == (ledger_id,)


def test_scenario_23_a_slow_bookie_is_not_marked() -> None:
    made = world()
    (ledger_id,) = add(made, 1, NAMES[:3])
    made.pass_time(60)
    for _ in range(5):
        made.report_check((ledger_id, 0), made.bookies["b0"].bookie, Check.UNKNOWN)
        made.pass_time(700)
    assert made.done["publish"] == 0


def test_scenario_24_bookies_above_their_line_are_no_targets() -> None:
    made = world()
    add(made, 10, NAMES[:3])
    for each in made.bookies.values():
        each.used = 0.86
    made.pass_time(60)
    made.kill("b0")
    made.pass_time(LEASE_NS / SECOND_NS + GRACE_NS / SECOND_NS + 60)
    assert made.copied_bytes == 0
    assert {mark.state for mark in made.marks.values()} == {RepairState.NO_TARGET}
    made.pass_time(60)
    assert made.report is not None
    assert len(made.report.no_target) == 10
    made.bookies["b3"].used = 0.5
    made.bookies_changed()
    made.pass_time(120)
    assert made.done["repaired"] == 10
    assert made.marks == {}


def made_without(name: str) -> World:
    """Return a cluster in which ledgers were created while one of three bookies was away, and another one is, too."""
    made = world(4)
    for each in (name, "b3"):
        made.kill(each)
    made.pass_time(60)
    add(made, 5, NAMES[:3])
    assert len(made.marks) == 5
    assert "short of copies" in made.unhealthy()
    return made


def repaired_when_it_returns() -> None:
    made = made_without("b0")
    made.pass_time(600)
    assert len(made.marks) == 5, "nobody can take the copies"
    made.start("b0")
    made.pass_time(300)
    assert (made.unhealthy(), made.marks) == ("", {})
    assert all("b0" in str(metadata.fragments[0].ensemble) for metadata, _ in made.ledgers.values())


def repaired_when_another_registers() -> None:
    made = made_without("b0")
    made.start("b3")
    made.pass_time(300)
    assert (made.unhealthy(), made.marks) == ("", {})
    assert all("b3" in str(metadata.fragments[0].ensemble) for metadata, _ in made.ledgers.values())


AWAY = {"returns": repaired_when_it_returns, "another": repaired_when_another_registers}


@pytest.mark.parametrize("repaired", AWAY.values(), ids=AWAY)
def test_ledgers_that_were_created_while_a_member_was_away_are_repaired(repaired: Callable[[], None]) -> None:
    repaired()


@pytest.mark.parametrize("mutant", AWAY_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_rule_about_a_member_that_was_away_is_noticed(mutant: Mutant) -> None:
    def all_repaired() -> None:
        for repaired in AWAY.values():
            repaired()

    with mutated(mutant), pytest.raises(AssertionError):
        all_repaired()


def undisturbed(seed: int) -> World:
    """Run a seed, in which no rule is broken."""
    found, error = run(seed)
    assert error is None, f"python -m tests.simulator.healing --seed {seed} --trace 50: {error}"
    return found


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_rule_is_broken(seed: int) -> None:
    undisturbed(seed)


@pytest.mark.long
def test_much_happens_in_all_seeds_together() -> None:
    """A campaign in which nothing happens proves nothing."""
    done: Counter[str] = Counter()
    for seed in SEEDS:
        done.update(undisturbed(seed).done)
    assert min(done[what] for what in ("repaired", "withdraw", "unmark", "ensemble change")) > 100
    assert min(done[what] for what in ("kill", "elected", "store lost", "suspend auditor", "kill auditor")) > 10


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, id=each.name, marks=pytest.mark.long if each.name in LATE else ()) for each in HEALING_MUTANTS],
)
def test_a_broken_rule_is_noticed(mutant: Mutant) -> None:
    assert notices(mutant, KILLED_AT[mutant.name]), mutant.rule


@pytest.mark.sampled(one_in=2, group="the same seed")
def test_the_same_seed_is_the_same_run() -> None:
    assert run(1)[0].trace == run(1)[0].trace
