"""Which committed ledgers retention deletes: by age, by size, and by what consumers have read."""

from __future__ import annotations

import pytest

from pybk.errors import UsageError
from pybk.flags import LedgerType
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.spark.consumers import Consumer, Selection
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.sink.sink_retention import HeldLedger, SinkRetention, beyond_limits, may_be_deleted
from tests.metadata.records import ledger

SECOND = 10**9
NOW = 1000 * SECOND


def held(*created_s: int, size: int = 10) -> list[HeldLedger]:
    """Return ledgers that are numbered from 1 on, by their creation times."""
    return [HeldLedger(at * SECOND, number, size) for number, at in enumerate(created_s, 1)]


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


def consumer(kind: str | None, *finished: int, ids: tuple[tuple[int, int], ...] | None = None) -> Consumer:
    done = tuple((each, each) for each in finished)
    return Consumer("c", Selection(kind, ids), FinishedLedgers(done=done), "run", 0)


def of_type(ledger_id: int, kind: str) -> LedgerMetadata:
    return ledger(ledger_id, ledger_type=LedgerType(kind))


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
    metadata = of_type(7, "t")
    assert may_be_deleted(metadata, retention, consumers, is_beyond=True) is beyond
    assert may_be_deleted(metadata, retention, consumers, is_beyond=False) is within


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong in (-1.0, float("nan"), 1e10):
        with pytest.raises(UsageError, match="the age is"):
            SinkRetention(max_age_s=wrong)
    with pytest.raises(UsageError, match="the size is -1"):
        SinkRetention(max_bytes=-1)
    with pytest.raises(UsageError, match="beyond an age or a size"):
        SinkRetention(keep_unread=False)
    assert not SinkRetention().deletes
    assert SinkRetention(keep_read=False).deletes
    assert (SinkRetention(max_bytes=1).period_s, SinkRetention(max_age_s=40).period_s) == (300.0, 10.0)
    assert SinkRetention(max_age_s=0).period_s == 1.0
