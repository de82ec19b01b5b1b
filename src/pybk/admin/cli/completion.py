"""The command ``pybk completion``: prints the completion for a shell, which works without running Python."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Final

from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import SOUND
from pybk.admin.command import completion_of


def _of(shell: str) -> Callable[[argparse.Namespace], int]:
    """Return what prints the script of a shell."""

    def run(_: argparse.Namespace) -> int:
        print(completion_of(shell), end="")
        return SOUND

    return run


VERBS: Final[Verbs] = {"bash": _of("bash"), "zsh": _of("zsh")}
"""The shells of ``pybk completion``."""
