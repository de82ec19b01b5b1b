"""LMDB as a metadata store: several processes, some killed, some stopped, and what a damaged or full one says."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from pybk.errors import (
    CorruptError,
    ForkedProcessError,
    MetadataUnreachableError,
    MetadataVersionError,
    StorageFullError,
    UnsupportedFormatError,
)
from pybk.metadata import host_file, lmdb_records, lmdb_store
from pybk.metadata.host_file import SESSION_SLOTS, HostFile, is_stopped
from pybk.metadata.lmdb_store import LmdbTree
from pybk.storage.io import lmdb_environment
from pybk.storage.io.lmdb_environment import LmdbEnvironment, ReadTransaction
from tests.metadata.harness import wait_for
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import WAIT_S, stop

# Longer than a process waits for its turn on a machine that is busy, and than any test waits.
SHORT_SESSION_S = 4.0
LONG_SESSION_S = 600.0


@contextmanager
def child(path: Path, task: str, session_timeout_s: float = LONG_SESSION_S) -> Iterator[subprocess.Popen[str]]:
    """Run a process of its own on the store; killed at the end, however it was left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.metadata.lmdb_child", str(path), task, str(session_timeout_s)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process tells."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[LmdbTree]:
    """A store."""
    tree = LmdbTree(str(tmp_path / "metadata"), timeout_s=WAIT_S, session_timeout_s=LONG_SESSION_S)
    yield tree
    tree.close()


def test_a_killed_process_loses_its_leases_at_once(tree: LmdbTree, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "lease") as process:
        assert line_of(process) == "leased"
        gone = threading.Event()
        tree.watch("lease", lambda: gone.set() if tree.get("lease") is None else None)
        assert tree.get("lease") is not None
        process.kill()
        process.wait()
        assert gone.wait(WAIT_S), "by its lock, before the timeout"


def test_a_killed_process_makes_room_for_who_creates_at_once(tree: LmdbTree, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "lease") as process:
        assert line_of(process) == "leased"
        process.kill()
        process.wait()
        tree.create("lease", b"next", leased=True)


def test_a_stopped_process_loses_its_leases_and_notices_when_it_goes_on(tree: LmdbTree, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "lease", SHORT_SESSION_S) as process:
        assert line_of(process) == "leased"
        tree.session()
        time.sleep(1.5 * SHORT_SESSION_S)
        assert tree.get("lease") is not None, "it gives signs of life"
        stop(process.pid)
        stopped = time.monotonic()
        assert wait_for(lambda: tree.get("lease") is None)
        assert time.monotonic() - stopped > 0.5 * SHORT_SESSION_S
        tree.create("lease", b"next", leased=True)
        process.send_signal(signal.SIGCONT)
        assert line_of(process) == "lost"
        node = tree.get("lease")
        assert node is not None
        assert node.value == b"next"


def test_processes_killed_while_writing_lose_and_break_nothing(tree: LmdbTree, tmp_path: Path) -> None:
    told = 0
    for _ in range(4):
        with child(tmp_path / "metadata", "count") as one, child(tmp_path / "metadata", "count") as two:
            for _ in range(10):
                told = max(int(line_of(one)), int(line_of(two)), told)
            two.kill()
            told = max(int(line_of(one)), told)
        node = tree.get("counter")
        assert node is not None
        assert int(node.value) >= told
        # A change that its dead maker was not told of may take effect as late as the next one, which then meets it.
        with suppress(MetadataVersionError):
            tree.put("counter", node.value, node.version)
            continue
        node = tree.get("counter")
        assert node is not None
        tree.put("counter", node.value, node.version)


def test_processes_stopped_while_writing_block_nobody(tree: LmdbTree, tmp_path: Path) -> None:
    chance = random.Random(1)
    resumed = 0
    with child(tmp_path / "metadata", "count") as process:
        line_of(process)
        number = 0
        while number < 40 or (not resumed and number < 1000):
            time.sleep(chance.uniform(0.001, 0.01))
            stop(process.pid)
            assert wait_for(lambda: is_stopped(process.pid))
            resumed += tree._file.turn_holder() == process.pid
            tree.create(f"keys/{number}", b"v")
            number += 1
            assert wait_for(lambda: is_stopped(process.pid)), "it stops again, as it was told"
            process.send_signal(signal.SIGCONT)
        before = tree.get("counter")
        assert wait_for(lambda: tree.get("counter") != before), "it goes on counting"
    assert resumed > 0, "no stop met a turn, so the test showed nothing"
    assert len(tree.children("keys")) == number


