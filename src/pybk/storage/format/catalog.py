"""The catalog file: together with the entries' files, the source from which the index can be rebuilt.

A catalog is a header block, followed by checkpoints. A checkpoint is the records of the ledgers that changed, and then,
on a block of its own, its mark. The mark is written after the records are durable, so:

    A whole mark proves that everything before it was durable. Damage before it is corruption, never a torn write.
    Bytes after the last whole mark were never acknowledged. They are ignored, and zeroed before the next append.

Checkpoints are numbered from 1, and each of their records carries the number, so one cannot be taken for another.

Two formats are read and written. In format 1 (level BASE) each mark repeats the rows of all files. In format 2 (level
SEALS) a mark has no file rows: a checkpoint holds a record for each file whose row changed, and one for each named
record that changed. The catalog's header repeats the store's salt, scrypt cost and level, so each of catalog and cookie
can be restored from the other.

A store has one file for each catalog in its main directory, named by the file id; ``newest_catalog`` chooses.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, PybkError, StorageFailedError, UnsupportedFormatError
from pybk.feature_level import FeatureLevel
from pybk.storage.format.cookie import RESTORED_FORMAT, Cookie, check_known, format_of
from pybk.storage.format.index_rows import (
    CheckpointMark,
    EncodedLedger,
    FileRow,
    LedgerRow,
    NamedRow,
    Totals,
    decode_mark_fields,
    decode_named,
    decode_state,
    dump_json,
    encode_named,
    encode_state,
    file_row,
    load_json,
)
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    check_body,
    decode_header,
    encode_control,
    padding,
)
from pybk.storage.io.failures import syncing
from pybk.storage.io.filesystem import File, FileSystem, allocate_file

logger = logging.getLogger(__name__)

CATALOG_FORMATS: Final = {FeatureLevel.BASE: 1, FeatureLevel.SEALS: 2, FeatureLevel.STREAMS: 2, FeatureLevel.SECRETS: 2}
"""The format of the catalog at each feature level, for a store that was never restored from a backup."""

_MAGIC: Final = b"PYBKCAT1"
_MARK_HEAD: Final = encode_control(RecordKind.MARK, 0, 0)[:4]
_HEADER: Final = struct.Struct("<8sI4x16sQ16x")
_HEADER_2: Final = struct.Struct("<8sII16sQII16sQ")
_CHECKSUM: Final = struct.Struct("<Q")
_PIECE_BYTES: Final = 1 << 20
REWRITE_BYTES_MIN: Final = 4 << 20
"""A catalog of fewer bytes is not written anew."""

_RESERVE_BYTES: Final = 512 << 10
"""The bytes that are allocated at a time for checkpoints to come, besides those that are asked for."""

SPARE_BYTES: Final = 1 << 20
"""The bytes of a catalog that is begun while there is no free space."""

_FILE_ROW_BYTES: Final = 160
_ROW_BYTES: Final = RECORD_HEADER_BYTES + 24
_REMEDY: Final = "restore the file from a backup"
_BASE_KINDS: Final = frozenset({RecordKind.LEDGER, RecordKind.DELETE})
_SEALS_KINDS: Final = _BASE_KINDS | {RecordKind.FILE, RecordKind.NAMED}
_KINDS: Final = {1: _BASE_KINDS, 2: _SEALS_KINDS, RESTORED_FORMAT: _SEALS_KINDS}
"""The kinds of records before a mark, by format."""


class CatalogState(NamedTuple):
    """The content of a catalog: ledgers and files by id, named records by name, and the last mark.

    The mark's ``catalog_bytes`` is the offset up to which the catalog was read.
    """

    ledgers: dict[int, LedgerRow]
    files: dict[int, FileRow]
    named: dict[str, NamedRow]
    mark: CheckpointMark


class CatalogHeader(NamedTuple):
    """The decoded first block of a catalog.

    Attributes:
        store_id: The 16 bytes of the store.
        file_id: The catalog's id.
        format: 1, 2, or 3 for a store that was restored from a backup.
        level: The store's feature level when the catalog was begun.
        salt: The store's scrypt salt; None in format 1.
        scrypt_cost: scrypt's N; None in format 1.
        incarnation: As in ``Cookie``; 0 below format 3.
    """

    store_id: bytes
    file_id: int
    format: int
    level: FeatureLevel
    salt: bytes | None
    scrypt_cost: int | None
    incarnation: int = 0


class _Rows:
    """The encoded rows of a catalog up to some checkpoint."""

    def __init__(self) -> None:
        self.ledgers: dict[int, bytes] = {}
        self.files: dict[int, bytes] = {}
        self.named: dict[str, NamedRow] = {}

    def apply(self, changes: _Rows, gone: list[tuple[int, int | str]]) -> None:
        """Apply a checkpoint: add the rows that it puts, and drop those that it removes."""
        self.ledgers.update(changes.ledgers)
        self.files.update(changes.files)
        self.named.update(changes.named)
        for kind, key in gone:
            self._of(kind).pop(key, None)

    def _of(self, kind: int) -> dict[Any, Any]:
        rows: dict[int, dict[Any, Any]] = {
            RecordKind.DELETE: self.ledgers,
            RecordKind.FILE: self.files,
            RecordKind.NAMED: self.named,
        }
        return rows[kind]


class _Checkpoint(NamedTuple):
    """One checkpoint: the rows that it puts, the kinds and keys of those that it removes, its mark, its end offset."""

    changes: _Rows
    gone: list[tuple[int, int | str]]
    mark: bytes
    end: int


class CatalogWriter:
    """Appends checkpoints to a catalog file.

    Threads: one at a time.
    """

    def __init__(self, file: File, path: str, form: int, length: int, number: int) -> None:
        """Use ``create``, ``examine`` or ``resume``."""
        self._file = file
        self._path = path
        self.format = form
        self._length = length
        self._number = number
        self._before = length, number
        self._unclean = file.size > length
        self._failed = False

    @classmethod
    def create(
        cls,
        fs: FileSystem,
        path: str,
        store_id: bytes,
        file_id: int,
        *,
        cookie: Cookie | None = None,
        spare: str | None = None,
    ) -> CatalogWriter:
        """Create a catalog without a checkpoint; its name is durable on return, its header with the first checkpoint.

        Args:
            fs: The file system.
            path: The catalog's path; must not exist.
            store_id: The 16 bytes of the store.
            file_id: The id that the marks will name.
            cookie: The store's main cookie, which decides the format; None stands for level BASE.
            spare: A file in the same directory that is to become the catalog, with its blocks; None makes a file.

        Raises:
            OSError: The file may exist, without a checkpoint.
        """
        form = CATALOG_FORMATS[FeatureLevel.BASE] if cookie is None else format_of(cookie, CATALOG_FORMATS)
        header = (_encode_file_header(store_id, file_id, cookie),)
        file = fs.create(path, 0) if spare is None else _emptied(fs, spare)
        try:
            file.write(header, 0)
            if spare is not None:
                fs.rename(spare, path)
            with syncing(path):
                fs.sync_directory(os.path.dirname(path))
        except BaseException:
            file.close()
            raise
        return cls(file, path, form, BLOCK_BYTES, 0)

    @classmethod
    def examine(cls, fs: FileSystem, path: str, store_id: bytes, file_id: int, length: int) -> CatalogWriter:
        """Open a catalog to append after the checkpoint that ends at ``length``; changes nothing on disk.

        Call ``clear`` before removing any file that a checkpoint beyond ``length`` may name.
        Costs one read of the last mark.

        Raises:
            CorruptError: No checkpoint ends at ``length``, or the file belongs to another store or has another id.
        """
        file = fs.open(path, writable=True)
        try:
            header = _check_file_header(file.read(0, BLOCK_BYTES), store_id, file_id, path)
            number, _ = _mark_before(file, length, path)
            return cls(file, path, header.format, length, number)
        except BaseException:
            file.close()
            raise

    @classmethod
    def resume(cls, fs: FileSystem, path: str, store_id: bytes, file_id: int, length: int) -> CatalogWriter:
        """Open a catalog after the checkpoint that ends at ``length`` and zero the rest: ``examine``, then ``clear``.

        Raises:
            CorruptError: No checkpoint ends at ``length``, or the file belongs to another store or has another id.
            OSError: Bytes beyond it may still exist.
        """
        writer = cls.examine(fs, path, store_id, file_id, length)
        try:
            writer.clear()
        except BaseException:
            writer.close()
            raise
        return writer

    def last_mark(self) -> CheckpointMark:
        """Return the mark of the last checkpoint as it was appended; its catalog id and bytes are not checked."""
        _, body = _mark_before(self._file, self._length, self._path)
        return decode_mark_fields(load_json(body, where=self._path), where=self._path)

    def goes_further(self) -> bool:
        """Return whether a later checkpoint's whole mark lies beyond the last one; reads the bytes beyond."""
        for offset in range(self._length, self._file.size, BLOCK_BYTES):
            if self._file.read(offset, len(_MARK_HEAD)) != _MARK_HEAD:
                continue
            data = memoryview(self._file.read(offset, self._file.size - offset))
            if _whole_mark(data, 0, self._path) > self._number:
                return True
        return False

    @property
    def path(self) -> str:
        """The catalog's path."""
        return self._path

    @property
    def length(self) -> int:
        """Bytes up to the end of the last checkpoint."""
        return self._length

    def append(
        self,
        ledgers: Iterable[LedgerRow | EncodedLedger],
        dropped: Iterable[int],
        mark: CheckpointMark,
        files: Iterable[FileRow],
        *,
        changed: Iterable[FileRow] = (),
        gone: Iterable[int] = (),
        named: Iterable[NamedRow] = (),
    ) -> int:
        """Append a checkpoint; durable on return. Costs two syncs, one if there are no records before the mark.

        Args:
            ledgers: Rows of new and changed ledgers.
            dropped: Deleted ledgers.
            mark: The mark; its catalog file id and bytes are ignored.
            files: All files of the store; used by format 1 only.
            changed: Files that are new or whose rows changed; used by format 2 only.
            gone: Files that were removed from the store; used by format 2 only.
            named: Named records that changed; one without a value was deleted. Used by format 2 only.

        Returns:
            The new length in bytes, for the index's mark.

        Raises:
            OSError: The checkpoint was not appended. A failed write may be tried again, a failed sync may not.
            StorageFailedError: An earlier sync failed.
        """
        if self._failed:
            raise StorageFailedError(
                f"{self._path}: a sync failed before; close the store, mend the device, open it again"
            )
        self.clear()
        self._unclean = True
        self._before = self._length, self._number
        number = self._number + 1
        records = _ledger_records(ledgers, dropped, number)
        fields: dict[str, Any] = mark._asdict()
        if self.format == CATALOG_FORMATS[FeatureLevel.BASE]:
            fields["files"] = [row._asdict() for row in files]
        else:
            records = itertools.chain(records, _other_records(changed, gone, named, number))
        offset, count = self._write_records(records)
        record = encode_control(RecordKind.MARK, 0, count, dump_json(fields), lsn=number)
        self._file.write((record, bytes(padding(len(record)))), offset)
        self._sync()
        self._unclean = False
        self._length = offset + len(record) + padding(len(record))
        self._number = number
        return self._length

    def reserve(self, fs: FileSystem, nbytes: int) -> None:
        """Allocate the space for checkpoints of ``nbytes`` and more; OSError if there is too little."""
        if self.reserved_bytes(fs) < nbytes:
            self._file.reserve(self._length + nbytes + _RESERVE_BYTES)

    def reserved_bytes(self, fs: FileSystem) -> int:
        """Return the bytes by which the catalog can grow without free space."""
        return max(0, fs.disk_bytes(self._path) - self._length)

    def take_back(self) -> None:
        """Undo the last ``append``, complete or failed, because the index was not updated; durable on return.

        Raises:
            OSError: The checkpoint may still exist. The next ``append`` removes it first.
        """
        self._length, self._number = self._before
        self._unclean = True
        self.clear()

    def close(self) -> None:
        """Close the file; every completed append is durable already."""
        self._file.close()

    def _write_records(self, records: Iterable[bytes]) -> tuple[int, int]:
        """Write and sync the records of a checkpoint; return the offset for its mark and the number of records."""
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

    def clear(self) -> None:
        """Zero everything beyond the last checkpoint, durably: marks first, because none may outlive its records.

        Raises:
            OSError: Bytes beyond it may still exist.
        """
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


