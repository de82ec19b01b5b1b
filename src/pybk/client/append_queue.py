"""How appends of one ledger become batches for its bookies: the forming batch, and those under way."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pybk.errors import PybkError
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.log.admission import Admission
from pybk.storage.log.commit import Commit, StagedEntries

if TYPE_CHECKING:
    from pybk.client.baton import Baton
    from pybk.client.remote_ledger import RemoteLedger

BATCH_BYTES_MAX: Final = 8 << 20
"""Encoded bytes of one batch, unless a single piece is longer."""

BATCHES_UNDER_WAY: Final = 4
"""Batches of one ledger that are sent and not acknowledged; the next one forms meanwhile."""


class AppendQueue:
    """The log of one replicated ledger; see ``AppendLog`` for what is not said here.

    Entries are staged in the batch that forms, which is a ``Commit`` of one run. Whoever drives the client takes
    batches in order, sends them, and finishes them in order.

    Threads: any, except where a method says who calls it.
    """

    def __init__(self, ledger: RemoteLedger, baton: Baton, formed: Callable[[], None], bytes_max: int) -> None:
        self.ledger = ledger
        self.error: PybkError | None = None
        self._baton = baton
        self._tell_formed = formed
        self._bytes_max = bytes_max
        self.admission = Admission(bytes_max)
        self._mutex = threading.Lock()
        self._formed: deque[Commit] = deque()
        self._sent: deque[Commit] = deque()
        self._outstanding = 0
        self._fresh = False

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
    ) -> Commit | None:
        """Stage entries; None when too much is outstanding."""
        with self._mutex:
            run = self._open_run(descriptor, first_entry_id, nbytes, base_length, overhead)
            if run is None:
                return None
            run.parts.extend(parts)
            run.sizes.extend(sizes)
            return run.commit

    def stage_entry(
        self,
        descriptor: LedgerDescriptor,
        entry_id: int,
        prefix: bytes,
        payload: bytes,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Commit | None:
        """Stage one entry; None when too much is outstanding."""
        size = overhead + len(payload)
        with self._mutex:
            run = self._open_run(descriptor, entry_id, size, base_length, overhead)
            if run is None:
                return None
            run.parts.append(prefix)
            run.parts.append(payload)
            run.sizes.append(size)
        return run.commit

    def _open_run(
        self, descriptor: LedgerDescriptor, first: int, nbytes: int, base_length: int, overhead: int
    ) -> StagedEntries | None:
        """Return the run of the batch that forms, with room for some bytes; the caller holds the mutex."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        outstanding, ticket = self._outstanding, descriptor.ticket
        if ticket is None:
            room = self.admission.room
            if outstanding + nbytes > room and (outstanding or room < self._bytes_max):
                return None
        elif ticket is not self.admission.first or (outstanding and outstanding + nbytes > self._bytes_max):
            return None
        formed = self._formed
        run = descriptor.staging
        if (
            not formed
            or run is None
            or run.commit is not formed[-1]
            or run.commit.payload_bytes + nbytes > BATCH_BYTES_MAX
        ):
            commit = Commit()
            run = StagedEntries(commit, descriptor, first, base_length, overhead, time.monotonic_ns())
            commit.runs.append(run)
            formed.append(commit)
            descriptor.staging = run
            self._fresh = True
            if len(formed) == 1:
                self._tell_formed()
                if self.ledger.deferred:  # nobody waits for it, so nobody would send it
                    self._baton.kick()
        elif len(run.parts) != 2 * len(run.sizes):
            run.trim()
        run.commit.payload_bytes += nbytes
        self._outstanding += nbytes
        return run

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self, commit: Commit) -> None:
        """Return when ``commit`` is done."""
        self._baton.wait(commit, news=self._is_news())

    def when_done(self, commit: Commit, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once ``commit`` is done."""
        self._baton.when_done(commit, callback)

    def kick(self) -> None:
        """See to it that what is staged gets sent although nobody waits; the driver is woken once for each batch."""
        if self._is_news():
            self._baton.kick()

    def _is_news(self) -> bool:
        """Tell whether the batch that forms could be sent now and nobody was told of it; said once for each batch."""
        news = self._fresh and len(self._sent) < BATCHES_UNDER_WAY
        if news:
            self._fresh = False
        return news

    def flush(self) -> None:
        """Return when everything staged before the call is acknowledged; raises if it could not be."""
        with self._mutex:
            commit = self._formed[-1] if self._formed else self._sent[-1] if self._sent else None
        if commit is not None:
            self.wait(commit)
            if commit.error is not None:
                raise commit.error.with_traceback(None)
        elif self.error is not None:
            raise self.error.with_traceback(None)

    def wait_for_space(self) -> None:
        """Return when fewer bytes are outstanding, or all failed."""
        with self._mutex:
            commit = self._sent[0] if self._sent else self._formed[0] if self._formed else None
        if commit is not None:
            self.wait(commit)

    # ---- what the driver asks ------------------------------------------------------------------------------------

    def take(self) -> StagedEntries | None:
        """Return the next batch to send, sealed, if not too many are under way; by the driver."""
        with self._mutex:
            # What is deferred stays under way until it is forced, and is bounded by its bytes alone.
            if not self._formed or (len(self._sent) >= BATCHES_UNDER_WAY and not self.ledger.deferred):
                return None
            commit = self._formed[0]
            run = commit.runs[0]
            run.seal()
            run.length_at_end = run.base_length + run.encoded_bytes - run.overhead * len(run.sizes)
            self._sent.append(commit)
            self._formed.popleft()
        return run

    def acknowledged(self, last: int) -> list[StagedEntries]:
        """Finish the batches up to an entry, and return their runs; by the driver."""
        finished = []
        while self._sent and self._sent[0].runs[0].last() <= last:
            commit = self._sent[0]
            run = commit.runs[0]
            self.ledger.acknowledged(run.last(), run.length_at_end)
            self._done(commit)
            finished.append(run)
        return finished

    def _done(self, commit: Commit) -> None:
        self._baton.finish(commit)
        with self._mutex:
            self._outstanding -= commit.payload_bytes
            self._sent.popleft()
        commit.runs[0].parts = []

    def fail(self, error: PybkError, under_way: PybkError | None = None) -> None:
        """Take nothing more, and fail what is under way and what is staged; by the driver, or when closing.

        May be repeated, as each batch stays until who waits for it has been told.

        Args:
            error: Why.
            under_way: The error of entries that were sent or staged, if it is another. It covers staged entries
                because they may end a batch whose first entries were sent.
        """
        with self._mutex:
            self.ledger.error = error
            self.error = error
        for batches in (self._sent, self._formed):
            while batches:
                if not batches[0].done:
                    batches[0].error = under_way or error
                self._baton.finish(batches[0])
                batches.popleft()
        self._outstanding = 0

    def after_fork(self, error: PybkError) -> None:
        """Be of no use in a forked child: nothing is locked or pending, and all that is asked raises ``error``."""
        self._mutex = threading.Lock()
        self.error = self.ledger.error = error
        for commit in (*self._sent, *self._formed):
            commit.error = error
            commit.done = True
