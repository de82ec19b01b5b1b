"""The bookie's side of the protocol: it decides which requests to accept or refuse, and when to answer.

Theory of operation. The thread of ``BookieServer`` calls ``receive`` for each request that has arrived, then ``commit``
once, which syncs once and acknowledges all adds and forces of that round (AB1, K11). Deferred adds are acknowledged
immediately. ``BookieStorage`` keeps the state of each ledger:

- unknown: adds are parked until the metadata store says that the ledger exists (``LookUp``), because an add must not
  create a deleted ledger again (C11); a fence is accepted at once (AB3).
- open: adds of the writer and of recoveries are accepted.
- fenced: only adds of recoveries are accepted (AB2), and no forces (AB5). The fence is durable before its reply (AB3).
- in limbo: entries that were acknowledged may be lost (D6). Adds and forces of writers are refused; a missing entry is
  UNKNOWN and not denied. A recovery that has fenced the ledger gets a denial if only unforced entries may be lost.

A denial promises that the entry was never acknowledged (I17), so staged entries are synced before anything is denied.
The last add confirmed never goes down (I13).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

from pybk.errors import StorageError, StorageRefusedError
from pybk.replication.messages import (
    NEGATIVE,
    Add,
    CompareLacs,
    EntryRun,
    Force,
    LacReply,
    LacsAbove,
    Read,
    ReadLac,
    ReadReply,
    Reply,
    Request,
    Status,
    WakeAt,
    WriteLac,
)

Sender = Any
"""The client that sent a request and waits for the reply; the machine only returns it with the reply."""

_OK: Final = Reply(Status.OK)
_OK_WATCHED: Final = Reply(Status.OK, watched=True)
_new_tuple = tuple.__new__

OpaqueHeader = Any
"""A ledger's immutable metadata, which the machine passes along unread."""


class ReplicaStatus(Protocol):
    """The state of a ledger of which a bookie holds, or may have held, entries or a fence."""

    @property
    def fenced(self) -> bool:
        """True if only recoveries may add entries."""

    @property
    def limbo(self) -> bool:
        """True if acknowledged entries may have been lost; a missing entry is then unknown, not absent."""

    @property
    def gap(self) -> bool:
        """True if the ledger is in limbo and durable entries or a fence may have been lost as well."""

    @property
    def lac(self) -> int:
        """Highest last add confirmed that the bookie received, -1 for none."""


class BookieStorage(Protocol):
    """The ledgers of a bookie. All calls take effect at once; each says what it makes durable."""

    def state(self, ledger_id: int) -> ReplicaStatus | None:
        """Return the state of a ledger; None proves that this bookie never acknowledged an entry or a fence of it."""

    def known_lac(self, ledger_id: int) -> int | None:
        """Return the last add confirmed that is in memory, -1 for a ledger that this bookie does not know.

        None if a higher one may be on the disk, may be unreadable there, or may be lost (D6). Reads nothing.
        """

    def create(self, ledger_id: int, header: OpaqueHeader) -> None:
        """Make a ledger known; durable together with its staged entries."""

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        """Stage entries; they are durable after the next commit.

        Returns:
            ``OK`` if they are staged, or the bookie had them with the same bytes; ``CONFLICT`` if it has one of them
            with other bytes; any other status if they cannot be taken.

        Raises:
            StorageError: They may have been staged in part.
        """

    def commit(self) -> None:
        """Make all staged entries durable.

        Raises:
            StorageError: Nothing that was staged may be acknowledged.
        """

    def fence(self, ledger_id: int, header: OpaqueHeader) -> None:
        """Fence a ledger, also one that was never seen; durable on return.

        Raises:
            StorageError: It may not be durable.
        """

    def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        stride: int,
        bytes_max: int,
        *,
        checked: bool = False,
        recovery: bool = False,
    ) -> tuple[Status, EntryRun | None]:
        """Read entries ``first``, ``first + stride``, … without a gap; ``ReadReply`` has the rules.

        Entries that are staged and not durable are unknown. ``recovery`` is for a recovery that has fenced the ledger.
        """

    def lac_proof(self, ledger_id: int) -> tuple[int, bytes | memoryview] | None:
        """Return id and bytes of the last entry, whose header proves a last add confirmed; None without entries."""

    def lac_packet(self, ledger_id: int) -> tuple[int, bytes] | None:
        """Return the highest last add confirmed that was noted, and its proof; None if none was noted."""

    def note_lac(self, ledger_id: int, lac: int, packet: bytes) -> None:
        """Note a higher last add confirmed, in memory alone."""

    def delete(self, ledger_id: int) -> None:
        """Delete everything of a ledger, its fence included."""

    def drop_entries(self, ledger_id: int) -> None:
        """Delete all entries of a ledger, durably, but not its fence.

        Raises:
            StorageError: Some entries may be left.
        """


