"""A write-ahead log whose process is killed has every record that was acknowledged, and no other order."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest

from pybk import StoreLockedError, WriteAheadLog
from pybk.errors import RewoundError, TruncatedError
from tests.paths import ROOT
from tests.streams.workload import Model
from tests.waiting import WAIT_S, wait_until

ROUNDS = 10


def started(path: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.streams.wal_child", str(path), str(seed)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_nothing_acknowledged_is_lost_when_the_process_is_killed(tmp_path: Path) -> None:
    model, source, appended = Model(), random.Random(1), 0
    for number in range(ROUNDS):
        with started(tmp_path / "db", number) as child:
            assert child.stdout is not None
            begun = child.stdout.readline()
            assert begun.startswith("open ")
            lines = list(islice(child.stdout, source.randint(0, 100)))
            child.kill()
            lines += [line for line in child.stdout if line.endswith("\n")]  # the last one may be cut off
        for line in lines:
            model.take(line)
        appended += sum(line.startswith("appended") for line in lines)
        with WriteAheadLog.open(tmp_path / "db", insecure=True) as wal:
            model.check(wal)
    assert appended > 100, "hardly anything was appended"


def reads(wal: WriteAheadLog) -> bool:
    """Return whether a record can be read, while another process appends and drops some."""
    with suppress(TruncatedError, RewoundError):
        return next(wal.replay(), None) is not None
    return False


def test_a_standby_in_another_process_takes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standby has the store's index open for reading, which excludes writing to it in one process."""
    model = Model()
    with started(tmp_path / "db", 0) as child:
        assert child.stdout is not None
        model.take(child.stdout.readline())
        with WriteAheadLog.open(tmp_path / "db", mode="r", insecure=True) as standby:
            with pytest.raises(StoreLockedError):
                standby.promote()
            wait_until(lambda: reads(standby))  # so that it has the keys; a log without ledgers needs none
            before = standby.epoch()
            child.kill()
            for line in child.stdout:
                if line.endswith("\n"):
                    model.take(line)
            monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", None)  # the standby has the keys already
            standby.promote(wait=WAIT_S)
            assert standby.epoch() > before
            model.check(standby)
            standby.append(b"x")
