"""Tokens: the rights of a person or a program over HTTP.

A file has one token a line: ``NAME SCOPE SHA256``, the last as 64 hexadecimal digits. The token itself is random, 256
bits, and only its holder has it, so reading the file gives nobody a right. Several tokens may be valid, so one can be
replaced by another without a gap.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterable
from enum import IntEnum
from typing import BinaryIO, Final, NamedTuple

from pybk.errors import UsageError
from pybk.storage.io.failures import IrregularFileError
from pybk.storage.io.filesystem import OsFileSystem, open_regular

TOKEN_BYTES: Final = 32
_LINE: Final = re.compile(r"(\S+)\s+(\S+)\s+([0-9a-f]{64})")
_FILE_BYTES_MAX: Final = 1 << 20


class Scope(IntEnum):
    """The rights of a token; each includes all before it."""

    READ = 0
    """The right to look."""

    OPERATE = 1
    """The right to changes that can be undone, such as a pause or a drain."""

    ADMIN = 2
    """Everything."""


class Token(NamedTuple):
    """A token that is valid.

    Attributes:
        name: The name of its holder, for the log.
        scope: Its rights.
        digest: SHA-256 of it.
    """

    name: str
    scope: Scope
    digest: bytes

    @classmethod
    def new(cls, name: str, scope: Scope) -> tuple[Token, str]:
        """Make a token; return the entry for the file of tokens, and the token itself.

        Raises:
            UsageError: The name is empty, or has spaces.
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
        with open(open_regular(os.fspath(path)), "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = _text_of(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"the file of tokens {os.fspath(path)!r} cannot be read: {error}") from error
    if mode & stat.S_IWOTH:
        raise UsageError(
            f"the mode {mode:04o} of the file of tokens {os.fspath(path)!r} lets every user of this host add a token: "
            "chmod o-w"
        )
    return _tokens_in(path, text)


def _text_of(file: BinaryIO) -> str:
    """Return the text of a file of tokens.

    Raises:
        OSError: It is longer than such a file may be.
        ValueError: It is not UTF-8.
    """
    data = file.read(_FILE_BYTES_MAX + 1)
    if len(data) > _FILE_BYTES_MAX:
        raise OSError(errno.EFBIG, f"it has more than {_FILE_BYTES_MAX} bytes; remove the tokens that nobody needs")
    return data.decode()


def _tokens_in(path: str | os.PathLike[str], text: str) -> tuple[Token, ...]:
    """Return the tokens in the text of a file; raises UsageError for a line that is not one."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return tuple(_token(path, number, line) for number, line in lines if line and not line.startswith("#"))


def add_token(path: str, token: Token) -> None:
    """Add a token to a file, which is created if it is missing; durable on return. Threads and processes: any.

    The file is replaced by a new one with its mode and owner, so after a crash at any point it has its old or its new
    lines. Another process that adds a token meanwhile waits.

    Raises:
        UsageError: It exists and is not a file of tokens, such as a device, which would be replaced.
        OSError: The file cannot be read, replaced, or given its owner; it has its old lines.
    """
    path = os.path.realpath(path)  # a link stays
    while True:
        with open(_opened(path), "rb") as old:
            fcntl.flock(old, fcntl.LOCK_EX)
            before = os.fstat(old.fileno())
            if not os.path.samestat(before, os.stat(path)):
                continue  # another process replaced it before this one got the lock
            lines = _lines_of(path, old)
            if lines and not lines.endswith("\n"):
                lines += "\n"  # an editor left out the end of the last line
            _replace(path, (lines + token.line()).encode(), before)
            return


def _opened(path: str) -> int:
    """Open a file of tokens to add one to it, or make it; return its descriptor."""
    try:
        return open_regular(path, os.O_RDONLY | os.O_CREAT)
    except IrregularFileError as error:
        raise UsageError(f"{path} cannot hold tokens: it is {error.strerror}, or a new one") from error


def _lines_of(path: str, file: BinaryIO) -> str:
    """Return the lines of a file that a token is added to, so that no file of another kind gets one."""
    try:
        lines = _text_of(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot get another token: {error}") from error
    _tokens_in(path, lines)
    return lines


def _replace(path: str, data: bytes, before: os.stat_result) -> None:
    """Make ``data`` a file's whole content, durably, and keep the mode and owner that it had before."""
    temporary = f"{path}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(open_regular(temporary, flags, remedy="remove it"), "wb") as new:
        if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.fchown(new.fileno(), before.st_uid, before.st_gid)
        os.fchmod(new.fileno(), stat.S_IMODE(before.st_mode))
        new.write(data)
        new.flush()
        os.fsync(new.fileno())
    os.rename(temporary, path)
    OsFileSystem().sync_directory(os.path.dirname(path))


def _token(path: str | os.PathLike[str], number: int, line: str) -> Token:
    found = _LINE.fullmatch(line)
    scope = None if found is None else Scope.__members__.get(found[2].upper())
    if found is None or scope is None:
        scopes = ", ".join(each.name.lower() for each in Scope)
        raise UsageError(
            f"{os.fspath(path)}, line {number}, is not a token: NAME SCOPE SHA256 is needed; scopes are {scopes}"
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
