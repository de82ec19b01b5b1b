"""The command ``pybk`` as it is installed: says its version at once, and imports everything else for other commands."""

from __future__ import annotations

import sys

from pybk.deferral import LateModule
from pybk.ledger.native import CORE
from pybk.version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.admin import cli
else:
    cli = LateModule("pybk.admin.cli")

VERSION = f"pybk {__version__}, {'in pure Python' if CORE is None else 'with the native core'}"
"""What ``pybk --version`` prints."""


def main() -> int:
    """Run the command of this process's command line and return its exit status."""
    if sys.argv[1:] == ["--version"]:
        print(VERSION)
        return 0
    return cli.main()
