"""The knowledge about a cluster's bookies, and its consequences: their status, targets, and reasons to hold repairs.

All decisions follow from state, and none from events: a bookie is *lost* if its cookie names an instance that has not
been registered for longer than the grace. State that could not be read is unknown, which differs from missing: without
the metadata store, no bookie counts as absent.

A *hold* stops repairs that are not urgent. Many failures at once mostly have one cause, which ends by itself more often
than not, and a storm of copies would add to it. A single failure is repaired after the grace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, UnderReplicatedLedger

SECOND_NS: Final = 1_000_000_000
FULL_LINE: Final = 0.85
"""The used share of a tier above which a bookie takes no copies."""

SESSION_NS_MIN: Final = 30 * SECOND_NS
"""The time for which the metadata store's session must last before a bookie without a registration counts as absent."""

URGENT_NS: Final = 30 * SECOND_NS
"""The absence of a bookie after which its copies are urgent; a quarter of the grace if that is shorter."""

FLAPPING_NS: Final = 3600 * SECOND_NS
FLAPPING_ABSENCES: Final = 3
"""The number of absences within ``FLAPPING_NS`` from which a bookie counts as flapping."""

FLAPPING_PAUSE_NS: Final = 1800 * SECOND_NS
"""The time for which a bookie counts as flapping after an absence, and for which a copy waits for a steadier target."""


class Space(NamedTuple):
    """The space of a tier.

    Attributes:
        free: Free bytes.
        total: All bytes; 0 if unknown, and then all free bytes may be used.
    """

    free: int
    total: int = 0

    @property
    def headroom(self) -> int:
        """The bytes that copies may take before the tier is full up to its line."""
        return self.free if not self.total else max(0, int(self.total * FULL_LINE) - (self.total - self.free))


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieFacts:
    """The data about a bookie in its cookie and registration.

    Attributes:
        bookie: The instance that belongs to the cluster.
        boots: The number of its last recorded start.
        state: The state in its cookie.
        state_since_ns: The time since which it has that state.
        until_ns: The time when its maintenance ends.
        location: ``zone/rack/host``; empty if unknown.
        registered: Whether that instance is registered.
        read_only: Whether it takes no new ledgers.
        in_limbo: The number of its ledgers that are in limbo.
        tiers: The space of each tier; not known of a bookie that is not registered.
    """

    bookie: Bookie
    boots: int = 0
    state: BookieState = BookieState.ACTIVE
    state_since_ns: int = 0
    until_ns: int = 0
    location: str = ""
    registered: bool = True
    read_only: bool = False
    in_limbo: int = 0
    tiers: Mapping[StorageHint, Space] = field(default_factory=dict, hash=False)


class Status(StrEnum):
    """The status of a bookie for the auditor.

    ``LIVE``, ``READ_ONLY``, ``IN_LIMBO``, ``FLAPPING``: registered; only a live one gets copies, and a flapping one
    those that cannot wait. ``MAINTENANCE``: a person expects it to be absent until a time. ``DRAINING``: registered,
    and to be emptied. ``ABSENT``: not registered, within the grace. ``LOST``: not registered for longer. ``REMOVED``:
    this instance never comes back.
    """

    LIVE = "live"
    READ_ONLY = "read_only"
    IN_LIMBO = "in_limbo"
    FLAPPING = "flapping"
    MAINTENANCE = "maintenance"
    DRAINING = "draining"
    ABSENT = "absent"
    LOST = "lost"
    REMOVED = "removed"


class Standing(NamedTuple):
    """A bookie's status, and what follows for its copies.

    Attributes:
        status: The status.
        sound: Whether its copies count, because it is registered.
        replaced_for: The reason why its copies are made elsewhere; None if they are not.
        since_ns: The time since which it is absent or draining; 0 otherwise.
        urgent: Whether it has been absent for long enough for urgent copies within the grace.
    """

    status: Status
    sound: bool
    replaced_for: RepairReason | None = None
    since_ns: int = 0
    urgent: bool = False

    @property
    def gone(self) -> bool:
        """True if its copies are not expected to come back."""
        return not self.sound and self.replaced_for is not None


