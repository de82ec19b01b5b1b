"""Logs and subscriptions whose records are refused for want of space, after they were staged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pybk import BlobStore, LedgerManager, Log, LogEnd, NewRecord, StorageFullError, WriteAheadLog
from pybk.config import MIB
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import CONFIG, RESERVE_BYTES, drop_reserve
from tests.storage.test_refused import fill_the_log
from tests.storage.test_space import new_ledger, open_small, tick

PASSWORD = b"refused"
LARGE = bytes(100_000)
"""A record for which the log needs another file."""


class Disk:
    """A store on a disk that can be full."""

    def __init__(self) -> None:
        self.fs = SimFileSystem(1, capacity_bytes=8 * MIB + RESERVE_BYTES)
        self.manager: LedgerManager = open_small(self.fs, CONFIG)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Have no space for another file of the log meanwhile, not even what is reserved for acknowledgements."""
        filler = new_ledger(self.manager)
        drop_reserve(self.fs)
        ballast = self.fs.create("/ballast", self.fs.free_bytes("/store") - MIB - 4096)
        fill_the_log(self.manager, filler)
        yield
        ballast.close()
        self.fs.unlink("/ballast")
        tick(self.manager)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.manager.close()


def test_a_refused_record_is_not_durable_so_a_checkpoint_does_not_cover_it(disk: Disk) -> None:
    with WriteAheadLog.open(disk.manager, "wal", password=PASSWORD) as wal:
        wal.append_many([b"one", b"two"])
        with disk.full():
            with pytest.raises(StorageFullError):
                wal.append(LARGE)
            assert wal.durable_lsn() == 2
        assert wal.durable_lsn() == 2
        assert (wal.last_lsn(), wal.stats().outstanding_records, len(wal)) == (3, 1, 2)
        with wal.checkpoint() as file:
            file.write(b"one and two")
        assert wal.append(b"three") == 3
        assert wal.durable_lsn() == 3
        checkpoint = wal.latest_checkpoint()
        assert checkpoint is not None
        assert [record.data for record in wal.replay(checkpoint.lsn + 1)] == [b"three"]


def test_transaction_ids_of_refused_records_are_not_those_of_the_log(disk: Disk) -> None:
    refused = [NewRecord(LARGE, txid=20), NewRecord(b"last", txid=30)]
    with Log.open(disk.manager, "log", password=PASSWORD) as log, log.writer() as writer:
        writer.append(b"first", txid=10)
        with disk.full():
            for _ in range(2):
                with pytest.raises(StorageFullError):
                    writer.append_many(refused)
        assert [position.seq for position in writer.append_many(refused)] == [1, 2]
        assert writer.last_txid == 30


def test_a_refused_acknowledgement_is_none_and_neither_are_its_properties(disk: Disk) -> None:
    with Log.open(disk.manager, "log", password=PASSWORD) as log, log.writer() as writer:
        writer.append_many([b"one", b"two"])
        with log.subscribe("all", start=LogEnd.EARLIEST) as subscription:
            subscription.ack(0, properties={"offset": "a"})
            with disk.full(), pytest.raises(StorageFullError):
                subscription.ack(1, properties={"offset": "b" * 60_000})
        with log.subscribe("all") as subscription:
            assert (subscription.first_unacked(), subscription.properties) == (1, {"offset": "a"})


@pytest.mark.parametrize("reopens", [True, False])
def test_an_acknowledgement_whose_group_was_refused_is_refused_for_good(disk: Disk, *, reopens: bool) -> None:
    manager = disk.manager
    with (
        Log.open(manager, "in", password=PASSWORD) as source,
        Log.open(manager, "out", password=PASSWORD) as target,
        source.writer() as writer,
        target.writer() as out,
    ):
        writer.append_many([b"one", b"two", b"three"])
        subscription = source.subscribe("all", start=LogEnd.EARLIEST)
        group = manager.transaction()
        group.append(out, LARGE)
        group.ack(subscription, 0)
        with disk.full(), pytest.raises(StorageFullError):
            group.commit()
        if reopens:
            subscription.close()
            subscription = source.subscribe("all")
        subscription.ack(1)
        assert subscription.unacked_ranges() == [range(1), range(2, 3)]
        assert not list(target.reader())
        with manager.transaction() as group:
            group.append(out, b"done")
            group.ack(subscription, 0)
        assert group.results(subscription) == [1]
        subscription.close()
        with source.subscribe("all") as subscription:
            assert subscription.unacked_ranges() == [range(2, 3)]


def test_a_blob_whose_group_was_refused_leaves_no_ledger(disk: Disk) -> None:
    manager = disk.manager
    with WriteAheadLog.open(manager, "wal", password=PASSWORD) as wal, BlobStore.open(manager, insecure=True) as blobs:
        group = manager.transaction()
        group.publish(blobs.create_blob("blob"))
        group.append(wal, LARGE)
        with disk.full(), pytest.raises(StorageFullError):
            group.commit()
        assert not blobs.exists("blob")
        blobs.sweep()
        assert not list(manager.ledgers(ledger_type="blob"))
