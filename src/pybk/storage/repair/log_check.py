"""Check every byte of log files, including the padding, which replay skips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pybk.errors import CorruptError
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    LogFileHeader,
    RecordHeader,
    decode_file_header,
)
from pybk.storage.log.recovery import OpenLogFile, ReplayedCommit, scan_commits
from pybk.storage.repair.inspection import kept_commits

_FILE_HEADER_BYTES: Final = 64


class LogProblem(NamedTuple):
    """Something wrong in a log file; ``header`` is that of the record whose body is damaged, None for anything else."""

    path: str
    file_id: int
    offset: int
    what: str
    header: RecordHeader | None = None


def check_kept_file(file: OpenLogFile, used_bytes: int, store_id: bytes) -> Iterator[LogProblem]:
    """Check a log file that a checkpoint kept.

    Args:
        file: The file.
        used_bytes: The end of its last commit.
        store_id: The 16 bytes of the store.

    Raises:
        UnsupportedFormatError: It is of another format.
    """
    header, problems = _check_header(file, store_id)
    yield from problems
    offset = BLOCK_BYTES
    for commit in kept_commits(file, used_bytes):
        if commit.offset != offset:
            yield LogProblem(file.path, file.file_id, offset, f"no commit in {commit.offset - offset} bytes")
        elif header is not None and offset == BLOCK_BYTES and commit.lsn != header.first_lsn:
            yield LogProblem(file.path, file.file_id, offset, f"commit {commit.lsn} and not {header.first_lsn}")
        yield from _check_commit(file, commit)
        offset = commit.offset + commit.size
    if offset != used_bytes:
        yield LogProblem(file.path, file.file_id, offset, f"no commit in {used_bytes - offset} bytes")


def check_log_from(
    files: Iterable[OpenLogFile], first_lsn: int, durable_lsn: int, store_id: bytes
) -> Iterator[LogProblem]:
    """Check the log from a mark on, up to what is durable; a file that was never begun is skipped.

    Args:
        files: Log files from the mark on, in file-id order.
        first_lsn: LSN expected first.
        durable_lsn: Last LSN to check.
        store_id: The 16 bytes of the store.

    Raises:
        UnsupportedFormatError: A file is of another format.
    """
    lsn, path, file_id, offset = first_lsn, "the log", 0, 0
    for file in files:
        header, problems = _check_header(file, store_id)
        if header is None:
            # The file may have been torn when it was begun; if commits are missing after it, it should have held them.
            if lsn <= durable_lsn and problems:
                yield from problems
            continue
        if header.first_lsn > durable_lsn:
            break
        yield from problems
        if header.first_lsn != lsn:
            yield LogProblem(file.path, file.file_id, 0, f"the first commit is {header.first_lsn} and not {lsn}")
        path, file_id, offset, lsn = file.path, file.file_id, BLOCK_BYTES, header.first_lsn
        for commit in scan_commits(file, offset, lsn, durable_lsn):
            yield from _check_commit(file, commit)
            offset, lsn = commit.offset + commit.size, commit.lsn + 1
    if lsn <= durable_lsn:
        yield LogProblem(path, file_id, offset, f"no commit {lsn}, but commits up to {durable_lsn} were durable,")


def _check_header(file: OpenLogFile, store_id: bytes) -> tuple[LogFileHeader | None, list[LogProblem]]:
    try:
        header = decode_file_header(file.data, store_id=store_id, file_id=file.file_id, where=file.path)
    except CorruptError as error:
        return None, [LogProblem(file.path, file.file_id, error.offset or 0, f"no sound file header ({error})")]
    return header, list(_check_zeros(file, _FILE_HEADER_BYTES, BLOCK_BYTES))


def _check_commit(file: OpenLogFile, commit: ReplayedCommit) -> Iterator[LogProblem]:
    """Check the bodies of a commit's records, and its padding."""
    for record in commit.records:
        if not record.sound:
            what = f"a damaged record of ledger {record.header.ledger_id}"
            yield LogProblem(file.path, file.file_id, record.body_start - RECORD_HEADER_BYTES, what, record.header)
    end = commit.records[-1].body_end if commit.records else commit.offset + COMMIT_HEADER_BYTES
    yield from _check_zeros(file, end, commit.offset + commit.size)


def _check_zeros(file: OpenLogFile, start: int, end: int) -> Iterator[LogProblem]:
    used = bytes(file.data[start:end]).lstrip(b"\0")
    if used:
        yield LogProblem(file.path, file.file_id, end - len(used), "padding that is not zero")
