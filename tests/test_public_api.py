"""The names that applications use, and what they must look like."""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, get_args, get_origin

import numpy as np
import numpy.typing as npt
import pytest

from pybk import (
    CookieError,
    DigestType,
    LedgerManager,
    LedgerReader,
    LedgerType,
    LedgerWriter,
    Passwords,
    PybkError,
    ReadFlag,
    StorageHint,
    UsageError,
    WriteFlag,
    rebuild_index,
    rebuild_index_async,
    verify,
    verify_async,
)
from pybk.deferral import homes_of
from tests.paths import ROOT
from tests.sampling import sample
from tests.storage.real_store import open_quick
from tests.waiting import PROCESS_S

PYBK = importlib.import_module("pybk")
EXPORTED: list[str] = PYBK.__all__
PUBLIC: dict[str, Any] = {name: getattr(PYBK, name) for name in dir(PYBK) if name[0] != "_"}


def test_exported_names_exist_and_nothing_else_shows() -> None:
    defined = importlib.import_module("pybk.public")
    shown = {name for name, value in vars(defined).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert sorted(shown) == sorted(PUBLIC) == EXPORTED, "all of them, each once, in alphabetical order"
    assert set(vars(PYBK)) >= set(EXPORTED), "each is found once, and then an attribute"
    assert inspect.ismodule(PYBK.manager), "and modules of the package, as attributes"
    with pytest.raises(AttributeError, match="has no attribute 'Ledger'"):
        _ = PYBK.Ledger


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (PYBK, "LogWriterOptions", "give the options as keyword arguments, as Log.writer takes them"),
        (PYBK, "WalOptions", "give the options as keyword arguments, as WriteAheadLog.open takes them"),
        (PYBK.Subscription, "clear", "use skip_all()"),
        (PYBK.LedgerType, "is_bookie_record", "call pybk.flags.is_bookie_record(ledger_type)"),
        (PYBK.Secret, "read_next", "read() returns the secret"),
        (PYBK.PlacementSettings, "default_of", "PlacementSettings() has the defaults"),
        (PYBK.RepairSettings, "default_of", "RepairSettings() has the defaults"),
        (PYBK.ScrubSettings, "default_of", "ScrubSettings() has the defaults"),
    ],
)
def test_the_error_of_a_name_that_was_removed_names_its_replacement(owner: Any, name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"{owner.__name__}.{name} is gone; {instead}")):
        getattr(owner, name)
    assert not hasattr(owner, name)
    if owner in (PYBK.Secret, PYBK.ScrubSettings):
        assert not hasattr(owner(), name), "nor do its objects have it"


def test_the_first_use_of_a_name_imports_the_module_that_the_type_checker_sees() -> None:
    tree = ast.parse((ROOT / "src" / "pybk" / "public.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    package = ast.parse((ROOT / "src" / "pybk" / "__init__.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in ast.walk(package)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NAMES"
    ]
    homes = homes_of(ast.literal_eval(table))
    assert {alias.name: node.module for node in imports for alias in node.names} == {
        name: f"pybk.{home}" for name, home in homes.items()
    }


ALL_AT_ONCE = """
import threading, pybk
wrong = []

def use(name):
    try:
        getattr(pybk, name)
    except Exception as error:
        wrong.append((name, error))

threads = [threading.Thread(target=use, args=(name,)) for name in pybk.__all__]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(wrong)
"""


def test_names_can_be_used_first_by_many_threads_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_error_is_exported() -> None:
    errors = importlib.import_module("pybk.errors")
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, PybkError)}
    assert defined <= set(EXPORTED)


@pytest.mark.parametrize("name", EXPORTED)
def test_public_things_are_documented(name: str) -> None:
    thing = PUBLIC[name]
    assert inspect.getdoc(thing) or get_origin(thing) is Literal  # aliases of literals have no docstring
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property | classmethod)
            ):
                assert inspect.getdoc(getattr(thing, attribute, value)), f"{name}.{attribute} has no docstring"


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (LedgerManager, ["open", "close", "create_ledger", "open_ledger", "delete_ledger", "list_ledgers"]),
        (LedgerManager, ["ledger_metadata", "move_ledger", "move_ledgers"]),
        (LedgerWriter, ["append", "append_many", "force", "close"]),
        (LedgerReader, ["read", "read_batch", "read_unconfirmed", "read_last_add_confirmed", "follow", "close"]),
    ],
)
def test_calls_have_asyncio_forms(owner: type, names: list[str]) -> None:
    for name in names:
        assert callable(getattr(owner, name))
        assert callable(getattr(owner, f"{name}_async", None)), f"{owner.__name__}.{name}_async"


