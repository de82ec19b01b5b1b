"""Has processes take over the logs of a store, and kills each on the way: ``... full_disk_kills DIRECTORY KILLS SEED``.

It fails if one of them is refused.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from random import Random
from typing import NoReturn

from pybk import LedgerManager, Log, WriteAheadLog
from pybk.errors import PybkError


def take_over(path: str, number: int) -> NoReturn:
    """Take the log and one of the write-ahead logs over, and end without closing anything."""
    try:
        manager = LedgerManager.open(path)
        names = WriteAheadLog.names(manager)
        wal = WriteAheadLog.open(manager, names[number % len(names)], insecure=True)
        log = Log.open(manager, "log", insecure=True)
        taken = wal, log.writer(), log.subscribe("all")
    except PybkError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(taken)


def main(path: str, kills: int, seed: int) -> int:
    choice, took_s = Random(seed), 0.0
    for number in range(kills):
        began_s = time.monotonic()
        child = os.fork()
        if not child:
            take_over(path, number)
        if number:
            time.sleep(choice.random() * took_s)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return 1
        took_s = took_s or time.monotonic() - began_s  # of the first one, which takes over everything
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
