"""Restores: all of a store or nothing, with a new incarnation, and never from a damaged or changed backup."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pybk import BlobStore, WriteAheadLog
from pybk.backup import restore_backup, verify_backup
from pybk.backup.pack import PackBuilder, check_pack, read_pack
from pybk.errors import (
    CookieError,
    CorruptError,
    DigestMismatchError,
    SealMismatchError,
    StorageFailedError,
    StoreLockedError,
    UsageError,
)
from pybk.flags import StorageHint
from pybk.ledger import keys
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.storage.format.cookie import read_cookie
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, decode_header
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.store import Store
from tests.backup.backup_harness import KNOWN, PASSWORD, backed_up, files, restored
from tests.internals import store_of
from tests.storage.real_store import contents, numbered, open_quick, python

COUNT = 200


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """A backup of two runs: a closed ledger, and an open one."""
    with open_quick(tmp_path / "store") as manager:
        closed = manager.create_ledger(password=PASSWORD)
        closed.append_many(numbered(COUNT))
        closed.close()
        backed_up(manager, tmp_path / "backup")
        manager.create_ledger(password=PASSWORD).append_many(numbered(COUNT))
        backed_up(manager, tmp_path / "backup")
    return tmp_path / "backup"


def cookie_of(path: Path, tier: str = "") -> int:
    cookie = read_cookie(OsFileSystem(), str(path / tier))
    assert cookie is not None
    return cookie.incarnation


def test_each_restore_is_an_incarnation_of_its_own(backup: Path, tmp_path: Path) -> None:
    for name in ("new-1", "new-2"):
        restored(backup, tmp_path / name)
    found = [cookie_of(tmp_path / name) for name in ("store", "new-1", "new-2")]
    assert found[0] == 0
    assert len({*found}) == 3
    for tier in ("nvme", "ssd", "hdd"):
        assert cookie_of(tmp_path / "new-1", tier) == found[1]
    # The catalog has it, too: a lost cookie comes back with it.
    (tmp_path / "new-1" / "cookie").unlink()
    open_quick(tmp_path / "new-1").close()
    assert cookie_of(tmp_path / "new-1") == found[1]
    with open_quick(tmp_path / "new-1") as manager:
        store_of(manager).scheduler.checkpoint()
    shutil.rmtree(tmp_path / "new-1" / "hdd")
    shutil.copytree(tmp_path / "new-2" / "hdd", tmp_path / "new-1" / "hdd")
    with pytest.raises(CookieError, match="one of the two was restored from a backup"):
        open_quick(tmp_path / "new-1")


def test_a_directory_that_is_not_empty_is_refused(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    for path in (tmp_path / "full", tmp_path / "full" / "letter.txt", tmp_path / "store"):
        for source in (backup, tmp_path / "nothing"):  # before anything is read
            with pytest.raises(UsageError, match="is not empty"):
                restore_backup(source, path)
    (tmp_path / "empty").mkdir()
    assert restore_backup(backup, tmp_path / "empty", dry_run=True).entries == 2 * COUNT
    assert not list((tmp_path / "empty").iterdir())
    open_quick(restored(backup, tmp_path / "empty")).close()
    with pytest.raises(UsageError, match="has no run 3; its runs are 1 to 2"):
        restore_backup(backup, tmp_path / "new", run=3)


def test_a_backup_of_which_any_file_is_damaged_is_refused(backup: Path, tmp_path: Path) -> None:
    for name, data in sorted(files(backup).items()):
        half = len(data) // 2
        flipped = bytes([data[half] ^ 1])
        for what in (None, data[:half], data[:half] + flipped + data[half + 1 :], data + b"\n"):
            if what is None:
                (backup / name).unlink()
            else:
                (backup / name).write_bytes(what)
            if name != "run-00000002" or what is not None:  # nothing shows that there was a last run
                with pytest.raises(CorruptError):
                    restore_backup(backup, tmp_path / "new")
                try:
                    assert verify_backup(backup).problems
                except CorruptError:
                    assert name.startswith(("base-", "run-"))
            assert not [each for each in tmp_path.iterdir() if each.name.startswith("new")]
            (backup / name).write_bytes(data)
    restored(backup, tmp_path / "new")


def test_a_file_of_another_backup_is_refused(backup: Path, tmp_path: Path) -> None:
    backed_up(tmp_path / "store", tmp_path / "second")
    backed_up(tmp_path / "store", tmp_path / "second")
    ours, theirs = files(backup), files(tmp_path / "second")
    for name in ours.keys() & theirs.keys():
        (backup / name).write_bytes(theirs[name])
        with pytest.raises(CorruptError):
            restore_backup(backup, tmp_path / "new")
        (backup / name).write_bytes(ours[name])


def test_an_entry_that_was_changed_with_all_checksums_is_found_by_its_password(backup: Path, tmp_path: Path) -> None:
    """Somebody who can write to the backup makes every checksum and hash anew; the authentication code stays wrong."""
    path = backup / "pack-00000001"
    data = path.read_bytes()
    head = json.loads((backup / "run-00000001").read_bytes().splitlines()[0])
    forged = _forged(data, bytes.fromhex(head["backup"]))
    path.write_bytes(forged)
    with pytest.raises(CorruptError, match="not those that the backup wrote"):  # the manifest knows the pack's hash
        restore_backup(backup, tmp_path / "new")
    _rehash(backup, hashlib.sha256(forged[:-32]).digest())
    with pytest.raises(DigestMismatchError, match="entry 7"):
        restore_backup(backup, tmp_path / "new", passwords=KNOWN)
    assert "entry 7" in verify_backup(backup, passwords=KNOWN).problems[0]
    assert not (tmp_path / "new").exists()
    report = restore_backup(backup, tmp_path / "new")
    assert report.unauthenticated == 2  # which says that this was not checked


def _forged(data: bytes, backup_id: bytes) -> bytes:

    header = decode_header(memoryview(data), 40, where="test")
    body = data[40 + RECORD_HEADER_BYTES : 40 + RECORD_HEADER_BYTES + header.body_bytes]
    builder = PackBuilder(backup_id, 1)
    for found in read_pack(data, backup_id, 1, where="test"):
        buffer = memoryview(bytes(found.buffer).replace(b"entry 7", b"entry 8", 1))
        batch = EntryBatch(0, found.offsets, buffer, found.offsets, found.sizes, 32)
        builder.add(LedgerMetadata.decode(body, where="test"), found.first, batch)
    forged = builder.finish()
    check_pack(forged, backup_id, 1, where="test")
    assert forged != data
    return forged


def _rehash(backup: Path, sha256: bytes) -> None:
    """Make the manifests fit another first pack."""
    previous = hashlib.sha256((backup / "base-00000000").read_bytes()).hexdigest()
    for run in (1, 2):
        path = backup / f"run-{run:08d}"
        lines = path.read_bytes().splitlines()
        head = json.loads(lines[0])
        head["previous"] = previous
        if run == 1:
            head["packs"][0][2] = sha256.hex()
        body = b"".join(line + b"\n" for line in (_json(head), *lines[1:-1]))
        end = _json({"lines": len(lines) - 1, "sha256": hashlib.sha256(body).hexdigest()})
        path.write_bytes(body + end + b"\n")
        previous = hashlib.sha256(path.read_bytes()).hexdigest()


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()


def test_a_closed_ledger_that_was_shortened_is_found_by_its_seal(backup: Path, tmp_path: Path) -> None:
    """Somebody shortens a closed ledger in the manifest, metadata included; only the seal shows it."""

    path = backup / "run-00000001"
    lines = path.read_bytes().splitlines()
    row = json.loads(lines[1])
    metadata = json.loads(a2b_base64(row["metadata"]))
    shorter = sum(map(len, numbered(COUNT - 1)))
    metadata |= {"last_entry_id": COUNT - 2, "length": shorter}
    row |= {"last": COUNT - 2, "lac": COUNT - 2, "length": shorter, "pieces": [[1, 0, COUNT - 2]]}
    compact = json.dumps(metadata, separators=(",", ":"), sort_keys=True).encode()
    row["metadata"] = b2a_base64(compact, newline=False).decode()
    path.write_bytes(b"".join(line + b"\n" for line in (lines[0], _json(row), *lines[2:])))
    pack = (backup / "pack-00000001").read_bytes()
    _rehash(backup, pack[-32:])
    with pytest.raises(SealMismatchError):
        restore_backup(backup, tmp_path / "new", passwords=KNOWN)


KILLED = """
import sys
from pathlib import Path
from pybk.backup import restore_backup

