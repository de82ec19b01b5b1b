"""How one thread wakes another, or an event loop; several calls in a row wake the loop once."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from pybk.deferral import asyncio


class WakeUp:
    """What one thread waits for; unlike a ``threading.Event``, a signal handler may wake it.

    It begins asleep. Threads: ``wake`` from any, ``wait`` and ``sleep`` from the one that waits.
    """

    __slots__ = ("_still",)

    def __init__(self) -> None:
        self._still = threading.Lock()
        self._still.acquire()

    def wake(self) -> None:
        """Have the present or the next ``wait`` return."""
        with suppress(RuntimeError):  # it is awake
            self._still.release()

    def sleep(self) -> None:
        """Forget earlier calls of ``wake``."""
        self._still.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``wake``; returns False if it was not called within ``timeout`` seconds."""
        return self._still.acquire(timeout=-1 if timeout is None else timeout)


_LOCK: Final = threading.Lock()
_OF_LOOPS: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls]] = weakref.WeakKeyDictionary()


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, or None."""
    if "asyncio" not in sys.modules:
        return None  # no loop runs before asyncio is there
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class LoopCalls:
    """The calls that wait to be made in one event loop, in order.

    Waking a loop costs a system call, so only the first of several calls does. Threads: any.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use ``LoopCalls.of`` instead."""
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], object]] = deque()
        self._woken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopCalls:
        """Return the ``LoopCalls`` of a loop; each loop has one."""
        with _LOCK:
            calls = _OF_LOOPS.get(loop)
            if calls is None:
                calls = _OF_LOOPS[loop] = cls(loop)
        return calls

    def post(self, call: Callable[[], object]) -> None:
        """Have ``call`` made in the loop; drop it if the loop is closed, because nothing runs there any more."""
        self._calls.append(call)
        if not self._woken:  # otherwise the loop takes this call, too, because it clears the flag before it takes calls
            self._woken = True
            loop = self._loop()
            if loop is None or not call_in(loop, self._run):
                self._calls.clear()

    def _run(self) -> None:
        self._woken = False
        loop = self._loop()
        assert loop is not None, "the loop runs this"
        while self._calls:
            loop.call_soon(self._calls.popleft())  # an exception of a call made here would end the others


def call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> bool:
    """Have a loop make a call soon, from any thread; return False if the loop was closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True
