"""Writes a commit: encodes its records, chooses its location, writes with one sync, and publishes to the ledgers.

A leader may be interrupted between any two lines, so each call can be repeated with the same outcome.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from pybk.ledger.entry import ENTRY_HEADER_BYTES
from pybk.storage.descriptor import StagedEntries
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    COMMIT_HEADER_BYTES,
    RESERVED_FILE_BYTES,
    encode_commit_header,
    encode_entry_commit,
    encode_file_header,
    padding,
)
from pybk.storage.format.record import RECORD_HEADER_BYTES, encode_entries, encode_group
from pybk.storage.io.failures import refused
from pybk.storage.log.commit import Commit
from pybk.storage.log.reserve import ReserveUse

if TYPE_CHECKING:
    from pybk.errors import PybkError
    from pybk.storage.format.watermark import Watermark
    from pybk.storage.io.filesystem import File

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
            commits: How many commits it has.
        """


class CommitObserver(Protocol):
    """Notes each durable commit: what the next checkpoint has to write, metrics, and the size of the log's tail."""

    def changed(self, commit: Commit) -> None:
        """Note the ledgers whose entries a commit has; called by the leader after publishing them, maybe twice."""

    def committed(self, commit: Commit, now_ns: int, took_ns: int) -> None:
        """Count a commit; called by the leader after publishing, at most once: not at all after an interrupt.

        Args:
            commit: The commit.
            now_ns: When it was synced, on the monotonic clock.
            took_ns: How long it took to write and sync the commit.
        """

    def failed(self, commit: Commit, error: PybkError) -> None:
        """Count the entries of a commit that failed; an interrupt may lose or repeat the call."""


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
        """Whether the file was reserved for changes that free space."""
        self._file_lsn = 0
        self._durable_ns = 0
        """When the last commit was synced, on the monotonic clock."""
        self._took_ns = 0
        """How long it took to write and sync it."""
        self._left: tuple[int, int, int] | None = None
        """Arguments of ``leave_log_file`` for a file that is left, until that call has returned."""

    def position(self) -> tuple[int, int, int]:
        """Return id of the current log file, offset in it, and next LSN. Threads: any."""
        return self.file_id, self._file_offset, self.next_lsn

    def write(self, commit: Commit) -> None:
        """Make a commit durable.

        Raises:
            StorageRefusedError: Space, file descriptors or memory are short; nothing was written.
            OSError: Writing or syncing failed; the content of the disk is unknown.
        """
        if not commit.buffers:
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
        records: list[bytes | memoryview] = []
        written: list[tuple[StagedEntries, int, int]] = []
        at = COMMIT_HEADER_BYTES
        for _, encode, _ in commit.creations:
            record = encode(lsn)
            records.append(record)
            at += len(record)
        for entries in commit.staged:
            entries.freeze()
            if entries.sizes:
                header, body = encode_entries(
                    entries.descriptor.ledger_id, entries.first, entries.sizes, entries.parts, lsn=lsn
                )
                records += (header, body)
                # Read from the last entry, as replay does: in one part of a striped ledger it is not the sum of sizes.
                (entries.length_at_end,) = _LENGTH.unpack_from(body, len(body) - entries.sizes[-1] + _LENGTH_AT)
                written.append((entries, at, len(body)))
                at += RECORD_HEADER_BYTES + len(body)
        if commit.groups:
            at = _bind_groups(commit, records, written)
        for encode, _ in commit.controls:
            record = encode(lsn)
            records.append(record)
            at += len(record)
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
        """Leave the current file, so that the next commit begins another; may be repeated."""
        if self._file is not None:
            self._left = self.file_id, self._file_offset, self.next_lsn - self._file_lsn
            self._file = None
        if self._left is not None:
            self._files.leave_log_file(*self._left)
            self._left = None

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
        commit.buffers = buffers

    def publish(self, commit: Commit) -> None:
        """Publish a durable commit: pass entry locations to ledgers, apply control records. May be repeated."""
        self._watermark.advance(commit.lsn)
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


def _bind_groups(
    commit: Commit, records: list[bytes | memoryview], written: list[tuple[StagedEntries, int, int]]
) -> int:
    """Put a group record before the records of each group, and the group's control records after its entries.

    Args:
        commit: The commit; ``commit.lsn`` is set.
        records: The encoded records of its creations, then record header and body of each ``StagedEntries``. Changed.
        written: As ``Commit.written``. Changed: the entries get their offsets after the group records.

    Returns:
        The offset in the commit at which the records end.
    """
    leading = len(commit.creations)
    encoded = {entries: records[leading + 2 * n : leading + 2 * n + 2] for n, (entries, _, _) in enumerate(written)}
    at = COMMIT_HEADER_BYTES + sum(map(len, records[:leading]))
    del records[leading:], written[:]

    def put(staged: Sequence[StagedEntries]) -> None:
        nonlocal at
        for entries in staged:
            if entries in encoded:
                records.extend(encoded[entries])
                written.append((entries, at, len(encoded[entries][1])))
                at += RECORD_HEADER_BYTES + len(encoded[entries][1])

    done = 0
    for group in commit.groups:
        if not group.staged:
            continue
        put(commit.staged[done : group.low])
        done = group.high
        members = commit.staged[group.low : group.high]
        controls = [encode(commit.lsn) for encode, _ in group.controls]
        headers = [
            bytes(record[:RECORD_HEADER_BYTES]) for record in (*(encoded[entries][0] for entries in members), *controls)
        ]
        nbytes = sum(len(piece) for entries in members for piece in encoded[entries]) + sum(map(len, controls))
        record = encode_group(headers, nbytes, lsn=commit.lsn)
        records.append(record)
        at += len(record)
        put(members)
        records.extend(controls)
        at += sum(map(len, controls))
    put(commit.staged[done:])
    return at
