"""The client's end of the wire: ``Link`` is the connection to one bookie, and ``Links`` polls all links of a client.

Theory of operation
-------------------

A link has one socket per session, and ZeroMQ never reconnects it. Its states:

    CLOSED --send, _open--> CONNECTING --handshake, _greet--> GREETED --WELCOME, _begin--> UP
       ^                        |                                |                         |
       +------- lose -----------+--------------------------------+-------------------------+
    UP --NO_SESSION (the bookie forgot the session), _without_session--> GREETED, over the same connection
    any --the cluster uses another secret, _move--> CONNECTING, with outstanding requests

``socket`` is None only in CLOSED, ``_mac`` is set only in UP. Requests that are sent before UP wait in ``_outstanding``
and are transmitted by ``_begin``. ``lose`` reports all of them as unanswered, because it is unknown whether they took
effect. After a forgotten session they are sent again, because the bookie is the same process and compares entries that
it already has. They are also sent again when a link begins again with another secret of the cluster, because no other
process has the CURVE key to which the link connects. Each request has exactly one outcome, which ``Links.poll``
returns.

A link ends a connection that is not UP within the time of a handshake, that the socket's monitor reports as broken,
or that is silent after a ping (``_look_after``).

``Links`` owns what all links share: the epoll descriptor over their sockets and monitors, the outcomes that are not
returned yet, the rights that are proved in each session, and the time of the next check (``due_ns``). A link adds its
sockets to the epoll set (``_watch``) and appends its outcomes. A ZeroMQ descriptor signals once when something arrives,
and sending or receiving may consume that signal; so a link that has sent a message, or has a new socket, is in
``_touched``, and the next ``poll`` asks ZeroMQ for it. ``poll`` waits by one call for these sockets and for the epoll
descriptor, which has the signals of all others. A link whose last reply was received is in ``_touched``, too, because
it hardly ever has another message at once.

The bookie of the client's own process has an ``InProcessLink`` instead, which has no socket: ``poll`` flushes the
requests that were handed over to it, and takes its replies.

Everything runs in the thread that calls ``send`` and ``poll``, one at a time; there are no locks. Only ``Links.wake``
may be called by any thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from pybk.errors import TooManyRequestsError, UsageError
from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.messages import EntryRun, Read, Reply, Status
from pybk.transport import curve, frames, heartbeat
from pybk.transport.cluster_keys import (
    ClusterKeys,
    HeldKeys,
    Mac,
    MemberKey,
    RightsKey,
    greeting_mac,
    held_keys,
    mac_of,
    session_key,
)
from pybk.transport.codec import (
    HELLO_ID,
    NONCE_BYTES,
    PLAIN_REPLIES,
    SESSION_BYTES,
    Answer,
    Authorize,
    AuthorizeMember,
    EntryRead,
    MessageKind,
    OneEntry,
    Ping,
    WireReply,
    WireRequest,
    decode_reply,
    encode,
    plain_reply,
    says_damaged,
)
from pybk.transport.frames import (
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
from pybk.transport.in_process import NEVER_NS, OWN_IDS, Called, InProcessLink
from pybk.transport.server import QUEUE_MESSAGES

logger = logging.getLogger(__name__)

TIMEOUT_NS: Final = 5 * 10**9
"""The default time after which a request counts as unanswered, nanoseconds."""

PING_NS: Final = 5 * 10**9
"""The time within which a ping must be answered; a link sends it after half of this time without a message."""

OUTSTANDING_BYTES_MAX: Final = 32 << 20
"""The default bound on the outstanding bytes of one link: those of its requests, and those that its reads ask for."""

_RESENT_MAX: Final = 3
_RECONNECT_MS: Final = 24 * 3600 * 1000
"""The time after which ZeroMQ would reconnect: a day, so it never does, because a link that broke gets a new socket."""

RETRY_NS: Final = 20_000_000
"""The least time between two attempts to connect."""

HANDSHAKE_NS: Final = curve.HANDSHAKE_MS * 10**6
"""The time that a connection may take until its session begins."""

READ_ROUNDS: Final = 4096
"""The messages that one ``poll`` receives at most from each link, so that a bookie cannot hold its caller."""

_new_tuple = tuple.__new__
_READ_BYTES: Final = 256
"""The bytes that a read of one entry counts while it is outstanding."""

_READABLE: Final = int(zmq.POLLIN)
_DONT_WAIT: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_NO_SESSION: Final = int(MessageKind.NO_SESSION)
_UNAUTHORIZED: Final = int(Status.UNAUTHORIZED)
_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_REASONS: Final = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "the bookie refused this client's key: is it the same cluster secret?",
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): "the peer speaks another protocol: do both have a secret?",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): "the handshake failed: do both have the same cluster secret?",
    int(zmq.EVENT_DISCONNECTED): "the connection broke",
    int(zmq.EVENT_CLOSED): "no process listens at the address",
}

Outcome = tuple["Link | InProcessLink", int, WireReply | OneEntry | None]
"""Link, request id, and reply; None instead of a reply if none came, and the request's effect is unknown."""

