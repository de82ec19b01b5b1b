"""How much of what could be tried a run of the tests tries; with ``PYBK_ALL_FAULTS=1`` all of it, which takes hours."""

from __future__ import annotations

import os
from typing import Final

ALL: Final = bool(os.environ.get("PYBK_ALL_FAULTS"))


def every(step: int) -> int:
    """Return the distance from one place that is tried to the next: ``step``, or 1 for all of them."""
    return 1 if ALL else step


def some(few: int, many: int) -> int:
    """Return how many are tried: ``few``, or ``many``."""
    return many if ALL else few
