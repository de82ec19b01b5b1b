"""The blobs of a ``BlobStore`` as a file system of fsspec, for pandas, PyArrow, Dask and others.

``pybk://orders/2026.parquet`` is the blob ``orders/2026.parquet`` of the store that the storage options name. Blobs
have no directories: a path is one if blobs lie below it.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import IO, Any, Final, NamedTuple, Self, cast

from fsspec import AbstractFileSystem
from fsspec.compression import compr
from fsspec.core import OpenFile, get_compression, has_magic

from pybk.credentials import Secret
from pybk.errors import PybkError, UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.streams.blob import BlobReader
from pybk.streams.blob_store import BlobInfo, BlobStore, BlobUpload
from pybk.threads import in_children

__all__ = ["BlobFileSystem"]

_MODES: Final = ("rb", "wb", "xb")
_TEXT_OPTIONS: Final = frozenset({"encoding", "errors", "newline"})
_BUFFER_BYTES: Final = 1 << 20
_FSSPEC_OPTIONS: Final = frozenset(
    {
        "add_aliases",
        "add_docs",
        "asynchronous",
        "batch_size",
        "listings_expiry_time",
        "loop",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
    }
)
"""The options that every file system of fsspec takes."""


class _Given(NamedTuple):
    """The files of the password and the secret of a blob store; None for the environment."""

    password: Secret | None
    secret: Secret | None


class _Stores:
    """The stores that this process has open for file systems, by their options.

    Only one process and one manager may write to a store, and a password costs one scrypt, so file systems share
    stores.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[tuple[object, ...], tuple[BlobStore, LedgerManager]] = {}
        in_children(self)

    def open(
        self, where: str, cluster_file: str | None, name: str, given: _Given, *, read_only: bool, insecure: bool
    ) -> BlobStore:
        """Return the store that was opened with these options, or open it."""
        key = (os.getpid(), where, cluster_file, name, given, read_only, insecure)
        with self._lock:
            if key not in self._stores:
                if "://" in where:
                    secret = None if cluster_file is None else Secret(file=cluster_file)
                    manager = LedgerManager.connect(where, cluster_secret=secret)
                else:
                    manager = LedgerManager.open(where, read_only=read_only)
                try:
                    store = BlobStore.open(
                        manager, name, password=given.password, secret=given.secret, insecure=insecure
                    )
                except BaseException:
                    manager.close()
                    raise
                self._stores[key] = store, manager
            return self._stores[key][0]

    def close(self, store: BlobStore) -> None:
        """Close a store that ``open`` returned; the next ``open`` opens it again."""
        with self._lock:
            found = [key for key, (each, _) in self._stores.items() if each is store]
            managers = [self._stores.pop(key)[1] for key in found]
        store.close()
        for manager in managers:
            manager.close()


_STORES: Final = _Stores()


class BlobFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Blobs as files.

    Through fsspec, with storage options::

        pandas.read_parquet("pybk://orders/2026.parquet", storage_options={"store": "data/blobs"})

    A file that is written is published when it is closed, and discarded if an exception leaves its ``with``; this also
    holds for ``fsspec.open``, text and compressions. A ``close`` during the handling of an exception that began after
    the file was opened also discards it, and the exception gets a note that says so. Renames and copies copy no bytes.
    In a ``transaction``, files are published at its end, one after the other.

    Args:
        store: The directory of a store, or the URL of a cluster's metadata store (``zk://…``, ``lmdb://…``). It stays
            open, for all file systems with these options, until ``close`` or the end of the process.
        blobs: The name of the blob store.
        password_file: A file that holds the password of its ledgers. If it and ``secret_file`` are None, both are taken
            from ``PYBK_PASSWORD`` and ``PYBK_SECRET``, or from the files that ``PYBK_PASSWORD_FILE`` and
            ``PYBK_SECRET_FILE`` name.
        secret_file: A file that holds their secret, as ``pybk secret new`` writes it.
        cluster_secret_file: A file that holds the secret of a cluster.
        read_only: Whether to open the directory for reading only, which is possible while another process writes. This
            process can open it for writing only after ``close``.
        insecure: Whether to work without a password and a secret.
        blob_store: An open ``BlobStore`` instead of all these; such a file system cannot be pickled.
        options: Options that every file system of fsspec takes, such as ``use_listings_cache``; others are refused.

    Raises:
        UsageError: Not exactly one of ``store`` and ``blob_store`` is given, neither a password nor a secret is found,
            or an option is unknown.
        StoreLockedError: Another process has the directory open for writing.
        IllegalOperationError: This process has it open with ``read_only``, so it cannot open it for writing.

    Threads: any.
    """

    protocol = "pybk"
    root_marker = ""
    cachable = False

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        blobs: str = "blobs",
        *,
        password_file: str | None = None,
        secret_file: str | None = None,
        cluster_secret_file: str | None = None,
        read_only: bool = False,
        insecure: bool = False,
        blob_store: BlobStore | None = None,
        **options: object,
    ) -> None:
        if unknown := options.keys() - _FSSPEC_OPTIONS:
            known = inspect.signature(BlobFileSystem.__init__).parameters.keys() - {"self", "options"}
            raise UsageError(
                f"unknown storage options: {', '.join(sorted(unknown))}; a file system of blobs takes "
                f"{', '.join(sorted(known))}, and those of all of fsspec: {', '.join(sorted(_FSSPEC_OPTIONS))}"
            )
        super().__init__(**options)
        if (store is None) == (blob_store is None):
            raise UsageError("a file system of blobs needs store=..., a directory or a URL; or blob_store=...")
        if blob_store is None:
            assert store is not None
            given = _Given(*(None if file is None else Secret(file=file) for file in (password_file, secret_file)))
            where = os.fspath(store)
            blob_store = _STORES.open(
                where if "://" in where else os.path.abspath(where),
                cluster_secret_file,
                blobs,
                given,
                read_only=read_only,
                insecure=insecure,
            )
        self.blob_store: Final = blob_store

    def close(self) -> None:
        """Close the store, also for other file systems with the same options; a later file system opens it again.

        To close a file system that a library such as pandas made, make another one with the same options and close
        that.
        """
        _STORES.close(self.blob_store)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """Return the name of a blob, or a list of names."""
        stripped = super()._strip_protocol(path)
        return stripped if isinstance(stripped, list) else stripped.lstrip("/")

    # ---- looking -------------------------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **_: object) -> list[Any]:
        """Return the files and directories in a directory, or the file itself, by name.

        Args:
            path: The directory or file.
            detail: Whether to return dictionaries as ``info`` does; otherwise names.

        Raises:
            FileNotFoundError: The file or directory does not exist.
        """
        path = self._strip_protocol(path)
        prefix = f"{path}/" if path else ""
        found: dict[str, dict[str, Any]] = {}
        for each in self.blob_store.list(prefix):
            child, below, _rest = each.name[len(prefix) :].partition("/")
            if below:
                found.setdefault(f"{prefix}{child}/", _directory(prefix + child))
            else:
                found[each.name] = _file(each)
        if not found and path:
            found = {path: _file(self.blob_store.stat(path))}
        rows = sorted(found.values(), key=lambda row: str(row["name"]))
        return rows if detail else [row["name"] for row in rows]

    def info(self, path: str, **_: object) -> dict[str, Any]:
        """Return name, size and type of a file or directory; of a file also version, digest and times.

        Raises:
            FileNotFoundError: The file or directory does not exist.
        """
        path = self._strip_protocol(path)
        if not path:
            return _directory("")
        try:
            return _file(self.blob_store.stat(path))
        except FileNotFoundError:
            if self.blob_store.list(f"{path}/"):
                return _directory(path)
            raise

    def checksum(self, path: str) -> str:
        """Return the XXH3-128 digest of a file, hexadecimal."""
        return self.blob_store.stat(self._strip_protocol(path)).digest

    def ukey(self, path: str) -> str:
        """Return a text that changes with the file: its digest."""
        return self.checksum(path)

    def created(self, path: str) -> datetime:
        """Return the time when a file was published."""
        created: datetime = self.info(path)["created"]
        return created

    def modified(self, path: str) -> datetime:
        """Return the time when a file was published, because a blob does not change."""
        return self.created(path)

    # ---- changing ------------------------------------------------------------------------------------------------

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> Any:
        """Open a file; one that is written is published by its ``close``, unless an exception ends it.

        Args:
            path: The file.
            mode: ``rb``, ``wb`` or ``xb``, or the same for text: ``r``, ``w``, ``x``.
            block_size: Not used.
            cache_options: Not used.
            compression: The name of a compression that fsspec knows, or ``infer``.
            options: ``encoding``, ``errors`` and ``newline`` for text.

        Raises:
            FileNotFoundError: The file to be read does not exist.
            BlobExistsError: The file to be created with ``x`` exists.
            UsageError: The mode is not one of these.
        """
        if "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **options)
        text = {} if "b" in mode else {each: options.pop(each) for each in _TEXT_OPTIONS & options.keys()}
        compression = get_compression(path, compression)
        upload = super().open(path, mode.replace("t", "").replace("b", "") + "b", block_size, cache_options, **options)
        file = upload
        try:
            if compression is not None:
                file = _CompressedUpload(upload, compr[compression](upload, mode="w"))
            return file if "b" in mode else _TextUpload(upload, file, **text)
        except BaseException:
            upload.end(publishes=False)
            file.close()
            raise

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, autocommit: bool = True, **_: object
    ) -> io.BufferedIOBase:
        """Open a file for reading, or for writing a new one."""
        if mode not in _MODES:
            raise UsageError(f"mode is {mode!r}; a blob is read or written as a whole: use one of {', '.join(_MODES)}")
        if mode == "rb":
            return _Download(self.blob_store.open_blob(path).detach(), _BUFFER_BYTES)
        return _Upload(self.blob_store.create_blob(path, overwrite=mode == "wb"), autocommit=autocommit)

    def mkdir(self, path: str, create_parents: bool = True, **_: object) -> None:
        """Do nothing: a directory exists while blobs are below it."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing, as ``mkdir``."""

    def rmdir(self, path: str) -> None:
        """Do nothing for a directory without blobs; raise OSError for another."""
        if self.blob_store.list(f"{self._strip_protocol(path)}/"):
            raise OSError(f"directory {path} has blobs; rm(..., recursive=True) deletes them, too")

    def cp_file(self, path1: str, path2: str, *, moves: bool = False, **_: object) -> None:
        """Copy a file by reference, or rename it if ``moves``; a directory is made by copying its files."""
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        if not self.isdir(path1):
            (self.blob_store.rename if moves else self.blob_store.copy)(path1, path2)

    def mv(
        self,
        path1: str | list[str],
        path2: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
        **_: object,
    ) -> None:
        """Move files, each by a rename; with ``recursive`` also all files of directories.

        A file that another writer meanwhile puts under the old name stays there.

        Raises:
            FileNotFoundError: A file does not exist.
            IsADirectoryError: A directory is to be moved without ``recursive``.
        """
        if path1 == path2:
            return
        if isinstance(path1, str) and not recursive and not has_magic(path1) and self.isdir(path1):
            raise IsADirectoryError(f"{path1} is a directory; mv(..., recursive=True) moves its files")
        self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise", moves=True)

    def _rm(self, path: str) -> None:
        """Delete a file; a directory goes with its last file."""
        path = self._strip_protocol(path)
        if not self.blob_store.list(f"{path}/") or self.blob_store.exists(path):
            self.blob_store.delete(path)

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete files; with ``recursive`` also all files of directories."""
        paths: Iterable[str] = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        directories = [each for each in paths if self.isdir(each)]
        if directories and not recursive:
            raise IsADirectoryError(f"{directories[0]} is a directory; rm(..., recursive=True) deletes its files")
        for each in paths:
            if each not in directories:
                self.blob_store.delete(each)


class _Download(io.BufferedReader):
    """A file with its size, as fsspec expects."""

    @property
    def size(self) -> int:
        """The bytes of the blob."""
        raw = self.raw
        assert isinstance(raw, BlobReader)
        size: int = raw.size
        return size


class _Upload(io.BufferedIOBase):
    """A file that publishes its blob when it is closed without an error, or at the end of a transaction.

    Theory of operation: a call of ``close`` does not show whether the block has failed. So a ``with`` of this class or
    of its wrappers decides with ``end`` before it closes; this decision is exact. A ``with`` of ``fsspec.OpenFile``
    calls only ``close``, so ``_exit_of_open_file`` finds out how the ``with`` ended. For every other ``close`` the
    exception that is being handled decides: if its handling began after the file was opened, it may have left the file
    incomplete. After the decision to discard, writes have no effect, because wrappers write their buffers when they are
    closed, and their errors would replace the exception of the block. A file that is dropped is discarded.
    """

    def __init__(self, upload: BlobUpload, *, autocommit: bool) -> None:
        super().__init__()
        self._upload = upload
        self._autocommit = autocommit
        self._publishes: bool | None = None
        """The decision whether the end publishes the blob; None before it."""
        self._handled = sys.exception()
        """The exception that was being handled when the file was opened, which does not concern the file."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._upload.tell()

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append bytes to the file, and return their number."""
        if self._publishes is False and not self.closed:
            return memoryview(data).nbytes
        try:
            return self._upload.write(data)
        except PybkError:
            if _exit_of_open_file(self) is not False:
                raise
            self.end(publishes=False)
            return memoryview(data).nbytes

    def end(self, *, publishes: bool) -> None:
        """Decide whether the ``close`` that follows publishes the blob; a decision to discard it is final."""
        self._publishes = publishes and self._publishes is not False

    def close(self) -> None:
        """Publish the blob, unless a transaction does.

        If an exception is being handled whose handling began after the file was opened, the blob is discarded, and a
        note of that exception says so; ``commit`` publishes it nevertheless.
        """
        if self.closed:
            return
        if self._publishes is None:
            self._decide()
        super().close()
        if not self._publishes:
            self._upload.abort()
        elif self._autocommit:
            self._upload.commit()

    def _decide(self) -> None:
        """Decide whether the blob is published, from how the file is closed."""
        error = sys.exception()
        clean = _exit_of_open_file(self)
        self.end(publishes=error is None or error is self._handled if clean is None else clean)
        if not self._publishes and error is not None:
            error.add_note(
                f"blob {self._upload.name!r} was not published, because its file was closed while this exception was "
                "handled; commit() publishes a file all the same"
            )

    def commit(self) -> None:
        """Close the file and publish the blob; a transaction calls this at its end for files that were not discarded.

        Raises:
            UsageError: A transaction ends before the file is closed; nothing was published.
        """
        if self._autocommit:
            self.end(publishes=True)
            self.close()
        elif not self.closed:
            self.discard()
            raise UsageError(f"blob {self._upload.name!r} is still open at the end of its transaction; close it before")
        elif self._publishes:
            self._upload.commit()

    def discard(self) -> None:
        """Close the file, and discard the blob."""
        self._publishes = False
        super().close()
        self._upload.abort()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file, or discard the blob if an exception leaves the block."""
        self.end(publishes=kind is None)
        self.close()

    def _dealloc_warn(self, _source: object) -> None:
        """Decide to discard: an ``io.TextIOWrapper`` that is dropped calls this before it closes the file."""
        self.end(publishes=False)

    def __del__(self) -> None:
        """Discard the blob, because a file that is dropped was not closed."""
        super().close()


