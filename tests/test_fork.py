"""Forks: the child gets a clear error, waits for no thread, and keeps no lock."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pybk import BlobStore, ClusterAdmin, Log, LogEnd, Namespace, WriteAheadLog
from pybk.admin.http import AdminServer
from pybk.admin.http.application import AdminApplication
from pybk.errors import ForkedProcessError, StoreLockedError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import woken_by
from tests.admin.http.test_server import Client
from tests.cluster.inside import inside
from tests.forking import all_locks_held, in_child
from tests.internals import backend_of, descriptor_of, metadata_of, store_of
from tests.interrupting import APPEND_PATH
from tests.storage.real_store import contents, numbered, open_quick, stop_syncing
from tests.test_signals import handled
from tests.waiting import WAIT_S, wait_until

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork"),
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
]


def all_refused(calls: list[Callable[[], Any]]) -> None:
    for number, call in enumerate(calls):
        with pytest.raises(ForkedProcessError, match=r"before .*fork"):
            assert call() is None, f"call {number} was not refused"


def test_everything_is_refused_in_a_child(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        writer.append_many([bytes(1000)] * 3000)
        reader = manager.open_ledger(0, recover=False)
        entries = reader.read(0, 2999)
        next(entries)
        ids = manager.list_ledgers()
        followed = reader.follow(1)
        next(followed)
        early = manager.create_ledger(ledger_id=9, insecure=True).append_async(b"x", entry_id=1)
        calls: list[Callable[[], Any]] = [
            lambda: writer.append(b"x"),
            lambda: writer.append_async(b"x"),
            lambda: writer.append_many([b"x"]),
            writer.force,
            writer.close,
            lambda: early.result(),
            lambda: early.result(1),
            lambda: reader.read(0, 0),
            lambda: reader.read_batch(0),
            lambda: reader.read_unconfirmed(0, 0),
            reader.read_last_add_confirmed,
            lambda: list(entries),
            lambda: list(ids),
            lambda: list(followed),
            lambda: manager.create_ledger(insecure=True),
            lambda: manager.open_ledger(0),
            lambda: manager.delete_ledger(0),
            lambda: manager.move_ledger(0, StorageHint.HDD),
            manager.list_ledgers,
            lambda: manager.ledger_metadata(0),
            manager.checkpoint,
            manager.health,
            manager.metrics,
        ]
        in_child(lambda: all_refused(calls))
        in_child(manager.close)
        assert writer.append(b"the parent goes on") == 3000
        assert len(list(entries)) == 2999


def test_what_was_read_ahead_is_refused_in_a_child(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        log = Log.open(manager, "log", insecure=True)
        log_writer = log.writer()
        log_writer.append_many(numbered(50))
        subscription = log.subscribe("sub", start=LogEnd.EARLIEST, mode="shared")
        alone = log.subscribe("alone", start=LogEnd.EARLIEST)
        reader, iterated = log.reader(), iter(log.reader())
        wal = WriteAheadLog.open(manager, "wal", insecure=True)
        wal.append_many(numbered(50))
        follower = wal.follow(timeout=0)
        for each in (subscription, alone, reader):
            assert each.read() is not None
        assert (next(iterated).seq, next(follower).lsn) == (0, 1)
        blobs = BlobStore.open(manager, insecure=True)
        blobs.put("a", bytes(20 << 20))
        file = blobs.open_blob("a")
        for _ in range(3):
            file.read(1 << 20)
        upload, checkpoint = blobs.create_blob("b"), wal.checkpoint()
        calls: list[Callable[[], Any]] = [
            lambda: subscription.read(0),
            lambda: alone.read_many(5, 0),
            lambda: subscription.ack(0),
            lambda: subscription.nack(0),
            subscription.rewind,
            lambda: reader.read(0),
            lambda: next(iterated),
            lambda: next(follower),
            lambda: next(follower),
            lambda: file.read(8 << 20),
            lambda: upload.write(b"x"),
            lambda: checkpoint.write(b"x"),
            log_writer.seal,
        ]
        in_child(lambda: all_refused(calls))
        handles = (subscription, alone, reader, follower, file, log_writer, log, wal, blobs)
        in_child(lambda: [each.close() for each in handles])
        assert [record.seq for record in iterated] == list(range(1, 50))
        assert [record.lsn for record in follower] == list(range(2, 51))
        assert len(file.read()) == 17 << 20
        file.close()
        assert (upload.commit().size, checkpoint.write(b"x")) == (0, 1)
        checkpoint.commit()
        assert subscription.ack_async(0).result() == 1
        log.close()
        wal.close()


def test_a_child_never_waits_whatever_the_parent_was_doing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        go = stop_syncing(monkeypatch)
        future = writer.append_async(b"entry 0")
        many = writer.append_many_async(numbered(3, 1))
        waiting = threading.Thread(target=future.result)
        waiting.start()
        time.sleep(0.02)
        held = [store_of(manager).lock, descriptor_of(writer).lock, descriptor_of(writer).location_lock]
        held.append(store_of(manager).log.mutex)
        for lock in held:
            lock.acquire()
        try:
            in_child(
                lambda: all_refused(
                    [
                        future.result,
                        lambda: many.result(1),
                        lambda: writer.append(b"x"),
                        lambda: writer.append_many([b"x"]),
                        lambda: manager.open_ledger(0),
                        writer.close,
                    ]
                )
            )
        finally:
            for lock in held:
                lock.release()
        go.set()
        waiting.join(WAIT_S)
        assert (future.result(), many.result()) == (0, range(1, 4))
        assert contents(manager, 0) == numbered(4)


def test_a_coroutine_in_a_child_does_not_wait_for_a_thread_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, max_outstanding_bytes=64 << 10) as manager:
        writer = manager.create_ledger(insecure=True)
        go = stop_syncing(monkeypatch)

        async def fill() -> None:
            await asyncio.gather(*(writer.append_coro(bytes(20_000)) for _ in range(9)))

        filling = threading.Thread(target=lambda: asyncio.run(fill()))
        filling.start()
        wait_until(lambda: any(each.name == "pybk-backlog" for each in threading.enumerate()), "appends wait in turn")
        in_child(lambda: all_refused([lambda: asyncio.run(writer.append_coro(b"x"))]))
        go.set()
        filling.join(WAIT_S)
        assert writer.last_add_confirmed == 8


def closed(handles: list[Any]) -> None:
    """Close handles, and drop them; a writer of a ledger says why it cannot be closed here."""
    for each in handles:
        with suppress(ForkedProcessError):
            each.close()
    dropped(handles)


def dropped(handles: list[Any]) -> None:
    """Let go of all handles."""
    handles.clear()
    gc.collect()


def opened(manager: LedgerManager) -> list[Any]:
    """Open some of all kinds of handles."""
    log = Log.open(manager, "log", insecure=True)
    log_writer = log.writer()
    log_writer.append_many(numbered(5))
    subscription = log.subscribe("sub", start=LogEnd.EARLIEST, mode="shared")
    reader = log.reader()
    wal = WriteAheadLog.open(manager, "wal", insecure=True)
    wal.append_many(numbered(5))
    follower = wal.follow(timeout=0)
    assert subscription.read() is not None
    assert reader.read() is not None
    assert next(follower).lsn == 1
    blobs = BlobStore.open(manager, insecure=True)
    blobs.put("a", bytes(3 << 20))
    file, upload = blobs.open_blob("a"), blobs.create_blob("b")
    file.read(1)
    upload.write(b"x")
    names = Namespace.open(manager, insecure=True)
    watch = CancelledByClose(names.watch(lambda *_: None))
    writer = manager.create_ledger(insecure=True)
    writer.append(b"x")
    alone = manager.open_ledger(writer.ledger_id, recover=False)
    with woken_by(alone, lambda: None):  # which watches the ledger
        pass
    application = AdminApplication(manager)
    application.view.seen()
    ends = [watch, reader, follower, subscription, log_writer, log, wal, file, upload, blobs, names, alone, writer]
    return [*ends, application]


class CancelledByClose:
    """A watch that ends as handles do."""

    def __init__(self, watch: Any) -> None:
        self.close = watch.cancel


@pytest.mark.parametrize("ending", [closed, dropped])
def test_a_child_ends_every_handle_whatever_threads_of_its_parent_were_doing(
    tmp_path: Path, ending: Callable[[list[Any]], None]
) -> None:
    with open_quick(tmp_path) as manager:
        handles = opened(manager)
        with all_locks_held():
            in_child(lambda: ending(handles))
        in_child(manager.close)
        closed(handles)


@pytest.mark.parametrize("ending", [closed, dropped])
def test_a_child_ends_every_handle_of_a_cluster_too(tmp_path: Path, ending: Callable[[list[Any]], None]) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as manager:
        lock = backend_of(manager).try_lock("name", "owner")
        assert lock is not None
        in_child(lock.release)
        assert lock.held, "the parent has it"
        handles = opened(manager)
        with all_locks_held():  # heartbeats wait, too, so that the lease may end on a busy machine
            in_child(lambda: ending(handles))
            in_child(manager.close)
            in_child(metadata_of(manager).close)
            in_child(lock.release)
        closed(handles)


def value_of(handle: Any, name: str) -> Any:
    """Return a property, or the result of a call without arguments."""
    found = getattr(handle, name)
    return found() if callable(found) else found


def named(handle: Any, names: str) -> list[Callable[[], Any]]:
    """Return calls that take no arguments, by their names."""
    return [partial(value_of, handle, name) for name in names.split()]


def calls_of_ledgers(manager: LedgerManager) -> list[Callable[[], Any]]:
    """Return calls of a manager, and of writers and readers of ledgers that were made before."""
    writer, advanced = manager.create_ledger(insecure=True), manager.create_ledger(ledger_id=900, insecure=True)
    writer.append(b"x")
    early = advanced.append_async(b"x", entry_id=1)
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    follower = reader.follow(1)
    number = writer.ledger_id
    return [
        *named(manager, "list_ledgers ledgers bookies checkpoint scrub scrub_status health metrics transaction"),
        lambda: manager.create_ledger(insecure=True),
        lambda: manager.open_ledger(number),
        lambda: manager.check_password(number, b"p"),
        lambda: manager.delete_ledger(number),
        lambda: manager.ledger_summary(number),
        lambda: manager.ledger_metadata(number),
        lambda: manager.move_ledger(number, StorageHint.HDD),
        lambda: manager.replicate(number),
        *named(writer, "force close"),
        lambda: writer.append(b"x"),
        lambda: writer.append_async(b"x"),
        lambda: writer.append_many([b"x"]),
        lambda: writer.append_many_async([b"x"]),
        lambda: asyncio.run(writer.append_coro(b"x")),
        lambda: advanced.append_async(b"x", entry_id=0),
        lambda: advanced.append_async(b"x", entry_id=2),
        lambda: early.result(),
        lambda: early.result(1),
        reader.read_last_add_confirmed,
        lambda: reader.read_batch(0),
        lambda: list(follower),
        lambda: list(reader.read()),
    ]


def calls_of_logs(manager: LedgerManager) -> list[Callable[[], Any]]:
    """Return calls of a log, its writer, its readers and its subscriptions, which were opened before."""
    log = Log.open(manager, "of calls", insecure=True)
    writer = log.writer()
    writer.append_many(numbered(9))
    readers = [log.reader(), log.reader(follow=True)]
    shared = log.subscribe("shared", start=LogEnd.EARLIEST, mode="shared")
    alone = log.subscribe("alone", start=LogEnd.EARLIEST)
    subscriptions: list[Any] = [shared, alone]
    for each in (*readers, *subscriptions):
        assert each.read() is not None
    detached = log.detached_segment(query="q", epoch=1)
    detached.append_many([b"x"])
    names = "first_seq last_seq first last segments seal is_sealed properties retention settings subscriptions"
    return [
        *named(log, names + " subscription_states locked_by merge_segments reader writer"),
        lambda: log.writer(wait=30),
        lambda: log.read(1),
        lambda: log.last_epoch("q"),
        lambda: log.subscribe("alone", wait=30),
        lambda: log.delete_subscription("alone", steal=True),
        lambda: log.position_for(LogEnd.LATEST),
        lambda: log.set_properties({"a": "b"}),
        lambda: log.set_retention(None),
        lambda: log.on_change(lambda: None),
        lambda: log.truncate(LogEnd.LATEST),
        lambda: Log.names(manager),
        lambda: Log.open(manager, "another", insecure=True),
        *named(writer, "sync roll seal"),
        lambda: writer.append(b"x"),
        lambda: writer.append_async(b"x").result(),
        lambda: asyncio.run(writer.append_coro(b"x")),
        *(call for each in readers for call in named(each, "read lag caught_up")),
        *(partial(each.seek, LogEnd.LATEST) for each in readers),
        lambda: asyncio.run(readers[1].read_many_async(3)),
        *(call for each in subscriptions for call in named(each, "read delete backlog stats rewind skip_all")),
        *(partial(each.ack, 1) for each in subscriptions),
        *(partial(each.nack, 1) for each in subscriptions),
        *(partial(each.seek, LogEnd.LATEST) for each in subscriptions),
        lambda: asyncio.run(shared.read_many_async(3)),
        lambda: asyncio.run(alone.ack_coro(1)),
        lambda: detached.append_many([b"x"]),
    ]


def calls_of_others(manager: LedgerManager) -> list[Callable[[], Any]]:
    """Return calls of a write-ahead log, a blob store and a namespace, which were opened before."""
    wal = WriteAheadLog.open(manager, "wal of calls", insecure=True)
    wal.append_many(numbered(9))
    follower = wal.follow(timeout=None)
    next(follower)
    blobs = BlobStore.open(manager, insecure=True)
    blobs.put("a", bytes(20 << 20))
    file, upload, checkpoint = blobs.open_blob("a"), blobs.create_blob("b"), wal.checkpoint()
    names = Namespace.open(manager, insecure=True)
    names.create("name")
    of_blobs = "delete open_blob get stat exists versions create_blob"
    return [
        *named(wal, "ledgers first_lsn stats sync roll checkpoint checkpoints latest_checkpoint"),
        lambda: wal.append(b"x"),
        lambda: list(wal.replay()),
        lambda: wal.read(1),
        lambda: list(wal.read_many([1])),
        lambda: next(wal.follow(timeout=None)),
        lambda: wal.truncate_before(3),
        lambda: wal.truncate_after(3),
        lambda: next(follower),
        *named(blobs, "sweep list"),
        lambda: blobs.put("c", b"x"),
        lambda: blobs.copy("a", "c"),
        lambda: blobs.rename("a", "c"),
        *(partial(getattr(blobs, name), "a") for name in of_blobs.split()),
        lambda: file.read(8 << 20),
        lambda: upload.write(b"x"),
        *(each.commit for each in (upload, checkpoint)),
        *(partial(getattr(names, name), "name") for name in ("create", "log", "exists", "delete")),
        lambda: names.rename("name", "other"),
        names.names,
        lambda: names.watch(lambda *_: None),
        wal.seal,
    ]


def calls_of_a_cluster(manager: LedgerManager) -> list[Callable[[], Any]]:
    """Return calls that administer a cluster, and some of its metadata."""
    admin, metadata = ClusterAdmin(manager), metadata_of(manager)
    looks = "status bookies secret_status repairs scrub_status plan_rebalance rebalance_progress orphans settings"
    changes = "add_secret switch_secret reseal_metadata retire_secret resume_repair scrub abort_rebalance"
    of_bookies = "bookie drain cancel_drain drain_progress end_maintenance ok_to_stop ok_to_remove remove"
    return [
        *named(admin, looks),
        *named(admin, changes),
        *(partial(getattr(admin, name), "bookie-0") for name in of_bookies.split()),
        lambda: admin.pause_repair(60, "somebody"),
        lambda: admin.change_settings(lambda found: found),
        *named(metadata, "new_ledger_id next_id list_bookies list_ledgers read_settings list_cookies catch_up"),
        lambda: metadata.try_lock("a name", "an owner"),
        lambda: metadata.lock_owner("a name"),
        lambda: metadata.watch_bookies(lambda: None),
    ]


def test_every_call_in_a_child_is_refused_whatever_threads_of_its_parent_were_doing(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        calls = [*calls_of_ledgers(manager), *calls_of_logs(manager), *calls_of_others(manager)]
        with all_locks_held():
            in_child(lambda: all_refused(calls))


def test_every_call_of_a_cluster_in_a_child_is_refused_too(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as manager:
        calls = [*calls_of_ledgers(manager), *calls_of_logs(manager), *calls_of_others(manager)]
        calls += calls_of_a_cluster(manager)
        with all_locks_held():
            in_child(lambda: all_refused(calls))


def test_a_child_may_read_while_its_parent_writes(tmp_path: Path) -> None:
    manager = open_quick(tmp_path)
    writer = manager.create_ledger(insecure=True)
    writer.append_many(numbered(5))

    def read() -> None:
        with open_quick(tmp_path, read_only=True) as mine:
            assert contents(mine, 0) == numbered(5)
        with pytest.raises(StoreLockedError) as refused:
            open_quick(tmp_path)
        assert refused.value.pid == os.getppid()

    in_child(read)
    writer.append(b"entry 5")
    manager.close()

    def write() -> None:
        with open_quick(tmp_path) as mine:
            assert contents(mine, 0, recover=True) == numbered(6)
            mine.create_ledger(insecure=True).append(b"by the child")

    in_child(write)
    with open_quick(tmp_path) as manager:
        assert contents(manager, 1) == [b"by the child"]


def test_a_child_that_outlives_its_parents_manager_keeps_no_lock(tmp_path: Path) -> None:
    manager = open_quick(tmp_path)
    manager.create_ledger(insecure=True).append(b"x")
    ready, release = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(ready[1], b"x")
        os.read(release[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        manager.close()
        with open_quick(tmp_path) as manager:
            assert contents(manager, 0) == [b"x"]
    finally:
        os.write(release[1], b"x")
        os.waitpid(pid, 0)
        for fd in (*ready, *release):
            os.close(fd)


def test_a_read_only_manager_is_refused_in_a_child_too(tmp_path: Path) -> None:
    with open_quick(tmp_path) as live:
        live.create_ledger(insecure=True).append_many(numbered(2))
        with open_quick(tmp_path, read_only=True) as manager:
            reader = manager.open_ledger(0)
            followed = reader.follow()
            next(followed)
            calls: list[Callable[[], Any]] = [
                lambda: manager.open_ledger(0),
                lambda: reader.read(0, 0),
                lambda: list(followed),
                reader.read_last_add_confirmed,
            ]
            in_child(lambda: all_refused(calls))
            assert contents(manager, 0) == numbered(2)


def test_leaving_a_with_in_a_child_closes_nothing(tmp_path: Path) -> None:
    def leave(manager: LedgerManager) -> None:
        with manager:
            pass

    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        in_child(lambda: leave(manager))
        assert writer.append(b"x") == 0


def kept_deleted(pid: int, directory: Path) -> list[str]:
    """Return the unlinked files below a directory that a process keeps open or mapped."""
    fds = Path(f"/proc/{pid}/fd")
    open_ones = [os.readlink(path) for path in fds.iterdir()]
    mapped = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in (*open_ones, *mapped) if str(directory) in line and line.endswith("(deleted)")]


def test_a_child_keeps_no_file_that_its_parent_deletes(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        for hint in (StorageHint.NVME, StorageHint.HDD):
            with manager.create_ledger(storage_hints={hint}, insecure=True) as writer:
                for _ in range(4):
                    writer.append_many([bytes(1000)] * 1000)
            manager.checkpoint()
        for ledger_id in range(2):
            assert len(contents(manager, ledger_id)) == 4000  # so that all of it is mapped
        manager.create_ledger(insecure=True).append(b"x")
        ready, release = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(ready[1], b"x")
            os.read(release[0], 1)
            os._exit(0)
        try:
            os.read(ready[0], 1)
            for ledger_id in range(2):
                manager.delete_ledger(ledger_id)
            manager.checkpoint()
            assert kept_deleted(pid, tmp_path) == []
        finally:
            os.write(release[1], b"x")
            os.waitpid(pid, 0)
            for fd in (*ready, *release):
                os.close(fd)
        assert manager.create_ledger(insecure=True).append(b"the parent goes on") == 0


def test_a_child_forked_by_a_handler_in_the_middle_of_an_append_writes_nothing(tmp_path: Path) -> None:
    children: list[int] = []

    def fork(*_: object) -> None:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            raise SystemExit(7)
        children.append(pid)

    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        writer.append(b"entry 0")
        for line in range(0, 100, 9):
            try:
                handled(line, APPEND_PATH, lambda: writer.append(b"x"), fork)
            except SystemExit:
                os._exit(7)
        for pid in children:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert len(children) > 3
        assert len(contents(manager, 0)) == 13


def test_a_child_keeps_no_port_and_no_connection(tmp_path: Path) -> None:
    """The port is free, and connections end, as soon as the parent has closed them."""
    with open_quick(tmp_path) as manager:
        server = AdminServer(manager)
        parts = urlsplit(server.url)
        with Client(server.url) as client, Client(server.url) as resting:
            assert client.ask("GET", "/livez")[0] == resting.ask("GET", "/livez")[0] == 200
            begin, end = os.pipe()
            closed, close = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                os.close(end)
                signal.alarm(60)
                server.close()  # it has nothing to stop, and waits for nobody
                os.write(close, b"c")
                os.read(begin, 1)
                os._exit(0)
            os.close(begin)
            os.close(close)
            try:
                assert client.ask("GET", "/livez")[0] == 200, "the parent continues to answer"
                assert os.read(closed, 1) == b"c", "the child runs"
                server.close()
                for each in (client, resting):
                    assert each.connection.sock.recv(1) == b"", "its end has come although the child is there"
                AdminServer(manager, port=parts.port or 0).close()
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", parts.port or 0))
            finally:
                os.close(end)
                os.close(closed)
                assert os.waitpid(pid, 0)[1] == 0
