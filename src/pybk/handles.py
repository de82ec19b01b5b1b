"""What an application holds of a ledger: ``LedgerWriter`` and ``LedgerReader``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import Final, Self

from pybk.digest import EntryDigest
from pybk.entry import ENTRY_HEADER_BYTES, Entry, EntryBatch, decode_entry
from pybk.errors import (
    ClosedError,
    DuplicateEntryError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    PybkError,
    ReadRangeError,
    TooManyRequestsError,
    UsageError,
)
from pybk.flags import ReadFlag
from pybk.futures import ACKNOWLEDGED, AdvancedFuture, AppendFuture
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log import Commit
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.reading import entry_span
from pybk.storage.store import Store

Payload = bytes | bytearray | memoryview
"""What may be appended; any other object with a contiguous buffer is taken too."""

_CHUNK_BYTES: Final = 4 << 20
_READ_BYTES: Final = 1 << 20
_BATCH_BYTES: Final = 8 << 20


class LedgerWriter:
    """Appends to one ledger; made by ``LedgerManager.create_ledger``.

    As a context manager it closes the ledger at the end.

    Threads: any; entries get their ids in the order in which the calls take the ledger's lock.
    """

    def __init__(self, store: Store, descriptor: LedgerDescriptor, digest: EntryDigest) -> None:
        self._store = store
        self._log = store.log
        self._descriptor = descriptor
        self._digest = digest
        self._overhead = ENTRY_HEADER_BYTES + digest.size
        self._max_entry_bytes = store.config.max_entry_bytes
        self._wanted = not descriptor.deferred
        self._advanced = descriptor.metadata.advanced
        self._early: dict[int, tuple[bytes, AdvancedFuture[int]]] = {}
        self._early_bytes = 0
        self._closed = False
        self.ledger_id: Final = descriptor.ledger_id

    def __repr__(self) -> str:
        """Name the ledger and how far it is."""
        return f"<LedgerWriter ledger {self.ledger_id}, last add confirmed {self.last_add_confirmed}>"

    @property
    def last_add_confirmed(self) -> int:
        """Highest entry id of which it and all before it are confirmed; -1 for none."""
        return self._descriptor.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        """Highest entry id given out so far; -1 for none."""
        return self._descriptor.last_pushed

    @property
    def length(self) -> int:
        """Payload bytes given so far."""
        return self._descriptor.length_pushed

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as of its last durable change."""
        return self._descriptor.metadata

    # ---- appending -----------------------------------------------------------------------------------------------

    def append(self, payload: Payload, *, entry_id: int | None = None) -> int:
        """Append one entry and wait until it is durable.

        Args:
            payload: 0 to ``max_entry_bytes`` bytes.
            entry_id: Needed for advanced ledgers, refused for others: the entry's id. It is acknowledged after all ids
                before it were.

        Returns:
            The entry's id; ids count from 0.

        Raises:
            UsageError: The payload is no bytes-like object or too long; nothing was done.
            LedgerClosedError: The ledger was closed.
            LedgerFencedError: Another handle recovered the ledger.
            DuplicateEntryError: An advanced ledger was given this id already.
            StorageFullError: There is no room; nothing was written.
            StorageFailedError: Writing failed; whether the entry survives is unknown.

        Durability: On return it is on disk; with ``WriteFlag.DEFERRED_FORCE`` only after ``force`` or ``close``.
        Cost: One synced write, shared by all who append meanwhile.
        """
        if self._advanced or entry_id is not None:
            return self.append_async(payload, entry_id=entry_id).result()
        if type(payload) is not bytes or len(payload) > self._max_entry_bytes:
            payload = self._checked(payload)
        entry_id, commit = self._stage(payload, wait=True)
        if self._wanted:
            self._log.wait(commit)
            if commit.error is not None:
                raise commit.error
        return entry_id

    def append_async(self, payload: Payload, *, entry_id: int | None = None, wait: bool = True) -> AppendFuture[int]:
        """Append one entry without waiting for it to be durable.

        Args:
            payload: As for ``append``; copied before the call returns unless it is ``bytes``.
            entry_id: As for ``append``.
            wait: When ``max_outstanding_bytes`` are not durable yet, wait for some to be; False raises instead.

        Returns:
            A future of the entry id: ``result()``, ``add_done_callback``, or ``await`` it.

        Raises:
            TooManyRequestsError: ``wait`` is False and too much is outstanding; nothing was done.
            PybkError: As ``append``, for what is known at once.
        """
        if type(payload) is not bytes or len(payload) > self._max_entry_bytes:
            payload = self._checked(payload)
        if self._advanced or entry_id is not None:
            return self._append_advanced(payload, entry_id, wait=wait)
        entry_id, commit = self._stage(payload, wait=wait)
        if not self._wanted:
            return AppendFuture(self._log, ACKNOWLEDGED, entry_id)
        self._log.kick()
        return AppendFuture(self._log, commit, entry_id)

    def append_many(self, payloads: Iterable[Payload]) -> range:
        """Append a batch of entries as one, with one sync for up to 4 MiB of them, and wait until all are durable.

        Args:
            payloads: As for ``append``, any number.

        Returns:
            The entries' ids, consecutive.

        Raises:
            PybkError: As ``append``. The batch is acknowledged as a whole; after a crash a prefix of an unacknowledged batch
                may be there.
        """
        ids, commit = self._stage_many(payloads)
        if self._wanted:
            self._log.wait(commit)
            if commit.error is not None:
                raise commit.error
        return ids

    def append_many_async(self, payloads: Iterable[Payload]) -> AppendFuture[range]:
        """Append a batch as ``append_many`` does, and return a future of its ids."""
        ids, commit = self._stage_many(payloads)
        if not self._wanted:
            return AppendFuture(self._log, ACKNOWLEDGED, ids)
        self._log.kick()
        return AppendFuture(self._log, commit, ids)

    def _checked(self, payload: object) -> bytes:
        """Return a payload as bytes, or say what is wrong with it."""
        try:
            view = memoryview(payload)  # type: ignore[arg-type]  # whatever has a buffer is welcome
        except TypeError:
            raise UsageError(
                f"a payload is bytes, bytearray, memoryview or another bytes-like object, not {type(payload).__name__}; "
                "encode text first: text.encode()"
            ) from None
        if view.nbytes > self._max_entry_bytes:
            raise UsageError(f"the payload has {view.nbytes} bytes; max_entry_bytes is {self._max_entry_bytes}: split it over "
                             "several entries, or open the store with StoreConfig(max_entry_bytes=...)")
        return view.tobytes()

    def _stage(self, payload: bytes, *, wait: bool) -> tuple[int, Commit]:
        """Give an entry its id and stage it."""
        descriptor = self._descriptor
        size = len(payload)
        while True:
            with descriptor.lock:
                if self._closed:
                    self._refuse()
                entry_id = descriptor.last_pushed + 1
                length = descriptor.length_pushed + size
                prefix = self._digest.seal(entry_id, descriptor.last_add_confirmed, length, payload)
                commit = self._log.stage_entry(
                    descriptor, entry_id, size + self._overhead, prefix, payload, length, self._wanted
                )
                if commit is not None:
                    descriptor.last_pushed = entry_id
                    descriptor.length_pushed = length
                    return entry_id, commit
            self._wait_for_space(size, wait=wait)

    def _stage_many(self, payloads: Iterable[Payload]) -> tuple[range, Commit]:
        """Give entries their ids and stage them in order, in pieces that one commit can take."""
        if self._advanced:
            raise IllegalOperationError(f"ledger {self.ledger_id} is advanced: append its entries one by one, with their ids")
        most = self._max_entry_bytes
        batch = [p if type(p) is bytes and len(p) <= most else self._checked(p) for p in payloads]
        descriptor = self._descriptor
        commit = ACKNOWLEDGED
        with descriptor.lock:
            if self._closed:
                self._refuse()
            first = descriptor.last_pushed + 1
            for piece in _pieces(batch, self._overhead):
                commit = self._stage_piece(piece)
        return range(first, first + len(batch)), commit

    def _stage_piece(self, payloads: list[bytes]) -> Commit:
        """Stage consecutive entries; the caller holds the ledger's lock."""
        descriptor = self._descriptor
        first = descriptor.last_pushed + 1
        lengths = list(map(len, payloads))
        prefixes = self._digest.seal_many(first, descriptor.last_add_confirmed, descriptor.length_pushed, payloads)
        overhead = self._overhead
        parts: list[bytes | memoryview] = [b""] * (2 * len(payloads))
        parts[::2] = prefixes
        parts[1::2] = payloads
        sizes = [length + overhead for length in lengths]
        length = descriptor.length_pushed + sum(lengths)
        while True:
            commit = self._log.stage(descriptor, first, sizes, parts, length, wanted=self._wanted)
            if commit is not None:
                break
            self._wait_for_space(sum(sizes), wait=True)
        descriptor.last_pushed = first + len(payloads) - 1
        descriptor.length_pushed = length
        return commit

    def _wait_for_space(self, size: int, *, wait: bool) -> None:
        if not wait:
            raise TooManyRequestsError(f"{self._log.outstanding_bytes} bytes are appended and not durable yet, and {size} more are "
                                       f"beyond max_outstanding_bytes {self._store.config.max_outstanding_bytes}; wait for some "
                                       "futures, then try again")
        self._store.wait_for_room()

    def _refuse(self) -> None:
        error = self._descriptor.error
        if error is not None:
            raise error
        raise LedgerClosedError(f"ledger {self.ledger_id} is closed; create another ledger to append more")

    # ---- advanced ledgers ----------------------------------------------------------------------------------------

    def _append_advanced(self, payload: bytes, entry_id: int | None, *, wait: bool) -> AppendFuture[int]:
        if not self._advanced:
            raise IllegalOperationError(f"ledger {self.ledger_id} gives entry ids itself; create_ledger(ledger_id=...) makes a "
                                        "ledger whose ids are yours")
        if entry_id is None or entry_id < 0:
            raise IllegalOperationError(f"ledger {self.ledger_id} is advanced: append(payload, entry_id=...) with an id from 0 up, "
                                        f"not {entry_id}")
        descriptor = self._descriptor
        with descriptor.lock:
            if self._closed or descriptor.error is not None:
                self._refuse()
            if entry_id <= descriptor.last_pushed or entry_id in self._early:
                raise DuplicateEntryError(f"ledger {self.ledger_id} was given entry {entry_id} already")
            future: AdvancedFuture[int] = AdvancedFuture(self._log, entry_id)
            limit = self._store.config.max_outstanding_bytes
            if entry_id != descriptor.last_pushed + 1 and self._early_bytes + len(payload) > limit:
                raise TooManyRequestsError(f"{self._early_bytes} bytes of ledger {self.ledger_id} wait for entry "
                                           f"{descriptor.last_pushed + 1}; append that one first")
            self._early[entry_id] = (payload, future)
            self._early_bytes += len(payload)
            self._stage_early(wait=wait)
        self._log.kick()
        return future

    def _stage_early(self, *, wait: bool) -> None:
        """Stage the entries whose turn has come; the caller holds the ledger's lock."""
        descriptor = self._descriptor
        while (early := self._early.get(descriptor.last_pushed + 1)) is not None:
            payload, future = early
            entry_id = descriptor.last_pushed + 1
            length = descriptor.length_pushed + len(payload)
            prefix = self._digest.seal(entry_id, descriptor.last_add_confirmed, length, payload)
            size = len(payload) + self._overhead
            commit = self._log.stage_entry(descriptor, entry_id, size, prefix, payload, length, self._wanted)
            if commit is None:
                self._wait_for_space(size, wait=True)
                continue
            del self._early[entry_id]
            self._early_bytes -= len(payload)
            descriptor.last_pushed = entry_id
            descriptor.length_pushed = length
            future.staged(commit if self._wanted else ACKNOWLEDGED)

    # ---- forcing and closing -------------------------------------------------------------------------------------

    def force(self) -> int:
        """Make everything appended so far durable and confirmed.

        Returns:
            The last add confirmed.

        Raises:
            PybkError: As ``append``.
        """
        if not self._wanted:
            return self._store.force(self._descriptor)
        self._log.flush()
        return self._descriptor.last_add_confirmed

    async def force_async(self) -> int:
        """Force in a thread, so that the event loop goes on."""
        return await asyncio.to_thread(self.force)

    def close(self) -> None:
        """Wait for what was appended and close the ledger; closing again does nothing.

        Raises:
            LedgerFencedError: Another handle recovered the ledger, and what it holds was settled there.
            PybkError: As ``append``; the ledger stays open and may be recovered.
        """
        descriptor = self._descriptor
        with descriptor.lock:
            if self._closed:
                return
            self._closed = True
            early, self._early = self._early, {}
        for _, future in early.values():
            future.staged(None, LedgerClosedError(f"ledger {self.ledger_id} was closed before the entries before this one came"))
        if descriptor.deleted:
            return
        if isinstance(descriptor.error, LedgerFencedError):
            raise descriptor.error
        self._store.close_ledger(descriptor, fence=False)

    async def close_async(self) -> None:
        """Close in a thread, so that the event loop goes on."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the ledger; an error that is on its way is not replaced by one of closing."""
        try:
            self.close()
        except PybkError:
            if error is None:
                raise

    async def __aenter__(self) -> Self:
        """Return the writer itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the ledger as ``__exit__`` does, in a thread."""
        await asyncio.to_thread(self.__exit__, kind, error, traceback)


