"""Log files of the reserve are emptied on a full disk: the SSD tier has space for the few entries that are in them."""

from __future__ import annotations

from itertools import count

import pytest

from pybk.errors import PybkError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.compaction import checkpoint
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.tiers import LOG
from pybk.storage.tiers.lmdb_tier import room_of
from tests.internals import store_of
from tests.simdisk import SimCrash, SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG, ROOT, abandon
from tests.storage.test_bitflips import verify
from tests.storage.test_full_disk import WATCHED, append_some, full_store, made_when_full, new_ledger
from tests.storage.test_space import open_small, tick

_TAKE_OVERS = 20


def header(number: int) -> bytes:
    return b"header %d" % number


def take_over(manager: LedgerManager, payload: bytes) -> int:
    """Make a ledger with a first entry in a log file of its own; returns it."""
    with made_when_full(manager, 1) as writer:
        writer.append(payload)
    store_of(manager).log.cut(lambda: None)
    return writer.ledger_id


def make_checkpoint(manager: LedgerManager) -> None:
    """Make a checkpoint alone: a collection would say that other entries wait for space."""
    store_of(manager).scheduler.checkpoint()


def is_whole(manager: LedgerManager) -> bool:
    return store_of(manager).supply.reserve.is_whole


def room(manager: LedgerManager) -> int:
    store = store_of(manager)
    return min(room_of(store, file_id) for file_id in store.entries)


def check(manager: LedgerManager, ledger_ids: list[int]) -> None:
    for number, ledger_id in enumerate(ledger_ids):
        reader = manager.open_ledger(ledger_id, recover=False)
        assert [bytes(entry.payload) for entry in reader.read(0, 0)] == [header(number)]


def full_of_take_overs() -> tuple[SimFileSystem, LedgerManager, list[int]]:
    """Return a full disk of a store on which more logs were taken over than the reserve has files."""
    full = full_store("live", watched=True)
    ledger_ids = [take_over(full.manager, header(number)) for number in range(_TAKE_OVERS)]
    make_checkpoint(full.manager)
    return full.fs, full.manager, ledger_ids


def test_a_checkpoint_empties_log_files_of_the_reserve() -> None:
    _, manager, ledger_ids = full_of_take_overs()
    assert is_whole(manager)
    check(manager, ledger_ids)
    manager.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("power_loss", [False, True])
def test_what_was_in_them_is_found_after_a_restart(power_loss: bool) -> None:
    fs, manager, ledger_ids = full_of_take_overs()
    fs = fs.crash() if power_loss else fs.kill()
    abandon(manager)
    manager = open_small(fs, CONFIG)
    check(manager, ledger_ids)
    manager.close()
    assert verify(fs)


def test_what_was_in_them_is_found_without_the_index() -> None:
    fs, manager, ledger_ids = full_of_take_overs()
    manager.close()
    fs.give_back(32 << 20)
    rebuild_index(ROOT, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    manager = open_small(fs, CONFIG)
    check(manager, ledger_ids)
    manager.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_stop_at_any_operation_of_such_a_checkpoint_loses_nothing(power_loss: bool) -> None:
    full = full_store("live", watched=True)
    ledger_ids = [take_over(full.manager, header(number)) for number in range(4)]
    abandon(full.manager)
    for operation in count():
        fs = full.fs.kill()
        manager = open_small(fs, CONFIG)
        fs.crash_at(operation)
        try:
            make_checkpoint(manager)
        except (SimCrash, PybkError):
            assert fs.dead
        else:
            abandon(manager)
            break
        abandon(manager)
        fs = fs.crash() if power_loss else fs.kill()
        manager = open_small(fs, CONFIG)
        check(manager, ledger_ids)
        make_checkpoint(manager)
        assert is_whole(manager)
        check(manager, ledger_ids)
        manager.close()
    assert operation > 10


@pytest.mark.parametrize(("entries", "ready"), [(1, 2), (1000, 3)])
def test_a_checkpoint_between_the_creation_of_a_ledger_and_its_first_entries_hinders_none(
    entries: int, ready: int
) -> None:
    full = full_store("live", watched=True)
    make_checkpoint(full.manager)
    store = store_of(full.manager)
    while len(store.supply.reserve.ready()) > ready:
        take_over(full.manager, b"header")
    with made_when_full(full.manager, entries) as writer:
        store.log.cut(lambda: None)  # as a checkpoint in the background does first
        for _ in range(min(entries, 2)):
            writer.append(b"entry")
    full.manager.close()


def test_the_space_is_free_again_once_the_ledgers_are_deleted() -> None:
    fs, manager, ledger_ids = full_of_take_overs()
    before = room(manager)
    for ledger_id in ledger_ids:
        manager.delete_ledger(ledger_id)
    make_checkpoint(manager)
    tick(manager)
    assert room(manager) > before
    manager.close()
    assert verify(fs)


def test_a_log_file_that_one_entry_fills_is_emptied_too() -> None:
    full = full_store("live", watched=True)
    make_checkpoint(full.manager)
    take_over(full.manager, bytes(60_000))
    make_checkpoint(full.manager)
    assert is_whole(full.manager)
    full.manager.close()


def test_files_with_many_entries_leave_room_for_those_with_few() -> None:
    full = full_store("live", watched=True)
    make_checkpoint(full.manager)
    large = take_over(full.manager, bytes(200_000))
    small = [take_over(full.manager, header(number)) for number in range(3)]
    make_checkpoint(full.manager)
    store = store_of(full.manager)
    assert [row.file_id for row in store.index.files().values() if row.kind == LOG and row.bytes > 200_000]
    assert len(store.supply.reserve.ready()) == 5
    check(full.manager, small)
    full.manager.delete_ledger(large)
    make_checkpoint(full.manager)
    tick(full.manager)
    assert is_whole(full.manager)
    full.manager.close()


def test_entries_of_the_ssd_tier_leave_the_room_to_those_of_the_reserve() -> None:
    fs = SimFileSystem(3, capacity_bytes=64 << 20)
    manager = open_small(fs, WATCHED)
    append_some(new_ledger(manager, StorageHint.SSD), 20)
    fs.fill()
    tick(manager)
    before = room(manager)
    make_checkpoint(manager)
    assert room(manager) == before
    manager.close()


def test_without_room_entries_stay_until_there_is_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "room_of", lambda *_: 0)
    full = full_store("live", watched=True)
    ledger_ids = [take_over(full.manager, header(number)) for number in range(3)]
    make_checkpoint(full.manager)
    assert len(store_of(full.manager).supply.reserve.ready()) == 3
    check(full.manager, ledger_ids)
    full.fs.give_back(32 << 20)
    tick(full.manager)
    assert is_whole(full.manager)
    check(full.manager, ledger_ids)
    append_some(new_ledger(full.manager, StorageHint.NVME))
    full.manager.close()
