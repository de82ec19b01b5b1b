"""``LedgerReader``: the handle by which an application reads a ledger."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import index
from typing import Final, NoReturn, SupportsIndex

from pybk.backend import LedgerBackend
from pybk.deferral import asyncio, np
from pybk.errors import ClosedError, CorruptError, NoSuchLedgerError, PybkError, ReadRangeError, UsageError
from pybk.flags import ReadFlag
from pybk.ledger.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch, gather
from pybk.ledger.keys import LedgerSeal
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.handle import Handle
from pybk.metrics import READ_ERRORS, READ_LATENCY, SINGLE_READS_MAX, MetricsScope, code_of
from pybk.spans import OnSpan, operation
from pybk.storage.descriptor import LedgerDescriptor
from pybk.threads.call_threads import WakeUp, asyncio_form, call_in, in_thread

_READ_BYTES: Final = 1 << 20
_BATCH_BYTES: Final = 8 << 20


def _whole(number: SupportsIndex) -> int:
    """Return a whole number of any type, such as numpy's, as ``int``."""
    try:
        if not isinstance(number, bool):
            return index(number)
    except TypeError:
        pass
    raise UsageError(f"{number!r:.100} is not a whole number; entry ids and sizes are")


class LedgerReader(Handle):
    """Reads one ledger; made by ``LedgerManager.open_ledger``.

    Threads: any.
    """

    def __init__(
        self,
        backend: LedgerBackend,
        descriptor: LedgerDescriptor,
        seal: LedgerSeal,
        read_flags: ReadFlag,
        check_end: Callable[[LedgerMetadata, LedgerSeal], None],
        manager: object = None,
    ) -> None:
        self._backend = backend
        self._on_span: Final[OnSpan | None] = backend.config.on_span
        self._manager = manager  # a reference, because the manager is closed once no handle refers to it
        self._descriptor = descriptor
        self._seal = seal
        self._check_end = check_end
        self._digest = digest = seal.digest
        self._prefix_bytes = ENTRY_HEADER_BYTES + digest.size
        self._direct = ReadFlag.DONT_CACHE in read_flags
        self._plain = not self._direct and digest.size > 0
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: dict[Callable[[], None], None] = {}  # wakes each follower that waits; changed by single steps
        self._last_add_confirmed = descriptor.last_add_confirmed
        self._sealed_last = -1
        self._metered: LedgerMetadata | None = None
        self._take_metadata()
        self.ledger_id: Final = descriptor.ledger_id

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a LedgerReader can be neither copied nor pickled: share it between threads, and open the ledger again in "
            f"another process, where a manager of its own has open_ledger({self.ledger_id}, ...)"
        )

    def __repr__(self) -> str:
        """Return the class, the ledger and its last add confirmed."""
        closed = ", closed" if self._closed else ""
        return f"<LedgerReader ledger {self.ledger_id}, last add confirmed {self._last_add_confirmed}{closed}>"

    @property
    def last_add_confirmed(self) -> int:
        """The last entry that can be read: as of opening, or of the last ``read_last_add_confirmed``; -1 for none."""
        return self._last_add_confirmed

    @property
    def length(self) -> int:
        """The payload bytes of the ledger's durable entries."""
        return self._descriptor.length_durable

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as of its last durable change."""
        return self._descriptor.metadata

    @property
    def is_closed(self) -> bool:
        """True if the ledger is closed; its last entry is final then."""
        return self._descriptor.metadata.state is LedgerState.CLOSED

    def read_last_add_confirmed(self) -> int:
        """Return the present last add confirmed of the ledger; entries up to it can be read from now on."""
        self._check_open()
        self._backend.look(self._descriptor)
        self._check_open()
        if self._metered is not self._descriptor.metadata:
            self._take_metadata()
        return self._advance()

    read_last_add_confirmed_async = asyncio_form(read_last_add_confirmed)

    def _advance(self) -> int:
        """Raise the reader's last add confirmed to the ledger's."""
        with self._lock:  # another thread may have set a later one meanwhile
            self._last_add_confirmed = max(self._last_add_confirmed, self._descriptor.last_add_confirmed)
            return self._last_add_confirmed

    # ---- reading -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        """Read all entries up to ``last_add_confirmed``, as ``read`` does; ``follow`` waits for more."""
        return self.read(0, self._last_add_confirmed)

    def __aiter__(self) -> AsyncIterator[Entry]:
        """Read all entries up to ``last_add_confirmed``, as ``read_async`` does; ``follow_async`` waits for more."""
        return self.read_async(0, self._last_add_confirmed)

    def read(self, first: int = 0, last: int | None = None) -> Iterator[Entry]:
        """Read entries in order; both ends inclusive, each entry verified.

        Args:
            first: First entry id.
            last: Last entry id, at most ``last_add_confirmed``, which None stands for; ``first - 1`` reads nothing.

        Raises:
            ReadRangeError: The range is not within 0 to ``last_add_confirmed``.
            DigestMismatchError: The digest of an entry does not match; raised when the iteration reaches it, or before.
            SealMismatchError: The ledger was closed, and its end or its last entry does not match the seal.
            CorruptError: An entry exists but cannot be read; raised when the iteration reaches it, or before.
        """
        if type(first) is not int or type(last) is not int:
            first, last = _whole(first), self._last_add_confirmed if last is None else _whole(last)
        if first == last and self._plain and 0 <= first <= self._last_add_confirmed:
            if self._closed or self._descriptor.deleted or self._backend.ended:
                self._check_open()
            return iter((self._entry(first),))
        self._check_range(first, last, self._last_add_confirmed)
        return self._entries(first, last)

    def read_unconfirmed(self, first: int, last: int) -> Iterator[Entry]:
        """Read like ``read``, but up to the last written entry, which may not be confirmed.

        In a store, entries that a ``DEFERRED_FORCE`` writer has buffered are written first, but not confirmed by that.
        In a cluster, these are the entries that have reached bookies; the newest may still be on their way.
        """
        return self._entries(*self._checked_unconfirmed(first, last))

    async def read_unconfirmed_async(self, first: int, last: int) -> AsyncIterator[Entry]:
        """Read like ``read_unconfirmed``; use with ``async for``. A thread reads and verifies the entries."""
        first, last = await in_thread(self._checked_unconfirmed, first, last)
        async for entry in self._entries_async(first, last):
            yield entry

    def _checked_unconfirmed(self, first: int, last: int) -> tuple[int, int]:
        first, last = _whole(first), _whole(last)
        self._check_open()
        self._backend.write_buffered(self._descriptor)
        self._check_range(first, last, self._descriptor.last_durable)
        return first, last

    def read_batch(self, first: int, *, max_bytes: int = _BATCH_BYTES, last: int | None = None) -> EntryBatch:
        """Read consecutive entries as one batch, verified, without copying them where the tier allows.

        Args:
            first: First entry id.
            max_bytes: Entry bytes wanted at most; one entry is returned even if longer.
            last: Last entry id wanted; None for ``last_add_confirmed``.

        Returns:
            At least one entry, possibly fewer than fit ``max_bytes``; the next begins after ``batch.entry_ids[-1]``.

        Raises:
            ReadRangeError, DigestMismatchError, CorruptError: As ``read``.
        """
        first, max_bytes = _whole(first), _whole(max_bytes)
        most = self._last_add_confirmed
        last = max(first, most) if last is None else _whole(last)
        self._check_range(first, last, most)
        if last < first:
            raise ReadRangeError(f"a batch from entry {first} to {last} holds no entry; last is at least first")
        if max_bytes < 1:
            raise UsageError(f"max_bytes is {max_bytes}; it takes at least 1")
        return self._batch(first, last, max_bytes)

    read_batch_async = asyncio_form(read_batch)

    async def read_async(self, first: int = 0, last: int | None = None) -> AsyncIterator[Entry]:
        """Read like ``read``; use with ``async for``. A thread reads the disk and verifies the entries."""
        first, last = _whole(first), self._last_add_confirmed if last is None else _whole(last)
        self._check_range(first, last, self._last_add_confirmed)
        async for entry in self._entries_async(first, last):
            yield entry

    def follow(self, first: int = 0) -> Iterator[Entry]:
        """Yield entries from ``first`` on as they are confirmed, until the ledger is closed and read to its end.

        Args:
            first: First entry id; may be beyond the present last entry.

        Raises:
            ClosedError: The reader or its manager was closed, also while waiting here.
            NoSuchLedgerError: The ledger was deleted, also while waiting here.
            DigestMismatchError, CorruptError: As ``read``.

        Cost: In the process of the writer, waiting costs nothing. In a read-only manager one thread polls for all
            followers: they see an entry within 20 ms while entries arrive, and within 250 ms after 4 seconds without
            entries. In a cluster, the manager has one long poll and one watch for all its followers of a ledger, and
            repeats its requests every 28 s, or every 2 minutes at rest; threads and tasks of followers wake only for
            entries.
        """
        first = self._checked_first(first)
        changed = WakeUp()
        while True:
            changed.sleep()
            with self._woken_by(changed.wake):  # registered before the check, so that no change is missed in between
                last, final = self._position(first)
                if first > last and not final:
                    changed.wait()
            if first <= last:
                yield from self._entries(first, last)
                first = last + 1
            elif final:
                return

    async def follow_async(self, first: int = 0) -> AsyncIterator[Entry]:
        """Follow like ``follow``; use with ``async for``."""
        first = self._checked_first(first)
        loop = asyncio.get_running_loop()
        moved = asyncio.Event()

        def wake() -> None:
            call_in(loop, moved.set)

        while True:
            moved.clear()
            with self._woken_by(wake):
                last, final = await in_thread(self._position, first)
                if first > last and not final:
                    await moved.wait()
            if first <= last:
                async for entry in self._entries_async(first, last):
                    yield entry
                first = last + 1
            elif final:
                return

    @contextmanager
    def _woken_by(self, callback: Callable[[], None]) -> Iterator[None]:
        """Have a callback called when the ledger changes or this reader is closed, until the ``with`` block ends.

        So a follower that is abandoned while it waits does not leave its callback registered.
        """
        self._waiting[callback] = None
        try:
            self._descriptor.when_advanced(callback)
            yield
        finally:
            self._descriptor.forget_callback(callback)
            self._waiting.pop(callback, None)

    def _position(self, first: int) -> tuple[int, bool]:
        """Return the last entry that can be read now, and whether it is final; refresh it if it is before ``first``."""
        self._check_open()
        if first > self._advance():
            self._backend.look(self._descriptor, follows=True)
            self._check_open()
        if self._metered is not self._descriptor.metadata:
            self._take_metadata()
        final = self.is_closed
        return self._advance(), final

    def _entries(self, first: int, last: int) -> Iterator[Entry]:
        while first <= last:
            batch = self._batch(first, last, _READ_BYTES)
            yield from batch
            first = int(batch.entry_ids[-1]) + 1

    async def _entries_async(self, first: int, last: int) -> AsyncIterator[Entry]:
        while first <= last:
            batch = await in_thread(self._batch, first, last, _READ_BYTES)
            for entry in batch:
                yield entry
            first = int(batch.entry_ids[-1]) + 1

    def _entry(self, entry_id: int) -> Entry:
        """Read one entry, from a cached run or a mapped file if possible."""
        if self._metered is not self._descriptor.metadata:
            self._take_metadata()
        singles = self._meter.single_reads
        began_ns = 0 if singles else time.monotonic_ns()
        try:
            found = self._backend.locate(self._descriptor, entry_id)
        except PybkError as error:
            self._failed(error)
            raise
        if found is None:
            return self._batch(entry_id, entry_id, 1)[0]
        if isinstance(found, Entry):
            entry = found
            singles.append(self._prefix_bytes + len(entry.payload))
        else:
            buffer, start, end = found
            try:
                entry = self._digest.open(buffer, start, end, entry_id)
                if entry_id == self._sealed_last:
                    self._seal.check_digest(self._descriptor.metadata, buffer, start)
            except PybkError as error:
                self._failed(error)
                raise
            singles.append(end - start)
        if began_ns:
            self._meter.observe(READ_LATENCY, time.monotonic_ns() - began_ns)
        elif len(singles) >= SINGLE_READS_MAX:
            self._meter.count_single_reads()
        return entry

    def _batch(self, first: int, last: int, max_bytes: int) -> EntryBatch:
        on_span = self._on_span
        if on_span is None:
            return self._read_batch(first, last, max_bytes)
        ledger_type = str(self._descriptor.metadata.ledger_type)
        with operation(
            on_span, "pybk.ledger.read", ledger_id=self.ledger_id, ledger_type=ledger_type, first_entry_id=first
        ) as reading:
            batch = self._read_batch(first, last, max_bytes)
            reading.note(entries=len(batch), bytes=int(batch.sizes.sum()))
        return batch

    def _read_batch(self, first: int, last: int, max_bytes: int) -> EntryBatch:
        began_ns = time.monotonic_ns()
        if self._closed or self._descriptor.deleted or self._backend.ended:
            self._check_open()
        try:
            batch = self._backend.read_verified(
                self._descriptor, first, last, max_bytes, digest=self._digest, direct=self._direct
            )
            metadata = self._descriptor.metadata
            if self._metered is not metadata:
                self._take_metadata()
            if self._sealed_last >= 0:
                self._seal.check_last(metadata, batch)
        except PybkError as error:
            self._failed(error)
            raise
        self._meter.read(len(batch), int(batch.sizes.sum()), time.monotonic_ns() - began_ns)
        return batch

    def _failed(self, error: PybkError) -> None:
        """Count a read that failed.

        Raises:
            ClosedError, NoSuchLedgerError: The reader was closed or the ledger deleted meanwhile, which is the better
                error, and is not counted.
        """
        self._check_open()
        metadata = self._descriptor.metadata
        labels = (("code", code_of(error)),)
        self._backend.metrics.add(READ_ERRORS, 1, metadata.ledger_type, metadata.tier, labels)

    def _take_metadata(self) -> None:
        """Check the end in the metadata of a closed ledger, and choose the scope of metrics for reads."""
        metadata = self._descriptor.metadata
        if metadata.state is LedgerState.CLOSED:
            self._check_end(metadata, self._seal)
        self._sealed_last = metadata.last_entry_id if metadata.sealed else -1
        self._meter: MetricsScope = self._backend.metrics.scope(metadata.ledger_type, metadata.tier)
        self._metered = metadata  # set last, because other threads check it

    def _check_range(self, first: int, last: int, most: int) -> None:
        if self._closed or self._descriptor.deleted or self._backend.ended:
            self._check_open()
        if first < 0 or last > most or last < first - 1 or first > most + 1:
            raise ReadRangeError(self._outside(first, last, most))

    def _outside(self, first: int, last: int, most: int) -> str:
        """Return the error for a range that is not within 0 to ``most``."""
        asked = f"entries {first} to {last} cannot be read:"
        if most >= 0:
            later = "" if self.is_closed else "; read_last_add_confirmed() returns the present end of an open ledger"
            return f"{asked} they are not within 0 to {most} of ledger {self.ledger_id}{later}"
        if self.is_closed:
            return f"{asked} ledger {self.ledger_id} is closed and has no entries"
        return (
            f"{asked} ledger {self.ledger_id} has no confirmed entry yet, as far as this reader has looked; "
            "read_last_add_confirmed() looks again, and follow() waits for entries"
        )

    @staticmethod
    def _checked_first(first: int) -> int:
        first = _whole(first)
        if first < 0:
            raise ReadRangeError(f"following from entry {first}; entry ids count from 0")
        return first

    def _is_behind(self) -> bool:
        """Return whether this reader is closed, or has not taken over what is known of its ledger."""
        known = self._descriptor
        if self._closed or known.deleted or self._metered is not known.metadata:
            return True
        return self._last_add_confirmed != known.last_add_confirmed

    def _check_open(self) -> None:
        self._backend.check_usable()
        if self._closed:
            raise ClosedError(f"this reader of ledger {self.ledger_id} is closed; open the ledger again")
        if self._descriptor.deleted:
            raise NoSuchLedgerError(f"ledger {self.ledger_id} was deleted")

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close this reader, without any effect on the ledger; waiting followers raise ClosedError at once."""
        self._closed = True
        for wake in list(self._waiting):  # a signal handler may close the reader, so no lock is taken here
            wake()


