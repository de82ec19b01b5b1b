"""``LedgerWriter``: the handle by which an application appends to a ledger.

Its appends wait for admission in the order of arrival, in the admission queue of its log (``AppendOrder``).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar, cast

from pybk import storage
from pybk.backend import AppendLog, BatchLog, KeepingLog, LedgerBackend
from pybk.deferral import np
from pybk.errors import (
    DuplicateEntryError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerFencedError,
    LedgerRecoveryError,
    PybkError,
    StorageRefusedError,
    TooManyRequestsError,
    UsageError,
    not_done,
    without_frames,
)
from pybk.ledger.digest import EntryDigest
from pybk.ledger.entry import ENTRY_HEADER_BYTES, lengths_of
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.append_future import (
    ACKNOWLEDGED,
    AdvancedFuture,
    AppendFuture,
    CoroutineBacklog,
    PiecesFuture,
    of_batch,
    origin_of,
)
from pybk.manager.handle import Handle, where_called
from pybk.metrics import APPEND_ERRORS, code_of
from pybk.spans import operation
from pybk.storage.descriptor import DisplacedError, LedgerDescriptor
from pybk.storage.format.log_file import entry_table
from pybk.storage.log.log import Ticket
from pybk.threads.call_threads import asyncio_form
from pybk.threads.group_commit import Completion
from pybk.threads.interrupts import Holding, guarded
from pybk.values import flag_of, whole

if TYPE_CHECKING:
    import numpy.typing as npt

    from pybk.storage.transaction_group import LedgerEntries

S = TypeVar("S")


class AppendOrder:
    """Makes a writer's appends wait for space in order; used only after an append found too little space.

    Threads: any, in a guard, except where a method says what the caller holds.
    """

    def __init__(self, backend: LedgerBackend, log: AppendLog, descriptor: LedgerDescriptor) -> None:
        self._backend = backend
        self._log = log
        self._descriptor = descriptor

    def in_turn(self, stage: Callable[[], S | None], nbytes: int, *, wait: bool) -> S:
        """Return the result of ``stage`` once there is space, in the order of the appends that wait for it.

        Args:
            stage: Called with the ledger's lock held; returns None, with nothing done, if there is no space.
            nbytes: Bytes that it needs.
            wait: False raises at once.

        Raises:
            TooManyRequestsError: ``wait`` is False.
        """
        if not flag_of(wait, "wait"):  # looked at here alone, because most appends do not wait
            self.refuse(nbytes)
        lock = self._descriptor.lock

        def when_first(ticket: Ticket) -> S:
            with Holding(lock):
                staged = stage()  # space may be back; if not, the lock keeps other appends from joining first
                if staged is not None:
                    return staged
                self._log.admission.join(ticket)
            ticket.wait()
            while True:
                with Holding(lock):
                    staged = self._stage_with(ticket, stage)
                if staged is not None:
                    return staged
                self._backend.wait_for_admission(self._descriptor)

        return self._with_ticket(when_first, nbytes)

    def keeping_lock(self, stage: Callable[[], S | None], nbytes: int) -> S:
        """Return the result of ``stage`` once there is space; the caller holds the ledger's lock and keeps it."""

        def when_first(ticket: Ticket) -> S:
            self._log.admission.join(ticket, keeps_lock=True)
            ticket.wait()
            while (staged := self._stage_with(ticket, stage)) is None:
                self._backend.wait_for_admission(self._descriptor)
            return staged

        return self._with_ticket(when_first, nbytes)

    def _with_ticket(self, work: Callable[[Ticket], S], nbytes: int) -> S:
        """Call ``work`` with a ticket, and return its result; the ticket leaves the queue also after an exception."""
        ticket = Ticket(self._descriptor, nbytes)
        try:
            return work(ticket)
        finally:
            self._log.admission.leave(ticket)

    def _stage_with(self, ticket: Ticket, stage: Callable[[], S | None]) -> S | None:
        """Call ``stage`` for the append of this ticket; the caller holds the ledger's lock."""
        before = self._descriptor.ticket
        self._descriptor.ticket = ticket
        try:
            return stage()
        finally:
            self._descriptor.ticket = before

    def refuse(self, size: int) -> NoReturn:
        """Raise ``TooManyRequestsError`` for an append of ``size`` bytes, or the error of a store that is full."""
        self._backend.check_space()
        waiting = self._log.admission.waiting_bytes
        raise TooManyRequestsError(
            f"{self._log.outstanding_bytes} bytes are appended and not durable yet"
            f"{f', {waiting} bytes wait for space' if waiting else ''}, and {size} more are beyond "
            f"max_outstanding_bytes {self._backend.config.max_outstanding_bytes}; wait for some futures, then try again"
        )


