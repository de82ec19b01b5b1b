"""The durable cursor of a subscription: its state in memory, and as the records of a ledger list of its own.

Theory of operation
===================

**Records.** Each acknowledgement is one record of the list: the ranges that it acknowledges, and properties. A whole
state is written when the changes since the last one are several times longer than the state. After a roll it is written
when they are as long, and at an open if the state is short. So an acknowledgement costs at most twice the bytes of its
own record on average, however long the state is. Then the list is truncated to the first record of the state. So the
list is never longer than some states and a segment. An open replays it from its first record: a whole state, then
changes. Cursors have all guarantees of ledger lists: one owner, fencing, transactions, rolls, and repair after space
was short.

From the feature level STREAMS on a state is written in parts, in the background. One part follows each acknowledgement,
so no acknowledgement waits long. A part has at least twice as many ranges as were acknowledged since the part before,
so the parts come to an end. A state whose parts were not all written is begun again. Below that level a state is one
transaction; ``pybk.streams.cursor_state`` has both.

**Deliveries.** From that level on a subscription with dead letters has a lease of records that it may hand out for the
first time, and each further delivery of a record is recorded before the record is handed out. A close records how many
of the leased records were handed out; if an owner did not close, all of them may have been.

**The bound.** The log's record has a lower bound of each cursor (rule T9). It is raised some seconds after an
acknowledgement, and on close, after a record of its own. This record repeats that all records before the bound are
acknowledged, so it suffices by itself, even if earlier records of the cursor were refused. It is lowered before a seek
backwards.

**Repair.** Records that were staged may be refused later, because space is short, together with the other changes of
their group. So after each repair of the list, and before any other record is staged, ``_mend`` makes the state anew
from the records of the list. The same is done after an interrupt between a record and the change of the state.

**Locks.** ``_moving`` excludes raising and lowering the bound, and is taken first. ``lock`` guards the state and orders
the records of the list; it is held while a record is staged, not while it becomes durable, except for a seek. The
locks of the list's writer are taken after it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Self, TypeVar

from pybk.errors import (
    CorruptError,
    LogFencedError,
    LogSealedError,
    NoSuchLogError,
    PybkError,
    StorageRefusedError,
    TooManyRequestsError,
    TruncatedError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.manager.atomic_group import GroupPart
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams import ledger_list
from pybk.streams.appender import PlainBatch, RecordFuture, done_future, with_value
from pybk.streams.cursor_state import (
    PART_LEAST,
    RANGE_BYTES,
    CursorState,
    PartAt,
    StatePart,
    encode_acks,
    encode_again,
    encode_handed,
    encode_lease,
    encode_seek,
    is_state,
    merged,
)
from pybk.streams.deliveries import Handed
from pybk.streams.ledger_steps import DAMAGE, LedgerSteps
from pybk.streams.list_record import (
    SEQ_MAX,
    UID_BYTES,
    CursorBound,
    ListKind,
    ListRecord,
    Segment,
    checked_name,
    cursor_list_name,
)
from pybk.streams.list_writer import ListWriter
from pybk.streams.log_settings import LedgerSpec, RollPolicy
from pybk.streams.range_set import Ranges
from pybk.streams.record_reader import RecordReader
from pybk.threads import background, weakly

logger = logging.getLogger(__name__)

R = TypeVar("R")

CURSOR_SEGMENT_BYTES: Final = 4 << 20
BOUND_SECONDS: Final = 5.0
"""The delay after an acknowledgement before the log's record is changed, which lets the log drop records."""

CHANGES_BYTES: Final = 256 << 10
CHANGES_FACTOR: Final = 8
"""A whole state is due when the changes since the last one have ``CHANGES_BYTES``, and this many times its bytes."""

RANGES_AT_OPEN: Final = 1024
"""Ranges of a state up to which an open writes it whole."""

_KEEPS_MORE: Final = "subscription %r: the log keeps more than it needs: %s"
_DELETE_REMEDY: Final = "close it there, or delete it with steal=True, which fences it"


def checked_subscription(name: object) -> str:
    """Return the name of a subscription, which is as a log's, without ``@``; raises UsageError for any other."""
    found = checked_name(name, "a subscription")
    if "@" in found:
        raise UsageError(f"the name {found!r} of a subscription has an @, which is reserved; choose another")
    return found