def _emptied(fs: FileSystem, spare: str) -> File:
    """Zero a file that was a catalog, or is to be one, durably, in its own blocks; return it, open for writing."""
    # How it got its name must be durable first: a catalog that the index names must not be the same file.
    with syncing(spare):
        fs.sync_directory(os.path.dirname(spare))
    file = fs.open(spare, writable=True)
    try:
        file.write_zeros(0, max(file.size, SPARE_BYTES))
        with syncing(spare):
            file.sync()
    except BaseException:
        file.close()
        raise
    return file


def read_catalog(fs: FileSystem, path: str, store_id: bytes, file_id: int, *, at_least: int = 0) -> CatalogState:
    """Read a catalog up to its last whole checkpoint.

    Args:
        fs: The file system.
        path: The catalog's path.
        store_id: The 16 bytes of the store that it must belong to.
        file_id: The id that it must carry.
        at_least: Bytes that were durable according to the index's mark; 0 if unknown. Only this distinguishes a last
            mark that was damaged later from one that was never finished.

    Returns:
        The catalog's content. Takes memory for the whole file.

    Raises:
        CorruptError: It is damaged before a whole mark or before ``at_least``, has no checkpoint, or is another file.
        UnsupportedFormatError: It is of a newer format.
        OSError: It cannot be read.
    """
    header, rows, mark, end = _read(fs, path, store_id, file_id, at_least)
    fields = load_json(mark, where=path)
    if header.format == CATALOG_FORMATS[FeatureLevel.BASE]:
        files = _files_of(fields, path)
    else:
        files = {file_id: file_row(load_json(row, where=path), where=path) for file_id, row in rows.files.items()}
    return CatalogState(
        {ledger_id: decode_state(ledger_id, state, where=path) for ledger_id, state in sorted(rows.ledgers.items())},
        dict(sorted(files.items())),
        dict(sorted(rows.named.items())),
        decode_mark_fields(fields, where=path)._replace(catalog_file_id=file_id, catalog_bytes=end),
    )


