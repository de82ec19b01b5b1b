"""What can never work is refused as a UsageError that names it, whatever its type is."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk import BlobStore, Log, Namespace, PybkError, RemoteConsumer, WriteAheadLog
from pybk.config import StoreConfig, TierPolicy
from pybk.credentials import Passwords
from pybk.errors import IllegalOperationError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.manager.ledger_writer import LedgerWriter
from pybk.operations.store_repair import rebuild_index, verify
from pybk.streams.log_settings import LogSettings
from tests.internals import descriptor_of
from tests.storage.real_store import open_quick
from tests.waiting import WAIT_S

NO_NUMBERS: list[Any] = [None, 1.5, math.nan, "x", b"x", [], {}, (), object(), range(3)]


def id_of(value: object) -> str:
    """Return a test's id for a value; one with an address in it would differ between the workers of a test run."""
    return "object" if type(value) is object else repr(value)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data") as manager:
        yield manager


@pytest.fixture
def writer(manager: LedgerManager) -> LedgerWriter:
    writer = manager.create_ledger(insecure=True)
    writer.append_many([b"entry 0", b"entry 1"])
    return writer


@pytest.fixture
def reader(manager: LedgerManager, writer: LedgerWriter) -> LedgerReader:
    return manager.open_ledger(writer.ledger_id, recover=False)


async def drain(entries: AsyncIterator[Any]) -> None:
    async for _ in entries:
        pass


@pytest.mark.parametrize("bad", NO_NUMBERS, ids=id_of)
def test_entry_ids_are_whole_numbers(reader: LedgerReader, bad: Any) -> None:
    calls: list[Any] = [
        lambda: list(reader.read_unconfirmed(bad, 1)),
        lambda: list(reader.read_unconfirmed(0, bad)),
        lambda: asyncio.run(drain(reader.read_unconfirmed_async(bad, 1))),
        lambda: asyncio.run(drain(reader.read_async(bad, 1))),
        lambda: next(reader.follow(bad)),
        lambda: asyncio.run(drain(reader.follow_async(bad))),
    ]
    if bad is not None:  # as a last entry it stands for the last add confirmed
        calls.append(lambda: asyncio.run(drain(reader.read_async(0, bad))))
    for call in calls:
        with pytest.raises(UsageError, match="whole number"):
            call()


@pytest.mark.parametrize("bad", ["x", b"x", 2**70, math.inf, math.nan, []], ids=repr)
def test_timeouts_are_seconds(manager: LedgerManager, writer: LedgerWriter, bad: Any) -> None:
    advanced = manager.create_ledger(ledger_id=77, insecure=True)
    futures = [
        writer.append_async(b"x"),
        advanced.append_async(b"x", entry_id=0),
        advanced.append_async(b"", entry_id=2),
    ]
    for future in futures:
        for call in (future.result, future.exception):
            with pytest.raises(UsageError, match="timeout is"):
                call(bad)
    assert futures[0].result(WAIT_S) == 2


@pytest.mark.parametrize("bad", [True, 1.0, "1", None], ids=repr)
def test_ledger_ids_are_whole_numbers(manager: LedgerManager, writer: LedgerWriter, bad: Any) -> None:
    manager.create_ledger(insecure=True).close()
    for call in (
        manager.open_ledger,
        manager.ledger_metadata,
        manager.delete_ledger,
        lambda ledger_id: manager.move_ledger(ledger_id, StorageHint.HDD),
    ):
        with pytest.raises(UsageError, match="whole number"):
            call(bad)
    assert list(manager.list_ledgers()) == [0, 1]


@pytest.mark.parametrize("bad", [None, 1, "nvme", b"nvme", [1], [None], [[]]], ids=repr)
def test_storage_hints_are_a_set_of_hints(manager: LedgerManager, bad: Any) -> None:
    with pytest.raises(UsageError, match="storage_hints"):
        manager.create_ledger(storage_hints=bad, insecure=True)


NO_BYTES: list[Any] = [None, "x", 1.5, True, -1, 2**70]

