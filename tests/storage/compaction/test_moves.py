"""What moving many small ledgers costs: counted in commits, rows, syncs and files, never in seconds."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk import storage
from pybk.config import TierPolicy
from pybk.errors import NoSuchLedgerError, UnauthorizedError, UsageError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage import preallocation
from pybk.storage.compaction.checkpoint import Checkpoint
from pybk.storage.compaction.compaction import Compaction
from pybk.storage.compaction.mover import Mover
from pybk.storage.format.index_rows import CHAIN_HEAD
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.index import IndexUpdate
from pybk.storage.io.filesystem import OsFile, OsFileSystem
from pybk.storage.io.lmdb_environment import LmdbEnvironment, LmdbWrite
from pybk.storage.log.commit import CommitWriter
from pybk.storage.log.recovery import apply_commit
from pybk.storage.preallocation import LogFileSupply
from tests.internals import store_of
from tests.storage.real_store import apply_policy, contents, numbered, open_quick

COUNTED: list[tuple[type, str]] = [
    (CatalogAndIndex, "commit"),
    (Checkpoint, "run"),
    (CommitWriter, "publish"),
    (LmdbWrite, "put"),
    (LmdbWrite, "delete"),
    (OsFile, "sync"),
    (OsFileSystem, "create"),
    (LogFileSupply, "make"),
]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count calls of what makes things durable."""
    found: Counter[str] = Counter()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            found[name] += 1
            return real(*arguments, **named)

        return call

    for owner, name in COUNTED:
        monkeypatch.setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))
    return found


@contextmanager
def closed_ledgers(path: Path, count: int, **settings: Any) -> Iterator[tuple[LedgerManager, list[int]]]:
    """Open a store with so many closed ledgers of one entry, which the index knows."""
    with open_quick(path, background=False, **settings) as manager:
        ledger_ids = []
        for number in range(count):
            with manager.create_ledger(password=b"p") as writer:
                writer.append(b"entry of %d" % number)
            ledger_ids.append(writer.ledger_id)
        manager.checkpoint()
        yield manager, ledger_ids


def cold_files(path: Path) -> int:
    return len(list((path / "hdd").glob("*.cold")))


def tiers(manager: LedgerManager) -> list[StorageHint]:
    return [manager.ledger_metadata(ledger_id).tier for ledger_id in manager.list_ledgers()]


def check_contents(manager: LedgerManager, ledger_ids: list[int]) -> None:
    for number, ledger_id in enumerate(ledger_ids):
        assert contents(manager, ledger_id, b"p") == [b"entry of %d" % number]


def test_each_of_many_moves_one_by_one_costs_the_same(tmp_path: Path, counts: Counter[str]) -> None:
    with closed_ledgers(tmp_path, 40) as (manager, ledger_ids):
        each = []
        for ledger_id in ledger_ids[:-1]:
            counts.clear()
            manager.move_ledger(ledger_id, StorageHint.HDD)
            each.append(dict(counts))
        assert each[1:] == each[1:2] * 38
        assert (
            each[1]["CatalogAndIndex.commit"] == each[1]["CommitWriter.publish"] == each[1]["OsFileSystem.create"] == 1
        )
        assert each[1]["LmdbWrite.put"] <= 8
        assert each[1]["OsFile.sync"] == 3, "catalog twice, cold segment once"
        assert "Checkpoint.run" not in each[1]
        assert "LogFileSupply.make" not in each[1]
        assert store_of(manager).take_dirty() == {}, "the next checkpoint has nothing more to write of them"
        check_contents(manager, ledger_ids)
        assert list(store_of(manager).index.check()) == []
    with open_quick(tmp_path, background=False) as manager:
        assert tiers(manager) == [StorageHint.HDD] * 39 + [StorageHint.NVME]
        check_contents(manager, ledger_ids)


def test_many_ledgers_move_with_one_commit_for_each_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setattr(storage, "MOVED_LEDGERS_MAX", 10)
    with closed_ledgers(tmp_path, 40) as (manager, ledger_ids):
        counts.clear()
        manager.move_ledgers(iter([*reversed(ledger_ids), *ledger_ids[:5]]), StorageHint.HDD)
        assert cold_files(tmp_path) == 4
        assert counts["CommitWriter.publish"] == 4
        assert counts["CatalogAndIndex.commit"] == 5, "one for each group, and one that drops the file that they left"
        assert counts["OsFile.sync"] == 3 * 4 + 2 + counts["LogFileSupply.make"]
        rows = counts["LmdbWrite.put"] + counts["LmdbWrite.delete"]
        assert rows <= 4 * 40 + 4 * 5
        counts.clear()
        manager.move_ledgers(ledger_ids, StorageHint.HDD)
        assert not counts, "ledgers that are there already are left alone"
        check_contents(manager, ledger_ids)
    with open_quick(tmp_path, background=False) as manager:
        assert set(tiers(manager)) == {StorageHint.HDD}
        check_contents(manager, ledger_ids)


