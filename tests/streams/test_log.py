"""Named logs: appended, read from every place, rolled, truncated, sealed and taken over."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    ClosedError,
    IllegalOperationError,
    LedgerManager,
    Log,
    LogEnd,
    LogFencedError,
    LogLockedError,
    LogRecord,
    LogSealedError,
    NewRecord,
    NoSuchEntryError,
    NoSuchLogError,
    OutOfOrderError,
    Position,
    PybkError,
    TruncatedError,
    TxId,
    UnauthorizedError,
    UsageError,
)
from pybk.manager.local_backend import StoreBackend
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"log"


def opened(manager: LedgerManager, name: str = "log", **options: Any) -> Log:
    return Log.open(manager, name, password=PASSWORD, **options)


def data_of(log: Log, *start: Any) -> list[bytes]:
    with log.reader(*start) as reader:
        return [record.data for record in reader]


def test_what_a_record_carries_is_read_again(manager: LedgerManager) -> None:
    headers = (("trace", b"\x00\xff"), ("empty", b""))
    with opened(manager) as log:
        with log.writer() as writer:
            first = writer.append(b"plain", time_ns=1)
            second = writer.append(b"full", txid=7, key=b"customer", headers=headers, time_ns=2)
            third = writer.append(b"", key=b"", time_ns=3)
            assert (writer.last_seq, writer.last_txid) == (2, 7)
        assert [each.seq for each in (first, second, third)] == [0, 1, 2]
        assert first < second < third
        assert list(log.reader()) == [
            LogRecord(first, b"plain", 1, None, None, ()),
            LogRecord(second, b"full", 2, 7, b"customer", headers),
            LogRecord(third, b"", 3, None, b"", ()),
        ]
        assert log.read(second).key == b"customer"
        assert (log.first(), log.last()) == (log.read(0), log.read(2))
        assert len(log) == 3


def test_a_batch_mixes_records_and_has_one_position_each(manager: LedgerManager) -> None:
    batch: list[bytes | NewRecord] = [
        NewRecord(b"x" * 30_000, txid=3),
        b"bare",
        NewRecord(b"y" * 40_000, key=b"k", time_ns=5),
    ] * 20
    with opened(manager) as log, log.writer() as writer:
        writer.append(b"before")
        positions = writer.append_many(batch)
        later = writer.append(b"after")
        records = list(log.reader())
        assert [record.position for record in records[1:-1]] == positions
        assert [each.seq for each in positions] == list(range(1, 61))
        assert len({each.entry for each in positions}) > 10
        assert later.seq == 61
        for record, new in zip(records[1:-1], batch, strict=True):
            expected = new if isinstance(new, NewRecord) else NewRecord(new)
            assert (record.data, record.txid, record.key) == (expected.data, expected.txid, expected.key)
            assert expected.time_ns in (None, record.time_ns)
        assert all(log.read(each).position == each for each in positions[::7])


def test_positions_are_text_and_back() -> None:
    position = Position(3, 17, 0, 1234)
    assert str(position) == "3:17:0:1234"
    assert Position.parse(str(position)) == position
    for wrong in ("", "3:17:0", "3:17:0:-1", "3:17:0:x", "1:2:3:4:5", "1:1:1:99999999999999999999", 7):
        with pytest.raises(UsageError, match="not a position"):
            Position.parse(wrong)


def test_reading_begins_at_every_place(manager: LedgerManager) -> None:
    day = datetime(2026, 1, 1, tzinfo=UTC)
    with opened(manager) as log:
        positions = []
        with log.writer(segment_records=7) as writer:
            for number in range(40):
                at = day + timedelta(hours=number)
                positions.append(writer.append(b"%d" % number, txid=number * 10, time_ns=int(at.timestamp()) * 10**9))
                if number % 7 == 6:
                    writer.roll()
        assert len(log.segments()) > 4
        for seq in range(40):
            assert log.position_for(positions[seq]) == positions[seq]
            assert log.position_for(seq) == positions[seq]
            assert log.position_for(TxId(seq * 10)) == positions[seq]
            assert log.position_for(TxId(seq * 10 - 9)) == positions[seq]
            assert log.position_for(day + timedelta(hours=seq)) == positions[seq]
            assert log.position_for(day + timedelta(hours=seq - 0.5)) == positions[seq]
        assert log.position_for(TxId(391)) is None
        assert log.position_for(day + timedelta(hours=40)) is None
        assert log.position_for(LogEnd.LATEST) is None
        assert data_of(log, TxId(385)) == [b"39"]
        assert data_of(log, LogEnd.LATEST) == []
        log.truncate(positions[20])
        assert log.position_for(LogEnd.EARLIEST) == positions[20]
        assert log.position_for(TxId(0)) == positions[20]
        with pytest.raises(UsageError, match="time zone"):
            log.reader(datetime(2026, 1, 1))


def test_times_that_are_out_of_order_are_found_too(manager: LedgerManager) -> None:
    times = [50, 10, 70, 20, 60, 90, 30, 80, 100, 95]
    with opened(manager) as log:
        with log.writer(ordered_txids=False) as writer:
            for number, time_ns in enumerate(times):
                writer.append(b"%d" % number, txid=time_ns, time_ns=time_ns * 1000)
                if number % 3 == 2:
                    writer.roll()
        for wanted in {0, *(time_ns + by for time_ns in times for by in (-1, 0, 1)), 100} - {101}:
            first = next(seq for seq, time_ns in enumerate(times) if time_ns >= wanted)
            at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=wanted)
            for start in (TxId(wanted), at):
                found = log.position_for(start)
                assert found is not None
                assert found.seq == first


def test_transaction_ids_do_not_fall(manager: LedgerManager) -> None:
    with opened(manager) as log:
        with log.writer() as writer:
            writer.append(b"a", txid=5)
            writer.append(b"b", txid=5)
            writer.append(b"c")
            with pytest.raises(OutOfOrderError) as caught:
                writer.append(b"d", txid=4)
            assert (caught.value.txid, caught.value.last, caught.value.outcome_unknown) == (4, 5, False)
            with pytest.raises(OutOfOrderError):
                writer.append_many([NewRecord(b"e", txid=9), NewRecord(b"f", txid=8)])
            assert (writer.last_seq, writer.last_txid) == (2, 5)
        log.truncate(LogEnd.LATEST)
        with log.writer() as writer:  # also after all records are gone
            with pytest.raises(OutOfOrderError):
                writer.append(b"g", txid=4)
            assert writer.append(b"h", txid=5).seq == 3
        with log.writer(ordered_txids=False) as writer:
            assert writer.append(b"i", txid=1).seq == 4
        assert data_of(log) == [b"h", b"i"]


def test_truncation_is_exact_in_the_open_segment_and_in_an_entry(manager: LedgerManager) -> None:
    """DistributedLog shows truncated records that share an entry with others, and keeps those of the open segment."""
    with opened(manager) as log, log.writer() as writer:
        positions = writer.append_many([b"%d" % number for number in range(10)])
        assert {each.entry for each in positions} == {1}
        assert log.truncate(positions[4]) == 4
        assert data_of(log) == [b"%d" % number for number in range(4, 10)]
        assert log.truncate(2) == 4  # backwards changes nothing
        for missing in (TxId(1 << 40), datetime(2200, 1, 1, tzinfo=UTC)):
            with pytest.raises(UsageError, match="all would be dropped"):
                log.truncate(missing)
        with pytest.raises(UsageError, match="records before 11 cannot be dropped; its last is 9"):
            log.truncate(11)
        with pytest.raises(TruncatedError) as caught:
            log.reader(0, strict=True)
        assert caught.value.first_seq == 4
        with log.reader(0) as reader:
            assert (reader.skipped, reader.seq) == (4, 4)
            assert reader.read() == log.read(4)
        writer.append(b"more")
        writer.roll()
        log.truncate(LogEnd.LATEST)
        assert (data_of(log), log.first(), log.last()) == ([], None, None)
        assert writer.append(b"next").seq == 11


def test_a_reader_that_is_overtaken_by_truncation_says_what_it_skipped(manager: LedgerManager) -> None:
    with opened(manager) as log, log.writer() as writer:
        writer.append_many([b"%d" % number for number in range(10)])
        writer.roll()
        writer.append_many([b"%d" % number for number in range(10, 20)])
        tolerant, strict = log.reader(), log.reader(strict=True)
        log.truncate(15)
        assert [record.data for record in tolerant] == [b"%d" % number for number in range(15, 20)]
        assert tolerant.skipped == 15
        with pytest.raises(TruncatedError):
            strict.read()


def test_an_iteration_ends_if_all_that_is_left_of_it_is_truncated(manager: LedgerManager) -> None:
    """It continues after the records that were there when it began, and does not wait for others."""
    with opened(manager) as log, log.writer() as writer:
        writer.append_many([b"%d" % number for number in range(10)])
        reader = log.reader()
        records = iter(reader)
        assert next(records).data == b"0"
        log.truncate(LogEnd.LATEST)
        found: list[LogRecord] = []
        thread = threading.Thread(target=found.extend, args=(records,), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "it waits for a record that is not there"
        assert (found, reader.skipped, reader.seq) == ([], 9, 10)

        async def iterate() -> list[LogRecord]:
            left = []
            async for record in log.reader(start):
                left.append(record)
                log.truncate(LogEnd.LATEST)
            return left

        start = writer.append_many([b"a", b"b", b"c"])[0]
        assert [each.data for each in asyncio.run(asyncio.wait_for(iterate(), WAIT_S))] == [b"a"]


def test_one_writer_fences_the_other(tmp_path: Path) -> None:
    """DistributedLog's testTwoWritersOnLockDisabled."""
    with LedgerManager.open(tmp_path / "store") as manager, opened(manager) as log:
        first = log.writer()
        first.append(b"a")
        with pytest.raises(LogLockedError):
            log.writer()
        second = log.writer(steal=True)
        with pytest.raises(
            LogFencedError, match=r"^log 'log' was taken over by another owner.*open it again"
        ) as caught:
            first.append(b"b")
        assert not caught.value.outcome_unknown
        second.append(b"c")
        with pytest.raises(LogFencedError):
            first.close()
        assert data_of(log)[0] == b"a"
        assert data_of(log)[-1] == b"c"


