"""The reader of batch queries of logs: ``spark.read.format("pybk").option("subscribe", "orders")``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pybk.spark.log_source.log_catalog import LogCatalog
from pybk.spark.log_source.log_columns import check_schema
from pybk.spark.log_source.log_positions import LogPositions, tasks_of
from pybk.spark.log_source.log_reading import LogPartition, RecordRange, read_records
from pybk.spark.source.planning import SizedRange
from pybk.spark.worker_errors import one_line_errors, with_one_line_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.spark.log_source.log_options import LogOptions


class LogBatchReader(DataSourceReader):
    """Reads the records that the options select; an open log up to the last record at the time of planning."""

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        check_schema(options, schema)
        self._options = options
        self._schema = schema

    @one_line_errors()
    def partitions(self) -> list[InputPartition]:
        """Return the partitions, one per task.

        Raises:
            NoSuchLogError: A log does not exist, and ``allow_missing`` is not set.
            UnauthorizedError: The password or secret is not that of a log.
            PybkError: As ``LogPositions``.
        """
        return [LogPartition(ranges) for ranges in tasks_of(self._options, self._parts())] or [LogPartition(())]

    def _parts(self) -> Iterator[SizedRange[RecordRange]]:
        catalog = LogCatalog(self._options)
        catalog.check_names()
        states = catalog.look()
        bounds = LogPositions(self._options, catalog).bounds(states)
        for name, state in sorted(states.items()):
            first, end = bounds[name]
            wanted = RecordRange(name, state.record.uid, state.record.generation, first, end - 1)
            yield from catalog.view(name).parts(state, wanted)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the Arrow batches of one partition."""
        assert isinstance(partition, LogPartition)
        return with_one_line_errors(read_records(self._options, self._schema, partition.record_ranges))
