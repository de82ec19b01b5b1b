"""Futures of appends: each refers to the ``Completion`` of its commit or batch, and is done when that completes.

If appends of coroutines have to wait for admission, a thread (``CoroutineBacklog``) makes them in order, because the
wait would block the event loop.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, NoReturn, TypeVar

from pybk.deferral import asyncio
from pybk.errors import AppendTimeoutError, PybkError, UsageError, without_frames
from pybk.threads import in_children, start_thread
from pybk.threads.call_threads import LoopCalls, WakeUp, call_in, running_loop
from pybk.threads.group_commit import Completion

if TYPE_CHECKING:
    from pybk.backend import AppendLog
    from pybk.storage.descriptor import LedgerDescriptor

T = TypeVar("T")

ACKNOWLEDGED: Final = Completion.finished(None)
"""The completion of appends that are acknowledged when they are staged (``DEFERRED_FORCE``)."""

_EARLIER_LOOK_SECONDS: Final = 0.1
"""The interval at which an append that waits for earlier entries checks whether they can still come."""


def seconds_of(timeout: object, name: str = "timeout") -> float | None:
    """Return a valid timeout in seconds; None stands for no limit."""
    if timeout is None:
        return None
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout <= threading.TIMEOUT_MAX:
        return timeout
    raise UsageError(
        f"{name} is {timeout!r:.100}; it takes seconds, at most {threading.TIMEOUT_MAX:.0f}, or None to wait for as "
        "long as it takes"
    )


def duration_of(value: object, name: str, most: float = threading.TIMEOUT_MAX) -> float:
    """Return an argument that is seconds from 0 to ``most``; unlike a timeout, it always has a limit."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most:
        return value
    raise UsageError(f"{name} is {value!r:.100}; it takes seconds, from 0 to {most:.0f}")


