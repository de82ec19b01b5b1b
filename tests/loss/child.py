"""The process that is recorded: ``python -m tests.loss.child WORKLOAD SEED DIRECTORY``."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from tests.loss.recording import inodes_kept, mark, sites_named
from tests.loss.workloads.every import WORKLOADS


def main(name: str, seed: str, directory: str) -> None:
    """Run a workload."""
    with sites_named(), inodes_kept():
        WORKLOADS[name].run(Path(directory), Random(f"{name} {seed}"), lambda report: mark(report.encode()))
        mark(b"")  # so that what was stored to shared maps is recorded


if __name__ == "__main__":
    main(*sys.argv[1:])
