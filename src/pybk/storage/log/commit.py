"""One commit of the log: the entries and control records that become durable together, and how they are written.

``CommitWriter`` encodes the records of a commit, chooses its location, writes with one sync, and publishes to the
ledgers. It is used by the leader, in a guard (``threads/interrupts.py``), which no signal interrupts.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from pybk.deferral import np
from pybk.errors import PybkError
from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.storage.descriptor import LedgerDescriptor, StagedEntries
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    RECORD_HEADER_BYTES,
    RESERVED_FILE_BYTES,
    RecordKind,
    encode_commit_header,
    encode_entries,
    encode_entry_commit,
    encode_file_header,
    encode_group,
    encode_header,
    padding,
)
from pybk.storage.io.failures import refused
from pybk.storage.io.filesystem import PIECES_MAX
from pybk.storage.preallocation import ReserveUse
from pybk.threads.group_commit import Completion

if TYPE_CHECKING:
    from pybk.errors import PybkError
    from pybk.ledger.digest import EncodedEntries
    from pybk.storage.format.log_file import Watermark
    from pybk.storage.io.filesystem import File

Control = tuple[Callable[[int], bytes], Callable[[], None]]
"""A control record: its bytes as a function of the LSN, and a function that applies it once durable."""


class GroupPart(NamedTuple):
    """The entries of one ledger in a group; the fields are the arguments of ``Log.stage`` that have these names."""

    descriptor: LedgerDescriptor
    first_entry_id: int
    sizes: array[int]
    parts: Sequence[bytes | memoryview]
    base_length: int
    overhead: int


class StagedGroup:
    """Entries and control records in one commit that are replayed all or not at all.

    Attributes:
        low: Index in ``Commit.staged`` at which the group's entries begin.
        high: Index after its last entries.
        controls: Its control records.
        staged: Whether the group counts. It is set last and in one step, so an error before it leaves nothing of
            the group.
    """

    __slots__ = ("controls", "high", "low", "staged")

    def __init__(self, low: int, high: int, controls: Sequence[Control]) -> None:
        self.low = low
        self.high = high
        self.controls = controls
        self.staged = False


class GroupEntries(StagedEntries):
    """The entries of one ledger in a group. Entries that are staged later do not join them."""

    __slots__ = ("group",)

    takes_more = False

    def __init__(self, commit: Commit, group: StagedGroup, part: GroupPart, staged_ns: int) -> None:
        super().__init__(commit, part.descriptor, part.first_entry_id, part.base_length, part.overhead, staged_ns)
        self.group = group
        self.sizes = part.sizes
        # An odd number of parts makes ``Log.stage_entry`` call ``_open_entries``, which sees ``takes_more``.
        self.parts = [*part.parts, b""]

    def freeze(self) -> None:
        """Freeze the entries; drop them all if the group was not staged."""
        if not self.group.staged:
            del self.sizes[:]
        super().freeze()

    def last(self) -> int:
        """Return the id of the last entry, ``first - 1`` if the group was not staged."""
        return super().last() if self.group.staged else self.first - 1


class BatchEntries(StagedEntries):
    """The entries of a batch that is a record of its own. Entries that are staged later do not join them.

    The thread that appends makes the record's body, so that the leader has nothing to copy and to hash for it. So the
    leader can write a commit while other threads make the bodies of the next.

    Attributes:
        checksum: The checksum of the record's body, which is ``parts``: with the table of its entries, in any pieces.
        last_prefix: The prefix of the last entry.
    """

    __slots__ = ("checksum", "last_prefix")

    takes_more = False

    def __init__(
        self,
        commit: Commit,
        descriptor: LedgerDescriptor,
        first: int,
        base_length: int,
        overhead: int,
        staged_ns: int,
        body: EncodedEntries,
    ) -> None:
        super().__init__(commit, descriptor, first, base_length, overhead, staged_ns)
        # Their odd number makes ``Log.stage_entry`` call ``_open_entries``, which sees ``takes_more``.
        self.parts = [*body.pieces]
        self.checksum = body.checksum
        self.last_prefix = body.last_prefix

    def freeze(self) -> None:
        """Freeze the entries; none if an exception ended the append."""
        if self.sizes:
            self.encoded_bytes = int(np.sum(self.sizes))
            descriptor = self.descriptor
            if descriptor.late_digest is not None and descriptor.staging is self:
                descriptor.last_prefix = self.last_prefix  # prefixes of entries before it may have been made since

    def record(self, lsn: int) -> list[bytes | memoryview]:
        """Return header and body of the record in the commit with an LSN."""
        header = encode_header(
            RecordKind.ENTRIES,
            self.descriptor.ledger_id,
            self.first,
            sum(map(len, self.parts)),
            self.checksum,
            lsn=lsn,
            entry_count=len(self.sizes),
        )
        return [header, *self.parts]


class Commit(Completion):
    """Entries and control records that become durable together.

    A commit is *forming* while entries are staged in it, then *in flight*, then *done*: durable and published, or
    failed. See ``log.py`` for the transitions.

    Attributes:
        creations: Control records that create ledgers: the ledger, and the two functions of a ``Control``. They come
            before the entries, which may be of these ledgers; other control records come after them.
        staged: The entries in the order in which they were staged; those of one ledger stand together, except those of
            groups and large batches. None are left once the commit is done and its waiters were woken.
        controls: Control records, in order.
        groups: Groups among ``staged``, in order.
        payload_bytes: Encoded bytes of all entries, which count as outstanding until the commit is done.
        buffered_ns: Monotonic time at which the first entry was staged that no thread waits for; 0 for none.
        failed_with: The commit that was forming when this one failed, and so failed, too; None if this did not fail.
        uses_reserve: Whether no control record keeps it from reserved space.

    Set when the commit is written:
        lsn: Its log sequence number.
        records: Its encoded records.
        written: Its entries, each with the offset of their record in the commit, and the bytes of the record's body.
        size: Bytes without padding.
        padded: Bytes with padding.
        file_id: Its log file.
        base: Offset of its header in the file.
        start: Offset at which writing starts: ``base``, or 0 if the file's header is written, too.
        buffers: The bytes to write.

    Threads: while the commit forms, the log's mutex guards it; after that only the leader uses it.
    """

    __slots__ = (
        "base",
        "buffered_ns",
        "buffers",
        "controls",
        "creations",
        "failed_with",
        "file_id",
        "groups",
        "lsn",
        "padded",
        "payload_bytes",
        "records",
        "size",
        "staged",
        "start",
        "uses_reserve",
        "written",
    )

    records: list[bytes | memoryview]
    written: list[tuple[StagedEntries, int, int]]
    size: int
    padded: int
    file_id: int
    base: int
    start: int

    def __init__(self) -> None:
        super().__init__()
        self.creations: list[tuple[LedgerDescriptor, Callable[[int], bytes], Callable[[], None]]] = []
        self.staged: list[StagedEntries] = []
        self.controls: list[Control] = []
        self.groups: list[StagedGroup] = []
        self.payload_bytes = 0
        self.buffered_ns = 0
        self.failed_with: Commit | None = None
        self.uses_reserve = True
        self.lsn = 0
        self.buffers: list[bytes | memoryview] = []

    def is_empty(self) -> bool:
        """Return whether nothing was staged."""
        return not self.staged and not self.controls and not self.creations and not self.groups

    def fail(self, error: PybkError) -> None:
        """Set the error of the commit and of its ledgers, which then take no entries."""
        self.error = error
        for descriptor in self.ledgers():
            descriptor.error = error

    def ledgers(self) -> list[LedgerDescriptor]:
        """Return the ledgers that the commit creates or has entries of; a ledger may occur twice."""
        return [*(entries.descriptor for entries in self.staged), *(created for created, _, _ in self.creations)]

    @classmethod
    def of_acknowledged(cls, error: PybkError, *refused: Commit) -> Self | None:
        """Return a commit of the acknowledged entries of refused commits; None if there are none.

        An append to a deferred ledger is acknowledged before the entry is written. A refusal, which the store survives,
        must not lose the entry, so it waits for another attempt.

        Args:
            error: Why the commits were refused.
            refused: The commits, in order.
        """
        acknowledged = [
            entries
            for commit in refused
            for entries in commit.staged
            if entries.descriptor.deferred and entries.descriptor.created
        ]
        if not acknowledged:
            return None
        kept = cls()
        kept.error = error
        kept.staged = acknowledged
        for entries in kept.staged:
            entries.completion = kept
            kept.payload_bytes += sum(entries.sizes)
        return kept

    def release_buffers(self) -> None:
        """Free entries and control records: ledgers, futures and extents refer to the commit long after it is done."""
        self.records = []
        self.written = []
        self.buffers = []
        self.groups = []
        self.creations = []
        self.controls = []
        for entries in self.staged:
            if entries.completion is self:
                entries.parts = []


_LENGTH: Final = struct.Struct(">q")
_LENGTH_AT: Final = 24
_ENTRY_AT: Final = COMMIT_HEADER_BYTES + RECORD_HEADER_BYTES
"""Offset of the entry in a commit of one entry."""
_ZEROS: Final = bytes(BLOCK_BYTES)


class LogFiles(Protocol):
    """The supply of log files. All calls may be repeated with the same arguments, with the same result."""

    def next_log_file(self, bytes_min: int, after: int, *, use: ReserveUse) -> tuple[int, File]:
        """Return the first zeroed, durable file of at least this size whose id is above ``after``."""

    def has_reserve(self, use: ReserveUse) -> bool:
        """Return whether a reserved file that is in use takes commits of this use."""

    def leave_log_file(self, file_id: int, used_bytes: int, commits: int) -> None:
        """Note that the log writes no more to a file.

        Args:
            file_id: The file.
            used_bytes: The offset after its last commit.
            commits: The number of its commits.
        """


class CommitObserver(Protocol):
    """Notes each durable commit: what the next checkpoint has to write, metrics, and the size of the log's tail."""

    def changed(self, commit: Commit) -> None:
        """Note the ledgers whose entries a commit has; called by the leader after publishing them."""

    def committed(self, commit: Commit, now_ns: int, took_ns: int) -> None:
        """Count a commit; called by the leader after publishing.

        Args:
            commit: The commit.
            now_ns: The time when it was synced, on the monotonic clock.
            took_ns: The time that it took to write and sync the commit.
        """

    def failed(self, commit: Commit, error: PybkError) -> None:
        """Count the entries of a commit that failed."""


