"""Links to bookies as the driver sees them: requests by bookie, replies checked against the ledger's keys."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from pybk.errors import PybkError
from pybk.replication.entry_runs import whole
from pybk.replication.messages import (
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
from pybk.transport.cluster_keys import RightsKey, prove_lac, proven_lac
from pybk.transport.codec import Answer, LacPacket, WireReply, WireRequest
from pybk.transport.link import TIMEOUT_NS, Link
from pybk.transport.links import Links

if TYPE_CHECKING:
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger import Bookie

logger = logging.getLogger(__name__)

_GRACE_NS: Final = 1_000_000_000
"""How long after its time a request waits for the links to say that it has ended."""

GRANTS_MAX: Final = 4096
"""Ledgers whose rights are kept at hand; that of an older one is proved again when it is used."""

MOVE_NS: Final = 3600 * 10**9
"""How long a bookie may take to move a ledger; that it is gone is noticed long before."""


class Addresses(Protocol):
    """Where bookies are."""

    def find(self, bookie: Bookie) -> tuple[str, bytes | None] | None:
        """Return a bookie's address and CURVE key; None if it is not there."""


class BookieWire:
    """The links of one client.

    Args:
        make_links: Makes the links.
        addresses: Where bookies are.
        describe: Gives what bookies check rights with.

    Threads: the leader of the group commit, but for ``interrupt``.
    """

    def __init__(self, make_links: Callable[[], Links], addresses: Addresses) -> None:
        self._make_links = make_links
        self._links = make_links()
        self._changing = threading.Lock()
        self._addresses = addresses
        self._by_bookie: dict[Bookie, Link] = {}
        self._granted: dict[int, None] = {}
        self._asked: dict[int, tuple[RemoteLedger, Request, int]] = {}
        self._held: dict[Bookie, deque[tuple[int, WireRequest, int]]] = {}
        self._sweep_ns = 0
        self._packet: tuple[WriteLac, LacPacket] | None = None

    @property
    def waiting(self) -> bool:
        """Whether ``poll`` has taken nothing yet, so that an exception that ends it loses nothing."""
        return self._links.waiting

    def begin_turn(self) -> None:
        """Take note that ``poll`` is not waiting, whatever became of the last one."""
        self._links.waiting = False

    def interrupt(self) -> None:
        """Have ``poll`` return at once."""
        with self._changing:
            self._links.wake()

    def begin_again(self) -> None:
        """Drop all links, of which nothing can be known after an interrupt; may be repeated."""
        fresh = self._make_links()
        with self._changing:
            old, self._links = self._links, fresh
        self._by_bookie.clear()
        self._granted.clear()
        self._asked.clear()
        self._held.clear()
        try:
            old.close()
        except Exception:  # whatever the interrupt left half done: nobody uses it any more
            logger.warning("links that an interrupt left cannot be closed", exc_info=True)

    def send(self, request_id: int, bookie: Bookie, ledger: RemoteLedger, request: Request) -> bool:
        """Send a request, or hold it until the bookie owes less; False if the bookie is not there."""
        link = self._link_to(bookie)
        if link is None:
            return False
        if ledger.unlocked and ledger.ledger_id not in self._granted:
            self._grant(ledger)
        message: WireRequest = self._packed(ledger, request) if isinstance(request, WriteLac) else request
        timeout_ns = TIMEOUT_NS
        if type(request) is ReadLac:
            timeout_ns += request.wait_ns
        elif type(request) is Move:
            timeout_ns = MOVE_NS
        if bookie in self._held or not link.send(request_id, message, timeout_ns):
            self._held.setdefault(bookie, deque()).append((request_id, message, timeout_ns))
        self._asked[request_id] = ledger, request, time.monotonic_ns() + timeout_ns + _GRACE_NS
        return True

    def _send_held(self) -> list[tuple[int, None]]:
        """Send what was held, as far as there is room, in order; return what cannot be sent any more.

        How much is held is bounded by who asks: threads wait for what they read, and writers for what they appended.
        """
        lost: list[tuple[int, None]] = []
        for bookie, held in list(self._held.items()):
            link = self._link_to(bookie)
            while held:
                request_id, message, timeout_ns = held[0]
                asked = self._asked.get(request_id)
                if link is None and asked is not None:
                    del self._asked[request_id]
                    lost.append((request_id, None))
                elif link is not None and asked is not None:
                    if not link.send(request_id, message, timeout_ns):
                        break
                    self._asked[request_id] = *asked[:2], time.monotonic_ns() + timeout_ns + _GRACE_NS
                held.popleft()
            if not held:
                del self._held[bookie]
        return lost

    def _link_to(self, bookie: Bookie) -> Link | None:
        """Return the link to where a bookie is now; one to where it was is closed, which ends what was asked there."""
        link = self._by_bookie.get(bookie)
        place = self._addresses.find(bookie)
        if link is not None:
            if place is None or place == link.place:  # who is not registered for a moment may still answer
                return link
            del self._by_bookie[bookie]
            link.close()
        return None if place is None else self._connect(bookie, place)

    def _connect(self, bookie: Bookie, place: tuple[str, bytes | None]) -> Link | None:
        try:
            link = self._links.connect(bookie, *place)
        except PybkError as error:
            logger.warning("no link to %s: %s", bookie, error)
            return None
        self._by_bookie[bookie] = link
        return link

    def _grant(self, ledger: RemoteLedger) -> None:
        """Have the right to a ledger proved to each bookie that is asked anything about it."""
        if len(self._granted) >= GRANTS_MAX:
            oldest = next(iter(self._granted))
            del self._granted[oldest]
            self._links.revoke(oldest)
        self._links.grant(ledger.ledger_id, ledger.description, RightsKey(ledger.keys.right_key))
        self._granted[ledger.ledger_id] = None

    def _packed(self, ledger: RemoteLedger, request: WriteLac) -> WireRequest:
        """Return a LAC with its proof, made once for all bookies that it is told to one after the other."""
        if self._packet is None or self._packet[0] is not request:
            packet = prove_lac(ledger.keys.lac_key, ledger.ledger_id, request.lac)
            self._packet = request, LacPacket(ledger.ledger_id, packet)
        return self._packet[1]

    def poll(self, timeout_ms: int) -> list[tuple[int, Reply | LacReply | ReadReply | None]]:
        """Return replies, checked, by request id; None for requests that will have none."""
        replies: list[tuple[int, Reply | LacReply | ReadReply | None]] = []
        for _, request_id, reply in self._links.poll(timeout_ms):
            asked = self._asked.pop(request_id, None)
            if asked is None:
                continue
            ledger, request, _ = asked
            if reply is None:
                replies.append((request_id, None))
            else:
                replies.append((request_id, _checked(ledger, request, reply)))
        if self._held:
            replies += self._send_held()
        now_ns = time.monotonic_ns()
        if now_ns >= self._sweep_ns:
            self._sweep_ns = now_ns + _GRACE_NS
            replies += self._sweep(now_ns)
        return replies

    def _sweep(self, now_ns: int) -> list[tuple[int, None]]:
        """Give up requests of whose end nothing was heard: an interrupt in the links may have lost it."""
        late = [request_id for request_id, asked in self._asked.items() if asked[2] < now_ns]
        for request_id in late:
            del self._asked[request_id]
        return [(request_id, None) for request_id in late]

    def close(self) -> None:
        """Close all links; ``interrupt`` does nothing from then on."""
        with self._changing:
            self._links.close()


