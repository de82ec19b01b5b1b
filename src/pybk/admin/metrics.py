"""A manager's metrics for Prometheus; needs the extra ``pybk[metrics]``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Final

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

from pybk.errors import ClosedError
from pybk.health import HEALTH_STATES, Health
from pybk.manager import LedgerManager
from pybk.metrics import HistogramSnapshot, MetricKey

BUCKETS_NS: Final = tuple(
    digit * 10**exponent for exponent in range(3, 10) for digit in ((1, 2, 5) if exponent < 9 else (1, 2, 5, 10))
)
"""Upper bounds of the exported latency buckets: 1 µs to 10 s, nanoseconds."""

_LABELS: Final = ("store", "ledger_type", "tier")


class ManagerCollector(Collector):
    """Shows a manager's metrics to Prometheus whenever it asks.

    Counters are ``pybk_<name>_total``, latencies ``pybk_<name>_seconds``, each by store, ledger type and tier. There
    are also gauges of the store's health.

    Args:
        manager: Whose metrics.
        store: Value of the label ``store``, to tell managers apart.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, store: str = "") -> None:
        self._manager = manager
        self._store = store

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: which series there are depends on the ledgers."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as of now; of a closed manager, its last counters and latencies.

        Cost: 0.1 ms and 10 µs for each pair of ledger type and tier, and a look at each directory's free space.
        """
        snapshot = self._manager.metrics()
        yield from self._counters(snapshot.counters)
        yield from self._histograms(snapshot.histograms)
        try:
            health = self._manager.health()
        except ClosedError:
            return  # a scrape may come between closing and unregistering, and shows other managers, too
        yield from self._health(health)

    def _counters(self, counters: Mapping[MetricKey, int]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for key, value in counters.items():
            family = families.get(key.name)
            if family is None:
                family = families[key.name] = CounterMetricFamily(
                    f"pybk_{key.name}", f"{_words(key.name)} since the store was opened.", labels=_LABELS
                )
            family.add_metric([self._store, key.ledger_type, key.tier], value)
        yield from families.values()

    def _histograms(self, histograms: Mapping[MetricKey, HistogramSnapshot]) -> Iterator[Metric]:
        families: dict[str, HistogramMetricFamily] = {}
        for key, histogram in histograms.items():
            name = key.name.removesuffix("_ns")
            family = families.get(name)
            if family is None:
                family = families[name] = HistogramMetricFamily(
                    f"pybk_{name}_seconds", f"{_words(name)} since the store was opened, seconds.", labels=_LABELS
                )
            family.add_metric([self._store, key.ledger_type, key.tier], _buckets(histogram), histogram.sum / 1e9)
        yield from families.values()

    def _health(self, health: Health) -> Iterator[Metric]:
        state = StateSetMetricFamily("pybk_state", "Whether the store takes appends.", labels=["store"])
        state.add_metric([self._store], {name: name == health.state for name in HEALTH_STATES})
        yield state
        for name, what, value in (
            ("outstanding_bytes", "Bytes appended and not durable yet.", health.outstanding_bytes),
            ("tail_bytes", "Bytes of log that the next open would read.", health.tail_bytes),
        ):
            gauge = GaugeMetricFamily(f"pybk_{name}", what, labels=["store"])
            gauge.add_metric([self._store], value)
            yield gauge
        free = GaugeMetricFamily(
            "pybk_free_bytes", "Free bytes of a directory's device.", labels=["store", "directory"]
        )
        for directory, value in health.free_bytes.items():
            free.add_metric([self._store, directory], value)
        yield free


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Return the cumulative counts below each exported bound.

    A value counts below a bound if its own bucket, an eighth of the value wide, ends there or below.
    """
    counts = [0] * (len(BUCKETS_NS) + 1)
    for highest, count in histogram.buckets:
        counts[bisect_left(BUCKETS_NS, min(highest, histogram.maximum))] += count
    buckets = []
    total = 0
    for bound, count in zip(BUCKETS_NS, counts, strict=False):
        total += count
        buckets.append((repr(bound / 1e9), float(total)))
    buckets.append(("+Inf", float(histogram.count)))
    return buckets


def register(manager: LedgerManager, store: str = "", *, registry: CollectorRegistry = REGISTRY) -> ManagerCollector:
    """Show a manager's metrics in a registry.

    Args:
        manager: Whose metrics.
        store: Value of the label ``store``; managers in one registry need different ones.
        registry: Where; prometheus_client's own by default.

    Returns:
        The collector; ``registry.unregister(collector)`` ends it. Of a closed manager it shows the last counters.
    """
    collector = ManagerCollector(manager, store)
    registry.register(collector)
    return collector
