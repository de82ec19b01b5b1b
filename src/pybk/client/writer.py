"""The writer of one ledger in a client: takes batches from its append queue, and drives a ``WriterMachine`` with them.

Theory of operation
-------------------

An entry passes these steps:

1. A thread of the application stages it in the ``AppendQueue``, in the batch that forms. ``Driver.formed`` notes that
   the writer has something to send.
2. The leader (the thread that runs the driver) calls ``submit``. It takes the formed batches, cuts each by write set,
   and gives them to the machine, whose effects are one ``Add`` for each bookie.
3. Replies reach the machine. Once each write set of the oldest batch has an ack quorum, it returns ``Confirmed``, in
   the order of the entries. ``take`` then finishes the batches up to that entry, which wakes the threads and futures
   that wait, and moves the ledger's LAC.

At most ``BATCHES_UNDER_WAY`` batches are sent and not confirmed; meanwhile the next one forms and grows. A deferred
writer has no such limit: bookies acknowledge its batches before a sync, and only ``force`` confirms them.

The writer ends once, in one of three ways, and each fails what is still queued:

| end | by | error of queued appends |
|---|---|---|
| ``Done`` | ``close``: the closed metadata were written | ``LedgerClosedError`` |
| ``Failed`` | the machine: fenced, deleted, bookies or metadata store away | that of the reason, outcome unknown |
| ``give_up`` | the driver: a step failed or it was closed, so the machine's state is not known | given by the driver |

If too few bookies answer a log's writer, or the metadata store does not, its appends do not fail: they are *lost*, and
the log's writer appends them to another ledger (``append_queue``).

A writer without a handle ends as well: it is collected, and the bookies are notified that it has left. Otherwise they
would count it as alive as long as this client has sessions with them (H12).

After ``Done`` the machine still takes late replies, because a bookie that does not answer must be recorded as
under-replicated (C13 in ``docs/design/replication.md``).

Locks: none here. The append queue has its own; all other methods are called by the leader.
"""

from __future__ import annotations

import time
from copy import copy
from functools import partial
from typing import TYPE_CHECKING
from weakref import finalize

from pybk.client.append_queue import AppendQueue
from pybk.client.broadcast import leave
from pybk.client.driver import Conversation
from pybk.client.machine_errors import error_of
from pybk.errors import LedgerClosedError, LedgerRecoveryError, PybkError, not_done
from pybk.metrics import APPEND_ERRORS, ENSEMBLE_CHANGES, code_of
from pybk.replication.entry_runs import cut
from pybk.replication.inflight import Batch
from pybk.replication.messages import Confirmed, Done, Effect, EnsembleChanged, Failed, Reason, UnderReplicated
from pybk.replication.quorum import Quorum
from pybk.replication.writer import WriterMachine

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metrics import Metrics
    from pybk.spans import OnSpan
    from pybk.threads.group_commit import Completion

_new_tuple = tuple.__new__

_WAITED_FOR = (Reason.NOT_ENOUGH_BOOKIES, Reason.METADATA_UNREACHABLE)
"""The reasons why a writer ends after it has waited without result: another ledger may take its entries later."""


