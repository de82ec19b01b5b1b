"""Situations of logs and blobs, which are the same in a store and in a cluster."""

from __future__ import annotations

from pybk.errors import (
    BlobExistsError,
    BlobGivenUpError,
    BlobLockedError,
    ClosedError,
    LogExistsError,
    LogFencedError,
    LogLockedError,
    LogSealedError,
    NoSuchBlobError,
    NoSuchLogError,
    OutOfOrderError,
    RewoundError,
    TruncatedError,
    TruncateGuardError,
)
from pybk.streams.blob_store import BlobStore
from pybk.streams.log import Log
from pybk.streams.namespace import Namespace
from pybk.streams.snapshot_store import SnapshotStore
from pybk.streams.wal import WriteAheadLog
from tests.error_situations.situation import PASSWORD, Scene, Situation, raises
from tests.internals import backend_of


def opened(scene: Scene) -> Log:
    return scene.stack.enter_context(Log.open(scene.store(), "log", password=PASSWORD))


def count(log: Log) -> int:
    with log.reader() as reader:
        return [each.data for each in reader].count(b"x")


@raises(NoSuchLogError)
def unknown_log(scene: Scene) -> Situation:
    logs = scene.stack.enter_context(Namespace.open(scene.store(), password=PASSWORD))

    def create() -> None:
        logs.create("log")
        logs.delete("log")

    return Situation(lambda: logs.delete("log"), create)


@raises(LogExistsError)
def log_that_exists(scene: Scene) -> Situation:
    logs = scene.stack.enter_context(Namespace.open(scene.store(), password=PASSWORD))
    logs.create("log")
    return Situation(lambda: logs.create("log"), lambda: logs.create("other"), lambda: len(logs.names()) - 1)


@raises(LogFencedError)
def append_after_a_take_over(scene: Scene) -> Situation:
    """It is known that nothing was appended, because the segment had been closed."""
    log = opened(scene)
    writer = log.writer()
    stolen = scene.stack.enter_context(log.writer(steal=True))
    return Situation(lambda: writer.append(b"x"), lambda: stolen.append(b"of the new owner"), lambda: count(log))


@raises(LogFencedError)
def truncation_after_a_take_over(scene: Scene) -> Situation:
    manager = scene.store()
    wal = WriteAheadLog.open(manager, "wal", password=PASSWORD)
    wal.append_many([b"1", b"2"])
    wal.roll()
    stolen = scene.stack.enter_context(WriteAheadLog.open(manager, "wal", password=PASSWORD, steal=True))
    return Situation(
        lambda: wal.truncate_before(2), lambda: stolen.truncate_before(2), lambda: int(stolen.first_lsn() == 2)
    )


@raises(LogLockedError, retryable=True)
def log_with_a_writer(scene: Scene) -> Situation:
    log = opened(scene)
    writer = log.writer()
    return Situation(lambda: log.writer().close(), writer.close)


@raises(OutOfOrderError)
def transaction_id_that_falls(scene: Scene) -> Situation:
    log = opened(scene)
    writer = scene.stack.enter_context(log.writer())
    writer.append(b"first", txid=5)
    return Situation(lambda: writer.append(b"x", txid=1), lambda: writer.append(b"next", txid=6), lambda: count(log))


@raises(LogSealedError)
def sealed_log(scene: Scene) -> Situation:
    manager = scene.store()
    log = Log.open(manager, "log", password=PASSWORD)
    log.writer().seal()
    return Situation(log.writer, lambda: Log.open(manager, "other", password=PASSWORD).writer().close())


@raises(TruncatedError)
def record_that_was_dropped(scene: Scene) -> Situation:
    wal = scene.stack.enter_context(WriteAheadLog.open(scene.store(), "wal", password=PASSWORD))
    wal.append_many([b"1", b"2"])
    wal.truncate_before(2)
    return Situation(lambda: wal.read(1), lambda: wal.read(wal.first_lsn()))


@raises(TruncateGuardError)
def records_that_a_subscription_needs(scene: Scene) -> Situation:
    log = opened(scene)
    with log.writer() as writer:
        writer.append_many([b"1", b"2"])
    subscription = scene.stack.enter_context(log.subscribe("s", start=0))

    def acknowledge() -> None:
        subscription.ack(0)
        subscription.close()
        log.truncate(1)

    return Situation(lambda: log.truncate(1), acknowledge, lambda: log.first_seq())


@raises(RewoundError)
def records_that_were_cut(scene: Scene) -> Situation:
    wal = scene.stack.enter_context(WriteAheadLog.open(scene.store(), "wal", password=PASSWORD))
    wal.append_many([b"1", b"2", b"3"])
    generation = wal.generation()
    wal.truncate_after(1)
    wal.append(b"new")
    return Situation(
        lambda: next(wal.follow(4, generation=generation, timeout=0)), lambda: next(wal.follow(2, timeout=0))
    )


# ---- blobs -----------------------------------------------------------------------------------------------------------


def blobs_of(scene: Scene) -> BlobStore:
    return BlobStore.open(scene.store(), password=PASSWORD)


@raises(NoSuchBlobError)
def unknown_blob(scene: Scene) -> Situation:
    blobs = blobs_of(scene)
    return Situation(lambda: blobs.get("a"), lambda: (blobs.put("a", b""), blobs.get("a")))


@raises(BlobExistsError)
def blob_that_exists(scene: Scene) -> Situation:
    blobs = blobs_of(scene)
    blobs.put("a", b"1")
    return Situation(
        lambda: blobs.put("a", b"x", overwrite=False),
        lambda: blobs.put("b", b"x", overwrite=False),
        lambda: int(blobs.get("a") == b"x"),
    )


@raises(BlobLockedError, retryable=True)
def snapshots_that_another_saves(scene: Scene) -> Situation:
    blobs = blobs_of(scene)
    snapshots = SnapshotStore(blobs, "db", keep=2)
    lock = backend_of(blobs.manager).try_lock(f"snapshots.{blobs.name}.db", "another")
    assert lock is not None
    return Situation(lambda: snapshots.save(b"x"), lock.release, lambda: len(snapshots.list()))


@raises(BlobGivenUpError)
def upload_that_was_given_up(scene: Scene) -> Situation:
    cluster = scene.cluster(3)
    here, there = (BlobStore.open(cluster.connect(), password=PASSWORD) for _ in range(2))
    upload = there.create_blob("a")
    upload.write(b"x")
    assert here.sweep(older_than_s=0) == 1
    return Situation(upload.commit, lambda: there.put("a", b"x"), lambda: int(here.exists("a")), again=ClosedError)
