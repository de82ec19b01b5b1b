"""The machine stops at every disk operation of a blob store's workload: each name stands for its old or new blob."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import PybkError, StorageRefusedError
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import abandon, open_world
from tests.streams.blob_workload import Model, opened, work

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 20
SEEDS = 4


def run(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on the blobs of the disk until it stops or the steps are done."""
    manager: LedgerManager | None = None
    try:
        manager = open_world(fs)
        with opened(manager) as blobs:
            for _ in islice(work(blobs, Random(seed), model), STEPS):
                pass
        manager.close()
        manager = None
    finally:
        if manager is not None:
            abandon(manager)


def check(fs: SimFileSystem, model: Model) -> None:
    """Open the disk as it is now, check it, and use it."""
    with open_world(fs) as manager, opened(manager) as blobs:
        model.check(blobs, manager)
        blobs.put("after", b"it works")
        assert blobs.get("after") == b"it works"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_name_has_its_old_or_new_blob_when_the_machine_stops_at_any_operation(seed: int) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), seed)
    assert len(whole.operations) > 100, "the workload hardly touches the disk"
    for operation in range(seed % 2, len(whole.operations), 2):
        fs, model = SimFileSystem(operation), Model()
        fs.crash_at(operation)
        with suppress(SimCrash, PybkError):
            run(fs, model, seed)
        check(fs.crash() if operation // 2 % 2 else fs.kill(), model)


def run_through(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on the blobs of a disk that fails; continue after a lack of space."""
    try:
        manager = open_world(fs)
    except PybkError:
        return
    try:
        with opened(manager) as blobs:
            for attempt in range(3):
                with suppress(StorageRefusedError):
                    for _ in islice(work(blobs, Random(seed + attempt), model), STEPS):
                        pass
    except PybkError:
        pass
    finally:
        abandon(manager)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_each_name_has_its_old_or_new_blob_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), 0)
    for operation in range(0, len(whole.operations), 3):
        fs, model = SimFileSystem(operation), Model()
        fs.fail_at(operation, error, forever=forever)
        run_through(fs, model, 0)
        check(fs.kill(), model)
