"""Disk space: deleted ledgers give theirs back while writes continue; kept ones take little more than their payload."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pybk.config import KIB, MIB, StoreConfig
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metrics import MetricKey
from pybk.storage.format import catalog
from pybk.storage.store import Store
from tests.internals import store_of
from tests.simdisk import SimFileSystem
from tests.storage.live_files import disk_usage
from tests.storage.store_harness import RESERVE_BYTES, open_store
from tests.waiting import wait_until

SMALL = StoreConfig(
    background=False,
    log_file_bytes=MIB,
    unchecked_tail_bytes=4 * MIB,
    cold_block_bytes=4 * KIB,
    ssd_block_bytes=4 * KIB,
    free_bytes_low=0,
    free_bytes_ok=0,
)


def payload_of(number: int, size: int = KIB) -> bytes:
    return (b"%d " % number * size)[:size]


def new_ledger(manager: LedgerManager, hint: StorageHint = StorageHint.NVME) -> LedgerWriter:
    return manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C)


def check(manager: LedgerManager, ledger_id: int, count: int, size: int = KIB) -> None:
    reader = manager.open_ledger(ledger_id, recover=False)
    assert reader.last_add_confirmed == count - 1
    found = [entry.payload for entry in reader.read(0, count - 1)]
    assert found == [payload_of(number, size) for number in range(count)]


def files_of(fs: SimFileSystem) -> list[str]:
    return [name for tier in StorageHint for name in fs.list_directory(f"/store/{tier.value}")]


def test_runs_of_other_files_may_lie_between_those_that_are_packed() -> None:
    fs = SimFileSystem(1)
    manager = open_store(fs, SMALL)
    kept = new_ledger(manager, StorageHint.HDD)
    count = 0
    for _ in range(6):
        doomed = new_ledger(manager, StorageHint.HDD)
        for _ in range(40):
            kept.append(payload_of(count))
            count += 1
            for _ in range(3):
                doomed.append(payload_of(0))
        manager.checkpoint()
        # Every other part goes away and comes back, so that the ledger's parts lie in files by turns.
        manager.move_ledger(kept.ledger_id, StorageHint.SSD if count % 80 else StorageHint.HDD)
        manager.delete_ledger(doomed.ledger_id)
        check(manager, kept.ledger_id, count)
    manager.checkpoint()
    check(manager, kept.ledger_id, count)
    manager.close()


def test_one_file_of_a_ledger_whose_parts_lie_in_files_by_turns_is_packed() -> None:
    fs = SimFileSystem(2)
    manager = open_store(fs, SMALL)
    writers = [new_ledger(manager, StorageHint.HDD) for _ in range(4)]
    for number in range(100):
        for writer in writers:
            writer.append(payload_of(number))
    manager.checkpoint()
    # A damaged half would do the same: some runs of the file are moved, others in between stay.
    store = store_of(manager)
    runs = next(store.index.pages(writers[0].ledger_id))
    compaction = store.scheduler.compaction
    compaction.relocate([(writers[0].ledger_id, [runs[::2]])], StorageHint.NVME)
    check(manager, writers[0].ledger_id, 100)
    for writer in writers[1:]:
        manager.delete_ledger(writer.ledger_id)
    manager.checkpoint()
    check(manager, writers[0].ledger_id, 100)
    assert list(store.index.check()) == []
    manager.close()


def used_bytes(fs: SimFileSystem, store: Store) -> int:
    """Return what a store takes, but for what an environment of the SSD tier has to spare, which never shrinks."""
    return fs.used_bytes() - sum(each.reserved_bytes() for each in store.entries.values())


def test_deleted_ledgers_give_their_space_back() -> None:
    fs = SimFileSystem(3)
    manager = open_store(fs, SMALL)
    for hint in StorageHint:
        kept, doomed = new_ledger(manager, hint), new_ledger(manager, hint)
        for number in range(300):
            kept.append(payload_of(number))
            for extra in range(3):
                doomed.append(payload_of(extra))
        manager.checkpoint()
        before = used_bytes(fs, store_of(manager))
        manager.delete_ledger(doomed.ledger_id)
        manager.checkpoint()
        assert used_bytes(fs, store_of(manager)) < before - 0.9 * 900 * KIB, hint
        check(manager, kept.ledger_id, 300)
    counters = manager.metrics().counters
    assert counters[MetricKey("compactions")] > 0
    assert counters[MetricKey("moved_bytes", tier="hdd", labels=(("reason", "compaction"),))] > 300 * KIB
    manager.close()


def test_files_of_short_records_are_not_packed_over_and_over() -> None:
    fs = SimFileSystem(4)
    manager = open_store(fs, SMALL)
    for number in range(50):
        new_ledger(manager, StorageHint.HDD).append(b"%d" % number)
    doomed = new_ledger(manager, StorageHint.HDD)
    doomed.append(b"gone soon")
    manager.checkpoint()
    manager.delete_ledger(doomed.ledger_id)
    manager.checkpoint()
    files = files_of(fs)
    for _ in range(3):
        manager.checkpoint()
    assert files_of(fs) == files
    assert "compactions" not in [key.name for key, value in manager.metrics().counters.items() if value]
    manager.close()


def test_the_catalog_forgets_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "REWRITE_BYTES_MIN", 64 * KIB)
    fs = SimFileSystem(5)
    manager = open_store(fs, SMALL)
    kept = new_ledger(manager)
    names = set()
    for number in range(60):
        kept.append(payload_of(number))
        for _ in range(4):
            ledger = new_ledger(manager)
            manager.delete_ledger(ledger.ledger_id)
        manager.checkpoint()
        found = [name for name in fs.list_directory("/store") if name.startswith("catalog-")]
        assert len(found) == 1
        names.add(found[0])
        assert fs.file_bytes(f"/store/{found[0]}") < 128 * KIB
    assert len(names) > 2
    manager.close()
    manager = open_store(fs, SMALL)
    check(manager, kept.ledger_id, 60)
    manager.close()


def test_space_is_freed_while_writes_continue(tmp_path: Path) -> None:
    """Ledgers come and go, with the maintenance thread at work: the disk holds a bounded multiple of what lives."""
    config = StoreConfig(
        log_file_bytes=MIB,
        unchecked_tail_bytes=4 * MIB,
        free_bytes_low=0,
        free_bytes_ok=0,
    )
    batch = [payload_of(number) for number in range(256)]
    appended = 0
    enough = threading.Event()
    with LedgerManager.open(tmp_path / "store", config=config) as manager:
        kept = new_ledger(manager)

        def append() -> None:
            nonlocal appended
            while appended < 2000 or not enough.is_set():
                kept.append(payload_of(appended))
                appended += 1

        def bounded() -> bool:
            return disk_usage(tmp_path) < 30 * MIB + 2 * appended * KIB

        thread = threading.Thread(target=append)
        thread.start()
        try:
            old: list[int] = []
            for number in range(60):
                writer = new_ledger(manager, list(StorageHint)[number % 3])
                for _ in range(4):
                    writer.append_many(batch)
                old.append(writer.ledger_id)
                if len(old) > 4:
                    manager.delete_ledger(old.pop(0))
                # The maintenance thread gets no share of a busy machine that could be relied on, so it is waited for.
                wait_until(bounded, f"space to come back in round {number}, while another ledger is appended to")
        finally:
            enough.set()
            thread.join()
        check(manager, kept.ledger_id, appended)
        manager.checkpoint()
    # 5 MiB and the kept ledger live; the map of the SSD tier is LMDB's, which never makes it smaller.
    assert disk_usage(tmp_path) < 22 * MIB + RESERVE_BYTES + 1.3 * appended * KIB


@pytest.mark.parametrize(
    "hint",
    [StorageHint.HDD, *(pytest.param(hint, marks=pytest.mark.long) for hint in (StorageHint.NVME, StorageHint.SSD))],
)
def test_entries_appended_singly_take_little_more_than_their_payload(tmp_path: Path, hint: StorageHint) -> None:
    count = 16_384
    with LedgerManager.open(tmp_path / "store", config=StoreConfig(background=False)) as manager:
        writer = manager.create_ledger(storage_hints={hint}, insecure=True)
        for number in range(count):
            writer.append(payload_of(number))
        before = store_of(manager).volumes.disk_bytes()
        assert before > 3 * count * KIB, "each entry was to take a block of its own"
        manager.checkpoint()
        writer.close()
        check(manager, writer.ledger_id, count)
    assert disk_usage(tmp_path) <= 1.3 * count * KIB + RESERVE_BYTES
