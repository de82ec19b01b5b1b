"""Reads the records of a log in order, over the ledgers of its segments, while a writer appends.

A reader knows the next sequence number and never skips one: each entry names its records, and an entry that does not
continue where the one before ended counts as damage. The reader moves to the next segment only when the list's record
has the end of the present one.

    at rest in no segment --record lists one--> reading a ledger --read to its last record--> in no segment
          |                                        |  ^
          +-- the log is sealed: the end           +--+ no more entries: wait for the ledger or the record to change

If the log was cut before the reader's position, records that it returned may be void, and ``RewoundError`` has the
first of them. Truncations and cuts are noticed at the next read, and between two records of one read if they are
yielded through ``kept``: in the process that made the change at once, in another process when the change is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Final

from pybk.deferral import asyncio
from pybk.errors import (
    ClosedError,
    CorruptError,
    NoSuchLedgerError,
    PybkError,
    RewoundError,
    TruncatedError,
    UsageError,
)
from pybk.manager.ledger_reader import LedgerReader, position_of, woken_by
from pybk.streams.format import Records, decode_batch
from pybk.streams.ledger_steps import DAMAGE, FIRST_ENTRY, LedgerSteps, first_seq_of
from pybk.streams.list_record import SEQ_MAX, ListRecord, Segment
from pybk.streams.log_record import WalRecord
from pybk.streams.record_damage import first_damaged, missing_error, next_sound, unreadable_error
from pybk.threads.call_threads import WakeUp, call_in, in_thread

READ_BYTES: Final = 4 << 20
"""Entry bytes that are read and verified at a time, unless the caller says otherwise."""

_ROLL_SECONDS: Final = 0.1
"""The interval of looks for records in the second open segment."""


class RecordReader:
    """A position in a log.

    Args:
        steps: The steps of the log.
        seq: The first record to return; None for the first that was not truncated.
        generation: The generation of the record before ``seq``, by which a cut before it is noticed; None for the
            present one.
        read_bytes: Entry bytes that are read and verified at a time; None for ``READ_BYTES``.

    Raises:
        UsageError: The log has not reached that generation yet.

    Attributes:
        seq: The next record.
        generation: The generation of the log as of the last look at its record.

    Threads: one at a time; ``close`` from any.
    """

    def __init__(
        self, steps: LedgerSteps, seq: int | None, generation: int | None = None, *, read_bytes: int | None = None
    ) -> None:
        self._steps = steps
        self._read_bytes = READ_BYTES if read_bytes is None else read_bytes
        steps.watch_truncation()
        self._seen = steps.changes
        """``changes`` of the log's record when it was last looked at."""
        self._record = record = self._steps.existing().record
        if generation is not None and generation > record.generation:
            raise UsageError(
                f"generation is {generation}; log {record.name!r} is of generation {record.generation}: give one that "
                "the log has had"
            )
        self.generation = record.generation if generation is None else generation
        self.seq = record.first_seq if seq is None else seq
        self._check(record)
        self._segment: Segment | None = None
        self._reader: LedgerReader | None = None
        self._entry, self._entry_seq = FIRST_ENTRY, self.seq
        """The next entry, and its first record."""
        self._segment_seq = self.seq
        """The first record of the segment."""
        self._entries_least = 1
        """The least number of entries to read next."""
        self._closed = False
        self._wake: Callable[[], None] | None = None
        """Wakes the ``read`` that waits."""

    def close(self) -> None:
        """Close the ledger; a ``read`` that waits returns None."""
        self._closed = True
        if self._reader is not None:
            self._reader.close()
        if self._wake is not None:
            self._wake()

    def skip_to(self, seq: int) -> None:
        """Make ``read`` return a later record next."""
        self.seq = seq
        self._entries_least = 1
        if self._reader is None or self._segment is None:
            return
        if self._segment.last_seq is None or seq <= self._segment.last_seq:
            self._entry, self._entry_seq = self._entry_of(self._reader)
        else:
            self._reader.close()
            self._reader = None

    @property
    def is_over(self) -> bool:
        """True if the log is sealed and read to its end."""
        return self._record.sealed and self.seq >= self._record.end_seq

    def check_over(self) -> None:
        """Raise ClosedError if reading ended because this was closed, and not because the log is sealed."""
        if self._closed and not self.is_over:
            raise ClosedError(f"log {self._record.name!r} was closed or promoted here while it was read; read it again")

    # ---- the record ----------------------------------------------------------------------------------------------

    def _look(self) -> ListRecord:
        """Read the record again, and check that this position is still in the log."""
        self._seen = self._steps.changes
        self._record = record = self._steps.existing().record
        self._check(record)
        return record

    def _check(self, record: ListRecord) -> None:
        self._check_place(record, self.seq, self.seq - 1)
        self.generation = max(self.generation, record.generation)

    def _check_place(self, record: ListRecord, seq: int, last: int) -> None:
        """Raise unless the log has a place: it was not truncated after ``seq``, nor cut before ``last``."""
        kept = record.kept_of(self.generation)
        if last > kept:
            raise RewoundError(
                f"log {record.name!r} was cut after record {kept}, before {last + 1}; read from {kept + 1} again",
                seq=kept,
            )
        if seq < record.first_seq:
            raise TruncatedError(
                f"record {seq} of log {record.name!r} was truncated; reads begin at {record.first_seq}",
                first_seq=record.first_seq,
            )

    def kept(self, records: Iterable[WalRecord]) -> Iterator[WalRecord]:
        """Yield records that were read last, each only if the log still has it.

        Raises:
            TruncatedError: The next record was truncated since the read.
            RewoundError: The log was cut before the next record.
        """
        seen, changed = self._seen, None
        for record in records:
            if seen != self._steps.changes:
                seen = self._steps.changes
                changed = self._steps.existing().record
            if changed is not None:
                self._check_place(changed, record.lsn, record.lsn)
            yield record

    # ---- reading -------------------------------------------------------------------------------------------------

    def read(self, *, timeout: float | None = 0.0, last: int = SEQ_MAX) -> Records | None:
        """Return the next records, at least one.

        Args:
            timeout: Seconds to wait for a record; None waits without a limit.
            last: The last record that is wanted.

        Returns:
            The records. None if none came in time, if the log is sealed and at its end, or if all up to ``last`` were
            returned.

        Raises:
            TruncatedError: The next record was truncated.
            RewoundError: The log was cut before the next record.
            CorruptError: A record is missing or damaged.
        """
        found = self._found(last)
        deadline = None if timeout is None else time.monotonic() + timeout
        changed = WakeUp()
        while found is None and self._may_come(last):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            changed.sleep()
            with self.woken_by(changed.wake) as is_woken:  # before the look, so that no change is missed in between
                found = self._found(last)
                if found is None and is_woken() and self._may_come(last):
                    changed.wait(self.patience(left))
        return found

    async def read_async(self, *, timeout: float | None = 0.0, last: int = SEQ_MAX) -> Records | None:
        """Read as ``read`` does; a thread reads and verifies, but no thread is held during a wait."""
        found = await in_thread(self._found, last)
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        deadline = None if timeout is None else loop.time() + timeout

        def wake() -> None:
            call_in(loop, changed.set)

        while found is None and self._may_come(last):
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return None
            changed.clear()
            with self.woken_by(wake) as is_woken:
                found = await in_thread(self._found, last)
                if found is None and is_woken() and self._may_come(last):
                    with suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), self.patience(left))
        return found

    def patience(self, left: float | None) -> float | None:
        """Return the seconds to wait before the next look.

        A roll that cannot close the old ledger leaves two open ones; the reader waits for the first only.
        """
        if len(self._record.open_segments) < 2:
            return left
        return _ROLL_SECONDS if left is None else min(left, _ROLL_SECONDS)

    def _may_come(self, last: int) -> bool:
        """Return whether records up to ``last`` may come yet."""
        return self.seq <= last and not self._closed and not self.is_over

    def _found(self, last: int) -> Records | None:
        """Return the next records if there are any, looking anew; None if this was closed meanwhile."""
        while True:
            if self._seen != self._steps.changes:
                self._look()
            try:
                return self._read_now(last)
            except ClosedError:
                if not self._closed:
                    raise
                return None
            except NoSuchLedgerError as error:
                record = self._look()  # raises if the next record was truncated or cut
                if self._reader is None or self._segment is None:
                    raise
                listed = self._listed(record, self._segment)
                if listed is not None:
                    raise missing_error(self._steps, listed, self.seq) from error
                self._reader.close()  # the segment was read to its end and truncated since, or merged with others
                self._reader = None

    def _listed(self, record: ListRecord, segment: Segment) -> Segment | None:
        """Return a segment as a record lists it; None if it was removed, or merged with others into another ledger."""
        found = self._steps.segment_numbered(record, segment.number)
        return found if found is not None and found.ledger_id == segment.ledger_id else None

    def _read_now(self, last: int) -> Records | None:
        """Return the next records if there are any, looking anew."""
        while self.seq <= last and not self._closed and (self._reader is not None or self._enter()):
            reader, segment = self._reader, self._segment
            assert reader is not None
            assert segment is not None
            most, final = position_of(reader, self._entry)
            if self._entry <= most:
                found = self._records(reader, segment, most, last)
                if found is not None and found.complete:
                    return found
                if found is not None or self._reader is not reader:
                    continue
                # These entries are the beginning of a transaction; there may be more of it by now.
                again, final = position_of(reader, most + 1)
                if again > most:
                    continue
            if not (final and self._leave()) and not self._move_on(segment):
                return None
        return None

    def _records(self, reader: LedgerReader, segment: Segment, most: int, last: int) -> Records | None:
        """Return records of the entries that come next, none of them wanted if ``complete`` is 0.

        Returns:
            None if the entries belong to a transaction that is not complete, or if the segment was left.
        """
        last = min(last, SEQ_MAX if segment.last_seq is None else segment.last_seq)
        if self.seq > last:
            self._leave()
            return None
        nbytes, entries = self._read_bytes, self._entries_to(last)
        where = f"{self._steps.title}, segment {segment.number}, ledger {reader.ledger_id}"
        damage: PybkError | None = None
        while True:
            end = min(most, self._entry + entries - 1)
            try:
                batch = reader.read_batch(self._entry, max_bytes=nbytes, last=end)
            except DAMAGE as error:
                if self._steps.has_own_remedy(error):
                    raise
                damaged = first_damaged(reader, self._entry, end)
                damage = unreadable_error(self._steps, reader, segment, damaged, self.seq, error)
                if damaged == self._entry:
                    raise damage from error
                most = damaged - 1
                continue
            records = decode_batch(batch, self._entry_seq, where=where, segment=segment.number, origin=segment.origin)
            if records.complete:
                break
            if int(batch.entry_ids[-1]) >= most:
                if damage is not None:  # it is in the transaction that comes next
                    raise damage
                return None
            nbytes, entries = nbytes * 4, entries * 4
        self._entries_least = entries * 4  # if that was too few, as entries hold fewer records here
        self._entry += records.entries
        self._entry_seq = records.first_seq + records.complete
        self._steps.places.learn(reader.ledger_id, self._entry_seq, self._entry)
        found = records.within(self.seq, last)
        self.seq += found.complete
        return found

    def _entries_to(self, last: int) -> int:
        """Return in how many entries the records up to one are, as those before it in the segment suggest."""
        before = self._entry - FIRST_ENTRY
        records_each = (self._entry_seq - self._segment_seq) / before if before else 1
        likely = int((last - self._entry_seq) / max(records_each, 1)) + 1
        return min(last - self.seq + 1, max(likely, self._entries_least))

    def _enter(self) -> bool:
        """Enter the segment that holds the next record; returns whether there is one."""
        while True:
            record = self._record
            segment = self._steps.segment_of(record, self.seq)
            if segment is not None and self._open(segment):
                return True
            if self._look() == record:
                if segment is not None and not segment.is_open:
                    raise missing_error(self._steps, segment, self.seq)
                return segment is not None and self._move_on(segment)

    def _entry_of(self, reader: LedgerReader) -> tuple[int, int]:
        """Return the last entry that begins with the next record or before it, and its first record."""
        places = self._steps.places
        known, known_after = places.around(reader.ledger_id, self.seq)
        low_seq, low = known or (self._segment_seq, FIRST_ENTRY)
        origin = None if self._segment is None else self._segment.origin
        high = known_after or reader.last_add_confirmed + 1
        while low_seq < self.seq and low + 1 < high:
            middle = (low + high) // 2
            found = next_sound(reader, middle, high, origin)
            if found is not None:
                places.learn(reader.ledger_id, found.seq, found.entry)
            if found is not None and found.seq <= self.seq:
                low_seq, low = found
            else:
                high = middle
        return low, low_seq

    def _move_on(self, segment: Segment) -> bool:
        """Enter the segment that a roll added after an open one, if it holds the next record; returns whether it does.

        Its writer switched to it only when all records of the segment before were acknowledged (rule T3), so those have
        been read, although nothing says yet where the segment before ends.
        """
        following = [each for each in self._look().segments if each.number > segment.number]
        return any(self._open(each) for each in following)

    def _open(self, segment: Segment) -> bool:
        """Enter a segment if it begins with the next record or before it, as the list or its first record says."""
        try:
            reader = self._steps.open_segment(segment)
        except NoSuchLedgerError:
            return False  # it was removed from the list since
        first_seq = segment.first_seq
        if first_seq is None and reader.last_add_confirmed >= FIRST_ENTRY:
            first_seq = self._first_seq(reader, segment)
        if first_seq is None or first_seq > self.seq:
            reader.close()
            return False
        if self._reader is not None:
            self._reader.close()
        self._reader, self._segment = reader, segment
        self._segment_seq = first_seq
        self._entry, self._entry_seq = self._entry_of(reader)
        return True

    def _first_seq(self, reader: LedgerReader, segment: Segment) -> int:
        """Return the first record of an open segment."""
        try:
            return first_seq_of(reader, FIRST_ENTRY)
        except DAMAGE as error:
            if self._steps.has_own_remedy(error):
                raise
            raise unreadable_error(self._steps, reader, segment, FIRST_ENTRY, self.seq, error) from error

    def _leave(self) -> bool:
        """Close the ledger once the record says where its segment ends; returns whether it does.

        Raises:
            CorruptError: The ledger has fewer records than its segment.
        """
        assert self._segment is not None
        assert self._reader is not None
        if self._segment.is_open:
            segment = self._listed(self._look(), self._segment)
            if segment is not None and segment.is_open:
                return False
            self._segment = segment
        ledger_id = self._reader.ledger_id
        self._reader.close()
        self._reader = None
        if self._segment is not None and self._segment.last_seq is not None and self.seq <= self._segment.last_seq:
            raise CorruptError(
                f"ledger {ledger_id} ends before record {self.seq}; segment {self._segment.number} of log "
                f"{self._record.name!r} ends with record {self._segment.last_seq}; restore the ledger"
            )
        return True

    @contextmanager
    def woken_by(self, callback: Callable[[], None]) -> Iterator[Callable[[], bool]]:
        """Call a callback when more records may be readable, until the ``with`` block ends.

        The context is a function: whether that is so; it is not once a look has entered another ledger.
        """
        self._wake = callback
        try:
            reader = self._reader
            with self._steps.woken_by_change(callback), nullcontext() if reader is None else woken_by(reader, callback):
                yield lambda: self._reader is reader
        finally:
            self._wake = None
