"""The list of metrics in docs/reference/metrics.md, held against what a cluster and a store export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pybk import DigestMismatchError, LedgerFencedError, LedgerManager, StorageHint
from pybk.admin.exported_metrics import EXPORTED, exported_name
from pybk.metrics import OTHER_TYPES, Metrics
from pybk.replication.messages import Status
from tests.client.test_limbo_repair import PASSWORD, damage, fill, payload
from tests.cluster.inside import Inside, inside
from tests.healing.quick import repair_quickly
from tests.healing.test_autorecovery import autorecovery_of, grace, leaders
from tests.internals import cluster_backend_of, metadata_of, service_of
from tests.paths import ROOT
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

prometheus = pytest.importorskip("prometheus_client")

_ROW = re.compile(r"^\| `(pybk_\w+)` \| (counter|gauge|histogram) \| (.*?) \| (.*) \|$", re.M)

RARE = {
    "compactions": "tests/storage/compaction/test_compaction.py",
    "member_recoveries": "tests/bookie/test_member_rights.py",
    "request_faults": "tests/bookie/test_hostile.py",
    "unsealed_ledgers": "tests/test_seal.py",
    "away_members": "tests/client/test_membership.py",
    "misplaced_choices": "tests/client/test_membership.py",
    "subscription_lag_records": "tests/streams/test_subscription_lag.py",
    "subscription_oldest_timestamp_ns": "tests/streams/test_subscription_lag.py",
    "under_replicated_oldest_timestamp_ns": "tests/cluster/test_health.py",
    "scrub_bytes": "tests/healing/test_scrub.py",
    "scrub_damaged_records": "tests/healing/test_embedded_scrub.py",
    "scrub_oldest_timestamp_ns": "tests/healing/test_embedded_scrub.py",
    "scrub_period_ns": "tests/healing/test_embedded_scrub.py",
}
"""Metrics that appear with an event, which need not come before the scrape here, and the test that makes them move."""


def listed() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return the kind, labels and meaning of each metric in the document."""
    rows = _ROW.findall((ROOT / "docs/reference/metrics.md").read_text())
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


@pytest.mark.parametrize("name", RARE)
def test_a_metric_that_is_rare_moves_in_a_test_of_its_own(name: str) -> None:
    text = (ROOT / RARE[name]).read_text()
    assert f'"{name}"' in text or re.search(rf"^\s.*\b{name.upper()}\b", text, re.M)


def test_the_document_lists_exactly_what_a_cluster_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pybk.admin.metrics import register

    repair_quickly(monkeypatch)
    registry = prometheus.CollectorRegistry()
    with (
        inside(tmp_path / "cluster", count=4, autorecovery=True) as cluster,
        open_quick(tmp_path / "store") as store,
    ):
        grace(cluster, 0.3)
        client = cluster.connect()
        ledger_ids = [fill(client, 20, storage_hints={StorageHint.SSD}) for _ in range(3)]
        appending = client.create_ledger(password=PASSWORD)
        appending.append(b"before")
        (leader,) = wait_until(lambda: leaders(cluster))
        ensembles = [
            client.ledger_metadata(ledger_id).fragments[-1].ensemble
            for ledger_id in (ledger_ids[0], appending.ledger_id)
        ]
        lost = next(
            place
            for place in range(4)
            if place != leader and all(service_of(cluster.bookies[place]).bookie in each for each in ensembles)
        )
        cluster.bookies[lost].close()
        appending.append(b"after")
        wait_until(lambda: len(client.ledger_metadata(appending.ledger_id).fragments) == 2)
        cluster.connect().open_ledger(appending.ledger_id, password=PASSWORD).close()
        with pytest.raises(LedgerFencedError):
            appending.append(b"too late")
        wait_until(lambda: any(autorecovery_of(each).worker.repaired for each in cluster.bookies))
        wait_until(lambda: not list(metadata_of(client).marks()))
        mend(client, cluster, fill(client, 40))
        read_damage(store, tmp_path / "store")
        with client.open_ledger(ledger_ids[0], password=b"correct horse") as reader:
            list(reader)
        for number, manager in enumerate((*cluster.bookies, client, store)):
            register(manager, str(number), registry=registry)
        found = scraped(registry)
    documented = listed()
    assert {name: (kind, [labels]) for name, (kind, each) in found.items() for labels in each} == {
        name: (kind, [labels]) for name, (kind, labels, _) in documented.items() if name in found
    }
    assert set(documented) - set(found) <= {exported_name(name, EXPORTED[name].kind) for name in RARE}
    still = {name for name, value in highest(registry).items() if not value and documented[name][0] != "gauge"}
    assert still <= {"pybk_salvages_total", "pybk_session_losses_total"}, "these are counted nowhere"


def mend(client: LedgerManager, cluster: Inside, ledger_id: int) -> None:
    """Damage a copy of an entry, and have a read find and mend that."""
    first = client.ledger_metadata(ledger_id).fragments[0].ensemble[0]
    service = next(each for each in map(service_of, cluster.bookies) if each.bookie == first)
    wait_until(lambda: service.replicas.read(ledger_id, 39, 39, 1, 1 << 20)[0] is Status.OK)
    damage(service, payload(39))
    near = cluster_backend_of(client).membership
    near.near = first.bookie_id
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        assert [entry.payload for entry in reader.read(39, 39)] == [payload(39)]
    near.near = None


def read_damage(store: LedgerManager, directory: Path) -> None:
    """Move a ledger to another tier, and read an entry of it that is damaged there."""
    with store.create_ledger(insecure=True) as writer:
        writer.append(b"to be damaged")
    store.checkpoint()
    store.move_ledger(writer.ledger_id, StorageHint.HDD)
    for path in (directory / "hdd").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        if b"to be damaged" in data:
            path.write_bytes(data.replace(b"to be damaged", b"to be Damaged"))
    with store.open_ledger(writer.ledger_id) as reader, pytest.raises(DigestMismatchError):
        list(reader)


def highest(registry: Any) -> dict[str, float]:
    """Return the highest value of each metric, of a histogram the highest count."""
    found: dict[str, float] = {}
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_sum", "_created")):
                found[name] = max(found.get(name, 0), sample.value)
    return found


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
