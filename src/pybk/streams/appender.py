"""Appends records to the open segment of a log, and continues in a new segment when that is due.

Theory of operation
===================

**Order.** One lock orders everything: under it a record gets its sequence number and its entry is staged, so sequence
numbers and entries ascend together. Waiting for durability happens outside of it, so threads share commits.

**Rolls** run in a thread of their own, and hold the lock only to switch. The switch waits until everything that was
appended is acknowledged, because no record of the new segment may outlive one of the old (rule T3); that takes as long
as one append.

**Repair.** Each entry is staged after the one that this writer staged last, or not at all. If a signal interrupted a
batch while it waited for space, or if entries were refused because space was short, the ledger does not end with that
entry. Then the log's owner calls ``repair``: it closes the ledger, which establishes its entries, and continues the log
in a new segment.

**Losses.** A ledger on bookies is *lost* if its writer has ended because too few of them answered, or the metadata
store did not. It has all entries that were acknowledged, and may have others. So each transaction is kept, with the
batch in which its last entry was staged, until that batch is acknowledged. ``repair`` recovers the lost segment (rule
T15) and switches to a new one. Of the transactions that were kept, ``switch`` completes those that the recovered
segment holds. It appends the others again, before any new record and under the same numbers. Their futures wait for the
old batches, which are completed with the new ones (``Kept.origins``). They fail only if the repair does not succeed in
time (``give_up``).

**Futures** of appends (``RecordFuture``) are those of entries, and share the ``Fate`` of the writer: what was appended
again has another position, and what its ledger raises is said of the log.

**Locks.** ``_lock`` guards ``_writer``, ``_last_entry``, ``next_seq``, ``segment``, ``segment_bytes`` and
``segment_records``, ``_owed`` and ``lost``. It is taken before the locks of a ledger, and held while an append waits
for admission. Appends run in a guard (``threads/interrupts.py``), so a signal interrupts them only while they wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar, cast

from pybk import manager as handles
from pybk.backend import AppendLog
from pybk.errors import (
    LedgerClosedError,
    LedgerFencedError,
    LedgerRecoveryError,
    LogFencedError,
    MetadataUnreachableError,
    NoSuchLedgerError,
    NotEnoughBookiesError,
    PybkError,
    StorageRefusedError,
    UsageError,
)
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.append_future import ACKNOWLEDGED, AppendFuture, T, origin_of
from pybk.manager.ledger_writer import (
    LedgerWriter,
    Staged,
    check_takes_entries,
    ends_with,
    group_entries,
    keeping_log,
    stage,
    stage_many,
)
from pybk.storage.descriptor import DisplacedError
from pybk.streams.format import (
    Highest,
    Move,
    Position,
    encode_record,
    encode_records,
    highest_after,
    moved,
    records_bytes,
)
from pybk.streams.ledger_list import Owned, held_of
from pybk.streams.list_record import Segment
from pybk.threads.group_commit import Completion
from pybk.threads.interrupts import Holding, guarded

if TYPE_CHECKING:
    from pybk.manager.atomic_group import GroupPart

SET_BYTES: Final = 64 << 10
"""Bytes of records that a batch puts in one entry; with so many, the costs of an entry hardly count."""


T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class Batch(Protocol[T_co]):
    """Records that are appended together, all or nothing.

    Attributes:
        records: The number of records, at least one.
    """

    @property
    def records(self) -> int:
        """The number of records."""

    def encode(self, seq: int) -> list[bytes]:
        """Return the entries, given the sequence number of the first record; an exception appends nothing."""

    def staged(self, seq: int, segment: int, entry: int) -> T_co:
        """Return the result of the append, given the first record, its segment's number and its entry there."""


