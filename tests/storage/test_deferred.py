"""Deferred entries are written by time, so that those acknowledged a moment ago survive the end of the process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pybk.flags import WriteFlag
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.compaction.checkpoint import Checkpoint
from pybk.storage.log.log import BUFFERED_NS, Log
from pybk.storage.store import Store
from pybk.threads.group_commit import GroupCommit
from tests.cluster.processes import running
from tests.internals import store_of
from tests.simdisk import SimFileSystem
from tests.storage.real_store import contents, numbered, open_quick, python
from tests.storage.store_harness import open_store
from tests.waiting import PROCESS_S, wait_until

DEFERRED = WriteFlag.DEFERRED_FORCE
PASSWORD = b"correct horse"


def written(directory: Path, payload: bytes) -> bool:
    """Return whether any log file holds some bytes."""
    return any(payload in path.read_bytes() for path in directory.rglob("*.log"))


def test_the_commit_delay_is_well_below_the_promised_time() -> None:
    assert BUFFERED_NS <= 50_000_000


PROGRAM = """
import sys
from pybk.flags import WriteFlag
from tests.storage.real_store import open_quick
manager = open_quick(sys.argv[1])
writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
writer.append_many([b"entry %d" % number for number in range(999)])
writer.append(b"entry 999")
print(writer.last_add_confirmed, flush=True)
sys.stdin.readline()
"""


def test_deferred_entries_survive_sigkill_without_a_force_or_another_append(tmp_path: Path) -> None:
    process = python(PROGRAM, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "-1\n", "an entry that was not forced is confirmed"
    wait_until(lambda: written(tmp_path, b"entry 999"))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=PROCESS_S)
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == numbered(1000)


def test_each_burst_of_deferred_entries_is_written(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(write_flags=DEFERRED, insecure=True)
        other = manager.create_ledger(insecure=True)
        for number in range(20):
            writer.append(b"<burst %d>" % number)
            if number % 3 == 0:
                other.append(b"x")
            wait_until(lambda number=number: written(tmp_path, b"<burst %d>" % number))  # type: ignore[misc]  # bound
        assert writer.last_add_confirmed == -1
        assert writer.force() == 19


def looks_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which each reading of the committer's clock is appended."""
    looks: list[float] = []
    look = Log.sleep_seconds

    def note(log: Log) -> float:
        left = look(log)
        looks.append(left)
        return left

    monkeypatch.setattr(Log, "sleep_seconds", note)
    return looks


def test_the_clock_stops_when_nothing_is_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = looks_of(monkeypatch)
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(write_flags=DEFERRED, insecure=True)
        writer.append(b"<first>")
        wait_until(lambda: written(tmp_path, b"<first>"))
        wait_until(lambda: not store_of(manager).log.clock_runs)
        wait_until(lambda: looks[-1] == -1.0)
        count = len(looks)
        threading.Event().wait(5 * BUFFERED_NS / 1e9)
        assert len(looks) == count, "the committer wakes although nothing is buffered"


def test_the_clock_is_not_started_for_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kicks: list[None] = []
    with open_quick(tmp_path) as manager:
        plain, deferred = (
            manager.create_ledger(insecure=True),
            manager.create_ledger(write_flags=DEFERRED, insecure=True),
        )
        kick = GroupCommit.kick_background

        def note(group: GroupCommit) -> None:
            kicks.append(None)
            kick(group)

        monkeypatch.setattr(GroupCommit, "kick_background", note)
        monkeypatch.setattr(store_of(manager).log, "clock_until_ns", 1 << 62)
        for number in range(200):
            deferred.append(b"%d" % number)
            plain.append(b"x")
        assert len(kicks) < 100
        monkeypatch.undo()


def test_without_a_background_only_calls_write(tmp_path: Path) -> None:
    manager = open_store(SimFileSystem(1))
    manager.create_ledger(write_flags=DEFERRED, insecure=True).append(b"x")
    assert not store_of(manager).log.clock_runs
    manager.close()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("end", ["writer.close()", "manager.close()", "sys.exit(3)", "raise KeyboardInterrupt", ""])
def test_no_deferred_entry_is_lost_if_the_program_ends_without_a_crash(tmp_path: Path, end: str) -> None:
    program = PROGRAM.replace("print(writer.last_add_confirmed, flush=True)\nsys.stdin.readline()\n", end)
    process = python(program, tmp_path)
    process.communicate(timeout=PROCESS_S)
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == numbered(1000)


