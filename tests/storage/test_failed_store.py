"""After a failed sync: the store takes nothing more, reads work, and the next open has all that was acknowledged."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import StorageFailedError
from pybk.flags import StorageHint, WriteFlag
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.io.filesystem import OsFile
from tests.internals import store_of
from tests.storage.real_store import contents, numbered, open_quick, payloads, stop_syncing
from tests.waiting import WAIT_S


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    manager = open_quick(tmp_path / "data")
    yield manager
    try:
        manager.close()
    except StorageFailedError:
        assert store_of(manager).ended


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what has every synced write fail from then on."""

    def fail(self: OsFile, buffers: Any, offset: int) -> None:
        raise OSError(errno.EIO, "Input/output error", "the log file")

    return lambda: monkeypatch.setattr(OsFile, "write_durable", fail)


def test_outstanding_and_later_appends_fail_for_good(
    manager: LedgerManager, break_disk: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = manager.create_ledger(insecure=True)
    other = manager.create_ledger(insecure=True)
    writer.append(b"entry 0")
    break_disk()
    go = stop_syncing(monkeypatch)
    called = threading.Event()
    futures: list[Any] = [writer.append_async(b"entry 1"), other.append_many_async([b"a", b"b"])]
    go.set()
    futures[0].add_done_callback(lambda _: called.set())
    under_way: list[Callable[[], Any]] = [*(future.result for future in futures), writer.force, writer.close]
    later: list[Callable[[], Any]] = [
        lambda: other.append(b"x"),
        lambda: writer.append_many([b"x"]),
        lambda: writer.append_async(b"x").result(),
        lambda: manager.create_ledger(insecure=True),
        lambda: manager.delete_ledger(0),
    ]
    for call in (*under_way, *later):
        with pytest.raises(StorageFailedError, match="Input/output error") as raised:
            call()
        assert raised.value.outcome_unknown is (call in under_way)
        assert not raised.value.retryable
    assert called.wait(WAIT_S)
    assert all(future.done() for future in futures)
    assert manager.health().state == "failed"
    assert "Input/output error" in manager.health().reason
    assert manager.health().outstanding_bytes == 0


def test_the_process_lives_and_reads_continue(manager: LedgerManager, break_disk: Callable[[], None]) -> None:
    for tier in StorageHint:
        manager.create_ledger(storage_hints={tier}, insecure=True).append_many(numbered(50))
    manager.checkpoint()
    deferred = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
    deferred.append_many(numbered(5))
    deferred.force()
    tail = manager.create_ledger(insecure=True)
    tail.append_many(numbered(10))
    reader = manager.open_ledger(tail.ledger_id, recover=False)
    break_disk()
    with pytest.raises(StorageFailedError):
        tail.append(b"lost or not")
    assert payloads(reader) == numbered(10)
    assert reader.read_last_add_confirmed() == 9
    assert [contents(manager, ledger_id) for ledger_id in range(3)] == [numbered(50)] * 3
    with manager.open_ledger(deferred.ledger_id, recover=False) as unconfirmed:
        assert [entry.payload for entry in unconfirmed.read_unconfirmed(0, 4)] == numbered(5)
    with pytest.raises(StorageFailedError):
        manager.open_ledger(tail.ledger_id, recover=True)
    assert list(manager.list_ledgers()) == [0, 1, 2, 3, 4]


def test_the_next_open_has_everything_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, break_disk: Callable[[], None]
) -> None:
    manager = open_quick(tmp_path)
    writer = manager.create_ledger(insecure=True)
    acknowledged = [writer.append(payload) for payload in numbered(20)]
    with monkeypatch.context() as patch:
        patch.setattr(OsFile, "write_durable", OsFile.write_durable)
        break_disk()
        with pytest.raises(StorageFailedError):
            writer.append(b"entry 20")
    monkeypatch.undo()
    with pytest.raises(StorageFailedError):
        writer.append(b"entry 21")
    manager.close()
    with open_quick(tmp_path) as manager:
        found = contents(manager, 0, recover=True)
        assert len(found) >= len(acknowledged)
        assert found == numbered(len(found))
        assert manager.health().state == "ok"
        assert manager.create_ledger(insecure=True).append(b"goes on") == 0


def test_a_store_opens_again_whatever_is_raised_after_a_commit_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit is durable then and counts as such, so its bytes have to stay."""
    manager = open_quick(tmp_path / "store")
    writer = manager.create_ledger(insecure=True)
    writer.append(b"entry 0")
    with monkeypatch.context() as patched:

        def publish(*_: object) -> None:
            raise MemoryError("no memory")

        patched.setattr(LedgerDescriptor, "publish", publish)
        with pytest.raises(StorageFailedError, match="no memory"):
            writer.append(b"entry 1")
    with pytest.raises(StorageFailedError, match="no memory"):
        writer.append(b"entry 2")
    with suppress(StorageFailedError):
        manager.close()
    with open_quick(tmp_path / "store") as again, again.open_ledger(writer.ledger_id, recover=True) as reader:
        assert [entry.payload for entry in reader.read(0)] == [b"entry 0", b"entry 1"]


def test_waiters_of_any_kind_get_the_error(manager: LedgerManager, break_disk: Callable[[], None]) -> None:
    writer = manager.create_ledger(insecure=True)
    advanced = manager.create_ledger(ledger_id=50, insecure=True)
    early = advanced.append_async(b"x", entry_id=1)
    errors: list[str] = []

    def wait(call: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except StorageFailedError as error:
                errors.append(type(error).__name__)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    async def awaiting() -> int:
        return await writer.append_async(b"x")

    async def awaiting_early() -> int:
        return await early

    break_disk()
    calls: list[Callable[[], Any]] = [
        *(lambda: writer.append(b"x") for _ in range(4)),
        lambda: writer.append_async(b"x").result(WAIT_S),
        lambda: asyncio.run(awaiting()),
        lambda: asyncio.run(awaiting_early()),
        early.result,
        lambda: writer.append_many([b"x"] * 20),
    ]
    threads = [wait(call) for call in calls]
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "somebody waits for a store that failed"
    assert errors == ["StorageFailedError"] * len(calls)


def test_errors_of_a_failed_store_do_not_pile_up_tracebacks(
    manager: LedgerManager, break_disk: Callable[[], None]
) -> None:
    writer = manager.create_ledger(insecure=True)
    future = writer.append_async(b"x")
    future.result()
    break_disk()
    future = writer.append_async(b"y")
    depths = []
    for _ in range(4):
        with pytest.raises(StorageFailedError) as raised:
            future.result()
        depths.append(len(raised.traceback))
        with pytest.raises(StorageFailedError) as raised:
            writer.append(b"z")
    assert depths[-1] == depths[1]


def test_whatever_ends_the_maintenance_thread_ends_the_store(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"entry 0")
    scheduler = store_of(manager).scheduler

    def fail() -> None:
        raise ValueError("what nobody thought of")

    scheduler.tick = fail  # type: ignore[method-assign]  # it is looked up at each turn
    scheduler.wake()
    thread = scheduler.thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert manager.health().state == "failed"
    for call in (
        lambda: writer.append(b"entry 1"),
        lambda: manager.create_ledger(insecure=True),
        scheduler.wait_for_admission,
    ):
        with pytest.raises(StorageFailedError, match="what nobody thought of"):
            call()
    assert contents(manager, 0) == numbered(1)
