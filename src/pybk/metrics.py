"""Counters and latency histograms, kept separately for each ledger type and tier."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from pybk.errors import UsageError
from pybk.frozen_dict import FrozenDict

APPENDED_ENTRIES: Final = "appended_entries"
APPENDED_BYTES: Final = "appended_bytes"
APPEND_LATENCY: Final = "append_latency_ns"
"""From staging to durable, per entry."""

READ_ENTRIES: Final = "read_entries"
READ_BYTES: Final = "read_bytes"
READ_LATENCY: Final = "read_latency_ns"
"""From asking to verified entries, per batch; of entries read one by one, the first of each ``SINGLE_READS_MAX``."""

REQUEST_FAULTS: Final = "request_faults"
"""Requests that a bookie refused because it failed at them in a way that no request should be able to cause."""

MEMBER_RECOVERIES: Final = "member_recoveries"
"""Rights to recover a ledger without its password that a bookie granted, one for each session and ledger."""

UNSEALED_LEDGERS: Final = "unsealed_ledgers"
"""Readers that found their ledger closed without a seal."""

MISPLACED_CHOICES: Final = "misplaced_choices"
"""Ensembles, and changes of ensembles, with write sets that span too few zones; a strict policy allows none."""

SCRUB_BYTES: Final = "scrub_bytes"
"""Bytes of records, or of their headers, that were read to check stored entries in the background."""

SCRUB_DAMAGED_RECORDS: Final = "scrub_damaged_records"
"""Damaged records that such checks have found; a record that stays damaged counts again with each check."""

SINGLE_READS_MAX: Final = 64
"""Entries read one by one that are counted together."""

COMMITS_MAX: Final = 256
"""Commits of appends that are counted together."""

SCOPES_MAX: Final = 1024
"""Pairs of ledger type and tier that are counted separately; further types are counted under ``OTHER_TYPES``."""

OTHER_TYPES: Final = ".other"

_SUB_BITS: Final = 3
_SUB_BUCKETS: Final = 1 << _SUB_BITS


class MetricKey(NamedTuple):
    """The name, ledger type and tier of a counter or histogram; equal to the plain tuple. Unused parts are empty."""

    name: str
    ledger_type: str
    tier: str


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        count: Values recorded.
        sum: Their sum, nanoseconds.
        maximum: The largest of them, nanoseconds, 0 for none.
        buckets: For each bucket that is not empty, in order: the highest value that falls into it, nanoseconds, and how
            many did.
    """

    count: int
    sum: int
    maximum: int
    buckets: tuple[tuple[int, int], ...]

    def quantile(self, q: float) -> int:
        """Return the value that this share of the values does not exceed.

        Args:
            q: The share, 0 to 1.

        Returns:
            Nanoseconds, at most 12.5 % too high; 0 if there are no values.

        Raises:
            UsageError: ``q`` is not within 0 to 1.
        """
        if not 0 <= q <= 1:
            raise UsageError(f"quantile {q!r} is not within 0 and 1")
        wanted = q * self.count
        seen = 0
        for highest, count in self.buckets:
            seen += count
            if seen >= wanted:
                return min(highest, self.maximum)
        return self.maximum


class Histogram:
    """Latencies in buckets that are at most an eighth of their value wide.

    Threads: one at a time; ``Metrics`` holds its lock around it.
    """

    __slots__ = ("_buckets", "_maximum", "count", "sum")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self._maximum = 0
        self.count = 0
        self.sum = 0

    def record(self, ns: int, count: int = 1) -> None:
        """Record a latency.

        Args:
            ns: Nanoseconds; less than 0 counts as 0.
            count: How many times.
        """
        if ns < 0:
            ns = 0
        elif ns > self._maximum:
            self._maximum = ns
        shift = max(ns.bit_length() - _SUB_BITS - 1, 0)
        bucket = (shift << _SUB_BITS) + (ns >> shift)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + count
        self.count += count
        self.sum += ns * count

    def quantile(self, q: float) -> int:
        """Return a quantile; see ``HistogramSnapshot.quantile``."""
        return self.snapshot().quantile(q)

    def snapshot(self) -> HistogramSnapshot:
        """Return the histogram as it is now."""
        buckets = tuple((_highest(bucket), count) for bucket, count in sorted(self._buckets.items()))
        return HistogramSnapshot(self.count, self.sum, self._maximum, buckets)