class AppendFuture(Generic[T]):
    """The outcome of an append: an entry id, or a range of them.

    It refers to the completion of its commit or batch, so one completion completes all futures of a commit at once.

    In an event loop, ``await`` it or give it to ``asyncio.gather``, ``wait``, ``wait_for``, ``shield`` or
    ``as_completed``. ``asyncio.create_task`` and ``TaskGroup`` take coroutines alone: give them
    ``writer.append_coro(payload)``. ``concurrent()`` returns a future for ``concurrent.futures.wait`` and
    ``asyncio.wrap_future``. Cancelling a task that waits for an append never cancels the append.

    Threads: any.
    """

    __slots__ = ("_commit", "_log", "_value")

    def __init__(self, log: AppendLog, commit: Completion, value: T) -> None:
        self._log = log
        self._commit = commit
        self._value = value

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"an {type(self).__name__} can be neither copied nor pickled: wait for it in this process, and send its "
            "result(), which is an entry id or a range"
        )

    def __repr__(self) -> str:
        """Return the entries and the state of the append; has no side effects."""
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
        """Return whether the append is durable or has failed."""
        return self._commit.done

    def result(self, timeout: float | None = None) -> T:
        """Wait for the append.

        Args:
            timeout: Seconds; None waits without a limit. Without a limit, this thread may lead the group commit, which
                makes appends of a single thread fast.

        Returns:
            The entry id, or the range of ids.

        Raises:
            UsageError: ``timeout`` is not a number of seconds.
            AppendTimeoutError: Not done in time; the append continues and may still succeed.
            PybkError: The append failed. If ``outcome_unknown`` is set, the entry may still be in the ledger.
        """
        timeout = seconds_of(timeout)
        commit = self._commit
        if not commit.done:
            if timeout is None:
                self._log.wait(commit)
            else:
                self._wait_for(commit, timeout)
        if commit.error is not None:
            raise self._error(commit.error)
        return self._value

    def _error(self, error: PybkError) -> PybkError:
        """Return the error to raise, given the commit's error, which all its futures share."""
        return without_frames(error)

    def _wait_for(self, commit: Completion, timeout: float) -> None:
        """Wait while the background thread leads: if this one led, a slow sync would exceed the timeout."""
        finished = WakeUp()
        self._log.when_done(commit, finished.wake)
        if not finished.wait(max(0.0, timeout)) and not commit.done:
            raise AppendTimeoutError(f"the append was not durable after {timeout} s; it continues; wait again")

    def exception(self, timeout: float | None = None) -> PybkError | None:
        """Wait like ``result``; return the error instead of raising it, None if there was none."""
        timeout = seconds_of(timeout)  # a wrong timeout is raised, because it is not the append's error
        try:
            self.result(timeout)
        except AppendTimeoutError:
            raise
        except PybkError as error:
            return error.with_traceback(None)
        return None

    def cancel(self) -> bool:
        """Return False, as a running future of the standard library does, because the append continues.

        The call that returned this future gave the append to the log, so it may be on disk already. To stop waiting,
        cancel the task that waits, or drop the future.
        """
        return False

    def cancelled(self) -> bool:
        """Return False: waiting for an append can be cancelled, the append cannot."""
        return False

    def add_done_callback(
        self, callback: Callable[[AppendFuture[T]], Any], *, context: contextvars.Context | None = None
    ) -> None:
        """Call ``callback(self)`` once when the append is done.

        Args:
            callback: Called in the event loop that runs in this thread, as with ``asyncio.Future``; dropped if that
                loop is closed earlier. If no loop runs here, called in a background thread, so it must be short.
            context: The context to run it in. None means a copy of the current one in a loop, else the thread's own.
        """
        loop = running_loop()
        if loop is not None:
            self._call_in_loop(loop, callback, contextvars.copy_context() if context is None else context)
        elif context is not None:
            self._when_done(lambda: context.run(callback, self))
        else:
            self._when_done(lambda: callback(self))

    def remove_done_callback(self, callback: Callable[[AppendFuture[T]], Any]) -> int:
        """Remove a callback that was added in this event loop; return how many times it was added."""
        loop = running_loop()
        return 0 if loop is None else self._forget_in_loop(loop, callback)

    def concurrent(self) -> concurrent.futures.Future[T]:
        """Return a future of the standard library with the same outcome; it cannot be cancelled."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # from here on ``cancel`` returns False

        def finish() -> None:
            error = self.exception()
            if error is None:
                future.set_result(self.result())
            else:
                future.set_exception(error)

        self._when_done(finish)
        return future

    def _when_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called in a background thread when done."""
        self._log.when_done(self._commit, callback)

    def _call_in_loop(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], Any], context: contextvars.Context
    ) -> None:
        """Have ``callback(self)`` called in the loop that runs in this thread when done."""
        commit = self._commit
        if commit.done:
            loop.call_soon(callback, self, context=context)
        else:
            _LoopWaker.of(self._log, commit, loop).add_callback(self, callback, context)

    def _forget_in_loop(self, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], Any]) -> int:
        waker = self._commit.wakers.get(loop)
        return 0 if waker is None else int(waker.forget(self, callback))

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop; one call into the loop wakes all waiters of the same commit."""
        commit = self._commit
        if not commit.done:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            _LoopWaker.of(self._log, commit, loop).add(waiter)
            yield from waiter
        return self.result()


class PiecesFuture(AppendFuture[range]):
    """The outcome of a batch whose pieces are in several commits.

    The batch is done with its last piece. If only later pieces fail, the entries of earlier ones are in the ledger, so
    ``outcome_unknown`` of the error is set.

    Threads: any.
    """

    __slots__ = ("_first",)

    def __init__(self, log: AppendLog, first: Completion, last: Completion, ids: range) -> None:
        super().__init__(log, last, ids)
        self._first = first

    def _error(self, error: PybkError) -> PybkError:
        # A commit gets its error before later commits get theirs, so the first piece's error is known by now.
        failed = self._first.error
        if error.outcome_unknown or (failed is not None and not failed.outcome_unknown):
            return super()._error(error)
        return of_batch(error, self._value[0], self._value[-1])


def origin_of(future: AppendFuture[Any]) -> tuple[AppendLog, Completion]:
    """Return an append without its result, for a layer that makes its own futures."""
    return future._log, future._commit


def of_batch(error: PybkError, first: int, last: int) -> PybkError:
    """Return a copy of ``error`` saying that some of the entries ``first`` to ``last`` may be in the ledger."""
    unknown = without_frames(error)
    unknown.args = (f"{error}; entries {first} to {last} of the batch may be there",)
    unknown.outcome_unknown = True
    return unknown


_Callbacks = list[tuple[Callable[[Any], Any], contextvars.Context]]


def _without(callbacks: _Callbacks, callback: Callable[[Any], Any]) -> _Callbacks:
    return [pair for pair in callbacks if pair[0] != callback]


class _LoopWaker:
    """Wakes all futures and callbacks of one event loop that wait for one commit, by one call into the loop.

    Threads: the loop's, except ``__call__``.
    """

    __slots__ = ("_callbacks", "_loop", "_waiters")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: dict[AppendFuture[Any], _Callbacks] = {}

    @classmethod
    def of(cls, log: AppendLog, commit: Completion, loop: asyncio.AbstractEventLoop) -> _LoopWaker:
        """Return the waker of this commit and loop, registered with the commit."""
        waker: _LoopWaker | None = commit.wakers.get(loop)
        if waker is None:
            waker = commit.wakers[loop] = cls(loop)
            log.when_done(commit, waker)
        return waker

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Complete a future of the loop when the commit is done."""
        self._waiters.append(waiter)

    def add_callback(
        self, future: AppendFuture[Any], callback: Callable[[Any], Any], context: contextvars.Context
    ) -> None:
        """Have ``callback(future)`` called when the commit is done."""
        self._callbacks.setdefault(future, []).append((callback, context))

    def forget(self, future: AppendFuture[Any], callback: Callable[[Any], Any]) -> int:
        """Remove a callback of a future; return how many times it was added."""
        before = self._callbacks.pop(future, [])
        after = _without(before, callback)
        if after:
            self._callbacks[future] = after
        return len(before) - len(after)

    def __call__(self) -> None:
        """Wake the loop; called by a background thread when the commit is done. Does nothing if the loop is closed."""
        if not call_in(self._loop, self._wake):
            self._waiters = []
            self._callbacks = {}

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        callbacks, self._callbacks = self._callbacks, {}
        for future, pairs in callbacks.items():
            for callback, context in pairs:
                self._loop.call_soon(callback, future, context=context)


