"""One of two sides: ``python -m bench.compare.side ROW DIRECTORY SCALE turns|calls``, with the pybk that it imports.

It prints ``ready``, then for each line with a number of seconds that it reads, the figure that it reached in that time.
With ``calls`` it prints instead how many Python functions were called per operation, in all threads of this process.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Final

from bench.compare.rows import rows
from bench.contest import Run, Scale, settle

TURNS: Final = "turns"
CALLS: Final = "calls"


def main() -> None:
    """Do the work until standard input ends."""
    name, directory, scale, what = sys.argv[1:]
    contest, contestant = rows()[name]
    counter = CallCounter()
    if what == CALLS:
        threading.setprofile(counter)
        sys.setprofile(counter)
    with contestant.enter(Path(directory), Scale(**json.loads(scale))) as run:
        print("ready", flush=True)
        for line in sys.stdin:
            seconds = float(line)
            figure = counter.per_operation(run, seconds, contest.unit) if what == CALLS else run(seconds)
            settle()
            print(figure, flush=True)


class CallCounter:
    """A profile function that counts calls of Python functions."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, _: FrameType, event: str, __: object) -> None:
        """Count; called by the interpreter, in any thread."""
        if event == "call":
            self._calls += 1

    def per_operation(self, run: Run, seconds: float, unit: str) -> float:
        """Return the calls per operation of a run; operations of rows in milliseconds are taken from their median."""
        before, begin = self._calls, time.perf_counter()
        figure = run(seconds)
        elapsed = time.perf_counter() - begin
        return (self._calls - before) / (elapsed * 1e3 / figure if unit == "ms" else elapsed * figure)


if __name__ == "__main__":
    main()
