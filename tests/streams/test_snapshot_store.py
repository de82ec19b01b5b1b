"""Snapshots: saved in parts, restored as a whole, and an older one if the newest is damaged."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from pybk import BlobStore, LedgerManager, SnapshotStore, UsageError
from pybk.errors import BlobLockedError, CorruptError, NoSuchBlobError
from pybk.manager.ledger_manager import backend_of
from tests.cluster.inside import inside
from tests.sampling import mostly

PART = 1000


@pytest.fixture(params=mostly("store", "cluster", among="blobs"))
def blobs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BlobStore]:
    if request.param == "store":
        with BlobStore.open(tmp_path / "store", password=b"p") as blobs:
            yield blobs
    else:
        with inside(tmp_path / "cluster") as cluster, cluster.connect() as manager:
            yield BlobStore.open(manager, password=b"p")


def opened(blobs: BlobStore, keep: int = 2) -> SnapshotStore:
    return SnapshotStore(blobs, "db", keep=keep, part_bytes=PART)


def tree(root: Path) -> dict[str, tuple[int, bytes | None]]:
    """Return permissions and content by path; a directory has no content."""
    return {
        path.relative_to(root).as_posix(): (path.stat().st_mode, None if path.is_dir() else path.read_bytes())
        for path in root.rglob("*")
    }


def make(root: Path) -> None:
    (root / "sub" / "empty").mkdir(parents=True)
    (root / "large").write_bytes(os.urandom(5 * PART + 1))
    (root / "nothing").write_bytes(b"")
    (root / "sub" / "exact").write_bytes(os.urandom(2 * PART))
    (root / "sub" / "exact").chmod(0o640)


def flip(root: Path, content: bytes) -> None:
    """Change a byte of a content wherever files have it."""
    for path in root.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(content)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([content[0] ^ 1]))


def test_a_directory_comes_back_and_only_what_changed_is_written_again(blobs: BlobStore, tmp_path: Path) -> None:
    state = tmp_path / "state"
    make(state)
    snapshots = opened(blobs)
    first = snapshots.save(state, lsn=5, generation=1, meta={"by": "test"})
    assert (first.number, first.lsn, first.generation, first.is_directory) == (1, 5, 1, True)
    assert first.size == first.written == 7 * PART + 1
    before = tree(state)
    with (state / "large").open("r+b") as file:
        file.seek(2 * PART)
        file.write(b"changed")
    (state / "new").write_bytes(b"new")
    second = snapshots.save(state, lsn=9)
    assert second.written == PART + 3
    assert snapshots.list() == [second, first]
    report = snapshots.restore(tmp_path / "new" / "place")
    assert (report.info, report.skipped) == (second, ())
    assert tree(tmp_path / "new" / "place") == tree(state)
    assert snapshots.restore(tmp_path / "old", number=1).info.meta == {"by": "test"}
    assert tree(tmp_path / "old") == before
    with pytest.raises(FileExistsError):
        snapshots.restore(state)
    (tmp_path / "file").write_bytes(b"kept")
    with pytest.raises(FileExistsError, match="is a file"):
        snapshots.restore(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"kept"
    (tmp_path / "made").mkdir()
    snapshots.restore(tmp_path / "made")
    assert tree(tmp_path / "made") == tree(state)


def test_what_is_not_a_directory_is_a_file(blobs: BlobStore, tmp_path: Path) -> None:
    data = os.urandom(3 * PART + 5)
    snapshots = opened(blobs)

    def write(file: BinaryIO) -> None:
        for at in range(0, len(data), 700):
            file.write(data[at : at + 700])

    path = tmp_path / "file"
    path.write_bytes(data)
    content: Any
    for number, content in enumerate((data, bytearray(data), write, path, b""), 1):
        info = snapshots.save(content)
        assert (info.number, info.is_directory) == (number, False)
        assert info.written == (len(data) if number == 1 else 0)
        assert snapshots.read() == (data if content != b"" else b"")
    snapshots.restore(path, number=4)
    assert path.read_bytes() == data


def test_snapshots_are_pruned_with_their_parts(blobs: BlobStore) -> None:
    snapshots = opened(blobs, keep=2)
    for number in range(1, 6):
        snapshots.save(b"same" * 250 + b"%d" % number)
        assert [each.number for each in snapshots.list()] == [*range(number, max(0, number - 2), -1)]
    assert len(blobs.list("db/part/")) == 3
    with pytest.raises(NoSuchBlobError):
        snapshots.read(number=1)
    assert opened(blobs, keep=1).prune() == 2
    assert len(blobs.list("db/")) == 3


def test_an_older_snapshot_is_taken_if_the_newest_is_damaged(blobs: BlobStore, tmp_path: Path) -> None:
    snapshots = opened(blobs, keep=3)
    with pytest.raises(NoSuchBlobError):
        snapshots.restore(tmp_path / "x")
    assert snapshots.latest() is None
    for number in range(1, 4):
        snapshots.save(b"%d" % number * 2 * PART, lsn=number)
    parts = {each.name for each in blobs.list("db/part/")}
    blobs.put("db/manifest/0000000000000003", b"not json")
    report = snapshots.restore(tmp_path / "x")
    assert [(each.number, type(each.problem)) for each in report.skipped] == [(3, CorruptError)]
    assert report.info.lsn == 2
    assert (tmp_path / "x").read_bytes() == b"2" * 2 * PART
    own = {each.name for each in blobs.list("db/part/") if blobs.get(each.name)[:1] == b"2"}
    assert own < parts
    for name in own:
        blobs.put(name, b"another content")
    latest = snapshots.latest()
    assert latest is not None
    assert latest.info.lsn == 1
    assert [each.number for each in latest.skipped] == [3, 2]
    for each in blobs.list("db/part/"):
        blobs.delete(each.name)
    (tmp_path / "x").write_bytes(b"untouched")
    with pytest.raises(CorruptError, match="all snapshots"):
        snapshots.restore(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"untouched"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def lose(blobs: BlobStore, content: bytes) -> None:
    """Lose the ledger of the part that has a content."""
    name = next(each.name for each in blobs.list("db/part/") if blobs.get(each.name) == content)
    blobs.manager.delete_ledger(blobs.stat(name).ledger_id, password=b"p")


def test_saving_again_heals_a_part_that_was_lost(blobs: BlobStore) -> None:
    snapshots = opened(blobs, keep=2)
    snapshots.save(b"a" * PART, lsn=1)
    snapshots.save(b"b" * PART, lsn=2)
    lose(blobs, b"b" * PART)
    assert snapshots.save(b"b" * PART, lsn=3).written == PART
    latest = snapshots.latest()
    assert latest is not None
    assert (latest.info.lsn, latest.skipped) == (3, ())
    assert snapshots.read(number=2) == b"b" * PART
    assert snapshots.save(b"b" * PART, lsn=4).written == 0
    lose(blobs, b"b" * PART)  # after it was verified
    assert snapshots.save(b"b" * PART, lsn=5).written == PART
    assert snapshots.read(number=5) == b"b" * PART


def test_a_lost_part_is_written_once_and_found_by_later_saves(blobs: BlobStore) -> None:
    snapshots = opened(blobs, keep=2)
    content = b"c" * PART + b"d" * PART + b"c" * PART
    assert snapshots.save(content).written == 2 * PART
    lose(blobs, b"c" * PART)
    assert [snapshots.save(content).written for _ in range(3)] == [PART, 0, 0]
    assert snapshots.read() == snapshots.read(number=3) == content


def test_saving_again_heals_a_part_that_was_damaged(tmp_path: Path) -> None:
    old, new = os.urandom(PART), os.urandom(PART)
    with BlobStore.open(tmp_path, password=b"p") as blobs:
        opened(blobs).save(old, lsn=1)
        opened(blobs).save(new, lsn=2)
    flip(tmp_path, new)
    with BlobStore.open(tmp_path, password=b"p") as blobs:
        before = opened(blobs).latest()
        assert before is not None
        assert [each.number for each in before.skipped] == [2]
        assert opened(blobs).save(new, lsn=3).written == PART
        after = opened(blobs).latest()
        assert after is not None
        assert (after.info.lsn, after.skipped) == (3, ())
        assert opened(blobs).read(number=2) == new


class CountingStore(BlobStore):
    """Counts the parts that are read whole."""

    reads = 0

    def get(self, name: str, version: int | None = None) -> bytes:
        self.reads += name.startswith("db/part/")
        return super().get(name, version)


def test_an_object_reads_each_part_that_it_reuses_once(tmp_path: Path) -> None:
    content = b"".join(bytes([number]) * PART for number in (1, 2, 1, 3))
    with CountingStore.open(tmp_path, password=b"p") as blobs:
        assert isinstance(blobs, CountingStore)
        opened(blobs).save(content)
        assert blobs.reads == 0
        snapshots = opened(blobs)
        assert [snapshots.save(content).written for _ in range(4)] == [0] * 4
        assert blobs.reads == 3


def test_a_snapshot_that_was_not_finished_does_not_exist(blobs: BlobStore, tmp_path: Path) -> None:
    snapshots = opened(blobs)
    snapshots.save(b"old" * PART)

    def fail(file: BinaryIO) -> None:
        file.write(b"new" * PART)
        raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        snapshots.save(fail)
    assert snapshots.read() == b"old" * PART
    assert snapshots.prune() == 3
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="neither a file nor a directory"):
        snapshots.save(tmp_path / "state")
    with pytest.raises(UsageError, match="lsn is '3'"):
        snapshots.save(b"state", lsn="3")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="pathlib"):
        snapshots.save(str(tmp_path / "state"))  # type: ignore[arg-type]


def test_one_caller_at_a_time_saves(blobs: BlobStore) -> None:
    snapshots = opened(blobs)

    def save_again(file: BinaryIO) -> None:
        with pytest.raises(BlobLockedError):
            snapshots.save(b"")
        with pytest.raises(BlobLockedError):
            snapshots.prune()
        file.write(b"done")

    snapshots.save(save_again)
    assert snapshots.read() == b"done"
    assert backend_of(blobs.manager).lock_owner("snapshots.blobs.db") is None


def test_every_call_has_a_form_for_event_loops(blobs: BlobStore, tmp_path: Path) -> None:
    async def use() -> None:
        snapshots = opened(blobs)
        info = await snapshots.save_async(b"state", lsn=3)
        assert await snapshots.list_async() == [info]
        assert await snapshots.latest_async() == (info, ())
        assert (await snapshots.restore_async(tmp_path / "x")).info == info
        assert await snapshots.read_async() == b"state"
        assert await snapshots.prune_async() == 0

    asyncio.run(use())


def test_arguments_are_checked(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        blobs = BlobStore.open(manager, insecure=True)
        options: dict[str, Any]
        for options in ({"name": "x" * 49}, {"name": ""}, {"keep": 0}, {"part_bytes": 0}):
            with pytest.raises(UsageError):
                SnapshotStore(blobs, **options)
        with pytest.raises(UsageError, match="it takes a BlobStore"):
            SnapshotStore(5, "x")  # type: ignore[arg-type]
        snapshots = SnapshotStore(blobs)
        content: Any
        for content in (5, lambda file: file.write("text")):
            with pytest.raises(UsageError, match="write takes bytes"):
                snapshots.save(content)


def test_the_name_of_a_directory_that_a_killed_restore_made_is_synced(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.write_bytes(b"state")
    snapshots = SnapshotStore(blobs, "state")
    snapshots.save(state, lsn=1)
    (tmp_path / "a" / "b").mkdir(parents=True)
    synced: list[str] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    snapshots.restore(tmp_path / "a" / "b" / "c" / "restored")
    assert {str(tmp_path / each) for each in ("a", "a/b", "a/b/c")} <= set(synced)


def test_the_bytes_of_a_manifest_stay_as_they_are(blobs: BlobStore) -> None:
    saved = opened(blobs).save(b"x", lsn=2, generation=3, meta={"a": "b"})
    digest = hashlib.sha256(b"x").hexdigest()
    assert blobs.get("db/manifest/0000000000000001").decode() == (
        f'{{"directories":[],"files":[["",384,1,["{digest}"]]],"format":1,'
        f'"info":[1,2,3,{{"a":"b"}},{saved.created_ns},false,1,1],"part_bytes":{PART}}}'
    )


def test_what_is_no_file_is_not_saved(blobs: BlobStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="it is a FIFO, and not a regular file; name a regular file, or a directory"):
        opened(blobs).save(tmp_path / "fifo")
