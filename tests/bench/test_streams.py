"""The contests of logs run, and compare what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.waiting import PROCESS_S

pytest.importorskip("rocksdict")

from bench.streams.__main__ import CONTESTS


@pytest.mark.long
def test_the_contests_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.streams", "--quick", "--json", "--directory", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    found = json.dumps(figures)
    for contest in CONTESTS.values():
        assert contest.name in found
    assert list(tmp_path.iterdir()) == []
