"""What a Python programmer expects of values, handles and the command, without reading the docs."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk import __version__
from pybk.errors import ClosedError, LedgerClosedError, ReadRangeError, UsageError
from pybk.ledger import CORE
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.registration import BookieRegistration
from tests.paths import ROOT
from tests.storage.real_store import numbered, open_quick, stop_syncing


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data") as manager:
        yield manager


# ---- values ----------------------------------------------------------------------------------------------------------


def pickled(value: Any) -> Any:
    """Send a value through the pickle that ``multiprocessing`` uses."""
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(value)))


COPIES: list[Callable[[Any], Any]] = [pickled, copy.copy, copy.deepcopy]


@pytest.mark.parametrize("duplicate", COPIES, ids=["pickle", "copy", "deepcopy"])
def test_the_future_of_an_append_says_what_to_send_instead(
    manager: LedgerManager, duplicate: Callable[[Any], Any]
) -> None:
    with manager.create_ledger(password=b"p") as writer, pytest.raises(TypeError, match=r"send its result\(\)"):
        duplicate(writer.append_async(b"x"))


@pytest.mark.parametrize("duplicate", COPIES, ids=["pickle", "copy", "deepcopy"])
def test_metadata_and_metrics_can_be_pickled_and_copied(
    manager: LedgerManager, duplicate: Callable[[Any], Any]
) -> None:
    with manager.create_ledger(custom_metadata={"app": b"shop"}, ledger_type="orders", insecure=True) as writer:
        writer.append(b"x")
    metadata = manager.ledger_metadata(writer.ledger_id)
    metrics = manager.metrics()
    registration = BookieRegistration(bookie=Bookie("b0", bytes(16)), addresses=("tcp://127.0.0.1:1",))
    for value in (metadata, metrics, registration, manager.health()):
        assert duplicate(value) == value
    with pytest.raises(TypeError):
        duplicate(metadata).custom_metadata["app"] = b"another"
    with pytest.raises(TypeError):
        duplicate(metrics).counters.clear()


def test_metadata_and_metrics_become_plain_values(manager: LedgerManager) -> None:
    with manager.create_ledger(custom_metadata={"app": b"shop"}, insecure=True) as writer:
        writer.append(b"x")
    plain = dataclasses.asdict(manager.ledger_metadata(writer.ledger_id))
    assert plain["custom_metadata"] == {"app": b"shop"}
    assert LedgerMetadata(**plain) == manager.ledger_metadata(writer.ledger_id)
    metrics = manager.metrics()
    assert dataclasses.asdict(metrics)["counters"] == metrics.counters


def test_numpy_integers_are_ids(manager: LedgerManager) -> None:
    writer = manager.create_ledger(ledger_id=np.int64(7), insecure=True)  # type: ignore[arg-type]  # as users do
    assert writer.ledger_id == 7
    assert type(writer.ledger_id) is int
    assert writer.append(b"x", entry_id=np.int32(0)) == 0  # type: ignore[arg-type]
    writer.close()
    assert manager.ledger_metadata(np.uint64(7)).ledger_id == 7  # type: ignore[arg-type]
    with manager.open_ledger(np.int16(7)) as reader:  # type: ignore[arg-type]
        assert [entry.payload for entry in reader.read(np.int64(0), np.int64(0))] == [b"x"]  # type: ignore[arg-type]
    for wrong in (True, 1.0, "7", np.float64(7.0)):
        with pytest.raises(UsageError):
            manager.open_ledger(wrong)  # type: ignore[arg-type]


# ---- readers and batches ---------------------------------------------------------------------------------------------


def test_a_reader_is_iterated_up_to_what_is_confirmed(manager: LedgerManager) -> None:
    with manager.create_ledger(insecure=True) as writer:
        reader = manager.open_ledger(writer.ledger_id, recover=False)
        assert list(reader) == []
        writer.append_many(numbered(5))
        reader.read_last_add_confirmed()
        assert [entry.payload for entry in reader] == numbered(5)
        assert [entry.payload for entry in reader] == numbered(5), "iterating again begins again"
        assert list(reader.read()) == list(reader)
        assert [entry.payload for entry in reader.read(3)] == numbered(2, 3)
        assert list(reader.read(5)) == []
        with pytest.raises(ReadRangeError):
            reader.read(6)

        async def main() -> list[bytes]:
            assert [entry.payload async for entry in reader.read_async(3)] == numbered(2, 3)
            return [entry.payload async for entry in reader]

        assert asyncio.run(main()) == numbered(5)


def test_slices_of_a_batch_are_batches(manager: LedgerManager) -> None:
    with manager.create_ledger(insecure=True) as writer:
        writer.append_many(numbered(10))
    batch = manager.open_ledger(writer.ledger_id).read_batch(0)
    for part in (slice(2, 5), slice(None), slice(-3, None), slice(None, None, 3), slice(4, 4), slice(None, None, -1)):
        piece = batch[part]
        assert isinstance(piece, EntryBatch)
        assert list(piece) == list(batch)[part]
        assert piece.buffer is batch.buffer, "a slice copies nothing"
    assert batch[np.int64(3)].payload == b"entry 3"


def test_reading_an_empty_ledger_says_that_it_is_empty(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    for read in (lambda: reader.read(0, 0), lambda: reader.read_batch(0), lambda: reader.read(2, 5)):
        with pytest.raises(ReadRangeError, match=r"has no confirmed entry yet.*read_last_add_confirmed"):
            read()
    with pytest.raises(ReadRangeError, match="has no confirmed entry yet"):
        reader.read_unconfirmed(0, 0)
    writer.close()
    for read in (lambda: reader.read(0, 0), lambda: reader.read_batch(0), lambda: reader.read_unconfirmed(0, 0)):
        with pytest.raises(ReadRangeError, match="is closed and has no entries"):
            read()


# ---- futures ---------------------------------------------------------------------------------------------------------


def test_futures_show_their_entries_and_state(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = manager.create_ledger(insecure=True)
    advanced = manager.create_ledger(ledger_id=9, insecure=True)
    early = advanced.append_async(b"x", entry_id=4)
    assert repr(early) == "<AdvancedFuture entry 4, pending>"
    go = stop_syncing(monkeypatch)
    one, many, none = writer.append_async(b"x"), writer.append_many_async([b"y", b"z"]), writer.append_many_async([])
    assert repr(one) == "<AppendFuture entry 0, pending>"
    assert repr(many) == "<AppendFuture entries 1 to 2, pending>"
    go.set()
    many.result()
    assert repr(one) == "<AppendFuture entry 0, done>"
    assert repr(none) == "<AppendFuture no entries, done>"
    advanced.close()
    assert isinstance(early.exception(), LedgerClosedError)
    assert repr(early) == "<AdvancedFuture entry 4, failed: LedgerClosedError>"


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, ForkingPickler.dumps])
def test_handles_are_not_copied_and_say_what_to_do_instead(manager: LedgerManager, call: Callable[[Any], Any]) -> None:
    writer = manager.create_ledger(insecure=True)
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    for handle, remedy in (
        (manager, "share it between threads, and open another one in another process, with read_only=True"),
        (writer, "share it between threads, and create a ledger for each process"),
        (reader, r"share it between threads, and open the ledger again in another process.* open_ledger\(0, "),
    ):
        with pytest.raises(TypeError, match=f"a {type(handle).__name__} can be neither copied nor pickled: {remedy}"):
            call(handle)
    writer.append(b"x")
    assert reader.read_last_add_confirmed() == 0


def test_an_opening_says_what_it_opens(manager: LedgerManager, tmp_path: Path) -> None:
    async def main() -> None:
        opening = LedgerManager.open_async(tmp_path / "data", read_only=True)
        assert repr(opening) == f"<Opening LedgerManager.open_async({tmp_path / 'data'!r}), not awaited>"
        await (await opening).close_async()
        assert repr(opening) == f"<Opening LedgerManager.open_async({tmp_path / 'data'!r}), awaited>"
        creating = manager.create_ledger_async(insecure=True)
        assert repr(creating) == "<Opening LedgerManager.create_ledger_async(), not awaited>"
        await (await creating).close_async()
        reading = manager.open_ledger_async(0)
        assert repr(reading) == "<Opening LedgerManager.open_ledger_async(0), not awaited>"
        await (await reading).close_async()

    asyncio.run(main())


def forget(_: object) -> None:
    """Drop the last reference to something."""


def test_a_forgotten_await_warns(manager: LedgerManager) -> None:
    async def main() -> None:
        with pytest.warns(RuntimeWarning, match=r"create_ledger_async.* was never awaited"):
            forget(manager.create_ledger_async(insecure=True))
        with pytest.warns(RuntimeWarning, match=r"open_ledger_async.* was never awaited"):
            forget(manager.open_ledger_async(0))
        async with manager.create_ledger_async(insecure=True):
            pass
        await (await manager.create_ledger_async(insecure=True)).close_async()

    asyncio.run(main())
    assert list(manager.list_ledgers()) == [0, 1], "what nobody awaited was done all the same"


# ---- after closing, and on the command line --------------------------------------------------------------------------


def test_metrics_can_be_read_after_closing(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        manager.create_ledger(insecure=True).append(b"x")
        before = manager.metrics()
    assert manager.metrics() == before


@pytest.mark.parametrize("arguments", [["-m", "pybk", "--version"], ["-m", "pybk.admin", "--version"]])
def test_the_command_names_its_version(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    kind = "in pure Python" if CORE is None else "with the native core"
    assert done.stdout == f"pybk {__version__}, {kind}\n"


def test_a_listing_past_a_close_names_the_manager(manager: LedgerManager) -> None:
    listings: list[Iterator[object]] = [manager.ledgers(), manager.list_ledgers()]
    manager.close()
    for listing in listings:
        with pytest.raises(ClosedError, match=r"the manager of .* is closed; open it again"):
            next(listing)
