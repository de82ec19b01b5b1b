"""Listing the files of a store or a bookie that is at work: a file may go between its listing and its use."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def files_below(path: Path) -> Iterator[Path]:
    """Yield the files below a directory; directories that go meanwhile are skipped."""
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names)


def contents_below(path: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield each file below a directory with its content; files that go meanwhile are skipped."""
    for file in files_below(path):
        with suppress(FileNotFoundError):
            yield file, file.read_bytes()


def copy_below(source: Path, target: Path) -> None:
    """Copy a directory and everything below it; files that go meanwhile are skipped."""

    def copy(file: str, place: str) -> None:
        with suppress(FileNotFoundError):
            shutil.copy2(file, place)

    shutil.copytree(source, target, copy_function=copy)


def disk_usage(path: Path) -> int:
    """Return the bytes that everything below a directory takes on disk; files that go meanwhile count nothing."""
    taken = 0
    for file in files_below(path):
        with suppress(FileNotFoundError):
            taken += file.stat().st_blocks * 512
    return taken
