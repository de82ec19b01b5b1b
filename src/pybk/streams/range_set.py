"""``RangeSet``: a set of whole numbers as ranges; a change costs little, however many ranges there are.

The ranges are ascending, and never touch each other. They are in blocks of bounded length, each with the count of its
numbers. So a change moves the ranges of one block only, and a count adds up the blocks before a number and a part of
one block.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Final

Ranges = list[tuple[int, int]]
"""Ranges: the first number of each, and the one after its last."""

BLOCK: Final = 512
"""Ranges of a block that is made by a split; a block is split beyond twice that."""

_FIRST: Final = itemgetter(0)
_LAST: Final = itemgetter(-1)


class RangeSet:
    """Whole numbers as ranges that are ascending and apart from each other.

    Threads: one at a time.

    Attributes:
        count: The number of ranges.
        total: The number of numbers in them.
    """

    def __init__(self) -> None:
        self.count = self.total = 0
        self._starts: list[list[int]] = []
        self._ends: list[list[int]] = []
        self._totals: list[int] = []

    # ---- what it says --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges, ascending."""
        for starts, ends in zip(self._starts, self._ends, strict=True):
            yield from zip(starts, ends, strict=True)

    @property
    def end(self) -> int | None:
        """The number after the last one; None for an empty set."""
        return self._ends[-1][-1] if self._ends else None

    def __contains__(self, number: int) -> bool:
        """Return whether a number is in it."""
        return any(first <= number for first, _ in self.after(number, number + 1))

    def after(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges that end after ``low`` and begin before ``high``, ascending.

        The set must not change meanwhile.

        Cost: The logarithm of the number of ranges, and what it yields.
        """
        block = bisect_right(self._ends, low, key=_LAST)
        at = bisect_right(self._ends[block], low) if block < len(self._ends) else 0
        for each in range(block, len(self._ends)):
            starts, ends = self._starts[each], self._ends[each]
            while at < len(starts):
                if starts[at] >= high:
                    return
                yield starts[at], ends[at]
                at += 1
            at = 0

    def count_before(self, end: int) -> int:
        """Return the number of numbers that are less than ``end``."""
        block = bisect_left(self._starts, end, key=_FIRST) - 1
        if block < 0:
            return 0
        starts, ends = self._starts[block], self._ends[block]
        number = bisect_left(starts, end)
        within = sum(ends[:number]) - sum(starts[:number])
        return sum(self._totals[:block]) + within - max(0, ends[number - 1] - end)

    # ---- changes -------------------------------------------------------------------------------------------------

    def add(self, first: int, end: int) -> int:
        """Add the numbers from ``first`` to the one before ``end``; return how many of them were new."""
        block = self._touched(first, end)
        starts, ends = self._starts[block], self._ends[block]
        low, high = bisect_left(ends, first), bisect_right(starts, end)  # these ranges touch the new one
        held = 0
        if low < high:
            held = sum(ends[low:high]) - sum(starts[low:high])
            first, end = min(first, starts[low]), max(end, ends[high - 1])
        starts[low:high], ends[low:high] = [first], [end]
        added = end - first - held
        self.count += 1 - (high - low)
        self.total += added
        self._totals[block] += added
        if len(starts) > 2 * BLOCK:
            self._replace(block, block + 1, starts, ends)
        return added

    def pop_first(self) -> tuple[int, int]:
        """Remove the first range, and return it; the set is not empty."""
        starts, ends = self._starts[0], self._ends[0]
        first, end = starts.pop(0), ends.pop(0)
        self.count -= 1
        self.total -= end - first
        self._totals[0] -= end - first
        if not starts:
            del self._starts[0], self._ends[0], self._totals[0]
        return first, end

    def extend(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add ranges that are ascending, apart from each other, and after the last one."""
        for first, end in ranges:
            if not self._starts or len(self._starts[-1]) >= BLOCK:
                self._starts.append([])
                self._ends.append([])
                self._totals.append(0)
            self._starts[-1].append(first)
            self._ends[-1].append(end)
            self._totals[-1] += end - first
            self.count += 1
            self.total += end - first

    def _touched(self, first: int, end: int) -> int:
        """Return the block that a range is added to, after joining the blocks that it touches."""
        if not self._starts:
            self._replace(0, 0, [], [])
            return 0
        last = max(0, bisect_right(self._starts, end, key=_FIRST) - 1)
        block = bisect_left(self._ends, first, 0, last, key=_LAST)
        if block < last:
            starts = [each for some in self._starts[block : last + 1] for each in some]
            ends = [each for some in self._ends[block : last + 1] for each in some]
            self._starts[block : last + 1], self._ends[block : last + 1] = [starts], [ends]
            self._totals[block : last + 1] = [sum(self._totals[block : last + 1])]
        return block

    def _replace(self, block: int, after: int, starts: list[int], ends: list[int]) -> None:
        """Put ranges in the place of blocks, split into as many as they take, at least one."""
        cuts = range(0, max(1, len(starts)), BLOCK)
        self._starts[block:after] = [starts[cut : cut + BLOCK] for cut in cuts]
        self._ends[block:after] = [ends[cut : cut + BLOCK] for cut in cuts]
        self._totals[block:after] = [sum(ends[cut : cut + BLOCK]) - sum(starts[cut : cut + BLOCK]) for cut in cuts]
