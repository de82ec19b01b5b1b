"""The state of a cluster for people, and the checks before a bookie is drained, stopped or removed; pure functions.

``ClusterAdmin`` reads the cookies, the registrations, the marks and the metadata of the ledgers, and calls this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap, MappedFragment, MappedLedger
from pybk.healing.situation import FULL_LINE, HoldReason, Space, Status
from pybk.health import (
    REASON_STATES,
    HealthReason,
    ensemble_sizes,
    fewest_for,
    ledger_reasons,
    no_spare_note,
    paused_reason,
    repair_reasons,
    silence_reasons,
)
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.orphan_records import OrphanReplicas
from pybk.metadata.registration import BookieCookie, BookieRegistration, BookieState
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.replication.locations import ANYWHERE, Location, PlacementPolicy
from pybk.replication.placement import Candidate, tier_of
from pybk.replication.quorum import Quorum
from pybk.values import LISTED_MAX, FrozenDict, listed

SPACE_FACTOR: Final = 1.2
"""The multiple of a drained bookie's bytes that must be free on the bookies that stay."""

_MAY_HAVE_LOST: Final = frozenset(
    reason for reason in RepairReason if reason.observed and reason is not RepairReason.MISSED
)
"""The reasons of marks of copies that may lack entries which their bookies have acknowledged."""

_RECENT_LEDGERS: Final = 20
"""The number of ledgers whose ensembles are taken for those of the ledgers to come."""

_PASSING: Final = frozenset(reason.value for reason in HoldReason if reason.blind)
"""The holds that end by themselves."""


