"""Profiles: clusters by name; with one, commands need neither the URL of a cluster nor the file of its secret.

A profile is a TOML file with its name in ``$XDG_CONFIG_HOME/pybk/profiles`` (``~/.config`` by default). It has
``metadata``, the URL of the cluster, and ``secret_file``, the file of its secret. ``pybk dev up`` adds ``directory``.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass
from typing import Any, Final

from pybk.errors import UsageError
from pybk.metadata.url import scheme_of
from pybk.storage.io.filesystem import OsFileSystem, read_regular, replace_file
from pybk.values import listed

VARIABLE: Final = "PYBK_PROFILE"
"""The variable that names the profile of commands without ``--profile``."""

_BYTES_MAX: Final = 1 << 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A cluster.

    Attributes:
        name: The name of the profile.
        metadata: The URL of its metadata store.
        secret_file: The file of its secret; empty if it has none.
        directory: The directory of a cluster that ``pybk dev up`` made; empty for others.
    """

    name: str
    metadata: str
    secret_file: str = ""
    directory: str = ""

    @classmethod
    def read(cls, name: str) -> Profile:
        """Return the profile with a name.

        Raises:
            UsageError: The profile does not exist, or cannot be read.
        """
        path = path_of(name)
        try:
            found = tomllib.loads(read_regular(path, _BYTES_MAX).decode())
            return cls(name=name, **_checked(found))
        except FileNotFoundError:
            raise UsageError(
                f"there is no profile {name!r}: {path} would be it; `pybk dev up` makes one, or write it by hand: "
                'metadata = "zk://...", secret_file = "..."'
            ) from None
        except OSError as error:
            raise UsageError(f"the profile {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, UsageError) as error:
            raise UsageError(
                f"{path} is to be a profile: metadata, and maybe secret_file and directory, as texts: {error}"
            ) from error

    def write(self) -> str:
        """Write the profile, durably and for its owner alone; return its file."""
        path = path_of(self.name)
        fs = OsFileSystem()
        fs.make_directory(os.path.dirname(path))
        values = {"metadata": self.metadata, "secret_file": self.secret_file, "directory": self.directory}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value)
        replace_file(fs, path, text.encode())
        return path


def _checked(found: dict[str, Any]) -> dict[str, str]:
    """Return the values of a profile; raises UsageError for those that no profile has, and for a URL of no cluster."""
    unknown = found.keys() - {"metadata", "secret_file", "directory"}
    if unknown:
        raise UsageError(f"it has {listed(sorted(unknown))}, which no profile has")
    for name, value in found.items():
        if not isinstance(value, str):
            raise UsageError(f"{name} is no text")
    if not found.get("metadata"):
        raise UsageError("it has no metadata, the URL of a cluster")
    scheme_of(found["metadata"])
    return found


def path_of(name: str) -> str:
    """Return the file of a profile; raises UsageError for a name that is not valid."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.100} is not a name of a profile: letters, digits, '_', '.' and '-' are allowed, 64 at most"
        )
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "pybk", "profiles", f"{name}.toml")
