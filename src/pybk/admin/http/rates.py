"""Rates per second and latencies, from the counters of two moments."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from pybk.metrics import (
    APPEND_LATENCY,
    APPENDED_BYTES,
    APPENDED_ENTRIES,
    BOOKIE_REQUEST,
    CLIENT_BYTES,
    CLIENT_ENTRIES,
    CLIENT_LATENCY,
    LOG_SYNC,
    METADATA_OP,
    OTHER_TYPES,
    READ_BYTES,
    READ_ENTRIES,
    READ_LATENCY,
    SESSION_LOSSES,
    SESSIONS,
    HistogramSnapshot,
    MetricKey,
    MetricsSnapshot,
)

TYPES_MAX: Final = 200
"""The most ledger types whose rates are sent; the others are sent together, as type ``OTHER_TYPES``."""

_READS: Final = MetricKey(BOOKIE_REQUEST, labels=(("op", "read"),))
"""The times of clients' reads at a bookie, which does not know their ledger types."""

_NONE: Final = HistogramSnapshot(0, 0, 0, ())


class Rates(NamedTuple):
    """The entries and bytes that were appended and read in a second.

    Attributes:
        append_entries: Entries that became durable; at a client, that an ack quorum acknowledged.
        append_bytes: Their encoded bytes.
        append_p50_s: The latency that half of them did not exceed, seconds; null without any.
        append_p99_s: The latency that 99 % of them did not exceed.
        read_entries: Entries that were read and verified; at a bookie, requests to read, which have no ledger type.
        read_bytes: Their encoded bytes.
        read_p99_s: The latency that 99 % of the reads did not exceed.
    """

    append_entries: float = 0.0
    append_bytes: float = 0.0
    append_p50_s: float | None = None
    append_p99_s: float | None = None
    read_entries: float = 0.0
    read_bytes: float = 0.0
    read_p99_s: float | None = None

    def __bool__(self) -> bool:
        """Return whether anything was appended or read."""
        return bool(self.append_entries or self.read_entries)


class ProcessUse(NamedTuple):
    """The resources that a process uses, and its requests to the metadata store.

    Attributes:
        memory_bytes: Its resident memory.
        cpu: The number of cores that it kept busy in the last second.
        sessions: The number of sessions that clients have with its bookie; null without a bookie.
        metadata_requests: Its requests to the metadata store a second.
        metadata_p99_s: The longest time that 99 % of them took, seconds; null without any.
        session_losses: The number of times that its session with the metadata store has ended other than by closing.
    """

    memory_bytes: int
    cpu: float
    sessions: int | None
    metadata_requests: float
    metadata_p99_s: float | None
    session_losses: int


class LedgerCounts(NamedTuple):
    """The numbers of ledgers.

    Attributes:
        open: The open ledgers, those in recovery included.
        closed: The closed ledgers.
    """

    open: int
    closed: int


class Load(NamedTuple):
    """The load of a process in the last second.

    Attributes:
        seen_ns: When that was seen, nanoseconds since 1970.
        total: The rates of all ledger types together.
        types: The rates by ledger type.
        sync_p99_s: The longest time that 99 % of the syncs of its log took, seconds; null without any.
        limbo_ledgers: The number of ledgers in limbo at its bookie; null without a bookie.
        ledgers: The cluster's ledgers by type, if its auditor leads; empty otherwise.
        process: The resources that the process uses; null if it did not report them, as an older version.
    """

    seen_ns: int
    total: Rates
    types: Mapping[str, Rates]
    sync_p99_s: float | None
    limbo_ledgers: int | None
    ledgers: Mapping[str, LedgerCounts]
    process: ProcessUse | None = None


