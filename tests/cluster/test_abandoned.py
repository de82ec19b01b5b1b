"""Members recover ledgers whose writers are gone, without their passwords, if the cluster's settings let them."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pybk.bookie.server import BookieServer
from pybk.errors import (
    LedgerFencedError,
    LedgerRecoveryError,
    NoSuchLedgerError,
    OwnerNeededError,
    SealMismatchError,
    UnauthorizedError,
)
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.settings import ClusterSettings
from pybk.metrics import MEMBER_RECOVERIES
from tests.cluster.child import PASSWORD, payload
from tests.cluster.inside import Inside, inside
from tests.cluster.processes import running
from tests.internals import cluster_backend_of
from tests.storage.real_store import contents, numbered
from tests.waiting import wait_until

pytestmark = pytest.mark.sampled(one_in=5, using="tmp_path")


def recover(manager: LedgerManager, ledger_id: int) -> LedgerMetadata:
    """Recover a ledger as a member."""
    return cluster_backend_of(manager).recover_abandoned(ledger_id)


def allow(manager: LedgerManager, allowed: bool = True) -> None:
    """Let members recover, or not any more."""

    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, recover_abandoned=allowed))

    cluster_backend_of(manager).membership.metadata.change_settings(change)


def let(cluster: Inside, allowed: bool) -> None:
    """Let members recover, or not any more, and wait until all bookies know it."""
    allow(cluster.connect(), allowed)
    for bookie in cluster.bookies:
        metadata = cluster_backend_of(bookie).membership.metadata
        wait_until(partial(knows, metadata, allowed))


def knows(metadata: ClusterMetadata, allowed: bool) -> bool:
    """Return whether a client of the metadata store knows that members may recover, or that they may not."""
    return metadata.current_settings().repair.recover_abandoned is allowed


def uses(cluster: Inside) -> int:
    """Return how often bookies granted a member the right."""
    services = [cluster_backend_of(bookie).bookie for bookie in cluster.bookies]
    counters = [each.replicas.store.metrics.snapshot().counters for each in services if isinstance(each, BookieServer)]
    return sum(value for each in counters for key, value in each.items() if key.name == MEMBER_RECOVERIES)


def write(cluster: Inside, entries: int) -> int:
    """Write a ledger that stays open."""
    writer = cluster.connect().create_ledger(password=PASSWORD)
    writer.append_many(numbered(entries))
    return writer.ledger_id


def test_a_member_recovers_what_a_killed_writer_and_a_killed_bookie_left(tmp_path: Path) -> None:
    with running(tmp_path, 0) as cluster:
        allow(cluster.connect())
        cluster.add(4)
        writer = cluster.writer(window=10)
        writer.wait_for(lambda: len(writer.said("acked")) > 100)
        ledger_id = int(writer.said("ledger")[0])
        client = cluster.connect()
        ensemble = client.ledger_metadata(ledger_id).fragments[-1].ensemble
        cluster.bookie(ensemble[0]).kill()
        writer.kill()
        closed = recover(client, ledger_id)
        acked = max(map(int, writer.said("acked")))
        assert closed.state is LedgerState.CLOSED
        assert acked <= closed.last_entry_id <= max(map(int, writer.said("pushed")))
        assert not closed.sealed
        found = contents(client, ledger_id, PASSWORD)
        assert found == [payload(ledger_id, entry_id) for entry_id in range(closed.last_entry_id + 1)]
        assert client.reseal(ledger_id, password=PASSWORD).sealed


def test_a_writer_that_was_taken_for_dead_is_fenced(tmp_path: Path) -> None:
    with running(tmp_path, 0) as cluster:
        allow(cluster.connect())
        cluster.add(3)
        writer = cluster.writer(window=10)
        writer.wait_for(lambda: len(writer.said("acked")) > 50)
        writer.stop()
        ledger_id = int(writer.said("ledger")[0])
        closed = recover(cluster.connect(), ledger_id)
        writer.signal(signal.SIGCONT)
        writer.wait_for(lambda: writer.said("error"))
        assert writer.said("error")[0].split()[0] == LedgerFencedError.__name__
        assert max(map(int, writer.said("acked"))) <= closed.last_entry_id


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=3) as cluster:
        yield cluster


def test_members_recover_only_while_the_setting_is_on(cluster: Inside, caplog: pytest.LogCaptureFixture) -> None:
    ledger_id, second = write(cluster, 20), write(cluster, 20)
    client = cluster.connect()
    with pytest.raises(UnauthorizedError, match="members"):
        recover(client, ledger_id)
    assert uses(cluster) == 0
    let(cluster, True)
    caplog.clear()
    assert recover(client, ledger_id).last_entry_id == 19

    def lines() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "without its password" in record.getMessage()]

    wait_until(lambda: len(lines()) == 3, "once for each bookie, also for that which answers last")
    assert {record.levelno for record in lines()} == {logging.WARNING}
    assert uses(cluster) == 3
    assert recover(client, ledger_id).last_entry_id == 19, "nothing is left to do"
    assert uses(cluster) == 3
    let(cluster, False)
    with pytest.raises(UnauthorizedError, match="members"):
        recover(client, second)
    assert contents(client, second, PASSWORD, recover=True) == list(numbered(20))


def test_members_need_the_clusters_secret(tmp_path: Path) -> None:
    with inside(tmp_path, count=3, secret=None) as cluster:
        let(cluster, True)
        ledger_id = write(cluster, 5)
        with pytest.raises(UnauthorizedError, match="cluster's secret"):
            recover(cluster.connect(), ledger_id)
        assert cluster.connect().ledger_metadata(ledger_id).state is LedgerState.OPEN


def test_an_unknown_ledger_is_not_recovered(cluster: Inside) -> None:
    with pytest.raises(NoSuchLedgerError):
        recover(cluster.connect(), 12345)


def test_an_owner_may_open_what_its_own_client_recovered_as_a_member(cluster: Inside) -> None:
    let(cluster, True)
    client = cluster.connect()
    first, second = write(cluster, 8), write(cluster, 9)
    assert recover(client, first).last_entry_id == 7
    with client.open_ledger(second, password=PASSWORD, recover=True) as reader:
        assert reader.metadata.sealed
    assert contents(client, first, PASSWORD) == list(numbered(8))
    writer = client.create_ledger(password=PASSWORD)
    writer.append(b"before")
    assert recover(client, writer.ledger_id).last_entry_id == 0
    with pytest.raises(LedgerFencedError):
        writer.append(b"after")


def test_a_ledger_that_was_closed_short_is_not_resealed(cluster: Inside) -> None:
    """An authentic entry beyond the end carries a LAC beyond it, which the ledger's writer alone could give it."""
    let(cluster, True)
    writer = cluster.connect().create_ledger(password=PASSWORD, digest_type=DigestType.HMAC_SHA256)
    for number in range(10):
        writer.append(b"%d" % number)
    client = cluster.connect()
    whole = recover(client, writer.ledger_id)
    metadata = cluster_backend_of(client).membership.metadata
    found = metadata.read_ledger(writer.ledger_id)
    short = replace(found.metadata, last_entry_id=4, length=5, version=found.metadata.version + 1)
    version = metadata.write_ledger(short, found.version)
    with pytest.raises(SealMismatchError, match=r"closed at entry 4.* proves that entry [89] was confirmed.*short"):
        client.reseal(writer.ledger_id, password=PASSWORD)
    assert not client.ledger_metadata(writer.ledger_id).sealed
    metadata.write_ledger(replace(whole, version=short.version + 1), version)
    assert client.reseal(writer.ledger_id, password=PASSWORD).last_entry_id == 9


def test_the_errors_say_who_has_to_act() -> None:
    assert issubclass(OwnerNeededError, LedgerRecoveryError)
