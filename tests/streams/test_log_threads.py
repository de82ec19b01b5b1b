"""Threads append to one log, others and tasks follow it, while it rolls and is truncated: each sees all, once."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from pybk import LedgerManager, Log, LogEnd, LogReader, LogRecord, LogWriter, NewRecord
from tests.waiting import PROCESS_S

WRITERS = 8
STEPS = 30
FOLLOWERS = 3
TASKS = 3

Expected = dict[int, bytes]


def append(writer: LogWriter, number: int) -> Expected:
    """Append alone, in batches and without waiting; return what was appended, by sequence number."""
    done: Expected = {}
    for step in range(STEPS):
        data = b"%d %d" % (number, step)
        if step % 3 == 0:
            done[writer.append(data).seq] = data
        elif step % 3 == 1:
            positions = writer.append_many([NewRecord(data, key=b"k")] * 5)
            assert [each.seq for each in positions] == list(range(positions[0].seq, positions[0].seq + 5))
            done.update((each.seq, data) for each in positions)
        else:
            done.update((each.result().seq, data) for each in [writer.append_async(data) for _ in range(3)])
    assert len(done) == STEPS * 3
    return done


def follow(reader: LogReader) -> list[LogRecord]:
    return list(reader)


def follow_in_tasks(log: Log) -> list[tuple[list[LogRecord], int]]:
    async def one() -> tuple[list[LogRecord], int]:
        reader = await log.reader_async(follow=True)
        return [record async for record in reader], reader.skipped

    async def everyone() -> list[tuple[list[LogRecord], int]]:
        return await asyncio.gather(*(one() for _ in range(TASKS)))

    return asyncio.run(everyone())


def truncate(log: Log, over: threading.Event) -> None:
    """Drop records, always some of the last ones, until there are no more."""
    while not over.wait(0.01):
        log.truncate(max(0, log.last_seq() - 40))


def check(seen: list[LogRecord], skipped: int, expected: Expected) -> None:
    """All that was not skipped was seen once, in order, as it was appended."""
    seqs = [each.seq for each in seen]
    assert seqs == sorted(set(seqs))
    assert len(seqs) + skipped == len(expected)
    assert {each.seq: each.data for each in seen} == {seq: expected[seq] for seq in seqs}
    assert [each.position for each in seen] == sorted(each.position for each in seen)


@pytest.mark.parametrize("truncating", [False, True])
def test_every_reader_sees_every_record_once_in_order(manager: LedgerManager, truncating: bool) -> None:
    over = threading.Event()
    with Log.open(manager, "log", insecure=True) as log, ThreadPoolExecutor(32) as pool:
        writer = log.writer(segment_records=50)
        readers = [log.reader(follow=True) for _ in range(FOLLOWERS)]
        following: list[Future[list[LogRecord]]] = [pool.submit(follow, each) for each in readers]
        tasks = pool.submit(follow_in_tasks, log)
        late = pool.submit(lambda: follow(log.reader(LogEnd.LATEST, follow=True)))
        truncation = pool.submit(truncate, log, over) if truncating else None
        appended = [pool.submit(append, writer, number) for number in range(WRITERS)]
        try:
            expected = {seq: data for each in appended for seq, data in each.result(PROCESS_S).items()}
        finally:
            over.set()
            if truncation is not None:
                truncation.result(PROCESS_S)
            writer.seal()
        assert sorted(expected) == list(range(WRITERS * STEPS * 3))
        for reader, found in zip(readers, following, strict=True):
            check(found.result(PROCESS_S), reader.skipped, expected)
        for seen, skipped in tasks.result(PROCESS_S):
            # One that began after a truncation begins there.
            check(seen, skipped, {seq: data for seq, data in expected.items() if seq >= seen[0].seq - skipped})
        seqs = [each.seq for each in late.result(PROCESS_S)]
        assert seqs == sorted(set(seqs))
        assert len(log.segments()) > 1 or truncating
        assert [each.seq for each in log.reader()] == list(range(log.first_seq(), len(expected)))