class _Replayed(NamedTuple):
    """The state that the records of a list result in, and their bytes."""

    state: CursorState
    nbytes: int


@dataclass(slots=True)
class _Renewal:
    """A whole state of which parts are written.

    Attributes:
        at: The place where the next part begins; None before the first.
        begun: The future of the append of the first part.
        nbytes: The bytes of the parts so far.
    """

    at: PartAt | None = None
    begun: RecordFuture[range] | None = None
    nbytes: int = 0


class Cursor:
    """The cursor of a durable subscription, while this process owns it.

    Use ``Cursor.open``.

    Attributes:
        name: The subscription's.
        state: The acknowledged records, durable or not; guarded by ``lock``.
        lock: Guards the state.
        counts: Whether deliveries are recorded.
        leased_end: The record before which records may be handed out for the first time; guarded by ``lock``.

    Threads: any.
    """

    def __init__(
        self, log: LedgerSteps, name: str, writer: ListWriter, bound: CursorBound, replayed: _Replayed, *, counts: bool
    ) -> None:
        self.name: Final = name
        self.state = replayed.state
        self.lock = threading.RLock()
        self.counts: Final = counts and writer.steps.manager.feature_level >= FeatureLevel.STREAMS
        self.leased_end = 0 if self.counts else SEQ_MAX
        self._log = log
        self._writer = writer
        self._bound = bound
        self._raised = bound.seq
        """The bound of the last attempt to change it; even if the attempt failed, this bound may be listed now or
        later."""
        self._moving = threading.Lock()
        self._in_parts = writer.steps.manager.feature_level >= FeatureLevel.STREAMS
        self._state_bytes = min(replayed.nbytes, RANGE_BYTES * self.state.range_count)
        self._changes_bytes = replayed.nbytes - self._state_bytes
        """Bytes of the records since the last whole state."""
        self._state_segment: Segment | None = None
        """The segment that was appended to when the last whole state was written."""
        self._renewal: _Renewal | None = None
        """The whole state of which parts are still to be written."""
        self._ranges_since = 0
        """Ranges that were acknowledged since the last part."""
        self._renewing = False
        self._settled = False
        self._timed = False
        self._repairs = self._known_repairs = 0
        """The number of repairs of the list, now and when the state was last made from the list."""
        self._unsure = False
        """True while a record may be staged whose change is not in the state."""
        writer.on_repair = self._repaired

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        manager: LedgerManager,
        log: LedgerSteps,
        name: str,
        start_seq: Callable[[], int],
        *,
        wait_s: float = 0.0,
        steal: bool = False,
        counts: bool = False,
    ) -> Self:
        """Become the owner of a subscription's cursor, which is created if it does not exist.

        Args:
            manager: The manager that has the ledgers.
            log: Steps of the log.
            name: The subscription's.
            start_seq: Returns the first record of a new subscription.
            wait_s: Seconds to wait for a live owner to release it.
            steal: Take it from a live owner, which is fenced.
            counts: Record deliveries, if the feature level allows it.

        Raises:
            LogLockedError: A live owner has it.
            CorruptError: The cursor is damaged or missing.

        Durability: On return the log keeps what the subscription has not acknowledged.
        """
        writer = _writer_of(manager, log, name)
        while True:
            bound = _listed(log, name, start_seq)
            try:
                if _list_made(log, writer.steps, bound):
                    writer.take_over(wait_s=wait_s, steal=steal)
                    break
            except BaseException as error:
                _drop_unlisted(log, writer.steps, bound)
                if not isinstance(error, LogSealedError | NoSuchLogError):
                    raise  # else another process is deleting a subscription of this name
        try:
            epoch = writer.appender.epoch
            bound = log.perform(ledger_list.claim_cursor(log.name, name, bound.uid, epoch))
            cursor = cls(log, name, writer, bound, _replayed_now(writer.steps, bound), counts=counts)
            cursor._begin()
        except BaseException:
            with suppress(PybkError):
                writer.close()
            _drop_unlisted(log, writer.steps, bound)
            raise
        return cursor

    def close(self) -> None:
        """Let the log drop the acknowledged records, and release the cursor; a second call does nothing.

        If there is no space to note which records are acknowledged, the log keeps them until the next owner has noted
        it.

        Raises:
            LogFencedError: Another owner has it.
        """
        if self._writer.closed:
            return
        try:
            self.raise_bound()
        except StorageRefusedError as error:
            logger.warning(_KEEPS_MORE, self._writer.steps.name, error)
        finally:
            self._writer.close()

    def settle(self, handed_end: Callable[[], int]) -> None:
        """Record that the records from one on were not handed out, if deliveries are recorded.

        An error is logged; then all leased records count as handed out.

        Args:
            handed_end: Returns that record; called with the lock, once no further one can be handed out.
        """
        with self.lock:
            if not self.counts or self._settled or self.closed:
                return
            self._settled, self.leased_end = True, 0
            end = handed_end()
        try:
            self.repair()
            self._record([encode_handed(end)]).result()
        except (PybkError, OSError) as error:
            if not isinstance(error, LogFencedError):
                logger.warning(
                    "the cursor %r: its deliveries are not known exactly: %s", self._writer.steps.name, error
                )

    def delete(self) -> None:
        """Delete the subscription for good, and release it; the log keeps no records for it any more."""
        with self._moving:
            self._log.perform(ledger_list.remove_cursor(self._log.name, self.name, self._bound.uid))
            self._writer.close()
            steps = self._writer.steps
            steps.perform(ledger_list.drop(steps.name))

    @property
    def closed(self) -> bool:
        """True once the cursor was closed or deleted in this process."""
        return self._writer.closed

    # ---- changes -------------------------------------------------------------------------------------------------

    def ack(self, ranges: Ranges, properties: Mapping[str, int | str], *, kick: bool) -> RecordFuture[int]:
        """Acknowledge records, and set properties with them, all or nothing after a crash.

        Args:
            ranges: Ascending and apart from each other, at least one. They may include records that are acknowledged
                already; on success these are durably so.
            properties: The properties to set.
            kick: As for ``pybk.manager.ledger_writer.stage``.

        Returns:
            A future of the number of records that were not acknowledged before.
        """
        record = encode_acks(ranges, properties)
        with self.lock:
            future = self._append(lambda: [record], kick=kick)
            return with_value(future, self._acked(ranges, properties, len(record)))

    def ack_at_once(self, ranges: Ranges, properties: Mapping[str, int | str]) -> RecordFuture[int] | None:
        """Acknowledge as ``ack`` does; None, with nothing done, if that may have to wait. The caller has the lock."""
        record = encode_acks(ranges, properties)
        if self._is_stale:
            return None
        with suppress(TooManyRequestsError):
            future = self._staged(lambda: self._writer.append_at_once(PlainBatch((record,))))
            if future is not None:
                return with_value(future, self._acked(ranges, properties, len(record)))
        return None

    def hold(
        self, ranges: Ranges, properties: Mapping[str, int | str], stage: Callable[[GroupPart], R | None]
    ) -> tuple[R, int] | None:
        """Acknowledge as a part of a group; the caller has the lock.

        Args:
            ranges: As for ``ack``.
            properties: As for ``ack``.
            stage: As for ``Appender.hold``.

        Returns:
            The result of ``stage``, and the number of records that were not acknowledged before; None, with nothing
            done, as ``Appender.hold``.
        """
        record = encode_acks(ranges, properties)
        if self._is_stale:
            return None
        found = self._staged(lambda: self._writer.appender.hold(PlainBatch((record,)), stage))
        if found is None:
            return None
        return found[0], self._acked(ranges, properties, len(record))

    def repair(self) -> None:
        """Repair the list if that is due, without the lock, which others have while this waits for bookies."""
        self._writer.repair()

    def prepare(self) -> None:
        """Repair the list, if an append to it was refused or interrupted."""
        self.repair()
        with self.lock:
            self._mend()

    def _acked(self, ranges: Ranges, properties: Mapping[str, int | str], nbytes: int) -> int:
        """Change the state after a record of it was staged; the caller holds the lock.

        Returns:
            The number of records that were not acknowledged before.
        """
        added = sum(self.state.ack(first, end) for first, end in ranges)
        self.state.properties |= properties
        self._unsure = False
        self._changes_bytes += nbytes
        self._ranges_since += len(ranges)
        if (self._renewal is not None or self._is_long()) and not self._renewing:
            self._renewing = True
            try:
                background().submit(self._renew)
            except BaseException:
                self._renewing = False
                raise
        if not self._timed and self.state.first_unacked > self._bound.seq:
            self._timed = True
            try:
                background().call_later(BOUND_SECONDS, weakly(Cursor.on_timer, self))
            except BaseException:
                self._timed = False
                raise
        return added

    def seek(self, seq: int) -> int:
        """Count all records before ``seq`` as acknowledged, and none from it on.

        Returns:
            The first record that is not acknowledged then; later than ``seq`` if the log was truncated.

        Raises:
            PybkError: With ``outcome_unknown`` the cursor may have moved; otherwise it has not.
        """
        with self._moving:
            if seq < max(self._bound.seq, self._raised):
                bound = self._bound._replace(seq=seq)
                seq = self._log.perform(ledger_list.lower_cursor(self._log.name, bound))
                self._bound, self._raised = bound._replace(seq=seq), seq
            seq = max(seq, self._log.existing().record.first_seq)
            self.repair()
            with self.lock:
                self._append(lambda: [encode_seek(seq)], kick=False).result()
                self.state.seek(seq)
                self._unsure = False
                self._renewal = None
                if self.counts:
                    self.leased_end = 0
        return seq

    def lease(self, end: int) -> None:
        """Record that records before ``end`` may be handed out, if deliveries are still recorded.

        Raises:
            PybkError: As for ``ack``.
        """
        self.repair()
        with self.lock:
            if self._settled:
                raise self._writer.closed_error()
            state, future = self.state, self._record([encode_lease(end)])
            state.lease_end = end
        future.result()
        with self.lock:
            if state.lease_end == end and not self._settled:  # else it was sought meanwhile
                self.leased_end = end

    def hand_again(self, handed: Iterable[Handed]) -> None:
        """Record deliveries of records, before they are handed out again; durable on return, errors as for ``ack``."""
        if not self.counts:
            return
        counts: dict[int, Ranges] = {}
        for each in handed:
            counts.setdefault(each.redeliveries + 1, []).append((each.first, each.end))
        if not counts:
            return
        self.repair()
        with self.lock:
            future = self._record([encode_again(merged(ranges), count) for count, ranges in counts.items()])
            for count, ranges in counts.items():
                for first, end in ranges:
                    self.state.hand_again(first, end, count)
        future.result()

    def _record(self, records: list[bytes]) -> RecordFuture[range]:
        """Stage records of deliveries."""
        with self.lock:
            future = self._append(lambda: records, kick=False)
            self._changes_bytes += sum(map(len, records))
            self._unsure = False
        return future

    def expire(self) -> int:
        """Count records that the log has dropped as acknowledged; return how many of them were not."""
        first_seq = self._log.existing().record.first_seq
        if first_seq <= self.state.first_unacked:
            return 0
        self.repair()
        return self.ack([(0, first_seq)], {}, kick=False).result()

    def raise_bound(self) -> None:
        """Let the log drop the records before the first one that is not acknowledged (rule T9)."""
        with self._moving:
            if self.state.first_unacked > self._bound.seq:
                self.repair()
            with self.lock:
                if self.state.first_unacked <= self._bound.seq:
                    return
                future = self._writer.operate(self._said_again)
                seq = self.state.first_unacked
            if future is not None:
                future.result()
                bound, self._raised = self._bound._replace(seq=seq), seq
                found = self._log.perform(ledger_list.raise_cursor(self._log.name, bound))
                self._bound = bound._replace(seq=found)

    def _said_again(self) -> RecordFuture[range] | None:
        """Stage a record that says where the state begins; the caller holds the lock, and keeps repairs away.

        Returns:
            None if that is where the bound is, because acknowledgements were refused.
        """
        self._mend()
        while (seq := self.state.first_unacked) > self._bound.seq:
            record = encode_acks([(0, seq)])
            future = self._staged(partial(self._writer.append_unless_broken, PlainBatch((record,)), kick=False))
            if future is not None:
                self._unsure = False
                return future
            self._mend()
        return None

    def on_timer(self) -> None:
        """Raise the bound, some time after acknowledgements."""
        with self.lock:
            self._timed = False
        if not self.closed:
            try:
                self.raise_bound()
            except LogFencedError:
                pass  # the next acknowledgement says so
            except (PybkError, OSError) as error:
                if not self.closed:
                    logger.warning(_KEEPS_MORE, self._writer.steps.name, error)

    # ---- staging -------------------------------------------------------------------------------------------------

    def _append(self, encode: Callable[[], list[bytes]], *, kick: bool) -> RecordFuture[range]:
        """Stage the records that ``encode`` returns; the caller holds the lock, and then changes the state."""
        while True:
            self._mend()
            future = self._staged(lambda: self._writer.append_unless_broken(PlainBatch(encode()), kick=kick))
            if future is not None:
                return future

    def _staged(self, stage: Callable[[], R | None]) -> R | None:
        """Call a function that stages a record, or returns None; until the state changes, it differs from the list."""
        self._unsure = True
        try:
            staged = stage()
        except PybkError:
            self._unsure = False
            raise
        self._unsure = staged is not None
        return staged

    def _repaired(self, _: ListRecord) -> None:
        self._repairs += 1

    @property
    def _is_stale(self) -> bool:
        """True if the list may differ from the state."""
        return self._unsure or self._repairs != self._known_repairs

    def _mend(self) -> None:
        """Repair the list if that is due, and make the state anew if it was repaired; the caller holds the lock."""
        self._writer.repair()
        if self._is_stale:
            repairs = self._repairs
            self._writer.flush()
            self.state.become(_replayed_now(self._writer.steps, self._bound).state)
            self._renewal = None
            self._known_repairs, self._unsure = repairs, False

    # ---- whole states --------------------------------------------------------------------------------------------

    def _is_long(self) -> bool:
        """Return whether a whole state is due."""
        if self._writer.appender.segment is not self._state_segment:
            return self._changes_bytes >= self._state_bytes  # a state that is longer than a segment has rolled it
        return self._changes_bytes > max(CHANGES_BYTES, CHANGES_FACTOR * self._state_bytes)

    def _begin(self) -> None:
        """Write a whole state, if it is short, as an open has to, and wait until that is durable."""
        state, leased = self.state, self.state.lease_end > 0
        if leased:
            state.end_lease(self._log.last_seq() + 1)
        if not self._in_parts or state.range_count <= RANGES_AT_OPEN:
            with self.lock:
                whole = self._write_part(SEQ_MAX)
            assert whole is not None, "it is one part"
            self._truncate(*whole)
        elif leased:
            self._record([encode_handed(state.handed_end)]).result()

    def _renew(self) -> None:
        """Write a part of a whole state; after the last one, drop what is before the state."""
        try:
            with self.lock:
                since = 0 if self._renewal is None else self._ranges_since
                whole = self._write_part(max(PART_LEAST, 2 * since))
        except (PybkError, OSError) as error:
            if not self.closed:
                logger.warning("the cursor %r keeps records that it does not need: %s", self._writer.steps.name, error)
        else:
            if whole is not None:
                self._truncate(*whole)
        finally:
            self._renewing = False

    def _write_part(self, most: int) -> tuple[RecordFuture[range], RecordFuture[range]] | None:
        """Stage the next part of a whole state; the caller holds the lock.

        Returns:
            The futures of its first and its last part, once all were staged.
        """
        renewal, part = _Renewal(), StatePart([], None)

        def encode() -> list[bytes]:
            nonlocal renewal, part
            renewal = self._renewal = self._renewal or _Renewal()
            part = self.state.part(renewal.at, most) if self._in_parts else StatePart(self.state.encode(), None)
            return part.records

        future = self._writer.operate(lambda: self._append(encode, kick=True))
        if renewal.begun is None:
            renewal.begun, self._changes_bytes = future, 0
        renewal.at, renewal.nbytes = part.after, renewal.nbytes + sum(map(len, part.records))
        self._ranges_since, self._unsure = 0, False
        if part.after is not None:
            return None
        self._renewal = None
        self._state_bytes, self._state_segment = renewal.nbytes, self._writer.appender.segment
        return renewal.begun, future

    def _truncate(self, begun: RecordFuture[range], ended: RecordFuture[range]) -> None:
        """Drop the records before a whole state, once that is durable."""
        steps, appender = self._writer.steps, self._writer.appender
        try:
            ended.result()
            first = begun.result()[0]
            self._writer.operate(
                lambda: steps.perform(ledger_list.truncate(steps.name, appender.epoch, appender.generation, first))
            )
        except (PybkError, OSError) as error:
            if not self.closed:
                logger.warning("the cursor %r keeps records that it does not need: %s", steps.name, error)


