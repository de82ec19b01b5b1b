"""The scenarios by number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tests.cluster.scenarios.stage import Figures

Run = Callable[[Path], Figures]


class NotHere(Exception):  # noqa: N818  # it is no failure
    """What a scenario needs is not installed; the message says what."""


class Scenario(NamedTuple):
    """A scenario.

    Attributes:
        number: Its number.
        title: What happens.
        run: Runs it in a directory; returns what was measured, or raises AssertionError.
    """

    number: int
    title: str
    run: Run


SCENARIOS: Final[dict[int, Scenario]] = {}


def scenario(number: int, title: str) -> Callable[[Run], Run]:
    """Enter a function as a scenario."""

    def enter(run: Run) -> Run:
        assert number not in SCENARIOS, number
        SCENARIOS[number] = Scenario(number, title, run)
        return run

    return enter
