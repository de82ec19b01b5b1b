"""Admission of appends: first come, first served, and event loops keep running meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import DuplicateEntryError, LedgerClosedError, TooManyRequestsError, UsageError
from pybk.flags import WriteFlag
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.io.filesystem import OsFile
from pybk.storage.log.log import Admission, Ticket
from tests.internals import backend_of, descriptor_of, store_of, take_no_more
from tests.storage.real_store import contents, open_quick, stop_syncing
from tests.test_ledger import metadata
from tests.waiting import PROCESS_S, WAIT_S, wait_until

BOUND = 64 << 10


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data", max_entry_bytes=5000, max_outstanding_bytes=BOUND) as manager:
        yield manager


def fill(writer: LedgerWriter) -> int:
    """Append until admission must be waited for, and return how many entries."""
    count = 0
    try:
        while True:
            _ = writer.append_async(bytes(1000), wait=False)
            count += 1
    except TooManyRequestsError:
        return count


# ---- the queue -------------------------------------------------------------------------------------------------------


def state(admission: Admission) -> tuple[int, Ticket | None]:
    """Return the space for an append without a ticket, and which ticket is first."""
    return admission.space, admission.first


def test_an_append_waits_while_it_does_not_fit_or_its_turn_has_not_come() -> None:
    ledger = LedgerDescriptor(metadata())
    admission = Admission(100)
    assert not admission.is_full(None, 40, 60)
    assert admission.is_full(None, 40, 61)
    assert not admission.is_full(None, 0, 1000), "while nothing is outstanding, an append of any size is admitted"
    first, second = Ticket(ledger, 60), Ticket(ledger, 10)
    for ticket in (first, second):
        admission.join(ticket)
    assert not admission.is_full(None, 0, 30)
    assert admission.is_full(None, 0, 31), "the rest is the queue's"
    assert not admission.is_full(first, 40, 60)
    assert admission.is_full(first, 40, 61)
    assert not admission.is_full(first, 0, 1000)
    assert admission.is_full(second, 0, 1), "it is not its turn"


def test_the_queue_is_first_come_first_served_and_keeps_space_for_all_of_it() -> None:
    one, two = LedgerDescriptor(metadata()), LedgerDescriptor(metadata())
    admission = Admission(100)
    assert state(admission) == (100, None)
    tickets = [Ticket(one, 60), Ticket(two, 10), Ticket(one, 5)]
    for ticket in tickets:
        admission.join(ticket)
    assert state(admission) == (25, tickets[0])
    assert admission.waiting_bytes == 75
    tickets[0].wait()
    keeper = Ticket(two, 20)
    admission.join(keeper, keeps_lock=True)
    admission.leave(tickets[0])
    assert state(admission)[1] is keeper, "an append that keeps its ledger's lock goes ahead of that ledger's others"
    keeper.wait()
    admission.leave(keeper)
    admission.leave(keeper)
    assert state(admission) == (85, tickets[1])
    admission.leave(tickets[2])
    assert state(admission) == (90, tickets[1])
    admission.leave(tickets[1])
    assert state(admission) == (100, None)


@contextmanager
def flood(*writers: LedgerWriter) -> Iterator[None]:
    """Append small entries from several threads, as fast as they are admitted, until the end of the ``with``."""
    over = threading.Event()

    def pour(writer: LedgerWriter) -> None:
        while not over.is_set():
            _ = writer.append_async(bytes(500))

    with ThreadPoolExecutor(2 * len(writers)) as pool:
        pouring = [pool.submit(pour, writer) for writer in (*writers, *writers)]
        try:
            yield
        finally:
            over.set()
    for each in pouring:
        each.result()


def test_freed_space_goes_to_the_append_that_waited_longest(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = threading.Semaphore(0)
    write_durable = OsFile.write_durable

    def wait_and_write(self: OsFile, buffers: Any, offset: int) -> None:
        assert syncs.acquire(timeout=WAIT_S)
        write_durable(self, buffers, offset)

    writer, other = manager.create_ledger(insecure=True), manager.create_ledger(insecure=True)
    monkeypatch.setattr(OsFile, "write_durable", wait_and_write)
    log = store_of(manager).log
    first = writer.append_async(bytes(1000))
    wait_until(lambda: log.inflight is not None)
    filled = fill(writer)
    large: list[range] = []
    thread = threading.Thread(target=lambda: large.append(other.append_many([bytes(4800)] * 13)))
    thread.start()
    wait_until(lambda: log.admission.first is not None)
    syncs.release()
    first.result()
    wait_until(lambda: log.outstanding_bytes <= BOUND - 1000)
    for late in (writer, other):
        with pytest.raises(TooManyRequestsError, match="bytes wait for space"):
            _ = late.append_async(b"small", wait=False)
    syncs.release(100)
    thread.join(PROCESS_S)
    assert (large, writer.append(b"small")) == ([range(13)], filled + 1)


def test_a_large_append_is_not_starved_by_a_flood_of_small_ones(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    large = [bytes(4800)] * 13  # one batch of nearly max_outstanding_bytes
    sequences: list[range] = []
    with flood(writer):
        thread = threading.Thread(target=lambda: sequences.extend(writer.append_many(large) for _ in range(5)))
        thread.start()
        thread.join(PROCESS_S)
        assert not thread.is_alive(), f"{len(sequences)} of 5 large appends got room"
    assert [len(ids) for ids in sequences] == [13] * 5
    assert backend_of(manager).log_of(descriptor_of(writer)).admission.first is None


def test_batches_longer_than_the_limit_and_floods_of_two_ledgers_all_proceed(manager: LedgerManager) -> None:
    one, two = manager.create_ledger(insecure=True), manager.create_ledger(insecure=True)
    advanced = manager.create_ledger(ledger_id=77, insecure=True)
    batch = [bytes(5000)] * 2000  # three pieces, each longer than max_outstanding_bytes
    done: list[int] = []

    def append_batches(writer: LedgerWriter) -> None:
        ids = writer.append_many(batch)
        assert len(ids) == len(batch)
        done.append(writer.ledger_id)

    def append_advanced() -> None:
        for entry_id in range(0, 60, 2):
            future = advanced.append_async(bytes(5000), entry_id=entry_id + 1)
            _ = advanced.append_async(bytes(5000), entry_id=entry_id)
            future.result()
        done.append(advanced.ledger_id)

    with flood(one, two):
        threads = [threading.Thread(target=append_batches, args=(writer,)) for writer in (one, two, one)]
        threads.append(threading.Thread(target=append_advanced))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PROCESS_S)
        assert not any(thread.is_alive() for thread in threads), f"only {done} came to an end"


def test_an_early_entry_that_cannot_wait_raises_the_reason(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=1, insecure=True)
    for entry_id in range(1, 14):
        _ = writer.append_async(bytes(5000), entry_id=entry_id)
    with pytest.raises(
        TooManyRequestsError,
        match=r"entry 14 of 5000 bytes comes early, and 65000 bytes .* wait already for entry 0.*append that one first",
    ):
        _ = writer.append_async(bytes(5000), entry_id=14)
    assert writer.append(b"", entry_id=0) == 0
    assert writer.append(bytes(5000), entry_id=14) == 14


def test_a_lone_early_entry_is_taken_whatever_its_size(tmp_path: Path) -> None:
    with open_quick(tmp_path, max_entry_bytes=4 * BOUND, max_outstanding_bytes=BOUND) as manager:
        writer = manager.create_ledger(ledger_id=1, insecure=True)
        future = writer.append_async(bytes(3 * BOUND), entry_id=1)
        assert writer.append(b"", entry_id=0) == 0
        assert future.result() == 1


# ---- coroutines ------------------------------------------------------------------------------------------------------


def test_coroutines_wait_for_space_while_the_loop_runs(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    filled = fill(writer)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(writer.append_coro(bytes(1000))) for _ in range(200)]
            for _ in range(100):
                await asyncio.sleep(0)
            assert not any(task.done() for task in tasks), "the loop runs on while there is no space"
            go.set()
        assert [task.result() for task in tasks] == list(range(filled, filled + 200)), "in the order of the calls"
        assert await writer.append_coro(b"with room") == filled + 200

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_cancelling_a_coroutine_never_cancels_its_append(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    filled = fill(writer)

    async def main() -> None:
        tasks = [asyncio.create_task(writer.append_coro(b"%d" % number * 1000)) for number in range(5)]
        await asyncio.sleep(0)
        for task in tasks[:4]:
            task.cancel()
        results = asyncio.gather(*tasks, return_exceptions=True)
        go.set()
        *cancelled, last = await results
        assert all(isinstance(each, asyncio.CancelledError) for each in cancelled)
        assert last == filled + 4

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert contents(manager, writer.ledger_id)[filled:] == [b"%d" % number * 1000 for number in range(5)]


def test_a_loop_that_blocks_in_an_append_itself_is_not_waited_for(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)

    async def main() -> None:
        tasks = [asyncio.create_task(writer.append_coro(bytes(4000))) for _ in range(100)]
        await asyncio.sleep(0)
        for _ in range(100):
            _ = writer.append_async(bytes(4000))  # may block the loop, which must not keep those before it waiting
        assert sorted(await asyncio.gather(*tasks))[0] == 0

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    writer.force()
    assert writer.last_add_confirmed == 199


def test_coroutines_raise_what_the_append_raises(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    advanced = manager.create_ledger(ledger_id=5, insecure=True)
    deferred = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)

    async def main() -> None:
        with pytest.raises(UsageError):
            await writer.append_coro("text")  # type: ignore[arg-type]
        assert await deferred.append_coro(bytearray(b"x")) == 0
        late = [asyncio.create_task(advanced.append_coro(b"x", entry_id=entry_id)) for entry_id in (3, 1, 2)]
        await asyncio.sleep(0)
        assert await advanced.append_coro(b"x", entry_id=0) == 0
        assert await asyncio.gather(*late) == [3, 1, 2]
        with pytest.raises(DuplicateEntryError):
            await advanced.append_coro(b"x", entry_id=2)
        waiting = asyncio.create_task(advanced.append_coro(b"x", entry_id=9))
        await asyncio.sleep(0)
        await advanced.close_async()
        with pytest.raises(LedgerClosedError):
            await waiting
        with pytest.raises(LedgerClosedError):
            await advanced.append_coro(b"x", entry_id=4)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_appends_that_wait_for_space_fail_when_the_ledger_is_closed(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(monkeypatch)
    fill(writer)

    async def main() -> None:
        tasks = [asyncio.create_task(writer.append_coro(bytes(2000))) for _ in range(3)]
        await asyncio.sleep(0)
        take_no_more(writer)  # as its close does first of all
        go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {LedgerClosedError}

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    wait_until(lambda: not any(thread.name == "pybk-backlog" for thread in threading.enumerate()))
