"""Reads of clients without a ledger's password, which copy or check it, answered at a bounded rate.

Such reads (``Read.checked``) come from re-replication and from checks. They compete with the reads and appends of
applications, and a bookie may be the source of many copies at once, so the bookie itself bounds the bytes that it
sends. A read that comes too early is held back, but never so long that its client gives up. One reply has no more bytes
than the rate of this bookie allows at once, because adds wait for it; the client only knows the rate of its own bookie.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any, Final

from pybk.replication.bookie import BookieEffect, Respond
from pybk.replication.messages import Read, ReadReply
from pybk.replication.pace import Pace

DELAY_NS_MAX: Final = 2 * 10**9
"""The longest time for which a read is held back; clients give up after five seconds."""

Answer = Callable[[Any, Read, int], list[BookieEffect]]
"""Answers a read: its sender, the read, and the time."""


class CopyReads:
    """The reads for copies at one bookie.

    Args:
        answer: Answers a read.

    Attributes:
        pace: The rate; None answers every read at once. Any thread may replace it.
        due_ns: The time when the next read will be answered; None if none is held back.

    Threads: the bookie's serving thread.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.pace: Pace | None = None
        self._held_back: list[tuple[int, int, Any, Read]] = []
        """Heap: when each is answered, a number that orders equal times, the sender and the read."""
        self._numbers = itertools.count()
        self.due_ns: int | None = None

    def read(self, sender: Any, request: Read, now_ns: int) -> list[BookieEffect]:
        """Answer a read, or hold it back until ``due``."""
        wait_ns = 0 if self.pace is None else min(self.pace.wait_ns(now_ns), DELAY_NS_MAX)
        if not wait_ns:
            return self._answered(sender, request, now_ns)
        heapq.heappush(self._held_back, (now_ns + wait_ns, next(self._numbers), sender, request))
        self.due_ns = self._held_back[0][0]
        return []

    def due(self, now_ns: int) -> list[BookieEffect]:
        """Answer one read whose time has come, if there is one."""
        _, _, sender, request = heapq.heappop(self._held_back)
        self.due_ns = self._held_back[0][0] if self._held_back else None
        return self._answered(sender, request, now_ns)

    def _answered(self, sender: Any, request: Read, now_ns: int) -> list[BookieEffect]:
        if self.pace is not None:
            request = request._replace(bytes_max=min(request.bytes_max, self.pace.piece_bytes))
        effects = self._answer(sender, request, now_ns)
        if self.pace is not None:
            replies = [effect.reply for effect in effects if isinstance(effect, Respond)]
            runs = [reply.run for reply in replies if isinstance(reply, ReadReply) and reply.run is not None]
            self.pace.charge(sum(sum(run.sizes) for run in runs), now_ns)
        return effects