class CommitWriter:
    """Writes commits at the end of the log.

    Attributes:
        next_lsn: LSN of the next commit.

    Threads: the leader of the log's group commit, except ``position``.
    """

    def __init__(
        self, *, store_id: bytes, files: LogFiles, watermark: Watermark, observer: CommitObserver, next_lsn: int
    ) -> None:
        self.next_lsn = next_lsn
        self._store_id = store_id
        self._files = files
        self._watermark = watermark
        self._observer = observer
        self._file: File | None = None
        self.file_id = 0
        """The log file that commits are written to; 0 before the first."""
        self._file_offset = 0
        self._in_reserve = False
        """True if the file was reserved for changes that free space."""
        self._file_lsn = 0
        self._durable_ns = 0
        """The time when the last commit was synced, on the monotonic clock."""
        self._took_ns = 0
        """The time that it took to write and sync it."""

    def position(self) -> tuple[int, int, int]:
        """Return id of the current log file, offset in it, and next LSN. Threads: any."""
        return self.file_id, self._file_offset, self.next_lsn

    def write(self, commit: Commit) -> None:
        """Make a commit durable.

        Raises:
            StorageRefusedError: Space, file descriptors or memory are short; nothing was written.
            OSError: Writing or syncing failed; the content of the disk is unknown.
        """
        try:
            if not self._frame_entry(commit):
                self._encode(commit)
                self._choose_location(commit)
                self._frame(commit)
        except MemoryError as error:
            raise refused(error, f"writing a commit of {commit.payload_bytes} bytes") from error
        file = self._file
        assert file is not None
        began_ns = time.monotonic_ns()
        file.write_durable(commit.buffers, commit.start)
        self._durable_ns = time.monotonic_ns()
        self._took_ns = self._durable_ns - began_ns

    def _frame_entry(self, commit: Commit) -> bool:
        """Do what ``_encode``, ``_choose_location`` and ``_frame`` do, in fewer steps, for a commit of one entry.

        Returns:
            False, with nothing done, for another commit, and for the first one in a log file.
        """
        if len(commit.staged) != 1 or commit.creations or commit.controls or commit.groups:
            return False
        (entries,) = commit.staged
        if len(entries.sizes) != 1:
            return False
        if entries.descriptor.late_digest is not None:
            entries.add_prefixes(entries.descriptor.late_digest)
        file, base, parts = self._file, self._file_offset, entries.parts
        if len(parts[0]) < ENTRY_HEADER_BYTES or file is None or base == BLOCK_BYTES or self._in_reserve:
            return False
        nbytes = entries.sizes[0]
        size = _ENTRY_AT + nbytes
        padded = size + -size % BLOCK_BYTES
        if base + padded > file.size:
            return False
        lsn, file_id = self.next_lsn, self.file_id
        commit.lsn, commit.file_id, commit.size, commit.padded = lsn, file_id, size, padded
        commit.base = commit.start = base
        entries.encoded_bytes = nbytes
        (entries.length_at_end,) = _LENGTH.unpack_from(parts[0], _LENGTH_AT)
        commit.written = [(entries, COMMIT_HEADER_BYTES, nbytes)]
        commit.buffers = encode_entry_commit(
            entries.descriptor.ledger_id, entries.first, lsn, file_id, parts[0], parts[1]
        )
        return True

    def _encode(self, commit: Commit) -> None:
        """Encode the records of a commit, and note at which offset in the commit each entries record begins."""
        lsn = commit.lsn = self.next_lsn
        records: list[bytes | memoryview] = [encode(lsn) for _, encode, _ in commit.creations]
        encoded: list[list[bytes | memoryview]] = []
        written: list[tuple[StagedEntries, int, int]] = []
        at = COMMIT_HEADER_BYTES + sum(map(len, records))
        for entries in commit.staged:
            entries.freeze()
            if entries.sizes:
                record = _record_of(entries, lsn)
                nbytes = sum(map(len, record))
                encoded.append(record)
                written.append((entries, at, nbytes - RECORD_HEADER_BYTES))
                at += nbytes
        if commit.groups:
            at = _bind_groups(commit, records, encoded, written)
        else:
            records.extend(chain.from_iterable(encoded))
        for encode, _ in commit.controls:
            record_bytes = encode(lsn)
            records.append(record_bytes)
            at += len(record_bytes)
        commit.records = records
        commit.written = written
        commit.size = at
        commit.padded = at + padding(at)

    def _choose_location(self, commit: Commit) -> None:
        """Choose file and offset; takes the next log file if the commit does not fit in this one."""
        size, files = commit.padded, self._files
        use = _use_of(commit)
        if (
            self._file is None
            or self._file_offset + size > self._file.size
            or (self._in_reserve and not files.has_reserve(use))
        ):
            file_id, file = files.next_log_file(BLOCK_BYTES + size, self.file_id, use=use)
            self.leave_file()
            self._in_reserve = file.size == RESERVED_FILE_BYTES
            self._file, self.file_id, self._file_offset, self._file_lsn = file, file_id, BLOCK_BYTES, commit.lsn
        commit.file_id = self.file_id
        commit.base = self._file_offset

    def leave_file(self) -> None:
        """Leave the current file, so that the next commit begins another; does nothing without one."""
        if self._file is not None:
            self._files.leave_log_file(self.file_id, self._file_offset, self.next_lsn - self._file_lsn)
            self._file = None

    def _frame(self, commit: Commit) -> None:
        """Set the commit's ``buffers``: header, records and padding, in a new file after the file's own header."""
        lsn = commit.lsn
        count = len(commit.creations) + len(commit.written) + len(commit.controls)
        for group in commit.groups:
            count += group.staged and 1 + len(group.controls)
        header = encode_commit_header(lsn, lsn - 1, commit.file_id, count, commit.size - COMMIT_HEADER_BYTES)
        buffers = [header, *commit.records, _ZEROS[: commit.padded - commit.size]]
        commit.start = commit.base
        if commit.base == BLOCK_BYTES:
            commit.start = 0
            buffers.insert(0, encode_file_header(self._store_id, commit.file_id, lsn, lsn - 1))
        # The file would join them itself, but lack of memory would count as a failed write there, which is final.
        commit.buffers = buffers if len(buffers) <= PIECES_MAX else [b"".join(buffers)]

    def publish(self, commit: Commit) -> None:
        """Publish a durable commit: pass entry locations to ledgers, apply control records."""
        self._watermark.advance(commit.lsn)
        try:
            for _, _, apply in commit.creations:
                apply()
            location = commit.base | commit.file_id << 32
            for entries, at, body_bytes in commit.written:
                first, count = entries.first, len(entries.sizes)
                entries.descriptor.publish(
                    first, count, entries.length_at_end, (first, count | 1 << 32, location + at, body_bytes)
                )
            self._observer.changed(commit)  # before it is done: a checkpoint drops the files of what it does not know
            for group in commit.groups:
                for _, apply in group.controls if group.staged else ():
                    apply()
            for _, apply in commit.controls:
                apply()
        finally:  # the commit is durable, so its bytes stay in the file, whatever is raised
            self.next_lsn = commit.lsn + 1
            self._file_offset = commit.base + commit.padded
        commit.done = True
        self._observer.committed(commit, self._durable_ns, self._took_ns)


