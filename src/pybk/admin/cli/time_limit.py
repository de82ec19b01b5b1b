"""The time limit of a command, ``--timeout``: it ends the command with an error even while the command waits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from pybk.admin.cli.output import UNREACHABLE

_CLOSE_SECONDS: Final = 10.0
"""The time that a command that is out of time may take to close what it has opened."""


class OutOfTimeError(BaseException):
    """The time of a command is over. Like KeyboardInterrupt it is not an Exception, because it may come at any line."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTimeError in the block after some seconds; end the process if the block does not end soon after.

    For the main thread, because SIGALRM is taken over; None for no limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    text = f"{seconds:g} s are over, the time of --timeout; whether it took effect is not known: look, then repeat"

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGALRM, second)
        signal.setitimer(signal.ITIMER_REAL, _CLOSE_SECONDS)
        raise OutOfTimeError(text)

    def second(number: int, frame: FrameType | None) -> None:
        print(f"pybk: {text}", file=sys.stderr, flush=True)
        os._exit(UNREACHABLE)

    before = signal.signal(signal.SIGALRM, first)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
