"""Removal of old runs: the others stay as they are, at a stop at any point, too."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pybk.backup import list_backup_runs, prune_backup, prune_backup_async, restore_backup, verify_backup
from pybk.backup.backing_up import BackupRun
from pybk.backup.chain import existing_chain
from pybk.backup.pruning import Pruning
from pybk.backup.target import DirectoryTarget
from pybk.backup.target_url import open_target
from pybk.errors import CorruptError, StoreLockedError, UsageError
from pybk.manager.ledger_manager import LedgerManager
from tests.backup.backup_harness import (
    KNOWN,
    PASSWORD,
    HookedSource,
    StoppedError,
    backed_up,
    files,
    restored,
    run_with,
)
from tests.internals import store_of
from tests.storage.real_store import contents, numbered, open_quick

RUNS = 4


def made(manager: LedgerManager, backup: Path | str) -> list[dict[int, list[bytes]]]:
    """Make runs, of which each has a new ledger, a longer one, and one less; return the ledgers of each."""
    states = []
    store = store_of(manager)
    longer = manager.create_ledger(password=PASSWORD)
    last = None
    for run in range(RUNS):
        longer.append_many(numbered(50, 50 * run))
        if last is not None:
            manager.delete_ledger(last.metadata.ledger_id)
        last = manager.create_ledger(password=PASSWORD)
        last.append_many([b"of run %d" % run] * 20)
        if run < 3:
            found = store.named.get("group/name")
            store.named.compare_and_set("group/name", found and found.version, b"%d" % run, level=store.feature_level)
        backed_up(manager, backup)
        states.append({each: contents(manager, each, PASSWORD) for each in manager.list_ledgers()})
    return states


@pytest.fixture
def states(tmp_path: Path) -> list[dict[int, list[bytes]]]:
    """The ledgers of each run of the backup ``backup`` of the store ``store``."""
    with open_quick(tmp_path / "store") as manager:
        return made(manager, tmp_path / "backup")


def check_runs(backup: Path, states: list[dict[int, list[bytes]]], scratch: Path) -> None:
    """Check that each run that is there can be restored, with what it had."""
    report = verify_backup(backup, passwords=KNOWN)
    assert not report.problems
    for run in report.runs:
        with open_quick(restored(backup, scratch / f"of run {run.run}", run=run.run)) as again:
            assert {each: contents(again, each, PASSWORD) for each in again.list_ledgers()} == states[run.run - 1]
            named = store_of(again).named.get("group/name")
            assert named is not None
            assert named.value == b"%d" % min(run.run - 1, 2)
    shutil.rmtree(scratch)


def test_the_runs_that_are_kept_stay_as_they_were(tmp_path: Path, states: list[dict[int, list[bytes]]]) -> None:
    backup = tmp_path / "backup"
    before = files(backup)
    planned = prune_backup(backup, keep=2, dry_run=True)
    assert files(backup) == before
    report = prune_backup(backup, keep=2)
    assert report == planned
    assert ([run.run for run in report.removed], [run.run for run in report.kept]) == ([1, 2], [3, 4])
    after = files(backup)
    assert sorted(after) == ["base-00000003", *(f"pack-{number:08d}" for number in range(1, 5)), "run-00000004"]
    assert report.packs == 0  # each has entries of the ledger that grew
    assert {name: data for name, data in before.items() if name in after} == {
        name: data for name, data in after.items() if name != "base-00000003"
    }
    check_runs(backup, states, tmp_path / "scratch")
    with pytest.raises(UsageError, match="has no run 2; its runs are 3 to 4"):
        restore_backup(backup, tmp_path / "new", run=2)
    # What continues it is as before.
    with open_quick(tmp_path / "store") as manager:
        again = backed_up(manager, backup)
    assert (again.run, again.entries, again.changed) == (5, 0, 0)
    assert [(run.run, run.changed) for run in list_backup_runs(backup)] == [(3, 2), (4, 2), (5, 0)]
    assert [run.run for run in prune_backup(backup, keep=1).removed] == [3, 4]
    check_runs(backup, [*states, states[-1]], tmp_path / "scratch")


def test_packs_that_no_kept_run_needs_are_removed(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    with open_quick(tmp_path / "store") as manager:
        for _ in range(3):
            writer = manager.create_ledger(password=PASSWORD)
            writer.append_many(numbered(20))
            backed_up(manager, backup)
            manager.delete_ledger(writer.metadata.ledger_id)
        before = files(backup)
        report = prune_backup(backup, keep=2)
        assert (report.packs, report.nbytes) == (1, len(before["pack-00000001"]))
        backed_up(manager, backup)  # has no ledger
        assert prune_backup(backup, keep=1).packs == 2
        assert sorted(files(backup)) == ["base-00000004"]
        writer = manager.create_ledger(password=PASSWORD)
        writer.append_many(numbered(20))
        assert backed_up(manager, backup).entries == 20
    assert verify_backup(backup, passwords=KNOWN).entries == 20


def test_runs_are_kept_by_their_age(
    tmp_path: Path, states: list[dict[int, list[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = tmp_path / "backup"
    ended = [run.created_ns for run in list_backup_runs(backup)]

    def removed(now: int, seconds: float, keep: int = 1) -> list[int]:
        monkeypatch.setattr(time, "time_ns", lambda: now)
        return [run.run for run in prune_backup(backup, keep=keep, keep_seconds=seconds, dry_run=True).removed]

    assert removed(ended[1] + 10**9, 1) == [1]
    assert removed(ended[1] + 10**9, 1, keep=4) == []
    assert removed(ended[3] + 10**12, 1) == [1, 2, 3]  # the last stays
    assert removed(ended[0] - 10**12, 0) == []  # the clock went back, and nothing is old


class StoppingPruneTarget(DirectoryTarget):
    """A directory whose change number ``stop_at`` is cut off, before or after it is made."""

    def __init__(self, path: Path, stop_at: int, *, after: bool) -> None:
        super().__init__(str(path), writes=True)
        self._changes = 0
        self._stop_at = stop_at
        self._after = after

    def _change(self, call: Callable[[], None], name: str) -> None:
        self._changes += 1
        if self._changes != self._stop_at or self._after:
            call()
        if self._changes == self._stop_at:
            raise StoppedError(name)

    def put(self, name: str, data: bytes) -> None:
        self._change(lambda: DirectoryTarget.put(self, name, data), name)

    def remove(self, name: str) -> None:
        self._change(lambda: DirectoryTarget.remove(self, name), name)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("how", ["prune", "back up"])
def test_a_removal_that_is_cut_off_anywhere_is_finished_by_what_comes_next(
    tmp_path: Path, states: list[dict[int, list[bytes]]], after: bool, how: str
) -> None:
    with open_quick(tmp_path / "store") as manager:
        for each in manager.list_ledgers():  # so that packs are removed
            manager.delete_ledger(each)
        backed_up(manager, tmp_path / "backup")
        states = [*states, {}]
        whole = tmp_path / "whole"
        shutil.copytree(tmp_path / "backup", whole, ignore=shutil.ignore_patterns("LOCK"))
        assert prune_backup(whole, keep=1).packs == RUNS
        assert sorted(files(whole)) == ["base-00000005"]
        for stop_at in range(1, 100):
            backup = tmp_path / f"backup-{stop_at}"
            shutil.copytree(tmp_path / "backup", backup, ignore=shutil.ignore_patterns("LOCK"))
            target = StoppingPruneTarget(backup, stop_at, after=after)
            try:
                Pruning(target, keep=1, keep_seconds=None).run()
            except StoppedError:
                pass
            else:
                target.close()
                break
            target.close()
            runs = [run.run for run in list_backup_runs(backup)]
            assert runs == ([5] if stop_at > 1 or after else [1, 2, 3, 4, 5])
            check_runs(backup, states, tmp_path / "scratch")
            if how == "prune":
                prune_backup(backup, keep=1)
                assert files(backup) == files(whole)
            elif runs == [5]:
                assert backed_up(manager, backup).continued_entries == 0
                assert sorted(files(backup)) == sorted([*files(whole), "run-00000006"])
            shutil.rmtree(backup)
        else:
            raise AssertionError("the removal never ended")
        assert stop_at > 8


def test_a_run_beside_a_removal_is_not_harmed(tmp_path: Path) -> None:
    """At a URL nothing is locked: the run has read the backup before runs are removed, and writes after it."""
    pytest.importorskip("fsspec")
    url = f"memory://pruned/{tmp_path.name}"
    with open_quick(tmp_path / "store") as manager:
        states = made(manager, url)
        target = open_target(url, writes=True)
        source = HookedSource(manager, lambda cuts: None)
        run = BackupRun(source, target, KNOWN, lambda done, total: None)
        manager.create_ledger(password=PASSWORD).append_many(numbered(5))
        assert len(prune_backup(url, keep=1).removed) == RUNS - 1
        assert run.run().entries == 5
        assert not verify_backup(url, passwords=KNOWN).problems
        restore_backup(url, tmp_path / "new", run=RUNS, passwords=KNOWN)
    with open_quick(tmp_path / "new") as again:
        assert {each: contents(again, each, PASSWORD) for each in again.list_ledgers()} == states[-1]


def test_files_that_a_stop_left_at_a_url_are_removed(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://left/{tmp_path.name}"
    with open_quick(tmp_path / "store") as manager:
        backed_up(manager, url)
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{url}/pack-00000001.12345678.tmp", b"half")
    assert not verify_backup(url).problems
    prune_backup(url, keep=1)
    assert not [name for name in memory.ls(url, detail=False) if name.endswith(".tmp")]


def test_what_cannot_be_removed_is_refused(tmp_path: Path, states: list[dict[int, list[bytes]]]) -> None:
    with pytest.raises(UsageError, match="there is no backup"):
        prune_backup(tmp_path / "nothing", keep=1)
    assert not (tmp_path / "nothing").exists()
    backup = tmp_path / "backup"
    for keep in (0, -1, 1.5, True, None):
        with pytest.raises(UsageError, match="keep is"):
            prune_backup(backup, keep=keep)  # type: ignore[arg-type]
    for seconds in (-1, float("nan"), float("inf"), "1d", True):
        with pytest.raises(UsageError, match="keep_seconds is"):
            prune_backup(backup, keep=1, keep_seconds=seconds)  # type: ignore[arg-type]
    before = files(backup)
    target = DirectoryTarget(str(backup), writes=True)
    try:
        with pytest.raises(StoreLockedError):
            prune_backup(backup, keep=1)
    finally:
        target.close()
    (backup / "run-00000002").write_bytes(before["run-00000002"][:-1])
    with pytest.raises(CorruptError, match="run-00000002"):
        prune_backup(backup, keep=1)
    assert {**files(backup), "run-00000002": before["run-00000002"]} == before


def test_a_base_does_not_stand_for_a_run_nor_a_run_for_a_base(
    tmp_path: Path, states: list[dict[int, list[bytes]]]
) -> None:
    backup = tmp_path / "backup"
    before = files(backup)
    prune_backup(backup, keep=2)
    base = files(backup)["base-00000003"]
    (backup / "base-00000003").write_bytes(before["run-00000003"])
    with pytest.raises(CorruptError, match="base-00000003"):
        existing_chain(DirectoryTarget(str(backup), writes=False))
    (backup / "base-00000003").unlink()
    for name in ("base-00000000", "run-00000001", "run-00000002"):
        (backup / name).write_bytes(before[name])
    (backup / "run-00000003").write_bytes(base)
    with pytest.raises(CorruptError, match="run-00000003"):
        existing_chain(DirectoryTarget(str(backup), writes=False))


def test_the_asyncio_form(tmp_path: Path, states: list[dict[int, list[bytes]]]) -> None:
    report = asyncio.run(prune_backup_async(tmp_path / "backup", keep=3))
    assert [run.run for run in report.removed] == [1]
    assert prune_backup_async.__name__ == "prune_backup_async"


def test_a_run_in_a_pruned_backup_that_is_cut_off_is_continued(
    tmp_path: Path, states: list[dict[int, list[bytes]]]
) -> None:
    prune_backup(tmp_path / "backup", keep=1)
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(password=PASSWORD).append_many(numbered(500))

        class Stopping(DirectoryTarget):
            def put(self, name: str, data: bytes) -> None:
                if name.startswith("run-"):
                    raise StoppedError(name)
                super().put(name, data)

        with pytest.raises(StoppedError):
            run_with(HookedSource(manager, lambda cuts: None), Stopping(str(tmp_path / "backup"), writes=True))
        again = backed_up(manager, tmp_path / "backup")
    assert (again.run, again.entries, again.continued_entries) == (RUNS + 1, 0, 500)
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).complete
