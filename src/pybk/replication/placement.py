"""Which bookies form an ensemble: the only module that decides it.

``client/membership.py`` calls ``choose`` for the first ensemble of a ledger and for each ``ChooseBookies`` of a
writer, a recovery or a re-replication. ``usable`` filters each choice against the ensemble as it is then.

Racks are a preference: ``_key`` counts how often the ensemble uses a candidate's rack already. A policy that requires
racks, or regions, would be added here: make ``_key`` return the violation first, or have ``choose`` leave out
candidates that break the rule, so that the result is shorter and the caller reports too few bookies. No machine has
to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

from pybk.flags import StorageHint
from pybk.ledger import Bookie

WEIGHT_MULTIPLE_MAX: Final = 3.0
"""A bookie counts at most this many times the median, so that a new empty one is not in every ensemble."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An available bookie, as it registered.

    Attributes:
        bookie: The bookie.
        tiers: Free bytes of each tier that it has.
        load: How busy it is, from 0 up; for comparing only.
        rack: The rack that it stands in; empty if not known.
        read_only: It takes no new entries.
        local: It runs in the process that chooses.
    """

    bookie: Bookie
    tiers: Mapping[StorageHint, int]
    load: float = 0.0
    rack: str = ""
    read_only: bool = False
    local: bool = False


def choose(
    candidates: Iterable[Candidate],
    *,
    places: tuple[int, ...],
    ensemble: tuple[Bookie, ...],
    excluded: frozenset[Bookie],
    hints: frozenset[StorageHint],
    source: Random,
) -> dict[int, Bookie]:
    """Choose bookies for places of an ensemble.

    Bookies with all hinted tiers come first, then the local bookie, then bookies of the racks that the ensemble uses
    least; equal ones are drawn at random, weighted by free space and load. These are preferences, not conditions. The
    present bookie of a place may keep it if no other bookie is left and it is not excluded.

    Args:
        candidates: The available bookies.
        places: The places to fill.
        ensemble: The ensemble as it is, by place; empty for a new one.
        excluded: Bookies that must not be chosen.
        hints: The tiers where the ledger's entries should live.
        source: The source of random numbers.

    Returns:
        The bookies by place; places without a candidate are left out.
    """
    known = sorted(candidates, key=lambda each: each.bookie)
    racks = {each.bookie: each.rack for each in known}
    staying = [bookie for place, bookie in enumerate(ensemble) if place not in places]
    used = [racks.get(bookie, "") for bookie in staying]
    free = [
        each for each in known if not each.read_only and each.bookie not in excluded and each.bookie not in ensemble
    ]
    # Another instance of a bookie that has a place may take that one alone: two would not fail independently.
    place_of = {bookie.bookie_id: place for place, bookie in enumerate(ensemble)}
    result: dict[int, Bookie] = {}
    for place in places:
        fit = [each for each in free if place_of.get(each.bookie.bookie_id, place) == place]
        if fit:
            keys = [_key(each, hints, used) for each in fit]
            best = min(keys)
            taken = _draw([each for each, key in zip(fit, keys, strict=True) if key == best], hints, source)
            free.remove(taken)
            result[place] = taken.bookie
            used.append(taken.rack)
        elif place < len(ensemble) and ensemble[place] not in excluded:
            old = next((each for each in known if each.bookie == ensemble[place] and not each.read_only), None)
            if old is not None:
                result[place] = old.bookie
    return result


def usable(bookies: Mapping[int, Bookie], wanted: tuple[int, ...], ensemble: Sequence[Bookie]) -> dict[int, Bookie]:
    """Return the chosen bookies that may take the places asked for.

    A machine applies it to every ``BookiesChosen``, because its ensemble may have changed since it asked. A bookie that
    has another place already, or was chosen twice, is left out, because two places at one bookie fail together.

    Args:
        bookies: The choice, by place.
        wanted: The places asked for.
        ensemble: The ensemble as it is now.
    """
    result: dict[int, Bookie] = {}
    for place in wanted:
        bookie = bookies.get(place)
        if bookie is None or bookie in result.values():
            continue
        if bookie == ensemble[place] or bookie not in ensemble:
            result[place] = bookie
    return result


def _key(candidate: Candidate, hints: frozenset[StorageHint], used: list[str]) -> tuple[bool, bool, int]:
    """Return the rank of a bookie; the lowest is best."""
    crowd = used.count(candidate.rack) if candidate.rack else 0
    return not hints <= candidate.tiers.keys(), not candidate.local, crowd


def _draw(candidates: list[Candidate], hints: frozenset[StorageHint], source: Random) -> Candidate:
    """Draw one of several bookies of the same rank."""
    weights = [_free_bytes(each, hints) / (1.0 + each.load) for each in candidates]
    cap = WEIGHT_MULTIPLE_MAX * median(weights)
    return source.choices(candidates, [min(weight, cap) for weight in weights])[0]


def _free_bytes(candidate: Candidate, hints: frozenset[StorageHint]) -> float:
    """Return the free bytes that count: those of the hinted tiers, or of all."""
    wanted = [free for tier, free in candidate.tiers.items() if tier in hints] or list(candidate.tiers.values())
    return float(max(sum(wanted), 1))
