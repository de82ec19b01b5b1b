"""The parser of commands, made from the table of options, and the checks of PATH."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial
from importlib import import_module
from typing import Any, Final, NoReturn

from pybk.admin.cli.argparse_rows import add_rows
from pybk.admin.profiles import Profile
from pybk.credentials import CLUSTER_SECRET
from pybk.errors import MetadataForgedError, UsageError
from pybk.metadata.store import without_secrets
from pybk.options.rows import THE_TABLE, Command

CLUSTER: Final = THE_TABLE.rows("cluster")[0].help
"""The meaning of PATH where it is the URL of a cluster."""

Verbs = Mapping[str, Callable[[argparse.Namespace], int]]
"""The functions of a noun's commands by the words after the noun; each returns the exit status."""

_OF_PROFILES: Final = ("cluster", "either", "export")
"""The kinds of PATH for which a profile may stand."""

_WRONG_USAGE: Final = 2
NEAR: Final = 0.7
"""The least likeness of two words, by difflib, at which one counts as the other, misspelt."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and that knows the parsers of its verbs.

    Abbreviations are refused: ``--cluster-secret SECRET`` would be read as ``--cluster-secret-file``, and the error
    about the file that is missing would print the secret.

    Attributes:
        profile: The name of the profile that is used if a command over clusters gets no PATH; empty for none.
    """

    def __init__(self, *arguments: Any, profile: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **settings})
        self.profile: Final = profile
        self._verbs: Any = None

    def add_subparsers(self, **settings: Any) -> Any:
        """Make the parser take verbs; return the object that adds their parsers."""
        made = partial(type(self), profile=self.profile)
        self._verbs = super().add_subparsers(**{"required": True, "metavar": "VERB", "parser_class": made, **settings})
        return self._verbs

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; if PATH is left out, insert that of the profile first."""
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
            near = get_close_matches(left[0].partition("=")[0], self._option_string_actions, 1, NEAR)
            self.error(f"unrecognized arguments: {' '.join(left)}{f'; did you mean {near[0]}?' if near else ''}")
        return found, left

    def _names_path(self, words: Sequence[str]) -> bool:
        """Return whether a command is given its PATH, or takes none that a profile could stand for."""
        kind = self.get_default("path_kind")
        if kind not in _OF_PROFILES or any(each in ("-h", "--help") for each in words):
            return True
        if any(each.startswith(("zk://", "lmdb://")) for each in words):
            return True
        given = self._positional(words)
        if kind == "export":
            return bool(given)
        needed = sum(each.nargs in (None, "+") for each in self._get_positional_actions())
        if kind == "cluster" or not given or len(given) < needed:  # the TARGET of a backup is a directory, too
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
        """End the process with one line: the error, and the command that shows the usage."""
        over_clusters = self.get_default("path_kind") in _OF_PROFILES
        if over_clusters and not self.profile and "arguments are required" in message:
            message += "; the first one is PATH, unless `pybk --profile NAME` or PYBK_PROFILE names the cluster"
        said = " ".join(without_secrets(message).split())
        self.exit(_WRONG_USAGE, f"{self.prog}: {said}; see the usage: {self.prog} --help\n")


# ---- the parser of the table ---------------------------------------------------------------------------------------


def fill(parser: CommandParser, command: Command, nouns: Collection[str] | None = None) -> None:
    """Add to a parser the verbs of a command, or its arguments; raises KeyError for a kind that does not exist.

    Args:
        parser: The parser.
        command: The command.
        nouns: The nouns whose verbs are added; None for all.
    """
    verbs = THE_TABLE.verbs(*command.words)
    if verbs:
        added = parser.add_subparsers(metavar=command.verbs_name)
        for each in verbs:
            made = added.add_parser(each.name, help=each.text, description=each.description)
            if nouns is None or each.name in nouns:
                fill(made, each)
        return
    add_rows(parser, command.rows)
    path = next((row for row in command.rows if row.metavar == "PATH" and not row.flags and not row.section), None)
    kinds = {} if path is None else {"path_help": path.help, "path_kind": path.kind, "path_default": path.default}
    parser.set_defaults(run=_run_of(command.words), profile=parser.profile, parser=parser, **kinds)


@cache
def _run_of(words: tuple[str, ...]) -> Callable[[argparse.Namespace], int]:
    """Return the function that runs a command: the one that ``VERBS`` of its noun's module names."""

    def run(parsed: argparse.Namespace) -> int:
        verbs = import_module(f"pybk.admin.cli.{words[0]}").VERBS
        status: int = verbs[" ".join(words[1:])](parsed)
        return status

    return run


# ---- PATH ----------------------------------------------------------------------------------------------------------


def check_path(parsed: argparse.Namespace) -> None:
    """Raise UsageError if PATH is empty, or a file, of whatever command."""
    path: str | None = getattr(parsed, "path", None)
    if path == "" and getattr(parsed, "path_default", None) is None:
        raise UsageError(f"PATH is empty; it takes {getattr(parsed, 'path_help', 'the name of a file')}")
    if path is None or getattr(parsed, "path_kind", "export") == "export":  # of those, PATH may be a file
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
    """Add the ways to give a secret to the error of a missing or wrong cluster secret."""
    try:
        yield
    except MetadataForgedError as error:
        raise MetadataForgedError(f"{error}: --cluster-secret-file FILE or {CLUSTER_SECRET}") from error
