"""The entries of a segment's ledger: a header, then records. ``docs/design/ledger_lists.md`` lists every byte.

Each entry begins with 16 bytes: format, kind, flags, the number of its records, and the sequence number of the first.
So every entry has its place in the log, and a reader notices a gap without any index. A record of a named log begins
with its key and headers (``encode_attributes``); its position is its place.

The entries of a *detached* ledger, which a log adopts later, count from 0: its writer does not know which records come
before it. Each of them has the mark ``RELATIVE``. The row of the list that adopts the ledger has its ``Origin``, which
the functions here add to what the entries say.

This module defines layouts and does not read or write ledgers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, IntFlag
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

from pybk.deferral import np
from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.ledger.entry import EntryBatch, gather
from pybk.values import INT64_MAX, decode_json, encode_json

if TYPE_CHECKING:
    import numpy.typing as npt


class Position(NamedTuple):
    """The place of a record in a log. Positions of one log are ordered as its records are.

    Attributes:
        segment: The number of its segment, from 1 up.
        entry: Its entry in the segment's ledger, from 1 up.
        slot: Its index in the entry, from 0 up.
        seq: Its sequence number, from 0 up, without gaps over the whole log.

    Source: DistributedLog's DLSN, to which the sequence number is added.
    """

    segment: int
    entry: int
    slot: int
    seq: int

    def __str__(self) -> str:
        """Return it as ``segment:entry:slot:seq``, which ``parse`` reads."""
        return ":".join(map(str, self))

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return the position from which ``str`` made a text.

        Raises:
            UsageError: The text is not a position.
        """
        parts = text.split(":") if isinstance(text, str) else []
        if len(parts) != len(cls._fields) or not all(each.isascii() and each.isdigit() for each in parts):
            raise UsageError(f"{text!r:.50} is not a position; one looks like 3:17:0:1234")
        numbers = [int(each) for each in parts]
        if max(numbers) > INT64_MAX:
            raise UsageError(f"{text!r:.50} is not a position: a number is above {INT64_MAX}")
        return cls(*numbers)


class Move(NamedTuple):
    """Entries that a lost segment does not hold; the next segment begins with them.

    Attributes:
        segment: The number of the lost segment.
        entry: The first of them there.
        to_segment: The number of the segment that they are in now, from entry 1 on.
    """

    segment: int
    entry: int
    to_segment: int

    def place(self, segment: int, entry: int) -> tuple[int, int]:
        """Return the segment and the entry id that an entry has now."""
        if segment == self.segment and entry >= self.entry:
            return self.to_segment, entry - self.entry + 1
        return segment, entry


def moved(position: Position, moves: Iterable[Move]) -> Position:
    """Return the place of a record after moves, which are applied in their order."""
    segment, entry = position.segment, position.entry
    for move in moves:
        segment, entry = move.place(segment, entry)
    return position._replace(segment=segment, entry=entry)


KEY_BYTES_MAX: Final = 4 << 10
HEADERS_MAX: Final = 64
HEADERS_BYTES_MAX: Final = 64 << 10
_NAME_BYTES_MAX: Final = 255
NO_KEY: Final = 0xFFFF
"""The size of the key of a record without one."""

_COUNTS: Final = struct.Struct("<HH")
_LENGTHS: Final = struct.Struct("<HI")

NO_ATTRIBUTES: Final = _COUNTS.pack(NO_KEY, 0)
"""The attributes of a record without a key and headers."""

Headers = tuple[tuple[str, bytes], ...]


def encode_attributes(key: object, headers: object) -> bytes:
    """Return the bytes of a key, bytes or None, and of headers, pairs of a name and bytes; empty for neither.

    Raises:
        UsageError: A key or a header is of a wrong type, or too long.
    """
    if key is None and headers == ():
        return b""
    if not isinstance(key, bytes | None) or len(key or b"") > KEY_BYTES_MAX:
        raise UsageError(f"key is {key!r:.50}; it takes at most {KEY_BYTES_MAX} bytes, or None")
    pairs = _checked_headers(headers)
    parts = [_COUNTS.pack(NO_KEY if key is None else len(key), len(pairs)), key or b""]
    for each in pairs:
        name, value = _checked_header(each)
        parts += [_LENGTHS.pack(len(name), len(value)), name, value]
    found = b"".join(parts)
    if len(found) > KEY_BYTES_MAX + HEADERS_BYTES_MAX:
        raise UsageError(f"key and headers have {len(found)} bytes; they take {HEADERS_BYTES_MAX}: put more into data")
    return found


