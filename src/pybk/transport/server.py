"""The bookie's end of the wire: one ROUTER socket for all clients, their sessions, and the rights that they proved.

Theory of operation
-------------------

The bookie's thread calls ``receive`` in a loop. Each call drains the socket into the lanes (``drain``), takes one
turn of messages from the lanes (``Lanes.turn``), and checks each message (``_admit``) in this order: form, MAC,
counter, instance, checksum, content. Greetings, pings, proofs of rights and wrong messages are answered here; all
other requests are returned, and the bookie answers them with ``reply``.

A connection has no session until its HELLO is answered with WELCOME (``_greet``); a second HELLO replaces the
session. A session ends when its client is gone or does not read, when it sends more than its lane holds, or when it
is idle and another client needs a session. ``take_ended`` returns the ended sessions. A request without a session is
answered NO_SESSION, and the client greets again.

``receive`` waits for the socket and, by an epoll descriptor, for three more: ``wake``, the authentication handler
(``curve``), and the monitor that bounds the connections (``connection_limit``). A message that arrived alone, while no
lane is busy, is served without passing through its lane. One thread uses a server at a time; ``wake``, ``call``
and ``wake_called`` may be called by any thread.

A client in the bookie's own process hands its requests over by ``call`` (``in_process``). They need no check of their
form. ``receive`` returns them before those of the socket, and no more of them than of a client of the socket.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import zmq

from pybk.errors import UsageError
from pybk.replication.messages import EntryRun, Read, Reply, Status
from pybk.transport import curve, frames, heartbeat
from pybk.transport.cluster_keys import (
    ClusterKeys,
    CurvePair,
    HeldKeys,
    Mac,
    MemberKey,
    greeting_mac,
    held_keys,
    mac_of,
    session_key,
)
from pybk.transport.codec import (
    DAMAGED,
    NO_SESSION,
    NONCE_BYTES,
    PROBE_ID,
    SESSION_BYTES,
    Answer,
    Authorize,
    AuthorizeMember,
    MessageKind,
    Ping,
    WireReply,
    WireRequest,
    decode_request,
    encode,
    one_entry_add,
)
from pybk.transport.connection_limit import GREETING_LOOK_MS, Connections
from pybk.transport.frames import (
    INLINE_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    RUNS_MAX,
    WIRE_CORE,
    FrameError,
    Header,
    Outgoing,
    blob,
    decode_head,
    is_authentic,
    is_whole,
    send_frame,
)
from pybk.transport.lanes import MARK_BYTES, WAITING_BYTES_MAX, Lanes, Waiting
from pybk.transport.logging_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

SESSIONS_MAX: Final = 1024
RIGHTS_MAX: Final = 16 << 10
"""The bound on the rights of one session; beyond it the oldest is forgotten, and the client proves it when needed."""

RIGHTS_BYTES_MAX: Final = 64 << 20
"""The bound on the bytes of the descriptions of one session's rights; beyond it the oldest rights are forgotten."""

UNREAD_BYTES_MAX: Final = 64 << 20
"""The bound on the bytes of replies that a client leaves unread by its own count; clients of this pybk ask for less."""

UNWRITTEN_BYTES_MAX: Final = 96 << 20
"""The bound on the bytes of replies to a client that the system has not accepted, whatever the client's own count."""

UNREAD_TOTAL_BYTES_MAX: Final = 256 << 20
"""The bound on the unwritten bytes of replies to all clients; beyond it, clients above their share are refused."""

UNREAD_SHARE_BYTES: Final = 1 << 20
"""The unwritten bytes up to which a client is served even beyond ``UNREAD_TOTAL_BYTES_MAX``."""

_SMALL_BYTES: Final = 1 << 10
"""The largest replies that are never refused for unread bytes, because ZeroMQ bounds their number."""

_ANSWER_BYTES: Final = 256
"""At least the bytes of an answer with one entry that are not the entry's."""

RECEIVED_MAX: Final = 1024
"""The bound on the messages that are received before some are served."""

_RECEIVED_BYTES_MAX: Final = 32 << 20
QUEUE_MESSAGES: Final = 16 << 10
"""The most messages that ZeroMQ queues for one client, and at a client for one bookie."""

