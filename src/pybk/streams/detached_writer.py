"""Writes detached segments: ledgers that other processes than a log's writer fill, and that the log adopts.

The writer of a detached segment needs no lock of the log, so any number of them write at the same time. Nobody reads
its records before a commit, ``Log.adopt``, lists its ledger. What it appends is not durable one by one: ``seal`` waits
for all of it. An attempt that dies leaves a ledger that no log names, which a sweep deletes once a later commit of its
query is done (rule T19).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

from pybk.errors import ClosedError, PybkError, UsageError
from pybk.manager.append_future import AppendFuture
from pybk.manager.handle import Handle
from pybk.manager.ledger_writer import LedgerWriter
from pybk.streams.appender import pieces_of
from pybk.streams.format import (
    ITEM_EXTRA_BYTES,
    NOTHING_YET,
    DetachedHeader,
    Highest,
    Item,
    encode_items,
    item_bytes,
)
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Detached
from pybk.streams.log_writer import NewRecord, item_of
from pybk.threads.call_threads import asyncio_form

logger = logging.getLogger(__name__)


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
        self._last: AppendFuture[int] | None = None
        self._is_sealed = False

    def append(self, payload: bytes) -> None:
        """Append an entry; it is durable once ``seal`` has returned."""
        if self._writer is None:
            self._writer = self._steps.create_detached(self._header)
            self._last = self._writer.append_async(self._header.encode())
        self._last = self._writer.append_async(payload)

    def seal(self) -> tuple[int, int]:
        """Wait until all entries are durable, and close the ledger.

        Returns:
            The ledger and its payload bytes; -1 and 0 without entries.
        """
        if self._writer is None or self._last is None:
            return -1, 0
        self._last.result()
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
        self._records = 0
        self._highest = NOTHING_YET
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
        return self._records

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
        if self._closed or self._sealed is not None:
            raise ClosedError(f"{self!r} was sealed or closed; make another")
        given = [each if isinstance(each, NewRecord) else NewRecord(each) for each in records]
        items = [item_of(each, self._data_bytes_max) for each in given]
        try:
            for piece in pieces_of(items, [item_bytes(item) for item in items]) if items else ():
                self._append(piece)
        except BaseException:
            self.close()  # a part of the records would be missing
            raise

    append_many_async = asyncio_form(append_many)

    def _append(self, items: Sequence[Item]) -> None:
        """Append one entry."""
        self._ledger.append(encode_items(self._records, items, self._highest, relative=True))
        self._records += len(items)
        self._highest = Highest(
            max(self._highest.time_ns, *(item.time_ns for item in items)),
            max(self._highest.txid, *(item.txid for item in items)),
        )

    def seal(self) -> DetachedSegment:
        """Wait until all records are durable, and close the ledger.

        Returns:
            What ``Log.adopt`` takes. A second call returns it again.

        Raises:
            ClosedError: It was closed before.
            PybkError: An append has failed; a further attempt writes another segment.

        Durability: On return the records are durable, and no reader sees them before they are adopted.
        """
        if self._sealed is not None:
            return self._sealed
        if self._closed:
            raise ClosedError(f"{self!r} was closed, and deleted what it wrote; make another")
        ledger_id, nbytes = self._ledger.seal()
        uid, _, query, epoch, partition, attempt = self._header
        task = uid.hex(), query, epoch, partition, attempt
        self._sealed = DetachedSegment(*task, ledger_id, self._records, nbytes, *self._highest)
        return self._sealed

    seal_async = asyncio_form(seal, own_thread=True)

    def close(self) -> None:
        """Delete the ledger, unless it was sealed; a second call does nothing.

        A ledger that cannot be deleted now is left to a sweep, with a warning in the log of ``logging``.
        """
        self._closed = True
        self._ledger.close()


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
