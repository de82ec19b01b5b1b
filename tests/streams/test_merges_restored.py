"""Metadata of a cluster that are exported, checked and restored while logs have merged segments."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd, check_metadata
from pybk.streams import ledger_list, ledger_steps
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind
from pybk.streams.log_settings import spec_of
from tests.cluster.inside import SECRET
from tests.cluster.test_metadata_restored import Cluster
from tests.streams.test_list_pages import record_of
from tests.streams.test_log import PASSWORD, data_of, opened
from tests.streams.test_segment_merge import EACH, RECORDS, fill

EXPECTED = [b"%d" % number for number in range(RECORDS)]


@pytest.fixture(autouse=True)
def _short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_steps, "PAGE_SEGMENTS", 4)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, "")


def restored(cluster: Cluster, copy: Path) -> None:
    """Put the metadata back to an export, with what the bookies' directories have since."""
    cluster.empty()
    cluster.restore(copy, directories=[cluster.bookie(place) for place in range(3)], all_directories=True)


def merged_to_the_end(manager: LedgerManager, log: Log) -> None:
    """Merge segments and release others, and check that nothing else is left."""
    for epoch in range(3):
        fill(log, 1, first=100 + 4 * epoch)
        log.merge_segments(keep_s=0)
    steps = LedgerSteps(manager, "log", spec_of(ListKind.LOG, PASSWORD, None, insecure=False))
    steps.perform(ledger_list.release("log", time.time_ns() + 4000 * 10**9))
    Log.sweep(manager, password=PASSWORD)
    listed = {each.ledger_id for each in log.segments()}
    assert {each.ledger_id for each in manager.ledgers(ledger_type="log")} == listed
    assert data_of(log)[:RECORDS] == EXPECTED
    assert len(data_of(log)) == RECORDS + 3 * EACH


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("merged_before", [True, False])
def test_a_log_is_restored_while_the_ledgers_of_merged_segments_are_kept(cluster: Cluster, merged_before: bool) -> None:
    with cluster.running() as running:
        client = running.connect()
        with opened(client) as log:
            fill(log)
            with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
                subscription.ack_through(4)
            if merged_before:
                log.merge_segments(segment_records=4 * EACH)
                assert record_of(client).replaced
            copy = cluster.copy()
            assert not check_metadata(copy, cluster_secret=SECRET).problems
            log.merge_segments()
            assert len(log.segments()) == 1
            assert not check_metadata(cluster.url, cluster_secret=SECRET).problems
    restored(cluster, copy)
    with cluster.running() as running:
        client = running.connect()
        with opened(client) as log:
            assert len(log.segments()) == (3 if merged_before else 11)
            assert data_of(log) == EXPECTED
            with log.subscribe("sub") as subscription:
                record = subscription.read(0)
                assert record is not None
                assert record.seq == 5
            merged_to_the_end(client, log)
