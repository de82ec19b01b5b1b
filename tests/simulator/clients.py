"""Clients of the simulation: the real machines, driven as the library drives them."""

from __future__ import annotations

from array import array
from random import Random
from struct import Struct
from typing import TYPE_CHECKING, Protocol

from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.entry_runs import cut
from pybk.replication.inflight import Batch
from pybk.replication.messages import (
    NEGATIVE,
    Acknowledged,
    Add,
    Answered,
    BookiesChosen,
    ChooseBookies,
    CompareLacs,
    Confirmed,
    Done,
    Effect,
    EnsembleChanged,
    EntriesRead,
    Event,
    Failed,
    Force,
    LacRead,
    LacReply,
    MetadataRead,
    MetadataUnreachable,
    ReadEnded,
    ReadLac,
    ReadMetadata,
    ReadReply,
    Reason,
    Reply,
    Request,
    Send,
    Status,
    Unanswered,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.reader import NO_LIMIT, LacMachine, ReadMachine
from pybk.replication.recovery import RecoveryMachine
from pybk.replication.rereplication import RereplicationMachine
from pybk.replication.writer import WriterMachine
from tests.simulator.deceit import verified
from tests.simulator.plan import MS
from tests.simulator.seals import seal_of

if TYPE_CHECKING:
    from tests.simulator.ledgers import SimLedger

_pack_header = Struct(">qqqq").pack


class Machine(Protocol):
    """Any of the machines."""

    def step(self, event: Event, now_ns: int) -> list[Effect]: ...


class Client:
    """Performs a machine's effects, and passes their results to it.

    Attributes:
        verifies: Whether it has the ledger's password, and takes only what it can verify.
    """

    verifies = True

    def __init__(self, ledger: SimLedger, name: str) -> None:
        self.ledger = ledger
        self.name = name + ledger.suffix
        self.random = Random(f"{ledger.source}/{name}")
        self.machine: Machine | None = None
        self.machines = 0
        self.paused = False
        self.stopped = False
        self.asleep = False
        """Whether it stands still longer than any pause."""
        self.waiting: list[tuple[int, Event]] = []
        self.open: dict[tuple[int, int], None] = {}
        self.asked_of: dict[int, Request] = {}
        """The requests by key, if replies may deceive."""
        self.closing: tuple[int, LedgerMetadata] | None = None
        self.closed_as: LedgerMetadata | None = None
        """The end that a machine of this client wrote, and knows that it did."""
        self.wakes = 0
        self.performers = {
            Send: self.send,
            WriteMetadata: self.write_metadata,
            ReadMetadata: self.read_metadata,
            ChooseBookies: self.choose,
            WakeAt: self.wake_at,
            Confirmed: self.confirmed,
            Acknowledged: self.ignore,
            EnsembleChanged: self.ignore,
            UnderReplicated: self.under_replicated,
            Done: self.done,
            Failed: self.failed,
            EntriesRead: self.got,
            LacRead: self.lac_is,
            ReadEnded: self.read_ended,
        }

    def take(self, machine: Machine) -> None:
        """Drive another machine from now on; the one before gets no more events."""
        self.machine = machine
        self.machines += 1
        self.open.clear()

    def deliver_event(self, event: Event) -> None:
        """Pass an event to the machine, or what waits for one that begins with the ledger's metadata."""
        self.deliver_to(self.machines, event)

    def deliver_to(self, to: int, event: Event) -> None:
        if self.stopped or to != self.machines:
            return
        if self.paused:
            self.waiting.append((to, event))
            return
        self.step(event)

    def step(self, event: Event) -> None:
        if self.machine is not None:
            self.perform(self.machine.step(event, self.ledger.clock.now))

    def resume(self) -> None:
        """Continue as if no time had passed."""
        if self.asleep:
            return
        self.paused = False
        waiting, self.waiting = self.waiting, []
        for to, event in waiting:
            self.deliver_to(to, event)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            self.performers[type(effect)](effect)  # type: ignore[operator]

    # ---- effects ---------------------------------------------------------------------------------------------------

    def send(self, effect: Send) -> None:
        ledger = self.ledger
        machine, token, bookie = self.machines, effect.token, effect.bookie
        self.open[machine, token] = None
        target = ledger.bookies[bookie.bookie_id]
        key = machine << 32 | token
        if ledger.deceives:
            assert not isinstance(effect.request, CompareLacs), "the simulator compares no ends"
            self.asked_of[key] = effect.request
        ledger.network.send(self.name, target.name, target.deliver, self, key, bookie, effect.request)
        wait = ledger.plan.timeout_ns
        if ledger.spurious and self.random.random() < ledger.spurious:
            wait = int(self.random.random() * 2 * MS)
        ledger.clock.after(wait, self.timed_out, machine, token)

    def timed_out(self, machine: int, token: int) -> None:
        """No answer came in time; one may come later all the same."""
        if machine == self.machines and (machine, token) in self.open:
            del self.open[machine, token]
            self.deliver_to(machine, Unanswered(token))

    def answered(self, key: int, reply: Reply | LacReply | ReadReply, bookie: Bookie) -> None:
        """A reply came, maybe late, maybe twice."""
        if self.ledger.deceives:
            heard = self._as_heard(self.asked_of[key], reply, bookie)
            if heard is None:
                return
            reply = heard
        machine, token = key >> 32, key & 0xFFFFFFFF
        self.open.pop((machine, token), None)
        self.deliver_to(machine, Answered(token, reply))

    def _as_heard(
        self, request: Request, honest: Reply | LacReply | ReadReply, bookie: Bookie
    ) -> Reply | LacReply | ReadReply | None:
        """Return a reply as the bookie gives it, and as the client's driver passes it on; None for no reply."""
        liar = self.ledger.liar
        reply = honest if liar is None else liar.says(bookie, request, honest)
        if reply is None:
            return None
        return verified(self.ledger, request, honest, reply) if self.verifies else reply

    def write_metadata(self, effect: WriteMetadata) -> None:
        if effect.metadata.state is LedgerState.CLOSED:
            self.closing = (self.machines, effect.metadata)
            self.ledger.checker.closes(self.name, effect.metadata)
        self.ledger.metadata.write(self, effect)

    def read_metadata(self, effect: ReadMetadata) -> None:
        # What a read is denied for good, and what a recovery gives up, must not rest on old metadata.
        self.ledger.metadata.read(self, fresh=isinstance(self.machine, ReadMachine | RecoveryMachine))

    def choose(self, effect: ChooseBookies) -> None:
        self.ledger.clock.after(int(self.random.random() * MS), self.chosen, self.machines, effect)

    def chosen(self, machine: int, effect: ChooseBookies) -> None:
        """Bookies were found."""
        unreachable = self.ledger.metadata.is_unreachable()
        self.deliver_to(machine, MetadataUnreachable() if unreachable else BookiesChosen(self.ledger.choose(effect)))

    def wake_at(self, effect: WakeAt) -> None:
        self.wakes += 1
        self.ledger.clock.after(max(effect.time_ns - self.ledger.clock.now, 0), self.woken, self.machines, self.wakes)

    def woken(self, machine: int, wake: int) -> None:
        """The time has come, if no later one was asked for."""
        if wake == self.wakes:
            self.deliver_to(machine, Woken())

    def under_replicated(self, effect: UnderReplicated) -> None:
        self.ledger.under_replicated[effect.bookie, effect.first_entry_id] = None

    def ignore(self, effect: object) -> None:
        """Nothing to do."""

    def note_closed(self, metadata: LedgerMetadata) -> None:
        """Take note of it if the machine that has ended is the one that wrote the ledger's end."""
        if self.closing == (self.machines, metadata):
            self.closed_as = metadata

    def answers_for(self, bookie: Bookie, entry_id: int) -> bool:
        """Return whether this client, which closed the ledger, has to have recorded it if a bookie misses an entry."""
        return True

    def check_deleted(self, effect: Failed) -> None:
        """C11: no client learns that a ledger was deleted that was not."""
        gone = effect.reason is not Reason.DELETED or self.ledger.metadata.current is None
        self.ledger.checker.check(gone, f"C11: {self.name} was told that the ledger was deleted")

    def unexpected(self, effect: object) -> None:
        raise AssertionError(f"{self.name} was told {effect}")

    def confirmed(self, effect: Confirmed) -> None:
        self.unexpected(effect)

    def done(self, effect: Done) -> None:
        self.unexpected(effect)

    def failed(self, effect: Failed) -> None:
        self.unexpected(effect)

    def got(self, effect: EntriesRead) -> None:
        self.unexpected(effect)

    def lac_is(self, effect: LacRead) -> None:
        self.unexpected(effect)

    def read_ended(self, effect: ReadEnded) -> None:
        self.unexpected(effect)


class Writer(Client):
    """Writes batches with a window, forces, pauses, and may close."""

    def __init__(self, ledger: SimLedger) -> None:
        super().__init__(ledger, "writer")
        plan = ledger.plan
        assert ledger.metadata.current is not None
        seal = seal_of(ledger.metadata.current)
        self.made: dict[int, bytes] = {-1: b""}
        """The entries, which the seal needs the last one of."""
        self.writer = WriterMachine(
            ledger.metadata.current,
            0,
            straggler_bytes=plan.straggler_bytes,
            patience_ns=plan.patience_ns,
            deferred=plan.deferred,
            away=ledger.away,
            seal=lambda closed: seal.sealed(closed, self.made[closed.last_entry_id]),
        )
        self.take(self.writer)
        self.left = list(plan.batches)
        self.in_flight: list[int] = []
        self.hasty: Bookie | None = None
        """The bookie whose next add is not waited for."""
        self.next = 0
        self.length = 0
        self.ended = False
        self.end: Done | Failed | None = None
        self.moved_ns = 0
        """When the LAC moved last."""
        ledger.clock.after(0, self.act)

    def act(self) -> None:
        """Write the next batch if the window allows, or do what is due."""
        if self.stopped or self.ended:
            return
        plan = self.ledger.plan
        if not self.paused and not self.ledger.idles:
            now = self.ledger.clock.now
            early = plan.forces_early and self.in_flight and self.random.random() < 0.3
            if self.left and len(self.in_flight) < plan.window and not early:
                self.submit(self.left.pop(0))
            elif plan.deferred and self.in_flight and self.random.random() < 0.5:
                self.perform(self.writer.force(now))
            elif self.closes_now():
                self.perform(self.writer.close(now))
                return
            else:
                self.perform(self.writer.send_lac())
        self.ledger.clock.after(1 + int(self.random.random() * (plan.think_ns + MS)), self.act)

    def closes_now(self) -> bool:
        """Close when all is confirmed, if ever; sometimes before (AW7)."""
        closes, quiet = self.ledger.plan.closes, self.ledger.quiet
        if not self.left and not self.in_flight:
            return closes or quiet
        return closes and not quiet and self.random.random() < 0.01

    def submit(self, count: int) -> None:
        """Make entries, and submit them."""
        first = self.next
        entries = []
        for entry_id in range(first, first + count):
            payload = b"%d;" % entry_id * (entry_id % 3 + 1)
            self.length += len(payload)
            entry = _pack_header(self.ledger.ledger_id, entry_id, self.writer.last_add_confirmed, self.length) + payload
            self.ledger.checker.sent(entry_id, entry, self.length)
            self.made[entry_id] = entry
            entries.append(entry)
        self.next += count
        self.in_flight.append(self.next - 1)
        runs = cut(first, array("q", map(len, entries)), entries, self.ledger.plan.quorum)
        batch = Batch(first, self.next - 1, self.length, runs)
        self.perform(self.writer.submit(batch, self.ledger.clock.now))

    def send(self, effect: Send) -> None:
        ledger = self.ledger
        if ledger.plan.forces_early and isinstance(effect.request, Force) and self.random.random() < 0.3:
            # The answer comes late, and the next add is given up before: another bookie takes the place meanwhile.
            self.hasty = effect.bookie
            until = ledger.clock.now + int(self.random.random() * 50 * MS)
            ledger.network.clog(effect.bookie.bookie_id, self.name, until)
        ledger.checker.writes(effect.bookie, self.writer.metadata)
        super().send(effect)
        if effect.bookie == self.hasty and isinstance(effect.request, Add):
            self.hasty = None
            ledger.clock.after(int(self.random.random() * 2 * MS), self.timed_out, self.machines, effect.token)

    def confirmed(self, effect: Confirmed) -> None:
        self.ledger.checker.writer_confirms(effect.last_add_confirmed)
        self.moved_ns = self.ledger.clock.now
        while self.in_flight and self.in_flight[0] <= effect.last_add_confirmed:
            self.in_flight.pop(0)

    def done(self, effect: Done) -> None:
        self.ended, self.end = True, effect
        self.note_closed(effect.metadata)
        checker = self.ledger.checker
        checker.check(effect.metadata.last_entry_id == checker.confirmed, f"closed at {effect.metadata.last_entry_id}")

    def failed(self, effect: Failed) -> None:
        self.ended, self.end = True, effect
        self.check_deleted(effect)
        waited = self.ledger.clock.now - self.moved_ns
        patient = effect.reason is not Reason.NOT_ENOUGH_BOOKIES or waited >= self.ledger.plan.patience_ns
        self.ledger.checker.check(patient, f"AW10: the writer waited {waited} ns for bookies")


class Recoverer(Client):
    """Opens the ledger with recovery, again and again until it is closed; a member has no password."""

    def __init__(self, ledger: SimLedger, number: int, *, member: bool = False) -> None:
        super().__init__(ledger, f"recoverer{number}")
        self.member = member
        self.verifies = not member
        self.tries = 0
        self.end: Done | Failed | None = None
        self.asked: dict[int, Bookie] = {}
        """The bookies whose answer to a fence the machine still waits for."""
        self.held: dict[Bookie, int] = {}
        """The last entry that each bookie of the last fragment had when it was fenced, if it answered in time."""
        self.known = -1
        """What was confirmed as far as the recovery knew when it began to read."""
        self.written_back = False
        self.told = -1
        """The highest LAC that a bookie told."""
        self.attempts: list[tuple[dict[Bookie, int], int]] = []
        """The same of each recovery that wrote something back or wrote the end, and what was confirmed as it knew."""

    def begin(self) -> None:
        """Read the metadata; the recovery begins with what they are."""
        if self.stopped:
            return
        self.tries += 1
        self.asked, self.held, self.known, self.written_back, self.told = {}, {}, -1, False, -1
        self.take(Opening(self))
        self.read_metadata(ReadMetadata())

    def opened(self, metadata: MetadataRead) -> None:
        """Recover."""
        if metadata.metadata is None:
            self.end = Failed(Reason.DELETED, "")
            return
        if self.member:
            machine = RecoveryMachine(metadata.metadata, metadata.version, member=True)
        else:
            machine = RecoveryMachine(metadata.metadata, metadata.version, seal=seal_of(metadata.metadata).sealed)
        self.take(machine)
        self.perform(machine.start(self.ledger.clock.now))

    def write_metadata(self, effect: WriteMetadata) -> None:
        if effect.metadata.state is LedgerState.CLOSED and not self.written_back:
            self.known = effect.metadata.last_entry_id
            self.attempts.append((self.held, self.known))
        if effect.metadata.state is LedgerState.CLOSED and self.member:
            short = effect.metadata.last_entry_id < self.told
            self.ledger.checker.check(
                not short, f"AM3: {self.name} closes before {self.told}, the LAC that it was told"
            )
        super().write_metadata(effect)

    def send(self, effect: Send) -> None:
        request = effect.request
        if isinstance(request, ReadLac):
            self.asked[effect.token] = effect.bookie
        elif isinstance(request, Add) and not self.written_back:
            self.written_back, self.known = True, request.runs[0].first - 1
            self.attempts.append((self.held, self.known))
        super().send(effect)

    def step(self, event: Event) -> None:
        # An answer counts only while the machine waits for it: after a timeout the library drops the answer.
        bookie = self.asked.pop(event.token, None) if isinstance(event, Answered | Unanswered) else None
        if bookie is not None and isinstance(event, Answered) and isinstance(event.reply, LacReply):
            reply = event.reply
            if reply.status is Status.OK or reply.status in NEGATIVE:
                self.held[bookie] = reply.entry_id
                self.told = max(self.told, reply.lac)
        super().step(event)

    def done(self, effect: Done) -> None:
        self.end = effect
        self.note_closed(effect.metadata)

    def answers_for(self, bookie: Bookie, entry_id: int) -> bool:
        """Of what it did not write back it answers for all beyond the last entry that a bookie had when it was fenced.

        What a bookie misses that a writer replaced was recorded before the metadata said so.
        """
        return entry_id > self.known or entry_id > self.held.get(bookie, -1)

    def saw_missing(self, bookie: Bookie, entry_id: int) -> bool:
        """Return whether a bookie it fenced lacked a confirmed entry; what is written back hides it from others."""
        return any(entry_id <= known and entry_id > held.get(bookie, entry_id) for held, known in self.attempts)

    def failed(self, effect: Failed) -> None:
        self.check_deleted(effect)
        if effect.reason is Reason.OWNER_NEEDED:
            # Nothing but a lie sends for the owner, or a LAC in an entry whose bytes changed.
            deceived = self.ledger.liar is not None or self.told > self.ledger.checker.confirmed
            self.ledger.checker.check(self.member and deceived, f"I10: {self.name} gave up: {effect}")
        if effect.reason in (Reason.DELETED, Reason.OWNER_NEEDED):
            self.end = effect
            return
        self.ledger.clock.after(int(self.random.random() * 100 * MS), self.begin)


class Opening:
    """Waits for the metadata that a recovery, or a reader, begins with."""

    def __init__(self, client: Recoverer | Reader) -> None:
        self.client = client

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        if isinstance(event, MetadataRead):
            self.client.opened(event)
        elif isinstance(event, MetadataUnreachable):
            self.client.machine = None
            self.client.ledger.clock.after(10 * MS, self.client.begin)
        return []


class Reader(Client):
    """Follows the ledger: reads or awaits the last add confirmed, then the entries up to it."""

    def __init__(self, ledger: SimLedger, number: int) -> None:
        super().__init__(ledger, f"reader{number}")
        self.lac = -1
        self.next = 0
        self.ended: ReadEnded | None = None

    def begin(self) -> None:
        if not self.stopped:
            self.take(Opening(self))
            self.read_metadata(ReadMetadata())

    def opened(self, event: MetadataRead) -> None:
        """Ask for the last add confirmed, at once or when it moves."""
        if event.metadata is None:
            return
        self.metadata = event.metadata
        poll = self.random.random() < 0.5
        self.promise = -1 if poll else self.ledger.checker.promised_lac(event.metadata)
        machine = LacMachine(
            event.metadata, beyond=self.lac if poll else None, wait_ns=self.ledger.plan.timeout_ns // 2 if poll else 0
        )
        self.take(machine)
        self.perform(machine.start(self.ledger.clock.now))

    def lac_is(self, effect: LacRead) -> None:
        self.ledger.checker.reader_sees_lac(effect.last_add_confirmed, self.promise)
        self.lac = max(self.lac, effect.last_add_confirmed)
        if self.next > self.lac:
            self.failed(Failed(Reason.UNDECIDED, "nothing new"))
            return
        self.read(self.next, self.lac)

    def read(self, first: int, last: int) -> None:
        """Read entries."""
        self.got_ids: dict[int, None] = {}
        parts = 1 + first % 4
        machine = ReadMachine(
            self.metadata,
            first,
            last,
            bytes_max=1 << 20 if first % 5 else 100,
            speculative_ns=5 * MS,
            parts=parts,
            total_bytes=300 if first % 3 else NO_LIMIT,
        )
        self.take(machine)
        self.perform(machine.start(self.ledger.clock.now))

    def got(self, effect: EntriesRead) -> None:
        run = effect.run
        self.ledger.checker.reader_got(run)
        for entry_id in range(run.first, run.last + 1, run.stride):
            self.ledger.checker.check(entry_id not in self.got_ids, f"entry {entry_id} was given twice")
            self.got_ids[entry_id] = None

    def read_ended(self, effect: ReadEnded) -> None:
        self.ended = effect
        end = self.lac + 1 if effect.missing is None else effect.missing
        for entry_id in range(self.next, end):
            self.ledger.checker.check(entry_id in self.got_ids, f"entry {entry_id} was not given")
        if effect.status is Status.OK:
            self.ledger.checker.check(end > self.next, "a read that nothing kept from reading gave no entry")
        elif effect.missing is not None:
            self.ledger.checker.reader_misses(effect.missing, effect.status)
        self.next = end
        self.failed(Failed(Reason.UNDECIDED, "next round"))

    def failed(self, effect: Failed) -> None:
        self.machine = None
        self.ledger.clock.after(int(self.random.random() * 20 * MS), self.begin)


class Rereplication(Client):
    """Replicates one fragment."""

    verifies = False

    def __init__(
        self, ledger: SimLedger, number: int, first: int, lost: frozenset[Bookie], stay: frozenset[Bookie] = frozenset()
    ) -> None:
        super().__init__(ledger, f"copier{number}")
        self.end: Done | Failed | None = None
        self.first, self.lost, self.stay = first, lost, stay

    def begin(self) -> None:
        """Copy."""
        machine = RereplicationMachine(self.ledger.ledger_id, self.first, self.lost, stay=self.stay)
        self.take(machine)
        self.perform(machine.start(self.ledger.clock.now))

    def done(self, effect: Done) -> None:
        self.end = effect
        self.machine = None

    def failed(self, effect: Failed) -> None:
        self.end = effect
        self.machine = None
