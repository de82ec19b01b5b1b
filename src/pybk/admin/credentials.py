"""Passwords and cluster secrets on a command line: by file or environment, never by argument, which all may see."""

from __future__ import annotations

import argparse
import os
from typing import Final

from pybk.errors import UsageError

PASSWORD: Final = "PYBK_PASSWORD"
"""Environment variable of a ledger's password."""

SECRET: Final = "PYBK_CLUSTER_SECRET"
"""Environment variable of a cluster's secret."""

_BYTES_MAX: Final = 1 << 16


def takes_password(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file with a ledger's password."""
    command.add_argument(
        "--password-file",
        metavar="FILE",
        help=f"holds the password, a line end after it left out; else it is taken from {PASSWORD}",
    )


def takes_secret(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file with a cluster's secret."""
    command.add_argument(
        "--cluster-secret-file",
        metavar="FILE",
        help=f"holds the cluster's secret, a line end after it left out; else it is taken from {SECRET}",
    )


def password_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the password from where it was said to be, None if nothing was said."""
    return _read(parsed.password_file, PASSWORD)


def secret_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the cluster's secret from where it was said to be, None if nothing was said."""
    return _read(parsed.cluster_secret_file, SECRET)


def _read(path: str | None, variable: str) -> bytes | None:
    if path is None:
        return os.environb.get(variable.encode())
    with open(path, "rb") as file:
        data = file.read(_BYTES_MAX + 1)
    if len(data) > _BYTES_MAX:
        raise UsageError(f"{path} has more than {_BYTES_MAX} bytes, too many for a password or a secret")
    return data.removesuffix(b"\n").removesuffix(b"\r")
