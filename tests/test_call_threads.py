"""The threads that make the calls of coroutines."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pybk import (
    BlobStore,
    ClosedError,
    LedgerManager,
    Log,
    LogFencedError,
    LogLockedError,
    UsageError,
    WriteAheadLog,
)
from pybk.errors import StorageRefusedError
from pybk.manager.ledger_manager import backend_of
from pybk.testing import TestCluster as Cluster
from pybk.threads.call_threads import SHARED_MAX, in_own_thread, in_thread
from tests.cluster.inside import Inside, inside
from tests.paths import ROOT
from tests.sampling import mostly
from tests.waiting import PROCESS_S, WAIT_S, wait_until

MANY = SHARED_MAX + 1


class _Refusing(ThreadPoolExecutor):
    def submit(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a call uses the default executor of the loop")


def refuse_default_executor() -> None:
    asyncio.get_running_loop().set_default_executor(_Refusing(1))


def threads_named(prefix: str) -> int:
    return sum(each.name.startswith(prefix) for each in threading.enumerate())


def test_no_call_names_the_default_executor() -> None:
    found = [
        path
        for path in (ROOT / "src" / "pybk").rglob("*.py")
        if any(each in path.read_text(encoding="utf-8") for each in ("to_thread(", "run_in_executor(None"))
    ]
    assert found == []


def test_logs_and_blobs_do_without_the_default_executor(tmp_path: Path) -> None:
    async def use() -> None:
        refuse_default_executor()
        async with LedgerManager.open_async(tmp_path / "store") as manager:
            async with Log.open_async(manager, "log", insecure=True) as log, log.writer_async() as writer:
                await writer.append_coro(b"1")
                await writer.roll_async()
                async with log.subscribe_async("s", start=0) as subscription:
                    record = await subscription.read_async()
                    assert record is not None
                    subscription.nack([record])
                    again = await subscription.read_async()
                    assert again == record
                    await subscription.ack_async(record)
                    assert await subscription.backlog_async() == 0
                assert [each.data async for each in await log.reader_async()] == [b"1"]
                assert len(await log.segments_async()) == 2
            async with WriteAheadLog.open_async(manager, "wal", insecure=True) as wal:
                await wal.append_coro(b"2")
                async with wal.checkpoint_async() as checkpoint:
                    await checkpoint.write_async(b"3")
            blobs = BlobStore.open(manager, insecure=True)
            await blobs.put_async("blob", b"4")
            assert await blobs.get_async("blob") == b"4"
            await manager.health_async()

    asyncio.run(use())


@pytest.fixture(params=mostly("store", "cluster", among="manager"))
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LedgerManager]:
    if request.param == "store":
        with LedgerManager.open(tmp_path / "store") as manager:
            yield manager
    else:
        with Cluster(tmp_path / "cluster") as cluster, cluster.connect() as manager:
            yield manager


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("kind", ["log", "wal", "subscription"])
def test_many_waiters_of_one_lock_hold_no_threads(manager: LedgerManager, kind: str) -> None:
    """More of them than there are shared threads wait while other calls are made, and each becomes the owner."""
    waiters = SHARED_MAX + 4

    async def use(manager: LedgerManager) -> None:
        refuse_default_executor()
        log = await Log.open_async(manager, "log", insecure=True)

        def opening(wait: float) -> Any:
            if kind == "log":
                return log.writer_async(wait=wait)
            if kind == "wal":
                return WriteAheadLog.open_async(manager, "wal", insecure=True, wait=wait)
            return log.subscribe_async("s", wait=wait)

        async def own() -> None:
            async with opening(PROCESS_S):  # each takes over the log, one after the other
                pass

        holder = await opening(0.0)
        waiting = [asyncio.create_task(own()) for _ in range(waiters)]
        for _ in range(SHARED_MAX):
            await manager.health_async()
        assert threads_named("pybk-wait") <= 1
        assert threads_named("pybk-call") <= SHARED_MAX
        assert not any(each.done() for each in waiting)
        await holder.close_async()
        await asyncio.gather(*waiting)
        await log.close_async()

    asyncio.run(use(manager))


def test_a_waiter_gives_up_at_its_time_and_steals_then(tmp_path: Path) -> None:
    async def use(manager: LedgerManager) -> None:
        async with Log.open_async(manager, "log", insecure=True) as log:
            holder = await log.writer_async()
            with pytest.raises(LogLockedError, match="live writer"):
                await log.writer_async(wait=0.1)
            thief = await log.writer_async(wait=0.1, steal=True)
            await thief.append_coro(b"1")
            await thief.close_async()
            with pytest.raises(LogFencedError):
                await holder.close_async()

    with LedgerManager.open(tmp_path / "store") as manager:
        asyncio.run(use(manager))


def test_a_lock_whose_holder_was_dropped_wakes_its_waiters(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager:
        backend = backend_of(manager)
        lock, woken = backend.try_lock("a", "me"), threading.Event()
        watch = backend.watch_lock("a", woken.set)
        assert not woken.is_set()
        del lock
        assert woken.wait(WAIT_S)
        watch.cancel()
        woken.clear()
        again = backend.try_lock("a", "me")
        assert again is not None
        again.release()
        assert not woken.is_set()


def test_calls_that_end_something_do_not_queue() -> None:
    async def use() -> None:
        ended = threading.Event()
        waiting = [asyncio.create_task(in_thread(ended.wait, WAIT_S)) for _ in range(2 * SHARED_MAX)]
        await in_own_thread(ended.set)
        assert all(await asyncio.gather(*waiting))

    asyncio.run(use())


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("kind", ["force", "sync", "wal", "upload"])
def test_calls_that_wait_for_bookies_leave_the_shared_threads_to_others(tmp_path: Path, kind: str) -> None:
    """More of them than there are shared threads wait for a bookie to return, and other calls are made meanwhile."""
    one = (1, 1, 1)

    async def use(cluster: Inside, manager: LedgerManager) -> None:
        ledger = await manager.create_ledger_async(insecure=True, ensemble_size=1)
        log = (await Log.open_async(manager, "log", insecure=True, quorums=one)).writer()
        wal = await WriteAheadLog.open_async(manager, "wal", insecure=True, quorums=one)
        uploads = [BlobStore.open(manager, insecure=True, quorums=one).create_blob(f"b{at}") for at in range(MANY)]
        cluster.bookies[0].close()
        pending: list[Any] = [ledger.append_async(b"x"), log.append_async(b"x"), wal.append_async(b"x")]
        calls: dict[str, Any] = {"force": ledger.force_async, "sync": log.sync_async, "wal": wal.sync_async}
        waiting = [asyncio.create_task(each.commit_async() if kind == "upload" else calls[kind]()) for each in uploads]
        for _ in range(3):
            await asyncio.wait_for(manager.health_async(), WAIT_S / 2)
        assert not any(each.done() for each in waiting)
        await in_thread(cluster.open_bookie, 0)
        await asyncio.gather(*waiting)
        assert [await pending[0], (await pending[1]).seq, await pending[2]] == [0, 0, 1]
        for each in (ledger, log, wal):
            await each.close_async()

    with inside(tmp_path, count=1) as cluster:
        asyncio.run(use(cluster, cluster.connect(bookie_patience_seconds=WAIT_S)))


def test_a_call_that_was_cancelled_before_a_thread_began_it_is_made_all_the_same() -> None:
    async def use() -> None:
        ended, made = threading.Event(), threading.Event()
        waiting = [asyncio.create_task(in_thread(ended.wait, WAIT_S)) for _ in range(SHARED_MAX)]
        cancelled = asyncio.create_task(in_thread(made.set))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not made.is_set()
        ended.set()
        await asyncio.gather(*waiting)
        await in_own_thread(made.wait, WAIT_S)
        assert made.is_set()

    asyncio.run(use())


def test_a_call_has_the_context_of_its_coroutine_and_raises_its_error() -> None:
    variable = contextvars.ContextVar("variable", default=0)

    async def use() -> None:
        variable.set(1)
        assert await in_thread(variable.get) == await in_own_thread(variable.get) == 1
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 // 0)

    asyncio.run(use())


def test_a_close_is_made_though_the_system_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise StorageRefusedError("no more threads")

    async def use() -> None:
        await in_thread(int)  # a shared thread runs
        monkeypatch.setattr("pybk.threads.call_threads.start_thread", refuse)
        assert await in_own_thread(int) == 0

    asyncio.run(use())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    async def use() -> int:
        return await in_thread(int, "7")

    assert asyncio.run(use()) == 7
    child = os.fork()
    if child == 0:
        os._exit(0 if asyncio.run(use()) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_interpreter_waits_for_a_call_that_runs(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys, time\n"
        "from pybk.threads.call_threads import in_thread\n"
        "began, done = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "def call():\n"
        "    began.touch()\n"
        "    time.sleep(0.5)\n"
        "    done.touch()\n"
        "async def main():\n"
        "    task = asyncio.create_task(in_thread(call))\n"
        "    while not began.exists():\n"
        "        await asyncio.sleep(0.01)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    done = tmp_path / "done"
    subprocess.run([sys.executable, "-c", program, tmp_path / "began", done], check=True, timeout=PROCESS_S)
    assert done.exists()


def test_a_cancelled_waiter_leaves_the_lock_to_others(tmp_path: Path) -> None:
    async def use(manager: LedgerManager) -> None:
        async with Log.open_async(manager, "log", insecure=True) as log:
            holder = await log.writer_async()
            waiting = asyncio.ensure_future(log.writer_async(wait=WAIT_S))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await holder.close_async()
            async with log.writer_async(wait=WAIT_S) as writer:
                await writer.append_coro(b"1")

    with LedgerManager.open(tmp_path / "store") as manager:
        asyncio.run(use(manager))
    wait_until(lambda: threads_named("pybk-wait") == 0)


def test_waiters_become_the_owner_in_the_order_in_which_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release wakes the first of them alone; those that are cancelled or give up pass their turn on."""
    waiters, looks, came = 40, 0, list[int]()

    async def use(manager: LedgerManager) -> None:
        backend = backend_of(manager)
        try_lock = backend.try_lock

        def counted(name: str, owner: str) -> Any:
            nonlocal looks
            looks += 1
            return try_lock(name, owner)

        monkeypatch.setattr(backend, "try_lock", counted)

        async def own(number: int, wait: float) -> None:
            async with log.writer_async(wait=wait):
                came.append(number)

        async with Log.open_async(manager, "log", insecure=True) as log:
            holder = await log.writer_async()
            waiting = [asyncio.create_task(own(number, WAIT_S)) for number in range(waiters)]
            hasty = asyncio.create_task(own(-1, 0.05))
            with pytest.raises(LogLockedError):
                await hasty
            for number in (0, 1, 7):
                waiting[number].cancel()
            await holder.close_async()
            await asyncio.gather(*waiting, return_exceptions=True)

    with LedgerManager.open(tmp_path / "store") as manager:
        asyncio.run(use(manager))
    assert came == [number for number in range(waiters) if number not in (0, 1, 7)]
    assert looks < 5 * waiters


