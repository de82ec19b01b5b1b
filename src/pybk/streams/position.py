"""Positions in a named log."""

from __future__ import annotations

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