class RateMeter:
    """Measures the rates of a process, from one call of ``measure`` to the next.

    Threads: one at a time.
    """

    def __init__(self) -> None:
        self._before: MetricsSnapshot | None = None
        self._before_ns = 0
        self._cpu_s = time.process_time()

    def measure(self, now_ns: int, metrics: MetricsSnapshot) -> Load:
        """Return the load since the last call; empty at the first call.

        Args:
            now_ns: The time of the snapshot, nanoseconds since 1970.
            metrics: The snapshot.
        """
        before = metrics if self._before is None else self._before
        seconds = max((now_ns - self._before_ns) / 1e9, 1e-3)
        self._before, self._before_ns = metrics, now_ns
        since = _Since(before, metrics, seconds)
        types = since.by_type()
        limbo = metrics.gauges.get(MetricKey("limbo_ledgers"))
        return Load(
            seen_ns=now_ns,
            total=since.total(),
            types=types,
            sync_p99_s=_seconds(since.histogram({LOG_SYNC}, None), 0.99),
            limbo_ledgers=None if limbo is None else int(limbo),
            ledgers=_ledgers_of(metrics.gauges),
            process=self._process(since, metrics, seconds),
        )

    def _process(self, since: _Since, metrics: MetricsSnapshot, seconds: float) -> ProcessUse:
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        sessions = metrics.gauges.get(MetricKey(SESSIONS))
        requests = since.histogram({METADATA_OP}, None)
        return ProcessUse(
            memory_bytes=_resident_bytes(),
            cpu=(self._cpu_s - cpu_s) / seconds,
            sessions=None if sessions is None else int(sessions),
            metadata_requests=requests.count / seconds,
            metadata_p99_s=_seconds(requests, 0.99),
            session_losses=sum(count for key, count in metrics.counters.items() if key.name == SESSION_LOSSES),
        )


