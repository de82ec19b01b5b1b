"""The worker of a bookie: repairs marked ledgers in the background, by copying entries to this bookie.

Theory of operation
-------------------

The marks of under-replicated ledgers are the queue, and every bookie's worker looks at all of them. ``ledger_work``
decides what this bookie can do for a ledger; a worker copies to its own bookie alone. A pass goes as follows.

1. List the marks. Leave out those that no worker can repair, and ledgers that failed a moment ago. A ledger that waits
   for its owner, because its writer is gone, is recovered without its password if the cluster's settings allow that.
   Just before that, its bookies are asked whether the writer lives, because repairs never fence a live writer (H12).
2. Read the metadata of the marked ledgers, and order the ledgers by urgency: the fewest live sound copies first, then
   the reason, then the oldest. Urgency is computed here because it changes when other bookies fail.
3. Take the lease of a *bucket*, which is a part of all ledgers by their ids, and repair those ledgers of the bucket
   that are as urgent as the first one. A lease for each ledger would cost two more writes of the metadata store. Then
   take the next bucket, for ``PASS_S`` from the listing on, because more urgent ledgers may be marked meanwhile; for
   longer if the listing took long, or no marks were added.
4. For each ledger: read marks and metadata again, copy, let the compare-and-set of the ledger name the new places, and
   only then remove the marks that were read before the copies.

A lease that is lost does no harm: two workers then copy the same, and one compare-and-set is refused. A worker that
stops at any point leaves marks and metadata from which another one can begin again.

A ledger that fails is tried again after a pause that doubles, from ``PAUSE_MIN_S`` to ``PAUSE_MAX_S``. After ``TRIES``
its marks say that it is stuck, and the auditor decides when it is tried again.

**Rates.** Copies to this bookie are paced here, and reads for copies from it by the bookie (``copy_reads``), each by a
token bucket. The rate is that of the batch that is repaired, times the share that ``ForegroundGuard`` allows, and at
most that of ``ForegroundCap`` unless the batch is urgent; ``throttle`` has the rules. Reads from this bookie are urgent
as well if any marked ledger is urgent, because this bookie may have its last copy without being its target.

A batch may take hours at such a rate, and its ledgers may lose another copy meanwhile. So the marks are listed during
it, too. If this bookie can repair a ledger that is more urgent then, and no other worker has its bucket, the copies
under way get the rate of that ledger, because it waits for them or is among them. No other ledger of the batch is begun
then.

Threads: a worker of the chores makes a pass, and ``COPIES`` others repair meanwhile. ``failures`` is changed by these
with single operations.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.client.broadcast import find_writer
from pybk.client.remote_ledger import RemoteLedger
from pybk.client.rereplication import FragmentCopy
from pybk.errors import LedgerDeletedError, MetadataUnreachableError, PybkError
from pybk.healing.chores import ChoreThread, Work
from pybk.healing.ledger_work import LedgerWork, Presence, ledger_work, live_copies
from pybk.healing.open_fragment import misses_nothing
from pybk.healing.throttle import SAMPLE_NS, ForegroundCap, ForegroundGuard, TokenBucket
from pybk.ledger.ledger_metadata import LedgerState
from pybk.metadata.underreplication import RepairReason, RepairState, UnderReplicatedLedger, missing_key
from pybk.metrics import REPAIR_COPIED_BYTES, REPAIR_LEDGERS, HistogramSnapshot
from pybk.replication.messages import MetadataRead
from pybk.replication.rereplication import RereplicationMachine
from pybk.spans import OnSpan, operation

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerMetadata
    from pybk.metadata.settings import RepairSettings
    from pybk.replication.pace import Pace

logger = logging.getLogger(__name__)

IDLE_S: Final = 10.0
"""Seconds between two passes without news."""

COPIES: Final = 2
"""Ledgers that are repaired at a time."""

BUCKETS: Final = 64
"""The number of parts of the ledgers for which leases are taken."""

BATCH: Final = 16
"""Ledgers that are repaired under one lease."""

PASS_S: Final = 2.0
"""Seconds after which a pass takes no further bucket, unless listing the marks took long."""

_LISTING_SHARE: Final = 20
"""The least length of a pass, in multiples of the time of its listing, which takes a twentieth of it at most then."""

_LISTING_SHARE_WITHOUT_NEWS: Final = 100
"""The same while no marks are added: none can be more urgent then, and a listing of many marks slows appends."""

PAUSE_MIN_S: Final = 5.0
PAUSE_MAX_S: Final = 600.0
SETTLE_MAX_S: Final = 60.0
"""The longest pause before another look at a bookie that misses entries of the last fragment of an open ledger."""

TRIES: Final = 5

_COOKIES_S: Final = 5.0
"""Seconds for which the states of bookies are remembered."""

_NO_COPIES_WANTED: Final = 1 << 30
"""Live copies of a ledger that was deleted: its marks are less urgent than all others."""

_WHOLE: Final = 2
"""Live copies from which on a ledger that lacks none is no more urgent than others."""

_UNREAD_LOOKS: Final = 4
"""After so many looks in a row without reads for copies nobody copies from here; a rest of all bookies has two."""

_NO_APPENDS: Final = HistogramSnapshot(0, 0, 0, ())

_REBALANCE: Final = RepairReason.REBALANCE.rank
_BACKGROUND: Final = frozenset({RepairReason.MISPLACED, RepairReason.REBALANCE})


class Candidate(NamedTuple):
    """A ledger that this bookie can repair.

    Attributes:
        copies: The fewest live sound copies of an entry.
        rank: The rank of the most urgent reason.
        since_ns: The time of the oldest mark.
        ledger_id: The ledger.
    """

    copies: int
    rank: int
    since_ns: int
    ledger_id: int


class RepairWorker:
    """Repairs ledgers in the background, from its creation until ``close``; see the module. A chore.

    Args:
        driver: Runs the copies.
        membership: The bookies and the metadata of the cluster.
        bookie: The bookie of this process.
        chores: The thread that asks what is due; its workers make the passes and the copies.
        recover: Recovers an abandoned ledger without its password; with None such ledgers wait for their owner.

    Attributes:
        copied_bytes: Bytes copied to this bookie.
        repaired: Ledgers that this bookie has repaired.

    Threads: any.
    """

    def __init__(
        self,
        driver: Driver,
        membership: Membership,
        bookie: BookieServer,
        chores: ChoreThread,
        recover: Callable[[int], LedgerMetadata] | None = None,
        on_span: OnSpan | None = None,
    ) -> None:
        self.trouble: Final = f"{bookie.bookie} repairs nothing now"
        self._chores = chores
        self._driver = driver
        self._membership = membership
        self._metadata = membership.metadata
        self._bookie = bookie
        self._recover = recover
        self._on_span = on_span
        self.copied_bytes = 0
        self.repaired = 0
        self.failures: dict[int, tuple[float, float]] = {}
        """The ledgers that failed, each with its next pause in seconds and the monotonic time of its next try."""
        now_ns = time.monotonic_ns()
        self._first: Candidate | None = None
        """The first ledger of the batch that is repaired, or was repaired last in this pass."""
        self._urgent = False
        """True if a ledger that was marked at the last look has a single live copy; other bookies may copy it."""
        self._overtaken = False
        """True if a more urgent ledger waits for the end of the batch that is repaired."""
        self._listing_s = 0.0
        """The time that the last listing of the marks took."""
        rate = self._repair_settings().bytes_per_second
        self._inbound = TokenBucket(rate, now_ns)
        self._outbound = bookie.copy_reads.pace = TokenBucket(rate, now_ns)
        self._guard = ForegroundGuard()
        self._cap = ForegroundCap(self._repair_settings().least_bytes_per_second)
        self._clock_ns = time.time_ns() - now_ns
        """The offset from the monotonic clock to the time of day; the system's time of day may be set meanwhile."""
        self._appends = _NO_APPENDS
        """The appends since the last sample of the guard."""
        self._sampled_ns = now_ns
        self._read_bytes = 0
        """The bytes that were read for copies up to the last look between two passes."""
        self._unread_looks = _UNREAD_LOOKS
        """The number of looks in a row, between passes, that saw no such reads."""
        self._stopping = threading.Event()
        self._news = threading.Event()
        self._known_leaving: frozenset[Bookie] = frozenset()
        self._cookies_at = float("-inf")
        self._busy = True
        """True if the last pass repaired a ledger; another one then follows at once."""
        self._pass_at = self._watch_at = -math.inf
        """The times of the next pass, and of the next look at the appends between passes, by the monotonic clock."""
        self._marks_watch = self._metadata.watch_under_replicated(self.wake)

    def _repair_settings(self) -> RepairSettings:
        return self._metadata.current_settings().repair

    # ---- passes --------------------------------------------------------------------------------------------------

    def due(self, now: float) -> Work | float:
        """Return a pass, or a look at the appends while others read for copies here; or the time of the next."""
        if self._stopping.is_set():
            return math.inf
        if self._busy or self._news.is_set() or now >= self._pass_at:
            return self._make_pass
        return self._watch_appends if now >= self._watch_at else min(self._pass_at, self._watch_at)

    def _make_pass(self) -> None:
        """Make a pass, and choose when the next one and a look at the appends follow."""
        if not self._busy and not self._news.is_set():
            self._watch_appends()
        self._news.clear()
        self._busy, self._pass_at = False, time.monotonic() + IDLE_S  # if it fails
        self._busy = self.look()
        now = time.monotonic()
        self._pass_at = now + IDLE_S
        self._watch_at = self._next_watch(now)

    def _watch_appends(self) -> None:
        """Take a sample of the appends, and see whether other bookies read for copies here."""
        self._sample()
        before, self._read_bytes = self._read_bytes, self._outbound.charged_bytes
        self._unread_looks = 0 if before != self._read_bytes else self._unread_looks + 1
        self._watch_at = self._next_watch(time.monotonic())

    def _next_watch(self, now: float) -> float:
        """Return when the appends are looked at next before a pass; never while no bookie reads for copies here."""
        return now + self._look_s() if self._unread_looks < _UNREAD_LOOKS else math.inf

    def look(self) -> bool:
        """Make a pass; return whether this bookie repaired a ledger, after which another pass should follow at once."""
        self._sample()
        if self._is_paused():
            return False
        began = time.monotonic()
        self._news.clear()
        marks = self._queued_marks()
        self.failures = {ledger_id: self.failures[ledger_id] for ledger_id in marks.keys() & self.failures.keys()}
        ready = self._ready(marks, began)
        worked = False
        if ready:
            self._membership.refresh()  # no watch reports that a bookie has got space, or turned read-only
        listed = batches(self._candidates(ready, marks))
        self._first = None
        self._overtaken = False
        self._listing_s = time.monotonic() - began
        waited_for: Candidate | None = None
        for batch in listed:
            until = began + max(PASS_S, self._listing_share * self._listing_s)
            if self._stopping.is_set() or self._is_paused() or time.monotonic() > until:
                break
            # While another worker has the lease of more urgent ledgers, one ledger is repaired before the next look.
            less_urgent = waited_for is not None and batch[0][:2] > waited_for[:2]
            self._first = batch[0]
            self._sample()
            done = self._repair_batch(batch[:1] if less_urgent else batch, marks)
            worked |= done
            if not done:
                waited_for = waited_for or batch[0]
            elif less_urgent or self._overtaken:
                break
        return worked

    def _queued_marks(self) -> dict[int, list[UnderReplicatedLedger]]:
        """Return the marks by ledger, without the ledgers that no worker can mend now."""
        marks: dict[int, list[UnderReplicatedLedger]] = {}
        for mark in self._metadata.marks():
            marks.setdefault(mark.ledger_id, []).append(mark)
        return {ledger_id: found for ledger_id, found in marks.items() if any(map(self._is_due, found))}

    @property
    def _listing_share(self) -> int:
        """The multiple of a listing's time that passes at least until the next listing of the marks."""
        return _LISTING_SHARE if self._news.is_set() else _LISTING_SHARE_WITHOUT_NEWS

    def _ready(self, ledger_ids: Iterable[int], now: float) -> list[int]:
        """Return the ledgers without those whose repair failed a moment ago."""
        return [ledger_id for ledger_id in ledger_ids if self.failures.get(ledger_id, (0, 0))[1] <= now]

    def _is_due(self, mark: UnderReplicatedLedger) -> bool:
        """Return whether a worker may repair the ledger of a mark now."""
        return mark.state is RepairState.QUEUED or (mark.state is RepairState.WAITING_FOR_OWNER and self._may_recover())

    def _candidates(self, ledger_ids: list[int], marks: dict[int, list[UnderReplicatedLedger]]) -> list[Candidate]:
        """Return the ledgers for which this bookie can do something."""

        def skip(ledger_id: int, error: PybkError) -> None:
            logger.warning("ledger %d cannot be repaired: %s", ledger_id, error)
            damaged.add(ledger_id)

        damaged: set[int] = set()
        found = []
        urgent = False
        for ledger_id, stored in zip(ledger_ids, self._metadata.read_ledgers(ledger_ids, damaged=skip), strict=True):
            ledger_marks = marks[ledger_id]
            rank = min(mark.reason.rank for mark in ledger_marks)
            since_ns = min(mark.since_ns for mark in ledger_marks)
            if stored is None:
                if ledger_id not in damaged:  # deleted, as a rule: its marks are to be removed
                    found.append(Candidate(_NO_COPIES_WANTED, rank, since_ns, ledger_id))
                continue
            urgent = urgent or self._copies(stored.metadata, ledger_marks, ended=True) <= 1
            work = self._work(stored.metadata, ledger_marks)
            is_left = self._is_left(work, ledger_marks)
            if work.fragments or work.partly or work.over or is_left:
                # Nothing is copied of a fragment without an end, so it is no reason to hurry; a recovery ends it.
                copies = self._copies(stored.metadata, ledger_marks, ended=not is_left)
                found.append(Candidate(copies, rank, since_ns, ledger_id))
        self._urgent = urgent
        if any(each.rank == _REBALANCE for each in found) and not self._metadata.is_quiet(time.time_ns()):
            return [each for each in found if each.rank != _REBALANCE]
        return found

    def _copies(self, metadata: LedgerMetadata, marks: Sequence[UnderReplicatedLedger], *, ended: bool = False) -> int:
        """Return the fewest live copies of an entry, and ``_WHOLE`` at least for a ledger that lacks none."""
        copies = live_copies(metadata, marks, self._presence, ended=ended)
        return max(copies, _WHOLE) if copies >= metadata.write_quorum else copies  # one of one is no reason to hurry

    def _repair_batch(self, batch: Sequence[Candidate], marks: Mapping[int, Sequence[UnderReplicatedLedger]]) -> bool:
        """Repair ledgers of one bucket, if its lease is free; return whether it was."""
        lease = self._metadata.try_lock(_lease_of(bucket_of(batch[0].ledger_id)), str(self._bookie.bookie))
        if lease is None:
            return False
        with ExitStack() as leased:
            leased.callback(lease.release)
            self._repair_all(batch[0], {each.ledger_id: marks[each.ledger_id] for each in batch})
        return True

    def _repair_all(self, begun: Candidate, ledgers: Mapping[int, Sequence[UnderReplicatedLedger]]) -> None:
        """Repair ledgers with their marks, several at a time; returns when all have ended, or were left.

        Args:
            begun: The one of them whose urgency they have.
            ledgers: The marks by ledger.
        """
        waiting = iter(list(ledgers.items()))  # of which each worker takes the next one by a single operation

        def repair_next() -> None:
            for each in waiting:
                self.try_repair(*each)

        submitted = [self._chores.workers.submit(repair_next) for _ in range(min(COPIES, len(ledgers)))]
        left: Collection[Future[None]] = [future for future in submitted if future is not None]
        looked = time.monotonic()
        while left:
            left = wait(left, self._look_s()).not_done
            if left and time.monotonic() > looked + max(IDLE_S, self._listing_share * self._listing_s):
                if not any(future.running() for future in left) and all(future.cancel() for future in left):
                    repair_next()  # the system gives no thread to the workers, so this one may be their only one
                    return
                self._look_for_more_urgent(begun)
                looked = time.monotonic()
            self._sample()

    def _look_for_more_urgent(self, begun: Candidate) -> None:
        """List the marks during a batch, and let a more urgent ledger that this bookie can mend overtake it."""
        began = time.monotonic()
        try:
            marks = self._queued_marks()
            candidates = self._candidates(self._ready(marks, began), marks)
            most = overtaking(begun, candidates, self._is_leased)
        except PybkError as error:
            logger.warning("%s does not see now what is urgent: %s", self._bookie.bookie, error)
            return
        self._listing_s = time.monotonic() - began
        self._first = most or begun
        self._overtaken |= most is not None

    def _is_leased(self, bucket: int) -> bool:
        return self._metadata.lock_owner(_lease_of(bucket)) is not None

    # ---- one ledger ----------------------------------------------------------------------------------------------

    def try_repair(self, ledger_id: int, listed: Sequence[UnderReplicatedLedger]) -> None:
        """Repair a ledger; a failure is logged, counted in its marks, and tried again after a pause.

        Args:
            ledger_id: The ledger.
            listed: Its marks as they were listed; later marks are left to the next pass.
        """
        keys = [missing_key(ledger_id, mark.bookie) for mark in listed]
        try:
            if self._stopping.is_set() or self._overtaken or self._is_paused():
                return
            with operation(self._on_span, "pybk.bookie.repair", ledger_id=ledger_id, marks=len(keys)):
                pause = self._repair(ledger_id, keys)
            if pause:
                self._pause(ledger_id, pause)
            else:
                self.failures.pop(ledger_id, None)
        except Exception as error:  # whatever failed, the other ledgers have to be repaired
            if self._stopping.is_set():
                return  # the copy was cut off by the close of the client
            self._pause(ledger_id)
            known = isinstance(error, PybkError)
            logger.warning("ledger %d is not repaired yet: %s", ledger_id, error, exc_info=not known)
            if not isinstance(error, MetadataUnreachableError):
                self._note_failure(ledger_id, keys, str(error) or repr(error))

    def _pause(self, ledger_id: int, most: float = PAUSE_MAX_S) -> None:
        """Leave a ledger alone for a while, longer each time, and for some seconds at most."""
        pause = min(most, self.failures.get(ledger_id, (PAUSE_MIN_S, 0.0))[0])
        until = time.monotonic() + pause * random.uniform(0.75, 1.25)
        self.failures[ledger_id] = min(2 * pause, most), until

    def _note_failure(self, ledger_id: int, keys: Sequence[str], text: str) -> None:
        """Record a failure in the marks of a ledger; after ``TRIES`` they are stuck."""
        try:
            marks = self._metadata.marks_at(keys)
            self._count_ledger(marks, "failed")
            for mark in marks:
                if self._is_due(mark):
                    tries = mark.tries + 1
                    stuck = tries >= TRIES and mark.state is RepairState.QUEUED
                    state = RepairState.STUCK if stuck else mark.state
                    self._metadata.update_mark(mark, state=state, tries=tries, error=text)
        except PybkError as error:
            logger.warning("ledger %d: its failed repair is not recorded: %s", ledger_id, error)

    def _repair(self, ledger_id: int, keys: Sequence[str]) -> float:
        """Do what this bookie can do for a ledger with marks at these keys, and remove the marks that are done.

        Returns:
            The longest pause before the next try, in seconds; 0 if there is nothing to wait for. It is waited for the
            end of a writer that lives, or may live, or of a recovery, and for the last fragment of an open ledger to be
            whole.
        """
        while True:
            marks = self._metadata.marks_at(keys)  # before the metadata: what is removed was covered by the copies
            try:
                metadata, version = self._metadata.read_ledger(ledger_id)
            except LedgerDeletedError:
                self._unmark(marks)
                return 0.0
            if not any(map(self._is_due, marks)):
                return 0.0
            work = self._work(metadata, marks)
            self._unmark(work.over)
            ledger = RemoteLedger(metadata, version, self._metadata.describe(metadata))
            if self._is_left(work, marks) and not work.fragments:
                found = find_writer(self._driver, ledger, self._membership.find)
                if found is not False:
                    why = "lives" if found else "may live, as some of its bookies did not say"
                    logger.info("ledger %d is not recovered: its writer %s", ledger_id, why)
                    return PAUSE_MAX_S
                assert self._recover is not None
                self._recover(ledger_id)
                continue
            pace = _CountedPace(self._inbound, partial(self._count_copied, _reason_of(marks)))
            for number, fragment in enumerate(work.fragments):
                self._copy(ledger, pace, *fragment, fresh=number == 0)
            self._unmark(work.filled)
            if work.fragments:
                self.repaired += 1
                self._count_ledger(marks, "done")
            if all(fragment.replaced is None for fragment in work.fragments):
                if metadata.state is LedgerState.IN_RECOVERY:
                    return PAUSE_MAX_S  # its marks stay until the recovery has ended, and would cause the same copies
                return 0.0 if all(self._settle(ledger, mark) for mark in work.partly) else SETTLE_MAX_S

    def _settle(self, ledger: RemoteLedger, mark: UnderReplicatedLedger) -> bool:
        """Remove the mark of this bookie if it is whole in the fragment without an end, too (H13).

        Returns:
            False if it is not, or if that is not known; the mark is then about that fragment alone.
        """
        first = ledger.metadata.fragments[-1].first_entry_id
        raised = self._metadata.update_mark(mark, missing_from=first)
        if raised is None:
            return True  # it has changed, and is looked at in the next pass
        if ledger.ledger_id in self._bookie.in_limbo():
            return False  # it has marked itself, so that the ledger does not wait for a writer that is gone
        if not misses_nothing(self._driver, ledger, mark.bookie):
            return False
        self._unmark([raised])
        return True

    def _count_ledger(self, marks: Sequence[UnderReplicatedLedger], result: str) -> None:
        labels = (("reason", _reason_of(marks)), ("result", result))
        self._membership.metrics.add(REPAIR_LEDGERS, labels=labels)

    def _count_copied(self, reason: str, size_bytes: int) -> None:
        self._membership.metrics.add(REPAIR_COPIED_BYTES, size_bytes, labels=(("reason", reason),))

    def _unmark(self, marks: Iterable[UnderReplicatedLedger]) -> None:
        for mark in marks:
            self._metadata.unmark_under_replicated(mark)

    def _copy(
        self, ledger: RemoteLedger, pace: Pace, first_entry_id: int, replaced: Bookie | None, *, fresh: bool
    ) -> None:
        """Complete a fragment at this bookie, which takes or has a place in it.

        Args:
            ledger: The ledger.
            pace: The rate of the copies.
            first_entry_id: The fragment.
            replaced: As in ``FragmentWork``.
            fresh: Whether no copy of this ledger has been made since its metadata was read.
        """
        own = self._bookie.bookie
        lost = frozenset((own if replaced is None else replaced,))
        stay = lost if replaced is None else frozenset()
        machine = RereplicationMachine(ledger.ledger_id, first_entry_id, lost, stay=stay, target=own, pace=pace)
        copy = FragmentCopy(self._driver, ledger, machine)
        known = MetadataRead(ledger.metadata, ledger.version)
        self._driver.run(copy, partial(machine.step, known) if fresh else machine.start)
        self.copied_bytes += machine.copied_bytes

    # ---- judgements ----------------------------------------------------------------------------------------------

    def _is_paused(self) -> bool:
        """Return whether a person has paused the repairs; copies that are under way end all the same (H7)."""
        return self._repair_settings().paused_until_ns > time.time_ns()

    def _may_recover(self) -> bool:
        return self._recover is not None and self._repair_settings().recover_abandoned

    def _is_left(self, work: LedgerWork, marks: Iterable[UnderReplicatedLedger]) -> bool:
        """Return whether a ledger may be recovered: the auditor says that its writer is gone, and settings allow it."""
        waiting = {mark.bookie for mark in marks if mark.state is RepairState.WAITING_FOR_OWNER}
        return self._may_recover() and not waiting.isdisjoint(work.unended)

    def _work(self, metadata: LedgerMetadata, marks: list[UnderReplicatedLedger]) -> LedgerWork:
        own = self._bookie.bookie
        tried = any(mark.tries for mark in marks)

        def fits(fragment: Fragment, place: int, reasons: frozenset[RepairReason]) -> bool:
            planned, misplaced = RepairReason.REBALANCE in reasons, RepairReason.MISPLACED in reasons
            # After a failed try a bookie that is not among the best may do what those did not.
            return self._membership.may_take(
                own,
                metadata,
                fragment,
                place,
                among_best=not (tried or planned),
                spread=planned,
                gains=misplaced,
            )

        return ledger_work(metadata, marks, own, self._presence, fits)

    def _presence(self, bookie: Bookie) -> Presence:
        """Return whether a bookie can keep its places."""
        if self._membership.find(bookie) is None:
            return Presence.ABSENT
        return Presence.LEAVING if bookie in self._leaving() else Presence.HERE

    def _leaving(self) -> frozenset[Bookie]:
        """Return the bookies that are being drained, from cookies that were read a moment ago."""
        now = time.monotonic()
        if now - self._cookies_at > _COOKIES_S:
            cookies = self._metadata.list_cookies()
            self._known_leaving = frozenset(cookie.bookie for cookie in cookies if cookie.state.read_only)
            self._cookies_at = now
        return self._known_leaving

    # ---- rates ---------------------------------------------------------------------------------------------------

    def _set_rate(self) -> None:
        """Choose the rates of copies, by the settings as they are now, the batch that is repaired, and the queue."""
        settings, first = self._repair_settings(), self._first
        normal = settings.bytes_per_second
        if first is not None and tuple(RepairReason)[first.rank] in _BACKGROUND:
            normal = settings.background_bytes_per_second
        urgent = first is not None and first.copies <= 1
        rests_until_ns = time.monotonic_ns() + self._cap.rest_ns
        for bucket, hurries in ((self._inbound, urgent), (self._outbound, urgent or self._urgent)):
            bucket.rate = (settings.urgent_bytes_per_second if hurries else normal) * self._guard.factor
            bucket.cap = math.inf if hurries else self._cap.rate
            bucket.rests_until_ns = 0 if hurries else rests_until_ns

    def _look_s(self) -> float:
        """Return in how many seconds the appends are to be looked at again, while there are copies."""
        return min(SAMPLE_NS, self._cap.next_ns(self._clock_ns + time.monotonic_ns())) / 1e9

    def _sample(self) -> None:
        """Look how long the appends of applications take, and adapt the rate."""
        now_ns = time.monotonic_ns()
        appends = self._bookie.append_latency.take()
        copied_bytes = self._inbound.charged_bytes + self._outbound.charged_bytes
        self._cap.least = self._repair_settings().least_bytes_per_second
        self._cap.look(self._clock_ns + now_ns, appends, copied_bytes)
        self._appends += appends
        if now_ns - self._sampled_ns >= SAMPLE_NS:
            self._sampled_ns = now_ns
            self._guard.sample(self._appends.quantile(0.99) if self._appends.count else None)
            self._appends = _NO_APPENDS
        self._set_rate()

    def foreground_share(self) -> float:
        """Return the share of its rate that background work may use now, because applications' appends come first."""
        return self._guard.factor

    def wake(self) -> None:
        """Look for repairs at once, because the marks or the settings have changed; any thread."""
        self._news.set()
        self._chores.wake()

    def begin_stop(self) -> None:
        """Begin no further copy; returns at once."""
        self._stopping.set()

    def close(self) -> None:
        """End the watches of marks; to be called once the thread of the chores has ended."""
        self._marks_watch.cancel()


