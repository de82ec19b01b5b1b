"""A store to which nothing is appended: what its maintenance thread does, and what ends its rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.scheduler import Scheduler
from tests.internals import store_of
from tests.storage.real_store import open_quick


class Naps:
    """Takes the place of the lock that the maintenance thread sleeps on: notes how long it would, and ends it.

    Attributes:
        seconds: How long each nap was to be.
    """

    def __init__(self, scheduler: Scheduler, count: int) -> None:
        self.seconds: list[float] = []
        self._maintenance = scheduler
        self._count = count

    def acquire(self, *, timeout: float) -> bool:
        self.seconds.append(timeout)
        self._maintenance.stopping = len(self.seconds) == self._count
        return False

    def locked(self) -> bool:
        return False


def naps(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch, count: int) -> list[float]:
    """Return how long the maintenance thread would sleep after each of its next looks for work."""
    scheduler = store_of(manager).scheduler
    taken = Naps(scheduler, count)
    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "wakeup", taken)
        scheduler.run()
    scheduler.stopping = False
    return taken.seconds


def test_maintenance_looks_rarely_while_nothing_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path, background=False) as manager:
        writer = manager.create_ledger(insecure=True)
        assert naps(manager, monkeypatch, 3) == [1, 5, 5]
        writer.append(b"x")
        assert naps(manager, monkeypatch, 2) == [1, 5]
        store = store_of(manager)
        store.troubles.note("testing", "it fails")
        assert naps(manager, monkeypatch, 2) == [1, 1]
        store.troubles.clear("testing")
        assert naps(manager, monkeypatch, 2) == [5, 5]


def test_a_commit_ends_the_rest_and_others_wake_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path, background=False) as manager:
        writer = manager.create_ledger(insecure=True)
        scheduler = store_of(manager).scheduler
        woken: list[bool] = []
        monkeypatch.setattr(scheduler, "wake", lambda: woken.append(True))
        writer.append(b"x")
        assert woken == []
        assert scheduler.pause() == 1.0
        writer.append(b"y")
        assert woken == []
        scheduler.pause()
        assert scheduler.pause() == 5.0
        writer.append(b"z")
        assert woken == [True]
