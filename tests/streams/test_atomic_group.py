"""Atomic groups over write-ahead logs, named logs, blobs and properties: all of it or nothing, with one sync."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pybk import (
    AtomicGroup,
    BlobStore,
    BlobUpload,
    ClosedError,
    IllegalOperationError,
    LedgerManager,
    Log,
    LogEnd,
    LogFencedError,
    LogSealedError,
    NoSuchBlobError,
    OutOfOrderError,
    Position,
    PybkError,
    UsageError,
    WriteAheadLog,
)
from tests.cluster.inside import inside
from tests.internals import store_of
from tests.interrupting import interrupted_at
from tests.sampling import every, sample
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import abandon, open_world
from tests.waiting import WAIT_S

PASSWORD = b"group"

DYING = (
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
)
"""Warnings about logs that nobody closed, because their process died."""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with LedgerManager.open(tmp_path / "store") as manager:
        yield manager


def wal_of(manager: LedgerManager, name: str = "wal", **options: Any) -> WriteAheadLog:
    return WriteAheadLog.open(manager, name, password=PASSWORD, **options)


def log_of(manager: LedgerManager, name: str = "log") -> Log:
    return Log.open(manager, name, password=PASSWORD)


def blobs_of(manager: LedgerManager) -> BlobStore:
    return BlobStore.open(manager, password=PASSWORD)


def data_of(log: WriteAheadLog | Log) -> list[bytes]:
    records = log.replay() if isinstance(log, WriteAheadLog) else log.reader()
    return [record.data for record in records]


def test_a_group_changes_logs_blobs_and_properties_together(manager: LedgerManager) -> None:
    with wal_of(manager) as wal, log_of(manager) as log, log.writer() as writer, blobs_of(manager) as blobs:
        wal.append(b"before")
        with manager.transaction() as group:
            group.append(wal, b"one")
            group.append(writer, b"two", txid=7, key=b"k", headers=[("a", b"b")], time_ns=5)
            group.append(wal, b"three")
            with blobs.create_blob("picture") as file:
                file.write(b"bytes")
                group.publish(file)
            group.set_properties(log, {"state": "done"})
            assert data_of(wal) == [b"before"]
            assert data_of(log) == []
            assert not blobs.exists("picture")
        assert data_of(wal) == [b"before", b"one", b"three"]
        [record] = log.reader()
        assert (record.data, record.txid, record.key, record.time_ns) == (b"two", 7, b"k", 5)
        assert blobs.get("picture") == b"bytes"
        assert dict(log.properties()) == {"state": "done"}
        assert list(group.results(wal)) == [2, 3]
        assert list(group.results(writer)) == [record.position]
        assert group.results(file) == [blobs.stat("picture")]
        assert wal.append(b"after") == 4
        assert writer.append(b"after") == Position(1, 2, 0, 1)


def test_a_group_is_one_sync(manager: LedgerManager) -> None:
    with wal_of(manager) as wal, log_of(manager) as log, log.writer() as writer:
        commits = store_of(manager).log.durable_lsn
        with manager.transaction() as group:
            for number in range(100):
                group.append(wal, b"%d" % number)
                group.append(writer, b"%d" % number)
        assert store_of(manager).log.durable_lsn == commits + 1
        assert data_of(wal) == data_of(log) == [b"%d" % number for number in range(100)]


def test_a_record_is_consumed_and_its_result_produced_exactly_once(manager: LedgerManager) -> None:
    with (
        log_of(manager, "in") as source,
        log_of(manager, "out") as target,
        source.writer() as producer,
        target.writer() as writer,
    ):
        producer.append_many([b"%d" % number for number in range(10)])
        random, tries = Random(1), 0
        while target.last_seq() < 9:
            with source.subscribe("doubling", start=LogEnd.EARLIEST) as subscription:
                for record in subscription:
                    tries += 1
                    group = manager.transaction()
                    group.append(writer, b"%d" % (2 * int(record.data)))
                    group.ack(subscription, record, properties={"last": record.seq})
                    if random.random() < 0.5:
                        break  # it is handed out again by the next subscription
                    group.commit()
                    assert group.results(subscription) == [1]
                    if record.seq == 9:
                        break
        assert tries > 12
        assert data_of(target) == [b"%d" % (2 * number) for number in range(10)]
        with source.subscribe("doubling") as subscription:
            assert subscription.backlog() == 0
            assert subscription.properties == {"last": 9}


def test_what_cannot_be_acknowledged_fails_the_group(manager: LedgerManager) -> None:
    with log_of(manager) as log, log.writer() as writer, wal_of(manager) as wal:
        writer.append(b"a")
        subscription = log.subscribe("first", start=LogEnd.EARLIEST)
        group = manager.transaction()
        group.append(wal, b"one")
        group.ack(subscription, 7)
        with pytest.raises(UsageError, match="does not exist"):
            group.commit()
        group = manager.transaction()
        group.append(wal, b"two")
        group.ack(subscription, 0)
        other = log.subscribe("first", steal=True)
        with pytest.raises(LogFencedError):
            group.commit()
        assert other.backlog() == 1
        other.close()
        with pytest.raises(LogFencedError):
            subscription.close()
        with log.subscribe("memory", start=LogEnd.EARLIEST, durable=False) as subscription:
            with manager.transaction() as group:
                group.ack(subscription, 0)
            assert subscription.backlog() == 0
        assert data_of(wal) == []


def test_a_group_that_is_given_up_leaves_nothing(manager: LedgerManager) -> None:
    with wal_of(manager) as wal, blobs_of(manager) as blobs:

        class ApplicationError(Exception):
            pass

        def fail() -> None:
            with manager.transaction() as group:
                groups.append(group)
                group.append(wal, b"one")
                with blobs.create_blob("picture") as file:
                    files.append(file)
                    file.write(b"bytes")
                    group.publish(file)
                raise ApplicationError

        groups: list[AtomicGroup] = []
        files: list[BlobUpload] = []
        with pytest.raises(ApplicationError):
            fail()
        [group], [file] = groups, files
        assert data_of(wal) == []
        with pytest.raises(NoSuchBlobError):
            blobs.get("picture")
        with pytest.raises(ClosedError, match="begin another"):
            group.append(wal, b"two")
        with pytest.raises(ClosedError):
            group.commit()
        with pytest.raises(ClosedError):
            file.commit()
        with manager.transaction():
            pass  # nothing at all is committed


def test_a_member_that_takes_nothing_fails_the_group_before_anything_is_staged(manager: LedgerManager) -> None:
    with wal_of(manager) as wal, log_of(manager) as log, blobs_of(manager) as blobs:
        fenced = log.writer()
        blobs.put("old", b"old")

        def commit() -> None:
            with manager.transaction() as group:
                group.append(wal, b"one")
                with blobs.create_blob("new") as file:
                    file.write(b"new")
                    group.publish(file)
                group.set_properties(log, {"state": "done"})
                group.append(fenced, b"two")

        second = log.writer(steal=True)
        with pytest.raises(LogFencedError) as caught:
            commit()
        assert caught.value.outcome_unknown is False
        with pytest.raises(LogFencedError):
            fenced.close()
        second.close()
        group = manager.transaction()
        group.append(wal, b"one")
        group.append(second, b"closed")
        with pytest.raises(ClosedError):
            group.commit()
        log.seal()
        with pytest.raises(LogSealedError):
            log.writer()
        with pytest.raises((LogFencedError, LogSealedError)):
            commit()
        with pytest.raises(UsageError, match="split it"), manager.transaction() as group:
            group.append(wal, b"x" * (5 << 20))
        group = manager.transaction()
        for _ in range(6):
            group.append(wal, b"x" * (3 << 20))
        with pytest.raises(UsageError, match="16777216"):
            group.commit()
        assert data_of(wal) == data_of(log) == []
        assert dict(log.properties()) == {}
        assert [each.name for each in blobs.list()] == ["old"]
        assert wal.append(b"after") == 1
        assert wal.ledgers() == (wal.ledgers()[0],), "no repair was needed"


def test_transaction_ids_are_in_order_in_a_group_too(manager: LedgerManager) -> None:
    with log_of(manager) as log, log.writer() as writer:
        group = manager.transaction()
        group.append(writer, b"a", txid=5)
        group.append(writer, b"b", txid=4)
        with pytest.raises(OutOfOrderError):
            group.commit()
        with manager.transaction() as group:
            group.append(writer, b"c", txid=5)
        assert data_of(log) == [b"c"]
        assert writer.last_txid == 5


def test_wrong_members_say_what_can_be_one(manager: LedgerManager, tmp_path: Path) -> None:
    with (
        wal_of(manager) as wal,
        log_of(manager) as log,
        log.writer() as writer,
        WriteAheadLog.open(tmp_path / "other", insecure=True) as other,
    ):
        group = manager.transaction()
        with pytest.raises(UsageError, match="another store"):
            group.append(other, b"one")
        with pytest.raises(UsageError, match="cannot take part"):
            group.append(object(), b"one")
        with pytest.raises(UsageError, match="encode text first"):
            group.append(wal, "one")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="no txid"):
            group.append(wal, b"one", txid=4)
        with pytest.raises(UsageError, match="options of a record"):
            group.append(writer, b"one", id=4)
        with pytest.raises(UsageError, match="mapping of names"):
            group.set_properties(log, {"a": 1})
        with pytest.raises(UsageError, match=r"takes append\(\) in a group, not ack\(\)"):
            group.ack(wal, b"one")
        with pytest.raises(UsageError, match=r"takes set_properties\(\) in a group, not append\(\)"):
            group.append(log, b"one")
        group.commit()
        assert data_of(wal) == data_of(log) == []


def test_over_ensembles_a_group_is_refused_unless_it_is_one_log(tmp_path: Path) -> None:
    with (
        inside(tmp_path) as cluster,
        cluster.connect() as manager,
        wal_of(manager) as wal,
        log_of(manager) as log,
        log.writer() as writer,
    ):
        with manager.transaction() as group:
            group.append(writer, b"one")
            group.append(writer, b"two", key=b"k")
        assert data_of(log) == [b"one", b"two"]
        assert [each.seq for each in group.results(writer)] == [0, 1]
        group = manager.transaction()
        group.append(writer, b"three")
        group.append(wal, b"three")
        with pytest.raises(IllegalOperationError, match="one log only, or use an embedded store"):
            group.commit()
        group = manager.transaction()
        group.set_properties(log, {"a": "b"})
        with pytest.raises(IllegalOperationError):
            group.commit()
        assert (data_of(log), data_of(wal)) == ([b"one", b"two"], [])


def test_groups_and_appends_of_many_threads_rolls_and_property_changes_do_not_block_each_other(
    manager: LedgerManager,
) -> None:
    with (
        wal_of(manager, "one", segment_bytes=2000) as one,
        wal_of(manager, "two", segment_bytes=3000) as two,
        log_of(manager) as log,
    ):
        errors: list[BaseException] = []
        until = time.monotonic() + WAIT_S
        turns = Counter[int]()

        def has_turns(number: int) -> bool:
            """Return whether a thread continues: all of them do until the log has rolled twice while they work."""
            return turns[number] < 30 or (len(one.ledgers()) <= 2 and time.monotonic() < until)

        def work(number: int) -> None:
            try:
                while has_turns(number):
                    turn = turns[number]
                    with manager.transaction() as group:
                        for wal in (one, two) if number % 2 else (two, one):
                            group.append(wal, b"%d %d" % (number, turn))
                        group.set_properties(log, {f"turn {number}": str(turn)})
                    one.append(b"alone")
                    turns[number] += 1
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        in_one = [data for data in data_of(one) if data != b"alone"]
        assert in_one == data_of(two)
        assert len(in_one) == turns.total()
        assert dict(log.properties()) == {f"turn {number}": str(turns[number] - 1) for number in range(4)}
        assert len(one.ledgers()) > 2, "it rolled while others worked"


def test_groups_have_an_asyncio_form(manager: LedgerManager) -> None:
    async def use() -> None:
        async with wal_of(manager) as wal:
            async with manager.transaction() as group:
                group.append(wal, b"one")
            second = manager.transaction()
            second.append(wal, b"two")
            await second.commit_async()
            with suppress(ZeroDivisionError):
                async with manager.transaction() as group:
                    group.append(wal, b"three")
                    raise ZeroDivisionError
            assert data_of(wal) == [b"one", b"two"]

    asyncio.run(use())


# ---- crashes and faults ----------------------------------------------------------------------------------------------


class Model:
    """What groups did: each puts its number into two logs, a blob and a property."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self.begun = 0

    def check(self, manager: LedgerManager) -> int:
        """Check that all parts of the store say the same; returns how many groups there are."""
        with open_members(manager) as (wal, log, blobs):
            found = data_of(wal)
            assert found == [b"%d" % number for number in range(1, len(found) + 1)]
            assert data_of(log) == found
            assert self.acknowledged <= len(found) <= self.begun
            assert log.properties().get("last", "0") == str(len(found))
            assert (blobs.get("last") if blobs.exists("last") else b"0") == b"%d" % len(found)
        return len(found)