class _CountedPace:
    """A pace whose bytes are counted as they are copied: the copy of a large fragment may take hours.

    Args:
        pace: The pace.
        copied: Called with the bytes of each piece that is copied.

    Threads: as the pace.
    """

    def __init__(self, pace: Pace, copied: Callable[[int], None]) -> None:
        self._pace = pace
        self._copied = copied

    @property
    def piece_bytes(self) -> int:
        """The bytes to copy at once."""
        return self._pace.piece_bytes

    def wait_ns(self, now_ns: int) -> int:
        """Return after how many nanoseconds the next copy may begin; 0 for now."""
        return self._pace.wait_ns(now_ns)

    def charge(self, size_bytes: int, now_ns: int) -> None:
        """Count bytes of a copy."""
        self._pace.charge(size_bytes, now_ns)
        self._copied(size_bytes)


def batches(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """Return ledgers in the order of their repair, in batches that one lease covers.

    The most urgent class comes first, and within it a random bucket, because workers should not meet at the same one.
    """
    offset = random.randrange(BUCKETS)

    def key(each: Candidate) -> tuple[int, int, int]:
        return each.copies, each.rank, (bucket_of(each.ledger_id) + offset) % BUCKETS

    groups = groupby(sorted(candidates, key=lambda each: (key(each), each.since_ns, each.ledger_id)), key)
    alike = [list(group) for _, group in groups]
    return [group[at : at + BATCH] for group in alike for at in range(0, len(group), BATCH)]


def overtaking(begun: Candidate, candidates: Iterable[Candidate], is_leased: Callable[[int], bool]) -> Candidate | None:
    """Return the ledger to repair next instead of the rest of a batch; None without one.

    A ledger whose bucket another worker has is left to that worker.

    Args:
        begun: A ledger of the batch; all are as urgent as it.
        candidates: The ledgers that this bookie can repair.
        is_leased: Whether some worker has the lease of a bucket. That of the batch is this bookie's.
    """
    others: dict[int, bool] = {bucket_of(begun.ledger_id): False}
    for each in sorted(each for each in candidates if each[:2] < begun[:2]):
        bucket = bucket_of(each.ledger_id)
        if bucket not in others:
            others[bucket] = is_leased(bucket)
        if not others[bucket]:
            return each
    return None


def _reason_of(marks: Iterable[UnderReplicatedLedger]) -> str:
    """Return the most urgent reason of a ledger's marks, for metrics."""
    return min((mark.reason for mark in marks), key=lambda reason: reason.rank, default=RepairReason.MISSING).value


def bucket_of(ledger_id: int) -> int:
    """Return the bucket of a ledger; neighbouring ids are in different ones."""
    return ledger_id % BUCKETS


def _lease_of(bucket: int) -> str:
    """Return the name of a bucket's lease."""
    return f"repair-{bucket}"
