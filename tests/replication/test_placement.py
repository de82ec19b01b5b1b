"""The choice of an ensemble's bookies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

from pybk.flags import StorageHint
from pybk.ledger import Bookie
from pybk.replication.placement import Candidate, choose
from tests.replication.driving import bookie

NVME, HDD = StorageHint.NVME, StorageHint.HDD


def chosen(
    candidates: Iterable[Candidate],
    places: tuple[int, ...] = (0, 1, 2),
    *,
    ensemble: tuple[Bookie, ...] = (),
    excluded: Iterable[Bookie] = (),
    hints: Iterable[StorageHint] = (),
    seed: int = 1,
) -> dict[int, Bookie]:
    return choose(
        candidates,
        places=places,
        ensemble=ensemble,
        excluded=frozenset(excluded),
        hints=frozenset(hints),
        source=Random(seed),
    )


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
    candidates = [Candidate(bookie(n), {NVME: 1}, rack="/r1" if n < 4 else "/r2") for n in range(6)]
    racks = {each.bookie: each.rack for each in candidates}
    for seed in range(20):
        found = chosen(candidates, (0, 1, 2, 3), seed=seed)
        assert Counter(racks[each] for each in found.values()) == {"/r1": 2, "/r2": 2}
        ensemble = (bookie(0), bookie(4), bookie(1))
        assert chosen(candidates, (1,), ensemble=ensemble, excluded=[bookie(4)], seed=seed) == {1: bookie(5)}


def test_free_space_and_load_weigh_but_not_without_bound() -> None:
    candidates = [*plain(0, 1, 2, 3), Candidate(bookie(4), {NVME: 1 << 60}), Candidate(bookie(5), {NVME: 1 << 30}, 9.0)]
    drawn = Counter(chosen(candidates, (0,), seed=seed)[0] for seed in range(3000))
    assert 2 < drawn[bookie(4)] / drawn[bookie(0)] < 4
    assert drawn[bookie(5)] < drawn[bookie(0)] / 5
