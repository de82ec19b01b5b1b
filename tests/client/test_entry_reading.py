"""One entry is asked of one bookie; whatever that does but return it, the entry is read from the others."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from pybk import Entry, LedgerManager, LedgerReader
from pybk.client import reader as reader_module
from pybk.client import wire
from pybk.client.reader import Reading
from pybk.errors import ClosedError
from pybk.metrics import READ_REPAIRS
from pybk.replication.messages import EntryRun, Status
from pybk.transport import client_links
from pybk.transport.client_links import Link
from tests.client.test_limbo_repair import PASSWORD
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, descriptor_of, service_of
from tests.waiting import WAIT_S

PAYLOADS = [bytes((number,)) * 100 for number in range(6)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("one"), secret=b"s" * 32) as three:
        yield three


@pytest.fixture
def client(cluster: Inside) -> Iterator[LedgerManager]:
    with cluster.connect() as manager:
        yield manager


@pytest.fixture
def reader(client: LedgerManager) -> Iterator[LedgerReader]:
    with client.create_ledger(password=PASSWORD) as writer:
        writer.append_many(PAYLOADS)
    with client.open_ledger(writer.ledger_id, password=PASSWORD) as opened:
        assert len(list(opened)) == len(PAYLOADS)  # so that all links are up
        yield opened


@pytest.fixture
def conversations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first entries of all reads that took a machine."""
    begun: list[int] = []
    begin = Reading.__init__

    def note(reading: Reading, *arguments: Any, **others: Any) -> None:
        begin(reading, *arguments, **others)
        begun.append(reading.first)

    monkeypatch.setattr(Reading, "__init__", note)
    return begun


def only(reader: LedgerReader, entry_id: int) -> Entry:
    (entry,) = reader.read(entry_id, entry_id)
    return entry


