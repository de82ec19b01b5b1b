"""A writer's conversation with its ensemble: batches out, acknowledgements in, and the end."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from pybk.client.append_queue import AppendQueue
from pybk.client.driver import Conversation
from pybk.client.machine_errors import error_of
from pybk.errors import (
    LedgerClosedError,
    PybkError,
)
from pybk.group_commit import Completion
from pybk.replication.entry_runs import cut
from pybk.replication.inflight import Batch
from pybk.replication.messages import Confirmed, Done, Effect, Failed, UnderReplicated
from pybk.replication.quorum import Quorum
from pybk.replication.writer import WriterMachine

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.remote_ledger import RemoteLedger
    from pybk.metrics import MetricsScope


class Writing(Conversation[WriterMachine]):
    """The writer of one ledger.

    Attributes:
        appender: Where appends are staged.

    Threads: the appender's are any; all else is called by the driver.
    """

    def __init__(
        self,
        driver: Driver,
        ledger: RemoteLedger,
        meter: MetricsScope,
        *,
        straggler_bytes: int,
        outstanding_bytes_max: int,
    ) -> None:
        metadata = ledger.metadata
        machine = WriterMachine(
            metadata,
            ledger.version,
            straggler_bytes=straggler_bytes,
            deferred=ledger.deferred,
            seal=lambda closed: ledger.sealed(closed, ledger.last_prefix),
        )
        super().__init__(driver, ledger, machine)
        self.appender = AppendQueue(ledger, driver.group, partial(driver.formed, self), outstanding_bytes_max)
        self._meter = meter
        self._quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        self._forcing: list[tuple[int, Completion]] = []
        driver.attach(self)

    # ---- what the driver asks ------------------------------------------------------------------------------------

    def submit(self, now_ns: int) -> None:
        """Send the batches that have formed, as many as may be under way."""
        for batch in self.appender.take():
            entries = batch.entries
            runs = cut(entries.first, entries.sizes, entries.parts, self._quorum)
            sent = Batch(entries.first, batch.last, entries.length_at_end, runs)
            self.driver.perform(self, self.machine.submit(sent, now_ns))
        self._tell_activity()

    def _tell_activity(self) -> None:
        waited = bool(self._forcing) or (not self.ledger.deferred and self.machine.outstanding > 0)
        self.driver.active(self, waited=waited and not self.completion.done)

    def send_lac(self) -> None:
        """Tell bookies the LAC if no add will."""
        self.driver.perform(self, self.machine.send_lac())

    # ---- what the machine says -----------------------------------------------------------------------------------

    def take(self, effect: Effect) -> None:
        """Act on what the machine says."""
        if type(effect) is Confirmed:
            self._confirmed(effect.last_add_confirmed)
        elif type(effect) is UnderReplicated:
            self.driver.report_missing(self, effect)
        elif type(effect) is Failed:
            error = error_of(effect, outcome_unknown=True)
            self.appender.fail(error)
            self._forced(error)
            self.end(error)
            self._tell_activity()
        elif type(effect) is Done:
            self.ledger.renew(effect.metadata, effect.version)
            error = LedgerClosedError(f"ledger {self.ledger.ledger_id} is closed; create another ledger to append more")
            self.appender.fail(error)
            self._forced(error)
            self.end()
            self._tell_activity()

    def _confirmed(self, last: int) -> None:
        now_ns = time.monotonic_ns()
        for entries in self.appender.acknowledged(last):
            self._meter.appended(len(entries.sizes), entries.encoded_bytes, now_ns - entries.staged_ns)
        while self._forcing and self._forcing[0][0] <= last:
            self.driver.group.finish(self._forcing[0][1])
            self._forcing.pop(0)
        if self.appender.formed:
            self.driver.formed(self)
        else:
            self._tell_activity()

    def _forced(self, error: PybkError) -> None:
        for _, commit in self._forcing:
            if not commit.done:
                commit.error = error
            self.driver.group.finish(commit)
        self._forcing = []

    # ---- what the application asks, through the driver -----------------------------------------------------------

    def close(self, now_ns: int) -> list[Effect]:
        """Begin to close the ledger; everything staged was acknowledged, or will not be of it."""
        return self.machine.close(now_ns)

    def bookies_changed(self, now_ns: int) -> None:
        """Look again for bookies in the places of those that were given up."""
        if not self.completion.done:
            self.driver.perform(self, self.machine.bookies_changed(now_ns))

    def give_up(self, error: PybkError, under_way: PybkError) -> None:
        """Fail for good, what was sent or staged with the second error, as the machine is not asked any more."""
        self.appender.fail(self.appender.error or error, under_way)
        self._forced(under_way)
        self.end(under_way)

    def force(self, last: int, commit: Completion) -> None:
        """Have everything up to an entry made durable, and ``commit`` done then."""
        if self.completion.done:
            commit.error = self.completion.error or self.appender.error
            self.driver.group.finish(commit)
            return
        self.submit(time.monotonic_ns())
        self._forcing.append((last, commit))
        self.driver.perform(self, self.machine.force(time.monotonic_ns()))
