"""The work of one task: it writes a detached segment for each log, or leaves few records to the commit.

A ledger costs some synced writes and a place in the log, so a task makes none for few records: they go to the driver
with its message, and the commit makes one ledger of those of neighbouring tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import PybkError, UsageError
from pybk.spark.connection import task_connection
from pybk.spark.log_sink.open_logs import open_log, refuse_live_writer
from pybk.streams.detached_writer import (
    DetachedSegment,
    DetachedWriter,
    append_buffered,
    settle,
    waiting_bytes,
)
from pybk.streams.log_writer import NewRecord

if TYPE_CHECKING:
    import pyarrow as pa

    from pybk.spark.log_sink.log_sink_options import LogSinkOptions
    from pybk.spark.log_sink.new_records import Rows, TaskRows
    from pybk.streams.log import Log

FEW_BYTES: Final = 256 << 10
"""The most bytes of a task's records for one log that go to the driver."""

MESSAGE_BYTES: Final = 2 << 20
"""The most bytes of a task's records for all logs that go to the driver, whose memory and Spark's limit of results
(``spark.driver.maxResultSize``) hold those of all tasks of a stage."""

WAITING_BYTES: Final = 64 << 20
"""The most bytes of a task's records for all logs that are not durable yet, besides those of one batch.

Of one log 1 MiB waits until more is appended together, and ``max_outstanding_bytes`` may wait for bookies; a task may
write to thousands of logs.
"""


class Task(NamedTuple):
    """A task of a write.

    Attributes:
        query: The query whose commit adopts what it writes.
        epoch: The number of the commit.
        partition: Its number among the tasks.
        attempt: The number of its attempt.
    """

    query: str
    epoch: int
    partition: int
    attempt: int


class LogPart(NamedTuple):
    """The part of one log that a task wrote: a segment, or records that are not written yet.

    Attributes:
        log: The log.
        segment: The segment; None if there are few records.
        records: The records; none if there is a segment.
    """

    log: str
    segment: DetachedSegment | None
    records: tuple[NewRecord, ...]


class _LogWrite:
    """The part of one log that a task writes.

    Attributes:
        log: The log.
        writer: The segment.
        few: Records that are not in the segment.
        few_bytes: Their bytes.
        segment: The segment, once it is sealed.
    """

    def __init__(self, log: Log, task: Task) -> None:
        self.log = log
        self.writer: DetachedWriter = log.detached_segment(
            query=task.query, epoch=task.epoch, partition=task.partition, attempt=task.attempt
        )
        self.few: list[NewRecord] = []
        self.few_bytes = 0
        self.segment: DetachedSegment | None = None

    def add(self, rows: Rows, of_task: TaskRows) -> None:
        """Take more rows.

        Raises:
            UsageError: The log does not take one of them; the error names it.
        """
        if self.writer.records or self.few_bytes + rows.value_bytes > FEW_BYTES:
            records = rows.buffered()
            if records is not None:
                self.write_few()
                if append_buffered(self.writer, records):
                    return
        if self.writer.records:
            try:
                self.writer.append_many(rows.records)
            except UsageError:
                self._sizes(rows, of_task)  # which names the row
                raise
            return
        self.few_bytes += sum(self._sizes(rows, of_task))
        self.few += rows.records
        if self.few_bytes > FEW_BYTES:
            self.write_few()

    def _sizes(self, rows: Rows, of_task: TaskRows) -> list[int]:
        sizes = []
        for number, record in zip(rows.numbers, rows.records, strict=True):
            try:
                sizes.append(self.writer.size_of(record))
            except UsageError as error:
                raise of_task.error(number, record, error) from error
        return sizes

    def write_few(self) -> None:
        """Write the records to the segment that are not in it."""
        few, self.few, self.few_bytes = self.few, [], 0
        if few:
            self.writer.append_many(few)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of records in the segment that are not durable yet."""
        return waiting_bytes(self.writer)

    def settle(self) -> None:
        """Wait until they are."""
        settle(self.writer)

    def seal(self) -> LogPart:
        """Return what was written, which is durable unless it goes to the driver."""
        if self.writer.records:
            self.segment = self.writer.seal()
        return LogPart(self.log.name, self.segment, tuple(self.few))

    def give_up(self, task: Task) -> None:
        """Delete what was written; what cannot be deleted now is left to a sweep."""
        with suppress(PybkError):
            self.writer.close()
            if self.segment is not None:
                self.log.discard_detached([self.segment], query=task.query, epoch=task.epoch)


def write_rows(
    options: LogSinkOptions, task: Task, of_task: TaskRows, batches: Iterable[pa.RecordBatch]
) -> tuple[LogPart, ...]:
    """Write the rows of one task attempt, in their order for each log.

    Args:
        options: The options of the write.
        task: The task.
        of_task: Makes its rows records.
        batches: The rows.

    Returns:
        What was written to each log.

    Raises:
        UsageError: A row cannot be a record.
        NoSuchLogError: A log does not exist, and the options do not say to create it.
        LogLockedError: A log has a live writer.
        PybkError: Creating, appending or closing failed. The ledgers are deleted if that is possible.

    Durability: Segments are durable and closed on return.
    """
    manager = task_connection(options.where).manager
    writes: dict[str, _LogWrite] = {}
    with ExitStack() as opened:
        try:
            for batch in batches:
                for rows in of_task.of(batch):
                    if rows.log not in writes:
                        log = opened.enter_context(open_log(options, manager, rows.log))
                        refuse_live_writer(log)
                        writes[rows.log] = _LogWrite(log, task)
                    writes[rows.log].add(rows, of_task)
                _limit(writes.values(), MESSAGE_BYTES, attrgetter("few_bytes"), _LogWrite.write_few)
                _limit(writes.values(), WAITING_BYTES, attrgetter("waiting_bytes"), _LogWrite.settle)
            return tuple(each.seal() for each in writes.values())
        except BaseException:
            for each in writes.values():
                each.give_up(task)
            raise


def _limit(
    writes: Iterable[_LogWrite], most: int, size: Callable[[_LogWrite], int], write: Callable[[_LogWrite], None]
) -> None:
    """Write what logs keep, that of the log with the most bytes first, until the others keep few enough.

    Args:
        writes: The logs.
        most: The most bytes that they keep together.
        size: Returns the bytes that a log keeps.
        write: Writes them.
    """
    kept = [(size(each), each) for each in writes]
    total = sum(nbytes for nbytes, _ in kept)
    if total <= most:
        return
    for nbytes, each in sorted(kept, key=itemgetter(0), reverse=True):
        write(each)
        total -= nbytes
        if total <= most:
            return
