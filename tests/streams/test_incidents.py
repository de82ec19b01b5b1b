"""What went wrong in other systems that are built on ledgers, done to these logs. Each test names the report."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from pybk import (
    LedgerManager,
    LedgerReader,
    Log,
    LogFencedError,
    LogRecord,
    OutOfOrderError,
    PybkError,
    StorageRefusedError,
    TruncateGuardError,
    VersionConflictError,
    WriteAheadLog,
)
from pybk.manager.ledger_manager import backend_of
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def log(manager: LedgerManager) -> Iterator[Log]:
    log = Log.open(manager, "log", insecure=True)
    yield log
    with suppress(LogFencedError):  # of writers that the test robbed
        log.close()


def texts(records: Iterator[Any] | list[LogRecord]) -> list[bytes]:
    return [record.data for record in records]


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def ledger_count(manager: LedgerManager) -> int:
    return sum(1 for _ in backend_of(manager).ledgers())


# ---- DistributedLog --------------------------------------------------------------------------------------------------


def test_bookkeeper_2898_a_reader_skips_no_segment(log: Log) -> None:
    """A log was written and closed; a reader of the next handle sometimes missed a whole segment (#3064)."""
    for first in range(0, 60, 20):
        with log.writer() as writer:
            for count, data in enumerate(numbers(20, first), 1):
                writer.append(data)
                if count % 3 == 0:
                    writer.roll()
    assert len(log.segments()) > 3
    for _ in range(20):
        assert texts(iter(log.reader())) == numbers(60)


def test_bookkeeper_1973_a_reader_that_waited_at_a_closed_segment_reads_once(log: Log) -> None:
    """The last segment was closed while the reader was paused; new segments then caused a second read."""
    with log.writer() as writer:
        writer.append(b"0")
    with log.reader() as reader:
        assert texts(reader.read_many(10, timeout=0)) == [b"0"]
        assert reader.read(timeout=0) is None
        with log.writer(segment_records=2) as writer:
            for data in numbers(20, 1):
                writer.append(data)
        found: list[LogRecord] = []
        while len(found) < 20 and (more := reader.read_many(3, timeout=WAIT_S)):
            found += more
        assert texts(found) == numbers(20, 1)
        assert reader.read(timeout=0) is None


def test_bookkeeper_2099_a_segment_without_records_does_not_spoil_transaction_ids(log: Log) -> None:
    """A writer died before its first record; the highest id was then one that no record had."""
    with log.writer() as writer:
        writer.append(b"ten", txid=10)
    for _ in range(3):
        dead = log.writer(steal=True)
        assert dead.last_txid == 10
    with log.writer(steal=True) as writer:
        assert writer.last_txid == 10
        with pytest.raises(OutOfOrderError):
            writer.append(b"nine", txid=9)
        writer.append(b"ten again", txid=10)
    assert texts(iter(log.reader())) == [b"ten", b"ten again"]


def test_bookkeeper_2185_a_reader_that_moves_on_leaves_no_ledger_open(log: Log) -> None:
    """Readers of segments that were read to their end stayed open."""
    with log.writer() as writer:
        for data in numbers(12):
            writer.append(data)
            writer.roll()

    def opened() -> int:
        gc.collect()
        return sum(isinstance(each, LedgerReader) for each in gc.get_objects())

    before = opened()
    with log.reader() as reader:
        assert texts(iter(reader)) == numbers(12)
        wait_until(lambda: opened() <= before + 1)
    del reader
    wait_until(lambda: opened() == before)


def test_bookkeeper_2273_a_ledger_without_records_is_read(log: Log) -> None:
    """A reader could not open a segment whose ledger had no entry."""
    writer = log.writer()
    with log.reader(follow=True) as reader:
        assert reader.read(timeout=0) is None
        assert (log.first(), log.last(), len(log)) == (None, None, 0)
        writer.append(b"first")
        record = reader.read(timeout=WAIT_S)
        assert record is not None
        assert record.data == b"first"
    log.writer(steal=True)  # leaves a segment without records
    assert texts(iter(log.reader())) == [b"first"]


def test_distributedlog_244_a_polling_reader_never_stops(log: Log) -> None:
    """A reader that polled while a writer wrote and rolled got nothing any more, without an error."""
    found: list[LogRecord] = []

    def write() -> None:
        with log.writer(segment_records=7) as writer:
            for data in numbers(300):
                writer.append(data)

    thread = threading.Thread(target=write)
    thread.start()
    with log.reader() as reader:
        while len(found) < 300:
            record = reader.read(timeout=0) or reader.read(timeout=WAIT_S)
            assert record is not None, f"nothing came after {len(found)} records"
            found.append(record)
    thread.join()
    assert texts(found) == numbers(300)


# ---- Pravega ---------------------------------------------------------------------------------------------------------


def answer_lost(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch, *, done: bool) -> Callable[[], int]:
    """Have the next change of a record fail as if its answer was lost; returns how often that happened."""
    backend = backend_of(manager)
    write = backend.write_record
    lost: list[str] = []

    def fail_once(name: str, value: bytes | None, version: int | None) -> int:
        if lost:
            return write(name, value, version)
        lost.append(name)
        if done:
            write(name, value, version)
        raise VersionConflictError("the record has another version", outcome_unknown=True)

    monkeypatch.setattr(backend, "write_record", fail_once)
    return lambda: len(lost)


@pytest.mark.parametrize("done", [True, False], ids=["done", "not done"])
def test_pravega_4721_an_ambiguous_compare_and_set_deletes_no_listed_ledger(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch, *, done: bool
) -> None:
    """The answer was "another version" although the change was made: the new ledger was deleted, and was listed."""
    with log.writer() as writer:
        writer.append(b"before")
        lost = answer_lost(manager, monkeypatch, done=done)
        writer.roll()
        assert lost() == 1
        writer.append(b"rolled")
    again = answer_lost(manager, monkeypatch, done=done)
    with log.writer() as writer:
        assert again() == 1
        writer.append(b"taken over")
    assert texts(iter(log.reader())) == [b"before", b"rolled", b"taken over"]
    listed = {each.ledger_id for each in log.segments()}
    assert listed == {each.ledger_id for each in backend_of(manager).ledgers()}


def test_pravega_1439_an_append_that_a_fence_overtakes_has_one_outcome(log: Log) -> None:
    """The ledger was closed under the writer: whether an append counts is what the closed ledger says."""
    first = log.writer()
    futures = [first.append_async(data) for data in numbers(200)]
    with log.writer(steal=True) as second:
        second.append(b"second")
    acked = []
    for data, future in zip(numbers(200), futures, strict=True):
        try:
            future.result()
        except LogFencedError:
            break
        acked.append(data)
    if len(acked) < len(futures):
        with pytest.raises(LogFencedError) as fenced:
            futures[-1].result()
        assert fenced.value.outcome_unknown
    found = texts(iter(log.reader()))
    assert found[-1] == b"second"
    assert found[:-1] == numbers(len(found) - 1), "in order, each once, none after the fence"
    assert len(acked) <= len(found) - 1
    assert acked == numbers(len(acked))


def test_pravega_1900_what_a_dead_writer_was_told_is_durable_is_read(log: Log) -> None:
    """An older ledger was read without recovery, so its last acknowledged entries were missing."""
    expected: list[bytes] = []
    for number in range(6):
        writer = log.writer(steal=True)
        expected.append(b"%d" % number)
        writer.append(expected[-1])  # acknowledged, and no later entry confirms it
        assert texts(iter(log.reader())) == expected
    log.writer(steal=True).close()
    assert texts(iter(log.reader())) == expected


def test_pravega_6030_a_ledger_that_is_gone_and_not_needed_stops_no_recovery(
    manager: LedgerManager, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer died after it deleted an empty ledger, and before it said so; nobody could open the log."""
    with log.writer() as writer:
        writer.append(b"kept")
    died = log.writer()  # leaves a segment without records, which it would end if it was dropped
    backend = backend_of(manager)
    empty = log.segments()[-1].ledger_id

    def refuse(descriptor: Any) -> None:
        raise StorageRefusedError("the ledger cannot be deleted now")

    with monkeypatch.context() as patch:
        patch.setattr(backend, "delete", refuse)
        log.writer(steal=True)
    manager.delete_ledger(empty)
    with log.writer(steal=True) as writer:
        writer.append(b"after")
    assert texts(iter(log.reader())) == [b"kept", b"after"]
    with suppress(LogFencedError):
        died.close()


def test_pravega_2234_recoveries_that_fail_leave_no_heap_of_empty_ledgers(manager: LedgerManager, log: Log) -> None:
    """Each recovery added an empty ledger, and failed."""
    with log.writer() as writer:
        writer.append(b"kept")
    for _ in range(19):
        log.writer(steal=True)
    owner = log.writer(steal=True)  # kept, as one that is dropped closes its log at any time
    assert len(log.segments()) == 2
    assert ledger_count(manager) == 2
    assert texts(iter(log.reader())) == [b"kept"]
    owner.close()


# ---- HerdDB and Majordodo --------------------------------------------------------------------------------------------


def test_herddb_100_after_one_append_failed_all_do_and_none_is_cut_off(log: Log) -> None:
    """After a failure the writer closed the ledger at an entry before acknowledged ones."""
    first = log.writer()
    for data in numbers(5):
        first.append(data)
    with log.writer(steal=True) as second:
        for _ in range(3):
            with pytest.raises(LogFencedError):
                first.append(b"lost")
        with pytest.raises(PybkError):
            first.close()
        second.append(b"5")
    assert texts(iter(log.reader())) == numbers(6)


def test_herddb_610_a_reader_changes_nothing(manager: LedgerManager) -> None:
    """A node that was to read wrote to the log, and fenced its writer."""
    backend = backend_of(manager)
    with (
        WriteAheadLog.open(manager, "wal", insecure=True) as wal,
        Log.open(manager, "log", insecure=True) as log,
        log.writer() as writer,
    ):
        wal.append(b"one")
        writer.append(b"one")
        before = [backend.read_record(name) for name in ("wals/wal", "logs/log")], ledger_count(manager)
        with WriteAheadLog.open(manager, "wal", mode="r", insecure=True) as reading:
            assert texts(reading.replay()) == [b"one"]
            with pytest.raises(PybkError):
                reading.append(b"two")
        with Log.open(manager, "log", mode="r", insecure=True) as other:
            assert texts(iter(other.reader())) == [b"one"]
        assert ([backend.read_record(name) for name in ("wals/wal", "logs/log")], ledger_count(manager)) == before
        assert (wal.append(b"two"), writer.append(b"two").seq) == (2, 1)


def test_herddb_754_a_log_that_nobody_changes_survives_checkpoints_and_restarts(manager: LedgerManager) -> None:
    """A table space without changes was checkpointed at the same position again and again; it could not be opened."""
    with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
        wal.append(b"one")
    for number in range(6):
        with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
            latest = wal.latest_checkpoint()
            assert (latest.lsn if latest else None) == (1 if number else None)
            assert texts(wal.replay(2)) == []
            with wal.checkpoint() as file:
                file.write(b"state")
    with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
        assert wal.append(b"two") == 2
        assert texts(wal.replay(2)) == [b"two"]


def test_majordodo_51_records_after_the_last_snapshot_are_never_dropped(manager: LedgerManager) -> None:
    """Ledgers were dropped by their age, although no snapshot covered them; nothing could be started from."""
    with WriteAheadLog.open(manager, "wal", insecure=True, segment_bytes=60) as wal:
        for data in numbers(20):
            wal.append(data)
        with wal.checkpoint() as file:
            file.write(b"state of 20")
        for data in numbers(20, 20):
            wal.append(data)
        with pytest.raises(TruncateGuardError):
            wal.truncate_before(30)
    with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
        latest = wal.latest_checkpoint()
        assert latest is not None
        assert texts(wal.replay(latest.lsn + 1)) == numbers(20, 20)
