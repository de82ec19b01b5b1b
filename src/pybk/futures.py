"""What ``append_async`` gives back: a future that is done when its commit is."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from pybk.errors import AppendTimeoutError, PybkError, UsageError
from pybk.storage.commit import Commit

if TYPE_CHECKING:
    from pybk.home import AppendLog
    from pybk.storage.descriptor import LedgerDescriptor

T = TypeVar("T")

ACKNOWLEDGED: Final = Commit.finished(None)
"""The commit of appends that are acknowledged when they are made."""

_LOOK_SECONDS: Final = 0.1
"""How often an append that waits for entries before it looks whether they can still come."""


def _seconds(timeout: object) -> float | None:
    """Return a time to wait, None for as long as it takes."""
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and timeout <= threading.TIMEOUT_MAX:
        return timeout
    raise UsageError(
        f"timeout is {timeout!r:.100}; it takes seconds, at most {threading.TIMEOUT_MAX:.0f}, or None to wait for as "
        "long as it takes"
    )


class AppendFuture(Generic[T]):
    """The outcome of an append: an entry id, or a range of them.

    Holds a reference to the commit it is part of, so that finishing a commit finishes all its futures at once.

    Threads: any.
    """

    __slots__ = ("_commit", "_log", "_value")

    def __init__(self, log: AppendLog, commit: Commit, value: T) -> None:
        self._log = log
        self._commit = commit
        self._value = value

    def __repr__(self) -> str:
        """Name the entries and how the append is; asking changes nothing."""
        value = self._value
        if not isinstance(value, range):
            which = f"entry {value}"
        else:
            which = f"entries {value[0]} to {value[-1]}" if value else "no entries"
        return f"<{type(self).__name__} {which}, {self._state()}>"

    def _state(self) -> str:
        """Return "pending", "done" or "failed" with the kind of error."""
        commit = self._commit
        if not commit.done:
            return "pending"
        return "done" if commit.error is None else f"failed: {type(commit.error).__name__}"

    def done(self) -> bool:
        """Tell whether the append is durable or has failed."""
        return self._commit.done

    def result(self, timeout: float | None = None) -> T:
        """Wait for the append.

        Args:
            timeout: Seconds; None waits for as long as it takes, and the waiting thread itself writes and syncs if no
                other does, which is what makes appends of one thread quick.

        Returns:
            The entry id, or the range of ids.

        Raises:
            UsageError: ``timeout`` is no number of seconds.
            AppendTimeoutError: Not done in time; it goes on and may still succeed.
            PybkError: It failed; ``outcome_unknown`` says whether the entry may be there all the same.
        """
        timeout = _seconds(timeout)
        commit = self._commit
        if not commit.done:
            if timeout is None:
                self._log.wait(commit)
            else:
                self._wait_for(commit, timeout)
        if commit.error is not None:
            raise commit.error.with_traceback(None)  # shared by all futures of the commit
        return self._value

    def _wait_for(self, commit: Commit, timeout: float) -> None:
        """Wait for a time while the committer thread works: a sync that this thread drives could not be cut short."""
        finished = threading.Event()
        self._log.when_done(commit, finished.set)
        if not finished.wait(timeout) and not commit.done:
            raise AppendTimeoutError(f"the append was not durable after {timeout} s; it goes on: ask the future again")

    def exception(self, timeout: float | None = None) -> PybkError | None:
        """Wait like ``result``; return the error instead of raising it, None if there was none."""
        timeout = _seconds(timeout)  # what is wrong with it is not the append's error
        try:
            self.result(timeout)
        except AppendTimeoutError:
            raise
        except PybkError as error:
            return error
        return None

    def add_done_callback(self, callback: Callable[[AppendFuture[T]], Any]) -> None:
        """Have ``callback(self)`` called once when done; in the store's committer thread, so it must be short."""
        self._log.when_done(self._commit, lambda: callback(self))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop; all that one commit finishes is woken by one call into the loop."""
        commit = self._commit
        if not commit.done:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            _LoopWaker.of(self._log, commit, loop).add(waiter)
            yield from waiter
        return self.result()


class _LoopWaker:
    """Wakes the futures of one event loop that wait for one commit."""

    __slots__ = ("_loop", "_waiters")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []

    @classmethod
    def of(cls, log: AppendLog, commit: Commit, loop: asyncio.AbstractEventLoop) -> _LoopWaker:
        """Return the waker of this commit and loop, registered with the commit."""
        waker = commit.wakers.get(loop)
        if waker is None:
            waker = commit.wakers[loop] = cls(loop)
            log.when_done(commit, waker)
        return waker

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Add a future of the loop; called in the loop's thread."""
        self._waiters.append(waiter)

    def __call__(self) -> None:
        """Called by the committer thread when the commit is done."""
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the loop was closed, so nobody waits in it
            self._waiters = []

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class AdvancedFuture(AppendFuture[T]):
    """An append to an advanced ledger: it joins a commit only when all entries before it were given.

    Threads: any.
    """

    __slots__ = ("_callbacks", "_descriptor", "_lock", "_staged")

    def __init__(self, log: AppendLog, descriptor: LedgerDescriptor, value: T) -> None:
        self._log = log
        self._descriptor = descriptor
        self._value = value
        self._lock = threading.Lock()
        self._staged = threading.Event()
        self._callbacks: list[Callable[[], None]] = []

    def staged(self, commit: Commit | None, failed: PybkError | None = None) -> None:
        """Take note of the commit it is part of now, or of why it will be part of none."""
        with self._lock:
            if self._staged.is_set():
                return
            if commit is None:
                commit = Commit.finished(failed)
            self._commit = commit
            self._staged.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._log.when_done(commit, callback)

    def _state(self) -> str:
        """Return "pending", "done" or "failed" with the kind of error."""
        return super()._state() if self._staged.is_set() else "pending"

    def done(self) -> bool:
        """Tell whether the append is durable, and all before it, or has failed."""
        self._settle()
        return self._staged.is_set() and self._commit.done

    def _settle(self) -> None:
        """Fail if the entries before it cannot come any more, because the ledger or the store takes none for good."""
        error = self._descriptor.final_error or self._log.error
        if error is not None:
            self.staged(None, error)

    def _look(self) -> None:
        """Look again at each change of the ledger, until it is known how this ends."""
        self._settle()
        if not self._staged.is_set():
            self._descriptor.when_advanced(self._look)

    def result(self, timeout: float | None = None) -> T:
        """Wait like any append, first for the entries before it; arguments and errors are the same."""
        timeout = _seconds(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._staged.wait(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
            self._settle()
            if time.monotonic() >= deadline and not self._staged.is_set():
                raise AppendTimeoutError(
                    f"entries before {self._value} were not appended within {timeout} s; append them: until "
                    "then it is not acknowledged"
                )
        return super().result(None if timeout is None else max(0.0, deadline - time.monotonic()))

    def add_done_callback(self, callback: Callable[[AppendFuture[T]], Any]) -> None:
        """Have ``callback(self)`` called once when done; in the store's committer thread, so it must be short."""
        with self._lock:
            if not self._staged.is_set():
                first = not self._callbacks
                self._callbacks.append(lambda: callback(self))
                if first:
                    self._descriptor.when_advanced(self._look)
                return
        super().add_done_callback(callback)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop."""
        return self._wait().__await__()

    async def _wait(self) -> T:
        if not self.done():
            loop = asyncio.get_running_loop()
            finished = asyncio.Event()
            self.add_done_callback(lambda _: set_in_loop(loop, finished))
            while not self.done():
                try:
                    await asyncio.wait_for(finished.wait(), _LOOK_SECONDS)
                except TimeoutError:
                    continue
        return self.result()


def set_in_loop(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop from any thread; in a loop that was closed nobody waits."""
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:
        if not loop.is_closed():
            raise
