"""The arguments of commands in words, from their parsers; without Sphinx, so that a test can use it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Final

COMMON: Final = "options of all commands"
"""The title of the group of options that all commands have."""


def groups_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield the arguments of a command by the title of their group, without ``--help``."""
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if not isinstance(each, argparse._HelpAction)]
        actions = [each for each in actions if each.help is not argparse.SUPPRESS]
        if actions:
            yield str(group.title), actions


def signature_of(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    formatter = argparse.HelpFormatter("")
    if not action.option_strings:
        return formatter._format_args(action, action.metavar or action.dest.upper())  # type: ignore[arg-type]
    value = "" if action.nargs == 0 else formatter._format_args(action, _metavar(action))
    return ", ".join(f"{name} {value}".rstrip() for name in action.option_strings)


def _metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return str(action.metavar)
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def help_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return what an argument does, with its default."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def synopsis_of(parser: argparse.ArgumentParser) -> str:
    """Return the usage of a command."""
    os.environ["COLUMNS"] = "96"
    return parser.format_usage().removeprefix("usage: ").strip().replace("\n" + " " * len("usage: "), "\n")


def escaped(text: str) -> str:
    """Return a text whose characters mean nothing to Markdown, but for code."""
    return "".join(f"\\{each}" if each in "*_<>[]$|" else each for each in text)
