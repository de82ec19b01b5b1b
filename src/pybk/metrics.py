"""Counters, histograms and gauges of a manager, by ledger type and tier, or by other labels.

A metric's name ends with its unit: ``_ns`` (nanoseconds, exported as seconds) or ``_bytes``.
``docs/reference/metrics.md`` lists all, and a test compares the list with what a cluster exports.

The values of labels come from small sets, such as codes and reasons. They are never ids or names of ledgers or bookies,
because each value is a series that is kept for ever. ``SCOPES_MAX`` bounds the ledger types.

**Counters and histograms** are recorded at each event, once per batch. **Gauges** are present values, which are not
kept: ``Metrics.add_gauges`` registers a function that a snapshot calls.
"""

from __future__ import annotations

import re
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.deferral import LateModule, np
from pybk.errors import PybkError, UsageError
from pybk.feature_level import NEWEST_LEVEL
from pybk.values import FrozenDict

if TYPE_CHECKING:
    import numpy.typing as npt

    from pybk import version
else:
    version = LateModule("pybk.version")

APPENDED_ENTRIES: Final = "appended_entries"
APPENDED_BYTES: Final = "appended_bytes"
APPEND_LATENCY: Final = "append_latency_ns"
"""The time from staging to durable, per entry."""

CLIENT_ENTRIES: Final = "append_client_entries"
CLIENT_BYTES: Final = "append_client_bytes"
CLIENT_LATENCY: Final = "append_client_latency_ns"
"""The time from staging to the acknowledgement of an ack quorum, per entry, at the client of a cluster."""

READ_ENTRIES: Final = "read_entries"
READ_BYTES: Final = "read_bytes"
READ_LATENCY: Final = "read_latency_ns"
"""The time of a verified read, per batch; of entries read one by one, the first of each ``SINGLE_READS_MAX``."""

LOG_SYNC: Final = "log_sync_ns"
"""The time that it took to write a commit of the log and to sync it."""

LOG_COMMIT_BYTES: Final = "log_commit_bytes"
"""The bytes of a commit of the log, without padding."""

CHECKPOINT_TIME: Final = "checkpoint_ns"
"""The duration of a checkpoint that had entries to write."""

MOVED_BYTES: Final = "moved_bytes"
"""The bytes of records that were written again, in another place of a tier."""

APPEND_ERRORS: Final = "append_errors"
"""Entries whose append failed, and calls that were refused, by the class of the error (``code_of``)."""

READ_ERRORS: Final = "read_errors"
"""Reads of a batch or of an entry that failed, by the class of the error (``code_of``)."""

ENSEMBLE_CHANGES: Final = "ensemble_changes"
"""Places of ensembles that a writer filled with another bookie, by the reason (``ChangeReason``)."""

READ_REPAIRS: Final = "read_repairs"
"""Copies that a read found damaged or missing, and sent to their bookies again."""

METADATA_OP: Final = "metadata_op_ns"
"""The time that the metadata store took for a request, by operation and result."""

SESSION_LOSSES: Final = "session_losses"
"""Sessions with the metadata store that ended without being closed."""

SESSIONS: Final = "sessions"
"""Sessions that clients have with a bookie."""

BOOKIE_REQUEST: Final = "bookie_request_ns"
"""The time from the arrival of a request at a bookie until it was answered, or began to wait, by operation."""

BOOKIE_REJECTED: Final = "bookie_rejected"
"""Requests that a bookie rejected, by the status of its reply."""

REQUEST_FAULTS: Final = "request_faults"
"""Requests that a bookie refused because of an unexpected error, which no request should be able to cause."""

MEMBER_RECOVERIES: Final = "member_recoveries"
"""Rights to recover a ledger without its password that a bookie granted, one for each session and ledger."""

SALVAGES: Final = "salvages"
"""Starts of a bookie with a damaged store, of which it opened the rest (salvage)."""

BOOKIE_TURN: Final = "bookie_turn_ns"
"""The time that a bookie's serving thread took for requests that had arrived together, until the replies were sent."""

AUDITOR_FINDINGS: Final = "auditor_findings"
REPAIR_COPIED_BYTES: Final = "repair_copied_bytes"
REPAIR_LEDGERS: Final = "repair_ledgers"

UNSEALED_LEDGERS: Final = "unsealed_ledgers"
"""Readers that found their ledger closed without a seal."""

