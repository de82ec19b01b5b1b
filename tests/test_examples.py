"""The examples run, and the key-value store keeps what it acknowledged when it is killed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pybk import LedgerManager, StorageHint, UnauthorizedError
from tests.paths import ROOT
from tests.spark import clusters
from tests.spark.queries import LATE
from tests.waiting import PROCESS_S, WAIT_S

EXAMPLES = ROOT / "examples"
PASSWORD = b"s3cret"


def command(name: str, *operands: object) -> list[str]:
    """Return the command line of an example."""
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, operands)]


def run(name: str, *operands: object, cwd: Path, expect: int = 0) -> str:
    """Run an example to its end and return what it printed."""
    environment = {**os.environ, "KVSTORE_PASSWORD": PASSWORD.decode()}
    done = subprocess.run(
        command(name, *operands),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
        env=environment,
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def kvstore() -> ModuleType:
    """Import the key-value store as a program in the same folder would."""
    spec = importlib.util.spec_from_file_location("kvstore", EXAMPLES / "kvstore.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8") + "quickstart"  # which test_readme.py runs
    assert [path.stem for path in EXAMPLES.glob("*.py") if path.stem not in tested] == []


def test_producers(tmp_path: Path) -> None:
    text = run("producers", "data", cwd=tmp_path)
    assert "12800 entries by 64 producers" in text
    assert "the follower saw 12800 of them" in text


def test_cluster(tmp_path: Path) -> None:
    first, second, read = run("cluster", "data", cwd=tmp_path).splitlines()
    before, after = (set(line.split(": ")[1].split(", ")) for line in (first, second))
    assert (len(before), len(after), len(before & after)) == (3, 3, 2)
    assert read == "201 entries read"


def test_pipeline(tmp_path: Path) -> None:
    """With executors in processes of their own; ``local[2]`` runs the same code, but for the kill."""
    (tmp_path / "input").write_text("".join(f"{'x' * (number % 7)} {number}\n" for number in range(3000)))
    environment = clusters.environment(tmp_path)

    def pipeline(directory: str) -> subprocess.CompletedProcess[str]:
        where = ("--master", "local-cluster[3,1,1024]", "--directory", tmp_path / directory)
        return subprocess.run(
            command("pipeline", tmp_path / "input", *where),
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
            env=environment,
        )

    done = pipeline("all")
    if LATE in done.stderr:
        done = pipeline("again")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "All 3,000 lines are there, and each of 435 words was counted exactly." in done.stdout
    assert re.search(r"killed executor \d and its bookie \S+ with SIGKILL", done.stdout)


def test_producers_asked_for_help_make_no_store(tmp_path: Path) -> None:
    assert "STORE" in run("producers", "--help", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tail_follows_a_writer_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(PASSWORD + b"\n")
    with LedgerManager.open(tmp_path / "data") as manager, manager.create_ledger(password=PASSWORD) as writer:
        writer.append_many([b"one", b"two"])
        with subprocess.Popen(
            command("tail", tmp_path / "data", "--password-file", tmp_path / "password"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            watchdog = threading.Timer(PROCESS_S, process.kill)
            watchdog.start()
            assert process.stdout is not None
            assert process.stderr is not None
            assert [process.stdout.readline() for _ in range(2)] == [b"one\n", b"two\n"]
            writer.append(b"three")
            assert process.stdout.readline() == b"three\n"
            writer.close()
            assert process.wait(WAIT_S) == 0, process.stderr.read()
            assert process.stdout.read() == b""
            watchdog.cancel()


def test_tail_says_what_is_wrong(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "data") as manager, manager.create_ledger(password=PASSWORD) as writer:
        writer.append(b"x")
    done = subprocess.run(
        command("tail", tmp_path / "data"), capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tail: ")
    assert done.stderr.count("\n") == 1


def test_kvstore_commands(tmp_path: Path) -> None:
    run("kvstore", "kv", "put", "colour", "blue", cwd=tmp_path)
    run("kvstore", "kv", "put", "size", "", cwd=tmp_path)
    assert run("kvstore", "kv", "get", "colour", cwd=tmp_path) == "blue\n"
    run("kvstore", "kv", "snapshot", cwd=tmp_path)
    run("kvstore", "kv", "delete", "colour", cwd=tmp_path)
    assert run("kvstore", "kv", "get", "colour", cwd=tmp_path, expect=1) == ""
    assert run("kvstore", "kv", "list", cwd=tmp_path) == "size=\n"


def test_kvstore_snapshot_replaces_logs_and_keeps_deletes(tmp_path: Path, kvstore: ModuleType) -> None:
    path = str(tmp_path / "kv")
    with kvstore.KeyValueStore(path, PASSWORD) as store:
        for number in range(50):
            store.put(b"%d" % number, b"old")
        store.delete(b"7")
        store.snapshot()
        store.snapshot()
        store.write({b"8": None, b"9": b"new", b"50": b"new"})
        expected = {b"%d" % number: b"old" for number in range(50) if number not in (7, 8)}
        expected |= {b"9": b"new", b"50": b"new"}
        assert dict(store.items()) == expected
    with LedgerManager.open(path, read_only=True) as manager:
        assert len(list(manager.list_ledgers("kv.snapshot"))) == 1
        (wal,) = manager.list_ledgers("kv.wal")
        assert manager.ledger_metadata(wal).last_entry_id == 0
        (snapshot,) = manager.list_ledgers("kv.snapshot")
        assert StorageHint.HDD in manager.ledger_metadata(snapshot).storage_hints
    with kvstore.KeyValueStore(path, PASSWORD) as store:
        assert dict(store.items()) == expected


def test_kvstore_ignores_a_snapshot_without_its_end(tmp_path: Path, kvstore: ModuleType) -> None:
    path = str(tmp_path / "kv")
    with kvstore.KeyValueStore(path, PASSWORD) as store:
        store.put(b"a", b"1")
        store.snapshot()
        store.put(b"a", b"2")
    with LedgerManager.open(path) as manager:
        wal = max(manager.list_ledgers("kv.wal"))
        for payloads in ([], [kvstore.encode({b"a": b"lie"})]):
            with manager.create_ledger(
                password=PASSWORD, ledger_type="kv.snapshot", custom_metadata={"wal": b"%d" % (wal + 1)}
            ) as cut:
                cut.append_many(payloads)
    with kvstore.KeyValueStore(path, PASSWORD) as store:
        assert dict(store.items()) == {b"a": b"2"}
    with LedgerManager.open(path, read_only=True) as manager:
        assert len(list(manager.list_ledgers("kv.snapshot"))) == 1


class HeldWriter:
    """Gives ids like a ledger's writer, but finishes each append only when it is released."""

    ledger_id = -1

    def __init__(self) -> None:
        self.appends: list[Future[int]] = []

    def append_async(self, payload: bytes) -> Future[int]:
        self.appends.append(Future())
        return self.appends[-1]

    def release(self, entry_id: int) -> None:
        self.appends[entry_id].set_result(entry_id)

    def wait_for(self, count: int) -> None:
        while len(self.appends) < count:
            time.sleep(0.001)

    def close(self) -> None:
        assert all(future.done() for future in self.appends)


