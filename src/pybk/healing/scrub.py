"""Checks of the stored entries of one store in the background, piece by piece.

Theory of operation
-------------------

``StoreScrub`` walks the ledgers of a store, part by part (``scrub_schedule``), and checks their records in place
(``storage/repair/record_check``). The store of a bookie and an embedded store are checked alike; the store's *owner*
decides how often and how fast, keeps the notes, and takes the damage that was found.

1. The owner's terms are asked at most once a second. Without terms, nothing is checked.
2. Of all parts that are due, of both kinds, the one under way or the oldest is chosen. While the cluster is not quiet,
   because repairs are held or paused, only parts that are late by a whole period are checked, and those that a person
   has asked for, because bookies have other work then, and damage could not be mended. A check only reads, so it is
   never wrong to run it.
3. One piece of about 1 MiB is checked, and charged to a token bucket. All devices share it, so none is read faster than
   the rate; the rate is what the part needs to end in its share of the period, times the share that the latency of
   appends leaves.
4. Damage is reported to the owner. The notes then say that everything before the next piece was checked. They are
   saved when a part ends, when damage was found, once a minute, and at the end. After a crash some pieces are checked
   twice.

Damage is kept until it is mended: the owner shows it in its health, and the scrub looks at it again after some seconds,
because a file may be restored, a ledger deleted, or, at a bookie, the entries copied anew.

It is a chore of a bookie (``chores``), or has the thread of an embedded store (``run``). While nothing is
due it rests. A change of the owner's terms ends the rest (``wake``).

Locks: ``_lock`` guards the schedules and the damage; it is not held while anything is read.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pybk.errors import (
    CorruptError,
    LedgerDeletedError,
    MetadataForgedError,
    NoSuchLedgerError,
    PybkError,
    UnsupportedFormatError,
)
from pybk.healing.chores import Work
from pybk.healing.scrub_schedule import PARTS, ScrubKind, ScrubSchedule, part_of, rate_of
from pybk.healing.throttle import SAMPLE_NS, ForegroundGuard, TokenBucket
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.underreplication import RepairReason
from pybk.metrics import (
    APPEND_LATENCY,
    SCRUB_BYTES,
    SCRUB_DAMAGED_RECORDS,
    Gauge,
    HistogramSnapshot,
    MetricKey,
    Metrics,
)
from pybk.replication.fragments import fragment_end
from pybk.replication.quorum import Quorum
from pybk.spans import OnSpan, report
from pybk.storage.io.failures import CHECKING
from pybk.storage.io.filesystem import PAGE_BYTES
from pybk.storage.repair.record_check import CheckedPiece, DamagedEntries, check_piece
from pybk.storage.repair.scrub_notes import load_notes, save_notes
from pybk.storage.store import Store
from pybk.storage.store_reader import StoreReader
from pybk.values import FrozenDict, listed

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata

logger = logging.getLogger(__name__)

FIRST_S: Final = 10.0
"""Seconds after the start before anything is checked, because a process that soon ends has other work."""

REST_S: Final = 60.0
"""Seconds between two looks for due checks, and between two saves of the notes."""

RECHECK_S: Final = 5.0
"""The least seconds between two looks at damage that was found."""

_RECHECK_SHARE: Final = 20
"""The least wait before the next look at what was found damaged, in multiples of the time that the last took."""

DAMAGED_MAX: Final = 1000
"""The most damaged records that are kept; all are counted."""

LEDGERS_NAMED: Final = 10
"""Ledgers that a text about damage names."""

QUIET_S: Final = 10.0
"""Seconds for which a bookie remembers whether repairs are held or paused."""

TERMS_S: Final = 1.0
"""Seconds for which the terms of the owner are remembered."""


KINDS: Final = (ScrubKind.DEEP, ScrubKind.LIGHT)
"""The kinds of checks of one store."""

Schedules = dict[ScrubKind, ScrubSchedule]

Damage = dict[tuple[int, int], tuple[DamagedEntries, DamagedEntries]]
"""Damaged entries, by the store's and by the public numbers, by the store's ledger and first entry."""

_NOTHING_ASKED: Final[Mapping[ScrubKind, int]] = FrozenDict({})


class ScrubTerms(NamedTuple):
    """The terms on which a store is checked now.

    Attributes:
        periods: Seconds between two checks, by kind; a kind that is missing is not checked.
        bytes_per_second: The limit.
        asked_ns: The newest request of a person to check everything at once, by kind, by that person's clock.
        quiet: Whether the cluster is quiet; if not, only parts that are late or were asked for are checked.
        share: The part of the rate that the latency of appends leaves, up to 1.
    """

    periods: Mapping[ScrubKind, float]
    bytes_per_second: float
    asked_ns: Mapping[ScrubKind, int]
    quiet: bool = True
    share: float = 1.0


class ScrubOwner(ABC):
    """The owner of a store that is checked: a bookie, or an embedded store itself.

    Args:
        store: The store.
        metrics: Counts what is checked and found.

    Attributes:
        first_s: Seconds before anything is checked.

    Threads: that which makes the steps; ``report``, ``still_needs`` and ``show`` any.
    """

    first_s = 0.0

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.store: Final = store
        self.metrics: Final = metrics

    @abstractmethod
    def terms(self) -> ScrubTerms | None:
        """Return the present terms of checks; None for no checks."""

    @abstractmethod
    def load(self) -> Mapping[str, Any] | None:
        """Return the notes that ``save`` saved last; None if there are none."""

    @abstractmethod
    def save(self, notes: Mapping[str, Any]) -> None:
        """Save notes, durably."""

    @abstractmethod
    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries | None:
        """Start the repair of damaged entries, if they can be repaired.

        Args:
            metadata: The ledger of the store.
            damaged: The entries, numbered as in the store.

        Returns:
            The entries by their public numbers; None if they are no longer needed.
        """

    @abstractmethod
    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        """Return whether damaged entries are still needed; not if they were copied anew."""

    @abstractmethod
    def remedy(self) -> str:
        """Return the remedy for damaged entries, or the repair that follows, as the end of a sentence."""

    def show(self, damaged: Iterable[DamagedEntries]) -> None:
        """Show the present damage in the health of the store; none if it is sound."""
        found = list(damaged)
        if found:
            self.store.troubles.note(CHECKING, text_of(found) + self.remedy())
        else:
            self.store.troubles.clear(CHECKING)


class ScrubReport(NamedTuple):
    """The result of a check of all stored entries.

    Attributes:
        ledgers: Ledgers that were checked.
        read_bytes: Bytes that were read, about.
        damaged: The damaged entries, a record each.
    """

    ledgers: int
    read_bytes: int
    damaged: tuple[DamagedEntries, ...]


@dataclass(slots=True)
class _Walk:
    """The rest of a part that is under way: its ledgers, and about how many bytes they have."""

    part: int
    ledger_ids: deque[int]
    size_bytes: int
    began_ns: int = field(default_factory=time.monotonic_ns)
    damaged: int = 0


class StoreScrub:
    """Checks the entries of a store in the background, until ``close``; see the module. A chore.

    Args:
        owner: The owner of the store.
        on_span: The hook that gets a span of each part that was checked; None for none.
        wake: Makes the thread of the chores ask again for due work; does nothing if a thread calls ``run``.

    Threads: one at a time makes steps; everything else any.
    """

    def __init__(
        self, owner: ScrubOwner, on_span: OnSpan | None = None, wake: Callable[[], None] = lambda: None
    ) -> None:
        self.trouble: Final = f"{owner.store.volumes.root}: entries are not checked now"
        self._wake = wake
        self._owner = owner
        self._on_span = on_span
        self._lock = threading.Lock()
        now_ns = time.time_ns()
        self._schedules = {kind: ScrubSchedule(now_ns) for kind in KINDS}
        self._damaged: Damage = {}
        self._walks: dict[ScrubKind, _Walk] = {}
        self._bucket = TokenBucket(1.0, time.monotonic_ns())
        self._terms: ScrubTerms | None = None
        self._terms_at = self._saved_at = self._recheck_at = float("-inf")
        self._unsaved = False
        self._stopping = threading.Event()
        self._news = threading.Event()
        self._loaded = False
        """True once the notes were loaded; before, they are not saved."""
        self._at = time.monotonic() + owner.first_s
        """The time when the next step is due, by the monotonic clock."""
        owner.metrics.add_gauges(self._gauges)

    def _gauges(self) -> list[Gauge]:
        terms = self._terms
        if terms is None:
            return []
        return [
            gauge
            for kind, period_s in terms.periods.items()
            for gauge in scrub_gauges(kind, self.oldest_ns(kind), period_s)
        ]

    # ---- what is due ---------------------------------------------------------------------------------------------

    def due(self, now: float) -> Work | float:
        """Return the next step, or the time when it is due."""
        return self._make_step if self._news.is_set() or now >= self._at else self._at

    def _make_step(self) -> None:
        """Make a step, and choose when the next one follows; a failure is logged."""
        self._news.clear()  # terms that change from here on are seen by this step, or have another one follow at once
        rest_s: float | None = None
        try:
            if not self._loaded:
                self._load()
                self._loaded = True
            rest_s = self.step()
        except PybkError as error:
            self._recheck_later()
            logger.warning("%s: %s", self.trouble, error)
        except Exception:  # the next step has to follow, or damage would not be found any more
            self._recheck_later()
            logger.exception("%s", self.trouble)
        self._at = time.monotonic() + (self._rest_s() if rest_s is None else rest_s)

    def run(self) -> None:
        """Make the checks that are due in the calling thread, until ``begin_stop``."""
        while not self._stopping.is_set():
            found = self.due(time.monotonic())
            if callable(found):
                found()
            else:
                self._news.wait(max(0.0, found - time.monotonic()))
        self.close()

    def _recheck_later(self) -> None:
        """Look at known damage again after a rest, because a step failed, maybe before it came to that."""
        self._recheck_at = time.monotonic() + REST_S

    def _rest_s(self) -> float:
        """Return how long nothing is due, at most ``REST_S``."""
        terms, now_ns = self._terms, time.time_ns()
        longest = REST_S
        with self._lock:
            if self._damaged:
                longest = min(longest, max(0.01, self._recheck_at - time.monotonic()))
            if terms is None:
                return longest
            dues = [self._schedules[kind].next_due_ns(period, now_ns) for kind, period in terms.periods.items()]
        return min([longest, *(max(0.01, (due - now_ns) / 1e9) for due in dues if due > now_ns)])

    def step(self) -> float | None:
        """Check the next piece if the rate admits it; return the seconds to the next step; None if nothing is due."""
        now = time.monotonic()
        if now >= self._terms_at + TERMS_S:
            self._terms, self._terms_at = self._owner.terms(), now
        if now >= self._recheck_at:
            self._recheck()
            ended = time.monotonic()
            self._recheck_at = ended + max(RECHECK_S, _RECHECK_SHARE * (ended - now))
        if self._unsaved and now >= self._saved_at + REST_S:
            self._try_save()
        terms = self._terms
        if terms is None:
            return None
        choice = self._choose(terms, time.time_ns())
        if choice is None:
            return None
        kind, due = choice
        walk = self._walk_of(kind)
        asked = self._schedules[kind].is_asked(walk.part)
        rate = rate_of(walk.size_bytes, due, terms.periods[kind], terms.bytes_per_second)
        self._bucket.rate = (terms.bytes_per_second if asked else rate) * terms.share
        wait_ns = self._bucket.wait_ns(time.monotonic_ns())
        if wait_ns:
            return min(wait_ns / 1e9, TERMS_S)
        self._check(kind, walk)
        return 0.0

    def _choose(self, terms: ScrubTerms, now_ns: int) -> tuple[ScrubKind, int] | None:
        """Begin or continue the most urgent part; return its kind, and how many parts of that kind are due."""
        found: list[tuple[bool, int, ScrubKind, int, int]] = []
        with self._lock:
            for kind, period in terms.periods.items():
                schedule = self._schedules[kind]
                schedule.ask(terms.asked_ns.get(kind, 0), now_ns)
                due = schedule.due(period, now_ns)
                if not terms.quiet:
                    due = [part for part in due if schedule.is_late(part, period, now_ns)]
                if due:
                    at_ns = schedule.due_ns(due[0], period, now_ns)
                    found.append((not schedule.is_asked(due[0]), at_ns, kind, due[0], len(due)))
            if not found:
                return None
            _, _, kind, part, count = min(found)
            schedule = self._schedules[kind]
            begins = schedule.part != part or schedule.part_began_ns < schedule.asked_at_ns
            schedule.begin(part, now_ns)
        if begins:
            self._walks.pop(kind, None)
        return kind, count

    def _walk_of(self, kind: ScrubKind) -> _Walk:
        """Return the rest of the part of a kind that is under way, listed when it begins or is resumed."""
        walk = self._walks.get(kind)
        schedule = self._schedules[kind]
        if walk is None or walk.part != schedule.part:
            store = self._owner.store
            walk = _Walk(schedule.part, deque(), 0)
            for metadata in store.ledgers(schedule.ledger_id - 1):
                if part_of(metadata.ledger_id) == schedule.part:
                    walk.ledger_ids.append(metadata.ledger_id)
                    walk.size_bytes += _bytes_of(store, metadata.ledger_id)
            self._walks[kind] = walk
        return walk

    def _check(self, kind: ScrubKind, walk: _Walk) -> None:
        """Check a piece of the part under way; end the part if nothing is left of it."""
        schedule = self._schedules[kind]
        if not walk.ledger_ids:
            with self._lock:
                schedule.finish()
            del self._walks[kind]
            if self._on_span is not None:
                told = {"kind": kind.value, "part": walk.part, "damaged": walk.damaged}
                report(self._on_span, "pybk.store.scrub_part", walk.began_ns, None, **told)
            self._try_save()
            return
        ledger_id = walk.ledger_ids[0]
        first = schedule.entry_id if schedule.ledger_id == ledger_id else 0
        piece = self._check_piece(ledger_id, first, deep=kind is ScrubKind.DEEP)
        self._bucket.charge(piece.read_bytes + PAGE_BYTES, time.monotonic_ns())  # a page of the index, too
        with self._lock:
            if piece.next_entry_id is None:
                walk.ledger_ids.popleft()
                schedule.reach(ledger_id + 1)
            else:
                schedule.reach(ledger_id, piece.next_entry_id)
            self._unsaved = True
        if piece.damaged:
            walk.damaged += len(piece.damaged)
            self._try_save()

    def _check_piece(self, ledger_id: int, first: int, *, deep: bool) -> CheckedPiece:
        """Check a piece, count it, and report damaged entries."""
        owner = self._owner
        owner.store.check_usable()
        try:
            descriptor = owner.store.descriptor(ledger_id)
        except NoSuchLedgerError:
            return CheckedPiece(None, 0, ())
        piece = check_piece(owner.store, descriptor, first, deep=deep)
        metadata = descriptor.metadata
        owner.metrics.add(SCRUB_BYTES, piece.read_bytes, metadata.ledger_type, metadata.tier)
        for found in piece.damaged:
            known = owner.report(metadata, found)
            if known is not None:
                logger.error("%s: %s", owner.store.volumes.root, known.problem)
                owner.metrics.add(SCRUB_DAMAGED_RECORDS, 1, metadata.ledger_type, metadata.tier)
                with self._lock:
                    if len(self._damaged) < DAMAGED_MAX:
                        self._damaged[found.ledger_id, found.first_entry_id] = found, known
        if piece.damaged:
            self._show()
        return piece

    def _recheck(self) -> None:
        """Look again at what was found damaged, and forget what is sound, deleted, or not needed any more."""
        with self._lock:
            known = list(self._damaged.items())
        for key, (found, _) in known:
            if self._stopping.is_set():
                return
            if not self._is_damaged(found):
                with self._lock:
                    self._damaged.pop(key, None)
                    self._unsaved = True
                logger.info("%s: ledger %d from entry %d is sound again", self._owner.store.volumes.root, *key)
        if known:
            self._show()

    def _is_damaged(self, known: DamagedEntries) -> bool:
        store = self._owner.store
        try:
            descriptor = store.descriptor(known.ledger_id)
        except NoSuchLedgerError:
            return False
        if not self._owner.still_needs(descriptor.metadata, known):
            return False
        return any(
            found.first_entry_id <= known.last_entry_id
            for deep in (True, False)
            for found in check_piece(store, descriptor, known.first_entry_id, deep=deep).damaged
        )

    def _show(self) -> None:
        self._owner.show(self.damaged)

    # ---- notes ---------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        notes = self._owner.load()
        if notes is None:
            return
        try:
            schedules, damaged = decoded_notes(notes)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s: the checks begin again, because their notes are damaged: %r", self._root, error)
            return
        with self._lock:
            self._schedules |= schedules
            self._damaged |= damaged

    def _try_save(self) -> None:
        """Save the notes; a failure is logged, and they are saved later."""
        self._saved_at = time.monotonic()
        try:
            self._owner.save(self.notes())
        except (PybkError, OSError) as error:
            self._unsaved = True
            logger.warning("%s: the progress of the checks is not noted yet: %s", self._root, error)
        else:
            self._unsaved = False

    @property
    def _root(self) -> str:
        return self._owner.store.volumes.root

    def notes(self) -> dict[str, Any]:
        """Return the notes as values for JSON."""
        with self._lock:
            return {
                "kinds": {kind.value: schedule.encode() for kind, schedule in self._schedules.items()},
                "damaged": [[list(found), list(known)] for found, known in self._damaged.values()],
                "noted_ns": time.time_ns(),
            }

    @property
    def damaged(self) -> tuple[DamagedEntries, ...]:
        """The entries that are damaged now, by their public numbers."""
        with self._lock:
            return tuple(known for _, known in self._damaged.values())

    def oldest_ns(self, kind: ScrubKind) -> int:
        """Return the time since which everything was checked, nanoseconds since 1970."""
        with self._lock:
            return self._schedules[kind].oldest_ns

    # ---- by hand -------------------------------------------------------------------------------------------------

    def check_all(self, progress: Callable[[int, int], None]) -> ScrubReport:
        """Check every checksum now, in the calling thread, as fast as possible; it counts as a deep check.

        Args:
            progress: Called with the bytes of entries that were checked, and of all.

        Raises:
            ClosedError: The store was closed meanwhile.
            UsageError: Entries are compressed and the extra ``pybk[zstd]`` is not installed.
        """
        began_ns = time.time_ns()
        report = check_store(self._owner.store, progress, lambda *piece: self._check_piece(*piece, deep=True))
        with self._lock:
            deep = self._schedules[ScrubKind.DEEP]
            deep.checked_ns = [max(began_ns, each) for each in deep.checked_ns]
            self._unsaved = True
        self._try_save()
        return report

    def wake(self) -> None:
        """Ask for the owner's terms at once, and look for checks that are due by them; any thread."""
        self._terms_at = float("-inf")
        self._news.set()
        self._wake()

    def begin_stop(self) -> None:
        """Check no further piece; returns at once."""
        self._stopping.set()
        self._news.set()

    def close(self) -> None:
        """Save the notes; to be called once no thread makes steps any more."""
        if self._loaded:
            self._try_save()


