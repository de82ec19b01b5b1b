"""Known entries narrow a search, and never mislead it."""

from __future__ import annotations

from random import Random

from pybk.streams.ledger_steps import LEDGERS_MAX, PLACES_MAX, EntryPlaces


def test_nothing_is_known_at_first() -> None:
    assert EntryPlaces().around(1, 5) == (None, None)


def test_a_search_begins_between_the_nearest_known_entries() -> None:
    places, source = EntryPlaces(), Random(1)
    firsts = sorted(source.sample(range(100_000), 20_000))
    for _ in range(PLACES_MAX * 2):
        entry = source.randrange(20_000)
        places.learn(7, firsts[entry], entry)
        seq = source.randrange(100_000)
        before, after = places.around(7, seq)
        if before is not None:
            first, found = before
            assert firsts[found] == first <= seq
        if after is not None:
            assert firsts[after] > seq
    places.learn(7, firsts[5], 5)
    assert places.around(7, firsts[5])[0] == (firsts[5], 5)


def test_ledgers_that_are_not_searched_are_forgotten() -> None:
    places = EntryPlaces()
    for ledger in range(LEDGERS_MAX + 1):
        places.learn(ledger, 1, 1)
        places.around(0, 1)
    assert places.around(0, 1) == ((1, 1), None)
    assert places.around(1, 1) == (None, None)