SILENCE_NS: Final = 600 * 10**9
"""The silence after which a session is probed when another client greets, because its connection may be gone."""

PROBE_NS: Final = 10**9
"""The time that a probed session has to answer."""

OLD_SILENCE_NS: Final = 15 * 10**9
"""The silence after which a session of an old secret counts as unused; a link that is polled pings earlier."""

IDLE_NS: Final = 60 * 10**9
"""The silence after which a session without rights is ended if a new one needs its slot."""

_READABLE: Final = int(zmq.POLLIN)
_DONT_WAIT: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_OK: Final = Reply(Status.OK)
_UNAUTHORIZED: Final = Reply(Status.UNAUTHORIZED)
_REFUSED: Final = Reply(Status.REFUSED)
_new_tuple = tuple.__new__


class Right(NamedTuple):
    """The right of a session to a ledger.

    Attributes:
        description: The ledger's description that the bookie verified.
        whole: Whether the session proved the ledger's password, and may add to, fence and delete it; otherwise it is a
            member's, and may recover the ledger.
    """

    description: bytes
    whole: bool = True


class Peer:
    """One session of a client; ``Server.receive`` returns it with each request.

    Attributes:
        session_id: The session's random id, which signatures of rights include.
        rights: The ledgers to which the session proved a right, oldest first; at most ``RIGHTS_MAX``.
        writes: The ledgers among ``rights`` to which the session wrote, as their writer.
    """

    __slots__ = (
        "_counter",
        "_rights_bytes",
        "_seen_ns",
        "_sent_bytes",
        "_taken_bytes",
        "key",
        "keys",
        "mac",
        "rights",
        "routing_id",
        "session_id",
        "version",
        "writes",
    )

    def __init__(
        self, routing_id: bytes, session_id: bytes, key: bytes, version: int, keys: ClusterKeys | None = None
    ) -> None:
        self.session_id = session_id
        self.rights: dict[int, Right] = {}
        self.writes: set[int] = set()
        self._rights_bytes = 0
        self.routing_id = routing_id
        """ZeroMQ's name of the client's connection."""
        self.key = key
        """The key of ``mac``, as ``session_key`` returns it."""
        self.mac = mac_of(key)
        """The function that authenticates the session's messages."""
        self.version = version
        """The version of the protocol that the greeting agreed on."""
        self.keys = keys
        """The keys of the secret with which the client greeted; None without a secret."""
        self._counter = 0
        self._sent_bytes = 0
        self._taken_bytes = 0
        self._seen_ns = time.monotonic_ns()

    def grant(self, ledger_id: int, right: Right) -> None:
        """Add a right, and forget the oldest ones beyond ``RIGHTS_MAX`` rights or ``RIGHTS_BYTES_MAX`` bytes."""
        rights = self.rights
        self.revoke(ledger_id)
        self._rights_bytes += len(right.description)
        rights[ledger_id] = right
        while len(rights) > RIGHTS_MAX or self._rights_bytes > RIGHTS_BYTES_MAX:
            self.revoke(next(iter(rights)))

    def may_write(self, ledger_id: int) -> bool:
        """Return whether the session proved a ledger's password, and so has every right to the ledger."""
        right = self.rights.get(ledger_id)
        return right is not None and right.whole

    def revoke(self, ledger_id: int) -> None:
        """Forget a right, if the session has it."""
        self.writes.discard(ledger_id)
        right = self.rights.pop(ledger_id, None)
        if right is not None:
            self._rights_bytes -= len(right.description)

    def __repr__(self) -> str:
        """Return the start of the session's id, and the number of its rights; never a key."""
        return f"<Peer {self.session_id[:4].hex()}, rights to {len(self.rights)} ledgers>"


class Caller(Peer):
    """The session of a client in the bookie's own process; see ``in_process``.

    Args:
        deliver: Takes the request id and the reply of each request.
        end: Called once the server is closed.
    """

    __slots__ = ("deliver", "end")

    def __init__(self, deliver: Callable[[int, WireReply], None], end: Callable[[], None]) -> None:
        super().__init__(b"", secrets.token_bytes(SESSION_BYTES), b"", frames.VERSION)
        self.deliver: Final = deliver
        self.end: Final = end


