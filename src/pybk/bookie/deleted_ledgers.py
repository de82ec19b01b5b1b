"""Finds the ledgers of a bookie that were deleted, by the auditor's pages, so idle ledgers cost nothing.

Theory of operation. ``look`` is called once a minute. Its first call asks for all the bookie's ledgers, in paced pages;
later ones read the head of the deletion pages, and the new pages if it has moved. As long as no auditor has begun to
write pages, each call asks for all ledgers. A page is only a hint: the tombstone decides, which is read and whose proof
is checked. A ledger is dropped when a second call finds its tombstone as well.

The recorded position is the page before the first one with a ledger that is still here. So a page that this bookie has
not acted upon is not removed, and neither are its tombstones. A page counts only one call after it was read (DT2): a
first entry that a client sent before the deletion may have been looked up by then, and stored after the page was read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from pybk.errors import CorruptError
from pybk.metadata.ledgers import LEDGERS_PAGE
from pybk.transport.cluster_keys import proves_deletion

if TYPE_CHECKING:
    from pybk.bookie.replicas import Replicas
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.1
"""Pause between two such requests."""


class DeletedLedgers:
    """The ledgers of a bookie that were deleted and are still here. Threads: one calls ``look``.

    Args:
        metadata: The cluster's metadata.
        replicas: The bookie's replicas.
        bookie: The bookie.
        drop: Called with each ledger to drop; the drop may happen later, or fail.
        pause: Called between two requests with the seconds to wait; returns True once the bookie ends.
        remember: Called with the proofs of the ledgers to drop, before ``drop``.
    """

    def __init__(
        self,
        metadata: ClusterMetadata,
        replicas: Replicas,
        bookie: Bookie,
        drop: Callable[[int], None],
        pause: Callable[[float], object],
        remember: Callable[[Mapping[int, bytes]], object] = dict,
    ) -> None:
        self._metadata = metadata
        self._replicas = replicas
        self._bookie = bookie
        self._drop = drop
        self._pause = pause
        self._remember = remember
        self._read_to: int | None = None
        """The last page that was read; None until the bookie has checked all its ledgers after the first page
        existed."""
        self._recent: set[int] = set()
        """Ledgers of the pages read last that were not here; their entries may have been on the way."""
        self._before: set[int] | None = None
        """The bookie's ledgers at the last call, if it checked all of them; entries of others may have been on the
        way."""
        self._recorded = -1
        """The position that this process has recorded."""
        self._after = -1
        """The page up to which no ledger for which the last call asked was written."""
        self._read_before = -1
        """The last page that the call before has read."""
        self._found: dict[int, int] = {}
        """Ledgers that the last call found deleted, each with a page up to which none of its entries was written."""

    def look(self) -> None:
        """Drop the ledgers whose tombstones the last call found as well, and look for others.

        Raises:
            PybkError: The metadata store failed; the next call does the same again.

        Cost: One read if there is nothing new.
        """
        last = self._metadata.last_deletion_page()
        own = set(self._replicas.ledgers())
        after, wanted = self._news(last)
        late = own & self._recent if self._before is None else own - self._before
        asked = own if wanted is None else late | (own & (wanted | self._found.keys()))
        deleted = self._deleted(sorted(asked))
        if deleted is None:
            return
        again = {ledger_id: deleted[ledger_id] for ledger_id in sorted(deleted.keys() & self._found.keys())}
        if again:
            self._remember(again)
        for ledger_id in again:
            self._drop(ledger_id)
        new = (wanted or set()) - late
        self._found = {each: self._found.get(each, after if each in new else self._after) for each in deleted}
        self._after = after
        if last is None:
            return
        self._read_to = last
        self._recent, self._before = (set(), own) if wanted is None else (wanted - own, None)
        position, self._read_before = min([self._read_before, *self._found.values()]), last
        if position > self._recorded:
            self._metadata.record_deletion_position(self._bookie, position)
            self._recorded = position

    def _news(self, last: int | None) -> tuple[int, set[int] | None]:
        """Return the ledgers to ask for, None for all, and a page up to which none of them was written."""
        if last is None or self._read_to is None:
            return -1, None
        try:
            return self._read_to, self._metadata.read_deletions(self._read_to, last)
        except CorruptError as error:
            logger.warning("bookie %s looks at all its ledgers, because of a deletion page: %s", self._bookie, error)
            return self._read_to, None

    def _deleted(self, ledger_ids: list[int]) -> dict[int, bytes] | None:
        """Return the proofs in tombstones that were made with their ledgers' passwords; None if the bookie ends."""
        deleted: dict[int, bytes] = {}
        for start in range(0, len(ledger_ids), LEDGERS_PAGE):
            if start and self._pause(PAUSE_SECONDS):
                return None
            page = ledger_ids[start : start + LEDGERS_PAGE]
            proofs = self._metadata.deletion_proofs(page)
            found = zip(page, proofs, strict=True)
            deleted |= {each: proof for each, proof in found if proof is not None and self._is_proven(each, proof)}
        return deleted

    def _is_proven(self, ledger_id: int, proof: bytes) -> bool:
        state = self._replicas.state(ledger_id)
        if state is None or state.header is None:
            return True  # only a fence is stored, or nothing, so there is no verifier to check the tombstone by
        described = self._metadata.check_description(state.header.encoded, where=f"ledger {ledger_id}")
        if proves_deletion(described.verifier, proof, ledger_id):
            return True
        logger.warning("ledger %d has a tombstone that was made without its password; it is kept", ledger_id)
        return False
