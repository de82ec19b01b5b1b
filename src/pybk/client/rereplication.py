"""Re-replication: completes the fragments of ledgers from the bookies that are left.

Theory of operation
-------------------

``Rereplicator`` looks at one ledger after the other. A bookie of a fragment is *lost* if it is not registered, if
another instance of it is, or if the caller names it as leaving (``leaving``). It is *short* if it is available and a
mark of under-replication in the metadata store names it: it misses entries that its writer could not add.

- A lost bookie is replaced: its entries are copied to a bookie that takes its place in the ensemble.
- A short bookie is filled up, and keeps its place (``stay``).

One ``FragmentCopy`` does both for a fragment; ``pybk.replication.rereplication`` has the machine, and says why its
order of copy, sync and compare-and-set is safe. A fragment without an end is not copied: its writer replaces bookies
itself, and if the writer is gone, a recovery has to close the ledger first.

The marks of a ledger are removed only if all its fragments were completed, and the ledger is not in recovery: a
recovery may have marked bookies of an ensemble that it has not written to the metadata yet. The marks are read before
the metadata, so each mark that is removed was covered by the copies. Anything that fails leaves marks and metadata as
they were, and is reported in ``Replicated.left``: calling again continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pybk.backend import Replicated
from pybk.client.driver import Conversation
from pybk.client.machine_errors import error_of
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import LedgerDeletedError, PybkError
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.replication.fragments import fragment_end
from pybk.replication.messages import Done, Effect, Failed
from pybk.replication.rereplication import RereplicationMachine

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.metadata.underreplication import UnderReplicatedLedger

logger = logging.getLogger(__name__)


class FragmentCopy(Conversation[RereplicationMachine]):
    """The conversation that copies one fragment."""

    def take(self, effect: Effect) -> None:
        """End when the machine has ended, with its error if it failed."""
        if type(effect) is Done:
            self.end()
        elif type(effect) is Failed:
            self.end(error_of(effect))


class Rereplicator:
    """Finds fragments that are not complete, and completes them; used for one call of ``replicate``.

    Threads: one at a time.
    """

    def __init__(self, driver: Driver, membership: Membership) -> None:
        self._driver = driver
        self._membership = membership
        self._fragments = 0
        """The number of completed fragments."""
        self._left: list[str] = []
        """The work that could not be done, with the reasons: one text each."""

    def replicate(self, ledgers: Iterable[tuple[LedgerMetadata, int]], leaving: str | None) -> Replicated:
        """Complete the fragments of ledgers, as far as that is possible now.

        Args:
            ledgers: Metadata and version of each.
            leaving: Name of a bookie that counts as lost even if it is available; None: none does.

        Returns:
            What was done, and what is left with its reason; a ledger that cannot be completed raises nothing.
        """
        self._membership.refresh()
        count = 0
        for metadata, version in ledgers:
            count += 1
            self._complete(metadata, version, leaving)
        return Replicated(count, self._fragments, tuple(self._left))

    def _complete(self, metadata: LedgerMetadata, version: int, leaving: str | None) -> None:
        """Complete the fragments of one ledger."""
        marks = self._membership.metadata.marks_of(metadata.ledger_id)
        if marks:  # a marked bookie may have joined the ensemble after the caller read the metadata
            try:
                metadata, version = self._membership.metadata.read_ledger(metadata.ledger_id)
            except LedgerDeletedError:
                self._unmark(marks)
                return
            except PybkError as error:
                logger.warning("ledger %d cannot be completed now: %s", metadata.ledger_id, error)
                self._left.append(f"ledger {metadata.ledger_id}: {error}")
                return
        short = {mark.bookie for mark in marks}
        done = True
        for number, fragment in enumerate(metadata.fragments):
            lost = {bookie for bookie in fragment.ensemble if self._is_lost(bookie, leaving)}
            filled = short.intersection(fragment.ensemble) - lost
            if lost or filled:
                done &= self._copy(metadata, version, number, frozenset(lost | filled), frozenset(filled))
        # A recovery may have marked bookies of an ensemble that it has not written to the metadata yet.
        if done and metadata.state is not LedgerState.IN_RECOVERY:
            self._unmark(marks)

    def _unmark(self, marks: Iterable[UnderReplicatedLedger]) -> None:
        for mark in marks:
            self._membership.metadata.unmark_under_replicated(mark)

    def _is_lost(self, bookie: Bookie, leaving: str | None) -> bool:
        return bookie.bookie_id == leaving or self._membership.find(bookie) is None

    def _copy(
        self, metadata: LedgerMetadata, version: int, number: int, lost: frozenset[Bookie], stay: frozenset[Bookie]
    ) -> bool:
        """Copy one fragment; return whether it is complete now."""
        first = metadata.fragments[number].first_entry_id
        what = f"ledger {metadata.ledger_id}, fragment from entry {first}"
        if fragment_end(metadata, number) is None:
            self._left.append(
                f"{what}: the ledger is {metadata.state.value}; call open_ledger({metadata.ledger_id}, recover=True), "
                "then replicate again"
            )
            return False
        ledger = RemoteLedger(metadata, version, self._membership.metadata.describe(metadata))
        machine = RereplicationMachine(metadata.ledger_id, first, lost, stay=stay)
        copy = FragmentCopy(self._driver, ledger, machine)
        try:
            self._driver.run(copy, machine.start)
        except PybkError as error:
            logger.warning("%s cannot be completed now: %s", what, error)
            self._left.append(f"{what}: {error}")
            return False
        if machine.unfilled:
            self._left.append(f"{what}: {machine.unfilled}")
            return False
        self._fragments += 1
        return True
