"""Log files: the bytes of a file header, of a commit header, and of the records in a commit; and the durable watermark.

Records frame entries in every tier; a run location says where a record lies. These are layouts alone:
``storage/log/recovery.py`` reads the commits of a log from its files. See ``docs/reference/format.md``.

The watermark is the LSN up to which the log is durable, in a small mapped file that other processes read. A writer
stores the LSN first and then its complement. So the complement is always that of a durable LSN, even if the writer was
killed between the two stores.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from pybk.deferral import np
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.ledger import CORE
from pybk.storage.io.failures import is_passing
from pybk.storage.io.filesystem import FileSystem, populate, replace_file

if TYPE_CHECKING:
    import numpy.typing as npt

RECORD_HEADER_BYTES: Final = 64
RECORD_FORMAT: Final = 1

_MAGIC: Final = 0x4B52
_ENTRIES: Final = 1
_PLAIN: Final = 0
_HEADER: Final = struct.Struct("<HBBB3xqqQIIIIQ")
_CHECKSUM: Final = struct.Struct("<Q")
_GROUP: Final = struct.Struct("<QQ")

GROUP_RECORD_BYTES: Final = RECORD_HEADER_BYTES + _GROUP.size

LOCATION_COMPRESSED: Final = 1
LOCATION_BYTES: Final = 32


@cache
def location_dtype() -> np.dtype[np.void]:
    """Return the type of a run location: the entries of one record, and where the record lies.

    Index pages and the footers of cold segments have them.
    """
    return np.dtype(
        [
            ("first", "<i8"),
            ("count", "<u4"),
            ("stride", "<u4"),
            ("offset", "<u4"),
            ("file", "<u4"),
            ("body", "<u4"),
            ("flags", "<u4"),
        ]
    )


RunLocations: TypeAlias = "npt.NDArray[np.void]"


class RecordKind(IntEnum):
    """The kind of a record."""

    ENTRIES = 1
    LEDGER = 2
    DELETE = 3
    FORCE = 4
    MARK = 5
    FILE = 6
    GROUP = 7
    NAMED = 8


_KINDS: Final = frozenset(map(int, RecordKind))


class Codec(IntEnum):
    """The compression of a record's stored body."""

    PLAIN = 0
    ZSTD = 1


class RecordHeader(NamedTuple):
    """The decoded first 64 bytes of a record; sizes in bytes."""

    kind: int
    codec: int
    ledger_id: int
    first_entry_id: int
    lsn: int
    entry_count: int
    stride: int
    body_bytes: int
    raw_bytes: int
    body_checksum: int

    def location(self, offset: int, file_id: int) -> tuple[int, int, int, int, int, int, int]:
        """Return the location of the record in a file, as a row of ``location_dtype()``."""
        flags = 0 if self.codec == Codec.PLAIN else LOCATION_COMPRESSED
        return self.first_entry_id, self.entry_count, self.stride, offset, file_id, self.body_bytes, flags


def encode_header(
    kind: int,
    ledger_id: int,
    first_entry_id: int,
    body_bytes: int,
    body_checksum: int,
    *,
    lsn: int = 0,
    entry_count: int = 0,
    stride: int = 1,
    codec: int = Codec.PLAIN,
    raw_bytes: int | None = None,
) -> bytes:
    """Return the 64 header bytes of a record whose stored body has this size and checksum."""
    head = _HEADER.pack(
        _MAGIC,
        RECORD_FORMAT,
        kind,
        codec,
        ledger_id,
        first_entry_id,
        lsn,
        entry_count,
        stride,
        body_bytes,
        body_bytes if raw_bytes is None else raw_bytes,
        body_checksum,
    )
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head))


def encode_entries_header(
    ledger_id: int, first_entry_id: int, entry_count: int, body: bytes, *, stride: int = 1
) -> bytes:
    """Return the header of a record of entries with a finished plain body."""
    return encode_header(
        RecordKind.ENTRIES,
        ledger_id,
        first_entry_id,
        len(body),
        xxh3_64_intdigest(body),
        entry_count=entry_count,
        stride=stride,
    )


