"""The ledgers that a streaming query has read to their ends, as a value that stays small; pure.

``pybk.spark.source.offsets`` has the rule by which a ledger counts as finished, and why it is right. Here is the part
of an offset that the rule needs. A query records it for retention, which reads no offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, Self

from pybk.spark.options import Ranges
from pybk.spark.packed_ids import pack_ranges, unpack_ranges

if TYPE_CHECKING:
    from pybk.flags import LedgerType


class DescribedLedger(Protocol):
    """What selections and rules need to know of a ledger, such as its metadata."""

    @property
    def ledger_id(self) -> int:
        """The ledger."""

    @property
    def ledger_type(self) -> LedgerType:
        """Its type."""

    @property
    def creation_time_ns(self) -> int:
        """The creation time in its metadata."""


def merged(*sets: Ranges) -> Ranges:
    """Return the ranges of the numbers that are in one of some sets."""
    ranges: list[tuple[int, int]] = []
    for low, high in sorted(chain.from_iterable(sets)):
        if ranges and low <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        else:
            ranges.append((low, high))
    return tuple(ranges)


def within(number: int, ranges: Ranges | None) -> bool:
    """Return whether one of the ranges contains a number; None stands for all numbers."""
    if ranges is None:
        return True
    place = bisect_right(ranges, number, key=itemgetter(0))
    return place > 0 and number <= ranges[place - 1][1]


def is_selected(ledger: DescribedLedger, ledger_type: str | None, ids: Ranges | None) -> bool:
    """Return whether a read selects a ledger.

    Args:
        ledger: The ledger.
        ledger_type: The type that is read; None for all types but the system's.
        ids: The ids that are read; None for all.
    """
    kind = ledger.ledger_type
    wanted = not kind.is_system if ledger_type is None else kind == ledger_type
    return wanted and within(ledger.ledger_id, ids)


def is_covered(ledger_id: int, created_ns: int, upto: int, before_ns: int, done: Iterable[Ranges]) -> bool:
    """Return whether a ledger is finished, if it is not among those that are still to be read.

    Args:
        ledger_id: The ledger.
        created_ns: The creation time in its metadata.
        upto: As of an offset, like the next two.
        before_ns: Ledgers up to ``upto`` that were created before this time are finished.
        done: Ranges of finished ledgers.
    """
    return (ledger_id <= upto and created_ns < before_ns) or any(within(ledger_id, ranges) for ranges in done)


@dataclass(frozen=True, slots=True)
class FinishedLedgers:
    """The ledgers that a query has finished.

    Attributes:
        left: Ranges of ledgers that are not finished, whatever the other attributes say.
        done: Ranges of finished ledgers.
        upto: The highest id to which ``before_ns`` applies.
        before_ns: Ledgers up to ``upto`` that were created before this time are finished, nanoseconds since 1970.
    """

    left: Ranges = ()
    done: Ranges = ()
    upto: int = -1
    before_ns: int = 0

    def has(self, ledger_id: int, created_ns: int) -> bool:
        """Return whether a ledger is finished; ``created_ns`` is the creation time in its metadata."""
        if within(ledger_id, self.left):
            return False
        return is_covered(ledger_id, created_ns, self.upto, self.before_ns, (self.done,))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        left, done = pack_ranges(self.left), pack_ranges(self.done)
        return {"before": self.before_ns, "done": done, "left": left, "upto": self.upto}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Decode the result of ``to_json``; raises LookupError, TypeError or ValueError for other values."""
        left, done = unpack_ranges(values["left"]), unpack_ranges(values["done"])
        return cls(left, done, int(values["upto"]), int(values["before"]))


class FinishedByAll:
    """The ledgers that each of some queries has finished.

    Cost: A question about a ledger that all have finished long ago, or that one of them is still to read, does not cost
        more where there are more queries.

    Args:
        every: What each of them has finished, at least one.
    """

    def __init__(self, every: Sequence[FinishedLedgers]) -> None:
        # The query that is the furthest back comes first, because it mostly needs what any of them needs.
        self._every = sorted(every, key=lambda each: (each.before_ns, each.upto))
        self._left = merged(*(each.left for each in every))
        self._upto = min(each.upto for each in every)
        self._before_ns = self._every[0].before_ns

    def has(self, ledger_id: int, created_ns: int) -> bool:
        """Return whether all have finished a ledger; ``created_ns`` is the creation time in its metadata."""
        if within(ledger_id, self._left):
            return False
        if is_covered(ledger_id, created_ns, self._upto, self._before_ns, ()):
            return True
        return all(each.has(ledger_id, created_ns) for each in self._every)
