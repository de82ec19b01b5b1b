"""An index that is gone is made again from the catalog and the files; what is missing is never taken for absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk.config import StoreConfig
from pybk.errors import CookieError, CorruptError, DigestMismatchError, PybkError, StoreLockedError, UnauthorizedError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.storage.compaction.checkpoint import Checkpoint
from pybk.storage.format.extent import EXTENT_KEY, Extent
from pybk.storage.format.index_rows import entries_key
from pybk.storage.format.log_file import location_dtype
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.lmdb_environment import LmdbEnvironment
from pybk.storage.repair.rebuild import LostEntries, rebuild_index
from pybk.storage.repair.tiling import tile
from pybk.storage.repair.verify import verify_store
from tests.internals import store_of, store_view_of

CONFIG = StoreConfig(
    background=False,
    log_file_bytes=1 << 20,
    unchecked_tail_bytes=4 << 20,
    cold_block_bytes=4 << 10,
    ssd_block_bytes=4 << 10,
    free_bytes_low=0,
    free_bytes_ok=0,
)
Contents = dict[int, list[bytes]]


def open_store(path: Path, *, read_only: bool = False) -> LedgerManager:
    return LedgerManager.open(path, config=CONFIG, read_only=read_only)


def fill(path: Path) -> Contents:
    """Make a store with ledgers in every tier, moved, deleted, in kept log files and in the log's tail."""
    given: Contents = {}
    with open_store(path) as manager:
        writers = {}
        for number, hint in enumerate([*StorageHint, *StorageHint]):
            digest = (DigestType.CRC32C, DigestType.XXH3, DigestType.HMAC_SHA256)[number % 3]
            writer = manager.create_ledger(storage_hints={hint}, digest_type=digest, password=b"p")
            writers[writer.ledger_id] = writer
            given[writer.ledger_id] = []

        def append(ledger_id: int, count: int, size: int) -> None:
            batch = [bytes([(len(given[ledger_id]) + n) % 251]) * (size + n % 7) for n in range(count)]
            writers[ledger_id].append_many(batch)
            given[ledger_id] += batch

        for ledger_id in writers:
            append(ledger_id, 40, 300)
        manager.checkpoint()
        append(0, 300, 2500)  # fills a log file well enough to be kept
        manager.checkpoint()
        for ledger_id in (3, 4, 5):
            append(ledger_id, 10, 900)
        manager.checkpoint()
        manager.move_ledger(3, StorageHint.SSD)
        manager.move_ledger(1, StorageHint.HDD)
        doomed = manager.create_ledger(storage_hints={StorageHint.HDD}, digest_type=DigestType.CRC32C)
        doomed.append_many([b"x" * 500] * 20)
        manager.checkpoint()
        manager.delete_ledger(doomed.ledger_id)
        empty = manager.create_ledger(digest_type=DigestType.CRC32C)
        given[empty.ledger_id] = []
        writers[2].close()
        manager.checkpoint()
        for ledger_id in (0, 4, 5):  # in the tail
            append(ledger_id, 3, 100)
    return given


def open_ledger(manager: LedgerManager, ledger_id: int) -> LedgerReader:
    """Open one of the ledgers, of which some have a password."""
    for password in (b"p", b""):
        with suppress(UnauthorizedError):
            return manager.open_ledger(ledger_id, password=password, recover=False)
    raise AssertionError(f"ledger {ledger_id} has another password")


def contents(path: Path) -> Contents:
    """Read everything, in the live and in the read-only way."""
    found: list[Contents] = []
    for read_only in (False, True):
        with open_store(path, read_only=read_only) as manager:
            found.append({})
            for ledger_id in manager.list_ledgers():
                reader = open_ledger(manager, ledger_id)
                found[-1][ledger_id] = [e.payload for e in reader.read(0, reader.last_add_confirmed)]
    assert found[0] == found[1]
    return found[0]


def index_of(path: Path) -> Path:
    return path / "ssd" / "index"


def files_of(path: Path, suffix: str) -> list[Path]:
    return sorted(path.glob(f"*/*.{suffix}"))


