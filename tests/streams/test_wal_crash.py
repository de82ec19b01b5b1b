"""The machine stops at every disk operation of a write-ahead log's workload: what was acknowledged is back."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager, WriteAheadLog
from pybk.errors import PybkError, StorageRefusedError
from tests.internals import store_of
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import abandon, open_world
from tests.streams.workload import Model, work

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 60
SEEDS = 4


def die(manager: LedgerManager) -> None:
    """Let go of a store as a process that dies, which closes no log."""
    abandon(manager)
    store_of(manager).ended = True


def run(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on a log of the disk until it stops or the steps are done."""
    manager: LedgerManager | None = None
    try:
        manager = open_world(fs)
        wal = WriteAheadLog.open(manager, "wal", insecure=True, segment_bytes=1 << 30)
        for _ in islice(work(wal, Random(seed), model.take), STEPS):
            pass
        wal.close()
        manager.close()
        manager = None
    finally:
        if manager is not None:
            die(manager)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost_when_the_machine_stops_at_any_operation(seed: int) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), seed)
    assert len(whole.operations) > 150, "the workload hardly touches the disk"
    for operation in range(seed % 2, len(whole.operations), 2):
        fs, model = SimFileSystem(operation), Model()
        fs.crash_at(operation)
        with suppress(SimCrash, PybkError):
            run(fs, model, seed)
        after = fs.crash() if operation // 2 % 2 else fs.kill()
        manager = open_world(after)
        wal = WriteAheadLog.open(manager, "wal", insecure=True)
        model.check(wal)
        lsn = wal.append(b"after")
        assert lsn == max([*model.records, wal.first_lsn - 1]) + 1
        assert wal.read(lsn).data == b"after"
        wal.close()
        manager.close()


def run_through(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on a log of a disk that fails; continue after a lack of space."""
    try:
        manager = open_world(fs)
    except PybkError:
        return
    try:
        wal = WriteAheadLog.open(manager, "wal", insecure=True, segment_bytes=1 << 30)
        for attempt in range(4):
            try:
                for _ in islice(work(wal, Random(seed + attempt), model.take), STEPS):
                    pass
            except StorageRefusedError:  # nothing was done, and the log continues
                model.check(wal)
        wal.close()
    except PybkError:
        pass
    finally:
        die(manager)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_nothing_acknowledged_is_lost_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), 0)
    for operation in range(0, len(whole.operations), 3):
        fs, model = SimFileSystem(operation), Model()
        fs.fail_at(operation, error, forever=forever)
        run_through(fs, model, 0)
        manager = open_world(fs.kill())
        wal = WriteAheadLog.open(manager, "wal", insecure=True)
        model.check(wal)
        assert wal.append(b"after") == max([*model.records, wal.first_lsn - 1]) + 1
        wal.close()
        manager.close()
