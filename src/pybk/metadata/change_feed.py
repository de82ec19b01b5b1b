"""The keys that one ``MetadataStore.watch_below`` still has to report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

KEYS_MAX: Final = 4096
"""Keys that a feed collects at most between two calls; if more have changed, it reports None."""

REST_S: Final = 1.0
"""The least seconds between two reports of None, after which all is read again; more if that takes longer.

So reading takes at most half of the time while a process of an older version changes keys all the time.
"""


class ChangeFeed:
    """Collects changed keys until the callback thread reports them; see ``MetadataStore.watch_below``.

    Its first report is None, because earlier changes are not known. Threads: any.

    Args:
        key: The key above the reported keys.
        callback: The function that gets the reported keys.
    """

    def __init__(self, key: str, callback: Callable[[frozenset[str] | None], None]) -> None:
        self._prefix = f"{key}/"
        self._callback = callback
        self._lock = threading.Lock()
        self._keys: set[str] | None = None  # None: changes may have been missed
        self._rested_at = 0.0  # from then on None may be reported

    def note(self, keys: Iterable[str] | None) -> bool:
        """Add changed keys; those that are not below the key are left out.

        Args:
            keys: The keys; None if changes may have been missed.

        Returns:
            Whether the feed has a report.
        """
        below = None if keys is None else [key for key in keys if key.startswith(self._prefix)]
        with self._lock:
            if below is None or self._keys is None:
                self._keys = None
                return True
            self._keys.update(below)
            if len(self._keys) > KEYS_MAX:
                self._keys = None
                return True
            return bool(self._keys)

    def rest_s(self) -> float:
        """Return the seconds until ``report`` may be called; 0 unless it would report None again."""
        with self._lock:
            return 0.0 if self._keys is not None else max(0.0, self._rested_at - time.monotonic())

    def report(self) -> None:
        """Call the callback with the collected keys, if any; if it fails, the next call reports them again."""
        with self._lock:
            keys = None if self._keys is None else frozenset(self._keys)
            self._keys = set()
        if keys is not None and not keys:
            return
        began = time.monotonic()
        try:
            self._callback(keys)
        except BaseException:
            self.note(keys)
            raise
        finally:
            if keys is None:
                ended = time.monotonic()
                self._rested_at = ended + max(REST_S, ended - began)