def woken_by(reader: LedgerReader, callback: Callable[[], None]) -> AbstractContextManager[None]:
    """Call a callback when a reader's ledger changes or the reader is closed, until the ``with`` block ends.

    For layers that wait for several things at once. The callback runs in some thread and must not block.
    """
    return reader._woken_by(callback)


def position_of(reader: LedgerReader, first: int) -> tuple[int, bool]:
    """Return the last entry that can be read now, and whether it is final; refreshes it if it is before ``first``."""
    return reader._position(first)


def moved(readers: Sequence[LedgerReader]) -> list[LedgerReader]:
    """Return those of some readers for which ``read_last_add_confirmed`` may return or raise something new.

    The ``last_add_confirmed`` of each other one is what it would return. An entry that an ack quorum of bookies knew as
    confirmed before this call is not missed.

    Args:
        readers: Readers of one manager.

    Raises:
        PybkError: The metadata store cannot be read, or the manager is closed.

    Cost: In a cluster one request to each bookie and one read of the metadata store, for all readers together; a few
        microseconds for each reader. In a store nothing.
    """
    if not readers:
        return []
    found = {id(each) for each in readers[0]._backend.moved([reader._descriptor for reader in readers])}
    return [reader for reader in readers if id(reader._descriptor) in found or reader._is_behind()]