class HoldReason(StrEnum):
    """The reason why repairs are held; ``HOLD_TEXTS`` explains each."""

    STORE_UNREACHABLE = "store_unreachable"
    SESSION_YOUNG = "session_young"
    FEW_REGISTERED = "few_registered"
    ZONE_ABSENT = "zone_absent"
    RACK_ABSENT = "rack_absent"
    MANY_LOST = "many_lost"
    FEW_WRITABLE = "few_writable"
    LITTLE_SPACE = "little_space"

    @property
    def blind(self) -> bool:
        """True if it is unknown which bookies are registered; then nothing is urgent, and no mark is changed.

        Such a hold ends by itself, at the latest half a minute after the metadata store answers again.
        """
        return self in (HoldReason.STORE_UNREACHABLE, HoldReason.SESSION_YOUNG)


HOLD_TEXTS: Final = {
    HoldReason.STORE_UNREACHABLE: "the metadata store cannot be reached",
    HoldReason.SESSION_YOUNG: "a bookie is not registered, and the session with the store is younger than 30 s",
    HoldReason.FEW_REGISTERED: "fewer members are registered than repair.hold_below asks for",
    HoldReason.ZONE_ABSENT: "all bookies of a zone are absent",
    HoldReason.RACK_ABSENT: "all bookies of a rack are absent",
    HoldReason.MANY_LOST: "several bookies were lost within one grace",
    HoldReason.FEW_WRITABLE: "fewer bookies take entries than an open ledger needs for an ensemble",
    HoldReason.LITTLE_SPACE: "a tier of the other bookies would be filled up beyond its line",
}


class Hold(NamedTuple):
    """A reason to hold repairs, and a sentence with its numbers and the remedy."""

    reason: HoldReason
    text: str


class MarkKey(NamedTuple):
    """The ledger and the bookie of a mark; each pair has one mark at most."""

    ledger_id: int
    bookie: Bookie


class MarkTable:
    """The marks in the metadata store, by ledger. Threads: one at a time."""

    def __init__(self, marks: Iterable[UnderReplicatedLedger] = ()) -> None:
        self._marks: Final[dict[MarkKey, UnderReplicatedLedger]] = {}
        self._by_ledger: Final[dict[int, dict[Bookie, UnderReplicatedLedger]]] = {}
        for mark in marks:
            self.put(MarkKey(mark.ledger_id, mark.bookie), mark)

    def __len__(self) -> int:
        """Return the number of marks."""
        return len(self._marks)

    def get(self, key: MarkKey) -> UnderReplicatedLedger | None:
        """Return a mark; None if it does not exist."""
        return self._marks.get(key)

    def items(self) -> Iterable[tuple[MarkKey, UnderReplicatedLedger]]:
        """Return all marks."""
        return self._marks.items()

    def ledgers(self) -> Iterable[int]:
        """Return the ledgers that have marks."""
        return self._by_ledger.keys()

    def of_ledger(self, ledger_id: int) -> Mapping[Bookie, UnderReplicatedLedger]:
        """Return the marks of a ledger."""
        return self._by_ledger.get(ledger_id, {})

    def put(self, key: MarkKey, mark: UnderReplicatedLedger | None) -> None:
        """Store a mark, or remove it if it is None."""
        if mark is not None:
            self._marks[key] = mark
            self._by_ledger.setdefault(key.ledger_id, {})[key.bookie] = mark
        elif self._marks.pop(key, None) is not None:
            of_ledger = self._by_ledger[key.ledger_id]
            del of_ledger[key.bookie]
            if not of_ledger:
                del self._by_ledger[key.ledger_id]


