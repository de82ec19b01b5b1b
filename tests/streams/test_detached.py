"""Detached segments: written by tasks without the log's lock, adopted by one commit, and read as all others."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk import (
    ClosedError,
    CorruptError,
    DetachedSegment,
    FeatureLevel,
    IllegalOperationError,
    LedgerManager,
    Log,
    LogEnd,
    LogFencedError,
    LogLockedError,
    LogSealedError,
    NewRecord,
    NoSuchLedgerError,
    Passwords,
    Retention,
    StorageRefusedError,
    TxId,
    UnauthorizedError,
    UsageError,
    back_up,
    restore_backup,
)
from pybk.admin.cli import main
from pybk.credentials import Credentials
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metadata.pointers import pointer_key
from pybk.streams.detached_writer import DetachedLedger, append_buffered
from pybk.streams.format import Records
from pybk.streams.list_record import ListKind, Producer, new_list
from pybk.streams.sweep import give_up_commits
from tests.internals import backend_of, cut_log, leave, metadata_store_of
from tests.streams.test_list_pages import at_level
from tests.streams.test_log import PASSWORD, data_of, opened
from tests.streams.test_log_rebuild import lose_record
from tests.waiting import WAIT_S

PAGE = 4
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def at(hour: float) -> int:
    return int((DAY + timedelta(hours=hour)).timestamp()) * 10**9


def numbered(first: int, count: int) -> list[NewRecord]:
    return [
        NewRecord(b"%d" % number, txid=number * 10, key=b"k", headers=[("h", b"v")], time_ns=at(number))
        for number in range(first, first + count)
    ]


def written(log: Log, epoch: int, *tasks: Sequence[NewRecord], query: str = "query") -> list[DetachedSegment]:
    """Have tasks write a commit, each its records in batches of two."""
    sealed = []
    for partition, records in enumerate(tasks):
        with log.detached_segment(query=query, epoch=epoch, partition=partition) as writer:
            for low in range(0, len(records), 2):
                writer.append_many(records[low : low + 2])
            sealed.append(writer.seal())
    return sealed


def commit(log: Log, epoch: int, *tasks: Sequence[NewRecord], query: str = "query") -> None:
    assert log.adopt(written(log, epoch, *tasks, query=query), query=query, epoch=epoch).is_new


def test_two_tasks_write_and_a_subscription_consumes_each_record_once(manager: LedgerManager) -> None:
    with opened(manager) as log, log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        segments = written(log, 0, numbered(0, 5), numbered(5, 4))
        assert data_of(log) == [], "nothing is there before the commit"
        first = log.adopt(segments, query="query", epoch=0)
        assert (first.is_new, first.last_epoch, first.last_seq) == (True, 0, 8)
        again = log.adopt(segments, query="query", epoch=0)
        assert (again.is_new, again.last_epoch, again.last_seq) == (False, 0, 8)
        with log.writer() as writer:
            assert (writer.last_seq, writer.last_txid) == (8, 80)
            assert writer.append(b"9", txid=90, time_ns=at(9)).seq == 9
            assert not log.adopt(segments, query="query", epoch=0).is_new, "although it has a live writer"
        commit(log, 1, numbered(10, 3), numbered(13, 7))
        read = [record for _ in range(20) if (record := subscription.read(0)) is not None]
        assert [record.data for record in read] == [b"%d" % number for number in range(20)]
        assert [record.seq for record in read] == list(range(20))
        subscription.ack_through(19)
        assert subscription.read(0) is None
        assert [record.txid for record in read] == [number * 10 for number in range(20)]
        assert {record.key for record in read if record.seq != 9} == {b"k"}


def test_reading_begins_at_every_place(manager: LedgerManager) -> None:
    with opened(manager) as log:
        for first in range(0, 40, 10):
            with log.writer() as writer:
                writer.append_many(numbered(first, 3))
            commit(log, first, numbered(first + 3, 4), numbered(first + 7, 3))
        every = list(log.reader())
        assert [each.data for each in every] == [b"%d" % number for number in range(40)]
        for seq in range(40):
            position = every[seq].position
            assert log.read(position) == log.read(seq) == every[seq]
            assert log.position_for(TxId(seq * 10)) == position
            assert log.position_for(TxId(seq * 10 - 9)) == position
            assert log.position_for(DAY + timedelta(hours=seq)) == position
            assert log.position_for(DAY + timedelta(hours=seq - 0.5)) == position
        assert log.position_for(TxId(391)) is None
        assert log.last() == every[-1]
        assert len(log) == 40


def test_a_waiting_reader_gets_what_is_adopted(manager: LedgerManager) -> None:
    with opened(manager) as log, log.reader(follow=True) as reader, ThreadPoolExecutor() as pool:
        for epoch in range(3):
            waiting = pool.submit(reader.read, WAIT_S)
            commit(log, epoch, numbered(epoch, 1))
            record = waiting.result(WAIT_S)
            assert record is not None
            assert (record.seq, record.data) == (epoch, b"%d" % epoch)
        assert reader.lag() == 0


def test_a_commit_recovers_a_writer_that_died_and_refuses_a_live_one(manager: LedgerManager) -> None:
    with opened(manager) as log:
        writer = log.writer()
        writer.append_many(numbered(0, 3))
        segments = written(log, 0, numbered(3, 2))
        holder = log.locked_by()
        assert holder is not None
        assert f"process {os.getpid()}" in holder
        with pytest.raises(LogLockedError, match=f"live writer .*process {os.getpid()}"):
            log.adopt(segments, query="query", epoch=0)
        assert data_of(log) == [b"0", b"1", b"2"], "nothing was done"
        leave(writer)
        assert log.locked_by() is None
        assert log.adopt(segments, query="query", epoch=0).last_seq == 4
        with pytest.raises(LogFencedError):
            writer.append(b"late")
        with pytest.raises(LogFencedError):
            writer.close()
        assert data_of(log) == [b"0", b"1", b"2", b"3", b"4"]
        with log.writer() as writer:
            assert writer.append(b"5").seq == 5


def test_truncation_cuts_and_retention_take_adopted_segments_as_all_others(manager: LedgerManager) -> None:
    with opened(manager) as log:
        for epoch in range(4):
            commit(log, epoch, numbered(6 * epoch, 3), numbered(6 * epoch + 3, 3))
        ledgers = [each.ledger_id for each in log.segments()]
        assert log.truncate(7) == 7
        assert data_of(log) == [b"%d" % number for number in range(7, 24)]
        with log.reader(strict=True) as reader:
            assert [record.txid for record in reader] == [number * 10 for number in range(7, 24)]
        assert log.position_for(TxId(0)) == log.position_for(7), "the search begins with what is kept"
        assert log.position_for(TxId(75)) == log.position_for(8)
        with pytest.raises(NoSuchLedgerError):
            manager.ledger_metadata(ledgers[1])
        with log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
            subscription.ack_through(12)
        log.set_retention(Retention(max_bytes=1))
        commit(log, 4, numbered(24, 1))
        assert log.first_seq() == 12, "retention keeps what the subscription needs"
        log.delete_subscription("sub")
        commit(log, 5, numbered(25, 1))
        assert log.first_seq() == 26
        assert log.last_epoch("query") == 5


def test_a_log_that_was_cut_inside_an_adopted_segment_continues_there(manager: LedgerManager) -> None:
    with opened(manager) as log:
        commit(log, 0, numbered(0, 4), numbered(4, 4))
        owner = cut_log(log, 5)
        owner.append(b"new", txid=75, time_ns=at(6))
        owner.close()
        assert data_of(log) == [b"0", b"1", b"2", b"3", b"4", b"5", b"new"]
        assert log.position_for(TxId(72)) == log.position_for(6)
        commit(log, 1, numbered(7, 1))
        assert data_of(log, 6) == [b"new", b"7"]
        assert log.adopt([], query="query", epoch=0).is_new is False, "a cut undoes no commit"


def test_a_search_does_not_begin_with_what_a_cut_dropped(manager: LedgerManager) -> None:
    with opened(manager) as log:
        with log.writer() as writer:
            for hour in (0, 1, 100):
                writer.append(b"%d" % hour, time_ns=at(hour))
        owner = cut_log(log, 0)
        owner.append(b"50", time_ns=at(50))
        owner.close()
        assert log.position_for(DAY + timedelta(hours=40)) == log.position_for(1)


def test_many_segments_of_one_commit_move_to_pages(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.streams.ledger_steps.PAGE_SEGMENTS", PAGE)
    count = 3 * PAGE + 2
    with opened(manager) as log, log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        commit(log, 0, *(numbered(number, 1) for number in range(count)))
        assert len(log.segments()) == count
        assert data_of(log) == [b"%d" % number for number in range(count)]
        assert [record.seq for record in subscription.read_many(count)] == [0]
        for number in (0, 1, PAGE, count - 1):
            assert log.read(number).txid == number * 10
            assert log.position_for(TxId(number * 10 - 5)) == log.position_for(number)
        assert log.truncate(PAGE + 3, force=True) == PAGE + 3
        assert data_of(log) == [b"%d" % number for number in range(PAGE + 3, count)]


def test_what_is_not_a_commit_is_refused(manager: LedgerManager) -> None:
    with opened(manager) as log, opened(manager, "other") as other:
        (segment,) = written(log, 3, numbered(0, 4))
        others: list[dict[str, Any]] = [{"epoch": 4}, {"query": "another"}, {"uid": "00" * 16}]
        for wrong in others:
            with pytest.raises(UsageError, match="written for commit"):
                log.adopt([segment._replace(**wrong)], query="query", epoch=3)
        with pytest.raises(UsageError, match="same ledger"):
            log.adopt([segment, segment], query="query", epoch=3)
        with pytest.raises(UsageError, match="takes what"):
            log.adopt([b"segment"], query="query", epoch=3)  # type: ignore[list-item]
        with pytest.raises(UsageError, match="takes an iterable of what"):
            log.adopt(5, query="query", epoch=3)  # type: ignore[arg-type]
        untrue: list[dict[str, Any]] = [{"records": 3}, {"nbytes": 1}, {"txid": 4}, {"time_ns": 1}]
        for wrong in untrue:
            with pytest.raises(CorruptError, match="was described as"):
                log.adopt([segment._replace(**wrong)], query="query", epoch=3)
        foreign = written(other, 3, numbered(0, 4))[0]._replace(uid=segment.uid)
        with pytest.raises(CorruptError, match="of log 'other'"):
            log.adopt([foreign], query="query", epoch=3)
        with log.detached_segment(query="query", epoch=3) as writer:
            writer.append_many([b"open"])
            unsealed = segment._replace(ledger_id=max(manager.list_ledgers()))
            with pytest.raises(CorruptError, match="not closed"):
                log.adopt([unsealed], query="query", epoch=3)
        with pytest.raises(NoSuchLedgerError, match="write it again"):
            log.adopt([unsealed], query="query", epoch=3)
        for query, epoch in (("", 0), ("a\n", 0), ("query", -1), ("query", "0")):
            with pytest.raises(UsageError):
                log.adopt([], query=query, epoch=epoch)  # type: ignore[arg-type]
            with pytest.raises(UsageError):
                log.detached_segment(query=query, epoch=epoch)  # type: ignore[arg-type]
        assert log.last_epoch("query") is None
        with log.writer() as owner:
            owner.seal()
        with pytest.raises(LogSealedError):
            log.adopt([segment], query="query", epoch=3)


def test_a_task_without_records_makes_no_ledger_and_a_commit_without_records_counts(manager: LedgerManager) -> None:
    with opened(manager) as log:
        before = list(manager.list_ledgers())
        segments = written(log, 0, [], [])
        assert [(each.ledger_id, each.records) for each in segments] == [(-1, 0), (-1, 0)]
        assert list(manager.list_ledgers()) == before
        assert log.adopt(segments, query="query", epoch=0).is_new
        assert not log.adopt(segments, query="query", epoch=0).is_new
        assert log.last_epoch("query") == 0
        assert log.segments() == []


def test_an_attempt_that_fails_leaves_nothing_and_its_writer_takes_no_more(manager: LedgerManager) -> None:
    with opened(manager) as log:
        before = list(manager.list_ledgers())
        with log.detached_segment(query="query", epoch=0) as writer:
            writer.append_many([b"sound"])
            with pytest.raises(UsageError):
                writer.append_many([b"sound", NewRecord(b"x", txid=-5)])
            assert writer.records == 1, "none of them was appended"
        for call in (lambda: writer.append_many([b"more"]), writer.seal):
            with pytest.raises(ClosedError):
                call()
        assert list(manager.list_ledgers()) == before
        with log.detached_segment(query="query", epoch=0) as writer:
            writer.append_many([b"sound"])
            sealed = writer.seal()
            assert writer.seal() == sealed
            with pytest.raises(ClosedError):
                writer.append_many([b"more"])
        assert DetachedSegment(*json.loads(json.dumps(sealed))) == sealed
        assert log.adopt([sealed], query="query", epoch=0).is_new
        assert data_of(log) == [b"sound"]


def refuse(*_: object) -> None:
    raise StorageRefusedError("no memory")


def test_a_seal_that_has_lost_records_is_not_made_again(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(manager) as log:
        before = list(manager.list_ledgers())
        writer = log.detached_segment(query="query", epoch=0)
        writer.append_many([b"first"])
        second = Records.new(memoryview(b"second"), np.array([0]), np.array([6]), times=np.array([at(0)]))
        assert append_buffered(writer, second)
        with monkeypatch.context() as patched:
            patched.setattr(DetachedLedger, "append", refuse)
            with pytest.raises(StorageRefusedError):
                writer.seal()
        with pytest.raises(ClosedError):
            writer.seal()
        assert list(manager.list_ledgers()) == before


def test_a_seal_that_could_not_close_its_ledger_is_made_again(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(manager) as log:
        writer = log.detached_segment(query="query", epoch=0)
        writer.append_many([b"first"])
        with monkeypatch.context() as patched:
            patched.setattr(LedgerWriter, "close", refuse)
            with pytest.raises(StorageRefusedError):
                writer.seal()
        assert log.adopt([writer.seal()], query="query", epoch=0).is_new
        assert data_of(log) == [b"first"]


def test_what_is_given_up_is_deleted_and_what_the_log_has_is_not(manager: LedgerManager) -> None:
    with opened(manager) as log:
        done = written(log, 0, numbered(0, 1), numbered(1, 1), [])
        log.adopt(done, query="query", epoch=0)
        again = written(log, 0, numbered(0, 1), numbered(1, 1))
        assert not log.adopt(again, query="query", epoch=0).is_new
        deleted = log.discard_detached([*done, *again], query="query", epoch=0)
        assert deleted == [each.ledger_id for each in again]
        assert log.discard_detached(again, query="query", epoch=0) == deleted, "they are gone"
        given_up, kept = written(log, 1, numbered(2, 1)), written(log, 1, numbered(2, 1))
        assert log.discard_detached(given_up, query="query", epoch=1) == [given_up[0].ledger_id]
        with pytest.raises(NoSuchLedgerError, match="write it again"):
            log.adopt(given_up, query="query", epoch=1)
        with log.writer() as writer:
            assert log.discard_detached(given_up, query="query", epoch=1)
            writer.append(b"of a writer that is not disturbed")
        assert log.adopt(kept, query="query", epoch=1).is_new
        with pytest.raises(UsageError, match=r"commit 1 of query 'query'.* and not for commit 2"):
            log.discard_detached(kept, query="query", epoch=2)
        assert data_of(log) == [b"0", b"1", b"of a writer that is not disturbed", b"2"]
        log.merge_segments(keep_s=WAIT_S)
        assert log.discard_detached(kept, query="query", epoch=1) == [], "readers may have opened what was merged"
        assert data_of(log) == [b"0", b"1", b"of a writer that is not disturbed", b"2"]


def test_sweeps_keep_what_may_be_adopted_yet(manager: LedgerManager) -> None:
    with opened(manager) as log:
        first, failed = written(log, 0, numbered(0, 1), numbered(0, 1))
        assert Log.sweep(manager, password=PASSWORD) == log.sweep_detached("query") == []
        log.adopt([first], query="query", epoch=0)
        assert Log.sweep(manager, password=PASSWORD) == log.sweep_detached("query") == [], "of the last commit"
        (second,), (foreign,) = written(log, 1, numbered(1, 1)), written(log, 0, numbered(1, 1), query="another")
        (later,) = written(log, 2, numbered(2, 1))
        log.adopt([second], query="query", epoch=1)
        assert log.sweep_detached("another") == []
        assert log.sweep_detached("query") == [failed.ledger_id]
        assert log.sweep_detached("query") == []
        assert log.adopt([foreign], query="another", epoch=0).is_new
        assert log.adopt([later], query="query", epoch=2).is_new
        assert data_of(log) == [b"0", b"1", b"1", b"2"]
        (lost,) = written(log, 7, numbered(9, 1))
        with log.writer() as writer:
            writer.seal()
        assert Log.sweep(manager, password=PASSWORD) == [lost.ledger_id], "a sealed log adopts nothing"
        assert data_of(log) == [b"0", b"1", b"1", b"2"]


def test_a_record_that_cannot_be_read_keeps_no_other_log_from_being_swept(manager: LedgerManager) -> None:
    """One of a newer pybk, and in a cluster one that was copied from another key."""
    with opened(manager) as log:
        kept, failed = written(log, 0, numbered(0, 1), numbered(0, 1))
        log.adopt([kept], query="query", epoch=0)
        commit(log, 1, numbered(1, 1))
        backend_of(manager).write_record("logs/a newer one", b'{"format":9}', None)
        if not backend_of(manager).single_writer:
            store = metadata_store_of(manager)
            store.create(pointer_key("logs", "a copy"), store.get(pointer_key("logs", "log")).value)
        assert Log.sweep(manager, password=PASSWORD) == [failed.ledger_id]
        (given_up,) = written(log, 2, numbered(2, 1))
        found = give_up_commits(manager, Credentials(PASSWORD), time.time_ns())
        assert found == {"query": [given_up.ledger_id]}
        assert data_of(log) == [b"0", b"1"]


def test_a_query_that_is_idle_for_long_is_forgotten_by_another_commit() -> None:
    record, day = new_list("log", ListKind.LOG, bytes(16), 0).in_pages(""), 86_400 * 10**9
    record = record.adopted({}, [], "idle", 7, day)
    record = record.adopted({}, [], "busy", 1, 31 * day)
    assert record.last_epoch("idle") == 7, "30 days to the moment"
    record = record.adopted({}, [], "busy", 2, 31 * day + 1)
    assert (record.last_epoch("idle"), record.last_epoch("busy")) == (None, 2)


def test_a_commit_that_was_forgotten_is_not_made_again_with_its_segments(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its ledgers would be listed twice: some would be in a page, where nothing else shows that."""
    monkeypatch.setattr("pybk.streams.ledger_steps.PAGE_SEGMENTS", PAGE)
    with opened(manager) as log:
        segments = written(log, 0, *(numbered(number, 1) for number in range(2 * PAGE)))
        log.adopt(segments, query="query", epoch=0)
        monkeypatch.setattr("pybk.streams.list_record.QUERY_IDLE_SECONDS", -1.0)
        log.adopt([], query="another", epoch=0)
        assert log.last_epoch("query") is None
        for some in (segments[:1], segments[-1:]):
            with pytest.raises(UsageError, match=r"adopted ledger .* already, and has forgotten"):
                log.adopt(some, query="query", epoch=0)
        assert len(data_of(log)) == 2 * PAGE


