"""Options for passwords and cluster secrets: files or the environment, never arguments, which ``ps`` shows."""

from __future__ import annotations

import argparse
import os
import tomllib
from typing import Any, Final, TypedDict

from pybk.credentials import (
    CLUSTER_SECRET,
    Credentials,
    CredentialSources,
    Passwords,
    Secret,
    environment_credentials,
    read_secret_file,
)
from pybk.errors import UsageError

STORAGE_OPTIONS_FILE: Final = "PYBK_STORAGE_OPTIONS_FILE"
"""Environment variable of the path of a file with the options of fsspec."""


def storage_options_of(parsed: argparse.Namespace) -> dict[str, Any] | None:
    """Return the options of fsspec for a URL, from the file; None if no file is given.

    Raises:
        UsageError: The file cannot be read, every user may read or change it, or it is not TOML.
    """
    path = parsed.storage_options or os.environ.get(STORAGE_OPTIONS_FILE)
    if not path:
        return None
    try:
        return tomllib.loads(read_secret_file(path, private=True).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f'{path} is to hold options of fsspec in TOML: {error}; it has lines such as key = "..."'
        ) from None


def credentials_of(parsed: argparse.Namespace) -> Credentials:
    """Return the password and the secret from the files, or those in the environment if no file is given."""
    given = sources_of(parsed)
    return environment_credentials(private=True) if given == CredentialSources() else given.read()


def sources_of(parsed: argparse.Namespace) -> CredentialSources:
    """Return the files of the password and the secret that are given."""
    files = (parsed.password_file, parsed.secret_file)
    return CredentialSources(*(Secret() if file is None else Secret(file=file, private=True) for file in files))


class Given(TypedDict):
    """The arguments by which calls of the library take a password and a secret."""

    password: bytes
    secret: bytes | None


def given_in(parsed: argparse.Namespace) -> Given:
    """Return the result of ``credentials_of`` as arguments of a call."""
    given = credentials_of(parsed)
    return Given(password=given.password, secret=given.secret)


def passwords_of(parsed: argparse.Namespace) -> Passwords:
    """Return the passwords of ``--passwords``; the result of ``credentials_of`` is the default."""
    given = credentials_of(parsed)
    default, secret = given.password or None, given.secret
    if parsed.passwords is None:
        return Passwords(default, secret=secret)
    return Passwords.read(parsed.passwords, default, secret=secret, private=True)


def secret_of(parsed: argparse.Namespace) -> Secret | None:
    """Return the source of the cluster's secret, the file or the environment; None if neither is given."""
    secret = Secret(file=parsed.cluster_secret_file, variable=CLUSTER_SECRET, private=True)
    return secret if secret.read_all() else None


def target_secret_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the secret of the other cluster of a copy; UsageError if every user may read its file."""
    return Secret(file=parsed.target_secret_file, private=True).read()
