"""The layout of an export: two directories of Parquet files, which ``export`` writes and ``import_`` reads.

``entries`` has a row for each entry. ``ledgers`` has a row for each ledger; it is written last, so an export that has
it is complete.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pybk.spark.jobs.transfer import TransferHeader

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata

ENTRIES_DIRECTORY: Final = "entries"
LEDGERS_DIRECTORY: Final = "ledgers"

LEDGERS: Final = StructType(
    [
        StructField("export_id", StringType()),
        StructField("ledger_id", LongType()),
        StructField("ledger_type", StringType()),
        StructField("storage_hints", ArrayType(StringType())),
        StructField("digest_type", StringType()),
        StructField("custom_metadata", MapType(StringType(), BinaryType())),
        StructField("ensemble_size", IntegerType()),
        StructField("write_quorum", IntegerType()),
        StructField("ack_quorum", IntegerType()),
        StructField("entries", LongType()),
        StructField("bytes", LongType()),
        StructField("created", TimestampType()),
    ]
)
"""Columns of ``ledgers``, one row per ledger; the quorums are null for ledgers of a store."""


def row_of(export_id: str, metadata: LedgerMetadata, header: TransferHeader) -> tuple[Any, ...]:
    """Return the row of ``ledgers`` for a ledger that is exported as its header says."""
    return (
        export_id,
        header.ledger_id,
        header.ledger_type,
        list(header.storage_hints),
        header.digest_type,
        header.custom_metadata,
        *header.quorums,
        header.entries,
        header.length,
        datetime.fromtimestamp(metadata.creation_time_ns / 1e9, UTC),
    )


def header_of(row: Any) -> TransferHeader:
    """Return the header that a row of ``ledgers`` describes."""
    return TransferHeader(
        ledger_id=row.ledger_id,
        ledger_type=row.ledger_type,
        storage_hints=tuple(row.storage_hints),
        digest_type=row.digest_type,
        custom_metadata={key: bytes(value) for key, value in row.custom_metadata.items()},
        entries=row.entries,
        length=row.bytes,
        quorums=(row.ensemble_size, row.write_quorum, row.ack_quorum),
    )
