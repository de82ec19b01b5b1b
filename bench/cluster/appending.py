"""Contests about appending to a cluster."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.cluster.bare import bare_loop, median_ms
from bench.cluster.bookies import Cluster
from bench.contest import THREADS, Contest, Contestant, Run, Scale, Target, at_most, in_threads, latencies_of, tail_of
from bench.payloads import PASSWORD, PAYLOAD, PAYLOADS
from pybk import AppendFuture, LedgerManager, LedgerWriter

BATCH: Final = 256
BATCHES_UNDER_WAY: Final = 6
OUTSTANDING: Final = 1000
EMBEDDED: Final = "embedded"
BARE: Final = "bare loop"
TAIL: Final = 5.0
"""How many times the median the 99th percentile may be."""
CURVES: Final = (("", False), (", CURVE", True))
"""What is added to a contestant's name, and whether it has a cluster secret."""

Drive = Callable[[Cluster, LedgerWriter, float], float]


@contextmanager
def ledger(drive: Drive, curve: bool, directory: Path, _: Scale, *, node: bool = False) -> Iterator[Run]:
    """A new ledger, 3/3/2 with HMAC, in a new cluster, of a client that may be one of the bookies."""
    with (
        Cluster(directory, curve=curve, node=node) as cluster,
        cluster.client.create_ledger(password=PASSWORD) as writer,
    ):
        writer.append(PAYLOAD)
        yield partial(drive, cluster, writer)


def pybk(drive: Drive, *targets: Callable[[str], Target]) -> list[Contestant]:
    """Return pybk as a contestant, without CURVE and with it.

    Args:
        drive: Appends.
        targets: Each returns the target of the one or the other, from what is added to its name.
    """
    return [
        Contestant(f"pybk{suffix}", partial(ledger, drive, curve), [target(suffix) for target in targets])
        for suffix, curve in CURVES
    ]


def at_least_bare(factor: float) -> Callable[[str], Target]:
    """Return targets of so many times the rate of the bare loop."""

    def target(suffix: str) -> Target:
        whom = f"{BARE}{suffix}"
        return Target(f">= {factor:g} x {whom}", lambda rates: factor * rates[whom])

    return target


def at_most_bare(factor: float) -> Callable[[str], Target]:
    """Return targets of so many times the milliseconds of the bare loop."""

    def target(suffix: str) -> Target:
        whom = f"{BARE}{suffix}"
        return Target(f"<= {factor:g} x {whom}", lambda times: factor * times[whom], at_most=True)

    return target


def bare(entries: int, window: int, figure: Callable[[float, list[float]], float]) -> list[Contestant]:
    """Return the bare loop as a contestant, without CURVE and with it.

    Args:
        entries: In a batch.
        window: Batches under way.
        figure: What is shown, of the entries per second and the seconds of each batch.
    """

    @contextmanager
    def enter(curve: bool, directory: Path, _: Scale) -> Iterator[Run]:
        with bare_loop(directory, curve=curve) as loop:
            yield lambda seconds: figure(*loop.run(entries, window, seconds))

    return [Contestant(f"{BARE}{suffix}", partial(enter, curve)) for suffix, curve in CURVES]


# ---- runs ------------------------------------------------------------------------------------------------------------


def each_ms(call: Callable[[], object], seconds: float) -> float:
    """Repeat a call; return its median time in milliseconds."""
    return median_ms(latencies_of(call, seconds))


