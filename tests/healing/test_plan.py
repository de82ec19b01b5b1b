"""Which repairs a cluster needs, and in which order."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from pybk.flags import StorageHint
from pybk.healing.plan import Plan, Task, misplaced_place, plan
from pybk.healing.situation import SECOND_NS, HoldReason, MarkKey, Situation, Space
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import PlacementSettings, RepairSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.replication.locations import Location, PlacementPolicy, keeps_zones_open, write_sets
from pybk.replication.placement import Candidate, fits
from pybk.replication.quorum import Quorum
from tests.healing.clusters import GIB, GRACE_NS, NOW, bookie, facts, ledger, mapped, situation
from tests.replication.zones import short_sets_of

LOST, DAMAGED, MISSING, MISSED, DRAINING, MISPLACED, _ = RepairReason
LOOSE = RepairSettings(hold_below=0.0)


def planned(found: Situation, *ledgers: LedgerMetadata, window: int = 1000) -> Plan:
    return plan(mapped(*ledgers), found, NOW, window=window)


def shown(tasks: tuple[Task, ...]) -> list[tuple[int, str, str, int]]:
    return [(each.ledger_id, each.bookie.bookie_id, each.reason.value, each.copies) for each in tasks]


def mark(ledger_id: int, number: int, first: int = 0, reason: RepairReason = MISSING) -> UnderReplicatedLedger:
    return UnderReplicatedLedger(ledger_id, bookie(number), first, reason, since_ns=NOW - 5)


def test_a_healthy_cluster_needs_nothing() -> None:
    found = planned(situation(5), ledger(1, (0, (0, 1, 2))), ledger(2, (0, (2, 3, 4)), last=None))
    assert (found.tasks, found.terminal, found.holds, dict(found.wanted)) == ((), (), (), {})
    assert found.counts.short == {}


def test_a_bookie_within_its_grace_is_waited_for_and_counted() -> None:
    found = planned(situation(5, absent={0: GRACE_NS - 1}), ledger(1, (0, (0, 1, 2))), ledger(2, (0, (0, 1))))
    assert found.tasks == ()
    assert found.counts.short == {"2": 1, "1": 1}


def test_a_lost_bookie_is_replaced_in_fragments_that_have_an_end() -> None:
    ledgers = (ledger(1, (0, (0, 1, 2))), ledger(2, (0, (0, 1, 2)), (50, (0, 1, 3)), last=None))
    found = planned(situation(5, absent={0: GRACE_NS}), *ledgers)
    assert shown(found.tasks) == [(1, "b0", "lost", 2), (2, "b0", "lost", 2)]
    assert found.tasks[0].size_bytes == 3000
    assert found.counts.left_to_writer == 1
    assert list(found.wanted) == [each.key for each in found.tasks]


def test_fewest_copies_come_first_then_reasons_then_age() -> None:
    draining = facts(3, state=BookieState.DRAINING, state_since_ns=NOW - 7)
    ledgers = [
        ledger(1, (0, (0, 4, 5))),
        ledger(2, (0, (3, 4, 5))),
        ledger(3, (0, (3, 6))),
        ledger(4, (0, (0, 1, 5))),
        ledger(5, (0, (1, 4, 5))),
        ledger(6, (0, (4, 5, 6))),
    ]
    absent = {0: 3 * GRACE_NS, 1: 5 * GRACE_NS}
    found = planned(
        situation(9, absent=absent, changed=[draining], marks=[mark(6, 4, reason=DAMAGED)], repair=LOOSE), *ledgers
    )
    assert shown(found.tasks) == [
        (4, "b1", "lost", 1),
        (4, "b0", "lost", 1),
        (5, "b1", "lost", 2),
        (1, "b0", "lost", 2),
        (6, "b4", "damaged", 2),
        (3, "b3", "draining", 2),
        (2, "b3", "draining", 3),
    ]
    assert found.tasks[0].urgent
    assert not found.tasks[1].urgent


def test_a_one_copy_ledger_is_before_ten_thousand_misplaced_ones() -> None:
    placement = PlacementSettings(min_zones=2, repair=True)
    ledgers = [ledger(each, (0, (0, 3, 6))) for each in range(10_000)]
    ledgers.append(ledger(10_000, (0, (1, 2, 4))))
    absent = {1: 3 * GRACE_NS, 2: 5 * GRACE_NS}
    found = planned(situation(9, absent=absent, placement=placement, repair=LOOSE), *ledgers)
    assert len(found.tasks) == 10_002
    assert 10_000 in {each.ledger_id for each in found.tasks[:5]}
    assert MarkKey(10_000, bookie(2)) in found.wanted
    assert len(found.wanted) == 1000
    assert found.tasks[-1].reason is MISPLACED


def test_one_failure_of_two_copies_is_waited_for_and_two_failures_are_urgent() -> None:
    within = {0: GRACE_NS - 1, 1: GRACE_NS - 2}
    found = planned(situation(6, absent=within), ledger(1, (0, (0, 2))), ledger(2, (0, (0, 1, 2))))
    assert shown(found.tasks) == [(2, "b0", "lost", 1)]
    assert found.tasks[0].urgent
    fresh = {0: SECOND_NS, 1: SECOND_NS}
    assert planned(situation(6, absent=fresh), ledger(2, (0, (0, 1, 2)))).tasks == ()


def test_a_hold_leaves_urgent_repairs() -> None:
    absent = {0: 2 * GRACE_NS, 1: 2 * GRACE_NS, 2: 2 * GRACE_NS}
    ledgers = (ledger(1, (0, (0, 3, 4))), ledger(2, (0, (0, 1, 3))), ledger(3, (0, (0, 4))))
    found = planned(situation(6, absent=absent), *ledgers)
    assert {each.reason for each in found.holds} >= {HoldReason.FEW_REGISTERED, HoldReason.MANY_LOST}
    assert sorted(key.ledger_id for key in found.wanted) == [2, 3]
    assert len(found.tasks) == 4
    accepted = RepairSettings(accepted_losses=("b0", "b1", "b2"))
    found = planned(situation(6, absent=absent, repair=accepted), *ledgers)
    assert found.holds == ()
    assert len(found.wanted) == 4


def with_flapping(found: Situation, *numbers: int) -> Situation:
    """Make bookies flap: absent three times within the hour, the last time ten minutes ago."""
    ago = (3000 * SECOND_NS, 1800 * SECOND_NS, 600 * SECOND_NS)
    found.absences = {bookie(each): tuple(NOW - each for each in ago) for each in numbers}
    return found


def states(found: Plan) -> dict[str, RepairState]:
    return {key.bookie.bookie_id: task.state for key, task in found.wanted.items()}


def test_an_urgent_copy_goes_to_a_flapping_bookie_if_no_other_can_take_it() -> None:
    absent = {0: 3 * GRACE_NS - 1, 1: GRACE_NS}
    flapping = with_flapping(situation(5, absent=absent, repair=LOOSE), 2, 3, 4)
    found = planned(flapping, ledger(1, (0, (0, 1, 2))))
    assert shown(found.tasks) == [(1, "b0", "lost", 1), (1, "b1", "lost", 1)]
    assert [each.urgent for each in found.tasks] == [True, False]
    assert states(found) == {"b0": RepairState.QUEUED, "b1": RepairState.NO_TARGET}


def test_what_is_not_urgent_waits_half_an_hour_for_a_steady_bookie() -> None:
    early = with_flapping(situation(5, absent={0: 3 * GRACE_NS - 1}), 1, 2, 3, 4)
    late = with_flapping(situation(5, absent={0: 3 * GRACE_NS}), 1, 2, 3, 4)
    steady = with_flapping(situation(5, absent={0: GRACE_NS}), 1, 2, 3)
    assert states(planned(early, ledger(1, (0, (0, 1, 2))))) == {"b0": RepairState.NO_TARGET}
    assert states(planned(late, ledger(1, (0, (0, 1, 2))))) == {"b0": RepairState.QUEUED}
    assert states(planned(steady, ledger(1, (0, (0, 1, 2))))) == {"b0": RepairState.QUEUED}


def test_a_pause_stops_urgent_repairs_and_ends_by_itself() -> None:
    absent = {0: 2 * GRACE_NS}
    paused = RepairSettings(paused_until_ns=NOW + 1)
    found = planned(situation(6, absent=absent, repair=paused), ledger(3, (0, (0, 4))))
    assert (found.paused, dict(found.wanted), len(found.tasks)) == (True, {}, 1)
    over = planned(situation(6, absent=absent, repair=RepairSettings(paused_until_ns=NOW)), ledger(3, (0, (0, 4))))
    assert len(over.wanted) == 1


def test_an_entry_without_a_copy_that_comes_back_is_lost() -> None:
    absent = {0: 5 * GRACE_NS, 1: 2 * GRACE_NS, 2: 1}
    ledgers = (ledger(1, (0, (0,))), ledger(2, (0, (0, 1)), (50, (0, 3))), ledger(3, (0, (0, 2))))
    found = planned(situation(9, absent=absent, repair=LOOSE), *ledgers)
    assert shown(found.tasks) == [(2, "b0", "lost", 1)]
    assert [(each.ledger_id, each.bookie, each.state) for each in found.terminal] == [
        (1, bookie(0), RepairState.LOST),
        (2, bookie(1), RepairState.LOST),
    ]
    assert found.tasks[0].first_entry_id == 50
    assert found.counts.lost == 2
    assert found.counts.short == {"0": 3}


def test_an_empty_ledger_is_moved_without_bytes_and_never_lost() -> None:
    found = planned(situation(5, absent={0: 2 * GRACE_NS}), ledger(1, (0, (0,)), last=-1, length=0))
    assert shown(found.tasks) == [(1, "b0", "lost", 1)]
    assert (found.tasks[0].size_bytes, found.counts.lost, found.counts.short) == (0, 0, {})


def test_an_open_ledger_waits_for_its_owner_after_the_grace_for_open_ledgers() -> None:
    made = ledger(1, (0, (0, 1, 2)), last=None)
    for idle_s, allowed, waiting in ((3599, False, False), (3600, False, True), (3600, True, True)):
        repair = RepairSettings(recover_abandoned=allowed)
        found = situation(5, absent={0: 2 * GRACE_NS}, repair=repair)
        found.moved_ns[1] = NOW - idle_s * SECOND_NS
        result = planned(found, made)
        assert result.tasks == ()
        states = [(each.state, each.recover) for each in result.terminal]
        assert states == ([(RepairState.WAITING_FOR_OWNER, allowed)] if waiting else [])


@pytest.mark.parametrize("lacking", [(0,), (0, 1, 2)])
def test_an_abandoned_ledger_of_which_live_bookies_miss_entries_waits_for_its_owner(lacking: tuple[int, ...]) -> None:
    made = ledger(1, (0, (0, 1, 2)), last=None)
    for idle_s, waiting in ((3599, False), (3600, True)):
        marks = [mark(1, number, first=7 + number) for number in lacking]
        found = situation(5, marks=marks, repair=RepairSettings(recover_abandoned=True))
        found.moved_ns[1] = NOW - idle_s * SECOND_NS
        result = planned(found, made)
        assert (result.tasks, result.counts.left_to_writer, result.counts.lost) == ((), int(not waiting), 0)
        states = [(each.bookie, each.state, each.recover) for each in result.terminal]
        assert states == [(bookie(each), RepairState.WAITING_FOR_OWNER, True) for each in lacking if waiting]


def test_bookies_that_all_miss_entries_may_have_those_of_each_other() -> None:
    marks = [mark(1, 0, first=5), mark(1, 1, first=7), mark(1, 2, first=9)]
    result = planned(situation(5, marks=marks), ledger(1, (0, (0, 1, 2))))
    assert shown(result.tasks) == [(1, f"b{number}", "missing", 0) for number in range(3)]
    assert (result.terminal, result.counts.lost, result.counts.short) == ((), 0, {"0": 1})
    alone = planned(situation(5, marks=[mark(1, 0)]), ledger(1, (0, (0,))))
    assert (alone.tasks, alone.counts.lost) == ((), 1)


@pytest.mark.parametrize(
    ("absent", "reasons", "short"),
    [
        ({}, (MISSED, MISSED, MISSED), "2"),
        ({1: 5}, (MISSED, MISSED, MISSED), "1"),
        ({}, (MISSED, DAMAGED, MISSED), "1"),
        ({}, (MISSED, MISSING, MISSED), "1"),
        ({}, (DAMAGED, MISSING, MISSED), "0"),
        ({1: 5, 2: 5}, (MISSED, MISSED, MISSED), "0"),
    ],
)
def test_entries_of_an_open_ledger_that_nobody_acknowledged_are_not_lost(
    absent: dict[int, int], reasons: tuple[RepairReason, ...], short: str
) -> None:
    """All bookies were killed under a writer, which has marked each from the first entry that was not acknowledged."""
    marks = [mark(1, number, first=1, reason=reason) for number, reason in enumerate(reasons)]
    result = planned(situation(5, absent=absent, marks=marks), ledger(1, (0, (0, 1, 2)), quorum=(3, 2), last=None))
    assert (result.counts.lost, result.counts.short) == (0, {short: 1})


@pytest.mark.parametrize(
    ("quorum", "numbers", "others", "short"),
    [
        ((3, 2), (0, 1, 2), {}, {"0": 1}),
        ((3, 2), (0, 1, 2), {MISSED: 1}, {"0": 1}),
        ((3, 2), (0, 1, 2), {MISSED: 1, DAMAGED: 1}, {"0": 1}),
        ((3, 2), (0, 1, 2), {MISSED: 1, LOST: 0}, {"0": 1}),
        ((3, 2), (0,), {}, {"2": 1}),
        ((3, 3), (0,), {}, {"2": 1}),
        ((3, 3), (0,), {MISSED: 1}, {"2": 1}),
    ],
)
def test_what_a_bookie_may_have_acknowledged_and_lost_does_not_count(
    quorum: tuple[int, int], numbers: tuple[int, ...], others: dict[RepairReason, int], short: dict[str, int]
) -> None:
    """The bookies mark themselves when they are in limbo, and a rebuild of the metadata marks those that lack entries.

    A writer or a recovery may have reported the same bookies.
    """
    marks = [mark(1, number).with_causes({MISSING: 0, **others}) for number in numbers]
    result = planned(situation(5, marks=marks), ledger(1, (0, (0, 1, 2)), quorum=quorum, last=None))
    assert result.counts.short == short


def test_what_was_observed_is_filled_up_where_it_is() -> None:
    found = planned(situation(5, marks=[mark(1, 0, first=40)]), ledger(1, (0, (0, 1, 2)), (40, (0, 1, 3))))
    (task,) = found.tasks
    assert (task.reason, task.stays, task.derived, task.first_entry_id, task.copies) == (MISSING, True, None, 40, 2)
    assert len(found.wanted) == 1
    within = situation(5, absent={0: GRACE_NS - 1}, marks=[mark(1, 0)])
    assert planned(within, ledger(1, (0, (0, 1, 2)))).tasks == ()
    lost = situation(5, absent={0: GRACE_NS}, marks=[mark(1, 0)])
    (task,) = planned(lost, ledger(1, (0, (0, 1, 2)))).tasks
    assert (task.reason, task.stays, task.derived) == (LOST, False, LOST)


def test_what_was_observed_of_the_last_entry_of_a_fragment_alone_is_filled_up() -> None:
    fragments = ledger(1, (0, (0, 1, 2)), (40, (3, 1, 2)))
    (task,) = planned(situation(5, marks=[mark(1, 0, first=39)]), fragments).tasks
    assert (task.reason, task.stays, task.first_entry_id, task.copies) == (MISSING, True, 0, 2)
    assert planned(situation(5, marks=[mark(1, 0, first=40)]), fragments).tasks == ()


def test_the_only_copy_that_may_be_sound_is_not_lost_while_its_bookie_may_return() -> None:
    found = situation(5, absent={1: 1}, marks=[mark(1, 0, reason=DAMAGED)])
    result = planned(found, ledger(1, (0, (0, 1))))
    assert (result.tasks, result.terminal, result.counts.short) == ((), (), {"0": 1})


def test_without_a_target_a_ledger_is_marked_so() -> None:
    found = situation(4, absent={0: 2 * GRACE_NS})
    result = planned(found, ledger(1, (0, (0, 1, 2, 3))), ledger(2, (0, (0, 1, 2))))
    assert {key.ledger_id: task.state for key, task in result.wanted.items()} == {
        1: RepairState.NO_TARGET,
        2: RepairState.QUEUED,
    }
    full = [facts(each, tiers={StorageHint.SSD: Space(14 * GIB, 100 * GIB)}) for each in range(1, 4)]
    result = planned(situation(4, absent={0: 2 * GRACE_NS}, changed=full), ledger(2, (0, (0, 1))))
    assert [task.state for task in result.wanted.values()] == [RepairState.NO_TARGET]
    assert result.holds == ()


def test_a_ledger_is_repaired_as_far_as_there_are_targets() -> None:
    full = [facts(3, tiers={})]
    found = situation(4, absent={0: 2 * GRACE_NS}, changed=full)
    first, last = (0, (0, 1, 2)), (50, (0, 1, 3))  # b1 and b2 have space, and one place each already
    assert [each.state for each in planned(found, ledger(1, first, last)).wanted.values()] == [RepairState.QUEUED]
    for left in (ledger(1, first, (50, (2, 1, 3))), ledger(1, first, last, last=None)):
        states = [each.state for each in planned(found, left).wanted.values()]
        assert states == [RepairState.NO_TARGET], "nobody takes the other place"


@pytest.mark.parametrize(
    ("zones", "strict", "state"), [(3, True, "no_target"), (3, False, "queued"), (2, True, "queued")]
)
def test_a_strict_policy_leaves_no_target(zones: int, *, strict: bool, state: str) -> None:
    placement = PlacementSettings(min_zones=zones, strict=strict)
    found = situation(8, absent={2: 2 * GRACE_NS}, changed=[facts(5, tiers={})], placement=placement)
    result = planned(found, ledger(1, (0, (0, 1, 2))))
    assert [each.state.value for each in result.wanted.values()] == [state], "only b2 and b5 stand in the third zone"


def test_plans_and_workers_agree_on_what_a_strict_policy_allows() -> None:
    draw = Random(1)
    for _ in range(200):
        size = draw.randint(1, 5)
        write_quorum, min_zones, place = draw.randint(1, size), draw.randint(1, 4), draw.randrange(size)
        stand = {bookie(each): Location.registered(draw.choice(("", "a", "b", "c"))) for each in range(size + 4)}
        policy, ensemble = PlacementPolicy(min_zones, strict=True), tuple(map(bookie, range(size)))
        candidates = [Candidate(each, {StorageHint.SSD: GIB}, location=where) for each, where in stand.items()]
        zones, sets = [stand[each].zone for each in ensemble], write_sets(size, write_quorum)
        for each in map(bookie, range(size, size + 4)):
            allowed = fits(
                each,
                candidates,
                place=place,
                ensemble=ensemble,
                hints=frozenset(),
                write_quorum=write_quorum,
                policy=policy,
                located=stand,
                among_best=False,
            )
            assert keeps_zones_open(zones, place, stand[each].zone, sets, policy.needed(write_quorum)) == allowed


def test_a_place_is_moved_only_where_a_write_set_spans_too_few_zones() -> None:
    for size in range(1, 5):
        for zones in product(["", "a", "b", "c"], repeat=size):
            for write_quorum, min_zones in product(range(1, size + 1), range(1, 5)):
                place = misplaced_place(zones, Quorum(size, write_quorum, 1).masks(), min_zones)
                short = short_sets_of(zones, write_quorum, min_zones)
                assert (place is None) is (not short or "" in zones), "where a bookie without a label stands is unknown"
                if place is not None:
                    spare = [each for each in short if [zones[member] for member in each].count(zones[place]) > 1]
                    assert any(place in each for each in spare), "its write set keeps the zone"


def test_ledgers_without_targets_do_not_block_the_others() -> None:
    ledgers = [ledger(each, (0, (0, 1, 2, 3))) for each in range(9)] + [ledger(9, (0, (0, 1, 2)))]
    result = planned(situation(4, absent={0: 2 * GRACE_NS}), *ledgers, window=2)
    assert {key.ledger_id for key in result.wanted} == {0, 1, 9}


def test_a_new_instance_may_take_the_place_of_the_old_one() -> None:
    made = ledger(1, (0, (bookie(0, 9), 1, 2)))
    (task,) = planned(situation(3), made).tasks
    assert (task.bookie, task.reason) == (bookie(0, 9), LOST)
    assert [each.state for each in planned(situation(3), made).wanted.values()] == [RepairState.QUEUED]


def test_a_draining_bookie_is_a_source() -> None:
    draining = [facts(0, state=BookieState.DRAINING)]
    result = planned(situation(4, changed=draining), ledger(1, (0, (0,))), ledger(2, (0, (0, 1, 2))))
    assert shown(result.tasks) == [(1, "b0", "draining", 1), (2, "b0", "draining", 3)]
    assert result.counts.short == {}
    assert not any(each.urgent for each in result.tasks)


def test_each_write_set_counts_by_itself() -> None:
    absent = {0: 3 * GRACE_NS, 1: 2 * GRACE_NS}
    result = planned(situation(9, absent=absent, repair=LOOSE), ledger(1, (0, (0, 1, 2, 3)), quorum=(2, 1)))
    assert (result.tasks, result.counts.lost, len(result.terminal)) == ((), 1, 2)
    result = planned(situation(9, absent=absent, repair=LOOSE), ledger(1, (0, (0, 2, 1, 3)), quorum=(2, 1)))
    assert shown(result.tasks) == [(1, "b0", "lost", 1), (1, "b1", "lost", 1)]
    assert [each.urgent for each in result.tasks] == [True, True]


def test_parked_marks_take_no_place_of_others() -> None:
    ledgers = [ledger(each, (0, (0, 1, 2))) for each in range(4)]
    found = situation(5, absent={0: 2 * GRACE_NS})
    found.parked = frozenset({MarkKey(0, bookie(0)), MarkKey(1, bookie(0))})
    result = planned(found, *ledgers, window=1)
    assert {key.ledger_id for key in result.wanted} == {0, 1, 2}


def test_few_zones_are_found_and_unknown_zones_are_not_judged() -> None:
    placement = PlacementSettings(min_zones=2, repair=True)
    ledgers = (ledger(1, (0, (0, 3))), ledger(2, (0, (0, 1))))
    assert shown(planned(situation(6, placement=placement), *ledgers).tasks) == [(1, "b3", "misplaced", 2)]
    unknown = situation(6, placement=placement, changed=[facts(3, location="")])
    assert planned(unknown, *ledgers).tasks == ()
    counted = planned(situation(6, placement=PlacementSettings(min_zones=2)), *ledgers)
    assert (counted.tasks, counted.counts.misplaced) == ((), 1)


def test_what_is_misplaced_moves_only_where_a_write_set_gains_a_zone() -> None:
    placement = PlacementSettings(min_zones=3, repair=True)
    stuck = planned(situation(6, placement=placement), ledger(1, (0, (0, 1, 3, 4)), quorum=(3, 2)))
    assert [each.state for each in stuck.wanted.values()] == [RepairState.QUEUED], "b2 and b5 are in the third zone"
    full = [facts(2, tiers={}), facts(5, tiers={})]
    stuck = planned(situation(8, changed=full, placement=placement), ledger(1, (0, (0, 1, 3))))
    assert {each.state for each in stuck.wanted.values()} == {RepairState.NO_TARGET}, "b6 and b7 are in used zones"
    assert stuck.counts.misplaced == 1
