"""The interface to the file system: every file operation of the package uses it.

Paths are ``str``. A failed operation is not retried: it raises ``OSError``, and the caller decides what is lost. Only a
short write is continued, because the next write returns the reason. Tests use a simulated disk instead of
:class:`OsFileSystem`.

**Maps.** Touching a mapped page that the kernel cannot read ends the process with SIGBUS. So every reader of a map asks
``populate`` for its range before it looks at it, once for the range of a whole batch: a truncated file or bad page then
raises an error. What remains is a page that was populated, dropped from memory and cannot be read again, and a file
that is cut between the call and the touch; ``docs/concepts/faults.md`` says so.

**Locks** are exclusive, and a process holds them but its forked children do not. ``flock`` locks the open file
description, which a forked child shares: a child that outlived its parent would still hold the parent's lock. So the
child closes the descriptors of locks that it inherited.

**Files that users name** are opened by ``open_regular``: a FIFO would block, and a device or a sparse file fill the
memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
import signal
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, Self, cast

from pybk.deferral import np
from pybk.errors import CorruptError, StorageError, StoreLockedError
from pybk.storage.io.failures import (
    KEPT_FOR_SYNCS,
    IrregularFileError,
    NotOpenedError,
    acquire_spares,
    fill_spares,
    is_full,
    is_passing,
    maps_limit,
    open_with_spare,
    refused,
    release_spares,
    storage_error,
    undoing,
    with_spare,
)
from pybk.storage.io.permissions import PRIVATE, Access, paths_too_open

_MOVE_AWAY: Final = (
    "move it away and restore the file from a backup; without one, the next open makes the file again or says what does"
)

Buffers = Sequence[bytes | memoryview]
"""Pieces of one write, in order; memoryviews are of format ``B``."""

Populator = Callable[[int, int], object]
"""Populates a range of one map: its first byte, a multiple of ``PAGE_BYTES``, and its size in bytes."""

PAGE_BYTES: Final = mmap.PAGESIZE

PIECES_MAX: Final = 1024
"""The pieces that the system writes in one call (IOV_MAX); more are joined first, which takes memory."""

_BLOCK_BYTES: Final = 4096
_ZEROS: Final = memoryview(mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ))
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_RWF_DSYNC: Final = getattr(os, "RWF_DSYNC", 0)
_UNSUPPORTED: Final = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_KEEP_SIZE: Final = 1
_PUNCH_HOLE_KEEP_SIZE: Final = 3
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python does not name."""
_POPULATE_WRITE: Final = 23
_PAGE_MASK: Final = -PAGE_BYTES
_SCRATCH_BYTES: Final = 1 << 20
_MAPS_MAX: Final = 512