def encode_control(kind: int, ledger_id: int, number: int, body: bytes = b"", *, lsn: int = 0) -> bytes:
    """Return a whole control record; the meaning of ``number`` depends on its kind."""
    return encode_header(kind, ledger_id, number, len(body), xxh3_64_intdigest(body), lsn=lsn) + body


def encode_group(headers: Sequence[bytes], nbytes: int, *, lsn: int) -> bytes:
    """Return a whole group record, which makes the records that follow it atomic.

    Args:
        headers: The 64 header bytes of each record of the group, in order.
        nbytes: Bytes of these records, headers and bodies.
        lsn: LSN of the commit that holds the group.
    """
    return encode_control(RecordKind.GROUP, -1, len(headers), _group_body(headers, nbytes), lsn=lsn)


def group_matches(body: memoryview, headers: Sequence[bytes | memoryview], nbytes: int) -> bool:
    """Return whether a group record's body matches records with these headers and this many bytes."""
    return bytes(body) == _group_body(headers, nbytes)


def _group_body(headers: Sequence[bytes | memoryview], nbytes: int) -> bytes:
    return _GROUP.pack(nbytes, xxh3_64_intdigest(b"".join(headers)))


def check_kind(header: RecordHeader, *, where: str) -> None:
    """Raise UnsupportedFormatError for a record of a kind that this version does not know."""
    if header.kind not in _KINDS:
        raise UnsupportedFormatError(
            f"{where}: a record of kind {header.kind}; this pybk knows the kinds {min(_KINDS)} to {max(_KINDS)}; open "
            "the store with the pybk that wrote it, or newer"
        )


def decode_header(buffer: memoryview, offset: int, *, where: str) -> RecordHeader:
    """Decode and check a record header.

    Raises:
        CorruptError: The 64 bytes are not a record header, or the body would end beyond ``buffer``.
        UnsupportedFormatError: The header is sound but of a newer format.
    """
    end = offset + RECORD_HEADER_BYTES
    if end > len(buffer):
        raise CorruptError(
            f"{where}: a record header of {RECORD_HEADER_BYTES} bytes at offset {offset} ends "
            f"beyond the {len(buffer)} bytes that exist"
        )
    magic, version, kind, codec, ledger, first, lsn, count, stride, body, raw, checksum = _HEADER.unpack_from(
        buffer, offset
    )
    (expected,) = _CHECKSUM.unpack_from(buffer, end - 8)
    found = xxh3_64_intdigest(buffer[offset : end - 8])
    if magic != _MAGIC or found != expected:
        raise CorruptError(
            f"{where}: no record header at offset {offset}: magic {magic:#06x}, checksum {found:#x}, "
            f"expected {_MAGIC:#06x} and {expected:#x}"
        )
    if version != RECORD_FORMAT:
        raise UnsupportedFormatError(
            f"{where}: record format {version} at offset {offset}; this pybk reads "
            f"{RECORD_FORMAT}; open the store with the pybk that wrote it, or newer"
        )
    if end + body > len(buffer):
        raise CorruptError(
            f"{where}: the record at offset {offset} has a body of {body} bytes and ends beyond the "
            f"{len(buffer)} bytes that exist"
        )
    return RecordHeader(kind, codec, ledger, first, lsn, count, stride, body, raw, checksum)


def check_body(header: RecordHeader, body: memoryview, *, where: str) -> None:
    """Raise CorruptError unless the stored body matches the checksum in its header."""
    found = xxh3_64_intdigest(body)
    if found != header.body_checksum:
        raise CorruptError(
            f"{where}: body of ledger {header.ledger_id} entries from {header.first_entry_id}: checksum "
            f"{found:#x}, expected {header.body_checksum:#x}"
        )


def entry_ends(body: memoryview, entry_count: int, *, where: str) -> tuple[int, npt.NDArray[np.int64]]:
    """Locate the entries of a plain body.

    Returns:
        Where the first entry starts in ``body``, and the end of each entry in ``body``, ``(n,)`` int64, bytes.

    Raises:
        CorruptError: The table does not fit the body.
    """
    if entry_count == 1:
        return 0, np.array([len(body)], np.int64)
    start = 4 * entry_count
    if not 0 < start <= len(body):
        raise CorruptError(f"{where}: a table of {entry_count} entries does not fit a body of {len(body)} bytes")
    ends = np.frombuffer(body, "<u4", entry_count).astype(np.int64) + start
    if ends[-1] != len(body) or bool((np.diff(ends) < 0).any()):
        raise CorruptError(f"{where}: the table of {entry_count} entries ends at {int(ends[-1])} of {len(body)} bytes")
    return start, ends