def _checked_headers(headers: object) -> Sequence[object]:
    if not isinstance(headers, Sequence) or isinstance(headers, str | bytes) or len(headers) > HEADERS_MAX:
        raise UsageError(
            f"headers is {headers!r:.50}; it takes a sequence of at most {HEADERS_MAX} pairs of a name and bytes"
        )
    return headers


def _checked_header(header: object) -> tuple[bytes, bytes]:
    match header:
        case (str() as name, bytes() as value):
            try:
                encoded = name.encode()
            except UnicodeEncodeError:
                encoded = b""
            if 1 <= len(encoded) <= _NAME_BYTES_MAX:
                return encoded, value
    raise UsageError(
        f"a header is {header!r:.50}; it takes a pair of a name, of 1 to {_NAME_BYTES_MAX} bytes in UTF-8, and bytes"
    )


def attributes_of_keys(key_sizes: Int64s) -> bytes:
    """Return the attributes of records with keys and without headers, each as far as its key, one after the other.

    Args:
        key_sizes: The bytes of each key, ``NO_KEY`` for a record without one, ``(n,)`` int64.

    Returns:
        ``len(NO_ATTRIBUTES)`` bytes for each.
    """
    found = np.zeros((len(key_sizes), 2), "<u2")
    found[:, 0] = key_sizes
    return found.tobytes()


def decode_attributes(data: bytes, *, where: str) -> tuple[bytes | None, Headers, bytes]:
    """Return the key, the headers and the data of a record.

    Raises:
        CorruptError: The bytes do not begin with a key and headers; ``where`` names the record.
    """
    try:
        key_bytes, count = _COUNTS.unpack_from(data)
        at = _COUNTS.size
        key = None
        if key_bytes != NO_KEY:
            key, at = _piece(data, at, key_bytes)
        headers = []
        for _ in range(count):
            name_bytes, value_bytes = _LENGTHS.unpack_from(data, at)
            name, at = _piece(data, at + _LENGTHS.size, name_bytes)
            value, at = _piece(data, at, value_bytes)
            headers.append((name.decode(), value))
    except (struct.error, ValueError) as error:
        raise CorruptError(f"{where}: its key and headers are damaged: {error}") from error
    return key, tuple(headers), data[at:]


def _piece(data: bytes, at: int, nbytes: int) -> tuple[bytes, int]:
    """Return some bytes and where they end; ValueError if there are fewer."""
    if at + nbytes > len(data):
        raise ValueError(f"{nbytes} bytes at {at} of {len(data)}")
    return data[at : at + nbytes], at + nbytes


ENTRY_FORMAT: Final = 1
HEADER_BYTES: Final = 16
_HEADER: Final = struct.Struct("<BBHIq")
_TIME: Final = struct.Struct("<q")
_HIGHEST: Final = struct.Struct("<qq")
_END_BYTES: Final = 4
TIME_BYTES: Final = 8
ITEM_EXTRA_BYTES: Final = _HIGHEST.size + TIME_BYTES
"""The most bytes that an entry with one record of a named log has in addition to one of a write-ahead log."""

NO_VALUE: Final = -1
"""Stands for the time or transaction id of a record that has none."""

Int64s: TypeAlias = "npt.NDArray[np.int64]"


@cache
def _header_dtype() -> np.dtype[np.void]:
    """Return the type of the header of an entry."""
    return np.dtype([("format", "u1"), ("kind", "u1"), ("flags", "<u2"), ("count", "<u4"), ("seq", "<i8")])


class EntryKind(IntEnum):
    """The kind of an entry of a segment."""

    SEGMENT = 1
    RECORDS = 2
    DETACHED = 3