def checked_whole(reader: LedgerReader) -> bytes:
    """Read all entries of a closed ledger, and check that they match its metadata.

    Args:
        reader: A reader of the ledger.

    Returns:
        The last entry, encoded; empty for an empty ledger.

    Raises:
        CorruptError: An entry is missing, or the cumulative lengths do not add up.
        DigestMismatchError: The digest of an entry does not match.
    """
    metadata, length, at, last_entry = reader.metadata, 0, 0, b""
    while at <= metadata.last_entry_id:
        batch = reader.read_batch(at, last=metadata.last_entry_id)
        overhead = ENTRY_HEADER_BYTES + batch.digest_bytes
        headers = np.frombuffer(gather(batch.buffer, batch.offsets, ENTRY_HEADER_BYTES), ">i8").reshape(-1, 4)
        lengths = length + (batch.sizes - overhead).cumsum()
        dense = bool((batch.entry_ids == np.arange(at, at + len(batch))).all())
        if not dense or bool((headers[:, 3] != lengths).any()):
            raise CorruptError(
                f"ledger {reader.ledger_id}: the lengths that entries {at} to {int(batch.entry_ids[-1])} say do not "
                "add up to theirs; restore the files they lie in"
            )
        length, at = int(lengths[-1]), int(batch.entry_ids[-1]) + 1
        start = int(batch.offsets[-1])
        last_entry = bytes(batch.buffer[start : start + overhead])
    if reader.length != metadata.length or length != metadata.length:
        raise CorruptError(
            f"ledger {reader.ledger_id} has {length} bytes up to entry {metadata.last_entry_id}, {reader.length} in "
            f"all, and {metadata.length} are recorded; restore its metadata"
        )
    return last_entry
