"""Fair queueing of the messages that a bookie receives, and bounds on the memory that each connection takes.

Theory of operation
-------------------

Each connection has a *lane*: the queue of its messages that were received and not served, and the count of bytes that
were sent to it and not written.

Receiving. The server puts each message that it receives into the lane of its connection (``Lanes.put``). A lane that
would exceed ``LANE_BYTES_MAX`` loses all its messages, and the server then ends the session; when all lanes together
exceed ``WAITING_BYTES_MAX``, the server receives nothing until a turn has served some. A *turn* (``Lanes.turn``) visits
the busy lanes in order. While several are busy, it serves at most ``SHARE_MESSAGES`` messages or ``SHARE_BYTES`` bytes
of each. So a connection that floods the bookie delays the others by no more than that. A lane that it served and that
still has messages moves to the end, so a turn that ran out of bytes is continued by the next one. A lane that was alone
for ``_COMPANY_NS`` gets the whole turn. A client in the bookie's own process has no lane; the server takes its
``share`` of each turn first.

Sending. Bytes sent to a connection are *unwritten* until ZeroMQ has written them to the system. ZeroMQ does not report
their number. But it releases a frame once it is written, and writes the frames of a connection in order. So after every
``MARK_BYTES`` bytes the server *marks* a frame: ZeroMQ tracks it, and once it is released, everything before it is
written as well. This measures the bytes that a client leaves unread, without relying on the client's reports.

The server's thread is the only one that uses lanes; there are no locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

TURN_MESSAGES: Final = 1024
TURN_BYTES: Final = 32 << 20
"""The bound on the bytes that one turn serves of all connections; the message that reaches it is served whole."""

SHARE_MESSAGES: Final = 64
SHARE_BYTES: Final = 1 << 20
"""The bound on the bytes that one turn serves of a connection while others are busy; one message may be larger."""

LANE_BYTES_MAX: Final = 96 << 20
"""Bound on the waiting bytes of one connection, with ``MESSAGE_COST`` for each message. A client of this pybk has at
most 32 MiB outstanding, so one with more violates the protocol, and loses its session."""

WAITING_BYTES_MAX: Final = 256 << 20
"""The bound on the waiting bytes of all connections; beyond it nothing is received until some were served."""

MESSAGE_COST: Final = 256
"""The bytes that each waiting message counts in addition to its own, for the objects that hold it."""

MARK_BYTES: Final = 64 << 10
"""The bytes sent to a connection after which a frame is marked."""

_COMPANY_NS: Final = 100_000_000
"""The time after a turn with several busy lanes in which each lane gets only its share, even if it is alone."""


class WriteTracker(Protocol):
    """Reports whether ZeroMQ has released a frame; ``zmq.MessageTracker`` is one."""

    @property
    def done(self) -> bool:
        """True if the frame was released."""


class Waiting(NamedTuple):
    """A message that was received and not served yet.

    Attributes:
        head: Its first frame.
        bodies: Its other frames.
        size: Bytes of all frames.
    """

    head: bytes
    bodies: Sequence[memoryview]
    size: int


class Lane:
    """The queue and the counts of one connection; made by ``Lanes.of``.

    Attributes:
        routing_id: ZeroMQ's name of the connection.
        waiting: Messages to be served, in the order of their arrival.
        waiting_bytes: Bytes of the waiting messages, with ``MESSAGE_COST`` for each.
        unwritten: Bytes sent, up to the last mark, that are not known to be written.
        unmarked: Bytes sent since the last mark, which is due at ``MARK_BYTES``.
    """

    __slots__ = ("_marks", "routing_id", "unmarked", "unwritten", "waiting", "waiting_bytes")

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = 0
        self.unwritten = 0
        self._marks: deque[tuple[WriteTracker, int]] = deque()
        self.unmarked = 0

    @property
    def idle(self) -> bool:
        """True if no message waits and everything up to the last mark is written."""
        return not self.waiting and not self._marks


class Lanes:
    """The lanes of all connections. Threads: one at a time.

    Attributes:
        waiting_bytes: Sum over all lanes.
        unwritten: Sum over all lanes.
    """

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.unwritten = 0
        self.lanes: dict[bytes, Lane] = {}
        """All lanes, by routing id."""
        self.busy_lanes: dict[bytes, Lane] = {}
        """The lanes that hold messages, by routing id, in the order of service."""
        self._company_ns = 0

    def of(self, routing_id: bytes) -> Lane:
        """Return the lane of a connection, which is made if it does not exist."""
        lane = self.lanes.get(routing_id)
        if lane is None:
            lane = self.lanes[routing_id] = Lane(routing_id)
        return lane

    def put(self, routing_id: bytes, message: Waiting) -> bool:
        """Append a message to the lane of its connection.

        Returns:
            False if the lane would exceed ``LANE_BYTES_MAX``; the message and all others in the lane were dropped.
        """
        lane = self.lanes.get(routing_id) or self.of(routing_id)
        cost = message.size + MESSAGE_COST
        if lane.waiting and lane.waiting_bytes + cost > LANE_BYTES_MAX:
            self._clear(lane)
            return False
        lane.waiting.append(message)
        lane.waiting_bytes += cost
        self.waiting_bytes += cost
        self.busy_lanes[routing_id] = lane
        return True

    def _clear(self, lane: Lane) -> None:
        self.waiting_bytes -= lane.waiting_bytes
        lane.waiting_bytes = 0
        lane.waiting.clear()
        self.busy_lanes.pop(lane.routing_id, None)

    def share(self, now_ns: int, others: int = 0) -> tuple[int, int]:
        """Return the numbers of messages and bytes that a turn serves of one client.

        Args:
            now_ns: The monotonic time, nanoseconds.
            others: The number of clients without a lane that are busy, too.
        """
        busy = len(self.busy_lanes) + others
        if busy > 1:
            self._company_ns = now_ns + _COMPANY_NS
        if now_ns >= self._company_ns:
            return TURN_MESSAGES, TURN_BYTES
        each = max(busy, 1)
        return max(1, min(SHARE_MESSAGES, TURN_MESSAGES // each)), max(1, min(SHARE_BYTES, TURN_BYTES // each))

    def turn(self, now_ns: int, others: int = 0) -> list[tuple[bytes, Waiting]]:
        """Take the messages that one turn serves, each with its connection; the next turn begins where this one ends.

        Args:
            now_ns: The monotonic time, nanoseconds.
            others: As of ``share``.
        """
        count_max, bytes_max = self.share(now_ns, others)
        left = TURN_BYTES
        served = []
        for lane in list(self.busy_lanes.values()):
            if left <= 0:
                break
            count = size = 0
            waiting = lane.waiting
            while waiting and count < count_max and (not count or size + waiting[0].size <= bytes_max):
                message = waiting.popleft()
                count += 1
                size += message.size
                lane.waiting_bytes -= message.size + MESSAGE_COST
                self.waiting_bytes -= message.size + MESSAGE_COST
                served.append((lane.routing_id, message))
            left -= size
            del self.busy_lanes[lane.routing_id]
            if waiting:
                self.busy_lanes[lane.routing_id] = lane  # at the end
        return served

    # ---- sending -------------------------------------------------------------------------------------------------

    def marked(self, lane: Lane, mark: WriteTracker) -> None:
        """Count a mark: ``mark`` tracks the last of the unmarked bytes that were given to ZeroMQ."""
        lane.unwritten += lane.unmarked
        self.unwritten += lane.unmarked
        lane._marks.append((mark, lane.unmarked))
        lane.unmarked = 0
        self.lanes[lane.routing_id] = lane

    def check_written(self, lane: Lane) -> None:
        """Subtract the bytes of a lane that were written since the last check."""
        marks = lane._marks
        while marks and marks[0][0].done:
            size = marks.popleft()[1]
            lane.unwritten -= size
            self.unwritten -= size

    def check_all_written(self) -> None:
        """Subtract the bytes of all lanes that were written since the last check, and forget idle lanes."""
        for lane in list(self.lanes.values()):
            self.check_written(lane)
            if lane.idle:
                del self.lanes[lane.routing_id]
