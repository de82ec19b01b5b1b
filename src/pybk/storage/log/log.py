"""The log: group commit by whoever waits.

Appends *stage* their entries in the commit that is forming. One thread at a time holds the **baton**: it takes the
forming commit, has it written with one synced write, and wakes who waits. Waiting threads are drivers;
the committer thread drives only for futures and for entries that nobody waits for, which it commits once they have been
buffered for ``BUFFERED_NS``; it is the one that runs callbacks.

Invariants:
    A commit is written only after the one before it is durable, so a valid commit proves all before it.
    Every step of a commit can be repeated: a driver that is interrupted at any line leaves the commit in ``_inflight``,
    and the next driver does it again from the start, the same bytes at the same place.
    A write or sync that failed is final: the log takes nothing more.
    A commit that was refused fails, but for its entries of deferred ledgers, which were acknowledged when they were
    staged: they are *kept* in a commit of their own, ``_kept``, which is tried again when maintenance looks, and by
    ``flush(kept=True)``. It stands apart from the forming commit, so that a small commit, such as a delete that makes
    room, is not refused for its size.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pybk.errors import ClosedError, PybkError, StorageFailedError, StorageRefusedError
from pybk.storage.io.failures import is_from_signal_handler, start_thread
from pybk.storage.log.admission import Admission, Ticket
from pybk.storage.log.commit import Commit, Control, GroupEntries, GroupPart, StagedEntries, StagedGroup
from pybk.storage.log.commit_writer import CommitObserver, CommitWriter, LogFiles

if TYPE_CHECKING:
    from pybk.storage.descriptor import LedgerDescriptor
    from pybk.storage.format.watermark import Watermark

logger = logging.getLogger(__name__)

BUFFERED_NS: Final = 50_000_000
"""How long unwanted entries stay in memory before the committer commits them; below the 100 ms that are promised."""


class Log:
    """The append side of the log.

    Threads: any, except where a method says who calls it.
    """

    def __init__(
        self,
        *,
        store_id: bytes,
        files: LogFiles,
        watermark: Watermark,
        observer: CommitObserver,
        next_lsn: int,
        outstanding_bytes_max: int,
        writes_by_time: bool = True,
    ) -> None:
        self._writer = CommitWriter(
            store_id=store_id, files=files, watermark=watermark, observer=observer, next_lsn=next_lsn
        )
        self._outstanding_max = outstanding_bytes_max
        self.admission = Admission(outstanding_bytes_max)
        self._held = False
        self._mutex = threading.Lock()
        self._forming = Commit()
        self._inflight: Commit | None = None
        self._driver: threading.Lock | None = None
        self._error: PybkError | None = None
        self._refused: set[LedgerDescriptor] = set()
        self._refusal: PybkError | None = None
        self._kept: Commit | None = None
        self._tries_kept = False
        self._callbacks: deque[Callable[[], None]] = deque()
        self._writes_by_time = writes_by_time
        self._clock_runs = False
        self._clock_until_ns = 0
        self._kick = threading.Lock()
        self._kick.acquire()
        self._stopping = False
        self._committer = threading.Thread(target=self._commit_for_futures, name="pybk-committer", daemon=True)
        start_thread(self._committer)

    # ---- staging -------------------------------------------------------------------------------------------------

    @property
    def outstanding_bytes(self) -> int:
        """Bytes staged and not yet durable."""
        inflight, kept = self._inflight, self._kept
        nbytes = self._forming.payload_bytes + (inflight.payload_bytes if inflight is not None else 0)
        return nbytes if kept is None or kept is inflight else nbytes + kept.payload_bytes

    @property
    def durable_lsn(self) -> int:
        """LSN of the last durable commit."""
        return self._writer.next_lsn - 1

    def position(self) -> tuple[int, int, int]:
        """Return the file that the log is in, its offset there, and the next LSN; of about now."""
        return self._writer.position()

    @property
    def refuses(self) -> bool:
        """Whether some ledgers were refused for now, and are not readmitted yet."""
        return bool(self._refused)

    @property
    def refusal(self) -> PybkError | None:
        """Why ledgers were refused last, if some are not readmitted yet; None if all are."""
        return self._refusal if self._refused or self._kept is not None else None

    @property
    def error(self) -> PybkError | None:
        """Why the log takes nothing more, or None."""
        return self._error

    def hold(self, held: bool) -> None:
        """Have ``stage`` refuse entries, because the tail is as long as it may be; or no more."""
        self._held = held

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
        """Stage entries of one ledger; the caller holds ``descriptor.lock``.

        Args:
            descriptor: The ledger.
            first_entry_id: Id of the first entry.
            sizes: Encoded bytes of each entry, ``array("q")``.
            nbytes: Their sum.
            parts: The encoded bytes, in order, in two pieces for each entry: what is in one piece is followed by empty
                ones.
            base_length: Cumulative payload bytes of the ledger before these entries.
            overhead: Bytes of each entry that are not payload.
            wanted: Whether somebody will wait for it; unwanted entries stay buffered until a wanted commit takes them,
                or until ``BUFFERED_NS`` have passed.

        Returns:
            The commit they are part of, or None when too many bytes are outstanding: nothing was staged then.

        Raises:
            PybkError: The log failed or is closed, or the ledger takes no more.
        """
        with self._mutex:
            run = self._open_run(descriptor, first_entry_id, nbytes, base_length, overhead, wanted)
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
        """Stage one entry, given as what stands before its payload, and the payload; otherwise as ``stage``."""
        size = overhead + len(payload)
        with self._mutex:
            commit = self._forming
            run = descriptor.staging
            if (
                run is None
                or run.commit is not commit
                or len(run.parts) != 2 * len(run.sizes)
                or descriptor.error is not None
                or self._error is not None
                or self._held
                or self.outstanding_bytes + size > self.admission.room
            ):
                run = self._open_run(descriptor, entry_id, size, base_length, overhead, wanted)
                if run is None:
                    return None
            else:
                commit.payload_bytes += size
            run.parts.append(prefix)
            run.parts.append(payload)
            run.sizes.append(size)
        return run.commit

    def _open_run(
        self, descriptor: LedgerDescriptor, first: int, nbytes: int, base_length: int, overhead: int, wanted: bool
    ) -> StagedEntries | None:
        """Return the ledger's run in the forming commit, with room for some bytes; the caller holds the mutex."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        if descriptor.error is not None:
            raise descriptor.error.with_traceback(None)
        commit = self._forming
        if self._held or self._is_full(descriptor.ticket, nbytes):
            return None
        run = descriptor.staging
        if run is None or run.commit is not commit or not run.takes_more:
            run = StagedEntries(commit, descriptor, first, base_length, overhead, time.monotonic_ns())
            commit.runs.append(run)
            descriptor.staging = run
        elif len(run.parts) != 2 * len(run.sizes):
            run.trim()
        commit.payload_bytes += nbytes
        if wanted:
            commit.wanted = True
        elif not commit.buffered_ns:
            commit.buffered_ns = time.monotonic_ns()
            if self._writes_by_time and not self._clock_runs:
                self._clock_runs = True
                self._kick_committer()
        return run

    def _is_full(self, ticket: Ticket | None, nbytes: int) -> bool:
        """Return whether entries of this size have to wait for room; the caller holds the mutex."""
        inflight, kept = self._inflight, self._kept
        outstanding = self._forming.payload_bytes + (inflight.payload_bytes if inflight is not None else 0)
        if kept is not None and kept is not inflight:
            outstanding += kept.payload_bytes
        if ticket is None:
            room = self.admission.room
            return bool(outstanding or room < self._outstanding_max) and outstanding + nbytes > room
        if ticket is not self.admission.first:
            return True
        return bool(outstanding) and outstanding + nbytes > self._outstanding_max

    def stage_group(
        self,
        parts: Sequence[GroupPart],
        controls: Sequence[Control],
        *,
        nbytes: int,
        ticket: Ticket | None,
        claim: Callable[[Commit], None],
    ) -> Commit | None:
        """Stage entries and control records that are replayed all or not at all.

        The caller holds the lock of each ledger, and has looked at ``account_staged`` of each.

        Args:
            parts: The entries, one part for each ledger.
            controls: Control records of no ledger.
            nbytes: Bytes of the entries.
            ticket: The group's place in the queue, None if it has not waited.
            claim: Called with the commit before the group counts; an exception of it stages nothing.

        Returns:
            The commit it is part of, or None when too many bytes are outstanding: nothing was staged then.

        Raises:
            PybkError: The log failed or is closed, or one of the ledgers takes no more.
        """
        with self._mutex:
            for error in (self._error, *(part.descriptor.error for part in parts)):
                if error is not None:
                    raise error.with_traceback(None)
            if parts and (self._held or self._is_full(ticket, nbytes)):
                return None
            commit = self._forming
            low = len(commit.runs)
            group = StagedGroup(low, low + len(parts), controls)
            now_ns = time.monotonic_ns()
            runs = [GroupEntries(commit, group, part, now_ns) for part in parts]
            commit.runs.extend(runs)
            commit.groups.append(group)
            for run in runs:
                run.descriptor.staging = run
            claim(commit)
            commit.payload_bytes += nbytes
            commit.wanted = True
            group.staged = True  # the one step by which all of it counts
        return commit

    def stage_control(
        self,
        encode: Callable[[int], bytes],
        apply: Callable[[], None],
        *,
        unless_changed: tuple[LedgerDescriptor, PybkError | None] | None = None,
        creates: LedgerDescriptor | None = None,
        claim: Callable[[Commit], None] | None = None,
    ) -> Commit | None:
        """Stage a control record behind everything staged so far.

        Args:
            encode: Given the LSN, returns the whole record.
            apply: Called by the driver when the record is durable, before waiters wake; may be called twice.
            unless_changed: For a record that says how far a ledger goes: the ledger, and its error at that time.
            creates: The ledger that the record creates: it goes ahead of the commit's entries, which may be of it.
            claim: Called with the commit before the record counts, so that an interrupt leaves no record without it.

        Returns:
            The commit it is part of. None if the ledger's error is another now, because a commit of its entries failed
            meanwhile: nothing was staged, and what was decided is wrong.

        Raises:
            PybkError: The log failed or is closed.
        """
        with self._mutex:
            if self._error is not None:
                raise self._error.with_traceback(None)
            if unless_changed is not None and unless_changed[0].error is not unless_changed[1]:
                return None
            commit = self._forming
            if claim is not None:
                claim(commit)
            if creates is not None:
                commit.creations.append((creates, encode, apply))
            else:
                commit.controls.append((encode, apply))
            commit.wanted = True
        return commit

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self, commit: Commit) -> None:
        """Return when ``commit`` is done, driving the log meanwhile if nobody does."""
        token = threading.Lock()
        try:
            try:
                self._wait(commit, token)
            finally:
                self._release_baton(token)
        except BaseException:
            # An exception inside the line above must not keep the baton; releasing twice is harmless.
            self._release_baton(token)
            raise

    def _wait(self, commit: Commit, token: threading.Lock) -> None:
        with self._mutex:
            if commit.done:
                return
            commit.wanted = True
            leads = self._driver is None
            if leads:
                self._driver = token
            else:
                token.acquire()
                commit.waiters.append(token)
        if not leads:
            token.acquire()
        while not commit.is_done():
            self._drive_once()

    def when_done(self, commit: Commit, callback: Callable[[], None]) -> None:
        """Have ``callback`` called by the committer thread once ``commit`` is done; at once if the log is closed."""
        with self._mutex:
            commit.wanted = True
            if commit.done:
                self._callbacks.append(callback)
            else:
                commit.callbacks.append(callback)
            self._kick_committer()
        if self._stopping:
            self._run_callbacks()

    def kick(self) -> None:
        """See to it that what is staged and wanted gets committed although nobody waits."""
        if self._driver is None and self._kick.locked():
            with self._mutex:
                self._kick_committer()

    def wait_for_space(self) -> None:
        """Return when the bytes outstanding now are fewer, driving the log if need be.

        Raises:
            StorageRefusedError: Kept entries take the room, and writing them was refused again.
        """
        with self._mutex:
            commit = self._awaited() or self._forming
        self.wait(commit)
        if self._kept is not None:
            self.flush(kept=True)

    def flush(self, *, kept: bool = False) -> None:
        """Return when everything staged before the call is durable.

        Args:
            kept: Also write the acknowledged entries that were refused and kept.

        Raises:
            PybkError: It could not be made durable.
        """
        if kept:
            self._write_kept()
        with self._mutex:
            commit = self._forming
            if commit.is_empty():
                inflight = self._awaited()
                if inflight is None:
                    return
                commit = inflight
        self.wait(commit)
        if commit.error is not None:
            raise commit.error.with_traceback(None)

    def _awaited(self) -> Commit | None:
        """Return the commit in flight, None if there is none or it may be put back; the caller holds the mutex.

        A kept commit is put back as often as it is refused, so a thread that waits for it may wait as
        long as the refusal lasts.
        """
        return None if self._inflight is self._kept else self._inflight

    def _write_kept(self) -> None:
        """Return when no entries are kept; raise what they were refused with, or failed with."""
        while (kept := self._kept) is not None:
            with self._mutex:
                self._tries_kept = True
                commit = self._forming
            self.wait(commit)  # which follows the kept entries
            if self._kept in (kept, None) and kept.error is not None:
                raise kept.error.with_traceback(None)

    # ---- the baton -----------------------------------------------------------------------------------------------

    def _release_baton(self, token: threading.Lock) -> None:
        """Pass the baton on, if ``token`` holds it: to a waiter, else to the committer if anything is wanted."""
        with self._mutex:
            if token.locked():  # whoever left waits no more, and must not be handed the baton later
                token.release()
            if self._driver is not token:
                return
            for commit in (self._inflight, self._forming):
                if commit is not None:
                    if commit.done:
                        commit.wake()
                    for waiter in commit.waiters:
                        if waiter is not token and waiter.locked():
                            self._driver = waiter
                            waiter.release()
                            return
            self._driver = None
            if self._inflight is not None or self._forming.wanted or self._callbacks:
                self._kick_committer()

    def _kick_committer(self) -> None:
        if self._kick.locked():
            self._kick.release()

    def _commit_for_futures(self) -> None:
        """Body of the committer thread; without it nobody would commit what only futures and time wait for."""
        try:
            while True:
                self._kick.acquire(timeout=self._seconds_until_due())
                if self._stopping:
                    return
                try:
                    while self._drive_for_futures():
                        pass
                except BaseException:  # a callback may raise what it likes; those after it are called all the same
                    logger.exception("the committer thread continues after an exception")
                    with self._mutex:
                        self._kick_committer()
        finally:
            if not self._stopping:
                self.fail(StorageFailedError("the committer thread has ended; close the store and open it again"))

    def _seconds_until_due(self) -> float:
        """Return how long the committer may sleep: until buffered entries are due, which it then wants; -1: for ever.

        The first buffered entry starts the clock. It runs on for a while after the last, so that it is not started for
        each commit, and then stops, so that a log at rest costs nothing.
        """
        if not self._clock_runs:
            return -1.0
        with self._mutex:
            commit = self._forming
            now_ns = time.monotonic_ns()
            if commit.buffered_ns:
                self._clock_until_ns = now_ns + BUFFERED_NS
                left_ns = BUFFERED_NS if commit.wanted else commit.buffered_ns + BUFFERED_NS - now_ns
                if left_ns <= 0:
                    commit.wanted = True
                    self._kick_committer()
            else:
                left_ns = self._clock_until_ns - now_ns
                self._clock_runs = left_ns > 0
        return max(0, left_ns) / 1e9 if self._clock_runs else -1.0

    def _drive_for_futures(self) -> bool:
        self._run_callbacks()
        token = threading.Lock()
        token.acquire()
        with self._mutex:
            if self._driver is not None or not (self._inflight is not None or self._forming.wanted):
                return False
            self._driver = token
        try:
            self._drive_once()
        finally:
            self._release_baton(token)
        self._run_callbacks()
        return True

    def _run_callbacks(self) -> None:
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback()
            except Exception:
                logger.exception("a callback of a finished append raised; the append itself is done")

    # ---- one commit ----------------------------------------------------------------------------------------------

    def _drive_once(self) -> None:
        """Make one commit durable, or fail it; the caller holds the baton."""
        with self._mutex:
            if self._inflight is None:
                self._inflight = self._next_commit()
            commit = self._inflight
            if self._forming is commit:  # also when an interrupt came between the two
                self._forming = Commit()
        if not commit.done:
            try:
                if commit.is_empty():
                    commit.done = True
                elif (error := commit.error or self._error) is not None:
                    self._fail(commit, error)
                else:
                    self._writer.write(commit)
                    self._writer.publish(commit)
            except StorageRefusedError as error:
                if commit is self._kept:
                    self._put_back(commit, error)
                    return
                self._fail(commit, error)
            except Exception as error:
                if is_from_signal_handler(error):
                    raise  # the write did not fail: the next driver repeats it
                failed = StorageFailedError(
                    f"writing the log failed ({error}); this store takes no more appends: close it, mend the device, "
                    "open it again"
                )
                failed.__cause__ = error
                self._error = failed
                self._fail(commit, failed)
        self._finish(commit)

    def _next_commit(self) -> Commit:
        """Return the commit to write next: the kept one if it is to be tried now; the caller holds the mutex."""
        kept = self._kept
        if kept is None or not self._tries_kept:
            return self._forming
        self._tries_kept = False
        kept.error = None
        kept.runs = [run for run in kept.runs if not run.descriptor.deleted]
        return kept

    def _put_back(self, kept: Commit, error: StorageRefusedError) -> None:
        """Keep the kept commit for a later attempt, because this one was refused, too."""
        with self._mutex:
            kept.error = error
            self._inflight = None

    def _fail(self, commit: Commit, error: PybkError) -> None:
        """Give up on a commit, and on what is forming: more of the same ledgers would leave a gap. May be repeated.

        If the commit was refused, the acknowledged entries in both are kept. Their ledgers take no more until the
        entries are durable, and the entries count as outstanding meanwhile, which bounds them.
        """
        with self._mutex:
            commit.fail(error)  # once it has an error it is not written any more, whatever comes between
            behind = commit.behind = commit.behind or self._forming
            behind.fail(error)
            if isinstance(error, StorageRefusedError):
                self._refusal = error
                self._refused.update(commit.ledgers(), behind.ledgers())
            if self._forming is behind:  # only now, when none of its ledgers takes more
                if isinstance(error, StorageRefusedError):
                    before = () if self._kept is None else (self._kept,)
                    self._kept = Commit.of_acknowledged(error, *before, commit, behind)
                self._forming = Commit()
            behind.done = commit.done = True

    def _finish(self, commit: Commit) -> None:
        """Wake who waits for a done commit, and for what failed with it; may be repeated."""
        with self._mutex:
            for done in filter(None, (commit, commit.behind)):
                if done.callbacks:
                    self._callbacks.extend(done.callbacks)
                    done.callbacks = []
                    self._kick_committer()
                done.release_buffers()
                done.wake()
            if self._kept is commit:
                self._kept = None
                self._refused = {each for each in self._refused if not self._takes_again(each, commit)}
            if self._inflight is commit:
                self._inflight = None

    @staticmethod
    def _takes_again(descriptor: LedgerDescriptor, kept: Commit) -> bool:
        """Have a ledger take entries again if its kept entries are durable now; return whether it does."""
        return any(run.descriptor is descriptor for run in kept.runs) and descriptor.readmit()

    def readmit(self) -> None:
        """Have ledgers that were refused for now take entries again; those that are busy at the next call.

        A ledger with kept entries takes more once these are durable: they are tried again now.
        """
        if self._refused:
            with self._mutex:
                if self._kept is not None:
                    self._tries_kept = True
                    self._forming.wanted = True
                    self._kick_committer()
                self._refused = {descriptor for descriptor in self._refused if not descriptor.readmit()}

    # ---- cutting and closing -------------------------------------------------------------------------------------

    def cut(self, snapshot: Callable[[], None]) -> int:
        """Leave the current log file, so that the next commit begins another.

        Args:
            snapshot: Called while no commit can be published, to see exactly what the files so far hold.

        Returns:
            LSN of the last commit in the files so far.
        """
        return self._holding_baton(lambda: self._cut(snapshot))

    def _cut(self, snapshot: Callable[[], None]) -> int:
        while self._inflight is not None:
            self._drive_once()
        self._writer.leave_file()
        snapshot()
        return self.durable_lsn

    def _holding_baton(self, work: Callable[[], int]) -> int:
        token = threading.Lock()
        try:
            try:
                token.acquire()
                with self._mutex:
                    if self._driver is None:
                        self._driver = token
                    else:
                        self._forming.waiters.append(token)
                if self._driver is not token:
                    token.acquire()
                    self._take_baton(token)
                return work()
            finally:
                self._release_baton(token)
        except BaseException:
            self._release_baton(token)
            raise

    def _take_baton(self, token: threading.Lock) -> None:
        """Become the driver after having been woken, whether the baton came with the wake-up or not."""
        while True:
            with self._mutex:
                if self._driver is None:
                    self._driver = token
                if self._driver is token:
                    return
                if not token.locked():
                    token.acquire()
                self._forming.waiters.append(token)
            token.acquire()

    def fail(self, error: PybkError) -> None:
        """Take nothing more, and fail what is staged, with ``error``."""
        with self._mutex:
            if self._error is None:
                self._error = error

    def after_fork(self, error: PybkError) -> None:
        """Be of no use in a forked child: nothing is locked or pending, and all that is asked raises ``error``."""
        self._mutex = threading.Lock()
        self._error = error
        for commit in (self._inflight, self._forming):
            if commit is not None and not commit.done:
                commit.error = error
                commit.done = True

    def close(self) -> None:
        """Commit what is staged, stop the committer thread and leave the file; further appends are refused."""
        try:
            if self._error is None:
                self.flush(kept=True)
        finally:
            self.fail(ClosedError("the manager is closed; open it again to append"))
            self._stopping = True
            with self._mutex:
                self._kick_committer()
            if threading.current_thread() is not self._committer:
                self._committer.join()
            self._run_callbacks()
            self._writer.leave_file()