Payload = bytes | bytearray | memoryview
"""The types that may be appended; any other object with a contiguous buffer is taken too."""

ENTRY_ID_MAX: Final = (1 << 63) - 2
CHUNK_BYTES: Final = 4 << 20
"""Bytes of entries in each piece of a batch; a piece is part of one commit."""

RECORD_BYTES_MIN: Final = 64 << 10
"""Bytes of entries from which on a piece is a record of its own in the log of a store.

The record's header and its location in the index take 96 bytes, so smaller pieces share a record.
"""


Staged = tuple[AppendLog, Completion]
"""Entries that were staged: the arguments of an ``AppendFuture`` before its result."""


class LedgerWriter(Handle):
    """Appends to one ledger; made by ``LedgerManager.create_ledger``.

    As a context manager it closes the ledger at the end.

    Threads: any; entries get their ids in the order in which the calls take the ledger's lock.
    """

    def __init__(
        self, backend: LedgerBackend, descriptor: LedgerDescriptor, digest: EntryDigest, manager: object = None
    ) -> None:
        self._backend = backend
        self._manager = manager  # a reference, because the manager is closed once no handle refers to it
        self._log = backend.log_of(descriptor)
        self._keeping = self._log if isinstance(self._log, KeepingLog) else None
        self._batching = self._log if isinstance(self._log, BatchLog) else None
        self._descriptor = descriptor
        self._digest = digest
        self._overhead = ENTRY_HEADER_BYTES + digest.size
        self._prefixed_later = digest.prefers_batches
        if self._prefixed_later:
            descriptor.late_digest = digest
        self._max_entry_bytes = backend.config.max_entry_bytes
        self._wanted = not descriptor.deferred
        self._advanced = descriptor.metadata.advanced
        self._early: dict[int, tuple[bytes, AdvancedFuture[int]]] = {}
        self._early_bytes = 0
        self._turns = AppendOrder(backend, self._log, descriptor)
        self._backlog = CoroutineBacklog()
        self._closed = False  # appends are refused
        self._settled = False  # the ledger is closed or lost as well, so a further close does nothing
        self.ledger_id: Final = descriptor.ledger_id

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a LedgerWriter can be neither copied nor pickled: share it between threads, and create a ledger for each "
            "process that appends"
        )

    def __repr__(self) -> str:
        """Return the class, the ledger and its last add confirmed."""
        closed = ", closed" if self._closed else ""
        return f"<LedgerWriter ledger {self.ledger_id}, last add confirmed {self.last_add_confirmed}{closed}>"

    @property
    def last_add_confirmed(self) -> int:
        """The last entry up to which all are confirmed; -1 for none."""
        return self._descriptor.last_add_confirmed

    @property
    def last_add_pushed(self) -> int:
        """The highest entry id that was assigned; -1 for none."""
        return self._descriptor.last_pushed

    @property
    def length(self) -> int:
        """The payload bytes of all entries that were appended, durable or not."""
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
            entry_id: The entry's id, required for advanced ledgers and refused for others. The entry is acknowledged
                after all entries with lower ids.

        Returns:
            The entry's id; ids count from 0.

        Raises:
            UsageError: The payload is not a bytes-like object, or is too long; nothing was done.
            LedgerClosedError: The ledger was closed.
            LedgerFencedError: Another handle recovered the ledger.
            DuplicateEntryError: An advanced ledger already has an entry with this id.
            StorageFullError: There is not enough free space; nothing was written.
            StorageFailedError: A write failed; whether the entry survives is unknown.

        Durability: The entry is durable on return; with ``WriteFlag.DEFERRED_FORCE`` it is durable only after ``force``
            or ``close``, and survives the end of the process after 100 ms.
        Cost: One synced write, shared by all threads that append meanwhile.
        """
        if self._advanced or entry_id is not None:
            return self.append_async(payload, entry_id=entry_id).result()
        if type(payload) is not bytes or len(payload) > self._max_entry_bytes:
            payload = self._checked(payload)
        return guarded(self._append, payload)

    def _append(self, payload: bytes) -> int:
        """Append one entry, and wait until it is durable unless the ledger is deferred; in a guard."""
        try:
            with Holding(self._descriptor.lock):
                staged = self._stage(payload)
            if staged is None:
                staged = self._in_turn(payload, True)
        except PybkError as error:
            self._count_refused(error)
            raise
        entry_id, commit = staged
        if self._wanted:
            self._log.wait(commit)
            if commit.error is not None:
                raise without_frames(commit.error)
        return entry_id

    def _in_turn(self, payload: bytes, wait: bool) -> tuple[int, Completion]:
        """Give an entry its id and stage it once there is space; in a guard."""
        return self._turns.in_turn(lambda: self._stage(payload), self._overhead + len(payload), wait=wait)

    def append_async(self, payload: Payload, *, entry_id: int | None = None, wait: bool = True) -> AppendFuture[int]:
        """Append one entry without waiting for it to be durable.

        Args:
            payload: As for ``append``; copied before the call returns unless it is ``bytes``.
            entry_id: As for ``append``.
            wait: If ``max_outstanding_bytes`` are not durable yet, wait until some are, in the order of arrival. This
                blocks an event loop; use ``append_coro`` there. False raises instead.

        Returns:
            A future of the entry id: ``result()``, ``add_done_callback``, or ``await`` it.

        Raises:
            TooManyRequestsError: ``wait`` is False and too many bytes are outstanding; or too many bytes of an advanced
                ledger wait for earlier entries. Nothing was done.
            PybkError: As ``append``, for errors that are known immediately; the future raises the others.
        """
        if type(payload) is not bytes or len(payload) > self._max_entry_bytes:
            payload = self._checked(payload)
        if self._advanced or entry_id is not None:
            return guarded(partial(self._append_advanced, payload, entry_id, wait=wait))
        # Without a guard, which would take a third of the time: staging takes effect in one step.
        try:
            with self._descriptor.lock:
                staged = self._stage(payload)
            if staged is None:
                staged = guarded(self._in_turn, payload, wait)
        except PybkError as error:
            self._count_refused(error)
            raise
        if not self._wanted:
            return AppendFuture(self._log, ACKNOWLEDGED, staged[0])
        self._log.kick()
        return AppendFuture(self._log, staged[1], staged[0])

    async def append_coro(self, payload: Payload, *, entry_id: int | None = None) -> int:
        """Append one entry and wait until it is durable; never blocks the event loop.

        This is a coroutine function, for ``asyncio.create_task`` and ``TaskGroup.create_task``. Appends of one loop are
        made in the order in which their coroutines first run.

        Args:
            payload: As for ``append``; copied when the coroutine first runs unless it is ``bytes``.
            entry_id: As for ``append``.

        Returns:
            The entry's id.

        Raises:
            TooManyRequestsError: Too many bytes of an advanced ledger wait for earlier entries; nothing was done.
            PybkError: As ``append``.

        Once the coroutine has begun, cancelling it ends the wait, but not the append.
        """
        if type(payload) is not bytes or len(payload) > self._max_entry_bytes:
            payload = self._checked(payload)
        future = guarded(self._append_at_once, payload, entry_id)
        if future is None:
            future = await self._backlog.add(partial(self.append_async, payload, entry_id=entry_id))
        return await future

    def _append_at_once(self, payload: bytes, entry_id: int | None) -> AppendFuture[int] | None:
        """Append as ``append_async`` does; return None, with nothing done, if that might have to wait. In a guard."""
        lock = self._descriptor.lock
        if not self._backlog.is_empty or not lock.acquire(False):
            return None
        try:
            if self._advanced or entry_id is not None:
                return self._put_advanced_at_once(payload, entry_id)
            staged = self._stage(payload)
        except PybkError as error:
            self._count_refused(error)
            raise
        finally:
            lock.release()
        if staged is None:
            return None
        self._log.kick()
        return AppendFuture(self._log, staged[1] if self._wanted else ACKNOWLEDGED, staged[0])

    def append_many(self, payloads: Iterable[Payload]) -> range:
        """Append a batch of entries, with one sync for each 4 MiB, and wait until all are durable.

        Args:
            payloads: Any number of payloads, each as for ``append``.

        Returns:
            The consecutive ids of the entries.

        Raises:
            PybkError: As ``append``. The batch is acknowledged as a whole; after a crash, and after an error whose
                ``outcome_unknown`` is True, the ledger may have a prefix of the batch.
        """
        return self._stage_many(payloads).result()

    def append_many_async(self, payloads: Iterable[Payload], *, wait: bool = True) -> AppendFuture[range]:
        """Append a batch as ``append_many`` does, without waiting for it to be durable.

        Args:
            payloads: As for ``append_many``.
            wait: As for ``append_async``; a batch is accepted or refused as a whole.

        Returns:
            A future of the entries' ids.

        Raises:
            TooManyRequestsError: ``wait`` is False and too many bytes are outstanding; nothing was done.
            PybkError: As ``append_many``, for errors that are known immediately; the future raises the others.
        """
        future = self._stage_many(payloads, wait=wait)
        if self._wanted:
            self._log.kick()
        return future

    def _checked(self, payload: object) -> bytes:
        """Return a payload as bytes; raise UsageError if it is not valid."""
        try:
            view = memoryview(payload)  # type: ignore[arg-type]  # anything with a buffer
        except (TypeError, ValueError, BufferError) as error:
            raise UsageError(
                f"a payload is bytes, bytearray, memoryview or another bytes-like object, not this "
                f"{type(payload).__name__} ({error}); encode text first: text.encode()"
            ) from None
        if view.nbytes > self._max_entry_bytes:
            raise UsageError(
                f"the payload has {view.nbytes} bytes; max_entry_bytes is {self._max_entry_bytes}: split it over "
                "several entries, or open the store with StoreConfig(max_entry_bytes=...)"
            )
        return view.tobytes()

    def _stage(self, payload: bytes, after: int | None = None) -> tuple[int, Completion] | None:
        """Give an entry its id and stage it; None if too much is outstanding. The caller holds the ledger's lock.

        Args:
            payload: The entry's.
            after: The entry that it must follow; None for any.

        Raises:
            DisplacedError: Other entries come before; nothing was done.
        """
        descriptor = self._descriptor
        size = len(payload)
        if self._closed:
            self._refuse()
        descriptor.account_staged()
        if after is not None and descriptor.last_pushed != after:
            raise DisplacedError
        entry_id = descriptor.last_pushed + 1
        before = descriptor.length_pushed
        if self._prefixed_later:
            prefix = b""
        else:
            prefix = self._digest.prefix(entry_id, descriptor.last_add_confirmed, before + size, payload)
        commit = self._log.stage_entry(descriptor, entry_id, prefix, payload, before, self._overhead, self._wanted)
        if commit is None:
            return None
        descriptor.last_pushed = entry_id
        descriptor.length_pushed = before + size
        if prefix:
            descriptor.last_prefix = prefix
        return entry_id, commit

    def _stage_many(self, payloads: Iterable[Payload], *, wait: bool = True) -> AppendFuture[range]:
        """Give entries their ids and stage them in order, in pieces that one commit can take."""
        if self._advanced:
            raise IllegalOperationError(
                f"ledger {self.ledger_id} is advanced: append its entries one by one, with their ids"
            )
        try:
            given: list[object] = list(payloads)
        except TypeError:
            raise UsageError(f"payloads is {payloads!r:.100}; it takes an iterable of bytes-like objects") from None
        lengths = lengths_of(given)
        if lengths is None:
            given = [self._checked(payload) for payload in given]
            lengths = np.fromiter(map(len, cast("list[bytes]", given)), np.int64, len(given))
        batch = cast("list[bytes]", given)  # already checked above for the whole batch
        if len(batch) and int(lengths.max()) > self._max_entry_bytes:
            self._checked(batch[int(lengths.argmax())])
        try:
            return guarded(partial(self._staged_pieces, batch, lengths, wait=wait))
        except PybkError as error:
            self._count_refused(error)
            raise

    def _staged_pieces(
        self, batch: list[bytes], lengths: npt.NDArray[np.int64], after: int | None = None, *, wait: bool = True
    ) -> AppendFuture[range]:
        """Stage a batch, in its turn; in a guard. ``after`` and errors as for ``_stage``."""
        with Holding(self._descriptor.lock):
            future = self._stage_pieces(batch, lengths, after)
        if future is not None:
            return future
        _, end = next(_pieces(lengths + self._overhead))
        first_bytes = int(lengths[:end].sum()) + self._overhead * end
        return self._turns.in_turn(lambda: self._stage_pieces(batch, lengths, after), first_bytes, wait=wait)

    def _stage_pieces(
        self, batch: list[bytes], lengths: npt.NDArray[np.int64], after: int | None = None
    ) -> AppendFuture[range] | None:
        """Stage a batch; None, with nothing done, if too much is outstanding for its first piece.

        The caller holds the ledger's lock, also while later pieces wait for space: no other append comes between them.
        ``after`` and errors as for ``_stage``.
        """
        if self._closed:
            self._refuse()
        self._descriptor.account_staged()
        if after is not None and self._descriptor.last_pushed != after:
            raise DisplacedError
        first = self._descriptor.last_pushed + 1
        begun: Completion | None = ACKNOWLEDGED
        commit: Completion | None = ACKNOWLEDGED
        try:
            for low, high in _pieces(lengths + self._overhead):
                commit = self._stage_piece(batch[low:high], lengths[low:high])
                if commit is None and low == 0:
                    return None
                if commit is None:
                    nbytes = int(lengths[low:high].sum()) + self._overhead * (high - low)
                    commit = self._turns.keeping_lock(
                        partial(self._stage_piece, batch[low:high], lengths[low:high]), nbytes
                    )
                if low == 0:
                    begun = commit
        except PybkError as error:
            last = self._descriptor.last_pushed
            if last < first or error.outcome_unknown:
                raise
            raise of_batch(error, first, last) from error
        ids = range(first, first + len(batch))
        if not self._wanted:
            return AppendFuture(self._log, ACKNOWLEDGED, ids)
        if begun is commit:
            return AppendFuture(self._log, cast(Completion, commit), ids)
        return PiecesFuture(self._log, cast(Completion, begun), cast(Completion, commit), ids)

    def _stage_piece(self, payloads: list[bytes], lengths: npt.NDArray[np.int64]) -> Completion | None:
        """Stage consecutive entries; None if too much is outstanding. The caller holds the ledger's lock."""
        descriptor, log = self._descriptor, self._log
        count, payload_bytes = len(payloads), int(lengths.sum())
        nbytes = payload_bytes + self._overhead * count
        works = log.error is None and descriptor.error is None
        if works and log.admission.is_full(descriptor.ticket, log.outstanding_bytes, nbytes):
            return None  # before their digests are computed, because they would be computed again
        first, before = descriptor.last_pushed + 1, descriptor.length_pushed
        if self._batching is not None and count > 1 and nbytes >= RECORD_BYTES_MIN:
            commit, last_prefix = self._stage_record(self._batching, payloads, lengths, nbytes)
        else:
            commit, last_prefix = self._stage_parts(payloads, lengths, nbytes)
        if commit is not None:
            descriptor.last_pushed = first + count - 1
            descriptor.length_pushed = before + payload_bytes
            descriptor.last_prefix = last_prefix
        return commit

    def _stage_record(
        self, log: BatchLog, payloads: list[bytes], lengths: npt.NDArray[np.int64], nbytes: int
    ) -> tuple[Completion | None, bytes]:
        """Stage entries as a record of their own; return its commit and the prefix of the last entry."""
        descriptor = self._descriptor
        first, before = descriptor.last_pushed + 1, descriptor.length_pushed
        sizes = lengths + self._overhead
        body = self._digest.encode(
            first, descriptor.last_add_confirmed, before, payloads, lengths, head=entry_table(sizes)
        )
        commit = log.stage_batch(
            descriptor,
            first,
            array("q", sizes.tobytes()),
            body,
            nbytes=nbytes,
            base_length=before,
            overhead=self._overhead,
            wanted=self._wanted,
        )
        return commit, body.last_prefix

    def _stage_parts(
        self, payloads: list[bytes], lengths: npt.NDArray[np.int64], nbytes: int
    ) -> tuple[Completion | None, bytes]:
        """Stage entries that share a record, or a message to bookies, with others; return as ``_stage_record`` does."""
        descriptor = self._descriptor
        first, before = descriptor.last_pushed + 1, descriptor.length_pushed
        parts: list[bytes | memoryview] = [b""] * (2 * len(payloads))
        prefixes = self._digest.prefixes(first, descriptor.last_add_confirmed, before, payloads, lengths)
        parts[::2] = prefixes
        parts[1::2] = payloads
        commit = self._log.stage(
            descriptor,
            first,
            array("q", (lengths + self._overhead).tobytes()),
            parts,
            nbytes=nbytes,
            base_length=before,
            overhead=self._overhead,
            wanted=self._wanted,
        )
        return commit, prefixes[-1]

    def _refuse(self) -> None:
        error = self._descriptor.error or self._log.error
        if error is not None:
            raise not_done(error)
        raise LedgerClosedError(f"ledger {self.ledger_id} is closed; create another ledger to append more")

    def _count_refused(self, error: PybkError) -> None:
        """Count a call that was refused; the log counts entries that failed after they were staged."""
        metadata = self._descriptor.metadata
        labels = (("code", code_of(error)),)
        self._backend.metrics.add(APPEND_ERRORS, 1, metadata.ledger_type, metadata.tier, labels)

    # ---- advanced ledgers ----------------------------------------------------------------------------------------

    def _append_advanced(self, payload: bytes, entry_id: int | None, *, wait: bool) -> AppendFuture[int]:
        number = self._advanced_id(entry_id)
        try:
            with Holding(self._descriptor.lock):
                future = self._put_advanced(payload, number, wait=wait)
        except PybkError as error:
            self._count_refused(error)
            raise
        self._log.kick()
        return future

    def _put_advanced_at_once(self, payload: bytes, entry_id: int | None) -> AppendFuture[int] | None:
        """Append as ``_append_advanced`` does; None if that might have to wait for space. The caller holds the lock."""
        number = self._advanced_id(entry_id)
        is_next = number == self._descriptor.last_pushed + 1
        if is_next and self._early:
            return None  # entries that wait for this one are staged with it, and there may not be enough space for them
        try:
            future = self._put_advanced(payload, number, wait=False)
        except TooManyRequestsError:
            if is_next:
                return None
            raise
        self._log.kick()
        return future

    def _advanced_id(self, entry_id: int | None) -> int:
        """Return a valid entry id; raise UsageError if the ledger is not advanced, or the id is not valid."""
        if not self._advanced:
            raise IllegalOperationError(
                f"ledger {self.ledger_id} gives entry ids itself; create_ledger(ledger_id=...) makes a "
                "ledger whose ids are yours"
            )
        if entry_id is None:
            raise IllegalOperationError(f"ledger {self.ledger_id} is advanced: give each entry its id, entry_id=...")
        number = whole(entry_id)
        if number is None or not 0 <= number <= ENTRY_ID_MAX:
            raise UsageError(
                f"ledger {self.ledger_id} is advanced: append(payload, entry_id=...) with a whole number from 0 to "
                f"{ENTRY_ID_MAX}, not {entry_id!r}"
            )
        return number

    def _put_advanced(self, payload: bytes, entry_id: int, *, wait: bool) -> AdvancedFuture[int]:
        """Accept an entry; if it is the next, stage it and the entries that wait for it. The caller holds the lock."""
        descriptor = self._descriptor
        if self._closed or descriptor.error is not None or self._log.error is not None:
            self._refuse()
        if entry_id <= descriptor.last_pushed or entry_id in self._early:
            raise DuplicateEntryError(f"ledger {self.ledger_id} was given entry {entry_id} already")
        future: AdvancedFuture[int] = AdvancedFuture(self._log, descriptor, entry_id)
        limit = self._backend.config.max_outstanding_bytes
        # A single early entry is accepted at any size. Others beyond the limit are refused and cannot wait for
        # admission, because this caller may be the only one that has the entry for which they all wait.
        if entry_id != descriptor.last_pushed + 1 and self._early_bytes and self._early_bytes + len(payload) > limit:
            raise TooManyRequestsError(
                f"entry {entry_id} of {len(payload)} bytes comes early, and {self._early_bytes} bytes of ledger "
                f"{self.ledger_id} wait already for entry {descriptor.last_pushed + 1}: together they are beyond "
                f"max_outstanding_bytes {limit}; append that one first"
            )
        self._early[entry_id] = (payload, future)
        self._early_bytes += len(payload)
        try:
            self._stage_early(None if wait else entry_id)
        except (TooManyRequestsError, StorageRefusedError) as error:
            # The next entry is dropped and its future gets the error; later entries keep waiting.
            refused, waiting = self._early.pop(descriptor.last_pushed + 1)
            self._early_bytes -= len(refused)
            waiting.staged(None, without_frames(error))
            if waiting is future:
                raise
        except BaseException:
            descriptor.error = descriptor.error or LedgerRecoveryError(
                f"appending to ledger {self.ledger_id} was interrupted; open_ledger({self.ledger_id}, recover=True) "
                "finds its end",
                outcome_unknown=True,
            )
            self._give_up_early(descriptor.error)
            raise
        return future

    def _stage_early(self, unless_full: int | None) -> None:
        """Stage the entries whose turn has come; the caller holds the ledger's lock.

        Args:
            unless_full: An entry that is refused, and does not wait, if too many bytes are outstanding. Entries after
                it were accepted before, so they wait, because their callers would not retry them.
        """
        descriptor = self._descriptor
        while (early := self._early.get(descriptor.last_pushed + 1)) is not None:
            payload, future = early
            entry_id = descriptor.last_pushed + 1
            commit = self._stage_next(payload)
            if commit is None:
                size = self._overhead + len(payload)
                if entry_id == unless_full:
                    self._turns.refuse(size)
                commit = self._turns.keeping_lock(partial(self._stage_next, payload), size)
            descriptor.last_pushed = entry_id
            descriptor.length_pushed += len(payload)
            del self._early[entry_id]
            self._early_bytes -= len(payload)
            future.staged(commit if self._wanted else ACKNOWLEDGED)

    def _stage_next(self, payload: bytes) -> Completion | None:
        """Stage the next entry of an advanced ledger; None if too much is outstanding. The caller holds the lock."""
        descriptor = self._descriptor
        entry_id, before = descriptor.last_pushed + 1, descriptor.length_pushed
        prefix = self._digest.prefix(entry_id, descriptor.last_add_confirmed, before + len(payload), payload)
        commit = self._log.stage_entry(descriptor, entry_id, prefix, payload, before, self._overhead, self._wanted)
        if commit is not None:
            descriptor.last_prefix = prefix
        return commit

    def _give_up_early(self, error: PybkError) -> None:
        """Fail the futures of entries whose turn did not come; the caller holds the ledger's lock."""
        self._descriptor.account_staged()
        while self._early:
            _, (_, future) = self._early.popitem()
            future.staged(None, error)

    # ---- forcing and closing -------------------------------------------------------------------------------------

    def force(self) -> int:
        """Make everything appended so far durable and confirmed.

        Returns:
            The last add confirmed.

        Raises:
            PybkError: As ``append``.
        """
        error = self._descriptor.error or self._log.error
        if error is not None and not (self._settled and isinstance(error, LedgerClosedError)):
            raise without_frames(error)
        if self._settled:
            return self._descriptor.last_add_confirmed
        with operation(self._backend.config.on_span, "pybk.ledger.force", ledger_id=self.ledger_id):
            if not self._wanted:
                return self._backend.force(self._descriptor)
            self._log.flush()
        return self._descriptor.last_add_confirmed

    force_async = asyncio_form(force, own_thread=True)

    def close(self) -> None:
        """Wait for what was appended and close the ledger; closing again does nothing, unless closing failed.

        Raises:
            LedgerFencedError: Another handle recovered the ledger, and that recovery decided its end.
            IllegalOperationError: Called by a signal handler or a finaliser that interrupted a call of pybk; nothing
                was done.
            PybkError: As ``append``; the ledger stays open and may be recovered.
        """
        descriptor = self._descriptor
        if self._settled:
            return
        where_called("LedgerWriter.close()")
        guarded(self._end_appends)
        if isinstance(descriptor.error, LedgerFencedError):
            self._settled = True
            raise without_frames(descriptor.error)
        if not descriptor.deleted:
            with operation(self._backend.config.on_span, "pybk.ledger.close", ledger_id=self.ledger_id):
                self._backend.close_ledger(descriptor)
        self._settled = True

    def _end_appends(self) -> None:
        """Refuse further appends, and fail those that wait for earlier entries; in a guard."""
        with Holding(self._descriptor.lock):
            self._closed = True
            self._give_up_early(
                LedgerClosedError(f"ledger {self.ledger_id} was closed before the entries with lower ids were appended")
            )


