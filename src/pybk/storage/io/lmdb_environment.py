"""The seam to LMDB: an ordered map of bytes to bytes with one writer and transactions.

Tests put a map in memory in the place of :class:`LmdbEnvironment`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Final, Protocol

import lmdb

from pybk.errors import (
    ClosedError,
    CorruptError,
    ForkedProcessError,
    IllegalOperationError,
    StorageError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
)
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.lmdb_file import LMDB_FILE, LMDB_LOCK, SizeGuard, missing_pages
from pybk.storage.io.permissions import PRIVATE, Access


class ReadTransaction(Protocol):
    """The map as it was when the transaction began; used by one thread, and only inside its ``with``.

    Every method raises CorruptError for a damaged map and StorageFailedError for anything else that fails.
    """

    def get(self, key: bytes) -> bytes | None:
        """Return a key's value, copied, or None. Keys have 1 to 511 bytes."""
        ...

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the largest key that is not greater than ``key``, with its value, or None."""
        ...

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys from ``start`` up to and without ``stop``, ascending, with their values.

        Nothing may be written while it is being iterated.
        """
        ...


class WriteTransaction(ReadTransaction, Protocol):
    """The map with this transaction's own changes; used by one thread."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set a key's value.

        Raises:
            StorageFullError: The map or the disk is full; the transaction cannot be committed any more.
        """
        ...

    def delete(self, key: bytes) -> bool:
        """Remove a key; say whether it was there."""
        ...


class Environment(Protocol):
    """An ordered, transactional map on disk. Threads: any; one write transaction at a time, the others wait."""

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """Begin a read transaction, which ends with the ``with``."""
        ...

    def write(self) -> AbstractContextManager[WriteTransaction]:
        """Begin a write transaction: committed and on disk when the ``with`` ends, dropped if that is by an exception.

        A thread must not begin one inside another.

        Raises:
            StorageFullError: No space to commit: the map is as before, and writing may be tried again.
            StorageFailedError: The commit failed, or one did before: the map is as before or as written, and this
                environment writes no more. Reading works still.
        """
        ...

    def release_dead_readers(self) -> int:
        """Free the places in the reader table of processes that were killed; return how many those were.

        What a dead reader saw is kept from being used again, so the map grows until its place is free.

        Raises:
            StorageError: LMDB failed.
        """
        ...

    def close(self) -> None:
        """Close it, once every transaction has ended; closing again does nothing."""
        ...


_READERS_MAX: Final = 512
_NEXT_TO_NOTHING: Final = 1 << 20
_PASSING: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
_CORRUPT: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
    lmdb.BadDbiError,
)


def _meaning(path: str, error: lmdb.Error) -> StorageError:
    """Return what an LMDB error means here."""
    if isinstance(error, _CORRUPT):
        return CorruptError(
            f"{path}: the LMDB environment is damaged: {error}; close the store and run `pybk rebuild-index` on it",
            path=path,
        )
    if isinstance(error, lmdb.MapFullError) or error.code in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{path}: no room for the transaction: {error}; free space on the device")
    if error.code in _PASSING:
        return StorageRefusedError(
            f"{path}: LMDB was refused memory or descriptors: {error}; free some, then try again"
        )
    return StorageFailedError(f"{path}: LMDB failed: {error}; close the store and open it again")


def _cut(path: str, problem: str) -> CorruptError:
    return CorruptError(f"{problem}; close the store and run `pybk rebuild-index` on it", path=path)


def _make_missing(path: str, access: Access) -> bool:
    """Make an environment's directory, and for a group its files, too: LMDB would subject their modes to the umask.

    LMDB would give the directory the mode of its files. It takes empty files for missing ones.

    Returns:
        Whether the directory was made.
    """
    made = False
    if not os.path.isdir(path):
        with suppress(OSError):  # LMDB reports why it cannot use the directory
            access.make_directory(path)
            made = True
    if access.gid is not None and os.path.isdir(path):
        for name in (LMDB_FILE, LMDB_LOCK):
            with suppress(FileExistsError):
                os.close(access.create_file(os.path.join(path, name)))
    return made


