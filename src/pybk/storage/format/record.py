"""Records, which frame entries in every tier, and run locations, which say where a record lies.

This file defines layouts and does not read or write files. See ``docs/reference/format.md``.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from pybk.deferral import np
from pybk.errors import CorruptError, UnsupportedFormatError

if TYPE_CHECKING:
    import numpy.typing as npt

RECORD_HEADER_BYTES: Final = 64
RECORD_FORMAT: Final = 1

_MAGIC: Final = 0x4B52
_ENTRIES: Final = 1
_PLAIN: Final = 0
_HEADER: Final = struct.Struct("<HBBB3xqqQIIIIQ")
_CHECKSUM: Final = struct.Struct("<Q")
_GROUP: Final = struct.Struct("<QQ")

GROUP_RECORD_BYTES: Final = RECORD_HEADER_BYTES + _GROUP.size

LOCATION_COMPRESSED: Final = 1
LOCATION_BYTES: Final = 32


@cache
def location_dtype() -> np.dtype[np.void]:
    """Return the type of a run location: the entries of one record, and where the record lies.

    Index pages and the footers of cold segments have them.
    """
    return np.dtype(
        [
            ("first", "<i8"),
            ("count", "<u4"),
            ("stride", "<u4"),
            ("offset", "<u4"),
            ("file", "<u4"),
            ("body", "<u4"),
            ("flags", "<u4"),
        ]
    )


RunLocations: TypeAlias = "npt.NDArray[np.void]"


class RecordKind(IntEnum):
    """The kind of a record."""

    ENTRIES = 1
    LEDGER = 2
    DELETE = 3
    FORCE = 4
    MARK = 5
    FILE = 6
    GROUP = 7
    NAMED = 8


_KINDS: Final = frozenset(map(int, RecordKind))


class Codec(IntEnum):
    """The compression of a record's stored body."""

    PLAIN = 0
    ZSTD = 1


class RecordHeader(NamedTuple):
    """The decoded first 64 bytes of a record; sizes in bytes."""

    kind: int
    codec: int
    ledger_id: int
    first_entry_id: int
    lsn: int
    entry_count: int
    stride: int
    body_bytes: int
    raw_bytes: int
    body_checksum: int


def encode_header(
    kind: int,
    ledger_id: int,
    first_entry_id: int,
    body_bytes: int,
    body_checksum: int,
    *,
    lsn: int = 0,
    entry_count: int = 0,
    stride: int = 1,
    codec: int = Codec.PLAIN,
    raw_bytes: int | None = None,
) -> bytes:
    """Return the 64 header bytes of a record whose stored body has this size and checksum."""
    head = _HEADER.pack(
        _MAGIC,
        RECORD_FORMAT,
        kind,
        codec,
        ledger_id,
        first_entry_id,
        lsn,
        entry_count,
        stride,
        body_bytes,
        body_bytes if raw_bytes is None else raw_bytes,
        body_checksum,
    )
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head))


def encode_entries_header(
    ledger_id: int, first_entry_id: int, entry_count: int, body: bytes, *, stride: int = 1
) -> bytes:
    """Return the header of a record of entries with a finished plain body."""
    return encode_header(
        RecordKind.ENTRIES,
        ledger_id,
        first_entry_id,
        len(body),
        xxh3_64_intdigest(body),
        entry_count=entry_count,
        stride=stride,
    )


def encode_control(kind: int, ledger_id: int, number: int, body: bytes = b"", *, lsn: int = 0) -> bytes:
    """Return a whole control record; the meaning of ``number`` depends on its kind."""
    return encode_header(kind, ledger_id, number, len(body), xxh3_64_intdigest(body), lsn=lsn) + body


def encode_group(headers: Sequence[bytes], nbytes: int, *, lsn: int) -> bytes:
    """Return a whole group record, which makes the records that follow it atomic.

    Args:
        headers: The 64 header bytes of each record of the group, in order.
        nbytes: Bytes of these records, headers and bodies.
        lsn: LSN of the commit that holds the group.
    """
    return encode_control(RecordKind.GROUP, -1, len(headers), _group_body(headers, nbytes), lsn=lsn)


def group_matches(body: memoryview, headers: Sequence[bytes | memoryview], nbytes: int) -> bool:
    """Return whether a group record's body matches records with these headers and this many bytes."""
    return bytes(body) == _group_body(headers, nbytes)


def _group_body(headers: Sequence[bytes | memoryview], nbytes: int) -> bytes:
    return _GROUP.pack(nbytes, xxh3_64_intdigest(b"".join(headers)))


