"""The bookie's end of the wire: one ROUTER socket for all clients, their sessions, and the rights that they proved.

Theory of operation
-------------------

The bookie's thread calls ``receive`` in a loop. Each call drains the socket into the lanes (``_drain``), takes one
turn of messages from the lanes (``Lanes.turn``), and checks each message (``_admit``) in this order: form, MAC,
counter, instance, checksum, content. Greetings, pings, proofs of rights and wrong messages are answered here; all
other requests are returned, and the bookie answers them with ``reply``.

A connection has no session until its HELLO is answered with WELCOME (``_greet``); a second HELLO replaces the
session. A session ends when its client is gone or does not read, when it sends more than its lane takes, or when it
is idle and another client needs its place. ``take_ended`` returns the ended sessions. A request without a session is
answered NO_SESSION, and the client greets again.

Three descriptors wake ``receive`` besides the socket: ``wake``, the ZAP authenticator (``curve``), and the monitor
that bounds the connections (``connection_limit``). One thread uses a server at a time; only ``wake`` may be called by
any.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

import zmq

from pybk.errors import UsageError
from pybk.replication.messages import Reply, Status
from pybk.transport import curve, frames
from pybk.transport.cluster_keys import ClusterKeys, CurvePair, Mac, greeting_mac, session_mac
from pybk.transport.codec import (
    DAMAGED,
    NO_SESSION,
    NONCE_BYTES,
    PROBE_ID,
    SESSION_BYTES,
    Authorize,
    MessageKind,
    Ping,
    WireReply,
    WireRequest,
    decode_request,
    encode,
)
from pybk.transport.connection_limit import GREETING_LOOK_MS, Connections
from pybk.transport.frames import (
    MESSAGE_BYTES_MAX,
    RUNS_MAX,
    FrameError,
    Header,
    Outgoing,
    blob,
    decode_head,
    is_authentic,
    is_whole,
)
from pybk.transport.lanes import Lanes, Waiting
from pybk.transport.logging_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

SESSIONS_MAX: Final = 1024
RIGHTS_MAX: Final = 16 << 10
"""Ledgers that one session may have proved its right to; the oldest is forgotten, and proved again when needed."""

RIGHTS_BYTES_MAX: Final = 64 << 20
"""Bound on the descriptions that come with one session's rights, in the same way."""

UNREAD_BYTES_MAX: Final = 64 << 20
"""Bytes of replies that a client may leave unread; more than a client of this pybk asks for at a time."""

UNWRITTEN_BYTES_MAX: Final = 96 << 20
"""Bytes of replies to a client that the system has not taken yet, whatever the client says that it received."""

UNREAD_TOTAL_BYTES_MAX: Final = 256 << 20
"""Bytes of replies that all clients together may leave unread; then those with more than a share are refused."""

UNREAD_SHARE_BYTES: Final = 1 << 20

_SMALL_BYTES: Final = 1 << 10
"""Answers up to this size are not refused for what is unread: ZeroMQ bounds their number."""

_RECEIVED_MAX: Final = 1024
_RECEIVED_BYTES_MAX: Final = 32 << 20
_QUEUE_MESSAGES: Final = 16 << 10
_SILENCE_NS: Final = 600 * 10**9
"""After this long without a word from a client, it is found out whether its connection is still there."""

_PROBE_NS: Final = 10**9
_IDLE_NS: Final = 60 * 10**9
"""A session without rights that is silent for this long makes room for a new one when there are too many."""

_READABLE: Final = int(zmq.POLLIN)
_DONT_WAIT: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_OK: Final = Reply(Status.OK)
_UNAUTHORIZED: Final = Reply(Status.UNAUTHORIZED)
_REFUSED: Final = Reply(Status.REFUSED)


