"""What a log drops by age, size and acknowledgements, and what it keeps whatever they say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk import LedgerManager, Log
from pybk.errors import CorruptError, UsageError
from pybk.streams import cursor as cursor_module
from pybk.streams import ledger_list
from pybk.streams import retention as retention_module
from pybk.streams.cursor import Cursor
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Checkpoint, CursorBound, ListKind, ListRecord, Segment
from pybk.streams.list_writer import ListWriter
from pybk.streams.log_settings import RollPolicy, spec_of
from pybk.streams.retention import (
    RETENTION_PROPERTY,
    Expired,
    Held,
    Retention,
    RetentionKeeper,
    dates_of,
    first_kept,
    period_of,
    retention_of,
    rolls_idle,
    set_retention,
)
from tests.waiting import wait_until

SPEC = spec_of(ListKind.LOG, None, None, insecure=True)
SECOND = 10**9

SEGMENTS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 100), st.integers(0, 20)), max_size=8)


def record_of(
    segments: list[tuple[int, int, int]], cursors: list[int], checkpoint: int | None, first: int
) -> ListRecord:
    """Return a record with closed segments, given records, bytes and closing time of each, and an open one."""
    made, seq, at = [], 0, 0
    for number, (count, nbytes, seconds) in enumerate(segments, 1):
        at += seconds
        made.append(Segment(number, number, 1, 0, seq, seq + count - 1, nbytes, at * SECOND, at * SECOND))
        seq += count
    made.append(Segment(len(made) + 1, len(made) + 1, 1, 0, seq, created_ns=at * SECOND))
    bounds = tuple(CursorBound(f"s{number}", min(each, seq), "00") for number, each in enumerate(cursors))
    checkpoints = () if checkpoint is None else (Checkpoint(min(checkpoint, seq - 1), 0, 1000, "", 0),)
    record = ListRecord(
        "log",
        ListKind.LOG,
        bytes(16),
        0,
        0,
        seq,
        epoch=1,
        next_segment=len(made) + 1,
        segments=tuple(made),
        cursors=bounds,
        checkpoints=checkpoints,
    )
    return record.truncated(min(first, record.guard_of(bounds), seq), bounds)


def held_of(record: ListRecord) -> Held:
    """Return what a log without pages holds."""
    return Held(record, record.segments, record.cursors)


RECORDS = st.builds(
    record_of,
    SEGMENTS,
    st.lists(st.integers(0, 40), max_size=3),
    st.none() | st.integers(-1, 40),
    st.integers(0, 10),
)
RETENTIONS = st.builds(
    Retention,
    max_age=st.none() | st.integers(1, 60),
    max_bytes=st.none() | st.integers(0, 300),
    keep_acked=st.booleans(),
    force_expire=st.booleans(),
)


def bytes_of(record: ListRecord) -> int:
    return sum(each.nbytes for each in record.segments)


@given(RECORDS, RETENTIONS, st.integers(0, 300), st.integers(0, 100))
def test_what_is_dropped_may_go_and_no_more(
    record: ListRecord, retention: Retention, now: int, open_bytes: int
) -> None:
    first = first_kept(held_of(record), retention, now * SECOND, open_bytes)
    # This raises if a subscription or a checkpoint needs what would be dropped.
    after = record.truncated(first, record.cursors, force=retention.force_expire)
    assert after.open_segments == record.open_segments
    gone = [each for each in record.segments if each not in after.segments]
    assert first == max([record.first_seq, *(each.last_seq + 1 for each in gone if each.last_seq is not None)])
    assert record.segments[: len(gone)] == tuple(gone), "the oldest go first"
    needed = min((each.seq for each in record.cursors), default=0)
    left = bytes_of(record) + open_bytes
    for each in gone:
        assert each.last_seq is not None
        acked = each.last_seq < needed and not retention.keep_acked
        old = retention.max_age is not None and now - each.closed_ns // SECOND > retention.max_age
        assert acked or old or (retention.max_bytes is not None and left > retention.max_bytes)
        left -= each.nbytes
    assert first_kept(held_of(after), retention, now * SECOND, open_bytes) == after.first_seq, "nothing more may go"


@given(SEGMENTS, st.integers(0, 500))
def test_pulsar_11241_size_retention_drops_no_more_than_it_has_to(
    segments: list[tuple[int, int, int]], max_bytes: int
) -> None:
    record = record_of(segments, [], None, 0)
    after = record.truncated(first_kept(held_of(record), Retention(max_bytes=max_bytes), 0, 0), ())
    gone = record.segments[: len(record.segments) - len(after.segments)]
    assert bytes_of(after) <= max_bytes or len(after.segments) == 1
    if gone:
        assert bytes_of(after) + gone[-1].nbytes > max_bytes


@given(RECORDS, st.integers(0, 300))
def test_a_record_that_is_needed_is_not_dropped(record: ListRecord, now: int) -> None:
    retention = Retention(max_age=1, max_bytes=0)
    needed = max(record.guard_of(record.cursors), record.first_seq)
    assert first_kept(held_of(record), retention, now * SECOND, 0) <= needed
    covered = record.checkpoints[0].seq + 1 if record.checkpoints else record.end_seq
    forced = replace(retention, force_expire=True)
    assert first_kept(held_of(record), forced, now * SECOND, 0) <= max(covered, record.first_seq)


def dated(*seconds: int) -> ListRecord:
    """Return a record with a segment of 10 records closed at each of these seconds but the last, which opened one."""
    record = record_of([(10, 1, 0)] * (len(seconds) - 1), [], None, 0)
    dates = [each * SECOND for each in seconds]
    segments = [replace(each, created_ns=at, closed_ns=at) for each, at in zip(record.segments, dates, strict=True)]
    return replace(record, segments=(*segments[:-1], replace(segments[-1], closed_ns=0)))


@pytest.mark.parametrize(
    ("seconds", "first"),
    [
        ((100, 110, 120, 120), 20),
        ((10**6, 110, 120, 120), 20),
        ((10**6, 10**7, 120, 120), 0),
        ((100, 10**6, 110, 120), 30),
        ((100, 10**6, 10**6, 10**6), 10),
        ((130, 1, 2, 2), 0),
        ((100, 1, 2, 2), 30),
    ],
)
def test_a_date_that_the_others_contradict_is_not_believed(seconds: tuple[int, ...], first: int) -> None:
    assert first_kept(held_of(dated(*seconds)), Retention(max_age=20), 131 * SECOND, 0) == first


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(0, 30), st.data())
def test_dates_are_between_their_neighbours_and_not_in_the_future(
    seconds: list[int], now: int, data: st.DataObject
) -> None:
    record = dated(*seconds)
    noted = {each * SECOND: data.draw(st.integers(0, now)) * SECOND for each in seconds if each > now}
    dates = [date for _, date in dates_of(record.segments, now * SECOND, noted)]
    assert dates == sorted(dates)
    assert dates[-1] <= now * SECOND
    if seconds == sorted(seconds) and max(seconds) <= now:
        assert dates == [each * SECOND for each in seconds]


def test_an_open_segment_of_the_future_is_as_old_as_it_is_known() -> None:
    record, retention = dated(1000), Retention(max_age=20)
    assert not rolls_idle(held_of(record), retention, 131 * SECOND, 9)
    assert rolls_idle(held_of(record), retention, 131 * SECOND, 9, {1000 * SECOND: 110 * SECOND})


def test_records_go_by_age_although_the_clock_was_ahead(writer: ListWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, real, ahead_ns = RetentionKeeper(writer), time.time_ns, 10**18
    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead_ns)
    append(writer, 1)
    writer.roll()
    append(writer, 1)
    ahead_ns = 0
    set_retention(writer.steps, Retention(max_age=0.1))

    def is_dropped() -> bool:
        keeper.apply()
        return first_of(writer) == 2

    wait_until(is_dropped)
    keeper.close()


def test_a_log_without_subscriptions_keeps_what_nobody_acknowledged() -> None:
    record = record_of([(5, 10, 1), (5, 10, 1)], [], None, 0)
    assert first_kept(held_of(record), Retention(), 10**6 * SECOND, 0) == 0
    assert first_kept(held_of(record), Retention(max_age=5), 10**6 * SECOND, 0) == 10


def test_an_open_segment_is_closed_once_it_could_go() -> None:
    bound = CursorBound("sub", 7, "00")
    record = replace(record_of([(5, 10, 1)], [], None, 0), cursors=(bound,))
    assert not rolls_idle(held_of(record), Retention(max_age=5), 5 * SECOND, 6)
    assert rolls_idle(held_of(record), Retention(max_age=5), 7 * SECOND, 6)
    assert not rolls_idle(held_of(record), Retention(max_age=5), 7 * SECOND, 4), "it has no records"
    assert rolls_idle(held_of(record), Retention(idle_roll=3), 7 * SECOND, 6)
    assert not rolls_idle(held_of(record), Retention(idle_roll=3), 7 * SECOND, 7), "record 7 is not acknowledged"
    assert not rolls_idle(held_of(record), Retention(idle_roll=3, keep_acked=True), 7 * SECOND, 6)


@pytest.mark.parametrize(
    "values",
    [
        {"max_age": 0},
        {"max_age": "1"},
        {"max_age": 10**400},
        {"max_bytes": -1},
        {"max_bytes": 1.5},
        {"idle_roll": float("inf")},
        {"idle_roll": None},
        {"keep_acked": "no"},
        {"force_expire": 0},
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Retention(**values)


def test_it_is_looked_at_as_often_as_it_asks_for() -> None:
    assert period_of(None) == period_of(Retention()) == period_of(Retention(max_age=1000)) == 30
    assert period_of(Retention(max_age=20)) == 5
    assert period_of(Retention(max_age=1000, idle_roll=4)) == 1
    assert period_of(Retention(max_age=0.001)) == 0.25


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with LedgerManager.open(tmp_path / "store") as manager:
        yield manager


@pytest.fixture
def writer(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[ListWriter]:
    monkeypatch.setattr(retention_module, "KEEPER_SECONDS", 0.05)
    monkeypatch.setattr(cursor_module, "BOUND_SECONDS", 0.05)
    writer = ListWriter(manager, "log", SPEC, RollPolicy())
    writer.steps.perform(ledger_list.create("log", ListKind.LOG, bytes(16), 0))
    writer.take_over(wait_s=0, steal=False)
    yield writer
    writer.close()


def append(writer: ListWriter, count: int) -> None:
    for _ in range(count):
        writer.append(bytes(1000), None, kick=False).result()


def first_of(writer: ListWriter) -> int:
    return writer.steps.existing().record.first_seq


def test_a_short_age_is_applied_soon_without_traffic(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "KEEPER_SECONDS", 3600.0)
    with Log.open(manager, "log", insecure=True) as log, log.writer() as writer:
        writer.append(b"a")
        log.set_retention(Retention(max_age=0.01))
        wait_until(lambda: log.first_seq() == 1)


def test_it_is_kept_with_the_log(writer: ListWriter) -> None:
    assert retention_of(writer.steps.existing().record) is None
    wanted = Retention(max_age=5.5, max_bytes=10**9, keep_acked=True)
    set_retention(writer.steps, wanted)
    assert retention_of(writer.steps.existing().record) == wanted
    set_retention(writer.steps, None)
    record = writer.steps.existing().record
    assert retention_of(record) is None
    with pytest.raises(CorruptError):
        retention_of(replace(record, properties={RETENTION_PROPERTY: '{"max_age": -1}'}))


def test_pulsar_6935_records_go_by_age_without_traffic(writer: ListWriter) -> None:
    append(writer, 3)
    set_retention(writer.steps, Retention(max_age=0.2))
    keeper = RetentionKeeper(writer)
    wait_until(lambda: first_of(writer) == 3)
    assert len(writer.steps.existing().record.segments) == 1
    keeper.close()


def test_pulsar_9057_acknowledged_records_go_without_traffic(manager: LedgerManager, writer: ListWriter) -> None:
    keeper = RetentionKeeper(writer)
    set_retention(writer.steps, Retention(idle_roll=0.1))
    append(writer, 10)
    cursor = Cursor.open(manager, LedgerSteps(manager, "log", SPEC), "sub", lambda: 0)
    writer.roll()
    append(writer, 5)
    cursor.ack([(0, 10), (11, 15)], {}, kick=False).result()
    wait_until(lambda: first_of(writer) == 10)
    assert keeper.apply() == Expired(10, 0, 0, {}), "record 10 is not acknowledged"
    cursor.ack([(10, 11)], {}, kick=False).result()
    wait_until(lambda: first_of(writer) == 15)
    cursor.close()
    keeper.close()


def test_pulsar_15332_a_log_at_rest_shrinks_to_its_limit(writer: ListWriter) -> None:
    for _ in range(10):
        append(writer, 10)
        writer.roll()
    set_retention(writer.steps, Retention(max_bytes=35_000))
    keeper = RetentionKeeper(writer)
    wait_until(lambda: first_of(writer) == 70)
    keeper.close()


def test_what_is_not_acknowledged_goes_by_force_alone(manager: LedgerManager, writer: ListWriter) -> None:
    append(writer, 10)
    writer.roll()
    cursor = Cursor.open(manager, LedgerSteps(manager, "log", SPEC), "sub", lambda: 2)
    set_retention(writer.steps, Retention(max_bytes=1))
    keeper = RetentionKeeper(writer)
    assert keeper.apply() == Expired(0, 0, 0, {})
    set_retention(writer.steps, Retention(max_bytes=1, force_expire=True))
    keeper.soon()
    wait_until(lambda: first_of(writer) == 10)
    assert cursor.expire() == 8
    cursor.close()
    keeper.close()
