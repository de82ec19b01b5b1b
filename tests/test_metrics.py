from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from pybk.errors import UsageError
from pybk.metrics import (
    APPEND_LATENCY,
    APPENDED_BYTES,
    APPENDED_ENTRIES,
    OTHER_TYPES,
    SCOPES_MAX,
    Histogram,
    MetricKey,
    Metrics,
)


def test_small_latencies_are_exact() -> None:
    histogram = Histogram()
    for ns in range(16):
        histogram.record(ns)
    assert histogram.snapshot().buckets == tuple((ns, 1) for ns in range(16))


@pytest.mark.parametrize("ns", [0, 1, 15, 16, 17, 127, 128, 1000, 2**31 - 1, 2**31, 10**12, 2**62 + 12345])
def test_a_bucket_is_an_eighth_of_its_value_wide(ns: int) -> None:
    histogram = Histogram()
    histogram.record(ns)
    ((highest, count),) = histogram.snapshot().buckets
    assert count == 1
    assert ns <= highest <= ns * 1.125


def test_buckets_are_without_gap_or_overlap() -> None:
    histogram = Histogram()
    for ns in range(5000):
        histogram.record(ns)
    below = -1
    for highest, count in histogram.snapshot().buckets[:-1]:
        assert count == highest - below
        below = highest


def test_quantiles_against_sorting() -> None:
    chance = random.Random(5)
    values = sorted(int(chance.lognormvariate(10, 2)) for _ in range(3000))
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    for q in (0.001, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = values[max(0, -(-int(q * 1000) * len(values) // 1000) - 1)]
        assert exact <= histogram.quantile(q) <= exact * 1.125
    assert histogram.quantile(1) == values[-1]
    assert (histogram.count, histogram.sum) == (3000, sum(values))


def test_counts_weigh() -> None:
    histogram = Histogram()
    histogram.record(10, 99)
    histogram.record(5000)
    assert (histogram.count, histogram.sum) == (100, 5990)
    assert histogram.quantile(0.99) == 10
    assert histogram.quantile(0.995) == 5000


def test_recording_many_is_recording_each() -> None:
    chance = random.Random(3)
    edges = [number + step for number in (0, 16, 1 << 31, 1 << 53, 1 << 62) for step in (-2, -1, 0, 1)]
    values = [*edges, (1 << 63) - 1, *(int(chance.lognormvariate(10, 5)) for _ in range(1000))]
    counts = [chance.randrange(1, 600) for _ in values]
    each, each_once, many, many_once = Histogram(), Histogram(), Histogram(), Histogram()
    for value, count in zip(values, counts, strict=True):
        each.record(value, count)
        each_once.record(value)
    many.record_many(np.array(values), np.array(counts))
    many_once.record_many(np.array(values))
    assert many.snapshot() == each.snapshot()
    assert many_once.snapshot() == each_once.snapshot()


def test_empty_negative_and_impossible() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) == 0
    histogram.record(-5)
    assert histogram.snapshot().buckets == ((0, 1),)
    assert histogram.sum == 0
    for q in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError):
            histogram.quantile(q)


def test_metrics_are_separate_by_type_and_tier() -> None:
    metrics = Metrics()
    metrics.add("checkpoints")
    metrics.add("reads", 2, "orders", "nvme")
    metrics.scope("orders", "nvme").add("reads", 3)
    metrics.add("reads", 7, "orders", "hdd")
    metrics.observe("read_ns", 100, 4, "orders", "nvme")
    metrics.scope("orders", "nvme").observe("read_ns", 200)
    snapshot = metrics.snapshot()
    assert snapshot.counters == {
        MetricKey("checkpoints"): 1,
        MetricKey("reads", "orders", "nvme"): 5,
        MetricKey("reads", "orders", "hdd"): 7,
    }
    assert all(isinstance(key, MetricKey) for key in (*snapshot.counters, *snapshot.histograms))
    assert list(snapshot.histograms) == [MetricKey("read_ns", "orders", "nvme")]
    assert snapshot.histograms[MetricKey("read_ns", "orders", "nvme")].sum == 600


def test_appended_counts_entries_bytes_and_latency() -> None:
    metrics = Metrics()
    metrics.scope("orders", "nvme").appended(512, 4096, 30_000)
    metrics.scope("orders", "nvme").appended(1, 10, 90_000)
    snapshot = metrics.snapshot()
    assert snapshot.counters[MetricKey(APPENDED_ENTRIES, "orders", "nvme")] == 513
    assert snapshot.counters[MetricKey(APPENDED_BYTES, "orders", "nvme")] == 4106
    latency = snapshot.histograms[MetricKey(APPEND_LATENCY, "orders", "nvme")]
    assert (latency.count, latency.sum, latency.maximum) == (513, 512 * 30_000 + 90_000, 90_000)


def test_a_snapshot_stays_as_it_was() -> None:
    metrics = Metrics()
    metrics.scope("a", "nvme").appended(1, 1, 1)
    before = metrics.snapshot()
    metrics.scope("a", "nvme").appended(1, 1, 1)
    assert before.counters[MetricKey(APPENDED_ENTRIES, "a", "nvme")] == 1
    assert before.histograms[MetricKey(APPEND_LATENCY, "a", "nvme")].count == 1
    with pytest.raises(TypeError):
        before.counters[MetricKey("x", "", "")] = 1  # type: ignore[index]  # that it cannot be done is the point


def test_types_without_end_share_one_series() -> None:
    metrics = Metrics()
    for number in range(SCOPES_MAX + 50):
        metrics.add("reads", 1, f"type-{number}")
    metrics.scope("one-more").add("reads")
    metrics.add("reads", 1, "type-0")
    counters = metrics.snapshot().counters
    assert len(counters) == SCOPES_MAX + 1
    assert counters[MetricKey("reads", OTHER_TYPES, "")] == 51
    assert counters[MetricKey("reads", "type-0", "")] == 2


def test_threads_lose_nothing() -> None:
    metrics = Metrics()
    scope = metrics.scope("t", "nvme")

    def work() -> None:
        for _ in range(2000):
            metrics.scope("t", "nvme").appended(1, 3, 50)
            scope.appended(1, 3, 50)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot = metrics.snapshot()
    assert snapshot.counters[MetricKey(APPENDED_BYTES, "t", "nvme")] == 4 * 2000 * 2 * 3
    assert snapshot.histograms[MetricKey(APPEND_LATENCY, "t", "nvme")].count == 4 * 2000 * 2