def test_a_sealed_log_ends(manager: LedgerManager) -> None:
    with opened(manager) as log:
        with log.writer() as writer:
            writer.append(b"a")
            follower = log.reader(follow=True)
            found: list[bytes] = []
            thread = threading.Thread(target=lambda: found.extend(record.data for record in follower))
            thread.start()
            writer.append(b"b")
            writer.seal()
        thread.join(WAIT_S)
        assert found == [b"a", b"b"]
        assert log.is_sealed()
        with pytest.raises(LogSealedError, match="after record 1"):
            follower.read()
        with pytest.raises(LogSealedError):
            log.writer()
        assert log.truncate(1) == 1
        assert data_of(log) == [b"b"]
        Log.delete(manager, "log", password=PASSWORD)
        with pytest.raises(NoSuchLogError):
            opened(manager, create=False)


def test_a_log_without_a_writer_is_sealed_by_its_handle(manager: LedgerManager) -> None:
    with opened(manager) as log:
        log.seal()
        assert log.is_sealed()
        assert list(log.reader(follow=True)) == []


def test_reads_wait_and_say_whether_they_are_at_the_end(manager: LedgerManager) -> None:
    with opened(manager) as log, log.writer() as writer, log.reader() as reader:
        assert reader.read(timeout=0) is None
        assert reader.caught_up()
        waiting = threading.Thread(target=lambda: seen.append(reader.read(timeout=60)))
        seen: list[LogRecord | None] = []
        waiting.start()
        position = writer.append(b"a")
        waiting.join(60)
        assert [record and record.position for record in seen] == [position]
        writer.append_many([b"b", b"c", b"d"])
        assert (reader.lag(), reader.caught_up()) == (3, False)
        assert [record.data for record in reader.read_many(2)] == [b"b", b"c"]
        assert reader.seq == 3
        reader.seek(1)
        assert [record.data for record in reader.read_many(9)] == [b"b", b"c", b"d"]


