"""A contest of logs of one ledger, of a ledger for each micro-batch, and of these merged: the cost of reading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.contest import Contest, Contestant, Run, Scale
from bench.payloads import PASSWORD, PAYLOAD
from bench.streams.wal import times
from pybk import LedgerManager, Log, NewRecord

_RECORDS_EACH: Final = 10
"""Records of a micro-batch."""

_BATCHES_MAX: Final = 2_000


@contextmanager
def reading(batches: bool, merges: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """Read a log: returns the records in a second of CPU time.

    Args:
        batches: Whether micro-batches wrote it; else one commit of all records did.
        merges: Whether to merge its segments before.
        directory: The directory of its store.
        scale: The amount of work.
    """
    total = min(_BATCHES_MAX, scale.ledgers) * _RECORDS_EACH
    each = _RECORDS_EACH if batches else total
    with LedgerManager.open(directory) as manager, Log.open(manager, "log", password=PASSWORD) as log:
        for epoch in range(total // each):
            with log.detached_segment(query="query", epoch=epoch) as writer:
                writer.append_many([NewRecord(PAYLOAD[:100], time_ns=epoch)] * each)
                log.adopt([writer.seal()], query="query", epoch=epoch)
        if merges:
            log.merge_segments()
            assert len(log.segments()) < 10

        def in_cpu_time(seconds: float) -> float:
            begin, count = time.process_time(), 0
            while time.process_time() - begin < seconds:
                count += sum(1 for _ in log.reader())
            return count / (time.process_time() - begin)

        yield in_cpu_time


_ONE: Final = "one ledger"

CONTESTS: Final = (
    Contest(
        "merged-read",
        "read a log of micro-batches of ten records, records per second of CPU time",
        "/s",
        [
            Contestant(_ONE, partial(reading, False, False), []),
            Contestant("a ledger for each micro-batch", partial(reading, True, False), []),
            Contestant("merged", partial(reading, True, True), [times(0.9, _ONE)]),
        ],
    ),
)
