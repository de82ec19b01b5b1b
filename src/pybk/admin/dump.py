"""Print a store's files record by record, without checking them as ``verify`` does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from pybk.errors import CookieError, PybkError, UnsupportedFormatError
from pybk.storage.directories import find_cookie, lost_cookie, store_directories
from pybk.storage.format.catalog import newest_catalog
from pybk.storage.format.cookie import COOKIE_NAME
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import BLOCK_BYTES, RECORD_HEADER_BYTES, Watermark, decode_file_header
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from pybk.storage.log.recovery import OpenLogFile, scan_commits
from pybk.storage.readonly import open_environment_read_only
from pybk.storage.tiers import LOG, DumpRow, OpenedFiles, dumped_record
from pybk.storage.volumes import Volumes, tier_of_kind


def dump_store(path: str, *, contents: bool = True) -> Iterator[DumpRow]:
    """Yield the contents of a store's directories: a row for each file, commit and record.

    The store may be open for writing meanwhile.

    Every row has a ``what``: store, directory, catalog, ledger, file, commit, record, problem. A record is ``sound`` if
    its body has its checksum; None if that was not checked.

    Args:
        path: The store's directory.
        contents: Whether the contents of files are read; if False, there is only a row for each file.

    Raises:
        CookieError: There is no store, or a directory is not the expected one.
        CorruptError: A cookie is damaged.
    """
    fs = OsFileSystem()
    root = os.path.abspath(path)
    cookie = find_cookie(fs, root, None)
    if cookie is None:
        raise CookieError(f"there is no store at {root}; name the directory that LedgerManager.open was given")
    volumes = Volumes(fs, root, store_directories(fs, root, cookie, None))
    durable = _durable_lsn(fs, root, cookie.store_id)
    yield {"what": "store", "path": root, "store": cookie.store_id.hex(), "durable_lsn": durable}
    if not fs.exists(os.path.join(root, COOKIE_NAME)):
        yield {"what": "problem", "message": lost_cookie(root)}
    for directory in volumes.directories:
        yield {"what": "directory", "tier": directory.tier.value, "number": directory.number, "path": directory.path}
    environments: list[FileRow] = []  # they do not carry their ids
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
        for row in state.files.values():
            try:
                if volumes.tier_of(row).uses_environments:
                    environments.append(row)
            except UnsupportedFormatError as error:
                yield {"what": "problem", "message": str(error)}
    files = OpenedFiles(fs, cookie.store_id, volumes, {})
    for row in (*volumes.found().values(), *environments):
        volumes.add(row)
        if contents:
            yield from _dump_file(files, row)
        else:
            yield _file_row(files, row)


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


def _file_row(files: OpenedFiles, row: FileRow) -> DumpRow:
    path = files.volumes.path_of(row)
    return {"what": "file", "file": f"{row.file_id:016x}", "kind": row.kind, "bytes": row.bytes, "path": path}


def _dump_file(files: OpenedFiles, row: FileRow) -> Iterator[DumpRow]:
    tier = tier_of_kind(row.kind)
    yield _file_row(files, row)
    try:
        if row.kind == LOG:
            yield from _dump_log(files, row)
        elif tier.uses_environments:
            yield from _dump_environment(files, row)
        else:
            yield from tier.dump(files, row)
    except (PybkError, FileNotFoundError) as error:
        yield {"what": "problem", "message": str(error)}


def _dump_environment(files: OpenedFiles, row: FileRow) -> Iterator[DumpRow]:
    """Yield what an LMDB environment holds; it is open only meanwhile."""
    environment = open_environment_read_only(files.volumes.path_of(row))
    try:
        yield from tier_of_kind(row.kind).dump(replace(files, entries={row.file_id: environment}), row)
    finally:
        environment.close()


def _dump_log(files: OpenedFiles, row: FileRow) -> Iterator[DumpRow]:
    """Yield the commits of a log file and their records."""
    file = OpenLogFile.load(files.fs, row.file_id, files.volumes.path_of(row))
    header = decode_file_header(file.data, store_id=files.store_id, file_id=file.file_id, where=file.path)
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
            yield dumped_record(record.header, record.body_start - RECORD_HEADER_BYTES, sound=record.sound)
