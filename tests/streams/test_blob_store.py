"""Blob stores: put, replaced, copied, renamed, deleted, read while that happens, and swept."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk import BlobStore, LedgerManager, StoreConfig, UsageError, WriteAheadLog
from pybk.backend import NamedRecord
from pybk.errors import (
    BlobExistsError,
    BlobGivenUpError,
    ClosedError,
    CorruptError,
    DigestMismatchError,
    IllegalOperationError,
    NoSuchBlobError,
    StoreLockedError,
    UnauthorizedError,
    UnsupportedFormatError,
)
from pybk.manager.ledger_manager import backend_of
from pybk.streams.blob_catalog import BlobCatalog
from pybk.streams.blob_record import BlobRecord, BlobVersion, Hold, Reference
from pybk.streams.log_settings import spec_of
from tests.cluster.inside import inside

PASSWORD = b"blobs"


@pytest.fixture
def blobs(manager: LedgerManager) -> BlobStore:
    return opened(manager)


def opened(manager: LedgerManager, **options: object) -> BlobStore:
    return BlobStore.open(manager, password=PASSWORD, **options)  # type: ignore[arg-type]


def ledgers(manager: LedgerManager) -> int:
    return len(list(manager.list_ledgers()))


def test_the_whole_life_in_three_lines(tmp_path: Path) -> None:
    with BlobStore.open(tmp_path / "db", password=PASSWORD) as blobs:
        made = blobs.put("model/weights", b"0123456789", meta={"of": "tuesday"})
        assert (made.name, made.version, made.size, dict(made.meta)) == ("model/weights", 1, 10, {"of": "tuesday"})
    with BlobStore.open(tmp_path / "db", password=PASSWORD, read_only=True) as blobs:
        assert blobs.stat("model/weights") == made
        with blobs.open_blob("model/weights") as file:
            assert file.seek(4) == 4
            assert file.read(3) == b"456"
            assert file.seek(-1, io.SEEK_END) == 9
            assert file.read() == b"9"
        with pytest.raises(IllegalOperationError):
            blobs.put("model/weights", b"")


def test_everything_that_has_bytes_can_be_put(blobs: BlobStore, tmp_path: Path) -> None:
    data = os.urandom(5000)
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        sources: dict[str, Any] = {
            "bytes": data,
            "bytearray": bytearray(data),
            "memoryview": memoryview(data),
            "path": path,
            "name": str(path),
            "file": file,
            "iterable": (data[at : at + 700] for at in range(0, len(data), 700)),
        }
        for name, source in sources.items():
            assert blobs.put(name, source, chunk=1024).size == 5000
    for name in sources:
        assert blobs.get(name) == data
        assert blobs.stat(name).digest == blobs.stat("bytes").digest
        assert blobs.stat(name).chunk == 1024
    assert blobs.put("empty", b"").size == 0
    assert blobs.get("empty") == b""


def test_a_name_stands_for_the_newest_blob(blobs: BlobStore, manager: LedgerManager) -> None:
    with pytest.raises(NoSuchBlobError):
        blobs.get("a")
    with pytest.raises(FileNotFoundError):
        blobs.delete("a")
    assert not blobs.exists("a")
    for number in range(1, 4):
        assert blobs.put("a", b"%d" % number).version == number
        assert blobs.get("a") == b"%d" % number
        assert ledgers(manager) == 1
    with pytest.raises(BlobExistsError):
        blobs.put("a", b"4", overwrite=False)
    with pytest.raises(NoSuchBlobError, match="kept are 3"):
        blobs.get("a", 2)
    blobs.delete("a")
    assert not blobs.exists("a")
    assert ledgers(manager) == 0
    blobs.put("a", b"new", overwrite=False)
    assert blobs.get("a") == b"new"


def test_versions_are_kept_up_to_a_number(manager: LedgerManager) -> None:
    blobs = opened(manager, keep=3)
    for number in range(1, 6):
        blobs.put("a", b"%d" % number)
    assert [each.version for each in blobs.versions("a")] == [5, 4, 3]
    assert blobs.get("a", 3) == b"3"
    assert blobs.stat("a").version == 5
    assert ledgers(manager) == 3
    with pytest.raises(NoSuchBlobError):
        blobs.open_blob("a", 2)
    assert blobs.versions("b") == []
    blobs.delete("a")
    assert ledgers(manager) == 0


def test_blobs_are_listed_by_prefix(blobs: BlobStore, manager: LedgerManager) -> None:
    for name in ("b/2", "a", "b/1", "bc", "b/1/x", "ä"):
        blobs.put(name, name.encode())
    assert [each.name for each in blobs.list()] == ["a", "b/1", "b/1/x", "b/2", "bc", "ä"]
    assert [each.name for each in blobs.list("b/")] == ["b/1", "b/1/x", "b/2"]
    assert BlobStore.open(manager, "others", password=PASSWORD).list() == []


def test_an_upload_is_published_by_its_with_alone(blobs: BlobStore, manager: LedgerManager) -> None:
    blobs.put("a", b"old")
    with suppress(ZeroDivisionError), blobs.create_blob("a") as file:
        file.write(b"half")
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        file.write(b"more")
    file = blobs.create_blob("a")
    file.write(b"half")
    file.abort()
    file.abort()
    with pytest.raises(ClosedError):
        file.commit()
    closed = blobs.create_blob("a")
    closed.write(b"half")
    closed.close()
    with pytest.raises(ClosedError, match="file of blob 'a' is closed"):
        closed.write(b"more")
    with pytest.raises(ClosedError, match="file of blob 'a' is closed"):
        closed.commit()
    with blobs.create_blob("a") as file:
        file.write(b"half")
        file.abort()
    dropped = blobs.create_blob("a")
    dropped.write(b"half")
    del dropped, file, closed
    gc.collect()
    assert blobs.get("a") == b"old"
    with blobs.create_blob("a") as upload, io.TextIOWrapper(upload) as text:
        text.write("whole")
    assert blobs.get("a") == b"whole"
    assert upload.info == blobs.stat("a")
    assert ledgers(manager) == 1


def test_what_is_open_stays_readable(blobs: BlobStore, manager: LedgerManager) -> None:
    data = os.urandom(10_000)
    blobs.put("a", data, chunk=100)
    first, second = blobs.open_blob("a"), blobs.open_blob("a")
    assert first.read(10) == data[:10]
    blobs.put("a", b"new")
    blobs.delete("a")
    assert first.read() == data[10:]
    first.close()
    assert second.read() == data
    assert ledgers(manager) == 1
    second.close()
    blobs.put("b", b"another change deletes it")
    assert ledgers(manager) == 1


def test_a_reader_in_another_process_sees_the_old_blob_or_an_error(tmp_path: Path) -> None:
    data = os.urandom(3 << 20)
    with inside(tmp_path) as cluster, cluster.connect() as here, cluster.connect() as there:
        writer, reader = opened(here), opened(there)
        writer.put("a", data)
        with writer.open_blob("a") as file:
            assert file.read(100) == data[:100]
            opened(there).delete("a")
            assert not reader.exists("a")
            with suppress(NoSuchBlobError):  # bookies may have the entries a little longer
                assert file.read() == data[100:]
        patient = opened(here, grace_s=1000)
        patient.put("a", data)
        with reader.open_blob("a") as file:
            patient.put("a", b"new")
            assert file.read() == data
            assert reader.get("a") == b"new"


def test_a_blob_without_its_ledger_is_not_taken_for_another(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        blobs = opened(manager)
        made = blobs.put("a", os.urandom(3 << 20))
        with blobs.open_blob("a") as file:
            file.read(100)
            manager.delete_ledger(made.ledger_id)
            with pytest.raises(NoSuchBlobError, match="open it again"):
                file.read()
        with pytest.raises(CorruptError, match="is missing"):
            blobs.get("a")
        blobs.put("a", b"again")
        assert blobs.get("a") == b"again"


def test_two_names_may_share_a_ledger(blobs: BlobStore, manager: LedgerManager) -> None:
    made = blobs.put("a", b"data", meta={"x": "1"})
    copied = blobs.copy("a", "b")
    assert (copied.name, copied.ledger_id, copied.digest, copied.meta) == ("b", made.ledger_id, made.digest, made.meta)
    blobs.copy("b", "c")
    assert ledgers(manager) == 1
    blobs.delete("a")
    assert blobs.get("b") == blobs.get("c") == b"data"
    blobs.copy("b", "a")
    blobs.delete("b")
    blobs.put("c", b"other")
    assert blobs.get("a") == b"data"
    assert ledgers(manager) == 2
    blobs.delete("a")
    assert ledgers(manager) == 1
    with pytest.raises(NoSuchBlobError):
        blobs.copy("a", "b")
    blobs.copy("c", "c2", overwrite=False)
    with pytest.raises(BlobExistsError):
        blobs.copy("c", "c2", overwrite=False)
    blobs.delete("c")
    blobs.delete("c2")
    assert ledgers(manager) == 0


def test_a_renamed_blob_has_one_name(blobs: BlobStore, manager: LedgerManager) -> None:
    blobs.put("a", b"1")
    blobs.put("b", b"2")
    with pytest.raises(BlobExistsError):
        blobs.rename("a", "b", overwrite=False)
    blobs.rename("a", "b")
    assert [each.name for each in blobs.list()] == ["b"]
    assert blobs.get("b") == b"1"
    blobs.rename("b", "a")
    blobs.rename("a", "a")
    blobs.rename("a", "c")
    assert [each.name for each in blobs.list()] == ["c"]
    assert blobs.get("c") == b"1"
    blobs.put("a", b"3")
    blobs.delete("c")
    assert blobs.get("a") == b"3"
    assert ledgers(manager) == 1
    blobs.delete("a")
    assert ledgers(manager) == 0


def test_a_copy_of_an_older_version_is_the_newest_again(manager: LedgerManager) -> None:
    blobs = opened(manager, keep=2)
    blobs.put("a", b"1")
    blobs.put("a", b"2")
    assert blobs.copy("a", "a", version=1).version == 3
    assert blobs.get("a") == b"1"
    assert blobs.get("a", 2) == b"2"
    blobs.put("a", b"4")
    assert blobs.get("a", 3) == b"1"
    blobs.put("a", b"5")
    assert ledgers(manager) == 2


def test_two_writers_of_a_name_both_publish_and_the_later_stays(blobs: BlobStore, manager: LedgerManager) -> None:
    first, second = blobs.create_blob("a"), blobs.create_blob("a", overwrite=False)
    third = blobs.create_blob("a", overwrite=False)
    first.write(b"first")
    second.write(b"second")
    third.write(b"third")
    assert second.commit().version == 1
    with pytest.raises(BlobExistsError):
        third.commit()
    assert first.commit().version == 2
    assert blobs.get("a") == b"first"
    assert ledgers(manager) == 1


def test_many_writers_of_a_name_leave_one_blob(blobs: BlobStore, manager: LedgerManager) -> None:
    def write(number: int) -> None:
        for _ in range(5):
            blobs.put("a", b"%d" % number * 100)
            assert len(set(blobs.get("a"))) == 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blobs.stat("a").version == 20
    blobs.put("b", b"")
    assert ledgers(manager) == 2


def test_a_clean_up_does_not_forget_what_another_one_leaves_meanwhile(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = BlobCatalog(manager, "blobs", spec_of("blob", PASSWORD, None, insecure=False), 0.0)
    blobs = BlobStore(manager, catalog, 1, owns=False)
    blobs.put("a", b"1")
    backend, file = backend_of(manager), blobs.open_blob("a")
    read = backend.read_record

    def overtaken(name: str) -> NamedRecord | None:
        found = read(name)
        monkeypatch.setattr(backend, "read_record", read)
        blobs.put("a", b"2")  # the ledger of the first is being read, and is left for later
        return found

    monkeypatch.setattr(backend, "read_record", overtaken)
    catalog.clean("a")
    assert ledgers(manager) == 2
    file.close()
    blobs.put("b", b"")
    assert ledgers(manager) == 2


def test_the_password_guards_what_exists(blobs: BlobStore, manager: LedgerManager) -> None:
    blobs.put("a", b"1")
    wrong = BlobStore.open(manager, password=b"wrong")
    for refused in (
        lambda: wrong.get("a"),
        lambda: wrong.put("a", b"2"),
        lambda: wrong.delete("a"),
        lambda: wrong.rename("a", "b"),
        lambda: wrong.copy("a", "b"),
    ):
        with pytest.raises(UnauthorizedError, match="the password is not that of blob 'a'"):
            refused()
    gc.collect()  # pytest fails for an error of a finaliser
    assert [(each.name, blobs.get(each.name)) for each in blobs.list()] == [("a", b"1")]
    with pytest.raises(UsageError, match="PYBK_PASSWORD"):
        BlobStore.open(manager)
    insecure = BlobStore.open(manager, "open", insecure=True)
    insecure.put("a", b"2")
    assert insecure.get("a") == b"2"
    for guarded in (opened(manager, name="open").get, opened(manager, name="open").delete):
        with pytest.raises(UnauthorizedError, match="blob 'a' has no password, and one was given"):
            guarded("a")
    assert ledgers(manager) == 2


def test_small_entries_make_small_chunks(tmp_path: Path) -> None:
    config = StoreConfig(max_entry_bytes=4096)
    with LedgerManager.open(tmp_path, config=config) as manager:
        blobs, data = opened(manager), os.urandom(10_000)
        assert blobs.put("a", data).chunk == 4096
        assert blobs.get("a") == data
        with WriteAheadLog.open(manager, insecure=True) as wal, wal.checkpoint() as file:
            file.write(data)
        found = wal.latest_checkpoint()
        assert found is not None
        with found.open() as stored:
            assert stored.read() == data


def test_arguments_are_checked_before_anything_is_done(blobs: BlobStore, manager: LedgerManager) -> None:
    options: dict[str, Any]
    for options in (
        {"meta": {"a": 1}},
        {"meta": "text"},
        {"meta": {"a": "x" * 5000}},
        {"chunk": 0},
        {"chunk": 1 << 40},
    ):
        with pytest.raises(UsageError):
            blobs.put("a", b"", **options)
    for name in ("", "a//b", "/a", ".a", 5, "x" * 121):
        with pytest.raises(UsageError):
            blobs.put(name, b"")  # type: ignore[arg-type]
    data: Any
    for data in (5, None, object()):
        with pytest.raises(UsageError, match="data is"):
            blobs.put("a", data)
    for data in (["text"], io.StringIO("text"), [5]):
        with pytest.raises(UsageError, match="write takes bytes"):
            blobs.put("a", data)
    with pytest.raises(UsageError, match="encode it first"), blobs.create_blob("a") as upload:
        upload.write("text")  # type: ignore[arg-type]
    for options in (
        {"name": "a/b"},
        {"name": "x" * 33},
        {"keep": 0},
        {"keep": "all"},
        {"grace_s": -1},
        {"grace_s": "x"},
    ):
        with pytest.raises(UsageError):
            opened(manager, **options)
    assert ledgers(manager) == 0
    blobs.close()
    blobs.close()
    with pytest.raises(ClosedError):
        blobs.list()


def test_the_longest_names_work(manager: LedgerManager) -> None:
    blobs = opened(manager, name="\u20ac" * 10 + "xx", keep=64)
    name = "/".join(["\u20ac" * 19] * 2) + "/" + "x" * 4
    assert len(name.encode()) == 120
    for number in range(70):
        blobs.put(name, b"%d" % number, meta={"a": "x" * 4000})
    assert len(blobs.versions(name)) == 64
    assert [each.name for each in blobs.list("\u20ac")] == [name]
    blobs.delete(name)
    assert ledgers(manager) == 0


def test_a_directory_belongs_to_one_process(tmp_path: Path) -> None:
    with BlobStore.open(tmp_path, password=PASSWORD), pytest.raises(StoreLockedError):
        BlobStore.open(tmp_path, password=PASSWORD)


def test_a_sweep_gives_up_what_no_process_will_publish(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as here, cluster.connect() as there:
        blobs, others = opened(here), opened(there)
        blobs.put("a", b"old")
        upload = others.create_blob("a")
        upload.write(b"new")
        assert blobs.sweep() == 0
        assert others.sweep(older_than_s=0) == 0, "an upload of this process lasts"
        assert blobs.sweep(older_than_s=0) == 1
        with pytest.raises(BlobGivenUpError):
            upload.commit()
        assert blobs.get("a") == b"old"
        assert ledgers(here) == 1


def test_a_sweep_deletes_ledgers_that_were_never_named(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        blobs = opened(manager)
        blobs.put("a", b"1")
        description = {"pybk.blob": b'{"store":"blobs","name":"a","token":"00"}'}
        manager.create_ledger(password=PASSWORD, ledger_type="blob", custom_metadata=description)
        manager.create_ledger(password=PASSWORD, ledger_type="blob")
        other = {"pybk.blob": b'{"store":"others","name":"a","token":"00"}'}
        manager.create_ledger(password=PASSWORD, ledger_type="blob", custom_metadata=other)
        assert blobs.sweep() == 1
        assert ledgers(manager) == 3
        assert blobs.get("a") == b"1"


def test_a_sweep_releases_a_hold_whose_copy_was_given_up(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        blobs = opened(manager)
        made = blobs.put("a", b"1")
        catalog = BlobCatalog(manager, "blobs", spec_of("blob", PASSWORD, None, insecure=False), 0.0)
        catalog.update("a", lambda record: record.held(Hold(made.ledger_id, "00", "b")) or record)
        blobs.delete("a")
        assert ledgers(manager) == 1
        assert blobs.sweep() == 1
        assert ledgers(manager) == 0


def test_a_copy_that_was_given_up_leaves_nothing(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, cluster.connect() as here, cluster.connect() as there:
        blobs = opened(here)
        blobs.put("a", b"1")
        catalog = BlobCatalog(there, "blobs", spec_of("blob", PASSWORD, None, insecure=False), 0.0)
        with pytest.raises(BlobGivenUpError):
            catalog.copy("a", catalog.version("a"), "b", 1, lambda _: blobs.sweep(older_than_s=0))
        blobs.delete("a")
        assert not blobs.exists("b")
        assert ledgers(here) == 0


def test_what_is_dropped_late_is_kept_for_readers_elsewhere(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path) as manager:
        blobs = opened(manager, grace_s=1000)
        blobs.put("a", b"1")
        blobs.copy("a", "b")
        blobs.delete("a")
        blobs.delete("b")
        assert blobs.sweep() == 0
        assert ledgers(manager) == 1
        assert opened(manager).sweep() == 1
        assert ledgers(manager) == 0


def test_a_damaged_chunk_is_found_and_the_others_can_be_read(tmp_path: Path) -> None:
    chunk = 64 << 10
    data = os.urandom(8 * chunk)
    with LedgerManager.open(tmp_path) as manager:
        opened(manager).put("a", data, chunk=chunk)
    for path in tmp_path.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(data[5 * chunk : 5 * chunk + 100])) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"damaged")
    with LedgerManager.open(tmp_path) as manager, opened(manager).open_blob("a") as file:
        with pytest.raises((CorruptError, DigestMismatchError)):
            file.read()
        file.seek(6 * chunk)
        assert file.read() == data[6 * chunk :]


def test_everything_has_an_asyncio_form(manager: LedgerManager) -> None:
    async def use() -> None:
        async with opened(manager) as blobs:
            await blobs.put_async("a", b"1", meta={"kind": "number"})
            async with blobs.create_blob_async("b") as file:
                await file.write_async(b"22")
            with pytest.raises(BlobExistsError):
                await blobs.create_blob_async("b", overwrite=False)
            with pytest.raises(RuntimeError):
                async with blobs.create_blob_async("given up"):
                    raise RuntimeError
            assert [info.name for info in await blobs.list_async()] == ["a", "b"]
            assert (await blobs.copy_async("b", "c")).size == 2
            assert (await blobs.rename_async("c", "d")).name == "d"
            assert not await blobs.exists_async("c")
            assert await blobs.get_async("d") == b"22"
            assert (await blobs.stat_async("a")).meta == {"kind": "number"}
            assert [info.version for info in await blobs.versions_async("a")] == [1]
            with await blobs.open_blob_async("a") as stored:
                assert await asyncio.to_thread(stored.read) == b"1"
            async with blobs.open_blob_async("a") as stored:
                assert await asyncio.to_thread(stored.read) == b"1"
            assert stored.closed
            await blobs.delete_async("d")
            assert await blobs.sweep_async() == 0

    asyncio.run(use())


def test_the_bytes_of_a_record_stay_as_they_are() -> None:
    """Stores and clusters have records of these bytes."""
    first = BlobVersion(1, Reference("ab", 5, "", 7), 10, "00ff", 64, 99, {"k": "v", "a": "ü"})
    second = first._replace(number=3, reference=Reference("cd", 6, "home", 0))
    uploads, dropped = (Reference("ab", 5, "", 7),), (Reference("x", 1, "y", 2),)
    record = BlobRecord("nä/me", 4, (first, second), uploads, dropped, (Hold(3, "t", "n"),))
    encoded = (
        '{"dropped":[["x",1,"y",2]],"format":1,"holds":[[3,"t","n"]],"name":"nä/me","next_version":4,'
        '"uploads":[["ab",5,"",7]],"versions":[[1,["ab",5,"",7],10,"00ff",64,99,{"a":"ü","k":"v"}],'
        '[3,["cd",6,"home",0],10,"00ff",64,99,{"a":"ü","k":"v"}]]}'
    ).encode()
    assert record.encode() == encoded
    assert BlobRecord.decode(encoded, where="the record") == record
    with pytest.raises(UnsupportedFormatError, match="the record: format 2; this pybk reads format 1"):
        BlobRecord.decode(encoded.replace(b'"format":1', b'"format":2'), where="the record")
    with pytest.raises(CorruptError, match="do not ascend"):
        BlobRecord.decode(encoded.replace(b'"next_version":4', b'"next_version":3'), where="the record")


def test_a_commit_that_failed_in_the_with_is_not_made_again_at_its_end(blobs: BlobStore) -> None:
    with blobs.create_blob("a", overwrite=False) as file:
        blobs.put("a", b"of another")
        with pytest.raises(BlobExistsError):
            file.commit()
    assert blobs.get("a") == b"of another"
    with pytest.raises(ClosedError, match="not published"):
        _ = file.info