def test_flags_are_numbers_and_strict() -> None:
    assert (int(WriteFlag.NONE), int(WriteFlag.DEFERRED_FORCE)) == (0, 1)
    assert (int(ReadFlag.NONE), int(ReadFlag.DONT_CACHE)) == (0, 1)
    for flags in (WriteFlag, ReadFlag):
        assert flags(1) | flags(0) == flags(1)
        with pytest.raises(ValueError, match=r"0x6|6"):
            flags(7)
    assert {hint.name for hint in StorageHint} == {"NVME", "SSD", "HDD"}
    assert LedgerType("orders") == "orders"
    assert {kind.name: int(kind) for kind in DigestType} == {"CRC32C": 3, "NONE": 4, "HMAC_SHA256": 100, "XXH3": 101}


def test_the_api_of_one_ledger(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "data") as manager:
        with manager.create_ledger(password=b"p", ledger_type="orders", custom_metadata={"app": b"shop"}) as writer:
            assert writer.append(b"first") == 0
            future = writer.append_async(bytearray(b"second"))
            assert future.result() == 1
            assert writer.append_many([b"a", memoryview(b"b")]) == range(2, 4)
            assert (writer.last_add_confirmed, writer.last_add_pushed, writer.length) == (3, 3, 13)
        with manager.open_ledger(writer.ledger_id, password=b"p") as reader:
            entries = list(reader.read(0, 3))
            assert [entry.payload for entry in entries] == [b"first", b"second", b"a", b"b"]
            assert [entry.entry_id for entry in entries] == [0, 1, 2, 3]
            assert {entry.ledger_id for entry in entries} == {writer.ledger_id}
            batch = reader.read_batch(0, max_bytes=8 << 20)
            assert len(batch) == len(batch.entry_ids) == len(batch.offsets) == 4
        metadata = manager.ledger_metadata(writer.ledger_id)
        assert (metadata.ledger_type, metadata.custom_metadata["app"]) == ("orders", b"shop")
        assert (metadata.last_entry_id, metadata.length) == (3, 13)
        assert list(manager.list_ledgers("orders")) == [writer.ledger_id]
        assert list(manager.list_ledgers("other")) == []
        assert manager.health().state == "ok"


def test_the_api_in_asyncio(tmp_path: Path) -> None:
    async def run() -> list[bytes]:
        async with LedgerManager.open_async(tmp_path / "data") as manager:
            async with manager.create_ledger_async(password=b"p") as writer:
                assert await asyncio.gather(*(writer.append_async(b"%d" % i) for i in range(3))) == [0, 1, 2]
                assert await writer.append_many_async([b"x", b"y"]) == range(3, 5)
            async with manager.open_ledger_async(writer.ledger_id, password=b"p") as reader:
                assert len(await reader.read_batch_async(0)) == 5
                assert [entry.entry_id async for entry in reader.follow_async()] == [0, 1, 2, 3, 4]
                return [entry.payload async for entry in reader.read_async(0, 4)]

    assert asyncio.run(run()) == [b"0", b"1", b"2", b"x", b"y"]