def check_catalog(fs: FileSystem, path: str, store_id: bytes, file_id: int, *, at_least: int) -> CheckpointMark:
    """Check that every record of a catalog is whole and sound, without decoding the ledgers; return its last mark.

    Raises as ``read_catalog`` does. Costs about 4 µs for each record.
    """
    _, _, mark, end = _read(fs, path, store_id, file_id, at_least)
    return decode_mark_fields(load_json(mark, where=path), where=path)._replace(
        catalog_file_id=file_id, catalog_bytes=end
    )


def read_header(fs: FileSystem, path: str) -> CatalogHeader:
    """Return the decoded header block of a catalog of any store.

    Raises:
        CorruptError: It is damaged.
        UnsupportedFormatError: It is of a newer format.
        OSError: It cannot be read.
    """
    with closing(fs.open(path)) as file:
        return _decode_file_header(file.read(0, min(file.size, BLOCK_BYTES)), path)


def _read(
    fs: FileSystem, path: str, store_id: bytes, file_id: int, at_least: int
) -> tuple[CatalogHeader, _Rows, bytes, int]:
    """Return header, rows, last mark and its end of a catalog; raises as ``read_catalog`` does."""
    with closing(fs.open(path)) as file:
        # First, because another file in its place, of whatever size, must not fill the memory.
        header = _check_file_header(file.read(0, min(file.size, BLOCK_BYTES)), store_id, file_id, path)
        data = memoryview(file.read(0, file.size))
    rows = _Rows()
    mark: bytes | None = None
    end = BLOCK_BYTES
    for number in itertools.count(1):
        try:
            checkpoint = _parse_checkpoint(data, end, number, path, header.format)
        except CorruptError as error:
            _check_is_tail(data, end, number, at_least, error, path)
            break
        rows.apply(checkpoint.changes, checkpoint.gone)
        mark, end = checkpoint.mark, checkpoint.end
    if mark is None:
        raise CorruptError(f"{path}: no whole checkpoint in {len(data)} bytes; {_REMEDY}")
    return header, rows, mark, end


