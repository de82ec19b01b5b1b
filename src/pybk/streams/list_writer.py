"""The writer's half of a log: takes it over, appends, rolls, cuts and closes. ``WriteAheadLog`` is built on it.

``_operation`` excludes two operations of the owner (roll, repair, cut, close) from each other; appends continue
meanwhile, except for the moment in which the appender switches.

If the ledger of the open segment is lost, because bookies or the metadata store did not answer, the list is repaired:
by the next append, by an operation, or in the background, because futures for which no thread waits have to end as
well. The repair is tried every ``REPAIR_SECONDS`` until ``bookie_patience_seconds`` have passed. Then the appends that
were lost fail; later appends try once more. An append that does not wait is refused meanwhile, and has the background
try as long again, so that a program whose appends never wait continues once the bookies are back.
"""

from __future__ import annotations

import _thread
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from pybk import streams
from pybk.backend import Lock, ReplicatedLedgers
from pybk.errors import (
    ClosedError,
    EntryUnknownError,
    LedgerRecoveryError,
    LogFencedError,
    LogLockedError,
    MetadataUnreachableError,
    NoSuchLogError,
    NotEnoughBookiesError,
    PybkError,
    StorageFullError,
    TooManyRequestsError,
    not_done,
    without_frames,
)
from pybk.manager.append_future import AppendFuture, CoroutineBacklog
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.streams import ledger_list
from pybk.streams.appender import LOSSES, Appender, Batch, RecordFuture, bookies_error, fenced_error
from pybk.streams.ledger_list import Adopted, Owned
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Detached, ListKind, ListRecord, Segment, title_of
from pybk.streams.log_settings import LedgerSpec, RollPolicy
from pybk.threads import background, in_children, renew_locks, weakly
from pybk.threads.call_threads import in_thread
from pybk.threads.interrupts import guarded

if TYPE_CHECKING:
    from pybk.manager.atomic_group import GroupPart

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

OPEN_REMEDY: Final = (
    "close it there; in Python you can also wait for it with wait=..., or take it over with steal=True, which fences it"
)
LOCK_LOOK_SECONDS: Final = 0.05
"""The interval between two checks whether a live writer has released a log or a store."""

REPAIR_SECONDS: Final = 0.5
"""The interval between two attempts to repair a lost segment."""

WITHOUT_BOOKIES: Final = (NotEnoughBookiesError, LedgerRecoveryError, EntryUnknownError, MetadataUnreachableError)
"""The errors of what cannot be done while bookies or the metadata store do not answer, but perhaps later."""

RETRY_SECONDS: Final = 1.0
"""The delay after what failed and may succeed soon, such as a roll, or a read of a record, before the next attempt."""


def lock_name(kind: ListKind, name: str) -> str:
    """Return the name of the lock that the writer of a ledger list holds."""
    return f"{kind}.{name}"