def _highest(bucket: int) -> int:
    """Return the highest value that falls into a bucket."""
    shift = max((bucket >> _SUB_BITS) - 1, 0)
    return (((bucket - (shift << _SUB_BITS)) + 1) << shift) - 1


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All metrics at one moment, e.g. ``snapshot.counters["appended_entries", "orders", "nvme"]``."""

    counters: Mapping[MetricKey, int]
    histograms: Mapping[MetricKey, HistogramSnapshot]


class _Series:
    """The counters and histograms of one ledger type in one tier; used under the lock of the ``Metrics``."""

    __slots__ = ("commits", "counters", "histograms", "single_reads")

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.histograms: dict[str, Histogram] = {}
        self.single_reads: deque[int] = deque()
        self.commits: deque[tuple[int, int, int]] = deque()

    def add(self, name: str, amount: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def observe(self, name: str, ns: int, count: int) -> None:
        histogram = self.histograms.get(name)
        if histogram is None:
            histogram = self.histograms[name] = Histogram()
        histogram.record(ns, count)

    def count_commits(self) -> None:
        for _ in range(len(self.commits)):  # others only add to it meanwhile
            entries, size_bytes, latency_ns = self.commits.popleft()
            self.add(APPENDED_ENTRIES, entries)
            self.add(APPENDED_BYTES, size_bytes)
            self.observe(APPEND_LATENCY, latency_ns, entries)

    def read(self, entries: int, size_bytes: int, latency_ns: int) -> None:
        self.add(READ_ENTRIES, entries)
        self.add(READ_BYTES, size_bytes)
        self.observe(READ_LATENCY, latency_ns, 1)

    def count_single_reads(self) -> None:
        sizes = self.single_reads
        count = len(sizes)  # others only add to it meanwhile
        if count:
            self.add(READ_ENTRIES, count)
            self.add(READ_BYTES, sum(sizes.popleft() for _ in range(count)))


class MetricsScope:
    """Records for one ledger type in one tier; made by ``Metrics.scope``, kept by a component that records often.

    Attributes:
        single_reads: Encoded bytes of entries that were read one by one and are not counted yet. A read of one
            appends to it, which costs 30 ns and no lock, and calls ``count_single_reads`` at ``SINGLE_READS_MAX``.

    Threads: any.
    """

    __slots__ = ("_commits", "_lock", "_series", "single_reads")

    def __init__(self, lock: threading.Lock, series: _Series) -> None:
        self._lock = lock
        self._series = series
        self._commits = series.commits
        self.single_reads: Final = series.single_reads

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter, which begins at 0."""
        with self._lock:
            self._series.add(name, amount)

    def observe(self, name: str, ns: int, count: int = 1) -> None:
        """Record a latency in a histogram, ``count`` times, nanoseconds."""
        with self._lock:
            self._series.observe(name, ns, count)

    def appended(self, entries: int, size_bytes: int, latency_ns: int) -> None:
        """Count entries that became durable, their bytes, and how long each took.

        They are only collected here, and counted about a hundred at a time, because appends wait for this call.
        """
        self._commits.append((entries, size_bytes, latency_ns))
        if len(self._commits) >= COMMITS_MAX:
            with self._lock:
                self._series.count_commits()

    def read(self, entries: int, size_bytes: int, latency_ns: int) -> None:
        """Count entries that were read and verified together, their bytes, and how long that took."""
        with self._lock:
            self._series.read(entries, size_bytes, latency_ns)

    def count_single_reads(self) -> None:
        """Count the reads in ``single_reads``, and empty it."""
        with self._lock:
            self._series.count_single_reads()


class Metrics:
    """Counters and histograms of a manager.

    Threads: any. One lock, taken once per call, so callers record once per batch and not per entry.

    Cost: Half a microsecond per call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str], _Series] = {}

    def scope(self, ledger_type: str = "", tier: str = "") -> MetricsScope:
        """Return the scope for one ledger type in one tier."""
        with self._lock:
            return MetricsScope(self._lock, self._of(ledger_type, tier))

    def add(self, name: str, amount: int = 1, ledger_type: str = "", tier: str = "") -> None:
        """Add to a counter, which begins at 0."""
        with self._lock:
            self._of(ledger_type, tier).add(name, amount)

    def observe(self, name: str, ns: int, count: int = 1, ledger_type: str = "", tier: str = "") -> None:
        """Record a latency in a histogram, ``count`` times, nanoseconds."""
        with self._lock:
            self._of(ledger_type, tier).observe(name, ns, count)

    def snapshot(self) -> MetricsSnapshot:
        """Return all present metrics; the values of one recording call are included all or none."""
        counters = {}
        histograms = {}
        with self._lock:
            for (ledger_type, tier), series in self._series.items():
                series.count_commits()
                series.count_single_reads()
                for name, value in series.counters.items():
                    counters[MetricKey(name, ledger_type, tier)] = value
                for name, histogram in series.histograms.items():
                    histograms[MetricKey(name, ledger_type, tier)] = histogram.snapshot()
        return MetricsSnapshot(FrozenDict(counters), FrozenDict(histograms))

    def _of(self, ledger_type: str, tier: str) -> _Series:
        """Return the counters and histograms to record in; the caller holds the lock."""
        series = self._series.get((ledger_type, tier))
        if series is None:
            if len(self._series) >= SCOPES_MAX:
                ledger_type = OTHER_TYPES
            series = self._series.setdefault((ledger_type, tier), _Series())
        return series