@dataclass(slots=True)
class ServerCounters:
    """Counts of the messages that a server received since it was opened, and of their outcomes.

    Attributes:
        received: Requests returned to the bookie.
        garbage: Frames that are not messages.
        forged: Messages without the right MAC.
        replayed: Messages whose counter did not grow.
        damaged: Requests whose frames do not match their checksum; clients send them again.
        refused: Authentic messages whose content is not a valid request.
        faults: Authentic messages whose decoding failed with an unexpected error; each is a defect of pybk.
        strangers: Requests without a session.
        flooded: Connections that exceeded the bytes of their lane, and lost their waiting messages and their session.
        unread: Replies that became ``REFUSED`` because the client had left too many bytes unread.
        dropped: Sessions that ended because the client was gone or did not read, or was idle when others needed a slot.
        turned_away: Clients that got no session because the server had too many.
    """

    received: int = 0
    garbage: int = 0
    forged: int = 0
    replayed: int = 0
    damaged: int = 0
    refused: int = 0
    faults: int = 0
    strangers: int = 0
    flooded: int = 0
    unread: int = 0
    dropped: int = 0
    turned_away: int = 0


REFUSALS: Final = (
    *("garbage", "forged", "replayed", "damaged", "refused", "faults", "strangers", "flooded", "unread", "turned_away"),
)
"""The names of the counters of refusals."""


