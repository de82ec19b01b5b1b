"""Heartbeats of connections: the silence after which a suspended or unreachable peer counts as dead."""

from __future__ import annotations

from typing import Final

import zmq

Socket = zmq.Socket[bytes]

HEARTBEAT_MS: Final = 300
"""The time between two heartbeats, milliseconds."""
SILENCE_MS: Final = 1_500
"""The time without an answer to a heartbeat after which a connection ends, milliseconds."""


def set_heartbeat(socket: Socket) -> None:
    """Make a socket's connections end after ``SILENCE_MS`` without an answer, as of a suspended peer."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