def asked_first(client: LedgerManager, cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have the client ask one bookie first, and return that one's replicas."""
    backend = cluster_backend_of(client)
    service = service_of(cluster.bookies[1])
    monkeypatch.setattr(backend.membership, "near", service.bookie.bookie_id)
    return service.replicas


Read = Callable[..., tuple[Status, EntryRun | None]]


def denied(read: Read) -> Read:
    return lambda *_, **__: (Status.NO_SUCH_ENTRY, None)


def unknown(read: Read) -> Read:
    return lambda *_, **__: (Status.UNKNOWN, None)


def another(read: Read) -> Read:
    """Return another entry than the one that was asked for."""
    return lambda ledger_id, first, last, *rest, **others: read(ledger_id, first + 1, last + 1, *rest, **others)


def two(read: Read) -> Read:
    """Return more than was asked for."""
    return lambda ledger_id, first, _last, stride, bytes_max, **others: read(ledger_id, first, first + 1, stride, 1000)


def cut_off(read: Read) -> Read:
    def shorter(*arguments: Any, **others: Any) -> tuple[Status, EntryRun | None]:
        status, run = read(*arguments, **others)
        assert run is not None
        body = b"".join(run.body)[:40]
        return status, EntryRun(run.first, run.stride, array("q", (40,)), (body,))

    return shorter


def flipped(read: Read) -> Read:
    def wrong(*arguments: Any, **others: Any) -> tuple[Status, EntryRun | None]:
        status, run = read(*arguments, **others)
        assert run is not None
        body = bytearray(b"".join(run.body))
        body[-1] ^= 1
        return status, run._replace(body=(bytes(body),))

    return wrong


def test_one_bookie_is_asked_without_a_machine(
    reader: LedgerReader, conversations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ENTRY_NS", int(WAIT_S * 10**9))  # however long a busy machine takes
    entries = [only(reader, number) for number in range(len(PAYLOADS) - 1)]
    assert entries == [Entry(reader.ledger_id, number, entry.last_add_confirmed, 100 * (number + 1), PAYLOADS[number])
                       for number, entry in enumerate(entries)]  # fmt: skip
    assert conversations == []
    assert only(reader, 5).payload == PAYLOADS[5]
    assert conversations == [5], "the last entry is compared with the seal"


@pytest.mark.parametrize("answer", [denied, unknown, another, two, cut_off, flipped])
def test_whatever_else_a_bookie_returns_is_left_to_a_machine(
    answer: Callable[[Read], Read],
    reader: LedgerReader,
    client: LedgerManager,
    cluster: Inside,
    conversations: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, name in ((wire, "ENTRY_NS"), (reader_module, "SPECULATIVE_NS")):  # no other bookie is asked before
        monkeypatch.setattr(module, name, int(WAIT_S * 10**9))
    replicas = asked_first(client, cluster, monkeypatch)
    monkeypatch.setattr(replicas, "read", answer(replicas.read))
    assert only(reader, 2).payload == PAYLOADS[2]
    assert conversations == [2]
    repairs = sum(count for key, count in client.metrics().counters.items() if key.name == READ_REPAIRS)
    assert bool(repairs) == (answer in {unknown, another, cut_off, flipped})


def test_a_silent_bookie_is_not_waited_for(
    reader: LedgerReader,
    client: LedgerManager,
    cluster: Inside,
    conversations: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_first(client, cluster, monkeypatch)
    monkeypatch.setattr(wire, "ENTRY_NS", 1_000_000)
    server = service_of(cluster.bookies[1]).server
    monkeypatch.setattr(server, "reply_entry", lambda *_: True)
    assert only(reader, 2).payload == PAYLOADS[2]
    assert conversations == [2]


def test_a_read_outlives_an_interrupt_of_the_client(
    reader: LedgerReader,
    client: LedgerManager,
    cluster: Inside,
    conversations: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_first(client, cluster, monkeypatch)
    monkeypatch.setattr(wire, "ENTRY_NS", int(WAIT_S * 10**9))
    server, reply_entry = service_of(cluster.bookies[1]).server, type(service_of(cluster.bookies[1]).server).reply_entry
    arrived = threading.Event()

    def lose_one(*arguments: Any) -> bool:
        first = not arrived.is_set()
        arrived.set()
        return first or reply_entry(server, *arguments)

    monkeypatch.setattr(server, "reply_entry", lose_one)
    found: list[Entry] = []
    thread = threading.Thread(target=lambda: found.append(only(reader, 2)))
    thread.start()
    assert arrived.wait(WAIT_S)
    driver = cluster_backend_of(client).driver
    driver.broken = True
    driver.group.announce()
    thread.join(WAIT_S)
    assert [entry.payload for entry in found] == [PAYLOADS[2]]
    assert conversations == [2]


def test_a_closed_driver_reads_no_entry(cluster: Inside) -> None:
    with cluster.connect() as client:
        writer = client.create_ledger(password=PASSWORD)
        writer.append_many(PAYLOADS)
        backend, ledger = cluster_backend_of(client), descriptor_of(writer)
        bookie = writer.metadata.fragments[0].ensemble[0]
        backend.driver.close(ClosedError("closed"), ClosedError("closed"))
        assert backend.driver.read_entry(ledger, bookie, 1, 1) is None


def test_a_bookie_without_a_session_is_not_asked(
    reader: LedgerReader, client: LedgerManager, conversations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_links, "RETRY_NS", 0)
    backend = cluster_backend_of(client)
    for link, _ in list(backend.wire.by_bookie.values()):
        assert isinstance(link, Link)
        backend.driver.call_as_leader(partial(link.lose, "the test ends the connection"))
    assert only(reader, 1).payload == PAYLOADS[1]
    assert conversations == [1]


def test_threads_read_at_the_same_time(reader: LedgerReader, conversations: list[int]) -> None:
    wrong: list[Entry] = []

    def read(first: int) -> None:
        for count in range(200):
            entry = only(reader, (first + count) % 5)
            if entry.payload != PAYLOADS[(first + count) % 5]:
                wrong.append(entry)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
