"""Whether an LMDB file has all the pages that it refers to.

LMDB maps its file and reads pages without checking the file's size, so a truncated file kills the process with SIGBUS.
A sound file may be shorter than its meta page says, if its last pages are unused. So this file finds the pages in use.

The layout is that of LMDB's data format 1 on 64-bit little-endian machines.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

LMDB_FILE: Final = "data.mdb"
LMDB_LOCK: Final = "lock.mdb"

_MAGIC: Final = 0xBEEFC0DE
_FORMAT: Final = 1
_PAGE: Final = struct.Struct("<QHHHH")
_META: Final = struct.Struct("<IIQQ" + "IHHQQQQQ" * 2 + "QQ")
_NODE: Final = struct.Struct("<HHHH")
_PGNO: Final = struct.Struct("<Q")
_BRANCH: Final = 1
_LEAF: Final = 2
_BIG_DATA: Final = 1
_NO_PAGE: Final = (1 << 64) - 1
_TRIES: Final = 8
_METAS_BYTES: Final = 8192


class _Meta(NamedTuple):
    """The newest meta page, decoded."""

    page_bytes: int
    roots: tuple[int, int]
    last_page: int
    transaction: int


def missing_pages(path: str) -> str | None:
    """Return how an LMDB environment's file ends too early; None if it does not, or if LMDB itself will refuse it.

    Args:
        path: The environment's directory. Another process may be writing it.

    Cost: Two reads; all pages but those of large values are read if the file is shorter than it might be.
    """
    try:
        fd = os.open(os.path.join(path, LMDB_FILE), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _missing(fd, path)
    finally:
        os.close(fd)


def _missing(fd: int, path: str) -> str | None:
    """Do what ``missing_pages`` does, with the file open."""
    found = None
    for _ in range(_TRIES):
        meta = _newest_meta(fd)
        if meta is None:
            return None
        size = os.fstat(fd).st_size
        if size >= (meta.last_page + 1) * meta.page_bytes:
            return None
        end = next((end for end in _ends(fd, meta) if end > size), None)
        if end is None:
            return None
        found = f"{path}: the LMDB file ends after {size} bytes, but refers to pages up to byte {end}"
        if _newest_meta(fd) == meta:
            return found
    return found


class SizeGuard:
    """Compares the size of an open LMDB environment's file with what its meta pages refer to.

    Call ``problem`` before each transaction, because LMDB would read pages beyond the end of a truncated file, and the
    process would get SIGBUS. A truncation between the call and the end of the transaction is not noticed.

    Threads: any.

    Args:
        path: The environment's directory; its file must exist.

    Raises:
        OSError: It cannot be opened.
    """

    __slots__ = ("_fd", "_path", "_sound_bytes")

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(os.path.join(path, LMDB_FILE), os.O_RDONLY | os.O_CLOEXEC)
        self._sound_bytes = os.fstat(self._fd).st_size

    def problem(self) -> str | None:
        """Return how the file ends too early; None if it does not. Costs 0.4 µs, or 10 after the file grew."""
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if size == self._sound_bytes:
            return None
        if size < self._sound_bytes and size < _METAS_BYTES:
            return f"{self._path}: the LMDB file was cut from {self._sound_bytes} to {size} bytes"
        found = _missing(self._fd, self._path)
        if found is None:
            self._sound_bytes = size
        return found

    def close(self) -> None:
        """Close the descriptor; closing again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _newest_meta(fd: int) -> _Meta | None:
    """Return the newer of the two meta pages; None if LMDB will not recognise the file as its own."""
    metas = []
    page_bytes = 4096
    for number in range(2):
        data = os.pread(fd, _META.size, number * page_bytes + _PAGE.size)
        if len(data) < _META.size:
            return None
        magic, version, _, _, page_bytes, _, _, _, _, _, _, free, _, _, _, _, _, _, _, root, last, transaction = (
            _META.unpack(data)
        )
        if magic != _MAGIC or version != _FORMAT or not 512 <= page_bytes <= 1 << 16:
            return None
        metas.append(_Meta(page_bytes, (free, root), last, transaction))
    return max(metas, key=lambda meta: meta.transaction)


def _ends(fd: int, meta: _Meta) -> Iterator[int]:
    """Yield where each page in use ends, bytes; a page beyond the end of the file is not followed."""
    waiting = [page for page in meta.roots if page != _NO_PAGE]
    seen: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number in seen or number > meta.last_page:
            continue  # LMDB finds that out by itself
        seen.add(number)
        yield (number + 1) * meta.page_bytes
        page = os.pread(fd, meta.page_bytes, number * meta.page_bytes)
        if len(page) < meta.page_bytes:
            continue
        _, _, flags, lower, _ = _PAGE.unpack_from(page)
        for at in struct.unpack_from(f"<{max(0, lower - _PAGE.size) // 2}H", page.ljust(lower, b"\0"), _PAGE.size):
            if at + _NODE.size > len(page):
                continue
            low, high, more, key_bytes = _NODE.unpack_from(page, at)
            if flags & _BRANCH:
                waiting.append(low | high << 16 | more << 32)
            elif flags & _LEAF and more & _BIG_DATA and at + _NODE.size + key_bytes + _PGNO.size <= len(page):
                (first,) = _PGNO.unpack_from(page, at + _NODE.size + key_bytes)
                if first <= meta.last_page:
                    yield first * meta.page_bytes + _PAGE.size + (low | high << 16)
