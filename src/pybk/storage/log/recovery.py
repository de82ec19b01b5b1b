"""Recovery of the log: applies replayed commits to the ledgers in memory, and keeps doing so in a read-only store.

The index says what was true at the last checkpoint; its mark names the first log file and LSN after it. Recovery
reads the log from there (``replay.py`` decides where it ends) and applies commit by commit: metadata of a newer
version replaces older metadata, entries must continue their ledger without a gap, a group is checked whole before its
first record counts. It changes nothing on disk. Three steps follow for a store that will be written, in this order:

1. ``recover_log`` returns the next LSN, the files, and the commits that no watermark vouches for. After an unclean
   end those may be in the page cache alone, because a sync may have failed.
2. ``make_log_durable`` writes these commits again and syncs them, makes durable which files were unlinked, and removes
   files that were never begun.
3. The store moves the watermark and serves. No entry is served that a power failure could still take away.

A read-only store uses ``apply_commit`` alone, up to the watermark, again and again. No lock is taken here: the caller
of ``recover_log`` has the store for itself, and the read-only store holds its own.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.index_rows import FileRow, NamedRow, decode_named
from pybk.storage.format.log_file import BLOCK_BYTES
from pybk.storage.format.record import RECORD_HEADER_BYTES, RecordHeader, RecordKind, check_kind
from pybk.storage.log.replay import OpenLogFile, Replay, ReplayedCommit, ReplayedRecord, members_of
from pybk.storage.log.reserve import put_back
from pybk.storage.tiers.tier import LOG
from pybk.storage.volumes import Volumes

_LAC_AND_LENGTH: Final = struct.Struct(">qq")
_END: Final = struct.Struct("<I")


class ReplayTarget(Protocol):
    """The ledgers and named records to which the log is applied.

    Attributes:
        restored: Whether the store was restored from a backup.
    """

    restored: bool

    def replayed_ledger(self, ledger_id: int) -> LedgerDescriptor | None:
        """Return the descriptor of a ledger, deleted or not, and remember it as changed since the checkpoint."""

    def replayed_named(self, row: NamedRow) -> None:
        """Take a named record that the log changes."""

    def replayed_created(self, metadata: LedgerMetadata) -> LedgerDescriptor:
        """Make and remember the descriptor of a ledger that the log creates."""


def apply_commit(ledgers: ReplayTarget, file: OpenLogFile, commit: ReplayedCommit) -> None:
    """Bring ledgers to the state after a durable commit.

    The records of a group are checked before the first of them is applied, so that a group is applied whole or not at
    all. An entry whose bytes are damaged counts as applied: it stays known, and reading it fails.

    Raises:
        CorruptError: The commit contradicts what is known, or a control record is damaged.
        UnsupportedFormatError: A record is of a kind that this version does not know.
    """
    for number, record in enumerate(commit.records):
        kind = record.header.kind
        if kind == RecordKind.ENTRIES:
            _apply_entries(ledgers, file, record)
        elif kind == RecordKind.GROUP:
            check_control(record, where=file.path)
            for member in members_of(commit.records, number):
                _check_member(ledgers, file, member)
        elif kind == RecordKind.NAMED:
            ledgers.replayed_named(_named(file, record))
        else:
            check_control(record, where=file.path)
            if kind == RecordKind.LEDGER:
                _apply_metadata(ledgers, bytes(file.data[record.body_start : record.body_end]), file.path)
            else:
                _apply_control(ledgers, record.header, file.path)


def check_control(record: ReplayedRecord, *, where: str) -> None:
    """Raise unless a control record is of a known kind and whole.

    Args:
        record: A record of another kind than ENTRIES.
        where: The path of the log file, for errors.

    Raises:
        CorruptError: It is damaged, so the store cannot be opened.
        UnsupportedFormatError: It is of a kind that this version does not know.
    """
    header = record.header
    check_kind(header, where=where)
    if not record.sound:
        raise CorruptError(
            f"{where}: the control record of ledger {header.ledger_id} at offset {record.body_start} is "
            "damaged; restore the file from a backup"
        )


def _check_member(ledgers: ReplayTarget, file: OpenLogFile, record: ReplayedRecord) -> None:
    """Raise unless a record of a group can be applied."""
    if record.header.kind == RecordKind.ENTRIES:
        _continued(ledgers, file, record)
    elif record.header.kind == RecordKind.NAMED:
        _named(file, record)
    else:
        raise UnsupportedFormatError(
            f"{file.path}: a record of kind {record.header.kind} in a group; this pybk reads groups of entries and "
            "named records; open the store with the pybk that wrote it, or newer"
        )


def _named(file: OpenLogFile, record: ReplayedRecord) -> NamedRow:
    """Return the change of a named record that a log record contains."""
    check_control(record, where=file.path)
    body = bytes(file.data[record.body_start : record.body_end])
    return decode_named(record.header.first_entry_id, body, where=file.path)


def _apply_metadata(ledgers: ReplayTarget, body: bytes, where: str) -> None:
    metadata = LedgerMetadata.decode(body, where=where)
    descriptor = ledgers.replayed_ledger(metadata.ledger_id)
    if descriptor is None:
        if not _begins(metadata, restored=ledgers.restored):
            # Older versions staged changes after a delete that was on its way, maybe with a checkpoint between them.
            return
        descriptor = ledgers.replayed_created(metadata)
    if metadata.version >= descriptor.metadata.version:
        descriptor.metadata = descriptor.metadata_pushed = metadata
    descriptor.changed = True
    if metadata.state is LedgerState.CLOSED:
        descriptor.confirm(metadata.last_entry_id)
    descriptor.wake_followers()


def _begins(metadata: LedgerMetadata, *, restored: bool) -> bool:
    """Return whether metadata can be the first of a ledger; a restore begins with a later version, but never closed."""
    return metadata.state is not LedgerState.CLOSED and (restored or not metadata.version)


def _apply_control(ledgers: ReplayTarget, header: RecordHeader, where: str) -> None:
    if header.kind == RecordKind.DELETE:
        # Older versions staged two deletes of a ledger if two threads deleted it, maybe with a checkpoint between them.
        descriptor = ledgers.replayed_ledger(header.ledger_id)
        if descriptor is not None:
            descriptor.deleted = True
            descriptor.changed = True
            descriptor.wake_followers()
    elif header.kind == RecordKind.FORCE:
        _known(ledgers, header, where).confirm(header.first_entry_id)
    else:
        raise CorruptError(f"{where}: a record of kind {header.kind} does not belong in a log file")


def _continued(ledgers: ReplayTarget, file: OpenLogFile, record: ReplayedRecord) -> LedgerDescriptor:
    """Return the ledger that a record of entries continues; raise if it does not."""
    header = record.header
    descriptor = _known(ledgers, header, file.path)
    if header.first_entry_id != descriptor.last_durable + 1:
        raise CorruptError(
            f"{file.path}: ledger {header.ledger_id} continues with entry {header.first_entry_id} at offset "
            f"{record.body_start}, after entry {descriptor.last_durable}: entries are missing; restore the log "
            "files from a backup"
        )
    return descriptor


def _apply_entries(ledgers: ReplayTarget, file: OpenLogFile, record: ReplayedRecord) -> None:
    header = record.header
    descriptor = _continued(ledgers, file, record)
    lac, length = -1, descriptor.length_durable
    if record.sound:
        start = record.body_start
        if header.entry_count > 1:
            table = 4 * header.entry_count
            start += table + _END.unpack_from(file.data, record.body_start + table - 8)[0]
        lac, length = _LAC_AND_LENGTH.unpack_from(file.data, start + 16)
    location = (record.body_start - RECORD_HEADER_BYTES) | file.file_id << 32
    words = (header.first_entry_id, header.entry_count | header.stride << 32, location, header.body_bytes)
    descriptor.publish(header.first_entry_id, header.entry_count, length, words)
    if descriptor.deferred:
        descriptor.confirm(lac)


def _known(ledgers: ReplayTarget, header: RecordHeader, where: str) -> LedgerDescriptor:
    descriptor = ledgers.replayed_ledger(header.ledger_id)
    if descriptor is None:
        raise CorruptError(
            f"{where}: a record of ledger {header.ledger_id}, of which nothing else is known; restore the index "
            "and the log files from one backup, or run `pybk store rebuild-index` on the store"
        )
    return descriptor


class RecoveredLog(NamedTuple):
    """What replaying the log found.

    Attributes:
        next_lsn: LSN of the next commit to write.
        files: The log files from the mark on, with the bytes used in each.
        commits: How many commits there were.
        unbegun: Files without a header: preallocated, or torn. What they hold is not part of the log.
        again: Commits that must be written again, because the page cache may hold what never reached the disk.
    """

    next_lsn: int
    files: list[tuple[FileRow, int]]
    commits: int
    unbegun: tuple[FileRow, ...]
    again: tuple[ReplayedCommit, ...]


def recover_log(
    ledgers: ReplayTarget,
    volumes: Volumes,
    *,
    store_id: bytes,
    first_file_id: int,
    first_lsn: int,
    durable_lsn: int,
    rewrite_beyond: int | None,
) -> RecoveredLog:
    """Replay the log from its mark, and change nothing; ``make_log_durable`` then makes sure that it is on disk.

    Args:
        ledgers: Takes the state.
        volumes: The store's directories.
        store_id: The 16 bytes of the store.
        first_file_id: Log files from this id on are read.
        first_lsn: LSN of the first commit in them.
        durable_lsn: Highest LSN known to be durable.
        rewrite_beyond: After an unclean end, commits beyond this LSN are to be written again; None after a clean end.

    Raises:
        CorruptError: The log is damaged in a way that leaves unknown what is lost.
    """
    rows = log_files(volumes, first_file_id)
    current: list[OpenLogFile] = []

    def load() -> Iterator[OpenLogFile]:
        for row in rows.values():
            path = volumes.path_of(row)
            log_file = OpenLogFile.load(volumes.fs, row.file_id, path)
            current.append(log_file)
            yield log_file

    used: dict[int, int] = {}
    again: list[ReplayedCommit] = []
    commits = 0
    replay = Replay(load(), first_lsn=first_lsn, durable_lsn=durable_lsn, store_id=store_id)
    for commit in replay:
        while current[0].file_id != commit.file_id:
            del current[0]
        apply_commit(ledgers, current[0], commit)
        used[commit.file_id] = commit.offset + commit.size
        commits += 1
        if rewrite_beyond is not None and commit.lsn > rewrite_beyond:
            again.append(commit)
    current.clear()
    unbegun = tuple(rows.pop(file_id) for file_id in replay.end.unbegun_file_ids)
    files = [(row, used.get(file_id, BLOCK_BYTES)) for file_id, row in rows.items()]
    return RecoveredLog(replay.end.next_lsn, files, commits, unbegun, tuple(again))


def log_files(volumes: Volumes, first_file_id: int) -> dict[int, FileRow]:
    """Return the log files from an id on, by ascending id."""
    return {file_id: row for file_id, row in volumes.found(LOG).items() if file_id >= first_file_id}


def make_log_durable(volumes: Volumes, recovered: RecoveredLog) -> None:
    """Make all replayed commits durable, and remove files that are not part of the log.

    A file is durable, and its name is, before its first commit, and commits up to the watermark are. The page cache may
    hold what a failed sync never brought to disk, so commits that no watermark vouches for are written again. Files
    that an earlier process unlinked must not come back once their ids are used again, maybe in another directory, so
    that is made durable, too.
    """
    for directory in volumes.directories:
        volumes.fs.sync_directory(directory.path)
    rows = {row.file_id: row for row, _ in recovered.files}
    rewrite_commits(volumes, rows, recovered.again)
    for row in recovered.unbegun:
        if not put_back(volumes, row):
            volumes.fs.unlink(volumes.path_of(row))
        volumes.fs.sync_directory(volumes.directory_of(row))


def rewrite_commits(volumes: Volumes, rows: Mapping[int, FileRow], commits: Sequence[ReplayedCommit]) -> None:
    """Write commits again, the same bytes at the same offset, and sync them; the first of a file with its header."""
    for file_id in sorted({commit.file_id for commit in commits}):
        file = volumes.fs.open(volumes.path_of(rows[file_id]), writable=True)
        try:
            for commit in commits:
                if commit.file_id == file_id:
                    start = 0 if commit.offset == BLOCK_BYTES else commit.offset
                    file.write([file.read(start, commit.offset + commit.size - start)], start)
            file.sync()
        finally:
            file.close()
