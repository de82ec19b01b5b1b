"""Locations of bookies, the zones that a write set has to span, and the judgement of an ensemble.

A *location* is a label ``zone/rack/host``; a shorter one names the outer parts alone. Every entry is held by one *write
set*: of an ensemble of E bookies, there are E of them, of Qw places each, and the entries of a write set are lost
together with its bookies. So zones are counted for each write set, not for the ensemble.

A bookie without a label may stand in any zone, so it never counts as a further zone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Self

from pybk.errors import UsageError
from pybk.replication.quorum import Quorum

LOCATION_BYTES_MAX: Final = 256
_DEPTH_MAX: Final = 3


class Location(NamedTuple):
    """The place where a bookie stands, from the outside inwards.

    Two racks are the same if rack and zone are; two hosts, if all three parts are.

    Attributes:
        zone: A unit that fails as a whole: a data centre, a room, a power feed; empty if not known.
        rack: The rack in the zone; empty if not known.
        host: The host in the rack; empty if not known.
    """

    zone: str = ""
    rack: str = ""
    host: str = ""

    @classmethod
    def parse(cls, label: str) -> Self:
        """Return the location that a label names; the empty label names none.

        A label has one to three parts, separated by slashes, and the first is always the zone: ``r1`` is a zone,
        ``/room/rack`` a zone and a rack. A slash in front or at the end changes nothing.

        Raises:
            UsageError: The label has more parts, an empty one, or characters that cannot be printed.
        """
        if not isinstance(label, str):
            raise UsageError(f"location {label!r:.100} takes a string, such as 'zone/rack/host'")
        label = label.removeprefix("/").removesuffix("/")
        if not label:
            return cls()
        parts = label.split("/")
        well_formed = all(part and part == part.strip() and part.isprintable() for part in parts)
        if not well_formed or len(parts) > _DEPTH_MAX or len(label.encode(errors="replace")) > LOCATION_BYTES_MAX:
            raise UsageError(
                f"location {label!r:.300} takes one to {_DEPTH_MAX} parts that are not empty, of at most "
                f"{LOCATION_BYTES_MAX} bytes together: 'zone', 'zone/rack' or 'zone/rack/host'"
            )
        return cls(*parts)

    @classmethod
    def registered(cls, label: str) -> Self:
        """Return the location that a registered label names; unlike ``parse``, it takes any label.

        Earlier versions registered any text as a rack. Empty parts are left out, and what follows the rack is the host.
        """
        parts = [part for part in map(str.strip, label.split("/")) if part]
        parts[_DEPTH_MAX - 1 :] = ["/".join(parts[_DEPTH_MAX - 1 :])]
        return cls(*parts)

    @property
    def known(self) -> bool:
        """True if the bookie has a label."""
        return bool(self.zone)

    def __str__(self) -> str:
        """Return the label."""
        return "/".join(filter(None, self))


NOWHERE: Final = Location()
"""The location of a bookie that has no label."""


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """The number of zones that each write set has to span.

    Attributes:
        min_zones: The zones; a write set of fewer bookies has to span as many zones as it has bookies.
        strict: Whether a place stays empty if otherwise a write set would span fewer zones; bookies without a label are
            not chosen then.
    """

    min_zones: int = 1
    strict: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if type(self.min_zones) is not int or self.min_zones < 1:
            raise UsageError(f"min_zones is {self.min_zones!r}; it takes a whole number from 1 up")
        if type(self.strict) is not bool:
            raise UsageError(f"strict is {self.strict!r}; it takes True or False")

    def needed(self, write_quorum: int) -> int:
        """Return how many zones a write set has to span."""
        return min(self.min_zones, write_quorum)


ANYWHERE: Final = PlacementPolicy()
"""The policy without demands: zones and racks are only preferences."""


@lru_cache(256)
def write_sets(ensemble_size: int, write_quorum: int) -> tuple[tuple[int, ...], ...]:
    """Return the places of each write set, ascending; one write set if every bookie takes every entry."""
    quorum = Quorum(ensemble_size, write_quorum, 1)
    count = 1 if ensemble_size == write_quorum else ensemble_size
    return tuple(tuple(sorted(quorum.write_set(residue))) for residue in range(count))


def keeps_spread(now: Sequence[Location], then: Sequence[Location], write_quorum: int) -> bool:
    """Return whether no write set spans fewer zones, or else racks, or else hosts, after a move.

    Args:
        now: The locations of an ensemble's bookies, by place.
        then: The same after the move.
        write_quorum: How many bookies hold an entry.
    """
    return all(
        _spread(then, places) >= _spread(now, places)
        for places in write_sets(len(now), write_quorum)
        if any(now[place] != then[place] for place in places)
    )


def gains_zones(zones: Sequence[str], place: int, zone: str, sets: Iterable[Sequence[int]], needed: int) -> bool:
    """Return whether a write set would span more zones, and none fewer, if a bookie of a zone took a place.

    Each such move brings an ensemble nearer to the policy, so such moves end.

    Args:
        zones: The zone of each place; empty if it is not known.
        place: The place.
        zone: The zone of the bookie.
        sets: The places of each write set.
        needed: How many zones a write set has to span; more do not count.
    """
    gains = False
    for places in sets:
        if place in places:
            others = {zones[each] for each in places if each != place}
            before, after = (min(len({*others, each} - {""}), needed) for each in (zones[place], zone))
            if after < before:
                return False
            gains |= after > before
    return gains


def keeps_zones_open(zones: Sequence[str], place: int, zone: str, sets: Iterable[Sequence[int]], needed: int) -> bool:
    """Return whether a strict policy lets a bookie of a zone take a place (PL4, PL5); arguments as for ``gains_zones``.

    The bookie has a label, and none of the place's write sets would span fewer zones than with a bookie of another
    zone.
    """
    others = ({zones[each] for each in places if each != place} - {""} for places in sets if place in places)
    return bool(zone) and all(zone not in there or len(there) >= needed for there in others)


ZoneRule = Callable[[Sequence[str], int, str, Iterable[Sequence[int]], int], bool]
"""``gains_zones`` or ``keeps_zones_open``."""


def _spread(stand: Sequence[Location], places: Iterable[int]) -> tuple[int, int, int]:
    """Return the numbers of zones, racks and hosts that are known to be spanned."""
    there = [stand[place] for place in places]
    return (
        len({each.zone for each in there} - {""}),
        len({each[:2] for each in there if each.rack}),
        len({each for each in there if each.host}),
    )
