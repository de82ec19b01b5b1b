"""Which closed ledgers a tier policy moves, found by what changed and when it is due, and moved many at a time.

All ledgers are looked at once after the store was opened, a few at a time; from then on, those that were closed or
changed. What waits for its time costs nothing.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from pybk.errors import NoSuchLedgerError, StorageRefusedError
from pybk.ledger import LedgerMetadata, LedgerState
from pybk.storage.descriptor import LedgerDescriptor

if TYPE_CHECKING:
    from collections.abc import Callable

    from pybk.config import TierPolicy
    from pybk.storage.store import Store

logger = logging.getLogger(__name__)

MOVED_LEDGERS_MAX: Final = 1024
MOVED_BYTES_MAX: Final = 64 << 20
"""So much is moved together, with one commit of the index; it is in memory 16 MiB at a time."""

_LOOKED_AT: Final = 150


class TierQueue:
    """Closed ledgers in the order in which a policy will want them moved.

    Threads: ``changed`` from any; all else from one at a time.

    Args:
        store: The store.
        policy: The policy.
    """

    def __init__(self, store: Store, policy: TierPolicy) -> None:
        self._store = store
        self._policy = policy
        self._min_age_ns = int(policy.min_age_seconds * 1e9)
        self._changed: deque[LedgerMetadata] = deque()
        self._due: list[tuple[int, int]] = []
        self._looked_at = -1
        self._looked = False

    def changed(self, metadata: LedgerMetadata) -> None:
        """Take note of a ledger whose metadata changed; costs an append to a queue."""
        if metadata.state is LedgerState.CLOSED:
            self._changed.append(metadata)

    def look(self, count: int | None = _LOOKED_AT) -> None:
        """Look at some of the ledgers that were there when the store was opened; at all if ``count`` is None."""
        while self._changed:
            self._take(self._changed.popleft())
        if self._looked:
            return
        for number, metadata in enumerate(self._store.ledgers(self._looked_at), 1):
            self._looked_at = metadata.ledger_id
            self._take(metadata)
            if number == count:
                return
        self._looked = True

    def _take(self, metadata: LedgerMetadata) -> None:
        if self._wants(metadata):
            heapq.heappush(self._due, (metadata.creation_time_ns + self._min_age_ns, metadata.ledger_id))

    def _wants(self, metadata: LedgerMetadata) -> bool:
        policy = self._policy
        return (
            metadata.state is LedgerState.CLOSED
            and metadata.tier is not policy.target
            and metadata.length >= policy.min_bytes
        )

    def move_due(self, stopping: Callable[[], bool]) -> None:
        """Move the ledgers that are due.

        Raises:
            StorageRefusedError: Some were not moved for now; they are moved the next time.
        """
        while not stopping():
            taken = self._take_due()
            if not taken:
                return
            try:
                self._store.move_all([descriptor for _, descriptor in taken], self._policy.target)
            except StorageRefusedError as error:
                logger.warning("%d ledgers stay where they are for now: %s", len(taken), error)
                for due, descriptor in taken:
                    heapq.heappush(self._due, (due, descriptor.ledger_id))
                raise

    def _take_due(self) -> list[tuple[int, LedgerDescriptor]]:
        """Return the ledgers that are moved together next, with their times, no longer in the queue."""
        taken: dict[int, tuple[int, LedgerDescriptor]] = {}
        nbytes = 0
        now_ns = time.time_ns()
        while self._due and self._due[0][0] <= now_ns:
            if len(taken) >= MOVED_LEDGERS_MAX or nbytes >= MOVED_BYTES_MAX:
                break
            due, ledger_id = heapq.heappop(self._due)
            try:
                descriptor = self._store.descriptor(ledger_id)
            except NoSuchLedgerError:
                continue
            if ledger_id not in taken:
                taken[ledger_id] = due, descriptor
                nbytes += descriptor.metadata.length
        return [taken[ledger_id] for ledger_id in sorted(taken)]