class PlainBatch(NamedTuple):
    """Records with only data; a single record may have an event time. Appending them returns sequence numbers.

    Attributes:
        payloads: Their data, at least one.
        time_ns: The event time of a single record; None for none.
    """

    payloads: Sequence[bytes]
    time_ns: int | None = None

    @property
    def records(self) -> int:
        """The number of records."""
        return len(self.payloads)

    def encode(self, seq: int) -> list[bytes]:
        """Return entries of about ``SET_BYTES``."""
        if len(self.payloads) == 1:
            return [encode_record(seq, self.payloads[0], self.time_ns)]
        pieces = pieces_of(self.payloads, [records_bytes(len(data), 2) for data in self.payloads])
        entries = []
        for number, piece in enumerate(pieces, 1):
            entries.append(encode_records(seq, piece, more=number < len(pieces)))
            seq += len(piece)
        return entries

    def staged(self, seq: int, segment: int, entry: int) -> range:
        """Return the sequence numbers."""
        return range(seq, seq + len(self.payloads))


class Kept(NamedTuple):
    """A transaction that is appended again if its ledger is lost before it is acknowledged.

    Attributes:
        seq: Its first record.
        records: The number of its records.
        payloads: Its entries.
        segment: The number of the segment that it was appended to first.
        entry: Its first entry there.
        origins: Lost batches that are completed when it is acknowledged, because it is the last transaction in them.
    """

    seq: int
    records: int
    payloads: list[bytes]
    segment: int
    entry: int
    origins: tuple[Completion, ...] = ()


