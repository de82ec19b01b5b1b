"""Backups of embedded stores: exact, incremental, continued after a stop, and never of another store."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import shutil
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pybk.backup import (
    back_up,
    back_up_async,
    restore_backup,
    restore_backup_async,
    verify_backup,
    verify_backup_async,
)
from pybk.backup.target import DirectoryTarget
from pybk.config import StoreConfig
from pybk.credentials import Passwords
from pybk.errors import (
    CookieError,
    CorruptError,
    StorageRefusedError,
    StoreLockedError,
    UnauthorizedError,
    UsageError,
)
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger import keys
from pybk.ledger.digest import DigestType
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.operations.store_repair import verify
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.index.catalog_and_index import CatalogAndIndex
from pybk.storage.index.index import IndexSnapshot
from pybk.storage.named_records import NamedChange
from pybk.storage.readonly import ReadOnlyStore
from pybk.storage.transaction_group import LedgerEntries
from tests.backup.backup_harness import (
    KNOWN,
    PASSWORD,
    HookedSource,
    StoppedError,
    StoppingTarget,
    backed_up,
    files,
    restored,
    run_with,
)
from tests.internals import descriptor_of, digest_of, store_of
from tests.storage.real_store import contents, numbered, open_quick, payloads, python
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    manager = open_quick(tmp_path / "store")
    yield manager
    manager.close()


def ledger(manager: LedgerManager, count: int, **options: object) -> LedgerWriter:
    writer = manager.create_ledger(password=PASSWORD, **options)  # type: ignore[arg-type]
    writer.append_many(numbered(count))
    return writer


def of(writer: LedgerWriter) -> int:
    return writer.metadata.ledger_id


def test_a_restored_store_is_what_was_backed_up(manager: LedgerManager, tmp_path: Path) -> None:
    closed = ledger(manager, 500, custom_metadata={"name": b"value"}, ledger_type="orders")
    closed.close()
    cold = ledger(manager, 300, storage_hints=[StorageHint.HDD], digest_type=DigestType.CRC32C)
    warm = ledger(manager, 50, storage_hints=[StorageHint.SSD], digest_type=DigestType.NONE, insecure=True)
    manager.checkpoint()
    open_one = ledger(manager, 7)
    empty = ledger(manager, 0)
    gone = ledger(manager, 3)
    manager.delete_ledger(of(gone))
    advanced = manager.create_ledger(password=PASSWORD, ledger_id=1000)
    for number, payload in enumerate(numbered(5)):
        advanced.append(payload, entry_id=number)
    report = backed_up(manager, tmp_path / "backup")
    assert (report.ledgers, report.entries, report.unauthenticated) == (6, 862, 0)
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).complete
    expected = {metadata.ledger_id: metadata for metadata in map(manager.ledger_metadata, manager.list_ledgers())}
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert {each: again.ledger_metadata(each) for each in again.list_ledgers()} == expected
        for writer, count in ((closed, 500), (cold, 300), (warm, 50), (open_one, 7), (empty, 0), (advanced, 5)):
            assert contents(again, of(writer), PASSWORD) == numbered(count)
        assert again.store_id == manager.store_id
        assert again.create_ledger(password=PASSWORD).metadata.ledger_id > 1000
    report_of_store = verify(tmp_path / "new", password=PASSWORD)
    assert not report_of_store.problems
    assert report_of_store.entries == 862


def test_ledgers_with_a_secret_are_backed_up_verified_and_restored(manager: LedgerManager, tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    with manager.create_ledger(secret=secret, ledger_type="secret") as writer:
        writer.append_many(numbered(50))
    with_password = ledger(manager, 20)
    passwords = Passwords(PASSWORD, secret=secret)
    report = back_up(manager, tmp_path / "backup", passwords=passwords)
    assert (report.ledgers, report.entries, report.unauthenticated) == (2, 70, 0)
    assert verify_backup(tmp_path / "backup", passwords=passwords).unauthenticated == 0
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).unauthenticated == 1, "its secret is missing"
    restore_backup(tmp_path / "backup", tmp_path / "new", passwords=passwords)
    with open_quick(tmp_path / "new") as again:
        with again.open_ledger(of(writer), secret=secret) as reader:
            assert payloads(reader) == numbered(50)
        with pytest.raises(UnauthorizedError):
            again.open_ledger(of(writer), secret=secrets.token_bytes(32))
        assert contents(again, of(with_password), PASSWORD) == numbered(20)


def test_the_ids_and_versions_that_a_store_has_given_are_not_given_again(
    manager: LedgerManager, tmp_path: Path
) -> None:
    store = store_of(manager)
    version = store.named.compare_and_set("group/name", None, b"value", level=store.feature_level)
    manager.delete_ledger(of(ledger(manager, 1)))
    backed_up(manager, tmp_path / "backup")
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        found = store_of(again).named.get("group/name")
        assert found is not None
        assert (found.version, found.value) == (version, b"value")
        with again.create_ledger(password=b"", insecure=True) as writer:
            assert of(writer) == 1
        assert store_of(again).named.compare_and_set("group/name", version, b"new", level=store.feature_level) > version


def test_a_deferred_ledger_keeps_its_last_add_confirmed(manager: LedgerManager, tmp_path: Path) -> None:
    writers = [ledger(manager, count, write_flags=WriteFlag.DEFERRED_FORCE) for count in (10, 10, 10)]
    writers[0].force()
    writers[1].force()
    writers[1].append_many(numbered(5, 10))
    backed_up(manager, tmp_path / "backup")
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        for writer, lac, last in zip(writers, (9, 9, -1), (9, 14, 9), strict=True):
            with again.open_ledger(of(writer), password=PASSWORD, recover=False) as reader:
                assert reader.last_add_confirmed == lac
                assert [each.payload for each in reader.read_unconfirmed(0, last)] == numbered(last + 1)


def test_a_later_run_copies_what_is_new_and_nothing_else(manager: LedgerManager, tmp_path: Path) -> None:
    writers = [ledger(manager, 400) for _ in range(5)]
    first = backed_up(manager, tmp_path / "backup")
    before = files(tmp_path / "backup")
    manager.checkpoint()  # entries move, and are not new for that
    for target in (StorageHint.HDD, StorageHint.NVME):
        manager.move_ledger(of(writers[1]), target)
    writers[0].append_many(numbered(20, 400))
    planned = backed_up(manager, tmp_path / "backup", dry_run=True)
    assert files(tmp_path / "backup") == before
    second = backed_up(manager, tmp_path / "backup")
    assert planned._replace(written_bytes=second.written_bytes) == second
    assert (second.run, second.entries, second.payload_bytes) == (2, 20, sum(map(len, numbered(20, 400))))
    after = files(tmp_path / "backup")
    assert {name: after[name] for name in before} == before
    assert second.written_bytes == sum(len(after[name]) for name in after.keys() - before) < first.written_bytes / 10
    third = backed_up(manager, tmp_path / "backup")
    assert (third.entries, third.changed, third.gone) == (0, 0, 0)
    assert third.written_bytes < 1000
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, of(writers[0]), PASSWORD) == numbered(420)
    with open_quick(restored(tmp_path / "backup", tmp_path / "older", run=1)) as older:
        assert contents(older, of(writers[0]), PASSWORD) == numbered(400)


def test_a_ledger_is_not_taken_for_an_earlier_one_of_its_id(manager: LedgerManager, tmp_path: Path) -> None:
    def advanced(payloads: list[bytes]) -> weakref.ref[LedgerWriter]:
        writer = manager.create_ledger(password=PASSWORD, ledger_id=7)
        for number, payload in enumerate(payloads):
            writer.append(payload, entry_id=number)
        return weakref.ref(writer)

    old = advanced([b"old"] * 3)
    backed_up(manager, tmp_path / "backup")
    manager.delete_ledger(7)
    manager.checkpoint()
    # The writer knows the ledger that was deleted; another thread may collect garbage meanwhile.
    wait_until(lambda: gc.collect() >= 0 and old() is None)
    advanced([b"new"] * 4)
    assert backed_up(manager, tmp_path / "backup").entries == 4
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, 7, PASSWORD) == [b"new"] * 4
    with open_quick(restored(tmp_path / "backup", tmp_path / "older", run=1)) as older:
        assert contents(older, 7, PASSWORD) == [b"old"] * 3


# ---- while others write ----------------------------------------------------------------------------------------------


def test_a_run_holds_nothing_that_came_after_its_cut(manager: LedgerManager, tmp_path: Path) -> None:
    writer, other = ledger(manager, 100), ledger(manager, 100)

    def change(_: int) -> None:
        writer.append_many(numbered(50, 100))
        other.close()

    source = HookedSource(manager, change)
    run_with(source, DirectoryTarget(str(tmp_path / "backup"), writes=True))
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, of(writer), PASSWORD) == numbered(100)
        assert not again.open_ledger(of(other), password=PASSWORD, recover=False).is_closed


def test_a_cut_has_a_group_whole_or_not_at_all(manager: LedgerManager, tmp_path: Path) -> None:
    """Groups are appended and checkpoints are made all the time; each cut must see the same number in both ledgers."""
    store, pair = store_of(manager), [ledger(manager, 0), ledger(manager, 0)]
    stop, version = threading.Event(), [None]

    def append() -> None:
        number = 0
        while not stop.is_set():
            entries = [LedgerEntries(descriptor_of(each), digest_of(each), [b"%d" % number]) for each in pair]
            change = NamedChange("group/count", version[0], b"%d" % (number + 1))
            version[0] = store.append_group(entries, [change]).version  # type: ignore[call-overload]
            number += 1
            if number % 5 == 0:
                store.scheduler.checkpoint()

    thread = threading.Thread(target=append)
    thread.start()
    try:
        wait_until(lambda: version[0] is not None)
        for _ in range(10):
            cut = store.cut()
            ends = [row.last_entry_id for row in cut.ledgers]
            (named,) = cut.named
            assert ends[0] == ends[1] == int(named.value or b"") - 1
    finally:
        stop.set()
        thread.join(WAIT_S)


def test_no_commit_is_published_while_a_cut_is_taken(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger(manager, 1)
    store, leaders = store_of(manager), []
    take_dirty = store.take_dirty

    def look() -> dict[int, LedgerDescriptor]:
        leaders.append(store.log.group.leader)
        return take_dirty()

    monkeypatch.setattr(store, "take_dirty", look)
    assert [row.last_entry_id for row in store.cut().ledgers] == [0]
    assert None not in leaders
    assert leaders


def test_a_checkpoint_that_ends_while_a_cut_is_taken_hides_nothing(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes the index and forgets what changed; the cut must have that from the one or from the other."""
    writer, store = ledger(manager, 3), store_of(manager)
    store.scheduler.checkpoint()
    writer.append_many(numbered(2))
    store.named.compare_and_set("name", None, b"value", level=store.feature_level)
    forming, ends, ended = threading.Event(), threading.Event(), threading.Event()
    commit, forget, snapshot = CatalogAndIndex.commit, store.tail_checked, store.index.snapshot

    def held(*given: Any, **named: Any) -> None:
        forming.set()
        assert ends.wait(WAIT_S)
        commit(*given, **named)

    def forgotten(tail_bytes: int) -> None:
        forget(tail_bytes)
        ended.set()

    @contextmanager
    def looking() -> Iterator[IndexSnapshot]:
        with snapshot() as found:
            ends.set()
            assert ended.wait(WAIT_S)
            yield found

    monkeypatch.setattr(CatalogAndIndex, "commit", held)
    monkeypatch.setattr(store, "tail_checked", forgotten)
    monkeypatch.setattr(store.index, "snapshot", looking)
    thread = threading.Thread(target=store.scheduler.checkpoint)
    thread.start()
    assert forming.wait(WAIT_S)
    cut = store.cut()
    thread.join(WAIT_S)
    assert [row.last_entry_id for row in cut.ledgers] == [4]
    assert [(row.name, row.value) for row in cut.named] == [("name", b"value")]


