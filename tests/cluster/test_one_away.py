"""One of three bookies is killed, full or about to end when ledgers, logs, subscriptions and blobs are made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pybk import LogEnd, LogReader, LogRecord, Subscription
from pybk.bookie import keeper
from pybk.errors import NotEnoughBookiesError
from pybk.healing import auditor_driver
from pybk.ledger.ledger_metadata import Bookie, Fragment
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams.blob_store import BlobStore
from pybk.streams.log import Log
from tests.cluster.checker import check_writer, last_acked
from tests.cluster.child import PASSWORD
from tests.cluster.inside import Inside, inside
from tests.cluster.processes import running
from tests.internals import cluster_backend_of, service_of
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.sampled(one_in=4, using="tmp_path")

COUNT = 20
RECORDS = [b"%d" % number for number in range(COUNT)]
FULL = 1 << 60
"""More free bytes than any device has."""


def _wait_for_bookies(client: LedgerManager, count: int) -> None:
    membership = cluster_backend_of(client).membership
    wait_until(lambda: len(membership.bookies) == count)


def _fragments(client: LedgerManager, ledger_id: int) -> tuple[Fragment, ...]:
    return client.ledger_metadata(ledger_id).fragments


def _members(client: LedgerManager, ledger_id: int) -> set[Bookie]:
    return {bookie for fragment in _fragments(client, ledger_id) for bookie in fragment.ensemble}


def _take(source: LogReader | Subscription, count: int) -> list[LogRecord]:
    records: list[LogRecord] = []
    while len(records) < count:
        records += source.read_many(count - len(records), timeout=WAIT_S)
    return records


def _make_all(client: LedgerManager) -> int:
    """Make a ledger, a log, a subscription and a blob, and return the ledger."""
    with client.create_ledger(password=PASSWORD) as writer:
        for record in RECORDS:
            writer.append(record)
    with Log.open(client, "log", password=PASSWORD) as log, log.writer() as appender:
        for record in RECORDS:
            appender.append(record)
        with log.subscribe("reader", start=LogEnd.EARLIEST) as subscription:
            subscription.ack(_take(subscription, COUNT // 2))
    with BlobStore.open(client, password=PASSWORD) as blobs:
        blobs.put("blob", b"".join(RECORDS))
    return writer.ledger_id


def _read_all(client: LedgerManager, ledger_id: int) -> None:
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        assert [bytes(entry.payload) for entry in reader.read(0, COUNT - 1)] == RECORDS
    with Log.open(client, "log", password=PASSWORD) as log:
        with log.reader() as records:
            assert [bytes(record.data) for record in _take(records, COUNT)] == RECORDS
        with log.subscribe("reader") as subscription:
            left = _take(subscription, COUNT - COUNT // 2)
            assert [bytes(record.data) for record in left] == RECORDS[COUNT // 2 :]
    with BlobStore.open(client, password=PASSWORD) as blobs:
        assert blobs.get("blob") == b"".join(RECORDS)


def _has_no_marks(client: LedgerManager) -> bool:
    return not list(cluster_backend_of(client).membership.metadata.marks())


@pytest.mark.sampled(one_in=8, group="processes")
def test_one_of_three_bookies_may_be_down_when_anything_is_made(tmp_path: Path) -> None:
    with running(tmp_path, 3) as cluster:
        client = cluster.connect()
        cluster.bookies["bookie-2"].kill()
        _wait_for_bookies(client, 2)
        still_open = client.create_ledger(password=PASSWORD)
        still_open.append(RECORDS[0])
        ledger_id = _make_all(client)
        assert {bookie.bookie_id for bookie in _members(client, ledger_id)} == set(cluster.bookies)
        assert not _has_no_marks(client)
        cluster.bookies["bookie-2"].start()
        wait_until(lambda: _has_no_marks(client), seconds=180)
        for record in RECORDS[1:]:
            still_open.append(record)
        still_open.close()
        assert len(_fragments(client, still_open.ledger_id)) == 2, "the writer took it into the ensemble anew"
        cluster.bookies["bookie-0"].kill()
        _read_all(client, ledger_id)
        cluster.bookies["bookie-1"].kill()
        for closed in (ledger_id, still_open.ledger_id):
            with client.open_ledger(closed, password=PASSWORD) as reader:
                found = [bytes(entry.payload) for entry in reader.read(0, COUNT - 1)]
            assert found == RECORDS, "the bookie that was away has everything"


def _small_ledger(client: LedgerManager) -> int:
    with client.create_ledger(password=PASSWORD) as writer:
        writer.append(RECORDS[0])
    return writer.ledger_id


def _fill(cluster: Inside) -> Callable[[], None]:
    """Have the third bookie be full; return what ends that."""
    cluster.bookies[2].close()
    full = cluster.open_bookie(2, free_bytes_low=FULL, free_bytes_ok=FULL)
    return full.close


def _retire(cluster: Inside) -> Callable[[], None]:
    """Have the third bookie finish what it does before it ends, as after a SIGTERM; return what ends it."""
    service_of(cluster.bookies[2]).keeper.retire()
    return cluster.bookies[2].close


def test_a_full_bookie_drops_deleted_ledgers_before_others_look_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STATE_SECONDS", 0.1)
    monkeypatch.setattr(keeper, "COLLECT_SECONDS", 3600.0)
    monkeypatch.setattr(auditor_driver, "TICK_S", 0.1)
    monkeypatch.setattr(auditor_driver, "ANNOUNCE_S", 3600.0)
    with inside(tmp_path, autorecovery=True) as cluster:
        client = cluster.connect()
        ledger_ids = [_small_ledger(client) for _ in range(2)]
        replicas = [service_of(each).replicas for each in cluster.bookies[:2]]
        wait_until(lambda: all(each.ledgers() == ledger_ids for each in replicas), "the bookie that takes them last")
        metadata = cluster_backend_of(client).membership.metadata
        wait_until(lambda: metadata.last_deletion_page() is not None)
        cluster.bookies[2].close()
        full = cluster.open_bookie(2, free_bytes_low=FULL, free_bytes_ok=FULL)
        for ledger_id in ledger_ids:
            client.delete_ledger(ledger_id, password=PASSWORD)
            wait_until(lambda: ledger_id not in service_of(full).replicas.ledgers())  # noqa: B023
        assert all(each.ledgers() == ledger_ids for each in replicas), "the others look once an hour"


@pytest.mark.parametrize("refuse", [_fill, _retire], ids=["full", "ends"])
def test_one_of_three_bookies_may_be_read_only_when_anything_is_made(
    tmp_path: Path, refuse: Callable[[Inside], Callable[[], None]]
) -> None:
    with inside(tmp_path, autorecovery=True) as cluster:
        end = refuse(cluster)
        client = cluster.connect()
        membership = cluster_backend_of(client).membership

        def refused() -> frozenset[str]:
            membership.refresh()  # no watch reports that a bookie turned read-only
            return membership.not_writable

        wait_until(lambda: refused() == {"bookie-2"})
        still_open = client.create_ledger(password=PASSWORD)
        still_open.append(RECORDS[0])
        ledger_id = _make_all(client)
        assert {bookie.bookie_id for bookie in _members(client, ledger_id)} == {"bookie-0", "bookie-1", "bookie-2"}
        marks = [(mark.bookie.bookie_id, mark.first_entry_id) for mark in membership.metadata.marks_of(ledger_id)]
        copied = service_of(cluster.bookies[2]).replicas.count_entries(ledger_id) == COUNT
        assert marks == [("bookie-2", 0)] or copied, "a bookie that ends still takes copies"
        with pytest.raises(NotEnoughBookiesError, match="bookie-2 read-only"):
            client.create_ledger(password=PASSWORD, ack_quorum=3)
        assert client.health().state == "degraded"
        end()
        cluster.open_bookie(2)
        for record in RECORDS[1:]:
            still_open.append(record)
        wait_until(lambda: len(_fragments(client, still_open.ledger_id)) == 2)
        still_open.close()
        wait_until(lambda: _has_no_marks(client), seconds=180)
        cluster.bookies[0].close()
        _read_all(client, ledger_id)
        cluster.bookies[1].close()
        for closed in (ledger_id, still_open.ledger_id):
            with client.open_ledger(closed, password=PASSWORD) as reader:
                assert [bytes(entry.payload) for entry in reader.read(0, COUNT - 1)] == RECORDS


def test_a_writer_that_is_killed_loses_nothing_though_its_third_bookie_comes_back_empty(tmp_path: Path) -> None:
    with running(tmp_path, 3) as cluster:
        client = cluster.connect()
        cluster.bookies["bookie-2"].kill()
        _wait_for_bookies(client, 2)
        writer = cluster.writer(entries=None)
        writer.wait_for(lambda: last_acked(writer) > 100)
        writer.kill()
        cluster.bookies["bookie-0"].kill()
        cluster.bookies["bookie-2"].start()
        _wait_for_bookies(client, 2)
        check_writer(cluster, writer, complete=False)