class File(Protocol):
    """An open file.

    Threads: calls may come from many threads as long as no two write the same bytes and only one makes the file longer.
    """

    size: int
    """Its size in bytes: that at creation or opening, and more once a write went beyond it."""

    def write(self, buffers: Buffers, offset: int) -> None:
        """Write the pieces one after the other at ``offset``; not durable until :meth:`sync` returns.

        Raises:
            OSError: Nothing, a part, or all of it may be written; ``ENOSPC`` or ``EDQUOT`` if the device is full.
        """
        ...

    def write_durable(self, buffers: Buffers, offset: int) -> None:
        """Write the pieces at ``offset`` and return when they, and what is needed to read them, are on disk.

        Earlier unsynced writes are not made durable by it.

        Raises:
            OSError: Nothing, a part, or all of it may be written, durably or not. A short write always
                raises: the error of writing the rest, or ``EIO`` if that succeeds.
        """
        ...

    def write_zeros(self, offset: int, size: int) -> None:
        """Write zeros with direct I/O where the file system can; not durable until :meth:`sync` returns.

        Raises:
            OSError: As for :meth:`write`.
        """
        ...

    def sync(self) -> None:
        """Make everything written to the file, and its size, durable.

        Raises:
            OSError: Unsynced bytes may be lost although reads still return them; another sync proves nothing.
        """
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Return the bytes at ``offset``: ``size`` of them, or fewer where the file ends.

        The memory for ``size`` bytes is taken first, so a size that came from a disk must have been checked.
        """
        ...

    def reserve(self, end: int) -> None:
        """Allocate the blocks up to ``end``, so that writes there need no free space; the size stays.

        Where the file system cannot do that, nothing happens.

        Raises:
            OSError: ``ENOSPC`` or ``EDQUOT`` if there is too little space.
        """
        ...

    def punch(self, offset: int, size: int) -> None:
        """Give the blocks of a range of zeros back to the file system; the size stays.

        The range must be zeros or of no further use: where holes are not supported nothing happens.
        """
        ...

    def truncate(self, size: int) -> None:
        """Cut the file to ``size`` bytes and free its blocks beyond them; durable after :meth:`sync`."""
        ...

    def close(self) -> None:
        """Close it; closing again does nothing. Syncs nothing."""
        ...


class Lock(Protocol):
    """A file lock that this process holds."""

    def release(self) -> None:
        """Release the lock; releasing again, or in a forked child, which never holds it, does nothing."""
        ...


class FileSystem(Protocol):
    """Files and directories. Threads: any. Every method raises ``OSError`` if the operating system refuses the call."""

    access: Access
    """The users that new files and directories are for; existing ones keep their modes."""

    def create(self, path: str, size: int) -> File:
        """Make a new file of ``size`` allocated zero bytes and open it for writing.

        Neither its bytes nor its name is durable before :meth:`File.sync` and :meth:`sync_directory`.

        Raises:
            FileExistsError: A file of this name exists.
            OSError: ``ENOSPC`` when the space cannot be allocated; the new file is unlinked again.
        """
        ...

    def open(self, path: str, *, writable: bool = False) -> File:
        """Open a regular file that exists; anything else raises OSError."""
        ...

    def view(self, path: str) -> memoryview:
        """Map a whole file, read-only, format ``B``.

        Later writes within the mapped size show through. The mapping, and one file descriptor, live as long as views of
        it do. Unlinking the file is fine. Call :meth:`populate` before touching a range: where the file was cut, or a
        page cannot be read, touching the map ends the process with SIGBUS.
        """
        ...

    @property
    def populates(self) -> bool:
        """True if :meth:`populate` maps pages. If not, it only reads them, and reading from the file is cheaper."""
        ...

    def populate(self, view: memoryview, start: int, stop: int) -> None:
        """Bring a range of a map into memory, so that it can be touched.

        Args:
            view: A whole map, as :meth:`view` or :meth:`map_shared` returned it, not a part of one.
            start: First byte.
            stop: The byte after the last; what lies beyond the map is ignored.

        Raises:
            OSError: EIO: the file was cut before ``stop``, or a page cannot be read; names the file.

        Cost: about 1 µs for each MiB that is mapped already; reading the rest.
        """
        ...

    def populator(self, view: memoryview) -> Populator:
        """Return the quickest :meth:`populate` of one map, for a map that is touched often.

        Where it raises, :meth:`populate` does, too, and names the file.
        """
        ...

    def sizer(self, view: memoryview) -> Callable[[], int]:
        """Return a function that returns the present size in bytes of a map's file, even if the file was renamed."""
        ...

    def read_direct(self, path: str, offset: int, size: int) -> memoryview:
        """Return a range of a file, fewer bytes where it ends, in private memory and with no trace in the page cache.

        Where direct I/O is refused: an ordinary read, and the pages are dropped from the cache after it.
        """
        ...

    def map_shared(self, path: str) -> memoryview:
        """Map a whole small file, writable and shared with other processes, format ``B``.

        A store to the map survives the end of the process at once, but a power failure only once the file was synced.
        """
        ...

    def is_unused(self, path: str) -> bool:
        """Return whether no process, this one included, has a file open or mapped; False where that is not known.

        Afterwards a process may open it by its name.
        """
        ...

    def rename(self, src: str, dst: str) -> None:
        """Rename a file, replacing any file named ``dst``; durable after :meth:`sync_directory`."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name; durable after :meth:`sync_directory`."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether a file or directory has this name."""
        ...

    def file_bytes(self, path: str) -> int:
        """Return a file's size."""
        ...

    def disk_bytes(self, path: str) -> int:
        """Return the bytes that a file's allocated blocks take."""
        ...

    def list_directory(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory and its missing parents, durably, also if another process made it and was killed."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the creations, renames and unlinks in a directory durable.

        Raises:
            NotOpenedError: The directory could not be opened, so nothing was synced.
            OSError: The sync failed.
        """
        ...

    def free_bytes(self, path: str) -> int:
        """Return the bytes that an unprivileged process may still allocate on the file system of ``path``."""
        ...

    def total_bytes(self, path: str) -> int:
        """Return all bytes of the file system of ``path`` that unprivileged processes may allocate, used or free."""
        ...

    def device(self, path: str) -> int:
        """Return the number of the device that has the file system of ``path``, of all that this host has mounted."""
        ...

    def inode_number(self, path: str) -> int:
        """Return the number that distinguishes a file or directory from copies of it."""
        ...

    def maps_max(self) -> int:
        """Return the most files that may be kept mapped at once."""
        ...

    def acquire_spares(self) -> None:
        """Hold spare descriptors for syncs and new files until ``release_spares`` was called as often.

        Raises:
            StorageError: This process may open too few files.
        """
        ...

    def release_spares(self) -> None:
        """Let go of the spare descriptors."""
        ...

    def fill_spares(self) -> str | None:
        """Replace used spare descriptors; return the reason if that is impossible, else None."""
        ...

    def paths_too_open(self, paths: Sequence[str]) -> list[str]:
        """Return the paths that more users than those of ``access`` may use, each with its mode."""
        ...

    def lock(self, path: str) -> Lock:
        """Take the exclusive lock of a file, which is made if it is missing and then holds this process's id as text.

        The lock ends with :meth:`Lock.release` or with the process; a forked child does not hold it.

        Raises:
            StoreLockedError: A process holds it, perhaps this one; names the holder.
        """
        ...


def replace_file(fs: FileSystem, path: str, data: bytes) -> None:
    """Make ``data`` a file's whole content: after a crash at any point the file has its old or its new content.

    Durable on return. Not for two callers at a time on one path: they share a temporary name. Costs two syncs.

    Raises:
        OSError: The file has its old content; if the last step failed, it may have either.
    """
    temporary = path + ".tmp"
    if fs.exists(temporary):
        fs.unlink(temporary)
    file = fs.create(temporary, 0)
    try:
        file.write((data,), 0)
        file.sync()
    finally:
        file.close()
    fs.rename(temporary, path)
    fs.sync_directory(os.path.dirname(path) or ".")


def allocate_file(fs: FileSystem, path: str, nbytes: int) -> None:
    """Make a file of zeros with all its blocks, instead of one that an interrupted call has left.

    The caller syncs its directory.

    Raises:
        StorageRefusedError: There is no space or descriptor, or making it failed; it is removed again.
    """
    try:
        if fs.exists(path):
            fs.unlink(path)
        file = fs.create(path, nbytes)
        try:
            file.sync()
        except BaseException as error:
            with undoing(error):
                fs.unlink(path)
            raise
        finally:
            file.close()
    except OSError as error:  # nothing is in it, so even a failed sync leaves nothing in doubt
        raise (storage_error if is_full(error) else refused)(error, f"making {path}") from error


_open_files: Final[set[OsFile]] = set()
"""Files that are open, for a forked child to close: it would keep their blocks allocated after the parent's unlink."""


def _close_inherited() -> None:
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_inherited)


