"""How often the record of a log is decoded: once for each change by another process, however long it is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk import LedgerManager, Log
from pybk.credentials import Credentials
from pybk.manager.ledger_manager import backend_of
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind, ListRecord
from pybk.streams.log_settings import LedgerSpec, LogSettings
from tests.waiting import WAIT_S

PASSWORD = b"steps"
SEGMENTS = 60
ROUNDS = 10


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with LedgerManager.open(tmp_path / "store") as manager:
        yield manager


@pytest.fixture
def log(manager: LedgerManager) -> Iterator[Log]:
    with Log.open(manager, "log", password=PASSWORD) as log:
        with log.writer() as writer:
            for _ in range(SEGMENTS):
                writer.append(b"record")
                writer.roll()
        yield log


@pytest.fixture
def decoded(log: Log, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each decoding of a record in this thread adds; logs of other tests may end meanwhile."""
    assert len(log.segments()) == SEGMENTS
    found: list[str] = []
    decode, thread = ListRecord.decode, threading.get_ident()

    def counted(data: bytes, *, where: str) -> ListRecord:
        if threading.get_ident() == thread:
            found.append(where)
        return decode(data, where=where)

    monkeypatch.setattr(ListRecord, "decode", counted)
    return found


def test_a_record_that_did_not_change_is_decoded_once(log: Log, decoded: list[str]) -> None:
    for _ in range(5):
        assert log.last_seq() == SEGMENTS - 1
    assert not decoded


def test_a_change_by_another_is_decoded(manager: LedgerManager, log: Log, decoded: list[str]) -> None:
    with Log.open(manager, "log", password=PASSWORD) as other:
        other.set_properties({"changed": "by another"})
        decoded.clear()
        assert log.properties()["changed"] == "by another"
        assert log.properties()["changed"] == "by another"
    assert len(decoded) == 1


def test_a_writer_does_not_decode_each_of_its_own_changes(log: Log, decoded: list[str]) -> None:
    with log.writer() as writer:
        writer.append(b"record")
        writer.roll()
        decoded.clear()
        for _ in range(ROUNDS):
            writer.append(b"record")
            writer.roll()
        own = [each for each in decoded if "log" in each]
    assert not own
    assert log.last_seq() == SEGMENTS + ROUNDS


def test_a_read_that_began_before_a_change_does_not_replace_it(
    manager: LedgerManager, log: Log, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of the thread that applies the retention, which shares the record with the writer."""
    steps = LedgerSteps(manager, "log", LedgerSpec(given=Credentials(PASSWORD), ledger_type=ListKind.LOG))
    backend = backend_of(manager)
    has_read, has_changed = threading.Event(), threading.Event()
    read = backend.read_record

    def read_before(name: str) -> object:
        found = read(name)
        if threading.current_thread() is early:
            has_read.set()
            assert has_changed.wait(WAIT_S)
        return found

    monkeypatch.setattr(backend, "read_record", read_before)
    early = threading.Thread(target=steps.existing)
    early.start()
    assert has_read.wait(WAIT_S)
    steps.keep_settings(LogSettings(segment_records=7))
    has_changed.set()
    early.join(WAIT_S)
    decoded.clear()
    assert steps.settings() == LogSettings(segment_records=7)
    assert not decoded
