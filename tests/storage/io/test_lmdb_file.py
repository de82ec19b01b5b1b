"""An LMDB file that was cut is refused before LMDB maps it, which would end the process."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb
import pytest

from pybk.errors import CorruptError
from pybk.storage.io.lmdb_environment import LmdbEnvironment, missing_pages

PAGE = 4096


def fill(path: Path, keys: int, value_bytes: int) -> None:
    environment = LmdbEnvironment(str(path))
    with environment.write() as transaction:
        for number in range(keys):
            transaction.put(b"%08d" % number, bytes([number % 251]) * value_bytes)
    environment.close()


def read_all(path: Path) -> int:
    environment = LmdbEnvironment(str(path), read_only=True)
    try:
        with environment.read() as transaction:
            return sum(len(value) for _, value in transaction.items(b"0", b"9"))
    finally:
        environment.close()


@pytest.mark.parametrize(("keys", "value_bytes"), [(3000, 60), (40, 20_000), (1, 10)])
def test_every_cut_of_a_file_is_refused_and_the_whole_file_is_not(tmp_path: Path, keys: int, value_bytes: int) -> None:
    path = tmp_path / "map"
    fill(path, keys, value_bytes)
    data = (path / "data.mdb").read_bytes()
    assert missing_pages(str(path)) is None
    last_page = lmdb.open(str(path), readonly=True, lock=False).info()["last_pgno"]
    assert len(data) == (last_page + 1) * PAGE, "nothing is free in a fresh map, so every cut takes a page in use"
    for pages in range(2, len(data) // PAGE, max(1, len(data) // PAGE // 50)):
        for size in (pages * PAGE, pages * PAGE + 17):
            os.truncate(path / "data.mdb", size)
            with pytest.raises(CorruptError, match="rebuild-index"):
                read_all(path)
            (path / "data.mdb").write_bytes(data)
    assert read_all(path) == keys * value_bytes


def test_a_file_without_its_unused_last_pages_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "map"
    fill(path, 1, 10)
    environment = LmdbEnvironment(str(path))
    with environment.write() as transaction:
        transaction.put(b"large", bytes(40 * PAGE))
    with environment.write() as transaction:
        transaction.delete(b"large")
    for number in range(3):  # so that the last pages in use are low ones
        with environment.write() as transaction:
            transaction.put(b"00000000", b"%d" % number)
    environment.close()
    size = os.path.getsize(path / "data.mdb")
    os.truncate(path / "data.mdb", size - 20 * PAGE)
    assert missing_pages(str(path)) is None
    assert read_all(path) == 1


def test_a_file_that_is_not_an_lmdb_map_is_left_to_lmdb(tmp_path: Path) -> None:
    assert missing_pages(str(tmp_path / "nothing")) is None
    for data in (b"", b"x", bytes(3 * PAGE), b"\xff" * 3 * PAGE):
        (tmp_path / "data.mdb").write_bytes(data)
        assert missing_pages(str(tmp_path)) is None
