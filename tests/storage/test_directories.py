"""A store is made where no other is, taken up again where its making stopped, and opened where all of it is."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from pybk.config import StoreConfig
from pybk.errors import CookieError, CorruptError, StorageError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.local_backend import StoreBackend
from pybk.storage.store import Store
from pybk.storage.store_opening import PartsOpener
from tests.internals import store_of
from tests.sampling import ALL, every, sample
from tests.simdisk import SimCrash, SimEnvironment, SimFileSystem
from tests.storage.real_store import QUICK, contents, numbered
from tests.storage.store_harness import CONFIG

Tiers = dict[StorageHint, str | list[str]]


def open_at(path: Path, tiers: Tiers | None = None) -> LedgerManager:
    """Open a small store of the real disk."""
    return LedgerManager.open(path, tiers=tiers, config=StoreConfig(**QUICK))


def fill(manager: LedgerManager) -> None:
    """Write one ledger to each tier, past a checkpoint."""
    for hint in StorageHint:
        with manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C) as writer:
            writer.append_many(numbered(20))
    manager.checkpoint()


def assert_whole(manager: LedgerManager) -> None:
    """Assert that what ``fill`` wrote is there."""
    assert [contents(manager, ledger_id) for ledger_id in range(3)] == [numbered(20)] * 3


def descriptors() -> list[str]:
    """Return the files that this process has open."""
    gc.collect()
    names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(name) for name in names if os.path.lexists(name))


def content_of(path: Path) -> dict[Path, bytes | None]:
    """Return the files below a directory, without those that opening may change."""
    return {
        file: file.read_bytes() if file.is_file() else None
        for file in path.rglob("*")
        if file.name not in ("LOCK", "lock.mdb")
    }


# ---- whose a directory is --------------------------------------------------------------------------------------------


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("tier", list(StorageHint))
@pytest.mark.parametrize("where", ["", "nvme", "ssd", "hdd"])
def test_no_store_takes_a_directory_of_another(tmp_path: Path, tier: StorageHint, where: str) -> None:
    with open_at(tmp_path / "a") as manager:
        fill(manager)
        store_id = store_of(manager).store_id.hex()
    before = content_of(tmp_path / "a")
    taken = tmp_path / "a" / where
    with pytest.raises(CookieError, match=rf"{taken}.*{store_id}.*name an empty directory"):
        open_at(tmp_path / "b", {tier: str(taken)})
    assert content_of(tmp_path / "a") == before
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)
    open_at(tmp_path / "b").close()  # a refused open does not prevent later ones


@pytest.mark.parametrize("name", ["index/data.mdb", "entries/data.mdb", f"{1:016x}.log", f"{1:016x}.cold"])
def test_no_store_takes_a_directory_that_lost_its_cookie(tmp_path: Path, name: str) -> None:
    left = tmp_path / "left" / name
    left.parent.mkdir(parents=True)
    left.write_bytes(b"precious")
    with pytest.raises(CookieError, match=f"{name.split('/')[0]} is there.*name an empty directory"):
        open_at(tmp_path / "b", {StorageHint.SSD: str(tmp_path / "left")})
    assert left.read_bytes() == b"precious"
    assert [path.name for path in (tmp_path / "left").iterdir()] == [name.split("/")[0]]


def test_a_store_that_lost_its_own_cookie_is_not_made_anew(tmp_path: Path) -> None:
    with open_at(tmp_path / "a") as manager:
        fill(manager)
    (tmp_path / "a" / "cookie").unlink()
    before = content_of(tmp_path / "a")
    elsewhere: Tiers = {hint: str(tmp_path / f"new-{hint}") for hint in StorageHint}
    with pytest.raises(CookieError, match="mount the device"):
        open_at(tmp_path / "a", elsewhere)
    assert content_of(tmp_path / "a") == before
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)


# ---- an opening that was interrupted ---------------------------------------------------------------------------------


def test_an_interrupt_right_after_the_parts_were_opened_closes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_at(tmp_path / "a") as manager:
        fill(manager)
    before = descriptors()
    open_parts = PartsOpener.open

    def interrupted(opener: PartsOpener, *arguments: Any) -> None:
        open_parts(opener, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(PartsOpener, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_at(tmp_path / "a")
    assert descriptors() == before
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)


# ---- a making that was interrupted -----------------------------------------------------------------------------------


def open_simulated(fs: SimFileSystem, tiers: Tiers) -> LedgerManager:
    """Open a store of a simulated disk whose tiers lie elsewhere."""
    store = Store.open("/s", config=CONFIG, tiers=tiers, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    return LedgerManager(StoreBackend(store))


def operations_of_creation() -> int:
    """Return how many disk operations go by until the store's own cookie is there."""
    fs = SimFileSystem(0)
    open_simulated(fs, {StorageHint.HDD: "/h", StorageHint.SSD: ["/x", "/y"]}).close()
    return fs.operations.index(("unlink", "/s/cookie.planned")) + 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("again", [["/x", "/y"], ["/x"], ["/z", "/x", "/y"]])
