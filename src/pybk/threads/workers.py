"""Threads that make calls: how one is started, and a few of them for calls that may take long."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from pybk.errors import StorageRefusedError

logger = logging.getLogger(__name__)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        StorageRefusedError: The operating system gives no more threads to this process.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # it came while ``start`` waited, with its lock given away
            raise error.__context__ from None
        raise StorageRefusedError(
            f"starting the thread {thread.name} was refused: {error!r}; end threads or processes, or raise the limit "
            "of them (ulimit -u, pids.max), then try again"
        ) from error


_Call = tuple[Future[None], Callable[[], None]]


class Workers:
    """A few threads that run calls in the order of submission.

    The constructor starts the first thread; the others start when they are needed. If the operating system refuses to
    start one, the running threads make its calls, only later. So an accepted call runs exactly once, unless ``close``
    drops it. ``concurrent.futures.ThreadPoolExecutor`` is not used, because its ``submit`` raises in that case although
    it has queued the call.

    Args:
        most: The maximum number of threads.
        name: The prefix of the threads' names.

    Raises:
        StorageRefusedError: The operating system refuses to start the first thread.

    Threads: any.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most: Final = most
        self._name: Final = name
        self.lock = threading.RLock()  # a finaliser may submit a call where it interrupts this thread
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()
        """The calls that the threads make next."""
        self.threads: list[threading.Thread] = []
        """The threads that run."""
        self._unfinished = 0
        """Calls submitted and not finished."""
        self._closed = False
        self._short = False
        """True if the last attempt to start another thread failed; the warning was logged then."""
        self._start()

    def submit(self, call: Callable[[], None]) -> Future[None] | None:
        """Queue a call for the threads.

        Returns:
            A future that is done when the call has returned or raised; ``close`` cancels it if no thread has begun the
            call. None if the workers are closed and did not accept the call.
        """
        future: Future[None] = Future()
        with self.lock:
            if self._closed:
                return None
            self._unfinished += 1
            self.calls.put((future, call))
            if self._unfinished > len(self.threads) < self._most:
                self._start_another()
        return future

    def _start_another(self) -> None:
        """Start one more thread if the operating system allows it; the caller holds the lock."""
        try:
            self._start()
            self._short = False
        except StorageRefusedError as error:
            if not self._short:
                logger.warning("%s: continuing with %d threads: %s", self._name, len(self.threads), error)
            self._short = True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self.threads)}", daemon=True)
        start_thread(thread)
        self.threads.append(thread)

    def _run(self) -> None:
        """Make calls until the workers are closed; the body of each thread."""
        while (found := self.calls.get()) is not None:
            self._make(*found)
            del found  # otherwise the thread would keep the call's objects alive while it waits for the next call
        self.calls.put(None)  # for the next thread; an interrupted start may have left it out of ``threads``

    def _make(self, future: Future[None], call: Callable[[], None]) -> None:
        if not future.set_running_or_notify_cancel():
            self._finish()
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # the future raises it
            self._finish()
            future.set_exception(error)
        else:
            self._finish()
            future.set_result(None)

    def _finish(self) -> None:
        """Count a call as finished, before its future is done: a waiter may submit the next call at once."""
        with self.lock:
            self._unfinished -= 1

    def close(self, *, wait: bool = False) -> None:
        """Refuse further calls, and cancel the futures of calls that no thread has begun; may be repeated.

        Args:
            wait: Also wait until the running calls have ended.
        """
        dropped: list[_Call] = []
        with self.lock:
            self._closed = True
            with suppress(Empty):
                while (found := self.calls.get_nowait()) is not None:
                    dropped.append(found)
            self.calls.put(None)
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()  # else ``concurrent.futures.wait`` waits for it for ever
        if wait:
            for thread in self.threads:
                thread.join()