def check_store(
    store: StoreReader,
    progress: Callable[[int, int], None],
    check: Callable[[int, int], CheckedPiece] | None = None,
) -> ScrubReport:
    """Check every checksum of a store, in the calling thread, as fast as possible.

    Args:
        store: The store, live or read-only.
        progress: Called with the bytes of entries that were checked, and of all.
        check: Checks a piece of a ledger from an entry on; None checks without reports.
    """

    def alone(ledger_id: int, first: int) -> CheckedPiece:
        try:
            return check_piece(store, store.descriptor(ledger_id), first, deep=True)
        except NoSuchLedgerError:
            return CheckedPiece(None, 0, ())

    check = check or alone
    sizes = {metadata.ledger_id: _bytes_of(store, metadata.ledger_id) for metadata in store.ledgers()}
    total, done, read = sum(sizes.values()), 0, 0
    damaged: list[DamagedEntries] = []
    for ledger_id, size in sizes.items():
        first: int | None = 0
        while first is not None:
            piece = check(ledger_id, first)
            damaged += piece.damaged
            read += piece.read_bytes
            first = piece.next_entry_id
        done += size
        progress(done, total)
    return ScrubReport(len(sizes), read, tuple(damaged))


def _bytes_of(store: StoreReader, ledger_id: int) -> int:
    """Return the payload bytes of a ledger; 0 for one that was deleted."""
    try:
        return store.descriptor(ledger_id).length_durable
    except NoSuchLedgerError:
        return 0


