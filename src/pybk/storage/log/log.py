"""The log: entries are staged in a forming commit, and one thread writes and syncs the commit for all.

Theory of operation
===================

**States of a commit.** There is one *forming* commit, ``forming``; appends stage their entries in it. At most one
commit is *in flight*, ``inflight``; the leader encodes, writes and syncs it. A commit ends *done*: durable and
published, or failed. At most one commit is *kept*, ``kept``; it holds acknowledged entries that were refused, and is
tried again later.

::

    forming --step--> in flight --written, synced, published--> done
                          |------refused (no space)-----------> failed, and the forming commit with it;
                          |                                     entries of deferred ledgers move to the kept commit
                          |------write or sync failed---------> failed, and each commit after it
    kept --tried again--> in flight --refused again--> kept

**Who leads.** ``GroupCommit`` decides which thread calls ``step``. A thread that waits for its append leads if no
other thread does. The committer, which is the background thread, leads for futures, and for entries that no thread
waits for: it commits those once they have been buffered for ``BUFFERED_NS``. It also runs callbacks.

**Locks.** ``mutex``, the mutex of the group commit, guards ``forming``, ``inflight``, ``kept``, ``_refused`` and
the clock. A thread that stages holds the ledger's ``lock`` and then takes the mutex. Only the leader uses ``writer``,
and only the leader sets ``inflight``. No lock is held while the commit is written.

**Why nothing is lost.**

- A commit is written only after the one before it is durable, so a valid commit proves all before it.
- An entry is staged by one step, the append to ``StagedEntries.sizes``, so an exception leaves it whole or not there.
- The leader is in a guard (``threads/interrupts.py``), so no signal ends a step in the middle.
- A write or sync that failed is final, because the content of the disk is unknown then: ``_error`` is set, and the log
  takes nothing more.
- A refused commit was not written. It fails together with the forming one, because later entries of the same ledgers
  would leave a gap.
- Entries of deferred ledgers were acknowledged when they were staged, so a refusal keeps them. The kept commit stands
  apart from the forming one, because a small commit, such as a delete that frees space, must not be refused for its
  size. It is tried when maintenance runs, and by ``flush(kept=True)``.

**Fork.** A forked child cannot use the log: ``after_fork`` fails what is staged in the child alone.

**Admission.** An append must wait while too many bytes are outstanding. If waiting appends only tried again, many small
appends would take each byte that becomes free, and a large append would starve. So an append that has to wait joins a
queue, ``Admission``, with the bytes that it needs, first come, first served; later appends may take only the space
beyond the bytes that the queue needs. A large batch and the entries of an advanced ledger wait with their ledger's lock
held, because nothing may come between its parts. Such an append goes ahead of the others of its ledger, which need the
lock to continue.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from pybk.errors import ClosedError, PybkError, StorageFailedError, StorageRefusedError, not_done, without_frames
from pybk.storage.descriptor import LedgerDescriptor, StagedEntries
from pybk.storage.log.commit import (
    BatchEntries,
    Commit,
    CommitObserver,
    CommitWriter,
    Control,
    GroupEntries,
    GroupPart,
    LogFiles,
    StagedGroup,
)
from pybk.threads import start_thread
from pybk.threads.group_commit import Completion, GroupCommit
from pybk.threads.interrupts import acquire, guarded

if TYPE_CHECKING:
    from pybk.ledger.digest import EncodedEntries
    from pybk.spans import OnSpan
    from pybk.storage.descriptor import LedgerDescriptor
    from pybk.storage.format.log_file import Watermark

logger = logging.getLogger(__name__)

BUFFERED_NS: Final = 50_000_000
"""The time for which entries that no thread waits for stay in memory; below the 100 ms that the API promises."""


class Log:
    """The append side of the log; the ``Work`` of its group commit.

    Attributes:
        admission: The queue of appends that wait for space.
        wait: ``GroupCommit.wait``.
        when_done: ``GroupCommit.when_done``.
        kick: ``GroupCommit.kick``.

    Threads: any, except where a method says who calls it.
    """

    idles = False

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
        on_span: OnSpan | None = None,
    ) -> None:
        self.writer = CommitWriter(
            store_id=store_id, files=files, watermark=watermark, observer=observer, next_lsn=next_lsn
        )
        """Writes commits to log files. Used by the leader."""
        self._observer = observer
        self.admission = Admission(outstanding_bytes_max)
        self._paused = False
        """True if ``stage`` returns None: space is short, or the log that is not checkpointed is at its limit."""
        self._full = False
        """True if space is short."""
        self.forming = Commit()
        """The commit that takes entries. Guarded by ``mutex``."""
        self.inflight: Commit | None = None
        """The commit that a step writes now. Set by the leader, under ``mutex``."""
        self._error: PybkError | None = None
        """The error that ended the log; final once set."""
        self._refused: set[LedgerDescriptor] = set()
        """Ledgers that take no entries since some were refused. Guarded by ``mutex``."""
        self._refusal: PybkError | None = None
        """The reason why entries were refused last. Guarded by ``mutex``."""
        self.kept: Commit | None = None
        """Acknowledged entries that were refused; in flight, too, while tried. Guarded by ``mutex``."""
        self._tries_kept = False
        """True if the kept commit is to be written next. Guarded by ``mutex``."""
        self._writes_by_time = writes_by_time
        self._on_span = on_span
        self.clock_runs = False
        """True if the committer sleeps for a time, and not until it is kicked. Guarded by ``mutex``."""
        self.clock_until_ns = 0
        """The time when the committer that sleeps for a time wakes."""
        self.group = GroupCommit(self, "pybk-committer")
        """The leader, and the threads that wait."""
        self.mutex = self.group.mutex
        """The mutex of ``group``, held for single steps."""
        # Bound methods instead of wrappers, because that saves a call per append.
        self.wait = self.group.wait
        self.when_done = self.group.when_done
        self.kick = self.group.kick
        start_thread(self.group.background)

    # ---- staging -------------------------------------------------------------------------------------------------

    @property
    def outstanding_bytes(self) -> int:
        """Bytes staged and not yet durable."""
        forming, inflight, kept = self.forming, self.inflight, self.kept
        nbytes = forming.payload_bytes
        if inflight is not None and inflight is not forming:  # it is both for a moment, which others may see
            nbytes += inflight.payload_bytes
        return nbytes if kept is None or kept is inflight else nbytes + kept.payload_bytes

    @property
    def durable_lsn(self) -> int:
        """LSN of the last durable commit."""
        return self.writer.next_lsn - 1

    def position(self) -> tuple[int, int, int]:
        """Return id of the current log file, offset in it, and next LSN; a commit in flight may change them."""
        return self.writer.position()

    @property
    def refuses(self) -> bool:
        """True if some ledgers were refused for now, and are not readmitted yet."""
        return bool(self._refused)

    @property
    def refusal(self) -> PybkError | None:
        """The reason why ledgers were refused last, if some are not readmitted yet; None if all are."""
        return self._refusal if self._refused or self.kept is not None else None

    @property
    def error(self) -> PybkError | None:
        """The error after which the log refuses everything; None while it works."""
        return self._error

    def pause_staging(self, paused: bool, *, full: bool) -> None:
        """Pause, or resume, staging of entries.

        Args:
            paused: Space is short, or the log that is not checkpointed is at its limit.
            full: Space is short. Entries are staged then if ``LedgerDescriptor.entries_when_full`` says so.
        """
        self._full = full
        self._paused = paused

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
        """Stage entries of one ledger; the caller holds ``descriptor.lock``.

        Args:
            descriptor: The ledger.
            first_entry_id: Id of the first entry.
            sizes: Encoded bytes of each entry, ``array("q")``.
            nbytes: Their sum.
            parts: The encoded bytes, in order, two parts for each entry; after an entry in one part comes an empty one.
            base_length: Cumulative payload bytes of the ledger before these entries.
            overhead: Bytes of each entry that are not payload.
            wanted: Whether a thread or future will wait for it. Other entries stay buffered until a wanted commit takes
                them, or until ``BUFFERED_NS`` have passed.

        Returns:
            The commit they are part of, or None when too many bytes are outstanding: nothing was staged then.

        Raises:
            PybkError: The log failed or is closed, or the ledger takes no more.
        """
        with self.mutex:
            entries = self._open_entries(descriptor, first_entry_id, nbytes, base_length, overhead, wanted)
            if entries is None:
                return None
            entries.parts.extend(parts)
            entries.sizes.extend(sizes)
            return entries.completion

    def stage_batch(
        self,
        descriptor: LedgerDescriptor,
        first_entry_id: int,
        sizes: array[int],
        body: EncodedEntries,
        *,
        nbytes: int,
        base_length: int,
        overhead: int,
        wanted: bool,
    ) -> Completion | None:
        """Stage two entries or more as a record of their own, whose ``body`` has their table and them.

        Otherwise as ``stage``.
        """
        with self.mutex:
            entries = self._open_entries(descriptor, first_entry_id, nbytes, base_length, overhead, wanted, body)
            if entries is None:
                return None
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
        """Stage one entry, given as ``prefix`` (header and digest) and payload; otherwise as ``stage``."""
        size = overhead + len(payload)
        with self.mutex:
            commit = self.forming
            entries = descriptor.staging
            if (
                entries is None
                or entries.completion is not commit
                or len(entries.parts) != 2 * len(entries.sizes)
                or descriptor.error is not None
                or self._error is not None
                or self._paused
                or self.outstanding_bytes + size > self.admission.space
            ):
                entries = self._open_entries(descriptor, entry_id, size, base_length, overhead, wanted)
                if entries is None:
                    return None
            else:
                commit.payload_bytes += size
            entries.parts.append(prefix)
            entries.parts.append(payload)
            entries.sizes.append(size)
        return entries.completion

    def _open_entries(
        self,
        descriptor: LedgerDescriptor,
        first: int,
        nbytes: int,
        base_length: int,
        overhead: int,
        wanted: bool,
        body: EncodedEntries | None = None,
    ) -> StagedEntries | None:
        """Return the ledger's ``StagedEntries`` in the forming commit, for more to join; None if they wait for space.

        With a ``body`` they are new ones, of a batch. The caller holds the mutex.
        """
        if self._error is not None:
            raise not_done(self._error)
        if descriptor.error is not None:
            raise not_done(descriptor.error)
        commit = self.forming
        ticket, admission = descriptor.ticket, self.admission
        alone = self.inflight is None and self.kept is None
        outstanding = commit.payload_bytes if alone else self.outstanding_bytes
        paused = self._paused and not (self._full and first < descriptor.entries_when_full)
        if paused or (
            (ticket is not None or outstanding + nbytes > admission.space)
            and admission.is_full(ticket, outstanding, nbytes)
        ):
            return None
        entries = descriptor.staging
        if entries is None or entries.completion is not commit or not entries.takes_more or body is not None:
            now_ns = time.monotonic_ns()
            if body is None:
                entries = StagedEntries(commit, descriptor, first, base_length, overhead, now_ns)
            else:
                entries = BatchEntries(commit, descriptor, first, base_length, overhead, now_ns, body)
            commit.staged.append(entries)
            descriptor.staging = entries
            if self._on_span is not None:
                entries.report_to(self._on_span)
        elif len(entries.parts) != 2 * len(entries.sizes):
            entries.trim()
        commit.payload_bytes += nbytes
        if wanted:
            commit.wanted = True
        elif not commit.buffered_ns:
            commit.buffered_ns = time.monotonic_ns()
            if self._writes_by_time and not self.clock_runs:
                self.clock_runs = True
                self.group.kick_background()
        return entries

    def prefix_staged(self, descriptor: LedgerDescriptor) -> None:
        """Make the prefixes of a ledger's entries in the forming commit; ``last_prefix`` is of the last one then.

        The leader makes those of a commit that it has taken. The caller holds ``descriptor.lock``.
        """
        with self.mutex:
            entries, digest = descriptor.staging, descriptor.late_digest
            if entries is None or digest is None or not entries.takes_more:
                return
            if entries.completion is self.forming and self.inflight is not self.forming:
                entries.trim()
                entries.add_prefixes(digest)

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

        The caller holds the lock of each ledger, and has called ``account_staged`` of each.

        Args:
            parts: The entries, one part for each ledger.
            controls: Control records that do not concern a ledger.
            nbytes: Bytes of the entries.
            ticket: The group's ticket in the admission queue, None if it has not waited.
            claim: Called with the commit before the group counts; if it raises, nothing is staged.

        Returns:
            The commit it is part of, or None when too many bytes are outstanding: nothing was staged then.

        Raises:
            PybkError: The log failed or is closed, or one of the ledgers takes no more.
        """
        with self.mutex:
            for error in (self._error, *(part.descriptor.error for part in parts)):
                if error is not None:
                    raise not_done(error)
            if parts and (self._paused or self.admission.is_full(ticket, self.outstanding_bytes, nbytes)):
                return None
            commit = self.forming
            low = len(commit.staged)
            group = StagedGroup(low, low + len(parts), controls)
            now_ns = time.monotonic_ns()
            staged = [GroupEntries(commit, group, part, now_ns) for part in parts]
            commit.staged.extend(staged)
            commit.groups.append(group)
            for entries in staged:
                entries.descriptor.staging = entries
            claim(commit)
            commit.payload_bytes += nbytes
            commit.wanted = True
            group.staged = True  # all of the group counts from this one step on
            if self._on_span is not None:
                for entries in staged:
                    entries.report_to(self._on_span)
        return commit

    def stage_control(
        self,
        encode: Callable[[int], bytes],
        apply: Callable[[], None],
        *,
        unless_changed: tuple[LedgerDescriptor, PybkError | None] | None = None,
        creates: LedgerDescriptor | None = None,
        claim: Callable[[Commit], None] | None = None,
        when_full: bool = True,
    ) -> Commit | None:
        """Stage a control record after everything staged so far.

        Args:
            encode: Given the LSN, returns the whole record.
            apply: Called by the leader when the record is durable, before waiters wake.
            unless_changed: For a record that contains a ledger's last entry: the ledger, and its error when the caller
                read the last entry.
            creates: The ledger that the record creates. The record precedes the commit's entries, which may be of it.
            claim: Called with the commit before the record counts, so that an interrupt leaves no record without it.
            when_full: Whether reserved space may be used for it.

        Returns:
            The commit it is part of. None if the ledger's error has changed, because a commit of its entries failed
            meanwhile: nothing was staged, and the caller must read the last entry again.

        Raises:
            PybkError: The log failed or is closed.
        """
        with self.mutex:
            if self._error is not None:
                raise not_done(self._error)
            if unless_changed is not None and unless_changed[0].error is not unless_changed[1]:
                return None
            commit = self.forming
            if claim is not None:
                claim(commit)
            commit.uses_reserve = commit.uses_reserve and when_full
            if creates is not None:
                commit.creations.append((creates, encode, apply))
            else:
                commit.controls.append((encode, apply))
            commit.wanted = True
        return commit

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait_for_space(self) -> None:
        """Return when fewer bytes are outstanding than now; lead the log meanwhile if no other thread does.

        Raises:
            StorageRefusedError: Kept entries take the space, and writing them was refused again.
        """
        with self.mutex:
            commit = self._awaited() or self.forming
        self.wait(commit)
        if self.kept is not None:
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
        with self.mutex:
            commit = self.forming
            if commit.is_empty():
                inflight = self._awaited()
                if inflight is None:
                    return
                commit = inflight
        self.wait(commit)
        if commit.error is not None:
            raise without_frames(commit.error)

    def _awaited(self) -> Commit | None:
        """Return the commit in flight; None if there is none or it is the kept one. The caller holds the mutex.

        A kept commit is put back each time that it is refused, so a thread that waited for it might wait as long as
        the refusals last.
        """
        return None if self.inflight is self.kept else self.inflight

    def _write_kept(self) -> None:
        """Return when no entries are kept; raise the error of a new refusal or failure."""
        while (kept := self.kept) is not None:
            with self.mutex:
                self._tries_kept = True
                commit = self.forming
            self.wait(commit)  # written after the kept entries
            if self.kept in (kept, None) and kept.error is not None:
                raise without_frames(kept.error)

    # ---- what the group commit calls -----------------------------------------------------------------------------

    def is_pending(self) -> bool:
        """Return whether the forming commit is wanted; the caller holds the mutex, and no step runs."""
        return self.forming.wanted

    def sleep_seconds(self) -> float:
        """Return how long the committer may sleep: until buffered entries are due; -1 if until it is kicked.

        A commit whose buffered entries are due becomes wanted. The first buffered entry starts the clock. The clock
        runs for ``BUFFERED_NS`` after the last one, because it should not be started for each commit. Then it stops,
        because a log at rest should cost nothing. The caller holds the mutex.
        """
        if not self.clock_runs:
            return -1.0
        commit = self.forming
        now_ns = time.monotonic_ns()
        if commit.buffered_ns:
            self.clock_until_ns = now_ns + BUFFERED_NS
            left_ns = BUFFERED_NS if commit.wanted else commit.buffered_ns + BUFFERED_NS - now_ns
            commit.wanted = commit.wanted or left_ns <= 0
        else:
            left_ns = self.clock_until_ns - now_ns
            self.clock_runs = left_ns > 0
        return max(0, left_ns) / 1e9 if self.clock_runs else -1.0

    def idle(self) -> None:
        """Do nothing: the log has no idle work."""

    def interrupt(self) -> None:
        """Do nothing: a step of the log never pauses."""

    def background_ended(self) -> None:
        """Fail the log: without the committer, entries that no thread waits for would never be committed."""
        self.fail(StorageFailedError("the committer thread has ended; close the store and open it again"))

    # ---- one commit ----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Make one commit durable, or fail it; called by the leader.

        Cost: A write and a sync; both end by themselves, however slow the disk.
        """
        struck = self.inflight
        if struck is not None:
            self._end_struck(struck)
            return
        with self.mutex:
            commit = self.inflight = self.forming if self.kept is None else self._next_commit()
            if self.forming is commit:
                self.forming = Commit()
        try:
            if not commit.staged and commit.is_empty():
                commit.done = True
            elif self._error is not None:
                self.fail_commit(commit, self._error)
            else:
                self.writer.write(commit)
                self.writer.publish(commit)
        except StorageRefusedError as error:
            refused = without_frames(error)
            if commit is self.kept:
                self._put_back(commit, refused)
                return
            self.fail_commit(commit, refused)
        except BaseException as error:
            self._fail_step(commit, error)
            if not isinstance(error, Exception):  # what no guard defers
                self._finish(commit)
                raise
        self._finish(commit)

    def _end_struck(self, commit: Commit) -> None:
        """End the commit of a step that did not end it, because memory was short or what no guard defers struck it."""
        if not commit.done:
            self._fail_step(commit, InterruptedError("the commit was interrupted"))
        self._finish(commit)

    def _fail_step(self, commit: Commit, error: BaseException) -> None:
        """Fail a commit and the log, because it is not known what was written."""
        failed = StorageFailedError(
            f"writing the log failed ({str(error) or repr(error)}); this store takes no more appends: close it, mend "
            "the device, open it again"
        )
        failed.__cause__ = error
        kept = self._error = without_frames(failed)
        self.fail_commit(commit, kept)
        logger.error("%s", kept, exc_info=error)

    def _next_commit(self) -> Commit:
        """Return the commit to write next: the kept one if it is to be tried now; the caller holds the mutex."""
        kept = self.kept
        if kept is None or not self._tries_kept:
            return self.forming
        self._tries_kept = False
        kept.error = None
        kept.staged = [entries for entries in kept.staged if not entries.descriptor.deleted]
        return kept

    def _put_back(self, kept: Commit, error: PybkError) -> None:
        """Keep the kept commit for a later attempt, because this one was refused, too."""
        with self.mutex:
            kept.error = error
            self.inflight = None

    def fail_commit(self, commit: Commit, error: PybkError) -> None:
        """Fail a commit and the forming one: later entries of the same ledgers would leave a gap.

        If the commit was refused, the acknowledged entries in both are kept. Their ledgers take no more until the
        entries are durable, and the entries count as outstanding meanwhile, which bounds them.
        """
        with self.mutex:
            forming = commit.failed_with = self.forming
            commit.fail(error)
            forming.fail(error)
            if isinstance(error, StorageRefusedError):
                self._refusal = error
                self._refused.update(commit.ledgers(), forming.ledgers())
                before = () if self.kept is None else (self.kept,)
                self.kept = Commit.of_acknowledged(error, *before, commit, forming)
            self.forming = Commit()
            forming.done = commit.done = True
        for failed in (commit, forming):
            self._observer.failed(failed, error)

    def _finish(self, commit: Commit) -> None:
        """Complete a done commit, and the one that failed with it."""
        with self.mutex:
            commit.release_buffers()
            self.group.complete(commit)
            if commit.failed_with is not None:
                commit.failed_with.release_buffers()
                self.group.complete(commit.failed_with)
            if self.kept is commit:
                self.kept = None
                self._refused = {each for each in self._refused if not self._takes_again(each, commit)}
            self.inflight = None
        # Entries refer to their commit. A commit that refers to its entries could only be freed by the collector of
        # cycles, which would run, and delay an append, after every sixty commits.
        commit.staged = []
        if commit.failed_with is not None:
            commit.failed_with.staged = []

    @staticmethod
    def _takes_again(descriptor: LedgerDescriptor, kept: Commit) -> bool:
        """Readmit a ledger whose kept entries are durable now; return whether it accepts entries again."""
        return any(entries.descriptor is descriptor for entries in kept.staged) and descriptor.readmit()

    def readmit(self) -> None:
        """Resume appends of refused ledgers once there is space; a ledger whose lock is held waits for the next call.

        A ledger with kept entries resumes when these are durable; this call has them tried again.
        """
        if self._refused:
            guarded(self._readmit)

    def _readmit(self) -> None:
        with self.mutex:
            if self.kept is not None:
                self._tries_kept = True
                self.forming.wanted = True
                self.group.kick_background()
            self._refused = {descriptor for descriptor in self._refused if not descriptor.readmit()}

    # ---- cutting and closing -------------------------------------------------------------------------------------

    def stand_still(self, look: Callable[[], None]) -> None:
        """Call a function while no commit can be published, to see the state after exactly one commit."""
        self.group.lead(look)

    def cut(self, snapshot: Callable[[], None]) -> int:
        """Leave the current log file, so that the next commit begins another.

        Args:
            snapshot: Called while no commit can be published, to see exactly what the files so far hold.

        Returns:
            LSN of the last commit in the files so far.
        """
        return self.group.lead(lambda: self._cut(snapshot))

    def _cut(self, snapshot: Callable[[], None]) -> int:
        self.writer.leave_file()
        snapshot()
        return self.durable_lsn

    def fail(self, error: PybkError) -> None:
        """Fail all staged entries and later appends with ``error``; the first error is kept."""
        with self.mutex:
            if self._error is None:
                self._error = error

    def after_fork(self, error: PybkError) -> None:
        """Disable the log in a forked child: locks are free, nothing is pending, and each call raises ``error``."""
        self.group.after_fork()
        self.mutex = self.group.mutex
        self._error = error
        for commit in (self.inflight, self.forming):
            if commit is not None and not commit.done:
                commit.error = error
                commit.done = True

    def close(self) -> None:
        """Commit staged entries, stop the committer thread and leave the log file; later appends are refused."""
        try:
            if self._error is None:
                self.flush(kept=True)
        finally:
            self.fail(ClosedError("the manager is closed; open it again to append"))
            self.group.stop()
            self.writer.leave_file()


class Ticket:
    """One append's position in the queue.

    Attributes:
        descriptors: The ledgers appended to; more than one for a group.
        nbytes: Bytes that it needs.
    """

    __slots__ = ("_gate", "descriptors", "nbytes")

    def __init__(self, descriptor: LedgerDescriptor, nbytes: int, *others: LedgerDescriptor) -> None:
        self.descriptors = (descriptor, *others)
        self.nbytes = nbytes
        self._gate = threading.Lock()
        self._gate.acquire()

    def open(self) -> None:
        """Let the append try; the queue calls this with its lock held."""
        if self._gate.locked():
            self._gate.release()

    def wait(self) -> None:
        """Block until the append is first in the queue; call it once."""
        acquire(self._gate)


class Admission:
    """The queue of one log.

    Attributes:
        space: Bytes that may be outstanding after an append without a ticket: the bound less what the queue needs.
        first: The ticket whose append may take all space; None while nothing waits.

    Invariant: A ticket whose append holds its ledger's lock comes before all other tickets of that ledger. So no append
    waits for one that comes later in the queue, and there is no deadlock.

    Threads: any.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self.queue: list[Ticket] = []
        """The tickets that wait, in order."""
        self.space = bytes_max
        self.first: Ticket | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes that the queue needs."""
        return self._bytes_max - self.space

    def is_full(self, ticket: object | None, outstanding: int, nbytes: int) -> bool:
        """Return whether an append has to wait.

        Args:
            ticket: Its ticket; None if it has not joined the queue.
            outstanding: Bytes that are outstanding now.
            nbytes: Bytes of the append. If nothing is outstanding, one of any size is admitted when its turn has come.
        """
        if ticket is None:
            return outstanding + nbytes > self.space and (outstanding > 0 or self.space < self._bytes_max)
        if ticket is not self.first:
            return True
        return outstanding > 0 and outstanding + nbytes > self._bytes_max

    def join(self, ticket: Ticket, *, keeps_lock: bool = False) -> None:
        """Join the queue, at its end; the caller holds the ledger's lock.

        Args:
            ticket: The append's ticket.
            keeps_lock: Whether the append holds the ledger's lock while it waits; it goes ahead of its ledger's others.
        """
        with self._lock:
            held = set(ticket.descriptors)
            places = (place for place, each in enumerate(self.queue) if not held.isdisjoint(each.descriptors))
            self.queue.insert(next(places, len(self.queue)) if keeps_lock else len(self.queue), ticket)
            self._settle()

    def leave(self, ticket: Ticket) -> None:
        """Leave the queue, and let the next append try; does nothing if the ticket is not in the queue."""
        with self._lock:
            self.queue = [each for each in self.queue if each is not ticket]
            self._settle()

    def _settle(self) -> None:
        """Recompute ``space`` and ``first`` from the queue; the caller holds the lock."""
        self.space = self._bytes_max - sum(each.nbytes for each in self.queue)
        self.first = self.queue[0] if self.queue else None
        if self.first is not None:
            self.first.open()