def test_a_reader_that_is_left_in_the_middle_knows_where(manager: LedgerManager) -> None:
    with opened(manager) as log, log.writer() as writer:
        writer.append_many([b"%d" % number for number in range(10)])
        reader = log.reader()
        for record in reader:
            if record.seq == 4:
                break
        assert reader.seq == 5
        assert repr(reader) == "<LogReader of 'log' at 5>"
        assert [record.seq for record in reader] == [5, 6, 7, 8, 9]
        reader.close()
        with pytest.raises(ClosedError):
            reader.read()


def test_two_logs_written_alternately_stay_apart(manager: LedgerManager) -> None:
    """DistributedLog's TestInterleavedReaders: in order over rolls, truncation and recovery."""
    with opened(manager, "one") as one, opened(manager, "two") as two:
        writers = [log.writer(segment_records=5) for log in (one, two)]
        readers = [log.reader() for log in (one, two)]
        seen: list[list[bytes]] = [[], []]
        for number in range(60):
            writers[number % 2].append(b"%d" % number)
            if number % 10 == 9:
                for reader, found in zip(readers, seen, strict=True):
                    found += [record.data for record in reader]
            if number == 35:
                writers[0] = one.writer(steal=True, segment_records=5)
                two.truncate(10)
        for reader, found in zip(readers, seen, strict=True):
            found += [record.data for record in reader]
        assert seen == [[b"%d" % number for number in range(start, 60, 2)] for start in (0, 1)]


