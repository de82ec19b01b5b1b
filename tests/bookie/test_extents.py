"""Which extent of a replicated ledger holds an entry, and how far that goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pybk.bookie.extents import Extents, ReplicaExtent


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
