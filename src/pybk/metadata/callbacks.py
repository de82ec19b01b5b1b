"""The callback thread of a metadata store, which runs the callbacks of watches and of ended sessions.

One thread runs them one after the other, so a callback needs no lock against other callbacks of the same store. A
callback that raises MetadataUnreachableError runs again after ``RETRY_S``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from pybk.errors import ClosedError, MetadataUnreachableError, StorageRefusedError
from pybk.threads import in_children, start_thread

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5
"""Seconds until a callback that could not reach the store runs again."""


class Callback:
    """A registered callback; made by ``Callbacks.add``.

    Attributes:
        key: The watched key; None for the end of the session.
        call: The function.
    """

    __slots__ = ("_owner", "call", "key")

    def __init__(self, owner: Callbacks, key: str | None, call: Callable[[], None]) -> None:
        self._owner = owner
        self.key = key
        self.call = call

    def cancel(self) -> None:
        """Stop the calls; see ``Watch.cancel``."""
        self._owner.remove(self)


class Callbacks:
    """Runs callbacks in a thread of its own, which starts with the first one that is scheduled. Threads: any.

    Args:
        name: Names the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        # _changed guards all of these. _due holds the time of each scheduled callback, and is a subset of _known.
        self._known: dict[Callback, None] = {}
        self._due: dict[Callback, float] = {}
        self._thread: threading.Thread | None = None
        self._closed = False
        in_children(self)

    def add(self, key: str | None, call: Callable[[], None]) -> Callback:
        """Register a callback; raises ClosedError once closed.

        Args:
            key: The watched key, None for the end of the session.
            call: The function.
        """
        callback = Callback(self, key, call)
        with self._changed:
            if self._closed:
                raise ClosedError(f"{self._name}: this metadata store is closed")
            self._known[callback] = None
        return callback

    def remove(self, callback: Callback) -> None:
        """Cancel a callback."""
        with self._changed:
            self._known.pop(callback, None)
            self._due.pop(callback, None)

    def watched(self) -> list[Callback]:
        """Return the callbacks that watch keys."""
        with self._changed:
            return [callback for callback in self._known.copy() if callback.key is not None]

    def schedule(self, callback: Callback, after_s: float = 0.0) -> None:
        """Run a callback soon, or after some seconds; scheduling it again before it runs can only bring it forward."""
        with self._changed:
            if callback not in self._known or self._closed:
                return
            at = time.monotonic() + after_s if after_s else 0.0
            self._due[callback] = min(at, self._due.get(callback, at))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    start_thread(thread)
                except StorageRefusedError as error:
                    logger.warning("callbacks of watches run later, after the next change: %s", error)
                else:
                    self._thread = thread
            self._changed.notify()

    def session_ended(self) -> None:
        """Schedule the callbacks for the end of the session."""
        with self._changed:
            ended = [callback for callback in self._known.copy() if callback.key is None]
        for callback in ended:
            self.schedule(callback)

    def close(self) -> None:
        """Cancel all callbacks, and wait for one that is running, unless it is the caller."""
        with self._changed:
            self._closed = True
            self._known.clear()
            self._due.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _next(self) -> Callback | None:
        """Wait for the next callback that is due; None once closed."""
        with self._changed:
            while not self._closed:
                # A copy, because a finaliser may cancel a callback at any moment.
                due, now = self._due.copy(), time.monotonic()
                for callback, at in due.items():
                    if at <= now and self._due.pop(callback, None) is not None:
                        return callback
                self._changed.wait(min(due.values()) - now if due else None)
        return None

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback.call()
            except MetadataUnreachableError as error:
                logger.warning("%s: a callback could not reach the store and runs again: %s", self._name, error)
                with self._changed:
                    if callback in self._known:
                        self._due.setdefault(callback, time.monotonic() + RETRY_S)
            except ClosedError:
                self.remove(callback)
            except Exception:
                logger.exception("%s: a callback failed", self._name)
