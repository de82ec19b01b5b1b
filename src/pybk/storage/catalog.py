"""The catalog: what the index is rebuilt from, besides the entries.

A catalog is a header block and then checkpoints, one behind the other. A checkpoint is the records of the ledgers that
changed, and then, on a block of its own, its mark. The mark is written once the records are durable, so:

    A whole mark proves that everything before it was durable. Damage before it is corruption, never a torn write.
    What follows the last whole mark was never acknowledged. It is ignored, and made zeros before anything is appended.

Checkpoints are numbered from 1, and each of their records carries the number, so one cannot be taken for another.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, StorageFailedError, UnsupportedFormatError
from pybk.storage.failures import syncing
from pybk.storage.filesystem import File, FileSystem
from pybk.storage.index_rows import (
    FileRow,
    LedgerRow,
    Mark,
    Totals,
    decode_state,
    dump_json,
    encode_state,
    file_row,
    load_json,
    mark_of,
)
from pybk.storage.logfile import BLOCK_BYTES, padding
from pybk.storage.record import (
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    check_body,
    decode_header,
    encode_control,
)

CATALOG_FORMAT: Final = 1

_MAGIC: Final = b"PYBKCAT1"
_MARK_HEAD: Final = encode_control(RecordKind.MARK, 0, 0)[:4]
_HEADER: Final = struct.Struct("<8sI4x16sQ16x")
_CHECKSUM: Final = struct.Struct("<Q")
_PIECE_BYTES: Final = 1 << 20
_REWRITE_BYTES_MIN: Final = 4 << 20
_FILE_ROW_BYTES: Final = 160
_ROW_BYTES: Final = RECORD_HEADER_BYTES + 24
_REMEDY: Final = "restore the file from a backup"


class CatalogState(NamedTuple):
    """What a catalog says: ledgers and files by id, and the mark, whose ``catalog_bytes`` is how far it was read."""

    ledgers: dict[int, LedgerRow]
    files: dict[int, FileRow]
    mark: Mark


class _Checkpoint(NamedTuple):
    """One checkpoint: the encoded rows of ledgers that changed, None for those dropped; its mark; where it ends."""

    changes: dict[int, bytes | None]
    mark: bytes
    end: int


class CatalogWriter:
    """Appends checkpoints to a catalog file.

    Threads: one at a time.
    """

    def __init__(self, file: File, path: str, file_id: int, length: int, number: int) -> None:
        """Use ``create`` or ``resume``."""
        self._file = file
        self._path = path
        self._file_id = file_id
        self._length = length
        self._number = number
        self._before = length, number
        self._unclean = file.size > length
        self._failed = False

    @classmethod
    def create(cls, fs: FileSystem, path: str, store_id: bytes, file_id: int) -> CatalogWriter:
        """Begin a new catalog, durable on return; it says nothing before its first checkpoint.

        Args:
            fs: Where the file lies.
            path: Its path; no file may be there.
            store_id: The 16 bytes of the store.
            file_id: The id that the marks will name.

        Raises:
            OSError: Perhaps the file is there, and holds no checkpoint.
        """
        file = fs.create(path, 0)
        try:
            file.write((_encode_file_header(store_id, file_id),), 0)
            with syncing(path):
                file.sync()
                fs.sync_directory(os.path.dirname(path))
        except BaseException:
            file.close()
            raise
        return cls(file, path, file_id, BLOCK_BYTES, 0)

    @classmethod
    def resume(cls, fs: FileSystem, path: str, store_id: bytes, file_id: int, length: int) -> CatalogWriter:
        """Continue a catalog behind the checkpoint that ends at ``length``.

        What stands beyond is durably gone on return. Call it before anything that a checkpoint beyond might name is
        removed. Costs one read of the last mark.

        Raises:
            CorruptError: No checkpoint ends at ``length``, or the file is another one's.
            OSError: What stands beyond may still be there.
        """
        file = fs.open(path, writable=True)
        try:
            _check_file_header(file.read(0, BLOCK_BYTES), store_id, file_id, path)
            writer = cls(file, path, file_id, length, _number_of_mark_before(file, length, path))
            writer._clear_beyond()
        except BaseException:
            file.close()
            raise
        return writer

    @property
    def path(self) -> str:
        """Where the file lies."""
        return self._path

    @property
    def length(self) -> int:
        """Bytes up to the end of the last checkpoint."""
        return self._length

    def append(self, ledgers: Iterable[LedgerRow], dropped: Iterable[int], mark: Mark, files: Iterable[FileRow]) -> int:
        """Append a checkpoint; durable on return. Costs two syncs, one if no ledger changed.

        Args:
            ledgers: Ledgers that are new or changed, as they are.
            dropped: Ledgers that are no more.
            mark: The mark; its catalog file id and bytes are of no matter here.
            files: All files of the store.

        Returns:
            The new length in bytes, which the index's mark has to name.

        Raises:
            OSError: The checkpoint is not there; a failed write may be tried again, a failed sync may not.
            StorageFailedError: A sync failed before.
        """
        if self._failed:
            raise StorageFailedError(
                f"{self._path}: a sync failed before; close the store, mend the device, open it again"
            )
        self._clear_beyond()
        self._unclean = True
        self._before = self._length, self._number
        number = self._number + 1
        offset, count = self._write_records(self._records(ledgers, dropped, number))
        body = dump_json({**mark._asdict(), "files": [row._asdict() for row in files]})
        record = encode_control(RecordKind.MARK, 0, count, body, lsn=number)
        self._file.write((record, bytes(padding(len(record)))), offset)
        self._sync()
        self._unclean = False
        self._length = offset + len(record) + padding(len(record))
        self._number = number
        return self._length

    def take_back(self) -> None:
        """Unsay the last ``append``, done or failed, for the index did not follow; durably gone on return.

        Raises:
            OSError: It may still be there. The next ``append`` clears it away first.
        """
        self._length, self._number = self._before
        self._unclean = True
        self._clear_beyond()

    def close(self) -> None:
        """Close the file; what was appended is durable already."""
        self._file.close()

    def _records(self, ledgers: Iterable[LedgerRow], dropped: Iterable[int], number: int) -> Iterator[bytes]:
        for row in ledgers:
            metadata = row.metadata
            yield encode_control(RecordKind.LEDGER, metadata.ledger_id, metadata.version, encode_state(row), lsn=number)
        for ledger_id in dropped:
            yield encode_control(RecordKind.DELETE, ledger_id, 0, lsn=number)

    def _write_records(self, records: Iterable[bytes]) -> tuple[int, int]:
        """Write and sync the records of a checkpoint; return the offset for its mark, and how many they were."""
        offset = self._length
        count = size = 0
        parts: list[bytes] = []
        for record in records:
            parts.append(record)
            size += len(record)
            count += 1
            if size >= _PIECE_BYTES:
                self._file.write(parts, offset)
                offset += size
                size = 0
                parts = []
        parts.append(bytes(padding(offset + size)))
        if count:
            self._file.write(parts, offset)
            self._sync()
        return offset + size + len(parts[-1]), count

    def _sync(self) -> None:
        try:
            with syncing(self._path):
                self._file.sync()
        except OSError:
            self._failed = True
            raise

    def _clear_beyond(self) -> None:
        """Make everything beyond the last checkpoint zeros: marks first, lest one outlives what it vouches for."""
        if not self._unclean:
            return
        marks = []
        stale = False
        for offset in range(self._length, self._file.size, BLOCK_BYTES):
            block = self._file.read(offset, BLOCK_BYTES)
            stale = stale or not _is_zeros(block)
            if block.startswith(_MARK_HEAD):
                marks.append(offset)
        for offset in marks:
            self._file.write((bytes(RECORD_HEADER_BYTES),), offset)
        if marks:
            self._sync()
        if stale:
            self._file.write_zeros(self._length, self._file.size - self._length)
            self._sync()
        self._unclean = False


def read_catalog(fs: FileSystem, path: str, store_id: bytes, file_id: int, *, at_least: int = 0) -> CatalogState:
    """Read a catalog up to its last whole checkpoint.

    Args:
        fs: Where the file lies.
        path: Its path.
        store_id: The 16 bytes of the store that it must belong to.
        file_id: The id that it must carry.
        at_least: Bytes that are known to be sound, as the index's mark says; 0 if nothing is known. Only this tells a
            last mark that was damaged from one that was never finished.

    Returns:
        What it says. Takes memory for the whole file.

    Raises:
        CorruptError: It is damaged before a whole mark or before ``at_least``, has no checkpoint, or is another file.
        UnsupportedFormatError: It is of a newer format.
        OSError: It cannot be read.
    """
    file = fs.open(path)
    try:
        data = memoryview(file.read(0, file.size))
    finally:
        file.close()
    _check_file_header(data, store_id, file_id, path)
    states: dict[int, bytes] = {}
    mark: bytes | None = None
    end = BLOCK_BYTES
    for number in itertools.count(1):
        try:
            checkpoint = _parse_checkpoint(data, end, number, path)
        except CorruptError as error:
            _check_is_tail(data, end, number, at_least, error, path)
            break
        for ledger_id, state in checkpoint.changes.items():
            if state is None:
                states.pop(ledger_id, None)
            else:
                states[ledger_id] = state
        mark, end = checkpoint.mark, checkpoint.end
    if mark is None:
        raise CorruptError(f"{path}: no whole checkpoint in {len(data)} bytes; {_REMEDY}")
    fields = load_json(mark, where=path)
    return CatalogState(
        {ledger_id: decode_state(ledger_id, state, where=path) for ledger_id, state in sorted(states.items())},
        _files_of(fields, path),
        mark_of(fields, where=path)._replace(catalog_file_id=file_id, catalog_bytes=end),
    )


def rewrite_is_due(catalog_bytes: int, totals: Totals) -> bool:
    """Tell whether more than half of a catalog is history, so that a new one should take its place.

    Args:
        catalog_bytes: Its length.
        totals: What the index counts.

    Returns:
        Never True for a catalog below 4 MiB, nor for one that was just written with one checkpoint.
    """
    live = 2 * BLOCK_BYTES + totals.ledgers * _ROW_BYTES + totals.metadata_bytes + totals.files * _FILE_ROW_BYTES
    return catalog_bytes > max(_REWRITE_BYTES_MIN, 2 * live)


def _encode_file_header(store_id: bytes, file_id: int) -> bytes:
    head = _HEADER.pack(_MAGIC, CATALOG_FORMAT, store_id, file_id)
    return (head + _CHECKSUM.pack(xxh3_64_intdigest(head))).ljust(BLOCK_BYTES, b"\0")


def _check_file_header(data: bytes | memoryview, store_id: bytes, file_id: int, path: str) -> None:
    """Raise unless a file begins with the header block of this catalog."""
    block = bytes(data[:BLOCK_BYTES])
    size = _HEADER.size
    if len(block) < BLOCK_BYTES or _CHECKSUM.unpack_from(block, size)[0] != xxh3_64_intdigest(block[:size]):
        raise CorruptError(f"{path}: no catalog header in the first {len(block)} bytes; {_REMEDY}")
    magic, version, found_store, found_file = _HEADER.unpack_from(block)
    if magic != _MAGIC or not _is_zeros(block[size + _CHECKSUM.size :]):
        raise CorruptError(f"{path}: no catalog header: it begins with {magic!r}; {_REMEDY}")
    if version != CATALOG_FORMAT:
        raise UnsupportedFormatError(
            f"{path}: catalog format {version}; this pybk reads {CATALOG_FORMAT}; open the store with the pybk that "
            "wrote it, or newer"
        )
    if found_store != store_id or found_file != file_id:
        raise CorruptError(
            f"{path}: the catalog of store {found_store.hex()} with file id {found_file}, expected store "
            f"{store_id.hex()} and file id {file_id}; put the right file in its place"
        )


def _is_zeros(piece: bytes | memoryview) -> bool:
    return bytes(piece) == bytes(len(piece))


def _parse_checkpoint(data: memoryview, start: int, number: int, path: str) -> _Checkpoint:
    """Decode one checkpoint; CorruptError if it is not all there and sound."""
    changes: dict[int, bytes | None] = {}
    offset = start
    count = 0
    while True:
        gap = data[offset : offset + padding(offset)]
        if _is_zeros(gap):
            offset += len(gap)
        header, body = _record(data, offset, path)
        end = offset + RECORD_HEADER_BYTES + len(body)
        if header.lsn != number:
            raise CorruptError(
                f"{path}: a record of checkpoint {header.lsn} at offset {offset}, in checkpoint {number}"
            )
        if header.kind == RecordKind.MARK:
            break
        if header.kind not in (RecordKind.LEDGER, RecordKind.DELETE):
            raise CorruptError(f"{path}: a record of kind {header.kind} at offset {offset}")
        changes[header.ledger_id] = bytes(body) if header.kind == RecordKind.LEDGER else None
        count += 1
        offset = end
    if header.first_entry_id != count:
        raise CorruptError(f"{path}: the mark at offset {offset} closes {header.first_entry_id} records, not {count}")
    return _Checkpoint(changes, bytes(body), _mark_end(data, offset, body, path))


def _mark_end(data: memoryview, offset: int, body: memoryview, path: str) -> int:
    """Return where the blocks of a mark end; CorruptError if they are not all there."""
    end = offset + RECORD_HEADER_BYTES + len(body)
    rest = data[end : end + padding(end)]
    if offset % BLOCK_BYTES or len(rest) < padding(end) or not _is_zeros(rest):
        raise CorruptError(f"{path}: the mark at offset {offset} is not followed by {padding(end)} zeros")
    return end + len(rest)


def _record(data: memoryview, offset: int, path: str) -> tuple[RecordHeader, memoryview]:
    """Return header and body of a record; CorruptError if it is not sound."""
    header = decode_header(data, offset, where=path)
    start = offset + RECORD_HEADER_BYTES
    body = data[start : start + header.body_bytes]
    check_body(header, body, where=path)
    return header, body


def _check_is_tail(data: memoryview, end: int, number: int, at_least: int, error: CorruptError, path: str) -> None:
    """Raise unless what follows the last whole checkpoint was never acknowledged."""
    if end < at_least:
        raise CorruptError(
            f"{path}: sound up to {end} bytes, but {at_least} bytes were written and synced ({error}); {_REMEDY}"
        ) from error
    for offset in range(end, len(data), BLOCK_BYTES):
        if bytes(data[offset : offset + len(_MARK_HEAD)]) != _MARK_HEAD:
            continue
        try:
            header, body = _record(data, offset, path)
            _mark_end(data, offset, body, path)
        except CorruptError:
            continue  # never finished, or damaged itself: it proves nothing
        if header.lsn >= number:
            raise CorruptError(
                f"{path}: damaged behind {end} bytes, before the mark of checkpoint {header.lsn} at offset {offset} "
                f"({error}); {_REMEDY}"
            ) from error


def _number_of_mark_before(file: File, length: int, path: str) -> int:
    """Return the number of the checkpoint that ends at ``length``."""
    if length <= file.size and length % BLOCK_BYTES == 0:
        for offset in range(length - BLOCK_BYTES, 0, -BLOCK_BYTES):
            if file.read(offset, len(_MARK_HEAD)) != _MARK_HEAD:
                continue
            data = memoryview(file.read(offset, length - offset))
            header, body = _record(data, 0, path)
            size = RECORD_HEADER_BYTES + len(body)
            if size + padding(size) == len(data):
                return header.lsn
    raise CorruptError(
        f"{path}: no checkpoint ends at {length} of {file.size} bytes, but the index names one; {_REMEDY}"
    )


def _files_of(fields: dict[str, Any], path: str) -> dict[int, FileRow]:
    """Return the files that a mark names, by id."""
    rows = fields.get("files")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CorruptError(f"{path}: a mark without a list of files; {_REMEDY}")
    files = [file_row(row, where=path) for row in rows]
    return {row.file_id: row for row in files}
