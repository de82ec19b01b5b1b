"""Futures of appends: results, errors, time limits and callbacks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from pybk.errors import AppendTimeoutError, LedgerFencedError
from pybk.flags import WriteFlag
from pybk.manager.append_future import AppendFuture
from pybk.manager.ledger_manager import LedgerManager
from tests.interrupting import interrupted_at
from tests.storage.real_store import contents, numbered, open_quick, stop_syncing
from tests.waiting import WAIT_S

WAITING: Final = ("pybk/manager/append_future.py", "pybk/threads/call_threads.py", "/threading.py")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data") as manager:
        yield manager


def test_a_future_gives_its_id_again_and_again(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    future = writer.append_async(b"x")
    many = writer.append_many_async([b"y", b"z"])
    for _ in range(2):
        assert (future.result(), future.result(WAIT_S), future.exception()) == (0, 0, None)
        assert many.result() == range(1, 3)
    assert future.done()
    assert many.done()


def test_time_limits_are_kept_and_the_append_continues(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    future = writer.append_async(b"x")
    for timeout in (0, 0.02):
        with pytest.raises(AppendTimeoutError, match="continues") as raised:
            future.result(timeout)
        assert raised.value.outcome_unknown
        assert isinstance(raised.value, TimeoutError)
        with pytest.raises(AppendTimeoutError):
            future.exception(timeout)
    go.set()
    assert future.result(WAIT_S) == 0


def test_futures_without_a_waiter_become_durable(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    futures = [writer.append_async(payload) for payload in numbered(20)]
    assert [entry.payload for _, entry in zip(range(20), reader.follow(), strict=False)] == numbered(20)
    assert all(future.done() for future in futures)


def test_callbacks_are_called_once_with_the_future_in_one_thread(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    called: list[tuple[AppendFuture[int], str]] = []
    last = threading.Event()

    def note(future: AppendFuture[int]) -> None:
        called.append((future, threading.current_thread().name))
        if future.result() == 99:
            last.set()

    futures = []
    for payload in numbered(100):
        future = writer.append_async(payload)
        future.add_done_callback(note)
        futures.append(future)
    assert last.wait(WAIT_S)
    assert [future for future, _ in called] == futures
    assert {name for _, name in called} == {"pybk-committer"}
    late = threading.Event()
    futures[0].add_done_callback(lambda _: late.set())
    assert late.wait(WAIT_S), "a callback of a future that was done is never called"


def test_callbacks_of_deferred_appends_are_called(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
        called = threading.Event()
        future = writer.append_async(b"x")
        future.add_done_callback(lambda _: called.set())
        assert called.wait(WAIT_S)
    after = threading.Event()
    future.add_done_callback(lambda _: after.set())
    assert after.is_set(), "a callback given after closing is never called"


def test_a_callback_that_raises_does_no_harm(manager: LedgerManager, caplog: pytest.LogCaptureFixture) -> None:
    writer = manager.create_ledger(insecure=True)
    called = threading.Event()
    future = writer.append_async(b"x")
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(lambda _: called.set())
    assert called.wait(WAIT_S)
    assert "ZeroDivisionError" in caplog.text
    assert writer.append(b"y") == 1


def test_a_callback_may_append(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    ids: list[int] = []
    done = threading.Event()

    def again(_: AppendFuture[int]) -> None:
        ids.append(writer.append(b"again"))
        ids.append(writer.append_async(b"and again").result())
        done.set()

    writer.append_async(b"first").add_done_callback(again)
    assert done.wait(WAIT_S)
    assert ids == [1, 2]


def test_the_manager_waits_for_futures_and_calls_back_before_it_is_closed(tmp_path: Path) -> None:
    done: list[int] = []
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        for payload in numbered(50):
            writer.append_async(payload).add_done_callback(lambda future: done.append(future.result()))
    assert done == list(range(50))
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0) == numbered(50)


def test_a_failed_future_raises_each_time_and_gives_its_error(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=3, insecure=True)
    future = writer.append_async(b"x", entry_id=1)
    manager.open_ledger(3)
    writer_error: list[str] = []
    future.add_done_callback(lambda failed: writer_error.append(type(failed.exception()).__name__))
    for _ in range(2):
        with pytest.raises(LedgerFencedError):
            future.result()
        assert isinstance(future.exception(1), LedgerFencedError)
    with pytest.raises(LedgerFencedError):
        writer.close()
    manager.close()
    assert writer_error == ["LedgerFencedError"]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("advanced", [False, True])
def test_an_interrupt_at_any_line_of_a_wait_is_all_that_is_raised(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch, advanced: bool
) -> None:
    writer = manager.create_ledger(ledger_id=3 if advanced else None, insecure=True)
    go = stop_syncing(monkeypatch)
    future = writer.append_async(b"x", entry_id=1 if advanced else None)
    line, fired = 0, True
    while fired:
        fired = interrupted_at(line, WAITING, partial(future.result, 0.001), ignored=(AppendTimeoutError,))
        line += 1
    assert line > 8, "nothing was traced"
    go.set()
    if advanced:
        writer.append(b"before", entry_id=0)
    assert future.result(WAIT_S) == int(advanced)


def test_every_thread_that_waits_for_earlier_entries_is_woken(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=3, insecure=True)
    future = writer.append_async(b"x", entry_id=1)
    with ThreadPoolExecutor(5) as threads:
        waiting = [threads.submit(future.result, timeout) for timeout in (None, None, WAIT_S, WAIT_S, WAIT_S)]
        writer.append(b"before", entry_id=0)
        assert [each.result() for each in waiting] == [1] * 5
