"""A bookie whose peers mean harm, or are broken: it refuses what they say, serves on, and starts again."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import PybkError
from pybk.flags import LedgerType
from pybk.metrics import REQUEST_FAULTS
from pybk.replication.bookie import BookieEffect
from pybk.replication.messages import Add, EntryRun, Read, ReadLac, Reply, Status
from pybk.transport.client_links import Links, Outcome
from pybk.transport.cluster_keys import ClusterKeys, RightsKey
from pybk.transport.codec import OneEntry, WireReply, WireRequest
from pybk.transport.logging_limit import LINES_MAX
from pybk.transport.server import Server
from tests.client.test_limbo_repair import PASSWORD, check, fill
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, create_of_type, descriptor_of, service_of
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", [LedgerType.BOOKIE, LedgerType.FENCE, LedgerType.LIMBO])
def test_a_ledger_of_a_bookies_own_type_is_refused_and_bookies_start_again(three: Inside, kind: LedgerType) -> None:
    client = three.connect()
    ledger_id = fill(client, 20)
    writer = create_of_type(client, kind, password=PASSWORD)
    with pytest.raises(PybkError):
        writer.append(b"poison")
    with pytest.raises(PybkError):
        writer.close()
    own = [service_of(manager).replicas.state(writer.ledger_id) for manager in three.bookies]
    assert own == [None, None, None]
    for manager in three.bookies:
        manager.close()
    for place in range(3):
        three.open_bookie(place)
    check(three.connect(), ledger_id, 20)


def test_a_ledger_of_the_system_s_metadata_is_taken(three: Inside) -> None:
    client = three.connect()
    with create_of_type(client, LedgerType.METADATA, password=PASSWORD) as writer:
        assert writer.append(b"manifest") == 0


class Member:
    """A member of the cluster that says what no client of this pybk says, with the right to one ledger."""

    def __init__(self, cluster: Inside, stack: ExitStack) -> None:
        self.manager = cluster.connect()
        self.writer = self.manager.create_ledger(password=PASSWORD)
        self.writer.append(b"first")
        self.ledger_id = self.writer.ledger_id
        self.bookie = self.writer.metadata.fragments[0].ensemble[0]
        self.service = service_of(cluster.bookies[int(self.bookie.bookie_id[-1])])
        backend = cluster_backend_of(self.manager)
        metadata = backend.membership.metadata
        keys = ClusterKeys.derive(cluster.secret or b"", metadata.cluster_id)
        self.links = stack.enter_context(Links(keys))
        self.link = self.links.connect(self.bookie, self.service.addresses[0], self.service.server.public_key)
        ledger = descriptor_of(self.writer)
        assert isinstance(ledger, RemoteLedger)
        self.links.grant(self.ledger_id, metadata.describe(self.writer.metadata), RightsKey(ledger.keys.right_key))
        self._number = 0
        # The append returns at two of three, and this bookie may be the third.
        wait_until(lambda: self.service.replicas.count_entries(self.ledger_id) == 1)

    def say(self, request: WireRequest) -> WireReply | None:
        """Send a request and return what comes back, None for nothing."""
        self._number += 1
        assert self.link.send(self._number, request, int(WAIT_S * 1e9))
        while True:
            for _, number, reply in self.links.poll(1000):
                if number == self._number:
                    assert not isinstance(reply, OneEntry)
                    return reply

    def entry(self, entry_id: int, lac: int | None = None) -> bytes:
        """Return an entry of the ledger, with a digest that only readers look at."""
        header = (self.ledger_id, entry_id, entry_id - 1 if lac is None else lac, 10 * (entry_id + 1))
        return struct.pack(">qqqq", *header) + bytes(16) + b"x" * 40


def one(entry_id: int, body: bytes, stride: int = 1) -> EntryRun:
    return EntryRun(entry_id, stride, array("q", [len(body)]), (body,))


def test_no_message_that_the_store_cannot_hold_ends_a_bookie(three: Inside) -> None:
    with ExitStack() as stack:
        member = Member(three, stack)
        wide = one(5, member.entry(5), stride=1 << 40)
        said = [
            member.say(Add(member.ledger_id, (wide,), -1)),
            member.say(Add(member.ledger_id, (one(6, member.entry(6, lac=1 << 62)),), -1)),
            member.say(Read(member.ledger_id, 0, 9, 1 << 40, 100)),
        ]
        assert [getattr(reply, "status", None) for reply in said] == [Status.REFUSED] * 3
        assert member.service.serving
        member.say(Read(member.ledger_id, 0, (1 << 63) - 1, (1 << 32) - 1, (1 << 63) - 1))
        member.say(ReadLac(member.ledger_id, beyond=-1, wait_ns=(1 << 63) - 1))
        assert member.service.serving
        assert member.writer.append(b"second") == 1
        assert REQUEST_FAULTS not in {key.name for key in three.bookies[0].metrics().counters}


def test_an_unexpected_error_refuses_one_request_and_is_counted_and_logged(
    three: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        member = Member(three, stack)
        replicas = member.service.replicas
        real = replicas.stage

        def stage(ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
            if run.first == 1000:
                raise struct.error("what nobody foresaw")
            return real(ledger_id, run, durable, recovery=recovery)

        monkeypatch.setattr(replicas, "stage", stage)
        for _ in range(100):
            reply = member.say(Add(member.ledger_id, (one(1000, member.entry(1000)),), -1))
            assert reply == Reply(Status.REFUSED)
        assert member.service.serving
        assert member.service.health().state == "ok"
        counters = {key.name: value for key, value in replicas.store.metrics.snapshot().counters.items()}
        assert counters[REQUEST_FAULTS] == 100
        assert member.writer.append(b"second") == 1
    lines = [record for record in caplog.records if "failed at" in record.getMessage()]
    assert 1 <= len(lines) <= LINES_MAX


def test_a_lost_session_does_not_count_as_a_failed_bookie(three: Inside) -> None:
    client = three.connect()
    writer = client.create_ledger(password=PASSWORD)
    writer.append(b"before")
    for manager in three.bookies:
        server = service_of(manager).server
        done = threading.Event()

        def forget(server: Server = server, done: threading.Event = done) -> list[BookieEffect]:
            server.peers.clear()
            done.set()
            return []

        service_of(manager).post(forget)
        assert done.wait(WAIT_S)
    assert writer.append(b"after") == 1
    assert len(client.ledger_metadata(writer.ledger_id).fragments) == 1
    assert list(cluster_backend_of(client).membership.metadata.marks()) == []
    writer.close()
    with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
        assert [entry.payload for entry in reader.read(0, 1)] == [b"before", b"after"]


def test_a_client_cannot_store_a_verifier_of_its_own(tmp_path: Path) -> None:
    """Where a ledger is not known yet, only the metadata store says what its verifier is."""
    with inside(tmp_path, count=4) as cluster, ExitStack() as stack:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=3, write_quorum=3, ack_quorum=3)
        writer.append(b"first")
        ensemble = writer.metadata.fragments[0].ensemble
        (spare,) = [manager for manager in cluster.bookies if service_of(manager).bookie not in ensemble]
        service = service_of(spare)
        metadata = cluster_backend_of(client).membership.metadata
        own = RightsKey(b"\x07" * 32)
        keys = ClusterKeys.derive(cluster.secret or b"", metadata.cluster_id)
        links = stack.enter_context(Links(keys))
        link = links.connect(service.bookie, service.addresses[0], service.server.public_key)
        ledger_id = writer.ledger_id
        links.grant(ledger_id, metadata.describe(replace(writer.metadata, verifier=own.public)), own)
        entry = struct.pack(">qqqq", ledger_id, 5, 4, 60) + bytes(42)
        wrong: list[Any] = [
            Add(ledger_id, (one(5, entry),), 4),
            ReadLac(ledger_id, fence=True),
            Read(ledger_id, 0, 9, 1, 100, fence=True),
        ]
        for number, request in enumerate(wrong):
            assert link.send(number, request, int(WAIT_S * 1e9))
            (status,) = statuses(links)
            assert status is Status.UNAUTHORIZED
        assert service.replicas.state(ledger_id) is None
        # The writer comes to that bookie when one of its own is lost, and an owner can fence there.
        cluster.bookies[int(ensemble[0].bookie_id[-1])].close()
        assert writer.append(b"more") == 1
        assert service.bookie in client.ledger_metadata(ledger_id).fragments[-1].ensemble
        other = cluster.connect().open_ledger(ledger_id, password=PASSWORD)
        assert other.is_closed
        other.close()


def statuses(links: Links) -> list[Status]:
    """Return those of the next replies."""
    replies = [reply for _, _, reply in outcomes(links) if reply is not None]
    return [reply.status for reply in replies if not isinstance(reply, OneEntry)]


def outcomes(links: Links) -> list[Outcome]:
    while True:
        found = links.poll(1000)
        if found:
            return found


def test_an_owner_fences_a_bookie_that_never_saw_the_ledger(tmp_path: Path) -> None:
    with inside(tmp_path, count=4) as cluster, ExitStack() as stack:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=3)
        writer.append(b"first")
        ensemble = writer.metadata.fragments[0].ensemble
        (spare,) = [manager for manager in cluster.bookies if service_of(manager).bookie not in ensemble]
        service = service_of(spare)
        metadata = cluster_backend_of(client).membership.metadata
        ledger = descriptor_of(writer)
        assert isinstance(ledger, RemoteLedger)
        keys = ClusterKeys.derive(cluster.secret or b"", metadata.cluster_id)
        links = stack.enter_context(Links(keys))
        link = links.connect(service.bookie, service.addresses[0], service.server.public_key)
        links.grant(writer.ledger_id, metadata.describe(writer.metadata), RightsKey(ledger.keys.right_key))
        assert link.send(1, ReadLac(writer.ledger_id, fence=True), int(WAIT_S * 1e9))
        assert statuses(links) == [Status.NO_SUCH_LEDGER]
        state = service.replicas.state(writer.ledger_id)
        assert state is not None
        assert state.fenced
        assert state.header is not None


def test_strangers_are_counted_and_logged(three: Inside, caplog: pytest.LogCaptureFixture) -> None:
    server = service_of(three.bookies[0]).server
    host, port = server.addresses[0].removeprefix("tcp://").split(":")

    def refused(reason: str) -> int:
        values = three.bookies[0].metrics().gauges
        return sum(int(value) for key, value in values.items() if ("reason", reason) in key.labels)

    before = refused("unheard")
    caplog.set_level(logging.INFO, "pybk.transport.connection_limit")
    for said in (b"GET / HTTP/1.0\r\n\r\n", bytes(100), b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"garbage" * 20):
        for _ in range(10):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(said)
    wait_until(lambda: refused("unheard") >= before + 30)
    assert sum("before a message was received" in line for line in caplog.messages) >= LINES_MAX
