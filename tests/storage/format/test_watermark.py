"""The durable watermark on both file systems."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from pybk.errors import CorruptError
from pybk.storage.format.log_file import Watermark
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from tests.simdisk import SimFileSystem

STORE = bytes(range(16))
Disk = tuple[FileSystem, str]


@pytest.fixture(params=["os", "sim"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """A file system and the path of a watermark in it."""
    if request.param == "os":
        return OsFileSystem(), str(tmp_path / "watermark")
    return SimFileSystem(seed=1), "/watermark"


def content(fs: FileSystem, path: str) -> bytes:
    return fs.open(path).read(0, 1000)


def test_new_watermark_says_nothing_is_durable(disk: Disk) -> None:
    fs, path = disk
    watermark = Watermark.create(fs, path, STORE)
    assert (watermark.durable_lsn(), watermark.clean) == (0, False)
    assert content(fs, path) == b"PYBKWM01" + STORE + struct.pack("<5Q", 0, (1 << 64) - 1, 0, 0, 0)


def test_layout_of_what_is_stored(disk: Disk) -> None:
    fs, path = disk
    watermark = Watermark.create(fs, path, STORE)
    watermark.advance(0x0123456789ABCDEF)
    watermark.clean = True
    expected = struct.pack("<5Q", 0x0123456789ABCDEF, 0xFEDCBA9876543210, 1, 0, 0)
    assert content(fs, path) == b"PYBKWM01" + STORE + expected
    watermark.clean = False
    assert not watermark.clean


def test_others_see_it_at_once_and_it_outlives_the_mapping(disk: Disk) -> None:
    fs, path = disk
    watermark = Watermark.create(fs, path, STORE)
    reader = Watermark.open(fs, path, STORE, writable=False)
    for lsn in (1, 2, (1 << 63) - 1):
        watermark.advance(lsn)
        assert watermark.durable_lsn() == reader.durable_lsn() == lsn
    with pytest.raises(TypeError, match="read-only"):
        reader.advance(5)
    watermark.clean = True
    watermark.close()
    watermark.close()
    again = Watermark.open(fs, path, STORE, writable=True)
    assert (again.durable_lsn(), again.clean) == ((1 << 63) - 1, True)


def test_writer_killed_between_the_two_stores_leaves_the_older_lsn(disk: Disk) -> None:
    fs, path = disk
    Watermark.create(fs, path, STORE).advance(7)
    fs.open(path, writable=True).write([struct.pack("<Q", 8)], 24)
    watermark = Watermark.open(fs, path, STORE, writable=True)
    assert (watermark.durable_lsn(), watermark.stored_lsn()) == (7, 8)
    watermark.advance(8)
    assert watermark.durable_lsn() == 8


def test_at_no_line_of_an_advance_does_it_say_what_is_not_yet_stored(disk: Disk) -> None:
    fs, path = disk
    watermark = Watermark.create(fs, path, STORE)
    watermark.advance(7)
    reader = Watermark.open(fs, path, STORE, writable=False)
    seen: list[int] = []

    def on_line(frame: FrameType, event: str, value: object) -> Any:
        sys.settrace(None)
        seen.append(reader.durable_lsn())
        sys.settrace(on_line)
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        watermark.advance(8)
    finally:
        sys.settrace(before)
    assert len(seen) >= 4
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (7, 8)


@pytest.mark.parametrize("writable", [True, False])
def test_no_flipped_bit_makes_it_say_more_than_is_durable(disk: Disk, writable: bool) -> None:
    fs, path = disk
    lsn = 0b1011_0110
    Watermark.create(fs, path, STORE).advance(lsn)
    sound = content(fs, path)
    file = fs.open(path, writable=True)
    refused = 0
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write([bytes(damaged)], 0)
        try:
            found = Watermark.open(fs, path, STORE, writable=writable)
        except CorruptError:
            refused += 1
        else:
            assert 0 <= found.durable_lsn() <= lsn <= found.stored_lsn()
    # Not refused: the lowest bit of "clean", a higher LSN (a kill leaves that, too), a lower complement of it.
    assert refused >= 8 * 24 + 63 + 128 + 5


@pytest.mark.parametrize("data", [b"", b"PYBKWM01", bytes(64), b"PYBKWM01" + STORE + bytes(4096)])
def test_other_content_is_refused(disk: Disk, data: bytes) -> None:
    fs, path = disk
    fs.create(path, 0).write([data], 0)
    for writable in (True, False):
        with pytest.raises(CorruptError):
            Watermark.open(fs, path, STORE, writable=writable)


def test_another_store_is_refused_by_name(disk: Disk) -> None:
    fs, path = disk
    Watermark.create(fs, path, b"x" * 16)
    with pytest.raises(CorruptError, match=f"{(b'x' * 16).hex()}, expected {STORE.hex()}"):
        Watermark.open(fs, path, STORE, writable=True)


def test_reader_in_another_process_sees_it_only_grow(tmp_path: Path) -> None:
    path = str(tmp_path / "watermark")
    watermark = Watermark.create(OsFileSystem(), path, STORE)
    program = (
        "import sys\n"
        "from pybk.storage.io.filesystem import OsFileSystem\n"
        "from pybk.storage.format.log_file import Watermark\n"
        "watermark = Watermark.open(OsFileSystem(), sys.argv[1], bytes(range(16)), writable=False)\n"
        "print('open', flush=True)\n"
        "last = reads = 0\n"
        "while last < 1 << 40:\n"
        "    last, before = watermark.durable_lsn(), last\n"
        "    assert last >= before, (last, before)\n"
        "    reads += 1\n"
        "print(reads)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"open\n"
        for lsn in range(1, 200_000):
            watermark.advance(lsn << 16 | lsn & 0xFFFF)
        watermark.advance(1 << 40)
        assert int(reader.stdout.read()) > 0
    assert reader.returncode == 0
