"""The arguments that many commands share: PATH, ``--json``, and what PATH may be."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from pybk.credentials import CLUSTER_SECRET
from pybk.errors import MetadataForgedError, UsageError

STORE: Final = "the directory of the store"
STORE_OR_CLUSTER: Final = (
    "the directory of a store, or the metadata URL of a cluster: zk://host:port/path, lmdb:///path"
)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, path: str = STORE
) -> argparse.ArgumentParser:
    """Add a command that takes PATH and ``--json``, and return its parser.

    Args:
        commands: Where: the subparsers of ``pybk``.
        name: The command's name.
        run: Runs it and returns the exit status.
        text: What it does, for ``--help``.
        path: What PATH is, for ``--help``.
    """
    # Abbreviations are refused: --cluster-secret SECRET would be read as --cluster-secret-file, and the error about
    # the file that is missing would print the secret.
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    command.add_argument("path", metavar="PATH", help=path)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run, path_help=path)
    return command


def check_path(parsed: argparse.Namespace) -> None:
    """Raise UsageError if PATH is a file, of whatever command."""
    if getattr(parsed, "path_may_be_file", False):
        return
    if not is_url(parsed.path) and os.path.exists(parsed.path) and not os.path.isdir(parsed.path):
        raise UsageError(f"{parsed.path} is a file; PATH takes {parsed.path_help}")


def is_url(path: str) -> bool:
    """Return whether PATH is a metadata URL and not a directory."""
    return "://" in path


def directory_of(parsed: argparse.Namespace) -> str:
    """Return the directory that a command works on; raises UsageError if PATH is a metadata URL."""
    path: str = parsed.path
    if is_url(path):
        raise UsageError(f"{path} is a metadata URL; this takes a directory: run it on that of each bookie")
    return path


@contextmanager
def secret_needed() -> Iterator[None]:
    """Add to the error of a missing or wrong cluster secret how it is given."""
    try:
        yield
    except MetadataForgedError as error:
        raise MetadataForgedError(f"{error}: --cluster-secret-file FILE or {CLUSTER_SECRET}") from error
