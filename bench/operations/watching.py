"""What writers notice when a cluster is watched, and what the bookies need for it."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.cluster.appending import p99_ms
from bench.cluster.bookies import Cluster, process_cpu_seconds
from bench.cluster.slowness import memory_mib
from bench.contest import latencies_of
from bench.payloads import PASSWORD, PAYLOAD
from pybk import LedgerWriter

ENSEMBLE: Final = 3
SETTLED_S: Final = 1.0
"""The first scrapes and the first connections are not what a watched cluster costs."""


@dataclass(slots=True)
class Watched:
    """What was measured.

    Attributes:
        ratios: For each round, the 99th percentile of an append while the cluster is watched, over that of the window
            before.
        p50_ratios: The same of medians.
        bystander_ratios: The same of 99th percentiles while the watcher asks a process that has nothing to do with the
            cluster: what a watcher costs because it shares the machine.
        alone_ms: The 99th percentiles of the windows in which nobody watches.
        cpu_percent: Percent of a core that the bookies and the console took more while only watched, of each round.
        watcher_percent: Percent of a core that the watcher took.
        grown_mib: How much the resident memory of a bookie grew while it was only watched; the most.
        answered: What the watchers got, per second.
        failed: What they did not get.
    """

    ratios: list[float] = field(default_factory=list)
    p50_ratios: list[float] = field(default_factory=list)
    bystander_ratios: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)
    cpu_percent: float = 0.0
    watcher_percent: float = 0.0
    grown_mib: float = 0.0
    answered: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


@contextmanager
def console(cluster: Cluster, directory: Path) -> Iterator[tuple[str, int]]:
    """Run a console that knows the bookies' ports; yield its URL and its process id."""
    ports = directory / "bookies.toml"
    ports.write_text("".join(f'"{name}" = "{url}"\n' for name, url in cluster.http.items()), encoding="utf-8")
    command = [sys.executable, "-m", "pybk.admin", "console", cluster.url, "--http", "127.0.0.1:0"]
    with subprocess.Popen(
        [*command, "--json", "--log-level", "error", "--bookies", str(ports)],
        stdout=subprocess.PIPE,
        text=True,
        env=cluster.environment,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["http"], process.pid
        finally:
            process.kill()


@contextmanager
def bystander() -> Iterator[str]:
    """Run a process that answers requests and does nothing else; yield its URL."""
    command = [sys.executable, "-m", "bench.operations.bystander"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class Watching:
    """A watcher in a process of its own, from its creation until ``end``."""

    def __init__(self, url: str, bookies: list[str]) -> None:
        command = [sys.executable, "-m", "bench.operations.watcher", url, *bookies]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._began = time.monotonic()

    def end(self, found: Watched) -> None:
        """Stop it, and note what it got."""
        seconds = time.monotonic() - self._began
        said: dict[str, Any] = json.loads(self._process.communicate("")[0])
        found.answered = {name: count / seconds for name, count in said["counts"].items()}
        found.watcher_percent = 100 * said["cpu_s"] / seconds
        for name, count in said["failed"].items():
            found.failed[name] = found.failed.get(name, 0) + count


def appended(writer: LedgerWriter, seconds: float) -> list[float]:
    """Append one entry at a time; return the seconds of each."""
    return latencies_of(lambda: writer.append(PAYLOAD), seconds)


def measure(directory: Path, rounds: int, seconds: float) -> Watched:
    """Append with and without watchers in turns, after a window in which the cluster is only watched.

    Args:
        directory: On the disk to measure.
        rounds: Pairs of windows.
        seconds: How long a window is.
    """
    found = Watched()
    with (
        Cluster(directory, curve=True, bookies=ENSEMBLE, http=True) as cluster,
        console(cluster, directory) as (url, pid),
        bystander() as other,
        cluster.client.create_ledger(password=PASSWORD, ensemble_size=ENSEMBLE) as writer,
    ):
        appended(writer, seconds)  # what grows with the first entries is not of the watchers
        bookies = list(cluster.http.values())
        _only_watched(found, cluster, (url, bookies), pid, seconds)
        for _ in range(rounds):
            watching = Watching(other, [other] * len(bookies))
            time.sleep(SETTLED_S)
            beside = appended(writer, seconds)
            watching.end(Watched())
            alone = appended(writer, seconds)
            watching = Watching(url, bookies)
            time.sleep(SETTLED_S)
            watched = appended(writer, seconds)
            watching.end(found)
            found.bystander_ratios.append(p99_ms(beside) / p99_ms(alone))
            found.alone_ms.append(p99_ms(alone))
            found.ratios.append(p99_ms(watched) / p99_ms(alone))
            found.p50_ratios.append(statistics.median(watched) / statistics.median(alone))
    return found


def _only_watched(
    found: Watched, cluster: Cluster, urls: tuple[str, list[str]], console_pid: int, seconds: float
) -> None:
    pids = [*cluster.pids, console_pid]

    def used() -> float:
        return sum(map(process_cpu_seconds, pids))

    before, memory = used(), [memory_mib("VmRSS", pid) for pid in cluster.pids]
    time.sleep(seconds)
    rest = used() - before
    watching = Watching(*urls)
    before = used()
    time.sleep(seconds)
    watched = used() - before
    watching.end(found)
    found.cpu_percent = 100 * (watched - rest) / seconds
    found.grown_mib = max(memory_mib("VmRSS", pid) - old for pid, old in zip(cluster.pids, memory, strict=True))
