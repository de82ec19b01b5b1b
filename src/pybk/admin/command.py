"""The installed command ``pybk``: prints version and completion at once, and imports all other commands late."""

from __future__ import annotations

import os
import sys

from pybk.admin import VERSION
from pybk.deferral import LateModule

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.admin import cli
else:
    cli = LateModule("pybk.admin.cli")


def main() -> int:
    """Run the command of this process's command line and return its exit status."""
    if sys.argv[1:] == ["--version"]:
        print(VERSION)
        return 0
    if sys.argv[1:] in (["completion", "bash"], ["completion", "zsh"]):
        print(completion_of(sys.argv[2]), end="")
        return 0
    return cli.main()


def completion_of(shell: str) -> str:
    """Return the completion of pybk's commands for a shell, which ``tools/completion`` has made."""
    with open(os.path.join(os.path.dirname(__file__), "completion", shell), encoding="utf-8") as file:
        return file.read()
