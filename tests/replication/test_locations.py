"""Labels of locations, and whether an ensemble spans the zones that a policy asks for."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pybk.errors import UsageError
from pybk.replication.locations import NOWHERE, Location, PlacementPolicy, write_sets
from tests.replication.zones import short_sets_of


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
    assert {Location.parse(label).zone for label in ("a", "/a/r1", "a/r1/h1")} == {"a"}


@pytest.mark.parametrize(("min_zones", "strict"), [(0, False), (True, False), (1.0, False), (1, 1)])
def test_a_policy_checks_its_values(min_zones: int, strict: bool) -> None:
    with pytest.raises(UsageError, match="it takes"):
        PlacementPolicy(min_zones, strict)


def test_a_write_set_cannot_span_more_zones_than_it_has_bookies() -> None:
    assert PlacementPolicy(5).needed(2) == 2
    assert PlacementPolicy(2).needed(3) == 2


def test_confirmed_entries_are_in_as_many_zones_as_the_policy_promises() -> None:
    """BookKeeper 2096: an ack quorum from one rack. Counting is enough, if the sizes are chosen for it."""
    for size in range(1, 5):
        for write_quorum in range(1, size + 1):
            for ack_quorum, min_zones in product(range(1, write_quorum + 1), range(1, 4)):
                promised = max(1, min(min_zones, write_quorum) - (write_quorum - ack_quorum))
                fewest = min(
                    len({zones[place] for place in acked})
                    for zones in product("abcd", repeat=size)
                    if not short_sets_of(zones, write_quorum, min_zones)
                    for places in write_sets(size, write_quorum)
                    for acked in combinations(places, ack_quorum)
                )
                assert promised <= fewest
