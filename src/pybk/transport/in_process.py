"""The link of a client to the bookie of its own process: requests and replies are passed by call.

Theory of operation. If a process that is both a bookie and a client sent requests to its own bookie by a socket, each
would take two MACs, encryption both ways and four passages through ZeroMQ's thread. Instead, the client's leader hands
its requests over by ``Server.call``, wakes the serving thread once for all of them (``InProcessLink.flush``), and waits
in the ``poll`` of its links. The serving thread takes them in its turn, as if they had arrived at its socket, and
passes each reply to ``InProcessLink.deliver``, which wakes the leader. So a request runs in the same thread, in the
same order and with the same sync as any other, and the same code enforces the rules of the protocol.

The session of the client is a ``Caller``. Its rights are proved as over the wire, although both ends could trust each
other: the proof binds the request to the ledger's password, and the check is made once for each ledger.

A request that timed out is still in the serving thread's queue if that thread makes no progress, for example because a
disk hangs. So its bytes are *late* until it is answered. While too many bytes are late, no request is handed over,
which bounds the queue.

An end (``Server.close``, or an error of the serving thread) is delivered like a reply: all outstanding requests end
without a reply, and later ones do so at once.

Locks: ``_closing`` keeps the leader's wake-up from being called after its links were closed. Everything else has one
thread: the serving thread calls ``deliver`` and ``end``, the leader the other methods. The queues between them are
deques, whose single operations are atomic.

No wake-up is lost. ``deliver`` appends first, and omits the wake-up only if an older reply is still in the queue: the
leader was woken for that one, and then takes all replies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from pybk.errors import UsageError
from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.messages import Add, Read, Reply, Status
from pybk.transport.cluster_keys import MemberKey, RightsKey
from pybk.transport.codec import Authorize, AuthorizeMember, EntryRead, WireReply, WireRequest
from pybk.transport.server import Caller

_HEAD_BYTES: Final = 256
"""The bytes that a request counts in addition to its entries."""

OWN_IDS: Final = 1 << 63
"""The first request id of a link's own requests: pings, and proofs of rights, whose replies are ignored."""

NEVER_NS: Final = 1 << 63
"""A time that does not come."""


class Called(Protocol):
    """The part of a ``Server`` that a link in its process uses."""

    instance: bytes

    @property
    def closed(self) -> bool:
        """True if the server does not answer any more."""

    def call(self, caller: Caller, request_id: int, message: WireRequest | None, nbytes: int) -> bool:
        """Hand a request to the serving thread, or None to end the session; return False once the server is closed."""

    def wake_called(self) -> None:
        """Wake the serving thread, unless the server is closed. Threads: any."""


