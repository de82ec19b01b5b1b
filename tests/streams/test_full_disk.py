"""Logs, subscriptions and blobs on a full disk, of which another program takes what is freed: all that frees works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pybk import BlobStore, Log, LogEnd, Namespace, Retention, StorageFullError, WriteAheadLog
from pybk.config import MIB
from tests.internals import store_of
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import CONFIG, abandon
from tests.storage.test_space import open_small, tick
from tests.waiting import wait_until

PASSWORD = b"full"
WATCHED = replace(CONFIG, free_bytes_low=4 * MIB, free_bytes_ok=6 * MIB)
RECORD = bytes(20_000)

_DEAD: list[object] = []
"""Handles of processes that were killed, which must not be closed when they are collected."""


class Disk:
    """A store with a write-ahead log, a log with subscriptions, and blobs, on a disk that becomes full."""

    def __init__(self) -> None:
        self.fs = SimFileSystem(1, capacity_bytes=64 * MIB)
        self.manager = open_small(self.fs, WATCHED)
        self.wal = self.open_wal()
        self.wal.append_many([RECORD] * 100)
        self.wal.roll()
        self.wal.append(b"last")
        self.log = Log.open(self.manager, "log", password=PASSWORD)
        self.writer = self.log.writer()
        self.writer.append_many([RECORD] * 100)
        self.writer.roll()
        self.writer.append(b"last")
        self.subscription = self.log.subscribe("all", start=LogEnd.EARLIEST)
        self.subscription.ack(0)
        self.blobs = BlobStore.open(self.manager, password=PASSWORD)
        self.blobs.put("blob", RECORD)
        tick(self.manager)

    def open_wal(self) -> WriteAheadLog:
        return WriteAheadLog.open(self.manager, "wal", password=PASSWORD)

    def fill(self) -> None:
        self.fs.fill()
        tick(self.manager)
        with pytest.raises(StorageFullError):
            self.wal.append(b"more")

    def restart(self, *, killed: bool) -> None:
        """Open the store again, and everything in it."""
        if killed:
            _DEAD.append((self.subscription, self.writer, self.log, self.wal, self.blobs, self.manager))
            self.fs = self.fs.kill()
            abandon(self.manager)
        else:
            self.subscription.close()
            self.writer.close()
            self.log.close()
            self.wal.close()
            self.blobs.close()
            self.manager.close()
        self.manager = open_small(self.fs, WATCHED)
        tick(self.manager)
        self.wal = self.open_wal()
        self.log = Log.open(self.manager, "log", password=PASSWORD)
        self.writer = self.log.writer()
        self.subscription = self.log.subscribe("all")
        self.blobs = BlobStore.open(self.manager, password=PASSWORD)

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """What is done meanwhile is to give log files back to the disk, although another program takes them at once."""
        tick(self.manager)
        before = self.fs.used_bytes()
        yield
        tick(self.manager)
        tick(self.manager)
        assert self.fs.used_bytes() < before - MIB


def truncate_wal(disk: Disk) -> None:
    with disk.freeing():
        disk.wal.truncate_before(101)
    assert disk.wal.first_lsn() == 101


def cut_wal(disk: Disk) -> None:
    disk.wal.truncate_after(1)
    assert disk.wal.last_lsn() == 1


def acknowledge_and_truncate(disk: Disk) -> None:
    disk.subscription.ack(range(1, 100))
    assert disk.subscription.first_unacked() == 100
    disk.subscription.close()
    with disk.freeing():
        disk.log.truncate(100)
    assert disk.log.first_seq() == 100


def unsubscribe_and_truncate(disk: Disk) -> None:
    disk.subscription.delete()
    assert disk.log.subscriptions() == []
    with disk.freeing():
        disk.log.truncate(100)


def apply_retention(disk: Disk) -> None:
    disk.subscription.delete()
    ledgers = len(list(disk.manager.list_ledgers()))
    with disk.freeing():
        disk.log.set_retention(Retention(max_bytes=1))
        wait_until(lambda: disk.log.first_seq() >= 100 and len(list(disk.manager.list_ledgers())) < ledgers)


def delete_log(disk: Disk) -> None:
    disk.subscription.close()
    disk.writer.close()
    disk.log.close()
    with disk.freeing(), Namespace.open(disk.manager, password=PASSWORD) as names:
        names.delete("log")
        assert names.names() == []


def subscribe(disk: Disk) -> None:
    subscription = disk.log.subscribe("new", start=LogEnd.EARLIEST)
    subscription.ack(0)
    assert subscription.first_unacked() == 1
    subscription.close()
    assert disk.log.delete_subscription("new")


def seal(disk: Disk) -> None:
    disk.wal.seal()
    disk.writer.close()
    disk.log.seal()
    assert disk.log.is_sealed()


def delete_blob(disk: Disk) -> None:
    disk.blobs.rename("blob", "other")
    disk.blobs.delete("other")
    assert disk.blobs.list() == []


OPERATIONS = [
    truncate_wal,
    cut_wal,
    acknowledge_and_truncate,
    unsubscribe_and_truncate,
    apply_retention,
    delete_log,
    subscribe,
    seal,
    delete_blob,
]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("restart", ["live", "closed", "killed"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_frees_space_or_ends_works_on_a_full_disk(operation: Callable[[Disk], None], restart: str) -> None:
    disk = Disk()
    disk.fill()
    if restart != "live":
        disk.restart(killed=restart == "killed")
    operation(disk)
    for each in (disk.subscription, disk.writer, disk.log, disk.wal, disk.blobs):
        each.close()
    disk.manager.close()
    disk.fs.give_back(32 * MIB)
    with open_small(disk.fs, WATCHED) as manager:
        tick(manager)
        assert store_of(manager).supply.reserve.is_whole
        if operation is not seal:
            with WriteAheadLog.open(manager, "wal", password=PASSWORD) as wal:
                wal.append(b"more")


def test_a_subscription_closes_although_its_acknowledgements_find_no_space() -> None:
    disk = Disk()
    disk.fill()
    with pytest.raises(StorageFullError):  # noqa: PT012  # once they have used what is reserved for them
        for number in range(1, 100):
            for _ in range(20):
                disk.subscription.ack(number, properties={"offset": "x" * 4000 + str(number)})
    disk.subscription.close()
    assert disk.subscription.closed
    disk.log.delete_subscription("all")
    truncate_wal(disk)
    disk.manager.close()


def test_a_log_is_taken_over_again_and_again_on_a_full_disk() -> None:
    """Each take-over leaves a reserved file to the entry that it appends; deletes have one that they leave alone."""
    disk = Disk()
    disk.fill()
    for _ in range(2):
        disk.restart(killed=True)
    truncate_wal(disk)
    disk.manager.close()


def test_a_full_store_that_is_read_takes_no_record() -> None:
    disk = Disk()
    disk.fill()
    disk.restart(killed=False)
    with pytest.raises(StorageFullError):
        disk.wal.append(b"more")
    with pytest.raises(StorageFullError):
        disk.writer.append(b"more")
    with pytest.raises(StorageFullError):
        disk.wal.roll()
    assert [record.lsn for record in disk.wal.replay()] == [*range(1, 102)]
    disk.manager.close()
