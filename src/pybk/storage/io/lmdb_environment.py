"""The interface to LMDB: an ordered, transactional map of bytes to bytes with one writer.

:class:`Environment` is the interface; :class:`LmdbEnvironment` implements it; tests use a map in memory instead.

Theory of operation. POSIX drops all of a process's locks on a file when the process closes any descriptor of it, and
LMDB relies on such locks. So each path is open once in a process: ``opened`` maps a real path to its :class:`_Shared`,
which all LmdbEnvironments of that path use and count. The last ``close`` closes LMDB.

Locks. ``_guard`` guards ``opened``, ``_inherited`` and the user counts; it is taken to open, to close and around a
fork. ``_Shared.writing`` guards ``failure`` and is held for a whole write transaction, so writers in a process wait for
each other there. A thread that holds ``_guard`` never takes ``writing``, so they cannot deadlock. Reads take neither
lock.

Three hazards decide the order of the steps:

- A truncated file. LMDB maps its file and reads pages without checking the file's size, so pages beyond its end would
  end the process with SIGBUS. So the file's size is checked before LMDB opens it, and again before each transaction. A
  sound file may be shorter than its meta page says, if its last pages are unused; ``missing_pages`` finds the pages in
  use, in the layout of LMDB's data format 1 on 64-bit little-endian machines.
- A failed commit. LMDB writes the meta page last. If the device is full, it stops before that: the map is as before,
  and the caller may try again. After any other failure the commit may or may not count, so ``failure`` is set and this
  environment writes nothing more until it is opened anew. Reading still works.
- A fork. LMDB must not be used in a child. The child drops its references without closing them, because closing would
  free the parent's slots in the reader table. Environments from before the fork raise ForkedProcessError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Final, NamedTuple, Protocol

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
from pybk.storage.io.permissions import PRIVATE, Access


class ReadTransaction(Protocol):
    """A snapshot of the map; used by one thread, and only inside its ``with``.

    Every method raises CorruptError for a damaged map and StorageFailedError for anything else that fails.
    """

    def get(self, key: bytes) -> bytes | None:
        """Return a copy of a key's value, or None. Keys have 1 to 511 bytes."""
        ...

    def floor(self, key: bytes) -> tuple[bytes, bytes] | None:
        """Return the largest key that is not greater than ``key``, with its value, or None."""
        ...

    def items(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys in ``start <= key < stop``, ascending, with their values.

        The transaction must not write during the iteration.
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
        """Remove a key; return whether it existed."""
        ...


class Environment(Protocol):
    """An ordered, transactional map on disk. Threads: any; one write transaction at a time, the others wait."""

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """Begin a read transaction, which ends with the ``with``."""
        ...

    def write(self) -> AbstractContextManager[WriteTransaction]:
        """Begin a write transaction: the end of the ``with`` commits it durably, an exception aborts it.

        A thread must not begin one inside another, because it would wait for itself.

        Raises:
            StorageFullError: No space to commit. The map is unchanged, and the caller may try again.
            StorageFailedError: This commit or an earlier one failed. The changes may or may not be on disk, and this
                environment refuses to write. Reading still works.
        """
        ...

    def release_dead_readers(self) -> int:
        """Free the slots of killed processes in the reader table; return their number.

        LMDB does not reuse the pages that a dead reader saw, so the map grows until the slot is free.

        Raises:
            StorageError: LMDB failed.
        """
        ...

    def reserve(self, nbytes: int) -> None:
        """Allocate space for the map to grow by ``nbytes``: changes need no free space until it has grown so.

        Raises:
            OSError: ``ENOSPC`` or ``EDQUOT`` if there is too little space.
        """
        ...

    def reserved_bytes(self) -> int:
        """Return the bytes by which the map can grow without free space."""
        ...

    def reusable_bytes(self) -> int:
        """Return the unused bytes of the map, about; changes take them once no reader sees them any more."""
        ...

    def close(self) -> None:
        """Close it, once every transaction has ended; closing again does nothing."""
        ...


_READERS_MAX: Final = 512
_META_PAGES: Final = 2
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

_REMEDY: Final = (
    "close the store and run `pybk store rebuild-index` on it, with --accept-loss to continue without the entries that "
    "it lists as missing"
)


def _meaning(path: str, error: lmdb.Error) -> StorageError:
    """Return the pybk error for an LMDB error."""
    if isinstance(error, _CORRUPT):
        return CorruptError(
            f"{path}: the LMDB environment is damaged: {error}; {_REMEDY}",
            path=path,
        )
    if isinstance(error, lmdb.MapFullError) or error.code in (errno.ENOSPC, errno.EDQUOT):
        return StorageFullError(f"{path}: no space for the transaction: {error}; free space on the device")
    if error.code in _PASSING:
        return StorageRefusedError(
            f"{path}: LMDB was refused memory or descriptors: {error}; free some, then try again"
        )
    return StorageFailedError(f"{path}: LMDB failed: {error}; close the store and open it again")


def _cut(path: str, problem: str) -> CorruptError:
    return CorruptError(f"{problem}; {_REMEDY}", path=path)


def _make_missing(path: str, access: Access, map_bytes: int) -> bool:
    """Make an environment's directory and files.

    LMDB would give the directory the mode of its files, and would apply the umask to the files.

    Returns:
        Whether the directory was made.

    Raises:
        OSError, lmdb.Error: A file cannot be made.
    """
    made = False
    if not os.path.isdir(path):
        with suppress(OSError):  # LMDB reports why it cannot use the directory
            access.make_directory(path)
            made = True
    if os.path.isdir(path):
        if access.gid is not None:
            with suppress(FileExistsError):
                os.close(access.create_file(os.path.join(path, LMDB_LOCK)))
        _make_file(path, access, map_bytes)
    return made


def _make_file(path: str, access: Access, map_bytes: int) -> None:
    """Make an environment's file whole or not at all.

    LMDB syncs the first pages of a new file only with the first commit, and refuses a file that lacks one of them, as
    after a loss of power. An empty file counts as a missing one.
    """
    file = os.path.join(path, LMDB_FILE)
    if _has_bytes(file):
        return
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        if _has_bytes(file):
            return
        new = f"{file}.new"
        with suppress(FileNotFoundError):
            os.unlink(new)
        os.close(access.create_file(new))
        environment = lmdb.open(new, map_size=map_bytes, subdir=False, lock=False, lib_version=0)
        try:
            environment.sync(True)
        finally:
            environment.close()
        os.rename(new, file)
    finally:
        os.close(directory)


def _has_bytes(path: str) -> bool:
    return os.path.exists(path) and os.path.getsize(path) > 0


class _Shared:
    """One LMDB environment of this process, shared by all LmdbEnvironments of its path.

    LMDB's file locks belong to the process: if a file were open twice, closing one would drop the other's locks.
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
        try:
            made = not read_only and _make_missing(path, access, map_bytes)
            self.lmdb = lmdb.open(
                path,
                map_size=map_bytes,
                readonly=read_only,
                create=not read_only,
                mode=access.file_mode,
                readahead=False,
                max_readers=_READERS_MAX,
                # A spare transaction keeps its slot in the reader table. A forked child that drops the spare would
                # free the slot while the parent uses it. Without spares a transaction costs 0.06 µs more.
                max_spare_txns=0,
                # Data format 1 and its engine, even if environment variables of the process select others.
                lib_version=0,
            )
            if not read_only:
                # Free the slots of killed readers, because LMDB does not reuse the pages that they saw.
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
            # LMDB never syncs the directory that names the file, and the process that made it may have been killed.
            OsFileSystem().sync_directory(path)
            try:
                OsFileSystem().sync_directory(os.path.dirname(path))
            except OSError as error:
                # A user of a shared environment may lack the right to read its parent; nothing was made there then.
                if made or error.errno != errno.EACCES:
                    raise

    def begin(self, *, write: bool = False) -> lmdb.Transaction[bytes]:
        """Begin a transaction; CorruptError if the file was truncated."""
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

    def used_bytes(self) -> int:
        """Return where the last page of the map ends in the file."""
        return (self.lmdb.info()["last_pgno"] + 1) * self.lmdb.stat()["psize"]

    def reserved_bytes(self) -> int:
        """Return the bytes that are allocated in the file after the last page of the map; less if there are holes."""
        return max(0, OsFileSystem().disk_bytes(os.path.join(self.path, LMDB_FILE)) - self.used_bytes())

    def reusable_bytes(self) -> int:
        """Return the bytes of the map's pages that are in no tree, those of its list of free pages included."""
        found = self.lmdb.stat()
        used = found["branch_pages"] + found["leaf_pages"] + found["overflow_pages"] + _META_PAGES
        return max(0, self.used_bytes() - used * found["psize"])

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
            # Without space LMDB stops before it writes the meta page, so the commit does not count. After any other
            # failure it is unknown whether the commit counts.
            if isinstance(meaning, StorageRefusedError) and not isinstance(meaning, StorageFullError):
                meaning = StorageFailedError(f"{self.path}: LMDB failed: {error}; close the store and open it again")
            if not isinstance(meaning, StorageFullError):
                self.failure = str(error)
                free = OsFileSystem().free_bytes(self.path)
                if free < _NEXT_TO_NOTHING:  # LMDB reports a short write as EIO, even if the device is full
                    raise StorageFailedError(
                        f"{meaning}. Its device has {free} bytes free, so it is most likely full and not broken: free "
                        "some space before that"
                    ) from error
            raise meaning from error


# Reentrant, because a signal handler may fork.
_guard: Final = threading.RLock()
opened: Final[dict[str, _Shared]] = {}
"""The environments that are open in this process, by path."""

_inherited: Final[set[str]] = set()


def _disown() -> None:
    for path, shared in opened.items():
        shared.forked = True
        # Not closed, because that would free the parent's slots in the reader table. Once no reference is left, the
        # path may be opened anew; a transaction that was open at the fork still holds a reference.
        del shared.lmdb
        shared.guard.close()
        _inherited.add(path)
    opened.clear()
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


class LmdbWrite(_LmdbRead):
    """See :class:`WriteTransaction`."""

    __slots__ = ()

    def __init__(self, shared: _Shared, transaction: lmdb.Transaction[bytes]) -> None:
        super().__init__(shared)
        self._transaction = transaction

    def put(self, key: bytes, value: bytes) -> None:
        """See ``WriteTransaction.put``."""
        try:
            self._transaction.put(key, value)
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error

    def delete(self, key: bytes) -> bool:
        """See ``WriteTransaction.delete``."""
        try:
            return self._transaction.delete(key)
        except lmdb.Error as error:
            raise _meaning(self._shared.path, error) from error


class LmdbEnvironment:
    """An LMDB environment in a directory of its own; see :class:`Environment`.

    LmdbEnvironments of one path in one process share one LMDB environment. After ``fork``, those that the parent opened
    raise ForkedProcessError in the child; it may open the path itself unless a transaction was open at the fork.
    Reading one key costs about a microsecond.

    Args:
        path: The directory; made if it is missing and ``read_only`` is not set. Its parent must exist.
        read_only: Refuse to write. LMDB still notes the reader in its lock file, so this process must be able to
            write that file: it runs as the owner, or as a member of the group that the store is shared with.
        map_bytes: Address space to reserve, which bounds the size of the map; reserving it takes no memory.
        access: The users that new directories and files are for; existing ones keep their modes.

    Raises:
        CorruptError: The file is not an LMDB file of format 1, or is damaged.
        IllegalOperationError: Writing is requested while this process has the path open read-only.
        ForkedProcessError: A transaction of the parent process was open when this process was forked.
        StorageFailedError: LMDB refuses for another reason, such as a missing file or permission.
        OSError: The directory cannot be made or synced.
    """

    def __init__(
        self, path: str, *, read_only: bool = False, map_bytes: int = 1 << 40, access: Access = PRIVATE
    ) -> None:
        path = os.path.realpath(path)
        with _guard:
            shared = opened.get(path)
            if shared is None:
                shared = opened[path] = _Shared(path, read_only, map_bytes, access)
            elif shared.read_only and not read_only:
                raise IllegalOperationError(f"{path}: open read-only in this process; close that first")
            shared.users += 1
        self._path = path
        self._read_only = read_only
        self.shared: _Shared | None = shared
        """The environment that all users of its path in this process share; None once closed."""

    def _usable(self) -> _Shared:
        shared = self.shared
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
                yield LmdbWrite(shared, transaction)
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

    def reserve(self, nbytes: int) -> None:
        """See :meth:`Environment.reserve`."""
        shared = self._usable()
        if shared.reserved_bytes() < nbytes:
            file = OsFileSystem().open(os.path.join(self._path, LMDB_FILE), writable=True)
            try:
                file.reserve(shared.used_bytes() + nbytes)
            finally:
                file.close()

    def reserved_bytes(self) -> int:
        """See :meth:`Environment.reserved_bytes`."""
        return self._usable().reserved_bytes()

    def reusable_bytes(self) -> int:
        """See :meth:`Environment.reusable_bytes`."""
        return self._usable().reusable_bytes()

    def close(self) -> None:
        """See :meth:`Environment.close`. The last LmdbEnvironment of the path closes LMDB."""
        with _guard:
            shared, self.shared = self.shared, None
            if shared is None or shared.forked:
                return
            shared.users -= 1
            if shared.users == 0:
                del opened[self._path]
                shared.close()


LMDB_FILE: Final = "data.mdb"
LMDB_LOCK: Final = "lock.mdb"

_MAGIC: Final = 0xBEEFC0DE
_FORMAT: Final = 1
_PAGE: Final = struct.Struct("<QHHHH")
_META: Final = struct.Struct("<IIQQ" + "IHHQQQQQ" * 2 + "QQ")
_NODE: Final = struct.Struct("<HHHH")
_PGNO: Final = struct.Struct("<Q")
_BRANCH: Final = 1
_LEAF: Final = 2
_BIG_DATA: Final = 1
_NO_PAGE: Final = (1 << 64) - 1
_TRIES: Final = 8
_METAS_BYTES: Final = 8192


class _Meta(NamedTuple):
    """The newest meta page, decoded."""

    page_bytes: int
    roots: tuple[int, int]
    last_page: int
    transaction: int


def missing_pages(path: str) -> str | None:
    """Return how an LMDB environment's file ends too early; None if it does not, or if LMDB itself will refuse it.

    Args:
        path: The environment's directory. Another process may be writing it.

    Cost: Two reads; all pages but those of large values are read if the file is shorter than it might be.
    """
    try:
        fd = os.open(os.path.join(path, LMDB_FILE), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _missing(fd, path)
    finally:
        os.close(fd)


def _missing(fd: int, path: str) -> str | None:
    """Do what ``missing_pages`` does, with the file open."""
    found = None
    for _ in range(_TRIES):
        meta = _newest_meta(fd)
        if meta is None:
            return None
        size = os.fstat(fd).st_size
        if size >= (meta.last_page + 1) * meta.page_bytes:
            return None
        end = next((end for end in _ends(fd, meta) if end > size), None)
        if end is None:
            return None
        found = f"{path}: the LMDB file ends after {size} bytes, but refers to pages up to byte {end}"
        if _newest_meta(fd) == meta:
            return found
    return found


class SizeGuard:
    """Compares the size of an open LMDB environment's file with what its meta pages refer to.

    Call ``problem`` before each transaction, because LMDB would read pages beyond the end of a truncated file, and the
    process would get SIGBUS. A truncation between the call and the end of the transaction is not noticed.

    Threads: any.

    Args:
        path: The environment's directory; its file must exist.

    Raises:
        OSError: It cannot be opened.
    """

    __slots__ = ("_fd", "_path", "_sound_bytes")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(os.path.join(path, LMDB_FILE), os.O_RDONLY | os.O_CLOEXEC)
        self._sound_bytes = os.fstat(self._fd).st_size

    def problem(self) -> str | None:
        """Return how the file ends too early; None if it does not. Costs 0.4 µs, or 10 after the file grew."""
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if size == self._sound_bytes:
            return None
        if size < self._sound_bytes and size < _METAS_BYTES:
            return f"{self._path}: the LMDB file was cut from {self._sound_bytes} to {size} bytes"
        found = _missing(self._fd, self._path)
        if found is None:
            self._sound_bytes = size
        return found

    def close(self) -> None:
        """Close the descriptor; closing again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _newest_meta(fd: int) -> _Meta | None:
    """Return the newer of the two meta pages; None if LMDB will not recognise the file as its own."""
    metas = []
    page_bytes = 4096
    for number in range(2):
        data = os.pread(fd, _META.size, number * page_bytes + _PAGE.size)
        if len(data) < _META.size:
            return None
        magic, version, _, _, page_bytes, _, _, _, _, _, _, free, _, _, _, _, _, _, _, root, last, transaction = (
            _META.unpack(data)
        )
        if magic != _MAGIC or version != _FORMAT or not 512 <= page_bytes <= 1 << 16:
            return None
        metas.append(_Meta(page_bytes, (free, root), last, transaction))
    return max(metas, key=lambda meta: meta.transaction)


def _ends(fd: int, meta: _Meta) -> Iterator[int]:
    """Yield where each page in use ends, bytes; a page beyond the end of the file is not followed."""
    waiting = [page for page in meta.roots if page != _NO_PAGE]
    seen: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number in seen or number > meta.last_page:
            continue  # LMDB finds that out by itself
        seen.add(number)
        yield (number + 1) * meta.page_bytes
        page = os.pread(fd, meta.page_bytes, number * meta.page_bytes)
        if len(page) < meta.page_bytes:
            continue
        _, _, flags, lower, _ = _PAGE.unpack_from(page)
        for at in struct.unpack_from(f"<{max(0, lower - _PAGE.size) // 2}H", page.ljust(lower, b"\0"), _PAGE.size):
            if at + _NODE.size > len(page):
                continue
            low, high, more, key_bytes = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                waiting.append(low | high << 16 | more << 32)
            elif flags & _LEAF and more & _BIG_DATA and at + _NODE.size + key_bytes + _PGNO.size <= len(page):
                (first,) = _PGNO.unpack_from(page, at + _NODE.size + key_bytes)
                if first <= meta.last_page:
                    yield first * meta.page_bytes + _PAGE.size + (low | high << 16)
