"""Ledgers that nothing names are swept, and a log whose record is lost is made again from its ledgers."""

from __future__ import annotations

import asyncio

import pytest

from pybk import LedgerManager, WriteAheadLog
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    LogFencedError,
    NoSuchLogError,
    RewoundError,
    UnauthorizedError,
    UsageError,
)
from pybk.manager.ledger_manager import backend_of
from pybk.streams.list_record import ListKind, new_list
from tests.streams.test_wal import PASSWORD, data_of, opened, opened_reader

RECORD = "wals/wal"


def lose_record(manager: LedgerManager) -> None:
    found = backend_of(manager).read_record(RECORD)
    assert found is not None
    backend_of(manager).write_record(RECORD, None, found.version)


def make_anew(manager: LedgerManager) -> None:
    """Make a log as an open does in a cluster, which does not look for ledgers of one whose record was lost."""
    backend_of(manager).write_record(RECORD, new_list("wal", ListKind.WAL, bytes(16), 1).encode(), None)


def rolled_log(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        for number in range(1, 10):
            wal.append(b"%d" % number)
            if number % 3 == 0:
                wal.roll()


def test_what_a_dead_process_left_is_swept_and_nothing_else(manager: LedgerManager) -> None:
    first = opened(manager)
    first.append(b"a")
    with first.checkpoint() as file:
        file.write(b"state")
    first.checkpoint()
    with opened(manager, steal=True) as wal:
        wal.append(b"b")
        writing = wal.checkpoint()
        writing.write(b"more")
        ledgers = set(manager.list_ledgers())
        segment = manager.ledger_metadata(wal.ledgers()[0]).custom_metadata
        blob = manager.ledger_metadata(max(ledgers)).custom_metadata
        early = {"pybk.blob": blob["pybk.blob"].replace(b'"epoch":2', b'"epoch":1')}
        assert early != blob
        orphan, late, dead, stranger = (
            manager.create_ledger(password=PASSWORD, ledger_type="wal", custom_metadata=custom).ledger_id
            for custom in (segment, blob, early, None)
        )
        assert sorted(WriteAheadLog.sweep(manager, password=PASSWORD)) == sorted([orphan, dead])
        assert set(manager.list_ledgers()) == ledgers | {stranger, late}
        assert asyncio.run(WriteAheadLog.sweep_async(manager, password=PASSWORD)) == []
        writing.commit()
        assert data_of(wal) == [b"b"]
    with pytest.raises(LogFencedError):
        first.close()


def test_a_lost_record_is_made_again(manager: LedgerManager) -> None:
    rolled_log(manager)
    with opened(manager) as wal:
        with wal.checkpoint(5, truncate=False) as file:
            file.write(b"state of 5")
        epoch = wal.epoch()
    lose_record(manager)
    assert WriteAheadLog.sweep(manager, password=PASSWORD) == []
    with pytest.raises(UnauthorizedError):
        WriteAheadLog.rebuild(manager, "wal", password=b"another")
    found = WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
    assert (found.first_seq, found.last_seq, len(found.ledgers), found.checkpoints) == (1, 9, 3, (5,))
    with pytest.raises(IllegalOperationError, match="sound"):
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
    with opened(manager) as wal:
        assert wal.epoch() > epoch
        assert data_of(wal) == [b"%d" % number for number in range(1, 10)]
        latest = wal.latest_checkpoint()
        assert latest is not None
        with latest.open() as file:
            assert (latest.lsn, file.read()) == (5, b"state of 5")
        assert wal.append(b"10") == 10
        with pytest.raises(RewoundError):
            next(wal.follow(5, generation=0))


def test_a_living_writer_is_fenced_and_what_it_appended_is_there(manager: LedgerManager) -> None:
    writer = opened(manager)
    assert writer.append_many([b"a", b"b"]) == range(1, 3)
    lose_record(manager)
    assert WriteAheadLog.rebuild(manager, "wal", password=PASSWORD).last_seq == 2
    with pytest.raises(LogFencedError):
        writer.append(b"c")
    with pytest.raises(LogFencedError):
        writer.close()
    with opened(manager) as wal:
        assert data_of(wal) == [b"a", b"b"]


def test_a_log_without_records_that_was_opened_after_its_record_was_lost_is_replaced_by_it(
    manager: LedgerManager,
) -> None:
    rolled_log(manager)
    lose_record(manager)
    make_anew(manager)
    before = set(manager.list_ledgers())
    empty = opened(manager)
    assert data_of(empty) == []
    assert WriteAheadLog.rebuild(manager, "wal", password=PASSWORD).last_seq == 9
    for call in (lambda: empty.append(b"x"), empty.close):
        with pytest.raises((LogFencedError, NoSuchLogError)):  # the latter once the change was reported
            call()
    assert set(manager.list_ledgers()) == before
    with opened(manager) as wal:
        assert data_of(wal) == [b"%d" % number for number in range(1, 10)]
    with pytest.raises(IllegalOperationError, match="sound"):
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)