class EntryFlag(IntFlag):
    """The properties of an entry's records, and the relation of the entry to others."""

    NONE = 0
    TIMES = 1
    """Each record has an event time."""
    MORE = 2
    """The next entry belongs to the same transaction, and without it this one does not count."""
    HIGHEST = 4
    """The entry has the highest event time and transaction id of all records before it, by which a log is searched."""
    TXIDS = 8
    """Each record has a transaction id."""
    ATTRIBUTES = 16
    """The data of each record begins with its key and headers; see ``pybk.streams.format``."""
    RELATIVE = 32
    """Its numbers count from 0, and its highest values are those of its ledger alone, until a log adopts it."""


UNKNOWN_FLAGS: Final = 0xFFFF & ~sum(EntryFlag)


SEGMENT_KEY: Final = "pybk.segment"
"""Custom metadata of a segment's ledger: its ``SegmentHeader`` as JSON, from which a list can be made again."""

DETACHED_KEY: Final = "pybk.detached"
"""Custom metadata of a detached ledger: its ``DetachedHeader`` as JSON."""


class SegmentHeader(NamedTuple):
    """The first entry of a segment's ledger: it names the segment, under the ledger's authentication code.

    Attributes:
        uid: The list's.
        name: The log's name when the segment was made.
        number: The segment's.
        epoch: The epoch of its writer.
        generation: The generation of its records.
        predecessor: The ledger of the segment before it; None for the first.
    """

    uid: bytes
    name: str
    number: int
    epoch: int
    generation: int
    predecessor: int | None

    def describe(self) -> bytes:
        """Return it as JSON, for the description of the ledger."""
        return encode_json(self._asdict() | {"uid": self.uid.hex()})

    def encode(self) -> bytes:
        """Return the entry's payload."""
        return _HEADER.pack(ENTRY_FORMAT, EntryKind.SEGMENT, 0, 0, 0) + self.describe()

    @classmethod
    def decode(cls, payload: bytes, *, where: str) -> SegmentHeader:
        """Decode the result of ``encode``; ``where`` names the entry in errors. Raises CorruptError."""
        check_kind(payload, EntryKind.SEGMENT, where=where)
        return cls.describes(payload[HEADER_BYTES:], where=where)

    @classmethod
    def describes(cls, description: bytes, *, where: str) -> SegmentHeader:
        """Decode the result of ``describe``; ``where`` names it in errors. Raises CorruptError."""

        def make(values: dict[str, Any]) -> SegmentHeader:
            return cls(**values | {"uid": bytes.fromhex(values["uid"])})

        return decode_json(description, make, where=where)


class DetachedHeader(NamedTuple):
    """The first entry of a detached ledger: it names the log and the commit, under the ledger's authentication code.

    Attributes:
        uid: The list's.
        name: The log's name when the ledger was made.
        query: The query or job whose commit adopts it.
        epoch: The number of that commit among those of the query.
        partition: The number of the task that wrote it, among those of the commit.
        attempt: The number of the task's attempt.
    """

    uid: bytes
    name: str
    query: str
    epoch: int
    partition: int
    attempt: int

    def describe(self) -> bytes:
        """Return it as JSON, for the description of the ledger."""
        return encode_json(self._asdict() | {"uid": self.uid.hex()})

    def encode(self) -> bytes:
        """Return the entry's payload."""
        return _HEADER.pack(ENTRY_FORMAT, EntryKind.DETACHED, 0, 0, 0) + self.describe()

    @classmethod
    def decode(cls, payload: bytes, *, where: str) -> DetachedHeader:
        """Decode the result of ``encode``; ``where`` names the entry in errors. Raises CorruptError."""
        check_kind(payload, EntryKind.DETACHED, where=where)
        return cls.describes(payload[HEADER_BYTES:], where=where)

    @classmethod
    def describes(cls, description: bytes, *, where: str) -> DetachedHeader:
        """Decode the result of ``describe``; ``where`` names it in errors. Raises CorruptError."""

        def make(values: dict[str, Any]) -> DetachedHeader:
            return cls(**values | {"uid": bytes.fromhex(values["uid"])})

        return decode_json(description, make, where=where)


class Highest(NamedTuple):
    """The highest values of all records up to one; ``NO_VALUE`` if none has one.

    The highest time never falls. So the first record with a time of at least ``t`` is the one at which the highest time
    reaches ``t``, in whatever order the times are.

    Attributes:
        time_ns: Event time, nanoseconds since 1970.
        txid: Transaction id.
    """

    time_ns: int = NO_VALUE
    txid: int = NO_VALUE


