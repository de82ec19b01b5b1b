"""Blobs as a file system: fsspec's own tests, and what pandas and PyArrow do with it."""

from __future__ import annotations

import copy
import gc
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.core import OpenFile
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import (
    AbstractCopyTests,
    AbstractFixtures,
    AbstractGetTests,
    AbstractOpenTests,
    AbstractPipeTests,
    AbstractPutTests,
)

from pybk import (
    BlobGivenUpError,
    BlobStore,
    BlobUpload,
    IllegalOperationError,
    LedgerManager,
    StoreLockedError,
    UnauthorizedError,
    UsageError,
)
from pybk.adapters.blob_filesystem import BlobFileSystem
from pybk.credentials import write_new_secret
from tests.forking import all_locks_held, in_child
from tests.paths import ROOT
from tests.waiting import PROCESS_S


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """Do what an installation with its entry points does."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    name, _, target = setup["options.entry_points"]["fsspec.specs"].strip().partition(" = ")
    fsspec.register_implementation(name, target.replace(":", "."), clobber=True)


class Fixtures(AbstractFixtures):  # type: ignore[misc]  # fsspec has no types
    """A file system over one store for all tests of a class, which clean up after themselves."""

    @pytest.fixture(scope="class")
    @classmethod
    def fs(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlobFileSystem]:
        with LedgerManager.open(tmp_path_factory.mktemp("store")) as manager:
            yield BlobFileSystem(blob_store=BlobStore.open(manager, insecure=True))

    @pytest.fixture
    def local_fs(self) -> LocalFileSystem:
        return LocalFileSystem(auto_mkdir=True)

    @pytest.fixture
    def fs_path(self) -> str:
        return "root"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


@pytest.mark.sampled(one_in=6)
class TestCopy(AbstractCopyTests, Fixtures):  # type: ignore[misc]
    pass


@pytest.mark.sampled(one_in=6)
class TestGet(AbstractGetTests, Fixtures):  # type: ignore[misc]
    pass


@pytest.mark.sampled(one_in=6)
class TestPut(AbstractPutTests, Fixtures):  # type: ignore[misc]
    pass


class TestOpen(AbstractOpenTests, Fixtures):  # type: ignore[misc]
    pass


class TestPipe(AbstractPipeTests, Fixtures):  # type: ignore[misc]
    pass


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "password").write_text("secret\n", encoding="ascii")
    options: dict[str, Any] = {"store": str(tmp_path / "store"), "password_file": str(tmp_path / "password")}
    yield options
    BlobFileSystem(**options).close()


@pytest.fixture
def fs(options: dict[str, Any]) -> BlobFileSystem:
    return BlobFileSystem(**options)


def test_a_file_system_with_a_secret_is_opened_with_it_alone(tmp_path: Path) -> None:
    for name in ("secret", "another"):
        write_new_secret(str(tmp_path / name))
    given: dict[str, Any] = {"store": str(tmp_path / "store"), "secret_file": str(tmp_path / "secret")}
    for mode, data in (("wb", b"written"), ("rb", b"")):
        with fsspec.open("pybk://a/b", mode, **given) as file:
            assert (file.write(data) if data else file.read()) in (7, b"written")
        BlobFileSystem(**given).close()
    (tmp_path / "password").write_text("of another time\n", encoding="ascii")
    for name, file in (("secret_file", "another"), ("password_file", "password")):
        wrong: dict[str, Any] = {"store": given["store"], name: str(tmp_path / file)}
        with closing(BlobFileSystem(**wrong)) as fs, pytest.raises(UnauthorizedError):
            fs.cat("a/b")


def test_directories_are_what_blobs_lie_in(fs: BlobFileSystem) -> None:
    fs.mkdir("made")
    assert not fs.exists("made")
    assert fs.ls("") == []
    fs.pipe({"a/b/c": b"1", "a/b.txt": b"22", "d": b"333"})
    assert fs.ls("", detail=False) == ["a", "d"]
    assert fs.ls("pybk://a/") == fs.ls("/a")
    assert [(each["name"], each["type"], each["size"]) for each in fs.ls("a")] == [
        ("a/b", "directory", 0),
        ("a/b.txt", "file", 2),
    ]
    assert fs.ls("d", detail=False) == ["d"]
    assert fs.isdir("a/b")
    assert fs.isfile("a/b/c")
    assert fs.info("")["type"] == "directory"
    assert fs.find("") == ["a/b.txt", "a/b/c", "d"]
    assert fs.glob("a/*") == ["a/b", "a/b.txt"]
    assert fs.du("") == 6
    with pytest.raises(FileNotFoundError):
        fs.ls("nothing")
    with pytest.raises(FileNotFoundError):
        fs.info("nothing")
    with pytest.raises(OSError, match="has blobs"):
        fs.rmdir("a")
    with pytest.raises(IsADirectoryError):
        fs.rm("a")
    fs.mv("a", "e", recursive=True)
    assert fs.find("") == ["d", "e/b.txt", "e/b/c"]
    fs.rm("e", recursive=True)
    assert fs.find("") == ["d"]


def test_a_file_is_published_by_its_close(fs: BlobFileSystem) -> None:
    with suppress(ZeroDivisionError), fs.open("a", "wb") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert not fs.exists("a")
    with fs.open("a", "wb") as file:
        file.write(b"whole")
        assert file.tell() == 5
        assert not fs.exists("a")
    first = fs.ukey("a")
    with fs.open("a", "w") as text:
        text.write("text")
    assert fs.cat("a") == b"text"
    assert fs.cat_file("a", start=1, end=3) == b"ex"
    assert fs.ukey("a") != first
    assert fs.modified("a") == fs.created("a")
    with pytest.raises(UsageError, match="as a whole"):
        fs.open("a", "ab")
    fs.touch("a")
    assert fs.size("a") == 0


def test_a_transaction_publishes_at_its_end(fs: BlobFileSystem) -> None:
    with fs.transaction:
        with fs.open("a", "wb") as file:
            file.write(b"1")
        assert not fs.exists("a")
    assert fs.cat("a") == b"1"
    with suppress(ZeroDivisionError), fs.transaction:
        with fs.open("a", "wb") as file:
            file.write(b"2")
        raise ZeroDivisionError
    assert fs.cat("a") == b"1"


def test_file_systems_of_the_same_options_share_a_store(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    fs.pipe("a", b"1")
    again = fsspec.filesystem("pybk", **options)
    assert isinstance(again, BlobFileSystem)
    assert again.blob_store is fs.blob_store
    again = copy.copy(fs)  # by its options, as it is sent to another process
    assert again.cat("a") == b"1"
    with pytest.raises(StoreLockedError):
        LedgerManager.open(options["store"])
    fs.close()
    with LedgerManager.open(options["store"]):
        pass
    assert BlobFileSystem(**options, read_only=True).cat("a") == b"1"
    BlobFileSystem(**options, read_only=True).close()
    for wrong in ({}, {"store": "x", "blob_store": fs.blob_store}):
        with pytest.raises(UsageError):
            BlobFileSystem(**wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_a_file_system_whatever_threads_of_its_parent_were_doing(fs: BlobFileSystem) -> None:
    fs.pipe("a", b"1")
    with all_locks_held():
        in_child(fs.close)
    assert fs.cat("a") == b"1"


def test_options_that_are_not_known_are_refused(options: dict[str, Any]) -> None:
    for unknown in ({"readonly": True}, {"password": "secret"}):
        with pytest.raises(UsageError, match=r"unknown storage options: .*read_only"):
            fsspec.filesystem("pybk", **options, **unknown)
    for known in ({"use_listings_cache": False}, {"skip_instance_cache": True}, {"asynchronous": False, "loop": None}):
        assert isinstance(fsspec.filesystem("pybk", **options, **known), BlobFileSystem)
    with fsspec.open("pybk://a.gz", "wt", compression="gzip", encoding="ascii", **options) as file:
        file.write("text")
    with fsspec.open("pybk://a.gz", "rt", compression="infer", **options) as file:
        assert file.read() == "text"
    with fsspec.open("simplecache::pybk://a.gz", "rb", pybk=options) as file:
        assert file.read(2) == b"\x1f\x8b"


def test_a_file_system_that_reads_is_closed_before_this_process_writes(options: dict[str, Any]) -> None:
    BlobFileSystem(**options).pipe("a", b"1")
    BlobFileSystem(**options).close()
    assert fsspec.open("pybk://a", **options, read_only=True).open().read() == b"1"
    with pytest.raises(IllegalOperationError, match="first close the manager, log, blob store or file system"):
        BlobFileSystem(**options)
    BlobFileSystem(**options, read_only=True).close()
    BlobFileSystem(**options).pipe("a", b"2")


def test_another_process_reads_while_one_writes(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    fs.pipe("a", b"from another process")
    program = (
        "import json, sys; from pybk.adapters.blob_filesystem import BlobFileSystem;"
        "print(BlobFileSystem(**json.loads(sys.argv[1])).cat('a').decode())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, json.dumps(options | {"read_only": True})],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert run.stdout == "from another process\n", run.stderr


def test_pandas_and_pyarrow_write_and_read(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    dataset = pytest.importorskip("pyarrow.dataset")
    frame = pandas.DataFrame({"a": range(1000), "b": [str(number) for number in range(1000)]})
    frame.to_parquet("pybk://frames/1.parquet", storage_options=options)
    assert pandas.read_parquet("pybk://frames/1.parquet", storage_options=options).equals(frame)
    frame.to_csv("pybk://frames/1.csv", index=False, storage_options=options)
    assert pandas.read_csv("pybk://frames/1.csv", dtype={"b": str}, storage_options=options).equals(frame)
    table = pa.Table.from_pandas(frame)
    parquet.write_table(table, "tables/1.parquet", filesystem=fs)
    assert parquet.read_table("tables/1.parquet", filesystem=fs).equals(table)
    dataset.write_dataset(table, "many", format="parquet", filesystem=fs, max_rows_per_file=300, max_rows_per_group=300)
    assert len(fs.ls("many")) == 4
    assert dataset.dataset("many", filesystem=fs).to_table().sort_by("a").equals(table)


def test_what_wraps_a_file_may_close_it(fs: BlobFileSystem) -> None:
    with io.TextIOWrapper(fs.open("a", "wb")) as text:
        text.write("text")
    assert fs.cat("a") == b"text"
    file = fs.open("b", "wb")
    file.write(b"dropped")
    del file
    assert not fs.exists("b")


def the_ways_to_open(fs: BlobFileSystem, options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return the ways to open ``report`` for writing: by the file system and by fsspec, each mode and compression."""
    ways: dict[str, Callable[[], Any]] = {}
    for mode in ("wb", "w", "wt"):
        for compression in (None, "gzip", "bz2", "xz", "zip", "zstd"):
            how: dict[str, Any] = {"compression": compression}
            ways[f"fs.open {mode} {compression}"] = partial(fs.open, "report", mode, **how)
            ways[f"fsspec.open {mode} {compression}"] = partial(fsspec.open, "pybk://report", mode, **how, **options)
            ways[f"fsspec.open().open() {mode} {compression}"] = partial(opened, mode, **how, **options)
    return ways


