"""A running bookie: one thread receives requests, stores their entries with one sync for all, and answers.

Theory of operation. The serving thread repeats ``_turn``: receive the requests that have arrived, run the calls that
other threads posted, pass each request to ``BookieMachine``, commit once, send the replies. Only this thread calls the
machine. Other threads do work that may block: two workers ask the metadata store, one moves ledgers between tiers, and
the keeper (``keeper.py``) registers the bookie, records its durable position and drops deleted ledgers. They return
results by ``post``. A request that fails unexpectedly is refused, counted and logged, and does not end the thread. A
store that failed answers, but takes nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, lru_cache, partial
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, Self

from pybk.bookie.advertising import advertised, check_reachable
from pybk.bookie.append_latency import AppendLatency
from pybk.bookie.copy_reads import CopyReads
from pybk.bookie.keeper import Keeper
from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.metadata_age import adopt_epoch, check_age
from pybk.bookie.own_position import find_losses
from pybk.bookie.startup import accepted_losses, open_replicas, put_all_in_limbo, report_limbo, validate_cookie
from pybk.errors import (
    CookieError,
    NoSuchLedgerError,
    PybkError,
    StorageError,
    StorageRefusedError,
    UsageError,
)
from pybk.flags import is_bookie_record
from pybk.health import Health, bookie_health
from pybk.ledger.ledger_metadata import Bookie
from pybk.log_events import log_event
from pybk.metadata.ledger_description import LedgerDescription
from pybk.metrics import (
    BOOKIE_REJECTED,
    BOOKIE_REQUEST,
    BOOKIE_TURN,
    MEMBER_RECOVERIES,
    REQUEST_FAULTS,
    SALVAGES,
    SESSIONS,
    Gauge,
    MetricKey,
)
from pybk.replication.bookie import BookieEffect, BookieMachine, LookUp, Respond
from pybk.replication.fragments import fragment_end
from pybk.replication.locations import Location
from pybk.replication.messages import (
    NEGATIVE,
    Add,
    AskWriter,
    CompareLacs,
    EntryRun,
    Force,
    LacReply,
    Move,
    Read,
    ReadLac,
    ReadReply,
    Reply,
    Request,
    Status,
    WriteLac,
)
from pybk.threads import Workers, start_thread
from pybk.transport.cluster_keys import HeldKeys, proves_right
from pybk.transport.codec import Answer, Authorize, AuthorizeMember, LacPacket, WireReply, WireRequest
from pybk.transport.logging_limit import LogLimit
from pybk.transport.server import Peer, Server

if TYPE_CHECKING:
    from pybk.bookie.replicas import Replicas
    from pybk.config import StoreConfig
    from pybk.flags import LedgerType, StorageHint
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metrics import Metrics, MetricsScope

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

_WAIT_MS: Final = 1_000
DESCRIPTIONS: Final = 4096
"""The number of ledgers whose descriptions are kept."""

_CACHED_BYTES_MAX: Final = 4096

Effects = list[BookieEffect]

ASIDE_BYTES_MAX: Final = 64 << 20
"""Bytes of requests that may wait for a look-up in the metadata store; further requests are refused."""

SESSION_POLLS_MAX: Final = 1024
"""Long polls that one session may have open; further ones are answered at once."""

SWITCH_SECONDS: Final = 0.0001
"""The time for which a thread of a bookie's process may keep the interpreter while another one wants it.

