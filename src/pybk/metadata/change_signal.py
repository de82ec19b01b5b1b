"""Waits until any process of the host changes a file, or this process asks for a wake-up, without polling."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import threading
import time
from typing import Final

logger = logging.getLogger(__name__)

REST_S: Final = 0.01
"""The default for the least seconds between two reported changes.

If the file cannot be watched, ``wait`` returns after this time.
"""

_MODIFIED: Final = 0x2
_EVENTS_BYTES: Final = 4096


class ChangeSignal:
    """Returns from ``wait`` when a file was written to, or when ``set`` was called.

    The kernel reports writes of all processes of the host (inotify). If it cannot, because the user's inotify watches
    are used up, ``wait`` returns every ``REST_S`` instead.

    Args:
        path: The file; it must exist when ``wait`` is called with ``changes`` for the first time.

    Threads: one waits; any may call ``set``.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inotify: int | None = None
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._calls = select.poll()
        self._calls.register(self._wake, select.POLLIN)
        self._reported = 0.0

    def set(self) -> None:
        """Make the current or the next ``wait`` return; no effect once closed."""
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def wait(self, timeout_s: float | None, *, changes: bool, rest_s: float = REST_S) -> bool:
        """Wait for ``set``, and for a change of the file if ``changes`` is set.

        Args:
            timeout_s: Seconds at most; None for no limit.
            changes: Whether to return for changes of the file as well.
            rest_s: Least seconds between two reported changes; ``set`` ends this pause early.

        Returns:
            False after the timeout; True if the file may have changed or ``set`` was called.
        """
        if changes and self._inotify is None:
            self._inotify = watch_file(self._path)
            if self._inotify >= 0:
                self._poll.register(self._inotify, select.POLLIN)
                return True  # earlier changes were not watched
        if changes and self._inotify == -1:
            timeout_s = REST_S if timeout_s is None else min(timeout_s, REST_S)
        poll = self._poll if changes else self._calls
        ready = [descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]
        called = self._wake in ready
        if self._inotify in ready:
            # One commit writes several times, and commits may follow each other closely: report them together.
            left_s = self._reported + rest_s - time.monotonic()
            called = bool(self._calls.poll(1000 * max(0.001, min(left_s, rest_s))))
            os.read(self._inotify, _EVENTS_BYTES)
            self._reported = time.monotonic()
        if called:
            os.eventfd_read(self._wake)
        return bool(ready) or self._inotify == -1

    def close(self) -> None:
        """Close the descriptors; no thread may be waiting."""
        with self._lock:
            for descriptor in (self._wake, self._inotify):
                if descriptor is not None and descriptor >= 0:
                    os.close(descriptor)
            self._wake = -1
            self._inotify = -1


def watch_file(path: str) -> int:
    """Return a descriptor that becomes readable after writes to a file; -1 if the system provides none."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(path), _MODIFIED) >= 0:
        return descriptor
    logger.warning("%s is polled every %.0f ms: %s", path, REST_S * 1000, os.strerror(ctypes.get_errno()))
    if descriptor >= 0:
        os.close(descriptor)
    return -1
