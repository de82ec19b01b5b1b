"""A rate limit on the lines that peers can make a bookie write to its log."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

LINES_MAX: Final = 20
"""The lines of one kind that are logged in each period."""

PERIOD_SECONDS: Final = 60.0


class LogLimit(logging.Filter):
    """Passes at most ``lines_max`` records of each kind in ``PERIOD_SECONDS``, and says how many it dropped.

    Records are of one kind if they have the same level and the same message before its arguments are inserted. Data
    from peers is in the arguments only, so peers cannot cause more kinds than the code has. The first record of a kind
    after a period in which some were dropped ends with their number.

    Threads: any.
    """

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        super().__init__()
        self._lines_max = lines_max
        self._lock = threading.Lock()
        self._kinds: dict[tuple[int, str], list[float]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        now = time.monotonic()
        with self._lock:
            kind = self._kinds.setdefault((record.levelno, str(record.msg)), [now, 0.0])
            began, count = kind
            dropped = 0
            if now - began >= PERIOD_SECONDS:
                dropped = max(0, int(count) - self._lines_max)
                kind[:] = now, 0.0
            kind[1] += 1
            passes = kind[1] <= self._lines_max
        if dropped:
            record.msg = f"{record.msg} ({dropped} more such lines were dropped since the last one)"
        return passes
