"""Each argument of the public calls that is True or False refuses everything else, such as "no", which is true."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk import BlobStore, ClusterAdmin, LedgerManager, LedgerType, Log, Namespace, UsageError, WriteAheadLog
from tests.cluster.inside import inside
from tests.storage.real_store import open_quick

PYBK: Any = importlib.import_module("pybk")

SETTINGS = ("PlacementSettings", "RepairSettings", "Retention", "Secret", "StoreConfig")
"""The public classes with flags that applications make themselves."""

WHERE_IT_WAITS = ("append", "append_async", "append_many", "append_many_async")
"""Calls whose ``wait`` is looked at only by those that have to wait, because a look costs a part of an append."""


def public() -> Iterator[tuple[str, str]]:
    """Yield the public names, and those of the methods of public classes; ``x_async`` takes what ``x`` takes."""
    for name in PYBK.__all__:
        found = getattr(PYBK, name)
        if not inspect.isclass(found):
            yield name, ""
        elif name in SETTINGS:
            yield name, "__init__"
        else:
            yield from ((name, each) for each in vars(found) if not each.startswith("_"))
            yield from ((name, each) for base in found.__mro__[1:] for each in vars(base) if not each.startswith("_"))


def flags() -> Iterator[tuple[str, str, str]]:
    """Yield class, method and argument of all flags; a function has no method."""
    for name, method in sorted(set(public())):
        found = inspect.getattr_static(getattr(PYBK, name), method) if method else getattr(PYBK, name)
        call = getattr(found, "__func__", found)
        if inspect.isfunction(call) and not method.endswith("_async") and not name.endswith("_async"):
            for each in inspect.signature(call).parameters.values():
                if str(each.annotation) in ("bool", "bool | None") and method not in WHERE_IT_WAITS:
                    yield name, method, each.name


def owner_of(name: str, method: str, manager: LedgerManager) -> Any:
    """Return what a public method is called on: an object, or the class if it makes one."""
    if method in ("open", "rebuild", "sweep", "read") or (name, method) in DELETES:
        return getattr(PYBK, name)
    made: dict[str, Callable[[], Any]] = {
        "BlobStore": lambda: BlobStore.open(manager, insecure=True),
        "LedgerManager": lambda: manager,
        "Log": lambda: Log.open(manager, "log", insecure=True),
        "Namespace": lambda: Namespace.open(manager, insecure=True),
        "WriteAheadLog": lambda: WriteAheadLog.open(manager, "wal", insecure=True),
    }
    return made[name]()


DELETES = [("Log", "delete"), ("WriteAheadLog", "delete")]
"""Methods of classes, without an object."""


def given_to(call: Callable[..., Any], manager: LedgerManager, directory: Path) -> dict[str, Any]:
    """Return arguments that a call needs, and that are right until it does anything."""
    values: dict[str, Any] = {
        "data": b"data",
        "directories": [directory / "directory"],
        "keep": 1,
        "ledger": 0,
        "ledger_id": 0,
        "ledger_type": LedgerType.METADATA,
        "manager": manager,
        "name": "name",
        "source": "source",
        "start": 0,
        "target": "target",
        "url": f"lmdb://{directory}/metadata",
    }
    parameters = inspect.signature(call).parameters
    needed = [name for name, each in parameters.items() if each.default is each.empty and name != "cluster"]
    found = {name: values.get(name, directory / name) for name in needed}
    return {**found, "insecure": True} if "insecure" in parameters else found


@pytest.mark.parametrize(("name", "method", "flag"), list(flags()))
def test_a_flag_takes_true_or_false_alone(name: str, method: str, flag: str, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        manager.create_ledger(ledger_id=0, insecure=True).close()
        if name == "BlobStore" and method != "open":
            BlobStore.open(manager, insecure=True).put("source", b"data")
        if name == "ClusterAdmin":
            with inside(tmp_path / "cluster", count=1) as cluster:
                refuse(getattr(ClusterAdmin(cluster.connect()), method), flag, {})
            return
        call = getattr(PYBK, name)
        if method not in ("", "__init__"):
            call = getattr(owner_of(name, method, manager), method)
        refuse(call, flag, given_to(call, manager, tmp_path))


def refuse(call: Callable[..., Any], flag: str, given: dict[str, Any]) -> None:
    """Expect that a call refuses what is neither True nor False as the value of a flag."""
    for bad in ("no", 0, 1.0):
        with pytest.raises(UsageError, match=rf"{flag} is {bad!r}; it takes True or False"):
            call(**{**given, flag: bad})


def test_flags_are_found() -> None:
    """The number is no less than the calls had when this was written."""
    found = list(flags())
    assert len(found) >= 50
    assert {("Log", "truncate", "force"), ("back_up", "", "dry_run"), ("StoreConfig", "__init__", "background")} <= set(
        found
    )
