"""A connection whose messages have to pass as a whole within some seconds.

The time-out of a socket is for each piece: a peer that sends, or takes, a byte now and then holds a thread for ever.
"""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class TimedConnection(io.RawIOBase):
    """The bytes that pass over a socket, until the deadline that ``begin`` sets.

    Args:
        connection: The socket, which stays open when this is closed.

    Threads: one at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = 0.0

    def begin(self, seconds: float) -> None:
        """Set the seconds for all that is received and sent from now on, together."""
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive the bytes that have arrived; raises TimeoutError once the time is over."""
        self._limit()
        return self._connection.recv_into(buffer)

    def write(self, data: Any) -> int:
        """Send the bytes that the peer takes now; raises TimeoutError once the time is over."""
        self._limit()
        return self._connection.send(data)

    def _limit(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("a message took too long")
        self._connection.settimeout(left)
