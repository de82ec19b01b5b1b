"""Batch reads of logs, called as Spark calls them: their bounds, and schemas that users give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from pybk.errors import TruncatedError, UsageError
from pybk.spark.log_source.log_batch import LogBatchReader
from pybk.spark.log_source.log_columns import columns_of
from pybk.spark.log_source.log_options import log_options
from tests.spark.log_source.logs import LogStore

pytestmark = pytest.mark.usefixtures("process_of_a_driver")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    store = LogStore(tmp_path)
    for first in (0, 5):
        store.append("orders", [{"data": b"x", "time_ns": number * 10**9} for number in range(first, first + 5)])
        store.roll("orders")
    yield store
    store.end()


def read(store: LogStore, log: str = "log", **more: Any) -> list[int]:
    name = {"log": "orders", "wal": "app"}[log]
    options = log_options({**store.options, log: name, **more}, streaming=False)
    reader = LogBatchReader(options, columns_of(options))
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    return [row["offset"] for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"startingOffsets": '{"orders": 8}', "endingOffsets": '{"orders": 3}'},
            "begins at record 8, .* before record 3",
        ),
        ({"startingTimestamp": "8000", "endingTimestamp": "3000"}, "begins at record 8, .* before record 3"),
        ({"startingOffsets": '{"orders": 8}', "endingTimestamp": "3000"}, "begins at record 8, .* before record 3"),
    ],
)
def test_a_read_that_ends_before_it_begins_is_refused(store: LogStore, options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(store, **options)


def test_a_read_may_end_where_it_begins(store: LogStore) -> None:
    assert read(store, startingOffsets='{"orders": 3}', endingOffsets='{"orders": 3}') == []
    assert read(store, endingOffsets='{"orders": 0}') == []
    store.append_wal("app", [b"1", b"2"])
    assert read(store, "wal", endingOffsets='{"app": 0}') == []
    assert read(store, "wal", endingOffsets='{"app": 2}') == [1]


def test_an_end_before_the_first_record_that_is_kept_is_a_loss(store: LogStore) -> None:
    store.truncate("orders", 6)
    assert read(store, endingOffsets='{"orders": 8}') == [6, 7]
    with pytest.raises(TruncatedError, match=r"ends before record 4, and the first one is 6.*failOnDataLoss=false"):
        read(store, endingOffsets='{"orders": 4}')
    assert read(store, endingOffsets='{"orders": 4}', failOnDataLoss="false") == []


@pytest.mark.parametrize(
    ("form", "field", "said"),
    [
        ("kafka", StructField("seq", LongType()), "column 'seq'; there are key, value, topic, partition, offset"),
        ("pybk", StructField("offset", LongType()), "column 'offset'; there are log, seq, position"),
        ("kafka", StructField("partition", LongType()), "partition as bigint; it is int"),
        ("kafka", StructField("value", StringType()), "value as string; it is binary"),
        ("kafka", StructField("key", BinaryType(), False), "column key as NOT NULL"),
        ("pybk", StructField("txid", LongType(), False), "column txid as NOT NULL"),
    ],
)
def test_schemas_with_other_columns_are_refused(form: str, field: StructField, said: str) -> None:
    options = log_options({"path": "/data/store", "log": "orders", "columns": form}, streaming=False)
    LogBatchReader(options, StructType([StructField("value", BinaryType(), False)]))
    with pytest.raises(UsageError, match=said):
        LogBatchReader(options, StructType([field]))
