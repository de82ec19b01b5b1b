"""What the disk may forget is forgotten, at many points of recorded runs; nothing acknowledged is.

``python -m tests.loss`` cuts more, and leaves out the syncs of every call site.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

import pytest

from pybk.storage.io.lmdb_environment import LmdbEnvironment
from tests.loss.campaign import Cut, Run, room
from tests.loss.covered import COVERED, site_of
from tests.loss.disk import Disk, Loss
from tests.loss.recording import why_not
from tests.loss.test_disk import recorded
from tests.loss.workloads.every import WORKLOADS
from tests.paths import ROOT
from tests.sampling import sample

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"nothing can be recorded: {why_not()}")

_CUTS: Final = 25
_CUTS_WITHOUT: Final = 60
_CUTS_AGAIN: Final = 8
_CUTS_BETWEEN: Final = 60
_LOSSES_OF_NAMES: Final = (Loss.ALL, Loss.DATA, Loss.NAMES)
_SLOW: Final = {
    "rebuilt",
    "harmed",
    "levels",
    "moves",
    "catalogs",
    "full",
    "copies",
    "salvage",
    "log",
    "subscription",
    "blobs",
    "snapshots",
    "backups",
    "bookies",
    "files",
}
_LONG: Final = pytest.mark.long


@pytest.fixture
def space() -> Iterator[Path]:
    with room() as path:
        yield path


@pytest.fixture(scope="module")
def creation() -> Iterator[Run]:
    with room() as path:
        yield Run.of("creation", 1, path)


@pytest.fixture(scope="module")
def full() -> Iterator[Run]:
    """Return a run that takes reserved files, exchanges catalogs and packs files."""
    with room() as path:
        yield Run.of("full", 1, path)


def needed(run: Run, system_call: str, *lines: str) -> bool:
    """Return whether a cut shows that the one call site with these lines is needed."""
    [call] = [each for each in run.syncs if each.startswith(system_call) and all(line in each for line in lines)]
    return run.failure_without(call, Random(1), _CUTS_WITHOUT) is not None


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_acknowledged_is_lost_when_the_power_is_cut(name: str) -> None:
    with room() as path:
        run = Run.of(name, 1, path)
        assert not list(run.failures(run.random_cuts(Random(1), _CUTS)))


@pytest.mark.sampled(one_in=10, group="cuts")
@pytest.mark.parametrize("name", [pytest.param(name, marks=_LONG if name in _SLOW else ()) for name in WORKLOADS])
def test_nothing_acknowledged_is_lost_by_a_cut_in_the_recovery_from_a_kill_or_a_cut(name: str) -> None:
    with room() as path:
        run = Run.of(name, 1, path)
        choice = Random(f"again {name}")
        sync = choice.choice(run.syncs[choice.choice(list(run.syncs))])
        with room() as of_killed:
            killed = Run.of_killed(name, 1, of_killed, max(sync, 1))
            killed.recover()
            assert not list(killed.failures(killed.random_cuts(choice, _CUTS_AGAIN)))
        with room() as of_cut:
            (cut,) = run.random_cuts(choice, 1)
            again = run.cut_run(cut, of_cut)
            again.recover()
            assert not list(again.failures(again.random_cuts(choice, _CUTS_AGAIN)))


@pytest.mark.sampled(one_in=10, group="cuts")
def test_the_name_of_a_directory_that_a_killed_process_made_is_durable() -> None:
    with room() as path:
        made = [number for number, each in enumerate(Run.of("ledgers", 1, path).records) if each.name == "lib"]
    with room() as path:
        killed = Run.of_killed("ledgers", 1, path, made[0] + 1)
        killed.recover()
        assert killed.records[killed.first - 1].name == "lib"
        assert not list(killed.failures([Cut(len(killed.records), Loss.ALL, 1)]))


@pytest.mark.sampled(one_in=10, group="cuts")
def test_a_cluster_that_is_made_after_a_cut_that_left_nothing_is_durable(space: Path) -> None:
    run = Run.of("bookie", 1, space)
    with room() as path:
        again = run.cut_run(Cut(0, Loss.ALL, 0), path)
        again.recover()
        assert not list(again.failures([Cut(len(again.records), Loss.ALL, 1)]))


def test_an_lmdb_environment_opens_after_any_loss_in_its_making(space: Path) -> None:
    made = "from pybk.storage.io.lmdb_environment import LmdbEnvironment; LmdbEnvironment('e').close()"
    inode, done = recorded(space, made)
    for position in range(len(done) + 1):
        for loss in Loss:
            for seed in range(3):
                disk, path = Disk(inode), space / f"{position} {loss.name} {seed}"
                for each in done[:position]:
                    disk.apply(each)
                disk.write_cut(path, loss, Random(seed))
                environment = LmdbEnvironment(str(path / "e"))
                with environment.write() as transaction:
                    transaction.put(b"key", b"value")
                environment.close()


@pytest.mark.parametrize("site", COVERED)
def test_a_covered_sync_is_one_of_pybk_that_something_verifies(site: str) -> None:
    _, _, file, function = site.split()
    assert f"def {function}(" in (ROOT / "src" / "pybk" / file).read_text()
    covered = COVERED[site]
    assert bool(covered.workload) != bool(covered.test)
    if covered.test:
        file, function = covered.test.split()
        assert f"def {function}(" in (ROOT / file).read_text()


@pytest.mark.long
@pytest.mark.parametrize("site", [site for site, covered in COVERED.items() if covered.workload])
def test_nothing_is_lost_with_what_a_covered_sync_wrote_until_the_next_sync(site: str) -> None:
    with room() as path:
        run = Run.of(COVERED[site].workload, 1, path)
        calls = [call for call in run.syncs if site_of(call) == site]
        assert calls
        for call in calls:
            cuts = list(run.cuts_between(call))
            assert not list(run.wrong_after(Random(1).sample(cuts, min(len(cuts), _CUTS_BETWEEN)), call))


@pytest.mark.sampled(one_in=10, group="cuts")
def test_the_name_of_a_log_file_that_was_taken_from_the_reserve_is_durable(full: Run) -> None:
    """And what is lost is no file that was put there without a sync, and zeroed when it was taken again."""
    taken = [
        number
        for number, each in enumerate(full.records)
        if each.name.startswith("reserve-") and each.name.endswith(".log")
    ]
    assert len(taken) > 3
    cuts = [Cut(number + after, loss, 1) for number in taken for after in range(5) for loss in _LOSSES_OF_NAMES]
    assert not list(full.failures(sample("taken from the reserve", cuts, 12)))
    [call] = [each for each in full.syncs if "preallocation.py" in each and "_sync_directory" in each]
    [*syncs] = [next(sync for sync in full.syncs[call] if sync > number) for number in taken]
    cuts = [Cut(position, Loss.ALL, 1) for sync in syncs for position in range(sync + 1, sync + 8)]
    assert next(full.wrong_after(cuts, call), None)


@pytest.mark.sampled(one_in=10, group="cuts")
def test_nothing_is_lost_when_catalogs_change_places_with_the_spare_file(full: Run) -> None:
    moved = [
        number
        for number, each in enumerate(full.records)
        if "/" in each.name and "reserve-catalog" in each.name.split("/")
    ]
    assert len(moved) > 3
    cuts = [Cut(number + after, loss, 1) for number in moved for after in range(5) for loss in _LOSSES_OF_NAMES]
    assert not list(full.failures(sample("change places with the spare file", cuts, max(1, len(cuts) // 20))))


@pytest.mark.sampled(one_in=10, group="cuts")
def test_nothing_is_lost_when_a_packed_file_changes_places_with_the_reserve(full: Run) -> None:
    moved = [number for number, each in enumerate(full.records) if "reserve-pack" in each.name]
    assert any(full.records[number].name.endswith(".cold") for number in moved)
    cuts = [Cut(number + after, loss, 1) for number in moved for after in range(5) for loss in _LOSSES_OF_NAMES]
    assert not list(full.failures(sample("changes places with the reserve", cuts, max(1, len(cuts) // 20))))


def test_the_sync_of_an_append_is_needed(creation: Run) -> None:
    assert needed(creation, "write", "log/commit.py")


def test_the_sync_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    assert needed(creation, "fdatasync", "lmdb_environment.py", " _make_file", "open_environment")


def test_the_name_of_a_new_lmdb_file_is_needed(creation: Run) -> None:
    [call, _] = [each for each in creation.syncs if "sync_directory" in each and "open_environment" in each]
    assert creation.failure_without(call, Random(1), _CUTS_WITHOUT) is not None
