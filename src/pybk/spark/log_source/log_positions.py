"""The records at which a read begins and ends, from its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pybk.errors import TruncatedError, UsageError
from pybk.spark.log_source.log_options import Seqs, Times, checked_logs
from pybk.spark.log_source.log_reading import RecordRange, joined
from pybk.spark.source.planning import SizedRange, split_into_tasks
from pybk.streams.list_record import ListKind
from pybk.streams.log_reader import LogEnd
from pybk.streams.record_search import first_seq_at_time

if TYPE_CHECKING:
    from pybk.spark.log_source.log_catalog import LogCatalog, LogState
    from pybk.spark.log_source.log_options import Bound, LogOptions


class LogPositions:
    """Finds the first and the last record to read of each log.

    Args:
        options: The options of the read.
        catalog: The logs.
    """

    def __init__(self, options: LogOptions, catalog: LogCatalog) -> None:
        self._options = options
        self._catalog = catalog

    def bounds(self, states: Mapping[str, LogState]) -> dict[str, tuple[int, int]]:
        """Return the first record to read of each log, and the record after the last one.

        Raises:
            UsageError: As ``first`` and ``end``; or a read would end before it begins.
            TruncatedError: As ``first``; or all records up to the end were truncated, and ``fail_on_data_loss`` is set.
        """
        firsts, ends = self.first(states), self.end(states)
        return {name: self._in_order(state, firsts[name], ends[name]) for name, state in states.items()}

    def _in_order(self, state: LogState, first: int, end: int) -> tuple[int, int]:
        """Return the bounds of a log, which is read from one to the other."""
        record = state.record
        end = max(end, record.start_seq)
        if first <= end:
            return first, end
        if end >= record.first_seq:
            raise UsageError(
                f"the read of log {record.name!r} begins at record {first}, and ends before record {end}; let it end "
                "later, or begin earlier"
            )
        if self._options.fail_on_data_loss:
            raise TruncatedError(
                f"the read of log {record.name!r} ends before record {end}, and the first one is {record.first_seq}, "
                "as those before it were truncated; option failOnDataLoss=false reads none of them",
                first_seq=record.first_seq,
            )
        return first, first

    def first(self, states: Mapping[str, LogState]) -> dict[str, int]:
        """Return the first record to read of each log.

        Raises:
            TruncatedError: Records from a given one on were truncated, and ``fail_on_data_loss`` is set.
            UsageError: Positions are given for other logs than those that are read, or lie after the end of a log; or
                no record of a log has the given time.
        """
        starting = self._options.starting
        self._check_logs(starting, "startingOffsets", states)
        return {name: self._first(starting, name, state) for name, state in states.items()}

    def _first(self, starting: Bound, name: str, state: LogState) -> int:
        seq = self._seq(starting, name, state)
        first = state.record.first_seq
        if isinstance(starting, Times) and seq >= state.end_seq and not self._options.latest_if_no_match:
            raise UsageError(
                f"log {name!r} has no record of the starting time or later; give an earlier one, or "
                "startingOffsetsByTimestampStrategy=latest to read what comes from now on"
            )
        if seq > state.end_seq:
            raise UsageError(
                f"startingOffsets has {seq} for log {name!r}, whose next record is {state.end_seq}; give that at most"
            )
        if seq < first and first > state.record.start_seq and self._options.fail_on_data_loss:
            raise TruncatedError(
                f"startingOffsets has {seq} for log {name!r}, whose first record is {first}, as those before it were "
                "truncated; option failOnDataLoss=false begins there",
                first_seq=first,
            )
        return max(seq, first)

    def end(self, states: Mapping[str, LogState]) -> dict[str, int]:
        """Return the record after the last one to read of each log.

        Raises:
            UsageError: Positions are given for other logs than those that are read, or lie after the end of a log.
        """
        ending = self._options.ending
        self._check_logs(ending, "endingOffsets", states)
        found = {}
        for name, state in states.items():
            found[name] = seq = self._seq(ending, name, state)
            if seq > state.end_seq:
                raise UsageError(
                    f"endingOffsets has {seq} for log {name!r}, whose next record is {state.end_seq}; give that at most"
                )
        return found

    def _check_logs(self, bound: Bound, name: str, states: Mapping[str, LogState]) -> None:
        """Check positions by log against the logs that a pattern matches."""
        if self._options.pattern is not None and not isinstance(bound, LogEnd) and bound.by_log:
            checked_logs(bound.by_log, name if isinstance(bound, Seqs) else f"{name}ByTimestamp", tuple(states))

    def _seq(self, bound: Bound, name: str, state: LogState) -> int:
        match bound:
            case LogEnd.EARLIEST:
                return state.record.first_seq
            case LogEnd.LATEST:
                return state.end_seq
            case Seqs(by_log):
                seq = by_log[name]
                return {-1: state.end_seq, -2: state.record.first_seq}.get(seq, seq)
            case Times():
                if self._options.kind is ListKind.WAL:
                    raise UsageError(
                        f"write-ahead log {name!r} cannot be searched by time, as its records need not have one; give "
                        "startingOffsets and endingOffsets"
                    )
                return min(first_seq_at_time(self._catalog.view(name).steps, bound.of(name)), state.end_seq)
        raise AssertionError(bound)


def tasks_of(options: LogOptions, parts: Iterable[SizedRange[RecordRange]]) -> list[tuple[RecordRange, ...]]:
    """Return the records of each task.

    Args:
        options: The options of the read.
        parts: The records to read, in order.
    """
    sized = list(parts)
    tasks = split_into_tasks(sized, options.max_records_per_partition)
    least = options.min_partitions or 1
    if len(tasks) < least:
        total = sum(len(part.entry_range) for part in sized)
        tasks = split_into_tasks(sized, max(1, total // least)) if total else tasks
    return [joined(task) for task in tasks]
