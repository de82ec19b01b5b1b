"""Contests of subscriptions: compared with the queue of persist-queue that acknowledges, over sqlite3."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from persistqueue import SQLiteAckQueue

from bench.contest import Contest, Contestant, Run, Scale, at_least
from bench.payloads import BATCH, PASSWORD, PAYLOAD, PAYLOADS
from bench.streams.wal import times
from pybk import Log, LogEnd, LogWriter, Subscription

TASKS: Final = 32
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
)