def test_a_cut_of_a_reader_is_not_torn_by_a_checkpoint(manager: LedgerManager, tmp_path: Path) -> None:
    """Between the reader's look at the log and at the index, a group is appended and a checkpoint is made."""
    store, pair = store_of(manager), [ledger(manager, 5), ledger(manager, 5)]
    manager.checkpoint()
    pair[0].append_many(numbered(5, 5))  # so that the reader knows one of the two from the log

    class Reader(ReadOnlyStore):
        looks = 0

        def catch_up(self) -> None:
            super().catch_up()
            self.looks += 1
            if self.looks == 2:  # the first is that of the open
                entries = [LedgerEntries(descriptor_of(each), digest_of(each), [b"group"]) for each in pair]
                store.append_group(entries)
                manager.checkpoint()

    reader = Reader.open(str(tmp_path / "store"), config=StoreConfig())
    try:
        assert [row.last_entry_id for row in reader.cut().ledgers] == [10, 5]
        assert reader.looks == 3
    finally:
        reader.close()


WRITER = """
import sys
from pathlib import Path
from pybk.storage.named_records import NamedChange
from pybk.storage.transaction_group import LedgerEntries
from tests.internals import descriptor_of, digest_of, store_of
from tests.storage.real_store import open_quick

with open_quick(Path(sys.argv[1])) as manager:
    store = store_of(manager)
    pair = [manager.create_ledger(password=sys.argv[2].encode()) for _ in range(2)]
    version = None
    for number in range(1_000_000):
        entries = [LedgerEntries(descriptor_of(each), digest_of(each), [b"%d" % number * 20]) for each in pair]
        version = store.append_group(entries, [NamedChange("group/count", version, b"%d" % number)]).version
        if number % 7 == 0:
            short = manager.create_ledger(password=sys.argv[2].encode())
            short.append_many([b"short"] * 10)
            manager.delete_ledger(short.metadata.ledger_id)
        if number % 20 == 0:
            manager.checkpoint()
        print(number, flush=True)
"""


