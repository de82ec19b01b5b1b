"""The parts that the two processes of an executor's bookie have in common; both outlive the task that starts them."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pybk.spark.executors.executor import Executor


class Shutdown:
    """Waits for the two events that end the processes: SIGTERM, and the end of the executor.

    It takes over SIGTERM and SIGINT.

    Args:
        executor: The executor.

    Attributes:
        executor_ended: Whether the executor has ended, as of the last call of ``requested``.

    Threads: the main thread, because signal handlers are set.
    """

    def __init__(self, executor: Executor) -> None:
        self._requested = os.eventfd(0, os.EFD_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.eventfd_write(self._requested, 1))
        self._poll = select.poll()
        self._poll.register(self._requested, select.POLLIN)
        self._executor: int | None = None
        with suppress(ProcessLookupError):
            self._executor = os.pidfd_open(executor.pid)
        self.executor_ended = self._executor is None or not executor.is_alive()
        if self._executor is not None:
            self._poll.register(self._executor, select.POLLIN)

    def requested(self, wait_ms: int) -> bool:
        """Wait for either event, or for the end of a ``watched`` process; return whether SIGTERM arrived."""
        found = [fd for fd, _ in self._poll.poll(wait_ms)]
        if self._executor in found:
            self.executor_ended = True
            self._poll.unregister(self._executor)
        return self._requested in found

    @contextmanager
    def watched(self, pid: int) -> Iterator[None]:
        """Let the end of a child process end the waits of ``requested``, too."""
        fd = os.pidfd_open(pid)
        self._poll.register(fd, select.POLLIN)
        try:
            yield
        finally:
            self._poll.unregister(fd)
            os.close(fd)


def log_to(path: str) -> None:
    """Send the log of this process to a file, which only this user may read."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    logging.basicConfig(filename=path, format="%(asctime)s %(levelname)s %(message)s")


def detach(log: str) -> None:
    """Close the pipes to the starting process, which then returns, and send later output to the log."""
    for fd, path, flags in ((1, os.devnull, os.O_WRONLY), (2, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
