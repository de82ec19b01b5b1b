"""A target that fsspec reaches: object stores, SFTP and others. It needs the extra ``pybk[fsspec]``."""

from __future__ import annotations

from typing import Any, Final

import fsspec

from pybk.errors import CorruptError, StorageFailedError, UsageError

_UNFINISHED: Final = ".tmp"


class FsspecTarget:
    """The files below a URL; see ``Target``.

    A file is written under another name and then renamed, because not every backend puts a file whole. Nothing locks
    the target: make one backup at a time there. Permissions are those that the backend gives.

    Args:
        url: A URL of fsspec.
        options: As fsspec takes them.

    Raises:
        UsageError: fsspec does not know the protocol, or refuses the options.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url, **options)
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(f"fsspec cannot open {url}: {error}") from error
        self._url = url

    @property
    def where(self) -> str:
        """The URL."""
        return self._url

    def _of(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"

    def names(self) -> list[str]:
        """See ``Target``."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._failed("listing", self._url, error) from error
        names = (str(path).rstrip("/").rpartition("/")[2] for path in found)
        return sorted(name for name in names if not name.endswith(_UNFINISHED))

    def read(self, name: str) -> bytes:
        """See ``Target``."""
        try:
            data: bytes = self._fs.cat_file(self._of(name))
        except FileNotFoundError as error:
            raise CorruptError(
                f"{self._of(name)}: a file of the backup is missing; restore it from another copy of the backup"
            ) from error
        except OSError as error:
            raise self._failed("reading", name, error) from error
        return data

    def put(self, name: str, data: bytes) -> None:
        """See ``Target``."""
        try:
            self._fs.makedirs(self._path, exist_ok=True)
            self._fs.pipe_file(self._of(name) + _UNFINISHED, data)
            self._fs.mv(self._of(name) + _UNFINISHED, self._of(name))
        except OSError as error:
            raise self._failed("writing", name, error) from error

    def remove(self, name: str) -> None:
        """See ``Target``."""
        try:
            self._fs.rm_file(self._of(name))
        except OSError as error:
            raise self._failed("removing", name, error) from error

    def close(self) -> None:
        """See ``Target``; fsspec keeps its connections itself."""

    def _failed(self, what: str, name: str, error: OSError) -> StorageFailedError:
        return StorageFailedError(f"{what} {name} at {self._url} failed: {error}; run the command again")
