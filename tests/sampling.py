"""How much of what could be tried a run of the tests tries; with ``PYBK_ALL_FAULTS=1`` all of it, which takes hours."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Final

ALL: Final = bool(os.environ.get("PYBK_ALL_FAULTS"))


def every(step: int) -> int:
    """Return the distance from one place that is tried to the next: ``step``, or 1 for all of them."""
    return 1 if ALL else step


def some(few: int, many: int) -> int:
    """Return how many are tried: ``few``, or ``many``."""
    return many if ALL else few


def bits_of(offset: int) -> Iterable[int]:
    """Return which bits of the byte at an offset are flipped: two, others in the next byte, or all."""
    return range(8) if ALL else (offset % 8, (offset + 3) % 8)
