"""Logs in a real Spark: the rows of batch reads and of streams, in both forms of columns."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pyspark.sql import functions as f

from tests.cluster.inside import SECRET, inside
from tests.spark.log_source.logs import Logs, password_file
from tests.spark.queries import run_to_end
from tests.storage.real_store import open_quick
from tests.waiting import PROCESS_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from pybk.manager.ledger_manager import LedgerManager

pytestmark = pytest.mark.sampled(one_in=6, using="spark")

KAFKA = "key: binary, value: binary, topic: string, partition: int, offset: bigint, timestamp: timestamp"
SECOND = 10**9


class Filled:
    """Logs ``orders`` of 30 records in two segments, ``clicks`` of 5, and write-ahead log ``app`` of 4.

    A third of the orders has headers, and a third no key.
    """

    def __init__(self, manager: LedgerManager, options: dict[str, str]) -> None:
        self.logs = Logs(manager)
        self.options = options
        for first in (0, 15):
            self.logs.append("orders", [order(number) for number in range(first, first + 15)])
            self.logs.roll("orders")
        self.logs.append("clicks", [b"%d" % number for number in range(5)])
        self.logs.append_wal("app", [b"%d" % number for number in range(4)])


def order(number: int) -> dict[str, Any]:
    """Return a record."""
    return {
        "data": b"" if number % 10 == 9 else json.dumps({"shop": number % 2, "price": number}).encode(),
        "key": None if number % 3 == 1 else b"k%d" % number,
        "headers": (("trace", b"%d" % number), ("é", b"\x00")) if number % 3 == 2 else (),
        "time_ns": number * SECOND,
        "txid": None if number < 10 else number * 2,
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    directory = tmp_path_factory.mktemp("logs")
    options = {"path": str(directory / "store"), "passwordFile": password_file(directory)}
    with open_quick(directory / "store") as manager:
        filled = Filled(manager, options)
        yield filled
        filled.logs.close()


def read(spark: SparkSession, filled: Filled, **options: Any) -> DataFrame:
    return spark.read.format("pybk").options(**filled.options, **options).load()


def test_rows_have_the_columns_of_kafkas_source(spark: SparkSession, store: Filled) -> None:
    frame = read(spark, store, subscribe="orders, clicks", includeHeaders="true")
    assert frame.schema.simpleString() == (
        f"struct<{KAFKA.replace(': ', ':').replace(', ', ',')},timestampType:int,"
        "headers:array<struct<key:string,value:binary>>>"
    )
    rows = {(row.topic, row.offset): row for row in frame.collect()}
    assert len(rows) == 35
    for number in range(30):
        row, wanted = rows["orders", number], order(number)
        assert (row.partition, row.timestampType) == (0, 0)
        assert (row.key, bytes(row.value)) == (wanted["key"], wanted["data"])
        assert row.timestamp.astimezone(UTC) == datetime.fromtimestamp(number, tz=UTC)
        headers = None if row.headers is None else tuple((each.key, bytes(each.value)) for each in row.headers)
        assert headers == (wanted["headers"] or None)
    assert "headers" not in read(spark, store, log="orders").columns


def test_rows_have_the_columns_of_pybk(spark: SparkSession, store: Filled) -> None:
    frame = read(spark, store, log="orders", columns="pybk")
    assert frame.columns == [
        *("log", "seq", "position", "txid", "key", "value", "headers", "event_time", "append_time"),
    ]
    rows = frame.orderBy("seq").collect()
    assert [row.seq for row in rows] == list(range(30))
    assert {row.log for row in rows} == {"orders"}
    assert (rows[0].position, rows[29].position) == ("1:1:0:0", "2:1:14:29")
    assert [row.txid for row in rows] == [order(number)["txid"] for number in range(30)]
    assert rows[7].event_time.astimezone(UTC) == datetime.fromtimestamp(7, tz=UTC)
    assert {row.append_time for row in rows} == {None}


def test_a_write_ahead_log_is_read_by_name(spark: SparkSession, store: Filled) -> None:
    rows = read(spark, store, wal="app").orderBy("offset").collect()
    assert [(row.topic, row.offset, bytes(row.value)) for row in rows] == [
        ("app", number + 1, b"%d" % number) for number in range(4)
    ]
    assert {(row.key, row.timestamp, row.timestampType) for row in rows} == {(None, None, -1)}
    assert [
        row.seq for row in read(spark, store, wal="app", columns="pybk", startingOffsets='{"app": 3}').collect()
    ] == [
        *(3, 4),
    ]


@pytest.mark.parametrize(
    ("options", "offsets"),
    [
        ({"startingOffsets": '{"orders": 10}', "endingOffsets": '{"orders": {"0": 20}}'}, range(10, 20)),
        ({"startingOffsets": "earliest", "endingOffsets": '{"orders": -1}'}, range(30)),
        ({"startingTimestamp": "5500", "endingTimestamp": "25000"}, range(6, 25)),
        (
            {
                "startingOffsetsByTimestamp": '{"orders": {"0": 5000}}',
                "endingOffsetsByTimestamp": '{"orders": 9999999}',
            },
            range(5, 30),
        ),
        ({"startingTimestamp": "29000", "startingOffsets": '{"orders": 3}'}, range(29, 30)),
    ],
)
def test_positions(spark: SparkSession, store: Filled, options: dict[str, str], offsets: range) -> None:
    rows = read(spark, store, assign='{"orders": [0]}', **options).collect()
    assert sorted(row.offset for row in rows) == list(offsets)


def test_partitions_and_a_schema_of_ones_own(spark: SparkSession, store: Filled) -> None:
    assert read(spark, store, subscribePattern="(orders|clicks)").rdd.getNumPartitions() == 1
    some = read(spark, store, subscribe="orders", minPartitions=5, batchBytes=100)
    assert some.rdd.getNumPartitions() >= 5
    assert sorted(row.offset for row in some.collect()) == list(range(30))
    reader = spark.read.format("pybk").options(**store.options, log="orders")
    assert reader.schema("offset BIGINT").load().agg(f.sum("offset")).first()[0] == sum(range(30))  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subscribe": "order"}, "NoSuchLogError: there is no log 'order' in .*; there are orders, ...; option allowM"),
        ({"subscribePattern": "odd.*"}, "no log of .* matches"),
        (
            {"subscribe": "orders", "kafka.bootstrap.servers": "host:9092"},
            "kafka.bootstrap.servers .* give metadataUri",
        ),
        ({"subscribe": "orders", "password": "another"}, "give passwordFile"),
        ({"subscribe": "orders", "minPartition": "1"}, "did you mean minPartitions"),
    ],
)
def test_what_cannot_be_is_refused_at_analysis(
    spark: SparkSession, store: Filled, options: dict[str, str], said: str
) -> None:
    """No action is needed, and the value of a secret is not in the error."""
    with pytest.raises(Exception, match=f"(?s){said}") as refused:
        read(spark, store, **options)
    assert "another" not in str(refused.value)


def test_a_view_of_sql(spark: SparkSession, store: Filled) -> None:
    options = ", ".join(f"{name} '{value}'" for name, value in {**store.options, "subscribe": "clicks"}.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW clicks USING pybk OPTIONS ({options})")
    assert spark.sql("SELECT max(offset) AS last FROM clicks WHERE topic = 'clicks'").first()["last"] == 4  # type: ignore[index]


def test_a_running_query_sees_what_happens_to_its_log(spark: SparkSession, store: Filled, tmp_path: Path) -> None:
    """It follows a log while that is truncated, ends when it is deleted, and continues if that is accepted."""
    logs, seen = store.logs, Counter[int]()

    def start(**options: Any) -> StreamingQuery:
        stream = spark.readStream.format("pybk").options(**store.options, **options)
        stream = stream.options(subscribe="doomed,clicks", startingOffsets="earliest")
        rows = stream.load().where("topic = 'doomed'").select("offset")

        def note(batch: DataFrame, _: int) -> None:
            seen.update(row.offset for row in batch.collect())

        return rows.writeStream.foreachBatch(note).option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def wait(query: StreamingQuery, offsets: range) -> None:
        deadline = time.monotonic() + PROCESS_S
        while sorted(seen) != list(offsets):
            assert query.isActive, str(query.exception())
            assert time.monotonic() < deadline, seen
            time.sleep(0.1)

    logs.append("doomed", [b"x"] * 5)
    query = start()
    wait(query, range(5))
    logs.truncate("doomed", 3)
    logs.append("doomed", [b"x"] * 5)
    wait(query, range(10))
    logs.delete("doomed")
    with pytest.raises(Exception, match=r"(?s)log 'doomed', which this query reads, was deleted.*failOnDataLoss=false"):
        query.awaitTermination(int(PROCESS_S))
    query = start(failOnDataLoss="false", allowMissing="true")
    logs.append("doomed", [b"x"] * 12)
    wait(query, range(12))
    query.stop()
    assert set(seen.values()) <= {1, 2}


def sums(spark: SparkSession, source: str, options: dict[str, str], directory: Path) -> dict[tuple[int, int], int]:
    """Return what a pipeline as for Kafka makes of ``orders``: sums by shop and ten seconds, exactly once."""
    events = (
        spark.readStream.format(source)
        .options(**options)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "7")
        .option("failOnDataLoss", "true")
        .load()
        .select(f.from_json(f.col("value").cast("string"), "shop INT, price INT").alias("order"), "timestamp")
        .where("order IS NOT NULL")
    )
    totals = (
        events.withWatermark("timestamp", "1 second")
        .groupBy(f.window("timestamp", "10 seconds"), "order.shop")
        .agg(f.sum("order.price").alias("total"))
        .select(f.col("window.start").cast("long").alias("start"), "shop", "total")
    )
    writer = totals.writeStream.format("json").outputMode("append").trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(directory / "checkpoint"))
    run_to_end(lambda: writer.start(str(directory / "out")))
    rows = spark.read.schema("start BIGINT, shop INT, total BIGINT").json(str(directory / "out")).collect()
    assert len(rows) == len({(row.start, row.shop) for row in rows})
    return {(row.start, row.shop): row.total for row in rows}


def expected_sums(numbers: range) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for number in numbers:
        if number % 10 != 9:
            place = number // 10 * 10, number % 2
            found[place] = found.get(place, 0) + number
    return found


@pytest.mark.long
def test_a_pipeline_for_kafka_runs_with_another_format(spark: SparkSession, tmp_path: Path) -> None:
    """Twice, with records that come in between; the last windows stay open, as the watermark has not passed them."""
    with inside(tmp_path / "cluster") as cluster:
        (tmp_path / "secret").write_bytes(SECRET)
        options = {
            "metadataUri": cluster.url,
            "clusterSecretFile": str(tmp_path / "secret"),
            "passwordFile": password_file(tmp_path),
        }
        logs = Logs(cluster.connect())
        logs.append("orders", [order(number) for number in range(35)])
        logs.roll("orders")
        assert sums(spark, "pybk", options, tmp_path) == expected_sums(range(30))
        logs.append("orders", [order(number) for number in range(35, 62)])
        logs.roll("orders")
        assert sums(spark, "pybk", options, tmp_path) == expected_sums(range(60))
        logs.close()
