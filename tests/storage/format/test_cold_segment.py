"""Cold segments: whole and sound, or an error; never other bytes."""

from __future__ import annotations

import errno
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.storage.format.cold_segment import (
    COLD_SEGMENT_BYTES_MAX,
    ColdSegment,
    ColdSegmentWriter,
    decompress,
    footer_dtype,
)
from pybk.storage.format.log_file import Codec, RecordHeader, RecordKind, entry_ends, location_dtype
from pybk.storage.io.filesystem import OsFile, OsFileSystem
from tests.paths import GOLDEN
from tests.sampling import bits_of, some

STORE = b"0123456789abcdef"
Compression = Literal["zstd"] | None


class Calls(OsFileSystem):
    """The file system, remembering what it was asked for and failing where told."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.sizes: list[int] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail:
            raise OSError(errno.EIO, call)

    def create(self, path: str, size: int) -> OsFile:
        self.calls.append("create")
        file = super().create(path, size)
        calls = self

        class Noted(OsFile):
            def write(self, buffers: Sequence[bytes | memoryview], offset: int) -> None:
                calls.note("write")
                calls.sizes.append(sum(map(len, buffers)))
                file.write(buffers, offset)

            def sync(self) -> None:
                calls.note("sync")
                file.sync()

            def close(self) -> None:
                calls.note("close")
                file.close()

        return Noted.__new__(Noted)

    def sync_directory(self, path: str) -> None:
        self.note("sync directory")
        super().sync_directory(path)

    def unlink(self, path: str) -> None:
        self.calls.append("unlink")
        super().unlink(path)


def write(path: Path, compression: Compression = None, fs: OsFileSystem | None = None) -> list[tuple[int, ...]]:
    """Write the segment that most tests look at; return its runs."""
    writer = ColdSegmentWriter(fs or OsFileSystem(), str(path), STORE, 9, compression=compression)
    runs: list[tuple[int, ...]] = [
        writer.add(-5, 0, [5], [b"first"]),
        writer.add(-5, 1, [200, 0, 4], [b"a" * 150, memoryview(b"a" * 50 + b"defg")]),
        writer.add(6, 10, [1, 1], [b"x", b"y"], 7),
        writer.add(6, 18, [8], [b"12345678"]),
    ]
    rows = writer.finish()
    assert rows.dtype == footer_dtype()
    assert [tuple(row)[1:] for row in rows.tolist()] == runs
    assert rows["ledger"].tolist() == [-5, -5, 6, 6]
    return runs


ENTRIES = [[b"first"], [b"a" * 200, b"", b"defg"], [b"x", b"y"], [b"12345678"]]


def entries_of(segment: ColdSegment, offset: int) -> list[bytes]:
    header, body = segment.record(offset)
    first, ends = entry_ends(body, header.entry_count, where="here")
    return [bytes(body[a:b]) for a, b in zip([first, *ends.tolist()], ends.tolist(), strict=False)]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_records_come_back(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "s.cold"
    runs = write(path, compression)
    segment = ColdSegment(OsFileSystem(), str(path), STORE, 9)
    assert [tuple(row)[1:] for row in segment.rows.tolist()] == runs
    assert [entries_of(segment, run[3]) for run in runs] == ENTRIES
    assert [run[6] for run in runs] == ([0, 1, 0, 0] if compression else [0, 0, 0, 0])
    assert list(segment.verify()) == []
    assert np.array(runs, location_dtype())["stride"].tolist() == [1, 1, 7, 1]
    assert all(run[3] % 8 == 0 for run in runs)


def test_empty_segment(tmp_path: Path) -> None:
    path = str(tmp_path / "s.cold")
    assert len(ColdSegmentWriter(OsFileSystem(), path, STORE, 9, compression=None).finish()) == 0
    segment = ColdSegment(OsFileSystem(), path, STORE, 9)
    assert len(segment.rows) == 0
    assert list(segment.verify()) == []


@pytest.mark.parametrize("compression", [pytest.param(None, marks=pytest.mark.long), "zstd"])
def test_every_flipped_bit(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "s.cold"
    runs = write(path, compression)
    data = bytearray(path.read_bytes())

    class InMemory(OsFileSystem):
        def view(self, path: str) -> memoryview:
            return memoryview(data).toreadonly()

    fs = InMemory()
    at_open = 0
    for offset in range(len(data)):
        # Padding is compared with zeros as a whole, so one bit of each byte of it is enough.
        for bit in bits_of(offset) if offset < 80 or offset >= 4096 else (offset % 8,):
            data[offset] ^= 1 << bit
            try:
                segment = ColdSegment(fs, "s", STORE, 9)
            except CorruptError:
                at_open += 1
            else:
                assert [tuple(row)[1:] for row in segment.rows.tolist()] == runs
                damaged = 0
                for run, expected in zip(runs, ENTRIES, strict=True):
                    try:
                        assert entries_of(segment, run[3]) == expected
                    except CorruptError:
                        damaged += 1
                assert damaged <= 1
                (found,) = segment.verify()
                assert "s: " in str(found)
            data[offset] ^= 1 << bit
    assert at_open == some(2, 8) * (64 + 8 + 4 * 40 + 64)
    assert list(ColdSegment(fs, "s", STORE, 9).verify()) == []


def test_every_shortened_file_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "s.cold"
    write(path)
    data = path.read_bytes()
    for size in (0, 63, *range(4090, len(data))):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptError, match=str(path)) as caught:
            ColdSegment(OsFileSystem(), str(path), STORE, 9)
        assert caught.value.path == str(path)
        assert caught.value.offset is not None
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptError, match="no trailer"):
        ColdSegment(OsFileSystem(), str(path), STORE, 9)


def resealed(data: bytes, row: int, field: str, value: int) -> bytes:
    """Return a segment with one number of its footer changed and all checksums right."""
    rows = np.frombuffer(data[-64 - 160 : -64], footer_dtype()).copy()
    rows[field][row] = value
    footer = rows.tobytes()
    trailer = data[-64:-40] + xxh3_64_intdigest(footer).to_bytes(8, "little") + bytes(24)
    return data[: -64 - 160] + footer + trailer + xxh3_64_intdigest(trailer).to_bytes(8, "little")


@pytest.mark.parametrize(("field", "at_open"), [
    ("offset", True), ("body", True), ("file", True),
    ("ledger", False), ("first", False), ("count", False), ("stride", False), ("flags", False),
])  # fmt: skip
def test_footer_and_records_must_agree(tmp_path: Path, field: str, at_open: bool) -> None:
    path = tmp_path / "s.cold"
    write(path)
    path.write_bytes(resealed(path.read_bytes(), 1, field, 77))
    if at_open:
        with pytest.raises(CorruptError, match="do not cover"):
            ColdSegment(OsFileSystem(), str(path), STORE, 9)
    else:
        (found,) = ColdSegment(OsFileSystem(), str(path), STORE, 9).verify()
        assert "but the footer says" in str(found)


def test_gap_before_the_footer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.cold"
    write(path)
    data = path.read_bytes()
    footer_at = len(data) - 64 - 160
    trailer = data[-64:-56] + (footer_at + 8).to_bytes(8, "little") + data[-48:-8]
    checksum = xxh3_64_intdigest(trailer).to_bytes(8, "little")
    path.write_bytes(data[:footer_at] + bytes(8) + data[footer_at:-64] + trailer + checksum)
    with pytest.raises(CorruptError, match="do not cover"):
        ColdSegment(OsFileSystem(), str(path), STORE, 9)


def test_trailer_beyond_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.cold"
    write(path)
    data = path.read_bytes()
    trailer = data[-64:-56] + (1 << 63).to_bytes(8, "little") + (1 << 62).to_bytes(8, "little") + data[-40:-8]
    path.write_bytes(data[:-64] + trailer + xxh3_64_intdigest(trailer).to_bytes(8, "little"))
    with pytest.raises(CorruptError, match="do not end"):
        ColdSegment(OsFileSystem(), str(path), STORE, 9)


def test_strangers_and_newer_formats(tmp_path: Path) -> None:
    path = tmp_path / "s.cold"
    write(path)
    for store_id, file_id in ((bytes(16), 9), (STORE, 8)):
        with pytest.raises(CorruptError, match=f"expected {store_id.hex()} and {file_id}"):
            ColdSegment(OsFileSystem(), str(path), store_id, file_id)
    data = bytearray(path.read_bytes())
    data[8] = 2
    data[64:72] = xxh3_64_intdigest(bytes(data[:64])).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError, match="format 2; this pybk reads 1"):
        ColdSegment(OsFileSystem(), str(path), STORE, 9)
    data[8], data[12] = 1, 1
    data[64:72] = xxh3_64_intdigest(bytes(data[:64])).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(UnsupportedFormatError, match="incompatible features 0x1"):
        ColdSegment(OsFileSystem(), str(path), STORE, 9)


@pytest.mark.parametrize("offset", [0, 4090, 4097, 4096 + 64, 1 << 40])
def test_no_record_elsewhere(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "s.cold"
    write(path)
    with pytest.raises(CorruptError):
        ColdSegment(OsFileSystem(), str(path), STORE, 9).record(offset)


def test_order_is_kept(tmp_path: Path) -> None:
    writer = ColdSegmentWriter(OsFileSystem(), str(tmp_path / "s.cold"), STORE, 9, compression=None)
    writer.add(5, 10, [1, 1, 1], [b"abc"], 4)
    for ledger, first in ((5, 9), (5, 10), (5, 18), (4, 99)):
        with pytest.raises(UsageError, match="come after ledger 5 entry 18"):
            writer.add(ledger, first, [1], [b"a"])
    with pytest.raises(UsageError, match="0 entries"):
        writer.add(5, 19, [], [])
    writer.add(5, 19, [1], [b"a"])
    writer.add(6, 0, [1], [b"a"])
    assert len(writer.finish()) == 3


def test_space_ends_at_four_gibibytes(tmp_path: Path) -> None:
    writer = ColdSegmentWriter(OsFileSystem(), str(tmp_path / "s.cold"), STORE, 9, compression=None)
    space = COLD_SEGMENT_BYTES_MAX - 4096
    assert writer.fits(space)
    assert not writer.fits(space + 1)
    writer.add(1, 0, [3], [b"abc"])
    assert writer.fits(space - 72)
    assert not writer.fits(space - 71)

    class Huge(list[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]  # a size of one entry that no memory is needed for
            return iter([COLD_SEGMENT_BYTES_MAX])

    with pytest.raises(UsageError, match=r"fits\(\)"):
        writer.add(1, 1, Huge([1]), [b"a"])
    writer.abort()


def test_pieces_are_large_and_memory_is_bounded(tmp_path: Path) -> None:
    fs = Calls()
    writer = ColdSegmentWriter(fs, str(tmp_path / "s.cold"), STORE, 9, compression=None)
    for number in range(100):
        writer.add(1, number, [50_000], [bytes(50_000)])
    writer.finish()
    assert len(fs.sizes) == 5
    assert all(1 << 20 <= size < (1 << 20) + 51_000 for size in fs.sizes[:-1])
    assert list(ColdSegment(fs, str(tmp_path / "s.cold"), STORE, 9).verify()) == []


def test_finish_syncs_file_then_directory(tmp_path: Path) -> None:
    fs = Calls()
    write(tmp_path / "s.cold", fs=fs)
    assert fs.calls == ["create", "write", "sync", "sync directory", "close"]


@pytest.mark.parametrize("fail", ["write", "sync", "sync directory", "close"])
def test_failed_segment_can_be_aborted(tmp_path: Path, fail: str) -> None:
    fs = Calls(fail)
    writer = ColdSegmentWriter(fs, str(tmp_path / "s.cold"), STORE, 9, compression=None)
    writer.add(1, 0, [3], [b"abc"])
    with pytest.raises(OSError, match=fail):
        writer.finish()
    fs.fail = ""
    writer.abort()
    writer.abort()
    assert not list(tmp_path.iterdir())
    assert fs.calls.count("unlink") == 1
    with pytest.raises(UsageError, match="finished or aborted"):
        writer.finish()


def test_finished_segment_is_not_aborted(tmp_path: Path) -> None:
    writer = ColdSegmentWriter(OsFileSystem(), str(tmp_path / "s.cold"), STORE, 9, compression=None)
    writer.finish()
    writer.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["s.cold"]
    with pytest.raises(FileExistsError):
        ColdSegmentWriter(OsFileSystem(), str(tmp_path / "s.cold"), STORE, 9, compression=None)


def test_without_zstandard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.cold"
    runs = write(path, "zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r'pip install "pybk\[zstd\]"'):
        ColdSegmentWriter(OsFileSystem(), str(tmp_path / "other"), STORE, 9, compression="zstd")
    assert not (tmp_path / "other").exists()
    segment = ColdSegment(OsFileSystem(), str(path), STORE, 9)
    assert entries_of(segment, runs[0][3]) == [b"first"]
    with pytest.raises(UsageError, match=r'pip install "pybk\[zstd\]"'):
        segment.record(runs[1][3])


def compressed(body: bytes, raw_bytes: int, codec: int = Codec.ZSTD) -> RecordHeader:
    return RecordHeader(RecordKind.ENTRIES, codec, 5, 0, 0, 1, 1, len(body), raw_bytes, xxh3_64_intdigest(body))


def test_compressed_bodies_match_their_headers() -> None:
    zstandard = pytest.importorskip("zstandard")
    body = zstandard.ZstdCompressor().compress(b"a" * 1000)
    assert decompress(compressed(body, 1000), body) == b"a" * 1000
    for damaged, raw_bytes, why in (
        (body, 999, "body of 1000 bytes, expected 999"),
        (body, 1 << 31, "body of 1000 bytes, expected"),
        (body[:-1], 1000, "cannot be read"),
        (b"no frame", 1000, "cannot be read"),
        (b"", 0, "cannot be read"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 1000), 1000, "expected 1000"),
    ):
        with pytest.raises(CorruptError, match=why):
            decompress(compressed(damaged, raw_bytes), damaged)
    with pytest.raises(UnsupportedFormatError, match="codec 2"):
        decompress(compressed(body, 1000, codec=2), body)


@pytest.mark.parametrize("name", ["0000000000000009.cold", "000000000000000a.cold"])
def test_golden_segments(tmp_path: Path, name: str) -> None:
    file_id = int(name[:16], 16)
    segment = ColdSegment(OsFileSystem(), str(GOLDEN / name), bytes(range(16)), file_id)
    assert list(segment.verify()) == []
    found = [entries_of(segment, int(offset)) for offset in segment.rows["offset"]]
    assert found == [[b"first"], [b"a" * 300, b"", b"defg"], [b"x", b"y"]]
    assert segment.rows["flags"].tolist() == [0, int(file_id == 10), 0]
    if file_id == 9:
        made = runpy.run_path(str(GOLDEN / "make.py"))
        made["cold_segment"](tmp_path / name, file_id, compressed=False)
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()
