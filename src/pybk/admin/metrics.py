"""A manager's metrics for Prometheus; needs the extra ``pybk[metrics]``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
        StateSetMetricFamily,
    )
    from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry
except ImportError as error:
    raise ImportError("exporting metrics takes prometheus_client: pip install 'pybk[metrics]'") from error

from pybk.admin.exported_metrics import COUNTER, EXPORTED, GAUGE, HISTOGRAM, Exported, exported_name
from pybk.errors import ClosedError
from pybk.health import HEALTH_STATES, Health
from pybk.manager.ledger_manager import LedgerManager
from pybk.metrics import OTHER_TYPES, HistogramSnapshot, MetricKey, MetricsSnapshot

__all__ = ["ManagerCollector", "register"]

BUCKETS_NS: Final = tuple(
    digit * 10**exponent for exponent in range(3, 10) for digit in ((1, 2, 5) if exponent < 9 else (1, 2, 5, 10))
)
"""Upper bounds of the exported latency buckets: 1 µs to 10 s, nanoseconds."""

BUCKETS_BYTES: Final = tuple(1 << power for power in range(9, 34, 2))
"""Upper bounds of the exported buckets of sizes: 512 bytes to 8 GiB."""

PAIRS_MAX: Final = 100
"""Pairs of ledger type and tier that are exported; the others are exported together, as type ``OTHER_TYPES``.

The number is bounded because a pair has 54 series, and a scrape has to stay small.
"""

_Value = TypeVar("_Value", int, HistogramSnapshot)


class ManagerCollector(Collector):
    """Shows a manager's metrics to Prometheus whenever it asks.

    Counters are ``pybk_<name>_total``, latencies ``pybk_<name>_seconds``, sizes ``pybk_<name>_bytes``; the list is in
    ``docs/reference/metrics.md``. There are also gauges of the manager's health.

    Args:
        manager: The manager of the metrics.
        store: Value of the label ``store``, to tell managers apart.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, store: str = "") -> None:
        self._manager = manager
        self._store = store
        self._pairs: dict[tuple[str, str], None] = {}
        """The pairs that were exported first; they do not change, because a counter must not decrease."""

    def describe(self) -> Iterator[Metric]:
        """Name no series in advance, because the series depend on the ledgers."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all present metrics; of a closed manager, its last counters and latencies.

        Cost: 0.1 ms and 10 µs for each pair of ledger type and tier, and a look at each directory's free space.
        """
        snapshot = self._manager.metrics()
        yield from self._counters(snapshot)
        yield from self._histograms(snapshot)
        yield from self._gauges(snapshot.gauges)
        try:
            health = self._manager.health()
        except ClosedError:
            return  # a scrape may come between closing and unregistering, and shows other managers, too
        yield from self._health(health)

    def _counters(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for key, value in self._folded(snapshot.counters).items():
            family = families.get(key.name)
            about = _about(key, COUNTER)
            if family is None:
                family = families[key.name] = CounterMetricFamily(
                    exported_name(key.name, COUNTER), about.help, labels=("store", *about.labels)
                )
            family.add_metric(self._labels(key, about), value)
        yield from families.values()

    def _histograms(self, snapshot: MetricsSnapshot) -> Iterator[Metric]:
        families: dict[str, HistogramMetricFamily] = {}
        for key, histogram in self._folded(snapshot.histograms).items():
            family = families.get(key.name)
            about = _about(key, HISTOGRAM)
            if family is None:
                family = families[key.name] = HistogramMetricFamily(
                    exported_name(key.name, HISTOGRAM), about.help, labels=("store", *about.labels)
                )
            if key.name.endswith("_ns"):
                buckets, total = _buckets(histogram, BUCKETS_NS, 1e9), histogram.sum / 1e9
            else:
                buckets, total = _buckets(histogram, BUCKETS_BYTES, 1), float(histogram.sum)
            family.add_metric(self._labels(key, about), buckets, total)
        yield from families.values()

    def _gauges(self, gauges: Mapping[MetricKey, float]) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for key, value in gauges.items():
            family = families.get(key.name)
            about = _about(key, GAUGE)
            if family is None:
                family = families[key.name] = GaugeMetricFamily(
                    exported_name(key.name, GAUGE), about.help, labels=("store", *about.labels)
                )
            family.add_metric(self._labels(key, about), value / 1e9 if key.name.endswith("_ns") else value)
        yield from families.values()

    def _labels(self, key: MetricKey, about: Exported) -> list[str]:
        values = {"ledger_type": key.ledger_type, "tier": key.tier, **dict(key.labels)}
        return [self._store, *(values[name] for name in about.labels)]

    def _folded(self, values: Mapping[MetricKey, _Value]) -> dict[MetricKey, _Value]:
        """Return values with the pairs of ledger type and tier beyond ``PAIRS_MAX`` added up."""
        found: dict[MetricKey, _Value] = {}
        for key, value in values.items():
            pair = key.ledger_type, key.tier
            if key.ledger_type and pair not in self._pairs:
                if len(self._pairs) < PAIRS_MAX:
                    self._pairs[pair] = None
                else:
                    key = key._replace(ledger_type=OTHER_TYPES)
            before = found.get(key)
            found[key] = value if before is None else before + value
        return found

    def _health(self, health: Health) -> Iterator[Metric]:
        state = StateSetMetricFamily("pybk_state", EXPORTED["state"].help, labels=["store"])
        state.add_metric([self._store], {name: name == health.state for name in HEALTH_STATES})
        yield state
        codes = dict.fromkeys(reason.code for reason in health.reasons)
        yield from self._gauges(
            {
                **{MetricKey("health_reason", labels=(("code", code),)): 1.0 for code in codes},
                MetricKey("outstanding_bytes"): health.outstanding_bytes,
                MetricKey("tail_bytes"): health.tail_bytes,
                **{MetricKey("free_bytes", labels=(("directory", each),)): n for each, n in health.free_bytes.items()},
            }
        )


def _about(key: MetricKey, kind: str) -> Exported:
    """Return what is said about a metric; one that is not listed yet has the labels that it came with."""
    about = EXPORTED.get(key.name)
    if about is None:
        words = exported_name(key.name, kind).removeprefix("pybk_").replace("_", " ").capitalize()
        about = Exported(kind, ("ledger_type", "tier", *(name for name, _ in key.labels)), f"{words}.")
    return about


def _buckets(histogram: HistogramSnapshot, bounds: Iterable[int], unit: float) -> list[tuple[str, float]]:
    """Return the cumulative counts below each exported bound.

    A value counts below a bound if its own bucket, an eighth of the value wide, ends there or below.
    """
    bounds = tuple(bounds)
    counts = [0] * (len(bounds) + 1)
    for highest, count in histogram.buckets:
        counts[bisect_left(bounds, min(highest, histogram.maximum))] += count
    buckets = []
    total = 0
    for bound, count in zip(bounds, counts, strict=False):
        total += count
        buckets.append((repr(bound / unit), float(total)))
    buckets.append(("+Inf", float(histogram.count)))
    return buckets


def register(manager: LedgerManager, store: str = "", *, registry: CollectorRegistry = REGISTRY) -> ManagerCollector:
    """Show a manager's metrics in a registry.

    Args:
        manager: The manager of the metrics.
        store: Value of the label ``store``; managers in one registry need different ones.
        registry: The registry; prometheus_client's own by default.

    Returns:
        The collector; ``registry.unregister(collector)`` ends it. Of a closed manager it shows the last counters.
    """
    collector = ManagerCollector(manager, store)
    registry.register(collector)
    return collector
