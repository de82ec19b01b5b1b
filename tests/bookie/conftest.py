"""What tests of replicas share; ``replica_harness`` is imported by programs, too, which need no pytest."""

from __future__ import annotations

import pytest

from pybk.bookie.replicas import Replicas
from tests.bookie.replica_harness import LEDGER, describe, open_replicas
from tests.simdisk import SimFileSystem


@pytest.fixture
def fs() -> SimFileSystem:
    """An empty disk."""
    return SimFileSystem(1)


@pytest.fixture
def replicas(fs: SimFileSystem) -> Replicas:
    """The replicas of a new bookie that knows one ledger."""
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe())
    return replicas
