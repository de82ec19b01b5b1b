"""Print a store's files record by record, without checking them as ``verify`` does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final

from pybk.errors import CookieError, PybkError
from pybk.storage.directories import main_cookie, store_directories
from pybk.storage.format.cold_segment import ColdSegment, salvage_rows
from pybk.storage.format.entries_mark import ENTRIES_MARK_KEY, read_entries_mark
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import BLOCK_BYTES, decode_file_header
from pybk.storage.format.record import RECORD_HEADER_BYTES, RecordHeader, RecordKind, RunLocations, decode_header
from pybk.storage.format.watermark import Watermark
from pybk.storage.index.catalog_files import newest_catalog
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from pybk.storage.log.replay import OpenLogFile, scan_commits
from pybk.storage.readonly import open_environment_read_only
from pybk.storage.tiers.tier import COLD, ENTRIES, LOG
from pybk.storage.volumes import Volumes

_KEY_END: Final = b"\xff" * 17

Row = dict[str, Any]


def dump_store(path: str) -> Iterator[Row]:
    """Yield what lies in a store's directories: a row per file, commit and record.

    The store may be open for writing meanwhile.

    Every row has a ``what``: store, directory, catalog, ledger, file, commit, record, problem. A record is ``sound`` if
    its body has its checksum; None if that was not looked at.

    Args:
        path: The store's directory.

    Raises:
        CookieError: There is no store, or a directory is not what it should be.
        CorruptError: A cookie is damaged.
    """
    fs = OsFileSystem()
    root = os.path.abspath(path)
    cookie = main_cookie(fs, root)
    if cookie is None:
        raise CookieError(f"there is no store at {root}; name the directory that LedgerManager.open was given")
    volumes = Volumes(fs, root, store_directories(fs, root, cookie, None))
    durable = _durable_lsn(fs, root, cookie.store_id)
    yield {"what": "store", "path": root, "store": cookie.store_id.hex(), "durable_lsn": durable}
    for directory in volumes.directories:
        yield {"what": "directory", "tier": directory.tier.value, "number": directory.number, "path": directory.path}
    entries: list[FileRow] = []
    try:
        state = newest_catalog(fs, root, cookie.store_id)
    except PybkError as error:
        yield {"what": "problem", "message": str(error)}
    else:
        yield {"what": "catalog", **state.mark._asdict()}
        for ledger in state.ledgers.values():
            yield {
                "what": "ledger",
                "ledger": ledger.metadata.ledger_id,
                "state": ledger.metadata.state.value,
                "last_checkpointed": ledger.last_entry_id,
                "last_add_confirmed": ledger.last_add_confirmed,
                "bytes": ledger.length,
            }
        for named in state.named.values():
            yield {"what": "named", "name": named.name, "version": named.version, "bytes": len(named.value or b"")}
        entries = [row for row in state.files.values() if row.kind == ENTRIES]
    for row in (*volumes.found(LOG).values(), *volumes.found(COLD).values(), *entries):
        yield from _dump_file(volumes, row, cookie.store_id)


def _durable_lsn(fs: FileSystem, root: str, store_id: bytes) -> int | None:
    """Return the watermark, None if it cannot be read."""
    try:
        watermark = Watermark.open(fs, os.path.join(root, "watermark"), store_id, writable=False)
    except (PybkError, OSError):
        return None  # dump only prints; verify reports damage
    try:
        return watermark.durable_lsn()
    finally:
        watermark.close()


def _dump_file(volumes: Volumes, row: FileRow, store_id: bytes) -> Iterator[Row]:
    path = volumes.path_of(row)
    yield {"what": "file", "file": f"{row.file_id:016x}", "kind": row.kind, "bytes": row.bytes, "path": path}
    dump = {LOG: _dump_log, COLD: _dump_cold, ENTRIES: _dump_entries}[row.kind]
    try:
        yield from dump(volumes, row, store_id)
    except (PybkError, FileNotFoundError) as error:
        yield {"what": "problem", "message": str(error)}


def _dump_log(volumes: Volumes, row: FileRow, store_id: bytes) -> Iterator[Row]:
    file = OpenLogFile.load(volumes.fs, row.file_id, volumes.path_of(row))
    header = decode_file_header(file.data, store_id=store_id, file_id=file.file_id, where=file.path)
    if header is None:
        return
    for commit in scan_commits(file, BLOCK_BYTES, header.first_lsn):
        yield {
            "what": "commit",
            "lsn": commit.lsn,
            "durable_lsn": commit.durable_lsn,
            "offset": commit.offset,
            "bytes": commit.size,
            "records": len(commit.records),
        }
        for record in commit.records:
            yield {**_record_row(record.header, record.body_start - RECORD_HEADER_BYTES), "sound": record.sound}


def _dump_cold(volumes: Volumes, row: FileRow, store_id: bytes) -> Iterator[Row]:
    path = volumes.path_of(row)
    try:
        rows: RunLocations = ColdSegment(volumes.fs, path, store_id, row.file_id).rows
    except PybkError as error:
        yield {"what": "problem", "message": str(error)}
        rows = salvage_rows(volumes.fs, path, store_id, row.file_id)
    data = volumes.fs.view(path)
    for offset in rows["offset"].tolist():
        volumes.populate(data, offset, offset + RECORD_HEADER_BYTES)
        yield {**_record_row(decode_header(data, offset, where=path), offset), "sound": None}


def _dump_entries(volumes: Volumes, row: FileRow, store_id: bytes) -> Iterator[Row]:
    path = volumes.path_of(row)
    environment = open_environment_read_only(path)
    try:
        with environment.read() as transaction:
            for key, value in transaction.items(b"\0", _KEY_END):
                if key == ENTRIES_MARK_KEY:
                    yield {"what": "entries mark", **read_entries_mark(transaction)._asdict()}
                    continue
                yield {**_record_row(decode_header(memoryview(value), 0, where=path), 0), "sound": None}
    finally:
        environment.close()


def _record_row(header: RecordHeader, offset: int) -> Row:
    return {
        "what": "record",
        "offset": offset,
        "kind": RecordKind(header.kind).name.lower() if header.kind in list(RecordKind) else header.kind,
        "ledger": header.ledger_id,
        "first": header.first_entry_id,
        "count": header.entry_count,
        "lsn": header.lsn,
        "codec": header.codec,
        "bytes": header.body_bytes,
    }