class Respond(NamedTuple):
    """Send a reply; everything that it acknowledges is durable.

    Attributes:
        sender: The client that waits for the reply.
        reply: The reply.
    """

    sender: Sender
    reply: Reply | LacReply | ReadReply


@dataclass(frozen=True, slots=True)
class LookUp:
    """Look up whether a ledger exists or was deleted, and pass the answer to ``ledger_looked_up`` (C11).

    Attributes:
        ledger_id: The ledger.
    """

    ledger_id: int


BookieEffect = Respond | LookUp | WakeAt

Receive = Callable[[Sender, Request, OpaqueHeader, int], list[BookieEffect]]


PARKED_BYTES_MAX: Final = 64 << 20
"""Bytes of adds that may wait until it is known whether their ledgers exist; more are refused."""

POLL_NS_MAX: Final = 120_000_000_000
"""The longest wait for a last add confirmed; a client that needs longer gets its reply then, and asks again."""


class _Poll:
    """A long poll: a client waits until a ledger's last add confirmed moves."""

    __slots__ = ("beyond", "ended", "ledger_id", "owner", "sender", "until_ns")

    def __init__(self, sender: Sender, owner: Any, ledger_id: int, beyond: int, until_ns: int) -> None:
        self.sender = sender
        self.owner = owner
        self.ledger_id = ledger_id
        self.beyond = beyond
        self.until_ns = until_ns
        self.ended = False


class _Polls:
    """The long polls, by ledger, by owner and by deadline.

    Cost: Adding and removing one takes the logarithm of their number.
    """

    __slots__ = ("_numbers", "by_ledger", "by_owner", "count", "deadlines")

    def __init__(self) -> None:
        self.by_ledger: dict[int, dict[_Poll, None]] = {}
        self.count = 0
        self.by_owner: dict[Any, dict[_Poll, None]] = {}
        """The polls of each owner."""
        self.deadlines: list[tuple[int, int, _Poll]] = []
        """A heap of polls by their deadlines; ended polls may be among them."""
        self._numbers = count()

    def owned(self, owner: Any) -> int:
        """Return the number of long polls of an owner."""
        return len(self.by_owner.get(owner, ()))

    def add(self, poll: _Poll) -> None:
        """Add a long poll."""
        self.by_ledger.setdefault(poll.ledger_id, {})[poll] = None
        self.by_owner.setdefault(poll.owner, {})[poll] = None
        self.count += 1
        if len(self.deadlines) > 2 * self.count + 64:  # most are answered before their deadline
            self.deadlines = [each for each in self.deadlines if not each[2].ended]
            heapify(self.deadlines)
        heappush(self.deadlines, (poll.until_ns, next(self._numbers), poll))

    def end(self, poll: _Poll) -> None:
        """Remove a long poll."""
        poll.ended = True
        self.count -= 1
        for polls, key in ((self.by_ledger, poll.ledger_id), (self.by_owner, poll.owner)):
            del polls[key][poll]
            if not polls[key]:
                del polls[key]

    def end_all_of(self, owner: Any) -> None:
        """Remove the long polls of an owner."""
        for poll in list(self.by_owner.get(owner, ())):
            self.end(poll)

    def due(self, now_ns: int) -> list[_Poll]:
        """Remove and return the long polls whose deadline has passed."""
        found = []
        while self.deadlines and (self.deadlines[0][2].ended or self.deadlines[0][0] <= now_ns):
            poll = heappop(self.deadlines)[2]
            if not poll.ended:
                self.end(poll)
                found.append(poll)
        return found

    def wake_at(self) -> list[BookieEffect]:
        """Return the effect that wakes the machine at the next deadline; none without long polls."""
        return [WakeAt(self.deadlines[0][0])] if self.deadlines else []


