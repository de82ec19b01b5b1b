"""Packs: the files of a backup that hold entries.

A pack is a header, records as in a store's files, and a trailer with a SHA-256 of all bytes before it. The records of
each ledger begin with a ledger record, which holds its metadata as of the copy. So a pack that no manifest names yet
shows to which ledgers its entries belong, and an interrupted backup can continue with it. See
``docs/reference/format.md``.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator
from hmac import compare_digest
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.storage.format.log_file import (
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    check_body,
    decode_header,
    encode_control,
    encode_entries,
    entry_ends,
)

PACK_FORMAT: Final = 1
PACK_BYTES: Final = 32 << 20
"""The bytes after which a pack takes no more records; one batch of entries may exceed them."""
PACK_BYTES_MAX: Final = 2 << 30
"""The most bytes of a pack: ``PACK_BYTES``, and the longest entry that a store can be configured to accept, 1 GiB."""

_MAGIC: Final = b"PYBKBKP1"
_END_MAGIC: Final = b"PYBKBKE1"
_HEADER: Final = struct.Struct("<8sI4x16sQ")
_END: Final = struct.Struct("<8sQ")
_HASH_BYTES: Final = 32
_OVERHEAD_BYTES: Final = _HEADER.size + _END.size + _HASH_BYTES

BACKUP_ID_BYTES: Final = 16

Int64s = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """Entries ``first`` to ``last`` of a ledger, which a pack holds."""

    pack: int
    first: int
    last: int


class LedgerKey(NamedTuple):
    """The identity of a ledger; an id does not suffice, because that of a deleted ledger may be given again."""

    ledger_id: int
    creation_time_ns: int
    creation_sequence: int
    key_salt: bytes

    @classmethod
    def of(cls, metadata: LedgerMetadata) -> LedgerKey:
        """Return the key of a ledger."""
        return cls(metadata.ledger_id, metadata.creation_time_ns, metadata.creation_sequence, metadata.key_salt)


class PackedEntries(NamedTuple):
    """Consecutive entries of one ledger in a pack.

    Attributes:
        key: The ledger.
        first: The id of the first entry; the others follow without a gap.
        buffer: The encoded entries, one after the other.
        offsets: The offset of each, ``(n,)`` int64, bytes.
        sizes: The encoded bytes of each, ``(n,)`` int64.
    """

    key: LedgerKey
    first: int
    buffer: memoryview
    offsets: Int64s
    sizes: Int64s

    @property
    def last(self) -> int:
        """The id of the last entry."""
        return self.first + len(self.sizes) - 1


class PackBuilder:
    """Collects the records of one pack in memory.

    Attributes:
        number: The number of the pack.
        nbytes: Bytes so far.
        pieces: The entries in it, in order, with their ledgers.
    """

    def __init__(self, backup_id: bytes, number: int) -> None:
        self.number: Final = number
        self._parts: list[bytes] = [_HEADER.pack(_MAGIC, PACK_FORMAT, backup_id, number)]
        self._records = 0
        self.nbytes = _OVERHEAD_BYTES
        self.pieces: list[tuple[LedgerKey, Piece]] = []
        self._described: LedgerKey | None = None

    def add(self, metadata: LedgerMetadata, first: int, batch: EntryBatch) -> None:
        """Add entries that follow the entries of the ledger that were added before, if any.

        Args:
            metadata: The ledger's metadata.
            first: The id of the first entry in the store.
            batch: The entries; their ids are not used.
        """
        key = LedgerKey.of(metadata)
        if self._described != key:
            self._put(encode_control(RecordKind.LEDGER, metadata.ledger_id, metadata.version, metadata.encode()))
            self._described = key
        starts, sizes = batch.offsets.tolist(), batch.sizes.tolist()
        parts = [batch.buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for part in encode_entries(metadata.ledger_id, first, array("q", sizes), parts):
            self._parts.append(part)
            self.nbytes += len(part)
        self._records += 1
        last = first + len(sizes) - 1
        known = self.pieces[-1] if self.pieces else None
        if known is not None and known[0] == key and known[1].last == first - 1:
            self.pieces[-1] = key, known[1]._replace(last=last)
        else:
            self.pieces.append((key, Piece(self.number, first, last)))

    def _put(self, record: bytes) -> None:
        self._parts.append(record)
        self.nbytes += len(record)
        self._records += 1

    def finish(self) -> bytes:
        """Return the bytes of the pack."""
        parts = [*self._parts, _END.pack(_END_MAGIC, self._records)]
        hashed = hashlib.sha256()
        for part in parts:
            hashed.update(part)
        return b"".join([*parts, hashed.digest()])


def pack_hash(data: bytes) -> bytes:
    """Return the SHA-256 at the end of a pack that ``PackBuilder`` or ``read_pack`` has made or checked."""
    return data[-_HASH_BYTES:]


def check_pack(data: bytes, backup_id: bytes, number: int, *, where: str) -> None:
    """Check that the bytes are a whole pack of a backup.

    Raises:
        CorruptError: They are damaged or cut, or the pack is another backup's, or has another number.
        UnsupportedFormatError: It has a newer format.
    """
    remedy = "restore this file from another copy of the backup, or begin a new backup in an empty directory"
    if len(data) < _OVERHEAD_BYTES:
        raise CorruptError(f"{where}: {len(data)} bytes; a pack has at least {_OVERHEAD_BYTES}; {remedy}", path=where)
    view = memoryview(data)
    magic, version, found_id, found_number = _HEADER.unpack_from(data)
    if magic == _MAGIC and version != PACK_FORMAT:
        raise UnsupportedFormatError(f"{where}: pack format {version}; this pybk reads {PACK_FORMAT}; use a newer pybk")
    end_magic, _ = _END.unpack_from(data, len(data) - _HASH_BYTES - _END.size)
    whole = compare_digest(hashlib.sha256(view[:-_HASH_BYTES]).digest(), pack_hash(data))
    if magic != _MAGIC or end_magic != _END_MAGIC or not whole:
        raise CorruptError(f"{where}: the pack is damaged or was cut; {remedy}", path=where)
    if (found_id, found_number) != (backup_id, number):
        raise CorruptError(
            f"{where}: pack {found_number} of backup {found_id.hex()}, expected pack {number} of backup "
            f"{backup_id.hex()}; {remedy}",
            path=where,
        )


def read_pack(data: bytes, backup_id: bytes, number: int, *, where: str) -> Iterator[PackedEntries]:
    """Yield the entries of a pack; first the whole pack is checked.

    Raises:
        CorruptError, UnsupportedFormatError: As ``check_pack``, or a record is damaged.
    """
    check_pack(data, backup_id, number, where=where)
    view = memoryview(data)
    records = view[: len(data) - _HASH_BYTES - _END.size]
    _, count = _END.unpack_from(data, len(records))
    at = _HEADER.size
    key: LedgerKey | None = None
    for _ in range(count):
        header = decode_header(records, at, where=where)
        body = records[at + RECORD_HEADER_BYTES : at + RECORD_HEADER_BYTES + header.body_bytes]
        check_body(header, body, where=where)
        at += RECORD_HEADER_BYTES + header.body_bytes
        if header.kind == RecordKind.LEDGER:
            key = LedgerKey.of(LedgerMetadata.decode(bytes(body), where=where))
        else:
            yield _entries(header, body, key, where)
    if at != len(records):
        raise CorruptError(f"{where}: {len(records) - at} bytes follow the last of {count} records", path=where)


def _entries(header: RecordHeader, body: memoryview, key: LedgerKey | None, where: str) -> PackedEntries:
    if header.kind != RecordKind.ENTRIES or key is None or key.ledger_id != header.ledger_id or header.stride != 1:
        raise CorruptError(
            f"{where}: a record of kind {header.kind} of ledger {header.ledger_id} is not expected there", path=where
        )
    start, ends = entry_ends(body, header.entry_count, where=where)
    starts = np.concatenate((np.array([start], np.int64), ends[:-1]))
    return PackedEntries(key, header.first_entry_id, body, starts, ends - starts)