def test_deferred_entries_of_a_bookie_survive_its_sigkill(tmp_path: Path) -> None:
    with running(tmp_path, 1) as cluster:
        client = cluster.connect()
        writer = client.create_ledger(
            password=PASSWORD, write_flags=DEFERRED, ensemble_size=1, write_quorum=1, ack_quorum=1
        )
        for number in range(50):
            writer.append(b"<entry %d>" % number)
        wait_until(lambda: written(tmp_path, b"<entry 49>"))
        assert writer.last_add_confirmed == -1
        bookie = next(iter(cluster.bookies.values()))
        bookie.kill()
        bookie.start()
        other = cluster.connect()
        reader = other.open_ledger(writer.ledger_id, password=PASSWORD, recover=True)
        found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        assert found == [b"<entry %d>" % number for number in range(50)]


@pytest.mark.parametrize("raises", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
def test_no_exception_of_a_callback_ends_the_committer(
    tmp_path: Path, raises: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise raises

    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        done: list[Callable[[], object]] = []
        for _ in range(3):
            writer.append_async(b"x").add_done_callback(fail)
        future = writer.append_async(b"y")
        future.add_done_callback(done.append)  # type: ignore[arg-type]  # whatever it is called with
        wait_until(lambda: done)
        assert manager.health().state == "ok"
        assert writer.append_async(b"z").result(60) == 4
    assert "callback" in caplog.text or "continues after an exception" in caplog.text


def test_a_committer_that_ended_all_the_same_shows_in_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_quick(tmp_path)
    log = store_of(manager).log
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def end(_: Log) -> float:
        raise SystemExit

    monkeypatch.setattr(Log, "sleep_seconds", end)
    with log.mutex:
        log.group.kick_background()
    wait_until(lambda: not log.group.background.is_alive())
    assert manager.health().state == "failed"
    assert "committer" in manager.health().reason
    monkeypatch.undo()
    manager.close()


def test_a_deferred_append_waits_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(write_flags=DEFERRED, insecure=True)
        drive = Log.step
        drivers: list[str] = []

        def note(log: Log) -> None:
            drivers.append(threading.current_thread().name)
            drive(log)

        monkeypatch.setattr(Log, "step", note)
        began = time.monotonic()
        while time.monotonic() < began + 0.3:
            writer.append(b"x" * 100)
        assert set(drivers) <= {"pybk-committer"}, "an append drove a commit by itself"
        monkeypatch.undo()


def forced(manager: LedgerManager, count: int) -> LedgerWriter:
    """Return a writer of deferred entries that are durable, known to the index, and not forced."""
    writer = manager.create_ledger(insecure=True, write_flags=WriteFlag.DEFERRED_FORCE)
    for payload in numbered(count):
        writer.append(payload)
    store_of(manager).log.flush(kept=True)
    manager.checkpoint()
    assert writer.last_add_confirmed == -1
    return writer


def test_a_force_outlives_the_checkpoints_after_it(tmp_path: Path) -> None:
    """The last add confirmed was in the log alone, and a checkpoint's mark went past the record."""
    with open_quick(tmp_path, background=False) as manager:
        writer = forced(manager, 5)
        assert writer.force() == 4
        manager.checkpoint()
    with open_quick(tmp_path, background=False) as manager:
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        assert reader.last_add_confirmed == 4
        assert [entry.payload for entry in reader.read(0, 4)] == numbered(5)


@pytest.mark.parametrize(("owner", "step"), [(Checkpoint, "take_over"), (Store, "clean")])
def test_a_force_during_a_checkpoint_outlives_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """It comes before the ledger's row is written, or between that and the moment in which the ledger is forgotten."""
    with open_quick(tmp_path, background=False) as manager:
        writer = forced(manager, 5)
        writer.append(b"durable and not forced")
        store_of(manager).log.flush(kept=True)
        original, done = getattr(owner, step), list[int]()

        def late(self: object, *arguments: object) -> None:
            if not done:
                done.append(writer.force())
            original(self, *arguments)

        monkeypatch.setattr(owner, step, late)
        manager.checkpoint()
        assert done == [5]
        manager.checkpoint()
    with open_quick(tmp_path, background=False) as manager:
        assert manager.open_ledger(writer.ledger_id, recover=False).last_add_confirmed == 5
