"""Both environments do the same; and what only LMDB has to show."""

from __future__ import annotations

import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import lmdb
import pytest

from pybk.errors import (
    ClosedError,
    CorruptError,
    ForkedProcessError,
    IllegalOperationError,
    StorageFailedError,
    StorageFullError,
)
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.lmdb_environment import Environment, LmdbEnvironment, ReadTransaction
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.waiting import PROCESS_S

Open = Callable[..., Environment]


@pytest.fixture(params=["lmdb", "sim"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens one and the same environment, as often as called."""
    if request.param == "lmdb":
        return lambda **options: LmdbEnvironment(str(tmp_path / "index"), **options)
    fs = SimFileSystem(seed=1)
    return lambda **options: SimEnvironment(fs, "/index", **options)


def content(environment: Environment) -> dict[bytes, bytes]:
    with environment.read() as transaction:
        return dict(transaction.items(b"\0", b"\xff" * 511))


def test_values_come_back_in_order(reopen: Open) -> None:
    environment = reopen()
    with environment.write() as transaction:
        for key in (b"b", b"d", b"a", b"c"):
            transaction.put(key, key * 3)
        transaction.put(b"c", b"")
        assert transaction.delete(b"b")
        assert not transaction.delete(b"x")
        assert transaction.get(b"c") == b""
    with environment.read() as reading:
        assert (reading.get(b"a"), reading.get(b"b"), reading.get(b"c")) == (b"aaa", None, b"")
        assert list(reading.items(b"a", b"d")) == [(b"a", b"aaa"), (b"c", b"")]
        assert list(reading.items(b"aa", b"z")) == [(b"c", b""), (b"d", b"ddd")]
        assert list(reading.items(b"e", b"z")) == list(reading.items(b"d", b"a")) == []


def test_floor_is_the_largest_key_not_above(reopen: Open) -> None:
    environment = reopen()
    with environment.read() as reading:
        assert reading.floor(b"x") is None
    keys = [struct.pack(">Q", n) for n in range(10, 20_000, 10)]
    with environment.write() as transaction:
        for key in keys:
            transaction.put(key, key[::-1])
        assert transaction.floor(struct.pack(">Q", 15)) == (keys[0], keys[0][::-1])
    with environment.read() as reading:
        assert reading.floor(struct.pack(">Q", 9)) is None
        for n in (10, 11, 19, 20, 4099, 19_989, 19_990, 19_991, 1 << 40):
            expected = keys[min(n // 10, len(keys)) - 1]
            assert reading.floor(struct.pack(">Q", n)) == (expected, expected[::-1])


def test_exception_drops_the_transaction(reopen: Open) -> None:
    environment = reopen()
    with environment.write() as transaction:
        transaction.put(b"a", b"1")
    with suppress(KeyboardInterrupt), environment.write() as transaction:
        transaction.put(b"a", b"2")
        transaction.put(b"b", b"2")
        raise KeyboardInterrupt
    assert content(environment) == {b"a": b"1"}
    with environment.write() as transaction:
        transaction.put(b"b", b"3")
    assert content(environment) == {b"a": b"1", b"b": b"3"}


def test_reader_sees_one_moment(reopen: Open) -> None:
    environment = reopen()
    with environment.write() as transaction:
        transaction.put(b"a", b"old")
    with environment.read() as before:
        with environment.write() as transaction:
            transaction.put(b"a", b"new")
            transaction.put(b"b", b"new")
            with environment.read() as during:
                assert during.get(b"a") == b"old"
        assert (before.get(b"a"), before.get(b"b"), before.floor(b"z")) == (b"old", None, (b"a", b"old"))
    assert content(environment) == {b"a": b"new", b"b": b"new"}


@pytest.mark.parametrize("key", [b"", b"x" * 512])
def test_keys_have_1_to_511_bytes(reopen: Open, key: bytes) -> None:
    with pytest.raises(StorageFailedError), reopen().write() as transaction:
        transaction.put(key, b"")


def test_transaction_is_of_no_use_after_its_with(reopen: Open) -> None:
    with reopen().read() as reading:
        pass
    with pytest.raises(StorageFailedError):
        reading.get(b"a")


def test_a_closed_environment_raises(reopen: Open) -> None:
    environment = reopen()
    environment.close()
    environment.close()
    with pytest.raises(ClosedError), environment.read():
        pass
    with pytest.raises(ClosedError), environment.write():
        pass


def test_committed_values_survive_reopening(reopen: Open) -> None:
    environment = reopen()
    with environment.write() as transaction:
        transaction.put(b"a", b"x" * 100_000)
    environment.close()
    environment = reopen(read_only=True)
    assert content(environment) == {b"a": b"x" * 100_000}
    with pytest.raises(IllegalOperationError, match="read-only"), environment.write():
        pass


def test_read_only_makes_nothing(reopen: Open) -> None:
    with pytest.raises(StorageFailedError):
        reopen(read_only=True)


def test_writers_take_turns(reopen: Open) -> None:
    environment = reopen()

    def count() -> None:
        for _ in range(10):
            with environment.write() as transaction:
                number = int(transaction.get(b"n") or b"0")
                transaction.put(b"n", str(number + 1).encode())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert content(environment) == {b"n": b"40"}


# ---- LMDB ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where an environment may be made."""
    return str(tmp_path / "index")


def test_format_is_pinned_whatever_the_process_asks_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMDB_DEFAULT_LIB_VERSION", "1")
    program = f"from pybk.storage.io.lmdb_environment import LmdbEnvironment as L; L({path!r}).close()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PROCESS_S)
    magic, version = struct.unpack_from("<II", (Path(path) / "data.mdb").read_bytes(), 16)
    assert (magic, version) == (0xBEEFC0DE, 1)


def test_file_of_another_format_is_refused(path: str) -> None:
    lmdb.open(path, lib_version=1).close()
    with pytest.raises(CorruptError, match="rebuild-index"):
        LmdbEnvironment(path)


def test_a_file_that_is_not_an_environment_is_refused(path: str) -> None:
    os.mkdir(path)
    (Path(path) / "data.mdb").write_bytes(Random(1).randbytes(1 << 16))
    for _ in range(2):
        with pytest.raises(CorruptError, match="damaged"):
            LmdbEnvironment(path)


def test_damaged_page_is_corruption(path: str) -> None:
    environment = LmdbEnvironment(path)
    with environment.write() as transaction:
        for n in range(1, 5000):
            transaction.put(struct.pack(">Q", n), b"v" * 50)
    environment.close()
    data = Path(path) / "data.mdb"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(bytes(size - 2 * 4096))
    environment = LmdbEnvironment(path)
    reads: list[Callable[[ReadTransaction], object]] = [
        lambda reading: reading.get(b"a"),
        lambda reading: reading.floor(b"a"),
        lambda reading: list(reading.items(b"a", b"b")),
    ]
    for read in reads:
        with environment.read() as reading, pytest.raises(CorruptError):
            read(reading)
    with pytest.raises(CorruptError), environment.write() as transaction:
        transaction.put(b"a", b"")
    environment.close()


def test_path_is_open_once_however_often_it_is_opened(path: str, tmp_path: Path) -> None:
    first = LmdbEnvironment(path)
    (tmp_path / "link").symlink_to(tmp_path)
    second = LmdbEnvironment(str(tmp_path / "link" / "index"), read_only=True)
    with first.write() as transaction:
        transaction.put(b"a", b"1")
    with pytest.raises(IllegalOperationError), second.write():
        pass
    first.close()
    assert content(second) == {b"a": b"1"}
    second.close()
    reader = LmdbEnvironment(path, read_only=True)
    with pytest.raises(IllegalOperationError, match="close that first"):
        LmdbEnvironment(path)
    reader.close()
    LmdbEnvironment(path).close()


def test_full_map_changes_nothing_and_writing_continues(path: str) -> None:
    environment = LmdbEnvironment(path, map_bytes=1 << 17)
    with environment.write() as transaction:
        transaction.put(b"a", b"1")
    with pytest.raises(StorageFullError), environment.write() as transaction:
        transaction.put(b"b", b"x" * (1 << 18))
    with environment.write() as transaction:
        transaction.put(b"c", b"3")
    assert content(environment) == {b"a": b"1", b"c": b"3"}
    environment.close()


def test_commit_that_finds_no_space_changes_nothing_and_writing_continues(path: str) -> None:
    environment = LmdbEnvironment(path, map_bytes=1 << 17)
    with environment.write() as transaction:
        for n in range(21):
            transaction.put(b"%02d" % n, b"x" * 2000)
    before = content(environment)
    changed = []

    def change() -> None:
        with environment.write() as transaction:
            # So many that there is just enough space for the changed pages, but not for the list of the replaced ones.
            for n in range(0, 21, 3):
                transaction.put(b"%02d" % n, b"y" * 2000)
                changed.append(n)

    with pytest.raises(StorageFullError):
        change()
    assert len(changed) == 7
    assert content(environment) == before
    with environment.write() as transaction:
        transaction.delete(b"00")
    del before[b"00"]
    assert content(environment) == before
    environment.close()


@pytest.mark.parametrize("free", [4096, 1 << 30])
def test_failed_commit_ends_writing_but_not_reading(path: str, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(OsFileSystem, "free_bytes", lambda self, path: free)
    environment = LmdbEnvironment(path)
    with environment.write() as transaction:
        transaction.put(b"a", b"1")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, old[1]))
    try:
        with pytest.raises(StorageFailedError, match="LMDB failed") as failed, environment.write() as transaction:
            transaction.put(b"b", b"x" * (1 << 20))
        assert ("4096 bytes free, so it is most likely full" in str(failed.value)) == (free == 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(StorageFailedError, match="a commit failed before"), environment.write():
        pass
    assert content(environment) == {b"a": b"1"}
    environment.close()
    environment = LmdbEnvironment(path)
    with environment.write() as transaction:
        transaction.put(b"c", b"3")
    assert content(environment) == {b"a": b"1", b"c": b"3"}
    environment.close()


def status_of_child(check: Callable[[], bool]) -> int:
    """Return 0 if ``check`` holds in a forked child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raises_forked(call: Callable[[], object]) -> bool:
    try:
        call()
    except ForkedProcessError:
        return True
    return False


def test_forked_child_gets_an_error_and_harms_nothing(path: str) -> None:
    environment = LmdbEnvironment(path)
    with environment.write() as transaction:
        transaction.put(b"a", b"1")

    def check() -> bool:
        refused = raises_forked(lambda: content(environment)) and raises_forked(environment.write().__enter__)
        environment.close()
        gc.collect()
        return refused and raises_forked(lambda: LmdbEnvironment(path))

    with environment.read() as held:
        assert status_of_child(check) == 0
        with environment.write() as transaction:
            transaction.put(b"a", b"2")
        assert held.get(b"a") == b"1"
    assert content(environment) == {b"a": b"2"}
    environment.close()


def test_forked_child_may_open_the_path_for_itself(path: str) -> None:
    environment = LmdbEnvironment(path)
    with environment.write() as transaction:
        transaction.put(b"a", b"1")
    del transaction

    def check() -> bool:
        own = LmdbEnvironment(path)
        with own.write() as transaction:
            transaction.put(b"b", b"2")
        found = content(own)
        own.close()
        return found == {b"a": b"1", b"b": b"2"}

    assert status_of_child(check) == 0
    with environment.write() as again:
        again.put(b"c", b"3")
    assert content(environment) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    environment.close()


def test_readers_in_many_threads_and_a_writer(path: str) -> None:
    environment = LmdbEnvironment(path)
    with environment.write() as transaction:
        transaction.put(b"a", b"0")
        transaction.put(b"z", b"0")
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            with environment.read() as reading:
                first = reading.get(b"a")
                if (b"z", first) != reading.floor(b"zz"):
                    wrong.append(first)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for n in range(100):
        with environment.write() as transaction:
            transaction.put(b"a", str(n).encode())
            transaction.put(b"z", str(n).encode())
    stop.set()
    for thread in threads:
        thread.join()
    environment.close()
    assert wrong == []
