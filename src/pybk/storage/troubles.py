"""What a store has trouble with while it serves on: shown by ``health()``, and tried again until it goes well."""

from __future__ import annotations

import logging
import threading
from typing import Final

logger = logging.getLogger(__name__)

CHECKING: Final = "checking stored entries"
"""The trouble of damaged records that a scrub has found, until they are mended; it has a code of its own in health."""


class Troubles:
    """Things that failed or were refused and are tried again, by what was being done.

    Threads: any.
    """

    def __init__(self, root: str) -> None:
        """Use ``root`` to name the store in the log."""
        self._root = root
        self._lock = threading.Lock()
        self._found: dict[str, str] = {}

    def note(self, doing: str, problem: object) -> None:
        """Record that something did not go well; logged when it is new."""
        with self._lock:
            new = doing not in self._found
            self._found[doing] = f"{doing}: {problem}"
        if new:
            logger.warning("%s serves on, but %s: %s; it is tried again", self._root, doing, problem)

    def clear(self, doing: str) -> None:
        """Record that something went well."""
        if doing in self._found:
            with self._lock:
                self._found.pop(doing, None)
            logger.info("%s: %s goes well again", self._root, doing)

    def of(self, doing: str) -> str | None:
        """Return what is wrong with one thing, None if nothing is."""
        return self._found.get(doing)

    def all(self) -> tuple[str, ...]:
        """Return everything that is wrong now, one text each."""
        with self._lock:
            return tuple(self._found.values())