def entry_table(sizes: npt.NDArray[np.int64]) -> bytes:
    """Return the table before the entries in the body of a record that has several.

    Args:
        sizes: Encoded bytes of each entry, ``(n,)`` int64.
    """
    return np.cumsum(sizes).astype("<u4").tobytes()


def encode_entries(
    ledger_id: int,
    first_entry_id: int,
    sizes: Sequence[int] | array[int],
    parts: Sequence[bytes | memoryview],
    *,
    lsn: int = 0,
    stride: int = 1,
) -> tuple[bytes, bytes]:
    """Make a record of encoded entries.

    Args:
        ledger_id: Ledger of all the entries.
        first_entry_id: Id of the first; the others follow by ``stride``.
        sizes: Encoded bytes of each entry.
        parts: The entries' bytes, in order, in any pieces.
        lsn: LSN of the commit that holds the record, 0 for none.
        stride: Distance of consecutive entry ids.

    Returns:
        Header and body, to be written one after the other.
    """
    count = len(sizes)
    body = b"".join(parts) if count == 1 else b"".join((entry_table(np.array(sizes, np.int64)), *parts))
    size = len(body)
    head = _HEADER.pack(
        _MAGIC,
        RECORD_FORMAT,
        _ENTRIES,
        _PLAIN,
        ledger_id,
        first_entry_id,
        lsn,
        count,
        stride,
        size,
        size,
        xxh3_64_intdigest(body),
    )
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head)), body


BLOCK_BYTES: Final = 4096
"""Commits begin at multiples of this; the first one follows the file header, which is one block."""

RESERVED_FILE_BYTES: Final = 512 << 10
"""The size of the log files that are reserved for changes that free space, and of no others.

Holds 127 commits of one small change, or the longest record of a log.
"""

LOG_FILE_BYTES_MAX: Final = 1 << 32
"""A log file is not larger: locations have offsets of 32 bits."""

COMMIT_HEADER_BYTES: Final = 64
LOG_FORMAT: Final = 1

COMMIT_MAGIC: Final = b"PBKC"

_FILE_MAGIC: Final = b"PYBKLOG1"
_FILE_HEADER: Final = struct.Struct("<8sI4x16sQQQ")
_COMMIT_HEADER: Final = struct.Struct("<4sIQQQII16x")
_CHECKED_BYTES: Final = 56
_KNOWN_BYTES: Final = 40
"""The bytes of a log file header before its two LSNs."""
_FEATURES: Final = struct.Struct("<I")
_FEATURES_AT: Final = 12
_ZEROS: Final = bytes(BLOCK_BYTES)


class LogFileHeader(NamedTuple):
    """The decoded header of a log file that was begun."""

    store_id: bytes
    file_id: int
    first_lsn: int
    durable_lsn: int


class CommitHeader(NamedTuple):
    """The decoded first 64 bytes of a commit; ``body_bytes`` is its records without the padding."""

    lsn: int
    durable_lsn: int
    file_id: int
    record_count: int
    body_bytes: int


def padding(size: int) -> int:
    """Return the bytes of padding from ``size`` to the next multiple of ``BLOCK_BYTES``."""
    return -size % BLOCK_BYTES


def encode_file_header(store_id: bytes, file_id: int, first_lsn: int, durable_lsn: int) -> bytes:
    """Return the 4096-byte header block of a log file.

    Args:
        store_id: The 16 bytes of the store.
        file_id: The file's id.
        first_lsn: LSN of the commit that follows the header.
        durable_lsn: LSN of the last commit that is known to be durable.
    """
    head = _FILE_HEADER.pack(_FILE_MAGIC, LOG_FORMAT, store_id, file_id, first_lsn, durable_lsn)
    return (head + _CHECKSUM.pack(xxh3_64_intdigest(head))).ljust(BLOCK_BYTES, b"\0")


