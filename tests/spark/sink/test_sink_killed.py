"""The sink's writer stopped by SIGKILL at every step, and started again as Spark does; here without Spark."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from pybk.errors import IllegalOperationError, UsageError
from pybk.flags import LedgerType
from pybk.spark.connection import close_connections, connection
from pybk.spark.options import SinkOptions, sink_options
from pybk.spark.sink import sink_record, sink_retention
from pybk.spark.sink.manifest import sink_ledgers
from pybk.spark.sink.sink_retention import SinkRetention
from pybk.spark.sink.upkeep import retain_ledgers
from pybk.spark.sink.writer import BatchWriter, StreamWriter, check_schema, payload_list, sink_of
from tests.cluster.processes import Cluster, running
from tests.sampling import all_are_tried, places
from tests.spark.killing import in_child
from tests.spark.secret_files import cluster_options, secret_file
from tests.storage.real_store import contents

SCHEMA = StructType().add("value", "binary")
BATCHES, PARTITIONS, ROWS = 2, 2, 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("killed"), 1) as cluster:
        yield cluster
        close_connections()


def options_of(cluster: Cluster, app: str | None = None, *, streaming: bool = True, **more: str) -> SinkOptions:
    password = secret_file(cluster.directory, b"word")
    given = {**cluster_options(cluster.url), "ensembleSize": "1", "passwordFile": password}
    return sink_options({**given, **({"appId": app} if app else {}), **more}, streaming=streaming)


def payloads(batch: int, partition: int) -> list[bytes]:
    return [b"%d/%d/%d" % (batch, partition, row) for row in range(ROWS)]


def expected(batches: int = BATCHES) -> list[bytes]:
    return [row for batch in range(batches) for part in range(PARTITIONS) for row in payloads(batch, part)]


PART_OF = {  # made here, as Arrow loads pandas at the first, which takes each child long
    (batch, partition): pa.record_batch({"value": payloads(batch, partition)})
    for batch in range(BATCHES + 1)
    for partition in range(PARTITIONS)
}


class Query:
    """Runs a streaming query as Spark does: tasks, then the sink's commit, then its own in the checkpoint."""

    def __init__(self, options: SinkOptions, checkpoint: Path, run: str) -> None:
        self.writer = StreamWriter(options, SCHEMA, overwrite=False)
        self._checkpoint = checkpoint
        self._run = run

    def next_batch(self) -> int:
        """Return the batch to be done, or done again."""
        return int(self._checkpoint.read_text()) if self._checkpoint.exists() else 0

    def batch(self, number: int) -> None:
        """Do a batch."""
        self.commit(number, self.write(number))

    def write(self, number: int) -> list[object]:
        """Do a batch's tasks."""
        context = TaskContext._getOrCreate()
        context._localProperties = {
            "sql.streaming.queryId": "query",
            "spark.jobGroup.id": self._run,
            "streaming.sql.batchId": str(number),
        }
        return [self.writer.write(iter([PART_OF[number, partition]])) for partition in range(PARTITIONS)]

    def commit(self, number: int, messages: list[object]) -> None:
        """Commit a batch in the sink and in the checkpoint."""
        self.writer.commit(messages, number)  # type: ignore[arg-type]  # what write returned
        self._checkpoint.write_text(str(number + 1))

    def finish(self) -> None:
        """Do all batches that are left."""
        for number in range(self.next_batch(), BATCHES):
            self.batch(number)


def rows(options: SinkOptions, app: str) -> list[bytes]:
    """Return all that counts, in order."""
    manager = connection(options.where).manager
    return [row for ledger_id in sink_of(options, app).committed() for row in contents(manager, ledger_id, b"word")]


def check_nothing_else_is_left(options: SinkOptions, app: str) -> int:
    """Collect orphans, check that only what counts is there, and return how many orphans there were."""
    sink = sink_of(options, app)
    metadata = sink.metadata
    orphans = sink.collect(sink_ledgers(metadata, app), time.time_ns())
    left = list(sink_ledgers(metadata, app))
    data = {each.ledger_id for each in left if each.ledger_type != LedgerType.METADATA}
    assert data == set(sink.committed())
    manifests = {each.ledger_id for each in left if each.ledger_type == LedgerType.METADATA}
    assert manifests == {ledger_id for ledger_id, _ in sink.record().chain}
    return len(orphans)


