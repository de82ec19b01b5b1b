"""The background checks of a bookie's store: how often, how fast, and how what was found is repaired from its peers."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pybk.errors import CorruptError, LedgerDeletedError, MetadataForgedError, PybkError, UnsupportedFormatError
from pybk.healing.scrub import ScrubKind
from pybk.healing.scrubbing import ScrubTerms, text_of
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.underreplication import RepairReason
from pybk.replication.fragments import fragment_end
from pybk.replication.quorum import Quorum
from pybk.storage.io.failures import CHECKING
from pybk.storage.repair.record_check import DamagedEntries

if TYPE_CHECKING:
    from collections.abc import Callable

    from pybk.bookie.server import BookieServer
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metrics import Metrics

QUIET_S: Final = 10.0
"""Seconds for which it is remembered whether repairs are held or paused."""


class BookieScrub:
    """A bookie as the owner of the checks of its store; see ``ScrubOwner``.

    Damaged entries that a ledger needs get a mark, by which this bookie's worker copies them from a peer. The copy lies
    next to the damaged record, which stays where it is.

    Args:
        bookie: The bookie.
        metadata: The cluster's metadata.
        metrics: The counters of the manager.
        share: Returns the share of the rate that the latency of appends leaves.

    Threads: as ``ScrubOwner``.
    """

    def __init__(
        self, bookie: BookieServer, metadata: ClusterMetadata, metrics: Metrics, share: Callable[[], float]
    ) -> None:
        self.store: Final = bookie.replicas.store
        self.metrics: Final = metrics
        self._bookie = bookie
        self._metadata = metadata
        self._share = share
        self._quiet = False
        self._looked_at = float("-inf")

    def terms(self) -> ScrubTerms | None:
        """Return what the settings of the cluster say."""
        settings = self._metadata.settings
        scrub = settings.scrub
        now = time.monotonic()
        if now >= self._looked_at + QUIET_S:
            self._quiet, self._looked_at = self._metadata.is_quiet(time.time_ns()), now
        return ScrubTerms(
            {ScrubKind.DEEP: scrub.deep_s, ScrubKind.LIGHT: scrub.light_s},
            scrub.bytes_per_second,
            {ScrubKind.DEEP: scrub.deep_asked_ns, ScrubKind.LIGHT: scrub.light_asked_ns},
            quiet=self._quiet and settings.repair.paused_until_ns <= time.time_ns(),
            share=self._share(),
        )

    def load(self) -> Mapping[str, Any] | None:
        """Return the notes in the metadata store; damaged ones count as none."""
        try:
            return self._metadata.read_scrub(self._bookie.bookie)
        except (CorruptError, MetadataForgedError, UnsupportedFormatError):
            return None  # they are replaced by the next ones

    def save(self, notes: Mapping[str, Any]) -> None:
        """Save notes in the metadata store."""
        self._metadata.write_scrub(self._bookie.bookie, notes)

    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries | None:
        """Mark the first of the entries that are needed; raises MetadataError if that is not durable."""
        needed = self._needed(metadata, damaged)
        if needed is None:
            return None
        ledger_id, first, last = needed
        self._metadata.mark_under_replicated(ledger_id, self._bookie.bookie, first, reason=RepairReason.DAMAGED)
        problem = f"ledger {ledger_id} entries {first} to {last} are damaged, and copied from a peer: {damaged.problem}"
        return DamagedEntries(ledger_id, first, last, problem)

    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        """Return whether some of the entries are needed."""
        return self._needed(metadata, damaged) is not None

    def _needed(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> tuple[int, int, int] | None:
        """Return the ledger, and the first and last of the damaged entries that belong to it and have no new copy here.

        Only entries count that this bookie is to hold: nobody copies others to it, such as those beyond the end of a
        closed ledger, which a recovery has cut, and surplus copies. While the metadata of the ledger cannot be read,
        all count.
        """
        valid = self._bookie.replicas.valid_entries(metadata, damaged.first_entry_id, damaged.last_entry_id)
        if valid is None:
            return None
        ledger_id, entries = valid
        try:
            ledger, _ = self._metadata.read_ledger(ledger_id)
        except LedgerDeletedError:
            return None
        except PybkError:
            return ledger_id, entries[0], entries[-1]
        placed = placed_entries(ledger, self._bookie.bookie, entries)
        return (ledger_id, placed[0], placed[-1]) if placed else None

    def show(self, damaged: Iterable[DamagedEntries]) -> None:
        """Show what waits for its copies among the troubles of the store."""
        found = list(damaged)
        if found:
            self.store.troubles.note(CHECKING, f"{text_of(found)}, which are to be copied from other bookies")
        else:
            self.store.troubles.clear(CHECKING)


def placed_entries(ledger: LedgerMetadata, bookie: Bookie, entries: Sequence[int]) -> list[int]:
    """Return those of some entries, ascending, whose write sets have a bookie.

    A bookie may hold others, too: an ensemble had it at another place, or none, since the entry was sent to it.
    """
    quorum = Quorum(ledger.ensemble_size, ledger.write_quorum, ledger.ack_quorum)
    found: list[int] = []
    for number, fragment in enumerate(ledger.fragments):
        if bookie in fragment.ensemble:
            end, place = fragment_end(ledger, number), fragment.ensemble.index(bookie)
            part = entries[bisect_left(entries, fragment.first_entry_id) :]
            part = part if end is None else part[: bisect_right(part, end)]
            found += (entry_id for entry_id in part if quorum.mask(entry_id) >> place & 1)
    return found
