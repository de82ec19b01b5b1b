"""The machine stops, or the disk fails, at every operation of a named log's workload: what was acknowledged is back."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import PybkError, StorageRefusedError
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import open_world
from tests.streams.log_workload import Model, opened, work
from tests.streams.test_wal_crash import die

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 80
SEEDS = 3


def run(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on a log of the disk until it stops or the steps are done."""
    manager: LedgerManager | None = None
    try:
        manager = open_world(fs)
        log = opened(manager)
        writer = log.writer(ordered_txids=False)
        for _ in islice(work(log, writer, Random(seed), model.take), STEPS):
            pass
        log.close()
        manager.close()
        manager = None
    finally:
        if manager is not None:
            die(manager)


def check(fs: SimFileSystem, model: Model) -> None:
    """Compare what a disk has with the model, and append."""
    manager = open_world(fs)
    with opened(manager) as log:
        writer = log.writer(ordered_txids=False)
        model.check(log)
        position = writer.append(b"after", txid=1 << 40)
        assert position.seq == max([*model.records, model.first - 1]) + 1
        assert log.position_for(position) == log.position_for(position._replace(segment=0)) == position
    manager.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost_when_the_machine_stops_at_any_operation(seed: int) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), seed)
    assert len(whole.operations) > 150, "the workload hardly touches the disk"
    for operation in range(seed, len(whole.operations), SEEDS):
        fs, model = SimFileSystem(operation), Model()
        fs.crash_at(operation)
        with suppress(SimCrash, PybkError):
            run(fs, model, seed)
        check(fs.crash() if operation // SEEDS % 2 else fs.kill(), model)


def run_through(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on a log of a disk that fails; continue with the same writer after a lack of space."""
    try:
        manager = open_world(fs)
    except PybkError:
        return
    try:
        log = opened(manager)
        writer = log.writer(ordered_txids=False)
        for attempt in range(4):
            try:
                for _ in islice(work(log, writer, Random(seed + attempt), model.take), STEPS):
                    pass
            except StorageRefusedError:  # nothing was done, and the log continues
                model.check(log)
        log.close()
    except PybkError:
        pass
    finally:
        die(manager)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_nothing_acknowledged_is_lost_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), 0)
    for operation in range(0, len(whole.operations), 2):
        fs, model = SimFileSystem(operation), Model()
        fs.fail_at(operation, error, forever=forever)
        run_through(fs, model, 0)
        check(fs.kill(), model)
