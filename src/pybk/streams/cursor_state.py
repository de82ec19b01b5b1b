"""Which records of a log a subscription has acknowledged: pure, without input or output.

The state is ``first_unacked``, the ranges of acknowledged records above it, and properties of the application:

    acknowledged           acknowledged      acknowledged
    ...........|..........|============|....|=======|......>
               ^ first_unacked

Ranges never touch each other or ``first_unacked``, so their number is at most that of the holes between them, and a
range is never dropped. The state is kept as records of a ledger list (``pybk.streams.cursor``): a whole state in one or
more parts, then changes of it. ``docs/design/ledger_lists.md`` lists every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.metadata.authenticated_values import decode_json, encode_json
from pybk.streams.list_record import SEQ_MAX
from pybk.streams.range_set import Ranges, RangeSet

CURSOR_FORMAT: Final = 1
PART_RANGES: Final = 8192
"""Ranges in one part of a whole state: 128 KiB."""

PROPERTIES_BYTES_MAX: Final = 64 << 10
"""Bytes of all properties as JSON."""

_HEADER: Final = struct.Struct("<BBHIqII")
_RANGE_BYTES: Final = 16
_ONE_RANGE: Final = struct.Struct("<BBHIqIIqq")


class ChangeKind(IntEnum):
    """What a record of a cursor says."""

    STATE = 1
    """A part of a whole state."""
    ACK = 2
    """Ranges were acknowledged."""
    SEEK = 3
    """All records before one count as acknowledged, and none from it on."""


class _Change(NamedTuple):
    """A record of a cursor, decoded.

    Attributes:
        kind: What it says.
        base: The record that its ranges count from.
        part: The number of this part, from 0 up.
        parts: How many parts there are.
        ranges: What it acknowledges.
        properties: Those that it sets.
    """

    kind: ChangeKind
    base: int
    part: int
    parts: int
    ranges: Ranges
    properties: dict[str, int | str]


class CursorState:
    """Which records are acknowledged.

    Threads: one at a time.

    Attributes:
        first_unacked: The first record that is not acknowledged.
        properties: The application's, as set by acknowledgements.
    """

    def __init__(self, first_unacked: int = 0) -> None:
        self.first_unacked = first_unacked
        self.properties: dict[str, int | str] = {}
        self._acked = RangeSet()
        """What is acknowledged above ``first_unacked``."""
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
        """Return how many records before ``end`` are not acknowledged; for the end of the log, the exact backlog.

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

    # ---- changes -------------------------------------------------------------------------------------------------

    def ack(self, first: int, end: int) -> int:
        """Acknowledge the records from ``first`` to the one before ``end``; returns how many were not before."""
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

    def become(self, other: CursorState) -> None:
        """Take over another state, which is not used any more."""
        self.first_unacked, self.properties, self._acked = other.first_unacked, other.properties, other._acked

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

    def apply(self, record: bytes, *, where: str) -> None:
        """Change the state as the next record of a cursor says.

        Args:
            record: A result of ``encode``, ``encode_acks`` or ``encode_seek``.
            where: Names the record in errors.

        Raises:
            CorruptError: It is not a record of a cursor, or parts of a whole state are missing before it.
            UnsupportedFormatError: A newer pybk wrote it.
        """
        change = _decode(record, where)
        due = (change.part, change.parts) == (self._parts_due or (0, change.parts))
        if not due or (self._parts_due is not None and change.kind is not ChangeKind.STATE):
            raise CorruptError(f"{where}: part {change.part} of {change.parts} of a cursor's state; another is due")
        if change.kind is not ChangeKind.ACK and change.part == 0:
            self.seek(change.base)
        if change.kind is ChangeKind.STATE:
            self._parts_due = None if change.part + 1 == change.parts else (change.part + 1, change.parts)
            if change.part == 0:
                self.properties = {}
            if change.ranges and change.ranges[0][0] <= self.last_acked + 1:
                raise CorruptError(f"{where}: a range of a cursor's state touches the one before it")
            self._acked.extend(change.ranges)
        else:
            for first, end in change.ranges:
                self.ack(first, end)
        self.properties |= change.properties

    @property
    def is_whole(self) -> bool:
        """Whether no part of a whole state is due."""
        return self._parts_due is None


def is_state(record: bytes, *, where: str) -> bool:
    """Return whether a record of a cursor begins a whole state, so that those before it are not needed."""
    change = _decode(record, where)
    return change.kind is ChangeKind.STATE and change.part == 0


def encode_acks(ranges: Ranges, properties: Mapping[str, int | str] | None = None) -> bytes:
    """Return the record that acknowledges ranges, ascending and apart from each other, at least one."""
    if len(ranges) == 1 and not properties:  # the usual case
        first, end = ranges[0]
        return _ONE_RANGE.pack(CURSOR_FORMAT, ChangeKind.ACK, 0, 1, first, 0, 1, 0, end - first)
    return _encode(ChangeKind.ACK, ranges[0][0], ranges, properties or {})


def encode_seek(seq: int, properties: Mapping[str, int | str] | None = None) -> bytes:
    """Return the record that moves a cursor to ``seq``."""
    return _encode(ChangeKind.SEEK, seq, [], properties or {})


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
    header = _HEADER.pack(CURSOR_FORMAT, kind, 0, len(ranges), base, part, parts)
    steps = np.diff(bounds, prepend=base) if ranges else bounds
    return header + steps.astype("<i8").tobytes() + (encode_json(dict(properties)) if properties else b"")


def _decode(record: bytes, where: str) -> _Change:
    if len(record) < _HEADER.size:
        raise CorruptError(f"{where} has {len(record)} bytes, fewer than the {_HEADER.size} of a record of a cursor")
    if record[0] != CURSOR_FORMAT:
        raise UnsupportedFormatError(
            f"{where} has cursor format {record[0]}; this pybk reads format {CURSOR_FORMAT}: install a newer pybk"
        )
    _, kind, _, count, base, part, parts = _HEADER.unpack_from(record)
    end = _HEADER.size + _RANGE_BYTES * count
    if kind not in ChangeKind.__members__.values() or end > len(record) or part >= parts or base < 0:
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
