"""The repairs that a cluster needs, and their order: ``plan`` is the definition that the auditor's machine follows.

``assess`` judges one ledger by the standings of its bookies and by its marks. Its result is a task for each bookie of
the ledger that has to be replaced or filled up. ``select`` orders the tasks of all ledgers, leaves out those that are
held or have no target, and returns those that should be marked. Both are shared with the machine, which keeps the
assessments of all ledgers by deltas; ``plan`` makes them all again.

The order: the fewest live sound copies of an entry come first, whatever the reason; then urgent tasks, the reason, the
oldest. A copy is *urgent* if an entry is down to one live sound copy of several, unless the only failure is a bookie
within its grace. With a write quorum of two, each restart of a bookie leaves one copy, so repairs wait for the restart.

A bookie that flaps may be absent before a copy is done, so copies wait for a steadier target, at most for
``FLAPPING_PAUSE_NS``. Urgent copies do not wait, because a copy that may be lost soon is better than none.

The last fragment of an open ledger is left to its writer. A ledger whose writer is gone waits for its owner; a worker
recovers a ledger in that state if the settings allow it.
"""

from __future__ import annotations

import heapq
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap, MappedFragment, MappedLedger
from pybk.healing.situation import (
    FLAPPING_PAUSE_NS,
    SECOND_NS,
    Hold,
    MarkKey,
    Situation,
    Standing,
    Target,
    holds_of,
    standings_of,
    targets_of,
)
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.replication.locations import ZoneRule, gains_zones, keeps_zones_open
from pybk.replication.quorum import places as places_of

WINDOW: Final = 1000
"""The most queued marks that the auditor publishes; the same number of each terminal state."""

DERIVED: Final = (RepairReason.LOST, RepairReason.DRAINING, RepairReason.MISPLACED)
"""The reasons that the auditor derives; it withdraws marks for them when they no longer hold."""

STUCK_NS: Final = 3600 * SECOND_NS
"""The longest time for which a mark stays stuck before workers try it again, as long as nothing changes."""

NEVER_NS: Final = 1 << 63
"""Later than any time."""

_RANK: Final = {reason: reason.rank for reason in RepairReason}


class Task(NamedTuple):
    """A repair: a bookie of a ledger is replaced, or gets the entries that it misses.

    Attributes:
        ledger_id: The ledger.
        bookie: The bookie.
        reason: The most urgent reason.
        state: QUEUED, or LOST or WAITING_FOR_OWNER, which no worker can mend.
        copies: The fewest live sound copies of an entry that the task copies.
        urgent: Whether it is done even during a hold and within a grace.
        first_entry_id: The first entry of the first fragment that it mends.
        since_ns: The time since which the reason holds; 0 if unknown.
        size_bytes: The bytes to copy, about.
        tier: The tier of the entries.
        recover: Whether the ledger waits for its owner, and the settings allow any member to recover it.
        derived: The reason to publish; None if the existing mark suffices.
        stays: Whether the bookie keeps its place and is filled up; no target is needed then.
    """

    ledger_id: int
    bookie: Bookie
    reason: RepairReason
    state: RepairState
    copies: int
    urgent: bool
    first_entry_id: int
    since_ns: int
    size_bytes: int
    tier: StorageHint
    recover: bool
    derived: RepairReason | None
    stays: bool

    @property
    def key(self) -> MarkKey:
        """The key of its mark."""
        return MarkKey(self.ledger_id, self.bookie)


Rank = tuple[int, bool, int, int, int, Bookie]
"""The place of a task in the order, ascending."""


def rank_of(task: Task) -> Rank:
    """Return the place of a task in the order."""
    return (task.copies, not task.urgent, _RANK[task.reason], task.since_ns, task.ledger_id, task.bookie)


