"""Clusters of real bookies that repair themselves: what an auditor and the workers do together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pybk import ClusterAdmin, ClusterVerdict
from pybk.client import limbo_repair
from pybk.flags import WriteFlag
from pybk.healing import chores, situation, writer_watch
from pybk.healing.autorecovery import Autorecovery
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings
from tests.client.test_limbo_repair import check, fill, unclean
from tests.cluster.inside import Inside, inside
from tests.healing.quick import repair_quickly
from tests.healing.test_repair_worker import names
from tests.internals import cluster_backend_of, metadata_of, service_of
from tests.waiting import wait_until


@pytest.fixture
def five(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    """Five bookies that repair after half a second."""
    repair_quickly(monkeypatch)
    monkeypatch.setattr(writer_watch, "LOOK_MIN_S", 0.1)
    with inside(tmp_path, count=5, autorecovery=True) as cluster:
        grace(cluster, 0.5)
        yield cluster


def grace(cluster: Inside, seconds: float) -> None:
    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, grace_s=seconds))

    metadata_of(cluster.bookies[0]).change_settings(change)
    running = [metadata_of(each) for each in cluster.bookies if service_of(each).serving]
    wait_until(lambda: all(each.current_settings().repair.grace_s == seconds for each in running))


def autorecovery_of(manager: LedgerManager) -> Autorecovery:
    companion = cluster_backend_of(manager).companion
    assert isinstance(companion, Autorecovery)
    return companion


def leaders(cluster: Inside) -> list[int]:
    return [place for place, manager in enumerate(cluster.bookies) if autorecovery_of(manager).auditor.leads]


def test_a_new_cluster_is_ok_and_drains_as_soon_as_all_bookies_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(situation, "SESSION_NS_MIN", 1 << 60)
    with inside(tmp_path, count=4, autorecovery=True) as cluster:
        admin = ClusterAdmin(cluster.connect())
        wait_until(lambda: admin.status().verdict is ClusterVerdict.OK)
        wait_until(lambda: all(each.health().state == "ok" for each in cluster.bookies))
        assert admin.drain("bookie-0").state is BookieState.DRAINING


def test_a_lost_bookie_is_replaced_after_the_grace(five: Inside) -> None:
    client = five.connect()
    ledgers = [fill(client, 40) for _ in range(30)]
    (leader,) = wait_until(lambda: leaders(five))
    lost = next(place for place in range(5) if place != leader)
    name = service_of(five.bookies[lost]).bookie.bookie_id
    five.bookies[lost].close()

    def is_replaced() -> bool:
        return not any(name in ensemble for ledger_id in ledgers for ensemble in names(client, ledger_id))

    wait_until(is_replaced)
    wait_until(lambda: not list(metadata_of(client).marks()))
    for ledger_id in ledgers:
        check(client, ledger_id, 40)


def test_another_process_leads_when_the_auditor_is_gone(five: Inside) -> None:
    client = five.connect()
    ledgers = [fill(client, 40) for _ in range(10)]
    (leader,) = wait_until(lambda: leaders(five))
    name = service_of(five.bookies[leader]).bookie.bookie_id
    five.bookies[leader].close()
    alive = [place for place in range(5) if place != leader]
    wait_until(lambda: any(autorecovery_of(five.bookies[place]).auditor.leads for place in alive))

    def is_replaced() -> bool:
        return not any(name in ensemble for ledger_id in ledgers for ensemble in names(client, ledger_id))

    wait_until(is_replaced)
    for ledger_id in ledgers:
        check(client, ledger_id, 40)


def test_a_bookie_that_comes_back_within_the_grace_causes_no_copy(five: Inside) -> None:
    grace(five, 600)
    client = five.connect()
    ledgers = [fill(client, 40) for _ in range(10)]
    before = [names(client, ledger_id) for ledger_id in ledgers]
    (leader,) = wait_until(lambda: leaders(five))
    lost = next(place for place in range(5) if place != leader)
    five.bookies[lost].close()

    def absent() -> int:
        report = autorecovery_of(five.bookies[leader]).auditor.report
        return 0 if report is None else len(report.bookies)

    wait_until(lambda: absent() == 1)
    five.bookies[lost] = five.open_bookie(lost)
    wait_until(lambda: absent() == 0)
    assert [names(client, ledger_id) for ledger_id in ledgers] == before
    assert not list(metadata_of(client).marks())
    assert sum(autorecovery_of(manager).worker.copied_bytes for manager in five.bookies) == 0


def test_a_bookie_is_drained_while_a_writer_writes(five: Inside) -> None:
    grace(five, 600)
    client = five.connect()
    ledgers = [fill(client, 40) for _ in range(10)]
    metadata = metadata_of(client)
    with client.create_ledger(password=b"correct horse") as writer:
        writer.append(b"before")
        leaving = metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble[0]
        metadata.change_cookie(leaving.bookie_id, lambda cookie: replace(cookie, state=BookieState.DRAINING))
        written = 1

        def is_drained() -> bool:
            nonlocal written
            writer.append(b"while it leaves")
            written += 1
            cookie = metadata.read_cookie(leaving.bookie_id)
            return cookie is not None and cookie.state is BookieState.DRAINED

        wait_until(is_drained)
    assert not any(leaving.bookie_id in ensemble for ledger_id in ledgers for ensemble in names(client, ledger_id))
    assert not any(leaving.bookie_id in ensemble for ensemble in names(client, writer.ledger_id))
    wait_until(lambda: not list(metadata.marks()))
    for ledger_id in ledgers:
        check(client, ledger_id, 40)
    with client.open_ledger(writer.ledger_id, password=b"correct horse") as reader:
        assert len(list(reader)) == written


def test_an_abandoned_ledger_is_closed_where_the_cluster_allows_it(five: Inside) -> None:
    metadata = metadata_of(five.bookies[0])

    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, open_grace_s=1.0, recover_abandoned=True))

    metadata.change_settings(change)
    client, other = five.connect(), five.connect()
    writer = client.create_ledger(password=b"correct horse")
    for number in range(20):
        writer.append(b"entry %d" % number)
    (leader,) = wait_until(lambda: leaders(five))
    ensemble = metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble
    places = {service_of(manager).bookie: place for place, manager in enumerate(five.bookies)}
    lost = next(bookie for bookie in ensemble if places[bookie] != leader)
    five.bookies[places[lost]].close()
    auditor = autorecovery_of(five.bookies[leader]).auditor
    until = time.monotonic() + 2.0  # twice the grace of open ledgers

    def is_left_to_its_writer() -> bool:
        report = auditor.report
        left = report is not None and report.counts.left_to_writer == 1
        return left and time.monotonic() > until and not list(metadata.marks())

    wait_until(is_left_to_its_writer)
    assert other.ledger_metadata(writer.ledger_id).state is LedgerState.OPEN
    client.close()  # as a process ends: the ledger stays open
    wait_until(lambda: other.ledger_metadata(writer.ledger_id).state is LedgerState.CLOSED)
    wait_until(lambda: not any(lost.bookie_id in names_ for names_ in names(other, writer.ledger_id)))
    assert not other.ledger_metadata(writer.ledger_id).sealed
    with other.open_ledger(writer.ledger_id, password=b"correct horse") as reader:
        assert [entry.payload for entry in reader] == [b"entry %d" % number for number in range(20)]
    assert other.reseal(writer.ledger_id, password=b"correct horse").sealed


def test_limbo_ends_although_the_writer_of_the_ledger_is_gone(
    five: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limbo_repair, "WAIT_SECONDS", 0.2)
    monkeypatch.setattr(limbo_repair, "RETRY_SECONDS", 0.2)

    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, open_grace_s=1.0, recover_abandoned=True))

    client, other = five.connect(), five.connect()
    metadata = metadata_of(other)
    metadata.change_settings(change)
    writer = client.create_ledger(password=b"correct horse", write_flags=WriteFlag.DEFERRED_FORCE)
    for number in range(20):
        writer.append(b"entry %d" % number)
    writer.force()
    name = metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble[0].bookie_id
    place = int(name[-1])
    replicas = service_of(five.bookies[place]).replicas
    wait_until(lambda: replicas.count_entries(writer.ledger_id) == 20)  # two others may have acknowledged them
    client.close()
    five.bookies[place].close()
    unclean(five.directory / name)
    again = service_of(five.open_bookie(place))
    assert f"bookie {again.bookie}: 1 ledgers are in limbo" in caplog.text
    wait_until(lambda: not again.in_limbo())
    assert other.ledger_metadata(writer.ledger_id).state is LedgerState.CLOSED
    wait_until(lambda: not list(metadata.marks()))
    with other.open_ledger(writer.ledger_id, password=b"correct horse") as reader:
        assert [entry.payload for entry in reader] == [b"entry %d" % number for number in range(20)]


def test_a_bookie_that_comes_back_late_drops_what_it_need_not_have(
    five: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chores, "LOOK_S", 0.2)

    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, surplus_delay_s=1.0))

    metadata_of(five.bookies[0]).change_settings(change)
    client = five.connect()
    ledgers = [fill(client, 40) for _ in range(10)]
    (leader,) = wait_until(lambda: leaders(five))
    lost = next(place for place in range(5) if place != leader)
    name = service_of(five.bookies[lost]).bookie.bookie_id
    held = {ledger_id for ledger_id in ledgers if any(name in ensemble for ensemble in names(client, ledger_id))}
    there = service_of(five.bookies[lost]).replicas
    wait_until(lambda: all(there.count_entries(ledger_id) == 40 for ledger_id in held), "the last bookie to have all")
    five.bookies[lost].close()
    wait_until(lambda: not any(name in ensemble for ledger_id in ledgers for ensemble in names(client, ledger_id)))
    five.bookies[lost] = five.open_bookie(lost)
    back = autorecovery_of(five.bookies[lost])
    wait_until(lambda: back.surplus.dropped == len(held))
    replicas = service_of(five.bookies[lost]).replicas
    assert all(replicas.count_entries(ledger_id) == 0 for ledger_id in held)
    for ledger_id in ledgers:
        check(client, ledger_id, 40)
