"""DONT_CACHE leaves nothing in memory: no page of a file in the page cache, no map, no index page."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk.flags import ReadFlag, StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from tests.internals import descriptor_of, store_view_of
from tests.storage.real_store import open_quick

PAGE = mmap.PAGESIZE
COUNT = 600


def resident_pages(path: Path) -> int:
    """Return how many pages of a file the page cache holds, as mincore says."""
    size = path.stat().st_size
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    view = np.memmap(path, np.uint8, "r")
    pages = ctypes.create_string_buffer(-(-size // PAGE))
    if mincore(view.ctypes.data, size, pages) != 0:
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in pages.raw[: -(-size // PAGE)])


def drop(path: Path) -> None:
    """Have a file that is synced leave the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def data_files(root: Path) -> list[Path]:
    """Return the log files and cold segments that are not empty."""
    return [path for path in root.rglob("*.*") if path.suffix in (".log", ".cold") and path.stat().st_size]


@pytest.fixture(autouse=True)
def works_here(tmp_path: Path) -> None:
    """Skip where a file cannot leave the page cache, as on tmpfs: there is nothing to see there."""
    path = tmp_path / "probe"
    path.write_bytes(bytes(8 * PAGE))
    assert resident_pages(path) == 8
    drop(path)
    if resident_pages(path):
        pytest.skip("this file system keeps its pages in memory")
    path.unlink()


PLACES: list[tuple[str, dict[str, Any], StorageHint, bool]] = [
    ("log", {}, StorageHint.NVME, False),
    ("packed", {}, StorageHint.NVME, True),
    ("cold", {}, StorageHint.HDD, True),
    ("compressed", {"cold_compression": "zstd"}, StorageHint.HDD, True),
]


@pytest.fixture(params=PLACES, ids=[name for name, *_ in PLACES])
def reader(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[ReadFlag], LedgerReader]]:
    """Return what opens a ledger of which no page is cached."""
    _, settings, tier, checkpointed = request.param
    with open_quick(tmp_path / "data", background=False, **settings) as manager:
        writer = manager.create_ledger(storage_hints={tier}, digest_type=DigestType.CRC32C)
        writer.append_many([payload(number) for number in range(COUNT)])
        writer.close()
        if checkpointed:
            manager.checkpoint()
        for path in data_files(tmp_path):
            drop(path)
        assert cached(tmp_path) == 0, "what was written is in the page cache after it was dropped"
        yield lambda flags: manager.open_ledger(0, read_flags=flags)


def payload(number: int) -> bytes:
    return bytes([number % 256]) * (1000 + number)


def cached(root: Path) -> int:
    return sum(map(resident_pages, data_files(root)))


def singly(reader: LedgerReader) -> list[bytes]:
    return [next(reader.read(number, number)).payload for number in range(0, COUNT, 50)]


def whole(reader: LedgerReader) -> list[bytes]:
    return [entry.payload for entry in reader.read(0, COUNT - 1)][::50]


def unconfirmed(reader: LedgerReader) -> list[bytes]:
    return [entry.payload for entry in reader.read_unconfirmed(0, COUNT - 1)][::50]


def followed(reader: LedgerReader) -> list[bytes]:
    return [entry.payload for entry in reader.follow()][::50]


def in_batches(reader: LedgerReader) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < COUNT:
        found += [entry.payload for entry in reader.read_batch(len(found), max_bytes=100_000)]
    return found[::50]


def in_a_loop(reader: LedgerReader) -> list[bytes]:
    async def main() -> list[bytes]:
        return [entry.payload async for entry in reader.read_async(0, COUNT - 1)]

    return asyncio.run(main())[::50]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("read", [singly, whole, unconfirmed, followed, in_batches, in_a_loop])
def test_nothing_of_what_is_read_stays_in_the_page_cache(
    tmp_path: Path, reader: Callable[[ReadFlag], LedgerReader], read: Callable[[LedgerReader], list[bytes]]
) -> None:
    handle = reader(ReadFlag.DONT_CACHE)
    assert read(handle) == [payload(number) for number in range(0, COUNT, 50)]
    assert cached(tmp_path) == 0
    store = store_view_of(handle)
    assert not store.volumes.views, "a file was mapped"
    assert not descriptor_of(handle).pages, "an index page was kept"


@pytest.mark.parametrize("read", [singly, whole, in_batches])
def test_without_the_flag_pages_stay(
    tmp_path: Path, reader: Callable[[ReadFlag], LedgerReader], read: Callable[[LedgerReader], list[bytes]]
) -> None:
    assert read(reader(ReadFlag.NONE)) == [payload(number) for number in range(0, COUNT, 50)]
    assert cached(tmp_path) > 0


def test_reads_return_private_memory(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append_many([bytes([number]) * 1000 for number in range(50)])
        batch = manager.open_ledger(0, read_flags=ReadFlag.DONT_CACHE).read_batch(0)
        for path in data_files(tmp_path):
            path.write_bytes(bytes(path.stat().st_size))
        assert [entry.payload for entry in batch] == [bytes([number]) * 1000 for number in range(50)]


def test_a_read_only_manager_leaves_nothing_either(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as live:
        with live.create_ledger(storage_hints={StorageHint.HDD}, insecure=True) as writer:
            writer.append_many([payload(number) for number in range(COUNT)])
        live.checkpoint()
        with LedgerManager.open(tmp_path, read_only=True) as manager:
            for path in data_files(tmp_path):
                drop(path)
            assert whole(manager.open_ledger(0, read_flags=ReadFlag.DONT_CACHE)) == [
                payload(number) for number in range(0, COUNT, 50)
            ]
            assert sum(resident_pages(path) for path in data_files(tmp_path) if path.suffix == ".cold") == 0
