"""The offset of a stream, as a value that stays small; pure, without input or output.

States of a ledger in an offset: *due* (nothing was read) or in *at* (reading) → *ended* (this offset finishes it) →
*done*, or dropped by the rule below. ``advance`` makes the transitions, ``between`` returns the entries of a
micro-batch, and both are deterministic, so a repeated micro-batch reads the same entries.

An offset names the next entry of each ledger. A ledger is *finished* once it is closed and all its entries were read.
The first offset after that names it under ``ended``, with its end, because two offsets alone must determine the entries
between them. Later offsets drop finished ledgers by this rule: a ledger is finished if it is in ``done``, or if its id
is at most ``upto``, its metadata say that it was created before ``before``, and it is neither in ``at`` nor in ``due``.
``before`` is an hour older than the newest ledger, because the clocks of the hosts that create ledgers differ, and
ledgers are not created in the order of their ids. So an offset has only the ledgers that are being read and, as ranges
of ids, the ledgers that are to be read and the finished ones that were created within the last hour.

A ledger that an offset names stays in it until it is finished or known to be deleted; its absence from a listing proves
nothing, because listings may be late.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from pybk.errors import UnsupportedFormatError
from pybk.spark.options import Positions, Ranges
from pybk.spark.source.planning import EntryRange, ReadableLedger, numbers_of, ranges_of, within

LATE_NS: Final = 3600 * 10**9
"""The bound on the difference of hosts' clocks, and on the time from a ledger's creation to its first listing."""

_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a stream in all its ledgers.

    Attributes:
        of: The store or cluster, and the selection of its ledgers.
        at: The next entry of unfinished ledgers. A ledger that is not named is at its first entry, or finished. A named
            ledger at its first entry could not be read yet, so its deletion is not a loss.
        due: Ranges of ids of ledgers that can be read and from which no entry was read.
        ended: The ends of the ledgers that this offset finishes.
        done: Ranges of ids of ledgers that earlier offsets finished.
        upto: The highest id to which the rule at the head of this module applies.
        before_ns: The time ``before`` of the head of this module, in nanoseconds since 1970.
    """

    at: Mapping[int, int] = field(default_factory=dict, hash=False)
    ended: Mapping[int, int] = field(default_factory=dict, hash=False)
    done: Ranges = ()
    upto: int = -1
    before_ns: int = 0
    due: Ranges = ()
    of: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the offset as JSON values for Spark; equal offsets give equal texts."""
        return {
            "version": _VERSION,
            "of": self.of,
            "at": {str(ledger_id): self.at[ledger_id] for ledger_id in sorted(self.at)},
            "ended": {str(ledger_id): self.ended[ledger_id] for ledger_id in sorted(self.ended)},
            "due": [[low, high] for low, high in self.due],
            "done": [[low, high] for low, high in self.done],
            "upto": self.upto,
            "before": self.before_ns,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Decode the result of ``to_json``.

        Raises:
            UnsupportedFormatError: The values are not an offset, or have another format version.
        """
        try:
            if values["version"] != _VERSION:
                raise ValueError(f"version {values['version']!r}")
            return cls(
                {int(ledger_id): int(entry) for ledger_id, entry in values["at"].items()},
                {int(ledger_id): int(entry) for ledger_id, entry in values["ended"].items()},
                tuple((int(low), int(high)) for low, high in values["done"]),
                int(values["upto"]),
                int(values["before"]),
                tuple((int(low), int(high)) for low, high in values["due"]),
                str(values["of"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise UnsupportedFormatError(
                f"the checkpoint has an offset that this pybk does not know ({error}): {json.dumps(values):.200}; use "
                "a newer pybk, or a new checkpoint"
            ) from error

    def finished(self, ledger_id: int, created_ns: int) -> bool:
        """Return whether a ledger was read to its end."""
        if ledger_id in self.at or within(ledger_id, self.due):
            return False
        if ledger_id <= self.upto and created_ns < self.before_ns:
            return True
        return ledger_id in self.ended or within(ledger_id, self.done)

    def named(self) -> set[int]:
        """Return the ids of all ledgers that the offset names, finished or not."""
        return {*self.at, *self.ended, *numbers_of(self.due), *numbers_of(self.done)}

    def unread(self) -> set[int]:
        """Return the ids of the named ledgers that can be read and were not read to their ends."""
        return {*(ledger_id for ledger_id, entry in self.at.items() if entry), *numbers_of(self.due)}

    def unfinished(self, ledgers: Iterable[ReadableLedger]) -> list[ReadableLedger]:
        """Return the ledgers that were not read to their ends, in the order of creation."""
        left = [each for each in ledgers if not self.finished(each.ledger_id, each.created_ns)]
        return sorted(left, key=lambda each: (each.created_ns, each.ledger_id))

    def next_entry(self, ledger_id: int) -> int:
        """Return the next entry to read of an unfinished ledger."""
        return self.at.get(ledger_id, 0)


def first_offset(starting: Positions, ledgers: Mapping[int, ReadableLedger], of: str = "") -> Offset:
    """Return the first offset of a new stream.

    Args:
        starting: The requested positions; ledgers that appear later begin at their first entry.
        ledgers: The existing ledgers.
        of: See ``Offset``.
    """
    if not starting.latest:
        at = {ledger_id: entry for ledger_id, entry in starting.entries.items() if entry}
        return Offset(at=at, due=ranges_of(ledgers.keys() - at.keys()), of=of)
    at = {each.ledger_id: each.end for each in ledgers.values() if each.end and not each.closed}
    done = {each.ledger_id for each in ledgers.values() if each.closed}
    return Offset(at=at, done=ranges_of(done), due=ranges_of(ledgers.keys() - at.keys() - done), of=of)


def advance(
    start: Offset,
    ledgers: Mapping[int, ReadableLedger],
    hidden: Mapping[int, int],
    taken: Mapping[int, int],
    now_ns: int,
    deleted: Collection[int] = (),
) -> Offset:
    """Return the end offset of a micro-batch.

    Args:
        start: The start offset of the micro-batch.
        ledgers: The ledgers that can be read.
        hidden: The creation times of ledgers that cannot be read yet.
        taken: The number of entries that the micro-batch reads, by unfinished ledger.
        now_ns: The present time.
        deleted: Ledgers that ``start`` names and that were deleted.

    Returns:
        The end offset; ``start`` itself if the micro-batch reads no entries and finishes no ledgers.
    """
    at = {each: entry for each, entry in start.at.items() if each not in ledgers and each not in deleted}
    late = {each for each in start.named() if each not in ledgers and each not in deleted}
    due = late.intersection(numbers_of(start.due))
    ended = {}
    for each in start.unfinished(ledgers.values()):
        entry = start.next_entry(each.ledger_id) + taken.get(each.ledger_id, 0)
        if each.closed and entry >= each.end:
            ended[each.ledger_id] = entry
        elif entry:
            at[each.ledger_id] = entry
        else:
            due.add(each.ledger_id)
    if not ended and not any(taken.values()):
        return start
    created = {each.ledger_id: each.created_ns for each in ledgers.values()} | dict(hidden)
    before_ns = max(start.before_ns, min(now_ns, max(created.values())) - LATE_NS)
    at |= {
        ledger_id: 0
        for ledger_id, created_ns in hidden.items()
        if created_ns < before_ns and ledger_id not in late and not start.finished(ledger_id, created_ns)
    }
    done = {
        each.ledger_id
        for each in ledgers.values()
        if each.created_ns >= before_ns and start.finished(each.ledger_id, each.created_ns)
    }
    return replace(
        start,
        at=at,
        ended=ended,
        due=ranges_of(due),
        done=ranges_of(done | (late - at.keys() - due)),
        upto=max(start.upto, *created),
        before_ns=before_ns,
    )


def between(start: Offset, end: Offset) -> list[EntryRange]:
    """Return the entries between two offsets, by ledger."""
    ends = {**end.at, **end.ended}
    return [
        EntryRange(ledger_id, start.next_entry(ledger_id), end_entry - 1)
        for ledger_id, end_entry in sorted(ends.items())
        if ledger_id not in start.ended and end_entry > start.next_entry(ledger_id)
    ]
