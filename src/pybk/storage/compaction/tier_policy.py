"""Which closed ledgers a tier policy moves, found by what changed and when it is due, and moved many at a time.

The queue looks at all ledgers once after the store was opened: at once at those that the log's tail changed, and a few
in each second at those of the index. From then on it takes those that were closed or changed. A ledger that waits for
its time costs nothing.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from pybk.errors import NoSuchLedgerError, StorageRefusedError
from pybk.ledger import LedgerMetadata, LedgerState, PolicyMetadata
from pybk.storage.compaction.mover import MOVED_BYTES_MAX, MOVED_LEDGERS_MAX, UnmovedError
from pybk.storage.descriptor import LedgerDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pybk.config import TierPolicy
    from pybk.storage.compaction.live_store import LiveStore

logger = logging.getLogger(__name__)

LOOKED_AT: Final = 100
"""Ledgers looked at in each second after an open, some 10 µs each."""
_LOOKED_AT_ONCE: Final = 1000
_DAMAGED_NS: Final = 600 * 10**9
"""How long damaged records are left alone before a move reads them again: until then nobody can have restored much."""


class TierQueue:
    """Closed ledgers in the order in which a policy will want them moved.

    Threads: ``changed`` from any; all else from one at a time.

    Attributes:
        looking: Whether there are ledgers that it has not looked at since the open.
        damaged: Why a ledger was not moved whole, by ledger id: the target has its sound records, and the damaged ones
            are where they were. Each is tried again every 10 minutes, until its move succeeds or it is deleted. A
            store that is opened again does not know them: its index says that these ledgers were moved.

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
        self._again: dict[int, int] = {}  # when damaged ledgers are tried again that are not in the queue
        for descriptor in store.take_dirty().values():
            self._take_recovered(descriptor)

    def changed(self, metadata: LedgerMetadata) -> None:
        """Take note of a ledger whose metadata changed; costs an append to a queue."""
        if metadata.state is LedgerState.CLOSED:
            self._changed.append(metadata)

    def look(self, *, at_all: bool = False) -> None:
        """Take what changed, and look at some of the ledgers that the index knew when the store was opened.

        Args:
            at_all: Look at all the rest of those at once, and at damaged ones, whenever they were tried last.
        """
        for ledger_id in list(self.damaged):
            if not self._is_there(ledger_id):
                del self.damaged[ledger_id]
                self._again.pop(ledger_id, None)
            elif at_all and ledger_id in self._again:
                self._again[ledger_id] = 0
        while self._changed:
            self._take(self._changed.popleft())
        while self.looking:
            found = self._store.index.summaries(self._looked_at, _LOOKED_AT_ONCE if at_all else LOOKED_AT)
            for ledger in found:
                self._looked_at = ledger.ledger_id
                self._take(ledger)
            self.looking = bool(found)
            if not at_all:
                return

    def _is_there(self, ledger_id: int) -> bool:
        try:
            return not self._store.descriptor(ledger_id).deleted
        except NoSuchLedgerError:
            return False

    def _take_recovered(self, descriptor: LedgerDescriptor) -> None:
        """Take a ledger that the log's tail speaks of: the index knows it as it was before, or not at all.

        The index learns of a move when the entries have moved, so a ledger whose move was interrupted has another tier
        there.
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
        """Move the ledgers that are due; ``damaged`` has those of which damaged records stay where they are.

        Raises:
            StorageRefusedError: Some were not moved for now; they are moved the next time.
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
        """Note which ledgers were moved, and have those with damaged records tried again later."""
        self._unfinished.difference_update(ledger_ids)
        for ledger_id in ledger_ids:
            self.damaged.pop(ledger_id, None)
        self.damaged.update(unmoved)
        self._unfinished.update(unmoved)
        due = time.time_ns() + _DAMAGED_NS
        self._again.update(dict.fromkeys(unmoved, due))

    def _take_due(self) -> list[tuple[int, LedgerDescriptor]]:
        """Return the ledgers that are moved together next, with their times, no longer in the queue."""
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
