"""``WriteAheadLog``: the log of a database, which is replayed after a crash."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import aclosing, closing, suppress
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from pybk import streams
from pybk.config import StoreConfig
from pybk.credentials import Secret
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    NoSuchEntryError,
    NoSuchLedgerError,
    PybkError,
    StoreLockedError,
    UsageError,
)
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.keys import KeyRing
from pybk.manager.append_future import duration_of, seconds_of
from pybk.manager.arguments import hints_of, whole_from
from pybk.manager.handle import opening_form, where_called
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.streams import ledger_list
from pybk.streams.appender import PlainBatch, RecordFuture, record_data
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import META_BYTES_MAX, SEQ_MAX, ListKind, checked_name
from pybk.streams.list_writer import LOCK_LOOK_SECONDS, ListWriter, lock_name
from pybk.streams.log_settings import LedgerSpec, LogSettings, spec_of
from pybk.streams.named_list import NamedList, RecordWriter
from pybk.threads.call_threads import asyncio_form, in_thread
from pybk.values import INT64_MAX, flag_of

if TYPE_CHECKING:
    from pybk.manager.opening import LockWatch
    from pybk.streams.format import Records
    from pybk.streams.group_members import LogMember
    from pybk.streams.list_rebuild import RebuiltList
    from pybk.streams.log_record import WalRecord
    from pybk.streams.record_reader import RecordReader
    from pybk.streams.wal_checkpoint import CheckpointWriter, WalCheckpoint
    from pybk.streams.wal_follower import WalFollower

logger = logging.getLogger(__name__)

_FIRST_LSN: Final = 1
_NEAR: Final = 64
"""Records between two that are wanted, up to which reading all takes no longer than searching for the second."""


class RecoveryInfo(NamedTuple):
    """The result of opening a write-ahead log for writing.

    Attributes:
        epoch: The number of this take-over.
        first_lsn: The first record that was not truncated.
        last_lsn: The last record; ``first_lsn - 1`` for an empty log.
        unclean: Whether the previous writer did not close the log; its ledger was recovered then.
        seconds: The duration of the opening, seconds.
    """

    epoch: int
    first_lsn: int
    last_lsn: int
    unclean: bool
    seconds: float


class WalStats(NamedTuple):
    """A write-ahead log at one moment.

    Attributes:
        records: Records that can be read.
        segments: Ledgers that hold them.
        payload_bytes: Bytes in these ledgers, with the bytes that entries add to records. An open ledger is counted by
            its writer only.
        checkpoints: Checkpoints that are kept.
        uploads: Checkpoints that are being written.
        pending_deletes: Ledgers that were dropped and still have to be deleted.
        appended_records: Records that this writer appended; for a log that is open for reading this and the next two
            are 0.
        appended_bytes: Their bytes, with the bytes that entries add.
        outstanding_records: Records that this writer appended and that are not durable yet.
    """

    records: int
    segments: int
    payload_bytes: int
    checkpoints: int
    uploads: int
    pending_deletes: int
    appended_records: int
    appended_bytes: int
    outstanding_records: int


def _lock_watch(
    _: type[WriteAheadLog],
    where: str | os.PathLike[str] | LedgerManager,
    name: str = "wal",
    *,
    mode: str = "w",
    **__: object,
) -> LockWatch | None:
    """Return the watch of the lock that an opening takes; None for a reader, and in a directory, which has its own."""
    if mode != "w" or not isinstance(where, LedgerManager):
        return None
    return partial(backend_of(where).watch_lock, lock_name(ListKind.WAL, checked_name(name)))


class WriteAheadLog(RecordWriter[bytes, range], NamedList, kinds=(ListKind.WAL,), first_seq=_FIRST_LSN):
    """A durable log of records with dense log sequence numbers (LSNs).

    Example, which replays the log and appends to it::

        with WriteAheadLog.open("data/db", password=password) as wal:
            for record in wal.replay():
                apply(record.data)
            lsn = wal.append(b"set a 1")

    A log has one writer at a time. Opening it for writing fences the writer before, whose appends then raise
    ``LogFencedError``. An LSN is given again only after ``truncate_after``, and then under a higher ``generation``.

    Threads: any. Appends of all threads share syncs.
    Cost: Calls that return facts about the log read its present record: a round trip in a cluster. The writer knows
        ``epoch``, ``generation`` and ``last_lsn`` itself.
    """

    def __init__(self, manager: LedgerManager, name: str, spec: LedgerSpec, *, owns: bool) -> None:
        """Use ``WriteAheadLog.open`` instead."""
        super().__init__(manager, name, spec, owns=owns)
        self._config: StoreConfig | None = None
        self._data_bytes_max = self._steps.data_bytes_max
        self._writer: ListWriter | None = None
        self._unapplied: tuple[int | None, int | None] | None = None
        """Generation and number of the first record that ``promote`` still has to apply, after a call that raised."""
        self.recovery: RecoveryInfo | None = None
        """The result of opening for writing; None for a log that is open for reading."""

    # ---- opening and closing -------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        where: str | os.PathLike[str] | LedgerManager,
        name: str = "wal",
        *,
        mode: str = "w",
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
        create: bool = True,
        wait: float = 0.0,
        steal: bool = False,
        segment_bytes: int | None = None,
        segment_age_s: float | None = None,
        digest_type: DigestType | None = None,
        storage_hints: Iterable[StorageHint] = (),
        quorums: tuple[int | None, int | None, int | None] = (None, None, None),
        config: StoreConfig | None = None,
    ) -> WriteAheadLog:
        """Open a log.

        Args:
            where: The directory of a store, which is created if needed and belongs to this log alone; or the manager of
                a store or a cluster, which it shares with other users.
            name: The log's name; see ``docs/concepts/streams.md`` for the rules of names.
            mode: ``"w"`` to read and append. ``"r"`` to read only, which is possible while a writer appends, and fences
                no writer.
            password: The password of its ledgers, as bytes or as a ``Secret`` that names a file or an environment
                variable: meant for passwords that people choose. If it and the secret are None, both are taken from the
                environment: from ``PYBK_PASSWORD`` and ``PYBK_SECRET``, or from the files that ``PYBK_PASSWORD_FILE``
                and ``PYBK_SECRET_FILE`` name.
            secret: Random bytes instead of a password, 32 or more, in the same forms. If both are given, each ledger
                opens with the one that it was created with, and new ledgers are created with the secret.
            insecure: Allow neither a password nor a secret; records are then guarded against damage, not against
                forgery.
            create: Whether to create the log, and the store in a directory, if it does not exist; only with mode "w".
            wait: Seconds to wait for a live writer to release it.
            steal: Whether to take it from a live writer, which is fenced.
            segment_bytes: Bytes after which it continues in a new ledger; None for the value in its ``settings``, or 64
                MiB. A new log stores this and the next four in its settings.
            segment_age_s: Seconds after the first record of a ledger after which it continues in a new one; None
                likewise, or 4 hours.
            digest_type: The digest of the entries with the records; None likewise, or HMAC-SHA256, or CRC32C without
                password and secret.
            storage_hints: The tiers where its ledgers should live.
            quorums: Ensemble size, write quorum and ack quorum in a cluster; None likewise, or the manager's defaults.
            config: Settings of the store, if ``where`` is a directory.

        Raises:
            LogLockedError, StoreLockedError: A live writer has it, in this process or another.
            NoSuchLogError: It does not exist, and was not created.
            LogSealedError: It was sealed, and can only be read.
            CookieError: The mode is "r", and the directory has no store.
            UnauthorizedError: The password is not the log's.
            UsageError: There is neither password nor secret, or another argument is invalid.
            CorruptError: An acknowledged record is damaged or missing.

        Durability: All records that were acknowledged before are in the log.
        Cost: Four synced writes, and one scrypt, about 400 ms, for the first use of a password.
        """
        asked = LogSettings(
            quorums=quorums,
            digest_type=digest_type,
            storage_hints=hints_of(storage_hints),
            segment_bytes=segment_bytes,
            segment_age_s=segment_age_s,
        )
        spec = spec_of(ListKind.WAL, password, secret, insecure, asked)
        wait_s, create, steal = duration_of(wait, "wait"), flag_of(create, "create"), flag_of(steal, "steal")

        def begin(wal: WriteAheadLog) -> None:
            wal._config = config
            if mode == "w":
                wal._take_over(create=create, wait_s=wait_s, steal=steal)
            else:
                wal._find(create=False)

        return cls._opened(where, name, spec, mode, begin, create=create, config=config)

    open_async = classmethod(opening_form(open, _lock_watch))

    @classmethod
    def rebuild(
        cls,
        manager: LedgerManager,
        name: str,
        *,
        first_lsn: int | None = None,
        password: bytes | Secret | None = None,
        secret: bytes | Secret | None = None,
        insecure: bool = False,
    ) -> RebuiltList:
        """Rebuild a log whose record is lost or damaged, from its ledgers. A live writer is fenced.

        Args:
            manager: The manager that has the ledgers.
            name: The name of the log.
            first_lsn: The first record to keep; earlier records are given up. None for the first record that the
                ledgers have.
            password: As for ``open``.
            secret: As for ``open``.
            insecure: As for ``open``.

        Returns:
            The records and ledgers of the log, and its differences from the lost one.

        Raises:
            IllegalOperationError: The record is sound; nothing was done.
            NoSuchLogError: No ledger belongs to the log.
            CorruptError: Records are missing, or no ledger has any; ``first_lsn`` has to name the first record to keep.
            UnauthorizedError: The password is not that of the ledgers.
            UsageError: Several logs had this name, or an argument is invalid.

        Durability: On return the log exists durably.
        Cost: Reads the metadata of all ledgers; recovers and opens those of the log.
        """
        first = None if first_lsn is None else _whole_lsn(first_lsn, "first_lsn")
        return streams.list_rebuild.rebuild(
            manager, checked_name(name), spec_of(ListKind.WAL, password, secret, insecure), first
        )

    rebuild_async = classmethod(asyncio_form(rebuild))

    def _take_over(self, *, create: bool, wait_s: float, steal: bool) -> None:
        began = time.monotonic()
        self._find(create=create)
        writer, owned = self._taken_over(self._spec.asked, wait_s=wait_s, steal=steal)
        record = owned.record
        self.recovery = RecoveryInfo(
            record.epoch, record.first_seq, record.end_seq - 1, writer.unclean, time.monotonic() - began
        )
        self._writer = writer
        if not self._owns_manager:
            weakref.finalize(self, writer.close_dropped).atexit = False

    def _end(self, *, readers: bool = True) -> None:
        for reader in self._alive() if readers else ():
            reader.close()
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._owns_manager and (self._writer is None or self._writer.closed):
                self._manager.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the log; an error of the close does not replace an exception of the block."""
        try:
            super().__exit__(kind, error, traceback)
        finally:
            if self._owns_manager:  # after an interrupt, too, because nothing closes it again
                self._manager.close()

    def _has_unreported_failures(self) -> bool:
        return self._writer is not None and self._writer.appender.has_unreported_failures

    def __repr__(self) -> str:
        """Name the log, and say how it is open."""
        how = "closed" if self._closed else "reading" if self._writer is None else f"epoch {self.epoch()}"
        return f"<WriteAheadLog {self.name!r} in {self._manager.location}, {how}>"

    # ---- what it is ----------------------------------------------------------------------------------------------

    def epoch(self) -> int:
        """Return the number of the take-over by which this writer has the log; for a reader, that of the last one."""
        return self._record().epoch if self._writer is None else self._writer.appender.epoch

    epoch_async = asyncio_form(epoch)

    def generation(self) -> int:
        """Return how often ``truncate_after`` dropped records; each pair of a generation and an LSN is given once."""
        return self._record().generation if self._writer is None else self._writer.appender.generation

    generation_async = asyncio_form(generation)

    def ledgers(self) -> tuple[int, ...]:
        """Return the ids of its ledgers, in the order of their records."""
        self._record()
        return tuple(each.ledger_id for each in self._steps.all_segments())

    ledgers_async = asyncio_form(ledgers)

    def first_lsn(self) -> int:
        """Return the first record that was not truncated."""
        return self._record().first_seq

    first_lsn_async = asyncio_form(first_lsn)

    def last_lsn(self) -> int:
        """Return the last record that was appended, durable or not; for a reader, the last that can be read.

        A record whose append was refused counts until a later append takes its number. It is ``first_lsn - 1`` for an
        empty log.
        """
        return self.durable_lsn() if self._writer is None else self._writer.appender.next_seq - 1

    last_lsn_async = asyncio_form(last_lsn)

    def durable_lsn(self) -> int:
        """Return the last record up to which all are durable; ``first_lsn - 1`` if there is none.

        Cost: Reads the log's record and one entry; nothing for the writer, if all its records are durable.
        """
        known = None if self._writer is None else self._writer.appender.durable_seq
        return self._steps.last_seq() if known is None else known

    durable_lsn_async = asyncio_form(durable_lsn)

    def stats(self) -> WalStats:
        """Return figures of the log and of this writer.

        Cost: As ``durable_lsn``, and reads the log's record.
        """
        record, durable = self._record(), self.durable_lsn()
        appender = None if self._writer is None else self._writer.appender
        appended_records, appended_bytes = (0, 0) if appender is None else appender.appended
        open_bytes = 0 if appender is None or appender.segment is None else appender.segment_bytes
        return WalStats(
            records=max(durable + 1 - record.first_seq, 0),
            segments=record.segment_count,
            payload_bytes=record.nbytes + open_bytes,
            checkpoints=len(record.checkpoints),
            uploads=len(record.uploads),
            pending_deletes=len(record.pending_deletes),
            appended_records=appended_records,
            appended_bytes=appended_bytes,
            outstanding_records=max(appender.next_seq - 1 - durable, 0) if appender else 0,
        )

    stats_async = asyncio_form(stats)

    def __len__(self) -> int:
        """Return the number of records that can be read."""
        return self.durable_lsn() - self.first_lsn() + 1

    # ---- appending -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed and self._writer is not None:
            raise self._writer.closed_error()
        super()._check_open()

    def _writing(self) -> ListWriter:
        writer = self._writer
        if writer is None or self._closed:
            self._check_open()
            raise IllegalOperationError(
                f"log {self.name!r} is open for reading; open it with mode='w', or promote() this reader"
            )
        return writer

    def _owner(self, call: str) -> ListWriter:
        """Return the writer for a call that excludes other such calls, which a signal handler may have interrupted."""
        where_called(f"WriteAheadLog.{call}()", of_log=True)
        return self._writing()

    def append(self, data: bytes, *, time_ns: int | None = None) -> int:
        """Append one record and wait until it is durable.

        Args:
            data: 0 to ``max_entry_bytes`` less 24 bytes.
            time_ns: Its event time, nanoseconds since 1970; None for none.

        Returns:
            Its LSN.

        Raises:
            LogFencedError: Another writer took the log over. With ``outcome_unknown`` the record may be in the log
                nevertheless.
            StorageFullError: There is not enough free space; nothing was written. Reading and truncating still work.
            StorageFailedError: Writing failed; whether the record survives is unknown until the log is opened again.
            NoSuchLogError: The log was deleted.
            NotEnoughBookiesError: Too few bookies answered for ``bookie_patience_seconds``, and then as long again for
                another segment. A later append continues in another segment once enough bookies answer.
            ClosedError, IllegalOperationError: The log is closed here, or open for reading.
            UsageError: The data is not bytes, or is too long; nothing was done.

        Durability: On return it is on disk; in a cluster, on the disks of an ack quorum.
        Cost: One synced write, shared by all threads that append meanwhile.
        """
        writer = self._writing()
        return writer.result_of(writer.append(self._checked(data, time_ns), time_ns, kick=False))

    def append_async(self, data: bytes, *, time_ns: int | None = None, wait: bool = True) -> RecordFuture[int]:
        """Append one record without waiting for it to be durable; arguments and errors are those of ``append``.

        If ``max_outstanding_bytes`` are not durable yet, it waits until some are; without ``wait`` it raises
        TooManyRequestsError instead, with nothing done.

        Returns:
            A future of the LSN: ``result()``, ``add_done_callback``, or ``await`` it.
        """
        return self._writing().append(self._checked(data, time_ns), time_ns, kick=True, wait=wait)

    async def append_coro(self, data: bytes, *, time_ns: int | None = None) -> int:
        """Append one record and wait until it is durable, without blocking the event loop.

        Appends of one loop get their LSNs in the order in which their coroutines first run. Once the coroutine has
        begun, cancelling it ends the wait, but not the append. Arguments and errors are those of ``append``.
        """
        data = self._checked(data, time_ns)
        return (await self._writing().append_coro(PlainBatch((data,), time_ns)))[0]

    def _batch(self, records: Iterable[bytes]) -> PlainBatch:
        if not isinstance(records, Iterable):
            raise UsageError(f"records is {records!r:.50}; it takes an iterable of bytes")
        batch = [self._checked(data, None) for data in records]
        if not batch:
            raise UsageError("a transaction without records has no LSN; append at least one")
        return PlainBatch(batch)

    def transaction(self) -> Transaction:
        """Return a transaction: its records become durable at the end of its ``with``, all or none."""
        return Transaction(self)

    def _checked(self, data: object, time_ns: object) -> bytes:
        """Return a record's data as bytes, or say what is wrong with it."""
        if time_ns is not None:
            whole_from(time_ns, 0, "time_ns", "nanoseconds since 1970", INT64_MAX)
        if type(data) is bytes and len(data) <= self._data_bytes_max:
            return data
        return record_data(data, self._data_bytes_max)

    def _group_member(self) -> LogMember[bytes]:
        def checked(data: bytes, **options: object) -> bytes:
            if options:
                raise UsageError(f"a record of a write-ahead log has no {', '.join(options)} in a group; leave it out")
            return self._checked(data, None)

        return streams.LogMember(self._writing(), checked, PlainBatch)

    # ---- reading -------------------------------------------------------------------------------------------------

    def replay(self, from_lsn: int | None = None, to_lsn: int | None = None) -> Iterator[WalRecord]:
        """Yield the present records, in order, without transactions that were not committed.

        Args:
            from_lsn: The first record; None for ``first_lsn``. If it comes after the last record, nothing is yielded.
            to_lsn: The last record; None for the present end.

        Raises:
            TruncatedError: ``from_lsn`` was truncated, or the next record was truncated meanwhile; ``first_seq`` of the
                error is the first record that was not.
            RewoundError: ``truncate_after`` dropped the next record meanwhile.
            CorruptError: A record is damaged or missing; no record is ever skipped. DigestMismatchError, if it was
                changed.

        Cost: Under a microsecond for each record of 1 KiB, and its authentication code.
        """
        with closing(self._batches(*self._checked_range(from_lsn, to_lsn))) as batches:
            for reader, records in batches:
                yield from reader.kept(streams.wal_records(records))

    def replay_batches(self, from_lsn: int | None = None, to_lsn: int | None = None) -> Generator[Records, None, None]:
        """Yield the records that ``replay`` yields, many at a time and without copying their data."""
        return (records for _, records in self._batches(*self._checked_range(from_lsn, to_lsn)))

    def _checked_range(self, from_lsn: object, to_lsn: object) -> tuple[int | None, int]:
        """Return the first record to replay, None for that of the log, and the last one."""
        first = None if from_lsn is None else _lsn_of_record(from_lsn, "from_lsn")
        return first, self.durable_lsn() if to_lsn is None else min(_whole_lsn(to_lsn, "to_lsn"), self.durable_lsn())

    def _batches(
        self, first: int | None, last: int, generation: int | None = None
    ) -> Generator[tuple[RecordReader, Records], None, None]:
        """Yield records, each time with the reader that has read them; ClosedError if the log is closed meanwhile."""
        with closing(self._reader(first, generation)) as reader:
            while (records := reader.read(last=last)) is not None:
                yield reader, records
            reader.check_over()

    def read(self, lsn: int) -> WalRecord:
        """Return one record.

        Raises:
            TruncatedError: It was truncated.
            NoSuchEntryError: It does not exist yet, or is not durable.
            CorruptError: As ``replay``.

        Cost: Opens a ledger and reads some entries: at first as many as the logarithm of the entries in a segment, and
            fewer after more searches.
        """
        for record in self.replay(_lsn_of_record(lsn, "lsn"), lsn):
            return record
        raise self._no_record(lsn, self.durable_lsn())

    read_async = asyncio_form(read)

    def _no_record(self, lsn: int, last: int) -> NoSuchEntryError:
        return NoSuchEntryError(f"log {self.name!r} has no record {lsn}; {self._steps.last_shown(last)}")

    def read_many(self, lsns: Iterable[int]) -> Iterator[WalRecord]:
        """Yield some records.

        Args:
            lsns: Their LSNs, ascending.

        Raises:
            TruncatedError, NoSuchEntryError, CorruptError: As ``read``.
            UsageError: The LSNs do not ascend.

        Cost: As ``read`` for records that are far apart, without opening the ledger again; as ``replay`` for others.
        """
        if not isinstance(lsns, Iterable):
            raise UsageError(f"lsns is {lsns!r:.50}; it takes log sequence numbers, ascending, such as [1, 17]")
        wanted = [_lsn_of_record(lsn, "lsns") for lsn in lsns]
        if any(lsn >= following for lsn, following in pairwise(wanted)):
            raise UsageError("lsns takes log sequence numbers in ascending order, each once")
        if not wanted:
            return
        last = self.durable_lsn()
        if wanted[-1] > last:
            raise self._no_record(wanted[-1], last)
        with closing(self._reader(wanted[0])) as reader:
            for run in _runs(wanted):
                reader.skip_to(run[0])
                yield from self._read_run(reader, run)

    def _read_run(self, reader: RecordReader, run: list[int]) -> Iterator[WalRecord]:
        """Yield records that are near each other, from where the reader is."""
        left = iter(run)
        lsn = next(left, None)
        while lsn is not None:
            records = reader.read(last=run[-1])
            if records is None:
                reader.check_over()
                raise NoSuchEntryError(f"log {self.name!r} has no record {lsn} any more")
            for record in reader.kept(streams.wal_records(records)):
                if record.lsn == lsn:
                    yield record
                    lsn = next(left, None)

    async def read_many_async(self, lsns: Iterable[int]) -> list[WalRecord]:
        """Return some records as ``read_many`` yields them; a thread reads them, so the event loop keeps running."""
        return await in_thread(lambda: list(self.read_many(lsns)))

    def follow(
        self, from_lsn: int | None = None, *, generation: int | None = None, timeout: float | None = None
    ) -> WalFollower:
        """Return an iterator of records as they become durable, here or in another process, until the log is sealed.

        Use it with ``for`` or ``async for``. Its ``close`` ends it from another thread; its ``applied`` is the last
        record that it yielded, for ``promote``.

        Args:
            from_lsn: The first record, which may not exist yet; None for ``first_lsn``.
            generation: The log's ``generation`` when the record before ``from_lsn`` was read; it shows whether records
                were dropped since. None for the present one.
            timeout: Seconds without a record after which it ends; None waits without a limit.

        Raises:
            TruncatedError: The next record was truncated before it was read.
            RewoundError: ``truncate_after`` dropped records that were yielded already; ``seq`` of the error is the last
                record that was kept.
            CorruptError: As ``replay``.
            UsageError: ``generation`` is higher than that of the log.
            NoSuchLogError: The log was deleted.
            ClosedError: The log was closed here.

        Cost: As ``LedgerReader.follow``: a thread that waits costs nothing.
        """
        first = None if from_lsn is None else _lsn_of_record(from_lsn, "from_lsn")
        checked = None if generation is None else _whole_generation(generation)
        return streams.WalFollower(self.name, lambda: self._reader(first, checked), seconds_of(timeout))

    async def replay_async(self, from_lsn: int | None = None, to_lsn: int | None = None) -> AsyncIterator[WalRecord]:
        """Yield records as ``replay`` does; use with ``async for``. A thread reads and verifies them."""
        async with aclosing(self._batches_async(from_lsn, to_lsn)) as batches:
            async for reader, records in batches:
                for record in reader.kept(streams.wal_records(records)):
                    yield record

    async def replay_batches_async(
        self, from_lsn: int | None = None, to_lsn: int | None = None
    ) -> AsyncGenerator[Records, None]:
        """Yield records as ``replay_batches`` does; use with ``async for``. A thread reads and verifies them."""
        async with aclosing(self._batches_async(from_lsn, to_lsn)) as batches:
            async for _, records in batches:
                yield records

    async def _batches_async(
        self, from_lsn: int | None, to_lsn: int | None
    ) -> AsyncGenerator[tuple[RecordReader, Records], None]:
        def begin() -> tuple[RecordReader, int]:
            first, last = self._checked_range(from_lsn, to_lsn)
            return self._reader(first), last

        reader, last = await in_thread(begin)
        with closing(reader):
            while (records := await reader.read_async(timeout=0.0, last=last)) is not None:
                yield reader, records
            reader.check_over()

    def _reader(self, seq: int | None, generation: int | None = None) -> RecordReader:
        self._check_open()
        reader = streams.RecordReader(self._steps, seq, generation)
        self._keep(reader)
        return reader

    # ---- changing what there is ----------------------------------------------------------------------------------

    def checkpoint(
        self, lsn: int | None = None, *, meta: str = "", keep: int = 2, truncate: bool = True
    ) -> CheckpointWriter:
        """Return a file to write a snapshot of the database to, which leaving its ``with`` commits.

        Example::

            with wal.checkpoint() as file:
                database.dump(file)

        A restart reads ``latest_checkpoint()`` and replays from the record after its ``lsn``. The commit drops the
        records, and the checkpoints, that the newest ``keep`` checkpoints do not need.

        Args:
            lsn: The last record that the snapshot covers; None for the last one that is durable now. If other threads
                append meanwhile, copy the state together with the LSN that was last applied to it, and pass that LSN;
                otherwise a record that is durable but not applied yet would be dropped.
            meta: A text that is stored with the checkpoint.
            keep: The number of checkpoints to keep, at least 1.
            truncate: Whether to drop the records that they do not need. False suits a log that is itself the data, and
                whose checkpoints hold derived data, such as an index.

        Raises:
            UsageError: Record ``lsn`` is not durable, or a newer checkpoint exists; the commit raises it if one was
                made meanwhile.
            LogFencedError: Another writer has the log.
            PybkError: As ``LedgerManager.create_ledger``.

        Durability: When the ``with`` is left, the snapshot is on disk and listed. After an earlier crash the log has
            its former checkpoints and records.
        """
        writer = self._owner("checkpoint")
        durable = self.durable_lsn()
        covered = durable if lsn is None else _whole_lsn(lsn, "lsn")
        keep = whole_from(keep, 1, "keep", "a number of checkpoints")
        meta, truncate = _checked_meta(meta), flag_of(truncate, "truncate")
        if covered > durable:
            raise UsageError(
                f"a checkpoint cannot cover record {covered} of log {self.name!r}; {self._steps.last_shown(durable)} "
                "so far"
            )
        self._record().check_checkpoint(covered)
        owner = writer.appender.epoch, writer.appender.generation
        return streams.CheckpointWriter(self._steps, owner, covered, meta, keep, writer, truncate=truncate)

    checkpoint_async = opening_form(checkpoint)

    def checkpoints(self) -> list[WalCheckpoint]:
        """Return the checkpoints that are kept, the oldest first."""
        return [streams.WalCheckpoint(self._steps, each) for each in self._record().checkpoints]

    checkpoints_async = asyncio_form(checkpoints)

    def latest_checkpoint(self) -> WalCheckpoint | None:
        """Return the newest checkpoint that is whole, read to its end; None if the log has none.

        A damaged checkpoint is skipped with a warning in the log of ``logging``; the records after the checkpoint
        before it can still be replayed.

        Raises:
            CorruptError: All checkpoints are damaged.
        """
        found = self.checkpoints()
        problem: PybkError | None = None
        for each in reversed(found):
            try:
                problem = each.problem()
            except NoSuchLedgerError as error:
                if [kept.lsn for kept in self.checkpoints()] != [kept.lsn for kept in found]:
                    return self.latest_checkpoint()  # it was dropped, because newer ones were made
                problem = error
            if problem is None:
                return each
            logger.warning("log %r: the checkpoint of record %d is damaged: %s", self.name, each.lsn, problem)
        if problem is not None:
            raise CorruptError(f"log {self.name!r}: all {len(found)} checkpoints are damaged: {problem}") from problem
        return None

    latest_checkpoint_async = asyncio_form(latest_checkpoint)

    def truncate_before(self, lsn: int) -> None:
        """Drop the records before ``lsn``, for readers at once; ledgers that hold only such records are deleted.

        A lower ``lsn`` than ``first_lsn`` changes nothing. A checkpoint truncates by itself.

        Raises:
            LogFencedError: Another writer has the log.
            TruncateGuardError: The oldest checkpoint needs records before ``lsn``.
            UsageError: Record ``lsn - 1`` is not durable.

        Durability: On return the records are dropped for good. Disk space is freed in the background.
        """
        writer, lsn = self._owner("truncate_before"), _whole_lsn(lsn, "lsn")

        def truncate() -> None:
            appender = writer.appender
            self._steps.check_truncation(lsn, self.durable_lsn())
            self._steps.perform(ledger_list.truncate(self.name, appender.epoch, appender.generation, lsn))

        writer.operate(truncate)  # so that no cut comes between

    truncate_before_async = asyncio_form(truncate_before, own_thread=True)

    def truncate_after(self, lsn: int) -> None:
        """Drop the records after ``lsn``, such as those that a Raft leader never committed.

        The next record gets LSN ``lsn + 1``, under a higher ``generation`` if records were dropped. Followers that have
        read further raise ``RewoundError``.

        Raises:
            UsageError: The log has no record ``lsn``, and ``lsn`` is not ``first_lsn - 1``; nothing was dropped.
            TruncateGuardError: A checkpoint covers records after ``lsn``.
            LogFencedError: Another writer has the log.

        Durability: On return the records are dropped for good.
        Cost: Five synced writes.
        """
        self._owner("truncate_after").cut(_whole_lsn(lsn, "lsn"))

    truncate_after_async = asyncio_form(truncate_after, own_thread=True)

    def seal(self) -> None:
        """End the log for good and close it here: it can be read, but takes no more records."""
        self._owner("seal").close(seal=True)
        self._closed = True
        self._end(readers=self._owns_manager)  # others end by themselves, with the last record

    seal_async = asyncio_form(seal, own_thread=True)

    def promote(
        self,
        apply: Callable[[WalRecord], object] | None = None,
        *,
        applied: tuple[int, int] | None = None,
        wait: float = 0.0,
        steal: bool = False,
    ) -> None:
        """Make a log that is open for reading the writer: fence the writer before, and apply the remaining records.

        Args:
            apply: Called with each record after the last one that was applied, up to the end of the log.
            applied: Generation and LSN of the last record that was applied; None to apply all.
            wait: As for ``open``.
            steal: As for ``open``, on a manager; a store that another process has open is never taken. A writer that
                died releases the log by itself: at once in a store, after the lease time in a cluster.

        If it raises, call it again. Once it has fenced the writer before, this log is the writer. A further call then
        continues with the first record that was not applied, unless ``applied`` names another.

        Raises:
            ClosedError: Raised by a ``follow`` of this log that is under way; begin it again.
            RewoundError: ``truncate_after`` has dropped records that were applied; nothing was fenced. Begin again from
                the records that are left.
            UsageError: The log has no record ``applied``; nothing was fenced.
            TruncatedError: The record after the last one that was applied was dropped; nothing was fenced. Begin again
                from ``latest_checkpoint()``.
            NoSuchLogError: The log was deleted, even if another log has its name now; nothing was fenced.
            LogLockedError, StoreLockedError: The writer is alive.
            IllegalOperationError: This log is open for writing; or as for ``close``.
            Exception: As ``apply``.
        """
        where_called("WriteAheadLog.promote()", of_log=True)
        wait_s, steal = duration_of(wait, "wait"), flag_of(steal, "steal")
        if self._writer is not None and self._unapplied is None:
            raise IllegalOperationError(f"log {self.name!r} is open for writing already")
        if self._writer is None or applied is not None:
            self._unapplied = self._checked_position(applied)
        if self._writer is None:
            if self._owns_manager and self._manager.read_only:
                self._open_for_writing(wait_s)
            self._take_over(create=False, wait_s=wait_s, steal=steal)
        if apply is not None:
            assert self.recovery is not None
            assert self._unapplied is not None
            generation, lsn = self._unapplied
            with closing(self._batches(lsn, self.recovery.last_lsn, generation)) as batches:
                for reader, records in batches:
                    for record in streams.wal_records(records):
                        apply(record)
                        self._unapplied = reader.generation, record.lsn + 1
        self._unapplied = None

    promote_async = asyncio_form(promote, own_thread=True)

    def _checked_position(self, applied: object) -> tuple[int | None, int | None]:
        """Return the generation and number of the record after the last one that was applied, which has to exist."""
        if applied is None:
            self._reader(None).close()
            return None, None
        if not isinstance(applied, tuple) or len(applied) != 2:
            raise UsageError(f"applied is {applied!r:.50}; it takes a generation and an LSN, such as (0, 17)")
        generation, lsn = _whole_generation(applied[0]), _whole_lsn(applied[1], "applied")
        self._reader(lsn + 1, generation).close()
        if lsn > self.durable_lsn() or generation > self.generation():
            raise UsageError(
                f"record {lsn} of generation {generation} was not applied from log {self.name!r}, which ends with "
                f"record {self.durable_lsn()} of generation {self.generation()}; give what was applied from it"
            )
        return generation, lsn + 1

    def _open_for_writing(self, wait_s: float) -> None:
        """Replace the manager, which reads a store, by one that writes it; reading continues until the store is free.

        Raises:
            StoreLockedError: Another process has it.
        """
        path, key_ring = self._manager.location, backend_of(self._manager).key_ring
        manager = _opened_once_free(path, self._config, wait_s)
        for reader in self._alive():
            reader.close()
        self._manager.close()
        try:
            self._use(manager or LedgerManager.open(path, config=self._config), key_ring)
        except BaseException:
            self._use(LedgerManager.open(path, read_only=True, config=self._config), key_ring)
            raise

    def _use(self, manager: LedgerManager, key_ring: KeyRing) -> None:
        backend_of(manager).key_ring.adopt(key_ring)  # else scrypt would take most of the time of a take-over
        self._manager = manager
        uid, self._steps = self._steps.uid, LedgerSteps(manager, self.name, self._spec)
        self._steps.uid = uid
        self._data_bytes_max = self._steps.data_bytes_max