class open_members:  # noqa: N801  # used like a function
    """Open a write-ahead log, a log and a blob store of a simulated disk; closes the two logs."""

    def __init__(self, manager: LedgerManager) -> None:
        self.wal = WriteAheadLog.open(manager, "wal", insecure=True)
        self.log = Log.open(manager, "log", insecure=True)
        self.blobs = BlobStore.open(manager, insecure=True, keep=1)

    def __enter__(self) -> tuple[WriteAheadLog, Log, BlobStore]:
        return self.wal, self.log, self.blobs

    def __exit__(self, *_: object) -> None:
        self.wal.close()
        self.log.close()


def work(manager: LedgerManager, model: Model, random: Random) -> Iterator[None]:
    """Commit groups for ever; sometimes roll or checkpoint between them; yields after each."""
    wal = WriteAheadLog.open(manager, "wal", insecure=True)
    log = Log.open(manager, "log", insecure=True)
    blobs = BlobStore.open(manager, insecure=True, keep=1)
    writer = log.writer()
    number = wal.last_lsn()
    while True:
        number += 1
        model.begun = max(model.begun, number)
        group = manager.transaction()
        with blobs.create_blob("last") as file:
            file.write(b"%d" % number)
            group.publish(file)
        group.append(wal, b"%d" % number)
        group.append(writer, b"%d" % number, key=b"k")
        group.set_properties(log, {"last": str(number)})
        group.commit()
        model.acknowledged = number
        chance = random.random()
        if chance < 0.2:
            wal.roll()
        elif chance < 0.4:
            writer.roll()
        elif chance < 0.5:
            manager.checkpoint()
        yield


