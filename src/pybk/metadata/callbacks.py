"""The thread of a metadata store that calls the callbacks of watches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from pybk.errors import ClosedError, MetadataUnreachableError, StorageRefusedError
from pybk.storage.io.failures import start_thread

logger = logging.getLogger(__name__)

RETRY_S: Final = 0.5


class Callback:
    """A watch: what is called, until it is cancelled; made by ``Callbacks.add``."""

    __slots__ = ("_owner", "call", "key")

    def __init__(self, owner: Callbacks, key: str | None, call: Callable[[], None]) -> None:
        self._owner = owner
        self.key = key
        self.call = call

    def cancel(self) -> None:
        """Call no more; see ``Watch.cancel``."""
        self._owner.remove(self)


class Callbacks:
    """Calls what is due, one after the other, in a thread of its own that begins with the first. Threads: any.

    Args:
        name: Names the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._known: dict[Callback, None] = {}
        self._due: dict[Callback, float] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, key: str | None, call: Callable[[], None]) -> Callback:
        """Make a watch.

        Args:
            key: What is watched, None for the session.
            call: What to call.
        """
        callback = Callback(self, key, call)
        with self._changed:
            if self._closed:
                raise ClosedError(f"{self._name}: this metadata store is closed")
            self._known[callback] = None
        return callback

    def remove(self, callback: Callback) -> None:
        """Cancel a watch."""
        with self._changed:
            self._known.pop(callback, None)
            self._due.pop(callback, None)

    def watched(self) -> list[Callback]:
        """Return the watches of keys."""
        with self._changed:
            return [callback for callback in self._known if callback.key is not None]

    def due(self, callback: Callback) -> None:
        """Have a watch called soon, once however often this is said until then."""
        with self._changed:
            if callback not in self._known or self._closed:
                return
            self._due[callback] = 0.0
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    start_thread(thread)
                except StorageRefusedError as error:
                    logger.warning("watches are told later, at the next change: %s", error)
                else:
                    self._thread = thread
            self._changed.notify()

    def session_ended(self) -> None:
        """Have those called who wait for the end of a session."""
        with self._changed:
            waiting = [callback for callback in self._known if callback.key is None]
        for callback in waiting:
            self.due(callback)

    def close(self) -> None:
        """Cancel all; waits for a call under way, unless this is it."""
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
                now = time.monotonic()
                for callback, at in self._due.items():
                    if at <= now:
                        del self._due[callback]
                        return callback
                self._changed.wait(min(self._due.values()) - now if self._due else None)
        return None

    def _run(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback.call()
            except MetadataUnreachableError as error:
                logger.warning("%s: a callback could not reach the store and is called again: %s", self._name, error)
                with self._changed:
                    if callback in self._known:
                        self._due.setdefault(callback, time.monotonic() + RETRY_S)
            except ClosedError:
                self.remove(callback)
            except Exception:
                logger.exception("%s: a callback failed", self._name)
