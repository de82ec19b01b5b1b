"""Reading of the records of logs as Arrow batches in a task."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from pybk.errors import EntryUnknownError, NoSuchLogError, PybkError, RewoundError, TruncatedError
from pybk.spark.connection import task_connection
from pybk.spark.log_source.log_columns import LogColumns
from pybk.spark.source.reading import LATE_SECONDS
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind
from pybk.streams.log_settings import LedgerSpec
from pybk.streams.record_reader import RecordReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.spark.log_source.log_options import LogOptions
    from pybk.streams.format import Records

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Consecutive records of one log.

    Attributes:
        log: The log's name.
        uid: The log's uid: one that is made again under the name is another.
        generation: The generation of the log when the read was planned.
        first: The first record.
        last: The last record.
    """

    log: str
    uid: bytes
    generation: int
    first: int
    last: int

    def __len__(self) -> int:
        """Return the number of records."""
        return self.last + 1 - self.first

    def part(self, first: int, last: int) -> RecordRange:
        """Return the records from ``first`` to ``last``, which are among these."""
        return replace(self, first=first, last=last)


@dataclass(frozen=True)
class LogPartition(InputPartition):
    """The records that one task reads.

    Attributes:
        record_ranges: The records, in order.
    """

    record_ranges: tuple[RecordRange, ...]


def joined(ranges: Iterable[RecordRange]) -> tuple[RecordRange, ...]:
    """Return ranges of which those that continue one another are one."""
    found: list[RecordRange] = []
    for each in ranges:
        if found and replace(found[-1], first=each.first, last=each.last) == each and found[-1].last + 1 == each.first:
            found[-1] = found[-1].part(found[-1].first, each.last)
        else:
            found.append(each)
    return tuple(found)


def add_remedy(error: PybkError) -> None:
    """Add the option that reads without lost records to the text of their error."""
    error.args = (f"{error}; option failOnDataLoss=false leaves out records that are gone",)


def read_records(options: LogOptions, schema: StructType, ranges: Iterable[RecordRange]) -> Iterator[pa.RecordBatch]:
    """Read and verify records; those of which only columns are wanted that are known without that are not read.

    Args:
        options: The options of the read.
        schema: The columns to return.
        ranges: The records, in order; the planner saw all of them.

    Returns:
        Batches of about ``options.batch_bytes``, in order.

    Raises:
        NoSuchLogError: A log was deleted, and ``fail_on_data_loss`` is set.
        TruncatedError: A record was truncated, and ``fail_on_data_loss`` is set. RewoundError, if it was cut off the
            end of a write-ahead log.
        DigestMismatchError, CorruptError: An entry differs from the one that was written, or a record is missing.
        EntryUnknownError: The bookies that have a record do not answer.
        UnauthorizedError: The password is not that of a log.
    """
    manager = task_connection(options.where).manager
    spec = LedgerSpec(ledger_type=options.kind, given=options.given.read(), insecure=True)
    for record_range in ranges:
        steps = LedgerSteps(manager, record_range.log, spec)
        steps.uid = record_range.uid
        columns = LogColumns(schema, record_range.log)
        left = record_range
        while left.first <= left.last:
            try:
                if not columns.of_records:
                    _check_there(steps, left)
                    yield from columns.numbered(left.first, left.last)
                    break
                for records in _records(steps, left, options.batch_bytes):
                    yield columns.batch(records)
                    left = left.part(records.first_seq + len(records.starts), left.last)
            except (TruncatedError, NoSuchLogError) as error:  # RewoundError is one of the first
                if options.fail_on_data_loss:
                    add_remedy(error)
                    raise
                logger.warning("%s; records that are gone are left out", error)
                left = _after(left, error)


def _after(left: RecordRange, error: PybkError) -> RecordRange:
    """Return the records of a range that an error leaves; perhaps none."""
    if isinstance(error, RewoundError):
        return left.part(left.first, min(left.last, error.seq))
    if isinstance(error, TruncatedError) and error.first_seq > left.first:
        return left.part(min(error.first_seq, left.last + 1), left.last)
    return left.part(left.last + 1, left.last)


def _records(steps: LedgerSteps, wanted: RecordRange, batch_bytes: int) -> Iterator[Records]:
    """Yield the records of a range."""
    _check_kept(steps, wanted)
    reader = RecordReader(steps, wanted.first, wanted.generation, read_bytes=batch_bytes)
    try:
        while reader.seq <= wanted.last:
            records = reader.read(timeout=LATE_SECONDS, last=wanted.last)
            if records is None:
                raise EntryUnknownError(
                    f"{steps.title} had records up to {wanted.last} when this was planned, and {LATE_SECONDS:.0f} s "
                    f"later the bookies that answer know of those before {reader.seq}; start the missing bookies"
                )
            yield records
    finally:
        reader.close()
    _check_kept(steps, wanted)


def _check_there(steps: LedgerSteps, wanted: RecordRange) -> None:
    """Raise the error of a loss if records that are not read were truncated or cut off."""
    _check_kept(steps, wanted)
    first = steps.existing().record.first_seq
    if wanted.first < first:
        raise TruncatedError(
            f"record {wanted.first} of log {wanted.log!r} was truncated; the first one is {first}", first_seq=first
        )


def _check_kept(steps: LedgerSteps, wanted: RecordRange) -> None:
    """Raise RewoundError if the end of a write-ahead log was cut off, and some of the records with it."""
    if steps.spec.kind is not ListKind.WAL:
        return
    kept = steps.existing().record.kept_of(wanted.generation)
    if wanted.last > kept:
        raise RewoundError(f"{steps.title} was cut after record {kept}, before {wanted.last}", seq=kept)