class BookieMachine:
    """Decides the answers of one bookie.

    Requests are taken by ``receive``; those that need a sync are answered by the next ``commit``, which syncs once for
    all of them. The caller has checked that requests name this bookie's instance, that their bytes are sound, and that
    the sender may do what it asks. If the storage fails, the status of the reply says so.

    Args:
        replicas: The ledgers of the bookie.
        polls_max: The most reads of a last add confirmed that may wait; more are answered at once.
        owner_polls_max: The most of one owner that may wait.
        owner_of: Returns the owner of a sender, such as its session; None if all senders have one owner.

    Attributes:
        read_only: Only adds of recoveries are taken.

    Threads: one at a time.
    """

    def __init__(
        self,
        replicas: BookieStorage,
        *,
        polls_max: int = 10_000,
        owner_polls_max: int = 10_000,
        owner_of: Callable[[Sender], Any] | None = None,
    ) -> None:
        self.read_only = False
        self._replicas = replicas
        self.polls_max = polls_max
        """Polls that may wait."""
        self._owner_polls_max = owner_polls_max
        self._owner_of = owner_of
        self.polls = _Polls()
        """The reads of a last add confirmed that wait."""
        self._acks: list[tuple[Sender, int]] = []
        self._dirty: set[int] = set()
        self._doubtful: set[int] = set()
        self._collected: set[int] = set()
        self._dropping: set[int] = set()
        """Ledgers whose drop was announced, and to which nothing was added since (SD3)."""
        self._parked_bytes = 0
        self._parked: dict[int, list[tuple[Sender, Add, OpaqueHeader]]] = {}

    def receive(self, sender: Sender, request: Request, header: OpaqueHeader, now_ns: int) -> list[BookieEffect]:
        """Handle a request.

        Args:
            sender: The client that waits for the reply.
            request: The request.
            header: The ledger's header, for a ledger that this bookie does not know yet.
            now_ns: The time.
        """
        if type(request) is Add:
            return self._add(sender, request, header)
        if type(request) is Read:
            return self._read(sender, request, header)
        if type(request) is ReadLac:
            return self._read_lac(sender, request, header, now_ns)
        if type(request) is WriteLac:
            return self._write_lac(sender, request)
        assert type(request) is Force
        return self._force(sender, request)

    def commit(self) -> list[BookieEffect]:
        """Make staged entries durable if a request waits for that, and then acknowledge them (AB1)."""
        return self._sync() if self._acks else []

    def _sync(self) -> list[BookieEffect]:
        """Make all staged entries durable."""
        acks, self._acks = self._acks, []
        try:
            self._replicas.commit()
        except StorageError as error:
            # The ledgers stay dirty: some entries may still be staged, and are unknown to reads until a sync succeeds.
            reply = Reply(_status_of(error))
            return [Respond(sender, reply) for sender, _ in acks]
        self._dirty.clear()
        polled = self.polls.by_ledger
        done: list[BookieEffect] = []
        for sender, ledger_id in acks:  # a comprehension would be a call
            done.append(_new_tuple(Respond, (sender, _OK_WATCHED if ledger_id in polled else _OK)))
        return done

    def ledger_looked_up(
        self,
        ledger_id: int,
        exists: bool | None,
        now_ns: int,
        *,
        receive: Receive | None = None,
        is_right: Callable[[OpaqueHeader], bool] | None = None,
    ) -> list[BookieEffect]:
        """Handle the requests that waited for the look-up of their ledger.

        Args:
            ledger_id: The ledger.
            exists: Whether the metadata store has it; None if it could not be asked.
            now_ns: The time.
            receive: Takes each of them; None for ``receive`` of the machine.
            is_right: Returns whether a description is that of the ledger in the metadata store; None accepts all.
        """
        parked = self._parked.pop(ledger_id, [])
        self._parked_bytes -= sum(_size_of(request) for _, request, _ in parked)
        if ledger_id in self._collected:
            self._collected.discard(ledger_id)
            exists = False  # the look-up is older than the deletion
        if not exists:
            reply = Reply(Status.UNKNOWN if exists is None else Status.DELETED)
            return [Respond(sender, reply) for sender, _, _ in parked]
        effects: list[BookieEffect] = []
        for sender, request, header in parked:
            if is_right is not None and not is_right(header):
                effects.append(Respond(sender, Reply(Status.UNAUTHORIZED)))
                continue
            if self._replicas.state(ledger_id) is None:
                self._replicas.create(ledger_id, header)
            effects += (receive or self.receive)(sender, request, header, now_ns)
        return effects

    def ledger_deleted(self, ledger_id: int) -> list[BookieEffect]:
        """Delete a ledger, because the metadata store says that it was deleted.

        Args:
            ledger_id: The ledger.
        """
        waiting = [sender for sender, of in self._acks if of == ledger_id]
        self._acks = [ack for ack in self._acks if ack[1] != ledger_id]
        self._dirty.discard(ledger_id)
        self._dropping.discard(ledger_id)
        self._replicas.delete(ledger_id)
        if ledger_id in self._parked:
            self._collected.add(ledger_id)
        polls = list(self.polls.by_ledger.get(ledger_id, ()))
        for poll in polls:
            self.polls.end(poll)
        effects: list[BookieEffect] = [Respond(sender, Reply(Status.DELETED)) for sender in waiting]
        return effects + [Respond(poll.sender, LacReply(Status.DELETED)) for poll in polls]

    def announce_drop(self, ledger_id: int) -> bool:
        """Note from now on whether entries are added to a ledger whose surplus copy is to be dropped (SD3).

        A restart of the bookie ends that, because it makes another machine.

        Returns:
            Whether the machine notes it; False if the ledger is unknown or in limbo.
        """
        state = self._replicas.state(ledger_id)
        if state is None or state.limbo:
            return False
        self._dropping.add(ledger_id)
        return True

    def drop_entries(self, ledger_id: int) -> tuple[bool, list[BookieEffect]]:
        """Delete the entries of a ledger, and keep its fence, if nothing was added since ``announce_drop`` (SD3, SD5).

        Returns:
            Whether they were deleted, durably, and the effects to perform.

        Raises:
            StorageError: Some entries may be left.
        """
        if ledger_id not in self._dropping:
            return False, []
        self._dropping.discard(ledger_id)
        effects = self._sync() if ledger_id in self._dirty else []  # of adds that were taken before the announcement
        self._replicas.drop_entries(ledger_id)
        return True, effects

    def woken(self, now_ns: int) -> list[BookieEffect]:
        """Answer the long polls whose deadline has passed.

        Args:
            now_ns: The time.
        """
        due: dict[int, list[_Poll]] = {}
        for poll in self.polls.due(now_ns):
            due.setdefault(poll.ledger_id, []).append(poll)
        effects: list[BookieEffect] = []
        for ledger_id, polls in due.items():
            reply = self._lac_reply(ledger_id, self._replicas.state(ledger_id))
            effects += [Respond(poll.sender, reply) for poll in polls]
        return effects + self.polls.wake_at()

    def owner_ended(self, owner: Any) -> None:
        """Drop the long polls of an owner that has disconnected."""
        self.polls.end_all_of(owner)

    # ---- requests --------------------------------------------------------------------------------------------------

    def _add(self, sender: Sender, request: Add, header: OpaqueHeader) -> list[BookieEffect]:
        """Stage entries, or refuse them (AB1, AB2)."""
        ledger_id = request.ledger_id
        state = self._replicas.state(ledger_id)
        if not request.recovery and (refused := self._refused(state)) is not None:
            return [Respond(sender, Reply(refused))]
        if state is None:
            # An add never creates a ledger that was deleted (C11).
            size = _size_of(request)
            if self._parked_bytes + size > PARKED_BYTES_MAX:
                return [Respond(sender, Reply(Status.REFUSED))]
            self._parked_bytes += size
            parked = self._parked.setdefault(ledger_id, [])
            parked.append((sender, request, header))
            return [LookUp(ledger_id)] if len(parked) == 1 else []
        self._dirty.add(ledger_id)  # even if an error follows, because some of the runs may have been staged
        self._dropping.discard(ledger_id)
        for run in request.runs:
            try:
                status = self._replicas.stage(ledger_id, run, not request.deferred, recovery=request.recovery)
            except StorageError as error:
                status = _status_of(error)
            if status is not Status.OK:
                return [Respond(sender, Reply(status))]
        effects = self._note_lac(ledger_id, state.lac, request.lac, b"")
        if request.deferred:
            effects.append(Respond(sender, Reply(Status.OK, ledger_id in self.polls.by_ledger)))
        else:
            self._acks.append((sender, ledger_id))
        return effects

    def _refused(self, state: ReplicaStatus | None) -> Status | None:
        """Return the status with which an add of a writer is refused, None if it is accepted."""
        if state is not None and state.fenced:
            return Status.FENCED
        if state is not None and state.limbo:
            return Status.LIMBO
        return Status.READ_ONLY if self.read_only else None

    def _fence(self, ledger_id: int, header: OpaqueHeader) -> tuple[bool, list[BookieEffect]]:
        """Fence durably after all earlier requests, also if read-only (K8), and also an unknown ledger (AB3).

        Returns:
            Whether it is fenced, and the effects to perform.
        """
        state = self._replicas.state(ledger_id)
        if state is not None and state.fenced and ledger_id not in self._doubtful:
            return True, []
        effects = self._sync() if ledger_id in self._dirty else []
        self._doubtful.add(ledger_id)
        try:
            self._replicas.fence(ledger_id, header)
        except StorageError:
            return False, effects
        self._doubtful.discard(ledger_id)
        return True, effects

    def _read(self, sender: Sender, request: Read, header: OpaqueHeader) -> list[BookieEffect]:
        """Read entries, after a fence if the request has the fence flag (AB4)."""
        effects: list[BookieEffect] = []
        ledger_id = request.ledger_id
        before = self._replicas.state(ledger_id)
        if request.fence:
            fenced, effects = self._fence(ledger_id, header)
            if not fenced:
                return [*effects, Respond(sender, ReadReply(Status.UNKNOWN))]
        if before is None:
            return [*effects, Respond(sender, ReadReply(Status.NO_SUCH_LEDGER))]
        status, run = self._read_entries(request)
        if status is not Status.OK and ledger_id in self._dirty:
            effects += self._sync()  # the missing entry may be staged and not durable yet
            status, run = self._read_entries(request)
        if before.limbo and status in NEGATIVE and (before.gap or not request.fence):
            status = Status.UNKNOWN  # D6: an entry that was never forced will never be confirmed after the fence
        reply = _new_tuple(ReadReply, (status, run, before.lac, False))
        effects.append(_new_tuple(Respond, (sender, reply)))
        return effects

    def _read_entries(self, request: Read) -> tuple[Status, EntryRun | None]:
        """Read from the storage; an entry that cannot be read is unknown, and not absent (I17)."""
        try:
            return self._replicas.read(
                request.ledger_id,
                request.first,
                request.last,
                request.stride,
                request.bytes_max,
                checked=request.checked,
                recovery=request.fence,
            )
        except StorageError:
            return Status.UNKNOWN, None

    def _read_lac(self, sender: Sender, request: ReadLac, header: OpaqueHeader, now_ns: int) -> list[BookieEffect]:
        """Reply with the last add confirmed, after a fence if requested; or keep a long poll until the LAC moves."""
        effects: list[BookieEffect] = []
        ledger_id = request.ledger_id
        before = self._replicas.state(ledger_id)
        if request.fence:
            fenced, effects = self._fence(ledger_id, header)
            if not fenced:
                return [*effects, Respond(sender, LacReply(Status.UNKNOWN))]
        elif before is not None and before.gap:
            # D6: the LAC that it received may be lost; a recovery, which fences, decides by the entries themselves.
            return [Respond(sender, LacReply(Status.UNKNOWN))]
        lac = -1 if before is None else before.lac
        beyond = request.beyond
        owner = None if self._owner_of is None else self._owner_of(sender)
        if (
            beyond is None
            or lac > beyond
            or request.wait_ns <= 0
            or self.polls.count >= self.polls_max
            or self.polls.owned(owner) >= self._owner_polls_max
        ):
            return [*effects, Respond(sender, self._lac_reply(ledger_id, before))]
        self.polls.add(_Poll(sender, owner, ledger_id, beyond, now_ns + min(request.wait_ns, POLL_NS_MAX)))
        return effects + self.polls.wake_at()

    def compare_lacs(self, request: CompareLacs) -> LacsAbove:
        """Return the ledgers whose last add confirmed is above the client's, or may be (``known_lac``).

        Cost: A look-up in memory for each ledger.
        """
        above = array("q")
        for ledger_id, lac in zip(request.ledger_ids, request.lacs, strict=True):
            known = self._replicas.known_lac(ledger_id)
            if known is None or known > lac:
                above.append(ledger_id)
        return LacsAbove(above)

    def _lac_reply(self, ledger_id: int, state: ReplicaStatus | None) -> LacReply:
        """Return the answer to ``ReadLac``, with its proof."""
        if state is None:
            return LacReply(Status.NO_SUCH_LEDGER)
        noted = self._replicas.lac_packet(ledger_id)
        try:
            proof = self._replicas.lac_proof(ledger_id)
        except StorageError:
            return LacReply(Status.UNKNOWN)
        reply = LacReply(Status.OK, state.lac, b"" if noted is None else noted[1])
        return reply if proof is None else replace(reply, entry_id=proof[0], entry=proof[1])

    def _force(self, sender: Sender, request: Force) -> list[BookieEffect]:
        """Make acknowledged deferred entries durable; refused in limbo, where some of them may be lost (D6).

        It is also refused if the ledger is fenced: a recovery may have been denied a lost entry, and the limbo may have
        ended since.
        """
        state = self._replicas.state(request.ledger_id)
        if state is not None and state.fenced:
            return [Respond(sender, Reply(Status.FENCED))]
        if state is not None and state.limbo:
            return [Respond(sender, Reply(Status.LIMBO))]
        self._acks.append((sender, request.ledger_id))
        return []

    def _write_lac(self, sender: Sender, request: WriteLac) -> list[BookieEffect]:
        """Note the last add confirmed of a ledger that this bookie holds."""
        state = self._replicas.state(request.ledger_id)
        effects: list[BookieEffect] = []
        if state is not None:
            effects += self._note_lac(request.ledger_id, state.lac, request.lac, request.packet)
        return [*effects, Respond(sender, Reply(Status.OK, request.ledger_id in self.polls.by_ledger))]

    # ---- last add confirmed ----------------------------------------------------------------------------------------

    def _note_lac(self, ledger_id: int, before: int, lac: int, packet: bytes) -> list[BookieEffect]:
        """Raise the last add confirmed, never lower it (I13), and answer the long polls that waited for that."""
        if lac > before or (packet and lac == before):  # a packet may prove a LAC that was noted before without proof
            self._replicas.note_lac(ledger_id, lac, packet)
        if lac <= before:
            return []
        return self._wake(ledger_id) if ledger_id in self.polls.by_ledger else []

    def _wake(self, ledger_id: int) -> list[BookieEffect]:
        """Answer the long polls that wait for the ledger's present last add confirmed."""
        state = self._replicas.state(ledger_id)
        lac = -1 if state is None else state.lac
        due = [poll for poll in self.polls.by_ledger[ledger_id] if lac > poll.beyond]
        if not due:
            return []
        reply = self._lac_reply(ledger_id, state)
        for poll in due:
            self.polls.end(poll)
        return [Respond(poll.sender, reply) for poll in due]


def _size_of(request: Add) -> int:
    return sum(sum(run.sizes) for run in request.runs)


def _status_of(error: StorageError) -> Status:
    """Return the status of the reply for an error of the storage."""
    return Status.READ_ONLY if isinstance(error, StorageRefusedError) else Status.UNKNOWN
