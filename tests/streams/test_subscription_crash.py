"""The machine stops, or the disk fails, at every operation of a subscription's workload: acknowledgements are kept."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import StorageRefusedError
from pybk.streams import cursor
from tests.sampling import some
from tests.simdisk.faults import ErrorName
from tests.streams.crashing import Crashing
from tests.streams.subscription_workload import Model, opened, work

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
)

STEPS = 60
SEEDS = some(2, 4)


@pytest.fixture(autouse=True)
def _short_cursors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cursors write whole states, in several parts, and roll often."""
    monkeypatch.setattr(cursor, "PART_LEAST", 2)
    monkeypatch.setattr(cursor, "RANGES_AT_OPEN", 2)
    monkeypatch.setattr(cursor, "CHANGES_BYTES", 300)
    monkeypatch.setattr(cursor, "CURSOR_SEGMENT_BYTES", 1500)
    monkeypatch.setattr(cursor, "BOUND_SECONDS", 0.01)


def run(manager: LedgerManager, model: Model, seed: int) -> None:
    """Work on a log until the steps are done."""
    log = opened(manager)
    writer = log.writer()
    for _ in islice(work(log, writer, Random(seed), model.take), STEPS):
        pass
    log.close()


def run_through(manager: LedgerManager, model: Model) -> None:
    """Work on a log; open it again after a lack of space."""
    for seed in range(4):
        log = opened(manager)
        try:
            writer = log.writer(steal=True)
            for _ in islice(work(log, writer, Random(seed), model.take), STEPS):
                pass
        except StorageRefusedError:
            with suppress(StorageRefusedError):  # nothing was done, and another open continues
                log.close()


def check(manager: LedgerManager, model: Model) -> None:
    """Compare the log with the model, work on, and compare again."""
    with opened(manager) as log:
        writer = log.writer()
        model.check(manager, log)
        for _ in islice(work(log, writer, Random(1), model.take), 5):
            pass
    with opened(manager) as log:
        model.check(manager, log)


CRASHING = Crashing(Model, run, run_through, check)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_acknowledgement_is_lost_when_the_machine_stops_at_any_operation(seed: int) -> None:
    CRASHING.stop_at_operations(seed, seed % 3, 3, at_least=150)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_no_acknowledgement_is_lost_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    CRASHING.fail_at_operations(error, 5, forever=forever)
