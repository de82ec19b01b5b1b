"""Packed ids come back as they were, and take little room."""

from __future__ import annotations

import json
import random

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.spark.finished_ledgers import merged
from pybk.spark.packed_ids import (
    WRITTEN_OUT_MAX,
    pack_numbers,
    pack_ranges,
    unpack_numbers,
    unpack_ranges,
)
from pybk.spark.source.planning import numbers_of, ranges_of

LARGEST = (1 << 63) - 1


@pytest.mark.parametrize("seed", range(30))
def test_what_is_packed_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    ids = [*chance.sample(range(chance.choice((50, 10000, LARGEST))), chance.randrange(50)), 0, LARGEST]
    ranges = ranges_of([*ids, *(each + 1 for each in ids[:10])])
    numbers = {each: chance.choice((0, 127, 128, LARGEST)) for each in ids}
    assert unpack_ranges(json.loads(json.dumps(pack_ranges(ranges)))) == ranges
    assert unpack_numbers(json.loads(json.dumps(pack_numbers(numbers)))) == numbers


def test_a_few_are_written_out_and_many_are_short() -> None:
    few = tuple((2 * each, 2 * each) for each in range(WRITTEN_OUT_MAX))
    assert pack_ranges(few) == [list(each) for each in few]
    assert pack_numbers({3: 4}) == {"3": 4}
    many = tuple((2 * each, 2 * each) for each in range(5000))
    assert len(pack_ranges(many)) < 100
    in_no_order = ranges_of(random.Random(1).sample(range(10_000), 5000))
    assert len(pack_ranges(in_no_order)) < 2500


@pytest.mark.parametrize("value", ["", "no base 85 \x7f", "zzzz", 7, None])
def test_what_is_not_packed_is_refused(value: object) -> None:
    for unpack in (unpack_ranges, unpack_numbers):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            unpack(value)


@pytest.mark.parametrize("seed", range(30))
def test_ranges_are_merged(seed: int) -> None:
    chance = random.Random(seed)
    one, other = ({chance.randrange(60) for _ in range(chance.randrange(30))} for _ in range(2))
    found = merged(ranges_of(one), ranges_of(other))
    assert found == ranges_of(one | other)
    assert {*numbers_of(found)} == one | other
