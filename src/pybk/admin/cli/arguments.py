"""The parser of commands, and the arguments that many of them share: PATH, ``--json``, and what PATH may be."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn

from pybk.admin.profiles import Profile
from pybk.credentials import CLUSTER_SECRET
from pybk.errors import MetadataForgedError, UsageError

STORE: Final = "the directory of the store"
CLUSTER: Final = "the metadata URL of a cluster: zk://host:port/path, lmdb:///path"
STORE_OR_CLUSTER: Final = (
    "the directory of a store, or the metadata URL of a cluster: zk://host:port/path, lmdb:///path"
)
CLUSTER_OR_EXPORT: Final = (
    "where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path; or a file of `pybk metadata "
    "export`"
)

_CLUSTERS: Final = (CLUSTER, STORE_OR_CLUSTER, CLUSTER_OR_EXPORT)
"""What PATH is where a profile may stand for it."""

_WRONG_USAGE: Final = 2


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and that knows the parsers of its verbs.

    Abbreviations are refused: ``--cluster-secret SECRET`` would be read as ``--cluster-secret-file``, and the error
    about the file that is missing would print the secret.

    Attributes:
        profile: The name of the profile that stands for PATH where a command over clusters is given none; empty for
            none.
    """

    def __init__(self, *arguments: Any, profile: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})
        self.profile: Final = profile
        self._verbs: Any = None

    def add_subparsers(self, **settings: Any) -> Any:
        """Have it take verbs; returns what adds their parsers."""
        made = partial(type(self), profile=self.profile)
        self._verbs = super().add_subparsers(**{"required": True, "metavar": "VERB", "parser_class": made, **settings})
        return self._verbs

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, after the PATH of the profile is put in where it is left out."""
        if self.profile and args is not None and not self._names_path(args):
            try:
                profile = Profile.read(self.profile)
            except UsageError as error:
                self.error(str(error))
            self.set_defaults(cluster_secret_file=profile.secret_file or None)
            args = [profile.metadata, *args]
        if self._verbs is not None:
            return super().parse_known_args(args, namespace)
        if any(each.partition("=")[0] == "--profile" for each in args or ()):
            self.error("--profile NAME stands before the command: pybk --profile NAME ...")
        found, left = super().parse_known_args(args, namespace)
        if left:  # the parser above would name itself, whose usage does not help
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found, left

    def _names_path(self, words: Sequence[str]) -> bool:
        """Return whether a command is given its PATH, or takes none that a profile could stand for."""
        path_help = self.get_default("path_help")
        if path_help not in _CLUSTERS or any(each in ("-h", "--help") for each in words):
            return True
        if any(each.startswith(("zk://", "lmdb://")) for each in words):
            return True
        given = self._positional(words)
        if path_help == CLUSTER_OR_EXPORT:
            return bool(given)
        needed = sum(each.nargs in (None, "+") for each in self._get_positional_actions())
        if path_help == CLUSTER or not given or len(given) < needed:  # the TARGET of a backup is a directory, too
            return False
        return given[0].startswith(("/", ".")) or os.path.isdir(given[0])

    def _positional(self, words: Sequence[str]) -> list[str]:
        """Return the words that are neither options nor their values."""
        found, is_value = [], False
        for word in words:
            if is_value:
                is_value = False
            elif word.startswith("-"):
                option = self._option_string_actions.get(word)
                is_value = option is not None and option.nargs is None
            else:
                found.append(word)
        return found

    @property
    def verbs(self) -> dict[str, CommandParser]:
        """The parsers of its verbs by name; none for a command without verbs."""
        return {} if self._verbs is None else dict(self._verbs.choices)

    def commands(self, *words: str) -> Iterator[tuple[tuple[str, ...], CommandParser]]:
        """Yield the words of each command below this one, and its parser; itself if it has no verbs."""
        if self._verbs is None:
            yield words, self
        for name, verb in self.verbs.items():
            yield from verb.commands(*words, name)

    def error(self, message: str) -> NoReturn:
        """End the process with what is wrong, and where the usage is shown, in one line."""
        over_clusters = self.get_default("path_help") in _CLUSTERS
        if over_clusters and not self.profile and "arguments are required" in message:
            message += "; the first one is PATH, unless `pybk --profile NAME` or PYBK_PROFILE names the cluster"
        self.exit(_WRONG_USAGE, f"{self.prog}: {' '.join(message.split())}; see the usage: {self.prog} --help\n")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, path: str = STORE
) -> CommandParser:
    """Add a command that takes PATH and the options that all commands take, and return its parser.

    Args:
        commands: Where: what ``CommandParser.add_subparsers`` returned.
        name: The command's name.
        run: Runs it and returns the exit status.
        text: What it does, for ``--help``.
        path: What PATH is, for ``--help``.
    """
    command: CommandParser = commands.add_parser(name, help=text, description=text)
    takes_path(command, run, path)
    return command


def takes_path(command: CommandParser, run: Callable[[argparse.Namespace], int], path: str = STORE) -> None:
    """Have a command take PATH and the options that all commands take; arguments as for ``add_command``."""
    command.add_argument("path", metavar="PATH", help=path)
    takes_output(command)
    command.set_defaults(run=run, path_help=path)


def takes_output(command: argparse.ArgumentParser) -> None:
    """Add the options that all commands take: of what they print, and how long they may take."""
    group = command.add_argument_group("options of all commands")
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--quiet", action="store_true", help="print no progress and no notes")
    group.add_argument(
        "--progress",
        choices=("auto", "json", "none"),
        default="auto",
        help="of what takes longer than a second, on the standard error: a bar on a terminal, or lines of JSON",
    )
    group.add_argument(
        "--timeout",
        type=seconds_of,
        metavar="TIME",
        help="end with status 4 after that time, such as 30s; what was begun may have taken effect",
    )


def takes_confirmation(command: argparse.ArgumentParser, dry_run: str) -> None:
    """Add ``--yes`` and ``--dry-run`` to a command that destroys something.

    Args:
        command: The command.
        dry_run: What ``--dry-run`` shows, for ``--help``.
    """
    command.add_argument(
        "--yes", action="store_true", help="do it without a question, which is asked on terminals alone"
    )
    command.add_argument("--dry-run", action="store_true", help=f"{dry_run}, and change nothing")


def takes_watch(command: argparse.ArgumentParser) -> None:
    """Add ``--watch`` to a command that looks at something."""
    command.add_argument(
        "--watch",
        nargs="?",
        type=seconds_of,
        const=2.0,
        metavar="TIME",
        help="look again and again, each 2 s or the given time, until Ctrl-C",
    )


def check_path(parsed: argparse.Namespace) -> None:
    """Raise UsageError if PATH is a file, of whatever command."""
    path = getattr(parsed, "path", None)
    if path is None or getattr(parsed, "path_may_be_file", False):
        return
    if not is_url(path) and os.path.exists(path) and not os.path.isdir(path):
        raise UsageError(f"{path} is a file; PATH takes {parsed.path_help}")


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


def seconds_of(text: str) -> float:
    """Return the seconds that a text such as ``90``, ``30s``, ``10m``, ``2h`` or ``1d`` names."""
    unit = _UNITS.get(text[-1:])
    try:
        found = float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r:.50} is no time; it takes 90, 30s, 10m, 2h or 1d")
    return found


def whole_number(text: str) -> int:
    """Return the number that a text names, from 0 to 2**63 - 1."""
    number = int(text) if text.isdecimal() and text.isascii() and len(text) <= _DIGITS_MAX else -1
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is not a number; it takes a whole number from 0 to 2**63 - 1")
    return number


_DIGITS_MAX: Final = 19
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
