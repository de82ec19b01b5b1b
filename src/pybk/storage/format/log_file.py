"""Log files: the bytes of a file header and of a commit header.

This file defines layouts; ``replay.py`` reads the commits of a log from its files. See
``docs/reference/format.md``.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.native import CORE
from pybk.storage.format.record import encode_entries

BLOCK_BYTES: Final = 4096
"""Commits begin at multiples of this; the first one follows the file header, which is one block."""

RESERVED_FILE_BYTES: Final = 512 << 10
"""The size of the log files that are reserved for changes that free space, and of no others.

Holds 127 commits of one small change, or the longest record of a log.
"""

LOG_FILE_BYTES_MAX: Final = 1 << 32
"""A log file is not larger: locations have offsets of 32 bits."""

COMMIT_HEADER_BYTES: Final = 64
LOG_FORMAT: Final = 1

COMMIT_MAGIC: Final = b"PBKC"

_FILE_MAGIC: Final = b"PYBKLOG1"
_FILE_HEADER: Final = struct.Struct("<8sI4x16sQQQ")
_COMMIT_HEADER: Final = struct.Struct("<4sIQQQII16x")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKED_BYTES: Final = 56
_FEATURES: Final = struct.Struct("<I")
_FEATURES_AT: Final = 12
_ZEROS: Final = bytes(BLOCK_BYTES)


class LogFileHeader(NamedTuple):
    """The decoded header of a log file that was begun."""

    store_id: bytes
    file_id: int
    first_lsn: int
    durable_lsn: int


class CommitHeader(NamedTuple):
    """The decoded first 64 bytes of a commit; ``body_bytes`` is its records without the padding."""

    lsn: int
    durable_lsn: int
    file_id: int
    record_count: int
    body_bytes: int


def padding(size: int) -> int:
    """Return the bytes of padding from ``size`` to the next multiple of ``BLOCK_BYTES``."""
    return -size % BLOCK_BYTES


def encode_file_header(store_id: bytes, file_id: int, first_lsn: int, durable_lsn: int) -> bytes:
    """Return the 4096-byte header block of a log file.

    Args:
        store_id: The 16 bytes of the store.
        file_id: The file's id.
        first_lsn: LSN of the commit that follows the header.
        durable_lsn: LSN of the last commit that is known to be durable.
    """
    head = _FILE_HEADER.pack(_FILE_MAGIC, LOG_FORMAT, store_id, file_id, first_lsn, durable_lsn)
    return (head + _CHECKSUM.pack(xxh3_64_intdigest(head))).ljust(BLOCK_BYTES, b"\0")


def file_header_is_whole(buffer: memoryview) -> bool:
    """Return whether ``buffer`` begins with a valid log file header, of any store, file or format."""
    if len(buffer) < BLOCK_BYTES or bytes(buffer[:8]) != _FILE_MAGIC:
        return False
    (expected,) = _CHECKSUM.unpack_from(buffer, _CHECKED_BYTES)
    return xxh3_64_intdigest(buffer[:_CHECKED_BYTES]) == int(expected)


def decode_file_header(buffer: memoryview, *, store_id: bytes, file_id: int, where: str) -> LogFileHeader | None:
    """Decode and check the header block of a log file.

    Args:
        buffer: The file from its start; at least its first 4096 bytes.
        store_id: The store that the file must belong to.
        file_id: The id that it must carry.
        where: Path, for error messages.

    Returns:
        The header, or None when the block is zeros: the file was preallocated and never begun.

    Raises:
        CorruptError: The header is damaged or too short, or of another store or file.
        UnsupportedFormatError: The header is sound but of another format.
    """
    if len(buffer) < BLOCK_BYTES:
        raise CorruptError(
            f"{where}: the file ends after {len(buffer)} bytes, inside its header block of {BLOCK_BYTES}; "
            "restore it from a backup",
            path=where,
            offset=len(buffer),
        )
    if bytes(buffer[:BLOCK_BYTES]) == _ZEROS:
        return None
    if not file_header_is_whole(buffer):
        raise CorruptError(
            f"{where}: no log file header at offset 0: magic {bytes(buffer[:8])!r}, expected "
            f"{_FILE_MAGIC!r} and a matching checksum; restore the file from a backup",
            path=where,
            offset=0,
        )
    _, version, found_store, found_file, first_lsn, durable_lsn = _FILE_HEADER.unpack_from(buffer)
    if version != LOG_FORMAT:
        raise UnsupportedFormatError(
            f"{where}: log file format {version}; this pybk reads {LOG_FORMAT}; open the store "
            "with the pybk that wrote it, or newer"
        )
    refuse_features(buffer, where=where)
    if found_store != store_id or found_file != file_id:
        raise CorruptError(
            f"{where}: a log file of store {found_store.hex()} with file id {found_file}, expected store "
            f"{store_id.hex()} and file id {file_id}; put the right file in its place",
            path=where,
            offset=16,
        )
    return LogFileHeader(found_store, found_file, first_lsn, durable_lsn)


def refuse_features(header: memoryview, *, where: str) -> None:
    """Refuse a sound header of a log file or cold segment that names an incompatible feature; none is in use yet.

    Raises:
        UnsupportedFormatError: It names one.
    """
    (features,) = _FEATURES.unpack_from(header, _FEATURES_AT)
    if features:
        raise UnsupportedFormatError(
            f"{where}: the file uses incompatible features {features:#x}, of which this pybk knows none; open the "
            "store with the pybk that wrote it, or newer"
        )


def encode_commit_header(lsn: int, durable_lsn: int, file_id: int, record_count: int, body_bytes: int) -> bytes:
    """Return the 64 header bytes of a commit.

    Args:
        lsn: Its LSN.
        durable_lsn: LSN of the last commit whose sync had returned.
        file_id: The file that it is written to.
        record_count: Records in it.
        body_bytes: Bytes of the records, without the padding after them.
    """
    head = _COMMIT_HEADER.pack(COMMIT_MAGIC, LOG_FORMAT, lsn, durable_lsn, file_id, record_count, body_bytes)
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head))


def encode_entry_commit(
    ledger_id: int, entry_id: int, lsn: int, file_id: int, prefix: bytes | memoryview, payload: bytes | memoryview
) -> list[bytes | memoryview]:
    """Return the pieces of a commit that has one entry and nothing else, with its padding.

    Args:
        ledger_id: The entry's ledger.
        entry_id: Its id.
        lsn: LSN of the commit; the one before it is durable.
        file_id: The file that it is written to.
        prefix: The first bytes of the encoded entry.
        payload: The others.
    """
    if CORE is not None:
        return [CORE.entry_commit(ledger_id, entry_id, lsn, file_id, prefix, payload)]
    header, body = encode_entries(ledger_id, entry_id, (len(prefix) + len(payload),), (prefix, payload), lsn=lsn)
    size = len(header) + len(body)
    commit_header = encode_commit_header(lsn, lsn - 1, file_id, 1, size)
    return [commit_header, header, body, _ZEROS[: padding(COMMIT_HEADER_BYTES + size)]]


def decode_commit_header(buffer: memoryview, offset: int, file_id: int) -> CommitHeader | None:
    """Decode the commit header at ``offset``.

    Returns:
        The header; None if the 64 bytes are not a commit header of this file, or the buffer ends before them. Garbage
        never raises.

    Raises:
        UnsupportedFormatError: The header is sound and of this file, but of another format.
    """
    end = offset + COMMIT_HEADER_BYTES
    if end > len(buffer):
        return None
    magic, version, lsn, durable_lsn, found_file, record_count, body_bytes = _COMMIT_HEADER.unpack_from(buffer, offset)
    if magic != COMMIT_MAGIC or found_file != file_id:
        return None
    (expected,) = _CHECKSUM.unpack_from(buffer, end - 8)
    if xxh3_64_intdigest(buffer[offset : end - 8]) != expected:
        return None
    if version != LOG_FORMAT:
        raise UnsupportedFormatError(
            f"log file {file_id:016x}: commit format {version} at offset {offset}; this pybk "
            f"reads {LOG_FORMAT}; open the store with the pybk that wrote it, or newer"
        )
    return CommitHeader(lsn, durable_lsn, found_file, record_count, body_bytes)
