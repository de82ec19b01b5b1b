"""Tokens: what a person or a program may do over HTTP.

A file has one token a line: ``NAME SCOPE SHA256``, the last as 64 hexadecimal digits. The token itself is random, 256
bits, and is nowhere but with the person who uses it, so reading the file gives nobody a right. Several tokens may be
valid, so that one is replaced by another without a gap.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable
from typing import Final, NamedTuple

from pybk.admin.http.routes import Scope
from pybk.errors import UsageError

TOKEN_BYTES: Final = 32
_LINE: Final = re.compile(r"(\S+)\s+(\S+)\s+([0-9a-f]{64})")
_FILE_BYTES_MAX: Final = 1 << 20


class Token(NamedTuple):
    """A token that is valid.

    Attributes:
        name: Whose it is, for the log.
        scope: What it allows.
        digest: SHA-256 of it.
    """

    name: str
    scope: Scope
    digest: bytes

    @classmethod
    def new(cls, name: str, scope: Scope) -> tuple[Token, str]:
        """Make a token; return what is kept of it, and itself.

        Raises:
            UsageError: The name has spaces, or none of its characters.
        """
        if not re.fullmatch(r"[^\s#]\S{0,99}", name):
            raise UsageError(f"name of a token {name!r:.120}: 1 to 100 characters without spaces are needed")
        text = secrets.token_urlsafe(TOKEN_BYTES)
        return cls(name, scope, hashlib.sha256(text.encode()).digest()), text

    def line(self) -> str:
        """Return the line of a file for it."""
        return f"{self.name} {self.scope.name.lower()} {self.digest.hex()}\n"


def read_tokens(path: str | os.PathLike[str]) -> tuple[Token, ...]:
    """Read the tokens of a file. Empty lines and those that begin with ``#`` are left out.

    Raises:
        UsageError: The file cannot be read, every user may change it, or a line is not a token.
    """
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(_FILE_BYTES_MAX)
    except (OSError, ValueError) as error:
        raise UsageError(f"the file of tokens {os.fspath(path)!r} cannot be read: {error}") from error
    if mode & stat.S_IWOTH:
        raise UsageError(
            f"the mode {mode:04o} of the file of tokens {os.fspath(path)!r} lets every user of this host add a token: "
            "chmod o-w"
        )
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return tuple(_token(path, number, line) for number, line in lines if line and not line.startswith("#"))


def _token(path: str | os.PathLike[str], number: int, line: str) -> Token:
    found = _LINE.fullmatch(line)
    scope = None if found is None else Scope.__members__.get(found[2].upper())
    if found is None or scope is None:
        scopes = ", ".join(each.name.lower() for each in Scope)
        raise UsageError(
            f"{os.fspath(path)}, line {number}, is no token: NAME SCOPE SHA256 is needed; scopes are {scopes}"
        )
    return Token(found[1], scope, bytes.fromhex(found[3]))


def find_token(tokens: Iterable[Token], text: str) -> Token | None:
    """Return the valid token with a text, in constant time for each; None if there is none."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    found = None
    for each in tokens:
        if hmac.compare_digest(each.digest, digest):
            found = each
    return found