def _checked(ledger: RemoteLedger, request: Request, reply: WireReply) -> Reply | LacReply | ReadReply:
    """Return what a machine may believe of a reply."""
    kind = type(request)
    if type(reply) is Reply:
        if kind is Read:
            return ReadReply(reply.status)
        return LacReply(reply.status) if kind is ReadLac else reply
    if not isinstance(reply, Answer) or kind not in (Read, ReadLac):
        return Reply(Status.UNKNOWN)
    packet_lac = _packet_lac(ledger, reply.packet)
    if kind is Read:
        return _checked_read(ledger, reply, packet_lac)
    return _checked_lac(ledger, reply, packet_lac)


def _packet_lac(ledger: RemoteLedger, packet: bytes) -> int:
    if not packet or not ledger.unlocked:
        return -1
    lac = proven_lac(ledger.keys.lac_key, ledger.ledger_id, packet)
    return -1 if lac is None else lac


def _checked_read(ledger: RemoteLedger, answer: Answer, lac: int) -> ReadReply:
    run = answer.run
    if run is None:
        return ReadReply(answer.status, None, lac)
    body = whole(run)
    sound = ledger.sound_part(run, body)
    if len(sound.sizes) < len(run.sizes):
        logger.warning("ledger %d: a bookie's copy of entry %d is damaged", ledger.ledger_id, sound.last + run.stride)
        return ReadReply(Status.UNKNOWN, sound if sound.sizes else None, lac, damaged=True)
    return ReadReply(answer.status, sound, lac)


def _checked_lac(ledger: RemoteLedger, answer: Answer, lac: int) -> LacReply:
    run = answer.run
    if answer.status is not Status.OK or run is None or not run.sizes:
        return LacReply(answer.status, lac)
    said = ledger.lac_in(whole(run), run.first)
    if said is None:
        logger.warning("ledger %d: a bookie's last entry, %d, is damaged", ledger.ledger_id, run.first)
        return LacReply(Status.UNKNOWN)
    ledger.written(run)
    return LacReply(Status.OK, max(said, lac), entry_id=run.first)
