"""Rows as records to append: the columns that are taken, and their conversion, a column of a batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import repeat
from typing import Final, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from pybk.errors import UsageError
from pybk.spark.log_sink.buffered_rows import buffered, rows_at
from pybk.spark.options import TOPIC
from pybk.spark.sink.byte_columns import bytes_of
from pybk.streams.format import Headers, Records
from pybk.streams.log_writer import NewRecord

HEADERS: Final = "array<struct<key:string,value:binary>>"
"""The type of the column of headers, as Kafka's sink and source have it."""

_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_NS_PER_US: Final = 1000

_new_record: Final = partial(tuple.__new__, NewRecord)
"""Makes a record faster than the named tuple's own constructor."""


class RecordColumns(NamedTuple):
    """The places of the columns of rows that are written; None for one that the rows do not have.

    Attributes:
        value: The data.
        key: The key.
        headers: The headers.
        event_time: The event time.
        txid: The transaction id.
        topic: The name of the log; None also if an option names it.
        partition: The partition of the topic, of which a log has the first one alone.
    """

    value: int
    key: int | None
    headers: int | None
    event_time: int | None
    txid: int | None
    topic: int | None
    partition: int | None


def columns_of(schema: StructType, topic: str | None) -> RecordColumns:
    """Return the columns of rows that are written to logs; others are left out, as Kafka's sink leaves them out.

    Args:
        schema: The columns of the rows.
        topic: The log that an option names; None if a column does.

    Raises:
        UsageError: A column is missing, is there twice, or has another type.
    """
    found = _Columns(schema)
    value = found.place("value", _BYTES, "binary or string")
    if value is None:
        raise UsageError(
            f"the rows have {found.shown}, and no column value: choose or make it, such as "
            "df.selectExpr('to_json(struct(*)) AS value')"
        )
    of_rows = None if topic is not None else found.place(TOPIC, (StringType,), "string")
    if topic is None and of_rows is None:
        raise UsageError(f"give option topic, the log to write to, or a column topic; the rows have {found.shown}")
    event_time = found.place("event_time", (TimestampType,), "timestamp")
    return RecordColumns(
        value=value,
        key=found.place("key", _BYTES, "binary or string"),
        headers=found.headers(),
        event_time=found.timestamp() if event_time is None else event_time,
        txid=found.place("txid", _WHOLE, "bigint"),
        topic=of_rows,
        partition=found.place("partition", _WHOLE, "int"),
    )


class _Columns:
    """The columns of a schema, by their names in lower case."""

    def __init__(self, schema: StructType) -> None:
        self._fields = list(schema)
        self.shown = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema)[:400]
        """The columns, for errors."""

    def _found(self, name: str) -> int | None:
        places = [place for place, field in enumerate(self._fields) if field.name.lower() == name]
        if len(places) > 1:
            raise UsageError(f"the rows have {self.shown}, and so column {name} more than once; leave one of them")
        return places[0] if places else None

    def place(self, name: str, kinds: tuple[type[DataType], ...], takes: str) -> int | None:
        """Return the place of a column; None if it is not there."""
        place = self._found(name)
        if place is not None and not isinstance(self._fields[place].dataType, kinds):
            raise UsageError(f"column {name} is {self._type(place)}; it takes {takes}: cast it")
        return place

    def headers(self) -> int | None:
        """Return the place of the headers."""
        place = self._found("headers")
        if place is not None and self._type(place).lower() != HEADERS:
            raise UsageError(f"column headers is {self._type(place)}; it takes {HEADERS}")
        return place

    def timestamp(self) -> int | None:
        """Return the place of what a read of a log has as its event time, if it is a time."""
        place = self._found("timestamp")
        return place if place is not None and isinstance(self._fields[place].dataType, TimestampType) else None

    def _type(self, place: int) -> str:
        return self._fields[place].dataType.simpleString()


class Rows:
    """Rows of a task for one log, in their order.

    Args:
        of_task: Makes the rows of the task records.
        log: The log.
        batch: The rows.
        numbers: The number of each row among those of the task, from 1 up.

    Attributes:
        log: As given.
        numbers: As given.
    """

    def __init__(self, of_task: TaskRows, log: str, batch: pa.RecordBatch, numbers: Sequence[int]) -> None:
        self._of_task = of_task
        self._batch = batch
        self.log = log
        self.numbers = numbers

    @property
    def value_bytes(self) -> int:
        """The bytes of the values, about."""
        nbytes: int = self._batch.column(self._of_task.columns.value).nbytes
        return nbytes

    @cached_property
    def records(self) -> list[NewRecord]:
        """The rows as records.

        Raises:
            UsageError: A header is null.
        """
        return self._of_task.records(self._batch, self.numbers)

    def buffered(self) -> Records | None:
        """Return the rows as records that lie in a buffer; None for rows that have to be looked at one by one."""
        return buffered(self._of_task.columns, self._batch)


