"""A change of a ledger by a second thread while the first thread's change becomes durable, but before it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pybk.errors import PybkError
from pybk.storage.log.commit import Commit
from pybk.storage.store import Store
from tests.waiting import WAIT_S


class Beside:
    """The second thread; it begins when the next commit is on disk, and before that commit is applied.

    It waits for commits only after ``finish`` has made a checkpoint, and no other thread commits meanwhile: so what it
    stages follows the checkpoint.

    Attributes:
        error: What the change raised; None if it succeeded.
    """

    def __init__(self, store: Store, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
        self._store = store
        self._change = change
        self._waits = threading.Event()
        self._go = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: PybkError | None = None
        self._wait, self._publish, self._is_pending = store.log.wait, store.log.writer.publish, store.log.is_pending
        monkeypatch.setattr(store.log, "wait", self._wait_late)
        monkeypatch.setattr(store.log, "is_pending", lambda: self._go.is_set() and self._is_pending())
        monkeypatch.setattr(store.log.writer, "publish", self._publish_beside)

    def _publish_beside(self, commit: Commit) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run)
            self._thread.start()
            assert self._waits.wait(WAIT_S)
        self._publish(commit)

    def _run(self) -> None:
        try:
            self._change()
        except PybkError as error:
            self.error = error
        finally:
            self._waits.set()

    def _wait_late(self, commit: Commit, *arguments: Any) -> Any:
        if threading.current_thread() is self._thread:
            self._waits.set()
            assert self._go.wait(WAIT_S)
        return self._wait(commit, *arguments)

    def release(self) -> None:
        """Let the change end."""
        self._go.set()

    def finish(self) -> None:
        """Make a checkpoint, and let the change end."""
        self._store.scheduler.checkpoint()
        self.release()
        assert self._thread is not None
        self._thread.join(WAIT_S)
