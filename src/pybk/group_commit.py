"""Group commit: of all threads that wait for something to become durable, one does the work for all.

The storage log (``storage/log/log.py``: write and sync one commit) and the client of a cluster (``client/driver.py``:
send, receive and act once) both use this core. What a step of the work is, they say by a ``Work``.

Theory of operation
===================

**Completions.** Threads, futures and event loops wait for a ``Completion``: a commit of the log, a batch of appends, a
request to bookies. It is done once for all its entries, so completing a thousand appends sets one flag.
Its states are *pending* → *done* (``error`` says whether it succeeded), and it never leaves *done*.

**Leader and followers.** The leadership is a field, ``_leader``; it holds the token of the thread that leads, or None.
A thread that calls ``wait`` while there is no leader becomes the leader: it calls ``Work.step`` until its own
completion is done. A lone appender so does its own work and pays for no hand-over. A thread that calls ``wait`` while
another leads becomes a follower: it leaves its token, a locked lock, with the completion, and blocks on it. Its token
is unlocked when the completion is done, or when it is handed the leadership; then it leads until its completion is
done. ``lead`` queues for the leadership in the same way, in order to do something that only a leader may do.

**Hand-over.** A leader whose completion is done leaves. It hands the leadership to the first follower of the oldest
completion that is followed and not done. If there is none and work is pending, it wakes the background thread.

**The background thread** leads only if no other thread does: for futures and for entries that no thread waits for, and
for what ``Work`` does when it is idle. It sleeps until it is kicked, or for ``Work.sleep_seconds``. It alone runs
callbacks, so that a callback may append, and no appending thread runs foreign code. After ``stop`` there is no such
thread: callbacks then run in the thread that completes.

**Locks.** ``mutex`` guards ``_leader``, the followers and callbacks of completions, ``_callbacks``, ``_followed`` and
``_rests``. Users share it: the log also guards its forming commit by it, so that an append takes one lock. The mutex
is held for a few instructions and never during a step. A token is locked by its own thread, under the mutex, and
unlocked under it.

**Interrupts.** Python raises KeyboardInterrupt between any two lines of the main thread. ``wait`` and ``lead`` leave
in a ``finally``, and again if an interrupt hits that, because leaving twice is harmless: only the leader's own token
changes the leadership. A follower that leaves unlocks its token, and a hand-over passes over unlocked tokens, so that
the leadership is always with a thread that runs, or with none. A step that was interrupted is called again by the next
leader; that this is possible is the duty of ``Work.step``. A leader that is interrupted after a completion was done
and before all followers were woken leaves it in ``_followed``: the next leader that leaves wakes them.

**Why no wake-up is lost.** A thread becomes a follower under the mutex, after it has seen that the completion is not
done and that there is a leader; that leader looks for followers under the mutex before it leaves. Work that is staged
without waiting is followed by ``kick``. If there is a leader then, it finds the work pending when it leaves; if not,
the background thread is awake after the kick, and looks for pending work after it took the kick.

**Fork.** A child has only the thread that forked. ``after_fork`` replaces the mutex, which another thread may have
held, and marks the background thread as gone. The user marks its completions done, so that nothing in the child waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar

from pybk.errors import PybkError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Completion:
    """The outcome of something that threads, futures and event loops wait for.

    Attributes:
        done: Whether it is over; set once, and last.
        error: Why it failed; None if it succeeded, or is pending. Set before ``done``.
        wanted: Whether a thread, a future or a change waits for it. The log leaves a commit that is not wanted to its
            clock.
        unseen: Whether the leader may pause without knowing of it: the next thread that waits for it ends the pause.
        followers: Tokens of the threads that wait; those that have left are unlocked. Guarded by ``GroupCommit.mutex``.
        callbacks: What the background thread calls once it is done. Guarded by ``GroupCommit.mutex``.
        wakers: What ``pybk.futures`` wakes event loops with, by loop. Each is changed by the thread of its loop alone.
    """

    __slots__ = ("callbacks", "done", "error", "followers", "unseen", "wakers", "wanted")

    def __init__(self) -> None:
        self.done = False
        self.error: PybkError | None = None
        self.wanted = False
        self.unseen = False
        self.followers: list[threading.Lock] = []
        self.callbacks: list[Callable[[], None]] = []
        self.wakers: dict[Any, Any] = {}

    @classmethod
    def finished(cls, error: PybkError | None) -> Self:
        """Return a completion that is done already, with this error or none."""
        completion = cls()
        completion.error = error
        completion.done = True
        return completion


class Work(Protocol):
    """What a group commit works on.

    Attributes:
        idles: Whether there is work for ``idle``: a leader that leaves then wakes a background thread that rests.
    """

    idles: bool

    def step(self) -> None:
        """Do one step towards the completions that are pending, and complete what it finishes.

        Called by the leader. An interrupt may end it at any line; the next leader then calls it again.
        """

    def is_pending(self) -> bool:
        """Return whether a step is wanted although no thread may wait for it. Called with the mutex held."""

    def sleep_seconds(self) -> float:
        """Return how long the background thread may sleep before it calls ``idle``; -1 if until it is kicked.

        Called by the background thread with the mutex held.
        """

    def idle(self) -> None:
        """Do what is done when nothing is pending. Called by the background thread, as the leader, after its sleep."""

    def interrupt(self) -> None:
        """Have the step that pauses now, or else the next one, return at once. Threads: any."""

    def background_ended(self) -> None:
        """Take note that the background thread has ended before ``stop``: nothing is done for futures any more."""


class GroupCommit:
    """The leadership of one ``Work``, and its background thread.

    Args:
        work: What is led.
        name: Name of the background thread.

    Attributes:
        mutex: See above; the user may guard its own state by it, too.
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
        self._work = work
        self._leader: threading.Lock | None = None
        self._followed: dict[Completion, None] = {}
        """Completions with followers that were not woken, in the order in which they were first waited for."""
        self._callbacks: deque[Callable[[], None]] = deque()
        """Callbacks of what is done, in order."""
        self._kick = threading.Lock()
        """Locked unless the background thread was kicked and has not woken yet."""
        self._kick.acquire()
        self._rests = False
        """Whether the background thread has idle work, and sleeps, or is about to, until it is kicked."""
        self._stopping = False

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self, completion: Completion) -> None:
        """Return when ``completion`` is done; lead meanwhile if no other thread does.

        Raises:
            BaseException: What ``Work.step`` raised in this thread; the completion may be pending then.
        """
        token = threading.Lock()
        try:
            try:
                self._enter(token, completion)
                while not completion.done:
                    self._work.step()
            finally:
                self._leave(token)
        except BaseException:
            # An exception inside the line above must not keep the leadership; leaving twice is harmless.
            self._leave(token)
            raise

    def lead(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns, called by this thread as the leader, once the leadership is handed to it."""
        token = threading.Lock()
        try:
            try:
                self._enter(token, Completion())  # never done, so this returns with the leadership
                return call()
            finally:
                self._leave(token)
        except BaseException:
            self._leave(token)
            raise

    def _enter(self, token: threading.Lock, completion: Completion) -> None:
        """Return as the leader, or when ``completion`` is done."""
        with self.mutex:
            if completion.done:
                return
            completion.wanted = True
            if self._leader is None:
                self._leader = token
                return
            token.acquire()
            completion.followers.append(token)
            self._followed[completion] = None
        if completion.unseen:
            self._work.interrupt()
            completion.unseen = False
        token.acquire()

    def _leave(self, token: threading.Lock) -> None:
        """Follow no more, and hand the leadership over if ``token`` has it; may be repeated."""
        with self.mutex:
            if token.locked():  # the thread waits no more, and must not be handed the leadership later
                token.release()
            if self._leader is token:
                if self._followed:
                    self._hand_over()
                else:
                    self._leader = None
                if self._leader is None and (self._rests or self._callbacks or self._work.is_pending()):
                    self.kick_background()
        if self._stopping and self._callbacks:  # there is no background thread any more
            self._run_callbacks()

    def _hand_over(self) -> None:
        """Make a follower the leader, or no thread if there is none; the leader calls it with the mutex held."""
        while self._followed:
            completion = next(iter(self._followed))
            if completion.done:
                self._wake(completion)  # an interrupt kept a leader from it
                continue
            for follower in completion.followers:
                if follower.locked():
                    self._leader = follower
                    follower.release()
                    return
            del self._followed[completion]  # all of its followers have left
        self._leader = None

    # ---- completing ----------------------------------------------------------------------------------------------

    def finish(self, completion: Completion) -> None:
        """Mark a completion done, wake its followers and have its callbacks called; may be repeated."""
        with self.mutex:
            self.complete(completion)
        if self._stopping:  # there is no background thread any more
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
        """Unlock the tokens of a completion's followers; the caller holds the mutex. May be repeated."""
        for follower in completion.followers:
            if follower.locked():
                follower.release()
                self.woke = True
        self._followed.pop(completion, None)

    def when_done(self, completion: Completion, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by the background thread once ``completion`` is done; here, after ``stop``.

        A callback that raises is logged, and keeps no other from being called.
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
        """Have the background thread lead soon if no thread leads: what was staged may have no thread that waits."""
        if self._leader is None and self._kick.locked():
            with self.mutex:
                self.kick_background()

    def announce(self) -> None:
        """Have what was staged seen soon: by the leader, whose pause this ends, else by the background thread."""
        if self._leader is None:
            self.kick()
        else:
            self._work.interrupt()

    # ---- the background thread -----------------------------------------------------------------------------------

    def kick_background(self) -> None:
        """Wake the background thread; the caller holds the mutex."""
        if self._kick.locked():
            self._kick.release()

    def _run(self) -> None:
        """Body of the background thread."""
        try:
            while True:
                with self.mutex:
                    seconds = self._work.sleep_seconds()
                    self._rests = seconds < 0 and self._work.idles
                kicked = self._kick.acquire(timeout=seconds)
                if self._stopping:
                    return
                try:
                    while self._lead_for_futures():
                        pass
                    if not kicked and self._work.idles:
                        self._lead_idle()
                except BaseException:  # a callback may raise anything; those after it are called all the same
                    logger.exception("the thread %s continues after an exception", self.background.name)
                    with self.mutex:
                        self.kick_background()
        finally:
            if not self._stopping:
                self._work.background_ended()

    def _lead_for_futures(self) -> bool:
        """Lead for one step if one is pending and no thread leads; return whether it did."""
        self._run_callbacks()
        token = threading.Lock()
        with self.mutex:
            if self._leader is not None or self._stopping or not self._work.is_pending():
                return False
            self._leader = token
        try:
            self._work.step()
        finally:
            self._leave(token)
        self._run_callbacks()
        return True

    def _lead_idle(self) -> None:
        """Lead for the work that is done when nothing is pending, unless another thread leads."""
        token = threading.Lock()
        with self.mutex:
            if self._leader is not None or self._stopping:
                return
            self._leader = token
        try:
            self._work.idle()
        finally:
            self._leave(token)

    def _run_callbacks(self) -> None:
        # ``pybk.closing`` knows this function by its name: a close that a callback calls must not wait for this thread.
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
        """End the background thread, and run the callbacks that it left; may be repeated."""
        self._stopping = True
        with self.mutex:
            self.kick_background()
        if threading.current_thread() is not self.background:
            self.background.join()
        self._run_callbacks()

    def after_fork(self) -> None:
        """Be of no use in a forked child, where no other thread runs: lock nothing, and start nothing."""
        self.mutex = threading.Lock()
        self._stopping = True