def test_what_takes_no_lock_and_what_cannot_be_wait_for_no_turn(tmp_path: Path) -> None:
    """Others wait for the locks all the while, and so it would be their turn first."""

    async def use(manager: LedgerManager) -> None:
        log, other = [await Log.open_async(manager, "log", insecure=True) for _ in range(2)]
        open_wal = partial(WriteAheadLog.open_async, manager, "wal", insecure=True, wait=PROCESS_S)
        holders: list[Any] = [await log.writer_async(), await log.subscribe_async("s"), await open_wal(), log]
        openings: list[Any] = [log.writer_async(wait=PROCESS_S), log.subscribe_async("s", wait=PROCESS_S), open_wal()]
        waiting = [asyncio.ensure_future(each) for each in openings]
        await asyncio.sleep(0)  # each takes the turn at its lock
        async with asyncio.timeout(WAIT_S):
            async with log.subscribe_async("s", durable=False, wait=PROCESS_S), open_wal(mode="r"):
                pass
            for call in (partial(log.subscribe_async, "s", wait=PROCESS_S), open_wal):
                with pytest.raises(UsageError, match="mode is 'both'"):
                    await call(mode="both")
            with pytest.raises(UsageError, match="steal is 'no'"):
                await log.writer_async(wait=PROCESS_S, steal="no")  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="segment_bytes"):
                await log.writer_async(wait=PROCESS_S, segment_bytes=0)
            await other.close_async()
            with pytest.raises(ClosedError):
                await other.writer_async(wait=PROCESS_S)
            with pytest.raises(ClosedError):
                await other.subscribe_async("s", wait=PROCESS_S)
        assert not any(each.done() for each in waiting)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for holder in holders:
            await holder.close_async()

    with LedgerManager.open(tmp_path / "store") as manager:
        asyncio.run(use(manager))


def test_a_waiter_that_is_cancelled_while_its_watch_is_made_leaves_no_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    left: list[Any] = []

    async def use(manager: LedgerManager) -> None:
        backend = backend_of(manager)
        watch_lock = backend.watch_lock

        def watch_slowly(name: str, callback: Any) -> Any:
            watch: Any = watch_lock(name, callback)
            cancel = watch.cancel

            def cancel_once() -> None:
                cancel()
                left.remove(watch)

            left.append(watch)
            watch.cancel = cancel_once
            began.set()
            assert go_on.wait(WAIT_S)
            return watch

        monkeypatch.setattr(backend, "watch_lock", watch_slowly)
        async with Log.open_async(manager, "log", insecure=True) as log, log.writer_async():
            waiting = asyncio.ensure_future(log.writer_async(wait=WAIT_S))
            await in_own_thread(began.wait, WAIT_S)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            go_on.set()
            await in_own_thread(wait_until, lambda: not left)

    with LedgerManager.open(tmp_path / "store") as manager:
        asyncio.run(use(manager))
