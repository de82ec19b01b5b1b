"""Deliveries are counted over all opens of a subscription: what kills each consumer goes to the dead letters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pybk import LedgerManager, Log
from tests.paths import ROOT
from tests.streams.dead_letters_child import MAX_DELIVERIES, POISON

RECORDS = 60
POISONED = (12, 30, 31)
LATE = ((1, "kill"), (7, "raise"))


def filled(directory: Path) -> None:
    """Make a log of records some of which are poison."""
    with LedgerManager.open(directory) as manager, Log.open(manager, "log", insecure=True) as log:
        log.writer().append_many([POISON if seq in POISONED else b"%d" % seq for seq in range(RECORDS)])


def consumed(directory: Path, most: int, how: str) -> list[list[int]]:
    """Run a consumer until it ends; returns the batches that it was handed out, and an empty one if it came through."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.streams.dead_letters_child", str(directory), str(most), how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout, found.stderr
    return [[] if line == "done" else [int(word) for word in line.split()] for line in found.stdout.splitlines()]


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.parametrize(
    ("most", "how"), [(7, "kill"), (1, "raise"), *(pytest.param(*each, marks=pytest.mark.long) for each in LATE)]
)
def test_a_record_that_kills_each_consumer_goes_to_the_dead_letters_and_no_other(
    tmp_path: Path, most: int, how: str
) -> None:
    filled(tmp_path)
    starts = [consumed(tmp_path, most, how)]
    while starts[-1][-1]:
        assert len(starts) <= MAX_DELIVERIES * len(POISONED), "a record that kills its consumers is kept"
        starts.append(consumed(tmp_path, most, how))
    assert len(starts) <= 1 + MAX_DELIVERIES * len(POISONED)
    handed = Counter(seq for start in starts for batch in start for seq in batch)
    assert set(handed) == set(range(RECORDS)), "a record was given up that no consumer got"
    assert max(handed.values()) <= MAX_DELIVERIES
    assert all(handed[seq] >= MAX_DELIVERIES - 1 for seq in POISONED)
    with (
        LedgerManager.open(tmp_path) as manager,
        Log.open(manager, "log", insecure=True) as log,
        Log.open(manager, "dead", insecure=True) as dead,
    ):
        found = [record.headers[1] for record in dead.reader(0, follow=False)]
        assert found == [("pybk.seq", b"%d" % seq) for seq in POISONED]
        assert log.subscription_states()[0].backlog == 0
