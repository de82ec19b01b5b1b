"""A disk, as POSIX promises it: what was recorded is durable once it was synced, and nothing else is.

Theory of operation. :class:`Disk` replays records. A file has its durable bytes, and the changes since its last sync; a
directory has its durable names, and the changes of names since its own last sync. A sync makes all changes of one file,
or of one directory, durable: that of a file does not name it, and that of a directory does not write its files. A write
with O_DSYNC or RWF_DSYNC is durable with what is needed to read it, which is the size; earlier writes are not, so it
stays among the changes, as one that is always kept.

A loss of power keeps any of the changes: each write, sector by sector, each change of a size, and each change of a name
may be there or not, whatever came before it. Two things are assumed of the file system, as all with a journal have
them: a rename is atomic, also between directories (it is durable once the new directory was synced), and bytes that
were never written are zeros. Files that no durable name leads to are gone.
"""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from tests.loss.recording import Kind, Record

SECTOR_BYTES: Final = 512
_PIECE_BYTES: Final = 1 << 16
_NO_BYTES: Final = bytes(_PIECE_BYTES)


class Loss(enum.Enum):
    """Which changes that were not synced a loss of power keeps."""

    ALL = "none"
    NOTHING = "all"
    DATA = "names, and sizes of half the files"
    NAMES = "the data of files"
    LATEST = "those before a moment"
    EARLIEST = "those after a moment"
    ONE = "all but one"
    NODE = "all but those of one file or directory"
    WHOLE = "those of half the files and directories"
    EACH = "each or not, sector by sector"


@dataclass(slots=True)
class _Change:
    """A change of a file's bytes, its size, or both."""

    number: int
    offset: int
    data: bytes | None
    zeros: int
    size: int | None
    """The size from then on, if the change is of it."""
    durable: bool = False

    @property
    def end(self) -> int:
        return self.offset + (self.zeros if self.data is None else len(self.data))


@dataclass(slots=True)
class _NameChange:
    """Names that one call changed: what each directory and name leads to from then on; None for nothing."""

    number: int
    names: tuple[tuple[_Directory, str, _Node | None], ...]
    settles: _Directory
    """Whose sync makes it durable."""


@dataclass(slots=True, eq=False)
class _Node:
    mode: int


@dataclass(slots=True, eq=False)
class _File(_Node):
    durable: bytearray = field(default_factory=bytearray)
    changes: list[_Change] = field(default_factory=list)
    size: int = 0

    def sync(self) -> None:
        for change in self.changes:
            _write(self.durable, change, None)
            if change.size is not None:
                _resize(self.durable, change.size)
        self.changes.clear()


@dataclass(slots=True, eq=False)
class _Directory(_Node):
    durable: dict[str, _Node] = field(default_factory=dict)
    changes: list[_NameChange] = field(default_factory=list)
    now: dict[str, _Node] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Symlink(_Node):
    target: str = ""