class InProcessLink:
    """The connection of a client to the bookie of its process; like ``Link``, without a socket.

    Args:
        bookie: The bookie.
        server: Its server.
        grants: The rights of the client, by ledger: the encoded description, and the key that makes proofs.
        on_outcome: Called with the request id and the reply of each request, or None for one without a reply.
        look_at: Asks for a call of ``look_after`` at a time or earlier.
        wake: Makes ``Links.poll`` return.
        outstanding_bytes_max: As of ``Links``; the bound on late bytes, too.
        message_bytes_max: As of ``Links``.
    """

    def __init__(
        self,
        bookie: Bookie,
        server: Called,
        *,
        grants: Mapping[int, tuple[bytes, RightsKey | MemberKey]],
        on_outcome: Callable[[int, WireReply | None], None],
        look_at: Callable[[int], None],
        wake: Callable[[], None],
        outstanding_bytes_max: int,
        message_bytes_max: int,
    ) -> None:
        self.bookie: Final = bookie
        self.outstanding_bytes = 0
        self._server = server
        self._grants = grants
        self._on_outcome = on_outcome
        self._look_at = look_at
        self._wake = wake
        self._outstanding_bytes_max = outstanding_bytes_max
        self._message_bytes_max = message_bytes_max
        self._caller = Caller(self.deliver, self.end)
        self._proved: set[int] = set()
        self._outstanding: dict[int, tuple[int, int, int]] = {}
        """The deadline, size and ledger of each request without a reply, by request id."""
        self._late: dict[int, int] = {}
        """The size of each request that timed out and the bookie has not answered, by request id."""
        self._late_bytes = 0
        self._first_deadline_ns = NEVER_NS
        self._unflushed = False
        self.arrived: deque[tuple[int, WireReply | None]] = deque()
        """The replies that ``take`` has not reported yet; the serving thread appends them."""
        self._ended = False
        """True once the server is closed; set by the leader."""
        self._closing = threading.Lock()
        self.closed = False
        """True once ``close`` was called."""

    def __repr__(self) -> str:
        """Return the bookie."""
        return f"<InProcessLink to {self.bookie}>"

    # ---- the leader --------------------------------------------------------------------------------------------------

    def send(self, request_id: int, message: WireRequest, timeout_ns: int) -> bool:
        """Hand over a request; its outcome is reported by ``take`` or ``look_after``, exactly once.

        Args:
            request_id: Not that of an outstanding request.
            message: The request; its entries must never change, because the bookie refers to them until they are
                durable, which may be after the outcome of a deferred or late request is known.
            timeout_ns: Nanoseconds after which it counts as unanswered.

        Returns:
            False if too many bytes are outstanding; nothing was handed over then.

        Raises:
            UsageError: The message is larger than the bookie accepts, or the request id is outstanding.
        """
        size = _HEAD_BYTES
        if type(message) is Add:
            for run in message.runs:
                size += sum(run.sizes)
        if size > self._message_bytes_max or request_id in self._outstanding:
            raise UsageError(
                f"request {request_id} of {size} bytes to {self.bookie}: the limit is "
                f"{self._message_bytes_max}, and each id is sent once: send smaller batches"
            )
        nbytes = size
        if type(message) is Read:
            size += message.bytes_max
        if self._outstanding and self.outstanding_bytes + size > self._outstanding_bytes_max:
            return False
        if self._ended or (self._late and self._late_bytes + size > self._outstanding_bytes_max):
            self._on_outcome(request_id, None)
            return True
        ledger_id = getattr(message, "ledger_id", -1)
        if ledger_id not in self._proved and ledger_id in self._grants:
            self._prove(ledger_id)
        if not self._server.call(self._caller, request_id, message, nbytes):
            self._on_outcome(request_id, None)
            return True
        self._unflushed = True
        deadline_ns = time.monotonic_ns() + timeout_ns
        self._outstanding[request_id] = deadline_ns, size, ledger_id
        self.outstanding_bytes += size
        if deadline_ns < self._first_deadline_ns:
            self._first_deadline_ns = deadline_ns
            self._look_at(deadline_ns)
        return True

    def read(self, request_id: int, request: EntryRead, timeout_ns: int) -> bool:
        """Hand over a read of one entry, as ``send`` does."""
        return self.send(request_id, request.request(), timeout_ns)

    def _prove(self, ledger_id: int) -> None:
        """Prove the right to a ledger."""
        description, key = self._grants[ledger_id]
        proof = key.sign(self._caller.session_id, self._server.instance, ledger_id)
        right = Authorize if isinstance(key, RightsKey) else AuthorizeMember
        self._server.call(self._caller, OWN_IDS, right(ledger_id, description, proof), _HEAD_BYTES)
        self._proved.add(ledger_id)

    def forget_right(self, ledger_id: int) -> None:
        """Prove the right to a ledger again before the next request for it."""
        self._proved.discard(ledger_id)

    def flush(self) -> None:
        """Wake the serving thread if a request was handed over since the last call."""
        if self._unflushed:
            self._unflushed = False
            self._server.wake_called()

    def take(self) -> None:
        """Report the replies that have arrived."""
        arrived = self.arrived
        while arrived:
            request_id, reply = arrived.popleft()
            if request_id == OWN_IDS and reply is None:
                self._ended = True
                for each in list(self._outstanding):
                    self._end(each, None)
            elif request_id in self._outstanding:
                if type(reply) is Reply and reply.status is Status.UNAUTHORIZED:
                    self._proved.discard(self._outstanding[request_id][2])
                self._end(request_id, reply)
            else:
                self._late_bytes -= self._late.pop(request_id, 0)

    def look_after(self, now_ns: int) -> None:
        """End requests that have timed out, unless their replies have arrived."""
        self.take()
        if now_ns >= self._first_deadline_ns:
            for request_id in [each for each, noted in self._outstanding.items() if noted[0] <= now_ns]:
                size = self._late[request_id] = self._outstanding[request_id][1]
                self._late_bytes += size
                self._end(request_id, None)
            self._first_deadline_ns = min((noted[0] for noted in self._outstanding.values()), default=NEVER_NS)
        self._look_at(self._first_deadline_ns)

    def _end(self, request_id: int, reply: WireReply | None) -> None:
        self.outstanding_bytes -= self._outstanding.pop(request_id)[1]
        self._on_outcome(request_id, reply)

    def close(self) -> None:
        """End the session; outstanding requests get no reply. The links may be closed afterwards. May be repeated."""
        with self._closing:
            self.closed = True
        if self._server.call(self._caller, OWN_IDS, None, 0):
            self._server.wake_called()
        for request_id in list(self._outstanding):
            self._end(request_id, None)
        self._ended = True

    # ---- the serving thread ------------------------------------------------------------------------------------------

    def deliver(self, request_id: int, reply: WireReply | None) -> None:
        """Pass a reply to the leader."""
        self.arrived.append((request_id, reply))
        if len(self.arrived) == 1:
            with self._closing:
                if not self.closed:
                    self._wake()

    def end(self) -> None:
        """Report to the leader that the server is closed."""
        self.deliver(OWN_IDS, None)
