"""Options for passwords and cluster secrets: files or the environment, never arguments, which ``ps`` shows."""

from __future__ import annotations

import argparse

from pybk.credentials import CLUSTER_SECRET, PASSWORD, Passwords, Secret


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


def password_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the password from the file or the environment, None if neither is given."""
    return Secret(file=parsed.password_file, variable=PASSWORD).read()


def passwords_of(parsed: argparse.Namespace) -> Passwords:
    """Return the passwords of ``--passwords``; that of ``--password-file`` or the environment is the default."""
    default = password_of(parsed)
    return Passwords(default) if parsed.passwords is None else Passwords.read(parsed.passwords, default)


def secret_of(parsed: argparse.Namespace) -> Secret | None:
    """Return where the cluster's secret is found, the file or the environment; None if neither is given."""
    secret = Secret(file=parsed.cluster_secret_file, variable=CLUSTER_SECRET)
    return secret if secret.read_all() else None
