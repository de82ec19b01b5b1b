"""The input of the demonstration: the lines of files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from pybk.errors import UsageError

CHUNK_LINES: Final = 1024
SMALL_CHUNK_LINES: Final = 32
SMALL_BYTES: Final = 4 << 20
LINE_BYTES_MAX: Final = 1 << 20
_NOT_OURS: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class Source:
    """Files whose lines are written, in a fixed order.

    Attributes:
        files: The paths of the files.
        file_bytes: Their total size.
    """

    files: tuple[str, ...]
    file_bytes: int

    @classmethod
    def of(cls, path: str | None) -> Source:
        """Return a source of one file, of all files below a folder, or, for None, of the standard library's code.

        Raises:
            UsageError: The files are missing or empty.
        """
        if path is None:
            found = [name for name in _files_below(sysconfig.get_path("stdlib")) if name.endswith(".py")]
        elif os.path.isfile(path):
            found = [path]
        else:
            found = list(_files_below(path))
        total = sum(os.path.getsize(name) for name in found)
        if not total:
            raise UsageError(
                f"{path or 'the standard library'} is not a file or folder with content; name another one: INPUT=path"
            )
        return cls(tuple(found), total)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of all files, with their line ends; a line longer than 1 MiB comes in pieces of 1 MiB."""
        for name in self.files:
            with open(name, "rb") as file:
                while line := file.readline(LINE_BYTES_MAX):
                    yield line

    def chunks(self, ledgers: int, ledger: int) -> Iterator[list[bytes]]:
        """Yield the chunks of one of several ledgers, to which all chunks are dealt in turn."""
        for number, chunk in enumerate(self.dealt()):
            if number % ledgers == ledger:
                yield chunk

    def dealt(self) -> Iterator[list[bytes]]:
        """Yield all lines in chunks of 1024, or of 32 if the input is small, because each ledger has to get some."""
        lines = self.lines()
        size = CHUNK_LINES if self.file_bytes >= SMALL_BYTES else SMALL_CHUNK_LINES
        while chunk := list(islice(lines, size)):
            yield chunk

    def repeated(self) -> Iterator[list[bytes]]:
        """Yield the chunks of ``dealt`` again and again, without end."""
        while True:
            yield from self.dealt()


def _files_below(path: str) -> Iterator[str]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - _NOT_OURS)
        for name in sorted(names):
            full = os.path.join(folder, name)
            if os.path.isfile(full) and not os.path.islink(full):
                yield full