def rewrite_is_due(catalog_bytes: int, totals: Totals) -> bool:
    """Return whether more than half of a catalog is superseded rows; then a new one should replace it.

    Args:
        catalog_bytes: The catalog's length.
        totals: The numbers of rows in the index.

    Returns:
        Never True for a catalog below 4 MiB, nor for one that was just written with one checkpoint.
    """
    return catalog_bytes > max(REWRITE_BYTES_MIN, 2 * _live_bytes(totals))


def fits_in_spare(totals: Totals, named_bytes: int) -> bool:
    """Return whether a new catalog of these rows takes half of a spare file at most."""
    return 2 * (_live_bytes(totals) + totals.named * _ROW_BYTES + named_bytes) <= SPARE_BYTES


def _live_bytes(totals: Totals) -> int:
    return 2 * BLOCK_BYTES + totals.ledgers * _ROW_BYTES + totals.metadata_bytes + totals.files * _FILE_ROW_BYTES


def _ledger_records(
    ledgers: Iterable[LedgerRow | EncodedLedger], dropped: Iterable[int], number: int
) -> Iterator[bytes]:
    for row in ledgers:
        if isinstance(row, LedgerRow):
            row = EncodedLedger(row.metadata.ledger_id, row.metadata.version, encode_state(row))
        yield encode_control(RecordKind.LEDGER, row.ledger_id, row.version, row.state, lsn=number)
    for ledger_id in dropped:
        yield encode_control(RecordKind.DELETE, ledger_id, 0, lsn=number)