class OsFile:
    """A file of the operating system; see :class:`File`. In a forked child it is closed."""

    __slots__ = ("_direct_fd", "_durable_flag", "_fd", "_path", "size")

    def __init__(self, fd: int, path: str) -> None:
        """Take over an open descriptor."""
        self.size = os.fstat(fd).st_size
        self._fd = fd
        self._path = path
        self._durable_flag = _RWF_DSYNC
        self._direct_fd: int | None = None
        _open_files.add(self)

    def write(self, buffers: Buffers, offset: int) -> None:
        """See :meth:`File.write`."""
        if len(buffers) > PIECES_MAX:
            buffers = (b"".join(buffers),)
        size = sum(map(len, buffers))
        try:
            written = os.pwritev(self._fd, buffers, offset)
            if written != size:
                self._write_rest(b"".join(buffers), offset, written)
        except OSError as error:
            error.filename = self._path  # which of the devices is full, for one; the system only knows a descriptor
            raise
        if offset + size > self.size:
            self.size = offset + size

    def write_durable(self, buffers: Buffers, offset: int) -> None:
        """See :meth:`File.write_durable`."""
        if len(buffers) > PIECES_MAX:
            buffers = (b"".join(buffers),)
        size = sum(map(len, buffers))
        try:
            try:
                written = os.pwritev(self._fd, buffers, offset, self._durable_flag)
            except OSError as error:
                # The flag is refused before a byte is written, so this is not a second try at a write that failed.
                if not self._durable_flag or error.errno != errno.EOPNOTSUPP:
                    raise
                self._durable_flag = 0
                written = os.pwritev(self._fd, buffers, offset, 0)
            if written != size:
                self._write_rest(b"".join(buffers), offset, written)
                raise self._short(written, size, offset)
            if not self._durable_flag:
                os.fdatasync(self._fd)
        except OSError as error:
            error.filename = self._path
            raise
        if offset + size > self.size:
            self.size = offset + size

    def _write_rest(self, data: bytes, offset: int, written: int) -> None:
        """Continue a short write: a full disk writes what fits, and only the next write returns the error."""
        view = memoryview(data)
        while written < len(view):
            step = os.pwrite(self._fd, view[written:], offset + written)
            if step == 0:
                raise self._short(written, len(view), offset)
            written += step

    def _short(self, written: int, size: int, offset: int) -> OSError:
        return OSError(errno.EIO, f"short write of {written} of {size} bytes at offset {offset}", self._path)

    def write_zeros(self, offset: int, size: int) -> None:
        """See :meth:`File.write_zeros`."""
        if self._direct_fd is None:
            self._direct_fd = self._open_direct()
        end = offset + size
        while offset < end:
            piece = _ZEROS[: min(end - offset, len(_ZEROS))]
            aligned = offset % _BLOCK_BYTES == 0 and len(piece) % _BLOCK_BYTES == 0
            direct = aligned and self._direct_fd >= 0
            try:
                written = os.pwrite(self._direct_fd if direct else self._fd, piece, offset)
            except OSError as error:
                if not direct or error.errno != errno.EINVAL:
                    raise
                os.close(self._direct_fd)
                self._direct_fd = -1
                continue
            if written == 0:
                raise self._short(0, len(piece), offset)
            offset += written
            if offset > self.size:
                self.size = offset

    def _open_direct(self) -> int:
        """Open the same file once more, for direct I/O; -1 where that is refused."""
        if not _DIRECT:
            return -1
        try:
            # Not by its path, which may have another file by now.
            return os.open(f"/proc/self/fd/{self._fd}", os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.ENOENT, errno.EMFILE, errno.ENFILE):
                raise
            return -1

    def sync(self) -> None:
        """See :meth:`File.sync`."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            error.filename = self._path
            raise

    def read(self, offset: int, size: int) -> bytes:
        """See :meth:`File.read`."""
        data = os.pread(self._fd, size, offset)
        if len(data) == size or not data:
            return data
        pieces = [data]
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, offset + got)):
            pieces.append(data)
            got += len(data)
        return b"".join(pieces)

    def forget(self, offset: int, size: int) -> None:
        """Ask the system to drop a range from the page cache."""
        os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def reserve(self, end: int) -> None:
        """See :meth:`File.reserve`."""
        self._allocate(_KEEP_SIZE, 0, end)

    def punch(self, offset: int, size: int) -> None:
        """See :meth:`File.punch`."""
        self._allocate(_PUNCH_HOLE_KEEP_SIZE, offset, size)

    def truncate(self, size: int) -> None:
        """See :meth:`File.truncate`."""
        os.ftruncate(self._fd, size)
        self.size = size

    def _allocate(self, mode: int, offset: int, size: int) -> None:
        """Call fallocate; does nothing where that is not supported."""
        if _FALLOCATE is None or size <= 0:
            return
        if _FALLOCATE(self._fd, mode, offset, size) != 0:
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code), self._path)

    def close(self) -> None:
        """See :meth:`File.close`."""
        _open_files.discard(self)
        fd, self._fd = self._fd, -1
        direct, self._direct_fd = self._direct_fd, -1
        if direct is not None and direct >= 0:
            os.close(direct)
        if fd >= 0:
            os.close(fd)


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    libc = ctypes.CDLL(None, use_errno=True)
    # The plain name takes 32-bit offsets on 32-bit systems.
    function = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return cast("Callable[[int, int, int, int], int]", function)


_FALLOCATE: Final = _find_fallocate()


def _find_madvise() -> Callable[[int, int, int], int] | None:
    """Return madvise of the C library; None if there is none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return cast("Callable[[int, int, int], int]", function)


