"""Contests about appending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from bench.contest import (
    THREADS,
    Contest,
    Contestant,
    Rates,
    Run,
    Scale,
    Target,
    at_least,
    in_threads,
    rate,
)
from bench.floors import BareGroupCommit, BareHash, BareWrite
from bench.payloads import BATCH, PASSWORD, PAYLOAD, PAYLOADS
from bench.peers import PEERS, READABLE_PEERS, Peer, Raw, Sqlite
from pybk import DigestType, LedgerManager, LedgerWriter

PRODUCERS: Final = 64
WINDOW: Final = 1024
DIGESTS: Final = (DigestType.HMAC_SHA256, DigestType.CRC32C, DigestType.XXH3)

Enter = Callable[[Path, Scale], AbstractContextManager[Run]]


class PeerKind(Protocol):
    """The class of a peer or a floor."""

    name: str

    def __call__(self, directory: Path, /) -> Peer:
        """Make it in an empty directory."""


def best(names: Sequence[str], rates: Rates) -> float:
    """Return the best rate among some."""
    return max(rates[name] for name in names)


def times_best(factor: float, names: Sequence[str], whom: str) -> Target:
    """Return a target of so many times the best of some."""
    return Target(f">= {factor:g} x {whom}", lambda rates: factor * best(names, rates))


DATABASE_NAMES: Final = [peer.name for peer in READABLE_PEERS]
DATABASES: Final = f"best of {', '.join(DATABASE_NAMES)}"


# ---- runs: how a contestant is driven --------------------------------------------------------------------------------


def pipelined(writer: LedgerWriter, seconds: float) -> float:
    """Append from one thread without waiting for each, and look at every outcome, a window later."""
    outstanding = [writer.append_async(payload) for payload in PAYLOADS]

    def step() -> int:
        nonlocal outstanding
        before, outstanding = outstanding, [writer.append_async(PAYLOAD) for _ in range(WINDOW)]
        for future in before:
            future.result()
        return len(before)

    reached = rate(step, seconds)
    for future in outstanding:
        future.result()
    return reached


def by_producers(writer: LedgerWriter, seconds: float) -> float:
    """Append from many asyncio tasks, each of which awaits its own appends."""

    async def run() -> float:
        begin = time.perf_counter()
        end = begin + seconds

        async def produce() -> int:
            count = 0
            while time.perf_counter() < end:
                await writer.append_async(PAYLOAD)
                count += 1
            return count

        counts = await asyncio.gather(*(produce() for _ in range(PRODUCERS)))
        return sum(counts) / (time.perf_counter() - begin)

    return asyncio.run(run())


# ---- contestants -----------------------------------------------------------------------------------------------------


@contextmanager
def ledger(
    drive: Callable[[LedgerWriter, float], float], digest_type: DigestType, directory: Path, _: Scale
) -> Iterator[Run]:
    """A new ledger in a new store."""
    with (
        LedgerManager.open(directory) as manager,
        manager.create_ledger(password=PASSWORD, digest_type=digest_type) as writer,
    ):
        yield partial(drive, writer)


def pybk(
    drive: Callable[[LedgerWriter, float], float],
    targets: Sequence[Target] = (),
    *,
    name: str = "pybk",
    digest_type: DigestType = DigestType.HMAC_SHA256,
) -> Contestant:
    """Return pybk as a contestant."""
    return Contestant(name, partial(ledger, drive, digest_type), targets)


def singly(writer: LedgerWriter, seconds: float) -> float:
    """Append one by one from one thread."""

    def step() -> int:
        writer.append(PAYLOAD)
        return 1

    return rate(step, seconds)


def in_batches(writer: LedgerWriter, seconds: float) -> float:
    """Append batches from one thread."""
    return rate(lambda: len(writer.append_many(PAYLOADS)), seconds)


def by_threads(writer: LedgerWriter, seconds: float) -> float:
    """Append one by one from many threads."""
    return in_threads(lambda: writer.append(PAYLOAD), THREADS, seconds)


def peer(kind: PeerKind, payloads: Sequence[bytes], threads: int = 1) -> Contestant:
    """Return a peer or a floor as a contestant."""

    @contextmanager
    def enter(directory: Path, _: Scale) -> Iterator[Run]:
        with kind(directory) as opened:

            def step() -> int:
                opened.append(payloads)
                return len(payloads)

            step()
            yield (lambda seconds: rate(step, seconds)) if threads == 1 else partial(in_threads, step, threads)

    return Contestant(kind.name, enter)


def batches() -> Iterator[Contestant]:
    """Yield pybk with each digest, then the peers."""
    for digest_type in DIGESTS:
        factor = 1.1 if digest_type is DigestType.HMAC_SHA256 else 1.6
        targets = [times_best(factor, DATABASE_NAMES, DATABASES)]
        yield pybk(in_batches, targets, name=f"pybk {digest_type.name}", digest_type=digest_type)
    for kind in PEERS:
        yield peer(kind, PAYLOADS)


ONE_THREAD: Final = "pybk, 1 thread"
CONTESTS: Final = (
    Contest(
        "append",
        "append, one thread",
        "/s",
        [
            pybk(
                singly,
                [
                    times_best(1.1, [Sqlite.name], Sqlite.name),
                    *(times_best(0.8, [kind.name], kind.name) for kind in (Raw, BareWrite)),
                ],
            ),
            *(peer(kind, [PAYLOAD]) for kind in (*PEERS, BareWrite, BareHash)),
        ],
    ),
    Contest(
        "threads",
        f"append, {THREADS} threads",
        "/s",
        [
            pybk(
                by_threads,
                [
                    times_best(3.5, DATABASE_NAMES, DATABASES),
                    times_best(0.8, [BareGroupCommit.name], BareGroupCommit.name),
                    Target(">= 3 x its one thread or 25,000", lambda rates: min(3 * rates[ONE_THREAD], 25_000.0)),
                ],
            ),
            pybk(singly, name=ONE_THREAD),
            *(peer(kind, [PAYLOAD], THREADS) for kind in (*PEERS, BareGroupCommit)),
        ],
    ),
    Contest("pipelined", "append_async from one thread", "/s", [pybk(pipelined, [at_least(150_000)])]),
    Contest("asyncio", f"append_async, {PRODUCERS} asyncio producers", "/s", [pybk(by_producers, [at_least(60_000)])]),
    Contest("batches", f"append_many({BATCH}), one thread", "/s", list(batches())),
)
