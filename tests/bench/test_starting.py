"""The benchmark of new processes measures each of its programs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.paths import ROOT
from tests.waiting import PROCESS_S


@pytest.mark.long
def test_each_program_is_measured() -> None:
    command = [sys.executable, "-m", "bench.starting", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "bare",
        "numpy",
        "version",
        "completion",
        "ledger",
        "log",
    ]
    assert done.stdout.count(" of ") == 4