_MADVISE: Final = _find_madvise()
_LONG_BYTES: Final = 256 << 10
"""The size from which on a range is populated without the interpreter's lock, which takes a microsecond more."""


def _can_populate() -> bool:
    """Return whether the kernel knows MADV_POPULATE_READ."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_POPULATE_READ)
        except OSError:
            return False
    return True


class _FileMap(mmap.mmap):
    """A file that is mapped for reading; one that is mapped for writing, too, is a plain ``mmap.mmap``."""

    path: str

    @classmethod
    def of(cls, path: str) -> Self:
        """Map a file.

        Raises:
            OSError: It cannot be mapped.
        """
        with open(path, "rb", buffering=0) as file:
            mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.path = path
        return mapped


class _ReadMap(_FileMap):
    """A map for kernels that cannot populate one: keeps a descriptor, to read a range before it is touched."""

    file: io.FileIO

    @classmethod
    def of(cls, path: str) -> Self:
        """Map a file, and keep it open as long as the map is there."""
        mapped = super().of(path)
        mapped.file = io.FileIO(path)
        weakref.finalize(mapped, mapped.file.close)
        return mapped

    def read_through(self, start: int, stop: int) -> None:
        """Read a range and forget it.

        Raises:
            OSError: It cannot be read, or the file ends before ``stop``.
        """
        fd = self.file.fileno()
        scratch = memoryview(bytearray(min(stop - start, _SCRATCH_BYTES)))
        while start < stop:
            got = os.preadv(fd, (scratch[: stop - start],), start)
            if got == 0:
                raise OSError(errno.EFAULT, f"the file ends after {start} bytes")
            start += got


class OsFileSystem:
    """The operating system's file system; see :class:`FileSystem`.

    Args:
        access: The users that new files and directories are for; their owner alone by default.
    """

    access: Access = PRIVATE
    """See :attr:`FileSystem.access`."""

    populates: bool = _can_populate()
    """See :meth:`FileSystem.populates`; False before Linux 5.14."""

    def __init__(self, access: Access = PRIVATE) -> None:
        self.access = access

    def create(self, path: str, size: int) -> OsFile:
        """See :meth:`FileSystem.create`."""
        fd = open_with_spare(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.access.file_mode, keep=KEPT_FOR_SYNCS)
        try:
            self.access.share_file(fd)
            if size > 0:
                os.posix_fallocate(fd, 0, size)
            return OsFile(fd, path)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise

    def open(self, path: str, *, writable: bool = False) -> OsFile:
        """See :meth:`FileSystem.open`."""
        flags = os.O_RDWR if writable else os.O_RDONLY
        opened = with_spare(lambda: open_regular(path, flags, remedy=_MOVE_AWAY), keep=KEPT_FOR_SYNCS)
        return OsFile(opened, path)

    def view(self, path: str) -> memoryview:
        """See :meth:`FileSystem.view`."""
        if os.stat(path).st_size == 0:
            return memoryview(b"")
        kind = _FileMap if self.populates else _ReadMap
        return memoryview(with_spare(lambda: kind.of(path), keep=KEPT_FOR_SYNCS))

    def populate(self, view: memoryview, start: int, stop: int) -> None:
        """See :meth:`FileSystem.populate`."""
        mapped: Any = view.obj
        start &= _PAGE_MASK
        try:
            if type(mapped) is _FileMap and _MADVISE is not None and self._is_long(stop - start):
                self._populate_long(view, _MADVISE, start, min(stop, len(view)))
            elif type(mapped) is _FileMap:
                mapped.madvise(_POPULATE_READ, start, stop - start)
            elif isinstance(mapped, _ReadMap):
                mapped.read_through(start, min(stop, len(view)))
            elif isinstance(mapped, mmap.mmap):
                self._populate_shared(mapped, start, stop)
        except ValueError:  # the range begins beyond the map
            return
        except OSError as error:
            path = mapped.path if isinstance(mapped, _FileMap) else None
            what = f"bytes {start} to {stop} of the map cannot be read: {error.strerror}"
            # Running out of memory does not mean that the file is damaged.
            number = error.errno if is_passing(error) else errno.EIO
            raise OSError(number, what, path) from error

    @staticmethod
    def _is_long(size: int) -> bool:
        """Return whether a range is populated without the interpreter's lock, by its address, which numpy knows."""
        return size >= _LONG_BYTES and "numpy" in sys.modules

    @staticmethod
    def _populate_long(view: memoryview, madvise: Callable[[int, int, int], int], start: int, stop: int) -> None:
        """Populate a range of a map while other threads run: ``mmap.madvise`` keeps the lock of the interpreter."""
        address = np.frombuffer(view, np.uint8).ctypes.data
        if start < stop and madvise(address + start, stop - start, _POPULATE_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def populator(self, view: memoryview) -> Populator:
        """See :meth:`FileSystem.populator`."""
        mapped: Any = view.obj
        if isinstance(mapped, mmap.mmap) and self.populates:
            return partial(mapped.madvise, _POPULATE_READ if type(mapped) is _FileMap else _POPULATE_WRITE)
        return lambda start, size: self.populate(view, start, start + size)

    def sizer(self, view: memoryview) -> Callable[[], int]:
        """See :meth:`FileSystem.sizer`."""
        mapped: Any = view.obj
        if isinstance(mapped, _ReadMap):
            return lambda: os.fstat(mapped.file.fileno()).st_size
        if isinstance(mapped, _FileMap):
            return mapped.size
        return lambda: len(view)

    def _populate_shared(self, mapped: mmap.mmap, start: int, stop: int) -> None:
        if self.populates:
            mapped.madvise(_POPULATE_WRITE, start, stop - start)
        elif mapped.size() < min(stop, len(mapped)):
            raise OSError(errno.EFAULT, f"the file ends after {mapped.size()} bytes")

    def read_direct(self, path: str, offset: int, size: int) -> memoryview:
        """See :meth:`FileSystem.read_direct`."""
        if _DIRECT:
            try:
                return self._read_direct(path, offset, size)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        file = self.open(path)
        try:
            data = file.read(offset, min(size, max(0, file.size - offset)))
            file.forget(offset, size)
        finally:
            file.close()
        return memoryview(data)

    @staticmethod
    def _read_direct(path: str, offset: int, size: int) -> memoryview:
        fd = open_with_spare(path, os.O_RDONLY | _DIRECT, keep=KEPT_FOR_SYNCS)
        try:
            size = min(size, os.fstat(fd).st_size - offset)
            if size <= 0:
                return memoryview(b"")
            start = offset - offset % _BLOCK_BYTES
            wanted = offset + size - start
            span = -(-wanted // _BLOCK_BYTES) * _BLOCK_BYTES
            block = memoryview(mmap.mmap(-1, span, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            got = 0
            while got < wanted and (step := os.preadv(fd, (block[got:],), start + got)):
                got += step
            return block[offset - start : min(got, wanted)].toreadonly()
        finally:
            os.close(fd)

    def map_shared(self, path: str) -> memoryview:
        """See :meth:`FileSystem.map_shared`."""
        return with_spare(lambda: self._map_shared(path), keep=KEPT_FOR_SYNCS)

    @staticmethod
    def _map_shared(path: str) -> memoryview:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return memoryview(mmap.mmap(fd, 0)) if os.fstat(fd).st_size else memoryview(bytearray())
        finally:
            os.close(fd)

    def is_unused(self, path: str) -> bool:
        """See :meth:`FileSystem.is_unused`.

        The kernel grants a write lease on a file only to a process that alone has it open; maps count as open. If
        another process opens the file before the lease is given back, the kernel sends this one a signal: SIGURG, which
        processes ignore, instead of SIGIO, which would end this one.
        """
        try:
            fd = open_with_spare(path, os.O_RDWR, keep=KEPT_FOR_SYNCS)
        except OSError:
            return False
        try:
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def rename(self, src: str, dst: str) -> None:
        """See :meth:`FileSystem.rename`."""
        os.rename(src, dst)

    def unlink(self, path: str) -> None:
        """See :meth:`FileSystem.unlink`."""
        os.unlink(path)

    def exists(self, path: str) -> bool:
        """See :meth:`FileSystem.exists`."""
        return os.path.exists(path)

    def file_bytes(self, path: str) -> int:
        """See :meth:`FileSystem.file_bytes`."""
        return os.stat(path).st_size

    def disk_bytes(self, path: str) -> int:
        """See :meth:`FileSystem.disk_bytes`."""
        return os.stat(path).st_blocks * 512

    def list_directory(self, path: str) -> list[str]:
        """See :meth:`FileSystem.list_directory`."""
        return sorted(os.listdir(path))

    def make_directory(self, path: str) -> None:
        """See :meth:`FileSystem.make_directory`."""
        missing = []
        path = os.path.abspath(path)
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        try:
            # The process that made the innermost directory that exists may have been killed before it synced its name.
            self.sync_directory(os.path.dirname(path))
        except NotOpenedError as error:
            if error.errno != errno.EACCES:  # without the right to read its parent, no process of this user made it
                raise
        for directory in reversed(missing):
            try:
                self.access.make_directory(directory)
            except FileExistsError:
                if not os.path.isdir(directory):
                    raise
            self.sync_directory(os.path.dirname(directory))

    def sync_directory(self, path: str) -> None:
        """See :meth:`FileSystem.sync_directory`."""
        try:
            fd = open_with_spare(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise NotOpenedError(error.errno, error.strerror, path) from error
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
            fill_spares()

    def free_bytes(self, path: str) -> int:
        """See :meth:`FileSystem.free_bytes`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def total_bytes(self, path: str) -> int:
        """See :meth:`FileSystem.total_bytes`."""
        status = os.statvfs(path)
        return (status.f_blocks - status.f_bfree + status.f_bavail) * status.f_frsize

    def device(self, path: str) -> int:
        """See :meth:`FileSystem.device`."""
        return os.stat(path).st_dev

    def inode_number(self, path: str) -> int:
        """See :meth:`FileSystem.inode_number`."""
        return os.stat(path).st_ino

    def maps_max(self) -> int:
        """See :meth:`FileSystem.maps_max`."""
        return maps_limit(_MAPS_MAX)

    def acquire_spares(self) -> None:
        """See :meth:`FileSystem.acquire_spares`."""
        acquire_spares()

    def release_spares(self) -> None:
        """See :meth:`FileSystem.release_spares`."""
        release_spares()

    def fill_spares(self) -> str | None:
        """See :meth:`FileSystem.fill_spares`."""
        return fill_spares()

    def paths_too_open(self, paths: Sequence[str]) -> list[str]:
        """See :meth:`FileSystem.paths_too_open`."""
        return paths_too_open(self.access, paths)

    def lock(self, path: str) -> FileLock:
        """See :meth:`FileSystem.lock`."""
        return FileLock(path, self.access)


CHUNK_BYTES: Final = 64 << 10
"""The unit in which ``Mapped`` populates, and remembers that it did."""


class Mapped(NamedTuple):
    """The map of a whole file.

    Attributes:
        view: Its bytes.
        populate: Populates a range of it.
        populated: For each ``CHUNK_BYTES``, 1 if they were brought into memory once.
        file_bytes: Returns the present size of its file, bytes.
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


# Descriptors of held locks. Reentrant, because a signal handler may fork.
_lock_guard: Final = threading.RLock()
_lock_fds: Final[set[int]] = set()


def _drop_inherited_locks() -> None:
    # Closed and not unlocked, because the parent shares the open file description and keeps the lock.
    for fd in _lock_fds:
        os.close(fd)
    _lock_fds.clear()
    _lock_guard.release()


os.register_at_fork(
    before=_lock_guard.acquire, after_in_parent=_lock_guard.release, after_in_child=_drop_inherited_locks
)


def _locked(path: str, fd: int) -> StoreLockedError:
    """Return the error that names the holder of a file's lock; the caller holds ``_lock_guard``."""
    found = os.fstat(fd)
    held = (os.fstat(each) for each in _lock_fds)
    if any((each.st_dev, each.st_ino) == (found.st_dev, found.st_ino) for each in held):
        return StoreLockedError(
            f"{path}: locked by this very process ({os.getpid()}), in which another manager has it open; use that "
            "manager, or close it first",
            pid=os.getpid(),
        )
    text = os.pread(fd, 20, 0)
    pid = int(text) if text.isdigit() else None
    holder = "another process" if pid is None else f"process {pid}"
    if pid == os.getpid():  # process ids are unique only within one PID namespace
        holder = f"another process, which has the id {pid} in its own container"
    return StoreLockedError(f"{path}: locked by {holder}; close the store there first, or open it read-only", pid=pid)


class FileLock:
    """The exclusive lock of a file. Threads: any.

    Any process that can open the file can hold the lock, so the file has the permissions of the store's other files.
    """

    __slots__ = ("_fd",)

    def __init__(self, path: str, access: Access = PRIVATE) -> None:
        """Take the lock, making the file if it is missing, and write this process's id into it.

        Raises:
            StoreLockedError: Another process, or this process itself, holds the lock; the error names the holder.
            OSError: The file cannot be opened or written.
        """
        with _lock_guard:
            fd = access.open_or_create(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Written before the rest is cut off, so that the file keeps its block: the disk may be full.
                pid = str(os.getpid()).encode()
                os.pwrite(fd, pid.ljust(os.fstat(fd).st_size), 0)
                os.ftruncate(fd, len(pid))
            except BlockingIOError:
                error = _locked(path, fd)
                os.close(fd)
                raise error from None
            except BaseException:
                os.close(fd)
                raise
            _lock_fds.add(fd)
            self._fd = fd

    def release(self) -> None:
        """Release the lock; does nothing if it was released before, or in a forked child."""
        with _lock_guard:
            # If absent, the lock was released or a fork closed it, and the number may now belong to another file.
            if self._fd in _lock_fds:
                _lock_fds.remove(self._fd)
                # A close is not enough while a child that was just forked has not yet closed its own descriptor.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                os.close(self._fd)
            self._fd = -1


_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def open_regular(path: str, flags: int = os.O_RDONLY, *, remedy: str = "name a regular file") -> int:
    """Open a regular file; returns its descriptor, which exec does not inherit.

    Args:
        path: The file.
        flags: As for ``os.open``; a file that ``O_CREAT`` makes is for its owner alone.
        remedy: The remedy if it is not a regular file.

    Raises:
        IrregularFileError: It is a directory (EISDIR), or something else that is not a regular file (EINVAL).
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )  # O_NONBLOCK is without effect on a regular file
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise _irregular(path, os.stat(path).st_mode, remedy) from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode, remedy)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str, bytes_max: int) -> bytes:
    """Return the content of a regular file.

    Args:
        path: The file.
        bytes_max: The most bytes that it may have.

    Raises:
        OSError: As ``open_regular``; EFBIG: it has more bytes.
    """
    with open(open_regular(path), "rb") as file:
        data = file.read(bytes_max + 1)  # not by its size, which is 0 for a file of /proc
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"has more than {bytes_max} bytes, and no more are read", path)
    return data


def _irregular(path: str, mode: int, remedy: str) -> IrregularFileError:
    if stat.S_ISDIR(mode):
        return IrregularFileError(errno.EISDIR, f"a directory, and not a file; {remedy}", path)
    kind = _KINDS.get(stat.S_IFMT(mode), "no regular file")
    return IrregularFileError(errno.EINVAL, f"{kind}, and not a regular file; {remedy}", path)