class AdvancedFuture(AppendFuture[T]):
    """An append to an advanced ledger: it is staged in a commit only when all entries before it were appended.

    Threads: any. ``_callbacks``, and ``_commit``, which is set once, before ``_is_staged``, are guarded by the ledger's
    ``location_lock``, as other callbacks are; a forked child has a new one.
    """

    __slots__ = ("_callbacks", "_descriptor", "_in_loops", "_is_staged", "_looking", "_staged")

    def __init__(self, log: AppendLog, descriptor: LedgerDescriptor, value: T) -> None:
        self._log = log
        self._descriptor = descriptor
        self._value = value
        self._is_staged = False
        self._staged = WakeUp()
        """Wakes one of the threads that wait for ``_is_staged``, which wakes the next."""
        self._callbacks: list[Callable[[], None]] = []
        # Used before it is staged. The callbacks of a loop are changed by that loop's thread alone.
        self._in_loops: dict[asyncio.AbstractEventLoop, _Callbacks] = {}
        self._looking: set[asyncio.AbstractEventLoop] = set()

    def staged(self, commit: Completion | None, failed: PybkError | None = None) -> None:
        """Set the append's commit, or the error with which it ends without one; the first call counts."""
        with self._descriptor.location_lock:
            if self._is_staged:
                return
            if commit is None:
                commit = Completion.finished(failed)
            self._commit = commit
            self._is_staged = True
            self._staged.wake()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._log.when_done(commit, callback)

    def _state(self) -> str:
        """Return "pending", "done" or "failed" with the kind of error."""
        return super()._state() if self._is_staged else "pending"

    def done(self) -> bool:
        """Return whether the append and all appends before it are durable, or the append has failed."""
        self._fail_if_stuck()
        return self._is_staged and self._commit.done

    def _fail_if_stuck(self) -> None:
        """Fail if earlier entries cannot arrive any more, because the ledger or store refuses appends for good."""
        error = self._descriptor.final_error or self._log.error
        if error is not None:
            self.staged(None, error)

    def _look(self) -> None:
        """Check at each change of the ledger whether the append has failed, until it is staged."""
        self._fail_if_stuck()
        if not self._is_staged:
            self._descriptor.when_advanced(self._look)

    def result(self, timeout: float | None = None) -> T:
        """Wait as ``AppendFuture.result`` does, first for the entries before it; arguments and errors are the same."""
        timeout = seconds_of(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_staged:
            self._fail_if_stuck()
            left = deadline - time.monotonic()
            if left <= 0 and not self._is_staged:
                raise AppendTimeoutError(
                    f"entries before {self._value} were not appended within {timeout} s; append them: until "
                    "then it is not acknowledged"
                )
            if self._staged.wait(max(0.0, min(_EARLIER_LOOK_SECONDS, left))):
                self._staged.wake()
        return super().result(None if timeout is None else max(0.0, deadline - time.monotonic()))

    def _when_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called in a background thread when done."""
        with self._descriptor.location_lock:
            waits, first = not self._is_staged, not self._callbacks
            if waits:
                self._callbacks.append(callback)
        if not waits:
            super()._when_done(callback)
        elif first:
            self._descriptor.when_advanced(self._look)

    def _call_in_loop(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], Any], context: contextvars.Context
    ) -> None:
        if self._is_staged:
            super()._call_in_loop(loop, callback, context)
            return
        if loop in self._in_loops:
            self._in_loops[loop].append((callback, context))
        else:
            self._in_loops[loop] = [(callback, context)]
            finished = partial(self._finished_in, loop)
            calls = LoopCalls.of(loop)
            self._when_done(lambda: calls.post(finished))
        if loop not in self._looking:
            self._looking.add(loop)
            loop.call_later(_EARLIER_LOOK_SECONDS, self._look_in, loop)

    def _finished_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call the callbacks of a loop, in its thread."""
        for callback, context in self._in_loops.pop(loop, ()):
            loop.call_soon(callback, self, context=context)

    def _look_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check regularly, while a callback of the loop waits, whether earlier entries can still arrive."""
        self._fail_if_stuck()
        if self._in_loops.get(loop) and not self._is_staged:
            loop.call_later(_EARLIER_LOOK_SECONDS, self._look_in, loop)
        else:
            self._looking.discard(loop)

    def _forget_in_loop(self, loop: asyncio.AbstractEventLoop, callback: Callable[[Any], Any]) -> int:
        before = self._in_loops.get(loop, [])
        if before:
            self._in_loops[loop] = _without(before, callback)
        forgotten = len(before) - len(self._in_loops.get(loop, []))
        return forgotten + (super()._forget_in_loop(loop, callback) if self._is_staged else 0)

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in an event loop."""
        if not self.done():
            waiter = asyncio.get_running_loop().create_future()

            def finish(_: object) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self.add_done_callback(finish)
            try:
                yield from waiter
            finally:
                self.remove_done_callback(finish)
        return self.result()


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
        """The appends that wait, in order; an append is removed after it was made. Guarded by ``_lock``.

        It is made at the first use, because an empty deque takes 760 bytes, and most logs have no event loop.
        """
        self._running = False
        """True if the thread runs. Guarded by ``_lock``."""

    def _disable(self) -> None:
        """Forget in a forked child what waits, because it has no thread for that: the appends are refused there."""
        self._waiting, self._running = None, False

    @property
    def is_empty(self) -> bool:
        """True if no append waits. While one waits, later ones must be added as well, which keeps the order."""
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
                in_children(self, CoroutineBacklog._disable)
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
