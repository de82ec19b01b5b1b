"""The kind and the end of a ledger in a store are sealed, and changes made without the API are found."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.credentials import Credentials
from pybk.errors import LedgerUnsealedError, SealMismatchError, UnauthorizedError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger import keys
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.keys import KeyRing, LedgerSeal, keys_of
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metrics import UNSEALED_LEDGERS, MetricKey
from tests.internals import descriptor_of, digest_of, store_of
from tests.sealing import PASSWORD, copied, open_at, open_sealing, tamper


@pytest.fixture(autouse=True)
def _cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SCRYPT_COST", 1 << 4)


def make(manager: LedgerManager, entries: int = 5, *, close: bool = True, **options: Any) -> int:
    """Write a ledger, and close it or leave it as a crash would."""
    options.setdefault("insecure", options.get("digest_type") is DigestType.NONE)
    writer = manager.create_ledger(password=PASSWORD, **options)
    for number in range(entries):
        writer.append(f"entry {number}".encode())
    if close:
        writer.close()
    else:
        writer.force()
    return writer.ledger_id


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("entries", [0, 1, 5])
def test_close_seals(tmp_path: Path, digest_type: DigestType, entries: int) -> None:
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager, entries, digest_type=digest_type)
        metadata = manager.ledger_metadata(ledger_id)
        assert metadata.sealed
        assert metadata.key_format == 1
        assert bool(metadata.last_digest) == (entries > 0 and digest_type is not DigestType.NONE)
    with LedgerManager.open(tmp_path) as manager:
        with manager.open_ledger(ledger_id, password=PASSWORD, require_seal=True) as reader:
            assert reader.metadata == metadata
            assert len(list(reader.read(0, entries - 1))) == entries
        with pytest.raises(UnauthorizedError):
            manager.open_ledger(ledger_id, password=b"another")


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("entries", [0, 1, 5])
@pytest.mark.parametrize("flags", [WriteFlag.NONE, WriteFlag.DEFERRED_FORCE])
def test_every_recovery_of_one_end_makes_the_seal_of_the_writer(
    tmp_path: Path, digest_type: DigestType, entries: int, flags: WriteFlag
) -> None:
    root = tmp_path / "store"
    with open_sealing(root) as manager:
        ledger_id = make(manager, entries, close=False, digest_type=digest_type, write_flags=flags)
        copies = [copied(root, "first"), copied(root, "second")]
        manager.open_ledger(ledger_id, password=PASSWORD).close()  # while the writer is there
        seals = {manager.ledger_metadata(ledger_id).seal}
    for number, copy in enumerate(copies):
        with open_sealing(copy) as manager:
            if number:
                manager.checkpoint()
            with manager.open_ledger(ledger_id, password=PASSWORD, require_seal=True) as reader:
                assert reader.last_add_confirmed == entries - 1
            seals.add(manager.ledger_metadata(ledger_id).seal)
    assert len(seals) == 1
    assert seals != {b""}


def test_a_batch_an_advanced_and_a_moved_ledger_are_sealed(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        with manager.create_ledger(password=PASSWORD) as writer:
            writer.append_many([b"x"] * 100)
            future = writer.append_async(b"last")
        assert future.result() == 100
        with manager.create_ledger(password=PASSWORD, ledger_id=50) as advanced:
            late = advanced.append_async(b"b", entry_id=1)
            advanced.append(b"a", entry_id=0)
            late.result()
        for ledger_id in (writer.ledger_id, 50):
            manager.move_ledger(ledger_id, StorageHint.HDD)
            with manager.open_ledger(ledger_id, password=PASSWORD, require_seal=True) as reader:
                assert list(reader.read(0, reader.last_add_confirmed))


CHANGES: dict[str, Callable[[LedgerMetadata], dict[str, Any]]] = {
    "downgraded": lambda m: {"digest_type": DigestType.NONE},
    "with other keys": lambda m: {"digest_type": DigestType.XXH3, "key_format": 0},
    "deferred": lambda m: {"write_flags": WriteFlag.DEFERRED_FORCE},
    "truncated": lambda m: {"last_entry_id": 2, "length": 21},
    "emptied": lambda m: {"last_entry_id": -1, "length": 0, "last_digest": b""},
    "longer": lambda m: {"length": m.length + 1},
    "of another type": lambda m: {"ledger_type": "orders"},
    "with other custom metadata": lambda m: {"custom_metadata": {"schema": b"2"}},
    "made at another time": lambda m: {"creation_time_ns": 5},
    "with another last digest": lambda m: {"last_digest": bytes(32)},
    "with another seal": lambda m: {"seal": bytes(32)},
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("what", CHANGES)
def test_a_ledger_changed_in_the_directory_is_not_opened(tmp_path: Path, what: str) -> None:
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager, custom_metadata={"schema": b"1"})
        metadata = manager.ledger_metadata(ledger_id)
    tamper(tmp_path, ledger_id, **CHANGES[what](metadata))
    for read_only in (True, False):
        with (
            LedgerManager.open(tmp_path, read_only=read_only) as manager,
            pytest.raises(SealMismatchError, match=f"ledger {ledger_id}"),
        ):
            manager.open_ledger(ledger_id, password=PASSWORD)


def test_an_open_ledger_that_was_downgraded_is_not_opened(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager, close=False)
    tamper(tmp_path, ledger_id, digest_type=DigestType.NONE)
    with (
        open_sealing(tmp_path) as manager,
        pytest.raises(SealMismatchError, match=r"HMAC_SHA256.*NONE"),
    ):
        manager.open_ledger(ledger_id, password=PASSWORD)


def written_over(root: Path) -> tuple[Path, int]:
    """Make a copy of a store in which a sealed ledger of two entries has another last entry of the same length.

    Returns:
        The copy, and the ledger's id.
    """
    with open_sealing(root) as manager:
        writer = manager.create_ledger(password=PASSWORD, digest_type=DigestType.CRC32C)
        writer.append(b"first")
        copy = copied(root, "copy")
        writer.append(b"last")
        writer.close()
        sealed = writer.metadata
    with open_sealing(copy) as manager:
        store = store_of(manager)
        descriptor = store.descriptor(writer.ledger_id)
        digest = digest_of(writer).prefix(1, 0, sealed.length, b"LAST")
        store.log.stage_entry(descriptor, 1, digest, b"LAST", 5, len(digest), True)
        store.log.flush()
        store.change_all([(descriptor, replace(sealed, version=9))])
    return copy, writer.ledger_id


def test_another_last_entry_than_the_sealed_one_is_not_read(tmp_path: Path) -> None:
    copy, ledger_id = written_over(tmp_path / "store")
    with LedgerManager.open(copy) as manager:
        reader = manager.open_ledger(ledger_id, password=PASSWORD)
        assert [entry.payload for entry in reader.read(0, 0)] == [b"first"]
        for read in (lambda: list(reader.read(1, 1)), lambda: list(reader.read(0, 1)), lambda: reader.read_batch(1)):
            with pytest.raises(SealMismatchError, match="entry 1, its last, is not the one that was sealed"):
                read()


@pytest.mark.parametrize("recover", [True, False])
def test_a_ledger_without_a_seal_opens_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, recover: bool
) -> None:
    with open_at(FeatureLevel.BASE, tmp_path) as manager:
        ledger_id = make(manager)
        metadata = manager.ledger_metadata(ledger_id)
        assert (metadata.sealed, metadata.key_format) == (False, 0)
        manager.open_ledger(ledger_id, password=PASSWORD).close()
    assert not caplog.records  # there is nothing to be done about it at this level
    with open_sealing(tmp_path) as manager, caplog.at_level(logging.WARNING, "pybk"):
        for _ in range(3):
            with manager.open_ledger(ledger_id, password=PASSWORD, recover=recover) as reader:
                assert len(list(reader.read(0, 4))) == 5
        [warning] = [record.getMessage() for record in caplog.records]
        assert warning.startswith(f"ledger {ledger_id} is closed without a seal")
        assert "`pybk ledger reseal`" in warning
        assert manager.metrics().counters[MetricKey(UNSEALED_LEDGERS, "", "nvme")] == 3
        with pytest.raises(LedgerUnsealedError, match="pybk ledger reseal"):
            manager.open_ledger(ledger_id, password=PASSWORD, require_seal=True)


def test_a_seal_that_was_taken_away_is_missed(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager)
    tamper(tmp_path, ledger_id, last_entry_id=2, length=21, seal=b"", last_digest=b"")
    with LedgerManager.open(tmp_path) as manager, pytest.raises(LedgerUnsealedError):
        manager.open_ledger(ledger_id, password=PASSWORD, require_seal=True)


def test_an_open_ledger_has_no_seal_yet(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager, close=False)
        with pytest.raises(LedgerUnsealedError, match="is open"):
            manager.open_ledger(ledger_id, password=PASSWORD, recover=False, require_seal=True)
        manager.open_ledger(ledger_id, password=PASSWORD, recover=True, require_seal=True).close()


def test_a_follower_does_not_take_a_changed_end(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with open_sealing(root) as manager:
        ledger_id = make(manager, close=False)
        sealed_elsewhere = make(manager, 2)
        reader = manager.open_ledger(ledger_id, password=PASSWORD, recover=False)
        follower = reader.follow()
        assert next(follower).entry_id == 0
        store = store_of(manager)
        wrong = store.descriptor(sealed_elsewhere).metadata
        closed = replace(
            store.descriptor(ledger_id).metadata,
            state=LedgerState.CLOSED,
            last_entry_id=4,
            length=wrong.length,
            seal=wrong.seal,
            last_digest=wrong.last_digest,
        )
        store.change_all([(store.descriptor(ledger_id), closed)])
        with pytest.raises(SealMismatchError):
            list(follower)
        with pytest.raises(SealMismatchError):
            reader.read_last_add_confirmed()


def test_an_older_ledger_is_sealed_once_the_store_seals(tmp_path: Path) -> None:
    with open_at(FeatureLevel.BASE, tmp_path) as manager:
        ledger_id = make(manager, close=False)
    with (
        open_sealing(tmp_path) as manager,
        manager.open_ledger(ledger_id, password=PASSWORD, require_seal=True) as reader,
    ):
        assert (reader.metadata.sealed, reader.metadata.key_format) == (True, 0)
    tamper(tmp_path, ledger_id, digest_type=DigestType.NONE)
    with LedgerManager.open(tmp_path) as manager, pytest.raises(SealMismatchError):
        manager.open_ledger(ledger_id, password=PASSWORD)


def test_a_damaged_last_entry_does_not_keep_a_ledger_from_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_sealing(tmp_path) as manager:
        writer = manager.create_ledger(password=PASSWORD)
        writer.append(b"first")
        log = store_of(manager).log
        log.stage_entry(descriptor_of(writer), 1, bytes(64), b"x", 5, 64, True)  # no digest of its own
        log.flush()
    with (
        open_sealing(tmp_path) as manager,
        caplog.at_level(logging.WARNING, "pybk"),
        manager.open_ledger(writer.ledger_id, password=PASSWORD) as reader,
    ):
        assert (reader.metadata.sealed, reader.metadata.last_entry_id) == (False, 1)
        assert [entry.payload for entry in reader.read(0, 0)] == [b"first"]
    assert "is closed without a seal, because of its last entry" in caplog.records[0].getMessage()


def test_the_bytes_of_a_seal_never_change() -> None:
    ring = KeyRing(bytes(range(16)), b"salt of a store ", cost=2)
    metadata = LedgerMetadata(
        ledger_id=5,
        state=LedgerState.CLOSED,
        ledger_type=LedgerType("orders"),
        digest_type=DigestType.HMAC_SHA256,
        last_entry_id=1,
        length=7,
        creation_time_ns=1_700_000_000_000_000_000,
        creation_sequence=4,
        custom_metadata={"\u00e9": b"", "app": b"shop"},
        tier=StorageHint.NVME,
        key_salt=b"salt of 16 bytes",
        verifier=b"",
        key_format=1,
    )
    keys = keys_of(ring, Credentials(b"secret"), metadata)
    unbound = keys_of(ring, Credentials(b"secret"), replace(metadata, key_format=0))
    assert keys is not None
    assert unbound is not None
    assert keys.verifier != unbound.verifier

    def sized(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    def number(value: int, size: int = 8) -> bytes:
        return value.to_bytes(size, "big")

    root = hashlib.scrypt(b"secret", salt=b"salt of a store ", n=2, r=8, p=1, dklen=32)
    extracted = hmac.digest(b"salt of 16 bytes", root, "sha256")
    kind = (number(5), number(0), bytes(range(16)), number(100, 4), number(0, 4))
    key = hmac.digest(extracted, sized(b"pybk/2", b"seal", *kind) + b"\1", "sha256")
    custom = hashlib.sha256('{"app":"c2hvcA==","\u00e9":""}'.encode()).digest()
    digest = bytes(range(32))
    told = (number(5), b"orders", number(0, 4), number(100, 4), b"\0", number(metadata.creation_time_ns), number(4))
    end = (custom, b"salt of 16 bytes", number(0), number(1, 4), number(1), number(7), digest)
    expected = hmac.digest(key, b"pybk ledger seal 1\0" + sized(*told, *end), "sha256")

    seal = LedgerSeal(keys, entry_digest(DigestType.HMAC_SHA256, 5, keys.entry_key))
    last_entry = number(5) + number(1) + number(0) + number(7) + digest + b"payload"
    sealed = seal.sealed(metadata, last_entry)
    assert (sealed.seal, sealed.last_digest) == (expected, digest)
    assert sealed.seal.hex() == "85b1ed2663ad589ebbacd0fa661f8df2c5d86a60e7d2bf719146f3c3d31974ab"
    seal.check(sealed)


def test_an_empty_password_has_to_be_meant(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        with pytest.raises(UsageError, match="insecure=True"):
            manager.create_ledger()
        assert list(manager.list_ledgers()) == []
        manager.create_ledger(digest_type=DigestType.XXH3).close()  # whose digest needs no password
        with manager.create_ledger(insecure=True) as writer:
            writer.append(b"x")
        with manager.open_ledger(writer.ledger_id, require_seal=True) as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"x"]
