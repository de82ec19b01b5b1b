"""``Subscription``: consumes a named log, and records durably which records are acknowledged.

Theory of operation
===================

``Deliveries`` decides which records are handed out, given the state of the cursor; both are guarded by the lock of the
cursor. Fresh records are read in batches into ``_ready``, from which each consumer takes its share.

**Waiting.** Consumers that find no records wait. One of them leads: it alone reads the log, which wakes it. It wakes
the others when it has read a batch, or stops leading. All consumers are woken when records are handed out again, after
a seek and on close, and after an acknowledgement if one of them waits for that. Consumers that wait for bookies are not
woken when another stops leading: they would have each other look again, without a pause.

**Locks.** ``_reading`` is held while the log's reader is used. The lock of the cursor is held for moments, or as long
as the store or bookies take to say where the log ends. They are taken in this order. An event loop does not wait for
either: see ``_take_lock``. A token of its call, and not a lock, marks the consumer that leads, because an interrupt
could leave a lock taken.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, TypeVar

from pybk.deferral import without
from pybk.errors import (
    ClosedError,
    IllegalOperationError,
    LogSealedError,
    RewoundError,
    TooManyRequestsError,
    TruncatedError,
    UsageError,
)
from pybk.manager.append_future import duration_of, seconds_of
from pybk.manager.arguments import whole_from
from pybk.manager.atomic_group import GroupMember, GroupPart
from pybk.manager.handle import fork_error, where_called
from pybk.manager.ledger_manager import backend_of
from pybk.streams.appender import RecordFuture, done_future
from pybk.streams.cursor import Cursor, MemoryCursor
from pybk.streams.cursor_state import checked_properties, merged, ranges_of
from pybk.streams.deliveries import Deliveries, Handed
from pybk.streams.format import HEADERS_MAX, Headers, Position
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import SEQ_MAX, ListKind, cursor_list_name
from pybk.streams.list_writer import RETRY_SECONDS, WITHOUT_BOOKIES
from pybk.streams.log_reader import Start, seq_of
from pybk.streams.log_record import LogRecord, RecordSource, log_records
from pybk.streams.log_writer import LogWriter
from pybk.streams.range_set import Ranges
from pybk.streams.record_reader import RecordReader
from pybk.threads import in_children, renew_locks
from pybk.threads.call_threads import (
    WakeUp,
    asyncio_form,
    begun_in_own_thread,
    begun_in_thread,
    call_in,
    in_own_thread,
    in_thread,
)
from pybk.values import INT64_MAX, whole

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAX_UNACKED: Final = 10_000
LEASE_RECORDS: Final = 1000
"""Records that may be handed out for the first time after one record of the cursor."""

_WARN_AT: Final = 0.8
"""The part of ``max_unacked`` from which on a warning is logged."""

Acked = LogRecord | Position | int | range
"""Acknowledged records: a record, the position or the sequence number of one, or a range of sequence numbers."""


class SubscriptionMode(StrEnum):
    """The number of consumers that a subscription may have."""

    EXCLUSIVE = "exclusive"
    """One consumer at a time, which may acknowledge all records up to one."""

    SHARED = "shared"
    """Any number of threads and tasks, each of which gets other records."""


class DeadLetters(NamedTuple):
    """The log for records that were handed out too often without an acknowledgement.

    If a process dies while it holds records, it is not known which of them killed it. So the last delivery of a record
    hands it out alone. Of the other records that the process held, only those go to the dead letters that other threads
    or tasks held by their own last deliveries.

    Such a record is appended to the dead letters with its key, headers and event time, and with the headers
    ``pybk.log``, ``pybk.seq`` and ``pybk.deliveries`` if these fit; then it is acknowledged. A crash in between may
    leave it there twice.

    Attributes:
        writer: The writer of the log that takes them.
        max_deliveries: The most deliveries of a record, at least 1, over all opens of the subscription with dead
            letters, even after its process was killed. First deliveries are recorded in advance, for 1 000 records at a
            time. So if the process is killed, up to 1 000 records that were not handed out count as handed out once.
            Each further delivery is recorded before it is made, which costs a synced write for each call that reads. If
            ``max_deliveries`` is 1, each first delivery is recorded as well. ``rewind`` counts as a delivery; after
            ``seek`` the counts begin again. If the subscription is not durable, or the feature level is below STREAMS,
            the counts are in memory, and begin again at each open.
    """

    writer: LogWriter
    max_deliveries: int = 5


@dataclass(frozen=True, slots=True)
class Consuming:
    """The way in which a subscription hands out records: arguments of ``Log.subscribe``, which documents them.

    Raises:
        UsageError: An argument is invalid.
    """

    mode: str
    ack_timeout: float | None
    max_unacked: int
    dead_letters: DeadLetters | None

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.mode not in SubscriptionMode.__members__.values():
            raise UsageError(f"mode is {self.mode!r:.20}; it takes 'exclusive' or 'shared'")
        whole_from(self.max_unacked, 1, "max_unacked", "a number of records")
        seconds = seconds_of(self.ack_timeout, "ack_timeout")
        if seconds is not None and seconds <= 0:
            raise UsageError(f"ack_timeout is {seconds!r:.50}; it takes seconds above 0, or None")
        if self.dead_letters is not None:
            _check_dead_letters(self.dead_letters)


def _check_dead_letters(given: object) -> None:
    if not isinstance(given, DeadLetters):
        raise UsageError(f"dead_letters is {given!r:.50}; it takes DeadLetters(writer), or None")
    if not isinstance(given.writer, LogWriter):
        raise UsageError(f"writer is {given.writer!r:.50}; dead letters take a LogWriter: DeadLetters(log.writer())")
    whole_from(given.max_deliveries, 1, "max_deliveries", "a number of deliveries", SEQ_MAX)


class SubscriptionStats(NamedTuple):
    """Figures of a subscription; counts begin when it was opened.

    Attributes:
        first_unacked: The first record that is not acknowledged.
        backlog: Records in the log that are not acknowledged.
        outstanding: Records that were handed out and are not acknowledged.
        ranges: Acknowledged ranges after the first record that is not acknowledged.
        delivered: The number of times that records were handed out.
        redelivered: The number of times that records were handed out again.
        dead: Records that went to the dead letters.
        truncated: Records that the log dropped before they were acknowledged.
    """

    first_unacked: int
    backlog: int
    outstanding: int
    ranges: int
    delivered: int
    redelivered: int
    dead: int
    truncated: int


class _Token:
    """Stands for one call; a seat that it holds is free once the token is dropped.

    Attributes:
        looked: When the call began to look for records last, seconds of the monotonic clock.
    """

    __slots__ = ("__weakref__", "looked")

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        """Note that the call looks for records from now on."""
        self.looked = time.monotonic()


class _Seat:
    """Held by one call at a time. An interrupt at any moment ends the call, and with its token the hold.

    Args:
        freed: Called when it is free again.
    """

    def __init__(self, freed: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._holder: weakref.ref[_Token] | None = None
        self._freed = freed

    def take(self, token: _Token) -> bool:
        """Hold it; returns False if another call does."""
        with self._lock:
            if self._holder is not None and self._holder() is not None:
                return False
            self._holder = weakref.ref(token, lambda _: self._freed())
            return True

    def release(self, token: _Token) -> None:
        """Let go of it, unless another call holds it."""
        with self._lock:
            if self._holder is None or self._holder() is not token:
                return
            self._holder = None
        self._freed()


class Taken(NamedTuple):
    """Records that were handed out together.

    Attributes:
        records: The records.
        handed: The deliveries by which they were handed out.
    """

    records: list[LogRecord]
    handed: list[Handed]

    @property
    def held(self) -> Iterator[tuple[int, int]]:
        """Each record, and the number of its delivery."""
        return ((seq, each.number) for each in self.handed for seq in range(each.first, each.end))


class _Batch(NamedTuple):
    """Acknowledgements of one turn of an event loop, which become durable together.

    Attributes:
        ranges: The ranges that they acknowledge, in any order.
        properties: The properties that they set.
        waiters: One for each of them.
    """

    ranges: Ranges
    properties: dict[str, int | str]
    waiters: list[asyncio.Future[None]]

    def finish(self, error: BaseException | None) -> None:
        """Wake the tasks that wait."""
        for waiter in self.waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)


_NOTHING: Final = Taken([], [])


@without(clear="use skip_all()")
class Subscription(RecordSource):
    """Consumes a log: records are handed out until they are acknowledged; made by ``Log.subscribe``.

    Example::

        with log.subscribe("billing") as subscription:
            for record in subscription:
                bill(record.data)
                subscription.ack(record)

    Every record is handed out at least once; an acknowledgement that has returned is never lost. After another open,
    all records that are not acknowledged are handed out again.

    Threads: any for a shared subscription; of an exclusive one, one at a time for ``read``, ``read_many`` and
        iteration. Signal handlers must not acknowledge.
    """

    def __init__(self, steps: LedgerSteps, cursor: Cursor | MemoryCursor, how: Consuming) -> None:
        """Use ``Log.subscribe`` instead."""
        self.name: Final = cursor.name
        self.mode: Final = SubscriptionMode(how.mode)
        self._steps = steps
        self._cursor = cursor
        self._lock = cursor.lock
        self._deliveries = Deliveries(cursor.state, ack_timeout_s=how.ack_timeout, max_unacked=how.max_unacked)
        if cursor.counts:
            self._deliveries.resume()
        self._dead_letters = dead_letters = how.dead_letters
        self._max_unacked = how.max_unacked
        self._alone = dead_letters.max_deliveries - 1 if dead_letters is not None and cursor.counts else None
        """The number of deliveries after which the next one is a record's last; None without dead letters or recorded
        counts."""
        self._warned = False
        self._reader: RecordReader | None = None
        self._ready: list[LogRecord] = []
        self._ready_first = self._ready_end = 0
        """The first record of ``_ready``, and the one after its last."""
        self._moves = 0
        """The number of times that the records which were read ahead became void."""
        self._consuming = _Seat(self._wake_all)
        self._leading = _Seat(self._wake_waiting)
        self._reading = threading.Lock()
        self._wakers: set[Callable[[], None]] = set()
        """Wake the consumers that wait for records."""
        self._pausing: set[Callable[[], None]] = set()
        """Wake the consumers that wait for bookies."""
        self._wake_on_ack = False
        self._batches: dict[asyncio.AbstractEventLoop, _Batch] = {}
        """The acknowledgements of each event loop in its present turn."""
        self._lock_waits: dict[asyncio.AbstractEventLoop, asyncio.Future[None]] = {}
        """For each event loop with tasks that wait for the lock, when it is worth another look."""
        self._counts = dict.fromkeys(("delivered", "redelivered", "dead", "truncated"), 0)
        self._forked = False
        self._seen = -1
        """``changes`` of the log's record when it was last looked at for truncation."""
        steps.watch_truncation()
        in_children(self, Subscription._disable)

    def _disable(self) -> None:
        """Refuse calls in a forked child."""
        self._forked = True
        renew_locks(self._cursor)
        self._lock = self._cursor.lock

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the subscription to other owners; a second call, or one in a forked child, does nothing.

        Consumers that wait raise ClosedError. Records that were handed out and not acknowledged are handed out again
        after the next open.

        Raises:
            LogFencedError: Another process has it.
            IllegalOperationError: Called by a signal handler or a finaliser that interrupted a call of pybk; nothing
                was done.
        """
        if self._forked:
            return
        where_called("Subscription.close()", of_log=True)
        try:
            self._cursor.settle(lambda: self._deliveries.read_seq)
            self._cursor.close()
        finally:
            self._end()

    def delete(self) -> None:
        """Delete the subscription for good; the log keeps no records for it any more."""
        try:
            self._cursor.delete()
        finally:
            self._end()

    delete_async = asyncio_form(delete)

    def _end(self) -> None:
        with self._lock:
            reader, self._ready = self._reader, []
        if reader is not None:
            reader.close()
        self._wake_all()

    @property
    def closed(self) -> bool:
        """True once the subscription was closed or deleted in this process."""
        return self._cursor.closed

    def __repr__(self) -> str:
        """Name the subscription and its log."""
        return f"<Subscription {self.name!r} of log {self._steps.name!r}, {'closed' if self.closed else self.mode}>"

    # ---- what it is ----------------------------------------------------------------------------------------------

    def first_unacked(self) -> int:
        """Return the sequence number of the first record that is not acknowledged."""
        if not (self.closed or self._forked):
            self._look()
        return self._cursor.state.first_unacked

    first_unacked_async = asyncio_form(first_unacked)

    def backlog(self) -> int:
        """Return the exact number of records of the log that are not acknowledged.

        Cost: Reads one entry, unless the log is at rest.
        """
        self._check_open()
        self._look()
        end = self._steps.last_seq() + 1
        with self._lock:
            return self._cursor.state.unacked_count(end)

    backlog_async = asyncio_form(backlog)

    def unacked_ranges(self) -> list[range]:
        """Return the sequence numbers of the records that are not acknowledged, ascending."""
        self._check_open()
        self._look()
        end = self._steps.last_seq() + 1
        with self._lock:
            return [range(*each) for each in self._cursor.state.unacked_ranges(0, end)]

    unacked_ranges_async = asyncio_form(unacked_ranges)

    def oldest_unacked_age(self) -> float:
        """Return the age, by its event time, of the first unacknowledged record: seconds, 0 without such a record.

        Cost: Reads that record.
        """
        seq = self.first_unacked()
        for record in self._load(seq, seq + 1):
            return max(0.0, (time.time_ns() - record.time_ns) / 1e9)
        return 0.0

    oldest_unacked_age_async = asyncio_form(oldest_unacked_age)

    @property
    def properties(self) -> dict[str, int | str]:
        """The properties that acknowledgements have set."""
        with self._lock:
            return dict(self._cursor.state.properties)

    def redeliveries(self, record: Acked) -> int:
        """Return how often a record was handed out again since the first open with dead letters, or since this open."""
        first = seq_of_acked(record)
        with self._lock:
            return self._deliveries.redeliveries(first)

    def is_outstanding(self, record: Acked) -> bool:
        """Return whether a record was handed out, to any consumer, and is not acknowledged."""
        first = seq_of_acked(record)
        with self._lock:
            return self._deliveries.is_outstanding(first)

    def stats(self) -> SubscriptionStats:
        """Return the figures of the subscription."""
        backlog = self.backlog()
        with self._lock:
            state, outstanding = self._cursor.state, self._deliveries.outstanding
            return SubscriptionStats(state.first_unacked, backlog, outstanding, state.range_count, **self._counts)

    stats_async = asyncio_form(stats)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read_many(self, most: int, timeout: float | None = None) -> list[LogRecord]:
        """Return the next records to process, at least one and at most ``most``; the call waits for one record only.

        Records that were handed out before come first, then new ones in order.

        Args:
            most: The most records to return.
            timeout: Seconds to wait for a record, and for bookies or a metadata store that do not answer, which are not
                asked again if that may take longer; 0 does not wait; None waits for a record without a limit, and not
                for bookies.

        Returns:
            The records; an empty list if none came in time.

        Raises:
            TooManyRequestsError: ``max_unacked`` records are outstanding, and none was acknowledged in time.
            LogSealedError: The log was sealed, and all its records are acknowledged.
            CorruptError: A record is damaged or missing. DigestMismatchError, if it was changed.
            EntryUnknownError, LedgerRecoveryError, NotEnoughBookiesError, MetadataUnreachableError: Too few bookies, or
                no metadata store, answered in time; ``retryable`` is set, and no record was skipped.
            ClosedError: The subscription was closed.
            IllegalOperationError: The subscription is exclusive, and another thread or task reads.
            PybkError: A record could not be moved to the dead letters; it is handed out again.
        """
        wanted, deadline = whole_from(most, 1, "most", "a number of records", INT64_MAX), _deadline(timeout)
        token = _Token()
        with self._consumed(token):
            while True:
                try:
                    return self._read_by(deadline, wanted, token)
                except WITHOUT_BOOKIES:
                    if not (pause := _pause(deadline, token)):
                        raise
                changed = WakeUp()
                with self._woken_by(changed.wake, self._pausing):
                    changed.wait(pause)
                token.look()

    def _read_by(self, deadline: float | None, wanted: int, token: _Token) -> list[LogRecord]:
        """Read as ``read_many`` does, once; errors of bookies are raised at once."""
        if (found := self._take(wanted)).records:
            return found.records
        changed = WakeUp()
        with self._woken_by(changed.wake, self._wakers):
            while True:
                changed.sleep()
                token.look()
                if (found := self._take(wanted)).records:
                    return found.records
                with self._led(token) as leads:
                    if (leads or _is_over(deadline)) and self._fetch():
                        continue
                    left = self._left(deadline)
                    if left == 0:
                        return []
                    with self._woken_by_log(changed.wake, leads=leads) as is_woken:
                        if not (leads and self._fetch()) and is_woken():
                            changed.wait(left)

    async def read_many_async(self, most: int, timeout: float | None = None) -> list[LogRecord]:
        """Read as ``read_many`` does, without blocking the event loop; no thread is held while this waits."""
        return (await self._taken_async(most, timeout)).records

    async def _taken_async(self, most: int, timeout: float | None) -> Taken:
        """Read as ``read_many_async`` does."""
        wanted, deadline = whole_from(most, 1, "most", "a number of records", INT64_MAX), _deadline(timeout)
        token = _Token()
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            call_in(loop, changed.set)

        with self._consumed(token):
            while True:
                try:
                    return await self._taken_by(deadline, wanted, token)
                except WITHOUT_BOOKIES:
                    if not (pause := _pause(deadline, token)):
                        raise
                changed.clear()
                with self._woken_by(wake, self._pausing), suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), pause)
                token.look()

    async def _taken_by(self, deadline: float | None, wanted: int, token: _Token) -> Taken:
        """Read as ``_taken_async`` does, once; errors of bookies are raised at once."""
        if (found := await self._take_async(wanted)).records:
            return found
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            call_in(loop, changed.set)

        with self._woken_by(wake, self._wakers):
            while True:
                changed.clear()
                token.look()
                if (found := await self._take_async(wanted)).records:
                    return found
                with self._led(token) as leads:
                    if (leads or _is_over(deadline)) and await in_thread(self._fetch):
                        continue
                    left = await self._left_async(deadline)
                    if left == 0:
                        return _NOTHING
                    with self._woken_by_log(wake, leads=leads) as is_woken:
                        if not (leads and await in_thread(self._fetch)) and is_woken():
                            with suppress(TimeoutError):
                                await asyncio.wait_for(changed.wait(), left)

    @contextmanager
    def _consumed(self, token: _Token) -> Iterator[None]:
        """Keep a second consumer from reading an exclusive subscription."""
        self._check_open()  # a seat that a thread of the parent has taken stays taken in a forked child
        exclusive = self.mode is SubscriptionMode.EXCLUSIVE
        if exclusive and not self._consuming.take(token):
            raise IllegalOperationError(
                f"subscription {self.name!r} is exclusive, and another thread or task reads; subscribe with "
                "mode='shared'"
            )
        try:
            yield
        finally:
            if exclusive:
                self._consuming.release(token)

    @contextmanager
    def _led(self, token: _Token) -> Iterator[bool]:
        """Lead if no other consumer does; yields whether this one leads. Then another one may."""
        leads = self._leading.take(token)
        try:
            yield leads
        finally:
            if leads:
                self._leading.release(token)

    @contextmanager
    def _woken_by(self, wake: Callable[[], None], wakers: set[Callable[[], None]]) -> Iterator[None]:
        """Have a callback called when there may be something to read, until the ``with`` block ends."""
        wakers.add(wake)
        try:
            yield
        finally:
            wakers.discard(wake)

    def _woken_by_log(self, wake: Callable[[], None], *, leads: bool) -> AbstractContextManager[Callable[[], bool]]:
        """Have a callback called when the log may have more records, if this consumer leads.

        The context is a function: whether that is so, and not because the reader entered another ledger meanwhile.
        """
        reader = self._reader
        return reader.woken_by(wake) if leads and reader is not None else nullcontext(lambda: True)

    def _wake_all(self) -> None:
        self._wake_waiting()
        for wake in list(self._pausing):
            wake()

    def _wake_waiting(self) -> None:
        """Wake the consumers that wait for records."""
        for wake in list(self._wakers):
            wake()

    def _left(self, deadline: float | None) -> float | None:
        """Return how long to wait at most, 0 for not any longer, None for no limit.

        Raises:
            TooManyRequestsError: It is over, and too many records are outstanding.
        """
        now = time.monotonic()
        left = None if deadline is None else max(0.0, deadline - now)
        with self._lock:
            due, full = self._deliveries.next_due(), not self._deliveries.room
        if left == 0:
            if full:
                raise TooManyRequestsError(
                    f"subscription {self.name!r}: {self._max_unacked} records are outstanding; acknowledge some, or "
                    "subscribe with a higher max_unacked"
                )
            return left
        if due is not None:
            left = max(0.001, due - now if left is None else min(due - now, left))
        return left if self._reader is None else self._reader.patience(left)

    async def _left_async(self, deadline: float | None) -> float | None:
        """Return what ``_left`` does, without blocking the event loop."""
        await self._take_lock()
        try:
            return self._left(deadline)
        finally:
            self._lock.release()

    async def _take_lock(self) -> None:
        """Take the lock, which others may hold for long, without blocking the event loop; no await while it is held.

        One thread waits for all tasks of the loop.
        """
        loop = asyncio.get_running_loop()
        while not self._lock.acquire(blocking=False):
            waiting = self._lock_waits.get(loop)
            if waiting is None or waiting.done():  # another thread has taken the lock again since
                waiting = self._lock_waits[loop] = begun_in_own_thread(self._wait_for_lock)
                waiting.add_done_callback(partial(self._forget_wait, loop))
            await asyncio.shield(waiting)

    def _forget_wait(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        if self._lock_waits.get(loop) is done:
            del self._lock_waits[loop]

    def _wait_for_lock(self) -> None:
        with self._lock:
            pass

    # ---- handing out ---------------------------------------------------------------------------------------------

    def _take(self, most: int) -> Taken:
        """Hand out records that are there."""
        most = self._most(most)
        while True:
            self._check_open()
            self._look()
            with self._lock:
                again = self._deliveries.take_again(most, time.monotonic(), self._alone)
                lease_end = 0 if again else self._lease_due(most)
                if not again and not lease_end:
                    return self._take_fresh(most)
            if again and (found := self._again(again)).records:
                return found
            if lease_end:
                self._cursor.lease(lease_end)

    def _most(self, most: int) -> int:
        """Return how many records are handed out together at most: 1 if their first delivery is their last."""
        return 1 if self._alone == 0 else most

    def _lease_due(self, most: int) -> int:
        """Return the end of the lease that has to be recorded before records are handed out; 0 for none.

        The caller holds the lock.
        """
        seq = self._deliveries.read_seq
        if seq < self._cursor.leased_end or self._ready_end <= (seq := self._deliveries.skip_acked()):
            return 0
        return seq + (LEASE_RECORDS if self._alone else most)

    async def _take_async(self, most: int) -> Taken:
        """Hand out records that are there; a thread reads those that are handed out again, and the log's record."""
        most = self._most(most)
        await self._take_lock()
        try:
            self._check_open()
            due = self._deliveries.next_due()
            is_due = due is not None and due <= time.monotonic()
            if not is_due and self._steps.changes == self._seen and not self._lease_due(most):
                return self._take_fresh(most)
        finally:
            self._lock.release()
        taking = begun_in_thread(self._take, most)
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            taking.add_done_callback(self._give_back)
            raise

    def _give_back(self, taking: asyncio.Future[Taken]) -> None:
        """Have records handed out again that were handed out to a task which was cancelled meanwhile."""
        if not taking.cancelled() and taking.exception() is None and not self.closed:
            _ = begun_in_own_thread(self._give_back_unless_closed, list(taking.result().held))

    def _give_back_unless_closed(self, held: list[tuple[int, int]]) -> None:
        with suppress(ClosedError):
            give_back(self, held)

    def _take_fresh(self, most: int) -> Taken:
        """Hand out records that were read; the caller holds the lock."""
        end, found = min(self._ready_end, self._cursor.leased_end), list[LogRecord]()
        handed = self._deliveries.take_fresh(most, end, time.monotonic())
        for each in handed:
            found += self._ready[each.first - self._ready_first : each.end - self._ready_first]
        self._counts["delivered"] += len(found)
        if self._deliveries.read_seq >= self._ready_end:
            self._ready = []
        return Taken(found, handed)

    def _again(self, handed: list[Handed]) -> Taken:
        """Return records that are handed out again, without those that go to the dead letters instead."""
        most = SEQ_MAX if self._dead_letters is None else self._dead_letters.max_deliveries
        try:
            for each in handed:
                if each.redeliveries >= most:
                    self._bury(each)
            live = [each for each in handed if each.redeliveries < most]
            found = [record for each in live for record in self._load(each.first, each.end)]
            self._cursor.hand_again(live)
        except BaseException:
            due = time.monotonic() + RETRY_SECONDS
            with self._lock:
                for each in handed:
                    self._deliveries.put_back(each, due)
            raise
        with self._lock:
            self._counts["delivered"] += len(found)
            self._counts["redelivered"] += len(found)
        return Taken(found, live)

    def _bury(self, handed: Handed) -> None:
        """Move records to the dead letters."""
        assert self._dead_letters is not None
        writer = self._dead_letters.writer
        for record in self._load(handed.first, handed.end):
            headers: Headers = (
                ("pybk.log", self._steps.name.encode()),
                ("pybk.seq", b"%d" % record.seq),
                ("pybk.deliveries", b"%d" % handed.redeliveries),
                *record.headers[: HEADERS_MAX - 3],
            )
            try:
                writer.append(record.data, key=record.key, headers=headers, time_ns=record.time_ns)
            except UsageError:  # too long with these headers
                writer.append(record.data, key=record.key, headers=record.headers, time_ns=record.time_ns)
            self._cursor.repair()
            self._cursor.ack([(record.seq, record.seq + 1)], {}, kick=False).result()
            with self._lock:
                self._counts["dead"] += 1

    def _load(self, first: int, end: int) -> list[LogRecord]:
        """Read records again; those that the log has dropped since are counted as acknowledged."""
        with self._lock:
            if self._ready and self._ready_first <= first and end <= self._ready_end:
                return self._ready[first - self._ready_first : end - self._ready_first]
        found: list[LogRecord] = []
        try:
            reader = RecordReader(self._steps, first)
            try:
                while (records := reader.read(last=end - 1)) is not None:
                    found += log_records(records, name=self._steps.name)
            finally:
                reader.close()
        except RewoundError:
            raise
        except TruncatedError as error:
            self._expire()
            return [*found, *(self._load(error.first_seq, end) if error.first_seq < end else ())]
        return found

    def _check_open(self) -> None:
        if self._forked:
            raise fork_error(f"subscription {self.name!r} of log {self._steps.name!r}")
        if self._cursor.closed:
            raise ClosedError(f"subscription {self.name!r} of log {self._steps.name!r} was closed; subscribe again")

    # ---- the log -------------------------------------------------------------------------------------------------

    def _fetch(self) -> bool:
        """Read the fresh records that come next; returns whether it is worth another look."""
        with self._reading:
            with self._lock:
                self._check_open()
                self._warn()
                if not self._deliveries.room:
                    self._wake_on_ack = True
                    return False
                seq, moves = self._deliveries.skip_acked(), self._moves
                if seq < self._ready_end and self._ready:
                    return True
            try:
                found = self._read_from(seq)
            except RewoundError:
                raise
            except TruncatedError:
                self._expire()
                return True
            with self._lock:
                if found and self._moves == moves:
                    self._ready, self._ready_first = found, seq
                    self._ready_end = seq + len(found)
            return bool(found)

    def _read_from(self, seq: int) -> list[LogRecord]:
        """Read records from one on; the caller holds ``_reading``."""
        if self._reader is None or self._reader.seq != seq:
            before, self._reader = self._reader, RecordReader(self._steps, seq)
            if before is not None:
                before.close()
        records = self._reader.read()
        if records is not None:
            return list(log_records(records, name=self._steps.name))
        with self._lock:
            self._check_open()
            if self._reader.is_over:
                if not self._deliveries.outstanding:
                    raise LogSealedError(f"log {self._steps.name!r} was sealed, and all its records are acknowledged")
                self._wake_on_ack = True
        return []

    def _look(self) -> None:
        """Count records that the log has dropped as acknowledged, if a change of the log was noticed."""
        changes = self._steps.changes
        if changes != self._seen:
            if self._steps.kept_from() > self._cursor.state.first_unacked:
                self._expire()
            self._seen = changes

    def _expire(self) -> None:
        """Count records that the log has dropped as acknowledged, and continue with the first that it has."""
        lost = self._cursor.expire()
        with self._lock:
            self._void()
            self._counts["truncated"] += lost
        if lost:
            logger.warning("subscription %r: log %r dropped %d records of it", self.name, self._steps.name, lost)

    def _void(self) -> None:
        """Forget what was read; the caller holds the lock."""
        self._moves += 1
        self._ready, self._ready_first, self._ready_end = [], 0, 0

    def _warn(self) -> None:
        """Log once that many records are outstanding; the caller holds the lock."""
        part = self._deliveries.outstanding / self._max_unacked
        if part >= _WARN_AT and not self._warned:
            logger.warning(
                "subscription %r of log %r: %d of at most %d records are outstanding",
                self.name,
                self._steps.name,
                self._deliveries.outstanding,
                self._max_unacked,
            )
        self._warned = part >= _WARN_AT or (self._warned and part >= _WARN_AT / 2)

    # ---- acknowledging -------------------------------------------------------------------------------------------

    def ack(self, records: Acked | Iterable[Acked], *, properties: Mapping[str, int | str] | None = None) -> None:
        """Acknowledge records, which are then not handed out again, and wait until that is durable.

        Args:
            records: Any number of records; without any, nothing is done, and properties are refused. At most
                ``max_unacked`` of them may be records that were not handed out. Records that are acknowledged already
                may be among them.
            properties: Properties that are set together with the acknowledgement, all or nothing after a crash; other
                properties stay. So an application can store its progress elsewhere, such as an offset, together with
                the acknowledgement.

        Raises:
            LogFencedError: Another process has taken the subscription. With ``outcome_unknown`` the acknowledgement
                may have happened.
            StorageFullError: There is not enough free space; the records are handed out again after another open.
            StorageFailedError: Writing failed; whether the acknowledgement was stored is unknown.
            TooManyRequestsError: There would be too many ranges of records that were not handed out; nothing was done.
            UsageError: A record does not exist; nothing was done.

        Durability: On return it is on disk; in a cluster, on the disks of an ack quorum.
        Cost: One synced write for any number of records, shared with all appends to the store meanwhile.
        """
        self._acknowledge(ranges_of_acked(records), properties, kick=False).result()

    def ack_async(
        self, records: Acked | Iterable[Acked], *, properties: Mapping[str, int | str] | None = None
    ) -> RecordFuture[int]:
        """Acknowledge as ``ack`` does, without waiting for it to be durable.

        While bookies do not answer, it waits for them as long as ``bookie_patience_seconds``: in an event loop take
        ``ack_coro``.

        Returns:
            A future of the number of records that were not acknowledged before: ``result()``, or ``await`` it.
        """
        return self._acknowledge(ranges_of_acked(records), properties, kick=True)

    async def ack_coro(
        self, records: Acked | Iterable[Acked], *, properties: Mapping[str, int | str] | None = None
    ) -> None:
        """Acknowledge as ``ack`` does, without blocking the event loop.

        Cost: All acknowledgements of one turn of the event loop become durable together, as one record of the cursor.
        """
        ranges = ranges_of_acked(records)
        await self._take_lock()
        try:
            at_once = _end_of(ranges) <= self._deliveries.read_seq  # else the log is looked at
            if at_once:
                self._check(ranges, properties)
        finally:
            self._lock.release()
        if not at_once:
            await in_own_thread(self._check, ranges, properties)
        if ranges:
            await self._joined(ranges, properties)

    def _joined(self, ranges: Ranges, properties: Mapping[str, int | str] | None) -> asyncio.Future[None]:
        """Acknowledge records together with others that the event loop acknowledges before it calls ``_flush``."""
        loop = asyncio.get_running_loop()
        batch = self._batches.get(loop)
        if batch is not None and properties:
            checked_properties({**self._cursor.state.properties, **batch.properties, **properties})
        if batch is None:
            batch = self._batches[loop] = _Batch([], {}, [])
            loop.call_soon(self._flush, loop)
        batch.ranges.extend(ranges)
        batch.properties.update(properties or {})
        waiter = loop.create_future()
        batch.waiters.append(waiter)
        return waiter

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make one record of all acknowledgements of a turn of the event loop; called in that loop."""
        batch = self._batches.pop(loop)
        ranges, future = merged(batch.ranges), None
        if self._lock.acquire(blocking=False):
            try:
                future = self._acknowledge_at_once(ranges, batch.properties)
            except Exception as error:  # noqa: BLE001  # passed to those that wait
                batch.finish(error)
                return
            finally:
                self._lock.release()
        if future is None:
            acknowledging = begun_in_own_thread(self._acknowledge_durably, ranges, batch.properties)
            acknowledging.add_done_callback(lambda done: batch.finish(done.exception()))
        else:
            future.add_done_callback(lambda done: batch.finish(done.exception()))

    def _acknowledge_durably(self, ranges: Ranges, properties: Mapping[str, int | str]) -> None:
        self._acknowledge(ranges, properties, kick=True).result()

    def ack_through(self, record: Acked, *, properties: Mapping[str, int | str] | None = None) -> None:
        """Acknowledge all records up to one, and that one; errors as for ``ack``.

        Raises:
            IllegalOperationError: The subscription is shared, so other consumers may have some of them.
        """
        self._acknowledge(self._through(record), properties, kick=False).result()

    def ack_through_async(
        self, record: Acked, *, properties: Mapping[str, int | str] | None = None
    ) -> RecordFuture[int]:
        """Acknowledge as ``ack_through`` does, without waiting for it to be durable; returns as ``ack_async``."""
        return self._acknowledge(self._through(record), properties, kick=True)

    async def ack_through_coro(self, record: Acked, *, properties: Mapping[str, int | str] | None = None) -> None:
        """Acknowledge as ``ack_through`` does, without blocking the event loop."""
        through = self._through(record)
        await self.ack_coro([range(*each) for each in through], properties=properties)

    def _through(self, record: Acked) -> Ranges:
        if self.mode is SubscriptionMode.SHARED:
            raise IllegalOperationError(
                f"subscription {self.name!r} is shared, so other consumers may have earlier records; acknowledge each"
            )
        ranges = ranges_of_acked(record)
        return [(0, _end_of(ranges))] if ranges else []

    def _acknowledge(
        self, ranges: Ranges, properties: Mapping[str, int | str] | None, *, kick: bool
    ) -> RecordFuture[int]:
        if ranges:
            self._check_open()
            self._cursor.repair()
        with self._lock:
            self._check(ranges, properties)
            if not ranges:
                return done_future(0)
            future = self._cursor.ack(ranges, properties or {}, kick=kick)
            self._after_ack()
        return future

    def _acknowledge_at_once(self, ranges: Ranges, properties: Mapping[str, int | str]) -> RecordFuture[int] | None:
        """Acknowledge what was checked; None, with nothing done, if that might wait. The caller holds the lock."""
        self._check_open()
        if properties:
            checked_properties({**self._cursor.state.properties, **properties})  # others may have set some since
        future = self._cursor.ack_at_once(ranges, properties)
        if future is not None:
            self._after_ack()
        return future

    def _check(self, ranges: Ranges, properties: Mapping[str, int | str] | None) -> None:
        """Raise if records, or the properties to set, cannot be."""
        with self._lock:
            self._check_open()
            end, state = _end_of(ranges), self._cursor.state
            if properties and not ranges:
                raise UsageError("properties are set by an acknowledgement; name at least one record")
            if end > self._deliveries.read_seq:
                last = self._steps.last_seq()
                if end > last + 1:
                    raise UsageError(
                        f"record {end - 1} of log {self._steps.name!r} does not exist; {self._steps.last_shown(last)}"
                    )
                if state.range_count + len(ranges) > self._max_unacked + self._deliveries.outstanding:
                    raise TooManyRequestsError(
                        f"subscription {self.name!r} has {state.range_count} ranges of acknowledged records; "
                        "acknowledge those between them first, or subscribe with a higher max_unacked"
                    )
            if properties:
                checked_properties(state.properties | checked_properties(properties))

    def _after_ack(self) -> None:
        """Wake consumers that wait for an acknowledgement; the caller holds the lock."""
        if self._wake_on_ack:
            self._wake_on_ack = False
            self._wake_all()

    def nack(self, records: Acked | Iterable[Acked], *, delay: float = 0.0) -> int:
        """Hand out records again.

        Args:
            records: The records; only those that were handed out and are not acknowledged count.
            delay: Seconds until they are handed out again.

        Returns:
            The number of records that are handed out again.
        """
        due, count = _due(delay), 0
        with self._lock:
            self._check_open()
            for first, end in ranges_of_acked(records):
                count += self._deliveries.nack(first, end, due)
        self._wake_all()
        return count

    def _group_member(self) -> GroupMember:
        self._check_open()
        return _AckMember(self)

    # ---- moving --------------------------------------------------------------------------------------------------

    def seek(self, start: Start) -> int:
        """Continue from another place: all records before it count as acknowledged, and none from it on.

        Args:
            start: As for ``Log.reader``.

        Returns:
            The sequence number of the record that is handed out next; later than ``start`` if the log has dropped
            records.

        Raises:
            PybkError: As ``ack``. With ``outcome_unknown`` another open may continue there; otherwise the place has not
                changed.

        Durability: On return the new place is durable, and the log keeps the records after it.
        """
        wanted = seq_of(self._steps, start)
        last = self._steps.last_seq()
        if wanted > last + 1:
            shown = f"{self._steps.last_shown(last)}, and the next one is {last + 1}"
            raise UsageError(f"log {self._steps.name!r} cannot be read from {wanted} on; {shown}")
        self._check_open()
        seq = self._cursor.seek(wanted)
        with self._lock:
            self._void()
            self._deliveries.reset()
        self._wake_all()
        return seq

    seek_async = asyncio_form(seek, own_thread=True)

    def rewind(self) -> None:
        """Hand out all records again that are not acknowledged, in order, as after another open."""
        with self._lock:
            self._check_open()
            self._void()
            if self._cursor.counts:
                self._deliveries.rewind()
            else:
                self._deliveries.reset()
        self._wake_all()

    def skip(self, count: int) -> int:
        """Acknowledge the first ``count`` unacknowledged records; return their number. Errors as for ``ack``."""
        number = whole_from(count, 0, "count", "a number of records")
        self._look()
        end = self._steps.last_seq() + 1
        self._check_open()
        self._cursor.repair()
        with self._lock:
            stop, left = 0, number
            for low, high in self._cursor.state.unacked_ranges(0, end):
                stop, left = min(high, low + left), left - min(high - low, left)
                if not left:
                    break
            if left == number:
                return 0
            future = self._acknowledge([(0, stop)], None, kick=False)
        future.result()
        return number - left

    skip_async = asyncio_form(skip, own_thread=True)

    def skip_all(self) -> int:
        """Acknowledge all existing records; return how many were unacknowledged. Errors as for ``ack``."""
        return self.skip(SEQ_MAX)

    skip_all_async = asyncio_form(skip_all, own_thread=True)


async def taken_async(subscription: Subscription, most: int, timeout: float | None) -> Taken:
    """Return the records that ``Subscription.read_many_async`` returns, with the numbers of their deliveries."""
    return await subscription._taken_async(most, timeout)


def give_back(subscription: Subscription, held: Iterable[tuple[int, int]], *, delay: float = 0.0) -> int:
    """Hand out again the records that a consumer still holds, as ``Subscription.nack`` does.

    Args:
        subscription: The subscription of the consumer.
        held: Records, each with the number of the delivery by which the consumer got it.
        delay: Seconds until they are handed out again.

    Returns:
        The number of them that were neither handed out again nor acknowledged since.
    """
    due = _due(delay)
    with subscription._lock:
        subscription._check_open()
        count = subscription._deliveries.give_back(held, due)
    if count:
        subscription._wake_all()
    return count


async def give_back_async(subscription: Subscription, held: Iterable[tuple[int, int]], *, delay: float = 0.0) -> int:
    """Hand out records again as ``give_back`` does, without blocking the event loop, and even if it is cancelled."""
    if subscription._lock.acquire(blocking=False):
        try:
            return give_back(subscription, held, delay=delay)
        finally:
            subscription._lock.release()
    return await in_own_thread(give_back, subscription, list(held), delay=delay)


async def still_held(subscription: Subscription, held: Mapping[int, int]) -> dict[int, int]:
    """Return those records that a consumer still holds, with the numbers of their deliveries."""
    await subscription._take_lock()
    try:
        return {seq: number for seq, number in held.items() if subscription._deliveries.is_held(seq, number)}
    finally:
        subscription._lock.release()


async def redeliveries_async(subscription: Subscription, seq: int) -> int:
    """Return what ``Subscription.redeliveries`` does, without blocking the event loop."""
    await subscription._take_lock()
    try:
        return subscription.redeliveries(seq)
    finally:
        subscription._lock.release()


class _AckMember(GroupMember):
    """The acknowledgements of one subscription in an atomic group.

    Args:
        subscription: The subscription of the consumer.
    """

    call = "ack"
    alone = "acknowledge without a group"

    def __init__(self, subscription: Subscription) -> None:
        steps = subscription._steps
        key = f"{ListKind.CURSOR.group}/{cursor_list_name(steps.name, subscription.name)}"
        super().__init__(key, backend_of(steps.manager))
        self._subscription = subscription
        self._ranges: Ranges = []
        self._properties: dict[str, int | str] = {}

    def add(self, records: Acked | Iterable[Acked], *, properties: Mapping[str, int | str] | None = None) -> None:
        """Add records that are acknowledged."""
        ranges, checked = ranges_of_acked(records), checked_properties(properties or {})
        self._ranges = merged([*self._ranges, *ranges])
        self._properties.update(checked)

    def hold(self, stage: Callable[[GroupPart], R | None]) -> R | None:
        """Stage the acknowledgements as a part of the group."""
        subscription = self._subscription
        with subscription._lock:
            subscription._check(self._ranges, self._properties)
            if not self._ranges:
                return stage(GroupPart())
            found = subscription._cursor.hold(self._ranges, self._properties, stage)
            if found is None:
                return None
            staged, added = found
            subscription._after_ack()
        self.results = [added]
        return staged

    def prepare(self) -> None:
        """Repair the cursor's list, if an acknowledgement was refused or interrupted."""
        self._subscription._cursor.prepare()


