"""What each connection of a bookie has sent and is owed, within bounds, and whose turn it is.

A connection's messages wait in its *lane* until a turn serves them. A turn serves every lane that has something: of
each at most ``SHARE_MESSAGES`` messages or ``SHARE_BYTES`` bytes, so that one that floods delays the others by no more
than that. A lane that is alone, and was for a while, is served as much as a turn takes.

What was sent to a connection is *unwritten* until ZeroMQ has given it to the system. ZeroMQ does not say how much that
is, but it lets go of a frame when the frame is written, and writes a connection's frames in order: so now and then a
frame is *marked*, and once it is let go of, everything before it is written. What the client says of itself is not
asked for this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Protocol

TURN_MESSAGES: Final = 1024
TURN_BYTES: Final = 32 << 20
"""What one turn serves of all connections together, but for one message of each that it comes to."""

SHARE_MESSAGES: Final = 64
SHARE_BYTES: Final = 1 << 20
"""What one turn serves of one connection while there are others; one message is served even if larger."""

LANE_BYTES_MAX: Final = 96 << 20
"""Bytes that may wait of one connection, with ``MESSAGE_COST`` for each message: a client of this pybk has at most
32 MiB on the way, so one with more does not keep to the protocol, and loses its session."""

WAITING_BYTES_MAX: Final = 256 << 20
"""Bytes that may wait of all connections together; more is not taken from ZeroMQ before some of it was served."""

MESSAGE_COST: Final = 256
MARK_BYTES: Final = 64 << 10
"""After so many bytes sent to a connection, a frame is marked."""

_COMPANY_NS: Final = 100_000_000
"""For so long after two connections were served in one turn, each gets its share only, also when it is alone."""


class WriteTracker(Protocol):
    """What says whether a frame was let go of; ``zmq.MessageTracker`` is one."""

    @property
    def done(self) -> bool:
        """Whether it was."""


class Waiting(NamedTuple):
    """A message that was received and not served yet.

    Attributes:
        head: Its first frame.
        bodies: The others.
        size: Bytes of all.
    """

    head: bytes
    bodies: Sequence[memoryview]
    size: int


class Lane:
    """One connection. Made and used by ``Lanes``, and by the server for what it sends.

    Attributes:
        routing_id: ZeroMQ's name of the connection.
        waiting: Messages to be served, in order.
        waiting_bytes: Their bytes and costs.
        unwritten: Bytes sent that are not known to be written.
    """

    __slots__ = ("_marks", "_unmarked", "routing_id", "unwritten", "waiting", "waiting_bytes")

    def __init__(self, routing_id: bytes) -> None:
        self.routing_id = routing_id
        self.waiting: deque[Waiting] = deque()
        self.waiting_bytes = 0
        self.unwritten = 0
        self._marks: deque[tuple[WriteTracker, int]] = deque()
        self._unmarked = 0

    @property
    def idle(self) -> bool:
        """Whether nothing waits, and nothing that was marked is unwritten."""
        return not self.waiting and not self._marks


class Lanes:
    """The lanes of all connections. Threads: one at a time.

    Attributes:
        waiting_bytes: Bytes and costs of what waits in all lanes.
        unwritten: Bytes sent that are not known to be written, of all lanes.
    """

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.unwritten = 0
        self._lanes: dict[bytes, Lane] = {}
        self._busy: dict[bytes, Lane] = {}
        self._company_ns = 0

    @property
    def busy(self) -> bool:
        """Whether anything waits."""
        return bool(self._busy)

    @property
    def full(self) -> bool:
        """Whether as much waits as may."""
        return self.waiting_bytes >= WAITING_BYTES_MAX

    def of(self, routing_id: bytes) -> Lane:
        """Return the lane of a connection."""
        lane = self._lanes.get(routing_id)
        if lane is None:
            lane = self._lanes[routing_id] = Lane(routing_id)
        return lane

    def put(self, routing_id: bytes, message: Waiting) -> bool:
        """Have a message wait.

        Returns:
            False if more than ``LANE_BYTES_MAX`` would wait of this connection: then everything that waits of it is
            dropped with it.
        """
        lane = self.of(routing_id)
        cost = message.size + MESSAGE_COST
        if lane.waiting and lane.waiting_bytes + cost > LANE_BYTES_MAX:
            self._clear(lane)
            return False
        lane.waiting.append(message)
        lane.waiting_bytes += cost
        self.waiting_bytes += cost
        self._busy[routing_id] = lane
        return True

    def _clear(self, lane: Lane) -> None:
        self.waiting_bytes -= lane.waiting_bytes
        lane.waiting_bytes = 0
        lane.waiting.clear()
        self._busy.pop(lane.routing_id, None)

    def turn(self, now_ns: int) -> Iterator[tuple[bytes, Waiting]]:
        """Yield what one turn serves, each with its connection; those that it does not come to are first next time.

        Args:
            now_ns: The time.
        """
        busy = list(self._busy.values())
        if len(busy) > 1:
            self._company_ns = now_ns + _COMPANY_NS
        count_max, bytes_max = TURN_MESSAGES, TURN_BYTES
        if now_ns < self._company_ns:
            count_max = max(1, min(SHARE_MESSAGES, TURN_MESSAGES // max(len(busy), 1)))
            bytes_max = max(1, min(SHARE_BYTES, TURN_BYTES // max(len(busy), 1)))
        left = TURN_BYTES
        for lane in busy:
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
                yield lane.routing_id, message
            left -= size
            del self._busy[lane.routing_id]
            if waiting:
                self._busy[lane.routing_id] = lane  # at the end

    # ---- what is sent --------------------------------------------------------------------------------------------

    def wants_mark(self, lane: Lane, size: int) -> bool:
        """Return whether the last frame of a message of ``size`` bytes that is sent now is to be marked."""
        return lane._unmarked + size >= MARK_BYTES

    def sent(self, lane: Lane, size: int, mark: WriteTracker | None) -> None:
        """Note a message that was given to ZeroMQ, with what says that it was written, None if it was not marked."""
        lane._unmarked += size
        if mark is not None:
            lane.unwritten += lane._unmarked
            self.unwritten += lane._unmarked
            lane._marks.append((mark, lane._unmarked))
            lane._unmarked = 0
            self._lanes[lane.routing_id] = lane

    def check_written(self, lane: Lane) -> None:
        """See what of a lane's messages was written meanwhile."""
        marks = lane._marks
        while marks and marks[0][0].done:
            size = marks.popleft()[1]
            lane.unwritten -= size
            self.unwritten -= size

    def check_all_written(self) -> None:
        """See what was written meanwhile, and forget the lanes of which nothing is left."""
        for lane in list(self._lanes.values()):
            self.check_written(lane)
            if lane.idle:
                del self._lanes[lane.routing_id]