class MemoryCursor:
    """The cursor of a subscription that is not durable: the log keeps no records for it, and it ends with the process.

    Attributes:
        name: The subscription's.
        state: The acknowledged records; guarded by ``lock``.
        lock: Guards the state.

    Threads: any.
    """

    def __init__(self, log: LedgerSteps, name: str, start_seq: int) -> None:
        self.name: Final = name
        self.state = CursorState(start_seq)
        self.lock = threading.RLock()
        self.closed = self.counts = False
        self.leased_end: Final = SEQ_MAX
        self._log = log

    def close(self) -> None:
        """Release it."""
        self.closed = True

    def settle(self, handed_end: Callable[[], int]) -> None:
        """Do nothing: no deliveries are recorded."""

    def lease(self, end: int) -> None:
        """Do nothing: no deliveries are recorded."""

    def hand_again(self, handed: Iterable[Handed]) -> None:
        """Do nothing: no deliveries are recorded."""

    def delete(self) -> None:
        """Release it."""
        self.closed = True

    def ack(self, ranges: Ranges, properties: Mapping[str, int | str], *, kick: bool) -> RecordFuture[int]:
        """Acknowledge records as ``Cursor.ack`` does, in memory alone."""
        with self.lock:
            return self.ack_at_once(ranges, properties)

    def ack_at_once(self, ranges: Ranges, properties: Mapping[str, int | str]) -> RecordFuture[int]:
        """Acknowledge as ``ack`` does; the caller has the lock."""
        return done_future(self._acked(ranges, properties))

    def _acked(self, ranges: Ranges, properties: Mapping[str, int | str]) -> int:
        self.state.properties |= properties
        return sum(self.state.ack(first, end) for first, end in ranges)

    def hold(
        self, ranges: Ranges, properties: Mapping[str, int | str], stage: Callable[[GroupPart], R | None]
    ) -> tuple[R, int] | None:
        """Acknowledge as a part of a group, in memory alone; the caller has the lock."""
        staged = stage(GroupPart())
        return None if staged is None else (staged, self._acked(ranges, properties))

    def repair(self) -> None:
        """Do nothing."""

    def prepare(self) -> None:
        """Do nothing."""

    def seek(self, seq: int) -> int:
        """Move as ``Cursor.seek`` does."""
        seq = max(seq, self._log.existing().record.first_seq)
        with self.lock:
            self.state.seek(seq)
        return seq

    def expire(self) -> int:
        """Count records that the log has dropped as acknowledged; return how many of them were not."""
        first_seq = self._log.existing().record.first_seq
        with self.lock:
            return self.state.ack(0, first_seq)


