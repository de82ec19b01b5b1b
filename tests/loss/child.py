"""The process that is recorded.

``python -m tests.loss.child run WORKLOAD SEED DIRECTORY``, or ``recover WORKLOAD REPORTS DIRECTORY`` with a file of
reports, a JSON array.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

from tests.loss.recording import inodes_kept, mark, sites_named
from tests.loss.workloads.every import WORKLOADS


def main(action: str, name: str, argument: str, directory: str) -> None:
    """Run a workload, or recover what a loss of power or of the process left of it."""
    workload = WORKLOADS[name]
    with sites_named(), inodes_kept():
        if action == "run":
            workload.run(Path(directory), Random(f"{name} {argument}"), _report)
        else:
            reports = json.loads(Path(argument).read_text())
            workload.check(Path(directory), reports, _report)
        mark(b"")  # so that what was stored to shared maps is recorded


def _report(text: str) -> None:
    mark(text.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
