"""Whose directory it is."""

from __future__ import annotations

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import CookieError, StorageFailedError
from pybk.flags import StorageHint
from pybk.replication.messages import Run
from pybk.storage.store import Store
from tests.replicaworld import (  # noqa: F401  # fixtures among them
    LEDGER,
    after_crash,
    after_kill,
    make_run,
    new_disk,
    new_replicas,
    open_replicas,
)
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storeworld import CONFIG, open_store

CLUSTER, INSTANCE = b"cluster", bytes(range(16))


def test_a_directory_is_bound_to_one_bookie_of_one_cluster(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    with pytest.raises(CookieError, match="no bookie's yet"):
        replicas.check(CLUSTER, "a", INSTANCE, 1)
    assert replicas.begin(CLUSTER, "a", INSTANCE) == 1
    for stop in (after_crash, after_kill):
        fs, replicas = stop(fs, replicas)
        replicas.check(CLUSTER, "a", INSTANCE, 1)
        for cluster, bookie, instance, remedy in (
            (b"other", "a", INSTANCE, "other cluster"),
            (CLUSTER, "b", INSTANCE, "give the bookie the name"),
            (CLUSTER, "a", bytes(16), "was replaced"),
        ):
            with pytest.raises(CookieError, match=remedy):
                replicas.check(cluster, bookie, instance, 1)
            with pytest.raises(CookieError, match=remedy):
                replicas.begin(cluster, bookie, instance)
    assert replicas.begin(CLUSTER, "a", INSTANCE, 1) == 2
    assert len(list(replicas.store.ledgers())) == 1


def test_an_older_copy_of_a_directory_is_refused(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.begin(CLUSTER, "a", INSTANCE)
    replicas.close()
    copy = fs.kill()
    replicas = open_replicas(copy)
    replicas.check(CLUSTER, "a", INSTANCE, 1)
    with pytest.raises(CookieError, match="older backup"):
        replicas.check(CLUSTER, "a", INSTANCE, 2)
    with pytest.raises(CookieError, match="older backup"):
        replicas.begin(CLUSTER, "a", INSTANCE, 2)


def test_a_start_that_ended_between_two_identities_counts(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.begin(CLUSTER, "a", INSTANCE)
    fs.fail_at(1, "EIO", only="write_durable")
    with pytest.raises(StorageFailedError):
        replicas.begin(CLUSTER, "a", INSTANCE)
    fs, replicas = after_kill(fs, replicas)
    assert replicas.identity is not None
    assert replicas.identity.boots == 2
    assert replicas.begin(CLUSTER, "a", INSTANCE, 2) == 3
    assert len(list(replicas.store.ledgers())) == 1


def test_an_embedded_store_is_no_bookies(fs: SimFileSystem) -> None:
    manager = open_store(fs)
    manager.create_ledger().close()
    manager.close()
    with pytest.raises(CookieError, match="embedded store"):
        Replicas.open("/store", config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    Store.open("/store", config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path)).close()


def test_health_tells_room_by_tier(replicas: Replicas) -> None:
    health = replicas.health()
    assert health.free_bytes.keys() == set(StorageHint)
    assert all(free > 0 for free in health.free_bytes.values())
    assert (health.full, health.error, health.outstanding_bytes) == (None, None, 0)
    run: Run = make_run(0, 2)
    replicas.stage(LEDGER, run, True)
    assert replicas.health().outstanding_bytes == sum(run.sizes)