@dataclass(slots=True, kw_only=True)
class Situation:
    """All knowledge on which a plan depends, except the ledgers.

    Attributes:
        bookies: The facts about each member, by name.
        absent_since_ns: The time since which each bookie is absent, including bookies without a cookie that ledgers
            name, and instances that were replaced.
        absences: The time when the absences of each bookie began, within ``FLAPPING_NS``.
        store_since_ns: The time when the metadata store's session began; None while the store cannot be reached.
        settings: The settings of the cluster.
        marks: The marks in the metadata store.
        moved_ns: The last sign of life of each open ledger's writer.
        parked: Stuck marks that are not tried again, because nothing has changed.
    """

    bookies: dict[str, BookieFacts] = field(default_factory=dict)
    absent_since_ns: dict[Bookie, int] = field(default_factory=dict)
    absences: dict[Bookie, tuple[int, ...]] = field(default_factory=dict)
    store_since_ns: int | None = None
    settings: ClusterSettings = field(default_factory=ClusterSettings)
    marks: MarkTable = field(default_factory=MarkTable)
    moved_ns: dict[int, int] = field(default_factory=dict)
    parked: frozenset[MarkKey] = frozenset()

    def paused(self, now_ns: int) -> bool:
        """Return whether a person has paused all repairs; a pause ends by itself."""
        return now_ns < self.settings.repair.paused_until_ns

    @property
    def grace_ns(self) -> int:
        """The time for which a bookie may be absent before it is lost."""
        return int(self.settings.repair.grace_s * SECOND_NS)

    @property
    def open_grace_ns(self) -> int:
        """The time without progress of an open ledger after which its writer counts as gone."""
        return int(self.settings.repair.open_grace_s * SECOND_NS)

    def zone_of(self, name: str) -> str:
        """Return the zone of a bookie; empty if it is not known."""
        facts = self.bookies.get(name)
        return facts.location.partition("/")[0] if facts is not None else ""

    @property
    def moves_misplaced(self) -> bool:
        """True if ledgers that span too few zones are moved."""
        return self.settings.placement.repair and self.settings.placement.min_zones > 1


def standing_of(situation: Situation, bookie: Bookie, now_ns: int) -> Standing:
    """Return the standing of a bookie that a ledger names, or that is a member."""
    facts = situation.bookies.get(bookie.bookie_id)
    since = situation.absent_since_ns.get(bookie, now_ns)
    if facts is not None and facts.bookie != bookie:
        return Standing(Status.REMOVED, False, RepairReason.LOST, since, True)
    if facts is None or not facts.registered:
        return _absent(situation, facts, since, now_ns)
    if facts.state in (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED):
        return Standing(Status.DRAINING, True, RepairReason.DRAINING, facts.state_since_ns)
    if facts.in_limbo:
        return Standing(Status.IN_LIMBO, True)
    if facts.state is BookieState.MAINTENANCE and now_ns < facts.until_ns:
        return Standing(Status.MAINTENANCE, True)
    if facts.read_only:
        return Standing(Status.READ_ONLY, True)
    return Standing(Status.FLAPPING if flaps(situation, bookie, now_ns) else Status.LIVE, True)


