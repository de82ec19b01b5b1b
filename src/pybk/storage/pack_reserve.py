"""The pack reserve: space in which a sparse file is packed while its disk is full.

Packing writes the live records of a file to a new file before the old one can be dropped. So each directory of log
files and cold segments that holds much keeps a file of allocated blocks, ``reserve-pack``:

- *ready*: its contents do not count; they may be those of an earlier use.
- *taken*: the live records of one file are written to it as a cold segment. Once the segment is complete, cut to its
  size and synced, the file is renamed to the segment (``ColdSegmentWriter``). Whatever stops before leaves a reserve,
  and no bytes of an earlier use ever lie in a file with the name of a segment.
- *put back*: the file that was packed has no live entries any more, and is renamed to ``reserve-pack`` instead of being
  unlinked. Its blocks are never free meanwhile, so no other program can take them. What it has beyond the size of the
  reserve is cut off, and is the space that packing frees.

A reader may still have a map of the file that was put back. So the reserve is neither written nor cut before no process
has it open (``FileSystem.is_unused``); until then it counts as missing.

A reserve takes a sixteenth of its directory's files at most when it is allocated, and no more than a log file or a
segment of one checkpoint. It keeps its size while the directory shrinks to four times that, because what is left may
be files as large as before.

A file with fewer blocks than the reserve leaves a smaller one, which gets the missing blocks of what was freed
(``PackReserve.renew``). Another program may be faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Final

from pybk.config import MIB
from pybk.flags import StorageHint
from pybk.storage.format.log_file import RESERVED_FILE_BYTES
from pybk.storage.io.failures import is_full, refused, storage_error, syncing
from pybk.storage.io.filesystem import allocate_file
from pybk.storage.tiers import COLD, LOG, ReservedFile

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.storage.format.index_rows import FileRow
    from pybk.storage.io.filesystem import FileSystem
    from pybk.storage.volumes import Volumes

NAME: Final = "reserve-pack"
_TIERS: Final = (StorageHint.NVME, StorageHint.HDD)
_BYTES_MIN: Final = MIB
_SHARE: Final = 16
"""A reserve that is allocated takes this part of its directory's files at most."""

_SHARE_KEPT: Final = 4
"""A reserve that takes no more than this part of its directory's files is not made smaller."""

_SPARE_SHARE: Final = 4
"""This part of the free space is left when a file is packed, because the index and the log need space, too."""

_INDEX_BYTES: Final = 512 << 10
_INDEX_SHARE: Final = 16
"""The index's changes take this part of the packed bytes, if records are longer than 512 bytes."""