def test_a_group_ends_with_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MOVED_BYTES_MAX", 30)
    with closed_ledgers(tmp_path, 9) as (manager, ledger_ids):
        manager.move_ledgers(ledger_ids, StorageHint.HDD)
        assert cold_files(tmp_path) == 3
        check_contents(manager, ledger_ids)


def test_ledgers_are_moved_with_what_the_index_does_not_know_yet(tmp_path: Path) -> None:
    with closed_ledgers(tmp_path, 3) as (manager, ledger_ids):
        with manager.create_ledger(password=b"p") as writer:
            writer.append_many(numbered(20))
        still_open = manager.create_ledger(password=b"p")
        still_open.append_many(numbered(5))
        empty = manager.create_ledger(password=b"p")
        manager.move_ledgers([writer.ledger_id, still_open.ledger_id, empty.ledger_id, *ledger_ids], StorageHint.SSD)
        still_open.append_many(numbered(5, 5))
        manager.move_ledger(still_open.ledger_id, StorageHint.HDD)
        assert contents(manager, writer.ledger_id, b"p") == numbered(20)
        assert contents(manager, still_open.ledger_id, b"p") == numbered(10)
        check_contents(manager, ledger_ids)
    with open_quick(tmp_path, background=False) as manager:
        assert contents(manager, still_open.ledger_id, b"p", recover=True) == numbered(10)
        assert tiers(manager) == [StorageHint.SSD] * 4 + [StorageHint.HDD, StorageHint.SSD]


def test_moves_of_many_ledgers_are_checked(tmp_path: Path) -> None:
    with closed_ledgers(tmp_path, 3) as (manager, ledger_ids):
        with pytest.raises(UsageError):
            manager.move_ledgers([0, "1"], StorageHint.HDD)  # type: ignore[list-item]
        with pytest.raises(UsageError):
            manager.move_ledgers(ledger_ids, "tape")  # type: ignore[arg-type]
        with pytest.raises(UnauthorizedError):
            manager.move_ledgers(ledger_ids, StorageHint.HDD, password=b"another")
        assert set(tiers(manager)) == {StorageHint.NVME}
        with pytest.raises(NoSuchLedgerError, match="77"):
            manager.move_ledgers([*ledger_ids, 77], StorageHint.HDD)
        asyncio.run(manager.move_ledgers_async(ledger_ids, StorageHint.HDD, password=b"p"))
        assert set(tiers(manager)) == {StorageHint.HDD}
        manager.move_ledgers([], StorageHint.SSD)


def test_sparse_files_are_not_packed_while_their_ledgers_are_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closed_ledgers(tmp_path, 40) as (manager, ledger_ids):
        scheduler = store_of(manager).scheduler
        now = 1000.0
        monkeypatch.setattr("pybk.storage.scheduler.time.monotonic", lambda: now)
        packed: list[object] = []
        compact = Compaction.compact_file

        def counted(self: Compaction, row: Any) -> None:
            packed.append(row)
            compact(self, row)

        monkeypatch.setattr(Compaction, "compact_file", counted)
        scheduler.tick()
        for ledger_id in ledger_ids[:20]:
            manager.move_ledger(ledger_id, StorageHint.HDD)
            scheduler.tick()
        assert not packed
        assert cold_files(tmp_path) < 16, "small files are merged all the same"
        now += 2
        scheduler.tick()
        assert len(packed) == 1, "once the moves have ended"
        with scheduler.moving():
            manager.move_ledgers(ledger_ids[20:36], StorageHint.HDD)
            now += 9
            scheduler.tick()
            assert len(packed) == 1
            now += 2
            scheduler.tick()
            assert len(packed) == 2, "moves that last must not keep the space for ever"
        check_contents(manager, ledger_ids)


def test_a_move_that_was_interrupted_is_finished_by_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_ledgers(tmp_path, 5) as (manager, ledger_ids):
        store = store_of(manager)
        with monkeypatch.context() as patch:
            patch.setattr(store.scheduler, "move", lambda descriptors, tier: None)
            manager.move_ledgers(ledger_ids, StorageHint.HDD)
        assert cold_files(tmp_path) == 0
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=1e9)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        assert set(tiers(manager)) == {StorageHint.HDD}
        manager.checkpoint()
        apply_policy(manager)
        assert cold_files(tmp_path) == 1
        check_contents(manager, ledger_ids)


def test_a_policy_at_rest_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.storage.compaction.tier_policy.LOOKED_AT", 10)
    with closed_ledgers(tmp_path, 35):
        pass
    policy = TierPolicy(target=StorageHint.HDD, min_age_seconds=3600.0)
    with open_quick(tmp_path, background=False, tier_policy=policy) as manager:
        store = store_of(manager)
        assert store.tier_queue is not None
        seen = []
        for _ in range(5):
            store.scheduler.tick()
            seen.append((len(store.tier_queue.due), store.scheduler.pause()))
        assert seen == [(10, 1.0), (20, 1.0), (30, 1.0), (35, 1.0), (35, 5.0)]

        def read(self: LmdbEnvironment) -> Any:
            raise AssertionError("a tick at rest read the index")

        with monkeypatch.context() as patch:
            patch.setattr(LmdbEnvironment, "read", read)
            for _ in range(3):
                store.scheduler.tick()


