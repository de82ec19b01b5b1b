"""The records of a log that a subscription has acknowledged: pure, without input or output.

The state is ``first_unacked``, the ranges of acknowledged records above it, and properties of the application:

    acknowledged           acknowledged      acknowledged
    ...........|..........|============|....|=======|......>
               ^ first_unacked

Ranges never touch each other or ``first_unacked``, so there is a hole before each range. A range is never dropped. The
state is kept as records of a ledger list (``pybk.streams.cursor``): a whole state, then changes of it.
``docs/design/ledger_lists.md`` lists every byte.

For deliveries the state has a bound and numbers: all records before ``handed_end`` that are not acknowledged may have
been handed out once, and each record that was handed out again has the number of its deliveries.

**Whole states.** Below the feature level STREAMS a whole state is one transaction, ``encode``. From that level on it is
a record BEGIN, then parts of bounded length, ``part``, then a record END; other changes may lie between them. A part
acknowledges ranges that are acknowledged already, and repeats numbers of deliveries, so applying it to its own state
changes nothing. A record that is acknowledged or handed out while parts are written is in a part or in a change after
BEGIN. So BEGIN and all records after it result in the state, once there is an END. If the END is missing, because the
writer stopped, the state is not whole, and the records before its BEGIN are still needed. A seek makes all records
before it void, parts included; the writer then begins another state.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import chain, islice
from typing import Final, NamedTuple

import numpy as np

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.streams.list_record import SEQ_MAX
from pybk.streams.range_set import Ranges, RangeSet
from pybk.values import decode_json, encode_json

CURSOR_FORMAT: Final = 1
STREAMS_FORMAT: Final = 2
"""Format of the kinds of records that the feature level STREAMS adds."""

PART_LEAST: Final = 256
"""The fewest ranges in one part of a whole state from the level STREAMS on: 4 KiB."""

PART_RANGES: Final = 8192
"""Ranges in one part of a whole state below that level: 128 KiB."""

PROPERTIES_BYTES_MAX: Final = 64 << 10
"""Bytes of all properties as JSON."""

_AGAIN_LEAST: Final = 1024

_HEADER: Final = struct.Struct("<BBHIqII")
RANGE_BYTES: Final = 16
_ONE_RANGE: Final = struct.Struct("<BBHIqIIqq")


class ChangeKind(IntEnum):
    """The kind of a change in a cursor's record."""

    STATE = 1
    """A part of a whole state."""
    ACK = 2
    """Ranges were acknowledged."""
    SEEK = 3
    """All records before one count as acknowledged, and none from it on."""
    BEGIN = 4
    """A whole state begins; its parts follow, between changes."""
    END = 5
    """The state that was begun last is whole."""
    LEASE = 6
    """Records before one may be handed out for the first time, until a change HANDED says how many were."""
    HANDED = 7
    """All records before one that are not acknowledged may have been handed out."""
    AGAIN = 8
    """Ranges were handed out again; the field for the number of parts has the number of their deliveries so far."""


_WITH_RANGES: Final = (ChangeKind.STATE, ChangeKind.ACK, ChangeKind.AGAIN)


class _Change(NamedTuple):
    """A record of a cursor, decoded.

    Attributes:
        kind: The kind of the change.
        base: The record that its ranges count from.
        part: The number of this part, from 0 up.
        parts: The number of parts.
        ranges: The ranges that it acknowledges.
        properties: The properties that it sets.
    """

    kind: ChangeKind
    base: int
    part: int
    parts: int
    ranges: Ranges
    properties: dict[str, int | str]


class StatePart(NamedTuple):
    """A part of a whole state.

    Attributes:
        records: The records of the cursor that it consists of.
        after: The place where the next part begins; None after the last.
    """

    records: list[bytes]
    after: PartAt | None


class PartAt(NamedTuple):
    """The place where a part of a whole state begins: the ranges and the delivery numbers from these records on."""

    acked: int = 0
    again: int = 0


