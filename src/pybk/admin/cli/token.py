"""The command ``pybk token``: makes a token for the interface over HTTP."""

from __future__ import annotations

import argparse

from pybk.admin.cli.arguments import CommandParser, takes_output
from pybk.admin.cli.output import SOUND, print_json


def add(parser: CommandParser) -> None:
    """Add the arguments of ``pybk token``."""
    parser.add_argument("name", metavar="NAME", help="whose it is, for the log")
    parser.add_argument(
        "--scope",
        choices=("read", "operate", "admin"),
        default="read",
        help="read: to look; operate: also what can be taken back, such as pauses and drains; admin: everything",
    )
    parser.add_argument(
        "--file", required=True, metavar="FILE", help="the file of tokens that it is added to; SIGHUP has it read again"
    )
    takes_output(parser)
    parser.set_defaults(run=_make)


def _make(parsed: argparse.Namespace) -> int:
    from pybk.admin.http.tokens import Scope, Token, add_token

    kept, text = Token.new(parsed.name, Scope[parsed.scope.upper()])
    add_token(parsed.file, kept)
    if parsed.json:
        print_json({"name": kept.name, "scope": parsed.scope, "token": text})
    else:
        print(text)  # once: the file has its SHA-256 alone
    return SOUND