# ---- notes and status ------------------------------------------------------------------------------------------------


def decoded_notes(notes: Mapping[str, Any]) -> tuple[Schedules, Damage]:
    """Return the schedules and the damage in notes; raises KeyError, TypeError or ValueError if they are not notes."""
    schedules = {kind: ScrubSchedule.decode(notes["kinds"][kind.value]) for kind in KINDS}
    damaged = {}
    for found, known in notes["damaged"][:DAMAGED_MAX]:
        first = _entries(found)
        damaged[first.ledger_id, first.first_entry_id] = first, _entries(known)
    return schedules, damaged


def _entries(values: Any) -> DamagedEntries:
    ledger_id, first, last, problem = values
    if not all(type(number) is int for number in (ledger_id, first, last)) or type(problem) is not str:
        raise ValueError(f"{values!r:.200} are no damaged entries")
    return DamagedEntries(ledger_id, first, last, problem)


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """The progress of one kind of check.

    Attributes:
        oldest_ns: The time since which all entries that existed then were checked, nanoseconds since 1970; if some were
            not checked yet, the time when checks began.
        asked: The share, 0 to 1, of the last check requested by a person that is still to be made.
        under_way: Whether a part is under way.
    """

    oldest_ns: int
    asked: float
    under_way: bool


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """The progress of the checks of one store, or of the quick audits of a cluster.

    Attributes:
        name: The bookie, the directory of the store, or ``"auditor"``.
        noted_ns: The time of this status, nanoseconds since 1970; 0 if no status was noted yet.
        kinds: The progress by kind of check.
        damaged: The records that were found damaged and still are; at most 1000.
    """

    name: str
    noted_ns: int
    kinds: Mapping[ScrubKind, ScrubProgress]
    damaged: tuple[DamagedEntries, ...] = ()


