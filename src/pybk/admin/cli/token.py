"""The command ``pybk token``: makes a token for the interface over HTTP."""

from __future__ import annotations

import argparse
from typing import Final

from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import print_result
from pybk.admin.http.tokens import Scope, Token, add_token


def _make(parsed: argparse.Namespace) -> int:
    kept, text = Token.new(parsed.name, Scope[parsed.scope.upper()])
    add_token(parsed.file, kept)
    return print_result(parsed, {"name": kept.name, "scope": parsed.scope, "token": text}, text)


VERBS: Final[Verbs] = {"": _make}
"""``pybk token``, which has no verbs."""
