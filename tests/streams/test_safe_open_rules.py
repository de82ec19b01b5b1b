"""The numbered rules of opening and changing logs on ledgers, each of which a system was built without.

Rules 3 to 7 and 9 are those of the reports in ``test_incidents``: pravega#1900, pravega#4721, pravega#1439, herddb#100
and #610, bookkeeper#2273, majordodo#51.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    CorruptError,
    DigestMismatchError,
    LedgerManager,
    Log,
    LogFencedError,
    PybkError,
    StorageFailedError,
    VersionConflictError,
    WalRecord,
    WriteAheadLog,
)
from pybk.manager.ledger_manager import backend_of
from pybk.streams import ledger_list
from pybk.streams.ledger_list import CloseLedger
from pybk.streams.list_record import ListKind
from pybk.streams.list_writer import ListWriter
from pybk.streams.log_settings import RollPolicy, spec_of
from tests.internals import store_of
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import abandon, open_world

PASSWORD = b"rules"


def opened(manager: LedgerManager, **options: Any) -> WriteAheadLog:
    return WriteAheadLog.open(manager, "wal", password=PASSWORD, **options)


def data_of(wal: WriteAheadLog) -> list[bytes]:
    return [record.data for record in wal.replay()]


def ledgers_of(manager: LedgerManager) -> set[int]:
    return {each.ledger_id for each in backend_of(manager).ledgers()}


def test_rule_1_a_ledger_that_the_list_does_not_name_takes_no_records(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer whose compare-and-set is lost deletes its own new ledger, and decides anew."""
    opened(manager).close()
    backend = backend_of(manager)
    write, made = backend.write_record, list[set[int]]()

    def lose_once(name: str, value: bytes | None, version: int | None) -> int:
        made.append(ledgers_of(manager))
        if len(made) > 1:
            return write(name, value, version)
        found = backend.read_record(name)
        assert found is not None
        write(name, found.value, found.version)  # as another process that changes it first
        raise VersionConflictError("the record has another version")

    monkeypatch.setattr(backend, "write_record", lose_once)
    with opened(manager) as wal:
        assert len(made) > 1
        assert made[0].isdisjoint(wal.ledgers()), "the first ledger was not listed"
        assert wal.append(b"a") == 1
        assert set(wal.ledgers()) == ledgers_of(manager), "it is gone"


class Stopped(Exception):  # noqa: N818
    """Ends an operation where a process died."""