def test_everything_that_another_process_acknowledged_before_is_in_the_backup(tmp_path: Path) -> None:
    keys.SCRYPT_COST = 2  # type: ignore[misc]  # final for everybody but tests
    writer = python(WRITER, tmp_path / "store", PASSWORD.decode())
    acknowledged = [-1]

    def read() -> None:
        assert writer.stdout is not None
        for line in writer.stdout:
            acknowledged[0] = int(line)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for run in range(1, 3):
            wait_until(lambda run=run: acknowledged[0] >= 50 * run or writer.poll() is not None)  # type: ignore[misc]
            before = acknowledged[0]
            assert writer.poll() is None
            backed_up(tmp_path / "store", tmp_path / "backup")
            with open_quick(restored(tmp_path / "backup", tmp_path / f"new-{run}")) as again:
                first, second = (contents(again, ledger_id, PASSWORD) for ledger_id in (0, 1))
                named = store_of(again).named.get("group/count")
            assert named is not None
            assert first == second == [b"%d" % number * 20 for number in range(len(first))]
            assert len(first) - 1 == int(named.value or b"") >= before
    finally:
        writer.kill()
        thread.join(WAIT_S)
        writer.communicate()


def test_a_run_begins_again_when_a_ledger_is_deleted_before_it_was_copied(
    manager: LedgerManager, tmp_path: Path
) -> None:
    writers = [ledger(manager, 100) for _ in range(4)]
    later = ledger(manager, 0)

    def delete(cuts: int) -> None:
        if cuts == 1:
            manager.delete_ledger(of(writers[2]))
            later.append(b"after the first cut")

    source = HookedSource(manager, delete)
    report = run_with(source, DirectoryTarget(str(tmp_path / "backup"), writes=True))
    assert source.cuts == 2
    assert (report.ledgers, report.entries) == (4, 301)  # none was copied twice
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert list(again.list_ledgers()) == [of(each) for each in (*writers[:2], writers[3], later)]
        assert contents(again, of(later), PASSWORD) == [b"after the first cut"]


