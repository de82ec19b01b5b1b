"""The machine stops, or the disk fails, at every operation of a write-ahead log: what was acknowledged is back."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager, WriteAheadLog
from pybk.errors import StorageRefusedError
from tests.sampling import some
from tests.simdisk.faults import ErrorName
from tests.streams.crashing import Crashing
from tests.streams.workload import Model, work

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 60
SEEDS = some(2, 4)


def run(manager: LedgerManager, model: Model, seed: int) -> None:
    """Work on a log until the steps are done."""
    wal = WriteAheadLog.open(manager, "wal", insecure=True, segment_bytes=1 << 30)
    for _ in islice(work(wal, Random(seed), model.take), STEPS):
        pass
    wal.close()


def run_through(manager: LedgerManager, model: Model) -> None:
    """Work on a log; continue with it after a lack of space."""
    wal = WriteAheadLog.open(manager, "wal", insecure=True, segment_bytes=1 << 30)
    for seed in range(4):
        try:
            for _ in islice(work(wal, Random(seed), model.take), STEPS):
                pass
        except StorageRefusedError:  # nothing was done, and the log continues
            model.check(wal)
    wal.close()


def check(manager: LedgerManager, model: Model) -> None:
    """Compare the log with the model, and append."""
    with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
        model.check(wal)
        lsn = wal.append(b"after")
        assert lsn == max([*model.records, wal.first_lsn() - 1]) + 1
        assert wal.read(lsn).data == b"after"


CRASHING = Crashing(Model, run, run_through, check)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_acknowledged_is_lost_when_the_machine_stops_at_any_operation(seed: int) -> None:
    CRASHING.stop_at_operations(seed, seed % 2, 3, at_least=150)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_nothing_acknowledged_is_lost_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    CRASHING.fail_at_operations(error, 3, forever=forever)
