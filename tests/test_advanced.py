"""Advanced ledgers: the application gives the entry ids, in any order; acknowledgements come in theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import (
    AppendTimeoutError,
    ClosedError,
    DuplicateEntryError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerExistsError,
    LedgerFencedError,
    NoSuchLedgerError,
    TooManyRequestsError,
    UsageError,
)
from pybk.manager.ledger_manager import LedgerManager
from tests.storage.real_store import contents, numbered, open_quick, stop_syncing
from tests.waiting import WAIT_S


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data", max_entry_bytes=5000, max_outstanding_bytes=64 << 10) as manager:
        yield manager


def test_advanced_entries_come_in_any_order_and_are_acknowledged_in_theirs(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=77, insecure=True)
    assert writer.ledger_id == 77
    assert manager.ledger_metadata(77).advanced
    acknowledged: list[int] = []
    futures = {}
    for entry_id in (2, 1, 4):
        futures[entry_id] = writer.append_async(b"entry %d" % entry_id, entry_id=entry_id)
        futures[entry_id].add_done_callback(lambda future: acknowledged.append(future.result()))
    with pytest.raises(AppendTimeoutError, match="before 1"):
        futures[1].result(timeout=0.02)
    assert not any(future.done() for future in futures.values())
    assert (writer.last_add_pushed, writer.last_add_confirmed) == (-1, -1)
    assert writer.append(b"entry 0", entry_id=0) == 0
    assert [futures[entry_id].result(WAIT_S) for entry_id in (2, 1)] == [2, 1]
    assert not futures[4].done()
    assert writer.append(b"entry 3", entry_id=3) == 3
    assert futures[4].result(WAIT_S) == 4
    writer.close()
    manager.close()
    assert acknowledged == [1, 2, 4]


def test_duplicates_are_refused(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=0, insecure=True)
    writer.append(b"entry 0", entry_id=0)
    future = writer.append_async(b"entry 2", entry_id=2)
    for entry_id in (0, 2):
        with pytest.raises(DuplicateEntryError) as refused:
            _ = writer.append_async(b"other", entry_id=entry_id)
        assert refused.value.code == -22
    writer.append(b"entry 1", entry_id=1)
    assert future.result() == 2
    assert contents(manager, 0) == numbered(3)


def test_a_gap_at_close_fails_the_entries_after_it(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=5, insecure=True)
    writer.append(b"entry 0", entry_id=0)
    future = writer.append_async(b"entry 2", entry_id=2)
    writer.close()
    with pytest.raises(LedgerClosedError, match="before the entries with lower ids were appended"):
        future.result(WAIT_S)
    assert future.done()
    assert isinstance(future.exception(), LedgerClosedError)
    assert contents(manager, 5) == numbered(1)
    assert manager.ledger_metadata(5).last_entry_id == 0


@pytest.mark.parametrize("end", ["fence", "delete", "close manager"])
def test_waiters_after_a_gap_fail_when_the_ledger_ends(manager: LedgerManager, end: str) -> None:
    writer = manager.create_ledger(ledger_id=5, insecure=True)
    future = writer.append_async(b"entry 2", entry_id=2)
    errors: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: errors.append(future.exception()))
    waiting.start()
    if end == "fence":
        manager.open_ledger(5)
    elif end == "delete":
        manager.delete_ledger(5)
    else:
        manager.close()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    wanted = {"fence": LedgerFencedError, "delete": NoSuchLedgerError, "close manager": ClosedError}[end]
    assert isinstance(errors[0], wanted)


def test_advanced_and_other_ledgers_keep_to_their_own_calls(manager: LedgerManager) -> None:
    advanced = manager.create_ledger(ledger_id=9, insecure=True)
    plain = manager.create_ledger(insecure=True)
    refused: list[Any] = [
        lambda: advanced.append(b"x"),
        lambda: advanced.append_async(b"x"),
        lambda: advanced.append_many([b"x"]),
        lambda: plain.append(b"x", entry_id=0),
        lambda: plain.append_async(b"x", entry_id=0),
    ]
    for call in refused:
        with pytest.raises(IllegalOperationError):
            call()
    for entry_id in (-1, 1.0, 1.5, float("nan"), 2**63, False, "1"):
        with pytest.raises(UsageError):
            advanced.append(b"x", entry_id=entry_id)  # type: ignore[arg-type]  # that is the point
    assert advanced.last_add_pushed == plain.last_add_pushed == -1


def test_entries_that_wait_after_a_gap_are_bounded(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=1, insecure=True)
    with pytest.raises(TooManyRequestsError, match="append that one first"):
        _ = [writer.append_async(bytes(5000), entry_id=entry_id) for entry_id in range(1, 100)]
    assert writer.append(b"", entry_id=0) == 0
    writer.force()
    assert writer.last_add_confirmed == 13


def test_an_advanced_append_that_may_not_wait_is_refused_whole(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = manager.create_ledger(ledger_id=1, insecure=True)
    go = stop_syncing(monkeypatch)
    with pytest.raises(TooManyRequestsError):
        _ = [writer.append_async(bytes(4000), entry_id=entry_id, wait=False) for entry_id in range(100)]
    go.set()
    entry_id = writer.last_add_pushed + 1
    assert writer.append(bytes(4000), entry_id=entry_id) == entry_id, "the refused entry was taken all the same"


def test_an_advanced_append_that_may_not_wait_stages_those_after_it(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = manager.create_ledger(ledger_id=1, insecure=True)
    behind = [writer.append_async(bytes(5000), entry_id=entry_id) for entry_id in range(1, 14)]
    go = stop_syncing(monkeypatch)
    threading.Timer(0.05, go.set).start()
    first = writer.append_async(bytes(5000), entry_id=0, wait=False)
    assert [future.result(WAIT_S) for future in (first, *behind)] == list(range(14))


def test_an_id_is_given_once_and_others_count_on_from_it(manager: LedgerManager) -> None:
    manager.create_ledger(ledger_id=40, insecure=True).close()
    with pytest.raises(LedgerExistsError) as refused:
        manager.create_ledger(ledger_id=40, insecure=True)
    assert refused.value.code == -20
    assert manager.create_ledger(insecure=True).ledger_id == 41
    assert manager.create_ledger(ledger_id=7, insecure=True).ledger_id == 7
    assert manager.create_ledger(insecure=True).ledger_id == 42


@pytest.mark.parametrize("ledger_id", [-1, (1 << 63) - 1, 1 << 63, "1", 1.0])
def test_invalid_ledger_ids_are_refused(manager: LedgerManager, ledger_id: Any) -> None:
    with pytest.raises(UsageError, match="ledger_id"):
        manager.create_ledger(ledger_id=ledger_id, insecure=True)
    assert list(manager.list_ledgers()) == []


def test_the_highest_id_can_be_taken(manager: LedgerManager) -> None:
    highest = (1 << 63) - 2
    manager.create_ledger(ledger_id=highest, insecure=True).append(b"entry 0", entry_id=0)
    manager.checkpoint()
    assert contents(manager, highest) == [b"entry 0"]
    assert list(manager.list_ledgers()) == [highest]
    with pytest.raises(IllegalOperationError, match="highest possible id"):
        manager.create_ledger(insecure=True)
    assert manager.create_ledger(ledger_id=3, insecure=True).ledger_id == 3
