"""Contests of logs with many segments and subscriptions: what a change of their list costs, and that of a short one.

The closed segments are rows whose ledgers do not exist, because nothing here reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale
from bench.payloads import PASSWORD, PAYLOAD
from bench.streams.wal import times
from pybk import LedgerManager, Log, LogEnd
from pybk.streams.ledger_list import put
from pybk.streams.ledger_steps import LedgerSteps, page_segments_of
from pybk.streams.list_record import UID_BYTES, CursorBound, ListKind, ListRecord, Segment
from pybk.streams.log_settings import spec_of

SIZES: Final = ((10, 10), (1_000, 100), (10_000, 1_000))
"""Segments and subscriptions; the last is what the figures are for."""

_LEDGERS: Final = 1 << 40
"""The first id of the ledgers that do not exist."""

_FACTOR: Final = 0.67
"""A change costs at most 1.5 times what it costs in a short list."""


def make_long(manager: LedgerManager, segments: int, subscriptions: int) -> None:
    """Make the log "log" with closed segments and subscriptions that need its last record."""
    now_ns = time.time_ns()
    rows = (Segment(n, _LEDGERS + n, 1, 0, n, n, 64 << 20, now_ns, now_ns) for n in range(1, segments + 1))
    bounds = (CursorBound(f"reader {number:05}", segments, f"{number:032x}", 1) for number in range(subscriptions))
    record = ListRecord(
        "log",
        ListKind.LOG,
        bytes(UID_BYTES),
        start_seq=1,
        first_seq=1,
        end_seq=segments + 1,
        epoch=1,
        next_segment=segments + 1,
        segments=tuple(rows),
        cursors=tuple(bounds),
    )
    steps = LedgerSteps(manager, "log", spec_of(ListKind.LOG, PASSWORD, None, insecure=False))
    steps.uid = record.uid
    assert steps.perform(put(record, None, page_segments_of(manager)))


def roll(log: Log) -> Iterator[Callable[[], None]]:
    """Append to a log and roll it."""
    with log.writer() as writer:

        def one() -> None:
            writer.append(PAYLOAD[:100])
            writer.roll()

        yield one


def subscribe(log: Log) -> Iterator[Callable[[], None]]:
    """Open a subscription of a log, acknowledge a record, raise its bound by closing it, and delete it."""
    with log.writer() as writer:

        def one() -> None:
            with log.subscribe("one more", start=LogEnd.LATEST) as subscription:
                writer.append(PAYLOAD[:100])
                record = subscription.read(10)
                assert record is not None
                subscription.ack(record)
            log.delete_subscription("one more")

        yield one


@contextmanager
def changing(
    change: Callable[[Log], Iterator[Callable[[], None]]], size: tuple[int, int], directory: Path, _: Scale
) -> Iterator[Run]:
    """Change a list of some size: returns how often in a second of CPU time."""
    with LedgerManager.open(directory) as manager:
        make_long(manager, *size)
        with Log.open(manager, "log", password=PASSWORD) as log, contextmanager(change)(log) as one:
            one()

            def in_cpu_time(seconds: float) -> float:
                begin, count = time.process_time(), 0
                while time.process_time() - begin < seconds:
                    one()
                    count += 1
                return count / (time.process_time() - begin)

            yield in_cpu_time


def _contestants(change: Callable[[Log], Iterator[Callable[[], None]]]) -> list[Contestant]:
    names = [f"{segments:,} segments, {subscriptions:,} subscriptions" for segments, subscriptions in SIZES]
    return [
        Contestant(name, partial(changing, change, size), [times(_FACTOR, names[0])] if name != names[0] else [])
        for name, size in zip(names, SIZES, strict=True)
    ]


CONTESTS: Final = (
    Contest("list-roll", "append to a log and roll it, per second of CPU time", "/s", _contestants(roll)),
    Contest(
        "list-subscribe",
        "make a subscription, acknowledge a record, close and delete it, per second of CPU time",
        "/s",
        _contestants(subscribe),
    ),
)
