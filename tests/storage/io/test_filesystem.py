"""Both file systems do the same; and what only the operating system's has to show."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pybk.errors import StoreLockedError
from pybk.storage.io.filesystem import FileSystem, OsFileSystem, replace_file
from tests.simdisk import SimFileSystem
from tests.storage.page_cache import drop, resident_pages

Disk = tuple[FileSystem, str]


@pytest.fixture(params=["os", "sim"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """A file system and a directory in it."""
    if request.param == "os":
        return OsFileSystem(), str(tmp_path)
    fs = SimFileSystem(seed=1)
    fs.make_directory("/store")
    return fs, "/store"


def test_created_file_is_zeros_of_its_size_and_takes_space(disk: Disk) -> None:
    fs, root = disk
    file = fs.create(f"{root}/a", 10_000)
    assert (file.size, fs.file_bytes(f"{root}/a")) == (10_000, 10_000)
    assert fs.disk_bytes(f"{root}/a") >= 10_000
    assert file.read(0, 10_000) == bytes(10_000)
    with pytest.raises(FileExistsError):
        fs.create(f"{root}/a", 0)


@pytest.mark.parametrize("method", ["write", "write_durable"])
def test_buffers_are_written_in_order_and_grow_the_file(disk: Disk, method: str) -> None:
    fs, root = disk
    file = fs.create(f"{root}/a", 0)
    getattr(file, method)([b"abc", memoryview(b"defg"), b""], 5)
    assert (file.size, fs.file_bytes(f"{root}/a")) == (12, 12)
    assert file.read(0, 100) == bytes(5) + b"abcdefg"
    getattr(file, method)([bytes([n % 251]) for n in range(3000)], 0)
    assert file.read(0, 5000) == bytes(n % 251 for n in range(3000))
    assert file.size == 3000


def test_read_ends_where_the_file_ends(disk: Disk) -> None:
    fs, root = disk
    file = fs.create(f"{root}/a", 0)
    file.write([b"0123456789"], 0)
    assert [file.read(0, 4), file.read(8, 4), file.read(10, 4), file.read(99, 4), file.read(3, 0)] == [
        b"0123", b"89", b"", b"", b""
    ]  # fmt: skip


@pytest.mark.parametrize(("offset", "size"), [(0, 1 << 21), (4096, 4096), (100, 5000), (4096, 5000), (0, 0)])
def test_zeros_replace_what_was_there(disk: Disk, offset: int, size: int) -> None:
    fs, root = disk
    content = bytes(range(256)) * (1 << 13)
    file = fs.create(f"{root}/a", len(content))
    file.write([content], 0)
    file.write_zeros(offset, size)
    file.sync()
    assert file.read(0, len(content)) == content[:offset] + bytes(size) + content[offset + size :]


def test_punched_blocks_are_zero_and_free_and_the_size_stays(disk: Disk) -> None:
    fs, root = disk
    file = fs.create(f"{root}/a", 1 << 16)
    file.write([b"x" * (1 << 16)], 0)
    file.sync()
    before = fs.disk_bytes(f"{root}/a")
    file.punch(4096, 8192)
    assert fs.disk_bytes(f"{root}/a") <= before - 8192
    assert file.size == fs.file_bytes(f"{root}/a") == 1 << 16
    assert file.read(0, 1 << 16) == b"x" * 4096 + bytes(8192) + b"x" * ((1 << 16) - 12288)


def test_a_cut_file_ends_earlier_and_its_blocks_are_free(disk: Disk) -> None:
    fs, root = disk
    file = fs.create(f"{root}/a", 1 << 16)
    file.write([b"x" * (1 << 16)], 0)
    file.reserve(1 << 17)
    file.sync()
    file.truncate(10_000)
    file.sync()
    assert file.size == fs.file_bytes(f"{root}/a") == 10_000
    assert fs.disk_bytes(f"{root}/a") <= 3 * 4096
    assert file.read(0, 1 << 16) == b"x" * 10_000
    file.write([b"y"], 20_000)
    assert file.read(0, 1 << 16) == b"x" * 10_000 + bytes(10_000) + b"y"


def test_a_file_is_used_while_it_is_open_or_a_part_of_a_map_of_it_is_referenced(tmp_path: Path) -> None:
    fs, path = OsFileSystem(), str(tmp_path / "a")
    file = fs.create(path, 10_000)
    assert not fs.is_unused(path)
    file.close()
    assert fs.is_unused(path)
    part = fs.view(path)[100:200]
    assert not fs.is_unused(path)
    del part
    assert fs.is_unused(path)
    code = (
        f"import mmap, os; held = mmap.mmap(os.open({path!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ); print(); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert not fs.is_unused(path)
        other.kill()
    assert fs.is_unused(path)


def test_a_file_that_cannot_be_opened_is_not_known_to_be_unused(tmp_path: Path) -> None:
    assert not OsFileSystem().is_unused(str(tmp_path / "missing"))


def test_view_sees_later_writes_and_outlives_the_name(disk: Disk) -> None:
    fs, root = disk
    file = fs.create(f"{root}/a", 8192)
    view = fs.view(f"{root}/a")
    assert (view.readonly, view.format, len(view)) == (True, "B", 8192)
    file.write_durable([b"later"], 4096)
    fs.unlink(f"{root}/a")
    assert bytes(view[4096:4101]) == b"later"


def test_view_of_an_empty_file_is_empty(disk: Disk) -> None:
    fs, root = disk
    fs.create(f"{root}/a", 0).close()
    assert len(fs.view(f"{root}/a")) == 0


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 20_000), (1, 1), (4095, 2), (4096, 4096), (9_000, 999_999), (19_999, 5), (20_000, 1), (5, 0)],
)
def test_direct_read_returns_the_same_bytes(disk: Disk, offset: int, size: int) -> None:
    fs, root = disk
    content = bytes(n * 7 % 256 for n in range(20_000))
    file = fs.create(f"{root}/a", 0)
    file.write([content], 0)
    found = fs.read_direct(f"{root}/a", offset, size)
    assert bytes(found) == content[offset : offset + size]
    assert found.format == "B"


def test_stores_into_a_shared_map_are_read_by_others(disk: Disk) -> None:
    fs, root = disk
    fs.create(f"{root}/a", 64).close()
    shared = fs.map_shared(f"{root}/a")
    view = fs.view(f"{root}/a")
    shared[8:11] = b"new"
    assert bytes(view[8:11]) == fs.open(f"{root}/a").read(8, 3) == b"new"


def test_names(disk: Disk) -> None:
    fs, root = disk
    fs.make_directory(f"{root}/b/c/d")
    fs.make_directory(f"{root}/b/c/d")
    for name in ("z", "a", "m"):
        fs.create(f"{root}/b/{name}", 1).close()
    assert fs.list_directory(f"{root}/b") == ["a", "c", "m", "z"]
    fs.rename(f"{root}/b/z", f"{root}/b/a")
    fs.unlink(f"{root}/b/m")
    fs.sync_directory(f"{root}/b")
    assert fs.list_directory(f"{root}/b") == ["a", "c"]
    assert [fs.exists(f"{root}/b/{name}") for name in ("a", "c", "m", "c/d")] == [True, True, False, True]
    assert fs.free_bytes(root) > 0


@pytest.mark.parametrize("method", ["open", "view", "unlink", "file_bytes", "list_directory", "map_shared"])
def test_operations_on_a_missing_file_raise(disk: Disk, method: str) -> None:
    fs, root = disk
    with pytest.raises(FileNotFoundError):
        getattr(fs, method)(f"{root}/missing")


def test_file_opened_for_reading_is_not_written(disk: Disk) -> None:
    fs, root = disk
    fs.create(f"{root}/a", 10).close()
    with pytest.raises(OSError, match="descriptor") as caught:
        fs.open(f"{root}/a").write([b"x"], 0)
    assert caught.value.errno == errno.EBADF
    file = fs.open(f"{root}/a", writable=True)
    file.write([b"x"], 0)
    file.close()
    file.close()
    with pytest.raises(OSError, match="descriptor"):
        file.read(0, 1)


def test_replaced_file_has_the_new_content_and_leaves_nothing_else(disk: Disk) -> None:
    fs, root = disk
    for data in (b"first, longer", b"second", b""):
        replace_file(fs, f"{root}/a", data)
        assert fs.open(f"{root}/a").read(0, 100) == data
        assert fs.list_directory(root) == ["a"]
    fs.create(f"{root}/a.tmp", 100).close()
    replace_file(fs, f"{root}/a", b"third")
    assert fs.open(f"{root}/a").read(0, 100) == b"third"


def test_lock_is_held_once_and_names_its_holder(disk: Disk) -> None:
    fs, root = disk
    lock = fs.lock(f"{root}/LOCK")
    with pytest.raises(StoreLockedError, match=f"LOCK: locked by this very process .{os.getpid()}.") as caught:
        fs.lock(f"{root}/LOCK")
    assert caught.value.pid == os.getpid()
    lock.release()
    lock.release()
    fs.lock(f"{root}/LOCK").release()


# ---- the operating system's ------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("method", ["write", "write_durable"])
def test_a_write_that_ends_half_way_raises(tmp_path: Path, method: str) -> None:
    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    with file_size_limit(8192), pytest.raises(OSError, match="too large") as caught:
        getattr(file, method)([b"x" * 12288], 0)
    assert caught.value.errno == errno.EFBIG
    assert file.size == 0
    assert file.read(0, 12288) == b"x" * 8192


def test_zeroing_that_ends_half_way_raises(tmp_path: Path) -> None:
    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    with file_size_limit(8192), pytest.raises(OSError, match="too large"):
        file.write_zeros(0, 12288)


class ShortWrites:
    """Stands for writes that take at most so many bytes at a time, and in all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: int, space: int, error: int | None) -> None:
        self.step, self.space, self.error = step, space, error
        self.real: Callable[[int, bytes, int], int] = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset, flags=0: self.pwrite(fd, b"".join(parts), offset))

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if not self.space and self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        taken = bytes(data[: min(self.step, self.space)])
        self.space -= len(taken)
        return self.real(fd, taken, offset)


