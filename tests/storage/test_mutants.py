"""Each rule of the storage is broken on purpose, and the checks must notice: a check that cannot fail proves nothing.

A mutant is the syntax tree of a real function with one piece replaced, as patterns of ``tests.mutation.patterns`` say.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from functools import partial, wraps
from random import Random
from typing import Any, NamedTuple

import pytest

from pybk.errors import CorruptError, PybkError, StorageFailedError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.storage.io.lmdb_environment import LmdbEnvironment
from pybk.storage.tiers import LOG
from tests.internals import store_of
from tests.mutation.patterns import changed
from tests.simdisk import SimCrash, SimFileSystem
from tests.storage import test_full_disk as full_disk
from tests.storage import test_full_disk_packing as packing
from tests.storage import test_full_disk_reserve as full_disk_reserve
from tests.storage.store_harness import ROOT, World, abandon, count_operations, open_store, open_world
from tests.storage.test_control_records import (
    test_a_change_after_one_that_was_refused_does_not_make_that_durable as change_after_a_refused_one,
)
from tests.storage.test_control_records import test_a_change_beside_a_close_does_not_undo_it as change_beside_a_close
from tests.storage.test_control_records import (
    test_a_close_beside_one_that_was_refused_closes_the_ledger as close_beside_a_refused_one,
)
from tests.storage.test_control_records import test_a_store_opens_after_any_two_changes_of_a_ledger as two_changes
from tests.storage.test_control_records import (
    test_entries_that_were_refused_are_not_written_after_the_delete_of_their_ledger as entries_of_a_deleted_ledger,
)
from tests.storage.test_control_records import test_no_ledger_begins_with_a_change as a_late_move
from tests.storage.test_crash import check, check_catalog, check_without_index, stopped
from tests.storage.test_named_records import test_a_stop_at_any_operation_loses_no_record as stop_changing_records
from tests.storage.test_transaction_group import (
    test_a_group_record_without_its_own_records_is_not_a_valid_commit as forge_groups,
)
from tests.storage.test_transaction_group import (
    test_a_group_that_fails_before_it_counts_leaves_nothing as fail_a_group,
)
from tests.storage.test_transaction_group import test_salvage_takes_a_group_whole_or_not_at_all as salvage_a_group

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

Check = Callable[[], None]


class Piece(NamedTuple):
    """What is replaced in a function or method, ``module:Class.method`` below ``pybk.storage``, as patterns."""

    function: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A rule, how it is broken, and the check that has to notice."""

    rule: str
    check: Check
    pieces: list[Piece]


def mutate(patch: pytest.MonkeyPatch, piece: Piece) -> None:
    """Put a changed copy of a function in the place of the real one."""
    module_name, _, qualified_name = piece.function.partition(":")
    path = qualified_name.split(".")
    owner: Any = importlib.import_module(f"pybk.storage.{module_name}")
    for name in path[:-1]:
        owner = getattr(owner, name)
    real = getattr(owner, path[-1])
    patch.setattr(owner, path[-1], changed(real, piece.old, piece.new))


# ---- checks ------------------------------------------------------------------------------------------------------


def crashes(*, power_loss: bool, limit: int = 150) -> Check:
    """Return a check that stops the machine at operations of the workload, in an order that mixes them well."""

    def run() -> None:
        operations = list(range(40, count_operations()))
        Random(1).shuffle(operations)
        for operation in operations[:limit]:
            check(*stopped(operation, operation, power_loss=power_loss))

    return run


def the_catalog_makes_the_index_again() -> None:
    """The power fails, and the index is lost with it: the catalog has to be on disk."""
    for operation in range(40, count_operations(), 8):
        check_without_index(*stopped(operation, operation, power_loss=True))


def what_was_served_after_a_failed_sync_stays(*, clean: bool = False) -> None:
    """A sync fails, the process dies, the next one reads entries from the page cache; then power fails."""
    served_beyond = 0
    for seed in range(12):
        fs = SimFileSystem(seed)
        manager = open_world(fs)
        if clean:
            manager.close()
            manager = open_world(fs)
        writer = manager.create_ledger(digest_type=DigestType.CRC32C)
        writer.append(b"durable")
        fs.fail_at(0, only="write_durable")
        with pytest.raises(PybkError):
            writer.append(b"not durable")
        abandon(manager)
        fs = fs.kill()
        manager = open_world(fs)
        served = manager.open_ledger(writer.ledger_id, recover=False).last_add_confirmed
        served_beyond += served
        abandon(manager)
        fs = fs.crash()
        manager = open_world(fs)
        assert manager.open_ledger(writer.ledger_id).last_add_confirmed >= served, "entries that were served are lost"
        manager.close()
    assert served_beyond > 0, "no seed brought the case about"


