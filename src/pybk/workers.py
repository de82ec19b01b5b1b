"""Threads for calls that may take long, such as asking the metadata store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from pybk.errors import StorageRefusedError
from pybk.storage.io.failures import start_thread

logger = logging.getLogger(__name__)

_Call = tuple[Future[None], Callable[[], None]]


class Workers:
    """A few threads that make calls, in the order in which they were submitted.

    The first thread is started with the object, the others when they are needed. If the operating system gives no more
    threads then, the threads that run already make all calls, later. So a call that was accepted is always made, once.
    ``concurrent.futures.ThreadPoolExecutor`` raises from ``submit`` instead, and has kept the call all the same.

    Args:
        most: The number of threads at most.
        name: The threads' names begin with it.

    Raises:
        StorageRefusedError: The operating system gives not even one thread.

    Threads: any.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most: Final = most
        self._name: Final = name
        self._lock = threading.RLock()  # a finaliser may submit a call where it interrupts this thread
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0
        """Calls submitted and not finished."""
        self._closed = False
        self._short = False
        """The last attempt to start another thread failed, so the warning was logged already."""
        self._start()

    def submit(self, call: Callable[[], None]) -> Future[None] | None:
        """Have a call made by one of the threads.

        Returns:
            A future that is done when the call was made; None if the workers are closed, and the call is not made.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._closed:
                return None
            self._unfinished += 1
            self._calls.put((future, call))
            if self._unfinished > len(self._threads) < self._most:
                self._start_another()
        return future

    def _start_another(self) -> None:
        """Start one more thread, or leave the work to those that run; the caller holds the lock."""
        try:
            self._start()
            self._short = False
        except StorageRefusedError as error:
            if not self._short:
                logger.warning("%s: %d threads do the work of more: %s", self._name, len(self._threads), error)
            self._short = True

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def _run(self) -> None:
        """Body of a thread."""
        while (found := self._calls.get()) is not None:
            self._make(*found)
            del found  # what the call holds is not kept while the thread waits for another
        self._calls.put(None)  # for the next thread, which ``_threads`` may lack if an interrupt came as it started

    def _make(self, future: Future[None], call: Callable[[], None]) -> None:
        if not future.set_running_or_notify_cancel():
            self._finish()
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001  # it belongs to the future
            self._finish()
            future.set_exception(error)
        else:
            self._finish()
            future.set_result(None)

    def _finish(self) -> None:
        """Count a call as finished; before its future is done, because the thread that waits may submit the next."""
        with self._lock:
            self._unfinished -= 1

    def close(self, *, wait: bool = False) -> None:
        """Accept no more calls, and drop those that no thread has begun; may be repeated.

        Args:
            wait: Return when those that have begun have ended, too.
        """
        dropped: list[_Call] = []
        with self._lock:
            self._closed = True
            with suppress(Empty):
                while (found := self._calls.get_nowait()) is not None:
                    dropped.append(found)
            self._calls.put(None)
        for future, _ in dropped:
            future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()
