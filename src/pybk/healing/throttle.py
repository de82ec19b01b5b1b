"""The rate of copies: a token bucket, and the guard that slows copies down while foreground appends suffer.

Everything here takes the time as an argument, nanoseconds of a clock that does not go back.

A bucket lets bytes pass at a rate. It admits a copy as soon as its level is above zero, and then charges all of it, so
a copy that is larger than the burst is not refused but paid for afterwards. Over any time the bytes admitted exceed
``rate * time`` by at most the burst and one copy.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from typing import Final

BURST_S: Final = 0.25
"""A bucket that rested admits what its rate allows in this time at once."""

SAMPLE_NS: Final = 10 * 10**9
"""How long the appends are watched for one sample of their latency."""

_SAMPLES: Final = 60
"""The samples whose median is the latency to compare with: ten minutes."""

_SAMPLES_MIN: Final = 3
"""With fewer samples the median says little, and nothing is slowed down."""

_SUFFERS_FACTOR: Final = 3.0
_SUFFERS_NS: Final = 50_000_000
"""Appends suffer if their latency is above both this and ``_SUFFERS_FACTOR`` times the median."""

_SLOWER: Final = 0.5
_FASTER: Final = 1.1
FACTOR_MIN: Final = 1 / 32
"""The least share of its rate that a copy keeps, so that a repair ends although appends suffer for another reason."""


class TokenBucket:
    """Lets bytes pass at a rate.

    Args:
        bytes_per_second: The rate, above 0.
        now_ns: The time.

    Attributes:
        rate: The rate. A new one counts from the last use of the bucket on; what was charged before stays charged.

    Threads: one at a time; any other may change ``rate``.
    """

    def __init__(self, bytes_per_second: float, now_ns: int) -> None:
        self.rate = bytes_per_second
        self._level = bytes_per_second * BURST_S
        self._at_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """Return how long to wait until the next copy is admitted, nanoseconds; 0 if it is admitted now."""
        self._refill(now_ns)
        return 0 if self._level > 0 else int(-self._level / self.rate * 1e9) + 1

    def charge(self, size_bytes: int, now_ns: int) -> None:
        """Charge a copy, whether it was admitted or not."""
        self._refill(now_ns)
        self._level -= size_bytes

    def _refill(self, now_ns: int) -> None:
        passed = max(0, now_ns - self._at_ns)
        self._at_ns = max(now_ns, self._at_ns)
        rate = self.rate
        self._level = min(self._level + passed * rate / 1e9, rate * BURST_S)


class ForegroundGuard:
    """Says which share of its rate a copy may use, from the latency of the appends that applications wait for.

    Each sample that shows suffering halves the share; each other one raises it by a tenth, up to 1. A sample that shows
    suffering does not enter the median, because a long disturbance would then look normal.

    Attributes:
        factor: The share, ``FACTOR_MIN`` to 1.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def sample(self, p99_ns: int | None) -> float:
        """Take the latency of the last ``SAMPLE_NS``.

        Args:
            p99_ns: The 99th percentile of the appends, nanoseconds; None if there were none.

        Returns:
            The new ``factor``.
        """
        if p99_ns is not None and self._suffers(p99_ns):
            self.factor = max(FACTOR_MIN, self.factor * _SLOWER)
            return self.factor
        self.factor = min(1.0, self.factor * _FASTER)
        if p99_ns is not None:
            self._remember(p99_ns)
        return self.factor

    def _suffers(self, p99_ns: int) -> bool:
        if p99_ns <= _SUFFERS_NS or len(self._sorted) < _SAMPLES_MIN:
            return False
        return p99_ns > _SUFFERS_FACTOR * self._sorted[len(self._sorted) // 2]

    def _remember(self, p99_ns: int) -> None:
        if len(self._recent) == _SAMPLES:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(p99_ns)
        insort(self._sorted, p99_ns)