def test_records_roll_the_log_by_count(manager: LedgerManager) -> None:
    with opened(manager) as log, log.writer(segment_records=3) as writer:
        for turn in range(3):
            for number in range(3 * turn, 3 * turn + 3):
                writer.append(b"%d" % number)
            # A segment is closed after the writer has switched to the next one.
            wait_until(lambda turn=turn: sum(each.last_seq is not None for each in log.segments()) > turn)  # type: ignore[misc]
        assert data_of(log) == [b"%d" % number for number in range(9)]
        assert [each.first_seq for each in log.segments()] == [0, 3, 6, 9]


def test_properties_change_together(manager: LedgerManager) -> None:
    with opened(manager) as log:
        changed = threading.Event()
        watch = log.on_change(changed.set)
        log.set_properties({"owner": "team a", "schema": "7"})
        assert changed.wait(WAIT_S)
        watch.cancel()
        log.set_properties({"owner": None, "more": "ü"})
        assert dict(log.properties()) == {"schema": "7", "more": "ü"}
        with pytest.raises(UsageError, match="at most 16384"):
            log.set_properties({"long": "x" * 20_000, "schema": None})
        assert dict(opened(manager).properties()) == {"schema": "7", "more": "ü"}
        with pytest.raises(UsageError, match="set_retention"):
            log.set_properties({"pybk.retention": "7 days"})
        for wrong in ({1: "a"}, {"a": 1}, {"": "a"}, [("a", "b")], None):
            with pytest.raises(UsageError, match="mapping of names"):
                log.set_properties(wrong)  # type: ignore[arg-type]


