from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, StorageFailedError, UnsupportedFormatError
from pybk.feature_level import FeatureLevel
from pybk.storage.format.catalog import (
    CatalogState,
    CatalogWriter,
    check_catalog,
    read_catalog,
    read_header,
    rewrite_is_due,
)
from pybk.storage.format.cookie import Cookie
from pybk.storage.format.index_rows import LedgerRow, NamedRow, Totals
from pybk.storage.format.log_file import BLOCK_BYTES, RECORD_HEADER_BYTES, RecordKind, encode_control
from pybk.storage.io.filesystem import OsFile, OsFileSystem
from tests.golden.make_index import CATALOG, CATALOG_ID, FILES, MARK, STORE_ID, ledger_row, made_catalog
from tests.sampling import bits_of

FS = OsFileSystem()
Event = tuple[str, int, bytes]


class JournalFile(OsFile):
    """A file that notes its writes and syncs, and fails one of them on request."""

    events: list[Event]
    fail_at: int

    def _note(self, name: str, offset: int, data: bytes) -> None:
        self.events.append((name, offset, data))
        if len(self.events) == self.fail_at:
            raise OSError(errno.EIO, f"{name} number {self.fail_at} fails")

    def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        self._note("write", offset, b"".join(buffers))
        super().write(buffers, offset)

    def write_zeros(self, offset: int, size: int) -> None:
        self._note("write", offset, bytes(size))
        super().write_zeros(offset, size)

    def sync(self) -> None:
        self._note("sync", 0, b"")
        super().sync()


class JournalFileSystem(OsFileSystem):
    """Files of it share one list of events."""

    def __init__(self, fail_at: int = 0) -> None:
        self.events: list[Event] = []
        self.fail_at = fail_at

    def _noting(self, path: str) -> JournalFile:
        file = JournalFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)
        file.events = self.events
        file.fail_at = self.fail_at
        return file

    def create(self, path: str, size: int) -> OsFile:
        super().create(path, size).close()
        return self._noting(path)

    def open(self, path: str, *, writable: bool = False) -> OsFile:
        return self._noting(path)


def states_after_power_loss(before: bytes, events: list[Event]) -> Iterator[bytes]:
    """Yield contents that a crash may leave: what was synced, and of the sectors written since one, or all but one."""
    synced = bytearray(before)
    loose: list[tuple[int, bytes]] = []
    for name, offset, data in events:
        if name == "sync":
            for piece in loose:
                apply(synced, *piece)
            loose = []
            continue
        loose += [(offset + low, data[low : low + 512]) for low in range(0, len(data), 512)]
        for only in range(len(loose)):
            alone, without = bytearray(synced), bytearray(synced)
            apply(alone, *loose[only])
            for number, piece in enumerate(loose):
                if number != only:
                    apply(without, *piece)
            yield bytes(alone)
            yield bytes(without)
    yield bytes(synced)


