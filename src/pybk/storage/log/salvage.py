"""What is left of a store that lost something durable: for a bookie, which gets the rest from its peers.

Opening a store fails where it is unknown what is lost. Salvage continues instead, takes what is beyond doubt, and
reports what it passed over. It changes nothing on disk but the files' times and an LMDB environment that is missing:
that is begun with a note next to it, so that a process that stops before it has recorded the loss finds the same again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import CorruptError
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    LogFileHeader,
    decode_commit_header,
    decode_file_header,
    file_header_is_whole,
    padding,
)
from pybk.storage.format.watermark import Watermark
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.log.recovery import RecoveredLog, ReplayTarget, apply_commit, log_files
from pybk.storage.log.replay import OpenLogFile, ReplayedCommit, lsn_after, proven_durable, scan_commits, units_of

if TYPE_CHECKING:
    from pybk.storage.volumes import Volumes

_LSN_MAX: Final = (1 << 64) - 1
_NEW_WATERMARK: Final = "watermark.new"
_TOLD_MAX: Final = 10
"""So many of the dropped records are reported one by one."""


class SalvageReport(NamedTuple):
    """What opening a store passed over.

    Attributes:
        lost: What is missing or cannot be read, and where, a sentence each.
        missing: Files that the index names and that are not there.
        files: The log files from the mark on, with the bytes used in each.
        new_watermark: Whether another watermark waits to take the place of one that is missing or damaged.
    """

    lost: tuple[str, ...]
    missing: tuple[FileRow, ...]
    files: tuple[tuple[FileRow, int], ...]
    new_watermark: bool


class SalvagedLog:
    """One pass over a log with gaps: iterate for its commits, each with its file, then ask what was lost.

    It takes less than ``Replay`` would, where it cannot know. Behind a damaged commit header, nothing of a file is
    taken: a commit that is looked for there might be bytes that a client chose. Of a file without a sound header
    nothing is taken, either: whether the log was ever in it, its header alone would say. A damaged commit counts only
    if the one behind it says that it was durable: where a file is missing, it may have been torn and left behind.

    Args:
        files: All files from the mark on, in file-id order, loaded as they are asked for.
        first_lsn: LSN expected first.
        durable_lsn: Highest LSN that the watermark or the index says was durable.
        store_id: The 16 bytes of the store.

    Attributes:
        lost: What was passed over so far, a sentence each.
        next_lsn: LSN of the next commit to write; above all that may have been given before.

    Iterating raises:
        CorruptError: A file belongs elsewhere.
        UnsupportedFormatError: Something sound is of another format.

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
            last = _LSN_MAX if following is None else following[1].first_lsn - 1
            for commit in self._commits(file, last):
                yield file, commit
        self._skip_to(self._durable + 1)

    def _skip_to(self, lsn: int) -> None:
        """Take note that the commits below an LSN are missing, if they are."""
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
        """Yield the commits of one file up to an LSN, but for those whose records cannot be separated."""
        offset = BLOCK_BYTES
        while self.next_lsn <= last:
            lsn = self.next_lsn
            self._where = f"{file.path} from offset {offset}"
            head = decode_commit_header(file.data, offset, file.file_id)
            if head is None or head.lsn != lsn:
                return
            size = COMMIT_HEADER_BYTES + head.body_bytes
            behind = offset + size + padding(size)
            found = next(scan_commits(file, offset, lsn, lsn), None)
            if found is None or not found.sound:
                after = decode_commit_header(file.data, behind, file.file_id)
                if after is None or after.lsn != lsn + 1:
                    return
            self.next_lsn, offset = lsn + 1, behind
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
    """Do what ``recover_log`` does, as far as the log goes; log files without a header stay.

    Args:
        ledgers: Takes the state.
        volumes: The store's directories.
        store_id: The 16 bytes of the store.
        first_file_id: Log files from this id on are read.
        first_lsn: LSN of the first commit in them.
        durable_lsn: Highest LSN known to be durable.
        rewrite_beyond: As for ``recover_log``.

    Returns:
        The log, what was lost, and an id above those of all ledgers that the log names.

    Raises:
        CorruptError: A log file belongs elsewhere, or the index is damaged.
    """
    rows = log_files(volumes, first_file_id)
    paths = ((file_id, volumes.path_of(row)) for file_id, row in rows.items())
    files = (OpenLogFile.load(volumes.fs, file_id, path) for file_id, path in paths)
    log = SalvagedLog(files, first_lsn=first_lsn, durable_lsn=durable_lsn, store_id=store_id)
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
                if dropped_count <= _TOLD_MAX:
                    dropped.append(str(error))
        used[commit.file_id] = commit.offset + commit.size
        commits += 1
        if rewrite_beyond is not None and commit.lsn > rewrite_beyond:
            again.append(commit)
    if dropped_count > _TOLD_MAX:
        dropped.append(f"{dropped_count - _TOLD_MAX} records more go on with nothing that is there")
    ends = [(row, used.get(file_id, BLOCK_BYTES)) for file_id, row in rows.items()]
    recovered = RecoveredLog(log.next_lsn, ends, commits, (), tuple(again))
    return recovered, log.lost + dropped, next_ledger_id


def open_watermark(fs: FileSystem, root: str, store_id: bytes, lost: list[str] | None) -> Watermark:
    """Open a store's watermark.

    Args:
        fs: Where.
        root: The store's directory.
        store_id: The 16 bytes of the store.
        lost: None unless the store is salvaged: then a missing or damaged watermark is reported here, and another one
            opened, which ``keep_watermark`` puts in its place. And what the watermark says is on disk on return:
            else a power failure might take away what shows that commits are missing.

    Raises:
        CorruptError: It is missing or damaged, and the store is not salvaged.
    """
    path = os.path.join(root, "watermark")
    if lost is None:
        return Watermark.open(fs, path, store_id, writable=True)
    try:
        watermark = Watermark.open(fs, path, store_id, writable=True)
    except CorruptError as error:
        lost.append(str(error))
        return Watermark.create(fs, os.path.join(root, _NEW_WATERMARK), store_id)
    file = fs.open(path, writable=True)
    file.sync()
    file.close()
    return watermark


def keep_watermark(fs: FileSystem, root: str) -> None:
    """Put a new watermark in the place of the one that was missing or damaged, durably."""
    fs.rename(os.path.join(root, _NEW_WATERMARK), os.path.join(root, "watermark"))
    fs.sync_directory(root)


def replace_missing(volumes: Volumes, rows: Iterable[FileRow]) -> None:
    """Put placeholders in the places of missing files, durably; LMDB environments come last.

    Their entries are still known, and reading those fails, as with any damaged file.
    """
    for row in sorted(rows, key=lambda row: volumes.tier_of(row).uses_environments):
        volumes.tier_of(row).replace_missing(volumes.fs, volumes.path_of(row))
        volumes.fs.sync_directory(volumes.directory_of(row))
