"""The module by which Spark finds ``format("pybk")``; imported in every session, so it imports little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pybk.spark.sink.writer import BatchWriter, StreamWriter
    from pybk.spark.source.batch_reader import BatchReader
    from pybk.spark.source.stream import StreamReader

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """Ledgers as a data source of Spark; ``docs/howto/spark.md`` has its options and columns."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "pybk"

    def schema(self) -> StructType:
        """Return the columns that the options ask for; raises UsageError if options cannot be."""
        from pybk.spark.options import source_options
        from pybk.spark.source.columns import schema_of

        return schema_of(source_options(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader of a batch query."""
        from pybk.spark.options import source_options
        from pybk.spark.source.batch_reader import new_reader

        return new_reader(source_options(self.options, streaming=False), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        """Return the reader of a streaming query."""
        from pybk.spark.options import source_options
        from pybk.spark.source.stream import StreamReader

        return StreamReader(source_options(self.options, streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        """Return the writer of ``df.write``."""
        from pybk.spark.options import sink_options
        from pybk.spark.sink.writer import BatchWriter

        return BatchWriter(sink_options(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        """Return the writer of ``df.writeStream``."""
        from pybk.spark.options import sink_options
        from pybk.spark.sink.writer import StreamWriter

        return StreamWriter(sink_options(self.options, streaming=True), schema, overwrite)
