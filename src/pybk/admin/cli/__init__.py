"""The command pybk: run bookies, inspect and check stores and clusters, repair and administer them."""

# The commands, their arguments and their help stand in the table, ``options/table.py``. Each noun, such as
# ``store`` or ``ledger``, is a module of this package, which is imported when one of its commands runs; its ``VERBS``
# has the function of each verb. tests/admin/cli/test_imports.py holds that `--help` imports none.

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from pybk.admin import VERSION
from pybk.admin.cli.command_parser import NEAR, CommandParser, check_path, fill, is_url
from pybk.admin.cli.output import CUT_OFF, DAMAGED, EXIT_STATUSES, FAILED, INTERRUPTED, REFUSED, UNREACHABLE
from pybk.admin.cli.time_limit import OutOfTimeError, time_limit
from pybk.admin.profiles import VARIABLE
from pybk.errors import CorruptError, DigestMismatchError, PybkError, SafetyCheckError
from pybk.metadata.store import without_secrets
from pybk.options.rows import THE_TABLE, Command

_MAKING: Final = frozenset({"bookie"})
"""The nouns after which a word may name a directory that the verb that is meant makes."""

NOUNS: Final = THE_TABLE.verbs()
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

HELP_OF_PROFILE: Final = "the cluster of commands that are given no PATH, such as dev after `pybk dev up`"
"""The meaning of ``--profile``, for ``--help``."""

_ROOT: Final = Command((), "", (), "", "COMMAND")
_REMEDIES: Final[Mapping[int, str]] = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file",
    errno.EEXIST: "name a file that does not exist",
    errno.EACCES: "name a file that this user may use",
}
"""The remedies of errors of the system whose texts name none."""

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
        print(f"pybk: {without_secrets(_located(parsed, error))}", file=sys.stderr)
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
    """Return an error in one line, with the store's path if it is of the index, whose errors do not name the store."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
        code = error.errno or 0
        if code in _REMEDIES and error.strerror == os.strerror(code):
            text += f"; {_REMEDIES[code]}"
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
    """Return a command line with older names replaced, and with the default verb if none is given."""
    found = list(words)
    if found[:1] == ["upgrade"] and any(map(is_url, found)):
        found[:1] = ["cluster", "upgrade"]
    elif found and found[0] in ALIASES:
        found[:1] = ALIASES[found[0]]
    noun = next((each for each in NOUNS if found[:1] == [each.name]), None)
    if noun is not None and noun.verb and found[1:2] not in (["-h"], ["--help"]):
        verbs = [each.name for each in THE_TABLE.verbs(noun.name)]
        if found[1:2] == [] or found[1] not in verbs:
            _check_no_verb(noun, verbs, found[1:2])
            found.insert(1, noun.verb)
    return found


def _check_no_verb(noun: Command, verbs: Collection[str], words: Sequence[str]) -> None:
    """End the process if the word after a noun is neither a verb nor a path or URL; a misspelt verb would be a path."""
    for word in words:
        if word.startswith("-") or os.sep in word or os.path.exists(word):
            continue
        near = get_close_matches(word, verbs, 1, NEAR)
        if near or noun.name not in _MAKING:
            known = f"{near[0]} is one" if near else f"the verbs are {', '.join(verbs)}"
            CommandParser(prog=f"pybk {noun.name}").error(
                f"{word} is no verb; {known}, and ./{word} names a new directory"
            )


def parser_of(names: Collection[str], profile: str = "") -> CommandParser:
    """Return the parser of ``pybk``, in which only the nouns with these names have their verbs.

    Args:
        names: The nouns.
        profile: The name of the profile that is used if the PATH of a cluster is left out; empty for none.
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
        help=f"{HELP_OF_PROFILE}; variable: {VARIABLE}",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    fill(parser, _ROOT, names)
    return parser


def whole_parser() -> CommandParser:
    """Return the parser of ``pybk`` with all nouns and verbs."""
    return parser_of([noun.name for noun in NOUNS])


def _epilog() -> str:
    older = ", ".join(f"{name} ({' '.join(words)})" for name, words in ALIASES.items())
    statuses = "\n".join(f"{status:>4}  {text}" for status, text in EXIT_STATUSES.items())
    return f"older names:\n  {older}\n\nexit status:\n{statuses}\n\nenvironment:\n{_ENVIRONMENT}"