def test_a_pack_of_which_all_ledgers_vanished_is_removed(manager: LedgerManager, tmp_path: Path) -> None:
    writers = [ledger(manager, 100) for _ in range(4)]

    class Vanishing(HookedSource):
        def read(self, metadata: LedgerMetadata, first: int, last: int, max_bytes: int) -> EntryBatch:
            if metadata.ledger_id == of(writers[2]) and self.cuts == 1:
                for writer in (writers[0], writers[2]):
                    manager.delete_ledger(of(writer))
            return super().read(metadata, first, last, max_bytes)

    source = Vanishing(manager, lambda _: None)
    report = run_with(source, DirectoryTarget(str(tmp_path / "backup"), writes=True))
    assert (source.cuts, report.ledgers) == (2, 2)
    assert [name for name in sorted(files(tmp_path / "backup")) if name.startswith("pack")] == [
        "pack-00000002",
        "pack-00000003",
    ]
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).entries == 200


def test_ledgers_that_vanish_at_each_attempt_end_the_run(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pybk.backup.backing_up.CUTS_MAX", 3)
    last = [ledger(manager, 1)]

    def replace(_: int) -> None:
        manager.delete_ledger(of(last[0]))
        last[0] = ledger(manager, 1)

    with pytest.raises(StorageRefusedError, match="ledgers were deleted during each of 3 attempts"):
        run_with(HookedSource(manager, replace), DirectoryTarget(str(tmp_path / "backup"), writes=True))


# ---- stops -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
def test_a_run_that_is_cut_off_at_any_file_leaves_the_backup_and_is_continued(tmp_path: Path, after: bool) -> None:
    with open_quick(tmp_path / "store") as manager:
        writers = [ledger(manager, 400) for _ in range(3)]
        backed_up(manager, tmp_path / "first")
        for writer in writers:
            writer.append_many(numbered(200, 400))
        backup, stop_at = tmp_path / "first", 0
        for stop_at in range(1, 100):
            backup = tmp_path / f"backup-{stop_at}"
            shutil.copytree(tmp_path / "first", backup, ignore=shutil.ignore_patterns("LOCK"))
            target = StoppingTarget(backup, stop_at, after=after)
            try:
                run_with(HookedSource(manager, lambda _: None), target, pack_bytes=16384)
            except StoppedError:
                pass
            else:
                break
            published = after and (backup / "run-00000002").exists()
            assert verify_backup(backup, passwords=KNOWN).entries == (1800 if published else 1200)
            again = backed_up(manager, backup)
            assert again.entries + again.continued_entries == (0 if published else 600)
            assert again.continued_entries > 0 or published or stop_at == 1
            assert verify_backup(backup, passwords=KNOWN).entries == 1800
        else:
            raise AssertionError("the run never ended")
        assert stop_at > 3
        with open_quick(restored(backup, tmp_path / "new")) as found:
            assert all(contents(found, of(writer), PASSWORD) == numbered(600) for writer in writers)


KILLED = """
import sys, time
from pybk.backup.backing_up import BackupRun
from pybk.backup.source import StoreSource
from pybk.backup.target import DirectoryTarget
from pybk.config import StoreConfig
from pybk.config import StoreConfig
from pybk.credentials import Passwords
from pybk.storage.readonly import ReadOnlyStore

def pause(done, total):
    print(done, flush=True)
    sys.stdin.readline()

source = StoreSource(ReadOnlyStore.open(sys.argv[1], config=StoreConfig()))
target = DirectoryTarget(sys.argv[2], writes=True)
BackupRun(source, target, Passwords(sys.argv[3].encode()), pause, pack_bytes=1 << 16).run()
"""


def test_a_killed_backup_leaves_the_one_before_and_is_continued(manager: LedgerManager, tmp_path: Path) -> None:
    writer = ledger(manager, 10)
    backed_up(manager, tmp_path / "backup")
    writer.append_many(numbered(50_000, 10))
    process = python(KILLED, tmp_path / "store", tmp_path / "backup", PASSWORD.decode())
    assert process.stdout is not None
    assert process.stdin is not None
    for _ in range(2):
        assert int(process.stdout.readline())
        process.stdin.write("\n")
        process.stdin.flush()
    assert int(process.stdout.readline())
    with pytest.raises(StoreLockedError, match=f"locked by process {process.pid}"):
        backed_up(manager, tmp_path / "backup")
    process.kill()
    process.communicate()
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).entries == 10
    report = backed_up(manager, tmp_path / "backup")
    assert report.continued_entries > 0
    assert report.entries + report.continued_entries == 50_000
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        assert contents(again, of(writer), PASSWORD) == numbered(50_010)