def test_importing_is_silent_and_lean() -> None:
    """No handlers, no output, and none of the modules that only extras, commands or repairs need."""
    program = (
        "import logging, sys, pybk\n"
        "late = {'tqdm', 'tabulate', 'zstandard', 'prometheus_client', 'pyarrow', 'zmq'}\n"
        "late &= set(sys.modules)\n"
        "assert not late, late\n"
        "assert not logging.getLogger().handlers\n"
        "assert not [h for h in logging.getLogger('pybk').handlers if not isinstance(h, logging.NullHandler)]\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.sampled
def test_every_module_can_be_imported_first() -> None:
    """No module relies on another one having been imported before it."""
    packages = ("pybk", "pybk.threads", "pybk.ledger", "pybk.backend", "pybk.manager", "pybk.operations")
    names = [
        module.name
        for package in packages
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    ]
    assert "pybk.manager.ledger_manager" in names
    program = "import sys\n" + "\n".join(
        f"for name in [m for m in sys.modules if m.split('.')[0] == 'pybk']: del sys.modules[name]\nimport {name}"
        for name in sample("imported first", names, 3)
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert run.returncode == 0, run.stderr


def test_version_and_changelog_agree() -> None:
    version = importlib.import_module("pybk").__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## (Unreleased|{re.escape(version)})\b", text, re.MULTILINE)
    assert (ROOT / "src" / "pybk" / "py.typed").exists()


def test_verify_and_rebuild_index_are_functions(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager, manager.create_ledger(password=b"p") as writer:
        writer.append_many([b"a", b"b"])
    seen: list[tuple[int, int]] = []
    found = verify(tmp_path, password=b"p", progress=lambda done, total: seen.append((done, total)))
    assert (found.problems, found.ledgers, found.entries, found.complete) == ((), 1, 2, True)
    assert seen
    assert not verify(tmp_path).complete
    assert asyncio.run(verify_async(tmp_path, passwords=Passwords(ledgers={0: b"p"}))) == found
    assert rebuild_index(tmp_path).made
    assert asyncio.run(rebuild_index_async(tmp_path)).lost == ()
    with pytest.raises(UsageError, match="both given"):
        verify(tmp_path, password=b"p", passwords=Passwords())
    for call in (verify, rebuild_index):
        with pytest.raises(UsageError, match="is a URL"):
            call("lmdb:///metadata")
        with pytest.raises(CookieError):
            call(tmp_path / "nothing")


def test_the_directory_of_a_tier_is_refused_and_the_error_names_the_store(tmp_path: Path) -> None:
    path, hdd = tmp_path / "store", tmp_path / "hdd"
    LedgerManager.open(path, tiers={StorageHint.HDD: str(hdd)}).close()
    for repair in (verify, rebuild_index):
        with pytest.raises(CookieError, match=f"of tier nvme of store .*give the store's directory: {path}$"):
            repair(path / "nvme")
        with pytest.raises(
            CookieError, match=r"of tier hdd of store .*give the store's directory, which has the files"
        ):
            repair(hdd)


INTERNAL_CONSTRUCTORS = {
    "AppendFuture",
    "AtomicGroup",
    "BlobStore",
    "BlobUpload",
    "CheckpointWriter",
    "DetachedWriter",
    "LedgerManager",
    "LedgerReader",
    "LedgerWriter",
    "Log",
    "LogReader",
    "LogWriter",
    "Namespace",
    "Opening",
    "RecordFuture",
    "RemoteConsumer",
    "Subscription",
    "Transaction",
    "WalCheckpoint",
    "WalFollower",
    "WriteAheadLog",
}
"""Classes whose objects pybk makes: applications do not call them."""


def parts_of(annotation: Any) -> Iterator[type]:
    """Yield the classes that an annotation is made of."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for part in (get_origin(annotation), *get_args(annotation)):
        if part is not None and part is not annotation:
            yield from parts_of(part)


def own_aliases(text: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in an annotation that are defined in pybk and not exported: aliases of unions and the like.

    An alias is the object that it stands for, so only its name shows that pybk defined it.
    """
    for node in ast.walk(ast.parse(text, mode="eval")):
        if not isinstance(node, ast.Name) or node.id in EXPORTED or hasattr(builtins, node.id):
            continue
        value = known[node.id]
        elsewhere = vars(sys.modules.get(getattr(value, "__module__", ""), builtins))
        is_foreign = inspect.isclass(value) or inspect.ismodule(value) or isinstance(value, TypeVar | SimpleNamespace)
        if not is_foreign and elsewhere.get(node.id) is not value:
            yield node.id


def test_aliases_are_found_by_name() -> None:
    known = {"Alias": int | str, "State": Literal["a"], "Numbers": npt.NDArray[np.int64], "Any": Any, "np": np}
    assert list(own_aliases("dict[Alias, list[State]] | Numbers", known)) == ["Numbers", "Alias", "State"]
    assert list(own_aliases("dict[Any, np.int64]", known)) == []


def signatures_of(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public functions of an exported thing, and the thing itself if it has annotated attributes."""
    yield name, thing
    if not inspect.isclass(thing):
        return
    for attribute, value in vars(thing).items():
        if attribute == "__init__" and name not in INTERNAL_CONSTRUCTORS:
            yield f"{name}()", value
        if attribute.startswith("_"):
            continue
        found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isfunction(found):
            yield f"{name}.{attribute}", found


def test_every_type_of_a_public_signature_is_exported() -> None:
    exported = {id(value) for value in PUBLIC.values()}
    # Modules import these for the type checker alone.
    names = {**PUBLIC, "np": np, "npt": npt, "pa": SimpleNamespace(RecordBatch=object)}
    missing = set()
    for exported_name in EXPORTED:
        for where, thing in signatures_of(exported_name, PUBLIC[exported_name]):
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            module = vars(sys.modules[thing.__module__])
            hints = inspect.get_annotations(thing)
            for text in hints.values():
                annotation = eval(text, {**names, **module}) if isinstance(text, str) else text
                if isinstance(text, str):
                    missing |= {(where, name) for name in own_aliases(text, {**names, **module})}
                missing |= {
                    (where, part.__qualname__)
                    for part in parts_of(annotation)
                    if part.__module__.startswith("pybk.") and id(part) not in exported
                }
    assert not missing


def test_wrong_arguments_of_repair_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it takes pybk"):
        verify(tmp_path, passwords={0: b"p"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="it takes True or False"):
        rebuild_index(tmp_path, accept_loss="no")  # type: ignore[arg-type]
    file = tmp_path / "file"
    file.touch()
    for repair in (verify, rebuild_index):
        with pytest.raises(UsageError, match="path is empty"):
            repair("")
        with pytest.raises(CookieError):
            repair(file)
