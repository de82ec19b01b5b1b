"""Verification finds every kind of damage, and nothing in a store that is sound, closed or being written."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_intdigest

from pybk.errors import ClosedError, CookieError, CorruptError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.format.catalog import CatalogState, read_catalog
from pybk.storage.format.index_rows import entries_key
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, RecordKind, encode_header
from pybk.storage.io.lmdb_environment import LmdbEnvironment
from pybk.storage.repair import verify
from pybk.storage.repair.verify import VerifyProblem, verify_store
from tests.sampling import all_are_tried
from tests.storage.repair.test_rebuild import CONFIG, files_of, fill, filled_with, index_of, open_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store that tests copy before they damage it."""
    path = tmp_path_factory.mktemp("sound") / "store"
    fill(path)
    return path


def copy_of(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "store"))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def problems_of(path: Path, password: bytes | None = b"p") -> tuple[VerifyProblem, ...]:
    return verify_store(str(path), password=password).problems


def test_a_sound_store_has_no_problems(store: Path) -> None:
    found = verify_store(str(store), password=b"p")
    assert found.problems == ()
    assert (found.ledgers, found.entries, found.unauthenticated) == (7, 579, 0)
    assert found.durable_lsn > 0
    assert verify_store(str(store)).unauthenticated == 2
    assert verify_store(str(store), password=b"another").unauthenticated == 2


def test_progress_may_close_another_manager(store: Path, tmp_path: Path) -> None:
    manager = LedgerManager.open(tmp_path / "another")
    verify_store(str(store), progress=lambda _done, _total: manager.close())
    with pytest.raises(ClosedError):
        manager.create_ledger(insecure=True)


