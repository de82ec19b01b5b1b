"""The interface of a workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final, Protocol

Report = Callable[[str], object]

RECOVERED: Final = "recovered"
"""Reported by a check once all was there, before it adds anything that a second check would not know."""


def ignore(report: str) -> None:
    """Do nothing about a report."""


class Workload(Protocol):
    """A program that is recorded, and the check of what it leaves after a cut."""

    def run(self, directory: Path, choice: Random, report: Report) -> None:
        """Work in a new directory; report what is about to begin and what was acknowledged."""
        ...

    def check(self, directory: Path, reports: Sequence[str], report: Report = ignore) -> None:
        """Open what a cut left, and continue to work with it.

        Args:
            directory: That of the run.
            reports: What was reported before the cut.
            report: Takes what was found, which a second check expects, too, and ``RECOVERED``.

        Raises:
            AssertionError: Something that was reported as acknowledged is missing, or something is wrong.
            PybkError: It cannot be opened.
        """
        ...


def unused(directory: Path) -> Path:
    """Return a path below a directory at which nothing is, not even what an earlier check left half done."""
    return directory / f"now{len(list(directory.glob('now*')))}"
