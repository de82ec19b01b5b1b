"""Labels of locations, and whether an ensemble spans the zones that a policy asks for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import pytest

from pybk.errors import UsageError
from pybk.replication.locations import NOWHERE, Location, PlacementPolicy, Verdict, judge, span, write_sets
from tests.replication.driving import bookie


def verdict(zones: Sequence[str], write_quorum: int, min_zones: int) -> Verdict:
    """Judge an ensemble whose bookies stand in zones; "" is a bookie without a label."""
    ensemble = tuple(bookie(place) for place in range(len(zones)))
    locations = {bookie(place): Location(zone) for place, zone in enumerate(zones) if zone}
    return judge(ensemble, write_quorum, locations, PlacementPolicy(min_zones))


@pytest.mark.parametrize(
    ("label", "location"),
    [
        ("", NOWHERE),
        ("r1", Location("r1")),
        ("/r1", Location("r1")),
        ("r1/", Location("r1")),
        ("/room/rack", Location("room", "rack")),
        ("zone/rack/host", Location("zone", "rack", "host")),
    ],
)
def test_the_first_part_of_a_label_is_the_zone(label: str, location: Location) -> None:
    assert Location.parse(label) == Location.registered(label) == location
    assert str(location) == label.strip("/")
    assert location.known is bool(label)


@pytest.mark.parametrize("label", ["///", "a//b", "a//", "//a", "a/b/c/d", " a", "a/b ", "a\n", "a/\x00", "z" * 257])
def test_a_label_is_checked_when_it_is_given(label: str) -> None:
    with pytest.raises(UsageError, match="'zone', 'zone/rack' or 'zone/rack/host'"):
        Location.parse(label)


def test_a_label_takes_a_string() -> None:
    with pytest.raises(UsageError, match="None takes a string"):
        Location.parse(None)  # type: ignore[arg-type]


def test_labels_that_earlier_versions_registered_are_all_read() -> None:
    assert Location.registered("/a//b/") == Location("a", "b")
    assert Location.registered("a/b/c/d/e") == Location("a", "b", "c/d/e")
    assert Location.registered("/") == Location.registered(" / ") == NOWHERE


def test_labels_of_unlike_depth_agree_in_the_parts_that_both_have() -> None:
    """BookKeeper 2490: its topology refuses, or mixes up, locations of unlike depth."""
    assert span([Location.parse("a"), Location.parse("/a/r1"), Location.parse("a/r1/h1")]) == 1
    assert verdict(["a", "a", "b"], 3, 2).sound


@pytest.mark.parametrize(("min_zones", "strict"), [(0, False), (True, False), (1.0, False), (1, 1)])
def test_a_policy_checks_its_values(min_zones: int, strict: bool) -> None:
    with pytest.raises(UsageError, match="it takes"):
        PlacementPolicy(min_zones, strict)


def test_zones_are_counted_for_each_write_set_and_not_for_the_ensemble() -> None:
    assert verdict("aabb", 4, 2).sound
    found = verdict("aabb", 2, 2)
    assert [each.places for each in found.short] == [(0, 1), (2, 3)]
    assert found.places == (0, 1, 2, 3)
    assert verdict("abab", 2, 2).sound
    assert not verdict("aba", 2, 2).sound, "the last write set is that of the last place and the first"
    assert "places 0, 2 span a, and need 2 zones" in str(verdict("aba", 2, 2))
    assert str(verdict("abab", 2, 2)) == "sound"


def test_a_write_set_cannot_span_more_zones_than_it_has_bookies() -> None:
    assert verdict("ab", 2, 5).sound
    assert verdict("a", 1, 5).sound
    assert PlacementPolicy(5).needed(2) == 2


def test_a_bookie_without_a_label_is_no_further_zone() -> None:
    assert verdict(["", "", ""], 3, 1).sound
    assert not verdict(["", "", ""], 3, 2).sound
    assert verdict(["a", "", "b"], 3, 2).sound
    found = verdict(["a", "", "a"], 3, 2)
    assert found.unlabelled == (1,)
    assert "places 1 have no label" in str(found)


def test_a_departed_bookie_without_a_known_location_has_no_default_zone() -> None:
    """BookKeeper 2642, 4439: bookies that are away fall into the default rack, and ensembles change their verdict."""
    locations = {bookie(0): Location("a"), bookie(1): Location("b"), bookie(2): Location("c")}
    ensemble = (bookie(0), bookie(1), bookie(2))
    policy = PlacementPolicy(3)
    assert judge(ensemble, 3, locations, policy).sound
    del locations[bookie(2)]
    found = judge(ensemble, 3, locations, policy)
    assert (found.unlabelled, found.places) == ((2,), (2,))


def test_the_verdict_is_that_of_the_definition() -> None:
    for size in range(1, 5):
        for zones in product(["", "a", "b", "c"], repeat=size):
            for write_quorum in range(1, size + 1):
                for min_zones in range(1, 5):
                    short = set()
                    for first in range(size):
                        places = {(first + i) % size for i in range(write_quorum)}
                        known = {zones[place] for place in places} - {""}
                        if max(1, len(known)) < min(min_zones, write_quorum):
                            short.add(tuple(sorted(places)))
                    found = verdict(zones, write_quorum, min_zones)
                    assert {each.places for each in found.short} == short


def test_confirmed_entries_are_in_as_many_zones_as_the_policy_promises() -> None:
    """BookKeeper 2096: an ack quorum from one rack. Counting is enough, if the sizes are chosen for it."""
    for size in range(1, 5):
        for write_quorum in range(1, size + 1):
            for ack_quorum, min_zones in product(range(1, write_quorum + 1), range(1, 4)):
                promised = max(1, min(min_zones, write_quorum) - (write_quorum - ack_quorum))
                fewest = min(
                    len({zones[place] for place in acked})
                    for zones in product("abcd", repeat=size)
                    if verdict(zones, write_quorum, min_zones).sound
                    for places in write_sets(size, write_quorum)
                    for acked in combinations(places, ack_quorum)
                )
                assert promised <= fewest