def delete_cursor(manager: LedgerManager, log: LedgerSteps, name: str, *, steal: bool = False) -> bool:
    """Delete a subscription that no process owns, even if its cursor is damaged; return whether it existed.

    Raises:
        LogLockedError: A live owner has it, and ``steal`` is False.
    """
    bound = log.bound(name)
    if bound is None:
        return False
    writer = _writer_of(manager, log, name)
    with writer.kept_away(steal=steal, remedy=_DELETE_REMEDY):
        log.perform(ledger_list.remove_cursor(log.name, name, bound.uid))
        _drop(writer.steps, bytes.fromhex(bound.uid))
    return True


def read_cursor(manager: LedgerManager, log: LedgerSteps, bound: CursorBound) -> CursorState:
    """Return the durable state of a subscription's cursor, without becoming its owner.

    Raises:
        CorruptError: The cursor is damaged or missing.
    """
    steps = LedgerSteps(manager, cursor_list_name(log.name, bound.name), _spec_of(log))
    while True:
        found = steps.read()
        if found is None or found.record.dropped or found.record.uid.hex() != bound.uid:
            return CursorState(max(bound.seq, log.existing().record.first_seq))  # its list is being made, or deleted
        try:
            state = _replayed_now(steps, bound).state
            state.ack(0, log.existing().record.first_seq)  # its owner counts those once it sees them dropped
            return state
        except NoSuchLogError:
            continue


