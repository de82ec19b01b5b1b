"""Closed ledgers move by age and size, by themselves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pybk.config import TierPolicy
from pybk.errors import StorageRefusedError, UsageError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage import scheduler as maintenance_module
from pybk.storage.descriptor import LedgerDescriptor
from tests.internals import store_of
from tests.storage.real_store import apply_policy, contents, numbered, open_quick
from tests.waiting import wait_until


def tiers(manager: LedgerManager) -> dict[int, StorageHint]:
    return {ledger_id: manager.ledger_metadata(ledger_id).tier for ledger_id in manager.list_ledgers()}


def filled(manager: LedgerManager, count: int, *, close: bool = True, **arguments: Any) -> int:
    writer = manager.create_ledger(**{"insecure": True, **arguments})
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
        apply_policy(manager)
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
        apply_policy(manager)
        assert tiers(manager)[still_open] is StorageHint.HDD, "closed by recovery is closed"


def test_young_ledgers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TierPolicy(target=StorageHint.SSD, min_age_seconds=3600.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        ledger_id = filled(manager, 20)
        created = manager.ledger_metadata(ledger_id).creation_time_ns
        for seconds, tier in ((0, StorageHint.NVME), (3599, StorageHint.NVME), (3601, StorageHint.SSD)):
            with monkeypatch.context() as patch:
                patch.setattr(time, "time_ns", lambda seconds=seconds: created + seconds * 10**9)
                apply_policy(manager)
            assert tiers(manager)[ledger_id] is tier, f"after {seconds} s"
        assert contents(manager, ledger_id) == numbered(20)


def test_nothing_moves_without_a_policy(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as manager:
        ledger_id = filled(manager, 20)
        apply_policy(manager)
        assert tiers(manager)[ledger_id] is StorageHint.NVME


def test_a_ledger_deleted_while_the_policy_runs_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        ledger_ids = [filled(manager, 20) for _ in range(3)]
        manager.checkpoint()
        store = store_of(manager)
        move_all = store.move_all

        def delete_one_first(descriptors: Sequence[LedgerDescriptor], tier: StorageHint) -> None:
            manager.delete_ledger(ledger_ids[1])
            move_all(descriptors, tier)

        with monkeypatch.context() as patch:
            patch.setattr(store, "move_all", delete_one_first)
            apply_policy(manager)
        assert tiers(manager) == {ledger_ids[0]: StorageHint.HDD, ledger_ids[2]: StorageHint.HDD}


def test_the_background_applies_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance_module, "POLICY_SECONDS", 0.05)
    monkeypatch.setattr(maintenance_module, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(maintenance_module, "REST_SECONDS", 0.05)
    with open_quick(tmp_path, tier_policy=TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)) as manager:
        ledger_id = filled(manager, 20)
        wait_until(lambda: tiers(manager)[ledger_id] is StorageHint.HDD)
        assert contents(manager, ledger_id) == numbered(20)


def test_a_policy_looks_at_what_changed_and_not_at_every_ledger_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        before = [filled(manager, 20) for _ in range(5)]
        apply_policy(manager)
        store = store_of(manager)
        looked: list[int] = []

        def no_look(after: int, count: int) -> list[Any]:
            looked.append(after)
            return []

        with monkeypatch.context() as patch:
            patch.setattr(store.index, "summaries", no_look)
            patch.setattr(store.index, "ledgers", no_look)
            closed_since = filled(manager, 20)
            manager.move_ledger(before[0], StorageHint.NVME)
            apply_policy(manager)
        assert not looked
        assert {tiers(manager)[ledger_id] for ledger_id in (*before, closed_since)} == {StorageHint.HDD}


def test_ledgers_that_are_due_together_share_one_cold_file_and_one_commit(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as manager:
        ledger_ids = [filled(manager, 5) for _ in range(40)]
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        apply_policy(manager)
        assert len(list((tmp_path / "hdd").glob("*.cold"))) == 1
        assert set(tiers(manager).values()) == {StorageHint.HDD}
        assert all(contents(manager, ledger_id) == numbered(5) for ledger_id in ledger_ids)


def test_small_cold_files_are_merged(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as manager:
        ledger_ids = [filled(manager, 5) for _ in range(70)]
        for number, ledger_id in enumerate(ledger_ids):
            manager.move_ledger(ledger_id, StorageHint.HDD)
            if number % 10 == 9:
                store_of(manager).scheduler.tick()
        store_of(manager).scheduler.tick()
        assert len(list((tmp_path / "hdd").glob("*.cold"))) < 32
        assert all(contents(manager, ledger_id) == numbered(5) for ledger_id in ledger_ids)
    with open_quick(tmp_path, background=False) as manager:
        assert all(contents(manager, ledger_id) == numbered(5) for ledger_id in ledger_ids)


def test_ledgers_that_could_not_be_moved_are_moved_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=0.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        ledger_id = filled(manager, 20)
        store = store_of(manager)

        def refuse(*_: object) -> None:
            raise StorageRefusedError("not now")

        with monkeypatch.context() as patch:
            patch.setattr(store, "move_all", refuse)
            apply_policy(manager)
        assert manager.health().state == "degraded"
        apply_policy(manager)
        assert manager.health().state == "ok"
        assert tiers(manager)[ledger_id] is StorageHint.HDD
        assert list((tmp_path / "hdd").glob("*.cold"))


@pytest.mark.parametrize("arguments", [{"min_age_seconds": -1.0}, {"min_bytes": -1}, {"target": "tape"}])
def test_policies_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TierPolicy(**arguments)
