"""Signals: a call of pybk in the main thread is not interrupted between two lines, but only where it waits.

Theory of operation
===================

**The problem.** CPython calls the handlers of signals in the main thread, between any two instructions, and what they
raise (KeyboardInterrupt, an application's time limit) ends whatever runs there. Threads that append share state, and
the thread of a caller leads group commits, so an exception between two lines would leave that state half changed: a
lock that no thread releases, a leadership that no thread has, a commit that is half published.

**A guard.** ``guarded(call, *arguments)`` makes a call during which no handler is called. The signals that come
meanwhile are deferred to its end, when the state is whole. What was done stays done: a handler that raises then ends
the caller, as if the signal had come a moment later. Guards may be nested; the outermost counts. In other threads than
the main thread, which no handler interrupts, ``guarded`` is a plain call.

**Checkpoints.** A call that waits long must not defer Ctrl-C as long. So code in a guard waits in slices of at most
``SLICE_SECONDS``, and calls ``checkpoint`` between them, which calls the handlers of the signals that have come. An
exception of a handler is raised there, as an exception of the wait. These are the only places where a guarded call can
be interrupted, so only there, and where errors are raised anyway, must its state be whole. ``acquire`` waits so for a
lock.

**What may be in a guard**: whatever ends by itself. A write to a disk and a sync may take seconds on a disk that is
slow; no signal could end them without a guard either, because the system does not return from them. A wait for another
thread, process or bookie needs checkpoints, except for locks that are held for a few instructions. An import is made in
a guard as well (``storage/io/failures.py``). Code of the application is called outside of guards, except by finalisers,
which the collector may call anywhere.

**How signals are deferred.** With the native core (``src/native/guard.c``), a handler in C stands before CPython's
handler for the signals of its table, which are those for which programs have handlers. In a guard it notes the signal;
otherwise, and when the guard ends, it calls CPython's handler, so ``signal.set_wakeup_fd`` and with it asyncio work as
always. ``signal.getsignal`` shows no difference. Each outermost guard looks anew which signals Python handles, because
``signal.signal`` puts CPython's handler back. A handler that is set in a guard gets the signals that were deferred for
its predecessor. Handlers of libraries in C are left alone, also where Python has one for the same signal. The system
may deliver a signal to any thread of the process: whichever it is, the depth of the main thread's guards decides.

Without the native core, the main thread hands the call to a *guard thread*, in a copy of its context, and waits. What a
handler raises in this wait is raised in the guard thread, at the next checkpoint, or by ``guarded`` when the call has
ended. A call of pybk that the handler makes gets a guard thread of its own.

**Not deferred** is what comes without a signal: ``_thread.interrupt_main`` and exceptions that another thread throws
(``PyThreadState_SetAsyncExc``). If one strikes while a commit is written, the log fails as after a failed write;
in a thread that leads or holds a lock, it may leave others waiting.

**Fork.** The thread that forked is the main thread of the child. It keeps the guards that it is in; of those of another
main thread, and of deferred signals, the child has none. A guard thread's call ends there with ForkedProcessError.
"""

from __future__ import annotations

import contextvars
import math
import os
import sys
import threading
import time
from _thread import get_ident
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

from pybk.deferral import native_core
from pybk.errors import ForkedProcessError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SLICE_SECONDS: Final = 0.02
"""The longest wait between two checkpoints; Ctrl-C takes as long at most, and a thread that waits costs next to nothing
with so few."""


def guarded(call: Callable[[*Ts], T], /, *arguments: *Ts) -> T:
    """Make a call during which the handlers of signals are called at checkpoints alone.

    Args:
        call: The call. It ends by itself, or comes to a checkpoint in each ``SLICE_SECONDS``.
        arguments: Its arguments.

    Returns:
        The result of the call.

    Raises:
        BaseException: As the call; and what the handler of a signal raises that came before the call, which is not made
            then, or during it.

    Threads: any.
    Cost: Half a microsecond for an outermost guard, because Python is asked for the handlers of twelve signals, and the
        system about those that have one.
    """
    if get_ident() != threading.main_thread().ident or sys.is_finalizing():
        return call(*arguments)
    calls = _idle.pop() if _idle else _new_guard_thread()
    if calls is None:
        return call(*arguments)
    made = _Call(call, arguments)
    made.make_by(calls)
    error = made.interrupt or made.error
    if error is None:
        found: T = made.result
        return found
    try:
        raise error
    finally:
        made.error = made.interrupt = error = None  # else they and this frame would refer to each other


