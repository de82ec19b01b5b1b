"""The sink in a real Spark: what is refused, what is written, and that it is written once whatever is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pybk.spark.connection import Connection, close_connections
from pybk.spark.jobs.retain import retain
from tests.cluster.inside import SECRET
from tests.cluster.processes import Cluster, running
from tests.spark import kills
from tests.spark.kills import LOCAL, begin_driver, collect, copy, counting, make_input, numbers, place_of, rows, sinks
from tests.spark.queries import run_to_end
from tests.spark.secret_files import cluster_options
from tests.waiting import wait_until

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from tests.spark.killing import Kill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.sampled(one_in=6, using="spark")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("sink"), 1) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def place(cluster: Cluster) -> Connection:
    return place_of(cluster.url)


def append(frame: DataFrame, cluster: Cluster, **options: Any) -> None:
    """Write rows to ledgers."""
    frame.write.format("pybk").mode("append").options(**kills.options_of(cluster.url, **options)).save()


def expected(count: int) -> list[bytes]:
    return sorted(b"%d" % number for number in range(count))


# ---- batch writes ----------------------------------------------------------------------------------------------------


def test_rows_become_entries_of_a_ledger_per_partition(
    spark: SparkSession, cluster: Cluster, place: Connection
) -> None:
    frame = numbers(spark, 25_000, 3).union(numbers(spark, 0, 1)).selectExpr("CAST(value AS BINARY) AS payload")
    append(frame, cluster, ledgerType="batch", storageHints="ssd", digestType="crc32c")
    assert rows(place, "batch") == expected(25_000)
    found = [place.manager.ledger_metadata(each) for each in counting(place, "batch")]
    assert [(each.digest_type.name, each.tier, each.ensemble_size) for each in found] == [("CRC32C", "ssd", 1)] * 3


def test_spark_itself_refuses_to_write_without_a_mode(spark: SparkSession, cluster: Cluster) -> None:
    with pytest.raises(Exception, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        numbers(spark, 1).write.format("pybk").options(**kills.options_of(cluster.url)).save()


def test_an_invalid_write_is_refused_before_it_begins(spark: SparkSession, cluster: Cluster, place: Connection) -> None:
    before = set(place.manager.list_ledgers())
    writer = numbers(spark, 1).write.format("pybk").options(**kills.options_of(cluster.url))
    with pytest.raises(Exception, match="ledgers are only added to") as refused:
        writer.mode("overwrite").save()
    assert SECRET.decode() not in str(refused.value)
    with pytest.raises(Exception, match="by the one process that holds it"):
        writer.mode("append").save("/data/store")
    assert set(place.manager.list_ledgers()) == before


def test_a_version_is_written_once(spark: SparkSession, cluster: Cluster, place: Connection) -> None:
    for version in (0, 1, 1, 0):
        append(numbers(spark, 10), cluster, ledgerType="versions", txnAppId="versions", txnVersion=version)
    assert rows(place, "versions") == sorted(expected(10) * 2)
    assert collect(place, "versions") == 0


def test_of_a_write_of_which_a_task_fails_nothing_counts(
    spark: SparkSession, cluster: Cluster, place: Connection
) -> None:
    frame = numbers(spark, 20_000, 2).selectExpr("IF(value = '19999', raise_error('poison'), value) AS value")
    with pytest.raises(Exception, match="poison"):
        append(frame, cluster, ledgerType="failed")
    assert rows(place, "failed") == []

    def collected() -> bool:  # tasks that Spark stopped in the middle leave orphans, and may take a moment
        collect(place, "failed")
        return not list(place.manager.list_ledgers("failed"))

    wait_until(collected)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_what_a_consumer_has_not_read_outlives_the_retention(
    spark: SparkSession, cluster: Cluster, place: Connection, tmp_path: Path
) -> None:
    """A query that is started again from its checkpoint reads everything, and then the ledgers may go."""
    taken: list[bytes] = []
    asked = {**cluster_options(cluster.url), "ledgerType": "kept", "consumer": "audit", "allowMissing": "true"}

    def take(frame: DataFrame, _: int) -> None:
        taken.extend(bytes(row.payload) for row in frame.select("payload").collect())

    def audit() -> StreamingQuery:
        frame = spark.readStream.format("pybk").options(**asked).load()
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "audit"))
        return writer.trigger(availableNow=True).start()

    def deleted() -> int:
        return sum(map(len, retain(cluster.url, "kept", cluster_secret=SECRET, max_age_s=0).values()))

    run_to_end(audit)
    for version in range(3):
        append(numbers(spark, 10, 1), cluster, ledgerType="kept", txnAppId="kept", txnVersion=version, retainAge="1ms")
        if version == 1:
            run_to_end(audit)
    assert deleted() == 0, "Spark has not reported the last micro-batch as complete"
    run_to_end(audit)
    assert sorted(taken) == sorted(expected(10) * 3)
    assert deleted() == 2
    assert rows(place, "kept") == expected(10)
    run_to_end(audit)
    assert deleted() == 1
    assert len(taken) == 30
    assert rows(place, "kept") == []


@pytest.mark.long
def test_a_stream_whose_worker_is_killed_resumes_where_it_was(
    spark: SparkSession, cluster: Cluster, place: Connection, tmp_path: Path
) -> None:
    mark, payloads = tmp_path / "mark", make_input(tmp_path)
    with pytest.raises(Exception, match="terminated with exception"):
        copy(spark, cluster.url, tmp_path, "worker", str(Kill("write", 3, signal.SIGKILL, 0, str(mark))))
    assert mark.read_text().startswith("end ")
    assert rows(place, "worker") == []
    copy(spark, cluster.url, tmp_path, "worker")
    assert rows(place, "worker") == payloads
    [sink] = sinks(place, "worker").values()
    assert (sink.record().epoch, sink.record().last) == (1, kills.FILES - 1)
    collect(place, "worker")
    assert rows(place, "worker") == payloads


@pytest.mark.long
def test_a_driver_that_was_succeeded_is_refused_and_one_that_is_killed_is_succeeded(
    spark: SparkSession, cluster: Cluster, place: Connection, tmp_path: Path
) -> None:
    """One driver that is stopped in one copy, while another driver makes it, and then killed in the next copy."""
    stopped, killed = tmp_path / "stopped", tmp_path / "killed"
    payloads = make_input(stopped)
    assert make_input(killed) == payloads
    (tmp_path / "events").mkdir()
    stop = Kill("commit1", 4, signal.SIGSTOP, 0, str(stopped / "mark"))
    kill = Kill("commit", 5, signal.SIGKILL, -1, str(killed / "mark"))
    copies = (stopped, "stopped", str(stop)), (killed, "killed", str(kill))
    older = begin_driver(LOCAL, cluster.url, tmp_path, *copies)
    try:
        mark = stopped / "mark"
        wait_until(lambda: mark.exists() and len(mark.read_text().split()) == 2, seconds=kills.START_S)
        copy(spark, cluster.url, stopped, "stopped")
        assert rows(place, "stopped") == payloads
        os.kill(int(mark.read_text().split()[-1]), signal.SIGCONT)
        assert older.wait(kills.START_S) != 0
    finally:
        older.kill()
        older.wait()
    assert "was succeeded by run" in (tmp_path / "driver.log").read_text()
    assert rows(place, "stopped") == payloads
    collect(place, "stopped")
    assert rows(place, "stopped") == payloads

    assert (killed / "mark").read_text().startswith("after ")
    assert len(rows(place, "killed")) == kills.ROWS
    copy(spark, cluster.url, killed, "killed")
    assert rows(place, "killed") == payloads
    assert collect(place, "killed") == 0  # the repeated batch was found and deleted at once
    events = [each for each in (tmp_path / "events").rglob("*") if each.is_file()]
    told = "".join(each.read_text(errors="replace") for each in [tmp_path / "driver.log", *events])
    assert "AppendData" in told
    assert "WriteToDataSourceV2" in told
    assert [secret for secret in (SECRET.decode(), kills.PASSWORD) if secret in told] == []


def test_a_batch_write_in_a_stream_happens_once_by_its_batch_id(
    spark: SparkSession, cluster: Cluster, place: Connection, tmp_path: Path
) -> None:
    payloads = make_input(tmp_path)
    failed: list[int] = []

    def write(frame: DataFrame, batch: int) -> None:
        append(frame, cluster, ledgerType="each", txnAppId="each", txnVersion=batch)
        if batch == 1 and not failed:
            failed.append(batch)
            raise ValueError("behind the write")

    def run() -> None:
        stream = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).text(str(tmp_path / "in"))
        writer = stream.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(Exception, match="behind the write"):
        run()
    run()
    assert rows(place, "each") == payloads
