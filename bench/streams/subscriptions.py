"""Contests of subscriptions: compared with the queue of persist-queue that acknowledges, over sqlite3."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from persistqueue import SQLiteAckQueue

from bench.contest import Contest, Contestant, Run, Scale, Target, at_least, at_most
from bench.payloads import BATCH, PASSWORD, PAYLOAD, PAYLOADS
from bench.streams.wal import times
from pybk import (
    ConsumerServer,
    LedgerManager,
    Log,
    LogEnd,
    LogRecord,
    LogWriter,
    MetricKey,
    RemoteConsumer,
    Subscription,
)

TASKS: Final = 32
Measure = Callable[[LedgerManager, Sequence[Callable[[], object]]], float]
"""Calls some, and returns a figure of that."""

BLOCK_BYTES: Final = 4096
"""What the store's log is written in."""

PEER: Final = "persist-queue SQLiteAckQueue"


@contextmanager
def filled(directory: Path, scale: Scale) -> Iterator[Subscription]:
    """Yield a shared subscription of a log with records."""
    with Log.open(directory, "log", password=PASSWORD) as log:
        with log.writer() as writer:
            for _ in range(scale.entries // BATCH):
                writer.append_many(PAYLOADS)
        with log.subscribe("bench", start=LogEnd.EARLIEST, mode="shared") as subscription:
            yield subscription


async def consume(subscription: Subscription, end: float, timeout: float) -> int:
    """Read records one by one, and wait for each acknowledgement; returns how many."""
    count = 0
    while time.perf_counter() < end and (record := await subscription.read_async(timeout)) is not None:
        await subscription.ack_coro(record)
        count += 1
    return count


@contextmanager
def ack_tasks(directory: Path, scale: Scale) -> Iterator[Run]:
    """Tasks consume a log."""
    with filled(directory, scale) as subscription:

        async def run(seconds: float) -> float:
            begin = time.perf_counter()
            tasks = (consume(subscription, begin + seconds, 0) for _ in range(TASKS))
            return sum(await asyncio.gather(*tasks)) / (time.perf_counter() - begin)

        yield lambda seconds: (subscription.seek(0), asyncio.run(run(seconds)))[1]


@contextmanager
def ack_thread(count: int, directory: Path, scale: Scale) -> Iterator[Run]:
    """One thread consumes a log, some records at a time."""
    with filled(directory, scale) as subscription:

        def run(seconds: float) -> float:
            subscription.seek(0)
            begin, done = time.perf_counter(), 0
            while time.perf_counter() < begin + seconds and (records := subscription.read_many(count, timeout=0)):
                subscription.ack(records)
                done += len(records)
            return done / (time.perf_counter() - begin)

        yield run


@contextmanager
def ack_peer(directory: Path, _: Scale) -> Iterator[Run]:
    """One thread consumes a queue of persist-queue; each get and each acknowledgement is a transaction."""
    queue = SQLiteAckQueue(str(directory), auto_commit=True)

    def run(seconds: float) -> float:
        for _ in range(100 + int(5000 * seconds)):
            queue.put(PAYLOAD)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds and queue.size:
            queue.ack(queue.get())
            count += 1
        return count / (time.perf_counter() - begin)

    yield run
    queue.close()


@contextmanager
def deliver(directory: Path, _: Scale) -> Iterator[Run]:
    """Tasks append to a log, as many consume it."""
    with (
        Log.open(directory, "log", password=PASSWORD) as log,
        log.writer() as writer,
        log.subscribe("bench", mode="shared") as subscription,
    ):
        yield lambda seconds: asyncio.run(delivered(writer, subscription, seconds))


async def delivered(writer: LogWriter, subscription: Subscription, seconds: float) -> float:
    """Return how many records a second were appended, read and acknowledged, each step durable."""
    begin = time.perf_counter()

    async def produce() -> None:
        while time.perf_counter() < begin + seconds:
            await writer.append_coro(PAYLOAD)

    consumers = [asyncio.create_task(consume(subscription, begin + seconds, 0.1)) for _ in range(TASKS)]
    await asyncio.gather(*(produce() for _ in range(TASKS)))
    return sum(await asyncio.gather(*consumers)) / (time.perf_counter() - begin)


FULL_ENTRIES: Final = 64 << 10
"""Entries of a scale at which the sizes are those of the names; smaller scales take a hundredth of them."""


@contextmanager
def with_holes(
    count: int, directory: Path, scale: Scale, manager: LedgerManager | None = None
) -> Iterator[Subscription]:
    """Yield a shared subscription of which every second record is acknowledged, and as many are not."""
    count = count if scale.entries >= FULL_ENTRIES else max(1, count // 100)
    with Log.open(manager or directory, "log", password=PASSWORD) as log:
        with log.writer() as writer:
            for first in range(0, 2 * count, BATCH):
                writer.append_many([b""] * min(BATCH, 2 * count - first))
        with log.subscribe("bench", start=LogEnd.EARLIEST, mode="shared", max_unacked=2 * count) as subscription:
            for first in range(1, 2 * count, 100_000):
                subscription.ack([*range(first, min(first + 100_000, 2 * count), 2)])
            yield subscription


@contextmanager
def read_holes(count: int, directory: Path, scale: Scale) -> Iterator[Run]:
    """One thread reads the records again that are not acknowledged."""
    with with_holes(count, directory, scale) as subscription:

        def run(_: float) -> float:
            subscription.rewind()
            begin, read = time.process_time(), 0
            while records := subscription.read_many(100, timeout=0):
                read += len(records)
            return (time.process_time() - begin) / read * 1e6

        yield run


@contextmanager
def ack_between(count: int, directory: Path, scale: Scale) -> Iterator[Run]:
    """One thread acknowledges records between many ranges."""
    with with_holes(count, directory, scale) as subscription:

        def run(_: float) -> float:
            holes = [each.start for each in subscription.unacked_ranges()]
            chosen = holes[1 :: max(1, len(holes) // 100)]
            begin = time.process_time()
            for seq in chosen:
                subscription.ack(seq)
            return (time.process_time() - begin) / len(chosen) * 1e6

        yield run


@contextmanager
def acks_between(measure: Measure, count: int, directory: Path, scale: Scale) -> Iterator[Run]:
    """One thread acknowledges a thousand records between many ranges, and measures that."""
    with (
        LedgerManager.open(directory) as manager,
        with_holes(count, directory, scale, manager) as subscription,
    ):

        def run(_: float) -> float:
            holes = [each.start for each in subscription.unacked_ranges()]
            chosen = holes[1 :: max(1, len(holes) // 1000)]
            return measure(manager, [partial(subscription.ack, seq) for seq in chosen])

        yield run


def kilobytes_each(manager: LedgerManager, calls: Sequence[Callable[[], object]]) -> float:
    """Return what each call has the store write, at most: its commits take up to a block more than they have."""
    before = manager.metrics().histograms[MetricKey("log_commit_bytes")]
    for call in calls:
        call()
    after = manager.metrics().histograms[MetricKey("log_commit_bytes")]
    return (after.sum - before.sum + BLOCK_BYTES * (after.count - before.count)) / len(calls) / 1024


def longest(_: LedgerManager, calls: Sequence[Callable[[], object]]) -> float:
    """Return the milliseconds of the call that took longest."""
    most = 0.0
    for call in calls:
        begin = time.perf_counter()
        call()
        most = max(most, time.perf_counter() - begin)
    return most * 1000


@contextmanager
def ack_remotely(count: int, directory: Path, scale: Scale) -> Iterator[Run]:
    """A consumer of another process acknowledges every second record of those that it holds, by one call."""
    with with_holes(count, directory, scale) as subscription:
        path = directory / "s"
        with ConsumerServer(subscription, path), RemoteConsumer.connect(path) as consumer:

            def run(_: float) -> float:
                subscription.seek(0)
                held: list[LogRecord] = []
                while len(held) < subscription.backlog():
                    held += consumer.read_many(1000)
                begin = time.process_time()
                consumer.ack(held[::2])
                return (time.process_time() - begin) / len(held[::2]) * 1e6

            yield run


def grown(factor: float, name: str) -> Target:
    """Return a target of at most so many times what a smaller contestant takes for each."""
    return Target(f"<= {factor:g} x {name}", lambda rates: factor * rates[name], at_most=True)


CONTESTS: Final = (
    Contest(
        "log-ack",
        "records are read and acknowledged, each acknowledgement synced",
        "/s",
        [
            Contestant(f"subscription, {TASKS} tasks", ack_tasks, [times(20, PEER)]),
            Contestant("subscription, 100 at a time", partial(ack_thread, 100), [times(20, PEER)]),
            Contestant("subscription, one by one", partial(ack_thread, 1), [times(1, PEER)]),
            Contestant(PEER, ack_peer),
        ],
    ),
    Contest(
        "log-deliver",
        f"{TASKS} tasks append, {TASKS} read and acknowledge, all synced",
        "/s",
        [Contestant("subscription", deliver, [at_least(5_000)])],
    ),
    Contest(
        "log-holes",
        "a subscription of which every second record is acknowledged is read again",
        "us of CPU for each record",
        [
            Contestant("1,000 holes", partial(read_holes, 1_000)),
            Contestant("100,000 holes", partial(read_holes, 100_000), [grown(3, "1,000 holes"), at_most(10)]),
        ],
    ),
    Contest(
        "log-ack-between",
        "a record between acknowledged ranges is acknowledged, synced",
        "us of CPU for each",
        [
            Contestant("10,000 ranges", partial(ack_between, 10_000)),
            Contestant("1,000,000 ranges", partial(ack_between, 1_000_000), [grown(3, "10,000 ranges"), at_most(2000)]),
        ],
    ),
    Contest(
        "log-ack-bytes",
        "a thousand records between acknowledged ranges are acknowledged, each synced",
        "KiB that are written for each, at most",
        [
            Contestant("10,000 ranges", partial(acks_between, kilobytes_each, 10_000)),
            Contestant("1,000,000 ranges", partial(acks_between, kilobytes_each, 1_000_000), [at_most(16)]),
        ],
    ),
    Contest(
        "log-ack-longest",
        "a thousand records between acknowledged ranges are acknowledged, each synced",
        "ms for the one that takes longest",
        [
            Contestant("10,000 ranges", partial(acks_between, longest, 10_000)),
            Contestant("1,000,000 ranges", partial(acks_between, longest, 1_000_000)),
        ],
    ),
    Contest(
        "log-ack-remote",
        "every second record that a consumer in another process holds is acknowledged by one call",
        "us of CPU for each",
        [
            Contestant("of 90 held", partial(ack_remotely, 45)),
            Contestant("of 9,000 held", partial(ack_remotely, 4_500), [grown(3, "of 90 held")]),
        ],
    ),
)
