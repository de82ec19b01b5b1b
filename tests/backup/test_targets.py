"""Targets: what fails there leaves the backup as it was, and is named without a secret; two at once are noticed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.backup import back_up, list_backup_runs, restore_backup, verify_backup
from pybk.backup.backing_up import BackupRun
from pybk.backup.target import DirectoryTarget, target_error
from pybk.backup.target_url import open_target
from pybk.errors import CorruptError, StorageFailedError, StorageFullError, StorageRefusedError, UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.io.filesystem import FileSystem
from tests.backup.backup_harness import KNOWN, PASSWORD, HookedSource, backed_up, files, restored
from tests.storage.real_store import contents, numbered, open_quick

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    manager = open_quick(tmp_path / "store")
    manager.create_ledger(password=PASSWORD).append_many(numbered(20))
    yield manager
    manager.close()


def grow(manager: LedgerManager) -> None:
    manager.create_ledger(password=PASSWORD).append_many(numbered(20))


# ---- directories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StorageFullError), (errno.EIO, StorageFailedError)])
def test_a_directory_that_is_full_or_fails_has_the_backup_as_it_was(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    backed_up(manager, tmp_path / "backup")
    before = files(tmp_path / "backup")
    grow(manager)

    def fail(fs: FileSystem, path: str, data: bytes) -> None:
        Path(path + ".tmp").write_bytes(data[: len(data) // 2])
        raise OSError(number, os.strerror(number), path)

    with monkeypatch.context() as patched:
        patched.setattr("pybk.backup.target.replace_file", fail)
        with pytest.raises(kind, match=r"pack-00000002.*run the command again"):
            backed_up(manager, tmp_path / "backup")
    assert files(tmp_path / "backup") == before  # nothing half-written takes space either
    assert backed_up(manager, tmp_path / "backup").entries == 20


def test_what_a_killed_run_left_half_written_is_removed(manager: LedgerManager, tmp_path: Path) -> None:
    backed_up(manager, tmp_path / "backup")
    (tmp_path / "backup" / "pack-00000009.tmp").write_bytes(b"half a pack")
    assert not verify_backup(tmp_path / "backup").problems
    backed_up(manager, tmp_path / "backup")
    assert not list((tmp_path / "backup").glob("*.tmp"))


def test_a_directory_that_cannot_be_read_is_an_error_of_the_storage(manager: LedgerManager, tmp_path: Path) -> None:
    backed_up(manager, tmp_path / "backup")
    (tmp_path / "backup" / "pack-00000001").unlink()
    (tmp_path / "backup" / "pack-00000001").mkdir()
    with pytest.raises(StorageFailedError, match=r"reading .*pack-00000001"):
        restore_backup(tmp_path / "backup", tmp_path / "new")


@pytest.mark.parametrize("name", ["pack-00000001", "pack-00000002"])
def test_a_file_that_is_far_too_large_is_not_read(manager: LedgerManager, tmp_path: Path, name: str) -> None:
    backed_up(manager, tmp_path / "backup")
    os.truncate(tmp_path / "backup" / "pack-00000001", 1 << 42)
    with pytest.raises(CorruptError, match=f"{1 << 42} bytes, but at most"):
        restore_backup(tmp_path / "backup", tmp_path / "new")
    assert "but at most" in verify_backup(tmp_path / "backup").problems[0]
    if name == "pack-00000002":  # that no run names: it is removed
        (tmp_path / "backup" / "pack-00000001").rename(tmp_path / "backup" / name)
        backed_up(manager, tmp_path / "backup")
        assert not (tmp_path / "backup" / name).exists()


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = DirectoryTarget(str(tmp_path), writes=True)
    target.put("run-00000001", b"first")
    with pytest.raises(StorageRefusedError, match="another process writes to this backup"):
        target.put("run-00000001", b"second")
    assert target.read("run-00000001", 5) == b"first"
    target.remove("run-00000001")
    target.remove("run-00000001")
    target.close()


# ---- URLs ------------------------------------------------------------------------------------------------------------


def test_two_backups_at_once_at_a_url_leave_one_sound_backup(manager: LedgerManager, tmp_path: Path) -> None:
    url = f"memory://twice/{tmp_path.name}"
    backed_up(manager, url)
    grow(manager)

    def run(after_cut: object = lambda cuts: None) -> BackupRun:
        source = HookedSource(manager, after_cut)  # type: ignore[arg-type]
        return BackupRun(source, open_target(url, writes=True), KNOWN, lambda done, total: None, pack_bytes=100)

    def overtake(_: int) -> None:
        grow(manager)
        assert run().run().run == 2

    # One that ends while the other copies: the other finds its pack.
    with pytest.raises(StorageRefusedError, match=r"pack-00000002 has appeared meanwhile"):
        run(overtake).run()
    assert [each.run for each in list_backup_runs(url)] == [1, 2]
    assert not verify_backup(url, passwords=KNOWN).problems
    # One that has nothing to copy finds the other's run.
    with pytest.raises(StorageRefusedError, match=r"run-00000003 has appeared meanwhile"):
        run(lambda cuts: backed_up(manager, url)).run()
    assert not verify_backup(url, passwords=KNOWN).problems
    grow(manager)
    backed_up(manager, url)
    restore_backup(url, tmp_path / "new", passwords=KNOWN)
    assert [each for each in fsspec.filesystem("memory").ls(url, detail=False) if each.endswith(".tmp")] == []
    with open_quick(tmp_path / "new") as again:
        assert len(list(again.list_ledgers())) == 4


@pytest.mark.parametrize("method", ["ls", "cat_file", "pipe_file", "mv", "makedirs", "rm_file"])
def test_errors_of_all_kinds_are_errors_of_the_storage(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Backends raise those of their network libraries."""
    url = f"memory://failing/{tmp_path.name}"
    backed_up(manager, url)
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"{url}/pack-00000002", b"damaged")  # so that a file is removed
    grow(manager)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("connection lost")

    with monkeypatch.context() as patched:
        patched.setattr(type(memory), method, fail)
        with pytest.raises(StorageFailedError, match="connection lost; run the command again"):
            backed_up(manager, url)
    assert [each.run for each in list_backup_runs(url)] == [1]
    assert backed_up(manager, url).entries == 20
    assert not verify_backup(url, passwords=KNOWN).problems