class Appender:
    """The writer of a log, from a take-over to its close.

    Args:
        title: The name of the log in errors; see ``names.title_of``.

    Threads: any.

    Attributes:
        epoch: Its epoch; 0 before the take-over.
        generation: The generation of its records.
        next_seq: The sequence number of the next record.
        segment: The segment that it appends to; None before the take-over, and once it is closed.
        segment_bytes: Payload bytes in that segment.
        segment_records: Records in that segment.
        needs_repair: Whether ``repair`` is due, because there is no open segment, or it does not end where it should.
        lost: Whether ``repair`` is due because a ledger was lost.
        on_lost: Called when a ledger is lost, see ``KeepingLog``.
        fate: The fate of its records, which its futures share.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._writers: dict[int, LedgerWriter] = {}
        """Writers of ledgers that are not closed, by ledger; attempts of a roll may create several ledgers of one
        number."""
        self._writer: LedgerWriter | None = None
        self._last_entry = -1
        self._tip = (-1, 0)
        """The last record that was staged, and its entry; one value, because it is read without the lock."""
        self.segment: Segment | None = None
        self.next_seq = 0
        self.epoch = 0
        self.generation = 0
        self.segment_bytes = 0
        self.segment_records = 0
        self.needs_repair = False
        self.lost = False
        self.on_lost: Callable[[], None] = lambda: None
        self.fate = Fate()
        self._is_cut_off = False
        """True if the ledger of the open segment was fenced, and lacks entries that were staged."""
        self._unsure: set[int] = set()
        """Ledgers whose close may or may not have been written, because the metadata store was away."""
        self._owed: list[Kept] = []
        """Transactions of lost ledgers to append again, unless a recovered segment holds them; in order."""
        self._earlier = (0, 0)
        """Records and payload bytes that it appended to segments before the present one."""

    # ---- what it has done ----------------------------------------------------------------------------------------

    @property
    def appended(self) -> tuple[int, int]:
        """The number of records that it appended, and the payload bytes of their entries."""
        records, nbytes = self._earlier
        return records + self.segment_records, nbytes + self.segment_bytes

    @property
    def durable_seq(self) -> int | None:
        """The last record, if all records were acknowledged; None otherwise, because entries have to be read then."""
        # Without the lock, which is held while an append waits. No entry that was refused is ever confirmed.
        (seq, entry), writer = self._tip, self._writer
        return seq if writer is not None and writer.last_add_confirmed >= entry else None

    @property
    def has_unreported_failures(self) -> bool:
        """True if appends failed because another owner has the log, and no call or future has reported that."""
        (_, entry), writer = self._tip, self._writer
        is_cut_off = self._is_cut_off or (writer is not None and writer.last_add_confirmed < entry)
        return is_cut_off and not self.fate.is_fence_reported

    # ---- what steps call -----------------------------------------------------------------------------------------

    def created(self, writer: LedgerWriter) -> None:
        """Keep the writer of a new ledger."""
        log = keeping_log(writer)
        if log is not None:
            log.on_lost = self.on_lost
        self._writers[writer.ledger_id] = writer

    def deleted(self, ledger_id: int) -> None:
        """Drop the writer of a ledger that was never listed."""
        self._writers.pop(ledger_id, None)

    def take(self, owned: Owned) -> None:
        """Begin to append, after a take-over or a cut."""
        self.epoch = owned.record.epoch
        self.generation = owned.record.generation
        self.give_up(
            NotEnoughBookiesError(f"{self._title} was cut before the bookies had these records", outcome_unknown=True)
        )
        self.switch(owned.segment)

    def switch(self, segment: Segment) -> None:
        """Append further records to a segment."""
        guarded(self._switch, segment)

    def _switch(self, segment: Segment) -> None:
        with Holding(self._lock):
            if segment.first_seq is not None:
                self.next_seq = segment.first_seq
                self._settle_held(segment.first_seq)
            elif self._writer is not None:
                self._drain(self._writer)
            self.needs_repair = True  # until all of the following is done
            self._tip = (self.next_seq - 1, 0)
            self._writer = self._writers[segment.ledger_id]
            self._last_entry = 0  # its header
            self.segment = segment
            self._earlier = self._appended_but_owed()
            self.segment_bytes = self.segment_records = 0
            self._append_owed(segment.number)
            self.needs_repair = self.lost = False

    def _drain(self, writer: LedgerWriter) -> None:
        """Return when everything that was appended is acknowledged; raises if the ledger ends elsewhere."""
        try:
            self.needs_repair = self.needs_repair or not ends_with(writer, self._last_entry)
            writer.force()
        except PybkError as error:
            self.needs_repair = True
            raise log_error(error, self._title) from error
        if self.needs_repair:
            raise StorageRefusedError(f"{self._title}: appends were refused or interrupted, so it is repaired first")

    def close_segment(self, segment: Segment) -> bool:
        """Wait for what was appended to a segment, and close its ledger; False if it is lost."""
        writer = self._writers.get(segment.ledger_id)
        if writer is None:
            return True  # an interrupted call closed it
        with self._lock:
            is_present = writer is self._writer
            if is_present:
                self.needs_repair = True
                self._writer = self.segment = None
        try:
            writer.close()
        except (LedgerFencedError, NoSuchLedgerError):
            self._is_cut_off = self._is_cut_off or (is_present and writer.last_add_confirmed < self._tip[1])
            raise
        except LOSSES as error:
            log = keeping_log(writer)
            if log is None or not log.is_lost:
                raise
            with self._lock:
                self._take_lost(writer)
                if isinstance(error, MetadataUnreachableError):
                    self._unsure.add(segment.ledger_id)
            return False
        self._writers.pop(segment.ledger_id, None)
        return True

    def has_closed(self, metadata: LedgerMetadata) -> bool:
        """Return whether a ledger is closed where this writer tried to close it without getting an answer."""
        writer = self._writers.get(metadata.ledger_id)
        return (
            writer is not None
            and metadata.ledger_id in self._unsure
            and metadata.state is LedgerState.CLOSED
            and metadata.last_entry_id == writer.last_add_confirmed
        )

    # ---- what was lost -------------------------------------------------------------------------------------------

    def notice_loss(self) -> bool:
        """Check whether the ledger of the open segment is lost; return whether any is. Not to be called in a switch."""
        with self._lock:
            log = None if self._writer is None else keeping_log(self._writer)
            if log is not None and log.is_lost:
                self.lost = self.needs_repair = True
            return self.lost

    def _take_lost(self, writer: LedgerWriter) -> None:
        """Owe what a lost ledger kept; the caller holds the lock.

        May be repeated after an interrupt: what is owed, or done, is not owed again.
        """
        self.lost = self.needs_repair = True
        log = keeping_log(writer)
        assert log is not None, "a store has no bookies to lose"
        known = {origin for each in self._owed for origin in each.origins}
        owed: list[Kept] = []
        for batch in log.lost():
            if batch.done:  # the leader may have been interrupted before it completed the origins, too
                log.settle([origin for each in batch.kept or () for origin in each.origins], batch.error)
            elif batch.kept and batch not in known:
                last = batch.kept[-1]
                owed += [*batch.kept[:-1], last._replace(origins=(*last.origins, batch))]
            elif not batch.kept:
                log.settle([batch])  # no transaction ends in it, so that nobody waits for it
        self._owed = owed + self._owed
        log.forget_lost()

    def _settle_held(self, end_seq: int) -> None:
        """Complete the transactions of lost ledgers that the list holds, which ends before a record (rule T15)."""
        for _ in range(held_of([each.seq for each in self._owed], end_seq)):
            self._settle(self._owed[0].origins, None)
            del self._owed[0]

    def _settle(self, origins: Sequence[Completion], error: PybkError | None) -> None:
        """Complete lost batches, by any ledger on bookies."""
        log = next(filter(None, map(keeping_log, self._writers.values())), None)
        assert log is not None or not origins, "only ledgers on bookies are lost"
        if log is not None:
            log.settle(origins, error)

    def _appended_but_owed(self) -> tuple[int, int]:
        """Return ``appended`` without the transactions that are to be appended again."""
        records, nbytes = self.appended
        for each in self._owed:
            records, nbytes = records - each.records, nbytes - sum(map(len, each.payloads))
        return records, nbytes

    def _append_owed(self, segment: int) -> None:
        """Append the owed transactions to this segment, under the same numbers; the caller holds the lock."""
        if self._owed:
            first = self._owed[0]
            now = moved(Position(first.segment, first.entry, 0, first.seq), self.fate.moves)
            self.fate.moves.append(Move(now.segment, now.entry, segment))
        writer = self._writer
        assert writer is not None
        while self._owed:
            kept = self._owed[0]
            if kept.seq >= self.next_seq:  # else it was appended, and what came then has failed
                assert kept.seq == self.next_seq, "a transaction is missing"
                staged = stage_many(writer, kept.payloads, self._last_entry, kick=True)
                assert staged is not None, "nothing else is appended"
                log = keeping_log(writer)
                assert log is not None, "a store has no bookies to lose"
                log.keep(staged[1], kept)
                self._count(len(kept.payloads), sum(map(len, kept.payloads)), kept.records)
            del self._owed[0]

    def _keep(self, staged: Staged, payloads: list[bytes], records: int) -> None:
        """Keep a transaction that was staged now, before it is counted, until it is acknowledged."""
        kept, segment = staged[1].kept, self.segment
        if kept is not None and segment is not None:  # else it is acknowledged by now, or the ledger is in a store
            kept.append(Kept(self.next_seq, records, payloads, segment.number, self._last_entry + 1))

    def highest_owed(self) -> Highest | None:
        """Return the highest values up to the last record that is owed; None without such a record."""
        with self._lock:
            return highest_after(self._owed[-1].payloads[-1], where=self._title) if self._owed else None

    def give_up(self, error: PybkError) -> bool:
        """Fail the transactions of lost ledgers that are not known to be durable; return whether there were any."""
        with self._lock:
            for writer in self._writers.values():
                log = keeping_log(writer)
                if log is not None and log.is_lost:
                    self._take_lost(writer)
            had_any = bool(self._owed)
            while self._owed:
                self._settle(self._owed[0].origins, error)
                del self._owed[0]
            return had_any

    # ---- appending -----------------------------------------------------------------------------------------------

    def append(self, data: bytes, time_ns: int | None, *, kick: bool, wait: bool = True) -> RecordFuture[int] | None:
        """Stage one record.

        Args:
            data: The application's bytes.
            time_ns: Its event time; None for none.
            kick: As for ``pybk.manager.ledger_writer.stage``.
            wait: As for ``pybk.manager.ledger_writer.stage``.

        Returns:
            A future of its sequence number; None if ``needs_repair`` is set, and nothing was done.
        """
        return guarded(self._append, data, time_ns, kick, wait)

    def _append(self, data: bytes, time_ns: int | None, kick: bool, wait: bool) -> RecordFuture[int] | None:
        with Holding(self._lock):
            seq = self.next_seq
            staged = self._stage(encode_record(seq, data, time_ns), 1, kick=kick, wait=wait)
        return None if staged is None else RecordFuture(*staged, seq, self._title, self.fate)

    def append_batch(self, batch: Batch[T], *, kick: bool, wait: bool = True) -> RecordFuture[T] | None:
        """Stage records as one transaction; return a future of the batch's result, or None as ``append`` does."""
        return guarded(self._append_in_turn, batch, kick, wait)

    def _append_in_turn(self, batch: Batch[T], kick: bool, wait: bool) -> RecordFuture[T] | None:
        with Holding(self._lock):
            return self._append_batch(batch, kick=kick, wait=wait)

    def append_at_once(self, batch: Batch[T]) -> RecordFuture[T] | None:
        """Stage records; return None, with nothing done, if the call might have to wait for the lock or a repair."""
        return guarded(self._append_at_once, batch)

    def _append_at_once(self, batch: Batch[T]) -> RecordFuture[T] | None:
        if not self._lock.acquire(False):
            return None
        try:
            return self._append_batch(batch, kick=True, wait=False, several=False)
        finally:
            self._lock.release()

    def _append_batch(self, batch: Batch[T], *, kick: bool, wait: bool, several: bool = True) -> RecordFuture[T] | None:
        """Stage records; the caller holds the lock. Without ``several`` None for those that need several entries."""
        if self.needs_repair or self.segment is None:
            return None
        seq, number, entry = self.next_seq, self.segment.number, self._last_entry + 1
        payloads = self._encoded(batch)
        if payloads is None:
            return None
        if len(payloads) == 1:
            staged = self._stage(payloads[0], batch.records, kick=kick, wait=wait)
        elif several:
            staged = self._stage_many(payloads, batch.records, kick=kick)
        else:
            return None
        return (
            None if staged is None else RecordFuture(*staged, batch.staged(seq, number, entry), self._title, self.fate)
        )

    def hold(self, batch: Batch[T], stage: Callable[[GroupPart], R | None]) -> tuple[R, T] | None:
        """Stage records as a part of a group, with the lock held.

        Args:
            batch: The records.
            stage: Stages the group, given the entries; returns None if nothing was staged.

        Returns:
            The result of ``stage``, and the batch's result; None if ``needs_repair`` is set, or if ``stage``
            returned None.

        Raises:
            LogFencedError: Another writer took the log over; nothing was staged.
            DisplacedError: A log of the group ends elsewhere; ``needs_repair`` is set if it is this one. Nothing was
                staged.
        """
        return guarded(lambda: self._hold(batch, stage))

    def _hold(self, batch: Batch[T], stage: Callable[[GroupPart], R | None]) -> tuple[R, T] | None:
        with Holding(self._lock):
            writer, segment = self._writer, self.segment
            if self.needs_repair or writer is None or segment is None:
                return None
            seq, entry = self.next_seq, self._last_entry + 1
            payloads = self._encoded(batch)
            if payloads is None:
                return None
            self.needs_repair = True  # until it is known what was staged, also if a signal interrupts a wait
            try:
                staged = stage(handles.GroupPart(group_entries(writer, payloads, self._last_entry)))
            except DisplacedError:
                self.needs_repair = not ends_with(writer, self._last_entry)
                raise
            except PybkError as error:
                self.needs_repair = False
                raise _nothing_staged(error, self._title) from error
            if staged is not None:
                self._count(len(payloads), sum(map(len, payloads)), batch.records)
            self.needs_repair = False
            return None if staged is None else (staged, batch.staged(seq, segment.number, entry))

    def _encoded(self, batch: Batch[Any]) -> list[bytes] | None:
        """Return the entries of records that come next; the caller holds the lock.

        Returns:
            None, with ``needs_repair`` set, if the batch refuses to follow records that were themselves refused.
        """
        try:
            return batch.encode(self.next_seq)
        except PybkError:
            writer = self._writer
            if writer is None:
                return None
            try:
                check_takes_entries(writer)
            except LOSSES:
                self.lost = self.needs_repair = True
                return None
            except PybkError as error:
                raise log_error(error, self._title, refused=True) from error
            self.needs_repair = not ends_with(writer, self._last_entry)
            if not self.needs_repair:
                raise
            return None

    def _stage(self, payload: bytes, records: int, *, kick: bool, wait: bool = True) -> Staged | None:
        """Stage an entry with some records after those before; the caller holds the lock."""
        writer = self._writer
        if self.needs_repair or writer is None:
            return None
        try:
            staged = stage(writer, payload, self._last_entry, kick=kick, wait=wait)
        except LOSSES:
            self.lost = self.needs_repair = True
            return None
        except PybkError as error:
            raise log_error(error, self._title, refused=True) from error
        if staged is None:
            self.needs_repair = True
            return None
        if staged[1].kept is not None:
            self._keep(staged, [payload], records)
        self._count(1, len(payload), records)
        return staged

    def _stage_many(self, payloads: list[bytes], records: int, *, kick: bool) -> Staged | None:
        """Stage several entries as ``_stage`` stages one."""
        writer = self._writer
        if self.needs_repair or writer is None:
            return None
        self.needs_repair = True  # until all are staged, because some of them may be
        try:
            staged = stage_many(writer, payloads, self._last_entry, kick=kick)
        except LOSSES:
            self.lost = True  # a part of it may be there, which counts as none
            return None
        except PybkError as error:
            raise log_error(error, self._title, refused=True) from error
        if staged is not None:
            self._keep(staged, payloads, records)
            self._count(len(payloads), sum(map(len, payloads)), records)
            self.needs_repair = False
        return staged

    def _count(self, entries: int, nbytes: int, records: int) -> None:
        """Count records whose entries were staged; the caller holds the lock."""
        self._tip = (self.next_seq + records - 1, self._last_entry + entries)
        self.next_seq += records
        self.segment_bytes += nbytes
        self.segment_records += records
        self._last_entry += entries

    def flush(self) -> None:
        """Return when everything that was appended is durable."""
        with self._lock:
            writer = self._writer
        if writer is not None:
            try:
                writer.force()
            except PybkError as error:
                raise log_error(error, self._title) from error