def what_was_served_after_a_failed_sync_stays_after_a_clean_end() -> None:
    what_was_served_after_a_failed_sync_stays(clean=True)


def what_began_a_log_file_and_was_served_after_a_failed_sync_stays() -> None:
    """The same for the first commit of a log file, which is written with the header of the file."""
    served_ledgers = 0
    for seed in range(60, 100):
        fs = SimFileSystem(seed)
        manager = open_world(fs)
        fs.fail_at(0, only="write_durable")
        with pytest.raises(PybkError):
            manager.create_ledger(digest_type=DigestType.CRC32C)
        abandon(manager)
        fs = fs.kill()
        manager = open_world(fs)
        served = list(manager.list_ledgers())
        served_ledgers += len(served)
        abandon(manager)
        manager = open_world(fs.crash())
        assert list(manager.list_ledgers()) == served, "a ledger that was served is lost"
        manager.close()
    assert served_ledgers > 0, "no seed brought the case about"


def a_file_that_was_removed_does_not_come_back_under_an_id_that_is_used_again() -> None:
    """A file is removed at the end, the next process uses its id in another directory; then power fails."""
    for seed in range(12):
        fs = SimFileSystem(seed)
        manager = open_store(fs, tiers={StorageHint.NVME: [f"{ROOT}/a", f"{ROOT}/b"]})
        manager.create_ledger(digest_type=DigestType.CRC32C)
        store_of(manager).supply.preallocate(pause=False)
        manager.close()
        manager = open_store(fs)
        ledger_id = manager.create_ledger(digest_type=DigestType.CRC32C).ledger_id
        abandon(manager)
        manager = open_store(fs.crash())
        assert ledger_id in list(manager.list_ledgers()), "a log file that was removed hides one with entries"
        manager.close()


def a_kill_is_no_clean_end() -> None:
    fs = SimFileSystem(1)
    open_world(fs).close()
    manager = open_world(fs)
    assert store_of(manager).began_clean
    abandon(manager)
    manager = open_world(fs.kill())
    assert not store_of(manager).began_clean
    manager.close()


def a_failed_sync_ends_the_store() -> None:
    manager = open_world(fs := SimFileSystem(1))
    one, other = (manager.create_ledger(digest_type=DigestType.CRC32C) for _ in range(2))
    fs.fail_at(0, only="write_durable")
    with pytest.raises(StorageFailedError):
        one.append(b"lost")
    with pytest.raises(StorageFailedError):
        other.append(b"refused")
    assert manager.health().state == "failed"
    abandon(manager)


def torn_writes_are_no_entries() -> None:
    """The machine stops in the middle of writing an entry of several sectors."""
    torn = 0
    for seed in range(60):
        fs = SimFileSystem(seed)
        manager = open_world(fs)
        world = World()
        ledger_id = world.create(manager, StorageHint.NVME)
        world.append(ledger_id)
        fs.crash_at(0, only="write_durable")
        with pytest.raises(SimCrash):
            world.append(ledger_id, size=3000)
        abandon(manager)
        fs = fs.kill()
        manager = open_world(fs)
        world.check(manager, recover=False)
        torn += manager.open_ledger(ledger_id).last_add_confirmed == 0
        manager.close()
    assert torn > 10


def the_index_syncs_its_commits() -> None:
    with tempfile.TemporaryDirectory() as directory:
        environment = LmdbEnvironment(os.path.join(directory, "index"))
        assert environment.shared is not None
        flags = environment.shared.lmdb.flags()
        environment.close()
    assert flags["sync"]
    assert flags["metasync"]
    assert not flags["map_async"]


def what_is_missing_in_the_log_is_noticed() -> None:
    """A commit lies where the one before it should, as after a misdirected write: one acknowledged entry is lost."""
    fs = SimFileSystem(1)
    manager = open_world(fs)
    one, other = (manager.create_ledger(digest_type=DigestType.CRC32C) for _ in range(2))
    one.append(b"lost")
    other.append(b"misdirected")
    store = store_of(manager)
    (log,) = [row for row in store.volumes.rows.values() if row.kind == LOG]
    path = store.volumes.path_of(log)
    abandon(manager)
    fs = fs.kill()
    live = fs.inode(path).live
    live[12288:16384] = live[16384:20480]
    live[16384:20480] = bytes(4096)
    with pytest.raises(CorruptError):
        open_world(fs)