def test_a_process_resumed_by_others_does_not_stop_in_a_later_turn(tree: LmdbTree, tmp_path: Path) -> None:
    turn = tree._file.try_turn()
    other = HostFile(str(tmp_path / "metadata" / "sessions"))
    try:
        assert other.turn_holder() == os.getpid()
        assert not other.try_turn()
        os.pwrite(other.usable(), host_file._SLOT.pack(turn, 1), 0)
    finally:
        other.close()
        tree._file.end_turn(0)
    tree.create("key", b"v")
    assert tree.get("key") is not None


def test_a_turn_that_does_not_end_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    tree, other = LmdbTree(path, timeout_s=0.2), LmdbTree(path)
    turn = other._file.try_turn()
    began = time.monotonic()
    with pytest.raises(MetadataUnreachableError, match=f"process {os.getpid()}") as refused:
        tree.create("key", b"v")
    assert time.monotonic() - began >= 0.2
    assert not refused.value.outcome_unknown
    assert tree.get("key") is None, "who reads does not wait"
    other._file.end_turn(turn)
    tree.create("key", b"v")
    with tree._turn_lock:
        thread_error: list[BaseException] = []

        def write() -> None:
            try:
                tree.create("other", b"v")
            except MetadataUnreachableError as error:
                thread_error.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert "other threads" in str(thread_error[0])
    tree.close()
    other.close()


def test_a_path_is_one_environment_however_often_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "metadata"
    trees = [LmdbTree(str(path)) for _ in range(5)]
    (tmp_path / "link").symlink_to(path)
    trees.append(LmdbTree(str(tmp_path / "link")))
    assert sum(name.startswith(str(path)) for name in lmdb_environment._open) == 1
    trees[0].create("key", b"v")
    for tree in trees[:-1]:
        tree.close()
    assert trees[-1].get("key") is not None
    trees[-1].close()
    assert str(path) not in lmdb_environment._open


def test_what_was_written_is_there_after_opening_again(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    tree = LmdbTree(path)
    version = tree.create("a/b", b"v")
    tree.create("leased", b"v", leased=True)
    tree.close()
    tree = LmdbTree(path)
    assert tree.get("a/b") == (b"v", version)
    assert tree.get("leased") is None
    assert tree.put("a/b", b"w", version) > version
    tree.close()


def _in_child(tree: LmdbTree, results: multiprocessing.queues.SimpleQueue[str]) -> None:
    for call in (lambda: tree.get("key"), lambda: tree.create("other", b"v"), tree.session):
        try:
            call()
            results.put("worked")
        except ForkedProcessError as error:
            results.put(f"refused {error}")
    results.put(str(tree.alive(1)))
    tree.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told_and_holds_nothing(tmp_path: Path) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"))
    tree.create("key", b"v", leased=True)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_in_child, args=(tree, results))
    process.start()
    told = [results.get() for _ in range(4)]
    process.join()
    assert process.exitcode == 0
    assert all(answer.startswith("refused") and "fork" in answer for answer in told[:3]), told
    assert told[3] == "False"
    assert tree.alive(tree.session())
    assert tree.get("key") is not None
    tree.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_lives_on_keeps_no_lease_alive(tree: LmdbTree, tmp_path: Path) -> None:
    file = HostFile(str(tmp_path / "metadata" / "sessions"))
    assert file.try_lock(40)
    assert tree._file.locked(40)
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, b".")
        time.sleep(600)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        os.close(file._fd)  # what the kernel does with a process that dies
        assert not tree._file.locked(40)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        file._fd = -1
        os.close(ready)
        os.close(told)


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    tree = LmdbTree(path)
    version = tree.create("key", b"value")
    node = lmdb_records.node_name("key")
    raw = LmdbEnvironment(path)
    with raw.read() as transaction:
        data = transaction.get(node)
    assert data is not None
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 4
        with raw.write() as writing:
            writing.put(node, bytes(bad))
        for call in (lambda: tree.get("key"), lambda: tree.put("key", b"x", version)):
            with pytest.raises(CorruptError, match="restore"):
                call()
    with raw.write() as writing:
        writing.put(lmdb_records.node_name("other"), data)
        writing.put(node, data)
    with pytest.raises(CorruptError):
        tree.get("other")
    assert tree.get("key") == (b"value", version)
    raw.close()
    tree.close()


