"""A consumer whose process is killed loses no acknowledgement, and is handed out everything else again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from pybk import LedgerManager
from tests.paths import ROOT
from tests.streams.subscription_workload import Model, opened

ROUNDS = 10
LINES = 120
"""Lines after which a consumer is killed, at most: it may write some more until then."""


@pytest.mark.long
def test_queuelib_5_a_killed_consumer_loses_nothing(tmp_path: Path) -> None:
    model, source, acked = Model(), random.Random(1), 0
    for number in range(ROUNDS):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.streams.subscription_child", str(tmp_path / "db"), str(number)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout is not None
            begun = child.stdout.readline()
            assert begun.startswith("opened ")
            lines = list(islice(child.stdout, source.randrange(LINES)))
            child.kill()
            lines += [line for line in child.stdout if line.endswith("\n")]  # the last one may be cut off
        for line in lines:
            model.take(line)
        acked += sum(line.startswith("acked") for line in lines)
        with LedgerManager.open(tmp_path / "db") as manager, opened(manager) as log:
            model.check(manager, log)
    assert acked > 50, "hardly anything was acknowledged"
