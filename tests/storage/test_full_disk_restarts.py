"""A store on a full disk is opened and deleted from as often as wanted, while another program takes what that frees."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk.config import MIB
from pybk.errors import StorageFullError
from pybk.flags import StorageHint
from pybk.storage import space
from tests.full_device import filled, small_device
from tests.simdisk import SimFileSystem
from tests.storage.real_store import numbered, open_quick
from tests.storage.store_harness import CONFIG
from tests.storage.test_full_disk import append_some, fill, new_ledger
from tests.storage.test_space import open_small, tick

_LEDGERS = 160
"""More checkpoints than the space that is allocated beyond the end of a new catalog holds."""


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.parametrize("end", ["live", "closed", "killed", "lost power"])
def test_every_start_on_a_full_disk_deletes_another_ledger(end: str) -> None:
    fs = SimFileSystem(7, capacity_bytes=128 * MIB)
    manager = open_small(fs, CONFIG)
    ledger_ids = []
    for _ in range(_LEDGERS):
        with new_ledger(manager, StorageHint.NVME) as writer:
            append_some(writer, 2)
        ledger_ids.append(writer.ledger_id)
    manager.checkpoint()
    for ledger_id in ledger_ids:
        fs, manager = fill(fs, end, manager)
        manager.delete_ledger(ledger_id)
        tick(manager)
    assert list(manager.list_ledgers()) == []
    manager.close()


def test_a_checkpoint_that_there_is_no_space_for_takes_no_reserved_file(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = SimFileSystem(8, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    ledger_ids = [new_ledger(manager, StorageHint.NVME).ledger_id for _ in range(30)]
    manager.checkpoint()
    fs.fill()
    monkeypatch.setattr(space, "INDEX_SPARE_BYTES", 64 * MIB)
    for ledger_id in ledger_ids:
        manager.delete_ledger(ledger_id)
        with pytest.raises(StorageFullError, match="changing the index"):
            manager.checkpoint()
    assert list(manager.list_ledgers()) == []
    manager.close()


@pytest.mark.sampled(one_in=6, group="full disks")
@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.SSD])
def test_every_start_on_a_real_full_disk_deletes_another_ledger(hint: StorageHint, tmp_path: Path) -> None:
    with small_device(tmp_path / "device", 64 * MIB) as device:
        with open_quick(device / "store") as manager:
            for _ in range(_LEDGERS):
                with manager.create_ledger(storage_hints={hint}, insecure=True) as writer:
                    writer.append_many(numbered(3))
            manager.checkpoint()
            ledger_ids = list(manager.list_ledgers())
        with filled(device):
            for ledger_id in ledger_ids:
                with open_quick(device / "store") as manager:
                    manager.delete_ledger(ledger_id)
                    manager.checkpoint()
        with open_quick(device / "store") as manager:
            assert list(manager.list_ledgers()) == []
            manager.create_ledger(insecure=True).append(b"there is space again")
