"""Groups: entries of several ledgers and changes of named records are there all or not at all, whatever happens."""

from __future__ import annotations

import shutil
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from xxhash import xxh3_64_intdigest

from pybk.admin.dump import dump_store
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    LedgerClosedError,
    LedgerFencedError,
    NoSuchLedgerError,
    PybkError,
    StorageFailedError,
    StorageFullError,
    UnsupportedFormatError,
    UsageError,
    VersionConflictError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage import transaction_group
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.log_file import (
    BLOCK_BYTES,
    RECORD_HEADER_BYTES,
    RecordKind,
    decode_file_header,
    decode_header,
    encode_commit_header,
    encode_control,
    encode_entries,
    encode_group,
    padding,
)
from pybk.storage.log.log import Admission, Ticket
from pybk.storage.log.recovery import OpenLogFile, Replay, ReplayedCommit, scan_commits
from pybk.storage.named_records import NamedChange
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.repair.verify import verify_store
from pybk.storage.store import Store
from pybk.storage.tiers import LOG
from pybk.storage.transaction_group import GROUP_BYTES_MAX, GROUP_LEDGERS_MAX, GroupAppended, LedgerEntries
from tests.internals import descriptor_of, digest_of, store_of, store_view_of
from tests.sampling import sample
from tests.simdisk import SimEnvironment, SimFileSystem, stopping
from tests.storage.real_store import contents, open_quick, stop_syncing
from tests.storage.store_harness import CONFIG, ROOT, abandon, open_store, open_world
from tests.test_ledger import metadata
from tests.waiting import WAIT_S, wait_until

NAME = "state"
BOUND = 64 << 10


def put(
    manager: LedgerManager, entries: dict[LedgerWriter, list[bytes]], changes: dict[str, bytes | None] | None = None
) -> GroupAppended:
    """Append a group; named records are set whatever they were."""
    store = store_of(manager)
    given = []
    for name, value in (changes or {}).items():
        row = store.named.get(name)
        given.append(NamedChange(name, row and row.version, value))
    return store.append_group([LedgerEntries(descriptor_of(w), digest_of(w), p) for w, p in entries.items()], given)


def value(manager: LedgerManager, name: str = NAME) -> bytes | None:
    """Return the value of a named record, None if there is none."""
    row = store_view_of(manager).named.get(name)
    return row and row.value


def create(manager: LedgerManager, hint: StorageHint = StorageHint.NVME, **options: Any) -> LedgerWriter:
    return manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C, **options)


# ---- what a group does -----------------------------------------------------------------------------------------------


def test_a_group_is_appended_among_other_entries_with_one_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = open_store(fs := SimFileSystem(1))
    one, two = create(manager), create(manager)
    monkeypatch.setattr(store_of(manager).log, "kick", lambda: None)  # so that no other thread commits
    before = [one.append_async(b"before"), two.append_async(b"before")]
    syncs = sum(name == "write_durable" for name, _ in fs.operations)
    done = put(manager, {two: [b"t1"], one: [b"o1", b"o2"]}, {NAME: b"1"})
    assert sum(name == "write_durable" for name, _ in fs.operations) == syncs + 1
    monkeypatch.undo()
    assert done.entry_ids == (range(1, 2), range(1, 3)), "in the order in which the ledgers were given"
    assert [future.result() for future in before] == [0, 0]
    assert one.last_add_confirmed == one.last_add_pushed == 2
    row = store_of(manager).named.get(NAME)
    assert row is not None
    assert row.version == done.version
    assert one.append(b"after") == 3
    assert [contents(manager, w.ledger_id) for w in (one, two)] == [
        [b"before", b"o1", b"o2", b"after"],
        [b"before", b"t1"],
    ]
    one.close()
    assert manager.ledger_metadata(one.ledger_id).length == len(b"beforeo1o2after")
    manager.close()


