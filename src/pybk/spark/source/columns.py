"""Conversion of entries to Arrow columns, without a Python object per entry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

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
from pybk.spark.source.arrow_columns import ArrowRows, binary_column, check_columns, repeated

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
_LEDGER_NAMES: Final = frozenset(field.name for field in _LEDGER)
_OF_ENTRIES: Final = frozenset({_PAYLOAD, "length"})
"""The columns for which entries are read; the others are known without that."""

_OFFSET_BYTES: Final = 4

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


class LedgerRows(NamedTuple):
    """Entries of one ledger that become rows.

    Attributes:
        metadata: The ledger as the rows show it: of a member of a merged ledger, the member.
        ids: The numbers of the entries, as the rows show them, ``(n,)`` int64.
        entries: The entries; None if only columns are wanted for which they are not read.
    """

    metadata: LedgerMetadata
    ids: Int64s
    entries: EntryBatch | None


class LedgerColumns:
    """Makes the columns of ledgers; rows of several ledgers share a batch.

    A batch costs some 200 microseconds here and in Spark, whatever it has, so small ledgers share them.

    Args:
        schema: The columns wanted.

    Attributes:
        of_entries: Whether a column needs the entries themselves.
    """

    def __init__(self, schema: StructType) -> None:
        self._rows = ArrowRows(schema)
        self._of_ledgers = sorted(_LEDGER_NAMES.intersection(schema.names))
        self.of_entries: Final = needs_entries(schema)

    def ledger_bytes(self, metadata: LedgerMetadata) -> int:
        """Return the bytes that each row of a ledger has of the ledger itself, about."""
        return sum(_size(_of_ledger(metadata, name)) for name in self._of_ledgers)

    def batch(self, rows: Sequence[LedgerRows]) -> pa.RecordBatch:
        """Return rows in their order, of one ledger or of several; payloads are copied once.

        Raises:
            UsageError: An entry is too large for a row.
            pyarrow.ArrowInvalid: The payloads have 2 GiB or more in total.
        """
        return self._rows.batch(partial(_column, rows))


def needs_entries(schema: StructType) -> bool:
    """Return whether a column of a schema needs the entries themselves."""
    return not _OF_ENTRIES.isdisjoint(schema.names)


def _column(rows: Sequence[LedgerRows], field: pa.Field) -> pa.Array:
    """Return a column of some rows."""
    match field.name:
        case "entry_id":
            return plain_array(np.concatenate([each.ids for each in rows]))
        case "ledger_id":
            ledgers = np.array([each.metadata.ledger_id for each in rows], np.int64)
            return plain_array(np.repeat(ledgers, [len(each.ids) for each in rows]))
        case "payload":
            return _one_array([_payloads(each) for each in _by_buffer(rows)])
        case "length":
            return plain_array(np.concatenate([_entries(each).payload_sizes for each in rows]))
    return _one_array([repeated(_of_ledger(each.metadata, field.name), field.type, len(each.ids)) for each in rows])


_OfLedger: TypeAlias = "str | bytes | Sequence[_OfLedger]"


def _of_ledger(metadata: LedgerMetadata, name: str) -> _OfLedger:
    """Return the value of a column that is the same for all entries of a ledger."""
    match name:
        case "ledger_type":
            return str(metadata.ledger_type)
        case "storage_hints":
            return sorted(hint.value for hint in metadata.storage_hints)
    return sorted(metadata.custom_metadata.items())


def _size(value: _OfLedger) -> int:
    """Return the bytes of a value in a column, about: Arrow has an offset for each text and list."""
    return _OFFSET_BYTES + (len(value) if isinstance(value, str | bytes) else sum(map(_size, value)))


def _by_buffer(rows: Sequence[LedgerRows]) -> list[list[LedgerRows]]:
    """Return rows in groups of neighbours whose entries lie in one buffer, such as the map of a file."""
    return [list(each) for _, each in groupby(rows, key=lambda each: id(_entries(each).buffer))]


def _payloads(rows: Sequence[LedgerRows]) -> pa.Array:
    """Return the payloads of rows whose entries lie in one buffer."""
    entries = [_entries(each) for each in rows]
    starts = np.concatenate([each.payload_offsets for each in entries])
    sizes = np.concatenate([each.payload_sizes for each in entries])
    return binary_column(entries[0].buffer, starts, sizes, partial(_named, rows))


def _named(rows: Sequence[LedgerRows], number: int) -> str:
    """Return the name of a row, for errors."""
    ends = np.cumsum([len(each.ids) for each in rows])
    return f"an entry of ledger {rows[int(np.searchsorted(ends, number, side='right'))].metadata.ledger_id}"


def _entries(rows: LedgerRows) -> EntryBatch:
    assert rows.entries is not None, "a column of entries is wanted, so they were read"
    return rows.entries


def _one_array(arrays: list[pa.Array]) -> pa.Array:
    """Return the values of some arrays as one."""
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
