"""Rows that are written without an object for each: the same records as with one, or none of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.log_sink.buffered_rows import buffered
from pybk.spark.log_sink.new_records import TaskRows, columns_of
from pybk.streams import detached_writer
from pybk.streams.detached_writer import append_buffered
from pybk.streams.format import KEY_BYTES_MAX, Records, encode_parts
from pybk.streams.log import Log
from pybk.streams.log_writer import NewRecord
from tests.spark.log_sink.test_new_records import EVERY, schema_of
from tests.storage.real_store import open_quick

PLAIN = EVERY.replace(", topic string, partition int", "")
TIME = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "store") as manager:
        yield manager


def batch_of(text: str, rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, to_arrow_schema(schema_of(text), timezone="UTC"))


def found_in(text: str, rows: list[dict[str, Any]]) -> Records | None:
    return buffered(columns_of(schema_of(text), "orders"), batch_of(text, rows))


def written(manager: LedgerManager, name: str, text: str, batches: list[pa.RecordBatch], *, as_objects: bool) -> Log:
    """Write rows to a new log, with or without an object for each."""
    log = Log.open(manager, name, insecure=True, create=True)
    of_task = TaskRows(columns_of(schema_of(text), "orders"), "orders", 0)
    with log.detached_segment(query="query", epoch=0) as writer:
        for batch in batches:
            [rows] = of_task.of(batch)
            if as_objects:
                writer.append_many(rows.records)
            else:
                records = rows.buffered()
                assert records is not None
                assert append_buffered(writer, records)
        assert writer.records == sum(each.num_rows for each in batches)
        assert log.adopt([writer.seal()], query="query", epoch=0).is_new
    return log


def read(log: Log) -> list[tuple[Any, ...]]:
    with log, log.reader() as reader:
        return [(each.seq, each.data, each.key, each.headers, each.txid, each.time_ns) for each in reader]


def random_row(chance: random.Random) -> dict[str, Any]:
    return {
        "key": chance.choice([None, b"", b"k" * chance.randrange(40)]),
        "value": chance.randbytes(chance.choice([0, 1, 100, 70_000])),
        "headers": None,
        "event_time": datetime.fromtimestamp(chance.randrange(1 << 31), UTC),
        "txid": chance.choice([None, chance.randrange(1 << 40)]),
    }


@pytest.mark.parametrize("seed", range(5))
def test_records_are_those_of_objects(manager: LedgerManager, seed: int) -> None:
    """Batches are slices, as rows of one of several logs may be."""
    chance = random.Random(seed)
    rows = [random_row(chance) for _ in range(60)]
    whole, at, batches = batch_of(PLAIN, rows), 3, []
    while at < len(rows):
        size = chance.randrange(1, 20)
        batches.append(whole.slice(at, size))
        at += size
    objects = read(written(manager, "objects", PLAIN, batches, as_objects=True))
    assert read(written(manager, "buffers", PLAIN, batches, as_objects=False)) == objects
    assert [each[1] for each in objects] == [row["value"] for row in rows[3:]]


@pytest.mark.parametrize("text", ["value binary", "value string", "key string, value string"])
def test_columns_that_are_not_there(manager: LedgerManager, text: str) -> None:
    rows: list[dict[str, Any]] = [{"key": None if number % 3 else "é", "value": f"{number} ü"} for number in range(10)]
    if "binary" in text:
        rows = [{"value": str(row["value"]).encode()} for row in rows]
    log = written(manager, "log", text, [batch_of(text, rows)], as_objects=False)
    with log, log.reader() as reader:
        found = list(reader)
    assert [each.data for each in found] == [f"{number} ü".encode() for number in range(10)]
    assert all(abs(each.time_ns - found[0].time_ns) < 10**9 for each in found), "the time of the write"
    keys = [None if number % 3 else "é".encode() for number in range(10)]
    assert [each.key for each in found] == (keys if "key" in text else [None] * 10)


def test_batches_share_entries(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(seq: int, parts: list[Records], *others: Any) -> Any:
        encoded.append(sum(len(each.starts) for each in parts))
        return encode_parts(seq, parts, *others)

    monkeypatch.setattr(detached_writer, "encode_parts", counted)
    batches = [batch_of("value binary", [{"value": bytes(1000)}] * 7) for _ in range(20)]
    log = written(manager, "log", "value binary", batches, as_objects=False)
    assert len(read(log)) == sum(encoded) == 140
    assert len(encoded) == 3


def test_objects_and_buffers_keep_their_order(manager: LedgerManager) -> None:
    log = Log.open(manager, "log", insecure=True, create=True)
    with log.detached_segment(query="query", epoch=0) as writer:
        for number in range(0, 40, 2):
            records = found_in("value binary", [{"value": b"%d" % number}])
            assert records is not None
            assert append_buffered(writer, records)
            writer.append_many([NewRecord(b"%d" % (number + 1))])
        log.adopt([writer.seal()], query="query", epoch=0)
    assert [each[1] for each in read(log)] == [b"%d" % number for number in range(40)]


@pytest.mark.parametrize(
    "row",
    [
        {"headers": []},
        {"headers": [{"key": "a", "value": b"1"}]},
        {"txid": -1},
        {"txid": -5},
        {"event_time": datetime(1969, 1, 1, tzinfo=UTC)},
        {"event_time": datetime(2300, 1, 1, tzinfo=UTC)},
        {"key": bytes(KEY_BYTES_MAX + 1)},
    ],
)
def test_rows_that_have_to_be_looked_at(row: dict[str, Any]) -> None:
    sound = {"key": b"k", "value": b"v", "headers": None, "event_time": TIME, "txid": None}
    assert found_in(PLAIN, [sound, {**sound, "txid": 0, "key": bytes(KEY_BYTES_MAX)}, sound]) is not None
    assert found_in(PLAIN, [sound, {**sound, **row}, sound]) is None
    assert found_in(PLAIN, [sound, {**sound, **row}, sound, {**sound, "key": None, "event_time": None}]) is None


def test_a_record_that_is_too_large_appends_none(manager: LedgerManager) -> None:
    log = Log.open(manager, "log", insecure=True, create=True)
    with log, log.detached_segment(query="query", epoch=0) as writer:
        records = found_in("value binary", [{"value": b"small"}, {"value": bytes(6 << 20)}])
        assert records is not None
        assert not append_buffered(writer, records)
        assert writer.records == 0
