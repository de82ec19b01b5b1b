"""A blob store does what a dictionary of versions does, whatever the order of changes, also when it is opened again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from pybk import LedgerManager
from tests.cluster.inside import inside
from tests.sampling import some
from tests.streams.blob_workload import Model, opened, work


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("seed", range(some(5, 10)))
def test_a_store_does_what_its_model_does(seed: int, tmp_path: Path) -> None:
    model, random = Model(), Random(seed)
    for _ in range(5):
        with LedgerManager.open(tmp_path) as manager, opened(manager) as blobs:
            model.check(blobs, manager)
            for _ in islice(work(blobs, random, model), 40):
                pass
            model.check(blobs, manager)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(2))
def test_a_cluster_does_what_its_model_does(seed: int, tmp_path: Path) -> None:
    model, random = Model(), Random(seed)
    with inside(tmp_path) as cluster:
        for _ in range(2):
            with cluster.connect() as manager, opened(manager) as blobs:
                for _ in islice(work(blobs, random, model), 50):
                    pass
                model.check(blobs, manager)