def status_of_notes(
    name: str, notes: Mapping[str, Any] | None, asked_ns: Mapping[ScrubKind, int] = _NOTHING_ASKED
) -> ScrubStatus:
    """Return the status of a store from the notes of its checks; damaged notes count as none.

    Args:
        name: The name of the owner of the notes.
        notes: The notes; None for none.
        asked_ns: The last request of a person by kind, as the settings have it.
    """
    return _status(name, notes, asked_ns, decoded_notes)


def status_of_quick(notes: Mapping[str, Any] | None, asked_ns: Mapping[ScrubKind, int] = _NOTHING_ASKED) -> ScrubStatus:
    """Return the status of the quick audits of a cluster from the auditor's notes, as ``status_of_notes`` does."""
    return _status(
        "auditor", notes, asked_ns, lambda found: ({ScrubKind.QUICK: ScrubSchedule.decode(found["quick"])}, {})
    )


def _status(
    name: str,
    notes: Mapping[str, Any] | None,
    asked_ns: Mapping[ScrubKind, int],
    decoded: Callable[[Mapping[str, Any]], tuple[Schedules, Damage]],
) -> ScrubStatus:
    """Return the status that notes have, given a function that decodes them; damaged notes count as none."""
    if notes is None:
        return ScrubStatus(name, 0, FrozenDict({}))
    try:
        schedules, damaged = decoded(notes)
        noted_ns = int(notes["noted_ns"])
    except (KeyError, TypeError, ValueError):
        return ScrubStatus(name, 0, FrozenDict({}))
    kinds = FrozenDict({kind: progress_of(schedule, asked_ns.get(kind, 0)) for kind, schedule in schedules.items()})
    return ScrubStatus(name, noted_ns, kinds, tuple(known for _, known in damaged.values()))