def _nothing_staged(error: PybkError, title: str) -> PybkError:
    """Return an error of a group as that of a log; nothing was staged."""
    if isinstance(error, LedgerClosedError | LedgerFencedError | NoSuchLedgerError):
        return fenced_error(title, f" ({error}; nothing was appended)", outcome_unknown=False)
    return error


def pieces_of(records: Sequence[R], sizes: Sequence[int]) -> list[Sequence[R]]:
    """Cut records into pieces of about ``SET_BYTES``, given the bytes that each takes in an entry."""
    pieces: list[Sequence[R]] = []
    low = nbytes = 0
    for number, size in enumerate(sizes):
        if nbytes and nbytes + size > SET_BYTES:
            pieces.append(records[low:number])
            low, nbytes = number, 0
        nbytes += size
    pieces.append(records[low:])
    return pieces


def record_data(data: object, most: int, attribute_bytes: int = 0) -> bytes:
    """Return a record's data as bytes.

    Args:
        data: The application's.
        most: The most bytes that it and its attributes may have.
        attribute_bytes: The bytes of its key and headers.

    Raises:
        UsageError: It is not bytes, or too long.
    """
    try:
        view = memoryview(data)  # type: ignore[arg-type]  # anything with a buffer
    except TypeError:
        raise UsageError(
            f"a record takes bytes or another bytes-like object, not {type(data).__name__}; encode text first"
        ) from None
    if view.nbytes + attribute_bytes > most:
        attributes = f", and its key and headers {attribute_bytes}" if attribute_bytes else ""
        raise UsageError(
            f"the record has {view.nbytes} bytes{attributes}; it takes at most {most}: split it, or append it by a "
            "program that opens the store with StoreConfig(max_entry_bytes=...)"
        )
    return data if type(data) is bytes else view.tobytes()


