"""Cold segments: immutable files of records sorted by ledger and entry, with a footer that says where each lies.

A segment is complete and synced before the index names it, so a damaged or truncated one is corruption and never an
unfinished write. See ``docs/reference/format.md``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from xxhash import xxh3_64_intdigest

from pybk.deferral import np
from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.storage.format.log_file import (
    LOCATION_COMPRESSED,
    RECORD_HEADER_BYTES,
    Codec,
    RecordHeader,
    RecordKind,
    RunLocations,
    check_body,
    decode_header,
    encode_entries,
    encode_entries_header,
    encode_header,
    entry_ends,
    location_dtype,
    refuse_features,
)
from pybk.storage.io.failures import syncing
from pybk.storage.io.filesystem import populate

if TYPE_CHECKING:
    from types import ModuleType

    from pybk.storage.io.filesystem import File, FileSystem

COLD_FORMAT: Final = 1
COLD_SEGMENT_BYTES_MAX: Final = 1 << 32
"""Records begin below this offset, because a run location has 32 bits for it."""

_HEADER_BYTES: Final = 4096
_TRAILER_BYTES: Final = 64
_PIECE_BYTES: Final = 1 << 20
_HEADER_MAGIC: Final = b"PYBKCLD1"
_TRAILER_MAGIC: Final = b"PYBKEND1"
_HEADER: Final = struct.Struct("<8sI4x16sQ24x")
_TRAILER: Final = struct.Struct("<8sQQQ24x")
_ROW: Final = struct.Struct("<qqIIIIII")
_CHECKSUM: Final = struct.Struct("<Q")


@cache
def footer_dtype() -> np.dtype[np.void]:
    """Return the type of a row of the footer: the ledger id, then the run location."""
    location = location_dtype()
    return np.dtype([("ledger", "<i8"), *((name, location[name]) for name in location.names or ())])


def check_codec() -> None:
    """Raise unless this installation has the codec of compressed records.

    Raises:
        UsageError: The extra ``pybk[zstd]`` is not installed; names the command that installs it.
    """
    _zstandard()


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            'cold_compression="zstd" and reading what was compressed by it need the zstandard package: '
            'pip install "pybk[zstd]"'
        ) from error
    return zstandard


def decompress(header: RecordHeader, body: bytes | memoryview) -> bytes | memoryview:
    """Return the decompressed body of a record whose stored body was checked; a plain body is returned unchanged.

    Raises:
        CorruptError: The body does not decompress to the size that its header gives.
        UsageError: It is compressed and the extra ``pybk[zstd]`` is not installed.

    Threads: any. Cost: the decompressed body in private memory.
    """
    if header.codec == Codec.PLAIN:
        return body
    where = f"ledger {header.ledger_id} entries from {header.first_entry_id}"
    if header.codec != Codec.ZSTD:
        raise UnsupportedFormatError(
            f"{where}: codec {header.codec}; this pybk reads {[int(codec) for codec in Codec]}; "
            "open the store with the pybk that wrote it, or newer"
        )
    zstandard = _zstandard()
    try:
        # zstd allocates the size that the frame names, so that size is checked first.
        promised = zstandard.get_frame_parameters(body).content_size
        if promised != header.raw_bytes:
            raise CorruptError(
                f"{where}: compressed body of {promised} bytes, expected {header.raw_bytes}; restore the "
                "file from a backup"
            )
        plain: bytes = zstandard.ZstdDecompressor().decompress(body, max_output_size=header.raw_bytes)
    except zstandard.ZstdError as error:
        raise CorruptError(
            f"{where}: the compressed body cannot be read: {error}; restore the file from a backup"
        ) from error
    if len(plain) != header.raw_bytes:
        raise CorruptError(
            f"{where}: {len(plain)} bytes came out of a compressed body, expected {header.raw_bytes}; "
            "restore the file from a backup"
        )
    return plain


class ColdSegmentWriter:
    """Writes one segment: ``add`` records in order of ledger and entry, then ``finish``, or ``abort``.

    Nothing is durable before ``finish`` returns. Memory: about 1 MiB plus the largest record, and 40 bytes for each
    record written.

    Args:
        fs: The file system.
        path: The segment's path; must not exist.
        store_id: The 16 bytes of the store.
        file_id: The segment's id.
        compression: ``"zstd"`` compresses a body if that makes it smaller; None compresses nothing.
        reserved: A file in the same directory whose blocks the segment takes; it keeps its name until the segment is
            complete. None makes a file.

    Raises:
        UsageError: Compression is asked for and the extra ``pybk[zstd]`` is not installed.
        OSError: The file cannot be created.

    Threads: one.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        store_id: bytes,
        file_id: int,
        *,
        compression: Literal["zstd"] | None,
        reserved: str | None = None,
    ) -> None:
        self._compressor = None if compression is None else _zstandard().ZstdCompressor()
        head = _HEADER.pack(_HEADER_MAGIC, COLD_FORMAT, store_id, file_id)
        self._fs = fs
        self._path = path
        self._file_id = file_id
        self._pending: list[bytes] = [(head + _CHECKSUM.pack(xxh3_64_intdigest(head))).ljust(_HEADER_BYTES, b"\0")]
        self._pending_bytes = _HEADER_BYTES
        self._written = 0
        self._rows = bytearray()
        self._last = (-(1 << 63), -1)
        self._reserved = reserved
        self._file: File | None = fs.create(path, 0) if reserved is None else fs.open(reserved, writable=True)

    def fits(self, nbytes: int) -> bool:
        """Return whether a record of this many bytes, with its header and table of entries, still fits."""
        return self._written + self._pending_bytes + nbytes <= COLD_SEGMENT_BYTES_MAX

    def add(
        self,
        ledger_id: int,
        first_entry_id: int,
        sizes: Sequence[int],
        parts: Sequence[bytes | memoryview],
        stride: int = 1,
    ) -> tuple[int, int, int, int, int, int, int]:
        """Add one record of encoded entries.

        Args:
            ledger_id: Ledger of all the entries; not less than that of the record added last.
            first_entry_id: Id of the first; within one ledger, greater than all entry ids added before.
            sizes: Encoded bytes of each entry.
            parts: The entries' bytes, in order, in any pieces; not referenced after the return.
            stride: Distance of consecutive entry ids.

        Returns:
            The record's location, a row of ``location_dtype()``.

        Raises:
            UsageError: The record is out of order, or does not fit in the segment.
            OSError, StorageFullError: Writing failed; call ``abort``.
        """
        count = len(sizes)
        self._check(ledger_id, first_entry_id, count, sum(sizes) + 4 * count)
        header, body = encode_entries(ledger_id, first_entry_id, sizes, parts, stride=stride)
        return self._put(ledger_id, first_entry_id, count, stride, header, body)

    def add_body(
        self, ledger_id: int, first_entry_id: int, count: int, body: bytes | memoryview
    ) -> tuple[int, int, int, int, int, int, int]:
        """Add one record with a finished plain body, which the caller has checked; otherwise as ``add``."""
        self._check(ledger_id, first_entry_id, count, len(body))
        body = bytes(body)
        header = encode_entries_header(ledger_id, first_entry_id, count, body)
        return self._put(ledger_id, first_entry_id, count, 1, header, body)

    def _check(self, ledger_id: int, first_entry_id: int, count: int, nbytes: int) -> None:
        """Raise UsageError unless a record of this many bytes is in order and fits."""
        if count == 0 or (ledger_id, first_entry_id) <= self._last:
            raise UsageError(
                f"{self._path}: {count} entries from {first_entry_id} of ledger {ledger_id} come after ledger "
                f"{self._last[0]} entry {self._last[1]}; add at least one entry, in order of ledger and entry"
            )
        if not self.fits(nbytes + RECORD_HEADER_BYTES):
            raise UsageError(
                f"{self._path}: a record of {nbytes} bytes at offset {self._written + self._pending_bytes} "
                f"would pass {COLD_SEGMENT_BYTES_MAX} bytes; call fits(), and begin another segment if it is False"
            )

    def _put(
        self, ledger_id: int, first_entry_id: int, count: int, stride: int, header: bytes, body: bytes
    ) -> tuple[int, int, int, int, int, int, int]:
        """Buffer a record, compressed if that makes it smaller; write the buffer when it is large enough."""
        header, body, compressed = self._compressed(ledger_id, first_entry_id, count, stride, header, body)
        offset = self._written + self._pending_bytes
        size = RECORD_HEADER_BYTES + len(body)
        self._pending += (header, body, bytes(-size % 8))
        self._pending_bytes += size + -size % 8
        run = (
            first_entry_id,
            count,
            stride,
            offset,
            self._file_id,
            len(body),
            LOCATION_COMPRESSED if compressed else 0,
        )
        self._rows += _ROW.pack(ledger_id, *run)
        self._last = (ledger_id, first_entry_id + (count - 1) * stride)
        if self._pending_bytes >= _PIECE_BYTES:
            self._flush()
        return run

    def add_lost(self, ledger_id: int, first_entry_id: int, entry_count: int) -> None:
        """Add a placeholder for lost entries: reading them raises CorruptError and not "no such entry".

        The record has no body, and a checksum that does not match an empty body. It is marked as compressed, because
        every reader checks a compressed body. The order is that of ``add``.
        """
        header = encode_header(
            RecordKind.ENTRIES,
            ledger_id,
            first_entry_id,
            0,
            xxh3_64_intdigest(b"") ^ 1,
            entry_count=entry_count,
            codec=Codec.ZSTD,
        )
        offset = self._written + self._pending_bytes
        self._pending.append(header)
        self._pending_bytes += RECORD_HEADER_BYTES
        run = (first_entry_id, entry_count, 1, offset, self._file_id, 0, LOCATION_COMPRESSED)
        self._rows += _ROW.pack(ledger_id, *run)
        self._last = (ledger_id, first_entry_id + entry_count - 1)

    def _compressed(
        self, ledger_id: int, first: int, count: int, stride: int, header: bytes, body: bytes
    ) -> tuple[bytes, bytes, bool]:
        """Return the header and body to store for a record, and whether the body is compressed."""
        if self._compressor is None:
            return header, body, False
        packed: bytes = self._compressor.compress(body)
        if len(packed) >= len(body):
            return header, body, False
        header = encode_header(
            RecordKind.ENTRIES,
            ledger_id,
            first,
            len(packed),
            xxh3_64_intdigest(packed),
            entry_count=count,
            stride=stride,
            codec=Codec.ZSTD,
            raw_bytes=len(body),
        )
        return header, packed, True

    def _opened(self) -> File:
        if self._file is None:
            raise UsageError(f"{self._path}: this segment was finished or aborted; begin another one")
        return self._file

    def _flush(self) -> None:
        file = self._opened()
        piece = b"".join(self._pending)
        file.write([piece], self._written)
        self._written += len(piece)
        self._pending = []
        self._pending_bytes = 0

    def finish(self) -> RunLocations:
        """Write the footer, sync the file and its directory, close it.

        Returns:
            The footer, ``(records,)`` of ``footer_dtype()``.

        Raises:
            OSError, StorageFullError: Writing or syncing failed; call ``abort``.

        Durability: the whole segment is durable when it returns.
        """
        file = self._opened()
        footer = bytes(self._rows)
        rows = np.frombuffer(footer, footer_dtype())
        offset = self._written + self._pending_bytes
        trailer = _TRAILER.pack(_TRAILER_MAGIC, offset, len(rows), xxh3_64_intdigest(footer))
        self._pending += (footer, trailer, _CHECKSUM.pack(xxh3_64_intdigest(trailer)))
        self._flush()
        if self._reserved is not None:
            file.truncate(self._written)
        with syncing(self._path):
            file.sync()
        if self._reserved is not None:
            self._fs.rename(self._reserved, self._path)
        with syncing(self._path):
            self._fs.sync_directory(os.path.dirname(self._path))
        file.close()
        self._file = None
        return rows

    def abort(self) -> None:
        """Remove the unfinished file, which nothing refers to; a reserved file stays, with its name and its blocks."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            finally:
                if self._reserved is None:
                    self._fs.unlink(self._path)


class ColdSegment:
    """Reads one segment through a map of its file; opening checks header, footer and trailer, but not the records.

    Args:
        fs: The file system.
        path: The segment's path.
        store_id: The store it must belong to, 16 bytes.
        file_id: The id it must carry.

    Raises:
        CorruptError: Header, footer or trailer are damaged, or the file was truncated, belongs to another store or has
            another id.
        UnsupportedFormatError: It is sound but of another format.
        FileNotFoundError: It does not exist.

    Threads: any. Cost: the footer is read and checked, 40 bytes for each record.
    """

    def __init__(self, fs: FileSystem, path: str, store_id: bytes, file_id: int) -> None:
        self._path = path
        self._fs = fs
        self._data = fs.view(path)
        self._check_header(store_id, file_id)
        footer_offset, self.rows = self._read_footer(file_id)
        self._records = self._data[:footer_offset]

    def _corrupt(self, offset: int, what: str) -> NoReturn:
        raise self._error(offset, what)

    def _error(self, offset: int, what: str) -> CorruptError:
        return CorruptError(
            f"{self._path}: {what} at offset {offset}; restore the file from a backup", path=self._path, offset=offset
        )

    def _check_header(self, store_id: bytes, file_id: int) -> None:
        data = self._data
        if len(data) < _HEADER_BYTES + _TRAILER_BYTES:
            self._corrupt(
                len(data), f"the file ends before the {_HEADER_BYTES + _TRAILER_BYTES} bytes that it has at least"
            )
        populate(self._fs, data, 0, _HEADER_BYTES)
        magic, version, found_store, found_file = _HEADER.unpack_from(data)
        (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
        if magic != _HEADER_MAGIC or xxh3_64_intdigest(data[: _HEADER.size]) != expected:
            self._corrupt(0, f"no cold segment header with the magic {_HEADER_MAGIC!r} and a matching checksum")
        if version != COLD_FORMAT:
            raise UnsupportedFormatError(
                f"{self._path}: cold segment format {version}; this pybk reads {COLD_FORMAT}; open "
                "the store with the pybk that wrote it, or newer"
            )
        refuse_features(data, where=self._path)
        if found_store != store_id or found_file != file_id:
            self._corrupt(
                16, f"store {found_store.hex()} and file id {found_file}, expected {store_id.hex()} and {file_id},"
            )

    def _read_footer(self, file_id: int) -> tuple[int, RunLocations]:
        data = self._data
        at = len(data) - _TRAILER_BYTES
        populate(self._fs, data, at, len(data))
        magic, offset, count, footer_checksum = _TRAILER.unpack_from(data, at)
        (expected,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
        if magic != _TRAILER_MAGIC or xxh3_64_intdigest(data[at : at + _TRAILER.size]) != expected:
            self._corrupt(at, f"no trailer with the magic {_TRAILER_MAGIC!r} and a matching checksum")
        if offset + count * footer_dtype().itemsize != at:
            self._corrupt(at, f"a trailer that puts {count} rows at offset {offset}, which do not end")
        populate(self._fs, data, offset, at)
        footer = data[offset:at]
        if xxh3_64_intdigest(footer) != footer_checksum:
            self._corrupt(offset, "a footer with a wrong checksum")
        rows = np.frombuffer(footer, footer_dtype())
        ends = rows["offset"].astype(np.int64) + RECORD_HEADER_BYTES + rows["body"]
        starts = np.concatenate(([_HEADER_BYTES], ends + -ends % 8))
        if starts[-1] != offset or (starts[:-1] != rows["offset"]).any() or (rows["file"] != file_id).any():
            self._corrupt(offset, "a footer whose rows do not cover the records")
        return offset, rows

    def record(self, offset: int) -> tuple[RecordHeader, memoryview]:
        """Return the header and the checked plain body of the record at ``offset``.

        Raises:
            CorruptError: There is no sound record at this offset.
            UsageError: It is compressed and the extra ``pybk[zstd]`` is not installed.

        Cost: no copy of a plain body; the memory is the map's and stays valid for as long as it is referenced.
        """
        populate(self._fs, self._data, offset, offset + RECORD_HEADER_BYTES)
        header = decode_header(self._records, offset, where=self._path)
        start = offset + RECORD_HEADER_BYTES
        populate(self._fs, self._data, start, start + header.body_bytes)
        body = self._records[start : start + header.body_bytes]
        check_body(header, body, where=self._path)
        return header, memoryview(decompress(header, body))

    def verify(self) -> Iterator[CorruptError]:
        """Check every record and every byte of padding; yield an error for each that is damaged.

        Raises:
            UsageError: A body is compressed and the extra ``pybk[zstd]`` is not installed.
            UnsupportedFormatError: A record is sound but of another format.
        """
        begin = _HEADER.size + _CHECKSUM.size
        yield from self._check_zeros(begin, _HEADER_BYTES)
        for row in self.rows:
            end = int(row["offset"]) + RECORD_HEADER_BYTES + int(row["body"])
            try:
                self._check_record(row)
            except CorruptError as error:
                yield CorruptError(str(error), path=self._path, offset=int(row["offset"]))
            yield from self._check_zeros(end, end + -end % 8)

    def _check_record(self, row: np.void) -> None:
        offset = int(row["offset"])
        header, body = self.record(offset)
        entry_ends(body, header.entry_count, where=self._path)
        found = header.location(offset, 0)
        said = (RecordKind.ENTRIES, header.ledger_id, *found[:3], *found[5:])
        expected = (header.kind, *(int(row[name]) for name in ("ledger", "first", "count", "stride", "body", "flags")))
        if said != expected:
            self._corrupt(offset, f"a record of {said}, but the footer says {expected},")

    def _check_zeros(self, start: int, end: int) -> Iterator[CorruptError]:
        populate(self._fs, self._data, start, end)
        used = bytes(self._data[start:end]).lstrip(b"\0")
        if used:
            yield self._error(end - len(used), "padding that is not zero")


def salvage_rows(fs: FileSystem, path: str, store_id: bytes, file_id: int) -> RunLocations:
    """Return footer rows for the records of a damaged segment, up to the first damaged record header.

    Args:
        fs: The file system.
        path: The segment's path.
        store_id: The store it must belong to, 16 bytes.
        file_id: The id it must carry.

    Returns:
        ``(records,)`` of ``footer_dtype()``; empty if the file has, or seems to have, another store or id.

    Raises:
        FileNotFoundError: It does not exist.
    """
    data = fs.view(path)
    rows: list[tuple[int, ...]] = []
    if len(data) >= _HEADER_BYTES:
        populate(fs, data, 0, _HEADER_BYTES)
        _, _, found_store, found_file = _HEADER.unpack_from(data)
        (expected,) = _CHECKSUM.unpack_from(data, _HEADER.size)
        whole = xxh3_64_intdigest(data[: _HEADER.size]) == expected
        same = (found_store == store_id, found_file == file_id)
        at = _HEADER_BYTES if all(same) or (any(same) and not whole) else len(data)
        while at < len(data):
            populate(fs, data, at, at + RECORD_HEADER_BYTES)
            try:
                header = decode_header(data, at, where=path)
            except CorruptError:
                break
            rows.append((header.ledger_id, *header.location(at, file_id)))
            at += RECORD_HEADER_BYTES + header.body_bytes
            at += -at % 8
    return np.array(rows, footer_dtype())
