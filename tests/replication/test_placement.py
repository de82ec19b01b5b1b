"""The choice of an ensemble's bookies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from random import Random
from typing import NamedTuple

import pytest

from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.locations import ANYWHERE, NOWHERE, Location, PlacementPolicy, write_sets
from pybk.replication.messages import UnderReplicated
from pybk.replication.placement import Candidate, Choice, choose, choose_first, fits, tier_of
from pybk.replication.quorum import Quorum
from tests.replication.driving import bookie
from tests.replication.zones import short_sets

NVME, SSD, HDD = StorageHint.NVME, StorageHint.SSD, StorageHint.HDD


def choice(
    candidates: Iterable[Candidate],
    places: tuple[int, ...] = (0, 1, 2),
    *,
    ensemble: tuple[Bookie, ...] = (),
    excluded: Iterable[Bookie] = (),
    hints: Iterable[StorageHint] = (),
    seed: int = 1,
    write_quorum: int = 0,
    policy: PlacementPolicy = ANYWHERE,
    located: Mapping[Bookie, Location] | None = None,
    full_above: float | None = None,
    size_bytes: int = 0,
    steps_max: int = 5000,
) -> Choice:
    return choose(
        candidates,
        places=places,
        ensemble=ensemble,
        excluded=frozenset(excluded),
        hints=frozenset(hints),
        source=Random(seed),
        write_quorum=write_quorum,
        policy=policy,
        located=located,
        full_above=full_above,
        size_bytes=size_bytes,
        steps_max=steps_max,
    )


def chosen(
    candidates: Iterable[Candidate],
    places: tuple[int, ...] = (0, 1, 2),
    *,
    ensemble: tuple[Bookie, ...] = (),
    excluded: Iterable[Bookie] = (),
    hints: Iterable[StorageHint] = (),
    seed: int = 1,
) -> dict[int, Bookie]:
    return choice(candidates, places, ensemble=ensemble, excluded=excluded, hints=hints, seed=seed).bookies


def standing(*labels: str, first: int = 0) -> list[Candidate]:
    """Return candidates with labels, numbered from ``first`` on."""
    return [
        Candidate(bookie(number), {NVME: 1 << 30}, location=Location.parse(label))
        for number, label in enumerate(labels, first)
    ]


def zones_of(bookies: Iterable[Bookie], candidates: Iterable[Candidate]) -> list[str]:
    """Return the zones in which bookies stand, sorted."""
    zones = {each.bookie: each.location.zone for each in candidates}
    return sorted(zones[each] for each in bookies)


def plain(*numbers: int) -> list[Candidate]:
    return [Candidate(bookie(number), {NVME: 1 << 30}) for number in numbers]


def test_each_place_gets_another_bookie_by_chance() -> None:
    seen = set()
    for seed in range(100):
        found = chosen(plain(0, 1, 2, 3, 4), seed=seed)
        assert sorted(found) == [0, 1, 2]
        assert len(set(found.values())) == 3
        seen |= set(found.values())
    assert len(seen) == 5


def test_the_same_chance_chooses_the_same_whatever_the_order() -> None:
    assert chosen(plain(0, 1, 2, 3, 4)) == chosen(plain(4, 2, 0, 3, 1))


def test_fewer_bookies_are_fewer_places() -> None:
    assert len(chosen(plain(0, 1))) == 2
    assert chosen([]) == {}


def test_members_excluded_and_read_only_bookies_are_left_out() -> None:
    candidates = [*plain(0, 1, 2, 3), Candidate(bookie(4), {}, read_only=True), *plain(5)]
    ensemble = (bookie(0), bookie(1), bookie(2))
    assert chosen(candidates, (1,), ensemble=ensemble, excluded=[bookie(1), bookie(3)]) == {1: bookie(5)}


def test_a_bookie_keeps_its_place_if_there_is_no_other() -> None:
    ensemble = (bookie(0), bookie(1), bookie(2))
    assert chosen(plain(0, 1, 2), (1,), ensemble=ensemble) == {1: bookie(1)}
    assert chosen(plain(0, 1, 2, 3), (1,), ensemble=ensemble) == {1: bookie(3)}
    assert chosen(plain(0, 1, 2), (1,), ensemble=ensemble, excluded=[bookie(1)]) == {}


def test_another_instance_takes_only_its_own_place() -> None:
    again = Candidate(Bookie("b1", b"n" * 16), {NVME: 1})
    ensemble = (bookie(0), bookie(1), bookie(2))
    assert chosen([again], (0,), ensemble=ensemble) == {}
    assert chosen([again], (0, 1), ensemble=ensemble) == {1: again.bookie}


def test_the_local_bookie_comes_first() -> None:
    candidates = [*plain(0, 1, 2, 3), Candidate(bookie(4), {NVME: 1}, local=True)]
    assert all(bookie(4) == chosen(candidates, seed=seed)[0] for seed in range(20))


def test_hints_are_advice() -> None:
    candidates = [*plain(0, 1, 2), Candidate(bookie(3), {HDD: 1}), Candidate(bookie(4), {HDD: 1, NVME: 1})]
    for seed in range(20):
        found = chosen(candidates, hints=[HDD], seed=seed)
        assert {found[0], found[1]} == {bookie(3), bookie(4)}
        assert len(found) == 3, "without the tier is better than not at all"


def test_racks_are_mixed() -> None:
    candidates = [Candidate(bookie(n), {NVME: 1}, location=Location.parse("/r1" if n < 4 else "/r2")) for n in range(6)]
    racks = {each.bookie: each.location for each in candidates}
    for seed in range(20):
        found = chosen(candidates, (0, 1, 2, 3), seed=seed)
        assert Counter(racks[each] for each in found.values()) == {Location("r1"): 2, Location("r2"): 2}
        ensemble = (bookie(0), bookie(4), bookie(1))
        assert chosen(candidates, (1,), ensemble=ensemble, excluded=[bookie(4)], seed=seed) == {1: bookie(5)}


@pytest.mark.parametrize("hints", [[], [NVME]])
def test_free_space_and_load_weigh_but_not_without_bound(hints: list[StorageHint]) -> None:
    busy = [Candidate(bookie(5), {NVME: 1 << 30}, 9.0), Candidate(bookie(6), {NVME: 1 << 30}, 0.5)]
    candidates = [*plain(0, 1, 2, 3), Candidate(bookie(4), {NVME: 1 << 60}), *busy]
    drawn = Counter(chosen(candidates, (0,), hints=hints, seed=seed)[0] for seed in range(3000))
    assert 2 < drawn[bookie(4)] / drawn[bookie(0)] < 4
    assert drawn[bookie(5)] < drawn[bookie(0)] / 5
    assert drawn[bookie(0)] / 2 < drawn[bookie(6)] < drawn[bookie(0)]


# ---- zones -----------------------------------------------------------------------------------------------------------


def test_the_zone_counts_before_the_hint_and_the_rack_after_it_and_the_local_bookie_last() -> None:
    here = standing("a/r1", "a/r1", "a/r2", "b/r1")
    near, rack, zone = here[1], here[2], here[3]

    def second(*others: Candidate) -> Bookie:
        return chosen([here[0], *others], (1,), ensemble=(bookie(0), bookie(9)), hints=[HDD])[1]

    hinted = Candidate(near.bookie, {HDD: 1}, location=near.location)
    local = Candidate(near.bookie, near.tiers, location=near.location, local=True)
    assert second(zone, hinted) == zone.bookie
    assert second(rack, hinted) == hinted.bookie
    assert second(rack, local) == rack.bookie
    assert second(local, Candidate(bookie(5), {NVME: 1 << 50}, location=near.location)) == local.bookie


def test_the_local_bookie_has_a_place_in_each_new_ensemble() -> None:
    candidates = [*standing("a/r1", "a/r2", "b/r1", "b/r2", "c/r1"), *standing("c/r1", first=5)]
    candidates[3] = Candidate(bookie(3), {NVME: 1}, location=Location("b", "r2"), local=True)
    for seed in range(20):
        found = choice(candidates, seed=seed, policy=PlacementPolicy(3, True))
        assert found.bookies[0] == bookie(3)
        assert zones_of(found.bookies.values(), candidates) == ["a", "b", "c"]


def test_hosts_are_mixed_where_racks_are_the_same() -> None:
    candidates = standing("a/r/h1", "a/r/h1", "a/r/h1", "a/r/h2", "a/r/h3")
    for seed in range(20):
        assert {bookie(3), bookie(4)} < set(chosen(candidates, seed=seed).values())


def test_bookies_without_a_label_crowd_each_other() -> None:
    candidates = standing("", "", "", "a", "b")
    for seed in range(20):
        found = set(chosen(candidates, seed=seed).values())
        assert len(found & {bookie(3), bookie(4)}) >= 1
        assert len(found - {bookie(3), bookie(4)}) <= 2
        last = chosen(candidates, (2,), ensemble=(bookie(0), bookie(1), bookie(9)), seed=seed)
        assert last[2] in (bookie(3), bookie(4))
        joined = chosen(standing("a", "", "b"), (1,), ensemble=(bookie(0), bookie(9)), seed=seed)
        assert joined[1] == bookie(2), "a bookie without a label may stand in the zone that is used"


def test_a_set_is_found_where_the_greedy_choice_ends_without_one() -> None:
    """BookKeeper 3722: the first bookies are chosen without regard to the places that come after them."""
    # Only b and b may be at places that share no write set, and each place alone would rather have the unused zone.
    candidates = standing("a", "b", "b", "c")
    for seed in range(50):
        found = choice(candidates, (0, 1, 2, 3), seed=seed, write_quorum=2, policy=PlacementPolicy(2, True))
        assert (len(found.bookies), found.short) == (4, 0)


def test_replacements_do_not_pile_up_in_the_rack_of_those_that_died() -> None:
    """BookKeeper 3707: replacements come from the rack of the dead bookie, and end in one rack."""
    candidates = standing("a/r1", "a/r2", "a/r3", "a/r3", "a/r3", "a/r4", "a/r5")
    ensemble = (bookie(0), bookie(20), bookie(21))
    located = {bookie(20): Location("a", "r3"), bookie(21): Location("a", "r3")}
    racks = {each.bookie: each.location.rack for each in candidates}
    for seed in range(50):
        found = choice(candidates, (1, 2), ensemble=ensemble, excluded=ensemble[1:], seed=seed, located=located)
        assert len({"r1", *(racks[each] for each in found.bookies.values())}) == 3
    zoned = standing("a", "b", "b", "b", "b", "c")
    for seed in range(50):
        ensemble = (bookie(0), bookie(20), bookie(5))
        found = choice(zoned, (1,), ensemble=ensemble, seed=seed, policy=PlacementPolicy(3))
        assert zones_of(found.bookies.values(), zoned) == ["b"]


def test_bookies_that_are_away_stand_where_they_stood() -> None:
    """BookKeeper 2642, 4439: they fall into the default rack, so that the next choice shares their real one."""
    ensemble = (bookie(0), bookie(20), bookie(21))
    located = {bookie(20): Location("b")}
    for seed in range(20):
        found = choice(standing("a", "b", "c"), (2,), ensemble=ensemble, seed=seed, located=located)
        assert found.bookies == {2: bookie(2)}
    found = choice(standing("a", "b"), (2,), ensemble=ensemble, policy=PlacementPolicy(3, True))
    assert found.bookies == {2: bookie(1)}, "where place 1 stands is not known, so that two zones are all there can be"
    found = choice(standing("a", "b"), (2,), ensemble=ensemble, policy=PlacementPolicy(3, True), located=located)
    assert found.bookies == {}


def test_a_strict_policy_leaves_places_empty_and_a_soft_one_counts() -> None:
    candidates = standing("a", "a", "b", "b")
    assert len(choice(candidates, policy=PlacementPolicy(3, True)).bookies) == 2
    soft = choice(candidates, policy=PlacementPolicy(3))
    assert (len(soft.bookies), soft.short) == (3, 1)
    assert set(zones_of(soft.bookies.values(), candidates)) == {"a", "b"}


def test_bookies_without_a_label_are_not_chosen_by_a_strict_policy() -> None:
    """BookKeeper 1941: bookies of the default rack are chosen although the minimum of racks is enforced."""
    candidates = standing("a", "", "", "b")
    for min_zones in (1, 2):
        found = choice(candidates, policy=PlacementPolicy(min_zones, True))
        assert set(found.bookies.values()) == {bookie(0), bookie(3)}
    assert len(choice(candidates, policy=PlacementPolicy(2)).bookies) == 3


def test_a_strict_policy_asks_of_a_replacement_only_what_those_that_stay_allow() -> None:
    """A place is filled although its write set was short before and stays so: an entry more than it could be short."""
    ensemble = (bookie(0), bookie(1), bookie(9))
    candidates = standing("a", "a", "b", "a")
    found = choice(candidates, (2,), ensemble=ensemble, excluded=ensemble[2:], policy=PlacementPolicy(3, True))
    assert (found.bookies, found.short) == ({2: bookie(2)}, 1)
    found = choice(standing("a", "a"), (2,), ensemble=ensemble, policy=PlacementPolicy(3, True))
    assert found.bookies == {}


def test_the_budget_counts_steps_and_its_end_is_reported() -> None:
    zones = [f"z{number % 4}" for number in range(12)]
    found = choice(standing(*zones), tuple(range(11)), write_quorum=4, policy=PlacementPolicy(4), steps_max=30)
    assert found.cut_off
    assert len(found.bookies) == 11, "the best so far is better than none"
    again = choice(standing(*zones), tuple(range(11)), write_quorum=4, policy=PlacementPolicy(4), steps_max=30)
    assert found == again
    found = choice(standing(*zones), tuple(range(12)), write_quorum=4, policy=PlacementPolicy(4, True))
    assert (len(found.bookies), found.cut_off) == (12, False)


# ---- against all combinations ----------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """A random cluster, and what is asked of it."""

    candidates: list[Candidate]
    places: tuple[int, ...]
    ensemble: tuple[Bookie, ...]
    excluded: frozenset[Bookie]
    located: dict[Bookie, Location]
    write_quorum: int
    policy: PlacementPolicy

    def choice(self, seed: int) -> Choice:
        return choice(
            self.candidates,
            self.places,
            ensemble=self.ensemble,
            excluded=self.excluded,
            seed=seed,
            write_quorum=self.write_quorum,
            policy=self.policy,
            located=self.located,
        )

    def options(self, place: int) -> list[Bookie | None]:
        """Return the bookies that may take a place, by the definition; None: it stays empty."""
        names = {each.bookie_id: number for number, each in enumerate(self.ensemble)}
        return [
            each.bookie
            for each in self.candidates
            if each.bookie not in self.excluded and not each.read_only and not each.leaving
            if names.get(each.bookie.bookie_id, place) == place
            if each.location.known or not self.policy.strict or each.bookie in self.ensemble
        ] + [None]

    def shorts(self, filled: Mapping[int, Bookie | None]) -> list[int]:
        """Return by how many zones each write set is short, if each empty place were a further zone."""
        where = self.located | {each.bookie: each.location for each in self.candidates}
        size = len(self.ensemble) or len(self.places)
        needed = self.policy.needed(self.write_quorum)
        shorts = []
        for places in write_sets(size, self.write_quorum):
            zones: set[object] = set()
            for place in places:
                there = filled.get(place) if place in self.places else self.ensemble[place]
                zones.add(place if there is None else where.get(there, NOWHERE).zone)
            shorts.append(max(0, needed - max(1, len(zones - {""}))))
        return shorts

    def best(self) -> tuple[int, int]:
        """Return how many places stay empty, and by how many zones write sets are short, with the best choice."""
        allowed = sum(self.shorts({})) if self.policy.strict else 1 << 30
        found = []
        for bookies in product(*map(self.options, self.places)):
            taken = [each for each in bookies if each is not None]
            if len(set(taken)) == len(taken):
                short = sum(self.shorts(dict(zip(self.places, bookies, strict=True))))
                if short <= allowed:
                    found.append((len(bookies) - len(taken), short))
        return min(found)


def random_cluster(seed: int) -> Cluster:
    source = Random(seed)
    count, size = source.randrange(8), source.randrange(1, 5)
    zones = source.choice(["ab", "abc", ["a", "b", ""], ["a", "b", "c", ""]])
    candidates = [
        Candidate(
            Bookie(f"b{number}", bytes([number if source.random() < 0.9 else 99]) * 16),
            {NVME: source.randrange(1 << 30)},
            location=Location(source.choice(zones)),
            read_only=source.random() < 0.1,
            leaving=source.random() < 0.1,
        )
        for number in range(count)
    ]
    ensemble = tuple(map(bookie, source.sample(range(10), size))) if source.random() < 0.6 else ()
    places = tuple(sorted(source.sample(range(size), source.randrange(1, size + 1)))) if ensemble else range(size)
    there = {each.bookie for each in candidates}
    return Cluster(
        candidates,
        tuple(places),
        ensemble,
        frozenset(each for each in ensemble if source.random() < 0.5),
        {each: Location(source.choice("abc")) for each in ensemble if each not in there and source.random() < 0.7},
        source.randrange(1, size + 1),
        PlacementPolicy(source.randrange(1, 4), source.random() < 0.5),
    )


@pytest.mark.parametrize("first", range(0, 1200, 300))
def test_no_choice_is_worse_than_the_best_of_all_combinations(first: int) -> None:
    for seed in range(first, first + 300):
        cluster = random_cluster(seed)
        found = cluster.choice(seed)
        empty, short = cluster.best()
        filled = found.bookies
        assert not found.cut_off
        assert len(set(filled.values())) == len(filled)
        assert all(each in cluster.options(place) for place, each in filled.items())
        assert len(cluster.places) - len(filled) == empty, cluster
        if cluster.policy.strict:
            assert sum(cluster.shorts(filled)) <= sum(cluster.shorts({})), cluster
        else:
            assert sum(cluster.shorts(filled)) == short, cluster
        assert found.short == sum(each > 0 for each in cluster.shorts(filled))
        if empty == 0:
            size = len(cluster.ensemble) or len(cluster.places)
            made = tuple(filled[place] if place in filled else cluster.ensemble[place] for place in range(size))
            where = cluster.located | {each.bookie: each.location for each in cluster.candidates}
            lacking = short_sets(made, cluster.write_quorum, where, cluster.policy)
            assert len(lacking) == found.short
            assert (short == 0) is (not lacking), cluster


def test_the_bookies_that_fit_a_place_are_those_that_may_be_chosen() -> None:
    refused = 0
    for seed in range(600):
        cluster = random_cluster(seed)
        if not cluster.ensemble:
            continue
        place = cluster.places[0]
        cluster = cluster._replace(places=(place,), excluded=frozenset([cluster.ensemble[place]]))
        fitting = {
            best: {
                each.bookie
                for each in cluster.candidates
                if fits(
                    each.bookie,
                    cluster.candidates,
                    place=place,
                    ensemble=cluster.ensemble,
                    hints=frozenset(),
                    write_quorum=cluster.write_quorum,
                    policy=cluster.policy,
                    located=cluster.located,
                    among_best=best,
                )
            }
            for best in (True, False)
        }
        drawn = {cluster.choice(again).bookies.get(place) for again in range(30)} - {None}
        assert drawn <= fitting[True] <= fitting[False]
        assert bool(drawn) is bool(fitting[False])
        options = {each for each in cluster.options(place) if each is not None}
        limit = sum(cluster.shorts({})) if cluster.policy.strict else 1 << 30
        assert fitting[False] == {each for each in options if sum(cluster.shorts({place: each})) <= limit}
        refused += fitting[False] != options
    assert refused > 5


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_bookies_above_the_target_line_get_no_copies() -> None:
    def tiered(number: int, **used: int) -> Candidate:
        full = dict.fromkeys(StorageHint, 1000)
        return Candidate(bookie(number), {tier: 1000 - used.get(tier.value, 0) for tier in full}, capacity=full)

    candidates = [tiered(0, nvme=850), tiered(1, nvme=851), tiered(2, hdd=990), tiered(3, nvme=849)]
    found = choice(candidates, full_above=0.85)
    assert set(found.bookies.values()) == {bookie(0), bookie(2), bookie(3)}
    assert found.above_line == (bookie(1),)
    found = choice(candidates, full_above=0.85, size_bytes=1)
    assert set(found.bookies.values()) == {bookie(2), bookie(3)}, "it would be above the line with the copy"
    found = choice(candidates, full_above=0.85, hints=[HDD])
    assert found.above_line == (bookie(2),), "the tier where the ledger would live counts"
    assert len(choice(candidates, (0, 1, 2, 3)).bookies) == 4, "writers may fill bookies"
    assert len(choice(plain(0, 1, 2), full_above=0.0).bookies) == 3, "a capacity that is not known limits nothing"


def test_a_ledger_lives_in_the_first_hinted_tier_that_a_bookie_has() -> None:
    assert tier_of(frozenset([SSD, HDD]), [HDD, SSD, NVME]) == SSD
    assert tier_of(frozenset([SSD]), [HDD, NVME]) == NVME
    assert tier_of(frozenset(), [HDD]) == HDD
    assert tier_of(frozenset(), []) is None


def test_read_only_and_leaving_bookies_are_never_chosen() -> None:
    candidates = [
        Candidate(bookie(0), {}, read_only=True),
        Candidate(bookie(1), {}, leaving=True),
        *plain(2),
    ]
    assert chosen(candidates) == {0: bookie(2)}
    assert chosen(candidates, (0,), ensemble=(bookie(1),)) == {0: bookie(2)}, "nor does one keep its place"


# ---- members that are away -------------------------------------------------------------------------------------------


def first(
    registered: Iterable[Candidate],
    away: Iterable[Candidate],
    shape: tuple[int, int, int] = (3, 3, 2),
    policy: PlacementPolicy = ANYWHERE,
) -> Choice:
    """Choose the first ensemble of a ledger."""
    known = [*registered, *map(gone, away)]
    return choose_first(known, quorum=Quorum(*shape), hints=frozenset(), source=Random(1), policy=policy)


def gone(candidate: Candidate) -> Candidate:
    """Return a candidate that is known by its cookie alone."""
    return Candidate(candidate.bookie, {}, location=candidate.location, away=True)


def test_a_bookie_that_is_away_is_a_member_where_too_few_are_registered() -> None:
    choice = first(standing("", ""), standing("", first=2))
    assert set(choice.bookies.values()) == {bookie(0), bookie(1), bookie(2)}
    assert choice.away == {bookie(2)}
    assert choice.missed == (UnderReplicated(bookie(2), 0),)


def test_no_bookie_that_is_away_is_taken_while_registered_ones_suffice() -> None:
    choice = first(standing("", "", ""), standing("", first=3))
    assert set(choice.bookies.values()) == {bookie(0), bookie(1), bookie(2)}
    assert (choice.away, choice.missed) == (frozenset(), ())


def test_each_write_set_keeps_an_ack_quorum_of_registered_bookies() -> None:
    assert len(first(standing("", ""), standing("", first=2), (3, 3, 3)).bookies) == 2, "none may be away"
    assert len(first(standing(""), standing("", "", first=1)).bookies) == 1, "one is no ack quorum"
    assert len(first(standing("", "", ""), standing("", "", first=3), (5, 3, 2)).bookies) == 3
    for shape, here in (((5, 3, 2), 4), ((6, 3, 2), 4), ((7, 7, 3), 3), ((4, 4, 2), 2), ((8, 4, 2), 4)):
        quorum = Quorum(*shape)
        choice = first(standing(*[""] * here), standing(*[""] * shape[0], first=here), shape)
        assert len(choice.bookies) == shape[0]
        live = sum(1 << place for place, each in choice.bookies.items() if each not in choice.away)
        assert (live.bit_count(), quorum.writable(live)) == (here, True), shape


def test_a_bookie_that_takes_no_entries_is_no_member_while_others_do() -> None:
    full = Candidate(bookie(0), {NVME: 1}, read_only=True)
    draining = Candidate(bookie(1), {NVME: 1}, leaving=True)
    choice = first([full, draining, *standing("", "", "", first=2)], standing("", first=5))
    assert set(choice.bookies.values()) == {bookie(2), bookie(3), bookie(4)}
    assert choice.away == frozenset()


def test_a_read_only_bookie_is_a_member_that_gets_nothing_where_too_few_take_entries() -> None:
    full = Candidate(bookie(2), {NVME: 1}, read_only=True)
    choice = first([*standing("", ""), full], ())
    assert set(choice.bookies.values()) == {bookie(0), bookie(1), bookie(2)}
    assert choice.missed == (UnderReplicated(bookie(2), 0),)
    assert len(first([*standing(""), full], standing("", first=1)).bookies) == 1, "one is no ack quorum"
    assert len(first([*standing("", ""), full], (), (3, 3, 3)).bookies) == 2, "none may be away"


def test_a_bookie_that_leaves_is_no_member_though_it_is_read_only_or_away() -> None:
    for leaves in (
        Candidate(bookie(2), {NVME: 1}, read_only=True, leaving=True),
        Candidate(bookie(2), {}, away=True, leaving=True),
    ):
        assert len(first([*standing("", ""), leaves], ()).bookies) == 2
        with_another = first([*standing("", ""), leaves], standing("", first=3))
        assert with_another.away == {bookie(3)}


def test_a_strict_policy_judges_a_bookie_that_is_away_by_its_cookie() -> None:
    strict = PlacementPolicy(3, strict=True)
    here = standing("a", "b")
    assert first(here, standing("c", first=2), policy=strict).away == {bookie(2)}
    assert len(first(here, standing("a", "", first=2), policy=strict).bookies) == 2, "a zone again, and no label"
    third = first([*here, *standing("a", first=2)], standing("b", "c", first=3), policy=strict)
    assert third.away == {bookie(4)}, "as many bookies as places are registered, and in too few zones"
