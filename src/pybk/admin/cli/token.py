"""The command ``pybk token``: makes a token for the interface over HTTP."""

from __future__ import annotations

import argparse
from typing import Final

from pybk.admin.cli.arguments import Verbs
from pybk.admin.cli.output import SOUND, print_json


def _make(parsed: argparse.Namespace) -> int:
    from pybk.admin.http.tokens import Scope, Token, add_token

    kept, text = Token.new(parsed.name, Scope[parsed.scope.upper()])
    add_token(parsed.file, kept)
    if parsed.json:
        print_json({"name": kept.name, "scope": parsed.scope, "token": text})
    else:
        print(text)  # once: the file has its SHA-256 alone
    return SOUND


VERBS: Final[Verbs] = {"": _make}
"""``pybk token``, which has no verbs."""