def test_everything_has_an_asyncio_form(manager: LedgerManager) -> None:
    async def use() -> None:
        async with Log.open_async(manager, "orders/eu", password=PASSWORD) as log, log.writer_async() as writer:
            assert (await log.first_async(), await log.last_async()) == (None, None)
            positions = await asyncio.gather(*(writer.append_coro(b"%d" % number) for number in range(50)))
            assert [each.seq for each in positions] == list(range(50))
            assert len(await writer.append_many_coro([b"x" * 50_000] * 9)) == 9
            assert (await writer.append_async(b"y")).seq == 59
            assert await writer.sync_async() == 59
            reader = await log.reader_async()
            assert [record.seq async for record in reader] == list(range(60))
            follower = await log.reader_async(60, follow=True)
            coming = asyncio.create_task(_collected(follower))
            await writer.append_coro(b"z")
            await log.truncate_async(30)
            assert (await log.read_async(60)).data == b"z"
            assert await reader.read_async(timeout=WAIT_S) == log.read(60)
            await writer.roll_async()
            await log.set_properties_async({"schema": "7"})
            assert await log.subscriptions_async() == []
            await writer.seal_async()
            assert await coming == [b"z"]
            assert await log.first_async() == log.read(30)
            assert await log.last_async() == log.read(60)
            assert await log.position_for_async(60) == log.read(60).position
            assert [segment.last_seq for segment in await log.segments_async()] == [60]
        await Log.delete_async(manager, "orders/eu", password=PASSWORD)
        with pytest.raises(NoSuchLogError):
            await Log.open_async(manager, "orders/eu", password=PASSWORD, create=False)

    asyncio.run(use())


