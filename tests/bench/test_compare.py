"""The comparison of two commits takes turns fairly, and fails what is slower beyond doubt."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.waiting import PROCESS_S

pytest.importorskip("rocksdict")

from bench.compare.__main__ import Compared, interval
from bench.compare.rows import rows


def test_the_interval_leaves_out_as_many_as_the_binomial_allows() -> None:
    assert interval(list(range(15))) == (3, 11)
    assert interval(list(range(9))) == (1, 7)
    assert interval([5.0]) == (5.0, 5.0)
    assert interval(list(range(5))) == (0, 4)
    assert interval(list(range(6))) == (0, 5)


def test_the_interval_has_the_median_as_often_as_it_says() -> None:
    source = random.Random(7)
    samples = [[source.lognormvariate(0, 0.1) for _ in range(15)] for _ in range(2000)]
    hits = sum(low <= 1 <= high for low, high in map(interval, samples))
    assert 0.95 <= hits / len(samples) <= 0.98


@pytest.mark.parametrize(("ratio", "failed"), [(1.0, False), (0.98, False), (0.9, True)])
def test_a_row_fails_when_its_interval_lies_below_the_floor(ratio: float, failed: bool) -> None:
    source = random.Random(3)
    ratios = [ratio * source.lognormvariate(0, 0.03) for _ in range(15)]
    row = Compared("row", "/s", 1, ratio, statistics.median(ratios), *interval(ratios), 1, 1)
    assert row.failed is failed
    assert not math.isclose(row.low, row.high)


def test_rows_are_pybks_own_and_have_turns() -> None:
    names = list(rows())
    assert {"append: pybk", "random: pybk", "pipelined: pybk"} <= set(names)
    assert any(name.startswith("cluster ") for name in names)
    assert not any(contest.once for contest, _ in rows().values())


@pytest.mark.long
def test_a_commit_is_compared_with_the_working_tree(tmp_path: Path) -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("the sources are in no git repository, so there is no commit to compare with")
    command = [sys.executable, "-m", "bench.compare", "HEAD", "append:", "--seconds", "0.05", "--json"]
    run = subprocess.run(
        [*command, "--pairs", "1", "--rounds", "1", "--directory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    (row,) = json.loads(run.stdout)
    assert row["name"] == "append: pybk"
    assert row["base"] > 0
    assert row["ratio"] == pytest.approx(row["head"] / row["base"])
    assert row["base_calls"] > 1
    assert row["head_calls"] > 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_commit_is_refused() -> None:
    command = [sys.executable, "-m", "bench.compare", "no-such-commit", "append:"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert run.returncode == 1
    assert "no-such-commit is not a commit" in run.stderr
