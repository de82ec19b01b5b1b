"""Competes for a log of a cluster until it is killed: ``python -m tests.streams.contender_child URL KIND SEED``.

It takes the log over, by waiting for the other writer or by stealing from it at once, appends, and does so again. It
prints each epoch that it owns, and each record that was acknowledged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random

from pybk import LedgerManager, Log, LogFencedError, LogLockedError, WriteAheadLog
from pybk.errors import PybkError
from tests.cluster.inside import SECRET

NAME = "log"
WAIT_S = 0.5

Append = Callable[[bytes], int]


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def owned_log(manager: LedgerManager, *, steal: bool) -> Iterator[tuple[int, Append]]:
    """Own a named log; provide the epoch, and a function that appends and returns the sequence number."""
    with (
        Log.open(manager, NAME, insecure=True) as log,
        log.writer(wait=0.0 if steal else WAIT_S, steal=steal, segment_records=20) as writer,
    ):
        yield writer.epoch, lambda data: writer.append(data).seq


@contextmanager
def owned_wal(manager: LedgerManager, *, steal: bool) -> Iterator[tuple[int, Append]]:
    """Own a write-ahead log, as ``owned_log``."""
    wait = 0.0 if steal else WAIT_S
    with WriteAheadLog.open(manager, NAME, insecure=True, wait=wait, steal=steal, segment_bytes=2000) as wal:
        yield wal.epoch(), wal.append


OWNED = {"log": owned_log, "wal": owned_wal}


def compete(manager: LedgerManager, kind: str, source: Random) -> None:
    """Take the log over again and again."""
    steal = source.random() < 0.5
    while True:
        steal = not steal
        with suppress(LogFencedError, LogLockedError), OWNED[kind](manager, steal=steal) as (epoch, append):
            report(f"epoch {epoch}")
            for number in range(source.randint(1, 60)):
                data = f"{epoch} {number}"
                try:
                    seq = append(data.encode())
                except PybkError as error:
                    report(f"refused {type(error).__name__}")
                    raise
                report(f"acked {seq} {data}")


if __name__ == "__main__":
    with LedgerManager.connect(sys.argv[1], cluster_secret=SECRET) as client:
        compete(client, sys.argv[2], Random(int(sys.argv[3])))
