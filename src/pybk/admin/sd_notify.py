"""Reports the state of a service to systemd: the protocol of sd_notify(3), a datagram to a socket."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Final

SOCKET: Final = "NOTIFY_SOCKET"
"""The variable by which systemd names the socket; if it is not set, nothing is reported."""


def notify(*assignments: str) -> None:
    """Report assignments such as ``READY=1``; a report that cannot be delivered is dropped, as systemd asks."""
    address = os.environ.get(SOCKET, "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
        connection.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        connection.send("\n".join(assignments).encode())


def reloading() -> None:
    """Report that a reload begins; ``READY=1`` ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
