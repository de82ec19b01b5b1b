"""Callbacks of a metadata store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from pybk.metadata import callbacks
from pybk.metadata.callbacks import Callbacks
from tests.waiting import WAIT_S


def test_a_finaliser_may_cancel_a_callback_while_the_next_one_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run a finaliser at each comparison."""
    called = threading.Event()
    made = Callbacks("test")
    cancelled, other = made.add("a", pytest.fail), made.add("b", called.set)

    class Now(float):
        def __ge__(self, due: float) -> bool:
            cancelled.cancel()
            return super().__ge__(due)

    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: Now(time.monotonic())))
    made.schedule(cancelled, 100.0)
    made.schedule(other)
    assert called.wait(WAIT_S)
    made.close()