def _other_records(
    changed: Iterable[FileRow], gone: Iterable[int], named: Iterable[NamedRow], number: int
) -> Iterator[bytes]:
    """Yield the records that only format 2 has: a file's row, or an empty body if it is gone; a named record."""
    for row in changed:
        yield encode_control(RecordKind.FILE, row.file_id, 1, dump_json(row._asdict()), lsn=number)
    for file_id in gone:
        yield encode_control(RecordKind.FILE, file_id, 0, lsn=number)
    for one in named:
        yield encode_control(RecordKind.NAMED, -1, one.version, encode_named(one), lsn=number)


def _encode_file_header(store_id: bytes, file_id: int, cookie: Cookie | None) -> bytes:
    if cookie is None or cookie.level is FeatureLevel.BASE:
        head = _HEADER.pack(_MAGIC, 1, store_id, file_id)
    else:
        salt, cost = cookie.salt, cookie.scrypt_cost
        assert salt is not None, "above level BASE every cookie has the salt and the cost"
        assert cost is not None, "above level BASE every cookie has the salt and the cost"
        form, level, incarnation = format_of(cookie, CATALOG_FORMATS), cookie.level, cookie.incarnation
        head = _HEADER_2.pack(_MAGIC, form, 0, store_id, file_id, level, cost, salt, incarnation)
    return (head + _CHECKSUM.pack(xxh3_64_intdigest(head))).ljust(BLOCK_BYTES, b"\0")