def test_groups_and_other_entries_share_commits_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer, other = create(manager), create(manager)
        go = stop_syncing(monkeypatch)
        futures = [writer.append_async(b"held")]
        log = store_of(manager).log
        wait_until(lambda: log.inflight is not None)
        futures.append(writer.append_async(b"plain 1"))
        threads = []
        for number in range(3):
            entries = {writer: [b"group %d" % number] * 2, other: [b"group %d" % number]}
            threads.append(threading.Thread(target=put, args=(manager, entries)))
            threads[-1].start()
            wait_until(lambda number=number: len(log.forming.groups) == number + 1)  # type: ignore[misc]  # bound
            futures.append(writer.append_async(b"plain %d" % (number + 2)))
        threads.append(threading.Thread(target=put, args=(manager, {}, {NAME: b"1", "other": b"2"})))
        threads[-1].start()
        wait_until(lambda: len(log.forming.groups) == 4)
        go.set()
        assert [future.result() for future in futures] == [0, 1, 4, 7, 10]
        for thread in threads:
            thread.join(WAIT_S)
    wanted = [b"held", b"plain 1"]
    for number in range(3):
        wanted += [b"group %d" % number, b"group %d" % number, b"plain %d" % (number + 2)]
    with open_quick(tmp_path / "store") as manager:
        assert contents(manager, writer.ledger_id) == wanted
        assert contents(manager, other.ledger_id) == [b"group %d" % number for number in range(3)]
        assert (value(manager), value(manager, "other")) == (b"1", b"2")
    kinds = [row["kind"] for row in dump_store(str(tmp_path / "store")) if row["what"] == "record"]
    assert kinds.count("group") == 4


def test_a_reader_of_another_process_sees_a_group(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager, open_quick(tmp_path / "store", read_only=True) as local_reader:
        writer = create(manager)
        put(manager, {writer: [b"1", b"2"]}, {NAME: b"1"})
        store_view_of(local_reader).catch_up()
        assert contents(local_reader, writer.ledger_id) == [b"1", b"2"]
        assert value(local_reader) == b"1"


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_limits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "store", max_entry_bytes=1000) as manager:
        writer = create(manager)
        monkeypatch.setattr(transaction_group, "GROUP_BYTES_MAX", 2000)
        fits = 2000 - 80 - 64 - 2 * (4 + 36)
        put(manager, {writer: [bytes(fits - 900), bytes(900)]})
        with pytest.raises(UsageError, match="2001 bytes; a group takes at most 2000"):
            put(manager, {writer: [bytes(fits - 899), bytes(900)]})
        monkeypatch.setattr(transaction_group, "GROUP_LEDGERS_MAX", 1)
        with pytest.raises(UsageError, match="2 ledgers; it takes at most 1"):
            put(manager, {writer: [b""], create(manager): [b""]})
        with pytest.raises(UsageError, match="max_entry_bytes is 1000"):
            put(manager, {writer: [bytes(1001)]})
        with pytest.raises(UsageError, match="no entries of ledger 0; leave the ledger out"):
            put(manager, {writer: []})
        with pytest.raises(UsageError, match="is empty"):
            put(manager, {})
        monkeypatch.setattr(transaction_group, "GROUP_LEDGERS_MAX", 2)
        store, mine = store_of(manager), LedgerEntries(descriptor_of(writer), digest_of(writer), [b""])
        with pytest.raises(UsageError, match="twice"):
            store.append_group([mine, mine])
        with pytest.raises(UsageError, match="twice"):
            store.append_group([], [NamedChange("a", None, b"")] * 2)
        assert writer.last_add_pushed == 1
    assert GROUP_BYTES_MAX == 16 << 20
    assert GROUP_LEDGERS_MAX == 256


def test_a_group_of_as_many_ledgers_as_it_takes_is_appended() -> None:
    manager = open_store(SimFileSystem(1))
    writers = [create(manager) for _ in range(GROUP_LEDGERS_MAX)]
    assert put(manager, {key: [b"1"] for key in reversed(writers)}).entry_ids == (range(1),) * GROUP_LEDGERS_MAX
    manager.close()


