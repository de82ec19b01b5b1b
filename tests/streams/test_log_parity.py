"""What the tests of DistributedLog look at, named after them, where no other test of named logs does."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pybk import LedgerManager, LedgerReader, Log, LogReader, NewRecord, OutOfOrderError
from tests.waiting import WAIT_S, wait_until


def opened(manager: LedgerManager) -> Log:
    return Log.open(manager, "log", insecure=True)


def test_cancelled_read(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is cancelled while a thread reads for it loses no record."""
    begun, proceed = threading.Event(), threading.Event()
    read_batch = LedgerReader.read_batch

    def slow(reader: LedgerReader, *arguments: Any, **options: Any) -> Any:
        begun.set()
        assert proceed.wait(WAIT_S)
        return read_batch(reader, *arguments, **options)

    async def use(reader: LogReader) -> None:
        monkeypatch.setattr(LedgerReader, "read_batch", slow)
        reading = asyncio.create_task(reader.read_async())
        await asyncio.to_thread(begun.wait, WAIT_S)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        proceed.set()

    with opened(manager) as log, log.writer() as writer, log.reader() as reader:
        writer.append(b"a")
        writer.append(b"b")
        asyncio.run(use(reader))  # returns when the thread has read
        assert [record.seq for record in reader.read_many(9, timeout=0)] == [0, 1]


def test_async_bulk_write_with_a_record_that_is_refused(manager: LedgerManager) -> None:
    """None of a batch is there if one of it is refused, and those after it are not in doubt."""
    with opened(manager) as log, log.writer() as writer:
        first = [writer.append_async(b"%d" % number, txid=number) for number in range(20)]
        with pytest.raises(OutOfOrderError):
            writer.append_many([NewRecord(b"x", 30), NewRecord(b"y", 29)])
        second = [writer.append_async(b"%d" % number, txid=number) for number in range(20, 40)]
        assert [each.result().seq for each in first + second] == list(range(40))
        assert [record.txid for record in log.reader()] == list(range(40))


def test_sequence_id(manager: LedgerManager) -> None:
    """Sequence numbers are dense over writers, rolls, batches, empty segments and truncation of everything."""
    with opened(manager) as log:
        given: list[int] = []
        for _ in range(3):
            with log.writer() as writer:
                given.append(writer.append(b"a").seq)
                writer.roll()
                writer.roll()
                given += [each.seq for each in writer.append_many([b"b", b"c"])]
            with log.writer():
                pass
            log.truncate(log.last_seq() + 1)
            assert (len(log), log.first(), log.last()) == (0, None, None)
        assert given == list(range(9))
        assert log.writer().last_seq == 8


def test_roll_log_segments_without_traffic(manager: LedgerManager) -> None:
    """An idle segment with records is closed by age alone, and an empty one is not."""
    with opened(manager) as log, log.writer(segment_age_s=0.05) as writer, log.reader(follow=True) as reader:
        writer.append(b"a")
        wait_until(lambda: len(log.segments()) == 2 and log.segments()[0].last_seq is not None)
        first, second = log.segments()
        assert (first.first_seq, first.last_seq, second.last_seq) == (0, 0, None)
        writer.append(b"b")
        wait_until(lambda: len(log.segments()) == 3)
        assert [record.data for record in reader.read_many(1) + reader.read_many(1)] == [b"a", b"b"]


def test_non_blocking_reads(manager: LedgerManager) -> None:
    """Reads that do not wait see each record once, over rolls."""
    with opened(manager) as log, log.writer(segment_records=3) as writer, log.reader() as reader:
        for number in range(20):
            assert reader.read(timeout=0) is None
            position = writer.append(b"%d" % number)
            record = wait_until(lambda: reader.read(timeout=0))
            assert record is not None
            assert record.position == position
        assert reader.caught_up()
