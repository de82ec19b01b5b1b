"""Logs are taken over on a full disk by processes that are killed on the way: none of them uses up the reserve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random

import pytest

from pybk import LedgerManager, Log, LogEnd, WriteAheadLog
from pybk.config import MIB
from pybk.errors import PybkError, StorageFullError
from tests.internals import store_of
from tests.sampling import ALL
from tests.simdisk import SimCrash, SimFileSystem
from tests.storage.store_harness import abandon
from tests.storage.test_space import open_small, tick
from tests.streams.test_full_disk import PASSWORD, RECORD, WATCHED

_DEAD: list[object] = []
"""Handles of processes that were killed, which must not be closed when they are collected."""

TakeOver = Callable[[LedgerManager], Iterator[object]]


def wals(names: Iterable[str]) -> TakeOver:
    """Return what takes write-ahead logs over, one after the other."""

    def take(manager: LedgerManager) -> Iterator[WriteAheadLog]:
        for name in names:
            yield WriteAheadLog.open(manager, name, password=PASSWORD)

    return take


def log_and_subscription(manager: LedgerManager) -> Iterator[object]:
    log = Log.open(manager, "log", password=PASSWORD)
    yield log
    yield log.writer()
    yield log.subscribe("all", start=LogEnd.EARLIEST)


def full_disk(take: TakeOver) -> SimFileSystem:
    """Return a full disk of a store with logs; each write-ahead log has some records, in a file of their own."""
    fs = SimFileSystem(1, capacity_bytes=64 * MIB)
    with open_small(fs, WATCHED) as manager:
        for each in take(manager):
            if isinstance(each, WriteAheadLog):
                each.append_many([RECORD] * 3)
            manager.checkpoint()
        tick(manager)
        fs.fill()
    return fs


def taken_over(fs: SimFileSystem, take: TakeOver) -> LedgerManager:
    """Take logs over in a new process, which does not end by itself."""
    manager = open_small(fs, WATCHED)
    try:
        tick(manager)
        _DEAD.extend(take(manager))
    finally:
        abandon(manager)
        _DEAD.append(manager)
    return manager


def killed(fs: SimFileSystem) -> SimFileSystem:
    """Kill the process; returns the disk."""
    after = fs.kill()
    fs.directories.clear()  # what the dead process has of it would take memory
    return after


def killed_at(fs: SimFileSystem, operation: int, take: TakeOver) -> SimFileSystem:
    """Kill a process at an operation on the disk while it takes logs over; returns the disk."""
    fs.crash_at(operation)
    try:
        taken_over(fs, take)
    except StorageFullError:
        raise
    except (SimCrash, PybkError):
        assert fs.dead
    return killed(fs)


def assert_emptied(fs: SimFileSystem, name: str) -> None:
    """Show that a write-ahead log is truncated in a new process, and that this frees space."""
    with open_small(fs, WATCHED) as manager:
        tick(manager)
        before = fs.used_bytes()
        with WriteAheadLog.open(manager, name, password=PASSWORD) as wal:
            assert wal.last_lsn() == 3
            wal.truncate_before(4)
        manager.checkpoint()
        tick(manager)
        assert fs.used_bytes() < before
        assert store_of(manager).supply.reserve.is_whole


def ledgers_after_take_over(fs: SimFileSystem) -> int:
    """Take everything over in a new process, and return the number of ledgers that there are then."""
    return len(list(taken_over(fs, everything).list_ledgers()))


def everything(manager: LedgerManager) -> Iterator[object]:
    yield from wals(["wal"])(manager)
    yield from log_and_subscription(manager)


@pytest.fixture(name="filled", scope="module")
def new_filled() -> SimFileSystem:
    return full_disk(everything)


def operations_of_take_over(filled: SimFileSystem) -> int:
    fs = filled.kill()
    taken_over(fs, everything)
    return len(fs.operations)


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.parametrize("kills", [30 if ALL else 9])
def test_take_overs_that_are_killed_at_one_operation_again_and_again_leave_the_reserve(
    kills: int, filled: SimFileSystem
) -> None:
    for operation in range(operations_of_take_over(filled)):
        fs = filled.kill()
        for _ in range(kills):
            fs = killed_at(fs, operation, everything)
        taken_over(fs, everything)
        assert_emptied(killed(fs), "wal")


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.parametrize("seed", [1, 2, 3] if ALL else [1])
def test_take_overs_that_are_killed_at_any_operation_leave_the_reserve(seed: int, filled: SimFileSystem) -> None:
    choice, operations, fs = Random(seed), operations_of_take_over(filled), filled.kill()
    for _ in range(600 if ALL else 150):
        fs = killed_at(fs, choice.randrange(operations), everything)
    assert ledgers_after_take_over(fs) <= ledgers_after_take_over(filled.kill()) + 1  # a cursor may keep two
    assert_emptied(killed(fs), "wal")


@pytest.mark.sampled(one_in=6, group="full disks")
def test_each_of_many_logs_is_taken_over_on_a_full_disk() -> None:
    names = [f"wal-{number}" for number in range(20)]
    fs = full_disk(wals(names))
    for name in names:
        taken_over(fs, wals([name]))
        fs = killed(fs)
    for name in names:
        assert_emptied(fs, name)