def _decode_file_header(data: bytes | memoryview, path: str) -> CatalogHeader:
    """Decode the header block of a catalog; raises as ``read_header`` does."""
    block = bytes(data[:BLOCK_BYTES])
    if len(block) < BLOCK_BYTES:
        raise CorruptError(f"{path}: no catalog header in the first {len(block)} bytes; {_REMEDY}")
    magic, version = block[:8], int.from_bytes(block[8:12], "little")
    layout = _HEADER if version == 1 else _HEADER_2
    size = layout.size
    if _CHECKSUM.unpack_from(block, size)[0] != xxh3_64_intdigest(block[:size]) or magic != _MAGIC:
        raise CorruptError(f"{path}: no catalog header: it begins with {magic!r}; {_REMEDY}")
    if version not in _KINDS:
        raise UnsupportedFormatError(
            f"{path}: catalog format {version}; this pybk reads {max(_KINDS)} and older; open the "
            "store with the pybk that wrote it, or newer"
        )
    if not _is_zeros(block[size + _CHECKSUM.size :]):
        raise CorruptError(f"{path}: the catalog header is followed by bytes that are not zero; {_REMEDY}")
    if version == 1:
        _, _, store_id, file_id = layout.unpack_from(block)
        return CatalogHeader(store_id, file_id, version, FeatureLevel.BASE, None, None)
    _, _, features, store_id, file_id, level, cost, salt, incarnation = layout.unpack_from(block)
    if bool(incarnation) != (version == RESTORED_FORMAT):
        raise CorruptError(f"{path}: a catalog header of format {version} with incarnation {incarnation}; {_REMEDY}")
    known = check_known(level, features, where=path)
    return CatalogHeader(store_id, file_id, version, known, salt, cost, incarnation)


def _check_file_header(data: bytes | memoryview, store_id: bytes, file_id: int, path: str) -> CatalogHeader:
    """Return the header of a catalog; raise unless it is the catalog of this store with this id."""
    header = _decode_file_header(data, path)
    if header.store_id != store_id or header.file_id != file_id:
        raise CorruptError(
            f"{path}: the catalog of store {header.store_id.hex()} with file id {header.file_id}, expected store "
            f"{store_id.hex()} and file id {file_id}; put the right file in its place"
        )
    return header


def _is_zeros(piece: bytes | memoryview) -> bool:
    return bytes(piece) == bytes(len(piece))


def _parse_checkpoint(data: memoryview, start: int, number: int, path: str, form: int) -> _Checkpoint:
    """Decode one checkpoint; CorruptError if it is incomplete or damaged."""
    changes = _Rows()
    gone: list[tuple[int, int | str]] = []
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
        if header.kind not in _KINDS[form]:
            raise CorruptError(f"{path}: a record of kind {header.kind} at offset {offset}")
        _take_record(header, bytes(body), changes, gone, f"{path} at offset {offset}")
        count += 1
        offset = end
    if header.first_entry_id != count:
        raise CorruptError(f"{path}: the mark at offset {offset} closes {header.first_entry_id} records, not {count}")
    return _Checkpoint(changes, gone, bytes(body), _mark_end(data, offset, body, path))


def _take_record(
    header: RecordHeader, body: bytes, changes: _Rows, gone: list[tuple[int, int | str]], where: str
) -> None:
    """Add a checkpoint's record to the rows that it puts or removes. Each key occurs once in a checkpoint."""
    if header.kind == RecordKind.LEDGER:
        changes.ledgers[header.ledger_id] = body
    elif header.kind == RecordKind.DELETE:
        gone.append((RecordKind.DELETE, header.ledger_id))
    elif header.kind == RecordKind.FILE and header.first_entry_id:
        changes.files[header.ledger_id] = body
    elif header.kind == RecordKind.FILE:
        gone.append((RecordKind.FILE, header.ledger_id))
    else:
        row = decode_named(header.first_entry_id, body, where=where)
        if row.value is None:
            gone.append((RecordKind.NAMED, row.name))
        else:
            changes.named[row.name] = row


def _mark_end(data: memoryview, offset: int, body: memoryview, path: str) -> int:
    """Return the end offset of a mark's blocks; CorruptError if the file ends before it."""
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
    """Raise ``error`` unless the bytes after the last whole checkpoint were never acknowledged."""
    if end < at_least:
        raise CorruptError(
            f"{path}: sound up to {end} bytes, but {at_least} bytes were written and synced ({error}); {_REMEDY}"
        ) from error
    for offset in range(end, len(data), BLOCK_BYTES):
        if bytes(data[offset : offset + len(_MARK_HEAD)]) != _MARK_HEAD:
            continue
        checkpoint = _whole_mark(data, offset, path)
        if checkpoint >= number:
            raise CorruptError(
                f"{path}: damaged after {end} bytes, before the mark of checkpoint {checkpoint} at offset {offset} "
                f"({error}); {_REMEDY}"
            ) from error


