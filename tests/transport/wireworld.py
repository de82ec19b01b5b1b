"""One server and its clients in one thread: each takes its turn until what is waited for has happened."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pybk.ledger import Bookie
from pybk.replication.messages import Add, Reply, Run, Status
from pybk.transport.codec import Authorize, WireReply, WireRequest
from pybk.transport.keys import ClusterKeys
from pybk.transport.link import Link, Outcome
from pybk.transport.links import Links
from pybk.transport.server import Peer, Server

SECRET = bytes(range(32))
CLUSTER = b"cluster-16-bytes"
INSTANCE = b"instance-of-16-b"
BOOKIE = Bookie("a", INSTANCE)
KEYS = ClusterKeys.derive(SECRET, CLUSTER)
OK = Reply(Status.OK)
TCP = "tcp://127.0.0.1:*"


def entries(first: int = 0, sizes: tuple[int, ...] = (100,), stride: int = 1) -> Run:
    body = b"".join(bytes([number % 251]) * size for number, size in enumerate(sizes, 1))
    return Run(first, stride, array("q", sizes), (body,))


def add(ledger_id: int = 7, *runs: Run, lac: int = -1) -> Add:
    return Add(ledger_id, runs or (entries(),), lac)


def flat(message: Any) -> Any:
    """Return a message with its entries as bytes, so that what was sent and received can be compared."""

    def flat_run(run: Run) -> Run:
        return run._replace(body=(b"".join(run.body),))

    if isinstance(message, Add):
        return Add(
            message.ledger_id, tuple(map(flat_run, message.runs)), message.lac, message.recovery, message.deferred
        )
    if getattr(message, "run", None) is not None:
        return type(message)(message.status, flat_run(message.run), message.packet)
    return message


class World:
    """A server and the links of one client."""

    def __init__(self, server: Server, links: Links) -> None:
        self.server = server
        self.links = links
        self.arrived: list[tuple[Peer, int, WireRequest]] = []
        self.outcomes: list[Outcome] = []
        self.answer: Callable[[Peer, int, WireRequest], WireReply | None] = lambda _peer, _number, _request: OK

    def link(self, bookie: Bookie = BOOKIE) -> Link:
        return self.links.connect(bookie, self.server.addresses[0], self.server.public_key)

    def turn(self, timeout_ms: int = 2) -> None:
        """Let the server and the client do what there is to do."""
        for peer, number, request in self.server.receive(timeout_ms):
            self.arrived.append((peer, number, request))
            reply = self.answer(peer, number, request)
            if reply is not None:
                self.server.reply(peer, number, reply)
        self.outcomes += self.links.poll(timeout_ms)

    def until(self, happened: Callable[[], object], seconds: float = 5.0) -> None:
        """Take turns until something has happened."""
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, "nothing happened in time"
            self.turn()

    def ask(self, link: Link, message: WireRequest, number: int = 1) -> WireReply | None:
        """Send a request and return its outcome."""
        self.outcomes.clear()
        assert link.send(number, message)
        self.until(lambda: self.outcomes)
        (outcome,) = self.outcomes
        assert outcome[:2] == (link, number)
        return outcome[2]


@contextmanager
def world(
    keys: ClusterKeys | None = KEYS,
    address: str = TCP,
    *,
    authorize: Callable[[bytes, Authorize], bool] | None = None,
    context: Any = None,
    **settings: int,
) -> Iterator[World]:
    with (
        Server([address], INSTANCE, keys, authorize=authorize, context=context) as server,
        Links(keys, context=context, **settings) as links,
    ):
        yield World(server, links)