def test_an_interrupted_making_is_taken_up_again(again: list[str], power_loss: bool) -> None:
    last = operations_of_creation()
    for operation in sample(f"{again} {power_loss}", range(0 if ALL else power_loss, last, every(3)), 2):
        fs = SimFileSystem(operation)
        fs.crash_at(operation)
        with pytest.raises(SimCrash):
            open_simulated(fs, {StorageHint.HDD: "/h", StorageHint.SSD: ["/x", "/y"]})
        after = fs.crash() if power_loss else fs.kill()
        made = after.exists("/s/cookie")
        manager = open_simulated(after, {StorageHint.HDD: "/h", StorageHint.SSD: ["/x", "/y"] if made else again})
        fill(manager)
        assert_whole(manager)
        assert not after.exists("/s/cookie.planned")
        manager.close()


def test_a_making_that_was_killed_and_then_lost_power_is_taken_up_again() -> None:
    tiers: Tiers = {StorageHint.HDD: "/h", StorageHint.SSD: ["/x", "/y"]}
    whole = SimFileSystem(0)
    open_simulated(whole, tiers).close()
    renamed = whole.operations.index(("rename", "/s/cookie.planned.tmp"))
    for seed in range(60):
        fs = SimFileSystem(seed)
        fs.crash_at(renamed + 1)
        with pytest.raises(SimCrash):
            open_simulated(fs, tiers)
        killed = fs.kill()
        killed.crash_at(seed % 30)
        with pytest.raises(SimCrash):
            open_simulated(killed, tiers)
        open_simulated(killed.crash(), tiers).close()


def test_another_store_is_not_taken_for_an_interrupted_creation() -> None:
    fs = SimFileSystem(0)
    Store.open("/a", config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path)).close()
    fs.crash_at(0, only="commit")
    with pytest.raises(SimCrash):
        open_simulated(fs, {StorageHint.SSD: ["/x", "/y"]})
    after = fs.kill()
    assert after.exists("/s/cookie.planned")
    with pytest.raises(CookieError, match="/a/ssd"):
        open_simulated(after, {StorageHint.SSD: "/a/ssd"})
    open_simulated(after, {StorageHint.SSD: "/z"}).close()
    Store.open("/a", config=CONFIG, fs=after, environment=lambda path: SimEnvironment(after, path)).close()


# ---- which directories a store has -----------------------------------------------------------------------------------


def test_directories_that_do_not_fit_are_not_remembered(tmp_path: Path) -> None:
    tiers: Tiers = {StorageHint.HDD: [str(tmp_path / "h0"), str(tmp_path / "h1")]}
    with open_at(tmp_path / "a", tiers) as manager:
        fill(manager)
    remembered = (tmp_path / "a" / "directories").read_bytes()
    with pytest.raises(CookieError, match="name every directory"):
        open_at(tmp_path / "a", {StorageHint.HDD: str(tmp_path / "h0")})
    assert (tmp_path / "a" / "directories").read_bytes() == remembered
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)


