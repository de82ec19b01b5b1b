"""Works on a subscription until it is killed: ``python -m tests.streams.subscription_child DIRECTORY SEED``.

It prints what it does, a line each, so that its reader knows what was acknowledged.
"""

from __future__ import annotations

import sys
from random import Random

from pybk import LedgerManager
from pybk.streams import cursor
from tests.streams.subscription_workload import opened, work


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    cursor.CHANGES_BYTES = 2000  # type: ignore[misc]  # so that whole states are written and the list rolls
    cursor.CURSOR_SEGMENT_BYTES = 5000  # type: ignore[misc]
    cursor.BOUND_SECONDS = 0.01  # type: ignore[misc]
    with LedgerManager.open(sys.argv[1]) as manager, opened(manager) as log:
        for _ in work(log, log.writer(segment_bytes=3000), Random(int(sys.argv[2])), report):
            pass
