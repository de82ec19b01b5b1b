"""The ledger manager: creating, opening, listing, deleting, and what a store looks like when it is opened again."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pybk.config import StoreConfig
from pybk.errors import (
    ClosedError,
    CookieError,
    IllegalOperationError,
    LedgerUnsealedError,
    NoSuchLedgerError,
    SealMismatchError,
    StoreLockedError,
    UnauthorizedError,
    UsageError,
)
from pybk.feature_level import NEWEST_STORE_LEVEL
from pybk.flags import LedgerType, ReadFlag, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.keys import KeyRing
from pybk.ledger.ledger_metadata import CUSTOM_METADATA_BYTES_MAX, LedgerState, LedgerSummary
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.io.filesystem import OsFileSystem
from tests.internals import backend_of, digest_of, store_of
from tests.storage.real_store import QUICK, contents, numbered, open_quick, payloads, python
from tests.test_everyday import pickled
from tests.waiting import WAIT_S


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "data") as manager:
        yield manager


# ---- creating --------------------------------------------------------------------------------------------------------


def test_everything_asked_of_a_ledger_is_recorded(tmp_path: Path) -> None:
    before = time.time_ns()
    with open_quick(tmp_path) as manager:
        manager.create_ledger(insecure=True).close()
        with manager.create_ledger(
            password=b"s3cret",
            ledger_type="orders",
            storage_hints={StorageHint.HDD, StorageHint.SSD},
            write_flags=WriteFlag.DEFERRED_FORCE,
            digest_type=DigestType.CRC32C,
            custom_metadata={"app": b"shop"},
        ) as writer:
            writer.append_many([b"one", b"three"])
        seen = [manager.ledger_metadata(1), writer.metadata]
    for read_only in (False, True):
        with open_quick(tmp_path, read_only=read_only) as manager:
            seen.append(manager.ledger_metadata(1))
            with manager.open_ledger(1, password=b"s3cret") as reader:
                seen.append(reader.metadata)
    for metadata in seen:
        assert metadata.state is LedgerState.CLOSED
        assert (metadata.ledger_type, metadata.write_flags) == ("orders", WriteFlag.DEFERRED_FORCE)
        assert metadata.storage_hints == {StorageHint.SSD, StorageHint.HDD}
        assert (metadata.tier, metadata.digest_type) == (StorageHint.SSD, DigestType.CRC32C)
        assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == (1, 1, 1)
        assert (metadata.last_entry_id, metadata.length) == (1, 8)
        assert before <= metadata.creation_time_ns <= time.time_ns()
        assert metadata.creation_sequence == 1
        assert metadata.custom_metadata == {"app": b"shop"}
        with pytest.raises(dataclasses.FrozenInstanceError):
            metadata.length = 1  # type: ignore[misc]  # that is the point
        with pytest.raises(TypeError):
            metadata.custom_metadata["app"] = b""  # type: ignore[index]  # that is the point


def test_metadata_of_an_open_ledger_have_its_state(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"x")
    assert manager.ledger_metadata(writer.ledger_id).state is LedgerState.OPEN


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"ledger_type": ".metadata"}, "system"),
        ({"ledger_type": LedgerType(".metadata")}, "system"),
        ({"ledger_type": ".other"}, "reserved"),
        ({"ledger_type": "x" * 256}, "255"),
        ({"ledger_type": 5}, "string"),
        ({"storage_hints": {"tape"}}, "storage_hints.*tape.*NVME.*SSD.*HDD"),
        ({"storage_hints": StorageHint.NVME}, "set of hints"),
        ({"write_flags": 6}, "write_flags.*0x6.*DEFERRED_FORCE"),
        ({"write_flags": -1}, "write_flags.*negative"),
        ({"digest_type": 55}, "digest_type.*HMAC_SHA256"),
        ({"digest_type": DigestType.NONE}, "insecure=True"),
        ({"password": b""}, "insecure=True"),
        ({"password": "text"}, "bytes"),
        ({"password": None}, "bytes"),
        ({"custom_metadata": {"a": "text"}}, "bytes"),
        ({"custom_metadata": {b"a": b"x"}}, "strings"),
        ({"custom_metadata": {"a": bytes(CUSTOM_METADATA_BYTES_MAX)}}, "limit"),
    ],
)
def test_impossible_settings_of_a_ledger_are_refused(
    manager: LedgerManager, arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=f"(?s){match}"):
        manager.create_ledger(**{"password": b"p", **arguments})
    assert list(manager.list_ledgers()) == []


def test_hints_and_flags_may_be_given_by_their_values(manager: LedgerManager) -> None:
    arguments: dict[str, Any] = {"storage_hints": ["hdd"], "write_flags": 1, "digest_type": 101}
    metadata = manager.create_ledger(**arguments).metadata
    assert metadata.storage_hints == {StorageHint.HDD}
    assert (metadata.write_flags, metadata.digest_type) == (WriteFlag.DEFERRED_FORCE, DigestType.XXH3)


@pytest.mark.parametrize(
    ("hints", "tier"),
    [
        ([], StorageHint.HDD),
        ([StorageHint.HDD, StorageHint.NVME], StorageHint.NVME),
        ([StorageHint.HDD, StorageHint.SSD], StorageHint.SSD),
        ([StorageHint.HDD], StorageHint.HDD),
    ],
)
def test_the_fastest_hint_is_taken_and_the_default_without(
    tmp_path: Path, hints: list[StorageHint], tier: StorageHint
) -> None:
    with open_quick(tmp_path, default_tier=StorageHint.HDD) as manager:
        assert manager.create_ledger(storage_hints=hints, insecure=True).metadata.tier is tier


def test_ids_of_deleted_ledgers_are_not_given_again(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        for _ in range(3):
            manager.create_ledger(insecure=True).close()
        manager.delete_ledger(2)
        manager.delete_ledger(0)
        assert manager.create_ledger(insecure=True).ledger_id == 3
        manager.delete_ledger(3)
    with open_quick(tmp_path) as manager:
        assert manager.create_ledger(insecure=True).ledger_id == 4
        manager.delete_ledger(4)
        manager.checkpoint()
    with open_quick(tmp_path) as manager:
        writer = manager.create_ledger(insecure=True)
        assert (writer.ledger_id, writer.metadata.creation_sequence) == (5, 5)
        assert list(manager.list_ledgers()) == [1, 5]


# ---- opening, listing, deleting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("digest_type", [DigestType.HMAC_SHA256, DigestType.CRC32C])
@pytest.mark.parametrize("recover", [True, False])
def test_a_wrong_password_is_refused_and_changes_nothing(
    manager: LedgerManager, digest_type: DigestType, recover: bool
) -> None:
    writer = manager.create_ledger(password=b"right", digest_type=digest_type)
    writer.append(b"a")
    before = manager.ledger_metadata(writer.ledger_id)
    for password in (b"wrong", b"", b"right "):
        with pytest.raises(UnauthorizedError, match="nothing was changed") as refused:
            manager.open_ledger(writer.ledger_id, password=password, recover=recover)
        assert refused.value.code == -102
    assert manager.ledger_metadata(writer.ledger_id) == before
    assert writer.append(b"b") == 1, "the writer was fenced by somebody without the password"
    assert contents(manager, writer.ledger_id, b"right", recover=recover) == [b"a", b"b"]


@pytest.mark.parametrize("ledger_id", [0, 5, -1, (1 << 63) - 1, 1 << 63, 1 << 80])
def test_unknown_ledgers_are_refused(manager: LedgerManager, ledger_id: int) -> None:
    for call in (manager.open_ledger, manager.ledger_metadata, manager.delete_ledger):
        with pytest.raises(NoSuchLedgerError) as refused:
            call(ledger_id)
        assert refused.value.code == -7
    with pytest.raises(NoSuchLedgerError):
        manager.move_ledger(ledger_id, StorageHint.HDD)


def test_arguments_that_cannot_be_are_refused_when_opening(manager: LedgerManager) -> None:
    ledger_id = manager.create_ledger(insecure=True).ledger_id
    name: Any = "0"
    flags: Any = 4
    tier: Any = "tape"
    with pytest.raises(UsageError, match="whole number"):
        manager.open_ledger(name)
    with pytest.raises(UsageError, match=r"read_flags.*DONT_CACHE"):
        manager.open_ledger(ledger_id, read_flags=flags)
    with pytest.raises(UsageError, match=r"tape.*HDD"):
        manager.move_ledger(ledger_id, tier)
    assert manager.ledger_metadata(ledger_id).state is LedgerState.OPEN


def test_ledgers_are_listed_by_id_and_type(manager: LedgerManager) -> None:
    for number in range(6):
        manager.create_ledger(ledger_type="even" if number % 2 == 0 else "odd", insecure=True)
        if number == 2:
            manager.checkpoint()
    manager.delete_ledger(4)
    assert list(manager.list_ledgers()) == [0, 1, 2, 3, 5]
    assert list(manager.list_ledgers("even")) == [0, 2]
    assert list(manager.list_ledgers(ledger_type="odd")) == [1, 3, 5]
    assert list(manager.list_ledgers("")) == []
    assert list(manager.list_ledgers("nobody's")) == []


def ids(found: Iterable[LedgerSummary]) -> list[int]:
    """Return the ids of ledgers that were listed."""
    return [summary.ledger_id for summary in found]


def test_ledgers_are_listed_with_their_metadata_in_one_pass(manager: LedgerManager) -> None:
    for number in range(6):
        writer = manager.create_ledger(ledger_type="even" if number % 2 == 0 else "odd", insecure=True)
        writer.append_many(numbered(number))
        if number % 3 == 0:
            writer.close()
    found = list(manager.ledgers())
    assert [summary.metadata for summary in found] == [manager.ledger_metadata(number) for number in range(6)]
    assert ids(manager.ledgers(ledger_type="even")) == [0, 2, 4]
    assert ids(manager.ledgers(state=LedgerState.CLOSED)) == [0, 3]
    assert ids(manager.ledgers(state=LedgerState.OPEN, ledger_type="odd")) == [1, 5]
    assert ids(manager.ledgers(first=2, last=np.int64(4))) == [2, 3, 4]  # type: ignore[arg-type]  # as users do
    assert ids(manager.ledgers(first=6)) == ids(manager.ledgers(first=3, last=2)) == []
    assert [manager.ledger_summary(number) for number in range(6)] == found

    async def listed() -> list[LedgerSummary]:
        return [summary async for summary in manager.ledgers_async(first=1, state=LedgerState.OPEN)]

    assert asyncio.run(listed()) == list(manager.ledgers(first=1, state=LedgerState.OPEN))
    closed = found[3]
    assert (closed.last_add_confirmed, closed.length) == (2, sum(map(len, numbered(3))))
    assert found[2].last_add_confirmed == (None if manager.is_cluster else 1)
    assert pickled(closed) == closed


def test_arguments_of_a_listing_are_refused_at_the_call(manager: LedgerManager) -> None:
    for wrong in ({"first": -1}, {"first": "0"}, {"last": 1.0}, {"state": "gone"}, {"ledger_type": b"orders"}):
        with pytest.raises(UsageError):
            manager.ledgers(**wrong)
        with pytest.raises(UsageError):
            manager.ledgers_async(**wrong)
    listed = manager.ledgers()
    manager.create_ledger(insecure=True)
    manager.close()
    for call in (manager.ledgers, manager.ledgers_async, lambda: next(listed)):
        with pytest.raises(ClosedError):
            call()


def test_a_summary_of_an_open_ledger_says_what_is_confirmed(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True, write_flags=WriteFlag.DEFERRED_FORCE)
    known = manager.ledger_summary(writer.ledger_id)
    assert (known.last_add_confirmed, known.length) == (-1, 0)
    writer.append_many([b"one", b"three"])
    writer.force()
    known = manager.ledger_summary(writer.ledger_id)
    assert (known.last_add_confirmed, known.length) == (1, 8)


def test_a_listing_may_come_late_to_ledgers_that_are_deleted(manager: LedgerManager) -> None:
    for _ in range(3):
        manager.create_ledger(insecure=True)
    manager.checkpoint()
    listed = manager.ledgers()
    assert next(listed).ledger_id == 0
    manager.delete_ledger(1)
    assert ids(listed) == [2]


def test_passwords_are_checked_without_reading(manager: LedgerManager) -> None:
    writer = manager.create_ledger(password=b"right")
    metadata = writer.metadata
    for ledger in (writer.ledger_id, metadata, np.int64(writer.ledger_id)):
        assert manager.check_password(ledger, b"right")  # type: ignore[arg-type]
        assert not manager.check_password(ledger, b"wrong")  # type: ignore[arg-type]
        assert not manager.check_password(ledger, b"")  # type: ignore[arg-type]
    assert asyncio.run(manager.check_password_async(metadata, b"right"))
    with pytest.raises(NoSuchLedgerError):
        manager.check_password(77, b"right")
    with pytest.raises(UsageError, match="a password is bytes, not str"):
        manager.check_password(0, "right")  # type: ignore[arg-type]
    writer.append(b"still open")
    with pytest.raises(SealMismatchError, match="was created with digest HMAC_SHA256"):
        manager.check_password(dataclasses.replace(metadata, digest_type=DigestType.NONE), b"right")
    manager.close()
    with pytest.raises(ClosedError):
        manager.check_password(metadata, b"right")


def test_seals_are_checked_without_reading(manager: LedgerManager) -> None:
    writer = manager.create_ledger(password=b"right")
    assert manager.check_seal(writer.ledger_id, password=b"right") is False
    with pytest.raises(LedgerUnsealedError, match="is open and not sealed"):
        manager.check_seal(writer.ledger_id, password=b"right", require=True)
    writer.append(b"x")
    writer.close()
    metadata = manager.ledger_metadata(writer.ledger_id)
    assert manager.check_seal(metadata, password=b"right") is True
    assert asyncio.run(manager.check_seal_async(writer.ledger_id, password=b"right", require=True)) is True
    with pytest.raises(UnauthorizedError, match="ledger 0 has a password, and none was given"):
        manager.check_seal(writer.ledger_id)
    with pytest.raises(SealMismatchError, match="the seal is not that of"):
        manager.check_seal(dataclasses.replace(metadata, length=2), password=b"right")
    assert manager.check_seal(metadata.with_seal(b"", b""), password=b"right") is False


def test_a_manager_says_where_its_ledgers_are(manager: LedgerManager, tmp_path: Path) -> None:
    assert not manager.is_cluster
    assert manager.location == str(tmp_path / "data")
    assert len(manager.store_id) == 16
    assert manager.feature_level is NEWEST_STORE_LEVEL
    with open_quick(tmp_path / "data", read_only=True) as reading, open_quick(tmp_path / "other") as other:
        assert reading.store_id == manager.store_id != other.store_id
    with pytest.raises(
        IllegalOperationError, match="is a store of one process, which keeps one copy and has no bookies"
    ):
        manager.bookies()


def test_system_ledgers_have_a_call_of_their_own(manager: LedgerManager) -> None:
    with manager.create_system_ledger(LedgerType.METADATA, custom_metadata={"a": b"b"}, insecure=True) as writer:
        writer.append(b"x")
    found = manager.ledger_metadata(writer.ledger_id)
    assert (found.ledger_type, found.custom_metadata) == (LedgerType.METADATA, {"a": b"b"})
    for wrong in (LedgerType.BOOKIE, "orders", ""):
        with pytest.raises(UsageError, match="one system type to create"):
            manager.create_system_ledger(wrong, insecure=True)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is the system's own"):
        manager.create_ledger(ledger_type=".metadata", insecure=True)


def test_numbers_of_bookies_may_be_of_numpy(manager: LedgerManager) -> None:
    for one in (np.int64(1), np.uint8(1)):
        writer = manager.create_ledger(ensemble_size=one, write_quorum=one, ack_quorum=one, insecure=True)  # type: ignore[arg-type]
        assert writer.metadata.ensemble_size == 1
        assert type(writer.metadata.ensemble_size) is int
    for wrong in (1.0, "1", True):
        with pytest.raises(UsageError, match="it takes a number of bookies"):
            manager.create_ledger(ack_quorum=wrong, insecure=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_deleted_ledger_is_gone_for_good(tmp_path: Path, checkpointed: bool) -> None:
    with open_quick(tmp_path) as manager:
        with manager.create_ledger(insecure=True) as writer:
            writer.append_many(numbered(10))
        reader = manager.open_ledger(writer.ledger_id)
        entries = reader.read(0, 9)
        if checkpointed:
            manager.checkpoint()
        manager.delete_ledger(writer.ledger_id)
        calls: list[Any] = [
            lambda: next(entries),
            lambda: reader.read(0, 0),
            lambda: reader.read_batch(0),
            reader.read_last_add_confirmed,
            lambda: next(reader.follow()),
            lambda: manager.open_ledger(writer.ledger_id),
            lambda: manager.delete_ledger(writer.ledger_id),
        ]
        for call in calls:
            with pytest.raises(NoSuchLedgerError):
                call()
        if checkpointed:
            manager.checkpoint()
            for call in calls:
                with pytest.raises((NoSuchLedgerError, StopIteration)):
                    call()
    with open_quick(tmp_path) as manager, pytest.raises(NoSuchLedgerError):
        manager.open_ledger(writer.ledger_id)


# ---- stores ----------------------------------------------------------------------------------------------------------


def test_ledgers_that_are_open_stay_open_and_recovery_closes_them_with_everything(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        writers = [manager.create_ledger(storage_hints={tier}, insecure=True) for tier in StorageHint]
        for writer in writers:
            writer.append_many(numbered(5))
        early = [writer.append_async(b"entry 5") for writer in writers]
        manager.checkpoint()
        late = [writer.append_async(b"entry 6") for writer in writers]
    assert [future.result() for future in early + late] == [5, 5, 5, 6, 6, 6]
    with open_quick(tmp_path) as manager:
        for ledger_id in (0, 1, 2):
            assert manager.ledger_metadata(ledger_id).state is LedgerState.OPEN
            assert contents(manager, ledger_id) == numbered(7)
            assert manager.ledger_metadata(ledger_id).state is LedgerState.OPEN
            assert contents(manager, ledger_id, recover=True) == numbered(7)
            metadata = manager.ledger_metadata(ledger_id)
            assert (metadata.state, metadata.last_entry_id, metadata.length) == (LedgerState.CLOSED, 6, 49)
    with open_quick(tmp_path) as manager:
        assert [manager.ledger_metadata(ledger_id).state for ledger_id in range(3)] == [LedgerState.CLOSED] * 3


def test_handles_of_a_closed_manager_say_so(tmp_path: Path) -> None:
    manager = open_quick(tmp_path)
    writer = manager.create_ledger(insecure=True)
    writer.append_many([bytes(1000)] * 3000)
    manager.checkpoint()
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    entries = reader.read(0, 2999)
    next(entries)
    ids = manager.list_ledgers()
    followed: list[BaseException] = []

    def follow() -> None:
        try:
            for _ in reader.follow(3000):
                raise AssertionError("there is no such entry")
        except ClosedError as error:
            followed.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    manager.close()
    manager.close()
    follower.join(WAIT_S)
    assert len(followed) == 1, "who followed was not woken"
    calls: list[Any] = [
        lambda: manager.create_ledger(insecure=True),
        lambda: manager.open_ledger(0),
        lambda: manager.delete_ledger(0),
        lambda: manager.ledger_metadata(0),
        lambda: manager.move_ledger(0, StorageHint.HDD),
        manager.list_ledgers,
        lambda: list(ids),
        manager.checkpoint,
        manager.health,
        lambda: writer.append(b"x"),
        lambda: writer.append_many([b"x"]),
        lambda: writer.append_async(b"x"),
        writer.close,
        lambda: reader.read(0, 0),
        lambda: reader.read_batch(0),
        reader.read_last_add_confirmed,
        lambda: list(entries),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
    with open_quick(tmp_path) as manager:
        assert contents(manager, 0) == [bytes(1000)] * 3000


def test_two_threads_may_close_at_once(tmp_path: Path) -> None:
    for _ in range(10):
        manager = open_quick(tmp_path)
        threads = [threading.Thread(target=manager.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    open_quick(tmp_path).close()


def test_a_second_open_names_the_holder_of_the_store(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.storage.real_store import open_quick
with open_quick(Path(sys.argv[1])):
    print("open", flush=True)
    sys.stdin.read()
"""
    child = python(program, tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(StoreLockedError, match=f"process {child.pid}") as refused:
        open_quick(tmp_path)
    assert refused.value.pid == child.pid
    (tmp_path / "LOCK").write_text(str(os.getpid()), encoding="ascii")  # as of a container, whose ids are its own
    with pytest.raises(StoreLockedError, match=r"another process.*container"):
        open_quick(tmp_path)
    child.communicate("")
    with open_quick(tmp_path), pytest.raises(StoreLockedError, match="locked by this very process"):
        open_quick(tmp_path)
    open_quick(tmp_path).close()


def test_tiers_lie_where_they_are_put(tmp_path: Path) -> None:
    tiers = {StorageHint.HDD: [str(tmp_path / "hdd0"), str(tmp_path / "hdd1")], StorageHint.SSD: str(tmp_path / "ssd")}
    config = StoreConfig(**QUICK)
    open_quick(tmp_path / "other").close()  # makes what follows cheap, too
    with LedgerManager.open(tmp_path / "data", tiers=tiers, config=config) as manager:
        for _ in range(4):
            with manager.create_ledger(storage_hints={StorageHint.HDD}, insecure=True) as writer:
                writer.append_many(numbered(50))
            manager.checkpoint()
    assert all(any(path.suffix == ".cold" for path in (tmp_path / name).iterdir()) for name in ("hdd0", "hdd1"))
    assert not list((tmp_path / "data").rglob("*.cold"))
    with LedgerManager.open(tmp_path / "data", config=config) as manager:
        assert [contents(manager, ledger_id) for ledger_id in range(4)] == [numbered(50)] * 4
    (tmp_path / "hdd1").rename(tmp_path / "elsewhere")
    with pytest.raises(CookieError, match=r"tiers=\{"):
        LedgerManager.open(tmp_path / "data", config=config)
    tiers[StorageHint.HDD] = [str(tmp_path / "hdd0"), str(tmp_path / "elsewhere")]
    with LedgerManager.open(tmp_path / "data", tiers=tiers, config=config) as manager:
        assert [contents(manager, ledger_id) for ledger_id in range(4)] == [numbered(50)] * 4


def test_opening_a_missing_store_read_only_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(CookieError, match="there is no store"):
        LedgerManager.open(tmp_path / "none", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_devices_in_the_same_directory_are_told_apart_in_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers: dict[StorageHint, str | list[str]] = {
        StorageHint.NVME: [str(tmp_path / "a" / "nvme"), str(tmp_path / "b" / "nvme")],
        StorageHint.SSD: str(tmp_path / "a" / "ssd"),
        StorageHint.HDD: [str(tmp_path / "c" / "hdd"), str(tmp_path / "d" / "hdd")],
    }
    numbers = {"nvme": 1, "ssd": 1, "hdd": 2}
    monkeypatch.setattr(OsFileSystem, "device", lambda self, path: numbers[Path(path).name])
    with open_quick(tmp_path / "store", tiers=tiers) as manager:
        free = manager.health().free_bytes
        assert len(free) == 2
        assert ", ".join(tiers[StorageHint.HDD]) in free


def test_health_of_a_store_that_is_well(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        health = manager.health()
        assert (health.state, health.reason, health.outstanding_bytes) == ("ok", "", 0)
        assert list(health.free_bytes) == [str(tmp_path)], "all tiers are on one device, which counts once"
        assert all(free > 0 for free in health.free_bytes.values())
        before = health.tail_bytes
        manager.create_ledger(insecure=True).append(bytes(1000))
        assert manager.health().tail_bytes >= before + 1000
        manager.checkpoint()
        assert manager.health().tail_bytes == 0
    with open_quick(tmp_path, read_only=True) as manager:
        assert (manager.health().state, manager.health().reason) == ("read_only", "opened read-only")


# ---- secrets and logs ------------------------------------------------------------------------------------------------


def test_password_and_keys_are_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    password = b"correct horse battery staple"
    manager = open_quick(tmp_path)
    with manager.create_ledger(password=password, custom_metadata={"a": b"b"}) as writer:
        writer.append_many(numbered(20))
    open_writer = manager.create_ledger(password=password)
    open_writer.append(b"x")
    reader = manager.open_ledger(0, password=password)
    with pytest.raises(UnauthorizedError) as refused:
        manager.open_ledger(0, password=b"another battery staple")
    store = store_of(manager)
    metadata = writer.metadata
    salt = store.cookie.salt
    assert salt is not None
    ring = KeyRing(store.store_id, salt, cost=store.cookie.scrypt_cost or 0)
    secrets = [password, ring.root(password), b"another battery staple"]
    secrets.append(ring.ledger_keys(password, 0, metadata.key_salt, metadata.key_epoch).entry_key)
    things = [manager, writer, open_writer, reader, metadata, reader.metadata, store.cookie, manager.health(), ring]
    things += [
        backend_of(manager).key_ring,
        digest_of(reader),
        digest_of(writer),
        store.config,
        manager.metrics(),
        refused.value,
    ]
    text = repr(things) + caplog.text + repr([vars(record) for record in caplog.records])
    manager.checkpoint()
    open_writer.append(b"y")
    manager.close()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) >= 8
    for secret in secrets:
        for form in (secret, secret.hex().encode(), repr(secret)[2:-1].encode()):
            assert form not in text.encode(), "a secret shows in a repr or in a log"
            for path, data in files.items():
                assert form not in data, f"a secret lies in {path}"


def test_logging_is_silent_by_default(tmp_path: Path) -> None:
    program = """
import logging, sys
from pathlib import Path
from tests.storage.real_store import open_quick
with open_quick(Path(sys.argv[1])) as manager:
    future = manager.create_ledger(insecure=True).append_async(b"x")
    future.add_done_callback(lambda _: 1 / 0)
    future.result()
print(len(logging.getLogger().handlers), logging.getLogger("pybk").level)
"""
    assert python(program, tmp_path).communicate("")[0] == "0 0\n"


# ---- reading again and again -----------------------------------------------------------------------------------------


def test_closed_readers_raise(manager: LedgerManager) -> None:
    writer = manager.create_ledger(insecure=True)
    writer.append(b"x")
    reader = manager.open_ledger(writer.ledger_id, recover=False)
    entries = reader.read(0, 0)
    reader.close()
    reader.close()
    for call in (lambda: reader.read(0, 0), lambda: reader.read_batch(0), reader.read_last_add_confirmed):
        with pytest.raises(ClosedError, match="reader"):
            call()
    assert [entry.payload for entry in entries] == [b"x"]


def test_only_a_manager_that_may_write_recovers(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager:
        manager.create_ledger(insecure=True).append_many(numbered(2))
    with open_quick(tmp_path, read_only=True) as manager:
        with pytest.raises(IllegalOperationError, match="read-only"):
            manager.open_ledger(0, recover=True)
        with manager.open_ledger(0, read_flags=ReadFlag.DONT_CACHE) as reader:
            assert payloads(reader) == numbered(2)
            assert not reader.is_closed


def test_repr_says_whether_the_manager_is_closed(tmp_path: Path) -> None:
    manager = open_quick(tmp_path)
    assert repr(manager) == f"<LedgerManager {tmp_path}>"
    manager.close()
    assert repr(manager) == f"<LedgerManager {tmp_path}, closed>"


@pytest.mark.parametrize(
    "options",
    [
        {"tiers": "/mnt/hdd"},
        {"tiers": {"HDD": "/mnt/hdd"}},
        {"metadata": "lmdb://{path}/metadata", "listen": "bogus"},
        {"metadata": "lmdb://{path}/metadata", "listen": "tcp://127.0.0.1:*", "advertise": "bogus"},
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_made(tmp_path: Path, options: dict[str, Any]) -> None:
    if "metadata" in options:
        options = {**options, "metadata": options["metadata"].format(path=tmp_path)}
    with pytest.raises(UsageError):
        LedgerManager.open(tmp_path / "store", **options)
    assert list(tmp_path.iterdir()) == []