def _opened_once_free(path: str, config: StoreConfig | None, wait_s: float) -> LedgerManager | None:
    """Open a store; wait for the process that has it open, up to some seconds.

    Returns:
        None if no process has it open for writing, but this one has its index open for reading, which excludes the
        other; nothing was opened.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return LedgerManager.open(path, config=config)
        except IllegalOperationError:
            return None
        except StoreLockedError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOCK_LOOK_SECONDS)


class Transaction:
    """Records that become durable together; made by ``WriteAheadLog.transaction``.

    The records are appended when its ``with`` ends, and dropped if that raises.

    Threads: one.
    """

    def __init__(self, wal: WriteAheadLog) -> None:
        """Use ``WriteAheadLog.transaction`` instead."""
        self._wal = wal
        self._batch: list[bytes] | None = None
        self.lsns: range = range(0)
        """The LSNs of its records, once it is committed."""

    def append(self, data: bytes) -> None:
        """Add a record.

        Raises:
            UsageError: The data is not bytes, or is too long; the transaction is as before.
            IllegalOperationError: Its ``with`` has not begun, or has ended.
        """
        if self._batch is None:
            raise IllegalOperationError(
                "a transaction takes records inside its `with`; begin one by `with wal.transaction() as transaction`"
            )
        self._batch.append(self._wal._checked(data, None))

    def _end(self, kind: type[BaseException] | None) -> list[bytes]:
        """Return what to commit, and take no more records."""
        batch, self._batch = self._batch, None
        return batch if batch and kind is None else []

    def __enter__(self) -> Self:
        """Begin it; returns the transaction itself."""
        if self._batch is not None:
            raise IllegalOperationError("this transaction has begun already; begin another")
        self._batch = []
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, unless the block raised."""
        if batch := self._end(kind):
            self.lsns = self._wal.append_many(batch)

    async def __aenter__(self) -> Self:
        """Begin it; returns the transaction itself."""
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, unless the block raised."""
        if batch := self._end(kind):
            self.lsns = await self._wal.append_many_coro(batch)


def _runs(lsns: Sequence[int]) -> Iterator[list[int]]:
    """Yield ascending numbers in runs, in which each is near the one before."""
    begin = 0
    for at in range(1, len(lsns)):
        if lsns[at] - lsns[at - 1] > _NEAR:
            yield list(lsns[begin:at])
            begin = at
    yield list(lsns[begin:])


def _checked_meta(meta: object) -> str:
    if isinstance(meta, str):
        with suppress(UnicodeEncodeError):
            if len(meta.encode()) <= META_BYTES_MAX:
                return meta
    raise UsageError(f"meta takes a string of at most {META_BYTES_MAX} bytes in UTF-8, not {meta!r:.50}")


def _whole_lsn(lsn: object, name: str) -> int:
    return whole_from(lsn, 0, name, "a log sequence number", SEQ_MAX)


def _lsn_of_record(lsn: object, name: str) -> int:
    """Return the LSN of a record that may be there one day."""
    found = _whole_lsn(lsn, name)
    if found < _FIRST_LSN:
        raise UsageError(f"{name} is {found}; log sequence numbers begin with {_FIRST_LSN}")
    return found


def _whole_generation(generation: object) -> int:
    return whole_from(generation, 0, "generation", "a generation of the log")