def file_header_is_whole(buffer: memoryview) -> bool:
    """Return whether ``buffer`` begins with a valid log file header, of any store, file or format."""
    if len(buffer) < BLOCK_BYTES or bytes(buffer[:8]) != _FILE_MAGIC:
        return False
    (expected,) = _CHECKSUM.unpack_from(buffer, _CHECKED_BYTES)
    return xxh3_64_intdigest(buffer[:_CHECKED_BYTES]) == int(expected)


def file_header_may_be_torn(buffer: memoryview, *, store_id: bytes, file_id: int) -> bool:
    """Return whether a header that is not whole may be what an interrupted write over zeros left.

    Each byte of such a header is zero or what was written there. Only the bytes that are known without the file's
    LSNs are compared: magic, format, store and file. Anything else was overwritten, so the file may have been begun.

    Args:
        buffer: The file from its start.
        store_id: The 16 bytes of the store.
        file_id: The file's id.
    """
    known = _FILE_HEADER.pack(_FILE_MAGIC, LOG_FORMAT, store_id, file_id, 0, 0)[:_KNOWN_BYTES]
    return all(found in (0, written) for found, written in zip(buffer, known, strict=False))


def decode_file_header(buffer: memoryview, *, store_id: bytes, file_id: int, where: str) -> LogFileHeader | None:
    """Decode and check the header block of a log file.

    Args:
        buffer: The file from its start; at least its first 4096 bytes.
        store_id: The store that the file must belong to.
        file_id: The id that it must carry.
        where: Path, for error messages.

    Returns:
        The header, or None when the block is zeros: the file was preallocated and never begun.

    Raises:
        CorruptError: The header is damaged or too short, or of another store or file.
        UnsupportedFormatError: The header is sound but of another format.
    """
    if len(buffer) < BLOCK_BYTES:
        raise CorruptError(
            f"{where}: the file ends after {len(buffer)} bytes, inside its header block of {BLOCK_BYTES}; "
            "restore it from a backup",
            path=where,
            offset=len(buffer),
        )
    if bytes(buffer[:BLOCK_BYTES]) == _ZEROS:
        return None
    if not file_header_is_whole(buffer):
        raise CorruptError(
            f"{where}: no log file header at offset 0: magic {bytes(buffer[:8])!r}, expected "
            f"{_FILE_MAGIC!r} and a matching checksum; restore the file from a backup",
            path=where,
            offset=0,
        )
    _, version, found_store, found_file, first_lsn, durable_lsn = _FILE_HEADER.unpack_from(buffer)
    if version != LOG_FORMAT:
        raise UnsupportedFormatError(
            f"{where}: log file format {version}; this pybk reads {LOG_FORMAT}; open the store "
            "with the pybk that wrote it, or newer"
        )
    refuse_features(buffer, where=where)
    if found_store != store_id or found_file != file_id:
        raise CorruptError(
            f"{where}: a log file of store {found_store.hex()} with file id {found_file}, expected store "
            f"{store_id.hex()} and file id {file_id}; put the right file in its place",
            path=where,
            offset=16,
        )
    return LogFileHeader(found_store, found_file, first_lsn, durable_lsn)


def refuse_features(header: memoryview, *, where: str) -> None:
    """Refuse a sound header of a log file or cold segment that names an incompatible feature; none is in use yet.

    Raises:
        UnsupportedFormatError: It names one.
    """
    (features,) = _FEATURES.unpack_from(header, _FEATURES_AT)
    if features:
        raise UnsupportedFormatError(
            f"{where}: the file uses incompatible features {features:#x}, of which this pybk knows none; open the "
            "store with the pybk that wrote it, or newer"
        )


def encode_commit_header(lsn: int, durable_lsn: int, file_id: int, record_count: int, body_bytes: int) -> bytes:
    """Return the 64 header bytes of a commit.

    Args:
        lsn: Its LSN.
        durable_lsn: LSN of the last commit whose sync had returned.
        file_id: The file that it is written to.
        record_count: Records in it.
        body_bytes: Bytes of the records, without the padding after them.
    """
    head = _COMMIT_HEADER.pack(COMMIT_MAGIC, LOG_FORMAT, lsn, durable_lsn, file_id, record_count, body_bytes)
    return head + _CHECKSUM.pack(xxh3_64_intdigest(head))


