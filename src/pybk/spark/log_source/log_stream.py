"""The reader of streaming queries of logs: ``spark.readStream.format("pybk").option("subscribe", "orders")``.

Theory of operation: as for streams of ledgers (``pybk.spark.source.stream``), ``partitions`` reads what lies between
two offsets, and these alone say what that is: a repeated micro-batch has the same records. A log without a position in
the first of them is new, and read from the first record that it ever had. A position that does not continue the one
before, because the log was made again or cut, reads nothing: the records after it come with the next micro-batch.

**Loss.** At each look, the record of a log is compared with the position of the query: the log may be gone, be another
one of the same name, have lost its end, or have been truncated after the position. That is an error, or with
``failOnDataLoss=false`` a warning, and the query continues with what the log has. What is lost between a look and the
task that reads is seen by the task.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pybk.errors import NoSuchLogError, PybkError, RewoundError, TruncatedError
from pybk.spark.connection import close_connections
from pybk.spark.executors.executor import LOOK_SECONDS
from pybk.spark.log_source.log_catalog import LogCatalog, LogState
from pybk.spark.log_source.log_columns import check_schema
from pybk.spark.log_source.log_offsets import BACKLOG_BYTES, LogPlace, from_json, shares, short_uid, to_json
from pybk.spark.log_source.log_positions import LogPositions, tasks_of
from pybk.spark.log_source.log_reading import LogPartition, RecordRange, add_remedy, read_records
from pybk.spark.log_source.query_subscription import QuerySubscription
from pybk.spark.source.planning import SizedRange
from pybk.spark.source.reading import LATE_SECONDS
from pybk.spark.worker_errors import one_line_errors, with_one_line_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pybk.spark.log_source.log_offsets import LogOffset
    from pybk.spark.log_source.log_options import LogOptions

logger = logging.getLogger(__name__)


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads logs as a stream.

    Spark calls all methods in one process of the driver, except ``read``, which tasks call on a pickled copy. The
    attributes are caches of the driver's process and may be lost: the state of the stream is in the offsets alone.
    """

    def __init__(self, options: LogOptions, schema: StructType) -> None:
        check_schema(options, schema)
        self._options = options
        self._schema = schema
        self.catalog: LogCatalog | None = None
        """The logs; None before the first look."""
        self._target: dict[str, LogState] | None = None
        self._known: dict[tuple[str, int], LogPlace] = {}
        """The last positions of this process, with the uids that Kafka's form of offsets does not have."""
        self._seen: dict[str, LogState] | None = None
        """The logs as of the last look."""
        self._reached: LogOffset = {}
        """The end offset of the micro-batch that was planned then."""
        self._subscription: QuerySubscription | None = None
        """The subscription, from the first look on, if the options name one."""
        self._last_batch = float("-inf")
        """The time of the last micro-batch with records, by the monotonic clock."""

    # ---- in the driver -------------------------------------------------------------------------------------------

    @one_line_errors()
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a query without a checkpoint begins.

        Raises:
            NoSuchLogError: A log does not exist, and ``allow_missing`` is not set.
            PybkError: As ``LogPositions.first``.
        """
        catalog = self._on_driver()
        catalog.check_names()
        states = catalog.look()
        if self._target is not None:
            self._target = states  # logs may have got records since, after which the query begins
        firsts = LogPositions(self._options, catalog).first(states)
        return self._returned({name: _place(state, firsts[name]) for name, state in states.items()}, {})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch; of two limits only one is reported to Spark, but both are applied."""
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    @one_line_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end with the records that can be read now (``Trigger.AvailableNow``)."""
        self._target = self._on_driver().look()

    @one_line_errors()
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end offset of the next micro-batch.

        Raises:
            NoSuchLogError: A log was deleted, or made again, and ``fail_on_data_loss`` is set.
            TruncatedError: Records were truncated before they were read, and ``fail_on_data_loss`` is set.
                RewoundError, if they were cut off the end of a write-ahead log.
            PybkError: As ``LogCatalog.look``.
        """
        begin = self._decoded(start)
        states = dict(self._on_driver().look(now=False) if self._target is None else self._target)
        places = {name: place for name, place in begin.items() if self._is_there(name, states)}
        moved = {name: place for name in places if (place := self._moved(name, places[name], states)) is not None}
        gone = len(places) < len(begin)
        places |= {name: self._new(state) for name, state in states.items() if name not in places}
        if self._subscription is not None:
            next_places = {**places, **moved}
            self._subscription.follow({name: _place(states[name], next_places[name].seq) for name in places})
        firsts = {
            name: max(place.seq, states[name].record.first_seq) for name, place in places.items() if name not in moved
        }
        taken = self._taken({name: max(0, states[name].end_seq - first) for name, first in firsts.items()}, limit)
        ends = {name: _place(states[name], firsts[name] + count) for name, count in taken.items()}
        self._seen, self._reached = states, {**ends, **moved}
        if not moved and not gone and all(each.seq == places[name].seq for name, each in ends.items()):
            return start
        return self._returned(self._reached, begin)

    @one_line_errors()
    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the ends of the logs, which is the end offset that a micro-batch without limits would have.

        With the option ``backlogBytes`` it also has the bytes of each log after the micro-batch that was planned last.
        """
        if self._seen is None:
            return None
        ends = {name: _place(state, state.end_seq) for name, state in self._seen.items()}
        found = to_json(ends, self._options.columns)
        return {**found, BACKLOG_BYTES: self._bytes_left(self._seen)} if self._options.backlog_bytes else found

    def _bytes_left(self, states: Mapping[str, LogState]) -> dict[str, int]:
        """Return about how many bytes each log has after the micro-batch that was planned last."""
        found = {}
        for name, state in sorted(states.items()):
            record = state.record
            first = max(self._reached[name].seq, record.first_seq)
            left = RecordRange(name, record.uid, record.generation, first, state.end_seq - 1)
            found[name] = self._on_driver().view(name).bytes_of(left)
        return found

    @one_line_errors()
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the partitions of a micro-batch, one per task."""
        tasks = tasks_of(self._options, self._between(self._decoded(start), self._decoded(end)))
        return [LogPartition(ranges) for ranges in tasks]

    @one_line_errors()
    def commit(self, end: dict[str, Any]) -> None:
        """Acknowledge the records of a micro-batch that is complete, if the options name a subscription.

        Spark calls this when it plans the next micro-batch.
        """
        self._on_driver()
        if self._subscription is not None:
            self._subscription.acknowledge({name: place.seq for name, place in from_json(end).items()})

    def stop(self) -> None:
        """Close connections and drop caches."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        if self.catalog is not None:
            self.catalog.close()
            self.catalog = None
            close_connections()

    def _on_driver(self) -> LogCatalog:
        """Return the catalog; also arrange that ``stop`` is called when Spark ends the process by a signal."""
        if self.catalog is None:
            self.catalog = LogCatalog(self._options, follow=True)
            name = self._options.subscription
            self._subscription = None if name is None else QuerySubscription(self._options, name)
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        return self.catalog

    def _returned(self, offset: LogOffset, begin: LogOffset) -> dict[str, Any]:
        """Return an offset to Spark, and remember it and the one before."""
        self._known = {(name, place.seq): place for each in (begin, offset) for name, place in each.items()}
        return to_json(offset, self._options.columns)

    def _decoded(self, values: dict[str, Any]) -> LogOffset:
        """Decode an offset, with what its form lacks if this process has returned it."""
        return {name: self._known.get((name, place.seq), place) for name, place in from_json(values).items()}

    # ---- loss ----------------------------------------------------------------------------------------------------

    def _lost(self, error: PybkError) -> None:
        """Raise the error of a loss, or log it if losses are accepted."""
        if self._options.fail_on_data_loss:
            add_remedy(error)
            raise error
        logger.warning("%s", error)

    def _is_there(self, name: str, states: dict[str, LogState]) -> bool:
        """Return whether a log exists that the query has a position in; add its state if a late listing lacks it."""
        if name in states:
            return True
        state = self._on_driver().look_at(name)
        if state is not None:
            states[name] = state
            return True
        self._lost(NoSuchLogError(f"log {name!r}, which this query reads, was deleted or is not selected any more"))
        return False

    def _moved(self, name: str, place: LogPlace, states: dict[str, LogState]) -> LogPlace | None:
        """Return the position at which to continue instead of one that is lost; None if it is not.

        A state whose end is before the position, because this process sees it late, is replaced.
        """
        record = states[name].record
        if not place.is_in(record.uid):
            self._lost(NoSuchLogError(f"log {name!r} was deleted and made again after this query began to read it"))
            return _place(states[name], record.first_seq)
        kept = record.kept_of(place.generation) if place.uid else place.seq
        if place.seq - 1 > kept:
            self._lost(RewoundError(f"log {name!r} was cut after record {kept}, before {place.seq}", seq=kept))
            return _place(states[name], kept + 1)
        if place.seq < record.first_seq:
            self._lost(_truncated(name, place.seq, record.first_seq))
        if place.seq <= states[name].end_seq:
            return None
        states[name] = state = self._caught_up(place, states[name])
        if place.seq <= state.end_seq:
            return None
        self._lost(
            NoSuchLogError(
                f"log {name!r} has records up to {state.end_seq - 1}, and this query has read those before "
                f"{place.seq}: it was deleted and made again"
            )
        )
        return _place(state, state.record.first_seq)

    def _caught_up(self, place: LogPlace, state: LogState) -> LogState:
        """Return a log that ends at a position, once this process sees records up to there; else as it is then.

        Bookies get the last add confirmed one after the other, so the process that read up to the position may have
        seen a later one.
        """
        deadline = time.monotonic() + LATE_SECONDS
        found: LogState | None = state
        while found is not None and found.record.open_segments and time.monotonic() < deadline:
            found = self._on_driver().view(state.record.name).look()
            if found is not None and found.end_seq >= place.seq:
                return found._replace(end_seq=place.seq)
            time.sleep(LOOK_SECONDS)
        return state if found is None else found

    def _new(self, state: LogState) -> LogPlace:
        """Return the first position in a log that the query has not read before: the first record it ever had."""
        record = state.record
        if record.first_seq > record.start_seq:
            self._lost(_truncated(record.name, record.start_seq, record.first_seq))
        return _place(state, record.start_seq)

    # ---- limits --------------------------------------------------------------------------------------------------

    def _taken(self, available: Mapping[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return how many records of each log the next micro-batch reads."""
        options = self._options
        if isinstance(limit, ReadAllAvailable):
            return dict(available)
        if self._target is None and options.min_offsets_per_trigger is not None:
            now = time.monotonic()
            late = now - self._last_batch >= options.max_trigger_delay_s
            if sum(available.values()) < options.min_offsets_per_trigger and not late:
                return dict.fromkeys(available, 0)
            self._last_batch = now
        most = options.max_offsets_per_trigger
        return dict(available) if most is None else shares(most, available)

    def _between(self, start: LogOffset, end: LogOffset) -> Iterator[SizedRange[RecordRange]]:
        """Yield the records between two offsets, by log."""
        for name, place in sorted(end.items()):
            before = start.get(name)
            if before is not None and (before.seq >= place.seq or before.is_of_another(place)):
                continue
            view = self._on_driver().view(name)
            state = view.look()
            if state is None or not place.is_in(state.record.uid):
                self._lost(NoSuchLogError(f"log {name!r} was deleted before records of it were read"))
                continue
            record = state.record
            first = record.start_seq if before is None else before.seq
            generation = place.generation if place.uid else record.generation
            yield from view.parts(state, RecordRange(name, record.uid, generation, first, place.seq - 1))

    # ---- in tasks ------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the Arrow batches of one partition."""
        assert isinstance(partition, LogPartition)
        return with_one_line_errors(read_records(self._options, self._schema, partition.record_ranges))


def _truncated(name: str, first: int, kept: int) -> TruncatedError:
    """Return the error for records that were truncated before the query read them."""
    return TruncatedError(
        f"records {first} to {kept - 1} of log {name!r} were truncated before this query read them", first_seq=kept
    )


def _place(state: LogState, seq: int) -> LogPlace:
    """Return a position in a log."""
    return LogPlace(seq, short_uid(state.record.uid), state.record.generation)
