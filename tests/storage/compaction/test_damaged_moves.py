"""A move of a ledger with damaged records moves everything else, and then reports which ledger and file are damaged."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pybk.config import KIB, TierPolicy
from pybk.errors import CorruptError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.descriptor import LedgerDescriptor
from tests.internals import store_of
from tests.storage.real_store import apply_policy, contents, open_quick

COUNT = 50
PAYLOADS = [b"%d " % number * 1500 for number in range(COUNT)]
"""Each payload is a record of its own, because a block has 4 KiB."""


def filled(manager: LedgerManager, hint: StorageHint) -> int:
    """Create a closed ledger whose entries lie in a cold segment or in the SSD tier."""
    with manager.create_ledger(insecure=True, storage_hints={hint}) as writer:
        for payload in PAYLOADS:
            writer.append(payload)
    return writer.ledger_id


def damaged_file(path: Path, how: str) -> tuple[Path, bytes]:
    """Damage the largest data file of a store; return it and what it held."""
    found = max([*path.glob("*/*.cold"), *path.glob("*/*.log")], key=lambda file: (file.suffix, file.stat().st_size))
    before = found.read_bytes()
    if how == "cut":
        os.truncate(found, len(before) // 2)
    else:
        at = before.index(PAYLOADS[COUNT // 2])
        with found.open("r+b") as file:
            file.seek(at)
            file.write(b"\xff")
    return found, before


def sources(manager: LedgerManager, ledger_id: int) -> dict[str, int]:
    """Return how many entries of a ledger lie in each tier."""
    store = store_of(manager)
    found: dict[str, int] = {}
    for page in store.index.pages(ledger_id):
        for file_id, count in zip(page["file"].tolist(), page["count"].tolist(), strict=True):
            tier = store.volumes.rows[file_id].tier
            found[tier] = found.get(tier, 0) + count
    return found


@pytest.mark.parametrize(
    ("source", "target", "how", "compression"),
    [
        (StorageHint.NVME, StorageHint.HDD, "flip", None),
        (StorageHint.HDD, StorageHint.NVME, "cut", None),
        (StorageHint.HDD, StorageHint.SSD, "cut", "zstd"),
    ],
)
def test_a_move_that_leaves_damaged_records_raises_and_moves_all_else(
    tmp_path: Path, source: StorageHint, target: StorageHint, how: str, compression: str | None
) -> None:
    with open_quick(tmp_path, background=False, cold_compression=compression) as manager:
        damaged, sound = filled(manager, source), filled(manager, StorageHint.SSD)
        manager.checkpoint()
        file, before = damaged_file(tmp_path, how)
        with pytest.raises(CorruptError, match=rf"ledger {damaged}: .* records in {file}") as raised:
            manager.move_ledgers([damaged, sound], target)
        assert raised.value.path == str(file)
        assert f"ledger {sound}" not in str(raised.value)
        assert contents(manager, sound) == PAYLOADS
        assert sources(manager, sound) == {target.value: COUNT}
        found = sources(manager, damaged)
        assert found[target.value] >= (COUNT - 1 if how == "flip" else COUNT // 3)
        assert found[source.value] > 0
        assert manager.ledger_metadata(damaged).tier is target, "where it belongs, and where a later move brings it"
        with pytest.raises(CorruptError, match=f"ledger {damaged}: "):
            manager.move_ledger(damaged, target)
        file.write_bytes(before)
        manager.move_ledger(damaged, target)
        assert sources(manager, damaged) == {target.value: COUNT}
        assert contents(manager, damaged) == PAYLOADS


def test_a_policy_reports_damaged_records_until_they_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        damaged = filled(manager, StorageHint.NVME)
        manager.checkpoint()
        file, before = damaged_file(tmp_path, "flip")
        sound = filled(manager, StorageHint.NVME)
        apply_policy(manager)
        assert sources(manager, sound) == {"hdd": COUNT}
        health = manager.health()
        assert health.state == "degraded"
        assert any(f"ledger {damaged}" in trouble and str(file) in trouble for trouble in health.troubles)

        queue = store_of(manager).tier_queue
        assert queue is not None
        tried: list[int] = []
        move_all = store_of(manager).move_all

        def counted(descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
            tried.append(len(descriptors))
            move_all(descriptors, tier)

        monkeypatch.setattr(store_of(manager), "move_all", counted)
        for _ in range(3):
            apply_policy(manager)
        assert tried == [], "damaged records are not read again at each look"
        assert manager.health().state == "degraded"

        file.write_bytes(before)
        now = time.time_ns()
        monkeypatch.setattr(time, "time_ns", lambda: now + 3600 * 10**9)
        apply_policy(manager)
        assert tried == [1]
        assert sources(manager, damaged) == {"hdd": COUNT}
        assert manager.health().state == "ok"


def test_a_policy_forgets_damaged_records_of_a_deleted_ledger(tmp_path: Path) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        damaged = filled(manager, StorageHint.NVME)
        manager.checkpoint()
        damaged_file(tmp_path, "flip")
        apply_policy(manager)
        assert manager.health().state == "degraded"
        manager.delete_ledger(damaged)
        store_of(manager).scheduler.tick()
        assert manager.health().state == "ok"


def test_a_file_with_damaged_records_is_packed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_quick(tmp_path, cold_block_bytes=4 * KIB, background=False) as manager:
        doomed = [manager.create_ledger(insecure=True, storage_hints={StorageHint.HDD}) for _ in range(4)]
        kept = manager.create_ledger(insecure=True, storage_hints={StorageHint.HDD})
        for payload in PAYLOADS:
            kept.append(payload)
            for each in doomed:
                each.append(b"gone soon " * 300)
        manager.checkpoint()
        damaged_file(tmp_path, "flip")
        for each in doomed:
            each.close()
            manager.delete_ledger(each.ledger_id)
            manager.checkpoint()
            manager.checkpoint()
        told = [record for record in caplog.records if "stay where they are" in record.message]
        assert len(told) == 1, "what was packed in vain is not packed again"
        assert contents(manager, filled(manager, StorageHint.HDD)) == PAYLOADS
