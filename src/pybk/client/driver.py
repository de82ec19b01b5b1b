"""Drives the protocol's machines: performs their effects, and passes the outcomes to them as events.

Theory of operation
===================

**Conversations.** A machine of ``pybk.replication`` decides; it does no I/O. A ``Conversation`` joins one machine, its
ledger and the completion that callers wait for. ``start`` begins one: its machine returns effects, ``perform`` executes
them, and each outcome (reply, missing reply, metadata, time) comes back through ``pass_event``, which returns effects
again. The conversation ends when its machine says so, or when the driver gives it up.

**Reads of one entry** have no machine (``entry_reading``): the leader sends the request, and the wire passes the
reply to the ``EntryReading``. When conversations are given up, such a read ends without an entry, and its caller begins
a conversation, which says why.

**One thread at a time.** The leader of the client's group commit calls ``step``: make the posted calls, send formed
batches, receive, handle replies. So machines, ``_asked`` and the wire need no lock. Other threads hand work to the
leader through ``posted``, ``_begun``, ``_formed`` and ``_fresh``, whose single operations are atomic in CPython, and
interrupt its pause. Metadata requests may take long, so they run in threads of their own, which post the outcome.

**Interrupts.** A step runs in a guard (``threads/interrupts.py``), so no signal ends it in the middle, and in the main
thread it pauses for a slice at most.

**Errors.** An error in the middle of a step, such as lack of memory, may leave machines half changed. ``broken`` marks
that; the next step gives up all conversations with errors that say that outcomes are unknown, and drops all links.
``_unmet`` has the completions whose calls the error may have lost.

**Closing.** ``_closed`` is set by the leader. From then on a step only ends conversations.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType, WeakValueDictionary, ref

from pybk.client.entry_reading import EntryReading
from pybk.client.missing_entries import PendingReports, Unrecorded
from pybk.errors import EntryUnknownError, LedgerRecoveryError, PybkError, without_frames
from pybk.replication.messages import (
    Answered,
    AnyReply,
    ChooseBookies,
    CompareLacs,
    Effect,
    Event,
    MetadataUnreachable,
    ReadMetadata,
    Request,
    Send,
    Unanswered,
    UnderReplicated,
    WakeAt,
    Woken,
    WriteMetadata,
)
from pybk.replication.reader import LacComparisonMachine, LacMachine, ReadMachine
from pybk.replication.recovery import RecoveryMachine
from pybk.replication.writer import WriterMachine
from pybk.threads import Workers, start_thread
from pybk.threads.group_commit import Completion, GroupCommit
from pybk.threads.interrupts import SLICE_SECONDS, is_guarded

if TYPE_CHECKING:
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger.entry import Entry
    from pybk.ledger.ledger_metadata import Bookie

logger = logging.getLogger(__name__)

_BROKEN: Final = (
    "the client failed in the middle of its work, and what was under way is not known: read again, and open ledgers "
    "that were being written to recover them"
)
WAIT_MS: Final = 1000
"""The longest pause of a step outside of a guard."""

_SLICE_MS: Final = int(SLICE_SECONDS * 1000)
"""The longest pause of a step in a guard."""

_TICK_SECONDS: Final = 0.002
_TICKS_UNTIL_REST: Final = 20
"""The looks for idle work of the background thread after a step; it rests after as many looks without any."""

_QUIET_MS: Final = 1
_new_tuple = tuple.__new__
_METADATA_THREADS: Final = 4
LATE_SECONDS: Final = 0.3
"""The time for which a close waits for bookies that have not answered adds and fences of closed ledgers."""
_LATE_LOOKS: Final = 100
REPORT_SECONDS: Final = 5.0
"""The time for which a close waits until the metadata store has recorded which entries bookies miss."""


class Machine(Protocol):
    """A machine of ``pybk.replication``."""

    def step(self, event: Event, now_ns: int) -> list[Effect]:
        """Handle an event; return the effects to perform."""


class Wire(Protocol):
    """The links to bookies; used by the leader alone, except ``interrupt``."""

    def send(self, request_id: int, bookie: Bookie, ledger: RemoteLedger, request: Request | CompareLacs) -> bool:
        """Send a request, now or when the link has space; return False if the bookie cannot be reached."""

    def read(self, request_id: int, bookie: Bookie, reading: EntryReading) -> None:
        """Send the request of a read that is not done; ``poll`` passes the reply to it, or None for none."""

    def poll(self, timeout_ms: int) -> list[tuple[int, AnyReply | None]]:
        """Return replies by request id, None for those that will not come; wait ``timeout_ms`` for the first."""

    def begin_again(self) -> None:
        """Drop all links and pending requests; may be repeated."""

    def interrupt(self) -> None:
        """Make the current call of ``poll``, or else the next one, return at once. Threads: any."""


class MetadataRequests(Protocol):
    """The requests that machines make to the metadata store; each may block and runs in a worker thread."""

    def read(self, ledger: RemoteLedger) -> Event:
        """Read a ledger's metadata."""

    def write(self, ledger: RemoteLedger, effect: WriteMetadata) -> Event:
        """Compare-and-set a ledger's metadata; if the answer is lost, find out whether the change was made."""

    def choose(self, ledger: RemoteLedger, effect: ChooseBookies) -> Event:
        """Choose bookies for positions of an ensemble."""

    def report_missing(self, ledger: RemoteLedger, effect: UnderReplicated) -> None:
        """Record that a bookie misses entries."""