class Peer:
    """One session of a client, as ``Server.receive`` names it.

    Attributes:
        session_id: Names the session, in signatures too.
        rights: Ledgers that it may add to, fence and delete, each with its description as the bookie found it right;
            at most ``RIGHTS_MAX``.
    """

    __slots__ = (
        "_counter",
        "_mac",
        "_rights_bytes",
        "_routing_id",
        "_seen_ns",
        "_sent_bytes",
        "_taken_bytes",
        "_version",
        "rights",
        "session_id",
    )

    def __init__(self, routing_id: bytes, session_id: bytes, mac: Mac, version: int) -> None:
        self.session_id = session_id
        self.rights: dict[int, bytes] = {}
        self._rights_bytes = 0
        self._routing_id = routing_id
        self._mac = mac
        self._version = version
        self._counter = 0
        self._sent_bytes = 0
        self._taken_bytes = 0
        self._seen_ns = time.monotonic_ns()

    def grant(self, ledger_id: int, description: bytes) -> None:
        """Note a right; the oldest ones are forgotten beyond ``RIGHTS_MAX`` rights or ``RIGHTS_BYTES_MAX`` bytes."""
        rights = self.rights
        self._rights_bytes += len(description) - len(rights.pop(ledger_id, b""))
        rights[ledger_id] = description
        while len(rights) > RIGHTS_MAX or self._rights_bytes > RIGHTS_BYTES_MAX:
            self._rights_bytes -= len(rights.pop(next(iter(rights))))

    def revoke(self, ledger_id: int) -> None:
        """Forget a right, if there is one."""
        self._rights_bytes -= len(self.rights.pop(ledger_id, b""))

    def __repr__(self) -> str:
        """Name the session; never its key."""
        return f"<Peer {self.session_id[:4].hex()}, rights to {len(self.rights)} ledgers>"