def _pieces(payloads: list[bytes], overhead: int) -> Iterator[list[bytes]]:
    """Cut a batch into pieces of about 4 MiB."""
    total = sum(map(len, payloads)) + overhead * len(payloads)
    if total <= _CHUNK_BYTES:
        if payloads:
            yield payloads
        return
    low = size = 0
    for high, payload in enumerate(payloads):
        size += len(payload) + overhead
        if size > _CHUNK_BYTES and high > low:
            yield payloads[low:high]
            low, size = high, len(payload) + overhead
    yield payloads[low:]


class LedgerReader:
    """Reads one ledger; made by ``LedgerManager.open_ledger``.

    Threads: any.
    """

    def __init__(
        self, store: Store | ReadOnlyStore, descriptor: LedgerDescriptor, digest: EntryDigest, read_flags: ReadFlag
    ) -> None:
        self._store = store
        self._descriptor = descriptor
        self._digest = digest
        self._digest_bytes = digest.size
        self._direct = ReadFlag.DONT_CACHE in read_flags
        self._plain = not self._direct and digest.size > 0
        self._closed = False
        self._last_add_confirmed = descriptor.last_add_confirmed
        self.ledger_id: Final = descriptor.ledger_id

    def __repr__(self) -> str:
        """Name the ledger and how far it is."""
        return f"<LedgerReader ledger {self.ledger_id}, last add confirmed {self._last_add_confirmed}>"

    @property
    def last_add_confirmed(self) -> int:
        """Last entry this reader may read: as of opening, or of the last ``read_last_add_confirmed``; -1 for none."""
        return self._last_add_confirmed

    @property
    def length(self) -> int:
        """Payload bytes of the ledger as far as is durable."""
        return self._descriptor.length_durable

    @property
    def metadata(self) -> LedgerMetadata:
        """The ledger's metadata as of its last durable change."""
        return self._descriptor.metadata

    @property
    def is_closed(self) -> bool:
        """Whether the ledger is closed, so that its last entry is final."""
        return self._descriptor.metadata.state is LedgerState.CLOSED

    def read_last_add_confirmed(self) -> int:
        """Look how far an open ledger has come; entries up to there can be read from now on."""
        self._check_open()
        self._store.catch_up()
        self._check_open()
        self._last_add_confirmed = self._descriptor.last_add_confirmed
        return self._last_add_confirmed

    async def read_last_add_confirmed_async(self) -> int:
        """Look in a thread, so that the event loop goes on."""
        return await asyncio.to_thread(self.read_last_add_confirmed)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read(self, first: int, last: int) -> Iterator[Entry]:
        """Read entries in order; both ends inclusive, each entry verified.

        Args:
            first: First entry id.
            last: Last entry id, at most ``last_add_confirmed``; ``first - 1`` reads nothing.

        Raises:
            ReadRangeError: The range is not within 0 to ``last_add_confirmed``.
            DigestMismatchError: An entry is not what the writer made; raised when iteration comes to it.
            CorruptError: An entry is known to exist and cannot be read; raised when iteration comes to it.
        """
        self._check_range(first, last, self._last_add_confirmed)
        return self._entries(first, last)

    def read_unconfirmed(self, first: int, last: int) -> Iterator[Entry]:
        """Read like ``read``, up to everything written, whether it is confirmed or not.

        What a ``DEFERRED_FORCE`` writer has buffered is written first; it is not confirmed by that.
        """
        self._check_open()
        self._store.write_buffered()
        self._check_range(first, last, self._descriptor.last_durable)
        return self._entries(first, last)

    def read_batch(self, first: int, *, max_bytes: int = _BATCH_BYTES, last: int | None = None) -> EntryBatch:
        """Read consecutive entries as one batch, verified, without copying them where the tier allows.

        Args:
            first: First entry id.
            max_bytes: Entry bytes wanted at most; one entry is returned even if longer.
            last: Last entry id wanted; None for ``last_add_confirmed``.

        Returns:
            At least one entry, possibly fewer than fit ``max_bytes``; go on after ``batch.entry_ids[-1]``.

        Raises:
            ReadRangeError, DigestMismatchError, CorruptError: As ``read``.
        """
        last = self._last_add_confirmed if last is None else last
        self._check_range(first, max(first, last), self._last_add_confirmed)
        if max_bytes < 1:
            raise UsageError(f"max_bytes is {max_bytes}; it takes at least 1")
        return self._batch(first, last, max_bytes)

    async def read_batch_async(self, first: int, *, max_bytes: int = _BATCH_BYTES, last: int | None = None) -> EntryBatch:
        """Read a batch in a thread, so that the event loop goes on."""
        return await asyncio.to_thread(self.read_batch, first, max_bytes=max_bytes, last=last)

    async def read_async(self, first: int, last: int) -> AsyncIterator[Entry]:
        """Read like ``read``; use with ``async for``. Disk and digests are worked on in a thread."""
        self._check_range(first, last, self._last_add_confirmed)
        while first <= last:
            batch = await asyncio.to_thread(self._batch, first, last, _READ_BYTES)
            for entry in batch:
                yield entry
            first = int(batch.entry_ids[-1]) + 1

    def follow(self, first: int = 0) -> Iterator[Entry]:
        """Yield entries from ``first`` on as they are confirmed, until the ledger is closed and read to its end."""
        while True:
            moved = threading.Event()
            self._descriptor.when_advanced(moved.set)
            last, final = self._position()
            if first <= last:
                yield from self._entries(first, last)
                first = last + 1
            elif final:
                return
            else:
                moved.wait(self._store.poll_seconds)

    async def follow_async(self, first: int = 0) -> AsyncIterator[Entry]:
        """Follow like ``follow``; use with ``async for``."""
        loop = asyncio.get_running_loop()
        while True:
            moved = asyncio.Event()
            self._descriptor.when_advanced(lambda event=moved: _set_in(loop, event))  # type: ignore[misc]  # bound now
            last, final = await asyncio.to_thread(self._position)
            if first <= last:
                async for entry in self.read_async(first, last):
                    yield entry
                first = last + 1
            elif final:
                return
            else:
                try:
                    await asyncio.wait_for(moved.wait(), self._store.poll_seconds)
                except TimeoutError:
                    continue

    def _position(self) -> tuple[int, bool]:
        """Return the last entry to read now, and whether there will be no more."""
        self._store.catch_up()
        self._check_open()
        final = self.is_closed
        return self.read_last_add_confirmed(), final

    def _entries(self, first: int, last: int) -> Iterator[Entry]:
        if first == last and self._plain:
            yield self._entry(first)
            return
        while first <= last:
            batch = self._batch(first, last, _READ_BYTES)
            yield from batch
            first = int(batch.entry_ids[-1]) + 1

    def _entry(self, entry_id: int) -> Entry:
        """Read one entry by the shortest way: a cached run, a mapped file."""
        words = self._store.place_of(self._descriptor, entry_id)
        view = self._store.mapped(words)
        if view is None:
            return self._batch(entry_id, entry_id, 1)[0]
        start, end = entry_span(view, words, entry_id)
        self._digest.check(view, start, end, entry_id)
        return decode_entry(view, start, end, self._digest_bytes)

    def _batch(self, first: int, last: int, max_bytes: int) -> EntryBatch:
        batch = self._store.read_batch(
            self._descriptor, first, last, max_bytes, digest_bytes=self._digest_bytes, direct=self._direct
        )
        self._digest.check_many(batch)
        return batch

    def _check_range(self, first: int, last: int, most: int) -> None:
        if self._closed or self._descriptor.deleted or self._store.forked:
            self._check_open()
        if first < 0 or last > most or last < first - 1 or first > most + 1:
            raise ReadRangeError(f"entries {first} to {last} of ledger {self.ledger_id} are not within 0 to {most}; "
                                 "read_last_add_confirmed() looks how far an open ledger has come")

    def _check_open(self) -> None:
        self._store.check_process()
        if self._closed:
            raise ClosedError(f"this reader of ledger {self.ledger_id} is closed; open the ledger again")
        if self._descriptor.deleted:
            raise NoSuchLedgerError(f"ledger {self.ledger_id} was deleted")

    # ---- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the ledger; the ledger itself is not changed."""
        self._closed = True

    async def close_async(self) -> None:
        """Let go of the ledger."""
        self.close()

    def __enter__(self) -> Self:
        """Return the reader itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the reader."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the reader itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the reader."""
        self.close()


def _set_in(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Set an event of a loop from any thread; a closed loop has nobody waiting."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
