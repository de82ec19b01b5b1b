"""A write-ahead log whose process is killed has every record that was acknowledged, and no other order."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from pybk import WriteAheadLog
from tests.paths import ROOT
from tests.streams.workload import Model

ROUNDS = 10


def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    model, source, appended = Model(), random.Random(1), 0
    for number in range(ROUNDS):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.streams.wal_child", str(tmp_path / "db"), str(number)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout is not None
            begun = child.stdout.readline()
            assert begun.startswith("open ")
            time.sleep(source.uniform(0, 0.3))
            child.kill()
            lines = [line for line in child.stdout if line.endswith("\n")]  # the last one may be cut off
        for line in lines:
            model.take(line)
        appended += sum(line.startswith("appended") for line in lines)
        with WriteAheadLog.open(tmp_path / "db", insecure=True) as wal:
            model.check(wal)
    assert appended > 100, "hardly anything was appended"