@dataclass(slots=True)
class ServerCounters:
    """What a server met since it was opened.

    Attributes:
        received: Requests handed to the bookie.
        garbage: Messages that were none.
        forged: Messages without the right MAC.
        replayed: Messages that had come before.
        damaged: Requests of which the entries were not what was sent; they are sent again.
        refused: Authentic messages that say what no request can say.
        faults: Authentic messages that failed in a way that no message should be able to cause.
        strangers: Messages of no session.
        flooded: Connections that had more on the way than a client may, and lost what waited, and their session.
        unread: Answers with entries that were refused because the client had left too much unread.
        dropped: Sessions that ended because the client was gone or did not read, or was idle and others came.
        turned_away: Clients that got no session because there were too many.
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


class Server:
    """The socket of a bookie.

    Args:
        addresses: Where to listen: ``tcp://host:port`` (port ``*`` for any), ``ipc://path``, ``inproc://name``.
        instance: The bookie's; requests for another are answered ``WRONG_INSTANCE``.
        keys: The cluster's; None for no secret: no CURVE, and checksums where there would be MACs.
        authorize: Tells whether a proof is right: ``authorize(session id, proof)`` checks the MAC of the description
            and the signature. None refuses all.
        context: The ZeroMQ context, needed for ``inproc``; None for one of its own. A context with a secret has one
            server.
        message_bytes_max: Bound on each frame received; larger ones end the connection unread.

    Attributes:
        addresses: As bound, with the ports that were given.
        public_key: The CURVE key for clients to expect, Z85; None without a secret.
        counters: What was met.

    Raises:
        UsageError: An address cannot be listened on, or must not be without a secret.
        InsecureError: CURVE does not keep strangers out here.

    Threads: one at a time, but for ``wake``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        instance: bytes,
        keys: ClusterKeys | None = None,
        *,
        authorize: Callable[[bytes, Authorize], bool] | None = None,
        context: curve.Context | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        for address in addresses:
            curve.check_address(address, secret=keys is not None)
        self.counters: Final = ServerCounters()
        self.public_key: bytes | None = None
        self._instance = instance
        self._keys = keys
        self._greeting_mac = greeting_mac(keys)
        self._authorize = authorize
        self._message_bytes_max = message_bytes_max
        self._peers: dict[bytes, Peer] = {}
        self._probe_ns = 0
        self._lanes = Lanes()
        self._ended: list[Peer] = []
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._door: curve.ZapAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._connections: Connections | None = None
        try:
            _set_options(self._socket, message_bytes_max)
            if keys is not None:
                self._door = self._keep_door(keys)
            if not all(address.startswith("inproc:") for address in addresses):
                self._connections = Connections(self._socket)
            self.addresses: Final = tuple(map(self._bind, addresses))
        except BaseException:
            self.close()
            raise
        self._watched: dict[int, Callable[[], object]] = {}
        if self._door is not None:
            self._watched[self._door.socket.fileno()] = self._door.serve
        if self._connections is not None:
            self._watched[self._connections.monitor.fileno()] = partial(self._connections.look, self.addresses)
        for descriptor in (self._socket.fileno(), *self._watched):
            self._epoll.register(descriptor, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)

    def __enter__(self) -> Self:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def _keep_door(self, keys: ClusterKeys) -> curve.ZapAuthenticator:
        """Let in only who has the cluster's key, and prove it."""
        curve.check_library()
        pair = CurvePair.random()
        door = curve.ZapAuthenticator(self._context, keys.client.public)
        try:
            curve.secure_server(self._socket, pair)
            curve.prove_closed(self._context, self._socket, door, pair, keys.client)
        except BaseException:
            door.close()
            raise
        self.public_key = pair.public
        return door

    def _bind(self, address: str) -> str:
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {address}: {error}; use another address") from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wake(self) -> None:
        """Have ``receive`` return at once, now or when it is called next. Threads: any."""
        os.eventfd_write(self._wake, 1)

    def receive(self, timeout_ms: int) -> list[tuple[Peer, int, WireRequest]]:
        """Wait for requests and take those whose turn it is.

        Args:
            timeout_ms: Milliseconds to wait for the first; 0 takes what is there.

        Returns:
            Session, request id and request of each, in the order of each client; none after ``wake``, the time-out, or
            now and then before. What one call returns of one client is bounded while there are others (``Lanes``).
            Their entries refer to the frames received, which live as long as they are referred to.

        Cost: 10 microseconds per request, and the checksum of its entries.
        """
        lanes = self._lanes
        more = self._drain()  # replying may have taken the signal that something came
        connections = self._connections
        if connections is not None and connections.greeting:
            connections.check_greeting(self.addresses)
            timeout_ms = min(timeout_ms, GREETING_LOOK_MS)
        ready = self._epoll.poll(0 if more or lanes.busy else timeout_ms / 1000)
        for descriptor, _ in ready:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self._watched:
                self._watched[descriptor]()
        if ready and not lanes.busy:
            self._drain()
        arrived: list[tuple[Peer, int, WireRequest]] = []
        now_ns = time.monotonic_ns()
        for routing_id, message in lanes.turn(now_ns):
            request = self._admit(routing_id, message.head, message.bodies, now_ns)
            if request is not None:
                arrived.append(request)
        self.counters.received += len(arrived)
        return arrived

    def _drain(self) -> bool:
        """Put what waits in the socket into the lanes, up to a bound.

        Returns:
            Whether more may wait, of which no signal will tell.
        """
        socket = self._socket
        recv = socket.recv
        peers = self._peers
        drained = 0
        option: Callable[[int], Any] = socket.get
        for _ in range(_RECEIVED_MAX):
            if not option(zmq.EVENTS) & _READABLE:
                return False
            if drained >= _RECEIVED_BYTES_MAX or self._lanes.full:
                return True
            routing_id = recv(_DONT_WAIT)
            head = recv(_DONT_WAIT) if routing_id in peers else self._first_head()
            bodies: list[memoryview] = []
            size = kept = len(head)
            while option(zmq.RCVMORE):
                body = recv(_DONT_WAIT, copy=False).buffer
                size += len(body)
                if len(bodies) <= RUNS_MAX and size <= self._message_bytes_max:  # else it counts as damaged
                    bodies.append(body)
                    kept = size
            drained += size
            if not self._lanes.put(routing_id, Waiting(head, bodies, kept)):
                self.counters.flooded += 1
                if routing_id in self._peers:
                    self._drop(self._peers[routing_id])
        return True

    def _first_head(self) -> bytes:
        """Receive the head of a message of no session, which may be the first one of its connection."""
        frame = self._socket.recv(_DONT_WAIT, copy=False)
        if self._connections is not None:
            self._connections.heard(frame, self.addresses)
        return frame.bytes

    def _admit(
        self, routing_id: bytes, head: bytes, bodies: Sequence[memoryview], now_ns: int
    ) -> tuple[Peer, int, WireRequest] | None:
        """Check one message, answer it if that needs no bookie, and return it otherwise."""
        try:
            header = decode_head(head)
        except FrameError:
            self.counters.garbage += 1
            return None
        if header.kind == MessageKind.HELLO:
            self._greet(routing_id, header, head)
            return None
        peer = self._peers.get(routing_id)
        if peer is None:
            self.counters.strangers += 1
            self._send(routing_id, NO_SESSION, header.request_id, self._greeting_mac, header.version)
            return None
        if not is_authentic(header, head, peer._mac):
            self.counters.forged += 1
            return None
        if header.counter <= peer._counter:
            self.counters.replayed += 1
            return None
        peer._counter = header.counter
        peer._taken_bytes = header.taken_bytes
        peer._seen_ns = now_ns
        if header.instance != self._instance:
            self.reply(peer, header.request_id, Reply(Status.WRONG_INSTANCE))
            return None
        if not is_whole(header, head, bodies):
            self.counters.damaged += 1
            self._answer(peer, header.request_id, DAMAGED)
            return None
        try:
            message = decode_request(header, head, bodies)
            if not isinstance(message, Ping | Authorize):
                return peer, header.request_id, message
            allowed = isinstance(message, Ping) or self._grant(peer, message)
            answer = _OK if allowed else _UNAUTHORIZED
        except FrameError:
            self.counters.refused += 1
            answer = _REFUSED
        except Exception:  # the barrier: whatever an authentic message says ends nothing
            self.counters.faults += 1
            logger.exception("a request was refused that could not be decoded or authorized; this is a defect")
            answer = _REFUSED
        self.reply(peer, header.request_id, answer)
        return None

    def _grant(self, peer: Peer, proof: Authorize) -> bool:
        """Note a right that was proved; tell whether it was."""
        if self._authorize is None or not self._authorize(peer.session_id, proof):
            return False
        peer.grant(proof.ledger_id, proof.description)
        return True

    def _greet(self, routing_id: bytes, header: Header, head: bytes) -> None:
        """Begin a session."""
        try:
            client_nonce = blob(header, head, NONCE_BYTES)
        except FrameError:
            client_nonce = b""
        if len(client_nonce) != NONCE_BYTES or header.a < frames.VERSION_MIN or not is_whole(header, head, ()):
            self.counters.garbage += 1
            return
        if not is_authentic(header, head, self._greeting_mac):
            self.counters.forged += 1
            return
        if not self._make_room(routing_id):
            self.counters.turned_away += 1
            self._send(routing_id, NO_SESSION, header.request_id, self._greeting_mac, header.version)
            return
        session_id = secrets.token_bytes(SESSION_BYTES)
        nonce = secrets.token_bytes(NONCE_BYTES)
        mac = session_mac(self._keys, session_id, (client_nonce, nonce), self._instance)
        version = min(header.a, frames.VERSION)
        if routing_id in self._peers:
            self._ended.append(self._peers[routing_id])
        self._peers[routing_id] = Peer(routing_id, session_id, mac, version)
        welcome = Outgoing(
            MessageKind.WELCOME, numbers=(version, self._message_bytes_max, 0, 0), blob=session_id + nonce
        )
        self._send(routing_id, welcome, header.request_id, mac, header.version)

    def _make_room(self, routing_id: bytes) -> bool:
        """Return whether there is room for another session, after ending those whose clients are gone.

        A session with a right to a ledger is a writer's, and stays however long it is idle: a writer whose session ends
        has to prove its rights again. Of the others, an idle one makes room.
        """
        if routing_id in self._peers:
            return True  # it takes the place of the connection's own
        now_ns = time.monotonic_ns()
        full = len(self._peers) >= SESSIONS_MAX
        if now_ns >= self._probe_ns:
            self._probe_ns = now_ns + _PROBE_NS
            self._lanes.check_all_written()
            for peer in list(self._peers.values()):
                if full or now_ns - peer._seen_ns > _SILENCE_NS:
                    self._answer(peer, PROBE_ID, encode(_OK))
        if len(self._peers) >= SESSIONS_MAX:
            idle = [peer for peer in self._peers.values() if not peer.rights and now_ns - peer._seen_ns >= _IDLE_NS]
            if not idle:
                return False
            self._drop(min(idle, key=lambda peer: peer._seen_ns))
        return True

    def reply(self, peer: Peer, request_id: int, message: WireReply) -> bool:
        """Answer a request; never waits.

        Args:
            peer: Whose request.
            request_id: The request's.
            message: The answer.

        Returns:
            False if the client is gone or does not read: its session has ended, and it will take what it asked for
            as unanswered. While more than ``UNREAD_BYTES_MAX`` are unread, answers with entries become ``REFUSED``.

        Cost: 4 microseconds.
        """
        return self._answer(peer, request_id, encode(message))

    def _answer(self, peer: Peer, request_id: int, answer: Outgoing) -> bool:
        if self._peers.get(peer._routing_id) is not peer:
            return False
        if answer.size > _SMALL_BYTES and self._leaves_unread(peer, answer.size):
            self.counters.unread += 1
            answer = encode(_REFUSED)
        peer._sent_bytes += answer.size
        if not self._send(peer._routing_id, answer, request_id, peer._mac, peer._version):
            self._drop(peer)
            return False
        return True

    def _leaves_unread(self, peer: Peer, size: int) -> bool:
        """Return whether a client would leave too much unread with an answer of this size.

        That is judged by what the client says, and apart from that by what is known to have been written to it.
        """
        claimed = peer._sent_bytes - min(peer._taken_bytes, peer._sent_bytes)
        lanes = self._lanes
        lane = lanes.of(peer._routing_id)
        lanes.check_written(lane)
        if claimed + size > UNREAD_BYTES_MAX or lane.unwritten + size > UNWRITTEN_BYTES_MAX:
            return True
        if lanes.unwritten + size > UNREAD_TOTAL_BYTES_MAX and lane.unwritten + size > UNREAD_SHARE_BYTES:
            lanes.check_all_written()
            return lanes.unwritten + size > UNREAD_TOTAL_BYTES_MAX
        return False

    def _send(self, routing_id: bytes, answer: Outgoing, request_id: int, mac: Mac, version: int) -> bool:
        """Send a message; tell whether the client is there and has room for it."""
        send = self._socket.send
        bodies: list[zmq.Frame] = answer.frames
        head: bytes | zmq.Frame = answer.head(request_id, 0, 0, self._instance, mac, version)
        lane = self._lanes.of(routing_id)
        mark: zmq.MessageTracker | None = None
        if self._lanes.wants_mark(lane, answer.size):
            last = zmq.Frame(bodies[-1].buffer if bodies else head, track=True, copy=False)
            mark = last.tracker
            if bodies:
                bodies = [*bodies[:-1], last]
            else:
                head = last
        try:
            send(routing_id, _MORE)
            send(head, _MORE if bodies else _DONT_WAIT, copy=mark is None)
            for place, body in enumerate(bodies, 1):
                send(body, _MORE if place < len(bodies) else _DONT_WAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        self._lanes.sent(lane, answer.size, mark)
        return True

    def _drop(self, peer: Peer) -> None:
        self.counters.dropped += 1
        self._ended.append(peer)
        del self._peers[peer._routing_id]

    def take_ended(self) -> list[Peer]:
        """Return the sessions that have ended since the last call, whose clients wait for nothing any more."""
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Stop listening; what was not sent is not."""
        self._peers.clear()
        self._epoll.close()
        if self._connections is not None:
            self._connections.close()
        self._socket.close(linger=0)
        if self._door is not None:
            self._door.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        if self._own_context:
            self._context.term()


def _set_options(socket: curve.Socket, message_bytes_max: int) -> None:
    """Bound what a socket keeps, and have it say when a client is gone instead of dropping its replies."""
    socket.linger = 0
    socket.maxmsgsize = message_bytes_max
    socket.sndhwm = _QUEUE_MESSAGES
    socket.rcvhwm = _QUEUE_MESSAGES
    socket.router_mandatory = True
    socket.router_handover = False
    socket.handshake_ivl = curve.HANDSHAKE_MS
    curve.set_heartbeat(socket)
