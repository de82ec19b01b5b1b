"""The driver's connection to the bookies: sends requests by bookie, and checks replies before a machine sees them.

Theory of operation
-------------------

``Links`` (``pybk.transport``) has one ``Link`` for each bookie, and ends each request exactly once: with a reply, or
with None when its time is over or the connection is lost. ``BookieWire`` adds what links cannot know:

- **Which link.** ``send`` compares the bookie's registered address with the one that the link was made for. If the
  bookie moved, the link is closed, which ends its requests with None, and a new one is made. A bookie that is not
  registered for a moment keeps its link, because it may still answer.
- **Backpressure.** A link that has too much on the way refuses a request. The request is then queued here, and sent by
  a later ``poll``, in order. The queues need no bound of their own: reading threads wait for their reads, and writers
  bound their outstanding bytes.
- **Rights.** Before the first request about a ledger whose password is known, the links get the key that proves the
  right to it. They prove the right once in each session. A member that recovers a ledger without its password proves by
  a key of the cluster's secret that it is a member.
- **Trust.** A bookie may lie or be damaged. Entries are checked by the ledger's digest and the last add confirmed (LAC)
  by its proof. So the machines of ``pybk.replication`` see plain values that they may believe.
- **Errors.** An error in the middle of a step, such as lack of memory, may leave ``Links`` half changed. Then
  ``begin_again`` drops all links and makes new ones. ``_sweep`` ends requests whose end was lost, a second after their
  time.

A request is in ``_asked`` from ``send`` until ``poll`` returns it, whether it was sent or is queued.

Locks: only the leader, which is the thread that runs the driver, uses the links. Other threads call ``interrupt``
alone; ``_changing`` keeps ``Links`` from being replaced or closed under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from pybk.client.entry_reading import EntryReading
from pybk.errors import PybkError
from pybk.replication.entry_runs import lac_at, whole
from pybk.replication.messages import (
    Add,
    AnyReply,
    CompareLacs,
    LacReply,
    LacsAbove,
    Move,
    Read,
    ReadLac,
    ReadReply,
    Reply,
    Request,
    Status,
    WriteLac,
)
from pybk.transport.client_links import TIMEOUT_NS, Link, Links
from pybk.transport.cluster_keys import RightsKey, prove_lac, proven_lac
from pybk.transport.codec import Answer, EntryRead, LacPacket, OneEntry, WireReply, WireRequest
from pybk.transport.in_process import InProcessLink

if TYPE_CHECKING:
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger.ledger_metadata import Bookie

logger = logging.getLogger(__name__)

_GRACE_NS: Final = 1_000_000_000
"""The time after its deadline for which a request waits for the links to report its end."""

GRANTS_MAX: Final = 4096
"""Ledgers whose rights the links keep; the right to an older one is granted again at its next request."""

ENTRY_NS: Final = 500_000_000
"""The time for which a read of one entry waits for its bookie; then several are asked."""

MOVE_NS: Final = 3600 * 10**9
"""The time that a bookie may take to move a ledger between tiers; a lost connection is noticed long before."""

_new_tuple = tuple.__new__
_named_lac: Final = Struct(">8xq").unpack_from

Address = tuple[str, bytes | None]
"""A bookie's address, and its CURVE key if the cluster has a secret."""

AnyLink = Link | InProcessLink


class Addresses(Protocol):
    """The registered addresses of bookies."""

    def find(self, bookie: Bookie) -> Address | None:
        """Return a bookie's address and CURVE key; None if it is not registered."""


