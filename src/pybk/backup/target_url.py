"""Opens the target that a path or a URL names; fsspec is imported only for a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pybk.backup.target import DirectoryTarget, Target
from pybk.credentials import without_credentials
from pybk.errors import UsageError

_LOCAL_URL: Final = "file://"


def open_target(target: str, *, writes: bool, storage_options: Mapping[str, Any] | None = None) -> Target:
    """Return a target.

    Args:
        target: A directory, or a URL of fsspec.
        writes: Whether a backup is made there.
        storage_options: The options of fsspec for the URL.

    Raises:
        UsageError: The target cannot be used, or fsspec is not installed.
        StoreLockedError: Another backup is being made in the directory.
    """
    if target.startswith(_LOCAL_URL):
        target = target[len(_LOCAL_URL) :]
    if "://" not in target:
        if storage_options:
            raise UsageError("storage_options are for URLs of fsspec; a directory takes none")
        return DirectoryTarget(target, writes=writes)
    try:
        from pybk.backup.fsspec_target import FsspecTarget
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise
        raise UsageError(
            f"{without_credentials(target)} is a URL, which takes fsspec: pip install 'pybk[fsspec]'; a directory does "
            "not"
        ) from error
    return FsspecTarget(target, dict(storage_options or {}))
