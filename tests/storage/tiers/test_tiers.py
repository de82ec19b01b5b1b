"""A further tier is one class and one entry of ``volumes.TIERS``."""

from __future__ import annotations

from collections.abc import Sequence
from errno import ENOENT
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from pybk.admin.dump import dump_store
from pybk.config import StoreConfig
from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage import volumes
from pybk.storage.format.cold_segment import footer_dtype
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import (
    RECORD_HEADER_BYTES,
    RunLocations,
    decode_header,
    encode_entries,
    encode_entries_header,
)
from pybk.storage.io.filesystem import FileSystem
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.repair.verify import verify_store
from pybk.storage.tiers import (
    Loaded,
    LocationWords,
    ReadStore,
    ReservedFile,
    Run,
    Tier,
    TierFiles,
    TierStore,
    TierWriter,
    checked_record,
)
from pybk.storage.tiers.file_tier import ColdTier
from pybk.storage.tiers.lmdb_tier import LmdbTier
from tests.internals import store_of

PAYLOADS = [b"%d" % number * 100 for number in range(300)]
BUCKET: dict[str, bytes] = {}
"""The objects of ``ObjectTier``, by path."""


class ObjectWriter(TierWriter):
    """Puts each record in an object of its own."""

    def __init__(self, store: TierStore, hint: StorageHint) -> None:
        self._store = store
        self._hint = hint
        self._rows: list[FileRow] = []

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        return self._put(first, len(sizes), *encode_entries(ledger_id, first, sizes, parts))

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        return self._put(first, count, encode_entries_header(ledger_id, first, count, body), body)

    def _put(self, first: int, count: int, header: bytes, body: bytes) -> Run:
        volumes = self._store.volumes
        row = volumes.new_file(ObjectTier.kind, self._hint)._replace(bytes=len(header) + len(body))
        BUCKET[volumes.path_of(row)] = header + body
        self._rows.append(row)
        return first, count, 1, 0, row.file_id, len(body), 0

    def finish(self) -> list[FileRow]:
        for row in self._rows:
            self._store.volumes.add(row)
        return self._rows

    def abort(self) -> None:
        for row in self._rows:
            BUCKET.pop(self._store.volumes.path_of(row), None)


class ObjectTier(Tier):
    """Keeps every record as an object of a store that is not the file system, as one on S3 would."""

    kind: ClassVar[str] = "object"
    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.HDD})
    is_written_by_moves: ClassVar[bool] = True

    def file_ids(self, directory: str, names: Sequence[str]) -> list[int]:
        return [int(Path(path).stem, 16) for path in BUCKET if str(Path(path).parent) == directory]

    def exists(self, fs: FileSystem, path: str) -> bool:
        return path in BUCKET

    def file_bytes(self, fs: FileSystem, path: str) -> int:
        if path not in BUCKET:
            raise FileNotFoundError(ENOENT, "no such object", path)
        return len(BUCKET[path])

    def disk_bytes(self, fs: FileSystem, path: str) -> int:
        return 0

    def unlink(self, fs: FileSystem, path: str) -> None:
        del BUCKET[path]

    def block_bytes(self, config: StoreConfig) -> int:
        return 1000

    def writer(
        self, store: TierStore, hint: StorageHint, *, when_full: bool = False, reserved: ReservedFile | None = None
    ) -> TierWriter:
        return ObjectWriter(store, hint)

    def load(
        self,
        store: ReadStore,
        ledger_id: int,
        runs: RunLocations,
        *,
        direct: bool = False,
        check: bool = False,
        bytes_max: int = 1 << 62,
    ) -> Loaded:
        volumes = store.volumes
        file_id = int(runs["file"][0])
        record = memoryview(BUCKET[volumes.path_of(volumes.rows[file_id])])
        checked_record(record, 0, ledger_id, int(runs["first"][0]), file_id, volumes.root)
        return Loaded(record, runs, np.full(len(runs), RECORD_HEADER_BYTES, np.int64))

    def plain_record(
        self, store: ReadStore, ledger_id: int, words: LocationWords
    ) -> tuple[memoryview, LocationWords] | None:
        return None  # one object is one record, so ``load`` serves single entries

    def stored_record(self, files: TierFiles, ledger_id: int, run: Run) -> tuple[memoryview, int]:
        return memoryview(BUCKET[files.volumes.path_of(files.volumes.rows[run[4]])]), 0

    def rows(self, files: TierFiles, row: FileRow) -> RunLocations:
        header = decode_header(memoryview(BUCKET[files.volumes.path_of(row)]), 0, where="an object")
        run = header.first_entry_id, header.entry_count, header.stride, 0, row.file_id, header.body_bytes, 0
        return np.array([(header.ledger_id, *run)], footer_dtype())


