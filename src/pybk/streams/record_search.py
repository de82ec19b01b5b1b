"""Finds the first record of a log whose time or transaction id is at least a value.

Each entry has the highest value of all records before it, which never falls. So a binary search finds the last segment,
and in it the last entry, before which the highest value is too low; the record is in that entry or after it. The list
itself has the highest value before an adopted segment. Values need not ascend: the first record with at least a value
is the one at which the highest value reaches it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from pybk.errors import NoSuchLedgerError, TruncatedError
from pybk.manager.ledger_reader import LedgerReader
from pybk.streams.format import Highest, Int64s, Origin, Records, highest_before
from pybk.streams.ledger_steps import FIRST_ENTRY, LedgerSteps, first_seq_of, payload_of
from pybk.streams.list_record import ListRecord, Segment
from pybk.streams.record_reader import RecordReader

T = TypeVar("T")


def first_seq_at_time(steps: LedgerSteps, time_ns: int) -> int:
    """Return the first kept record with an event time of at least ``time_ns``; without one, the next record to come.

    Raises:
        CorruptError: A record is damaged or missing.

    Cost: Opens as many ledgers, and reads as many entries, as the logarithms of their numbers.
    """
    return _search(steps, lambda highest: highest.time_ns < time_ns, lambda records: _first(records.times, time_ns))


def first_seq_of_txid(steps: LedgerSteps, txid: int) -> int:
    """Return the first kept record with a transaction id of at least ``txid``; otherwise as ``first_seq_at_time``."""
    return _search(steps, lambda highest: highest.txid < txid, lambda records: _first(records.txids, txid))


def _first(values: Int64s | None, wanted: int) -> int | None:
    """Return the index of the first value that is at least ``wanted``; None if there is none."""
    if values is None:
        return None
    found = np.flatnonzero(values >= wanted)
    return int(found[0]) if len(found) else None


def _search(steps: LedgerSteps, too_low: Callable[[Highest], bool], index_in: Callable[[Records], int | None]) -> int:
    while True:
        record = steps.existing().record
        try:
            reader = RecordReader(steps, steps.with_segments(partial(_begin, steps, too_low)))
            try:
                while (records := reader.read()) is not None:
                    index = index_in(records)
                    if index is not None:
                        return records.first_seq + index
                return reader.seq
            finally:
                reader.close()
        except (NoSuchLedgerError, TruncatedError):
            if steps.existing().record == record:
                raise  # the log was not truncated meanwhile
            continue


def _begin(
    steps: LedgerSteps, too_low: Callable[[Highest], bool], record: ListRecord, segments: Sequence[Segment]
) -> int:
    """Return the first record of the last entry before which the highest value is too low, or the first kept one."""

    def is_before(segment: Segment) -> bool:
        if segment.before is not None:
            return too_low(segment.before)
        with steps.open_segment(segment) as reader:
            return _has_records(reader) and too_low(_highest(reader, FIRST_ENTRY, None))

    found = _last(segments, is_before)
    if found is None:
        return record.first_seq
    with steps.open_segment(found) as reader:
        entries = range(FIRST_ENTRY, reader.last_add_confirmed + 1)
        entry = _last(entries, lambda each: too_low(_highest(reader, each, found.origin)))
        assert entry is not None, "the segment was found by its first entry"
        first = first_seq_of(reader, entry, found.origin)
        last = first if found.last_seq is None else found.last_seq  # a cut may have dropped the entry
        return max(min(first, last), record.first_seq)


def _has_records(reader: LedgerReader) -> bool:
    return reader.last_add_confirmed >= FIRST_ENTRY


def _highest(reader: LedgerReader, entry: int, origin: Origin | None) -> Highest:
    where = f"ledger {reader.ledger_id} entry {entry}"
    return highest_before(payload_of(reader, entry), where=where, origin=origin)


def _last(ascending: Sequence[T], holds: Callable[[T], bool]) -> T | None:
    """Return the last element for which something holds, given that it holds for all those before it."""
    after = bisect_left(ascending, True, key=lambda each: not holds(each))
    return ascending[after - 1] if after else None