class Assessment(NamedTuple):
    """The faults of a ledger.

    Attributes:
        copies: The fewest live sound copies of an entry.
        write_quorum: The number of copies that the ledger should have.
        tasks: The repairs, including those that no worker can make.
        lost: Whether there are entries without any sound copy that is expected to come back.
        left_to_writer: Whether its last fragment has places short, and its writer is expected to replace them.
    """

    copies: int
    write_quorum: int
    tasks: tuple[Task, ...]
    lost: bool
    left_to_writer: bool


@dataclass(slots=True)
class _Draft:
    """The task of one bookie, while the fragments of its ledger are judged."""

    reason: RepairReason
    since_ns: int
    stays: bool
    derived: RepairReason | None
    state: RepairState | None = None
    copies: int = 1 << 30
    urgent: bool = False
    first: int = 1 << 62
    size: int = 0
    recover: bool = False

    def queue(self, fragment: MappedFragment, copies: int, size: int, *, urgent: bool) -> None:
        """Add a fragment that can be repaired."""
        if self.state is not RepairState.QUEUED:  # earlier fragments cannot be repaired; a worker leaves them
            self.state, self.first = RepairState.QUEUED, fragment.first_entry_id
        self.copies = min(self.copies, copies)
        self.urgent |= urgent
        self.first = min(self.first, fragment.first_entry_id)
        self.size += size

    def end(self, fragment: MappedFragment, state: RepairState) -> None:
        """Add a fragment that no worker can repair."""
        if self.state is None or (self.state is RepairState.WAITING_FOR_OWNER and state is RepairState.LOST):
            self.state = state
            self.first = min(self.first, fragment.first_entry_id)


class _Bits(NamedTuple):
    """The places of a fragment, as bits.

    ``sound`` have sound copies of all entries. ``partial`` serve, and lack some. ``kept`` serve, and have all that they
    acknowledged. ``hopeful`` may come back with sound copies. ``candidates`` are to be repaired.
    """

    sound: int
    partial: int
    kept: int
    hopeful: int
    candidates: int


