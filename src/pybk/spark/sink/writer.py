"""Writers of rows as entries: one new ledger per task attempt, committed together by one compare-and-set.

Spark sends a writer to the tasks, and calls ``commit`` or ``abort`` in the driver with the messages of the tasks, one
successful attempt per partition. Ledgers of other attempts and of stopped processes are orphans, which no manifest
names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, StringType, StructType

from pybk.credentials import Credentials
from pybk.errors import IllegalOperationError, LedgerRecoveryError, PybkError, UsageError
from pybk.spark.connection import connection, task_connection
from pybk.spark.new_tables import refuse_new_table
from pybk.spark.sink.byte_columns import bytes_of
from pybk.spark.sink.manifest import SINK_KEY, Sink, WrittenLedger
from pybk.spark.sink.sink_record import Attempt, is_one_off, one_off_app_id
from pybk.spark.sink.sink_retention import SinkRetention
from pybk.spark.sink.task_messages import Messages, all_received, micro_batch, received
from pybk.spark.sink.upkeep import look_after_one_offs, retain_sometimes
from pybk.spark.worker_errors import one_line_errors

if TYPE_CHECKING:
    import pyarrow as pa

    from pybk.manager.ledger_manager import LedgerManager
    from pybk.manager.ledger_writer import LedgerWriter
    from pybk.spark.options import SinkOptions

PAYLOAD_NAMES: Final = ("payload", "value")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LedgerCommitMessage(WriterCommitMessage):
    """A task's message to the driver.

    Attributes:
        written: The ledger of the task; None if it had no rows.
        query: The streaming query; empty in a batch write.
        run: The run of the query; empty in a batch write.
    """

    written: WrittenLedger | None
    query: str = ""
    run: str = ""


def check_schema(schema: StructType) -> None:
    """Check that rows have a payload column and no other.

    Raises:
        UsageError: The schema has other columns.
    """
    names = ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in schema) or "no columns"
    if len(schema) != 1 or schema[0].name.lower() not in PAYLOAD_NAMES:
        raise UsageError(
            f"the rows have {names:.400}; an entry is made of one column, payload or value: choose or make it, such as "
            "df.selectExpr('to_json(struct(*)) AS payload'); to write records of a log, with keys and headers, give "
            "option topic, its name"
        )
    if not isinstance(schema[0].dataType, BinaryType | StringType):
        raise UsageError(f"the rows have {names}; a payload is binary or string: cast it, or use to_json or to_avro")


def refuse_overwrite(overwrite: bool) -> None:
    """Refuse to overwrite rows.

    Raises:
        IllegalOperationError: ``overwrite`` is true.
    """
    if overwrite:
        raise IllegalOperationError(
            'ledgers are only added to: write with mode("append"), a stream with outputMode("append"), and delete '
            "ledgers that are not wanted any more with LedgerManager.delete_ledger"
        )


def payload_list(batch: pa.RecordBatch) -> list[bytes]:
    """Return the payloads of rows.

    Raises:
        UsageError: A payload is null.
    """
    column = batch.column(0)
    if column.null_count:
        raise UsageError(f"{column.null_count} of {len(column)} rows have a null payload; filter them, or use coalesce")
    return bytes_of(column)


def write_ledger(options: SinkOptions, app_id: str, batches: Iterator[pa.RecordBatch]) -> WrittenLedger | None:
    """Write rows to a new ledger and close it.

    Args:
        options: The options of the write.
        app_id: The app id of the sink.
        batches: The rows.

    Returns:
        The ledger; None if there are no rows.

    Raises:
        PybkError: Creating, appending or closing failed; the ledger is deleted if that is possible.

    Durability: All entries are durable on return, and the ledger is closed.
    """
    manager = task_connection(options.where).manager
    given = options.given.read()
    writer: LedgerWriter | None = None
    pending = None
    try:
        for batch in batches:
            if batch.num_rows:
                writer = writer or _new_ledger(manager, options, app_id, given)
                pending = writer.append_many_async(payload_list(batch))
        if writer is None or pending is None:
            return None
        entries = pending.result().stop
        writer.close()
        if writer.last_add_confirmed != entries - 1:
            raise LedgerRecoveryError(
                f"ledger {writer.ledger_id} was closed at entry {writer.last_add_confirmed} after {entries} appends"
            )
    except BaseException:
        if writer is not None:
            with suppress(PybkError):  # the ledger stays an orphan, which readers skip and a collection deletes
                manager.delete_ledger(writer.ledger_id, password=given.password, secret=given.secret)
        raise
    return WrittenLedger(writer.ledger_id, entries, writer.length, writer.metadata.creation_time_ns)


def _new_ledger(manager: LedgerManager, options: SinkOptions, app_id: str, given: Credentials) -> LedgerWriter:
    return manager.create_ledger(
        password=given.password,
        secret=given.secret,
        ledger_type=options.ledger_type,
        storage_hints=options.storage_hints,
        digest_type=options.digest_type,
        insecure=options.insecure,
        custom_metadata={SINK_KEY: app_id.encode()},
        ensemble_size=options.ensemble_size,
        write_quorum=options.write_quorum,
        ack_quorum=options.ack_quorum,
    )


def sink_of(options: SinkOptions, app_id: str) -> Sink:
    """Return the sink of an app id, over this process's connection."""
    found = connection(options.where)
    if found.metadata is None:
        raise UsageError(f"{options.where} is not a cluster; give metadataUri")
    return Sink(
        found.manager,
        found.metadata,
        app_id,
        given=options.given.read(),
        quorums=(options.ensemble_size, options.write_quorum, options.ack_quorum),
    )