Sent = Outgoing | EntryRead
"""A request as a link keeps it until it ends."""

_contexts: Final[set[curve.Context]] = set()
"""The contexts of links that are not closed. This set keeps them alive, because the garbage collector must not collect
a context together with its sockets: it would clear the weak references by which the context finds its sockets, and
terminating the context would then wait for them for ever."""


@dataclass(slots=True)
class LinkCounters:
    """Counts of the messages that the links of a client received, and of their ends.

    Attributes:
        garbage: Frames that are not messages.
        forged: Messages without the right MAC.
        damaged: Requests or replies that arrived damaged, after which the request was sent again.
        late: Replies that arrived after their request had ended.
        lost: Connections that ended or were refused.
        forgotten: Sessions that a bookie had forgotten, and that the link began again over the same connection.
    """

    garbage: int = 0
    forged: int = 0
    damaged: int = 0
    late: int = 0
    lost: int = 0
    forgotten: int = 0


class Link:
    """The connection to one bookie; made by ``Links.connect``.

    A link that broke reports its outstanding requests as unanswered. It connects again, in a new session, with the next
    request.

    Attributes:
        bookie: The bookie.
        address: The address it connects to.
        outstanding_bytes: Bytes of the outstanding requests, and bytes that outstanding reads ask for.
        why_down: The reason, for people, why the last connection ended; empty during a session, and before the first.
    """

    def __init__(self, links: Links, bookie: Bookie, address: str, server_public: bytes | None) -> None:
        self.bookie: Final = bookie
        self.address: Final = address
        self.outstanding_bytes = 0
        self.why_down = ""
        self._links = links
        self._server_public = server_public
        self.socket: curve.Socket | None = None
        """The connection; None while the link is down."""
        self.monitor: curve.Socket | None = None
        """The monitor, which reports the events of the connection; None without a connection."""
        self._mac: Mac | None = None
        self._key = b""
        """The key of ``_mac``, as ``session_key`` returns it."""
        self._keys: ClusterKeys | None = None
        """The keys of the secret with which the connection began; None without a secret."""
        self._nonce = b""
        self._session_id = b""
        self._instance = b""
        self._proved: set[int] = set()
        self._counter = 0
        self._taken_bytes = 0
        self._outstanding: dict[int, tuple[int, int, Sent, int]] = {}
        self._resent: dict[int, int] = {}
        self._forgotten = 0
        self._first_deadline_ns = NEVER_NS
        self.version = 0
        """The version of the protocol that the greeting agreed on; 0 before it."""
        self._message_bytes_max = links._message_bytes_max
        self.pinged_ns = NEVER_NS
        """The time of the ping that is not answered; ``NEVER_NS`` for none."""
        self.heard_ns = 0
        """The time when the last message of the bookie arrived."""
        self._opened_ns = 0

    def __repr__(self) -> str:
        """Return the bookie, the address, and whether a session exists."""
        return f"<Link to {self.bookie} at {self.address}, {'up' if self.is_up else 'down'}>"

    @property
    def is_up(self) -> bool:
        """True if a session exists."""
        return self._mac is not None

    @property
    def outstanding(self) -> int:
        """The number of requests without a reply."""
        return len(self._outstanding)

    def send(self, request_id: int, message: WireRequest, timeout_ns: int = TIMEOUT_NS) -> bool:
        """Send a request without waiting; ``Links.poll`` returns its outcome, exactly once.

        Args:
            request_id: From 0 below 2**63; not that of an outstanding request of this link.
            message: The request; its entries must not change until the outcome is known.
            timeout_ns: Nanoseconds after which it counts as unanswered.

        Returns:
            False if too many bytes are outstanding. Nothing was sent then; try again after ``Links.poll`` returned
            outcomes.

        Raises:
            UsageError: The message is larger than the bookie accepts, or the request id is outstanding.

        Cost: 8 microseconds for the first bookie; 4 for each further bookie to which the same message is sent directly
            afterwards.
        """
        links = self._links
        known, outgoing = links.encoded
        if message is not known:  # it may be sent to several bookies in a row
            outgoing = encode(message)
            links.encoded = message, outgoing
        size = outgoing.size
        if size > self._message_bytes_max or request_id in self._outstanding:
            raise UsageError(
                f"request {request_id} of {size} bytes to {self.bookie}: the limit is "
                f"{self._message_bytes_max}, and each id is sent once: send smaller batches"
            )
        if type(message) is Read:
            size += message.bytes_max
        if self._outstanding and self.outstanding_bytes + size > links._outstanding_bytes_max:
            return False
        now_ns = time.monotonic_ns()
        if links._keys is not None and links._keys.all[0] is not links._current:
            links._follow_keys(links._keys.all[0])
        if self.socket is None and not self._reopen(now_ns):
            links._outcomes.append((self, request_id, None))
            return True
        ledger_id = getattr(message, "ledger_id", -1)
        if self._mac is not None and not self._transmit(request_id, outgoing, ledger_id):
            self.hear()
            if self.socket is not None and self._outstanding:
                return False
            # ZeroMQ's queue is full of requests that have timed out, so the connection makes no progress.
            self.lose("the connection broke")
            links._outcomes.append((self, request_id, None))
            return True
        deadline_ns = now_ns + timeout_ns
        self._outstanding[request_id] = (deadline_ns, size, outgoing, ledger_id)
        self.outstanding_bytes += size
        if deadline_ns < self._first_deadline_ns:
            self._first_deadline_ns = deadline_ns
            links._look_at(deadline_ns)
        return True

    def read(self, request_id: int, request: EntryRead, timeout_ns: int) -> bool:
        """Send a read of one entry, as ``send`` does; no right is proved for it.

        Args:
            request_id: As of ``send``.
            request: The read.
            timeout_ns: As of ``send``.

        Returns:
            False if nothing was sent, because there is no session, or too much is outstanding.
        """
        links = self._links
        now_ns = time.monotonic_ns()
        if links._keys is not None and links._keys.all[0] is not links._current:
            links._follow_keys(links._keys.all[0])
        full = self._outstanding and self.outstanding_bytes + _READ_BYTES > links._outstanding_bytes_max
        if self._mac is None or self.socket is None or full:
            return False
        counter = self._counter + 1
        instance = self.bookie.instance
        if WIRE_CORE is None:
            head = request.head(request_id, counter, self._taken_bytes, instance, self._mac, self.version)
        else:
            version, taken_bytes = self.version, self._taken_bytes
            head = WIRE_CORE.make_read(self._key, instance, version, request_id, counter, taken_bytes, *request)
        links._touched.add(self)
        self._counter = counter
        try:
            send_frame(self.socket, head, _DONT_WAIT)
        except zmq.Again:
            return False
        deadline_ns = now_ns + timeout_ns
        self._outstanding[request_id] = (deadline_ns, _READ_BYTES, request, -1)
        self.outstanding_bytes += _READ_BYTES
        if deadline_ns < self._first_deadline_ns:
            self._first_deadline_ns = deadline_ns
            links._look_at(deadline_ns)
        return True

    def close(self) -> None:
        """Close the connection and remove the link; its outstanding requests are reported as unanswered."""
        self.lose("closed")
        self._links._remove(self)

    def _transmit(self, request_id: int, outgoing: Sent, ledger_id: int = -1) -> bool:
        """Send a request, and before it the proof of the right to its ledger if that was not sent in this session.

        Args:
            request_id: The id of the request.
            outgoing: The request.
            ledger_id: Its ledger; -1 for a request that takes no right.

        Returns:
            False if ZeroMQ's queue is full.
        """
        if ledger_id not in self._proved and ledger_id in self._links._grants:
            description, key = self._links._grants[ledger_id]
            proof = key.sign(self._session_id, self._instance, ledger_id)
            right = Authorize if isinstance(key, RightsKey) else AuthorizeMember
            if not self._transmit(self._own_id(), encode(right(ledger_id, description, proof))):
                return False
            self._proved.add(ledger_id)
        assert self.socket is not None
        assert self._mac is not None
        self._links._touched.add(self)
        self._counter += 1
        instance = self.bookie.instance
        head = outgoing.head(request_id, self._counter, self._taken_bytes, instance, self._mac, self.version)
        socket = self.socket
        bodies = outgoing.frames
        try:
            if not bodies:
                send_frame(socket, head, _DONT_WAIT)
                return True
            send_frame(socket, head, _MORE)
            for number, body in enumerate(bodies, 1):
                send_frame(socket, body, _MORE if number < len(bodies) else _DONT_WAIT, False)
        except zmq.Again:
            return False
        return True

    def _own_id(self) -> int:
        """Return a request id that no caller uses."""
        return OWN_IDS + self._counter

    # ---- the connection ----------------------------------------------------------------------------------------------

    def _reopen(self, now_ns: int) -> bool:
        """Connect again; return False if that fails at once, or the last attempt is less than ``RETRY_NS`` ago."""
        if now_ns - self._opened_ns < RETRY_NS:
            return False
        try:
            self._open()
        except zmq.ZMQError as error:
            self._opened_ns = now_ns
            logger.warning("no socket for a link to bookie %s: %s; the next request tries again", self.bookie, error)
            return False
        return True

    def _open(self) -> None:
        """Begin to connect with a new socket, over which no message of an earlier session can be sent or received."""
        links = self._links
        socket = links._context.socket(zmq.DEALER)
        socket.linger = 0
        # Disabling reconnection, or setting IMMEDIATE, would make ZeroMQ discard replies that arrived before the
        # connection ended. Nothing is sent before the session begins, so no message can wait for a connection.
        socket.immediate = False
        socket.reconnect_ivl = _RECONNECT_MS
        socket.maxmsgsize = links._message_bytes_max
        socket.sndhwm = socket.rcvhwm = QUEUE_MESSAGES
        socket.connect_timeout = socket.handshake_ivl = curve.HANDSHAKE_MS
        heartbeat.set_heartbeat(socket)
        self.socket = socket
        links._touched.add(self)
        self._opened_ns = self.heard_ns = time.monotonic_ns()
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        local = self.address.startswith("inproc:")
        self._keys = links._current
        if self._keys is not None and self._server_public is not None and not local:
            curve.secure_client(socket, self._keys.client, self._server_public)
        if not local:
            self.monitor = socket.get_monitor_socket(_EVENTS)
            self.monitor.linger = 0
            links._watch_monitor(self.monitor, self)
        try:
            socket.connect(self.address)
        except zmq.ZMQError as error:
            links._watch(socket, self)
            self._disconnect()
            raise UsageError(f"cannot connect to {self.bookie} at {self.address!r}: {error}") from error
        links._watch(socket, self)
        links._look_at(self._opened_ns + HANDSHAKE_NS)
        if local:
            self._greet()

    def _greet(self) -> None:
        """Send HELLO, which asks for a session."""
        assert self.socket is not None
        # HELLO has the oldest version that this pybk speaks, so that a bookie one version older can decode it.
        hello = Outgoing(MessageKind.HELLO, numbers=(frames.VERSION, 0, 0, 0), blob=self._nonce)
        mac = greeting_mac(self._keys)
        head = hello.head(HELLO_ID, 0, 0, self.bookie.instance, mac, frames.VERSION_MIN)
        self._links._touched.add(self)
        try:
            self.socket.send(head, _DONT_WAIT)
        except zmq.Again:
            self.lose("the connection broke")

    def hear(self) -> None:
        """Receive and handle the events of the connection's monitor."""
        while self.monitor is not None and self.monitor.poll(0):
            event = int(parse_monitor_message(self.monitor.recv_multipart(_DONT_WAIT))["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet()
            else:
                self._links._take([self])  # replies that arrived before the connection ended
                self.lose(_REASONS[event])

    def _move(self) -> None:
        """Begin a session with the present secret, in which all outstanding requests are sent again.

        The requests were sent to the process at the other end, because no other process has its CURVE key.
        """
        self._disconnect()
        try:
            self._open()
        except (UsageError, zmq.ZMQError) as error:
            logger.warning("no socket for a link to bookie %s: %s; the next request tries again", self.bookie, error)
            self._links._outcomes.extend((self, request_id, None) for request_id in self._outstanding)
            self._forget_requests()

    def _disconnect(self) -> None:
        """Close the sockets and forget the session."""
        if self.socket is None:
            return
        self._links._watch_no_more(self.socket)
        if self.monitor is not None:
            self._links._watch_no_more(self.monitor)
            self.socket.disable_monitor()
            self.monitor.close()
            self.monitor = None
        self.socket.close(linger=0)
        self.socket = None
        self._mac = None
        self._forgotten = 0
        self._proved.clear()

    def lose(self, why: str) -> None:
        """End the connection for the reason ``why``, and report all outstanding requests as unanswered."""
        if self.socket is None:
            return
        self._disconnect()
        self._links.counters.lost += 1
        self.why_down = why
        self._links._outcomes.extend((self, request_id, None) for request_id in self._outstanding)
        self._forget_requests()

    def _forget_requests(self) -> None:
        self._outstanding.clear()
        self._resent.clear()
        self.outstanding_bytes = 0
        self._first_deadline_ns = NEVER_NS

    def _look_after(self, now_ns: int) -> None:
        """End requests that timed out and a connection that does not answer; ping a bookie that is silent."""
        self._links._take([self])
        self.hear()
        if now_ns >= self._first_deadline_ns:
            over = [request_id for request_id, noted in self._outstanding.items() if noted[0] <= now_ns]
            for request_id in over:
                self._end(request_id, None)
            self._first_deadline_ns = min((noted[0] for noted in self._outstanding.values()), default=NEVER_NS)
        if self.socket is not None:
            if self._mac is None:
                self._give_up(self._opened_ns + HANDSHAKE_NS, now_ns, "the handshake was not answered in time")
            elif self.pinged_ns != NEVER_NS:
                self._give_up(self.pinged_ns + PING_NS, now_ns, "the bookie is silent")
            elif now_ns - self.heard_ns >= PING_NS // 2:
                self.pinged_ns = now_ns
                self._transmit(self._own_id(), encode(Ping()))
        self._links._look_at(self._first_deadline_ns)

    def _give_up(self, end_ns: int, now_ns: int, why: str) -> None:
        """End the connection if ``end_ns`` has passed; otherwise schedule ``_look_after`` for that time."""
        if now_ns >= end_ns:
            self.lose(why)
        else:
            self._links._look_at(end_ns)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def take(self, socket: curve.Socket) -> None:
        """Receive one message, which has arrived at the socket of this link, verify it and act on it."""
        recv = socket.recv
        frame = recv(_DONT_WAIT, copy=False)
        if WIRE_CORE is not None and self._mac is not None and not frame.more:
            found = WIRE_CORE.take_reply(frame, self._key, self._instance)
            if found is not None and self._take_short(frame, *found):
                return
        head = frame.bytes
        bodies: list[memoryview] = []
        more = frame.more
        while more:
            body = recv(_DONT_WAIT, copy=False)
            more = body.more
            if len(bodies) <= RUNS_MAX:  # one too many is enough to be refused
                bodies.append(body.buffer)
        self.heard_ns = time.monotonic_ns()
        self.pinged_ns = NEVER_NS
        counters = self._links.counters
        try:
            header = decode_head(head)
        except FrameError:
            counters.garbage += 1
            return
        if self._mac is None or header.kind == _NO_SESSION:
            self._take_greeting(header, head)
            return
        if not is_authentic(header, head, self._mac) or header.instance != self._instance:
            counters.forged += 1
            return
        self._forgotten = 0
        self._taken_bytes += len(head) + sum(map(len, bodies)) if bodies else len(head)
        request_id = header.request_id
        noted = self._outstanding.get(request_id)
        if noted is None:
            counters.late += request_id < OWN_IDS
            return
        reply = None if bodies else plain_reply(header)
        if reply is None:
            self._take_content(header, head, bodies)
            return
        if reply.status is Status.UNAUTHORIZED:
            self._proved.discard(noted[3])
        del self._outstanding[request_id]  # the next lines repeat ``_end``, which would be one more call for each reply
        self.outstanding_bytes -= noted[1]
        if self._resent:
            self._resent.pop(request_id, None)
        self._links._outcomes.append((self, request_id, reply))

    def _take_short(
        self, frame: zmq.Frame, request_id: int, flags: int, first: int, stride: int, start: int, end: int
    ) -> bool:
        """Handle an authentic reply that is whole, and has one entry or no content.

        Returns:
            False if it is neither; nothing was done then.
        """
        reply: WireReply | OneEntry | None
        reply = PLAIN_REPLIES.get(flags) if start == end else _new_tuple(OneEntry, (frame.buffer, start, end))
        if reply is None:
            return False
        self.heard_ns = time.monotonic_ns()
        self.pinged_ns = NEVER_NS
        self._forgotten = 0
        self._taken_bytes += end
        noted = self._outstanding.pop(request_id, None)
        if noted is None:
            self._links.counters.late += request_id < OWN_IDS
            return True
        self.outstanding_bytes -= noted[1]
        if self._resent:
            self._resent.pop(request_id, None)
        if start == end:
            if flags == _UNAUTHORIZED:
                self._proved.discard(noted[3])
        elif type(noted[2]) is not EntryRead:
            entry = memoryview(frame.bytes)[start:end]
            reply = Answer(Status.OK, EntryRun(first, stride, array("q", (end - start,)), (entry,)))
        self._links._outcomes.append((self, request_id, reply))
        return True

    def _take_greeting(self, header: Header, head: bytes) -> None:
        """Handle a message that begins a session, or that belongs to none."""
        if header.kind == _NO_SESSION:
            if self._links._is_greeting(header, head):
                self._without_session(header.request_id)
            else:
                self._links.counters.forged += 1
        # Replies of a session that the bookie has forgotten may still arrive, and are ignored.
        elif header.kind == MessageKind.WELCOME or not self._forgotten:
            self._begin(header, head)

    def _take_content(self, header: Header, head: bytes, bodies: Sequence[memoryview]) -> None:
        """Handle an authentic reply with content, after checking that it is whole."""
        request_id = header.request_id
        counters = self._links.counters
        if says_damaged(header) or not is_whole(header, head, bodies):
            counters.damaged += 1
            self._resend(request_id)
            return
        try:
            self._end(request_id, decode_reply(header, head, bodies))
        except FrameError:
            counters.garbage += 1
            self._end(request_id, None)

    def _without_session(self, request_id: int) -> None:
        """Ask for a new session over the same connection, because the bookie has forgotten this one.

        The bookie is the same process as before, and requests may be repeated: it compares entries that it already has.
        So outstanding requests are sent again when the new session begins, and the bookie does not count as failed.
        """
        if request_id == HELLO_ID:
            self.lose("the bookie has as many sessions as it keeps")
        elif self._mac is not None and self._forgotten >= _RESENT_MAX:
            self.lose("the bookie forgot the session")
        elif self._mac is not None:  # otherwise another request was answered so before, and HELLO is under way
            self._forgotten += 1
            self._links.counters.forgotten += 1
            self._mac = None
            self._proved.clear()
            self._opened_ns = time.monotonic_ns()
            self._nonce = secrets.token_bytes(NONCE_BYTES)
            self._links._look_at(self._opened_ns + HANDSHAKE_NS)
            self._greet()

    def _begin(self, header: Header, head: bytes) -> None:
        """Verify WELCOME, begin the session, and send the requests that waited for it."""
        try:
            both = blob(header, head, SESSION_BYTES + NONCE_BYTES)
        except FrameError:
            both = b""
        session_id, nonce = both[:SESSION_BYTES], both[SESSION_BYTES:]
        key = session_key(self._keys, session_id, (self._nonce, nonce), header.instance)
        mac = mac_of(key)
        known = len(nonce) == NONCE_BYTES and is_whole(header, head, ()) and is_authentic(header, head, mac)
        if not known or header.kind != MessageKind.WELCOME or not frames.VERSION_MIN <= header.a <= frames.VERSION:
            self._links.counters.forged += 1
            self.lose("the peer does not know the cluster's secret")
            return
        self._session_id = session_id
        self._instance = header.instance
        self.version = header.a
        self._message_bytes_max = min(self._links._message_bytes_max, header.b)
        self._counter = 0
        self._taken_bytes = 0
        self._key = key
        self._mac = mac
        self.why_down = ""
        for request_id, (_, _, outgoing, ledger_id) in self._outstanding.items():
            if not self._transmit(request_id, outgoing, ledger_id):
                self.lose("more requests wait for the session than can be sent")
                return

    def _resend(self, request_id: int) -> None:
        """Send a request again, up to ``_RESENT_MAX`` times, because it or its reply arrived damaged."""
        times = self._resent.get(request_id, 0)
        _, _, outgoing, ledger_id = self._outstanding[request_id]
        if times >= _RESENT_MAX or not self._transmit(request_id, outgoing, ledger_id):
            self._end(request_id, Reply(Status.REFUSED))
        else:
            self._resent[request_id] = times + 1

    def _end(self, request_id: int, reply: WireReply | None) -> None:
        """Report the outcome of a request."""
        self.outstanding_bytes -= self._outstanding.pop(request_id)[1]
        if self._resent:
            self._resent.pop(request_id, None)
        self._links._outcomes.append((self, request_id, reply))


class Links:
    """All links of a client.

    Args:
        keys: The cluster's keys, which may change: the links then begin sessions with the new ones. None without a
            secret.
        own: The bookie of this process, and its server, to which requests are passed by call; None without one.
        context: The ZeroMQ context, needed for ``inproc``; None to make one.
        outstanding_bytes_max: Bound on the outstanding bytes of each link, see ``Link.outstanding_bytes``.
        message_bytes_max: Bound on each frame received; a larger one ends the connection unread.

    Attributes:
        counters: Counts since the links were made.

    Threads: one at a time, except for ``wake``, which any thread may call until ``close`` is called.
    """

    def __init__(
        self,
        keys: ClusterKeys | HeldKeys | None = None,
        *,
        own: tuple[Bookie, Called] | None = None,
        context: curve.Context | None = None,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        if keys is not None:
            curve.check_library()
        self.counters: Final = LinkCounters()
        self._keys = held_keys(keys)
        self._current = None if self._keys is None else self._keys.current
        """The keys with which sessions begin; each connection has the same."""
        self._own_context = context is None
        if context is None:
            context = zmq.Context()
            _contexts.add(context)
        self._context = context
        self._outstanding_bytes_max = outstanding_bytes_max
        self._message_bytes_max = message_bytes_max
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links: list[Link] = []
        self._own = own
        self._in_process: InProcessLink | None = None
        """The link to the bookie of this process, once it was asked for."""
        self._grants: dict[int, tuple[bytes, RightsKey | MemberKey]] = {}
        self._outcomes: list[Outcome] = []
        self.due_ns = 0
        """The time when deadlines are checked next."""
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._signals: tuple[Any, int] = (self._epoll.fileno(), _READABLE)
        """The epoll descriptor, as ``zmq_poll`` takes it."""
        self._by_socket: dict[Any, Link] = {}
        """The links, by their sockets."""
        self._by_descriptor: dict[int, Link] = {}
        """The links, by the descriptors of their sockets."""
        self._by_monitor: dict[int, Link] = {}
        """The links, by the descriptors of their monitors."""
        self._touched: set[Link] = set()
        self._omitted = False
        """Whether the last ``poll`` left signals to this one."""
        self.encoded: tuple[WireRequest | None, Outgoing] = (None, encode(Ping()))
        """The message that was sent last, and its encoding."""

    def __enter__(self) -> Self:
        """Return the links."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the links."""
        self.close()

    def connect(self, bookie: Bookie, address: str, server_public: bytes | None = None) -> Link:
        """Make a link to a bookie, without waiting for the connection; requests that are sent before it wait for it.

        Args:
            bookie: The bookie and instance; another instance at the address answers ``WRONG_INSTANCE``.
            address: The address in its registration.
            server_public: The CURVE key in its registration; None without a secret.

        Raises:
            UsageError: Only one of the two ends has a secret, or ``address`` is not an address.
            TooManyRequestsError: The process has the most sockets that it may have.
        """
        if (server_public is None) is not (self._keys is None):
            which = "has a CURVE key" if server_public else "has no CURVE key"
            raise UsageError(f"bookie {bookie} {which}: give cluster_secret to all of a cluster, or to none")
        curve.check_address(address, secret=True)
        link = Link(self, bookie, address, server_public)
        try:
            link._open()
        except zmq.ZMQError as error:
            raise TooManyRequestsError(
                f"no socket for a link to bookie {bookie}: {error}; close files or connections of this process, or "
                "raise its limit (ulimit -n)"
            ) from error
        self._links.append(link)
        return link

    def own_link(self, bookie: Bookie) -> InProcessLink | None:
        """Return the link to a bookie that runs in this process and serves, made if need be; None for another bookie.

        If it no longer serves, another process may be this bookie now, so the client connects to it like to any other
        one.
        """
        if self._own is None or bookie != self._own[0] or self._own[1].closed:
            return None
        if self._in_process is None or self._in_process.closed:
            link = self._in_process = InProcessLink(
                *self._own,
                grants=self._grants,
                on_outcome=lambda request_id, reply: self._outcomes.append((link, request_id, reply)),
                look_at=self._look_at,
                wake=self.wake,
                outstanding_bytes_max=self._outstanding_bytes_max,
                message_bytes_max=self._message_bytes_max,
            )
        return self._in_process

    @property
    def member_key(self) -> MemberKey | None:
        """The key that proves a member's right to recover ledgers; None without a cluster secret."""
        return None if self._keys is None else MemberKey(self._keys)

    def _follow_keys(self, current: ClusterKeys) -> None:
        """Begin all connections again, because the cluster uses another secret now."""
        self._current = current
        for link in self._links:
            if link.socket is not None:
                link._move()

    def _is_greeting(self, header: Header, head: bytes) -> bool:
        """Return whether a message outside of sessions has the MAC of a valid secret."""
        valid = (None,) if self._keys is None else self._keys.all
        return any(is_authentic(header, head, greeting_mac(keys)) for keys in valid)

    def grant(self, ledger_id: int, description: bytes, key: RightsKey | MemberKey) -> None:
        """Make each link prove the right to a ledger in each session, before the first request for the ledger.

        Args:
            ledger_id: The ledger.
            description: The ledger's encoded description, see ``Authorize``.
            key: The key that makes the proofs: the ledger's, or the member's, which gives only the right to recover it.
        """
        self._grants[ledger_id] = (description, key)
        self._forget_right(ledger_id)

    def _forget_right(self, ledger_id: int) -> None:
        """Make each link prove the right to a ledger again, unless it was revoked."""
        for link in self._links:
            link._proved.discard(ledger_id)
        if self._in_process is not None:
            self._in_process.forget_right(ledger_id)

    def revoke(self, ledger_id: int) -> None:
        """Stop proving the right to a ledger; bookies forget it when the session ends."""
        self._grants.pop(ledger_id, None)
        self._forget_right(ledger_id)

    def wake(self) -> None:
        """Make the current or the next ``poll`` return at once; do nothing after ``close``. Threads: any."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def poll(self, timeout_ms: int) -> list[Outcome]:
        """Wait for replies, and return the outcomes of all requests that have ended.

        Args:
            timeout_ms: Milliseconds to wait for the first; 0 does not wait.

        Returns:
            The outcomes: each with a reply, or None if the request timed out or the connection ended. The list is empty
                after ``wake`` and after the time-out, and may be empty earlier.

        Cost: 10 microseconds, and for each reply 7 more and the checksum of its entries.
        """
        now_ns = time.monotonic_ns()
        if self._keys is not None and self._keys.all[0] is not self._current:
            self._follow_keys(self._keys.all[0])
        if now_ns >= self.due_ns:
            self._look_after(now_ns)
        # No signal announces messages that arrived there: sending consumes signals, and a new socket has none until it
        # was read.
        asked = [self._signals]
        for link in self._touched:
            if link._mac is None:
                link.hear()
            if link.socket is not None:
                asked.append((link.socket, _READABLE))
        own = self._in_process
        if own is not None:
            own.flush()
            own.take()
        timeout_ms = 0 if self._outcomes else min(timeout_ms, (self.due_ns - now_ns) // 10**6 + 1)
        ready: list[tuple[Any, int]] = zmq.zmq_poll(asked, timeout_ms)
        self._touched = set()
        if ready:
            signalled = type(ready[0][0]) is int
            self._read(ready[signalled:])
            # The descriptor also has the signals of the sockets that were just read, and mostly no others, so every
            # second look is left to the next call.
            self._omitted = signalled and len(ready) > 1 and not self._omitted
            if signalled and not self._omitted:
                self._look_at_signals()
        if own is not None:
            own.take()
        outcomes = self._outcomes
        self._outcomes = []
        return outcomes

    def _look_at_signals(self) -> None:
        """Receive and handle what the epoll descriptor announces, also of monitors and of ``wake``."""
        signalled = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self._by_descriptor:
                link = self._by_descriptor[descriptor]
                if link not in self._touched:  # otherwise the next ``poll`` asks for it
                    signalled.append(link)
            elif descriptor in self._by_monitor:  # otherwise its link was lost in this turn
                self._by_monitor[descriptor].hear()
        if signalled:
            self._take(signalled)

    def _look_after(self, now_ns: int) -> None:
        """End requests and connections that timed out, ping silent bookies, and set the time of the next check."""
        self.due_ns = now_ns + PING_NS
        for link in self._links:
            link._look_after(now_ns)
        if self._in_process is not None:
            self._in_process.look_after(now_ns)

    def _remove(self, link: Link) -> None:
        """Forget a link that is closed."""
        self._links.remove(link)

    def _look_at(self, time_ns: int) -> None:
        """Schedule ``_look_after`` for this time or earlier."""
        self.due_ns = min(self.due_ns, time_ns)

    def _take(self, links: Iterable[Link]) -> None:
        """Receive and handle all messages that have arrived at some links."""
        asked: list[tuple[Any, int]] = []
        for link in links:
            if link.socket is not None:
                asked.append((link.socket, _READABLE))  # noqa: PERF401  # a comprehension would be a call
        self._read(zmq.zmq_poll(asked, 0))

    def _read(self, readable: list[tuple[Any, int]]) -> None:
        """Receive and handle all messages that have arrived at readable sockets of links.

        Each round asks ZeroMQ once for all links, because asking for each costs more than receiving a message. A link
        that has no request outstanding, or that does not stop sending, is left to the next ``poll``.
        """
        by_socket = self._by_socket
        for _ in range(READ_ROUNDS):
            if not readable:
                return
            asked = []
            for each in readable:
                link = by_socket.get(each[0])
                if link is None:  # it was lost in this turn
                    continue
                link.take(each[0])
                if link.socket is not each[0]:  # it was lost by this message
                    continue
                if link._outstanding or link._mac is None:
                    asked.append(each)
                else:
                    self._touched.add(link)
            readable = zmq.zmq_poll(asked, 0) if asked else asked
        self._touched.update(by_socket[socket] for socket, _ in readable if socket in by_socket)

    def _watch(self, socket: curve.Socket, link: Link) -> None:
        """Make ``poll`` wait for the socket of a link as well."""
        self._epoll.register(socket.fileno(), select.EPOLLIN)
        self._by_descriptor[socket.fileno()] = link
        self._by_socket[socket] = link

    def _watch_monitor(self, socket: curve.Socket, link: Link) -> None:
        """Make ``poll`` wait for the monitor of a link as well."""
        self._epoll.register(socket.fileno(), select.EPOLLIN)
        self._by_monitor[socket.fileno()] = link

    def _watch_no_more(self, socket: curve.Socket) -> None:
        """Remove a socket that is about to be closed from those that ``poll`` waits for."""
        self._epoll.unregister(socket.fileno())
        self._by_socket.pop(socket, None)
        self._by_descriptor.pop(socket.fileno(), None)
        self._by_monitor.pop(socket.fileno(), None)

    def close(self) -> None:
        """Close all links, also those that an error left half open; outstanding requests get no outcome.

        May be repeated, as after an error.
        """
        try:
            if self._in_process is not None:
                self._in_process.close()
            for link in self._links:
                link._disconnect()
            self._links.clear()
        finally:
            self._epoll.close()
            wake, self._wake = self._wake, -1  # before closing: the descriptor's number may be reused at once
            if wake >= 0:
                os.close(wake)
            if self._own_context:
                self._context.destroy(linger=0)
                _contexts.discard(self._context)
