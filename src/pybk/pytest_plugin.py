"""The fixtures ``pybk_store`` and ``pybk_cluster`` for pytest, which finds them by an entry point."""

# pytest imports this module in each run, also in those that use no fixture of it, so it imports nothing heavy.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pybk.deferral import LateModule

__all__ = ["pybk_cluster", "pybk_store"]

if TYPE_CHECKING:
    from pybk import testing
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.testing import TestCluster
else:
    testing = LateModule("pybk.testing")


@pytest.fixture
def pybk_store(tmp_path: Path) -> Iterator[LedgerManager]:
    """Return a manager of a new store below ``tmp_path``, which is closed after the test."""
    with testing.open_store(tmp_path / "pybk-store") as manager:
        yield manager


@pytest.fixture
def pybk_cluster(tmp_path: Path) -> Iterator[TestCluster]:
    """Return a new cluster of three bookies in this process, below ``tmp_path``, which is closed after the test."""
    with testing.TestCluster(tmp_path / "pybk-cluster") as cluster:
        yield cluster