def a_lost_file_of_the_log_is_noticed() -> None:
    fs = SimFileSystem(1)
    manager = open_world(fs)
    writers = [manager.create_ledger(digest_type=DigestType.CRC32C) for _ in range(3)]
    for writer, size in zip(writers, (60_000, 100_000, 200_000), strict=True):
        writer.append(bytes(size))
    logs = sorted(row for row in store_of(manager).volumes.rows.values() if row.kind == LOG)
    assert len(logs) == 4, "each entry was to be in a file of its own, as the ledgers are"
    path = store_of(manager).volumes.path_of(logs[2])
    abandon(manager)
    fs = fs.kill()
    fs.unlink(path)
    with pytest.raises(CorruptError):
        open_world(fs)


def an_overwritten_log_of_a_new_store_is_noticed() -> None:
    fs = SimFileSystem(1)
    manager = open_world(fs)
    volumes = store_of(manager).volumes
    watermark = f"{ROOT}/watermark"
    never_committed = bytes(fs.view(watermark))
    writer = manager.create_ledger(digest_type=DigestType.CRC32C)
    writer.append(b"acknowledged")
    logs = [volumes.path_of(row) for row in volumes.rows.values() if row.kind == LOG]
    abandon(manager)
    fs = fs.kill()
    for path, content in [(watermark, never_committed), *((path, b"?" * fs.file_bytes(path)) for path in logs)]:
        file = fs.open(path, writable=True)
        file.write([content], 0)
        file.close()
    with pytest.raises(CorruptError, match=r"what it held is unknown .* restore .* rebuild-index"):
        open_world(fs)


def deferred_entries_are_confirmed_by_force_only() -> None:
    for power_loss in (False, True):
        fs = SimFileSystem(1)
        manager = open_world(fs)
        writer = manager.create_ledger(digest_type=DigestType.CRC32C, write_flags=WriteFlag.DEFERRED_FORCE)
        writer.append(b"first")
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        assert [entry.payload for entry in reader.read_unconfirmed(0, 0)] == [b"first"]
        assert reader.read_last_add_confirmed() == writer.last_add_confirmed == -1
        writer.force()
        assert reader.read_last_add_confirmed() == writer.last_add_confirmed == 0
        abandon(manager)
        manager = open_world(fs.crash() if power_loss else fs.kill())
        assert manager.open_ledger(writer.ledger_id, recover=False).last_add_confirmed == 0
        manager.close()


def parts_of_a_file_can_be_moved() -> None:
    fs = SimFileSystem(1)
    manager = open_world(fs)
    world = World()
    writers = [world.create(manager, StorageHint.HDD) for _ in range(3)]
    for _ in range(40):
        for ledger_id in writers:
            world.append(ledger_id)
    manager.checkpoint()
    store = store_of(manager)
    locations = next(store.index.pages(writers[0]))
    compaction = store.scheduler.compaction
    compaction.relocate([(writers[0], [locations[::2]])], StorageHint.NVME)
    world.check(manager)
    manager.close()


def lack_of_space_leaves_nothing_behind() -> None:
    """The index finds no space: the files made for it must be gone, from the catalog, too."""
    fs = SimFileSystem(1)
    manager = open_world(fs)
    world = World()
    ledger_id = world.create(manager, StorageHint.HDD)
    for _ in range(8):  # so that the catalog is not mostly history, and is added to
        world.create(manager, StorageHint.HDD)
    world.append(ledger_id, 20)
    manager.checkpoint()
    world.append(ledger_id, 20)
    files = fs.list_directory(f"{ROOT}/hdd")
    fs.fail_at(0, "ENOSPC", only="commit")
    with pytest.raises(PybkError):
        manager.checkpoint()
    assert fs.list_directory(f"{ROOT}/hdd") == files
    check_catalog(manager)
    abandon(manager)
    fs = fs.kill()
    check(fs, world)


CRASH = crashes(power_loss=True)
KILL = crashes(power_loss=False)
TAKE_OVER = (
    "self._catalog_and_index.commit(self._next_mark(taken), change, rows=taken.rows, dropped=dropped, "
    "added=placed.files, named=taken.named)"
)