class PackReserve:
    """The pack reserves of one store, one in each directory of log files and cold segments that holds much.

    Threads: one at a time, which the scheduler ensures.
    """

    def __init__(self, volumes: Volumes, config: StoreConfig) -> None:
        self._volumes = volumes
        self._bytes_max = max(config.log_file_bytes, config.unchecked_tail_bytes // 2)
        self._left_free = config.free_bytes_ok
        self._sizes: dict[str, int] = {}
        """The bytes that the reserve of each directory is to have."""
        self._allocated: dict[str, int] = {}
        """The bytes of each reserve that was allocated and not used since: some file systems report fewer blocks."""

    def restore(self) -> None:
        """Allocate the reserves that are missing, as far as there is space, and cut those that are too large.

        Raises:
            StorageRefusedError: There is no space or descriptor, or it was refused for another reason.
            OSError: Syncing a directory failed.
        """
        for tier in _TIERS:
            for number, directory in enumerate(self._volumes.tier_paths(tier)):
                self._sizes[directory] = self._wanted(tier, number, directory)
                self._restore(directory, self._sizes[directory])

    def _wanted(self, tier: StorageHint, number: int, directory: str) -> int:
        rows = list(self._volumes.rows.values())
        held = sum(
            row.bytes for row in rows if (row.tier, row.directory) == (tier.value, number) and row.kind in (LOG, COLD)
        )
        wanted = 1 << (held // _SHARE).bit_length() >> 1
        wanted = 0 if wanted < _BYTES_MIN else min(wanted, self._bytes_max)
        kept = self._sizes.get(directory)
        if kept is None:
            kept = min(_blocks(self._volumes.fs, os.path.join(directory, NAME)), self._bytes_max)
        return max(wanted, kept if held >= _SHARE_KEPT * kept else 0)

    def _restore(self, directory: str, wanted: int) -> None:
        fs, path = self._volumes.fs, os.path.join(directory, NAME)
        whole = self._allocated.get(directory) == wanted and fs.exists(path)
        if not whole and _blocks(fs, path) < wanted and fs.free_bytes(directory) >= wanted + self._left_free:
            allocate_file(fs, path, wanted)
            with syncing(directory):
                fs.sync_directory(directory)
            self._allocated[directory] = wanted
        else:
            self._cut(path, wanted)

    def _cut(self, path: str, size: int) -> None:
        """Free the blocks of a reserve beyond its size, unless a process has it open."""
        fs = self._volumes.fs
        if not _ready_bytes(fs, path) or fs.file_bytes(path) <= size:
            return
        with _changing(path):
            if not size:
                fs.unlink(path)
                return
            with closing(fs.open(path, writable=True)) as file:
                file.truncate(size)

    def renew(self, row: FileRow) -> None:
        """Give the reserve in a file's directory its size at once, with blocks that packing has just made free.

        Raises:
            StorageRefusedError: Another program has taken the blocks, or it was refused for another reason.
        """
        directory = self._volumes.directory_of(row)
        path, wanted = os.path.join(directory, NAME), self._sizes[directory]
        self._cut(path, wanted)
        if 0 < _ready_bytes(self._volumes.fs, path) < wanted:
            with _changing(path), closing(self._volumes.fs.open(path, writable=True)) as file:
                file.reserve(wanted)
                file.sync()

    def bytes_for(self, row: FileRow) -> int:
        """Return the bytes of a cold segment that fits in the reserve of a file's directory, and free space."""
        directory = self._volumes.directory_of(row)
        ready = _ready_bytes(self._volumes.fs, os.path.join(directory, NAME))
        free = self._volumes.fs.free_bytes(directory)
        return ready + free - free // _SPARE_SHARE if ready else 0

    def take(self, row: FileRow) -> ReservedFile:
        """Return the reserve in a file's directory; a writer that does not finish leaves it as it is."""
        directory = self._volumes.directory_of(row)
        self._allocated.pop(directory, None)
        return ReservedFile(row.directory, os.path.join(directory, NAME))

    def put_back(self, row: FileRow) -> bool:
        """Make a file in which nothing is live the reserve of its directory, if that lacks one; see ``put_back``."""
        return put_back(self._volumes, row, self._sizes.get(self._volumes.directory_of(row), 0))

    def index_bytes(self) -> int:
        """Return the bytes of changes of the index that are to be reserved for packing."""
        largest = max(self._sizes.values(), default=0)
        return _INDEX_BYTES + largest // _INDEX_SHARE if largest else 0


def put_back(volumes: Volumes, row: FileRow, wanted: int) -> bool:
    """Rename a file in which nothing is live to the reserve of its directory.

    Args:
        volumes: The store's directories.
        row: The file; nothing names it.
        wanted: The bytes that the reserve is to have.

    Returns:
        False, with nothing done, if the reserve has them or has more than the file, or if the file is no log file or
        cold segment of those tiers, or one of ``LogReserve``.

    Raises:
        OSError: It could not be renamed.
    """
    fs, path = volumes.fs, volumes.path_of(row)
    if row.kind not in (LOG, COLD) or row.tier not in map(str, _TIERS) or not fs.exists(path):
        return False
    if row.kind == LOG and fs.file_bytes(path) == RESERVED_FILE_BYTES:
        return False
    reserve = os.path.join(volumes.directory_of(row), NAME)
    if _blocks(fs, reserve) >= min(wanted, fs.disk_bytes(path)):
        return False
    fs.rename(path, reserve)
    return True


@contextmanager
def _changing(path: str) -> Iterator[None]:
    """Raise StorageRefusedError for an error of changing a reserve, because nothing is in it."""
    try:
        yield
    except OSError as error:
        raise (storage_error if is_full(error) else refused)(error, f"changing {path}") from error


def _ready_bytes(fs: FileSystem, path: str) -> int:
    """Return the allocated bytes of a reserve; 0 if it is missing or a process has it open."""
    return _blocks(fs, path) if fs.exists(path) and fs.is_unused(path) else 0


def _blocks(fs: FileSystem, path: str) -> int:
    return fs.disk_bytes(path) if fs.exists(path) else 0
