"""The ledgers that a streaming query has read to their ends, as a value that stays small; pure.

``pybk.spark.source.offsets`` has the rule by which a ledger counts as finished, and why it is right. Here is the part
of an offset that the rule needs. A query records it for retention, which reads no offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Self

from pybk.spark.options import Ranges
from pybk.spark.packed_ids import pack_ranges, unpack_ranges

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata


def within(number: int, ranges: Ranges | None) -> bool:
    """Return whether one of the ranges contains a number; None stands for all numbers."""
    if ranges is None:
        return True
    place = bisect_right(ranges, number, key=itemgetter(0))
    return place > 0 and number <= ranges[place - 1][1]


def is_selected(metadata: LedgerMetadata, ledger_type: str | None, ids: Ranges | None) -> bool:
    """Return whether a read selects a ledger.

    Args:
        metadata: The ledger.
        ledger_type: The type that is read; None for all types but the system's.
        ids: The ids that are read; None for all.
    """
    kind = metadata.ledger_type
    wanted = not kind.is_system if ledger_type is None else kind == ledger_type
    return wanted and within(metadata.ledger_id, ids)


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
