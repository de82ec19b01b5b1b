"""Space that checkpoints and moves leave behind, and that compaction gives back.

Files are freed whole: a file is dropped once nothing lives in it, and packed anew when little does. Records of the SSD
tier are freed one by one: their keys are remembered when the index has ceased to name them, and deleted afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pybk.feature_level import FeatureLevel
from pybk.storage.format.entries_mark import catalog_location, read_entries_mark, write_entries_mark
from pybk.storage.format.index_rows import entries_key

if TYPE_CHECKING:
    from pybk.storage.compaction.live_store import LiveStore
    from pybk.storage.format.record import RunLocations
    from pybk.storage.index.catalog_and_index import CatalogAndIndex


class Garbage:
    """What can be freed in one store.

    Threads: one at a time, under the scheduler's lock for jobs.

    Attributes:
        freed: Whether compaction may find something to free: something died in files that live on, or a tier had no
            space for entries, which are still in the log files.
        mixed: Log files that hold entries of other tiers, because those tiers had no space for them.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._unpurged: dict[int, set[bytes]] = defaultdict(set)
        self.freed = False
        self.mixed: set[int] = set()

    def keys_of_ledgers(self, ledger_ids: Iterable[int]) -> list[tuple[int, bytes]]:
        """Return file and key of all records that ledgers have in the SSD tier."""
        return [
            key
            for ledger_id in ledger_ids
            for page in self._store.index.pages(ledger_id)
            for key in self.keys_of(ledger_id, page, page[:0])
        ]

    def keys_of(self, ledger_id: int, old: RunLocations, new: RunLocations) -> list[tuple[int, bytes]]:
        """Return file and key of the records that ``old`` has in the SSD tier and ``new`` does not use."""
        used = {(int(run["file"]), int(run["first"])) for run in new}
        return [
            (file_id, entries_key(ledger_id, first))
            for file_id, first in zip(old["file"].tolist(), old["first"].tolist(), strict=True)
            if file_id in self._store.entries and (file_id, first) not in used
        ]

    def remember(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Have records deleted by the next ``purge``, because the index names them no longer."""
        for file_id, key in keys:
            self._unpurged[file_id].add(key)

    def purge(self) -> None:
        """Delete the records that nothing names any longer.

        A purge that fails for want of space is tried again before anything is put in the SSD tier, so no key of it is
        in use again by then.
        """
        for file_id, keys in list(self._unpurged.items()):
            with self._store.entries[file_id].write() as transaction:
                for key in sorted(keys):
                    transaction.delete(key)
                if self._store.feature_level > FeatureLevel.BASE:
                    # An index from before now names these keys: it must be known as older than this environment.
                    mark = read_entries_mark(transaction)
                    write_entries_mark(
                        transaction, mark._replace(removed_at=catalog_location(self._catalog_and_index.mark))
                    )
            del self._unpurged[file_id]
