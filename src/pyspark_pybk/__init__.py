"""The module by which Spark finds ``format("pybk")``; imported in every session, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pybk.spark.log_sink.log_writers import LogBatchWriter, LogStreamWriter
    from pybk.spark.log_source.log_batch import LogBatchReader
    from pybk.spark.log_source.log_stream import LogStreamReader
    from pybk.spark.sink.writer import BatchWriter, StreamWriter
    from pybk.spark.source.batch_reader import BatchReader
    from pybk.spark.source.refused_stream import RefusedStream
    from pybk.spark.source.stream import StreamReader

__all__ = ["DefaultSource"]

P = ParamSpec("P")
R = TypeVar("R")


def _with_one_line_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Return a method whose errors Spark shows as one line."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        from pybk.spark.worker_errors import one_line_errors

        with one_line_errors():
            return call(*args, **kwargs)

    return called


class DefaultSource(DataSource):
    """Logs and ledgers as a data source of Spark; ``docs/howto/spark.md`` has its options and columns."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "pybk"

    @_with_one_line_errors
    def schema(self) -> StructType:
        """Return the columns that the options ask for.

        Raises:
            UsageError: Options are not valid.
            NoSuchLogError: A log does not exist.
            NoSuchLedgerError: A ledger does not exist, or no ledger has the selected type.
        """
        if self._selects_logs():
            from pybk.spark.log_source.log_catalog import LogCatalog
            from pybk.spark.log_source.log_columns import columns_of
            from pybk.spark.log_source.log_options import log_options

            options = log_options(self.options)
            LogCatalog(options).check_names()
            return columns_of(options)
        from pybk.spark.options import source_options
        from pybk.spark.source.columns import schema_of
        from pybk.spark.source.ledger_catalog import LedgerCatalog

        ledgers = source_options(self.options)
        LedgerCatalog(ledgers).check_selection()
        return schema_of(ledgers)

    def _selects_logs(self) -> bool:
        from pybk.spark.options import selects_logs

        return selects_logs(self.options)

    @_with_one_line_errors
    def reader(self, schema: StructType) -> BatchReader | LogBatchReader:
        """Return the reader of a batch query."""
        if self._selects_logs():
            from pybk.spark.log_source.log_batch import LogBatchReader
            from pybk.spark.log_source.log_options import log_options

            return LogBatchReader(log_options(self.options, streaming=False), schema)
        from pybk.spark.options import source_options
        from pybk.spark.source.batch_reader import new_reader

        return new_reader(source_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> StreamReader | LogStreamReader | RefusedStream:  # noqa: N802
        """Return the reader of a streaming query; its first call raises the error if the options are not valid.

        Spark hides an error that is raised here behind one of its own.
        """
        from pybk.errors import PybkError

        try:
            return self._stream_reader(schema)
        except PybkError as error:
            from pybk.spark.source.refused_stream import RefusedStream

            return RefusedStream(error)

    def _stream_reader(self, schema: StructType) -> StreamReader | LogStreamReader:
        if self._selects_logs():
            from pybk.spark.log_source.log_options import log_options
            from pybk.spark.log_source.log_stream import LogStreamReader

            return LogStreamReader(log_options(self.options, streaming=True), schema)
        from pybk.spark.options import source_options
        from pybk.spark.source.stream import StreamReader

        return StreamReader(source_options(self.options, streaming=True), schema)

    @_with_one_line_errors
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter | LogBatchWriter:
        """Return the writer of ``df.write``."""
        if self._writes_logs(schema):
            from pybk.spark.log_sink.log_sink_options import log_sink_options
            from pybk.spark.log_sink.log_writers import LogBatchWriter

            return LogBatchWriter(log_sink_options(self.options, streaming=False), schema, overwrite)
        from pybk.spark.options import sink_options
        from pybk.spark.sink.writer import BatchWriter

        return BatchWriter(sink_options(self.options, streaming=False), schema, overwrite)

    @_with_one_line_errors
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter | LogStreamWriter:  # noqa: N802
        """Return the writer of ``df.writeStream``."""
        if self._writes_logs(schema):
            from pybk.spark.log_sink.log_sink_options import log_sink_options
            from pybk.spark.log_sink.log_writers import LogStreamWriter

            return LogStreamWriter(log_sink_options(self.options, streaming=True), schema, overwrite)
        from pybk.spark.options import sink_options
        from pybk.spark.sink.writer import StreamWriter

        return StreamWriter(sink_options(self.options, streaming=True), schema, overwrite)

    def _writes_logs(self, schema: StructType) -> bool:
        from pybk.spark.options import writes_logs

        return writes_logs(self.options, schema.names)