def test_a_password_in_a_url_is_not_shown(manager: LedgerManager, tmp_path: Path) -> None:
    for url in ("unheard-of://me:s3cret@host/path", "memory://me:s3cret@host/a[b"):
        with pytest.raises(UsageError, match=r"://\.\.\.@host") as caught:
            back_up(manager, url)
        assert "s3cret" not in str(caught.value)
    with pytest.raises(UsageError, match=r"there is no backup at memory://\.\.\.@host/path") as caught:
        verify_backup("memory://me:s3cret@host/path")


def test_no_part_of_a_password_is_shown_with_what_a_library_says() -> None:
    said = str(target_error(OSError("403 for s3://me:s3@cr:et@host:80/a"), "reading x"))
    assert "403 for s3://...@host:80/a" in said
    assert "cr" not in said


def test_a_server_that_cannot_be_reached_is_an_error_of_the_storage(manager: LedgerManager, tmp_path: Path) -> None:
    """FTP connects when it is opened; nothing listens at port 1."""
    with pytest.raises(StorageFailedError, match=r"opening ftp://\.\.\.@127\.0\.0\.1:1/x failed: Conn") as caught:
        back_up(manager, "ftp://me:s3cret@127.0.0.1:1/x")
    assert "s3cret" not in str(caught.value)


def test_a_chain_of_file_systems_is_no_directory(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    backed_up(manager, f"dir::memory://chained/{tmp_path.name}")
    assert sorted(tmp_path.iterdir()) == before
    assert verify_backup(f"dir::memory://chained/{tmp_path.name}", passwords=KNOWN).complete


def test_a_store_that_lists_the_directory_itself(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some object stores have an object for a directory."""
    memory = fsspec.filesystem("memory")
    ls = type(memory).ls

    def with_itself(self: object, path: str, detail: bool = True, **options: object) -> object:
        return [*ls(self, path, detail=detail, **options), path + "/"]

    url = f"memory://marked/{tmp_path.name}"
    memory.makedirs(url)
    monkeypatch.setattr(type(memory), "ls", with_itself)
    assert backed_up(manager, url).entries == 20


def test_files_of_a_local_file_system_of_fsspec(manager: LedgerManager, tmp_path: Path) -> None:
    """Real files by fsspec: what is written and renamed there is what a directory has."""
    url = f"local://{tmp_path}/by fsspec"
    backed_up(manager, url)
    grow(manager)
    assert backed_up(manager, url).entries == 20
    assert sorted(files(tmp_path / "by fsspec")) == [
        "base-00000000",
        "pack-00000001",
        "pack-00000002",
        "run-00000001",
        "run-00000002",
    ]
    with open_quick(restored(tmp_path / "by fsspec", tmp_path / "new")) as again:
        assert all(contents(again, each, PASSWORD) == numbered(20) for each in again.list_ledgers())