def apply(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


def read(path: Path, at_least: int = 0) -> CatalogState:
    return read_catalog(FS, str(path), STORE_ID, CATALOG_ID, at_least=at_least)


def resume(path: Path, length: int, fs: OsFileSystem = FS) -> CatalogWriter:
    return CatalogWriter.resume(fs, str(path), STORE_ID, CATALOG_ID, length)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "catalog"


@pytest.fixture
def ends(path: Path) -> list[int]:
    return made_catalog(FS, str(path))


@pytest.fixture
def states(path: Path, ends: list[int]) -> list[CatalogState]:
    """What the catalog said after its first, second and third checkpoint."""
    whole = path.read_bytes()
    found = []
    for end in ends[1:]:
        path.write_bytes(whole[:end])
        found.append(read(path))
    assert path.read_bytes() == whole
    return found


def rows(*ledgers: LedgerRow) -> dict[int, LedgerRow]:
    return {row.metadata.ledger_id: row for row in ledgers}


def test_each_checkpoint_adds_to_the_last(ends: list[int], states: list[CatalogState]) -> None:
    one, two, three = states
    assert one.ledgers == rows(ledger_row(1, 3), ledger_row(2, 0))
    assert two.ledgers == rows(ledger_row(1, 6, version=2), ledger_row(4, 2))
    assert three.ledgers == rows(ledger_row(1, 6, version=2), ledger_row(4, 2), ledger_row(7, -1))
    assert [state.mark.catalog_bytes for state in states] == ends[1:]
    assert [state.mark.next_lsn for state in states] == [10, 20, MARK.next_lsn]
    assert three.mark == MARK._replace(catalog_bytes=ends[3])
    assert three.files == {row.file_id: row for row in FILES}
    assert set(one.files) == {2}


def test_golden(path: Path, ends: list[int]) -> None:
    assert path.read_bytes() == CATALOG.read_bytes()
    assert read(CATALOG) == read(path)


def test_resuming_continues_after_the_last_record(path: Path, ends: list[int]) -> None:
    writer = resume(path, ends[3])
    assert writer.length == ends[3]
    length = writer.append([], [1], MARK, [])
    writer.close()
    state = read(path, at_least=length)
    assert sorted(state.ledgers) == [4, 7]
    assert state.files == {}
    assert state.mark.catalog_bytes == length == path.stat().st_size


def test_checkpoints_of_any_size_read_back(path: Path) -> None:
    writer = CatalogWriter.create(FS, str(path), STORE_ID, CATALOG_ID)
    many = [ledger_row(number, number) for number in range(3000)]
    length = writer.append(iter(many), iter(()), MARK, iter(FILES))
    files = [FILES[0]._replace(file_id=number) for number in range(500)]
    for count in range(1, 20):
        length = writer.append(many[:count], range(2000 + 10 * count, 2010 + 10 * count), MARK, files)
    writer.close()
    state = read(path, at_least=length)
    assert sorted(state.ledgers) == [*range(2010), *range(2200, 3000)]
    assert len(state.files) == 500
    resume(path, length).close()


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES, 1 << 30])
def test_resume_wants_the_end_of_a_checkpoint(path: Path, ends: list[int], length: int) -> None:
    assert length not in ends[1:]
    before = path.read_bytes()
    with pytest.raises(CorruptError):
        resume(path, length)
    assert path.read_bytes() == before


def test_foreign_and_empty_files(path: Path, ends: list[int]) -> None:
    with pytest.raises(CorruptError, match="expected store"):
        read_catalog(FS, str(path), bytes(16), CATALOG_ID)
    with pytest.raises(CorruptError, match="file id"):
        read_catalog(FS, str(path), STORE_ID, CATALOG_ID + 1)
    with pytest.raises(CorruptError, match="file id"):
        CatalogWriter.resume(FS, str(path), STORE_ID, CATALOG_ID + 1, ends[3])
    for size in (0, 100, BLOCK_BYTES, BLOCK_BYTES + 5000):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(CorruptError):
            read(path)
        path.unlink()
        made_catalog(FS, str(path))


def test_create_wants_a_new_file(path: Path, ends: list[int]) -> None:
    with pytest.raises(FileExistsError):
        CatalogWriter.create(FS, str(path), STORE_ID, CATALOG_ID)


# ---- damage ------------------------------------------------------------------------------------------------------


class BytesFileSystem(OsFileSystem):
    """Every file of it has the same content, in memory."""

    def __init__(self, content: bytes, scratch: Path) -> None:
        self.content = content
        self._scratch = scratch

    def open(self, path: str, *, writable: bool = False) -> OsFile:
        return BytesFile(self.content, self._scratch)


class BytesFile(OsFile):
    def __init__(self, content: bytes, scratch: Path) -> None:
        super().__init__(os.open(scratch, os.O_RDONLY), str(scratch))
        self._content = content
        self.size = len(content)

    def read(self, offset: int, size: int) -> bytes:
        return self._content[offset : offset + size]


