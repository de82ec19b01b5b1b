"""Each commit tries a sample of what repeats, the same in each process, and the commits together try all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests import sampling
from tests.paths import ROOT
from tests.sampling import EVERYTHING, VARIABLE, chosen, places
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S

NAMES = [f"test_it[{number}]" for number in range(40)]
SEEDS = [f"{number:012x}" for number in range(60)]

TESTS = """
import pytest

@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(12))
def test_sampled(seed): pass

@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.long), 1])
def test_of_two(seed): pass

@pytest.mark.parametrize("seed", range(3))
def test_of_all(seed): pass

from tests.sampling import mostly

@pytest.fixture(params=mostly("store", "cluster", among="kind"))
def kind(request):
    return request.param

@pytest.mark.parametrize("number", range(20))
def test_of_kinds(kind, number): pass

def wal(): pass
def log(): pass

@pytest.mark.sampled(one_in=2, among="opened")
@pytest.mark.parametrize("opened", [wal, log])
@pytest.mark.parametrize("number", range(5))
def test_of_functions(number, opened): pass
"""
OF_A_CLUSTER = """
import pytest
from tests.sampling import mostly

pytestmark = pytest.mark.sampled(one_in=3, using="cluster")

@pytest.fixture
def cluster(): pass

def test_first(cluster): pass
def test_second(cluster): pass
def test_without(): pass

@pytest.mark.parametrize("seed", range(4))
def test_third(cluster, seed): pass

@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("seed", range(4))
def test_apart(cluster, seed): pass

@pytest.fixture(params=mostly("store", "cluster", among="kind"))
def kind(cluster, request): pass

@pytest.mark.parametrize("number", range(6))
def test_of_kinds(kind, number): pass
"""
OF_A_GROUP = """
import pytest

pytestmark = pytest.mark.sampled(one_in=4, using="cluster", group="clusters")

@pytest.fixture
def cluster(): pass

@pytest.mark.parametrize("number", range(4))
def test_it(cluster, number): pass

def test_without(): pass
"""
SETTINGS = "[pytest]\nmarkers =\n    long: long\n    sampled(one_in, among, using, group, lots): sampled\n"


def run(directory: Path, seed: str, *arguments: str, tests: str = TESTS) -> tuple[set[str], str]:
    """Run pytest over the tests above with this project's sampling; return which passed, and all that was printed."""
    (directory / "test_these.py").write_text(tests, encoding="utf-8")
    (directory / "pytest.ini").write_text(SETTINGS, encoding="utf-8")
    (directory / "conftest.py").write_text(
        "from tests.conftest import pytest_collection_modifyitems, pytest_report_header\n", encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "xdist", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "PYTEST_ADDOPTS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            VARIABLE: seed,
        },
        timeout=PROCESS_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"PASSED.* test_these.py::(\S+)|test_these.py::(\S+) PASSED", done.stdout)
    return {one or other for one, other in passed}, done.stdout


def test_a_seed_draws_the_same_share_each_time_and_another_seed_another_one() -> None:
    assert chosen(SEEDS[0], "group", NAMES, 4) == chosen(SEEDS[0], "group", NAMES, 4)
    assert {len(chosen(seed, "group", NAMES, 4)) for seed in SEEDS} == {10}
    assert len({tuple(chosen(seed, "group", NAMES, 4)) for seed in SEEDS}) == len(SEEDS)
    assert chosen(SEEDS[0], "group", NAMES, 4) != chosen(SEEDS[0], "another", NAMES, 4)
    assert chosen(SEEDS[0], "group", NAMES, 1) == NAMES


def test_commits_try_everything_in_time() -> None:
    assert {name for seed in SEEDS for name in chosen(seed, "group", NAMES, 4)} == set(NAMES)


def test_a_small_group_has_one_case_in_each_sample() -> None:
    assert [len(chosen(seed, "group", NAMES[:2], 10)) for seed in SEEDS] == [1] * len(SEEDS)


def test_a_place_with_several_lots_is_drawn_as_many_times_as_often_and_the_others_in_time() -> None:
    drawn = [chosen(f"{seed:x}", "group", ["often", "seldom"], 2, [4, 1]) for seed in range(500)]
    assert 350 < drawn.count(["often"]) < 450
    assert drawn.count(["often"]) + drawn.count(["seldom"]) == 500
    assert chosen(SEEDS[0], "group", NAMES, 4, [1] * len(NAMES)) == chosen(SEEDS[0], "group", NAMES, 4)


