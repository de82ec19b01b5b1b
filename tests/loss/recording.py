"""Runs a program with the recorder loaded, and reads what it recorded."""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest import mock
from zlib import crc32

from pybk.storage.io.filesystem import OsFileSystem
from tests.paths import ROOT
from tests.storage.real_store import python_path

_SOURCE: Final = Path(__file__).with_name("recorder.c")
_HEADER: Final = struct.Struct("<2I6Q2I")
_PACKAGE: Final = f"{ROOT / 'src' / 'pybk'}{os.sep}"
_SEAM: Final = "storage/io/"
"""Where files are written for others: the site of a sync names the caller, too."""


class Kind(enum.IntEnum):
    """What was done; ``recorder.c`` says which fields each has."""

    CREATE = 1
    WRITE = 2
    ZEROS = 3
    RESIZE = 4
    ALLOCATE = 5
    SYNC = 6
    RENAME = 7
    LINK = 8
    UNLINK = 9
    MODE = 10
    STORED = 11
    MARK = 12
    SYMLINK = 13


@dataclass(frozen=True, slots=True)
class Record:
    """One call, or one mark of the workload."""

    kind: Kind
    extra: int
    inode: int
    parent: int
    other: int
    offset: int
    size: int
    name: str
    site: str
    data: bytes

    def encode(self) -> bytes:
        """Return it as the recorder writes it."""
        name, site = self.name.encode(), self.site.encode()
        sizes = (self.size, len(self.data), len(name), len(site))
        return _HEADER.pack(self.kind, self.extra, self.inode, self.parent, self.other, self.offset, *sizes) + b"".join(
            (name, site, self.data)
        )

    @property
    def syncs(self) -> bool:
        """Whether something is durable when it returns."""
        return self.kind is Kind.SYNC or (self.kind in (Kind.WRITE, Kind.ZEROS) and bool(self.extra))

    @property
    def call(self) -> str:
        """The system call of a sync, and the lines that lead to it."""
        name = ("fsync", "fdatasync")[self.extra] if self.kind is Kind.SYNC else "write"
        return f"{name} < {self.site}"


def why_not() -> str | None:
    """Return why nothing can be recorded here, or None."""
    if not sys.platform.startswith("linux"):
        return "the recorder is for Linux"
    if _compiler() is None:
        return "no C compiler (cc) is installed"
    return None


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@cache
def library() -> Path:
    """Compile the recorder unless that was done; return the path of the library."""
    compiler = _compiler()
    assert compiler is not None
    folder = ROOT / "build" / "loss"
    made = folder / f"recorder-{blake2b(_SOURCE.read_bytes(), digest_size=8).hexdigest()}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}")
        options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, "-o", str(new), str(_SOURCE), "-ldl", "-lpthread"], check=True)
        os.replace(new, made)
    return made


def record(arguments: Sequence[str], root: Path, log: Path, kill_after: int | None = None) -> None:
    """Run a Python program, whose arguments are given, and append what it does below ``root`` to ``log``.

    Args:
        arguments: Those of Python.
        root: What is recorded.
        log: The file of records.
        kill_after: The number of its records after which the program kills itself; it may end before.

    Raises:
        AssertionError: It failed; says its output.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "LD_PRELOAD": str(library()),
        "LOSS_ROOT": str(root),
        "LOSS_LOG": str(log),
    }
    if kill_after is not None:
        environment["LOSS_KILL_AFTER"] = str(kill_after)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    allowed = (0,) if kill_after is None else (0, -signal.SIGKILL)
    assert done.returncode in allowed, f"{arguments} ended with {done.returncode}:\n{done.stdout}"


def records(log: Path) -> list[Record]:
    """Return all records of a file."""
    return list(_parsed(log.read_bytes()))


def written(root: Path) -> list[Record]:
    """Return the records of a program that wrote a directory as it is, durably."""
    made = []
    for path in (root, *sorted(root.rglob("*"))):
        status = path.lstat()
        node = partial(Record, inode=status.st_ino, other=0, offset=0, site="")
        named = partial(node, parent=path.parent.stat().st_ino, name=path.name)
        if stat.S_ISLNK(status.st_mode):
            made.append(named(Kind.SYMLINK, extra=0, size=0, data=os.readlink(path).encode()))
            continue
        if path != root:
            made.append(named(Kind.CREATE, extra=status.st_mode, size=0, data=b""))
        if stat.S_ISREG(status.st_mode) and status.st_size:
            data = path.read_bytes()
            made.append(node(Kind.WRITE, extra=0, parent=0, size=len(data), name="", data=data))
        made.append(node(Kind.SYNC, extra=0, parent=0, size=0, name="", data=b""))
    # A directory was synced before it had names.
    return [*made, *(each for each in made if each.kind is Kind.SYNC)]


def _parsed(data: bytes) -> Iterator[Record]:
    at = 0
    while at < len(data):
        kind, extra, inode, parent, other, offset, size, data_bytes, names, sites = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        name, at = data[at : at + names].decode(), at + names
        site, at = data[at : at + sites].decode(), at + sites
        content, at = data[at : at + data_bytes], at + data_bytes
        yield Record(Kind(kind), extra, inode, parent, other, offset, size, name, site, content)


# ---- inside the process that is recorded -----------------------------------------------------------------------------

_SiteFunction: Final = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_int)


def mark(text: bytes) -> None:
    """Note in the record what was just acknowledged to the workload, or is about to begin."""
    ctypes.CDLL(None).loss_recorder_mark(text, ctypes.c_size_t(len(text)))


@contextmanager
def sites_named() -> Iterator[None]:
    """Have the recorder note which lines of pybk ask for each sync."""

    def site(text: Any, capacity: int) -> None:
        said = calling_lines(currentframe()).encode()[: capacity - 1] + b"\0"
        ctypes.memmove(text, said, len(said))

    function = _SiteFunction(site)
    recorder = ctypes.CDLL(None)
    recorder.loss_recorder_sites(function)
    try:
        yield
    finally:
        recorder.loss_recorder_sites(None)


@contextmanager
def inodes_kept() -> Iterator[None]:
    """Have pybk see the same inode number for a name before and after a cut, as on a disk; a cut makes new files."""

    def number(_: OsFileSystem, path: str) -> int:
        os.stat(path)
        return crc32(os.path.basename(path).encode())

    with mock.patch.object(OsFileSystem, "inode_number", number):
        yield


def calling_lines(frame: FrameType | None) -> str:
    """Return the lines of pybk that lead to a frame, the innermost first, as far as the first outside the seam."""
    lines = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            path = file.removeprefix(_PACKAGE)
            lines.append(f"{path}:{frame.f_lineno} {frame.f_code.co_name}")
            if not path.startswith(_SEAM):
                break
        frame = frame.f_back
    return " < ".join(lines) or "?"
