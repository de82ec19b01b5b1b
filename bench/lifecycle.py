"""Contests about ledgers and stores as a whole: many ledgers, a kill, memory."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale, Target, at_least, at_most
from bench.payloads import PASSWORD, PAYLOAD
from pybk import LedgerManager

FLAT: Final = 0.8
GROUP: Final = 1000


class Ledgers:
    """Creates, fills and closes ledgers one after the other; the time of each thousand is kept."""

    def __init__(self) -> None:
        self._rates: list[float] = []

    @contextmanager
    def enter(self, directory: Path, scale: Scale) -> Iterator[Run]:
        """Do it all, and give the rate of the first thousand."""
        with LedgerManager.open(directory) as manager:

            def run(_: float) -> float:
                group = max(min(GROUP, scale.ledgers // 2), 1)
                self._rates = [self._some(manager, group) for _ in range(scale.ledgers // group)]
                return self._rates[0]

            yield run

    @contextmanager
    def enter_last(self, _: Path, __: Scale) -> Iterator[Run]:
        """Give the rate of the last thousand of the same ledgers."""
        yield lambda _: self._rates[-1]

    @staticmethod
    def _some(manager: LedgerManager, count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            with manager.create_ledger(password=PASSWORD) as writer:
                writer.append(PAYLOAD)
        return count / (time.perf_counter() - begin)


def child(*operands: object) -> subprocess.Popen[str]:
    """Start a process that writes."""
    command = [sys.executable, "-m", "bench.child", *map(str, operands)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    """Return the next line that a child prints."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the child process ended with exit code {process.wait()}; its error is above")
    return line


@contextmanager
def reopen(directory: Path, scale: Scale) -> Iterator[Run]:
    """Time the opening of a store whose writer was killed while it wrote."""
    with child("fill", directory, scale.reopen_bytes) as process:
        try:
            answer(process)
        finally:
            process.send_signal(signal.SIGKILL)

    def run(_: float) -> float:
        begin = time.perf_counter()
        with LedgerManager.open(directory):
            return time.perf_counter() - begin

    yield run


@contextmanager
def memory(directory: Path, scale: Scale) -> Iterator[Run]:
    """Have a process write, and ask for the most memory it had resident."""

    def run(_: float) -> float:
        with child("memory", directory, scale.memory_bytes) as process:
            return float(answer(process))

    yield run


_LEDGERS: Final = Ledgers()
FIRST, LAST = "pybk, first 1000", "pybk, last 1000"
CONTESTS: Final = (
    Contest(
        "ledgers",
        "create a ledger, append one, close it",
        "/s",
        [
            Contestant(FIRST, _LEDGERS.enter, [at_least(500)]),
            Contestant(
                LAST,
                _LEDGERS.enter_last,
                [at_least(500), Target(f">= {FLAT:g} x the first 1000", lambda rates: FLAT * rates[FIRST])],
            ),
        ],
        once=True,
    ),
    Contest(
        "reopen", "open a store whose writer was killed", "s", [Contestant("pybk", reopen, [at_most(2)])], once=True
    ),
    Contest(
        "memory", "most resident memory while writing", "MiB", [Contestant("pybk", memory, [at_most(300)])], once=True
    ),
)
