"""The choice of the bookies of an ensemble, which no other module makes.

``client/membership.py`` calls ``choose_first`` for the first ensemble of a ledger, and ``choose`` for each
``ChooseBookies`` of a writer, a recovery or a re-replication; ``usable`` filters each of these choices against the
ensemble as it is then. Which place of a misplaced ensemble has to move is found by ``misplaced_place`` in
``healing/plan.py``.

Theory of operation. Each place gets the best bookie that is left. Preferred is, in this order:

1. a bookie of the zone that is used least by the places with which the place shares write sets;
2. one with the hinted tiers;
3. one of the rack, and then of the host, that is used least in the same sense;
4. the bookie of the process that chooses;
5. chance, weighted by free space and load.

If the policy asks for several zones, the first choice for one place may leave no bookie for another. So ``_Search``
backtracks and tries the next best bookie, until each write set spans enough zones, or all choices were tried, or its
steps are used up. It treats bookies of one zone alike and tries only one of each zone at a place, so the number of
choices depends on places and zones, and not on the number of bookies. It is bounded in steps and not in time, so the
same random source always leads to the same choice. The bound ``_short`` of a partial choice counts each place that is
still empty as a further zone. It only grows while places are filled, so a choice whose bound is above the best one
found is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, islice
from random import Random
from statistics import median
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.locations import ANYWHERE, NOWHERE, Location, PlacementPolicy, write_sets
from pybk.replication.messages import UnderReplicated
from pybk.replication.quorum import Quorum

WEIGHT_MULTIPLE_MAX: Final = 3.0
"""The highest weight of a bookie, in medians; without it a new, empty bookie would be in every ensemble."""

FULL_ABOVE: Final = 0.85
"""The target line: copies that re-replication or a rebalance makes fill no tier beyond this part of its capacity."""

STEPS_MAX: Final = 5_000
"""Bound on the bookies that one choice tries at places. Most choices try one for each place."""

ABSENCES_MAX: Final = 50
"""Bound on the sets of places that ``choose_first`` tries to give to bookies that are away."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An available bookie, as it registered.

    Attributes:
        bookie: The bookie.
        tiers: Free bytes of each tier that it has.
        load: Its load, from 0 up; for comparing only.
        location: Its location.
        read_only: It takes no new entries.
        local: It runs in the process that chooses.
        capacity: All bytes of each tier, used and free; a tier that is not named is never too full.
        leaving: It is draining or drained, and takes no new entries.
        away: It is known and not registered; only the first ensemble of a ledger may have such a bookie, or one that is
            read-only.
    """

    bookie: Bookie
    tiers: Mapping[StorageHint, int]
    load: float = 0.0
    location: Location = NOWHERE
    read_only: bool = False
    local: bool = False
    capacity: Mapping[StorageHint, int] = field(default_factory=dict)
    leaving: bool = False
    away: bool = False


class Choice(NamedTuple):
    """The result of ``choose``.

    Attributes:
        bookies: The bookies by place; places without a candidate are left out.
        short: The number of write sets that span too few zones with the choice.
        cut_off: Whether the steps were used up; a better choice may exist then.
        above_line: Bookies that were left out because they would be filled beyond the target line.
        away: The members of ``bookies`` that are not registered, or read-only; set by ``choose_first`` only.
    """

    bookies: dict[int, Bookie]
    short: int = 0
    cut_off: bool = False
    above_line: tuple[Bookie, ...] = ()
    away: frozenset[Bookie] = frozenset()

    @property
    def missed(self) -> tuple[UnderReplicated, ...]:
        """Return the marks to write before the first entry is acknowledged: bookies that are away miss all (AW11)."""
        return tuple(UnderReplicated(bookie, 0) for bookie in sorted(self.away))


def choose_first(
    candidates: Iterable[Candidate],
    *,
    quorum: Quorum,
    hints: frozenset[StorageHint],
    source: Random,
    policy: PlacementPolicy = ANYWHERE,
) -> Choice:
    """Choose the first ensemble of a ledger, if need be with bookies that are away (AW11).

    If the bookies that take entries do not suffice, the fewest places possible are given to bookies that are away; each
    write set keeps an ack quorum of the others. A bookie that is read-only, because it is full or is ending, counts as
    away, unless it is leaving the cluster. If even this does not fill the ensemble, only bookies that take entries are
    chosen.

    Args:
        candidates: The registered bookies, and those that are away.
        quorum: The sizes of the ledger.
        hints: As for ``choose``.
        source: As for ``choose``.
        policy: As for ``choose``.
    """
    known = tuple(replace(each, read_only=False, away=True) if each.read_only else each for each in candidates)
    whole = tuple(range(quorum.ensemble_size))

    def chosen(vacant: frozenset[int]) -> Choice:
        return choose(
            known,
            places=whole,
            ensemble=(),
            excluded=frozenset(),
            hints=hints,
            source=source,
            write_quorum=quorum.write_quorum,
            policy=policy,
            vacant=vacant,
        )

    writable = chosen(frozenset())
    if len(writable.bookies) == len(whole):
        return writable
    for vacant in _vacancies(quorum, sum(each.away and not each.leaving for each in known)):
        choice = chosen(vacant)
        if len(choice.bookies) == len(whole):
            return choice._replace(away=frozenset(choice.bookies[place] for place in vacant))
    return writable


def _vacancies(quorum: Quorum, most: int) -> Iterator[frozenset[int]]:
    """Yield the sets of places that may have bookies that are away, small ones first.

    Write sets are cyclic, so each set of places has an equivalent that includes the last place.
    """
    *others, last = range(quorum.ensemble_size)
    most = min(most, quorum.ensemble_size - quorum.live_min)
    sets = (frozenset((last, *more)) for count in range(most) for more in combinations(others, count))
    fits = (each for each in sets if quorum.writable(quorum.everyone & ~sum(1 << place for place in each)))
    return islice(fits, ABSENCES_MAX)


def choose(
    candidates: Iterable[Candidate],
    *,
    places: tuple[int, ...],
    ensemble: tuple[Bookie, ...],
    excluded: frozenset[Bookie],
    hints: frozenset[StorageHint],
    source: Random,
    write_quorum: int = 0,
    policy: PlacementPolicy = ANYWHERE,
    located: Mapping[Bookie, Location] | None = None,
    full_above: float | None = None,
    size_bytes: int = 0,
    vacant: frozenset[int] = frozenset(),
    steps_max: int = STEPS_MAX,
) -> Choice:
    """Choose bookies for places of an ensemble; the head of this module has the order of preference.

    The bookies of the other places stay, and their zones count. A strict policy leaves a place empty if otherwise a
    write set would span fewer zones than the policy asks, or than the bookies that stay allow. Any other policy fills
    as many places as possible, and then leaves as few write sets as possible short of zones. The present bookie of a
    place may keep it if it is not excluded and no other bookie does as well for the zones.

    Args:
        candidates: The available bookies.
        places: The places to fill.
        ensemble: The ensemble as it is, by place; empty for a new one.
        excluded: Bookies that must not be chosen.
        hints: The tiers where the ledger's entries should live.
        source: The source of random numbers.
        write_quorum: How many bookies hold an entry; 0: all of the ensemble.
        policy: How many zones a write set has to span.
        located: The locations of bookies of the ensemble that are not candidates, because they are away.
        full_above: The target line; None for no such line, as for ledgers that are being written.
        size_bytes: Bytes that each chosen bookie is going to get.
        vacant: The places that get bookies that are away; all other places get bookies that are not.
        steps_max: Bound on the bookies that are tried.
    """
    search = _search(candidates, places, ensemble, hints, source, write_quorum, policy, located)
    above = search.offer(places, ensemble, excluded, full_above, size_bytes)
    found = search.run(places, steps_max, vacant)
    return Choice(
        {place: search.known[index].bookie for place, index in found.items()}, search.found_short, search.cut_off, above
    )


def fits(
    own: Bookie,
    candidates: Iterable[Candidate],
    *,
    place: int,
    ensemble: tuple[Bookie, ...],
    hints: frozenset[StorageHint],
    write_quorum: int,
    policy: PlacementPolicy,
    located: Mapping[Bookie, Location] | None = None,
    full_above: float = FULL_ABOVE,
    size_bytes: int = 0,
    among_best: bool = True,
) -> bool:
    """Return whether a bookie may take a place by the rules of ``choose``; for bookies that copy to themselves.

    Args:
        own: The bookie; it is one of the candidates.
        candidates: As for ``choose``.
        place: The place.
        ensemble: As for ``choose``.
        hints: As for ``choose``.
        write_quorum: As for ``choose``.
        policy: As for ``choose``.
        located: As for ``choose``.
        full_above: As for ``choose``.
        size_bytes: As for ``choose``.
        among_best: Whether no other bookie may rank higher by the preferences 1 to 3; if False, it is enough that the
            bookie may have the place.
    """
    search = _search(candidates, (place,), ensemble, hints, Random(0), write_quorum, policy, located)
    search.offer((place,), ensemble, frozenset([ensemble[place]]), full_above, size_bytes)
    merits = search.merits(place)
    mine = merits.get(own)
    return mine is not None and (not among_best or mine == min(merits.values()))


def _search(
    candidates: Iterable[Candidate],
    places: tuple[int, ...],
    ensemble: tuple[Bookie, ...],
    hints: frozenset[StorageHint],
    source: Random,
    write_quorum: int,
    policy: PlacementPolicy,
    located: Mapping[Bookie, Location] | None,
) -> _Search:
    """Return a search that has no candidates yet."""
    known = sorted(candidates, key=_bookie_of)
    size = len(ensemble) or max(places, default=-1) + 1
    stand = {each.bookie: each.location for each in known} if ensemble else {}
    locations: list[Location | None] = [stand.get(bookie, NOWHERE) for bookie in ensemble] or [None] * size
    for place in range(len(ensemble)):
        if place in places:
            locations[place] = None
        elif located is not None and ensemble[place] not in stand:
            locations[place] = located.get(ensemble[place], NOWHERE)
    return _Search(known, hints, source, locations, _Shape(size, write_quorum or size), policy)


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


def tier_of(hints: frozenset[StorageHint], tiers: Iterable[StorageHint]) -> StorageHint | None:
    """Return the tier of a bookie where a ledger's entries live: its first hinted tier, or else its first one.

    Args:
        hints: The ledger's hints.
        tiers: The tiers that the bookie has.
    """
    there = [tier for tier in StorageHint if tier in tiers]
    return next((tier for tier in there if tier in hints), there[0] if there else None)


def is_above(candidate: Candidate, hints: frozenset[StorageHint], line: float, size_bytes: int = 0) -> bool:
    """Return whether some more bytes would fill the tier where a ledger would live beyond a line.

    Args:
        candidate: The bookie.
        hints: The ledger's hints.
        line: The line, as a part of the tier's capacity.
        size_bytes: The bytes.
    """
    tier = tier_of(hints, candidate.tiers)
    capacity = 0 if tier is None else candidate.capacity.get(tier, 0)
    return tier is not None and capacity > 0 and capacity - candidate.tiers[tier] + size_bytes > line * capacity


class _Shape(NamedTuple):
    """The sizes of an ensemble."""

    size: int
    write_quorum: int


class _Group:
    """Candidates that differ only in free space and load.

    Attributes:
        location: Their location.
        unhinted: Whether they lack a hinted tier.
        remote: Whether they run in other processes than the one that chooses.
        place: The only place that they may take; -1 for any.
        away: Whether they are not registered.
        members: Their indexes among all candidates, ascending.
    """

    __slots__ = ("away", "location", "members", "place", "remote", "unhinted")

    def __init__(self, location: Location, unhinted: bool, remote: bool, place: int, away: bool) -> None:
        self.location = location
        self.unhinted = unhinted
        self.remote = remote
        self.place = place
        self.away = away
        self.members: list[int] = []


class _Search:
    """One choice; see the head of the module.

    Attributes:
        known: All candidates, by bookie.
        found_short: The number of write sets that are short of zones with the best choice found.
        cut_off: Whether the steps were used up.
    """

    def __init__(
        self,
        known: list[Candidate],
        hints: frozenset[StorageHint],
        source: Random,
        locations: list[Location | None],
        shape: _Shape,
        policy: PlacementPolicy,
    ) -> None:
        self.known = known
        self._hints = hints
        self._source = source
        self._locations = locations
        """The location of the bookie of each place; None for places that are empty."""
        self._shape = shape
        self._policy = policy
        self._needed = policy.needed(shape.write_quorum)
        self._groups: list[_Group] = []
        self._weights: list[float] = []
        self._keepers: dict[int, int] = {}
        """The present bookies of the places to fill that may keep them."""
        self._places: tuple[int, ...] = ()
        self._vacant: frozenset[int] = frozenset()
        """The places that get bookies that are away."""
        self._taken: dict[int, int] = {}
        self._best: dict[int, int] = {}
        self._shorts: list[int] = []
        """The zones that each write set lacks at least, whatever bookies the empty places get."""
        self._short = self._limit = self._floor = 0
        """The sum of these; the sum above which a choice is useless; the sum below which no choice can be."""
        self._steps = 0
        self.found_short = 0
        self.cut_off = False

    def offer(
        self,
        places: tuple[int, ...],
        ensemble: tuple[Bookie, ...],
        excluded: frozenset[Bookie],
        full_above: float | None,
        size_bytes: int,
    ) -> tuple[Bookie, ...]:
        """Note which candidates may take which places; return those that are above the target line."""
        # Another instance of a bookie that has a place may take that one alone: two would not fail independently.
        place_of = {bookie.bookie_id: place for place, bookie in enumerate(ensemble)}
        groups: dict[tuple[Location, bool, bool, int, bool], _Group] = {}
        above = []
        hints, strict = self._hints, self._policy.strict
        for index, each in enumerate(self.known):
            bookie = each.bookie
            if each.read_only or each.leaving or bookie in excluded:
                continue
            place = place_of.get(bookie.bookie_id, -1)
            if place >= 0 and bookie == ensemble[place]:
                if place in places:
                    self._keepers[place] = index
                continue
            if (place >= 0 and place not in places) or (strict and not each.location.zone):
                continue
            if full_above is not None and is_above(each, hints, full_above, size_bytes):
                above.append(bookie)
                continue
            key = (each.location, not hints <= each.tiers.keys(), not each.local, place, each.away)
            group = groups.get(key)
            if group is None:
                group = groups[key] = _Group(*key)
            group.members.append(index)
        self._groups = list(groups.values())
        if hints:
            self._weights = [_free_bytes(each, hints) / (1.0 + each.load) for each in self.known]
        else:
            self._weights = [max(sum(each.tiers.values()), 1) / (1.0 + each.load) for each in self.known]
        return tuple(above)

    def run(self, places: tuple[int, ...], steps_max: int, vacant: frozenset[int]) -> dict[int, int]:
        """Return the best choice: an index among the candidates for each place."""
        self._places, self._vacant = places, vacant
        self._groups = [each for each in self._groups if vacant or not each.away]
        self._begin()
        anywhere = sum(len(group.members) for group in self._groups if group.place < 0)
        own = {group.place for group in self._groups if group.place >= 0} | self._keepers.keys()
        empty = max(0, len(places) - anywhere - len(own))
        while not self._fill(0, empty, steps_max) and not self._best and empty < len(places):
            # A strict policy may leave more places empty than the lack of bookies explains. The steps are halved, so
            # that the search for ever fewer bookies ends.
            self._steps, steps_max = 0, steps_max // 2
            empty += 1
        return self._best

    def merits(self, place: int) -> dict[Bookie, tuple[int, tuple[int, bool, int, int]]]:
        """Return the rank of each bookie that may take a place; the lowest is best."""
        self._begin()
        groups = [each for each in self._groups if each.place < 0 or each.place == place]
        found = {}
        for rank, group in zip(self._ranks(place, groups), groups, strict=True):
            index = group.members[0]
            self._take(place, index, group)
            short = self._short
            self._put_back(place, index, group)
            if short <= self._limit:
                found.update(dict.fromkeys((self.known[each].bookie for each in group.members), (short, rank[:4])))
        return found

    def _begin(self) -> None:
        """Compute the bounds."""
        if self._needed <= 1:
            return
        zones = {group.location.zone for group in self._groups} | {
            self.known[i].location.zone for i in self._keepers.values()
        }
        self._shorts = [self._short_of(places) for places in write_sets(*self._shape)]
        self._short = sum(self._shorts)
        for places in write_sets(*self._shape):
            staying = {each.zone for place in places if (each := self._locations[place]) is not None} - {""}
            open_places = sum(self._locations[place] is None for place in places)
            reachable = min(len(staying) + open_places, len(staying | (zones - {""})))
            self._floor += max(0, self._needed - max(1, reachable))
        self._limit = self._short if self._policy.strict else self._shape.size * self._needed

    def _short_of(self, places: tuple[int, ...]) -> int:
        """Return the zones that a write set lacks if each empty place gets a bookie of a further zone."""
        filled = [each for place in places if (each := self._locations[place]) is not None]
        known = len({each.zone for each in filled} - {""})
        return max(0, self._needed - max(1, known + len(places) - len(filled)))

    # ---- the search ------------------------------------------------------------------------------------------------

    def _fill(self, number: int, empty: int, steps_max: int) -> bool:
        """Fill the places from the given one on, in all ways that may beat the best choice; return True to stop.

        Args:
            number: The index of the first place to fill among those to be filled.
            empty: The number of places that may stay empty.
            steps_max: After how many steps to stop.
        """
        if number == len(self._places):
            return self._note()
        place = self._places[number]
        for index, group in self._options(place):
            self._steps += 1
            if self._steps > steps_max:
                self.cut_off = True
                return False
            self._take(place, index, group)
            if self._short <= self._limit and self._fill(number + 1, empty, steps_max):
                return True
            self._put_back(place, index, group)
        return empty > 0 and self._fill(number + 1, empty - 1, steps_max)

    def _note(self) -> bool:
        """Note the present choice as the best one; return whether no other can be better."""
        self._best = dict(self._taken)
        self.found_short = sum(each > 0 for each in self._shorts)
        self._limit = self._short - 1
        return self._policy.strict or self._short <= self._floor

    def _options(self, place: int) -> Iterator[tuple[int, _Group | None]]:
        """Yield the bookies to try at a place, the best first: one of each zone, and then the present one."""
        away = place in self._vacant
        groups = [
            each
            for each in self._groups
            if each.members and each.away is away and (each.place < 0 or each.place == place)
        ]
        ranked = list(zip(self._ranks(place, groups), groups, strict=True))
        while ranked:
            best = min(rank for rank, _ in ranked)
            index, group = self._draw([group for rank, group in ranked if rank == best])
            yield index, group
            ranked = [each for each in ranked if not self._alike(each[1], group)]
        if place in self._keepers:
            yield self._keepers[place], None

    def _alike(self, one: _Group, other: _Group) -> bool:
        """Return whether bookies of two groups leave the same choices: if one fails, so does the other."""
        return one.place == other.place and (self._needed <= 1 or one.location.zone == other.location.zone)

    def _draw(self, groups: list[_Group]) -> tuple[int, _Group]:
        """Draw one of the bookies of groups of the same rank."""
        members = groups[0].members if len(groups) == 1 else sorted(i for group in groups for i in group.members)
        weights = [self._weights[index] for index in members]
        cap = WEIGHT_MULTIPLE_MAX * median(weights)
        index = self._source.choices(members, [min(weight, cap) for weight in weights])[0]
        return index, next(group for group in groups if len(groups) == 1 or index in group.members)

    def _take(self, place: int, index: int, group: _Group | None) -> None:
        """Put a bookie into a place."""
        self._taken[place] = index
        self._locations[place] = self.known[index].location
        if group is not None:
            del group.members[bisect_left(group.members, index)]
        self._recount(place)

    def _put_back(self, place: int, index: int, group: _Group | None) -> None:
        """Undo ``_take``."""
        del self._taken[place]
        self._locations[place] = None
        if group is not None:
            insort(group.members, index)
        self._recount(place)

    def _recount(self, place: int) -> None:
        """Compute the bounds of the write sets of a place again."""
        if self._needed > 1:
            for number, places in enumerate(write_sets(*self._shape)):
                if place in places:
                    short = self._short_of(places)
                    self._short += short - self._shorts[number]
                    self._shorts[number] = short

    def _ranks(self, place: int, groups: list[_Group]) -> list[tuple[int, bool, int, int, bool]]:
        """Return the rank of each group's bookies for a place; the lowest is best."""
        if all(each.location == groups[0].location for each in groups):
            return [(0, each.unhinted, 0, 0, each.remote) for each in groups]
        crowd = _Crowd(self._locations, _nearness(*self._shape)[place])
        return [
            (crowd.zone(where), each.unhinted, crowd.rack(where), crowd.host(where), each.remote)
            for each in groups
            for where in [each.location]
        ]


