"""The machine stops, or the disk fails, at one operation after the other of a workload on logs or blobs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from pybk import LedgerManager
from pybk.errors import PybkError
from tests.internals import store_of
from tests.sampling import sample, some
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import abandon, open_world

M = TypeVar("M")


@dataclass(frozen=True)
class Crashing(Generic[M]):
    """A workload, the model of what it acknowledged, and how to compare both.

    Attributes:
        model: Makes a model.
        work: Works on a store, drawn from a seed, and reports to the model; closes nothing after an error.
        work_through: Does the same on a disk that fails, and continues after a lack of space.
        check: Compares what a store has with the model, and works on a little.
    """

    model: Callable[[], M]
    work: Callable[[LedgerManager, M, int], None]
    work_through: Callable[[LedgerManager, M], None]
    check: Callable[[LedgerManager, M], None]

    def stop_at_operations(self, seed: int, first: int, every: int, at_least: int) -> None:
        """Stop the machine at operations of a run: half of them lose what was not synced, too.

        Args:
            seed: Of the workload.
            first: The first operation to stop at.
            every: Its distance from the next; five times as much in a sample.
            at_least: Operations that the workload has to take.
        """
        count = self._operations(seed)
        assert count >= at_least, "the workload hardly touches the disk"
        step = every * some(5, 1)
        for operation in sample(f"{self.work.__module__} stop {seed}", range(first, count, step), 5):
            fs, model = SimFileSystem(operation), self.model()
            fs.crash_at(operation)
            with suppress(SimCrash, PybkError):
                self._run(fs, model, seed)
            self._check(fs.crash() if operation // step % 2 else fs.kill(), model)

    def fail_at_operations(self, error: ErrorName, every: int, *, forever: bool) -> None:
        """Fail operations of a run, each for itself or with all that follow, and kill the process then."""
        for operation in sample(
            f"{self.work.__module__} {error} {forever}", range(0, self._operations(0), every * some(5, 1)), 5
        ):
            fs, model = SimFileSystem(operation), self.model()
            fs.fail_at(operation, error, forever=forever)
            self._run_through(fs, model)
            self._check(fs.kill(), model)

    def _operations(self, seed: int) -> int:
        whole = SimFileSystem(0)
        self._run(whole, self.model(), seed)
        return len(whole.operations)

    def _run(self, fs: SimFileSystem, model: M, seed: int) -> None:
        manager: LedgerManager | None = None
        try:
            manager = open_world(fs)
            self.work(manager, model, seed)
            manager.close()
            manager = None
        finally:
            if manager is not None:
                die(manager)

    def _run_through(self, fs: SimFileSystem, model: M) -> None:
        try:
            manager = open_world(fs)
        except PybkError:
            return
        try:
            with suppress(PybkError):
                self.work_through(manager, model)
        finally:
            die(manager)

    def _check(self, fs: SimFileSystem, model: M) -> None:
        with open_world(fs) as manager:
            self.check(manager, model)


def die(manager: LedgerManager) -> None:
    """Let go of a store as a process that dies, which closes no log."""
    abandon(manager)
    store_of(manager).ended = True
