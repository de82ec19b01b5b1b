"""Damaged entries in what is backed up: named, or left out by choice, and then told by all that reads the backup."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pybk.backup import list_backup_runs, restore_backup, verify_backup
from pybk.errors import ClosedError, CorruptError, DigestMismatchError, StorageError, StorageFullError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.entry import EntryBatch
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.readonly import ReadOnlyStore
from tests.backup.backup_harness import KNOWN, PASSWORD, StoppedError, backed_up, files, restored
from tests.storage.real_store import contents, numbered, open_quick

DAMAGED = 70
LONG = 40_000
"""Bytes of an entry, so that a ledger of a hundred takes several batches."""


def entries(count: int, first: int = 0) -> list[bytes]:
    return [b"entry %d;" % number + bytes(LONG) for number in range(first, first + count)]


def damage(store: Path, number: int = DAMAGED) -> dict[Path, bytes]:
    """Damage an entry in the files of a store, and return the files as they were."""
    wanted = b"entry %d;" % number
    found = {}
    for path in store.rglob("*.log"):
        data = path.read_bytes()
        if wanted in data:
            found[path] = data
            path.write_bytes(data.replace(wanted, b"Entry %d;" % number))
    assert found
    return found


def filled(store: Path, count: int = 100, **options: object) -> None:
    """Make a store with a ledger whose entries have a record each, between two others."""
    with open_quick(store) as manager:
        manager.create_ledger(password=PASSWORD).append_many(numbered(20))
        writer = manager.create_ledger(password=PASSWORD, **options)  # type: ignore[arg-type]
        for payload in entries(count):
            writer.append(payload)
        writer.close()
        manager.create_ledger(password=PASSWORD).append_many(numbered(20))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    filled(tmp_path / "store")
    return tmp_path / "store"


def left_out(backup: Path, run: int) -> dict[int, str]:
    lines = map(json.loads, (backup / f"run-{run:08d}").read_bytes().splitlines())
    return {line["left_out"]: line["why"] for line in lines if "left_out" in line}


def test_a_damaged_entry_ends_the_run_with_its_ledger_and_number(store: Path, tmp_path: Path) -> None:
    damage(store)
    with pytest.raises(CorruptError, match=f"entry {DAMAGED} of ledger 1 cannot be copied: .*--skip-damaged"):
        backed_up(store, tmp_path / "backup")
    assert "run-00000001" not in files(tmp_path / "backup")


def test_a_ledger_is_copied_up_to_its_damage_and_the_rest_once_it_is_mended(store: Path, tmp_path: Path) -> None:
    sound = damage(store)
    backup = tmp_path / "backup"
    report = backed_up(store, backup, skip_damaged=True)
    assert (report.ledgers, report.entries) == (3, 40 + DAMAGED)
    (text,) = report.left_out
    assert text.startswith(f"entries {DAMAGED} to 99 of ledger 1 are left out: ")
    assert left_out(backup, 1) == {1: text}
    found = verify_backup(backup, passwords=KNOWN)
    assert (found.problems, found.complete, found.left_out) == ((), True, (text,))
    assert [run.left_out for run in list_backup_runs(backup)] == [1]
    restore = restore_backup(backup, tmp_path / "new", passwords=KNOWN)
    assert restore.left_out == (text,)
    with open_quick(tmp_path / "new") as again:
        assert contents(again, 0, PASSWORD) == contents(again, 2, PASSWORD) == numbered(20)
        assert contents(again, 1, PASSWORD) == entries(DAMAGED)
        assert again.open_ledger(1, password=PASSWORD).last_add_confirmed == DAMAGED - 1  # which closes it there
    # Again: it is still left out, and nothing is copied twice.
    again_report = backed_up(store, backup, skip_damaged=True)
    assert (again_report.entries, again_report.changed, again_report.left_out) == (0, 0, (text,))
    with pytest.raises(CorruptError, match=f"entry {DAMAGED} of ledger 1"):
        backed_up(store, backup)
    for path, data in sound.items():
        path.write_bytes(data)
    last = backed_up(store, backup)
    assert (last.entries, last.changed, last.left_out) == (100 - DAMAGED, 1, ())
    found = verify_backup(backup, passwords=KNOWN)
    assert (found.problems, found.left_out) == ((), ())
    with open_quick(restored(backup, tmp_path / "whole")) as whole:
        assert contents(whole, 1, PASSWORD) == entries(100)
        assert whole.check_seal(1, password=PASSWORD, require=True)


def test_the_first_entry_may_be_the_damaged_one(store: Path, tmp_path: Path) -> None:
    damage(store, 0)
    report = backed_up(store, tmp_path / "backup", skip_damaged=True)
    assert (report.ledgers, report.entries) == (3, 40)
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, 1, PASSWORD) == []


@pytest.mark.parametrize("digest_type", [DigestType.NONE, DigestType.CRC32C])
def test_an_entry_that_was_damaged_after_a_run(tmp_path: Path, digest_type: DigestType) -> None:
    """What the backup has of the ledger stays in it."""
    store, backup = tmp_path / "store", tmp_path / "backup"
    with open_quick(store) as manager:
        writer = manager.create_ledger(password=PASSWORD, digest_type=digest_type, insecure=True)
        for payload in entries(10):
            writer.append(payload)
        backed_up(manager, backup)
        for payload in entries(10, 10):
            writer.append(payload)
    damage(store, 10)
    report = backed_up(store, backup, skip_damaged=True)
    assert (report.entries, report.changed) == (0, 0)
    assert report.left_out[0].startswith("entries 10 to 19 of ledger 0 are left out: ")
    with open_quick(restored(backup, tmp_path / "new")) as again:
        assert contents(again, 0, PASSWORD) == entries(10)


def test_a_last_add_confirmed_beyond_the_damage_ends_before_it(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(password=PASSWORD, write_flags=WriteFlag.DEFERRED_FORCE)
        for payload in entries(10):
            writer.append(payload)
            writer.force()  # so that each has a record of its own
    damage(tmp_path / "store", 5)
    backed_up(tmp_path / "store", tmp_path / "backup", skip_damaged=True)
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, 0, PASSWORD) == entries(5)


def test_an_entry_whose_authentication_code_is_wrong_is_left_out_with_the_password(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those on the disk, but somebody changed them, and the checksum with them."""
    monkeypatch.setattr("pybk.storage.format.log_file.check_body", lambda *_, **__: None)
    damage(store)
    monkeypatch.setattr(ReadOnlyStore, "read_batch", _unchecked(ReadOnlyStore.read_batch))
    with pytest.raises(DigestMismatchError, match=f"entry {DAMAGED} of ledger 1"):
        backed_up(store, tmp_path / "backup")
    report = backed_up(store, tmp_path / "backup", skip_damaged=True)
    assert report.left_out[0].startswith(f"entries {DAMAGED} to 99 of ledger 1 are left out: ")


