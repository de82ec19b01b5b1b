"""The places of backups: a directory, or any file system of fsspec.

A target is a flat set of named files. Each is put whole and never changed: after a stop a file has its content, or is
missing. ``fsspec_target`` has the implementation over fsspec.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, Protocol

from pybk.credentials import without_credentials
from pybk.errors import (
    CorruptError,
    StorageError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    UsageError,
)
from pybk.storage.io.failures import IrregularFileError, is_full
from pybk.storage.io.filesystem import Lock, OsFileSystem, open_regular, replace_file

UNFINISHED: Final = ".tmp"
"""The suffix of the names of files that are being put."""

_LOCK: Final = "LOCK"
_MOVE_AWAY: Final = "move it away and restore the file from another copy of the backup"


class Target(Protocol):
    """The files of one backup. Threads: one at a time."""

    @property
    def where(self) -> str:
        """The directory or URL, for messages."""

    def names(self) -> list[str]:
        """Return the names of its files, sorted; empty for a target that does not exist."""

    def unfinished(self) -> list[str]:
        """Return the names of files that a stop left unfinished, or that are being put now."""

    def read(self, name: str, bytes_max: int) -> bytes:
        """Return a file; raise CorruptError if it does not exist, or is larger than a sound file can be."""

    def put(self, name: str, data: bytes) -> None:
        """Write a new file, durable on return as far as the target promises.

        Raises:
            StorageRefusedError: A file of this name exists, because another process writes to the backup.
            StorageFullError, StorageFailedError: The file does not exist.
        """

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

    def close(self) -> None:
        """Release the target."""


class DirectoryTarget:
    """A directory of this host, mode 0700, with files of mode 0600; see ``Target``.

    Args:
        path: The directory.
        writes: Whether a backup is made; then a missing directory is made, and the directory is locked.

    Raises:
        UsageError: The path is that of a file.
        StoreLockedError: Another backup is being made there.
    """

    def __init__(self, path: str, *, writes: bool) -> None:
        self._path = os.path.abspath(path)
        self._fs = OsFileSystem()
        self._lock: Lock | None = None
        if os.path.exists(self._path) and not os.path.isdir(self._path):
            raise UsageError(f"{self._path} is a file; a backup is a directory: name another path")
        if writes:
            try:
                self._fs.make_directory(self._path)
                self._lock = self._fs.lock(os.path.join(self._path, _LOCK))
            except OSError as error:
                raise target_error(error, f"opening {self._path}") from error
            for name in self.unfinished():
                self.remove(name)

    @property
    def where(self) -> str:
        """The directory."""
        return self._path

    def names(self) -> list[str]:
        """See ``Target``."""
        return [name for name in self._listed() if not name.endswith(UNFINISHED)]

    def unfinished(self) -> list[str]:
        """See ``Target``."""
        return [name for name in self._listed() if name.endswith(UNFINISHED)]

    def _listed(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self._path) if name != _LOCK)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise target_error(error, f"listing {self._path}") from error

    def read(self, name: str, bytes_max: int) -> bytes:
        """See ``Target``."""
        path = os.path.join(self._path, name)
        try:
            with open(open_regular(path, remedy=_MOVE_AWAY), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                check_size(path, size, bytes_max)
                return file.read(size)
        except FileNotFoundError as error:
            raise missing(path) from error
        except OSError as error:
            raise target_error(error, f"reading {path}") from error

    def put(self, name: str, data: bytes) -> None:
        """See ``Target``."""
        path = os.path.join(self._path, name)
        if os.path.lexists(path):
            raise another_writes(path)
        try:
            replace_file(self._fs, path, data)
        except OSError as error:
            with suppress(OSError):
                self._fs.unlink(path + UNFINISHED)  # so that a full device has that space back
            raise target_error(error, f"writing {path}") from error

    def remove(self, name: str) -> None:
        """See ``Target``."""
        path = os.path.join(self._path, name)
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise target_error(error, f"removing {path}") from error

    def close(self) -> None:
        """See ``Target``."""
        if self._lock is not None:
            self._lock.release()


def missing(where: str) -> CorruptError:
    """Return the error for a missing file."""
    return CorruptError(
        f"{where}: a file of the backup is missing; restore it from another copy of the backup", path=where
    )


def another_writes(where: str) -> StorageRefusedError:
    """Return the error for a new file that exists already."""
    return StorageRefusedError(
        f"{where} has appeared meanwhile: another process writes to this backup; run the command again when it is done"
    )


def check_size(where: str, nbytes: int, bytes_max: int) -> None:
    """Raise CorruptError if a file is larger than a sound one can be, before memory is taken for it."""
    if nbytes > bytes_max:
        raise CorruptError(
            f"{where}: {nbytes} bytes, but at most {bytes_max} were written; restore the file from another copy of the "
            "backup",
            path=where,
        )


def target_error(error: Exception, doing: str) -> StorageError:
    """Return the pybk error for a failure of a target, without the password that a library's message may have."""
    said = without_credentials(str(error))
    if is_full(error):
        return StorageFullError(
            f"{doing}: {said}; free space there, such as by pybk backup prune, and run the command again"
        )
    if isinstance(error, IrregularFileError):
        return StorageFailedError(f"{doing} failed: {error.filename} is {error.strerror}")
    return StorageFailedError(f"{doing} failed: {type(error).__name__}: {said}; run the command again")