class Writing(Conversation[WriterMachine]):
    """The conversation of one ledger's writer with its bookies.

    Args:
        driver: Performs the machine's effects.
        ledger: The ledger, just created.
        metrics: Counts what it does.
        straggler_bytes: The confirmed bytes that a bookie may leave unacknowledged before it is replaced.
        patience_s: Seconds to wait for bookies while too few answer.
        outstanding_bytes_max: Bound on bytes staged and not confirmed.
        on_span: The hook that gets a span of each batch; None for none.

    Attributes:
        appender: The append queue. It refers to this object, so a writer lives as long as a handle or a future that
            holds its queue.

    Threads: the leader; those of ``appender`` are any.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: RemoteLedger,
        metrics: Metrics,
        *,
        straggler_bytes: int,
        patience_s: float,
        outstanding_bytes_max: int,
        on_span: OnSpan | None,
    ) -> None:
        metadata = ledger.metadata
        machine = WriterMachine(
            metadata,
            ledger.version,
            straggler_bytes=straggler_bytes,
            patience_ns=int(patience_s * 1e9),
            deferred=ledger.deferred,
            away=ledger.away,
            seal=lambda closed: ledger.sealed(closed, ledger.last_prefix),
        )
        super().__init__(driver, ledger, machine)
        formed = partial(driver.formed, self)
        self.appender = AppendQueue(ledger, driver.group, formed, driver.call_as_leader, outstanding_bytes_max, on_span)
        self._patience_s = patience_s
        self._metrics = metrics
        self._meter = metrics.scope(metadata.ledger_type, metadata.tier)
        self._quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self.forcing: list[tuple[int, Completion]] = []
        """Calls of ``force`` that wait, in order: the entry to be confirmed, and the completion to finish then."""
        self._bookies = list(self.ensemble)
        """The bookies of ``ensemble``, which a finaliser uses after this object is gone."""
        self._unless_ended = finalize(self, leave_soon, driver, ledger, self._bookies)
        self._unless_ended.atexit = False
        driver.attach(self)

    # ---- calls of the driver -------------------------------------------------------------------------------------

    def submit(self, now_ns: int) -> None:
        """Send the batches that have formed, as many as may be under way."""
        for formed in self.appender.take():
            entries = formed.entries
            runs = cut(entries.first, entries.sizes, entries.parts, self._quorum)
            batch = _new_tuple(Batch, (entries.first, formed.last, entries.length_at_end, runs))
            self.driver.perform(self, self.machine.submit(batch, now_ns))
        self.report_activity()

    def report_activity(self) -> None:
        """Report to the driver whether a thread may be waiting for a reply to this writer."""
        waited = self.forcing or (not self.ledger.deferred and self.appender.sent)
        self.driver.active(self, waited=bool(waited) and not self.completion.done)

    def send_lac(self) -> None:
        """Send the LAC to the bookies if nothing is outstanding that would carry it, or nothing was ever appended."""
        if self.machine.last_submitted < 0:
            self.announce()  # they know of no writer until they hear from it
        else:
            self.driver.perform(self, self.machine.send_lac())

    def give_up(self, error: PybkError, under_way: PybkError) -> None:
        """End without asking the machine, whose state is not known; does nothing to a writer that has ended.

        Args:
            error: The error of later appends.
            under_way: The error of what was sent or staged.
        """
        is_broken = isinstance(error, LedgerRecoveryError)
        if is_broken:
            error, under_way = copy(error), copy(under_way)
            error.retryable = under_way.retryable = False
        if is_broken and self.appender.on_lost is not None:
            self.appender.lose(self.appender.error or not_done(error))
        else:
            self._count_errors(self.appender.fail(self.appender.error or error, under_way), under_way)
        self._fail_forces(under_way)
        self.end(under_way)

    def deleted(self, error: PybkError) -> None:
        """Fail appends, because this client deleted the ledger."""
        self._count_errors(self.appender.fail(error), error)

    def end(self, error: PybkError | None = None) -> None:
        """End as every conversation does; the bookies need not be notified any more when this object is collected."""
        self._unless_ended.detach()
        super().end(error)

    # ---- effects of the machine ----------------------------------------------------------------------------------

    def take(self, effect: Effect) -> None:
        """Act on an effect of the machine."""
        if type(effect) is Confirmed:
            self._confirmed(effect.last_add_confirmed)
        elif type(effect) is EnsembleChanged:
            self._bookies[:] = self.ensemble
            self.ledger.renew(self.machine.metadata, self.machine.version)
            for reason in effect.reasons:
                self._metrics.add(ENSEMBLE_CHANGES, labels=(("reason", reason.value),))
        elif type(effect) is UnderReplicated:
            self.driver.report_missing(self, effect)
        elif type(effect) is Failed:
            self._failed(effect)
        elif type(effect) is Done:
            self.ledger.renew(effect.metadata, effect.version)
            ledger_id = self.ledger.ledger_id
            self._fail_appends(LedgerClosedError(f"ledger {ledger_id} is closed; create another ledger to append more"))
            self.end()
            self.report_activity()

    def _confirmed(self, last: int) -> None:
        """Finish the batches and the calls of ``force`` up to an entry."""
        now_ns = time.monotonic_ns()
        for entries in self.appender.acknowledged(last):
            self._meter.confirmed(len(entries.sizes), entries.encoded_bytes, now_ns - entries.staged_ns)
        while self.forcing and self.forcing[0][0] <= last:
            self.driver.group.finish(self.forcing[0][1])
            self.forcing.pop(0)
        if self.appender.formed:
            self.driver.formed(self)  # the next batch may be sent now
        else:
            self.report_activity()

    def _failed(self, effect: Failed) -> None:
        """Fail the calls that are under way, with an unknown outcome, and all later calls, which do nothing."""
        has_waited = effect.reason in _WAITED_FOR
        error = self._waited_in_vain if has_waited else error_of
        under_way, later = (error(effect, outcome_unknown=unknown) for unknown in (True, False))
        if has_waited and self.appender.on_lost is not None:
            self.appender.lose(later)
            self._fail_forces(under_way)
        else:
            self._fail_appends(later, under_way)
            leave(self.driver, self.ledger, self.ensemble)  # else the log's writer lives, and recovers the ledger
        self.end(later)
        self.report_activity()

    def _waited_in_vain(self, effect: Failed, *, outcome_unknown: bool) -> PybkError:
        """Return the error of a writer that has waited for bookies or the metadata store: it is not to be retried."""
        detail = (
            f"{effect.detail}; its writer waited {self._patience_s:g} s (bookie_patience_seconds), and has ended: "
            f"once that is mended, open ledger {self.ledger.ledger_id} with recover=True to find its end, and "
            "continue in another ledger"
        )
        error = error_of(Failed(effect.reason, detail), outcome_unknown=outcome_unknown)
        error.retryable = False
        return error

    def _fail_appends(self, error: PybkError, under_way: PybkError | None = None) -> None:
        self._count_errors(self.appender.fail(error, under_way), error)
        self._fail_forces(under_way or error)

    def _count_errors(self, entries: int, error: PybkError) -> None:
        """Count entries that failed, if any did."""
        if entries:
            metadata = self.ledger.metadata
            labels = (("code", code_of(error)),)
            self._metrics.add(APPEND_ERRORS, entries, metadata.ledger_type, metadata.tier, labels)

    @property
    def ensemble(self) -> tuple[Bookie, ...]:
        """The bookies that it writes to; ``ledger`` may have earlier ones, because it is renewed at the end alone."""
        return self.machine.metadata.fragments[-1].ensemble

    @property
    def lag_bytes(self) -> int:
        """Confirmed bytes that the slowest bookie of the ensemble has not acknowledged. Threads: any."""
        return self.machine.lag_bytes

    def _fail_forces(self, error: PybkError) -> None:
        for _, completion in self.forcing:
            if not completion.done:
                completion.error = error
            self.driver.group.finish(completion)
        self.forcing = []

    # ---- calls of the backend, through the driver ----------------------------------------------------------------

    def close(self, now_ns: int) -> list[Effect]:
        """Begin to close the ledger after the last confirmed entry; the caller has waited for its appends."""
        return self.machine.close(now_ns)

    def bookies_changed(self, now_ns: int, leaving: frozenset[Bookie]) -> None:
        """Find bookies for the places of those that leave or were given up; called when bookies have changed.

        Args:
            now_ns: The time.
            leaving: The bookies that are drained.
        """
        if not self.completion.done:
            self.driver.perform(self, self.machine.bookies_changed(now_ns, leaving))

    def announce(self) -> None:
        """Show the bookies that this writer lives; called while a member of its ensemble is away."""
        if not self.completion.done:
            self.driver.perform(self, self.machine.announce())

    def force(self, last: int, completion: Completion) -> None:
        """Make everything up to an entry durable, then finish ``completion``."""
        if self.completion.done:
            completion.error = self.completion.error or self.appender.error
            self.driver.group.finish(completion)
            return
        self.submit(time.monotonic_ns())
        self.forcing.append((last, completion))
        self.driver.perform(self, self.machine.force(time.monotonic_ns()))


def leave_soon(driver: Driver, ledger: RemoteLedger, bookies: list[Bookie]) -> None:
    """Have the leader notify bookies that a writer was dropped. A finaliser, so it takes no lock."""
    driver.posted.append(partial(leave, driver, ledger, tuple(bookies)))
    driver.group.kick_background()