def test_kvstore_shows_the_later_write_whichever_is_acknowledged_first(tmp_path: Path, kvstore: ModuleType) -> None:
    with kvstore.KeyValueStore(str(tmp_path / "kv"), PASSWORD) as store:
        held = store.wal.writer = HeldWriter()
        threads = [threading.Thread(target=store.put, args=(b"key", value)) for value in (b"first", b"second")]
        for count, thread in enumerate(threads, 1):
            thread.start()
            held.wait_for(count)
        assert store.get(b"key") is None  # nothing shows before it is durable
        for entry_id in (1, 0):
            held.release(entry_id)
            threads[entry_id].join()
            assert store.get(b"key") == b"second"


def test_kvstore_snapshot_has_what_was_in_flight(tmp_path: Path, kvstore: ModuleType) -> None:
    with kvstore.KeyValueStore(str(tmp_path / "kv"), PASSWORD) as store:
        held = store.wal.writer = HeldWriter()
        put = threading.Thread(target=store.put, args=(b"key", b"value"))
        put.start()
        held.wait_for(1)
        snapshot = threading.Thread(target=store.snapshot)
        snapshot.start()
        snapshot.join(0.2)
        assert snapshot.is_alive()
        held.release(0)
        put.join()
        snapshot.join()
    with kvstore.KeyValueStore(str(tmp_path / "kv"), PASSWORD) as store:
        assert store.items() == [(b"key", b"value")]


