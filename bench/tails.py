"""Contests about the longest of many appends, also while a ledger moves between tiers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale, Target, at_most, latencies_of, tail_of
from bench.floors import BareWrite
from bench.lifecycle import answer, child
from bench.moving import moves
from bench.payloads import PASSWORD, PAYLOAD
from pybk import LedgerManager

TAIL: Final = 4.0
"""How many times the median the 99th percentile may be."""


def percentile(append: Callable[[], object], part: int, seconds: float) -> float:
    """Append one by one; return the latency that one of ``part`` appends exceeds, divided by their median."""
    return tail_of(latencies_of(append, seconds), part)


@contextmanager
def pybk(part: int, busy: bool, directory: Path, _: Scale) -> Iterator[Run]:
    """Append to a ledger of a new store.

    Args:
        part: As for ``percentile``.
        busy: Whether another ledger of the store is moved meanwhile.
        directory: Of the store.
    """
    with LedgerManager.open(directory) as manager, manager.create_ledger(password=PASSWORD) as writer:

        def run(seconds: float) -> float:
            with moves(manager) if busy else nullcontext():
                return percentile(lambda: writer.append(PAYLOAD), part, seconds)

        yield run


@contextmanager
def bare(part: int, busy: bool, directory: Path, _: Scale) -> Iterator[Run]:
    """Write to a file, each write synced.

    Args:
        part: As for ``percentile``.
        busy: Whether a process of its own moves a ledger of a store meanwhile, so that nothing but the disk and the
            processors is shared.
        directory: Of the file and the store.
    """
    with BareWrite(directory) as file:

        def run(seconds: float) -> float:
            with moves_of_a_process(directory / "store") if busy else nullcontext():
                return percentile(lambda: file.append([PAYLOAD]), part, seconds)

        yield run


@contextmanager
def moves_of_a_process(store: Path) -> Iterator[None]:
    """Have a process do what ``moves`` does."""
    with child("moves", store) as process:
        try:
            answer(process)
            yield
        finally:
            process.send_signal(signal.SIGKILL)


def contest(name: str, part: int, targets: Sequence[Target]) -> Contest:
    """Return the contest of a percentile."""
    return Contest(
        f"append-{name}",
        f"append, one thread, {name}",
        "x p50",
        [
            Contestant("pybk", partial(pybk, part, False), targets),
            Contestant("pybk, moves", partial(pybk, part, True), targets),
            Contestant("bare write", partial(bare, part, False)),
            Contestant("bare write, moves", partial(bare, part, True)),
        ],
    )


CONTESTS: Final = (contest("p99", 100, [at_most(TAIL)]), contest("p99.9", 1000, []))