_CONTENT = b"0123456789" * 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("method", ["write", "write_durable"])
def test_a_disk_that_fills_up_during_a_write_raises_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, code: int
) -> None:
    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    ShortWrites(monkeypatch, step=30, space=70, error=code)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        getattr(file, method)([_CONTENT[:7], memoryview(_CONTENT)[7:]], 0)
    assert caught.value.errno == code
    assert caught.value.filename == str(tmp_path / "a")
    assert file.read(0, 100) == _CONTENT[:70]


def test_a_sync_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        file.sync()
    assert caught.value.filename == str(tmp_path / "a")


@pytest.mark.parametrize("method", ["write", "write_durable"])
def test_a_write_that_takes_nothing_and_says_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    ShortWrites(monkeypatch, step=30, space=70, error=None)
    with pytest.raises(OSError, match="short write of 70 of 100 bytes at offset 5") as caught:
        getattr(file, method)([_CONTENT], 5)
    assert caught.value.errno == errno.EIO


def test_a_short_write_is_gone_on_with_but_a_durable_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    ShortWrites(monkeypatch, step=30, space=1000, error=errno.ENOSPC)
    file.write([_CONTENT], 0)
    assert (file.size, file.read(0, 200)) == (100, _CONTENT)
    with pytest.raises(OSError, match="short write of 30 of 100 bytes") as caught:
        file.write_durable([_CONTENT], 100)
    assert caught.value.errno == errno.EIO


