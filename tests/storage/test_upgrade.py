"""A store's feature level is raised whole or not at all, and older versions refuse it from then on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pybk import LedgerManager
from pybk.admin.cli import main
from pybk.errors import UsageError
from pybk.feature_level import NEWEST_STORE_LEVEL, FeatureLevel
from pybk.storage import directories
from pybk.storage.format.catalog import read_header
from pybk.storage.format.cookie import read_cookie
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.repair.verify import verify_store
from tests.golden.make_stores import CONFIG, PASSWORD
from tests.internals import store_of
from tests.sampling import every
from tests.simdisk import SimFileSystem, stopping
from tests.storage.store_harness import World, abandon, open_world
from tests.storage.test_golden_stores import EMBEDDED, check, unpack

MIXED = next(path for path in EMBEDDED if path.name == "base-mixed-killed.tar.gz")


def test_a_store_of_the_first_formats_keeps_its_level_until_it_is_raised(tmp_path: Path) -> None:
    expected = unpack(MIXED, tmp_path)
    root = tmp_path / "store"
    with LedgerManager.open(root, config=CONFIG) as manager:
        assert store_of(manager).feature_level is FeatureLevel.BASE
        manager.checkpoint()
    (catalog,) = root.glob("catalog-*")
    assert read_header(OsFileSystem(), str(catalog)).format == 1
    assert main(["upgrade", str(root)]) == 0
    assert json.loads((root / "cookie").read_text())["format"] == 1, "a dry run changed something"
    assert main(["upgrade", str(root), "--finalize"]) == 0
    for directory in (root, *(root / tier for tier in ("nvme", "ssd", "hdd"))):
        cookie = read_cookie(OsFileSystem(), str(directory))
        assert cookie is not None
        assert cookie.level is NEWEST_STORE_LEVEL
        assert cookie.salt is not None
    (catalog,) = root.glob("catalog-*")
    assert read_header(OsFileSystem(), str(catalog)).level is NEWEST_STORE_LEVEL
    with LedgerManager.open(root, config=CONFIG) as manager:
        check(manager, expected, recover=True)
        store_of(manager).named.compare_and_set("name", None, b"value", level=NEWEST_STORE_LEVEL)
    assert not verify_store(str(root), password=PASSWORD).problems


def test_a_level_of_clusters_alone_is_refused(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path, config=CONFIG) as manager:
        with pytest.raises(UsageError, match="not one of stores"):
            store_of(manager).raise_level(FeatureLevel.HEALING)
        assert store_of(manager).feature_level is NEWEST_STORE_LEVEL


def test_the_command_says_what_it_would_do_and_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(directories, "NEWEST_STORE_LEVEL", FeatureLevel.BASE)
        LedgerManager.open(tmp_path / "store", config=CONFIG).close()
    assert main(["upgrade", str(tmp_path / "store")]) == 0
    assert "--finalize" in capsys.readouterr().out
    assert main(["upgrade", str(tmp_path / "store"), "--finalize", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == NEWEST_STORE_LEVEL
    assert main(["upgrade", str(tmp_path / "nothing")]) == 2


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("below", [FeatureLevel.BASE, FeatureLevel.SEALS])
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_stop_at_any_operation_of_raising_leaves_a_whole_store(
    below: FeatureLevel, power_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels = set()
    operation, stops = 0, True
    while stops:
        fs, world = SimFileSystem(operation), World()
        with monkeypatch.context() as patch:
            patch.setattr(directories, "NEWEST_STORE_LEVEL", below)
            manager = open_world(fs)
        world.run(manager)
        fs.crash_at(operation)
        with stopping(fs):
            store_of(manager).raise_level()
            stops = False
        abandon(manager)
        fs = fs.crash() if power_loss else fs.kill()
        manager = open_world(fs)
        levels.add(store_of(manager).feature_level)
        world.check(manager, recover=False)
        store_of(manager).raise_level()
        world.check(manager)
        manager.close()
        manager = open_world(fs)
        assert store_of(manager).feature_level is NEWEST_STORE_LEVEL
        world.check(manager)
        manager.close()
        operation += every(3)
    assert operation > 5
    assert levels == {below, NEWEST_STORE_LEVEL}