def test_a_member_that_takes_nothing_fails_the_group_before_anything_is_staged(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        sound = create(manager)
        closed, deleted, fenced = create(manager), create(manager), create(manager)
        deferred = create(manager, write_flags=WriteFlag.DEFERRED_FORCE)
        advanced = create(manager, ledger_id=77)
        closed.close()
        manager.delete_ledger(deleted.ledger_id)
        manager.open_ledger(fenced.ledger_id)
        for writer, error in (
            (closed, LedgerClosedError),
            (deleted, NoSuchLedgerError),
            (fenced, LedgerFencedError),
            (deferred, IllegalOperationError),
            (advanced, IllegalOperationError),
        ):
            with pytest.raises(error):
                put(manager, {sound: [b"lost"], writer: [b"lost"]}, {NAME: b"lost"})
        with pytest.raises(VersionConflictError):
            store_of(manager).append_group(
                [LedgerEntries(descriptor_of(sound), digest_of(sound), [b"lost"])], [NamedChange(NAME, 5, b"lost")]
            )
        assert sound.append(b"first") == 0
        assert value(manager) is None


def test_a_store_of_an_older_level_has_no_groups(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = create(manager)
        store_of(manager).feature_level = FeatureLevel.BASE
        with pytest.raises(IllegalOperationError, match="no groups; raise it with `pybk store upgrade"):
            put(manager, {writer: [b"1"]})


def test_a_group_that_finds_no_space_on_the_disk_leaves_nothing() -> None:
    manager = open_store(fs := SimFileSystem(1), first_file_bytes=64 << 10)
    one, two = create(manager), create(manager)
    put(manager, {one: [b"1"], two: [b"1"]}, {NAME: b"1"})
    fs.fail_at(0, "ENOSPC", forever=True, only="create")
    with pytest.raises(StorageFullError):
        put(manager, {one: [bytes(2 << 20)], two: [b"2"]}, {NAME: b"2"})
    fs.heal()
    store_of(manager).scheduler.tick()
    put(manager, {one: [b"3"], two: [b"3"]}, {NAME: b"3"})
    assert [contents(manager, writer.ledger_id) for writer in (one, two)] == [[b"1", b"3"]] * 2
    assert value(manager) == b"3"
    manager.close()


# ---- the log, byte by byte -------------------------------------------------------------------------------------------


def test_a_group_record_names_what_it_binds() -> None:
    headers = [bytes([number]) * RECORD_HEADER_BYTES for number in (1, 2)]
    data = encode_group(headers, 1000, lsn=9)
    header = decode_header(memoryview(data), 0, where="")
    assert header[:5] == (7, 0, -1, 2, 9)
    assert struct.unpack("<QQ", data[RECORD_HEADER_BYTES:]) == (1000, xxh3_64_intdigest(headers[0] + headers[1]))


class Grouped(NamedTuple):
    """A store that was killed: a group is the last commit of its log."""

    fs: SimFileSystem
    path: str
    file_id: int
    store_id: bytes
    commit: ReplayedCommit
    ledgers: tuple[int, int]


def grouped() -> Grouped:
    """Make a store with two ledgers of an entry each, and then a group over both and a named record."""
    fs = SimFileSystem(1)
    manager = open_store(fs)
    one, two = create(manager), create(manager)
    put(manager, {one: [b"before"]}, {NAME: b"before"})
    two.append(b"before")
    put(manager, {one: [b"in a group", b"too"], two: [b"in a group"]}, {NAME: b"in a group"})
    store = store_of(manager)
    (row,) = [row for row in store.volumes.rows.values() if row.kind == LOG]
    path = store.volumes.path_of(row)
    abandon(manager)
    fs = fs.kill()
    file = OpenLogFile(row.file_id, path, memoryview(bytes(fs.inode(path).live)))
    *_, last = scan_commits(file, BLOCK_BYTES, 1)
    assert [record.header.kind for record in last.records] == [
        RecordKind.GROUP,
        RecordKind.ENTRIES,
        RecordKind.ENTRIES,
        RecordKind.NAMED,
    ]
    return Grouped(fs, path, row.file_id, store.store_id, last, (one.ledger_id, two.ledger_id))


def replayed(found: Grouped, data: bytes | bytearray) -> list[int]:
    """Return the kinds of the records that are replayed from the commit before the group on; nothing is corrupt."""
    first = found.commit.lsn - 1
    at = BLOCK_BYTES + (first - 1) * BLOCK_BYTES
    assert found.commit.offset == at + BLOCK_BYTES, "each commit takes a block"
    header = decode_file_header(memoryview(data), store_id=found.store_id, file_id=found.file_id, where="")
    assert header is not None
    file = OpenLogFile(found.file_id, found.path, memoryview(data))
    log = Replay([file], first_lsn=1, durable_lsn=first, store_id=found.store_id)
    kinds = [record.header.kind for commit in log if commit.lsn >= first for record in commit.records]
    assert not log.end.corrupt
    return kinds


BEFORE = [RecordKind.ENTRIES]
WHOLE = [*BEFORE, RecordKind.GROUP, RecordKind.ENTRIES, RecordKind.ENTRIES, RecordKind.NAMED]


def test_a_group_that_was_cut_at_any_byte_is_invisible() -> None:
    found = grouped()
    end = found.commit.records[-1].body_end
    data = bytearray(found.fs.inode(found.path).live[: end + 1])
    assert replayed(found, data) == WHOLE
    del data[end:]
    assert replayed(found, data) == WHOLE, "what is behind the records is padding"
    cut = bytes(data)
    for at in range(end - 1, found.commit.offset - 1, -1):
        del data[at:]
        assert replayed(found, data) == BEFORE, at
        if cut[at]:
            assert replayed(found, cut[:at] + bytes(end - at)) == BEFORE, at


def test_a_group_with_any_byte_damaged_is_invisible_unless_it_was_durable() -> None:
    found = grouped()
    end = found.commit.records[-1].body_end
    data = bytearray(found.fs.inode(found.path).live[:end])
    for at in range(found.commit.offset, end):
        data[at] ^= 1
        assert replayed(found, data) == BEFORE, at
        data[at] ^= 1


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("durable", [False, True], ids=["torn", "durable"])
def test_a_group_with_any_record_damaged_opens_whole_or_without_it_or_not(number: int, durable: bool) -> None:
    found = grouped()
    one, two = found.ledgers
    live = found.fs.inode(found.path).live
    live[found.commit.records[number].body_end - 1] ^= 1
    if not durable:
        mark = found.fs.inode(f"{ROOT}/watermark").live
        lsn = found.commit.lsn - 1
        mark[24:40] = lsn.to_bytes(8, "little") + (lsn ^ (1 << 64) - 1).to_bytes(8, "little")
    if durable and number in (0, 3):
        with pytest.raises(CorruptError, match="control record"):
            open_store(found.fs)
        return
    manager = open_store(found.fs)
    if not durable:
        assert [contents(manager, ledger_id) for ledger_id in found.ledgers] == [[b"before"]] * 2
        assert value(manager) == b"before"
        return
    damaged = one if number == 1 else two
    assert value(manager) == b"in a group"
    for ledger_id, count in ((one, 3), (two, 2)):
        with manager.open_ledger(ledger_id, recover=False) as reader:
            assert reader.last_add_confirmed == count - 1, "all of it is known"
            if ledger_id == damaged:
                with pytest.raises(PybkError):
                    list(reader.read(count - 1, count - 1))
    manager.close()


def rewritten(found: Grouped, records: list[bytes]) -> SimFileSystem:
    """Put other records in the place of the group's commit, soundly framed."""
    body = b"".join(records)
    lsn, offset = found.commit.lsn, found.commit.offset
    data = encode_commit_header(lsn, lsn - 1, found.file_id, len(records), len(body)) + body
    data += bytes(padding(len(data)))
    found.fs.inode(found.path).live[offset : offset + len(data)] = data
    return found.fs


def records_of(found: Grouped) -> list[bytes]:
    data = found.commit.data
    return [bytes(data[one.body_start - RECORD_HEADER_BYTES : one.body_end]) for one in found.commit.records]


def test_a_group_record_without_its_own_records_is_not_a_valid_commit() -> None:
    found = grouped()
    header, first, second, named = records_of(found)
    lsn = found.commit.lsn
    for records in (
        [header],
        [header, first],
        [header, first, second],
        [header, first, named],
        [header, second, first, named],
        [header, header, first, second, named],
        [first, header, second, named],
        [encode_group([], 0, lsn=lsn), first, second, named],
    ):
        with pytest.raises(CorruptError, match="no whole commit"):
            open_store(rewritten(found, records))
    open_store(rewritten(found, [header, first, second, named])).close()


def test_a_record_or_a_member_of_an_unknown_kind_is_refused_as_newer(tmp_path: Path) -> None:
    found = grouped()
    lsn = found.commit.lsn
    unknown = encode_control(99, -1, 0, b"?", lsn=lsn)
    with pytest.raises(UnsupportedFormatError, match=r"kind 99; this pybk knows the kinds 1 to 8; open .* or newer"):
        open_store(rewritten(found, [unknown]))
    with pytest.raises(UnsupportedFormatError, match="kind 99"):
        rebuild_index(ROOT, fs=found.fs, environment=lambda path: SimEnvironment(found.fs, path))
    deletion = encode_control(RecordKind.DELETE, found.ledgers[0], 0, lsn=lsn)
    binding = encode_group([deletion[:RECORD_HEADER_BYTES]], len(deletion), lsn=lsn)
    with pytest.raises(UnsupportedFormatError, match="kind 3 in a group"):
        open_store(rewritten(found, [binding, deletion]))


def test_salvage_takes_a_group_whole_or_not_at_all() -> None:
    found = grouped()
    one, two = found.ledgers
    lsn = found.commit.lsn
    _, first, _, named = records_of(found)
    gap = b"".join(encode_entries(two, 7, [40], [bytes(40)], lsn=lsn))
    plain = b"".join(encode_entries(two, 1, [40], [bytes(40)], lsn=lsn))
    members = [first, gap, named]
    binding = encode_group([each[:RECORD_HEADER_BYTES] for each in members], sum(map(len, members)), lsn=lsn)
    fs = rewritten(found, [binding, *members, plain])
    with pytest.raises(CorruptError, match="entries are missing"):
        open_store(fs)
    store = Store.open(ROOT, config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path), salvage=True)
    assert store.salvage is not None
    assert len(store.salvage.lost) == 1
    row = store.named.get(NAME)
    assert row is not None
    assert row.value == b"before"
    assert store.descriptor(one).last_durable == 0
    assert store.descriptor(two).last_durable == 1, "the record after the group is taken"
    store.close()


# ---- stops -----------------------------------------------------------------------------------------------------------

HINTS = list(StorageHint)


class Groups:
    """A workload of groups over a ledger in each tier and a named record."""

    def __init__(self) -> None:
        self.acknowledged = 0
        self._writers: list[LedgerWriter] = []

    def run(self, manager: LedgerManager) -> None:
        """Append groups, with entries between them, checkpoints and moves."""
        self._writers = [create(manager, hint) for hint in HINTS]
        for number in range(1, 5):
            self._append(manager, number)
            if number == 2:
                manager.checkpoint()
            if number == 3:
                manager.move_ledger(self._writers[0].ledger_id, StorageHint.HDD)

    def _append(self, manager: LedgerManager, number: int) -> None:
        if number % 2:
            _ = self._writers[number % 3].append_async(b"plain")
        entries = {writer: [b"%d" % number * (1 + 700 * k)] * k for k, writer in enumerate(self._writers) if k}
        entries[self._writers[0]] = [b"%d" % number]
        put(manager, entries, {NAME: b"%d" % number})
        self.acknowledged = number

    def check(self, manager: LedgerManager) -> None:
        """Assert that each group is there whole or not at all, and that the acknowledged ones are."""
        ids = list(manager.list_ledgers())
        if len(ids) < len(HINTS):
            assert not self.acknowledged
            return
        found = [[one for one in contents(manager, ledger_id) if one != b"plain"] for ledger_id in ids[: len(HINTS)]]
        last = len(found[0])
        assert last >= self.acknowledged
        assert found[0] == [b"%d" % number for number in range(1, last + 1)]
        for k in range(1, len(HINTS)):
            assert found[k] == [b"%d" % n * (1 + 700 * k) for n in range(1, last + 1) for _ in range(k)]
        assert value(manager) == (b"%d" % last if last else None)


@pytest.mark.sampled
def test_a_stop_at_any_operation_leaves_each_group_whole_or_not_there() -> None:
    fs = SimFileSystem(0)
    manager = open_world(fs)
    start = len(fs.operations)
    groups = Groups()
    groups.run(manager)
    groups.check(manager)
    count = len(fs.operations) - start
    manager.close()
    assert count > 50
    for operation in sample("groups", range(count), 3):
        fs = SimFileSystem(operation)
        manager = open_world(fs)
        fs.crash_at(operation)
        groups = Groups()
        with stopping(fs):
            groups.run(manager)
        abandon(manager)
        for found in (fs.crash(), fs.kill()):
            manager = open_world(found)
            groups.check(manager)
            if operation % 4 == 0:
                manager.checkpoint()
                groups.check(manager)
            abandon(manager)


def test_a_group_whose_write_failed_is_kept_whole_or_not_at_all() -> None:
    seen: set[bool] = set()
    for seed in range(400):
        manager = open_store(fs := SimFileSystem(seed))
        one, two = create(manager), create(manager)
        fs.fail_at(0, only="write_durable")
        with pytest.raises(StorageFailedError):
            put(manager, {one: [bytes(3000)], two: [bytes(3000)]}, {NAME: b"1"})
        abandon(manager)
        manager = open_store(fs.crash() if seed % 2 else fs.kill())
        found = {len(contents(manager, writer.ledger_id)) for writer in (one, two)}
        assert found in ({0}, {1})
        assert value(manager) == (b"1" if found == {1} else None)
        seen.add(found == {1})
        manager.close()
        if len(seen) == 2:
            break
    assert seen == {False, True}


class _Failing(dict[str, Any]):
    """Cannot be changed."""

    def update(self, *_: Any, **__: Any) -> None:
        raise MemoryError


def test_a_group_that_fails_before_it_counts_leaves_nothing() -> None:
    manager = open_store(fs := SimFileSystem(1))
    one, two = create(manager), create(manager)
    named = store_of(manager).named
    named.pending = _Failing()
    with pytest.raises(MemoryError):
        put(manager, {one: [b"lost"] * 2, two: [b"lost"]}, {NAME: b"lost"})
    assert store_of(manager).log.forming.groups, "it was on its way"
    named.pending = {}
    assert (one.append(b"after"), two.append(b"after")) == (0, 0)
    assert (one.length, two.length) == (5, 5)
    abandon(manager)
    manager = open_store(fs.kill())
    assert [contents(manager, writer.ledger_id) for writer in (one, two)] == [[b"after"]] * 2
    assert value(manager) is None
    manager.close()


# ---- everything else treats grouped entries as any others ------------------------------------------------------------


def test_grouped_entries_are_checkpointed_moved_packed_verified_and_indexed_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    groups = Groups()
    with open_quick(path) as manager:
        groups.run(manager)
        groups.check(manager)
    assert not verify_store(str(path)).problems
    shutil.rmtree(path / "ssd" / "index")
    assert rebuild_index(str(path)).made
    assert not verify_store(str(path)).problems
    with open_quick(path) as manager:
        groups.check(manager)
        ids = list(manager.list_ledgers())
        for tier in HINTS:
            for ledger_id in ids:
                manager.move_ledger(ledger_id, tier)
            manager.checkpoint()
            groups.check(manager)
        manager.delete_ledger(ids[0])
        manager.checkpoint()
        assert contents(manager, ids[1])
    assert not verify_store(str(path)).problems


def test_a_log_file_with_groups_that_a_checkpoint_keeps_is_read_verified_and_indexed_again(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with open_quick(path, fill_ratio=0.01) as manager:
        one, two = create(manager), create(manager)
        for number in range(3):
            put(manager, {one: [b"%d" % number * 20_000] * 2, two: [b"%d" % number]}, {NAME: b"%d" % number})
        manager.checkpoint()
        assert [row.kind for row in store_of(manager).index.files().values()].count(LOG) == 1
        wanted = [contents(manager, writer.ledger_id) for writer in (one, two)]
    assert not verify_store(str(path)).problems
    shutil.rmtree(path / "ssd" / "index")
    assert rebuild_index(str(path)).made
    with open_quick(path) as manager:
        assert [contents(manager, writer.ledger_id) for writer in (one, two)] == wanted
        assert list(map(len, wanted)) == [6, 3]


def test_verify_finds_a_group_that_does_not_fit_its_records(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        writer = create(manager)
        put(manager, {writer: [b"1"]}, {NAME: b"1"})
        store = store_of(manager)
        (row,) = [row for row in store.volumes.rows.values() if row.kind == LOG]
    path = Path(store.volumes.path_of(row))
    data = bytearray(path.read_bytes())
    commits = list(scan_commits(OpenLogFile(row.file_id, str(path), memoryview(bytes(data))), BLOCK_BYTES, 1))
    at = commits[-1].records[0].body_start
    assert commits[-1].records[0].header.kind == RecordKind.GROUP
    data[at] ^= 1
    path.write_bytes(data)
    assert any("damaged record" in problem.message for problem in verify_store(str(tmp_path / "store")).problems)


# ---- threads and space -----------------------------------------------------------------------------------------------


def test_groups_of_many_threads_stay_together(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store", max_outstanding_bytes=BOUND) as manager:
        writers = [create(manager) for _ in range(3)]
        put(manager, {}, {NAME: b"0"})
        store = store_of(manager)

        def work(name: int) -> None:
            for number in range(15):
                payload = b"%d %d" % (name, number) + bytes(BOUND // 5)
                order = writers[name:] + writers[:name]
                _ = order[0].append_async(b"plain")
                while True:
                    row = store.named.get(NAME)
                    assert row is not None
                    assert row.value is not None
                    change = NamedChange(NAME, row.version, b"%d" % (int(row.value) + 1))
                    entries = [LedgerEntries(descriptor_of(w), digest_of(w), [payload] * 2) for w in order]
                    try:
                        store.append_group(entries, [change])
                    except VersionConflictError:
                        continue
                    break

        threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert value(manager) == b"45"
        found = [[one for one in contents(manager, w.ledger_id) if one != b"plain"] for w in writers]
        assert found[0] == found[1] == found[2], "groups have one order in all ledgers"
        assert found[0][::2] == found[0][1::2]
        assert len(set(found[0])) == 45


def test_a_group_waits_its_turn_for_admission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "store", max_outstanding_bytes=BOUND) as manager:
        one, two = create(manager), create(manager)
        large = bytes(BOUND * 3 // 4)
        go = stop_syncing(monkeypatch)
        held = one.append_async(bytes(BOUND // 2))
        done: list[GroupAppended] = []
        thread = threading.Thread(target=lambda: done.append(put(manager, {two: [large], one: [large]})))
        thread.start()
        admission = store_of(manager).log.admission
        wait_until(lambda: admission.first is not None)
        assert admission.waiting_bytes == 2 * (len(large) + 36)
        batch = threading.Thread(target=one.append_many, args=([b"behind"] * 3,))
        batch.start()
        wait_until(lambda: len(admission.queue) == 2)
        go.set()
        thread.join(WAIT_S)
        batch.join(WAIT_S)
        assert held.result(WAIT_S) == 0
        assert [each.entry_ids for each in done] == [(range(1), range(1, 2))], "a group larger than the bound passes"
        assert one.last_add_confirmed == 4


def test_an_append_that_holds_a_lock_of_a_group_goes_ahead_of_the_group() -> None:
    one, two, three = (LedgerDescriptor(metadata()) for _ in range(3))
    admission = Admission(100)
    stranger, grouped, keeper = Ticket(three, 1), Ticket(one, 1, two), Ticket(two, 1)
    for ticket in (stranger, grouped):
        admission.join(ticket)
    admission.join(keeper, keeps_lock=True)
    assert admission.queue == [stranger, keeper, grouped]
