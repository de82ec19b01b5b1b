"""Consumes a log until a record kills it: ``python -m tests.streams.dead_letters_child DIRECTORY MOST HOW``.

It prints a line for each batch that it was handed out, with the numbers of its records, and ``done`` once there is
nothing more. HOW is ``kill`` for a process that dies at once, or ``raise`` for an exception that ends it.
"""

from __future__ import annotations

import os
import signal
import sys

from pybk import DeadLetters, LedgerManager, Log, LogEnd

MAX_DELIVERIES = 3
POISON = b"poison"


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def consume(directory: str, most: int, how: str) -> None:
    """Acknowledge one record after the other, until one is poison."""
    with (
        LedgerManager.open(directory) as manager,
        Log.open(manager, "log", insecure=True) as log,
        Log.open(manager, "dead", insecure=True) as dead,
        log.subscribe(
            "sub", start=LogEnd.EARLIEST, dead_letters=DeadLetters(dead.writer(steal=True), MAX_DELIVERIES), steal=True
        ) as subscription,
    ):
        while records := subscription.read_many(most, timeout=0):
            report(" ".join(str(record.seq) for record in records))
            for record in records:
                if record.data == POISON:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError(record)
                subscription.ack(record)
        report("done")


if __name__ == "__main__":
    consume(sys.argv[1], int(sys.argv[2]), sys.argv[3])