class BookieWire:
    """The links of one client.

    Args:
        make_links: Makes the links.
        addresses: The registered addresses of bookies.

    Threads: the leader, except ``interrupt``, which any thread may call.
    """

    def __init__(self, make_links: Callable[[], Links], addresses: Addresses) -> None:
        self._make_links = make_links
        self._links = make_links()
        self._changing = threading.Lock()
        """Held to replace, close or wake the links."""
        self._replaced: list[Links] = []
        """Links that ``begin_again`` has replaced and not closed yet."""
        self._addresses = addresses
        self.by_bookie: dict[Bookie, tuple[AnyLink, Address]] = {}
        """The link to each bookie, and the address that it was made for."""
        self._granted: dict[int, bool] = {}
        """Ledgers whose rights the links have, the oldest first: whether by their passwords, or only as a member."""
        self._asked: dict[int, tuple[RemoteLedger, Request | CompareLacs | EntryReading, int]] = {}
        """Requests that have not ended, by id, each with the time at which ``_sweep`` ends it."""
        self.queued: dict[Bookie, deque[tuple[int, WireRequest, int]]] = {}
        """Requests that the links refused, in order; a bookie is a key only while it has any."""
        self._sweep_ns = 0
        self._packet: tuple[WriteLac, LacPacket] | None = None
        """The last LAC that was proven: its request goes to several bookies, one after the other."""

    def interrupt(self) -> None:
        """Make ``poll`` return at once, now or at its next call; any thread."""
        with self._changing:
            self._links.wake()

    def begin_again(self) -> None:
        """Replace all links and forget all requests, because an error left their state unknown; may be repeated."""
        fresh = self._make_links()
        with self._changing:
            self._replaced.append(self._links)
            self._links = fresh
        self.by_bookie.clear()
        self._granted.clear()
        self._asked.clear()
        self.queued.clear()
        self._close_replaced()

    def _close_replaced(self) -> None:
        """Close replaced links: a session that stays open would keep the ledgers that it wrote from being recovered."""
        while self._replaced:
            try:
                self._replaced[-1].close()
            except Exception:  # the error may have left them in any state, and they are not used again
                logger.warning("links cannot be closed after an error", exc_info=True)
            self._replaced.pop()

    def send(self, request_id: int, bookie: Bookie, ledger: RemoteLedger, request: Request | CompareLacs) -> bool:
        """Send a request, or queue it until its link has less on the way.

        Returns:
            False if the bookie cannot be reached, because it is not registered or refused a link. The request has then
            ended, and ``poll`` does not return it.
        """
        address = self._addresses.find(bookie)  # as in ``_link_to``, which would be one more call for each add
        found = self.by_bookie.get(bookie)
        if found is not None and (address is None or address == found[1]):
            link = found[0]
        else:
            connected = self._connect(bookie, address)
            if connected is None:
                return False
            link = connected
        if not self._granted.get(ledger.ledger_id) and (ledger.unlocked or ledger.as_member):
            self._grant(ledger)
        message: WireRequest = self._with_proof(ledger, request) if isinstance(request, WriteLac) else request
        timeout_ns = TIMEOUT_NS
        if type(request) is ReadLac:
            timeout_ns += request.wait_ns
        elif type(request) is Move:
            timeout_ns = MOVE_NS
        if bookie in self.queued or not link.send(request_id, message, timeout_ns):
            self.queued.setdefault(bookie, deque()).append((request_id, message, timeout_ns))
        self._asked[request_id] = ledger, request, time.monotonic_ns() + timeout_ns + _GRACE_NS
        return True

    def read(self, request_id: int, bookie: Bookie, reading: EntryReading) -> None:
        """Send the request of a read of one entry; the reading ends at once if the bookie cannot be asked now.

        It takes no right to the ledger. It is not queued, because the caller asks other bookies as well then. A reading
        that has ended before is left alone.
        """
        if reading.done:
            return
        address = self._addresses.find(bookie)  # as in ``_link_to``, which would be one more call for each read
        found = self.by_bookie.get(bookie)
        if found is not None and (address is None or address == found[1]):
            link: AnyLink | None = found[0]
        else:
            link = self._connect(bookie, address)
        ledger = reading.ledger
        request = _new_tuple(EntryRead, (ledger.ledger_id, reading.entry_id, reading.stride))
        if link is None or bookie in self.queued or not link.read(request_id, request, ENTRY_NS):
            reading.take(None)
            return
        self._asked[request_id] = ledger, reading, time.monotonic_ns() + ENTRY_NS + _GRACE_NS

    def send_queued(self) -> list[tuple[int, None]]:
        """Send queued requests until the links refuse; return those whose bookie cannot be reached any more."""
        lost: list[tuple[int, None]] = []
        for bookie, queued in list(self.queued.items()):
            link = self._link_to(bookie)
            while queued:
                request_id, message, timeout_ns = queued[0]
                asked = self._asked.get(request_id)  # None if ``_sweep`` has ended it
                if link is None and asked is not None:
                    del self._asked[request_id]
                    lost.append((request_id, None))
                elif link is not None and asked is not None:
                    if not link.send(request_id, message, timeout_ns):
                        break
                    self._asked[request_id] = *asked[:2], time.monotonic_ns() + timeout_ns + _GRACE_NS
                queued.popleft()
            if not queued:
                del self.queued[bookie]
        return lost

    def _link_to(self, bookie: Bookie) -> AnyLink | None:
        """Return the link to a bookie's registered address, made if there is none; None if it cannot be reached."""
        address = self._addresses.find(bookie)
        found = self.by_bookie.get(bookie)
        if found is not None and (address is None or address == found[1]):
            return found[0]
        return self._connect(bookie, address)

    def _connect(self, bookie: Bookie, address: Address | None) -> AnyLink | None:
        """Make a link to a bookie; a link to its former address is closed, which ends its requests."""
        former = self.by_bookie.pop(bookie, None)
        if former is not None:
            former[0].close()
        if address is None:
            return None
        try:
            link = self._links.own_link(bookie) or self._links.connect(bookie, *address)
        except PybkError as error:
            logger.warning("no link to %s: %s", bookie, error)
            return None
        self.by_bookie[bookie] = link, address
        return link

    @property
    def has_secret(self) -> bool:
        """True if the client has the cluster's secret, and can prove that it is a member."""
        return self._links.member_key is not None

    def _grant(self, ledger: RemoteLedger) -> None:
        """Give the links the key that proves the right to a ledger; each proves it with its first request."""
        if ledger.ledger_id in self._granted and not ledger.unlocked:
            return
        key = RightsKey(ledger.keys.right_key) if ledger.unlocked else self._links.member_key
        assert key is not None, "only a client with the cluster's secret recovers as a member"
        if len(self._granted) >= GRANTS_MAX:
            oldest = next(iter(self._granted))
            del self._granted[oldest]
            self._links.revoke(oldest)
        self._links.grant(ledger.ledger_id, ledger.description, key)
        self._granted[ledger.ledger_id] = ledger.unlocked

    def _with_proof(self, ledger: RemoteLedger, request: WriteLac) -> LacPacket:
        """Return a LAC with its proof."""
        if self._packet is None or self._packet[0] is not request:
            packet = prove_lac(ledger.keys.lac_key, ledger.ledger_id, request.lac)
            self._packet = request, LacPacket(ledger.ledger_id, packet)
        return self._packet[1]

    def poll(self, timeout_ms: int) -> list[tuple[int, AnyReply | None]]:
        """Wait for replies, and send what was queued.

        Args:
            timeout_ms: Milliseconds to wait if there is nothing yet.

        Returns:
            Replies by request id, checked; None for requests that will have no reply.
        """
        replies: list[tuple[int, AnyReply | None]] = []
        for _, request_id, reply in self._links.poll(timeout_ms):
            asked = self._asked.pop(request_id, None)
            if asked is None:
                continue
            ledger, request, _ = asked
            if isinstance(request, EntryReading):
                request.take(reply)
            elif reply is None or (type(request) is Add and type(reply) is Reply):
                replies.append((request_id, reply))
            else:
                assert not isinstance(reply, OneEntry), "a link returns it for reads of one entry alone"
                replies.append((request_id, _checked(ledger, request, reply)))
        if self.queued:
            replies += self.send_queued()
        now_ns = time.monotonic_ns()
        if now_ns >= self._sweep_ns:
            self._sweep_ns = now_ns + _GRACE_NS
            replies += self._sweep(now_ns)
        return replies

    def _sweep(self, now_ns: int) -> list[tuple[int, None]]:
        """End requests whose end the links did not report in time, because an error may have lost it."""
        late = [request_id for request_id, asked in self._asked.items() if asked[2] < now_ns]
        for request_id in late:
            request = self._asked.pop(request_id)[1]
            if type(request) is EntryReading:
                request.take(None)
        return [(request_id, None) for request_id in late]

    def close(self) -> None:
        """Close all links; ``interrupt`` does nothing afterwards."""
        with self._changing:
            self._close_replaced()
            self._links.close()


