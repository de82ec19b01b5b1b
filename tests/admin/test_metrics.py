"""Metrics, and what Prometheus sees of them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import LedgerClosedError, StorageFailedError
from pybk.flags import StorageHint
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.metrics import APPEND_ERRORS, APPEND_LATENCY, APPENDED_BYTES, APPENDED_ENTRIES, MetricKey
from pybk.storage.io.filesystem import OsFile
from tests.storage.real_store import open_quick, python

prometheus = pytest.importorskip("prometheus_client")


def test_appends_are_counted_by_type_and_tier(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        orders = manager.create_ledger(ledger_type="orders", insecure=True)
        events = manager.create_ledger(ledger_type="events", storage_hints={StorageHint.HDD}, insecure=True)
        orders.append_many([b"x" * 100] * 7)
        orders.append(b"y")
        events.append_async(b"z").result()
        metrics = manager.metrics()
    overhead = ENTRY_HEADER_BYTES + 32
    counters = metrics.counters
    assert counters[MetricKey(APPENDED_ENTRIES, "orders", "nvme")] == 8
    assert counters[MetricKey(APPENDED_BYTES, "orders", "nvme")] == 8 * overhead + 701
    assert counters[MetricKey(APPENDED_ENTRIES, "events", "hdd")] == 1
    histograms = metrics.histograms
    latency = histograms[MetricKey(APPEND_LATENCY, "orders", "nvme")]
    assert latency.count == 8
    assert 0 < latency.quantile(0.5) <= latency.quantile(0.99) <= latency.maximum
    assert histograms[MetricKey(APPEND_LATENCY, "events", "hdd")].count == 1


def test_entries_that_fail_and_calls_that_are_refused_count_by_their_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path) as manager:
        orders = manager.create_ledger(ledger_type="orders", insecure=True)
        orders.append(b"x")
        closed = manager.create_ledger(insecure=True)
        closed.close()
        for refused in (lambda: closed.append(b"y"), lambda: closed.append_many([b"y"] * 5)):
            with pytest.raises(LedgerClosedError):
                refused()

        def fail(file: OsFile, buffers: Any, offset: int) -> None:
            raise OSError(errno.EIO, "the device does not answer")

        with monkeypatch.context() as broken:
            broken.setattr(OsFile, "write_durable", fail)
            with pytest.raises(StorageFailedError):
                orders.append_many([b"z"] * 7)
        with pytest.raises(StorageFailedError):
            orders.append(b"z")
        counters = manager.metrics().counters
    assert {key: value for key, value in counters.items() if key.name == APPEND_ERRORS} == {
        MetricKey(APPEND_ERRORS, "", "nvme", (("code", "ledger_closed"),)): 2,
        MetricKey(APPEND_ERRORS, "orders", "nvme", (("code", "storage_failed"),)): 8,
    }
    assert counters[MetricKey(APPENDED_ENTRIES, "orders", "nvme")] == 1


def test_prometheus_sees_them_all(tmp_path: Path) -> None:
    from pybk.admin.metrics import BUCKETS_NS, register

    registry = prometheus.CollectorRegistry()
    with open_quick(tmp_path / "one") as one, open_quick(tmp_path / "two") as two:
        collectors = [register(one, "one", registry=registry), register(two, "two", registry=registry)]
        writer = one.create_ledger(ledger_type='or"ders', insecure=True)
        for _ in range(5):
            writer.append(b"x" * 10)
        two.create_ledger(insecure=True).append(b"y")
        list(one.open_ledger(0, recover=False).read(0, 4))
        labels = {"store": "one", "ledger_type": 'or"ders', "tier": "nvme"}

        def value(name: str, **more: str) -> float | None:
            found: float | None = registry.get_sample_value(name, {**labels, **more})
            return found

        assert value("pybk_appended_entries_total") == 5
        assert value("pybk_read_entries_total") == 5
        assert value("pybk_appended_entries_total", store="two", ledger_type="") == 1
        assert value("pybk_append_latency_seconds_count") == 5
        latency = one.metrics().histograms[MetricKey(APPEND_LATENCY, 'or"ders', "nvme")]
        assert value("pybk_append_latency_seconds_sum") == pytest.approx(latency.sum / 1e9)
        bounds = [repr(bound / 1e9) for bound in BUCKETS_NS]
        counts = [value("pybk_append_latency_seconds_bucket", le=bound) for bound in [*bounds, "+Inf"]]
        assert counts == sorted(count for count in counts if count is not None)
        assert (counts[0], counts[-1]) == (0, 5)
        for bound, count in zip(BUCKETS_NS, counts, strict=False):
            if latency.maximum <= bound:
                assert count == 5, "values at or below a bound are not counted below it"
        assert registry.get_sample_value("pybk_state", {"store": "one", "pybk_state": "ok"}) == 1
        assert registry.get_sample_value("pybk_state", {"store": "one", "pybk_state": "failed"}) == 0
        assert registry.get_sample_value("pybk_outstanding_bytes", {"store": "one"}) == 0
        tail = registry.get_sample_value("pybk_tail_bytes", {"store": "one"})
        assert tail == one.health().tail_bytes
        directory = str(tmp_path / "one")  # all tiers are on its device
        assert registry.get_sample_value("pybk_free_bytes", {"store": "one", "directory": directory}) > 0
        text = prometheus.generate_latest(registry).decode()
        assert 'pybk_appended_bytes_total{ledger_type="or\\"ders",store="one",tier="nvme"}' in text
        for collector in collectors:
            registry.unregister(collector)
        assert prometheus.generate_latest(registry) == b""


def test_a_scrape_after_closing_shows_the_last_counters(tmp_path: Path) -> None:
    from pybk.admin.metrics import register

    registry = prometheus.CollectorRegistry()
    with open_quick(tmp_path / "closed") as manager, open_quick(tmp_path / "open") as other:
        register(manager, "closed", registry=registry)
        register(other, "open", registry=registry)
        manager.create_ledger(insecure=True).append(b"x")
        manager.close()
        scraped = prometheus.generate_latest(registry).decode()
    assert 'pybk_appended_entries_total{ledger_type="",store="closed",tier="nvme"} 1.0' in scraped
    assert 'pybk_state{pybk_state="ok",store="open"} 1.0' in scraped
    assert 'pybk_state{pybk_state="ok",store="closed"}' not in scraped


def test_without_the_extra_the_remedy_is_named() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
try:
    from pybk.admin.metrics import register
except ImportError as error:
    print(error)
"""
    done = python(program).communicate("")[0]
    assert done == "exporting metrics takes prometheus_client: pip install 'pybk[metrics]'\n"
