"""Sets of ids as ranges, in the values that keep the ids of deleted ledgers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

IdRange = tuple[int, int]
"""The first and the last id of a range."""


def with_ids(ranges: Sequence[IdRange], ids: Iterable[int]) -> list[IdRange]:
    """Return ranges with further ids, ascending, with adjacent ranges merged."""
    merged: list[IdRange] = []
    for first, last in sorted([*ranges, *((each, each) for each in ids)]):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def has_id(ranges: Sequence[IdRange], wanted: int) -> bool:
    """Return whether an id is in ascending ranges."""
    at = bisect_right(ranges, wanted, key=lambda each: each[0])
    return at > 0 and ranges[at - 1][0] <= wanted <= ranges[at - 1][1]


def count_ids(ranges: Sequence[IdRange]) -> int:
    """Return the number of ids in ranges."""
    return sum(last - first + 1 for first, last in ranges)


def decode_ranges(values: dict[str, Any]) -> list[IdRange]:
    """Return the ranges of a value; raises ValueError, KeyError or TypeError if it has none."""
    found = [(first, last) for first, last in values["ranges"]]
    flat = [each for pair in found for each in pair]
    if not all(type(each) is int for each in flat) or flat != sorted(flat):
        raise ValueError("ranges are not pairs of ascending whole numbers")
    return found