def _exit_of_open_file(upload: _Upload) -> bool | None:
    """Return whether the ``with`` of fsspec's ``OpenFile`` that closes an upload ends without an exception.

    ``OpenFile.__exit__`` does not pass its arguments on, and no other class can replace it.

    Returns:
        None if no such ``with`` closes it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is OpenFile.__exit__.__code__:
            found = frame.f_locals
            if any(each is upload for each in found["self"].fobjects):
                return found["args"][0] is None
        frame = frame.f_back
    return None


class _CompressedUpload(io.BufferedIOBase):
    """A file that compresses the bytes that are written to an upload.

    Args:
        upload: The file of the blob.
        compressor: The file of a compression of fsspec that writes to it.
    """

    def __init__(self, upload: _Upload, compressor: Any) -> None:
        super().__init__()
        self._upload = upload
        self._compressor = compressor

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Compress bytes, and return their number."""
        self._compressor.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        """Complete the compressed file, and close its upload, which publishes it."""
        if not self.closed:
            super().close()
            if not self._upload.closed:
                self._compressor.close()  # some compressions close the upload, too
                self._upload.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file, or discard the blob if an exception leaves the block."""
        self._upload.end(publishes=kind is None)
        self.close()

    def _dealloc_warn(self, _source: object) -> None:
        """Decide to discard, as ``_Upload``."""
        self._upload.end(publishes=False)

    def __del__(self) -> None:
        """Discard the blob, because a file that is dropped was not closed."""
        if not self.closed:
            self._upload.end(publishes=False)
            self.close()


class _TextUpload(io.TextIOWrapper):
    """A file that encodes the text that is written to an upload.

    Args:
        upload: The file of the blob.
        file: The same file, or the one that compresses its bytes.
        options: The options of ``io.TextIOWrapper``.
    """

    def __init__(self, upload: _Upload, file: _Upload | _CompressedUpload, **options: Any) -> None:
        super().__init__(cast("IO[bytes]", file), **options)
        self._upload = upload

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file, or discard the blob if an exception leaves the block."""
        self._upload.end(publishes=kind is None)
        self.close()


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(info: BlobInfo) -> dict[str, Any]:
    created = datetime.fromtimestamp(info.created_ns / 1e9, UTC)
    return {
        "name": info.name,
        "size": info.size,
        "type": "file",
        "created": created,
        "version": info.version,
        "digest": info.digest,
        "meta": dict(info.meta),
    }
