"""The source of streams of logs, called as Spark calls it: what it offers, plans and reads."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pybk.errors import NoSuchLogError, RewoundError, TruncatedError, TruncateGuardError, UnauthorizedError, UsageError
from pybk.spark.connection import close_connections
from pybk.spark.log_source import log_catalog
from pybk.spark.log_source.log_columns import columns_of
from pybk.spark.log_source.log_offsets import BACKLOG_BYTES, from_json
from pybk.spark.log_source.log_options import LogOptions, log_options
from pybk.spark.log_source.log_stream import LogStreamReader
from pybk.streams.record_reader import RecordReader
from tests.cluster.inside import inside
from tests.spark.log_source.logs import Logs, LogStore, password_file
from tests.spark.secret_files import cluster_options
from tests.spark.stream_query import StreamQuery
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.sampled(one_in=8, using="store"),
    pytest.mark.usefixtures("process_of_a_driver"),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    store = LogStore(tmp_path)
    yield store
    store.end()


class Query(StreamQuery[LogOptions, str]):
    """A streaming query of logs."""

    def __init__(self, options: dict[str, str], **more: Any) -> None:
        given = {"startingOffsets": "earliest", **options, **{name: str(value) for name, value in more.items()}}
        super().__init__(log_options(given, streaming=True))

    def new_reader(self) -> LogStreamReader:
        return LogStreamReader(self.options, columns_of(self.options))

    def place(self, row: dict[str, Any]) -> tuple[str, int]:
        return (row["topic"], row["offset"]) if "topic" in row else (row["log"], row["seq"])


def some(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


FORMS = pytest.mark.parametrize("columns", ["kafka", "pybk"])


@FORMS
def test_logs_are_followed_over_segments_and_restarts(store: LogStore, columns: str) -> None:
    store.append("orders", some(5))
    store.append("clicks", some(2))
    query = Query(store.options, subscribe="orders,clicks", columns=columns)
    assert query.batch() == 7
    assert query.latest() == query.offset  # nothing new
    store.append("orders", some(3))
    store.roll("orders")
    store.append("orders", some(4))
    assert query.batch() == 7
    query.start()
    store.append("clicks", some(1))
    store.seal("clicks")
    assert query.batch() == 1
    assert query.latest() == query.offset
    assert query.rows == {"orders": list(range(12)), "clicks": list(range(3))}


def test_offsets_have_the_form_of_the_columns(store: LogStore) -> None:
    store.append("orders", some(5))
    assert Query(store.options, log="orders").offset == {"orders": {"0": 0}}
    query = Query(store.options, log="orders", columns="pybk")
    query.batch()
    [(log, seq)] = query.offset.items()
    assert (log.rpartition("@")[0], len(log), seq) == ("orders", len("orders@12345678"), 5)
    assert query.reader.reportLatestOffset() == query.offset


@FORMS
def test_the_bytes_that_are_left_are_reported_by_log(store: LogStore, columns: str) -> None:
    """Of a segment in part, of those after it, and of the open one; to nothing once all is read."""
    for _ in range(2):
        store.append("orders", [b"x" * 1000] * 10)
        store.roll("orders")
    store.append("orders", [b"x" * 500] * 4)
    store.append("clicks", some(1))
    query = Query(store.options, subscribe="orders,clicks", columns=columns, maxOffsetsPerTrigger=5, backlogBytes=True)
    assert query.reader.reportLatestOffset() is None
    query.batch()
    told = query.reader.reportLatestOffset()
    left = told.pop(BACKLOG_BYTES)
    assert from_json(told)["orders"].seq == 24
    assert left["clicks"] == 0
    assert left["orders"] == pytest.approx(16 * 1000 + 4 * 500, rel=0.1)
    query.start(max_offsets_per_trigger=None)
    query.batch()
    assert query.latest() == query.offset
    assert query.reader.reportLatestOffset()[BACKLOG_BYTES] == {"clicks": 0, "orders": 0}


def test_bytes_are_reported_of_what_is_there_now_while_a_target_is_read(store: LogStore) -> None:
    """The segment that was open when the query began is closed meanwhile."""
    store.append("orders", [b"x" * 1000] * 10)
    query = Query(store.options, log="orders", maxOffsetsPerTrigger=4, backlogBytes=True)
    query.reader.prepareForTriggerAvailableNow()
    store.roll("orders")
    query.batch()
    assert query.reader.reportLatestOffset()[BACKLOG_BYTES]["orders"] == pytest.approx(6000, rel=0.1)


def test_a_stream_begins_with_what_comes_unless_the_options_say_otherwise(store: LogStore) -> None:
    store.append("orders", [{"data": b"x", "time_ns": second * 10**9} for second in (100, 200, 300)])

    def begins(**options: Any) -> int:
        found: int = Query({**store.options, "startingOffsets": "latest"}, log="orders", **options).offset["orders"][
            "0"
        ]
        return found

    assert begins() == 3
    assert begins(startingOffsets='{"orders": 2}') == 2
    assert begins(startingOffsets='{"orders": {"0": -2}}') == 0
    assert begins(startingOffsets='{"orders": -1}') == 3
    assert begins(startingTimestamp=150_000) == 1
    assert begins(startingOffsetsByTimestamp='{"orders": {"0": 200001}}') == 2
    assert begins(startingTimestamp=300_001, startingOffsetsByTimestampStrategy="latest") == 3
    with pytest.raises(UsageError, match=r"no record of the starting time.*Strategy=latest"):
        begins(startingTimestamp=300_001)
    with pytest.raises(UsageError, match="has 4 for log 'orders', whose next record is 3"):
        begins(startingOffsets='{"orders": 4}')


def test_batches_hold_the_limit_in_proportion(store: LogStore) -> None:
    store.append("orders", some(90))
    store.append("clicks", some(10))
    query = Query(store.options, subscribe="orders,clicks", maxOffsetsPerTrigger=20)
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(20)
    assert query.batch() == 20
    assert {log: len(rows) for log, rows in query.rows.items()} == {"orders": 18, "clicks": 2}
    assert [query.batch() for _ in range(5)] == [20, 20, 20, 20, 0]
    store.append("orders", some(50))
    assert query.batch(ReadAllAvailable()) == 50


def test_a_batch_waits_for_the_least_number_of_records_or_the_delay(store: LogStore) -> None:
    store.append("orders", some(3))
    query = Query(store.options, log="orders", minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    assert query.reader.getDefaultReadLimit() == ReadMinRows(10)
    assert query.batch() == 3  # the first one does not wait
    store.append("orders", some(9))
    assert query.batch() == 0
    store.append("orders", some(1))
    assert query.batch() == 10
    store.append("orders", some(1))
    query.start(max_trigger_delay_s=0.0)
    assert query.batch() == 1


def test_available_now_ends_with_the_records_of_now(store: LogStore) -> None:
    store.append("orders", some(25))
    query = Query(store.options, log="orders", maxOffsetsPerTrigger=10, minOffsetsPerTrigger=10)
    query.reader.prepareForTriggerAvailableNow()
    store.append("orders", some(25))
    assert [query.batch() for _ in range(4)] == [10, 10, 5, 0]


@FORMS
def test_available_now_may_begin_after_the_records_of_now(store: LogStore, columns: str) -> None:
    """The log, which is at rest before and afterwards, gets records before Spark asks where to begin."""
    store.append("orders", some(5))
    store.roll("orders")
    query = Query(store.options, log="orders", columns=columns, startingOffsets="latest")
    query.start()
    query.reader.prepareForTriggerAvailableNow()
    store.append("orders", some(5))
    store.roll("orders")
    query.offset = query.reader.initialOffset()
    assert query.batch() == 0
    store.append("orders", some(1))
    query.start()
    assert query.batch() == 1


@FORMS
def test_a_pattern_finds_logs_that_appear(store: LogStore, columns: str) -> None:
    store.append("shop/orders", some(2))
    store.append("shop/old orders", some(2))
    query = Query(store.options, subscribePattern="shop/o.*s", columns=columns, startingOffsets="latest")
    assert query.batch() == 0
    store.append("shop/offers", some(3))
    store.append("other/orders", some(3))
    store.append("shop/orders", some(1))
    assert query.batch() == 4
    assert query.rows == {"shop/offers": [0, 1, 2], "shop/orders": [2]}


def test_a_log_that_a_late_listing_lacks_is_not_lost(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append("orders", some(5))
    query = Query(store.options, subscribePattern="ord.*")
    assert query.batch() == 5
    store.append("orders", some(2))
    query.start()
    with monkeypatch.context() as patch:
        patch.setattr(log_catalog, "names_of", lambda *_: [])
        assert query.batch() == 2
        assert query.reader.reportLatestOffset() == query.offset
    store.append("orders", some(1))
    assert query.batch() == 1
    assert query.rows == {"orders": list(range(8))}


def test_a_missing_log_is_refused_with_the_nearest_or_waited_for(store: LogStore) -> None:
    store.append("orders", some(2))
    store.append("clicks", some(2))
    with pytest.raises(NoSuchLogError, match=r"no log 'order' in .*; there are orders, \.\.\.; option allowMissing"):
        Query(store.options, subscribe="order,clicks")
    with pytest.raises(NoSuchLogError, match=r"no log of .* matches 'odd.*'; there are clicks, orders"):
        Query(store.options, subscribePattern="odd.*")
    with pytest.raises(NoSuchLogError, match=r"no write-ahead log 'orders' in .*; there are none"):
        Query(store.options, wal="orders")
    query = Query(store.options, subscribe="order,clicks", allowMissing="true")
    assert query.batch() == 2
    store.append("order", some(4))
    assert query.batch() == 4


@FORMS
def test_segments_that_are_merged_after_a_plan_are_read_as_planned(
    store: LogStore, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = None
    for first in range(0, 24, 6):
        for number in range(first, first + 6, 2):
            store.append("orders", some(2, number))
            store.roll("orders")
        query = query or Query(store.options, log="orders", columns=columns, maxRecordsPerPartition=4)
        query.start()
        plan = query.reader.partitions

        def partitions(*offsets: dict[str, Any], plan: Callable[..., Any] = plan) -> Any:
            planned = plan(*offsets)
            assert store.merge("orders") > 1
            store.merge("orders")
            return planned

        monkeypatch.setattr(query.reader, "partitions", partitions)
        assert query.batch() == 6
    assert query is not None
    assert query.rows == {"orders": list(range(24))}


@FORMS
def test_truncation_before_the_position_is_no_loss_and_after_it_is_one(store: LogStore, columns: str) -> None:
    store.append("orders", some(10))
    query = Query(store.options, log="orders", columns=columns, maxOffsetsPerTrigger=5)
    assert query.batch() == 5
    store.truncate("orders", 5)
    query.start()
    assert query.batch() == 5
    store.append("orders", some(10))
    store.truncate("orders", 12)
    with pytest.raises(TruncatedError, match=r"records 10 to 11 of log 'orders' were truncated.*failOnDataLoss=false"):
        query.latest()
    query.start(fail_on_data_loss=False)
    assert [query.batch() for _ in range(3)] == [5, 3, 0]
    assert query.rows["orders"] == [*range(10), *range(12, 20)]


@FORMS
def test_the_limit_of_a_batch_counts_records_that_are_there(store: LogStore, columns: str) -> None:
    store.append("orders", some(1))
    options: dict[str, Any] = {"log": "orders", "columns": columns, "maxOffsetsPerTrigger": 5}
    query = Query(store.options, **options, failOnDataLoss="false")
    assert query.batch() == 1
    store.append("orders", some(1000))
    store.truncate("orders", 1001)
    assert query.batch() == 0
    assert query.latest() == query.offset, "the loss is passed over once"
    store.append("orders", some(7))
    assert [query.batch() for _ in range(3)] == [5, 2, 0]
    store.append("orders", some(1000))
    store.truncate("orders", 2005)
    assert [query.batch() for _ in range(2)] == [3, 0]
    assert query.rows["orders"] == [0, *range(1001, 1008), *range(2005, 2008)]


def test_truncation_between_plan_and_read(store: LogStore) -> None:
    store.append("orders", some(10))
    query = Query(store.options, log="orders")
    end = query.latest()
    store.truncate("orders", 4)
    with pytest.raises(TruncatedError, match="failOnDataLoss=false"):
        query.read(end)
    query.start(fail_on_data_loss=False)
    assert query.read(end) == 6


@FORMS
def test_a_deleted_log(store: LogStore, columns: str) -> None:
    store.append("orders", some(5))
    store.append("clicks", some(5))
    query = Query(store.options, subscribe="orders,clicks", columns=columns)
    query.batch()
    store.append("clicks", some(1))
    store.append("orders", some(1))
    end = query.latest()
    store.delete("orders")
    with pytest.raises(NoSuchLogError, match=r"log 'orders', which this query reads, was deleted.*failOnDataLoss"):
        query.latest()
    query.start()
    with pytest.raises(NoSuchLogError, match="'orders' was deleted before"):
        query.read(end)
    query.start(fail_on_data_loss=False)
    assert query.read(end) == 1
    assert query.batch() == 0
    store.append("orders", some(3))
    assert query.batch() == 3
    assert query.rows == {"clicks": list(range(6)), "orders": [*range(5), *range(3)]}


@FORMS
@pytest.mark.parametrize("count", [2, 9])
def test_a_log_that_is_made_again_is_another_one(store: LogStore, columns: str, count: int) -> None:
    store.append("orders", some(5))
    query = Query(store.options, log="orders", columns=columns)
    query.batch()
    store.delete("orders")
    store.append("orders", some(count))
    with pytest.raises(NoSuchLogError, match="was deleted and made again"):
        query.latest()
    if columns == "pybk":
        query.start()  # another process knows it from the offset
        with pytest.raises(NoSuchLogError, match="was deleted and made again"):
            query.latest()
    query.start(fail_on_data_loss=False)
    if columns == "pybk" or count < 5:
        assert [query.batch() for _ in range(3)] == [0, count, 0]
        assert query.rows["orders"] == [*range(5), *range(count)]
    else:
        assert query.batch() == count - 5  # as Kafka's offsets have it


def test_a_log_that_is_made_again_under_a_running_query_that_accepts_loss(store: LogStore) -> None:
    store.append("orders", some(5))
    query = Query(store.options, log="orders", failOnDataLoss="false")
    query.batch()
    store.delete("orders")
    store.append("orders", some(9))
    assert [query.batch() for _ in range(3)] == [0, 9, 0]


@FORMS
def test_a_write_ahead_log_and_its_cuts(store: LogStore, columns: str) -> None:
    store.append_wal("app", some(10))
    query = Query(store.options, wal="app", columns=columns, maxOffsetsPerTrigger=6)
    assert [query.batch() for _ in range(2)] == [6, 4]
    assert query.rows == {"app": list(range(1, 11))}
    store.cut_wal("app", 4)
    store.append_wal("app", some(9))
    with pytest.raises(RewoundError, match=r"'app' was cut after record 4, before 11.*failOnDataLoss"):
        query.latest()
    query.options = replace(query.options, fail_on_data_loss=False)
    query.reader._options = query.options
    assert [query.batch(ReadAllAvailable()) for _ in range(2)] == [0, 9]
    assert query.rows["app"] == [*range(1, 11), *range(5, 14)]


def test_offset_0_is_the_beginning_of_a_write_ahead_log(store: LogStore) -> None:
    """Its first record has number 1, so none before that is lost."""
    store.append_wal("app", some(3))
    assert Query(store.options, wal="app", startingOffsets='{"app": 0}').batch() == 3


def test_a_cut_between_plan_and_read(store: LogStore) -> None:
    store.append_wal("app", some(10))
    query = Query(store.options, wal="app", columns="pybk")
    end = query.latest()
    store.cut_wal("app", 4)
    store.append_wal("app", some(9))
    query.start()
    with pytest.raises(RewoundError, match=r"'app' was cut after record 4, before 10.*failOnDataLoss"):
        query.read(end)
    query.start(fail_on_data_loss=False)
    assert query.read(end) == 4, "those that were kept"
    assert [query.batch() for _ in range(2)] == [0, 9]
    assert query.rows == {"app": [*range(1, 5), *range(5, 14)]}


def test_partitions_follow_the_options(store: LogStore) -> None:
    store.append("orders", some(1000))
    store.roll("orders")
    store.append("orders", some(10))

    def tasks(**options: Any) -> list[list[tuple[int, int]]]:
        query = Query(store.options, log="orders", **options)
        found: list[Any] = query.reader.partitions(query.offset, query.latest())
        return [[(each.first, each.last) for each in partition.record_ranges] for partition in found]

    assert tasks() == [[(0, 1009)]]
    assert [range_ for task in tasks(maxRecordsPerPartition=400) for range_ in task] == [
        (0, 399),
        (400, 799),
        (800, 1009),
    ]
    assert len(tasks(minPartitions=7)) >= 7


def test_records_are_not_read_for_columns_that_are_known_without_them(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append("orders", some(10))
    store.roll("orders")
    store.append("orders", some(10))
    query = Query(store.options, log="orders", failOnDataLoss="false")
    [partition] = query.reader.partitions(query.offset, query.latest())
    schema = StructType([StructField("offset", LongType()), StructField("topic", StringType())])
    monkeypatch.delattr(RecordReader, "read")

    def rows(**options: Any) -> list[dict[str, Any]]:
        task = LogStreamReader(replace(query.options, **options), schema)
        return [row for batch in task.read(partition) for row in batch.to_pylist()]

    assert rows() == [{"offset": offset, "topic": "orders"} for offset in range(20)]
    store.truncate("orders", 4)
    assert [row["offset"] for row in rows()] == list(range(4, 20))
    with pytest.raises(TruncatedError, match=r"record 0 of log 'orders' was truncated.*failOnDataLoss=false"):
        rows(fail_on_data_loss=True)
    store.delete("orders")
    assert rows() == []


def test_a_wrong_password_and_a_cancelled_query(store: LogStore, tmp_path: Path) -> None:
    store.append("orders", some(5))
    (tmp_path / "wrong").write_bytes(b"another")
    with pytest.raises(UnauthorizedError, match="the password is not that of log 'orders'"):
        Query({**store.options, "passwordFile": str(tmp_path / "wrong")}, log="orders")
    query = Query(store.options, log="orders")
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    query.reader.stop()
    query.reader.stop()
    assert query.batch() == 5


@FORMS
def test_a_query_that_names_a_subscription_has_a_lag_and_keeps_what_it_needs(tmp_path: Path, columns: str) -> None:
    with inside(tmp_path / "cluster") as cluster:
        logs = Logs(cluster.connect())
        options = {**cluster_options(cluster.url), "passwordFile": password_file(tmp_path), "columns": columns}
        logs.append("orders", some(10))
        logs.append("clicks", some(5))
        query = Query(options, subscribe="orders,clicks", subscription="sums", maxOffsetsPerTrigger=9)

        def lags(log: str, read: int, left: int) -> None:
            """Wait for the lag: another client sees an acknowledgement once the bookies that it asks have it."""
            wait_until(lambda: logs.lag(log) == [("sums", read, left)])

        assert logs.lag("orders") == []
        assert query.batch() == 9
        lags("orders", 6, 4)
        lags("clicks", 3, 2)
        with pytest.raises(TruncateGuardError):
            logs.truncate("orders", 9)
        assert query.batch() == 6
        lags("orders", 10, 0)
        query.reader.stop()
        logs.append("orders", some(3))
        query.start()
        query.reader.commit(query.offset)  # as Spark does first, for the last batch of the run before
        assert query.batch() == 3
        lags("orders", 13, 0)
        query.reader.stop()
        logs.close()
        close_connections()


@FORMS
def test_the_subscription_of_a_log_that_is_made_again_is_one_of_the_new_log(tmp_path: Path, columns: str) -> None:
    with inside(tmp_path / "cluster") as cluster:
        logs = Logs(cluster.connect())
        options = {**cluster_options(cluster.url), "passwordFile": password_file(tmp_path), "columns": columns}
        logs.append("orders", some(10))
        query = Query(options, log="orders", subscription="sums", failOnDataLoss="false")
        assert query.batch() == 10
        logs.delete("orders", steal=True)
        logs.append("orders", some(4))
        logs.roll("orders")
        query.batch()  # notices it
        wait_until(lambda: logs.lag("orders") == [("sums", 0, 4)])
        assert query.batch() == 4
        wait_until(lambda: logs.lag("orders") == [("sums", 4, 0)])
        query.reader.stop()
        logs.close()
        close_connections()


@FORMS
def test_a_cluster_is_followed(tmp_path: Path, columns: str) -> None:
    with inside(tmp_path / "cluster") as cluster:
        logs = Logs(cluster.connect())
        options = {**cluster_options(cluster.url), "passwordFile": password_file(tmp_path)}
        logs.append("orders", some(5))
        query = Query(options, subscribe="orders", columns=columns)
        for _ in range(3):
            logs.append("orders", some(5))
            query.batch()
            query.start()
        logs.roll("orders")
        query.batch()
        assert query.rows == {"orders": list(range(20))}
        logs.close()
        close_connections()
