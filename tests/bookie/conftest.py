"""What tests of replicas share; ``replica_harness`` is imported by programs, too, which need no pytest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pybk.bookie.replicas import Replicas
from tests.bookie.replica_harness import LEDGER, describe, drop, open_replicas
from tests.simdisk import SimFileSystem


@pytest.fixture(autouse=True)
def _threads_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let go of all replicas of simulated disks: the threads of hundreds of stores would slow the tests after them."""
    opened: list[Replicas] = []
    open_now = Replicas.open

    def noted(*arguments: Any, **options: Any) -> Replicas:
        found = open_now(*arguments, **options)
        if isinstance(options.get("fs"), SimFileSystem):
            opened.append(found)
        return found

    monkeypatch.setattr(Replicas, "open", noted)
    yield
    for each in opened:
        drop(each)


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