def test_directories_of_a_failed_open_are_not_remembered(tmp_path: Path) -> None:
    with open_at(tmp_path / "a", {StorageHint.HDD: str(tmp_path / "h0")}) as manager:
        fill(manager)
    remembered = (tmp_path / "a" / "directories").read_bytes()
    (tmp_path / "h0").rename(tmp_path / "h1")
    segment = next((tmp_path / "h1").glob("*.cold"))
    segment.rename(tmp_path / "segment")
    with pytest.raises(CorruptError, match="is missing"):
        open_at(tmp_path / "a", {StorageHint.HDD: str(tmp_path / "h1")})
    assert (tmp_path / "a" / "directories").read_bytes() == remembered


def test_a_store_whose_ssd_tier_is_gone_is_refused_and_begins_no_other(tmp_path: Path) -> None:
    with open_at(tmp_path / "a") as manager:
        fill(manager)
    data = tmp_path / "a" / "ssd" / "entries" / "data.mdb"
    data.rename(tmp_path / "data.mdb")
    for _ in range(2):
        with pytest.raises(CorruptError, match=r"entries is missing.*backup"):
            open_at(tmp_path / "a")
        assert not data.exists()
    (tmp_path / "data.mdb").rename(data)
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)


@pytest.mark.parametrize("tier", [StorageHint.HDD, StorageHint.SSD])
def test_every_file_has_its_directory_although_the_list_is_lost(tmp_path: Path, tier: StorageHint) -> None:
    tiers: Tiers = {tier: [str(tmp_path / "0"), str(tmp_path / "1")]}
    with open_at(tmp_path / "a", tiers) as manager:
        fill(manager)
        fill(manager)  # directories take turns
    (tmp_path / "a" / "directories").unlink()
    leftover = tmp_path / "a" / f"catalog-{99:016x}"
    leftover.write_bytes(b"removed by what opens")
    with pytest.raises(CookieError, match="naming every directory"):
        open_at(tmp_path / "a", {tier: str(tmp_path / "0")})
    assert not (tmp_path / "a" / "directories").exists()
    assert leftover.exists(), "it was changed before it was known that all is there"
    open_at(tmp_path / "a", tiers).close()
    assert not leftover.exists()
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)


def test_tiers_that_are_not_named_stay_where_they_are(tmp_path: Path) -> None:
    tiers: Tiers = {StorageHint.HDD: str(tmp_path / "h"), StorageHint.SSD: str(tmp_path / "s")}
    with open_at(tmp_path / "a", tiers) as manager:
        fill(manager)
    (tmp_path / "h").rename(tmp_path / "moved")
    with open_at(tmp_path / "a", {StorageHint.HDD: str(tmp_path / "moved")}) as manager:
        assert_whole(manager)
    with open_at(tmp_path / "a") as manager:
        assert_whole(manager)


def test_a_list_that_cannot_be_saved_leaves_no_store_open() -> None:
    fs = SimFileSystem(0)
    open_simulated(fs, {}).close()
    before = len(fs.operations)
    open_simulated(fs, {}).close()
    renamed = [path for name, path in fs.operations[before:] if name == "rename"]
    fs.fail_at(renamed.index("/s/directories.tmp"), only="rename")
    with pytest.raises(StorageError, match=r"directories\.tmp"):
        open_simulated(fs, {})
    fs.heal()
    open_simulated(fs, {}).close()  # it is not locked


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_a_path_that_is_not_a_directory_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in ("file", "file/below"):
        with pytest.raises(UsageError, match="is not a directory"):
            open_at(tmp_path / path)
        with pytest.raises(UsageError, match="is not a directory"):
            open_at(tmp_path / "a", {StorageHint.HDD: str(tmp_path / path)})
    open_at(tmp_path / "a").close()
