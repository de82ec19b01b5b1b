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

ROUNDS = 10


class Model:
    """What the lines of all processes so far say."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.first = 1
        self.maybe_first = 1
        self.maybe_last: int | None = None
        """The record that an unfinished cut would have kept last."""
        self.generation = 0

    def take(self, line: str) -> None:
        """Take one line."""
        what, *words = line.split()
        if what == "appended":
            self.records[int(words[0])] = bytes.fromhex(words[1])
        elif what == "truncating":
            self.maybe_first = int(words[0])
        elif what == "truncated":
            self.first = max(self.first, int(words[0]))
        elif what == "cutting":
            self.maybe_last = int(words[0])
        elif what == "cut":
            self.drop(int(words[0]))
            assert int(words[1]) == self.generation + 1
            self.generation += 1
            self.maybe_last = None

    def drop(self, last: int) -> None:
        """Forget the records after a cut."""
        self.records = {lsn: data for lsn, data in self.records.items() if lsn <= last}

    def check(self, wal: WriteAheadLog) -> None:
        """Compare the log with the model, and take what was left open from the log."""
        assert self.generation <= wal.generation <= self.generation + (self.maybe_last is not None)
        if wal.generation > self.generation:
            assert self.maybe_last is not None
            self.drop(self.maybe_last)
        self.generation, self.maybe_last = wal.generation, None
        assert self.first <= wal.first_lsn <= max(self.first, self.maybe_first)
        self.first = wal.first_lsn
        found = list(wal.replay())
        assert [record.lsn for record in found] == list(range(wal.first_lsn, wal.first_lsn + len(found)))
        kept = {record.lsn: record.data for record in found}
        for lsn, data in self.records.items():
            if lsn >= self.first:
                assert kept.get(lsn) == data, f"record {lsn} was acknowledged"
        self.records = kept


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
