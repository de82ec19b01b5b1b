"""The signals of a service: SIGTERM and SIGINT end it, SIGHUP makes it read files again, SIGUSR1 writes its stacks.

The stacks are written by a handler of Python's, so the main thread holds the interpreter's lock and no other thread
runs meanwhile. ``faulthandler.register`` needs no lock and reads the frames of threads that run, which can end the
process with SIGSEGV. The price is that the main thread has to return to the interpreter: while it is in a call of C
that does not end, SIGUSR1 writes nothing. SIGABRT writes the stacks even then, and ends the process.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

_SIGNAL_LOOK_SECONDS: Final = 1.0
"""A signal that arrives just before a call blocks is noticed when the call returns: handlers run between calls."""

_STANDARD_ERROR: Final = 2
_writing: Final = threading.Lock()
"""Held while stacks are written."""

STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


class Signals:
    """Takes over the signals of the process, and returns them one by one. For the main thread."""

    def __init__(self) -> None:
        self._arrived: SimpleQueue[int] = SimpleQueue()  # its put() may interrupt its get()
        for number in (*STOPS, signal.SIGHUP):
            signal.signal(number, lambda number, _: self._arrived.put(number))
        signal.signal(signal.SIGUSR1, lambda *_: _write_stacks())
        if not faulthandler.is_enabled():
            faulthandler.enable()  # for SIGABRT, by which systemd's watchdog ends a process

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the next signal; None if none arrives in time.

        Args:
            seconds: Seconds to wait; None waits without a limit.
        """
        end = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            with suppress(Empty):
                return self._arrived.get(timeout=max(0.0, min(left, _SIGNAL_LOOK_SECONDS)))
            if left <= _SIGNAL_LOOK_SECONDS:
                return None


def _write_stacks() -> None:
    """Write the stacks of all threads to the standard error, if it can be written to.

    ``dump_traceback`` holds the interpreter's lock while it writes, so a standard error that nobody reads would stop
    all threads. So it writes to memory, and the lock is free while the bytes are passed on.
    """
    if not _writing.acquire(blocking=False):
        return  # the signal came during such a write, which would be nested, and hold a descriptor each time
    try:
        with suppress(OSError), open(os.memfd_create("stacks"), "r+b", buffering=0) as stacks:
            faulthandler.dump_traceback(stacks.fileno(), all_threads=True)
            stacks.seek(0)
            os.write(_STANDARD_ERROR, stacks.read())
    finally:
        _writing.release()
