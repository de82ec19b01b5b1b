"""Contests about reading from bookies; every entry that is read is verified."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.cluster.appending import CURVES, each_ms
from bench.cluster.bare import BareLoop, bare_loop, median_ms
from bench.cluster.bookies import Cluster, answer, child
from bench.cluster.child import stamped
from bench.contest import Contest, Contestant, Run, Scale, Target, at_least, rate
from bench.payloads import BATCH, ENTRY_BYTES, PASSWORD, PAYLOADS
from pybk import LedgerReader

SCAN_BYTES: Final = 4 << 20
TAIL_SECONDS: Final = 1 / 200
TAIL_SKIPPED: Final = 5

Drive = Callable[[LedgerReader, float], float]


@contextmanager
def filled(drive: Drive, curve: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """A closed ledger in a new cluster."""
    with Cluster(directory, curve=curve) as cluster:
        with cluster.client.create_ledger(password=PASSWORD) as writer:
            for _ in range(scale.entries // BATCH):
                writer.append_many(PAYLOADS)
        with cluster.client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            yield partial(drive, reader)


def scan(reader: LedgerReader, seconds: float) -> float:
    """Read from end to end, over and over; return payload megabytes per second."""

    def step() -> int:
        first, last = 0, reader.last_add_confirmed
        while first <= last:
            first += len(reader.read_batch(first, max_bytes=SCAN_BYTES))
        return first * ENTRY_BYTES

    return rate(step, seconds) / 1e6


def singles(reader: LedgerReader, seconds: float) -> float:
    """Read single entries in random order; return the median in milliseconds."""
    source = random.Random(3)
    last = reader.last_add_confirmed

    def step() -> None:
        number = source.randint(0, last)
        assert [entry.entry_id for entry in reader.read(number, number)] == [number]

    return each_ms(step, seconds)


@contextmanager
def tail(curve: bool, directory: Path, _: Scale) -> Iterator[Run]:
    """A new cluster; each run has a ledger and a process that follows it."""
    with Cluster(directory, curve=curve) as cluster:
        yield partial(followed, cluster)


def followed(cluster: Cluster, seconds: float) -> float:
    """Append at a steady rate; return the median milliseconds until another process sees an entry."""
    with (
        cluster.client.create_ledger(password=PASSWORD) as writer,
        child(cluster, "follow", writer.ledger_id) as reader,
    ):
        answer(reader)
        due = time.monotonic()
        for _ in range(TAIL_SKIPPED + max(1, round(seconds / TAIL_SECONDS))):
            writer.append(stamped())
            due += TAIL_SECONDS
            time.sleep(max(0.0, due - time.monotonic()))
        writer.close()
        latencies: list[float] = json.loads(answer(reader))
    return statistics.median(latencies[TAIL_SKIPPED:]) * 1e3


def pybk(drive: Drive, *targets: Callable[[str], Target]) -> list[Contestant]:
    """Return pybk as a contestant that reads a filled ledger, without CURVE and with it.

    Args:
        drive: Reads.
        targets: Each returns the target of the one or the other, from what is added to its name.
    """
    return of_both(partial(filled, drive), targets)


def following(*targets: Callable[[str], Target]) -> list[Contestant]:
    """Return pybk as a contestant that is followed by another process, without CURVE and with it."""
    return of_both(tail, targets)


def of_both(
    enter: Callable[[bool, Path, Scale], AbstractContextManager[Run]], targets: Sequence[Callable[[str], Target]]
) -> list[Contestant]:
    """Return pybk as a contestant, without CURVE and with it."""
    return [
        Contestant(f"pybk{suffix}", partial(enter, curve), [target(suffix) for target in targets])
        for suffix, curve in CURVES
    ]


def bare(figure: Callable[[BareLoop, float], float], name: str) -> list[Contestant]:
    """Return a figure of the bare loop as a contestant, without CURVE and with it."""

    @contextmanager
    def enter(curve: bool, directory: Path, _: Scale) -> Iterator[Run]:
        with bare_loop(directory, curve=curve) as loop:
            yield partial(figure, loop)

    return [Contestant(f"{name}{suffix}", partial(enter, curve)) for suffix, curve in CURVES]


def round_trip(loop: BareLoop, seconds: float) -> float:
    """Return the median of a bare round trip, milliseconds."""
    return median_ms(loop.read(seconds))


def quorum_and_round_trip(loop: BareLoop, seconds: float) -> float:
    """Return the medians of a bare append and of a bare round trip together, milliseconds."""
    return median_ms(loop.run(1, 1, seconds / 2)[1]) + median_ms(loop.read(seconds / 2))


def times_bare(factor: float, name: str) -> Callable[[str], Target]:
    """Return targets of so many times a figure of the bare loop."""

    def target(suffix: str) -> Target:
        whom = f"{name}{suffix}"
        return Target(f"<= {factor:g} x {whom}", lambda rates: factor * rates[whom], at_most=True)

    return target


ROUND_TRIP: Final = "bare round trip"
QUORUM: Final = "bare append + round trip"


CONTESTS: Final[Sequence[Contest]] = (
    Contest("scan", "read_batch over a ledger on remote bookies", "MB/s", pybk(scan, lambda _: at_least(300))),
    Contest(
        "random",
        "one random read, p50",
        "ms",
        [*pybk(singles, times_bare(1.5, ROUND_TRIP)), *bare(round_trip, ROUND_TRIP)],
    ),
    Contest(
        "tail",
        "append to seen by another process that follows, 200/s, p50",
        "ms",
        [*following(times_bare(2, QUORUM)), *bare(quorum_and_round_trip, QUORUM)],
    ),
)