class Server:
    """The socket of a bookie.

    Args:
        addresses: The addresses to listen on: ``tcp://host:port`` (port ``*`` for any), ``ipc://path``,
            ``inproc://name``.
        instance: The bookie's instance; requests for another are answered ``WRONG_INSTANCE``.
        keys: The cluster's keys, which may change while it serves; None without a secret, for checksums instead of
            CURVE and MACs.
        authorize: Returns whether a proof is valid: ``authorize(session id, proof)`` verifies the MAC of the
            description, and the signature or MAC. None refuses all proofs.
        context: The ZeroMQ context, needed for ``inproc``; None to make one. With a secret, a context can have only
            one server.
        message_bytes_max: Bound on each frame received; a larger one ends the connection unread.

    Attributes:
        addresses: The bound addresses, with the ports that the system chose.
        public_key: The CURVE public key that clients must expect, Z85; None without a secret.
        counters: Counts since the server was opened.
        ended: Sessions that have ended since ``take_ended`` was called.

    Raises:
        UsageError: The server cannot listen on an address, or must not without a secret.
        InsecureError: CURVE is missing, outdated, or failed its test.

    Threads: one at a time, except for ``wake``, ``call`` and ``wake_called``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        instance: bytes,
        keys: ClusterKeys | HeldKeys | None = None,
        *,
        authorize: Callable[[bytes, Authorize | AuthorizeMember], bool] | None = None,
        context: curve.Context | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        for address in addresses:
            curve.check_address(address, secret=keys is not None)
        self.counters: Final = ServerCounters()
        self.public_key: bytes | None = None
        self.instance = instance
        """The instance of the bookie, which each message names."""
        held = self._keys = held_keys(keys)
        self.member_key = None if held is None else MemberKey(held)
        """The key that checks the proofs of members; None without a secret; then no member can recover a ledger."""
        self._valid: tuple[ClusterKeys, ...] = () if held is None else held.all
        """The keys of the valid secrets at the last look-up; sessions of other keys were ended then."""
        self.authorize = authorize
        """The function that checks the proof of a right; None refuses every right."""
        self.message_bytes_max = message_bytes_max
        """The bound on the bytes of one message."""
        self.peers: dict[bytes, Peer] = {}
        """The sessions, by routing id."""
        self._probe_ns = 0
        self.lanes = Lanes()
        """The messages that arrived, in a lane for each client."""
        self.ended: list[Peer] = []
        self._called: deque[tuple[Caller, int, WireRequest | None, int]] = deque()
        """The requests of this process and their bytes; None ends a session. Any thread appends, one takes."""
        self._callers: set[Caller] = set()
        self._waking = threading.Lock()
        """The lock of ``closed``; with it no call or wake-up is lost, or made after the end."""
        self.closed = False
        """True once ``close`` was called."""
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self.authenticator: curve.ZapAuthenticator | None = None
        """The handler that admits clients by the cluster's keys; None without keys."""
        self.socket = self._context.socket(zmq.ROUTER)
        """The socket of all clients."""
        self.connections: Connections | None = None
        """The bounds on the connections; None if all addresses are of this process."""
        try:
            _set_options(self.socket, message_bytes_max)
            if held is not None:
                self.authenticator = self._require_authentication(held)
            if not all(address.startswith("inproc:") for address in addresses):
                self.connections = Connections(self.socket)
            self.addresses: Final = tuple(map(self._bind, addresses))
        except BaseException:
            self.close()
            raise
        self._asked: list[tuple[Any, int]] = [(self.socket, _READABLE)]
        """The socket, which is asked for further messages."""
        self._awaited: list[tuple[Any, int]] = [(self._epoll.fileno(), _READABLE), *self._asked]
        """What ``receive`` waits for."""
        self.watched: dict[int, Callable[[], object]] = {}
        """The function to call when a descriptor becomes readable, by descriptor."""
        if self.authenticator is not None:
            self.watched[self.authenticator.socket.fileno()] = self.authenticator.serve
        if self.connections is not None:
            self.watched[self.connections.monitor.fileno()] = partial(self.connections.look, self.addresses)
        for descriptor in (self._wake, *self.watched):
            self._epoll.register(descriptor, select.EPOLLIN)

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def _require_authentication(self, held: HeldKeys) -> curve.ZapAuthenticator:
        """Make the socket admit only clients with a key of the cluster, verify that it does, and return the handler."""
        curve.check_library()
        pair = CurvePair.random()
        authenticator = curve.ZapAuthenticator(self._context, lambda: [keys.client.public for keys in held.all])
        try:
            curve.secure_server(self.socket, pair)
            curve.prove_closed(self._context, self.socket, authenticator, pair, held.current.client)
        except BaseException:
            authenticator.close()
            raise
        self.public_key = pair.public
        return authenticator

    def _bind(self, address: str) -> str:
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {address}: {error}; use another address") from error
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wake(self) -> None:
        """Make the current or the next ``receive`` return at once. Threads: any."""
        os.eventfd_write(self._wake, 1)

    def call(self, caller: Caller, request_id: int, message: WireRequest | None, nbytes: int) -> bool:
        """Hand over a request of this process, to be taken in the order of calls after ``wake_called``.

        Args:
            caller: The session; it begins with its first request.
            request_id: The id with which the reply is delivered.
            message: The request; None ends the session.
            nbytes: The bytes that it counts in a turn.

        Returns:
            False if the server is closed; nothing was handed over then.

        Threads: any.
        """
        with self._waking:
            if not self.closed:
                self._called.append((caller, request_id, message, nbytes))
            return not self.closed

    def wake_called(self) -> None:
        """Make the serving thread take the requests handed over by ``call``. Threads: any, also after ``close``."""
        with self._waking:
            if not self.closed:
                self.wake()

    def _take_called(self, count_max: int, bytes_max: int) -> Iterator[tuple[Peer, int, WireRequest]]:
        """Yield the requests of this process that the bookie has to answer in this turn, at least one."""
        called = self._called
        count = size = 0
        while called and count < count_max and (not count or size + called[0][3] <= bytes_max):
            caller, request_id, message, nbytes = called.popleft()
            count += 1
            size += nbytes
            if message is None:
                self._callers.discard(caller)
                self.ended.append(caller)
                continue
            self._callers.add(caller)
            if isinstance(message, Ping | Authorize | AuthorizeMember):
                self.reply(caller, request_id, self._decide(caller, message))
            else:
                yield caller, request_id, message

    def receive(self, timeout_ms: int) -> list[tuple[Peer, int, WireRequest]]:
        """Wait for requests, and return those of one turn.

        Args:
            timeout_ms: Milliseconds to wait for the first; 0 does not wait.

        Returns:
            Session, request id and request of each; those of one client are in its order. The list is empty after
            ``wake`` and after the time-out, and may be empty earlier. While several clients send, one call returns a
            bounded share of each (``Lanes``). Entries refer to the received frames, which live as long as they do.

        Cost: 10 microseconds per request, and the checksum of its entries.
        """
        lanes = self.lanes
        if self._keys is not None and self._keys.all is not self._valid:
            self._follow_keys(self._keys.all)
        connections = self.connections
        if connections is not None and connections.greeting:
            connections.check_greeting(self.addresses)
            timeout_ms = min(timeout_ms, GREETING_LOOK_MS)
        # ZeroMQ is asked for the socket, because sending replies may have consumed its signal.
        ready: list[tuple[Any, int]] = zmq.zmq_poll(
            self._awaited, 0 if lanes.busy_lanes or self._called else timeout_ms
        )
        alone = None
        if ready:
            if type(ready[0][0]) is int:
                self._look_at_signals()
            if type(ready[-1][0]) is not int:
                alone = self.drain()
        now_ns = time.monotonic_ns()
        arrived = list(self._take_called(*lanes.share(now_ns, 1 + (alone is not None)))) if self._called else []
        if alone is not None:
            request = self._admit(*alone, now_ns)
            if request is not None:
                arrived.append(request)
        elif lanes.busy_lanes:
            for routing_id, message in lanes.turn(now_ns, len(arrived) > 0):
                request = self._admit(routing_id, message, now_ns)
                if request is not None:
                    arrived.append(request)
        self.counters.received += len(arrived)
        return arrived

    def _look_at_signals(self) -> None:
        """Handle what the descriptors other than the socket announce."""
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self.watched:
                self.watched[descriptor]()

    def _follow_keys(self, valid: tuple[ClusterKeys, ...]) -> None:
        """End the sessions of secrets that are no longer valid; clients that have another secret begin new ones."""
        self._valid = valid
        for peer in [peer for peer in self.peers.values() if peer.keys not in valid]:
            self._drop(peer)

    def old_sessions(self) -> int:
        """Return the number of sessions that began with a secret that is not the current one, and are in use.

        A silent client may be idle; it then begins a new session with its next request, whatever its secret.

        Threads: the one that calls ``receive``.
        """
        if self._keys is None:
            return 0
        current = self._keys.current
        for peer in [peer for peer in self.peers.values() if peer.keys is not current]:
            self._answer(peer, PROBE_ID, encode(_OK))  # ends the session if the client is gone
        since_ns = time.monotonic_ns() - OLD_SILENCE_NS
        return sum(peer.keys is not current and peer._seen_ns >= since_ns for peer in self.peers.values())

    def has_writer(self, ledger_id: int) -> bool:
        """Return whether a session is open that has written to a ledger; those whose clients are gone are ended.

        Threads: the one that calls ``receive``.
        """
        if any(ledger_id in caller.writes for caller in self._callers):
            return True
        writers = [peer for peer in self.peers.values() if ledger_id in peer.writes]
        return any(self._answer(peer, PROBE_ID, encode(_OK)) for peer in writers)

    def drain(self) -> tuple[bytes, Waiting] | None:
        """Receive messages from the socket, which has one, into the lanes, up to a bound.

        Returns:
            If there was one message, and all lanes are empty, it and its connection: it was put into no lane.
        """
        asked = self._asked
        recv = self.socket.recv
        peers = self.peers
        lanes = self.lanes
        drained = count = 0
        more_waits = True
        while more_waits and count < RECEIVED_MAX:
            if drained >= _RECEIVED_BYTES_MAX or lanes.waiting_bytes >= WAITING_BYTES_MAX:
                break
            routing_id = recv(_DONT_WAIT)
            frame = recv(_DONT_WAIT, copy=False)
            if routing_id not in peers and self.connections is not None:
                self.connections.heard(frame, self.addresses)  # it may be the first message of its connection
            head = frame.bytes
            bodies: list[memoryview] = []
            size = kept = len(head)
            more = frame.more
            while more:
                frame = recv(_DONT_WAIT, copy=False)
                more = frame.more
                size += len(frame)
                if len(bodies) <= RUNS_MAX and size <= self.message_bytes_max:  # else it counts as damaged
                    bodies.append(frame.buffer)
                    kept = size
            drained += size
            count += 1
            message = _new_tuple(Waiting, (head, bodies, kept))
            more_waits = bool(zmq.zmq_poll(asked, 0))  # a third quicker than the option EVENTS
            if count == 1 and not more_waits and not lanes.busy_lanes:
                return routing_id, message
            if not lanes.put(routing_id, message):
                self.counters.flooded += 1
                if routing_id in self.peers:
                    self._drop(self.peers[routing_id])
        return None

    def refusals(self) -> Mapping[str, int]:
        """Return the numbers of refused connections and messages of peers since the server was opened, by reason.

        Threads: any.
        """
        counters, connections = self.counters, self.connections
        found = {name: getattr(counters, name) for name in REFUSALS}
        if connections is not None:
            found |= {"ended": connections.ended, "unheard": connections.unheard}
        return found

    def _admit(self, routing_id: bytes, received: Waiting, now_ns: int) -> tuple[Peer, int, WireRequest] | None:
        """Check one message; answer it here if that is possible, otherwise return it for the bookie to answer."""
        head, bodies, _ = received
        peer = self.peers.get(routing_id)
        if WIRE_CORE is not None and peer is not None and not bodies:
            found = WIRE_CORE.take_read(head, peer.key, self.instance, Read)
            if found is not None and found[1] > peer._counter:
                request_id, peer._counter, peer._taken_bytes, read = found
                peer._seen_ns = now_ns
                return peer, request_id, read
            added = None if found is not None else WIRE_CORE.take_add(head, peer.key, self.instance)
            if added is not None and added[1] > peer._counter:
                request_id, peer._counter, peer._taken_bytes, flags, ledger_id, lac, first, stride, start, end = added
                peer._seen_ns = now_ns
                entry = memoryview(head)[start:end]
                return peer, request_id, one_entry_add(ledger_id, flags, lac, first, stride, entry)
        try:
            header = decode_head(head)
        except FrameError:
            self.counters.garbage += 1
            return None
        if header.kind == MessageKind.HELLO:
            self._greet(routing_id, header, head)
            return None
        if peer is None:
            self.counters.strangers += 1
            # The client verifies it by any secret that it has; the server does not know the client's.
            current = None if self._keys is None else self._keys.current
            self.send(routing_id, NO_SESSION, header.request_id, greeting_mac(current), header.version)
            return None
        if not is_authentic(header, head, peer.mac):
            self.counters.forged += 1
            return None
        if header.counter <= peer._counter:
            self.counters.replayed += 1
            return None
        peer._counter = header.counter
        peer._taken_bytes = header.taken_bytes
        peer._seen_ns = now_ns
        if header.instance != self.instance:
            self.reply(peer, header.request_id, Reply(Status.WRONG_INSTANCE))
            return None
        if not is_whole(header, head, bodies):
            self.counters.damaged += 1
            self._answer(peer, header.request_id, DAMAGED)
            return None
        try:
            message = decode_request(header, head, bodies)
        except FrameError:
            self.counters.refused += 1
            self.reply(peer, header.request_id, _REFUSED)
            return None
        except Exception:  # a barrier: the content of an authentic message must not end the bookie
            self.counters.faults += 1
            logger.exception("a request was refused that could not be decoded; this is a defect")
            self.reply(peer, header.request_id, _REFUSED)
            return None
        if not isinstance(message, Ping | Authorize | AuthorizeMember):
            return peer, header.request_id, message
        self.reply(peer, header.request_id, self._decide(peer, message))
        return None

    def _decide(self, peer: Peer, message: Ping | Authorize | AuthorizeMember) -> Reply:
        """Return the reply to a ping or to a proof of a right; a valid proof adds its right to the session."""
        try:
            return _OK if isinstance(message, Ping) or self._grant(peer, message) else _UNAUTHORIZED
        except Exception:  # a barrier, as in ``_admit``
            self.counters.faults += 1
            logger.exception("a proof was refused that could not be checked; this is a defect")
            return _REFUSED

    def _grant(self, peer: Peer, proof: Authorize | AuthorizeMember) -> bool:
        """Verify a proof of a right, and add the right to the session; return False if the proof is not valid."""
        right = Right(proof.description, isinstance(proof, Authorize))
        known = peer.rights.get(proof.ledger_id)
        if known is not None and not right.whole and known.description == right.description:
            return True  # it has this right or more, and is counted and logged once
        if self.authorize is None or not self.authorize(peer.session_id, proof):
            return False
        peer.grant(proof.ledger_id, right)
        return True

    def _greet(self, routing_id: bytes, header: Header, head: bytes) -> None:
        """Answer HELLO: begin a session and send WELCOME, or send NO_SESSION if the server has too many sessions."""
        try:
            client_nonce = blob(header, head, NONCE_BYTES)
        except FrameError:
            client_nonce = b""
        if len(client_nonce) != NONCE_BYTES or header.a < frames.VERSION_MIN or not is_whole(header, head, ()):
            self.counters.garbage += 1
            return
        valid: tuple[ClusterKeys | None, ...] = (None,) if self._keys is None else self._keys.all
        for keys in valid:
            if is_authentic(header, head, greeting_mac(keys)):
                break
        else:
            self.counters.forged += 1
            return
        if not self._free_session_slot(routing_id):
            self.counters.turned_away += 1
            self.send(routing_id, NO_SESSION, header.request_id, greeting_mac(keys), header.version)
            return
        session_id = secrets.token_bytes(SESSION_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        key = session_key(keys, session_id, (client_nonce, nonce), self.instance)
        version = min(header.a, frames.VERSION)
        if routing_id in self.peers:
            self.ended.append(self.peers[routing_id])
        peer = self.peers[routing_id] = Peer(routing_id, session_id, key, version, keys)
        welcome = Outgoing(
            MessageKind.WELCOME, numbers=(version, self.message_bytes_max, 0, 0), blob=session_id + nonce
        )
        self.send(routing_id, welcome, header.request_id, peer.mac, header.version)

    def _free_session_slot(self, routing_id: bytes) -> bool:
        """Return whether another session can begin; end sessions whose clients are gone, or an idle one, if need be.

        A session with a right to a ledger is a writer's, and stays however long it is idle, because a writer whose
        session ends must prove its rights again. Of the other sessions, the one that was silent longest is ended.
        """
        if routing_id in self.peers:
            return True  # the new session replaces that of the same connection
        now_ns = time.monotonic_ns()
        full = len(self.peers) >= SESSIONS_MAX
        if now_ns >= self._probe_ns:
            self._probe_ns = now_ns + PROBE_NS
            self.lanes.check_all_written()
            for peer in list(self.peers.values()):
                if full or now_ns - peer._seen_ns > SILENCE_NS:
                    self._answer(peer, PROBE_ID, encode(_OK))
        if len(self.peers) >= SESSIONS_MAX:
            idle = [peer for peer in self.peers.values() if not peer.rights and now_ns - peer._seen_ns >= IDLE_NS]
            if not idle:
                return False
            self._drop(min(idle, key=lambda peer: peer._seen_ns))
        return True

    def reply(self, peer: Peer, request_id: int, message: WireReply) -> bool:
        """Answer a request without waiting.

        Args:
            peer: The session of the request.
            request_id: The request's id.
            message: The reply. It is replaced by ``REFUSED`` if the client has left too many bytes unread.

        Returns:
            False if the client is gone or does not read: its session has ended, and the client counts the request as
            unanswered.

        Cost: 4 microseconds.
        """
        if isinstance(peer, Caller):
            peer.deliver(request_id, message)
            return True
        return self._answer(peer, request_id, encode(message))

    def reply_entry(self, peer: Peer, request_id: int, run: EntryRun) -> bool:
        """Answer a read with a run of one entry, as ``reply`` does.

        Cost: With the native core, a third of that of ``reply``.
        """
        size = run.sizes[0] + _ANSWER_BYTES
        lanes = self.lanes
        lane = lanes.lanes.get(peer.routing_id)
        claimed = peer._sent_bytes - peer._taken_bytes
        if (
            WIRE_CORE is None
            or size > INLINE_BYTES_MAX
            or len(run.body) > 1
            or lane is None  # also of a caller in this process
            or self.peers.get(peer.routing_id) is not peer
            or lane.unmarked + size >= MARK_BYTES
            or claimed + size > UNREAD_BYTES_MAX  # these are checked again, less strictly, by ``reply``
            or lane.unwritten + size > UNWRITTEN_BYTES_MAX
            or lanes.unwritten + size > UNREAD_TOTAL_BYTES_MAX
        ):
            return self.reply(peer, request_id, Answer(Status.OK, run))
        frame = WIRE_CORE.make_answer(
            peer.key, self.instance, peer.version, request_id, run.first, run.stride, run.body[0]
        )
        try:
            send_frame(self.socket, peer.routing_id, _MORE)
            send_frame(self.socket, frame, _DONT_WAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._drop(peer)
            return False
        lane.unmarked += len(frame)
        peer._sent_bytes += len(frame)
        return True

    def _answer(self, peer: Peer, request_id: int, answer: Outgoing) -> bool:
        if self.peers.get(peer.routing_id) is not peer:
            return False
        if answer.size > _SMALL_BYTES and self._leaves_unread(peer, answer.size):
            self.counters.unread += 1
            answer = encode(_REFUSED)
        peer._sent_bytes += answer.size
        if not self.send(peer.routing_id, answer, request_id, peer.mac, peer.version):
            self._drop(peer)
            return False
        return True

    def _leaves_unread(self, peer: Peer, size: int) -> bool:
        """Return whether a client would have too many unread bytes with a further reply of this size.

        There are two measures: the bytes that the client itself reports as received, and those that the system has
        accepted.
        """
        claimed = peer._sent_bytes - min(peer._taken_bytes, peer._sent_bytes)
        lanes = self.lanes
        lane = lanes.of(peer.routing_id)
        lanes.check_written(lane)
        if claimed + size > UNREAD_BYTES_MAX or lane.unwritten + size > UNWRITTEN_BYTES_MAX:
            return True
        if lanes.unwritten + size > UNREAD_TOTAL_BYTES_MAX and lane.unwritten + size > UNREAD_SHARE_BYTES:
            lanes.check_all_written()
            return lanes.unwritten + size > UNREAD_TOTAL_BYTES_MAX
        return False

    def send(self, routing_id: bytes, answer: Outgoing, request_id: int, mac: Mac, version: int) -> bool:
        """Send a message; return False if the client is gone, or ZeroMQ's queue for it is full."""
        socket = self.socket
        bodies: list[zmq.Frame] = answer.frames
        head: Any = answer.head(request_id, 0, 0, self.instance, mac, version)
        lane = self.lanes.lanes.get(routing_id) or self.lanes.of(routing_id)
        mark: zmq.MessageTracker | None = None
        if lane.unmarked + answer.size >= MARK_BYTES:
            last = zmq.Frame(bodies[-1].buffer if bodies else head, track=True, copy=False)
            mark = last.tracker
            if bodies:
                bodies = [*bodies[:-1], last]
            else:
                head = last
        try:
            send_frame(socket, routing_id, _MORE)
            send_frame(socket, head, _MORE if bodies else _DONT_WAIT, mark is None)
            for number, body in enumerate(bodies, 1):
                send_frame(socket, body, _MORE if number < len(bodies) else _DONT_WAIT, False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        lane.unmarked += answer.size
        if mark is not None:
            self.lanes.marked(lane, mark)
        return True

    def _drop(self, peer: Peer) -> None:
        self.counters.dropped += 1
        self.ended.append(peer)
        del self.peers[peer.routing_id]

    def take_ended(self) -> list[Peer]:
        """Return the sessions that ended since the last call; the bookie drops their unanswered requests."""
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        """Stop listening and end all connections; replies that were not sent yet are dropped."""
        with self._waking:
            self.closed = True
        for caller in self._callers | {called[0] for called in self._called}:
            caller.end()
        self._callers.clear()
        self._called.clear()
        self.peers.clear()
        self._epoll.close()
        if self.connections is not None:
            self.connections.close()
        self.socket.close(linger=0)
        if self.authenticator is not None:
            self.authenticator.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        if self._own_context:
            self._context.term()


def _set_options(socket: curve.Socket, message_bytes_max: int) -> None:
    """Bound the queues of a socket, and make a send to a client that is gone fail instead of dropping the message."""
    socket.linger = 0
    socket.maxmsgsize = message_bytes_max
    socket.sndhwm = QUEUE_MESSAGES
    socket.rcvhwm = QUEUE_MESSAGES
    socket.router_mandatory = True
    socket.router_handover = False
    socket.handshake_ivl = curve.HANDSHAKE_MS
    heartbeat.set_heartbeat(socket)