class CountingWriter(TierWriter):
    """Passes everything to another writer, and counts records."""

    def __init__(self, writer: TierWriter, records: list[int]) -> None:
        self._writer = writer
        self._records = records

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        self._records.append(len(sizes))
        return self._writer.add(ledger_id, first, sizes, parts)

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        self._records.append(count)
        return self._writer.add_body(ledger_id, first, count, body)

    def finish(self) -> list[FileRow]:
        return self._writer.finish()

    def abort(self) -> None:
        self._writer.abort()


class CountingTier(ColdTier):
    """Takes the place of cold segments for the hint HDD, with records of its own size."""

    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.HDD})

    def __init__(self) -> None:
        self.records: list[int] = []

    def block_bytes(self, config: StoreConfig) -> int:
        return 1000

    def writer(
        self, store: TierStore, hint: StorageHint, *, when_full: bool = False, reserved: ReservedFile | None = None
    ) -> TierWriter:
        return CountingWriter(super().writer(store, hint, reserved=reserved), self.records)


def test_each_hint_has_a_tier() -> None:
    assert {hint: type(volumes.tier_for(hint)) for hint in StorageHint} == {
        StorageHint.NVME: ColdTier,
        StorageHint.SSD: LmdbTier,
        StorageHint.HDD: ColdTier,
    }
    with pytest.raises(KeyError):
        volumes.tier_of_kind("tape")


def test_a_tier_that_is_registered_takes_the_entries_of_its_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = CountingTier()
    tiers: tuple[Tier, ...] = (*volumes.TIERS, tier)
    monkeypatch.setattr(volumes, "TIERS", tiers)
    with LedgerManager.open(tmp_path / "store", config=StoreConfig(background=False)) as manager:
        with manager.create_ledger(password=b"pw") as writer:
            for payload in PAYLOADS:
                writer.append(payload)
        store = store_of(manager)
        store.move(store.descriptor(writer.ledger_id), StorageHint.HDD)
        assert sum(tier.records) == len(PAYLOADS)
        assert len(tier.records) > 10, "records have the tier's own size"
        with manager.open_ledger(writer.ledger_id, password=b"pw") as reader:
            assert [bytes(entry.payload) for entry in reader] == PAYLOADS
    assert not verify_store(str(tmp_path / "store")).problems
    with (
        LedgerManager.open(tmp_path / "store") as manager,
        manager.open_ledger(writer.ledger_id, password=b"pw") as reader,
    ):
        assert [bytes(entry.payload) for entry in reader] == PAYLOADS


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, int]:
    """Return a store, and the id of its ledger, whose entries were moved to ``ObjectTier``."""
    monkeypatch.setattr(volumes, "TIERS", (*volumes.TIERS, ObjectTier()))
    BUCKET.clear()
    root = tmp_path / "store"
    with LedgerManager.open(root, config=StoreConfig(background=False)) as manager:
        with manager.create_ledger(password=b"pw") as writer:
            for payload in PAYLOADS:
                writer.append(payload)
        manager.move_ledger(writer.ledger_id, StorageHint.HDD)
        read_all(manager, writer.ledger_id)
    assert len(BUCKET) > 10
    return root, writer.ledger_id


def test_dump_prints_the_records_of_a_further_tier(moved: tuple[Path, int]) -> None:
    root, ledger_id = moved
    rows = list(dump_store(str(root)))
    assert [row for row in rows if row["what"] == "problem"] == []
    assert {row["path"] for row in rows if row["what"] == "file" and row["kind"] == ObjectTier.kind} == set(BUCKET)
    at = next(number for number, row in enumerate(rows) if row.get("kind") == ObjectTier.kind)
    record = rows[at + 1]
    assert (record["what"], record["kind"], record["ledger"]) == ("record", "entries", ledger_id)
    dumped = [row for row in rows if row["what"] == "record" and row["kind"] == "entries"]
    assert sum(row["count"] for row in dumped) >= len(PAYLOADS)


