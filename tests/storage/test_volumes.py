"""What a closed store keeps open: nothing."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.tiers import COLD
from tests.internals import store_of
from tests.storage.real_store import numbered, open_quick, payloads


def open_files(below: Path) -> list[str]:
    """Return the files below a directory that this process has a descriptor or a map of."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that lists
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    names += [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    return sorted(name for name in names if name.startswith(str(below)))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave cycles of objects where they are."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.sampled(one_in=2)
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("read_only", [False, True])
def test_a_closed_manager_has_no_file_open(tmp_path: Path, read_only: bool) -> None:
    path = tmp_path / "store"
    with open_quick(path) as manager:
        for hint in StorageHint:
            with manager.create_ledger(digest_type=DigestType.CRC32C, storage_hints={hint}) as writer:
                writer.append_many(numbered(300))
        manager.checkpoint()
        manager.create_ledger(digest_type=DigestType.CRC32C).append_many(numbered(300))
    for _ in range(20):
        with open_quick(path, read_only=read_only) as manager:
            for ledger_id in manager.list_ledgers():
                with manager.open_ledger(ledger_id, recover=False) as reader:
                    assert payloads(reader) == numbered(300)
        assert open_files(path) == []


@pytest.mark.usefixtures("no_collector")
def test_a_batch_outlives_its_manager(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(digest_type=DigestType.CRC32C).append_many(numbered(300))
        with manager.open_ledger(0) as reader:
            batch = reader.read_batch(0)
    assert [bytes(batch[number].payload) for number in range(300)] == numbered(300)
    assert open_files(tmp_path / "store") != []
    del batch
    assert open_files(tmp_path / "store") == []


def test_a_file_that_is_removed_as_it_is_mapped_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(digest_type=DigestType.CRC32C).append_many(numbered(300))
        volumes = store_of(manager).volumes
        row = volumes.new_file(COLD, StorageHint.HDD)
        Path(volumes.path_of(row)).write_bytes(b"x" * 8192)
        volumes.add(row)
        view = OsFileSystem.view

        def view_and_drop(self: OsFileSystem, path: str) -> memoryview:
            found = view(self, path)
            volumes.drop(row.file_id)
            return found

        monkeypatch.setattr(OsFileSystem, "view", view_and_drop)
        with suppress(KeyError):  # either is right
            assert bytes(volumes.view(row.file_id)[:1]) == b"x"
        assert row.file_id not in volumes.views