class CursorState:
    """The records that are acknowledged, and those that may have been handed out.

    Threads: one at a time.

    Attributes:
        first_unacked: The first record that is not acknowledged.
        properties: The application's, as set by acknowledgements.
        handed_end: All records before it that are not acknowledged may have been handed out.
        lease_end: Records from ``handed_end`` to the one before it may be handed out now; 0 if none may.
    """

    def __init__(self, first_unacked: int = 0) -> None:
        self.first_unacked = first_unacked
        self.properties: dict[str, int | str] = {}
        self.handed_end = self.lease_end = 0
        self._acked = RangeSet()
        """The acknowledged records above ``first_unacked``."""
        self._again: dict[int, int] = {}
        """The deliveries of records that were handed out more than once; it may have acknowledged ones."""
        self._again_most = _AGAIN_LEAST
        """The number of records in ``_again`` beyond which acknowledged ones are dropped from it."""
        self._whole: bool | None = None
        """True if the first state that was applied is whole; None before one was applied."""
        self._parts_due: tuple[int, int] | None = None
        """The next part of a whole state and the number of its parts, while parts are due."""

    # ---- what it says --------------------------------------------------------------------------------------------

    @property
    def acked_ranges(self) -> Ranges:
        """The acknowledged ranges above ``first_unacked``, ascending."""
        return list(self._acked)

    @property
    def range_count(self) -> int:
        """The number of acknowledged ranges above ``first_unacked``."""
        return self._acked.count

    @property
    def last_acked(self) -> int:
        """The last acknowledged record; ``first_unacked - 1`` if there is none above."""
        return (self._acked.end or self.first_unacked) - 1

    def is_acked(self, seq: int) -> bool:
        """Return whether a record is acknowledged."""
        return seq < self.first_unacked or seq in self._acked

    def unacked_count(self, end: int) -> int:
        """Return the number of unacknowledged records before ``end``; for the end of the log, the exact backlog.

        Cost: Constant, unless ranges end after ``end``: then as ``RangeSet.count_before``.
        """
        if end <= self.first_unacked:
            return 0
        is_last = self._acked.end is None or self._acked.end <= end
        return end - self.first_unacked - (self._acked.total if is_last else self._acked.count_before(end))

    def unacked_ranges(self, first: int, end: int) -> Ranges:
        """Return the records from ``first`` to the one before ``end`` that are not acknowledged."""
        return list(self.unacked(first, end))

    def unacked(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the records as ``unacked_ranges`` returns them, one range after the other; nothing changes meanwhile.

        Cost: The logarithm of the number of ranges, and what it yields.
        """
        low = max(first, self.first_unacked)
        for start, after in self._acked.after(low, end):
            if start > low:
                yield low, start
            low = after
        if low < end:
            yield low, end

    def next_unacked(self, seq: int) -> int:
        """Return the first record from ``seq`` on that is not acknowledged."""
        low = max(seq, self.first_unacked)
        return next((end for first, end in self._acked.after(low, low + 1) if first <= low), low)

    def deliveries(self, seq: int) -> int:
        """Return the number of times that a record that is not acknowledged was handed out; it may be one too high."""
        return self._again.get(seq, int(seq < self.handed_end))

    # ---- changes -------------------------------------------------------------------------------------------------

    def ack(self, first: int, end: int) -> int:
        """Acknowledge the records from ``first`` to the one before ``end``; return how many of them were not yet."""
        if end <= self.first_unacked:
            return 0
        first = max(first, self.first_unacked)
        if first == self.first_unacked and not self._acked.count:  # the usual case
            self.first_unacked = end
            return end - first
        added = self._acked.add(first, end)
        if first == self.first_unacked:
            _, self.first_unacked = self._acked.pop_first()
        return added

    def seek(self, seq: int) -> None:
        """Count all records before ``seq`` as acknowledged, and none from it on."""
        self.first_unacked = seq
        self._acked = RangeSet()
        self.handed_end = self.lease_end = 0
        self._again = {}

    def hand_again(self, first: int, end: int, count: int) -> None:
        """Note the number of times that records were handed out so far."""
        self._again.update((seq, max(count, self._again.get(seq, 0))) for seq in range(first, end))
        if len(self._again) > self._again_most:
            self._again = {seq: count for seq, count in self._again.items() if not self.is_acked(seq)}
            self._again_most = max(_AGAIN_LEAST, 2 * len(self._again))

    def end_lease(self, end: int) -> None:
        """Count the leased records before ``end`` as handed out, because their owner may have handed them out."""
        self.handed_end, self.lease_end = max(self.handed_end, min(self.lease_end, end)), 0

    def become(self, other: CursorState) -> None:
        """Adopt the contents of another state, which must not be used any more."""
        self.first_unacked, self.properties, self._acked = other.first_unacked, other.properties, other._acked
        self.handed_end, self.lease_end, self._again = other.handed_end, other.lease_end, other._again

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def encode(self) -> list[bytes]:
        """Return the whole state as the parts that ``apply`` takes, in order."""
        acked, base = self.acked_ranges, self.first_unacked
        parts = max(1, -(-len(acked) // PART_RANGES))
        encoded = []
        for part in range(parts):
            ranges = acked[part * PART_RANGES : (part + 1) * PART_RANGES]
            properties = self.properties if part == 0 else {}
            encoded.append(_encode(ChangeKind.STATE, base, ranges, properties, part, parts))
            base = ranges[-1][1] if ranges else base
        return encoded

    def part(self, at: PartAt | None, most: int = PART_LEAST) -> StatePart:
        """Return a part of the whole state, in the format of the level STREAMS.

        Args:
            at: Where it begins; None for the first part.
            most: Ranges and numbers of deliveries of it, at most.
        """
        records = []
        if at is None:
            records.append(_encode(ChangeKind.BEGIN, self.first_unacked, [], self.properties))
            records += [encode_handed(self.handed_end), encode_lease(self.lease_end)]
            at = PartAt()
        acked = list(islice(self._acked.after(at.acked, SEQ_MAX), most))
        if acked:
            records.append(encode_acks(acked))
        again = heapq.nsmallest(most, (seq for seq in self._again if seq >= at.again and not self.is_acked(seq)))
        for count in sorted({self._again[seq] for seq in again}):
            records.append(encode_again(ranges_of(seq for seq in again if self._again[seq] == count), count))
        if len(acked) < most and len(again) < most:
            return StatePart([*records, _encode(ChangeKind.END, 0, [], {})], None)
        return StatePart(records, PartAt(acked[-1][1] if acked else at.acked, again[-1] + 1 if again else at.again))

    def apply(self, record: bytes, *, where: str) -> None:
        """Change the state as the next record of a cursor says.

        Args:
            record: One that a function or method of this module returned.
            where: Names the record in errors.

        Raises:
            CorruptError: It is not a record of a cursor, or parts of a whole state are missing before it.
            UnsupportedFormatError: A newer pybk wrote it.
        """
        change = _decode(record, where)
        due = (change.part, change.parts) == (self._parts_due or (0, change.parts))
        if not due or (self._parts_due is not None and change.kind is not ChangeKind.STATE):
            raise CorruptError(f"{where}: part {change.part} of {change.parts} of a cursor's state; another is due")
        match change.kind:
            case ChangeKind.STATE:
                self._apply_state(change, where)
            case ChangeKind.ACK:
                for first, end in change.ranges:
                    self.ack(first, end)
            case ChangeKind.SEEK:
                self.seek(change.base)
            case ChangeKind.BEGIN | ChangeKind.END:
                self._apply_mark(change, where)
            case ChangeKind.LEASE:
                self.lease_end = change.base
            case ChangeKind.HANDED:
                self.handed_end, self.lease_end = max(self.handed_end, change.base), 0
            case ChangeKind.AGAIN:
                for first, end in change.ranges:
                    self.hand_again(first, end, change.parts)
        self.properties |= change.properties

    def _apply_state(self, change: _Change, where: str) -> None:
        """Apply a part of a state that is one transaction."""
        self._parts_due = None if change.part + 1 == change.parts else (change.part + 1, change.parts)
        self._whole = True
        if change.part == 0:
            self.seek(change.base)
            self.properties = {}
        if change.ranges and change.ranges[0][0] <= self.last_acked + 1:
            raise CorruptError(f"{where}: a range of a cursor's state touches the one before it")
        self._acked.extend(change.ranges)

    def _apply_mark(self, change: _Change, where: str) -> None:
        """Apply the beginning or the end of a state that is written in parts."""
        if change.kind is ChangeKind.END:
            self._whole = True
        elif self._whole is None:
            self.seek(change.base)
            self._whole = False
        elif not self._whole:
            raise CorruptError(f"{where} begins a state of a cursor, and the one before has no end")

    @property
    def is_whole(self) -> bool:
        """True if the first state that was applied, if any, is whole, and no part of another is due."""
        return self._parts_due is None and self._whole is not False


def is_state(record: bytes, *, where: str) -> bool:
    """Return whether a record of a cursor begins a whole state; then those before it are not needed."""
    change = _decode(record, where)
    return change.kind is ChangeKind.BEGIN or (change.kind is ChangeKind.STATE and change.part == 0)


def encode_acks(ranges: Ranges, properties: Mapping[str, int | str] | None = None) -> bytes:
    """Return the record that acknowledges ranges, ascending and apart from each other, at least one."""
    if len(ranges) == 1 and not properties:  # the usual case
        first, end = ranges[0]
        return _ONE_RANGE.pack(CURSOR_FORMAT, ChangeKind.ACK, 0, 1, first, 0, 1, 0, end - first)
    return _encode(ChangeKind.ACK, ranges[0][0], ranges, properties or {})


def encode_seek(seq: int, properties: Mapping[str, int | str] | None = None) -> bytes:
    """Return the record that moves a cursor to ``seq``."""
    return _encode(ChangeKind.SEEK, seq, [], properties or {})


def encode_lease(end: int) -> bytes:
    """Return the record that lets records before ``end`` be handed out."""
    return _encode(ChangeKind.LEASE, end, [], {})


def encode_handed(end: int) -> bytes:
    """Return the record that counts unacknowledged records before ``end`` as handed out, and ends a lease."""
    return _encode(ChangeKind.HANDED, end, [], {})


def encode_again(ranges: Ranges, count: int) -> bytes:
    """Return the record with the number of deliveries of ranges, which are ascending and apart from each other."""
    return _encode(ChangeKind.AGAIN, ranges[0][0], ranges, {}, parts=count)


def ranges_of(seqs: Iterable[int]) -> Ranges:
    """Return records as ranges, ascending and apart from each other."""
    return merged((seq, seq + 1) for seq in set(seqs))


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges, none of them empty, ascending and apart from each other."""
    found: Ranges = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((first, end))
    return found


def checked_properties(properties: object) -> dict[str, int | str]:
    """Return properties as a dictionary, or raise UsageError if they cannot be stored."""
    if not isinstance(properties, Mapping):
        raise UsageError(f"properties takes a mapping of strings to whole numbers or strings, not {properties!r:.50}")
    for name, value in properties.items():
        if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, int | str):
            raise UsageError(f"the property {name!r:.50} is {value!r:.50}; names are strings, values int or str")
    found: dict[str, int | str] = dict(properties)
    try:
        size = len(encode_json(found))
    except (UnicodeEncodeError, ValueError) as error:
        raise UsageError(f"the properties {found!r:.100} cannot be stored: {error}") from error
    if size > PROPERTIES_BYTES_MAX:
        raise UsageError(f"the properties have {size} bytes as JSON; they take at most {PROPERTIES_BYTES_MAX}")
    return found


