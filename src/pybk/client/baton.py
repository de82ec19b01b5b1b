"""Who drives: of all threads that wait for bookies, one sends and receives for all.

A lone caller does the work itself and pays no hand-over to another thread. The baton goes to one of those who still
wait when its holder has what it waited for; a background thread takes it when something is under way and nobody
waits, and is the one that runs callbacks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from pybk.storage.io.failures import start_thread
from pybk.storage.log.commit import Commit

logger = logging.getLogger(__name__)

_TICK_SECONDS: Final = 0.002
_TICKS_UNTIL_REST: Final = 20


class Work(Protocol):
    """What is driven. All of it but ``interrupt`` is called by the holder of the baton alone."""

    def turn(self) -> None:
        """Send what there is, wait for what comes, and act on it; returns after ``interrupt``, too."""

    def busy(self) -> bool:
        """Tell whether anything is under way that somebody waits for."""

    def idle(self) -> bool:
        """Do what is done when nothing else is; tell whether there was anything."""

    def interrupt(self) -> None:
        """Have the turn that is waiting now, or else the next one, return at once; any thread."""


class Baton:
    """One holder at a time.

    Attributes:
        finished: Whether this turn has finished anything, which may be what its holder waits for.
        woke: Whether this turn has woken threads that wait, which may be about to ask for more.

    Invariant: An exception at any line, KeyboardInterrupt included, leaves the baton with nobody or with one who runs.

    Threads: any, except where a method says who calls it.
    """

    def __init__(self, work: Work, name: str) -> None:
        self._work = work
        self._mutex = threading.Lock()
        self._holder: threading.Lock | None = None
        self._waiting: dict[threading.Lock, Commit] = {}
        self._callbacks: deque[Callable[[], None]] = deque()
        self._kick = threading.Lock()
        self._kick.acquire()
        self._ticking = False
        self._unseen = False
        self.finished = False
        self.woke = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        start_thread(self._thread)

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self, commit: Commit, *, news: bool = True) -> None:
        """Return when ``commit`` is done, driving meanwhile if nobody does.

        Args:
            commit: What is waited for.
            news: Whether whoever drives now has to look for something that it does not know of yet.
        """
        token = threading.Lock()
        try:
            try:
                self._wait(commit, token, news=news)
            finally:
                self._leave(token)
        except BaseException:
            # An exception inside the line above must not keep the baton; leaving twice is harmless.
            self._leave(token)
            raise

    def _wait(self, commit: Commit, token: threading.Lock, *, news: bool) -> None:
        with self._mutex:
            if commit.done:
                return
            leads = self._holder is None
            if leads:
                self._holder = token
            else:
                token.acquire()
                self._waiting[token] = commit
                commit.waiters.append(token)
        if not leads:
            if news:
                self._work.interrupt()
            token.acquire()
        while not commit.is_done():
            self._turn()

    def _turn(self) -> None:
        """Do one turn, and then let those run whom it woke: what they append next shall be sent together."""
        self.finished = self.woke = False
        self._work.turn()
        if self.woke:
            time.sleep(0)

    def _leave(self, token: threading.Lock, *, idled: bool = False) -> None:
        """Pass the baton on, if ``token`` holds it: to one who waits, else to the background if there is work.

        Args:
            token: Who leaves.
            idled: Whether it did the idle work, so that none is left.
        """
        with self._mutex:
            self._waiting.pop(token, None)
            if token.locked():  # whoever left waits no more, and must not be handed the baton later
                token.release()
            if self._holder is not token:
                return
            for waiter, commit in self._waiting.items():
                if not waiter.locked():
                    continue
                if not commit.done:
                    self._holder = waiter
                    waiter.release()
                    return
                waiter.release()  # an interrupt kept it from being told
            self._holder = None
            self._unseen = not idled
            if not self._ticking or self._callbacks or self._work.busy():
                self._kick_background()

    def when_done(self, commit: Commit, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by the background thread once ``commit`` is done; at once if all is over."""
        with self._mutex:
            if commit.done:
                self._callbacks.append(callback)
            else:
                commit.callbacks.append(callback)
            self._kick_background()
        if self._stopping:
            self._run_callbacks()

    def finish(self, commit: Commit) -> None:
        """Mark a commit done, wake who waits for it and have its callbacks run; may be repeated."""
        with self._mutex:
            commit.done = self.finished = True
            if commit.callbacks:
                self._callbacks.extend(commit.callbacks)
                commit.callbacks = []
                self._kick_background()
            for waiter in commit.waiters:
                if waiter.locked():
                    waiter.release()
                    self.woke = True
        if self._stopping:  # there is no background any more
            self._run_callbacks()

    def kick(self) -> None:
        """See to it that somebody drives soon, although nobody waits."""
        if self._holder is None:
            with self._mutex:
                self._kick_background()
        else:
            self._work.interrupt()

    # ---- the background ------------------------------------------------------------------------------------------

    def _kick_background(self) -> None:
        if self._kick.locked():
            self._kick.release()

    def _run(self) -> None:
        """Body of the background thread."""
        while True:
            self._kick.acquire()
            if self._stopping:
                return
            try:
                while self._drive():
                    pass
                self._tick()
            except BaseException:  # as a callback may raise; without this thread nobody would drive for those who left
                logger.exception("the client's background thread goes on after an exception")
                with self._mutex:
                    self._kick_background()

    def _drive(self) -> bool:
        """Do one turn if something is under way and nobody else drives; tell whether it did."""
        self._run_callbacks()
        token = threading.Lock()
        token.acquire()
        with self._mutex:
            if self._holder is not None or self._stopping or not self._work.busy():
                return False
            self._holder = token
        try:
            self._turn()
        except Exception:
            logger.exception("driving the client failed; what was under way is given up")
        finally:
            self._leave(token)
        self._run_callbacks()
        return True

    def _tick(self) -> None:
        """Look every two milliseconds for what is done when nothing else is, until there is none for a while."""
        self._ticking = True
        try:
            self._tick_until_rest()
        finally:
            with self._mutex:
                self._ticking = False
                if self._unseen:  # by somebody who relied on a tick that did not come
                    self._kick_background()

    def _tick_until_rest(self) -> None:
        ticks = 0
        while ticks < _TICKS_UNTIL_REST and not self._stopping and not self._callbacks:
            if self._kick.acquire(timeout=_TICK_SECONDS):
                with self._mutex:  # somebody else may kick just now, too
                    self._kick_background()
                break
            with self._mutex:
                if self._holder is None and self._work.busy():
                    self._kick_background()
                    continue
            ticks = 0 if self._do_idle_work() else ticks + 1

    def _do_idle_work(self) -> bool:
        token = threading.Lock()
        token.acquire()
        with self._mutex:
            if self._holder is not None:
                return True
            self._holder = token
        try:
            return self._work.idle()
        except Exception:
            logger.exception("looking after the client's links failed")
            return False
        finally:
            self._leave(token, idled=True)

    def _run_callbacks(self) -> None:
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:
                logger.exception("a callback of a finished append raised; the append itself is done")

    # ---- closing -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the background thread; nothing may be under way any more."""
        self._stopping = True
        with self._mutex:
            self._kick_background()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._run_callbacks()

    def after_fork(self) -> None:
        """Be of no use in a forked child, and lock up nobody there."""
        self._mutex = threading.Lock()
        self._stopping = True
