"""Floors: the least that a durable, authenticated append or read takes in Python on this disk, and nothing else."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from bench.payloads import ENTRY_BYTES, PAYLOAD
from bench.peers import RAW_BYTES, Peer

BLOCK_BYTES: Final = 4096
PREFIX_BYTES: Final = 64
"""Header and digest of an entry."""

_HEADERS: Final = bytes(2 * 64)
_HEADER: Final = bytes(32)
_ZEROS: Final = bytes(1 << 20)


class _Blocks:
    """A zero-filled file that is written over and over, in whole blocks, each write synced, as the log does it."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "blocks", os.O_RDWR | os.O_CREAT, 0o600)
        for offset in range(0, RAW_BYTES, len(_ZEROS)):
            os.pwrite(self._file, _ZEROS, offset)
        os.fsync(self._file)
        self._offset = 0

    def write(self, parts: Sequence[bytes]) -> None:
        """Write the parts and padding at the end, which comes back to the beginning when the file is full."""
        size = sum(map(len, parts))
        padded = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        offset = self._offset if self._offset + padded <= RAW_BYTES else 0
        os.pwritev(self._file, [*parts, _ZEROS[: padded - size]], offset, os.RWF_DSYNC)
        self._offset = offset + padded

    def close(self) -> None:
        os.close(self._file)


class _Seal:
    """HMAC-SHA256 of a header and a payload, by hashlib, from states that were made once."""

    def __init__(self) -> None:
        self._inner = hashlib.sha256(bytes([0x36]) * 64)
        self._outer = hashlib.sha256(bytes([0x5C]) * 64)

    def prefix(self, payload: bytes | memoryview) -> bytes:
        """Return header and digest."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(_HEADER)
        inner.update(payload)
        outer.update(inner.digest())
        return _HEADER + outer.digest()


class BareWrite(Peer):
    """The synced write of one framed entry, and nothing else; for one thread."""

    name = "bare write"

    def __init__(self, directory: Path) -> None:
        self._blocks = _Blocks(directory)

    def append(self, payloads: Sequence[bytes]) -> None:
        """Write entries with zeros for their headers and digests."""
        self._blocks.write([_HEADERS, *(part for payload in payloads for part in (_ZEROS[:PREFIX_BYTES], payload))])

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()


class BareHash(Peer):
    """The HMAC of one entry, which nobody writes."""

    name = "bare hash"

    def __init__(self, _: Path) -> None:
        self._seal = _Seal()

    def append(self, payloads: Sequence[bytes]) -> None:
        """Compute the digests."""
        for payload in payloads:
            self._seal.prefix(payload)

    def close(self) -> None:
        """Do nothing."""


class BareRead:
    """A file of entries of 1 KiB that is mapped, and the HMAC of each entry that is read from it.

    Args:
        directory: Where the file is made.
        entries: Its entries.
    """

    name = "bare read"

    def __init__(self, directory: Path, entries: int) -> None:
        self._entries = entries
        with open(directory / "entries", "w+b") as file:
            for _ in range(entries):
                file.write(PAYLOAD)
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._seal = _Seal()

    def __enter__(self) -> Self:
        """Return the floor."""
        return self

    def __exit__(self, *_: object) -> None:
        """Unmap the file."""
        self._map.close()

    def get(self, number: int) -> bytes:
        """Return an entry."""
        offset = number * ENTRY_BYTES
        payload = self._map[offset : offset + ENTRY_BYTES]
        self._seal.prefix(payload)
        return payload

    def scan(self) -> int:
        """Read all entries in order; return how many there are."""
        view = memoryview(self._map)
        try:
            for offset in range(0, self._entries * ENTRY_BYTES, ENTRY_BYTES):
                self._seal.prefix(view[offset : offset + ENTRY_BYTES])
        finally:
            view.release()
        return self._entries


class _Commit:
    """Entries that are written together, and the locks on which their threads wait."""

    __slots__ = ("done", "gates", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = [_HEADERS]
        self.gates: list[threading.Lock] = []
        self.done = False


class BareGroupCommit(Peer):
    """A loop of group commit: an HMAC for each entry, a lock, a list and a synced write; no errors, no interrupts.

    Threads: any.
    """

    name = "bare group commit"

    def __init__(self, directory: Path) -> None:
        self._blocks = _Blocks(directory)
        self._seal = _Seal()
        self._mutex = threading.Lock()
        self._forming = _Commit()
        self._led = False

    def append(self, payloads: Sequence[bytes]) -> None:
        """Join the commit that forms; write it if no other thread leads, or wait for the one that does."""
        gate = threading.Lock()
        parts = [part for payload in payloads for part in (self._seal.prefix(payload), payload)]
        with self._mutex:
            commit = self._forming
            commit.parts += parts
            follows = self._led
            self._led = True
            if follows:
                gate.acquire()
                commit.gates.append(gate)
        if follows:
            gate.acquire()
        if not commit.done:
            self._lead()

    def _lead(self) -> None:
        with self._mutex:
            commit, self._forming = self._forming, _Commit()
        self._blocks.write(commit.parts)
        with self._mutex:
            commit.done = True
            for gate in commit.gates:
                gate.release()
            next_gates = self._forming.gates
            if next_gates:
                next_gates.pop(0).release()
            else:
                self._led = False

    def close(self) -> None:
        """Close the file."""
        self._blocks.close()