class _Shared:
    """One LMDB environment of this process, shared by all who opened its path.

    LMDB's file locks belong to the process: had a file been opened twice, closing one would drop the other's locks too.
    """

    def __init__(self, path: str, read_only: bool, map_bytes: int, access: Access) -> None:
        self.path = path
        self.read_only = read_only
        self.users = 0
        self.forked = False
        self.writing = threading.Lock()
        self.failure: str | None = None
        cut = missing_pages(path)
        if cut is not None:
            raise _cut(path, cut)
        made = not read_only and _make_missing(path, access)
        try:
            self.lmdb = lmdb.open(
                path,
                map_size=map_bytes,
                readonly=read_only,
                create=not read_only,
                mode=access.file_mode,
                readahead=False,
                max_readers=_READERS_MAX,
                # A spare transaction keeps its place in the reader table, and a forked child that drops the spare
                # gives that place away under its parent's feet. Saves 0.06 µs, anyway.
                max_spare_txns=0,
                # Format 1 and its engine, whatever the process's environment variables ask for.
                lib_version=0,
            )
            if not read_only:
                # Killed readers would keep the pages they saw from being used again.
                self.lmdb.reader_check()
        except lmdb.Error as error:
            if path in _inherited:
                raise ForkedProcessError(
                    f"{path}: in use by the process that this one was forked from when it was: {error}; open it in a "
                    "process that was started anew (multiprocessing's spawn)"
                ) from error
            raise _meaning(path, error) from error
        try:
            self.guard = SizeGuard(path)
        except BaseException:
            self.lmdb.close()
            raise
        if not read_only:
            # LMDB syncs its file but not the file's name.
            OsFileSystem().sync_directory(path)
            try:
                OsFileSystem().sync_directory(os.path.dirname(path))
            except OSError as error:
                # Another user of a shared environment may be unable to read its parent, and has made nothing there.
                if made or error.errno != errno.EACCES:
                    raise

    def begin(self, *, write: bool = False) -> lmdb.Transaction[bytes]:
        """Begin a transaction, unless the file was cut."""
        cut = self.guard.problem()
        if cut is not None:
            raise _cut(self.path, cut)
        try:
            try:
                return self.lmdb.begin(write=write)
            except lmdb.ReadersFullError:
                self.lmdb.reader_check()
                return self.lmdb.begin(write=write)
        except lmdb.Error as error:
            raise _meaning(self.path, error) from error

    def close(self) -> None:
        """Close LMDB."""
        self.lmdb.close()
        self.guard.close()

    def commit(self, transaction: lmdb.Transaction[bytes]) -> None:
        """Commit; must be called with ``writing`` held."""
        try:
            transaction.commit()
        except lmdb.Error as error:
            meaning = _meaning(self.path, error)
            # Without room LMDB stops before the page that makes a commit count; any other failure leaves that open.
            if isinstance(meaning, StorageRefusedError) and not isinstance(meaning, StorageFullError):
                meaning = StorageFailedError(f"{self.path}: LMDB failed: {error}; close the store and open it again")
            if not isinstance(meaning, StorageFullError):
                self.failure = str(error)
                free = OsFileSystem().free_bytes(self.path)
                if free < _NEXT_TO_NOTHING:  # a write that came short is EIO to LMDB, whatever the reason
                    raise StorageFailedError(
                        f"{meaning}. Its device has {free} bytes free, so it is most likely full and not broken: free "
                        "some space before that"
                    ) from error
            raise meaning from error


# Reentrant, because a signal handler may fork.
_guard: Final = threading.RLock()
_open: Final[dict[str, _Shared]] = {}
_inherited: Final[set[str]] = set()


def _disown() -> None:
    for path, shared in _open.items():
        shared.forked = True
        # Not closed: that would take the parent's places in the reader table away. Without references it may be opened
        # anew; a transaction that was under way at the fork still has one.
        del shared.lmdb
        shared.guard.close()
        _inherited.add(path)
    _open.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_disown)