def test_durable_write_without_the_flag_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real: Callable[..., int] = os.pwritev

    def refusing(fd: int, buffers: list[bytes], offset: int, flags: int) -> int:
        calls.append(f"pwritev {flags}")
        if flags:
            raise OSError(errno.EOPNOTSUPP, "refused")
        return real(fd, buffers, offset, flags)

    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    monkeypatch.setattr(os, "pwritev", refusing)
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append("fdatasync"))
    file.write_durable([b"one"], 0)
    file.write_durable([b"two"], 3)
    assert calls == [f"pwritev {os.RWF_DSYNC}", "pwritev 0", "fdatasync", "pwritev 0", "fdatasync"]
    assert file.read(0, 9) == b"onetwo"


def test_durable_write_carries_the_flag_and_other_errors_are_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags_seen: list[int] = []

    def failing(fd: int, buffers: list[bytes], offset: int, flags: int) -> int:
        flags_seen.append(flags)
        raise OSError(errno.EIO, "broken")

    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    monkeypatch.setattr(os, "pwritev", failing)
    with pytest.raises(OSError, match="broken"):
        file.write_durable([b"one"], 0)
    assert flags_seen == [os.RWF_DSYNC]


@pytest.fixture
def uncached(on_disk: Path) -> Path:
    """A file of 1 MiB that is not in the page cache."""
    path = on_disk / "cold"
    path.write_bytes(b"x" * (1 << 20))
    drop(path)
    return path