def _checked(ledger: RemoteLedger, request: Request | CompareLacs, reply: WireReply) -> AnyReply:
    """Return the part of a reply that a machine may believe; a reply of the wrong kind becomes ``UNKNOWN``."""
    kind = type(request)
    if kind is CompareLacs and type(reply) is LacsAbove:
        return reply
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
    """Return the LAC that a packet proves; -1 if it proves none, or cannot be checked without the password."""
    if not packet or not ledger.unlocked:
        return -1
    lac = proven_lac(ledger.keys.lac_key, ledger.ledger_id, packet)
    return -1 if lac is None else lac


def _checked_read(ledger: RemoteLedger, answer: Answer, lac: int) -> ReadReply:
    """Return the entries of a reply before the first that is damaged."""
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
    """Return the highest LAC that a reply proves, by its packet or by the LAC in the bookie's last entry."""
    run = answer.run
    if not ledger.unlocked:
        return _told_lac(ledger, answer)
    if answer.status is not Status.OK or run is None or not run.sizes:
        return LacReply(answer.status, lac)
    in_entry = ledger.lac_in(whole(run), run.first)
    if in_entry is None:
        logger.warning("ledger %d: a bookie's last entry, %d, is damaged", ledger.ledger_id, run.first)
        return LacReply(Status.UNKNOWN)
    ledger.note_newest(run)
    return LacReply(Status.OK, max(in_entry, lac), entry_id=run.first)


def _told_lac(ledger: RemoteLedger, answer: Answer) -> LacReply:
    """Return the highest LAC that a reply names, for a client without the password: it verifies none (AM2, AM3)."""
    run = answer.run
    told = -1 if not answer.packet else _named_lac(answer.packet)[0]
    if answer.status is not Status.OK or run is None or not run.sizes:
        return LacReply(answer.status, told)
    body = whole(run)
    if not ledger.sound_part(run, body).sizes:
        logger.warning("ledger %d: a bookie's last entry, %d, is damaged", ledger.ledger_id, run.first)
        return LacReply(Status.UNKNOWN)
    return LacReply(Status.OK, max(told, lac_at(body)), entry_id=run.first)
