"""``Handle``, an object that ends with ``close``; the close of a manager, and handles in a forked child.

A close waits for locks and threads. A signal handler or a finaliser runs on top of the frames that it interrupted, so a
close inside it could wait for locks that those frames hold. ``where_called`` examines the stack of the calling thread
before the close waits for anything; appends do not pay for that.

``Ending`` runs the one close of one manager, in a thread other than the main thread: Python raises the exceptions of
signal handlers (KeyboardInterrupt, SystemExit) in the main thread alone, so an interrupt ends the wait for the close,
but not the close. Managers that are still open when the interpreter ends are closed by ``atexit``.

A forked child has none of its parent's threads; ``pybk.threads`` has what handles do in it.
"""

from __future__ import annotations

import _thread
import atexit
import inspect
import logging
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Final, ParamSpec, Protocol, Self, TypeVar

from pybk.deferral import LateModule
from pybk.errors import ForkedProcessError, IllegalOperationError, LogFencedError
from pybk.threads.call_threads import asyncio_form, end_calls, in_own_thread

if TYPE_CHECKING:
    from pybk.manager import opening
    from pybk.manager.opening import Closing, LockWatch, Opening
else:
    opening = LateModule("pybk.manager.opening")

logger = logging.getLogger(__name__)

P = ParamSpec("P")
H = TypeVar("H", bound="Closing")


def opening_form(call: Callable[P, H], watch: Callable[..., LockWatch | None] | None = None) -> Callable[P, Opening[H]]:
    """Return the method ``x_async`` for a method ``x`` that opens a handle: it returns its ``Opening``.

    The form calls the method of the object, so a subclass that overrides the method overrides the form. For a class
    method, wrap the form in ``classmethod``.

    Args:
        call: The method.
        watch: For a method that waits for a lock, with ``wait`` and ``steal``: takes the arguments of a call, and
            returns the ``LockWatch`` of its lock, or None if it waits for no lock that can be watched.
    """
    call, name = getattr(call, "__func__", call), call.__name__

    @wraps(call)
    def form(*arguments: P.args, **options: P.kwargs) -> Opening[H]:
        method: Callable[..., H] = getattr(arguments[0], name)
        shown = ", ".join(f"{each!r:.200}" for each in arguments[1:])
        call_text, opens = f"{call.__qualname__}_async({shown})", partial(method, *arguments[1:])
        lock = None if watch is None else watch(*arguments, **options)
        if lock is None:
            return opening.Opening(call_text, partial(opens, **options))
        return opening.LockedOpening(call_text, opens, options, lock)

    signature = inspect.signature(call)
    form.__name__, form.__qualname__ = f"{name}_async", f"{call.__qualname__}_async"
    form.__doc__ = f"Make the call ``{name}`` in a thread of pybk; ``await`` it or use ``async with``."
    returned = f"Opening[{signature.return_annotation}]"
    vars(form)["__signature__"] = signature.replace(return_annotation=returned)
    form.__annotations__ = {**form.__annotations__, "return": returned}
    return form


class WithBlock(ABC):
    """An object for ``with`` and ``async with``."""

    __slots__ = ()

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""

    async def __aenter__(self) -> Self:
        """Return the object itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it as ``__exit__`` does, in a thread."""
        await in_own_thread(self.__exit__, kind, error, traceback)


