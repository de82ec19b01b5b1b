"""The reader of batch queries: ``spark.read.format("pybk")``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pybk.spark import source
from pybk.spark.source.columns import check_schema, needs_entries
from pybk.spark.source.filters import EVERY, push
from pybk.spark.source.planning import (
    NUMBER_BYTES,
    EntryRange,
    ReadableLedger,
    SizedRange,
    by_place,
    first_entries,
    intersect,
    split_into_tasks,
)
from pybk.spark.source.reading import LedgerPartition, lost_ledgers_error, read_ranges
from pybk.spark.worker_errors import one_line_errors, with_one_line_errors
from pybk.spark.worker_process import worker_module

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.spark.options import Ranges, SourceOptions

PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"


def new_reader(options: SourceOptions, schema: StructType) -> BatchReader:
    """Return a reader; one with filter pushdown if Spark's setting for it is on.

    Spark refuses a reader with pushdown if the setting is off, but the setting cannot be read here. So it is inferred
    from the name of the module that Spark runs for planning.
    """
    check_schema(schema)
    return PushdownReader(options, schema) if worker_module() == PUSHING else BatchReader(options, schema)


class BatchReader(DataSourceReader):
    """Reads the entries that the options select.

    Open ledgers are read up to their last add confirmed at the time of planning; they are not recovered.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._reads_entries = needs_entries(schema)
        self._ledgers: Ranges = EVERY
        self._entries: Ranges = EVERY

    @one_line_errors()
    def partitions(self) -> list[InputPartition]:
        """Return the partitions, one per task; raises as ``ranges``."""
        tasks = split_into_tasks(self.ranges(), self._options.entries_per_partition)
        return [LedgerPartition(entry_ranges) for entry_ranges in tasks] or [LedgerPartition(())]

    def ranges(self) -> list[SizedRange[EntryRange]]:
        """Return the ranges of entries to read now, in order.

        Raises:
            NoSuchLedgerError: A ledger that is selected by its id, or that positions name, does not exist, and
                ``fail_on_data_loss`` is set; or no ledger has the selected type.
            UsageError: Positions name a ledger that is not selected, or a ledger is a segment of a log.
            UnauthorizedError: The password is wrong.
        """
        options = self._options
        catalog = source.LedgerCatalog(options, self._ledgers)
        found = catalog.look()
        catalog.check_type()
        lost = [*catalog.missing, *catalog.absent(options.starting, options.ending)]
        if lost and options.fail_on_data_loss:
            raise lost_ledgers_error(sorted({*lost}))
        ranges = by_place(part for readable in found.values() for part in self._parts(readable))
        return list(first_entries(ranges, options.max_entries))

    def _parts(self, readable: ReadableLedger) -> Iterator[SizedRange[EntryRange]]:
        """Yield the ranges to read of a ledger."""
        options, ledger_id = self._options, readable.ledger_id
        entry_bytes = readable.entry_bytes if self._reads_entries else NUMBER_BYTES
        first = max(options.start_entry, options.starting.entries.get(ledger_id, 0))
        last = readable.end - 1
        for bound in (options.end_entry, options.ending.entries.get(ledger_id)):
            last = last if bound is None else min(last, bound)
        if first <= last:
            for low, high in intersect(((first, last),), self._entries):
                yield SizedRange(EntryRange(ledger_id, low, high, readable.place), entry_bytes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the Arrow batches of one partition."""
        assert isinstance(partition, LedgerPartition)
        return with_one_line_errors(read_ranges(self._options, self._schema, partition.entry_ranges))


class PushdownReader(BatchReader):
    """Reads only the entries that filters on ids select."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Apply filters on ids; return those that Spark has to apply, which are all of them with ``max_entries``."""
        if self._options.max_entries is not None:
            return filters
        self._ledgers, self._entries, rest = push(filters)
        return rest
