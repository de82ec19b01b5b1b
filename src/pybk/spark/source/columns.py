"""Conversion of entries to Arrow columns, without a Python object per entry."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from pybk.ledger.arrow import plain_array
from pybk.spark.source.arrow_columns import ArrowRows, binary_column, check_columns, number_ranges, repeated

if TYPE_CHECKING:
    from pybk.ledger.arrow import Int64s
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
_OF_ENTRIES: Final = frozenset({_PAYLOAD, "length"})
"""The columns for which entries are read; the others are known without that."""

_TYPES: Final = {field.name: field.dataType for field in (*_ENTRY, *_LEDGER)}

COLUMNS: Final = frozenset(_TYPES)
"""The names of all columns; none is ever null."""


def schema_of(options: SourceOptions) -> StructType:
    """Return the schema of the columns that the options select."""
    entry = [field for field in _ENTRY if options.payload or field.name != _PAYLOAD]
    return StructType([*entry, *(_LEDGER if options.include_metadata else ())])


def check_schema(schema: StructType) -> None:
    """Check a schema, as ``check_columns`` does."""
    check_columns(schema, _TYPES)


class LedgerColumns:
    """Makes the columns of one ledger.

    Args:
        schema: The columns wanted.
        metadata: The metadata of the ledger.
        shift: The id of its entry 0 in the ledger that has its entries, a merged one; 0 if it has them itself.

    Attributes:
        of_entries: Whether a column needs the entries themselves.
    """

    def __init__(self, schema: StructType, metadata: LedgerMetadata, shift: int = 0) -> None:
        self._rows = ArrowRows(schema)
        self._metadata = metadata
        self._shift = shift
        self.of_entries: Final = not self._rows.names.isdisjoint(_OF_ENTRIES)

    def batch(self, entries: EntryBatch) -> pa.RecordBatch:
        """Return entries as rows, in their order; payloads are copied once.

        Raises:
            UsageError: An entry is too large for a row.
            pyarrow.ArrowInvalid: The payloads have 2 GiB or more in total.
        """
        return self._rows.batch(partial(self._column, entries))

    def numbered(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Yield rows of entries that are not read, if ``of_entries`` is false."""
        for low, high in number_ranges(first, last):
            yield self._rows.batch(partial(self._known, np.arange(low, high + 1)))

    def _column(self, entries: EntryBatch, field: pa.Field) -> pa.Array:
        match field.name:
            case "payload":
                what = f"an entry of ledger {self._metadata.ledger_id}"
                return binary_column(entries.buffer, entries.payload_offsets, entries.payload_sizes, what)
            case "length":
                return plain_array(entries.payload_sizes)
        return self._known(entries.entry_ids - self._shift if self._shift else entries.entry_ids, field)

    def _known(self, entry_ids: Int64s, field: pa.Field) -> pa.Array:
        """Return a column that the entries themselves are not needed for."""
        metadata = self._metadata
        match field.name:
            case "entry_id":
                return plain_array(entry_ids)
            case "ledger_id":
                value: object = metadata.ledger_id
            case "ledger_type":
                value = str(metadata.ledger_type)
            case "storage_hints":
                value = sorted(hint.value for hint in metadata.storage_hints)
            case _:
                value = sorted(metadata.custom_metadata.items())
        return repeated(value, field.type, len(entry_ids))
