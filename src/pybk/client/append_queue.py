"""Appends to one replicated ledger: the batches that form, and those that were sent and are not acknowledged yet.

A batch is *formed* from its first entry on, and takes more entries until the leader sends it. It is *sent* until enough
bookies have acknowledged it, and then *done*. Batches are sent and completed in order.

If the ledger's writer ends because too few bookies answer, or the metadata store does not, all batches fail. The
batches of a log's writer, which has set ``on_lost``, are *lost* instead: they stay undone, and their futures keep
waiting. The log's writer then finds out which of them the ledger has, and appends the others to another ledger
(``KeepingLog``). ``flush`` and ``wait_for_space`` need progress of this ledger alone, so they wait for the *marks* of
batches instead, which a loss completes.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pybk.backend import KeptEntries
from pybk.errors import PybkError, not_done, without_frames
from pybk.spans import OnSpan
from pybk.storage.descriptor import LedgerDescriptor, StagedEntries
from pybk.storage.log.log import Admission
from pybk.threads.group_commit import Completion, GroupCommit

BATCH_BYTES_MAX: Final = 8 << 20
"""The most encoded bytes of one batch, unless a single call stages more."""

BATCHES_UNDER_WAY: Final = 4
"""The most batches of one ledger that are sent and not acknowledged; the next one forms meanwhile."""


class AppendBatch(Completion):
    """Entries of one ledger that are sent and acknowledged together.

    Attributes:
        entries: The entries, until they are acknowledged.
        payload_bytes: Their encoded bytes, which count as outstanding until the batch is done.
        last: Id of the last entry; set when the batch is sent.
        marks: Completed after the batch, or when it is lost. Guarded by the queue's mutex.
    """

    __slots__ = ("entries", "last", "marks", "payload_bytes")

    entries: StagedEntries

    def __init__(self) -> None:
        super().__init__()
        self.payload_bytes = 0
        self.last = -1
        self.marks: list[Completion] = []


class AppendQueue:
    """The append queue of one replicated ledger; implements ``AppendLog``, which documents the shared methods.

    Args:
        ledger: The ledger.
        group: The group commit of the client, whose leader sends the batches.
        on_formed: Called when a batch has formed that may be sent.
        as_leader: Lets the client's leader make a call, and returns afterwards; an error in a step may lose the call.
        bytes_max: The most bytes that may be outstanding.
        on_span: The hook that gets a span of each batch; None for none.

    Attributes:
        error: The reason why the queue takes no entries; final once set.
        formed: Batches that are not sent, in order. Guarded by the queue's mutex; the leader may test without it
            whether there are any.
        sent: Batches that are sent and not acknowledged, in order. Changed by the leader, under the mutex.
        on_lost: See ``KeepingLog``.
        is_lost: See ``KeepingLog``.
        wait: ``GroupCommit.wait``.
        when_done: ``GroupCommit.when_done``.

    Threads: any, except where a method says who calls it. A thread that stages holds the ledger's ``lock``, then takes
    the queue's mutex, and then may take the mutex of the group commit.
    """

    def __init__(
        self,
        ledger: LedgerDescriptor,
        group: GroupCommit,
        on_formed: Callable[[], None],
        as_leader: Callable[[Callable[[], None]], None],
        bytes_max: int,
        on_span: OnSpan | None = None,
    ) -> None:
        self.ledger = ledger
        self.error: PybkError | None = None
        self.admission = Admission(bytes_max)
        self.formed: deque[AppendBatch] = deque()
        self._group = group
        self._on_formed = on_formed
        self._as_leader = as_leader
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self._lost: list[AppendBatch] = []
        """Lost batches that were not forgotten yet, in order. Guarded by the mutex."""
        self._on_span = on_span
        self._mutex = threading.Lock()
        self.sent: deque[AppendBatch] = deque()
        self._newest: AppendBatch | None = None
        """The batch that formed last. Guarded by the mutex; ``kick`` reads it without."""
        self._outstanding = 0
        """Encoded bytes of all batches in ``formed`` and ``sent``. Guarded by the mutex."""
        # Bound methods instead of wrappers, because that saves a call per append.
        self.wait = group.wait
        self.when_done = group.when_done

    @property
    def outstanding_bytes(self) -> int:
        """Bytes staged and not acknowledged by a quorum yet."""
        return self._outstanding

    # ---- staging -------------------------------------------------------------------------------------------------

    def stage(
        self,
        descriptor: LedgerDescriptor,
        first_entry_id: int,
        sizes: array[int],
        parts: Sequence[bytes | memoryview],
        *,
        nbytes: int,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage entries; return None if too many bytes are outstanding."""
        with self._mutex:
            entries = self._open_entries(descriptor, first_entry_id, nbytes, base_length, overhead)
            if entries is None:
                return None
            entries.parts.extend(parts)
            entries.sizes.extend(sizes)
            return entries.completion

    def stage_entry(
        self,
        descriptor: LedgerDescriptor,
        entry_id: int,
        prefix: bytes,
        payload: bytes,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage one entry; return None if too many bytes are outstanding."""
        size = overhead + len(payload)
        with self._mutex:
            entries = self._open_entries(descriptor, entry_id, size, base_length, overhead)
            if entries is None:
                return None
            entries.parts.append(prefix)
            entries.parts.append(payload)
            entries.sizes.append(size)
        return entries.completion

    def _open_entries(
        self, descriptor: LedgerDescriptor, first: int, nbytes: int, base_length: int, overhead: int
    ) -> StagedEntries | None:
        """Return the ``StagedEntries`` of the batch that forms, for more to join; None if they must wait for space.

        The caller holds the mutex.
        """
        if self.error is not None:
            raise not_done(self.error)
        outstanding, ticket, admission = self._outstanding, descriptor.ticket, self.admission
        if (ticket is not None or outstanding + nbytes > admission.space) and admission.is_full(
            ticket, outstanding, nbytes
        ):
            return None
        formed = self.formed
        batch = formed[-1] if formed else None
        entries = descriptor.staging
        if (
            batch is None
            or entries is None
            or entries.completion is not batch
            or batch.payload_bytes + nbytes > BATCH_BYTES_MAX
        ):
            batch = AppendBatch()
            if self.on_lost is not None:
                batch.kept = []
            entries = batch.entries = StagedEntries(
                batch, descriptor, first, base_length, overhead, time.monotonic_ns()
            )
            if self._on_span is not None:
                entries.report_to(self._on_span)
            # If BATCHES_UNDER_WAY are sent, the leader need not be interrupted: it sends after an acknowledgement.
            batch.unseen = len(self.sent) < BATCHES_UNDER_WAY
            descriptor.staging = entries
            self._newest = batch
            # The leader is notified before the batch counts: an error in between costs a call of ``take``, and never
            # leaves a batch that is not sent. The leader's ``take`` waits for the mutex, so it finds the batch.
            is_first = not formed
            if is_first:
                self._on_formed()
            formed.append(batch)
            if is_first and self.ledger.deferred:  # no thread waits for the batch, so none would send it
                self._group.announce()
        elif len(entries.parts) != 2 * len(entries.sizes):
            entries.trim()
        batch.payload_bytes += nbytes
        self._outstanding += nbytes
        return entries

    # ---- waiting -------------------------------------------------------------------------------------------------

    def kick(self) -> None:
        """Have the leader send staged entries soon although no thread waits; interrupts it once for each batch."""
        batch = self._newest
        if batch is not None and batch.unseen:
            self._group.announce()
            batch.unseen = False

    def flush(self) -> None:
        """Return when all entries staged before the call are acknowledged; raise the error if they failed."""
        with self._mutex:
            mark = self._mark(self.formed[-1] if self.formed else self.sent[-1] if self.sent else None)
        if mark is not None:
            self.wait(mark)
            if mark.error is not None:
                raise without_frames(mark.error)
        elif self.error is not None:
            raise without_frames(self.error)

    def wait_for_space(self) -> None:
        """Return when fewer bytes are outstanding than now, or the queue takes no more entries."""
        with self._mutex:
            mark = self._mark(self.sent[0] if self.sent else self.formed[0] if self.formed else None)
        if mark is not None:
            self.wait(mark)

    def _mark(self, batch: AppendBatch | None) -> Completion | None:
        """Return a completion to wait on for a batch; None if there is no batch. The caller holds the mutex."""
        if batch is None or batch.done:
            return batch
        mark = Completion()
        mark.unseen = batch.unseen
        batch.marks.append(mark)
        return mark

    def _finish(self, batch: AppendBatch) -> None:
        """Complete a batch, and its marks; may be repeated."""
        self._group.finish(batch)
        with self._mutex:  # what is added under it was added before this, or it is seen that the batch is done
            for kept in batch.kept or ():
                for origin in kept.origins:
                    if not origin.done:
                        origin.error = batch.error
                    self._group.finish(origin)
            batch.kept = None
            self._finish_marks(batch, batch.error)

    def _finish_marks(self, batch: AppendBatch, error: PybkError | None) -> None:
        """Complete the marks of a batch; the caller holds the mutex."""
        for mark in batch.marks:
            if not mark.done:
                mark.error = error
            self._group.finish(mark)

    # ---- what the leader calls -----------------------------------------------------------------------------------

    def take(self) -> list[AppendBatch]:
        """Return the next batches to send, as many as may be under way; their entries are frozen."""
        taken: list[AppendBatch] = []
        with self._mutex:
            # Batches of deferred ledgers stay in ``sent`` until they are forced, and are bounded by their bytes alone.
            while self.formed and (len(self.sent) < BATCHES_UNDER_WAY or self.ledger.deferred):
                batch = self.formed[0]
                batch.unseen = False
                entries = batch.entries
                entries.freeze()
                count = len(entries.sizes)
                if count == 0:  # an error ended the append that formed it
                    self._group.finish(batch)
                    if self.sent:  # its marks wait for what was staged before it, too
                        self.sent[-1].marks += batch.marks
                    else:
                        self._finish_marks(batch, None)
                    self._outstanding -= batch.payload_bytes
                    self.formed.popleft()
                    continue
                batch.last = entries.first + count - 1
                entries.length_at_end = entries.base_length + entries.encoded_bytes - entries.overhead * count
                self.sent.append(batch)
                self.formed.popleft()
                taken.append(batch)
        return taken

    def acknowledged(self, last: int) -> list[StagedEntries]:
        """Complete the batches whose last entry is at most ``last``, and return their entries."""
        finished = []
        sent, ledger = self.sent, self.ledger
        while sent and sent[0].last <= last:
            batch = sent[0]
            entries = batch.entries
            ledger.last_durable = batch.last
            ledger.length_durable = entries.length_at_end
            ledger.confirm(batch.last)
            self._finish(batch)
            with self._mutex:
                self._outstanding -= batch.payload_bytes
                sent.popleft()
            entries.parts = []
            del batch.entries  # they refer to the batch: only the collector of cycles would free both
            finished.append(entries)
        return finished

    def fail(self, error: PybkError, under_way: PybkError | None = None) -> int:
        """Take no more entries, and fail those that are sent or staged; called by the leader.

        May be repeated, because a batch stays in the queue until it is completed.

        Args:
            error: The error of later appends.
            under_way: The error of entries that were sent or staged; None if it is ``error``. Staged entries get it as
                well, because they may be the end of a caller's batch whose first entries were sent.

        Returns:
            The number of entries that failed.
        """
        failed = 0
        with self._mutex:
            self.ledger.error = error
            self.error = error
        for batches in (self._lost, self.sent, self.formed):
            while batches:
                if not batches[0].done:
                    batches[0].error = under_way or error
                    failed += len(batches[0].entries.sizes)
                self._finish(batches[0])
                del batches[0]
        self._outstanding = 0
        return failed

    def lose(self, error: PybkError) -> None:
        """Take no more entries, and leave those that are sent or staged to the log's writer; called by the leader.

        May be repeated, as ``fail``.

        Args:
            error: The error of later appends.
        """
        with self._mutex:
            self.ledger.error = self.error = error
            for batches in (self.sent, self.formed):
                while batches:
                    self._finish_marks(batches[0], error)
                    if batches[0] not in self._lost[-1:]:
                        self._lost.append(batches[0])
                    batches.popleft()
            self._outstanding = 0
            self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    # ---- what a log's writer calls -------------------------------------------------------------------------------

    def keep(self, batch: Completion, kept: KeptEntries) -> None:
        """See ``KeepingLog``."""
        with self._mutex:
            if batch.kept is not None:
                batch.kept.append(kept)
                return
        self.settle(kept.origins, batch.error)

    def lost(self) -> list[Completion]:
        """See ``KeepingLog``."""
        with self._mutex:
            return [*self._lost]

    def forget_lost(self) -> None:
        """See ``KeepingLog``."""
        with self._mutex:
            self._lost.clear()

    def settle(self, batches: Iterable[Completion], error: PybkError | None = None) -> None:
        """See ``KeepingLog``."""
        left = [batch for batch in batches if not batch.done]
        for batch in left:
            batch.error = error

        def finish() -> None:
            for batch in left:
                self._group.finish(batch)

        while not all(batch.done for batch in left):  # an error in a step may have lost the call
            self._as_leader(finish)

    def after_fork(self, error: PybkError) -> None:
        """Disable the queue in a forked child: locks are free, nothing is pending, and each call raises ``error``."""
        self._mutex = threading.Lock()
        self.error = self.ledger.error = error
        for batch in (*self._lost, *self.sent, *self.formed):
            batch.error = error
            batch.done = True
