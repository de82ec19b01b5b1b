"""The machine stops, or the disk fails, at every operation on blobs: each name stands for its old or new blob."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from random import Random

import pytest

from pybk import LedgerManager
from pybk.errors import StorageRefusedError
from tests.simdisk.faults import ErrorName
from tests.streams.blob_workload import Model, opened, work
from tests.streams.crashing import Crashing

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

STEPS = 20
SEEDS = 4


def run(manager: LedgerManager, model: Model, seed: int) -> None:
    """Work on the blobs until the steps are done."""
    with opened(manager) as blobs:
        for _ in islice(work(blobs, Random(seed), model), STEPS):
            pass


def run_through(manager: LedgerManager, model: Model) -> None:
    """Work on the blobs; continue after a lack of space."""
    with opened(manager) as blobs:
        for seed in range(3):
            with suppress(StorageRefusedError):
                for _ in islice(work(blobs, Random(seed), model), STEPS):
                    pass


def check(manager: LedgerManager, model: Model) -> None:
    """Compare the blobs with the model, and use them."""
    with opened(manager) as blobs:
        model.check(blobs, manager)
        blobs.put("after", b"it works")
        assert blobs.get("after") == b"it works"


CRASHING = Crashing(Model, run, run_through, check)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_name_has_its_old_or_new_blob_when_the_machine_stops_at_any_operation(seed: int) -> None:
    CRASHING.stop_at_operations(seed, seed % 2, 2, at_least=100)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("forever", [False, True])
def test_each_name_has_its_old_or_new_blob_when_any_operation_fails(error: ErrorName, forever: bool) -> None:
    CRASHING.fail_at_operations(error, 3, forever=forever)