def progress_of(schedule: ScrubSchedule, asked_ns: int = 0) -> ScrubProgress:
    """Return the progress of one kind of check; a request after the schedule was noted counts as not begun."""
    asked = 1.0 if asked_ns > schedule.asked_ns else sum(map(schedule.is_asked, range(PARTS))) / PARTS
    return ScrubProgress(schedule.oldest_ns, asked, schedule.part >= 0)


def scrub_gauges(kind: ScrubKind, oldest_ns: int, period_s: float) -> tuple[Gauge, Gauge]:
    """Return the gauges of the time since which everything was checked, and of the period of checks.

    Args:
        kind: The kind of check.
        oldest_ns: The time since which everything was checked, nanoseconds since 1970.
        period_s: Seconds between two checks.
    """
    labels = (("kind", kind.value),)
    return (
        (MetricKey("scrub_oldest_timestamp_ns", labels=labels), oldest_ns),
        (MetricKey("scrub_period_ns", labels=labels), period_s * 1e9),
    )


# ---- owners ----------------------------------------------------------------------------------------------------------


def text_of(damaged: Iterable[DamagedEntries]) -> str:
    """Return the text of a health reason about damaged entries: the number of records, and the ledgers."""
    found = list(damaged)
    ledgers = sorted({each.ledger_id for each in found})
    records, of = "record" if len(found) == 1 else "records", "ledger" if len(ledgers) == 1 else "ledgers"
    return f"{len(found)} damaged {records} in {of} {listed(ledgers, LEDGERS_NAMED)}"


