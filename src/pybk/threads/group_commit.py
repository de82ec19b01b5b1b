"""Group commit: one of the threads that wait for entries to become durable does the work for all.

Two users share this core, each with a ``Work`` that defines one step: the storage log (``storage/log/log.py``: write
and sync one commit) and the client of a cluster (``client/driver.py``: send, receive and act once).

Theory of operation
===================

**Completions.** Threads, futures and event loops wait for a ``Completion``: a commit of the log, a batch of appends, or
a conversation with bookies. It covers all its entries, so completing a thousand appends sets one flag. Its states are
*pending* → *done* (``error`` says whether it succeeded), and it never leaves *done*.

**Leader and followers.** The leadership is a field, ``leader``; it holds the token of the thread that leads, or None.
A thread that calls ``wait`` while there is no leader becomes the leader: it calls ``Work.step`` until its own
completion is done. So a single appending thread does its own work, without a switch of threads. A thread that calls
``wait`` while another leads becomes a follower: it leaves its token, a locked lock, with the completion, and blocks on
it. Its token is unlocked when the completion is done, or when it is handed the leadership; then it leads until its
completion is done. ``lead`` waits for the leadership in the same way, and makes one call that only a leader may make.

**Hand-over.** A leader whose completion is done leaves. It hands the leadership to the first follower of the oldest
completion that is followed and not done. If there is none and work is pending, it wakes the background thread.

**The background thread** leads only if no other thread does: for futures, for entries that no thread waits for, and for
``Work.idle``. It sleeps until it is kicked, or for ``Work.sleep_seconds``. Callbacks run in this thread alone, so a
callback may append, and no appending thread runs callers' code. After ``stop`` this thread does not exist: callbacks
then run in the thread that completes.

**Locks.** ``mutex`` guards ``leader``, the followers and callbacks of completions, ``_callbacks``, ``followed`` and
``rests``. Users share it: the log also guards its forming commit by it, so an append takes one lock. The mutex is
held for a few instructions and never during a step. A token is locked by its own thread, under the mutex, and unlocked
under it.

**Interrupts.** ``wait`` and ``lead`` run in a guard (``interrupts.py``), so a signal interrupts no step. Its handler is
called at a checkpoint: before a step, and while a follower waits. If it raises, the thread leaves: a leader hands the
leadership over, and a follower unlocks its token. A hand-over skips unlocked tokens, so a thread that has left never
becomes the leader.

**Why no wake-up is lost.** A thread becomes a follower under the mutex, after it has seen, under the same mutex, a
completion that is not done and a leader. That leader looks for followers under the mutex before it leaves. Work that is
staged without waiting is followed by ``kick``. If there is a leader then, it finds the work pending when it leaves. If
there is none, the kick wakes the background thread, which looks for pending work after it has taken the kick.

**Fork.** A child has only the thread that forked. ``after_fork`` replaces the mutex, which another thread may have
held, and marks the background thread as stopped. The user marks its completions done, so no call in the child waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, Self, TypeVar

from pybk.errors import PybkError
from pybk.threads.interrupts import acquire, checkpoint, guarded

logger = logging.getLogger(__name__)

_SHORT_SECONDS: Final = 0.01
"""A leader that leaves need not wake a background thread that sleeps no longer than this."""

T = TypeVar("T")


class Completion:
    """The outcome of something that threads, futures and event loops wait for.

    Attributes:
        done: Whether the outcome is known; set once, and last.
        error: The reason why it failed; None if it succeeded, or is pending. Set before ``done``.
        wanted: Whether a thread, a future or a change waits for it. The log commits one that is not wanted after
            ``BUFFERED_NS``.
        unseen: Whether the leader may pause although it has not seen the completion; the next thread that waits for it
            interrupts the pause.
        followers: Tokens of the threads that wait; those that have left are unlocked. Guarded by ``GroupCommit.mutex``.
        callbacks: Called by the background thread once it is done. Guarded by ``GroupCommit.mutex``.
        kept: The entries that a log's writer appends again if the batch is lost (``KeepingLog``); None keeps nothing.
        wakers: For each event loop, the object by which ``pybk.manager.append_future`` wakes it; changed by the loop's
            thread alone.
    """

    __slots__ = ("callbacks", "done", "error", "followers", "kept", "unseen", "wakers", "wanted")

    def __init__(self) -> None:
        self.done = False
        self.error: PybkError | None = None
        self.wanted = False
        self.unseen = False
        self.followers: list[threading.Lock] = []
        self.callbacks: list[Callable[[], None]] = []
        self.kept: list[Any] | None = None
        self.wakers: dict[Any, Any] = {}

    @classmethod
    def finished(cls, error: PybkError | None) -> Self:
        """Return a completion that is done, with the error given."""
        completion = cls()
        completion.error = error
        completion.done = True
        return completion


class Work(Protocol):
    """The work that the leader of a group commit does.

    Attributes:
        idles: Whether ``idle`` does anything. If so, a leader that leaves wakes a background thread that rests.
    """

    idles: bool

    def step(self) -> None:
        """Do one step towards the pending completions, and complete those that it finishes.

        Called by the leader. In a guard it takes ``interrupts.SLICE_SECONDS`` at most, and what it has to do.
        """

    def is_pending(self) -> bool:
        """Return whether a step is wanted although no thread may wait for it. Called with the mutex held."""

    def sleep_seconds(self) -> float:
        """Return the longest sleep of the background thread before it calls ``idle``; -1 to sleep until a kick.

        Called by the background thread with the mutex held.
        """

    def idle(self) -> None:
        """Do work for which nothing may be pending. Called by the background thread, as leader, after its sleep."""

    def interrupt(self) -> None:
        """End the pause of the current step, or else of the next one. Threads: any."""

    def background_ended(self) -> None:
        """Handle the end of the background thread before ``stop``; futures are not completed any more."""


class GroupCommit:
    """The leadership of one ``Work``, and its background thread.

    Args:
        work: The work that the leader does.
        name: Name of the background thread.

    Attributes:
        mutex: See "Locks" above; the user may guard its own state by it as well.
        background: The background thread. The user starts it once ``work`` can be called.
        completed: Whether anything was completed since the user cleared this; for the leader.
        woke: Whether followers were woken since the user cleared this; for the leader.

    Threads: any, except where a method says who calls it.
    """

    def __init__(self, work: Work, name: str) -> None:
        self.mutex = threading.Lock()
        self.background = threading.Thread(target=self._run, name=name, daemon=True)
        self.completed = False
        self.woke = False
        self.work = work
        """The work of a leader."""
        self.leader: threading.Lock | None = None
        """The object that the leading thread waits on; None without a leader."""
        self.followed: dict[Completion, None] = {}
        """Completions whose followers were not woken, by when the first began to wait. Guarded by ``mutex``."""
        self._callbacks: deque[Callable[[], None]] = deque()
        """Callbacks of done completions, in order. Added under ``mutex``."""
        self.kick_lock = threading.Lock()
        """Locked unless the background thread was kicked and has not woken yet."""
        self.kick_lock.acquire()
        self.rests = False
        """True if there is idle work, and the background thread sleeps for long, or until it is kicked.

        Guarded by ``mutex``.
        """
        self._stopping = False

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self, completion: Completion) -> None:
        """Return when ``completion`` is done; lead meanwhile if no other thread does.

        Raises:
            BaseException: Raised by ``Work.step``, or by the handler of a signal, in this thread; the completion may
                still be pending.
        """
        guarded(self._wait, completion)

    def _wait(self, completion: Completion) -> None:
        token = threading.Lock()
        try:
            with self.mutex:
                completion.wanted = True
                leads = self.leader is None and not completion.done
                if leads:
                    self.leader = token
            if not leads:
                self._enter(token, completion)
            while not completion.done:
                checkpoint()
                self.work.step()
        finally:
            self._leave(token)

    def lead(self, call: Callable[[], T]) -> T:
        """Wait for the leadership, call ``call`` as the leader, and return its result; ``call`` ends by itself."""
        return guarded(self._lead, call)

    def _lead(self, call: Callable[[], T]) -> T:
        token = threading.Lock()
        try:
            self._enter(token, Completion())  # never done, so this returns with the leadership
            return call()
        finally:
            self._leave(token)

    def _enter(self, token: threading.Lock, completion: Completion) -> None:
        """Return as the leader, or when ``completion`` is done."""
        with self.mutex:
            if completion.done:
                return
            completion.wanted = True
            if self.leader is None:
                self.leader = token
                return
            token.acquire()
            completion.followers.append(token)
            self.followed[completion] = None
        if completion.unseen:
            self.work.interrupt()
            completion.unseen = False
        acquire(token)

    def _leave(self, token: threading.Lock) -> None:
        """Stop waiting, and hand the leadership over if ``token`` has it."""
        with self.mutex:
            if token.locked():  # the thread stops waiting, so it must not become the leader later
                token.release()
            if self.leader is token:
                if self.followed:
                    self._hand_over()
                else:
                    self.leader = None
                if self.leader is None and (self.rests or self._callbacks or self.work.is_pending()):
                    self.kick_background()
        if self._stopping and self._callbacks:  # the background thread has ended
            self._run_callbacks()

    def _hand_over(self) -> None:
        """Make a follower the leader, or no thread if there is none; the leader calls it with the mutex held."""
        while self.followed:
            completion = next(iter(self.followed))
            for follower in completion.followers:
                if follower.locked():
                    self.leader = follower
                    follower.release()
                    return
            del self.followed[completion]  # all of its followers have left
        self.leader = None

    # ---- completing ----------------------------------------------------------------------------------------------

    def finish(self, completion: Completion) -> None:
        """Mark a completion done, wake its followers and queue its callbacks; may be repeated."""
        with self.mutex:
            self.complete(completion)
        if self._stopping:  # the background thread has ended
            self._run_callbacks()

    def complete(self, completion: Completion) -> None:
        """Do what ``finish`` does; the caller holds the mutex, and is the leader."""
        completion.done = self.completed = True
        if completion.callbacks:
            self._callbacks.extend(completion.callbacks)
            completion.callbacks = []
            self.kick_background()
        if completion.followers:
            self._wake(completion)

    def _wake(self, completion: Completion) -> None:
        """Unlock the tokens of a completion's followers; the caller holds the mutex."""
        for follower in completion.followers:
            if follower.locked():
                follower.release()
                self.woke = True
        self.followed.pop(completion, None)

    def when_done(self, completion: Completion, callback: Callable[[], None]) -> None:
        """Have the background thread call ``callback`` once ``completion`` is done; after ``stop``, call it here.

        A callback that raises is logged; the others are called nevertheless.
        """
        with self.mutex:
            completion.wanted = True
            if completion.done:
                self._callbacks.append(callback)
            else:
                completion.callbacks.append(callback)
            self.kick_background()
        if self._stopping:
            self._run_callbacks()

    def kick(self) -> None:
        """Wake the background thread if no thread leads, because no thread may wait for what was staged."""
        if self.leader is None and self.kick_lock.locked():
            with self.mutex:
                self.kick_background()

    def announce(self) -> None:
        """End the pause of the leader, or wake the background thread if none leads, because work was staged."""
        if self.leader is None:
            self.kick()
        else:
            self.work.interrupt()

    # ---- the background thread -----------------------------------------------------------------------------------

    def kick_background(self) -> None:
        """Wake the background thread. Takes no lock, so a finaliser may call it."""
        with suppress(RuntimeError):  # it is released already
            self.kick_lock.release()

    def _run(self) -> None:
        """Body of the background thread."""
        try:
            while True:
                with self.mutex:
                    seconds = self.work.sleep_seconds()
                    self.rests = self.work.idles and not 0 <= seconds <= _SHORT_SECONDS
                kicked = self.kick_lock.acquire(timeout=seconds)
                if self._stopping:
                    return
                try:
                    while self._lead_for_futures():
                        pass
                    if not kicked and self.work.idles:
                        self._lead_idle()
                except BaseException:  # also of a callback; those after it are called all the same
                    logger.exception("the thread %s continues after an exception", self.background.name)
                    with self.mutex:
                        self.kick_background()
        finally:
            if not self._stopping:
                self.work.background_ended()

    def _lead_for_futures(self) -> bool:
        """Lead for one step if one is pending and no thread leads; return whether it did."""
        self._run_callbacks()
        token = threading.Lock()
        with self.mutex:
            if self.leader is not None or self._stopping or not self.work.is_pending():
                return False
            self.leader = token
        try:
            self.work.step()
        finally:
            self._leave(token)
        self._run_callbacks()
        return True

    def _lead_idle(self) -> None:
        """Call ``Work.idle`` as the leader, unless another thread leads."""
        token = threading.Lock()
        with self.mutex:
            if self.leader is not None or self._stopping:
                return
            self.leader = token
        try:
            self.work.idle()
        finally:
            self._leave(token)

    def _run_callbacks(self) -> None:
        # ``pybk.manager.handle`` finds this function by its name, because a close in a callback must not wait for this
        # thread.
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:
                logger.exception("a callback of a finished append raised; the append itself is done")

    # ---- the end -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the background thread, and run the callbacks that it has not run; may be repeated."""
        self._stopping = True
        with self.mutex:
            self.kick_background()
        if threading.current_thread() is not self.background:
            self.background.join()
        self._run_callbacks()

    def after_fork(self) -> None:
        """Prepare for a forked child, which has one thread: free the mutex, and use no background thread.

        Callbacks and followers of the parent are dropped here, because the parent's threads serve them there.
        """
        self.mutex = threading.Lock()
        self.leader = None
        self.followed = {}
        self._callbacks = deque()
        self._stopping = True
