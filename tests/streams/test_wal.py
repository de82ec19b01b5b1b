"""Write-ahead logs: appended, rolled, truncated, cut, followed, taken over and replayed."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk import CheckpointWriter, LedgerManager, Log, PybkError, StoreLockedError, UsageError, WalFollower
from pybk.errors import (
    ClosedError,
    IllegalOperationError,
    LogFencedError,
    LogLockedError,
    LogSealedError,
    MetadataUnreachableError,
    NoSuchEntryError,
    NoSuchLogError,
    RewoundError,
    StorageRefusedError,
    TruncatedError,
    TruncateGuardError,
    UnauthorizedError,
)
from pybk.manager.ledger_manager import backend_of
from pybk.manager.ledger_reader import LedgerReader
from pybk.streams import record_reader
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import Segment
from pybk.streams.log_record import WalRecord
from pybk.streams.wal import WriteAheadLog
from pybk.threads import Background
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"wal"


def opened(manager: LedgerManager, **options: object) -> WriteAheadLog:
    return WriteAheadLog.open(manager, "wal", password=PASSWORD, **options)  # type: ignore[arg-type]


def data_of(wal: WriteAheadLog) -> list[bytes]:
    records = list(wal.replay())
    assert [record.lsn for record in records] == list(range(wal.first_lsn(), wal.first_lsn() + len(records)))
    return [record.data for record in records]


def test_the_whole_life_in_three_lines(tmp_path: Path) -> None:
    with WriteAheadLog.open(tmp_path / "db", password=PASSWORD) as wal:
        assert wal.append(b"set a 1") == 1
    with WriteAheadLog.open(tmp_path / "db", password=PASSWORD) as wal:
        assert list(wal.replay()) == [WalRecord(1, b"set a 1", None)]
        assert wal.append(b"set b 2", time_ns=5) == 2
        assert wal.read(2) == WalRecord(2, b"set b 2", 5)
        assert wal.recovery is not None
        assert (wal.recovery.epoch, wal.recovery.last_lsn, wal.recovery.unclean) == (2, 1, False)


def test_every_way_to_append_gives_dense_numbers(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        assert wal.append(b"a") == 1
        future = wal.append_async(b"b")
        assert future.result() == 2
        assert wal.append_many([b"c", b"d"]) == range(3, 5)
        with wal.transaction() as transaction:
            transaction.append(b"e")
            transaction.append(b"f")
        assert transaction.lsns == range(5, 7)
        assert asyncio.run(_appended(wal)) == [7, 8, 9, 10]
        assert wal.last_lsn() == 10
        assert wal.sync() == 10
        assert wal.durable_lsn() == 10
        assert len(wal) == 10
        assert data_of(wal) == [b"a", b"b", b"c", b"d", b"e", b"f", *(b"%d" % n for n in range(4))]


async def _appended(wal: WriteAheadLog) -> list[int]:
    return list(await asyncio.gather(*(wal.append_coro(b"%d" % number) for number in range(4))))


def test_a_log_that_is_not_to_be_made_makes_no_store(tmp_path: Path) -> None:
    for kind in (WriteAheadLog, Log):
        with pytest.raises(NoSuchLogError, match="check the path"):
            kind.open(tmp_path / "absent", "wal", insecure=True, create=False)
    assert not (tmp_path / "absent").exists()
    with WriteAheadLog.open(tmp_path / "db", insecure=True) as wal:
        wal.append(b"a")
    with WriteAheadLog.open(tmp_path / "db", insecure=True, create=False) as wal:
        assert data_of(wal) == [b"a"]


def test_a_transaction_takes_records_inside_its_with_alone(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        transaction = wal.transaction()
        with pytest.raises(IllegalOperationError, match="inside its `with`"):
            transaction.append(b"early")
        with transaction:
            buffer = bytearray(b"a")
            transaction.append(buffer)  # type: ignore[arg-type]
            buffer[:] = b"z"
            with pytest.raises(UsageError, match="encode text"):
                transaction.append("b")  # type: ignore[arg-type]
            with pytest.raises(IllegalOperationError, match="begin another"), transaction:
                pass
        with pytest.raises(IllegalOperationError, match="inside its `with`"):
            transaction.append(b"late")
        with transaction:
            transaction.append(b"c")
        assert [record.data for record in wal.replay()] == [b"a", b"c"]


def test_a_transaction_that_raises_appends_nothing(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        with suppress(ZeroDivisionError), wal.transaction() as transaction:
            transaction.append(b"a")
            raise ZeroDivisionError
        assert wal.last_lsn() == 0
        assert data_of(wal) == []


def test_rolling_by_size_loses_and_reorders_nothing(manager: LedgerManager) -> None:
    with opened(manager, segment_bytes=4000) as wal:

        def append() -> None:
            while len(list(manager.list_ledgers("wal"))) < 5:
                for _ in range(20):
                    wal.append(os.urandom(200))

        threads = [threading.Thread(target=append) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(data_of(wal)) == wal.last_lsn()


def test_rolling_by_age_needs_no_traffic(manager: LedgerManager) -> None:
    with opened(manager, segment_age_s=0.05) as wal:
        wal.append(b"a")
        wait_until(lambda: len(list(manager.list_ledgers("wal"))) == 2)
        assert wal.append(b"b") == 2
        assert data_of(wal) == [b"a", b"b"]


def test_a_second_writer_needs_to_steal_and_fences_the_first(manager: LedgerManager) -> None:
    first = opened(manager)
    first.append(b"a")
    with pytest.raises(LogLockedError, match="steal=True"):
        opened(manager)
    second = opened(manager, steal=True)
    assert second.recovery is not None
    assert second.recovery.unclean
    assert second.append(b"b") == 2
    for _ in range(2):
        with pytest.raises(LogFencedError):
            first.append(b"c")
    with pytest.raises(LogFencedError):
        first.roll()
    with pytest.raises(LogFencedError):
        first.close()
    assert data_of(second) == [b"a", b"b"]
    second.close()


def test_a_store_is_open_once(tmp_path: Path) -> None:
    with WriteAheadLog.open(tmp_path, password=PASSWORD), pytest.raises(StoreLockedError):
        WriteAheadLog.open(tmp_path, password=PASSWORD)


def test_what_was_truncated_is_gone_at_once_also_in_the_open_segment(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append_many([b"%d" % number for number in range(1, 11)])
        wal.truncate_before(4)
        assert wal.first_lsn() == 4
        assert data_of(wal)[0] == b"4"
        with pytest.raises(TruncatedError) as caught:
            wal.read(3)
        assert caught.value.first_seq == 4
        with pytest.raises(TruncatedError):
            list(wal.replay(1))
        wal.truncate_before(2)
        assert wal.first_lsn() == 4, "truncation does not move backwards"
        with pytest.raises(UsageError):
            wal.truncate_before(12)
        wal.truncate_before(11)
        assert data_of(wal) == []
        assert wal.append(b"11") == 11
        assert data_of(wal) == [b"11"]


async def next_async(records: AsyncIterator[WalRecord]) -> int:
    return (await anext(records)).lsn


def test_what_was_truncated_or_cut_is_not_yielded_after_it_was_read_ahead(manager: LedgerManager) -> None:
    with opened(manager) as wal, asyncio.Runner() as loop:
        wal.append_many([b"%d" % number for number in range(1, 21)])
        following: list[Iterator[WalRecord]] = [wal.follow(), wal.replay(), wal.read_many(range(1, 21))]
        waiting: list[AsyncIterator[WalRecord]] = [wal.follow(), wal.replay_async()]
        assert [next(each).lsn for each in following] == [1, 1, 1]
        assert [loop.run(next_async(each)) for each in waiting] == [1, 1]
        wal.truncate_after(10)
        cut: list[Iterator[WalRecord]] = [wal.follow(5), wal.replay(5), wal.read_many([5, 6])]
        assert [next(each).lsn for each in cut] == [5, 5, 5]
        wal.truncate_before(3)
        for each in following:
            with pytest.raises(TruncatedError, match="record 2 ") as truncated:
                next(each)
            assert truncated.value.first_seq == 3
        for later in waiting:
            with pytest.raises(TruncatedError, match="record 2 "):
                loop.run(next_async(later))
        assert [next(each).lsn for each in cut] == [6, 6, 6], "what is kept is yielded"
        walking = wal.follow(8)
        assert next(walking).lsn == 8
        wal.truncate_after(9)
        wal.append_many([b"another 10"])
        assert next(walking).lsn == 9
        with pytest.raises(RewoundError) as rewound:
            next(walking)
        assert rewound.value.seq == 9
        walking.close()


def test_a_reader_that_is_behind_in_the_open_segment_sees_a_truncation(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_reader, "READ_BYTES", 1)
    with opened(manager) as wal:
        for number in range(1, 11):
            wal.append(b"%d" % number)
        batches = wal.replay_batches()
        following = wal.follow(timeout=0)
        assert next(batches).first_seq == next(following).lsn == 1
        wal.truncate_before(6)
        with pytest.raises(TruncatedError):
            next(following)
        with pytest.raises(TruncatedError):
            next(batches)


def test_truncation_deletes_ledgers(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        for _ in range(5):
            wal.append(b"a")
            wal.roll()
        assert len(list(manager.list_ledgers("wal"))) == 6
        wal.truncate_before(5)
        assert len(list(manager.list_ledgers("wal"))) == 2
        assert data_of(wal) == [b"a"]


def test_dropped_records_are_given_again_under_a_higher_generation(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        for number in range(1, 7):
            wal.append(b"%d" % number)
            if number % 2 == 0:
                wal.roll()
        assert wal.generation() == 0
        wal.truncate_after(3)
        assert wal.generation() == 1
        assert data_of(wal) == [b"1", b"2", b"3"]
        assert wal.append(b"new") == 4
        assert data_of(wal) == [b"1", b"2", b"3", b"new"]
        with pytest.raises(UsageError):
            wal.truncate_after(9)
        assert wal.append(b"newer") == 5, "a cut that was refused leaves the log as it was"
    with opened(manager) as wal:
        assert wal.generation() == 1
        assert data_of(wal) == [b"1", b"2", b"3", b"new", b"newer"]


def test_a_cut_may_leave_nothing(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append_many([b"a", b"b"])
        wal.truncate_after(0)
        assert data_of(wal) == []
        assert wal.append(b"c") == 1
        assert data_of(wal) == [b"c"]


def test_a_follower_sees_what_is_appended_across_rolls_until_the_log_is_sealed(manager: LedgerManager) -> None:
    with opened(manager) as wal, opened_reader(manager) as reader:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.extend(record.lsn for record in reader.follow()))
        thread.start()
        for number in range(1, 30):
            wal.append(b"%d" % number)
            if number % 7 == 0:
                wal.roll()
        wait_until(lambda: len(found) == 29)
        wal.seal()
        thread.join()
    assert found == list(range(1, 30))


@pytest.mark.parametrize("rolled", [False, True])
def test_a_follower_that_waits_ends_when_its_log_is_closed(manager: LedgerManager, rolled: bool) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        if rolled:
            wal.close()
        reader = opened_reader(manager)
        errors: list[Exception] = []
        found: list[WalRecord] = []

        def follow() -> None:
            try:
                found.extend(reader.follow())
            except ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        wait_until(lambda: len(found) == 1)
        reader.close()
        thread.join()
        assert len(errors) == 1


def opened_reader(manager: LedgerManager) -> WriteAheadLog:
    return WriteAheadLog.open(manager, "wal", mode="r", password=PASSWORD)


def test_a_follower_of_an_event_loop_sees_what_is_appended(manager: LedgerManager) -> None:
    async def run() -> list[int]:
        with opened(manager) as wal, opened_reader(manager) as reader:
            found: list[int] = []

            async def follow() -> None:
                async for record in reader.follow(2):
                    found.append(record.lsn)  # noqa: PERF401

            task = asyncio.create_task(follow())
            for number in range(20):
                await wal.append_coro(b"%d" % number)
                if number == 10:
                    await asyncio.to_thread(wal.roll)
            await asyncio.to_thread(wal.seal)
            await task
            return found

    assert asyncio.run(run()) == list(range(2, 21))


def test_a_follower_is_told_what_a_cut_dropped(manager: LedgerManager) -> None:
    with opened(manager) as wal, opened_reader(manager) as reader:
        wal.append_many([b"a", b"b", b"c"])
        follower = reader.follow(timeout=60)
        assert [next(follower).lsn for _ in range(3)] == [1, 2, 3]
        wal.truncate_after(1)
        wal.append(b"d")
        with pytest.raises(RewoundError) as caught:
            next(follower)
        assert caught.value.seq == 1
        assert next(reader.follow(2)).data == b"d"


def test_a_follower_with_a_timeout_ends(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        assert [record.lsn for record in wal.follow(timeout=0.01)] == [1]


def test_a_standby_in_another_manager_takes_over(tmp_path: Path) -> None:
    primary = WriteAheadLog.open(tmp_path, password=PASSWORD)
    primary.append_many([b"1", b"2"])
    with WriteAheadLog.open(tmp_path, mode="r", password=PASSWORD) as standby:
        applied = [next(standby.follow())]
        with pytest.raises(IllegalOperationError, match="promote"):
            standby.append(b"x")
        with pytest.raises(StoreLockedError):
            standby.promote()
        primary.append(b"3")
        primary.close()
        standby.promote(applied.append, applied=(0, 1))
        assert [record.data for record in applied] == [b"1", b"2", b"3"]
        assert standby.append(b"4") == 4


def test_a_log_that_is_read_is_never_another_of_its_name(manager: LedgerManager) -> None:
    first = opened(manager)
    first.append_many([b"1", b"2"])
    reader = opened(manager, mode="r")
    follower = reader.follow()
    assert [next(follower).data for _ in range(2)] == [b"1", b"2"]
    first.close()
    WriteAheadLog.delete(manager, "wal", password=PASSWORD)
    with opened(manager) as second:
        second.append_many([b"one", b"two", b"three"])
        applied: list[WalRecord] = []
        uses = (
            lambda: next(follower),
            lambda: list(reader.replay()),
            lambda: reader.promote(applied.append, applied=(0, 2), steal=True),
            lambda: reader.promote(applied.append, steal=True),
            reader.checkpoints,
            lambda: first.first_lsn(),
        )
        for use in uses:
            with pytest.raises(NoSuchLogError, match="'wal'"):
                use()
        assert applied == []
        with pytest.raises(LogLockedError):
            opened(manager)
        assert second.append(b"four") == 4


def test_a_standby_of_a_store_takes_over_no_other_log_of_the_name(tmp_path: Path) -> None:
    primary = LedgerManager.open(tmp_path)
    opened(primary).close()
    with WriteAheadLog.open(tmp_path, mode="r", password=PASSWORD) as standby:
        WriteAheadLog.delete(primary, "wal", password=PASSWORD)
        opened(primary).close()
        primary.close()
        for _ in range(2):
            with pytest.raises(NoSuchLogError, match="'wal'"):
                standby.promote()


def test_a_sealed_log_is_read_and_not_opened_for_writing(manager: LedgerManager) -> None:
    wal = opened(manager)
    wal.append(b"a")
    wal.seal()
    with pytest.raises(ClosedError):
        wal.append(b"b")
    with pytest.raises(LogSealedError):
        opened(manager)
    with opened_reader(manager) as reader:
        assert [record.lsn for record in reader.follow()] == [1], "following ends"


def test_what_cannot_be_is_refused(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    with pytest.raises(UsageError, match="insecure=True"):
        WriteAheadLog.open(manager)
    with pytest.raises(NoSuchLogError):
        opened(manager, create=False)
    with pytest.raises(UsageError, match="mode"):
        opened(manager, mode="a")
    for name in ("", "a//b", "../a", " a", "x" * 121, "a\n", ".a", 5):
        with pytest.raises(UsageError):
            WriteAheadLog.open(manager, name, password=PASSWORD)  # type: ignore[arg-type]
    with opened(manager) as wal:
        for data in ("text", 5, b"x" * (1 << 24)):
            with pytest.raises(UsageError):
                wal.append(data)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            wal.append(b"", time_ns=-1)
        with pytest.raises(UsageError):
            wal.append_many([])
        with pytest.raises(NoSuchEntryError):
            wal.read(1)
        wal.append(b"a")
    with pytest.raises(UnauthorizedError):
        WriteAheadLog.open(manager, "wal", password=b"another")
    with pytest.raises(ClosedError):
        wal.append(b"b")


def test_the_password_comes_from_the_environment(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    with WriteAheadLog.open(manager) as wal:
        wal.append(b"a")
    monkeypatch.delenv("PYBK_PASSWORD")
    with opened(manager) as wal:
        assert data_of(wal) == [b"a"]


def test_a_log_without_a_password_says_so(manager: LedgerManager) -> None:
    with WriteAheadLog.open(manager, "open", insecure=True) as wal:
        wal.append(b"a")
        assert data_of(wal) == [b"a"]


def test_a_checkpoint_is_listed_and_truncates_at_once(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        assert wal.latest_checkpoint() is None
        wal.append_many([b"%d" % number for number in range(1, 11)])
        with wal.checkpoint(4, meta="first") as file:
            file.write(b"state of 4")
        with wal.checkpoint() as file:
            file.write(b"state of 10")
            wal.append(b"11")
        assert [(each.lsn, each.meta) for each in wal.checkpoints()] == [(4, "first"), (10, "")]
        assert wal.first_lsn() == 5
        with pytest.raises(TruncateGuardError):
            wal.truncate_before(6)
        with pytest.raises(TruncateGuardError):
            wal.truncate_after(9)
        with pytest.raises(UsageError, match="older"):
            wal.checkpoint(9)
        with pytest.raises(UsageError, match="so far"):
            wal.checkpoint(12)
    with opened(manager) as wal:
        latest = wal.latest_checkpoint()
        assert latest is not None
        with latest.open() as file:
            assert file.read() == b"state of 10"
        assert [record.data for record in wal.replay(latest.lsn + 1)] == [b"11"]
        with wal.checkpoint(keep=1) as file:
            file.write(b"state of 11")
        assert len(list(manager.list_ledgers("wal"))) == len(wal.ledgers()) + 1


def test_a_checkpoint_of_an_index_keeps_the_records(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append_many([b"%d" % number for number in range(1, 11)])
        for lsn in (2, 5, 10):
            with wal.checkpoint(lsn, truncate=False) as file:
                file.write(b"index of %d" % lsn)
        assert [each.lsn for each in wal.checkpoints()] == [5, 10]
        assert wal.first_lsn() == 1
        with pytest.raises(TruncateGuardError):
            wal.truncate_before(7)
    with opened(manager) as wal:
        assert len(data_of(wal)) == 10
        with wal.checkpoint():
            pass
        assert wal.first_lsn() == 11


def test_reading_one_record_reads_no_entries_after_it(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        for number in range(1, 501):
            wal.append(b"%d" % number)
        big = wal.append_many([b"x" * 40_000] * 10)
        wal.append(b"after")
        before = entries_read(manager)
        assert wal.read(3).data == b"3"
        assert entries_read(manager) - before < 50
        assert {wal.read(lsn).data for lsn in big} == {b"x" * 40_000}
        assert [record.data for record in wal.replay(500, 501)] == [b"500", b"x" * 40_000]
        assert wal.read(big[-1] + 1).data == b"after"


def test_some_records_are_read_wherever_they_are(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        for number in range(1, 401):
            if number % 100 == 50:
                wal.roll()
            wal.append_many([b"%d" % number] * (number % 3 + 1))
        wal.append_many([b"x" * 40_000] * 10)
        data = {record.lsn: record.data for record in wal.replay()}
        source = random.Random(1)
        for _ in range(30):
            lsns = sorted(source.sample(sorted(data), source.randint(1, 20)))
            assert [(record.lsn, record.data) for record in wal.read_many(lsns)] == [(lsn, data[lsn]) for lsn in lsns]
        assert asyncio.run(wal.read_many_async([1, 800])) == [wal.read(1), wal.read(800)]
        assert list(wal.read_many([])) == []
        for wrong in ([2, 1], [3, 3]):
            with pytest.raises(UsageError, match="ascending"):
                list(wal.read_many(wrong))
        with pytest.raises(NoSuchEntryError):
            list(wal.read_many([1, wal.last_lsn() + 1]))
        wal.truncate_before(10)
        with pytest.raises(TruncatedError):
            list(wal.read_many([9, 10]))


def entries_read(manager: LedgerManager) -> int:
    return sum(count for key, count in manager.metrics().counters.items() if key[0] == "read_entries")


def test_a_checkpoint_that_raises_changes_nothing(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        before = len(list(manager.list_ledgers()))
        with suppress(ZeroDivisionError), wal.checkpoint() as file:
            file.write(bytes(3 << 20))
            raise ZeroDivisionError
        assert wal.checkpoints() == []
        assert data_of(wal) == [b"a"]
        assert len(list(manager.list_ledgers())) == before


def test_a_checkpoint_of_a_fenced_writer_is_not_listed(manager: LedgerManager) -> None:
    first = opened(manager)
    first.append(b"a")
    file = first.checkpoint()
    file.write(b"state")
    with opened(manager, steal=True) as second:
        with pytest.raises(PybkError):
            file.commit()
        assert second.checkpoints() == []
        assert len(list(manager.list_ledgers())) == len(second.ledgers())
    with pytest.raises(LogFencedError):
        first.close()
    first.close()


def test_a_sealed_log_that_has_nothing_but_checkpoints_is_deleted_with_them(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        wal.roll()
        with wal.checkpoint(keep=1) as file:
            file.write(b"state")
        wal.seal()
    with WriteAheadLog.open(manager, "wal", mode="r", password=PASSWORD) as sealed:
        assert (sealed.ledgers(), len(sealed.checkpoints())) == ((), 1)
    WriteAheadLog.delete(manager, "wal", password=PASSWORD)
    assert list(manager.list_ledgers()) == []


def test_logs_are_listed_and_deleted(manager: LedgerManager) -> None:
    for name in ("orders/eu", "orders/us", "users"):
        with WriteAheadLog.open(manager, name, password=PASSWORD) as wal:
            wal.append(b"a")
            wal.roll()
            with wal.checkpoint() as file:
                file.write(b"state")
            wal.append(b"b")
    assert WriteAheadLog.names(manager) == ["orders/eu", "orders/us", "users"]
    assert WriteAheadLog.names(manager, "orders/") == ["orders/eu", "orders/us"]
    live = WriteAheadLog.open(manager, "users", password=PASSWORD)
    with pytest.raises(UnauthorizedError):
        WriteAheadLog.delete(manager, "users", password=b"another")
    with pytest.raises(LogLockedError, match="delete the log with steal=True"):
        WriteAheadLog.delete(manager, "users", password=PASSWORD)
    errors: list[str] = []
    seen: list[WalRecord] = []

    def follow() -> None:
        try:
            seen.extend(live.follow())
        except PybkError as error:
            errors.append(type(error).__name__)

    thread = threading.Thread(target=follow)
    thread.start()
    live.append(b"c")
    wait_until(lambda: len(seen) == 2)
    for name in ("orders/eu", "orders/us", "users"):
        WriteAheadLog.delete(manager, name, password=PASSWORD, steal=name == "users")
    thread.join(60)
    assert errors == ["NoSuchLogError"]
    assert WriteAheadLog.names(manager) == []
    assert list(manager.list_ledgers()) == []
    for use in (lambda: live.append(b"d"), live.close):
        with pytest.raises(NoSuchLogError, match="'users'"):
            use()
    with pytest.raises(NoSuchLogError):
        WriteAheadLog.delete(manager, "users", password=PASSWORD)


def test_a_checkpoint_of_records_that_a_cut_dropped_is_refused(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append_many([b"%d" % number for number in range(1, 11)])
        file = wal.checkpoint(keep=1)
        file.write(b"state of 10")
        wal.truncate_after(5)
        assert wal.append(b"new") == 6
        with pytest.raises(RewoundError):
            file.commit()
        assert wal.checkpoints() == []
        assert data_of(wal) == [b"1", b"2", b"3", b"4", b"5", b"new"]
        assert len(list(manager.list_ledgers())) == len(wal.ledgers())


def test_a_fenced_writer_drops_nothing(manager: LedgerManager) -> None:
    first = opened(manager)
    first.append_many([b"a", b"b"])
    with opened(manager, steal=True) as second:
        with pytest.raises(LogFencedError):
            first.truncate_before(2)
        with pytest.raises(LogFencedError):
            first.checkpoint()
        assert data_of(second) == [b"a", b"b"]
        assert len(list(manager.list_ledgers())) == len(second.ledgers())


def wrapped(file: CheckpointWriter) -> io.TextIOWrapper:
    return io.TextIOWrapper(file)  # type: ignore[arg-type]  # it has no name


def test_a_checkpoint_is_committed_by_its_with_alone(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        with suppress(ZeroDivisionError), wal.checkpoint() as file, wrapped(file) as text:
            text.write("half")
            raise ZeroDivisionError
        with pytest.raises(UsageError, match="encode it first"), wal.checkpoint() as file:
            file.write("text")  # type: ignore[arg-type]
        closed = wal.checkpoint()
        closed.write(b"half")
        closed.close()
        for ended in (lambda: closed.write(b"more"), closed.commit):
            with pytest.raises(ClosedError, match="file of the checkpoint of record 1 is closed"):
                ended()
        dropped = wal.checkpoint()
        dropped.write(b"half")
        del dropped
        gc.collect()
        assert wal.checkpoints() == []
        with wal.checkpoint() as file, wrapped(file) as text:
            text.write("whole")
        latest = wal.latest_checkpoint()
        assert latest is not None
        with latest.open() as read:
            assert read.read() == b"whole"


def test_a_checkpoint_that_ends_in_its_with_is_left_as_it_is(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        with wal.checkpoint() as file:
            file.write(b"half")
            file.abort()
            with pytest.raises(ClosedError, match="given up"):
                file.write(b"more")
        assert (wal.checkpoints(), wal.stats().uploads) == ([], 0)
        with wal.checkpoint(meta="whole") as file:
            file.commit()
        assert [each.meta for each in wal.checkpoints()] == ["whole"]


def test_checkpoints_that_were_dropped_or_cancelled_leave_no_ledgers(manager: LedgerManager) -> None:
    async def begin(wal: WriteAheadLog) -> None:
        async with wal.checkpoint_async() as file:
            await file.write_async(b"half")

    async def cancel(wal: WriteAheadLog) -> None:
        task = asyncio.create_task(begin(wal))
        await asyncio.sleep(0)  # until its thread opens the file
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def is_clean(wal: WriteAheadLog) -> bool:
        gc.collect()
        wal.roll()
        return wal.stats().uploads == 0 and len(list(manager.list_ledgers())) == len(wal.ledgers())

    with opened(manager) as wal:
        wal.append(b"a")
        wal.checkpoint().write(b"half")
        wait_until(lambda: is_clean(wal))
        asyncio.run(cancel(wal))
        wait_until(lambda: is_clean(wal))


def test_a_batch_that_nobody_waits_for_becomes_durable(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        future = wal.append_many_async([b"a", b"b"])
        wait_until(future.done)
        assert wal.durable_lsn() == 2


def test_what_a_checkpoint_says_has_a_bound(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"a")
        options: dict[str, Any]
        for options in ({"meta": "x" * 5000}, {"meta": 5}, {"keep": 0}, {"keep": "x"}, {"keep": 1.5}):
            with pytest.raises(UsageError):
                wal.checkpoint(**options)
        assert len(list(manager.list_ledgers())) == 1


def test_an_age_of_centuries_stops_no_timer(manager: LedgerManager) -> None:
    with (
        WriteAheadLog.open(manager, "old", password=PASSWORD, segment_age_s=1e12) as old,
        WriteAheadLog.open(manager, "young", password=PASSWORD, segment_age_s=0.05) as young,
    ):
        old.append(b"a")
        young.append(b"a")
        wait_until(lambda: len(young.ledgers()) == 2)


def test_transactions_of_coroutines_keep_their_order(manager: LedgerManager) -> None:
    async def run() -> None:
        with opened(manager) as wal:

            async def commit(number: int) -> range:
                async with wal.transaction() as transaction:
                    transaction.append(b"%d" % number)
                    transaction.append(b"%d" % number)
                return transaction.lsns

            lsns = await asyncio.gather(*(commit(number) for number in range(50)))
            assert lsns == [range(2 * number + 1, 2 * number + 3) for number in range(50)]
            assert await wal.append_many_coro([b"a", b"b"]) == range(101, 103)
            assert data_of(wal)[:100] == [b"%d" % (number // 2) for number in range(100)]

    asyncio.run(run())


def test_a_replay_that_is_cancelled_raises_nothing_else(manager: LedgerManager) -> None:
    async def replay(wal: WriteAheadLog) -> None:
        async for _ in wal.replay_async():
            pass

    async def run() -> None:
        with opened(manager) as wal:
            wal.append_many([bytes(1000)] * 5000)
            for steps in range(30):
                task = asyncio.create_task(replay(wal))
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await replay(wal)

    asyncio.run(run())


def test_figures_of_a_log_and_of_its_writer(manager: LedgerManager) -> None:
    with opened(manager) as wal, opened_reader(manager) as reader:
        assert (wal.stats().records, wal.stats().appended_records, wal.stats().segments) == (0, 0, 1)
        wal.append_many([bytes(1000)] * 3)
        wal.append(bytes(1000))
        with wal.checkpoint(2) as file:
            file.write(b"state")
            assert wal.stats().uploads == 1
        found = wal.stats()
        assert (found.records, found.appended_records, found.checkpoints, found.uploads) == (2, 4, 1, 0)
        assert 4000 < found.appended_bytes == found.payload_bytes < 4500
        assert found.outstanding_records == 0
        wal.roll()
        wal.append(b"a")
        wal.truncate_after(3)
        assert wal.append(b"b") == 4
        found = asyncio.run(wal.stats_async())
        assert (found.records, found.appended_records, found.segments) == (2, 6, 2)
        assert 4000 < found.appended_bytes < 4600
        assert reader.stats()[:2] == (2, 2)
        assert reader.stats().appended_records == 0
    with opened(manager) as wal:
        assert (wal.stats().appended_records, wal.stats().records) == (0, 2)


def test_a_cut_that_drops_nothing_changes_nothing_for_followers(manager: LedgerManager) -> None:
    with opened(manager) as wal, opened_reader(manager) as reader:
        wal.append_many([b"a", b"b"])
        follower = reader.follow(4, timeout=60)
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(next(follower).data))
        thread.start()
        wal.truncate_after(2)
        assert wal.generation() == 0
        wal.append_many([b"c", b"d"])
        thread.join()
        assert found == [b"d"]


def test_cuts_before_the_first_record_are_forgotten_but_the_last(manager: LedgerManager) -> None:
    with opened(manager) as wal, opened_reader(manager) as reader:
        wal.append_many([b"%d" % number for number in range(1, 11)])
        begun = reader.follow(timeout=60)
        assert [next(begun).lsn for _ in range(10)][-1] == 10
        for last in (4, 5, 6):
            wal.truncate_after(last)
            wal.append_many([b"x"] * 10)
        wal.truncate_before(9)
        with pytest.raises(RewoundError):
            next(begun)
        with pytest.raises(RewoundError):
            next(reader.follow(11, generation=0, timeout=0))
        assert [record.lsn for record in reader.follow(11, generation=3, timeout=0)] == [11, 12, 13, 14, 15, 16]


def test_a_checkpoint_that_a_truncation_overtook_says_so(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append_many([b"%d" % number for number in range(1, 11)])
        file = wal.checkpoint(4)
        wal.truncate_before(8)
        with pytest.raises(UsageError, match="dropped up to 7"):
            file.commit()


def test_the_durable_record_of_a_writer_is_known_without_reading(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager, opened(manager) as wal:
        for number in range(1, 4):
            assert wal.append(b"a") == number
            before = manager.metrics().counters
            assert wal.durable_lsn() == number
            assert manager.metrics().counters == before
            wal.roll()
            assert wal.durable_lsn() == number


def test_a_follower_says_how_far_it_came_and_ends_from_another_thread(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append_many([b"a", b"b", b"c"])
        wal.truncate_after(2)
        wal.append(b"d")
        with opened(manager, mode="r") as reader:
            assert reader.follow(2).applied is None
            follower = reader.follow(2)
            assert next(follower).data == b"b"
            assert follower.applied == (1, 2)
            assert repr(follower) == "<WalFollower of 'wal' after (1, 2)>"
            rest: list[bytes] = []
            thread = threading.Thread(target=lambda: rest.extend(record.data for record in follower))
            thread.start()
            wal.append(b"e")
            wait_until(lambda: follower.applied == (1, 4))
            follower.close()
            thread.join(WAIT_S)
            assert not thread.is_alive()
            assert rest == [b"d", b"e"]
            assert next(follower, None) is None
            with reader.follow(4) as another:
                assert asyncio.run(_first(another)) == b"e"
                assert another.applied == (1, 4)


async def _first(follower: WalFollower) -> bytes:
    return (await anext(follower)).data


def test_checkpoints_have_an_asyncio_form(manager: LedgerManager) -> None:
    async def use() -> None:
        async with opened(manager) as wal:
            await wal.append_many_coro([b"a", b"b"])
            async with wal.checkpoint_async(meta="first") as file:
                await file.write_async(b"a b")
            file = await wal.checkpoint_async()
            await file.write_async(b"given up")
            file.abort()
            async with wal.checkpoint_async() as file:
                file.abort()
            assert [each.meta for each in await wal.checkpoints_async()] == ["first"]
            found = await wal.latest_checkpoint_async()
            assert found is not None
            with found.open() as read:
                assert read.read() == b"a b"
            await wal.append_many_coro([b"c", b"d"])
            assert [len(each.starts) async for each in wal.replay_batches_async()] == [2]
            assert await WriteAheadLog.names_async(manager) == ["wal"]
        await WriteAheadLog.delete_async(manager, "wal", password=PASSWORD)
        assert await WriteAheadLog.names_async(manager) == []

    asyncio.run(use())


@pytest.mark.parametrize("lost", [KeyboardInterrupt(), MetadataUnreachableError("the answer is lost")])
@pytest.mark.parametrize("deletes", [True, False])
def test_a_roll_that_is_repeated_appends_to_the_ledger_that_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: BaseException, deletes: bool
) -> None:
    """Two attempts create ledgers of the same number; the change of the first takes effect during the second (T1)."""
    with LedgerManager.open(tmp_path) as manager:
        backend, wal = backend_of(manager), opened(manager)
        wal.append(b"1")
        write, delayed = backend.write_record, list[tuple[str, bytes | None, int | None]]()

        def write_late(name: str, value: bytes | None, version: int | None) -> int:
            if not delayed:
                delayed.append((name, value, version))
                raise lost
            monkeypatch.undo()
            if not deletes:
                monkeypatch.setattr(manager, "delete_ledger", refused)
            write(*delayed[0])
            return write(name, value, version)

        def refused(ledger_id: int, **_: object) -> None:
            raise StorageRefusedError(f"ledger {ledger_id} cannot be deleted now")

        monkeypatch.setattr(backend, "write_record", write_late)
        with suppress(KeyboardInterrupt, MetadataUnreachableError):
            wal.roll()
        wal.roll()
        monkeypatch.undo()
        assert [wal.append(data) for data in (b"2", b"3")] == [2, 3]
        assert data_of(wal) == [b"1", b"2", b"3"]
        wal.close()
        with opened(manager) as wal:
            assert data_of(wal) == [b"1", b"2", b"3"]


def test_a_roll_that_an_interrupt_kept_from_the_background_is_due_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with WriteAheadLog.open(tmp_path, insecure=True, segment_bytes=1000) as wal:
        monkeypatch.setattr(Background, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wal.append(bytes(2000))
        wal.append(b"the next one")
        wait_until(lambda: len(wal.ledgers()) > 1)


def test_a_follower_outlives_an_empty_ledger_that_goes_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LedgerManager.open(tmp_path) as manager:
        for data in (b"1", b"2"):
            with opened(manager) as wal:
                wal.append(data)
        writer, reader = opened(manager), opened_reader(manager)
        open_segment = LedgerSteps.open_segment

        def late(steps: LedgerSteps, segment: Segment, *, recover: bool = False) -> LedgerReader:
            found = open_segment(steps, segment, recover=recover)
            if segment.is_open and not recover:
                monkeypatch.undo()
                thread = threading.Thread(target=writer.close)
                thread.start()
                thread.join()
            return found

        monkeypatch.setattr(LedgerSteps, "open_segment", late)
        assert list(reader.follow(3, timeout=0.1)) == []
        with opened(manager) as wal:
            wal.append(b"3")
        assert [record.data for record in reader.follow(2, timeout=0.1)] == [b"2", b"3"]


def test_a_log_without_records_is_true_and_a_sealed_one_takes_none(manager: LedgerManager) -> None:
    wal = WriteAheadLog.open(manager, "a", insecure=True)
    assert wal
    assert len(wal) == 0
    wal.append(b"x")
    wal.seal()
    assert wal
    with pytest.raises(ClosedError, match="was sealed here; it takes no more records"):
        wal.append(b"y")


def test_a_log_that_was_sealed_here_says_how_it_is_read(manager: LedgerManager) -> None:
    wal = opened(manager)
    wal.append(b"x")
    wal.seal()
    for read in (lambda: list(wal.replay()), lambda: wal.read(1), lambda: next(wal.follow())):
        with pytest.raises(ClosedError, match=r"was sealed here; .*open it with mode='r' to read it"):
            read()
    with opened_reader(manager) as reader:
        assert [record.data for record in reader.replay()] == [b"x"]


def test_a_promotion_of_a_log_that_is_closed_meanwhile_does_not_pass_for_done(manager: LedgerManager) -> None:
    with opened(manager) as wal:
        wal.append(b"1")
        wal.roll()
        wal.append(b"2")
    reader, applied = opened_reader(manager), list[bytes]()

    def apply(record: WalRecord) -> None:
        applied.append(record.data)
        reader.close()

    with pytest.raises(ClosedError, match="closed"):
        reader.promote(apply)
    assert applied == [b"1"], "the records that are left were not applied"
