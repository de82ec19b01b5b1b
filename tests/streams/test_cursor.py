"""Cursors of subscriptions: acknowledged, sought, taken over and replayed; the log keeps what they need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from pybk import LedgerManager
from pybk.credentials import Credentials
from pybk.errors import ClosedError, CorruptError, LogFencedError, LogLockedError, TruncateGuardError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.storage import directories
from pybk.streams import cursor as cursor_module
from pybk.streams import ledger_list
from pybk.streams.appender import PlainBatch, RecordFuture
from pybk.streams.cursor import Cursor, checked_subscription, delete_cursor
from pybk.streams.cursor_state import CursorState, PartAt, StatePart
from pybk.streams.deliveries import Handed
from pybk.streams.ledger_steps import LedgerSteps, names_of
from pybk.streams.list_record import SEQ_MAX, CursorBound, ListKind, cursor_list_name
from pybk.streams.list_writer import ListWriter
from pybk.streams.log_settings import LedgerSpec, RollPolicy, spec_of
from pybk.streams.record_reader import RecordReader
from tests.internals import store_of
from tests.waiting import wait_until

SPEC = spec_of(ListKind.LOG, b"cursor", None, insecure=False)


@pytest.fixture
def log(manager: LedgerManager) -> Iterator[ListWriter]:
    """A log of records 0 to 99, in ten segments."""
    writer = log_of(manager)
    yield writer
    writer.close()


def log_of(manager: LedgerManager) -> ListWriter:
    writer = ListWriter(manager, "log", SPEC, RollPolicy())
    writer.steps.perform(ledger_list.create("log", ListKind.LOG, bytes(16), 0))
    writer.take_over(wait_s=0, steal=False)
    for number in range(100):
        writer.append(b"%d" % number, None, kick=False).result()
        if number % 10 == 9:
            writer.roll()
    return writer


def opened(manager: LedgerManager, log: ListWriter, start: int = 0, **options: bool) -> Cursor:
    return Cursor.open(manager, LedgerSteps(manager, "log", SPEC), "sub", lambda: start, **options)


def truncate(log: ListWriter, seq: int, *, force: bool = False) -> None:
    appender = log.appender
    log.steps.perform(ledger_list.truncate("log", appender.epoch, appender.generation, seq, force=force))


def bound_of(log: ListWriter) -> int:
    bound = log.steps.bound("sub")
    assert bound is not None
    return bound.seq


def shown(state: CursorState) -> object:
    return state.first_unacked, state.acked_ranges, state.properties


def test_what_was_acknowledged_is_there_after_an_open(manager: LedgerManager, log: ListWriter) -> None:
    cursor = opened(manager, log, 5)
    assert cursor.state.first_unacked == 5
    assert cursor.ack([(5, 8), (20, 30)], {"offset": 1}, kick=False).result() == 13
    assert cursor.ack([(7, 9)], {"name": "x"}, kick=True).result() == 1
    assert cursor.ack([(7, 9)], {}, kick=True).result() == 0
    for _ in range(2):
        cursor.close()
        cursor = opened(manager, log, 99)
        assert shown(cursor.state) == (9, [(20, 30)], {"offset": 1, "name": "x"})
    assert cursor.seek(50) == 50
    assert cursor.ack([(52, 53)], {}, kick=False).result() == 1
    cursor.close()
    cursor.close()
    again = opened(manager, log)
    assert shown(again.state) == (50, [(52, 53)], {"offset": 1, "name": "x"})
    again.close()


def test_the_log_keeps_what_is_not_acknowledged(manager: LedgerManager, log: ListWriter) -> None:
    cursor = opened(manager, log)
    cursor.ack([(0, 30), (40, 100)], {}, kick=False).result()
    with pytest.raises(TruncateGuardError, match="'sub' may need those from 0 on"):
        truncate(log, 1)
    cursor.raise_bound()
    assert bound_of(log) == 30
    truncate(log, 30)
    with pytest.raises(TruncateGuardError, match="from 30 on"):
        truncate(log, 31)
    assert cursor.seek(10) == 30, "records before 30 are gone"
    assert shown(cursor.state) == (30, [], {})
    cursor.seek(60)
    cursor.raise_bound()
    assert cursor.seek(45) == 45
    assert bound_of(log) == 45, "the bound is lowered with the cursor"
    truncate(log, 45)
    truncate(log, 80, force=True)
    assert bound_of(log) == 80
    assert cursor.expire() == 35
    assert cursor.expire() == 0
    assert cursor.state.first_unacked == 80
    cursor.delete()
    truncate(log, 100)
    assert manager_lists(manager) == []


def manager_lists(manager: LedgerManager) -> list[str]:
    return names_of(manager, ListKind.CURSOR)


def test_the_bound_follows_without_traffic(
    manager: LedgerManager, log: ListWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursor_module, "BOUND_SECONDS", 0.05)
    cursor = opened(manager, log)
    for end in (10, 30, 70):
        cursor.ack([(0, end)], {}, kick=False).result()
        wait_until(lambda end=end: bound_of(log) == end)  # type: ignore[misc]
    cursor.close()


def test_the_bound_does_not_pass_what_is_durable_if_an_acknowledgement_was_refused(
    manager: LedgerManager, log: ListWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = opened(manager, log)
    durable = cursor.ack([(0, 1)], {}, kick=False)
    durable.result()
    with monkeypatch.context() as patch:
        patch.setattr(ListWriter, "append_unless_broken", lambda *_, **__: durable)  # nothing reaches the disk
        assert cursor.ack([(1, 10)], {}, kick=False).done()
    assert cursor.state.first_unacked == 10
    cursor.raise_bound()
    again = opened(manager, log, steal=True)
    assert bound_of(log) <= again.state.first_unacked
    again.close()
    with pytest.raises(LogFencedError):
        cursor.close()


def test_a_cursor_has_one_owner(manager: LedgerManager, log: ListWriter) -> None:
    first = opened(manager, log)
    first.ack([(0, 20)], {}, kick=False).result()
    with pytest.raises(LogLockedError):
        opened(manager, log)
    with pytest.raises(LogLockedError):
        delete_cursor(manager, log.steps, "sub")
    second = opened(manager, log, steal=True)
    assert second.state.first_unacked == 20
    assert second.seek(5) == 5
    with pytest.raises(LogFencedError):
        first.raise_bound()
    assert bound_of(log) == 0, "an owner that was fenced cannot raise the bound"
    with pytest.raises(LogFencedError):
        first.ack([(20, 21)], {}, kick=False).result()
    with pytest.raises(LogFencedError):
        first.close()
    second.close()
    assert delete_cursor(manager, log.steps, "sub")
    assert not delete_cursor(manager, log.steps, "sub")


def test_a_subscription_that_is_made_again_begins_anew(manager: LedgerManager, log: ListWriter) -> None:
    cursor = opened(manager, log)
    cursor.ack([(0, 20)], {"a": 1}, kick=False).result()
    record = log.steps.existing().record
    bound = log.steps.bound_in(record, "sub")
    assert bound is not None
    # The process that deletes it stops before it has deleted the cursor.
    log.steps.perform(ledger_list.remove_cursor("log", "sub", bound.uid))
    with pytest.raises(LogFencedError, match="deleted"):
        cursor.close()
    again = opened(manager, log, 7)
    assert shown(again.state) == (7, [], {})
    again.close()


def test_a_subscription_whose_making_was_interrupted_is_made(manager: LedgerManager, log: ListWriter) -> None:
    log.steps.perform(ledger_list.add_cursor("log", CursorBound("sub", 33, "00" * 16)))
    cursor = opened(manager, log, 99)
    assert cursor.state.first_unacked == 33
    cursor.close()


def test_pulsar_16859_a_cursor_that_rolls_frees_its_ledgers(
    manager: LedgerManager, log: ListWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursor_module, "CURSOR_SEGMENT_BYTES", 2000)
    monkeypatch.setattr(cursor_module, "CHANGES_BYTES", 500)
    cursor, model, random = opened(manager, log), CursorState(), Random(1)
    steps = LedgerSteps(
        manager, cursor_list_name("log", "sub"), LedgerSpec(ledger_type=ListKind.CURSOR, given=Credentials(b"cursor"))
    )
    for number in itertools.count():
        if number >= 600 and steps.existing().record.next_segment > 5:  # it rolls in the background
            break
        first = random.randrange(0, 2000)
        if number % 97 == 0:
            cursor.seek(first // 100)
            model.seek(first // 100)
        cursor.ack([(first, first + 3)], {"n": number}, kick=False).result()
        model.ack(first, first + 3)
        model.properties["n"] = number
    wait_until(lambda: len(steps.existing().record.segments) <= 3)
    cursor.close()
    again = opened(manager, log)
    assert shown(again.state) == shown(model)
    assert len(steps.existing().record.segments) <= 3
    again.close()


def test_pulsar_25985_a_state_longer_than_an_entry_comes_back(manager: LedgerManager, log: ListWriter) -> None:
    cursor, ranges = opened(manager, log), 100_000
    for first in range(1, 2 * ranges, 20_000):
        cursor.ack([(seq, seq + 1) for seq in range(first, first + 20_000, 2)], {}, kick=False).result()
    assert cursor.state.range_count == ranges
    for _ in range(2):
        before = shown(cursor.state)
        cursor.close()
        cursor = opened(manager, log)
        assert shown(cursor.state) == before
    cursor.close()


def test_a_state_longer_than_a_segment_is_not_written_with_each_acknowledgement(
    manager: LedgerManager, log: ListWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    part_of = CursorState.part

    def counted(state: CursorState, at: PartAt | None, most: int) -> StatePart:
        part = part_of(state, at, most)
        written.append(sum(map(len, part.records)))
        return part

    monkeypatch.setattr(cursor_module, "CURSOR_SEGMENT_BYTES", 4000)
    monkeypatch.setattr(CursorState, "part", counted)
    cursor = opened(manager, log)
    cursor.ack([(seq, seq + 1) for seq in range(1, 2000, 2)], {}, kick=False).result()
    seqs = iter(range(2001, 1 << 40, 2))

    def is_renewed() -> bool:
        seq = next(seqs)
        cursor.ack([(seq, seq + 1)], {}, kick=False).result()
        return len(written) > 1

    wait_until(is_renewed, "a whole state")
    before = len(written)
    for _ in range(400):
        is_renewed()
    assert sum(written[before:]) <= 2 * 400 * 40 + 2000 * 16
    before_close = shown(cursor.state)
    cursor.close()
    again = opened(manager, log)
    assert shown(again.state) == before_close
    again.close()


def test_no_append_of_a_long_state_is_long(
    manager: LedgerManager, log: ListWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = opened(manager, log)
    cursor.ack([(seq, seq + 1) for seq in range(1, 20_000, 2)], {}, kick=False).result()
    monkeypatch.setattr(cursor_module, "CHANGES_BYTES", 2000)
    monkeypatch.setattr(cursor_module, "CHANGES_FACTOR", 0)
    sizes: list[int] = []
    append = ListWriter.append_unless_broken

    def counted(writer: ListWriter, batch: PlainBatch, *, kick: bool, wait: bool = True) -> RecordFuture[range] | None:
        sizes.append(sum(map(len, batch.payloads)))
        return append(writer, batch, kick=kick, wait=wait)

    monkeypatch.setattr(ListWriter, "append_unless_broken", counted)
    steps = LedgerSteps(
        manager, cursor_list_name("log", "sub"), LedgerSpec(ledger_type=ListKind.CURSOR, given=Credentials(b"cursor"))
    )
    seqs = iter(range(20_001, 1 << 40, 2))

    def is_truncated() -> bool:
        seq = next(seqs)
        cursor.ack([(seq, seq + 1)], {}, kick=False).result()
        return steps.existing().record.first_seq > first

    first = steps.existing().record.first_seq
    wait_until(is_truncated, "the list to begin with a later state")
    sizes.sort()
    assert sum(sizes) > 16 * 10_000, "no whole state was written"
    assert sizes[-1] <= 8 << 10, "an acknowledgement or a part is long"
    before = shown(cursor.state)
    cursor.close()
    again = opened(manager, log)
    assert shown(again.state) == before
    again.close()


def test_deliveries_of_an_owner_that_did_not_close_count_as_far_as_its_lease(
    manager: LedgerManager, log: ListWriter
) -> None:
    first = opened(manager, log, counts=True)
    assert first.leased_end == 0
    first.lease(40)
    assert first.leased_end == 40
    first.ack([(0, 5)], {}, kick=False).result()
    first.hand_again([Handed(7, 9, 1, 1)])
    second = opened(manager, log, counts=True, steal=True)
    assert [second.state.deliveries(seq) for seq in (5, 7, 8, 39, 40)] == [1, 2, 2, 1, 0]
    second.lease(1000)
    second.settle(lambda: 50)
    assert second.leased_end == 0
    with pytest.raises(ClosedError):
        second.lease(60)
    second.close()
    third = opened(manager, log)
    assert [third.state.deliveries(seq) for seq in (7, 39, 49, 50)] == [2, 1, 1, 0], "a close says what was handed out"
    third.seek(6)
    third.close()
    fourth = opened(manager, log, counts=True)
    assert fourth.state.deliveries(7) == 0
    fourth.lease(1 << 40)
    fifth = opened(manager, log, counts=True, steal=True)
    assert fifth.state.handed_end == 100, "no more count than there are"
    fifth.close()


def test_below_its_level_nothing_new_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "NEWEST_STORE_LEVEL", FeatureLevel.SEALS)
    with LedgerManager.open(tmp_path / "store") as manager:
        log = log_of(manager)
        cursor = opened(manager, log, counts=True)
        assert (cursor.counts, cursor.leased_end) == (False, SEQ_MAX)
        cursor.ack([(seq, seq + 1) for seq in range(1, 5000, 2)], {}, kick=False).result()
        cursor.close()
        cursor = opened(manager, log, counts=True)
        name = cursor_list_name("log", "sub")
        reader = RecordReader(
            LedgerSteps(manager, name, LedgerSpec(ledger_type=ListKind.CURSOR, given=Credentials(b"cursor"))), None
        )
        while (records := reader.read()) is not None:
            assert {data[0] for data in records.data()} == {1}
        reader.close()
        cursor.close()
        store_of(manager).raise_level()
        cursor = opened(manager, log, counts=True)
        assert cursor.counts
        assert cursor.state.range_count == 2500
        cursor.close()
        log.close()


def test_a_damaged_cursor_is_refused_and_can_be_made_again(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager:
        log = log_of(manager)
        cursor = opened(manager, log)
        cursor.ack([(0, 5)], {}, kick=False).result()
        cursor.close()
        name = cursor_list_name("log", "sub")
        spec = LedgerSpec(ledger_type=ListKind.CURSOR, given=Credentials(b"cursor"))
        writer = ListWriter(manager, name, spec, RollPolicy())
        writer.take_over(wait_s=0, steal=False)
        writer.append(bytes([1]) * 40, None, kick=False).result()
        writer.close()
        with pytest.raises(CorruptError, match="subscribe again with start=5"):
            opened(manager, log)
        assert delete_cursor(manager, log.steps, "sub")
        again = opened(manager, log, 5)
        assert shown(again.state) == (5, [], {})
        again.close()
        log.close()


def test_names_that_cannot_be_are_refused() -> None:
    assert checked_subscription("eu/orders") == "eu/orders"
    for name in ("", "a@b", None, ".x"):
        with pytest.raises(UsageError):
            checked_subscription(name)
