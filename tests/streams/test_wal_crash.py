"""The machine stops at every disk operation of a write-ahead log's workload: what was acknowledged is back."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager, WriteAheadLog
from pybk.errors import PybkError
from tests.simdisk import SimCrash, SimFileSystem
from tests.storage.store_harness import abandon, open_world
from tests.streams.workload import Model, work

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 60
SEEDS = 4


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
            abandon(manager)


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
