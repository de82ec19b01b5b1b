"""A bound on the connections of a listening socket, also of those that have not said yet who they are."""

from __future__ import annotations

import logging
import os
import resource
import socket as system
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from pybk.transport.curve import HANDSHAKE_MS, Socket
from pybk.transport.log_limit import LogLimit

logger = logging.getLogger(__name__)
logger.addFilter(LogLimit())

CONNECTIONS_MAX: Final = 4096
"""Connections of a bookie."""

GREETING_MAX: Final = 256
"""Connections that have not shown yet, within the time of a handshake, that they are of the cluster."""

DESCRIPTORS_RESERVED: Final = 256
"""File descriptors that connections leave to the rest of the process."""

_HANDSHAKE_NS: Final = (HANDSHAKE_MS + 1000) * 10**6
_PRUNE_NS: Final = 10**9
_EVENTS: Final = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def connections_max() -> int:
    """Return how many connections may be open: below the process's limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS_MAX
    return max(16, min(CONNECTIONS_MAX, soft - DESCRIPTORS_RESERVED))


class Connections:
    """Counts the connections of a socket by its monitor, and ends new ones beyond the bounds.

    ZeroMQ has no such bound: strangers who connect and say nothing would take the process's descriptors, and each may
    send as much as one message before its handshake fails.

    Args:
        socket: The socket, before it is bound.

    Attributes:
        monitor: To be polled; call ``look`` when it is readable.
        ended: Connections that were ended.

    Threads: one at a time.
    """

    __slots__ = ("_greeting", "_max", "_open", "_pruned_ns", "_socket", "ended", "monitor")

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._open: set[int] = set()
        self._greeting: deque[int] = deque()  # when each was accepted whose handshake has not ended
        self._pruned_ns = 0
        self._max = connections_max()
        self.ended = 0
        self.monitor: Any = socket.get_monitor_socket(_EVENTS)
        self.monitor.linger = 0
        self.look(())  # a new socket gives no signal before it was read to its end

    def look(self, addresses: Collection[str]) -> None:
        """Take everything that the monitor says: no signal comes for what is left.

        Args:
            addresses: Where the socket listens.
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
                self._open.discard(descriptor)
            elif self._greeting:
                self._greeting.popleft()

    def _accepted(self, descriptor: int, addresses: Collection[str]) -> None:
        now_ns = time.monotonic_ns()
        # Not every end of a handshake is an event, but none lasts longer than this.
        while self._greeting and now_ns - self._greeting[0] > _HANDSHAKE_NS:
            self._greeting.popleft()
        if len(self._open) >= self._max and now_ns - self._pruned_ns > _PRUNE_NS:
            self._pruned_ns = now_ns
            self._open = {each for each in self._open if _is_connection(each, addresses)}
        if len(self._open) >= self._max or len(self._greeting) >= GREETING_MAX:
            self.ended += 1
            logger.warning(
                "a connection was ended, because %d are open (at most %d), %d of them before their handshake's end "
                "(at most %d)",
                *(len(self._open), self._max, len(self._greeting), GREETING_MAX),
            )
            _shut(descriptor, addresses)
        self._open.add(descriptor)
        self._greeting.append(now_ns)

    def close(self) -> None:
        """Watch no more."""
        self._socket.disable_monitor()
        self.monitor.close()


def _shut(descriptor: int, addresses: Collection[str]) -> None:
    """End a connection that ZeroMQ has just accepted; ZeroMQ closes the descriptor itself when it reads the end.

    The connection may be gone, and the number another file's: only a connection of these addresses is shut down.
    """
    if _is_connection(descriptor, addresses):
        with suppress(OSError), system.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(system.SHUT_RDWR)


def _is_connection(descriptor: int, addresses: Collection[str]) -> bool:
    """Return whether a descriptor is that of a connection to one of these addresses."""
    with suppress(OSError), system.socket(fileno=os.dup(descriptor)) as connection:
        mine = connection.getsockname()
        end = f":{mine[1]}" if isinstance(mine, tuple) else str(mine)
        return bool(end) and any(address.endswith(end) for address in addresses)
    return False
