"""Runs scenarios, all or those whose numbers are given, and prints a line of figures for each.

``python -m tests.cluster.scenarios [NUMBER ...]``. What is asserted are orders, counts, bytes and states; the times are
printed, and depend on the machine. Grace, lease and pauses are scaled down (``tests.cluster.scaled``).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.cluster.scenarios import absence, auditor, checks, disks, draining, ledgers, pace, placement, rotation
from tests.cluster.scenarios.catalog import SCENARIOS, NotHere, Scenario

PARTS = (absence, auditor, pace, ledgers, draining, disks, checks, placement, rotation)
"""The modules that enter the scenarios."""


def run(found: Scenario) -> bool:
    """Run a scenario, print its line, and return whether it holds; the directory of one that fails stays."""
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix=f"pybk-scenario-{found.number}-"))
    try:
        figures = found.run(directory)
    except NotHere as lacking:
        sys.stdout.write(f"{found.number:>3} left out      {found.title}: {lacking}\n")
        return True
    except Exception:  # noqa: BLE001  # whatever fails, the others are to run
        seconds = time.monotonic() - began
        sys.stdout.write(f"{found.number:>3} FAILED {seconds:5.1f} s  {found.title}; see {directory}\n")
        sys.stdout.write(traceback.format_exc())
        return False
    shutil.rmtree(directory)
    text = ", ".join(f"{name} {value}" for name, value in figures.items())
    sys.stdout.write(f"{found.number:>3} holds  {time.monotonic() - began:5.1f} s  {found.title}: {text}\n")
    return True


def main() -> int:
    """Run as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.scenarios", description=__doc__)
    parser.add_argument("numbers", type=int, nargs="*", metavar="NUMBER", help="a scenario; default: all")
    numbers = parser.parse_args().numbers or sorted(SCENARIOS)
    for number in numbers:
        if number not in SCENARIOS:
            parser.error(f"there is no scenario {number}; there are {', '.join(map(str, sorted(SCENARIOS)))}")
    failed = 0
    for number in numbers:
        failed += not run(SCENARIOS[number])
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