class Writer(Protocol):
    """A writer's conversation; called by the leader."""

    def submit(self, now_ns: int) -> None:
        """Send the batches that have formed, as many as may be under way."""

    def send_lac(self) -> None:
        """Send the LAC to bookies if no add will carry it."""

    def give_up(self, error: PybkError, under_way: PybkError) -> None:
        """Fail for good, unless it has ended; entries that were sent or staged fail with ``under_way``."""


M_co = TypeVar("M_co", bound=Machine, covariant=True)


class Conversation(ABC, Generic[M_co]):
    """One machine, its ledger, and the completion that callers wait for.

    Attributes:
        ledger: The ledger.
        machine: The machine.
        completion: Done when the conversation has ended.
        wake_at_ns: Its next wake-up; None for none.
        unrecorded: Entries that bookies miss and that the metadata store has not recorded yet.
    """

    def __init__(self, driver: Driver, ledger: RemoteLedger, machine: M_co) -> None:
        self.driver = driver
        self.ledger = ledger
        self.machine: Final = machine
        self.completion = Completion()
        self.completion.unseen = True
        self.wake_at_ns: int | None = None
        self.unrecorded: Final = Unrecorded(ledger)

    @abstractmethod
    def take(self, effect: Effect) -> None:
        """Perform an effect that ``Driver.perform`` does not know; called by the leader."""

    def end(self, error: PybkError | None = None) -> None:
        """End the conversation, with an error or none; called by the leader."""
        self.driver.ended(self, error)


AnyConversation = Conversation[Any]


class _Asked(NamedTuple):
    """The request of a request id: its conversation, and the machine's token for it."""

    conversation: AnyConversation
    token: int