class Fate:
    """The fate of the records of a log's writer, which its futures share.

    Attributes:
        moves: The entries that were appended again.
        is_fence_reported: Whether a call or a future has raised LogFencedError.
    """

    __slots__ = ("is_fence_reported", "moves")

    def __init__(self) -> None:
        self.moves: list[Move] = []
        self.is_fence_reported = False


class RecordFuture(AppendFuture[T]):
    """The outcome of an append to a log: an ``AppendFuture`` that raises the errors of logs.

    Threads: any.
    """

    __slots__ = ("_fate", "_title")

    def __init__(
        self, log: AppendLog, commit: Completion, value: T, title: str = "the log", fate: Fate | None = None
    ) -> None:
        self._log = log
        self._commit = commit
        self._value = value
        self._title = title
        self._fate = fate

    def result(self, timeout: float | None = None) -> T:
        """Wait for the append, and return its result; arguments and errors as for ``AppendFuture.result``."""
        value = super().result(timeout)
        fate = self._fate
        return _moved(value, fate.moves) if fate is not None and fate.moves else value

    def _error(self, error: PybkError) -> PybkError:
        error = log_error(error, self._title)
        if self._fate is not None and isinstance(error, LogFencedError):
            self._fate.is_fence_reported = True
        return super()._error(error)


