"""Threads that make calls: how one is started, a few of them for calls that may take long, and timers.

``Background`` is the work that logs do in the background: rolls, by a few threads for all logs of the process, and
timers. A log at rest has no thread of its own. The threads are daemons; the next open of the log completes work that
they leave unfinished.

A forked child has none of the threads of its parent. Objects that were given to ``in_children`` get new locks first in
it, because a thread of the parent may hold theirs; then functions empty buffers and close connections. So other calls
need not check whether the process was forked, and no call on such an object waits for a lock there. Locks of modules
are held while the process is forked (``hold_over_forks``).
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
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar

from pybk.errors import StorageRefusedError

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


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
    except KeyError as error:
        # A signal handler raised in ``start``, which takes any exception for a thread that did not begin. This one did,
        # so ``start`` does not find it among those that are to begin.
        raise error if error.__context__ is None else error.__context__ from None


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
            self._workers.submit(partial(_logged, call))

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


# ---- forked children -------------------------------------------------------------------------------------------------

_Disable = Callable[[Any], None]
_IN_CHILDREN: Final[weakref.WeakKeyDictionary[Any, _Disable | None]] = weakref.WeakKeyDictionary()
_NEW_LOCKS: Final[dict[type, Callable[[], object]]] = {
    type(threading.Lock()): threading.Lock,
    type(threading.RLock()): threading.RLock,
    threading.Condition: threading.Condition,
}


def in_children(handle: T, disable: Callable[[T], None] | None = None) -> None:
    """Give an object new locks in each forked child, as long as the object exists, and then call a function with it.

    Args:
        handle: The object; it is hashed by identity, and not kept alive. Locks among its attributes guard something;
            one that is a signal does not belong there.
        disable: The function; it must not refer to the object, wait, or raise. None if new locks are all it takes.
    """
    _IN_CHILDREN[handle] = disable


def renew_locks(handle: object) -> None:
    """Replace the locks among the attributes of an object, in a forked child."""
    attributes = getattr(handle, "__dict__", {})
    for name, found in tuple(attributes.items()):
        make = _NEW_LOCKS.get(type(found))
        if make is not None:
            attributes[name] = make()


def hold_over_forks(lock: threading.RLock) -> None:
    """Hold a lock of a module whenever the process is forked, so that no other thread holds it at the fork.

    Args:
        lock: The lock, which is held for moments only; reentrant, because a signal handler may fork.
    """
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def _after_fork() -> None:
    for handle, disable in list(_IN_CHILDREN.items()):
        renew_locks(handle)
        if disable is not None:
            disable(handle)


os.register_at_fork(after_in_child=_after_fork)