def put_back(part: str) -> tuple[SimFileSystem, World]:
    """Return a disk where the index, or the SSD tier, is as it was before entries were moved and packed."""
    fs = SimFileSystem(1)
    manager = open_world(fs)
    world = World()
    ledgers = [world.create(manager, hint) for hint in StorageHint]
    for ledger_id in ledgers:
        world.append(ledger_id, 10)
    manager.checkpoint()
    environment = fs.inode(f"{ROOT}/ssd/{part}/data.mdb")
    before = environment.table
    for ledger_id in ledgers:
        world.append(ledger_id, 10)
    manager.checkpoint()
    manager.close()
    environment.table = before
    return fs, world


def a_reserved_file_is_put_back_while_it_is_read() -> None:
    """Read it as another thread puts it back."""
    with pytest.MonkeyPatch.context() as patch:
        full_disk.test_bytes_of_a_reserved_file_count_only_if_it_was_not_put_back_meanwhile(patch)


def acknowledgements_leave_space() -> None:
    """Acknowledge, take over and delete until each is refused, or done."""
    with pytest.MonkeyPatch.context() as patch:
        full_disk.test_acknowledgements_leave_reserved_space_for_take_overs_and_these_leave_some_for_deletes(patch)


def a_checkpoint_beside_a_take_over() -> None:
    """End the log file between the creation of a ledger and its first entry."""
    full_disk_reserve.test_a_checkpoint_between_the_creation_of_a_ledger_and_its_first_entries_hinders_none(1, 2)


def interleaved_ledgers_are_deleted() -> None:
    """Delete ledgers whose entries lie in files with those of others, while another program takes all space."""
    packing.test_deletes_of_interleaved_ledgers_free_space_while_there_is_none(StorageHint.NVME, "live", watched=False)
    packing.test_deletes_of_interleaved_ledgers_free_space_while_there_is_none(StorageHint.HDD, "live", watched=False)


def packing_stops() -> None:
    """Stop a store once the segment has its name, and before the index names it."""
    with packing.small_stores_have_a_reserve():
        for operation in range(30):
            packing.stopped_while_packing(operation, "killed")


def a_full_disk_takes_deletes() -> None:
    """Delete ledgers, with restarts in between."""
    full_disk.test_the_reserve_lasts_while_another_program_takes_what_deletes_free("closed")


def an_older_index_is_made_again() -> None:
    fs, world = put_back("index")
    manager = open_world(fs)
    world.check(manager)
    manager.close()


def an_older_ssd_tier_is_refused() -> None:
    fs, _ = put_back("entries")
    with pytest.raises(CorruptError, match="older"):
        open_world(fs)


def an_index_older_than_a_move() -> None:
    """The index is put back as it was before entries left the SSD tier; the log says nothing of it."""
    fs = SimFileSystem(1)
    manager = open_world(fs)
    world = World()
    ledger_id = world.create(manager, StorageHint.SSD)
    world.append(ledger_id, 10)
    manager.checkpoint()
    index = fs.inode(f"{ROOT}/ssd/index/data.mdb")
    before = index.table
    store = store_of(manager)
    store.scheduler.compaction.relocate([(ledger_id, list(store.index.pages(ledger_id)))], StorageHint.HDD)
    manager.close()
    index.table = before
    manager = open_world(fs)
    world.check(manager)
    manager.close()


def named_records_survive_stops() -> None:
    stop_changing_records(power_loss=False)


def undisturbed(test: Callable[[pytest.MonkeyPatch], None]) -> Check:
    """Return a test that takes patches as a check."""

    @wraps(test)
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            test(patch)

    return run


def nothing_of_a_ledger_follows_its_delete() -> None:
    for change in ("close", "delete"):
        undisturbed(partial(two_changes, "delete", change))()


