"""The planning of reads: every entry wanted is read by one task, in tasks of even size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import UsageError
from pybk.spark.finished_ledgers import within
from pybk.spark.options import Ranges
from pybk.spark.places import Place
from pybk.spark.source.planning import (
    PARTITION_BYTES,
    PARTITIONS_MAX,
    EntryRange,
    SizedRange,
    by_place,
    first_entries,
    intersect,
    split_into_tasks,
)

NUMBERS = st.integers(0, 40)


@st.composite
def ranges(draw: st.DrawFn) -> Ranges:
    numbers = sorted(draw(st.sets(NUMBERS, max_size=12)))
    return tuple(zip(numbers[::2], numbers[1::2], strict=False))


def numbers(some: Ranges) -> set[int]:
    return {number for low, high in some for number in range(low, high + 1)}


@given(ranges(), ranges())
def test_the_intersection_of_ranges(one: Ranges, other: Ranges) -> None:
    found = intersect(one, other)
    assert numbers(found) == numbers(one) & numbers(other)
    assert list(found) == sorted(found)
    assert [number for number in range(42) if within(number, one)] == sorted(numbers(one))


def test_no_ranges_at_all_have_every_number() -> None:
    assert within(5, None)
    assert not within(5, ())


def part(ledger_id: int, first: int, last: int, entry_bytes: float = 1000) -> SizedRange[EntryRange]:
    return SizedRange(EntryRange(ledger_id, first, last), entry_bytes)


parts = st.lists(
    st.builds(
        lambda ledger_id, first, count, size: part(ledger_id, first, first + count - 1, size),
        NUMBERS,
        NUMBERS,
        st.integers(1, 10**6),
        st.floats(0, 5000),
    ),
    max_size=20,
)


def flat(tasks: list[tuple[EntryRange, ...]]) -> list[EntryRange]:
    """Return the ranges of all tasks, those that were split joined again."""
    joined: list[EntryRange] = []
    for entry_range in (entry_range for task in tasks for entry_range in task):
        if joined and joined[-1].ledger_id == entry_range.ledger_id and joined[-1].last + 1 == entry_range.first:
            joined[-1] = EntryRange(entry_range.ledger_id, joined[-1].first, entry_range.last)
        else:
            joined.append(entry_range)
    return joined


@given(parts, st.none() | st.integers(1000, 10**6))
def test_every_entry_is_read_once_and_in_order(some: list[SizedRange[EntryRange]], entries: int | None) -> None:
    tasks = split_into_tasks(some, entries)
    assert flat(tasks) == flat([(each.entry_range,) for each in some])
    assert tasks == split_into_tasks(some, entries)
    assert all(tasks)
    if entries is not None:
        assert all(sum(map(len, task)) == entries for task in tasks[:-1])
        assert all(sum(map(len, task)) <= entries for task in tasks)


def test_tasks_are_of_even_size() -> None:
    """200 MB make two tasks of 100 MB, neither one of 200 nor a large and a small one."""
    [one, other] = split_into_tasks([part(1, 0, 99_999), part(2, 0, 99_999)])
    assert abs(sum(map(len, one)) - sum(map(len, other))) < 2000
    assert len(split_into_tasks([part(1, 0, 9)])) == 1
    tasks = split_into_tasks([part(1, 0, 10**7 - 1)])
    assert 0 <= len(tasks) - 10**10 / PARTITION_BYTES < 2
    assert max(sum(map(len, task)) for task in tasks) * 1000 <= PARTITION_BYTES


def test_many_small_ledgers_are_shared_among_tasks() -> None:
    tasks = split_into_tasks([part(number, 0, 0) for number in range(5000)])
    assert 5 < len(tasks) < 12


def test_nothing_to_read_makes_no_task() -> None:
    assert split_into_tasks([]) == []
    assert split_into_tasks([], 5) == []


def test_a_limit_takes_the_first_entries() -> None:
    some = [part(1, 5, 9), part(2, 0, 9), part(3, 0, 9)]
    assert [each.entry_range for each in first_entries(some, 7)] == [EntryRange(1, 5, 9), EntryRange(2, 0, 1)]
    assert [each.entry_range for each in first_entries(some, 5)] == [EntryRange(1, 5, 9)]
    assert list(first_entries(some, None)) == some


def test_more_tasks_than_spark_bears_are_refused() -> None:
    with pytest.raises(UsageError, match="entriesPerPartition"):
        split_into_tasks([part(1, 0, PARTITIONS_MAX)], 1)


def test_members_of_a_merged_ledger_are_read_together() -> None:
    """It is opened once for them, so they need no tasks for their opening."""
    members = [SizedRange(EntryRange(each, 0, 0, Place("app", 5000, each)), 1024) for each in range(2000)]
    others = [part(each, 0, 0) for each in range(2000, 2003)]
    ordered = by_place([members[0], others[0], *members[1:], *others[1:]])
    assert [each.entry_range for each in ordered] == [each.entry_range for each in (*members, *others)]
    assert [each.opens for each in ordered] == [True] + [False] * 1999 + [True] * 3
    assert len(split_into_tasks(ordered)) == 1
    assert len(split_into_tasks(members)) > 2
    assert [each.opens for each in first_entries(ordered, 3)] == [True, False, False]
    assert (members[7].entry_range.stored_in, members[7].entry_range.shift) == (5000, 7)
    assert (others[0].entry_range.stored_in, others[0].entry_range.shift) == (2000, 0)
