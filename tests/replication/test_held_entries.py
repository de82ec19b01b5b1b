"""Ensembles that are found again from the entries that bookies hold."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pybk.ledger.ledger_metadata import Bookie, Fragment
from pybk.replication.held_entries import HeldRun, Quorums, ensembles_hold, find_ensembles, unknown_bookie
from pybk.replication.quorum import Quorum

BOOKIES = [Bookie(name, name.encode() * 16) for name in "abcdefgh"]
A, B, C, D, E = BOOKIES[:5]


def all_of(*entries: tuple[int, int]) -> list[HeldRun]:
    return [HeldRun(first, 1, last - first + 1) for first, last in entries]


def test_a_replaced_bookie_begins_a_fragment() -> None:
    held = {A: all_of((0, 99)), B: all_of((0, 59)), C: all_of((0, 99)), D: all_of((60, 99))}
    found = find_ensembles(Quorums(3, 3, 2), held)
    assert [(each.first_entry_id, set(each.ensemble)) for each in found.fragments] == [(0, {A, B, C}), (60, {A, C, D})]
    assert (found.last, found.nowhere, found.missing, found.undecidable) == (99, (), (), False)


def test_lanes_show_the_places() -> None:
    held = {
        A: [HeldRun(0, 3, 34), HeldRun(2, 3, 33)],
        B: [HeldRun(0, 3, 20), HeldRun(1, 3, 20)],
        C: [HeldRun(1, 3, 33), HeldRun(2, 3, 33)],
        D: [HeldRun(60, 3, 14), HeldRun(61, 3, 13)],
    }
    found = find_ensembles(Quorums(3, 2, 2), held)
    assert found.fragments == (Fragment(0, (A, B, C)), Fragment(60, (A, D, C)))


def test_a_place_of_which_too_little_is_left_gets_a_bookie_that_never_denies() -> None:
    whole, short = all_of((0, 99)), all_of((0, 89))
    lost = find_ensembles(Quorums(3, 3, 2), {A: whole, B: short}, fillers=[A, B, E])
    assert lost.fragments == (Fragment(0, (A, B, unknown_bookie(2))),)
    assert not lost.undecidable
    assert set(lost.missing) == {(B, 90), (unknown_bookie(2), 0)}
    # Here each entry is on two bookies, so that the denial of a third proves nothing.
    assert find_ensembles(Quorums(3, 3, 2), {A: whole, B: whole}, fillers=[A, B, E]).fragments[0].ensemble[2] == E
    assert find_ensembles(Quorums(3, 3, 2), {A: whole, B: whole}).fragments[0].ensemble[2] == unknown_bookie(2)
    alone = find_ensembles(Quorums(3, 3, 2), {A: whole}, fillers=[A, B, E])
    assert alone.undecidable


def test_a_ledger_without_entries_has_the_bookies_that_fenced_it() -> None:
    found = find_ensembles(Quorums(3, 3, 2), {A: [], B: [], C: []}, fillers=[A, B, C, D])
    assert found.fragments == (Fragment(0, (A, B, C)),)
    assert (found.last, found.nowhere, found.missing, found.undecidable) == (-1, (), (), False)


def test_entries_that_nobody_holds_are_named() -> None:
    found = find_ensembles(Quorums(1, 1, 1), {A: all_of((0, 9)), B: all_of((15, 19))})
    assert found.nowhere == ((10, 14),)
    closed = find_ensembles(Quorums(1, 1, 1), {A: all_of((0, 9))}, last=12)
    assert closed.nowhere == ((10, 12),)
    assert closed.last == 12


def test_ensembles_that_would_deny_what_others_hold_are_not_sound() -> None:
    quorums, fragments = Quorums(3, 3, 2), (Fragment(0, (A, B, C)),)
    whole, short = all_of((0, 9)), all_of((0, 4))
    assert ensembles_hold(quorums, fragments, {A: whole, B: whole, C: short}, {A, B, C}, 9) == (True, ((C, 5),))
    assert not ensembles_hold(quorums, fragments, {A: whole, B: short, C: short, D: whole}, {A, B, C, D}, 9)[0]
    # The others are lost, so they cannot deny anything.
    assert ensembles_hold(quorums, fragments, {A: whole, D: whole}, {A, D}, 9)[0]
    assert not ensembles_hold(quorums, fragments, {D: whole}, {D}, 9)[0]


@given(st.integers(1, 5), st.data(), st.randoms(use_true_random=False))
def test_every_entry_is_found_on_all_bookies_that_hold_it(size: int, data: st.DataObject, rng: random.Random) -> None:
    write = data.draw(st.integers(1, size))
    quorums = Quorums(size, write, (write + 1) // 2)
    ensemble, first, held = rng.sample(BOOKIES, size), 0, dict[Bookie, list[HeldRun]]()
    for _ in range(data.draw(st.integers(1, 4))):
        last = first + data.draw(st.integers(0, 12))
        for entry_id in range(first, last + 1):
            for place in Quorum(*quorums).write_set(entry_id):
                held.setdefault(ensemble[place], []).append(HeldRun(entry_id, 1, 1))
        first = last + 1
        ensemble[rng.randrange(size)] = rng.choice([each for each in BOOKIES if each not in ensemble])
    found = find_ensembles(quorums, held, fillers=BOOKIES)
    assert found.nowhere == ()
    for entry_id in range(first):
        fragment = next(each for each in reversed(found.fragments) if each.first_entry_id <= entry_id)
        for place in Quorum(*quorums).write_set(entry_id):
            assert HeldRun(entry_id, 1, 1) in held[fragment.ensemble[place]]
