"""Where backups are kept: a directory, or anything that fsspec reaches.

A target is a flat set of files with names. Each is put whole: after a stop a file has its old content, its new content,
or is missing. ``fsspec_target`` has the implementation over fsspec, which is imported only for a URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final, Protocol

from pybk.errors import CorruptError, UsageError
from pybk.storage.io.failures import storage_error
from pybk.storage.io.filesystem import Lock, OsFileSystem, replace_file

_LOCK: Final = "LOCK"
_UNFINISHED: Final = ".tmp"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL_URL: Final = "file://"
_MISSING: Final = "a file of the backup is missing; restore it from another copy of the backup"


class Target(Protocol):
    """The files of one backup. Threads: one at a time."""

    @property
    def where(self) -> str:
        """The directory or URL, for messages."""

    def names(self) -> list[str]:
        """Return the names of its files, sorted; none for a target that does not exist."""

    def read(self, name: str) -> bytes:
        """Return a file; CorruptError if it does not exist."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file, replacing another of its name; durable on return, as far as the target says."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def close(self) -> None:
        """Release it."""


class DirectoryTarget:
    """A directory of this host, mode 0700, with files of mode 0600; see ``Target``.

    Args:
        path: The directory.
        writes: Whether a backup is made: then the directory is made if it is missing, and locked.

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
            self._fs.make_directory(self._path)
            self._lock = self._fs.lock(os.path.join(self._path, _LOCK))

    @property
    def where(self) -> str:
        """The directory."""
        return self._path

    def names(self) -> list[str]:
        """See ``Target``."""
        if not os.path.exists(self._path):
            return []
        return sorted(name for name in os.listdir(self._path) if name != _LOCK and not name.endswith(_UNFINISHED))

    def read(self, name: str) -> bytes:
        """See ``Target``."""
        path = os.path.join(self._path, name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError as error:
            raise CorruptError(f"{path}: {_MISSING}", path=path) from error

    def put(self, name: str, data: bytes) -> None:
        """See ``Target``."""
        path = os.path.join(self._path, name)
        try:
            replace_file(self._fs, path, data)
        except OSError as error:
            raise storage_error(error, f"writing {path}") from error

    def remove(self, name: str) -> None:
        """See ``Target``."""
        self._fs.unlink(os.path.join(self._path, name))

    def close(self) -> None:
        """See ``Target``."""
        if self._lock is not None:
            self._lock.release()


def open_target(target: str, *, writes: bool, storage_options: Mapping[str, Any] | None = None) -> Target:
    """Return a target.

    Args:
        target: A directory, or a URL of fsspec.
        writes: Whether a backup is made there.
        storage_options: As fsspec takes them for the URL.

    Raises:
        UsageError: The target cannot be used, or fsspec is not installed.
        StoreLockedError: Another backup is being made in the directory.
    """
    if target.startswith(_LOCAL_URL):
        target = target[len(_LOCAL_URL) :]
    if not _URL.match(target):
        if storage_options:
            raise UsageError("storage_options are for URLs of fsspec; a directory takes none")
        return DirectoryTarget(target, writes=writes)
    try:
        from pybk.backup.fsspec_target import FsspecTarget
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise
        raise UsageError(
            f"{target} is a URL, which takes fsspec: pip install 'pybk[fsspec]'; a directory needs nothing"
        ) from error
    return FsspecTarget(target, dict(storage_options or {}))