def with_value(future: RecordFuture[Any], value: T) -> RecordFuture[T]:
    """Return a future of the same append that has another result."""
    return RecordFuture(*origin_of(future), value, future._title, future._fate)


def _moved(value: T, moves: Sequence[Move]) -> T:
    """Return the result of an append with the positions that its records have now."""
    found: Any = value
    if isinstance(found, Position):
        found = moved(found, moves)
    elif isinstance(found, list):
        found = [moved(each, moves) if isinstance(each, Position) else each for each in found]
    return cast(T, found)


LOSSES: Final = (NotEnoughBookiesError, MetadataUnreachableError, LedgerRecoveryError)
"""The errors of a ledger that is lost: its writer has ended because bookies or the metadata store did not answer, or
because the client was interrupted."""


def bookies_error(title: str, cause: Exception, seconds: float, *, outcome_unknown: bool) -> PybkError:
    """Return the error of a log's writer that has waited for bookies without result; the next append tries again.

    It is an error of the metadata store if that did not answer the last attempt.

    Args:
        title: The name of the log in errors; see ``names.title_of``.
        cause: The last error.
        seconds: Seconds for which it has waited.
        outcome_unknown: Whether records may have been appended nevertheless.
    """
    kind: type[PybkError] = NotEnoughBookiesError
    what = "too few bookies answered"
    if isinstance(cause, MetadataUnreachableError):
        kind, what = MetadataUnreachableError, "the metadata store did not answer"
    return kind(
        f"{title}: {what} for {seconds:g} s (bookie_patience_seconds), at last: {cause}; the writer continues with the "
        "next append, once that is mended",
        outcome_unknown=outcome_unknown,
    )