def test_a_commit_may_be_remembered_for_a_shorter_time(manager: LedgerManager) -> None:
    hour = 3600.0
    with opened(manager) as log:
        for wrong in (hour - 1, 31 * 86_400, -1, "1", float("nan")):
            with pytest.raises(UsageError, match=r"remember is .*; it takes seconds"):
                log.adopt([], query="once", epoch=0, remember=wrong)  # type: ignore[arg-type]
        assert log.adopt([], query="once", epoch=0, remember=hour).is_new
        assert not log.adopt([], query="once", epoch=0, remember=hour).is_new
    record, now = new_list("log", ListKind.LOG, bytes(16), 0).in_pages(""), 10**18
    record = record.adopted({}, [], "once", 0, now, hour).adopted({}, [], "often", 0, now)
    assert record.adopted({}, [], "often", 1, now + 3600 * 10**9).last_epoch("once") == 0
    assert record.adopted({}, [], "often", 1, now + 3601 * 10**9).last_epoch("once") is None


def test_more_queries_than_a_record_takes_are_refused_and_those_that_it_has_continue() -> None:
    producers = {f"{number:036}": Producer(0, -1, 1) for number in range(4500)}
    record = replace(new_list("log", ListKind.LOG, bytes(16), 0).in_pages(""), producers=producers)
    with pytest.raises(StorageRefusedError, match=r"of 4500 queries, .* such as 'new'; it forgets a query 30 days"):
        record.adopted({}, [], "new", 0, 2)
    assert record.adopted({}, [], f"{7:036}", 1, 2).last_epoch(f"{7:036}") == 1
    assert record.rolled(3, 2).open_segments, "the log's writer has room"
    assert record.adopted({}, [], "new", 0, 31 * 86_400 * 10**9).last_epoch("new") == 0


