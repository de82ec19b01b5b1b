"""The threads that make calls of coroutines, so that event loops keep running.

The default executor of the loop is not used: it belongs to the application, and it has few threads. Calls that end by
themselves share a few threads. Calls that may wait for another, or for bookies that are away, and those that end
something, have a thread each: else many waits would take every thread, and what they wait for could not be released.

A call whose coroutine was cancelled is made all the same. At the end of the interpreter, the calls that share threads
are waited for after the managers were closed; the others end with their managers. A forked child has threads of its
own.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, ParamSpec, TypeVar

from pybk.deferral import asyncio
from pybk.errors import StorageRefusedError
from pybk.threads.thread_start import start_thread
from pybk.threads.workers import Workers

P = ParamSpec("P")
R = TypeVar("R")

SHARED_MAX: Final = 32
"""The most threads that calls share which end by themselves."""


class _CallThreads:
    """The threads of this process. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: Workers | None = None
        self._ended = False

    def submit(self, call: Callable[[], R]) -> Future[R]:
        """Have one of the shared threads make a call.

        Raises:
            StorageRefusedError: The operating system refuses to start the first thread.
            RuntimeError: The interpreter is ending.
        """
        with self._lock:
            if self._shared is None and not self._ended:
                self._shared = Workers(SHARED_MAX, "pybk-call")
            shared = self._shared
        made = _running_future(call)
        if shared is None or shared.submit(partial(_make, made, call)) is None:
            raise RuntimeError("no call of a coroutine can be made any more, because the interpreter is ending")
        return made

    def submit_alone(self, call: Callable[[], R]) -> Future[R]:
        """Have a thread of its own make a call, or a shared one if the operating system gives no more.

        Raises:
            StorageRefusedError, RuntimeError: As ``submit``.
        """
        made = _running_future(call)
        try:
            start_thread(threading.Thread(target=_make, args=(made, call), name="pybk-wait", daemon=True))
        except StorageRefusedError:
            return self.submit(call)
        return made

    def end(self) -> None:
        """Wait for the calls that run in shared threads, and refuse others."""
        with self._lock:
            shared, self._shared, self._ended = self._shared, None, True
        if shared is not None:
            shared.close(wait=True)

    def forget(self) -> None:
        """Begin with no threads in a forked child."""
        self._lock, self._shared = threading.Lock(), None


def _running_future(call: Callable[[], R]) -> Future[R]:
    """Return the future of a call; cancelling it has no effect, also before a thread has begun to make the call."""
    made: Future[R] = Future()
    made.set_running_or_notify_cancel()
    return made


def _make(made: Future[R], call: Callable[[], R]) -> None:
    """Make a call, in a thread."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # the future raises it
        made.set_exception(error)
    else:
        made.set_result(result)


_threads: Final = _CallThreads()
os.register_at_fork(after_in_child=_threads.forget)


@atexit.register  # for programs that import no manager; ``closing`` calls it, too
def end_calls() -> None:
    """Wait for the calls that run in shared threads, and refuse others; a second call does nothing."""
    _threads.end()


async def in_thread(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Make a call that ends by itself in a shared thread, in the context of the coroutine.

    Raises:
        StorageRefusedError: The operating system refuses to start the first thread.
        BaseException: As the call.
    """
    return await begun_in_thread(call, *arguments, **options)


def begun_in_thread(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[R]:
    """Have a call made as ``in_thread`` does; returns the future of its result, in the running event loop."""
    return asyncio.wrap_future(_threads.submit(_in_context(partial(call, *arguments, **options))))


async def in_own_thread(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Make a call that may wait for others, or that ends something, in a thread of its own; else as ``in_thread``."""
    return await begun_in_own_thread(call, *arguments, **options)


def begun_in_own_thread(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[R]:
    """Have a call made as ``in_own_thread`` does; returns the future of its result, in the running event loop."""
    return asyncio.wrap_future(_threads.submit_alone(_in_context(partial(call, *arguments, **options))))


def _in_context(call: Callable[[], R]) -> Callable[[], R]:
    return partial(contextvars.copy_context().run, call)
