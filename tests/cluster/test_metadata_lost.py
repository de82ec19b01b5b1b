"""A cluster whose metadata store, a real ZooKeeper, cannot be reached for a while."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.ledger.ledger_metadata import LedgerState
from pybk.metadata.lease_time import ZOOKEEPER_LEASE_TIME_S
from tests.cluster.checker import check_ledger, check_writer, last_acked
from tests.cluster.child import PASSWORD, payload
from tests.cluster.inside import SECRET
from tests.cluster.processes import Cluster, running
from tests.internals import cluster_backend_of
from tests.waiting import WAIT_S, wait_until
from tests.zookeeper_server import ZooKeeperServer, zookeeper_server

__all__ = ["zookeeper_server"]


@pytest.fixture
def cluster(tmp_path: Path, zookeeper_server: ZooKeeperServer) -> Iterator[Cluster]:
    try:
        with running(tmp_path, 4, url=zookeeper_server.url(), secret=SECRET) as cluster:
            yield cluster
    finally:
        zookeeper_server.resume()


@pytest.mark.sampled(one_in=8, group="processes")
def test_writing_needs_no_metadata_store_and_a_lost_bookie_is_replaced_when_it_is_back(
    cluster: Cluster, zookeeper_server: ZooKeeperServer
) -> None:
    client = cluster.connect()
    writer = client.create_ledger(password=PASSWORD)
    writer.append(payload(writer.ledger_id, 0))
    zookeeper_server.pause()
    for entry_id in range(1, 200):
        assert writer.append(payload(writer.ledger_id, entry_id)) == entry_id
    cluster.bookie(writer.metadata.fragments[0].ensemble[0]).kill()
    futures = [writer.append_async(payload(writer.ledger_id, entry_id)) for entry_id in range(200, 300)]
    time.sleep(1.0)
    zookeeper_server.resume()
    assert [future.result(WAIT_S) for future in futures] == list(range(200, 300))
    wait_until(lambda: len(client.ledger_metadata(writer.ledger_id).fragments) == 2)
    assert writer.append(payload(writer.ledger_id, 300)) == 300
    writer.close()
    check_ledger(cluster, writer.ledger_id, 300, 300)


@pytest.mark.long
def test_bookies_whose_sessions_ended_register_again_and_a_writer_continues(
    cluster: Cluster, zookeeper_server: ZooKeeperServer
) -> None:
    writer = cluster.writer(pause_s=0.01)
    writer.wait_for(lambda: last_acked(writer) > 10)  # until then bookies ask whether there is such a ledger
    zookeeper_server.kill()
    before = last_acked(writer)
    time.sleep(1.2 * ZOOKEEPER_LEASE_TIME_S)  # no session of a bookie lasts longer
    writer.wait_for(lambda: last_acked(writer) > before + 100)
    zookeeper_server.start()
    client = cluster.connect()
    membership = cluster_backend_of(client).membership
    wait_until(lambda: len(membership.bookies) == 4, "all bookies to register again")
    writer.kill()
    assert check_writer(cluster, writer).state is LedgerState.CLOSED
    with client.create_ledger(insecure=True) as more:
        more.append(b"it goes on")