NOTHING_YET: Final = Highest()


class Origin(NamedTuple):
    """The place in a log where the entries of an adopted ledger begin.

    Attributes:
        seq: The first record of the ledger.
        before: The highest values of all records before it.
    """

    seq: int
    before: Highest


class EntryHeader(NamedTuple):
    """The first 16 bytes of an entry.

    Attributes:
        flags: The flags of its records.
        records: The number of its records.
        seq: The sequence number of the first of them.
    """

    flags: EntryFlag
    records: int
    seq: int


def check_kind(payload: bytes | memoryview, kind: EntryKind, *, where: str) -> None:
    """Raise unless an entry is of a kind.

    Raises:
        UnsupportedFormatError: A newer pybk wrote it.
        CorruptError: It is of another kind.
    """
    if len(payload) < HEADER_BYTES:
        raise CorruptError(f"{where} has {len(payload)} bytes, fewer than the {HEADER_BYTES} of an entry of a log")
    if payload[0] != ENTRY_FORMAT:
        raise UnsupportedFormatError(
            f"{where} has format {payload[0]}; this pybk reads format {ENTRY_FORMAT}: install a newer pybk"
        )
    if payload[1] != kind:
        raise CorruptError(f"{where} is of kind {payload[1]}, not {kind.name}: it is not an entry of this log")


def decode_entry_header(payload: bytes, *, where: str, origin: Origin | None = None) -> EntryHeader:
    """Decode the header of an entry with records.

    Args:
        payload: The entry.
        where: Names it in errors.
        origin: That of its ledger, if the log adopted this; its numbers are added.

    Raises:
        UnsupportedFormatError: A newer pybk wrote it.
        CorruptError: It is of another kind, or of another sort of ledger.
    """
    check_kind(payload, EntryKind.RECORDS, where=where)
    _, _, flags, count, seq = _HEADER.unpack_from(payload)
    if flags & UNKNOWN_FLAGS:
        raise UnsupportedFormatError(
            f"{where} has flags {flags:#x}; this pybk knows those up to {max(EntryFlag):#x}: install a newer pybk"
        )
    if count < 1:
        raise CorruptError(f"{where} has no records")
    if (flags & EntryFlag.RELATIVE != 0) != (origin is not None):
        own = "is not marked relative" if origin else "is marked relative"
        ledger = "one that the log adopted" if origin else "a segment that the log's writer made"
        raise CorruptError(f"{where} {own}, and its ledger is {ledger}: restore the log's record")
    return EntryHeader(EntryFlag(flags), count, seq if origin is None else origin.seq + seq)


def encode_record(seq: int, data: bytes, time_ns: int | None = None) -> bytes:
    """Return the payload of an entry with one record.

    Args:
        seq: Its sequence number.
        data: The application's bytes.
        time_ns: Its event time, nanoseconds since 1970; None for none.
    """
    if time_ns is None:
        return _HEADER.pack(ENTRY_FORMAT, 2, 0, 1, seq) + data
    return _HEADER.pack(ENTRY_FORMAT, 2, 1, 1, seq) + _TIME.pack(time_ns) + data


def encode_records(seq: int, payloads: Sequence[bytes], *, more: bool = False) -> bytes:
    """Return the payload of an entry with some records.

    Args:
        seq: The sequence number of the first.
        payloads: The application's bytes, at least one record.
        more: Whether the next entry belongs to the same transaction.
    """
    count = len(payloads)
    flags = EntryFlag.MORE if more else EntryFlag.NONE
    header = _HEADER.pack(ENTRY_FORMAT, EntryKind.RECORDS, flags, count, seq)
    if count == 1:
        return header + payloads[0]
    ends = np.cumsum(np.fromiter(map(len, payloads), np.int64, count)).astype("<u4").tobytes()
    return b"".join((header, ends, *payloads))