def encode_entry_commit(
    ledger_id: int, entry_id: int, lsn: int, file_id: int, prefix: bytes | memoryview, payload: bytes | memoryview
) -> list[bytes | memoryview]:
    """Return the pieces of a commit that has one entry and nothing else, with its padding.

    Args:
        ledger_id: The entry's ledger.
        entry_id: Its id.
        lsn: LSN of the commit; the one before it is durable.
        file_id: The file that it is written to.
        prefix: The first bytes of the encoded entry.
        payload: The others.
    """
    if CORE is not None:
        return [CORE.entry_commit(ledger_id, entry_id, lsn, file_id, prefix, payload)]
    header, body = encode_entries(ledger_id, entry_id, (len(prefix) + len(payload),), (prefix, payload), lsn=lsn)
    size = len(header) + len(body)
    commit_header = encode_commit_header(lsn, lsn - 1, file_id, 1, size)
    return [commit_header, header, body, _ZEROS[: padding(COMMIT_HEADER_BYTES + size)]]


def decode_commit_header(buffer: memoryview, offset: int, file_id: int) -> CommitHeader | None:
    """Decode the commit header at ``offset``.

    Returns:
        The header; None if the 64 bytes are not a commit header of this file, or the buffer ends before them. Garbage
        never raises.

    Raises:
        UnsupportedFormatError: The header is sound and of this file, but of another format.
    """
    end = offset + COMMIT_HEADER_BYTES
    if end > len(buffer):
        return None
    magic, version, lsn, durable_lsn, found_file, record_count, body_bytes = _COMMIT_HEADER.unpack_from(buffer, offset)
    if magic != COMMIT_MAGIC or found_file != file_id:
        return None
    (expected,) = _CHECKSUM.unpack_from(buffer, end - 8)
    if xxh3_64_intdigest(buffer[offset : end - 8]) != expected:
        return None
    if version != LOG_FORMAT:
        raise UnsupportedFormatError(
            f"log file {file_id:016x}: commit format {version} at offset {offset}; this pybk "
            f"reads {LOG_FORMAT}; open the store with the pybk that wrote it, or newer"
        )
    return CommitHeader(lsn, durable_lsn, found_file, record_count, body_bytes)


# ---- the watermark -------------------------------------------------------------------------------------------------

WATERMARK_BYTES: Final = 64

_WATERMARK: Final = struct.Struct("<8s16sqqQQQ")
_WATERMARK_MAGIC: Final = b"PYBKWM01"
_LSN: Final = 3
_COMPLEMENT: Final = 4
_CLEAN: Final = 5
_TRIES: Final = 100
_REMEDY: Final = (
    "restore the directory from a copy, or run `pybk store rebuild-index` on the store, which makes it again, with "
    "--accept-loss to continue without what it lists as missing"
)


def _populate_nothing(start: int, size: int) -> None:
    """Do nothing for a map that was dropped: touching its words raises ValueError."""