def test_direct_read_leaves_nothing_in_the_page_cache(uncached: Path) -> None:
    assert bytes(OsFileSystem().read_direct(str(uncached), 5000, 100_000)) == b"x" * 100_000
    assert not resident_pages(uncached)
    OsFileSystem().open(str(uncached)).read(5000, 10)
    assert resident_pages(uncached)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = os.open

    def refusing(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)


def test_direct_read_where_it_is_refused_drops_the_pages(uncached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    assert bytes(OsFileSystem().read_direct(str(uncached), 0, 1 << 20)) == b"x" * (1 << 20)
    monkeypatch.undo()
    assert not resident_pages(uncached)


def test_zeros_leave_nothing_in_the_page_cache(uncached: Path) -> None:
    file = OsFileSystem().open(str(uncached), writable=True)
    file.write_zeros(0, 1 << 20)
    assert not resident_pages(uncached)


def test_zeros_where_direct_writes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = OsFileSystem().create(str(tmp_path / "a"), 0)
    file.write([b"x" * 8192], 0)
    refuse_direct(monkeypatch)
    file.write_zeros(0, 8192)
    assert file.read(0, 8192) == bytes(8192)


def test_the_name_of_a_directory_that_a_killed_process_made_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    (tmp_path / "a" / "b").mkdir(parents=True)
    OsFileSystem().make_directory(str(tmp_path / "a" / "b" / "c" / "d"))
    assert synced == [str(tmp_path / each) for each in ("a", "a/b", "a/b/c")]
    synced.clear()
    OsFileSystem().make_directory(str(tmp_path / "a" / "b"))
    assert synced == [str(tmp_path / "a")]


def test_file_that_finds_no_space_is_removed(tmp_path: Path) -> None:
    with file_size_limit(8192), pytest.raises(OSError, match=r"\[Errno"):
        OsFileSystem().create(str(tmp_path / "a"), 1 << 20)
    assert not (tmp_path / "a").exists()


def test_lock_of_another_process_names_it(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    program = (
        "import sys; from pybk.storage.io.filesystem import OsFileSystem as F; lock = F().lock(sys.argv[1]); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreLockedError) as caught:
            OsFileSystem().lock(path)
        assert caught.value.pid == holder.pid
        holder.kill()
    OsFileSystem().lock(path).release()


def test_release_counts_at_once_although_a_child_was_just_forked(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    lock = OsFileSystem().lock(path)
    # What a child has until it runs for the first time: the same open file.
    fds = [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == path]
    copies = [os.dup(fd) for fd in fds]
    assert len(copies) == 1
    lock.release()
    OsFileSystem().lock(path).release()
    os.close(copies[0])


def test_lock_in_a_forked_child_is_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    lock = OsFileSystem().lock(path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(StoreLockedError):
        OsFileSystem().lock(path)
    lock.release()


def test_forked_child_that_lives_on_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    program = (
        "import os, signal, sys; from pybk.storage.io.filesystem import OsFileSystem\n"
        "lock = OsFileSystem().lock(sys.argv[1])\n"
        "if os.fork():\n    signal.pause()\n"
        "print('forked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"forked\n"
        with pytest.raises(StoreLockedError):
            OsFileSystem().lock(path)
        holder.kill()
        holder.wait()
        OsFileSystem().lock(path).release()


@pytest.mark.parametrize("populates", sorted({False, OsFileSystem.populates}))
@pytest.mark.parametrize("size", [4096, 4 << 20])
def test_a_map_of_any_size_is_populated_and_a_cut_is_refused(tmp_path: Path, size: int, populates: bool) -> None:
    fs, path = OsFileSystem(), str(tmp_path / "a")
    fs.populates = populates
    data = os.urandom(size)
    (tmp_path / "a").write_bytes(data)
    view = fs.view(path)
    fs.populate(view, 1, size + 100)
    fs.populate(view, size + 8192, size + (1 << 20))
    assert bytes(view) == data
    os.truncate(path, 0)
    with pytest.raises(OSError, match="cannot be read") as caught:
        fs.populate(view, 0, size)
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, path)
