"""A target that fsspec reaches: object stores, SFTP and others. It needs the extra ``pybk[fsspec]``."""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

import fsspec

from pybk.backup.target import UNFINISHED, another_writes, check_size, missing, target_error
from pybk.credentials import without_credentials
from pybk.errors import CorruptError, UsageError

_PATTERN: Final = re.compile(r"[*?\[\]]")


class FsspecTarget:
    """The files below a URL; see ``Target``.

    A file is written under another name and then renamed, because not every backend puts a file whole. Nothing locks
    the target: if two backups are made at once, one of them finds files of the other and is refused. The backend sets
    the permissions. Backends raise errors of all kinds, also those of their network libraries, and each error becomes a
    StorageError.

    Args:
        url: A URL of fsspec.
        options: The options of fsspec.

    Raises:
        UsageError: fsspec does not know the protocol, or refuses the URL or the options.
        StorageFailedError: The server cannot be reached.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._url = without_credentials(url)
        try:
            self._fs, path = fsspec.core.url_to_fs(url, **options)
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(
                f"fsspec cannot open {self._url}: {type(error).__name__}: {without_credentials(str(error))}"
            ) from error
        except Exception as error:
            raise target_error(error, f"opening {self._url}") from error
        if _PATTERN.search(path):
            raise UsageError(f"{self._url}: fsspec takes *, ?, [ and ] for a pattern; choose a path without them")
        self._path = path

    @property
    def where(self) -> str:
        """The URL, without a password."""
        return self._url

    def _of(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}" if self._path else name  # none for the root of a chained system

    def names(self) -> list[str]:
        """See ``Target``."""
        return [name for name in self._listed() if not name.endswith(UNFINISHED)]

    def unfinished(self) -> list[str]:
        """See ``Target``."""
        return [name for name in self._listed() if name.endswith(UNFINISHED)]

    def _listed(self) -> list[str]:
        try:
            self._fs.invalidate_cache()
            found = [str(path).rstrip("/") for path in self._fs.ls(self._path, detail=False)]
        except FileNotFoundError:
            return []
        except Exception as error:
            raise target_error(error, f"listing {self._url}") from error
        # Some object stores list the directory itself, too.
        return sorted(path.rpartition("/")[2] for path in found if path.strip("/") != self._path.strip("/"))

    def read(self, name: str, bytes_max: int) -> bytes:
        """See ``Target``."""
        where = f"{self._url}/{name}"
        try:
            size = self._fs.size(self._of(name))
            if size is not None:
                check_size(where, size, bytes_max)
            data: bytes = self._fs.cat_file(self._of(name))
        except FileNotFoundError as error:
            raise missing(where) from error
        except CorruptError:
            raise
        except Exception as error:
            raise target_error(error, f"reading {where}") from error
        return data

    def put(self, name: str, data: bytes) -> None:
        """See ``Target``."""
        unfinished = f"{name}.{secrets.token_hex(4)}{UNFINISHED}"
        try:
            self._fs.makedirs(self._path, exist_ok=True)
            self._fs.pipe_file(self._of(unfinished), data)
        except Exception as error:
            raise target_error(error, f"writing {self._url}/{name}") from error
        if name in self.names():
            self.remove(unfinished)
            raise another_writes(f"{self._url}/{name}")
        try:
            self._fs.mv(self._of(unfinished), self._of(name))
        except Exception as error:
            raise target_error(error, f"writing {self._url}/{name}") from error

    def remove(self, name: str) -> None:
        """See ``Target``."""
        try:
            self._fs.rm_file(self._of(name))
        except FileNotFoundError:
            return
        except Exception as error:
            raise target_error(error, f"removing {self._url}/{name}") from error

    def close(self) -> None:
        """See ``Target``; fsspec keeps its connections itself."""
