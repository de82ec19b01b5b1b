"""Situations in a store of one process, but for those of logs and blobs."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from xxhash import xxh3_64_hexdigest

from pybk import errors
from pybk.errors import (
    AppendTimeoutError,
    ClosedError,
    CookieError,
    CorruptError,
    DigestMismatchError,
    DuplicateEntryError,
    ForkedProcessError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerExistsError,
    LedgerFencedError,
    LedgerUnsealedError,
    NoSuchEntryError,
    NoSuchLedgerError,
    OutOfMemoryError,
    PybkError,
    ReadRangeError,
    SealMismatchError,
    StorageFailedError,
    StorageFullError,
    StorageRefusedError,
    StoreLockedError,
    TooManyRequestsError,
    UnauthorizedError,
    UnsupportedFormatError,
    UsageError,
    VersionConflictError,
)
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.operations.store_repair import rebuild_index
from pybk.storage.io.filesystem import OsFile, OsFileSystem
from pybk.streams.wal import WriteAheadLog
from tests.error_situations.situation import PASSWORD, Scene, Situation, entries_of, raises
from tests.internals import backend_of
from tests.storage.real_store import open_quick, stop_syncing
from tests.waiting import WAIT_S, wait_until


def ids(manager: Any) -> int:
    return len(list(manager.list_ledgers()))


@raises(UsageError)
def password_of_text(scene: Scene) -> Situation:
    manager: Any = scene.store()
    return Situation(
        lambda: manager.create_ledger(password="text"),
        lambda: manager.create_ledger(password=b"text"),
        lambda: ids(manager),
    )


@raises(ClosedError)
def closed_manager(scene: Scene) -> Situation:
    manager = scene.store()
    manager.close()
    return Situation(lambda: manager.create_ledger(password=PASSWORD), scene.store)


@raises(IllegalOperationError)
def read_only_manager(scene: Scene) -> Situation:
    manager = scene.store()
    reading = scene.stack.enter_context(open_quick(scene.path / "store", read_only=True))
    return Situation(
        lambda: reading.create_ledger(password=PASSWORD),
        lambda: manager.create_ledger(password=PASSWORD),
        lambda: ids(manager),
    )


@raises(ForkedProcessError)
def forked_child(scene: Scene) -> Situation:
    manager = scene.store()

    def create() -> None:
        """Create a ledger in a forked child, and raise what that has raised."""
        readable, writable = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                manager.create_ledger(password=PASSWORD)
            except PybkError as error:
                os.write(writable, f"{type(error).__name__} {error.outcome_unknown:d} {error.retryable:d}".encode())
            finally:
                os._exit(0)
        os.close(writable)
        with open(readable, encoding="utf-8") as said:
            name, unknown, retryable = said.read().split()
        os.waitpid(child, 0)
        raised: PybkError = getattr(errors, name)("in the child", outcome_unknown=unknown == "1")
        raised.retryable = retryable == "1"
        raise raised

    return Situation(create, lambda: manager.create_ledger(password=PASSWORD), lambda: ids(manager))


# ---- ledgers ---------------------------------------------------------------------------------------------------------


@raises(NoSuchLedgerError)
def ledger_that_never_was(scene: Scene) -> Situation:
    manager = scene.store()
    manager.create_ledger(password=PASSWORD).close()
    return Situation(
        lambda: manager.open_ledger(77, password=PASSWORD), lambda: manager.open_ledger(0, password=PASSWORD)
    )


@raises(LedgerExistsError)
def ledger_that_exists(scene: Scene) -> Situation:
    manager = scene.store()
    manager.create_ledger(ledger_id=7, password=PASSWORD)
    return Situation(
        lambda: manager.create_ledger(ledger_id=7, password=PASSWORD),
        lambda: manager.create_ledger(ledger_id=8, password=PASSWORD),
        lambda: ids(manager) - 1,
    )


@raises(LedgerClosedError)
def closed_writer(scene: Scene) -> Situation:
    manager = scene.store()
    writer = manager.create_ledger(insecure=True)
    writer.close()
    return Situation(
        lambda: writer.append(b"x"),
        lambda: manager.create_ledger(insecure=True).append(b"x"),
        lambda: entries_of(manager, writer.ledger_id, b"x"),
    )


@raises(LedgerFencedError)
def fenced_writer(scene: Scene) -> Situation:
    """It is known that nothing was appended, because the ledger had been closed."""
    manager = scene.store()
    writer = manager.create_ledger(insecure=True)
    writer.append(b"before")
    manager.open_ledger(writer.ledger_id, recover=True).close()
    return Situation(
        lambda: writer.append(b"x"),
        lambda: manager.open_ledger(writer.ledger_id).last_add_confirmed,
        lambda: entries_of(manager, writer.ledger_id, b"x"),
    )


@raises(LedgerUnsealedError)
def open_ledger_without_seal(scene: Scene) -> Situation:
    manager = scene.store()
    writer = manager.create_ledger(password=PASSWORD)
    writer.append(b"x")
    return Situation(
        lambda: manager.check_seal(writer.ledger_id, password=PASSWORD, require=True),
        writer.close,
    )


@raises(SealMismatchError)
def metadata_that_were_changed(scene: Scene) -> Situation:
    manager = scene.store()
    with manager.create_ledger(password=PASSWORD) as writer:
        writer.append(b"x")
    metadata = manager.ledger_metadata(writer.ledger_id)
    return Situation(
        lambda: manager.check_seal(dataclasses.replace(metadata, length=2), password=PASSWORD),
        lambda: manager.check_seal(metadata, password=PASSWORD),
    )


@raises(UnauthorizedError)
def wrong_password(scene: Scene) -> Situation:
    manager = scene.store()
    manager.create_ledger(password=PASSWORD).close()
    return Situation(
        lambda: manager.open_ledger(0, password=b"another"), lambda: manager.open_ledger(0, password=PASSWORD)
    )


@raises(OutOfMemoryError, retryable=True)
def no_memory_for_a_password(scene: Scene) -> Situation:
    manager = scene.store()
    short = True

    class Short:
        def __init__(self, **arguments: Any) -> None:
            self._arguments = arguments

        def derive(self, password: bytes) -> bytes:
            if short:
                raise MemoryError
            return Scrypt(**self._arguments).derive(password)

    def free() -> None:
        nonlocal short
        short = False

    scene.monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", Short)
    return Situation(lambda: manager.create_ledger(password=PASSWORD), free, lambda: ids(manager))


# ---- entries ---------------------------------------------------------------------------------------------------------


@raises(NoSuchEntryError)
def record_that_does_not_exist(scene: Scene) -> Situation:
    wal = scene.stack.enter_context(WriteAheadLog.open(scene.store(), insecure=True))
    last = wal.append(b"x")
    return Situation(lambda: wal.read(last + 1), lambda: wal.read(last))


@raises(ReadRangeError)
def range_beyond_the_end(scene: Scene) -> Situation:
    manager = scene.store()
    with manager.create_ledger(insecure=True) as writer:
        writer.append(b"x")
    reader = manager.open_ledger(writer.ledger_id)
    return Situation(lambda: list(reader.read(0, 5)), lambda: list(reader.read(0, reader.last_add_confirmed)))


@raises(DuplicateEntryError)
def entry_that_is_there(scene: Scene) -> Situation:
    manager = scene.store()
    writer = manager.create_ledger(ledger_id=0, insecure=True)
    writer.append(b"first", entry_id=0)
    return Situation(
        lambda: writer.append(b"x", entry_id=0),
        lambda: writer.append(b"next", entry_id=1),
        lambda: entries_of(manager, 0, b"x"),
    )


@raises(DigestMismatchError)
def entry_that_was_damaged(scene: Scene) -> Situation:
    manager = scene.store()
    with manager.create_ledger(insecure=True) as writer:
        writer.append(b"to be damaged")
    manager.checkpoint()
    manager.move_ledger(writer.ledger_id, StorageHint.HDD)
    damaged = [
        path for path in (scene.path / "store/hdd").rglob("*") if path.is_file() and b"to be dam" in path.read_bytes()
    ]

    def exchange(before: bytes, after: bytes) -> None:
        for path in damaged:
            path.write_bytes(path.read_bytes().replace(before, after))

    exchange(b"to be damaged", b"to be Damaged")
    reader = manager.open_ledger(writer.ledger_id)
    return Situation(lambda: list(reader), lambda: exchange(b"to be Damaged", b"to be damaged"))


@raises(TooManyRequestsError, retryable=True)
def too_much_outstanding(scene: Scene) -> Situation:
    manager = scene.store(max_outstanding_bytes=64 << 10)
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(scene.monkeypatch)
    many = writer.append_many_async([bytes(4000)] * 16)

    def wait() -> None:
        go.set()
        many.result(WAIT_S)

    return Situation(
        lambda: writer.append_async(b"x" * 4000, wait=False).result(WAIT_S),
        wait,
        lambda: entries_of(manager, writer.ledger_id, b"x" * 4000),
    )


@raises(AppendTimeoutError, unknown=True)
def append_that_takes_long(scene: Scene) -> Situation:
    manager = scene.store()
    writer = manager.create_ledger(insecure=True)
    go = stop_syncing(scene.monkeypatch)
    future = writer.append_async(b"x")

    def wait() -> None:
        go.set()
        future.result(WAIT_S)
        assert entries_of(manager, writer.ledger_id, b"x") == 1

    return Situation(lambda: future.result(0.02), wait, lambda: entries_of(manager, writer.ledger_id, b"x"))


@raises(VersionConflictError)
def record_that_another_changed(scene: Scene) -> Situation:
    backend = backend_of(scene.store())
    first = backend.write_record("a", b"1", None)
    now = backend.write_record("a", b"2", first)
    return Situation(
        lambda: backend.write_record("a", b"x", first),
        lambda: backend.write_record("a", b"x", now),
        lambda: int((found := backend.read_record("a")) is not None and found.value == b"x"),
    )


# ---- disks -----------------------------------------------------------------------------------------------------------


@raises(StorageRefusedError, retryable=True)
def no_descriptors(scene: Scene) -> Situation:
    manager = scene.store()
    manager.create_ledger(storage_hints={StorageHint.HDD}, insecure=True).append_many([b"x"] * 100)
    create, short = OsFileSystem.create, True

    def refuse(self: OsFileSystem, path: str, size: int) -> OsFile:
        if short and path.endswith(".cold"):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return create(self, path, size)

    def free() -> None:
        nonlocal short
        short = False

    scene.monkeypatch.setattr(OsFileSystem, "create", refuse)
    return Situation(manager.checkpoint, free, lambda: len(list((scene.path / "store/hdd").glob("*.cold"))))


@raises(StorageFullError, retryable=True)
def full_disk(scene: Scene) -> Situation:
    manager = scene.store(free_bytes_low=1 << 20, free_bytes_ok=2 << 20)
    writer = manager.create_ledger(insecure=True)
    free_bytes, full = OsFileSystem.free_bytes, True
    scene.monkeypatch.setattr(OsFileSystem, "free_bytes", lambda fs, path: 0 if full else free_bytes(fs, path))
    wait_until(lambda: manager.health().state == "read_only")

    def free() -> None:
        nonlocal full
        full = False
        wait_until(lambda: manager.health().state == "ok")

    return Situation(lambda: writer.append(b"x"), free, lambda: entries_of(manager, writer.ledger_id, b"x"))


def broken_store(scene: Scene) -> tuple[LedgerManager, LedgerWriter, Callable[[], None]]:
    """Return a store whose device fails, a writer, and what mends the device and opens the store again."""
    manager, broken = scene.store(), False
    writer = manager.create_ledger(insecure=True)
    write_durable = OsFile.write_durable

    def write(self: OsFile, buffers: Any, offset: int) -> None:
        if broken:
            raise OSError(errno.EIO, "Input/output error", "the log file")
        write_durable(self, buffers, offset)

    def mend() -> None:
        nonlocal broken
        broken = False
        manager.close()
        again = scene.store()
        again.open_ledger(writer.ledger_id).close()
        again.create_ledger(insecure=True).append(b"x")

    scene.monkeypatch.setattr(OsFile, "write_durable", write)
    broken = True
    return manager, writer, mend


@raises(StorageFailedError, unknown=True)
def failed_sync(scene: Scene) -> Situation:
    manager, writer, mend = broken_store(scene)
    return Situation(lambda: writer.append(b"x"), mend, lambda: entries_of(manager, writer.ledger_id, b"x"))


@raises(StorageFailedError)
def failed_store(scene: Scene) -> Situation:
    """An append that comes after the failure is refused, and so certainly not there."""
    manager, writer, mend = broken_store(scene)
    with suppress(StorageFailedError):
        writer.append(b"failed")
    return Situation(lambda: writer.append(b"x"), mend, lambda: entries_of(manager, writer.ledger_id, b"x"))


@raises(StoreLockedError, retryable=True)
def directory_that_another_has(scene: Scene) -> Situation:
    manager = scene.store()
    return Situation(lambda: scene.store().create_ledger(insecure=True), manager.close)


@raises(CorruptError)
def file_that_is_gone(scene: Scene) -> Situation:
    root = scene.path / "store"
    with open_quick(root) as manager, manager.create_ledger(insecure=True) as writer:
        writer.append(b"x")
        manager.checkpoint()
    path, elsewhere = root / "ssd" / "entries" / "data.mdb", scene.path / "elsewhere"
    path.rename(elsewhere)
    return Situation(scene.store, lambda: (elsewhere.rename(path), scene.store()))


@raises(UnsupportedFormatError)
def directory_of_a_later_version(scene: Scene) -> Situation:
    root = scene.path / "store"
    open_quick(root).close()
    path = root / "nvme" / "cookie"
    sound = path.read_bytes()
    fields = json.loads(sound) | {"format": 99}
    del fields["checksum"]
    checksum = xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
    path.write_bytes(json.dumps(fields | {"checksum": checksum}, sort_keys=True).encode())
    return Situation(scene.store, lambda: (path.write_bytes(sound), scene.store()))


@raises(CookieError)
def device_that_is_not_mounted(scene: Scene) -> Situation:
    root = scene.path / "store"
    open_quick(root).close()
    (root / "hdd" / "cookie").unlink()
    return Situation(scene.store, lambda: (rebuild_index(str(root)), scene.store()))