def test_readers_do_not_read_the_log_again_for_each_move_of_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[object] = []

    def counted(ledgers: Any, file: Any, commit: Any) -> None:
        applied.append(commit)
        apply_commit(ledgers, file, commit)

    monkeypatch.setattr("pybk.storage.readonly.apply_commit", counted)
    with closed_ledgers(tmp_path, 6) as (manager, ledger_ids):
        with manager.create_ledger(password=b"p") as writer:
            writer.append_many(numbered(10))
        with open_quick(tmp_path, read_only=True) as reader:
            assert len(applied) == 3
            check_contents(reader, ledger_ids)
            for ledger_id in ledger_ids:
                manager.move_ledger(ledger_id, StorageHint.HDD)
                check_contents(reader, ledger_ids)
            assert len(applied) == 3 + 6, "each commit of the log once"
            assert tiers(reader) == [StorageHint.HDD] * 6 + [StorageHint.NVME]
            assert contents(reader, writer.ledger_id, b"p") == numbered(10)
            manager.checkpoint()
            assert contents(reader, writer.ledger_id, b"p") == numbered(10)
            check_contents(reader, ledger_ids)


def test_a_deletion_during_a_checkpoint_is_kept(tmp_path: Path) -> None:
    with closed_ledgers(tmp_path, 1) as (manager, ledger_ids):
        descriptor = store_of(manager).descriptor(ledger_ids[0])
        descriptor.deleted = True  # as the log's driver sets it, before it sets ``changed``
        descriptor.indexed(descriptor.metadata.version, descriptor.last_add_confirmed)
        assert descriptor.changed
        descriptor.deleted = False
        descriptor.indexed(descriptor.metadata.version - 1, descriptor.last_add_confirmed)
        assert descriptor.changed
        descriptor.indexed(descriptor.metadata.version, descriptor.last_add_confirmed)
        assert not descriptor.changed


def test_one_record_is_copied_as_it_would_be_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_ledgers(tmp_path, 1) as (manager, _):
        many = manager.create_ledger(password=b"p")
        many.append_many(numbered(7))
        manager.checkpoint()
        store = store_of(manager)
        for target in (StorageHint.HDD, StorageHint.SSD):
            found = []
            for copies in (True, False):
                with monkeypatch.context() as patch:
                    if not copies:
                        patch.setattr(Mover, "may_copy", lambda self, run: False)
                    mover = Mover(store, target)
                    runs = [mover.move(number, *store.index.pages(number)) for number in (0, many.ledger_id)]
                    puts = list(getattr(mover.writer, "puts", ()))
                    (row,) = mover.finish()
                    data = b"" if target is StorageHint.SSD else Path(store.volumes.path_of(row)).read_bytes()[4096:-72]
                footers = np.concatenate(runs)
                footers["file"] = 0
                found.append((footers.tobytes(), puts, data[: -40 * len(footers)]))
            assert found[0] == found[1]


def test_runs_replaced_one_by_one_leave_what_any_replacement_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for fast in (True, False):
        with monkeypatch.context() as patch, closed_ledgers(tmp_path / str(fast), 6) as (manager, ledger_ids):
            if not fast:
                patch.setattr(IndexUpdate, "replace_places", lambda self, ledger_id, old, new: False)
            manager.move_ledgers(ledger_ids[1:4], StorageHint.HDD)
            manager.move_ledger(ledger_ids[2], StorageHint.NVME)
            index = store_of(manager).index
            assert list(index.check()) == []
            found.append(
                (
                    [page.tobytes() for ledger_id in ledger_ids for page in index.pages(ledger_id)],
                    {file_id: use.live_bytes for file_id, use in index.checked_uses().items()},
                    sorted(index.ledgers_in(index.files())),
                )
            )
    assert found[0] == found[1]
    assert CHAIN_HEAD not in found[0][2]


def test_checkpoints_of_a_short_log_make_no_larger_log_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = LogFileSupply.make

    def noted(self: LogFileSupply, size: int, pause_ratio: float) -> None:
        sizes.append(size)
        make(self, size, pause_ratio)

    monkeypatch.setattr(LogFileSupply, "make", noted)
    with open_quick(tmp_path, background=False, log_file_bytes=8 << 20) as manager:
        supply = store_of(manager).supply
        writer = manager.create_ledger(password=b"p")
        for number in range(12):
            writer.append(b"%d" % number)
            supply.preallocate(pause=False)
            manager.checkpoint()
        assert len(sizes) <= 12 + 4
        assert set(sizes[4:]) == {preallocation.FIRST_FILE_BYTES}