class _LmdbRead:
    """See :class:`ReadTransaction`."""

    __slots__ = ("_shared", "_transaction")

    _transaction: lmdb.Transaction[bytes]

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    def __enter__(self) -> _LmdbRead:
        self._transaction = self._shared.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._transaction.abort()

    def get(self, key: bytes) -> bytes | None:
        try:
            return self._transaction.get(key)
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        try:
            cursor = self._transaction.cursor()
            if cursor.set_range(key):
                if cursor.key() != key and not cursor.prev():
                    return None
            elif not cursor.last():
                return None
            return cursor.item()
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        try:
            cursor = self._transaction.cursor()
            more = cursor.set_range(start)
            while more:
                key, value = cursor.item()
                if key >= stop:
                    return
                yield key, value
                more = cursor.next()
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error


class _LmdbWrite(_LmdbRead):
    """See :class:`WriteTransaction`."""

    __slots__ = ()

    def __init__(self, shared: _Shared, transaction: lmdb.Transaction[bytes]) -> None:
        super().__init__(shared)
        self._transaction = transaction

    def put(self, key: bytes, value: bytes) -> None:
        try:
            self._transaction.put(key, value)
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error

    def delete(self, key: bytes) -> bool:
        try:
            return self._transaction.delete(key)
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error


class LmdbEnvironment:
    """An LMDB environment in a directory of its own; see :class:`Environment`.

    Opening a path again in the same process shares what is open. After ``fork`` the child gets ForkedProcessError from
    what its parent opened; it may open the path for itself unless a transaction was under way at the fork. Reading one
    key costs about a microsecond.

    Args:
        path: The directory; made if it is missing and ``read_only`` is not set. Its parent must be there.
        read_only: Refuse to write. LMDB still notes the reader in its lock file, so this process must be able to
            write that file: it runs as the owner, or as a member of the group that the store is shared with.
        map_bytes: Address space to reserve, which bounds the size of the map; takes no memory by itself.
        access: For whom the directory and the files are made; what exists keeps its mode.

    Raises:
        CorruptError: The file is not an LMDB file of format 1, or is damaged.
        IllegalOperationError: To be opened for writing while this process has it open read-only.
        ForkedProcessError: A transaction of the parent process was under way when this one was forked.
        StorageFailedError: LMDB refuses for another reason, such as a missing file or permission.
        OSError: The directory cannot be made or synced.
    """

    def __init__(
        self, path: str, *, read_only: bool = False, map_bytes: int = 1 << 40, access: Access = PRIVATE
    ) -> None:
        path = os.path.realpath(path)
        with _guard:
            shared = _open.get(path)
            if shared is None:
                shared = _open[path] = _Shared(path, read_only, map_bytes, access)
            elif shared.read_only and not read_only:
                raise IllegalOperationError(f"{path}: open read-only in this process; close that first")
            shared.users += 1
        self._path = path
        self._read_only = read_only
        self._shared: _Shared | None = shared

    def _usable(self) -> _Shared:
        shared = self._shared
        if shared is None:
            raise ClosedError(f"{self._path}: this LMDB environment is closed")
        if shared.forked:
            raise ForkedProcessError(f"{self._path}: opened before the fork that made this process; open it again here")
        return shared

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """See :meth:`Environment.read`."""
        return _LmdbRead(self._usable())

    @contextmanager
    def write(self) -> Iterator[WriteTransaction]:
        """See :meth:`Environment.write`."""
        shared = self._usable()
        if self._read_only:
            raise IllegalOperationError(f"{self._path}: opened read-only; open it for writing to change it")
        with shared.writing:
            if shared.failure is not None:
                raise StorageFailedError(
                    f"{self._path}: a commit failed before: {shared.failure}; close the store and open it again"
                )
            transaction = shared.begin(write=True)
            try:
                yield _LmdbWrite(shared, transaction)
            except BaseException:
                transaction.abort()
                raise
            shared.commit(transaction)

    def release_dead_readers(self) -> int:
        """See :meth:`Environment.release_dead_readers`."""
        shared = self._usable()
        try:
            return shared.lmdb.reader_check()
        except lmdb.Error as error:
            raise _meaning(self._path, error) from error

    def close(self) -> None:
        """See :meth:`Environment.close`. The last of those who share it closes LMDB."""
        with _guard:
            shared, self._shared = self._shared, None
            if shared is None or shared.forked:
                return
            shared.users -= 1
            if shared.users == 0:
                del _open[self._path]
                shared.close()
