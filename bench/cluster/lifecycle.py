"""Contests about ledgers as a whole, and about crashes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.cluster import zookeeper
from bench.cluster.appending import CURVES
from bench.cluster.bookies import BOOKIES, Cluster, answer, child
from bench.contest import Contest, Contestant, Run, Scale, Target, at_least, at_most, rate
from bench.payloads import PASSWORD, PAYLOAD

Drive = Callable[[Cluster, float], float]


CHANGE_SECONDS: Final = 10.0
"""How long to wait for an ensemble to change after a bookie was killed, however short the contest is."""


@contextmanager
def started(drive: Drive, curve: bool, bookies: int, directory: Path, _: Scale) -> Iterator[Run]:
    """A new cluster, whose client has used the password once, so that no run pays for scrypt."""
    with Cluster(directory, curve=curve, bookies=bookies) as cluster:
        cluster.client.create_ledger(password=PASSWORD).close()
        yield partial(drive, cluster)


@contextmanager
def on_zookeeper(curve: bool, directory: Path, _: Scale) -> Iterator[Run]:
    """A new cluster whose metadata is in ZooKeeper."""
    with zookeeper.server(directory) as url, Cluster(directory, curve=curve, url=url) as cluster:
        cluster.client.create_ledger(password=PASSWORD).close()
        yield partial(create_and_close, cluster)


def pybk(drive: Drive, target: Target, *, bookies: int = BOOKIES) -> list[Contestant]:
    """Return pybk as a contestant, without CURVE and with it."""
    return [Contestant(f"pybk{suffix}", partial(started, drive, curve, bookies), [target]) for suffix, curve in CURVES]


def create_and_close(cluster: Cluster, seconds: float) -> float:
    """Return the ledgers created and closed per second."""

    def step() -> int:
        cluster.client.create_ledger(password=PASSWORD).close()
        return 1

    return rate(step, seconds)


def longest_pause(cluster: Cluster, seconds: float) -> float:
    """Kill a bookie of the ensemble while a writer appends; return its longest append, milliseconds."""
    with cluster.client.create_ledger(password=PASSWORD) as writer:
        begin = time.perf_counter()
        while time.perf_counter() < begin + seconds / 2:
            writer.append(PAYLOAD)
        cluster.kill(cluster.client.ledger_metadata(writer.ledger_id).fragments[-1].ensemble[0].bookie_id)
        longest = 0.0
        end = (now := time.perf_counter()) + seconds / 2
        while now < end or not _has_changed(cluster, writer.ledger_id):
            if now > end + CHANGE_SECONDS:
                raise RuntimeError("a bookie of the ensemble was killed, but the ensemble did not change")
            last = now
            writer.append(PAYLOAD)
            now = time.perf_counter()
            longest = max(longest, now - last)
    cluster.start()  # the spare of the next round
    return longest * 1e3


def _has_changed(cluster: Cluster, ledger_id: int) -> bool:
    return len(cluster.client.ledger_metadata(ledger_id).fragments) > 1


def recovery(cluster: Cluster, _: float) -> float:
    """Have a writer die with unconfirmed entries; return the milliseconds of opening its ledger."""
    with child(cluster, "write") as writer:
        ledger_id = int(answer(writer))
        writer.wait()
    begin = time.perf_counter()
    with cluster.client.open_ledger(ledger_id, password=PASSWORD):
        return (time.perf_counter() - begin) * 1e3


def ledgers() -> Iterator[Contestant]:
    """Yield pybk on each metadata store that there is."""
    for suffix, curve in CURVES:
        drive = partial(started, create_and_close, curve, BOOKIES)
        yield Contestant(f"pybk, LMDB{suffix}", drive, [at_least(500)])
    if zookeeper.is_there():
        for suffix, curve in CURVES:
            yield Contestant(f"pybk, ZooKeeper{suffix}", partial(on_zookeeper, curve), [at_least(250)])


CONTESTS: Final[Sequence[Contest]] = (
    Contest("ledgers", "create a ledger and close it", "/s", list(ledgers())),
    Contest(
        "pause",
        "longest append after SIGKILL of a bookie, one spare",
        "ms",
        pybk(longest_pause, at_most(200), bookies=BOOKIES + 1),
    ),
    Contest(
        "recovery",
        "open a ledger whose writer was killed, 1000 entries unconfirmed",
        "ms",
        pybk(recovery, at_most(500)),
    ),
)