def _whole_mark(data: memoryview, offset: int, path: str) -> int:
    """Return the number of the checkpoint whose whole mark is at an offset; 0 for none: it proves nothing then."""
    try:
        header, body = _record(data, offset, path)
        _mark_end(data, offset, body, path)
    except CorruptError:
        return 0
    return header.lsn


def _mark_before(file: File, length: int, path: str) -> tuple[int, bytes]:
    """Return the number and the mark's body of the checkpoint that ends at ``length``."""
    if length <= file.size and length % BLOCK_BYTES == 0:
        for offset in range(length - BLOCK_BYTES, 0, -BLOCK_BYTES):
            if file.read(offset, len(_MARK_HEAD)) != _MARK_HEAD:
                continue
            data = memoryview(file.read(offset, length - offset))
            header, body = _record(data, 0, path)
            size = RECORD_HEADER_BYTES + len(body)
            if size + padding(size) == len(data):
                return header.lsn, bytes(body)
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


CATALOG_PREFIX: Final = "catalog-"
_SPARE: Final = "reserve-catalog"
_SPARE_BYTES_MAX: Final = 8 * SPARE_BYTES
_FILE_ID: Final = re.compile("[0-9a-f]{16}")


def catalog_path(root: str, file_id: int) -> str:
    """Return the path of a catalog file."""
    return os.path.join(root, f"{CATALOG_PREFIX}{file_id:016x}")


def spare_path(root: str) -> str:
    """Return the path of the file that is allocated for a catalog that is begun while there is no free space."""
    return os.path.join(root, _SPARE)


def has_spare(fs: FileSystem, root: str) -> bool:
    """Return whether the spare file is there, with its blocks."""
    path = spare_path(root)
    return fs.exists(path) and fs.disk_bytes(path) >= SPARE_BYTES


def make_spare(fs: FileSystem, root: str) -> None:
    """Allocate the spare file if there is none.

    Raises:
        StorageRefusedError: There is no space or descriptor, or making it failed; it is removed again.
        OSError: Syncing the directory failed.
    """
    if has_spare(fs, root):
        return
    allocate_file(fs, spare_path(root), SPARE_BYTES)
    with syncing(root):
        fs.sync_directory(root)


def remove_catalog(fs: FileSystem, path: str) -> None:
    """Remove a catalog that nothing names: it becomes the spare file if that is missing, and has the blocks for it.

    Raises:
        OSError: It is still there.
    """
    spare, size = spare_path(os.path.dirname(path)), fs.file_bytes(path)
    if size > _SPARE_BYTES_MAX or fs.disk_bytes(path) < max(size, SPARE_BYTES) or fs.exists(spare):
        fs.unlink(path)
    else:
        fs.rename(path, spare)


def catalog_ids(fs: FileSystem, root: str) -> list[int]:
    """Return the ids of the catalog files in a store's directory, ascending."""
    names = fs.list_directory(root)
    stems = (name.removeprefix(CATALOG_PREFIX) for name in names if name.startswith(CATALOG_PREFIX))
    return sorted(int(stem, 16) for stem in stems if _FILE_ID.fullmatch(stem))


def newest_catalog(fs: FileSystem, root: str, store_id: bytes) -> CatalogState:
    """Return the contents of the newest intact catalog in a store's directory; others may be unfinished or damaged.

    Raises:
        CorruptError: No catalog is intact.
    """
    states: list[CatalogState] = []
    errors: list[str] = []
    for file_id in catalog_ids(fs, root):
        try:
            states.append(read_catalog(fs, catalog_path(root, file_id), store_id, file_id))
        except PybkError as error:
            errors.append(str(error))
    if not states:
        raise CorruptError(
            f"{root} has no whole catalog, so nothing says which ledgers there are; restore it from a backup: "
            f"{'; '.join(errors) or 'no file begins with ' + CATALOG_PREFIX}"
        )
    for problem in errors:
        logger.warning("a catalog was passed over: %s", problem)
    return max(states, key=lambda state: (state.mark.next_lsn, state.mark.next_file_id, state.mark.catalog_file_id))
