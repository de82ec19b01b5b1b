"""The interface of a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

Report = Callable[[str], object]


class Workload(Protocol):
    """A program that is recorded, and the check of what it leaves after a cut."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """Work in a new directory; report what is about to begin and what was acknowledged."""
        ...

    def check(self, directory: Path, reports: Sequence[str]) -> None:
        """Open what a cut left.

        Raises:
            AssertionError: Something that was reported as acknowledged is missing, or something is wrong.
            PybkError: It cannot be opened.
        """
        ...