class Item(NamedTuple):
    """A record of a named log, as it is written.

    Attributes:
        data: The application's bytes.
        time_ns: Its event time, nanoseconds since 1970.
        txid: Its transaction id; ``NO_VALUE`` for none.
        attributes: Its encoded key and headers; empty for none.
    """

    data: bytes
    time_ns: int
    txid: int
    attributes: bytes


def encode_items(
    seq: int, items: Sequence[Item], highest: Highest, *, more: bool = False, relative: bool = False
) -> bytes:
    """Return the payload of an entry with some records of a named log.

    Args:
        seq: The sequence number of the first.
        items: At least one.
        highest: The highest values of all records before.
        more: As for ``encode_records``.
        relative: Whether number and highest values are those within the ledger.
    """
    count = len(items)
    flags = EntryFlag.TIMES | EntryFlag.HIGHEST | (EntryFlag.MORE if more else EntryFlag.NONE)
    if relative:
        flags |= EntryFlag.RELATIVE
    parts = [_HIGHEST.pack(*highest), _int64s(item.time_ns for item in items)]
    if any(item.txid != NO_VALUE for item in items):
        flags |= EntryFlag.TXIDS
        parts.append(_int64s(item.txid for item in items))
    payloads = [item.data for item in items]
    if any(item.attributes for item in items):
        flags |= EntryFlag.ATTRIBUTES
        payloads = [(item.attributes or NO_ATTRIBUTES) + item.data for item in items]
    if count > 1:
        parts.append(np.cumsum(np.fromiter(map(len, payloads), np.int64, count)).astype("<u4").tobytes())
    return b"".join((_HEADER.pack(ENTRY_FORMAT, EntryKind.RECORDS, flags, count, seq), *parts, *payloads))


def part_bytes(records: Records) -> Int64s:
    """Return the most bytes that each record takes in an entry of ``encode_parts``, ``(n,)`` int64."""
    found: Int64s = records.ends - records.starts + (len(NO_ATTRIBUTES) + 2 * TIME_BYTES + _END_BYTES)
    return found


def encode_parts(seq: int, parts: Sequence[Records], highest: Highest) -> tuple[bytes, Highest]:
    """Return the payload of a relative entry with records that lie in buffers, and the highest values after it.

    Args:
        seq: The number of the first in the ledger.
        parts: The records, which need not come from one ledger.
        highest: The highest values of all records before in the ledger.

    Cost: Some 100 ns per record whose data does not follow that of the one before it; copies all data once.
    """
    flags = EntryFlag.TIMES | EntryFlag.HIGHEST | EntryFlag.RELATIVE
    times = np.concatenate([_numbers(each.times, each) for each in parts])
    pieces: list[bytes | memoryview] = [_HIGHEST.pack(*highest), times.astype("<i8").tobytes()]
    txid = highest.txid
    if any(each.txids is not None for each in parts):
        txids = np.concatenate([_numbers(each.txids, each) for each in parts])
        if (txids != NO_VALUE).any():
            flags |= EntryFlag.TXIDS
            pieces.append(txids.astype("<i8").tobytes())
            txid = max(txid, int(txids.max()))
    sizes = np.concatenate([each.ends - each.starts for each in parts])
    marks = [each.attributed for each in parts if each.attributed is not None]
    attributed = any(each.any() for each in marks)
    if attributed:
        flags |= EntryFlag.ATTRIBUTES
        bare = np.concatenate([_bare(each) for each in parts])
        sizes = sizes + np.where(bare, len(NO_ATTRIBUTES), 0)
    count = len(sizes)
    if count > 1:
        pieces.append(np.cumsum(sizes).astype("<u4").tobytes())
    for each in parts:
        pieces += _with_attributes(each) if attributed and _bare(each).any() else _data_of(each)
    after = Highest(max(highest.time_ns, int(times.max())), txid)
    return b"".join((_HEADER.pack(ENTRY_FORMAT, EntryKind.RECORDS, flags, count, seq), *pieces)), after


def _numbers(values: Int64s | None, records: Records) -> Int64s:
    return np.full(len(records.starts), NO_VALUE, np.int64) if values is None else values


def _bare(records: Records) -> npt.NDArray[np.bool_]:
    """Return for each record whether its data begins without a key and headers."""
    return np.ones(len(records.starts), bool) if records.attributed is None else ~records.attributed