class _Judge:
    """Assesses one ledger."""

    def __init__(
        self,
        cluster: ClusterMap,
        situation: Situation,
        standings: Sequence[Standing],
        now_ns: int,
        ledger_id: int,
        ledger: MappedLedger,
    ) -> None:
        self._cluster = cluster
        self._situation = situation
        self._standings = standings
        self._now = now_ns
        self._id = ledger_id
        self._ledger = ledger
        self._drafts: dict[int, _Draft] = {}
        self._copies = ledger.shape.quorum.write_quorum
        self._lost = False
        self._left = False
        self._observed: Mapping[int, tuple[int, RepairReason, int]] = {}
        marks = situation.marks.of_ledger(ledger_id)
        if marks:
            self._observed = self._observations(marks)

    def assessment(self) -> Assessment | None:
        """Return the assessment; None if the ledger is whole."""
        seen = []
        for fragment in self._cluster.fragments(self._ledger):
            seen.append(fragment)
            self._fragment(fragment)
        write_quorum = self._ledger.shape.quorum.write_quorum
        if self._situation.moves_misplaced and not self._drafts and self._copies >= write_quorum:
            for fragment in seen:
                self._placement(fragment)
        if not self._drafts and self._copies >= write_quorum and not self._left:
            return None
        tasks = tuple(
            self._task(self._cluster.bookies[number], draft)
            for number, draft in sorted(self._drafts.items())
            if draft.state is not None
        )
        return Assessment(self._copies, write_quorum, tasks, self._lost, self._left)

    def _task(self, bookie: Bookie, draft: _Draft) -> Task:
        assert draft.state is not None
        return Task(
            self._id,
            bookie,
            draft.reason,
            draft.state,
            draft.copies if draft.state is RepairState.QUEUED else 0,
            draft.urgent,
            draft.first,
            draft.since_ns,
            draft.size,
            self._ledger.shape.tier,
            draft.recover,
            draft.derived,
            draft.stays,
        )

    def _observations(self, marks: Mapping[Bookie, UnderReplicatedLedger]) -> dict[int, tuple[int, RepairReason, int]]:
        """Return the first entry, the most urgent reason and the time of the observations of each bookie, by number."""
        found = {}
        for bookie, mark in marks.items():
            number = self._cluster.number_of(bookie)
            causes = {reason: first for reason, first in mark.causes_by_reason().items() if reason.observed}
            if number is not None and causes:
                reason = min(causes, key=lambda each: each.rank)
                found[number] = (min(causes.values()), reason, mark.since_ns)
        return found

    def _fragment(self, fragment: MappedFragment) -> None:
        """Judge a fragment."""
        bits = self._bits(fragment)
        full = (1 << len(fragment.places)) - 1
        if bits.sound == full and not bits.candidates:
            return
        last = fragment.last_entry_id
        empty = last is not None and last < fragment.first_entry_id
        masks = self._ledger.shape.masks
        fewest = min([self._copies_of(mask, bits, ended=last is not None) for mask in masks])
        if not empty:
            self._copies = min(self._copies, fewest)
        if last is None:
            self._last_fragment(fragment, bits)
            return
        urgent = 0 if empty or fewest > 1 else self._urgent(fragment, bits)
        for place in places_of(bits.candidates | urgent):
            draft = self._draft(fragment, fragment.places[place])
            sets = [mask for mask in masks if mask >> place & 1]
            low = min((bits.sound & mask).bit_count() for mask in sets)
            if empty:
                draft.queue(fragment, self._ledger.shape.quorum.write_quorum, 0, urgent=False)
            elif low or all((bits.sound | bits.partial) & mask & ~(1 << place) for mask in sets):
                # Bookies that lack some entries may have what another one lacks; if not, the copy fails, and says so.
                size = self._cluster.bytes_of_place(self._ledger, fragment)
                draft.queue(fragment, low, size, urgent=bool(urgent >> place & 1))
            elif any(not (bits.sound | bits.hopeful) & mask for mask in sets):
                self._lost = True
                draft.end(fragment, RepairState.LOST)

    def _copies_of(self, mask: int, bits: _Bits, *, ended: bool) -> int:
        """Return the fewest live sound copies of an entry of a write set.

        In a fragment without an end, all bookies may miss entries because nobody acknowledged these: a writer that
        fails marks each bookie from the first such entry on (``MISSED``). Whether they exist is up to the recovery, so
        the entries that were acknowledged count.
        """
        sound = (bits.sound & mask).bit_count()
        return sound if ended else max(sound, self._ledger.shape.quorum.kept(mask, bits.kept))

    def _bits(self, fragment: MappedFragment) -> _Bits:
        sound = partial = kept = hopeful = candidates = 0
        standings, observed, last = self._standings, self._observed, fragment.last_entry_id
        for place, number in enumerate(fragment.places):
            standing = standings[number]
            bit = 1 << place
            found = observed.get(number)
            if found is not None and (last is None or found[0] <= last):
                # A bookie within its grace is filled up when it is back.
                partial |= bit if standing.sound else 0
                kept |= bit if standing.sound and found[1] is RepairReason.MISSED else 0
                candidates |= bit if standing.sound else 0
            elif standing.sound:
                sound |= bit
                kept |= bit
            elif standing.replaced_for is None:
                hopeful |= bit
            if standing.replaced_for is not None:
                candidates |= bit
        return _Bits(sound, partial, kept, hopeful, candidates)

    def _urgent(self, fragment: MappedFragment, bits: _Bits) -> int:
        """Return the places of urgent copies: those that give each entry that is down to one copy a second one."""
        write_quorum = self._ledger.shape.quorum.write_quorum
        if write_quorum < 2:
            return 0
        missing = [place for place in range(len(fragment.places)) if not bits.sound >> place & 1]
        standing = {place: self._standings[fragment.places[place]] for place in missing}
        missing = [place for place in missing if bits.candidates >> place & 1 or standing[place].urgent]
        missing.sort(key=lambda place: (not bits.candidates >> place & 1, standing[place].since_ns, place))
        chosen = 0
        for place in missing:
            for mask in self._ledger.shape.masks:
                if not mask >> place & 1 or ((bits.sound | chosen) & mask).bit_count() != 1:
                    continue
                # One bookie within its grace is one failure, and waited for; a second one, or a loss, is not.
                if write_quorum > 2 or bits.candidates & mask & ~bits.sound:
                    chosen |= 1 << place
                    break
        return chosen

    def _last_fragment(self, fragment: MappedFragment, bits: _Bits) -> None:
        """Judge the last fragment of an open ledger, which its writer mends as long as there is one."""
        if not bits.candidates:
            return
        if self._now - self._situation.moved_ns.get(self._id, self._now) < self._situation.open_grace_ns:
            self._left = True
            return
        for place in places_of(bits.candidates):
            draft = self._draft(fragment, fragment.places[place])
            if not bits.sound | bits.partial | bits.hopeful:
                self._lost = True
                draft.end(fragment, RepairState.LOST)
            else:
                draft.end(fragment, RepairState.WAITING_FOR_OWNER)
                draft.recover = self._situation.settings.repair.recover_abandoned and bool(bits.sound | bits.partial)

    def _draft(self, fragment: MappedFragment, number: int) -> _Draft:
        """Return the draft of a bookie's task."""
        draft = self._drafts.get(number)
        if draft is None:
            standing = self._standings[number]
            observed = self._observed.get(number)
            derived = standing.replaced_for
            if derived is None and not standing.sound:
                derived = RepairReason.LOST  # urgent, and within its grace
            if observed is not None and (derived is None or observed[1].rank < derived.rank):
                draft = _Draft(observed[1], observed[2], derived is None, derived)
            else:
                draft = _Draft(derived or RepairReason.MISPLACED, standing.since_ns, False, derived)
            self._drafts[number] = draft
        return draft

    def _placement(self, fragment: MappedFragment) -> None:
        """Add a task for a place of each write set that has copies in too few zones."""
        moved = place_to_move(self._cluster, self._situation, self._ledger, fragment)
        last = fragment.last_entry_id
        if moved is None or last is None:
            return
        draft = self._draft(fragment, fragment.places[moved])
        draft.derived = RepairReason.MISPLACED
        size = self._cluster.bytes_of_place(self._ledger, fragment) if last >= fragment.first_entry_id else 0
        draft.queue(fragment, self._copies, size, urgent=False)


