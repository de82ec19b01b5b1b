"""Which pages of a file the page cache has, for tests of what leaves nothing there."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

PAGE = mmap.PAGESIZE


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


def _keeps_pages(directory: Path) -> bool:
    path = directory / "probe"
    path.write_bytes(bytes(8 * PAGE))
    assert resident_pages(path) == 8
    drop(path)
    kept = resident_pages(path) > 0
    path.unlink()
    return kept


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a directory whose files can leave the page cache, wherever the other files of the tests lie."""
    with tempfile.TemporaryDirectory(prefix="pybk-", dir="/var/tmp") as elsewhere:
        place = next((each for each in (tmp_path, Path(elsewhere)) if not _keeps_pages(each)), None)
        if place is None:
            pytest.skip("no file system here lets pages leave memory")
        yield place
