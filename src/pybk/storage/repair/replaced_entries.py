"""The entries of a bookie's store that are replaced by copies of peers, and are not read any more.

A damaged record stays where it is. A repair stores its entries again, in an extent that says that it replaces others,
and the newest copy of an entry is the one that is read.
"""

from __future__ import annotations

import numpy as np

from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.storage.format.extent import Extent


class Replacements:
    """The extents of a store that replace entries of others. Threads: one."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, Extent, int]]] = {}
        """The ledgers of the store with their extents and last entries, by the replicated ledger."""

    def add(self, metadata: LedgerMetadata, last: int) -> None:
        """Take a ledger of the store with its last durable entry; one that replaces nothing is passed over."""
        extent = Extent.of(metadata)
        if extent is not None and extent.replaces and last >= 0:
            self._found.setdefault(extent.ledger_id, []).append((metadata.ledger_id, extent, last))

    def hold(self, metadata: LedgerMetadata, first: int, last: int) -> bool:
        """Return whether newer extents hold all entries ``first`` to ``last`` of a ledger of the store."""
        extent = Extent.of(metadata)
        if extent is None or extent.ledger_id not in self._found:
            return False
        ids = extent.entry_ids(np.arange(first, last + 1, dtype=np.int64))
        held = np.zeros(len(ids), np.bool_)
        for ledger_id, newer, end in self._found[extent.ledger_id]:
            if ledger_id > metadata.ledger_id:
                places, rest = np.divmod(ids - newer.first, newer.stride)
                held |= (rest == 0) & (places >= 0) & (places <= end)
        return bool(held.all())
