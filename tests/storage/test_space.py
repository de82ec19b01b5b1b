"""A store that runs short of space refuses appends before the disk is full, still deletes, and comes back by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pybk.config import MIB, StoreConfig
from pybk.errors import StorageFullError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.io.filesystem import OsFileSystem
from tests.internals import store_of
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import CONFIG, RESERVE_BYTES, drop_reserve, open_store
from tests.waiting import wait_until

LOW = 2 * MIB
OK = 3 * MIB
WATCHED = replace(CONFIG, free_bytes_low=LOW, free_bytes_ok=OK)


def tick(manager: LedgerManager) -> None:
    """Do what the background thread would do now."""
    store_of(manager).scheduler.tick()


def open_small(fs: SimFileSystem, config: StoreConfig = WATCHED) -> LedgerManager:
    return open_store(fs, config, first_file_bytes=64 << 10)


def payload_of(number: int) -> bytes:
    return b"%d " % number * 3000


def new_ledger(manager: LedgerManager, hint: StorageHint = StorageHint.NVME) -> LedgerWriter:
    return manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C)


def append_until_full(manager: LedgerManager, writer: LedgerWriter) -> StorageFullError:
    """Append, with the background's work now and then, until there is no space."""
    for number in range(writer.last_add_confirmed + 1, 10_000):
        try:
            writer.append(payload_of(number))
        except StorageFullError as error:
            return error
        if number % 8 == 0:
            tick(manager)
    raise AssertionError("the disk is never full")


def append_both_until_full(deferred: LedgerWriter, writer: LedgerWriter) -> None:
    """Append to two ledgers until the log finds no space for another file."""
    with pytest.raises(StorageFullError, match="no space for a log file"):  # noqa: PT012  # either may be the one
        for number in range(10_000):
            deferred.append(payload_of(number))
            writer.append(payload_of(number))


def check(manager: LedgerManager, ledger_id: int, count: int) -> None:
    reader = manager.open_ledger(ledger_id, recover=False)
    assert reader.last_add_confirmed == count - 1
    for number, entry in enumerate(reader.read(0, count - 1)):
        assert entry.payload == payload_of(number)


def test_appends_and_creates_are_refused_before_the_disk_is_full_and_deleting_brings_them_back() -> None:
    fs = SimFileSystem(1, capacity_bytes=16 * MIB)
    manager = open_small(fs)
    other, writer = new_ledger(manager, StorageHint.HDD), new_ledger(manager)
    for number in range(200):
        other.append(payload_of(number))
    error = append_until_full(manager, writer)
    assert error.retryable
    assert not error.outcome_unknown
    assert "/store" in str(error)
    assert fs.free_bytes("/store") > MIB
    assert manager.health().state == "read_only"
    count = writer.last_add_confirmed + 1
    for refused in (
        lambda: writer.append(b"more"),
        lambda: writer.append_many([b"more"]),
        lambda: writer.append_async(b"more"),
        lambda: writer.append_async(b"more", wait=False),
        lambda: new_ledger(manager),
    ):
        with pytest.raises(StorageFullError, match="bytes free"):
            refused()
    check(manager, writer.ledger_id, count)
    tick(manager)
    assert manager.health().state == "read_only"

    manager.delete_ledger(other.ledger_id)
    tick(manager)
    assert manager.health().state == "ok"
    assert fs.free_bytes("/store") > OK
    assert writer.append(payload_of(count)) == count
    new_ledger(manager).close()
    check(manager, writer.ledger_id, count + 1)
    manager.close()
    manager = open_small(fs.kill())
    check(manager, writer.ledger_id, count + 1)
    manager.close()


def test_a_log_without_space_for_a_file_resumes_when_there_is_some() -> None:
    fs = SimFileSystem(2, capacity_bytes=6 * MIB + RESERVE_BYTES)
    manager = open_small(fs, CONFIG)
    deferred = manager.create_ledger(digest_type=DigestType.CRC32C, write_flags=WriteFlag.DEFERRED_FORCE)
    writer = new_ledger(manager)
    ballast = fs.create("/ballast", 4 * MIB)
    append_both_until_full(deferred, writer)
    count = writer.last_add_confirmed + 1
    check(manager, writer.ledger_id, count)
    # The refused commit has acknowledged deferred entries, so it is kept until there is space.
    with pytest.raises(StorageFullError):
        deferred.force()

    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    wait_until(lambda: manager.health().state == "ok")  # the committer writes what was kept
    assert writer.append(payload_of(count)) == count
    last = deferred.force()
    assert last >= count
    check(manager, deferred.ledger_id, last + 1)
    check(manager, writer.ledger_id, count + 1)
    writer.close()
    manager.close()
    manager = open_small(fs.crash(), CONFIG)
    check(manager, writer.ledger_id, count + 1)
    check(manager, deferred.ledger_id, last + 1)
    manager.close()


def test_a_delete_that_finds_no_space_has_no_effect() -> None:
    fs = SimFileSystem(3)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    writer.append(payload_of(0))
    manager.checkpoint()
    drop_reserve(fs)
    fs.fail_at(0, "ENOSPC", only="create", forever=True)
    with pytest.raises(StorageFullError, match=r"a delete is a record in the log.*free_bytes_low"):
        manager.delete_ledger(writer.ledger_id)
    fs.heal()
    assert writer.append(payload_of(1)) == 1
    check(manager, writer.ledger_id, 2)
    manager.delete_ledger(writer.ledger_id)
    assert list(manager.list_ledgers()) == []
    manager.close()


