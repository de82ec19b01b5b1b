"""Runs seeds of the simulator until one fails: ``python -m tests.mutation.simulating FIRST COUNT`` prints that one.

A process of its own, because the environment names the mutant that it loads.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from tests.simulator.__main__ import run

SEED_SECONDS = 60
"""Processor time after which a seed counts as one that never ends."""


class EndlessError(Exception):
    """A seed comes to no end."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise EndlessError(f"no end after {SEED_SECONDS} s of processor time")


def main() -> int:
    first, count = map(int, sys.argv[1:])
    signal.signal(signal.SIGVTALRM, _alarm)
    for seed in range(first, first + count):
        signal.setitimer(signal.ITIMER_VIRTUAL, SEED_SECONDS)
        _, error = run(seed)
        if error is not None:
            print(f"{seed} {type(error).__name__}: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