def test_kvstore_wants_its_password(tmp_path: Path, kvstore: ModuleType) -> None:
    with kvstore.KeyValueStore(str(tmp_path / "kv"), PASSWORD) as store:
        store.put(b"a", b"1")
    with pytest.raises(UnauthorizedError):
        kvstore.KeyValueStore(str(tmp_path / "kv"), b"another")


def test_kvstore_threads_and_snapshots_at_once(tmp_path: Path, kvstore: ModuleType) -> None:
    """Each thread owns a key and adds to the tally of a shared one; snapshots come in between."""
    path = str(tmp_path / "kv")
    last: dict[bytes, bytes] = {}

    def work(store: Any, name: int) -> None:
        key, value = b"own-%d" % name, b""
        for number in range(150):
            value = b"%d" % number
            store.write({key: value, b"shared": b"%d-%d" % (name, number)})
            assert store.get(key) == value
        last[key] = value

    with kvstore.KeyValueStore(path, PASSWORD, snapshot_bytes=8 << 10) as store:
        threads = [threading.Thread(target=work, args=(store, name)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        before = dict(store.items())
    assert len(last) == 6
    assert before.items() >= last.items()
    with kvstore.KeyValueStore(path, PASSWORD) as store:
        assert dict(store.items()) == before


@pytest.mark.parametrize("kill_after", [1, 400])
def test_kvstore_killed_in_the_middle_has_all_that_was_acknowledged(
    tmp_path: Path, kvstore: ModuleType, kill_after: int
) -> None:
    """SIGKILL while a child loads; snapshots every few KiB make kills inside one likely. Killed twice in a row."""
    path = tmp_path / "kv"
    acknowledged: dict[bytes, int] = {}
    sent: dict[bytes, int] = {}
    for attempt in range(2):
        answers = load_and_kill(path, attempt, kill_after, sent)
        acknowledged.update(answers)
        with kvstore.KeyValueStore(str(path), PASSWORD) as store:
            found = {key: int(value) for key, value in store.items()}
        assert len(answers) >= kill_after
        for key, number in acknowledged.items():
            assert number <= found[key] <= sent[key]
        assert set(found) <= set(sent)
        acknowledged = found


def load_and_kill(path: Path, attempt: int, kill_after: int, sent: dict[bytes, int]) -> list[tuple[bytes, int]]:
    """Feed a child ``KEY=NUMBER`` lines, kill it after some answers, and return all of its answers."""
    environment = {**os.environ, "KVSTORE_PASSWORD": PASSWORD.decode()}
    process = subprocess.Popen(
        command("kvstore", path, "load", "--snapshot-bytes", 4096),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin

    def feed() -> None:
        number = attempt * 1_000_000
        try:
            while True:
                key = b"key-%d" % (number % 97)
                sent[key] = number
                stdin.write(b"%s=%d\n" % (key, number))
                number += 1
        except BrokenPipeError:
            return

    feeder = threading.Thread(target=feed)
    feeder.start()
    watchdog = threading.Timer(PROCESS_S, process.kill)
    watchdog.start()
    answers: list[tuple[bytes, int]] = []
    for line in process.stdout:
        if line.endswith(b"\n"):
            # Answers come in the order of the lines, so the n-th one is about the n-th number.
            answers.append((line.split()[1], attempt * 1_000_000 + len(answers)))
        if len(answers) == kill_after:
            time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
    process.wait()
    feeder.join()
    watchdog.cancel()
    process.stdout.close()
    with pytest.raises(BrokenPipeError):
        stdin.close()
    assert process.returncode == -signal.SIGKILL
    return answers
