"""Offsets of streams of logs, the shares of a micro-batch, and what is known of a pattern."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import UnsupportedFormatError
from pybk.spark.log_source.log_catalog import literal_prefix
from pybk.spark.log_source.log_offsets import LogPlace, from_json, shares, to_json

PLACES = {"b": LogPlace(5, "0123abcd"), "a@x": LogPlace(0, "00000000", 3)}


def test_both_forms_are_read_back() -> None:
    kafka = to_json(PLACES, "kafka")
    assert list(kafka.items()) == [("a@x", {"0": 0}), ("b", {"0": 5})]
    assert from_json(kafka) == {"a@x": LogPlace(0), "b": LogPlace(5)}
    pybk = to_json(PLACES, "pybk")
    assert list(pybk.items()) == [("a@x@00000000.3", 0), ("b@0123abcd", 5)]
    assert from_json(pybk) == PLACES


@pytest.mark.parametrize(
    "values",
    [
        *({"a": 5}, {"a": {"1": 5}}, {"a": {"0": 5, "1": 5}}, {"a": {"0": -1}}),
        *({"a@0123abcd": True}, {"a@0123": 5}, {"a@0123abcd.x": 5}, {"v": []}),
    ],
)
def test_other_offsets_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormatError, match="none of logs"):
        from_json(values)


def test_fifty_logs_have_an_offset_of_two_kilobytes() -> None:
    places = {f"shop/events-{number:02}": LogPlace(10**9 + number, "0123abcd") for number in range(50)}
    for columns in ("kafka", "pybk"):
        assert len(str(to_json(places, columns))) <= 2048


@given(st.integers(0, 1000), st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 200)))
def test_shares_take_as_much_as_they_may(most: int, available: dict[str, int]) -> None:
    taken = shares(most, available)
    assert sum(taken.values()) == min(most, sum(available.values()))
    assert all(0 <= taken[log] <= count for log, count in available.items())
    with_records = [log for log, count in available.items() if count]
    if most >= len(with_records):
        assert all(taken[log] for log in with_records)


def test_shares_are_in_proportion_and_a_small_log_does_not_wait() -> None:
    assert shares(100, {"a": 1_000_000, "b": 3_000_000, "c": 1, "d": 0}) == {"a": 25, "b": 74, "c": 1, "d": 0}
    assert shares(2, {"a": 1, "b": 7, "c": 9}) == {"a": 0, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("pattern", "prefix"),
    [
        *(("orders", "orders"), ("shop/o.*", "shop/o"), ("ab*", "a"), ("ab?c", "a"), ("ab{2}", "a"), ("ab+", "ab")),
        *(("a|b", ""), ("(a|b)", ""), ("[ab]c", ""), (r"a\d", "a"), ("(?i)a", "")),
    ],
)
def test_the_prefix_of_a_pattern(pattern: str, prefix: str) -> None:
    assert literal_prefix(pattern) == prefix
