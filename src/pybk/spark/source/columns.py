"""Conversion of entries to Arrow columns, without a Python object per entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from pybk.errors import UsageError
from pybk.ledger.arrow import binary_array

if TYPE_CHECKING:
    from pybk.ledger.entry import EntryBatch
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.spark.options import SourceOptions

_PAYLOAD: Final = "payload"
_ENTRY: Final = (
    StructField("ledger_id", LongType()),
    StructField("entry_id", LongType()),
    StructField(_PAYLOAD, BinaryType()),
    StructField("length", LongType()),
)
_LEDGER: Final = (
    StructField("ledger_type", StringType()),
    StructField("storage_hints", ArrayType(StringType())),
    StructField("custom_metadata", MapType(StringType(), BinaryType())),
)
_TYPES: Final = {field.name: field.dataType for field in (*_ENTRY, *_LEDGER)}

COLUMNS: Final = frozenset(_TYPES)
"""The names of all columns; none is ever null."""


def schema_of(options: SourceOptions) -> StructType:
    """Return the schema of the columns that the options select."""
    entry = [field for field in _ENTRY if options.payload or field.name != _PAYLOAD]
    return StructType([*entry, *(_LEDGER if options.include_metadata else ())])


def check_schema(schema: StructType) -> None:
    """Check a schema, which the user may have given; it may have any of the columns, in any order.

    Raises:
        UsageError: A column does not exist, or has another type.
    """
    for field in schema.fields:
        kind = _TYPES.get(field.name)
        if kind is None:
            raise UsageError(f"the schema has a column {field.name!r:.100}; there are {', '.join(_TYPES)}")
        if kind.simpleString() != field.dataType.simpleString():
            raise UsageError(
                f"the schema has column {field.name} as {field.dataType.simpleString()}; it is {kind.simpleString()}"
            )


class LedgerColumns:
    """Makes the columns of one ledger.

    Args:
        schema: The columns wanted.
        metadata: The metadata of the ledger.
    """

    def __init__(self, schema: StructType, metadata: LedgerMetadata) -> None:
        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self._metadata = metadata

    def batch(self, entries: EntryBatch) -> pa.RecordBatch:
        """Return entries as rows, in their order; payloads are copied once.

        Raises:
            pyarrow.ArrowInvalid: The payloads have 2 GiB or more in total.
        """
        columns = [self._column(field, entries) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, field: pa.Field, entries: EntryBatch) -> pa.Array:
        metadata = self._metadata
        match field.name:
            case "ledger_id":
                return pa.array(np.full(len(entries), entries.ledger_id, np.int64))
            case "entry_id":
                return pa.array(entries.entry_ids)
            case "payload":
                pieces = binary_array(entries.buffer, entries.payload_offsets, entries.payload_sizes)
                return pieces.cast(pa.binary())  # Spark does not support large_binary
            case "length":
                return pa.array(entries.payload_sizes)
            case "ledger_type":
                value: Any = str(metadata.ledger_type)
            case "storage_hints":
                value = sorted(hint.value for hint in metadata.storage_hints)
            case _:
                value = sorted(metadata.custom_metadata.items())
        return pa.array([value], field.type).take(pa.array(np.zeros(len(entries), np.int64)))
