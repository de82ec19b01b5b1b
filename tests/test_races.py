"""A commit that fails between a decision and the staging of its result leaves the ledgers consistent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pybk.errors import StorageFullError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.log.commit import Commit
from pybk.storage.store import Store
from pybk.threads.group_commit import Completion
from tests.internals import descriptor_of, stage, store_of
from tests.simdisk import SimFileSystem
from tests.storage.store_harness import open_store


@pytest.fixture
def manager() -> Iterator[LedgerManager]:
    with open_store(SimFileSystem(1)) as manager:
        yield manager


def fail_before_the_next_control(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Have the forming commit fail because space is short, just before the next control record is staged."""
    log = store.log
    stage = log.stage_control

    def fail_then_stage(*arguments: Any, **options: Any) -> Completion | None:
        monkeypatch.setattr(log, "stage_control", stage)
        failing, log.forming = log.forming, Commit()
        log.fail_commit(failing, StorageFullError("no space"))
        return stage(*arguments, **options)

    monkeypatch.setattr(log, "stage_control", fail_then_stage)


@pytest.fixture
def doomed(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> Callable[[WriteFlag], LedgerWriter]:
    """Make a ledger with one durable entry, and one that is staged and will fail."""

    def make(flags: WriteFlag) -> LedgerWriter:
        writer = manager.create_ledger(storage_hints={StorageHint.NVME}, write_flags=flags, insecure=True)
        writer.append(b"durable")
        writer.force()
        with descriptor_of(writer).lock:
            stage(writer, b"lost")
        fail_before_the_next_control(monkeypatch, store_of(manager))
        return writer

    return make


def test_a_ledger_is_not_closed_beyond_what_is_durable(
    manager: LedgerManager, doomed: Callable[[WriteFlag], LedgerWriter]
) -> None:
    writer = doomed(WriteFlag.NONE)
    writer.close()
    assert (writer.metadata.state, writer.metadata.last_entry_id) == (LedgerState.CLOSED, 0)
    reader = manager.open_ledger(writer.ledger_id)
    assert [entry.payload for entry in reader.read(0, reader.last_add_confirmed)] == [b"durable"]


def test_a_ledger_is_not_recovered_beyond_what_is_durable(
    manager: LedgerManager, doomed: Callable[[WriteFlag], LedgerWriter]
) -> None:
    writer = doomed(WriteFlag.NONE)
    reader = manager.open_ledger(writer.ledger_id)
    assert [entry.payload for entry in reader.read(0, reader.last_add_confirmed)] == [b"durable"]


def test_force_does_not_confirm_failed_entries(doomed: Callable[[WriteFlag], LedgerWriter]) -> None:
    writer = doomed(WriteFlag.DEFERRED_FORCE)
    with pytest.raises(StorageFullError):
        writer.force()
    assert writer.last_add_confirmed == 0


def test_closing_that_failed_is_tried_again(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"x")
    store = store_of(manager)
    close = store.close_ledger

    def fail_once(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(store, "close_ledger", close)
        raise StorageFullError("no space")

    monkeypatch.setattr(store, "close_ledger", fail_once)
    with pytest.raises(StorageFullError):
        writer.close()
    states = [writer.metadata.state]
    writer.close()
    assert [*states, writer.metadata.state] == [LedgerState.OPEN, LedgerState.CLOSED]
