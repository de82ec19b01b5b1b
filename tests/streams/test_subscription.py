"""Subscriptions of logs: read, acknowledged, handed out again, moved, taken over and opened again."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from pybk import (
    Acked,
    ClosedError,
    DeadLetters,
    EntryUnknownError,
    IllegalOperationError,
    LedgerManager,
    Log,
    LogEnd,
    LogFencedError,
    LogLockedError,
    LogRecord,
    LogSealedError,
    LogWriter,
    NewRecord,
    NoSuchEntryError,
    RemoteConsumer,
    Retention,
    Subscription,
    TooManyRequestsError,
    TruncatedError,
    TruncateGuardError,
    TxId,
    UsageError,
    WriteAheadLog,
)
from pybk.streams import subscription as subscription_module
from tests.internals import (
    lock_never_free,
    locked_elsewhere,
    looked_by,
    note_repairs,
    wait_for_lock_wait,
)
from tests.waiting import wait_until

PASSWORD = b"subscription"
SOON = 60.0
"""Seconds within which anything comes, even on a busy machine."""


@pytest.fixture
def log(manager: LedgerManager) -> Iterator[Log]:
    with opened(manager) as log:
        yield log


@pytest.fixture
def writer(log: Log) -> LogWriter:
    """The writer of a log with records 0 to 19, each with its number as data."""
    writer = log.writer()
    append(writer, 20)
    return writer


def opened(manager: LedgerManager, name: str = "log") -> Log:
    return Log.open(manager, name, password=PASSWORD)


def append(writer: LogWriter, count: int) -> None:
    first = writer.last_seq + 1
    writer.append_many([b"%d" % seq for seq in range(first, first + count)])


def subscribed(log: Log, name: str = "sub", **options: Any) -> Subscription:
    return log.subscribe(name, **{"start": LogEnd.EARLIEST, **options})


def seqs_of(records: list[LogRecord]) -> list[int]:
    assert all(record.data == b"%d" % record.seq for record in records)
    return [record.seq for record in records]


def drained(subscription: Subscription) -> list[int]:
    """Read everything there is."""
    found: list[int] = []
    while records := subscription.read_many(7, timeout=0):
        found += seqs_of(records)
    return found


@pytest.mark.usefixtures("writer")
def test_records_are_handed_out_until_they_are_acknowledged(log: Log) -> None:
    with subscribed(log) as subscription:
        assert seqs_of(subscription.read_many(5)) == [0, 1, 2, 3, 4]
        record = subscription.read()
        assert record is not None
        assert record.seq == 5
        subscription.ack(record)
        subscription.ack([0, 1, range(1, 3)])
        subscription.ack(record.position)
        assert subscription.first_unacked() == 3
        assert subscription.ack_async(range(10, 12)).result() == 2
        assert drained(subscription) == [6, 7, 8, 9, 12, 13, 14, 15, 16, 17, 18, 19]
        assert subscription.read(timeout=0) is None
    with subscribed(log) as subscription:
        assert drained(subscription) == [3, 4, 6, 7, 8, 9, *range(12, 20)]
        subscription.ack_through(18)
        assert subscription.first_unacked() == 19
    assert log.subscriptions() == ["sub"]
    assert log.delete_subscription("sub")
    assert not log.delete_subscription("sub")


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), "3", 10**400, None, -1, True])
def test_a_wait_for_the_owner_that_never_ends_is_refused(log: Log, wait: Any) -> None:
    with subscribed(log), pytest.raises(UsageError, match=r"wait is .* it takes seconds"):
        log.subscribe("sub", wait=wait)
    with pytest.raises(UsageError, match=r"wait is .* it takes seconds"):
        RemoteConsumer.connect("nothing", wait=wait)


@pytest.mark.parametrize("most", [None, math.nan, 1.5, True, "x", 0, 2**63])
def test_dead_letters_and_reads_take_a_whole_number_of_records(log: Log, writer: LogWriter, most: Any) -> None:
    with pytest.raises(UsageError, match=r"max_deliveries is .*a whole number from 1"):
        subscribed(log, dead_letters=DeadLetters(writer, most))
    with log.reader() as reader, pytest.raises(UsageError, match=r"most is .*a whole number from 1"):
        reader.read_many(most)
    with subscribed(log) as subscription, pytest.raises(UsageError, match=r"most is .*a whole number from 1"):
        subscription.read_many(most)


def test_dead_letters_take_a_writer(log: Log) -> None:
    with pytest.raises(UsageError, match=r"writer is <Log 'log'.* take a LogWriter"):
        subscribed(log, dead_letters=DeadLetters(log))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.inf, math.nan, "x", True, 10**400, []])
def test_times_are_seconds(log: Log, writer: LogWriter, bad: Any) -> None:
    append(writer, 1)
    with subscribed(log) as subscription:
        for call in (
            lambda: subscription.read_many(1, timeout=bad),
            lambda: asyncio.run(subscription.read_many_async(1, timeout=bad)),
            lambda: subscription.nack(0, delay=bad),
            lambda: subscribed(log, "other", ack_timeout=bad),
        ):
            with pytest.raises(UsageError, match=r"(timeout|delay|ack_timeout) is .*it takes seconds"):
                call()


@pytest.mark.parametrize("name", [None, 3, "\ud800", "a@b", "x" * 10_000])
def test_a_subscription_that_no_name_can_have_is_not_deleted(log: Log, name: Any) -> None:
    with pytest.raises(UsageError, match="the name ") as raised:
        log.delete_subscription(name)
    assert len(str(raised.value)) < 200


def test_errors_of_a_log_without_records_name_none(log: Log) -> None:
    with pytest.raises(NoSuchEntryError, match=r"log 'log' has no record 0; it has no records, and the next one is 0$"):
        log.read(0)
    with (
        subscribed(log) as subscription,
        pytest.raises(UsageError, match=r"from 3 on; it has no records, and the next"),
    ):
        subscription.seek(3)
    with log.writer() as writer:
        append(writer, 5)
    log.truncate(5, force=True)
    with pytest.raises(NoSuchEntryError, match="has no record 5; it has no records, and the next one is 5"):
        log.read(5)
    with pytest.raises(TruncatedError, match="record 4 of log 'log' was truncated; reads begin at 5"):
        log.read(4)
    with log.writer() as writer:
        append(writer, 1)
    with pytest.raises(NoSuchEntryError, match="has no record 7; its last is 5"):
        log.read(7)


@pytest.mark.parametrize("changes", [{"a": "\ud800"}, {"\udfff": "a"}])
def test_properties_that_utf8_cannot_encode_are_refused(log: Log, changes: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="the properties of log 'log' cannot be encoded as UTF-8"):
        log.set_properties(changes)
    assert log.properties() == {}


@pytest.mark.parametrize("seq", [-1, -(2**63), 1.5, None, "b"])
def test_a_position_of_no_record_is_refused_and_changes_nothing(log: Log, writer: LogWriter, seq: Any) -> None:
    position = writer.append(b"")._replace(seq=seq)
    with subscribed(log) as subscription:
        for call in (subscription.ack, subscription.seek, log.truncate, log.reader):
            with pytest.raises(UsageError):
                call(position)
    with subscribed(log) as subscription:
        assert subscription.first_unacked() == log.first_seq() == 0


@pytest.mark.parametrize("kind", [Log, WriteAheadLog])
def test_a_prefix_that_no_name_can_have_is_refused(manager: LedgerManager, kind: type[Log | WriteAheadLog]) -> None:
    with pytest.raises(UsageError, match=r"prefix is '\\ud800'; it takes a string"):
        kind.names(manager, "\ud800")


def test_a_consumer_waits_for_records_of_the_writer(log: Log, writer: LogWriter) -> None:
    with subscribed(log, start=LogEnd.LATEST) as subscription:
        assert subscription.read_many(3, timeout=0.01) == []
        later = threading.Timer(0.05, lambda: append(writer, 2))
        later.start()
        record = subscription.read(timeout=SOON)
        assert record is not None
        assert record.seq == 20
        later.join()
        writer.roll()
        append(writer, 2)
        assert drained(subscription) == [21, 22, 23]


@pytest.mark.usefixtures("writer")
def test_pulsar_446_reading_begins_at_the_first_record_that_is_not_acknowledged(manager: LedgerManager) -> None:
    for first in range(0, 12, 3):
        with opened(manager) as log, subscribed(log) as subscription:
            assert seqs_of(subscription.read_many(9, timeout=0))[:3] == [first, first + 1, first + 2]
            subscription.ack_through(first + 2)


@pytest.mark.usefixtures("writer")
def test_pulsar_180_holes_are_shown(log: Log) -> None:
    with subscribed(log) as subscription:
        subscription.ack([0, 1, 5, 6, range(10, 18)])
        assert subscription.unacked_ranges() == [range(2, 5), range(7, 10), range(18, 20)]
        assert subscription.backlog() == 8
        assert 0 <= subscription.oldest_unacked_age() < SOON
        stats = subscription.stats()
        assert (stats.first_unacked, stats.backlog, stats.outstanding, stats.ranges) == (2, 8, 0, 2)
        subscription.skip_all()
        assert subscription.unacked_ranges() == []
        assert subscription.oldest_unacked_age() == 0.0


def test_persist_queue_76_the_backlog_is_exact(log: Log, writer: LogWriter) -> None:
    with subscribed(log) as subscription, subscribed(log, "other") as other:
        assert (subscription.backlog(), other.backlog()) == (20, 20)
        subscription.ack(range(3, 9))
        append(writer, 5)
        assert (subscription.backlog(), other.backlog()) == (19, 25)


def test_what_stands_for_something_else_than_records_is_not_acknowledged(log: Log) -> None:
    with log.writer() as writer, log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        for number in range(10):
            writer.append(b"%d" % number, txid=100 + number)
        wrong: Any
        for wrong in (TxId(3), [TxId(3)], bytearray(b"\x01"), {1: 2}, [0, TxId(3)]):
            with pytest.raises(UsageError, match="names no records"):
                subscription.ack(wrong)
        assert subscription.backlog() == 10
        subscription.ack(range(1, 10, 2))
        assert subscription.unacked_ranges() == [range(seq, seq + 1) for seq in range(0, 10, 2)]
    with pytest.raises(ClosedError):
        assert subscription.backlog()


@pytest.mark.usefixtures("writer")
def test_nothing_is_acknowledged_by_no_records(log: Log) -> None:
    with subscribed(log) as subscription:
        subscription.ack([])
        subscription.ack(range(5, 5))
        subscription.ack_through(range(0))
        assert subscription.ack_async([]).result() == 0
        asyncio.run(subscription.ack_coro([]))
        asyncio.run(subscription.ack_through_coro(range(0)))
        assert subscription.nack([]) == 0
        assert subscription.backlog() == 20
        with pytest.raises(UsageError, match="name at least one record"):
            subscription.ack([], properties={"offset": 1})
        with pytest.raises(UsageError, match="names no record"):
            subscription.redeliveries([])  # type: ignore[arg-type]


@pytest.mark.usefixtures("writer")
def test_persist_queue_89_an_acknowledgement_is_of_the_record_that_it_names(log: Log) -> None:
    with subscribed(log, mode="shared") as subscription:
        mine, theirs = subscription.read(), list[LogRecord]()
        thread = threading.Thread(target=lambda: theirs.extend(subscription.read_many(1)))
        thread.start()
        thread.join()
        assert mine is not None
        subscription.ack(theirs)
        assert subscription.unacked_ranges() == [range(1), range(2, 20)]
        subscription.ack(mine)
        assert subscription.first_unacked() == 2


def test_persist_queue_132_consumers_lose_and_repeat_nothing(log: Log, writer: LogWriter) -> None:
    with subscribed(log, mode="shared", max_unacked=50) as subscription:
        found: list[int] = []

        def consume() -> None:
            for record in subscription:
                found.append(record.seq)
                subscription.ack(record)

        threads = [threading.Thread(target=consume) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(10):
            append(writer, 10)
            writer.roll()
        writer.seal()
        for thread in threads:
            thread.join(SOON)
        assert sorted(found) == list(range(120))
        assert subscription.backlog() == 0


def test_tasks_get_different_records(log: Log, writer: LogWriter) -> None:
    async def run() -> list[int]:
        found: list[int] = []
        async with log.subscribe_async("sub", start=0, mode="shared", max_unacked=30) as subscription:

            async def consume() -> None:
                async for record in subscription:
                    found.append(record.seq)
                    await subscription.ack_coro(record)

            tasks = [asyncio.create_task(consume()) for _ in range(10)]
            for _ in range(5):
                await writer.append_many_coro([b"x"] * 10)
                await asyncio.sleep(0.01)
            await writer.seal_async()
            await asyncio.gather(*tasks)
            assert await subscription.backlog_async() == 0
        return found

    assert sorted(asyncio.run(run())) == list(range(70))


def test_tasks_and_threads_share_a_subscription(log: Log, writer: LogWriter) -> None:
    found: list[int] = []
    with subscribed(log, mode="shared") as subscription:

        def consume() -> None:
            for record in subscription:
                found.append(record.seq)
                subscription.ack(record)

        async def consume_too() -> None:
            async for record in subscription:
                found.append(record.seq)
                await subscription.ack_coro(record)

        thread = threading.Thread(target=consume)
        thread.start()

        async def run() -> None:
            tasks = [asyncio.create_task(consume_too()) for _ in range(3)]
            for _ in range(10):
                await writer.append_many_coro([b"x"] * 7)
                await asyncio.sleep(0.005)
            await writer.seal_async()
            await asyncio.gather(*tasks)

        asyncio.run(run())
        thread.join(SOON)
    assert sorted(found) == list(range(90))


@pytest.mark.usefixtures("writer")
def test_a_look_finds_what_there_is_while_another_consumer_reads_the_log(log: Log) -> None:
    async def run() -> list[int]:
        async with log.subscribe_async("sub", start=0, mode="shared") as subscription:
            found = await asyncio.gather(*(subscription.read_many_async(1, timeout=0) for _ in range(20)))
        return [record.seq for records in found for record in records]

    assert sorted(asyncio.run(run())) == list(range(20))


@pytest.mark.usefixtures("writer")
def test_a_cancelled_read_loses_nothing(log: Log) -> None:
    async def run() -> list[int]:
        found = []
        async with log.subscribe_async("sub", start=0, mode="shared") as subscription:
            for seconds in (0.0, 0.0, 0.001, 0.002, 0.004, 0.008):
                task = asyncio.create_task(subscription.read_many_async(2, timeout=SOON))
                await asyncio.sleep(seconds)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    found += seqs_of(await task)
            while records := await subscription.read_many_async(3, timeout=0):
                found += seqs_of(records)
        return found

    assert asyncio.run(run()) == list(range(20))


@pytest.mark.usefixtures("writer")
def test_a_cancelled_read_loses_nothing_that_is_handed_out_again(log: Log) -> None:
    async def run() -> list[int]:
        found: list[int] = []
        async with log.subscribe_async("sub", start=0, mode="shared") as subscription:
            subscription.nack(await subscription.read_many_async(20))
            for turns in range(12):
                task = asyncio.create_task(subscription.read_many_async(1, timeout=SOON))
                for _ in range(turns // 2):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    found += seqs_of(await task)
            while len(found) < 20:
                found += seqs_of(await subscription.read_many_async(3, timeout=SOON))
        return found

    assert sorted(asyncio.run(run())) == list(range(20))


@pytest.mark.usefixtures("writer")
def test_an_event_loop_does_not_wait_for_the_lock(log: Log) -> None:
    """A repair of the subscription's list, and a look at the log's end, hold it as long as bookies take."""

    async def run() -> list[int]:
        async with log.subscribe_async("sub", start=0, mode="shared") as subscription:
            found = seqs_of(await subscription.read_many_async(1))
            with locked_elsewhere(subscription):
                tasks = [asyncio.create_task(subscription.read_many_async(1)) for _ in range(3)]
                acking = asyncio.create_task(subscription.ack_coro(0))
                for _ in range(10):
                    await asyncio.sleep(0)
                tasks[0].cancel()
            await acking
            with suppress(asyncio.CancelledError):
                found += seqs_of(await tasks[0])
            found += [seq for task in tasks[1:] for seq in seqs_of(await task)]
        return sorted(found)

    assert asyncio.run(run()) == [0, 1, 2]


@pytest.mark.usefixtures("writer")
def test_an_event_loop_does_not_wait_for_the_lock_before_it_waits_for_records(log: Log) -> None:
    async def run() -> list[int]:
        async with log.subscribe_async("sub", start=LogEnd.LATEST) as subscription:
            looks = 0
            with ExitStack() as stack:

                def look(fetch: Callable[[], bool]) -> bool:
                    nonlocal looks
                    looks += 1
                    found = fetch()
                    if looks == 1:  # the consumer goes to wait now
                        stack.enter_context(locked_elsewhere(subscription))
                    return found

                with looked_by(look):
                    reading = asyncio.create_task(subscription.read_many_async(1, timeout=SOON))
                    _ = await wait_for_lock_wait(subscription)
            await asyncio.to_thread(append, log.writer(steal=True), 1)
            return seqs_of(await reading)

    assert asyncio.run(run()) == [20]


@pytest.mark.usefixtures("writer")
def test_an_event_loop_runs_while_threads_take_the_lock_from_each_other(log: Log) -> None:
    """A task looks for the lock when the wait for it has ended, but another thread has taken it again."""

    async def run() -> list[int]:
        async with log.subscribe_async("sub", start=0, mode="shared") as subscription:
            reads = asyncio.Event()

            async def read_as_a_wait_ends() -> list[LogRecord]:
                waiting = await wait_for_lock_wait(subscription)
                while not waiting.done():
                    await asyncio.sleep(0)
                reads.set()
                return await subscription.read_many_async(1)

            with lock_never_free(subscription):
                tasks = [
                    asyncio.create_task(subscription.read_many_async(1)),
                    asyncio.create_task(read_as_a_wait_ends()),
                ]
                await reads.wait()
            return sorted(seq for found in await asyncio.gather(*tasks) for seq in seqs_of(found))

    assert asyncio.run(run()) == [0, 1]


@pytest.mark.usefixtures("writer")
def test_acknowledgements_that_wait_for_the_lock_share_a_thread(log: Log) -> None:
    async def run() -> int:
        async with log.subscribe_async("sub", start=0) as subscription:
            await subscription.read_many_async(20)
            with locked_elsewhere(subscription):
                before = set(threading.enumerate())
                acking = [asyncio.create_task(subscription.ack_coro(seq)) for seq in range(20)]
                await asyncio.sleep(0)
                made = set(threading.enumerate()) - before
            await asyncio.gather(*acking)
            assert await subscription.first_unacked_async() == 20
            return len(made)

    assert asyncio.run(run()) == 1


@pytest.mark.usefixtures("writer")
def test_a_cancelled_read_whose_subscription_is_closed_meanwhile_logs_no_error(
    log: Log, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    give_back = subscription_module.give_back

    def close_and_give_back(subscription: Subscription, held: list[tuple[int, int]]) -> int:
        closing = threading.Thread(target=subscription.close)  # from outside of the call that gives back
        closing.start()
        closing.join()
        return give_back(subscription, held)

    monkeypatch.setattr(subscription_module, "give_back", close_and_give_back)

    async def run() -> None:
        subscription = await log.subscribe_async("sub", start=0, mode="shared")
        subscription.nack(await subscription.read_many_async(20))
        task = asyncio.create_task(subscription.read_many_async(1))
        await asyncio.sleep(0)  # a thread has begun to read again
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not subscription.closed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # so that the thread has ended

    asyncio.run(run())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


CALLS_THAT_REPAIR: dict[str, Callable[[Log, Subscription], object]] = {
    "seek": lambda _, subscription: subscription.seek(2),
    "skip": lambda _, subscription: subscription.skip(2),
    "truncation": lambda log, subscription: (log.truncate(10, force=True), subscription.first_unacked()),
    "dead letter": lambda _, subscription: (subscription.nack(0), subscription.read_many(1)),
    "close": lambda _, subscription: subscription.close(),
}


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize("call", CALLS_THAT_REPAIR)
def test_the_list_of_a_subscription_is_repaired_before_the_lock_is_taken(
    manager: LedgerManager, log: Log, call: str
) -> None:
    """The repair may wait for bookies, and the lock is what other consumers need."""
    with (
        opened(manager, "dead") as dead,
        dead.writer() as letters,
        subscribed(log, dead_letters=DeadLetters(letters, 1)) as subscription,
    ):
        assert seqs_of(subscription.read_many(1)) == [0]
        with note_repairs(subscription) as with_lock:
            CALLS_THAT_REPAIR[call](log, subscription)
        assert with_lock[0] is False


# ---- bookies that do not answer --------------------------------------------------------------------------------------


def consume(subscription: Subscription, form: str, count: int = 1, timeout: float | None = None) -> list[LogRecord]:
    """Read as several consumers do that have a thread each, or are tasks of one event loop."""

    async def consume_async() -> list[list[LogRecord]]:
        return await asyncio.gather(*(subscription.read_many_async(1, timeout) for _ in range(count)))

    if form == "async":
        found = asyncio.run(consume_async())
    else:
        with ThreadPoolExecutor(count) as threads:
            found = [*threads.map(lambda _: subscription.read_many(1, timeout), range(count))]
    return [record for records in found for record in records]


@pytest.mark.parametrize("form", ["sync", "async"])
def test_consumers_that_wait_for_bookies_do_not_have_each_other_look(
    log: Log, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(subscription_module, "RETRY_SECONDS", SOON)
    looks = 0

    def look(_: object) -> bool:
        nonlocal looks
        looks += 1
        raise EntryUnknownError("no bookie answers")

    with ThreadPoolExecutor(1) as thread, subscribed(log, mode="shared") as subscription, looked_by(look):
        consuming = thread.submit(consume, subscription, form, 2, SOON)
        wait_until(lambda: looks >= 2)
        time.sleep(0.2)
        assert looks == 2
        subscription.close()
        with pytest.raises(ClosedError):
            consuming.result(SOON)


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_read_begins_no_look_at_bookies_that_would_end_too_late(
    log: Log, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    now = 1000.0

    def look(_: object) -> bool:
        nonlocal now
        now += 6.0
        raise EntryUnknownError("no bookie answers")

    clock = SimpleNamespace(monotonic=lambda: now, time=time.time, time_ns=time.time_ns)
    with subscribed(log) as subscription, looked_by(look), monkeypatch.context() as patched:
        patched.setattr(subscription_module, "RETRY_SECONDS", 0.001)
        patched.setattr(subscription_module, "time", clock)
        with pytest.raises(EntryUnknownError):
            consume(subscription, form, timeout=32.0)
    assert now == 1030.0


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_consumer_is_woken_by_a_segment_that_begins_as_it_goes_to_wait(
    log: Log, writer: LogWriter, form: str
) -> None:
    waits, looks = threading.Event(), 0

    def look(fetch: Callable[[], bool]) -> bool:
        nonlocal looks
        found = fetch()
        looks += 1
        if looks == 1:
            threads.submit(writer.roll).result()  # the next look enters another ledger than that of the wake-up
        elif looks == 2:
            waits.set()
        return found

    with (
        ThreadPoolExecutor(2) as threads,
        subscribed(log, start=LogEnd.LATEST) as subscription,
        looked_by(look),
    ):
        consuming = threads.submit(consume, subscription, form)
        assert waits.wait(SOON)
        append(writer, 1)
        assert seqs_of(consuming.result(SOON)) == [20]


# ---- handed out again ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("writer")
def test_what_is_not_wanted_is_handed_out_again(log: Log) -> None:
    with subscribed(log) as subscription:
        records = subscription.read_many(4)
        assert subscription.nack(records[1:3]) == 2
        assert subscription.nack([15, records[0]], delay=3600.0) == 1
        assert seqs_of(subscription.read_many(3)) == [1, 2]
        assert [subscription.redeliveries(record) for record in records] == [0, 1, 1, 0]
        assert seqs_of(subscription.read_many(2)) == [4, 5]
        subscription.nack(records[1])
        subscription.ack(records[1])
        assert seqs_of(subscription.read_many(2)) == [6, 7]
        stats = subscription.stats()
        assert (stats.delivered, stats.redelivered, stats.outstanding) == (10, 2, 7)


@pytest.mark.usefixtures("writer")
def test_litequeue_1_a_record_of_a_consumer_that_died_is_handed_out_again(log: Log) -> None:
    with subscribed(log, mode="shared", ack_timeout=0.2) as subscription:
        first = subscription.read_many(2)
        subscription.ack(first[0])
        while subscription.backlog() > 1:  # the first may be handed out again before the others
            rest = [record for record in subscription.read_many(30) if record != first[1]]
            subscription.ack(rest)
        again = subscription.read(timeout=SOON)
        assert again is not None
        assert again == first[1]
        assert subscription.redeliveries(again) >= 1  # 2 where it timed out before the rest was read
        subscription.ack(again)
        assert subscription.backlog() == 0


@pytest.mark.usefixtures("writer")
def test_a_consumer_that_waits_gets_what_another_gives_back(log: Log) -> None:
    async def run() -> list[LogRecord]:
        async with log.subscribe_async("sub", start=0, mode="shared") as subscription:
            records = await subscription.read_many_async(100)
            assert len(records) == 20
            waiting = [asyncio.create_task(subscription.read_many_async(1, SOON)) for _ in range(3)]
            await asyncio.sleep(0.05)
            subscription.nack(records[:2])
            subscription.nack(records[7], delay=0.05)
            return [record for found in await asyncio.gather(*waiting) for record in found]

    assert sorted(seqs_of(asyncio.run(run()))) == [0, 1, 7]


def test_dead_letters_take_what_is_handed_out_too_often(manager: LedgerManager, log: Log) -> None:
    writer = log.writer()
    writer.append_many([b"fine", NewRecord(b"poison", key=b"k", headers=[("h", b"v")], time_ns=77)])
    with opened(manager, "dead") as dead:
        options: dict[str, Any] = {"dead_letters": DeadLetters(dead.writer(), max_deliveries=3), "ack_timeout": 3600.0}
        with subscribed(log, **options) as subscription:
            for _ in range(3):
                for record in subscription.read_many(2):
                    if record.data == b"fine":
                        subscription.ack(record)
                    else:
                        subscription.nack(record)
            assert subscription.read(timeout=0) is None
            assert subscription.backlog() == 0
            assert subscription.stats().dead == 1
        found = dead.read(0)
        assert (found.data, found.key, found.time_ns) == (b"poison", b"k", 77)
        assert dict(found.headers) == {"pybk.log": b"log", "pybk.seq": b"1", "pybk.deliveries": b"3", "h": b"v"}
    with subscribed(log, **options) as subscription:
        assert subscription.backlog() == 0


def test_a_record_that_the_dead_letters_refuse_is_kept(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription_module, "RETRY_SECONDS", 0.05)
    log.writer().append(b"poison")
    with opened(manager, "dead") as dead:
        refusing = dead.writer()
        with subscribed(log, dead_letters=DeadLetters(refusing, max_deliveries=1)) as subscription:
            subscription.nack(subscription.read_many(1))
            refusing.close()
            for _ in range(2):
                with pytest.raises(ClosedError):
                    subscription.read(timeout=SOON)
            assert subscription.backlog() == 1
        taking = dead.writer()
        with subscribed(log, dead_letters=DeadLetters(taking, max_deliveries=1)) as subscription:
            assert subscription.read(timeout=0) is None
            assert subscription.backlog() == 0
        assert dead.last_seq() == 0


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("writer")
def test_pulsar_25540_reading_stops_before_a_range_would_be_dropped(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    with subscribed(log, max_unacked=5) as subscription:
        with caplog.at_level(logging.WARNING):
            records = subscription.read_many(100)
            assert seqs_of(records) == [0, 1, 2, 3, 4]
            with pytest.raises(TooManyRequestsError, match="5 records are outstanding"):
                subscription.read(timeout=0.01)
        assert "5 of at most 5 records are outstanding" in caplog.text
        subscription.ack([1, 3])
        assert seqs_of(subscription.read_many(100)) == [5, 6]
        later = threading.Timer(0.05, lambda: subscription.ack(4))
        later.start()
        assert seqs_of(subscription.read_many(100, SOON)) == [7]
        later.join()


def test_acknowledgements_ahead_of_reading_have_a_limit(log: Log) -> None:
    append(log.writer(), 100)
    with subscribed(log, max_unacked=5) as subscription:
        for seq in range(1, 11, 2):
            subscription.ack(seq)
        with pytest.raises(TooManyRequestsError, match="5 ranges of acknowledged records"):
            subscription.ack(51)
        assert drained_with_acks(subscription) == [0, 2, 4, 6, 8, *range(10, 100)]


def drained_with_acks(subscription: Subscription) -> list[int]:
    found = []
    while records := subscription.read_many(3, timeout=0):
        found += seqs_of(records)
        subscription.ack(records)
    return found


@pytest.mark.usefixtures("writer")
def test_an_exclusive_subscription_has_one_consumer(log: Log) -> None:
    with subscribed(log) as subscription:
        drained(subscription)

        def wait() -> None:
            with pytest.raises(ClosedError):
                subscription.read()

        thread = threading.Thread(target=wait)
        thread.start()

        def is_refused() -> bool:
            try:
                subscription.read(timeout=0)
            except IllegalOperationError:
                return True
            return False

        wait_until(is_refused)
        subscription.close()
        thread.join(SOON)
        assert not thread.is_alive()
    with subscribed(log, mode="shared") as subscription, pytest.raises(IllegalOperationError, match="shared"):
        subscription.ack_through(3)


@pytest.mark.usefixtures("writer")
def test_what_cannot_be_is_refused(log: Log) -> None:
    wrong: list[dict[str, Any]] = [{"mode": "both"}, {"max_unacked": 0}, {"ack_timeout": 0}, {"start": "x"}]
    for options in wrong:
        with pytest.raises(UsageError):
            subscribed(log, **options)
    with pytest.raises(UsageError):
        subscribed(log, "a@b")
    assert log.subscriptions() == []
    with subscribed(log) as subscription:
        nothing: list[Any] = [[], range(0), range(5, 3)]
        for each in nothing:
            subscription.ack(each)
        things: list[Any] = [-1, "x", TxId(1), None, [None], 1.5, b"\0"]
        for each in things:
            with pytest.raises(UsageError):
                subscription.ack(each)
        with pytest.raises(UsageError, match="record 20 of log 'log' does not exist; its last is 19"):
            subscription.ack(20)
        for call in (
            lambda: subscription.ack(0, properties={"a": 1.5}),  # type: ignore[dict-item]
            lambda: subscription.nack(0, delay=-1),
            lambda: subscription.seek(21),
            lambda: subscription.skip(-1),
            lambda: subscription.read_many(0),
            lambda: subscription.read(timeout=-1),
        ):
            with pytest.raises(UsageError):
                call()
        assert subscription.first_unacked() == 0
    with pytest.raises(ClosedError):
        subscription.read()
    with pytest.raises(ClosedError):
        subscription.ack(0)


# ---- properties, moving, ending --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("writer")
def test_properties_are_kept_with_what_is_acknowledged(log: Log) -> None:
    with subscribed(log) as subscription:
        subscription.ack(range(3), properties={"offset": 1 << 70, "file": "a"})
        subscription.ack(3, properties={"file": "b"})
        asyncio.run(subscription.ack_through_coro(5, properties={"n": -1}))
    with subscribed(log) as subscription:
        assert subscription.properties == {"offset": 1 << 70, "file": "b", "n": -1}
        assert subscription.first_unacked() == 6


@pytest.mark.usefixtures("writer")
def test_it_moves_to_every_place(log: Log) -> None:
    with subscribed(log) as subscription:
        assert seqs_of(subscription.read_many(9)) == list(range(9))
        subscription.ack([2, 4])
        subscription.rewind()
        assert seqs_of(subscription.read_many(9))[:5] == [0, 1, 3, 5, 6]
        assert subscription.seek(15) == 15
        assert drained(subscription) == [15, 16, 17, 18, 19]
        assert subscription.seek(LogEnd.EARLIEST) == 0
        assert subscription.skip(3) == 3
        subscription.ack([4, 5])
        assert subscription.skip(3) == 3
        assert subscription.unacked_ranges() == [range(8, 20)]
        assert drained(subscription) == list(range(8, 20))
        assert subscription.skip_all() == 12
        assert subscription.skip_all() == 0
        assert subscription.backlog() == 0
        assert asyncio.run(subscription.seek_async(18)) == 18
    with subscribed(log) as subscription:
        assert drained(subscription) == [18, 19]


def test_the_log_keeps_what_is_not_acknowledged(log: Log, writer: LogWriter, caplog: pytest.LogCaptureFixture) -> None:
    with subscribed(log, "slow") as slow, subscribed(log) as subscription:
        subscription.ack(range(10))
        with pytest.raises(TruncateGuardError, match="'slow'"):
            log.truncate(5)
        assert log.truncate(8, force=True) == 8
        assert slow.seek(3) == 8, "records before 8 are gone"
        assert log.truncate(12, force=True) == 12
        with caplog.at_level(logging.WARNING):
            assert drained(slow) == list(range(12, 20))
        assert "dropped 4 records" in caplog.text
        assert slow.stats().truncated == 4
        assert drained(subscription) == list(range(12, 20))
        slow.delete()
        subscription.delete()
        log.truncate(20)
    append(writer, 1)
    assert log.first_seq() == 20


@pytest.mark.usefixtures("writer")
def test_a_record_that_is_handed_out_again_may_be_gone(log: Log) -> None:
    with subscribed(log) as subscription:
        assert subscription.nack(subscription.read_many(20)) == 20
        log.truncate(10, force=True)
        assert drained(subscription) == list(range(10, 20))
        subscription.nack(15)
        log.truncate(18, force=True)
        assert drained(subscription) == []
        assert subscription.stats().truncated == 18
        assert subscription.unacked_ranges() == [range(18, 20)]


def test_persist_queue_126_the_log_shrinks_as_it_is_consumed(log: Log, writer: LogWriter) -> None:
    log.set_retention(Retention())
    assert log.retention() == Retention()
    with subscribed(log) as subscription:
        for _ in range(5):
            writer.roll()
            append(writer, 10)
        subscription.ack_through(65)
    wait_until(lambda: log.first_seq() == 60 and len(log.segments()) == 1)


@pytest.mark.usefixtures("writer")
def test_a_subscription_that_is_not_durable_leaves_nothing(log: Log) -> None:
    with subscribed(log, durable=False) as subscription:
        records = subscription.read_many(3)
        subscription.ack(records[0])
        assert subscription.ack_async(records).result() == 2
        done = threading.Event()
        subscription.ack_async(3).add_done_callback(lambda _: done.set())
        assert done.wait(SOON)
        assert log.subscriptions() == []
        log.truncate(10)
        subscription.rewind()
        assert drained(subscription) == list(range(10, 20))
        assert subscription.seek(0) == 10
        asyncio.run(subscription.ack_coro(10, properties={"a": 1}))
        assert subscription.properties == {"a": 1}
        assert subscription.backlog() == 9
    with subscribed(log, durable=False) as subscription:
        assert drained(subscription) == list(range(10, 20))


def test_it_ends_when_the_log_is_sealed_and_all_is_acknowledged(log: Log, writer: LogWriter) -> None:
    writer.seal()
    with subscribed(log, ack_timeout=0.05) as subscription:
        found = []
        for record in subscription:
            found.append(record.seq)
            if record.seq != 7 or found.count(7) == 3:
                subscription.ack(record)
        assert set(found) == set(range(20))  # one that was held for too long on a busy machine is there twice
        assert found.count(7) == 3
        with pytest.raises(LogSealedError):
            subscription.read()


@pytest.mark.usefixtures("writer")
def test_consumers_that_wait_are_woken_by_a_close(log: Log) -> None:
    async def run() -> list[BaseException | list[LogRecord]]:
        subscription = await log.subscribe_async("sub", start=LogEnd.LATEST, mode="shared")
        waiting = [asyncio.create_task(subscription.read_many_async(1)) for _ in range(3)]
        await asyncio.sleep(0.05)
        await subscription.close_async()
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(each) for each in asyncio.run(run())] == [ClosedError] * 3


@pytest.mark.usefixtures("writer")
def test_another_owner_has_to_steal_and_fences_the_first(manager: LedgerManager, log: Log) -> None:
    first = subscribed(log)
    first.ack(range(5))
    with opened(manager) as other:
        with pytest.raises(LogLockedError):
            subscribed(other)
        with subscribed(other, steal=True) as second:
            assert seqs_of(second.read_many(2)) == [5, 6]
            with pytest.raises(
                LogFencedError, match=r"^subscription 'sub' of log 'log' was taken over by another owner"
            ):
                first.ack(6)
            second.ack(5)
    with pytest.raises(LogFencedError):
        first.close()
    with subscribed(log) as third:
        assert third.first_unacked() == 6
        assert seqs_of(third.read_many(1)) == [6]


@pytest.mark.usefixtures("writer")
def test_deleting_a_log_deletes_its_subscriptions(manager: LedgerManager, log: Log) -> None:
    subscribed(log).close()
    before = log.segments()
    log.close()
    Log.delete(manager, "log", password=PASSWORD)
    with opened(manager) as again, subscribed(again) as subscription:
        assert subscription.first_unacked() == 0
        assert again.segments() == []
        assert before


def test_acknowledgements_of_any_kind_name_the_same_record(log: Log, writer: LogWriter) -> None:
    record = log.read(7)
    kinds: list[Acked] = [record, record.position, 7, range(7, 8)]
    for each in kinds:
        with subscribed(log, "kinds") as subscription:
            subscription.ack(each)
            assert subscription.unacked_ranges() == [range(7), range(8, writer.last_seq + 1)]
            subscription.delete()


def test_a_consumer_with_a_timeout_returns(log: Log) -> None:
    log.writer()
    with subscribed(log, mode="shared") as subscription:
        began = time.monotonic()
        assert subscription.read_many(4, timeout=0.1) == []
        assert asyncio.run(subscription.read_async(timeout=0.1)) is None
        assert time.monotonic() - began >= 0.2


def test_properties_of_one_turn_of_the_event_loop_that_are_too_long_together_are_refused(
    log: Log, writer: LogWriter
) -> None:
    append(writer, 3)

    async def acknowledged() -> list[BaseException | None]:
        with log.subscribe("all", start=LogEnd.EARLIEST, mode="shared") as subscription:
            acks = [subscription.ack_coro(seq, properties={f"of {seq}": "x" * 40_000}) for seq in range(3)]
            return await asyncio.gather(*acks, return_exceptions=True)

    outcomes = [type(outcome) for outcome in asyncio.run(acknowledged())]
    assert sorted(outcomes, key=str) == sorted([type(None), UsageError, UsageError], key=str)
    taken = outcomes.index(type(None))
    with log.subscribe("all") as subscription:
        unacked = [seq for each in subscription.unacked_ranges() for seq in each]
        assert [seq for seq in range(3) if seq not in unacked] == [taken]
        assert list(subscription.properties) == [f"of {taken}"]


@pytest.mark.usefixtures("writer")
def test_truncation_is_seen_by_all_readers_and_cursors_at_once(log: Log, manager: LedgerManager) -> None:
    with opened(manager) as other, subscribed(log) as subscription, subscribed(log, "fresh") as fresh:
        memory, reader = subscribed(log, durable=False), log.reader()
        walking, walked = iter(log.reader()), log.reader(0)
        subscription.nack(subscription.read_many(5))
        subscription.ack(15)
        assert len(memory.read_many(3)) == 3
        first, begun = reader.read(), next(walking)
        assert first is not None
        assert first.seq == begun.seq == 0
        assert seqs_of([walked.read_many(1)[0]]) == [0]
        assert log.truncate(12, force=True) == 12
        assert (subscription.first_unacked(), subscription.backlog()) == (12, 7)
        assert subscription.unacked_ranges() == [range(12, 15), range(16, 20)]
        assert subscription.stats().truncated == 12
        states = {each.name: each for each in other.subscription_states()}
        assert (states["fresh"].first_unacked, states["fresh"].backlog) == (12, 8)
        assert [each.seq for each in walking] == list(range(12, 20))
        assert seqs_of(reader.read_many(30)) == list(range(12, 20))
        assert reader.skipped == 11
        assert seqs_of(asyncio.run(walked.read_many_async(30))) == list(range(12, 20))
        assert seqs_of(asyncio.run(fresh.read_many_async(30))) == list(range(12, 20))
        assert drained(subscription) == [12, 13, 14, 16, 17, 18, 19]
        assert drained(memory) == list(range(12, 20))
    with subscribed(log) as subscription:
        assert (subscription.backlog(), subscription.stats().outstanding) == (7, 0)


@pytest.mark.usefixtures("writer")
def test_truncation_by_another_handle_is_seen_when_it_is_reported(log: Log, manager: LedgerManager) -> None:
    with opened(manager) as other, subscribed(log) as subscription, log.reader(strict=True) as reader:
        assert len(subscription.read_many(5)) == len(reader.read_many(5)) == 5
        assert other.truncate(12, force=True) == 12
        wait_until(lambda: subscription.backlog() == 8)
        assert drained(subscription) == list(range(12, 20))
        with pytest.raises(TruncatedError):
            wait_until(lambda: not reader.read_many(1))
        reader.seek(LogEnd.EARLIEST)
        assert seqs_of(list(reader)) == list(range(12, 20))