def place_to_move(
    cluster: ClusterMap, situation: Situation, ledger: MappedLedger, fragment: MappedFragment
) -> int | None:
    """Return a place to move of a fragment that has an end and spans too few zones; None if there is none."""
    if fragment.last_entry_id is None:
        return None
    return misplaced_place(
        _zones(cluster, situation, fragment), ledger.shape.masks, situation.settings.placement.min_zones
    )


def is_misplaced(cluster: ClusterMap, situation: Situation, ledger_id: int) -> bool:
    """Return whether a fragment of a ledger that has an end spans fewer zones than the settings ask for."""
    ledger = cluster.get(ledger_id)
    return ledger is not None and any(
        place_to_move(cluster, situation, ledger, fragment) is not None for fragment in cluster.fragments(ledger)
    )


def _zones(cluster: ClusterMap, situation: Situation, fragment: MappedFragment) -> list[str]:
    return [situation.zone_of(cluster.bookies[number].bookie_id) for number in fragment.places]


def misplaced_place(zones: Sequence[str], masks: Iterable[int], wanted: int) -> int | None:
    """Return a place whose move lets a write set span more zones; None if all span enough, or a zone is not known."""
    if not all(zones):
        return None
    for mask in masks:
        members = list(places_of(mask))
        used = Counter(zones[place] for place in members)
        if len(used) < min(wanted, len(members)):
            return max(place for place in members if used[zones[place]] > 1)
    return None


