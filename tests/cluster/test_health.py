"""The health of clients and bookies of a cluster that repairs itself, and the metrics of its processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk import ClusterAdmin, LedgerManager, MetricKey
from pybk.errors import MetadataVersionError
from pybk.metadata.auditor_records import REPORT_KEY
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import BookieState
from pybk.metadata.url import open_metadata
from tests.client.test_limbo_repair import PASSWORD, fill
from tests.cluster.inside import Inside, inside
from tests.healing.quick import repair_quickly
from tests.healing.test_autorecovery import autorecovery_of, grace, leaders
from tests.internals import metadata_of, service_of
from tests.waiting import wait_until


@pytest.fixture
def five(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    repair_quickly(monkeypatch)
    with inside(tmp_path, count=5, autorecovery=True) as cluster:
        grace(cluster, 600)
        yield cluster


def codes(manager: LedgerManager) -> set[str]:
    return {reason.code for reason in manager.health().reasons}


def gauge(manager: LedgerManager, name: str, **labels: str) -> float | None:
    return manager.metrics().gauges.get(MetricKey(name, labels=tuple(labels.items())))


def test_a_client_says_what_its_cluster_lacks(five: Inside) -> None:
    client = five.connect()
    fill(client, 20, write_quorum=3)
    (leader,) = wait_until(lambda: leaders(five))
    wait_until(lambda: client.health().state == "ok")
    others = [place for place in range(5) if place != leader]
    five.bookies[others[0]].close()
    wait_until(lambda: "bookies_absent" in codes(client))
    assert client.health().state == "degraded"
    five.bookies[others[1]].close()
    wait_until(lambda: "no_spare_bookie" in codes(client))
    five.bookies[others[2]].close()
    five.bookies[others[3]].close()
    # one of five is alive: no ledger can be created, and entries cannot be read
    wait_until(lambda: client.health().state == "failed")
    wait_until(lambda: {"too_few_bookies", "bookies_absent", "hold_few_registered"} <= codes(client))
    five.bookies[leader].close()
    wait_until(lambda: codes(client) == {"no_bookie"})


def test_health_asks_nobody(five: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    client = five.connect()
    wait_until(lambda: client.health().state == "ok")
    metadata = metadata_of(client)
    here = threading.get_ident()
    asked: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        """Return a method that notes the calls of this thread: others follow what bookies and the auditor write."""
        real = getattr(metadata, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() == here:
                asked.append(name)
            return real(*arguments, **named)

        return call

    for name in ("list_bookies", "list_cookies", "read_auditor_report", "read_settings"):
        monkeypatch.setattr(metadata, name, watched(name))
    for _ in range(100):
        assert client.health().state == "ok"
    assert asked == [], "a call of health() makes no request"


def test_a_client_says_that_repairs_are_paused(five: Inside) -> None:
    client = five.connect()
    wait_until(lambda: client.health().state == "ok")
    ClusterAdmin(client).pause_repair(600, "ann")
    wait_until(lambda: codes(client) == {"repairs_paused"})
    wait_until(lambda: any(gauge(each, "repair_paused_until_timestamp_ns") for each in five.bookies))
    ClusterAdmin(client).resume_repair()
    wait_until(lambda: client.health().state == "ok")


def test_without_an_auditor_a_client_is_degraded(tmp_path: Path) -> None:
    with inside(tmp_path, count=4) as cluster:
        assert codes(cluster.connect()) == {"no_auditor"}


def test_a_report_that_cannot_be_read_is_no_good_news(five: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    client = five.connect()
    wait_until(lambda: client.health().state == "ok")
    monkeypatch.setattr(ClusterMetadata, "write_auditor_report", lambda *_: None)
    with closing(open_metadata(five.url)) as store:

        def is_reported() -> bool:
            """Return whether the client sees it; a report that was being written meanwhile may have replaced it."""
            node = store.get(REPORT_KEY, latest=True)
            assert node is not None
            if node.value != b"what no member wrote":
                with suppress(MetadataVersionError):
                    store.put(REPORT_KEY, b"what no member wrote", node.version, reused=True)
            return codes(client) == {"report_unreadable"}

        wait_until(is_reported)


def test_a_bookie_says_what_it_is_wanted_for(five: Inside) -> None:
    bookie = five.bookies[0]
    admin = ClusterAdmin(five.connect())
    name = service_of(bookie).bookie.bookie_id
    assert codes(bookie) == set()
    admin.maintenance(name, 600)
    wait_until(lambda: codes(bookie) == {"maintenance"})
    assert bookie.health().state == "degraded"
    admin.end_maintenance(name)
    wait_until(lambda: bookie.health().state == "ok")
    admin.drain(name)
    wait_until(lambda: codes(bookie) in ({"draining"}, {"drained"}))
    assert bookie.health().state == "read_only"
    metadata_of(bookie).change_cookie(name, lambda cookie: replace(cookie, state=BookieState.ACTIVE))
    wait_until(lambda: bookie.health().state == "ok")


def test_the_auditor_alone_has_the_gauges_of_the_cluster(five: Inside) -> None:
    client = five.connect()
    ledger_ids = [fill(client, 20) for _ in range(5)]
    (leader,) = wait_until(lambda: leaders(five))
    manager = five.bookies[leader]
    wait_until(lambda: gauge(manager, "members", state="live") == 5)
    assert [gauge(each, "auditor_leader") for each in five.bookies] == [place == leader for place in range(5)]
    assert all(gauge(each, "members", state="live") is None for each in five.bookies if each is not manager)
    assert gauge(manager, "repair_grace_ns") == 600e9
    wait_until(lambda: gauge(manager, "largest_ensemble") == 0, "no ledger to be open")
    closed = MetricKey("ledgers", labels=(("state", "closed"),))
    wait_until(lambda: manager.metrics().gauges.get(closed) == 5)
    lost = next(place for place in range(5) if place != leader)
    bookie = service_of(five.bookies[lost]).bookie
    metadata = metadata_of(client)
    held = [
        each
        for each in ledger_ids
        if any(bookie in fragment.ensemble for fragment in metadata.read_ledger(each).metadata.fragments)
    ]
    five.bookies[lost].close()
    wait_until(lambda: gauge(manager, "members", state="absent") == 1)
    assert gauge(manager, "under_replicated_ledgers", reason="absent", copies="2") == len(held)
    paused = ClusterAdmin(client)
    paused.pause_repair(600, "ann")
    grace(five, 0.5)
    wait_until(lambda: gauge(manager, "under_replicated_ledgers", reason="lost", copies="2") == len(held))
    if held:
        assert gauge(manager, "under_replicated_bytes", reason="lost", copies="2")
        assert gauge(manager, "under_replicated_oldest_timestamp_ns", reason="lost", copies="2")
    paused.resume_repair()
    wait_until(lambda: gauge(manager, "under_replicated_ledgers", reason="lost", copies="2") == 0)
    wait_until(lambda: not list(metadata.marks()))
    running = [each for each in five.bookies if each is not five.bookies[lost]]

    def counted(key: MetricKey) -> int:
        return sum(each.metrics().counters.get(key, 0) for each in running)

    done = MetricKey("repair_ledgers", labels=(("reason", "lost"), ("result", "done")))
    wait_until(lambda: counted(done) == len(held), "the repairs, which are counted after their marks are removed")
    copied = MetricKey("repair_copied_bytes", labels=(("reason", "lost"),))
    companions = [autorecovery_of(each).worker for each in five.bookies]
    assert counted(copied) == sum(each.copied_bytes for each in companions)
    findings = MetricKey("auditor_findings", labels=(("reason", "lost"),))
    assert manager.metrics().counters.get(findings, 0) >= len(held)
    with client.create_ledger(password=PASSWORD, ensemble_size=4):
        wait_until(lambda: gauge(manager, "largest_ensemble") == 4)
