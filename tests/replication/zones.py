"""Whether write sets span as many zones as a policy asks, by definition; choices and moves of the product obey it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.locations import NOWHERE, Location, PlacementPolicy


def short_sets(
    ensemble: Sequence[Bookie], write_quorum: int, locations: Mapping[Bookie, Location], policy: PlacementPolicy
) -> set[tuple[int, ...]]:
    """Return the write sets, as ascending places, that span too few zones; a bookie without a label adds none."""
    zones = [locations.get(each, NOWHERE).zone for each in ensemble]
    return short_sets_of(zones, write_quorum, policy.min_zones)


def short_sets_of(zones: Sequence[str], write_quorum: int, min_zones: int) -> set[tuple[int, ...]]:
    """Return the same by the zones of the places; "" is that of a bookie without a label."""
    short = set()
    for first in range(len(zones)):
        places = sorted((first + i) % len(zones) for i in range(write_quorum))
        known = {zones[place] for place in places} - {""}
        if max(1, len(known)) < min(min_zones, write_quorum):
            short.add(tuple(places))
    return short