def ranges_of_acked(records: Acked | Iterable[Acked]) -> Ranges:
    """Return records as ranges of sequence numbers, ascending and apart from each other."""
    if isinstance(records, LogRecord):
        seq = records.position.seq
        return [(seq, seq + 1)]
    if isinstance(records, range) and records.step == 1 and 0 <= records.start < records.stop <= SEQ_MAX:
        return [(records.start, records.stop)]
    seq_given = whole(records.seq if isinstance(records, Position) else records)
    if seq_given is not None and 0 <= seq_given < SEQ_MAX:
        return [(seq_given, seq_given + 1)]
    if isinstance(records, Iterable) and not _is_no_collection(records):
        given = list(records)
        seqs = [each.position.seq for each in given if isinstance(each, LogRecord)]
        if seqs and len(seqs) == len(given):
            return ranges_of(seqs)
        return merged(pair for each in given for pair in ranges_of_acked(each))
    raise UsageError(
        f"{records!r:.100} names no records; it takes a record, a position, a sequence number, a range of them, or an "
        "iterable of these"
    )


def seq_of_acked(record: Acked) -> int:
    """Return the sequence number of a record, or of the first one of a range."""
    ranges = ranges_of_acked(record)
    if not ranges:
        raise UsageError(f"{record!r:.100} names no record; it takes a record, a position or a sequence number")
    return ranges[0][0]


