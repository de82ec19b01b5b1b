"""The writers of records to logs, as Spark calls them: ``df.write`` and ``df.writeStream`` with a topic.

Spark sends a writer to the tasks, and calls ``commit`` or ``abort`` in the driver with the messages of the tasks, one
successful attempt per partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from pybk.errors import IllegalOperationError
from pybk.spark.connection import connection
from pybk.spark.log_sink.adoption import Commit, LogCommitMessage, abort_in_logs, commit_in_logs, query_of
from pybk.spark.log_sink.new_records import RecordColumns, TaskRows, columns_of
from pybk.spark.log_sink.open_logs import open_log, refuse_live_writer, refuse_sealed
from pybk.spark.log_sink.task_segments import LogPart, Task, write_rows
from pybk.spark.new_tables import refuse_new_table
from pybk.spark.sink.sink_record import one_off_app_id
from pybk.spark.sink.task_messages import Messages, all_received, micro_batch, received
from pybk.spark.worker_errors import one_line_errors
from pybk.spark.worker_process import worker_module

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.spark.log_sink.log_sink_options import LogSinkOptions

REMEMBER_SECONDS: Final = 3600.0
"""The seconds for which a log remembers a batch write with a name of its own, which is not repeated later."""

COMMITTING: Final = "pyspark.sql.worker.python_streaming_sink_runner"
"""The module that Spark runs to commit a micro-batch, for which it makes another writer.

Spark makes both writers alike, with the same arguments, and calls nothing else of a source for one of them alone. So
the module is all that shows which of them this is. If Spark renamed it, a commit would check the log once more, and
wait no longer for the end of a live writer than the planner does.
"""

logger = logging.getLogger(__name__)


def _checked_columns(options: LogSinkOptions, schema: StructType, overwrite: bool) -> RecordColumns:
    """Return the columns of a write once they are checked.

    Raises:
        IllegalOperationError: The write would overwrite records.
        UsageError: The columns are not those of records.
    """
    if overwrite:
        raise IllegalOperationError(
            'logs are only appended to: write with mode("append"), a stream with outputMode("append"), and drop '
            "records that are not wanted any more with Log.truncate"
        )
    return columns_of(schema, options.topic)


def _check_log(options: LogSinkOptions) -> None:
    """Check the log of a write before the first task, if an option names it.

    Raises:
        NoSuchLogError: The log does not exist.
        LogSealedError: The log was sealed.
        LogLockedError: The log has a live writer.
    """
    if options.topic is not None:
        with open_log(options, connection(options.where).manager, options.topic) as log:
            refuse_sealed(log)
            refuse_live_writer(log)


def _write(
    options: LogSinkOptions, columns: RecordColumns, query: str, epoch: int, batches: Iterator[pa.RecordBatch]
) -> tuple[int, tuple[LogPart, ...]]:
    """Write the rows of this task; return its number, and what it wrote to each log."""
    context = TaskContext.get()
    if context is None:
        raise IllegalOperationError("rows are written by tasks of Spark, and this is not one")
    task = Task(query, epoch, context.partitionId(), context.taskAttemptId())
    of_task = TaskRows(columns, options.topic, task.partition)
    return task.partition, write_rows(options, task, of_task, batches)


class LogBatchWriter(DataSourceArrowWriter):
    """Writes the rows of ``df.write`` to logs, in each log all or none.

    Args:
        options: The checked options.
        schema: The schema of the rows.
        overwrite: Whether Spark should replace existing rows, which is refused.
    """

    def __init__(self, options: LogSinkOptions, schema: StructType, overwrite: bool) -> None:
        self._options = options
        self._columns = _checked_columns(options, schema, overwrite)
        _check_log(options)
        self._commit = (
            Commit(one_off_app_id(), 0, is_stream=False, remember_s=REMEMBER_SECONDS)
            if options.txn_app_id is None
            else Commit(options.txn_app_id, options.txn_version or 0, is_stream=False)
        )

    @one_line_errors()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task attempt."""
        refuse_new_table()
        return LogCommitMessage(*_write(self._options, self._columns, self._commit.query, self._commit.epoch, iterator))

    @one_line_errors()
    def commit(self, messages: Messages) -> None:
        """Commit what the tasks wrote, in logs that have not this version or a later one."""
        skipped = commit_in_logs(self._options, self._commit, all_received(messages, LogCommitMessage))
        if skipped:
            logger.warning(
                "write %d of %r is skipped in %s, and its rows are not written, as that version or a later one was "
                "made before; if this is another write, give another txnAppId",
                self._commit.epoch,
                self._commit.query,
                ", ".join(skipped),
            )

    @one_line_errors()
    def abort(self, messages: Messages) -> None:
        """Delete what tasks wrote, unless it is committed nevertheless."""
        abort_in_logs(self._options, self._commit, received(messages, LogCommitMessage))


class LogStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches to logs, each once in each log, even if Spark repeats some.

    Arguments are as for ``LogBatchWriter``.
    """

    def __init__(self, options: LogSinkOptions, schema: StructType, overwrite: bool) -> None:
        self._options = options
        self._columns = _checked_columns(options, schema, overwrite)
        if worker_module() != COMMITTING:
            _check_log(options)

    @one_line_errors()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task attempt."""
        batch = micro_batch()
        query = query_of(self._options.app_id, batch.query)
        return LogCommitMessage(*_write(self._options, self._columns, query, batch.number, iterator), batch.query)

    @one_line_errors()
    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803  # Spark's name
        """Commit a micro-batch, in logs that have it not."""
        found = all_received(messages, LogCommitMessage)
        commit = self._of(found, batchId)
        skipped = commit_in_logs(self._options, commit, found)
        if skipped:
            logger.info("batch %d of %r was committed in %s before", batchId, commit.query, ", ".join(skipped))

    @one_line_errors()
    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803  # Spark's name
        """Delete what tasks wrote, unless it is committed nevertheless."""
        found = received(messages, LogCommitMessage)
        if found:
            abort_in_logs(self._options, self._of(found, batchId), found)

    def _of(self, messages: list[LogCommitMessage], number: int) -> Commit:
        app_id = self._options.app_id
        return Commit(query_of(app_id, messages[0].query), number, is_stream=True, app_id=app_id)
