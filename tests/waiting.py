"""Waiting for a condition, with a deadline that only something broken misses."""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

# Far beyond what any wait takes, even where several processes fight for one core, and below the limit of one test.
WAIT_S = 60.0

# The same for a process that has more to do than to answer.
PROCESS_S = 500.0


def wait_until(condition: Callable[[], T], what: str = "", seconds: float = WAIT_S, pause_s: float = 0.005) -> T:
    """Poll until a condition holds and return it; fail if it does not hold before the deadline.

    Args:
        condition: What must become true.
        what: The condition in words, for the error; by default its source.
        seconds: The deadline.
        pause_s: Seconds between two looks; longer for a condition that costs much.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s without result for {what or source_of(condition)}")
        time.sleep(pause_s)
    return found


def source_of(condition: Callable[[], object]) -> str:
    """Return the source lines of a condition, for the error of a wait that fails."""
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)


def stop(pid: int) -> None:
    """Stop a process with SIGSTOP; return when all its threads are stopped, because the kernel stops each one later."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not any(_runs(thread) for thread in Path(f"/proc/{pid}/task").iterdir()))


def _runs(thread: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "RSD"
    return False
