"""The simulated file system."""

from __future__ import annotations

import os
import posixpath
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import TypeVar

from pybk.errors import StoreLockedError
from pybk.storage.io.filesystem import Buffers, Populator
from pybk.storage.io.permissions import PRIVATE
from tests.simdisk.directory import Change, Directory
from tests.simdisk.faults import READING, ErrorName, Faults, Hit, SimCrash, error_of
from tests.simdisk.inode import BLOCK_BYTES, Inode, pieces

T = TypeVar("T")


class SimFileSystem:
    """Files in memory that can lose power, be killed, and fail; the same seed and calls give the same outcome.

    Args:
        seed: Decides everything that chance decides.
        capacity_bytes: Size of the disk.

    Attributes:
        operations: Name and path of each operation that changes something, in order.
        readings: The same of those that do not.
        used: Files that another process has mapped.
        filled: Whether another program takes all that becomes free.
    """

    access = PRIVATE
    number = 7
    """Of all directories; another stands for a copy."""

    def __init__(self, seed: int, *, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.filled = False
        self.operations: list[tuple[str, str]] = []
        self.readings: list[tuple[str, str]] = []
        self.used: list[Inode] = []
        self.guard = threading.RLock()
        self.random = Random(seed)
        self.dead = False
        self._faults = Faults()
        self.directories = {"/": Directory()}
        self._locks: set[str] = set()

    # ---- what goes wrong -----------------------------------------------------------------------------------------

    def fail_at(
        self, n: int, error: ErrorName = "EIO", *, forever: bool = False, only: str | Iterable[str] | None = None
    ) -> None:
        """Let an operation raise; it may have happened in part.

        Args:
            n: How many go well before, counted from now.
            error: ``short`` writes a beginning and raises ENOSPC, as a disk does that gets full on the way.
            forever: And all that come after it.
            only: The operations that count; default: all that change something.
        """
        with self.guard:
            self._faults.plan(n, error, only, forever=forever)

    def crash_at(self, n: int, *, only: str | Iterable[str] | None = None) -> None:
        """Let the n-th operation from now raise SimCrash: before, in the middle of, or after what it does."""
        with self.guard:
            self._faults.plan(n, "crash", only, forever=False)

    def heal(self) -> None:
        """Let everything succeed from now on."""
        with self.guard:
            self._faults.clear()

    def fill(self) -> None:
        """Let another program take all space, and at once whatever becomes free, until ``give_back``."""
        with self.guard:
            self.filled = True
            self.used_bytes()

    def give_back(self, nbytes: int) -> None:
        """Let the other program give back so much, and take nothing more."""
        with self.guard:
            self.filled = False
            self.capacity_bytes += nbytes

    def crash(self) -> SimFileSystem:
        """Lose power: return a file system with one of the states that may be found afterwards. This one is dead."""
        with self.guard:
            self.dead = True
            after = SimFileSystem(self.random.getrandbits(32), capacity_bytes=self.capacity_bytes)
            found: dict[int, Inode] = {}
            for path, directory in self.directories.items():
                names = {}
                for name, inode in directory.after_power_loss(self.random).items():
                    if id(inode) not in found:
                        found[id(inode)] = inode.after_power_loss(self.random)
                    names[name] = found[id(inode)]
                after.directories[path] = Directory(dict(names), dict(names))
            after.filled = self.filled
            return after

    def kill(self) -> SimFileSystem:
        """End the process: return a file system where all that was written stays, durable or not. This one is dead."""
        with self.guard:
            self.dead = True
            after = SimFileSystem(self.random.getrandbits(32), capacity_bytes=self.capacity_bytes)
            twins: dict[int, Inode] = {}

            def twin(inode: Inode) -> Inode:
                return twins.setdefault(id(inode), inode.copy())

            for path, old in self.directories.items():
                after.directories[path] = Directory(
                    {name: twin(inode) for name, inode in old.live.items()},
                    {name: twin(inode) for name, inode in old.durable.items()},
                    [Change(c.put, c.inode and twin(c.inode), c.dropped) for c in old.unsynced],
                )
            after.filled = self.filled
            return after

    def operate(
        self,
        name: str,
        path: str,
        apply: Callable[[], T],
        *,
        torn: Callable[[], None] | None = None,
        failed: Callable[[Hit], None] | None = None,
    ) -> T:
        """Do one operation, or what is planned for it.

        Args:
            name: What it is.
            path: What it is about.
            apply: Does it whole.
            torn: Does a part of it, for a stop in the middle.
            failed: Leaves what an error leaves.
        """
        with self.guard:
            if self.dead:
                raise SimCrash(name, path)
            (self.readings if name in READING else self.operations).append((name, path))
            if self.random.random() < 0.1:
                self._write_back_maps()
            hit = self._faults.next(name)
            if hit is None:
                return apply()
            if hit == "crash":
                self.dead = True
                moment = self.random.choice(("before", "during", "after"))
                if moment == "after":
                    with suppress(OSError):
                        apply()
                elif moment == "during" and torn is not None:
                    torn()
                raise SimCrash(name, path)
            if failed is not None:
                failed(hit)
            raise error_of(hit, path)

    def _write_back_maps(self) -> None:
        for directory in self.directories.values():
            for inode in directory.live.values():
                if inode.mapped:
                    inode.write_back()

    # ---- names ---------------------------------------------------------------------------------------------------

    def directory(self, path: str) -> Directory:
        """Return a directory, or raise FileNotFoundError."""
        path = posixpath.normpath(path)
        if path not in self.directories:
            raise FileNotFoundError(2, "simulated: no such directory", path)
        return self.directories[path]

    def inode(self, path: str) -> Inode:
        """Return the file of a path, or raise FileNotFoundError."""
        directory, name = posixpath.split(posixpath.normpath(path))
        found = self.directory(directory).live.get(name)
        if found is None:
            raise FileNotFoundError(2, "simulated: no such file", path)
        return found

    def used_bytes(self) -> int:
        """Return what all files with a name take."""
        inodes = {id(inode): inode for d in self.directories.values() for inode in d.live.values()}
        used = sum(len(inode.blocks) for inode in inodes.values()) * BLOCK_BYTES
        if self.filled:
            self.capacity_bytes = min(self.capacity_bytes, used)
        return used

    def claim(self, blocks: int, path: str) -> None:
        """Raise ENOSPC unless so many blocks are free."""
        if blocks and self.used_bytes() + blocks * BLOCK_BYTES > self.capacity_bytes:
            raise error_of("ENOSPC", path)

    def add(self, path: str, inode: Inode) -> None:
        """Give a new file a name, not durably."""
        directory, name = posixpath.split(posixpath.normpath(path))
        names = self.directory(directory)
        if name in names.live or posixpath.normpath(path) in self.directories:
            raise FileExistsError(17, "simulated: file exists", path)
        self.claim(len(inode.blocks), path)
        names.change(Change(name, inode, None))

    # ---- the FileSystem protocol ---------------------------------------------------------------------------------

    def create(self, path: str, size: int) -> SimFile:
        inode = Inode(size)
        self.operate("create", path, lambda: self.add(path, inode))
        return SimFile(self, path, inode, writable=True)

    def open(self, path: str, *, writable: bool = False) -> SimFile:
        return SimFile(self, path, self.operate("open", path, lambda: self.inode(path)), writable=writable)

    def view(self, path: str) -> memoryview:
        return self.operate("view", path, lambda: memoryview(self.inode(path).live).toreadonly())

    populates = True

    def maps_max(self) -> int:
        return 512

    def acquire_spares(self) -> None:
        pass

    def release_spares(self) -> None:
        pass

    def fill_spares(self) -> str | None:
        return None

    def populate(self, view: memoryview, start: int, stop: int) -> None:
        if self.dead:
            raise SimCrash("populate", "")

    def populator(self, view: memoryview) -> Populator:
        return lambda start, size: self.populate(view, start, start + size)

    def sizer(self, view: memoryview) -> Callable[[], int]:
        return lambda: len(view)

    def read_direct(self, path: str, offset: int, size: int) -> memoryview:
        return self.operate(
            "read_direct", path, lambda: memoryview(bytes(self.inode(path).live[offset : offset + size]))
        )

    def map_shared(self, path: str) -> memoryview:
        with self.guard:
            if self.dead:
                raise SimCrash("map_shared", path)
            inode = self.inode(path)
            inode.mapped = True
            return memoryview(inode.live)

    def is_unused(self, path: str) -> bool:
        with self.guard:
            return self.inode(path) not in self.used

    def rename(self, src: str, dst: str) -> None:
        def apply() -> None:
            if posixpath.normpath(src) in self.directories:
                self._rename_directory(posixpath.normpath(src), posixpath.normpath(dst))
                return
            inode = self.inode(src)
            (old, old_name), (new, new_name) = (posixpath.split(posixpath.normpath(path)) for path in (src, dst))
            if old != new:
                raise OSError(18, "simulated: renames stay within a directory", src)
            self.directory(old).change(Change(new_name, inode, old_name))

        self.operate("rename", src, apply)

    def _rename_directory(self, src: str, dst: str) -> None:
        """Rename a directory, durably at once, as directories are made here."""
        if dst in self.directories:
            raise OSError(39, "simulated: directory not empty", dst)
        for path in [path for path in self.directories if path == src or path.startswith(src + "/")]:
            self.directories[dst + path[len(src) :]] = self.directories.pop(path)

    def unlink(self, path: str) -> None:
        def apply() -> None:
            self.inode(path)
            directory, name = posixpath.split(posixpath.normpath(path))
            self.directory(directory).change(Change(None, None, name))

        self.operate("unlink", path, apply)

    def exists(self, path: str) -> bool:
        with self.guard:
            if self.dead:
                raise SimCrash("exists", path)
            path = posixpath.normpath(path)
            directory, name = posixpath.split(path)
            return path in self.directories or (
                directory in self.directories and name in self.directories[directory].live
            )

    def file_bytes(self, path: str) -> int:
        with self.guard:
            return len(self.inode(path).live)

    def disk_bytes(self, path: str) -> int:
        with self.guard:
            return len(self.inode(path).blocks) * BLOCK_BYTES

    def list_directory(self, path: str) -> list[str]:
        with self.guard:
            path = posixpath.normpath(path)
            below = {posixpath.basename(p) for p in self.directories if p != "/" and posixpath.dirname(p) == path}
            return sorted(below | self.directory(path).live.keys())

    def make_directory(self, path: str) -> None:
        path = posixpath.normpath(path)
        with self.guard:
            missing = []
            while path not in self.directories:
                missing.append(path)
                path = posixpath.dirname(path)
        for directory in reversed(missing):
            self.operate("make_directory", directory, partial(self._make, directory))

    def _make(self, path: str) -> None:
        if posixpath.basename(path) in self.directory(posixpath.dirname(path)).live:
            raise FileExistsError(17, "simulated: a file has this name", path)
        self.directories.setdefault(path, Directory())

    def sync_directory(self, path: str) -> None:
        self.operate(
            "sync_directory",
            path,
            lambda: self.directory(path).sync(),
            failed=lambda hit: self.directory(path).sync_failed(),
        )

    def free_bytes(self, path: str) -> int:
        with self.guard:
            self.directory(path)
            used = self.used_bytes()
            return max(0, self.capacity_bytes - used)

    def total_bytes(self, path: str) -> int:
        with self.guard:
            self.directory(path)
            return self.capacity_bytes

    def device(self, path: str) -> int:
        with self.guard:
            self.directory(path)
            return 0

    def inode_number(self, path: str) -> int:
        with self.guard:
            self.directory(path)
            return self.number

    def paths_too_open(self, paths: Sequence[str]) -> list[str]:
        return []

    def lock(self, path: str) -> SimLock:
        with self.guard:
            if self.dead:
                raise SimCrash("lock", path)
            if path in self._locks:
                raise StoreLockedError(f"{path}: locked by this very process ({os.getpid()})", pid=os.getpid())
            if not self.exists(path):
                self.add(path, Inode(0))
            self._locks.add(path)
            return SimLock(self, path)

    def unlock(self, path: str) -> None:
        """Give a lock up."""
        with self.guard:
            self._locks.discard(path)


class SimLock:
    """A lock of the simulated file system."""

    def __init__(self, fs: SimFileSystem, path: str) -> None:
        self._fs = fs
        self._path: str | None = path

    def release(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            self._fs.unlock(path)


class SimFile:
    """An open file of the simulated file system."""

    def __init__(self, fs: SimFileSystem, path: str, inode: Inode, *, writable: bool) -> None:
        self._fs = fs
        self._path = path
        self._inode = inode
        self._writable = writable
        self._closed = False

    @property
    def size(self) -> int:
        return len(self._inode.live)

    @size.setter
    def size(self, size: int) -> None:
        raise AttributeError(f"{self._path}: the size of a file follows from what is written, not {size}")

    def _write(self, name: str, data: bytes, offset: int, write: Callable[[bytes, int], None]) -> None:
        self._check(writing=True)

        def apply() -> None:
            try:
                self._fs.claim(self._inode.missing_blocks(offset, len(data)), self._path)
            except OSError:
                self._fill(data, offset)
                raise
            write(data, offset)

        def torn() -> None:
            self._inode.write_torn(data, offset, self._fs.random)

        def failed(hit: Hit) -> None:
            if hit == "short":
                self._inode.write(data[: self._fs.random.randrange(len(data) + 1)], offset)
            else:
                torn()
            if name == "write_durable" and self._fs.random.random() < 0.5:
                self._inode.sync_failed()

        self._fs.operate(name, self._path, apply, torn=torn, failed=failed)

    def _fill(self, data: bytes, offset: int) -> None:
        """Write the beginning for which there is space, and raise ENOSPC."""
        for start, end in pieces(offset, len(data), BLOCK_BYTES):
            self._fs.claim(self._inode.missing_blocks(start, end - start), self._path)
            self._inode.write(data[start - offset : end - offset], start)

    def _check(self, *, writing: bool = False) -> None:
        if self._closed or (writing and not self._writable):
            raise OSError(9, "simulated: bad file descriptor", self._path)

    def write(self, buffers: Buffers, offset: int) -> None:
        self._write("write", b"".join(buffers), offset, self._inode.write)

    def write_durable(self, buffers: Buffers, offset: int) -> None:
        self._write("write_durable", b"".join(buffers), offset, self._inode.write_durable)

    def write_zeros(self, offset: int, size: int) -> None:
        self._write("write_zeros", bytes(size), offset, self._inode.write)

    def sync(self) -> None:
        self._check()
        self._fs.operate("sync", self._path, self._inode.sync, failed=lambda hit: self._inode.sync_failed())

    def read(self, offset: int, size: int) -> bytes:
        self._check()
        return self._fs.operate("read", self._path, lambda: bytes(self._inode.live[offset : offset + size]))

    def reserve(self, end: int) -> None:
        self._check(writing=True)

        def apply() -> None:
            self._fs.claim(self._inode.missing_blocks(0, end), self._path)
            self._inode.reserve(end)

        self._fs.operate("reserve", self._path, apply)

    def punch(self, offset: int, size: int) -> None:
        self._check(writing=True)
        self._fs.operate("punch", self._path, lambda: self._inode.punch(offset, size))

    def truncate(self, size: int) -> None:
        self._check(writing=True)
        self._fs.operate("truncate", self._path, lambda: self._inode.truncate(size))

    def close(self) -> None:
        self._closed = True
