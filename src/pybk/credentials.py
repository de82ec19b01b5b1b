"""Secrets as they are handed in: as they are, by file, or by environment; and shown to nobody."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

from pybk.errors import UsageError

PASSWORD: Final = "PYBK_PASSWORD"
"""Environment variable of a ledger's password."""

CLUSTER_SECRET: Final = "PYBK_CLUSTER_SECRET"
"""Environment variable of a cluster's secret; with ``_FILE`` behind it, that of the name of a file that holds it."""

_BYTES_MAX: Final = 1 << 16


def read_secret_file(path: str) -> bytes:
    """Return what a file holds, a line end after it left out.

    Raises:
        UsageError: It cannot be read, or is too long for a secret.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path} is to hold a password or a secret, and cannot be read: {error.strerror}") from error
    if len(data) > _BYTES_MAX:
        raise UsageError(f"{path} has more than {_BYTES_MAX} bytes, too many for a password or a secret")
    return data.removesuffix(b"\n").removesuffix(b"\r")


@dataclass(frozen=True, slots=True)
class Secret:
    """A password or a secret, and where it is taken from: the first of these that was given.

    Attributes:
        value: The secret itself.
        file: A file that holds it, a line end after it left out, on each machine where it is read.
        variable: An environment variable, or one with ``_FILE`` behind its name that names such a file.
    """

    value: bytes | None = field(default=None, repr=False)
    file: str | None = None
    variable: str | None = None

    def read(self) -> bytes | None:
        """Return the secret, None if none was given.

        Raises:
            UsageError: The file cannot be read, or is too long.
        """
        if self.value is not None:
            return self.value
        if self.file is not None:
            return read_secret_file(self.file)
        if self.variable is None:
            return None
        file = os.environ.get(f"{self.variable}_FILE")
        return read_secret_file(file) if file else os.environb.get(self.variable.encode())
