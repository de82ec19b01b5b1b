"""The command pybk: run bookies, inspect and check stores and clusters, repair and administer them."""

# Each noun, such as ``store`` or ``ledger``, is a module of this package with its verbs, and a line of ``NOUNS``. Its
# function ``add`` adds the verbs to a parser. The modules, and what they import at their beginning, are light, so that
# `--help` and completion are quick: what opens stores and clusters is imported where a command runs.
# tests/admin/cli/test_imports.py holds this.

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Final, NamedTuple

from pybk.admin.cli.arguments import CommandParser, check_path, is_url
from pybk.admin.cli.output import (
    CUT_OFF,
    DAMAGED,
    EXIT_STATUSES,
    FAILED,
    INTERRUPTED,
    REFUSED,
    UNREACHABLE,
)
from pybk.admin.cli.time_limit import OutOfTimeError, time_limit
from pybk.admin.command import VERSION
from pybk.admin.profiles import VARIABLE
from pybk.errors import CorruptError, DigestMismatchError, PybkError, SafetyCheckError


class Noun(NamedTuple):
    """A noun of the command line; its module, of the same name, is imported when it is used.

    Attributes:
        name: The noun.
        text: What its verbs do, for ``--help``.
        verb: The verb that is meant where the next word is none; empty if a verb is needed, or the noun has none.
    """

    name: str
    text: str
    verb: str = ""


NOUNS: Final = (
    Noun("cluster", "show how a cluster is, make, probe, balance and upgrade it, and change its settings"),
    Noun("bookie", "serve as a bookie; or list, show, probe, drain and remove bookies", "serve"),
    Noun("ledger", "list, show, read, seal and delete ledgers of a store or a cluster"),
    Noun("repair", "list, run, pause and resume the repairs of a cluster"),
    Noun("scrub", "have stored entries be checked, and see how their checks proceed", "run"),
    Noun("metadata", "export, check, restore or rebuild a cluster's metadata"),
    Noun("secret", "replace the secret of a cluster: add, switch, reseal, retire"),
    Noun("store", "look at the files of a store, verify and mend it"),
    Noun("backup", "make, verify, show and prune backups of stores, bookies and clusters' ledgers", "make"),
    Noun("restore", "restore a backup: a store to a new directory, ledgers to a cluster"),
    Noun("permissions", "show which files others may use, or narrow that"),
    Noun("wal", "list, read and change write-ahead logs"),
    Noun("log", "list, read and change named logs"),
    Noun("config", "check and show the options of a bookie"),
    Noun("spark", "run a job over ledgers on the executors of Apache Spark; needs pip install 'pybk[spark]'"),
    Noun("dev", "run a cluster of real processes on this host, and try faults"),
    Noun("console", "show and administer a cluster over HTTP, with a page, until SIGTERM or SIGINT"),
    Noun("token", "make a token with which a person or a program may use the interface over HTTP"),
    Noun("support", "collect what helpers want to see of a cluster or a store, without secrets"),
    Noun("completion", "print what completes the commands of pybk in bash or zsh"),
)
"""All nouns, in the order in which ``pybk --help`` lists them."""

ALIASES: Final[Mapping[str, tuple[str, ...]]] = {
    "ls": ("ledger", "list"),
    "cat": ("ledger", "cat"),
    "reseal": ("ledger", "reseal"),
    "dump": ("store", "dump"),
    "verify": ("store", "verify"),
    "rebuild-index": ("store", "rebuild-index"),
    "upgrade": ("store", "upgrade"),
}
"""Older names of commands."""

_NEAR: Final = 0.7
"""How alike a word and a verb are, by difflib, if the word is taken for a misspelt one."""

