"""Works on a write-ahead log until it is killed: ``python -m tests.streams.wal_child DIRECTORY SEED``.

It prints what it does, a line each, so that its reader knows what was acknowledged.
"""

from __future__ import annotations

import sys
from random import Random

from pybk import WriteAheadLog
from tests.streams.workload import work


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with WriteAheadLog.open(sys.argv[1], insecure=True, segment_bytes=3000) as opened:
        for _ in work(opened, Random(int(sys.argv[2])), report):
            pass