def _resident_bytes() -> int:
    """Return the resident memory of this process; where the system does not say it, the most that it ever had."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Since:
    """The difference of two snapshots."""

    def __init__(self, before: MetricsSnapshot, after: MetricsSnapshot, seconds: float) -> None:
        self._seconds = seconds
        of_bookie = any(key.name == APPENDED_ENTRIES for key in after.counters)
        self._appends = (
            (APPENDED_ENTRIES, APPENDED_BYTES, APPEND_LATENCY)
            if of_bookie
            else (CLIENT_ENTRIES, CLIENT_BYTES, CLIENT_LATENCY)
        )
        wanted = {*self._appends, READ_ENTRIES, READ_BYTES, READ_LATENCY, LOG_SYNC, METADATA_OP, BOOKIE_REQUEST}
        self._is_bookie = _READS in after.histograms
        self._counters = {
            key: grown
            for key, value in after.counters.items()
            if key.name in wanted and (grown := value - before.counters.get(key, 0)) > 0
        }
        self._histograms = {
            key: _minus(value, before.histograms.get(key, _NONE))
            for key, value in after.histograms.items()
            if key.name in wanted and value.count > before.histograms.get(key, _NONE).count
        }

    def by_type(self) -> dict[str, Rates]:
        """Return the rates of the types of which anything was appended or read, the busiest first."""
        sizes: dict[str, int] = {}
        for key, grown in self._counters.items():
            if key.name in (self._appends[0], READ_ENTRIES):
                sizes[key.ledger_type] = sizes.get(key.ledger_type, 0) + grown
        ordered = sorted(sizes, key=lambda each: (-sizes[each], each))
        found = {each: self.rates({each}) for each in ordered[:TYPES_MAX]}
        if others := set(ordered[TYPES_MAX:]):
            found[OTHER_TYPES] = self.rates(others | ({OTHER_TYPES} & found.keys()))
        return found

    def total(self) -> Rates:
        """Return the rates of all types together."""
        found = self.rates(None)
        reads = self._histograms.get(_READS, _NONE)
        if self._is_bookie:
            found = found._replace(read_entries=reads.count / self._seconds, read_p99_s=_seconds(reads, 0.99))
        return found

    def rates(self, types: set[str] | None) -> Rates:
        """Return the rates of some types together; None for all."""
        entries, sizes, latency = self._appends
        appends, reads = self.histogram({latency}, types), self.histogram({READ_LATENCY}, types)
        return Rates(
            self._rate(entries, types),
            self._rate(sizes, types),
            _seconds(appends, 0.5),
            _seconds(appends, 0.99),
            self._rate(READ_ENTRIES, types),
            self._rate(READ_BYTES, types),
            _seconds(reads, 0.99),
        )

    def _rate(self, name: str, types: set[str] | None) -> float:
        found = sum(
            grown
            for key, grown in self._counters.items()
            if key.name == name and (types is None or key.ledger_type in types)
        )
        return found / self._seconds

    def histogram(self, names: set[str], types: set[str] | None) -> HistogramSnapshot:
        """Return the values that were recorded, of some types; None for all."""
        found = _NONE
        for key, value in self._histograms.items():
            if key.name in names and (types is None or key.ledger_type in types):
                found = found + value
        return found


def _minus(after: HistogramSnapshot, before: HistogramSnapshot) -> HistogramSnapshot:
    counts = dict(before.buckets)
    buckets = tuple(
        (highest, grown) for highest, count in after.buckets if (grown := count - counts.get(highest, 0)) > 0
    )
    maximum = min(after.maximum, buckets[-1][0]) if buckets else 0
    return HistogramSnapshot(after.count - before.count, after.sum - before.sum, maximum, buckets)


def _seconds(histogram: HistogramSnapshot, q: float) -> float | None:
    return histogram.quantile(q) / 1e9 if histogram.count else None


def _ledgers_of(gauges: Mapping[MetricKey, float]) -> dict[str, LedgerCounts]:
    found: dict[str, LedgerCounts] = {}
    for key, value in gauges.items():
        if key.name == "ledgers":
            counts = found.get(key.ledger_type, LedgerCounts(0, 0))
            is_open = ("state", "open") in key.labels
            found[key.ledger_type] = counts._replace(**{"open" if is_open else "closed": int(value)})
    if len(found) > TYPES_MAX:
        ordered = sorted(found, key=lambda each: -sum(found[each]))
        others = [found.pop(each) for each in ordered[TYPES_MAX:]]
        found[OTHER_TYPES] = LedgerCounts(*map(sum, zip(*others, strict=True)))
    return found


def together(rates: Iterable[Rates]) -> Rates:
    """Return the rates of several processes together: the sums of rates, and the longest latencies."""
    found = tuple(rates)

    def longest(latency: Callable[[Rates], float | None]) -> float | None:
        return max((each for one in found if (each := latency(one)) is not None), default=None)

    return Rates(
        sum(each.append_entries for each in found),
        sum(each.append_bytes for each in found),
        longest(lambda each: each.append_p50_s),
        longest(lambda each: each.append_p99_s),
        sum(each.read_entries for each in found),
        sum(each.read_bytes for each in found),
        longest(lambda each: each.read_p99_s),
    )


def decode_load(values: Mapping[str, Any]) -> Load:
    """Return the load in a decoded response.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: It is not one.
    """
    limbo, sync, process = values["limbo_ledgers"], values["sync_p99_s"], values.get("process")
    types = dict(list(values["types"].items())[: TYPES_MAX + 1])
    ledgers = dict(list(values["ledgers"].items())[: TYPES_MAX + 1])
    return Load(
        seen_ns=int(values["seen_ns"]),
        total=_decode_rates(values["total"]),
        types={name: _decode_rates(each) for name, each in types.items()},
        sync_p99_s=None if sync is None else float(sync),
        limbo_ledgers=None if limbo is None else int(limbo),
        ledgers={name: LedgerCounts(int(each["open"]), int(each["closed"])) for name, each in ledgers.items()},
        process=None if process is None else _decode_process(process),
    )


def _decode_process(values: Mapping[str, Any]) -> ProcessUse:
    sessions, p99 = values["sessions"], values["metadata_p99_s"]
    return ProcessUse(
        memory_bytes=int(values["memory_bytes"]),
        cpu=float(values["cpu"]),
        sessions=None if sessions is None else int(sessions),
        metadata_requests=float(values["metadata_requests"]),
        metadata_p99_s=None if p99 is None else float(p99),
        session_losses=int(values["session_losses"]),
    )


def _decode_rates(values: Mapping[str, Any]) -> Rates:
    def latency(name: str) -> float | None:
        return None if values[name] is None else float(values[name])

    return Rates(
        append_entries=float(values["append_entries"]),
        append_bytes=float(values["append_bytes"]),
        append_p50_s=latency("append_p50_s"),
        append_p99_s=latency("append_p99_s"),
        read_entries=float(values["read_entries"]),
        read_bytes=float(values["read_bytes"]),
        read_p99_s=latency("read_p99_s"),
    )