class EmbeddedScrub(ScrubOwner):
    """An embedded store as the owner of its checks; see ``ScrubOwner``.

    The store has the only copy of an entry, so damage cannot be mended. The health of the store names it until the file
    was restored or the ledger deleted.

    Args:
        store: The store; its configuration has the period and the rate.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, store.metrics)
        self._guard = ForegroundGuard()
        self._sampled_ns = time.monotonic_ns()
        self._seen: Counter[int] = Counter()

    def terms(self) -> ScrubTerms | None:
        """Return the deep check only, at the rate of the configuration; None if that has no checks."""
        config = self.store.config
        if not config.scrub_seconds:
            return None
        return ScrubTerms(
            {ScrubKind.DEEP: config.scrub_seconds}, config.scrub_bytes_per_second, {}, share=self._share()
        )

    def _share(self) -> float:
        """Return the share of the rate that appends leave, from a sample every ten seconds."""
        now_ns = time.monotonic_ns()
        if now_ns - self._sampled_ns >= SAMPLE_NS:
            self._sampled_ns = now_ns
            before, self._seen = self._seen, appends_of(self.metrics)
            new = self._seen - before
            appends = HistogramSnapshot(new.total(), 0, max(new, default=0), tuple(sorted(new.items())))
            self._guard.sample(appends.quantile(0.99) if new else None)
        return self._guard.factor

    def load(self) -> Mapping[str, Any] | None:
        """Return the notes in the store's directory."""
        return load_notes(self.store.fs, self.store.volumes.root)

    def save(self, notes: Mapping[str, Any]) -> None:
        """Save notes in the store's directory."""
        save_notes(self.store.fs, self.store.volumes.root, notes)

    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries | None:
        """Return the entries, because no other copy exists from which to mend them."""
        return damaged

    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        """Return True, because nothing is copied anew."""
        return True

    def remedy(self) -> str:
        """Return the remedy for a person."""
        root = self.store.volumes.root
        return f"; run `pybk store verify {root}`, and restore the files that it names, or delete the ledgers"