def stage(writer: LedgerWriter, payload: bytes, after: int, *, kick: bool, wait: bool = True) -> Staged | None:
    """Append one entry for a layer that makes its own futures, ``AppendFuture(*staged, result)`` or of a subclass.

    The caller is in a guard.

    Args:
        writer: The writer of the ledger.
        payload: 0 to ``max_entry_bytes`` bytes; not checked again.
        after: The entry that it must follow.
        kick: Have a background thread make it durable. False leaves that to ``AppendFuture.result``, which is faster
            for a thread that waits at once.
        wait: As for ``append_async``.

    Returns:
        What was staged. None, with nothing done, if ``after`` is not the last entry, because appends were refused, or
        interrupted while they waited.

    Raises:
        PybkError: As ``append_async``.
    """
    try:
        with Holding(writer._descriptor.lock):
            staged = writer._stage(payload, after)
        if staged is None:
            nbytes = writer._overhead + len(payload)
            staged = writer._turns.in_turn(lambda: writer._stage(payload, after), nbytes, wait=wait)
    except DisplacedError:
        return None
    if kick:
        writer._log.kick()
    return writer._log, staged[1] if writer._wanted else ACKNOWLEDGED


def stage_many(writer: LedgerWriter, payloads: list[bytes], after: int, *, kick: bool) -> Staged | None:
    """Append several entries as ``stage`` appends one; raises as ``append_many_async``."""
    lengths = np.fromiter(map(len, payloads), np.int64, len(payloads))
    try:
        future = writer._staged_pieces(payloads, lengths, after)
    except DisplacedError:
        return None
    if kick:
        writer._log.kick()
    return origin_of(future)


