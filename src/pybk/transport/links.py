"""All of a client's links, driven by whoever waits."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

import zmq

from pybk.errors import TooManyRequestsError, UsageError
from pybk.ledger import Bookie
from pybk.transport import curve
from pybk.transport.cluster_keys import ClusterKeys, RightsKey, greeting_mac
from pybk.transport.codec import Ping, WireRequest, encode
from pybk.transport.frames import MESSAGE_BYTES_MAX, Outgoing
from pybk.transport.link import PING_NS, Link, Outcome

_contexts: Final[set[curve.Context]] = set()
"""Contexts of links that are not closed. The collector must not find one together with its sockets: it clears the weak
references by which the context knows them, and the context then waits for them for ever."""

OUTSTANDING_BYTES_MAX: Final = 32 << 20
"""Default bound on what is on the way over one link: requests, and the bytes that reads ask for."""


@dataclass(slots=True)
class LinkCounters:
    """What the links of a client met.

    Attributes:
        garbage: Messages that were none.
        forged: Messages without the right MAC.
        damaged: Replies or requests that came damaged, and were asked for again.
        late: Replies that came after their request's time.
        lost: Connections that ended or were refused.
        forgotten: Sessions that a bookie had forgotten, and that began again over the same connection.
    """

    garbage: int = 0
    forged: int = 0
    damaged: int = 0
    late: int = 0
    lost: int = 0
    forgotten: int = 0


class Links:
    """All links of a client.

    Args:
        keys: The cluster's; None for no secret.
        context: The ZeroMQ context, needed for ``inproc``; None for one of its own.
        outstanding_bytes_max: Bound on what is on the way over each link.
        message_bytes_max: Bound on each frame received; larger ones end the connection unread.

    Attributes:
        counters: What was met.
        waiting: Whether ``poll`` has taken nothing yet: an exception that ends it then loses nothing.

    Threads: one at a time, but for ``wake`` until ``close`` is called.
    """

    def __init__(
        self,
        keys: ClusterKeys | None = None,
        *,
        context: curve.Context | None = None,
        outstanding_bytes_max: int = OUTSTANDING_BYTES_MAX,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        if keys is not None:
            curve.check_library()
        self.counters: Final = LinkCounters()
        self._keys = keys
        self._greeting_mac = greeting_mac(keys)
        self._own_context = context is None
        if context is None:
            context = zmq.Context()
            _contexts.add(context)
        self._context = context
        self._outstanding_bytes_max = outstanding_bytes_max
        self._message_bytes_max = message_bytes_max
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links: list[Link] = []
        self._grants: dict[int, tuple[bytes, RightsKey]] = {}
        self._outcomes: list[Outcome] = []
        self.waiting = False
        self._due_ns = 0
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._by_descriptor: dict[int, Callable[[], None]] = {}
        self._touched: set[Link] = set()
        self._encoded: tuple[WireRequest | None, Outgoing] = (None, encode(Ping()))

    def __enter__(self) -> Self:
        """Return the links."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the links."""
        self.close()

    def connect(self, bookie: Bookie, address: str, server_public: bytes | None = None) -> Link:
        """Make a link to a bookie; returns at once, and what is sent meanwhile waits for the connection.

        Args:
            bookie: Which bookie and instance is meant; another instance there answers ``WRONG_INSTANCE``.
            address: Where its registration says.
            server_public: Its CURVE key as its registration says; None if there is no secret.

        Raises:
            UsageError: One end has a secret and the other has not, or the address is none.
            TooManyRequestsError: This process gets no more sockets.
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

    def grant(self, ledger_id: int, description: bytes, key: RightsKey) -> None:
        """Have each link prove the right to a ledger before its first request for it, in each session.

        Args:
            ledger_id: The ledger.
            description: What the bookies check, see ``Authorize``.
            key: Signs.
        """
        self._grants[ledger_id] = (description, key)
        for link in self._links:
            link._proved.discard(ledger_id)

    def revoke(self, ledger_id: int) -> None:
        """Prove the right to a ledger no more; bookies forget it with the session."""
        self._grants.pop(ledger_id, None)
        for link in self._links:
            link._proved.discard(ledger_id)

    def wake(self) -> None:
        """Have ``poll`` return at once, now or when it is called next; nothing once it is closed. Threads: any."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def poll(self, timeout_ms: int) -> list[Outcome]:
        """Wait for replies, and take all that are there.

        Args:
            timeout_ms: Milliseconds to wait for the first; 0 takes what is there.

        Returns:
            Each request that came to its end: with its reply, or None if its time is over, the connection broke, or
            the bookie forgot the session. Empty after ``wake``, the time-out, or now and then before.

        Cost: 10 microseconds, 7 more per reply and the checksum of its entries.
        """
        now_ns = time.monotonic_ns()
        if now_ns >= self._due_ns:
            self._look_after(now_ns)
        while self._touched:
            self._touched.pop()._look()
        timeout_ms = 0 if self._outcomes else min(timeout_ms, (self._due_ns - now_ns) // 10**6 + 1)
        self.waiting = True
        ready = self._epoll.poll(timeout_ms / 1000)
        self.waiting = False
        for descriptor, _ in ready:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self._by_descriptor:  # else its link was lost in this turn
                self._by_descriptor[descriptor]()
        outcomes = self._outcomes
        self._outcomes = []
        return outcomes

    def _look_after(self, now_ns: int) -> None:
        """End what takes too long, ping who is silent, and say when to look again."""
        self._due_ns = now_ns + PING_NS
        for link in self._links:
            link._look_after(now_ns)

    def _remove(self, link: Link) -> None:
        """Forget a link that is closed."""
        self._links.remove(link)

    def _look_at(self, time_ns: int) -> None:
        """Look after the links at this time, if not before."""
        self._due_ns = min(self._due_ns, time_ns)

    def _encode(self, message: WireRequest) -> Outgoing:
        """Encode a message, once for all bookies that it is sent to one after the other."""
        known, outgoing = self._encoded
        if message is not known:
            outgoing = encode(message)
            self._encoded = (message, outgoing)
        return outgoing

    def _watch(self, socket: curve.Socket, take: Callable[[], None]) -> None:
        """Have ``poll`` wait for a socket too, and call this when something came."""
        self._epoll.register(socket.fileno(), select.EPOLLIN)
        self._by_descriptor[socket.fileno()] = take

    def _watch_no_more(self, socket: curve.Socket) -> None:
        """Wait for a socket no more, which is about to be closed."""
        self._epoll.unregister(socket.fileno())
        del self._by_descriptor[socket.fileno()]

    def close(self) -> None:
        """Close all links, also those that an interrupt left half open; what is outstanding stays without an answer."""
        try:
            for link in self._links:
                link._disconnect()
            self._links.clear()
        finally:
            self._epoll.close()
            wake, self._wake = self._wake, -1  # first: its number may be another file's as soon as it is closed
            if wake >= 0:
                os.close(wake)
            if self._own_context:
                self._context.destroy(linger=0)
                _contexts.discard(self._context)