def _is_no_collection(records: Iterable[object]) -> bool:
    """Return whether an iterable stands for something else than its items: a ``TxId``, which has a number, for one."""
    return hasattr(records, "_fields") or isinstance(records, str | bytes | bytearray | memoryview | Mapping)


def _deadline(timeout: object) -> float | None:
    """Return when a wait is over."""
    seconds = seconds_of(timeout)
    if seconds is None:
        return None
    if seconds < 0:
        raise UsageError(f"timeout is {timeout!r:.50}; it takes seconds from 0 up, or None to wait without a limit")
    return time.monotonic() + seconds


def _due(delay: float) -> float:
    """Return when records are handed out again."""
    return time.monotonic() + duration_of(delay, "delay")


def _end_of(ranges: Ranges) -> int:
    """Return the record after the last one of ranges; 0 for none."""
    return ranges[-1][1] if ranges else 0


def _pause(deadline: float | None, token: _Token) -> float:
    """Return the seconds before the next look for bookies that did not answer; 0 if a consumer waits no longer.

    It waits no longer if a look as long as the last one would end too late: bookies that hang take seconds.
    """
    now = time.monotonic()
    return 0.0 if deadline is None else min(RETRY_SECONDS, max(0.0, deadline - now - (now - token.looked)))


def _is_over(deadline: float | None) -> bool:
    """Return whether a wait is over; then a consumer looks for itself, also if another one leads."""
    return deadline is not None and time.monotonic() >= deadline