def cut_to(size: int) -> Callable[[Path], None]:
    return lambda index: os.truncate(index / "data.mdb", size)


def filled_with(data: bytes) -> Callable[[Path], None]:
    def fill_data(index: Path) -> None:
        (index / "data.mdb").write_bytes(data)

    return fill_data


DAMAGE: dict[str, Callable[[Path], None]] = {
    "deleted": shutil.rmtree,
    "without data": lambda index: (index / "data.mdb").unlink(),
    "empty": cut_to(0),
    "cut in the first page": cut_to(100),
    "cut behind the first page": cut_to(4096),
    "cut in the middle": lambda index: os.truncate(index / "data.mdb", (index / "data.mdb").stat().st_size // 2),
    "garbage": filled_with(os.urandom(1 << 16)),
    "zeros": filled_with(bytes(1 << 16)),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_index_is_refused_and_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    given = fill(tmp_path / "store")
    damage(index_of(tmp_path / "store"))
    for read_only in (True, False, True):
        with pytest.raises(CorruptError, match="rebuild-index"):
            open_store(tmp_path / "store", read_only=read_only)
    there = index_of(tmp_path / "store").exists()
    found = rebuild_index(str(tmp_path / "store"))
    assert found.made
    assert found.old_index == (f"{index_of(tmp_path / 'store')}.damaged-1" if there else None)
    assert found.lost == ()
    assert contents(tmp_path / "store") == given


def test_the_new_index_says_what_the_old_one_said(tmp_path: Path) -> None:
    fill(tmp_path)
    before = dump_index(tmp_path)
    found = rebuild_index(str(tmp_path))
    after = dump_index(tmp_path)
    assert found.made
    assert {key: value for key, value in after.items() if key[:1] != b"P"} == {
        key: value for key, value in before.items() if key[:1] != b"P"
    }
    assert [key[:9] for key in after] == [key[:9] for key in before]
    with open_store(tmp_path) as manager:  # and it works as before
        manager.checkpoint()
        manager.move_ledger(0, StorageHint.HDD)
    assert rebuild_index(str(tmp_path)).lost == ()


def test_a_sound_old_index_is_not_kept_and_the_log_is_reported(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager:
        writer, gone = manager.create_ledger(insecure=True), manager.create_ledger(insecure=True)
        writer.append_many([b"entry"] * 7)
        gone.append(b"of no account")
        manager.delete_ledger(gone.ledger_id)
    for _ in range(2):
        found = rebuild_index(str(tmp_path))
        assert found.made
        assert (found.ledgers, found.entries, found.log_ledgers, found.log_entries) == (0, 0, 1, 7)
        assert found.old_index is None
        assert sorted(path.name for path in index_of(tmp_path).parent.glob("index*")) == ["index", "index.new"]
        assert list((index_of(tmp_path).parent / "index.new").iterdir()) == []
    with open_store(tmp_path) as manager:
        assert manager.open_ledger(writer.ledger_id, recover=False).last_add_confirmed == 6
        manager.checkpoint()
    found = rebuild_index(str(tmp_path))
    assert (found.ledgers, found.entries, found.log_ledgers, found.log_entries) == (1, 7, 0, 0)


def dump_index(path: Path) -> dict[bytes, bytes]:
    environment = LmdbEnvironment(str(index_of(path)), read_only=True)
    try:
        with environment.read() as transaction:
            return dict(transaction.items(b"\0", b"\xff"))
    finally:
        environment.close()


# ---- loss --------------------------------------------------------------------------------------------------------


def lose_a_cold_segment(path: Path) -> None:
    max(files_of(path, "cold"), key=lambda file: file.stat().st_size).unlink()


def damage_a_commit_header(path: Path) -> None:
    file = kept_log(path)
    with file.open("r+b") as opened:
        opened.seek(4096 + 8)
        opened.write(b"\xff")


def lose_a_kept_log_file(path: Path) -> None:
    kept_log(path).unlink()


def kept_log(path: Path) -> Path:
    with open_store(path, read_only=True) as manager:
        rows = store_view_of(manager).index.files().values()
        return next(Path(store_view_of(manager).volumes.path_of(row)) for row in rows if row.kind == "log")


def lose_an_ssd_record(path: Path) -> None:
    environment = LmdbEnvironment(str(path / "ssd" / "entries"))
    with environment.write() as transaction:
        assert transaction.delete(entries_key(4, 0))
    environment.close()


def lose_the_ssd_tier(path: Path) -> None:
    (path / "ssd" / "entries" / "data.mdb").write_bytes(os.urandom(1 << 16))


def lose_the_file_of_the_ssd_tier(path: Path) -> None:
    (path / "ssd" / "entries" / "data.mdb").unlink()


def lose_the_directory_of_the_ssd_tier(path: Path) -> None:
    shutil.rmtree(path / "ssd" / "entries")


LOSSES = [
    lose_a_cold_segment,
    lose_a_kept_log_file,
    damage_a_commit_header,
    lose_an_ssd_record,
    lose_the_ssd_tier,
    lose_the_file_of_the_ssd_tier,
    lose_the_directory_of_the_ssd_tier,
]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("lose", LOSSES)
def test_missing_entries_are_refused_and_stay_known_when_accepted(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    given = fill(tmp_path)
    lose(tmp_path)
    shutil.rmtree(index_of(tmp_path))
    refused = rebuild_index(str(tmp_path))
    assert not refused.made
    assert refused.lost
    assert not index_of(tmp_path).exists()
    assert all(0 <= lost.first_entry_id <= lost.last_entry_id < len(given[lost.ledger_id]) for lost in refused.lost)

    accepted = rebuild_index(str(tmp_path), accept_loss=True)
    assert accepted.lost == refused.lost
    check_around_loss(tmp_path, given, accepted.lost)
    with open_store(tmp_path) as manager:  # moves, compaction and checkpoints leave the hole what it is
        manager.checkpoint()
        for lost in accepted.lost:
            for tier in StorageHint:
                manager.move_ledger(lost.ledger_id, tier)
        manager.checkpoint()
    check_around_loss(tmp_path, given, accepted.lost)
    again = rebuild_index(str(tmp_path))
    assert again.lost == (), "what was accepted as lost is not asked for again"
    check_around_loss(tmp_path, given, accepted.lost)


def check_around_loss(path: Path, given: Contents, lost: tuple[LostEntries, ...]) -> None:
    gone = {(one.ledger_id, n) for one in lost for n in range(one.first_entry_id, one.last_entry_id + 1)}
    for read_only in (False, True):
        with open_store(path, read_only=read_only) as manager:
            assert list(manager.list_ledgers()) == sorted(given)
            for ledger_id, payloads in given.items():
                reader = open_ledger(manager, ledger_id)
                assert reader.last_add_confirmed == len(payloads) - 1, "a ledger is never shorter than it was"
                for entry_id, payload in enumerate(payloads):
                    if (ledger_id, entry_id) in gone:
                        with pytest.raises(CorruptError):
                            next(reader.read(entry_id, entry_id))
                        with pytest.raises(CorruptError):
                            reader.read_batch(entry_id)
                    else:
                        assert next(reader.read(entry_id, entry_id)).payload == payload


def test_entries_of_a_damaged_cold_segment_are_found_up_to_the_damage(tmp_path: Path) -> None:
    given = fill(tmp_path)
    for file in files_of(tmp_path, "cold"):
        with file.open("r+b") as opened:
            opened.seek(-30, os.SEEK_END)  # the trailer
            opened.write(b"\xff\xff")
    assert rebuild_index(str(tmp_path)).lost == ()
    assert contents(tmp_path) == given


def test_a_cold_segment_of_another_store_is_not_taken(tmp_path: Path) -> None:
    fill(tmp_path / "a")
    fill(tmp_path / "b")
    mine = max(files_of(tmp_path / "a", "cold"), key=lambda file: file.stat().st_size)
    shutil.copy(tmp_path / "b" / mine.relative_to(tmp_path / "a"), mine)
    assert rebuild_index(str(tmp_path / "a")).lost


def append_to_new(manager: LedgerManager, hint: StorageHint, payload: bytes) -> int:
    with manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C) as writer:
        writer.append(payload)
        return writer.ledger_id


def test_a_segment_that_no_catalog_names_is_used_when_nothing_else_has_the_entries(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager:
        append_to_new(manager, StorageHint.HDD, b"kept")
        manager.checkpoint()
        (segment,) = files_of(tmp_path, "cold")
        data = segment.read_bytes()
        manager.move_ledger(0, StorageHint.SSD)
        assert not segment.exists()
    segment.write_bytes(data)
    assert rebuild_index(str(tmp_path)).lost == ()
    with open_store(tmp_path):
        assert not segment.exists(), "what nobody needs is a leftover"
    segment.write_bytes(data)
    environment = LmdbEnvironment(str(tmp_path / "ssd" / "entries"))
    with environment.write() as transaction:
        assert transaction.delete(entries_key(0, 0))
    environment.close()
    assert rebuild_index(str(tmp_path)).lost == ()
    assert contents(tmp_path) == {0: [b"kept"]}
    assert segment.exists()


def test_of_several_copies_the_one_in_the_ledgers_tier_counts(tmp_path: Path) -> None:
    config = replace(CONFIG, fill_ratio=0.01)  # so that a segment with a moved ledger's old entries stays
    with LedgerManager.open(tmp_path, config=config) as manager:
        for _ in range(2):
            append_to_new(manager, StorageHint.HDD, b"payload")
        manager.checkpoint()
        manager.move_ledger(0, StorageHint.SSD)
    before = dump_index(tmp_path)
    assert len(files_of(tmp_path, "cold")) == 1
    rebuild_index(str(tmp_path))
    assert dump_index(tmp_path) == before


@pytest.mark.parametrize("harm", ["damaged", "lost"])
def test_a_catalog_that_is_of_no_use_is_made_again_from_the_index(tmp_path: Path, harm: str) -> None:
    given = fill(tmp_path)
    (catalog,) = tmp_path.glob("catalog-*")
    data = bytearray(catalog.read_bytes())
    data[4096 + 70] ^= 1
    catalog.write_bytes(data)
    if harm == "lost":
        catalog.unlink()
    found = rebuild_index(str(tmp_path))
    assert found.made
    assert any("made again from the index" in problem for problem in found.problems)
    assert contents(tmp_path) == given
    assert not verify_store(str(tmp_path)).problems


def test_neither_catalog_nor_index_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    (catalog,) = tmp_path.glob("catalog-*")
    catalog.unlink()
    shutil.rmtree(index_of(tmp_path))
    with pytest.raises(CorruptError, match="catalog"):
        rebuild_index(str(tmp_path))


def test_a_lost_watermark_is_made_again(tmp_path: Path) -> None:
    given = fill(tmp_path)
    (tmp_path / "watermark").unlink()
    with pytest.raises(CorruptError, match="rebuild-index"):
        open_store(tmp_path)
    assert rebuild_index(str(tmp_path)).made
    assert contents(tmp_path) == given


# ---- commits of the log that are lost -----------------------------------------------------------------------------


def tail_logs(path: Path) -> list[Path]:
    """Return the log files that no checkpoint has covered yet."""
    with open_store(path, read_only=True) as manager:
        mark = store_view_of(manager).index.mark()
    assert mark is not None
    return [file for file in files_of(path, "log") if int(file.stem, 16) >= mark.first_log_file_id]


def lose_the_tail(path: Path) -> None:
    for file in tail_logs(path):
        file.unlink()


def lose_the_nvme_tier(path: Path) -> None:
    shutil.rmtree(path / "nvme")
    (path / "nvme").mkdir()


def check_known_or_lost(path: Path, given: Contents, whole: frozenset[int] = frozenset()) -> None:
    """Check that each entry that was acknowledged can be read or is lost, and that no ledger ends before its end.

    Args:
        path: The store.
        given: What was acknowledged; ledgers that are not there must be unknown, and not absent.
        whole: Ledgers that have lost nothing.
    """
    for read_only in (False, True):
        with open_store(path, read_only=read_only) as manager:
            there = set(manager.list_ledgers())
            assert whole <= there
            for ledger_id, payloads in given.items():
                if ledger_id not in there:
                    with pytest.raises(CorruptError, match=f"unknown whether ledger {ledger_id} was"):
                        manager.open_ledger(ledger_id, password=b"p", recover=False)
                    continue
                reader = open_ledger(manager, ledger_id)
                end = reader.last_add_confirmed
                found: list[bytes | None] = [payload_or_lost(reader, entry_id) for entry_id in range(end + 1)]
                if ledger_id in whole:
                    assert found == payloads
                elif found != payloads:
                    assert None in found, "a reader must meet the loss before the end of the ledger"
                    assert all(known in (None, payload) for known, payload in zip(found, payloads, strict=False))


def payload_or_lost(reader: LedgerReader, entry_id: int) -> bytes | None:
    """Return an entry, None if it is lost."""
    try:
        return next(iter(reader.read(entry_id, entry_id))).payload
    except CorruptError:
        return None


@pytest.mark.parametrize("lose", [lose_the_tail, lose_the_nvme_tier])
def test_a_log_whose_commits_are_lost_is_refused_and_left_out_when_that_is_accepted(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    given = fill(tmp_path)
    with open_store(tmp_path) as manager:
        with manager.create_ledger(password=b"p") as writer:
            writer.append(b"after the checkpoint")
        given[writer.ledger_id] = [b"after the checkpoint"]
        lsn = store_of(manager).log.durable_lsn
    lose(tmp_path)
    before = dump_index(tmp_path)
    refused = rebuild_index(str(tmp_path))
    assert (refused.made, dump_index(tmp_path)) == (False, before)
    assert any("commits up to LSN" in problem for problem in refused.problems)
    assert any("may have had more entries" in problem for problem in refused.problems)
    assert any("that are not listed may have been created" in problem for problem in refused.problems)

    accepted = rebuild_index(str(tmp_path), accept_loss=True)
    assert accepted.made
    assert accepted.lost == refused.lost
    # Ledger 2 was closed before the checkpoint, and lies in another tier: its end is known, and so are its entries.
    check_known_or_lost(tmp_path, given, whole=frozenset({2}))
    with open_store(tmp_path) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append(b"new")
        assert writer.ledger_id > max(given), "an id that may have been used is not used again"
        assert store_of(manager).log.durable_lsn > lsn, "nor is an LSN, because versions of named records are LSNs"
        manager.checkpoint()
    check_known_or_lost(tmp_path, given, whole=frozenset({2}))
    assert rebuild_index(str(tmp_path)).lost == (), "what was accepted as lost is not asked for again"


def test_a_ledger_that_was_created_during_a_checkpoint_is_unknown_when_its_commit_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[int] = []
    with open_store(tmp_path) as manager:
        manager.create_ledger(password=b"p").close()
        take_over = Checkpoint.take_over

        def after_a_creation(checkpoint: Checkpoint, taken: Any) -> None:
            if not created:
                writer = manager.create_ledger(password=b"p")
                writer.append(b"after the cut, and before the mark")
                created.append(writer.ledger_id)
            take_over(checkpoint, taken)

        monkeypatch.setattr(Checkpoint, "take_over", after_a_creation)
        manager.checkpoint()
        monkeypatch.undo()
        assert created
    lose_the_nvme_tier(tmp_path)
    assert rebuild_index(str(tmp_path), accept_loss=True).made
    with open_store(tmp_path) as manager, pytest.raises(CorruptError, match="unknown whether"):
        open_ledger(manager, created[0])


def test_what_comes_after_lost_commits_is_kept(tmp_path: Path) -> None:
    config = replace(CONFIG, log_file_bytes=1 << 20, unchecked_tail_bytes=64 << 20)
    with LedgerManager.open(tmp_path, config=config) as manager:
        writer = manager.create_ledger(password=b"p", digest_type=DigestType.CRC32C)
        idle = manager.create_ledger(password=b"p", digest_type=DigestType.CRC32C)
        idle.append(b"idle")
        for number in range(40):
            writer.append(bytes([number]) * 100_000)
        closed = manager.create_ledger(password=b"p", digest_type=DigestType.CRC32C)
        closed.append(b"closed")
        closed.close()
    _, lost, *kept = tail_logs(tmp_path)
    assert kept
    lost.unlink()
    found = rebuild_index(str(tmp_path), accept_loss=True)
    (gap, *others) = found.lost
    assert (gap.ledger_id, [each.ledger_id for each in others]) == (writer.ledger_id, [idle.ledger_id])
    assert 0 < gap.first_entry_id <= gap.last_entry_id < 39, "entries before the gap and after it are kept"
    given = {
        writer.ledger_id: [bytes([number]) * 100_000 for number in range(40)],
        idle.ledger_id: [b"idle"],
        closed.ledger_id: [b"closed"],
    }
    check_known_or_lost(tmp_path, given, whole=frozenset({closed.ledger_id}))
    with open_store(tmp_path) as manager:
        reader = open_ledger(manager, writer.ledger_id)
        assert reader.last_add_confirmed == 39, "its end is known, because the last commits are there"
        known = [payload_or_lost(reader, entry_id) for entry_id in range(40)]
        gone = range(gap.first_entry_id, gap.last_entry_id + 1)
        assert [entry_id for entry_id in range(40) if known[entry_id] is None] == list(gone)


def test_ledgers_of_a_bookie_get_no_entry_that_their_peers_may_not_have(tmp_path: Path) -> None:
    extent = Extent(7, 0, 1, 0).encode()
    with open_store(tmp_path) as manager:
        store = store_of(manager)
        part = LedgerMetadata(
            ledger_id=store.new_ledger_id(),
            digest_type=DigestType.NONE,
            creation_time_ns=0,
            creation_sequence=store.new_creation_sequence(),
            custom_metadata={EXTENT_KEY: extent},
            tier=StorageHint.NVME,
            key_salt=b"",
            verifier=b"",
        )
        store.create(part)
        manager.checkpoint()
        manager.create_ledger(insecure=True)
    lose_the_tail(tmp_path)
    found = rebuild_index(str(tmp_path), accept_loss=True)
    assert (found.made, found.lost) == (True, ())
    with open_store(tmp_path) as manager:
        assert store_of(manager).has_accepted_loss(), "it puts all its ledgers in limbo"
        assert store_of(manager).descriptor(part.ledger_id).last_durable == -1


def flip_a_byte(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def test_a_damaged_control_record_of_the_log_is_refused_and_left_out_when_that_is_accepted(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager:
        with manager.create_ledger(password=b"p") as sound:
            sound.append(b"sound")
        with manager.create_ledger(ledger_type="marker", password=b"p") as writer:
            writer.append(b"payload")
    (log,) = files_of(tmp_path, "log")
    flip_a_byte(log, log.read_bytes().index(b"marker"))
    before = dump_index(tmp_path)
    with pytest.raises(CorruptError) as opened:
        open_store(tmp_path)
    refused = rebuild_index(str(tmp_path))
    assert (refused.made, dump_index(tmp_path)) == (False, before)
    assert str(opened.value) in refused.problems
    assert rebuild_index(str(tmp_path), accept_loss=True).made
    check_known_or_lost(
        tmp_path, {sound.ledger_id: [b"sound"], writer.ledger_id: [b"payload"]}, whole=frozenset({sound.ledger_id})
    )


def test_a_lost_tier_whose_commits_no_watermark_counts_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager, manager.create_ledger(password=b"p") as writer:
        writer.append(b"payload")
    lose_the_nvme_tier(tmp_path)
    (tmp_path / "watermark").unlink()
    assert not rebuild_index(str(tmp_path)).made
    assert rebuild_index(str(tmp_path), accept_loss=True).made
    check_known_or_lost(tmp_path, {writer.ledger_id: [b"payload"]})


def test_damaged_entries_of_the_log_are_reported_and_the_store_opens(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager, manager.create_ledger(password=b"p") as writer:
        writer.append_many([b"sound"])
        writer.append_many([b"damaged", b"damaged"])
    (log,) = files_of(tmp_path, "log")
    flip_a_byte(log, log.read_bytes().index(b"damaged"))
    found = rebuild_index(str(tmp_path))
    assert (found.made, found.lost, len(found.problems)) == (True, (), 1)
    assert f"{log}: the record of entries 1 to 2 of ledger {writer.ledger_id}" in found.problems[0]
    with open_store(tmp_path) as manager, manager.open_ledger(writer.ledger_id, password=b"p") as reader:
        assert next(reader.read(0, 0)).payload == b"sound"
        with pytest.raises(DigestMismatchError):
            list(reader.read(1, 2))


def test_a_store_that_is_open_and_a_directory_that_is_none_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "store"), pytest.raises(StoreLockedError):
        rebuild_index(str(tmp_path / "store"))
    (tmp_path / "other").mkdir()
    with pytest.raises(CookieError, match="no store"):
        rebuild_index(str(tmp_path / "other"))
    assert not list((tmp_path / "other").iterdir())


class _Stopping(OsFileSystem):
    """Stops before the n-th operation that changes something."""

    def __init__(self, stop_at: int) -> None:
        self.left = stop_at

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def rename(self, src: str, dst: str) -> None:
        self._count()
        super().rename(src, dst)

    def sync_directory(self, path: str) -> None:
        self._count()
        super().sync_directory(path)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("lose", [lose_an_ssd_record, lose_the_nvme_tier])
def test_a_rebuild_that_was_stopped_anywhere_can_be_done_again(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    given = fill(tmp_path / "made")
    lose(tmp_path / "made")
    for stop_at in range(20):
        path = tmp_path / f"stopped-{stop_at}"
        shutil.copytree(tmp_path / "made", path)
        try:
            rebuild_index(str(path), fs=_Stopping(stop_at), accept_loss=True)
        except KeyboardInterrupt:
            pass
        else:
            assert stop_at > 2
            break
        with suppress(PybkError):
            open_store(path).close()
        found = rebuild_index(str(path), accept_loss=True)
        assert found.made
        assert set(contents_known(path)) == set(given)
    else:
        pytest.fail("it never came to its end")


def contents_known(path: Path) -> dict[int, int]:
    with open_store(path) as manager:
        return {n: store_view_of(manager).descriptor(n).last_durable for n in manager.list_ledgers()}


# ---- tiling ------------------------------------------------------------------------------------------------------


def chosen(
    records: list[tuple[int, int]], last: int, unsound: frozenset[int] = frozenset()
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tile records of (first, count), the later ones being wanted more."""
    runs = np.array(
        [(first, count, 1, 0, place, 9, 0) for place, (first, count) in enumerate(records)], location_dtype()
    )
    return tile(runs, last, preference=lambda place: place, is_sound=lambda place: place not in unsound)


def test_tiling() -> None:
    assert chosen([], -1) == ([], [])
    assert chosen([], 4) == ([], [(0, 4)])
    assert chosen([(3, 2), (0, 3)], 4) == ([1, 0], [])
    assert chosen([(0, 5), (0, 5)], 4) == ([1], [])
    assert chosen([(0, 5), (0, 5)], 4, frozenset({1})) == ([0], [])
    assert chosen([(0, 5)], 4, frozenset({0})) == ([0], []), "a damaged record is better than none"
    assert chosen([(0, 4), (4, 4), (0, 3), (3, 5)], 7) == ([2, 3], [])
    assert chosen([(0, 4), (4, 4), (0, 3), (3, 5)], 7, frozenset({3})) == ([0, 1], [])
    assert chosen([(0, 4), (6, 2)], 7) == ([0, 1], [(4, 5)])
    assert chosen([(0, 4), (2, 6)], 7) == ([1], [(0, 1)]), "as many entries as can be"
    assert chosen([(0, 4), (4, 9)], 7) == ([0], [(4, 7)]), "a record that goes beyond the end is none of it"
    assert chosen([(0, 9), (0, 4), (4, 4)], 7) == ([1, 2], [])
