"""Moves of closed ledgers by a tier policy, many at a time.

The queue examines all ledgers once after the store was opened: those that the log's tail changed at once, and those of
the index a few in each second. From then on it examines ledgers that were closed or changed. A ledger that waits until
it is due costs nothing.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from pybk.errors import NoSuchLedgerError, StorageRefusedError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState, PolicyMetadata
from pybk.storage.compaction.mover import MOVED_BYTES_MAX, MOVED_LEDGERS_MAX, UnmovedError
from pybk.storage.descriptor import LedgerDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pybk.config import TierPolicy
    from pybk.storage.live_store import LiveStore

logger = logging.getLogger(__name__)

LOOKED_AT: Final = 100
"""Ledgers looked at in each second after an open, some 10 µs each."""
_DAMAGED_NS: Final = 600 * 10**9
"""The time for which damaged records are left alone before a move reads them again, because few are restored sooner."""


class TierQueue:
    """Closed ledgers in the order in which they become due by a policy.

    Threads: ``changed`` from any; all else from one at a time.

    Attributes:
        looking: Whether some ledgers were not examined since the open.
        damaged: By ledger id, the reason why a ledger was not moved completely: the target has its sound records, and
            the damaged ones stay in their files. Each is retried every 10 minutes, until its move succeeds or it is
            deleted. After another open they are not known, because the index says that these ledgers were moved.

    Args:
        store: The store.
        policy: The policy.
    """

    def __init__(self, store: LiveStore, policy: TierPolicy) -> None:
        self._store = store
        self._policy = policy
        self._min_age_ns = int(policy.min_age_seconds * 1e9)
        self._changed: deque[LedgerMetadata] = deque()
        self.due: list[tuple[int, int]] = []
        """A heap of when each ledger is due, and its id."""
        self._unfinished: set[int] = set()  # their metadata name the target, but their entries may lie elsewhere
        self._looked_at = -1
        self.looking = True
        self.damaged: dict[int, str] = {}
        self._again: dict[int, int] = {}  # when damaged ledgers, which are not in the queue, are retried
        for descriptor in store.take_dirty().values():
            self._take_recovered(descriptor)

    def changed(self, metadata: LedgerMetadata) -> None:
        """Note a ledger whose metadata changed; costs an append to a queue."""
        if metadata.state is LedgerState.CLOSED:
            self._changed.append(metadata)

    def look(self) -> None:
        """Examine the changed ledgers, and some of those that the index had when the store was opened."""
        for ledger_id in list(self.damaged):
            if not self._is_there(ledger_id):
                del self.damaged[ledger_id]
                self._again.pop(ledger_id, None)
        while self._changed:
            self._take(self._changed.popleft())
        if self.looking:
            found = self._store.index.summaries(self._looked_at, LOOKED_AT)
            for ledger in found:
                self._looked_at = ledger.ledger_id
                self._take(ledger)
            self.looking = bool(found)

    def _is_there(self, ledger_id: int) -> bool:
        try:
            return not self._store.descriptor(ledger_id).deleted
        except NoSuchLedgerError:
            return False

    def _take_recovered(self, descriptor: LedgerDescriptor) -> None:
        """Examine a ledger that the log's tail changed: the index has its earlier state, or none.

        The index records a move after the entries have moved, so it has another tier for a ledger whose move was
        interrupted.
        """
        metadata = descriptor.metadata
        if metadata.state is not LedgerState.CLOSED or descriptor.deleted:
            return
        self._take(metadata)
        if metadata.tier is self._policy.target:
            row = self._store.index.ledger(metadata.ledger_id)
            if row is not None and row.metadata.tier is not metadata.tier:
                self._unfinished.add(metadata.ledger_id)
                heapq.heappush(self.due, (0, metadata.ledger_id))

    def _take(self, ledger: LedgerMetadata | PolicyMetadata) -> None:
        if self._wants(ledger):
            heapq.heappush(self.due, (ledger.creation_time_ns + self._min_age_ns, ledger.ledger_id))

    def _wants(self, ledger: LedgerMetadata | PolicyMetadata) -> bool:
        policy = self._policy
        return (
            ledger.state is LedgerState.CLOSED
            and ledger.tier is not policy.target
            and ledger.length >= policy.min_bytes
        )

    def move_due(self, stopping: Callable[[], bool]) -> None:
        """Move the ledgers that are due; ``damaged`` then has those whose damaged records were not moved.

        Raises:
            StorageRefusedError: Some were not moved for now; they are retried the next time.
        """
        while not stopping():
            taken = self._take_due()
            if not taken:
                return
            unmoved: dict[int, str] = {}
            try:
                self._store.move_all([descriptor for _, descriptor in taken], self._policy.target)
            except UnmovedError as error:
                unmoved = {one.ledger_id: str(UnmovedError([one], self._policy.target)) for one in error.unmoved}
            except StorageRefusedError as error:
                logger.warning("%d ledgers stay where they are for now: %s", len(taken), error)
                for due, descriptor in taken:
                    heapq.heappush(self.due, (due, descriptor.ledger_id))
                    self._unfinished.add(descriptor.ledger_id)
                raise
            self._moved([descriptor.ledger_id for _, descriptor in taken], unmoved)

    def _moved(self, ledger_ids: Sequence[int], unmoved: Mapping[int, str]) -> None:
        """Note which ledgers were moved, and have those with damaged records retried later."""
        self._unfinished.difference_update(ledger_ids)
        for ledger_id in ledger_ids:
            self.damaged.pop(ledger_id, None)
        self.damaged.update(unmoved)
        self._unfinished.update(unmoved)
        due = time.time_ns() + _DAMAGED_NS
        self._again.update(dict.fromkeys(unmoved, due))

    def _take_due(self) -> list[tuple[int, LedgerDescriptor]]:
        """Remove and return the ledgers that are moved together next, with their times."""
        taken: dict[int, tuple[int, LedgerDescriptor]] = {}
        nbytes = 0
        now_ns = time.time_ns()
        for ledger_id in [ledger_id for ledger_id, due in self._again.items() if due <= now_ns]:
            heapq.heappush(self.due, (self._again.pop(ledger_id), ledger_id))
        while self.due and self.due[0][0] <= now_ns:
            if len(taken) >= MOVED_LEDGERS_MAX or nbytes >= MOVED_BYTES_MAX:
                break
            due, ledger_id = heapq.heappop(self.due)
            if ledger_id in taken:
                continue
            try:
                descriptor = self._store.descriptor(ledger_id)
            except NoSuchLedgerError:
                self._unfinished.discard(ledger_id)
                continue
            if ledger_id in self._unfinished or self._wants(descriptor.metadata):
                taken[ledger_id] = due, descriptor
                nbytes += descriptor.metadata.length
        return [taken[ledger_id] for ledger_id in sorted(taken)]