def _spec_of(log: LedgerSteps) -> LedgerSpec:
    return log.full_spec().of_cursors()


def _writer_of(manager: LedgerManager, log: LedgerSteps, name: str) -> ListWriter:
    writer = ListWriter(manager, cursor_list_name(log.name, name), _spec_of(log), RollPolicy(CURSOR_SEGMENT_BYTES))
    writer.steps.made_as = partial(_spec_of, log)
    return writer


def _listed(log: LedgerSteps, name: str, start_seq: Callable[[], int]) -> CursorBound:
    """Return what the log's record says of a subscription, which is listed now unless it was before."""
    bound = log.bound(name)
    if bound is None:
        new = CursorBound(name, start_seq(), secrets.token_hex(UID_BYTES))
        bound = log.perform(ledger_list.add_cursor(log.name, new))
    return bound


def _list_made(log: LedgerSteps, steps: LedgerSteps, bound: CursorBound) -> bool:
    """Make the list of a cursor unless it exists; False if it was one of a deleted subscription, which is gone now."""
    record = steps.perform(ledger_list.create(steps.name, ListKind.CURSOR, bytes.fromhex(bound.uid), 0))
    if record.uid.hex() == bound.uid:
        return True
    if log.bound(bound.name) == bound:
        _drop(steps, record.uid)
    return False


