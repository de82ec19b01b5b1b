"""Rows as records, a batch at a time: columns that are taken, and rows that are refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from pybk.errors import UsageError
from pybk.spark.log_sink.new_records import HEADERS, TaskRows, columns_of
from pybk.streams.log_writer import NewRecord

TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "map<string,binary>": MapType(StringType(), BinaryType()),
    HEADERS: ArrayType(StructType().add("key", StringType()).add("value", BinaryType())),
}
EVERY = f"key binary, value binary, headers {HEADERS}, event_time timestamp, txid bigint, topic string, partition int"


def schema_of(text: str) -> StructType:
    """Return the schema that a text of names and types describes."""
    schema = StructType()
    for column in text.split(", "):
        name, _, kind = column.partition(" ")
        schema.add(name, TYPES[kind])
    return schema


def rows_of(text: str, rows: list[dict[str, Any]], *, topic: str | None = "orders") -> dict[str, list[NewRecord]]:
    """Return the records of rows by log, after a batch of one row without a topic of its own."""
    schema = schema_of(text)
    of_task = TaskRows(columns_of(schema, topic), topic, 3)
    batch = pa.RecordBatch.from_pylist(rows, to_arrow_schema(schema, timezone="UTC"))
    assert of_task.of(batch.slice(0, 0)) == []
    found: dict[str, list[NewRecord]] = {}
    for half in (batch.slice(0, len(rows) // 2), batch.slice(len(rows) // 2)):
        for part in of_task.of(half):
            assert len(part.records) == len(part.numbers)
            found.setdefault(part.log, []).extend(part.records)
    return found


def test_a_row_with_everything_and_one_with_nothing_but_a_value() -> None:
    full = {
        "key": b"k",
        "value": b"v",
        "headers": [{"key": "é", "value": b"1"}, {"key": "é", "value": b""}],
        "event_time": datetime(2026, 1, 1, tzinfo=UTC),
        "txid": 7,
        "topic": "clicks",
        "partition": 0,
    }
    least = {**dict.fromkeys(full), "value": b"", "topic": "orders"}
    second = 1_767_225_600 * 10**9
    assert rows_of(EVERY, [full, least, full], topic=None) == {
        "clicks": [NewRecord(b"v", 7, b"k", (("é", b"1"), ("é", b"")), second)] * 2,
        "orders": [NewRecord(b"")],
    }


def test_rows_of_one_log_keep_their_order() -> None:
    rows = [{"topic": "abc"[number * 7 % 3], "VALUE": str(number)} for number in range(30)]
    found = rows_of("topic string, VALUE string", rows, topic=None)
    expected: dict[str, list[NewRecord]] = {}
    for row in rows:
        expected.setdefault(row["topic"], []).append(NewRecord(row["VALUE"].encode()))
    assert found == expected


def test_an_option_has_precedence_over_the_column_and_other_columns_are_left_out() -> None:
    row = {"topic": None, "value": b"v", "offset": 5, "timestamp": "now"}
    found = rows_of("topic string, value binary, offset bigint, timestamp string", [row])
    assert found == {"orders": [NewRecord(b"v")]}


def test_the_time_that_a_read_has_is_written_unless_another_is_given() -> None:
    row = {"value": b"v", "timestamp": datetime(1970, 1, 1, 0, 0, 1, 5, tzinfo=UTC), "event_time": None}
    assert rows_of("value binary, timestamp timestamp", [row]) == {"orders": [NewRecord(b"v", time_ns=1_000_005_000)]}
    assert rows_of("value binary, timestamp timestamp, event_time timestamp", [row]) == {"orders": [NewRecord(b"v")]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("key binary, payload binary", "the rows have key binary, payload binary, and no column value"),
        ("value binary, Value binary", "column value more than once"),
        ("value int", "column value is int; it takes binary or string: cast it"),
        ("key bigint, value binary", "column key is bigint; it takes binary or string"),
        ("value binary, headers map<string,binary>", "column headers is map<string,binary>; it takes array<struct"),
        ("value binary, event_time string", "column event_time is string; it takes timestamp"),
        ("value binary, event_time timestamp_ntz", "column event_time is timestamp_ntz; it takes timestamp"),
        ("value binary, txid string", "column txid is string; it takes bigint"),
        ("value binary, partition string", "column partition is string; it takes int"),
    ],
)
def test_columns_of_other_types_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        columns_of(schema_of(text), "orders")


def test_a_log_is_named_somewhere() -> None:
    with pytest.raises(UsageError, match="give option topic, the log to write to, or a column topic"):
        columns_of(schema_of("key binary, value binary"), None)
    with pytest.raises(UsageError, match="column topic is binary; it takes string"):
        columns_of(schema_of("topic binary, value binary"), None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"value": None}, "column value is null, and a log has no records without data, such as Kafka's tombstones"),
        ({"topic": None}, "column topic is null"),
        ({"partition": 2}, "column partition is 2, and a log is partition 0 of its topic"),
        ({"headers": [{"key": "a", "value": b"1"}, None]}, "column headers has a null as a header"),
        ({"headers": [{"key": None, "value": b"1"}]}, "column headers has a null as a name of a header"),
        ({"headers": [{"key": "a", "value": None}]}, "column headers has a null as a value of a header"),
    ],
)
def test_a_row_that_cannot_be_a_record_is_named(wrong: dict[str, Any], said: str) -> None:
    sound = {
        "key": b"ann",
        "value": b"v",
        "headers": [{"key": "a", "value": b"1"}],
        "event_time": None,
        "txid": None,
        "topic": "orders",
        "partition": None,
    }
    rows = [sound, {**sound, "headers": None}, sound, sound, {**sound, "key": b"bob", **wrong}, sound]
    with pytest.raises(UsageError, match=f"^row 5 of partition 3, with key b'bob': {said}"):
        rows_of(EVERY, rows, topic=None)
