"""The auditor: a pure machine that keeps the marks of all repairs that a cluster needs.

Theory of operation
-------------------

One process of a cluster is elected auditor. It decides only; workers copy, and each copy counts by a compare-and-set of
its ledger's metadata. So two auditors at a time do no harm, and neither does an auditor that was suspended.

    FOLLOWING --Elected--> READING --the last page of LedgersRead--> LEADING --LostElection--> FOLLOWING

After its election the machine asks for everything. Until it has read all ledgers, marks, bookies and settings, it
changes no mark. Then each event brings a change, and each step ends with a comparison: the marks that ``plan`` wants
against the existing marks. Missing marks are published, at most ``WINDOW`` queued ones, the most urgent first, and more
of them once half are done. A mark that the auditor published and no longer wants is withdrawn. The driver
reports every attempt by a ``MarksChanged`` with the present values, so a refused effect corrects the machine.

Time. ``now_ns`` is nanoseconds since 1970 at the election, and then advances by a monotonic clock. Absences are saved
as durations, because clocks of machines differ; the next auditor continues to count them unless the bookie has started
again. The time during which the metadata store could not be reached is not counted, because bookies may have been back.

A step after the end of the lease only reports, without other effects, because another auditor may have been elected.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from pybk.flags import StorageHint
from pybk.healing.cluster_map import ClusterMap
from pybk.healing.plan import (
    DERIVED,
    NEVER_NS,
    WINDOW,
    Assessment,
    Rank,
    Task,
    assess,
    count,
    is_misplaced,
    rank_of,
    select,
    signature_of,
    suspects,
)
from pybk.healing.repair_report import LISTED_MAX, Report, ReportedBookie, ReportedDrain
from pybk.healing.situation import (
    FLAPPING_NS,
    SECOND_NS,
    BookieFacts,
    Hold,
    HoldReason,
    MarkKey,
    Situation,
    Standing,
    holds_of,
    standing_of,
    standings_of,
    targets_of,
)
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.values import from_base64, to_base64

REREAD_NS: Final = 3600 * SECOND_NS
"""The time after which everything is read again, in case the feed has missed changes."""

SAVE_NS: Final = 10 * SECOND_NS
"""The interval at which durations are saved while bookies are absent; a new or ended absence is saved at once."""

ASK_AGAIN_NS: Final = 60 * SECOND_NS
"""The time that an effect may take before the machine asks for it again."""

SUSPICION_NS: Final = 600 * SECOND_NS
"""The least time between two checks that denied an entry before the bookie is marked."""

RATE_NS: Final = 600 * SECOND_NS
"""The time over which the rate of repairs is averaged."""

JUDGED_MAX: Final = 1000
"""The number of stuck marks for which the inputs of the last judgement are saved."""

_BATCH: Final = 200
"""Above so many changes the order of the tasks is sorted again."""


class Check(StrEnum):
    """The result of a check of one replica. A time-out is ``UNKNOWN``, and never evidence that an entry is missing."""

    SOUND = "sound"
    MISSING = "missing"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SavedAbsence:
    """The absence of a bookie at the time when it was saved.

    Attributes:
        boots: The number of its last start; another number means that it has returned since.
        absent_ns: The time for which it is absent; None if it was registered.
        absences_ns: How long ago its recent absences began.
    """

    boots: int
    absent_ns: int | None
    absences_ns: tuple[int, ...] = ()


class Judged(NamedTuple):
    """A stuck mark, by its token, and the signature of the facts by which it was judged."""

    token: bytes
    signature: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state that an auditor leaves to the next one.

    Attributes:
        absences: How long bookies have been absent.
        since_read_ns: How long ago all ledgers were read.
        judged: The signatures by which stuck marks were judged; without them workers would try these again after each
            election.
    """

    absences: Mapping[Bookie, SavedAbsence] = field(default_factory=dict)
    since_read_ns: int = 0
    judged: Mapping[MarkKey, Judged] = field(default_factory=dict)


def encode_state(state: SavedState) -> dict[str, Any]:
    """Return the encoded state, which the next auditor reads."""
    return {
        "absences": [
            {
                **_encode_bookie(bookie),
                "boots": saved.boots,
                "absent_ns": saved.absent_ns,
                "absences_ns": list(saved.absences_ns),
            }
            for bookie, saved in state.absences.items()
        ],
        "since_read_ns": state.since_read_ns,
        "judged": [
            {
                "ledger_id": key.ledger_id,
                **_encode_bookie(key.bookie),
                "token": to_base64(judged.token),
                "signature": judged.signature,
            }
            for key, judged in state.judged.items()
        ],
    }


