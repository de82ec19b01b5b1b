"""The machine stops, or the disk fails, at every operation of a subscription's workload: acknowledgements are kept."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import PybkError, StorageRefusedError
from pybk.streams import cursor
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import abandon, open_world
from tests.streams.subscription_workload import Model, opened, work

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
)

STEPS = 60
SEEDS = 4


@pytest.fixture(autouse=True)
def _short_cursors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cursors write whole states and roll often."""
    monkeypatch.setattr(cursor, "CHANGES_BYTES", 300)
    monkeypatch.setattr(cursor, "CURSOR_SEGMENT_BYTES", 1500)
    monkeypatch.setattr(cursor, "BOUND_SECONDS", 0.01)


def run(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on a log of the disk until it stops or the steps are done."""
    manager: LedgerManager | None = None
    try:
        manager = open_world(fs)
        log = opened(manager)
        for _ in islice(work(log, log.writer(), Random(seed), model.take), STEPS):
            pass
        log.close()
        manager.close()
        manager = None
    finally:
        if manager is not None:
            abandon(manager)


def check(fs: SimFileSystem, model: Model) -> None:
    """Compare what a disk has with the model, and work on."""
    manager = open_world(fs)
    with opened(manager) as log:
        writer = log.writer()
        model.check(manager, log)
        for _ in islice(work(log, writer, Random(1), model.take), 5):
            pass
    with opened(manager) as log:
        model.check(manager, log)
    manager.close()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_acknowledgement_is_lost_when_the_machine_stops_at_any_operation(seed: int) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), seed)
    assert len(whole.operations) > 150, "the workload hardly touches the disk"
    for operation in range(seed % 3, len(whole.operations), 3):
        fs, model = SimFileSystem(operation), Model()
        fs.crash_at(operation)
        with suppress(SimCrash, PybkError):
            run(fs, model, seed)
        check(fs.crash() if operation // 3 % 2 else fs.kill(), model)


def run_through(fs: SimFileSystem, model: Model, seed: int) -> None:
    """Work on a log of a disk that fails; continue after a lack of space."""
    try:
        manager = open_world(fs)
    except PybkError:
        return
    try:
        for attempt in range(4):
            log = opened(manager)
            try:
                for _ in islice(work(log, log.writer(steal=True), Random(seed + attempt), model.take), STEPS):
                    pass
            except StorageRefusedError:
                with suppress(StorageRefusedError):  # nothing was done, and another open continues
                    log.close()
    except PybkError:
        pass
    finally:
        abandon(manager)


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_no_acknowledgement_is_lost_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), 0)
    for operation in range(0, len(whole.operations), 5):
        fs, model = SimFileSystem(operation), Model()
        fs.fail_at(operation, error, forever=forever)
        run_through(fs, model, 0)
        check(fs.kill(), model)
