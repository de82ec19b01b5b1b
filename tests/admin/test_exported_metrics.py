"""The list of metrics in docs/metrics.md, held against what a cluster and a store export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pybk import StorageHint
from pybk.admin.exported_metrics import EXPORTED, exported_name
from pybk.metrics import OTHER_TYPES, Metrics
from tests.client.test_limbo_repair import fill, service_of
from tests.cluster.inside import inside
from tests.healing.quick import repair_quickly
from tests.healing.test_autorecovery import autorecovery_of, grace, leaders
from tests.healing.test_repairing import metadata_of
from tests.paths import ROOT
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

prometheus = pytest.importorskip("prometheus_client")

_ROW = re.compile(r"^\| `(pybk_\w+)` \| (counter|gauge|histogram) \| (.*?) \| (.*) \|$", re.M)

RARE = {
    "pybk_compactions_total": "a compaction",
    "pybk_member_recoveries_total": "a recovery without the password",
    "pybk_request_faults_total": "a defect",
    "pybk_unsealed_ledgers_total": "a ledger of an older pybk",
    "pybk_misplaced_choices_total": "a cluster with too few zones",
    "pybk_under_replicated_oldest_timestamp_seconds": "a ledger that is short",
    "pybk_scrub_bytes_total": "a scrub",
    "pybk_scrub_damaged_records_total": "damage",
    "pybk_scrub_oldest_timestamp_seconds": "a scrub",
}
"""Metrics that appear with an event, which need not come before the scrape here."""


def listed() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return the kind, labels and meaning of each metric in the document."""
    rows = _ROW.findall((ROOT / "docs/metrics.md").read_text())
    return {name: (kind, tuple(re.findall(r"\w+", labels)), text) for name, kind, labels, text in rows}


def scraped(registry: Any) -> dict[str, tuple[str, set[tuple[str, ...]]]]:
    """Return the kind and the sets of labels of each metric that has a sample, as in the document."""
    found: dict[str, tuple[str, set[tuple[str, ...]]]] = {}
    for family in registry.collect():
        kind = "gauge" if family.type == "stateset" else family.type
        name = f"{family.name}_total" if kind == "counter" else family.name
        for sample in family.samples:
            labels = tuple(label for label in sample.labels if label not in ("store", "le"))
            found.setdefault(name, (kind, set()))[1].add(labels)
    return found


def test_the_document_says_what_the_exporter_says() -> None:
    assert listed() == {
        exported_name(name, about.kind): (about.kind, about.labels, about.help) for name, about in EXPORTED.items()
    }


def test_the_document_lists_exactly_what_a_cluster_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pybk.admin.metrics import register

    repair_quickly(monkeypatch)
    registry = prometheus.CollectorRegistry()
    with inside(tmp_path / "cluster", count=4, autorecovery=True) as cluster, open_quick(tmp_path / "store") as store:
        grace(cluster, 0.3)
        client = cluster.connect()
        ledger_ids = [fill(client, 20, storage_hints={StorageHint.SSD}) for _ in range(3)]
        (leader,) = wait_until(lambda: leaders(cluster))
        ensemble = client.ledger_metadata(ledger_ids[0]).fragments[-1].ensemble
        lost = next(
            place for place in range(4) if place != leader and service_of(cluster.bookies[place]).bookie in ensemble
        )
        cluster.bookies[lost].close()
        wait_until(lambda: any(autorecovery_of(each).repairer.repaired for each in cluster.bookies))
        wait_until(lambda: not metadata_of(client).list_under_replicated())
        writer = store.create_ledger(insecure=True)
        writer.append(b"x")
        store.checkpoint()
        with client.open_ledger(ledger_ids[0], password=b"correct horse") as reader:
            list(reader)
        for number, manager in enumerate((*cluster.bookies, client, store)):
            register(manager, str(number), registry=registry)
        found = scraped(registry)
    documented = listed()
    assert {name: (kind, [labels]) for name, (kind, each) in found.items() for labels in each} == {
        name: (kind, [labels]) for name, (kind, labels, _) in documented.items() if name in found
    }
    assert set(documented) - set(found) <= set(RARE)


def test_a_hundred_pairs_of_type_and_tier_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pybk.admin.metrics import PAIRS_MAX, ManagerCollector

    metrics = Metrics()
    for number in range(PAIRS_MAX + 50):
        metrics.scope(f"type-{number}", "nvme").appended(2, 10, 1000)
    with open_quick(tmp_path) as manager:
        collector = ManagerCollector(manager, "s")
        monkeypatch.setattr(type(manager), "metrics", lambda _: metrics.snapshot())
        for _ in range(2):
            samples = [sample for family in collector.collect() for sample in family.samples]
            counts = {each.labels["ledger_type"]: each.value for each in samples if "entries" in each.name}
            assert len(counts) == PAIRS_MAX + 1
            assert (counts["type-0"], counts[OTHER_TYPES]) == (2, 100)
            latencies = {each.labels["ledger_type"]: each.value for each in samples if each.name.endswith("_count")}
            assert latencies[OTHER_TYPES] == 100
