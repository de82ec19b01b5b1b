"""The simulated LMDB environment: a map that changes by whole commits."""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from contextlib import contextmanager

from pybk.errors import ClosedError, IllegalOperationError, StorageFailedError, StorageFullError
from tests.simdisk.disk import SimFileSystem
from tests.simdisk.inode import BLOCK_BYTES, Inode, Table

KEY_BYTES_MAX = 511


class _Read:
    def __init__(self, table: Table) -> None:
        self._table, self._keys = table
        self._ended = False

    def _check(self, key: bytes | None = None) -> None:
        if self._ended:
            raise StorageFailedError("simulated: the transaction has ended")
        if key is not None and not 1 <= len(key) <= KEY_BYTES_MAX:
            raise StorageFailedError(f"simulated: a key of {len(key)} bytes; it has 1 to {KEY_BYTES_MAX}")

    def get(self, key: bytes) -> bytes | None:
        self._check(key)
        return self._table.get(key)

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        self._check()
        at = bisect_right(self._keys, key)
        return (self._keys[at - 1], self._table[self._keys[at - 1]]) if at else None

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self._check()
        for key in self._keys[bisect_left(self._keys, start) : bisect_left(self._keys, stop)]:
            self._check()
            yield key, self._table[key]

    def end(self) -> None:
        self._ended = True


class _Write(_Read):
    def __init__(self, table: Table) -> None:
        super().__init__((dict(table[0]), table[1][:]))

    @property
    def table(self) -> Table:
        return self._table, self._keys

    def put(self, key: bytes, value: bytes) -> None:
        self._check(key)
        if key not in self._table:
            insort(self._keys, key)
        self._table[key] = bytes(value)

    def delete(self, key: bytes) -> bool:
        self._check(key)
        if key not in self._table:
            return False
        del self._table[key], self._keys[bisect_left(self._keys, key)]
        return True


_METAS_BYTES = 8192
"""The size of the file: LMDB writes two meta pages before anything else."""


def _blocks_of(table: Table) -> int:
    """Return how many blocks a map takes."""
    return -(-sum(len(key) + len(value) for key, value in table[0].items()) // BLOCK_BYTES)


class SimEnvironment:
    """The Environment interface on a simulated file system.

    What is committed is durable; a commit is one operation, named ``commit``, of which a crash leaves all or nothing.

    Args:
        fs: Where.
        path: Its directory; made if it is missing and ``read_only`` is not set.
        read_only: Refuse to write.
    """

    def __init__(self, fs: SimFileSystem, path: str, *, read_only: bool = False) -> None:
        self._fs = fs
        self._path = path
        self._read_only = read_only
        self._closed = False
        self._failure: str | None = None
        self._writing = threading.Lock()
        data = os.path.join(path, "data.mdb")
        if not fs.exists(data):
            if read_only:
                raise StorageFailedError(f"{path}: simulated: no such environment")
            fs.make_directory(path)
            inode = Inode(_METAS_BYTES)
            inode.durable_size = _METAS_BYTES
            inode.blocks = set()  # an environment takes no space of the simulated disk
            inode.table = ({}, [])

            def create() -> None:
                fs.add(data, inode)
                fs.directory(path).sync()

            fs.operate("create", data, create)
        self._inode = fs.inode(data)

    def _table(self) -> Table:
        if self._closed:
            raise ClosedError(f"{self._path}: this environment is closed")
        with self._fs.guard:
            if self._inode.table is None:
                raise StorageFailedError(f"{self._path}: simulated: not an environment")
            return self._inode.table

    def release_dead_readers(self) -> int:
        self._table()
        return 0

    @contextmanager
    def read(self) -> Iterator[_Read]:
        transaction = _Read(self._table())
        try:
            yield transaction
        finally:
            transaction.end()

    @contextmanager
    def write(self) -> Iterator[_Write]:
        self._table()
        if self._read_only:
            raise IllegalOperationError(f"{self._path}: opened read-only; open it for writing to change it")
        with self._writing:
            if self._failure is not None:
                raise StorageFailedError(f"{self._path}: a commit failed before: {self._failure}")
            transaction = _Write(self._table())
            try:
                yield transaction
                self._commit(transaction.table)
            finally:
                transaction.end()

    def _commit(self, table: Table) -> None:
        blocks = _blocks_of(table)

        def apply() -> None:
            self._fs.claim(max(0, blocks - len(self._inode.blocks)), self._path)
            self._inode.table = table
            self._inode.blocks |= set(range(blocks))

        try:
            self._fs.operate("commit", self._path, apply)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise StorageFullError(f"{self._path}: {error}") from error
            # The page that makes it count may have reached the disk all the same.
            if self._fs.random.random() < 0.5:
                apply()
            self._failure = str(error)
            raise StorageFailedError(f"{self._path}: {error}") from error

    def reserve(self, nbytes: int) -> None:
        blocks = _blocks_of(self._table()) + -(-nbytes // BLOCK_BYTES)

        def apply() -> None:
            self._fs.claim(max(0, blocks - len(self._inode.blocks)), self._path)
            self._inode.blocks |= set(range(blocks))

        if blocks > len(self._inode.blocks):
            self._fs.operate("reserve", self._path, apply)

    def reserved_bytes(self) -> int:
        return max(0, len(self._inode.blocks) - _blocks_of(self._table())) * BLOCK_BYTES

    def reusable_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._closed = True