def test_a_log_file_that_finds_no_space_half_way_is_removed() -> None:
    fs = SimFileSystem(6)
    manager = open_small(fs, CONFIG)
    for only in ("create", "write_zeros"):
        fs.fail_at(0, "ENOSPC", only=only, forever=True)
        with pytest.raises(StorageFullError):
            new_ledger(manager)
        fs.heal()
        assert not [name for name in fs.list_directory("/store/nvme") if name.endswith(".log")]
    assert new_ledger(manager).append(b"first") == 0
    manager.close()


def test_files_made_ahead_leave_the_reserve_alone_and_are_given_back() -> None:
    fs = SimFileSystem(4, capacity_bytes=16 * MIB)
    config = replace(WATCHED, log_file_bytes=4 * MIB)
    manager = open_small(fs, config)
    writer = new_ledger(manager)
    for number in range(200):
        writer.append(payload_of(number))
        tick(manager)
    tick(manager)  # the one before may have ended with a checkpoint, which leaves small files to be made
    assert len(fs.list_directory("/store/nvme")) >= 4
    before = fs.free_bytes("/store/nvme")
    assert before >= OK
    ballast = fs.create("/ballast", before - MIB)
    tick(manager)
    assert fs.free_bytes("/store/nvme") > MIB, "files made ahead were not given back"
    for _ in range(20):
        tick(manager)
    assert fs.free_bytes("/store/nvme") > MIB
    ballast.close()
    fs.unlink("/ballast")
    tick(manager)
    assert manager.health().state == "ok"
    writer.append(payload_of(200))
    check(manager, writer.ledger_id, 201)
    manager.close()


def test_a_move_that_finds_no_space_leaves_the_ledger_in_its_tier() -> None:
    fs = SimFileSystem(5)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    for number in range(30):
        writer.append(payload_of(number))
    manager.checkpoint()
    new_ledger(manager)  # the log has a file, so that it is the move that finds no space
    files = fs.list_directory("/store/hdd")
    for only in ("write", "create"):
        fs.fail_at(0, "ENOSPC", only=only, forever=True)
        with pytest.raises(StorageFullError, match="/store/"):
            manager.move_ledger(writer.ledger_id, StorageHint.HDD)
        fs.heal()
        assert fs.list_directory("/store/hdd") == files
        check(manager, writer.ledger_id, 30)
    manager.move_ledger(writer.ledger_id, StorageHint.HDD)
    assert len(fs.list_directory("/store/hdd")) > len(files)
    check(manager, writer.ledger_id, 30)
    assert writer.append(payload_of(30)) == 30
    manager.close()


def test_a_live_store_turns_read_only_and_back_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr(OsFileSystem, "free_bytes", lambda self, path: free[0])
    with LedgerManager.open(tmp_path / "store") as manager:
        writer = new_ledger(manager)
        writer.append(b"first")
        free[0] = 255 * MIB
        wait_until(lambda: manager.health().state == "read_only")
        with pytest.raises(StorageFullError):
            writer.append(b"refused")
        looked: list[str] = []

        def note(_: OsFileSystem, path: str) -> int:
            looked.append(path)
            return free[0]

        free[0] = 319 * MIB
        monkeypatch.setattr(OsFileSystem, "free_bytes", note)
        store_of(manager).scheduler.wake()
        wait_until(lambda: len(looked) > 3, "the maintenance thread to look at the free bytes again")
        assert manager.health().state == "read_only"
        free[0] = 321 * MIB
        wait_until(lambda: manager.health().state == "ok")
        assert writer.append(b"second") == 1


def test_a_store_at_rest_keeps_little_more_than_its_payload() -> None:
    fs = SimFileSystem(5, capacity_bytes=64 * MIB)
    manager = open_small(fs, replace(CONFIG, log_file_bytes=8 * MIB, unchecked_tail_bytes=64 * MIB))
    writer = new_ledger(manager)
    batch = [bytes(1024)] * 512
    for _ in range(16):
        writer.append_many(batch)
        tick(manager)
    payload = 8 * MIB
    used = fs.capacity_bytes - fs.free_bytes("/store/nvme")
    assert used > 2 * payload, "files made ahead were to be large while the log is busy"
    manager.checkpoint()
    tick(manager)
    assert len(store_of(manager).supply.queued()) == 2
    assert fs.capacity_bytes - fs.free_bytes("/store/nvme") <= 1.3 * payload + RESERVE_BYTES
    writer.append_many(batch)
    manager.close()


def test_the_log_never_takes_a_file_that_is_being_given_back() -> None:
    fs = SimFileSystem(6, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager)
    writer.append(b"first")
    tick(manager)
    supply = store_of(manager).supply
    ahead = supply.queued()
    assert len(ahead) == 2
    file_id, file = supply.next_log_file(4096, store_of(manager).log.writer.file_id)
    assert file is ahead[0].file
    with supply.making:
        supply.discard(ahead)  # chosen before the log took the first
    assert fs.exists(store_of(manager).volumes.path_of(ahead[0].row))
    assert not fs.exists(store_of(manager).volumes.path_of(ahead[1].row))
    assert supply.next_log_file(4096, store_of(manager).log.writer.file_id) == (file_id, file)
    manager.close()