def test_everything_is_a_sample_too() -> None:
    assert chosen(EVERYTHING, "group", NAMES, 4) == NAMES


def test_places_of_seeds_are_those_that_are_tried_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = set[int]()
    for seed in SEEDS:
        monkeypatch.setattr(sampling, "SEED", seed)
        found = list(islice(places("group", 7, 3), 11))
        assert found == sorted(found)
        assert found[0] == 0
        assert [(each // 7 - 1) // 3 for each in found[1:]] == list(range(10))
        tried.update(found)
    monkeypatch.setattr(sampling, "SEED", EVERYTHING)
    everything = set(islice(places("group", 7, 3), 31))
    assert tried == everything == set(range(0, 7 * 31, 7))


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_pytest_runs_the_sample_in_each_worker_and_says_how_to_repeat_it(tmp_path: Path) -> None:
    alone, said = run(tmp_path, SEEDS[1], "-m", "not long")
    assert f"{VARIABLE}={SEEDS[1]} make test" in said
    assert "make test-long" in said
    assert sum(name.startswith("test_sampled[") for name in alone) == 3
    assert sum(name.startswith("test_of_all[") for name in alone) == 3
    kinds = {name for name in alone if name.startswith("test_of_kinds[")}
    assert {re.sub("store|cluster", "", name) for name in kinds} == {f"test_of_kinds[-{each}]" for each in range(20)}
    assert len(kinds) == 20, "each number has one of the two kinds"
    assert 0 < sum("cluster" in name for name in kinds) < 10, "and most have the first"
    opened = {name.partition("-")[0] for name in alone if name.startswith("test_of_functions[")}
    assert len(opened) == sum("test_of_functions" in name for name in alone) == 5, "each number has one of the two"
    assert "test_of_two[1]" in alone, "the only case that -m leaves is no sample's to leave out"
    assert run(tmp_path, SEEDS[1], "-m", "not long", "-n", "2")[0] == alone
    assert run(tmp_path, EVERYTHING)[0] == {
        *(f"test_sampled[{number}]" for number in range(12)),
        *(f"test_of_all[{number}]" for number in range(3)),
        *(f"test_of_kinds[{kind}-{number}]" for number in range(20) for kind in ("store", "cluster")),
        *(f"test_of_functions[{number}-{opened}]" for number in range(5) for opened in ("wal", "log")),
        "test_of_two[0]",
        "test_of_two[1]",
    }


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_a_share_of_the_tests_that_use_a_fixture_runs(tmp_path: Path) -> None:
    every = {
        *("test_first", "test_second"),
        *(f"test_third[{number}]" for number in range(4)),
        *(f"test_of_kinds[{kind}-{number}]" for kind in ("store", "cluster") for number in range(6)),
    }
    tried = set[str]()
    for seed in SEEDS[:3]:
        passed, _ = run(tmp_path, seed, tests=OF_A_CLUSTER)
        assert len(passed & every) == 4, "of twelve, as each number has one of two kinds"
        assert "test_without" in passed
        assert sum("test_apart" in name for name in passed) == 2, "its own marker holds"
        tried |= passed
    assert len(tried & every) > 4
    assert every < run(tmp_path, EVERYTHING, tests=OF_A_CLUSTER)[0]


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_a_share_of_the_tests_of_several_files_runs(tmp_path: Path) -> None:
    (tmp_path / "test_those.py").write_text(OF_A_GROUP, encoding="utf-8")
    _, said = run(tmp_path, SEEDS[1], tests=OF_A_GROUP)
    assert said.count("::test_it[") == 2, "of the eight of both files"
    assert said.count("::test_without PASSED") == 2
    assert run(tmp_path, EVERYTHING, tests=OF_A_GROUP)[1].count("::test_it[") == 8


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_a_test_that_is_named_runs_whatever_the_sample(tmp_path: Path) -> None:
    cases = [f"test_these.py::test_sampled[{number}]" for number in range(12)]
    assert len(run(tmp_path, SEEDS[1], *cases)[0]) == 12
    assert len(run(tmp_path, SEEDS[1], str(tmp_path / "test_these.py::test_sampled"))[0]) == 12
    assert len(run(tmp_path, SEEDS[1], "test_these.py")[0]) == 3 + 1 + 3 + 20 + 5


def test_the_seed_is_the_commit_whose_tests_run() -> None:
    found = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    ask = "from tests.sampling import SEED; print(SEED)"
    for given, expected in (("", found.stdout[:12] or sampling.NO_COMMIT), ("beef", "beef")):
        done = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, VARIABLE: given},
        )
        assert done.stdout.strip() == expected
