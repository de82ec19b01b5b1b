"""Futures of appends under every tool of asyncio and concurrent.futures that takes futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import LedgerClosedError
from pybk.flags import WriteFlag
from pybk.manager.append_future import AppendFuture
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams.log import Log
from tests.storage.real_store import contents, numbered, open_quick, stop_syncing
from tests.waiting import WAIT_S

CALLS_PER_APPEND = 9
"""Python calls of one ``append_async`` that nobody waits for, in an embedded store."""

asyncio_wait: Any = asyncio.wait  # whose stubs know asyncio's own futures alone

MARK = contextvars.ContextVar("MARK", default="")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data") as manager:
        yield manager


def make(writer: LedgerWriter, number: int) -> AppendFuture[int]:
    """Append an entry whose payload contains its id, to an ordinary or an advanced ledger."""
    return writer.append_async(b"entry %d" % number, entry_id=number if writer.metadata.advanced else None)


def backwards(writer: LedgerWriter, count: int) -> list[AppendFuture[int]]:
    """Append entries; of an advanced ledger, the last first, so that all but one wait for those before them."""
    numbers = range(count)
    return [make(writer, number) for number in (reversed(numbers) if writer.metadata.advanced else numbers)]


both_kinds = pytest.mark.parametrize("ledger_id", [None, 5], ids=["ordinary", "advanced"])


@both_kinds
def test_asyncio_wait_returns_when_appends_are_done(manager: LedgerManager, ledger_id: int | None) -> None:
    writer = manager.create_ledger(ledger_id=ledger_id, insecure=True)

    async def main() -> None:
        futures = backwards(writer, 20)
        done, pending = await asyncio_wait(futures, timeout=WAIT_S)
        assert (done, pending) == (set(futures), set())
        assert sorted(future.result() for future in done) == list(range(20))
        again, _ = await asyncio_wait(futures, timeout=WAIT_S)
        assert again == done, "futures that are done are waited for, too"
        mixed = [make(writer, 20), asyncio.create_task(asyncio.sleep(0))]
        done_mixed, _ = await asyncio_wait(mixed, timeout=WAIT_S)
        assert len(done_mixed) == 2

    asyncio.run(main())


@pytest.mark.parametrize("until", [asyncio.FIRST_COMPLETED, asyncio.FIRST_EXCEPTION])
def test_asyncio_wait_returns_with_the_first(manager: LedgerManager, until: str) -> None:
    early = manager.create_ledger(ledger_id=5, insecure=True)
    writer = manager.create_ledger(insecure=True)

    async def main() -> None:
        never = early.append_async(b"x", entry_id=1)
        other = early.append_async(b"x", entry_id=3)
        first = [never, writer.append_async(b"x")] if until == asyncio.FIRST_COMPLETED else [never, other]
        waiting = asyncio.create_task(asyncio_wait(first, return_when=until))
        await asyncio.sleep(0)
        if until == asyncio.FIRST_EXCEPTION:
            await early.close_async()
        done, _ = await asyncio.wait_for(waiting, WAIT_S)
        if until == asyncio.FIRST_COMPLETED:
            assert done == {first[1]}
        else:
            assert {type(future.exception()) for future in done} == {LedgerClosedError}

    asyncio.run(main())


def test_asyncio_wait_with_a_timeout_leaves_the_append_alone(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)

    async def main() -> None:
        future = writer.append_async(b"entry 0")
        assert await asyncio_wait([future], timeout=0.01) == (set(), {future})
        for outer in (asyncio.shield(future), asyncio.ensure_future(future), asyncio.wrap_future(future.concurrent())):
            await asyncio.sleep(0)
            outer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await outer
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.01)
        assert not future.cancel(), "an append cannot be cancelled"
        assert not future.cancelled()
        go.set()
        assert await asyncio.wait_for(future, WAIT_S) == 0, "cancelling a waiter never cancels the append"

    asyncio.run(main())
    assert contents(manager, writer.ledger_id) == numbered(1)


@pytest.mark.parametrize("kind", ["entry", "entries", "advanced", "record", "records"])
def test_cancel_returns_false_and_the_append_goes_into_the_ledger(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A task that ends its futures by ``cancel``, as those of the standard library, learns that these continue."""
    log = Log.open(manager, "a log", insecure=True)
    records = log.writer()
    advanced = manager.create_ledger(ledger_id=500, insecure=True)
    entries = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    append: dict[str, Callable[[], AppendFuture[Any]]] = {
        "entry": lambda: entries.append_async(b"1"),
        "entries": lambda: entries.append_many_async([b"1", b"2"]),
        "advanced": lambda: advanced.append_async(b"2", entry_id=1),
        "record": lambda: records.append_async(b"1"),
        "records": lambda: records.append_many_async([b"1", b"2"]),
    }
    future = append[kind]()
    of_standard = future.concurrent()
    if kind == "advanced":
        assert not future.cancel(), "it waits for the entry before it"
        _ = advanced.append_async(b"1", entry_id=0)
    found = [each.cancel() for each in (future, of_standard)]
    was_done = future.done()
    go.set()
    assert (found, was_done) == ([False, False], False)
    future.result(WAIT_S)
    assert [each.cancel() for each in (future, of_standard)] == [False, False], "also once it is done"
    assert [each.cancelled() for each in (future, of_standard)] == [False, False]
    payloads = [b"1", b"2"] if kind in ("entries", "records", "advanced") else [b"1"]
    if kind in ("record", "records"):
        assert [record.data for record in log.reader()] == payloads
    else:
        ledger = advanced if kind == "advanced" else entries
        assert contents(manager, ledger.ledger_id) == payloads
    log.close()


