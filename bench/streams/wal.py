"""Contests of the write-ahead log: compared with a ledger of the same store settings, and with sqlite3."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale, Target, rate
from bench.payloads import BATCH, PASSWORD, PAYLOAD, PAYLOADS
from bench.peers import Lmdb, Sqlite
from bench.reading import peer_scan
from pybk import DigestType, LedgerManager, WriteAheadLog

PRODUCERS: Final = 32

Append = Callable[[bytes], object]
AppendAsync = Callable[[bytes], Awaitable[int]]


def times(factor: float, name: str) -> Target:
    """Return a target of so many times what another contestant reaches."""
    return Target(f">= {factor:g} x {name}", lambda rates: factor * rates[name])


@contextmanager
def ledger_append(directory: Path, _: Scale) -> Iterator[Run]:
    """One thread appends to a ledger."""
    with LedgerManager.open(directory) as manager, manager.create_ledger(password=PASSWORD) as writer:
        yield partial(rate, lambda: one(writer.append))


@contextmanager
def wal_append(directory: Path, _: Scale) -> Iterator[Run]:
    """One thread appends to a write-ahead log."""
    with WriteAheadLog.open(directory, password=PASSWORD) as wal:
        yield partial(rate, lambda: one(wal.append))


@contextmanager
def sqlite_append(directory: Path, _: Scale) -> Iterator[Run]:
    """One thread inserts rows, each in a transaction."""
    with Sqlite(directory) as peer:
        yield partial(rate, lambda: one(lambda payload: peer.append([payload])))


def one(append: Append) -> int:
    """Append once."""
    append(PAYLOAD)
    return 1


def by_producers(append: AppendAsync, seconds: float) -> float:
    """Append from asyncio tasks, each of which awaits its own appends."""

    async def run() -> float:
        begin = time.perf_counter()
        end = begin + seconds

        async def produce() -> int:
            count = 0
            while time.perf_counter() < end:
                await append(PAYLOAD)
                count += 1
            return count

        counts = await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
        return sum(counts) / (time.perf_counter() - begin)

    return asyncio.run(run())


@contextmanager
def ledger_producers(directory: Path, _: Scale) -> Iterator[Run]:
    """Tasks append to a ledger."""
    with LedgerManager.open(directory) as manager, manager.create_ledger(password=PASSWORD) as writer:
        yield partial(by_producers, writer.append_async)


@contextmanager
def wal_producers(directory: Path, _: Scale) -> Iterator[Run]:
    """Tasks append to a write-ahead log."""
    with WriteAheadLog.open(directory, password=PASSWORD) as wal:
        yield partial(by_producers, wal.append_async)


@contextmanager
def wal_replay(digest_type: DigestType, batches: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """Replay a write-ahead log that was appended in batches, every record verified."""
    with WriteAheadLog.open(directory, password=PASSWORD, digest_type=digest_type) as wal:
        for _ in range(scale.entries // BATCH):
            wal.append_many(PAYLOADS)

        def replay() -> int:
            if batches:
                return sum(records.complete for records in wal.replay_batches())
            return sum(1 for _ in wal.replay())

        yield partial(rate, replay)


def replays() -> Iterator[Contestant]:
    """Yield replays with and without a password's digest, one by one and in batches, then the peers."""
    for digest_type in (DigestType.HMAC_SHA256, DigestType.CRC32C):
        for batches in (False, True):
            name = f"pybk {digest_type.name}{' batches' if batches else ''}"
            yield Contestant(name, partial(wal_replay, digest_type, batches), [times(1, "sqlite3")])
    yield peer_scan(Sqlite)
    yield peer_scan(Lmdb)


CONTESTS: Final = (
    Contest(
        "wal-append",
        "one thread appends, each append synced",
        "/s",
        [
            Contestant("ledger", ledger_append),
            Contestant("wal", wal_append, [times(0.95, "ledger")]),
            Contestant("sqlite3", sqlite_append),
        ],
    ),
    Contest(
        "wal-asyncio",
        f"{PRODUCERS} asyncio tasks append",
        "/s",
        [
            Contestant("ledger", ledger_producers),
            Contestant("wal", wal_producers, [times(0.8, "ledger")]),
        ],
    ),
    Contest("wal-replay", "all records in order, verified", "/s", list(replays())),
)
