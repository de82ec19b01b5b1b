"""Messages that do not fit into the queues to a bookie wait; the bookie does not count as failed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pybk.client.wire import BookieWire
from pybk.manager.ledger_manager import LedgerManager
from pybk.transport.client_links import OUTSTANDING_BYTES_MAX
from tests.cluster.inside import Inside, inside
from tests.waiting import wait_until

PASSWORD = b"correct horse"
READ_BYTES = 4 << 20
PAYLOADS = [random.Random(1).randbytes(256 << 10)] * 24
THREADS = 12


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=1, secret=None) as cluster:
        yield cluster


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests were queued when some of them were sent."""
    found = []
    send_queued = BookieWire.send_queued

    def watched(wire: BookieWire) -> list[tuple[int, None]]:
        found.append(sum(map(len, wire.queued.values())))
        return send_queued(wire)

    monkeypatch.setattr(BookieWire, "send_queued", watched)
    return found


def write(client: LedgerManager) -> int:
    with client.create_ledger(password=PASSWORD, ensemble_size=1) as writer:
        writer.append_many(PAYLOADS)
    return writer.ledger_id


def test_many_threads_read_much_at_once(one: Inside, queued: list[int]) -> None:
    client = one.connect()
    ledger_id = write(client)
    assert THREADS * READ_BYTES > OUTSTANDING_BYTES_MAX

    def read(_: int) -> int:
        with client.open_ledger(ledger_id, password=PASSWORD) as reader:
            first = 0
            while first < len(PAYLOADS):
                first += len(reader.read_batch(first, max_bytes=READ_BYTES))
        return first

    def are_queued() -> bool:
        """Have all threads read, and return whether requests had to wait: a busy bookie may be as quick as they are."""
        with ThreadPoolExecutor(THREADS) as threads:
            assert list(threads.map(read, range(THREADS))) == [len(PAYLOADS)] * THREADS
        return max(queued, default=0) > 0

    wait_until(are_queued)


def test_many_writers_append_much_at_once(one: Inside, queued: list[int]) -> None:
    client = one.connect()
    ids: list[int] = []

    def are_queued() -> bool:
        with ThreadPoolExecutor(THREADS) as threads:
            ids.extend(threads.map(lambda _: write(client), range(THREADS)))
        return max(queued, default=0) > 0

    wait_until(are_queued)
    for ledger_id in ids:
        found = client.ledger_metadata(ledger_id)
        assert (found.last_entry_id, len(found.fragments)) == (len(PAYLOADS) - 1, 1)


def test_appends_queued_at_a_closing_bookie_get_an_answer(one: Inside, queued: list[int]) -> None:
    client = one.connect()
    writers = [client.create_ledger(password=PASSWORD, ensemble_size=1) for _ in range(THREADS)]
    futures = [writer.append_many_async(PAYLOADS) for writer in writers]
    one.bookies[0].close()
    for future in futures:
        error = future.exception(60)
        assert error is None or getattr(error, "outcome_unknown", False), error
