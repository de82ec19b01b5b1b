"""A merge of ledgers of a sink that is stopped by SIGKILL at every step: each entry can be read once, and is merged."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.flags import LedgerType
from pybk.spark.connection import Connection, close_connections, connection
from pybk.spark.options import SourceOptions, source_options
from pybk.spark.places import ITSELF
from pybk.spark.sink.manifest import SINK_KEY, Sink, WrittenLedger, sink_ledgers
from pybk.spark.sink.sink_record import Attempt
from pybk.spark.source.batch_reader import BatchReader
from pybk.spark.source.columns import schema_of
from pybk.streams.log_settings import RollPolicy
from tests.cluster.processes import Cluster, running
from tests.sampling import all_are_tried, places
from tests.spark.killing import in_child
from tests.spark.secret_files import cluster_options
from tests.spark.sink.merging import merge

LEDGERS, ENTRIES = 6, 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("merges"), 1) as cluster:
        yield cluster
        close_connections()


def options_of(cluster: Cluster, app: str) -> SourceOptions:
    given = {**cluster_options(cluster.url, Path(cluster.directory)), "ledgerType": app, "allowMissing": "true"}
    return source_options(given, streaming=False)


def sink_of(place: Connection, app: str) -> Sink:
    assert place.metadata is not None
    return Sink(place.manager, place.metadata, app, quorums=(1, 1, 1))


def fill(place: Connection, app: str) -> list[tuple[int, int]]:
    """Commit ledgers; return the numbers of their entries."""
    sink, numbers = sink_of(place, app), list[tuple[int, int]]()
    for number in range(LEDGERS):
        with place.manager.create_ledger(
            ledger_type=app, custom_metadata={SINK_KEY: app.encode()}, ensemble_size=1, insecure=True
        ) as writer:
            writer.append_many([b"%d" % each for each in range(ENTRIES)])
        created_ns = writer.metadata.creation_time_ns
        sink.commit(Attempt(number, created_ns), [WrittenLedger(writer.ledger_id, ENTRIES, writer.length, created_ns)])
        numbers += [(writer.ledger_id, entry) for entry in range(ENTRIES)]
    return numbers


def rows(options: SourceOptions) -> list[tuple[int, int]]:
    """Return the numbers of the entries that a batch reads, which say what they are."""
    reader = BatchReader(options, schema_of(options))
    found = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [row["payload"] for row in found] == [b"%d" % row["entry_id"] for row in found]
    return sorted((row["ledger_id"], row["entry_id"]) for row in found)


def merge_all(options: SourceOptions, app: str) -> None:
    """Merge ledgers, delete what that has replaced, and do it again with what came of it."""
    place = connection(options.where)
    for records in (2 * ENTRIES, LEDGERS * ENTRIES):
        sink = sink_of(place, app)
        merge(place, sink, keep_s=0.0, policy=RollPolicy(records=records))
        sink.release_replaced(time.time_ns())


@pytest.mark.sampled(one_in=2, group="killed at any step")
def test_a_merge_killed_at_any_step(cluster: Cluster) -> None:
    ends: list[int] = []
    orphans = 0
    for step in places("a merge is killed", 1, 10):
        app = f"merge-{step}"
        options = options_of(cluster, app)
        written = fill(connection(options.where), app)
        ends.append(in_child(lambda: merge_all(options, app), step))  # noqa: B023
        assert rows(options) == written
        assert in_child(lambda: merge_all(options, app)) == 0  # noqa: B023
        assert rows(options) == written
        orphans += check_nothing_else_is_left(options, app)
        assert rows(options) == written
        if ends[-1] == 0:
            break
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    # Three copies and one of these: created, appended to and closed; manifests, looks, and what was replaced.
    assert step >= 4 * 3 + LEDGERS + 3
    if all_are_tried():
        assert orphans >= 8


def check_nothing_else_is_left(options: SourceOptions, app: str) -> int:
    """Collect orphans, check that only one ledger is there, and return how many orphans there were."""
    sink = sink_of(connection(options.where), app)
    orphans = sink.collect(list(sink_ledgers(sink.metadata, app)), time.time_ns())
    left = list(sink_ledgers(sink.metadata, app))
    data = {each.ledger_id for each in left if each.ledger_type != LedgerType.METADATA}
    assert data == {row.stored_in for row in sink.rows()}
    assert all(row.holder != ITSELF for row in sink.rows())
    assert sink.record().replaced == ()
    manifests = {each.ledger_id for each in left if each.ledger_type == LedgerType.METADATA}
    assert manifests == {ledger_id for ledger_id, _ in sink.record().chain}
    return len(orphans)
