"""One server and its clients in one thread: each takes its turn until what is waited for has happened."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import zmq

from pybk.ledger.ledger_metadata import Bookie
from pybk.replication.messages import Add, EntryRun, Reply, Status
from pybk.transport import curve
from pybk.transport.client_links import Link, Links, Outcome
from pybk.transport.cluster_keys import MAC_BYTES, ClusterKeys, Mac, greeting_mac, mac_of, session_key
from pybk.transport.codec import (
    NONCE_BYTES,
    SESSION_BYTES,
    Authorize,
    AuthorizeMember,
    MessageKind,
    OneEntry,
    WireReply,
    WireRequest,
    encode,
)
from pybk.transport.frames import VERSION, Header, Outgoing, decode_head
from pybk.transport.server import Peer, Server
from tests.waiting import WAIT_S, source_of, wait_until

SECRET = bytes(range(32))
CLUSTER = b"cluster-16-bytes"
INSTANCE = b"instance-of-16-b"
BOOKIE = Bookie("a", INSTANCE)
KEYS = ClusterKeys.derive(SECRET, CLUSTER)
OK = Reply(Status.OK)
TCP = "tcp://127.0.0.1:*"


def entries(first: int = 0, sizes: tuple[int, ...] = (100,), stride: int = 1) -> EntryRun:
    body = b"".join(bytes([number % 251]) * size for number, size in enumerate(sizes, 1))
    return EntryRun(first, stride, array("q", sizes), (body,))


def add(ledger_id: int = 7, *runs: EntryRun, lac: int = -1) -> Add:
    return Add(ledger_id, runs or (entries(),), lac)


def flat(message: Any) -> Any:
    """Return a message with its entries as bytes, so that what was sent and received can be compared."""

    def flat_run(run: EntryRun) -> EntryRun:
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

    def until(self, happened: Callable[[], object]) -> None:
        """Take turns until something has happened."""

        def happened_now() -> object:
            self.turn()
            return happened()

        if not happened():
            wait_until(happened_now, source_of(happened))

    def ask(self, link: Link, message: WireRequest, number: int = 1) -> WireReply | None:
        """Send a request and return its outcome."""
        self.outcomes.clear()
        assert link.send(number, message, int(WAIT_S * 10**9))
        self.until(lambda: self.outcomes)
        (outcome,) = self.outcomes
        assert outcome[:2] == (link, number)
        assert not isinstance(outcome[2], OneEntry)
        return outcome[2]


@contextmanager
def world(
    keys: ClusterKeys | None = KEYS,
    address: str = TCP,
    *,
    authorize: Callable[[bytes, Authorize | AuthorizeMember], bool] | None = None,
    context: Any = None,
    **settings: Any,
) -> Iterator[World]:
    with (
        Server([address], INSTANCE, keys, authorize=authorize, context=context) as server,
        Links(keys, context=context, **settings) as links,
    ):
        yield World(server, links)


class RawClient:
    """A client of which a test sees and changes every byte."""

    def __init__(self, server: Server, keys: ClusterKeys | None = KEYS, context: Any = None) -> None:
        self.server = server
        self.keys = keys
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        if server.public_key is not None:
            assert keys is not None
            curve.secure_client(self.socket, keys.client, server.public_key)
        self.socket.connect(server.addresses[0])
        self.mac: Mac = greeting_mac(keys)
        self.counter = 0

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close(linger=0)
        if self._own_context:
            self._context.term()

    def head(self, outgoing: Outgoing, number: int = 1, instance: bytes = INSTANCE) -> bytes:
        """Return the head of the next request."""
        self.counter += 1
        return outgoing.head(number, self.counter, 0, instance, self.mac, VERSION)

    def request(self, message: WireRequest, number: int = 1, instance: bytes = INSTANCE) -> list[bytes]:
        """Return the frames of the next request."""
        outgoing = encode(message)
        return [self.head(outgoing, number, instance), *[frame.bytes for frame in outgoing.frames]]

    def exchange(self, *frames: bytes, wait_ms: int = 50) -> tuple[list[Any], list[Header]]:
        """Send frames, and return what the bookie got and what came back.

        What the bookie drops, it counts; after that, replies are waited for no longer than ``wait_ms``.
        """
        if frames:
            self.socket.send_multipart(frames)
        arrived: list[Any] = []
        heads: list[Header] = []
        self.last_head = b""
        counted = replace(self.server.counters)
        end = time.monotonic() + (WAIT_S if frames else wait_ms / 1000)
        while time.monotonic() < end and not heads and not arrived:
            if self.server.counters != counted:
                end = min(end, time.monotonic() + wait_ms / 1000)
            arrived += self.server.receive(1)
            while self.socket.poll(1):
                self.last_head = self.socket.recv_multipart()[0]
                heads.append(decode_head(self.last_head))
        return arrived, heads

    def greet(self) -> bytes:
        """Begin a session; return its id."""
        nonce = b"n" * NONCE_BYTES
        self.mac = greeting_mac(self.keys)
        hello = Outgoing(MessageKind.HELLO, numbers=(VERSION, 0, 0, 0), blob=nonce)
        _, (header,) = self.exchange(self.head(hello), wait_ms=60_000)
        assert header.kind == MessageKind.WELCOME
        both = self.last_head[header.head_bytes + MAC_BYTES :]
        session_id, bookie_nonce = both[:SESSION_BYTES], both[SESSION_BYTES:]
        self.mac = mac_of(session_key(self.keys, session_id, (nonce, bookie_nonce), header.instance))
        return session_id


class Tap:
    """A proxy before a TCP address that keeps what passes, and can stop passing it."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.is_open = threading.Event()
        self.is_open.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pass, args=(source, target))
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.is_open.wait()
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._sockets:
            end.close()
