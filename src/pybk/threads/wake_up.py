"""``WakeUp``: lets a thread wait until something wakes it."""

from __future__ import annotations

import threading
from contextlib import suppress


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
