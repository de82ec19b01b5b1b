"""What frees space, and what ends something, works while another program takes every byte, also after a restart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest

from pybk.config import MIB
from pybk.credentials import Credentials
from pybk.errors import NoSuchLedgerError, StorageFullError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager, create_when_full
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage import preallocation
from pybk.storage.compaction import checkpoint
from pybk.storage.tiers import LOG
from tests.internals import backend_of, store_of
from tests.simdisk import SimFileSystem
from tests.simdisk.disk import SimFile
from tests.storage.store_harness import CONFIG, ROOT, abandon, drop_reserve
from tests.storage.test_space import open_small, tick

RECORD = "log/full"
WATCHED = replace(CONFIG, free_bytes_low=2 * MIB, free_bytes_ok=3 * MIB)
"""Other than by ``CONFIG``, a store on a full disk is read-only."""


@dataclass
class Full:
    """A store with ledgers of each tier, closed and open, and a record, on a disk that is full."""

    fs: SimFileSystem
    manager: LedgerManager
    writers: dict[StorageHint, LedgerWriter]
    closed: dict[StorageHint, int]
    version: int

    def counts(self) -> int:
        """Return how many log files are reserved."""
        return sum(name.startswith("reserve-") for name in self.fs.list_directory(f"{ROOT}/nvme"))


def append_some(writer: LedgerWriter, count: int = 40) -> None:
    writer.append_many([b"%d" % number * 3000 for number in range(count)])


def new_ledger(manager: LedgerManager, hint: StorageHint, flags: WriteFlag = WriteFlag.NONE) -> LedgerWriter:
    return manager.create_ledger(storage_hints={hint}, digest_type=DigestType.CRC32C, write_flags=flags)


def fill(fs: SimFileSystem, restart: str, manager: LedgerManager) -> tuple[SimFileSystem, LedgerManager]:
    """Let the disk become full, and end and open the store then."""
    fs.fill()
    config = store_of(manager).config
    if restart == "closed":
        manager.close()
        manager = open_small(fs, config)
    elif restart != "live":
        abandon(manager)  # or its thread would keep it and its disk
        fs = fs.kill() if restart == "killed" else fs.crash()
        manager = open_small(fs, config)
    tick(manager)
    return fs, manager


def full_store(restart: str, watched: bool) -> Full:
    """Make one; as much of it is in the tiers as is not checkpointed."""
    fs = SimFileSystem(3, capacity_bytes=64 * MIB)
    manager = open_small(fs, WATCHED if watched else CONFIG)
    writers = {hint: new_ledger(manager, hint) for hint in StorageHint}
    closed = {}
    for checkpointed in (True, False):
        for hint, writer in writers.items():
            append_some(writer)
            other = new_ledger(manager, hint)
            append_some(other)
            other.close()
            closed[hint] = other.ledger_id
        if checkpointed:
            manager.checkpoint()
    version = backend_of(manager).write_record(RECORD, bytes(100_000), None)
    fs, manager = fill(fs, restart, manager)
    return Full(fs, manager, writers, closed, version)


def delete_closed(full: Full) -> None:
    for ledger_id in full.closed.values():
        full.manager.delete_ledger(ledger_id)
        with pytest.raises(NoSuchLedgerError):
            full.manager.open_ledger(ledger_id)


def delete_all(full: Full) -> None:
    for ledger_id in list(full.manager.list_ledgers()):
        full.manager.delete_ledger(ledger_id)
    assert list(full.manager.list_ledgers()) == []


def recover_open(full: Full) -> None:
    for writer in full.writers.values():
        assert full.manager.open_ledger(writer.ledger_id).is_closed


def change_record(full: Full) -> None:
    backend = backend_of(full.manager)
    version = backend.write_record(RECORD, bytes(50_000), full.version)
    backend.rename_record(RECORD, "log/renamed", b"renamed", version)
    found = backend.read_record("log/renamed")
    assert found is not None
    backend.write_record("log/renamed", None, found.version)
    assert backend.read_record("log/renamed") is None


def checkpoint_and_collect(full: Full) -> None:
    full.manager.delete_ledger(full.closed[StorageHint.NVME])
    with suppress(StorageFullError):  # after it has dropped what is dead: the tiers have no space for what lives
        full.manager.checkpoint()
    assert store_of(full.manager).tail_bytes == 0
    uses = store_of(full.manager).index.checked_uses().values()
    assert all(use.live_bytes for use in uses if use.row.kind == LOG)


def made_when_full(manager: LedgerManager, entries: int) -> LedgerWriter:
    """Create a ledger as the take-over of a log does."""
    return create_when_full(
        manager,
        entries=entries,
        given=Credentials(),
        ledger_type="",
        storage_hints=(),
        write_flags=WriteFlag.NONE,
        digest_type=DigestType.CRC32C,
        custom_metadata={},
        quorums=(None, None, None),
        insecure=True,
    )


def take_over(full: Full) -> None:
    writer = made_when_full(full.manager, 1)
    assert writer.append(b"header") == 0
    with pytest.raises(StorageFullError):
        writer.append(b"more")
    reader = full.manager.open_ledger(writer.ledger_id, recover=False)
    assert [entry.payload for entry in reader.read(0, 0)] == [b"header"]


OPERATIONS = [delete_closed, delete_all, recover_open, change_record, checkpoint_and_collect, take_over]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("restart", ["live", "closed", "killed", "lost power"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_space_can_be_freed_while_there_is_none(operation: Callable[[Full], None], restart: str, watched: bool) -> None:
    full = full_store(restart, watched)
    for count in (40, 1):
        with pytest.raises(StorageFullError):  # noqa: PT012  # once the log file is full
            while True:
                append_some(new_ledger(full.manager, StorageHint.NVME), count)
    operation(full)
    tick(full.manager)
    full.manager.close()
    manager = open_small(full.fs, WATCHED if watched else CONFIG)
    full.fs.give_back(32 * MIB)
    tick(manager)
    assert manager.health().state == "ok"
    assert full.counts() == preallocation.RESERVE_FILES
    writer = new_ledger(manager, StorageHint.NVME)
    append_some(writer)
    manager.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("restart", ["closed", "killed"])
def test_the_reserve_lasts_while_another_program_takes_what_deletes_free(restart: str) -> None:
    """Each restart begins a log file, and each file holds 127 deletes; those without live entries are used again."""
    fs = SimFileSystem(4, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    ledger_ids = [new_ledger(manager, StorageHint.NVME).ledger_id for _ in range(600)]
    tick(manager)
    fs, manager = fill(fs, restart, manager)
    for number, ledger_id in enumerate(ledger_ids):
        manager.delete_ledger(ledger_id)
        if number % 100 == 50:
            tick(manager)
            fs, manager = fill(fs, restart, manager)
    manager.checkpoint()
    assert list(manager.list_ledgers()) == []
    assert sum(name.startswith("reserve-") for name in fs.list_directory(f"{ROOT}/nvme")) == preallocation.RESERVE_FILES
    manager.close()


def test_reserved_space_is_used_for_nothing_else() -> None:
    fs = SimFileSystem(5, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    writer = new_ledger(manager, StorageHint.NVME)
    append_some(writer)
    manager.checkpoint()
    fs, manager = fill(fs, "live", manager)
    for _ in range(3):
        with pytest.raises(StorageFullError):
            new_ledger(manager, StorageHint.NVME)
        with pytest.raises(StorageFullError):
            writer.append(b"more")
        tick(manager)
    assert sum(name.startswith("reserve-") for name in fs.list_directory(f"{ROOT}/nvme")) == preallocation.RESERVE_FILES
    manager.delete_ledger(writer.ledger_id)
    # A reserved file is in use now, and is not for entries either.
    with pytest.raises(StorageFullError):
        new_ledger(manager, StorageHint.NVME)
    manager.close()


def test_acknowledgements_leave_reserved_space_for_take_overs_and_these_leave_some_for_deletes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "room_of", lambda *_: 0)  # so that log files of the reserve stay in use
    full = full_store("live", watched=True)
    with pytest.raises(StorageFullError):  # noqa: PT012  # sooner or later
        acknowledgements = made_when_full(full.manager, 1000)
        for _ in range(1000):
            acknowledgements.append(b"ack")
    assert acknowledgements.last_add_confirmed > 100
    with pytest.raises(StorageFullError):  # noqa: PT012  # sooner or later
        for _ in range(1000):
            made_when_full(full.manager, 1).append(b"header")
    delete_all(full)
    full.manager.close()


def test_a_store_without_a_reserve_gets_it_at_the_first_open_with_space() -> None:
    fs = SimFileSystem(6, capacity_bytes=64 * MIB)
    manager = open_small(fs, CONFIG)
    ledger_id = new_ledger(manager, StorageHint.NVME).ledger_id
    manager.close()
    drop_reserve(fs)
    free = fs.free_bytes(ROOT)
    fs.fill()
    manager = open_small(fs, CONFIG)
    with pytest.raises(StorageFullError, match="a delete is a record in the log"):
        manager.delete_ledger(ledger_id)
    manager.close()
    fs.give_back(free)
    manager = open_small(fs, CONFIG)
    fs.fill()
    manager.delete_ledger(ledger_id)
    manager.close()


def taken_file(full: Full) -> tuple[LedgerWriter, int]:
    """Return a ledger with an entry in a reserved file, and that file."""
    store = store_of(full.manager)
    store.log.cut(lambda: None)
    writer = made_when_full(full.manager, 1)
    writer.append(b"header")
    return writer, store.log.writer.file_id


def test_no_map_of_a_reserved_file_is_kept_because_it_is_used_again() -> None:
    full = full_store("live", watched=True)
    writer, file_id = taken_file(full)
    reader = full.manager.open_ledger(writer.ledger_id, recover=False)
    assert [bytes(entry.payload) for entry in reader.read(0, 0)] == [b"header"]
    assert file_id not in store_of(full.manager).volumes.views
    full.manager.close()


def test_bytes_of_a_reserved_file_count_only_if_it_was_not_put_back_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    full = full_store("live", watched=True)
    writer, file_id = taken_file(full)
    volumes, open_file = store_of(full.manager).volumes, full.fs.open
    put_back = False

    def open_before_it_is_put_back(path: str, *, writable: bool = False) -> SimFile:
        nonlocal put_back
        file = open_file(path, writable=writable)
        if not put_back:
            put_back = True
            full.manager.delete_ledger(writer.ledger_id)
            with suppress(StorageFullError):
                full.manager.checkpoint()
        return file

    monkeypatch.setattr(full.fs, "open", open_before_it_is_put_back)
    with pytest.raises(FileNotFoundError):
        volumes.read(file_id, 0, 4096)
    full.manager.close()