class Driver:
    """The driver of all conversations of one client; the ``Work`` of its group commit.

    Threads: ``run``, ``start``, ``post`` and what ``GroupCommit`` allows: any. All else: the leader.
    """

    idles = True

    def __init__(self, wire: Wire, metadata: MetadataRequests) -> None:
        self._wire = wire
        self._metadata = metadata
        self._asked: dict[int, _Asked] = {}
        """Requests without a reply, by request id. Leader only."""
        self._request_ids = itertools.count(1)
        self.posted: deque[Callable[[], None]] = deque()
        """Calls for the leader, in order. Added by any thread, taken by the leader."""
        self.wakes: list[tuple[int, int, ReferenceType[AnyConversation]]] = []
        """Heap of wake-up times, numbered; one counts only while ``wake_at_ns`` of its conversation is the same.

        A wake-up alone keeps no conversation, because a writer ends with its last handle. Leader only.
        """
        self._wake_numbers = itertools.count()
        self._waited: set[AnyConversation] = set()
        """Conversations that have begun and not ended. Changed by the leader alone."""
        self._readings: set[EntryReading] = set()
        """The reads of one entry that threads wait for. Changed by these threads."""
        self._begun: deque[tuple[Bookie, EntryReading]] = deque()
        """Those whose requests the leader has to send, with their bookies. Added by any thread, taken by the leader."""
        self._unmet: set[Completion] = set()
        """Completions that threads wait for in ``do``."""
        self.broken = False
        """True if an exception ended a step in the middle; used by the leader only."""
        self._ticks_left = 0
        """The looks for idle work that the background thread still makes; written by the leader alone."""
        self._writers: WeakValueDictionary[int, Writer] = WeakValueDictionary()
        """All writers, by ``id``. Added by any thread."""
        self._formed: dict[Writer, None] = {}
        """Writers with batches to send. Added by any thread, taken by the leader."""
        self._active: dict[Writer, None] = {}
        """Writers whose appends a thread or future waits for. Changed by the leader alone."""
        self._lac_unsent: dict[Writer, None] = {}
        """Writers whose bookies may not know the LAC yet. Leader only."""
        self._closed: PybkError | None = None
        """The error of all conversations since the driver was closed. Set by the leader."""
        self._cut_off: PybkError | None = None
        """The error of changes that were under way when the driver was closed; set before ``_closed``."""
        with ExitStack() as opened:
            self.workers = Workers(_METADATA_THREADS, "pybk-metadata")
            """Threads for calls of the metadata store."""
            opened.callback(self.workers.close)
            self.reports = PendingReports(metadata.report_missing)
            """Records which bookies miss entries."""
            opened.callback(self.reports.close, 0.0)
            self.group = GroupCommit(self, "pybk-client")
            start_thread(self.group.background)
            opened.pop_all()

    # ---- any thread ----------------------------------------------------------------------------------------------

    def post(self, call: Callable[[], None]) -> None:
        """Have the leader make ``call`` soon."""
        self.posted.append(call)
        self.group.announce()

    def start(self, conversation: AnyConversation, begin: Callable[[int], list[Effect]]) -> None:
        """Begin a conversation: the leader performs the effects that ``begin(now_ns)`` returns.

        Returns at once. The caller waits for ``conversation.completion``.
        """

        def first() -> None:
            self._waited.add(conversation)
            self.perform(conversation, begin(time.monotonic_ns()))

        self.posted.append(first)

    def run(self, conversation: AnyConversation, begin: Callable[[int], list[Effect]]) -> None:
        """Begin a conversation and wait for its end; raise its error if it has one."""
        self.start(conversation, begin)
        self.group.wait(conversation.completion)
        error = conversation.completion.error
        if error is not None:
            raise without_frames(error)

    def read_entry(self, ledger: RemoteLedger, bookie: Bookie, entry_id: int, stride: int) -> Entry | None:
        """Read one entry from one bookie.

        Args:
            ledger: The ledger.
            bookie: The bookie, one of the entry's write set.
            entry_id: The entry.
            stride: As ``Read.stride``.

        Returns:
            The entry, verified; None if the bookie returned no sound copy in time, or the driver is closed.
        """
        reading = EntryReading(self.group, ledger, entry_id, stride)
        self._readings.add(reading)
        self._begun.append((bookie, reading))
        try:
            self.group.wait(reading)
        finally:
            self._readings.discard(reading)
        return reading.entry

    def do(self, call: Callable[[], None], completion: Completion) -> None:
        """Have the leader make ``call``, which completes ``completion`` now or later, and wait for that.

        If an error in a step loses the call, or the driver is closed before, ``completion`` gets an error.
        """
        completion.unseen = True
        self._unmet.add(completion)
        self.posted.append(call)
        try:
            self.group.wait(completion)
        finally:
            self._unmet.discard(completion)

    def call_as_leader(self, call: Callable[[], None]) -> None:
        """Have the leader make ``call``, and return afterwards; an error in a step may lose the call."""
        done = Completion()
        self.posted.append(call)
        self.do(lambda: self.group.finish(done), done)

    # ---- what the group commit calls -----------------------------------------------------------------------------

    def interrupt(self) -> None:
        """See ``Work.interrupt``."""
        self._wire.interrupt()

    def is_pending(self) -> bool:
        """Return whether anything is under way that a thread or a future waits for."""
        return bool(self.posted or self._waited or self._formed or self._active)

    def sleep_seconds(self) -> float:
        """Return the time to the next look for idle work; if there was none for a while, to the next wake-up, or -1."""
        if self._ticks_left > 0:
            return _TICK_SECONDS
        first = self.wakes[:1]  # the leader may take it at this moment
        return max(_TICK_SECONDS, first[0][0] / 1e9 - time.monotonic()) if first else -1.0

    def background_ended(self) -> None:
        """Log an error: threads that wait still lead by themselves, but futures complete only when they do."""
        logger.error("the background thread of the client has ended; close the manager and open it again")

    def step(self) -> None:
        """Send what is pending, pause until a reply or call comes, and handle it.

        An exception in the middle leaves machines in an unknown state. The next step gives them up, because no caller
        may wait for ever. Once the driver is closed, the wire may be closed, too. A step
        then only ends conversations that other threads began before they saw the close.
        """
        group = self.group
        group.completed = group.woke = False
        self._ticks_left = _TICKS_UNTIL_REST
        if self._closed is not None:
            self.do_posted()
            self._end_all(self._closed, self._cut_off or self._closed)
            return
        if self.broken:
            self._give_up()
            return  # the leader's own completion may be done now
        try:
            now_ns = time.monotonic_ns()
            if self.posted and not self.do_posted():
                return
            if self._formed:
                self.submit(now_ns)
            while self._begun:
                self._wire.read(next(self._request_ids), *self._begun.popleft())
            # Do not pause after completing anything, because the leader's own completion may be done.
            timeout_ms = 0 if group.completed or self.posted else _SLICE_MS if is_guarded() else WAIT_MS
            if timeout_ms and self.wakes:
                timeout_ms = max(0, min(timeout_ms, -(-(self.wakes[0][0] - now_ns) // 1_000_000)))
            if not self._lac_unsent or self._active:
                self._receive(timeout_ms)
            elif not self._receive(min(timeout_ms, _QUIET_MS)) and timeout_ms and not self._formed:
                self._send_lacs()  # the leader may wait long, as for a ledger to advance
        except BaseException:
            self.broken = True
            raise
        if group.woke:
            time.sleep(0)  # let the woken threads run now, so that their next appends are sent together

    def idle(self) -> None:
        """Take late answers of bookies, wake conversations, and send LACs that no add has carried."""
        busy = False
        if self._closed is None:
            try:
                if self.broken:
                    self._give_up()
                self._receive(0)
                busy = bool(self._lac_unsent)
                self._send_lacs()
                busy = busy or bool(self._asked)
            except Exception:
                logger.exception("looking after the client's links failed")
        self._ticks_left = _TICKS_UNTIL_REST if busy else self._ticks_left - 1

    def _give_up(self) -> None:
        """End all conversations and drop all links, after an error in the middle of a step; may be repeated."""
        self._end_all(EntryUnknownError(_BROKEN), LedgerRecoveryError(_BROKEN, outcome_unknown=True))
        self._wire.begin_again()
        self.broken = False

    def _end_all(self, error: PybkError, of_changes: PybkError) -> None:
        """End all conversations, reads with ``error`` and changes with ``of_changes``; may be repeated."""
        for reference in self._writers.valuerefs():  # a copy: other threads attach writers meanwhile
            writer = reference()
            if writer is not None:
                writer.give_up(error if self._closed else of_changes, of_changes)
                self._formed.pop(writer, None)  # a writer that another thread attached meanwhile stays
        for conversation in tuple(self._waited):
            reads = isinstance(conversation.machine, ReadMachine | LacMachine | LacComparisonMachine)
            conversation.end(error if reads else of_changes)
        for reading in list(self._readings):
            self.group.finish(reading)
        for completion in list(self._unmet):
            if not completion.done:
                completion.error = of_changes
            self.group.finish(completion)
        self._asked.clear()
        self._active.clear()
        self._lac_unsent.clear()
        self.wakes.clear()

    def _send_lacs(self) -> None:
        while self._lac_unsent:
            writer, _ = self._lac_unsent.popitem()
            writer.send_lac()

    def do_posted(self) -> bool:
        """Make the calls that other threads posted, in their order; return whether the driver is open after them."""
        while self.posted:
            self.posted.popleft()()
        return self._closed is None

    def submit(self, now_ns: int) -> None:
        """Have each writer submit the batch that formed."""
        while self._formed:
            writer, _ = self._formed.popitem()
            writer.submit(now_ns)

    def _receive(self, timeout_ms: int) -> bool:
        """Handle the replies that arrived; return whether there were any."""
        replies = self._wire.poll(timeout_ms)
        now_ns = time.monotonic_ns()
        for request_id, reply in replies:
            asked = self._asked.pop(request_id, None)
            if asked is None:
                continue
            conversation, token = asked
            event: Event = Unanswered(token) if reply is None else _new_tuple(Answered, (token, reply))
            effects = conversation.machine.step(event, now_ns)
            if effects:
                self.perform(conversation, effects)
        if self._formed and not self.group.woke:  # otherwise woken threads append first, to one batch
            self.submit(time.monotonic_ns())
        if self.wakes:
            self.wake_up(time.monotonic_ns())
        return bool(replies)

    def wake_up(self, now_ns: int) -> None:
        """Wake the conversations whose time has come."""
        while self.wakes and self.wakes[0][0] <= now_ns:
            at, _, reference = heapq.heappop(self.wakes)
            conversation = reference()
            if conversation is not None and conversation.wake_at_ns == at:
                conversation.wake_at_ns = None
                self.pass_event(conversation, Woken())

    def pass_event(self, conversation: AnyConversation, event: Event) -> None:
        """Pass an event to a machine, and perform its effects; one that has ended may learn of missing entries."""
        self.perform(conversation, conversation.machine.step(event, time.monotonic_ns()))

    def perform(self, conversation: AnyConversation, effects: list[Effect]) -> None:
        """Perform a machine's effects; does nothing once the driver is closed, as the next step ends conversations."""
        if self._closed is not None:
            return
        for effect in effects:
            if type(effect) is Send:
                request_id = next(self._request_ids)
                self._asked[request_id] = _new_tuple(_Asked, (conversation, effect.token))
                if not self._wire.send(request_id, effect.bookie, conversation.ledger, effect.request):
                    del self._asked[request_id]
                    self.posted.append(partial(self.pass_event, conversation, Unanswered(effect.token)))
            elif type(effect) is WriteMetadata:
                self._ask_metadata(conversation, partial(self._write_metadata, conversation, effect))
            elif type(effect) is ReadMetadata:
                self._ask_metadata(conversation, partial(self._metadata.read, conversation.ledger))
            elif type(effect) is ChooseBookies:
                self._ask_metadata(conversation, partial(self._metadata.choose, conversation.ledger, effect))
            elif type(effect) is WakeAt:
                conversation.wake_at_ns = effect.time_ns
                heapq.heappush(self.wakes, (effect.time_ns, next(self._wake_numbers), ref(conversation)))
            else:
                conversation.take(effect)

    def _ask_metadata(self, conversation: AnyConversation, ask: Callable[[], Event]) -> None:
        def work() -> None:
            event: Event
            try:
                event = ask()
            except PybkError as error:
                logger.warning("ledger %d: the metadata store: %s", conversation.ledger.ledger_id, error)
                event = MetadataUnreachable()
            except Exception:
                logger.exception("ledger %d: asking the metadata store failed", conversation.ledger.ledger_id)
                event = MetadataUnreachable()
            self.post(lambda: self.pass_event(conversation, event))

        self.in_background(work)

    def _write_metadata(self, conversation: AnyConversation, effect: WriteMetadata) -> Event:
        """Record what bookies miss, and then write a ledger's metadata, which may name other bookies (C13)."""
        self.reports.record_before_write(conversation.unrecorded)
        return self._metadata.write(conversation.ledger, effect)

    def in_background(self, work: Callable[[], None]) -> None:
        """Have a worker thread call ``work``; call it in this thread once the driver is closed.

        Threads: any.
        """
        if self.workers.submit(work) is None:
            work()

    def ended(self, conversation: AnyConversation, error: PybkError | None) -> None:
        """Forget a conversation and wake the threads that wait for it; may be repeated."""
        if not conversation.completion.done:
            conversation.completion.error = error
        self.group.finish(conversation.completion)
        conversation.wake_at_ns = None
        self._waited.discard(conversation)  # last, so that after an error it is ended again

    # ---- writers -------------------------------------------------------------------------------------------------

    def attach(self, writer: Writer) -> None:
        """Register a writer, which is referred to weakly; one that appends nothing soon is announced. Threads: any."""
        self._writers[id(writer)] = writer
        if self._closed is not None:  # the close may have missed this writer
            writer.give_up(self._closed, self._closed)
            return
        reference = ref(writer)

        def announce_later() -> None:
            found = reference()
            if found is not None:
                self._lac_unsent[found] = None

        self.post(announce_later)

    def formed(self, writer: Writer) -> None:
        """Have the leader call ``Writer.submit`` in its next step. Threads: any."""
        self._formed[writer] = None

    def active(self, writer: Writer, *, waited: bool) -> None:
        """Note whether a thread or future waits for a writer's appends, and that its LAC may have moved."""
        self._lac_unsent[writer] = None
        if waited:
            self._active[writer] = None
        else:
            self._active.pop(writer, None)

    def report_missing(self, conversation: AnyConversation, effect: UnderReplicated) -> None:
        """Record that a bookie misses entries, before the next metadata that the conversation writes."""
        self.reports.add(conversation.unrecorded, effect)

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self, error: PybkError, of_changes: PybkError) -> None:
        """End all conversations with an error, record which entries bookies miss, and stop.

        Takes up to ``LATE_SECONDS`` if a bookie does not answer, ``REPORT_SECONDS`` if the metadata store does not.

        Args:
            error: The error of reads, and of all that begins from now on.
            of_changes: The error of changes and appends under way; their outcome is unknown.
        """

        def end_all() -> None:
            self._cut_off = of_changes
            self._closed = error  # from now on the wire is not used
            self._end_all(error, of_changes)

        self._end_late_answers()
        while self._closed is None:  # an error in a step may have lost the call
            self.call_as_leader(end_all)
        self.group.stop()
        self.reports.close(REPORT_SECONDS)
        self.workers.close()

    def _end_late_answers(self) -> None:
        """Give bookies a moment to answer adds and fences of closed ledgers, then record the entries they miss (C13).

        Open ledgers are not waited for, because their recovery finds missing entries.
        """
        late: list[int] = []

        def look() -> None:
            late[:] = (
                request_id
                for request_id, (conversation, _) in self._asked.items()
                if conversation.completion.done and isinstance(conversation.machine, WriterMachine | RecoveryMachine)
            )

        def end() -> None:
            look()
            for request_id in late:
                asked = self._asked.pop(request_id)
                self.pass_event(asked.conversation, Unanswered(asked.token))

        self.call_as_leader(look)
        end_at = time.monotonic() + LATE_SECONDS
        while late and time.monotonic() < end_at:
            time.sleep(LATE_SECONDS / _LATE_LOOKS)
            self.call_as_leader(look)
        if late:
            self.call_as_leader(end)

    def after_fork(self) -> None:
        """Disable the driver in a forked child."""
        self.group.after_fork()
