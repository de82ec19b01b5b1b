"""``Opening``: the awaitable for a handle that a thread opens, so that the event loop does not block."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from pybk.deferral import asyncio
from pybk.errors import LogLockedError
from pybk.manager.append_future import duration_of
from pybk.threads.call_threads import call_in, in_own_thread, in_thread

if TYPE_CHECKING:
    from pybk.metadata.store import Watch

_LOCK_LOOK_SECONDS: Final = 1.0
"""The interval at which an opening checks a lock without a release: its log may have been closed or deleted."""


class Closing(Protocol):
    """A handle that has ``close``."""

    def close(self) -> None:
        """Close the handle."""


H = TypeVar("H", bound=Closing)
D = TypeVar("D")

LockWatch = partial["Watch"]
"""Has a function, its only open argument, called after a lock was released, until the watch is cancelled."""


class Opening(Generic[H], Awaitable[H]):
    """A handle that a thread opens: ``await`` it, or use ``async with``, which also closes the handle at the end.

    The handle is opened only then. An ``Opening`` that is garbage-collected unused warns, as a coroutine does. If the
    awaiting task is cancelled, the thread closes the handle once it is open.

    Args:
        call_text: The call that made it, as the caller would write it; for the warning and ``repr``.
        call: Opens the handle.
    """

    def __init__(self, call_text: str, call: Callable[[], H]) -> None:
        self._call_text = call_text
        self._call = call
        self._handle: H | None = None
        self._begun = False

    def __repr__(self) -> str:
        """Name the call, and say whether it was awaited."""
        return f"<Opening {self._call_text}, {'' if self._begun else 'not '}awaited>"

    def __del__(self) -> None:
        """Warn if the object was never awaited."""
        if not self._begun:
            warnings.warn(
                f"{self._call_text} was never awaited, so it did nothing: await it, or use async with",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )

    def __await__(self) -> Generator[Any, None, H]:
        """Open the handle; the await returns it."""
        self._begun = True
        return self._open().__await__()

    async def __aenter__(self) -> H:
        """Open and return the handle."""
        self._handle = await self._open()
        return self._handle

    async def _open(self) -> H:
        self._begun = True
        return await self._made(self._call, in_own_thread)

    async def _made(self, call: Callable[[], H], in_a_thread: Callable[[Callable[[], H]], Awaitable[H]]) -> H:
        return await _delivered(_Delivery(call, _close), in_a_thread)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the handle as its own ``__aexit__`` does."""
        handle: Any = self._handle
        await handle.__aexit__(kind, error, traceback)


class LockedOpening(Opening[H]):
    """An ``Opening`` that waits for a lock of a log to be released; no thread is held while it waits.

    Of those that wait for one lock in an event loop, the first one looks for its release; the others sleep until it is
    their turn, because it got the lock, gave up or was cancelled. So a release wakes one of them, and they become the
    owner in the order in which they came.

    Args:
        call_text: As for ``Opening``.
        call: Opens the handle, given ``options``; raises LogLockedError while the lock is held.
        options: The options that the caller gave. ``wait`` is the time to wait, in seconds; with ``steal`` the lock is
            then taken from its holder.
        watch: Has a function called after the lock was released.
    """

    def __init__(self, call_text: str, call: Callable[..., H], options: Mapping[str, Any], watch: LockWatch) -> None:
        super().__init__(call_text, partial(call, **{**options, "wait": 0.0}))
        self._attempt = partial(call, **{**options, "wait": 0.0, "steal": False})
        self._wait = options.get("wait", 0.0)
        self._watch = watch

    async def _open(self) -> H:
        self._begun = True
        deadline = asyncio.get_running_loop().time() + duration_of(self._wait, "wait")
        turn = _turn_at(self._watch)
        if await _has_taken(turn, deadline):
            try:
                opened = await self._opened_by(deadline)
            finally:
                turn.release()
            if opened is not None:
                return opened
        return await super()._open()

    async def _opened_by(self, deadline: float) -> H | None:
        """Open the handle when the lock is released; None if it is not until the deadline."""
        loop, released = asyncio.get_running_loop(), asyncio.Event()
        watch: Watch | None = None

        def wake() -> None:
            call_in(loop, released.set)

        try:
            while (left := deadline - loop.time()) > 0:
                released.clear()
                with suppress(LogLockedError):
                    return await self._made(self._attempt, in_thread)
                if watch is None:
                    delivery = _Delivery(partial(self._watch, wake), _cancel)
                    watch = await _delivered(delivery, in_thread)
                else:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(released.wait(), min(left, _LOCK_LOOK_SECONDS))
        finally:
            if watch is not None:
                watch.cancel()
        return None


_TURNS: Final[WeakValueDictionary[object, asyncio.Lock]] = WeakValueDictionary()
"""The turn to look for the release of a lock, by event loop and lock, while openings wait for it."""


def _turn_at(watch: LockWatch) -> asyncio.Lock:
    """Return the turn of the running loop at a lock; those who wait for it get it in the order of their coming."""
    return _TURNS.setdefault((asyncio.get_running_loop(), watch.func, watch.args), asyncio.Lock())


async def _has_taken(turn: asyncio.Lock, deadline: float) -> bool:
    """Take a turn; returns False if it does not come until a deadline."""
    try:
        async with asyncio.timeout_at(deadline):
            return await turn.acquire()
    except TimeoutError:
        return False


class _Delivery(Generic[D]):
    """Hands the handle that a thread opens to the awaiting task; closes it if that task was cancelled meanwhile.

    Args:
        call: Opens it.
        let_go: Ends it.
    """

    def __init__(self, call: Callable[[], D], let_go: Callable[[D], None]) -> None:
        self._call = call
        self._let_go = let_go
        self._lock = threading.Lock()
        """Guards ``_made`` and ``_refused``: exactly one thread closes a handle that was refused."""
        self._made: D | None = None
        self._refused = False

    def make(self) -> D:
        """Open it; runs in the opening thread, which continues even if the awaiting task was cancelled."""
        made = self._call()
        with self._lock:
            self._made = made
            refused = self._refused
        if refused:
            self._let_go(made)
        return made

    def refuse(self) -> None:
        """Have it ended: by the opening thread, or by a new thread if it is already open."""
        with self._lock:
            self._refused = True
            made = self._made
        if made is not None:
            threading.Thread(target=self._let_go, args=(made,), name="pybk-close").start()


async def _delivered(delivery: _Delivery[D], in_a_thread: Callable[[Callable[[], D]], Awaitable[D]]) -> D:
    """Return the handle that a thread opens; if the task is cancelled meanwhile, the handle is closed."""
    try:
        return await in_a_thread(delivery.make)
    except asyncio.CancelledError:
        delivery.refuse()
        raise


def _close(handle: Closing) -> None:
    handle.close()


def _cancel(watch: Watch) -> None:
    watch.cancel()