@pytest.mark.sampled(one_in=2, group="killed at any step")
def test_a_stream_killed_at_any_step_is_written_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_record, "FOLD", 2)  # so that the second commit deletes a manifest
    ends, replays, orphans = [], 0, 0
    for step in places("a stream is killed", 1, 6):
        app, checkpoint = f"stream-{step}", tmp_path / f"checkpoint-{step}"
        options = options_of(cluster, app)
        ends.append(in_child(lambda: Query(options, checkpoint, "first").finish(), step))  # noqa: B023
        last = sink_of(options, app).record().last
        assert rows(options, app) == expected(last + 1)
        replays += last == Query(options, checkpoint, "").next_batch()
        assert in_child(lambda: Query(options, checkpoint, "second").finish()) == 0  # noqa: B023
        assert rows(options, app) == expected()
        orphans += check_nothing_else_is_left(options, app)
        assert rows(options, app) == expected()
        if ends[-1] == 0:
            break
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    # Each batch: two tasks that create, append and close; a look, a manifest, the compare-and-set and behind it.
    assert step >= BATCHES * (2 * 3 + 1 + 3 + 2)
    if all_are_tried():
        assert replays >= BATCHES
        assert orphans > len(ends)


@pytest.mark.sampled(one_in=2, group="killed at any step")
def test_a_stream_with_retention_killed_at_any_step_keeps_the_newest(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an earlier batch only until the next retention; no ledger that exists lacks its name."""
    for name in ("PERIOD_SECONDS", "_LEAST_PERIOD_SECONDS"):
        monkeypatch.setattr(sink_retention, name, 0.0)
    monkeypatch.setattr(sink_record, "FOLD", 2)
    batch_bytes = sum(len(row) for row in expected(1))
    ends = []
    for step in places("a stream with retention is killed", 1, 6):
        app, checkpoint = f"kept-{step}", tmp_path / f"kept-{step}"
        options = options_of(cluster, app, retainBytes=str(batch_bytes))
        ends.append(in_child(lambda: Query(options, checkpoint, "first").finish(), step))  # noqa: B023
        sink = sink_of(options, app)
        last, named = sink.record().last, sink.committed()
        there = {*connection(options.where).manager.list_ledgers()}
        assert last < 0 or there.issuperset(named[-PARTITIONS:])
        assert in_child(lambda: Query(options, checkpoint, "second").finish()) == 0  # noqa: B023
        retain_ledgers(sink_of(options, app).metadata, [sink_of(options, app)], SinkRetention(max_bytes=batch_bytes))
        assert rows(options, app) == expected()[-PARTITIONS * ROWS :]
        check_nothing_else_is_left(options, app)
        if ends[-1] == 0:
            break
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    assert step > 2 * BATCHES * PARTITIONS


@pytest.mark.long
def test_a_batch_write_killed_at_any_step_happens_once(cluster: Cluster) -> None:
    for step in count():
        app = f"job-{step}"
        options = options_of(cluster, streaming=False, txnAppId=app, txnVersion="7")

        def write(options: SinkOptions = options) -> None:
            writer = BatchWriter(options, SCHEMA, overwrite=False)
            writer.commit([writer.write(iter([PART_OF[0, part]])) for part in range(2)])

        end = in_child(write, step)
        assert rows(options, app) in ([], expected(1))
        assert in_child(write) == 0
        assert in_child(write) == 0
        assert rows(options, app) == expected(1)
        check_nothing_else_is_left(options, app)
        if end == 0:
            break
    assert step > 10


def test_an_older_run_is_refused_and_deletes_nothing_that_counts(cluster: Cluster, tmp_path: Path) -> None:
    options = options_of(cluster, "zombie")
    old, new = Query(options, tmp_path / "checkpoint", "old"), Query(options, tmp_path / "checkpoint", "new")
    old.batch(0)
    late = old.write(1)
    new.batch(1)
    with pytest.raises(IllegalOperationError, match="run old of the query was succeeded by run new"):
        old.commit(1, late)
    old.writer.abort(late, 1)  # type: ignore[arg-type]  # what write returned
    with pytest.raises(IllegalOperationError, match="succeeded"):
        old.batch(2)
    assert rows(options, "zombie") == expected(2)
    new.batch(2)
    assert rows(options, "zombie") == expected(3)
    sink = sink_of(options, "zombie")
    assert (sink.record().epoch, sink.record().runs) == (2, ("old", "new"))
    assert check_nothing_else_is_left(options, "zombie") == PARTITIONS  # of the older run's batch 2


def test_an_abort_after_a_commit_deletes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    options = options_of(cluster)
    query = Query(options, tmp_path / "checkpoint", "run")
    messages = query.write(0)
    query.commit(0, messages)
    query.writer.abort(messages, 0)  # type: ignore[arg-type]  # what write returned
    assert rows(options, "query") == expected(1)
    failed = query.write(1)
    query.writer.abort([None, failed[1]], 1)  # type: ignore[list-item]  # what write returned
    assert check_nothing_else_is_left(options, "query") == 1


def test_writers_of_one_type_at_once_do_not_mind_each_other(cluster: Cluster) -> None:
    options = options_of(cluster, streaming=False, ledgerType="crowd")

    def write() -> None:
        writer = BatchWriter(options, SCHEMA, overwrite=False)
        writer.commit([writer.write(iter([PART_OF[0, part]])) for part in range(PARTITIONS)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    manager = connection(options.where).manager
    apps = [
        manager.ledger_metadata(each).custom_metadata["pybk.sink"].decode() for each in manager.list_ledgers("crowd")
    ]
    assert len(set(apps)) == 4
    assert [rows(options, app) for app in sorted(set(apps))] == [expected(1)] * 4


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("value string, other integer", "the rows have value string, other int; an entry is made of one column"),
        ("text string", "one column, payload or value"),
        ("payload integer", "a payload is binary or string: cast it"),
    ],
)
def test_rows_have_a_payload_and_nothing_else(schema: str, said: str) -> None:
    columns = StructType()
    for column in schema.split(", "):
        name, kind = column.split(" ")
        columns.add(name, kind)
    with pytest.raises(UsageError, match=said):
        check_schema(columns)


def test_a_null_payload_is_refused_and_what_was_written_is_deleted(cluster: Cluster) -> None:
    options = options_of(cluster, streaming=False, ledgerType="null")
    null = pa.record_batch({"value": pa.array([b"a", None], pa.binary())})
    with pytest.raises(UsageError, match="1 of 2 rows have a null payload"):
        BatchWriter(options, SCHEMA, overwrite=False).write(iter([PART_OF[0, 0], null]))
    assert list(connection(options.where).manager.list_ledgers("null")) == []


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_text_is_written_as_utf8_whatever_slice_of_a_batch_it_is(kind: pa.DataType) -> None:
    texts = ["", "ä", "b" * 1000, "z"]
    batch = pa.record_batch({"value": pa.array([text.encode() for text in texts], pa.binary()).cast(kind)})
    assert payload_list(batch) == [text.encode() for text in texts]
    assert payload_list(batch.slice(1, 2)) == ["ä".encode(), b"b" * 1000]


def test_nothing_is_overwritten(cluster: Cluster, tmp_path: Path) -> None:
    for writer, streaming in ((BatchWriter, False), (StreamWriter, True)):
        with pytest.raises(IllegalOperationError, match="only added to"):
            writer(options_of(cluster, streaming=streaming), SCHEMA, overwrite=True)


def test_a_stream_is_not_written_outside_of_one(cluster: Cluster) -> None:
    TaskContext._taskContext = None
    with pytest.raises(IllegalOperationError, match="tasks of a streaming query"):
        StreamWriter(options_of(cluster), SCHEMA, overwrite=False).write(iter([]))


def test_a_commit_lacks_no_partition(cluster: Cluster, tmp_path: Path) -> None:
    query = Query(options_of(cluster, "holes"), tmp_path / "checkpoint", "run")
    with pytest.raises(IllegalOperationError, match="1 of 2 partitions"):
        query.commit(0, [query.write(0)[0], None])
    with pytest.raises(IllegalOperationError, match="0 partitions"):
        query.commit(0, [])