def _data_of(records: Records) -> list[memoryview]:
    """Return the data of records, in one piece if it is."""
    starts, ends = records.starts, records.ends
    if (starts[1:] == ends[:-1]).all():
        return [records.buffer[int(starts[0]) : int(ends[-1])]]
    return [records.buffer[low:high] for low, high in zip(starts.tolist(), ends.tolist(), strict=True)]


def _with_attributes(records: Records) -> list[bytes | memoryview]:
    """Return the data of records, each with a key and headers, or with a mark that it has none."""
    pieces: list[bytes | memoryview] = []
    for low, high, bare in zip(records.starts.tolist(), records.ends.tolist(), _bare(records).tolist(), strict=True):
        pieces += (NO_ATTRIBUTES, records.buffer[low:high]) if bare else (records.buffer[low:high],)
    return pieces


def _int64s(values: Iterable[int]) -> bytes:
    return np.fromiter(values, "<i8").tobytes()


def item_bytes(item: Item) -> int:
    """Return the most bytes that a record takes in an entry."""
    return len(item.data) + max(len(item.attributes), len(NO_ATTRIBUTES)) + 2 * TIME_BYTES + _END_BYTES


def highest_before(payload: bytes, *, where: str, origin: Origin | None = None) -> Highest:
    """Return the highest values before an entry of a named log; arguments and errors as ``decode_entry_header``."""
    header = decode_entry_header(payload, where=where, origin=origin)
    if EntryFlag.HIGHEST not in header.flags or len(payload) < HEADER_BYTES + _HIGHEST.size:
        raise CorruptError(f"{where} is not an entry of a named log: it does not say what was highest before it")
    found = Highest(*_HIGHEST.unpack_from(payload, HEADER_BYTES))
    return found if origin is None else Highest(*map(max, origin.before, found))


def highest_after(payload: bytes, *, where: str, origin: Origin | None = None) -> Highest:
    """Return the highest values up to the last record of an entry; ``NOTHING_YET`` for a write-ahead log's."""
    flags, count, _ = decode_entry_header(payload, where=where, origin=origin)
    if EntryFlag.HIGHEST not in flags:
        return NOTHING_YET
    values = list(highest_before(payload, where=where, origin=origin))
    at = HEADER_BYTES + _HIGHEST.size
    for index, flag in enumerate((EntryFlag.TIMES, EntryFlag.TXIDS)):
        if flag in flags:
            if len(payload) < at + TIME_BYTES * count:
                raise CorruptError(f"{where}: an entry is shorter than its records")
            values[index] = max(values[index], int(np.frombuffer(payload, "<i8", count, at).max()))
            at += TIME_BYTES * count
    return Highest(*values)


def records_bytes(nbytes: int, count: int) -> int:
    """Return the size of the entry that ``encode_records`` makes of ``count`` records with ``nbytes`` in all."""
    return HEADER_BYTES + (_END_BYTES * count if count > 1 else 0) + nbytes