def test_a_pack_that_an_interrupted_run_left_damaged_is_written_again(manager: LedgerManager, tmp_path: Path) -> None:
    ledger(manager, 1000)
    target = StoppingTarget(tmp_path / "backup", 3, after=False)
    with pytest.raises(StoppedError):
        run_with(HookedSource(manager, lambda _: None), target)
    packs = sorted((tmp_path / "backup").glob("pack-*"))
    assert len(packs) >= 1
    packs[0].write_bytes(packs[0].read_bytes()[:-1])
    report = backed_up(manager, tmp_path / "backup")
    assert report.entries == 1000 - report.continued_entries > 0
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).entries == 1000


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_the_backup_of_another_store_is_refused(manager: LedgerManager, tmp_path: Path) -> None:
    ledger(manager, 3)
    backed_up(manager, tmp_path / "backup")
    before = files(tmp_path / "backup")
    with open_quick(tmp_path / "other") as other, pytest.raises(CookieError, match="is the backup of store"):
        backed_up(other, tmp_path / "backup")
    with open_quick(restored(tmp_path / "backup", tmp_path / "new")) as again:
        with pytest.raises(CookieError, match=r"and not of store .* incarnation"):
            backed_up(again, tmp_path / "backup")
        backed_up(again, tmp_path / "next backup")
    assert files(tmp_path / "backup") == before


