"""Contests about one slow bookie of three: the quorum of the other two is what appends should wait for.

The slow bookie is stopped for 50 ms out of each 100 ms, as by a host that gives it half a processor, or a disk that
stalls: late with its answers, but never so late that it counts as gone. No spare is there to take its place.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

from bench.cluster.appending import CURVES, OUTSTANDING, Drive, in_batches, outstanding_p99, p99_ms
from bench.cluster.bookies import Cluster
from bench.contest import Contest, Contestant, Rates, Run, Scale, Target, at_most, latencies_of
from bench.payloads import PASSWORD, PAYLOAD
from pybk import LedgerWriter

PAGE_MIB: Final = 1 / 256
STOPPED_SECONDS: Final = 0.05
WELL: Final = "all well"
FACTOR: Final = 2
GROWTH_MIB: Final = 64
"""Bytes that a link and the writer may hold for a slow bookie, and a margin."""


# ---- the slow bookie -------------------------------------------------------------------------------------------------


def slow_down(pid: int) -> None:
    """Stop a process for half of the time, until this one is killed."""
    print("begun", flush=True)
    while True:
        for which in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(pid, which)
            time.sleep(STOPPED_SECONDS)


@contextmanager
def slowed(pid: int) -> Iterator[None]:
    """Have a process be slow, by a process of its own, so that this one is not disturbed."""
    command = [sys.executable, "-m", __name__, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()
            process.wait()
            os.kill(pid, signal.SIGCONT)


@contextmanager
def cluster(drive: Drive, curve: bool, slow: bool, directory: Path, _: Scale) -> Iterator[Run]:
    """A new cluster; each run has a new ledger, and a bookie that is slow while it lasts."""
    with Cluster(directory, curve=curve) as three:

        def run(seconds: float) -> float:
            with three.client.create_ledger(password=PASSWORD) as writer:
                writer.append(PAYLOAD)
                first = three.client.ledger_metadata(writer.ledger_id).fragments[0].ensemble[0]
                with slowed(three.pid(first.bookie_id)) if slow else nullcontext():
                    return drive(three, writer, seconds)

        yield run


# ---- runs ------------------------------------------------------------------------------------------------------------


def singly_p99(_: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Append one at a time; return the 99th percentile in milliseconds."""
    return p99_ms(latencies_of(lambda: writer.append(PAYLOAD), seconds))


def growth(three: Cluster, writer: LedgerWriter, seconds: float) -> float:
    """Append batches as fast as two bookies accept them; return the maximum memory growth of this process, MiB.

    At least a page, as nothing cannot be compared with a target.
    """
    ctypes.CDLL(None).malloc_trim(0)  # so that memory of earlier rounds is not reused, which would hide growth
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the maximum
    before = memory_mib("VmRSS")
    in_batches(three, writer, seconds)
    return max(memory_mib("VmHWM") - before, PAGE_MIB)


def memory_mib(which: str, pid: int | None = None) -> float:
    """Return a memory figure of a process, by default this one, from Linux, in MiB."""
    status = Path(f"/proc/{pid or 'self'}/status")
    found = re.search(rf"^{which}:\s+(\d+) kB$", status.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{status} has no {which}; resident memory is measured on Linux only")
    return int(found[1]) / 1024


# ---- contests --------------------------------------------------------------------------------------------------------


def beside_all_well(drive: Drive) -> Iterator[Contestant]:
    """Yield pybk with a slow bookie, and with none, each without CURVE and with it."""
    for suffix, curve in CURVES:
        well = f"{WELL}{suffix}"
        target = Target(f"<= {FACTOR} x {WELL}", partial(_times_well, well), at_most=True)
        yield Contestant(f"pybk{suffix}", partial(cluster, drive, curve, True), [target])
        yield Contestant(well, partial(cluster, drive, curve, False))


def _times_well(well: str, rates: Rates) -> float:
    return FACTOR * rates[well]


SLOW: Final = "one bookie of three stopped for half of the time"
CONTESTS: Final[Sequence[Contest]] = (
    Contest("slow", f"{SLOW}: one append, p99", "ms", list(beside_all_well(singly_p99))),
    Contest(
        "slow-outstanding",
        f"{SLOW}: append_async, {OUTSTANDING} outstanding, p99",
        "ms",
        list(beside_all_well(outstanding_p99)),
    ),
    Contest(
        "slow-memory",
        f"{SLOW}: growth of the client that sends batches",
        "MiB",
        [
            Contestant(f"pybk{suffix}", partial(cluster, growth, curve, True), [at_most(GROWTH_MIB)])
            for suffix, curve in CURVES
        ],
    ),
)


if __name__ == "__main__":
    slow_down(int(sys.argv[1]))