_ENVIRONMENT: Final = (
    "PYBK_SECRET, PYBK_PASSWORD, PYBK_CLUSTER_SECRET: a ledger's secret or password and a cluster's secret, which are\n"
    "  no arguments, because `ps` shows those; the same with _FILE appended: the files that hold them\n"
    "NO_COLOR: if set, nothing is coloured\n"
    "PYBK_PURE: if 1, digests are computed in pure Python, although the native core is there"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: The command line without the program's name; None for this process's own.

    Raises:
        SystemExit: The arguments are wrong, or ask for help or for the version.
    """
    _open_standard_streams()
    profile, words = _profile_of(sys.argv[1:] if arguments is None else list(arguments))
    _check_begins(words)
    words = completed(words)
    parsed = parser_of(words[:1], profile).parse_args(words)
    try:
        check_path(parsed)
        with time_limit(getattr(parsed, "timeout", None)):
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
    except (PybkError, OSError, OutOfTimeError) as error:
        print(f"pybk: {_located(parsed, error)}", file=sys.stderr)
        return _status_of(error)


def _profile_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of the profile, of the option before the command or of the environment, and the words after."""
    if words[:1] == ["--profile"] and len(words) > 1:
        return words[1], words[2:]
    if words and words[0].startswith("--profile="):
        return words[0].partition("=")[2], words[1:]
    return os.environ.get(VARIABLE, ""), words


def _check_begins(words: Sequence[str]) -> None:
    """End the process if an option of a command stands before it, which argparse would report for the next word."""
    first = words[0].partition("=")[0] if words else ""
    if first.startswith("-") and first not in ("-h", "--help", "--version", "--profile"):
        nouns = [at for at, word in enumerate(words) if any(word == noun.name for noun in NOUNS)]
        command = " ".join(words[nouns[0] : nouns[0] + 2]) if nouns else "ledger list"
        parser_of(()).error(f"{first} stands after the command: pybk {command} ... {first}")


def _status_of(error: BaseException) -> int:
    if isinstance(error, CorruptError | DigestMismatchError):
        return DAMAGED
    if isinstance(error, SafetyCheckError):
        return REFUSED
    if isinstance(error, OutOfTimeError) or (isinstance(error, PybkError) and error.retryable):
        return UNREACHABLE
    return FAILED


def _located(parsed: argparse.Namespace, error: BaseException) -> str:
    """Return an error in one line; one of the index does not name its store, so that its path is added."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    path = getattr(parsed, "path", None)
    unnamed = isinstance(error, CorruptError | DigestMismatchError) and path and path not in text
    return f"{path}: {text}" if unnamed else text


def _open_standard_streams() -> None:
    """Have standard input be empty, and what is printed be dropped, where the shell has closed the stream (``>&-``)."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # until the process ends


# ---- the parser ----------------------------------------------------------------------------------------------------


def completed(words: Sequence[str]) -> list[str]:
    """Return a command line with older names replaced, and with the verb that is meant where none is given."""
    found = list(words)
    if found[:1] == ["upgrade"] and any(map(is_url, found)):
        found[:1] = ["cluster", "upgrade"]
    elif found and found[0] in ALIASES:
        found[:1] = ALIASES[found[0]]
    noun = next((each for each in NOUNS if found[:1] == [each.name]), None)
    if noun is not None and noun.verb and found[1:2] not in (["-h"], ["--help"]):
        verbs = _module_parser(noun).verbs
        if found[1:2] == [] or found[1] not in verbs:
            _check_no_verb(noun, verbs, found[1:2])
            found.insert(1, noun.verb)
    return found


def _check_no_verb(noun: Noun, verbs: Collection[str], words: Sequence[str]) -> None:
    """End the process if the word after a noun is a misspelt verb, which would name a new directory."""
    for word in words:
        near = get_close_matches(word, verbs, 1, _NEAR)
        if near and os.sep not in word and not os.path.exists(word):
            CommandParser(prog=f"pybk {noun.name}").error(
                f"{word} is no verb; {near[0]} is one, and ./{word} names a new directory"
            )


def parser_of(names: Collection[str], profile: str = "") -> CommandParser:
    """Return the parser of ``pybk``, in which the nouns with these names have their verbs, and others have none.

    Args:
        names: The nouns.
        profile: The name of the profile that stands for the PATH of a cluster that is left out; empty for none.
    """
    parser = CommandParser(
        prog="pybk",
        description=__doc__,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        profile=profile,
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"the cluster of commands that are given no PATH, such as dev after `pybk dev up`; variable: {VARIABLE}",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(metavar="COMMAND")
    for noun in NOUNS:
        command = commands.add_parser(noun.name, help=noun.text, description=_described(noun))
        if noun.name in names:
            _fill(noun, command)
    return parser


def whole_parser() -> CommandParser:
    """Return the parser of ``pybk`` with all nouns and verbs."""
    return parser_of([noun.name for noun in NOUNS])


def _module_parser(noun: Noun) -> CommandParser:
    parser = CommandParser(prog=f"pybk {noun.name}")
    _fill(noun, parser)
    return parser


def _fill(noun: Noun, parser: CommandParser) -> None:
    import_module(f"{__name__}.{noun.name}").add(parser)


def _described(noun: Noun) -> str:
    if not noun.verb:
        return noun.text
    return f"{noun.text}. Where the next word is no verb, {noun.verb} is meant"


def _epilog() -> str:
    older = ", ".join(f"{name} ({' '.join(words)})" for name, words in ALIASES.items())
    statuses = "\n".join(f"{status:>4}  {text}" for status, text in EXIT_STATUSES.items())
    return f"older names:\n  {older}\n\nexit status:\n{statuses}\n\nenvironment:\n{_ENVIRONMENT}"
