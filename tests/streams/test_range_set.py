"""Sets of numbers as ranges, compared with sets; blocks are small here, so that most changes touch several."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.streams import range_set
from pybk.streams.range_set import RangeSet

LIMIT = 90
RANGES = st.tuples(st.integers(0, LIMIT - 1), st.one_of(st.just(1), st.integers(1, 30))).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    with patch.object(range_set, "BLOCK", 2):
        yield


def ranges_of(numbers: set[int]) -> list[tuple[int, int]]:
    firsts = sorted(each for each in numbers if each - 1 not in numbers)
    ends = sorted(each + 1 for each in numbers if each + 1 not in numbers)
    return list(zip(firsts, ends, strict=True))


@given(st.lists(st.one_of(RANGES, st.none()), max_size=60))
def test_it_says_what_a_set_says(changes: list[tuple[int, int] | None]) -> None:
    found, model = RangeSet(), set[int]()
    for change in changes:
        if change is not None:
            assert found.add(*change) == len(set(range(*change)) - model)
            model |= set(range(*change))
        elif model:
            first, end = found.pop_first()
            assert (first, end) == ranges_of(model)[0]
            model -= set(range(first, end))
        assert list(found) == ranges_of(model)
        assert (found.count, found.total) == (len(ranges_of(model)), len(model))
        assert found.end == max((each + 1 for each in model), default=None)
        for number in range(LIMIT + 32):
            assert (number in found) == (number in model)
            assert found.count_before(number) == sum(each < number for each in model)
            within = [each for each in ranges_of(model) if each[1] > number and each[0] < number + 9]
            assert list(found.after(number, number + 9)) == within


@given(st.sets(st.integers(0, LIMIT)), RANGES)
def test_ranges_that_are_appended_can_be_changed(numbers: set[int], change: tuple[int, int]) -> None:
    found = RangeSet()
    found.extend(ranges_of(numbers))
    assert list(found) == ranges_of(numbers)
    assert found.total == len(numbers)
    found.add(*change)
    assert list(found) == ranges_of(numbers | set(range(*change)))
    assert found.count_before(LIMIT // 2) == sum(each < LIMIT // 2 for each in numbers | set(range(*change)))
