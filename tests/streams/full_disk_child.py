"""Works on logs of a store until it is killed: ``python -m tests.streams.full_disk_child DIRECTORY``.

It is their writer when it has printed a line. What it does on the way fails nowhere, although the disk is full.
"""

from __future__ import annotations

import signal
import sys

from pybk import LedgerManager, Log, WriteAheadLog

if __name__ == "__main__":
    manager = LedgerManager.open(sys.argv[1])
    wal = WriteAheadLog.open(manager, "wal", insecure=True)
    log = Log.open(manager, "log", insecure=True)
    subscription = log.subscribe("all")
    with log.writer():
        subscription.ack(subscription.first_unacked())
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            signal.pause()