def check_kind(header: RecordHeader, *, where: str) -> None:
    """Raise UnsupportedFormatError for a record of a kind that this version does not know."""
    if header.kind not in _KINDS:
        raise UnsupportedFormatError(
            f"{where}: a record of kind {header.kind}; this pybk knows the kinds {min(_KINDS)} to {max(_KINDS)}; open "
            "the store with the pybk that wrote it, or newer"
        )


def decode_header(buffer: memoryview, offset: int, *, where: str) -> RecordHeader:
    """Decode and check a record header.

    Raises:
        CorruptError: The 64 bytes are not a record header, or the body would end beyond ``buffer``.
        UnsupportedFormatError: The header is sound but of a newer format.
    """
    end = offset + RECORD_HEADER_BYTES
    if end > len(buffer):
        raise CorruptError(
            f"{where}: a record header of {RECORD_HEADER_BYTES} bytes at offset {offset} ends "
            f"beyond the {len(buffer)} bytes that exist"
        )
    magic, version, kind, codec, ledger, first, lsn, count, stride, body, raw, checksum = _HEADER.unpack_from(
        buffer, offset
    )
    (expected,) = _CHECKSUM.unpack_from(buffer, end - 8)
    found = xxh3_64_intdigest(buffer[offset : end - 8])
    if magic != _MAGIC or found != expected:
        raise CorruptError(
            f"{where}: no record header at offset {offset}: magic {magic:#06x}, checksum {found:#x}, "
            f"expected {_MAGIC:#06x} and {expected:#x}"
        )
    if version != RECORD_FORMAT:
        raise UnsupportedFormatError(
            f"{where}: record format {version} at offset {offset}; this pybk reads "
            f"{RECORD_FORMAT}; open the store with the pybk that wrote it, or newer"
        )
    if end + body > len(buffer):
        raise CorruptError(
            f"{where}: the record at offset {offset} has a body of {body} bytes and ends beyond the "
            f"{len(buffer)} bytes that exist"
        )
    return RecordHeader(kind, codec, ledger, first, lsn, count, stride, body, raw, checksum)


def check_body(header: RecordHeader, body: memoryview, *, where: str) -> None:
    """Raise CorruptError unless the stored body matches the checksum in its header."""
    found = xxh3_64_intdigest(body)
    if found != header.body_checksum:
        raise CorruptError(
            f"{where}: body of ledger {header.ledger_id} entries from {header.first_entry_id}: checksum "
            f"{found:#x}, expected {header.body_checksum:#x}"
        )


def entry_ends(body: memoryview, entry_count: int, *, where: str) -> tuple[int, npt.NDArray[np.int64]]:
    """Locate the entries of a plain body.

    Returns:
        Where the first entry starts in ``body``, and the end of each entry in ``body``, ``(n,)`` int64, bytes.

    Raises:
        CorruptError: The table does not fit the body.
    """
    if entry_count == 1:
        return 0, np.array([len(body)], np.int64)
    start = 4 * entry_count
    if not 0 < start <= len(body):
        raise CorruptError(f"{where}: a table of {entry_count} entries does not fit a body of {len(body)} bytes")
    ends = np.frombuffer(body, "<u4", entry_count).astype(np.int64) + start
    if ends[-1] != len(body) or bool((np.diff(ends) < 0).any()):
        raise CorruptError(f"{where}: the table of {entry_count} entries ends at {int(ends[-1])} of {len(body)} bytes")
    return start, ends


def encode_entries(
    ledger_id: int,
    first_entry_id: int,
    sizes: Sequence[int] | array[int],
    parts: Sequence[bytes | memoryview],
    *,
    lsn: int = 0,
    stride: int = 1,
) -> tuple[bytes, bytes]:
    """Make a record of encoded entries.

    Args:
        ledger_id: Ledger of all the entries.
        first_entry_id: Id of the first; the others follow by ``stride``.
        sizes: Encoded bytes of each entry.
        parts: The entries' bytes, in order, in any pieces.
        lsn: LSN of the commit that holds the record, 0 for none.
        stride: Distance of consecutive entry ids.

    Returns:
        Header and body, to be written one after the other.
    """
    count = len(sizes)
    if count == 1:
        body = b"".join(parts)
    else:
        table = np.cumsum(np.array(sizes, np.int64)).astype("<u4").tobytes()
        body = b"".join((table, *parts))
    size = len(body)
    head = _HEADER.pack(
        _MAGIC,
        RECORD_FORMAT,
        _ENTRIES,
        _PLAIN,
        ledger_id,
        first_entry_id,
        lsn,
        count,
        stride,
        size,
        size,
        xxh3_64_intdigest(body),
    )
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head)), body
