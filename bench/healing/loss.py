"""A lost bookie of five: how fast its ledgers are whole again, how much is copied, and what writers notice of it.

The bookie is killed while repairs are paused. A writer appends one entry at a time for a while. Then half of the bytes
are copied while nobody else works; then the writer appends again, while copies continue; and the rest is copied.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench.cluster.appending import p99_ms
from bench.cluster.bookies import process_cpu_seconds
from bench.healing import floor
from bench.payloads import ENTRY_BYTES, PASSWORD, PAYLOAD, PAYLOADS
from pybk import ClusterAdmin, LedgerManager

BOOKIES: Final = 5
COPIES: Final = 3
FILLERS: Final = 4
LOOK_S: Final = 0.25
SESSION_S: Final = 32.0
"""How long an auditor waits before it believes that a bookie is absent, and a margin."""

ENTRY_ENCODED: Final = ENTRY_BYTES + 64
"""An entry with its header and HMAC."""

STALLED_S: Final = 60.0
SETTLED_S: Final = 2.0
"""All is copied when nothing was copied for so long."""

UNCERTAIN: Final = 16
"""Entries of the writer that may be stored and not counted yet, or counted and not yet stored by all bookies."""

FLOOR_COPIES: Final = 400
"""Copies of each bare loop."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What the loss of a bookie has cost.

    Attributes:
        lost: Encoded bytes that the bookie held.
        copied: Encoded bytes that were copied.
        alone_mb_s: Megabytes copied per second while nobody else worked, from the end of the pause on.
        beside_mb_s: Megabytes copied per second while a writer appended.
        floor_mb_s: What bare loops copy per second, a ledger's size at a time (``floor``).
        floor_cpu_s: Processor time of these loops per GB.
        cpu_s: Processor time of all bookies per GB that was copied while nobody else worked.
        p99_without_ms: The 99th percentile of an append without repairs.
        p99_with_ms: The same during repairs.
    """

    lost: int
    copied: int
    alone_mb_s: float
    beside_mb_s: float
    floor_mb_s: float
    floor_cpu_s: float
    cpu_s: float
    p99_without_ms: float
    p99_with_ms: float


class Five:
    """Five bookies in processes of their own, which count what they store.

    Attributes:
        url: Where the metadata are.
        processes: The bookies that run, by name.
    """

    def __init__(self, directory: Path) -> None:
        self.url = f"lmdb://{directory.resolve()}/metadata"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for number in range(BOOKIES):
            name = f"bookie-{number}"
            command = [sys.executable, "-m", "bench.healing.bookie", str(directory / name), self.url, name]
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for process in self.processes.values():
            assert process.stdout is not None
            process.stdout.readline()

    def stored(self, name: str) -> int:
        """Return how many bytes a bookie has stored."""
        process = self.processes[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    def all_stored(self) -> int:
        """Return how many bytes all bookies that run have stored."""
        return sum(map(self.stored, self.processes))

    def cpu_seconds(self) -> float:
        """Return the processor time that they have used."""
        return sum(process_cpu_seconds(process.pid) for process in self.processes.values())

    def kill(self, name: str) -> None:
        """Kill a bookie with SIGKILL."""
        process = self.processes.pop(name)
        process.kill()
        process.communicate()


@contextmanager
def five(directory: Path) -> Iterator[Five]:
    """Start five bookies; kill what is left of them at the end."""
    cluster = Five(directory)
    try:
        yield cluster
    finally:
        for name in list(cluster.processes):
            cluster.kill(name)


def fill(manager: LedgerManager, ledgers: int, entries: int) -> None:
    """Write closed ledgers, several at a time."""

    def work(count: int) -> None:
        for _ in range(count):
            with manager.create_ledger(password=PASSWORD, ensemble_size=COPIES) as writer:
                for at in range(0, entries, len(PAYLOADS)):
                    writer.append_many(PAYLOADS[: min(len(PAYLOADS), entries - at)])

    threads = [threading.Thread(target=work, args=(-(-ledgers // FILLERS),)) for _ in range(FILLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Foreground:
    """A writer that appends one entry at a time in a thread of its own, until ``end``.

    Attributes:
        latencies: The seconds of each append.
    """

    def __init__(self, manager: LedgerManager) -> None:
        self._manager = manager
        self.latencies: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        with self._manager.create_ledger(password=PASSWORD, ensemble_size=COPIES) as writer:
            while not self._ended.is_set():
                began = time.perf_counter()
                writer.append(PAYLOAD)
                self.latencies.append(time.perf_counter() - began)

    def end(self) -> list[float]:
        """Stop; return the latencies."""
        self._ended.set()
        self._thread.join()
        return self.latencies


def measure(directory: Path, ledgers: int, entries: int, seconds: float, beside_s: float) -> Loss:
    """Fill a cluster, kill a bookie, and watch.

    Args:
        directory: On the disk to measure.
        ledgers: How many ledgers the bookie holds, about.
        entries: Entries of 1 KiB in a ledger.
        seconds: How long a writer appends without repairs.
        beside_s: How long it appends during repairs.
    """
    with five(directory) as cluster, LedgerManager.connect(cluster.url) as manager:
        began = time.monotonic()
        admin = ClusterAdmin(manager)
        admin.change_settings(lambda old: replace(old, repair=replace(old.repair, grace_s=1.0)))
        fill(manager, ledgers * BOOKIES // COPIES, entries)
        admin.pause_repair(3600, "bench")
        time.sleep(max(0.0, began + SESSION_S - time.monotonic()))
        lost = cluster.stored("bookie-0")
        cluster.kill("bookie-0")
        calm = Foreground(manager)
        time.sleep(seconds)
        before = p99_ms(calm.end())
        bare = floor.measure(directory, entries * ENTRY_BYTES, FLOOR_COPIES)
        return _repaired(cluster, manager, admin, lost, before, bare, beside_s)


def _repaired(
    cluster: Five,
    manager: LedgerManager,
    admin: ClusterAdmin,
    lost: int,
    before_ms: float,
    bare: tuple[float, float],
    beside_s: float,
) -> Loss:
    """Let the cluster repair itself, with a writer for a while once half of the bytes are copied."""
    stored, cpu = cluster.all_stored(), cluster.cpu_seconds()
    began = time.monotonic()
    admin.resume_repair(by="bench")
    half, half_at = _until_copied(lambda: cluster.all_stored() - stored, lost // 2, 0.0)
    half_cpu_s = (cluster.cpu_seconds() - cpu) / half * 1e9
    at_half = cluster.all_stored()
    writer = Foreground(manager)
    time.sleep(beside_s)
    during = writer.end()
    appended = COPIES * ENTRY_ENCODED * len(during)
    beside = cluster.all_stored() - at_half - appended
    _until_copied(lambda: cluster.all_stored() - stored - appended, lost, SETTLED_S)
    return Loss(
        lost=lost,
        copied=cluster.all_stored() - stored - appended,
        alone_mb_s=half / 1e6 / (half_at - began),
        beside_mb_s=beside / 1e6 / beside_s,
        floor_mb_s=bare[0],
        floor_cpu_s=bare[1],
        cpu_s=half_cpu_s,
        p99_without_ms=before_ms,
        p99_with_ms=p99_ms(during),
    )


def _until_copied(copied: Callable[[], int], wanted: int, settled_s: float) -> tuple[int, float]:
    """Wait until so many bytes are copied, and nothing was copied for a while.

    Returns:
        The bytes, and the time of the last copy.
    """
    most, changed = 0, time.monotonic()
    while True:
        time.sleep(LOOK_S)
        now, found = time.monotonic(), copied()
        if found > most + ENTRY_ENCODED * UNCERTAIN:
            most, changed = found, now
        if most >= wanted - ENTRY_ENCODED * UNCERTAIN and now >= changed + settled_s:
            return most, changed
        if now > changed + STALLED_S:
            raise RuntimeError(f"nothing was copied for {STALLED_S:g} s; {most} of {wanted} bytes were")
