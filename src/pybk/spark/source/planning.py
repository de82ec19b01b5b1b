"""Planning of reads: the entries of each task; pure functions and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from pybk.errors import UsageError
from pybk.spark.options import Ranges
from pybk.spark.places import ITSELF, Place

PARTITION_BYTES: Final = 128 << 20
"""The payload bytes that a task reads, about."""

PARTITIONS_MAX: Final = 100_000

NUMBER_BYTES: Final = 32
"""The bytes that an entry counts for if it is not read: its row has numbers alone."""

_OPEN_BYTES: Final = 256 << 10
"""The bytes that the opening of a ledger counts for: about as many are read in the time that it takes."""


class Range(Protocol):
    """Consecutive entries, or records, of one ledger or log."""

    @property
    def first(self) -> int:
        """The first of them."""

    @property
    def last(self) -> int:
        """The last of them, at least ``first``."""

    def __len__(self) -> int:
        """Return their number."""

    def part(self, first: int, last: int) -> Self:
        """Return those from ``first`` to ``last``."""


R = TypeVar("R", bound=Range)


@dataclass(frozen=True, slots=True)
class EntryRange:
    """Consecutive entries of one ledger.

    Attributes:
        ledger_id: The ledger.
        first: First entry.
        last: Last entry, at least ``first``.
        place: Where a ledger that a sink wrote has its entries; None for another one, or if that is not known.
    """

    ledger_id: int
    first: int
    last: int
    place: Place | None = None

    @property
    def stored_in(self) -> int:
        """The ledger that has the entries: a merged one, or the ledger itself."""
        return self.ledger_id if self.place is None or self.place.holder == ITSELF else self.place.holder

    @property
    def shift(self) -> int:
        """The id there of entry 0."""
        return 0 if self.place is None else self.place.first

    def __len__(self) -> int:
        """Return the number of entries."""
        return self.last + 1 - self.first

    def part(self, first: int, last: int) -> EntryRange:
        """Return the entries from ``first`` to ``last``, which are among these."""
        return EntryRange(self.ledger_id, first, last, self.place)


@dataclass(frozen=True, slots=True)
class ReadableLedger:
    """The readable part of a ledger.

    Attributes:
        ledger_id: The ledger.
        created_ns: The creation time in its metadata.
        end: The id after the last readable entry.
        length: The approximate payload bytes up to ``end``.
        closed: Whether the ledger is closed; ``end`` is final then.
        place: Where its entries lie, if a sink wrote it.
    """

    ledger_id: int
    created_ns: int
    end: int
    length: int
    closed: bool
    place: Place | None = None

    @property
    def entry_bytes(self) -> float:
        """The average bytes of an entry."""
        return self.length / self.end if self.end else 0.0


class SizedRange(NamedTuple, Generic[R]):
    """Entries or records to read, and their size.

    Attributes:
        entry_range: The entries or records.
        entry_bytes: The average bytes of one of them.
        opens: Whether a ledger is opened for them; not if they follow others that are in the same one.
    """

    entry_range: R
    entry_bytes: float
    opens: bool = True


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """Return the intersection of two sets of ranges."""
    found = []
    ours, theirs = list(reversed(one)), list(reversed(other))
    while ours and theirs:
        low, high = max(ours[-1][0], theirs[-1][0]), min(ours[-1][1], theirs[-1][1])
        if low <= high:
            found.append((low, high))
        (ours if ours[-1][1] < theirs[-1][1] else theirs).pop()
    return tuple(found)


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Return the ranges that consist of the given numbers."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def numbers_of(ranges: Ranges) -> Iterator[int]:
    """Yield the numbers in ranges."""
    for low, high in ranges:
        yield from range(low, high + 1)


def split_into_tasks(ranges: Iterable[SizedRange[R]], entries: int | None = None) -> list[tuple[R, ...]]:
    """Return the ranges of each task.

    Args:
        ranges: The entries or records, in order.
        entries: The most of them for a task; None for about ``PARTITION_BYTES``. In that case the opening of a ledger
            counts as bytes as well, so many small ledgers are read neither by a single task, nor each by a task of its
            own.

    Returns:
        The ranges of each task, in order; equal for equal arguments.

    Raises:
        UsageError: The read would have more than ``PARTITIONS_MAX`` tasks.
    """
    given = [
        (
            part.entry_range,
            1.0 if entries else max(1.0, part.entry_bytes),
            _OPEN_BYTES if part.opens and not entries else 0,
        )
        for part in ranges
    ]
    total = sum(opening + len(entry_range) * weight for entry_range, weight, opening in given)
    task_size = float(entries) if entries else total / max(1, -(-total // PARTITION_BYTES)) + 1
    if total > task_size * PARTITIONS_MAX:
        raise UsageError(
            f"{total:.0f} entries in tasks of {task_size:.0f} would be more than {PARTITIONS_MAX} tasks; make "
            "entriesPerPartition or maxRecordsPerPartition larger"
        )
    tasks: list[tuple[R, ...]] = []
    task: list[R] = []
    left = task_size
    for entry_range, weight, opening in given:
        first = entry_range.first
        while first <= entry_range.last:
            fits = int((left - opening) / weight)
            if fits < 1 and task:
                tasks.append(tuple(task))
                task, left = [], task_size
                continue
            last = min(entry_range.last, first + max(1, fits) - 1)
            task.append(entry_range.part(first, last))
            left -= opening + len(task[-1]) * weight
            first = last + 1
    return [*tasks, tuple(task)] if task else tasks


def first_entries(ranges: Iterable[SizedRange[EntryRange]], entries: int | None) -> Iterator[SizedRange[EntryRange]]:
    """Yield the ranges of the first ``entries`` entries; None for all."""
    for part in ranges:
        if entries is None:
            yield part
        elif entries > 0:
            entry_range = part.entry_range
            entry_range = entry_range.part(entry_range.first, min(entry_range.last, entry_range.first + entries - 1))
            entries -= len(entry_range)
            yield part._replace(entry_range=entry_range)


def by_place(ranges: Iterable[SizedRange[EntryRange]]) -> list[SizedRange[EntryRange]]:
    """Return ranges with those together that one ledger has, at the place of the first, as it is opened once for them.

    The others keep their order.
    """
    groups: dict[int, list[SizedRange[EntryRange]]] = {}
    for part in ranges:
        group = groups.setdefault(part.entry_range.stored_in, [])
        group.append(part._replace(opens=not group))
    return [part for group in groups.values() for part in group]
