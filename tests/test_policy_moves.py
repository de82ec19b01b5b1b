"""Closed ledgers move by age and size, by themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pybk.config import TierPolicy
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.manager import LedgerManager
from pybk.storage import maintenance as maintenance_module
from pybk.storage.descriptor import LedgerDescriptor
from tests.embedded import store_of
from tests.realstore import contents, numbered, open_quick
from tests.waiting import wait_until


def tiers(manager: LedgerManager) -> dict[int, StorageHint]:
    return {ledger_id: manager.ledger_metadata(ledger_id).tier for ledger_id in manager.list_ledgers()}


def apply(manager: LedgerManager) -> None:
    store = store_of(manager)
    store.maintenance.apply_policy()


def filled(manager: LedgerManager, count: int, *, close: bool = True, **arguments: Any) -> int:
    writer = manager.create_ledger(**arguments)
    writer.append_many(numbered(count))
    if close:
        writer.close()
    return writer.ledger_id


def test_closed_ledgers_that_are_long_enough_move(tmp_path: Path) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0, min_bytes=len(b"".join(numbered(10))))
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        exact = filled(manager, 10)
        short = filled(manager, 9)
        still_open = filled(manager, 50, close=False)
        there = filled(manager, 50, storage_hints={StorageHint.HDD})
        from_ssd = filled(manager, 50, storage_hints={StorageHint.SSD})
        versions = {ledger_id: manager.ledger_metadata(ledger_id).version for ledger_id in (short, still_open, there)}
        apply(manager)
        assert tiers(manager) == {
            exact: StorageHint.HDD,
            short: StorageHint.NVME,
            still_open: StorageHint.NVME,
            there: StorageHint.HDD,
            from_ssd: StorageHint.HDD,
        }
        assert {ledger_id: manager.ledger_metadata(ledger_id).version for ledger_id in versions} == versions
        for ledger_id, count in ((exact, 10), (short, 9), (still_open, 50), (there, 50), (from_ssd, 50)):
            assert contents(manager, ledger_id) == numbered(count)
        assert {path.suffix for path in (tmp_path / "hdd").iterdir() if path.suffix} == {".cold"}
        manager.open_ledger(still_open)
        apply(manager)
        assert tiers(manager)[still_open] is StorageHint.HDD, "closed by recovery is closed"


def test_young_ledgers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TierPolicy(target=StorageHint.SSD, min_age_seconds=3600.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        ledger_id = filled(manager, 20)
        created = manager.ledger_metadata(ledger_id).creation_time_ns
        for seconds, tier in ((0, StorageHint.NVME), (3599, StorageHint.NVME), (3601, StorageHint.SSD)):
            with monkeypatch.context() as patch:
                patch.setattr(time, "time_ns", lambda seconds=seconds: created + seconds * 10**9)
                apply(manager)
            assert tiers(manager)[ledger_id] is tier, f"after {seconds} s"
        assert contents(manager, ledger_id) == numbered(20)


def test_nothing_moves_without_a_policy(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as manager:
        ledger_id = filled(manager, 20)
        apply(manager)
        assert tiers(manager)[ledger_id] is StorageHint.NVME


def test_a_ledger_deleted_while_the_policy_works_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        ledger_ids = [filled(manager, 20) for _ in range(3)]
        manager.checkpoint()
        store = store_of(manager)
        move = store.move

        def delete_another_first(descriptor: LedgerDescriptor, tier: StorageHint) -> None:
            if descriptor.ledger_id == ledger_ids[0]:
                manager.delete_ledger(ledger_ids[1])
            move(descriptor, tier)

        with monkeypatch.context() as patch:
            patch.setattr(store, "move", delete_another_first)
            apply(manager)
        assert tiers(manager) == {ledger_ids[0]: StorageHint.HDD, ledger_ids[2]: StorageHint.HDD}


def test_the_background_applies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance_module, "_POLICY_SECONDS", 0.05)
    monkeypatch.setattr(maintenance_module, "_TICK_SECONDS", 0.05)
    with open_quick(tmp_path, tier_policy=TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)) as manager:
        ledger_id = filled(manager, 20)
        wait_until(lambda: tiers(manager)[ledger_id] is StorageHint.HDD)
        assert contents(manager, ledger_id) == numbered(20)


@pytest.mark.parametrize("arguments", [{"min_age_seconds": -1.0}, {"min_bytes": -1}, {"target": "tape"}])
def test_policies_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TierPolicy(**arguments)
