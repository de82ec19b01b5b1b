"""How long a new process takes until its first durable append, next to a bare interpreter and ``import numpy``.

``python -m bench.starting [--rounds N]`` runs each program in turn, N times, and prints medians and their ratios. The
time is that from the start of the interpreter until the append is acknowledged; bytecode is there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Final

_END: Final = "import sys, time; sys.stdout.write(str(time.monotonic_ns()))"

_OPEN: Final = """
import sys
from pybk import DigestType, LedgerManager
options = {"digest_type": DigestType.XXH3, "insecure": True}
manager = LedgerManager.open(sys.argv[1])
"""

_PROGRAMS: Final = {
    "bare": _END,
    "numpy": f"import numpy\n{_END}",
    "version": f"import sys\nsys.argv = ['pybk', '--version']\nfrom pybk.admin.command import VERSION\n{_END}",
    "completion": f"from pybk.admin.command import completion_of\ncompletion_of('bash')\n{_END}",
    "ledger": f"{_OPEN}manager.create_ledger(**options).append(b'x')\n{_END}",
    "log": f"{_OPEN}from pybk import WriteAheadLog\nWriteAheadLog.open(manager, 'a', **options).append(b'x')\n{_END}",
}
"""The programs, by name; each prints when it was done."""

_BESIDE: Final = {"version": "bare", "completion": "bare", "ledger": "numpy", "log": "numpy"}
"""What each is compared with."""


def taken_s(program: str, directory: Path) -> float:
    """Return how long a program takes, from the start of the interpreter until it is done, seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", program, str(directory)]
    began = time.monotonic_ns()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return (int(done.stdout) - began) / 1e9


def main() -> None:
    """Measure, and print a line for each program."""
    parser = argparse.ArgumentParser(prog="bench.starting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="how often each program runs (default: 11)")
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    with tempfile.TemporaryDirectory() as root:
        for number in range(rounds + 1):
            for name, program in _PROGRAMS.items():
                found = taken_s(program, Path(root) / f"{name}{number}")
                if number:  # the first round makes bytecode
                    times[name].append(found)
    medians = {name: median(found) for name, found in times.items()}
    for name, seconds in medians.items():
        beside = _BESIDE.get(name)
        ratio = "" if beside is None else f"  {seconds / medians[beside]:.2f} of {beside}"
        print(f"{name:<10} {seconds * 1e3:7.1f} ms{ratio}")


if __name__ == "__main__":
    main()