class Handle(WithBlock):
    """An object that is opened, and released by ``close``; leaving its ``with`` calls that."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release it; a second call does nothing."""

    close_async = asyncio_form(close, own_thread=True)

    def _has_unreported_failures(self) -> bool:
        """Return whether appends have failed because another owner has the log, and nothing has reported that."""
        return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it; an error of the close does not replace an exception of the block.

        If another owner has taken the log or subscription, the close logs that, because it does not change what the
        block has done. The close raises it if appends have failed because of it, and no call or future has reported
        that to the block.
        """
        try:
            self.close()
        except LogFencedError as fenced:
            if error is None and self._has_unreported_failures():
                fenced.outcome_unknown = True
                raise
            logger.warning("%r was closed after another owner had taken it: %s", self, fenced)
        except Exception:
            if error is None:
                raise


_CLOSE_LOOK_SECONDS: Final = 1.0
"""The interval at which a thread that waits for a close checks for its end; an interrupt may lose the wake-up."""

_DROPPED_SECONDS: Final = 10.0
"""The time for which an open waits for the close of managers that were garbage-collected without a close."""

_APPLICATIONS: Final = (
    "pybk.adapters",
    "pybk.admin",
    "pybk.manager.atomic_group",
    "pybk.backup",
    "pybk.threads.call_threads",
    "pybk.manager.opening",
    "pybk.operations.store_repair",
    "pybk.pytest_plugin",
    "pybk.spark",
    "pybk.storage.repair",
    "pybk.streams",
    "pybk.testing",
)
"""Modules that use managers as applications do: their frames do not hold locks of a store that is open. Repair calls
``progress``, which may close a manager; it holds the lock of a directory alone, which no manager has open meanwhile."""

_LOGS: Final = frozenset(f"pybk.streams.{name}" for name in ("log", "log_writer", "named_list", "namespace", "wal"))
"""Modules of the handles of logs. Their frames hold no locks of a log, as those of the modules that they call do."""

_HANDLES: Final = ("pybk.manager.handle", "pybk.manager.ledger_manager")

_CALLERS: Final = frozenset({"_run", "_make", "_logged", "_call_weakly"})
"""Functions of ``pybk.threads`` from which workers make calls."""

_GLOBAL_LOCKS: Final = {
    "threading": {"start", "enumerate", "active_count", "current_thread"},
    "concurrent.futures.thread": {"submit"},
    "logging": {"handle", "callHandlers"},
}
"""Functions of the standard library, by module, that hold locks which a close also takes."""


class Where(Enum):
    """The context from which ``close`` was called."""

    OUTSIDE = "outside"
    """No frame of the thread holds anything that a close waits for."""

    CALLBACK = "callback"
    """The thread runs callbacks of finished appends, and a close waits for running callbacks."""

    LOGGING = "logging"
    """The thread is in ``logging.shutdown`` and holds reentrant locks of ``logging``, so the close must run in it."""


def where_called(what: str, *, of_log: bool = False) -> Where:
    """Return the context in which the thread called a public method; that method calls this function directly.

    Args:
        what: The name of the call, for the error.
        of_log: Whether the call waits for locks of a log, too.

    Raises:
        IllegalOperationError: The call comes from a signal handler or a finaliser that interrupted a call of pybk, or
            a call of the standard library that holds a lock, so it would wait for itself.
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
            # ``__exit__`` holds no lock while it calls close, nor does a worker while it makes a call.
            leaving = (module in _HANDLES and name == "__exit__") or (module == "pybk.threads" and name in _CALLERS)
            locks_log = of_log and module.startswith("pybk.streams.") and module not in _LOGS
            if not leaving and (locks_log or not module.startswith(_APPLICATIONS)):
                inside = inside or f"{module}.{name}"
                # Frames of ``pybk.manager.append_future`` lie between a callback and the code that runs it.
                waits = waits or module != "pybk.manager.append_future"
        elif module in _GLOBAL_LOCKS and name in _GLOBAL_LOCKS[module]:
            inside, waits = inside or f"{module}.{name}", True
        elif module == "logging" and name == "shutdown":
            found = Where.LOGGING
        frame = frame.f_back
    if inside is not None:
        raise IllegalOperationError(
            f"{what} was called from a signal handler or a finaliser that interrupted {inside}, so it would wait for "
            "itself for ever; nothing was done. Set a flag in the handler and make the call in the main program, or "
            "raise SystemExit in the handler: a manager that is still open is closed at the end of the program"
        )
    return found


def _module(names: dict[str, object]) -> str:
    name = names.get("__name__")
    return name if isinstance(name, str) else ""


class Closable(Protocol):
    """A manager's backend, as ``Ending`` closes it."""

    @property
    def forked(self) -> bool:
        """True if this process is a fork of the process that opened the backend."""

    @property
    def where(self) -> str:
        """The path or address of the backend, for messages."""

    def close(self) -> None:
        """Wait for outstanding operations, and release all resources."""


