"""Passwords and cluster secrets on a command line: by file or environment, never by argument, which all may see."""

from __future__ import annotations

import argparse

from pybk.credentials import CLUSTER_SECRET, PASSWORD, Passwords, Secret


def takes_password(command: argparse.ArgumentParser) -> None:
    """Add the option that names a file with a ledger's password."""
    command.add_argument(
        "--password-file",
        metavar="FILE",
        help=f"holds the password, a line end after it left out; else it is taken from {PASSWORD}",
    )


def takes_passwords(command: argparse.ArgumentParser) -> None:
    """Add the options that name a file with the passwords of many ledgers, and how what is not checked counts.

    They stand beside that of ``takes_password``.
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
        help=f"holds the cluster's secret, a line end after it left out; else it is taken from {CLUSTER_SECRET}",
    )


def password_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the password from where it was said to be, None if nothing was said."""
    return Secret(file=parsed.password_file, variable=PASSWORD).read()


def passwords_of(parsed: argparse.Namespace) -> Passwords:
    """Return the passwords from where they were said to be; one that is given alone is the default."""
    default = password_of(parsed)
    return Passwords(default) if parsed.passwords is None else Passwords.read(parsed.passwords, default)


def secret_of(parsed: argparse.Namespace) -> bytes | None:
    """Return the cluster's secret from where it was said to be, None if nothing was said."""
    return Secret(file=parsed.cluster_secret_file, variable=CLUSTER_SECRET).read()
