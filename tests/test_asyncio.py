"""The asyncio form of every call, and what cancelling one leaves alone."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pybk import BlobStore, ClusterAdmin, Log, LogReader, LogWriter, Namespace, WriteAheadLog
from pybk.config import StoreConfig
from pybk.errors import ClosedError, LedgerClosedError, NoSuchLedgerError, ReadRangeError, UnauthorizedError
from pybk.flags import ReadFlag, StorageHint, WriteFlag
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from tests.internals import descriptor_of
from tests.storage.real_store import QUICK, contents, numbered, open_quick, stop_syncing
from tests.waiting import WAIT_S, wait_until

CONFIG = StoreConfig(**QUICK)


@pytest.mark.parametrize(
    "owner",
    [
        LedgerManager,
        LedgerWriter,
        LedgerReader,
        BlobStore,
        ClusterAdmin,
        Log,
        LogReader,
        LogWriter,
        Namespace,
        WriteAheadLog,
    ],
)
def test_every_call_has_its_asyncio_form(owner: type) -> None:
    calls = {name for name, value in inspect.getmembers(owner) if not name.startswith("_") and inspect.isroutine(value)}
    # They read and write nothing themselves; what they return has asyncio forms.
    at_once = {"transaction", "on_change", "follow"}
    for name in sorted(name for name in calls - at_once if not name.endswith(("_async", "_coro"))):
        assert f"{name}_async" in calls, f"{owner.__name__}.{name} has no asyncio form"


def test_everything_from_opening_to_closing(tmp_path: Path) -> None:
    async def main() -> None:
        open_quick(tmp_path).close()
        async with LedgerManager.open_async(tmp_path, config=CONFIG) as manager:
            async with manager.create_ledger_async(password=b"p", ledger_type="orders") as writer:
                assert await writer.append_async(b"entry 0") == 0
                assert await writer.append_many_async([b"entry 1", b"entry 2"]) == range(1, 3)
                assert await asyncio.gather(*map(writer.append_async, numbered(7, 3))) == list(range(3, 10))
                assert await writer.force_async() == 9
            with pytest.raises(LedgerClosedError):
                await writer.append_async(b"late")
            async with manager.open_ledger_async(
                writer.ledger_id, password=b"p", read_flags=ReadFlag.DONT_CACHE
            ) as reader:
                assert [entry.payload async for entry in reader.read_async(0, 9)] == numbered(10)
                assert [entry.payload async for entry in reader.read_async(4, 3)] == []
                assert [entry.payload async for entry in reader.read_unconfirmed_async(7, 9)] == numbered(3, 7)
                assert [entry.payload async for entry in reader.follow_async(8)] == numbered(2, 8)
                assert len(await reader.read_batch_async(2, last=5)) == 4
                assert await reader.read_last_add_confirmed_async() == 9
                with pytest.raises(ReadRangeError):
                    await anext(reader.read_async(0, 10))
            with pytest.raises(ClosedError):
                await reader.read_batch_async(0)
            assert await manager.list_ledgers_async("orders") == [0]
            assert (await manager.ledger_metadata_async(0)).state is LedgerState.CLOSED
            await manager.move_ledger_async(0, StorageHint.HDD)
            await manager.move_ledgers_async([0], StorageHint.SSD)
            await manager.checkpoint_async()
            assert (await manager.health_async()).state == "ok"
            assert (await manager.metrics_async()).counters
            with pytest.raises(UnauthorizedError):
                await manager.open_ledger_async(0, password=b"wrong")
            await manager.delete_ledger_async(0)
            with pytest.raises(NoSuchLedgerError):
                await manager.open_ledger_async(0)
        with pytest.raises(ClosedError):
            manager.health()

    asyncio.run(main())


def test_handles_may_be_awaited_and_closed_by_hand(tmp_path: Path) -> None:
    async def main() -> None:
        open_quick(tmp_path).close()
        manager = await LedgerManager.open_async(tmp_path, config=CONFIG)
        writer = await manager.create_ledger_async(write_flags=WriteFlag.DEFERRED_FORCE, ledger_id=4, insecure=True)
        assert await writer.append_async(b"x", entry_id=0) == 0
        reader = await manager.open_ledger_async(4, recover=False)
        assert reader.last_add_confirmed == -1
        await writer.close_async()
        assert await reader.read_last_add_confirmed_async() == 0
        await reader.close_async()
        await manager.close_async()

    asyncio.run(main())


def test_a_wrong_argument_shows_when_it_is_awaited(tmp_path: Path) -> None:
    async def main(manager: LedgerManager) -> None:
        wrong: dict[str, Any] = {"pass_word": b""}
        with pytest.raises(TypeError, match="pass_word"):
            await manager.create_ledger_async(**wrong)

    with open_quick(tmp_path) as manager:
        asyncio.run(main(manager))


def test_many_producers_in_one_loop(tmp_path: Path) -> None:
    async def produce(writer: LedgerWriter, name: int, found: dict[int, bytes]) -> None:
        for number in range(40):
            payload = b"%d-%d" % (name, number)
            found[await writer.append_async(payload)] = payload

    async def main(writer: LedgerWriter) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        await asyncio.gather(*(produce(writer, name, found) for name in range(16)))
        return found

    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        found = asyncio.run(main(writer))
        assert contents(manager, 0) == [found[entry_id] for entry_id in range(640)]


def test_cancelling_one_append_leaves_the_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(writer: LedgerWriter, go: threading.Event) -> list[Any]:
        async def one(number: int) -> int:
            return await writer.append_async(b"entry %d" % number)

        tasks = [asyncio.create_task(one(number)) for number in range(6)]
        await asyncio.sleep(0.02)
        tasks[2].cancel()
        await asyncio.sleep(0.01)
        go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        results = asyncio.run(main(writer, stop_syncing(monkeypatch)))
        assert isinstance(results.pop(2), asyncio.CancelledError)
        assert results == [0, 1, 3, 4, 5]
        assert contents(manager, 0) == numbered(6), "an append whose waiter was cancelled continues"


def threads_of_stores() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("pybk-")}


def test_an_opening_that_is_cancelled_leaves_nothing_open(tmp_path: Path) -> None:
    async def main(seconds: float) -> None:
        task = asyncio.ensure_future(LedgerManager.open_async(tmp_path, config=CONFIG).__aenter__())
        await asyncio.sleep(0)
        if seconds:
            time.sleep(seconds)  # so that the thread is done before the loop hears of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    open_quick(tmp_path).close()
    others = threads_of_stores()
    for seconds in (0.0, 0.0, 0.2, 0.0, 0.2):
        asyncio.run(main(seconds))
        wait_until(lambda: threads_of_stores() <= others, "the store that nobody wants to be closed")
        open_quick(tmp_path).close()


def test_following_does_not_block_the_event_loop(tmp_path: Path) -> None:
    async def main(manager: LedgerManager) -> list[bytes]:
        writer = await manager.create_ledger_async(insecure=True)
        reader = await manager.open_ledger_async(writer.ledger_id, recover=False)

        async def follow() -> list[bytes]:
            return [entry.payload async for entry in reader.follow_async(2)]

        task = asyncio.create_task(follow())
        for payload in numbered(30):
            await writer.append_async(payload)
            await asyncio.sleep(0.001)
        assert len(descriptor_of(writer).advanced_callbacks) <= 1
        await writer.close_async()
        return await asyncio.wait_for(task, WAIT_S)

    with open_quick(tmp_path) as manager:
        assert asyncio.run(main(manager)) == numbered(28, 2)


def test_a_cancelled_follower_does_no_harm(tmp_path: Path) -> None:
    async def follow(reader: LedgerReader) -> None:
        async for _ in reader.follow_async():
            raise AssertionError("there is no entry")

    async def main(reader: LedgerReader) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(follow(reader), 0.05)

    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        asyncio.run(main(manager.open_ledger(0, recover=False)))
        assert writer.append(b"entry 0") == 0, "the loop of the follower is gone, the writer is not"
        assert contents(manager, 0) == numbered(1)


def test_waiters_after_a_gap_are_woken_in_a_loop(tmp_path: Path) -> None:
    async def main(writer: LedgerWriter) -> None:
        early = asyncio.create_task(_awaited(writer.append_async(b"entry 1", entry_id=1)))
        lost = asyncio.create_task(_awaited(writer.append_async(b"entry 3", entry_id=3)))
        await asyncio.sleep(0.01)
        assert not early.done()
        assert await writer.append_async(b"entry 0", entry_id=0) == 0
        assert await asyncio.wait_for(early, WAIT_S) == 1
        await writer.close_async()
        with pytest.raises(LedgerClosedError):
            await asyncio.wait_for(lost, WAIT_S)

    with open_quick(tmp_path) as manager:
        asyncio.run(main(manager.create_ledger(ledger_id=0, insecure=True)))


async def _awaited(future: Any) -> Any:
    return await future
