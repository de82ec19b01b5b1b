"""Replay and recovery: where the log ends after a stop, and what its commits make of the ledgers in memory.

Theory of operation. Two facts decide where the log ends (``docs/reference/format.md``):

1. A commit is written only after the commit before it is durable. So a valid commit header with LSN m proves that
   m - 1 was durable. The headers of commits and files also name a durable LSN, and so do the watermark and the index.
2. The header of a log file names the LSN of its first commit. So it says where the log left the file before it;
   bytes from that LSN on in the earlier file were abandoned.

:class:`Replay` reads the files in the order of their ids and looks one file ahead. A file without a sound header was
preallocated, or torn when it was begun: its commits do not count, but their headers prove what was durable. A torn
header has zeros and its own bytes alone. If the last files begin with anything else, they were overwritten, and the
pass ends with CorruptError: they may have held commits that nothing else proves, as in a new store. In a file
that another begun file follows, the commits below that file's first LSN count, and all of them were durable. In the
last begun file, commits count up to the first that is missing or damaged and is not proven durable: that one is a torn
write, which was never acknowledged, so the log ends there.

Why that is right: a durable commit is never dropped silently. If only the bodies of its records are damaged, the commit
is yielded with ``sound`` False, and its entries read as corrupt. If its headers are damaged, it is unknown which
entries it held, so the pass ends with CorruptError. An entry's bytes cannot pass for a commit: see ``proven_durable``.

The index says what was true at the last checkpoint; its mark names the first log file and LSN after it. Recovery
reads the log from there and applies commit by commit: metadata of a newer version replaces older metadata, entries must
continue their ledger without a gap, a group is checked whole before its first record counts. It changes nothing on
disk. Three steps follow for a store that will be written, in this order:

1. ``recover_log`` returns the next LSN, the files, and the commits that no watermark vouches for. After an unclean
   end those may be in the page cache alone, because a sync may have failed.
2. ``make_log_durable`` writes these commits again and syncs them, makes durable which files were unlinked, and removes
   files that were never begun.
3. The store moves the watermark and serves. No entry is served that a power failure could still take away.

A store that is read while another process writes it uses :func:`scan_commits` and ``apply_commit`` alone, up to the
durable watermark, again and again. No lock is taken here: the caller of ``recover_log`` has the store for itself, and
the read-only store holds its own.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.index_rows import FileRow, NamedRow, decode_named
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    COMMIT_MAGIC,
    LOG_FILE_BYTES_MAX,
    RECORD_HEADER_BYTES,
    LogFileHeader,
    RecordHeader,
    RecordKind,
    check_kind,
    decode_commit_header,
    decode_file_header,
    decode_header,
    file_header_is_whole,
    file_header_may_be_torn,
    group_matches,
    padding,
)
from pybk.storage.io.filesystem import whole_file
from pybk.storage.preallocation import put_back
from pybk.storage.tiers import LOG
from pybk.storage.volumes import Volumes

if TYPE_CHECKING:
    from pybk.storage.io.filesystem import FileSystem

LSN_MAX: Final = (1 << 64) - 1
_COMMIT_WORD: Final = int.from_bytes(COMMIT_MAGIC, sys.byteorder)
_GROUP: Final = int(RecordKind.GROUP)
_SCAN_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_SCAN_BYTES)
_UNCOUNTED_COMMITS_MAX: Final = 1 << 40
"""An upper bound on the commits in files without a header, whose first LSN is therefore unknown."""
_REMEDY: Final = (
    "restore the file from a backup; or run `pybk store rebuild-index` on the store, with --accept-loss to continue "
    "without what it lists as missing"
)


class OpenLogFile(NamedTuple):
    """One log file: its id, its path for error messages, and all its bytes."""

    file_id: int
    path: str
    data: memoryview

    @classmethod
    def load(cls, fs: FileSystem, file_id: int, path: str) -> OpenLogFile:
        """Map a log file and bring all of it into memory; without that, reading the map may raise SIGBUS.

        Raises:
            CorruptError: The file is being truncated, or larger than a log file can be.
            StorageError: The device cannot read it.
            OSError: The file cannot be opened.
        """
        return cls(file_id, path, whole_file(fs, path, LOG_FILE_BYTES_MAX))


class ReplayedRecord(NamedTuple):
    """One record of a commit.

    Its stored body is ``data[body_start:body_end]``; ``sound`` is False if the body does not match its checksum.
    """

    header: RecordHeader
    body_start: int
    body_end: int
    sound: bool


class ReplayedCommit(NamedTuple):
    """One commit: ``size`` padded bytes at ``offset`` of a file whose bytes are ``data``.

    It is ``sound`` when all its records are.
    """

    lsn: int
    durable_lsn: int
    file_id: int
    data: memoryview
    offset: int
    size: int
    records: list[ReplayedRecord]
    sound: bool


class CorruptRecord(NamedTuple):
    """A record of a durable commit whose body is damaged: its header names its entries, but their bytes are lost."""

    path: str
    offset: int
    lsn: int
    header: RecordHeader


class LogEnd(NamedTuple):
    """The end of the log, and the damage that replay found.

    Attributes:
        next_lsn: LSN of the next commit to write, in a new file.
        last_file_id: Last file that was begun, None when there is none.
        offset: Where in that file the log ends, bytes; 0 when there is none.
        torn_bytes: Bytes after the end that hold parts of writes that were never acknowledged.
        durable_lsn: Highest LSN that is known to have been durable, from the files or from the caller. Always below
            ``next_lsn``, because anything else ends replay with CorruptError.
        unbegun_file_ids: Files without a sound header: preallocated, or torn. Their bytes are not part of the log.
        corrupt: Damaged records of durable commits.
    """

    next_lsn: int
    last_file_id: int | None
    offset: int
    torn_bytes: int
    durable_lsn: int
    unbegun_file_ids: tuple[int, ...]
    corrupt: tuple[CorruptRecord, ...]

    @property
    def torn(self) -> bool:
        """True if the log ends in a write that was never acknowledged."""
        return self.torn_bytes > 0


def scan_commits(
    file: OpenLogFile, offset: int, lsn: int, up_to_lsn: int = LSN_MAX, reach: Callable[[int], None] | None = None
) -> Iterator[ReplayedCommit]:
    """Yield the consecutive commits of one file, up to the first bytes that are not the expected commit.

    The caller decides whether the stop is the end of the log or damage. A commit with a damaged body is yielded with
    ``sound`` False, because its headers still name its entries. If a later file was begun, only the commits below its
    first LSN count: pass that limit.

    Args:
        file: The file.
        offset: Where the first commit is expected, bytes, a multiple of ``BLOCK_BYTES``.
        lsn: LSN expected there.
        up_to_lsn: Last LSN to read: below the next file's first, and at most the watermark while a writer is live.
        reach: Called with the end of the bytes that are read next, to bring them into memory; None if the whole file
            is in memory.

    Raises:
        UnsupportedFormatError: A sound header is of another format.

    Cost: about 3 µs for a commit of one record, and 0.1 µs per KiB.
    """
    data = file.data
    while lsn <= up_to_lsn:
        if reach is not None:
            reach(offset + COMMIT_HEADER_BYTES)
        head = decode_commit_header(data, offset, file.file_id)
        if head is None or head.lsn != lsn:
            return
        start = offset + COMMIT_HEADER_BYTES
        end = start + head.body_bytes
        if reach is not None:
            reach(end)
        records = _read_records(file, start, end, head.record_count, lsn)
        if records is None:
            return
        size = end - offset
        size += padding(size)
        sound = not [record for record in records if not record.sound]
        yield ReplayedCommit(lsn, head.durable_lsn, file.file_id, data, offset, size, records, sound)
        offset += size
        lsn += 1


def _read_records(file: OpenLogFile, at: int, end: int, count: int, lsn: int) -> list[ReplayedRecord] | None:
    """Return the records between two offsets; None unless there are ``count``, all of commit ``lsn``, without a gap.

    Also returns None if a group record is not followed by the records that it was made for.
    """
    data = file.data
    body = data[:end]
    records: list[ReplayedRecord] = []
    groups = []
    for _ in range(count):
        try:
            header = decode_header(body, at, where=file.path)
        except CorruptError:
            return None
        if header.lsn != lsn:
            return None
        start = at + RECORD_HEADER_BYTES
        at = start + header.body_bytes
        sound = xxh3_64_intdigest(data[start:at]) == header.body_checksum
        if header.kind == _GROUP:
            groups.append(len(records))
        records.append(ReplayedRecord(header, start, at, sound))
    if at != end or not all(_is_followed_by_its_own(data, records, number) for number in groups):
        return None
    return records


def _is_followed_by_its_own(data: memoryview, records: list[ReplayedRecord], number: int) -> bool:
    """Return whether a group record is followed by the records that it was made for, or is damaged itself."""
    group = records[number]
    members = members_of(records, number)
    if not members or len(members) != group.header.first_entry_id or _GROUP in [one.header.kind for one in members]:
        return False
    start = members[0].body_start - RECORD_HEADER_BYTES
    headers = [data[one.body_start - RECORD_HEADER_BYTES : one.body_start] for one in members]
    body = data[group.body_start : group.body_end]
    return not group.sound or group_matches(body, headers, members[-1].body_end - start)


def members_of(records: list[ReplayedRecord], number: int) -> list[ReplayedRecord]:
    """Return the records that the group record at index ``number`` joins; an empty list for another kind of record."""
    header = records[number].header
    return records[number + 1 : number + 1 + header.first_entry_id] if header.kind == _GROUP else []


def units_of(records: list[ReplayedRecord]) -> Iterator[list[ReplayedRecord]]:
    """Yield the units that are applied atomically: each group record with its members, and each other record alone."""
    number = 0
    while number < len(records):
        unit = [records[number], *members_of(records, number)]
        yield unit
        number += len(unit)


class Replay:
    """One pass over a log: iterate over the commits, then read ``end``.

    Commits come in LSN order. A commit that is not ``sound`` was durable and is damaged; a torn write is never yielded.
    Nothing is changed on disk. At most two files are mapped at a time.

    Args:
        files: All log files from the checkpoint mark on, in file-id order; each is loaded when it is needed.
        first_lsn: LSN of the first commit.
        durable_lsn: Highest LSN that the watermark or the index says was durable.
        store_id: The 16 bytes of the store.

    Iterating raises:
        CorruptError: Acknowledged commits are missing or unreadable, so it is unknown which entries are lost; or a file
            belongs to another store.
        UnsupportedFormatError: A sound header is of another format.

    Threads: one.
    """

    def __init__(self, files: Iterable[OpenLogFile], *, first_lsn: int, durable_lsn: int, store_id: bytes) -> None:
        self._files = iter(files)
        self._store_id = store_id
        self._lsn = first_lsn
        self._durable = durable_lsn
        self._offset = 0
        self._torn_bytes = 0
        self._unbegun: list[int] = []
        self._overwritten: str | None = None
        """A file after the last begun one that may have been begun, too, because its header was overwritten."""
        self._corrupt: list[CorruptRecord] = []
        self._end: LogEnd | None = None
        self._commits = self._replay()

    @property
    def end(self) -> LogEnd:
        """The end of the log.

        Raises:
            UsageError: The iteration has not reached the end yet.
        """
        if self._end is None:
            raise UsageError(
                "the end of the log is known only when all its commits were read; iterate to the end first"
            )
        return self._end

    def __iter__(self) -> Iterator[ReplayedCommit]:
        """Return an iterator over the commits that were not yielded yet."""
        return self._commits

    def _replay(self) -> Iterator[ReplayedCommit]:
        path = None
        last_file_id = None
        following = self._next_begun()
        while following is not None:
            file, header = following
            if header.first_lsn != self._lsn:
                raise self._refusal(path, f"but {file.path} begins with LSN {header.first_lsn}")
            # A torn write before this file was abandoned: this header proves that the log continued here.
            self._torn_bytes = 0
            following = self._next_begun()
            self._offset = BLOCK_BYTES
            if following is None:
                yield from self._read_last(file)
            else:
                yield from self._read_left(file, following[1].first_lsn)
            path, last_file_id = file.path, file.file_id
        if self._lsn <= self._durable:
            raise self._refusal(
                path, f"but commits up to LSN {self._durable} were durable: acknowledged entries are missing"
            )
        if self._overwritten is not None:
            raise self._refusal(
                path,
                f"and {self._overwritten} begins neither with a log file header nor with a part of one: what it "
                "held is unknown",
            )
        self._end = LogEnd(
            self._lsn,
            last_file_id,
            self._offset,
            self._torn_bytes,
            self._durable,
            tuple(self._unbegun),
            tuple(self._corrupt),
        )

    def _refusal(self, path: str | None, why: str) -> CorruptError:
        unbegun = ", ".join(f"{file_id:016x}" for file_id in self._unbegun) or "none"
        return CorruptError(
            f"{path or 'the log'} holds no whole commit of LSN {self._lsn} at offset {self._offset}, {why} (log files "
            f"without a sound header: {unbegun}); {_REMEDY}",
            path=path,
            offset=self._offset,
        )

    def _next_begun(self) -> tuple[OpenLogFile, LogFileHeader] | None:
        """Return the next begun file; note files without a header, and the LSNs that their commits prove durable."""
        while (file := next(self._files, None)) is not None:
            try:
                header = decode_file_header(file.data, store_id=self._store_id, file_id=file.file_id, where=file.path)
            except CorruptError:
                if file_header_is_whole(file.data):
                    raise
                header = None
            if header is not None:
                self._overwritten = None  # its first LSN says whether anything is missing before it
                self._durable = max(self._durable, header.durable_lsn)
                return file, header
            self._unbegun.append(file.file_id)
            self._durable = max(self._durable, proven_durable(file, BLOCK_BYTES, lsn_after(self._lsn)))
            used = _used_bytes(file.data)
            self._torn_bytes += used
            torn = file_header_may_be_torn(file.data, store_id=self._store_id, file_id=file.file_id)
            if used > BLOCK_BYTES and not torn:
                self._overwritten = file.path
            del file
        return None

    def _read_left(self, file: OpenLogFile, left_at_lsn: int) -> Iterator[ReplayedCommit]:
        """Read a file that another follows: only commits below ``left_at_lsn`` count, and all of those were durable."""
        for commit in scan_commits(file, BLOCK_BYTES, self._lsn, left_at_lsn - 1):
            self._take(file, commit)
            yield commit

    def _read_last(self, file: OpenLogFile) -> Iterator[ReplayedCommit]:
        """Read the last begun file: the log ends at the first damaged commit that is not proven durable."""
        for commit in scan_commits(file, BLOCK_BYTES, self._lsn):
            if not commit.sound and commit.lsn > self._durable:
                self._durable = max(self._durable, proven_durable(file, commit.offset + commit.size, commit.lsn + 1))
                if commit.lsn > self._durable:
                    break
            self._take(file, commit)
            yield commit
        self._durable = max(self._durable, proven_durable(file, self._offset, self._lsn))
        self._torn_bytes += _used_bytes(file.data[self._offset :])

    def _take(self, file: OpenLogFile, commit: ReplayedCommit) -> None:
        if not commit.sound:
            self._corrupt += [
                CorruptRecord(file.path, record.body_start - RECORD_HEADER_BYTES, commit.lsn, record.header)
                for record in commit.records
                if not record.sound
            ]
        self._durable = max(self._durable, commit.durable_lsn)
        self._lsn = commit.lsn + 1
        self._offset = commit.offset + commit.size


def lsn_after(lsn: int) -> int:
    """Return the highest LSN that is plausible for a commit at an unknown distance after ``lsn``."""
    return lsn + _UNCOUNTED_COMMITS_MAX


def proven_durable(file: OpenLogFile, offset: int, lsn: int) -> int:
    """Return the highest LSN that commit headers from ``offset`` on prove to have been durable; 0 for none.

    Clients choose the bytes of entries, so an entry may look like a commit header. Two rules keep it from proving
    anything that the file could not hold. The body of a valid commit is skipped. And where a damaged header leaves a
    body unprotected, a header counts only if its format is known and its LSN is plausible: each commit takes at least
    one block, so the LSN n blocks later is at most ``lsn + n``.

    Args:
        file: The file.
        offset: Where a commit begins, bytes, a multiple of ``BLOCK_BYTES``; not within the body of a commit.
        lsn: Highest LSN that is plausible there.
    """
    data = file.data
    words = data[offset:][: (len(data) - offset) & -4].cast("I")[:: BLOCK_BYTES // 4].tolist()
    proven = 0
    beyond = offset
    for block in (number for number, word in enumerate(words) if word == _COMMIT_WORD):
        at = offset + block * BLOCK_BYTES
        if at < beyond:
            continue
        try:
            head = decode_commit_header(data, at, file.file_id)
        except UnsupportedFormatError:
            continue
        if head is not None and (max(head.lsn, head.durable_lsn) <= lsn + block or not block):
            proven = max(proven, head.lsn - 1, head.durable_lsn)
            beyond = at + COMMIT_HEADER_BYTES + head.body_bytes
    return proven


def _used_bytes(data: memoryview) -> int:
    """Return the size of the data without its trailing zeros, bytes."""
    for start in range((len(data) - 1) // _SCAN_BYTES * _SCAN_BYTES, -1, -_SCAN_BYTES):
        piece = bytes(data[start : start + _SCAN_BYTES])
        if piece != _ZEROS[: len(piece)]:
            return start + len(piece.rstrip(b"\0"))
    return 0


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

    The records of a group are checked before the first of them is applied, so a group is applied whole or not at all.
    An entry whose bytes are damaged counts as applied: it stays known, and reading it fails.

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
            ledgers.replayed_named(named_of(file, record))
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
        named_of(file, record)
    else:
        raise UnsupportedFormatError(
            f"{file.path}: a record of kind {record.header.kind} in a group; this pybk reads groups of entries and "
            "named records; open the store with the pybk that wrote it, or newer"
        )


def named_of(file: OpenLogFile, record: ReplayedRecord) -> NamedRow:
    """Return the change of a named record that a log record contains; CorruptError if it is damaged."""
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
    lac, length = last_prefix(file, record) or (-1, descriptor.length_durable)
    location = (record.body_start - RECORD_HEADER_BYTES) | file.file_id << 32
    words = (header.first_entry_id, header.entry_count | header.stride << 32, location, header.body_bytes)
    descriptor.publish(header.first_entry_id, header.entry_count, length, words)
    if descriptor.deferred:
        descriptor.confirm(lac)


def last_prefix(file: OpenLogFile, record: ReplayedRecord) -> tuple[int, int] | None:
    """Return the last add confirmed and the length that a record's last entry carries; None if it is damaged."""
    if not record.sound:
        return None
    start, count = record.body_start, record.header.entry_count
    if count > 1:
        table = 4 * count
        start += table + _END.unpack_from(file.data, start + table - 8)[0]
    lac, length = _LAC_AND_LENGTH.unpack_from(file.data, start + 16)
    return lac, length


