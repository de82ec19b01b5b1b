"""Appends of coroutines that wait for admission: a thread makes them in order, so that event loops are not blocked."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pybk.deferral import asyncio
from pybk.manager.append_future import AppendFuture, T
from pybk.threads.loop_calls import LoopCalls
from pybk.threads.thread_start import start_thread


class _WaitingAppend(NamedTuple):
    """One append that waits: the call that makes it, and the loop's future that gets the result."""

    append: Callable[[], AppendFuture[Any]]
    loop: asyncio.AbstractEventLoop
    delivered: asyncio.Future[AppendFuture[Any]]


class CoroutineBacklog:
    """The appends of one writer that wait for admission in a thread, so that event loops are not blocked.

    The thread runs only while an append waits. It is not a task of a loop, because a busy loop would then delay the
    appends of all others.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_WaitingAppend] | None = None
        """In order; an append is removed after it was made. Guarded by ``_lock``.

        It is made when it is needed first, because an empty deque takes 760 bytes, and most logs have no event loop.
        """
        self._running = False
        """Whether the thread runs. Guarded by ``_lock``."""

    @property
    def is_empty(self) -> bool:
        """Whether no append waits. While one does, later ones must be added, too, to keep the order."""
        return not self._waiting

    def add(self, append: Callable[[], AppendFuture[T]]) -> asyncio.Future[AppendFuture[T]]:
        """Have the thread call ``append`` after all that were added before; called in an event loop.

        Returns:
            A future of that loop for the result or error of ``append``. Cancelling it does not cancel the append.

        Raises:
            StorageRefusedError: The operating system refuses to start a thread; nothing was added.
        """
        loop = asyncio.get_running_loop()
        delivered: asyncio.Future[AppendFuture[T]] = loop.create_future()
        with self._lock:
            if not self._running:
                start_thread(threading.Thread(target=self._run, name="pybk-backlog", daemon=True))
                self._running = True
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(_WaitingAppend(append, loop, delivered))
        return delivered

    def _run(self) -> None:
        """Body of the thread."""
        while True:
            with self._lock:
                waiting = self._waiting
                if not waiting:
                    self._running = False
                    return
                append, loop, delivered = waiting[0]
            deliver: Callable[[], None]
            try:
                deliver = partial(_succeed, delivered, append())
            except BaseException as error:  # noqa: BLE001  # passed to the coroutine that waits
                deliver = partial(_fail, delivered, error)
            with self._lock:
                waiting.popleft()
            LoopCalls.of(loop).post(deliver)


def _succeed(delivered: asyncio.Future[AppendFuture[T]], future: AppendFuture[T]) -> None:
    if not delivered.done():
        delivered.set_result(future)


def _fail(delivered: asyncio.Future[AppendFuture[T]], error: BaseException) -> None:
    if not delivered.done():
        delivered.set_exception(error)