def _absent(situation: Situation, facts: BookieFacts | None, since: int, now_ns: int) -> Standing:
    """Return the standing of a bookie that is not registered, or of which nothing is known."""
    if facts is not None and facts.state is BookieState.REMOVED:
        return Standing(Status.REMOVED, False, RepairReason.LOST, since, True)
    grace = situation.grace_ns
    urgent = now_ns >= since + min(URGENT_NS, grace // 4)
    if facts is not None and facts.state is BookieState.MAINTENANCE and now_ns < facts.until_ns:
        return Standing(Status.MAINTENANCE, False, None, since, urgent)
    if now_ns < since + grace:
        return Standing(Status.ABSENT, False, None, since, urgent)
    return Standing(Status.LOST, False, RepairReason.LOST, since, True)


def flaps(situation: Situation, bookie: Bookie, now_ns: int) -> bool:
    """Return whether a bookie was absent too often within an hour, and recently."""
    recent = [each for each in situation.absences.get(bookie, ()) if now_ns - each < FLAPPING_NS]
    return len(recent) >= FLAPPING_ABSENCES and now_ns - recent[-1] < FLAPPING_PAUSE_NS


def standings_of(cluster: ClusterMap, situation: Situation, now_ns: int) -> list[Standing]:
    """Return the standing of each bookie of the map, by its number."""
    return [standing_of(situation, bookie, now_ns) for bookie in cluster.bookies]


class Target(NamedTuple):
    """A bookie that may take copies, and the bytes that it may take of each tier.

    Attributes:
        bookie: The bookie.
        headroom: The bytes that it may take, by tier.
        steady: Whether it may take any copies; a flapping bookie may take only those that cannot wait.
    """

    bookie: Bookie
    headroom: Mapping[StorageHint, int]
    steady: bool = True

    def takes(self, tier: StorageHint, size_bytes: int) -> bool:
        """Return whether it may take this number of bytes; if it lacks the ledger's tier, another tier counts."""
        return size_bytes <= self.bytes_for(tier) > 0

    def bytes_for(self, tier: StorageHint) -> int:
        """Return the bytes of a ledger of a tier that it may take."""
        return self.headroom[tier] if tier in self.headroom else max(self.headroom.values(), default=0)


def targets_of(situation: Situation, now_ns: int) -> tuple[Target, ...]:
    """Return the bookies that may take copies, ordered."""
    return tuple(
        Target(facts.bookie, {tier: space.headroom for tier, space in facts.tiers.items()}, status is Status.LIVE)
        for facts in sorted(situation.bookies.values(), key=lambda each: each.bookie)
        if (status := standing_of(situation, facts.bookie, now_ns).status) in (Status.LIVE, Status.FLAPPING)
        and any(space.headroom for space in facts.tiers.values())
    )


def holds_of(
    cluster: ClusterMap, situation: Situation, now_ns: int, needed: Mapping[StorageHint, int]
) -> tuple[Hold, ...]:
    """Return all reasons to hold repairs; empty without one.

    Args:
        cluster: The ledgers.
        situation: All other knowledge.
        now_ns: The time.
        needed: The bytes that the plan copies, by tier.
    """
    began = situation.store_since_ns
    if began is None:
        return (_hold(HoldReason.STORE_UNREACHABLE, "repairs continue 30 s after it is back, or once all bookies are"),)
    members = _members(cluster, situation, now_ns)
    away = sorted(each.bookie.bookie_id for each in members if not each.registered)
    if away and now_ns - began < SESSION_NS_MIN:
        return (_hold(HoldReason.SESSION_YOUNG, f"{', '.join(away)} may register yet"),)
    found = [
        *_few_registered(situation, members),
        *_parts_absent(members),
        *_many_lost(situation, members, now_ns),
        *_few_writable(cluster, situation, now_ns),
        *_little_space(situation, now_ns, needed),
    ]
    return tuple(found)


def _hold(reason: HoldReason, detail: str) -> Hold:
    return Hold(reason, f"{HOLD_TEXTS[reason]}: {detail}")


def _members(cluster: ClusterMap, situation: Situation, now_ns: int) -> list[BookieFacts]:
    """Return the members whose absence may hold repairs.

    A lost bookie that no ledger names any more does not count, because its repair has been done: otherwise a cluster
    would be in hold some day because of the failures of a year.
    """
    found = []
    for facts in situation.bookies.values():
        if facts.bookie.bookie_id in situation.settings.repair.accepted_losses:
            continue
        if facts.state in (BookieState.DRAINED, BookieState.REMOVED) and not facts.registered:
            continue
        number = cluster.number_of(facts.bookie)
        bare = number is None or not cluster.ledgers_of(number)
        if bare and standing_of(situation, facts.bookie, now_ns).status is Status.LOST:
            continue
        found.append(facts)
    return found


def _few_registered(situation: Situation, members: list[BookieFacts]) -> Iterable[Hold]:
    """Yield the hold of few registered members; one absent bookie is one failure, also in a small cluster."""
    registered = sum(each.registered for each in members)
    if len(members) - registered >= 2 and registered < situation.settings.repair.hold_below * len(members):
        yield _hold(
            HoldReason.FEW_REGISTERED,
            f"{registered} of {len(members)}; start the others, or accept their loss",
        )


def _parts_absent(members: list[BookieFacts]) -> Iterable[Hold]:
    """Yield a hold for each zone, and each rack of other zones, whose bookies are all absent.

    A zone of one bookie does not count, because it cannot be distinguished from the failure of that bookie. Nor does
    the only zone of a cluster.
    """
    zones: dict[str, list[BookieFacts]] = {}
    racks: dict[str, list[BookieFacts]] = {}
    for facts in members:
        zone, _, rest = facts.location.partition("/")
        rack = rest.partition("/")[0]
        zones.setdefault(zone, []).append(facts)
        if rack:
            racks.setdefault(f"{zone}/{rack}", []).append(facts)
    dark = {name for name, each in zones.items() if _all_absent(name, each, zones)}
    for name in sorted(dark):
        yield _hold(HoldReason.ZONE_ABSENT, f"{name}, {len(zones[name])} bookies; accept their loss if it is final")
    for name, each in sorted(racks.items()):
        if name.partition("/")[0] not in dark and _all_absent(name, each, racks):
            yield _hold(HoldReason.RACK_ABSENT, f"{name}, {len(each)} bookies; accept their loss if it is final")


def _all_absent(name: str, part: list[BookieFacts], parts: Mapping[str, list[BookieFacts]]) -> bool:
    return bool(name) and len(parts) >= 2 and len(part) >= 2 and not any(each.registered for each in part)


def _many_lost(situation: Situation, members: list[BookieFacts], now_ns: int) -> Iterable[Hold]:
    """Yield the hold of several losses that began within one grace."""
    lost = sorted(
        (standing.since_ns, facts.bookie.bookie_id)
        for facts in members
        if (standing := standing_of(situation, facts.bookie, now_ns)).status is Status.LOST
    )
    grace = situation.grace_ns
    near = [
        name
        for index, (since, name) in enumerate(lost)
        if any(abs(since - other) <= grace for at, (other, _) in enumerate(lost) if at != index)
    ]
    if near:
        yield _hold(HoldReason.MANY_LOST, f"{', '.join(near)}; start them, or accept their loss")


def _few_writable(cluster: ClusterMap, situation: Situation, now_ns: int) -> Iterable[Hold]:
    """Yield the hold of few bookies that take entries; closed ledgers ask for none, and may wait for a target alone."""
    writable = sum(
        standing_of(situation, each.bookie, now_ns).status in (Status.LIVE, Status.FLAPPING, Status.IN_LIMBO)
        for each in situation.bookies.values()
    )
    accepted = len(situation.settings.repair.accepted_losses)
    if writable + accepted < cluster.largest_open_ensemble:
        yield _hold(
            HoldReason.FEW_WRITABLE,
            f"{writable}, and an open ledger has {cluster.largest_open_ensemble}; add bookies",
        )


def _little_space(situation: Situation, now_ns: int, needed: Mapping[StorageHint, int]) -> Iterable[Hold]:
    """Yield a hold for each tier that the plan would fill up; a tier that is full already is not a target."""
    targets = [each for each in targets_of(situation, now_ns) if each.steady]
    for tier, size in sorted(needed.items()):
        headroom = sum(each.bytes_for(tier) for each in targets)
        if size > headroom > 0:
            yield _hold(
                HoldReason.LITTLE_SPACE,
                f"{size} bytes of tier {tier} have to be copied and {headroom} fit below {FULL_LINE:.0%}; add space",
            )
