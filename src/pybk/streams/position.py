"""Positions in a named log, and what becomes of them if records are appended again to another segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

from pybk.errors import UsageError

_INT64_MAX = (1 << 63) - 1


class Position(NamedTuple):
    """Where a record lies in a log. Positions of one log are ordered as its records are.

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
        """Return the position that ``str`` was made of.

        Raises:
            UsageError: The text is none.
        """
        parts = text.split(":") if isinstance(text, str) else []
        if len(parts) != len(cls._fields) or not all(each.isascii() and each.isdigit() for each in parts):
            raise UsageError(f"{text!r:.50} is not a position; one looks like 3:17:0:1234")
        numbers = [int(each) for each in parts]
        if max(numbers) > _INT64_MAX:
            raise UsageError(f"{text!r:.50} is not a position: a number is above {_INT64_MAX}")
        return cls(*numbers)


class Move(NamedTuple):
    """Entries that a lost segment does not hold, and that begin the next one.

    Attributes:
        segment: The number of the lost segment.
        entry: The first of them there.
        to_segment: The number of the segment that they are in now, from entry 1 on.
    """

    segment: int
    entry: int
    to_segment: int

    def place(self, segment: int, entry: int) -> tuple[int, int]:
        """Return the segment and the entry that an entry has now."""
        if segment == self.segment and entry >= self.entry:
            return self.to_segment, entry - self.entry + 1
        return segment, entry


def moved(position: Position, moves: Iterable[Move]) -> Position:
    """Return where a record lies after moves, in their order."""
    segment, entry = position.segment, position.entry
    for move in moves:
        segment, entry = move.place(segment, entry)
    return position._replace(segment=segment, entry=entry)
