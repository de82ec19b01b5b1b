"""How a manager ends: when ``close`` may run, in which thread, and what happens to a manager that nobody closed.

A close waits for locks and threads. A signal handler or a finaliser runs on top of whatever its thread was doing, so a
close inside it would wait for the very frames that it interrupted. ``where_called`` looks down the stack of the calling
thread and finds that out before anything is waited for; appends pay nothing for it.

``Ending`` is the one close of one manager. It runs at most once, away from the main thread, because Python raises what
signal handlers raise (KeyboardInterrupt, SystemExit) in the main thread alone: an interrupt ends the wait for the
close, never the close. Whatever is still open when the interpreter ends is closed then, by ``atexit``.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
import warnings
import weakref
from enum import Enum
from typing import Final, Protocol

from pybk.errors import IllegalOperationError

_LOOK_SECONDS: Final = 1.0
"""How often a thread that waits for a close looks whether it is over, should an interrupt have taken its wake-up."""

_DROPPED_SECONDS: Final = 10.0
"""How long an open waits for the close of managers that were dropped."""

_APPLICATIONS: Final = ("pybk.admin", "pybk.opening", "pybk.spark")
"""Modules that use managers as applications do: their frames hold no lock of a store."""

_HANDLES: Final = ("pybk.manager", "pybk.reader", "pybk.writer")

_GLOBAL_LOCKS: Final = {
    "threading": {"start", "enumerate", "active_count", "current_thread"},
    "concurrent.futures.thread": {"submit"},
    "logging": {"handle", "callHandlers"},
}
"""Functions of the standard library that hold locks which a close needs, too."""


class Where(Enum):
    """What the calling thread was doing when it called ``close``."""

    OUTSIDE = "outside"
    """Nothing that a close waits for."""

    CALLBACK = "callback"
    """It runs callbacks of finished appends, so a close that another thread began waits for it."""

    LOGGING = "logging"
    """It closes the handlers of ``logging``, whose reentrant locks it holds: no other thread may close for it."""


def where_called(what: str) -> Where:
    """Return what the thread was doing when it called a public method, which calls this function directly.

    Args:
        what: Names the call in the error.

    Raises:
        IllegalOperationError: The call comes from a signal handler or a finaliser that interrupted a call of pybk, or
            of the standard library while that held a lock: it would wait for itself.
    """
    frame = sys._getframe(1).f_back
    found = Where.OUTSIDE
    inside: str | None = None
    waits = False
    while frame is not None:
        module, name = _module(frame.f_globals), frame.f_code.co_name
        if module.startswith("pybk."):
            if name == "_run_callbacks" and not waits:
                return Where.CALLBACK
            leaving = module in _HANDLES and name == "__exit__"  # holds nothing, whatever stands between it and close
            if not leaving and not module.startswith(_APPLICATIONS):
                inside = inside or f"{module}.{name}"
                # Frames of ``pybk.futures`` lie between a callback and the code that runs it.
                waits = waits or module != "pybk.futures"
        elif module in _GLOBAL_LOCKS and name in _GLOBAL_LOCKS[module]:
            inside, waits = inside or f"{module}.{name}", True
        elif module == "logging" and name == "shutdown":
            found = Where.LOGGING
        frame = frame.f_back
    if inside is not None:
        raise IllegalOperationError(
            f"{what} was called from a signal handler or a finaliser that interrupted {inside}, for which it would "
            "wait for ever; nothing was closed. Set a flag in the handler and close in the main program, or raise "
            "SystemExit in the handler: a manager that is still open is closed at the end of the program"
        )
    return found


def _module(names: dict[str, object]) -> str:
    name = names.get("__name__")
    return name if isinstance(name, str) else ""


class Closable(Protocol):
    """A manager's backend, as ``Ending`` closes it."""

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that opened it."""

    @property
    def where(self) -> str:
        """The path or address of the backend, for messages."""

    def close(self) -> None:
        """Wait for outstanding operations, and release all resources."""


class Ending:
    """The close of one manager.

    Invariant: the backend is closed at most once, and ``_done`` is set when that is over, whatever it raised.

    Threads: any.

    Args:
        backend: What is closed.
    """

    def __init__(self, backend: Closable) -> None:
        self._backend = backend
        self._begun = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()
        self._done = False
        self._dropped = False
        self._error: BaseException | None = None

    def watch(self, manager: object) -> None:
        """Close at the latest when ``manager`` is collected, or when the interpreter ends."""
        _open[self] = None
        weakref.finalize(manager, self._drop, repr(manager)).atexit = False

    def close(self, where: Where) -> None:
        """Close, or wait until the close that is under way is over; afterwards it does nothing.

        Raises:
            IllegalOperationError: The interpreter has stopped the threads that a close needs.
            BaseException: What closing raised; the first caller gets it.
        """
        if self._done or self._backend.forked:
            return
        if sys.is_finalizing():
            raise IllegalOperationError(
                f"{self._backend.where} cannot be closed any more, because the interpreter has stopped its threads; "
                "close it before the main program ends"
            )
        self._begin(where)
        if where is Where.CALLBACK and not self._done:
            return  # the thread that closes waits for the one that runs callbacks
        self._wait(None)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, where: Where) -> None:
        """Run the close, in another thread if this one is the main thread; may be repeated."""
        if where is Where.OUTSIDE and _thread.get_ident() == threading.main_thread().ident:
            try:
                # Not threading.Thread: its locks may be held by what a signal handler interrupted.
                _thread.start_new_thread(self._run, ())
            except RuntimeError:  # the interpreter is ending, or the system has no more threads
                self._run()
        else:
            self._run()

    def _run(self) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            self._backend.close()
        except BaseException as error:  # noqa: BLE001  # raised to the caller of ``close``
            self._error = error
        self._done = True
        _open.pop(self, None)
        self._over.release()

    def _wait(self, seconds: float | None) -> None:
        while not self._done:
            if self._over.acquire(timeout=_LOOK_SECONDS if seconds is None else seconds):
                self._over.release()
            if seconds is not None:
                return

    def _drop(self, name: str) -> None:
        """Close a manager that no reference is left to; the garbage collector may call this inside any other call."""
        if self._done or self._begun.locked() or self._backend.forked or sys.is_finalizing():
            return
        self._dropped = True
        try:
            _thread.start_new_thread(self._run, ())
        finally:  # without a thread, it is closed when the interpreter ends
            warnings.warn(
                f"{name} was dropped without close(), so it is being closed now; use `with`, or call close()",
                ResourceWarning,
                stacklevel=2,
            )

    def settle(self) -> None:
        """If the manager was dropped without a close, wait at most ``_DROPPED_SECONDS`` until it is closed."""
        if self._dropped and not self._backend.forked:
            self._wait(_DROPPED_SECONDS)


_open: Final[dict[Ending, None]] = {}
"""The managers to close when the interpreter ends, in the order of opening."""


def settle_dropped() -> None:
    """Wait until managers that were dropped are closed, so that their directories can be opened.

    Raises:
        IllegalOperationError: The interpreter has stopped the threads that an open manager needs.
    """
    if sys.is_finalizing():
        raise IllegalOperationError("nothing can be opened any more, because the interpreter is ending")
    for ending in list(_open):
        ending.settle()


@atexit.register
def close_all() -> None:
    """Close every manager that is still open; the last that was opened first, as another may have been made for it."""
    errors: list[BaseException] = []
    for ending in reversed(list(_open)):
        try:
            ending.close(Where.OUTSIDE)
        except Exception as error:  # noqa: BLE001  # the others are closed all the same
            errors.append(error)
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=_open.clear)
