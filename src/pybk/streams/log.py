"""``Log``: a named log with one writer and any number of readers, which outlives them all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import Any, Final, NamedTuple

from pybk import streams
from pybk.config import StoreConfig
from pybk.credentials import Secret
from pybk.errors import LogFencedError, NoSuchEntryError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.append_future import duration_of, seconds_of
from pybk.manager.arguments import hints_of, whole_from
from pybk.manager.handle import opening_form, where_called
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.opening import LockWatch
from pybk.metadata.store import Watch
from pybk.streams import ledger_list
from pybk.streams.cursor import Cursor, MemoryCursor, checked_subscription, delete_cursor, read_cursor
from pybk.streams.detached_writer import Adoption, DetachedSegment, DetachedWriter, check_commit
from pybk.streams.format import DetachedHeader, Position
from pybk.streams.group_members import PropertiesMember
from pybk.streams.list_rebuild import RebuiltList, rebuild
from pybk.streams.list_record import QUERY_IDLE_SECONDS, SEQ_MAX, ListKind, ListRecord, checked_name, cursor_list_name
from pybk.streams.list_writer import OPEN_REMEDY, ListWriter, lock_name
from pybk.streams.log_reader import LogEnd, LogReader, Start, TxId, seq_of
from pybk.streams.log_record import LogRecord
from pybk.streams.log_settings import NO_SETTINGS, SETTINGS_PROPERTY, LedgerSpec, LogSettings, RollPolicy, spec_of
from pybk.streams.log_writer import LogWriter
from pybk.streams.named_list import NamedList
from pybk.streams.retention import RETENTION_PROPERTY, Retention, apply_at_rest, retention_of, set_retention
from pybk.streams.segment_merge import KEEP_SECONDS, SegmentMerge, checked_keep, merge_segments
from pybk.streams.subscription import MAX_UNACKED, Consuming, DeadLetters, Subscription
from pybk.threads.call_threads import asyncio_form
from pybk.values import INT64_MAX, flag_of

FIRST_SEQ: Final = 0
"""The sequence number of the first record of a log."""


_REMEMBER_SECONDS_MIN: Final = 3600.0
"""A commit whose answer was lost is made again well within this time."""

_SEAL_REMEDY: Final = "seal it there, with its writer's seal(), or close it there before it is sealed here"


class LogSegment(NamedTuple):
    """A segment of a log: one ledger.

    Attributes:
        number: Its number, from 1 up.
        ledger_id: Its ledger.
        first_seq: Its first record; None for an empty segment.
        last_seq: Its last record; None while it is open.
        nbytes: Payload bytes of its ledger; 0 while it is open.
        created_ns: The time when it was added, nanoseconds since 1970.
        closed_ns: The time when it was closed; 0 while it is open.
    """

    number: int
    ledger_id: int
    first_seq: int | None
    last_seq: int | None
    nbytes: int
    created_ns: int
    closed_ns: int


class SubscriptionState(NamedTuple):
    """The acknowledgements of a durable subscription, as its cursor has them on disk.

    Attributes:
        name: Its name.
        first_unacked: The first record that it has not acknowledged.
        backlog: The number of records of the log that it has not acknowledged.
        acked_ranges: The number of acknowledged ranges after the first record that is not acknowledged.
        properties: The application's, as set by acknowledgements.
    """

    name: str
    first_unacked: int
    backlog: int
    acked_ranges: int
    properties: Mapping[str, int | str]


class Log(NamedList, kinds=(ListKind.LOG, ListKind.CURSOR), first_seq=FIRST_SEQ):
    """A named log in a store or a cluster.

    Example::

        with Log.open("data/app", "orders", password=password) as log:
            with log.writer() as writer:
                position = writer.append(b"one", key=b"customer 7")
            for record in log.reader():
                print(record.position, record.data)

    A log has one writer at a time; a new writer fences the one before. Opening a log fences no writer. Records have
    positions and dense sequence numbers, and may have transaction ids, keys, headers and event times.

    Threads: any.
    Cost: Calls that return facts about the log read its present record: a round trip in a cluster.
    """

    __slots__ = ("__weakref__", "_subscriptions")

    def __init__(self, manager: LedgerManager, name: str, spec: LedgerSpec, *, owns: bool) -> None:
        """Use ``Log.open`` instead."""
        super().__init__(manager, name, spec, owns=owns)
        self._subscriptions: Sequence[Subscription] = ()
        """The subscriptions that may be open; kept here because one that its user dropped is closed with the log."""

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str] | LedgerManager,
        name: str,
        *,
        mode: str = "w",
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
        create: bool = True,
        digest_type: DigestType | None = None,
        storage_hints: Iterable[StorageHint] = (),
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
        config: StoreConfig | None = None,
    ) -> Log:
        """Open a log, without fencing its writer; ``writer`` does that.

        A log has no password before its first writer, because it has no ledger yet. The first writer's password becomes
        that of the log; openings with another one then raise UnauthorizedError.

        Arguments and errors are as for ``WriteAheadLog.open``. Mode "w" allows reading and changing the log; it erases
        nothing.

        Durability: A log that the call created is durable on return.
        Cost: One synced write to create it.
        """
        asked = LogSettings(quorums=quorums, digest_type=digest_type, storage_hints=hints_of(storage_hints))
        spec = spec_of(ListKind.LOG, password, secret, insecure, asked)
        create = flag_of(create, "create")
        begin = partial(cls._find, create=create and mode == "w")
        return cls._opened(where, name, spec, mode, begin, create=create, config=config)

    open_async = classmethod(opening_form(open))

    @classmethod
    def rebuild(
        cls,
        manager: LedgerManager,
        name: str,
        *,
        first_seq: int | None = None,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
    ) -> RebuiltList:
        """Rebuild a log whose record is lost or damaged, from its ledgers. A live writer is fenced.

        Records keep their positions, times, transaction ids, keys and headers. Arguments, results and errors are as for
        ``WriteAheadLog.rebuild``; ``first_seq`` corresponds to its ``first_lsn``.
        """
        first = None if first_seq is None else whole_from(first_seq, 0, "first_seq", "a sequence number", SEQ_MAX)
        return rebuild(manager, checked_name(name), spec_of(ListKind.LOG, password, secret, insecure), first)

    rebuild_async = classmethod(asyncio_form(rebuild))

    def _end(self) -> None:
        opened = self._alive()
        for reader in opened:
            if isinstance(reader, LogReader):
                reader.close()
        with ExitStack() as ending:
            if self._owns_manager:
                ending.callback(self._manager.close)
            for writer in opened:
                if isinstance(writer, LogWriter):
                    ending.callback(writer.close)
            for subscription in self._subscriptions:
                ending.callback(subscription.close)

    def __repr__(self) -> str:
        """Name the log."""
        return f"<Log {self.name!r} in {self._manager.location}{', closed' if self._closed else ''}>"

    def _has_unreported_failures(self) -> bool:
        return any(isinstance(each, LogWriter) and each._has_unreported_failures() for each in self._alive())

    # ---- writing and reading -------------------------------------------------------------------------------------

    def writer(
        self,
        *,
        wait: float = 0.0,
        steal: bool = False,
        ordered_txids: bool = True,
        segment_bytes: int | None = None,
        segment_age_s: float | None = None,
        segment_records: int | None = None,
    ) -> LogWriter:
        """Become the log's writer: fence the writer before, and recover its ledgers.

        Args:
            wait: Seconds to wait for a live writer to release the log.
            steal: Take it from a live writer, which is fenced.
            ordered_txids: Whether to refuse transaction ids that are lower than an earlier one.
            segment_bytes: Bytes after which the log continues in a new ledger; None for the value in the log's
                ``settings``, or 64 MiB if that has none.
            segment_age_s: Seconds after the first record of a ledger after which the log continues in a new one, even
                without further records; None likewise, with 4 hours.
            segment_records: Records after which the log continues in a new ledger; None likewise, without a limit.

        Raises:
            LogLockedError: A live writer has it, in this process or another.
            LogSealedError: It was sealed.
            NoSuchLogError: It was deleted.
            CorruptError: An acknowledged record is damaged or missing.

        Durability: All records that were acknowledged before are in the log.
        Cost: Four synced writes, and one scrypt, about 400 ms, for the first use of a password.
        """
        rolls = LogSettings(segment_bytes=segment_bytes, segment_age_s=segment_age_s, segment_records=segment_records)
        wait_s = duration_of(wait, "wait")
        steal, strict = flag_of(steal, "steal"), flag_of(ordered_txids, "ordered_txids")
        return self._writer_by(OPEN_REMEDY, rolls, wait_s=wait_s, steal=steal, strict=strict)

    def _writer_by(
        self,
        remedy: str,
        rolls: LogSettings = NO_SETTINGS,
        *,
        wait_s: float = 0.0,
        steal: bool = False,
        strict: bool = True,
    ) -> LogWriter:
        """Become the log's writer; ``remedy`` says what the caller can do about a live one."""
        self._check_open()
        found, owned = self._taken_over(rolls, wait_s=wait_s, steal=steal, remedy=remedy)
        try:
            writer = LogWriter(found, owned.record.highest, ordered_txids=strict)
        except BaseException:
            found.let_go()
            raise
        self._keep(writer)
        if self._closed:  # meanwhile, perhaps before the writer could be found
            writer.close()
            self._check_open()
        return writer

    def _watched_lock(
        self, *, wait: float = 0.0, steal: bool = False, ordered_txids: bool = True, **rolls: Any
    ) -> LockWatch:
        """Return the watch of the writer's lock; checks the arguments now, because its turn at the lock may be late."""
        self._check_open()
        duration_of(wait, "wait")
        flag_of(steal, "steal")
        flag_of(ordered_txids, "ordered_txids")
        LogSettings(**rolls)
        return partial(backend_of(self._manager).watch_lock, lock_name(ListKind.LOG, self.name))

    writer_async = opening_form(writer, _watched_lock)

    def reader(self, start: Start = LogEnd.EARLIEST, *, follow: bool = False, strict: bool = False) -> LogReader:
        """Return a reader.

        Args:
            start: The place where it begins: ``LogEnd.EARLIEST`` or ``LATEST``; a position or sequence number, which
                may not exist yet; ``TxId(n)`` for the first record with at least that transaction id; a datetime with a
                time zone for the first record with at least that event time.
            follow: Whether an iteration waits for more records at the end of the log, until the log is sealed.
            strict: Whether truncated records, at the beginning or later, raise TruncatedError. If False, they are
                skipped and counted in ``skipped``.

        Raises:
            TruncatedError: ``strict`` is True, and the first record was truncated.
            UsageError: ``start`` is not one of these.
            CorruptError: The first record could not be found, because others are damaged or missing.
        """
        self._check_open()
        follow, strict = flag_of(follow, "follow"), flag_of(strict, "strict")
        reader = LogReader(self._steps, seq_of(self._steps, start), follow=follow, strict=strict)
        self._keep(reader)
        if self._closed:
            reader.close()
        return reader

    reader_async = asyncio_form(reader)

    def read(self, start: Position | int) -> LogRecord:
        """Return one record.

        Raises:
            TruncatedError: It was truncated.
            NoSuchEntryError: It does not exist yet, or is not durable.
            CorruptError: It is damaged or missing.
        """
        record = self._found(start, strict=True)
        if record is None:
            shown = self._steps.last_shown(self.last_seq())
            raise NoSuchEntryError(f"log {self.name!r} has no record {start}; {shown}")
        return record

    read_async = asyncio_form(read)

    def _found(self, start: Start, *, strict: bool) -> LogRecord | None:
        """Return the record that reading from a place begins with; None if there is none yet."""
        with self.reader(start, strict=strict) as reader:
            return reader.read(timeout=0) if reader.seq <= self.last_seq() else None

    # ---- detached segments ---------------------------------------------------------------------------------------

    def detached_segment(self, *, query: str, epoch: int, partition: int = 0, attempt: int = 0) -> DetachedWriter:
        """Return a writer of records that the log has only once it adopts them, for one task of a commit.

        It needs no lock of the log; any number of them write at the same time, in any processes.

        Args:
            query: The name of the query or job whose commit it is, as the name of a log.
            epoch: The number of the commit; a later one of the query has a higher number.
            partition: The number of the task among those of the commit.
            attempt: The number of the task's attempt.

        Raises:
            UsageError: An argument cannot be.
            NoSuchLogError: The log was deleted.

        Cost: Nothing until the first record, with which a ledger is created.
        """
        self._check_open()
        query, epoch = _commit_of(query, epoch)
        task = (
            whole_from(partition, 0, "partition", "a number", INT64_MAX),
            whole_from(attempt, 0, "attempt", "a number", INT64_MAX),
        )
        return DetachedWriter(self._steps, DetachedHeader(self._record().uid, self.name, query, epoch, *task))

    detached_segment_async = opening_form(detached_segment)

    def adopt(
        self,
        segments: Iterable[DetachedSegment],
        *,
        query: str,
        epoch: int,
        wait: float = 0.0,
        remember: float | None = None,
    ) -> Adoption:
        """Commit detached segments: append their records to the log, in the order given, all or nothing, once.

        The writer before, which is not alive, is fenced. A commit that was done before changes nothing, so a commit
        whose outcome is not known is simply made again. The log has no writer afterwards.

        Args:
            segments: What ``seal`` of the detached segments returned, in the order of their records. Those without
                records count for nothing.
            query: The query.
            epoch: The number of the commit. It counts as done if the query has committed this or a higher one.
            wait: Seconds to wait for another commit, or a writer, to let go of the log.
            remember: Seconds for which the log remembers the commit at least, from an hour up; None for 30 days, which
                is the most. A short time is for a name that is used once, such as that of a job which is not repeated,
                because a log remembers some 2,500 queries.

        Returns:
            Whether this call has made the commit, and the last one of the query.

        Raises:
            LogLockedError: A live writer has the log, or another commit is under way; nothing was done.
            LogSealedError: It was sealed.
            NoSuchLedgerError: A segment was deleted, and the commit was not done; nothing was done.
            CorruptError: A ledger is not what its segment says; nothing was done.
            UsageError: The log has a segment already, from a commit that it has forgotten; nothing was done. Or an
                argument is not valid.
            StorageRefusedError: The log remembers as many queries as it can, or has too many segments.
            UnauthorizedError: The log has another password meanwhile.
            IllegalOperationError: The feature level is below STREAMS.
            NoSuchLogError: It was deleted.

        Durability: On return readers see the records, and the commit is never done again, unless the query makes no
            commit for 30 days, or ``remember``: then the log may forget it.
        Cost: Three synced writes; opens each ledger and reads two entries. One compare-and-set for the log. The first
            commit of a query also reads all pages of the log's segments.
        """
        where_called("Log.adopt()", of_log=True)
        self._check_open()
        query, epoch = _commit_of(query, epoch)
        remember_s = _remembered(remember)
        record = self._record()
        ledgers = check_commit(segments, record.uid.hex(), query, epoch)
        done = record.producers.get(query)
        if done is not None and done.epoch >= epoch:  # which needs no lock
            return Adoption(False, done.epoch, done.seq)
        owner = ListWriter(self._manager, self.name, self._spec, RollPolicy())
        owner.steps.uid = self._steps.uid
        adopted = owner.adopt(ledgers, query, epoch, wait_s=duration_of(wait, "wait"), remember_s=remember_s)
        if adopted.is_new:
            apply_at_rest(self._steps, adopted.record.epoch)
        now = adopted.record.producers[query]
        return Adoption(adopted.is_new, now.epoch, now.seq)

    adopt_async = asyncio_form(adopt, own_thread=True)

    def discard_detached(self, segments: Iterable[DetachedSegment], *, query: str, epoch: int) -> list[int]:
        """Delete detached segments of a commit that is given up, or that was done with others.

        Segments that the log has adopted stay. A commit of them whose outcome is not known, such as after
        MetadataUnreachableError, or that another process is making, either has taken effect, so that they stay, or does
        not any more: it raises NoSuchLedgerError.

        Args:
            segments: What ``seal`` of the detached segments returned.
            query: The query.
            epoch: The number of the commit.

        Returns:
            The ledgers that were deleted. One that cannot be deleted now is left to the next change of the log or a
            sweep, with a warning in the log of ``logging``.

        Raises:
            UsageError: A segment is of another log, query or commit; nothing was done.
            NoSuchLogError: The log was deleted.

        Cost: Two synced writes of the log's record; reads all pages of its segments.
        """
        self._check_open()
        query, epoch = _commit_of(query, epoch)
        ledgers = check_commit(segments, self._record().uid.hex(), query, epoch)
        return self._steps.perform(ledger_list.discard(self.name, [each.ledger_id for each in ledgers]))

    discard_detached_async = asyncio_form(discard_detached)

    def last_epoch(self, query: str) -> int | None:
        """Return the number of the last commit of a query; None if it has made none, or none for 30 days."""
        return self._record().last_epoch(checked_name(query, "a query"))

    last_epoch_async = asyncio_form(last_epoch)

    def locked_by(self) -> str | None:
        """Return which process has the log, as its writer or for a commit; None if none has.

        A query that commits to the log asks before its first task, because a live writer refuses ``adopt``.
        """
        self._check_open()
        return backend_of(self._manager).lock_owner(lock_name(ListKind.LOG, self.name))

    locked_by_async = asyncio_form(locked_by)

    def sweep_detached(self, query: str) -> list[int]:
        """Delete ledgers of earlier commits of a query that the log has not adopted: those of failed attempts.

        Ledgers of its last commit, and of those that follow, are kept; so tasks may write meanwhile.

        Returns:
            The ledgers that were deleted.

        Cost: Reads the metadata of all ledgers.
        """
        self._check_open()
        return streams.sweep.sweep_query(self._steps, checked_name(query, "a query"))

    sweep_detached_async = asyncio_form(sweep_detached)

    # ---- merging segments ----------------------------------------------------------------------------------------

    def merge_segments(
        self,
        *,
        segment_bytes: int | None = None,
        segment_age_s: float | None = None,
        segment_records: int | None = None,
        keep_s: float = KEEP_SECONDS,
    ) -> SegmentMerge:
        """Merge small segments that are closed into few, large ledgers.

        Writers, commits, readers and subscriptions continue meanwhile. Records keep their sequence numbers; their
        positions get another segment and entry. A position that was taken before is still that of its record, but
        compare positions by ``seq``. Retention drops a merged segment as a whole.

        Args:
            segment_bytes: The most bytes of a merged segment; None for the value in the log's ``settings``, or 64 MiB
                if that has none.
            segment_age_s: The longest time from the beginning of its first segment to the end of its last one, seconds;
                None likewise, with 4 hours.
            segment_records: The most records of it; None likewise, without a limit.
            keep_s: Seconds for which the ledgers that it replaces are kept for readers that have opened them; they are
                deleted then by a later merge, by the log's writer or by a sweep. A log keeps those of 2048 merges, and
                is merged further once the time of some is over. An export of a cluster's metadata that is older than
                ``keep_s`` names ledgers that are gone.

        Raises:
            LogLockedError: Another process merges segments of the log.
            LogFencedError: Another process has begun to, although this one lives.
            LogSealedError: The log was sealed.
            IllegalOperationError: The store or the cluster is below the feature level STREAMS.
            CorruptError: A record is damaged or missing; what was merged before it stays merged.

        Durability: On return the merged ledgers are durable, and in the log.
        Cost: Reads and writes the records of the segments that are merged. Another four synced writes for each ledger.
        """
        where_called("Log.merge_segments()", of_log=True)
        self._check_open()
        asked = LogSettings(segment_bytes=segment_bytes, segment_age_s=segment_age_s, segment_records=segment_records)
        policy = RollPolicy.of(asked.over(self._steps.settings()))
        return merge_segments(self._steps, policy, checked_keep(keep_s))

    merge_segments_async = asyncio_form(merge_segments, own_thread=True)

    # ---- subscriptions -------------------------------------------------------------------------------------------

    def subscribe(
        self,
        name: str,
        *,
        start: Start = LogEnd.LATEST,
        mode: str = "exclusive",
        ack_timeout: float | None = None,
        max_unacked: int = MAX_UNACKED,
        durable: bool = True,
        dead_letters: DeadLetters | None = None,
        wait: float = 0.0,
        steal: bool = False,
    ) -> Subscription:
        """Open a subscription, which hands out records until they are acknowledged; create it if it does not exist.

        Args:
            name: As the name of a log, without ``@``.
            start: The place where a new subscription begins, as for ``reader``; one that exists continues at its own
                place.
            mode: ``"exclusive"`` for one consumer, ``"shared"`` for threads and tasks that get different records.
            ack_timeout: Seconds after which a record that was not acknowledged is handed out again; None for never.
            max_unacked: The most records that may be handed out and not acknowledged; further ones are not handed out.
            durable: Whether acknowledgements are stored with the log, and the log keeps the records that are not
                acknowledged. If False, the subscription ends when it is closed, and the log keeps no records for it.
            dead_letters: The log for records that were handed out too often without an acknowledgement; None to hand
                them out for ever.
            wait: Seconds to wait for another owner, in this process or another, to release it.
            steal: Whether to take it from a live owner, whose acknowledgements then raise ``LogFencedError``.

        Raises:
            LogLockedError: A live owner has it. Within a process, share the subscription.
            NoSuchLogError: The log was deleted.
            CorruptError: Its cursor is damaged; the error says how to continue.
            UsageError: An argument is invalid.

        Durability: On return a durable subscription exists, and the log keeps its records from ``start`` on.
        Cost: Some eight synced writes; reads the acknowledgements since the last whole state, at most 4 MiB.
        """
        self._check_open()
        name, how = checked_subscription(name), Consuming(mode, ack_timeout, max_unacked, dead_letters)
        wait_s, steal, durable = duration_of(wait, "wait"), flag_of(steal, "steal"), flag_of(durable, "durable")
        cursor: Cursor | MemoryCursor
        if durable:
            first, counts = partial(seq_of, self._steps, start), dead_letters is not None
            cursor = Cursor.open(self._manager, self._steps, name, first, wait_s=wait_s, steal=steal, counts=counts)
        else:
            cursor = MemoryCursor(self._steps, name, seq_of(self._steps, start))
        subscription = Subscription(self._steps, cursor, how)
        self._subscriptions = (*(each for each in self._subscriptions if not each.closed), subscription)
        return subscription

    def _watched_subscription(
        self,
        name: str,
        *,
        mode: str = "exclusive",
        ack_timeout: float | None = None,
        max_unacked: int = MAX_UNACKED,
        durable: bool = True,
        dead_letters: DeadLetters | None = None,
        wait: float = 0.0,
        steal: bool = False,
        **_: object,
    ) -> LockWatch | None:
        """Return the watch of its lock, as ``_watched_lock``; None for one that is not durable, which takes no lock."""
        self._check_open()
        list_name = cursor_list_name(self.name, checked_subscription(name))
        Consuming(mode, ack_timeout, max_unacked, dead_letters)
        duration_of(wait, "wait")
        flag_of(steal, "steal")
        if not flag_of(durable, "durable"):
            return None
        return partial(backend_of(self._manager).watch_lock, lock_name(ListKind.CURSOR, list_name))

    subscribe_async = opening_form(subscribe, _watched_subscription)

    def subscriptions(self) -> list[str]:
        """Return the names of the durable subscriptions, ascending."""
        return [each.name for each in self._steps.bounds_of(self._record())]

    subscriptions_async = asyncio_form(subscriptions)

    def subscription_states(self) -> list[SubscriptionState]:
        """Return the acknowledgements of each durable subscription, by name, without taking it from its owner.

        Raises:
            CorruptError: The cursor of one is damaged or missing.

        Cost: Reads the cursor of each.
        """
        record, end = self._record(), self.last_seq() + 1
        found = []
        for bound in self._steps.bounds_of(record):
            state = read_cursor(self._manager, self._steps, bound)
            ranges = len(state.acked_ranges)
            found.append(
                SubscriptionState(
                    bound.name, state.first_unacked, state.unacked_count(end), ranges, dict(state.properties)
                )
            )
        return found

    subscription_states_async = asyncio_form(subscription_states)

    def delete_subscription(self, name: str, *, steal: bool = False) -> bool:
        """Delete a durable subscription for good, even a damaged one; return whether it existed.

        Raises:
            LogLockedError: A live owner has it, and ``steal`` is False.
        """
        self._check_open()
        return delete_cursor(self._manager, self._steps, checked_subscription(name), steal=flag_of(steal, "steal"))

    delete_subscription_async = asyncio_form(delete_subscription)

    # ---- what it is ----------------------------------------------------------------------------------------------

    def _record(self) -> ListRecord:
        self._check_open()
        return super()._record()

    def first_seq(self) -> int:
        """Return the sequence number of the first record that was not truncated."""
        return self._record().first_seq

    first_seq_async = asyncio_form(first_seq)

    def last_seq(self) -> int:
        """Return the sequence number of the last record that can be read; ``first_seq() - 1`` without records.

        Cost: Reads one entry.
        """
        self._check_open()
        return self._steps.last_seq()

    last_seq_async = asyncio_form(last_seq)

    def first(self) -> LogRecord | None:
        """Return the first record that was not truncated; None for an empty log."""
        return self._found(LogEnd.EARLIEST, strict=False)

    first_async = asyncio_form(first)

    def last(self) -> LogRecord | None:
        """Return the last record; None for an empty log."""
        last = self.last_seq()
        return self.read(last) if last >= self.first_seq() else None

    last_async = asyncio_form(last)

    def __len__(self) -> int:
        """Return the number of records that can be read."""
        return self.last_seq() - self.first_seq() + 1

    def position_for(self, start: Start) -> Position | None:
        """Return the position of the record at which a read from ``start`` begins; None if it does not exist yet.

        Raises:
            TruncatedError, UsageError, CorruptError: As ``reader``, with ``strict``.
        """
        record = self._found(start, strict=True)
        return None if record is None else record.position

    position_for_async = asyncio_form(position_for)

    def segments(self) -> list[LogSegment]:
        """Return its segments, in the order of their records."""
        self._check_open()
        fields = attrgetter(*LogSegment._fields)
        return [LogSegment(*fields(each)) for each in self._steps.all_segments()]

    segments_async = asyncio_form(segments)

    def is_sealed(self) -> bool:
        """Return whether it has ended for good."""
        return self._record().sealed

    is_sealed_async = asyncio_form(is_sealed)

    def properties(self) -> Mapping[str, str]:
        """Return the properties that the application stores with the log."""
        return self._record().properties

    properties_async = asyncio_form(properties)

    def set_properties(self, changes: Mapping[str, str | None]) -> None:
        """Change some of the properties, all or none; None removes one.

        Args:
            changes: New values by name, 16 KiB of all names and values in UTF-8 at most.

        Durability: The changes are durable on return.
        """
        self._check_open()
        self._steps.set_properties(_checked_changes(changes))

    set_properties_async = asyncio_form(set_properties)

    def retention(self) -> Retention | None:
        """Return the limits beyond which the log drops records by itself; None without limits."""
        return retention_of(self._record())

    retention_async = asyncio_form(retention)

    def set_retention(self, retention: Retention | None) -> None:
        """Set the limits beyond which the log's writer drops records, at once and from then on; None for no limits.

        Durability: The limits are stored with the log, durably on return.
        """
        self._check_open()
        set_retention(self._steps, retention)

    set_retention_async = asyncio_form(set_retention)

    def on_change(self, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after a roll, truncation, seal, take-over, deletion or change of properties of the log.

        It is called in some thread, may be called without a change, and must not block; ``cancel`` of the result ends
        the calls. What it raises is logged.

        Raises:
            UsageError: ``callback`` is no function.
        """
        self._check_open()
        if not callable(callback):
            raise UsageError(f"callback is {callback!r:.50}; it takes a function without arguments")
        return self._steps.watch(callback)

    # ---- changing what there is ----------------------------------------------------------------------------------

    def truncate(self, start: Start, *, force: bool = False) -> int:
        """Drop the records before a place, for readers at once; ledgers that hold only such records are deleted.

        A live writer is not disturbed. A place before ``first_seq`` changes nothing.

        Args:
            start: The first record to keep, as for ``reader``.
            force: Whether to drop even records that subscriptions have not acknowledged, which skip and count these.

        Returns:
            The sequence number of the first record that is kept.

        Raises:
            UsageError: The record before that place does not exist yet; or no record has at least that transaction id
                or time, so all would be dropped.
            TruncateGuardError: A subscription may need records before that place.
            IllegalOperationError: As for ``close``.

        Durability: On return the records are dropped for good. Disk space is freed in the background.
        """
        where_called("Log.truncate()", of_log=True)
        self._check_open()
        flag_of(force, "force")
        while True:
            record = self._record()
            seq, last = seq_of(self._steps, start), self.last_seq()
            self._steps.check_truncation(seq, last)
            if seq > last >= record.first_seq and isinstance(start, TxId | datetime):
                raise UsageError(
                    f"log {self.name!r} has no record from {start} on, so all would be dropped; to do that, truncate "
                    f"at {seq}"
                )
            try:
                steps = ledger_list.truncate(self.name, record.epoch, record.generation, seq, force=force)
                return self._steps.perform(steps).first_seq
            except LogFencedError:
                if self._record().epoch == record.epoch:
                    raise
                continue  # another writer took the log over since the record was read

    truncate_async = asyncio_form(truncate)

    def seal(self) -> None:
        """End a log without a live writer for good: it can be read, but takes no more records.

        Raises:
            LogLockedError: It has a live writer, whose ``seal`` ends it.
            LogSealedError: It was sealed before.
            IllegalOperationError: As for ``close``.
        """
        where_called("Log.seal()", of_log=True)
        self._writer_by(_SEAL_REMEDY).seal()

    seal_async = asyncio_form(seal, own_thread=True)

    def _group_member(self) -> PropertiesMember:
        self._check_open()
        return PropertiesMember(self._steps, _checked_changes)


def _commit_of(query: object, epoch: object) -> tuple[str, int]:
    return checked_name(query, "a query"), whole_from(epoch, 0, "epoch", "the number of a commit", INT64_MAX)


def _remembered(remember: object) -> float:
    """Return how long a commit is remembered, seconds."""
    seconds = QUERY_IDLE_SECONDS if remember is None else seconds_of(remember, "remember")
    if seconds is None or not _REMEMBER_SECONDS_MIN <= seconds <= QUERY_IDLE_SECONDS:
        raise UsageError(
            f"remember is {remember!r:.50}; it takes seconds from {_REMEMBER_SECONDS_MIN:.0f} to "
            f"{QUERY_IDLE_SECONDS:.0f}, or None for the most"
        )
    return seconds


def _checked_changes(changes: object) -> dict[str, str | None]:
    if isinstance(changes, Mapping) and all(
        isinstance(name, str) and name and isinstance(value, str | None) for name, value in changes.items()
    ):
        if RETENTION_PROPERTY in changes:
            raise UsageError(f"the property {RETENTION_PROPERTY} is what set_retention() sets; choose another name")
        if SETTINGS_PROPERTY in changes:
            raise UsageError(f"the property {SETTINGS_PROPERTY} is what set_settings() sets; choose another name")
        return dict(changes)
    raise UsageError(f"changes is {changes!r:.50}; it takes a mapping of names to strings, or to None")
