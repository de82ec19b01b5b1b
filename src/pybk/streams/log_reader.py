"""``LogReader``: reads the records of a named log in order, from any place in it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

from pybk.errors import ClosedError, LogSealedError, TruncatedError, UsageError
from pybk.manager.append_future import seconds_of
from pybk.manager.arguments import whole_from
from pybk.streams.format import Position, Records
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import SEQ_MAX
from pybk.streams.log_record import LogRecord, RecordSource, log_records
from pybk.streams.record_reader import RecordReader
from pybk.streams.record_search import first_seq_at_time, first_seq_of_txid
from pybk.threads import in_children
from pybk.threads.call_threads import asyncio_form, in_thread
from pybk.values import INT64_MAX, whole

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class LogEnd(Enum):
    """An end of a log, where a read can begin."""

    EARLIEST = "earliest"
    """The first record that was not truncated."""

    LATEST = "latest"
    """The place after the last record that is durable now; only later records are read."""


class TxId(NamedTuple):
    """A transaction id; a read begins at the first record with at least this id."""

    value: int


Start = LogEnd | Position | TxId | datetime | int
"""The start of a read: an end, a position, a transaction id, a time with its zone, or a sequence number."""


class LogReader(RecordSource):
    """Reads a log in order; made by ``Log.reader``.

    An iteration ends with the last present record; with ``follow``, only when the log is sealed or this reader is
    closed. Every record is checked to follow the one before it, so each record that is skipped raises an error or is
    counted in ``skipped``.

    Threads: one at a time; ``close`` from any. A read that is cancelled or fails returns no record, and the next read
        continues at ``seq``.

    Attributes:
        skipped: The number of records that this reader skipped because they were truncated before it read them.
    """

    def __init__(self, steps: LedgerSteps, seq: int, *, follow: bool, strict: bool) -> None:
        """Use ``Log.reader`` instead."""
        self._steps = steps
        self._follow = follow
        self._strict = strict
        self._ready: Iterator[LogRecord] = iter(())
        self._seq = seq
        self._closed = self._drained_all = False
        self._unsure = False
        """True if records may have been read and not returned, as after a read that was cancelled or failed."""
        self.skipped = 0
        self._seen = -1
        """``changes`` of the log's record when it was last looked at for truncation."""
        steps.watch_truncation()
        self._reader = self._opened(seq)
        in_children(self, LogReader._disable)

    def _disable(self) -> None:
        """Forget in a forked child what was read; the next read looks at the log, which raises."""
        self._ready, self._unsure = iter(()), True

    def _opened(self, seq: int) -> RecordReader:
        """Begin to read at a record, or at the first one that was not truncated since."""
        while True:
            try:
                reader = RecordReader(self._steps, seq)
            except TruncatedError as error:
                if self._strict:
                    raise
                self.skipped += error.first_seq - seq
                seq = error.first_seq
                continue
            self._seq = seq
            return reader

    def _reopen(self, seq: int) -> None:
        """Continue at a record, unless this is closed meanwhile."""
        before = self._reader
        self._reader = reader = self._opened(seq)
        self._unsure = False
        if self._closed:
            reader.close()
        before.close()

    def __repr__(self) -> str:
        """Name the log and the record that is read next."""
        return f"<LogReader of {self._steps.name!r} at {self.seq}{', closed' if self._closed else ''}>"

    # ---- position ------------------------------------------------------------------------------------------------

    @property
    def seq(self) -> int:
        """The sequence number of the next record."""
        return self._seq

    def lag(self) -> int:
        """Return the number of records that can be read now and were not read yet.

        Cost: Reads one entry.
        """
        return max(0, self._steps.last_seq() + 1 - self._seq)

    lag_async = asyncio_form(lag)

    def caught_up(self) -> bool:
        """Return whether all records that can be read now were read, as after a ``read`` that returned None."""
        return self.lag() == 0

    caught_up_async = asyncio_form(caught_up)

    def seek(self, start: Start) -> None:
        """Continue from another place; arguments and errors as for ``Log.reader``."""
        self._check_open()
        self._reopen(seq_of(self._steps, start))
        self._ready = iter(())

    seek_async = asyncio_form(seek)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read_many(self, most: int, timeout: float | None = None) -> list[LogRecord]:
        """Return the next records, at least one and at most ``most``; the call waits for one record only.

        Args:
            most: The most records to return.
            timeout: Seconds to wait for a record; 0 or less does not wait; None waits without a limit.

        Returns:
            The records; an empty list if none came in time.

        Raises:
            LogSealedError: The log was sealed, and all its records were read.
            NoSuchLogError: The log was deleted or renamed; records that were read before may still be returned.
            TruncatedError: The next record was truncated, and the reader is strict.
            CorruptError: A record is damaged or missing. DigestMismatchError, if it was changed.
            ClosedError: This reader or its log was closed.
        """
        wanted, seconds = whole_from(most, 1, "most", "a number of records", INT64_MAX), seconds_of(timeout)
        self._look()
        while not (found := self._taken(wanted)):
            if not self._fill(seconds):
                return []
            self._look()
        return found

    async def read_many_async(self, most: int, timeout: float | None = None) -> list[LogRecord]:
        """Read as ``read_many`` does, without blocking the event loop; no thread is held while this waits."""
        wanted, seconds = whole_from(most, 1, "most", "a number of records", INT64_MAX), seconds_of(timeout)
        await self._look_async()
        while not (found := self._taken(wanted)):
            if not await self._fill_async(seconds):
                return []
            await self._look_async()
        return found

    def _look(self) -> None:
        """Forget what was read, if the log was truncated after the next record since; a change was noticed then."""
        changes = self._steps.changes
        if changes != self._seen:
            if not self._closed and self._steps.kept_from() > self._seq:
                self._ready, self._unsure = iter(()), True
            self._seen = changes

    async def _look_async(self) -> None:
        """Look as ``_look`` does, in a thread."""
        if self._steps.changes != self._seen:
            await in_thread(self._look)

    def _taken(self, most: int) -> list[LogRecord]:
        """Return records that were read already."""
        self._check_open()
        found = list(islice(self._ready, most))
        if found:
            self._seq = found[-1].position.seq + 1
        return found

    def _fill(self, seconds: float | None) -> bool:
        """Read the records that come next, to be taken; False if none came in time.

        After a read that was cancelled or failed, or if the next record was truncated, the next call only finds the
        place to continue at, which may be beyond all present records.
        """
        if self._unsure:
            self._jump()
            return True
        self._unsure = True
        try:
            found = self._reader.read(timeout=seconds)
        except TruncatedError:
            return True
        self._unsure = False
        return self._filled(found)

    async def _fill_async(self, seconds: float | None) -> bool:
        """Read as ``_fill`` does, without blocking the event loop."""
        if self._unsure:
            await in_thread(self._jump)
            return True
        self._unsure = True
        try:
            found = await self._reader.read_async(timeout=seconds)
        except TruncatedError:
            return True
        self._unsure = False
        return self._filled(found)

    def _filled(self, records: Records | None) -> bool:
        """Keep records to be taken; returns whether there are any."""
        if records is not None:
            self._ready = log_records(records, name=self._steps.name)
            return True
        if self._reader.is_over:
            raise LogSealedError(f"log {self._steps.name!r} was sealed after record {self._seq - 1}; there are no more")
        self._check_open()
        return False

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"log {self._steps.name!r}, or this reader of it, was closed; make another reader")

    def _jump(self) -> None:
        """Continue with the next record, or the first that was not truncated; raises then if this is strict."""
        self._reopen(self._seq)

    def __iter__(self) -> Iterator[LogRecord]:
        """Yield the next records."""
        last = SEQ_MAX if self._follow else self._steps.last_seq()
        while self._seq <= last:
            self._look()
            yield from self._drained(last)
            try:
                if self._seq <= last and self._drained_all:
                    self._fill(None)
            except LogSealedError:
                return

    async def __aiter__(self) -> AsyncIterator[LogRecord]:
        """Yield the next records, without blocking the event loop."""
        last = SEQ_MAX if self._follow else await in_thread(self._steps.last_seq)
        while self._seq <= last:
            await self._look_async()
            for record in self._drained(last):
                yield record
            try:
                if self._seq <= last and self._drained_all:
                    await self._fill_async(None)
            except LogSealedError:
                return

    def _drained(self, last: int) -> Iterator[LogRecord]:
        """Yield records that were read already, up to ``last``, until a ``seek`` or a change of the log comes."""
        ready, self._drained_all = self._ready, False
        while self._seq <= last and ready is self._ready and self._steps.changes == self._seen:
            record = next(ready, None)
            if record is None:
                self._drained_all = True
                return
            self._seq = record.position.seq + 1
            yield record

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the reader; a call that waits for records raises ClosedError."""
        self._closed = True
        self._reader.close()


def seq_of(steps: LedgerSteps, start: Start) -> int:
    """Return the sequence number of the record at a place.

    Raises:
        UsageError: It is of a wrong type, or a time without a zone.
        CorruptError: The record could not be found, because others are damaged or missing.
    """
    match start:
        case LogEnd.EARLIEST:
            return steps.existing().record.first_seq
        case LogEnd.LATEST:
            return steps.last_seq() + 1
        case TxId(value) if (txid := whole(value)) is not None:
            return first_seq_of_txid(steps, txid)
        case datetime() if start.tzinfo is not None:
            since = start - _EPOCH
            return first_seq_at_time(steps, (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000)
    if isinstance(start, datetime):
        raise UsageError(f"start is {start}, without a time zone; give it one, such as datetime.now(tz=UTC)")
    seq = whole(start.seq if isinstance(start, Position) else start)
    if seq is None or not 0 <= seq <= SEQ_MAX:
        raise UsageError(
            f"start is {start!r:.50}; it takes LogEnd.EARLIEST or LATEST, a Position, a TxId, a sequence number from 0 "
            "up, or a datetime with a time zone"
        )
    return seq
