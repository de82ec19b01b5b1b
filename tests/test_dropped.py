"""A manager that nobody closed: dropped, it frees its directory; open at the end of the program, it is closed then."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pybk.errors import IllegalOperationError, LedgerFencedError, StorageError
from pybk.flags import WriteFlag
from pybk.manager import handle
from pybk.manager.handle import settle_dropped
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.io.failures import storage_error
from pybk.streams.wal import WriteAheadLog
from tests.cluster.inside import inside
from tests.dropping import drop_is_warned_of
from tests.internals import cluster_backend_of, store_of
from tests.storage.real_store import contents, numbered, open_quick, python
from tests.waiting import PROCESS_S


def make_and_drop(make: Callable[[], Any]) -> None:
    """Make something, and drop it, however it hangs together."""
    held = make()
    del held
    gc.collect()


def drop(make: Callable[[], Any]) -> None:
    """Make something and drop it; wait until what that closes is closed."""
    with drop_is_warned_of():
        make_and_drop(make)
    settle_dropped()
    assert not any(ending.dropped for ending in handle.open_endings)


def test_a_dropped_manager_frees_its_directory_and_loses_nothing(tmp_path: Path) -> None:
    def make() -> LedgerManager:
        manager = open_quick(tmp_path)
        manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True).append_many(numbered(9))
        return manager

    drop(make)
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == numbered(9)


def test_a_dropped_manager_in_a_cycle_is_closed_by_the_collector(tmp_path: Path) -> None:
    def make() -> list[Any]:
        cycle: list[Any] = [open_quick(tmp_path)]
        cycle.append(cycle)
        return cycle

    drop(make)


def test_handles_keep_their_manager_open(tmp_path: Path) -> None:
    manager = open_quick(tmp_path)
    known = weakref.ref(manager)
    writer = manager.create_ledger(insecure=True)
    writer.append_many(numbered(3000))
    reader = manager.open_ledger(0, recover=False)
    entries = reader.read(0, 2999)
    listed = manager.list_ledgers()
    del manager
    assert writer.append(b"x") == 3000
    del writer, reader
    gc.collect()
    assert next(entries).payload == b"entry 0"
    del entries
    gc.collect()
    assert next(listed) == 0
    assert known() is not None
    drop(listed.close)  # type: ignore[attr-defined]  # a generator lets go when it ends


def test_futures_of_a_dropped_manager_are_done(tmp_path: Path) -> None:
    futures: list[Any] = []

    def make() -> None:
        writer = open_quick(tmp_path).create_ledger(insecure=True)
        futures.extend(writer.append_async(b"entry %d" % number) for number in range(5))

    drop(make)
    assert [future.result() for future in futures] == list(range(5))


def test_dropped_asyncio_handles_free_the_directory(tmp_path: Path) -> None:
    async def make() -> None:
        manager = await LedgerManager.open_async(tmp_path)
        writer = await manager.create_ledger_async(insecure=True)
        await writer.append_async(b"x")

    drop(lambda: asyncio.run(make()))
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0, recover=True) == [b"x"]


def test_a_dropped_read_only_manager_lets_go(tmp_path: Path) -> None:
    with open_quick(tmp_path) as live:
        live.create_ledger(insecure=True).append(b"x")
        drop(lambda: open_quick(tmp_path, read_only=True))


def test_a_dropped_client_and_a_dropped_bookie_are_closed(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster:
        url, secret = cluster.url, cluster.secret

        def client() -> None:
            found = LedgerManager.connect(url, cluster_secret=secret)
            found.create_ledger(ensemble_size=1, write_flags=WriteFlag.DEFERRED_FORCE, insecure=True).append_many(
                numbered(4)
            )

        with drop_is_warned_of():
            make_and_drop(client)
        settle_dropped()

        def bookie_and_client() -> None:
            LedgerManager.open(
                tmp_path / "other", listen="tcp://127.0.0.1:*", metadata=url, cluster_secret=secret
            ).create_ledger(ensemble_size=1, insecure=True)

        with drop_is_warned_of():
            make_and_drop(bookie_and_client)
        settle_dropped()
        with cluster.connect() as other:
            assert contents(other, 0, recover=True) == numbered(4)
            assert list(cluster_backend_of(other).membership.bookies) == ["bookie-0"]


def by_entry(manager: LedgerManager) -> Callable[[], Any]:
    return partial(manager.create_ledger(insecure=True).append, b"x")


def by_future(manager: LedgerManager) -> Callable[[], Any]:
    writer = manager.create_ledger(insecure=True)
    return lambda: writer.append_async(b"x").result()


def by_force(manager: LedgerManager) -> Callable[[], Any]:
    writer = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)

    def append_and_force() -> None:
        writer.append(b"x")
        writer.force()

    return append_and_force


def by_create(manager: LedgerManager) -> Callable[[], Any]:
    return partial(manager.create_ledger, insecure=True)


def by_log(manager: LedgerManager) -> Callable[[], Any]:
    return partial(WriteAheadLog.open(manager, "wal", insecure=True).append, b"x")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("by", [by_entry, by_future, by_force, by_create, by_log])
def test_a_manager_is_closed_when_it_is_dropped_after_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, by: Callable[[LedgerManager], Callable[[], Any]]
) -> None:
    """The log keeps the error, and raises it again: its threads must not keep the frames of those that got it."""

    def fail(*_: object) -> None:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise storage_error(error, "writing the log") from error

    def make() -> weakref.ref[LedgerManager]:
        manager = open_quick(tmp_path)
        call = by(manager)
        monkeypatch.setattr(store_of(manager).log.writer, "write", fail)
        for _ in range(3):
            with pytest.raises(StorageError):
                call()
        return weakref.ref(manager)

    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps the errors that are logged
    with drop_is_warned_of("LedgerManager"):  # a log is closed first, in a thread
        dropped = make()
    assert dropped() is None
    settle_dropped()
    monkeypatch.undo()
    open_quick(tmp_path).close()


def test_a_client_is_closed_when_it_is_dropped_after_errors(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster:

        def make() -> LedgerManager:
            client = LedgerManager.connect(cluster.url, cluster_secret=cluster.secret)
            writer = client.create_ledger(ensemble_size=1, insecure=True)
            with cluster.connect() as other:
                other.open_ledger(writer.ledger_id, recover=True).close()
            for _ in range(3):
                with pytest.raises(LedgerFencedError):
                    writer.append(b"x")
            return client

        drop(make)


def test_closing_in_time_warns_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = open_quick(tmp_path)
        manager.close()
        del manager
        gc.collect()


@pytest.mark.parametrize("collected_inside", ["append", "read"])
def test_a_manager_may_be_collected_in_the_middle_of_another_call(tmp_path: Path, collected_inside: str) -> None:
    with open_quick(tmp_path / "kept") as kept:
        writer = kept.create_ledger(insecure=True)
        writer.append(b"x")
        cycle: list[Any] = [open_quick(tmp_path / "dropped")]
        cycle.append(cycle)
        del cycle

        def collect(*_: Any) -> None:
            sys.settrace(None)
            gc.collect()

        def call() -> None:
            sys.settrace(collect)
            try:
                writer.append(b"y") if collected_inside == "append" else contents(kept, 0)
            finally:
                sys.settrace(None)

        with drop_is_warned_of():
            call()
        settle_dropped()
        open_quick(tmp_path / "dropped").close()


PROGRAM = """
import sys
from pybk.flags import WriteFlag
from tests.storage.real_store import open_quick
manager = open_quick(sys.argv[1])
deferred = manager.create_ledger(write_flags=WriteFlag.DEFERRED_FORCE, insecure=True)
deferred.append_many([b"entry %d" % n for n in range(100)])
del deferred
writer = manager.create_ledger(insecure=True)
future = writer.append_async(b"entry 0")
"""

ENDS = {
    "end": "",
    "exit": "sys.exit(0)",
    "exception": "raise ValueError",
    "atexit": "import atexit; atexit.register(manager.close)",
    "thread": "import threading; threading.Thread(target=lambda: (writer.append(b'entry 1'), manager.close())).start()",
    "teardown": """
class Service:
    def __init__(self, manager):
        self.manager = manager
        self.itself = self
    def __del__(self):
        self.manager.close()
sys.modules["kept"] = service = Service(manager)
del manager
""",
    "read_only": "other = open_quick(sys.argv[1], read_only=True); del manager",
}


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("how", ENDS)
def test_a_manager_that_is_open_at_the_end_of_the_program_is_closed_then(tmp_path: Path, how: str) -> None:
    process = python(PROGRAM + ENDS[how], tmp_path)
    output, _ = process.communicate(timeout=PROCESS_S)
    assert process.returncode == (how == "exception"), output
    assert ("ValueError" in output) if how == "exception" else (output == "")
    with open_quick(tmp_path) as manager:
        assert store_of(manager).began_clean, "the store was not closed"
        assert contents(manager, 0, recover=True) == numbered(100)
        assert contents(manager, 1, recover=True) == numbered(1 + (how == "thread"))


def test_an_interpreter_that_has_ended_its_threads_says_that_it_is_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path) as manager:
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
        with pytest.raises(IllegalOperationError, match="before the main program ends"):
            manager.close()
        with pytest.raises(IllegalOperationError, match="the interpreter is ending"):
            open_quick(tmp_path / "other")
        monkeypatch.undo()
