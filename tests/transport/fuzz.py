"""A member of the cluster that mutates valid messages after authentication, while a legitimate writer appends.

``python -m tests.transport.fuzz --seconds 60 --seed 1`` runs bookies in this process, with CURVE and a cluster secret.
The fuzzer has sessions of its own, and the right to a ledger of its own: what it sends has the right MACs, and says
anything. The writer appends meanwhile. At the end everything that was acknowledged to it is read, every bookie serves
and starts again, and memory is bounded. The seed is printed, and what is sent follows from it. The writer waits long
for each bookie, so that a busy machine makes none look failed; how long an append took at most is printed.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import threading
import time
from array import array
from collections import Counter
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import zmq

from pybk.client import wire
from pybk.client.remote_ledger import RemoteLedger
from pybk.flags import StorageHint
from pybk.metrics import REQUEST_FAULTS
from pybk.replication.messages import Add, AskWriter, CompareLacs, EntryRun, Force, Move, Read, ReadLac
from pybk.transport import client_links, curve, heartbeat
from pybk.transport.cluster_keys import MAC_BYTES, ClusterKeys, Mac, RightsKey, greeting_mac, mac_of, session_key
from pybk.transport.codec import (
    NONCE_BYTES,
    SESSION_BYTES,
    Authorize,
    LacPacket,
    MessageKind,
    Ping,
    WireRequest,
    encode,
)
from pybk.transport.frames import VERSION, Outgoing, decode_head
from tests.client.test_limbo_repair import PASSWORD
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, descriptor_of, service_of

GROWTH_MAX: Final = 512 << 20
"""Bytes by which this process, which is three bookies, the writer and the fuzzer, may grow."""

PATIENCE_S: Final = 60
"""How long a bookie may be silent before the writer takes it for failed."""

_EDGES: Final = (
    *(0, 1, -1, -2, 2, 7, 63, 64, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
    *(1 << 40, (1 << 62), (1 << 63) - 1, -(1 << 63), -(1 << 31)),
)


class Fuzzer:
    """One session after another with one bookie."""

    def __init__(self, cluster: Inside, place: int, seed: int) -> None:
        self._draw = random.Random(seed)
        manager = cluster.connect()
        self.ledger = manager.create_ledger(password=PASSWORD)
        self.ledger.append(b"mine")
        self.ledger_id = self.ledger.ledger_id
        service = service_of(cluster.bookies[place])
        metadata = cluster_backend_of(manager).membership.metadata
        self._keys = ClusterKeys.derive(cluster.secret or b"", metadata.cluster_id)
        self._instance = service.bookie.instance
        self._address = service.addresses[0]
        self._public = service.server.public_key or b""
        ledger = descriptor_of(self.ledger)
        assert isinstance(ledger, RemoteLedger)
        self._right = RightsKey(ledger.keys.right_key)
        self._description = metadata.describe(self.ledger.metadata)
        self._context = zmq.Context()
        self._socket: Any = None
        self._mac: Mac = greeting_mac(self._keys)
        self._counter = 0
        self._session_id = b""
        self.sent: Counter[str] = Counter()
        self.heard = 0

    def greet(self) -> bool:
        """Begin a session over a connection of its own."""
        if self._socket is not None:
            self._socket.close(linger=0)
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        curve.secure_client(socket, self._keys.client, self._public)
        socket.connect(self._address)
        nonce = self._draw.randbytes(NONCE_BYTES)
        self._mac, self._counter = greeting_mac(self._keys), 0
        hello = Outgoing(MessageKind.HELLO, numbers=(VERSION, 0, 0, 0), blob=nonce)
        socket.send(self._head(hello))
        if not socket.poll(10_000):
            return False
        head = socket.recv_multipart()[0]
        header = decode_head(head)
        if header.kind != MessageKind.WELCOME:
            return False
        both = head[header.head_bytes + MAC_BYTES :]
        self._session_id = both[:SESSION_BYTES]
        self._mac = mac_of(session_key(self._keys, self._session_id, (nonce, both[SESSION_BYTES:]), header.instance))
        self.say(encode(self._proof(self.ledger_id)))
        return True

    def close(self) -> None:
        """Let go of everything."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._context.term()

    def _head(self, outgoing: Outgoing) -> bytes:
        self._counter += 1
        return outgoing.head(self._counter, self._counter, self._number(), self._instance, self._mac, VERSION)

    def _number(self) -> int:
        return self._draw.choice((0, 1, 1 << 20, 1 << 40, (1 << 64) - 1))

    def _proof(self, ledger_id: int) -> Authorize:
        signature = self._right.sign(self._session_id, self._instance, ledger_id)
        return Authorize(ledger_id, self._description, signature)

    def say(self, outgoing: Outgoing, bodies: list[bytes] | None = None) -> None:
        """Send a message, and take what came back."""
        frames = [frame.bytes for frame in outgoing.frames] if bodies is None else bodies
        self._socket.send_multipart([self._head(outgoing), *frames])
        while self._draw.random() < 0.9 and self._socket.poll(0):
            self._socket.recv_multipart()
            self.heard += 1

    def step(self) -> None:
        """Send one message that no client of this pybk sends."""
        draw = self._draw
        how = draw.choice(
            ("request", "numbers", "numbers", "table", "entries", "entries", "blob", "kind", "flood", "new")
        )
        self.sent[how] += 1
        if how == "new":
            if draw.random() < 0.3:
                self.greet()
        elif how == "request":
            self.say(encode(self._request()))
        elif how == "flood":
            outgoing = encode(self._request())
            for _ in range(draw.randrange(100)):
                self.say(outgoing)
        elif how == "numbers":
            numbers = (self._edge(), self._edge(), self._edge(), self._edge())
            kind = draw.choice([*MessageKind])
            self.say(Outgoing(kind, draw.choice((0, 1, 2, 3, 0xFFFF)), self._ledger(), numbers))
        elif how == "kind":
            self.say(Outgoing(draw.randrange(256), draw.randrange(1 << 16), self._ledger(), blob=self._bytes()))
        elif how == "blob":
            kind = draw.choice(
                (
                    MessageKind.AUTHORIZE,
                    MessageKind.LAC_PACKET,
                    MessageKind.HELLO,
                    MessageKind.PING,
                    MessageKind.MOVE,
                    MessageKind.COMPARE_LACS,
                )
            )
            data = bytearray(self._description if draw.random() < 0.5 else self._bytes())
            if data:
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            self.say(Outgoing(kind, 0, self._ledger(), blob=draw.randbytes(64) * draw.randrange(2) + bytes(data)))
        elif how == "table":
            self._say_table()
        else:
            self._say_entries()

    def _edge(self) -> int:
        return self._draw.choice(_EDGES) if self._draw.random() < 0.8 else self._draw.randrange(-(1 << 63), 1 << 63)

    def _ledger(self) -> int:
        return self.ledger_id if self._draw.random() < 0.7 else self._draw.choice((0, 1, 2, 1 << 40, (1 << 63) - 1))

    def _bytes(self) -> bytes:
        return self._draw.randbytes(self._draw.choice((0, 1, 31, 32, 64, 300, 5000)))

    def _request(self) -> WireRequest:
        """Return a request that a client could send, at odd places."""
        draw, ledger_id = self._draw, self._ledger()
        positive = abs(self._edge()) & ((1 << 63) - 1)
        kinds: list[WireRequest] = [
            Read(ledger_id, 0, positive, 1 + positive % 5, positive, draw.random() < 0.05, draw.random() < 0.5),
            ReadLac(ledger_id, beyond=-1 + positive % 3, wait_ns=positive),
            Force(ledger_id),
            Move(ledger_id, draw.choice([*StorageHint])),
            AskWriter(ledger_id),
            CompareLacs(array("q", (ledger_id, positive)), array("q", (positive % 5 - 1, -1))),
            LacPacket(ledger_id, draw.randbytes(32)),
            self._proof(ledger_id),
            Ping(),
            Add(
                ledger_id,
                (self._run(draw.randrange(100), 1 + draw.randrange(3)),),
                -1 + positive % 4,
                draw.random() < 0.3,
            ),
        ]
        return draw.choice(kinds)

    def _run(self, first: int, stride: int, count: int = 0) -> EntryRun:
        """Return entries of the fuzzer's ledger, some of whose headers are wrong."""
        draw = self._draw
        count = count or draw.choice((1, 2, 20))
        sizes, bodies = array("q"), []
        for number in range(count):
            entry_id = first + number * stride
            fields = [self.ledger_id, entry_id, entry_id - 1, 40 * (entry_id + 1)]
            if draw.random() < 0.1:
                fields[draw.randrange(4)] = self._edge()
            header = b"".join((field & ((1 << 64) - 1)).to_bytes(8, "big") for field in fields)
            body = header + draw.randbytes(draw.choice((0, 16, 32, 72)))
            sizes.append(len(body))
            bodies.append(body)
        return EntryRun(first, stride, sizes, (b"".join(bodies),))

    def _say_table(self) -> None:
        """Send runs whose table was changed, under the right checksum and MAC."""
        outgoing = Outgoing(MessageKind.ADD, 0, self.ledger_id, (-1, 0, 0, 0), (self._run(3, 1), self._run(50, 2)))
        shared = bytearray(outgoing.shared)
        for _ in range(self._draw.randrange(1, 3)):
            at = self._draw.randrange(len(shared))
            shared[at : at + 8] = self._draw.randbytes(len(shared[at : at + 8]))
        outgoing.shared = bytes(shared)
        self.say(outgoing)

    def _say_entries(self) -> None:
        """Send an add of the fuzzer's ledger with numbers from the edges."""
        draw = self._draw
        run = self._run(
            abs(self._edge()) >> draw.choice((1, 40, 60)), 1 + (abs(self._edge()) >> draw.choice((1, 31, 60)))
        )
        if draw.random() < 0.5:
            run = self._run(draw.randrange(50), 1, 1)._replace(stride=1 + draw.randrange(1 << 33))
        flags = draw.choice((0, 1, 2, 3))
        try:
            self.say(Outgoing(MessageKind.ADD, flags, self.ledger_id, (self._edge(), 0, 0, 0), (run,)))
        except Exception:  # noqa: BLE001  # what cannot be encoded cannot be sent
            self.sent["cannot be sent"] += 1


