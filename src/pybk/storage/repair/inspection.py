"""Read single records, and find all records of a file, even of a damaged one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pybk.errors import CorruptError
from pybk.storage.format.cold_segment import decompress, footer_dtype
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    RecordHeader,
    RecordKind,
    RunLocations,
    check_body,
    decode_commit_header,
    decode_header,
    location_dtype,
)
from pybk.storage.log.recovery import OpenLogFile, ReplayedCommit, scan_commits
from pybk.storage.tiers import LOG, TierFiles
from pybk.storage.volumes import tier_of_kind, tiers_by_kind

Run = tuple[int, int, int, int, int, int, int]
"""A row of ``location_dtype()``."""


class RecordReader:
    """Reads single records by run location, and checks everything except entry digests.

    Args:
        files: The opened files; ``files.volumes`` must know the rows of those that are read.

    Threads: any.
    """

    def __init__(self, files: TierFiles) -> None:
        self._files = files
        self._tiers = tiers_by_kind()

    def plain_body(self, ledger_id: int, run: Run) -> memoryview:
        """Return the plain body of a record, checked: its header, that it is the run's own, its checksum.

        Raises:
            KeyError, FileNotFoundError: The file or the record is not there.
            CorruptError: The record is damaged or another one.
            UsageError: It is compressed and the extra ``pybk[zstd]`` is not installed.
        """
        row = self._files.volumes.rows[run[4]]
        data, offset = self._tiers[row.kind].stored_record(self._files, ledger_id, run)
        header = self._header(ledger_id, run, data, offset)
        start = offset + RECORD_HEADER_BYTES
        body = data[start : start + header.body_bytes]
        check_body(header, body, where=self._files.volumes.path_of(row))
        return memoryview(decompress(header, body))

    def check_header(self, ledger_id: int, run: Run) -> None:
        """Check that a record is where its run location says, and whole; its body is not read.

        Raises:
            KeyError, FileNotFoundError: The file or the record is not there.
            CorruptError: The header is damaged, that of another record, or the file ends before the record does.
        """
        row = self._files.volumes.rows[run[4]]
        without_body = (*run[:5], 0, run[6])  # so that no byte of the body is brought into memory
        data, offset = self._tiers[row.kind].stored_record(self._files, ledger_id, without_body)
        header = self._header(ledger_id, run, data, offset)
        if offset + RECORD_HEADER_BYTES + header.body_bytes > len(data):
            where = self._files.volumes.path_of(row)
            raise CorruptError(f"{where}: the record at offset {offset} ends beyond the file; restore the file")

    def _header(self, ledger_id: int, run: Run, data: memoryview, offset: int) -> RecordHeader:
        """Return the header of a record, checked to be the one that a run location names."""
        first, count, stride, _, file_id, body_bytes, flags = run
        volumes = self._files.volumes
        where = volumes.path_of(volumes.rows[file_id])
        header = decode_header(data, offset, where=where)
        found = header.location(offset, file_id)
        said = (*found[:3], *found[5:])
        if header.ledger_id != ledger_id or header.kind != RecordKind.ENTRIES or said != (*run[:3], body_bytes, flags):
            raise CorruptError(
                f"{where}: the record at offset {offset} is ledger {header.ledger_id}, (first, count, stride, body, "
                f"flags) {said}, not ledger {ledger_id}, {(first, count, stride, body_bytes, flags)}; run "
                f"`pybk store rebuild-index {volumes.root}`, with --accept-loss to continue without the entries that "
                "it lists as missing"
            )
        return header


def locations_of(rows: RunLocations) -> RunLocations:
    """Return the run locations in footer rows, without the ledger ids."""
    runs = np.empty(len(rows), location_dtype())
    for name in location_dtype().names or ():
        runs[name] = rows[name]
    return runs


def file_rows(row: FileRow, files: TierFiles) -> RunLocations:
    """Return the records of entries that a file of the store holds, as ``(records,)`` of ``footer_dtype()``.

    Their headers are sound; their bodies were not looked at. Of a damaged file those are returned that can be found.

    Raises:
        FileNotFoundError: It is not there.
        UnsupportedFormatError: It is of a newer format.
    """
    if row.kind != LOG:
        return tier_of_kind(row.kind).rows(files, row)
    file = OpenLogFile.load(files.fs, row.file_id, files.volumes.path_of(row))
    return np.array(
        [
            (
                record.header.ledger_id,
                *record.header.location(record.body_start - RECORD_HEADER_BYTES, row.file_id),
            )
            for commit in kept_commits(file, row.bytes)
            for record in commit.records
            if record.header.kind == RecordKind.ENTRIES
        ],
        footer_dtype(),
    )


def kept_commits(file: OpenLogFile, used_bytes: int) -> Iterator[ReplayedCommit]:
    """Yield the commits of a log file whose used size is known; damaged parts are skipped.

    After damage, commits count again from the first one whose successors reach exactly ``used_bytes``. Bytes of
    an entry that look like a commit do not pass this test.

    Args:
        file: The file.
        used_bytes: The end of its last commit.

    Raises:
        UnsupportedFormatError: A sound header is of another format.
    """
    file = file._replace(data=file.data[:used_bytes])
    offset = BLOCK_BYTES
    head = decode_commit_header(file.data, offset, file.file_id)
    lsn = 0
    if head is not None:
        lsn = head.lsn
        for commit in scan_commits(file, offset, lsn):
            yield commit
            offset, lsn = commit.offset + commit.size, commit.lsn + 1
    for start in range(offset + BLOCK_BYTES, used_bytes, BLOCK_BYTES):
        head = decode_commit_header(file.data, start, file.file_id)
        if head is not None and head.lsn >= lsn and _end_of_chain(file, start, head.lsn) == used_bytes:
            yield from scan_commits(file, start, head.lsn)
            return


def _end_of_chain(file: OpenLogFile, offset: int, lsn: int) -> int:
    """Return where the commits from ``offset`` on cease to follow each other."""
    for commit in scan_commits(file, offset, lsn):
        offset = commit.offset + commit.size
    return offset
