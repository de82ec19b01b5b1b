"""Writes to logs without Spark: the calls that Spark makes of a writer, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.connection import connection
from pybk.spark.log_sink.log_sink_options import log_sink_options
from pybk.spark.log_sink.log_writers import LogBatchWriter, LogStreamWriter
from pybk.streams.log import Log
from pybk.streams.log_record import LogRecord
from tests.spark.log_source.logs import PASSWORD, password_file
from tests.spark.secret_files import cluster_options

VALUES = StructType().add("value", "binary")
TO_LOGS = StructType().add("topic", "string").add("value", "binary")

LARGE = 100 << 10
"""Bytes of a row, three of which are too many for a message."""


class Place:
    """A cluster with logs, of one bookie.

    Attributes:
        url: That of its metadata.
        options_of_reads: The options by which a read finds it.
        options: Those by which a write does, with one copy of each entry.
    """

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.options_of_reads = {**cluster_options(url), "passwordFile": password_file(directory)}
        self.options = {
            **self.options_of_reads,
            **dict.fromkeys(("ensembleSize", "writeQuorum", "ackQuorum"), "1"),
        }

    @property
    def manager(self) -> LedgerManager:
        """The client of this process, which writes in it use, too."""
        return connection(log_sink_options({**self.options, "topic": "any"}, streaming=True).where).manager

    def open(self, name: str = "orders", *, create: bool = False) -> Log:
        """Open a log."""
        return Log.open(self.manager, name, password=PASSWORD, create=create, quorums=(1, 1, 1))

    def create(self, *names: str) -> None:
        """Create logs."""
        for name in names:
            self.open(name, create=True).close()

    def records(self, name: str = "orders") -> list[LogRecord]:
        """Return the records of a log, whose numbers are dense."""
        with self.open(name) as log, log.reader() as reader:
            found = list(reader)
        assert [each.seq for each in found] == list(range(len(found)))
        return found

    def data(self, name: str = "orders") -> list[bytes]:
        """Return the data of the records of a log."""
        return [each.data for each in self.records(name)]

    def ledgers(self) -> set[int]:
        """Return all ledgers of logs."""
        return set(self.manager.list_ledgers("log"))

    def listed(self, *names: str) -> set[int]:
        """Return the ledgers that logs list."""
        found: set[int] = set()
        for name in names or ("orders",):
            with self.open(name) as log:
                found |= {each.ledger_id for each in log.segments()}
        return found


_serializer: Any = CloudPickleSerializer


def pickled(value: object) -> bytes:
    """Return a value as Spark sends it to another process."""
    found: bytes = _serializer().dumps(value)
    return found


def sent(value: object) -> Any:
    """Return a value as it comes out of another process."""
    return _serializer().loads(pickled(value))


def rows(schema: StructType, *values: Any) -> pa.RecordBatch:
    """Return rows; a value that is no tuple is the one of its row."""
    arrow = to_arrow_schema(schema, timezone="UTC")
    given = [value if isinstance(value, tuple) else (value,) for value in values]
    columns = [pa.array(column, field.type) for column, field in zip(zip(*given), arrow, strict=True)]  # noqa: B905
    return pa.RecordBatch.from_arrays(columns, schema=arrow)


class Stream:
    """A streaming query; each call is made of a writer of its own, as Spark does.

    Attributes:
        attempts: The number of task attempts.
    """

    def __init__(self, place: Place, schema: StructType = VALUES, *, query: str = "query", **options: Any) -> None:
        given = {**place.options, **{name: str(value) for name, value in options.items()}}
        topic = {} if "topic" in schema.names else {"topic": "orders"}
        self._options = log_sink_options({**topic, **given}, streaming=True)
        self._schema = schema
        self._query = query
        self.attempts = 0

    def writer(self) -> LogStreamWriter:
        """Return a writer."""
        return sent(LogStreamWriter(self._options, self._schema, overwrite=False))  # type: ignore[no-any-return]

    def write(self, number: int, *tasks: Sequence[Any]) -> list[Any]:
        """Run the tasks of a micro-batch, each with its rows; return their messages."""
        writer = self.writer()
        context = TaskContext._getOrCreate()
        context._localProperties = {
            "sql.streaming.queryId": self._query,
            "spark.jobGroup.id": "run",
            "streaming.sql.batchId": str(number),
        }
        return [self._task(writer, partition, values) for partition, values in enumerate(tasks)]

    def _task(self, writer: LogStreamWriter, partition: int, values: Sequence[Any]) -> Any:
        self.attempts += 1
        context = TaskContext._getOrCreate()
        context._partitionId, context._taskAttemptId = partition, self.attempts
        batches = [rows(self._schema, *values[at : at + 2]) for at in range(0, len(values), 2)]
        return sent(writer.write(iter(batches)))

    def commit(self, number: int, messages: list[Any]) -> None:
        """Commit a micro-batch."""
        self.writer().commit(messages, number)

    def abort(self, number: int, messages: list[Any]) -> None:
        """Abort a micro-batch."""
        self.writer().abort(messages, number)

    def batch(self, number: int, *tasks: Sequence[Any]) -> None:
        """Run a micro-batch."""
        self.commit(number, self.write(number, *tasks))


def write_batch(place: Place, *tasks: Sequence[Any], schema: StructType = VALUES, **options: Any) -> None:
    """Run a batch write."""
    given = {"topic": "orders", **place.options, **{name: str(value) for name, value in options.items()}}
    writer = sent(LogBatchWriter(log_sink_options(given, streaming=False), schema, overwrite=False))
    context = TaskContext._getOrCreate()
    context._localProperties = {}
    messages = []
    for partition, values in enumerate(tasks):
        context._partitionId, context._taskAttemptId = partition, partition
        messages.append(sent(writer.write(iter([rows(schema, *values)] if values else []))))
    writer.commit(messages)
