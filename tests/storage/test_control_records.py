"""Each control record of the log may follow each other one, in one commit or after a checkpoint, by any threads.

After that the store opens, and everything in it is as it was. ``docs/design/storage.md`` has the rule for each record.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from pybk.errors import (
    IllegalOperationError,
    LedgerClosedError,
    LedgerExistsError,
    LedgerFencedError,
    NoSuchLedgerError,
    PybkError,
    StorageFullError,
    VersionConflictError,
)
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage import store as store_module
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.log_file import RecordKind, encode_control
from pybk.storage.log.commit import Commit
from pybk.storage.named_records import NamedChange
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.store import Store
from pybk.storage.store_reader import StoreReader
from pybk.storage.transaction_group import LedgerEntries
from tests.internals import digest_of, store_of
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.beside import Beside
from tests.storage.real_store import numbered
from tests.storage.store_harness import CONFIG, ROOT, abandon, open_store
from tests.waiting import WAIT_S

LEDGER = 7
REFUSALS = (
    IllegalOperationError,
    LedgerClosedError,
    LedgerExistsError,
    LedgerFencedError,
    NoSuchLedgerError,
    VersionConflictError,
)


def metadata_of(ledger_id: int = LEDGER) -> LedgerMetadata:
    """Return the metadata of a ledger to be created."""
    return LedgerMetadata(
        ledger_id=ledger_id,
        digest_type=DigestType.CRC32C,
        creation_time_ns=1,
        creation_sequence=1,
        tier=StorageHint.NVME,
        key_salt=bytes(16),
        verifier=bytes(32),
    )


class Scene(NamedTuple):
    """A store with a ledger, and the ledger's writer; None if the ledger is to be created."""

    store: Store
    writer: LedgerWriter | None

    @property
    def ledger_id(self) -> int:
        """The ledger."""
        return LEDGER if self.writer is None else self.writer.ledger_id


def group(scene: Scene) -> None:
    """Append an entry of the ledger and make a named record, both or neither."""
    descriptor = scene.store.descriptor(scene.ledger_id)
    assert scene.writer is not None
    entries = [LedgerEntries(descriptor, digest_of(scene.writer), [b"grouped"])]
    scene.store.append_group(entries, [NamedChange("name", None, b"grouped")])


def reseal(scene: Scene) -> None:
    """Seal a closed ledger."""
    descriptor = scene.store.descriptor(scene.ledger_id)
    scene.store.reseal(descriptor, replace(descriptor.metadata, seal=bytes(32)))


CHANGES: dict[str, Callable[[Scene], object]] = {
    "create": lambda scene: scene.store.create(metadata_of()),
    "close": lambda scene: scene.store.close_ledger(scene.store.descriptor(scene.ledger_id), fence=False),
    "fence": lambda scene: scene.store.close_ledger(scene.store.descriptor(scene.ledger_id), fence=True),
    "force": lambda scene: scene.store.force(scene.store.descriptor(scene.ledger_id)),
    "reseal": reseal,
    "move": lambda scene: scene.store.move(scene.store.descriptor(scene.ledger_id), StorageHint.HDD),
    "delete": lambda scene: scene.store.delete(scene.store.descriptor(scene.ledger_id)),
    "group": group,
    "named": lambda scene: scene.store.named.compare_and_set("name", None, b"named", level=scene.store.feature_level),
}
"""What writes control records: the log has no others."""

PAIRS = [
    pair
    for pair in itertools.product(CHANGES, repeat=2)
    if set(pair) != {"force", "group"}  # a group takes no deferred ledger
    and (pair[1] != "create" or pair[0] == "create")  # a ledger is created before anything happens to it
    and pair not in {("create", "group"), ("group", "reseal"), ("move", "move")}  # which exclude each other
]


def scene_of(manager: LedgerManager, pair: tuple[str, str]) -> Scene:
    """Return a store with the ledger that two changes need."""
    store = store_of(manager)
    if pair[0] == "create":
        return Scene(store, None)
    flags = WriteFlag.DEFERRED_FORCE if "force" in pair else WriteFlag.NONE
    writer = manager.create_ledger(insecure=True, write_flags=flags)
    writer.append_many(numbered(3))
    if "reseal" in pair and pair[0] not in {"close", "fence", "force"}:
        writer.close()
    return Scene(store, writer)


