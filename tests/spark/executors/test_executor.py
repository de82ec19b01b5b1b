"""Which process is an executor, and the files by which tasks and bookies find each other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.errors import IllegalOperationError, UsageError
from pybk.spark.executors.executor import (
    Executor,
    ExecutorBookie,
    Process,
    executor_bookie,
    is_locked,
    local_bookie,
    read_state,
    take_lock,
    write_state,
)

URL = "lmdb:///there/is/none"


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def bookie_of(executor: Executor) -> ExecutorBookie:
    return ExecutorBookie("3", "executor_h_3", "h-slot-0", "00" * 16, "tcp://127.0.0.1:1", "/data/slot-0", executor.pid)


def test_a_process_is_known_by_its_number_and_its_start(sleeper: subprocess.Popen[bytes]) -> None:
    process = Process.of(sleeper.pid)
    alive = [process.is_alive(), Process(process.pid, process.started - 1).is_alive()]
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    alive.append(process.is_alive())  # it is a zombie
    sleeper.wait()
    alive.append(process.is_alive())
    assert alive == [True, False, False, False]
    with pytest.raises(IllegalOperationError, match="no process"):
        Process.of(process.pid)


def test_calls_outside_of_a_task_are_refused() -> None:
    for find in (Executor.of_task, Executor.of_daemon):
        with pytest.raises(IllegalOperationError):
            find()
    assert local_bookie(URL) is None


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("lmdb:///srv/a b", ["lmdb:///srv/a b/", "LMDB:///srv//a%20b", "lmdb:////srv/x/../a b"], "lmdb:///srv/A b"),
        ("zk://a:1,b:2/x", ["zk://b:2,A:1/x/", "ZK://a:1,b:2//x"], "zk://a:1,b:2/X"),
        ("zk://a:1/x", ["zk://a:1/x"], "zk://a:1,b:2/x"),
    ],
)
def test_a_cluster_is_the_same_however_its_url_is_spelled(one: str, same: list[str], other: str) -> None:
    executor = Executor(1, 2)
    assert {executor.file(url, "lock") for url in same} == {executor.file(one, "lock")}
    assert executor.file(other, "lock") != executor.file(one, "lock")


def test_a_lock_is_held_by_one_process_and_by_those_that_inherit_it(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    assert not is_locked(path)
    fd = take_lock(path)
    assert fd is not None
    assert is_locked(path)
    assert take_lock(path) is None
    told, end = os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.read(told, 1)  # until the parent closes its end
        os._exit(0)
    os.close(told)
    os.close(fd)
    assert is_locked(path), "the child has it"
    os.close(end)
    os.waitpid(child, 0)
    assert not is_locked(path)


def test_a_lock_that_was_removed_is_another_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    first = take_lock(path)
    os.unlink(path)
    second = take_lock(path)
    assert first is not None
    assert second is not None
    assert take_lock(path) is None


def test_a_bookie_is_found_while_its_process_has_the_lock(sleeper: subprocess.Popen[bytes]) -> None:
    executor = Executor.of(sleeper.pid)
    written = bookie_of(executor)
    written.write(executor.file(URL, "json"))
    assert executor_bookie(executor, URL) is None, "its process is gone, and left the file behind"
    fd = take_lock(executor.file(URL, "lock"))
    assert fd is not None
    assert executor_bookie(executor, URL) == written
    assert executor_bookie(executor, URL + "/else") is None
    assert executor_bookie(Executor(executor.pid, executor.started + 1), URL) is None
    os.unlink(executor.file(URL, "json"))
    assert executor_bookie(executor, URL, wait_s=0.05) is None, "it is starting, and takes long"
    os.close(fd)


def test_a_state_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    assert read_state(path) is None
    write_state(path, {"a": 1})
    write_state(path, {"b": [2]})
    assert read_state(path) == {"b": [2]}
    assert os.listdir(tmp_path) == ["state"]
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_directory_that_others_can_write_is_refused(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    executor = Executor.of(sleeper.pid)
    directory = tmp_path / f"pybk-{os.getuid()}"
    assert os.path.dirname(executor.file(URL, "lock")) == str(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    with pytest.raises(UsageError, match="only this user can access"):
        executor.file(URL, "lock")
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="only this user can access"):
        executor.file(URL, "lock")


def test_a_task_continues_without_a_bookie_if_others_own_the_directory(
    sleeper: subprocess.Popen[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = Executor.of(sleeper.pid)
    monkeypatch.setattr(Executor, "of_task", lambda: executor)
    assert local_bookie(URL) is None
    assert caplog.text == ""
    (tmp_path / f"pybk-{os.getuid()}").chmod(0o755)
    assert local_bookie(URL) is None
    assert "is not a directory that only this user can access" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert local_bookie(URL) is None
    assert "No such file or directory" in caplog.text