def test_a_log_with_a_record_that_was_opened_after_its_record_was_lost_is_left_alone(manager: LedgerManager) -> None:
    rolled_log(manager)
    lose_record(manager)
    make_anew(manager)
    with opened(manager) as wal:
        wal.append(b"a")
        with pytest.raises(IllegalOperationError, match="sound"):
            WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
        wal.append(b"b")
        assert data_of(wal) == [b"a", b"b"]
    with pytest.raises(IllegalOperationError, match="sound"):
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
    with opened(manager) as wal:
        wal.truncate_before(3)
    with pytest.raises(IllegalOperationError, match="sound"):
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)


def test_a_log_without_records_that_was_closed_and_opened_again_is_replaced_by_the_lost_one(
    manager: LedgerManager,
) -> None:
    rolled_log(manager)
    lose_record(manager)
    make_anew(manager)
    for _ in range(2):
        opened(manager).close()
    assert WriteAheadLog.rebuild(manager, "wal", password=PASSWORD).last_seq == 9


def test_what_a_cut_dropped_stays_dropped(manager: LedgerManager) -> None:
    rolled_log(manager)
    with opened(manager) as wal:
        void = wal.checkpoint(9, truncate=False)
        wal.truncate_after(4)
        wal.append_many([b"new 5", b"new 6"])
        void.abort()
    lose_record(manager)
    found = WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
    assert (found.first_seq, found.last_seq) == (1, 6)
    with opened_reader(manager) as reader:
        assert data_of(reader) == [b"1", b"2", b"3", b"4", b"new 5", b"new 6"]


def test_missing_records_are_given_up_on_demand_alone(manager: LedgerManager) -> None:
    rolled_log(manager)
    with opened_reader(manager) as reader:
        middle = reader.ledgers()[1]
    lose_record(manager)
    manager.delete_ledger(middle, password=PASSWORD)
    with pytest.raises(CorruptError, match="records 4 to 6"):
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
    found = WriteAheadLog.rebuild(manager, "wal", password=PASSWORD, first_lsn=7)
    assert (found.first_seq, found.last_seq, len(found.left_out)) == (7, 9, 1)
    with opened(manager) as wal:
        assert data_of(wal) == [b"7", b"8", b"9"]


def test_a_log_without_records_needs_a_number(manager: LedgerManager) -> None:
    with pytest.raises(NoSuchLogError):
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
    with opened(manager) as wal:
        lose_record(manager)
        with pytest.raises(CorruptError, match="which number comes next"):
            WriteAheadLog.rebuild(manager, "wal", password=PASSWORD)
        with pytest.raises(UsageError):
            WriteAheadLog.rebuild(manager, "wal", password=PASSWORD, first_lsn=-1)
        WriteAheadLog.rebuild(manager, "wal", password=PASSWORD, first_lsn=100)
        with pytest.raises(LogFencedError):
            wal.close()
    with opened(manager) as wal:
        assert wal.append(b"a") == 100


def test_a_damaged_record_is_replaced(manager: LedgerManager) -> None:
    rolled_log(manager)
    found = backend_of(manager).read_record(RECORD)
    assert found is not None
    backend_of(manager).write_record(RECORD, b"{}", found.version)
    with pytest.raises(CorruptError):
        opened(manager)
    rebuilt = asyncio.run(WriteAheadLog.rebuild_async(manager, "wal", password=PASSWORD))
    assert rebuilt.last_seq == 9
    with opened(manager) as wal:
        assert len(wal) == 9