class Records(NamedTuple):
    """Records in a buffer.

    Attributes:
        first_seq: The sequence number of the first; the others follow without gaps.
        buffer: Holds their data.
        starts: The offset where the data of each begins in the buffer, ``(n,)`` int64, bytes.
        ends: The offset where it ends, ``(n,)`` int64, bytes.
        times: Event times, ``(n,)`` int64, nanoseconds since 1970, -1 for none; None if no record has one.
        complete: The number of records that belong to transactions whose end is among them; the others have to wait for
            entries that follow.
        entries: The number of entries that these ``complete`` records come from.
        txids: Transaction ids, ``(n,)`` int64, -1 for none; None if no record has one.
        attributed: Whether the data of each begins with a key and headers, ``(n,)`` bool; None if no record's does.
        segment: The number of the segment that they are in.
        first_entry: The first entry that they come from.
        firsts: The first record of each entry, ``(m,)`` int64, ascending.
    """

    first_seq: int
    buffer: memoryview
    starts: Int64s
    ends: Int64s
    times: Int64s | None
    complete: int
    entries: int
    txids: Int64s | None
    attributed: npt.NDArray[np.bool_] | None
    segment: int
    first_entry: int
    firsts: Int64s

    @classmethod
    def new(
        cls,
        buffer: memoryview,
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        *,
        times: npt.NDArray[np.int64],
        txids: npt.NDArray[np.int64] | None = None,
        attributed: npt.NDArray[np.bool_] | None = None,
    ) -> Self:
        """Return records that are in no entry yet, with numbers from 0 up; arguments as the attributes."""
        return cls(
            first_seq=0,
            buffer=buffer,
            starts=starts,
            ends=ends,
            times=times,
            complete=len(starts),
            entries=0,
            txids=txids,
            attributed=attributed,
            segment=0,
            first_entry=0,
            firsts=starts[:0],
        )

    def within(self, first: int, last: int) -> Records:
        """Return the complete records from ``first`` to ``last``."""
        low = max(first - self.first_seq, 0)
        high = max(low, min(self.complete, last - self.first_seq + 1))
        if low == 0 and high == len(self.starts):
            return self
        wanted = slice(low, high)
        return self._replace(
            first_seq=self.first_seq + low,
            starts=self.starts[wanted],
            ends=self.ends[wanted],
            times=None if self.times is None else self.times[wanted],
            complete=high - low,
            txids=None if self.txids is None else self.txids[wanted],
            attributed=None if self.attributed is None else self.attributed[wanted],
        )

    def data(self) -> Iterator[bytes]:
        """Yield a copy of the data of each record, made when it is asked for, so a caller can reuse the memory."""
        return map(bytes, map(self.buffer.__getitem__, map(slice, self.starts.tolist(), self.ends.tolist())))

    def places(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the entry of each record and its index there, from 0 up: two arrays ``(n,)`` int64."""
        seqs = np.arange(self.first_seq, self.first_seq + len(self.starts))
        which = np.searchsorted(self.firsts, seqs, side="right") - 1
        return which + self.first_entry, seqs - self.firsts[which]


def decode_batch(batch: EntryBatch, seq: int, *, where: str, segment: int = 0, origin: Origin | None = None) -> Records:
    """Locate the records of some consecutive entries, and check that they follow each other without a gap.

    Args:
        batch: The entries, verified; none is the header of the segment.
        seq: The sequence number that the first has to have.
        where: Names the ledger in errors.
        segment: The number of the segment.
        origin: As for ``decode_entry_header``.

    Raises:
        CorruptError: A record is missing, or an entry is not an entry of a log.
        UnsupportedFormatError: A newer pybk wrote an entry.

    Cost: some 60 ns per entry and 20 ns per record; no data is copied.
    """
    starts, sizes = batch.payload_offsets, batch.payload_sizes
    if int(sizes.min()) < HEADER_BYTES:
        raise CorruptError(f"{where}: an entry has {int(sizes.min())} bytes, fewer than the {HEADER_BYTES} of a header")
    headers = gather(batch.buffer, starts, HEADER_BYTES).view(_header_dtype())
    flags, counts = headers["flags"], headers["count"].astype(np.int64)
    expected = seq + np.cumsum(counts) - counts
    within = expected if origin is None else expected - origin.seq
    sound = (headers["format"] == ENTRY_FORMAT) & (headers["kind"] == EntryKind.RECORDS) & (headers["seq"] == within)
    mark = EntryFlag.NONE if origin is None else EntryFlag.RELATIVE
    sound &= ((flags & (UNKNOWN_FLAGS | EntryFlag.RELATIVE)) == mark) & (counts > 0)
    if not sound.all():
        number = int(np.argmin(sound))
        payload = bytes(batch.buffer[int(starts[number]) : int(starts[number]) + HEADER_BYTES])
        at = f"{where} entry {int(batch.entry_ids[number])}"
        found = decode_entry_header(payload, where=at, origin=origin)
        raise CorruptError(f"{at} begins with record {found.seq}, but {int(expected[number])} comes next")
    whole = np.flatnonzero((flags & EntryFlag.MORE) == 0)
    entries = int(whole[-1]) + 1 if len(whole) else 0
    body = _Bodies(batch.buffer, starts + HEADER_BYTES, starts + sizes, counts, where)
    body.check_counts()
    body.skip((flags & EntryFlag.HIGHEST) != 0, _HIGHEST.size)
    times = body.int64s((flags & EntryFlag.TIMES) != 0)
    txids = body.int64s((flags & EntryFlag.TXIDS) != 0)
    attributed = (flags & EntryFlag.ATTRIBUTES) != 0
    lows, highs = body.split()
    return Records(
        first_seq=seq,
        buffer=batch.buffer,
        starts=lows,
        ends=highs,
        times=times,
        complete=int(counts[:entries].sum()),
        entries=entries,
        txids=txids,
        attributed=np.repeat(attributed, counts) if attributed.any() else None,
        segment=segment,
        first_entry=int(batch.entry_ids[0]),
        firsts=expected,
    )


class _Bodies:
    """The bodies of some entries, whose parts are located one after the other.

    Args:
        buffer: Holds them.
        starts: Where the next part of each begins, ``(m,)`` int64; advanced by each call.
        ends: Where each ends, ``(m,)`` int64.
        counts: The number of records of each, ``(m,)`` int64.
        where: Names the ledger in errors.
    """

    def __init__(self, buffer: memoryview, starts: Int64s, ends: Int64s, counts: Int64s, where: str) -> None:
        self._buffer = buffer
        self._starts = starts
        self._ends = ends
        self._counts = counts
        self._where = where

    def check_counts(self) -> None:
        """Raise CorruptError if an entry is too short for its number of records, before memory is taken for these."""
        ends = np.where(self._counts > 1, _END_BYTES * self._counts, 0)
        if (self._starts + ends > self._ends).any():
            raise CorruptError(f"{self._where}: an entry is shorter than its records")

    def skip(self, present: npt.NDArray[np.bool_], nbytes: int | Int64s) -> None:
        """Skip a part of the entries that have it.

        Raises:
            CorruptError: An entry is too short for it.
        """
        self._starts = self._starts + np.where(present, nbytes, 0)
        if (self._starts > self._ends).any():
            raise CorruptError(f"{self._where}: an entry is shorter than its records")

    def int64s(self, present: npt.NDArray[np.bool_]) -> Int64s | None:
        """Return a number for each record, ``NO_VALUE`` in entries that have none; None if no entry has them."""
        if not present.any():
            return None
        starts, counts = self._starts[present], self._counts[present]
        self.skip(present, TIME_BYTES * self._counts)
        found = np.frombuffer(self._joined(starts, TIME_BYTES * counts), "<i8")
        if present.all():
            return found
        numbers = np.full(int(self._counts.sum()), NO_VALUE, np.int64)
        numbers[np.repeat(present, self._counts)] = found
        return numbers

    def split(self) -> tuple[Int64s, Int64s]:
        """Return where the data of each record begins and ends.

        Raises:
            CorruptError: A table of ends does not fit its entry.
        """
        counts = self._counts
        if int(counts.max()) <= 1:
            return self._starts, self._ends
        has_table = counts > 1
        table_bytes = np.where(has_table, _END_BYTES * counts, 0)
        firsts = self._starts + table_bytes
        if (firsts > self._ends).any():
            count = int(counts[np.argmax(firsts > self._ends)])
            raise CorruptError(f"{self._where}: a table of {count} records does not fit its entry")
        tables = np.frombuffer(self._joined(self._starts, table_bytes), "<u4")
        highs = np.empty(int(counts.sum()), np.int64)
        of_tables = np.repeat(has_table, counts)
        highs[of_tables] = tables + np.repeat(firsts[has_table], counts[has_table])
        highs[~of_tables] = self._ends[~has_table]
        ends = np.cumsum(counts)
        lows = np.empty_like(highs)
        lows[1:] = highs[:-1]
        lows[ends - counts] = firsts
        damaged = (highs[ends - 1] != self._ends) | np.logical_or.reduceat(highs < lows, ends - counts)
        if damaged.any():
            count = int(counts[np.argmax(damaged)])
            raise CorruptError(f"{self._where}: the table of {count} records is damaged")
        return lows, highs

    def _joined(self, starts: Int64s, sizes: Int64s) -> bytes:
        """Return pieces of the buffer, one after the other; they lie in it."""
        return b"".join(map(self._buffer.__getitem__, map(slice, starts.tolist(), (starts + sizes).tolist())))
