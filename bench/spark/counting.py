"""Contests about reads of which no payload is wanted, and of many small ledgers.

Processor time is that of this process and of all that it has started: Spark's JVM, and its Python workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale, Target
from bench.payloads import PASSWORD
from bench.spark.bookies import password_file
from bench.spark.reading import PARQUET, fill
from bench.spark.session import read_all, session, write_parquet
from pybk import DigestType, LedgerManager

ONE: Final = "one ledger"
LEDGER_TYPE: Final = "small"
LEDGERS: Final = 5_000
ENTRIES: Final = 1_000_000
_FULL_SIZE: Final = 1 << 20
"""The entries of a turn from which on the small ledgers have their full number."""


def processor_seconds() -> float:
    """Return the processor time of this process and of all that it has started and that still run."""
    times: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                times[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    own = os.getpid()
    ticks = sum(spent for pid, (_, spent) in times.items() if _descends(pid, own, times))
    return ticks / os.sysconf("SC_CLK_TCK")


def _descends(pid: int, ancestor: int, times: dict[int, tuple[int, int]]) -> bool:
    while pid in times:
        if pid == ancestor:
            return True
        pid = times[pid][0]
    return False


def seconds_of(work: Callable[[], object], clock: Callable[[], float]) -> Run:
    """Return what does the work again after a first time, and says the seconds that a clock counted meanwhile."""
    work()

    def run(_: float) -> float:
        begin = clock()
        work()
        return clock() - begin

    return run


@contextmanager
def count_parquet(directory: Path, scale: Scale) -> Iterator[Run]:
    """Parquet files, whose footers have the number of rows."""
    write_parquet(directory / "rows", scale.entries)
    with session(directory) as spark:
        yield seconds_of(spark.read.parquet(str(directory / "rows")).count, time.perf_counter)


@contextmanager
def count_ledger(directory: Path, scale: Scale) -> Iterator[Run]:
    """A ledger in the directory of an embedded store, of which only the numbers of entries are read."""
    path = str(directory / "store")
    with LedgerManager.open(path) as manager:
        ledger_id = fill(manager, DigestType.HMAC_SHA256, scale.entries)
    with session(directory) as spark:
        options = {"path": path, "passwordFile": password_file(directory), "ledger": str(ledger_id)}
        frame = spark.read.format("pybk").options(**options).schema("entry_id BIGINT").load()
        yield seconds_of(frame.count, time.perf_counter)


@contextmanager
def small(ledgers: int, directory: Path, scale: Scale) -> Iterator[Run]:
    """Ledgers of a type in the directory of an embedded store, with 64 bytes an entry."""
    path, share = str(directory / "store"), min(1.0, scale.entries / _FULL_SIZE)
    count = max(1, int(ledgers * share))
    with LedgerManager.open(path) as manager:
        for _ in range(count):
            with manager.create_ledger(password=PASSWORD, ledger_type=LEDGER_TYPE) as writer:
                writer.append_many([bytes(64)] * (int(ENTRIES * share) // count))
    with session(directory) as spark:
        options = {"path": path, "passwordFile": password_file(directory), "ledgerType": LEDGER_TYPE}
        frame = spark.read.format("pybk").options(**options).load()
        yield seconds_of(partial(read_all, frame), processor_seconds)


CONTESTS: Final[Sequence[Contest]] = (
    Contest(
        "count",
        "count() without payloads",
        "s",
        [
            Contestant(PARQUET, count_parquet),
            Contestant(
                "pybk store, HMAC",
                count_ledger,
                [Target("<= 1.5 x parquet", lambda rates: 1.5 * rates[PARQUET], at_most=True)],
            ),
        ],
    ),
    Contest(
        "small",
        f"{ENTRIES:,} entries of 64 bytes, in one ledger and in many",
        "s of processor time",
        [
            Contestant(ONE, partial(small, 1)),
            Contestant(
                f"{LEDGERS:,} ledgers",
                partial(small, LEDGERS),
                [Target(f"<= 3 x {ONE}", lambda rates: 3 * rates[ONE], at_most=True)],
            ),
        ],
    ),
)