def checkpoint() -> None:
    """Call the handlers of the signals that have come in the guard that this thread is in; without one, do nothing.

    Raises:
        BaseException: As a handler.
    """
    made = _made_by.get(get_ident())
    if made is not None and made.interrupt is not None:
        interrupt, made.interrupt = made.interrupt, None
        raise interrupt


def is_guarded() -> bool:
    """Return whether a call that waits in this thread has to come to checkpoints."""
    return get_ident() in _made_by


# ---- guard threads, for pure Python ----------------------------------------------------------------------------------


class _Call:
    """A call that a guard thread makes for the main thread.

    Attributes:
        done: Whether it has ended; set last.
        result: Its result.
        error: The exception with which it ended; None if it returned.
        interrupt: What a handler raised in the main thread meanwhile; the next checkpoint takes it.
    """

    __slots__ = ("_call", "_over", "done", "error", "interrupt", "result")

    def __init__(self, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        context = contextvars.copy_context()
        self._call: Callable[[], Any] = lambda: context.run(call, *arguments)
        self._over = threading.Lock()
        self._over.acquire()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.interrupt: BaseException | None = None

    def make(self) -> None:
        """Make the call; called by a guard thread."""
        try:
            self.result = self._call()
        except BaseException as error:  # noqa: BLE001  # raised in the main thread
            self.error = error

    def end(self) -> None:
        """End the wait of the main thread."""
        self.done = True
        self._over.release()

    def make_by(self, calls: SimpleQueue[_Call]) -> None:
        """Have a guard thread make the call, and return when it has ended.

        A signal that comes just before the main thread waits does not wake it, so it looks for handlers to call, too.

        A second exception of a handler in the few instructions outside of a ``try`` ends the wait alone: the call
        continues, as one of another thread would.
        """
        try:
            calls.put(self)
            self._over.acquire(timeout=SLICE_SECONDS)
        except BaseException as interrupt:  # noqa: BLE001  # raised when the call has ended
            self.interrupt = interrupt
        while not self.done:
            try:
                self._over.acquire(timeout=SLICE_SECONDS)
            except BaseException as interrupt:  # noqa: BLE001  # as above
                self.interrupt = interrupt


_idle: Final[list[SimpleQueue[_Call]]] = []
"""The queues of the guard threads that have nothing to do."""

_made_by: Final[dict[int, _Call]] = {}
"""The calls that guard threads make now, by the identifier of the thread."""


def _new_guard_thread() -> SimpleQueue[_Call] | None:
    """Start a guard thread, and return its queue; None if the system gives no thread."""
    calls: SimpleQueue[_Call] = SimpleQueue()
    try:
        threading.Thread(target=_make_calls, args=(calls,), name="pybk-guard", daemon=True).start()
    except RuntimeError:
        return None
    return calls


def _make_calls(calls: SimpleQueue[_Call]) -> None:
    """Make calls for the main thread, one after the other, for ever; the body of a guard thread."""
    while True:
        made = calls.get()
        _made_by[get_ident()] = made
        made.make()
        del _made_by[get_ident()]
        _idle.append(calls)
        made.end()
        del made  # otherwise the thread would keep its objects alive while it waits for the next


def _after_fork() -> None:
    _idle.clear()
    while _made_by:
        _, made = _made_by.popitem()
        made.error = ForkedProcessError("the call was under way before the fork that made this process; repeat it")
        made.end()


os.register_at_fork(after_in_child=_after_fork)

_native: Any = native_core()
if not TYPE_CHECKING and hasattr(_native, "guarded"):  # a core of older sources has none
    guarded, checkpoint, is_guarded = _native.guarded, _native.checkpoint, _native.is_guarded


# ---- waits -----------------------------------------------------------------------------------------------------------


def acquire(lock: threading.Lock, seconds: float = math.inf) -> bool:
    """Acquire a lock, with checkpoints while another thread has it; in the main thread the caller is in a guard.

    Args:
        lock: The lock.
        seconds: The longest wait.

    Returns:
        True if it was acquired, False after the longest wait.

    Raises:
        BaseException: As a checkpoint; the lock was not acquired then.

    Threads: any.
    """
    if lock.acquire(False):
        return True
    end = time.monotonic() + seconds
    most = SLICE_SECONDS if is_guarded() else math.inf
    while (left := min(end - time.monotonic(), most)) > 0:
        if lock.acquire(True, -1 if left == math.inf else left):
            return True
        checkpoint()
    return False


class Holding:
    """Holds a lock for the time of a ``with``; waits for it as ``acquire`` does."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        acquire(self._lock)

    def __exit__(self, *_: object) -> None:
        self._lock.release()