MUTANTS = [
    Mutant(
        "a change waits for a delete that is on its way",
        nothing_of_a_ledger_follows_its_delete,
        [
            Piece("store:Store._undeleted", "deleting is None or deleting.commit.done", "True"),
            Piece("log.recovery:_apply_metadata", "not _begins(metadata, restored=ledgers.restored)", "False"),
        ],
    ),
    Mutant(
        "no ledger begins with a change",
        a_late_move,
        [Piece("log.recovery:_begins", "restored or not metadata.version", "True")],
    ),
    Mutant(
        "a change that was refused is forgotten before the next",
        undisturbed(change_after_a_refused_one),
        [Piece("store:Store._undeleted", "descriptor.settle()", "pass")],
    ),
    Mutant(
        "a change that is on its way is remembered",
        undisturbed(change_beside_a_close),
        [Piece("descriptor:LedgerDescriptor.settle", "self.changing is not None and self.changing.done", "True")],
    ),
    Mutant(
        "a close that is on its way is waited for",
        undisturbed(close_beside_a_refused_one),
        [Piece("store:Store._close_ledger", "if closing is not None:\n    ...", "return")],
    ),
    Mutant(
        "entries that were refused go with their ledger",
        undisturbed(entries_of_a_deleted_ledger),
        [Piece("log.log:Log._next_commit", "not entries.descriptor.deleted", "True")],
    ),
    Mutant(
        "a catalog that is newer than the index is believed",
        an_older_index_is_made_again,
        [Piece("store_opening:_newer_in_place", "if further:\n    ...", "pass")],
    ),
    Mutant(
        "an index that names what was removed is known as older",
        an_index_older_than_a_move,
        [Piece("store_opening:older_environments", "there.removed_at > catalog_location(mark)", "False")],
    ),
    Mutant(
        "an older environment of the SSD tier is refused",
        an_older_ssd_tier_is_refused,
        [Piece("store_opening:older_environments", "there.puts < row.bytes", "False")],
    ),
    Mutant(
        "a checkpoint takes named records over",
        named_records_survive_stops,
        [Piece("compaction.checkpoint:Checkpoint._snapshot", "store.named.tail()", "[]")],
    ),
    Mutant(
        "replay takes named records",
        named_records_survive_stops,
        [Piece("log.recovery:apply_commit", "ledgers.replayed_named(_1)", "pass")],
    ),
    Mutant(
        "a group record binds the records that follow it",
        forge_groups,
        [Piece("log.recovery:_read_records", "_is_followed_by_its_own(data, records, number)", "True")],
    ),
    Mutant(
        "a group counts by one step",
        fail_a_group,
        [Piece("log.commit:GroupEntries.freeze", "not self.group.staged", "False")],
    ),
    Mutant(
        "nothing joins the entries of a group",
        fail_a_group,
        [Piece("log.log:Log._open_entries", "not entries.takes_more", "False")],
    ),
    Mutant(
        "all of a group is checked before any of it is applied",
        salvage_a_group,
        [Piece("log.salvage:apply_commit", "_check_member(ledgers, file, member)", "pass")],
    ),
    Mutant(
        "a group is salvaged as one",
        salvage_a_group,
        [Piece("log:salvage_log", "units_of(commit.records)", "[[record] for record in commit.records]")],
    ),
    Mutant(
        "what is acknowledged is synced",
        CRASH,
        [Piece("log.commit:CommitWriter.write", "file.write_durable", "file.write")],
    ),
    Mutant(
        "a failed sync ends the store",
        a_failed_sync_ends_the_store,
        [Piece("log.log:Log._fail_step", "kept = self._error = _1", "kept = _1")],
    ),
    Mutant(
        "a new log file's name is synced before it is used",
        CRASH,
        [Piece("preallocation:LogFileSupply.make", "volumes.fs.sync_directory(volumes.directory_of(row))", "pass")],
    ),
    Mutant(
        "the watermark follows the sync",
        KILL,
        [
            Piece(
                "log.commit:CommitWriter.write",
                "file.write_durable(commit.buffers, commit.start)",
                ("self._watermark.advance(commit.lsn)\nfile.write_durable(commit.buffers, commit.start)"),
            )
        ],
    ),
    Mutant(
        "what a failed sync left in the page cache is written again",
        what_was_served_after_a_failed_sync_stays,
        [Piece("store:make_log_durable", "rewrite_commits(volumes, rows, recovered.again)", "pass")],
    ),
    Mutant(
        "what a failed sync left in the page cache is written again with the header of its file",
        what_began_a_log_file_and_was_served_after_a_failed_sync_stays,
        [
            Piece(
                "log.recovery:rewrite_commits", "0 if commit.offset == BLOCK_BYTES else commit.offset", "commit.offset"
            )
        ],
    ),
    Mutant(
        "what was removed stays so once ids are used again",
        a_file_that_was_removed_does_not_come_back_under_an_id_that_is_used_again,
        [Piece("store:make_log_durable", "volumes.fs.sync_directory(directory.path)", "pass")],
    ),
    Mutant(
        "a store that is open is not marked as cleanly ended",
        a_kill_is_no_clean_end,
        [Piece("store:Store.__init__", "watermark.clean = False", "pass")],
    ),
    Mutant(
        "a torn write is the end of the log",
        torn_writes_are_no_entries,
        [Piece("log.recovery:Replay._read_last", "if commit.lsn > self._durable:\n                break", "pass")],
    ),
    Mutant(
        "bodies in the log have checksums",
        torn_writes_are_no_entries,
        [Piece("log.recovery:_read_records", "xxh3_64_intdigest(data[start:at]) == header.body_checksum", "True")],
    ),
    Mutant(
        "LSNs in the log have no gaps",
        what_is_missing_in_the_log_is_noticed,
        [
            Piece(
                "log.recovery:scan_commits",
                ("if head is None or head.lsn != lsn:\n    return"),
                ("if head is None:\n    return\nlsn = head.lsn"),
            )
        ],
    ),
    Mutant(
        "files of the log follow each other",
        a_lost_file_of_the_log_is_noticed,
        [
            Piece(
                "log.recovery:Replay._replay",
                (
                    "if header.first_lsn != self._lsn:\n"
                    "    raise self._refusal(path, f'but {file.path} begins with LSN {header.first_lsn}')"
                ),
                (
                    "self._lsn = header.first_lsn\n"
                    "if False:\n"
                    "    raise self._refusal(path, f'but {file.path} begins with LSN {header.first_lsn}')"
                ),
            )
        ],
    ),
    Mutant(
        "an overwritten log is not an unused one",
        an_overwritten_log_of_a_new_store_is_noticed,
        [Piece("log.recovery:Replay._next_begun", "used > BLOCK_BYTES and not torn", "False")],
    ),
    Mutant(
        "what a torn header may be",
        an_overwritten_log_of_a_new_store_is_noticed,
        [Piece("log.recovery:file_header_may_be_torn", "found in (0, written)", "True")],
    ),
    Mutant(
        "files of the log's tail are not leftovers",
        KILL,
        [Piece("store:remove_leftovers", "not (row.kind == LOG and file_id >= mark.first_log_file_id)", "True")],
    ),
    Mutant(
        "cold segments are synced",
        CRASH,
        [Piece("format.cold_segment:ColdSegmentWriter.finish", "file.sync()", "pass")],
    ),
    Mutant(
        "cold segments' names are synced",
        CRASH,
        [
            Piece(
                "format.cold_segment:ColdSegmentWriter.finish",
                "self._fs.sync_directory(os.path.dirname(self._path))",
                "pass",
            )
        ],
    ),
    Mutant(
        "what is in the catalog is synced",
        the_catalog_makes_the_index_again,
        [Piece("format.catalog:CatalogWriter._sync", "self._file.sync()", "pass")],
    ),
    Mutant(
        "a new catalog's name is synced",
        the_catalog_makes_the_index_again,
        [Piece("format.catalog:CatalogWriter.create", "fs.sync_directory(os.path.dirname(path))", "pass")],
    ),
    Mutant(
        "the catalog knows before the index does",
        KILL,
        [
            Piece(
                "index.catalog_and_index:CatalogAndIndex.commit",
                "catalog, mark = self._write_catalog(changed, mark, in_spare=in_spare)",
                (
                    "first = self._change_index(mark, change, changed)\n"
                    "self.files.update((row.file_id, row) for row in changed.added)\n"
                    "list(map(self.files.pop, changed.gone))\n"
                    "change, changed = (lambda update: first), changed._replace(added=[], gone=[], named=[])\n"
                    "catalog, mark = self._write_catalog(changed, mark, in_spare=in_spare)"
                ),
            )
        ],
    ),
    Mutant(
        "commits of the index are synced",
        the_index_syncs_its_commits,
        [
            Piece(
                "io.lmdb_environment:_Shared.__init__",
                "readahead=False",
                "sync=False",
            )
        ],
    ),
    Mutant(
        "log files stay until the index names what became of them",
        KILL,
        [
            Piece(
                "compaction.checkpoint:Checkpoint.take_over",
                TAKE_OVER,
                (
                    "for row in taken.log_files:\n"
                    "    if row not in placed.files:\n"
                    "        store.volumes.drop(row.file_id)\n"
                    f"{TAKE_OVER}"
                ),
            )
        ],
    ),
    Mutant(
        "what moved stays in the SSD tier until the index names its new place",
        KILL,
        [
            Piece(
                "compaction.compaction:Compaction.relocate",
                "self._catalog_and_index.commit(mark, change, rows=rows, added=files)",
                (
                    "for ledger_id, old, new in moved:\n"
                    "    self._garbage.remember(self._garbage.keys_of(ledger_id, old, new))\n"
                    "self._garbage.purge()\n"
                    "self._catalog_and_index.commit(mark, change, rows=rows, added=files)"
                ),
            )
        ],
    ),
    Mutant(
        "entries are in the SSD tier before the index names them",
        KILL,
        [
            Piece("tiers.lmdb_tier:_RowsWriter.finish", "self._flush()", "self._store.late = self._flush"),
            Piece(
                "compaction.checkpoint:Checkpoint.take_over",
                "self._taken_over(taken, {row.file_id for row in placed.files})",
                ("getattr(store, 'late', int)()\nself._taken_over(taken, {row.file_id for row in placed.files})"),
            ),
        ],
    ),
    Mutant(
        "deletes are logged",
        KILL,
        [
            Piece(
                "store:Store._delete",
                "commit = self.log.stage_control(encode, partial(self.deleted, descriptor), claim=claim)",
                "self.deleted(descriptor); commit = Commit.finished(None)",
            )
        ],
    ),
    Mutant(
        "a close is durable before it is acknowledged",
        KILL,
        [
            Piece(
                "store:Store._close_ledger",
                "self._finish_change(commit)",
                "    self._changed(descriptor, descriptor.metadata_pushed)",
            )
        ],
    ),
    Mutant(
        "force is logged",
        deferred_entries_are_confirmed_by_force_only,
        [
            Piece(
                "store:Store.force",
                "commit = self.log.stage_control(encode, apply, unless_changed=(descriptor, None))",
                "self.log.flush(); apply(); commit = Commit.finished(None)",
            )
        ],
    ),
    Mutant(
        "deferred entries are confirmed by force",
        deferred_entries_are_confirmed_by_force_only,
        [Piece("descriptor:LedgerDescriptor.publish", "not self.deferred", "True")],
    ),
    Mutant(
        "a record holds consecutive entries",
        parts_of_a_file_can_be_moved,
        [Piece("compaction.mover:Mover._pieces", "high = min(high, jumps[bisect_right(jumps, low)])", "pass")],
    ),
    Mutant(
        "what the index did not take is taken back from the catalog",
        lack_of_space_leaves_nothing_behind,
        [Piece("index.catalog_and_index:CatalogAndIndex._take_back", "catalog.take_back()", "pass")],
    ),
    Mutant(
        "the files of a job that failed are removed",
        lack_of_space_leaves_nothing_behind,
        [Piece("index.catalog_and_index:CatalogAndIndex._discard", "self._volumes.drop(row.file_id)", "pass")],
    ),
    Mutant(
        "what grows a store finds no reserved space",
        full_disk.test_reserved_space_is_used_for_nothing_else,
        [Piece("log.commit:_use_of", "return ReserveUse.NONE", "return ReserveUse.CONTROLS")],
    ),
    Mutant(
        "reserved files are put back",
        a_full_disk_takes_deletes,
        [Piece("preallocation:LogFileSupply.retire", "put_back(self._volumes, row)", "False")],
    ),
    Mutant(
        "reserved files keep their blocks",
        a_full_disk_takes_deletes,
        [Piece("preallocation:LogFileSupply.tidy", "file.size if keeps else used", "used")],
    ),
    Mutant(
        "acknowledgements leave reserved files to take-overs, and these to deletes",
        acknowledgements_leave_space,
        [
            Piece("preallocation:LogReserve.take", "len(ready) <= use.value", "not ready"),
            Piece("preallocation:LogFileSupply.has_reserve", "len(self.reserve.ready()) >= use.value", "True"),
        ],
    ),
    Mutant(
        "log files of the reserve are emptied",
        full_disk_reserve.test_a_checkpoint_empties_log_files_of_the_reserve,
        [Piece("compaction.checkpoint:Checkpoint._emptied", "4 * nbytes <= room", "False")],
    ),
    Mutant(
        "they are emptied into allocated space",
        full_disk_reserve.test_a_checkpoint_empties_log_files_of_the_reserve,
        [Piece("compaction.checkpoint:Checkpoint._write", "when_full=when_full", "when_full=False")],
    ),
    Mutant(
        "a checkpoint in the background hinders no take-over",
        a_checkpoint_beside_a_take_over,
        [Piece("store:Store._save_reserve", "use.value + 1", "use.value")],
    ),
    Mutant(
        "a file with many entries leaves room for those with few",
        full_disk_reserve.test_files_with_many_entries_leave_room_for_those_with_few,
        [Piece("compaction.checkpoint:Checkpoint._emptied", "4 * nbytes", "nbytes")],
    ),
    Mutant(
        "a log file of the reserve does not stay because it is well filled",
        full_disk_reserve.test_a_log_file_that_one_entry_fills_is_emptied_too,
        [
            Piece(
                "compaction.checkpoint:Checkpoint._place",
                "self._staying(runs, in_tier, taken.log_files) - reserved",
                "self._staying(runs, in_tier, taken.log_files)",
            )
        ],
    ),
    Mutant(
        "entries of the SSD tier leave room for those of the reserve",
        full_disk_reserve.test_entries_of_the_ssd_tier_leave_the_room_to_those_of_the_reserve,
        [Piece("tiers.lmdb_tier:LmdbTier.writer", "0 if when_full else REFUGE_BYTES", "0")],
    ),
    Mutant(
        "no map of a reserved file is handed out",
        full_disk.test_no_map_of_a_reserved_file_is_kept_because_it_is_used_again,
        [Piece("volumes:Volumes.is_reused", "row.kind == LOG", "False")],
    ),
    Mutant(
        "bytes of a file that lost its name meanwhile do not count",
        a_reserved_file_is_put_back_while_it_is_read,
        [Piece("volumes:Volumes._while_named", "not self.fs.exists(path)", "False")],
    ),
    Mutant(
        "a packed file is the next reserve",
        interleaved_ledgers_are_deleted,
        [Piece("preallocation:put_back_packed", "fs.rename(path, reserve)", "fs.unlink(path)")],
    ),
    Mutant(
        "a segment in the reserve ends where its file ends",
        interleaved_ledgers_are_deleted,
        [Piece("format.cold_segment:ColdSegmentWriter.finish", "file.truncate(self._written)", "pass")],
    ),
    Mutant(
        "what an interrupted pack leaves is the reserve again",
        packing_stops,
        [Piece("store:remove_leftovers", "put_back_packed(volumes, row, 1)", "False")],
    ),
    Mutant(
        "the reserve is not written while a reader has it mapped",
        packing.test_a_packed_file_that_a_reader_has_mapped_is_neither_written_nor_cut,
        [Piece("preallocation:_ready_bytes", "fs.is_unused(path)", "True")],
    ),
    Mutant(
        "a file that stays does not take the reserve",
        packing.test_a_file_with_a_damaged_record_does_not_take_the_reserve_for_packing,
        [Piece("compaction.compaction:Compaction.relocate", "reserved is not None and mover.unmoved", "False")],
    ),
    Mutant(
        "a pack that is given up leaves the reserve",
        packing.test_a_file_with_a_damaged_record_does_not_take_the_reserve_for_packing,
        [
            Piece("format.cold_segment:ColdSegmentWriter.abort", "self._fs.unlink(self._path)", "pass"),
            Piece(
                "format.cold_segment:ColdSegmentWriter.__init__",
                "fs.open(reserved, writable=True)",
                "(fs.rename(reserved, path), fs.open(path, writable=True))[1]",
            ),
            Piece(
                "format.cold_segment:ColdSegmentWriter.finish", "self._fs.rename(self._reserved, self._path)", "pass"
            ),
        ],
    ),
    Mutant(
        "packing leaves checkpoints the space of the index",
        packing.test_packing_leaves_the_index_the_space_that_checkpoints_need,
        [Piece("compaction.compaction:check_packing_space", "index_bytes + left", "0")],
    ),
    Mutant(
        "the largest file is packed first",
        packing.test_a_small_file_is_packed_after_those_that_leave_a_large_reserve,
        [Piece("compaction.compaction:Compaction._pack_in_reserve", "reverse=True", "reverse=False")],
    ),
]


def is_noticed(run: Check) -> bool:
    """Return whether a check fails."""
    try:
        run()
    except (AssertionError, PybkError, pytest.fail.Exception):
        return True
    return False


def must_work_undisturbed() -> None:
    """Show that a mutant is a store that works for as long as nothing goes wrong, and not one that is merely broken."""
    manager = open_world(SimFileSystem(0))
    world = World()
    world.run(manager)
    world.check(manager, recover=False)
    manager.close()


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_broken_rule_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in mutant.pieces:
        mutate(monkeypatch, piece)
    must_work_undisturbed()
    assert is_noticed(mutant.check), f"nothing notices that this rule is broken: {mutant.rule}"


SCENARIOS = {mutant.check.__name__: mutant.check for mutant in MUTANTS if mutant.check not in (CRASH, KILL)}


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_the_checks_pass_where_no_rule_is_broken(name: str) -> None:
    SCENARIOS[name]()
