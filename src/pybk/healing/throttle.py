"""The rate of copies: a token bucket, and the rules that slow copies down in favour of appends.

All functions take the time as an argument, in nanoseconds of a clock that does not go back.

A bucket lets bytes pass at a rate. It admits a copy as soon as its level is above zero, and then charges all of it, so
a copy that is larger than the burst is not refused but paid for afterwards. Over any time the bytes admitted exceed
``rate * time`` by at most the burst and one copy.

Two rules slow copies down. ``ForegroundGuard`` compares appends with those of the last ten minutes, and acts if they
suffer badly, for whatever reason; it also binds urgent copies and scrubs. ``ForegroundCap`` keeps copies at a rate that
appends hardly notice. This rate depends on the machine and on its other users, so it is measured: copies rest in the
first second of each ten, and the appends of that second are compared with those of the other nine, as far as chance
allows. The seconds are those of the time of day, so all bookies rest together, because each of them slows down the
others' appends.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from typing import Final

from pybk.metrics import HistogramSnapshot

BURST_S: Final = 0.1
"""The burst of a bucket, as a time: after a rest it admits at once the bytes that its rate allows in this time."""

SAMPLE_NS: Final = 10 * 10**9
"""The time for which the appends are watched for one sample of their latency."""

_SAMPLES: Final = 60
"""The samples whose median is the latency to compare with: ten minutes."""

_SAMPLES_MIN: Final = 3
"""The number of samples below which the median says little, and nothing is slowed down."""

_SUFFERS_FACTOR: Final = 3.0
_SUFFERS_NS: Final = 50_000_000
"""Appends suffer if their latency is above both this and ``_SUFFERS_FACTOR`` times the median."""

_SLOWER: Final = 0.5
_FASTER: Final = 1.1
FACTOR_MIN: Final = 1 / 32
"""The least share of its rate that a copy keeps: a repair has to end even if appends suffer for another reason."""


PERIOD_NS: Final = 10 * 10**9
"""The period in which copies rest once, while there are appends, and their rate is judged once."""

REST_NS: Final = 10**9
"""The time for which the copies rest."""

_REST_LONGER_NS: Final = 50_000_000
"""The time by which rests exceed the counting of their appends, because the counting thread may be late."""

_DRAIN_NS: Final = 250_000_000
"""The time after the beginning of a rest in which copies may still be under way."""

_LOOK_NS: Final = 10**9

CAP_START: Final = float(512 << 10)
"""Bytes per second of the first copies after appends were seen."""

_NOTICED: Final = 1.25
"""The factor by which the appends' 99th percentile may exceed its value without copies: less than the target of 1.5."""

_JUDGED: Final = 0.99
_DOUBT: Final = 1.0
"""The number of standard errors that an effect has to exceed.

With none, chance alone halves the rate in half of the periods, and the rate falls to its least. With one it does so in
a sixth of them, which is made up for. With two, copies are noticed twice as much as they need to be.
"""

_CAP_MAX: Final = float(1 << 40)
"""Bytes per second to which the limit grows; it would be infinite after nine hours, which stands for none yet."""

_CAP_GROWS: Final = 1.25
_CAP_GROWS_BLINDLY: Final = 1.1
_JUDGED_MIN: Final = 50
"""The number of appends below which the 99th percentile says little."""

_SILENT_LOOKS: Final = 5
"""After so many looks in a row without appends, a second each, nobody is there for whom copies would make way."""

_CALM_LOOKS: Final = 8
"""The number of rests with which a sample is compared."""

PIECE_S: Final = 0.05
PIECE_MIN: Final = 64 << 10
PIECE_MAX: Final = 1 << 20
"""A copy is made in pieces of the bytes that the rate admits in ``PIECE_S``, within these limits.

Pieces are small because a bookie has one thread, so appends wait for the piece before them; and small pieces make a
slow rate steady.
"""

_NONE: Final = HistogramSnapshot(0, 0, 0, ())


class TokenBucket:
    """Lets bytes pass at a rate.

    Args:
        bytes_per_second: The rate, above 0.
        now_ns: The time.

    Attributes:
        rate: The rate. A new one counts from the last use of the bucket on; what was charged before stays charged.
        cap: Another limit of the rate; infinite for none.
        rests_until_ns: The time until which nothing is admitted.
        charged_bytes: All bytes that were charged.

    Threads: one at a time; any other may read and change the attributes.
    """

    def __init__(self, bytes_per_second: float, now_ns: int) -> None:
        self.rate = bytes_per_second
        self.cap = math.inf
        self.rests_until_ns = 0
        self.charged_bytes = 0
        self._level = bytes_per_second * BURST_S
        self._at_ns = now_ns

    def wait_ns(self, now_ns: int) -> int:
        """Return the nanoseconds until the next copy is admitted; 0 if it is admitted now."""
        self._refill(now_ns)
        owed_ns = 0 if self._level > 0 else int(-self._level / min(self.rate, self.cap) * 1e9) + 1
        return max(owed_ns, self.rests_until_ns - now_ns)

    def charge(self, size_bytes: int, now_ns: int) -> None:
        """Charge a copy, whether it was admitted or not."""
        self._refill(now_ns)
        self._level -= size_bytes
        self.charged_bytes += size_bytes

    @property
    def piece_bytes(self) -> int:
        """The bytes to copy at once."""
        return int(max(PIECE_MIN, min(PIECE_MAX, min(self.rate, self.cap) * PIECE_S)))

    def _refill(self, now_ns: int) -> None:
        passed = max(0, now_ns - self._at_ns)
        self._at_ns = max(now_ns, self._at_ns)
        rate = min(self.rate, self.cap)
        self._level = min(self._level + passed * rate / 1e9, rate * BURST_S)