def opened(mode: str, **how: Any) -> Any:
    return closing(fsspec.open("pybk://report", mode, **how).open())


def fill(file: Any, content: bytes) -> None:
    try:
        file.write(content)
    except TypeError:
        file.write(content.decode())


def fail_in_block(way: Callable[[], Any], error: Exception, before: Callable[[], object] = lambda: None) -> None:
    with way() as file:
        fill(file, b"half" * 100_000)
        before()
        raise error


def test_no_way_to_open_publishes_after_an_error_in_its_block(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    fs.pipe("report", b"good")
    for name, way in the_ways_to_open(fs, options).items():
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as raised:
            fail_in_block(way, error)
        assert raised.value is error, name
        assert error.__context__ is None, name
        assert fs.cat("report") == b"good", name


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("compression", [None, "gzip", "bz2", "xz", "zip", "zstd"])
@pytest.mark.parametrize("mode", ["wb", "w"])
def test_the_end_of_a_block_publishes(
    fs: BlobFileSystem, options: dict[str, Any], mode: str, compression: str | None
) -> None:
    for way in (
        fs.open("report", mode, compression=compression),
        fsspec.open("pybk://report", mode, compression=compression, **options),
    ):
        with way as file:
            fill(file, b"whole")
        with fs.open("report", "rb", compression=compression) as file:
            assert file.read() == b"whole"
        fs.rm("report")


def test_open_files_publish_all_or_none(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    def write(content: bytes) -> None:
        with fsspec.open_files(["pybk://a", "pybk://b"], "wb", **options) as files:
            for file in files:
                file.write(content)
            if content == b"half":
                raise ZeroDivisionError

    write(b"good")
    with suppress(ZeroDivisionError):
        write(b"half")
    assert fs.cat(["a", "b"]) == {"a": b"good", "b": b"good"}


def test_an_error_that_was_handled_before_a_file_was_opened_does_not_concern_it(
    fs: BlobFileSystem, options: dict[str, Any]
) -> None:
    for name, way in the_ways_to_open(fs, options).items():
        if ".open()" in name and not name.endswith("None"):
            continue  # most compressors do not close what they write to, and the ``OpenFile`` is dropped
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            with way() as file:
                fill(file, b"whole")
        assert fs.exists("report"), name
        fs.rm("report")


def test_an_error_that_is_raised_again_discards_the_file(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    for way in (fs.open, partial(fsspec.open, **options)):
        with suppress(ZeroDivisionError):
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                with way("pybk://report", "wb") as file:
                    file.write(b"half")
                    raise
        assert not fs.exists("report")


def test_a_generator_whose_caller_handles_an_error_publishes_at_the_end_of_its_block(
    fs: BlobFileSystem, options: dict[str, Any]
) -> None:
    def lines(way: Callable[..., Any]) -> Iterator[None]:
        with way("pybk://report", "w") as file:
            file.write("whole")
            yield

    for way in (fs.open, partial(fsspec.open, **options)):
        writing = lines(way)
        next(writing)
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            assert not list(writing)
        assert fs.cat("report") == b"whole"
        fs.rm("report")


def test_a_close_while_an_error_is_handled_discards_and_the_error_says_so(fs: BlobFileSystem) -> None:
    error = ZeroDivisionError()
    with suppress(ZeroDivisionError):
        file = fs.open("report", "w")
        try:
            file.write("half")
            raise error
        finally:
            file.close()
    assert not fs.exists("report")
    assert "'report' was not published" in error.__notes__[0]
    binary = fs.open("report", "wb")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        binary.write(b"whole")
        binary.commit()
    assert fs.cat("report") == b"whole"


def test_an_error_of_a_block_is_not_replaced_by_one_of_its_end(
    fs: BlobFileSystem, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(upload: BlobUpload, _: bytes) -> int:
        raise BlobGivenUpError(f"a sweep has given the upload of {upload.name!r} up")

    ways = {name: way for name, way in the_ways_to_open(fs, options).items() if ".open()" not in name}
    for name, way in ways.items():
        error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError) as raised, monkeypatch.context() as patch:
            fail_in_block(way, error, partial(patch.setattr, BlobUpload, "write", refuse))
        assert raised.value is error, name
        assert error.__context__ is None, name


def test_what_is_dropped_publishes_nothing(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    gc.collect()
    gc.freeze()  # else the collector looks at all that other tests have imported, 30 times
    for name, way in the_ways_to_open(fs, options).items():
        if "fsspec" in name and name.endswith("zstd") and "wb" not in name:
            continue  # the package zstandard closes the upload when the text file of fsspec is dropped
        if name.endswith(" zip"):
            continue  # ZipFile complains of each file in it that is dropped
        file = way()
        file = file.open() if isinstance(file, OpenFile) else getattr(file, "thing", file)
        fill(file, b"half")
        del file
        gc.collect()
        assert not fs.exists("report"), name


def test_a_transaction_leaves_out_a_file_whose_block_raised(fs: BlobFileSystem) -> None:
    for mode, compression in ((mode, each) for mode in ("wb", "w") for each in (None, "gzip", "zstd")):
        with fs.transaction:
            with suppress(ZeroDivisionError), fs.open("half", mode, compression=compression) as file:
                fill(file, b"half")
                raise ZeroDivisionError
            with fs.open("whole", mode, compression=compression) as file:
                fill(file, b"whole")
            with suppress(LookupError):
                fs.open("odd", "w", encoding="no such encoding")
        assert fs.ls("", detail=False) == ["whole"]
        fs.rm("whole")


def test_a_transaction_refuses_a_file_that_is_open_at_its_end(fs: BlobFileSystem) -> None:
    transaction = fs.transaction
    transaction.start()
    fs.open("open", "wb").write(b"half")
    with pytest.raises(UsageError, match="still open"):
        transaction.complete()
    assert not fs.exists("open")


def test_pandas_and_pyarrow_publish_nothing_after_an_error(fs: BlobFileSystem, options: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    frame = pandas.DataFrame({"a": range(10)})
    fs.pipe("report", b"good")
    with suppress(ZeroDivisionError), fsspec.open("pybk://report", "w", **options) as file:
        frame.to_csv(file)
        raise ZeroDivisionError
    assert fs.cat("report") == b"good"

    class Odd:
        def __str__(self) -> str:
            raise ZeroDivisionError

    for compression in (None, "gzip", "zstd"):
        with suppress(ZeroDivisionError):
            pandas.DataFrame({"a": [1, Odd()]}).to_csv(
                "pybk://report", chunksize=1, compression=compression, storage_options=options
            )
        assert fs.cat("report") == b"good"
    table = pa.Table.from_pandas(frame)
    with suppress(ZeroDivisionError), parquet.ParquetWriter("report", table.schema, filesystem=fs) as writer:
        writer.write_table(table)
        raise ZeroDivisionError
    assert fs.cat("report") == b"good"


def test_ranges_may_count_from_the_end(fs: BlobFileSystem) -> None:
    data = bytes(range(100)) * 30_000
    fs.pipe_file("a", data)
    assert fs.cat_file("a", -10) == data[-10:]
    assert fs.cat_file("a", 5, -5) == data[5:-5]
    assert fs.cat_ranges(["a", "a"], [-7, 0], [-2, 3]) == [data[-7:-2], data[:3]]
    assert fs.read_block("a", 10, None) == data[10:]
    assert fs.read_block("a", len(data) - 5, 50) == data[-5:]
    with fs.open("a") as file:
        assert file.size == len(data)


def test_a_move_keeps_what_is_put_under_the_old_name_meanwhile(
    fs: BlobFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fs.blob_store
    copy_blob = store.copy

    def copied(*names: str, **options: Any) -> object:
        made = copy_blob(*names, **options)
        store.put(names[0], b"new")
        return made

    fs.pipe({"a": b"old", "d/b": b"old", "d/e/c": b"old"})
    with monkeypatch.context() as patched:
        patched.setattr(store, "copy", copied)
        fs.mv("a", "z")
        fs.mv("d", "f", recursive=True)
    assert fs.cat(["a", "z", "d/b", "f/b"]) == {"a": b"new", "z": b"old", "d/b": b"new", "f/b": b"old"}
    assert fs.find("f") == ["f/b", "f/e/c"]


def test_moves_go_where_fsspec_says(fs: BlobFileSystem) -> None:
    fs.pipe({"s/a": b"1", "d/b": b"2", "d/e/c": b"3"})
    fs.mv("s/a", "s/a")
    fs.mv("s/a", "d/")
    assert fs.find("") == ["d/a", "d/b", "d/e/c"]
    with pytest.raises(IsADirectoryError, match="recursive=True"):
        fs.mv("d", "g")
    with pytest.raises(FileNotFoundError):
        fs.mv("missing", "g")
    fs.rename("pybk://d/*", "g/")
    assert fs.find("") == ["d/e/c", "g/a", "g/b"]
    fs.move("g", "h/i", recursive=True)
    assert fs.find("") == ["d/e/c", "h/i/a", "h/i/b"]
    fs.pipe({"d/f": b"4", "d/k": b"5"})
    fs.mv("d", "j", recursive=True, maxdepth=1)  # what lies deeper stays
    assert fs.find("") == ["d/e/c", "h/i/a", "h/i/b", "j/f", "j/k"]
