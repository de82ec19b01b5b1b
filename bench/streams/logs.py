"""Contests of many named logs: creating one more, opening a store that has them, and memory of those at rest."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale, at_most, rate
from bench.payloads import PASSWORD, PAYLOAD
from bench.streams.wal import times
from pybk import Log, LogWriter, Namespace

_MEASURED: Final = 500
"""Logs whose memory is measured."""


def made(directory: Path, count: int) -> Namespace:
    """Return the namespace of a store with logs that were never written to."""
    logs = Namespace.open(directory, password=PASSWORD)
    for number in range(count):
        logs.create(_name(number)).close()
    return logs


def _name(number: int) -> str:
    return f"logs/{number:06}"


@contextmanager
def create(full: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """Create logs in a store that has many, or none."""
    with made(directory, scale.ledgers if full else 0) as logs:
        numbers = itertools.count(scale.ledgers)

        def one() -> int:
            logs.create(_name(next(numbers))).close()
            return 1

        yield partial(rate, one)


@contextmanager
def reopen(directory: Path, scale: Scale) -> Iterator[Run]:
    """Open a store with many logs, and list their names."""
    made(directory, scale.ledgers).close()

    def opened(_: float) -> float:
        begin = time.perf_counter()
        with Namespace.open(directory, password=PASSWORD) as logs:
            assert len(logs.names()) == scale.ledgers
            return time.perf_counter() - begin

    yield opened


def opened_log(logs: Namespace, number: int) -> Log:
    """Open a log."""
    return logs.log(_name(number))


def opened_writer(logs: Namespace, number: int) -> LogWriter:
    """Open a log and its writer, and append once."""
    writer = logs.log(_name(number)).writer()
    writer.append(PAYLOAD[:100])
    return writer


@contextmanager
def memory(make: Callable[[Namespace, int], object], directory: Path, scale: Scale) -> Iterator[Run]:
    """Measure the memory that Python allocates for logs that are kept at rest."""
    count = min(_MEASURED, scale.ledgers // 2)
    with made(directory, 2 * count) as logs:
        make(logs, 2 * count - 1)  # what all share

        def measured(_: float) -> float:
            gc.collect()
            tracemalloc.start()
            try:
                kept = [make(logs, number) for number in range(count)]
                gc.collect()
                return tracemalloc.get_traced_memory()[0] / len(kept)
            finally:
                tracemalloc.stop()

        yield measured


CONTESTS: Final = (
    Contest(
        "log-create",
        "create named logs, one after the other, each synced",
        "/s",
        [
            Contestant("empty store", partial(create, False)),
            Contestant("store of many", partial(create, True), [times(0.8, "empty store")]),
        ],
    ),
    Contest(
        "log-open",
        "open a store of many logs, list them, close it",
        "s",
        [Contestant("pybk", reopen, [at_most(1)])],
        once=True,
    ),
    Contest(
        "log-memory",
        "memory of a log at rest",
        "bytes",
        [
            Contestant("open", partial(memory, opened_log), [at_most(2048)]),
            Contestant("open writer", partial(memory, opened_writer)),
        ],
        once=True,
    ),
)
