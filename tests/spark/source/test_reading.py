"""What tasks do, without Spark."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructField, StructType

from pybk import DigestType
from pybk.credentials import Secret, write_new_secret
from pybk.errors import EntryUnknownError, NoSuchLedgerError, UnauthorizedError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.entry import EntryBatch
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.spark.connection import close_connections
from pybk.spark.options import SourceOptions, source_options
from pybk.spark.source import arrow_columns, reading
from pybk.spark.source.batch_reader import BatchReader
from pybk.spark.source.columns import LedgerColumns, LedgerRows, schema_of
from pybk.spark.source.planning import NUMBER_BYTES, EntryRange
from pybk.spark.source.reading import payload_bytes, read_ranges
from pybk.streams.log import Log
from pybk.streams.log_writer import NewRecord
from tests.cluster.inside import inside
from tests.spark.secret_files import cluster_options
from tests.storage.real_store import open_quick
from tests.waiting import PROCESS_S


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[LedgerWriter]:
    with inside(tmp_path / "cluster") as cluster:
        with cluster.connect().create_ledger(insecure=True) as writer:
            writer.append_many([b"%d" % number for number in range(20)])
            yield writer
        close_connections()


@pytest.fixture
def options(tmp_path: Path, writer: LedgerWriter) -> SourceOptions:
    url = f"lmdb://{tmp_path}/cluster/metadata"
    return source_options({**cluster_options(url), "ledger": str(writer.ledger_id)})


def read(options: SourceOptions, *entry_ranges: EntryRange) -> list[int]:
    return [
        row["entry_id"] for batch in read_ranges(options, schema_of(options), entry_ranges) for row in batch.to_pylist()
    ]


def test_a_ledger_with_a_secret_is_read_with_that_of_a_file(tmp_path: Path) -> None:
    for name in ("secret", "another"):
        write_new_secret(str(tmp_path / name))
    with inside(tmp_path / "cluster", count=1) as cluster:
        secret = Secret(file=str(tmp_path / "secret"))
        with cluster.connect().create_ledger(secret=secret, ensemble_size=1, write_quorum=1, ack_quorum=1) as writer:
            writer.append_many([b"%d" % number for number in range(20)])
        where = {**cluster_options(cluster.url), "ledger": str(writer.ledger_id)}
        given = source_options({**where, "secretFile": str(tmp_path / "secret")})
        assert read(given, EntryRange(writer.ledger_id, 10, 12)) == [10, 11, 12]
        with pytest.raises(UnauthorizedError):
            read(source_options({**where, "secretFile": str(tmp_path / "another")}), EntryRange(writer.ledger_id, 0, 1))
        close_connections()


def test_pieces_are_read_in_order(options: SourceOptions, writer: LedgerWriter) -> None:
    ledger_id = writer.ledger_id
    assert read(options, EntryRange(ledger_id, 10, 12), EntryRange(ledger_id, 3, 3)) == [10, 11, 12, 3]
    assert read(options) == []
    assert payload_bytes(options, EntryRange(ledger_id, 8, 11)) == 6
    assert payload_bytes(options, EntryRange(ledger_id, 0, 0)) == 1


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[SourceOptions, list[EntryRange]]]:
    """A store of ledgers with three entries each, and their ranges."""
    with open_quick(tmp_path / "store") as manager:
        ranges = []
        for number in range(7):
            with manager.create_ledger(insecure=True, ledger_type="small") as writer:
                writer.append_many([b"%d-%d" % (number, each) for each in range(3)])
            ranges.append(EntryRange(writer.ledger_id, 0, 2))
    yield source_options({"path": str(tmp_path / "store"), "ledgerType": "small"}), ranges
    close_connections()


def test_small_ledgers_share_batches(small: tuple[SourceOptions, list[EntryRange]]) -> None:
    options, ranges = small
    [batch] = read_ranges(options, schema_of(options), ranges)
    rows = [(row["ledger_id"], row["entry_id"], row["payload"]) for row in batch.to_pylist()]
    assert rows == [
        (each.ledger_id, entry, b"%d-%d" % (number, entry)) for number, each in enumerate(ranges) for entry in range(3)
    ]
    entry_bytes = 3 + 64  # and header and digest
    batches = list(read_ranges(replace(options, batch_bytes=6 * entry_bytes), schema_of(options), ranges))
    assert [each.num_rows for each in batches] == [3] * 7, "a half is enough"
    batches = list(read_ranges(replace(options, batch_bytes=8 * entry_bytes), schema_of(options), ranges))
    assert [each.num_rows for each in batches] == [6, 6, 6, 3]


def test_a_batch_refers_to_so_many_ledgers_at_most(
    small: tuple[SourceOptions, list[EntryRange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, ranges = small
    monkeypatch.setattr(reading, "ROWS_SHARE", 0.2)
    assert [each.num_rows for each in read_ranges(options, schema_of(options), ranges)] == [9, 9, 3]


def test_a_batch_keeps_little_of_the_records_that_have_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier SSD returns a copy of a whole record for one of its entries."""
    ranges = []
    with open_quick(tmp_path / "store") as manager:
        for number in range(7):
            with manager.create_ledger(insecure=True, ledger_type="small") as writer:
                writer.append_many([b"%d-%d" % (number, each) + bytes(1000) for each in range(20)])
            manager.move_ledger(writer.ledger_id, StorageHint.SSD)
            ranges.append(EntryRange(writer.ledger_id, 3, 3))
    kept: list[int] = []
    make = LedgerColumns.batch

    def batch(self: LedgerColumns, rows: Sequence[LedgerRows]) -> pa.RecordBatch:
        kept.extend(len(each.entries.buffer) for each in rows if each.entries is not None)
        return make(self, rows)

    monkeypatch.setattr(LedgerColumns, "batch", batch)
    monkeypatch.setattr(reading, "SPARE_BYTES", 1000)
    options = source_options({"path": str(tmp_path / "store"), "ledgerType": "small"})
    [rows] = read_ranges(options, schema_of(options), ranges)
    assert rows.column("payload").to_pylist() == [b"%d-3" % number + bytes(1000) for number in range(7)]
    assert kept == [1003 + 64] * 7, "header and digest besides the payload"
    close_connections()