def signature_of(cluster: ClusterMap, standings: Sequence[Standing], now_ns: int, ledger_id: int) -> int:
    """Return a number that changes with a ledger's metadata, with the status of its bookies, and once an hour.

    The hour covers causes that are not visible here, such as a slow network between two bookies.
    """
    ledger = cluster.get(ledger_id)
    if ledger is None:
        return 0
    seen = [standings[number].status.value for number in sorted(cluster.numbers_of(ledger))]
    return zlib.crc32(f"{ledger.version} {seen} {now_ns // STUCK_NS}".encode())


def assess(
    cluster: ClusterMap, situation: Situation, standings: Sequence[Standing], now_ns: int, ledger_id: int
) -> Assessment | None:
    """Return the assessment of a ledger; None if it is whole, or not known.

    Args:
        cluster: The ledgers.
        situation: All other knowledge.
        standings: The standings of the map's bookies, by number.
        now_ns: The time.
        ledger_id: The ledger.
    """
    ledger = cluster.get(ledger_id)
    return None if ledger is None else _Judge(cluster, situation, standings, now_ns, ledger_id, ledger).assessment()


def suspects(cluster: ClusterMap, situation: Situation, standings: Sequence[Standing]) -> Collection[int]:
    """Return the ledgers that may need repairs; all others are whole.

    Cost: the ledgers of the bookies that are not well; every ledger if misplaced ledgers are moved.
    """
    if situation.moves_misplaced:
        return list(cluster)
    found = {each for each in situation.marks.ledgers() if each in cluster}
    for number, standing in enumerate(standings):
        if not standing.sound or standing.replaced_for is not None:
            found |= cluster.ledgers_of(number)
    return found


def select(
    cluster: ClusterMap,
    situation: Situation,
    tasks: Iterable[Task],
    found: Mapping[MarkKey, Task],
    terminal: Iterable[Task],
    targets: Sequence[Target],
    *,
    held: bool,
    now_ns: int,
    window: int = WINDOW,
) -> dict[MarkKey, Task]:
    """Return the tasks that should be marked, by key, with the states that their marks should have.

    Args:
        cluster: The ledgers.
        situation: All other knowledge.
        tasks: The queued tasks, in order.
        found: The same by key.
        terminal: The tasks that no worker can make.
        targets: The bookies that may take copies.
        held: Whether only urgent tasks are done.
        now_ns: The time.
        window: The most marks of each kind.

    Cost: what is selected, and the tasks without a target before that.
    """
    parked = situation.parked
    others = {key: found[key] for key in parked if key in found}
    others.update((task.key, task) for task in heapq.nsmallest(window, terminal, key=rank_of))
    if situation.paused(now_ns):
        return others
    wanted: dict[MarkKey, Task] = {}
    queued = missing = 0
    steady, all_targets = _Space([each for each in targets if each.steady]), _Space(targets)
    for task in tasks:
        if queued >= window or (held and task.copies > 1):
            break
        key = task.key
        if (held and not task.urgent) or key in parked:
            continue
        space = all_targets if cannot_wait(task, now_ns) else steady
        if task.stays or has_target(cluster, situation, task, space):
            wanted[key] = task
            queued += 1
        elif missing < window:
            wanted[key] = task._replace(state=RepairState.NO_TARGET)
            missing += 1
        elif not targets:
            break
    return wanted | others


def cannot_wait(task: Task, now_ns: int) -> bool:
    """Return whether a task takes a flapping target if no steadier one exists."""
    return task.urgent or (task.since_ns > 0 and now_ns - task.since_ns >= FLAPPING_PAUSE_NS)


