"""A bookie's server in a process of its own, which says OK to everything: ``child.py secret|none version``."""

from __future__ import annotations

import sys

from pybk.transport import frames
from pybk.transport.server import Server
from tests.transport.wire_harness import INSTANCE, KEYS, OK, TCP


def main() -> None:
    keys = KEYS if sys.argv[1] == "secret" else None
    frames.VERSION = int(sys.argv[2])  # type: ignore[misc]
    with Server([TCP], INSTANCE, keys) as server:
        sys.stdout.write(f"{server.addresses[0]} {(server.public_key or b'-').decode()}\n")
        sys.stdout.flush()
        while True:
            for peer, number, _ in server.receive(1000):
                server.reply(peer, number, OK)


main()
