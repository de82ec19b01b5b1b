"""The background checks of an embedded store: how often, how fast, and where what was found is shown."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pybk.healing.scrub import ScrubKind
from pybk.healing.scrubbing import ScrubTerms, text_of
from pybk.healing.throttle import SAMPLE_NS, ForegroundGuard
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metrics import APPEND_LATENCY, Metrics
from pybk.storage.io.failures import CHECKING
from pybk.storage.repair.record_check import DamagedEntries
from pybk.storage.repair.scrub_notes import load_notes, save_notes
from pybk.storage.store import Store


class EmbeddedScrub:
    """An embedded store as the owner of its checks; see ``ScrubOwner``.

    The only copy of an entry is here, so damage cannot be mended: the health of the store says what is damaged until
    the file was restored or the ledger deleted.

    Args:
        store: The store; its configuration has the period and the rate.

    Threads: the scrub's; all of ``show``, ``report`` and ``still_needs`` any.
    """

    def __init__(self, store: Store) -> None:
        self.store: Final = store
        self.metrics: Final[Metrics] = store.metrics
        self._guard = ForegroundGuard()
        self._sampled_ns = time.monotonic_ns()
        self._seen: Counter[int] = Counter()

    def terms(self) -> ScrubTerms | None:
        """Return the deep check alone, at the rate of the configuration; None if that says never."""
        config = self.store.config
        if not config.scrub_seconds:
            return None
        return ScrubTerms(
            {ScrubKind.DEEP: config.scrub_seconds}, config.scrub_bytes_per_second, {}, share=self._share()
        )

    def _share(self) -> float:
        """Return the share of the rate that appends leave, from a sample every ten seconds."""
        now_ns = time.monotonic_ns()
        if now_ns - self._sampled_ns >= SAMPLE_NS:
            self._sampled_ns = now_ns
            before, self._seen = self._seen, appends_of(self.metrics)
            self._guard.sample(p99_of(self._seen - before))
        return self._guard.factor

    def load(self) -> Mapping[str, Any] | None:
        """Return the notes in the store's directory."""
        return load_notes(self.store.fs, self.store.volumes.root)

    def save(self, notes: Mapping[str, Any]) -> None:
        """Save notes in the store's directory."""
        save_notes(self.store.fs, self.store.volumes.root, notes)

    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries | None:
        """Return the entries: there is no other copy to mend them from."""
        return damaged

    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        """Return True: nothing is copied anew."""
        return True

    def show(self, damaged: Iterable[DamagedEntries]) -> None:
        """Show what is damaged among the troubles of the store."""
        found = list(damaged)
        if not found:
            self.store.troubles.clear(CHECKING)
            return
        root = self.store.volumes.root
        self.store.troubles.note(
            CHECKING,
            f"{text_of(found)}; run `pybk store verify {root}`, and restore the files that it names, or delete the "
            "ledgers",
        )


def appends_of(metrics: Metrics) -> Counter[int]:
    """Return how many appends took how long: by the upper bound of each bucket, nanoseconds."""
    found: Counter[int] = Counter()
    for key, histogram in metrics.snapshot().histograms.items():
        if key.name == APPEND_LATENCY:
            for highest, count in histogram.buckets:
                found[highest] += count
    return found


def p99_of(appends: Counter[int]) -> int | None:
    """Return the 99th percentile of counted latencies, nanoseconds; None if there are none."""
    wanted, seen = 0.99 * appends.total(), 0
    for highest, count in sorted(appends.items()):
        seen += count
        if seen >= wanted:
            return highest
    return None
