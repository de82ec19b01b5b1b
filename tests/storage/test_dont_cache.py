"""DONT_CACHE leaves nothing in memory: no page of a file in the page cache, no map, no index page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.flags import ReadFlag, StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from tests.internals import descriptor_of, store_view_of
from tests.storage.page_cache import drop, resident_pages
from tests.storage.real_store import open_quick

COUNT = 600


def data_files(root: Path) -> list[Path]:
    """Return the log files and cold segments that are not empty."""
    return [path for path in root.rglob("*.*") if path.suffix in (".log", ".cold") and path.stat().st_size]


PLACES: list[tuple[str, dict[str, Any], StorageHint, bool]] = [
    ("log", {}, StorageHint.NVME, False),
    ("packed", {}, StorageHint.NVME, True),
    ("cold", {}, StorageHint.HDD, True),
    ("compressed", {"cold_compression": "zstd"}, StorageHint.HDD, True),
]


@pytest.fixture(params=PLACES, ids=[name for name, *_ in PLACES])
def reader(on_disk: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[ReadFlag], LedgerReader]]:
    """Return what opens a ledger of which no page is cached."""
    _, settings, tier, checkpointed = request.param
    with open_quick(on_disk / "data", background=False, **settings) as manager:
        writer = manager.create_ledger(storage_hints={tier}, digest_type=DigestType.CRC32C)
        writer.append_many([payload(number) for number in range(COUNT)])
        writer.close()
        if checkpointed:
            manager.checkpoint()
        for path in data_files(on_disk):
            drop(path)
        assert cached(on_disk) == 0, "what was written is in the page cache after it was dropped"
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
    on_disk: Path, reader: Callable[[ReadFlag], LedgerReader], read: Callable[[LedgerReader], list[bytes]]
) -> None:
    handle = reader(ReadFlag.DONT_CACHE)
    assert read(handle) == [payload(number) for number in range(0, COUNT, 50)]
    assert cached(on_disk) == 0
    store = store_view_of(handle)
    assert not store.volumes.views, "a file was mapped"
    assert not descriptor_of(handle).pages, "an index page was kept"


@pytest.mark.parametrize("read", [singly, whole, in_batches])
def test_without_the_flag_pages_stay(
    on_disk: Path, reader: Callable[[ReadFlag], LedgerReader], read: Callable[[LedgerReader], list[bytes]]
) -> None:
    assert read(reader(ReadFlag.NONE)) == [payload(number) for number in range(0, COUNT, 50)]
    assert cached(on_disk) > 0


def test_reads_return_private_memory(on_disk: Path) -> None:
    with open_quick(on_disk, background=False) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append_many([bytes([number]) * 1000 for number in range(50)])
        batch = manager.open_ledger(0, read_flags=ReadFlag.DONT_CACHE).read_batch(0)
        for path in data_files(on_disk):
            path.write_bytes(bytes(path.stat().st_size))
        assert [entry.payload for entry in batch] == [bytes([number]) * 1000 for number in range(50)]


def test_a_read_only_manager_leaves_nothing_either(on_disk: Path) -> None:
    with open_quick(on_disk, background=False) as live:
        with live.create_ledger(storage_hints={StorageHint.HDD}, insecure=True) as writer:
            writer.append_many([payload(number) for number in range(COUNT)])
        live.checkpoint()
        with LedgerManager.open(on_disk, read_only=True) as manager:
            for path in data_files(on_disk):
                drop(path)
            assert whole(manager.open_ledger(0, read_flags=ReadFlag.DONT_CACHE)) == [
                payload(number) for number in range(0, COUNT, 50)
            ]
            assert sum(resident_pages(path) for path in data_files(on_disk) if path.suffix == ".cold") == 0
