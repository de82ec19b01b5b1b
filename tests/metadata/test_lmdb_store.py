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
from pybk.metadata import host_file, lmdb_rows, lmdb_store
from pybk.metadata.host_file import SESSION_SLOTS, HostFile, is_stopped
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.storage.io import lmdb_environment
from pybk.storage.io.lmdb_environment import LmdbEnvironment, ReadTransaction
from tests.internals import lock_of
from tests.metadata.harness import wait_for
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import WAIT_S, stop

# Longer than a process waits for its turn on a machine that is busy, and than any test waits.
SHORT_SESSION_S = 4.0
LONG_SESSION_S = 600.0


@contextmanager
def child(path: Path, task: str, lease_time_s: float = LONG_SESSION_S) -> Iterator[subprocess.Popen[str]]:
    """Run a process of its own on the store; killed at the end, however it was left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.metadata.lmdb_child", str(path), task, str(lease_time_s)],
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
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbMetadataStore]:
    """A store."""
    store = LmdbMetadataStore(str(tmp_path / "metadata"), timeout_s=WAIT_S, lease_time_s=LONG_SESSION_S)
    yield store
    store.close()


def test_a_killed_process_loses_its_leases_at_once(store: LmdbMetadataStore, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "lease") as process:
        assert line_of(process) == "leased"
        gone = threading.Event()
        store.watch("lease", lambda: gone.set() if store.get("lease") is None else None)
        assert store.get("lease") is not None
        process.kill()
        process.wait()
        assert gone.wait(WAIT_S), "by its lock, before the timeout"


def test_the_lease_of_a_killed_process_can_be_created_again_at_once(store: LmdbMetadataStore, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "lease") as process:
        assert line_of(process) == "leased"
        process.kill()
        process.wait()
        store.create("lease", b"next", leased=True)


def test_a_stopped_process_loses_its_leases_and_notices_when_it_resumes(
    store: LmdbMetadataStore, tmp_path: Path
) -> None:
    with child(tmp_path / "metadata", "lease", SHORT_SESSION_S) as process:
        assert line_of(process) == "leased"
        store.session()
        time.sleep(1.5 * SHORT_SESSION_S)
        assert store.get("lease") is not None, "it gives signs of life"
        stop(process.pid)
        stopped = time.monotonic()
        assert wait_for(lambda: store.get("lease") is None)
        assert time.monotonic() - stopped > 0.5 * SHORT_SESSION_S
        store.create("lease", b"next", leased=True)
        process.send_signal(signal.SIGCONT)
        assert line_of(process) == "lost"
        node = store.get("lease")
        assert node is not None
        assert node.value == b"next"


def test_processes_killed_while_writing_lose_and_break_nothing(store: LmdbMetadataStore, tmp_path: Path) -> None:
    told = 0
    for _ in range(4):
        with child(tmp_path / "metadata", "count") as one, child(tmp_path / "metadata", "count") as two:
            for _ in range(10):
                told = max(int(line_of(one)), int(line_of(two)), told)
            two.kill()
            told = max(int(line_of(one)), told)
        node = store.get("counter")
        assert node is not None
        assert int(node.value) >= told
        # A change that its dead maker was not told of may take effect as late as the next one, which then meets it.
        with suppress(MetadataVersionError):
            store.put("counter", node.value, node.version)
            continue
        node = store.get("counter")
        assert node is not None
        store.put("counter", node.value, node.version)


def test_processes_stopped_while_writing_do_not_block_others(store: LmdbMetadataStore, tmp_path: Path) -> None:
    chance = random.Random(1)
    resumed = 0
    with child(tmp_path / "metadata", "count") as process:
        line_of(process)
        number = 0
        while number < 40 or (not resumed and number < 1000):
            time.sleep(chance.uniform(0.001, 0.01))
            stop(process.pid)
            assert wait_for(lambda: is_stopped(process.pid))
            resumed += store.host_file.writer_pid() == process.pid
            store.create(f"keys/{number}", b"v")
            number += 1
            assert wait_for(lambda: is_stopped(process.pid)), "it stops again, as it was told"
            process.send_signal(signal.SIGCONT)
        before = store.get("counter")
        assert wait_for(lambda: store.get("counter") != before), "it counts no longer"
    assert resumed > 0, "no stop met a turn, so the test showed nothing"
    assert len(store.children("keys")) == number


def test_a_process_resumed_by_others_does_not_stop_in_a_later_turn(store: LmdbMetadataStore, tmp_path: Path) -> None:
    turn = store.host_file.try_write_lock()
    other = HostFile(str(tmp_path / "metadata" / "sessions"))
    try:
        assert other.writer_pid() == os.getpid()
        assert not other.try_write_lock()
        os.pwrite(other.descriptor(), host_file.SLOT.pack(turn, 1), 0)
    finally:
        other.close()
        store.host_file.release_write_lock(0)
    store.create("key", b"v")
    assert store.get("key") is not None


def test_a_turn_that_does_not_end_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    store, other = LmdbMetadataStore(path, timeout_s=0.2), LmdbMetadataStore(path)
    turn = other.host_file.try_write_lock()
    began = time.monotonic()
    with pytest.raises(MetadataUnreachableError, match=f"process {os.getpid()}") as refused:
        store.create("key", b"v")
    assert time.monotonic() - began >= 0.2
    assert not refused.value.outcome_unknown
    assert store.get("key") is None, "who reads does not wait"
    other.host_file.release_write_lock(turn)
    store.create("key", b"v")
    with store.thread_lock:
        thread_error: list[BaseException] = []

        def write() -> None:
            try:
                store.create("other", b"v")
            except MetadataUnreachableError as error:
                thread_error.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        assert "other threads" in str(thread_error[0])
    store.close()
    other.close()


def test_a_path_is_one_environment_however_often_it_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "metadata"
    stores = [LmdbMetadataStore(str(path)) for _ in range(5)]
    (tmp_path / "link").symlink_to(path)
    stores.append(LmdbMetadataStore(str(tmp_path / "link")))
    assert sum(name.startswith(str(path)) for name in lmdb_environment.opened) == 1
    stores[0].create("key", b"v")
    for store in stores[:-1]:
        store.close()
    assert stores[-1].get("key") is not None
    stores[-1].close()
    assert str(path) not in lmdb_environment.opened


def test_written_values_survive_opening_again(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    store = LmdbMetadataStore(path)
    version = store.create("a/b", b"v")
    store.create("leased", b"v", leased=True)
    store.close()
    store = LmdbMetadataStore(path)
    assert store.get("a/b") == (b"v", version)
    assert store.get("leased") is None
    assert store.put("a/b", b"w", version) > version
    store.close()


def _in_child(store: LmdbMetadataStore, results: multiprocessing.queues.SimpleQueue[str]) -> None:
    for call in (lambda: store.get("key"), lambda: store.create("other", b"v"), store.session):
        try:
            call()
            results.put("worked")
        except ForkedProcessError as error:
            results.put(f"refused {error}")
    results.put(str(store.alive(1)))
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_calls_in_a_forked_child_raise_and_it_holds_no_lock(tmp_path: Path) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    store.create("key", b"v", leased=True)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=_in_child, args=(store, results))
    process.start()
    told = [results.get() for _ in range(4)]
    process.join()
    assert process.exitcode == 0
    assert all(answer.startswith("refused") and "fork" in answer for answer in told[:3]), told
    assert told[3] == "False"
    assert store.alive(store.session())
    assert store.get("key") is not None
    store.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_though_a_thread_of_its_parent_was_in_the_store(store: LmdbMetadataStore) -> None:
    with lock_of(store):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(10)  # it has nothing to wait for
                store.close()
                status = 0
            finally:
                os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0, "it waited for a lock that nobody lets go of"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_lives_on_keeps_no_lease_alive(store: LmdbMetadataStore, tmp_path: Path) -> None:
    file = HostFile(str(tmp_path / "metadata" / "sessions"))
    assert file.try_lock(40)
    assert store.host_file.locked(40)
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(told, b".")
        time.sleep(600)
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        os.close(file.fd)  # what the kernel does with a process that dies
        assert not store.host_file.locked(40)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        file.fd = -1
        os.close(ready)
        os.close(told)


def test_a_damaged_record_raises(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    store = LmdbMetadataStore(path)
    version = store.create("key", b"value")
    node = lmdb_rows.node_name("key")
    raw = LmdbEnvironment(path)
    with raw.read() as transaction:
        data = transaction.get(node)
    assert data is not None
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 4
        with raw.write() as writing:
            writing.put(node, bytes(bad))
        for call in (lambda: store.get("key"), lambda: store.put("key", b"x", version)):
            with pytest.raises(CorruptError, match="restore"):
                call()
    with raw.write() as writing:
        writing.put(lmdb_rows.node_name("other"), data)
        writing.put(node, data)
    with pytest.raises(CorruptError):
        store.get("other")
    assert store.get("key") == (b"value", version)
    raw.close()
    store.close()


def test_a_store_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metadata"
    store = LmdbMetadataStore(str(path))
    for number in range(50):
        store.create(f"keys/{number}", b"x" * 1000)
    store.close()
    os.truncate(path / "data.mdb", 5 * 4096)
    with pytest.raises(CorruptError, match=r"metadata store is damaged.*restore") as damaged:
        LmdbMetadataStore(str(path))
    assert "rebuild" not in str(damaged.value)


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    LmdbMetadataStore(path).close()
    raw = LmdbEnvironment(path)
    with raw.write() as transaction:
        lmdb_rows.put(transaction, lmdb_rows.FORMAT_NAME, b"\x02")
    raw.close()
    with pytest.raises(UnsupportedFormatError, match="format 2"):
        LmdbMetadataStore(path)


def test_a_full_store_changes_nothing_and_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.metadata.lmdb_store.MAP_BYTES", 1 << 20)
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    made = 0

    def fill() -> None:
        nonlocal made
        for made in range(100):
            store.create(f"keys/{made}", b"x" * 50_000)

    with pytest.raises(StorageFullError) as full:
        fill()
    assert not full.value.outcome_unknown
    assert made > 5
    assert len(store.children("keys")) == made
    node = store.get("keys/0")
    assert node is not None
    store.delete("keys/0", node.version)
    store.close()


def test_slots_are_taken_again_but_never_from_the_living(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata")
    stores = [LmdbMetadataStore(path) for _ in range(3)]
    for store in stores:
        store.session()
    assert [store.slot for store in stores] == [SESSION_SLOTS, SESSION_SLOTS + 1, SESSION_SLOTS + 2]
    stores[1].close()
    late = LmdbMetadataStore(path)
    late.session()
    assert late.slot == SESSION_SLOTS + 1
    for store in (stores[0], stores[2], late):
        store.close()


def test_versions_are_refused_across_processes(store: LmdbMetadataStore, tmp_path: Path) -> None:
    with child(tmp_path / "metadata", "count") as process:
        first = line_of(process)
        node = store.get("counter")
        assert node is not None
        while line_of(process) == first:
            pass
        with pytest.raises(MetadataVersionError):
            store.put("counter", b"mine", node.version - 1)


def test_no_thread_runs_without_a_watch(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    store.create("key", b"v")
    assert set(threading.enumerate()) <= before
    watch = store.watch("key", lambda: None)
    assert len(set(threading.enumerate()) - before) == 1
    polls = []
    original = store.poll
    store.poll = lambda: (polls.append(1), original())[1]  # type: ignore[method-assign, func-returns-value]
    assert wait_for(lambda: len(polls) > 2)
    watch.cancel()
    assert wait_for(lambda: not store.seen)
    time.sleep(0.05)
    rest = len(polls)
    time.sleep(0.1)
    assert len(polls) <= rest + 1
    store.close()
    assert set(threading.enumerate()) <= before


def test_a_lease_made_before_the_end_of_the_session_was_noticed_ends_as_well(
    store: LmdbMetadataStore, tmp_path: Path
) -> None:
    other = LmdbMetadataStore(str(tmp_path / "metadata"))
    for number in range(5):
        session = store.session()
        other.change(lambda transaction, _, session=session: lmdb_rows.end_session(transaction, session))  # type: ignore[misc]
        store.create(f"lease/{number}", b"v", leased=True)
        assert store.alive(store.session())
        assert store.session() != session
    store.close()
    assert other.children("lease") == []
    other.close()


def test_a_change_while_a_watch_begins_is_reported(
    store: LmdbMetadataStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LmdbMetadataStore(str(tmp_path / "metadata"))
    store.watch("another", lambda: None)
    look = store.look

    def look_and_be_overtaken(transaction: ReadTransaction, key: str) -> object:
        seen = look(transaction, key)
        if key == "key" and other.get("key") is None:
            thread = threading.Thread(target=lambda: other.create("key", b"v"))
            thread.start()
            thread.join()
            time.sleep(0.1)  # time for the others to be looked at
        return seen

    monkeypatch.setattr(store, "look", look_and_be_overtaken)
    told = threading.Event()
    store.watch("key", told.set)
    assert told.wait(WAIT_S)
    other.close()


def test_an_interrupted_wait_for_the_turn_leaves_it_to_others(
    store: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.host_file, "try_write_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.create("key", b"v")
    other = LmdbMetadataStore(store.path, timeout_s=1)
    other.create("key", b"v")
    other.close()


def test_a_waiter_polls_the_lock_often_and_checks_its_holder_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    try_write_lock = store.host_file.try_write_lock
    pauses: list[float] = []
    looks: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr(lmdb_store, "time", clock)
    monkeypatch.setattr(store.host_file, "resume_stopped_writer", lambda: looks.append(clock.monotonic()))
    monkeypatch.setattr(store.host_file, "try_write_lock", lambda: try_write_lock() if len(looks) == 2 else 0)
    store.create("key", b"value")
    store.close()
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (lmdb_store.PAUSE_MIN_S, lmdb_store.PAUSE_MAX_S)
    assert len(set(pauses)) > 2, "the pauses grow step by step"
    first, second = looks
    assert lmdb_store.PATIENCE_S <= first <= lmdb_store.PATIENCE_S + lmdb_store.PAUSE_MAX_S
    assert lmdb_store.PATIENCE_S <= second - first <= lmdb_store.PATIENCE_S + lmdb_store.PAUSE_MAX_S


def test_reading_looks_for_dead_sessions_only_when_it_is_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    looks: list[None] = []
    monkeypatch.setattr(store, "sweep", lambda: looks.append(None))
    monkeypatch.setattr(store, "sweep_s", LONG_SESSION_S)
    for read in (store.get, store.children, lambda key: store.get_many([key])):
        store.swept_at = time.monotonic() - LONG_SESSION_S
        read("key")
        assert len(looks) == 1
        read("key")
        assert len(looks) == 1
        looks.clear()
    store.close()


@pytest.mark.parametrize(
    ("session", "seen", "share"), [(0, 0, 1), (5, 0, 1), (5, 1, 1), (5, 3, 3), (5, 1000, None), (0, 3, None)]
)
def test_processes_with_sessions_share_the_search_for_dead_ones(
    tmp_path: Path, session: int, seen: int, share: int | None
) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    store.session_id, store.sessions_seen = session, seen
    assert store.sweep_rest() == (lmdb_store.SWEEP_MAX_S if share is None else share * store.sweep_s)
    store.session_id = 0
    store.close()


def test_the_end_of_an_older_session_does_not_end_the_one_that_followed(tmp_path: Path) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    session = store.session()
    store.session_lost(session - 1)
    assert store.session() == session
    assert store.alive(session)
    store.close()


@pytest.mark.parametrize(("timeout_s", "beat_s", "sweep_s"), [(600.0, 1.0, 0.25), (2.0, 0.4, 0.25), (0.5, 0.1, 0.1)])
def test_signs_of_life_are_given_and_looked_for_several_times_before_a_session_counts_as_dead(
    tmp_path: Path, timeout_s: float, beat_s: float, sweep_s: float
) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"), lease_time_s=timeout_s)
    assert [store.heartbeat_s, store.sweep_s] == pytest.approx([beat_s, sweep_s])
    store.close()


def test_a_look_at_what_is_watched_that_is_due_is_not_put_off(
    store: LmdbMetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        if "keeper" in threading.current_thread().name:
            slept.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(lmdb_store, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    seen = threading.Event()
    store.watch("key", seen.set)
    for number in range(10):
        assert wait_for(lambda: time.monotonic() > store.polled_at + lmdb_store.PACE_S)
        store.create(f"key/{number}", b"v")
        assert seen.wait(WAIT_S)
        seen.clear()
    assert [seconds for seconds in slept if seconds < 0.003] == []
