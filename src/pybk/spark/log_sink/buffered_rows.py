"""Rows as records that lie in the buffers of Arrow, without an object for each row.

This is how most rows are written. Others become objects (``pybk.spark.log_sink.new_records``): those with headers, and
those of which a log may refuse one, because the objects show which.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pybk.ledger.arrow import plain_array
from pybk.spark.source.arrow_columns import scalar
from pybk.streams.format import KEY_BYTES_MAX, NO_ATTRIBUTES, NO_KEY, NO_VALUE, Int64s, Records, attributes_of_keys
from pybk.values import INT64_MAX

if TYPE_CHECKING:
    import numpy.typing as npt

    from pybk.spark.log_sink.new_records import RecordColumns

_PLAIN: Final = (pa.binary(), pa.string())
_NS_PER_US: Final = 1000


def buffered(columns: RecordColumns, batch: pa.RecordBatch) -> Records | None:
    """Return rows as records, in their order.

    Args:
        columns: The columns of the rows.
        batch: The rows, at least one, without a value that is null.

    Returns:
        The records; None if they have headers, or perhaps a key or a number that no record has.

    Cost: Some 10 ns per row, and a copy of keys and values if there are keys.
    """
    values = batch.column(columns.value)
    keys = None if columns.key is None else batch.column(columns.key)
    if _some(columns.headers, batch) or any(each.type not in _PLAIN for each in (values, keys) if each is not None):
        return None
    times, txids = _times(columns.event_time, batch), _numbers(columns.txid, batch, INT64_MAX)
    attributed: npt.NDArray[np.bool_] | None = None
    if keys is not None and keys.null_count < len(keys):
        values = _after_keys(keys, values)
        attributed = np.ones(len(keys), np.bool_)
    if times is None or txids is None or values is None:
        return None
    starts, ends = _spans(values)
    return Records.new(_data_of(values), starts, ends, times=times, txids=txids, attributed=attributed)


def _some(place: int | None, batch: pa.RecordBatch) -> bool:
    """Return whether rows have a column with a value that is not null."""
    return place is not None and batch.column(place).null_count < batch.num_rows


def _numbers(place: int | None, batch: pa.RecordBatch, most: int) -> Int64s | None:
    """Return the whole numbers of a column, ``NO_VALUE`` for a null; None if one is not within 0 to ``most``."""
    if place is None or not _some(place, batch):
        return np.full(batch.num_rows, NO_VALUE, np.int64)
    column = batch.column(place).cast(pa.int64())
    found = np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)
    if column.null_count:
        found = np.where(_is_there(column), found, NO_VALUE)
    is_sound = np.count_nonzero(found < 0) == column.null_count and int(found.max()) <= most
    return found if is_sound else None


def _times(place: int | None, batch: pa.RecordBatch) -> Int64s | None:
    """Return the event times, nanoseconds since 1970, now for a null; None if a record cannot have one of them."""
    found = _numbers(place, batch, INT64_MAX // _NS_PER_US)
    return None if found is None else np.where(found == NO_VALUE, time.time_ns(), found * _NS_PER_US)


def _after_keys(keys: pa.Array, values: pa.Array) -> pa.Array | None:
    """Return the values, each after its key, as records with keys have them; None if a key is too long."""
    starts, ends = _spans(keys)
    sizes = ends - starts
    if keys.null_count:
        sizes = np.where(_is_there(keys), sizes, 0)
    if int(sizes.max()) > KEY_BYTES_MAX:
        return None
    if keys.null_count:
        sizes = np.where(_is_there(keys), sizes, NO_KEY)
    places = len(NO_ATTRIBUTES) * np.arange(len(keys) + 1, dtype=np.int32)
    heads = [None, pa.py_buffer(places), pa.py_buffer(attributes_of_keys(sizes))]
    return pc.binary_join_element_wise(
        pa.Array.from_buffers(pa.binary(), len(keys), heads),
        keys.cast(pa.binary()),
        values.cast(pa.binary()),
        scalar("", pa.binary()),
        null_handling="replace",
    )


def _is_there(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which values of a column with nulls are not null."""
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(np.bool_)


def _spans(column: pa.Array) -> tuple[Int64s, Int64s]:
    """Return where each value of a column of bytes begins in its buffer, and where it ends."""
    places = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset).astype(np.int64)
    return places[:-1], places[1:]


def _data_of(column: pa.Array) -> memoryview:
    """Return the buffer of a column of bytes."""
    data = column.buffers()[2]
    return memoryview(b"" if data is None else data).cast("B")


def rows_at(batch: pa.RecordBatch, places: Int64s) -> pa.RecordBatch:
    """Return some rows of a batch, by their places, in that order."""
    return batch.take(plain_array(places))
