"""Which extent of a replicated ledger holds an entry, and how far that goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.bookie.extent_lookup import Extents, ReplicaExtent


def held(first: int, last: int, stride: int = 1, *, replaces: bool = False) -> ReplicaExtent:
    """Return an extent that has some entries, all durable."""
    count = (last - first) // stride
    descriptor: Any = SimpleNamespace(last_pushed=count, last_durable=count)
    return ReplicaExtent(descriptor, None, first, stride, replaces)


def test_an_extent_counts_up_to_the_entry_before_those_that_were_replaced() -> None:
    extents = Extents()
    whole, newer = held(0, 19), held(8, 9, replaces=True)
    for each in (whole, newer):
        extents.add(each)
    assert [extents.bound(whole, entry_id) for entry_id in (0, 6, 7, 10)] == [7, 7, 7, 19]
    assert extents.bound(newer, 8) == 9


def test_an_extent_counts_for_an_entry_between_those_that_were_replaced() -> None:
    extents = Extents()
    whole, every_third = held(0, 19), held(2, 17, 3, replaces=True)
    for each in (whole, every_third):
        extents.add(each)
    assert extents.holder(6) is whole
    assert [extents.bound(whole, entry_id) for entry_id in (0, 6, 18)] == [1, 6, 19]


class Counting:
    """What an extent looks up in the store; it counts how often it is asked."""

    asked = 0

    def __init__(self, last: int) -> None:
        self._last = last

    @property
    def last_pushed(self) -> int:
        """Return the last entry."""
        Counting.asked += 1
        return self._last


def test_a_search_before_a_gap_looks_at_the_extent_before_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy with many gaps has an extent between any two, and each run that fills one asks for its end."""
    extents = Extents()
    for first in range(0, 30_000, 30):
        descriptor: Any = Counting(9)
        extents.add(ReplicaExtent(descriptor, None, first, 1, replaces=False))
    monkeypatch.setattr(Counting, "asked", 0)
    for entry_id in range(25, 30_000, 30):
        assert extents.growing(entry_id, 1) is None
        assert extents.holder(entry_id) is None
    assert Counting.asked <= 1000 * 5


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3)), st.integers(0, 3), st.integers(0, 4)), max_size=6), st.data())
def test_the_end_of_an_extent_is_where_the_search_would_append(
    parts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """``end`` is a short cut: where it finds an extent, no other one holds an entry from there on (I14)."""
    extents = Extents()
    made: list[ReplicaExtent] = []
    for stride, gap, count in parts:
        first = max((each.last_staged for each in made), default=-1) + 1 + gap
        made.append(held(first, first + (count - 1) * stride, stride))  # without entries if the count is 0
        extents.add(made[-1])
    top = max((each.last_staged for each in made), default=0)
    entry_id = data.draw(st.integers(0, top + 4), label="entry")
    stride = data.draw(st.sampled_from((1, 2, 3)), label="stride")
    found = extents.end(entry_id, stride)
    if found is not None:
        assert extents.growing(entry_id, stride) is found
        assert all(extents.holder(entry_id + n * stride) is None for n in range(12))
    elif len(made) == 1 and made[0].descriptor.last_pushed >= 0 and stride == made[0].stride:
        assert entry_id != made[0].last_staged + stride
