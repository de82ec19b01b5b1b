"""Files that are cut, or cannot be read, while a store has them open: an error, and never the end of the process.

Each case runs in a process of its own, as SIGBUS would end it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from pybk.config import StoreConfig
from pybk.errors import CorruptError, StorageError
from pybk.flags import StorageHint
from pybk.ledger.entry import Entry
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.storage.format.log_file import location_dtype
from pybk.storage.io.filesystem import OsFileSystem, Populator, populate
from pybk.storage.store import Store
from pybk.storage.store_reader import TABLE_OVERHEAD_BYTES
from pybk.storage.tiers.file_tier import spans
from tests.internals import store_of

_CONFIG: Final = StoreConfig(background=False, free_bytes_low=0, free_bytes_ok=0)
_COUNT: Final = 400
_PAYLOAD: Final = bytes(range(256)) * 8


def _filled(path: str, tier: StorageHint = StorageHint.NVME) -> tuple[LedgerManager, int]:
    """Return a manager and a closed ledger of some 800 KB in a tier."""
    manager = LedgerManager.open(path, config=_CONFIG)
    with manager.create_ledger(password=b"pw") as writer:
        for _ in range(0, _COUNT, 10):  # records of 10 entries
            writer.append_many([_PAYLOAD] * 10)
    if tier is not StorageHint.NVME:
        manager.move_ledger(writer.ledger_id, tier)
    return manager, writer.ledger_id


def _cut(root: str, pattern: str, size: int) -> None:
    """Cut every file of a pattern that is longer, and keep it that way."""
    found = [path for path in Path(root).rglob(pattern) if path.stat().st_size > size]
    assert found, f"no {pattern} in {sorted(Path(root).rglob('*'))}"
    for path in found:
        os.truncate(path, size)


def _fails(call: Callable[[], object]) -> None:
    """Call something that has to raise an error of the storage."""
    try:
        call()
    except StorageError:
        return
    raise AssertionError("it should have raised a StorageError")


def _entry(reader: LedgerReader, entry_id: int) -> Entry:
    return next(reader.read(entry_id, entry_id))


# ---- what runs in a process of its own -----------------------------------------------------------------------------


def _log_by_entry(path: str) -> None:
    manager, ledger_id = _filled(path)
    reader = manager.open_ledger(ledger_id, password=b"pw")
    assert next(reader.read(300, 300)).payload == _PAYLOAD  # its page is mapped, and cutting the file takes it away
    _cut(path, "*.log", 4096)
    for entry_id in (300, 0, 5, 399):
        _fails(partial(_entry, reader, entry_id))


def _long_record_by_entry(path: str) -> None:
    manager = LedgerManager.open(path, config=_CONFIG)
    with manager.create_ledger(password=b"pw") as writer:
        writer.append_many([_PAYLOAD] * _COUNT)
    reader = manager.open_ledger(writer.ledger_id, password=b"pw")
    assert _entry(reader, 300).payload == _PAYLOAD  # the record's table is remembered from here on
    _cut(path, "*.log", 400_000)
    for entry_id in (300, 399):
        _fails(partial(_entry, reader, entry_id))
    if OsFileSystem.populates:
        assert _entry(reader, 0).payload == _PAYLOAD  # what is left can be read
    _cut(path, "*.log", 4096)
    for entry_id in (300, 0, 399):
        _fails(partial(_entry, reader, entry_id))


def _log_by_batch(path: str) -> None:
    manager, ledger_id = _filled(path)
    reader = manager.open_ledger(ledger_id, password=b"pw")
    assert len(reader.read_batch(0)) == _COUNT
    _cut(path, "*.log", 100_000)
    _fails(lambda: reader.read_batch(200))
    assert len(list(reader.read(0, 20))) == 21  # what is left can be read


def _cold_by_entry(path: str) -> None:
    manager, ledger_id = _filled(path, StorageHint.HDD)
    reader = manager.open_ledger(ledger_id, password=b"pw")
    assert next(reader.read(300, 300)).payload == _PAYLOAD
    _cut(path, "*.cold", 4096)
    for entry_id in (300, 0, 399):
        _fails(partial(_entry, reader, entry_id))


def _cold_by_batch(path: str) -> None:
    manager, ledger_id = _filled(path, StorageHint.HDD)
    reader = manager.open_ledger(ledger_id, password=b"pw")
    assert len(reader.read_batch(0)) == _COUNT
    _cut(path, "*.cold", 100_000)
    _fails(lambda: reader.read_batch(200))


def _restored_by_name(path: str) -> None:
    """Cut, and then given back by a rename: what is mapped is the short file that has no name any more."""
    manager, ledger_id = _filled(path)
    reader = manager.open_ledger(ledger_id, password=b"pw")
    assert len(reader.read_batch(0)) == _COUNT
    whole = {file: file.read_bytes() for file in Path(path).rglob("*.log")}
    _cut(path, "*.log", 8192)
    for file, content in whole.items():
        file.with_suffix(".copy").write_bytes(content)
        file.with_suffix(".copy").rename(file)
    _fails(lambda: reader.read_batch(0))
    assert len(reader.read_batch(0)) == _COUNT  # the file is mapped anew
    assert _entry(reader, 300).payload == _PAYLOAD


def _entries(path: str) -> None:
    manager, ledger_id = _filled(path, StorageHint.SSD)
    reader = manager.open_ledger(ledger_id, password=b"pw")
    assert len(reader.read_batch(0)) >= 1
    _cut(path, "ssd/entries/data.mdb", 8192)
    _fails(lambda: reader.read_batch(200))
    _fails(lambda: next(reader.read(0, 0)))


def _index(path: str) -> None:
    manager, ledger_id = _filled(path, StorageHint.HDD)
    manager.close()
    manager = LedgerManager.open(path, config=_CONFIG)
    _cut(path, "ssd/index/data.mdb", 8192)
    _fails(lambda: manager.open_ledger(ledger_id, password=b"pw"))
    _fails(lambda: manager.create_ledger(insecure=True))


def _index_gone(path: str) -> None:
    manager, ledger_id = _filled(path, StorageHint.HDD)
    manager.close()
    manager = LedgerManager.open(path, config=_CONFIG)
    _cut(path, "ssd/index/data.mdb", 0)
    _fails(lambda: manager.open_ledger(ledger_id, password=b"pw"))


def _watermark(path: str) -> None:
    manager = LedgerManager.open(path, config=_CONFIG)
    writer = manager.create_ledger(password=b"pw")
    writer.append(b"before")
    _cut(path, "watermark", 0)
    _fails(lambda: writer.append(b"after"))
    assert manager.health().state == "failed"


def _watermark_beside(path: str) -> None:
    manager = LedgerManager.open(path, config=_CONFIG)
    writer = manager.create_ledger(password=b"pw")
    writer.append(b"before")
    with LedgerManager.open(path, read_only=True) as local_reader:
        reader = local_reader.open_ledger(writer.ledger_id, password=b"pw", recover=False)
        _cut(path, "watermark", 0)
        _fails(reader.read_last_add_confirmed)


def _log_beside(path: str) -> None:
    manager = LedgerManager.open(path, config=_CONFIG)
    writer = manager.create_ledger(password=b"pw")
    writer.append(_PAYLOAD)
    with LedgerManager.open(path, read_only=True) as local_reader:
        reader = local_reader.open_ledger(writer.ledger_id, password=b"pw", recover=False)
        assert next(reader.read(0, 0)).payload == _PAYLOAD
        for _ in range(50):
            writer.append(_PAYLOAD)
        _cut(path, "*.log", 20_000)
        _fails(reader.read_last_add_confirmed)


def _metadata(path: str) -> None:
    tree = LmdbMetadataStore(path)
    for number in range(100):
        tree.create(f"k{number}", b"v" * 500)
    _cut(path, "data.mdb", 8192)
    _fails(lambda: tree.get("k7"))
    _fails(lambda: tree.put("k7", b"w", 1))


_CASES: Final = {
    case.__name__[1:]: case
    for case in (
        *(_log_by_entry, _long_record_by_entry, _log_by_batch, _cold_by_entry, _cold_by_batch, _entries),
        _restored_by_name,
        *(_index, _index_gone, _watermark, _watermark_beside, _log_beside, _metadata),
    )
}


_LONG: Final = {"log_by_batch", "cold_by_batch", "index_gone", "watermark_beside", "log_beside"}
"""Cases that differ from another one in who reads, or when."""

_OF_OLD_KERNELS: Final = (
    *("log_by_entry", "long_record_by_entry", "log_by_batch", "cold_by_entry", "watermark", "log_beside"),
)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("case", "old_kernel"),
    [
        *(pytest.param(case, False, marks=[pytest.mark.long] * (case in _LONG)) for case in _CASES),
        *(pytest.param(case, True, marks=pytest.mark.long) for case in _OF_OLD_KERNELS),
    ],
)
def test_a_file_that_is_cut_while_it_is_open_is_an_error(case: str, old_kernel: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.test_media", case, str(tmp_path / "store"), str(int(old_kernel))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


# ---- what the process survives -------------------------------------------------------------------------------------


class _BadSector(OsFileSystem):
    """A device that cannot read one range of files."""

    bad: tuple[int, int] | None = None

    def populate(self, view: memoryview, start: int, stop: int) -> None:
        if self.bad is not None and start < self.bad[1] and stop > self.bad[0]:
            raise OSError(errno.EIO, "simulated: bad sector", str(getattr(view.obj, "filename", "")))
        super().populate(view, start, stop)

    def populator(self, view: memoryview) -> Populator:
        return lambda start, size: self.populate(view, start, start + size)


def test_a_page_that_cannot_be_read_is_a_storage_error_and_its_neighbours_are_read(tmp_path: Path) -> None:
    fs = _BadSector()
    manager, ledger_id = _filled(str(tmp_path / "s"), StorageHint.HDD)
    manager.close()
    store = Store.open(str(tmp_path / "s"), config=_CONFIG, fs=fs)
    try:
        descriptor = store.descriptor(ledger_id)
        fs.bad = (600_000, 604_096)
        with pytest.raises(StorageError, match="cannot be read") as caught:
            store.read_batch(descriptor, 0, _COUNT - 1, 1 << 30, digest_bytes=0, direct=False)
        assert not isinstance(caught.value, CorruptError)
        unread = []
        for entry_id in range(_COUNT):
            try:
                assert store.locate(descriptor, entry_id) is not None
            except StorageError:
                unread.append(entry_id)
        assert 1 <= len(unread) <= 40, unread
        batch = store.read_batch(descriptor, 0, 20, 1 << 16, digest_bytes=0, direct=False)
        assert bytes(batch[0].payload)
        assert store.log.error is None
    finally:
        store.close()


def test_tables_of_long_records_take_a_bounded_part_of_the_index_cache(tmp_path: Path) -> None:
    config = StoreConfig(background=False, index_cache_bytes=1 << 20, free_bytes_low=0, free_bytes_ok=0)
    with LedgerManager.open(str(tmp_path / "s"), config=config) as manager:
        with manager.create_ledger(password=b"pw") as writer:
            for _ in range(20):
                writer.append_many([b"%064d" % number for number in range(8000)])  # a table of 32 KB each
        store = store_of(manager)
        reader = manager.open_ledger(writer.ledger_id, password=b"pw")
        for _ in range(2):
            for entry_id in range(5, reader.last_add_confirmed, 8000):
                assert _entry(reader, entry_id).payload == b"%064d" % 5
            tables = store.tables
            assert 0 < len(tables) < 20
            bytes_of_tables = sum(map(len, tables.values())) + TABLE_OVERHEAD_BYTES * len(tables)
            assert bytes_of_tables == store.tables_bytes <= config.index_cache_bytes // 4


def test_small_tables_of_long_records_are_counted_with_what_python_takes_for_each(tmp_path: Path) -> None:
    """A table of two entries has 8 bytes, and its objects and its place in a dictionary take much more."""
    config = StoreConfig(background=False, index_cache_bytes=1 << 20, free_bytes_low=0, free_bytes_ok=0)
    with LedgerManager.open(str(tmp_path / "s"), config=config) as manager:
        with manager.create_ledger(password=b"pw") as writer:
            writer.append_many([bytes(40 << 10)] * 2)
        store = store_of(manager)
        descriptor = store.descriptor(writer.ledger_id)
        first, count_stride, place, body = store.location_of(descriptor, 0)
        view = store.volumes.view(place >> 32)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(4000):  # the same record, as if it lay in as many files
            words = first, count_stride, place + (number << 32), body
            assert len(store.table(view, words)) == 8
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(store.tables) == (config.index_cache_bytes // 4) // (8 + TABLE_OVERHEAD_BYTES)
        assert grown <= 1.25 * (config.index_cache_bytes // 4)


def test_the_error_of_a_cut_file_names_the_file_and_both_sizes(tmp_path: Path) -> None:
    fs = OsFileSystem()
    path = str(tmp_path / "f")
    Path(path).write_bytes(bytes(20_000))
    view = fs.view(path)
    populate(fs, view, 0, 20_000)
    os.truncate(path, 5000)
    populate(fs, view, 0, 4096)
    with pytest.raises(CorruptError, match="cut from 20000 to 5000 bytes") as caught:
        populate(fs, view, 0, 20_000)
    assert (caught.value.path, caught.value.offset) == (path, 5000)
    populate(fs, view, 1 << 30, 1 << 31)  # beyond the map: decoding reports it
    del view


@pytest.mark.parametrize("populates", [True, False])
def test_a_map_of_an_unlinked_file_can_be_touched(tmp_path: Path, populates: bool) -> None:
    fs = OsFileSystem()
    fs.populates = populates
    path = str(tmp_path / "f")
    Path(path).write_bytes(b"x" * 20_000)
    view = fs.view(path)
    os.unlink(path)
    populate(fs, view, 10_000, 20_000)
    assert bytes(view[10_000:]) == b"x" * 10_000


def test_ranges_of_records_are_joined_where_little_lies_between() -> None:
    runs = np.zeros(4, location_dtype())
    runs["offset"] = (1 << 20, 4096, 8192, 4 << 20)
    runs["body"] = (100, 1000, 1000, 10)
    header = 64
    assert spans(runs) == [
        (4096, 9192 + header),
        (1 << 20, (1 << 20) + 100 + header),
        (4 << 20, (4 << 20) + 10 + header),
    ]
    assert spans(runs[:1]) == [(1 << 20, (1 << 20) + 100 + header)]


if __name__ == "__main__":
    if sys.argv[3] == "1":
        OsFileSystem.populates = False
    _CASES[sys.argv[1]](sys.argv[2])
    os._exit(0)  # closing files that were cut is not part of this test
