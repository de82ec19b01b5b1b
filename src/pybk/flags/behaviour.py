"""Write flags and read flags: how a handle behaves."""

from __future__ import annotations

from enum import STRICT, IntFlag


class Flags(IntFlag, boundary=STRICT):
    """A set of flags that is a number: ``int(flags)`` and back, where unknown bits are refused."""

    @classmethod
    def _missing_(cls, value: object) -> Flags:
        if isinstance(value, int):
            known = 0
            for flag in cls:
                known |= flag.value
            # Also true of all negative numbers, which the enum itself would take for the complement of a set.
            if value & ~known:
                what = f"has the unknown bits {value & ~known:#x}" if value > 0 else "is negative"
                raise ValueError(f"{cls.__name__} {value:#x} {what}; the known bits are {known:#x}")
        found: Flags = super()._missing_(value)
        return found


class WriteFlag(Flags):
    """How entries are written; recorded in the ledger's metadata."""

    NONE = 0
    """An append is acknowledged when it is durable."""

    DEFERRED_FORCE = 1
    """An append is acknowledged before, and last add confirmed moves only when ``force()`` or close made everything up
    to there durable. An entry that was acknowledged more than 100 ms before the end of the process survives it, however
    the process ends.
    """


class ReadFlag(Flags):
    """How entries are read; belongs to the handle."""

    NONE = 0
    """Through the page cache and the reader's cache."""

    DONT_CACHE = 1
    """Without a trace in the page cache or in the reader's cache."""
