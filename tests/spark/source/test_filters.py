"""Filters that are claimed are applied exactly; all others are given back."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)

from pybk.spark.finished_ledgers import within
from pybk.spark.source.filters import EVERY, push

VALUES = st.integers(-3, 12) | st.sampled_from([2**63 - 1, -(2**63)])
COMPARED: dict[Any, Any] = {
    EqualTo: lambda entry, value: entry == value,
    EqualNullSafe: lambda entry, value: entry == value,
    GreaterThan: lambda entry, value: entry > value,
    GreaterThanOrEqual: lambda entry, value: entry >= value,
    LessThan: lambda entry, value: entry < value,
    LessThanOrEqual: lambda entry, value: entry <= value,
    In: lambda entry, value: entry in value,
}


@st.composite
def filters(draw: st.DrawFn) -> list[tuple[Filter, str, Any, Any]]:
    some = []
    for kind in draw(st.lists(st.sampled_from(list(COMPARED)), max_size=4)):
        value = tuple(draw(st.lists(VALUES, max_size=5))) if kind is In else draw(VALUES)
        name = draw(st.sampled_from(["ledger_id", "entry_id"]))
        some.append((kind((name,), value), name, COMPARED[kind], value))
    return some


@given(filters())
def test_claimed_filters_leave_exactly_what_they_say(some: list[tuple[Filter, str, Any, Any]]) -> None:
    pushed = push([each for each, *_ in some])
    assert pushed.rest == ()
    for name, left in (("ledger_id", pushed.ledgers), ("entry_id", pushed.entries)):
        for number in (*range(14), 2**63 - 1):
            wanted = all(compare(number, value) for _, column, compare, value in some if column == name)
            assert within(number, left) == wanted


def test_columns_are_never_null() -> None:
    every: list[Filter] = [IsNotNull((name,)) for name in ("ledger_id", "payload", "length", "custom_metadata")]
    assert push(every) == (EVERY, EVERY, ())


@pytest.mark.parametrize(
    "each",
    [
        Not(EqualTo(("entry_id",), 5)),
        IsNull(("entry_id",)),
        EqualTo(("entry_id",), None),
        EqualTo(("entry_id",), 5.0),
        EqualTo(("entry_id",), True),
        In(("entry_id",), (1, None)),
        EqualTo(("length",), 5),
        EqualTo(("payload",), b"x"),
        StringContains(("ledger_type",), "x"),
        EqualTo(("custom_metadata", "ledger_id"), 5),
        IsNotNull(("nobody",)),
    ],
)
def test_other_filters_are_given_back_as_they_came(each: Filter) -> None:
    pushed = push([EqualTo(("entry_id",), 3), each])
    assert pushed.ledgers == EVERY
    assert pushed.entries == ((3, 3),)
    [given_back] = pushed.rest
    assert given_back is each
