"""The disk of the tests forgets what was not synced, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.loss.campaign import files, room
from tests.loss.disk import Disk, Loss
from tests.loss.recording import Record, record, records, why_not, written

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"nothing can be recorded: {why_not()}")


@pytest.fixture
def space() -> Iterator[Path]:
    with room() as path:
        yield path


def recorded(space: Path, program: str) -> tuple[int, list[Record]]:
    """Run a program in a new directory; return the number of that, and what it did."""
    root = space / "root"
    root.mkdir()
    program = f"import os; os.chdir({str(root)!r}); sync = lambda path: os.fsync(os.open(path, os.O_RDONLY))\n{program}"
    record(["-c", program], root, space / "log")
    return root.stat().st_ino, records(space / "log")


def left(space: Path, program: str, loss: Loss, seed: int = 0) -> dict[str, bytes | None]:
    """Return the files that a loss of power leaves at the end of a program."""
    inode, done = recorded(space, program)
    disk = Disk(inode)
    for each in done:
        disk.apply(each)
    disk.write_cut(space / "cut", loss, Random(seed))
    return files(space / "cut")


WRITTEN = "fd = os.open('a', os.O_CREAT | os.O_RDWR); os.pwrite(fd, b'abc', 0)\n"


@pytest.mark.parametrize(
    ("program", "kept"),
    [
        (WRITTEN, {}),
        (f"{WRITTEN}os.fsync(fd)", {}),
        (f"{WRITTEN}sync('.')", {"a": b""}),
        (f"{WRITTEN}sync('.'); os.fdatasync(fd)", {"a": b"abc"}),
        (f"{WRITTEN}os.fsync(fd); sync('.'); os.pwrite(fd, b'xyz', 0)", {"a": b"abc"}),
        (f"{WRITTEN}sync('.'); os.pwritev(fd, [b'xyz'], 3, os.RWF_DSYNC)", {"a": b"\0\0\0xyz"}),
        (f"{WRITTEN}os.fsync(fd); sync('.'); os.rename('a', 'b')", {"a": b"abc"}),
        (f"{WRITTEN}os.fsync(fd); sync('.'); os.rename('a', 'b'); sync('.')", {"b": b"abc"}),
        (f"{WRITTEN}os.fsync(fd); sync('.'); os.unlink('a')", {"a": b"abc"}),
        (f"{WRITTEN}os.fsync(fd); sync('.'); os.link('a', 'b'); os.unlink('a'); sync('.')", {"b": b"abc"}),
        (f"{WRITTEN}os.fsync(fd); sync('.'); os.truncate('a', 1)", {"a": b"abc"}),
        (f"{WRITTEN}os.truncate('a', 1); os.fsync(fd); sync('.')", {"a": b"a"}),
        (f"{WRITTEN}os.posix_fallocate(fd, 0, 5); os.fsync(fd); sync('.')", {"a": b"abc\0\0"}),
        ("os.mkdir('d'); open('d/a', 'w').close(); sync('d')", {}),
        ("os.mkdir('d'); sync('.'); open('d/a', 'w').close()", {"d": None}),
        ("os.mkdir('d'); sync('.'); open('d/a', 'w').close(); sync('d')", {"d": None, "d/a": b""}),
        (
            f"os.mkdir('d'); {WRITTEN}os.fsync(fd); sync('.'); os.rename('a', 'd/a'); sync('d')",
            {"d": None, "d/a": b"abc"},
        ),
        (
            f"import mmap; {WRITTEN}os.fsync(fd); sync('.'); m = mmap.mmap(fd, 3); m[0] = 120; os.fsync(fd); m[1] = 9",
            {"a": b"xbc"},
        ),
    ],
)
def test_what_was_synced_is_kept_and_the_rest_is_lost(space: Path, program: str, kept: dict[str, bytes | None]) -> None:
    assert left(space, program, Loss.ALL) == kept


def test_what_was_not_synced_may_be_there_in_any_part(space: Path) -> None:
    program = f"{WRITTEN}os.fsync(fd); sync('.'); os.pwrite(fd, b'x' * 2048, 0); open('b', 'w').close()"
    inode, done = recorded(space, program)
    disk = Disk(inode)
    for each in done:
        disk.apply(each)
    seen: set[tuple[object, ...]] = set()
    for seed in range(60):
        path = space / f"{seed}"
        disk.write_cut(path, Loss.EACH, Random(seed))
        found = files(path)
        a = found["a"]
        assert a is not None
        seen.add(("b" in found, len(a), *(a[at : at + 1] for at in range(0, len(a), 512))))
    assert {each[0] for each in seen} == {True, False}
    assert {each[1] for each in seen} == {3, 2048}
    assert len(seen) > 10


@pytest.mark.parametrize("call", ["msync", "syncfs"])
def test_a_sync_that_is_not_recorded_ends_the_program(space: Path, call: str) -> None:
    program = f"{WRITTEN}import mmap; m = mmap.mmap(fd, 3)\n"
    program += "m.flush()" if call == "msync" else "import ctypes; ctypes.CDLL(None).syncfs(fd)"
    with pytest.raises(AssertionError, match=rf"ended with 97:\s+loss recorder: {call}"):
        recorded(space, program)


def test_a_killed_program_has_done_what_was_recorded(space: Path) -> None:
    root = space / "root"
    root.mkdir()
    program = f"import os; os.chdir({str(root)!r}); [open(f'{{n}}', 'w').write('x') for n in range(9)]"
    record(["-c", program], root, space / "log", kill_after=5)
    done = records(space / "log")
    assert len(done) == 5
    disk = Disk(root.stat().st_ino)
    for each in done:
        disk.apply(each)
    disk.write_cut(space / "cut", Loss.NOTHING, Random(0))
    assert files(space / "cut") == files(root)
    assert len(files(root)) == 3


def test_what_a_cut_left_is_where_the_next_record_begins(space: Path) -> None:
    root = space / "root"
    (root / "d").mkdir(parents=True)
    (root / "d" / "a").write_bytes(b"abc")
    (root / "d" / "empty").touch()
    (root / "link").symlink_to("d/a")
    disk = Disk(root.stat().st_ino)
    for each in written(root):
        disk.apply(each)
    disk.write_cut(space / "cut", Loss.ALL, Random(0))
    assert files(space / "cut") == files(root)