def _ledgers(found: list[LedgerCommitMessage]) -> list[WrittenLedger]:
    return [message.written for message in found if message.written is not None]


def _retention_of(options: SinkOptions) -> SinkRetention:
    return SinkRetention(
        max_age_s=options.retain_age_s,
        max_bytes=options.retain_bytes,
        keep_read=options.retain_read,
        keep_unread=options.retain_unread,
    )


def _commit(options: SinkOptions, app_id: str, number: int, found: list[LedgerCommitMessage]) -> bool:
    """Commit the ledgers of all tasks, and delete what is to go now; return False if the number was committed."""
    written, sink = _ledgers(found), sink_of(options, app_id)
    oldest_ns = min((each.created_ns for each in written), default=time.time_ns())
    if not sink.commit(Attempt(number, oldest_ns, found[0].query, found[0].run), written):
        return False
    if is_one_off(app_id):
        look_after_one_offs(connection(options.where), options.given.read(), app_id)
    else:
        retain_sometimes(sink, _retention_of(options), added=len(written))
    return True


class BatchWriter(DataSourceArrowWriter):
    """Writes the rows of ``df.write``, all or none.

    Args:
        options: The checked options.
        schema: The schema of the rows.
        overwrite: Whether Spark should replace existing rows, which is refused.
    """

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        refuse_overwrite(overwrite)
        check_schema(schema)
        self._options = options
        self._app_id = options.txn_app_id or one_off_app_id()

    @one_line_errors()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task attempt."""
        refuse_new_table()
        return LedgerCommitMessage(write_ledger(self._options, self._app_id, iterator))

    @one_line_errors()
    def commit(self, messages: Messages) -> None:
        """Commit the ledgers of all tasks, or delete them if this version or a later one was committed before."""
        number = self._options.txn_version or 0
        if not _commit(self._options, self._app_id, number, all_received(messages, LedgerCommitMessage)):
            logger.warning(
                "write %d of %r is skipped, and its rows are not written, as that version or a later one was made "
                "before; if this is another write, give another txnAppId",
                number,
                self._app_id,
            )

    @one_line_errors()
    def abort(self, messages: Messages) -> None:
        """Delete the ledgers that tasks wrote, unless they are committed nevertheless."""
        written = _ledgers(received(messages, LedgerCommitMessage))
        sink_of(self._options, self._app_id).abort([each.ledger_id for each in written])


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches, each exactly once, even if Spark repeats some; arguments as for ``BatchWriter``."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        refuse_overwrite(overwrite)
        check_schema(schema)
        self._options = options

    @one_line_errors()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of one task attempt."""
        batch = micro_batch()
        written = write_ledger(self._options, self._options.app_id or batch.query, iterator)
        return LedgerCommitMessage(written, batch.query, batch.run)

    @one_line_errors()
    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803  # Spark's name
        """Commit the ledgers of a micro-batch, or delete them if the micro-batch was committed before."""
        found = all_received(messages, LedgerCommitMessage)
        app_id = self._options.app_id or found[0].query
        if not _commit(self._options, app_id, batchId, found):
            logger.info("batch %d of %r was committed before; it is skipped", batchId, app_id)

    @one_line_errors()
    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803  # Spark's name
        """Delete the ledgers that tasks wrote, unless they are committed nevertheless."""
        found = received(messages, LedgerCommitMessage)
        if found:
            sink = sink_of(self._options, self._options.app_id or found[0].query)
            sink.abort([each.ledger_id for each in _ledgers(found)])