def test_rows_with_much_of_their_ledger_make_batches_no_larger(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        custom = {"a": bytes(10_000), "b": b""}
        with manager.create_ledger(insecure=True, custom_metadata=custom) as writer:
            writer.append_many([b"small"] * 1000)
    options = source_options({"path": str(tmp_path / "store"), "ledger": "0", "includeMetadata": "true"})
    options = replace(options, batch_bytes=200_000)
    whole = schema_of(options)
    numbers = StructType([field for field in whole if field.name in ("entry_id", "custom_metadata")])
    for schema, most in ((whole, 3 * 200_000), (numbers, 3 << 20)):
        batches = list(read_ranges(options, schema, [EntryRange(writer.ledger_id, 0, 999)]))
        assert [each for batch in batches for each in batch.column("entry_id").to_pylist()] == list(range(1000))
        assert batches[0].column("custom_metadata")[0].as_py() == sorted(custom.items())
        assert max(batch.nbytes for batch in batches) < most
    close_connections()


def test_small_ledgers_whose_entries_are_not_read_share_batches(
    small: tuple[SourceOptions, list[EntryRange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, ranges = small
    monkeypatch.delattr(LedgerReader, "read_batch")
    schema = StructType([StructField("ledger_id", LongType()), StructField("entry_id", LongType())])
    [batch] = read_ranges(options, schema, ranges)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (each.ledger_id, entry) for each in ranges for entry in range(3)
    ]


def test_rows_that_need_no_entries_are_planned_by_their_numbers(
    small: tuple[SourceOptions, list[EntryRange]],
) -> None:
    options, ranges = small
    numbers = StructType([StructField("entry_id", LongType())])
    assert [each.entry_bytes for each in BatchReader(options, numbers).ranges()] == [NUMBER_BYTES] * len(ranges)
    every = schema_of(options)
    assert [each.entry_bytes for each in BatchReader(options, every).ranges()] == [3.0] * len(ranges)


def test_rows_of_ledgers_before_one_that_is_lost_are_kept(small: tuple[SourceOptions, list[EntryRange]]) -> None:
    options, ranges = small
    lost = EntryRange(99, 0, 1)
    with pytest.raises(NoSuchLedgerError, match="ledger 99 was deleted"):
        list(read_ranges(options, schema_of(options), [ranges[0], lost, ranges[1]]))
    lossy = replace(options, fail_on_data_loss=False)
    [batch] = read_ranges(lossy, schema_of(options), [ranges[0], lost, ranges[1]])
    assert batch.column("ledger_id").to_pylist() == [ranges[0].ledger_id] * 3 + [ranges[1].ledger_id] * 3


def test_the_ledger_of_a_row_that_is_too_large_is_named(
    small: tuple[SourceOptions, list[EntryRange]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, ranges = small
    with open_quick(tmp_path / "store") as manager, manager.create_ledger(insecure=True) as writer:
        writer.append_many([b"", b"four"])
    monkeypatch.setattr(arrow_columns, "ROW_BYTES_MAX", 3)
    large = EntryRange(writer.ledger_id, 0, 1)
    with pytest.raises(UsageError, match=rf"an entry of ledger {writer.ledger_id} has 4 bytes"):
        list(read_ranges(options, schema_of(options), [ranges[0], large, ranges[1]]))


def test_a_large_ledger_is_read_in_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "store") as manager, manager.create_ledger(insecure=True) as writer:
        writer.append_many([bytes(100)] * 1000)
    options = replace(source_options({"path": str(tmp_path / "store"), "ledger": "0"}), batch_bytes=20_000)
    reads: list[int] = []
    read_batch = LedgerReader.read_batch

    def counted(self: LedgerReader, first: int, **options: int) -> EntryBatch:
        found = read_batch(self, first, **options)
        reads.append(len(found))
        return found

    monkeypatch.setattr(LedgerReader, "read_batch", counted)
    batches = list(read_ranges(options, schema_of(options), [EntryRange(writer.ledger_id, 0, 999)]))
    assert [each.num_rows for each in batches] == reads
    assert min(reads[:-1]) == 20_000 // (100 + 64)
    close_connections()


def test_entries_are_not_read_for_columns_that_are_known_without_them(
    options: SourceOptions, writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(LedgerReader, "read_batch")
    monkeypatch.setattr(arrow_columns, "NUMBERED_ROWS", 7)
    schema = StructType([StructField("entry_id", LongType()), StructField("ledger_type", StringType(), False)])
    batches = list(read_ranges(options, schema, [EntryRange(writer.ledger_id, 2, 18)]))
    assert [batch.num_rows for batch in batches] == [7, 7, 3]
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == [{"entry_id": entry_id, "ledger_type": ""} for entry_id in range(2, 19)]
    with pytest.raises(NoSuchLedgerError, match="ledger 77 was deleted"):
        list(read_ranges(options, schema, [EntryRange(77, 0, 1)]))


def test_an_entry_that_is_too_large_for_a_row_is_refused(
    options: SourceOptions, writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_columns, "ROW_BYTES_MAX", 1)
    assert read(options, EntryRange(writer.ledger_id, 0, 9)) == list(range(10))
    with pytest.raises(UsageError, match=r"an entry of ledger \d+ has 2 bytes, and a row of Spark takes 1: .*schema"):
        read(options, EntryRange(writer.ledger_id, 0, 10))
    sizes = StructType([StructField("length", LongType())])
    [batch] = read_ranges(options, sizes, [EntryRange(writer.ledger_id, 9, 10)])
    assert batch.to_pylist() == [{"length": 1}, {"length": 2}]


def test_a_read_waits_for_entries_that_another_process_knew_to_be_confirmed(
    options: SourceOptions, writer: LedgerWriter
) -> None:
    def append() -> None:
        for _ in range(10):
            writer.append(b"more")

    timer = threading.Timer(0.3, append)
    timer.start()
    assert read(options, EntryRange(writer.ledger_id, 18, 25)) == list(range(18, 26))
    timer.join()


def test_sizes_wait_for_what_another_process_knew_to_be_confirmed(options: SourceOptions, writer: LedgerWriter) -> None:
    timer = threading.Timer(0.3, lambda: writer.append_many([b"more"] * 10))
    timer.start()
    assert payload_bytes(options, EntryRange(writer.ledger_id, 20, 24)) == 20
    timer.join()


def test_an_entry_that_is_never_confirmed_raises(
    options: SourceOptions, writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LATE_SECONDS", 0.2)
    with pytest.raises(EntryUnknownError, match="confirmed up to entry 99 when this was planned"):
        read(options, EntryRange(writer.ledger_id, 0, 99))
    writer.close()
    monkeypatch.setattr(reading, "LATE_SECONDS", 60.0)
    with pytest.raises(EntryUnknownError, match="the bookies that answer know of 19"):
        read(options, EntryRange(writer.ledger_id, 0, 99))


READS = """
import sys
from pybk.spark.log_source.log_batch import LogBatchReader
from pybk.spark.log_source.log_columns import columns_of
from pybk.spark.log_source.log_options import log_options
from pybk.spark.options import source_options
from pybk.spark.source.batch_reader import BatchReader
from pybk.spark.source.columns import schema_of

ledgers = source_options({"path": sys.argv[1], "ledger": sys.argv[2]}, streaming=False)
logs = log_options({"path": sys.argv[1], "log": "orders", "columns": sys.argv[3]}, streaming=False)
for reader in (BatchReader(ledgers, schema_of(ledgers)), LogBatchReader(logs, columns_of(logs))):
    [partition] = reader.partitions()
    print(sum(batch.num_rows for batch in reader.read(partition)))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"pandas", "dateutil"}))
"""


@pytest.mark.parametrize("columns", ["kafka", "pybk"])
def test_a_task_loads_no_pandas(tmp_path: Path, columns: str) -> None:
    """Arrow would load it, if it is installed, for some conversions."""
    with open_quick(tmp_path / "store") as manager:
        with manager.create_ledger(digest_type=DigestType.CRC32C) as writer:
            writer.append(b"entry")
        with Log.open(manager, "orders", insecure=True) as log, log.writer() as records:
            records.append_many([NewRecord(b"1", key=b"k", headers=(("a", b"b"),), txid=4), b"2"])
    arguments = [str(tmp_path / "store"), str(writer.ledger_id), columns]
    done = subprocess.run(
        [sys.executable, "-c", READS, *arguments], capture_output=True, text=True, timeout=PROCESS_S, check=True
    )
    assert done.stdout.splitlines() == ["1", "2", "[]"]
