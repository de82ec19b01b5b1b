"""Ports for servers that begin later, or begin again on the same port."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

_FIRST: Final = 10_000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, and that the system gives nobody who does not ask for them.

    A port that the system chose is given again once it is free, to any program of a busy machine. These lie below its
    range, and are drawn.
    """
    given = int(_RANGE.read_text(encoding="ascii").split()[0]) if _RANGE.exists() else 32_768
    drawn = random.SystemRandom()
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port = drawn.randrange(_FIRST, given)
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


def free_port() -> int:
    """Return one of ``free_ports``."""
    return free_ports(1)[0]
