"""The command ``pybk``: run bookies, inspect and check stores and clusters, rebuild a store's index.

Passwords and cluster secrets come from a file or from the environment: PYBK_PASSWORD, PYBK_CLUSTER_SECRET.

Exit status: 0 if all is sound, 1 if damage was found, 2 for wrong usage, or a store or cluster that cannot be opened,
3 if a safety check refused it, 130 if Ctrl-C ended it, 141 if the reader of its output did.
"""

# Each module of this package holds the commands of one noun, such as ``store`` or ``ledger``. To add a command, write
# ``add_NAME`` and ``_NAME`` in the module of its noun, and append ``add_NAME`` to ``_COMMANDS``.

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from pybk.admin.cli import (
    bookie,
    cluster,
    config,
    feature_level,
    ledger,
    log,
    metadata,
    permissions,
    repair,
    scrub,
    secret,
    spark,
    store,
    wal,
)
from pybk.admin.cli.arguments import check_path
from pybk.admin.cli.output import CUT_OFF, DAMAGED, FAILED, INTERRUPTED, REFUSED
from pybk.errors import CorruptError, DigestMismatchError, PybkError, SafetyCheckError
from pybk.version import __version__

_COMMANDS: Final[tuple[Callable[[Any], None], ...]] = (
    ledger.add_ls,
    ledger.add_cat,
    store.add_dump,
    store.add_verify,
    ledger.add_reseal,
    store.add_rebuild_index,
    feature_level.add_upgrade,
    permissions.add_permissions,
    wal.add_wal,
    log.add_log,
    bookie.add_bookie,
    bookie.add_verbs,
    config.add_config,
    cluster.add_cluster,
    repair.add_repair,
    scrub.add_scrub,
    secret.add_secret,
    metadata.add_metadata,
    spark.add_spark,
)
"""Adds commands to the subparsers of ``pybk``, in the order in which ``pybk --help`` lists them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: The command line without the program's name; None for this process's own.

    Raises:
        SystemExit: The arguments are wrong, or ask for help or for the version.
    """
    _open_standard_streams()
    parsed = _parsed(sys.argv[1:] if arguments is None else list(arguments))
    try:
        check_path(parsed)
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader of our output has closed it, as `head` does. Without this the interpreter would fail to flush
        # standard output at its end, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF  # what was found is not known: a cluster that is bad must not look sound behind `| head`
    except KeyboardInterrupt:
        return INTERRUPTED  # the usual end of `tail -f`
    except (CorruptError, DigestMismatchError) as error:
        text = _one_line(error)
        where = "" if parsed.path in text else f"{parsed.path}: "  # an error of the index does not name its store
        print(f"pybk: {where}{text}", file=sys.stderr)
        return DAMAGED
    except SafetyCheckError as error:
        print(f"pybk: {_one_line(error)}", file=sys.stderr)
        return REFUSED
    except (PybkError, OSError) as error:
        print(f"pybk: {_one_line(error)}", file=sys.stderr)
        return FAILED


def _open_standard_streams() -> None:
    """Have standard input be empty, and what is printed be dropped, where the shell has closed the stream (``>&-``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the process ends


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """Parse a command line; two words that are one command, such as ``bookie list``, are joined."""
    parser, names = _parser()
    joined = " ".join(arguments[:2])
    return parser.parse_args([joined, *arguments[2:]] if joined in names else arguments)


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Return the parser, and the names of its commands."""
    parser = argparse.ArgumentParser(prog="pybk", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"pybk {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in _COMMANDS:
        add(commands)
    return parser, commands.choices