class _Space:
    """The space of all targets, for many questions."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self.targets = targets
        self._sorted: dict[StorageHint, list[int]] = {}

    def count(self, tier: StorageHint, size_bytes: int) -> int:
        """Return how many targets may take so many bytes of a tier."""
        each = self._sorted.get(tier)
        if each is None:
            each = self._sorted[tier] = sorted(target.bytes_for(tier) for target in self.targets)
        return len(each) - bisect_left(each, max(size_bytes, 1))


def has_target(cluster: ClusterMap, situation: Situation, task: Task, space: _Space) -> bool:
    """Return whether a bookie can take the place of the task's bookie in one of its fragments.

    The policy of placement may forbid it; and a misplaced ledger has to gain a zone.
    """
    ledger = cluster.get(task.ledger_id)
    able = space.count(task.tier, task.size_bytes)
    if not able or ledger is None:
        return False
    rules: list[ZoneRule] = []
    if task.reason is RepairReason.MISPLACED:
        rules.append(gains_zones)
    if situation.settings.placement.strict:
        rules.append(keeps_zones_open)
    if not rules and able > ledger.shape.quorum.ensemble_size:
        return True
    bookies = [each.bookie for each in space.targets if each.takes(task.tier, task.size_bytes)]
    return any(
        _has_taker(cluster, situation, ledger, fragment, task.bookie, bookies, rules)
        for fragment in cluster.fragments(ledger)
    )


def _has_taker(
    cluster: ClusterMap,
    situation: Situation,
    ledger: MappedLedger,
    fragment: MappedFragment,
    leaving: Bookie,
    bookies: Iterable[Bookie],
    rules: Collection[ZoneRule],
) -> bool:
    """Return whether one of some bookies can take the place of another one in a fragment that has an end."""
    ensemble = [cluster.bookies[number] for number in fragment.places]
    if leaving not in ensemble or fragment.last_entry_id is None:
        return False
    place = ensemble.index(leaving)
    zones = _zones(cluster, situation, fragment)
    sets = [tuple(places_of(mask)) for mask in ledger.shape.masks]
    needed = min(situation.settings.placement.min_zones, ledger.shape.quorum.write_quorum)
    # A new instance under the name of a bookie of the ensemble may take the place of that one alone.
    others = {each.bookie_id for each in ensemble if each != leaving}
    return any(
        each != leaving
        and each.bookie_id not in others
        and all(rule(zones, place, situation.zone_of(each.bookie_id), sets, needed) for rule in rules)
        for each in bookies
    )


class Shortage(NamedTuple):
    """Ledgers that are short for the same reason, with the same number of copies.

    Attributes:
        ledgers: Their number.
        bytes: The bytes, about, that their tasks copy, including those that no worker can make.
        oldest_since_ns: The oldest reason of a task; 0 if there is none.
    """

    ledgers: int
    bytes: int
    oldest_since_ns: int


WITHIN_GRACE: Final = "absent"
LEFT_TO_WRITER: Final = "writer"
"""The reason for a ledger that is short without a repair: a bookie is within its grace, or its writer replaces one."""


class Counts(NamedTuple):
    """The counts of a cluster's ledgers, for its health.

    Attributes:
        short: Ledgers with fewer live sound copies of an entry than they should have: by the number of these copies,
            "0", "1", "2" or "more".
        reasons: Ledgers with tasks, by the most urgent reason.
        states: Tasks by state.
        bytes: The bytes, about, that queued tasks copy.
        lost: Ledgers with entries that are lost.
        left_to_writer: Open ledgers whose writer is expected to replace a bookie.
        misplaced: Ledgers that span fewer zones than the settings ask for, whether they will be moved or not.
        oldest_since_ns: The oldest reason of a task; 0 if there is none.
        shortages: The ledgers of ``short``, also by the most urgent reason of a task, ``WITHIN_GRACE`` or
            ``LEFT_TO_WRITER``: by reason and copies.
    """

    short: dict[str, int]
    reasons: dict[RepairReason, int]
    states: dict[RepairState, int]
    bytes: int
    lost: int
    left_to_writer: int
    misplaced: int
    oldest_since_ns: int
    shortages: dict[tuple[str, str], Shortage]


def count(assessments: Iterable[Assessment], misplaced: int) -> Counts:
    """Return the counts of all ledgers that are not whole.

    Args:
        assessments: The assessments of those ledgers.
        misplaced: The number of ledgers that are misplaced.
    """
    short: Counter[str] = Counter()
    reasons: Counter[RepairReason] = Counter()
    states: Counter[RepairState] = Counter()
    size = lost = left = 0
    oldest = 0
    shortages: dict[tuple[str, str], Shortage] = {}
    for each in assessments:
        if each.copies < each.write_quorum:
            copies = str(each.copies) if each.copies <= 2 else "more"
            short[copies] += 1
            key = _why_short(each), copies
            shortages[key] = _added(shortages.get(key), each)
        lost += each.lost
        left += each.left_to_writer
        if each.tasks:
            reasons[min((task.reason for task in each.tasks), key=_RANK.__getitem__)] += 1
        for task in each.tasks:
            states[task.state] += 1
            if task.state is RepairState.QUEUED:
                size += task.size_bytes
            if task.since_ns and (not oldest or task.since_ns < oldest):
                oldest = task.since_ns
    return Counts(dict(short), dict(reasons), dict(states), size, lost, left, misplaced, oldest, shortages)


def _why_short(assessment: Assessment) -> str:
    """Return the reason under which a ledger that is short is counted."""
    if assessment.tasks:
        return min((task.reason for task in assessment.tasks), key=_RANK.__getitem__).value
    return LEFT_TO_WRITER if assessment.left_to_writer else WITHIN_GRACE


def _added(shortage: Shortage | None, assessment: Assessment) -> Shortage:
    """Return a shortage with a further ledger."""
    ledgers, size, oldest = shortage or (0, 0, 0)
    times = [task.since_ns for task in assessment.tasks if task.since_ns]
    oldest = min([*times, oldest or NEVER_NS])
    size += sum(task.size_bytes for task in assessment.tasks)
    return Shortage(ledgers + 1, size, 0 if oldest == NEVER_NS else oldest)


@dataclass(frozen=True, slots=True)
class Plan:
    """All repairs that a cluster needs.

    Attributes:
        tasks: The queued tasks, in order.
        terminal: The tasks that no worker can make: LOST or WAITING_FOR_OWNER.
        holds: The reasons why only urgent tasks are done; empty if there is none.
        frozen: Whether it is not known which bookies are registered; no mark is changed then.
        paused: Whether a person has paused all repairs.
        wanted: The tasks that should be marked now.
        counts: The numbers for the cluster's health.
    """

    tasks: tuple[Task, ...]
    terminal: tuple[Task, ...]
    holds: tuple[Hold, ...]
    frozen: bool
    paused: bool
    wanted: Mapping[MarkKey, Task] = field(repr=False)
    counts: Counts


def plan(cluster: ClusterMap, situation: Situation, now_ns: int, *, window: int = WINDOW) -> Plan:
    """Return all repairs that a cluster needs, in order, and those that should be marked now.

    Args:
        cluster: The ledgers.
        situation: All other knowledge.
        now_ns: The time.
        window: The most marks that are published.

    Cost: 10 microseconds for each ledger of the bookies that are not well, and for each ledger if several zones are
        asked for.
    """
    standings = standings_of(cluster, situation, now_ns)
    found = [
        each
        for ledger_id in suspects(cluster, situation, standings)
        if (each := assess(cluster, situation, standings, now_ns, ledger_id)) is not None
    ]
    tasks = sorted((task for each in found for task in each.tasks if task.state is RepairState.QUEUED), key=rank_of)
    terminal = [task for each in found for task in each.tasks if task.state is not RepairState.QUEUED]
    needed: Counter[StorageHint] = Counter()
    for task in tasks:
        needed[task.tier] += task.size_bytes
    holds = holds_of(cluster, situation, now_ns, needed)
    wanted = select(
        cluster,
        situation,
        tasks,
        {task.key: task for task in tasks},
        terminal,
        targets_of(situation, now_ns),
        held=bool(holds),
        now_ns=now_ns,
        window=window,
    )
    return Plan(
        tuple(tasks),
        tuple(sorted(terminal, key=rank_of)),
        holds,
        any(each.reason.blind for each in holds),
        situation.paused(now_ns),
        wanted,
        count(found, sum(is_misplaced(cluster, situation, ledger_id) for ledger_id in cluster)),
    )