def pause(done, total):
    print(done, flush=True)
    sys.stdin.readline()

restore_backup(sys.argv[1], sys.argv[2], progress=pause)
"""


def test_a_killed_restore_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        for _ in range(3):
            manager.create_ledger(password=PASSWORD).append_many(numbered(COUNT))
        backed_up(manager, tmp_path / "backup")
    process = python(KILLED, tmp_path / "backup", tmp_path / "new")
    assert process.stdin is not None
    assert process.stdout is not None
    assert int(process.stdout.readline())
    process.stdin.write("\n")
    process.stdin.flush()
    assert int(process.stdout.readline())
    with pytest.raises(StoreLockedError):
        restored(tmp_path / "backup", tmp_path / "new")
    process.kill()
    process.communicate()
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "new.restoring").exists()
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert all(contents(again, each, PASSWORD) == numbered(COUNT) for each in again.list_ledgers())
    assert not (tmp_path / "new.restoring").exists()


def test_what_no_restore_made_stays_where_a_restore_would_begin(backup: Path, tmp_path: Path) -> None:
    begun = tmp_path / "new.restoring"
    begun.mkdir()
    (begun / "file").write_bytes(b"of somebody")
    (tmp_path / "other.restoring").symlink_to(begun)
    (tmp_path / "third.restoring").write_bytes(b"of somebody")
    for name in ("new", "other", "third"):
        with pytest.raises(UsageError, match="exists without being the beginning of a restore"):
            restored(backup, tmp_path / name)
    assert [each.name for each in begun.iterdir()] == ["file"]
    (begun / "file").unlink()
    restored(backup, tmp_path / "new")
    assert not begun.exists()


def test_a_restore_that_fails_leaves_nothing(backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def fail(source: str, target: str) -> None:
        if source.endswith(".restoring"):
            raise OSError(5, "no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    before = set(os.listdir(tmp_path))
    with pytest.raises(StorageFailedError, match=r"restoring .*; name another directory, .*, and restore again$"):
        restored(backup, tmp_path / "new")
    assert set(os.listdir(tmp_path)) == before


def test_a_restore_whose_device_fails_says_to_restore_again(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(5, "no")

    def break_device(done: int, total: int) -> None:
        monkeypatch.setattr(os, "pwritev", fail)  # commits of the log; making its files still works

    before = set(os.listdir(tmp_path))
    with pytest.raises(StorageFailedError, match=r"no: .*; name another directory, .*, and restore again$"):
        restore_backup(backup, tmp_path / "new", progress=break_device)
    assert set(os.listdir(tmp_path)) == before


def test_the_tiers_of_a_restored_store_are_those_of_its_ledgers(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(password=PASSWORD, storage_hints=[StorageHint.HDD])
        writer.append_many(numbered(COUNT))
        manager.checkpoint()
        backed_up(manager, tmp_path / "backup")
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        again.checkpoint()
        assert list((tmp_path / "new").rglob("*.cold"))
        assert contents(again, writer.metadata.ledger_id, PASSWORD) == numbered(COUNT)


def test_logs_and_blobs_of_a_restored_store_continue(tmp_path: Path) -> None:
    """Their names and lists are named records; their appends continue after the last LSN and version."""
    keys.SCRYPT_COST = 2  # type: ignore[misc]  # final for everybody but tests
    with WriteAheadLog.open(tmp_path / "log", password=PASSWORD) as wal:
        for number in range(20):
            wal.append(b"record %d" % number)
        wal.roll()
        wal.append(b"in another ledger")
        wal.truncate_before(5)
        backed_up(tmp_path / "log", tmp_path / "of a log")
        wal.append(b"after the backup")
    with WriteAheadLog.open(restored(tmp_path / "of a log", tmp_path / "log 2"), password=PASSWORD) as again:
        data = [record.data for record in again.replay()]
        assert data == [*(b"record %d" % number for number in range(4, 20)), b"in another ledger"]
        assert again.append(b"more") == 22
    with BlobStore.open(tmp_path / "blobs", password=PASSWORD) as blobs:
        blobs.put("model", b"old" * 1000)
        backed_up(tmp_path / "blobs", tmp_path / "of blobs")
    with BlobStore.open(restored(tmp_path / "of blobs", tmp_path / "blobs 2"), password=PASSWORD) as found:
        assert found.get("model") == b"old" * 1000
        found.put("model", b"new")
        assert found.get("model") == b"new"


def test_an_earlier_run_is_verified_too(tmp_path: Path) -> None:
    """A ledger that is gone from the store is in the runs before, which can be restored."""
    with open_quick(tmp_path / "store") as manager:
        gone = manager.create_ledger(password=PASSWORD)
        gone.append_many(numbered(COUNT))
        backed_up(manager, tmp_path / "backup")
        manager.delete_ledger(gone.metadata.ledger_id)
        manager.create_ledger(password=PASSWORD).append_many(numbered(COUNT))
        backed_up(manager, tmp_path / "backup")
    report = verify_backup(tmp_path / "backup", passwords=KNOWN)
    assert (report.ledgers, report.entries, report.problems) == (2, 2 * COUNT, ())
    pack = tmp_path / "backup" / "pack-00000001"
    pack.write_bytes(pack.read_bytes()[:-1])
    assert "pack-00000001" in verify_backup(tmp_path / "backup").problems[0]
    restored(tmp_path / "backup", tmp_path / "new")  # the last run does not need it


def test_a_ledger_of_which_no_entry_is_where_the_manifest_says_is_found(backup: Path, tmp_path: Path) -> None:
    path = backup / "run-00000001"
    lines = path.read_bytes().splitlines()
    row = json.loads(lines[1])
    row["pieces"][0][0] = 2  # a pack that has another ledger's entries
    path.write_bytes(b"".join(line + b"\n" for line in (lines[0], _json(row), *lines[2:])))
    _rehash(backup, (backup / "pack-00000001").read_bytes()[-32:])
    problems = verify_backup(backup, passwords=KNOWN).problems
    assert problems == (f"ledger 0: entries 0 to {COUNT - 1} are not in the backup",)
    with pytest.raises(CorruptError, match="are not in the backup"):
        restored(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_link_to_an_empty_directory_is_restored_to(backup: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    open_quick(restored(backup, tmp_path / "link")).close()
    assert (tmp_path / "link").is_symlink()
    open_quick(tmp_path / "elsewhere").close()


def test_a_mount_point_is_refused_before_anything_is_written(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path).endswith("mounted"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="is a mount point"):
        restored(backup, tmp_path / "mounted")
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_that_another_restore_put_there_is_not_taken_for_the_own(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two restores that begin at the same moment, one may remove the other's directory."""
    restored(backup, tmp_path / "other")
    close = Store.close

    def replace_it(self: Store, *, clean: bool = True) -> None:
        close(self, clean=clean)
        shutil.rmtree(tmp_path / "new.restoring")
        shutil.copytree(tmp_path / "other", tmp_path / "new.restoring")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "close", replace_it)
        with pytest.raises(StoreLockedError, match="another restore"):
            restored(backup, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def first_ledger(change: Callable[[dict[str, Any]], object]) -> Callable[[list[Any]], object]:
    """Return a change of the first ledger of a manifest."""
    return lambda lines: change(next(line for line in lines if "ledger" in line))


def spaced(line: dict[str, Any]) -> None:
    metadata = json.dumps(json.loads(a2b_base64(line["metadata"])), sort_keys=True).encode()
    line["metadata"] = b2a_base64(metadata, newline=False).decode()


FORGED: dict[str, Callable[[list[Any]], object]] = {
    "last add confirmed": first_ledger(lambda line: line.update(lac=line["lac"] - 1)),
    "length": first_ledger(lambda line: line.update(length=line["length"] - 1)),
    "metadata": first_ledger(spaced),
    "store": lambda lines: lines[0].update(store=lines[0]["store"][:-2]),
    "name": lambda lines: lines.append({"name": "n" * 501, "version": 1, "value": ""}),
}
"""Changes of a manifest that keep it whole."""


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("what", FORGED)
def test_a_run_that_a_restore_refuses_is_reported(what: str, run: int, tmp_path: Path) -> None:
    """The entries of a ledger that grew are checked for each run, as a restore of the run checks them."""
    backup = tmp_path / "backup"
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(password=PASSWORD)
        for _ in range(2):
            writer.append_many(numbered(COUNT))
            backed_up(manager, backup)
    assert verify_backup(backup, passwords=KNOWN).problems == ()
    path = backup / f"run-{run:08d}"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    end = lines.pop()
    FORGED[what](lines)
    path.write_bytes(b"".join(_json(line) + b"\n" for line in (*lines, end)))
    _rehash(backup, (backup / "pack-00000001").read_bytes()[-32:])
    with pytest.raises(CorruptError):
        restored(backup, tmp_path / "new", run=run)
    with pytest.raises(CorruptError):
        raise CorruptError(verify_backup(backup, passwords=KNOWN).problems[0])
