"""Options for passwords and cluster secrets: files or the environment, never arguments, which ``ps`` shows."""

from __future__ import annotations

import argparse
import os
import tomllib
from typing import Any, Final

from pybk.credentials import CLUSTER_SECRET, PASSWORD, Passwords, Secret, read_secret_file
from pybk.errors import UsageError

STORAGE_OPTIONS_FILE: Final = "PYBK_STORAGE_OPTIONS_FILE"
"""Environment variable of the path of a file with the options of fsspec."""


def takes_password(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file with a ledger's password."""
    command.add_argument(
        "--password-file",
        metavar="FILE",
        help=f"holds the password; one line end after it is ignored; default: {PASSWORD}_FILE, {PASSWORD}",
    )


def takes_passwords(command: argparse.ArgumentParser) -> None:
    """Add ``--passwords``, a file with the passwords of many ledgers, and ``--strict``.

    ``takes_password`` is to be called, too: its password is the default of the file.
    """
    command.add_argument(
        "--passwords",
        metavar="FILE",
        help="TOML with passwords by ledger id and by ledger type: default = ..., [ledgers], [types]",
    )
    command.add_argument(
        "--strict", action="store_true", help="exit 1, too, if something could not be checked, or is not sealed"
    )


def takes_secret(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file with a cluster's secret."""
    command.add_argument(
        "--cluster-secret-file",
        metavar="FILE",
        help="holds the cluster's secret; one line end after it is ignored; FILE.next may hold the next one; default: "
        f"{CLUSTER_SECRET}_FILE, {CLUSTER_SECRET}",
    )


def takes_storage_options(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file with what fsspec takes for the URL of a backup."""
    command.add_argument(
        "--storage-options",
        metavar="FILE",
        help="TOML with what fsspec takes for the URL, such as key and secret, which then are not in the URL; default: "
        f"{STORAGE_OPTIONS_FILE}",
    )


def storage_options_of(parsed: argparse.Namespace) -> dict[str, Any] | None:
    """Return what fsspec takes for a URL, from the file; None if none is given.

    Raises:
        UsageError: The file cannot be read, every user may read or change it, or it is not TOML.
    """
    path = parsed.storage_options or os.environ.get(STORAGE_OPTIONS_FILE)
    if not path:
        return None
    try:
        return tomllib.loads(read_secret_file(path, private=True).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is to hold options of fsspec in TOML: {error}") from None


def password_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the password from the file or the environment, None if neither is given."""
    return Secret(file=parsed.password_file, variable=PASSWORD, private=True).read()


def passwords_of(parsed: argparse.Namespace) -> Passwords:
    """Return the passwords of ``--passwords``; that of ``--password-file`` or the environment is the default."""
    default = password_of(parsed)
    return Passwords(default) if parsed.passwords is None else Passwords.read(parsed.passwords, default, private=True)


def secret_of(parsed: argparse.Namespace) -> Secret | None:
    """Return where the cluster's secret is found, the file or the environment; None if neither is given."""
    secret = Secret(file=parsed.cluster_secret_file, variable=CLUSTER_SECRET, private=True)
    return secret if secret.read_all() else None
