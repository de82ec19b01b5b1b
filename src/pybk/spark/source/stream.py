"""The reader of streaming queries, which follows ledgers and finds new ones: ``spark.readStream.format("pybk")``.

Theory of operation: Spark calls ``latestOffset(start)`` in the driver, logs the offset, calls ``partitions(start,
end)`` and runs ``read`` in tasks. After a restart it repeats the last micro-batch with the logged offsets.
Exactly-once input rests on that: ``partitions`` depends on the two offsets alone (``offsets.between``), never on a
listing, so a repeated micro-batch has the same entries. Only their places depend on the catalog, because merges move
entries of ledgers that a sink wrote (``pybk.spark.sink.manifest``). The reader itself keeps a catalog and the set of
deleted ledgers in the driver as caches; losing them costs time only. A ledger counts as deleted if its own metadata is
gone, because listings may be late, and no merged ledger has its entries.

The catalog follows the changes of ledgers, and forgets those that an offset has finished, because the query does not
come back behind an offset that it has begun from. If it does nevertheless, the catalog looks at all ledgers again.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Collection, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from pybk.errors import NoSuchLedgerError, UsageError
from pybk.spark import source
from pybk.spark.connection import close_connections, connection
from pybk.spark.consumers import QueryConsumer, Selection
from pybk.spark.source.columns import check_schema
from pybk.spark.source.offsets import Offset, advance, between, first_offset
from pybk.spark.source.planning import EntryRange, ReadableLedger, SizedRange, split_into_tasks
from pybk.spark.source.reading import LedgerPartition, lost_ledgers_error, payload_bytes, read_ranges
from pybk.spark.worker_errors import one_line_errors, with_one_line_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.spark.options import SourceOptions
    from pybk.spark.source.ledger_catalog import LedgerCatalog

_MEASURED: Final = 64
_ENTRY_BYTES: Final = 1 << 10

logger = logging.getLogger(__name__)


class _Snapshot(NamedTuple):
    """The ledgers and entries that could be read at one moment."""

    ledgers: Mapping[int, ReadableLedger]
    hidden: Mapping[int, int]
    others: Container[int]

    def advance(self, begin: Offset, taken: Mapping[int, int], deleted: Collection[int]) -> Offset:
        """Return the offset after the entries that are read next."""
        return advance(begin, self.ledgers, self.hidden, taken, time.time_ns(), deleted, self.others)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads ledgers as a stream.

    Spark calls all methods in one process of the driver, except ``read``, which tasks call on a pickled copy. The
    attributes are caches of the driver's process and may be lost: the state of the stream is in the offsets alone.
    """

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema)
        self._options = options
        self._schema = schema
        self.catalog: LedgerCatalog | None = None
        """The ledgers that the stream knows; None before the first batch."""
        self._target: _Snapshot | None = None
        self._deleted: set[int] = set()
        self._seen: tuple[Offset, _Snapshot] | None = None
        self._starts: tuple[dict[str, Any], ...] = ()
        """The offsets from which the next look may begin: that of the last one, and what it returned."""
        self._consumer: QueryConsumer | None = None
        """Records how far the query has come, from the first look on, if the options name a consumer."""

    # ---- in the driver -------------------------------------------------------------------------------------------

    @one_line_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a query without a checkpoint begins.

        Raises:
            NoSuchLedgerError: No ledger has the selected type; or a ledger that is named does not exist, and
                ``fail_on_data_loss`` is set.
            PybkError: As ``LedgerCatalog.look``.
        """
        catalog = self._on_driver()
        ledgers = catalog.look()
        catalog.check_type()
        lost = [*catalog.missing, *catalog.absent(self._options.starting)]
        if lost and self._options.fail_on_data_loss:
            raise lost_ledgers_error(sorted({*lost}))
        first = first_offset(
            self._options.starting,
            ledgers,
            catalog.hidden,
            time.time_ns(),
            of=catalog.source(),
            others=catalog.others,
        )
        return first.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch. If two limits are set, one is reported to Spark, and both are applied."""
        if self._options.max_entries_per_trigger is not None:
            return ReadMaxRows(self._options.max_entries_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    @one_line_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end with the entries that can be read now (``Trigger.AvailableNow``)."""
        self._target = self._look(now=True)

    @one_line_errors()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end offset of the next micro-batch.

        Raises:
            NoSuchLedgerError: A ledger was deleted before it was read to its end, and ``fail_on_data_loss`` is set.
            UsageError: The checkpoint belongs to another selection of ledgers.
            IllegalOperationError: The consumer is that of a query that reads other ledgers.
            PybkError: As ``LedgerCatalog.look``.
        """
        begin = self._beginning(start)
        self._forget(start, begin)
        view = self._target or self._look(now=False)
        self._seen = begin, view
        self._check_loss(begin, view)
        left = begin.unfinished(view.ledgers.values())
        limited = not isinstance(limit, ReadAllAvailable)
        taken = self._admitted(begin, left) if limited else _all(begin, left)
        end = view.advance(begin, taken, self._deleted)
        found = start if end is begin else end.to_json()
        self._starts = start, found
        return found

    def _forget(self, start: dict[str, Any], begin: Offset) -> None:
        """Have the catalog forget the ledgers that are finished at a start offset."""
        catalog = self._on_driver()
        if self._starts and start not in self._starts:
            catalog.remember()
        catalog.forget(begin.finished)

    @one_line_errors()
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the end offset that a micro-batch without limits would have."""
        if self._seen is None:
            return None
        begin, view = self._seen
        left = begin.unfinished(view.ledgers.values())
        return view.advance(begin, _all(begin, left), self._deleted).to_json()

    @one_line_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions of a micro-batch, one per task; equal for equal offsets."""
        begin = self._beginning(start)
        entry_ranges = self._on_driver().placed(between(begin, self._offset(end)), begin.finished)
        tasks = split_into_tasks(
            (SizedRange(entry_range, self._entry_bytes(entry_range)) for entry_range in entry_ranges),
            self._options.entries_per_partition,
        )
        return [LedgerPartition(task) for task in tasks]

    @one_line_errors()
    def commit(self, end: dict[str, Any]) -> None:
        """Record that micro-batches up to an offset are complete, if the options name a consumer.

        Spark calls this when it plans the next micro-batch.
        """
        self._on_driver()
        if self._consumer is not None:
            self._consumer.record(self._offset(end).finished_ledgers())

    def stop(self) -> None:
        """Close connections and drop caches."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        if self.catalog is not None:
            self.catalog.close()
            self.catalog = None
            close_connections()

    def _on_driver(self) -> LedgerCatalog:
        """Return the ledger catalog; also arrange that ``stop`` is called when Spark ends the process by a signal."""
        if self.catalog is None:
            self._consumer = self._new_consumer()
            self.catalog = source.LedgerCatalog(self._options, follow=True)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return self.catalog

    def _new_consumer(self) -> QueryConsumer | None:
        """Return the consumer that the options name."""
        options = self._options
        if options.consumer is None:
            return None
        metadata = connection(options.where).metadata
        assert metadata is not None, "the options are refused for a store in a directory"
        return QueryConsumer(metadata, options.consumer, Selection(options.ledger_type, options.ledgers))

    def _look(self, *, now: bool) -> _Snapshot:
        catalog = self._on_driver()
        return _Snapshot(catalog.look(now=now), catalog.hidden, catalog.others)

    def _offset(self, values: dict[str, Any]) -> Offset:
        """Decode an offset of the checkpoint, and check that it belongs to this selection of ledgers."""
        found, of = Offset.from_json(values), self._on_driver().source()
        if found.of != of:
            raise UsageError(
                f"the checkpoint is of other ledgers ({found.of:.200}) than the options name ({of:.200}), as store or "
                "cluster, type and ids; use a new checkpoint, or the options of before"
            )
        return found

    def _beginning(self, start: dict[str, Any]) -> Offset:
        """Return the offset with which a micro-batch begins; the consumer is recorded first.

        After a restart the first call that has an offset may be of a micro-batch that is repeated, or of the next one.
        """
        begin = self._offset(start)
        if self._consumer is not None and not self._consumer.has_begun:
            self._consumer.begin(begin.finished_ledgers())
        return begin

    def _check_loss(self, begin: Offset, view: _Snapshot) -> None:
        """Find ledgers that were deleted, or cannot be found, before they were read to their ends."""
        missing = begin.unfinished_ids().difference(view.ledgers, view.hidden, self._deleted)
        deleted = self._on_driver().deleted(missing)
        self._deleted |= deleted
        unread = begin.unread()
        if self._options.fail_on_data_loss and (lost := unread & self._deleted):
            raise lost_ledgers_error(sorted(lost))
        if lost := unread & deleted:
            logger.warning("ledgers %s do not exist; their entries that were not read are left out", sorted(lost))

    def _admitted(self, begin: Offset, left: list[ReadableLedger]) -> dict[int, int]:
        """Return how many entries of each ledger to read within the limits of the options, oldest ledgers first."""
        entries, size = self._options.max_entries_per_trigger, self._options.max_bytes_per_trigger
        taken: dict[int, int] = {}
        for each in left:
            first = begin.next_entry(each.ledger_id)
            available = each.end - first
            if available <= 0:
                continue
            count = available if entries is None else min(available, entries - sum(taken.values()))
            if size is not None:
                count, used = self._fitting(
                    EntryRange(each.ledger_id, first, first + count - 1, each.place), size, 0 if taken else 1
                )
                size -= used
            if count:
                taken[each.ledger_id] = count
            if count < available:
                break
        return taken

    def _fitting(self, entry_range: EntryRange, size: int, least: int) -> tuple[int, int]:
        """Return the number of entries that fit into ``size`` bytes, at least ``least``, and their bytes."""
        low, high = min(least, len(entry_range)), len(entry_range)
        try:
            used = self._size(entry_range, high)
            if used <= size:
                return high, used
            while low < high - 1:  # low fits, high does not
                middle = (low + high) // 2
                low, high = (middle, high) if self._size(entry_range, middle) <= size else (low, middle)
            return low, self._size(entry_range, low)
        except NoSuchLedgerError:  # deleted since it was listed; the task that reads it reports that
            return len(entry_range), 0

    def _size(self, entry_range: EntryRange, count: int) -> int:
        """Return the payload bytes of the first ``count`` entries of a range."""
        if not count:
            return 0
        return payload_bytes(self._options, entry_range.part(entry_range.first, entry_range.first + count - 1))

    def _entry_bytes(self, entry_range: EntryRange) -> float:
        """Return the average size of entries, equal at each call; a constant if there are only few entries."""
        if len(entry_range) < _MEASURED:
            return _ENTRY_BYTES
        try:
            return payload_bytes(self._options, entry_range) / len(entry_range)
        except NoSuchLedgerError:  # the task that reads it reports that
            return _ENTRY_BYTES

    # ---- in tasks ------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the Arrow batches of one partition."""
        assert isinstance(partition, LedgerPartition)
        return with_one_line_errors(read_ranges(self._options, self._schema, partition.entry_ranges))


def _all(begin: Offset, left: list[ReadableLedger]) -> dict[int, int]:
    """Return the number of readable entries of each ledger."""
    return {each.ledger_id: max(0, each.end - begin.next_entry(each.ledger_id)) for each in left}
