"""Salvage: open a store that lost durable data, and report the loss. Bookies do so: their peers have copies.

Theory of operation. An ordinary open replays the log and fails with CorruptError where it is unknown which entries are
lost. Salvage takes only commits that are beyond doubt, skips the others, and reports each loss in a sentence.

1. :func:`open_watermark` opens the watermark, or makes a new one next to a missing or damaged one. It syncs the old
   one, because the watermark may be the only evidence that commits are missing.
2. :class:`SalvagedLog` reads the log files in the order of their ids. A file's header says which LSN its first commit
   has, so a gap between two files is known by its LSNs. A file without a sound header is skipped. Within a file, a
   damaged commit header ends the file, because any later "commit" might be bytes of an entry, which clients choose.
3. :func:`salvage_log` applies each commit unit by unit. A unit that the index or an earlier loss contradicts is dropped
   and reported. The next LSN and the next ledger id stay above all that the log names, so neither is used twice.
4. The store's owner records the loss durably, then calls ``Store.keep_salvage``: :func:`replace_missing` puts
   placeholders where files are missing, and :func:`keep_watermark` moves the new watermark to its place.

Why that is right: before the loss is recorded, nothing on disk changes but the files' times and a missing LMDB
environment. That one is created with a note next to it, so a process that stops in between finds the same loss again.
No lock is taken here: the caller holds the store's lock, and one thread runs all of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import CorruptError
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    LogFileHeader,
    Watermark,
    decode_commit_header,
    decode_file_header,
    file_header_is_whole,
    padding,
)
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.log.recovery import (
    LSN_MAX,
    OpenLogFile,
    RecoveredLog,
    ReplayedCommit,
    ReplayTarget,
    apply_commit,
    load_log_files,
    log_files,
    lsn_after,
    proven_durable,
    scan_commits,
    units_of,
)

if TYPE_CHECKING:
    from pybk.storage.volumes import Volumes

_NEW_WATERMARK: Final = "watermark.new"
_DROPPED_LISTED_MAX: Final = 10
"""Number of dropped records that are reported one by one; the others are only counted."""


class SalvageReport(NamedTuple):
    """The losses that a salvaging open found.

    Attributes:
        lost: A sentence for each loss: what is missing or unreadable, and where.
        missing: Files that the index names and that do not exist.
        files: The log files from the checkpoint mark on, with the bytes used in each.
        new_watermark: Whether a new watermark was made, because the old one is missing or damaged. ``keep_watermark``
            moves it to its place.
    """

    lost: tuple[str, ...]
    missing: tuple[FileRow, ...]
    files: tuple[tuple[FileRow, int], ...]
    new_watermark: bool


class SalvagedLog:
    """One pass over a log with gaps: iterate over its commits, each with its file, then read ``lost``.

    It takes fewer commits than ``Replay``, because it must not guess:

    - After a damaged commit header it takes nothing from the file: bytes there that look like a commit may be part of
      an entry, which a client chose.
    - It takes nothing from a file without a sound header, because only the header proves that the log used the file.
    - It takes a damaged commit only if the next commit follows, which proves that the damaged one was durable.
      Without that it may be a torn write that the log abandoned, if the file that would show this is missing.

    Args:
        files: All log files from the checkpoint mark on, in file-id order; each is loaded when it is needed.
        first_lsn: LSN of the first commit.
        durable_lsn: Highest LSN that the watermark or the index says was durable.
        store_id: The 16 bytes of the store.

    Attributes:
        lost: A sentence for each loss that was found so far.
        next_lsn: LSN of the next commit to write; above every LSN that may have been used.

    Iterating raises:
        CorruptError: A file belongs to another store.
        UnsupportedFormatError: A sound header is of another format.

    Threads: one.
    """

    def __init__(self, files: Iterable[OpenLogFile], *, first_lsn: int, durable_lsn: int, store_id: bytes) -> None:
        self._files = iter(files)
        self._store_id = store_id
        self._durable = durable_lsn
        self._where = "the log"
        self.next_lsn = first_lsn
        self.lost: list[str] = []

    def __iter__(self) -> Iterator[tuple[OpenLogFile, ReplayedCommit]]:
        """Yield commits in LSN order."""
        following = self._next_begun()
        while following is not None:
            file, header = following
            following = self._next_begun()
            if header.first_lsn < self.next_lsn:
                self.lost.append(
                    f"{file.path} begins with LSN {header.first_lsn}, which came before; it is passed over"
                )
                continue
            self._skip_to(header.first_lsn)
            last = LSN_MAX if following is None else following[1].first_lsn - 1
            for commit in self._commits(file, last):
                yield file, commit
        self._skip_to(self._durable + 1)

    def _skip_to(self, lsn: int) -> None:
        """Skip to ``lsn``; if commits below it were not read, report them as missing."""
        if self.next_lsn < lsn:
            self.lost.append(f"{self._where}: the commits {self.next_lsn} to {lsn - 1} are missing")
            self.next_lsn = lsn

    def _next_begun(self) -> tuple[OpenLogFile, LogFileHeader] | None:
        while (file := next(self._files, None)) is not None:
            try:
                header = decode_file_header(file.data, store_id=self._store_id, file_id=file.file_id, where=file.path)
            except CorruptError as error:
                if file_header_is_whole(file.data):
                    raise
                self.lost.append(f"{error}; nothing of it is taken")
                header = None
            first_lsn = lsn_after(self.next_lsn) if header is None else header.first_lsn
            self._durable = max(self._durable, proven_durable(file, BLOCK_BYTES, first_lsn))
            if header is not None:
                self._durable = max(self._durable, header.durable_lsn)
                return file, header
        return None

    def _commits(self, file: OpenLogFile, last: int) -> Iterator[ReplayedCommit]:
        """Yield the commits of one file up to LSN ``last``; report a durable one whose record headers are damaged."""
        offset = BLOCK_BYTES
        while self.next_lsn <= last:
            lsn = self.next_lsn
            self._where = f"{file.path} from offset {offset}"
            head = decode_commit_header(file.data, offset, file.file_id)
            if head is None or head.lsn != lsn:
                return
            size = COMMIT_HEADER_BYTES + head.body_bytes
            next_offset = offset + size + padding(size)
            found = next(scan_commits(file, offset, lsn, lsn), None)
            if found is None or not found.sound:
                after = decode_commit_header(file.data, next_offset, file.file_id)
                if after is None or after.lsn != lsn + 1:
                    return
            self.next_lsn, offset = lsn + 1, next_offset
            if found is None:
                self.lost.append(f"{self._where}: the records of commit {lsn} are damaged")
            else:
                yield found


def salvage_log(
    ledgers: ReplayTarget,
    volumes: Volumes,
    *,
    store_id: bytes,
    first_file_id: int,
    first_lsn: int,
    durable_lsn: int,
    rewrite_beyond: int | None,
) -> tuple[RecoveredLog, list[str], int]:
    """Recover a damaged log as far as possible: as ``recover_log``, but files without a sound header are not removed.

    Args:
        ledgers: The state that the commits are applied to.
        volumes: The store's directories.
        store_id: The 16 bytes of the store.
        first_file_id: Log files from this id on are read.
        first_lsn: LSN of the first commit in them.
        durable_lsn: Highest LSN known to be durable.
        rewrite_beyond: As for ``recover_log``.

    Returns:
        The recovered log, a sentence for each loss, and a ledger id above all that the log names.

    Raises:
        CorruptError: A log file belongs to another store, or the index is damaged.
    """
    rows = log_files(volumes, first_file_id)
    log = SalvagedLog(load_log_files(volumes, rows), first_lsn=first_lsn, durable_lsn=durable_lsn, store_id=store_id)
    used: dict[int, int] = {}
    again: list[ReplayedCommit] = []
    dropped: list[str] = []
    commits = next_ledger_id = dropped_count = 0
    for file, commit in log:
        next_ledger_id = max([next_ledger_id, *(record.header.ledger_id + 1 for record in commit.records)])
        for unit in units_of(commit.records):
            try:
                apply_commit(ledgers, file, commit._replace(records=unit))
            except CorruptError as error:
                dropped_count += 1
                if dropped_count <= _DROPPED_LISTED_MAX:
                    dropped.append(str(error))
        used[commit.file_id] = commit.offset + commit.size
        commits += 1
        if rewrite_beyond is not None and commit.lsn > rewrite_beyond:
            again.append(commit)
    if dropped_count > _DROPPED_LISTED_MAX:
        dropped.append(
            f"{dropped_count - _DROPPED_LISTED_MAX} more records continue ledgers whose earlier entries are missing"
        )
    ends = [(row, used.get(file_id, BLOCK_BYTES)) for file_id, row in rows.items()]
    recovered = RecoveredLog(log.next_lsn, ends, commits, (), tuple(again))
    return recovered, log.lost + dropped, next_ledger_id


def open_watermark(fs: FileSystem, root: str, store_id: bytes, lost: list[str]) -> Watermark:
    """Open the watermark of a store that is salvaged.

    A sound watermark is synced before the return, because after a power failure it may be the only evidence that
    commits are missing.

    Args:
        fs: The file system.
        root: The store's directory.
        store_id: The 16 bytes of the store.
        lost: A missing or damaged watermark is reported to it; a new one is made and returned then, and
            ``keep_watermark`` moves it to its place.
    """
    path = os.path.join(root, "watermark")
    try:
        watermark = Watermark.open(fs, path, store_id, writable=True)
    except CorruptError as error:
        lost.append(str(error))
        return Watermark.create(fs, os.path.join(root, _NEW_WATERMARK), store_id)
    with closing(fs.open(path, writable=True)) as file:
        file.sync()
    return watermark


def keep_watermark(fs: FileSystem, root: str) -> None:
    """Replace the missing or damaged watermark by the new one, durably."""
    fs.rename(os.path.join(root, _NEW_WATERMARK), os.path.join(root, "watermark"))
    fs.sync_directory(root)


def replace_missing(volumes: Volumes, rows: Iterable[FileRow]) -> None:
    """Create placeholders for missing files, durably; those of LMDB environments last.

    The index still names the entries of a missing file, and reading them fails as with any damaged file.
    """
    for row in sorted(rows, key=lambda row: volumes.tier_of(row).uses_environments):
        volumes.tier_of(row).replace_missing(volumes.fs, volumes.path_of(row))
        volumes.fs.sync_directory(volumes.directory_of(row))
