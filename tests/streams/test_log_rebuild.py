"""A named log whose record is lost is made again from its ledgers, with all that its records carry."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd, Namespace, NewRecord, OutOfOrderError, TxId, WriteAheadLog
from pybk.admin.cli import main
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    LogFencedError,
    NoSuchLogError,
    TruncateGuardError,
    UnauthorizedError,
    UsageError,
)
from pybk.manager.ledger_manager import backend_of
from pybk.streams.list_record import ListKind, new_list
from tests.storage.real_store import python_path
from tests.streams.test_log import PASSWORD, data_of, opened

RECORD = "logs/log"
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def lose_record(manager: LedgerManager, name: str = RECORD) -> None:
    found = backend_of(manager).read_record(name)
    assert found is not None
    backend_of(manager).write_record(name, None, found.version)


def rolled_log(log: Log) -> None:
    """Append three segments of an entry with one record, and one with two each."""
    with log.writer() as writer:
        for number in range(0, 9, 3):
            times = [int((DAY + timedelta(hours=each)).timestamp()) * 10**9 for each in range(number, number + 3)]
            writer.append(b"%d" % number, txid=number * 10, time_ns=times[0], key=b"k")
            writer.append_many(
                NewRecord(b"%d" % each, each * 10, headers=[("h", b"v")], time_ns=times[each - number])
                for each in (number + 1, number + 2)
            )
            writer.roll()


def test_a_rebuilt_log_keeps_all_that_records_carry(manager: LedgerManager) -> None:
    with opened(manager) as log:
        rolled_log(log)
        log.truncate(1)
        with log.subscribe("sub", start=3) as subscription:
            subscription.ack([3, 5])
        log.set_properties({"owner": "team"})
        before = list(log.reader())
    lose_record(manager)
    assert Log.sweep(manager, password=PASSWORD) == [], "those of a lost log are kept"
    with pytest.raises(NoSuchLogError):
        opened(manager, create=False)
    with pytest.raises(UnauthorizedError):
        Log.rebuild(manager, "log", password=b"another")
    found = Log.rebuild(manager, "log", password=PASSWORD)
    assert (found.first_seq, found.last_seq, len(found.ledgers), found.checkpoints) == (0, 8, 3, ())
    assert any("properties" in each for each in found.not_restored)
    with pytest.raises(IllegalOperationError, match="sound"):
        Log.rebuild(manager, "log", password=PASSWORD)
    with opened(manager) as log:
        assert list(log.reader(1)) == before
        for each in before:
            assert log.read(each.position) == each
            assert each.txid is not None
            assert log.position_for(TxId(each.txid)) == log.position_for(TxId(each.txid - 9)) == each.position
            assert log.position_for(DAY + timedelta(hours=each.seq)) == each.position
        assert (log.subscriptions(), dict(log.properties())) == (["sub"], {})
        with pytest.raises(TruncateGuardError, match="sub"):
            log.truncate(5)
        with log.subscribe("sub", start=LogEnd.LATEST) as subscription:
            assert subscription.unacked_ranges() == [range(4, 5), range(6, 9)], "what it had acknowledged is known"
        with log.writer() as writer:
            assert writer.last_txid == 80
            with pytest.raises(OutOfOrderError):
                writer.append(b"", txid=79)
            assert writer.append(b"9", txid=80).seq == 9
            assert log.position_for(TxId(81)) is None


def test_a_living_writer_is_fenced_and_what_it_appended_is_there(manager: LedgerManager) -> None:
    log = opened(manager)
    writer = log.writer()
    writer.append_many([b"a", b"b"])
    lose_record(manager)
    assert asyncio.run(Log.rebuild_async(manager, "log", password=PASSWORD)).last_seq == 1
    with pytest.raises(LogFencedError):
        writer.append(b"c")
    with pytest.raises(LogFencedError):
        log.close()
    with opened(manager) as log:
        assert data_of(log) == [b"a", b"b"]


def test_missing_records_are_given_up_on_demand_alone(manager: LedgerManager) -> None:
    with opened(manager) as log:
        rolled_log(log)
        middle = log.segments()[1].ledger_id
    lose_record(manager)
    manager.delete_ledger(middle, password=PASSWORD)
    with pytest.raises(CorruptError, match="records 3 to 5"):
        Log.rebuild(manager, "log", password=PASSWORD)
    with pytest.raises(UsageError):
        Log.rebuild(manager, "log", password=PASSWORD, first_seq=-1)
    found = Log.rebuild(manager, "log", password=PASSWORD, first_seq=6)
    assert (found.first_seq, found.last_seq, len(found.left_out)) == (6, 8, 1)
    assert Log.sweep(manager, password=PASSWORD) == list(found.left_out)
    with opened(manager) as log:
        assert data_of(log) == [b"6", b"7", b"8"]
        with log.reader(0) as reader:
            assert reader.skipped == 6
        assert log.position_for(TxId(0)) == log.read(6).position


def test_a_damaged_record_is_replaced(manager: LedgerManager) -> None:
    with opened(manager) as log:
        rolled_log(log)
    found = backend_of(manager).read_record(RECORD)
    assert found is not None
    backend_of(manager).write_record(RECORD, b"{}", found.version)
    with pytest.raises(CorruptError):
        opened(manager)
    assert Log.rebuild(manager, "log", password=PASSWORD).last_seq == 8
    with opened(manager) as log:
        assert len(log) == 9


def garble_record(manager: LedgerManager, name: str) -> None:
    found = backend_of(manager).read_record(name)
    assert found is not None
    backend_of(manager).write_record(name, b"{}", found.version)


def garble_invariant(manager: LedgerManager, name: str) -> None:
    found = backend_of(manager).read_record(name)
    assert found is not None
    wrong = re.sub(rb'"end_seq":\d', b'"end_seq":9', found.value)
    assert wrong != found.value
    backend_of(manager).write_record(name, wrong, found.version)


@pytest.mark.parametrize("harm", [garble_record, garble_invariant, lose_record])
@pytest.mark.parametrize("kind", ["log", "wal"])
def test_the_command_that_the_error_of_a_damaged_or_lost_record_names_makes_it_again(
    kind: str,
    harm: Callable[[LedgerManager, str], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    open_kind: Callable[..., Log | WriteAheadLog] = Log.open if kind == "log" else WriteAheadLog.open
    with LedgerManager.open(tmp_path) as manager:
        with open_kind(manager, "my log", password=PASSWORD) as log, ExitStack() as stack:
            writer = log if isinstance(log, WriteAheadLog) else stack.enter_context(log.writer())
            writer.append(b"a")
            writer.append(b"b")
        harm(manager, f"{kind}s/my log")
        refused = pytest.raises((CorruptError, NoSuchLogError))
        with refused as raised, open_kind(manager, "my log", create=False, password=PASSWORD) as log:
            len(log)
    (command,) = re.findall(r"`pybk ([^`]+)`", str(raised.value))
    words = [str(tmp_path) if word == "PATH" else word for word in shlex.split(command)]
    assert main(words) == 0, capsys.readouterr()
    with LedgerManager.open(tmp_path) as manager, open_kind(manager, "my log", password=PASSWORD) as log:
        assert len(log) == 2


@pytest.mark.parametrize("kind", ["log", "wal"])
def test_a_log_whose_record_was_lost_is_not_made_anew(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    open_kind: Callable[..., Log | WriteAheadLog] = Log.open if kind == "log" else WriteAheadLog.open
    with LedgerManager.open(tmp_path) as manager:
        for name in ("my log", "other"):
            with open_kind(manager, name, password=PASSWORD) as log, ExitStack() as stack:
                writer = log if isinstance(log, WriteAheadLog) else stack.enter_context(log.writer())
                writer.append(b"a")
        lose_record(manager, f"{kind}s/my log")
    with LedgerManager.open(tmp_path) as manager:
        with open_kind(manager, "a new one", password=PASSWORD):
            pass
        with pytest.raises(CorruptError) as raised:
            open_kind(manager, "my log", password=PASSWORD)
        if kind == "log":
            with Namespace.open(manager, password=PASSWORD) as logs, pytest.raises(CorruptError, match="has no record"):
                logs.create("my log")
    (command,) = re.findall(r"`pybk ([^`]+)`", str(raised.value))
    assert main([str(tmp_path) if word == "PATH" else word for word in shlex.split(command)]) == 0, capsys.readouterr()
    with LedgerManager.open(tmp_path) as manager, open_kind(manager, "my log", password=PASSWORD) as log:
        assert len(log) == 1


WRITE_AND_DIE = """
import os, sys
from pybk import LedgerManager, Log, WriteAheadLog
manager = LedgerManager.open(sys.argv[1])
wal = WriteAheadLog.open(manager, "my log")
wal.append(b"a")
log = Log.open(manager, "my log")
writer = log.writer()
writer.append(b"a")
manager.checkpoint()
os._exit(0)
"""


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("kind", ["log", "wal"])
def test_the_command_that_the_error_of_lost_records_names_lets_the_log_be_made_again(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    command = [sys.executable, "-c", WRITE_AND_DIE, str(tmp_path)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": python_path()}, check=True)
    for path in [*tmp_path.glob("nvme/*.cold"), *tmp_path.glob("nvme/*.log"), *tmp_path.glob("ssd/entries/*")]:
        path.unlink()
    assert main(["store", "rebuild-index", str(tmp_path), "--accept-loss"]) == 0, capsys.readouterr()

    def append(manager: LedgerManager) -> None:
        with ExitStack() as stack:
            if kind == "wal":
                stack.enter_context(WriteAheadLog.open(manager, "my log", password=PASSWORD)).append(b"b")
            else:
                log = stack.enter_context(Log.open(manager, "my log", password=PASSWORD))
                stack.enter_context(log.writer()).append(b"b")

    with LedgerManager.open(tmp_path) as manager, pytest.raises(CorruptError) as raised:
        append(manager)
    (named,) = re.findall(r"`pybk ([^`]+)`", str(raised.value))
    words = [str(tmp_path) if word == "PATH" else word for word in shlex.split(named)]
    assert main([*words, "--yes"]) == 0, capsys.readouterr()
    with LedgerManager.open(tmp_path) as manager:
        assert len(list(manager.list_ledgers())) == 1, "that of the other log"
        append(manager)


def test_the_name_of_a_log_whose_ledgers_were_deleted_after_its_record_was_lost_is_free(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        with Log.open(manager, "log", password=PASSWORD) as log, log.writer() as writer:
            writer.append(b"a")
        lose_record(manager)
    with LedgerManager.open(tmp_path) as manager:
        with pytest.raises(CorruptError, match="to begin anew without them, delete these ledgers first"):
            Log.open(manager, "log", password=PASSWORD)
        for ledger_id in list(manager.list_ledgers()):
            manager.delete_ledger(ledger_id)
        with Log.open(manager, "log", password=PASSWORD) as log:
            assert len(log) == 0


def test_a_log_that_was_made_in_place_of_a_lost_one_and_not_written_is_replaced_by_it(manager: LedgerManager) -> None:
    with opened(manager) as log:
        rolled_log(log)
        before = list(log.reader())
    lose_record(manager)
    with pytest.raises(NoSuchLogError):
        opened(manager, create=False)
    backend_of(manager).write_record(RECORD, new_list("log", ListKind.LOG, bytes(16), 0).encode(), None)
    with opened(manager) as empty, empty.subscribe("sub") as subscription:
        assert len(empty) == 0
        assert subscription.name == "sub"
    Log.rebuild(manager, "log", password=PASSWORD)
    with opened(manager) as log:
        assert [each.data for each in log.reader()] == [each.data for each in before]
        assert list(log.subscriptions()) == ["sub"]
    with pytest.raises(IllegalOperationError, match="sound record"):
        Log.rebuild(manager, "log", password=PASSWORD)


def test_a_sound_log_without_ledgers_is_not_made_again(manager: LedgerManager) -> None:
    with opened(manager), pytest.raises(IllegalOperationError, match="sound record"):
        Log.rebuild(manager, "log", password=PASSWORD)


def test_what_a_dead_process_left_is_swept_and_nothing_else(manager: LedgerManager) -> None:
    with opened(manager) as log, log.writer() as writer, log.subscribe("sub", start=LogEnd.EARLIEST) as subscription:
        writer.append(b"a")
        kept = set(manager.list_ledgers())
        of_type = {
            kind: next(each for each in manager.list_ledgers() if manager.ledger_metadata(each).ledger_type == kind)
            for kind in ("log", "cursor")
        }
        orphans = [
            manager.create_ledger(
                password=PASSWORD,
                ledger_type=kind,
                custom_metadata=manager.ledger_metadata(ledger_id).custom_metadata,
            ).ledger_id
            for kind, ledger_id in of_type.items()
        ]
        stranger = manager.create_ledger(password=PASSWORD, ledger_type="log").ledger_id
        assert Log.sweep(manager, "other", password=PASSWORD) == []
        assert sorted(Log.sweep(manager, password=PASSWORD)) == sorted(orphans)
        assert set(manager.list_ledgers()) == kept | {stranger}
        assert asyncio.run(Log.sweep_async(manager, password=PASSWORD)) == []
        record = subscription.read()
        assert record is not None
        subscription.ack(record)
        writer.append(b"b")