class _NoLog:
    """Stands for the log of appends that are done when they are made."""

    def when_done(self, commit: Completion, callback: Callable[[], None]) -> None:
        """Call a callback, because the append is done."""
        callback()


_NO_LOG: Final = cast(AppendLog, _NoLog())


def done_future(value: T) -> RecordFuture[T]:
    """Return the future of an append that is durable already."""
    return RecordFuture(_NO_LOG, ACKNOWLEDGED, value)


def log_error(error: PybkError, title: str, *, refused: bool = False) -> PybkError:
    """Return the error of a log that corresponds to an error of one of its ledgers.

    Args:
        error: The error of the ledger.
        title: The name of the log in errors; see ``names.title_of``.
        refused: Whether the append was refused, unless ``error`` says that a part of it may be in the ledger.
    """
    if not isinstance(error, LedgerFencedError | NoSuchLedgerError):
        return error
    # A take-over also deletes ledgers without records, and a truncation after it those with records.
    unknown = error.outcome_unknown or not (refused or isinstance(error, LedgerFencedError))
    translated = fenced_error(title, f" ({error})", outcome_unknown=unknown)
    translated.__cause__ = error
    return translated


def fenced_error(title: str, why: str = "", *, outcome_unknown: bool | None = None) -> LogFencedError:
    """Return the error of a writer that may no longer append.

    Args:
        title: The name of the log in errors; see ``names.title_of``.
        why: The error of its ledger, in parentheses.
        outcome_unknown: As for ``PybkError``.
    """
    return LogFencedError(
        f"{title} was taken over by another owner, or deleted{why}; open it again, if this process should have it",
        outcome_unknown=outcome_unknown,
    )