class Ending:
    """The close of one manager.

    Invariant: the backend is closed at most once, and ``_done`` is set when that close has ended, even if it raised.

    Threads: any.

    Args:
        backend: The backend to close.
    """

    def __init__(self, backend: Closable) -> None:
        self._backend = backend
        self._begun = threading.Lock()
        self._over = threading.Lock()
        self._over.acquire()
        self._done = False
        self.dropped = False
        """True if the manager was dropped without a close."""
        self._error: BaseException | None = None

    def watch(self, manager: object) -> None:
        """Have the backend closed at the latest when ``manager`` is garbage-collected, or when the interpreter ends."""
        open_endings[self] = None
        weakref.finalize(manager, self._drop, repr(manager)).atexit = False

    def close(self, where: Where) -> None:
        """Close the backend, or wait for the close that is under way; does nothing after a close.

        Raises:
            IllegalOperationError: The interpreter has stopped the threads that a close needs.
            BaseException: The error of the backend's close; only the first caller gets it.
        """
        if self._done or self._backend.forked:
            return
        if sys.is_finalizing():
            raise IllegalOperationError(
                f"{self._backend.where} can no longer be closed, because the interpreter has stopped its threads; "
                "close it before the main program ends"
            )
        self._begin(where)
        if where is Where.CALLBACK and not self._done:
            return  # the closing thread waits for this one, which runs callbacks
        self._wait(None)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _begin(self, where: Where) -> None:
        """Run the close, in another thread if this is the main thread; a repeated call does nothing."""
        if where is Where.OUTSIDE and _thread.get_ident() == threading.main_thread().ident:
            try:
                # Not threading.Thread: the frames that a signal handler interrupted may hold its locks.
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
        open_endings.pop(self, None)
        self._over.release()

    def _wait(self, seconds: float | None) -> None:
        while not self._done:
            if self._over.acquire(timeout=_CLOSE_LOOK_SECONDS if seconds is None else seconds):
                self._over.release()
            if seconds is not None:
                return

    def _drop(self, name: str) -> None:
        """Close the backend of a manager that was garbage-collected; the collector may run inside any other call."""
        if self._done or self._begun.locked() or self._backend.forked or sys.is_finalizing():
            return
        self.dropped = True
        try:
            _thread.start_new_thread(self._run, ())
        finally:  # without a thread, it is closed when the interpreter ends
            warnings.warn(
                f"{name} was dropped without close(), so it is being closed now; use `with`, or call close()",
                ResourceWarning,
                stacklevel=2,
            )

    def settle(self) -> None:
        """Wait at most ``_DROPPED_SECONDS`` for the close of a manager that was garbage-collected without a close."""
        if self.dropped and not self._backend.forked:
            self._wait(_DROPPED_SECONDS)


open_endings: Final[dict[Ending, None]] = {}
"""The open managers, in the order of opening; closed when the interpreter ends."""


def settle_dropped() -> None:
    """Wait until managers that were garbage-collected are closed, so that their directories can be opened again.

    Raises:
        IllegalOperationError: The interpreter has stopped the threads that an open manager needs.
    """
    if sys.is_finalizing():
        raise IllegalOperationError("a manager cannot be opened any more, because the interpreter is ending")
    for ending in list(open_endings):
        ending.settle()


@atexit.register
def close_all() -> None:
    """Close every open manager, in the reverse order of opening, because a later one may use an earlier one.

    Then wait for the calls of coroutines.

    Raises:
        Exception: The first error; the other managers are closed all the same.
    """
    errors: list[BaseException] = []
    for ending in reversed(list(open_endings)):
        try:
            ending.close(Where.OUTSIDE)
        except Exception as error:  # noqa: BLE001  # the others are closed all the same
            errors.append(error)
    end_calls()  # after the managers, whose end ends the calls that wait
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=open_endings.clear)


def fork_error(what: str) -> ForkedProcessError:
    """Return the error that a forked child gets for a handle of its parent."""
    return ForkedProcessError(f"{what} was opened before the fork that made this process; open it again here")
