"""Changes of rows of manifests as values: which manifests are written again, in which parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pybk.spark.sink import sink_record
from pybk.spark.sink.row_change import RowChange, changed, pieces
from pybk.spark.sink.sink_record import WHOLE, ManifestRow, SinkRecord

ROWS = [ManifestRow(number, 2, 20, number + 1) for number in range(12)]
MANIFESTS = {70: ROWS[:5], 71: ROWS[5:7], 72: ROWS[7:9], 73: ROWS[9:10], 74: ROWS[10:], -1: []}
RECORD = SinkRecord(chain=((70, 2), (71, 1), (72, 1), (73, 0), (74, 0)), last=5)


def dropping(*ledger_ids: int) -> tuple[RowChange, dict[int, None]]:
    change = RowChange(lambda row: row.ledger_id in ledger_ids)
    change.look(RECORD, MANIFESTS)
    return change, dict.fromkeys(ledger_ids)


def metadata(ledger_id: int, created_ns: int = 9) -> Any:
    return SimpleNamespace(ledger_id=ledger_id, creation_time_ns=created_ns)


def parts_of(change: RowChange, moved: dict[int, None], record: SinkRecord = RECORD) -> list[tuple[list[int], bool]]:
    found = change.parts(record.chain, MANIFESTS, moved)
    return [([ledger_id for ledger_id, _ in part], changes) for part, changes in found]


def test_manifests_that_change_are_joined_up_to_so_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_record, "MANIFEST_ROWS", 4)
    whole = dropping(0, 5, 7, 9, 10)
    assert parts_of(*whole) == [([70], True), ([71, 72], True), ([73, 74], True)]
    assert parts_of(*dropping(5, 10)) == [([70], False), ([71], True), ([72], False), ([73], False), ([74], True)]
    assert parts_of(*dropping()) == [([each], False) for each in (70, 71, 72, 73, 74)]
    assert [len(each) for each in pieces(ROWS[:5])] == [4, 1]
    assert pieces([]) == []
    assert changed(ROWS[:3], {0: None, 1: ROWS[9]}) == [ROWS[9], ROWS[2]]


def test_a_manifest_that_a_commit_may_fold_is_not_joined_to_a_large_one() -> None:
    whole = dropping(0, 5, 7, 9, 10)
    assert parts_of(*whole) == [([70], True), ([71, 72], True), ([73, 74], True)]
    folded = SinkRecord(chain=((70, 2), (71, 1), (72, 1), (74, 1)), last=6)
    assert parts_of(*whole, folded) == [([70], True), ([71, 72, 74], True)]


def test_what_was_written_serves_as_long_as_it_cannot_have_been_deleted() -> None:
    change, moved = dropping(0, 5)
    [part, *_] = [part for part, changes in change.parts(RECORD.chain, MANIFESTS, moved) if changes]
    change.note(part, [(metadata(80), ROWS[1:3]), (metadata(81), ROWS[3:5])])
    assert change.written == {part: ((80, WHOLE), (81, WHOLE))}
    change.look(RECORD, MANIFESTS)
    assert change.written
    assert change.unnamed(RECORD.chain) == [80, 81]
    assert change.unnamed(((80, 2), (81, 2))) == [70, 71, 72, 73, 74]
    change.look(SinkRecord(RECORD.chain, floor_ns=9), MANIFESTS)
    assert change.written == {}
    assert change.unnamed(RECORD.chain) == [80, 81], "they are deleted all the same"
    change.note(part, [(metadata(82, 10), ROWS[1:])])
    assert change.written == {part: ((82, 2),)}


def test_rows_that_a_record_names_itself_are_looked_at_each_time() -> None:
    change, _ = dropping(3, 20)
    assert [row.ledger_id for row in change.found] == [3]
    change.look(RECORD, {**MANIFESTS, -1: [ManifestRow(20, 1, 1)]})
    assert [row.ledger_id for row in change.found] == [3, 20]
    change.look(SinkRecord(), {-1: [ManifestRow(20, 1, 1), ManifestRow(21, 1, 1, 1, 9)]})
    assert ([row.ledger_id for row in change.found], change.other_holders) == ([20], frozenset({9}))
