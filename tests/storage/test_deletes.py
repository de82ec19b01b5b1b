"""A ledger is deleted once, and nothing of it follows its delete in the log, whatever other threads do."""

from __future__ import annotations

import tarfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.errors import NoSuchLedgerError, StorageFullError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.log_file import RecordKind, encode_control
from pybk.storage.log.commit import Commit
from pybk.storage.repair.verify import verify_store
from pybk.storage.store import Store
from tests.internals import store_of
from tests.paths import GOLDEN
from tests.storage.beside import Beside
from tests.storage.real_store import contents, numbered, open_quick
from tests.waiting import WAIT_S


def end_as_killed(manager: LedgerManager) -> None:
    """Close a store such that the next open replays its log."""
    store_of(manager).close(clean=False)


def make_ledger(manager: LedgerManager, count: int = 3, *, closed: bool = True) -> int:
    """Make a ledger with a few entries."""
    writer = manager.create_ledger(insecure=True)
    writer.append_many(numbered(count))
    if closed:
        writer.close()
    return writer.ledger_id


def close_fenced(store: Store, descriptor: LedgerDescriptor) -> None:
    """Close a ledger as a recovery does."""
    store.close_ledger(descriptor, fence=True)


CHANGES: dict[str, Callable[[Store, LedgerDescriptor], None]] = {
    "delete": Store.delete,
    "close": close_fenced,
    "move": lambda store, descriptor: store.move(descriptor, StorageHint.HDD),
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_of_a_ledger_follows_its_delete(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_quick(tmp_path, background=False)
    store = store_of(manager)
    kept, gone = make_ledger(manager), make_ledger(manager, closed=False)
    descriptor = store.descriptor(gone)
    beside = Beside(store, lambda: CHANGES[what](store, descriptor), monkeypatch)
    store.delete(descriptor)
    if what == "move":  # which holds the lock of checkpoints, so that none can fall between the two
        beside.release()
    beside.finish()
    assert what == "move" or isinstance(beside.error, NoSuchLedgerError)
    end_as_killed(manager)
    with open_quick(tmp_path) as again:
        assert list(again.list_ledgers()) == [kept]
        assert contents(again, kept) == numbered(3)


def closed_at(last: int, metadata: LedgerMetadata) -> LedgerMetadata:
    """Return the metadata of a ledger that was closed."""
    return metadata.closed_at(last, 8 * (last + 1))


def moved(metadata: LedgerMetadata) -> LedgerMetadata:
    """Return the metadata of a ledger that was moved."""
    return replace(metadata, tier=StorageHint.HDD, version=metadata.version + 1)


LATE: dict[str, Callable[[LedgerMetadata], LedgerMetadata] | None] = {
    "delete": None,
    "close": lambda metadata: closed_at(2, metadata),
    "close of an empty ledger": lambda metadata: closed_at(-1, metadata),
    "move": moved,
    "move of a closed ledger": lambda metadata: moved(closed_at(2, metadata)),
}
"""Records of a ledger after its delete, by what wrote them: None for another delete, or the metadata in the record."""


@pytest.mark.parametrize("kind", LATE)
def test_a_log_of_an_older_version_that_names_a_ledger_after_its_delete_is_replayed(kind: str, tmp_path: Path) -> None:
    manager = open_quick(tmp_path, background=False)
    store = store_of(manager)
    kept, gone = make_ledger(manager), make_ledger(manager, 0 if "empty" in kind else 3, closed=False)
    descriptor = store.descriptor(gone)
    store.delete(descriptor)
    store.scheduler.checkpoint()
    change = LATE[kind]

    def encode(lsn: int) -> bytes:
        if change is None:
            return encode_control(RecordKind.DELETE, gone, 0, lsn=lsn)
        metadata = change(descriptor.metadata)
        return encode_control(RecordKind.LEDGER, gone, metadata.version, metadata.encode(), lsn=lsn)

    commit = store.log.stage_control(encode, lambda: None)
    assert commit is not None
    store.log.wait(commit)
    end_as_killed(manager)
    with open_quick(tmp_path, read_only=True) as reader:
        assert list(reader.list_ledgers()) == [kept]
    with open_quick(tmp_path) as again:
        assert list(again.list_ledgers()) == [kept]
        assert contents(again, kept) == numbered(3)


def test_of_many_threads_that_delete_a_ledger_one_does(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        for _ in range(20):
            ledger_id, outcomes = make_ledger(manager), list[str]()

            def delete(ledger_id: int = ledger_id, outcomes: list[str] = outcomes) -> None:
                try:
                    manager.delete_ledger(ledger_id)
                    outcomes.append("deleted")
                except NoSuchLedgerError:
                    outcomes.append("no such ledger")

            threads = [threading.Thread(target=delete) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert sorted(outcomes) == ["deleted"] + 3 * ["no such ledger"]


def test_a_ledger_whose_delete_was_refused_is_closed_and_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as manager:
        store = store_of(manager)
        ledger_id = make_ledger(manager, closed=False)
        descriptor = store.descriptor(ledger_id)
        write = store.log.writer.write

        def refuse(commit: Commit) -> None:
            raise StorageFullError("no space")

        monkeypatch.setattr(store.log.writer, "write", refuse)
        with pytest.raises(StorageFullError):
            store.delete(descriptor)
        monkeypatch.setattr(store.log.writer, "write", write)
        store.log.readmit()
        close_fenced(store, descriptor)
        assert descriptor.metadata.state is LedgerState.CLOSED
        store.delete(descriptor)
        with pytest.raises(NoSuchLedgerError):
            store.delete(descriptor)


def test_a_store_that_an_older_version_could_not_open_any_more_opens(tmp_path: Path) -> None:
    with tarfile.open(GOLDEN / "stores" / "deleted-twice.tar.xz") as packed:
        packed.extractall(tmp_path, filter="data")
    root = tmp_path / "d"
    with LedgerManager.open(root) as manager:
        entries = {
            ledger_id: manager.ledger_metadata(ledger_id).last_entry_id + 1 for ledger_id in manager.list_ledgers()
        }
    assert entries == {14: 10, 15: 3, 16: 3, 17: 7}
    assert not verify_store(str(root)).problems
