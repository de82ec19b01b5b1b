"""Entries as Arrow columns: the same bytes as entry by entry, whatever the buffer they lie in."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.arrow import binary_array
from pybk.ledger.digest import DigestType
from pybk.ledger.entry import EntryBatch
from pybk.manager.ledger_reader import LedgerReader
from pybk.spark.options import source_options
from pybk.spark.source.columns import LedgerColumns, LedgerRows, check_schema, schema_of
from tests.storage.real_store import open_quick


def scattered(chance: random.Random, sizes: list[int], digest_bytes: int) -> tuple[EntryBatch, list[bytes]]:
    """Return entries that lie in any order in a buffer, with other bytes between them."""
    head = 32 + digest_bytes
    wanted = [chance.randbytes(size) for size in sizes]
    order = list(range(len(sizes)))
    chance.shuffle(order)
    buffer, offsets = b"", [0] * len(sizes)
    for place in order:
        buffer += chance.randbytes(chance.randrange(3))
        offsets[place] = len(buffer)
        buffer += chance.randbytes(head) + wanted[place]
    ids = np.arange(100, 100 + len(sizes))
    encoded = np.array(sizes, np.int64) + head
    return EntryBatch(7, ids, memoryview(buffer), np.array(offsets, np.int64), encoded, digest_bytes), wanted


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("digest_bytes", [0, 4, 32])
def test_payloads_are_those_of_the_entries(seed: int, digest_bytes: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.choice([0, 0, 1, 5, 1000]) for _ in range(chance.randrange(1, 30))]
    batch, wanted = scattered(chance, sizes, digest_bytes)
    found = binary_array(batch.buffer, batch.payload_offsets, batch.payload_sizes)
    found.validate(full=True)
    assert found.type == pa.binary()
    assert found.to_pylist() == wanted
    assert found.null_count == 0


def test_nothing_but_empty_payloads() -> None:
    batch, wanted = scattered(random.Random(1), [0, 0, 0], 0)
    found = binary_array(batch.buffer, batch.payload_offsets, batch.payload_sizes)
    assert found.to_pylist() == wanted == [b"", b"", b""]


@pytest.fixture
def options() -> dict[str, str]:
    return {"path": "/data", "ledger": "0"}


def rows_of(schema: StructType, *parts: tuple[LedgerReader, EntryBatch]) -> pa.RecordBatch:
    """Return entries of ledgers as one batch of rows."""
    rows = [LedgerRows(reader.metadata, entries.entry_ids, entries) for reader, entries in parts]
    return LedgerColumns(schema).batch(rows)


def test_columns_by_options(options: dict[str, str]) -> None:
    assert schema_of(source_options(options)).names == ["ledger_id", "entry_id", "payload", "length"]
    assert schema_of(source_options({**options, "payload": "false"})).names == ["ledger_id", "entry_id", "length"]
    every = schema_of(source_options({**options, "includeMetadata": "true"}))
    assert every.simpleString() == (
        "struct<ledger_id:bigint,entry_id:bigint,payload:binary,length:bigint,ledger_type:string,"
        "storage_hints:array<string>,custom_metadata:map<string,binary>>"
    )


def test_a_row_has_what_the_entry_and_its_ledger_have(tmp_path: Path, options: dict[str, str]) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(
            ledger_type="orders",
            storage_hints={StorageHint.SSD, StorageHint.HDD},
            custom_metadata={"b": b"\x00\xff", "a": b""},
            insecure=True,
        )
        writer.append_many([b"first", b"", b"third"])
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        schema = schema_of(source_options({**options, "includeMetadata": "true"}))
        found = rows_of(schema, (reader, reader.read_batch(1)))
    found.validate(full=True)
    same: dict[str, Any] = {
        "ledger_id": writer.ledger_id,
        "ledger_type": "orders",
        "storage_hints": ["hdd", "ssd"],
        "custom_metadata": [("a", b""), ("b", b"\x00\xff")],
    }
    assert found.to_pylist() == [
        {"entry_id": 1, "payload": b"", "length": 0, **same},
        {"entry_id": 2, "payload": b"third", "length": 5, **same},
    ]


@pytest.mark.parametrize("digest_type", [DigestType.CRC32C, DigestType.HMAC_SHA256])
def test_rows_of_several_ledgers_share_a_batch(
    tmp_path: Path, options: dict[str, str], digest_type: DigestType
) -> None:
    schema = schema_of(source_options({**options, "includeMetadata": "true"}))
    with open_quick(tmp_path / "store") as manager:
        parts, expected = [], []
        for number in range(3):
            with manager.create_ledger(
                ledger_type=f"kind-{number}",
                custom_metadata={"n": b"%d" % number},
                digest_type=digest_type,
                password=b"p",
            ) as writer:
                payloads = [b"%d of %d" % (each, number) for each in range(4)]
                writer.append_many(payloads)
            reader = manager.open_ledger(writer.ledger_id, password=b"p")
            parts += [(reader, reader.read_batch(2)), (reader, reader.read_batch(0, last=1))]
            expected += [
                {
                    "ledger_id": writer.ledger_id,
                    "entry_id": each,
                    "payload": payloads[each],
                    "length": len(payloads[each]),
                    "ledger_type": f"kind-{number}",
                    "storage_hints": [],
                    "custom_metadata": [("n", b"%d" % number)],
                }
                for each in (2, 3, 0, 1)
            ]
        found = rows_of(schema, *parts)
    found.validate(full=True)
    assert found.to_pylist() == expected


def test_a_schema_may_have_fewer_columns_in_another_order(tmp_path: Path) -> None:
    schema = StructType([StructField("length", LongType(), False), StructField("ledger_type", StringType())])
    check_schema(schema)
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(insecure=True)
        writer.append(b"four")
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        found = rows_of(schema, (reader, reader.read_batch(0)))
    assert found.to_pylist() == [{"length": 4, "ledger_type": ""}]
    assert not found.schema.field("length").nullable


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (StructField("value", LongType()), "column 'value'; there are ledger_id, entry_id"),
        (StructField("length", IntegerType()), "length as int; it is bigint"),
    ],
)
def test_other_columns_are_refused(field: StructField, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_schema(StructType([field]))
