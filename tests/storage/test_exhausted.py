"""Descriptors, threads or a codec that run out for a while: refused or tried again, and the store serves on.

What exhausts a whole process runs in one of its own.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from pybk.config import StoreConfig
from pybk.errors import StorageError, StorageRefusedError
from pybk.flags import ReadFlag, StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.storage.io import failures
from pybk.storage.io.failures import NotOpenedError, is_refused, syncing
from pybk.storage.io.filesystem import OsFile, OsFileSystem, populate
from tests.internals import store_of
from tests.storage.real_store import QUICK, contents, numbered, open_quick
from tests.waiting import wait_until

_PAYLOAD: Final = bytes(10_000)


@contextmanager
def _no_descriptors() -> Iterator[None]:
    """Take every descriptor that this process can get, those that are given back meanwhile, too."""
    taken: list[int] = []
    ends = threading.Event()
    exhausted = threading.Event()

    def take() -> None:
        while not ends.is_set():
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                exhausted.set()
                ends.wait(0.001)

    thread = threading.Thread(target=take)
    thread.start()
    exhausted.wait()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        for fd in taken:
            os.close(fd)


# ---- what runs in a process of its own -----------------------------------------------------------------------------


def _appended(writer: LedgerWriter, data: bytes, number: int) -> bool:
    try:
        assert writer.append(data) == number
    except StorageRefusedError:
        return False
    return True


def _embedded(path: str) -> None:
    """Append through a time without descriptors, in which the log needs new files and checkpoints are due."""
    manager = LedgerManager.open(path, config=StoreConfig(**QUICK))
    writer = manager.create_ledger(password=b"pw", storage_hints={StorageHint.HDD})
    acknowledged = [b"first"]
    writer.append(b"first")
    with _no_descriptors():
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            payload = b"%d " % len(acknowledged) + _PAYLOAD
            try:
                assert writer.append(payload) == len(acknowledged)
                acknowledged.append(payload)
            except StorageRefusedError:
                assert manager.health().state != "failed"
                time.sleep(0.01)
    wait_until(partial(_appended, writer, b"after", len(acknowledged)))  # maintenance takes the ledger in again
    acknowledged.append(b"after")
    wait_until(lambda: manager.health().state == "ok")
    assert manager.health().troubles == ()
    writer.close()
    assert contents(manager, writer.ledger_id, b"pw") == acknowledged
    manager.close()
    with LedgerManager.open(path, config=StoreConfig(**QUICK)) as manager:
        assert contents(manager, writer.ledger_id, b"pw") == acknowledged


def _closing(path: str) -> None:
    """Close a store that has no descriptor left."""
    manager = LedgerManager.open(path, config=StoreConfig(**QUICK))
    writer = manager.create_ledger(password=b"pw")
    futures = [writer.append_async(payload) for payload in numbered(50)]
    with _no_descriptors():
        manager.close()
    assert [future.result() for future in futures] == list(range(50))
    with LedgerManager.open(path, config=StoreConfig(**QUICK)) as manager:
        assert contents(manager, writer.ledger_id, b"pw", recover=True) == numbered(50)


def _bookie(path: str) -> None:
    """Write to a bookie of this process through a time without descriptors."""
    root = Path(path)
    root.mkdir()
    with LedgerManager.open(
        root / "bookie",
        listen="ipc://" + str(root / "socket"),
        metadata=f"lmdb://{root}/metadata",
        config=StoreConfig(**QUICK),
    ) as manager:
        writer = manager.create_ledger(password=b"pw", ensemble_size=1, write_quorum=1, ack_quorum=1)
        writer.append(_PAYLOAD)  # the link is there
        acknowledged = 1
        with _no_descriptors():
            until = time.monotonic() + 3.0
            while time.monotonic() < until and acknowledged < 60:  # less than what was preallocated
                writer.append(_PAYLOAD)
                acknowledged += 1
        for _ in range(300):  # more than what was preallocated
            writer.append(_PAYLOAD)
            acknowledged += 1
        wait_until(lambda: manager.health().state == "ok")
        writer.close()
        assert len(contents(manager, writer.ledger_id, b"pw")) == acknowledged


_CASES: Final = {case.__name__[1:]: case for case in (_embedded, _closing, _bookie)}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("case", ["embedded", pytest.param("closing", marks=pytest.mark.long), "bookie"])
def test_a_process_without_descriptors_for_a_while_loses_nothing_and_serves_on(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.test_exhausted", case, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stdout} {done.stderr}"


def _limited(path: str) -> None:
    used = len(os.listdir("/proc/self/fd"))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, limit[1]))
    with pytest.raises(StorageError, match=r"RLIMIT_NOFILE.*ulimit -n"):
        LedgerManager.open(path)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == used + 20
    assert not os.path.exists(path), "an open that is refused leaves nothing"


_CASES["limited"] = _limited


def test_a_limit_that_is_too_low_is_refused_at_open_and_stays_as_it_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.test_exhausted", "limited", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- one failure at a time -----------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_opened_does_not_count_as_a_failed_sync(tmp_path: Path) -> None:
    with pytest.raises(NotOpenedError) as caught, syncing("the file"):
        OsFileSystem().sync_directory(str(tmp_path / "missing"))
    assert caught.value.errno == errno.ENOENT
    assert is_refused(NotOpenedError(errno.EMFILE, "Too many open files"))
    with pytest.raises(OSError, match="a sync failed") as failed, syncing("the file"):
        raise OSError(errno.EMFILE, "Too many open files")
    assert failed.value.errno == errno.EIO


@pytest.mark.parametrize("method", ["sync", "write_zeros"])
def test_a_failed_preallocation_is_retried_and_reported_by_health(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as manager:
        scheduler = store_of(manager).scheduler
        writer = manager.create_ledger(insecure=True)
        writer.append(b"before")
        store_of(manager).supply.give_back()

        def fail(self: OsFile, *_: Any) -> None:
            raise OSError(errno.EIO, "Input/output error", "the new file")

        with monkeypatch.context() as broken:
            broken.setattr(OsFile, method, fail)
            scheduler.tick()
        health = manager.health()
        assert health.state == "degraded"
        assert "preallocating log files" in health.reason
        assert health.troubles
        writer.append(b"served on")
        scheduler.tick()
        assert (manager.health().state, manager.health().troubles) == ("ok", ())
        assert contents(manager, writer.ledger_id) == [b"before", b"served on"]


def test_a_checkpoint_without_descriptors_is_refused_and_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as manager:
        writer = manager.create_ledger(storage_hints={StorageHint.HDD}, insecure=True)
        writer.append_many(numbered(100))
        create = OsFileSystem.create

        def refuse(self: OsFileSystem, path: str, size: int) -> OsFile:
            if path.endswith(".cold"):
                raise OSError(errno.EMFILE, "Too many open files", path)
            return create(self, path, size)

        with monkeypatch.context() as short:
            short.setattr(OsFileSystem, "create", refuse)
            with pytest.raises(StorageRefusedError, match="ulimit"):
                manager.checkpoint()
            writer.append(b"served on")
        manager.checkpoint()
        assert list((tmp_path / "hdd").glob("*.cold"))
        assert contents(manager, writer.ledger_id) == [*numbered(100), b"served on"]


def test_a_thread_that_cannot_be_started_refuses_the_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path, background=False) as manager:
        writer = manager.create_ledger(insecure=True)
        writer.append(b"before")
        start = threading.Thread.start

        def refuse(self: threading.Thread) -> None:
            if self.name == "pybk-job":
                raise RuntimeError("can't start new thread")
            start(self)

        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", refuse)
            with pytest.raises(StorageRefusedError, match="ulimit -u"):
                manager.checkpoint()
        writer.append(b"after")
        manager.checkpoint()
        assert manager.health().state == "ok"


def test_packing_compressed_records_without_the_codec_is_a_trouble_and_not_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    with open_quick(tmp_path, background=False, cold_compression="zstd") as manager:
        for _ in range(2):
            with manager.create_ledger(storage_hints={StorageHint.HDD}, insecure=True) as writer:
                writer.append_many([bytes(1000)] * 100)
        manager.checkpoint()
    with open_quick(tmp_path, background=False) as manager:
        monkeypatch.setitem(sys.modules, "zstandard", None)
        manager.delete_ledger(0)
        store_of(manager).scheduler.tick()  # half of the segment is dead, and the other half cannot be unpacked
        health = manager.health()
        assert health.state == "degraded"
        assert "zstandard" in health.reason
        manager.create_ledger(insecure=True).append(b"served on")
        monkeypatch.undo()
        assert contents(manager, 1) == [bytes(1000)] * 100


def no_memory(patch: pytest.MonkeyPatch, method: str) -> None:
    """Have a method of the file system find no memory."""

    def refuse(self: OsFileSystem, path: object, *_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory", path if isinstance(path, str) else None)

    patch.setattr(OsFileSystem, method, refuse)


@pytest.mark.parametrize("hint", [StorageHint.NVME, StorageHint.HDD])
@pytest.mark.parametrize(
    ("method", "flags"),
    [("view", ReadFlag.NONE), ("populate", ReadFlag.NONE), ("read_direct", ReadFlag.DONT_CACHE)],
    ids=["map", "populate", "unmapped"],
)
def test_a_read_without_memory_is_refused_and_succeeds_later(
    method: str, flags: ReadFlag, hint: StorageHint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as manager:
        with manager.create_ledger(storage_hints={hint}, insecure=True) as writer:
            writer.append_many(numbered(100))
        manager.checkpoint()
        volumes = store_of(manager).volumes
        volumes.close()  # so that a read maps the file anew
        with manager.open_ledger(writer.ledger_id, read_flags=flags) as reader:
            with monkeypatch.context() as short:
                no_memory(short, method)
                with pytest.raises(StorageRefusedError, match="free memory"):
                    list(reader.read(0, 99))
            assert [entry.payload for entry in reader.read(0, 99)] == numbered(100)
        assert manager.health().state == "ok"


def test_appends_without_memory_for_the_watermark_or_a_log_file_fail_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_quick(tmp_path, background=False) as manager:
        writer = manager.create_ledger(insecure=True)
        with monkeypatch.context() as short:
            no_memory(short, "populate")
            writer.append(b"durable")
        store_of(manager).log.cut(lambda: None)
        store_of(manager).supply.give_back()
        with monkeypatch.context() as short:
            no_memory(short, "create")
            with pytest.raises(StorageRefusedError, match="free memory"):
                writer.append(b"refused")
        store_of(manager).scheduler.tick()
        writer.append(b"later")
        assert contents(manager, writer.ledger_id) == [b"durable", b"later"]


def test_a_map_without_memory_is_refused_and_not_reported_as_a_device_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))

    def madvise(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    fs = OsFileSystem()
    fs.populates = True  # as the map is not the kernel's here, any kernel will do
    view = fs.view(str(path))
    monkeypatch.setattr(type(view.obj), "madvise", madvise)
    with pytest.raises(StorageRefusedError, match="free memory"):
        populate(fs, view, 0, 8192)


def test_spare_descriptors_are_used_and_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures.acquire_spares()
    try:
        before = len(failures.held)
        assert before == failures.SPARES
        refusals = [0]
        real_open = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if len(failures.held) == failures.SPARES:
                refusals[0] += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return real_open(path, flags, mode)

        with monkeypatch.context() as short:
            short.setattr(os, "open", refuse)
            fd = failures.open_with_spare(str(tmp_path), os.O_RDONLY)
        assert refusals == [1]
        assert len(failures.held) == before - 1
        os.close(fd)
        assert failures.fill_spares() is None
        assert len(failures.held) == before
    finally:
        failures.release_spares()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    _CASES[sys.argv[1]](sys.argv[2])
