"""The plan of a rebalance: the copies of closed ledgers that move from full bookies to empty ones.

A rebalance is planned, shown, and carried out only when a person asks for it. One plan moves a small part of all bytes,
so it ends soon and its result can be examined; another plan continues.

Theory of operation. A bookie's *fullness* is the bytes of all copies that ledgers place in one of its tiers, as a part
of the tier's capacity. It follows from the metadata and not from the used space, because a move leaves the surplus copy
at its source until it is dropped, and the next plan would move it once more. The *level* is the fullness of all bookies
together. A bookie is level if its own differs from that by at most the tolerance. Copies move from bookies above the
level to bookies below it, the fullest and the emptiest first, while one of the two is not level. No move makes a level
bookie unlevel, and each brings the worse of the two nearer to the level, so plans do not undo each other.

A copy moves as re-replication moves it: it is made at the target, and then a compare-and-set changes the ensemble. So
no ledger is short of a copy at any time. The source frees its bytes only when the surplus copy is dropped, much later,
so the plan shows both copies. A target stays below the line, counting the space that is used now, by any data, and the
copies that it gets.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap
from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.locations import PlacementPolicy, keeps_spread
from pybk.replication.placement import FULL_ABOVE, Candidate
from pybk.values import listed

TOLERANCE: Final = 0.10
"""The part of its capacity by which a bookie may be fuller or emptier than the level."""

MOVED_MAX: Final = 0.05
"""The largest part of the bytes of all copies that one plan moves."""

MOVES_MAX: Final = 1000
"""The most copies that one plan moves, because each is a mark, and workers read all marks."""

_NAMED_MAX: Final = 5


class PlacedFragment(NamedTuple):
    """A fragment that has an end, with its place.

    Attributes:
        ledger_id: The ledger.
        first_entry_id: Its first entry.
        ensemble: Its bookies, by place.
        write_quorum: The number of them that hold an entry.
        tier: The tier of its entries.
        size_bytes: The bytes that each of them holds.
        closed: Whether the ledger is closed.
        version: The version of the ledger's metadata in the metadata store.
    """

    ledger_id: int
    first_entry_id: int
    ensemble: tuple[Bookie, ...]
    write_quorum: int
    tier: StorageHint
    size_bytes: int
    closed: bool = True
    version: int = 0


class RebalanceMove(NamedTuple):
    """One copy that moves.

    Attributes:
        ledger_id: The ledger.
        first_entry_id: The first entry of the fragment.
        source: The bookie that loses its place.
        target: The bookie that gets it.
        tier: The tier.
        size_bytes: Its payload bytes, about.
        version: The version of the ledger's metadata in the metadata store, by which the move was planned.
    """

    ledger_id: int
    first_entry_id: int
    source: Bookie
    target: Bookie
    tier: StorageHint
    size_bytes: int
    version: int = 0


class TierFullness(NamedTuple):
    """The part of one tier of a bookie that copies fill.

    Attributes:
        bookie: The bookie.
        tier: The tier.
        capacity: All its bytes.
        used: The bytes of its devices that are used now, by any data.
        before: The payload bytes of the copies that ledgers place there now.
        during: The same once all moves are made, with the copies that their sources have not dropped yet.
        after: The same in the end.
    """

    bookie: Bookie
    tier: StorageHint
    capacity: int
    used: int
    before: int
    during: int
    after: int

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """``used``, ``before``, ``during`` and ``after`` as parts of the capacity."""
        used, before, during, after = (
            size / self.capacity for size in (self.used, self.before, self.during, self.after)
        )
        return used, before, during, after

    def __str__(self) -> str:
        """Return the line for people."""
        _, before, during, after = (f"{part:.1%}" for part in self.parts)
        return f"{self.bookie.bookie_id} {self.tier.value}: {before} now, {during} with both copies, {after} then"


@dataclass(frozen=True, slots=True)
class RebalancePlan:
    """The moves of a rebalance.

    Attributes:
        moves: The moves, in the order in which they are made.
        fullness: Each bookie's tiers, ordered by tier and name.
        all_bytes: The payload bytes of all copies.
        refused: The reason why nothing is planned; empty if it is not refused.
        level: Whether all bookies are level in the end; if not, another plan may continue.
    """

    moves: tuple[RebalanceMove, ...] = ()
    fullness: tuple[TierFullness, ...] = ()
    all_bytes: int = 0
    refused: tuple[str, ...] = ()
    level: bool = False

    @property
    def moved_bytes(self) -> int:
        """The bytes that move."""
        return sum(each.size_bytes for each in self.moves)

    @property
    def summary(self) -> str:
        """The reason why it is refused, or the amount that moves; for people."""
        if self.refused:
            return "no rebalance: " + "; ".join(self.refused)
        part = self.moved_bytes / max(1, self.all_bytes)
        end = "all bookies are level then" if self.level else "not all bookies are level then"
        return f"{len(self.moves)} copies move, {self.moved_bytes} of {self.all_bytes} bytes ({part:.1%}); {end}"

    def ways(self) -> list[tuple[tuple[str, str, str], tuple[int, int]]]:
        """Return the numbers of copies and bytes that move, by tier, source and target."""
        ways: dict[tuple[str, str, str], tuple[int, int]] = {}
        for each in self.moves:
            way = each.tier.value, each.source.bookie_id, each.target.bookie_id
            count, size = ways.get(way, (0, 0))
            ways[way] = count + 1, size + each.size_bytes
        return sorted(ways.items())

    def __str__(self) -> str:
        """Return the plan for people: the summary, the moves by source and target, and each bookie before and after."""
        moves = (
            f"{source} -> {target}: {count} copies, {size} bytes of {tier}"
            for (tier, source, target), (count, size) in self.ways()
        )
        return "\n".join([self.summary, *moves, *map(str, self.fullness)])


def placed_fragments(cluster: ClusterMap) -> Iterator[PlacedFragment]:
    """Yield the fragments of a cluster's ledgers that have an end.

    Args:
        cluster: The ledgers and bookies.
    """
    for ledger_id in cluster:
        ledger = cluster.get(ledger_id)
        if ledger is not None:
            for fragment in cluster.fragments(ledger):
                if fragment.last_entry_id is not None:
                    yield PlacedFragment(
                        ledger_id,
                        fragment.first_entry_id,
                        tuple(cluster.bookies[number] for number in fragment.places),
                        ledger.shape.quorum.write_quorum,
                        ledger.shape.tier,
                        cluster.bytes_of_place(ledger, fragment),
                        ledger.shape.closed,
                        ledger.version,
                    )


def plan_rebalance(
    ledgers: Iterable[PlacedFragment],
    candidates: Iterable[Candidate],
    policy: PlacementPolicy,
    *,
    held: Iterable[str] = (),
    short: Iterable[int] = (),
    tolerance: float = TOLERANCE,
    moved_max: float = MOVED_MAX,
    moves_max: int = MOVES_MAX,
    full_above: float = FULL_ABOVE,
) -> RebalancePlan:
    """Plan a rebalance. The same arguments give the same plan, in whatever order the ledgers and bookies come.

    It is refused while repairs are held, while a ledger waits for one, or while a bookie that has copies is absent or
    does not report its capacity. Only one copy of a ledger moves at a time. A move never lowers the number of zones
    that a write set spans, nor that of racks or hosts while the zones stay the same.

    Args:
        ledgers: The fragments of all ledgers.
        candidates: The registered bookies.
        policy: The policy of placement; if it is strict, bookies without a label get nothing.
        held: The reasons why repairs do not proceed, a sentence each; see ``Hold``.
        short: Ledgers that wait for repairs.
        tolerance: The part of its capacity by which a bookie may differ from the level.
        moved_max: The part of all bytes that may move.
        moves_max: The copies that may move.
        full_above: The target line: no tier is filled beyond this part.
    """
    fragments = sorted(ledgers)
    known = {each.bookie: each for each in candidates}
    refused = [*held]
    if marked := sorted(set(short)):
        refused.append(f"ledgers wait for repairs: {listed(marked, _NAMED_MAX)}")
    if absent := sorted({bookie for each in fragments for bookie in each.ensemble if bookie not in known}):
        refused.append(f"bookies that have copies are absent: {listed(absent, _NAMED_MAX)}")
    silent = sorted(
        bookie.bookie_id for bookie, each in known.items() if any(not each.capacity.get(tier) for tier in each.tiers)
    )
    if silent:
        refused.append(f"bookies that do not register their capacity: {listed(silent, _NAMED_MAX)}; upgrade them")
    if refused:
        return RebalancePlan(refused=tuple(refused))
    return _Planner(fragments, known, policy, tolerance, (moved_max, moves_max), full_above).plan()


class _Planner:
    """Makes one plan."""

    def __init__(
        self,
        fragments: list[PlacedFragment],
        known: Mapping[Bookie, Candidate],
        policy: PlacementPolicy,
        tolerance: float,
        most: tuple[float, int],
        full_above: float,
    ) -> None:
        self._fragments = fragments
        self._known = known
        self._policy = policy
        self._tolerance = tolerance
        self._line = full_above
        self._all_bytes = sum(each.size_bytes * len(each.ensemble) for each in fragments)
        moved_max, self._moves_max = most
        self._left = int(moved_max * self._all_bytes)
        """The bytes that may still move."""
        self._moves: list[RebalanceMove] = []
        self._moved: set[int] = set()
        """Ledgers of which a copy moves already: one at a time is as few as there can be."""

    def plan(self) -> RebalancePlan:
        """Return the plan."""
        level = True
        fullness: list[TierFullness] = []
        placed: Counter[tuple[Bookie, StorageHint]] = Counter()
        for fragment in self._fragments:
            for bookie in fragment.ensemble:
                placed[bookie, fragment.tier] += fragment.size_bytes
        for tier in StorageHint:
            bookies = {
                bookie: _Use(each, tier, placed[bookie, tier])
                for bookie, each in sorted(self._known.items())
                if tier in each.tiers and not each.leaving
            }
            if bookies:
                level &= self._level(tier, bookies)
                fullness += [
                    TierFullness(bookie, tier, use.capacity, use.used, use.before, use.during, use.after)
                    for bookie, use in bookies.items()
                ]
        return RebalancePlan(tuple(self._moves), tuple(fullness), self._all_bytes, level=level)

    def _level(self, tier: StorageHint, bookies: dict[Bookie, _Use]) -> bool:
        """Plan the moves of one tier; return whether its bookies are level in the end."""
        level = sum(use.before for use in bookies.values()) / sum(use.capacity for use in bookies.values())
        copies: dict[Bookie, list[PlacedFragment]] = {}
        for fragment in self._fragments:
            if fragment.closed and fragment.tier == tier and fragment.size_bytes > 0:
                for bookie in fragment.ensemble:
                    copies.setdefault(bookie, []).append(fragment)
        # Of each source, copies are tried once, the largest first. A copy that fits nowhere now would hardly do later.
        queues = {
            bookie: iter(sorted(each, key=lambda one: -one.size_bytes))
            for bookie, each in copies.items()
            if bookie in bookies and bookies[bookie].part > level
        }
        heap = [(-bookies[bookie].part, bookie) for bookie in queues]
        heapq.heapify(heap)
        while heap and self._left > 0 and len(self._moves) < self._moves_max and not self._is_level(bookies, level):
            _, source = heapq.heappop(heap)
            for fragment in queues[source]:
                target = self._target(fragment, source, bookies, level)
                if target is not None:
                    self._move(fragment, source, target, bookies)
                    heapq.heappush(heap, (-bookies[source].part, source))
                    break
        return self._is_level(bookies, level)

    def _is_level(self, bookies: Mapping[Bookie, _Use], level: float) -> bool:
        return all(abs(use.part - level) <= self._tolerance for use in bookies.values())

    def _target(
        self, fragment: PlacedFragment, source: Bookie, bookies: Mapping[Bookie, _Use], level: float
    ) -> Bookie | None:
        """Return the emptiest bookie that can take a copy from a source; None if none can."""
        size = fragment.size_bytes
        if size > self._left or fragment.ledger_id in self._moved:
            return None
        names = {bookie.bookie_id for bookie in fragment.ensemble}
        fits = [
            (use.part, bookie)
            for bookie, use in bookies.items()
            if bookie.bookie_id not in names and self._improves(bookies[source], use, size, level)
        ]
        return next((bookie for _, bookie in sorted(fits) if self._keeps_spread(fragment, source, bookie)), None)

    def _improves(self, source: _Use, target: _Use, size: int, level: float) -> bool:
        """Return whether a move of some bytes has a reason, and neither bookie differs too much the other way then."""
        if target.before >= level * target.capacity:  # a bookie gets or gives, and never both
            return False
        if not target.writable or target.used + target.gained + size > self._line * target.capacity:
            return False
        above, below = source.part - level, level - target.part
        if above <= self._tolerance and below <= self._tolerance:
            return False
        return min(above - size / source.capacity, below - size / target.capacity) >= -self._tolerance

    def _keeps_spread(self, fragment: PlacedFragment, source: Bookie, target: Bookie) -> bool:
        """Return whether no write set spans fewer zones, or else racks or hosts, after a move."""
        if self._policy.strict and not self._known[target].location.known:
            return False
        place = fragment.ensemble.index(source)
        now = [self._known[bookie].location for bookie in fragment.ensemble]
        then = [*now[:place], self._known[target].location, *now[place + 1 :]]
        return keeps_spread(now, then, fragment.write_quorum)

    def _move(self, fragment: PlacedFragment, source: Bookie, target: Bookie, bookies: Mapping[Bookie, _Use]) -> None:
        """Add a move to the plan."""
        size = fragment.size_bytes
        bookies[source].after -= size
        bookies[target].after += size
        self._left -= size
        bookies[target].gained += size
        self._moved.add(fragment.ledger_id)
        self._moves.append(
            RebalanceMove(
                fragment.ledger_id, fragment.first_entry_id, source, target, fragment.tier, size, fragment.version
            )
        )


class _Use:
    """The use of a bookie's tier."""

    __slots__ = ("after", "before", "capacity", "gained", "used", "writable")

    def __init__(self, candidate: Candidate, tier: StorageHint, placed: int) -> None:
        self.capacity = candidate.capacity[tier]
        self.used = max(0, self.capacity - candidate.tiers[tier])
        self.before = self.after = placed
        self.gained = 0
        self.writable = not candidate.read_only

    @property
    def during(self) -> int:
        """The bytes of copies before a source has dropped any."""
        return self.before + self.gained

    @property
    def part(self) -> float:
        """The part of the capacity that copies take in the end."""
        return self.after / self.capacity
