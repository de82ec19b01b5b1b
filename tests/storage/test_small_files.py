"""No single small file can lose a store: each is made again from what repeats it, or by `pybk store rebuild-index`."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pybk import CookieError, CorruptError, DigestType, LedgerManager, PybkError, StorageHint
from pybk.feature_level import FeatureLevel
from pybk.storage import directories
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.repair.verify import verify_store
from tests.internals import store_of
from tests.storage.real_store import numbered, open_quick, payloads
from tests.storage.test_consistency import tree

PASSWORD = b"secret"

Harm = Callable[[Path], None]


def flipped(at: int) -> Harm:
    """Return a harm that changes one bit."""

    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at % len(data)] ^= 1
        path.write_bytes(data)

    return harm


HARMS: dict[str, Harm] = {
    "lost": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
    **{f"bit {at}": flipped(at) for at in (0, 9, 70, 150, -2)},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_quick(tmp_path / "store", background=False) as manager:
        for hint in StorageHint:
            with manager.create_ledger(
                password=PASSWORD, storage_hints={hint}, digest_type=DigestType.HMAC_SHA256
            ) as writer:
                writer.append_many(numbered(50))
        manager.checkpoint()
        with manager.create_ledger(password=PASSWORD) as writer:
            writer.append_many(numbered(50))
    return tmp_path / "store"


def assert_whole(manager: LedgerManager) -> None:
    """Assert that all entries are read."""
    for ledger_id in range(4):
        with manager.open_ledger(ledger_id, password=PASSWORD, recover=False) as reader:
            assert payloads(reader) == numbered(50)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["cookie", "nvme/cookie", "ssd/cookie", "hdd/cookie", "catalog-*"])
def test_a_small_file_is_made_again(root: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = root.glob(name)
    before = path.read_bytes()
    HARMS[harm](path)
    with caplog.at_level(logging.WARNING), open_quick(root) as manager:
        assert "made again" in caplog.text
        assert_whole(manager)
    (path,) = root.glob(name)
    if name != "catalog-*":
        assert path.stat().st_size == len(before)
    with open_quick(root) as manager:
        assert_whole(manager)
    assert not verify_store(str(root), password=PASSWORD).problems


@pytest.mark.parametrize("at", [0, 70, 4096 + 8, 4096 + 200])
def test_every_part_of_a_catalog_is_made_again(root: Path, at: int) -> None:
    (path,) = root.glob("catalog-*")
    flipped(at)(path)
    with open_quick(root) as manager:
        assert_whole(manager)
    assert not verify_store(str(root), password=PASSWORD).problems


@pytest.mark.parametrize("size", [0, 1, 4096, 8191])
@pytest.mark.parametrize("name", ["ssd/index", "ssd/entries"])
def test_an_lmdb_file_without_its_first_pages_is_refused_untouched(root: Path, name: str, size: int) -> None:
    """LMDB takes an empty file for a new one, and would write to it."""
    os.truncate(root / name / "data.mdb", size)
    before = tree(root)
    with pytest.raises(CorruptError, match=rf"{root / name}.*rebuild-index"):
        open_quick(root)
    assert tree(root) == before
    with pytest.raises(CorruptError, match="rebuild-index"):
        open_quick(root, read_only=True)
    assert tree(root) == before
    assert rebuild_index(str(root), accept_loss=True).made
    with open_quick(root) as manager, manager.open_ledger(0, password=PASSWORD, recover=False) as reader:
        assert payloads(reader) == numbered(50)


@pytest.mark.parametrize("name", ["ssd/index/data.mdb", "watermark", "directories"])
def test_a_file_that_an_open_does_not_make_again_is_refused_untouched(root: Path, name: str) -> None:
    (root / name).unlink()
    before = tree(root)
    with pytest.raises(CorruptError):
        open_quick(root)
    assert tree(root) == before
    if name == "directories":
        LedgerManager.open(root, tiers={hint: str(root / hint.value) for hint in StorageHint}).close()
    else:
        assert rebuild_index(str(root)).made
    assert (root / "accepted-loss").exists() is (name == "watermark")
    with open_quick(root) as manager:
        assert_whole(manager)


def test_an_empty_tier_without_a_cookie_may_be_a_device_that_is_not_mounted(tmp_path: Path) -> None:
    open_quick(tmp_path / "store").close()
    (tmp_path / "store" / "hdd" / "cookie").unlink()
    before = tree(tmp_path / "store")
    with pytest.raises(CookieError, match=r"mount the device.*rebuild-index"):
        open_quick(tmp_path / "store")
    assert tree(tmp_path / "store") == before
    assert rebuild_index(str(tmp_path / "store")).made
    open_quick(tmp_path / "store").close()


def test_the_cookie_of_a_young_store_is_made_again_because_its_log_files_are_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The index of a store that was never checkpointed names no log file."""
    root = tmp_path / "store"
    manager = open_quick(root, background=False)
    writer = manager.create_ledger(insecure=True)
    writer.append_many(numbered(50))
    copies = [tmp_path / "lost", tmp_path / "empty"]
    for copy in copies:
        shutil.copytree(root, copy)
    manager.close()
    other = tmp_path / "other"
    open_quick(other, background=False).close()
    for copy in copies:
        HARMS[copy.name](copy / "nvme" / "cookie")
        logs = {path: path.read_bytes() for path in (copy / "nvme").glob("*.log")}
        for path in logs:
            path.unlink()
        for path in (other / "nvme").glob("*.log"):
            shutil.copy(path, copy / "nvme")
        (copy / "nvme" / "00000000000000ff.log").write_bytes(bytes(1 << 13))  # preallocated and never begun
        before = tree(copy)
        with pytest.raises(CookieError, match="mount the device"):
            open_quick(copy)
        assert tree(copy) == before, "log files of another store prove nothing"
        for path in (copy / "nvme").glob("*.log"):
            path.unlink()
        for path, data in logs.items():
            path.write_bytes(data)
        caplog.clear()
        with caplog.at_level(logging.WARNING), open_quick(copy, background=False) as manager:
            assert "made again" in caplog.text
            with manager.open_ledger(0, recover=False) as reader:
                assert payloads(reader) == numbered(50)


def test_parts_of_two_stores_make_no_cookie(root: Path, tmp_path: Path) -> None:
    open_quick(tmp_path / "other").close()
    (root / "cookie").unlink()
    (root / "hdd" / "cookie").write_bytes((tmp_path / "other" / "hdd" / "cookie").read_bytes())
    before = tree(root)
    with pytest.raises(CookieError, match="2 different stores"):
        open_quick(root)
    assert tree(root) == before


def test_a_store_of_the_first_level_has_one_copy_of_its_salt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "NEWEST_STORE_LEVEL", FeatureLevel.BASE)
    with open_quick(tmp_path / "store") as manager:
        assert store_of(manager).feature_level is FeatureLevel.BASE
    (tmp_path / "store" / "cookie").unlink()
    before = tree(tmp_path / "store")
    with pytest.raises(PybkError, match="backup"):
        open_quick(tmp_path / "store")
    assert tree(tmp_path / "store") == before
