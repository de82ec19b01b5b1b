"""The offset of a stream, as a value that stays small; pure, without input or output.

States of a ledger in an offset: *due* (nothing was read) or in *at* (reading) → *ended* (this offset finishes it) →
*done*, or dropped by the rule below. ``advance`` makes the transitions, ``between`` returns the entries of a
micro-batch, and both are deterministic, so a repeated micro-batch reads the same entries.

An offset names the next entry of each ledger. A ledger is *finished* once it is closed and all its entries were read.
The offset that finishes it names it under ``ended``, with its end, because two offsets alone must determine the entries
between them; and from then on, for some time, under ``done``. A ledger is finished by this rule: it is in ``done``, or
its id is at most ``upto``, its metadata say that it was created before ``before``, and it is neither in ``at`` nor in
``due``. ``before`` is an hour older than the newest ledger, because the clocks of the hosts that create ledgers differ,
and ledgers are not created in the order of their ids.

``done`` has a part for each half hour in which ledgers were created, and a part is dropped once ``before`` has passed
it. So an offset has only the ledgers that are being read and, as sets of ids, the ledgers that are to be read and the
finished ones that were created within the last one and a half hours. These sets stay small where other ledgers lie in
between: ids of ledgers that the query never reads are added to ``done`` where that joins two ranges.

A ledger that an offset names stays in it until it is finished or known to be deleted; its absence from a listing proves
nothing, because listings may be late.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from pybk.errors import UnsupportedFormatError
from pybk.spark.finished_ledgers import FinishedLedgers, is_covered, merged, within
from pybk.spark.options import Positions, Ranges
from pybk.spark.packed_ids import pack_numbers, pack_ranges, unpack_numbers, unpack_ranges
from pybk.spark.source.planning import EntryRange, ReadableLedger, numbers_of, ranges_of

LATE_NS: Final = 3600 * 10**9
"""The bound on the difference of hosts' clocks, and on the time from a ledger's creation to its first listing."""

PART_NS: Final = LATE_NS // 2
"""The span of the creation times of the ledgers in a part of ``done``."""

_JOINED_MAX: Final = 10_000
"""The most ids between two ranges that are looked at to join them."""

_VERSION: Final = 3

Done = tuple[tuple[int, Ranges], ...]
"""Ranges of finished ledgers, and the time before which all of them were created; ascending by that."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a stream in all its ledgers.

    Attributes:
        of: The store or cluster, and the selection of its ledgers.
        at: The next entry of unfinished ledgers. A ledger that is not named is at its first entry, or finished. A named
            ledger at its first entry could not be read yet, so its deletion is not a loss.
        due: Ranges of ids of ledgers that can be read and from which no entry was read.
        ended: The ends of the ledgers that this offset finishes; ``done`` has them, too.
        done: The ledgers that were finished, and were created not long ago.
        upto: The highest id to which the rule at the head of this module applies.
        before_ns: The time ``before`` of the head of this module, in nanoseconds since 1970.
    """

    at: Mapping[int, int] = field(default_factory=dict, hash=False)
    ended: Mapping[int, int] = field(default_factory=dict, hash=False)
    done: Done = ()
    upto: int = -1
    before_ns: int = 0
    due: Ranges = ()
    of: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the offset as JSON values for Spark; equal offsets give equal texts."""
        return {
            "version": _VERSION,
            "of": self.of,
            "at": pack_numbers(self.at),
            "ended": pack_numbers(self.ended),
            "due": pack_ranges(self.due),
            "done": [[before_ns, pack_ranges(ranges)] for before_ns, ranges in self.done],
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
            if values["version"] not in (_VERSION - 1, _VERSION):
                raise ValueError(f"version {values['version']!r}")
            ended = unpack_numbers(values["ended"])
            return cls(
                unpack_numbers(values["at"]),
                ended,
                _done_of_2(values, ended) if values["version"] == _VERSION - 1 else _done_of(values),
                int(values["upto"]),
                int(values["before"]),
                unpack_ranges(values["due"]),
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
        return is_covered(ledger_id, created_ns, self.upto, self.before_ns, (ranges for _, ranges in self.done))

    def finished_ledgers(self) -> FinishedLedgers:
        """Return the ledgers that were read to their ends."""
        done = merged(*(ranges for _, ranges in self.done))
        return FinishedLedgers(ranges_of(self.unfinished_ids()), done, self.upto, self.before_ns)

    def unfinished_ids(self) -> set[int]:
        """Return the ids of the named ledgers that are not finished."""
        return {*self.at, *numbers_of(self.due)}

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


def _done_of(values: dict[str, Any]) -> Done:
    return tuple((int(before_ns), unpack_ranges(ranges)) for before_ns, ranges in values["done"])


def _done_of_2(values: dict[str, Any], ended: Collection[int]) -> Done:
    """Return the finished ledgers of an offset of version 2, which has no creation times."""
    ranges = merged(unpack_ranges(values["done"]), ranges_of(ended))
    # No clock is ahead of another by more, and that of the newest ledger may have been.
    return ((int(values["before"]) + 2 * LATE_NS, ranges),) if ranges else ()


def first_offset(
    starting: Positions,
    ledgers: Mapping[int, ReadableLedger],
    hidden: Mapping[int, int],
    now_ns: int,
    *,
    of: str = "",
    others: Container[int] = (),
) -> Offset:
    """Return the first offset of a new stream.

    Args:
        starting: The requested positions; ledgers that appear later begin at their first entry.
        ledgers: The existing ledgers.
        hidden: As for ``advance``.
        now_ns: The present time.
        of: See ``Offset``.
        others: As for ``advance``.
    """
    first = Offset(of=of)
    if not starting.latest:
        at = {ledger_id: entry for ledger_id, entry in starting.entries.items() if entry}
        return replace(first, at=at, due=ranges_of(ledgers.keys() - at.keys()))
    everything = {each.ledger_id: each.end for each in ledgers.values()}
    latest = advance(first, ledgers, hidden, everything, now_ns, others=others)
    return replace(first, due=ranges_of(ledgers)) if latest is first else replace(latest, ended={})


def advance(
    start: Offset,
    ledgers: Mapping[int, ReadableLedger],
    hidden: Mapping[int, int],
    taken: Mapping[int, int],
    now_ns: int,
    deleted: Collection[int] = (),
    others: Container[int] = (),
) -> Offset:
    """Return the end offset of a micro-batch.

    Args:
        start: The start offset of the micro-batch.
        ledgers: The ledgers that can be read; those that ``start`` has finished may be left out.
        hidden: The creation times of ledgers that cannot be read yet.
        taken: The number of entries that the micro-batch reads, by unfinished ledger.
        now_ns: The present time.
        deleted: Ledgers that ``start`` names and that were deleted.
        others: Ledgers that the query never reads.

    Returns:
        The end offset; ``start`` itself if the micro-batch reads no entries and finishes no ledgers.
    """
    late = {each for each in start.unfinished_ids() if each not in ledgers and each not in deleted}
    at = {each: entry for each, entry in start.at.items() if each in late}
    due = late - at.keys()
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

    def joins(ledger_id: int) -> bool:
        return ledger_id in ended or ledger_id in others or any(within(ledger_id, ranges) for _, ranges in start.done)

    return replace(
        start,
        at=at,
        ended=ended,
        due=ranges_of(due),
        done=_with(start.done, {each: created[each] for each in ended}, before_ns, joins),
        upto=max(start.upto, *created),
        before_ns=before_ns,
    )


def _with(done: Done, finished: Mapping[int, int], before_ns: int, joins: Callable[[int], bool]) -> Done:
    """Return the finished ledgers with more of them, and without the parts that the rule of ``before`` covers.

    Args:
        done: The ledgers.
        finished: The creation times of more of them.
        before_ns: The time ``before``.
        joins: Returns whether a ledger is not to be read, now or later.
    """
    parts: dict[int, set[int]] = {}
    for ledger_id, created_ns in finished.items():
        end_ns = (created_ns // PART_NS + 1) * PART_NS
        if end_ns > before_ns:
            parts.setdefault(end_ns, set()).add(ledger_id)
    kept = {end_ns: ranges for end_ns, ranges in done if end_ns > before_ns}
    for end_ns, ledger_ids in parts.items():
        kept[end_ns] = _joined(merged(kept.get(end_ns, ()), ranges_of(ledger_ids)), joins)
    return tuple(sorted(kept.items()))


def _joined(ranges: Ranges, joins: Callable[[int], bool]) -> Ranges:
    """Join ranges between which there are only ids that may be in them, too."""
    found = list(ranges[:1])
    for low, high in ranges[1:]:
        between_them = range(found[-1][1] + 1, low)
        if len(between_them) <= _JOINED_MAX and all(map(joins, between_them)):
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return tuple(found)


def between(start: Offset, end: Offset) -> list[EntryRange]:
    """Return the entries between two offsets, by ledger."""
    ends = {**end.at, **end.ended}
    return [
        EntryRange(ledger_id, start.next_entry(ledger_id), end_entry - 1)
        for ledger_id, end_entry in sorted(ends.items())
        if ledger_id not in start.ended and end_entry > start.next_entry(ledger_id)
    ]
