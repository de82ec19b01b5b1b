"""Quorum arithmetic, for all sizes up to seven bookies."""

from __future__ import annotations

from itertools import combinations

import pytest

from pybk.replication.quorum import Quorum, places

SHAPES = [
    Quorum(size, write, ack) for size in range(1, 8) for write in range(1, size + 1) for ack in range(1, write + 1)
]


def bits(members: tuple[int, ...]) -> int:
    return sum(1 << member for member in members)


@pytest.mark.parametrize("quorum", SHAPES, ids=str)
def test_coverage_agrees_with_its_definition(quorum: Quorum) -> None:
    """No write set has an ack quorum made of bookies that did not answer alone (windows form)."""
    for known in range(1 << quorum.ensemble_size):
        unsafe = any(
            not known & bits(some)
            for entry_id in range(quorum.ensemble_size)
            for some in combinations(quorum.write_set(entry_id), quorum.ack_quorum)
        )
        assert quorum.covered(known) is not unsafe


@pytest.mark.parametrize("size", range(1, 8))
def test_four_statements_of_coverage_are_one(size: int) -> None:
    for ack in range(1, size + 1):
        everyone = range(size)
        for yes in range(1 << size):
            count = yes.bit_count()
            subsets = [bits(some) for some in combinations(everyone, ack)]
            statements = {
                count >= size - ack + 1,
                all(subset & yes for subset in subsets),
                size - count < ack,
                not any(subset & yes == 0 for subset in subsets),
                Quorum(size, size, ack).covered(yes),
            }
            assert len(statements) == 1


@pytest.mark.parametrize("quorum", SHAPES, ids=str)
def test_covering_the_whole_fragment_implies_coverage(quorum: Quorum) -> None:
    for known in range(1 << quorum.ensemble_size):
        if known.bit_count() >= quorum.ensemble_size - quorum.ack_quorum + 1:
            assert quorum.covered(known)


@pytest.mark.parametrize(
    ("shape", "negatives", "fewest", "any_set"),
    [
        ((2, 2, 1), 2, 2, 2),
        ((3, 2, 2), 1, 2, 2),
        ((3, 3, 1), 3, 3, 3),
        ((3, 3, 2), 2, 2, 2),
        ((3, 3, 3), 1, 1, 1),
        ((4, 2, 2), 1, 2, 3),
        ((4, 3, 2), 2, 3, 3),
        ((5, 3, 2), 2, 4, 4),
        ((5, 5, 3), 3, 3, 3),
        ((6, 2, 2), 1, 3, 5),
        ((6, 3, 2), 2, 4, 5),
    ],
)
def test_the_table(shape: tuple[int, int, int], negatives: int, fewest: int, any_set: int) -> None:
    quorum = Quorum(*shape)
    assert quorum.negatives_needed == negatives
    covering = [known for known in range(1 << quorum.ensemble_size) if quorum.covered(known)]
    assert min(known.bit_count() for known in covering) == fewest
    by_size = [
        all(quorum.covered(bits(some)) for some in combinations(range(quorum.ensemble_size), count))
        for count in range(quorum.ensemble_size + 1)
    ]
    assert by_size.index(True) == any_set


@pytest.mark.parametrize("quorum", SHAPES, ids=str)
def test_places_and_residues_say_the_same(quorum: Quorum) -> None:
    size = quorum.ensemble_size
    for entry_id in range(2 * size):
        write_set = quorum.write_set(entry_id)
        assert len(set(write_set)) == quorum.write_quorum
        assert write_set[0] == entry_id % size
        assert list(places(quorum.mask(entry_id))) == sorted(write_set)
        for place in range(size):
            assert (place in write_set) is (entry_id % size in quorum.residues(place))
    masks = quorum.masks()
    assert masks == tuple(quorum.mask(residue) for residue in range(len(masks)))
    assert len(masks) == (1 if size == quorum.write_quorum else size)


def test_ids_beyond_32_bits_have_places() -> None:
    quorum = Quorum(5, 3, 2)
    for entry_id in (2**31 - 1, 2**31, 2**32 + 3, 2**62 + 1):
        assert quorum.write_set(entry_id) == tuple((entry_id + i) % 5 for i in range(3))


@pytest.mark.parametrize("quorum", SHAPES, ids=str)
def test_acknowledged_means_by_enough_of_each_write_set(quorum: Quorum) -> None:
    for acks in range(1 << quorum.ensemble_size):
        by_hand = all(
            sum(acks >> place & 1 for place in quorum.write_set(residue)) >= quorum.ack_quorum
            for residue in range(quorum.ensemble_size)
        )
        assert quorum.acked(acks, quorum.masks()) is by_hand
        assert quorum.writable(acks) is by_hand


@pytest.mark.parametrize("quorum", SHAPES, ids=str)
def test_the_fewest_live_bookies_are_those_of_some_writable_set(quorum: Quorum) -> None:
    everyone = range(1 << quorum.ensemble_size)
    assert quorum.live_min == min(live.bit_count() for live in everyone if quorum.writable(live))


@pytest.mark.parametrize("quorum", SHAPES, ids=str)
def test_an_acknowledged_entry_is_at_worst_on_the_bookies_that_do_not_count(quorum: Quorum) -> None:
    for kept in range(1 << quorum.ensemble_size):
        holders = (bits(some) for some in combinations(quorum.write_set(0), quorum.ack_quorum))
        assert quorum.kept(quorum.mask(0), kept) == min((each & kept).bit_count() for each in holders)
