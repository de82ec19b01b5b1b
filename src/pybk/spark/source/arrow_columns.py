"""The parts of Arrow columns that ledgers and logs share: schemas, batches of rows, and pieces of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema

from pybk.errors import UsageError
from pybk.ledger.arrow import binary_array, plain_array
from pybk.spark.source.planning import NUMBER_BYTES

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

    from pybk.ledger.arrow import Int64s

ROW_BYTES_MAX: Final = 512 << 20
"""The most bytes of a value in a row: Spark's JVM holds several copies of it at once."""

NUMBERED_ROWS: Final = 1 << 16
"""Rows of a batch that has nothing but numbers."""


def check_columns(schema: StructType, types: Mapping[str, DataType]) -> None:
    """Check a schema, which the user may have given; it may have any of the columns, in any order.

    Raises:
        UsageError: A column does not exist, or has another type.
    """
    for field in schema.fields:
        kind = types.get(field.name)
        if kind is None:
            raise UsageError(f"the schema has a column {field.name!r:.100}; there are {', '.join(types)}")
        if kind.simpleString() != field.dataType.simpleString():
            raise UsageError(
                f"the schema has column {field.name} as {field.dataType.simpleString()}; it is {kind.simpleString()}"
            )


def binary_column(buffer: memoryview, starts: Int64s, sizes: Int64s, what: Callable[[int], str]) -> pa.Array:
    """Return pieces of a buffer as a column, copied once.

    Args:
        buffer: Bytes, contiguous.
        starts: Where each piece starts, bytes.
        sizes: The size of each piece, bytes.
        what: Returns the name of a piece, by its index, for errors; such as "an entry of ledger 5".

    Raises:
        UsageError: A piece is larger than ``ROW_BYTES_MAX``.
        pyarrow.ArrowInvalid: The pieces have 2 GiB or more in total.
    """
    largest = int(sizes.max(initial=0))
    if largest > ROW_BYTES_MAX:
        raise UsageError(
            f"{what(int(sizes.argmax()))} has {largest} bytes, and a row of Spark takes {ROW_BYTES_MAX}: read it with "
            "the library, and leave its column out here by .schema(...)"
        )
    return binary_array(buffer, starts, sizes).cast(pa.binary())  # Spark does not support large_binary


class ArrowRows:
    """Makes the batches of a schema.

    Args:
        schema: The columns wanted.

    Attributes:
        names: The names of the columns.
    """

    def __init__(self, schema: StructType) -> None:
        self._schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
        self.names: Final = frozenset(schema.names)

    def batch(self, column: Callable[[pa.Field], pa.Array]) -> pa.RecordBatch:
        """Return rows, of which a function makes each column."""
        return pa.RecordBatch.from_arrays([column(field) for field in self._schema], schema=self._schema)


def numbered_rows(other_bytes: int = 0) -> int:
    """Return the rows of a batch that has nothing of entries but their numbers.

    Args:
        other_bytes: The bytes of a row that it has of something else, such as its ledger.
    """
    return max(1, NUMBERED_ROWS * NUMBER_BYTES // max(NUMBER_BYTES, other_bytes))


def number_ranges(first: int, last: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of numbers from ``first`` to ``last``, both inclusive, of at most ``rows`` each."""
    for low in range(first, last + 1, rows):
        yield low, min(last, low + rows - 1)


def repeated(value: Any, kind: pa.DataType, count: int) -> pa.Array:
    """Return a column that has the same value in each row."""
    one = scalar(value, kind) if isinstance(value, int | str) else pa.scalar(value, kind)
    return pa.repeat(one, count)


def scalar(value: int | str | None, kind: pa.DataType) -> pa.Scalar:
    """Return a value of Arrow, without pandas, which ``pyarrow.scalar`` imports as ``pyarrow.array`` does."""
    if value is None:
        return pa.nulls(1, kind)[0]
    if isinstance(value, int):
        return plain_array(np.array([value], np.int64)).cast(kind)[0]
    data = value.encode()
    offsets = pa.py_buffer(np.array([0, len(data)], np.int32))
    return pa.Array.from_buffers(kind, 1, [None, offsets, pa.py_buffer(data)])[0]
