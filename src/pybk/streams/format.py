"""The entries of a segment's ledger: a header, then records. ``docs/streams.md`` lists every byte.

Each entry begins with 16 bytes: format, kind, flags, the number of its records, and the sequence number of the first.
So every entry says where in the log it belongs, and a reader notices a gap without any index.

This module defines layouts and does not read or write ledgers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum, IntFlag
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pybk.entry import EntryBatch, gather
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.metadata.authenticated_values import decode_json, encode_json

ENTRY_FORMAT: Final = 1
HEADER_BYTES: Final = 16
_HEADER: Final = struct.Struct("<BBHIq")
_HEADER_DTYPE: Final = np.dtype([("format", "u1"), ("kind", "u1"), ("flags", "<u2"), ("count", "<u4"), ("seq", "<i8")])
_TIME: Final = struct.Struct("<q")
_END_BYTES: Final = 4
TIME_BYTES: Final = 8

Int64s = npt.NDArray[np.int64]


class EntryKind(IntEnum):
    """What an entry of a segment holds."""

    SEGMENT = 1
    RECORDS = 2


class EntryFlag(IntFlag):
    """What the records of an entry have, and how the entry belongs to others."""

    NONE = 0
    TIMES = 1
    """Each record has an event time."""
    MORE = 2
    """The next entry belongs to the same transaction, and without it this one does not count."""


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

        def make(values: dict[str, Any]) -> SegmentHeader:
            return cls(**values | {"uid": bytes.fromhex(values["uid"])})

        return decode_json(payload[HEADER_BYTES:], make, where=where)


class EntryHeader(NamedTuple):
    """The first 16 bytes of an entry.

    Attributes:
        flags: What its records have.
        records: How many records it has.
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


def decode_entry_header(payload: bytes, *, where: str) -> EntryHeader:
    """Decode the header of an entry with records; ``where`` names the entry in errors. Raises as ``check_kind``."""
    check_kind(payload, EntryKind.RECORDS, where=where)
    _, _, flags, count, seq = _HEADER.unpack_from(payload)
    return EntryHeader(EntryFlag(flags), count, seq)


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


def records_bytes(nbytes: int, count: int) -> int:
    """Return the size of the entry that ``encode_records`` makes of ``count`` records with ``nbytes`` in all."""
    return HEADER_BYTES + (_END_BYTES * count if count > 1 else 0) + nbytes


class Records(NamedTuple):
    """Records in a buffer.

    Attributes:
        first_seq: The sequence number of the first; the others follow without gaps.
        buffer: Holds their data.
        starts: Where the data of each begins in the buffer, ``(n,)`` int64, bytes.
        ends: Where it ends, ``(n,)`` int64, bytes.
        times: Event times, ``(n,)`` int64, nanoseconds since 1970, -1 for none; None if no record has one.
        complete: How many of the records belong to transactions whose end is among them; the others have to wait for
            entries that follow.
        entries: How many entries these ``complete`` records come from.
    """

    first_seq: int
    buffer: memoryview
    starts: Int64s
    ends: Int64s
    times: Int64s | None
    complete: int
    entries: int

    def within(self, first: int, last: int) -> Records:
        """Return the complete records from ``first`` to ``last``."""
        low = max(first - self.first_seq, 0)
        high = max(low, min(self.complete, last - self.first_seq + 1))
        if low == 0 and high == len(self.starts):
            return self
        times = None if self.times is None else self.times[low:high]
        return Records(
            self.first_seq + low,
            self.buffer,
            self.starts[low:high],
            self.ends[low:high],
            times,
            high - low,
            self.entries,
        )

    def data(self) -> Iterator[bytes]:
        """Yield a copy of the data of each record, made when it is asked for: so a caller's memory is used again."""
        return map(bytes, map(self.buffer.__getitem__, map(slice, self.starts.tolist(), self.ends.tolist())))