def test_progress_ends_with_all(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify_store(str(store), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert all(done <= total for done, total in seen)


def test_verifying_changes_nothing(store: Path) -> None:
    before = {file: file.read_bytes() for file in store.rglob("*") if file.is_file() and file.name != "lock.mdb"}
    verify_store(str(store))
    assert {f: f.read_bytes() for f in store.rglob("*") if f.is_file() and f.name != "lock.mdb"} == before


def test_a_directory_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CookieError, match="no store"):
            verify_store(str(path))


def tail_log(path: Path) -> Path:
    return files_of(path, "log")[-1]


def damage_index(path: Path) -> None:
    environment = LmdbEnvironment(str(index_of(path)))
    with environment.write() as transaction:
        key = next(key for key, _ in transaction.items(b"P", b"Q"))
        transaction.delete(key)
    environment.close()


def lose_record(path: Path) -> None:
    environment = LmdbEnvironment(str(path / "ssd" / "entries"))
    with environment.write() as transaction:
        transaction.delete(entries_key(4, 0))
    environment.close()


def other_cookie(path: Path) -> None:
    shutil.copy(path / "nvme" / "cookie", path / "hdd" / "cookie")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "main cookie": (lambda path: flip(path / "cookie", 20), "cookie"),
    "tier cookie": (lambda path: flip(path / "hdd" / "cookie", 20), "cookie"),
    "lost directories": (lambda path: (path / "directories").unlink(), "directories"),
    "swapped cookie": (other_cookie, "expected"),
    "directories": (lambda path: flip(path / "directories", 5), "directories"),
    "watermark": (lambda path: flip(path / "watermark", 3), "watermark"),
    "lost watermark": (lambda path: (path / "watermark").unlink(), "watermark"),
    "catalog": (lambda path: flip(next(path.glob("catalog-*")), 4096 + 70), "catalog"),
    "lost catalog": (lambda path: next(path.glob("catalog-*")).unlink(), "catalog"),
    "index page": (damage_index, "rebuild-index"),
    "index file": (lambda path: filled_with(b"x" * 9999)(index_of(path)), "rebuild-index"),
    "lost index": (lambda path: shutil.rmtree(index_of(path)), "rebuild-index"),
    "lost SSD record": (lose_record, "ledger 4 entries 0 to"),
    "lost cold segment": (lambda path: files_of(path, "cold")[0].unlink(), "missing"),
    "cold body": (lambda path: flip(files_of(path, "cold")[0], 4300), "ledger 2 entries 0 to 10"),
    "cold footer": (lambda path: flip(files_of(path, "cold")[0], -100), "footer"),
    "cold trailer": (lambda path: flip(files_of(path, "cold")[0], -5), "trailer"),
    "cold padding": (lambda path: flip(files_of(path, "cold")[0], 4000), "padding"),
    "tail header": (lambda path: flip(tail_log(path), 10), "header"),
    "tail header padding": (lambda path: flip(tail_log(path), 4000), "padding"),
    "tail commit": (lambda path: flip(tail_log(path), 4096 + 10), "durable"),
    "tail record": (lambda path: flip(tail_log(path), 4096 + 200), "ledger 0 entries 340 to 342"),
    "tail padding": (lambda path: flip(tail_log(path), 2 * 4096 - 10), "padding"),
    "lost tail": (lambda path: tail_log(path).unlink(), "durable"),
    "kept header": (lambda path: flip(files_of(path, "log")[0], 10), "header"),
    "kept commit": (lambda path: flip(files_of(path, "log")[0], 4096 + 10), "no commit"),
    "kept record": (lambda path: flip(files_of(path, "log")[0], 4096 + 50_000), "ledger 0 entries 40 to 339"),
    "cut kept log": (lambda path: os.truncate(files_of(path, "log")[0], 50_000), "ledger 0 entries 40 to 339"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_named(store: Path, tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    path = copy_of(store, tmp_path)
    damage(path)
    problems = problems_of(path)
    assert problems
    assert any(says in problem.message for problem in problems), problems
    assert all(
        any(remedy in p.message for remedy in ("backup", "copy", "rebuild-index", "mount", "name", "restore"))
        for p in problems
    ), "every problem names its remedy"


def test_a_record_is_named_with_its_place_once(store: Path, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path)
    file = files_of(path, "cold")[0]
    flip(file, 4300)
    (problem,) = problems_of(path)
    assert problem[1:] == (str(file), 4096, 2, 0, 10)


def test_a_forged_entry_needs_the_password_to_be_found(tmp_path: Path) -> None:
    """An attacker who can write the disk can recompute checksums, but not the digest."""
    with open_store(tmp_path) as manager:
        for digest_type in (DigestType.HMAC_SHA256, DigestType.XXH3):
            with manager.create_ledger(
                storage_hints={StorageHint.SSD}, digest_type=digest_type, password=b"p"
            ) as writer:
                writer.append(b"the truth")
        manager.checkpoint()
    environment = LmdbEnvironment(str(tmp_path / "ssd" / "entries"))
    with environment.write() as transaction:
        for ledger_id in (0, 1):
            value = transaction.get(entries_key(ledger_id, 0))
            assert value is not None
            body = value[RECORD_HEADER_BYTES:].replace(b"truth", b"false")
            transaction.put(
                entries_key(ledger_id, 0),
                encode_header(RecordKind.ENTRIES, ledger_id, 0, len(body), xxh3_64_intdigest(body), entry_count=1)
                + body,
            )
    environment.close()
    assert [problem.ledger_id for problem in problems_of(tmp_path, None)] == [1]
    assert [problem.ledger_id for problem in problems_of(tmp_path)] == [0, 1]


def test_a_checkpoint_during_each_try_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as manager:

        def change() -> None:
            manager.create_ledger(digest_type=DigestType.XXH3).close()
            manager.checkpoint()

        def read_and_change(*arguments: Any, **options: Any) -> CatalogState:
            state = read_catalog(*arguments, **options)
            change()
            return state

        change()
        monkeypatch.setattr(verify, "read_catalog", read_and_change)
        assert problems_of(tmp_path) == ()


@pytest.mark.sampled
def test_a_store_that_is_being_written_has_no_problems(tmp_path: Path) -> None:
    stop = threading.Event()
    with open_store(tmp_path) as manager:

        def write() -> None:
            turn = 0
            while not stop.is_set():
                turn += 1
                with manager.create_ledger(
                    storage_hints={list(StorageHint)[turn % 3]}, digest_type=DigestType.XXH3
                ) as w:
                    w.append_many([b"a" * 500] * 20)
                if turn % 3 == 0:
                    manager.checkpoint()
                if turn % 5 == 0:
                    manager.move_ledger(w.ledger_id - 2, list(StorageHint)[turn % 2])
                if turn % 7 == 0:
                    manager.delete_ledger(w.ledger_id - 4)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(15 if all_are_tried() else 6):
                assert problems_of(tmp_path) == ()
        finally:
            stop.set()
            thread.join()


def test_strangers_in_the_directories_are_left_alone(store: Path, tmp_path: Path) -> None:
    path = copy_of(store, tmp_path)
    for name in ("notes-of-the-day.log", "0123.cold", "lost+found"):
        (path / "hdd" / name).write_bytes(b"mine")
    assert problems_of(path) == ()
    with open_store(path):
        pass
    assert (path / "hdd" / "notes-of-the-day.log").exists()


def test_compressed_entries_without_the_extra_are_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, cold_compression="zstd")
    with LedgerManager.open(tmp_path, config=config) as manager:
        with manager.create_ledger(storage_hints={StorageHint.HDD}, digest_type=DigestType.XXH3) as writer:
            writer.append(b"a" * 1000)
        manager.checkpoint()
    assert problems_of(tmp_path) == ()
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="zstandard"):
        problems_of(tmp_path)


@pytest.mark.parametrize("name", ["watermark", "directories"])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_store_without_one_of_its_small_files_is_refused(
    store: Path, tmp_path: Path, name: str, read_only: bool
) -> None:
    path = copy_of(store, tmp_path)
    (path / name).unlink()
    with pytest.raises(CorruptError, match=name):
        open_store(path, read_only=read_only)