def decode_state(values: dict[str, Any] | None) -> SavedState:
    """Return the state that the previous auditor left; raises ValueError, KeyError or TypeError if it is damaged."""
    if values is None:
        return SavedState()
    absences = {
        _decode_bookie(each): SavedAbsence(
            int(each["boots"]),
            None if each["absent_ns"] is None else int(each["absent_ns"]),
            tuple(int(absence) for absence in each["absences_ns"]),
        )
        for each in values["absences"]
    }
    judged = {
        MarkKey(int(each["ledger_id"]), _decode_bookie(each)): Judged(
            from_base64(each["token"]), int(each["signature"])
        )
        for each in values["judged"]
    }
    return SavedState(absences, int(values["since_read_ns"]), judged)


def _encode_bookie(bookie: Bookie) -> dict[str, str]:
    return {"bookie_id": bookie.bookie_id, "instance": to_base64(bookie.instance)}


def _decode_bookie(values: dict[str, Any]) -> Bookie:
    return Bookie(str(values["bookie_id"]), from_base64(values["instance"]))


# ---- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Elected:
    """This process was elected.

    Attributes:
        saved: The state that the previous auditor has left.
        until_ns: The earliest end of the lease.
        session_ns: The time when the session with the metadata store began.
    """

    saved: SavedState
    until_ns: int
    session_ns: int


@dataclass(frozen=True, slots=True)
class LeaseExtended:
    """The lease of the election was extended; it lasts at least until ``until_ns``."""

    until_ns: int


@dataclass(frozen=True, slots=True)
class LostElection:
    """Another process may be elected."""


@dataclass(frozen=True, slots=True)
class LedgersRead:
    """A page of all ledgers' metadata was read, in answer to ``ReadEverything``; pages ascend.

    Attributes:
        reading: The number of the reading, from ``ReadEverything``.
        after: The ledger before the page; -1 for the first page.
        through: The last ledger of the page; None for the last page.
        ledgers: Metadata and version of each ledger, except those in the next two.
        unknown: Ledgers that could not be read.
        same: Ledgers that have the version that the map has.
    """

    reading: int
    after: int
    through: int | None
    ledgers: Mapping[int, tuple[LedgerMetadata, int]]
    unknown: frozenset[int] = frozenset()
    same: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LedgersChanged:
    """Ledgers changed: metadata and version of each; None for one that was deleted.

    ``unknown`` are ledgers that changed and could not be read; they stay as they are, and are read again.
    """

    ledgers: Mapping[int, tuple[LedgerMetadata, int] | None]
    unknown: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ChangesMissed:
    """The feed may have missed changes."""


@dataclass(frozen=True, slots=True)
class BookiesRead:
    """All cookies and registrations were read; an incomplete reading does not become an event."""

    bookies: tuple[BookieFacts, ...]


@dataclass(frozen=True, slots=True)
class MarksRead:
    """All marks were read, before the first page of ``LedgersRead``."""

    marks: tuple[UnderReplicatedLedger, ...]


@dataclass(frozen=True, slots=True)
class MarksChanged:
    """Marks changed, or effects on them were tried: the present values; None for a mark that does not exist."""

    marks: Mapping[MarkKey, UnderReplicatedLedger | None]


@dataclass(frozen=True, slots=True)
class SettingsRead:
    """The cluster's settings were read."""

    settings: ClusterSettings


@dataclass(frozen=True, slots=True)
class StoreLost:
    """The metadata store cannot be reached, or the session has ended."""


@dataclass(frozen=True, slots=True)
class StoreBack:
    """A session with the metadata store began."""