MISPLACED_CHOICES: Final = "misplaced_choices"
AWAY_MEMBERS: Final = "away_members"
"""Ensembles, and changes of ensembles, with write sets that span too few zones; a strict policy allows none."""

SCRUB_BYTES: Final = "scrub_bytes"
"""The bytes of records, or of their headers, that were read to check stored entries in the background."""

SCRUB_DAMAGED_RECORDS: Final = "scrub_damaged_records"
"""Damaged records that such checks have found; a record that stays damaged counts again with each check."""

SINGLE_READS_MAX: Final = 64
"""The number of entries read one by one that are counted together."""

COMMITS_MAX: Final = 512
"""The number of commits of appends, and of values of ``MetricsScope.collect``, that are counted together."""

_PAIRS_MAX: Final = 2 * COMMITS_MAX
_TRIPLES_MAX: Final = 3 * COMMITS_MAX

SCOPES_MAX: Final = 1024
"""The number of combinations of ledger type, tier and labels that are kept; further types count as ``OTHER_TYPES``."""

OTHER_TYPES: Final = ".other"

Labels = tuple[tuple[str, str], ...]
"""The names and values of labels other than ledger type and tier, always in the same order for one metric."""

_SUB_BITS: Final = 3


class MetricKey(NamedTuple):
    """A metric's name and labels.

    Attributes:
        name: The name.
        ledger_type: The ledger type; empty for none, and for the type of that name.
        tier: The tier; empty for none.
        labels: Other labels, as pairs of a name and a value.
    """

    name: str
    ledger_type: str = ""
    tier: str = ""
    labels: Labels = ()


def code_of(error: PybkError) -> str:
    """Return the code of an error's class: that of ``NoSuchEntryError`` is ``no_such_entry``.

    A class that ``pybk.errors`` does not have counts as its base class there, so that the codes are few.
    """
    code = _CODES.get(type(error))
    if code is None:
        known = next(each for each in type(error).__mro__ if each.__module__ == PybkError.__module__)
        code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", known.__name__.removesuffix("Error")).lower()
        _CODES[type(error)] = code
    return code


_CODES: Final[dict[type[PybkError], str]] = {}

Gauge = tuple[MetricKey, float]
"""A gauge and its present value."""


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        count: Values recorded.
        sum: Their sum, nanoseconds.
        maximum: The largest of them, nanoseconds, 0 for none.
        buckets: The buckets that are not empty, in order: the highest value that falls into each, nanoseconds, and the
            number of its values.
    """

    count: int
    sum: int
    maximum: int
    buckets: tuple[tuple[int, int], ...]

    def __add__(self, other: HistogramSnapshot) -> HistogramSnapshot:
        """Return the histogram of the values of both."""
        buckets = dict(self.buckets)
        for highest, count in other.buckets:
            buckets[highest] = buckets.get(highest, 0) + count
        maximum = max(self.maximum, other.maximum)
        return HistogramSnapshot(
            self.count + other.count, self.sum + other.sum, maximum, tuple(sorted(buckets.items()))
        )

    def quantile(self, q: float) -> int:
        """Return the value that a share of the values does not exceed.

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
            count: The number of times.
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

    def record_many(self, values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64] | None = None) -> None:
        """Record latencies, as ``record`` does each; from about ten on this is cheaper.

        Args:
            values: Nanoseconds, ``(n,)``; at least one.
            counts: The number of times of each; None records each once.
        """
        ns = np.maximum(values, 0)
        bits = np.frexp(ns.astype(np.float64))[1].astype(np.int64)
        bits -= ns >> np.maximum(bits - 1, 0) == 0  # a large number was rounded up to a power of two
        shifts = np.maximum(bits - _SUB_BITS - 1, 0)
        found = np.bincount((shifts << _SUB_BITS) + (ns >> shifts), counts)
        for bucket in np.flatnonzero(found).tolist():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + int(found[bucket])
        self._maximum = max(self._maximum, int(ns.max()))
        self.count += len(ns) if counts is None else int(counts.sum())
        # These are Python's numbers, which do not overflow.
        self.sum += sum(ns.tolist()) if counts is None else sum(map(mul, ns.tolist(), counts.tolist()))

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
    """All metrics at one moment, e.g. ``snapshot.counters[MetricKey("appended_entries", "orders", "nvme")]``.

    Attributes:
        counters: Numbers that only grow.
        histograms: Latencies and sizes.
        gauges: Present values.
    """

    counters: Mapping[MetricKey, int]
    histograms: Mapping[MetricKey, HistogramSnapshot]
    gauges: Mapping[MetricKey, float] = field(default_factory=FrozenDict)