def decode_batch(batch: EntryBatch, seq: int, *, where: str) -> Records:
    """Locate the records of some consecutive entries, and check that they follow each other without a gap.

    Args:
        batch: The entries, verified; none is the header of the segment.
        seq: The sequence number that the first has to have.
        where: Names the ledger in errors.

    Raises:
        CorruptError: A record is missing, or an entry is none of a log.
        UnsupportedFormatError: A newer pybk wrote an entry.

    Cost: some 60 ns per entry and 20 ns per record; no data is copied.
    """
    starts, sizes = batch.payload_offsets, batch.payload_sizes
    if int(sizes.min()) < HEADER_BYTES:
        raise CorruptError(f"{where}: an entry has {int(sizes.min())} bytes, fewer than the {HEADER_BYTES} of a header")
    headers = gather(batch.buffer, starts, HEADER_BYTES).view(_HEADER_DTYPE)
    counts = headers["count"].astype(np.int64)
    expected = seq + np.cumsum(counts) - counts
    sound = (headers["format"] == ENTRY_FORMAT) & (headers["kind"] == EntryKind.RECORDS) & (headers["seq"] == expected)
    if not sound.all():
        number = int(np.argmin(sound))
        payload = bytes(batch.buffer[int(starts[number]) : int(starts[number]) + HEADER_BYTES])
        at = f"{where} entry {int(batch.entry_ids[number])}"
        found = decode_entry_header(payload, where=at)
        raise CorruptError(f"{at} begins with record {found.seq}, but {int(expected[number])} comes next")
    more = (headers["flags"] & EntryFlag.MORE) != 0
    whole = np.flatnonzero(~more)
    entries = int(whole[-1]) + 1 if len(whole) else 0
    complete = int(counts[:entries].sum())
    timed = (headers["flags"] & EntryFlag.TIMES) != 0
    bodies, ends = starts + HEADER_BYTES + np.where(timed, TIME_BYTES * counts, 0), starts + sizes
    times = _times(batch.buffer, starts, counts, timed) if timed.any() else None
    if int(counts.max()) > 1:
        bodies, ends = _split(batch.buffer, bodies, ends, counts, where)
    if (bodies > ends).any():
        raise CorruptError(f"{where}: an entry is shorter than its records")
    return Records(seq, batch.buffer, bodies, ends, times, complete, entries)


def _times(buffer: memoryview, starts: Int64s, counts: Int64s, timed: npt.NDArray[np.bool_]) -> Int64s:
    """Return the event time of each record, -1 for none."""
    times = np.full(int(counts.sum()), -1, np.int64)
    at = np.cumsum(counts) - counts
    for number in np.flatnonzero(timed).tolist():
        low, count = int(at[number]), int(counts[number])
        times[low : low + count] = np.frombuffer(buffer, "<i8", count, int(starts[number]) + HEADER_BYTES)
    return times


def _split(buffer: memoryview, bodies: Int64s, ends: Int64s, counts: Int64s, where: str) -> tuple[Int64s, Int64s]:
    """Return where the data of each record begins and ends, given where the bodies of their entries do."""
    total = int(counts.sum())
    lows, highs = np.empty(total, np.int64), np.empty(total, np.int64)
    at = 0
    for body, end, count in zip(bodies.tolist(), ends.tolist(), counts.tolist(), strict=True):
        if count == 1:
            lows[at], highs[at] = body, end
        else:
            first = body + _END_BYTES * count
            if count < 1 or first > end:
                raise CorruptError(f"{where}: a table of {count} records does not fit its entry")
            table = np.frombuffer(buffer, "<u4", count, body).astype(np.int64) + first
            if int(table[-1]) != end or (table[1:] < table[:-1]).any():
                raise CorruptError(f"{where}: the table of {count} records is damaged")
            lows[at], lows[at + 1 : at + count], highs[at : at + count] = first, table[:-1], table
        at += count
    return lows, highs