@dataclass(frozen=True, slots=True)
class WritersMoved:
    """Writers of open ledgers gave a sign of life: they have a session with a bookie."""

    ledgers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReplicaChecked:
    """Entries of a ledger were read from one bookie.

    Attributes:
        ledger_id: The ledger.
        bookie: The bookie.
        checked_ns: The time of the check by a clock that is never set; only compared with the times of other checks.
        result: Its result.
        first_entry_id: The first entry that is missing or damaged.
    """

    ledger_id: int
    bookie: Bookie
    checked_ns: int
    result: Check
    first_entry_id: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; every 10 s."""


Event = (
    Elected
    | LeaseExtended
    | LostElection
    | LedgersRead
    | LedgersChanged
    | ChangesMissed
    | BookiesRead
    | MarksRead
    | MarksChanged
    | SettingsRead
    | StoreLost
    | StoreBack
    | WritersMoved
    | ReplicaChecked
    | Tick
)

# ---- effects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadEverything:
    """Read settings, bookies and marks, and after them the metadata of all ledgers in pages.

    Attributes:
        reading: The number of the reading; pages of earlier ones are ignored.
        spread: Whether the reading may be slow, because nothing is known to be missing.
    """

    reading: int
    spread: bool = False


@dataclass(frozen=True, slots=True)
class ReadLedgers:
    """Read the metadata of some ledgers again."""

    ledgers: frozenset[int]


@dataclass(frozen=True, slots=True)
class PublishMark:
    """Add a cause to the mark of a ledger and bookie, which is created if it does not exist.

    Attributes:
        key: The ledger and bookie.
        reason: The cause.
        first_entry_id: The first entry that the bookie misses.
        since_ns: The time since which the cause holds.
        size_bytes: The bytes to copy, about.
        state: The state of a new mark; no worker tries one in a terminal state.
    """

    key: MarkKey
    reason: RepairReason
    first_entry_id: int
    since_ns: int
    size_bytes: int
    state: RepairState


@dataclass(frozen=True, slots=True)
class WithdrawMark:
    """Remove derived causes of a mark, and the mark with its last cause."""

    key: MarkKey
    reasons: frozenset[RepairReason]


@dataclass(frozen=True, slots=True)
class ChangeMark:
    """Give a mark another state and reset its tries, if it is still as it was read."""

    mark: UnderReplicatedLedger
    state: RepairState


@dataclass(frozen=True, slots=True)
class DropMark:
    """Remove the mark of a ledger that was deleted, if it is still as it was read."""

    mark: UnderReplicatedLedger


@dataclass(frozen=True, slots=True)
class SaveState:
    """Store the state that the next auditor needs."""

    state: SavedState


Effect = ReadEverything | ReadLedgers | PublishMark | WithdrawMark | ChangeMark | DropMark | SaveState | Report

# ---- the machine ---------------------------------------------------------------------------------------------------


class _Phase(StrEnum):
    FOLLOWING = "following"
    READING = "reading"
    LEADING = "leading"


class _Tasks:
    """The tasks of all ledgers that are not whole, in order; changed by ledger."""

    def __init__(self) -> None:
        self.assessments: Final[dict[int, Assessment]] = {}
        self.queued: Final[dict[MarkKey, Task]] = {}
        self.terminal: Final[dict[MarkKey, Task]] = {}
        self.needed: Final[Counter[StorageHint]] = Counter()
        """The bytes that queued tasks copy, by tier."""
        self._order: list[Rank] = []

    def put(self, found: Mapping[int, Assessment | None]) -> None:
        """Replace the assessments of some ledgers."""
        batch = len(found) > _BATCH
        for ledger_id, assessment in found.items():
            old = self.assessments.get(ledger_id)
            if old == assessment:
                continue
            if old is not None:
                self._drop(old, batch=batch)
                del self.assessments[ledger_id]
            if assessment is not None:
                self.assessments[ledger_id] = assessment
                self._add(assessment, batch=batch)
        if batch:
            self._order = sorted(map(rank_of, self.queued.values()))

    def has(self, key: MarkKey) -> bool:
        """Return whether a bookie of a ledger has a task."""
        return key in self.queued or key in self.terminal

    def __iter__(self) -> Iterator[Task]:
        """Yield the queued tasks in order."""
        for *_, ledger_id, bookie in self._order:
            yield self.queued[MarkKey(ledger_id, bookie)]

    def _add(self, assessment: Assessment, *, batch: bool) -> None:
        for task in assessment.tasks:
            if task.state is RepairState.QUEUED:
                self.queued[task.key] = task
                self.needed[task.tier] += task.size_bytes
                if not batch:
                    insort(self._order, rank_of(task))
            else:
                self.terminal[task.key] = task

    def _drop(self, assessment: Assessment, *, batch: bool) -> None:
        for task in assessment.tasks:
            if task.state is RepairState.QUEUED:
                del self.queued[task.key]
                self.needed[task.tier] -= task.size_bytes
                if not batch:
                    del self._order[bisect_left(self._order, rank_of(task))]
            else:
                del self.terminal[task.key]


class _Progress:
    """The amount of repairs that were done, and their rate."""

    def __init__(self) -> None:
        self.done_bytes = 0
        self.done_ledgers = 0
        self._samples: deque[tuple[int, int]] = deque()

    def rate(self, now_ns: int) -> float:
        """Return the bytes per second over the last ten minutes."""
        self._samples.append((now_ns, self.done_bytes))
        while now_ns - self._samples[0][0] > RATE_NS:
            self._samples.popleft()
        began, before = self._samples[0]
        return (self.done_bytes - before) * SECOND_NS / (now_ns - began) if now_ns > began else 0.0


class AuditorMachine:
    """Decides which repairs are made. ``step`` handles one event; see the theory of operation above.

    Attributes:
        map: The ledgers.
        situation: All other knowledge.
        wanted: The tasks that should be marked now, by the keys of their marks.
        holds: The reasons to hold repairs.
        misplaced: The ledgers that span too few zones.

    Args:
        window: The most queued marks that are published.

    Threads: one at a time.
    """

    def __init__(self, *, window: int = WINDOW) -> None:
        self._window = window
        self._reading = 0
        self._reset()

    def _reset(self) -> None:
        """Forget everything; also the state of the store's session is read again."""
        self.map = ClusterMap()
        self.situation = Situation()
        self.wanted: Mapping[MarkKey, Task] = {}
        self.holds: tuple[Hold, ...] = ()
        self._phase = _Phase.FOLLOWING
        self._until_ns = 0
        self._saved = SavedState()
        self._saved_at_ns = 0
        self._read_ns = 0
        self._page_ns = 0
        """The time when a reading was asked for, or a page of it came."""
        self._known: set[str] = set()
        """The parts that were read since the election: settings, bookies, marks."""
        self._standings: list[Standing] = []
        self.misplaced: set[int] = set()
        self._placed_by: tuple[int, dict[str, str]] | None = None
        """The zones that are asked for, and each bookie's zone, by which ``misplaced`` was found."""
        self._tasks = _Tasks()
        self._open_short: dict[int, int] = {}
        """Open ledgers that are short, and when each is to be assessed again: its writer may be gone then."""
        self._asked: dict[MarkKey, tuple[Effect, int]] = {}
        self._suspicions: dict[tuple[MarkKey, Check], tuple[int, int]] = {}
        self._early_marks: frozenset[MarkKey] = frozenset()
        """The marks that existed before the ledgers were read."""
        self._unread: set[int] = set()
        """The ledgers that could not be read."""
        self._judged: dict[MarkKey, Judged] = {}
        self._lost_store_ns: int | None = None
        self._progress = _Progress()
        self._save_now = False
        self._reported: frozenset[HoldReason] | None = None
        """The holds that were reported last; None before the first report after all was read."""

    @property
    def leading(self) -> bool:
        """True if everything was read after an election; marks are published only then."""
        return self._phase is _Phase.LEADING

    @property
    def open_short(self) -> list[int]:
        """The open ledgers that are not whole, ascending; whether their writers live matters for them."""
        return sorted(self._open_short)

    @property
    def frozen(self) -> bool:
        """True if it is unknown which bookies are registered; marks stay as they are then."""
        return any(each.reason.blind for each in self.holds)

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform, in order.

        Args:
            event: The event.
            now_ns: The time.
        """
        if isinstance(event, Elected):
            return self._elected(event, now_ns)
        if self._phase is _Phase.FOLLOWING:
            return []
        if isinstance(event, LostElection):
            self._reset()
            return []
        if isinstance(event, LeaseExtended):  # the event that follows has the marks compared
            self._until_ns = max(self._until_ns, event.until_ns)
            return []
        effects: list[Effect] = []
        dirty = self._take(event, now_ns, effects)
        self._refresh(dirty, now_ns)
        if now_ns >= self._until_ns:
            return [each for each in effects if isinstance(each, ReadEverything | ReadLedgers)]
        if self._phase is _Phase.LEADING and not self.frozen:
            effects += self._synchronize(now_ns)
        due = bool(self.situation.absent_since_ns) and now_ns - self._saved_at_ns >= SAVE_NS
        if self._phase is _Phase.LEADING and (self._save_now or due):
            effects.append(self._save(now_ns))
        if isinstance(event, Tick) or self._holds_changed():
            effects.append(self._report(now_ns))
        return effects

    def _holds_changed(self) -> bool:
        """Return whether repairs are held for other reasons than was reported last, as people wait for that."""
        holds = frozenset(each.reason for each in self.holds)
        changed = self._phase is _Phase.LEADING and holds != self._reported
        if changed:
            self._reported = holds
        return changed

    # ---- events ----------------------------------------------------------------------------------------------------

    def _elected(self, event: Elected, now_ns: int) -> list[Effect]:
        self._reset()
        self._phase = _Phase.READING
        self._until_ns = event.until_ns
        self._saved = event.saved
        self._saved_at_ns = now_ns
        self.situation.store_since_ns = event.session_ns
        return [self._read_everything(now_ns)]

    def _read_everything(self, now_ns: int, *, spread: bool = False) -> ReadEverything:
        self._page_ns = now_ns
        self._reading += 1
        self._unread = set()
        self.map.begin_read()
        return ReadEverything(self._reading, spread)

    def _take(self, event: Event, now_ns: int, effects: list[Effect]) -> set[int]:
        """Take over the facts of an event; return the ledgers that have to be assessed again."""
        if isinstance(event, LedgersRead):
            return self._ledgers_read(event, now_ns, effects)
        if isinstance(event, LedgersChanged):
            if event.unknown:
                effects.append(ReadLedgers(event.unknown))
            return self._ledgers_changed(event, now_ns)
        if isinstance(event, BookiesRead):
            return self._bookies_read(event, now_ns)
        if isinstance(event, MarksRead):
            return self._marks_read(event)
        if isinstance(event, MarksChanged):
            return self._marks_changed(event.marks)
        if isinstance(event, SettingsRead):
            return self._settings_read(event.settings, now_ns)
        if isinstance(event, StoreLost):
            self._store_lost(now_ns)
        elif isinstance(event, StoreBack):
            self._store_back(now_ns)
        elif isinstance(event, WritersMoved):
            return self._writers_moved(event.ledgers, now_ns)
        elif isinstance(event, ReplicaChecked):
            effects += self._replica_checked(event, now_ns)
        else:
            effects += self._time_passed(event, now_ns)
        return set()

    def _time_passed(self, event: Event, now_ns: int) -> list[Effect]:
        """Read everything again if changes were missed, or if the last page of a reading came long ago."""
        if isinstance(event, ChangesMissed):
            return [self._read_everything(now_ns)]
        if now_ns - self._page_ns >= REREAD_NS:
            return [self._read_everything(now_ns, spread=True)]
        return []

    def _ledgers_read(self, event: LedgersRead, now_ns: int, effects: list[Effect]) -> set[int]:
        if event.reading != self._reading:
            return set()
        self._page_ns = now_ns
        kept = event.unknown | event.same
        changed = self.map.apply_page(event.after, event.through, event.ledgers, unknown=kept)
        self._note_moves(changed, now_ns)
        if event.unknown:
            self._unread |= event.unknown
            effects.append(ReadLedgers(event.unknown))
        if event.through is None:
            self._read_ns = now_ns
            self._save_now = True
            self._known.add("ledgers")
            effects += [DropMark(mark) for mark in self._orphans()]
            self._forget_suspicions()
        return set(changed)

    def _forget_suspicions(self) -> None:
        """Forget suspicions about bookies that left the ensembles of their ledgers: no later check would clear them."""
        held = {bookie: self.map.ledgers_of(number) for number, bookie in enumerate(self.map.bookies)}
        self._suspicions = {
            (key, check): found
            for (key, check), found in self._suspicions.items()
            if key.ledger_id in held.get(key.bookie, ())
        }

    def _orphans(self) -> list[UnderReplicatedLedger]:
        """Return the marks of ledgers that were deleted: they were there before all ledgers were read."""
        keys = [key for key in self._early_marks if key.ledger_id not in self.map and key.ledger_id not in self._unread]
        return [mark for key in keys if (mark := self.situation.marks.get(key)) is not None]

    def _ledgers_changed(self, event: LedgersChanged, now_ns: int) -> set[int]:
        changed = []
        for ledger_id, found in event.ledgers.items():
            metadata, version = found if found is not None else (None, 0)
            if self.map.apply(ledger_id, metadata, version):
                changed.append(ledger_id)
        self._note_moves(changed, now_ns)
        before = {each: self._tasks.assessments.get(each) for each in changed}
        self._note_done(before, now_ns)
        return set(changed)

    def _note_done(self, before: Mapping[int, Assessment | None], now_ns: int) -> None:
        """Count the tasks that a change of their ledger has ended."""
        standings = standings_of(self.map, self.situation, now_ns)
        for ledger_id, old in before.items():
            if old is None or ledger_id not in self.map:
                continue
            new = assess(self.map, self.situation, standings, now_ns, ledger_id)
            left = {task.bookie for task in new.tasks} if new is not None else set()
            for task in old.tasks:
                if task.state is RepairState.QUEUED and task.bookie not in left:
                    self._progress.done_bytes += task.size_bytes
                    self._progress.done_ledgers += 1

    def _note_moves(self, changed: Iterable[int], now_ns: int) -> None:
        """Take changed metadata of open ledgers for signs of their writers' lives."""
        for ledger_id in changed:
            if ledger_id in self.map.open_ledgers:
                self.situation.moved_ns[ledger_id] = now_ns
            else:
                self.situation.moved_ns.pop(ledger_id, None)

    def _writers_moved(self, ledgers: frozenset[int], now_ns: int) -> set[int]:
        moved = ledgers & self.map.open_ledgers
        self.situation.moved_ns.update(dict.fromkeys(moved, now_ns))
        return {each for each in moved if each in self._open_short}

    def _bookies_read(self, event: BookiesRead, now_ns: int) -> set[int]:
        """Take over the facts about all bookies, and since when each is absent."""
        first = "bookies" not in self._known
        self._known.add("bookies")
        before = self.situation.bookies
        self.situation.bookies = {facts.bookie.bookie_id: facts for facts in event.bookies}
        absent = self.situation.absent_since_ns
        for facts in event.bookies:
            if first:
                self._continue_absence(facts, now_ns)
                continue
            old = before.get(facts.bookie.bookie_id)
            restarted = old is not None and old.bookie == facts.bookie and old.boots != facts.boots
            if facts.registered:
                if facts.bookie in absent:
                    del absent[facts.bookie]
                    self._save_now = True
                elif restarted:
                    self._count_absence(facts.bookie, now_ns)
            elif facts.bookie not in absent:
                if old is not None:  # a new bookie was not there before
                    self._count_absence(facts.bookie, now_ns)
                self._begin_absence(facts.bookie, now_ns)
            elif restarted:  # it is about to register; the absence is the same one for flapping
                self._begin_absence(facts.bookie, now_ns)
        moved = {name: each.location for name, each in before.items()} != {
            name: each.location for name, each in self.situation.bookies.items()
        }
        return set(self.map) if moved and self.situation.moves_misplaced else set()

    def _begin_absence(self, bookie: Bookie, now_ns: int) -> None:
        """Note that a bookie is absent from now on."""
        self.situation.absent_since_ns[bookie] = now_ns
        self._save_now = True

    def _count_absence(self, bookie: Bookie, now_ns: int) -> None:
        """Note that a bookie became absent, if only for a moment, for the judgement whether it flaps."""
        recent = [each for each in self.situation.absences.get(bookie, ()) if now_ns - each < FLAPPING_NS]
        self.situation.absences[bookie] = (*recent, now_ns)
        self._save_now = True

    def _continue_absence(self, facts: BookieFacts, now_ns: int) -> None:
        """Continue to count an absence that another auditor has saved."""
        saved = self._saved.absences.get(facts.bookie)
        if saved is not None:
            self.situation.absences[facts.bookie] = tuple(now_ns - ago for ago in saved.absences_ns)
        if facts.registered:
            return
        if saved is None or saved.absent_ns is None or saved.boots != facts.boots:
            self._begin_absence(facts.bookie, now_ns)
        else:
            self.situation.absent_since_ns[facts.bookie] = now_ns - saved.absent_ns

    def _marks_read(self, event: MarksRead) -> set[int]:
        self._known.add("marks")
        found = {MarkKey(mark.ledger_id, mark.bookie): mark for mark in event.marks}
        self._early_marks = frozenset(found)
        gone = [key for key, _ in self.situation.marks.items() if key not in found]
        return self._marks_changed({**dict.fromkeys(gone), **found})

    def _marks_changed(self, marks: Mapping[MarkKey, UnderReplicatedLedger | None]) -> set[int]:
        for key, mark in marks.items():
            self.situation.marks.put(key, mark)
            self._asked.pop(key, None)
        return {key.ledger_id for key in marks}

    def _settings_read(self, settings: ClusterSettings, now_ns: int) -> set[int]:
        self._known.add("settings")
        if settings == self.situation.settings:
            return set()
        self.situation.settings = settings
        return {*self._suspects(now_ns), *self._tasks.assessments}

    def _store_lost(self, now_ns: int) -> None:
        if self.situation.store_since_ns is not None:
            self.situation.store_since_ns = None
            self._lost_store_ns = now_ns

    def _store_back(self, now_ns: int) -> None:
        """Begin a session: the time without one does not count, because absent bookies may have been back."""
        self._store_lost(now_ns)
        assert self._lost_store_ns is not None
        unknown = now_ns - self._lost_store_ns
        self.situation.store_since_ns = now_ns
        absent = self.situation.absent_since_ns
        for bookie, since in absent.items():
            absent[bookie] = since + unknown

    def _replica_checked(self, event: ReplicaChecked, now_ns: int) -> list[Effect]:
        """Mark a bookie once two checks far enough apart have found the same; unknown results prove nothing.

        The times of the checks count, and not those at which their results arrive: the second check is the last one in
        this period, so a mark that is not made for it is made a period later.
        """
        if event.result is Check.UNKNOWN:
            return []
        key = MarkKey(event.ledger_id, event.bookie)
        if event.result is Check.SOUND:
            for each in (Check.MISSING, Check.DAMAGED):
                self._suspicions.pop((key, each), None)
            return []
        suspicion = (key, event.result)
        since, first = self._suspicions.setdefault(suspicion, (event.checked_ns, event.first_entry_id))
        first = min(first, event.first_entry_id)
        if event.checked_ns - since < SUSPICION_NS:
            self._suspicions[suspicion] = (since, first)
            return []
        del self._suspicions[suspicion]
        reason = RepairReason.MISSING if event.result is Check.MISSING else RepairReason.DAMAGED
        return [PublishMark(key, reason, first, now_ns, 0, RepairState.QUEUED)]

    # ---- assessments -----------------------------------------------------------------------------------------------

    def _suspects(self, now_ns: int) -> Iterable[int]:
        return suspects(self.map, self.situation, standings_of(self.map, self.situation, now_ns))

    def _refresh(self, dirty: set[int], now_ns: int) -> None:
        """Assess ledgers again: those of ``dirty``, and those of bookies whose standings have changed."""
        self._note_strangers(now_ns)
        if self._phase is _Phase.READING and self._known >= {"settings", "bookies", "marks", "ledgers"}:
            self._phase = _Phase.LEADING
            dirty.update(self._suspects(now_ns))
        if self._phase is not _Phase.LEADING:
            return
        standings = standings_of(self.map, self.situation, now_ns)
        for number, standing in enumerate(standings):
            if number >= len(self._standings) or standing[1:] != self._standings[number][1:]:
                dirty |= self.map.ledgers_of(number)
        self._standings = standings
        self._judge_places(dirty)
        dirty.update(ledger_id for ledger_id, at_ns in self._open_short.items() if now_ns >= at_ns)
        found = {each: assess(self.map, self.situation, standings, now_ns, each) for each in dirty}
        self._tasks.put(found)
        for ledger_id, each in found.items():
            if each is not None and ledger_id in self.map.open_ledgers:
                due_ns = self.situation.moved_ns.get(ledger_id, now_ns) + self.situation.open_grace_ns
                self._open_short[ledger_id] = due_ns if due_ns > now_ns else NEVER_NS
            else:
                self._open_short.pop(ledger_id, None)
        if not self._tasks.queued:
            self._progress = _Progress()
        self._park(now_ns)
        self.holds = holds_of(self.map, self.situation, now_ns, self._tasks.needed)
        self.wanted = select(
            self.map,
            self.situation,
            self._tasks,
            self._tasks.queued,
            self._tasks.terminal.values(),
            targets_of(self.situation, now_ns),
            held=bool(self.holds),
            now_ns=now_ns,
            window=self._window,
        )

    def _judge_places(self, dirty: set[int]) -> None:
        """Note which ledgers span too few zones: of those that changed, or of all if the zones have changed."""
        wanted = self.situation.settings.placement.min_zones
        by = (wanted, {name: self.situation.zone_of(name) for name in self.situation.bookies})
        judged: Iterable[int] = dirty
        if by != self._placed_by:
            self._placed_by, judged = by, self.map
            self.misplaced.clear()
        if wanted > 1:
            self.misplaced.difference_update(judged)
            self.misplaced.update(each for each in judged if is_misplaced(self.map, self.situation, each))

    def _note_strangers(self, now_ns: int) -> None:
        """Note since when bookies are absent that ledgers name and that are not members; forget those named no more."""
        if "bookies" not in self._known:
            return
        members = {facts.bookie for facts in self.situation.bookies.values()}
        named = {bookie for number, bookie in enumerate(self.map.bookies) if self.map.ledgers_of(number)}
        absent = self.situation.absent_since_ns
        for bookie in named - members:
            absent.setdefault(bookie, now_ns)
        for times in (absent, self.situation.absences):
            for bookie in times.keys() - members - named:
                del times[bookie]

    def _park(self, now_ns: int) -> None:
        """Note which marks are left stuck, because nothing has changed since a worker gave them up.

        Trying them again would fail again. The notes of the previous auditor show what has changed before the election.
        """
        judged, parked = {}, set()
        for key, mark in self.situation.marks.items():
            if mark.state is not RepairState.STUCK:
                continue
            signature = signature_of(self.map, self._standings, now_ns, key.ledger_id)
            before = self._judged.get(key) or self._saved.judged.get(key)
            if before is None or before.token != mark.token:
                before = Judged(mark.token, signature)
            judged[key] = before
            if before.signature == signature:
                parked.add(key)
        self._judged = judged
        self.situation.parked = frozenset(parked)

    # ---- marks -----------------------------------------------------------------------------------------------------

    def _synchronize(self, now_ns: int) -> list[Effect]:
        """Return effects that make the marks those that are wanted."""
        effects: list[PublishMark | WithdrawMark | ChangeMark] = []
        for key, mark in self.situation.marks.items():
            if key in self.wanted:
                continue
            reasons = frozenset(reason for reason in mark.causes_by_reason() if reason in DERIVED)
            if reasons:
                effects.append(WithdrawMark(key, reasons))
            elif mark.state is not RepairState.QUEUED and not self._tasks.has(key) and key not in self.situation.parked:
                effects.append(ChangeMark(mark, RepairState.QUEUED))  # a worker finds nothing to do, and removes it
        patient = self._patient()
        for key, task in self.wanted.items():
            effect = self._wish(key, task)
            if effect is not None and not (isinstance(effect, PublishMark) and key in patient):
                effects.append(effect)
        return [each for each in effects if self._ask(each, now_ns)]

    def _patient(self) -> set[MarkKey]:
        """Return the tasks that get no mark yet, because workers have enough marks that are as urgent.

        Marks are added when half of the window is empty: every worker lists all marks after each addition.
        """
        marks, new, marked = self.situation.marks, [], []
        for key, task in self.wanted.items():
            if task.state is RepairState.QUEUED:
                mark = marks.get(key)
                if mark is None:
                    new.append(task)
                elif mark.state is RepairState.QUEUED:
                    marked.append(task)
        if len(marked) <= self._window // 2:
            return set()
        least = max((task.copies, not task.urgent) for task in marked)
        return {task.key for task in new if (task.copies, not task.urgent) >= least}

    def _wish(self, key: MarkKey, task: Task) -> PublishMark | WithdrawMark | ChangeMark | None:
        """Return the effect that brings a mark nearer to the task; None if none is needed."""
        mark = self.situation.marks.get(key)
        causes = {} if mark is None else mark.causes_by_reason()
        derived = task.derived
        if derived is not None and causes.get(derived, 1 << 62) > task.first_entry_id:
            return PublishMark(key, derived, task.first_entry_id, task.since_ns, task.size_bytes, task.state)
        if mark is None:
            return None
        old = frozenset(reason for reason in causes if reason in DERIVED and reason is not derived)
        if old:
            return WithdrawMark(key, old)
        if mark.state is task.state or key in self.situation.parked:
            return None
        return ChangeMark(mark, task.state)

    def _ask(self, effect: PublishMark | WithdrawMark | ChangeMark, now_ns: int) -> bool:
        """Return whether an effect is to be performed: not while the answer to the same one is awaited."""
        key = MarkKey(effect.mark.ledger_id, effect.mark.bookie) if isinstance(effect, ChangeMark) else effect.key
        asked = self._asked.get(key)
        if asked is not None and asked[0] == effect and now_ns - asked[1] < ASK_AGAIN_NS:
            return False
        self._asked[key] = (effect, now_ns)
        return True

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _save(self, now_ns: int) -> SaveState:
        self._save_now = False
        self._saved_at_ns = now_ns
        absent = self.situation.absent_since_ns
        saved = {}
        for facts in self.situation.bookies.values():
            since = absent.get(facts.bookie)
            began = tuple(now_ns - each for each in self.situation.absences.get(facts.bookie, ()))
            if since is not None or began:
                saved[facts.bookie] = SavedAbsence(facts.boots, None if since is None else now_ns - since, began)
        judged = dict(list(self._judged.items())[:JUDGED_MAX])
        return SaveState(SavedState(saved, now_ns - self._read_ns, judged))

    def _report(self, now_ns: int) -> Report:
        counts = count(self._tasks.assessments.values(), len(self.misplaced))
        progress = self._progress
        rate = progress.rate(now_ns)
        by_state: dict[RepairState, set[int]] = {state: set() for state in RepairState}
        for key, task in self.wanted.items():
            by_state[task.state].add(key.ledger_id)
        for key, mark in self.situation.marks.items():
            # The task of a mark that is left as it is has its own state, for when it is tried again.
            if mark.state in (RepairState.STUCK, RepairState.NO_TARGET):
                by_state[mark.state].add(key.ledger_id)
        listed = {state: tuple(sorted(each)[:LISTED_MAX]) for state, each in by_state.items()}
        paused = self.situation.settings.repair.paused_until_ns
        return Report(
            phase=self._phase.value,
            holds=self.holds,
            paused_until_ns=paused if now_ns < paused else 0,
            frozen=self.frozen,
            counts=counts,
            planned_bytes=counts.bytes + progress.done_bytes,
            done_bytes=progress.done_bytes,
            done_ledgers=progress.done_ledgers,
            rate=rate,
            eta_s=counts.bytes / rate if rate else None,
            lost=listed[RepairState.LOST],
            waiting=listed[RepairState.WAITING_FOR_OWNER],
            no_target=listed[RepairState.NO_TARGET],
            stuck=listed[RepairState.STUCK],
            bookies=tuple(self._reported_bookies(now_ns)),
            drains=tuple(self._reported_drains()),
            read_ns=self._read_ns,
            members=Counter(
                standing_of(self.situation, facts.bookie, now_ns).status.value
                for facts in self.situation.bookies.values()
            ),
            ensembles=self.map.open_ensembles,
            ledgers=self.map.counts(),
        )

    def _reported_bookies(self, now_ns: int) -> Iterator[ReportedBookie]:
        """Yield the bookies that are not live, but for those that were drained and ended, as people meant them to."""
        for facts in sorted(self.situation.bookies.values(), key=lambda each: each.bookie):
            if facts.state is BookieState.DRAINED and not facts.registered:
                continue
            standing = standing_of(self.situation, facts.bookie, now_ns)
            if standing.status != "live":
                since = self.situation.absent_since_ns.get(facts.bookie, now_ns)
                yield ReportedBookie(facts.bookie, standing.status.value, now_ns - since)

    def _reported_drains(self) -> Iterator[ReportedDrain]:
        """Yield the drains that have not ended."""
        for facts in sorted(self.situation.bookies.values(), key=lambda each: each.bookie):
            number = self.map.number_of(facts.bookie)
            if facts.state is BookieState.DRAINING and number is not None:
                writers = tuple(self.map.written_on(number)[:LISTED_MAX])
                left = len(self.map.ledgers_of(number))
                if left:
                    yield ReportedDrain(facts.bookie, facts.state_since_ns, left, writers)