@both_kinds
def test_every_other_tool_of_asyncio_takes_them(manager: LedgerManager, ledger_id: int | None) -> None:
    writer = manager.create_ledger(ledger_id=ledger_id, insecure=True)

    async def main() -> None:
        assert await asyncio.gather(*(make(writer, number) for number in range(5))) == list(range(5))
        assert await asyncio.wait_for(make(writer, 5), WAIT_S) == 5
        assert await asyncio.shield(make(writer, 6)) == 6
        completed = asyncio.as_completed([make(writer, number) for number in range(7, 10)])
        assert sorted([await each for each in completed]) == [7, 8, 9]
        assert await asyncio.ensure_future(make(writer, 10)) == 10
        assert await asyncio.wrap_future(make(writer, 11).concurrent()) == 11
        async with asyncio.timeout(WAIT_S):
            assert await make(writer, 12) == 12

    asyncio.run(main())


@both_kinds
def test_concurrent_futures_take_them(manager: LedgerManager, ledger_id: int | None) -> None:
    writer = manager.create_ledger(ledger_id=ledger_id, insecure=True)
    futures = [future.concurrent() for future in backwards(writer, 10)]
    assert not futures[0].cancel(), "an append cannot be cancelled"
    done, pending = concurrent.futures.wait(futures, WAIT_S)
    assert (done, pending) == (set(futures), set())
    assert sorted(future.result() for future in concurrent.futures.as_completed(futures)) == list(range(10))
    other = manager.create_ledger(ledger_id=6, insecure=True)
    failed = other.append_async(b"x", entry_id=1).concurrent()
    other.close()
    assert isinstance(failed.exception(WAIT_S), LedgerClosedError)


def test_callbacks_given_in_a_loop_are_called_in_it(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    deferred = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)

    async def main() -> None:
        called: list[tuple[AppendFuture[int], int, str]] = []

        def note(future: AppendFuture[int]) -> None:
            called.append((future, threading.get_ident(), MARK.get()))

        loop = asyncio.get_running_loop()
        complaints: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        future = writer.append_async(b"x")
        MARK.set("when given")
        future.add_done_callback(note)
        future.add_done_callback(lambda _: 1 // 0)
        MARK.set("later")
        await future
        while True:  # until an append is not done before its callback is removed
            removed: list[Any] = []
            other = writer.append_async(b"y")
            other.add_done_callback(removed.append)
            taken = other.remove_done_callback(removed.append)
            assert taken == 1 or other.done(), "what is not done has the callback"
            assert other.remove_done_callback(removed.append) == 0
            await other
            if taken:
                break
        done = deferred.append_async(b"x")
        done.add_done_callback(note, context=contextvars.Context())
        assert len(called) <= 1, "a callback is called by the loop, not by the call that gives it"
        while len(called) < 2 or not complaints:
            await asyncio.sleep(0)
        assert called == [(future, threading.get_ident(), "when given"), (done, threading.get_ident(), "")]
        assert removed == []
        assert isinstance(complaints[0]["exception"], ZeroDivisionError)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_one_wake_up_a_commit_and_loop(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    advanced = manager.create_ledger(ledger_id=5, insecure=True)

    async def main() -> None:
        woken = 0
        loop = asyncio.get_running_loop()
        wake: Callable[..., Any] = loop.call_soon_threadsafe

        def count(*arguments: Any, **options: Any) -> Any:
            nonlocal woken
            woken += 1
            return wake(*arguments, **options)

        first = writer.append_async(b"first")  # its commit is held up, and all others form the next
        futures = [first, *(writer.append_async(b"x") for _ in range(100)), *backwards(advanced, 100)]
        waiting = asyncio.ensure_future(asyncio_wait([*futures, *futures]))
        also = asyncio.ensure_future(asyncio.gather(*futures))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        go.set()
        await asyncio.wait_for(asyncio.gather(waiting, also), WAIT_S)
        monkeypatch.undo()
        assert woken <= 10, f"{woken} wake-ups for two commits"

    go = stop_syncing(monkeypatch)
    asyncio.run(main())


def test_a_closed_loop_does_not_prevent_appends(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    early = manager.create_ledger(ledger_id=5, insecure=True)
    go = stop_syncing(monkeypatch)
    futures: list[AppendFuture[int]] = []

    async def main() -> None:
        futures.extend([writer.append_async(b"x"), early.append_async(b"x", entry_id=1)])
        for future in futures:
            future.add_done_callback(lambda _: None)

    asyncio.run(main())
    go.set()
    assert writer.append(b"y") == 1
    assert early.append(b"x", entry_id=0) == 0
    assert [future.result(WAIT_S) for future in futures] == [0, 1]


def test_appends_without_callbacks_cost_no_extra_calls(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    payload = b"x" * 100

    def append() -> None:
        for _ in range(1000):
            _ = writer.append_async(payload)

    calls = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    writer.append(payload)
    sys.setprofile(count)
    try:
        append()
    finally:
        sys.setprofile(None)
    writer.force()
    assert calls <= 1000 * CALLS_PER_APPEND * 1.05, "Python calls of append_async"