class TaskRows:
    """Makes the rows of one task records.

    Args:
        columns: The columns of the rows.
        topic: The log that an option names; None if a column does.
        partition: The number of the task.

    Attributes:
        columns: As given.
    """

    def __init__(self, columns: RecordColumns, topic: str | None, partition: int) -> None:
        self.columns = columns
        self._topic = topic
        self._partition = partition
        self._before = 0
        """The number of rows in the batches before."""

    def of(self, batch: pa.RecordBatch) -> list[Rows]:
        """Return the rows of a batch for each log.

        Raises:
            UsageError: A row has no value or no log, or is of another partition than that of a log.
        """
        columns = self.columns
        if not batch.num_rows:
            return []
        numbers = range(self._before + 1, self._before + 1 + batch.num_rows)
        self._check_partition(batch, numbers)
        self._refuse_null(
            columns.value,
            batch,
            numbers,
            "column value is null, and a log has no records without data, such as Kafka's tombstones: filter such rows",
        )
        found = []
        if columns.topic is None:
            assert self._topic is not None
            found.append(Rows(self, self._topic, batch, numbers))
        else:
            self._refuse_null(
                columns.topic, batch, numbers, "column topic is null: name a log in it, or give option topic"
            )
            encoded = batch.column(columns.topic).dictionary_encode()
            codes = encoded.indices.to_numpy()
            for code, name in enumerate(encoded.dictionary.to_pylist()):
                places = np.flatnonzero(codes == code)
                found.append(Rows(self, name, rows_at(batch, places), (places + numbers[0]).tolist()))
        self._before += batch.num_rows
        return found

    def error(self, number: int, record: NewRecord, reason: object) -> UsageError:
        """Return the error of a row that a log does not take."""
        return UsageError(f"{self._named(number, record.key)}: {reason}")

    def _named(self, number: int, key: bytes | None) -> str:
        of_key = "" if key is None else f", with key {key!r:.60}"
        return f"row {number} of partition {self._partition}{of_key}"

    def _refuse(self, row: int, batch: pa.RecordBatch, numbers: Sequence[int], reason: str) -> NoReturn:
        """Raise the error of a row of a batch."""
        key = self.columns.key
        shown = None if key is None else bytes_of(batch.column(key).slice(row, 1))[0]
        raise UsageError(f"{self._named(numbers[row], shown)}: {reason}")

    def _refuse_null(self, place: int, batch: pa.RecordBatch, numbers: Sequence[int], reason: str) -> None:
        column = batch.column(place)
        if column.null_count:
            self._refuse(pc.index(column.is_null(), True).as_py(), batch, numbers, reason)

    def _check_partition(self, batch: pa.RecordBatch, numbers: Sequence[int]) -> None:
        if self.columns.partition is None:
            return
        column = batch.column(self.columns.partition)
        row = pc.index(pc.fill_null(pc.not_equal(column, 0), False), True).as_py()
        if row >= 0:
            self._refuse(
                row,
                batch,
                numbers,
                f"column partition is {column[row]}, and a log is partition 0 of its topic: leave the column out, or "
                "name a log for each partition in column topic",
            )

    def records(self, batch: pa.RecordBatch, numbers: Sequence[int]) -> list[NewRecord]:
        """Return rows as records, given the number of each; raises as ``Rows.records``."""
        columns = self.columns
        rows = zip(  # noqa: B905  # what repeats has no end
            bytes_of(batch.column(columns.value)),
            repeat(None) if columns.txid is None else batch.column(columns.txid).to_pylist(),
            repeat(None) if columns.key is None else bytes_of(batch.column(columns.key)),
            repeat(()) if columns.headers is None else self._headers(batch.column(columns.headers), batch, numbers),
            repeat(None) if columns.event_time is None else _times(batch.column(columns.event_time)),
        )
        return list(map(_new_record, rows))

    def _headers(self, column: pa.Array, batch: pa.RecordBatch, numbers: Sequence[int]) -> list[Headers]:
        """Return the headers of each row; none for a null."""
        counts = pc.fill_null(pc.list_value_length(column), 0)
        pairs = column.flatten()  # without those that a null hides
        names, values = pairs.field(0), pairs.field(1)
        for part, what in ((pairs, "header"), (names, "name of a header"), (values, "value of a header")):
            if part.null_count:
                ends = np.cumsum(counts.to_numpy())
                row = int(np.searchsorted(ends, pc.index(part.is_null(), True).as_py(), side="right"))
                self._refuse(row, batch, numbers, f"column headers has a null as a {what}: filter or replace it")
        every = list(zip(names.to_pylist(), bytes_of(values), strict=True))
        found: list[Headers] = []
        at = 0
        for count in counts.to_pylist():
            found.append(tuple(every[at : at + count]))
            at += count
        return found


def _times(column: pa.Array) -> list[int | None]:
    """Return times in nanoseconds since 1970."""
    return [None if each is None else each * _NS_PER_US for each in column.cast(pa.int64()).to_pylist()]
