"""Moving entries takes memory for a portion of them, however many there are and however small they are stored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pybk.config import KIB
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.storage.compaction import mover
from pybk.storage.format.log_file import RunLocations
from pybk.storage.store_reader import StoreReader
from pybk.storage.tiers import Loaded
from tests.simdisk import SimFileSystem
from tests.storage.real_store import payloads
from tests.storage.store_harness import CONFIG, open_store

PORTION = 64 * KIB


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("target", [StorageHint.SSD, StorageHint.HDD])
def test_a_move_has_one_portion_in_memory(
    monkeypatch: pytest.MonkeyPatch, target: StorageHint, compression: str | None
) -> None:
    source = StorageHint.HDD if target is StorageHint.SSD else StorageHint.SSD
    config = replace(CONFIG, cold_block_bytes=4 * KIB, ssd_block_bytes=4 * KIB, cold_compression=compression)  # type: ignore[arg-type] # one of the two
    sizes: list[int] = []
    load = StoreReader.load

    def measured(self: StoreReader, ledger_id: int, runs: RunLocations) -> Loaded:
        loaded = load(self, ledger_id, runs)
        sizes.append(int(loaded.runs["body"].sum()))
        return loaded

    expected = [b"%d " % number * 300 for number in range(600)] + [bytes(3 * PORTION), b"last"]
    with open_store(SimFileSystem(1), config) as manager:
        with manager.create_ledger(storage_hints={source}, digest_type=DigestType.CRC32C) as writer:
            for low in range(0, len(expected), 50):
                writer.append_many(expected[low : low + 50])
        manager.checkpoint()
        monkeypatch.setattr(mover, "PORTION_BYTES", PORTION)
        monkeypatch.setattr(StoreReader, "load", measured)
        manager.move_ledger(0, target)
        monkeypatch.setattr(StoreReader, "load", load)
        assert manager.ledger_metadata(0).tier is target
        with manager.open_ledger(0) as reader:
            assert payloads(reader) == expected
    portions = sorted(sizes)
    assert len(portions) > 5
    assert portions[-2] <= PORTION + 8 * KIB
    # A record that is larger goes alone; not so one that is small as it lies there.
    local_reader = PORTION if source is StorageHint.HDD and compression else 0
    assert 3 * PORTION <= portions[-1] <= 3 * PORTION + local_reader + 8 * KIB
