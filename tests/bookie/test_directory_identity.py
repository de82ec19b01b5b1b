"""Whose directory it is."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from pybk.bookie.directory_identity import IDENTITY_KEY, DirectoryIdentity
from pybk.bookie.replicas import Replicas
from pybk.errors import CookieError, CorruptError, StorageFailedError, UnsupportedFormatError
from pybk.flags import StorageHint
from pybk.replication.messages import EntryRun
from pybk.storage.format.extent import EXTENT_KEY, Extent
from pybk.storage.store import Store
from tests.bookie.replica_harness import (
    LEDGER,
    after_crash,
    after_kill,
    make_run,
    open_replicas,
)
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG, open_store

CLUSTER, INSTANCE = b"cluster", bytes(range(16))


def test_an_identity_is_written_with_its_fields_in_order() -> None:
    restored = DirectoryIdentity(CLUSTER, "a", INSTANCE, 3, inode=7, incarnation=9)
    for identity in (restored._replace(incarnation=0), restored):
        names = list(json.loads(identity.encode()))
        assert names == sorted(names)


def test_a_directory_is_bound_to_one_bookie_of_one_cluster(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    with pytest.raises(CookieError, match="does not belong to a bookie yet"):
        replicas.check_identity(CLUSTER, "a", INSTANCE, 1)
    assert replicas.record_start(CLUSTER, "a", INSTANCE) == 1
    for stop in (after_crash, after_kill):
        fs, replicas = stop(fs, replicas)
        replicas.check_identity(CLUSTER, "a", INSTANCE, 1)
        for cluster, bookie, instance, remedy in (
            (b"other", "a", INSTANCE, "other cluster"),
            (CLUSTER, "b", INSTANCE, "give the bookie the name"),
            (CLUSTER, "a", bytes(16), "was replaced"),
        ):
            with pytest.raises(CookieError, match=remedy):
                replicas.check_identity(cluster, bookie, instance, 1)
            with pytest.raises(CookieError, match=remedy):
                replicas.record_start(cluster, bookie, instance)
    assert replicas.record_start(CLUSTER, "a", INSTANCE, 1) == 2
    assert len(list(replicas.store.ledgers())) == 1


def test_an_older_copy_of_a_directory_is_refused(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.record_start(CLUSTER, "a", INSTANCE)
    replicas.close()
    copy = fs.kill()
    replicas = open_replicas(copy)
    replicas.check_identity(CLUSTER, "a", INSTANCE, 1)
    with pytest.raises(CookieError, match="older backup"):
        replicas.check_identity(CLUSTER, "a", INSTANCE, 2)
    with pytest.raises(CookieError, match="older backup"):
        replicas.record_start(CLUSTER, "a", INSTANCE, 2)


def test_a_start_that_ended_between_two_identities_counts(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.record_start(CLUSTER, "a", INSTANCE)
    fs.fail_at(1, "EIO", only="write_durable")
    with pytest.raises(StorageFailedError):
        replicas.record_start(CLUSTER, "a", INSTANCE)
    fs, replicas = after_kill(fs, replicas)
    assert replicas.identity is not None
    assert replicas.identity.boots == 2
    assert replicas.record_start(CLUSTER, "a", INSTANCE, 2) == 3
    assert len(list(replicas.store.ledgers())) == 1


def test_a_bookie_refuses_the_directory_of_an_embedded_store(fs: SimFileSystem) -> None:
    manager = open_store(fs)
    manager.create_ledger(insecure=True).close()
    manager.close()
    with pytest.raises(CookieError, match="embedded store"):
        Replicas.open("/store", config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    Store.open("/store", config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path)).close()


def test_an_extent_has_these_bytes() -> None:
    extent = Extent(7, 12, 5, 1, replaces=True)
    data = bytes.fromhex("01000001 05000000 0700000000000000 0c00000000000000 01000000 00000000")
    assert extent.encode() == data
    assert Extent.decode({EXTENT_KEY: data}, where="here") == extent
    assert Extent.decode({}, where="here") is None


@pytest.mark.parametrize("at", range(32))
def test_other_bytes_are_another_extent_or_none(at: int) -> None:
    data = bytearray(Extent(7, 12, 5, 1).encode())
    data[at] ^= 0x80
    with suppress(CorruptError, UnsupportedFormatError):
        found = Extent.decode({EXTENT_KEY: bytes(data)}, where="here")
        assert found is not None
        assert found.encode() == bytes(data)


@pytest.mark.parametrize("data", [b"", b"\x01", Extent(7, 12, 5, 1).encode()[:-1], Extent(7, 12, 0, 1).encode()])
def test_metadata_of_an_invalid_extent_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="names no extent"):
        Extent.decode({EXTENT_KEY: data}, where="here")


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"format": 1}', DirectoryIdentity(b"c", "a", b"i", 1, 7).encode() + b" "]
)
def test_an_invalid_directory_identity_is_refused(fs: SimFileSystem, data: bytes) -> None:
    replicas = open_replicas(fs)
    replicas.record_start(CLUSTER, "a", INSTANCE)
    (metadata,) = replicas.store.ledgers()
    with pytest.raises(CorruptError, match="names no bookie"):
        DirectoryIdentity.of(replace(metadata, custom_metadata={IDENTITY_KEY: data}))
    newer = DirectoryIdentity.of(metadata).encode().replace(b'"format": 1', b'"format": 3')
    with pytest.raises(UnsupportedFormatError, match="format 3"):
        DirectoryIdentity.of(replace(metadata, custom_metadata={IDENTITY_KEY: newer}))


def test_the_identity_of_a_restored_directory_has_its_incarnation(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.record_start(CLUSTER, "a", INSTANCE)
    (metadata,) = replicas.store.ledgers()
    identity = DirectoryIdentity(CLUSTER, "a", INSTANCE, 3, 7, incarnation=0xFEDC_BA98)
    assert DirectoryIdentity.of(replace(metadata, custom_metadata={IDENTITY_KEY: identity.encode()})) == identity


def test_health_reports_free_space_by_tier(replicas: Replicas) -> None:
    health = replicas.health()
    assert health.free_bytes.keys() == set(StorageHint)
    assert all(free > 0 for free in health.free_bytes.values())
    assert (health.full, health.error, health.outstanding_bytes) == (None, None, 0)
    run: EntryRun = make_run(0, 2)
    replicas.stage(LEDGER, run, True)
    assert replicas.health().outstanding_bytes == sum(run.sizes)


def test_a_copy_is_refused_unless_it_was_moved() -> None:
    fs = SimFileSystem(1)
    replicas = open_replicas(fs)
    assert replicas.record_start(CLUSTER, "a", INSTANCE) == 1
    replicas.close()
    fs.number = 8
    copy = open_replicas(fs)
    with pytest.raises(CookieError, match=r"is a copy of the directory of bookie 'a'.*--moved"):
        copy.record_start(CLUSTER, "a", INSTANCE, 1)
    assert copy.record_start(CLUSTER, "a", INSTANCE, 1, moved=True) == 2
    copy.close()
    assert open_replicas(fs).record_start(CLUSTER, "a", INSTANCE, 2) == 3
