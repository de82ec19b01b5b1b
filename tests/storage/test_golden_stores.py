"""Stores of every released format open here; all acknowledged entries are read, and they take new ones."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pybk import DigestType, LedgerManager, LedgerState, NoSuchLedgerError, StorageHint
from pybk.config import StoreConfig
from pybk.storage.format.extent import Extent
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.repair.verify import verify_store
from tests.golden.make_stores import CONFIG, PASSWORD, payload
from tests.internals import store_view_of
from tests.paths import GOLDEN

ARCHIVES = sorted((GOLDEN / "stores").glob("*.tar.gz"))
EMBEDDED = [path for path in ARCHIVES if "bookie" not in path.name]
BOOKIES = [path for path in ARCHIVES if "bookie" in path.name]


def unpack(archive: Path, target: Path) -> dict[str, Any]:
    """Unpack a golden store below a directory and return what must be read from it."""
    with tarfile.open(archive) as packed:
        packed.extractall(target, filter="data")
    expected: dict[str, Any] = json.loads((target / "expected.json").read_text())
    return expected


def check(manager: LedgerManager, expected: dict[str, Any], *, recover: bool) -> None:
    """Assert that all that was acknowledged is read, and nothing else."""
    assert list(manager.list_ledgers("golden")) == sorted(map(int, expected["entries"]))
    for name, count in expected["entries"].items():
        ledger_id = int(name)
        if ledger_id in expected["closed"]:
            assert manager.ledger_metadata(ledger_id).state is LedgerState.CLOSED
        with manager.open_ledger(ledger_id, password=PASSWORD, recover=recover) as reader:
            found = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
        assert found == [payload(ledger_id, number) for number in range(count)], f"ledger {ledger_id}"
    named = {row.name: (row.value or b"").decode() for row in store_view_of(manager).named.all()}
    assert named == {name: value for name, value in expected.get("named", {}).items() if value is not None}
    for ledger_id in expected["deleted"]:
        with pytest.raises(NoSuchLedgerError):
            manager.ledger_metadata(ledger_id)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("archive", EMBEDDED, ids=lambda path: path.name)
def test_a_golden_store_is_read_verified_and_continued(archive: Path, tmp_path: Path) -> None:
    expected = unpack(archive, tmp_path)
    root = tmp_path / "store"
    with LedgerManager.open(root, read_only=True) as manager:
        check(manager, expected, recover=False)
    assert not verify_store(str(root), password=PASSWORD).problems
    with LedgerManager.open(root, config=CONFIG) as manager:
        check(manager, expected, recover=True)
        manager.checkpoint()
        for name in expected["entries"]:
            manager.move_ledger(int(name), StorageHint.HDD)
        writer = manager.create_ledger(password=PASSWORD, ledger_type="golden", digest_type=DigestType.HMAC_SHA256)
        writer.append(payload(writer.ledger_id, 0))
        expected["entries"][str(writer.ledger_id)] = 1
        check(manager, expected, recover=True)
    with LedgerManager.open(root, config=CONFIG) as manager:
        check(manager, expected, recover=True)
    assert not verify_store(str(root), password=PASSWORD).problems


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("archive", EMBEDDED, ids=lambda path: path.name)
def test_the_index_of_a_golden_store_is_made_again(archive: Path, tmp_path: Path) -> None:
    expected = unpack(archive, tmp_path)
    shutil.rmtree(tmp_path / "store" / "ssd" / "index")
    assert rebuild_index(str(tmp_path / "store")).made
    with LedgerManager.open(tmp_path / "store", config=CONFIG) as manager:
        check(manager, expected, recover=True)


@pytest.mark.parametrize("archive", BOOKIES, ids=lambda path: path.name)
def test_the_store_of_a_golden_bookie_is_read_and_verified(archive: Path, tmp_path: Path) -> None:
    expected = unpack(archive, tmp_path)
    root = str(tmp_path / "store")
    assert not verify_store(root).problems
    counts: dict[int, int] = {}
    store = ReadOnlyStore.open(root, config=StoreConfig())
    try:
        for metadata in store.ledgers():
            extent = Extent.of(metadata)
            if extent is not None:
                last = store.descriptor(metadata.ledger_id).last_durable
                counts[extent.ledger_id] = counts.get(extent.ledger_id, 0) + last + 1
    finally:
        store.close()
    assert {name: counts[int(name)] for name in expected["entries"]} == expected["entries"]
