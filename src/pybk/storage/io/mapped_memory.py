"""Reading mapped files safely: a range is populated first, so that a truncated file or bad page raises an error.

Touching a mapped page that the kernel cannot read ends the process with SIGBUS. So every reader of a map asks for its
range here before it looks at it, once for the range of a whole batch. What remains is a page that was populated,
dropped from memory and cannot be read again, and a file that is cut between the call and the touch;
``docs/concepts/faults.md`` says so.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, NamedTuple

from pybk.errors import CorruptError, StorageError
from pybk.storage.io.failures import is_passing, refused
from pybk.storage.io.filesystem import FileSystem, Populator

CHUNK_BYTES: Final = 64 << 10
"""The unit in which ``Mapped`` populates, and remembers that it did."""


class Mapped(NamedTuple):
    """The map of a whole file.

    Attributes:
        view: Its bytes.
        populate: Populates a range of it.
        populated: For each ``CHUNK_BYTES``, 1 if they were brought into memory once.
        file_bytes: Returns how many bytes its file has now.
    """

    view: memoryview
    populate: Populator
    populated: bytearray
    file_bytes: Callable[[], int]

    def is_populated(self, start: int, stop: int) -> bool:
        """Return whether all chunks of a range were brought into memory once, and the file was not cut since."""
        low, high = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        return self.populated.find(0, low, high) < 0 and self.file_bytes() >= stop


def populate(fs: FileSystem, view: memoryview, start: int, stop: int) -> None:
    """Bring a range of a map into memory, so that it can be touched.

    Args:
        fs: The file system.
        view: A whole map, as ``FileSystem.view`` returned it.
        start: First byte.
        stop: The byte after the last; what lies beyond the map is ignored.

    Raises:
        CorruptError: The file was cut before ``stop``.
        StorageRefusedError: There is no memory for it now.
        StorageError: The device cannot read a page.
    """
    try:
        fs.populate(view, start, stop)
    except OSError as error:
        raise unreadable(fs, view, min(stop, len(view)), error) from error


def unreadable(fs: FileSystem, view: memoryview, stop: int, error: OSError) -> StorageError:
    """Return the error for a range of a map that could not be populated."""
    path: str = error.filename or "a mapped file"
    if is_passing(error):
        return refused(error, f"reading {path}")
    size = fs.file_bytes(path) if error.filename and fs.exists(path) else len(view)
    if size < stop:
        return CorruptError(
            f"{path}: the file was cut from {len(view)} to {size} bytes while it was open; restore it from a backup",
            path=path,
            offset=size,
        )
    return StorageError(
        f"{path} cannot be read: {error}; look at the kernel's log and the device, and restore the file from a backup"
    )


def whole_file(fs: FileSystem, path: str, bytes_max: int) -> memoryview:
    """Return the bytes of a whole file: a map of it that can be touched, or a copy.

    A hole of a file on a full tmpfs cannot be mapped, because the kernel gives it memory; reading it needs none.

    Args:
        fs: The file system.
        path: The file.
        bytes_max: The most bytes that it may have.

    Raises:
        CorruptError: It has more bytes.
        CorruptError, StorageError: As ``populate``.
        OSError: The file cannot be opened.

    Cost: the whole file is read.
    """
    view = fs.view(path)
    if len(view) > bytes_max:
        raise CorruptError(
            f"{path} has {len(view)} bytes, and such a file has at most {bytes_max}: it is not read; restore it from a "
            "backup",
            path=path,
        )
    try:
        populate(fs, view, 0, len(view))
    except CorruptError:
        raise
    except StorageError:
        return _copy(fs, path, len(view))
    return view


def _copy(fs: FileSystem, path: str, nbytes: int) -> memoryview:
    """Return the bytes of a file that could not be mapped.

    Raises:
        OSError: It cannot be read, either.
    """
    file = fs.open(path)
    try:
        data = file.read(0, nbytes)
    finally:
        file.close()
    if len(data) < nbytes:
        raise OSError(errno.EIO, f"the file ends after {len(data)} of {nbytes} bytes", path)
    return memoryview(data)