def test_a_wait_in_an_event_loop_asks_no_metadata_store(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watch is a request where the store is ZooKeeper, and would stop the loop while that does not answer."""
    watch_record = StoreBackend.watch_record
    loops: list[int] = []

    def watched(*arguments: Any) -> Any:
        assert threading.get_ident() not in loops
        return watch_record(*arguments)

    async def use() -> None:
        loops.append(threading.get_ident())
        async with Log.open_async(manager, "orders", password=PASSWORD) as log, log.writer_async() as writer:
            reader = await log.reader_async()
            async with log.subscribe_async("billing") as subscription:
                calls = (reader.read_async, subscription.read_async)
                assert [await read(timeout=0.05) for read in calls] == [None, None]
                coming = [asyncio.create_task(read(timeout=WAIT_S)) for read in calls]
                await asyncio.sleep(0.05)
                await writer.append_coro(b"z")
                assert [record and record.data for record in await asyncio.gather(*coming)] == [b"z", b"z"]

    monkeypatch.setattr(StoreBackend, "watch_record", watched)
    asyncio.run(use())


async def _collected(reader: Any) -> list[bytes]:
    return [record.data async for record in reader]


def test_wrong_arguments_say_what_to_do(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager, opened(manager) as log, log.writer() as writer:
        wrong: list[tuple[Any, str]] = [
            (lambda: writer.append("text"), "encode text first"),  # type: ignore[arg-type]
            (lambda: writer.append(b"", txid=-1), "txid is -1"),
            (lambda: writer.append(b"", txid=True), "txid is True"),
            (lambda: writer.append(b"", time_ns=1.5), "time_ns is 1.5"),  # type: ignore[arg-type]
            (lambda: writer.append(b"", key="k"), "key is 'k'"),  # type: ignore[arg-type]
            (lambda: writer.append(b"", key=b"k" * 5000), "at most 4096 bytes"),
            (lambda: writer.append(b"", headers={"a": b""}), "headers is"),  # type: ignore[arg-type]
            (lambda: writer.append(b"", headers=[("a", "b")]), "a header is"),  # type: ignore[list-item]
            (lambda: writer.append(b"", headers=[("", b"b")]), "a header is"),
            (lambda: writer.append(b"x" * (5 << 20)), "split it"),
            (lambda: writer.append_many([]), "at least one"),
            (lambda: writer.append_many(None), "records is None"),  # type: ignore[arg-type]
            (lambda: log.reader("latest"), "start is 'latest'"),  # type: ignore[arg-type]
            (lambda: log.reader(-1), "start is -1"),
            (lambda: log.reader(datetime(2026, 1, 31)), "start is 2026-01-31 00:00:00, without a time zone"),
            (lambda: log.reader(TxId("7")), "start is TxId"),  # type: ignore[arg-type]
            (lambda: log.truncate(9), "records before 9 cannot be dropped; it has no records"),
            (lambda: log.set_retention(7), r"it takes Retention\(\.\.\.\)"),  # type: ignore[arg-type]
            (lambda: log.subscribe("s", ack_timeout="1"), "ack_timeout is '1'"),  # type: ignore[arg-type]
            (lambda: log.subscribe("s", dead_letters=writer), r"it takes DeadLetters\(writer\)"),  # type: ignore[arg-type]
            (lambda: Log.delete("store", "log", password=PASSWORD), "it takes a LedgerManager"),  # type: ignore[arg-type]
            (lambda: log.reader().read_many(0), "most is 0"),
            (lambda: log.reader().read("1"), "timeout is '1'"),  # type: ignore[arg-type]
            (lambda: log.writer(segment_bytes=0), "segment_bytes is 0"),
            (lambda: log.writer(segment_records=0), "segment_records is 0"),
            (lambda: log.writer(segment_age_s=-1), "segment_age_s is -1"),
            (lambda: opened(manager, "a//b"), "empty part"),
            (lambda: Log.open(manager, "x", mode="a", password=PASSWORD), "mode is 'a'"),
        ]
        for call, text in wrong:
            with pytest.raises(UsageError, match=text):
                call()
        assert len(log) == 0
        with pytest.raises(NoSuchEntryError):
            log.read(0)
        with pytest.raises(UnauthorizedError):
            Log.open(manager, "log", password=b"another")


def test_another_process_reads_what_a_writer_appends(tmp_path: Path) -> None:
    with (
        Log.open(tmp_path / "store", "log", password=PASSWORD) as log,
        log.writer() as writer,
        Log.open(tmp_path / "store", "log", mode="r", password=PASSWORD) as other,
    ):
        follower = other.reader(follow=True)
        position = writer.append(b"a", txid=3)
        assert next(iter(follower)).position == position
        assert other.position_for(TxId(1)) == position
        with pytest.raises(IllegalOperationError, match="read-only"):
            other.writer()


def test_a_closed_log_ends_its_readers_and_writers(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "store", "log", password=PASSWORD)
    writer, reader = log.writer(), log.reader(follow=True)
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            list(reader)
        except ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    writer.append(b"a")
    log.close()
    thread.join(WAIT_S)
    assert len(ended) == 1
    with pytest.raises(PybkError):
        writer.append(b"b")
    with pytest.raises(ClosedError):
        log.reader()


def test_a_log_without_records_is_true(manager: LedgerManager) -> None:
    with opened(manager) as log:
        assert log
        assert len(log) == 0


def test_an_append_after_the_seal_says_that_the_log_was_sealed(manager: LedgerManager) -> None:
    with opened(manager) as log:
        writer = log.writer()
        writer.append(b"x")
        writer.seal()
        with pytest.raises(ClosedError, match="was sealed here; it takes no more records"):
            writer.append(b"y")
        with pytest.raises(ClosedError, match="was sealed here; it takes no more records"):
            writer.roll()


def test_a_writer_that_was_fenced_does_not_replace_what_its_block_did(
    manager: LedgerManager, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(manager) as log, opened(manager) as other:
        with log.writer() as writer:
            writer.append(b"x")
            with log.subscribe("sub") as subscription:
                other.subscribe("sub", steal=True).close()
            assert subscription.closed
            other.writer(steal=True).close()
        assert "after another owner had taken it" in caplog.text
        writer = log.writer()
        other.writer(steal=True).close()
        with pytest.raises(LogFencedError):
            writer.close()
