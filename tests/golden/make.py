"""Makes the golden files of records, log files and cold segments: `make.py DIRECTORY`, when a format changes."""

from __future__ import annotations

import sys
from pathlib import Path

from pybk.storage.format.cold_segment import ColdSegmentWriter
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    RecordKind,
    encode_commit_header,
    encode_control,
    encode_entries,
    encode_file_header,
    padding,
)
from pybk.storage.io.filesystem import OsFileSystem

STORE_ID = bytes(range(16))


def records(lsn: int = 0) -> bytes:
    """Return one record of each sort."""
    single = encode_entries(5, 0, [5], [b"first"], lsn=lsn)
    several = encode_entries(5, 1, [3, 0, 4], [b"abc", b"defg"], lsn=lsn)
    stepped = encode_entries(6, 10, [1, 1], [b"x", b"y"], lsn=lsn, stride=7)
    controls = (
        encode_control(RecordKind.LEDGER, 5, 3, b'{"metadata": 1}', lsn=lsn),
        encode_control(RecordKind.DELETE, 6, 0, lsn=lsn),
        encode_control(RecordKind.FORCE, 5, 2, lsn=lsn),
        encode_control(RecordKind.MARK, -1, 0, b"{}", lsn=lsn),
    )
    return b"".join((*single, *several, *stepped, *controls))


def log_file() -> bytes:
    """Return a log file of two commits and a block that was not written."""
    parts = [encode_file_header(STORE_ID, 7, 41, 40)]
    for lsn, body, count in ((41, records(41), 7), (42, b"".join(encode_entries(5, 4, [4], [b"last"], lsn=42)), 1)):
        commit = encode_commit_header(lsn, lsn - 1, 7, count, len(body)) + body
        parts.append(commit + bytes(padding(len(commit))))
    return b"".join((*parts, bytes(BLOCK_BYTES)))


def cold_segment(path: Path, file_id: int, *, compressed: bool) -> None:
    """Write a segment of three records."""
    writer = ColdSegmentWriter(OsFileSystem(), str(path), STORE_ID, file_id, compression="zstd" if compressed else None)
    writer.add(5, 0, [5], [b"first"])
    writer.add(5, 1, [300, 0, 4], [b"a" * 300, b"defg"])
    writer.add(6, 10, [1, 1], [b"x", b"y"], 7)
    writer.finish()


def make(directory: Path) -> None:
    """Write all golden files to a directory where they are not."""
    (directory / "records").write_bytes(records())
    (directory / "0000000000000007.log").write_bytes(log_file())
    cold_segment(directory / "0000000000000009.cold", 9, compressed=False)
    cold_segment(directory / "000000000000000a.cold", 10, compressed=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