def _encode(
    kind: ChangeKind, base: int, ranges: Ranges, properties: Mapping[str, int | str], part: int = 0, parts: int = 1
) -> bytes:
    """Return a record: its header, the gap before each range and its length, then the properties as JSON."""
    bounds = np.fromiter(chain.from_iterable(ranges), np.int64, 2 * len(ranges))
    header = _HEADER.pack(_format_of(kind), kind, 0, len(ranges), base, part, parts)
    steps = np.diff(bounds, prepend=base) if ranges else bounds
    return header + steps.astype("<i8").tobytes() + (encode_json(dict(properties)) if properties else b"")


def _format_of(kind: ChangeKind) -> int:
    return CURSOR_FORMAT if kind <= ChangeKind.SEEK else STREAMS_FORMAT


def _decode(record: bytes, where: str) -> _Change:
    if len(record) < _HEADER.size:
        raise CorruptError(f"{where} has {len(record)} bytes, fewer than the {_HEADER.size} of a record of a cursor")
    if record[0] not in (CURSOR_FORMAT, STREAMS_FORMAT):
        raise UnsupportedFormatError(
            f"{where} has cursor format {record[0]}; this pybk reads format {STREAMS_FORMAT} and older: install a "
            "newer pybk"
        )
    _, kind, _, count, base, part, parts = _HEADER.unpack_from(record)
    end = _HEADER.size + RANGE_BYTES * count
    known = kind in ChangeKind.__members__.values() and record[0] == _format_of(ChangeKind(kind))
    if not known or (count and kind not in _WITH_RANGES) or end > len(record) or part >= parts or base < 0:
        raise CorruptError(f"{where} is not a record of a cursor: kind {kind}, {count} ranges, {len(record)} bytes")
    if count == 1:
        gap, length = struct.unpack_from("<qq", record, _HEADER.size)
        ranges, sound = [(base + gap, base + gap + length)], gap >= 0 < length <= SEQ_MAX - base - gap
    else:
        steps = np.frombuffer(record, "<i8", 2 * count, _HEADER.size)
        bounds = base + np.cumsum(steps)
        sound = bool((steps[1:] > 0).all() and (steps[:1] >= 0).all() and (bounds >= base).all())
        ranges = list(zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True))
    if not sound:
        raise CorruptError(f"{where}: the ranges of a cursor do not ascend")
    properties = decode_json(record[end:], checked_properties, where=where) if end < len(record) else {}
    return _Change(ChangeKind(kind), base, part, parts, ranges, properties)