def singly(_: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Append one at a time; return the median in milliseconds."""
    return each_ms(lambda: writer.append(PAYLOAD), seconds)


def by_threads(_: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Append one at a time from many threads; return entries per second."""
    return in_threads(lambda: writer.append(PAYLOAD), THREADS, seconds)


def in_batches(_: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Append batches, some under way; return entries per second."""
    batch = PAYLOADS[:BATCH]
    under_way = deque(writer.append_many_async(batch) for _ in range(BATCHES_UNDER_WAY))
    done = 0
    begin = now = time.perf_counter()
    end = begin + seconds
    while now < end:
        done += len(under_way.popleft().result())
        under_way.append(writer.append_many_async(batch))
        now = time.perf_counter()
    for future in under_way:
        done += len(future.result())
    return done / (time.perf_counter() - begin)


def with_outstanding(writer: LedgerWriter, seconds: float) -> tuple[int, float, list[float]]:
    """Append with as many outstanding entries as are allowed.

    Returns:
        The number of entries, the seconds, and the latency of each entry. Entries are waited for in order, so a
        latency is at least the true one.
    """
    outstanding: deque[tuple[float, AppendFuture[int]]] = deque()
    latencies = []
    begin = now = time.perf_counter()
    end = begin + seconds
    while outstanding or now < end:
        if len(outstanding) == OUTSTANDING or now >= end:
            sent, future = outstanding.popleft()
            future.result()
            now = time.perf_counter()
            latencies.append(now - sent)
        else:
            outstanding.append((now, writer.append_async(PAYLOAD)))
            now = time.perf_counter()
    return len(latencies), now - begin, latencies


def outstanding_rate(_: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Return entries per second."""
    entries, took = with_outstanding(writer, seconds)[:2]
    return entries / took


def outstanding_p99(_: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Return the 99th percentile of what an entry takes, milliseconds."""
    return p99_ms(with_outstanding(writer, seconds)[2])


def p99_ms(latencies: list[float]) -> float:
    """Return the 99th percentile of seconds, in milliseconds."""
    return statistics.quantiles(latencies, n=100)[98] * 1e3


def outstanding_tail(part: int, _: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Return a percentile of what an entry takes, in medians; see ``tail_of``."""
    return tail_of(with_outstanding(writer, seconds)[2], part)


def single_tail(part: int, _: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Append one at a time; return a percentile, in medians; see ``tail_of``."""
    return tail_of(latencies_of(lambda: writer.append(PAYLOAD), seconds), part)


def tails(name: str, title: str, drive: Callable[[int, Cluster, LedgerWriter, float], float]) -> Iterator[Contest]:
    """Yield the contests of the 99th percentile and of the 99.9th, which has no target."""
    yield Contest(f"{name}-p99", f"{title}, p99", "x p50", pybk(partial(drive, 100), lambda _: at_most(TAIL)))
    yield Contest(f"{name}-p99.9", f"{title}, p99.9", "x p50", pybk(partial(drive, 1000)))


def outstanding_cpu(cluster: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Return CPU seconds of all processes per 100 000 entries."""
    before = cluster.cpu_seconds()
    entries = with_outstanding(writer, seconds)[0]
    return (cluster.cpu_seconds() - before) / entries * 100_000


@contextmanager
def embedded(directory: Path, _: Scale) -> Iterator[Run]:
    """One append at a time to an embedded store on the same disk."""
    with LedgerManager.open(directory) as manager, manager.create_ledger(password=PASSWORD) as writer:
        yield partial(each_ms, lambda: writer.append(PAYLOAD))


# ---- contests --------------------------------------------------------------------------------------------------------


def median_of(_: float, latencies: list[float]) -> float:
    """Return the median of what each batch took, milliseconds."""
    return median_ms(latencies)


def rate_of(reached: float, _: list[float]) -> float:
    """Return the entries per second."""
    return reached


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "append",
        "one append at a time, p50",
        "ms",
        [
            *pybk(singly, at_most_bare(1.5)),
            *(
                Contestant(f"pybk, a bookie{suffix}", partial(ledger, singly, curve, node=True))
                for suffix, curve in CURVES
            ),
            *bare(1, 1, median_of),
            Contestant(EMBEDDED, embedded),
        ],
    ),
    *tails("append", "one append at a time", single_tail),
    Contest("outstanding", f"append_async, {OUTSTANDING} outstanding", "/s", pybk(outstanding_rate)),
    *tails("outstanding", "the same, an entry", outstanding_tail),
    Contest("cpu", "the same, CPU of all processes per 100 k entries", "s", pybk(outstanding_cpu)),
    Contest(
        "batches",
        f"append_many({BATCH}), {BATCHES_UNDER_WAY} under way",
        "/s",
        [*pybk(in_batches, at_least_bare(0.75)), *bare(BATCH, BATCHES_UNDER_WAY, rate_of)],
    ),
    Contest(
        "threads",
        f"append, {THREADS} threads; the bare loop with as many outstanding",
        "/s",
        [*pybk(by_threads, at_least_bare(0.6)), *bare(1, THREADS, rate_of)],
    ),
)