def group_entries(writer: LedgerWriter, payloads: list[bytes], after: int) -> LedgerEntries:
    """Return the entries that a group appends to a ledger.

    Args:
        writer: The writer of the ledger.
        payloads: The entries, at least one.
        after: The entry that they must follow.

    Raises:
        PybkError: The ledger takes no more entries.
    """
    check_takes_entries(writer)
    return storage.LedgerEntries(writer._descriptor, writer._digest, payloads, after)


def check_takes_entries(writer: LedgerWriter) -> None:
    """Raise unless a ledger takes entries now; errors as for ``LedgerWriter.append``."""
    with writer._descriptor.lock:
        if writer._closed or writer._descriptor.error is not None:
            writer._refuse()


def keeping_log(writer: LedgerWriter) -> KeepingLog | None:
    """Return the log that keeps entries until they are acknowledged; None in a store, which has no bookies to lose."""
    return writer._keeping


def ends_with(writer: LedgerWriter, entry_id: int) -> bool:
    """Return whether an entry is the last one that was appended."""
    with writer._descriptor.lock:
        writer._descriptor.account_staged()
        return writer._descriptor.last_pushed == entry_id


def _pieces(sizes: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut a batch into pieces of about 4 MiB; yield the half-open range of indices of each."""
    ends = np.cumsum(sizes)
    low = 0
    while low < len(sizes):
        before = int(ends[low - 1]) if low else 0
        high = max(low + 1, int(np.searchsorted(ends, before + CHUNK_BYTES, side="right")))
        yield low, high
        low = high
