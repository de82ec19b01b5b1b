"""A cluster that repairs itself, in virtual time: the auditor's machine and workers in a world of faults.

Bookies are killed, cut off, wiped, drained, filled up; zones fail; auditors are killed, and suspended for longer than
their lease; the metadata store cannot be reached; writers create, close and leave ledgers; entries are damaged. The
metadata store is a model with compare-and-set. Auditors are the real machines; what a worker does for a ledger is
decided by ``ledger_work``. A *unit* is what one bookie holds of one fragment.

Rules are checked after every event, by what the world knows and no auditor does. When the faults have stopped,
everything must come to full replication, and all marks must go.

``python -m tests.simulator.healing --seeds N [--seed S]`` runs seeds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final

from pybk.flags import StorageHint
from pybk.healing.auditor import (
    AuditorMachine,
    BookiesRead,
    ChangeMark,
    ChangesMissed,
    Check,
    DropMark,
    Effect,
    Elected,
    Event,
    LeaseExtended,
    LedgersChanged,
    LedgersRead,
    LostElection,
    MarksChanged,
    MarksRead,
    PublishMark,
    ReadEverything,
    ReadLedgers,
    ReplicaChecked,
    SavedState,
    SaveState,
    SettingsRead,
    StoreBack,
    StoreLost,
    Tick,
    WithdrawMark,
    WritersMoved,
)
from pybk.healing.cluster_map import ClusterMap
from pybk.healing.ledger_work import Fits, FragmentWork, Presence, ledger_work
from pybk.healing.plan import plan
from pybk.healing.repair_report import Report
from pybk.healing.situation import SECOND_NS, BookieFacts, MarkKey, Space
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata, LedgerState
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings, PlacementSettings, RepairSettings
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger
from pybk.replication.fragments import fragment_end
from pybk.replication.locations import Location, PlacementPolicy
from pybk.replication.placement import Candidate, choose
from tests.healing.clusters import ledger as make_ledger
from tests.sampling import some

DRAINING: Final = RepairReason.DRAINING
BEGIN_NS: Final = 10**18
LEASE_NS: Final = 5 * SECOND_NS
GRACE_NS: Final = 60 * SECOND_NS
URGENT_NS: Final = GRACE_NS // 4 - 5 * SECOND_NS
"""How soon the copies of a bookie are urgent: a quarter of the grace."""

OPEN_GRACE_NS: Final = 300 * SECOND_NS
TICK_NS: Final = 10 * SECOND_NS
FAULTS_NS: Final = 1200 * SECOND_NS
SETTLE_NS: Final = 7200 * SECOND_NS
LATE_NS: Final = 45 * SECOND_NS
"""How much later than the world an auditor and the workers may know of something, while one leads."""

BYTES_PER_SECOND: Final = 1 << 20
CHECKED_STEPS: Final = some(5, 1)
"""Of how many steps one is compared with the plan of the whole state, which takes far longer than a step."""

TRIES_MAX: Final = 8
ERRORS_MAX: Final = 2
"""Tries of a repair that has no source, until something changes."""


class BrokenRuleError(AssertionError):
    """A rule is broken."""


def check(holds: bool, rule: str) -> None:
    """Raise BrokenRuleError if a rule does not hold."""
    if not holds:
        raise BrokenRuleError(rule)


Unit = tuple[int, int]
"""A ledger, and the first entry of one of its fragments."""


@dataclass
class SimBookie:
    """A bookie: its process, its registration and its disk."""

    name: str
    location: str
    instance: int = 0
    boots: int = 1
    running: bool = True
    cut_off: bool = False
    registered: bool = True
    state: BookieState = BookieState.ACTIVE
    state_since_ns: int = 0
    until_ns: int = 0
    used: float = 0.5
    units: set[Unit] = field(default_factory=set)
    damaged: set[Unit] = field(default_factory=set)
    """Units that are not sound, which only a check finds."""
    gone_ns: int | None = None
    """Since when it is not registered, as far as an auditor can see."""
    back_ns: int = -LATE_NS
    """When it registered again last."""
    earlier_ns: int | None = None
    """Since when it was not registered before that."""
    changed_ns: int = 0
    """When it was registered, or its registration or state changed, last."""
    busy: int | None = None
    """The ledger that its worker repairs."""

    def __post_init__(self) -> None:
        """Name the instance."""
        self.bookie = self._made()

    def _made(self) -> Bookie:
        return Bookie(self.name, bytes([int(self.name[1:]), self.instance]) * 8)

    def wipe(self) -> None:
        """Begin with an empty directory, and so as another instance."""
        self.instance += 1
        self.bookie = self._made()
        self.boots = 0
        self.units, self.damaged = set(), set()
        self.state = BookieState.ACTIVE

    @property
    def serves(self) -> bool:
        """Whether clients reach it."""
        return self.running and self.registered

    def holds(self, unit: Unit) -> bool:
        """Return whether it has a sound copy."""
        return unit in self.units and unit not in self.damaged


@dataclass
class SimWriter:
    """The writer of an open ledger; it runs in the process of a bookie, which it prefers."""

    ledger_id: int
    local: str
    next_entry: int = 0
    moved_ns: int = BEGIN_NS


@dataclass
class SimAuditor:
    """A process that may be elected."""

    name: int
    machine: AuditorMachine
    running: bool = True
    asleep: bool = False
    believes: bool = False
    """It was elected and has not heard of its end."""
    inbox: list[Event] = field(default_factory=list)
    told: dict[int, tuple[LedgerMetadata, int]] = field(default_factory=dict)
    """The ledgers that its machine was sent, from which the whole plan is made again."""
    reading: int = 0
    whole: ClusterMap | None = None
    """A map of ``told``; None after it has changed."""
    steps: int = 0
    """How often its plan could have been compared."""
    watching: bool = False
    """Whether the feed reports changes to it; begins before it reads everything."""


class World:
    """Everything of one seed.

    Args:
        seed: The seed.
        faults: Whether faults happen by chance; a scenario makes its own.
        bookies: How many bookies; by chance if None.
        ledgers: How many closed ledgers; by chance if None.
        window: How many marks an auditor publishes.
    """

    def __init__(
        self,
        seed: int,
        *,
        faults: bool = True,
        bookies: int | None = None,
        ledgers: int | None = None,
        window: int = 6,
        repair: RepairSettings | None = None,
    ) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.now = BEGIN_NS
        self.window = window
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.events = 0
        self.done: Counter[str] = Counter()
        self.trace: list[str] = []
        self.faulty = faults
        self.settings = ClusterSettings(
            repair=repair or RepairSettings(grace_s=60, open_grace_s=300, recover_abandoned=self.random.random() < 0.5),
            placement=PlacementSettings(min_zones=2),  # misplaced ledgers are counted, and not moved
        )
        self.ledgers: dict[int, tuple[LedgerMetadata, int]] = {}
        self.marks: dict[MarkKey, UnderReplicatedLedger] = {}
        self.saved = SavedState()
        self.report: Report | None = None
        self.reachable = True
        self.session_ns = BEGIN_NS - 10**12
        self.tokens = 0
        self.leader: SimAuditor | None = None
        self.lease_ns = 0
        self.leading_ns = BEGIN_NS
        """Since when there is a leader whose machine leads, and the store can be reached."""
        self.locks: dict[int, tuple[str, int]] = {}
        self.writers: dict[int, SimWriter] = {}
        self.paused_ns: int | None = None
        self.changed = True
        """Whether bookies or ledgers have changed since the rules were checked."""
        self.truths: dict[str, int] = {}
        """Since when each reason to hold is true."""
        self.tries: Counter[tuple[int, Bookie, int]] = Counter()
        self.evidence: set[MarkKey] = set()
        """What checks have found to be damaged."""
        self.epoch = 0
        """Counts changes of bookies, upon which repairs may be tried again."""
        self.copied: list[tuple[int, Bookie, int]] = []
        """Ledger, target and time of each copy, in the order in which they began."""
        self.copied_bytes = 0
        self.full_line_ok = True
        count = bookies or self.random.randint(5, 9)
        self.bookies = {
            f"b{number}": SimBookie(f"b{number}", f"zone{number % 3}/rack{number // 3}") for number in range(count)
        }
        self.auditors = [SimAuditor(each, AuditorMachine(window=window)) for each in range(2)]
        self.next_ledger = 0
        for _ in range(self.random.randint(15, 40) if ledgers is None else ledgers):
            self.add_ledger(closed=True)
        if faults:
            for _ in range(4):
                self.add_ledger(closed=False)
        self.after(0, self._elect)
        for name in self.bookies:
            self.after(self.random.randrange(2 * SECOND_NS), partial(self._work, name))
        if faults:
            self.after(self.random.randrange(10 * SECOND_NS), self._fault)
            self.after(self.random.randrange(10 * SECOND_NS), self._write)

    # ---- time ------------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Have something happen."""
        self._count += 1
        heappush(self._queue, (self.now + delay_ns, self._count, action))

    def run(self, until_ns: int, done: Callable[[], bool] | None = None) -> None:
        """Let time pass until a moment, or until something is so."""
        while self._queue and self._queue[0][0] <= until_ns:
            self.now, _, action = heappop(self._queue)
            action()
            self.events += 1
            self._check_world()
            if done is not None and done():
                return
        self.now = until_ns

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.run(self.now + int(seconds * SECOND_NS))

    def note(self, what: str, detail: str = "") -> None:
        """Count and trace an event."""
        self.done[what] += 1
        self.trace.append(f"{(self.now - BEGIN_NS) / 1e9:9.1f} {what} {detail}")

    # ---- the metadata store ----------------------------------------------------------------------------------------

    def put_ledger(self, ledger_id: int, metadata: LedgerMetadata | None, version: int) -> bool:
        """Change a ledger's metadata by compare-and-set; -1 creates it."""
        found = self.ledgers.get(ledger_id)
        if (found[1] if found else -1) != version:
            return False
        if metadata is None:
            del self.ledgers[ledger_id]
        else:
            self.ledgers[ledger_id] = (metadata, version + 1)
        self.changed = True
        self.feed(lambda auditor: self._send_ledgers(auditor, [ledger_id]))
        return True

    def put_mark(self, key: MarkKey, mark: UnderReplicatedLedger | None) -> None:
        """Change a mark."""
        self.tokens += 1
        if mark is None:
            self.marks.pop(key, None)
        else:
            self.marks[key] = mark._replace(token=self.tokens.to_bytes(8, "big"))
        self.feed(lambda auditor: self.send(auditor, MarksChanged({key: self.marks.get(key)})))

    def add_cause(
        self,
        key: MarkKey,
        reason: RepairReason,
        first: int,
        since_ns: int,
        size: int,
        state: RepairState = RepairState.QUEUED,
    ) -> None:
        """Do what ``mark_under_replicated`` does."""
        found = self.marks.get(key)
        if found is None:
            self.put_mark(key, UnderReplicatedLedger(*key, first, reason, since_ns, size, state))
            return
        causes = found.causes_by_reason()
        before = dict(causes)
        causes[reason] = min(first, causes.get(reason, first))
        if causes != before or reason.observed:
            self.put_mark(key, found.with_causes(causes))

    def withdraw(self, key: MarkKey, reasons: frozenset[RepairReason]) -> None:
        """Do what ``withdraw_mark`` does."""
        found = self.marks.get(key)
        if found is None:
            return
        left = {reason: first for reason, first in found.causes_by_reason().items() if reason not in reasons}
        if len(left) < len(found.causes_by_reason()):
            self.put_mark(key, found.with_causes(left) if left else None)

    def feed(self, report: Callable[[SimAuditor], None]) -> None:
        """Report a change to the auditors, a little later."""
        for auditor in self.auditors:
            if auditor.watching:
                self.after(self.random.randrange(10**8, 2 * SECOND_NS), partial(report, auditor))

    def _send_ledgers(self, auditor: SimAuditor, ledgers: list[int]) -> None:
        if not self.reachable:
            self.after(5 * SECOND_NS, lambda: self._send_ledgers(auditor, ledgers))
            return
        if self.faulty and self.random.random() < 0.05:
            self.send(auditor, LedgersChanged({}, frozenset(ledgers)))
        else:
            self.send(auditor, LedgersChanged({each: self.ledgers.get(each) for each in ledgers}))

    # ---- auditors --------------------------------------------------------------------------------------------------

    def _elect(self) -> None:
        """Elect an auditor if there is none, and extend the lease of the one that runs."""
        leader = self.leader
        if leader is not None and leader.believes and not leader.asleep and self.reachable:
            self.lease_ns = self.now + LEASE_NS
            self.send(leader, LeaseExtended(self.lease_ns))
        elif self.now >= self.lease_ns and self.reachable:
            able = [each for each in self.auditors if each.running and not each.asleep]
            if able:
                self.leader = self.random.choice(able)
                self.leader.believes = True
                self.leader.watching = True
                self.leader.told = {}
                self.leader.inbox.clear()
                self.lease_ns = self.now + LEASE_NS
                self.note("elected", str(self.leader.name))
                self.send(self.leader, Elected(self.saved, self.lease_ns, self.session_ns))
                self._tick(self.leader, self.done["elected"])
        self.after(SECOND_NS, self._elect)

    def _tick(self, auditor: SimAuditor, term: int) -> None:
        if auditor is self.leader and term == self.done["elected"]:
            if self.reachable:
                self._send_bookies(auditor)
            self.send(auditor, Tick())
            self.after(TICK_NS, lambda: self._tick(auditor, term))

    def _send_bookies(self, auditor: SimAuditor) -> None:
        if self.reachable:
            self.send(auditor, BookiesRead(tuple(self.facts(each) for each in self.bookies.values())))

    def facts(self, each: SimBookie) -> BookieFacts:
        """Return what cookie and registration say."""
        total = 100 << 20
        return BookieFacts(
            bookie=each.bookie,
            boots=each.boots,
            state=each.state,
            state_since_ns=each.state_since_ns,
            until_ns=each.until_ns,
            location=each.location,
            registered=each.registered,
            tiers={StorageHint.SSD: Space(int(total * (1 - each.used)), total)} if each.registered else {},
        )

    def send(self, auditor: SimAuditor, event: Event) -> None:
        """Have an auditor's machine handle an event, at once or when it wakes up."""
        if not auditor.running or not auditor.believes:
            return
        auditor.inbox.append(event)
        if not auditor.asleep:
            self._handle(auditor)

    def _handle(self, auditor: SimAuditor) -> None:
        while auditor.inbox and auditor.believes:
            event = auditor.inbox.pop(0)
            if isinstance(event, LedgersChanged | LedgersRead):
                self._note_told(auditor, event)
                auditor.whole = None
            effects = auditor.machine.step(event, self.now)
            if auditor is not self.leader or self.now >= self.lease_ns:
                changes = [each for each in effects if isinstance(each, PublishMark | WithdrawMark | ChangeMark)]
                check(not changes, f"an auditor whose lease has ended asks for {changes}")
            if not isinstance(event, LeaseExtended):
                self._check_plan(auditor)
            for effect in effects:
                self._perform(auditor, effect)

    def _note_told(self, auditor: SimAuditor, event: LedgersChanged | LedgersRead) -> None:
        """Keep what the machine was sent of ledgers, unless it is of an earlier reading, or older than that."""
        if isinstance(event, LedgersRead) and event.reading != auditor.reading:
            return
        for ledger_id, found in event.ledgers.items():
            known = auditor.told.get(ledger_id)
            if found is not None and (known is None or known[1] < found[1]):
                auditor.told[ledger_id] = found

    def _check_plan(self, auditor: SimAuditor) -> None:
        """Compare what the machine keeps by deltas with the plan of the whole state."""
        machine = auditor.machine
        auditor.steps += 1
        if not machine.leading or auditor.steps % CHECKED_STEPS:
            return
        whole = auditor.whole
        if whole is None:
            whole = auditor.whole = ClusterMap()
            for ledger_id, told in auditor.told.items():
                whole.apply(ledger_id, *told)
        check(len(whole) == len(machine.map), "the map has the ledgers that the machine was sent")
        found = plan(whole, machine.situation, self.now, window=self.window)
        check(dict(machine.wanted) == dict(found.wanted), "the marks wanted are those of the plan")
        check(machine.holds == found.holds, "the holds are those of the plan")
        check(len(machine.misplaced) == found.counts.misplaced, "the misplaced ledgers are those of the plan")
        queued = [task for task in machine.wanted.values() if task.state is RepairState.QUEUED and task.derived]
        queued = [task for task in queued if task.key not in machine.situation.parked]
        check(len(queued) <= self.window, "the window is kept")
        if queued and not found.holds:
            worst = max(task.copies for task in queued)
            later = [task for task in found.tasks if task.key not in machine.wanted and task.copies < worst]
            without = sum(task.state is RepairState.NO_TARGET for task in machine.wanted.values())
            check(not later or without >= self.window, f"{later[:1]} waits for tasks with more copies")

    def _perform(self, auditor: SimAuditor, effect: Effect) -> None:
        """Perform an effect, a little later and maybe after the lease: each is a change of its own."""
        if isinstance(effect, ReadEverything):
            auditor.reading = effect.reading
            self.after(self.random.randrange(10**8, SECOND_NS), lambda: self._read_everything(auditor, effect))
        elif isinstance(effect, ReadLedgers):
            self.after(SECOND_NS, lambda: self._send_ledgers(auditor, sorted(effect.ledgers)))
        elif isinstance(effect, Report):
            if auditor is self.leader:
                self.report = effect
        elif isinstance(effect, SaveState):
            if auditor is self.leader and self.reachable:
                self.saved = effect.state
        else:
            delay = self.random.randrange(10**7, SECOND_NS)
            if self.faulty and self.random.random() < 0.02:
                delay = self.random.randrange(60 * SECOND_NS)
            self.after(delay, lambda: self._change_mark(auditor, effect))

    def _change_mark(self, auditor: SimAuditor, effect: PublishMark | WithdrawMark | ChangeMark | DropMark) -> None:
        if not self.reachable:
            return
        if isinstance(effect, PublishMark):
            key = effect.key
            self.note("publish", f"{key.ledger_id} {key.bookie} {effect.reason.value}")
            if effect.reason.observed:
                check(key in self.evidence, f"ledger {key.ledger_id} is marked without evidence")
            self.add_cause(key, effect.reason, effect.first_entry_id, effect.since_ns, effect.size_bytes, effect.state)
        elif isinstance(effect, WithdrawMark):
            key = effect.key
            self.note("withdraw", f"{key.ledger_id} {key.bookie}")
            check(not any(each.observed for each in effect.reasons), "what was observed is withdrawn")
            self.withdraw(key, effect.reasons)
        else:
            key = MarkKey(effect.mark.ledger_id, effect.mark.bookie)
            found = self.marks.get(key)
            if isinstance(effect, DropMark):
                check(key.ledger_id not in self.ledgers, f"the mark of ledger {key.ledger_id} is dropped")
            if found is not None and found.token == effect.mark.token:
                self.note("change mark", f"{key.ledger_id} {key.bookie} {effect}")
                changed = isinstance(effect, ChangeMark)
                self.put_mark(key, found._replace(state=effect.state, tries=0) if changed else None)  # type: ignore[union-attr]
        self.send(auditor, MarksChanged({key: self.marks.get(key)}))

    def _read_everything(self, auditor: SimAuditor, effect: ReadEverything) -> None:
        if not self.reachable:
            self.after(5 * SECOND_NS, lambda: self._read_everything(auditor, effect))
            return
        self.send(auditor, SettingsRead(self.settings))
        self._send_bookies(auditor)
        self.send(auditor, MarksRead(tuple(self.marks.values())))
        self.after(self.random.randrange(SECOND_NS), lambda: self._read_page(auditor, effect.reading, -1))

    def _read_page(self, auditor: SimAuditor, reading: int, after: int) -> None:
        """Read a page, which arrives later than it was read."""
        if not self.reachable:
            self.after(5 * SECOND_NS, lambda: self._read_page(auditor, reading, after))
            return
        ids = [each for each in sorted(self.ledgers) if each > after]
        page = ids[:10]
        through = page[-1] if len(ids) > 10 else None
        unknown = frozenset(each for each in page if self.faulty and self.random.random() < 0.02)
        known = {each: mapped.version for each in page if (mapped := auditor.machine.map.get(each)) is not None}
        same = frozenset(each for each in page if each not in unknown and known.get(each) == self.ledgers[each][1])
        found = {each: self.ledgers[each] for each in page if each not in unknown | same}
        event = LedgersRead(reading, after, through, found, unknown, same)

        def arrive() -> None:
            self.send(auditor, event)
            if through is not None:
                self._read_page(auditor, reading, through)

        self.after(self.random.randrange(10**7, SECOND_NS), arrive)

    def kill_auditor(self) -> None:
        """Kill the leader; it is started again later."""
        if self.leader is not None:
            victim = self.leader
            self.note("kill auditor", str(victim.name))
            victim.running = victim.believes = victim.watching = False
            victim.machine = AuditorMachine(window=self.window)
            self.leading_ns = self.now + 3600 * SECOND_NS

            def start() -> None:
                victim.running = True

            self.after(self.random.randrange(60 * SECOND_NS), start)

    def suspend_auditor(self, seconds: float) -> None:
        """Suspend the leader for a while."""
        if self.leader is not None and not self.leader.asleep:
            victim = self.leader
            self.note("suspend auditor", str(victim.name))
            victim.asleep = True

            def wake() -> None:
                victim.asleep = False
                self._handle(victim)
                if victim is not self.leader or self.now >= self.lease_ns:
                    self.send(victim, LostElection())
                    victim.believes = victim.watching = False
                    if victim is self.leader:
                        self.leader = None

            self.after(int(seconds * SECOND_NS), wake)

    # ---- bookies ---------------------------------------------------------------------------------------------------

    def bookies_changed(self) -> None:
        """Report a change of the bookies."""
        self.epoch += 1
        self.changed = True
        self.feed(self._send_bookies)

    def kill(self, name: str) -> None:
        """Kill a bookie; its registration ends with its lease."""
        each = self.bookies[name]
        if each.running:
            self.note("kill", name)
            each.running = False
            each.busy = None
            boots = each.boots
            self.after(LEASE_NS, lambda: self._lapse(name, boots))

    def _lapse(self, name: str, boots: int) -> None:
        each = self.bookies[name]
        if each.boots == boots and (not each.running or each.cut_off) and each.registered:
            each.registered = False
            each.changed_ns = self.now
            each.gone_ns = each.gone_ns if each.gone_ns is not None else self.now
            self.bookies_changed()

    def start(self, name: str, *, wiped: bool = False) -> None:
        """Start a bookie, maybe with an empty directory."""
        each = self.bookies[name]
        if not each.running:
            self.note("wipe" if wiped else "start", name)
            each.running, each.cut_off = True, False
            if wiped:
                each.wipe()
            each.boots += 1
            self._register(each)

    def _register(self, each: SimBookie) -> None:
        if not self.reachable:
            self.after(5 * SECOND_NS, lambda: self._register(each))
        elif each.running and not each.cut_off:
            each.registered = True
            each.changed_ns = self.now
            if each.gone_ns is not None:
                each.earlier_ns, each.back_ns = each.gone_ns, self.now
            each.gone_ns = None
            self.bookies_changed()

    def cut_off(self, name: str, seconds: float) -> None:
        """Cut a bookie off from the metadata store for a while, and let it register again without a start."""
        each = self.bookies[name]
        if each.running and not each.cut_off:
            self.note("cut off", name)
            each.cut_off = True
            boots = each.boots
            self.after(LEASE_NS, lambda: self._lapse(name, boots))

            def back() -> None:
                if each.boots == boots and each.running:
                    each.cut_off = False
                    gone = each.gone_ns
                    self._register(each)
                    if self.leader is None or not self.leader.machine.leading:
                        each.gone_ns = gone  # no auditor can have seen that it was back

            self.after(int(seconds * SECOND_NS), back)

    def set_state(self, name: str, state: BookieState, until_ns: int = 0) -> None:
        """Change the state in a cookie."""
        each = self.bookies[name]
        self.note(state.value, name)
        each.state, each.until_ns = state, until_ns
        each.state_since_ns = each.changed_ns = self.now
        self.bookies_changed()

    def set_settings(self, repair: RepairSettings) -> None:
        """Change how the cluster repairs itself."""
        self.settings = replace(self.settings, repair=repair)
        self.changed = True
        self.feed(lambda auditor: self.send(auditor, SettingsRead(self.settings)))

    def lose_store(self, seconds: float) -> None:
        """Have nobody reach the metadata store; all sessions end."""
        if not self.reachable:
            return
        self.note("store lost")
        self.reachable = False
        self.leading_ns = self.now + 3600 * SECOND_NS
        if self.leader is not None:
            self.send(self.leader, StoreLost())

        def back() -> None:
            self.note("store back")
            self.reachable = True
            self.session_ns = self.now
            self.leading_ns = self.now
            for each in self.bookies.values():
                if each.running and each.registered and self.random.random() < 0.5:
                    # Its session has ended; it registers again within seconds.
                    each.registered = False
                    self.after(self.random.randrange(8 * SECOND_NS), partial(self._register, each))
                    each.gone_ns = each.changed_ns = self.now
            if self.leader is not None:
                self.send(self.leader, StoreBack())
                self.send(self.leader, ChangesMissed())
            self.bookies_changed()

        self.after(int(seconds * SECOND_NS), back)

    # ---- ledgers and writers ---------------------------------------------------------------------------------------

    def writable(self) -> list[SimBookie]:
        """Return the bookies that a writer may choose."""
        return [each for each in self.bookies.values() if each.serves and each.state is BookieState.ACTIVE]

    def add_ledger(self, *, closed: bool, ensemble: list[str] | None = None, write_quorum: int = 0) -> int | None:
        """Create a ledger; None if there are too few bookies.

        What members miss that are away, because an ensemble names them, is marked first (AW11).
        """
        size = self.random.choice((1, 2, 3, 3, 3, 4)) if ensemble is None else len(ensemble)
        able = self.writable() if ensemble is None else [self.bookies[name] for name in ensemble]
        if len(able) < size:
            return None
        chosen = self.random.sample(able, size) if ensemble is None else able
        ledger_id = self.next_ledger
        self.next_ledger += 1
        last = None if not closed else self.random.choice((-1, 99, 99, 99))
        made = make_ledger(
            ledger_id,
            (0, [each.bookie for each in chosen]),
            last=99 if ensemble is not None and closed else last,
            length=self.random.randrange(1 << 20),
            quorum=(write_quorum or (3 if size == 4 else size), 1),
        )
        if made.last_entry_id < 0 and closed:
            made = replace(made, length=0)
        self.ledgers[ledger_id] = (made, 0)
        for each in chosen:
            if each.serves or self.now == BEGIN_NS:
                each.units.add((ledger_id, 0))
            else:
                self.add_cause(MarkKey(ledger_id, each.bookie), RepairReason.MISSED, 0, self.now, 0)
        if not closed:
            self.writers[ledger_id] = SimWriter(ledger_id, f"b{ledger_id % len(self.bookies)}")
        self.feed(lambda auditor: self._send_ledgers(auditor, [ledger_id]))
        return ledger_id

    def _write(self) -> None:
        """Let each writer append, replace bookies, and close or leave its ledger now and then."""
        if self.reachable:
            for writer in list(self.writers.values()):
                self._write_one(writer)
            if self.faulty and len(self.writers) < 4:
                self.add_ledger(closed=False)
        self.after(5 * SECOND_NS, self._write)

    def _write_one(self, writer: SimWriter) -> None:
        metadata, version = self.ledgers[writer.ledger_id]
        if metadata.state is not LedgerState.OPEN:
            del self.writers[writer.ledger_id]
            return
        fragment = metadata.fragments[-1]
        bad = [each for each in fragment.ensemble if not self._is_writable(each)]
        if bad:
            places = tuple(place for place, each in enumerate(fragment.ensemble) if each in bad)
            fresh = self._choose(writer, metadata, places)
            if len(fresh) == len(bad):
                ensemble = tuple(fresh.get(place, each) for place, each in enumerate(fragment.ensemble))
                self._change_ensemble(writer, metadata, version, ensemble, bad)
            return
        writer.next_entry += self.random.randint(1, 20)
        writer.moved_ns = self.now
        self.feed(lambda auditor: self.send(auditor, WritersMoved(frozenset({writer.ledger_id}))))
        what = self.random.random()
        if what < 0.03:
            made = metadata.closed_at(writer.next_entry - 1, writer.next_entry * 1000)
            self.put_ledger(writer.ledger_id, made, version)
            del self.writers[writer.ledger_id]
        elif what < 0.04:
            self.note("writer dies", str(writer.ledger_id))
            del self.writers[writer.ledger_id]

    def _choose(self, writer: SimWriter, metadata: LedgerMetadata, places: tuple[int, ...]) -> dict[int, Bookie]:
        """Choose bookies for places as a writer does; where the whole ensemble is one write set, check its zones."""
        ensemble = metadata.fragments[-1].ensemble
        stand = {each.name: Location.parse(each.location) for each in self.bookies.values()}
        chosen = choose(
            [
                Candidate(
                    each.bookie, {StorageHint.NVME: 1}, location=stand[each.name], local=each.name == writer.local
                )
                for each in self.writable()
            ],
            places=places,
            ensemble=ensemble,
            excluded=frozenset(ensemble[place] for place in places),
            hints=frozenset(),
            source=self.random,
            write_quorum=metadata.write_quorum,
            policy=PlacementPolicy(self.settings.placement.min_zones, self.settings.placement.strict),
            located={bookie: stand[bookie.bookie_id] for bookie in ensemble},
        ).bookies
        if len(chosen) == len(places) and metadata.write_quorum == metadata.ensemble_size:
            stay = {stand[each.bookie_id].zone for place, each in enumerate(ensemble) if place not in places}
            others = {stand[each.name].zone for each in self.writable() if each.bookie not in ensemble} - stay
            zones = stay | {stand[each.bookie_id].zone for each in chosen.values()}
            most = len(stay) + min(len(others), len(places))
            check(len(zones) >= most, f"ledger {metadata.ledger_id} gets {len(zones)} zones, and could have {most}")
        return chosen

    def _is_writable(self, bookie: Bookie) -> bool:
        each = self.bookies[bookie.bookie_id]
        return each.bookie == bookie and each.serves and each.state is BookieState.ACTIVE

    def _change_ensemble(
        self, writer: SimWriter, metadata: LedgerMetadata, version: int, ensemble: tuple[Bookie, ...], bad: list[Bookie]
    ) -> None:
        """Change an ensemble as a writer does: what the replaced bookies miss is marked first (C13)."""
        self.note("ensemble change", str(writer.ledger_id))
        old = metadata.fragments[-1]
        first = max(writer.next_entry, old.first_entry_id)
        kept = metadata.fragments
        if first == old.first_entry_id:
            kept = kept[:-1]
        else:
            for bookie in bad:
                each = self.bookies[bookie.bookie_id]
                unit = (writer.ledger_id, old.first_entry_id)
                rest = tuple(other for other in old.ensemble if other not in bad)
                enough = len(self.sound(unit, rest)) > metadata.ensemble_size - metadata.write_quorum
                if enough and self.random.random() < 0.5:
                    key = MarkKey(writer.ledger_id, bookie)
                    self.add_cause(key, RepairReason.MISSED, old.first_entry_id, self.now, 0)
                    if each.bookie == bookie:
                        each.units.discard(unit)
        made = replace(metadata, fragments=(*kept, Fragment(first, ensemble)))
        if self.put_ledger(writer.ledger_id, made, version):
            for bookie in ensemble:
                self.bookies[bookie.bookie_id].units.add((writer.ledger_id, first))

    def sound(self, unit: Unit, ensemble: tuple[Bookie, ...], *, serving: bool = True) -> list[Bookie]:
        """Return the bookies of an ensemble with a sound copy of a unit."""
        found = []
        for bookie in ensemble:
            each = self.bookies[bookie.bookie_id]
            if each.bookie == bookie and each.holds(unit) and (each.serves or not serving):
                found.append(bookie)
        return found

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _work(self, name: str) -> None:
        """Let the worker of a bookie look for a ledger to repair."""
        each = self.bookies[name]
        held = self.report is not None and bool(self.report.holds)
        paused = self.now < self.settings.repair.paused_until_ns
        if each.serves and self.reachable and each.busy is None and not each.cut_off and not paused:
            self._begin_repair(each, held=held)
        self.after(self.random.randrange(SECOND_NS, 3 * SECOND_NS), lambda: self._work(name))

    def copies_of(self, mark: UnderReplicatedLedger, metadata: LedgerMetadata) -> int:
        """Return the fewest copies that a worker believes to be sound, of an entry that a mark is about."""
        fewest = metadata.write_quorum
        for number, fragment in enumerate(metadata.fragments):
            end = fragment_end(metadata, number)
            if mark.bookie not in fragment.ensemble or (end is not None and end < fragment.first_entry_id):
                continue
            sound = [each for each in fragment.ensemble if self.presence(each) is not Presence.ABSENT]
            sound = [each for each in sound if not self._is_marked(metadata.ledger_id, each, end)]
            gone = len(fragment.ensemble) - len(sound)
            if end is not None and len(sound):
                fewest = min(fewest, max(metadata.write_quorum - gone, 0))
        return fewest

    def _is_marked(self, ledger_id: int, bookie: Bookie, end: int | None) -> bool:
        mark = self.marks.get(MarkKey(ledger_id, bookie))
        if mark is None:
            return False
        observed = [first for reason, first in mark.causes_by_reason().items() if reason.observed]
        return bool(observed) and (end is None or min(observed) <= end)

    def presence(self, bookie: Bookie) -> Presence:
        """Return what a worker sees of a bookie."""
        each = self.bookies[bookie.bookie_id]
        if each.bookie != bookie or not each.registered:
            return Presence.ABSENT
        leaving = each.state in (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED)
        return Presence.LEAVING if leaving else Presence.HERE

    def _begin_repair(self, own: SimBookie, *, held: bool) -> None:
        """Take the most urgent marked ledger that this bookie can do something for."""
        ranked = []
        for mark in self.marks.values():
            found = self.ledgers.get(mark.ledger_id)
            states = {RepairState.QUEUED}
            if self.settings.repair.recover_abandoned:
                states.add(RepairState.WAITING_FOR_OWNER)
            if found is None or mark.state not in states:
                continue
            copies = self.copies_of(mark, found[0])
            if held and not (copies <= 1 < found[0].write_quorum):
                continue
            ranked.append((copies, mark.reason.rank, mark.since_ns, mark.ledger_id, mark.bookie))
        for copies, *_, ledger_id, _bookie in sorted(ranked)[:20]:
            if self.locks.get(ledger_id, ("", 0))[1] > self.now:
                continue
            if self.repair(own, ledger_id, held=held, copies=copies):
                return

    def repair(self, own: SimBookie, ledger_id: int, *, held: bool, copies: int) -> bool:
        """Begin the repair of a ledger; return whether there is something to do."""
        metadata, version = self.ledgers[ledger_id]
        marks = [mark for key, mark in self.marks.items() if key.ledger_id == ledger_id]
        work = ledger_work(metadata, marks, own.bookie, self.presence, self._fits(own))
        for mark in work.over:
            self.unmark(mark)
        if work.unended and not work.fragments:
            return self._recover(own, metadata, version, marks)
        todo = [each for each in work.fragments if each.replaced or not own.holds((ledger_id, each.first_entry_id))]
        if not todo:
            for mark in work.filled:
                self.unmark(mark)
            for mark in work.partly:
                self._settle(own, metadata, mark)
            return False
        self.locks[ledger_id] = (own.name, self.now + 30 * SECOND_NS)
        self._copy(own, metadata, version, todo[0], marks, copies=copies)
        return True

    def _fits(self, own: SimBookie) -> Fits:
        def fits(fragment: Fragment, place: int, _: frozenset[RepairReason]) -> bool:
            others = {each.bookie_id for at, each in enumerate(fragment.ensemble) if at != place}
            return own.name not in others and own.state is BookieState.ACTIVE and own.used < 0.85

        return fits

    def _copy(
        self,
        own: SimBookie,
        metadata: LedgerMetadata,
        version: int,
        work: FragmentWork,
        marks: list[UnderReplicatedLedger],
        *,
        copies: int,
    ) -> None:
        """Copy a fragment to the own bookie, and change the metadata when that is done."""
        ledger_id, first = metadata.ledger_id, work.first_entry_id
        index = next(at for at, each in enumerate(metadata.fragments) if each.first_entry_id == first)
        fragment, end = metadata.fragments[index], fragment_end(metadata, index)
        empty = end is not None and end < first
        unit = (ledger_id, first)
        missing = work.replaced or own.bookie
        others = tuple(each for each in fragment.ensemble if each != own.bookie)
        # With fewer copies than places, each entry must have one on a bookie that serves.
        wanted = 1 + metadata.ensemble_size - metadata.write_quorum
        source = len(self.sound(unit, others)) >= wanted or empty
        self._check_begin(metadata, fragment, marks, missing, work.replaced is not None, empty=empty)
        self.note("copy", f"{ledger_id} {first} {missing} to {own.name}")
        self.copied.append((ledger_id, own.bookie, copies))
        size = 0 if empty else metadata.length // len(metadata.fragments)
        self.copied_bytes += size
        own.busy = ledger_id
        boots = own.boots

        def finish() -> None:
            if own.boots != boots or not own.running:
                return
            own.busy = None
            if not self.reachable:
                return
            if not (source and (len(self.sound(unit, others)) >= wanted or empty)):
                self._failed(metadata, version, marks, missing)
                return
            self.finish(own, metadata, version, work, fragment, marks)

        self.after(10**8 + size * SECOND_NS // BYTES_PER_SECOND, finish)

    def finish(
        self,
        own: SimBookie,
        metadata: LedgerMetadata,
        version: int,
        work: FragmentWork,
        fragment: Fragment,
        marks: list[UnderReplicatedLedger],
    ) -> None:
        """Make the copy durable, then change the metadata, then remove the marks."""
        unit = (metadata.ledger_id, work.first_entry_id)
        before = len(self.sound(unit, fragment.ensemble))
        own.units.add(unit)
        own.damaged.discard(unit)
        if work.replaced is not None:
            ensemble = tuple(own.bookie if each == work.replaced else each for each in fragment.ensemble)
            fragments = tuple(
                Fragment(each.first_entry_id, ensemble) if each == fragment else each for each in metadata.fragments
            )
            check(
                len(self.sound(unit, ensemble)) >= before - (self.presence(work.replaced) is Presence.LEAVING)
                or not before,
                f"a repair leaves ledger {metadata.ledger_id} with fewer copies than before",
            )
            if not self.put_ledger(metadata.ledger_id, replace(metadata, fragments=fragments), version):
                self.note("refused")
                return
        self.note("repaired")
        self._unmark_done(metadata.ledger_id, marks, work.replaced or own.bookie)

    def _unmark_done(self, ledger_id: int, marks: list[UnderReplicatedLedger], bookie: Bookie) -> None:
        """Remove the mark of a bookie once no fragment is left that it has to do with."""
        metadata, _ = self.ledgers[ledger_id]
        for mark in marks:
            if mark.bookie != bookie:
                continue
            if all(bookie not in each.ensemble for each in metadata.fragments):
                self.unmark(mark)
            elif self.presence(bookie) is Presence.HERE:
                units = [(ledger_id, each.first_entry_id) for each in metadata.fragments if bookie in each.ensemble]
                own = self.bookies[bookie.bookie_id]
                closed = metadata.state is LedgerState.CLOSED or bookie not in metadata.fragments[-1].ensemble
                if all(own.holds(unit) for unit in units) and closed:
                    self.unmark(mark)

    def _settle(self, own: SimBookie, metadata: LedgerMetadata, mark: UnderReplicatedLedger) -> None:
        """Let a mark be about the fragment without an end alone, and remove it if the bookie has that one, too."""
        first, key = metadata.fragments[-1].first_entry_id, MarkKey(mark.ledger_id, mark.bookie)
        causes = mark.causes_by_reason()
        raised = {why: max(each, first) if why.observed else each for why, each in causes.items()}
        if raised != causes and self.marks[key].token == mark.token:
            self.note("raise mark", f"{key.ledger_id} {key.bookie}")
            self.put_mark(key, mark.with_causes(raised))
        if own.holds((mark.ledger_id, first)):
            self.unmark(self.marks[key])

    def unmark(self, mark: UnderReplicatedLedger) -> None:
        """Remove a mark unless it has changed."""
        key = MarkKey(mark.ledger_id, mark.bookie)
        found = self.marks.get(key)
        if found is not None and found.token == mark.token:
            self.note("unmark", f"{key.ledger_id} {key.bookie}")
            self.put_mark(key, None)

    def _failed(
        self, metadata: LedgerMetadata, version: int, marks: list[UnderReplicatedLedger], missing: Bookie
    ) -> None:
        """Note that there was no source: at the second time the mark says that the entries are lost."""
        self.note("failed", str(metadata.ledger_id))
        attempt = (metadata.ledger_id, missing, hash((self.epoch, version)))
        self.tries[attempt] += 1
        check(self.tries[attempt] <= TRIES_MAX, f"ledger {metadata.ledger_id} is tried without end")
        for mark in marks:
            found = self.marks.get(MarkKey(mark.ledger_id, mark.bookie))
            if mark.bookie == missing and found is not None and found.token == mark.token:
                state = RepairState.LOST if found.tries + 1 >= ERRORS_MAX else RepairState.QUEUED
                self.put_mark(MarkKey(mark.ledger_id, mark.bookie), found._replace(tries=found.tries + 1, state=state))

    def _recover(
        self, own: SimBookie, metadata: LedgerMetadata, version: int, marks: list[UnderReplicatedLedger]
    ) -> bool:
        """Recover an abandoned ledger, if that is allowed and its writer is gone."""
        ledger_id = metadata.ledger_id
        allowed = self.settings.repair.recover_abandoned
        abandoned = [mark for mark in marks if mark.state is RepairState.WAITING_FOR_OWNER]
        fragment = metadata.fragments[-1]
        unit = (ledger_id, fragment.first_entry_id)
        if not allowed or not abandoned or metadata.state is LedgerState.CLOSED:
            return False
        if not self.sound(unit, fragment.ensemble):
            self._failed(metadata, version, marks, abandoned[0].bookie)
            return True
        writer = self.writers.get(ledger_id)
        idle = writer is None or self.now - writer.moved_ns >= OPEN_GRACE_NS - LATE_NS
        check(idle, f"ledger {ledger_id} is recovered while its writer is at work")
        self.note("recover", str(ledger_id))
        self.put_ledger(ledger_id, metadata.closed_at(max(fragment.first_entry_id, 10), 10_000), version)
        return True

    # ---- rules -----------------------------------------------------------------------------------------------------

    def _check_begin(
        self,
        metadata: LedgerMetadata,
        fragment: Fragment,
        marks: list[UnderReplicatedLedger],
        missing: Bookie,
        replaced: bool,
        *,
        empty: bool,
    ) -> None:
        """Check that a copy may begin: not within a grace, a hold or a pause, unless it is urgent."""
        ledger_id = metadata.ledger_id
        # A mark is of a ledger and a bookie, so that one urgent fragment is enough.
        others = [each for each in metadata.fragments if missing in each.ensemble]
        down = any(self._is_down(metadata, each) for each in others)
        calm = all(
            self.now - self.bookies[bookie.bookie_id].changed_ns >= LATE_NS
            for each in others
            for bookie in each.ensemble
        )
        each = self.bookies[missing.bookie_id]
        absent_ns = self.now - each.gone_ns if each.gone_ns is not None else 0
        late_ns = self.now - max(each.back_ns, self.leading_ns)
        if (
            each.earlier_ns is not None and late_ns < LATE_NS
        ):  # the auditor may not have withdrawn the mark of an earlier absence
            absent_ns = max(absent_ns, self.now - each.earlier_ns)
        if replaced and each.bookie == missing and self.presence(missing) is Presence.ABSENT:
            late = absent_ns >= GRACE_NS - LEASE_NS
            drained = any(mark.bookie == missing and DRAINING in mark.causes_by_reason() for mark in marks)
            urgent = down and absent_ns >= URGENT_NS and metadata.write_quorum > 2
            seconds = absent_ns // SECOND_NS
            check(
                late or drained or urgent or (not calm and absent_ns >= URGENT_NS),
                f"a copy of ledger {ledger_id} begins {seconds} s after {missing} left",
            )
        check(self.now >= self.settings.repair.paused_until_ns, "a copy begins while repairs are paused")
        if not down and calm and self.leading_ns + LATE_NS <= self.now:
            for name, since in self.truths.items():
                check(self.now - since < LATE_NS, f"a copy of ledger {ledger_id} that is not urgent begins, and {name}")

    def _is_down(self, metadata: LedgerMetadata, fragment: Fragment) -> bool:
        """Return whether an entry of a fragment may be down to one sound copy of several, by two failures or a loss."""
        known = [each for each in fragment.ensemble if self.presence(each) is not Presence.ABSENT]
        sound = [each for each in known if not self._is_marked(metadata.ledger_id, each, None)]
        return metadata.write_quorum - (len(fragment.ensemble) - len(sound)) <= 1 < metadata.write_quorum

    def _check_world(self) -> None:
        """Note since when reasons to hold are true, and since when an auditor leads."""
        leader = self.leader
        leads = leader is not None and leader.running and not leader.asleep and leader.machine.leading
        if not leads or not self.reachable:
            self.leading_ns = self.now
        if not self.changed:
            return
        self.changed = False
        named = {
            bookie
            for metadata, _ in self.ledgers.values()
            for fragment in metadata.fragments
            for bookie in fragment.ensemble
        }
        accepted = self.settings.repair.accepted_losses
        members = [each for each in self.bookies.values() if each.name not in accepted]
        members = [each for each in members if each.registered or each.bookie in named]
        absent = [each for each in members if not each.registered]
        self._truth("few are registered", len(absent) >= 2 and len(members) - len(absent) < 0.75 * len(members))
        for number in range(3):
            part = [each for each in members if each.location.startswith(f"zone{number}/")]
            self._truth(f"zone {number} is absent", len(part) >= 2 and all(not each.registered for each in part))

    def _truth(self, name: str, true: bool) -> None:
        if not true:
            self.truths.pop(name, None)
        else:
            self.truths.setdefault(name, self.now)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        """Do one thing by chance."""
        if not self.faulty:
            return
        source = self.random
        name = source.choice(sorted(self.bookies))
        each = self.bookies[name]
        what = source.randrange(16)
        if what < 3:
            self.kill(name)
        elif what < 6:
            for other in sorted(self.bookies):
                if not self.bookies[other].running and source.random() < 0.5:
                    self.start(other)
        elif what == 6:
            self.cut_off(name, source.uniform(1, 200))
        elif what == 7 and not each.running and source.random() < 0.3 and self._may_wipe(each):
            self.start(name, wiped=True)
        elif what == 8:
            state = source.choice((BookieState.DRAINING, BookieState.MAINTENANCE, BookieState.ACTIVE))
            self.set_state(name, state, self.now + source.randrange(300 * SECOND_NS))
        elif what == 9:
            self.kill_auditor()
        elif what == 10:
            self.suspend_auditor(source.uniform(1, 60))
        elif what == 11:
            self.lose_store(source.uniform(1, 60))
        elif what == 12 and source.random() < 0.5:
            zone = each.location.partition("/")[0]
            for near in self.bookies.values():
                if near.location.startswith(zone):
                    self.kill(near.name)
        elif what == 13:
            each.used = source.choice((0.5, 0.5, 0.9))
            self.bookies_changed()
        elif what == 14:
            until = self.now + source.randrange(200 * SECOND_NS)
            self.set_settings(replace(self.settings.repair, paused_until_ns=until))
        else:
            self._damage(each)
        self.after(source.randrange(30 * SECOND_NS), self._fault)

    def _may_wipe(self, victim: SimBookie) -> bool:
        """Return whether each unit of a bookie has another sound copy, so that nothing is lost for ever."""
        for metadata, _ in self.ledgers.values():
            for number, fragment in enumerate(metadata.fragments):
                unit = (metadata.ledger_id, fragment.first_entry_id)
                end = fragment_end(metadata, number)
                if end is not None and end < fragment.first_entry_id:
                    continue
                spare = 1 + metadata.ensemble_size - metadata.write_quorum
                left = [each for each in self.sound(unit, fragment.ensemble, serving=False) if each != victim.bookie]
                if victim.bookie in fragment.ensemble and len(left) < spare:
                    return False
        return True

    def _damage(self, each: SimBookie) -> None:
        """Damage a unit of which there is another copy; two checks find it, and one that hangs finds nothing."""
        unknown = self.random.random() < 0.5
        for metadata, _ in list(self.ledgers.values()):
            fragment = metadata.fragments[0]
            unit = (metadata.ledger_id, 0)
            copies = self.sound(unit, fragment.ensemble, serving=False)
            enough = len(copies) > 1 + metadata.ensemble_size - metadata.write_quorum
            if (
                each.bookie in copies
                and enough
                and self.random.random() < 0.3
                and fragment_end(metadata, 0) is not None
            ):
                result = Check.UNKNOWN if unknown else Check.DAMAGED
                if not unknown:
                    each.damaged.add(unit)
                for delay in (0, 601):
                    self.after(delay * SECOND_NS, partial(self.report_check, unit, each.bookie, result))
                return

    def hang_checks(self) -> None:
        """Let one check of each replica after the other hang, twice with the time between that makes a mark."""
        self.pass_time(60)
        slow = self.random.choice(sorted(self.bookies))
        for _ in range(2):
            for unit in sorted(self.bookies[slow].units):
                self.report_check(unit, self.bookies[slow].bookie, Check.UNKNOWN)
            self.pass_time(601)

    def report_check(self, unit: Unit, bookie: Bookie, result: Check) -> None:
        """Report the check of a replica to the auditor; what was damaged may have been repaired meanwhile."""
        own = self.bookies[bookie.bookie_id]
        if result is Check.DAMAGED:
            if own.bookie == bookie and unit in own.damaged:
                self.evidence.add(MarkKey(unit[0], bookie))
            else:
                result = Check.SOUND
        if self.leader is not None:
            self.send(self.leader, ReplicaChecked(unit[0], bookie, self.now, result, unit[1]))

    # ---- the end ---------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Stop all faults: every bookie runs, and is active."""
        self.faulty = False
        self.note("heal")
        if not self.reachable:
            self.run(self.now + 61 * SECOND_NS)
        for name, each in self.bookies.items():
            each.cut_off = False
            each.used = 0.5
            each.state = BookieState.ACTIVE
            if not each.running:
                self.start(name)
            elif not each.registered:
                self._register(each)
        for each in self.bookies.values():
            for unit in sorted(each.damaged):  # a scrub finds what checks have not
                if unit[0] in self.ledgers:
                    self.add_cause(MarkKey(unit[0], each.bookie), RepairReason.DAMAGED, unit[1], self.now, 0)
        self.writers.clear()
        self.bookies_changed()
        for ledger_id, (metadata, version) in list(self.ledgers.items()):
            if metadata.state is not LedgerState.CLOSED:  # its owner recovers it
                last = metadata.fragments[-1].first_entry_id + 5
                self.put_ledger(ledger_id, metadata.closed_at(last, 1000), version)

    def unhealthy(self) -> str:
        """Return what is not as it should be; nothing if all ledgers are whole and no mark is left."""
        for metadata, _ in self.ledgers.values():
            for number, fragment in enumerate(metadata.fragments):
                end = fragment_end(metadata, number)
                unit = (metadata.ledger_id, fragment.first_entry_id)
                there = [self.bookies[each.bookie_id] for each in fragment.ensemble]
                if any(own.bookie != each for own, each in zip(there, fragment.ensemble, strict=True)):
                    return f"ledger {metadata.ledger_id} names an instance that is gone"
                if (end is None or end >= fragment.first_entry_id) and not all(own.holds(unit) for own in there):
                    return f"ledger {metadata.ledger_id} from {fragment.first_entry_id} is short of copies"
        return f"marks are left: {sorted(self.marks.values())[:3]}" if self.marks else ""


def run(seed: int) -> tuple[World, Exception | None]:
    """Run a seed; return its world and what was broken.

    In each tenth seed the only fault is that many bookies die; in another tenth, that checks of a bookie hang.
    """
    storm, hanging = seed % 10 == 9, seed % 10 == 8
    world = World(seed, faults=not storm and not hanging)
    try:
        if hanging:
            world.hang_checks()
        elif storm:
            world.pass_time(60)
            for name in world.random.sample(sorted(world.bookies), len(world.bookies) // 2):
                world.kill(name)
            world.pass_time(300)
        else:
            world.run(BEGIN_NS + FAULTS_NS)
        world.heal()
        world.run(world.now + SETTLE_NS, lambda: world.events % 50 == 0 and not world.unhealthy())
        check(not world.unhealthy(), world.unhealthy())
    except Exception as error:  # noqa: BLE001  # whatever a machine raises is a failure of the seed
        return world, error
    return world, None


def main() -> int:
    """Run seeds, and print those that fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.healing", description=run.__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--trace", type=int, default=0, help="print so many of the last events of a seed that fails")
    arguments = parser.parse_args()
    done: Counter[str] = Counter()
    failures = events = 0
    began = time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        world, error = run(seed)
        done.update(world.done)
        events += world.events
        if error is not None:
            failures += 1
            sys.stdout.write("".join(f"{line}\n" for line in world.trace[-arguments.trace :] if arguments.trace))
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{arguments.seeds} seeds, {events} events, {failures} failures, {seconds:.0f} s\n{dict(done)}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
