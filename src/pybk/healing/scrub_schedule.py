"""The schedule of checks of stored copies: the due part, its rate, and the records of checks; pure.

Theory of operation
-------------------

All ledgers of a store, or of a cluster for quick audits, fall into ``PARTS`` parts by a hash of their ids. A part is
checked once in each period, at its own time. So checks are spread over the period, and the part whose last check is the
oldest comes first. For each kind of check, the schedule keeps the time of each part's last check, and the progress of
the part under way. This takes some hundred bytes for any number of ledgers, and suffices to continue after a restart.

| kind | what is checked | who |
|---|---|---|
| quick | first, last and two random entries of each replica | the auditor, over all bookies |
| light | each record's place in the index against the header in its file | each bookie, its own store |
| deep | the checksum of each record | each bookie, and each embedded store, its own |

A part that was never checked is due at its share of the first period. A part that is late, because no process ran, is
due at once, and the rate grows with the number of parts that are due, up to the limit of the settings. Times are those
of the wall clock, because they outlive processes; a time in the future counts as now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

PARTS: Final = 16
"""Parts of all ledgers; each is listed once per period, from all ids."""

RATE_MIN: Final = 1 << 20
"""Bytes per second below which a check is not slowed down for the sake of its schedule."""

_SPREAD: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_SHIFT: Final = 64 - (PARTS - 1).bit_length()
_TIME_MAX: Final = (1 << 63) - 1


class ScrubKind(StrEnum):
    """The kind of a check, by what it compares."""

    QUICK = "quick"
    """A few entries of each ledger."""

    LIGHT = "light"
    """The index with the files."""

    DEEP = "deep"
    """Every checksum."""


def part_of(ledger_id: int) -> int:
    """Return the part of a ledger, 0 to ``PARTS - 1``."""
    return (ledger_id * _SPREAD & _MASK) >> _SHIFT


def rate_of(part_bytes: int, due: int, period_s: float, most: float) -> float:
    """Return the bytes per second at which a part is checked.

    Args:
        part_bytes: The bytes of the part.
        due: The number of parts that are due, this one included; with more than one, checks are late and become faster.
        period_s: Seconds in which everything is checked once.
        most: The limit of the settings.
    """
    return min(most, max(RATE_MIN, part_bytes * PARTS / period_s * max(due, 1)))


@dataclass(slots=True)
class ScrubSchedule:
    """The record of one kind of check.

    Attributes:
        begun_ns: The time when the first part was awaited, nanoseconds since 1970.
        checked_ns: The time when the last complete check of each part began; 0 for never.
        part: The part under way; -1 for none.
        part_began_ns: The time when it began.
        ledger_id: The ledger at which it continues.
        entry_id: The entry of that ledger at which it continues.
        asked_ns: The newest request of a person, by that person's clock.
        asked_at_ns: The time when it was noticed, by the local clock; parts that were checked before are due.

    Threads: one at a time.
    """

    begun_ns: int
    checked_ns: list[int] = field(default_factory=lambda: [0] * PARTS)
    part: int = -1
    part_began_ns: int = 0
    ledger_id: int = 0
    entry_id: int = 0
    asked_ns: int = 0
    asked_at_ns: int = 0

    def ask(self, asked_ns: int, now_ns: int) -> None:
        """Take a request to check everything at once; a repeated request changes nothing.

        Args:
            asked_ns: The time of the request, as the settings have it.
            now_ns: The local time. Only this time is compared, because clocks differ.
        """
        if asked_ns > self.asked_ns:
            self.asked_ns, self.asked_at_ns = asked_ns, now_ns

    def is_asked(self, part: int) -> bool:
        """Return whether a person has asked for a part that was not checked since."""
        return self.checked_ns[part] < self.asked_at_ns

    def due_ns(self, part: int, period_s: float, now_ns: int) -> int:
        """Return the time when a part is due."""
        if self.is_asked(part):
            return 0
        period_ns = int(period_s * 1e9)
        if self.checked_ns[part]:
            return min(self.checked_ns[part], now_ns) + period_ns
        return min(self.begun_ns, now_ns) + period_ns * part // PARTS

    def due(self, period_s: float, now_ns: int) -> list[int]:
        """Return the parts that are due, the one under way first, then those that were asked for, then the oldest."""
        dues = {part: self.due_ns(part, period_s, now_ns) for part in range(PARTS)}
        found = [part for part, due_ns in dues.items() if due_ns <= now_ns or part == self.part]
        return sorted(found, key=lambda part: (part != self.part, dues[part], part))

    def next_due_ns(self, period_s: float, now_ns: int) -> int:
        """Return the time when the next part is due."""
        return min(self.due_ns(part, period_s, now_ns) for part in range(PARTS))

    def is_late(self, part: int, period_s: float, now_ns: int) -> bool:
        """Return whether a part has been due for a whole period; it is then checked whatever other work runs."""
        return self.is_asked(part) or now_ns - self.due_ns(part, period_s, now_ns) >= int(period_s * 1e9)

    def begin(self, part: int, now_ns: int) -> None:
        """Begin a part, or continue it if it is under way already.

        A part that was asked for after it began is begun again.
        """
        if part != self.part or self.part_began_ns < self.asked_at_ns:
            self.part, self.part_began_ns, self.ledger_id, self.entry_id = part, now_ns, 0, 0

    def reach(self, ledger_id: int, entry_id: int = 0) -> None:
        """Note that all entries of the part before one were checked."""
        self.ledger_id, self.entry_id = ledger_id, entry_id

    def finish(self) -> None:
        """Note that the part under way was checked."""
        self.checked_ns[self.part] = self.part_began_ns
        self.part = -1

    @property
    def oldest_ns(self) -> int:
        """The time since which everything was checked: that of the oldest check, or of the begin of checks."""
        return min(self.begun_ns if each == 0 else each for each in self.checked_ns)

    def encode(self) -> dict[str, Any]:
        """Return it as a value for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> ScrubSchedule:
        """Decode the result of ``encode``; raises KeyError, TypeError or ValueError for anything else."""
        found = cls(**{name: values[name] for name in cls.__slots__})
        numbers = [*found.checked_ns, *(getattr(found, name) for name in cls.__slots__ if name != "checked_ns")]
        if any(type(number) is not int or not -1 <= number <= _TIME_MAX for number in numbers):
            raise ValueError(f"{values!r:.200} has numbers out of range")
        if len(found.checked_ns) != PARTS or found.part >= PARTS:
            raise ValueError(f"{len(found.checked_ns)} parts, the part {found.part}; there are {PARTS}")
        return found
