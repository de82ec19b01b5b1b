"""Which committed ledgers retention deletes: by age, by size, and by what consumers have read."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pybk.errors import UsageError
from pybk.flags import LedgerType
from pybk.spark.consumers import Consumer, Selection
from pybk.spark.finished_ledgers import FinishedLedgers, is_selected
from pybk.spark.sink.sink_record import ManifestRow
from pybk.spark.sink.sink_retention import (
    HeldLedger,
    Readership,
    SinkRetention,
    beyond_limits,
    may_be_deleted,
    with_ages,
)

SECOND = 10**9
NOW = 1000 * SECOND


def held(*created_s: int, size: int = 10) -> list[HeldLedger]:
    """Return ledgers that are numbered from 1 on, by their creation times."""
    return [HeldLedger(at * SECOND, number, size, LedgerType(), 0) for number, at in enumerate(created_s, 1)]


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (SinkRetention(), set()),
        (SinkRetention(max_age_s=100), {1, 2}),
        (SinkRetention(max_age_s=0), {1, 2, 3, 4}),
        (SinkRetention(max_age_s=1e9), set()),
        (SinkRetention(max_bytes=40), set()),
        (SinkRetention(max_bytes=39), {1}),
        (SinkRetention(max_bytes=20), {1, 2}),
        (SinkRetention(max_bytes=9), {1, 2, 3, 4}),
        (SinkRetention(max_bytes=0), {1, 2, 3, 4}),
        (SinkRetention(max_age_s=100, max_bytes=10), {1, 2, 3}),
        (SinkRetention(max_age_s=50, max_bytes=35), {1, 2, 3}),
    ],
)
def test_the_oldest_are_beyond_the_limits(retention: SinkRetention, expected: set[int]) -> None:
    ledgers = held(500, 899, 900, 990)
    assert beyond_limits(ledgers, retention, NOW) == expected
    assert beyond_limits(reversed(ledgers), retention, NOW) == expected


def test_a_ledger_is_not_older_than_one_that_was_committed_before() -> None:
    """A clock that is slow does not end it early; one that is ahead keeps its own ledgers alone."""
    created = (500, 20, 600, 5000, 0, 599, 700)
    rows = [ManifestRow(number, 1, 1, at * SECOND) for number, at in enumerate(created)]
    since = [at // SECOND for _, at in with_ages(rows, NOW)]
    assert since == [500, 500, 600, 5000, 600, 600, 700]
    assert [row for row, _ in with_ages(rows, NOW)] == rows


def consumer(kind: str | None, *finished: int, ids: tuple[tuple[int, int], ...] | None = None) -> Consumer:
    done = tuple((each, each) for each in finished)
    return Consumer("c", Selection(kind, ids), FinishedLedgers(done=done), "run", 0)


def of_type(ledger_id: int, kind: str) -> HeldLedger:
    return HeldLedger(0, ledger_id, 1, LedgerType(kind), 0)


READ, UNREAD, OTHER = consumer("t", 7), consumer("t", 8), consumer("other")


@pytest.mark.parametrize(
    ("consumers", "keep_read", "keep_unread", "beyond", "within"),
    [
        ([], True, True, True, False),
        ([], False, True, True, False),
        ([READ], True, True, True, False),
        ([READ], False, True, True, True),
        ([UNREAD], True, True, False, False),
        ([UNREAD], False, True, False, False),
        ([READ, UNREAD], False, True, False, False),
        ([READ, UNREAD], False, False, True, False),
        ([UNREAD], True, False, True, False),
        ([OTHER], False, True, True, False),
        ([READ, OTHER], False, True, True, True),
        ([consumer(None, ids=((1, 7),))], True, True, False, False),
        ([consumer(None, ids=((1, 6),))], True, True, True, False),
        ([consumer(None, 7, ids=((1, 7),))], False, True, True, True),
    ],
)
def test_what_a_consumer_needs_is_kept(
    consumers: list[Consumer], keep_read: bool, keep_unread: bool, beyond: bool, within: bool
) -> None:
    """Unless that is asked for, and then only beyond the limits."""
    retention = SinkRetention(max_age_s=1, keep_read=keep_read, keep_unread=keep_unread)
    ledger, readership = of_type(7, "t"), Readership(consumers)
    assert may_be_deleted(ledger, retention, readership, is_beyond=True) is beyond
    assert may_be_deleted(ledger, retention, readership, is_beyond=False) is within


def some_ranges(chance: Random) -> tuple[tuple[int, int], ...]:
    """Return some ranges of the numbers below 40."""
    ends = sorted(chance.sample(range(40), 2 * chance.randrange(4)))
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def some_consumer(chance: Random, number: int) -> Consumer:
    finished = FinishedLedgers(
        left=some_ranges(chance), done=some_ranges(chance), upto=chance.randrange(-1, 50), before_ns=chance.randrange(9)
    )
    selection = chance.choice(
        (Selection("t", None), Selection("u", None), Selection(None, None), Selection(None, some_ranges(chance)))
    )
    return Consumer(f"c{number}", selection, finished, "run", 0)


@pytest.mark.parametrize("seed", range(20))
def test_consumers_are_asked_all_at_once_as_one_by_one(seed: int) -> None:
    chance = Random(seed)
    consumers = [some_consumer(chance, number) for number in range(chance.randrange(7))]
    readership = Readership(consumers)
    for ledger_id in range(45):
        ledger = HeldLedger(99, ledger_id, 1, LedgerType(chance.choice("tuv")), chance.randrange(10))
        selected = [each for each in consumers if is_selected(ledger, *each.selection)]
        is_read = None if not selected else not any(each.needs(ledger) for each in selected)
        assert readership.have_read(ledger) is is_read
        assert readership.may_have_read(ledger_id, ledger.creation_time_ns) or is_read is not True


def test_many_consumers_are_asked_as_quickly_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """About what all have read long ago, and about what one has to read."""
    has, asked = FinishedLedgers.has, list[int]()

    def counted(finished: FinishedLedgers, ledger_id: int, created_ns: int) -> bool:
        asked.append(ledger_id)
        return has(finished, ledger_id, created_ns)

    monkeypatch.setattr(FinishedLedgers, "has", counted)
    finished = [FinishedLedgers(((7, 9),), ((12, 12),), 20 + number, 5) for number in range(1000)]
    begun = [*finished, FinishedLedgers()]
    for all_finished, ledger_id, is_read, questions in (
        (finished, 6, True, 0),
        (finished, 8, False, 0),
        (finished, 1100, False, 1),
        (begun, 6, False, 1),
    ):
        readership = Readership([Consumer("c", Selection("t", None), each, "run", 0) for each in all_finished])
        asked.clear()
        assert readership.have_read(HeldLedger(99, ledger_id, 1, LedgerType("t"), 4)) is is_read
        assert len(asked) == questions


def test_limits_that_make_no_sense_are_refused() -> None:
    wrong: Any
    for wrong in (-1.0, float("nan"), 1e10, "1d", True):
        with pytest.raises(UsageError, match=r"the age is .*; it takes 0 to 1000000000 seconds, or None"):
            SinkRetention(max_age_s=wrong)
    for wrong in (-1, 1.5, float("nan"), "1g"):
        with pytest.raises(UsageError, match=rf"the size is '?{wrong}'?; it takes a number of bytes or None"):
            SinkRetention(max_bytes=wrong)
    for name in ("keep_read", "keep_unread"):
        for wrong in (None, 0, "false"):
            with pytest.raises(UsageError, match=f"{name} is .*; it takes True or False"):
                SinkRetention(max_age_s=1, **{name: wrong})
    with pytest.raises(UsageError, match="beyond an age or a size"):
        SinkRetention(keep_unread=False)
    assert not SinkRetention().deletes
    assert SinkRetention(keep_read=False).deletes
    assert (SinkRetention(max_bytes=1).period_s, SinkRetention(max_age_s=40).period_s) == (300.0, 10.0)
    assert SinkRetention(max_age_s=0).period_s == 1.0
