"""The interface of a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

Report = Callable[[str], object]
Recovered = Callable[[], object]


class Workload(Protocol):
    """A program that is recorded, and the check of what it leaves after a cut."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """Work in a new directory; report what is about to begin and what was acknowledged."""
        ...

    def check(self, directory: Path, reports: Sequence[str], recovered: Recovered = lambda: None) -> None:
        """Open what a cut left, and go on with it.

        Args:
            directory: That of the run.
            reports: What was reported before the cut.
            recovered: Called once all was there, before anything is added that a second check would not know.

        Raises:
            AssertionError: Something that was reported as acknowledged is missing, or something is wrong.
            PybkError: It cannot be opened.
        """
        ...


def unused(directory: Path) -> Path:
    """Return a path below a directory at which nothing is, not even what an earlier check left half done."""
    return directory / f"now{len(list(directory.glob('now*')))}"