def test_a_store_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata"
    tree = LmdbTree(str(path))
    for number in range(50):
        tree.create(f"keys/{number}", b"x" * 1000)
    tree.close()
    os.truncate(path / "data.mdb", 5 * 4096)
    with pytest.raises(CorruptError, match=r"metadata store is damaged.*restore") as damaged:
        LmdbTree(str(path))
    assert "rebuild" not in str(damaged.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    LmdbTree(path).close()
    raw = LmdbEnvironment(path)
    with raw.write() as transaction:
        lmdb_records.put(transaction, lmdb_records.FORMAT_NAME, b"\x02")
    raw.close()
    with pytest.raises(UnsupportedFormatError, match="format 2"):
        LmdbTree(path)


def test_a_full_store_changes_nothing_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.metadata.lmdb_store._MAP_BYTES", 1 << 20)
    tree = LmdbTree(str(tmp_path / "metadata"))
    made = 0

    def fill() -> None:
        nonlocal made
        for made in range(100):
            tree.create(f"keys/{made}", b"x" * 50_000)

    with pytest.raises(StorageFullError) as full:
        fill()
    assert not full.value.outcome_unknown
    assert made > 5
    assert len(tree.children("keys")) == made
    node = tree.get("keys/0")
    assert node is not None
    tree.delete("keys/0", node.version)
    tree.close()


def test_slots_are_taken_again_but_never_from_the_living(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    trees = [LmdbTree(path) for _ in range(3)]
    for tree in trees:
        tree.session()
    assert [tree._slot for tree in trees] == [SESSION_SLOTS, SESSION_SLOTS + 1, SESSION_SLOTS + 2]
    trees[1].close()
    late = LmdbTree(path)
    late.session()
    assert late._slot == SESSION_SLOTS + 1
    for tree in (trees[0], trees[2], late):
        tree.close()


def test_versions_are_refused_across_processes(tree: LmdbTree, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "count") as process:
        first = line_of(process)
        node = tree.get("counter")
        assert node is not None
        while line_of(process) == first:
            pass
        with pytest.raises(MetadataVersionError):
            tree.put("counter", b"mine", node.version - 1)


def test_nothing_runs_while_nobody_watches(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    tree = LmdbTree(str(tmp_path / "metadata"))
    tree.create("key", b"v")
    assert set(threading.enumerate()) <= before
    watch = tree.watch("key", lambda: None)
    assert len(set(threading.enumerate()) - before) == 1
    polls = []
    original = tree._poll
    tree._poll = lambda: (polls.append(1), original())[1]  # type: ignore[method-assign, func-returns-value]
    assert wait_for(lambda: len(polls) > 2)
    watch.cancel()
    assert wait_for(lambda: not tree._seen)
    time.sleep(0.05)
    rest = len(polls)
    time.sleep(0.1)
    assert len(polls) <= rest + 1
    tree.close()
    assert set(threading.enumerate()) <= before


def test_a_lease_made_before_the_end_of_the_session_was_noticed_ends_as_well(tree: LmdbTree, tmp_path: Path) -> None:
    other = LmdbTree(str(tmp_path / "metadata"))
    for number in range(5):
        session = tree.session()
        other._change(lambda transaction, _, session=session: lmdb_records.end_session(transaction, session))  # type: ignore[misc]
        tree.create(f"lease/{number}", b"v", leased=True)
        assert tree.alive(tree.session())
        assert tree.session() != session
    tree.close()
    assert other.children("lease") == []
    other.close()


def test_a_change_while_a_watch_begins_is_told(tree: LmdbTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = LmdbTree(str(tmp_path / "metadata"))
    tree.watch("another", lambda: None)
    look = tree._look

    def look_and_be_overtaken(transaction: ReadTransaction, key: str) -> object:
        seen = look(transaction, key)
        if key == "key" and other.get("key") is None:
            thread = threading.Thread(target=lambda: other.create("key", b"v"))
            thread.start()
            thread.join()
            time.sleep(0.1)  # time for the others to be looked at
        return seen

    monkeypatch.setattr(tree, "_look", look_and_be_overtaken)
    told = threading.Event()
    tree.watch("key", told.set)
    assert told.wait(WAIT_S)
    other.close()


def test_an_interrupted_wait_for_the_turn_leaves_it_to_others(tree: LmdbTree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tree._file.try_turn

    def interrupted() -> int:
        real()
        raise KeyboardInterrupt

    monkeypatch.setattr(tree._file, "try_turn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tree.create("key", b"v")
    other = LmdbTree(tree._path, timeout_s=1)
    other.create("key", b"v")
    other.close()


def test_who_waits_for_a_turn_looks_often_and_at_who_has_it_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"))
    try_turn = tree._file.try_turn
    pauses: list[float] = []
    looks: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(lmdb_store, "time", clock)
    monkeypatch.setattr(tree._file, "let_finish", lambda: looks.append(clock.monotonic()))
    monkeypatch.setattr(tree._file, "try_turn", lambda: try_turn() if len(looks) == 2 else 0)
    tree.create("key", b"value")
    tree.close()
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (lmdb_store._PAUSE_MIN_S, lmdb_store._PAUSE_MAX_S)
    assert len(set(pauses)) > 2, "the pauses grow step by step"
    first, second = looks
    assert lmdb_store._PATIENCE_S <= first <= lmdb_store._PATIENCE_S + lmdb_store._PAUSE_MAX_S
    assert lmdb_store._PATIENCE_S <= second - first <= lmdb_store._PATIENCE_S + lmdb_store._PAUSE_MAX_S


def test_reading_looks_for_dead_sessions_only_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"))
    looks: list[None] = []
    monkeypatch.setattr(tree, "_sweep", lambda: looks.append(None))
    monkeypatch.setattr(tree, "_sweep_s", LONG_SESSION_S)
    for read in (tree.get, tree.children, lambda key: tree.get_many([key])):
        tree._swept_at = time.monotonic() - LONG_SESSION_S
        read("key")
        assert len(looks) == 1
        read("key")
        assert len(looks) == 1
        looks.clear()
    tree.close()


@pytest.mark.parametrize(
    ("session", "seen", "share"), [(0, 0, 1), (5, 0, 1), (5, 1, 1), (5, 3, 3), (5, 1000, None), (0, 3, None)]
)
def test_who_has_a_session_has_a_share_in_the_look_for_dead_ones(
    tmp_path: Path, session: int, seen: int, share: int | None
) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"))
    tree._session, tree._sessions_seen = session, seen
    assert tree._sweep_rest() == (lmdb_store._SWEEP_MAX_S if share is None else share * tree._sweep_s)
    tree._session = 0
    tree.close()


def test_the_end_of_an_older_session_does_not_end_the_one_that_followed(tmp_path: Path) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"))
    session = tree.session()
    tree._session_lost(session - 1)
    assert tree.session() == session
    assert tree.alive(session)
    tree.close()


@pytest.mark.parametrize(("timeout_s", "beat_s", "sweep_s"), [(600.0, 1.0, 0.25), (2.0, 0.4, 0.25), (0.5, 0.1, 0.1)])
def test_signs_of_life_are_given_and_looked_for_several_times_before_a_session_counts_as_dead(
    tmp_path: Path, timeout_s: float, beat_s: float, sweep_s: float
) -> None:
    tree = LmdbTree(str(tmp_path / "metadata"), session_timeout_s=timeout_s)
    assert [tree._beat_s, tree._sweep_s] == pytest.approx([beat_s, sweep_s])
    tree.close()


def test_a_look_at_what_is_watched_that_is_due_is_not_put_off(tree: LmdbTree, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if "keeper" in threading.current_thread().name:
            slept.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(lmdb_store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    seen = threading.Event()
    tree.watch("key", seen.set)
    for number in range(10):
        assert wait_for(lambda: time.monotonic() > tree._polled_at + lmdb_store._PACE_S)
        tree.create(f"key/{number}", b"v")
        assert seen.wait(WAIT_S)
        seen.clear()
    assert [seconds for seconds in slept if seconds < 0.003] == []
