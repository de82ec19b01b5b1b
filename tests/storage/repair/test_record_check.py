"""The check of a ledger's records, a piece at a time: what counts as damaged, and what only moves away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pybk.errors import StorageRefusedError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.local_backend import StoreBackend
from pybk.storage.format.log_file import RECORD_HEADER_BYTES
from pybk.storage.repair import record_check
from pybk.storage.repair.inspection import RecordReader, Run
from pybk.storage.repair.record_check import DamagedEntries, check_piece
from pybk.storage.store import Store
from pybk.storage.volumes import Volumes
from tests.storage.real_store import open_quick

COUNT = 400


def fill(manager: LedgerManager) -> int:
    with manager.create_ledger(insecure=True) as writer:
        for number in range(0, COUNT, 20):  # a record each
            writer.append_many([b"%d payload " % each * 8 for each in range(number, number + 20)])
    return writer.ledger_id


def store_of(manager: LedgerManager) -> Store:
    backend = backend_of(manager)
    assert isinstance(backend, StoreBackend)
    assert isinstance(backend.store, Store)
    return backend.store


def check_all(store: Store, ledger_id: int, *, deep: bool) -> tuple[int, list[DamagedEntries]]:
    """Return how many bytes were read, and what is damaged."""
    size, damaged = 0, list[DamagedEntries]()
    first: int | None = 0
    while first is not None:
        piece = check_piece(store, store.descriptor(ledger_id), first, deep=deep)
        damaged += piece.damaged
        size += piece.read_bytes
        first = piece.next_entry_id
    return size, damaged


def flip_at(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("deep", [True, False])
def test_a_damaged_header_is_found_by_both_kinds_and_a_body_by_the_deep_one(tmp_path: Path, deep: bool) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        store = store_of(manager)
        assert check_all(store, ledger_id, deep=deep)[1] == []
        run = store.locations_from(store.descriptor(ledger_id), 200)[0]
        path = Path(store.volumes.path_of(store.volumes.rows[int(run["file"])]))
        flip_at(path, int(run["offset"]) + RECORD_HEADER_BYTES + int(run["body"]) - 1)
        found = check_all(store, ledger_id, deep=deep)[1]
        assert [each[:3] for each in found] == ([(ledger_id, 200, 219)] if deep else [])
        other = store.locations_from(store.descriptor(ledger_id), 300)[0]
        flip_at(path, int(other["offset"]) + 1)
        found = check_all(store, ledger_id, deep=deep)[1]
        assert [each.first_entry_id for each in found] == ([200, 300] if deep else [300])


def test_a_light_check_reads_no_bodies_and_finds_a_file_that_was_cut(tmp_path: Path) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        manager.move_ledger(ledger_id, StorageHint.HDD)
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        store = store_of(manager)
        run = store.locations_from(store.descriptor(ledger_id), COUNT - 1)[0]
        path = Path(store.volumes.path_of(store.volumes.rows[int(run["file"])]))
        with path.open("r+b") as file:
            file.truncate(int(run["offset"]) + RECORD_HEADER_BYTES + 10)
        for deep in (False, True):
            assert check_all(store, ledger_id, deep=deep)[1][-1].last_entry_id == COUNT - 1


def test_entries_that_are_moved_meanwhile_are_not_damaged(tmp_path: Path) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        stop = threading.Event()

        def move() -> None:
            while not stop.is_set():
                for tier in StorageHint:
                    manager.move_ledger(ledger_id, tier)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            for number in range(30):
                assert check_all(store_of(manager), ledger_id, deep=number % 2 == 0)[1] == []
        finally:
            stop.set()
            mover.join()


def test_a_record_that_moved_between_the_check_and_the_judgement_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        manager.checkpoint()
        store = store_of(manager)
        moved = list[int]()

        def moved_under_it(self: Volumes, file_id: int, start: int, end: int) -> memoryview:
            if not moved:
                moved.append(file_id)
                manager.move_ledger(ledger_id, StorageHint.SSD)
            assert file_id in moved, "SSD records are not read so"
            return memoryview(bytes(end - start))  # as if the space had other bytes by now

        monkeypatch.setattr(Volumes, "read_direct", moved_under_it)
        assert check_all(store, ledger_id, deep=True)[1] == []
        assert moved


def test_what_the_system_refuses_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Volumes, file_id: int, start: int, end: int) -> memoryview:
        raise StorageRefusedError("no descriptors")

    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        store = store_of(manager)
        monkeypatch.setattr(Volumes, "read_direct", refuse)
        with pytest.raises(StorageRefusedError):
            check_piece(store, store.descriptor(ledger_id), 0, deep=True)


def test_a_long_ledger_takes_several_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_check, "PIECE_BYTES", 10_000)
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        store = store_of(manager)
        first, pieces = 0, 0
        while (piece := check_piece(store, store.descriptor(ledger_id), first, deep=True)).next_entry_id is not None:
            assert piece.next_entry_id > first
            assert piece.read_bytes < 20_000
            first, pieces = piece.next_entry_id, pieces + 1
        assert pieces > 3


def test_of_records_in_several_files_only_those_of_a_missing_file_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager)
        manager.checkpoint()
        store = store_of(manager)
        lost = store.locations_from(store.descriptor(ledger_id), 0).tolist()[1]
        real = RecordReader.check_header

        def missing(reader: RecordReader, ledger: int, run: Run) -> None:
            if run == lost:
                raise KeyError(1)
            real(reader, ledger, run)

        monkeypatch.setattr(RecordReader, "check_header", missing)
        _, damaged = check_all(store, ledger_id, deep=False)
        assert damaged == [DamagedEntries(ledger_id, lost[0], lost[0] + lost[1] - 1, "its file is missing: 1")]
