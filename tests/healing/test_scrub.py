"""How fast the checks of a store go, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pybk.healing import scrub
from pybk.healing.scrub import ScrubOwner, ScrubTerms, StoreScrub
from pybk.healing.scrub_schedule import ScrubKind, part_of
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metrics import SCRUB_BYTES, Metrics
from pybk.storage.repair.record_check import DamagedEntries
from pybk.storage.store import Store
from tests.internals import store_of
from tests.storage.real_store import open_quick
from tests.test_spans import Recorder

BYTES_PER_SECOND = 1 << 20
STEP_NS = 20_000_000


class Clock:
    """Stands for the module ``time``; its time passes when a test says so."""

    def __init__(self) -> None:
        self.now_ns = 1

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def monotonic_ns(self) -> int:
        return self.now_ns

    def time_ns(self) -> int:
        return self.now_ns


class Owner(ScrubOwner):
    """The owner of a store, whose appends leave a share of the rate."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, Metrics())
        self.share = 1.0
        self.asked_ns = 0

    def terms(self) -> ScrubTerms:
        return ScrubTerms({ScrubKind.DEEP: 1e9}, BYTES_PER_SECOND, {ScrubKind.DEEP: self.asked_ns}, share=self.share)

    def load(self) -> None:
        return None

    def save(self, notes: Mapping[str, Any]) -> None:
        pass

    def report(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> DamagedEntries:
        raise AssertionError(f"{damaged} of a sound store")

    def still_needs(self, metadata: LedgerMetadata, damaged: DamagedEntries) -> bool:
        return True

    def remedy(self) -> str:
        raise AssertionError("nothing is damaged")

    def read_bytes(self) -> int:
        return sum(count for key, count in self.metrics.snapshot().counters.items() if key.name == SCRUB_BYTES)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scrub, "time", clock)
    monkeypatch.setattr(scrub, "TERMS_S", 0.0)  # the terms are asked at each step
    return clock


def test_the_checks_become_slower_while_appends_suffer(tmp_path: Path, clock: Clock) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append_many([bytes(1 << 17)] * 48)
        owner = Owner(store_of(manager))
        checks = StoreScrub(owner)
        rates = []
        for share in (1.0, 0.25, 0.5):
            owner.share, owner.asked_ns = share, owner.asked_ns + 1
            before, began_ns = owner.read_bytes(), clock.now_ns
            while checks.step() is not None:
                clock.now_ns += STEP_NS
            rates.append((owner.read_bytes() - before) / (clock.now_ns - began_ns) * 1e9)
    # a check charges what it reads afterwards, so the last piece of each walk is not waited for
    assert rates == [pytest.approx(share * BYTES_PER_SECOND, rel=0.25) for share in (1.0, 0.25, 0.5)]


def test_each_part_that_was_checked_has_a_span(tmp_path: Path, clock: Clock) -> None:
    hook = Recorder()
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        for _ in range(3):
            with manager.create_ledger(insecure=True) as writer:
                writer.append(b"x")
        owner = Owner(store_of(manager))
        checks = StoreScrub(owner, hook)
        owner.asked_ns = 1
        while checks.step() is not None:
            clock.now_ns += STEP_NS
    assert {each.name for each in hook.spans} == {"pybk.store.scrub_part"}
    parts = [each.attributes for each in hook.spans]
    assert {part_of(ledger_id) for ledger_id in range(3)} <= {each["pybk.part"] for each in parts}
    assert {(each["pybk.kind"], each["pybk.damaged"]) for each in parts} == {("deep", 0)}


@pytest.mark.parametrize(
    ("ledgers", "text"),
    [
        ([3], "1 damaged record in ledger 3"),
        ([3, 3], "2 damaged records in ledger 3"),
        ([3, 7, 3], "3 damaged records in ledgers 3, 7"),
        (range(12), "12 damaged records in ledgers 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"),
    ],
)
def test_a_reason_counts_damaged_records_and_names_their_ledgers(ledgers: list[int], text: str) -> None:
    assert scrub.text_of(DamagedEntries(each, 0, 9, "a bit") for each in ledgers) == text