class Writer:
    """A legitimate writer in a thread of its own."""

    def __init__(self, cluster: Inside) -> None:
        self._manager = cluster.connect()
        self.writer = self._manager.create_ledger(password=PASSWORD)
        self.acknowledged: list[bytes] = []
        self.longest_s = 0.0
        self.error: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="legitimate writer")
        self._thread.start()

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.is_set() or not number:
                payload = b"entry %d " % number * 10
                begun = time.monotonic()
                assert self.writer.append(payload) == number
                self.longest_s = max(self.longest_s, time.monotonic() - begun)
                self.acknowledged.append(payload)
                number += 1
        except Exception as error:  # noqa: BLE001  # the thread that joins this one looks at it
            self.error = error

    def stop(self) -> None:
        """Stop appending."""
        self._stop.set()
        self._thread.join()


def run(directory: Path, *, seed: int, seconds: float, steps: int = 1 << 60) -> Counter[str]:
    """Fuzz; raises AssertionError if the bookies or the writer came to harm.

    Args:
        directory: Where the cluster is made.
        seed: What is sent follows from it.
        seconds: How long at most.
        steps: How many messages, or floods of them, at most.

    Returns:
        How many messages of each way were sent.
    """
    with (
        patch.object(wire, "TIMEOUT_NS", PATIENCE_S * 10**9),
        patch.object(client_links, "PING_NS", PATIENCE_S * 10**9),
        patch.object(heartbeat, "SILENCE_MS", PATIENCE_S * 1000),
        inside(directory) as cluster,
    ):
        writer = Writer(cluster)
        fuzzers = [Fuzzer(cluster, place, seed + place) for place in range(3)]
        for fuzzer in fuzzers:
            assert fuzzer.greet()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        end = time.monotonic() + seconds
        for _ in range(steps):
            if time.monotonic() >= end:
                break
            for fuzzer in fuzzers:
                fuzzer.step()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
        writer.stop()
        for manager in cluster.bookies:
            service = service_of(manager)
            assert service.serving, service.health().reason
            assert service.health().state == "ok", service.health().reason
            counters = manager.metrics().counters
            faults = sum(value for key, value in counters.items() if key.name == REQUEST_FAULTS)
            assert not faults, "a request failed at what no request should be able to cause; the log says how"
            assert not service.server.counters.faults
        assert writer.error is None, repr(writer.error)
        fragments = cluster.connect().ledger_metadata(writer.writer.ledger_id).fragments
        assert len(fragments) == 1, f"a bookie was taken for failed: {fragments}"
        assert grown < GROWTH_MAX, f"memory grew by {grown} bytes"
        writer.writer.close()
        for fuzzer in fuzzers:
            fuzzer.close()
        for manager in cluster.bookies:
            manager.close()
        for place in range(3):
            cluster.open_bookie(place)
        with cluster.connect().open_ledger(writer.writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == len(writer.acknowledged) - 1
            found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
            assert found == writer.acknowledged
        total = sum((fuzzer.sent for fuzzer in fuzzers), Counter[str]())
        total["acknowledged to the writer"] = len(writer.acknowledged)
        total["longest append in milliseconds"] = round(writer.longest_s * 1000)
        return total


def main() -> int:
    """Fuzz as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parsed = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if parsed.seed is None else parsed.seed
    sys.stdout.write(f"seed {seed}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="pybk-fuzz-") as directory:
        for how, count in sorted(run(Path(directory), seed=seed, seconds=parsed.seconds).items()):
            sys.stdout.write(f"{how}: {count}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
