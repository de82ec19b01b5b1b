"""The machine stops, or the disk fails, at every operation of a named log's workload: what was acknowledged is back."""

from __future__ import annotations

from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import StorageRefusedError
from tests.sampling import some
from tests.simdisk.faults import ErrorName
from tests.streams.crashing import Crashing
from tests.streams.log_workload import Model, opened, work

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 80
SEEDS = 3


def run(manager: LedgerManager, model: Model, seed: int) -> None:
    """Work on a log until the steps are done."""
    log = opened(manager)
    writer = log.writer(ordered_txids=False)
    for _ in islice(work(log, writer, Random(seed), model.take), STEPS):
        pass
    log.close()


def run_through(manager: LedgerManager, model: Model) -> None:
    """Work on a log; continue with the same writer after a lack of space."""
    log = opened(manager)
    writer = log.writer(ordered_txids=False)
    for seed in range(4):
        try:
            for _ in islice(work(log, writer, Random(seed), model.take), STEPS):
                pass
        except StorageRefusedError:  # nothing was done, and the log continues
            model.check(log)
    log.close()


def check(manager: LedgerManager, model: Model) -> None:
    """Compare the log with the model, and append."""
    with opened(manager) as log:
        writer = log.writer(ordered_txids=False)
        model.check(log)
        position = writer.append(b"after", txid=1 << 40)
        assert position.seq == max([*model.records, model.first - 1]) + 1
        assert log.position_for(position) == log.position_for(position._replace(segment=0)) == position


CRASHING = Crashing(Model, run, run_through, check)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(some(2, SEEDS)))
def test_nothing_acknowledged_is_lost_when_the_machine_stops_at_any_operation(seed: int) -> None:
    CRASHING.stop_at_operations(seed, seed, SEEDS, at_least=150)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_nothing_acknowledged_is_lost_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    CRASHING.fail_at_operations(error, 2, forever=forever)
