"""Calls between event loops and threads: the threads that make calls of coroutines, and the call that wakes a loop.

Calls of coroutines are made in threads, because they would block the event loop. The default executor of the loop is
not used: it belongs to the application, and it has few threads. Calls that end by themselves share a few threads. Calls
that may wait for another call or for bookies that are away, and calls that end something, have a thread each. Otherwise
many waiting calls could take all threads, and the calls for which they wait could not run.

A call whose coroutine was cancelled is made nevertheless. At the end of the interpreter, the managers are closed, and
then the calls that share threads are waited for; the others end with their managers. A forked child has threads of its
own.

``asyncio_form`` makes the coroutine function ``x_async`` of a call ``x``. These forms are written by hand:

- ``append_async``, ``append_many_async``, ``ack_async`` and ``ack_through_async`` return futures that the store or the
  bookies complete, and are for threads, too; ``append_coro`` and its like await these futures.
- Reads that follow a ledger, a log or a subscription, locks that others hold, and checks of a cluster that are repeated
  wait for an event without a thread: any number of coroutines may wait, and there are few threads.
- Generators read a batch in a thread and yield from it in the loop; lists of what the call yields are made in a thread.
- What opens a handle returns an ``Opening``, which closes the handle if its task was cancelled; see ``opening_form``.
- A property takes no arguments.

In the other direction, ``WakeUp`` wakes a thread, and ``call_in`` and ``LoopCalls`` have an event loop make calls.
"""

from __future__ import annotations

import atexit
import contextvars
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Final, ParamSpec, TypeVar

from pybk.deferral import asyncio
from pybk.errors import StorageRefusedError
from pybk.threads import Workers, hold_over_forks, start_thread

P = ParamSpec("P")
R = TypeVar("R")

SHARED_MAX: Final = 32
"""The most threads that are shared by calls that end by themselves."""


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
    """Begin a call as ``in_thread`` does; return the future of its result, in the running event loop."""
    return asyncio.wrap_future(_threads.submit(_in_context(partial(call, *arguments, **options))))


async def in_own_thread(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Make a call that may wait for others, or that ends something, in a thread of its own, or in a shared thread."""
    return await begun_in_own_thread(call, *arguments, **options)


def begun_in_own_thread(call: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> asyncio.Future[R]:
    """Begin a call as ``in_own_thread`` does; return the future of its result, in the running event loop."""
    return asyncio.wrap_future(_threads.submit_alone(_in_context(partial(call, *arguments, **options))))


def _in_context(call: Callable[[], R]) -> Callable[[], R]:
    return partial(contextvars.copy_context().run, call)


def asyncio_form(call: Callable[P, R], *, own_thread: bool = False) -> Callable[P, Coroutine[Any, Any, R]]:
    """Return the coroutine function that makes a call in a thread; it is to be called ``x_async`` for the call ``x``.

    The form of a method calls the method of the object, so a subclass that overrides the method overrides the form.

    Args:
        call: A function of a module, or a method while its class is made; ``classmethod`` takes the form of a class
            method.
        own_thread: Make the call as ``in_own_thread`` does, because it may wait for others or ends something; False
            makes it as ``in_thread``.
    """
    begin = begun_in_own_thread if own_thread else begun_in_thread

    @wraps(call, updated=())  # not ``__isabstractmethod__``
    async def form(*arguments: P.args, **options: P.kwargs) -> R:
        if is_method:
            method: Callable[..., R] = getattr(arguments[0], name)
            return await begin(method, *arguments[1:], **options)
        return await begin(call, *arguments, **options)

    name, is_method = form.__name__, form.__qualname__ != form.__name__
    form.__name__, form.__qualname__ = f"{name}_async", f"{form.__qualname__}_async"
    form.__doc__ = f"Make the call ``{name}`` in a thread of pybk, so that the event loop keeps running."
    if any("Callable[" in str(annotation) for annotation in form.__annotations__.values()):
        form.__doc__ += " Functions that it is given run there."
    return form


class WakeUp:
    """A signal that one thread waits for; unlike a ``threading.Event``, a signal handler may send it.

    It begins asleep. Threads: ``wake`` from any, ``wait`` and ``sleep`` from the one that waits.
    """

    __slots__ = ("_still",)

    def __init__(self) -> None:
        self._still = threading.Lock()
        self._still.acquire()

    def wake(self) -> None:
        """Make the present or the next ``wait`` return."""
        with suppress(RuntimeError):  # it is awake
            self._still.release()

    def sleep(self) -> None:
        """Forget earlier calls of ``wake``."""
        self._still.acquire(blocking=False)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for ``wake``; returns False if it was not called within ``timeout`` seconds."""
        return self._still.acquire(timeout=-1 if timeout is None else timeout)


_LOCK: Final = threading.RLock()
hold_over_forks(_LOCK)
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
        """Make ``call`` in the loop; drop it if the loop is closed, because it runs nothing any more."""
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
    """Make a loop call a function soon, from any thread; return False if the loop was closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True
