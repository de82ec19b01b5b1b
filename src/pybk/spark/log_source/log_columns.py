"""Conversion of the records of a log to Arrow columns, without a Python object per record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pybk.errors import CorruptError, UsageError
from pybk.ledger.arrow import plain_array
from pybk.spark.log_source.log_options import KAFKA
from pybk.spark.source.arrow_columns import (
    ArrowRows,
    binary_column,
    check_columns,
    number_ranges,
    numbered_rows,
    repeated,
    scalar,
)
from pybk.streams.format import NO_VALUE
from pybk.streams.record_attributes import Pieces, RecordParts, record_parts

if TYPE_CHECKING:
    from pybk.spark.log_source.log_options import LogOptions
    from pybk.streams.format import Int64s, Records

_HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_KAFKA: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": _HEADERS,
}
_PYBK: Final[dict[str, DataType]] = {
    "log": StringType(),
    "seq": LongType(),
    "position": StringType(),
    "txid": LongType(),
    "key": BinaryType(),
    "value": BinaryType(),
    "headers": _HEADERS,
    "event_time": TimestampType(),
    "append_time": TimestampType(),
}
_OF_RECORDS: Final = frozenset(
    {"key", "value", "timestamp", "timestampType", "headers", "position", "txid", "event_time"}
)
"""The columns for which records are read; the others are known without that."""

_MAY_BE_NULL: Final = frozenset({"key", "headers", "timestamp", "txid", "event_time", "append_time"})
"""The columns that a record need not have."""

_CREATE_TIME: Final = 0
"""The type of Kafka's timestamps that producers set; -1 is that of records without one."""


def columns_of(options: LogOptions) -> StructType:
    """Return the schema of the columns that the options select."""
    left_out = options.columns == KAFKA and not options.include_headers
    types = _types(options)
    return StructType([StructField(name, kind) for name, kind in types.items() if not (left_out and name == "headers")])


def check_schema(options: LogOptions, schema: StructType) -> None:
    """Check a schema against the form of columns that the options select, as ``check_columns`` does.

    Raises:
        UsageError: As ``check_columns``; or a column that may have nulls is NOT NULL.
    """
    check_columns(schema, _types(options))
    for field in schema.fields:
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise UsageError(f"the schema has column {field.name} as NOT NULL, and it may be null; leave that out")


def _types(options: LogOptions) -> Mapping[str, DataType]:
    return _KAFKA if options.columns == KAFKA else _PYBK


class LogColumns:
    """Makes the columns of one log.

    Args:
        schema: The columns wanted.
        log: The log's name.

    Attributes:
        of_records: Whether a column needs the records themselves.
    """

    def __init__(self, schema: StructType, log: str) -> None:
        self._rows = ArrowRows(schema)
        self._log = log
        self.of_records: Final = not self._rows.names.isdisjoint(_OF_RECORDS)

    def batch(self, records: Records) -> pa.RecordBatch:
        """Return records as rows, in their order; data, keys and headers are copied once.

        Raises:
            CorruptError: The key and headers of a record are damaged.
            UsageError: A record is too large for a row.
        """
        return self._rows.batch(_Rows(records, self._log).column)

    def numbered(self, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Yield rows of records that are not read, if ``of_records`` is false."""
        for low, high in number_ranges(first, last, numbered_rows()):
            yield self._rows.batch(_Numbers(self._log, low, high + 1 - low).column)


class _Numbers:
    """The columns of some records that are known without the records."""

    def __init__(self, log: str, first_seq: int, count: int) -> None:
        self._log = log
        self._seqs = np.arange(first_seq, first_seq + count)
        self._count = count

    def column(self, field: pa.Field) -> pa.Array:
        """Return a column."""
        match field.name:
            case "topic" | "log":
                return repeated(self._log, field.type, self._count)
            case "partition":
                return repeated(0, field.type, self._count)
            case "offset" | "seq":
                return plain_array(self._seqs)
        return pa.nulls(self._count, field.type)  # append_time: no entry has it yet


class _Rows(_Numbers):
    """The columns of some records, of which only those that are asked for are made."""

    def __init__(self, records: Records, log: str) -> None:
        super().__init__(log, records.first_seq, len(records.starts))
        self._records = records

    def column(self, field: pa.Field) -> pa.Array:
        """Return a column."""
        match field.name:
            case "key":
                return self._keys()
            case "value":
                return self._pieces(self._parts.data)
            case "timestamp" | "event_time":
                return self._times(field)
            case "timestampType":
                return self._time_types(field)
            case "headers":
                return self._headers(field)
            case "position":
                return self._positions()
            case "txid":
                return _or_null(self._records.txids, self._count)
        return super().column(field)

    @cached_property
    def _parts(self) -> RecordParts:
        return record_parts(self._records, where=f"log {self._log!r}")

    def _pieces(self, pieces: Pieces) -> pa.Array:
        return binary_column(self._records.buffer, pieces.starts, pieces.sizes, self._named)

    def _named(self, _: int) -> str:
        return f"a record of log {self._log!r}"

    def _keys(self) -> pa.Array:
        if not self._parts.has_key.any():
            return pa.nulls(self._count, pa.binary())
        has_key = plain_array(self._parts.has_key)
        return pc.if_else(has_key, self._pieces(self._parts.keys), scalar(None, pa.binary()))

    def _headers(self, field: pa.Field) -> pa.Array:
        """Return the headers, null for a record without any, as Kafka's source has it."""
        parts = self._parts
        kind = field.type.value_type
        try:
            names = self._pieces(parts.header_names).cast(pa.string())
        except pa.ArrowInvalid as error:
            raise CorruptError(f"log {self._log!r}: the name of a header is not UTF-8: {error}") from error
        pairs = pa.StructArray.from_arrays([names, self._pieces(parts.header_values)], fields=list(kind))
        offsets = np.concatenate(([0], np.cumsum(parts.header_counts))).astype(np.int32)
        none = plain_array(parts.header_counts == 0)
        return pa.ListArray.from_arrays(plain_array(offsets), pairs, type=field.type, mask=none)

    def _times(self, field: pa.Field) -> pa.Array:
        times = _or_null(self._records.times, self._count)
        return pc.divide(times, scalar(1000, pa.int64())).cast(field.type)

    def _time_types(self, field: pa.Field) -> pa.Array:
        types = np.full(self._count, -1 if self._records.times is None else _CREATE_TIME, np.int32)
        if self._records.times is not None:
            types[self._records.times == NO_VALUE] = -1
        return plain_array(types)

    def _positions(self) -> pa.Array:
        """Return the positions as ``str`` makes them."""
        entries, slots = self._records.places()
        numbers = (np.full(self._count, self._records.segment), entries, slots, self._seqs)
        texts = [plain_array(each.astype(np.int64)).cast(pa.string()) for each in numbers]
        return pc.binary_join_element_wise(*texts, scalar(":", pa.string()))


def _or_null(values: Int64s | None, count: int) -> pa.Array:
    """Return numbers, null where there is none."""
    if values is None:
        return pa.nulls(count, pa.int64())
    return plain_array(values, values == NO_VALUE)
