"""The thread that checks the stored entries of one store in the background, piece by piece.

Theory of operation
-------------------

``StoreScrub`` walks the ledgers of a store, part by part (``scrub``), and checks their records where they lie
(``storage/repair/record_check``). The store of a bookie and an embedded store are checked alike; its *owner* says how
often and how fast, keeps the notes, and takes what was found.

1. The owner's terms are asked at most once a second. Without terms, nothing is checked.
2. Of all parts that are due, of both kinds, the one under way or the oldest is chosen. While the cluster is not quiet,
   because repairs are held or paused, only parts that are late by a whole period are checked, and those that a person
   has asked for: bookies have other work then, and what is damaged could not be mended. A check only reads, so that it
   is never wrong to run it.
3. One piece of about 1 MiB is checked, and charged to a token bucket. All devices share it, so that none is read
   faster than the rate; the rate is what the part needs to end in its share of the period, times the share that the
   latency of appends leaves.
4. What is damaged is given to the owner. The notes then say that everything before the next piece was checked. They are
   saved when a part ends, when damage was found, once a minute, and at the end. After a crash some pieces are checked
   twice.

Damage is remembered until it is gone: the owner shows it in its health, and some seconds later it is looked at again,
because a file may be restored, a ledger deleted, or, at a bookie, the entries copied anew.

While nothing is due the thread rests. It rests no longer when the owner's terms have changed (``wake``).

Locks: ``_lock`` guards the schedules and the damage; it is not held while anything is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from pybk.errors import NoSuchLedgerError, PybkError
from pybk.healing.scrub import ScrubKind, ScrubSchedule, part_of, rate_of
from pybk.healing.throttle import TokenBucket
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metrics import SCRUB_BYTES, SCRUB_DAMAGED_RECORDS, Gauge, MetricKey, Metrics
from pybk.spans import OnSpan, report
from pybk.storage.io.filesystem import PAGE_BYTES
from pybk.storage.repair.record_check import CheckedPiece, DamagedEntries, check_piece
from pybk.storage.store_reader import StoreReader
from pybk.threads.workers import start_thread

logger = logging.getLogger(__name__)

FIRST_S: Final = 10.0
"""Seconds after the start before anything is checked, because a process that soon ends has other work."""

LOOK_S: Final = 60.0
"""Seconds between two looks whether something is due, and between two saves of the notes."""

RECHECK_S: Final = 5.0
"""The least seconds between two looks at what was found damaged."""

_RECHECK_SHARE: Final = 20
"""How many times as long as a look at what was found damaged it takes at least until the next one."""

DAMAGED_MAX: Final = 1000
"""Damaged records that are remembered; all are counted."""

LEDGERS_NAMED: Final = 10
"""Ledgers that a text about damage names."""

TERMS_S: Final = 1.0
"""Seconds for which the terms of the owner are remembered."""

KINDS: Final = (ScrubKind.DEEP, ScrubKind.LIGHT)
"""The kinds of checks of one store."""


class ScrubTerms(NamedTuple):
    """How a store is checked now.

    Attributes:
        periods: Seconds between two checks, by kind; a kind that is missing is not checked.
        bytes_per_second: The limit.
        asked_ns: The newest request of a person to check everything at once, by kind, by that person's clock.
        quiet: Whether the cluster is quiet; if not, only what is late or asked for is checked.
        share: The part of the rate that the latency of appends leaves, up to 1.
    """

    periods: Mapping[ScrubKind, float]
    bytes_per_second: float
    asked_ns: Mapping[ScrubKind, int]
    quiet: bool = True
    share: float = 1.0


class ScrubOwner(Protocol):
    """Whose store is checked."""

    @property
    def store(self) -> StoreReader:
        """The store."""

    @property
    def metrics(self) -> Metrics:
        """Where to count."""

    def terms(self) -> ScrubTerms | None:
        """Return how to check now; None: not at all."""

    def load(self) -> Mapping[str, Any] | None:
        """Return the notes that ``save`` saved last; None if there are none."""

    def save(self, notes: Mapping[str, Any]) -> None:
        """Save notes, durably."""

    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries | None:
        """Have damaged entries repaired, if they can be.

        Args:
            metadata: The ledger of the store.
            damaged: The entries, numbered as in the store.

        Returns:
            The entries as people know them; None if nothing needs them any more.
        """

    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        """Return whether damaged entries are still needed; not if they were copied anew."""

    def show(self, damaged: Iterable[DamagedEntries]) -> None:
        """Show what is damaged now in the health of the store; nothing if it is sound."""


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
    """Checks the entries of a store in the background, from its creation until ``stop``; see the module.

    Args:
        owner: Whose store it is.
        on_span: The hook that gets a span of each part that was checked; None for none.
        starts: Whether it starts a thread of its own, which waits ``FIRST_S``; if not, the caller has one that calls
            ``run``.

    Raises:
        StorageRefusedError: The operating system gives no thread.

    Threads: its own; everything else any.
    """

    def __init__(self, owner: ScrubOwner, on_span: OnSpan | None = None, *, starts: bool = True) -> None:
        self._owner = owner
        self._on_span = on_span
        self._lock = threading.Lock()
        now_ns = time.time_ns()
        self._schedules = {kind: ScrubSchedule(now_ns) for kind in KINDS}
        self._damaged: dict[tuple[int, int], tuple[DamagedEntries, DamagedEntries]] = {}
        """By store's ledger and first entry: the entries as the store numbers them, and as people know them."""
        self._walks: dict[ScrubKind, _Walk] = {}
        self._bucket = TokenBucket(1.0, time.monotonic_ns())
        self._terms: ScrubTerms | None = None
        self._terms_at = self._saved_at = self._recheck_at = float("-inf")
        self._unsaved = False
        self._stopping = threading.Event()
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pybk-scrub", daemon=True)
        if starts:
            start_thread(self._thread)
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

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._news.wait(FIRST_S)
        self.run()

    def run(self) -> None:
        """Check what is due until ``begin_stop``."""
        loaded = False
        while not self._stopping.is_set():
            self._news.clear()  # terms that change from here on are seen by this step, or end the rest after it
            try:
                if not loaded:
                    self._load()
                    loaded = True
                busy = self.step()
            except PybkError as error:
                busy = False
                self._recheck_later()
                logger.warning("%s: entries are not checked now: %s", self._owner.store.volumes.root, error)
            except Exception:  # this thread must survive, or damage would not be found any more
                busy = False
                self._recheck_later()
                logger.exception("%s: entries are not checked now", self._owner.store.volumes.root)
            if not busy and not self._stopping.is_set():
                self._news.wait(self._rest_s())
        if loaded:
            self._try_save()

    def _recheck_later(self) -> None:
        """Look at known damage again after a rest, because a step failed, maybe before it came to that."""
        self._recheck_at = time.monotonic() + LOOK_S

    def _rest_s(self) -> float:
        """Return how long nothing is due, at most ``LOOK_S``."""
        terms, now_ns = self._terms, time.time_ns()
        longest = LOOK_S
        with self._lock:
            if self._damaged:
                longest = min(longest, max(0.01, self._recheck_at - time.monotonic()))
            if terms is None:
                return longest
            dues = [self._schedules[kind].next_due_ns(period, now_ns) for kind, period in terms.periods.items()]
        return min([longest, *(max(0.01, (due - now_ns) / 1e9) for due in dues if due > now_ns)])

    def step(self) -> bool:
        """Check the next piece, once the rate admits it; return False if nothing is due."""
        now = time.monotonic()
        if now >= self._terms_at + TERMS_S:
            self._terms, self._terms_at = self._owner.terms(), now
        if now >= self._recheck_at:
            self._recheck()
            ended = time.monotonic()
            self._recheck_at = ended + max(RECHECK_S, _RECHECK_SHARE * (ended - now))
        if self._unsaved and now >= self._saved_at + LOOK_S:
            self._try_save()
        terms = self._terms
        if terms is None:
            return False
        choice = self._choose(terms, time.time_ns())
        if choice is None:
            return False
        kind, due = choice
        walk = self._walk_of(kind)
        asked = self._schedules[kind].is_asked(walk.part)
        rate = rate_of(walk.size_bytes, due, terms.periods[kind], terms.bytes_per_second)
        self._bucket.rate = (terms.bytes_per_second if asked else rate) * terms.share
        wait_ns = self._bucket.wait_ns(time.monotonic_ns())
        if wait_ns:
            self._stopping.wait(min(wait_ns / 1e9, TERMS_S))
            return True
        self._check(kind, walk)
        return True

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
        """Check a piece, count it, and report what is damaged."""
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
            logger.warning("%s: the checks begin anew, as their notes are damaged: %r", self._root, error)
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
            logger.warning("%s: what was checked is not noted yet: %s", self._root, error)
        else:
            self._unsaved = False

    @property
    def _root(self) -> str:
        return self._owner.store.volumes.root

    def notes(self) -> dict[str, Any]:
        """Return what is remembered, as JSON has it."""
        with self._lock:
            return {
                "kinds": {kind.value: schedule.encode() for kind, schedule in self._schedules.items()},
                "damaged": [[list(found), list(known)] for found, known in self._damaged.values()],
                "noted_ns": time.time_ns(),
            }

    @property
    def damaged(self) -> tuple[DamagedEntries, ...]:
        """What is damaged now, as people know it."""
        with self._lock:
            return tuple(known for _, known in self._damaged.values())

    def oldest_ns(self, kind: ScrubKind) -> int:
        """Return since when everything was checked, nanoseconds since 1970."""
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
        """Ask the owner's terms at once, and look whether something is due by them; any thread."""
        self._terms_at = float("-inf")
        self._news.set()

    def begin_stop(self) -> None:
        """Check no further piece; returns at once."""
        self._stopping.set()
        self._news.set()

    def stop(self) -> None:
        """Stop; returns when the thread has ended."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join()


def scrub_gauges(kind: ScrubKind, oldest_ns: int, period_s: float) -> tuple[Gauge, Gauge]:
    """Return the gauges that say since when everything was checked, and how often that is to be done.

    Args:
        kind: The kind of check.
        oldest_ns: Since when everything was checked, nanoseconds since 1970.
        period_s: Seconds between two checks.
    """
    labels = (("kind", kind.value),)
    return (
        (MetricKey("scrub_oldest_timestamp_ns", labels=labels), oldest_ns),
        (MetricKey("scrub_period_ns", labels=labels), period_s * 1e9),
    )


def check_store(
    store: StoreReader,
    progress: Callable[[int, int], None],
    check: Callable[[int, int], CheckedPiece] | None = None,
) -> ScrubReport:
    """Check every checksum of a store, in the calling thread, as fast as possible.

    Args:
        store: The store, live or read-only.
        progress: Called with the bytes of entries that were checked, and of all.
        check: Checks a piece of a ledger from an entry on; None only checks.
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


def decoded_notes(
    notes: Mapping[str, Any],
) -> tuple[dict[ScrubKind, ScrubSchedule], dict[tuple[int, int], tuple[DamagedEntries, DamagedEntries]]]:
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


def text_of(damaged: Iterable[DamagedEntries]) -> str:
    """Return how a health has damaged entries: how many records, and of which ledgers."""
    found = list(damaged)
    ledgers = sorted({each.ledger_id for each in found})
    more = " ..." if len(ledgers) > LEDGERS_NAMED else ""
    names = ", ".join(map(str, ledgers[:LEDGERS_NAMED])) + more
    records, of = ("record", "ledger") if len(found) == 1 else ("records", "ledgers")
    return f"{len(found)} damaged {records} in {of if len(ledgers) == 1 else 'ledgers'} {names}"
