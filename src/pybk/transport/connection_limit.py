"""Bounds on the connections of a listening socket, and on the bytes that a peer sends before it is authenticated."""

from __future__ import annotations

import logging
import os
import resource
import socket as system
import struct
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from pybk.storage.io.failures import descriptor_max
from pybk.transport.curve import HANDSHAKE_MS, Socket
from pybk.transport.logging_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

CONNECTIONS_MAX: Final = 4096
"""The bound on the connections of a bookie."""

GREETING_MAX: Final = 256
"""The bound on the connections whose handshake has not ended."""

GREETING_BYTES_MAX: Final = 16 << 10
"""Bound on the bytes that a connection sends before its first message is received. A handshake and HELLO have about
1 KiB, and a client sends nothing else before HELLO is answered."""

GREETING_LOOK_MS: Final = 10
"""The time between two checks of that bound while such connections exist, milliseconds."""

DESCRIPTORS_RESERVED: Final = 256
"""File descriptors that are left to the rest of the process."""

_HANDSHAKE_NS: Final = (HANDSHAKE_MS + 1000) * 10**6
_PRUNE_NS: Final = 10**9
_LOOK_NS: Final = GREETING_LOOK_MS * 10**6 // 2
_TCP_INFO_BYTES: Final = 136
_bytes_received = struct.Struct("=Q").unpack_from
_BYTES_RECEIVED_AT: Final = 128
_EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def connections_max() -> int:
    """Return the number of connections that may be open, which depends on the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(16, min(CONNECTIONS_MAX, soft - DESCRIPTORS_RESERVED))


class Pin:
    """Access to connections of ZeroMQ, whose descriptors may be closed and used again at any time.

    A connection is accessed through a copy of its descriptor, in the place of a descriptor that was opened in advance.
    Otherwise, when strangers have taken all descriptors, no copy could be made, and their connections could not be
    ended.

    Threads: one at a time.
    """

    __slots__ = ("_null", "_pinned")

    def __init__(self) -> None:
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._pinned = os.dup(self._null)
        except BaseException:
            os.close(self._null)
            raise

    @contextmanager
    def connection(self, descriptor: int, addresses: Collection[str]) -> Iterator[system.socket | None]:
        """Return the connection of a descriptor to one of these listening addresses; None if it has no such connection.

        The connection is not closed before the end of the block, even if ZeroMQ closes its own descriptor.
        """
        try:
            os.dup2(descriptor, self._pinned, inheritable=False)
            connection = system.socket(fileno=self._pinned)
        except OSError:  # it is closed, or not that of a socket
            yield None
        else:
            try:
                yield connection if _listens(connection.getsockname(), addresses) else None
            finally:
                connection.detach()
        finally:
            os.dup2(self._null, self._pinned, inheritable=False)

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self._pinned)
        os.close(self._null)


def _listens(name: tuple[str, int] | str | bytes, addresses: Collection[str]) -> bool:
    """Return whether the name of a socket, as of ``getsockname``, belongs to one of these listening addresses."""
    end = f":{name[1]}" if isinstance(name, tuple) else str(name)
    return bool(end) and any(address.endswith(end) for address in addresses)


class Connections:
    """Counts the connections of a socket by its monitor, and ends new ones beyond the bounds.

    ZeroMQ has no such bounds: unauthenticated peers that connect and send nothing would use up the process's
    descriptors, and each may send as much as one message before its handshake fails. ZeroMQ's bound on messages is the
    same before and after the handshake, so the number of bytes that a connection has sent is read from the kernel.

    Args:
        socket: The socket, before it is bound.

    Attributes:
        monitor: The socket's monitor; the owner polls it and calls ``look`` when it is readable.
        ended: Connections that were ended.
        unheard: Connections whose peers left before their first message was received: strangers, and scans of ports.
        greeting: Descriptors of connections from which no message has been received, each with the time when it was
            accepted. A connection that is older than the longest handshake has ended its handshake, and is left out.

    Threads: one at a time.
    """

    __slots__ = (
        "_descriptor_max",
        "_greeting",
        "_looked_ns",
        "_max",
        "_pin",
        "_pruned_ns",
        "_socket",
        "ended",
        "greeting",
        "monitor",
        "open",
        "unheard",
    )

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.open: set[int] = set()
        """Descriptors of the connections that are open."""
        self._greeting: deque[int] = deque()  # times at which the connections were accepted that are in their handshake
        self._pruned_ns = self._looked_ns = 0
        self.greeting: dict[int, int] = {}
        self._max = connections_max()
        self._descriptor_max = descriptor_max()
        self._pin = Pin()
        self.ended = self.unheard = 0
        self.monitor: Any = socket.get_monitor_socket(_EVENTS)
        self.monitor.linger = 0
        self.look(())  # a new socket signals nothing before it was read until it is empty

    def look(self, addresses: Collection[str]) -> None:
        """Receive and handle all events of the monitor, because it signals only new ones.

        Args:
            addresses: The addresses that the socket listens on.
        """
        while True:
            try:
                message = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event, descriptor = int(message["event"]), int(message["value"])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(descriptor, addresses)
            elif event == zmq.EVENT_DISCONNECTED:
                self.open.discard(descriptor)
                if self.greeting.pop(descriptor, None) is not None:
                    self.unheard += 1
                    logger.info("a connection ended before a message was received, as of a stranger or a scan of ports")
            elif self._greeting:
                self._greeting.popleft()

    def _accepted(self, descriptor: int, addresses: Collection[str]) -> None:
        now_ns = time.monotonic_ns()
        # Not every end of a handshake is an event, but none lasts longer than this.
        while self._greeting and now_ns - self._greeting[0] > _HANDSHAKE_NS:
            self._greeting.popleft()
        if len(self.open) >= self._max and now_ns - self._pruned_ns > _PRUNE_NS:
            self._pruned_ns = now_ns
            self.open = {each for each in self.open if self.is_connection(each, addresses)}
        over = len(self.open) >= self._max or len(self._greeting) >= GREETING_MAX or descriptor > self._descriptor_max
        self.greeting.pop(descriptor, None)  # that of an earlier connection, whose end was not read
        self.greeting[descriptor] = now_ns
        self.open.add(descriptor)
        self._greeting.append(now_ns)
        if over:
            logger.warning(
                "a connection was ended that had sent no message, because %d are open (at most %d), %d of them before "
                "their handshake's end (at most %d), and the last has descriptor %d (at most %d; RLIMIT_NOFILE)",
                len(self.open),
                self._max,
                len(self._greeting),
                GREETING_MAX,
                descriptor,
                self._descriptor_max,
            )
            self._shut(next(iter(self.greeting)), addresses)

    def check_greeting(self, addresses: Collection[str]) -> None:
        """End the connections that sent more than ``GREETING_BYTES_MAX`` before their first message was received.

        Args:
            addresses: The addresses that the socket listens on.

        Cost: Some microseconds for each connection without a message, at most 200 times a second.
        """
        now_ns = time.monotonic_ns()
        if not self.greeting or now_ns - self._looked_ns < _LOOK_NS:
            return
        self._looked_ns = now_ns
        for descriptor, accepted_ns in list(self.greeting.items()):
            if now_ns - accepted_ns > _HANDSHAKE_NS:
                del self.greeting[descriptor]
            elif self._received_bytes(descriptor, addresses) > GREETING_BYTES_MAX:
                logger.warning(
                    "a connection was ended, because it sent more than %d bytes before its handshake's end",
                    GREETING_BYTES_MAX,
                )
                self._shut(descriptor, addresses)

    def heard(self, frame: zmq.Frame, addresses: Collection[str]) -> None:
        """Note that a message of a connection was received, and so that its handshake has ended.

        The monitor is read first. ZeroMQ reports a connection before it receives anything from it, so the descriptor is
        then known to be that of the connection, and not of an earlier one whose end was not read yet. No state of an
        ended connection is kept, because a later one may have its descriptor.

        Args:
            frame: The first frame of the message.
            addresses: The addresses that the socket listens on.

        Cost: Some microseconds, only for a message that belongs to no session.
        """
        try:
            descriptor = int(frame.get(zmq.SRCFD))
        except zmq.ZMQError:  # a message from within the process came over no connection
            return
        self.look(addresses)
        self.greeting.pop(descriptor, None)

    def close(self) -> None:
        """Close the monitor; connections are no longer counted."""
        self._socket.disable_monitor()
        self.monitor.close()
        self._pin.close()

    def is_connection(self, descriptor: int, addresses: Collection[str]) -> bool:
        """Return whether a descriptor is that of a connection to one of these listening addresses."""
        with self._pin.connection(descriptor, addresses) as connection:
            return connection is not None

    def _shut(self, descriptor: int, addresses: Collection[str]) -> None:
        """End a connection; ZeroMQ closes the descriptor itself when it reads the end."""
        self.ended += 1
        self.greeting.pop(descriptor, None)
        with self._pin.connection(descriptor, addresses) as connection, suppress(OSError):
            if connection is not None:
                connection.shutdown(system.SHUT_RDWR)

    def _received_bytes(self, descriptor: int, addresses: Collection[str]) -> int:
        """Return the bytes that a TCP connection has received; 0 for any other descriptor."""
        with self._pin.connection(descriptor, addresses) as connection, suppress(OSError):
            if connection is not None and connection.family != system.AF_UNIX:
                info = connection.getsockopt(system.IPPROTO_TCP, system.TCP_INFO, _TCP_INFO_BYTES)
                if len(info) == _TCP_INFO_BYTES:
                    return int(_bytes_received(info, _BYTES_RECEIVED_AT)[0])
        return 0
