"""Named records: compare-and-set is durable, survives stops, checkpoints, new catalogs and a new index."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from pybk.errors import IllegalOperationError, UsageError, VersionConflictError
from pybk.feature_level import FeatureLevel
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.format.index_rows import NamedRow
from pybk.storage.named_records import NAME_BYTES_MAX, VALUE_BYTES_MAX
from pybk.storage.repair.rebuild import rebuild_index
from pybk.storage.repair.verify import verify_store
from tests.internals import store_of, store_view_of
from tests.interrupting import interrupted_at
from tests.simdisk import SimFileSystem, stopping
from tests.storage.real_store import open_quick
from tests.storage.store_harness import abandon, open_world

Values = dict[str, bytes | None]


def put(manager: LedgerManager, name: str, value: bytes | None) -> int:
    """Set a record, whatever it was."""
    store = store_of(manager)
    row = store.named.get(name)
    return store.named.compare_and_set(name, row and row.version, value, level=store.feature_level)


def values(manager: LedgerManager) -> Values:
    """Return all records."""
    return {row.name: row.value for row in store_view_of(manager).named.all()}


def test_a_record_is_changed_only_from_the_version_that_it_has(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        named, level = store_of(manager).named, FeatureLevel.SEALS
        first = named.compare_and_set("a", None, b"1", level=level)
        with pytest.raises(VersionConflictError) as raised:
            named.compare_and_set("a", None, b"2", level=level)
        assert raised.value.version == first
        second = named.compare_and_set("a", first, b"2", level=level)
        assert second > first
        removed = named.compare_and_set("a", second, None, level=level)
        assert named.get("a") is None
        with pytest.raises(VersionConflictError):
            named.compare_and_set("a", removed, b"3", level=level)
        assert named.compare_and_set("a", None, b"", level=level) > removed
        row = named.get("a")
        assert row is not None
        assert row.value == b""


def test_a_callback_that_raises_ends_neither_the_store_nor_the_calls_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[str | None] = []

    def failing(*_: object) -> None:
        raise RuntimeError("Event loop is closed")

    with open_quick(tmp_path / "store") as manager:
        named = store_of(manager).named
        for callback in (failing, lambda: called.append("record")):
            named.watch("group/a", callback)
        for group_callback in (failing, called.append):
            named.watch_group("group", group_callback)
        put(manager, "group/a", b"1")
        put(manager, "group/a", b"2")
        assert called == ["record", "group/a"] * 2
        assert caplog.text.count("the callback of a watch of a named record failed") == 4
        manager.create_ledger(insecure=True).append(b"x")
    with open_quick(tmp_path / "store") as manager:
        assert values(manager) == {"group/a": b"2"}


def test_records_are_listed_by_prefix(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        for name in ("b/2", "a", "b/1", "c"):
            put(manager, name, name.encode())
        manager.checkpoint()
        put(manager, "b/3", b"b/3")
        put(manager, "b/1", None)
        assert [row.name for row in store_of(manager).named.all("b/")] == ["b/2", "b/3"]
        assert list(values(manager)) == ["a", "b/2", "b/3", "c"]


def test_limits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_quick(tmp_path / "store") as manager:
        assert put(manager, "n" * NAME_BYTES_MAX, bytes(VALUE_BYTES_MAX))
        for name, value in (("", b""), ("n" * (NAME_BYTES_MAX + 1), b""), ("\ud800", b"")):
            with pytest.raises(UsageError, match="UTF-8"):
                put(manager, name, value)
        with pytest.raises(UsageError, match=str(VALUE_BYTES_MAX)):
            put(manager, "a", bytes(VALUE_BYTES_MAX + 1))
        with pytest.raises(IllegalOperationError, match="upgrade"):
            store_of(manager).named.compare_and_set("a", None, b"", level=FeatureLevel.BASE)
        manager.checkpoint()
        with open_quick(tmp_path / "store", read_only=True) as reader:
            assert values(reader) == values(manager)
            with pytest.raises(IllegalOperationError, match="read only"):
                store_view_of(reader).named.compare_and_set("a", None, b"", level=FeatureLevel.SEALS)


def test_of_many_threads_one_wins_each_version(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        named, level = store_of(manager).named, FeatureLevel.SEALS
        put(manager, "count", b"0")

        def count() -> None:
            done = 0
            while done < 20:
                row = named.get("count")
                assert row is not None
                assert row.value is not None
                try:
                    named.compare_and_set("count", row.version, b"%d" % (int(row.value) + 1), level=level)
                except VersionConflictError:
                    continue
                done += 1

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert values(manager) == {"count": b"80"}


def test_a_new_index_and_the_checks_know_the_records(tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        put(manager, "kept", b"value")
        put(manager, "gone", b"value")
        manager.checkpoint()
        put(manager, "gone", None)
        manager.checkpoint()
        put(manager, "late", b"in the log")
    shutil.rmtree(tmp_path / "store" / "ssd" / "index")
    assert rebuild_index(str(tmp_path / "store")).made
    assert not verify_store(str(tmp_path / "store")).problems
    with open_quick(tmp_path / "store") as manager:
        assert values(manager) == {"kept": b"value", "late": b"in the log"}


STEPS: list[tuple[str, bytes | None] | None] = [
    *[("a", b"1"), ("b", b"1" * 5000), None, ("a", b"2"), ("c", b"1"), ("b", None), None],
    *[("b", b"2"), ("a", None), None, ("d", b"1")],
]  # fmt: skip
"""Changes in order; None is a checkpoint."""


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("power_loss", [False, True])
def test_a_stop_at_any_operation_loses_no_record(power_loss: bool) -> None:
    fs = SimFileSystem(0)
    manager = open_world(fs)
    start = len(fs.operations)
    run(manager, {})
    manager.close()
    for operation in range(len(fs.operations) - start):
        fs = SimFileSystem(operation)
        manager = open_world(fs)
        fs.crash_at(operation)
        known: Values = {}
        trying: bool | None = None
        with stopping(fs):
            trying = run(manager, known)
        abandon(manager)
        manager = open_world(fs.crash() if power_loss else fs.kill())
        check(manager, known)
        manager.checkpoint()
        check(manager, known)
        manager.close()
        assert trying is None or operation


def run(manager: LedgerManager, known: Values) -> bool:
    """Do all steps; ``known`` has what was acknowledged, and under ``?`` the name that may have its next value."""
    for step in STEPS:
        if step is None:
            manager.checkpoint()
            continue
        known["?"] = step[0].encode()
        put(manager, *step)
        known[step[0]] = step[1]
        known["?"] = None
    return True


def check(manager: LedgerManager, known: Values) -> None:
    """Assert that each record is as acknowledged, or as the step that was under way was to make it."""
    found = values(manager)
    trying = (known.get("?") or b"").decode()
    for name in {*known, *found} - {"?"}:
        if name != trying:
            assert found.get(name) == known.get(name)
    if trying:
        possible = {known.get(trying), *(step[1] for step in STEPS if step is not None and step[0] == trying)}
        assert found.get(trying) in possible


@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_of_a_change_lets_no_other_begin_from_its_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rooms = (
        "group_commit.py",
        "storage/named_records.py",
        "storage/log/log.py",
        "storage/log/commit.py",
    )
    manager = open_world(SimFileSystem(1))
    named, level = store_of(manager).named, FeatureLevel.SEALS
    applied: dict[str, set[bytes | None]] = {}
    changed = named.changed

    def note(row: NamedRow) -> None:
        applied.setdefault(row.name, set()).add(row.value)
        changed(row)

    monkeypatch.setattr(named, "changed", note)
    line = conflicts = 0
    fired = True
    while fired:
        name = f"record {line}"
        fired = interrupted_at(line, rooms, partial(named.compare_and_set, name, None, b"1", level=level))
        try:
            named.compare_and_set(name, None, b"2", level=level)
        except VersionConflictError:
            conflicts += 1
        row = named.get(name)
        assert row is not None
        assert applied[name] == {row.value}, line
        line += 1
    assert line > 50
    assert 10 < conflicts < line - 10
    manager.close()