class ListWriter:
    """The writer of one log, until it is closed or another takes the log over.

    Args:
        manager: The manager that has the ledgers.
        name: The name of the log.
        spec: The specification by which its ledgers are created and opened.
        policy: The limits at which it rolls.

    Attributes:
        appender: Appends to the open segment.
        steps: Performs operations on the list.
        closed: Whether it was closed.
        unclean: Whether the previous writer did not close the log.
        on_repair: Called with the list's record when the outcome of refused or interrupted appends is known, before
            others are made.

    Threads: any.
    """

    def __init__(self, manager: LedgerManager, name: str, spec: LedgerSpec, policy: RollPolicy) -> None:
        self._title = title_of(name, of_cursor=spec.kind is ListKind.CURSOR)
        self.appender = Appender(self._title)
        self.steps = LedgerSteps(manager, name, spec, self.appender)
        self._backend = backend_of(manager)
        self._name = name
        self._lock_name = lock_name(spec.kind, name)
        self.patience_s = self._backend.config.bookie_patience_seconds
        self._policy = policy
        self._operation = threading.RLock()
        self._lock: Lock | None = None
        self._ended: PybkError | None = None
        """The error if it may no longer change the log, because another writer has it, or it was deleted or renamed."""
        self._rolling = 0
        """The number of the last segment that became too long; a roll of it is under way, or is tried again."""
        self._timed: Segment | None = None
        """The segment whose age is timed."""
        self._tried: tuple[float, PybkError] | None = None
        """The time, by the monotonic clock, of the last failed attempt to repair a lost segment, and its error."""
        self._replacing = False
        """Whether a lost ledger is being replaced in the background."""
        self._rests_until = 0.0
        """When appends that do not wait may have a lost ledger replaced again, after an attempt that failed."""
        self.appender.on_lost = weakly(ListWriter._notice_loss, self)
        self._backlog = CoroutineBacklog()
        self._abandoned: list[int] = []
        """Blobs that will not be listed, which the next operation gives up."""
        self.closed = self._sealed = False
        self.unclean = False
        self.on_repair: Callable[[ListRecord], None] = lambda _: None
        in_children(self, ListWriter._disable)

    def _disable(self) -> None:
        """Give the parts new locks in a forked child."""
        renew_locks(self.appender)

    # ---- taking over ---------------------------------------------------------------------------------------------

    def take_over(self, *, wait_s: float, steal: bool, remedy: str = OPEN_REMEDY) -> Owned:
        """Become the log's writer.

        Args:
            wait_s: Seconds to wait for a live writer to release the log.
            steal: Take it from a live writer, which is then fenced.
            remedy: The remedy in the error for a live writer.

        Raises:
            LogLockedError: A live writer has it.
            NoSuchLogError: The name belongs to another log than that of ``steps.uid``; that log keeps its writer.
            PybkError: As ``ledger_list.take_over``.
        """
        try:
            self._take_lock(wait_s, steal=steal, remedy=remedy)
            self.unclean = bool(self.steps.existing().record.open_segments)
            owned = self.steps.perform(ledger_list.take_over(self._name, time.time_ns))
            self.steps.uid = owned.record.uid
            self.appender.take(owned)
            self._sweep_if_full()
        except BaseException:
            self.let_go()
            raise
        return owned

    def _sweep_if_full(self) -> None:
        """Delete what killed take-overs left if the store is full: it takes space that is kept for what frees space."""
        try:
            self._backend.check_space()
        except StorageFullError:
            try:
                streams.sweep.sweep_left(self.steps)
            except (PybkError, OSError) as error:
                logger.warning("%s keeps what killed take-overs left of it: %s", self._title, error)

    def rename(self, target: str) -> None:
        """Give the log, which has no live writer, another name.

        Raises:
            LogLockedError: A live writer has it.
            PybkError: As ``ledger_list.rename``.
        """
        with self.kept_away(steal=False, remedy="close it there before it is renamed"):
            self.steps.perform(ledger_list.rename(self._name, target, time.time_ns))

    def adopt(
        self, ledgers: Sequence[Detached], query: str, epoch: int, *, wait_s: float, remember_s: float
    ) -> Adopted:
        """Commit detached ledgers of a query to the log, which has no live writer.

        Args:
            ledgers: As for ``ledger_list.adopt``.
            query: As for ``ledger_list.adopt``.
            epoch: As for ``ledger_list.adopt``.
            wait_s: As for ``take_over``.
            remember_s: As for ``ledger_list.adopt``.

        Raises:
            LogLockedError: A live writer has it, or another commit is under way.
            UnauthorizedError: The password is not the log's.
            UsageError: The log has one of the ledgers, from a commit that it has forgotten.
            PybkError: As ``ledger_list.adopt``.
        """
        remedy = "close it there, or give a wait if it is another commit"
        with self.kept_away(steal=False, remedy=remedy, wait_s=wait_s):
            self.steps.check_password()  # the log may have got its first ledger since it was opened
            self.steps.perform(ledger_list.check_new(self._name, ledgers, query))
            steps = ledger_list.adopt(self._name, ledgers, query, epoch, time.time_ns, remember_s)
            return self.steps.perform(steps)

    @contextmanager
    def kept_away(self, *, steal: bool, remedy: str, wait_s: float = 0.0) -> Iterator[None]:
        """Keep other writers away until the ``with`` block ends, without becoming the writer.

        Args:
            steal: Take the log from a live writer, which is fenced once the log is changed.
            remedy: As for ``take_over``.
            wait_s: As for ``take_over``.

        Raises:
            LogLockedError: A live writer has it.
        """
        try:
            self._take_lock(wait_s, steal=steal, remedy=remedy)
            yield
        finally:
            self.let_go()

    def _take_lock(self, wait_s: float, *, steal: bool, remedy: str) -> None:
        deadline = time.monotonic() + wait_s
        while True:
            if self.steps.uid is not None:
                self.steps.existing()  # the lock is that of the name, which another log may have by now
            if self._has_taken_lock():
                return
            if time.monotonic() >= deadline and steal:
                self._backend.break_lock(self._lock_name)
            elif time.monotonic() >= deadline:
                holder = self._backend.lock_owner(self._lock_name)
                what = "owner" if self.steps.spec.kind is ListKind.CURSOR else "writer"
                raise LogLockedError(f"{self._title} has a live {what} ({holder}); {remedy}")
            else:
                time.sleep(LOCK_LOOK_SECONDS)

    def _has_taken_lock(self) -> bool:
        """Take the lock of the log if it is free; returns whether it was."""
        self._lock = self._backend.try_lock(self._lock_name, f"{os.uname().nodename}, process {os.getpid()}")
        return self._lock is not None

    def let_go(self) -> None:
        """Release the log to another writer, which recovers the open segments; a second call does nothing."""
        if self._lock is not None:
            self._lock.release()

    # ---- appending -----------------------------------------------------------------------------------------------

    def append(self, data: bytes, time_ns: int | None, *, kick: bool, wait: bool = True) -> RecordFuture[int]:
        """Stage a record; see ``Appender.append``."""
        appender = self.appender
        try:
            while (future := appender.append(data, time_ns, kick=kick, wait=wait)) is None:
                self.repair(wait=wait)
        except LogFencedError as error:
            self._end_with(error)
            raise
        if (
            self._policy.is_reached(appender.segment_bytes, appender.segment_records)
            or appender.segment is not self._timed
        ):
            self.watch_segment()
        return future

    def append_at_once(self, batch: Batch[T]) -> RecordFuture[T] | None:
        """Stage records; return None, with nothing done, if the call might have to wait."""
        try:
            future = self.appender.append_at_once(batch)
        except LogFencedError:
            return None  # what it has to say is to be looked up, which may take long
        self.watch_segment()
        return future

    async def append_coro(self, batch: Batch[T]) -> T:
        """Stage records as one transaction, and wait until they are durable, without blocking the event loop."""
        if self._backlog.is_empty:
            with suppress(TooManyRequestsError):
                at_once = self.append_at_once(batch)
                if at_once is not None:
                    return await self._waited(at_once)
        return await self._waited(await self._backlog.add(partial(self.append_batch, batch, kick=True)))

    async def _waited(self, future: AppendFuture[T]) -> T:
        """Return the result of an append as ``result_of`` does, without blocking the event loop."""
        try:
            return await future
        except LogFencedError as error:
            await in_thread(self._end_with, error)
            raise

    def append_batch(self, batch: Batch[T], *, kick: bool, wait: bool = True) -> RecordFuture[T]:
        """Stage records as one transaction; see ``Appender.append_batch``."""
        while (future := self.append_unless_broken(batch, kick=kick, wait=wait)) is None:
            self.repair(wait=wait)
        return future

    def flush(self) -> None:
        """Return when everything that was appended is durable; see ``Appender.flush``."""
        while True:
            try:
                self.appender.flush()
                return
            except LOSSES:
                if not self.appender.notice_loss():
                    raise
                self.repair()

    def append_unless_broken(self, batch: Batch[T], *, kick: bool, wait: bool = True) -> RecordFuture[T] | None:
        """Stage records as one transaction; return None, with nothing done, if a ``repair`` has to come first."""
        try:
            future = self.appender.append_batch(batch, kick=kick, wait=wait)
        except LogFencedError as error:
            self._end_with(error)
            raise
        self.watch_segment()
        return future

    def hold(self, batch: Batch[T], stage: Callable[[GroupPart], R | None]) -> tuple[R, T] | None:
        """Stage records as a part of a group; see ``Appender.hold``."""
        try:
            return self.appender.hold(batch, stage)
        except LogFencedError as error:
            self._end_with(error)
            raise

    def result_of(self, future: RecordFuture[T]) -> T:
        """Wait for an append, and return its result; raises NoSuchLogError if it failed because the log was deleted."""
        try:
            return future.result()
        except LogFencedError as error:
            self._end_with(error)
            raise

    def _end_with(self, error: LogFencedError) -> None:
        """Note that this writer has ended, with the error of an append.

        Raises:
            NoSuchLogError: The log itself is gone.
        """
        self._ended = without_frames(error)
        self.appender.fate.is_fence_reported = True
        try:
            self.steps.existing()
        except NoSuchLogError as gone:
            gone.outcome_unknown = error.outcome_unknown
            self._ended = without_frames(gone)
            raise
        except (PybkError, OSError):
            pass  # that another has it is true of a log that cannot be looked at, too

    def watch_segment(self) -> None:
        """Roll if the segment has reached a limit, and time its age if it is new."""
        segment = self.appender.segment
        if segment is None:
            return
        if self._policy.is_reached(self.appender.segment_bytes, self.appender.segment_records):
            if self._rolling != segment.number:
                background().submit(partial(self._roll_in_background, segment.number))
                self._rolling = segment.number  # afterwards, so that an interrupt in between has it submitted again
        elif segment is not self._timed:
            self._roll_after(self._policy.age_s, segment.number)
            self._timed = segment

    def _roll_after(self, seconds: float, number: int) -> None:
        background().call_later(seconds, partial(weakly(ListWriter.roll_old, self), number))

    # ---- operations ----------------------------------------------------------------------------------------------

    def operate(self, operation: Callable[[], T]) -> T:
        """Perform an owner's operation, one at a time."""
        with self._operation:
            self._check_owner()
            self._give_up_abandoned()
            try:
                return operation()
            except (LogFencedError, NoSuchLogError) as error:
                self._ended = without_frames(error)
                raise

    def _check_owner(self) -> None:
        """Raise if this writer was closed, or may no longer change the log."""
        if self.closed:
            raise self.closed_error()
        if self._ended is not None:
            raise not_done(self._ended)

    def abandon_blob(self, ledger_id: int) -> None:
        """Leave a blob to be given up by the next operation, unless a listed checkpoint has it.

        A finaliser may call it.
        """
        self._abandoned.append(ledger_id)

    def _give_up_abandoned(self) -> None:
        """Give up the abandoned blobs; those that cannot be given up now are left to the next operation or owner."""
        while self._abandoned:
            ledger_id = self._abandoned[0]
            try:
                if ledger_id in self.steps.existing().record.ledgers:
                    epoch = self.appender.epoch
                    self.steps.perform(ledger_list.give_up_upload(self._name, epoch, ledger_id))
                else:  # the record never named it
                    self.steps.delete(ledger_id)
            except (PybkError, OSError):
                return
            self._abandoned.pop(0)

    def roll(self) -> None:
        """Continue in a new segment; returns once it is listed and the one before is closed."""
        self.operate(self._roll)

    def _roll(self) -> None:
        segment = self.appender.segment
        if self.appender.notice_loss() or segment is None or self.appender.needs_repair:
            self._repair()
            return
        self.steps.perform(ledger_list.roll(self._name, self.appender.epoch, segment.number, time.time_ns))

    def repair(self, *, wait: bool = True) -> None:
        """Close the open ledgers at the records that they have, and continue in a new segment.

        A repair is due after appends were refused or interrupted, and when a ledger was lost.

        Args:
            wait: Wait for bookies, if a ledger was lost.

        Raises:
            TooManyRequestsError: ``wait`` is False, and a ledger was lost, which is replaced in the background.
            ClosedError: This writer was closed.
            LogFencedError: Another writer has the log.
            NotEnoughBookiesError: A ledger was lost, and too few bookies were available for a new one until the
                patience was over.
            MetadataUnreachableError: A ledger was lost, and at the last attempt the metadata store did not answer.
        """
        if not wait and self.appender.lost:
            self._check_owner()
            if not self._replacing and time.monotonic() >= self._rests_until:
                self._notice_loss()
            raise TooManyRequestsError(
                f"{self._title} continues in another ledger, because too few bookies answered: append later, or wait"
            )
        until = time.monotonic() + self.patience_s
        while (cause := self._repaired()) is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise bookies_error(self._title, cause, self.patience_s, outcome_unknown=False)
            time.sleep(min(REPAIR_SECONDS, left))

    def _repaired(self) -> PybkError | None:
        """Repair the list, if that is due; return why a lost ledger cannot be replaced now."""
        with self._operation:
            self.appender.notice_loss()
            if not self.appender.needs_repair:  # another thread has done it
                return None
            if self._tried is not None and time.monotonic() < self._tried[0] + REPAIR_SECONDS / 2:
                return self._tried[1]  # by another thread, just now
            try:
                self.operate(self._repair)
            except WITHOUT_BOOKIES as error:
                if not self.appender.lost:
                    raise
                cause = without_frames(error)
                self._tried = time.monotonic(), cause
                return cause
            except (PybkError, OSError) as error:
                self._rests_until = time.monotonic() + REPAIR_SECONDS
                self._give_up(error)
                raise
            self._tried = None
            return None

    def _give_up(self, cause: PybkError | OSError) -> bool:
        """Fail the appends that were lost, because they cannot be made again; return whether there were any."""
        error: PybkError
        if isinstance(cause, PybkError) and not isinstance(cause, WITHOUT_BOOKIES):
            error = without_frames(cause)
            error.outcome_unknown = True
        else:
            error = bookies_error(self._title, cause, self.patience_s, outcome_unknown=True)
        return self.appender.give_up(error)

    def _notice_loss(self) -> None:
        """Have a lost ledger replaced in the background; called by the client's leader, too."""
        guarded(self._begin_replacing)

    def _begin_replacing(self) -> None:
        until = time.monotonic() + self.patience_s
        self._replacing = True
        try:
            background().submit(partial(weakly(ListWriter.repair_lost, self), until))
        except BaseException:
            self._replacing = False
            raise

    def repair_lost(self, until: float) -> None:
        """Replace a lost ledger, in the background: now, and again until a time if that fails."""
        again = False
        try:
            if self._is_to_be_tried_again(until):
                background().call_later(REPAIR_SECONDS, partial(weakly(ListWriter.repair_lost, self), until))
                again = True
        finally:
            if not again:
                self._replacing = False

    def _is_to_be_tried_again(self, until: float) -> bool:
        """Replace a lost ledger; return whether that is to be tried again, and give up what was lost after a time."""
        if self.closed:
            return False
        try:
            cause = self._repaired()
        except ClosedError:
            return False  # the close has given it up
        except (PybkError, OSError) as error:
            logger.warning("%s cannot continue in another ledger: %s", self._title, error)
            return False
        if cause is None:
            return False
        if time.monotonic() < until:
            return True
        with self._operation:
            if self.appender.lost and self._give_up(cause):
                logger.warning("%s gives up what bookies have not acknowledged: %s", self._title, cause)
        return False

    def _repair(self) -> None:
        epoch = self.appender.epoch
        if self.appender.lost:
            self._check_lock()
        record = self.steps.perform(ledger_list.close(self._name, epoch, time.time_ns))
        highest = self.appender.highest_owed()
        self.on_repair(record if highest is None else replace(record, highest=highest))
        self.steps.perform(ledger_list.roll(self._name, epoch, 0, time.time_ns))

    def _check_lock(self) -> None:
        """Raise unless this writer has the lock of the log, or can take it again, because its session had ended."""
        if (self._lock is None or not self._lock.held) and not self._has_taken_lock():
            raise fenced_error(self._title, " (another process has its lock)")

    def cut(self, seq: int) -> None:
        """Drop the records after ``seq``; see ``ledger_list.cut``."""

        def cut() -> None:
            if self.appender.notice_loss():
                self._repair()
            record = self.steps.existing().record
            record.check_cut(seq, self.appender.next_seq, self.steps.bounds_of(record))
            self.appender.take(self.steps.perform(ledger_list.cut(self._name, self.appender.epoch, seq, time.time_ns)))

        self.operate(cut)

    def _roll_in_background(self, number: int) -> None:
        """Roll, if a segment is still the one that is appended to."""

        def roll() -> None:
            segment = self.appender.segment
            if segment is not None and segment.number == number:
                self._roll()

        try:
            self.operate(roll)
        except (LogFencedError, NoSuchLogError):
            return  # the next append says so
        except (PybkError, OSError) as error:
            if not self.closed and not self._backend.ended:
                logger.warning("log %r continues in its present ledger, as it could not roll: %s", self._name, error)
                self._roll_after(RETRY_SECONDS, number)

    def roll_old(self, number: int) -> None:
        """Roll if a segment that has records is still the open one."""
        if self.appender.segment_bytes and not self.closed:
            self._roll_in_background(number)

    def close(self, *, seal: bool = False) -> None:
        """Close the open segments, and release the log; a second call completes one that was interrupted.

        In a forked child it does nothing, except that it refuses to seal the log.

        Raises:
            LogFencedError: Another writer has it.
            PybkError: Closing failed; the log was released nevertheless.
        """
        if self._backend.forked and not seal:
            return
        with self._operation:
            if not self.closed:
                epoch = self.appender.epoch
                try:
                    if isinstance(self._backend, ReplicatedLedgers) and self._ended is None:
                        self.flush()  # what was lost is appended again before the log is closed
                    self.operate(
                        lambda: self.steps.perform(ledger_list.close(self._name, epoch, time.time_ns, seal=seal))
                    )
                except (PybkError, OSError) as error:
                    self._give_up(error)
                    self.closed = True
                    self.let_go()
                    raise
                self.closed, self._sealed = True, seal
                if self.appender.lost:  # by an append that came after the flush
                    self._give_up(ClosedError(f"{self._title} was closed while this was under way"))
            self.let_go()

    def closed_error(self) -> ClosedError:
        """Return the error of an operation after ``close``."""
        if self._sealed:
            return ClosedError(
                f"{self._title} was sealed here; it takes no more records: write to another log, or open it with "
                "mode='r' to read it"
            )
        return ClosedError(f"{self._title} is closed here; open it again")

    def close_dropped(self) -> None:
        """Close in a thread, and warn, because the log was garbage-collected without a close, maybe inside a call."""
        if self.closed or self._backend.ended or self._backend.forked or sys.is_finalizing():
            return
        try:
            _thread.start_new_thread(self._close_quietly, ())
        finally:  # without a thread, the log is recovered by the next open
            warnings.warn(
                f"log {self._name!r} was dropped without close(), so it is being closed now; use `with`, or call "
                "close()",
                ResourceWarning,
                stacklevel=2,
            )

    def _close_quietly(self) -> None:
        try:
            self.close()
        except (PybkError, OSError) as error:
            logger.warning("log %r was dropped, and could not be closed: %s", self._name, error)
