"""The command ``pybk completion``: prints what completes the commands of pybk in a shell, without running Python."""

from __future__ import annotations

import argparse
from typing import Final

from pybk.admin.cli.arguments import CommandParser
from pybk.admin.cli.output import SOUND

_SHELLS: Final = {
    "bash": "pybk completion bash > ~/.local/share/bash-completion/completions/pybk",
    "zsh": "pybk completion zsh > DIRECTORY/_pybk, for a DIRECTORY of $fpath",
}


def add(parser: CommandParser) -> None:
    """Add the shells of ``pybk completion``."""
    shells = parser.add_subparsers(metavar="SHELL")
    for shell, use in _SHELLS.items():
        text = f"print the completion for {shell}; use: {use}"
        command: CommandParser = shells.add_parser(shell, help=text, description=text)
        command.set_defaults(run=_print, shell=shell)


def _print(parsed: argparse.Namespace) -> int:
    from shtab import complete

    from pybk.admin.cli import whole_parser

    print(complete(whole_parser(), parsed.shell))
    return SOUND