class Watermark:
    """The LSN of the last commit known to be on disk, as a file that is mapped.

    A value that is stored survives the process, but it is not synced: after a power failure the file may hold an older
    LSN, never a newer one. Threads: one advances, any may read.
    """

    __slots__ = ("_path", "_populate", "_view", "_words")

    def __init__(self, fs: FileSystem, view: memoryview, path: str) -> None:
        self._view = view
        self._populate = fs.populator(view)
        # Signed, so that a complement is a small negative number, which is cheap to compute.
        self._words = view.cast("q")
        self._path = path

    @classmethod
    def create(cls, fs: FileSystem, path: str, store_id: bytes) -> Watermark:
        """Make and map the file for a log without commits that was not closed cleanly; durable on return.

        Args:
            fs: The file system.
            path: The file; an existing one is replaced.
            store_id: 16 bytes.
        """
        replace_file(fs, path, _WATERMARK.pack(_WATERMARK_MAGIC, store_id, 0, ~0, 0, 0, 0))
        return cls.open(fs, path, store_id, writable=True)

    @classmethod
    def open(cls, fs: FileSystem, path: str, store_id: bytes, *, writable: bool) -> Watermark:
        """Map the file.

        Raises:
            CorruptError: The file is missing, is not a watermark of this store, or holds two numbers that contradict
                each other.
            OSError: It cannot be opened.
        """
        if not fs.exists(path):
            raise CorruptError(f"{path} is missing; {_REMEDY}", path=path)
        view = fs.map_shared(path) if writable else fs.view(path)
        if len(view) != WATERMARK_BYTES:
            raise CorruptError(f"{path}: {len(view)} bytes; a watermark has {WATERMARK_BYTES}; {_REMEDY}", path=path)
        populate(fs, view, 0, WATERMARK_BYTES)
        magic, found_id, _, _, clean, *zeros = _WATERMARK.unpack(view)
        if magic != _WATERMARK_MAGIC or clean > 1 or any(zeros):
            raise CorruptError(
                f"{path}: magic {magic!r}, clean end {clean}, then {zeros}; expected {_WATERMARK_MAGIC!r}, 0 or "
                f"1, and zeros; {_REMEDY}",
                path=path,
                offset=0,
            )
        if found_id != store_id:
            raise CorruptError(
                f"{path}: watermark of store {found_id.hex()}, expected {store_id.hex()}; {_REMEDY}",
                path=path,
                offset=8,
            )
        watermark = cls(fs, view, path)
        watermark.durable_lsn()
        return watermark

    def advance(self, lsn: int) -> None:
        """Record that the log is durable up to ``lsn``; call it after the sync that made it so. Costs about 1 µs.

        Args:
            lsn: 0 to 2^63 - 1, never less than before.

        Raises:
            CorruptError, StorageError: The file was truncated, or its page cannot be read; nothing was stored.
        """
        words = self._words
        try:
            self._populate(0, WATERMARK_BYTES)
        except OSError as error:
            self._unless_passing(error)
        words[_LSN] = lsn
        words[_COMPLEMENT] = ~lsn

    def durable_lsn(self) -> int:
        """Return an LSN up to which the log is durable; at most one :meth:`advance` old.

        Raises:
            CorruptError: The two numbers contradict each other at every try, or the file was truncated.
            StorageError: The device cannot read it.
        """
        words = self._reachable()
        for _ in range(_TRIES):
            # The writer stores the complement last, and it is read first here: so the LSN is the same or newer.
            durable = ~words[_COMPLEMENT]
            if words[_LSN] >= durable >= 0:
                return durable
        raise CorruptError(
            f"{self._path}: durable LSN {words[_LSN]} is below {~words[_COMPLEMENT]}, which its "
            f"complement gives, or one of the two is negative; {_REMEDY}",
            path=self._path,
            offset=8 * _LSN,
        )

    def _reachable(self) -> memoryview:
        """Return the map as words, once its page is in memory."""
        try:
            self._populate(0, WATERMARK_BYTES)
        except OSError as error:
            self._unless_passing(error)
        return self._words

    def _unless_passing(self, error: OSError) -> None:
        """Raise an error of populating, unless memory is short: a page fault waits for that.

        A durable commit must not be refused.
        """
        if not is_passing(error):
            raise CorruptError(
                f"{self._path} cannot be read or was cut while it was open: {error}; {_REMEDY}", path=self._path
            ) from error

    def stored_lsn(self) -> int:
        """Return the LSN that was stored last; if the file is damaged, compare the LSN with the log.

        If the file is damaged, :meth:`durable_lsn` may return too little, and this may return too much.

        Raises:
            CorruptError: As :meth:`durable_lsn`.
        """
        durable = self.durable_lsn()
        return max(durable, int(self._words[_LSN]))

    @property
    def clean(self) -> bool:
        """True if the store was closed with everything synced and has not been opened since."""
        return self._reachable()[_CLEAN] == 1

    @clean.setter
    def clean(self, clean: bool) -> None:
        self._reachable()[_CLEAN] = int(clean)

    def close(self) -> None:
        """Drop the mapping; closing again does nothing. Every other method raises ValueError after that."""
        self._populate = _populate_nothing  # the populator references the map and its descriptor
        self._words.release()
        self._view.release()