def stopped_before(kind: type, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Perform an operation up to a step of a kind."""
    answer = None
    while True:
        step = steps.send(answer)
        if isinstance(step, kind):
            raise Stopped
        answer = yield step


def test_rule_2_both_ledgers_that_a_roll_overlaps_are_fenced(manager: LedgerManager) -> None:
    opened(manager).close()
    writer = ListWriter(manager, "wal", spec_of(ListKind.WAL, PASSWORD, None, insecure=False), RollPolicy())
    writer.take_over(wait_s=0.0, steal=False)
    writer.append(b"old", None, kick=False).result()
    segment = writer.appender.segment
    assert segment is not None
    roll = ledger_list.roll("wal", writer.appender.epoch, segment.number, time.time_ns)
    with suppress(Stopped):
        writer.steps.perform(stopped_before(CloseLedger, roll))
    writer.append(b"new", None, kick=False).result()
    before = writer.steps.existing().record.open_segments
    assert [each.number for each in before] == [segment.number, segment.number + 1]
    with opened(manager, steal=True) as wal:
        assert data_of(wal) == [b"old", b"new"]
        for each in before:
            assert manager.ledger_metadata(each.ledger_id).state.name == "CLOSED"
        with pytest.raises(LogFencedError):
            writer.append(b"late", None, kick=False).result()
        assert data_of(wal) == [b"old", b"new"]
    with pytest.raises(LogFencedError):
        writer.close()


def test_rule_8_a_ledger_is_deleted_only_once_no_list_names_it(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = []

    def listed() -> set[int]:
        with suppress(PybkError), WriteAheadLog.open(manager, "wal", mode="r", password=PASSWORD) as reader:
            return set(reader.ledgers())
        return set()

    delete: Callable[..., None] = manager.delete_ledger

    def delete_ledger(ledger_id: int, **options: Any) -> None:
        assert ledger_id not in listed()
        deleted.append(ledger_id)
        delete(ledger_id, **options)

    monkeypatch.setattr(manager, "delete_ledger", delete_ledger)
    with opened(manager) as wal:
        for number in range(4):
            wal.append(b"%d" % number)
            wal.roll()
        first = wal.ledgers()
        wal.truncate_before(3)
        assert deleted == list(first[:2])
    WriteAheadLog.delete(manager, "wal", password=PASSWORD)
    assert ledgers_of(manager) == set()
    assert len(deleted) > 3


def test_rule_10_a_follower_keeps_its_place_over_ledgers_of_any_length(manager: LedgerManager) -> None:
    """HerdDB begins in the next ledger after the offset that it had in the one before."""
    lengths = [1, 7, 2, 30, 1, 1, 12, 3]
    with opened(manager) as wal:
        for length in lengths:
            wal.append_many([b"%d" % (wal.last_lsn() + 1 + number) for number in range(length)])
            wal.roll()
        last = sum(lengths)
        for begin in range(1, last + 1):
            with wal.follow(begin, timeout=0) as follower:
                assert [record.lsn for record in follower] == list(range(begin, last + 1))
        with wal.follow(timeout=60) as follower:
            for lsn in range(1, last + 1):
                assert next(follower) == WalRecord(lsn, b"%d" % lsn, None)
            wal.append(b"more")
            assert next(follower).lsn == last + 1


def test_rule_11_a_failed_sync_is_told_to_all_that_wait_and_ends_the_log() -> None:
    fs = SimFileSystem(0)
    manager = open_world(fs)
    wal = WriteAheadLog.open(manager, "wal", insecure=True)
    wal.append(b"before")
    fs.fail_at(0, "EIO", forever=True)
    with ThreadPoolExecutor(8) as threads:
        results = [threads.submit(wal.append, b"%d" % number) for number in range(8)]
        errors = [each.exception(60) for each in results]
    assert all(isinstance(error, StorageFailedError) for error in errors), errors
    with pytest.raises(StorageFailedError):
        wal.append(b"later")
    with suppress(PybkError):
        wal.close()
    abandon(manager)
    store_of(manager).ended = True
    manager = open_world(fs.kill())
    with WriteAheadLog.open(manager, "wal", insecure=True) as wal:
        assert data_of(wal)[0] == b"before"
    manager.close()


def test_rule_12_a_promotion_returns_once_everything_is_applied(manager: LedgerManager) -> None:
    primary = opened(manager)
    standby = opened(manager, mode="r")
    futures = [primary.append_async(b"%d" % number) for number in range(200)]
    applied = []
    with standby.follow(timeout=0) as follower:
        applied += [record.lsn for record in follower]
        place = follower.applied
    standby.promote(lambda record: applied.append(record.lsn), applied=place, steal=True)
    end = len(applied)
    assert applied == list(range(1, end + 1))
    acknowledged = 0
    for future in futures:
        with suppress(LogFencedError):
            acknowledged = future.result(60)
    assert acknowledged <= end == standby.last_lsn()
    with pytest.raises(LogFencedError):
        primary.append(b"late")
    assert standby.append(b"first") == end + 1
    standby.close()
    with pytest.raises(LogFencedError):
        primary.close()


def test_pravega_665_a_truncated_record_is_gone_although_its_entry_has_others(manager: LedgerManager) -> None:
    with Log.open(manager, "log", password=PASSWORD) as log, log.writer() as writer:
        writer.append_many([b"a", b"b", b"c"])
        log.truncate(1)
        assert [record.data for record in log.reader(0)] == [b"b", b"c"]


@pytest.mark.parametrize("number", [5, 19])
def test_tidwall_21_damage_is_not_taken_for_a_torn_end(tmp_path: Path, number: int) -> None:
    """What was acknowledged is known to be durable, so damage to it is reported, also to the last record.

    ``test_wal_crash`` has ends that are torn: those are cut.
    """
    with LedgerManager.open(tmp_path / "store") as manager, opened(manager) as wal:
        for each in range(20):
            wal.append(b"record number %d." % each)
        shutil.copytree(tmp_path / "store", tmp_path / "copy", ignore=shutil.ignore_patterns("*lock*"))
    assert len(read_all(tmp_path / "store")) == 20
    change(tmp_path / "copy", b"record number %d." % number)
    with pytest.raises((CorruptError, DigestMismatchError)):
        read_all(tmp_path / "copy")


def change(store: Path, text: bytes) -> None:
    """Change a byte of a text in a file of a store."""
    for path in store.rglob("*.log"):
        at = path.read_bytes().find(text)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"X")
            return
    raise AssertionError(f"{text!r} is in no file")


def read_all(store: Path) -> list[bytes]:
    with LedgerManager.open(store) as manager, opened(manager) as wal:
        return data_of(wal)
