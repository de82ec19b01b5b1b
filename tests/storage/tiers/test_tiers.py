"""A further tier is one class and one entry of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from pybk.config import StoreConfig
from pybk.flags import StorageHint
from pybk.manager import LedgerManager
from pybk.storage.format.index_rows import FileRow
from pybk.storage.repair.verify import verify_store
from pybk.storage.tiers import registry
from pybk.storage.tiers.cold_tier import ColdTier
from pybk.storage.tiers.lmdb_tier import LmdbTier
from pybk.storage.tiers.tier import Run, Tier, TierStore, TierWriter
from tests.internals import store_of

PAYLOADS = [b"%d" % number * 100 for number in range(300)]


class CountingWriter(TierWriter):
    """Passes everything to another writer, and counts records."""

    def __init__(self, writer: TierWriter, records: list[int]) -> None:
        self._writer = writer
        self._records = records

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        self._records.append(len(sizes))
        return self._writer.add(ledger_id, first, sizes, parts)

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        self._records.append(count)
        return self._writer.add_body(ledger_id, first, count, body)

    def finish(self) -> list[FileRow]:
        return self._writer.finish()

    def abort(self) -> None:
        self._writer.abort()


class CountingTier(ColdTier):
    """Takes the place of cold segments for the hint HDD, with records of its own size."""

    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.HDD})

    def __init__(self) -> None:
        self.records: list[int] = []

    def block_bytes(self, config: StoreConfig) -> int:
        return 1000

    def writer(self, store: TierStore, hint: StorageHint) -> TierWriter:
        return CountingWriter(super().writer(store, hint), self.records)


def test_each_hint_has_a_tier() -> None:
    assert {hint: type(registry.tier_for(hint)) for hint in StorageHint} == {
        StorageHint.NVME: ColdTier,
        StorageHint.SSD: LmdbTier,
        StorageHint.HDD: ColdTier,
    }
    with pytest.raises(KeyError):
        registry.tier_of_kind("tape")


def test_a_tier_that_is_registered_takes_the_entries_of_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = CountingTier()
    tiers: tuple[Tier, ...] = (*registry.TIERS, tier)
    monkeypatch.setattr(registry, "TIERS", tiers)
    with LedgerManager.open(tmp_path / "store", config=StoreConfig(background=False)) as manager:
        with manager.create_ledger(password=b"pw") as writer:
            for payload in PAYLOADS:
                writer.append(payload)
        store = store_of(manager)
        store.move(store.descriptor(writer.ledger_id), StorageHint.HDD)
        assert sum(tier.records) == len(PAYLOADS)
        assert len(tier.records) > 10, "records have the tier's own size"
        with manager.open_ledger(writer.ledger_id, password=b"pw") as reader:
            assert [bytes(entry.payload) for entry in reader] == PAYLOADS
    assert not verify_store(str(tmp_path / "store")).problems
    with (
        LedgerManager.open(tmp_path / "store") as manager,
        manager.open_ledger(writer.ledger_id, password=b"pw") as reader,
    ):
        assert [bytes(entry.payload) for entry in reader] == PAYLOADS