def flips(whole: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield byte and content for bits of what is written and around it, and for one in 64 bytes of the padding."""
    for place, byte in enumerate(whole):
        for bit in bits_of(place) if any(whole[max(0, place - 8) : place + 8]) else range(place % 64 == 0):
            yield place, whole[:place] + bytes((byte ^ 1 << bit,)) + whole[place + 1 :]


def test_every_bit(path: Path) -> None:
    writer = CatalogWriter.create(FS, str(path), STORE_ID, CATALOG_ID)
    writer.append([ledger_row(1, 3)], [], MARK, FILES[:1])
    writer.append([], [2], MARK, [])
    before = read(path)
    end = writer.append([ledger_row(1, 4)], [], MARK, [])
    writer.close()
    fallen_back = set()
    for place, flipped in flips(path.read_bytes()):
        fs = BytesFileSystem(flipped, path)
        try:
            found = read_catalog(fs, "", STORE_ID, CATALOG_ID)
        except CorruptError:
            continue
        # Without other knowledge, a last mark that is damaged looks like one that was never finished.
        assert found == before
        fallen_back.add(place // BLOCK_BYTES)
        with pytest.raises(CorruptError):
            read_catalog(fs, "", STORE_ID, CATALOG_ID, at_least=end)
    assert fallen_back == {end // BLOCK_BYTES - 1}


@pytest.mark.parametrize("size", [1, 512, BLOCK_BYTES])
def test_lost_stretches(path: Path, ends: list[int], states: list[CatalogState], size: int) -> None:
    whole = path.read_bytes()
    step = 97 if size == 1 else size
    for place in range(0, len(whole), step):
        if not any(whole[place : place + size]):
            continue
        path.write_bytes(whole[:place] + bytes(size) + whole[place + size :])
        with pytest.raises(CorruptError):
            read(path, at_least=ends[3])
        if place < ends[3] - BLOCK_BYTES:
            with pytest.raises(CorruptError):
                read(path)
        else:
            assert read(path) == states[1]


def test_lost_last_records(path: Path, ends: list[int]) -> None:
    whole = path.read_bytes()
    second = whole[: ends[2]]
    last = second.rindex(encode_control(RecordKind.DELETE, 3, 0, lsn=2))
    before = second.rindex(encode_control(RecordKind.DELETE, 2, 0, lsn=2))
    assert before + RECORD_HEADER_BYTES == last
    for place, size in ((last, RECORD_HEADER_BYTES), (before, 2 * RECORD_HEADER_BYTES)):
        path.write_bytes(whole[:place] + bytes(size) + whole[place + size :])
        with pytest.raises(CorruptError, match="closes 4 records"):
            read(path)


def test_cut_at_every_sector(path: Path, ends: list[int], states: list[CatalogState]) -> None:
    whole = path.read_bytes()
    for size in range(0, len(whole), 512):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptError):
            read(path, at_least=ends[3])
        if size < ends[1]:
            with pytest.raises(CorruptError):
                read(path)
        else:
            assert read(path) == states[1 if size >= ends[2] else 0]


def test_checkpoints_in_each_others_place(path: Path, ends: list[int]) -> None:
    whole = path.read_bytes()
    pieces = [whole[low:high] for low, high in pairwise(ends)]
    for order in [(1, 0, 2), (0, 2, 1), (0, 0, 2), (1, 2), (0, 2)]:
        path.write_bytes(whole[:BLOCK_BYTES] + b"".join(pieces[number] for number in order))
        with pytest.raises(CorruptError):
            read(path)


# ---- crashes -----------------------------------------------------------------------------------------------------


def test_power_loss_during_an_append(path: Path, ends: list[int], states: list[CatalogState]) -> None:
    before = path.read_bytes()[: ends[2]]
    path.write_bytes(before)
    fs = JournalFileSystem()
    writer = resume(path, ends[2], fs)
    writer.append([ledger_row(number, 5) for number in range(10, 20)], [1], MARK, FILES)
    writer.close()
    after = read(path)
    seen = set()
    for content in states_after_power_loss(before, fs.events):
        path.write_bytes(content)
        found = read(path, at_least=ends[2])
        assert found in (states[1], after)
        seen.add(found.mark)
    assert len(seen) == 2
    assert content == path.read_bytes()


def test_power_loss_while_an_unknown_checkpoint_is_taken_away(
    path: Path, ends: list[int], states: list[CatalogState]
) -> None:
    before = path.read_bytes()
    fs = JournalFileSystem()
    resume(path, ends[2], fs).close()
    seen = set()
    for content in states_after_power_loss(before, fs.events):
        path.write_bytes(content)
        found = read(path)
        assert found in (states[1], states[2])
        seen.add(found.mark)
        resume(path, ends[2]).close()
        assert read(path) == states[1]
    assert len(seen) == 2
    assert not any(content[ends[2] :])


def test_after_resume_a_torn_append_brings_nothing_old_back(
    path: Path, ends: list[int], states: list[CatalogState]
) -> None:
    fs = JournalFileSystem()
    writer = resume(path, ends[1], fs)
    before = path.read_bytes()
    assert read(path) == states[0]
    fs.events.clear()
    writer.append([ledger_row(1, 4, version=2)], [], MARK, FILES)
    writer.close()
    after = read(path)
    assert after not in states
    for content in states_after_power_loss(before, fs.events):
        path.write_bytes(content)
        assert read(path, at_least=ends[1]) in (states[0], after)


def test_records_are_durable_before_the_mark_and_marks_stand_alone(path: Path, ends: list[int]) -> None:
    fs = JournalFileSystem()
    writer = resume(path, ends[3], fs)
    writer.append([ledger_row(8, 0)], [1], MARK, FILES)
    assert [name for name, _, _ in fs.events] == ["write", "sync", "write", "sync"]
    assert fs.events[2][1] % BLOCK_BYTES == 0
    assert fs.events[0][1] == ends[3]
    fs.events.clear()
    writer.append([], [], MARK, FILES)
    assert [name for name, _, _ in fs.events] == ["write", "sync"]
    writer.close()


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_failed_appends(path: Path, ends: list[int], states: list[CatalogState], fail_at: int) -> None:
    fs = JournalFileSystem(fail_at)
    writer = resume(path, ends[3], fs)
    with pytest.raises(OSError, match="fails"):
        writer.append([ledger_row(8, 0), ledger_row(9, 0)], [1], MARK, FILES)
    assert writer.length == ends[3]
    assert read(path, at_least=ends[3]).ledgers.keys() >= states[2].ledgers.keys() - {1}
    if fs.events[-1][0] == "sync":
        with pytest.raises(StorageFailedError):
            writer.append([], [], MARK, FILES)
    else:
        length = writer.append([ledger_row(8, 0)], [], MARK, FILES)
        assert sorted(read(path, at_least=length).ledgers) == [1, 4, 7, 8]
    writer.close()


def test_a_source_that_fails_leaves_the_catalog_usable(path: Path, ends: list[int]) -> None:
    def broken() -> Iterator[LedgerRow]:
        for number in range(3000):
            yield ledger_row(number, 0)
        raise KeyError

    writer = resume(path, ends[3])
    with pytest.raises(KeyError):
        writer.append(broken(), [], MARK, FILES)
    assert path.stat().st_size > ends[3]
    length = writer.append([ledger_row(8, 0)], [], MARK, FILES)
    writer.close()
    assert sorted(read(path, at_least=length).ledgers) == [1, 4, 7, 8]
    assert not any(path.read_bytes()[length:])


# ---- rewriting ---------------------------------------------------------------------------------------------------


def test_rewrite_is_due_when_more_than_half_is_history(path: Path) -> None:
    ledgers = [ledger_row(number, 0) for number in range(5000)]
    files = [FILES[1]._replace(file_id=1 << 40 | number, bytes=1 << 40) for number in range(2000)]
    totals = Totals(5000, sum(len(row.metadata.encode()) for row in ledgers), 2000)
    writer = CatalogWriter.create(FS, str(path), STORE_ID, CATALOG_ID)
    live = writer.append(ledgers, [], MARK, files)
    assert not rewrite_is_due(live, totals)
    assert not rewrite_is_due(live + totals.metadata_bytes // 2, totals)
    record_bytes = totals.metadata_bytes + 5000 * RECORD_HEADER_BYTES
    assert rewrite_is_due(live + 2 * record_bytes, totals)
    assert not rewrite_is_due(1 << 20, Totals(0, 0, 0))
    writer.close()


# ---- format 2 --------------------------------------------------------------------------------------------------------

COOKIE = Cookie(STORE_ID, bytes(16), "main", 0, bytes(range(16)), 1 << 15, FeatureLevel.SEALS)
NAMED = NamedRow("lock", 41, b"held")


def made_sealed(path: Path) -> list[int]:
    """Make a catalog of format 2 whose files and named records come, change and go; return where it ends each time."""
    writer = CatalogWriter.create(FS, str(path), STORE_ID, CATALOG_ID, cookie=COOKIE)
    other = NamedRow("other", 42, b"")
    ends = [
        writer.append([ledger_row(1, 3)], [], MARK, [], changed=FILES[:2], named=[NAMED]),
        writer.append([], [], MARK, [], changed=[FILES[0]._replace(bytes=7), FILES[2]], gone=[3], named=[other]),
        writer.append([], [1], MARK, [], named=[NAMED._replace(version=50, value=None)]),
    ]
    writer.close()
    return ends


def test_files_and_named_records_are_records_of_format_2(path: Path) -> None:
    ends = made_sealed(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: ends[0]])
    assert read(path)[:3] == (rows(ledger_row(1, 3)), {row.file_id: row for row in FILES[:2]}, {"lock": NAMED})
    path.write_bytes(whole[: ends[1]])
    changed = [FILES[0]._replace(bytes=7), FILES[2]]
    both = {"lock": NAMED, "other": NamedRow("other", 42, b"")}
    assert read(path)[:3] == (rows(ledger_row(1, 3)), {row.file_id: row for row in changed}, both)
    path.write_bytes(whole)
    assert read(path)[:3] == ({}, {row.file_id: row for row in changed}, {"other": both["other"]})


def test_a_mark_of_format_2_does_not_grow_with_the_files(path: Path) -> None:
    writer = CatalogWriter.create(FS, str(path), STORE_ID, CATALOG_ID, cookie=COOKIE)
    many = [FILES[0]._replace(file_id=number) for number in range(10_000)]
    before = writer.append([], [], MARK, many, changed=many)
    assert writer.append([], [], MARK, many, changed=many[:1]) - before == 2 * BLOCK_BYTES
    writer.close()
    assert len(read(path).files) == 10_000


def test_the_header_of_format_2_repeats_the_cookie(path: Path) -> None:
    made_sealed(path)
    header = read_header(FS, str(path))
    assert (header.store_id, header.file_id, header.format) == (STORE_ID, CATALOG_ID, 2)
    assert (header.level, header.salt, header.scrypt_cost) == (COOKIE.level, COOKIE.salt, COOKIE.scrypt_cost)


def test_the_catalog_of_a_restored_store_has_its_incarnation(path: Path) -> None:
    writer = CatalogWriter.create(
        FS, str(path), STORE_ID, CATALOG_ID, cookie=replace(COOKIE, incarnation=0x1122334455667788)
    )
    end = writer.append([], [], MARK, FILES, changed=FILES)
    writer.close()
    header = read_header(FS, str(path))
    assert (header.format, header.incarnation) == (3, 0x1122334455667788)
    assert path.read_bytes()[64:72] == bytes.fromhex("8877665544332211")
    assert read(path).files == {row.file_id: row for row in FILES}
    whole = path.read_bytes()
    for at in range(200):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises((CorruptError, UnsupportedFormatError)):
            check_catalog(FS, str(path), STORE_ID, CATALOG_ID, at_least=end)


def test_every_changed_byte_of_format_2_is_noticed(path: Path) -> None:
    end = made_sealed(path)[-1]
    whole = path.read_bytes()
    for at in (*range(200), *range(BLOCK_BYTES, end, 61)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises((CorruptError, UnsupportedFormatError)):
            check_catalog(FS, str(path), STORE_ID, CATALOG_ID, at_least=end)


def test_a_feature_that_this_version_does_not_know_is_refused(path: Path) -> None:
    made_sealed(path)
    whole = bytearray(path.read_bytes())
    whole[12] = 1
    whole[72:80] = xxh3_64_intdigest(bytes(whole[:72])).to_bytes(8, "little")
    path.write_bytes(whole)
    with pytest.raises(UnsupportedFormatError, match="incompatible features 0x1"):
        read(path)
