"""Re-replication: what lost bookies held is copied, byte for byte, to others that take their places."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pybk.backend import Replicated
from pybk.client.driver import Conversation
from pybk.client.machine_errors import error_of
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import LedgerDeletedError, PybkError
from pybk.ledger import Bookie, LedgerMetadata, LedgerState
from pybk.replication.fragments import fragment_end
from pybk.replication.messages import Done, Effect, Failed
from pybk.replication.rereplication import RereplicationMachine

if TYPE_CHECKING:
    from pybk.client.driver import Driver
    from pybk.client.membership import Membership
    from pybk.metadata.underreplication import UnderReplicatedLedger

logger = logging.getLogger(__name__)


class FragmentCopy(Conversation[RereplicationMachine]):
    """Copies one fragment."""

    def take(self, effect: Effect) -> None:
        """End with the copy."""
        if type(effect) is Done:
            self.end()
        elif type(effect) is Failed:
            self.end(error_of(effect))


class Rereplicator:
    """Finds fragments that bookies are missing from, and has them copied.

    Threads: one at a time.
    """

    def __init__(self, driver: Driver, membership: Membership) -> None:
        self._driver = driver
        self._membership = membership
        self._fragments = 0
        self._left: list[str] = []

    def replicate(self, ledgers: Iterable[tuple[LedgerMetadata, int]], leaving: str | None) -> Replicated:
        """Complete the fragments of some ledgers.

        Args:
            ledgers: Metadata and version of each.
            leaving: A bookie that counts as lost though it may be there; None for none.
        """
        self._membership.refresh()
        count = 0
        for metadata, version in ledgers:
            count += 1
            self._complete(metadata, version, leaving)
        return Replicated(count, self._fragments, tuple(self._left))

    def _complete(self, metadata: LedgerMetadata, version: int, leaving: str | None) -> None:
        """Complete the fragments of one ledger."""
        records = list(self._records(metadata.ledger_id))
        if records:  # they may be of bookies that came into an ensemble since the metadata were read
            try:
                metadata, version = self._membership.metadata.read_ledger(metadata.ledger_id)
            except LedgerDeletedError:
                self._cross_out(records)
                return
            except PybkError as error:
                logger.warning("ledger %d cannot be completed now: %s", metadata.ledger_id, error)
                self._left.append(f"ledger {metadata.ledger_id}: {error}")
                return
        short = {record.bookie for record in records}
        done = True
        for number, fragment in enumerate(metadata.fragments):
            lost = {bookie for bookie in fragment.ensemble if self._is_lost(bookie, leaving)}
            filled = short.intersection(fragment.ensemble) - lost
            if lost or filled:
                done &= self._copy(metadata, version, number, frozenset(lost | filled), frozenset(filled))
        # A recovery that has not closed the ledger yet may have records of bookies that no metadata name as yet.
        if done and metadata.state is not LedgerState.IN_RECOVERY:
            self._cross_out(records)

    def _cross_out(self, records: Iterable[UnderReplicatedLedger]) -> None:
        for record in records:
            self._membership.metadata.unmark_under_replicated(record)

    def _is_lost(self, bookie: Bookie, leaving: str | None) -> bool:
        return bookie.bookie_id == leaving or self._membership.find(bookie) is None

    def _records(self, ledger_id: int) -> Iterator[UnderReplicatedLedger]:
        for record in self._membership.metadata.list_under_replicated(after=ledger_id - 1):
            if record.ledger_id == ledger_id:
                yield record

    def _copy(
        self, metadata: LedgerMetadata, version: int, number: int, lost: frozenset[Bookie], stay: frozenset[Bookie]
    ) -> bool:
        """Copy one fragment; return whether it is complete now."""
        first = metadata.fragments[number].first_entry_id
        what = f"ledger {metadata.ledger_id}, fragment from entry {first}"
        if fragment_end(metadata, number) is None:
            self._left.append(
                f"{what}: the ledger is {metadata.state.value}; open it with recovery, then replicate again"
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
        self._fragments += 1
        return True
