"""On a real file system with 0 bytes free, of which another process takes what becomes free, with default settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd, Namespace, Retention, StorageFullError, WriteAheadLog
from pybk.config import MIB
from tests.full_device import filled, small_device
from tests.internals import store_of
from tests.paths import ROOT
from tests.waiting import wait_until

DEVICE_BYTES = 384 * MIB
"""More than a store needs to accept entries at all."""

RECORD = bytes(200_000)


@pytest.fixture(name="device")
def new_device(tmp_path: Path) -> Iterator[Path]:
    with small_device(tmp_path / "device", DEVICE_BYTES) as path:
        yield path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def free_bytes(device: Path) -> int:
    found = os.statvfs(device)
    return found.f_bavail * found.f_frsize


def make_store(path: Path) -> None:
    """Make a store with a write-ahead log and a log of some segments, and a subscription."""
    with (
        LedgerManager.open(path) as manager,
        WriteAheadLog.open(manager, "wal", insecure=True, segment_bytes=4 * MIB) as wal,
        Log.open(manager, "log", insecure=True) as log,
    ):
        wal.append_many([RECORD] * 60)
        with log.writer() as writer, log.subscribe("all", start=LogEnd.EARLIEST) as subscription:
            for _ in range(3):
                writer.append_many([RECORD] * 20)
                writer.roll()
            subscription.ack(range(30))


def work_and_be_killed(path: Path) -> None:
    command = [sys.executable, "-m", "tests.streams.full_disk_child", str(path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        child.kill()
    assert line == "ready\n"


def work_and_close(path: Path) -> None:
    with (
        LedgerManager.open(path) as manager,
        WriteAheadLog.open(manager, "wal", insecure=True),
        Log.open(manager, "log", insecure=True) as log,
        log.writer(),
        log.subscribe("all") as subscription,
    ):
        subscription.ack(subscription.first_unacked())


def command_truncates(path: Path, lsn: int) -> None:
    command = [sys.executable, "-m", "pybk.admin", "wal", "truncate", str(path), "wal", str(lsn), "--yes"]
    done = subprocess.run(command, env={**environment(), "PYBK_PASSWORD": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.parametrize("stop", [work_and_close, work_and_be_killed])
def test_a_full_disk_is_emptied(device: Path, stop: object) -> None:
    path = device / "store"
    make_store(path)
    assert callable(stop)
    with filled(device):
        assert free_bytes(device) == 0
        stop(path)
        command_truncates(path, 20)
        stop(path)
        with LedgerManager.open(path) as manager:
            with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
                assert [record.lsn for record in wal.replay()] == [*range(20, 61)]
                with pytest.raises(StorageFullError):
                    wal.append(b"more")
                wal.truncate_before(61)
            with Log.open(manager, "log", insecure=True) as log, log.writer():
                log.truncate(10)
                subscription = log.subscribe("all")
                assert subscription.first_unacked() >= 30
                subscription.delete()
                log.set_retention(Retention(max_bytes=1))
                wait_until(lambda: log.first_seq() >= 60)
            manager.checkpoint()
            with Namespace.open(manager, insecure=True) as names:
                names.delete("log")
            for ledger_id in list(manager.list_ledgers()):
                manager.delete_ledger(ledger_id)
            manager.checkpoint()
    with LedgerManager.open(path) as manager:
        wait_until(lambda: store_of(manager).supply.reserve.is_whole)
        wait_until(lambda: manager.health().state == "ok")
        with manager.create_ledger(insecure=True) as writer:
            writer.append(RECORD)


@pytest.mark.sampled(one_in=6, group="full disks")
def test_processes_that_are_killed_while_they_take_logs_over_do_not_use_up_the_reserve(device: Path) -> None:
    path = device / "store"
    make_store(path)
    with LedgerManager.open(path) as manager:
        for number in range(20):
            WriteAheadLog.open(manager, f"wal-{number}", insecure=True).close()
    with filled(device):
        command = [sys.executable, "-m", "tests.streams.full_disk_kills", str(path), "60", "1"]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        command_truncates(path, 61)
    with LedgerManager.open(path) as manager:
        wait_until(lambda: store_of(manager).supply.reserve.is_whole)
        with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
            wal.append(RECORD)