def test_a_log_that_got_another_password_meanwhile_adopts_nothing(manager: LedgerManager) -> None:
    with opened(manager) as log, Log.open(manager, "log", password=b"another") as late:
        commit(log, 0, numbered(0, 2))
        segments = written(late, 0, numbered(2, 2), query="late")
        with pytest.raises(UnauthorizedError, match="the password is not that of log 'log'"):
            late.adopt(segments, query="late", epoch=0)
        assert data_of(log) == [b"0", b"1"]


def test_a_deleted_log_leaves_no_segments_of_failed_attempts(manager: LedgerManager) -> None:
    with opened(manager) as log, opened(manager, "other") as other:
        (kept,) = written(other, 1, numbered(0, 1))
        commit(log, 0, numbered(0, 2))
        written(log, 0, numbered(2, 2))
        written(log, 1, numbered(2, 2))
        written(log, 1, numbered(2, 2), query="another")
    Log.delete(manager, "log", password=PASSWORD)
    assert list(manager.list_ledgers()) == [kept.ledger_id]


def test_a_lost_record_of_a_log_that_only_adopted_is_noticed(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager:
        with opened(manager, "deleted") as log:
            commit(log, 0, numbered(0, 2))
            written(log, 1, numbered(2, 2))
        Log.delete(manager, "deleted", password=PASSWORD)
        with opened(manager) as log:
            commit(log, 0, numbered(0, 2))
            ledger = log.segments()[0].ledger_id
        lose_record(manager)
    with LedgerManager.open(tmp_path / "store") as manager:
        with pytest.raises(CorruptError, match=f"has no record, but ledgers with records of it: {ledger};"):
            opened(manager)
        assert opened(manager, "deleted").last_seq() == -1, "nothing was left of it"


def test_below_the_level_of_pages_nothing_is_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_level(tmp_path / "old", FeatureLevel.SEALS, monkeypatch)
    with LedgerManager.open(tmp_path / "old") as manager, opened(manager) as log:
        with log.writer() as writer:
            writer.append(b"0")
        segments = written(log, 0, numbered(1, 2))
        with pytest.raises(IllegalOperationError, match="pybk store upgrade DIRECTORY --finalize"):
            log.adopt(segments, query="query", epoch=0)
    assert main(["store", "upgrade", str(tmp_path / "old"), "--finalize"]) == 0
    with LedgerManager.open(tmp_path / "old") as manager, opened(manager) as log:
        assert log.adopt(segments, query="query", epoch=0).is_new
        assert data_of(log) == [b"0", b"1", b"2"]


def test_a_lost_record_is_not_made_again_without_the_order_of_adopted_ledgers(manager: LedgerManager) -> None:
    with opened(manager) as log:
        with log.writer() as writer:
            writer.append_many(numbered(0, 3))
        segments = written(log, 0, numbered(3, 2), numbered(5, 1))
        log.adopt(segments, query="query", epoch=0)
    lose_record(manager)
    ledgers = [each.ledger_id for each in segments]
    with pytest.raises(CorruptError, match=re.escape(f"{ledgers[0]} (commit 0 of query 'query'), {ledgers[1]} (")):
        Log.rebuild(manager, "log", password=PASSWORD)
    for each in ledgers:
        manager.delete_ledger(each, password=PASSWORD)
    assert Log.rebuild(manager, "log", password=PASSWORD).last_seq == 2
    with opened(manager) as log:
        assert data_of(log) == [b"0", b"1", b"2"]


def test_writers_and_queries_share_a_log(manager: LedgerManager) -> None:
    """Each has the log for a moment; no record is lost, given twice, or out of its order."""
    commits, queries = 5, ("one", "two")

    def runs(log: Log, query: str) -> None:
        for epoch in range(commits):
            tasks = [[NewRecord(b"%s %d" % (query.encode(), 2 * epoch + task))] for task in range(2)]
            segments = written(log, epoch, *tasks, query=query)
            assert log.adopt(segments, query=query, epoch=epoch, wait=WAIT_S).is_new

    def writes(log: Log) -> None:
        for number in range(commits):
            with log.writer(wait=WAIT_S) as writer:
                writer.append_many([b"own %d" % (2 * number), b"own %d" % (2 * number + 1)])

    with opened(manager) as log, log.reader(follow=True) as reader, ThreadPoolExecutor() as pool:
        working = [pool.submit(runs, log, query) for query in queries] + [pool.submit(writes, log)]
        read = [reader.read(WAIT_S) for _ in range(6 * commits)]
        for each in working:
            each.result(WAIT_S)
        data = [record.data.decode() for record in read if record is not None]
        assert [record.seq for record in log.reader()] == list(range(6 * commits))
        assert data == [each.decode() for each in data_of(log)]
        for name in (*queries, "own"):
            assert [each for each in data if each.startswith(name)] == [f"{name} {n}" for n in range(2 * commits)]


def test_a_backup_of_a_store_has_what_was_adopted(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager, opened(manager) as log:
        commit(log, 0, numbered(0, 2), numbered(2, 3))
        back_up(manager, tmp_path / "backup", passwords=Passwords(PASSWORD))
    restore_backup(tmp_path / "backup", tmp_path / "restored", passwords=Passwords(PASSWORD))
    with LedgerManager.open(tmp_path / "restored") as manager, opened(manager) as log:
        assert data_of(log) == [b"0", b"1", b"2", b"3", b"4"]
        assert log.position_for(TxId(35)) == log.position_for(4)
        assert log.adopt([], query="query", epoch=0).is_new is False
        commit(log, 1, numbered(5, 1))
        assert data_of(log, 4) == [b"4", b"5"]