Python's default, 5 ms, is several times what an append takes, and the serving thread waits for threads that repair.
"""

_OPS: Final[Mapping[type, str]] = {
    Add: "add",
    Read: "read",
    ReadLac: "read_lac",
    Force: "force",
    LacPacket: "write_lac",
    Move: "move",
    AskWriter: "ask_writer",
    CompareLacs: "compare_lacs",
}
"""The operations, as metrics have them, by the type of request; the server answers all other types itself."""

_COMMITTED: Final = frozenset({Add, Force})
"""The requests that are answered after the commit of their turn."""

_DONE: Final = NEGATIVE | {Status.OK, Status.NO_WRITER}
"""The statuses of replies that answer what was asked."""

_UNAUTHORIZED: Final = Reply(Status.UNAUTHORIZED)
_REFUSED: Final = Reply(Status.REFUSED)
_WRITER: Final = Reply(Status.OK)
_NO_WRITER: Final = Reply(Status.NO_WRITER)
_packet_lac = Struct(">8xq").unpack_from


class BookieServer:
    """One bookie of a cluster, serving since ``open`` returned.

    Attributes:
        bookie: Its name and instance.
        addresses: The addresses that it registered, at which clients connect.
        replicas: Its replicas of ledgers.
        machine: The protocol's state machine. Used by the serving thread alone.
        server: The sockets.
        stopping: Set to end the serving.
        keeper: Registers the bookie, and looks after what no request does.
        copy_reads: Answers the reads of re-replication and checks, at a bounded rate.
        append_latency: The latencies of writers' adds.

    Threads: any thread may call. Its own threads are in the theory of operation above.
    """

    turned_ns = 0
    """The time when the serving thread last ended a turn (monotonic clock); at least each second while it works."""
    last_add_ns = 0
    """The time when an add of a writer last arrived, by the monotonic clock."""

    @classmethod
    def open(
        cls,
        root: str,
        listen: Sequence[str],
        *,
        metadata: ClusterMetadata,
        keys: HeldKeys | None,
        config: StoreConfig,
        tiers: Mapping[StorageHint, str | Sequence[str]] | None = None,
        bookie_id: str | None = None,
        rack: str = "",
        moved: bool = False,
        replace_lost: bool = False,
        advertise: Sequence[str] = (),
        advertise_check: bool = True,
        metrics: Metrics | None = None,
    ) -> Self:
        """Open a bookie's directory, which is created if it does not exist, listen, and register.

        If durable data are damaged or missing, the bookie starts with all its ledgers in limbo, because its peers have
        the rest (``startup.py``).

        Args:
            root: The directory.
            listen: Addresses; unless ``advertise`` names others, the first is registered.
            metadata: The cluster's metadata.
            keys: The cluster's keys, which follow its secrets; None without a secret.
            config: As for a store.
            tiers: As for a store.
            bookie_id: Its name in the cluster; None keeps the directory's, or makes one for a new directory.
            rack: Its location, ``zone/rack/host``, for placement; it is registered, and kept in the cookie.
            moved: The directory was moved since the last start, not copied, so another inode is accepted.
            replace_lost: Claim the name of a bookie whose directory is lost for good.
            advertise: Addresses to register instead of the bound ones.
            advertise_check: Before it registers, check that the bookie can reach itself at the first registered
                address. False for a bookie whose network lets only others connect to that.
            metrics: The counters to use.

        Raises:
            CookieError: The directory is another bookie's, of another cluster, a copy, or older than the last start; or
                the bookie was removed from the cluster.
            UsageError: ``rack`` is not a location.
            PybkError: Opening the store or calling the metadata store failed.
        """
        location = str(Location.parse(rack))
        replicas = open_replicas(root, config=config, tiers=tiers, metrics=metrics)
        try:
            known = replicas.identity
            epoch = check_age(replicas, metadata)
            losses = accepted_losses(replicas.store)
            if known is not None:
                losses += find_losses(replicas.store, metadata, Bookie(known.bookie_id, known.instance), moved=moved)
            bookie = validate_cookie(
                replicas, metadata, keys, bookie_id, moved=moved, replace_lost=replace_lost, location=location
            )
            lost = replicas.store.salvage is not None or bool(losses)
            if lost:
                put_all_in_limbo(replicas, metadata, bookie, losses)
            else:
                report_limbo(replicas, bookie)
            if epoch is None:  # the name of another instance was taken, with replace_lost
                epoch = metadata.grow_epoch()
            adopt_epoch(replicas, metadata, bookie, epoch, lost=lost)
            return cls(replicas, bookie, listen, metadata, keys, rack, advertise, advertise_check)
        except BaseException:
            replicas.close()
            raise

    def __init__(
        self,
        replicas: Replicas,
        bookie: Bookie,
        listen: Sequence[str],
        metadata: ClusterMetadata,
        keys: HeldKeys | None,
        rack: str,
        advertise: Sequence[str] = (),
        advertise_check: bool = True,
    ) -> None:
        self.replicas: Final = replicas
        self.bookie: Final = bookie
        self._metadata = metadata
        self.keeper: Final = Keeper(self, metadata, rack)
        self.machine = BookieMachine(replicas, owner_polls_max=SESSION_POLLS_MAX, owner_of=_peer_of)
        self.machine.read_only = self.keeper.state.read_only
        self.final: dict[int, tuple[int, LedgerHeader | None]] = {}
        """A cache, by ledger, of the entry up to which it is final, and its header. A final end never moves back."""
        self._described = lru_cache(DESCRIPTIONS)(self._description)
        self.server = Server(listen, bookie.instance, keys, authorize=self._authorize)
        self.wake_ns: int | None = None
        """The earliest time that the machine asked to be woken at; None for none. Used by the serving thread alone."""
        self.posted: deque[Callable[[], list[BookieEffect]]] = deque()
        """Calls for the serving thread. Any thread appends; the serving thread alone removes."""
        self.stopping = threading.Event()
        self._waking = threading.Lock()
        """Guards ``_closed`` (the sockets are closed); with it no thread wakes a server that another one has closed."""
        self._closed = False
        self._closing = threading.Lock()
        """Guards ``_ended``, which says that ``close`` was called, and lets a second ``close`` wait for the first."""
        self._ended = False
        self._aside_bytes = 0
        """Bytes of requests that wait for the metadata store, ≤ ``ASIDE_BYTES_MAX``. For the serving thread alone."""
        self.copy_reads: Final[CopyReads] = CopyReads(self._read_for_copy)
        self.append_latency: Final = AppendLatency()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="pybk-bookie", daemon=True)
        with ExitStack() as undo:
            undo.callback(self.server.close)
            self.addresses: Final = advertised(listen, self.server.addresses, advertise)
            self._looking = Workers(2, "pybk-bookie-lookup")
            undo.callback(self._looking.close)
            self._moving = Workers(1, "pybk-bookie-move")
            undo.callback(self._moving.close)
            start_thread(self._thread)
            undo.pop_all()
        try:
            self._check_reachable(keys, advertise_check)
            self.keeper.begin()
        except BaseException:
            self.keeper.close()
            self.keeper.unregister()
            self._stop_serving()
            raise
        metrics = replicas.store.metrics
        metrics.add(SALVAGES, int(replicas.store.salvage is not None))
        metrics.add_gauges(self._gauges)

    def _check_reachable(self, keys: HeldKeys | None, advertise_check: bool) -> None:
        """Check that clients can reach the bookie at the address it will register, or log that this was not checked."""
        address = self.addresses[0]
        if advertise_check:
            check_reachable(self.bookie, address, keys, self.server.public_key)
            return
        logger.warning(
            "bookie %s registers %s, and did not check that it can be reached there",
            self.bookie,
            address,
            extra=log_event("bookie.unchecked_address", bookie=str(self.bookie), address=address),
        )

    @cached_property
    def _meters(self) -> Mapping[type, MetricsScope]:
        """The meters that count requests, by their type; used by the serving thread alone."""
        metrics = self.replicas.store.metrics
        return {kind: metrics.scope(labels=(("op", op),)) for kind, op in _OPS.items()}

    @cached_property
    def _turns(self) -> MetricsScope:
        """The meters that count turns; used by the serving thread alone."""
        return self.replicas.store.metrics.scope()

    @property
    def serving(self) -> bool:
        """True if it answers requests; False after a failure, or once another process has its name; see the log."""
        return self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the serving; None while it serves, and after an ordinary close."""
        return self._error

    # ---- serving -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Body of the serving thread."""
        try:
            while not self.stopping.is_set():
                self._turn()
        except BaseException as error:
            self._error = error
            fields = {"bookie": str(self.bookie)}
            logger.exception("bookie %s serves no more", self.bookie, extra=log_event("bookie.failed", **fields))
            self._stop()
        finally:
            if self._error is not None:
                self._close_server()  # so that clients do not wait for replies that will never come

    def _turn(self) -> None:
        """Receive the requests that have arrived, make their entries durable with one sync, and reply."""
        asked_ns = time.monotonic_ns()
        waits = self.posted or self.wake_ns is not None or self.copy_reads.due_ns is not None
        arrived = self.server.receive(self.timeout_ms() if waits else _WAIT_MS)
        keeper = self.keeper
        if keeper.registered is not None and keeper.registered.superseded:
            raise CookieError(f"another process serves as bookie {self.bookie} now; this one answers nothing more")
        now_ns = time.monotonic_ns()
        commits = False
        while self.posted:
            commits = True  # noted with each call, because other threads post at any time
            self._do(self.posted.popleft())
        works = commits or bool(arrived)
        machine = self.machine
        if self.server.ended:
            for ended in self.server.take_ended():
                machine.owner_ended(ended)
        adds = 0
        for peer, request_id, message in arrived:
            adds += type(message) is Add and not message.recovery
            self._take(peer, request_id, message, now_ns)
            if type(message) in _COMMITTED:
                commits = True
            else:
                self._meters[type(message)].collect(BOOKIE_REQUEST, time.monotonic_ns() - now_ns)
        keeper.served += len(arrived)
        if commits:
            self._perform(machine.commit())
        if works and keeper.rests:
            keeper.wake()
        while (due_ns := self.copy_reads.due_ns) is not None and due_ns <= now_ns:
            self._do(partial(self.copy_reads.due, now_ns))
        if self.wake_ns is not None and now_ns >= self.wake_ns:
            self.wake_ns = None
            self._perform(machine.woken(now_ns))
        took_ns = time.monotonic_ns() - now_ns
        self.turned_ns = now_ns + took_ns
        if adds:
            self.last_add_ns = now_ns
            self.append_latency.note_adds(adds, now_ns - asked_ns, took_ns)
        self.append_latency.before_ns = took_ns
        if arrived:
            self._turns.collect(BOOKIE_TURN, took_ns)
        if commits:
            for _, _, message in arrived:
                if type(message) in _COMMITTED:
                    self._meters[type(message)].collect(BOOKIE_REQUEST, took_ns)

    def _take(self, peer: Peer, request_id: int, message: WireRequest, now_ns: int) -> None:
        """Pass a request to the machine, or to a worker if it must wait for the metadata store.

        An unexpected error refuses this request alone, is counted and logged. It never hides a failed write, because
        the store turns that into ``StorageFailedError``, after which it accepts no more adds.
        """
        try:
            if type(message) is Read and not message.fence and not message.checked:
                self._perform(self.machine.receive((peer, request_id), message, None, now_ns))
            elif type(message) is Add and peer.may_write(message.ledger_id):
                self._pass(peer, request_id, message, now_ns)
            elif type(message) is CompareLacs:
                self._reply(peer, request_id, self.machine.compare_lacs(message))
            else:
                self._take_other(peer, request_id, _request(message), now_ns)
        except Exception as error:  # noqa: BLE001  # the barrier: no request may end the serving thread
            self._count_fault(error)
            self._reply(peer, request_id, _REFUSED)

    def _take_other(self, peer: Peer, request_id: int, request: Request, now_ns: int) -> None:
        """Take a request that may have to be refused, or to wait."""
        if not self._may(peer, request):
            self.without_right(peer, request_id, request, now_ns)
        elif isinstance(request, Read | ReadLac) and request.fence and self._is_new(request.ledger_id):
            self.look_aside(peer, request_id, request, self._check_fence)
        elif isinstance(request, Move):
            self._moving.submit(partial(self.move, peer, request_id, request))
        elif isinstance(request, AskWriter):
            if request.leaves:
                peer.writes.discard(request.ledger_id)
            found = self.server.has_writer(request.ledger_id)
            self._reply(peer, request_id, _WRITER if found else _NO_WRITER)
        elif isinstance(request, Read) and request.checked and not request.fence:
            self._perform(self.copy_reads.read((peer, request_id), request, now_ns))
        else:
            self._pass(peer, request_id, request, now_ns)

    def _pass(self, peer: Peer, request_id: int, request: Request, now_ns: int) -> None:
        """Pass a request that the session may make to the machine."""
        ledger_id = request.ledger_id
        right = peer.rights.get(ledger_id)
        description = None
        if right is not None:
            description = self._describe(right.description)
            if (type(request) is Add and not request.recovery) or type(request) is WriteLac:
                peer.writes.add(ledger_id)  # readers and recoveries send neither
        effects = self.machine.receive((peer, request_id), request, description, now_ns)
        if effects:
            self._perform(effects)

    def _read_for_copy(self, sender: tuple[Peer, int], request: Read, now_ns: int) -> list[BookieEffect]:
        """Have the machine answer a read of a client that copies or checks entries."""
        return self.machine.receive(sender, request, None, now_ns)

    def _may(self, peer: Peer, request: Request) -> bool:
        """Return whether a session may make a request: all may read, a member may recover, an owner may do anything."""
        if not _needs_right(request):
            return True
        right = peer.rights.get(request.ledger_id)
        if right is None or right.whole:
            return right is not None
        recovers = isinstance(request, Read | ReadLac) or (
            isinstance(request, Add) and request.recovery and not request.deferred
        )
        return recovers and self._lets_members_recover()

    def _lets_members_recover(self) -> bool:
        """Return whether members may recover ledgers without their passwords, as the cluster's settings are now."""
        try:
            return self.server.member_key is not None and self._metadata.current_settings().repair.recover_abandoned
        except PybkError as error:
            logger.warning("a member's recovery is refused, because the settings cannot be read: %s", error)
            return False

    def _receive(
        self, sender: tuple[Peer, int], request: Request, description: LedgerHeader | None, now_ns: int
    ) -> list[BookieEffect]:
        """Pass a request that waited for the metadata store to the machine, with the same barrier as ``_take``."""
        try:
            return self.machine.receive(sender, request, description, now_ns)
        except Exception as error:  # noqa: BLE001  # the barrier, as in ``_take``
            self._count_fault(error)
            return [Respond(sender, _REFUSED)]

    def _do(self, call: Callable[[], list[BookieEffect]]) -> None:
        """Run a call that another thread posted; an unexpected error is counted and logged."""
        try:
            self._perform(call())
        except Exception as error:  # noqa: BLE001  # the barrier, as in ``_take``
            self._count_fault(error)

    def _count_fault(self, error: Exception) -> None:
        """Count and log an error that no request should be able to cause."""
        self.replicas.store.metrics.add(REQUEST_FAULTS)
        logger.error("bookie %s refused a request that it failed at; this is a defect", self.bookie, exc_info=error)

    def without_right(self, peer: Peer, request_id: int, request: Request, now_ns: int) -> None:
        """Refuse a client without the ledger's password, except that re-replication may add copies of final entries.

        Such copies cannot extend the ledger, because the metadata store says that the ledger, or their fragment, ends
        at or after them. Readers verify them by their digests.
        """
        if not isinstance(request, Add) or not request.recovery:
            self._reply(peer, request_id, _UNAUTHORIZED)
            return
        final = self.final.get(request.ledger_id)
        if final is not None and all(run.last <= final[0] for run in request.runs):
            self._perform(self._receive((peer, request_id), request, final[1], now_ns))
            return
        self.look_aside(peer, request_id, request, self._look_for_end)

    def look_aside(
        self, peer: Peer, request_id: int, request: Request, look: Callable[[Peer, int, Any], Callable[[], Effects]]
    ) -> None:
        """Let a worker look up a value in the metadata store for a request, and then continue with the request.

        ``look`` runs in the worker and returns a call that the serving thread makes afterwards. If more than
        ``ASIDE_BYTES_MAX`` would wait, the request is refused.
        """
        size = 256 + (sum(map(sum, (run.sizes for run in request.runs))) if isinstance(request, Add) else 0)
        if self._aside_bytes + size > ASIDE_BYTES_MAX:
            self._reply(peer, request_id, _REFUSED)
            return
        self._aside_bytes += size

        def aside() -> None:
            then = look(peer, request_id, request)

            def done() -> Effects:
                self._aside_bytes -= size
                return then()

            self.post(done)

        self._looking.submit(aside)

    def _is_new(self, ledger_id: int) -> bool:
        """Return whether the bookie has no header of a ledger, with which it could compare a client's description."""
        state = self.replicas.state(ledger_id)
        return state is None or state.header is None

    def _check_fence(self, peer: Peer, request_id: int, request: Read | ReadLac) -> Callable[[], Effects]:
        """Check a right to fence against the metadata store; runs in a worker.

        The client proved the right by a description that it sent. For a ledger that is new here it may have forged
        one, with a verifier of its own.
        """
        ledger_id, right = request.ledger_id, peer.rights.get(request.ledger_id)
        encoded = b"" if right is None else right.description
        status = Status.OK
        try:
            metadata = self._metadata.read_ledger(ledger_id).metadata
            if not self._is_description(encoded, metadata):
                logger.warning("a client's right to ledger %d was refused: the description is not its own", ledger_id)
                status = Status.UNAUTHORIZED
        except NoSuchLedgerError:
            status = Status.DELETED
        except Exception as error:  # noqa: BLE001  # the client waits for a reply, whatever failed
            logger.warning("the description of ledger %d cannot be checked: %s", ledger_id, error)
            status = Status.UNKNOWN

        def answer() -> Effects:
            if status is Status.OK:
                return self._receive((peer, request_id), request, self._describe(encoded), time.monotonic_ns())
            if status is Status.UNAUTHORIZED:
                peer.revoke(ledger_id)
            return [Respond((peer, request_id), Reply(status))]

        return answer

    def _is_description(self, encoded: bytes, metadata: LedgerMetadata) -> bool:
        """Return whether a client's description, with its verifier, equals the one in the metadata store."""
        described = self._metadata.check_description(encoded, where=f"ledger {metadata.ledger_id}")
        return described == LedgerDescription.of(metadata)

    def _look_for_end(self, peer: Peer, request_id: int, request: Add) -> Callable[[], Effects]:
        """Look up to which entry a ledger is final, for copies of its entries; runs in a worker."""
        ledger_id = request.ledger_id
        final: tuple[int, LedgerHeader | None] = -1, None
        try:
            metadata = self._metadata.read_ledger(ledger_id).metadata
            last = fragment_end(metadata, len(metadata.fragments) - 1)
            if last is None:
                last = metadata.fragments[-1].first_entry_id - 1
            encoded = self._metadata.describe(metadata)
            _check_type(metadata.ledger_id, metadata.ledger_type)
            final = last, self._describe(encoded)
        except Exception as error:  # noqa: BLE001  # as above
            logger.warning("a copy of ledger %d was refused: %s", ledger_id, error)

        def answer() -> Effects:
            if final[1] is None or any(run.last > final[0] for run in request.runs):
                return [Respond((peer, request_id), _UNAUTHORIZED)]
            if len(self.final) >= DESCRIPTIONS:
                self.final.clear()
            self.final[ledger_id] = final
            return self._receive((peer, request_id), request, final[1], time.monotonic_ns())

        return answer

    def timeout_ms(self) -> int:
        """Return the longest wait of the serving thread for messages."""
        if self.posted:
            return 0
        due_ns, wake_ns = self.copy_reads.due_ns, self.wake_ns
        if due_ns is None and wake_ns is None:
            return _WAIT_MS
        first_ns = min(each for each in (due_ns, wake_ns) if each is not None)
        return max(0, min(_WAIT_MS, (first_ns - time.monotonic_ns()) // 1_000_000 + 1))

    def _reply(self, peer: Peer, request_id: int, reply: WireReply) -> None:
        """Send a reply; one that does not do what was asked is counted."""
        if reply.status not in _DONE:
            self.replicas.store.metrics.add(BOOKIE_REJECTED, labels=(("reason", reply.status.name.lower()),))
        self.server.reply(peer, request_id, reply)

    def _perform(self, effects: Iterable[BookieEffect]) -> None:
        for effect in effects:
            if type(effect) is Respond:
                peer, request_id = effect.sender
                reply = effect.reply
                if (
                    type(reply) is ReadReply
                    and reply.status is Status.OK
                    and reply.run is not None
                    and len(reply.run.sizes) == 1
                ):
                    self.server.reply_entry(peer, request_id, reply.run)
                else:
                    self._reply(peer, request_id, reply if type(reply) is Reply else _wire(reply))
            elif type(effect) is LookUp:
                self._looking.submit(partial(self._look_up, effect.ledger_id))
            else:
                wake_ns = effect.time_ns  # type: ignore[union-attr]
                self.wake_ns = wake_ns if self.wake_ns is None else min(self.wake_ns, wake_ns)

    def move(self, peer: Peer, request_id: int, request: Move) -> None:
        """Move this bookie's entries of a ledger to another tier; runs in the worker for moves."""
        status = Status.OK
        try:
            self.replicas.move(request.ledger_id, request.tier)
        except Exception as error:  # noqa: BLE001  # as above
            logger.warning("ledger %d cannot be moved to %s: %s", request.ledger_id, request.tier.value, error)
            status = Status.READ_ONLY if isinstance(error, StorageRefusedError) else Status.UNKNOWN
        self.post(lambda: [Respond((peer, request_id), Reply(status))])

    def _look_up(self, ledger_id: int) -> None:
        """Look up whether a ledger exists that is new to this bookie (C11); runs in a worker."""
        exists: bool | None
        metadata: LedgerMetadata | None = None
        try:
            metadata = self._metadata.read_ledger(ledger_id).metadata
            exists = True
        except NoSuchLedgerError:
            exists = False
        except Exception as error:  # noqa: BLE001  # the parked requests wait for a reply, whatever failed
            logger.warning("whether ledger %d exists cannot be found out: %s", ledger_id, error)
            exists = None

        def is_right(description: LedgerHeader | None) -> bool:
            # A client may forge a description with its own verifier; only the metadata store shows that.
            assert metadata is not None, "asked of ledgers that exist"
            return description is not None and self._is_description(description.encoded, metadata)

        def answer() -> Effects:
            now_ns = time.monotonic_ns()
            return self.machine.ledger_looked_up(ledger_id, exists, now_ns, receive=self._receive, is_right=is_right)

        self.post(answer)

    def wake(self) -> None:
        """Wake the serving thread, unless its sockets are closed; any thread may call it."""
        with self._waking:
            if not self._closed:
                self.server.wake()

    def _close_server(self) -> None:
        with self._waking:
            if not self._closed:
                self._closed = True
                self.server.close()

    def post(self, call: Callable[[], list[BookieEffect]]) -> None:
        """Let the serving thread make a call and perform its effects; any thread may post."""
        self.posted.append(call)
        self.wake()

    def _describe(self, encoded: bytes) -> LedgerHeader:
        """Decode a description, with a cache for short ones; long ones would take too much memory."""
        return self._described(encoded) if len(encoded) <= _CACHED_BYTES_MAX else self._description(encoded)

    def _description(self, encoded: bytes) -> LedgerHeader:
        """Decode a description, without the cache; it was valid when the client proved its right to the ledger."""
        return LedgerHeader.of(self._metadata.check_description(encoded, where="a ledger's description"), encoded)

    def _authorize(self, session_id: bytes, proof: Authorize | AuthorizeMember) -> bool:
        """Return whether a client has proved a ledger's password, or is a member (``docs/reference/wire.md``)."""
        try:
            described = self._metadata.check_description(proof.description, where=f"ledger {proof.ledger_id}")
            _check_type(described.ledger_id, described.ledger_type)
        except PybkError as error:
            logger.warning("a client's right was refused: %s", error)
            return False
        state = self.replicas.state(proof.ledger_id)
        known = None if state is None else state.header
        if described.ledger_id != proof.ledger_id or (known is not None and not known.is_of(proof.description)):
            return False
        if isinstance(proof, AuthorizeMember):
            return self._admit_member(session_id, proof)
        return proves_right(described.verifier, proof.signature, session_id, self.bookie.instance, proof.ledger_id)

    def _admit_member(self, session_id: bytes, proof: AuthorizeMember) -> bool:
        """Return whether a member may recover a ledger without its password; count and log that it does."""
        key, ledger_id = self.server.member_key, proof.ledger_id
        if key is None or not key.proves(proof.mac, session_id, self.bookie.instance, ledger_id):
            return False
        if not self._lets_members_recover():
            logger.warning("a member was refused to recover ledger %d: setting recover_abandoned is off", ledger_id)
            return False
        self.replicas.store.metrics.add(MEMBER_RECOVERIES)
        logger.warning("bookie %s: a member recovers ledger %d without its password", self.bookie, ledger_id)
        return True

    # ---- health and limbo ----------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Return the bookie's health: that of its store, of its state in the cluster, and of its serving.

        Cost: No request; one ``statvfs`` for each directory.
        """
        return bookie_health(self.replicas.store, self.keeper.condition())

    def _gauges(self) -> Iterator[Gauge]:
        yield MetricKey("limbo_ledgers"), len(self.replicas.in_limbo())
        for reason, count in self.server.refusals().items():
            yield MetricKey("peer_refusals", labels=(("reason", reason),)), count
        yield MetricKey(SESSIONS), len(self.server.peers)
        registered = self.keeper.registered
        yield MetricKey("registered"), registered is not None and registered.registered

    def in_limbo(self) -> list[int]:
        """Return the ids of the ledgers in limbo, ascending."""
        return self.replicas.in_limbo()

    def end_limbo(self, ledger_id: int, *, closed: bool) -> None:
        """End a ledger's limbo, because the entries that it lacked were copied back; returns before it is done.

        Args:
            ledger_id: The ledger.
            closed: It is closed, so it is fenced again if its fence may be lost.
        """

        def lift() -> list[BookieEffect]:
            try:
                self.replicas.end_limbo(ledger_id, closed=closed)
                named = {"bookie": str(self.bookie)}
                logger.info(
                    "ledger %d is out of limbo at %s",
                    ledger_id,
                    self.bookie,
                    extra=log_event("ledger.limbo.lifted", ledger=ledger_id, **named),
                )
                if not self.replicas.in_limbo():
                    logger.info(
                        "no ledger of %s is in limbo", self.bookie, extra=log_event("bookie.limbo.lifted", **named)
                    )
            except StorageError as error:
                logger.warning("ledger %d stays in limbo at %s: %s", ledger_id, self.bookie, error)
            return []

        self.post(lift)

    # ---- closing -------------------------------------------------------------------------------------------------

    def end(self, error: CookieError) -> None:
        """End the serving with an error, and do not wait for that; any thread may call it."""
        self._error = error
        self._stop()
        self.wake()

    def _stop(self) -> None:
        """Ask the serving thread and the keeper to end; does not wait for them."""
        self.stopping.set()
        self.keeper.wake()

    def _stop_serving(self) -> None:
        with ExitStack() as stopping:  # each step is done, whichever of those before it fails
            stopping.callback(self._close_server)
            stopping.callback(self._moving.close)
            stopping.callback(self._looking.close, wait=True)
            stopping.callback(self._thread.join)
            self._stop()
            self.wake()

    def close(self) -> None:
        """Remove the registration, stop serving, and unlock the directory; may be repeated."""
        with self._closing:
            if self._ended:
                return
            self._ended = True
            with ExitStack() as closing:  # each step is done, whichever of those before it fails
                closing.callback(self.keeper.close)
                closing.callback(self.replicas.close)
                closing.callback(self.keeper.join)
                closing.callback(self._stop_serving)
                self.keeper.unregister()


def _check_type(ledger_id: int, ledger_type: LedgerType) -> None:
    """Check that a replicated ledger does not have a type that bookies use for their own records.

    Raises:
        UsageError: It has such a type.
    """
    if is_bookie_record(ledger_type):
        raise UsageError(
            f"ledger {ledger_id} has type {ledger_type!r}, which bookies use for their own records: no replicated "
            "ledger may have it; create the ledger with another type"
        )


def _peer_of(sender: tuple[Peer, int]) -> Peer:
    return sender[0]


def _needs_right(request: Request) -> bool:
    if isinstance(request, Read | ReadLac):
        return request.fence
    return not isinstance(request, AskWriter)


def _request(message: WireRequest) -> Request:
    """Return the machine's form of a request. The clients that read a LAC verify its proof, not the bookie."""
    if isinstance(message, LacPacket):
        (lac,) = _packet_lac(message.packet)
        return WriteLac(message.ledger_id, lac, message.packet)
    assert isinstance(message, Add | ReadLac | Read | Force | Move | AskWriter), "the server answers all else itself"
    return message


def _wire(reply: LacReply | ReadReply | Reply) -> WireReply:
    """Return the wire's form of a reply with content."""
    if type(reply) is ReadReply:
        return Answer(reply.status, reply.run)
    assert type(reply) is LacReply
    run = None
    if reply.entry_id >= 0:
        run = EntryRun(reply.entry_id, 1, array("q", (len(reply.entry),)), (reply.entry,))
    return Answer(reply.status, run, reply.packet)