def appends_of(metrics: Metrics) -> Counter[int]:
    """Return the number of appends by the time that they took: by the upper bound of each bucket, nanoseconds."""
    found: Counter[int] = Counter()
    for key, histogram in metrics.snapshot().histograms.items():
        if key.name == APPEND_LATENCY:
            for highest, count in histogram.buckets:
                found[highest] += count
    return found


class BookieScrub(ScrubOwner):
    """A bookie as the owner of the checks of its store; see ``ScrubOwner``.

    Damaged entries that a ledger needs get a mark, because of which this bookie's worker copies them from a peer. The
    copy is stored in addition to the damaged record, which stays in its place.

    Args:
        bookie: The bookie.
        metadata: The cluster's metadata.
        metrics: The counters of the manager.
        share: Returns the share of the rate that the latency of appends leaves.
    """

    def __init__(
        self, bookie: BookieServer, metadata: ClusterMetadata, metrics: Metrics, share: Callable[[], float]
    ) -> None:
        super().__init__(bookie.replicas.store, metrics)
        self.first_s = FIRST_S
        self._bookie = bookie
        self._metadata = metadata
        self._share = share
        self._quiet = False
        self._looked_at = float("-inf")

    def terms(self) -> ScrubTerms | None:
        """Return the terms that the settings of the cluster give."""
        settings = self._metadata.current_settings()
        scrub = settings.scrub
        now = time.monotonic()
        if now >= self._looked_at + QUIET_S:
            self._quiet, self._looked_at = self._metadata.is_quiet(time.time_ns()), now
        return ScrubTerms(
            {ScrubKind.DEEP: scrub.deep_s, ScrubKind.LIGHT: scrub.light_s},
            scrub.bytes_per_second,
            {ScrubKind.DEEP: scrub.deep_asked_ns, ScrubKind.LIGHT: scrub.light_asked_ns},
            quiet=self._quiet and settings.repair.paused_until_ns <= time.time_ns(),
            share=self._share(),
        )

    def load(self) -> Mapping[str, Any] | None:
        """Return the notes in the metadata store; damaged ones count as none."""
        try:
            return self._metadata.read_scrub(self._bookie.bookie)
        except (CorruptError, MetadataForgedError, UnsupportedFormatError):
            return None  # they are replaced by the next ones

    def save(self, notes: Mapping[str, Any]) -> None:
        """Save notes in the metadata store."""
        self._metadata.write_scrub(self._bookie.bookie, notes)

    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries | None:
        """Mark the first of the entries that are needed; raises MetadataError if that is not durable."""
        needed = self._needed(metadata, damaged)
        if needed is None:
            return None
        ledger_id, first, last = needed
        self._metadata.mark_under_replicated(ledger_id, self._bookie.bookie, first, reason=RepairReason.DAMAGED)
        problem = f"ledger {ledger_id} entries {first} to {last} are damaged, and copied from a peer: {damaged.problem}"
        return DamagedEntries(ledger_id, first, last, problem)

    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        """Return whether any of the entries are needed."""
        return self._needed(metadata, damaged) is not None

    def _needed(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> tuple[int, int, int] | None:
        """Return the ledger, and the first and last of the damaged entries that belong to it and have no new copy here.

        Only entries count that this bookie is to hold: nobody copies others to it, such as those beyond the end of a
        closed ledger, which a recovery has cut, and surplus copies. While the metadata of the ledger cannot be read,
        all count.
        """
        valid = self._bookie.replicas.valid_entries(metadata, damaged.first_entry_id, damaged.last_entry_id)
        if valid is None:
            return None
        ledger_id, entries = valid
        try:
            ledger, _ = self._metadata.read_ledger(ledger_id)
        except LedgerDeletedError:
            return None
        except PybkError:
            return ledger_id, entries[0], entries[-1]
        placed = placed_entries(ledger, self._bookie.bookie, entries)
        return (ledger_id, placed[0], placed[-1]) if placed else None

    def remedy(self) -> str:
        """Return a note on the source of copies."""
        return ", which are to be copied from other bookies"


def placed_entries(ledger: LedgerMetadata, bookie: Bookie, entries: Sequence[int]) -> list[int]:
    """Return those of some entries, ascending, whose write sets contain a bookie.

    A bookie may hold other entries as well, because its place in the ensemble may have changed since an entry was sent
    to it.
    """
    quorum = Quorum(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum)
    found: list[int] = []
    for number, fragment in enumerate(ledger.fragments):
        if bookie in fragment.ensemble:
            end, place = fragment_end(ledger, number), fragment.ensemble.index(bookie)
            part = entries[bisect_left(entries, fragment.first_entry_id) :]
            part = part if end is None else part[: bisect_right(part, end)]
            found += (entry_id for entry_id in part if quorum.mask(entry_id) >> place & 1)
    return found