SETTINGS: list[tuple[str, Any]] = [
    *((name, bad) for name in ("free_bytes_low", "free_bytes_ok", "log_file_bytes", "index_cache_bytes")
      for bad in NO_BYTES),
    *((name, 2**70) for name in ("max_entry_bytes", "max_outstanding_bytes", "cold_block_bytes", "ssd_block_bytes")),
    *(("fill_ratio", bad) for bad in [*NO_BYTES, math.nan]),
    *(("default_tier", bad) for bad in (None, "nvme")),
    *(("tier_policy", bad) for bad in (1, "x")),
    *(("background", bad) for bad in (None, 1)),
    *(("cold_compression", bad) for bad in ("zip", 1, b"zstd")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bad"), SETTINGS)
def test_settings_are_of_their_type_and_within_their_limits(name: str, bad: Any) -> None:
    with pytest.raises(UsageError, match=name):
        StoreConfig(**{name: bad})


@pytest.mark.parametrize("bad", [math.inf, math.nan, -1, "x", None])
def test_a_policy_takes_numbers(bad: Any) -> None:
    with pytest.raises(UsageError, match="min_age_seconds"):
        TierPolicy(min_age_seconds=bad)


BAD_TIERS: list[Any] = [
    -1, "x", b"x", [1], object(), {"hdd": "x"}, {StorageHint.HDD: None}, {StorageHint.HDD: 1}, {StorageHint.HDD: b"x"},
    {StorageHint.HDD: []}, {StorageHint.HDD: ["x", 5]}, {StorageHint.HDD: {"a": "b"}}, {StorageHint.HDD: "a\0b"},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_TIERS, ids=id_of)
def test_tiers_are_directories_by_hint(tmp_path: Path, bad: Any) -> None:
    with pytest.raises(UsageError, match="tiers"):
        LedgerManager.open(tmp_path / "new", tiers=bad)
    open_quick(tmp_path / "made").close()
    for read_only in (False, True):
        with pytest.raises(UsageError, match="tiers"):
            LedgerManager.open(tmp_path / "made", tiers=bad, read_only=read_only)


def test_paths_and_settings_are_what_they_should_be(tmp_path: Path) -> None:
    bad: Any
    for bad in ("\0", str(tmp_path / "a\0b"), b"\0", None, 1):
        with pytest.raises(UsageError, match="path is"):
            LedgerManager.open(bad)
    for bad in ("x", "", 0, {}, [1]):
        with pytest.raises(UsageError, match="config is"):
            LedgerManager.open(tmp_path / "data", config=bad)
    assert list(tmp_path.iterdir()) == []


OPENS: dict[str, Callable[[Any], object]] = {
    "manager": LedgerManager.open,
    "reader": lambda where: LedgerManager.open(where, read_only=True),
    "wal": lambda where: WriteAheadLog.open(where, insecure=True),
    "existing wal": lambda where: WriteAheadLog.open(where, insecure=True, create=False),
    "log": lambda where: Log.open(where, "orders", insecure=True),
    "namespace": lambda where: Namespace.open(where, insecure=True),
    "blobs": lambda where: BlobStore.open(where, insecure=True),
}


@pytest.mark.parametrize("name", OPENS)
def test_the_url_of_a_cluster_is_no_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("lmdb:///data/metadata", "zk://a:2181,b:2181/pybk", Path("lmdb:///data/metadata"), "s3://bucket"):
        with pytest.raises(UsageError, match=r"LedgerManager\.connect"):
            OPENS[name](url)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_may_have_a_colon_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("2026:01", "./lmdb:/x", tmp_path / "zk:" / "x"):
        LedgerManager.open(path).close()


def test_a_store_that_is_read_here_says_what_to_close(tmp_path: Path) -> None:
    LedgerManager.open(tmp_path).close()
    with LedgerManager.open(tmp_path, read_only=True):
        with pytest.raises(IllegalOperationError) as caught:
            LedgerManager.open(tmp_path)
        assert f"the store {tmp_path} is open for reading in this process" in str(caught.value)
        assert "promote()" in str(caught.value)
    LedgerManager.open(tmp_path).close()


@pytest.mark.parametrize("bad", [5, b"lmdb:///x", None, ["lmdb:///x"]], ids=id_of)
def test_a_metadata_url_is_a_string(bad: Any) -> None:
    with pytest.raises(UsageError, match="is not a string; use lmdb://"):
        LedgerManager.connect(bad)


def test_an_abandoned_follower_leaves_no_callback(reader: LedgerReader, writer: LedgerWriter) -> None:
    for _ in range(100):
        assert next(reader.follow()).payload == b"entry 0"
    assert descriptor_of(writer).advanced_callbacks == []

    async def follow() -> None:
        for _ in range(10):
            await anext(reader.follow_async())
        waiting = asyncio.create_task(drain(reader.follow_async(2)))
        while not descriptor_of(writer).advanced_callbacks:
            await asyncio.sleep(0.001)
        assert len(descriptor_of(writer).advanced_callbacks) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(follow())
    assert descriptor_of(writer).advanced_callbacks == []


# ---- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 5, 1.5, "5", b"5"], ids=repr)
def test_ledgers_to_move_are_given_as_ids(manager: LedgerManager, writer: LedgerWriter, bad: Any) -> None:
    with pytest.raises(UsageError, match=f"ledger_ids is {re.escape(repr(bad))}; it takes an iterable of ledger ids"):
        manager.move_ledgers(bad, StorageHint.HDD)
    assert manager.ledger_metadata(writer.ledger_id).tier is StorageHint.NVME


@pytest.mark.parametrize("bad", ["no", 0, 1, []], ids=repr)
def test_switches_take_only_true_or_false(
    manager: LedgerManager, writer: LedgerWriter, tmp_path: Path, bad: Any
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "insecure": lambda: manager.create_ledger(insecure=bad),
        "recover": lambda: manager.open_ledger(writer.ledger_id, recover=bad),
        "require_seal": lambda: manager.open_ledger(writer.ledger_id, require_seal=bad),
        "require": lambda: manager.check_seal(writer.ledger_id, require=bad),
        "read_only": lambda: LedgerManager.open(tmp_path / "data", read_only=bad),
        "accept_loss": lambda: rebuild_index(tmp_path / "data", accept_loss=bad),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=f"^{name} is {re.escape(repr(bad))}; it takes True or False"):
            call()
    assert manager.ledger_metadata(writer.ledger_id).state is LedgerState.OPEN


@pytest.mark.parametrize(("name", "bad"), [
    ("listen", 5), ("listen", b"tcp://127.0.0.1:*"), ("listen", [5]), ("advertise", None), ("advertise", 5),
    ("advertise", b"tcp://127.0.0.1:1"), ("rack", None), ("rack", b"/rack"), ("moved", "no"), ("replace", 1),
])  # fmt: skip
def test_a_bookie_is_described_by_strings(tmp_path: Path, name: str, bad: Any) -> None:
    options: Any = {"listen": "tcp://127.0.0.1:*", name: bad}
    with pytest.raises(UsageError, match=rf"^{name} (is|has) (b'|\d|'no'|None)"):
        LedgerManager.open(tmp_path / "bookie", metadata=f"lmdb://{tmp_path / 'metadata'}", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [3, "x", [], True], ids=repr)
def test_progress_is_a_function(tmp_path: Path, bad: Any) -> None:
    with open_quick(tmp_path / "data") as manager:
        manager.create_ledger(insecure=True).close()
    for repair in (verify, rebuild_index):
        with pytest.raises(UsageError, match=f"progress is {re.escape(repr(bad))}; it takes a function"):
            repair(tmp_path / "data", progress=bad)


@pytest.mark.parametrize(("wrong", "says"), [
    ({"default": "secret"}, "a password is bytes, not str; encode text first"),
    ({"default": 5}, "a password is bytes, not int; encode text first"),
    ({"types": {"audit": "secret"}}, "a password is bytes, not str"),
    ({"ledgers": {3: "secret"}}, "a password is bytes, not str"),
    ({"ledgers": {"3": b"secret"}}, "by id, a whole number, not '3'"),
    ({"types": {3: b"secret"}}, "by strings, not 3"),
    ({"types": None}, "types takes a mapping to passwords, not NoneType"),
    ({"ledgers": [b"secret"]}, "ledgers takes a mapping to passwords, not list"),
])  # fmt: skip
def test_passwords_are_bytes_by_type_and_id(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        Passwords(**wrong)
    assert "secret" not in str(raised.value)


def test_a_password_that_is_text_is_refused_wherever_it_is_given(
    manager: LedgerManager, writer: LedgerWriter, tmp_path: Path
) -> None:
    bad: Any = "secret"
    calls: list[Callable[[], Any]] = [
        lambda: manager.create_ledger(password=bad),
        lambda: manager.open_ledger(writer.ledger_id, password=bad),
        lambda: manager.delete_ledger(writer.ledger_id, password=bad),
        lambda: verify(tmp_path / "data", password=bad),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"^a password is bytes, not str; encode text first: text\.encode"):
            call()


def test_custom_metadata_is_a_mapping(manager: LedgerManager) -> None:
    bad: Any
    for bad in ([], "", 0, [("a", b"b")]):
        with pytest.raises(UsageError, match="custom_metadata takes a mapping of strings to bytes, not "):
            manager.create_ledger(custom_metadata=bad, insecure=True)


def test_an_error_about_an_open_ledger_names_the_call_that_closes_it(
    manager: LedgerManager, writer: LedgerWriter
) -> None:
    with pytest.raises(IllegalOperationError, match=rf"open_ledger\({writer.ledger_id}, recover=True\)"):
        manager.reseal(writer.ledger_id)


LONG: Any = "x" * 10_000


@pytest.mark.parametrize(
    "call",
    [
        lambda manager: manager.create_ledger(digest_type=LONG, insecure=True),
        lambda manager: manager.create_ledger(storage_hints={LONG}, insecure=True),
        lambda manager: manager.move_ledger(0, LONG),
        lambda manager: LedgerManager.connect(LONG),
        lambda manager: LedgerManager.connect(f"zk://{LONG}"),
        lambda manager: LedgerManager.open("nowhere", metadata="lmdb:///x", **dict[str, Any]({LONG: 1})),
        lambda manager: Log.open(manager, LONG, insecure=True),
        lambda manager: TierPolicy(target=LONG),
        lambda manager: BlobStore.open(manager, insecure=True).stat("blob", version=LONG),
        lambda manager: RemoteConsumer.connect(LONG),
    ],
)
def test_an_error_does_not_repeat_a_long_value(manager: LedgerManager, call: Callable[[LedgerManager], object]) -> None:
    with pytest.raises(PybkError) as raised:
        call(manager)
    assert len(str(raised.value)) < 800


def test_a_name_that_is_cut_ends_with_dots(manager: LedgerManager) -> None:
    with pytest.raises(UsageError, match=r"the name 'x{46}\.\.\. has 10000 bytes"):
        Log.open(manager, LONG, insecure=True)


def test_an_age_that_no_float_holds_is_refused() -> None:
    with pytest.raises(UsageError, match=r"segment_age_s is 10.*above 0"):
        LogSettings(segment_age_s=10**400)