def _known(ledgers: ReplayTarget, header: RecordHeader, where: str) -> LedgerDescriptor:
    descriptor = ledgers.replayed_ledger(header.ledger_id)
    if descriptor is None:
        raise CorruptError(
            f"{where}: a record of ledger {header.ledger_id}, of which nothing else is known; restore the index "
            "and the log files from one backup, or run `pybk store rebuild-index` on the store"
        )
    return descriptor


class RecoveredLog(NamedTuple):
    """The result of replaying the log.

    Attributes:
        next_lsn: LSN of the next commit to write.
        files: The log files from the mark on, with the bytes used in each.
        commits: The number of commits.
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
        for log_file in load_log_files(volumes, rows):
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


def load_log_files(volumes: Volumes, rows: Mapping[int, FileRow]) -> Iterator[OpenLogFile]:
    """Yield log files, each of them loaded when it is asked for."""
    for file_id, row in rows.items():
        yield OpenLogFile.load(volumes.fs, file_id, volumes.path_of(row))


def make_log_durable(volumes: Volumes, recovered: RecoveredLog) -> None:
    """Make all replayed commits durable, and remove files that are not part of the log.

    A file is durable, and its name is, before its first commit, and commits up to the watermark are. The page cache may
    hold what a failed sync never brought to disk, so commits that no watermark vouches for are written again. The
    removal of files by an earlier process is made durable, too: they must not come back once their ids are used again,
    maybe in another directory.
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
        with closing(volumes.fs.open(volumes.path_of(rows[file_id]), writable=True)) as file:
            for commit in commits:
                if commit.file_id == file_id:
                    start = 0 if commit.offset == BLOCK_BYTES else commit.offset
                    file.write([file.read(start, commit.offset + commit.size - start)], start)
            file.sync()