class _Series:
    """The counters and histograms of one ledger type in one tier; used under the lock of the ``Metrics``."""

    __slots__ = ("collected", "commits", "confirmed", "counters", "histograms", "single_reads", "written")

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.histograms: dict[str, Histogram] = {}
        self.single_reads: deque[int] = deque()
        self.collected: deque[tuple[str, int]] = deque()
        # Rows of numbers, one after the other: the garbage collector does not visit them, and numpy takes them
        # unchanged.
        self.commits = array("q")
        self.written = array("q")
        self.confirmed = array("q")

    def add(self, name: str, amount: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def observe(self, name: str, ns: int, count: int) -> None:
        self.histogram(name).record(ns, count)

    def histogram(self, name: str) -> Histogram:
        histogram = self.histograms.get(name)
        if histogram is None:
            histogram = self.histograms[name] = Histogram()
        return histogram

    def count_commits(self) -> None:
        self._count(self.commits, APPENDED_ENTRIES, APPENDED_BYTES, APPEND_LATENCY)
        self._count(self.confirmed, CLIENT_ENTRIES, CLIENT_BYTES, CLIENT_LATENCY)
        if self.written:
            took_ns, size_bytes = _taken(self.written, 2)
            self.histogram(LOG_SYNC).record_many(took_ns)
            self.histogram(LOG_COMMIT_BYTES).record_many(size_bytes)

    def _count(self, collected: array[int], entries_of: str, bytes_of: str, latency_of: str) -> None:
        if collected:
            entries, size_bytes, latency_ns = _taken(collected, 3)
            self.add(entries_of, int(entries.sum()))
            self.add(bytes_of, int(size_bytes.sum()))
            self.histogram(latency_of).record_many(latency_ns, entries)

    def count_collected(self) -> None:
        collected = self.collected
        by_name: dict[str, list[int]] = {}
        for _ in range(len(collected)):  # others only add to it meanwhile
            name, value = collected.popleft()
            by_name.setdefault(name, []).append(value)
        for name, values in by_name.items():
            self.histogram(name).record_many(np.array(values, np.int64))

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


def _taken(collected: array[int], width: int) -> npt.NDArray[np.int64]:
    """Remove rows of numbers, and return them by column; other threads only add whole rows meanwhile."""
    rows = collected[:]
    del collected[: len(rows)]
    return np.frombuffer(rows, np.int64).reshape(-1, width).T


class MetricsScope:
    """The recorder for one ledger type in one tier; made by ``Metrics.scope``, kept by a component that records often.

    Attributes:
        single_reads: Encoded bytes of entries that were read one by one and are not counted yet. A read of one
            appends to it, which costs 30 ns and no lock, and calls ``count_single_reads`` at ``SINGLE_READS_MAX``.

    Threads: any.
    """

    __slots__ = ("_collected", "_commits", "_confirmed", "_lock", "_series", "_written", "single_reads")

    def __init__(self, lock: threading.Lock, series: _Series) -> None:
        self._lock = lock
        self._series = series
        self._collected = series.collected
        self._commits = series.commits
        self._written = series.written
        self._confirmed = series.confirmed
        self.single_reads: Final = series.single_reads

    def add(self, name: str, amount: int = 1) -> None:
        """Add to a counter, which begins at 0."""
        with self._lock:
            self._series.add(name, amount)

    def observe(self, name: str, ns: int, count: int = 1) -> None:
        """Record a latency in a histogram, ``count`` times, nanoseconds."""
        with self._lock:
            self._series.observe(name, ns, count)

    def collect(self, name: str, value: int) -> None:
        """Record a latency or a size in a histogram, as ``observe`` does, but for a hot path: it takes no lock.

        Cost: 0.1 µs, and in one of ``COMMITS_MAX`` calls that of counting all of them.
        """
        self._collected.append((name, value))
        if len(self._collected) >= COMMITS_MAX:
            with self._lock:
                self._series.count_collected()

    def appended(self, entries: int, size_bytes: int, latency_ns: int) -> None:
        """Count entries that became durable, their bytes, and the time of each.

        They are only collected, and counted some hundred at a time, because appends wait for this call.
        """
        self._commits.extend((entries, size_bytes, latency_ns))
        if len(self._commits) >= _TRIPLES_MAX:
            with self._lock:
                self._series.count_commits()

    def wrote(self, took_ns: int, size_bytes: int) -> None:
        """Record the time to write and sync a commit of the log, and its size, as ``appended`` does."""
        self._written.extend((took_ns, size_bytes))
        if len(self._written) >= _PAIRS_MAX:
            with self._lock:
                self._series.count_commits()

    def confirmed(self, entries: int, size_bytes: int, latency_ns: int) -> None:
        """Count entries of a client that an ack quorum has acknowledged, as ``appended`` does."""
        self._confirmed.extend((entries, size_bytes, latency_ns))
        if len(self._confirmed) >= _TRIPLES_MAX:
            with self._lock:
                self._series.count_commits()

    def read(self, entries: int, size_bytes: int, latency_ns: int) -> None:
        """Count entries that were read and verified together, their bytes, and the time that took."""
        with self._lock:
            self._series.read(entries, size_bytes, latency_ns)

    def count_single_reads(self) -> None:
        """Count the reads in ``single_reads``, and empty it."""
        with self._lock:
            self._series.count_single_reads()


class Metrics:
    """Counters, histograms and gauges of a manager.

    Threads: any. One lock, taken once per call, so callers record once per batch and not per entry.

    Cost: Half a microsecond per call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._series: dict[tuple[str, str, Labels], _Series] = {}
        began_ns = time.time_ns()

        def about() -> Iterator[Gauge]:
            labels = (("version", version.__version__), ("level", str(int(NEWEST_LEVEL))))
            yield MetricKey("build_info", labels=labels), 1
            yield MetricKey("up_since_timestamp_ns"), began_ns

        self._gauges: list[Callable[[], Iterable[Gauge]]] = [about]

    def after_fork(self) -> None:
        """Replace the lock in a forked child, where errors are counted as well; scopes are of no use there."""
        self._lock = threading.Lock()

    def scope(self, ledger_type: str = "", tier: str = "", labels: Labels = ()) -> MetricsScope:
        """Return the scope for one ledger type in one tier, or for other labels."""
        with self._lock:
            return MetricsScope(self._lock, self._of(ledger_type, tier, labels))

    def add(self, name: str, amount: int = 1, ledger_type: str = "", tier: str = "", labels: Labels = ()) -> None:
        """Add to a counter, which begins at 0."""
        with self._lock:
            self._of(ledger_type, tier, labels).add(name, amount)

    def observe(
        self, name: str, ns: int, count: int = 1, ledger_type: str = "", tier: str = "", labels: Labels = ()
    ) -> None:
        """Record a latency in a histogram, ``count`` times, nanoseconds; or a size in bytes."""
        with self._lock:
            self._of(ledger_type, tier, labels).observe(name, ns, count)

    def add_gauges(self, read: Callable[[], Iterable[Gauge]]) -> None:
        """Register a function that each snapshot calls for gauges.

        Args:
            read: Returns the present gauges, without waiting. Any thread may call it, also after the component that it
                reads was closed.
        """
        self._gauges.append(read)

    def snapshot(self) -> MetricsSnapshot:
        """Return all present metrics; either all or none of the values of one recording call are included."""
        counters = {}
        histograms = {}
        with self._lock:
            for scope, series in self._series.items():
                series.count_commits()
                series.count_collected()
                series.count_single_reads()
                for name, value in series.counters.items():
                    counters[MetricKey(name, *scope)] = value
                for name, histogram in series.histograms.items():
                    histograms[MetricKey(name, *scope)] = histogram.snapshot()
        gauges = {key: value for read in self._gauges for key, value in read()}
        return MetricsSnapshot(FrozenDict(counters), FrozenDict(histograms), FrozenDict(gauges))

    def _of(self, ledger_type: str, tier: str, labels: Labels) -> _Series:
        """Return the counters and histograms to record in; the caller holds the lock."""
        series = self._series.get((ledger_type, tier, labels))
        if series is None:
            if ledger_type and len(self._series) >= SCOPES_MAX:
                ledger_type = OTHER_TYPES
            series = self._series.setdefault((ledger_type, tier, labels), _Series())
        return series