def run(fs: SimFileSystem, model: Model, seed: int, steps: int = 8) -> None:
    manager: LedgerManager | None = None
    try:
        manager = open_world(fs)
        for _ in islice(work(manager, model, Random(seed)), steps):
            pass
    finally:
        if manager is not None:
            abandon(manager)
            store_of(manager).ended = True


@pytest.mark.sampled(one_in=2)
@pytest.mark.filterwarnings(*DYING)
@pytest.mark.parametrize("seed", range(2))
def test_a_group_is_whole_or_absent_when_the_machine_stops_at_any_operation(seed: int) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), seed)
    found = set()
    for operation in range(seed, len(whole.operations), every(13)):
        fs, model = SimFileSystem(operation), Model()
        fs.crash_at(operation)
        with suppress(SimCrash, PybkError):
            run(fs, model, seed)
        manager = open_world(fs.crash() if operation % 2 else fs.kill())
        found.add(model.check(manager))
        for _ in islice(work(manager, model, Random(seed)), 2):
            pass
        abandon(manager)
        store_of(manager).ended = True
    assert len(found) > 4, "the stops hardly hit groups"


@pytest.mark.sampled
@pytest.mark.filterwarnings(*DYING)
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_a_group_is_whole_or_absent_when_any_operation_fails(error: ErrorName) -> None:
    whole = SimFileSystem(0)
    run(whole, Model(), 0)
    for operation in sample(f"group {error}", range(0, len(whole.operations), every(13)), 3):
        fs, model = SimFileSystem(operation), Model()
        fs.fail_at(operation, error, forever=bool(operation % 2))
        with suppress(PybkError):
            run(fs, model, 0)
        manager = open_world(fs.kill())
        model.check(manager)
        abandon(manager)
        store_of(manager).ended = True


