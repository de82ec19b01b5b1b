"""Writes to logs in a real Spark: what streams and batch writes leave, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from tests.cluster.inside import SECRET
from tests.spark.log_sink.writes import Place
from tests.spark.log_source.logs import PASSWORD
from tests.spark.queries import run_to_end

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from pybk.streams.log_record import LogRecord

pytestmark = pytest.mark.sampled(one_in=6, using="spark")


def write_file(directory: Path, number: int, lines: Iterable[object]) -> None:
    """Add a file to the input of a stream, which reads files by their times."""
    (directory / "in").mkdir(exist_ok=True)
    file = directory / "in" / f"{number}.txt"
    file.write_text("\n".join(map(str, lines)))
    os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))


def lines_of(spark: SparkSession, directory: Path) -> DataFrame:
    """Return the lines of the files, one file in each micro-batch."""
    (directory / "in").mkdir(exist_ok=True)
    return spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).text(str(directory / "in"))


def run(place: Place, frame: DataFrame, directory: Path, **options: Any) -> None:
    """Run a query until it has written what there is."""

    def start() -> StreamingQuery:
        writer = frame.writeStream.format("pybk").options(**place.options, **options)
        writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
        return writer.trigger(availableNow=True).start()

    run_to_end(start)


def append(place: Place, frame: DataFrame, **options: Any) -> None:
    """Run a batch write."""
    frame.write.format("pybk").options(**place.options, **options).mode("append").save()


@pytest.mark.sampled(one_in=8, group="processes")
def test_a_stream_writes_each_row_once_over_restarts(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    rows = lines_of(spark, tmp_path).selectExpr("CAST(CAST(value AS INT) % 5 AS STRING) AS key", "value")
    rows = rows.repartition(3, "key")
    with place.open() as log, log.subscribe("sub") as subscription:
        for number in range(2):
            write_file(tmp_path, number, range(number * 50, number * 50 + 50))
        run(place, rows, tmp_path, topic="orders")
        assert len(place.listed()) == 2, "one ledger for each micro-batch"
        write_file(tmp_path, 2, range(100, 150))
        run(place, rows, tmp_path, topic="orders")
        # As after the end of a driver that had not recorded the commit in its checkpoint.
        for file in (tmp_path / "checkpoint" / "commits").glob("*2*"):
            file.unlink()
        write_file(tmp_path, 3, range(150, 200))
        run(place, rows, tmp_path, topic="orders")
        got: list[LogRecord] = []
        while more := subscription.read_many(1000, timeout=0):
            got += more
    records = place.records()
    assert sorted(int(each.data) for each in records) == list(range(200))
    assert got == records
    for key in range(5):
        values = [int(each.data) for each in records if each.key == b"%d" % key]
        assert values == list(range(key, 200, 5)), "in order"
    assert place.ledgers() == place.listed()
    read = spark.read.format("pybk").options(**place.options_of_reads, subscribe="orders").load()
    assert [bytes(row.value) for row in read.orderBy("offset").collect()] == [each.data for each in records]


@pytest.mark.sampled(one_in=8, group="processes")
def test_a_pipeline_for_kafka_writes_to_the_logs_that_rows_name(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    place.create("copy", "even", "odd")
    values = spark.range(0, 20, 1, 2).selectExpr(
        "CAST(id AS STRING) AS key",
        "repeat('x', 30000) AS value",
        "array(struct('n' AS key, CAST(CAST(id AS STRING) AS BINARY) AS value)) AS headers",
        "timestamp_seconds(id) AS event_time",
    )
    append(place, values, topic="orders")
    read = spark.readStream.format("pybk").options(**place.options_of_reads, subscribe="orders", includeHeaders="true")
    orders = read.option("startingOffsets", "earliest").load()
    run(place, orders, tmp_path / "copied", topic="copy")
    routed = orders.selectExpr(
        "IF(CAST(CAST(key AS STRING) AS INT) % 2 = 0, 'even', 'odd') AS topic", "key", "value", "headers", "partition"
    )
    run(place, routed, tmp_path / "routed", includeHeaders="true")

    def shown(name: str) -> list[tuple[Any, ...]]:
        return [(each.key, len(each.data), each.headers) for each in place.records(name)]

    expected = {number: (b"%d" % number, 30_000, (("n", b"%d" % number),)) for number in range(20)}
    assert shown("orders") == shown("copy") == list(expected.values())
    assert [each.time_ns for each in place.records("copy")] == [number * 10**9 for number in range(20)]
    assert sorted(shown("even")) == sorted(expected[number] for number in range(0, 20, 2))
    assert sorted(shown("odd")) == sorted(expected[number] for number in range(1, 20, 2))


def test_of_a_write_of_which_a_task_fails_nothing_is_read(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    good = spark.range(0, 40, 1, 2).selectExpr("repeat(CAST(id AS STRING), 20000) AS value")
    poisoned = good.selectExpr("IF(value LIKE '39%', raise_error('poison'), value) AS value")
    with pytest.raises(Exception, match="poison"):
        append(place, poisoned, topic="orders", txnAppId="job", txnVersion=1)
    assert place.data() == []
    for _ in range(2):
        append(place, good, topic="orders", txnAppId="job", txnVersion=1)
    assert [len(each) for each in place.data()] == [20000] * 10 + [40000] * 30


def test_a_batch_of_foreach_batch_is_written_once(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    failed: list[int] = []

    def write(frame: DataFrame, batch: int) -> None:
        append(place, frame, topic="orders", txnAppId="each", txnVersion=batch)
        if batch == 1 and not failed:
            failed.append(batch)
            raise ValueError("after the write")

    def start() -> StreamingQuery:
        writer = lines_of(spark, tmp_path).writeStream.foreachBatch(write)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()

    for number in range(3):
        write_file(tmp_path, number, range(number * 10, number * 10 + 10))
    with pytest.raises(Exception, match="after the write"):
        run_to_end(start)
    run_to_end(start)
    assert [int(each) for each in place.data()] == list(range(30))


def test_what_cannot_be_written_is_refused_in_one_line(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    write_file(tmp_path, 0, [0])
    lines, rows = lines_of(spark, tmp_path), spark.range(1).selectExpr("CAST(id AS STRING) AS value")
    nulls = spark.range(0, 2, 1, 1).selectExpr("CAST(id AS STRING) AS key", "IF(id = 1, NULL, 'v') AS value")
    refused: list[tuple[str, Callable[[], None]]] = [
        (
            "there is no log 'ordrs' in .*; there are orders; option createTopics=true",
            lambda: append(place, rows, topic="ordrs"),
        ),
        ("there is no log 'ordrs' in", lambda: run(place, lines, tmp_path, topic="ordrs")),
        (
            "does not apply to a log of pybk: give metadataUri",
            lambda: append(place, rows, topic="orders", **{"kafka.bootstrap.servers": "h:1"}),
        ),
        ("no column value", lambda: append(place, rows.selectExpr("value AS data"), topic="orders")),
        ("row 2 of partition 0, with key b'1': column value is null", lambda: append(place, nulls, topic="orders")),
        ("option password is a secret itself", lambda: append(place, rows, topic="orders", password="hush")),
        (
            "logs are only appended to",
            lambda: rows.write.format("pybk").options(**place.options, topic="orders").mode("overwrite").save(),
        ),
        (
            "cannot be created together with rows",
            lambda: rows.write.format("pybk").options(**place.options, topic="orders").saveAsTable("made"),
        ),
    ]
    for said, write in refused:
        with pytest.raises(Exception, match=said) as error:
            write()
        for secret in (SECRET.decode(), PASSWORD.decode(), "hush", "Traceback"):
            assert secret not in str(error.value)
    assert place.ledgers() == set()


@pytest.mark.long
def test_a_live_writer_is_named_before_a_task_runs(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    write_file(tmp_path, 0, [0])
    with (
        place.open() as log,
        log.writer(),
        pytest.raises(Exception, match=r"log 'orders' has a live writer \(.*process"),
    ):
        run(place, lines_of(spark, tmp_path), tmp_path, topic="orders")
    run(place, lines_of(spark, tmp_path), tmp_path, topic="orders")
    assert place.data() == [b"0"]


def test_views_and_tables_are_written_to(spark: SparkSession, place: Place) -> None:
    options = {**place.options, "topic": "orders"}
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    columns = "key STRING, value STRING, event_time TIMESTAMP"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW to_orders ({columns}) USING pybk OPTIONS ({given})")
    spark.sql("INSERT INTO to_orders VALUES ('a', '1', timestamp_seconds(5)), (NULL, '2', NULL)")
    spark.sql(f"CREATE TABLE orders_table ({columns}) USING pybk")
    try:
        each = ", ".join(f"{name} = '{value}'" for name, value in options.items())
        row = "SELECT 'b', '3', timestamp_seconds(6)"
        spark.sql(f"INSERT INTO orders_table WITH ({each}) {row}")
    finally:
        spark.sql("DROP TABLE orders_table")
    found = {each.data: (each.key, each.time_ns) for each in place.records()}
    assert (found[b"1"], found[b"3"]) == ((b"a", 5 * 10**9), (b"b", 6 * 10**9))
    assert found[b"2"][0] is None
    with pytest.raises(Exception, match="a view to write to declares its columns"):
        spark.sql(f"CREATE TEMPORARY VIEW undeclared USING pybk OPTIONS ({given})")
