"""The arguments of a bookie as a service, which ``pybk bookie`` and ``pybk config show`` take alike."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from pybk.admin.bookie_options import OPTIONS, resolved
from pybk.admin.cli.arguments import CommandParser
from pybk.admin.options import Setting, add_flags, read_file

DIRECTORY: Final = "the bookie's directory; ./list for one that is called like a verb"


def add_service(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> CommandParser:
    """Add a command that takes all options of a bookie.

    Args:
        commands: Where: what ``CommandParser.add_subparsers`` returned.
        name: The command's name.
        run: Runs it and returns the exit status.
        text: What it does, for ``--help``.
    """
    command: CommandParser = commands.add_parser(name, help=text, description=text)
    command.add_argument("path", metavar="PATH", nargs="?", default="", help=DIRECTORY)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument(
        "--config", metavar="FILE", help="TOML file of options; flags and variables come before what it says"
    )
    add_flags(command, OPTIONS)
    command.set_defaults(run=run, path_help=DIRECTORY, parser=command)
    return command


def settings_given(parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """Return the value of each option of a bookie, and where it comes from: flag, environment, file or default.

    Raises:
        UsageError: The file or the environment has a wrong name or value.
    """
    names = {option.name for option in OPTIONS}
    flags = {name: value for name, value in vars(parsed).items() if name in names}
    if parsed.path:
        flags["bookie.directory"] = parsed.path
    file = None if parsed.config is None else read_file(parsed.config, OPTIONS)
    return resolved(flags, environment, file)
