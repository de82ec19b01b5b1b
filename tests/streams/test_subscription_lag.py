"""The lag of subscriptions as a metric: of the process of the log's writer, whether they are consumed or not."""

from __future__ import annotations

import time

import pytest

from pybk import LedgerManager, Log, LogEnd, LogWriter, MetricKey
from pybk.streams import cursor, subscription_lag
from pybk.streams.subscription_lag import Note, noted
from tests.waiting import wait_until

PASSWORD = b"lag"
LAG = MetricKey("subscription_lag_records")
OLDEST = MetricKey("subscription_oldest_timestamp_ns")


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_lag, "NOTE_SECONDS", 0.02)
    monkeypatch.setattr(cursor, "BOUND_SECONDS", 0.02)


def append(writer: LogWriter, count: int) -> None:
    writer.append_many([b"record"] * count)


def shown(manager: LedgerManager, key: MetricKey) -> float | None:
    return manager.metrics().gauges.get(key)


def test_the_lag_of_the_slowest_subscription_is_shown_also_while_nobody_consumes_it(manager: LedgerManager) -> None:
    with Log.open(manager, "log", password=PASSWORD) as log, Log.open(manager, "other", password=PASSWORD) as other:
        writer, second = log.writer(), other.writer()
        append(writer, 10)
        log.subscribe("slow", start=LogEnd.EARLIEST).close()
        other.subscribe("fast", start=LogEnd.LATEST).close()
        wait_until(lambda: shown(manager, LAG) == 10)
        begun = time.time_ns()
        append(second, 3)
        with log.subscribe("slow") as slow:
            slow.ack(range(8))
            wait_until(lambda: shown(manager, LAG) == 3, "the subscription of the other log to be the slowest")
            slow.ack(range(8, 10))
        assert begun - 60e9 < (shown(manager, OLDEST) or 0) <= time.time_ns()
        with other.subscribe("fast") as fast:
            fast.skip_all()
        wait_until(lambda: shown(manager, LAG) == 0)
        assert shown(manager, OLDEST) is None
        writer.close()
        second.close()
        assert shown(manager, LAG) is None


def test_the_oldest_record_is_as_old_as_it_was_noted_or_its_ledger_was_closed(manager: LedgerManager) -> None:
    with Log.open(manager, "log", password=PASSWORD) as log:
        log.subscribe("slow", start=LogEnd.EARLIEST).close()
        with log.writer() as writer:
            append(writer, 5)
        (closed_ns,) = [each.closed_ns for each in log.segments() if each.last_seq == 4]
        with log.writer() as writer:
            wait_until(lambda: shown(manager, OLDEST) == closed_ns)
            append(writer, 5)
            wait_until(lambda: shown(manager, LAG) == 10)
            with log.subscribe("slow") as subscription:
                subscription.ack(range(5))
            later = wait_until(lambda: (shown(manager, LAG) == 5 and shown(manager, OLDEST)) or 0.0)
            assert later > closed_ns
            append(writer, 1)
            wait_until(lambda: shown(manager, LAG) == 6)
            assert shown(manager, OLDEST) == later, "the age is that of the oldest record"


def test_notes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_lag, "NOTES_MAX", 4)
    notes = [Note(0, 0)]
    for time_ns in range(1, 100):
        notes = noted(notes, Note(time_ns, 10 * time_ns), 5)
        assert len(notes) <= 4
        assert notes[0] == (1, 10), "the oldest record is as old as before"
    assert noted(notes, Note(100, 1000), 995) == [(100, 1000)]
    assert noted(notes, Note(100, 1000), None) == [(100, 1000)]
