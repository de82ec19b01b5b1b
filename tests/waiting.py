"""Waiting for a condition, with a deadline that only something broken misses."""

from __future__ import annotations

import time
from collections.abc import Callable

# Far beyond what any wait takes, even where several processes fight for one core, and below the limit of one test.
WAIT_S = 60.0


def wait_until(condition: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Poll until a condition holds; fail, naming what was waited for, if it does not hold before the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain: {what}"
        time.sleep(0.005)