def state_of(store: StoreReader) -> Any:
    """Return everything that the records of the log say about ledgers and named records."""
    ledgers = [store.descriptor(metadata.ledger_id) for metadata in store.ledgers()]
    rows = [(each.metadata, each.last_durable, each.last_add_confirmed, each.length_durable) for each in ledgers]
    return rows, store.named.all()


def check_after_stop(manager: LedgerManager, fs: SimFileSystem) -> None:
    """Kill a process; its store opens, for reading alone and for writing, as it was."""
    store = store_of(manager)
    store.log.flush(kept=True)
    before = state_of(store)
    abandon(manager)
    fs = fs.kill()
    reader = ReadOnlyStore.open(ROOT, config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    assert state_of(reader) == before
    reader.close()
    again = open_store(fs)
    assert state_of(store_of(again)) == before
    abandon(again)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_store_opens_after_any_two_changes_of_a_ledger(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_store(fs := SimFileSystem(1))
    scene = scene_of(manager, (first, second))
    beside = Beside(scene.store, lambda: CHANGES[second](scene), monkeypatch)
    CHANGES[first](scene)
    if second == "move":  # which holds the lock of checkpoints, so that none can fall between the two
        beside.release()
    beside.finish()
    assert beside.error is None or isinstance(beside.error, REFUSALS)
    check_after_stop(manager, fs)


def concurrently(*changes: Callable[[], object]) -> list[PybkError | None]:
    """Make changes by threads of their own; return the error of each."""
    errors: list[PybkError | None] = [None] * len(changes)

    def make(number: int) -> None:
        try:
            changes[number]()
        except REFUSALS as error:
            errors[number] = error

    threads = [threading.Thread(target=make, args=(number,)) for number in range(len(changes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return errors


def test_a_store_opens_after_all_changes_of_a_ledger_at_the_same_time() -> None:
    for _ in range(5):
        manager = open_store(fs := SimFileSystem(1))
        scene = scene_of(manager, ("close", "delete"))
        calls = [partial(CHANGES[name], scene) for name in CHANGES if name != "create" for _ in range(2)]
        concurrently(*calls, scene.store.scheduler.checkpoint)
        check_after_stop(manager, fs)


def refuse_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have commits be refused for lack of space; return a function that ends it."""
    write = store.log.writer.write

    def refuse(commit: Commit) -> None:
        raise StorageFullError("no space")

    def accept() -> None:
        monkeypatch.setattr(store.log.writer, "write", write)
        store.log.readmit()

    monkeypatch.setattr(store.log.writer, "write", refuse)
    monkeypatch.setattr(store_module, "RETRIES_WHEN_FULL", 0)
    return accept


def call_when_refused(store: Store, call: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a function once a commit was refused, and before the thread that waited for it learns of that."""
    wait, called = store.log.wait, list[bool]()

    def wait_and_call(commit: Commit) -> None:
        wait(commit)
        if commit.error is not None and not called:
            called.append(True)
            call()

    monkeypatch.setattr(store.log, "wait", wait_and_call)


def test_a_close_beside_one_that_was_refused_closes_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_store(fs := SimFileSystem(1))
    store, descriptor = opened_scene(manager)
    accept = refuse_commits(store, monkeypatch)

    def close_again() -> None:
        accept()
        store.close_ledger(descriptor, fence=False)
        assert descriptor.metadata.state is LedgerState.CLOSED

    call_when_refused(store, close_again, monkeypatch)
    with pytest.raises(StorageFullError):
        store.close_ledger(descriptor, fence=False)
    check_after_stop(manager, fs)


def test_a_change_after_one_that_was_refused_does_not_make_that_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_store(fs := SimFileSystem(1))
    store, descriptor = opened_scene(manager)
    accept = refuse_commits(store, monkeypatch)

    def move() -> None:
        accept()
        store.move(descriptor, StorageHint.HDD)

    call_when_refused(store, move, monkeypatch)
    with pytest.raises(StorageFullError):
        store.close_ledger(descriptor, fence=False)
    assert (descriptor.metadata.state, descriptor.metadata.tier) == (LedgerState.OPEN, StorageHint.HDD)
    check_after_stop(manager, fs)


def test_a_change_beside_a_close_does_not_undo_it(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_store(fs := SimFileSystem(1))
    store, descriptor = opened_scene(manager)
    accept = refuse_commits(store, monkeypatch)
    staged, go, threads = threading.Event(), threading.Event(), list[threading.Thread]()
    wait = store.log.wait

    def wait_late(commit: Commit) -> None:
        if threading.current_thread() in threads:
            staged.set()
            assert go.wait(WAIT_S)
        wait(commit)

    def close_again() -> None:
        accept()
        threads.append(threading.Thread(target=store.close_ledger, args=(descriptor,), kwargs={"fence": False}))
        threads[0].start()
        assert staged.wait(WAIT_S)

    monkeypatch.setattr(store.log, "wait", wait_late)
    call_when_refused(store, close_again, monkeypatch)
    with pytest.raises(StorageFullError):
        store.close_ledger(descriptor, fence=False)
    store.move(descriptor, StorageHint.HDD)  # staged after the second close, and before it is durable
    go.set()
    threads[0].join(WAIT_S)
    assert (descriptor.metadata.state, descriptor.metadata.tier) == (LedgerState.CLOSED, StorageHint.HDD)
    check_after_stop(manager, fs)


def opened_scene(manager: LedgerManager) -> tuple[Store, LedgerDescriptor]:
    """Return a store with an open ledger of three entries."""
    scene = scene_of(manager, ("close", "close"))
    return scene.store, scene.store.descriptor(scene.ledger_id)


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_ledger_whose_creation_was_interrupted_is_there_before_a_restart_as_after_it(
    durable: bool, checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = open_store(fs := SimFileSystem(1))
    store = store_of(manager)
    wait = store.log.wait

    def interrupted(commit: Commit) -> None:
        if durable:
            wait(commit)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store.log, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.create(metadata_of())
    store.log.flush()
    with pytest.raises(LedgerExistsError):
        store.create(metadata_of())
    assert [metadata.ledger_id for metadata in store.ledgers()] == [LEDGER]
    if checkpoint:
        store.scheduler.checkpoint()
    check_after_stop(manager, fs)


def test_a_ledger_whose_creation_was_refused_can_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_store(fs := SimFileSystem(1))
    store = store_of(manager)
    accept = refuse_commits(store, monkeypatch)
    with pytest.raises(StorageFullError):
        store.create(metadata_of())
    with pytest.raises(NoSuchLedgerError):
        store.descriptor(LEDGER)
    accept()
    store.create(metadata_of())
    check_after_stop(manager, fs)


def test_entries_that_were_refused_are_not_written_after_the_delete_of_their_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = open_store(fs := SimFileSystem(1))
    store = store_of(manager)
    writer = manager.create_ledger(insecure=True, write_flags=WriteFlag.DEFERRED_FORCE)
    accept = refuse_commits(store, monkeypatch)
    writer.append(b"acknowledged")
    with pytest.raises(StorageFullError):
        store.log.flush()
    monkeypatch.undo()
    manager.delete_ledger(writer.ledger_id)
    store.scheduler.checkpoint()
    accept()
    check_after_stop(manager, fs)


def test_no_ledger_begins_with_a_change() -> None:
    manager = open_store(fs := SimFileSystem(1))
    store, descriptor = opened_scene(manager)
    store.delete(descriptor)
    store.scheduler.checkpoint()
    late = replace(descriptor.metadata, tier=StorageHint.HDD, version=1)

    def encode(lsn: int) -> bytes:
        return encode_control(RecordKind.LEDGER, late.ledger_id, late.version, late.encode(), lsn=lsn)

    store.log.stage_control(encode, lambda: None)
    check_after_stop(manager, fs)
