"""The bare quorum loop: what ZeroMQ, the digests and the disk allow, with no protocol at all.

Three processes receive batches over ROUTER, check an XXH3 checksum, write and sync what waits, and answer; the client
makes an HMAC per entry and counts a batch once two have answered. A message without a body is the bare round trip: one
process answers with an entry of 1 KiB at once, and the client makes its HMAC. ``python -m bench.cluster.bare FILE`` is
one of the three; its CURVE keys, or an empty line, come through its standard input.
"""

from __future__ import annotations

import hmac
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import zmq
from xxhash import xxh3_64_digest

from bench.payloads import PAYLOADS

SERVERS: Final = 3
QUORUM: Final = 2
FILE_BYTES: Final = 64 << 20
BLOCK: Final = 4096
IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
_NUMBER: Final = struct.Struct(">q")
_CHECKSUM_AT: Final = 8
_BODY_AT: Final = 16


def serve(path: str, keys: str) -> None:
    """Receive, check, write, sync, answer; for ever."""
    socket: Any = zmq.Context().socket(zmq.ROUTER)
    socket.set_hwm(0)  # else answers to a client that has more than 1000 batches under way are dropped
    if keys:
        socket.curve_publickey, socket.curve_secretkey = (key.encode() for key in keys.split())
        socket.curve_server = True
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(file, bytes(FILE_BYTES), 0)
    os.fsync(file)
    print(port, flush=True)
    place = 0
    while True:
        socket.poll()
        arrived = []
        bodies = []
        for peer, message in _waiting(socket):
            if len(message) == _CHECKSUM_AT:
                socket.send_multipart([peer, bytes(message) + PAYLOADS[0]], zmq.NOBLOCK)
            else:
                arrived.append((peer, message))
        if not arrived:
            continue
        for _, message in arrived:
            body = message[_BODY_AT:]
            if xxh3_64_digest(body) != message[_CHECKSUM_AT:_BODY_AT]:
                raise RuntimeError("a batch came damaged")
            bodies.append(body)
        size = sum(map(len, bodies))
        padding = -size % BLOCK
        if place + size + padding > FILE_BYTES:
            place = 0
        bodies.append(memoryview(bytes(padding)))
        for first in range(0, len(bodies), IOV_MAX):
            place += os.pwritev(file, bodies[first : first + IOV_MAX], place)
        os.fdatasync(file)
        for peer, message in arrived:
            socket.send_multipart([peer, message[:_CHECKSUM_AT]], zmq.NOBLOCK)


def _waiting(socket: Any) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the messages that are there."""
    while True:
        try:
            peer, message = socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        yield peer.bytes, message.buffer


class BareLoop:
    """The client's end.

    Args:
        ports: Where the three listen.
        server_key: Their CURVE key; empty for none.
    """

    def __init__(self, ports: list[int], server_key: bytes) -> None:
        self._context = zmq.Context()
        self._sockets: list[Any] = [self._context.socket(zmq.DEALER) for _ in ports]
        self._poller = zmq.Poller()
        for socket, port in zip(self._sockets, ports, strict=True):
            socket.set_hwm(0)
            if server_key:
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = server_key
            socket.connect(f"tcp://127.0.0.1:{port}")
            self._poller.register(socket, zmq.POLLIN)
        self._mac = hmac.new(os.urandom(32), digestmod="sha256")
        self.number = 0

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def run(self, entries: int, window: int, seconds: float) -> tuple[float, list[float]]:
        """Send batches of some entries, a window of them under way.

        Returns:
            Entries per second, and the seconds that each batch took.
        """
        payloads = PAYLOADS[:entries]
        sent: dict[int, float] = {}
        answers: dict[int, int] = {}
        latencies: list[float] = []
        first = done = self.number
        begin = time.perf_counter()
        end = begin + seconds
        while True:
            while self.number - done < window and time.perf_counter() < end:
                message = self._batch(payloads)
                sent[self.number], answers[self.number] = time.perf_counter(), 0
                for socket in self._sockets:
                    socket.send(message, zmq.NOBLOCK, copy=len(message) < 1 << 16)
                self.number += 1
            if not answers:
                break
            for number in self._answered():
                answers[number] += 1
                if answers[number] == QUORUM:
                    latencies.append(time.perf_counter() - sent[number])
                elif answers[number] == SERVERS:
                    del answers[number]
            while done < self.number and answers.get(done, SERVERS) >= QUORUM:
                done += 1
        return (done - first) * entries / (time.perf_counter() - begin), latencies

    def read(self, seconds: float) -> list[float]:
        """Ask one process for an entry, over and over, and make its HMAC; return the seconds of each round trip."""
        socket = self._sockets[0]
        latencies = []
        now = time.perf_counter()
        end = now + seconds
        while now < end:
            begin = now
            socket.send(_NUMBER.pack(self.number), zmq.NOBLOCK)
            mac = self._mac.copy()
            mac.update(memoryview(socket.recv())[_CHECKSUM_AT:])
            mac.digest()
            now = time.perf_counter()
            latencies.append(now - begin)
        return latencies

    def _batch(self, payloads: list[bytes]) -> bytes:
        macs = []
        for payload in payloads:
            mac = self._mac.copy()
            mac.update(payload)
            macs.append(mac.digest())
        body = b"".join(chain.from_iterable(zip(macs, payloads, strict=True)))
        return b"".join((_NUMBER.pack(self.number), xxh3_64_digest(body), body))

    def _answered(self) -> Iterator[int]:
        """Wait for answers and yield the numbers of their batches."""
        for socket, _ in self._poller.poll():
            while True:
                try:
                    (number,) = _NUMBER.unpack(socket.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
                yield number


@contextmanager
def bare_loop(directory: Path, *, curve: bool) -> Iterator[BareLoop]:
    """Start the three, and connect."""
    public, secret = zmq.curve_keypair() if curve else (b"", b"")
    with ExitStack() as stack:
        ports = []
        for number in range(SERVERS):
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(directory / f"bare-{number}")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{public.decode()} {secret.decode()}".strip() + "\n")
            process.stdin.flush()
            ports.append(int(process.stdout.readline()))
        loop = BareLoop(ports, public)
        stack.callback(loop.close)
        loop.run(1, 1, 0.01)  # the connections are there
        yield loop


def median_ms(latencies: list[float]) -> float:
    """Return the median in milliseconds."""
    return statistics.median(latencies) * 1e3


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.readline().strip())
