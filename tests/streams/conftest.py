"""What tests of logs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk import LedgerManager
from tests.cluster.inside import inside
from tests.sampling import mostly


@pytest.fixture(params=mostly("store", "cluster", among="manager"))
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LedgerManager]:
    """Return the manager of a store, and that of a cluster."""
    if request.param == "store":
        with LedgerManager.open(tmp_path / "store") as manager:
            yield manager
    else:
        with inside(tmp_path) as cluster, cluster.connect() as manager:
            yield manager