def _write(content: bytearray, change: _Change, keep: Callable[[int], bool] | None) -> None:
    """Write the bytes of a change; with ``keep``, those sectors alone that it takes."""
    data = bytes(change.zeros) if change.data is None else change.data
    if data and change.end > len(content):
        content.extend(bytes(change.end - len(content)))
    if keep is None:
        content[change.offset : change.end] = data
        return
    at = change.offset
    while at < change.end:
        end = min(change.end, at - at % SECTOR_BYTES + SECTOR_BYTES)
        if keep(at // SECTOR_BYTES):
            content[at:end] = data[at - change.offset : end - change.offset]
        at = end


def _resize(content: bytearray, size: int) -> None:
    del content[size:]
    content.extend(bytes(size - len(content)))


class Disk:
    """What the records so far left on a disk.

    Args:
        root: The number of the directory that all others are below.
        skip: Whether a sync, given its record, is left out.
    """

    def __init__(self, root: int, skip: Callable[[Record], bool] = lambda record: False) -> None:
        self._root = _Directory(stat.S_IFDIR | 0o700)
        self._nodes: dict[int, _Node] = {root: self._root}
        self._skip = skip
        self._number = 0
        self._named: list[_NameChange] = []

    def apply(self, record: Record) -> None:
        """Carry out a record."""
        self._number += 1
        match record.kind:
            case Kind.MARK:
                pass
            case Kind.SYNC:
                if not self._skip(record):
                    self._sync(self._nodes[record.inode])
            case Kind.MODE:
                self._nodes[record.inode].mode = record.extra
            case Kind.CREATE | Kind.LINK | Kind.UNLINK | Kind.RENAME | Kind.SYMLINK:
                self._change_names(record)
            case _:
                self._change_file(record)

    def _change_file(self, record: Record) -> None:
        file = self._nodes[record.inode]
        assert isinstance(file, _File)
        durable = record.syncs and not self._skip(record)
        offset, data, zeros, size = record.offset, None, 0, None
        if record.kind in (Kind.WRITE, Kind.STORED):
            data = record.data
        elif record.kind is Kind.ZEROS:
            zeros = record.size
        elif record.kind is Kind.RESIZE:
            size = record.size
        end = offset + (record.size if record.kind is Kind.ALLOCATE else len(data or b"") + zeros)
        if size is None and end > file.size:
            size = end
        if size is not None:
            file.size = size
        change = _Change(self._number, offset if record.kind is not Kind.ALLOCATE else 0, data, zeros, size, durable)
        if durable and all(each.durable for each in file.changes):
            file.changes.append(change)
            file.sync()
        else:
            file.changes.append(change)

    def _sync(self, node: _Node) -> None:
        if isinstance(node, _File):
            node.sync()
        elif isinstance(node, _Directory):
            for change in list(node.changes):
                if change.settles is node:
                    self._settle(change)

    def _settle(self, change: _NameChange) -> None:
        """Make a change of names durable; earlier ones of the same names are, with it."""
        for directory, name, node in change.names:
            for earlier in [each for each in directory.changes if each.number < change.number]:
                if any(of is directory and named == name for of, named, _ in earlier.names):
                    self._settle(earlier)
            if node is None:
                directory.durable.pop(name, None)
            else:
                directory.durable[name] = node
        for directory, _, _ in change.names:
            if change in directory.changes:
                directory.changes.remove(change)
        if change in self._named:
            self._named.remove(change)

    def _change_names(self, record: Record) -> None:
        parent = self._directory(record.parent)
        names: tuple[tuple[_Directory, str, _Node | None], ...]
        settles = parent
        if record.kind is Kind.RENAME:
            old, new = record.name.split("/")
            settles = self._directory(record.other)
            node = parent.now[old]
            names = ((parent, old, settles.now[new] if record.extra else None), (settles, new, node))
        elif record.kind is Kind.UNLINK:
            names = ((parent, record.name, None),)
        else:
            names = ((parent, record.name, self._node_of(record)),)
        change = _NameChange(self._number, names, settles)
        self._named.append(change)
        for directory, name, node_now in names:
            if node_now is None:
                directory.now.pop(name, None)
            else:
                directory.now[name] = node_now
            if change not in directory.changes:
                directory.changes.append(change)

    def _node_of(self, record: Record) -> _Node:
        """Return what a record names: a new file or directory, or one that was there."""
        if record.kind is Kind.LINK:
            return self._nodes[record.inode]
        node: _Node
        if record.kind is Kind.SYMLINK:
            node = _Symlink(stat.S_IFLNK, record.data.decode())
        elif stat.S_ISDIR(record.extra):
            node = _Directory(record.extra)
        else:
            node = _File(record.extra)
        self._nodes[record.inode] = node
        return node

    def _directory(self, number: int) -> _Directory:
        node = self._nodes[number]
        assert isinstance(node, _Directory)
        return node

    def write_cut(self, path: Path, loss: Loss, choice: Random, node: int | None = None) -> None:
        """Make below ``path``, a new directory, what a loss of power may leave now.

        Args:
            path: The directory.
            loss: What is kept.
            choice: Decides what chance decides.
            node: The file or directory whose changes ``Loss.NODE`` loses; None for any.
        """
        dirty = [self._nodes[node]] if node is not None else self._dirty()
        _Cut(self._number, self._named, dirty, loss, choice).write(self._root, path)

    def _dirty(self) -> list[_Node]:
        """Return the files and directories that have changes, in the order of their creation."""
        named = {id(change.settles) for change in self._named}
        return [
            node
            for node in self._nodes.values()
            if id(node) in named or (isinstance(node, _File) and not all(each.durable for each in node.changes))
        ]


class _Cut:
    """One loss of power: decides what it keeps, and writes that."""

    def __init__(self, number: int, named: list[_NameChange], dirty: list[_Node], loss: Loss, choice: Random) -> None:
        self._loss = loss
        self._choice = choice
        # Most of what is not durable is recent, so moments are drawn from there.
        self._moment = number - int(number * choice.random() ** 3)
        self._one = number - int(min(number, 60) * choice.random())
        self._halves: dict[int, bool] = {}
        self._node = choice.choice(dirty) if dirty else None
        self._kept = [change for change in named if self._keeps_name(change)]

    def _half(self, node: _Node) -> bool:
        if id(node) not in self._halves:
            self._halves[id(node)] = self._choice.random() < 0.5
        return self._halves[id(node)]

    def _keeps(self, change: _Change | _NameChange, of: _Node) -> bool | None:
        """Return whether a change of a file or directory is kept; None if its kind decides that."""
        match self._loss:
            case Loss.ALL:
                return False
            case Loss.NOTHING:
                return True
            case Loss.LATEST:
                return change.number <= self._moment
            case Loss.EARLIEST:
                return change.number > self._moment
            case Loss.ONE:
                return change.number != self._one
            case Loss.NODE:
                return of is not self._node
            case Loss.WHOLE:
                return self._half(of)
            case _:
                return None

    def _keeps_name(self, change: _NameChange) -> bool:
        kept = self._keeps(change, change.settles)
        if kept is None:
            kept = self._choice.random() < 0.5 if self._loss is Loss.EACH else self._loss is Loss.DATA
        return kept

    def _keeps_bytes(self, file: _File, change: _Change) -> tuple[bool, bool]:
        """Return whether the bytes of a change of a file are kept, and whether the size is."""
        if change.durable:
            return True, True
        kept = self._keeps(change, file)
        if kept is not None:
            return kept, kept
        if self._loss is Loss.EACH:
            return self._choice.random() < 0.7, self._choice.random() < 0.5
        return self._loss is Loss.NAMES, self._loss is Loss.NAMES or self._half(file)

    def _content(self, file: _File) -> bytearray:
        content = bytearray(file.durable)
        size = len(content)
        for change in file.changes:
            data, sized = self._keeps_bytes(file, change)
            torn = self._loss is Loss.EACH and not change.durable and self._choice.random() < 0.5
            if data:
                _write(content, change, (lambda sector: self._choice.random() < 0.5) if torn else None)
            if sized and change.size is not None:
                del content[change.size :]
                size = change.size
        _resize(content, size)
        return content

    def write(self, directory: _Directory, path: Path) -> None:
        """Write a directory and all below it."""
        path.mkdir()
        names = dict(directory.durable)
        for change in self._kept:
            for of, name, node in change.names:
                if of is directory:
                    names.pop(name, None)
                    if node is not None:
                        names[name] = node
        for name, node in names.items():
            if isinstance(node, _Directory):
                self.write(node, path / name)
            elif isinstance(node, _File):
                _write_file(path / name, self._content(node), node.mode)
            elif isinstance(node, _Symlink):
                (path / name).symlink_to(node.target)
        path.chmod(stat.S_IMODE(directory.mode))


def _write_file(path: Path, content: bytearray, mode: int) -> None:
    """Write a file, with holes where there are zeros."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, len(content))
        for at in range(0, len(content), _PIECE_BYTES):
            piece = content[at : at + _PIECE_BYTES]
            if not _NO_BYTES.startswith(piece):
                os.pwrite(descriptor, piece, at)
        os.fchmod(descriptor, stat.S_IMODE(mode))
    finally:
        os.close(descriptor)
