"""KeyboardInterrupt at every line of the commit path: nobody who waits is stranded, and no entry is lost or doubled."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from tests.internals import descriptor_of
from tests.interrupting import CallInterrupter, interrupted_at
from tests.sampling import every, places, sample
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import open_store
from tests.waiting import WAIT_S

APPEND_PATH = (
    "pybk/manager/ledger_writer.py",
    "pybk/threads/group_commit.py",
    "pybk/storage/log/log.py",
    "pybk/storage/log/commit.py",
    "pybk/storage/descriptor.py",
    "pybk/storage/store.py",
    "pybk/storage/preallocation.py",
)
_BIG = bytes(100_000)


def interrupted(line: int, call: Any) -> bool:
    """Call with an interrupt at one line of the commit path; return whether it came to that."""
    return interrupted_at(line, APPEND_PATH, call)


def append_some(writer: LedgerWriter, name: bytes, done: dict[bytes, int]) -> None:
    for number in range(3):
        payload = b"%s %d" % (name, number)
        done[payload] = writer.append(payload)


def append_big(writer: LedgerWriter) -> None:
    for _ in range(2):
        writer.append(_BIG)


def one_round(manager: LedgerManager, line: int) -> bool:
    """Interrupt an append while other threads append to the same ledger; return whether the line was reached."""
    writer = manager.create_ledger(insecure=True)
    done: dict[bytes, int] = {}
    threads = [
        threading.Thread(target=append_some, args=(writer, b"thread %d" % k, done), daemon=True) for k in range(2)
    ]
    future = writer.append_async(b"future")
    for thread in threads:
        thread.start()
    fired = interrupted(line, lambda: append_some(writer, b"main", done))
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"a waiter is stranded after an interrupt at line event {line}"
    done[b"future"] = future.result(WAIT_S)
    done[b"after"] = writer.append(b"after")
    writer.close()
    reader = manager.open_ledger(writer.ledger_id)
    found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
    for payload, entry_id in done.items():
        assert found[entry_id] == payload
    assert len(set(found)) == len(found), "an entry was written twice"
    return fired


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_of_the_commit_path_strands_no_waiter() -> None:
    manager = open_store(SimFileSystem(1))
    following = places("commit path", 3, 3)
    while one_round(manager, line := next(following)):
        pass
    assert line > 200, "the commit path was not traced"
    manager.close()


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
def test_an_interrupt_while_the_log_switches_files_strands_no_waiter() -> None:
    for line in sample("switch", range(0, 400, every(13)), 3):
        manager = open_store(SimFileSystem(line))
        writer = manager.create_ledger(insecure=True)
        acknowledged = [writer.append(_BIG) for _ in range(9)]
        interrupted(line, partial(append_big, writer))
        acknowledged.append(writer.append(b"after"))
        manager.checkpoint()
        writer.close()
        reader = manager.open_ledger(writer.ledger_id)
        found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        assert found[acknowledged[-1]] == b"after"
        assert len(found) >= len(acknowledged)
        manager.close()


@pytest.mark.sampled(one_in=3, group="any line")
@pytest.mark.timeout(0)
def test_the_checkpoint_after_an_interrupt_has_all_that_is_durable() -> None:
    """It drops the log files, so an entry whose ledger it does not know of would be lost with all that follow it."""
    fs, line, fired = SimFileSystem(3), 0, True
    manager = open_store(fs)
    writers = [manager.create_ledger(insecure=True, storage_hints={hint}) for hint in StorageHint]
    kept: dict[LedgerWriter, list[bytes]] = {writer: [] for writer in writers}
    while fired:
        writer, after = writers[line % len(writers)], b"after %d" % line
        manager.checkpoint()  # from here on the ledger is not one that changed
        fired = interrupted(line, partial(writer.append, b"interrupted"))
        manager.checkpoint()
        last = writer.append(after)
        manager.checkpoint()
        found = manager.open_ledger(writer.ledger_id, recover=False).read(0, last)
        assert [entry.payload for entry in found][-1] == after
        kept[writer].append(after)
        line += every(9)
    assert line > 100, "the commit path was not traced"
    manager.close()
    with open_store(fs) as manager:
        for writer, payloads in kept.items():
            reader = manager.open_ledger(writer.ledger_id)
            entries = reader.read(0, reader.last_add_confirmed)
            assert [entry.payload for entry in entries if entry.payload != b"interrupted"] == payloads


@pytest.mark.parametrize("what", ["append", "readmit"])
def test_an_interrupt_after_any_call_into_c_leaves_no_ledger_locked(what: str) -> None:
    """These two take the ledger's lock without waiting for it."""
    with open_store(SimFileSystem(0)) as manager:
        writer = manager.create_ledger(insecure=True)
        descriptor = descriptor_of(writer)
        calls = 0
        while True:
            interrupter = CallInterrupter(calls, APPEND_PATH)
            coroutine = writer.append_coro(b"x")
            sys.setprofile(interrupter)
            try:
                coroutine.send(None) if what == "append" else descriptor.readmit()
            except (KeyboardInterrupt, RuntimeError, StopIteration):
                pass  # without an event loop the coroutine comes as far as to wait for its entry
            finally:
                sys.setprofile(None)
                coroutine.close()
            assert not descriptor.lock.locked(), calls
            if not interrupter.at:
                break
            calls += 1
        assert calls > 1
        writer.append(b"after")


@pytest.mark.sampled(one_in=3, group="handlers")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in somebody's gc callback
@pytest.mark.timeout(0)
def test_real_interrupts_strand_no_waiter_and_lose_nothing() -> None:
    manager = open_store(SimFileSystem(2))
    for rounds in range(500):
        writer = manager.create_ledger(insecure=True)
        done: dict[bytes, int] = {}
        thread = threading.Thread(target=append_some, args=(writer, b"thread", done), daemon=True)
        thread.start()
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00005 + 0.00003 * (rounds % 30))
                append_some(writer, b"main", done)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            pass
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a waiter is stranded"
        done[b"after"] = writer.append(b"after")
        writer.close()
        reader = manager.open_ledger(writer.ledger_id)
        found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        assert all(found[entry_id] == payload for payload, entry_id in done.items())
    manager.close()


@pytest.fixture(autouse=True)
def alarms_interrupt() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, old)