class ClusterVerdict(StrEnum):
    """The verdict on a cluster."""

    OK = "ok"
    """No part of the cluster needs attention."""

    WARN = "warn"
    """A part of the cluster needs attention; acknowledged entries can be read, and ledgers can be written."""

    BAD = "bad"
    """Entries are lost or out of reach, too few bookies take entries, or repairs wait for the decision of a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieStatus:
    """A bookie that belongs to a cluster.

    Attributes:
        bookie: The instance that belongs to the cluster.
        state: The state in its cookie.
        since_ns: The time when that state began, nanoseconds since 1970; 0 for a state that never changed. For a
            drained bookie, the time when its drain began.
        until_ns: The time when its maintenance ends; 0 in other states.
        registered: Whether that instance runs, as far as the metadata store knows.
        read_only: Whether it takes no new entries.
        location: The place where it stands, ``zone/rack/host`` or less; empty if unknown.
        version: The version of pybk that it runs, or ran last; empty if unknown.
        addresses: The addresses at which it listens; empty if it does not run.
        free_bytes: The free bytes of each tier; empty if it does not run.
        capacity_bytes: All bytes of each tier, used and free; empty if it does not run, or does not register them.
        devices: The device of each tier, because tiers may share one; empty as ``capacity_bytes``.
    """

    bookie: Bookie
    state: BookieState
    since_ns: int = 0
    until_ns: int = 0
    registered: bool = False
    read_only: bool = False
    location: str = ""
    version: str = ""
    addresses: tuple[str, ...] = ()
    free_bytes: Mapping[StorageHint, int] = field(default_factory=FrozenDict, hash=False)
    capacity_bytes: Mapping[StorageHint, int] = field(default_factory=FrozenDict, hash=False)
    devices: Mapping[StorageHint, str] = field(default_factory=FrozenDict, hash=False)

    @property
    def name(self) -> str:
        """The bookie's name."""
        return self.bookie.bookie_id

    @property
    def absent(self) -> bool:
        """True if it should run and does not; a bookie in maintenance can be absent, too."""
        return not self.registered and self.state not in (BookieState.DRAINED, BookieState.REMOVED)

    @property
    def writable(self) -> bool:
        """True if it takes entries of writers and copies."""
        return self.registered and not self.read_only and not self.state.read_only


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The state of a cluster, and the progress of its repairs.

    Attributes:
        verdict: The worst of all reasons.
        reasons: The reasons why the verdict is not ``OK``, with the codes of ``Health.reasons``; the bad ones first,
            and last notes, which do not affect the verdict.
        auditor: The bookie whose auditor reports; empty if there is none.
        reported_ns: The time when it reported, nanoseconds since 1970; 0 without an auditor.
        bookies: The number of bookies in each state.
        absent: The names of the bookies that should run and do not.
        short: The ledgers with fewer sound copies of an entry than they should have, by the copies that are left:
            ``"0"``, ``"1"``, ``"2"`` or ``"more"``. Without an auditor, only marked ledgers count.
        queued_bytes: The bytes that have to be copied, about.
        done_bytes: The bytes that were copied since the cluster was whole last; 0 without an auditor.
        rate: Bytes per second that were copied in ten minutes. A ledger counts once it is whole, so this is 0, or too
            low, while large ones are copied; ``repair_copied_bytes`` of the bookies' metrics counts at once.
        eta_s: Seconds until all is copied at that rate; None if it is 0, or without an auditor.
        holds: The reasons why only urgent copies are made; empty if all are made.
        held: The number of ledgers that have fewer copies than they should, and no mark, because their repair is on
            hold or waits for the return of a bookie; 0 without an auditor.
        held_because: The reasons for that, and until when, a sentence each.
        paused_until_ns: The time when a pause of the repairs ends, nanoseconds since 1970; 0 if they are not paused.
        lost: Ledgers with entries that no bookie has.
        waiting: Ledgers that wait for a recovery by their owner.
        no_target: Ledgers whose copies no bookie can take.
        stuck: Ledgers whose repair failed repeatedly.
        misplaced: The number of ledgers with copies in fewer zones than the settings ask for; 0 without an auditor.
    """

    verdict: ClusterVerdict
    reasons: tuple[HealthReason, ...] = ()
    auditor: str = ""
    reported_ns: int = 0
    bookies: Mapping[BookieState, int] = field(default_factory=FrozenDict, hash=False)
    absent: tuple[str, ...] = ()
    short: Mapping[str, int] = field(default_factory=FrozenDict, hash=False)
    queued_bytes: int = 0
    done_bytes: int = 0
    rate: float = 0.0
    eta_s: float | None = None
    holds: tuple[str, ...] = ()
    held: int = 0
    held_because: tuple[str, ...] = ()
    paused_until_ns: int = 0
    lost: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    no_target: tuple[int, ...] = ()
    stuck: tuple[int, ...] = ()
    misplaced: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainProgress:
    """The ledgers that a draining bookie still has.

    Attributes:
        bookie: The bookie.
        state: Its state.
        ledgers_left: The number of ledgers that name it.
        bytes_left: The bytes of closed fragments that it has of them, about.
        stuck: Marks of this bookie that are not queued, with the reasons in ``state`` and ``error``.
        waits: The events other than copies for which its drain waits, and since when; empty if it is not being drained.
    """

    bookie: Bookie
    state: BookieState
    ledgers_left: int
    bytes_left: int
    stuck: tuple[UnderReplicatedLedger, ...] = ()
    waits: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """True if the bookie can be removed now, as far as is known."""
        return self.state in (BookieState.DRAINING, BookieState.DRAINED) and not self.ledgers_left and not self.waits


@dataclass(frozen=True, slots=True)
class RebalanceStart:
    """The moves that ``apply_rebalance`` has begun.

    Attributes:
        moves: The number of copies that are marked to be moved.
        skipped: The number of moves left out because the metadata of their ledgers have changed since the plan.
    """

    moves: int
    skipped: int


@dataclass(frozen=True, slots=True)
class RebalanceProgress:
    """The remaining moves of a rebalance.

    Attributes:
        moves_left: The number of copies that are still to be moved.
        bytes_left: The payload bytes of these copies, about.
        stuck: Marks of moves that are not queued, with the reasons in ``state`` and ``error``.
        absent_targets: The names of bookies that should take copies and do not run, or take none.
    """

    moves_left: int
    bytes_left: int
    stuck: tuple[UnderReplicatedLedger, ...] = ()
    absent_targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OrphanReport:
    """The data of a cluster that belong to no ledger, or may have been forgotten.

    Attributes:
        replicas: The replicas of ledgers that have neither metadata nor a tombstone, as bookies recorded them last.
        without_copies: Ledgers with entries that no running bookie has a sound copy of.
        long_open: Ledgers made more than 7 days ago that are open, and whose metadata name no second fragment.
        marks: Ledgers that are marked for repair and were deleted; the auditor removes the marks.
    """

    replicas: tuple[OrphanReplicas, ...] = ()
    without_copies: tuple[int, ...] = ()
    long_open: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCheck:
    """The answer whether bookies may be stopped at once.

    Attributes:
        ok: Whether no ledger refuses it.
        refusals: The reasons for a refusal, a sentence for each of up to 20 ledgers.
        warnings: The effects that a stop would have.
    """

    ok: bool
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalProof:
    """The proof that no ledger needs a bookie; ``ClusterAdmin.remove`` takes it.

    Attributes:
        bookie: The instance that was looked for.
        state: Its state.
        state_since_ns: The time when its drain began; the proof ends when the drain is cancelled.
        scanned_ns: The time when the search began, nanoseconds since 1970.
        ledgers: The number of ledgers that were searched.
    """

    bookie: Bookie
    state: BookieState
    state_since_ns: int
    scanned_ns: int
    ledgers: int


def statuses_of(cookies: Iterable[BookieCookie], registrations: Iterable[BookieRegistration]) -> list[BookieStatus]:
    """Return the status of each bookie that has a cookie, in the order of the cookies."""
    running = {each.bookie: each for each in registrations}
    found = []
    for cookie in cookies:
        seen = running.get(cookie.bookie)
        found.append(
            BookieStatus(
                bookie=cookie.bookie,
                state=cookie.state,
                since_ns=cookie.state_since_ns,
                until_ns=cookie.until_ns,
                registered=seen is not None,
                read_only=seen is not None and seen.read_only,
                location=str(Location.registered(seen.rack)) if seen is not None else cookie.location,
                version=seen.version if seen is not None else cookie.version,
                addresses=() if seen is None else seen.addresses,
                free_bytes=FrozenDict({} if seen is None else seen.tiers),
                capacity_bytes=FrozenDict({} if seen is None else seen.capacity),
                devices=FrozenDict({} if seen is None else seen.devices),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """The space of devices that have the same tiers.

    Attributes:
        free_bytes: Their free bytes.
        capacity_bytes: All their bytes, used and free; None if they are not known of all.
        bookies: The names of the bookies on them.
    """

    free_bytes: int
    capacity_bytes: int | None
    bookies: frozenset[str]


def space_by_tiers(bookies: Iterable[BookieStatus]) -> dict[str, DeviceSpace]:
    """Return the space of a cluster by the tiers of its devices, such as ``nvme`` or ``hdd, nvme, ssd``.

    A device that several tiers, or several bookies of one host, have in common counts once. If tiers have several
    devices each, and only some in common, the tier with the most devices counts, because the space of a single device
    is not registered. If a bookie does not register its devices, each of its tiers counts as one device.
    """
    tiers: dict[frozenset[str], set[str]] = {}
    found: dict[frozenset[str], DeviceSpace] = {}
    for bookie in bookies:
        for tier, free in bookie.free_bytes.items():
            named = bookie.devices.get(tier)
            devices = frozenset([f"{bookie.name} {tier.value}"] if named is None else named.split("+"))
            capacity = bookie.capacity_bytes.get(tier)
            before = found.get(devices, DeviceSpace(free, capacity, frozenset()))
            names = before.bookies | {bookie.name}
            found[devices] = DeviceSpace(min(before.free_bytes, free), before.capacity_bytes or capacity, names)
            tiers.setdefault(devices, set()).add(tier.value)
    summed: dict[str, DeviceSpace] = {}
    for devices, each in _disjoint(found, tiers).items():
        key = ", ".join(sorted(tiers[devices]))
        other = summed.get(key, DeviceSpace(0, 0, frozenset()))
        sizes = (other.capacity_bytes, each.capacity_bytes)
        capacity = None if None in sizes else sum(size or 0 for size in sizes)
        summed[key] = DeviceSpace(other.free_bytes + each.free_bytes, capacity, other.bookies | each.bookies)
    return summed


def _disjoint(
    found: Mapping[frozenset[str], DeviceSpace], tiers: Mapping[frozenset[str], set[str]]
) -> dict[frozenset[str], DeviceSpace]:
    """Return the space of disjoint sets of devices; the tiers of a set that overlaps one of them are added to that."""
    kept: dict[frozenset[str], DeviceSpace] = {}
    for devices, space in sorted(found.items(), key=lambda each: (-len(each[0]), sorted(each[0]))):
        larger = next((other for other in kept if other & devices), None)
        if larger is None:
            kept[devices] = space
        else:
            tiers[larger].update(tiers[devices])
            kept[larger] = replace(kept[larger], bookies=kept[larger].bookies | space.bookies)
    return kept


# ---- copies --------------------------------------------------------------------------------------------------------


class Copies:
    """The live and the sound copies of the ledgers.

    Args:
        cluster: The ledgers.
        live: The bookies that are registered.
        marks: Marks; those that were observed make copies unsound.
    """

    def __init__(self, cluster: ClusterMap, live: Collection[Bookie], marks: Iterable[UnderReplicatedLedger]) -> None:
        self.cluster: Final = cluster
        self.live: Final = {number for number, bookie in enumerate(cluster.bookies) if bookie in live}
        self._damaged: Final[dict[int, dict[int, int]]] = {}
        """The first entry of each copy that is not sound, by ledger and bookie."""
        self._kept: Final[set[tuple[int, int]]] = set()
        """Of these, the ledger and the bookie of each copy that lacks only what its bookie has not acknowledged."""
        for mark in marks:
            observed = {reason: first for reason, first in mark.causes_by_reason().items() if reason.observed}
            number = cluster.number_of(mark.bookie)
            if observed and number is not None:
                self._damaged.setdefault(mark.ledger_id, {})[number] = min(observed.values())
                if observed.keys() == {RepairReason.MISSED}:
                    self._kept.add((mark.ledger_id, number))

    def live_places(self, fragment: MappedFragment) -> int:
        """Return the places of a fragment whose bookies are registered, as bits."""
        return sum(1 << place for place, number in enumerate(fragment.places) if number in self.live)

    def sound_places(self, ledger_id: int, fragment: MappedFragment) -> int:
        """Return the places of a fragment that have sound copies, as bits."""
        damaged = self._damaged.get(ledger_id)
        bits = self.live_places(fragment)
        for place, number in enumerate(fragment.places if damaged else ()):
            assert damaged is not None
            first = damaged.get(number)
            if first is not None and (fragment.last_entry_id is None or first <= fragment.last_entry_id):
                bits &= ~(1 << place)
        return bits

    def fewest(self, ledger_id: int) -> int | None:
        """Return the fewest sound copies of any entry; None if no entry lacks a copy, or without entries.

        The last fragment of an open ledger counts as one with entries. If all its bookies may miss entries, those count
        that were acknowledged.
        """
        ledger = self.cluster.get(ledger_id)
        if ledger is None:
            return None
        quorum = ledger.shape.quorum
        counts = []
        for fragment in self.cluster.fragments(ledger):
            sound = self.sound_places(ledger_id, fragment)
            kept = sound | self._kept_places(ledger_id, fragment)
            for mask in masks_with_entries(ledger, fragment):
                least = 0 if fragment.last_entry_id is not None else quorum.kept(mask, kept)
                counts.append(max((sound & mask).bit_count(), least))
        found = min(counts, default=None)
        return None if found is None or found >= quorum.write_quorum else found

    def _kept_places(self, ledger_id: int, fragment: MappedFragment) -> int:
        """Return the places of marked bookies that serve, and have all that they acknowledged, as bits."""
        bits = (1 << place for place, number in enumerate(fragment.places) if (ledger_id, number) in self._kept)
        return sum(bits) & self.live_places(fragment)


def masks_with_entries(ledger: MappedLedger, fragment: MappedFragment) -> tuple[int, ...]:
    """Return the write sets of a fragment that hold entries, as bits; all of them for a fragment without an end."""
    masks = ledger.shape.masks
    last = fragment.last_entry_id
    if last is None or last - fragment.first_entry_id + 1 >= len(masks):
        return masks
    return tuple(masks[entry_id % len(masks)] for entry_id in range(fragment.first_entry_id, last + 1))


def short_by_copies(copies: Copies, ledger_ids: Iterable[int]) -> dict[str, int]:
    """Return the number of ledgers that lack copies, by the copies that are left."""
    fewest = (copies.fewest(ledger_id) for ledger_id in ledger_ids)
    return dict(Counter("more" if each > 2 else str(each) for each in fewest if each is not None))


def by_urgency(marks: Iterable[UnderReplicatedLedger], copies: Copies) -> list[UnderReplicatedLedger]:
    """Return marks, the most urgent first: by copies that are left, then by reason, then by age."""
    fewest = {ledger_id: copies.fewest(ledger_id) for ledger_id in {mark.ledger_id for mark in marks}}

    def urgency(mark: UnderReplicatedLedger) -> tuple[Any, ...]:
        left = fewest[mark.ledger_id]
        return (left is None, left or 0, mark.reason.rank, mark.since_ns, mark.ledger_id, mark.bookie)

    return sorted(marks, key=urgency)


# ---- drain, stop, remove -------------------------------------------------------------------------------------------


def bytes_on(cluster: ClusterMap, bookie: Bookie) -> dict[StorageHint, int]:
    """Return the payload bytes, about, of the closed fragments on a bookie, by the tier of their ledgers."""
    found: Counter[StorageHint] = Counter()
    number = cluster.number_of(bookie)
    for ledger_id in () if number is None else cluster.ledgers_of(number):
        ledger = cluster.get(ledger_id)
        assert ledger is not None
        for fragment in cluster.fragments(ledger):
            found[ledger.shape.tier] += fragment.places.count(number) * cluster.bytes_of_place(ledger, fragment)
    return +found


def ledgers_on(cluster: ClusterMap, bookie: Bookie) -> set[int]:
    """Return the ledgers that name a bookie."""
    number = cluster.number_of(bookie)
    return set() if number is None else cluster.ledgers_of(number)


def drain_failures(
    cluster: ClusterMap, bookies: Iterable[BookieStatus], bookie: Bookie, settings: ClusterSettings
) -> tuple[str, ...]:
    """Return the reasons why a bookie cannot be drained now, a sentence for each failed check.

    Args:
        cluster: The ledgers.
        bookies: All bookies.
        bookie: The bookie to drain.
        settings: The cluster's settings.
    """
    others = [each for each in bookies if each.bookie != bookie and each.writable]
    shapes = [ledger.shape for each in ledgers_on(cluster, bookie) if (ledger := cluster.get(each)) is not None]
    return (
        *_too_few(others, max([cluster.largest_open_ensemble, *(shape.quorum.ensemble_size for shape in shapes)])),
        *_too_full(others, bytes_on(cluster, bookie)),
        *_too_few_zones(others, settings, max((shape.quorum.write_quorum for shape in shapes), default=0)),
    )


def drain_waits(cluster: ClusterMap, cookie: BookieCookie) -> list[str]:
    """Return the events other than copies for which a drain waits: writers that have to leave the bookie.

    Args:
        cluster: The ledgers.
        cookie: The cookie of the bookie.
    """
    number = cluster.number_of(cookie.bookie)
    left = [] if number is None else cluster.written_on(number)
    if not left:
        return []
    since = datetime.fromtimestamp(cookie.state_since_ns / 1e9, UTC).isoformat(timespec="seconds")
    text = (
        f"writers of open ledgers have not left it since {since}: {listed(left)}; a writer leaves once another bookie "
        "can take the place, and a ledger whose writer is gone waits for its owner to open it (`pybk ledger list "
        "--state open` shows them)"
    )
    return [text]


def hold_failures(report: Mapping[str, Any] | None) -> tuple[tuple[str, ...], bool]:
    """Return the reasons why the auditor holds repairs, a sentence each, and whether all these holds end by themselves.

    Args:
        report: The auditor's report; None without one.
    """
    holds = (report or {}).get("holds", ())
    texts = tuple(f"repairs are on hold: {hold['text']}" for hold in holds)
    return texts, all(hold["reason"] in _PASSING for hold in holds)


def _too_few(others: Sequence[BookieStatus], needed: int) -> Iterator[str]:
    if len(others) < needed:
        names = listed([each.name for each in others]) or "none"
        yield (
            f"an ensemble of {needed} needs {needed} other writable bookies; there are {len(others)} ({names}): start "
            "more, or free space where they are read-only"
        )


def _too_full(others: Sequence[BookieStatus], needed: Mapping[StorageHint, int]) -> Iterator[str]:
    for tier, size in sorted(needed.items()):
        free = sum(
            Space(each.free_bytes[found], each.capacity_bytes.get(found, 0)).headroom
            for each in others
            if (found := tier_of(frozenset({tier}), each.free_bytes)) is not None
        )
        wanted = int(size * SPACE_FACTOR)
        if free < wanted:
            yield (
                f"{wanted} free bytes are needed for what it has of tier {tier}, {SPACE_FACTOR} times as much; the "
                f"other writable bookies have {free} before they are {FULL_LINE:.0%} full: add space or bookies"
            )


def _too_few_zones(others: Sequence[BookieStatus], settings: ClusterSettings, write_quorum: int) -> Iterator[str]:
    needed = min(settings.placement.min_zones, write_quorum)
    if not settings.placement.strict or needed <= 1:
        return
    zones = sorted({Location.registered(each.location).zone for each in others} - {""})
    if len(zones) < needed:
        yield (
            f"the setting placement.strict asks for {needed} zones; the other writable bookies stand in "
            f"{', '.join(zones) or 'none that is known'}: start bookies in other zones, or change the setting"
        )


def stop_check(
    cluster: ClusterMap,
    bookies: Sequence[BookieStatus],
    stopped: Collection[Bookie],
    marks: Sequence[UnderReplicatedLedger],
    has_writer: Callable[[int], bool],
    *,
    policy: PlacementPolicy = ANYWHERE,
    in_limbo: Mapping[Bookie, int] = MappingProxyType({}),
) -> StopCheck:
    """Return whether bookies may be stopped at once.

    Args:
        cluster: The ledgers.
        bookies: All bookies.
        stopped: The bookies to stop.
        marks: All marks.
        has_writer: Returns whether an open ledger may have a live writer; called for ledgers whose writer could not
            continue, until the list of refusals is full.
        policy: The policy by which writers choose bookies.
        in_limbo: The number of ledgers in limbo, by bookie. A bookie with more ledgers in limbo than marks has not
            examined all of them yet, so none of its copies counts as sound.
    """

    @cache
    def lives(ledger_id: int) -> bool:
        return len(refusals) >= LISTED_MAX or has_writer(ledger_id)

    running = {each.bookie for each in bookies if each.registered}
    examined = (mark for mark in marks if mark.causes_by_reason().keys() & _MAY_HAVE_LOST)
    marked = Counter(mark.bookie for mark in examined)  # others are about copies that are there, or were never
    doubtful = {bookie for bookie, count in in_limbo.items() if count > marked[bookie]} & running
    after = Copies(cluster, running.difference(stopped, doubtful), marks)
    takers = [each for each in bookies if each.writable and each.bookie not in stopped]
    writers = _Writers(after, takers, in_limbo, policy, lives)
    leaving = {number for each in running.intersection(stopped) if (number := cluster.number_of(each)) is not None}
    affected = sorted({ledger_id for number in leaving for ledger_id in cluster.ledgers_of(number)})
    refusals, warnings = [], []
    for ledger_id in affected:
        refusal, warning = _stop_of(after, ledger_id, leaving, writers)
        refusals += [refusal] if refusal else []
        warnings += [warning] if warning else []
    general = [
        f"bookie {bookie} may have lost entries of {in_limbo[bookie]} ledgers: its copies do not count yet"
        for bookie in sorted(doubtful.difference(stopped))
    ]
    if len(takers) < cluster.largest_open_ensemble:
        general.append(
            f"{len(takers)} writable bookies would be left, and open ledgers have ensembles of "
            f"{cluster.largest_open_ensemble}: their writers could not replace a bookie that fails meanwhile"
        )
    elif len(takers) < (largest := _largest_ensemble(cluster, affected[-_RECENT_LEDGERS:])):
        general.append(
            f"{len(takers)} writable bookies would be left, and ledgers have ensembles of {largest}: a writer that "
            "needs a new ledger of that size could not make it"
        )
    return StopCheck(not refusals, _bounded(refusals), (*general, *_bounded(warnings)))


def _bounded(texts: Sequence[str]) -> tuple[str, ...]:
    more = (f"{len(texts) - LISTED_MAX} more ledgers",) if len(texts) > LISTED_MAX else ()
    return (*texts[:LISTED_MAX], *more)


class _Writers:
    """The writers that could not continue while bookies are stopped.

    Args:
        after: The copies that would be left.
        takers: The bookies that would be left and take entries.
        in_limbo: The bookies that have ledgers in limbo.
        policy: The policy by which writers choose bookies.
        lives: Returns whether an open ledger may have a writer that lives.
    """

    def __init__(
        self,
        after: Copies,
        takers: Sequence[BookieStatus],
        in_limbo: Collection[Bookie],
        policy: PlacementPolicy,
        lives: Callable[[int], bool],
    ) -> None:
        def numbers(found: Iterable[Bookie]) -> set[int]:
            return {number for each in found if (number := after.cluster.number_of(each)) is not None}

        self._after = after
        self._takers = numbers(each.bookie for each in takers)
        self._in_limbo = numbers(in_limbo)
        self._policy = policy
        self._lives = lives
        zones = [Location.registered(each.location).zone for each in takers]
        self._count = len([zone for zone in zones if zone or not policy.strict])
        self._zones = len({*zones} - {""})

    def places(self, ledger_id: int, fragment: MappedFragment) -> int:
        """Return the places of an open ledger's last fragment whose bookies take its entries, as bits.

        A bookie that has marked what is in limbo there takes entries of all other ledgers.
        """
        sound = self._after.sound_places(ledger_id, fragment)
        return sum(
            1 << place
            for place, number in enumerate(fragment.places)
            if number in self._takers and (number not in self._in_limbo or sound >> place & 1)
        )

    def ends(self, ledger_id: int, quorum: Quorum) -> bool:
        """Return whether a ledger has a writer, and it could not continue without an ack quorum of its last ensemble.

        With as many bookies that take entries as an ensemble has, the writer replaces those that stop. A strict policy
        may forbid it; that these span enough zones is enough only if there is one write set.
        """
        needed = self._policy.needed(quorum.write_quorum)
        allowed = (
            not self._policy.strict
            or needed <= 1
            or (quorum.ensemble_size == quorum.write_quorum and self._zones >= needed)
        )
        return not (allowed and self._count >= quorum.ensemble_size) and self._lives(ledger_id)


def _largest_ensemble(cluster: ClusterMap, ledger_ids: Iterable[int]) -> int:
    """Return the largest ensemble of some ledgers, which is what new ledgers most likely have; 0 without ledgers."""
    found = filter(None, map(cluster.get, ledger_ids))
    return max((each.shape.quorum.ensemble_size for each in found), default=0)


def _stop_of(after: Copies, ledger_id: int, leaving: set[int], writers: _Writers) -> tuple[str, str]:
    """Return why a ledger refuses that bookies stop, and what would be impaired; empty texts for neither.

    Args:
        after: The copies that would be left.
        ledger_id: The ledger.
        leaving: The bookies to stop.
        writers: The writers that could not continue.
    """
    ledger = after.cluster.get(ledger_id)
    assert ledger is not None
    quorum = ledger.shape.quorum
    warning = ""
    for fragment in after.cluster.fragments(ledger):
        gone = sum(1 << place for place, number in enumerate(fragment.places) if number in leaving)
        sound = after.sound_places(ledger_id, fragment)
        open_end = fragment.last_entry_id is None
        end = "the end" if open_end else fragment.last_entry_id
        where = f"ledger {ledger_id}, entries {fragment.first_entry_id} to {end}"
        taken = writers.places(ledger_id, fragment) if open_end else 0
        for mask in masks_with_entries(ledger, fragment):
            if not mask & gone:
                continue
            takers, copies = (taken & mask).bit_count(), (sound & mask).bit_count()
            if open_end and takers < quorum.ack_quorum and writers.ends(ledger_id, quorum):
                left = f"{takers} writable bookies would be left, and its writer needs {quorum.ack_quorum}"
                return f"{where}: {left}: appends would wait until they are back", ""
            if not copies:
                return f"{where}: no sound copy would be left", ""
            if copies < quorum.ack_quorum:
                warning = warning or f"{where}: sound copies that would be left: {copies}"
    return "", warning


# ---- rebalance -----------------------------------------------------------------------------------------------------


def rebalance_candidates(bookies: Iterable[BookieStatus], report: Mapping[str, Any] | None) -> list[Candidate]:
    """Return the running bookies in the form for a plan of a rebalance.

    Only bookies that the auditor counts as live, and that are not in maintenance, get copies.

    Args:
        bookies: All bookies.
        report: The auditor's report; None without one.
    """
    unfit = {str(each["bookie_id"]) for each in (report or {}).get("bookies", ())}
    return [
        Candidate(
            bookie=each.bookie,
            tiers=each.free_bytes,
            location=Location.registered(each.location),
            read_only=each.read_only or each.name in unfit or each.state is BookieState.MAINTENANCE,
            capacity=each.capacity_bytes,
            leaving=each.state.read_only,
        )
        for each in bookies
        if each.registered
    ]


def rebalance_failures(
    report: Mapping[str, Any] | None, marks: Iterable[UnderReplicatedLedger], settings: ClusterSettings, now_ns: int
) -> list[str]:
    """Return the reasons why no rebalance may begin now, a sentence each.

    Args:
        report: The auditor's report; None without one.
        marks: All marks.
        settings: The cluster's settings.
        now_ns: The time.
    """
    failures = []
    if report is None or report.get("frozen") or report.get("phase") != "leading":
        failures.append("no auditor has looked at the cluster yet, so it is not known whether anything is short: wait")
    else:
        failures += hold_failures(report)[0]
        if short := sum(report.get("short", {}).values()):
            failures.append(f"ledgers have fewer copies than they should have: {short}; wait for their repair")
    if settings.repair.paused_until_ns > now_ns:
        failures.append(f"repairs are paused for {(settings.repair.paused_until_ns - now_ns) / 1e9:.0f} s more")
    if left := sum(RepairReason.REBALANCE in mark.causes_by_reason() for mark in marks):
        failures.append(f"a rebalance is under way, of which {left} moves are left: wait for them, or abort it")
    return failures


def waiting_for_repair(marks: Iterable[UnderReplicatedLedger]) -> set[int]:
    """Return the ledgers that are marked for another reason than the placement of their copies."""
    placed = {RepairReason.MISPLACED, RepairReason.REBALANCE}
    return {mark.ledger_id for mark in marks if mark.causes_by_reason().keys() - placed}


def rebalance_progress(marks: Iterable[UnderReplicatedLedger], bookies: Iterable[BookieStatus]) -> RebalanceProgress:
    """Return the remaining moves of a rebalance.

    Args:
        marks: All marks.
        bookies: All bookies.
    """
    writable = {each.name for each in bookies if each.writable}
    moves = [mark for mark in marks if RepairReason.REBALANCE in mark.causes_by_reason()]
    return RebalanceProgress(
        len(moves),
        sum(mark.size_bytes for mark in moves),
        tuple(mark for mark in moves if mark.state is not RepairState.QUEUED),
        tuple(sorted({mark.target for mark in moves} - writable)),
    )


# ---- status --------------------------------------------------------------------------------------------------------


def status_with_report(
    report: Mapping[str, Any], bookies: Sequence[BookieStatus], settings: ClusterSettings, now_ns: int
) -> ClusterStatus:
    """Return the status of a cluster that has an auditor.

    Args:
        report: The auditor's report.
        bookies: All bookies.
        settings: The cluster's settings.
        now_ns: The time.
    """
    holds = tuple(str(hold["text"]) for hold in report.get("holds", ()))
    eta = report.get("eta_s")
    found = {
        "auditor": str(report.get("auditor", "")),
        "reported_ns": int(report.get("reported_ns", 0)),
        "short": FrozenDict({str(key): int(count) for key, count in report.get("short", {}).items() if count}),
        "queued_bytes": int(report.get("queued_bytes", 0)),
        "done_bytes": int(report.get("done_bytes", 0)),
        "rate": float(report.get("rate", 0.0)),
        "eta_s": None if eta is None else float(eta),
        "holds": holds,
        "held": (held := _held(report)),
        "held_because": _held_because(report, settings, now_ns) if held else (),
        "lost": _ids(report, "lost"),
        "waiting": _ids(report, "waiting"),
        "no_target": _ids(report, "no_target"),
        "stuck": _ids(report, "stuck"),
        "misplaced": int(report.get("misplaced", 0)),
    }
    reasons = [*silence_reasons(report, (now_ns - int(report.get("reported_ns", now_ns))) / 1e9)]
    # Which bookies run, and are read-only, is known better from their registrations.
    reasons += [each for each in repair_reasons(report) if each.code not in ("bookies_absent", "bookies_read_only")]
    writable = sum(each.writable for each in bookies)
    sizes = ensemble_sizes(report)
    if writable == max(sizes):
        reasons.append(no_spare_note(writable))
    elif 0 < writable < (fewest := fewest_for(min(sizes))):
        text = (
            f"{writable} bookies take entries, and each ledger needs {fewest} or more, so none can be written: start "
            "more, or free space where they are read-only"
        )
        reasons.append(HealthReason("too_few_bookies", text))
    return _status(found, bookies, settings, now_ns, reasons)


def _held(report: Mapping[str, Any]) -> int:
    """Return how many ledgers lack copies and are not marked."""
    return max(0, sum(map(int, report.get("short", {}).values())) - sum(map(int, report.get("reasons", {}).values())))


def _held_because(report: Mapping[str, Any], settings: ClusterSettings, now_ns: int) -> tuple[str, ...]:
    """Return why ledgers that lack copies are not marked, and until when."""
    found = [f"on hold: {hold['text']}" for hold in report.get("holds", ())]
    grace_s = settings.repair.grace_s
    for each in report.get("bookies", ()):
        left_s = grace_s - each["absent_ns"] / 1e9 - (now_ns - int(report.get("reported_ns", now_ns))) / 1e9
        if each["status"] == Status.ABSENT and left_s > 0:
            found.append(
                f"bookie {each['bookie_id']} is absent, and its copies are made elsewhere unless it returns within "
                f"{left_s:.0f} s (repair.grace_s is {grace_s:g})"
            )
    if report.get("left_to_writer"):
        found.append(f"writers of {report['left_to_writer']} open ledgers replace the bookies by themselves")
    return tuple(found)


def status_without_report(
    copies: Copies,
    marks: Sequence[UnderReplicatedLedger],
    bookies: Sequence[BookieStatus],
    settings: ClusterSettings,
    now_ns: int,
) -> ClusterStatus:
    """Return the status of a cluster without an auditor, as far as it is known.

    Args:
        copies: The copies of the ledgers that are marked.
        marks: All marks.
        bookies: All bookies.
        settings: The cluster's settings.
        now_ns: The time.
    """
    states: dict[RepairState, list[int]] = {state: [] for state in RepairState}
    for mark in marks:
        states[mark.state].append(mark.ledger_id)
    found: dict[str, Any] = {
        "short": FrozenDict(short_by_copies(copies, {mark.ledger_id for mark in marks})),
        "queued_bytes": sum(mark.size_bytes for mark in marks if mark.state is RepairState.QUEUED),
        "lost": tuple(sorted(set(states[RepairState.LOST]))),
        "waiting": tuple(sorted(set(states[RepairState.WAITING_FOR_OWNER]))),
        "no_target": tuple(sorted(set(states[RepairState.NO_TARGET]))),
        "stuck": tuple(sorted(set(states[RepairState.STUCK]))),
    }
    text = "no auditor reports, so ledgers of absent bookies are counted only if they are marked"
    reasons = [HealthReason("no_auditor", text), *ledger_reasons(found["short"], found)]
    return _status(found, bookies, settings, now_ns, reasons)


def _ids(report: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(map(int, report.get(name, ())))


def _status(
    found: Mapping[str, Any],
    bookies: Sequence[BookieStatus],
    settings: ClusterSettings,
    now_ns: int,
    reasons: list[HealthReason],
) -> ClusterStatus:
    paused = settings.repair.paused_until_ns
    if paused > now_ns:
        reasons.append(paused_reason(paused, settings.repair.paused_by, now_ns))
    reasons += _about_bookies(bookies, now_ns)
    running = {each.name for each in bookies if each.registered}
    if again := running.intersection(settings.repair.accepted_losses):
        reasons.append(
            HealthReason(
                "loss_accepted",
                f"{listed(sorted(again))} runs again, and repairs would still not wait for it: `pybk repair resume` "
                "ends that",
            )
        )
    bad = [each for each in reasons if _is_bad(each)]
    notes = [each for each in reasons if REASON_STATES[each.code] == "ok"]
    warnings = [each for each in reasons if each not in (*bad, *notes)]
    verdict = ClusterVerdict.BAD if bad else ClusterVerdict.WARN if warnings else ClusterVerdict.OK
    return ClusterStatus(
        verdict=verdict,
        reasons=(*bad, *warnings, *notes),
        bookies=FrozenDict(Counter(each.state for each in bookies)),
        absent=tuple(each.name for each in bookies if each.absent),
        paused_until_ns=paused if paused > now_ns else 0,
        **found,
    )


def _is_bad(reason: HealthReason) -> bool:
    """Return whether entries are lost or out of reach, ledgers cannot be written, or a person has to decide.

    A young session ends by itself within half a minute, as after each start. Too few bookies for a whole ensemble are
    what one failure of three leaves: appends continue, and the hold ends once a bookie is back.
    """
    if reason.code in ("hold_session_young", "hold_few_writable"):
        return False
    out_of_reach = ("entries_lost", "no_live_copy", "no_bookie", "too_few_bookies")
    return reason.code in out_of_reach or reason.code.startswith("hold_")


def _about_bookies(bookies: Sequence[BookieStatus], now_ns: int) -> Iterator[HealthReason]:
    if not any(each.registered for each in bookies):
        yield HealthReason("no_bookie", "no bookie runs, so nothing can be read or written: start them")
    for each in bookies:
        if each.absent and not (each.state is BookieState.MAINTENANCE and each.until_ns > now_ns):
            yield HealthReason("bookies_absent", f"bookie {each.name} does not run")
        elif each.state is BookieState.ACTIVE and each.read_only:
            yield HealthReason("bookies_read_only", f"bookie {each.name} is read-only")
        elif each.state is BookieState.MAINTENANCE and each.until_ns <= now_ns:
            yield HealthReason("maintenance_over", f"the maintenance of bookie {each.name} should have ended")