def _unchecked(read_batch: Callable[..., EntryBatch]) -> Callable[..., EntryBatch]:
    def read(self: ReadOnlyStore, *arguments: Any, **options: Any) -> EntryBatch:
        return read_batch(self, *arguments, **{**options, "digest_bytes": 32})

    return read


def test_a_ledger_whose_seal_is_wrong_is_left_out_whole(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(store) as manager:
        metadata = manager.ledger_metadata(1)

    class Shortened(ReadOnlyStore):
        def cut(self):  # type: ignore[no-untyped-def]
            found = super().cut()
            wrong = [
                row._replace(metadata=row.metadata.with_seal(b"x" * len(metadata.seal), metadata.last_digest))
                if row.metadata.ledger_id == 1
                else row
                for row in found.ledgers
            ]
            return found._replace(ledgers=tuple(wrong))

    monkeypatch.setattr("pybk.backup.ReadOnlyStore", Shortened)
    for _ in range(2):  # the second has no entry left to copy
        with pytest.raises(CorruptError, match="ledger 1"):
            backed_up(store, tmp_path / "backup")
    report = backed_up(store, tmp_path / "backup", skip_damaged=True)
    assert report.ledgers == 2
    assert report.left_out[0].startswith("entries 0 to 99 of ledger 1 are left out: ")
    assert not verify_backup(tmp_path / "backup", passwords=KNOWN).problems
    assert restore_backup(tmp_path / "backup", tmp_path / "new").ledgers == 2


@pytest.mark.parametrize("error", [StorageError("a sector cannot be read"), CorruptError("cut")])
def test_a_device_that_cannot_read_is_damage_too(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    read_batch = ReadOnlyStore.read_batch

    def fail(self, descriptor, first, last, max_bytes, **options):  # type: ignore[no-untyped-def]
        if descriptor.ledger_id == 1:
            raise error
        return read_batch(self, descriptor, first, last, max_bytes, **options)

    monkeypatch.setattr(ReadOnlyStore, "read_batch", fail)
    assert backed_up(store, tmp_path / "backup", skip_damaged=True).entries == 40


@pytest.mark.parametrize("error", [StorageFullError("no memory"), ClosedError("closed"), StoppedError("bug")])
def test_what_is_no_damage_is_not_skipped(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ReadOnlyStore, "read_batch", fail)
    with pytest.raises(type(error)):
        backed_up(store, tmp_path / "backup", skip_damaged=True)


def test_a_target_that_fails_is_not_taken_for_damage(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "no")

    monkeypatch.setattr("pybk.backup.target.replace_file", fail)
    with pytest.raises(StorageError, match="writing"):
        backed_up(store, tmp_path / "backup", skip_damaged=True)


def test_a_run_that_ended_because_of_the_damage_is_continued_without_it(store: Path, tmp_path: Path) -> None:
    """The pack of the first run has the entries before the damage; how long the ledger is there, only they say."""
    damage(store)
    with pytest.raises(CorruptError):
        backed_up(store, tmp_path / "backup")
    report = backed_up(store, tmp_path / "backup", skip_damaged=True)
    assert (report.entries, report.continued_entries, len(report.left_out)) == (20, 20 + DAMAGED, 1)
    assert not verify_backup(tmp_path / "backup", passwords=KNOWN).problems
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, 1, PASSWORD) == entries(DAMAGED)


def test_a_live_store_and_its_own_damage(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(password=PASSWORD, storage_hints=[StorageHint.HDD])
        for payload in entries(10):
            writer.append(payload)
        manager.checkpoint()
        _damage_in_place(tmp_path / "store")
        report = backed_up(manager, tmp_path / "backup", skip_damaged=True)
        assert report.left_out[0].startswith("entries ")
        assert not verify_backup(tmp_path / "backup", passwords=KNOWN).problems
        _still_writes(manager)


def _damage_in_place(store: Path) -> None:
    (path,) = store.rglob("*.cold")
    data = path.read_bytes()
    at = data.index(b"entry 5;") if b"entry 5;" in data else len(data) // 2
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 0xFF]))


def _still_writes(manager: LedgerManager) -> None:
    writer = manager.create_ledger(password=PASSWORD)
    writer.append_many(numbered(3))
    assert contents(manager, writer.metadata.ledger_id, PASSWORD) == numbered(3)
