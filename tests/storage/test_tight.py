"""A store without space to pack live entries frees dead files all the same, and packs the others one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pybk.config import MIB
from pybk.errors import StorageFullError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.io.filesystem import File
from tests.internals import store_of
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import CONFIG
from tests.storage.test_space import new_ledger, open_small, tick

SPARSE = replace(CONFIG, unchecked_tail_bytes=64 * MIB)


def payload_of(number: int) -> bytes:
    """Return a payload of which a 4096-byte block holds one, so that log files are half full."""
    return b"%5d" % number * 420


def append_some(writer: LedgerWriter, count: int) -> None:
    for _ in range(count):
        writer.append(payload_of(writer.last_add_confirmed + 1))


def take_all_but(fs: SimFileSystem, nbytes: int) -> File:
    """Fill the disk with another's file, but for some bytes."""
    return fs.create("/ballast", fs.free_bytes("/") - nbytes)


def give_back(fs: SimFileSystem, ballast: File) -> None:
    ballast.close()
    fs.unlink("/ballast")


def check(manager: LedgerManager, ledger_id: int, count: int) -> None:
    reader = manager.open_ledger(ledger_id, recover=False)
    assert [entry.payload for entry in reader.read(0, count - 1)] == [payload_of(n) for n in range(count)]


@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.HDD])
def test_dead_log_files_are_dropped_although_there_is_no_space_to_pack_the_others(hint: StorageHint) -> None:
    fs = SimFileSystem(1, capacity_bytes=64 * MIB)
    manager = open_small(fs, SPARSE)
    dead, alive = new_ledger(manager), new_ledger(manager, hint)
    append_some(dead, 600)
    append_some(alive, 600)
    take_all_but(fs, MIB)
    manager.delete_ledger(dead.ledger_id)
    store_of(manager).scheduler.checkpoint()
    assert fs.free_bytes("/") > 2 * MIB
    assert store_of(manager).tail_bytes == 0
    check(manager, alive.ledger_id, 600)
    append_some(alive, 1)
    check(manager, alive.ledger_id, 601)
    manager = open_small(fs.crash(), SPARSE)
    check(manager, alive.ledger_id, 601)
    manager.close()


def test_files_are_packed_one_by_one_each_freeing_space_for_the_next() -> None:
    fs = SimFileSystem(2, capacity_bytes=64 * MIB)
    manager = open_small(fs, SPARSE)
    writer = new_ledger(manager)
    append_some(writer, 1500)
    take_all_but(fs, 2 * MIB)
    store_of(manager).scheduler.checkpoint()
    before = fs.free_bytes("/")
    assert before < 3 * MIB, "this is to be about a store that cannot pack all at once"
    store_of(manager).scheduler.collect()
    assert fs.free_bytes("/") > before + 2 * MIB
    check(manager, writer.ledger_id, 1500)
    manager.close()
    manager = open_small(fs, SPARSE)
    check(manager, writer.ledger_id, 1500)
    manager.close()


def test_files_of_which_a_part_is_live_wait_for_space_for_that_part() -> None:
    fs = SimFileSystem(7, capacity_bytes=64 * MIB)
    manager = open_small(fs, SPARSE)
    dead, alive = new_ledger(manager), new_ledger(manager)
    for _ in range(100):
        append_some(dead, 9)
        append_some(alive, 1)
    manager.checkpoint()
    uses = store_of(manager).index.checked_uses
    fs.fill()
    manager.delete_ledger(dead.ledger_id)
    tick(manager)
    assert sum(use.row.bytes for use in uses().values()) > 4 * sum(use.live_bytes for use in uses().values())
    fs.give_back(MIB)
    tick(manager)
    assert sum(use.row.bytes for use in uses().values()) < 2 * sum(use.live_bytes for use in uses().values())
    check(manager, alive.ledger_id, 100)
    manager.close()


def test_entries_that_find_no_space_in_their_tier_are_moved_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = SimFileSystem(3, capacity_bytes=64 * MIB)
    manager = open_small(fs, SPARSE)
    writer, other = new_ledger(manager, StorageHint.HDD), new_ledger(manager)
    for _ in range(100):
        append_some(writer, 1)
        append_some(other, 1)
    free = fs.free_bytes
    monkeypatch.setattr(fs, "free_bytes", lambda path: 1000 if path == "/store/hdd" else free(path))
    with pytest.raises(StorageFullError, match="/store/hdd has 1000 bytes free, too few to pack"):
        manager.checkpoint()
    assert fs.list_directory("/store/hdd") == ["cookie"]
    check(manager, writer.ledger_id, 100)
    tick(manager)
    assert manager.health().state == "read_only"
    monkeypatch.undo()
    tick(manager)
    assert manager.health().state == "ok"
    assert len(fs.list_directory("/store/hdd")) > 1
    assert not [row for row in store_of(manager).index.files().values() if row.kind == "log"]
    for ledger in (writer, other):
        check(manager, ledger.ledger_id, 100)
    manager.close()


def test_preallocated_files_are_removed_for_a_job_that_finds_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = SimFileSystem(6, capacity_bytes=64 * MIB)
    manager = open_small(fs, SPARSE)
    writer, other = new_ledger(manager), new_ledger(manager)
    append_some(writer, 100)
    tick(manager)
    assert len(store_of(manager).supply.queued()) == 2
    free = fs.free_bytes
    monkeypatch.setattr(fs, "free_bytes", lambda path: 1000 if path == "/store/ssd" else free(path))
    monkeypatch.setattr(store_of(manager).index, "reserved_bytes", lambda: 0)
    manager.delete_ledger(other.ledger_id)
    tick(manager)
    assert "changing the index" in manager.health().reason
    assert store_of(manager).supply.queued() == []
    monkeypatch.undo()
    tick(manager)
    assert manager.health().state == "ok"
    check(manager, writer.ledger_id, 100)
    manager.close()


def test_a_tier_that_turns_out_to_be_full_leaves_entries_in_the_log() -> None:
    fs = SimFileSystem(4)
    manager = open_small(fs, SPARSE)
    writer = new_ledger(manager, StorageHint.HDD)
    append_some(writer, 20)
    fs.fail_at(0, "ENOSPC", only="write", forever=True)
    with pytest.raises(StorageFullError):
        manager.checkpoint()
    fs.heal()
    check(manager, writer.ledger_id, 20)
    assert fs.list_directory("/store/hdd") == ["cookie"]
    manager.checkpoint()
    assert len(fs.list_directory("/store/hdd")) == 2
    check(manager, writer.ledger_id, 20)
    manager.close()


def test_the_index_is_not_changed_on_a_disk_with_too_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = SimFileSystem(5, capacity_bytes=64 * MIB)
    manager = open_small(fs, SPARSE)
    writer = new_ledger(manager)
    append_some(writer, 100)
    ballast = take_all_but(fs, 256 << 10)
    monkeypatch.setattr(store_of(manager).index, "reserved_bytes", lambda: 0)
    with pytest.raises(StorageFullError, match="changing the index may take"):
        manager.checkpoint()
    assert manager.health().state == "ok"
    give_back(fs, ballast)
    manager.checkpoint()
    assert store_of(manager).tail_bytes == 0
    check(manager, writer.ledger_id, 100)
    manager.close()
