"""Records that checkpoints and moves have made obsolete, and whose space compaction frees.

Most tiers free whole files: a file is dropped once it has no live entries, and packed when it has few. The SSD tier
frees single records (``Tier.files_are_freed_whole`` is False): they are remembered once the index no longer names them,
and deleted afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pybk.storage.tiers.registry import tier_of_kind

if TYPE_CHECKING:
    from pybk.storage.compaction.live_store import LiveStore
    from pybk.storage.format.record import RunLocations
    from pybk.storage.index.catalog_and_index import CatalogAndIndex


class RecordKey(NamedTuple):
    """A record of a tier that frees records one by one: its file, its ledger and its first entry."""

    file_id: int
    ledger_id: int
    first_entry_id: int


class Garbage:
    """The space that can be freed in one store.

    Threads: one at a time, under the scheduler's lock for jobs.

    Attributes:
        freed: Whether compaction may find space to free: entries died in files that also have live ones, or a tier had
            no space for entries, which are still in the log files.
        mixed: Log files that hold entries of other tiers, because those tiers had no space for them.
    """

    def __init__(self, store: LiveStore, catalog_and_index: CatalogAndIndex) -> None:
        self._store = store
        self._catalog_and_index = catalog_and_index
        self._unpurged: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.freed = False
        self.mixed: set[int] = set()

    def keys_of_ledgers(self, ledger_ids: Iterable[int]) -> list[RecordKey]:
        """Return those records of ledgers that are freed one by one."""
        return [
            key
            for ledger_id in ledger_ids
            for page in self._store.index.pages(ledger_id)
            for key in self.keys_of(ledger_id, page, page[:0])
        ]

    def keys_of(self, ledger_id: int, old: RunLocations, new: RunLocations) -> list[RecordKey]:
        """Return the records that ``old`` uses and ``new`` does not, of tiers that free records one by one."""
        rows = self._store.volumes.rows
        files = old["file"].tolist()
        single = {file_id for file_id in set(files) if not tier_of_kind(rows[file_id].kind).files_are_freed_whole}
        if not single:
            return []
        used = {(int(run["file"]), int(run["first"])) for run in new}
        return [
            RecordKey(file_id, ledger_id, first)
            for file_id, first in zip(files, old["first"].tolist(), strict=True)
            if file_id in single and (file_id, first) not in used
        ]

    def remember(self, keys: Iterable[RecordKey]) -> None:
        """Have records freed by the next ``purge``, because the index names them no longer."""
        for key in keys:
            self._unpurged[key.file_id].add((key.ledger_id, key.first_entry_id))

    def purge(self) -> None:
        """Free the remembered records.

        A purge that fails for lack of space is retried before anything else is written to the tier, so none of its
        records can be in use again by then.
        """
        for file_id, records in list(self._unpurged.items()):
            tier = tier_of_kind(self._store.volumes.rows[file_id].kind)
            tier.free_records(self._store, file_id, records, self._catalog_and_index.mark)
            del self._unpurged[file_id]
