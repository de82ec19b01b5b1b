"""The benchmark of Spark runs, and measures what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.spark import clusters
from tests.waiting import PROCESS_S


@pytest.mark.long
def test_contests_run_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.spark", "local"),
            *("--quick", "--gib", "0.002", "--json", "--directory", str(tmp_path / "bench")),
        ],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
        cwd=ROOT,
        env=clusters.environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "bench").iterdir()) == []
    figures = {(one["contest"], one["contestant"]): one for one in json.loads(done.stdout)["figures"]}
    remote, local = figures["local", "remote replica"], figures["local", "local replica"]
    ((text, ratio),) = local["targets"]
    assert text == ">= 1.3 x remote"
    assert ratio == pytest.approx(local["median"] / (1.3 * remote["median"]))


def test_every_figure_of_ours_has_a_target() -> None:
    pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
    from bench.spark.__main__ import CONTESTS
    from bench.spark.counting import ONE
    from bench.spark.logs import CEILING

    others = {"parquet", "remote replica", CEILING, ONE}
    assert list(CONTESTS) == [
        "read",
        "read-log",
        "count",
        "small",
        "write",
        "write-log",
        "local",
        "verify",
        "start",
    ]
    for contest in CONTESTS.values():
        assert all(bool(one.targets) != (one.name in others) for one in contest.contestants)
