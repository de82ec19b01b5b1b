"""Writes detached segments: ledgers that other processes than a log's writer fill, and that the log adopts.

The writer of a detached segment needs no lock of the log, so any number of them write at the same time. Nobody reads
its records before a commit, ``Log.adopt``, lists its ledger. What it appends is not durable one by one: ``seal`` waits
for all of it. An attempt that dies leaves a ledger that no log names, which a sweep deletes once a later commit of its
query is done (rule T19).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from pybk.deferral import np
from pybk.errors import ClosedError, PybkError, UsageError
from pybk.manager.append_future import AppendFuture
from pybk.manager.handle import Handle
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams.appender import SET_BYTES, pieces_of
from pybk.streams.format import (
    ITEM_EXTRA_BYTES,
    NOTHING_YET,
    DetachedHeader,
    Highest,
    Item,
    Records,
    encode_items,
    encode_parts,
    item_bytes,
    part_bytes,
)
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Detached
from pybk.streams.log_writer import NewRecord, item_of
from pybk.threads.call_threads import asyncio_form

logger = logging.getLogger(__name__)

_READY_BYTES: Final = 1 << 20
"""Bytes of entries that are appended however few they are."""

READY_MIN: Final = 16
"""The entries that are appended together: enough for the vectors of a processor to compute their digests at once, and
few enough that bookies take some while others are made."""


class DetachedSegment(NamedTuple):
    """The description of a sealed ledger that a log may adopt; small, and made of numbers and strings.

    Attributes:
        uid: The log's uid, hexadecimal.
        query: The query whose commit adopts it.
        epoch: The number of that commit.
        partition: The number of the task that wrote it.
        attempt: The number of the task's attempt.
        ledger_id: The ledger; -1 if there are no records, and so no ledger.
        records: The number of its records.
        nbytes: Payload bytes of the ledger.
        time_ns: The highest event time, nanoseconds since 1970; -1 without records.
        txid: The highest transaction id; -1 for none.
    """

    uid: str
    query: str
    epoch: int
    partition: int
    attempt: int
    ledger_id: int
    records: int
    nbytes: int
    time_ns: int
    txid: int


class DetachedLedger:
    """The ledger of a detached segment, which is created with its first entry.

    Args:
        steps: The log's.
        header: The first entry.

    Threads: one at a time.
    """

    def __init__(self, steps: LedgerSteps, header: DetachedHeader) -> None:
        self._steps = steps
        self._header = header
        self._writer: LedgerWriter | None = None
        """None before the first entry: a segment without records has no ledger."""
        self._last: AppendFuture[int] | AppendFuture[range] | None = None
        self._outstanding = 0
        """The bytes of entries up to that of the last append, of which some were not durable yet."""
        self._is_sealed = False

    def append(self, payloads: Sequence[bytes]) -> None:
        """Append entries; they are durable once ``seal`` has returned."""
        if self._writer is None:
            self._writer = self._steps.create_detached(self._header)
            self._last = self._writer.append_async(self._header.encode())
        nbytes = self.outstanding_bytes
        self._last = self._writer.append_many_async(payloads)
        self._outstanding = nbytes + sum(map(len, payloads))

    @property
    def outstanding_bytes(self) -> int:
        """The bytes of entries that were appended and may not be durable yet."""
        return 0 if self._last is None or self._last.done() else self._outstanding

    def wait(self) -> None:
        """Wait until all entries are durable; raises as ``LedgerWriter.append``."""
        if self._last is not None:
            self._last.result()
            self._outstanding = 0

    def seal(self) -> tuple[int, int]:
        """Wait until all entries are durable, and close the ledger.

        Returns:
            The ledger and its payload bytes; -1 and 0 without entries.
        """
        if self._writer is None or self._last is None:
            return -1, 0
        self.wait()
        self._writer.close()
        self._is_sealed = True
        return self._writer.ledger_id, self._writer.length

    def close(self) -> None:
        """Delete the ledger, unless it was sealed; a second call does nothing.

        A ledger that cannot be deleted now is left to a sweep, with a warning in the log of ``logging``.
        """
        writer, self._writer = self._writer, None
        if writer is not None and not self._is_sealed:
            with suppress(PybkError):
                writer.close()
            self._steps.delete(writer.ledger_id)


class DetachedRecords:
    """The records of a detached ledger, in entries of about 64 KiB, of which several are appended together.

    Args:
        ledger: The ledger.

    Attributes:
        count: The number of records that were added.

    Threads: one at a time.
    """

    def __init__(self, ledger: DetachedLedger) -> None:
        self._ledger = ledger
        self._parts: list[Records] = []
        """Records that are in no entry yet; their buffers must not change."""
        self._room = SET_BYTES
        """The bytes that the next entry may have in addition to these."""
        self._ready: list[bytes] = []
        """Entries that are not appended yet."""
        self._encoded = 0
        """The number of records in entries."""
        self._highest = NOTHING_YET
        """The highest values of these records."""
        self.count = 0

    @property
    def waiting_bytes(self) -> int:
        """The bytes of records that were added and are not durable yet, about."""
        return SET_BYTES - self._room + sum(map(len, self._ready)) + self._ledger.outstanding_bytes

    def add(self, records: Records) -> None:
        """Add records that lie in a buffer; they share entries with those before and after them.

        Cost: One copy of the data, and some 100 ns per record whose data does not follow that of the one before it.
        """
        ends = np.cumsum(part_bytes(records))
        low = taken = 0
        while low < len(ends):
            high = int(np.searchsorted(ends, taken + self._room, side="right"))
            if high == low and not self._parts:
                high += 1  # it takes more than an entry usually has
            if high > low:
                self._parts.append(records.within(records.first_seq + low, records.first_seq + high - 1))
                self._room -= int(ends[high - 1]) - taken
                taken = int(ends[high - 1])
            if high < len(ends):
                self._end_entry()
            low = high
        self.count += len(ends)

    def add_items(self, items: Sequence[Item]) -> None:
        """Add records as an entry of their own."""
        self._end_entry()
        self._ready.append(encode_items(self._encoded, items, self._highest, relative=True))
        self._encoded += len(items)
        self.count += len(items)
        self._highest = Highest(
            max(self._highest.time_ns, *(item.time_ns for item in items)),
            max(self._highest.txid, *(item.txid for item in items)),
        )
        self._hand_over(READY_MIN)

    def _end_entry(self) -> None:
        """Make an entry of the records that are in none."""
        parts, self._parts, self._room = self._parts, [], SET_BYTES
        if parts:
            payload, self._highest = encode_parts(self._encoded, parts, self._highest)
            self._ready.append(payload)
            self._encoded += sum(len(each.starts) for each in parts)
            self._hand_over(READY_MIN)

    def _hand_over(self, least: int) -> None:
        """Append the entries that are ready, if there are as many as ``least``, or they are large."""
        if len(self._ready) >= least or sum(map(len, self._ready)) >= _READY_BYTES:
            ready, self._ready = self._ready, []
            self._ledger.append(ready)

    def flush(self) -> None:
        """Append all that was added."""
        self._end_entry()
        self._hand_over(1)

    def settle(self) -> None:
        """Append all that was added, and wait until it is durable."""
        self.flush()
        self._ledger.wait()

    def seal(self) -> Detached:
        """Wait until all records are durable, and close the ledger; the ledger is -1 if there are none."""
        self.flush()
        ledger_id, nbytes = self._ledger.seal()
        return Detached(ledger_id, self.count, nbytes, self._highest)


class DetachedWriter(Handle):
    """Writes one detached segment; made by ``Log.detached_segment``.

    The end of its ``with``, or ``close``, deletes what was not sealed.

    Threads: one at a time.
    """

    def __init__(self, steps: LedgerSteps, header: DetachedHeader) -> None:
        """Use ``Log.detached_segment`` instead."""
        self._steps = steps
        self._header = header
        self._data_bytes_max = steps.data_bytes_max - ITEM_EXTRA_BYTES
        self._ledger = DetachedLedger(steps, header)
        self._records = DetachedRecords(self._ledger)
        self._sealed: DetachedSegment | None = None
        self._closed = False

    def __repr__(self) -> str:
        """Name the log, the query, its commit and the task."""
        header = self._header
        return (
            f"<DetachedWriter of {self._steps.name!r} for commit {header.epoch} of {header.query!r}, "
            f"partition {header.partition}, attempt {header.attempt}>"
        )

    @property
    def records(self) -> int:
        """The number of records that were appended."""
        return self._records.count

    def size_of(self, record: NewRecord) -> int:
        """Return the bytes that a record takes in the ledger; it is not appended.

        Raises:
            UsageError: The record is not valid.
        """
        return item_bytes(item_of(record, self._data_bytes_max))

    def append_many(self, records: Iterable[bytes | NewRecord]) -> None:
        """Append records; they are durable once ``seal`` has returned.

        Args:
            records: Any number. They share entries of 64 KiB.

        Raises:
            UsageError: A record is not valid; none of them was appended.
            ClosedError: The segment was sealed or closed.
            PybkError: As ``LedgerWriter.append``; this was closed, and a further attempt writes another segment.

        Cost: Waits only while ``max_outstanding_bytes`` are not durable.
        """
        self._check_open()
        given = [each if isinstance(each, NewRecord) else NewRecord(each) for each in records]
        items = [item_of(each, self._data_bytes_max) for each in given]
        try:
            for piece in pieces_of(items, [item_bytes(item) for item in items]) if items else ():
                self._records.add_items(piece)
            self._records.flush()
        except BaseException:
            self.close()  # a part of the records would be missing
            raise

    append_many_async = asyncio_form(append_many)

    def _check_open(self) -> None:
        if self._closed or self._sealed is not None:
            raise ClosedError(f"{self!r} was sealed or closed; make another")

    def _append_buffered(self, records: Records) -> bool:
        self._check_open()
        if int((records.ends - records.starts).max(initial=0)) > self._data_bytes_max:
            return False
        try:
            self._records.add(records)
        except BaseException:
            self.close()  # a part of the records would be missing
            raise
        return True

    def _complete(self, call: Callable[[], None]) -> None:
        """Make a call of the records that appends what waits."""
        self._check_open()
        try:
            call()
        except BaseException:
            self.close()  # a part of the records would be missing
            raise

    def seal(self) -> DetachedSegment:
        """Wait until all records are durable, and close the ledger.

        Returns:
            What ``Log.adopt`` takes. A second call returns it again.

        Raises:
            ClosedError: It was closed before.
            PybkError: An append has failed, and a further attempt writes another segment; or the ledger could not be
                closed, which another call tries again.

        Durability: On return the records are durable, and no reader sees them before they are adopted.
        """
        if self._sealed is not None:
            return self._sealed
        if self._closed:
            raise ClosedError(f"{self!r} was closed, and deleted what it wrote; make another")
        self._complete(self._records.flush)
        sealed = self._records.seal()
        uid, _, query, epoch, partition, attempt = self._header
        task = uid.hex(), query, epoch, partition, attempt
        ledger = sealed.ledger_id, sealed.records, sealed.nbytes
        self._sealed = DetachedSegment(*task, *ledger, *sealed.highest)
        return self._sealed

    seal_async = asyncio_form(seal, own_thread=True)

    def close(self) -> None:
        """Delete the ledger, unless it was sealed; a second call does nothing.

        A ledger that cannot be deleted now is left to a sweep, with a warning in the log of ``logging``.
        """
        self._closed = True
        self._ledger.close()


def append_buffered(writer: DetachedWriter, records: Records) -> bool:
    """Append records that lie in a buffer, as ``DetachedWriter.append_many`` appends others; for columns of rows.

    Args:
        writer: The writer.
        records: The records, all of them with a time. Their buffer must not change before ``seal``.

    Returns:
        False, with nothing done, if one of them has more bytes than the log takes.

    Raises:
        ClosedError, PybkError: As ``append_many``.

    Cost: One copy of the data; no object for each record.
    """
    return writer._append_buffered(records)


def waiting_bytes(writer: DetachedWriter) -> int:
    """Return the bytes of records that were appended to a detached segment and are not durable yet, about."""
    return writer._records.waiting_bytes


def settle(writer: DetachedWriter) -> None:
    """Wait until all that was appended to a detached segment is durable; errors as ``DetachedWriter.append_many``."""
    writer._complete(writer._records.settle)


class Adoption(NamedTuple):
    """The result of ``Log.adopt``.

    Attributes:
        is_new: Whether this call has made the commit, as far as is known; False if the query had committed this or a
            later one before, and nothing was changed.
        last_epoch: The last commit of the query.
        last_seq: The last record of the log after that commit.
    """

    is_new: bool
    last_epoch: int
    last_seq: int


def row_of(segment: DetachedSegment) -> Detached:
    """Return what the list of a log needs of a segment with records."""
    return Detached(segment.ledger_id, segment.records, segment.nbytes, Highest(segment.time_ns, segment.txid))


def check_commit(segments: Iterable[DetachedSegment], uid: str, query: str, epoch: int) -> list[Detached]:
    """Return what a list needs of the segments of a commit that have records.

    Raises:
        UsageError: One is not a description, or is of another log, query or commit; or two have one ledger.
    """
    try:
        given = list(segments)
    except TypeError:
        raise UsageError(f"segments is {segments!r:.50}; it takes an iterable of what seal() returned") from None
    for each in given:
        if not isinstance(each, DetachedSegment):
            raise UsageError(f"segments has {each!r:.50}; it takes what the seal() of detached segments returned")
        if (each.uid, each.query, each.epoch) != (uid, query, epoch):
            raise UsageError(
                f"a segment was written for commit {each.epoch} of query {each.query!r} of the log of uid {each.uid}, "
                f"and not for commit {epoch} of query {query!r} of that of uid {uid}; write it again"
            )
    rows = [row_of(each) for each in given if each.records]
    if len({each.ledger_id for each in rows}) < len(rows):
        raise UsageError("two segments have the same ledger; give each segment once")
    return rows
