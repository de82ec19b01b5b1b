"""A store that an earlier version closed is read by this one, whole, and takes new entries."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from pybk import LedgerManager, LedgerState, StorageHint
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.repair.verify import verify_store
from tests.golden.make_store import PASSWORD, payload
from tests.paths import GOLDEN

ARCHIVE = GOLDEN / "store.tar.xz"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "store"


def check(manager: LedgerManager, *, recover: bool) -> None:
    ledgers = list(manager.list_ledgers("golden"))
    assert ledgers == list(range(12))
    for ledger_id in [*ledgers, 12]:
        reader = manager.open_ledger(ledger_id, password=PASSWORD, recover=recover)
        count = 5 if ledger_id == 12 else 21
        found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        assert found == [payload(ledger_id, number) for number in range(count)]


def test_every_file_has_a_format_and_is_in_the_golden_store(store: Path) -> None:
    names = {path.name for path in store.rglob("*") if path.is_file()}
    assert {"cookie", "directories", "watermark", "data.mdb"} <= names
    assert {name.rpartition(".")[2] for name in names} >= {"log", "cold"}
    assert any(name.startswith("catalog-") for name in names)


def test_an_old_store_is_read_without_a_writer(store: Path) -> None:
    with LedgerManager.open(store, read_only=True) as manager:
        check(manager, recover=False)
    assert not verify_store(str(store), password=PASSWORD).problems


def test_an_old_store_accepts_appends(store: Path) -> None:
    with LedgerManager.open(store) as manager:
        assert manager.ledger_metadata(3).state is LedgerState.OPEN
        assert manager.ledger_metadata(0).custom_metadata == {"hint": b"nvme"}
        check(manager, recover=True)
        for ledger_id in range(13):
            manager.move_ledger(ledger_id, StorageHint.HDD)
        writer = manager.create_ledger(password=PASSWORD)
        assert writer.ledger_id == 13
        check(manager, recover=True)


def test_an_old_index_is_made_again(store: Path) -> None:
    shutil.rmtree(store / "ssd" / "index")
    rebuild_index(str(store))
    with LedgerManager.open(store) as manager:
        check(manager, recover=True)
