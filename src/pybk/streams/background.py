"""Work that a log does in the background: rolls, by a few threads for all logs of a manager, and timers.

A log at rest has no thread of its own. The threads are daemons; the next open of the log completes work that they leave
unfinished.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from pybk.threads.workers import Workers, start_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_THREADS_MAX: Final = 4
_WAIT_SECONDS_MAX: Final = 3600.0
"""The system refuses to wait for some 300 years, which a timer may ask for."""


class _Timer(NamedTuple):
    """A call that is due at a time; the number orders calls that are due at the same one."""

    due: float
    number: int
    call: Callable[[], None]


class Background:
    """Threads and timers of one process.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._workers: Workers | None = None
        self._timers: list[_Timer] = []
        self._numbers = itertools.count()
        self._ticking = False

    def submit(self, call: Callable[[], None]) -> None:
        """Let a thread make a call soon; an exception of the call is logged."""
        with self._lock:
            if self._workers is None:
                self._workers = Workers(_THREADS_MAX, "pybk-log")
            self._workers.submit(lambda: _logged(call))

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Let a thread make a call after some seconds; the call checks whether there is still work to do."""
        timer = _Timer(time.monotonic() + seconds, next(self._numbers), call)
        with self._lock:
            heapq.heappush(self._timers, timer)
            if not self._ticking:
                start_thread(threading.Thread(target=self._tick, name="pybk-log-timers", daemon=True))
                self._ticking = True
            self._changed.notify()

    def _tick(self) -> None:
        """Submit calls when they are due; the body of the timers' thread, which ends when there is none."""
        while True:
            with self._lock:
                if not self._timers:
                    self._ticking = False
                    return
                left = self._timers[0].due - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, _WAIT_SECONDS_MAX))
                    continue
                due = heapq.heappop(self._timers)
            self.submit(due.call)


def _logged(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:
        logger.exception("work in the background failed")


class _Current:
    """The background of this process; a forked child, which has none of the threads, begins anew."""

    def __init__(self) -> None:
        self.background = Background()

    def after_fork(self) -> None:
        self.background = Background()


_CURRENT: Final = _Current()
os.register_at_fork(after_in_child=_CURRENT.after_fork)


def background() -> Background:
    """Return the background of this process."""
    return _CURRENT.background


def weakly(method: Callable[Concatenate[T, P], object], owner: T) -> Callable[P, None]:
    """Return a function that calls a method of an object while the object lives, and does not keep the object alive.

    Args:
        method: The method, as the function of the object's class.
        owner: The object.
    """
    return partial(_call_weakly, method, weakref.ref(owner))


def _call_weakly(
    method: Callable[Concatenate[T, P], object], owner: weakref.ref[T], *arguments: P.args, **options: P.kwargs
) -> None:
    found = owner()
    if found is not None:
        method(found, *arguments, **options)