def _use_of(commit: Commit) -> ReserveUse:
    """Return which reserved files a commit may use."""
    entries = [each for each in commit.staged if each.sizes]
    if not entries and commit.uses_reserve:
        return ReserveUse.CONTROLS
    if not commit.uses_reserve or any(each.last() >= each.descriptor.entries_when_full for each in entries):
        return ReserveUse.NONE
    return ReserveUse.FIRST_ENTRY if all(not each.last() for each in entries) else ReserveUse.FURTHER_ENTRIES


def _record_of(entries: StagedEntries, lsn: int) -> list[bytes | memoryview]:
    """Return the record of frozen entries, in pieces, the first of which is its header; sets ``length_at_end``."""
    if isinstance(entries, BatchEntries):
        (entries.length_at_end,) = _LENGTH.unpack_from(entries.last_prefix, _LENGTH_AT)
        return entries.record(lsn)
    header, body = encode_entries(entries.descriptor.ledger_id, entries.first, entries.sizes, entries.parts, lsn=lsn)
    # Read from the last entry, as replay does: in one part of a striped ledger it is not the sum of sizes.
    (entries.length_at_end,) = _LENGTH.unpack_from(body, len(body) - entries.sizes[-1] + _LENGTH_AT)
    return [header, body]


def _bind_groups(
    commit: Commit,
    records: list[bytes | memoryview],
    encoded: Sequence[list[bytes | memoryview]],
    written: list[tuple[StagedEntries, int, int]],
) -> int:
    """Put a group record before the records of each group, and the group's control records after its entries.

    Args:
        commit: The commit; ``commit.lsn`` is set.
        records: The encoded records of its creations. Changed: those of its entries, and of its groups, follow.
        encoded: The record of each of ``written``, in pieces, the first of which is its header.
        written: As ``Commit.written``. Changed: the entries get their offsets after the group records.

    Returns:
        The offset in the commit at which the records end.
    """
    record_of = {entries: record for (entries, _, _), record in zip(written, encoded, strict=True)}
    at = COMMIT_HEADER_BYTES + sum(map(len, records))
    del written[:]

    def put(staged: Sequence[StagedEntries]) -> None:
        nonlocal at
        for entries in staged:
            if entries in record_of:
                nbytes = sum(map(len, record_of[entries]))
                records.extend(record_of[entries])
                written.append((entries, at, nbytes - RECORD_HEADER_BYTES))
                at += nbytes

    done = 0
    for group in commit.groups:
        if not group.staged:
            continue
        put(commit.staged[done : group.low])
        done = group.high
        members = commit.staged[group.low : group.high]
        controls = [encode(commit.lsn) for encode, _ in group.controls]
        heads = (*(record_of[entries][0] for entries in members), *controls)
        headers = [bytes(record[:RECORD_HEADER_BYTES]) for record in heads]
        nbytes = sum(len(piece) for entries in members for piece in record_of[entries]) + sum(map(len, controls))
        record = encode_group(headers, nbytes, lsn=commit.lsn)
        records.append(record)
        at += len(record)
        put(members)
        records.extend(controls)
        at += sum(map(len, controls))
    put(commit.staged[done:])
    return at
