"""A commit in memory: what was staged to become durable together, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pybk.errors import PybkError

if TYPE_CHECKING:
    from pybk.storage.descriptor import LedgerDescriptor


class StagedRun:
    """Consecutive entries of one ledger in one commit."""

    __slots__ = ("commit", "descriptor", "first", "length", "parts", "sizes", "staged_ns")

    def __init__(self, commit: Commit, descriptor: LedgerDescriptor, first: int, staged_ns: int) -> None:
        self.commit = commit
        self.descriptor = descriptor
        self.first = first
        self.sizes: list[int] = []
        self.parts: list[bytes | memoryview] = []
        self.length = 0
        self.staged_ns = staged_ns


class Commit:
    """What becomes durable together.

    ``done`` is set once everything in it is durable and published, or ``error`` is set. ``wakers`` belongs to who waits in event
    loops: one waker per loop.
    """

    __slots__ = (
        "base",
        "buffers",
        "callbacks",
        "controls",
        "done",
        "error",
        "file_id",
        "lsn",
        "payload_bytes",
        "places",
        "runs",
        "size",
        "waiters",
        "wakers",
        "wanted",
    )

    def __init__(self) -> None:
        self.runs: list[StagedRun] = []
        self.controls: list[tuple[Callable[[int], bytes], Callable[[], None]]] = []
        self.payload_bytes = 0
        self.waiters: list[threading.Lock] = []
        self.callbacks: list[Callable[[], None]] = []
        self.wakers: dict[Any, Any] = {}
        self.wanted = False
        self.done = False
        self.error: PybkError | None = None
        self.lsn = 0
        self.file_id = 0
        self.base = 0
        self.size = 0
        self.buffers: list[bytes | memoryview] = []
        self.places: list[tuple[int, int]] = []

    @classmethod
    def finished(cls, error: PybkError | None) -> Commit:
        """Return a commit of nothing that is done already."""
        commit = cls()
        commit.done = True
        commit.error = error
        return commit

    def is_done(self) -> bool:
        """Tell whether it is done now; another thread may have finished it since the last look."""
        return self.done

    def is_empty(self) -> bool:
        """Tell whether nothing was staged."""
        return not self.runs and not self.controls
