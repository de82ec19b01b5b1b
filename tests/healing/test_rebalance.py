"""Plans of a rebalance: what they move, and what they must not do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from random import Random

import pytest

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap
from pybk.healing.rebalance import PlacedFragment, RebalancePlan, placed_fragments, plan_rebalance
from pybk.ledger.ledger_metadata import Bookie, LedgerState
from pybk.replication.locations import ANYWHERE, Location, PlacementPolicy
from pybk.replication.placement import Candidate
from tests.replication.driving import bookie, metadata
from tests.replication.zones import short_sets

NVME, HDD = StorageHint.NVME, StorageHint.HDD


def candidate(number: int, used: int, *, capacity: int = 1000, label: str = "") -> Candidate:
    return Candidate(bookie(number), {NVME: capacity - used}, location=Location.parse(label), capacity={NVME: capacity})


def copies(
    *numbers: int, ledger: int = 0, size: int = 10, write_quorum: int = 0, closed: bool = True
) -> PlacedFragment:
    ensemble = tuple(map(bookie, numbers))
    return PlacedFragment(ledger, 0, ensemble, write_quorum or len(numbers), NVME, size, closed)


def fixed(number: int, size: int) -> PlacedFragment:
    """Return what is on a bookie and does not move, because its ledger is open."""
    return copies(number, ledger=10_000 + number, size=size, closed=False)


def one_empty(label: str = "") -> tuple[list[PlacedFragment], list[Candidate]]:
    """Return two full bookies and an empty one."""
    ledgers = [copies(0, 1, ledger=number) for number in range(60)]
    return ledgers, [candidate(0, 600), candidate(1, 600), candidate(2, 0, label=label)]


def applied(
    plan: RebalancePlan, ledgers: Iterable[PlacedFragment], candidates: Iterable[Candidate]
) -> tuple[list[PlacedFragment], list[Candidate]]:
    """Return the cluster once the moves are made and their sources have dropped the surplus copies."""
    targets = {(move.ledger_id, move.first_entry_id): move for move in plan.moves}
    moved = []
    for each in ledgers:
        move = targets.get((each.ledger_id, each.first_entry_id))
        if move is not None:
            ensemble = tuple(move.target if member == move.source else member for member in each.ensemble)
            each = each._replace(ensemble=ensemble)
        moved.append(each)
    free = {(each.bookie, each.tier): each.capacity - each.used + each.before - each.after for each in plan.fullness}
    return moved, [
        replace(each, tiers={tier: free.get((each.bookie, tier), left) for tier, left in each.tiers.items()})
        for each in candidates
    ]


def test_an_empty_bookie_is_filled_in_several_small_plans() -> None:
    ledgers, candidates = one_empty()
    plans = 0
    while not (plan := plan_rebalance(ledgers, candidates, ANYWHERE)).level:
        assert 0 < plan.moved_bytes <= 0.05 * plan.all_bytes
        ledgers, candidates = applied(plan, ledgers, candidates)
        plans += 1
        assert plans < 20
    assert plans == 5
    assert all(abs(each.after - 400) <= 100 for each in plan.fullness)
    assert plan_rebalance(*applied(plan, ledgers, candidates), ANYWHERE).moves == ()


def test_a_cluster_that_is_level_moves_nothing() -> None:
    ledgers = [copies(0, 1, ledger=number) for number in range(50)] + [fixed(1, 99), fixed(2, 401)]
    plan = plan_rebalance(ledgers, [candidate(0, 500), candidate(1, 599), candidate(2, 401)], ANYWHERE)
    assert (plan.moves, plan.level) == ((), True)


def test_nothing_moves_between_bookies_that_are_level() -> None:
    ledgers = [copies(0, ledger=number, closed=False) for number in range(70)]
    ledgers += [copies(1, ledger=number) for number in range(70, 130)]
    ledgers += [fixed(number, 550) for number in (2, 3, 4)]
    candidates = [candidate(0, 700), candidate(1, 600), candidate(2, 550), candidate(3, 550), candidate(4, 550)]
    assert plan_rebalance(ledgers, candidates, ANYWHERE, tolerance=0.05).moves == ()


def test_no_move_makes_a_bookie_differ_the_other_way() -> None:
    ledgers = [copies(0, ledger=number, size=size) for number, size in enumerate([500, 100, 50])]
    ledgers += [fixed(1, 300), fixed(2, 400)]
    candidates = [candidate(0, 650), candidate(1, 300), candidate(2, 400)]
    plan = plan_rebalance(ledgers, candidates, ANYWHERE, moved_max=1.0)
    assert [each.size_bytes for each in plan.moves] == [100, 50]


def test_tiers_are_levelled_one_by_one() -> None:
    def tiered(number: int, nvme: int, hdd: int) -> Candidate:
        return Candidate(bookie(number), {NVME: 1000 - nvme, HDD: 1000 - hdd}, capacity={NVME: 1000, HDD: 1000})

    candidates = [tiered(0, 600, 100), tiered(1, 100, 100), tiered(2, 100, 100)]
    ledgers = [copies(0, ledger=number, write_quorum=1) for number in range(60)]
    ledgers += [copies(0, ledger=number)._replace(tier=HDD) for number in range(60, 70)]
    plan = plan_rebalance(ledgers, candidates, ANYWHERE, moved_max=1.0)
    assert {each.tier for each in plan.moves} == {NVME}
    assert plan.level


def test_it_is_refused_while_anything_is_short_held_or_unknown() -> None:
    ledgers, candidates = one_empty()
    plan = plan_rebalance(ledgers, candidates, ANYWHERE, held=["2 of 3 zones are absent"])
    assert str(plan) == "no rebalance: 2 of 3 zones are absent"
    plan = plan_rebalance(ledgers, candidates, ANYWHERE, short=range(7))
    assert str(plan) == "no rebalance: ledgers wait for repairs: 0, 1, 2, 3, 4 and 2 more"
    plan = plan_rebalance(ledgers, candidates[1:], ANYWHERE)
    assert "bookies that have copies are absent: b0@" in str(plan)
    plan = plan_rebalance(ledgers, [*candidates, Candidate(bookie(3), {NVME: 5})], ANYWHERE)
    assert str(plan) == "no rebalance: bookies that do not register their capacity: b3; upgrade them"
    assert (plan.moves, plan.level) == ((), False)


def test_what_a_source_has_not_dropped_yet_is_not_moved_again() -> None:
    ledgers, candidates = one_empty()
    moved, _ = applied(plan_rebalance(ledgers, candidates, ANYWHERE, moved_max=1.0), ledgers, candidates)
    assert (plan := plan_rebalance(moved, candidates, ANYWHERE)).level
    assert plan.moves == ()


def test_a_plan_moves_few_copies_and_one_of_a_ledger() -> None:
    ledgers, candidates = one_empty()
    assert len(plan_rebalance(ledgers, candidates, ANYWHERE, moved_max=1.0, moves_max=7).moves) == 7
    parts = [copies(0, 1)._replace(first_entry_id=first) for first in range(60)]
    assert len(plan_rebalance(parts, candidates, ANYWHERE, moved_max=1.0).moves) == 1


def test_only_closed_ledgers_move() -> None:
    ledgers, candidates = one_empty()
    open_ones = [each._replace(closed=each.ledger_id == 7) for each in ledgers]
    plan = plan_rebalance(open_ones, candidates, ANYWHERE, moved_max=1.0)
    assert [each.ledger_id for each in plan.moves] == [7]
    assert not plan.level


@pytest.mark.parametrize("change", [{"read_only": True}, {"leaving": True}])
def test_bookies_that_take_no_entries_get_nothing(change: dict[str, bool]) -> None:
    ledgers, candidates = one_empty()
    candidates[2] = replace(candidates[2], **change)  # type: ignore[arg-type]
    assert plan_rebalance(ledgers, candidates, ANYWHERE).moves == ()


def test_targets_stay_below_the_line_although_no_source_has_dropped_anything() -> None:
    ledgers = [copies(0, ledger=number, size=50) for number in range(19)]
    ledgers += [copies(1, ledger=number, size=50) for number in range(20, 34)]
    ledgers += [fixed(2, 600), fixed(3, 690)]  # something else takes space of the second one
    candidates = [candidate(0, 950), candidate(1, 700), candidate(2, 700), candidate(3, 690)]
    plan = plan_rebalance(ledgers, candidates, ANYWHERE, moved_max=1.0, full_above=0.74)
    assert [each.target for each in plan.moves] == [bookie(3)]
    gained = {each.bookie: each.during - each.before for each in plan.fullness}
    assert max(each.used + gained[each.bookie] for each in plan.fullness if gained[each.bookie]) <= 740


def test_copies_keep_their_zones() -> None:
    ledgers = [copies(0, 1, ledger=number) for number in range(60)]
    candidates = [
        candidate(0, 600, label="a"),
        candidate(1, 600, label="b"),
        candidate(2, 0, label="a"),
        candidate(3, 0),
    ]
    plan = plan_rebalance(ledgers, candidates, PlacementPolicy(2), moved_max=1.0)
    assert {(each.source, each.target) for each in plan.moves} == {(bookie(0), bookie(2))}
    plan = plan_rebalance(
        [copies(0, ledger=number) for number in range(60)], [*candidates[:1], *candidates[3:]], ANYWHERE
    )
    assert plan.moves == (), "a bookie without a label is no zone"


def test_a_strict_policy_moves_nothing_to_bookies_without_a_label() -> None:
    ledgers, candidates = one_empty()
    assert plan_rebalance(ledgers, candidates, PlacementPolicy(1, True)).moves == ()
    assert plan_rebalance(*one_empty("a"), PlacementPolicy(1, True)).moves != ()


def test_the_plan_is_printed() -> None:
    _, candidates = one_empty()
    ledgers = [copies(0, 1, ledger=number, size=100) for number in range(2)]
    plan = plan_rebalance(ledgers, candidates, ANYWHERE, moved_max=0.3, tolerance=0.05)
    assert str(plan).splitlines() == [
        "1 copies move, 100 of 400 bytes (25.0%); not all bookies are level then",
        "b0 -> b2: 1 copies, 100 bytes of nvme",
        "b0 nvme: 20.0% now, 20.0% with both copies, 10.0% then",
        "b1 nvme: 20.0% now, 20.0% with both copies, 20.0% then",
        "b2 nvme: 0.0% now, 10.0% with both copies, 10.0% then",
    ]


def test_fragments_come_from_the_map_of_the_cluster() -> None:
    cluster = ClusterMap()
    closed = metadata((3, 2, 2), (0, (0, 1, 2)), (5, (0, 1, 3)))
    cluster.apply(5, replace(closed, state=LedgerState.CLOSED, last_entry_id=9, length=600), 1)
    cluster.apply(6, replace(closed, ledger_id=6), 1)
    found = {(each.ledger_id, each.first_entry_id): each for each in placed_fragments(cluster)}
    assert found.keys() == {(5, 0), (5, 5), (6, 0)}
    assert found[5, 5] == PlacedFragment(5, 5, (bookie(0), bookie(1), bookie(3)), 2, NVME, 200, version=1)
    assert not found[6, 0].closed, "the fragment has an end, and the ledger may get entries still"


# ---- properties ------------------------------------------------------------------------------------------------------


class Drawn:
    """A random cluster."""

    def __init__(self, seed: int) -> None:
        source = Random(seed)
        self.policy = PlacementPolicy(source.randrange(1, 4), source.random() < 0.3)
        count = source.randrange(2, 8)
        zones = source.choice([[""], ["a", "b"], ["a/r1", "a/r2", "b/r1", "c/r1", ""]])
        tiers = source.choice([[NVME], [NVME, HDD]])
        self.ledgers: list[PlacedFragment] = []
        used: dict[tuple[Bookie, StorageHint], int] = {}
        for ledger_id in range(source.randrange(120)):
            size = source.randrange(1, min(count, 4) + 1)
            # Few ledgers are on the last bookies, so that there is something to level.
            numbers = source.sample(range(max(size, count - source.randrange(3))), size)
            each = PlacedFragment(
                ledger_id,
                0,
                tuple(map(bookie, numbers)),
                source.randrange(1, size + 1),
                source.choice(tiers),
                source.choice([0, source.randrange(100), source.randrange(2000)]),
                source.random() < 0.8,
            )
            self.ledgers.append(each)
            for member in each.ensemble:
                used[member, each.tier] = used.get((member, each.tier), 0) + each.size_bytes
        self.candidates = []
        for number in range(count):
            here = {tier: used.get((bookie(number), tier), 0) for tier in tiers}
            capacity = {tier: max(20_000, int(bytes_ * source.uniform(1.0, 3.0))) for tier, bytes_ in here.items()}
            self.candidates.append(
                Candidate(
                    bookie(number),
                    {tier: capacity[tier] - here[tier] for tier in tiers},
                    location=Location.parse(source.choice(zones)),
                    read_only=source.random() < 0.1,
                    leaving=source.random() < 0.1,
                    capacity=capacity,
                )
            )

    def plan(self) -> RebalancePlan:
        return plan_rebalance(self.ledgers, self.candidates, self.policy, tolerance=0.05)


def level_of(plan: RebalancePlan, tier: StorageHint) -> float:
    """Return the part of a tier that is used in all bookies together."""
    there = [each for each in plan.fullness if each.tier == tier]
    return sum(each.before for each in there) / max(1, sum(each.capacity for each in there))


def deviation(plan: RebalancePlan, tier: StorageHint, *, after: bool) -> float:
    """Return how far the worst bookie is from the level."""
    there = [(each.after if after else each.before) / each.capacity for each in plan.fullness if each.tier == tier]
    return max((abs(part - level_of(plan, tier)) for part in there), default=0.0)


def zones_of(ensemble: Sequence[Bookie], where: Mapping[Bookie, Location]) -> int:
    """Return how many zones some bookies certainly span."""
    return max(1, len({where[each].zone for each in ensemble} - {""}))


def check_moves(drawn: Drawn, plan: RebalancePlan) -> None:
    """Check each move by itself."""
    ledgers = {each.ledger_id: each for each in drawn.ledgers}
    there = {each.bookie: each for each in drawn.candidates}
    where = {each.bookie: each.location for each in drawn.candidates}
    for move in plan.moves:
        each = ledgers[move.ledger_id]
        assert each.closed
        assert move.source in each.ensemble
        assert move.target not in each.ensemble
        assert not there[move.target].read_only
        assert not there[move.target].leaving
        assert (move.size_bytes, move.tier) == (each.size_bytes, each.tier)
        made = tuple(move.target if member == move.source else member for member in each.ensemble)
        before = short_sets(each.ensemble, each.write_quorum, where, drawn.policy)
        assert len(short_sets(made, each.write_quorum, where, drawn.policy)) <= len(before)
        if each.write_quorum == len(each.ensemble):
            assert zones_of(made, where) >= zones_of(each.ensemble, where)
        assert not drawn.policy.strict or where[move.target].known


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("first", range(0, 600, 200))
def test_plans_hold_what_they_promise(first: int) -> None:
    planned = 0
    for seed in range(first, first + 200):
        drawn = Drawn(seed)
        plan = drawn.plan()
        planned += bool(plan.moves)
        check_moves(drawn, plan)
        assert len({each.ledger_id for each in plan.moves}) == len(plan.moves), "one place of a fragment at a time"
        assert plan.moved_bytes <= 0.05 * plan.all_bytes
        gained = {each.bookie for each in plan.fullness if each.during > each.before}
        assert gained == {each.target for each in plan.moves}
        for each in plan.fullness:
            came = sum(m.size_bytes for m in plan.moves if (m.target, m.tier) == (each.bookie, each.tier))
            went = sum(m.size_bytes for m in plan.moves if (m.source, m.tier) == (each.bookie, each.tier))
            assert not (came and went), "a bookie gets or gives"
            assert (each.during, each.after) == (each.before + came, each.before + came - went)
            assert not came or each.during <= 0.85 * each.capacity
        for each in plan.fullness:
            level = level_of(plan, each.tier)
            if abs(each.before / each.capacity - level) <= 0.05:
                assert abs(each.after / each.capacity - level) <= 0.05 + 1e-9, "it was level"
        for tier in StorageHint:
            assert deviation(plan, tier, after=True) <= deviation(plan, tier, after=False) + 1e-9
        shuffled = Random(seed)
        shuffled.shuffle(drawn.ledgers)
        shuffled.shuffle(drawn.candidates)
        assert drawn.plan() == plan
    assert planned > 50


def test_plans_do_not_undo_each_other() -> None:
    for seed in range(100):
        drawn = Drawn(seed)
        plans = 0
        while (plan := drawn.plan()).moves:
            drawn.ledgers, drawn.candidates = applied(plan, drawn.ledgers, drawn.candidates)
            plans += 1
            assert plans < 100