def _drop_unlisted(log: LedgerSteps, steps: LedgerSteps, bound: CursorBound) -> None:
    """Delete the list of a cursor that could not be opened, if the log or the subscription was deleted meanwhile."""
    with suppress(PybkError):
        found = log.read()
        listed = None if found is None or found.record.dropped else log.bound_in(found.record, bound.name)
        if listed is None or listed.uid != bound.uid:
            _drop(steps, bytes.fromhex(bound.uid))


def _drop(steps: LedgerSteps, uid: bytes) -> None:
    """Delete the list of this uid, and none that has got its name since."""
    pinned = LedgerSteps(steps.manager, steps.name, steps.spec)
    pinned.uid = uid
    pinned.perform(ledger_list.drop(steps.name))


def _replayed(steps: LedgerSteps, bound: CursorBound) -> _Replayed:
    """Return the state that the records of a list result in; one that begins at the bound if they have none.

    A list without records is one whose making was interrupted, so nothing was ever acknowledged.

    Raises:
        CorruptError: A record is damaged or missing.
    """
    state, nbytes = CursorState(bound.seq), 0
    reader = RecordReader(steps, None)
    first = reader.seq
    try:
        while (records := reader.read()) is not None:
            for seq, data in enumerate(records.data(), records.first_seq):
                where = f"the cursor {steps.name!r}, record {seq}"
                if seq == first and not is_state(data, where=where):
                    raise CorruptError(f"{where} does not begin a whole state; restore the cursor's ledgers")
                state.apply(data, where=where)
                nbytes += len(data)
    except DAMAGE as error:
        raise _lost(steps, bound, error) from error
    finally:
        reader.close()
    if not state.is_whole:
        raise _lost(steps, bound, "parts of its last state are missing")
    return _Replayed(state, nbytes)


def _replayed_now(steps: LedgerSteps, bound: CursorBound) -> _Replayed:
    """Return what ``_replayed`` does, also if the list is truncated to a later state meanwhile."""
    while True:
        with suppress(TruncatedError):
            return _replayed(steps, bound)


def _lost(steps: LedgerSteps, bound: CursorBound, why: object) -> CorruptError:
    return CorruptError(
        f"the cursor {steps.name!r} is damaged ({why}); restore its ledgers, or delete subscription {bound.name!r} and "
        f"subscribe again with start={bound.seq}, from where on it may have records that are not acknowledged"
    )