def test_an_interrupt_at_any_line_leaves_no_ledger_of_a_blob(manager: LedgerManager) -> None:
    with wal_of(manager) as wal, BlobStore.open(manager, password=PASSWORD, grace_s=0) as blobs:
        line, fired = 0, True
        while fired:
            group = manager.transaction()
            group.append(wal, b"one")
            upload = blobs.create_blob(f"blob {line}")
            upload.write(b"bytes")
            group.publish(upload)
            fired = interrupted_at(line, ("pybk/manager/atomic_group.py",), group.commit)
            group.abort()  # does nothing once the commit has begun
            blobs.sweep()
            assert len(list(manager.list_ledgers())) == len(wal.ledgers()) + len(blobs.list()), line
            line += 1
        assert 0 < len(blobs.list()) < line, "some interrupts come before the group is staged, some after"
        assert all(blobs.get(each.name) == b"bytes" for each in blobs.list())


@pytest.mark.sampled(one_in=3, group="any line")
def test_an_interrupt_at_any_line_leaves_the_group_whole_or_absent(manager: LedgerManager) -> None:
    with wal_of(manager) as wal, log_of(manager) as log, log.writer() as writer:
        files = (
            "pybk/manager/atomic_group.py",
            "streams/appender.py",
            "streams/group_members.py",
            "transaction_group.py",
        )
        line, fired, step = 0, True, every(3)
        while fired:
            group = manager.transaction()
            group.append(wal, b"%d" % line)
            group.append(writer, b"%d" % line)
            fired = interrupted_at(line, files, group.commit)
            wal.append(b"alone")
            writer.append(b"alone")
            assert wal.last_lsn() == writer.last_seq + 1, line
            line += step
        found = data_of(wal)
        assert found == data_of(log)
        assert found[-2:] == [b"%d" % (line - step), b"alone"], "without an interrupt the group is there"
        assert line > 100
        assert line < step * len(found) < 2 * line, "some interrupts come before the group is staged, some after"