class ForegroundGuard:
    """Computes the share of its rate that a copy may use, from the latency of the appends of applications.

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


class ForegroundCap:
    """Computes the rate of copies that appends hardly notice; see the module.

    After some seconds without appends there is no limit. With appends, copies begin slowly. Each period in which the
    99th percentile was surely above ``_NOTICED`` times that without copies halves the rate of copies; each other period
    raises it by a quarter. With too few appends to judge it grows by a tenth.

    Attributes:
        least: The least rate in bytes per second, even if appends notice the copies, because a slow repair means a
            longer time with fewer copies.
        rate: Bytes per second; infinite for no limit.
        rest_ns: The time for which copies have to rest from the last look on.

    Threads: one at a time.
    """

    def __init__(self, least: float) -> None:
        self.least = least
        self.rate = math.inf
        self.rest_ns = 0
        self._calm: deque[HistogramSnapshot] = deque(maxlen=_CALM_LOOKS)
        """The appends of times without copies."""
        self._busy = _NONE
        """The appends of this period during copies."""
        self._appended = 0
        self._silent = 0
        """Looks in a row without appends."""
        self._copied_bytes = 0
        self._copied_before = 0
        """The bytes that were copied before this period."""
        self._drained = True
        self._period = -1
        self._due_ns = 0
        """The time of the next judgement."""
        self._early = _NONE
        """The appends of looks before that time."""

    def look(self, now_ns: int, appends: HistogramSnapshot, copied_bytes: int) -> None:
        """Take the appends and copies since the last look; called at ``next_ns`` while there are copies.

        An earlier look only adds to the next one, because a few milliseconds without appends are not significant.

        Args:
            now_ns: The time of day, nanoseconds since 1970.
            appends: The latencies of the appends since the last look.
            copied_bytes: All bytes that were copied so far, in both directions.
        """
        self._early += appends
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + self.next_ns(now_ns)
            appends, self._early = self._early, _NONE
            self._take(now_ns, appends, copied_bytes)
        at_ns = now_ns % PERIOD_NS
        self.rest_ns = REST_NS + _REST_LONGER_NS - at_ns if self.rate != math.inf and at_ns < REST_NS else 0

    def _take(self, now_ns: int, appends: HistogramSnapshot, copied_bytes: int) -> None:
        """Take the appends and copies since the last time."""
        self._appended += appends.count
        self._silent = 0 if appends.count else self._silent + 1
        if copied_bytes != self._copied_bytes:
            self._busy += appends
            self._drained = False
            if appends.count and self.rate == math.inf:
                self.rate = max(self.least, CAP_START)
        elif self._drained:
            if appends.count:
                self._calm.append(appends)
        else:
            self._drained = True
        self._copied_bytes = copied_bytes
        if now_ns // PERIOD_NS != self._period:
            self._period = now_ns // PERIOD_NS
            self._judge()
        if self._silent >= _SILENT_LOOKS:
            self.rate = math.inf

    def next_ns(self, now_ns: int) -> int:
        """Return the time from a given time until the next look is due."""
        at_ns = now_ns % PERIOD_NS
        return _DRAIN_NS - at_ns if at_ns < _DRAIN_NS else _LOOK_NS - at_ns % _LOOK_NS

    def _judge(self) -> None:
        """Choose the rate of the next period."""
        busy, self._busy = self._busy, _NONE
        appended, self._appended = self._appended, 0
        copied, self._copied_before = self._copied_bytes - self._copied_before, self._copied_bytes
        calm = sum(self._calm, _NONE)
        if not appended:
            self.rate = math.inf
            self._calm.clear()
        elif not copied or self.rate == math.inf:
            self.rate = max(self.least, CAP_START)
        elif min(busy.count, calm.count) < _JUDGED_MIN:
            self.rate = min(_CAP_MAX, self.rate * _CAP_GROWS_BLINDLY)
        elif _surely(busy, calm) > _NOTICED * calm.quantile(_JUDGED):
            self.rate = max(self.least, min(self.rate, copied * 1e9 / PERIOD_NS) * _SLOWER)
        else:
            self.rate = min(_CAP_MAX, self.rate * _CAP_GROWS)


def _surely(busy: HistogramSnapshot, calm: HistogramSnapshot) -> int:
    """Return a lower bound of the 99th percentile of ``busy``, as sure as the numbers of appends allow, nanoseconds.

    Of n values, the share that is above their true 99th percentile has the standard error sqrt(0.99 * 0.01 / n). The
    errors of both samples are counted here.
    """
    error = math.sqrt(_JUDGED * (1 - _JUDGED) * (1 / busy.count + 1 / calm.count))
    return busy.quantile(_JUDGED - _DOUBT * error)
