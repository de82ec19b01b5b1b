"""What the disk may forget is forgotten, at many points of recorded runs; nothing acknowledged is.

``python -m tests.loss`` cuts more, and leaves out the syncs of every call site.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.loss.campaign import Cut, Run, room
from tests.loss.covered import COVERED, site_of
from tests.loss.disk import Loss
from tests.loss.recording import why_not
from tests.loss.workloads.every import WORKLOADS
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"nothing can be recorded: {why_not()}")

_CUTS: Final = 25
_CUTS_WITHOUT: Final = 60
_CUTS_AGAIN: Final = 8
_SLOW: Final = {"rebuilt", "salvage", "log", "subscription", "blobs", "snapshots", "backups", "bookies", "files"}
_LONG: Final = pytest.mark.long


@pytest.fixture(scope="module")
def space() -> Iterator[Path]:
    with room() as path:
        yield path


@pytest.fixture(scope="module")
def creation(space: Path) -> Run:
    return Run.of("creation", 1, space)


def needed(run: Run, system_call: str, *lines: str) -> bool:
    """Return whether a cut shows that the one call site with these lines is needed."""
    [call] = [each for each in run.syncs if each.startswith(system_call) and all(line in each for line in lines)]
    return run.failure_without(call, Random(1), _CUTS_WITHOUT) is not None


@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_acknowledged_is_lost_when_the_power_is_cut(name: str) -> None:
    with room() as path:
        run = Run.of(name, 1, path)
        assert not list(run.failures(run.random_cuts(Random(1), _CUTS)))


@pytest.mark.parametrize("name", [pytest.param(name, marks=_LONG if name in _SLOW else ()) for name in WORKLOADS])
def test_nothing_acknowledged_is_lost_by_a_cut_in_the_recovery_from_a_kill_or_a_cut(name: str) -> None:
    with room() as path:
        run = Run.of(name, 1, path)
        choice = Random(f"again {name}")
        sync = choice.choice(run.syncs[choice.choice(list(run.syncs))])
        with room() as of_killed:
            killed = Run.of_killed(name, 1, of_killed, max(sync, 1))
            assert not list(killed.failures(killed.random_cuts(choice, _CUTS_AGAIN)))
        with room() as of_cut:
            (cut,) = run.random_cuts(choice, 1)
            again = run.cut_run(cut, of_cut)
            assert not list(again.failures(again.random_cuts(choice, _CUTS_AGAIN)))


def test_the_name_of_a_directory_that_a_killed_process_made_is_durable() -> None:
    with room() as path:
        made = [number for number, each in enumerate(Run.of("ledgers", 1, path).records) if each.name == "lib"]
    with room() as path:
        killed = Run.of_killed("ledgers", 1, path, made[0] + 1)
        assert killed.records[killed.first - 1].name == "lib"
        assert not list(killed.failures([Cut(len(killed.records), Loss.ALL, 1)]))


@pytest.mark.parametrize("site", COVERED)
def test_a_covered_sync_is_one_of_pybk(site: str) -> None:
    _, _, file, function = site.split()
    code = (ROOT / "src" / "pybk" / file).read_text()
    assert f"def {function}(" in code


def test_covered_syncs_are_found_in_a_run(creation: Run) -> None:
    sites = {site_of(call) for call in creation.syncs}
    assert {site for site in COVERED if "watermark.py" in site or "catalog.py" in site} <= sites


def test_the_sync_of_an_append_is_needed(creation: Run) -> None:
    assert needed(creation, "write", "commit_writer.py")


def test_the_sync_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    assert needed(creation, "fdatasync", "lmdb_environment.py", " __init__", "open_environment")


def test_the_name_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    [call, _] = [each for each in creation.syncs if "sync_directory" in each and "open_environment" in each]
    assert creation.failure_without(call, Random(1), _CUTS_WITHOUT) is not None
