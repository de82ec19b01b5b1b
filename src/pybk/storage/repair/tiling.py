"""Choose the records that make up a ledger whose entries have copies in several files or are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pybk.storage.format.log_file import RunLocations
from pybk.storage.index.index import NOTHING, last_entry, untiled

Gap = tuple[int, int]
"""First and last entry id of a stretch that no record holds."""


class _Step(NamedTuple):
    """The best path from an entry to the ledger's end.

    ``unreadable`` entries lie on it; ``missing`` of these are in no record. The path begins with the record at index
    ``choice``, or with a gap if that is None, up to entry ``end``.
    """

    unreadable: int
    missing: int
    unwanted: int
    choice: int | None
    end: int


def tile(
    runs: RunLocations, last: int, *, preference: Callable[[int], int], is_sound: Callable[[int], bool]
) -> tuple[list[int], list[Gap]]:
    """Choose records that hold each entry of a ledger once.

    Args:
        runs: ``(r,)`` all records of the ledger that were found, in any order; each is taken whole or not at all.
        last: The ledger's last entry, -1 for none.
        preference: How much a record, by its place in ``runs``, is wanted; the larger the better.
        is_sound: Returns whether a record can be read; asked only where there is a choice.

    Returns:
        The places of the chosen records in order of entries, and the stretches that are missing everywhere. As many
        entries as possible can be read.

    Cost: Sorting, when the runs fit without a choice; else some microseconds, and a call of each function, per run.
    """
    if last < 0:
        return [], []
    fits = (runs["first"] >= 0) & (runs["count"] > 0) & ((runs["stride"] == 1) | (runs["count"] == 1))
    ends = runs["first"] + runs["count"].astype(np.int64)
    places = np.flatnonzero(fits & (ends <= last + 1) & (ends > 0))
    places = places[np.argsort(runs["first"][places], kind="stable")]
    mine = runs[places]
    if len(mine) and untiled(mine, NOTHING) is None and last_entry(mine)[0] == last:
        return places.tolist(), []
    return _choose(runs, places.tolist(), last, preference, is_sound)


def _choose(
    runs: RunLocations, places: list[int], last: int, preference: Callable[[int], int], is_sound: Callable[[int], bool]
) -> tuple[list[int], list[Gap]]:
    """Find the best path from entry 0 to the last entry, by dynamic programming from the end."""
    starting: dict[int, list[int]] = defaultdict(list)
    end_of: dict[int, int] = {}
    for place in places:
        first, count, *_ = runs[place].item()
        starting[first].append(place)
        end_of[place] = first + count
    stops = sorted({0, last + 1, *starting, *end_of.values()})
    best = {last + 1: _Step(0, 0, 0, None, last + 1)}
    for number in range(len(stops) - 2, -1, -1):
        at, following = stops[number], stops[number + 1]
        after = best[following]
        found = _Step(after.unreadable + following - at, after.missing + following - at, 0, None, following)
        for place in starting.get(at, ()):
            after = best[end_of[place]]
            unreadable = 0 if is_sound(place) else end_of[place] - at
            step = _Step(after.unreadable + unreadable, after.missing, -preference(place), place, end_of[place])
            found = min(found, step, key=lambda one: one[:3])
        best[at] = found
    return _follow(best, last)


def _follow(best: dict[int, _Step], last: int) -> tuple[list[int], list[Gap]]:
    """Follow the best path; adjacent gaps are merged."""
    chosen: list[int] = []
    gaps: list[Gap] = []
    at = 0
    while at <= last:
        step = best[at]
        if step.choice is not None:
            chosen.append(step.choice)
        elif gaps and gaps[-1][1] == at - 1:
            gaps[-1] = (gaps[-1][0], step.end - 1)
        else:
            gaps.append((at, step.end - 1))
        at = step.end
    return chosen, gaps