def test_a_store_that_was_put_back_to_an_older_state_is_refused(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store", background=False) as manager:
        writer = ledger(manager, 3)
        shutil.copytree(tmp_path / "store", tmp_path / "older")
        writer.append_many(numbered(3, 3))
        backed_up(manager, tmp_path / "backup")
    before = files(tmp_path / "backup")
    with pytest.raises(CookieError, match=r"was put back to an older state .* ends at LSN"):
        backed_up(tmp_path / "older", tmp_path / "backup")
    with open_quick(tmp_path / "older") as manager:
        for _ in range(3):
            ledger(manager, 1)
        with pytest.raises(CookieError, match="ledger 0 ends with entry 2, in the backup with 5"):
            backed_up(manager, tmp_path / "backup")
    assert files(tmp_path / "backup") == before


def test_a_target_that_is_no_backup_is_refused(manager: LedgerManager, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"is not empty and not a backup: letter.txt"):
        backed_up(manager, tmp_path / "full")
    with pytest.raises(UsageError, match="is a file"):
        backed_up(manager, tmp_path / "full" / "letter.txt")
    for call in (verify_backup, back_up):
        with pytest.raises((UsageError, CookieError), match="there is no"):
            call(tmp_path / "nothing", *([tmp_path / "x"] if call is back_up else []))
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_entry_ends_the_run_and_leaves_the_backup(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = ledger(manager, 100, storage_hints=[StorageHint.HDD], digest_type=DigestType.NONE, insecure=True)
        backed_up(manager, tmp_path / "backup")
        writer.append_many([b"to be damaged"] * 10)
        manager.checkpoint()
    for path in (tmp_path / "store").rglob("*.cold"):
        data = path.read_bytes()
        path.write_bytes(data.replace(b"to be damaged", b"to be Damaged"))
    before = files(tmp_path / "backup")
    with pytest.raises(CorruptError, match=r"entry 100 of ledger 0 cannot be copied: .*checksum"):
        backed_up(tmp_path / "store", tmp_path / "backup")
    assert files(tmp_path / "backup") == before


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_a_backup_is_for_its_owner_alone_and_has_no_secret(manager: LedgerManager, tmp_path: Path) -> None:
    writer = ledger(manager, 10)
    writer.close()
    backed_up(manager, tmp_path / "backup")
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    store_id, salt, cost = _identity(tmp_path / "backup")
    ring = keys.KeyRing(store_id, salt, cost=cost)
    metadata = writer.metadata
    made = ring.ledger_keys(PASSWORD, of(writer), metadata.key_salt, metadata.key_epoch, binding=metadata.key_binding)
    assert made.verifier == metadata.verifier  # else the next lines look for nothing
    hidden = [PASSWORD, ring.root(PASSWORD), made.entry_key, made.lac_key, made.right_key, made.seal_key()]
    for path in (tmp_path / "backup").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        data = path.read_bytes()
        assert not any(secret in data or secret.hex().encode() in data for secret in hidden)


def _identity(backup: Path) -> tuple[bytes, bytes, int]:
    head = json.loads((backup / "base-00000000").read_bytes().splitlines()[0])
    return bytes.fromhex(head["store"]), bytes.fromhex(head["salt"]), head["scrypt"]


def test_entries_without_a_known_password_are_counted(manager: LedgerManager, tmp_path: Path) -> None:
    ledger(manager, 10)
    ledger(manager, 10, digest_type=DigestType.CRC32C)
    assert back_up(manager, tmp_path / "backup").unauthenticated == 1
    found = verify_backup(tmp_path / "backup", passwords=Passwords(b"another"))
    assert (found.unauthenticated, found.complete, found.problems) == (1, False, ())
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).complete


def test_the_calls_have_asyncio_forms(manager: LedgerManager, tmp_path: Path) -> None:
    writer = ledger(manager, 10)
    seen: list[tuple[int, int]] = []

    async def all_three() -> None:
        report = await back_up_async(
            manager, tmp_path / "backup", passwords=KNOWN, progress=lambda done, total: seen.append((done, total))
        )
        assert report.entries == 10
        assert (await verify_backup_async(tmp_path / "backup", passwords=KNOWN)).entries == 10
        assert (await restore_backup_async(tmp_path / "backup", tmp_path / "new", passwords=KNOWN)).entries == 10

    asyncio.run(all_three())
    assert seen[-1] == (writer.length, writer.length)
    with open_quick(tmp_path / "new") as again:
        assert contents(again, of(writer), PASSWORD) == numbered(10)