class _Crowd:
    """The use of each zone, rack and host by the places near one place.

    A bookie whose zone or rack is not known counts as one in the zone or rack that is used most.
    """

    def __init__(self, locations: Sequence[Location | None], nearness: Sequence[int]) -> None:
        self._zones: dict[str, int] = {}
        self._racks: dict[tuple[str, str], int] = {}
        self._hosts: dict[Location, int] = {}
        for where, near in zip(locations, nearness, strict=True):
            if where is not None and near:
                self._zones[where.zone] = self._zones.get(where.zone, 0) + near
                self._racks[where.zone, where.rack] = self._racks.get((where.zone, where.rack), 0) + near
                self._hosts[where] = self._hosts.get(where, 0) + near

    def zone(self, where: Location) -> int:
        """Return the use of a location's zone."""
        used = self._zones.get(where.zone, 0)
        return used if where.zone else used + max((n for zone, n in self._zones.items() if zone), default=0)

    def rack(self, where: Location) -> int:
        """Return the use of a location's rack."""
        used = self._racks.get((where.zone, where.rack), 0)
        if where.rack:
            return used
        return used + max((n for (zone, rack), n in self._racks.items() if rack and zone == where.zone), default=0)

    def host(self, where: Location) -> int:
        """Return the use of a location's host; a bookie without one is taken to have its own."""
        return self._hosts.get(where, 0) if where.host else 0


@lru_cache(256)
def _nearness(size: int, write_quorum: int) -> tuple[tuple[int, ...], ...]:
    """Return the nearness of each two places: more for each write set that has both; 0 for a place and itself."""
    sets = write_sets(size, write_quorum)
    return tuple(
        tuple(
            0 if one == other else 1 + size * sum(one in places and other in places for places in sets)
            for other in range(size)
        )
        for one in range(size)
    )


def _bookie_of(candidate: Candidate) -> Bookie:
    return candidate.bookie


def _free_bytes(candidate: Candidate, hints: frozenset[StorageHint]) -> float:
    """Return the free bytes that count: those of the hinted tiers, or of all."""
    wanted = [free for tier, free in candidate.tiers.items() if tier in hints] or list(candidate.tiers.values())
    return float(max(sum(wanted), 1))