def test_dump_reports_files_of_a_tier_that_this_version_does_not_have_and_prints_the_others(
    moved: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = moved
    monkeypatch.setattr(volumes, "TIERS", volumes.TIERS[:-1])
    for refuse in (LedgerManager.open, lambda path: verify_store(str(path)), lambda path: rebuild_index(str(path))):
        with pytest.raises(UnsupportedFormatError, match="is of kind object"):
            refuse(root)
    rows = list(dump_store(str(root)))
    problems = [row["message"] for row in rows if row["what"] == "problem"]
    assert len(problems) == len(BUCKET)
    assert all("is of kind object; this pybk reads cold, entries, log" in message for message in problems)
    assert {row["kind"] for row in rows if row["what"] == "file"} == {"entries"}


def test_dump_prints_all_tiers_and_continues_after_damage(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path, config=StoreConfig(background=False)) as manager:
        for hint in StorageHint:
            with manager.create_ledger(insecure=True, storage_hints={hint}) as writer:
                writer.append_many(PAYLOADS[:10])
        manager.checkpoint()
        manager.create_ledger(insecure=True).close()
    rows = list(dump_store(str(tmp_path)))
    kinds = [row["kind"] for row in rows if row["what"] == "file"]
    assert set(kinds) == {"log", "cold", "entries"}
    assert [row["what"] for row in rows].count("entries mark") == 1
    records = [row for row in rows if row["what"] == "record" and row["kind"] == "entries"]
    found = {(row["ledger"], row["first"], row["count"]) for row in records}
    assert {(ledger_id, 0, 10) for ledger_id in range(3)} <= found
    (cold,) = (tmp_path / "hdd").glob("*.cold")
    data = bytearray(cold.read_bytes())
    data[-20] ^= 1
    cold.write_bytes(data)
    damaged = list(dump_store(str(tmp_path)))
    assert [row["what"] for row in damaged if row not in rows] == ["problem"]
    assert [row for row in damaged if row["what"] != "problem"] == rows, "the records are found without the footer"


def read_all(manager: LedgerManager, ledger_id: int) -> None:
    """Read every entry, in batches and singly."""
    with manager.open_ledger(ledger_id, password=b"pw") as reader:
        assert [bytes(entry.payload) for entry in reader] == PAYLOADS
        for number in (0, 150, 299):
            (entry,) = reader.read(number, number)
            assert bytes(entry.payload) == PAYLOADS[number]


def test_a_tier_with_files_of_its_own_is_read_verified_and_rebuilt(moved: tuple[Path, int]) -> None:
    root, ledger_id = moved
    with LedgerManager.open(root) as manager:
        read_all(manager, ledger_id)
        with LedgerManager.open(root, read_only=True) as follower:
            read_all(follower, ledger_id)
    found = verify_store(str(root), password=b"pw")
    assert not found.problems
    assert found.entries == len(PAYLOADS)
    assert found.files >= len(BUCKET)
    rebuilt = rebuild_index(str(root))
    assert rebuilt.made
    assert not rebuilt.lost
    assert not rebuilt.problems
    with LedgerManager.open(root) as manager:
        read_all(manager, ledger_id)
    assert not verify_store(str(root), password=b"pw").problems


def test_damage_in_a_tier_of_its_own_is_found(moved: tuple[Path, int]) -> None:
    root, ledger_id = moved
    path = sorted(BUCKET)[3]
    whole = BUCKET[path]
    BUCKET[path] = whole[:-1] + bytes([whole[-1] ^ 1])
    (problem,) = verify_store(str(root)).problems
    assert problem.path == path
    assert problem.ledger_id == ledger_id
    BUCKET[path] = whole[:-1]
    with pytest.raises(CorruptError, match="bytes, but the index says"), LedgerManager.open(root):
        pass
    del BUCKET[path]
    with pytest.raises(CorruptError, match="is missing or empty"), LedgerManager.open(root):
        pass
    rebuilt = rebuild_index(str(root))
    assert not rebuilt.made
    assert len(rebuilt.lost) == 1


def test_a_deleted_ledger_leaves_no_files_in_a_tier_of_its_own(moved: tuple[Path, int]) -> None:
    root, ledger_id = moved
    with LedgerManager.open(root, config=StoreConfig(background=False)) as manager:
        manager.delete_ledger(ledger_id)
        manager.checkpoint()
        store_of(manager).scheduler.collect()
    assert not BUCKET


def test_a_store_with_files_of_an_unknown_tier_is_refused(
    moved: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = moved
    monkeypatch.setattr(volumes, "TIERS", volumes.TIERS[:-1])
    with pytest.raises(UnsupportedFormatError, match="kind object"), LedgerManager.open(root):
        pass
