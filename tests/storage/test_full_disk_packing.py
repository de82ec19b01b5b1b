"""With 0 bytes free, deleting ledgers whose entries lie among those of others frees space: sparse files are packed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from pybk.config import MIB, StoreConfig
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage import preallocation, space
from pybk.storage.format.log_file import RECORD_HEADER_BYTES
from tests.full_device import filled, small_device
from tests.internals import store_of
from tests.sampling import sample
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.inode import Inode
from tests.storage.live_files import disk_usage
from tests.storage.real_store import open_quick
from tests.storage.store_harness import CONFIG, ROOT, abandon
from tests.storage.test_full_disk import fill
from tests.storage.test_space import open_small, tick
from tests.waiting import wait_until

WATCHED = replace(CONFIG, free_bytes_low=2 * MIB, free_bytes_ok=3 * MIB)
"""Other than by ``CONFIG``, a store on a full disk is read-only."""

_LEDGERS = 12
_ROUNDS = 112
"""So many are needed for a reserve, or fewer with ``small_stores_have_a_reserve``."""
_FEW_ROUNDS = 32
_ROUNDS_CHECKPOINTED = 8
"""So many fill a file of 1.5 MB, and there are too few files to be merged."""
_ENTRIES = 5
_BYTES = 3200
"""The entries of a round fill their blocks, so that entries of NVMe ledgers stay in log files."""


@contextmanager
def small_stores_have_a_reserve() -> Iterator[None]:
    """Let the reserve for packing be a quarter of the store, because a store of 18 MB takes seconds to make."""
    with mock.patch.multiple(preallocation, _PACK_SHARE=4, _PACK_SHARE_KEPT=1):
        yield


def dead_bytes(rounds: int) -> int:
    """Return the bytes of the entries of half of the ledgers."""
    return _LEDGERS // 2 * rounds * _ENTRIES * _BYTES


def payload_of(ledger: int, number: int) -> bytes:
    return (b"%d of %d " % (number, ledger) * _BYTES)[:_BYTES]


def interleave(manager: LedgerManager, hint: StorageHint, rounds: int, *, starts_small: bool = False) -> list[int]:
    """Append to ledgers in turns; return their ids. The first file may have a single round."""
    writers: list[LedgerWriter] = [
        manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C) for _ in range(_LEDGERS)
    ]
    for at in range(rounds):
        for ledger, writer in enumerate(writers):
            writer.append_many([payload_of(ledger, number) for number in range(at * _ENTRIES, (at + 1) * _ENTRIES)])
        if (at + 1) % _ROUNDS_CHECKPOINTED == 0 or (starts_small and at == 0):
            manager.checkpoint()
    for writer in writers:
        writer.close()
    return [writer.ledger_id for writer in writers]


def check(manager: LedgerManager, ledger_ids: list[int], deleted: list[int]) -> None:
    """Check that all entries of the ledgers are there that were not deleted."""
    assert set(manager.list_ledgers()) == set(ledger_ids) - set(deleted)
    for ledger, ledger_id in enumerate(ledger_ids):
        if ledger_id not in deleted:
            check_ledger(manager, ledger, ledger_id)


def check_ledger(manager: LedgerManager, ledger: int, ledger_id: int) -> None:
    with manager.open_ledger(ledger_id, recover=False) as reader:
        found = [bytes(entry.payload) for entry in reader.read(0, reader.last_add_confirmed)]
    assert len(found) >= _FEW_ROUNDS * _ENTRIES
    assert found == [payload_of(ledger, number) for number in range(len(found))]


def delete(manager: LedgerManager, ledger_ids: list[int]) -> None:
    for ledger_id in ledger_ids:
        manager.delete_ledger(ledger_id)
    tick(manager)


def ready(fs: SimFileSystem, hint: StorageHint) -> int:
    """Return the bytes of the reserve for packing."""
    path = f"{ROOT}/{hint.value}/{preallocation.PACK_RESERVE}"
    return fs.disk_bytes(path) if fs.exists(path) else 0


def made(
    hint: StorageHint, config: StoreConfig = CONFIG, rounds: int = _FEW_ROUNDS, *, starts_small: bool = False
) -> tuple[SimFileSystem, LedgerManager, list[int]]:
    """Return a store of interleaved ledgers, with its reserve, and their ids."""
    fs = SimFileSystem(1, capacity_bytes=128 * MIB)
    manager = open_small(fs, config)
    ledger_ids = interleave(manager, hint, rounds, starts_small=starts_small)
    tick(manager)
    assert ready(fs, hint) >= MIB
    return fs, manager, ledger_ids


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("restart", ["live", "closed", "killed", "lost power"])
@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.HDD])
@small_stores_have_a_reserve()
def test_deletes_of_interleaved_ledgers_free_space_while_there_is_none(
    hint: StorageHint, restart: str, watched: bool
) -> None:
    """Another program takes what each packed file frees, and does not get the blocks of the reserve."""
    fs, manager, ledger_ids = made(hint, WATCHED if watched else CONFIG)
    fs, manager = fill(fs, restart, manager)
    before = fs.used_bytes()
    deleted = ledger_ids[::2]
    delete(manager, deleted)
    assert fs.used_bytes() < before - 0.8 * dead_bytes(_FEW_ROUNDS)
    check(manager, ledger_ids, deleted)
    fs, manager = fill(fs, restart, manager)
    check(manager, ledger_ids, deleted)
    if hint is StorageHint.HDD:  # the log files differ in size, and leave a reserve as large as the smallest
        before = fs.used_bytes()
        delete(manager, ledger_ids[1::4])
        deleted += ledger_ids[1::4]
        assert fs.used_bytes() < before - 0.4 * dead_bytes(_FEW_ROUNDS)
    fs.give_back(32 * MIB)
    tick(manager)
    assert manager.health().state == "ok"
    with manager.create_ledger(insecure=True) as writer:
        writer.append(b"there is space again")
    manager.delete_ledger(writer.ledger_id)
    check(manager, ledger_ids, deleted)
    manager.close()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.HDD])
def test_files_that_wait_for_space_are_not_read_again_before_there_is_some(hint: StorageHint) -> None:
    fs = SimFileSystem(1, capacity_bytes=128 * MIB)
    manager = open_small(fs, CONFIG)
    ledger_ids = interleave(manager, hint, _FEW_ROUNDS)
    fs, manager = fill(fs, "live", manager)
    deleted = ledger_ids[::2]
    delete(manager, deleted)
    index = store_of(manager).index
    with mock.patch.object(type(index), "pages", autospec=True, side_effect=type(index).pages) as pages:
        tick(manager)
        tick(manager)
    assert not pages.called
    before = fs.used_bytes()
    fs.give_back(32 * MIB)
    tick(manager)
    assert fs.used_bytes() < before - 0.6 * dead_bytes(_FEW_ROUNDS), "they are packed once there is space"
    check(manager, ledger_ids, deleted)
    manager.close()


@small_stores_have_a_reserve()
def test_a_small_file_is_packed_after_those_that_leave_a_large_reserve() -> None:
    fs, manager, ledger_ids = made(StorageHint.HDD, starts_small=True)
    fs, manager = fill(fs, "live", manager)
    before = fs.used_bytes()
    delete(manager, ledger_ids[::2])
    assert fs.used_bytes() < before - 0.8 * dead_bytes(_FEW_ROUNDS)
    check(manager, ledger_ids, ledger_ids[::2])
    manager.close()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.HDD])
def test_what_packing_frees_on_a_full_disk_takes_appends(hint: StorageHint) -> None:
    fs, manager, ledger_ids = made(hint, rounds=_ROUNDS)
    fs.fill()
    fs.filled = False
    delete(manager, ledger_ids[::2])
    tick(manager)
    assert fs.free_bytes(ROOT) > 0.8 * dead_bytes(_ROUNDS)
    assert ready(fs, hint) >= MIB
    with manager.create_ledger(insecure=True) as writer:
        writer.append_many([bytes(100_000)] * 20)
    manager.delete_ledger(writer.ledger_id)
    check(manager, ledger_ids, ledger_ids[::2])
    manager.close()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("restart", ["live", "closed"])
@small_stores_have_a_reserve()
def test_a_store_without_a_reserve_for_packing_gets_it_once_there_is_space(restart: str) -> None:
    fs, manager, ledger_ids = made(StorageHint.HDD)
    fs, manager = fill(fs, "live", manager)
    fs.unlink(f"{ROOT}/hdd/{preallocation.PACK_RESERVE}")
    tick(manager)
    delete(manager, ledger_ids[:2])
    assert not ready(fs, StorageHint.HDD)
    fs.give_back(32 * MIB)
    if restart == "closed":
        manager.close()
        manager = open_small(fs, CONFIG)
    else:
        tick(manager)
    assert ready(fs, StorageHint.HDD) >= MIB
    manager.close()


@small_stores_have_a_reserve()
def test_a_reserve_is_allocated_once_on_a_file_system_that_counts_no_blocks() -> None:
    fs, manager, _ = made(StorageHint.HDD)
    path = f"{ROOT}/hdd/{preallocation.PACK_RESERVE}"
    inode = fs.inode(path)
    inode.blocks = set()
    tick(manager)
    assert fs.inode(path) is inode
    manager.close()


def test_a_small_store_has_no_reserve_for_packing() -> None:
    fs = SimFileSystem(2)
    manager = open_small(fs, CONFIG)
    interleave(manager, StorageHint.HDD, _FEW_ROUNDS)
    tick(manager)
    assert not ready(fs, StorageHint.HDD)
    manager.close()


@small_stores_have_a_reserve()
def test_a_store_that_has_become_small_gives_its_reserve_back() -> None:
    fs, manager, ledger_ids = made(StorageHint.HDD)
    delete(manager, ledger_ids)
    tick(manager)
    assert not ready(fs, StorageHint.HDD)
    manager.close()


def packing(restart: str = "live") -> tuple[SimFileSystem, LedgerManager, list[int], int]:
    """Return a store on a full disk that packs next, the ids of its ledgers, and the bytes on the disk."""
    fs, manager, ledger_ids = made(StorageHint.HDD)
    fs, manager = fill(fs, restart, manager)
    before = fs.used_bytes()
    for ledger_id in ledger_ids[::2]:
        manager.delete_ledger(ledger_id)
    store_of(manager).scheduler.checkpoint()
    return fs, manager, ledger_ids, before


def stopped_while_packing(operation: int, how: str) -> None:
    """Stop a store at an operation on the disk while it packs in the reserve; check what the next open frees."""
    fs, manager, ledger_ids, before = packing()
    fs.crash_at(operation)
    with pytest.raises(SimCrash):
        tick(manager)
    abandon(manager)
    fs = fs.crash() if how == "lost power" else fs.kill()
    manager = open_small(fs, WATCHED)
    tick(manager)
    check(manager, ledger_ids, ledger_ids[::2])
    assert fs.used_bytes() < before - 0.8 * dead_bytes(_FEW_ROUNDS)
    assert ready(fs, StorageHint.HDD) >= 0.7 * MIB
    assert list(store_of(manager).index.check()) == []
    manager.close()


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["killed", "lost power"])
@small_stores_have_a_reserve()
def test_a_stop_while_a_file_is_packed_in_the_reserve_leaves_space_to_pack_it(how: str) -> None:
    fs, manager, _, _ = packing()
    begun = len(fs.operations)
    tick(manager)
    operations = range(len(fs.operations) - begun)
    manager.close()
    for operation in sample(how, operations, 10):
        stopped_while_packing(operation, how)


def inodes(fs: SimFileSystem) -> dict[str, Inode]:
    """Return the cold segments."""
    names = fs.list_directory(f"{ROOT}/hdd")
    return {name: fs.inode(f"{ROOT}/hdd/{name}") for name in names if name.endswith(".cold")}


@small_stores_have_a_reserve()
def test_a_packed_file_that_a_reader_has_mapped_is_neither_written_nor_cut() -> None:
    fs, manager, ledger_ids, before = packing()
    mapped = inodes(fs)
    fs.used = list(mapped.values())
    contents = {name: bytes(inode.live) for name, inode in mapped.items()}
    tick(manager)
    tick(manager)
    assert len(inodes(fs).keys() & mapped.keys()) == len(mapped) - 1
    assert {name: bytes(inode.live) for name, inode in mapped.items()} == contents
    check(manager, ledger_ids, ledger_ids[::2])
    fs.used = []
    tick(manager)
    assert fs.used_bytes() < before - 0.8 * dead_bytes(_FEW_ROUNDS)
    check(manager, ledger_ids, ledger_ids[::2])
    manager.close()


@small_stores_have_a_reserve()
def test_a_file_with_a_damaged_record_does_not_take_the_reserve_for_packing() -> None:
    fs, manager, ledger_ids, before = packing()
    store = store_of(manager)
    run = next(store.index.pages(ledger_ids[1]))[0]
    path = store.volumes.path_of(store.volumes.rows[int(run["file"])])
    fs.inode(path).live[int(run["offset"]) + RECORD_HEADER_BYTES + 9] ^= 1
    tick(manager)
    tick(manager)
    assert fs.exists(path)
    assert fs.used_bytes() < before - 0.5 * dead_bytes(_FEW_ROUNDS)
    assert ready(fs, StorageHint.HDD) >= MIB
    for ledger, ledger_id in enumerate(ledger_ids):
        if ledger % 2 and ledger > 1:
            check_ledger(manager, ledger, ledger_id)
    manager.close()


@small_stores_have_a_reserve()
def test_packing_leaves_the_index_the_space_that_checkpoints_need() -> None:
    fs, manager, ledger_ids, before = packing()
    store = store_of(manager)
    segments = inodes(fs).keys()
    too_many = (store.index.reserved_bytes() - space.INDEX_SPARE_BYTES) // 2 - space.CHANGES_WHEN_FULL_BYTES
    with mock.patch.object(store, "change_bytes", return_value=too_many):
        store.scheduler.collect()
    assert inodes(fs).keys() == segments
    tick(manager)
    assert fs.used_bytes() < before - 0.8 * dead_bytes(_FEW_ROUNDS)
    check(manager, ledger_ids, ledger_ids[::2])
    manager.close()


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.HDD])
def test_deletes_of_interleaved_ledgers_free_space_on_a_real_full_disk(hint: StorageHint, tmp_path: Path) -> None:
    with small_device(tmp_path / "device", 96 * MIB) as device:
        with open_quick(device / "store") as manager:
            ledger_ids = interleave(manager, hint, _ROUNDS)
        with filled(device), open_quick(device / "store") as manager:
            before = disk_usage(device / "store")
            for ledger_id in ledger_ids[::2]:
                manager.delete_ledger(ledger_id)
            manager.checkpoint()
            wait_until(lambda: disk_usage(device / "store") < before - 0.8 * dead_bytes(_ROUNDS))
            check(manager, ledger_ids, ledger_ids[::2])
        with open_quick(device / "store") as manager:
            check(manager, ledger_ids, ledger_ids[::2])
            manager.create_ledger(insecure=True).append(b"there is space again")


@small_stores_have_a_reserve()
def test_entries_that_a_reader_holds_stay_what_they_are_on_a_real_full_disk(tmp_path: Path) -> None:
    with (
        small_device(tmp_path / "device", 96 * MIB) as device,
        open_quick(device / "store", background=False) as manager,
    ):
        ledger_ids = interleave(manager, StorageHint.HDD, _FEW_ROUNDS)
        tick(manager)
        reader = manager.open_ledger(ledger_ids[1], recover=False)
        held = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        before = disk_usage(device / "store")
        with filled(device):
            delete(manager, ledger_ids[::2])
            tick(manager)
            check(manager, ledger_ids, ledger_ids[::2])
            assert held == [payload_of(1, number) for number in range(_FEW_ROUNDS * _ENTRIES)]
            del held
            reader.close()
            tick(manager)
            tick(manager)
            assert disk_usage(device / "store") < before - 0.8 * dead_bytes(_FEW_ROUNDS)
            check(manager, ledger_ids, ledger_ids[::2])
