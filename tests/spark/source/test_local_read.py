"""Where tasks had better run: ledgers are cut where others have their entries."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.ledger.ledger_metadata import Bookie, Fragment
from pybk.spark.source.local_read import split
from pybk.spark.source.planning import EntryRange

A, B, C = (Bookie(name, bytes(16)) for name in "abc")
BESIDE = {A: "executor_h_0", B: "executor_h_1"}
FRAGMENTS = (Fragment(0, (A, B)), Fragment(10, (B, C)), Fragment(30, (C,)))


@pytest.mark.parametrize(
    ("first", "last", "wanted"),
    [
        (0, 9, [(("executor_h_0", "executor_h_1"), 0, 9)]),
        (5, 12, [(("executor_h_0", "executor_h_1"), 5, 9), (("executor_h_1",), 10, 12)]),
        (12, 20, [(("executor_h_1",), 12, 20)]),
        (29, 99, [(("executor_h_1",), 29, 29), ((), 30, 99)]),
    ],
)
def test_entries_are_cut_where_others_have_them(
    first: int, last: int, wanted: list[tuple[tuple[str, ...], int, int]]
) -> None:
    found = [
        (where, entry_range.first, entry_range.last)
        for where, entry_range in split(EntryRange(7, first, last), FRAGMENTS, BESIDE)
    ]
    assert found == wanted


def test_another_instance_of_a_name_has_nothing() -> None:
    again = Bookie("a", b"another instance")
    assert [where for where, _ in split(EntryRange(7, 0, 3), FRAGMENTS[:1], {again: "executor_h_2"})] == [()]
