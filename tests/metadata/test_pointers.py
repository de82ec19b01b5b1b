"""Pointers in the metadata store: one at a time moves them, and nobody else's are taken for ours."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pybk.errors import CorruptError, MetadataForgedError, MetadataVersionError, UsageError
from pybk.feature_level import NEWEST_LEVEL
from pybk.metadata.authenticated_values import ValueKind, encode_authenticated
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.pointers import POINTER_BYTES_MAX
from tests.metadata.harness import World
from tests.metadata.records import KEYS, cluster_on
from tests.metadata.simulated_store import Fault, SimServer

NAMES = ("app", "a/b", "..", "ü" * 64, "a b%2F")


def test_a_pointer_moves_by_compare_and_set(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    assert one.read_pointer("sinks", "app") is None
    first = one.write_pointer("sinks", "app", b"first", None)
    assert two.read_pointer("sinks", "app") == (b"first", first)
    with pytest.raises(MetadataVersionError, match="created by another process") as refused:
        two.write_pointer("sinks", "app", b"other", None)
    assert not refused.value.outcome_unknown
    second = two.write_pointer("sinks", "app", b"second", first)
    with pytest.raises(MetadataVersionError):
        one.write_pointer("sinks", "app", b"late", first)
    assert one.read_pointer("sinks", "app") == (b"second", second)
    assert one.read_pointer("others", "app") is None


def test_names_may_be_anything_and_stay_apart(world: World) -> None:
    cluster = cluster_on(world.open())
    for number, name in enumerate(NAMES):
        cluster.write_pointer("sinks", name, b"%d" % number, None)
    for number, name in enumerate(NAMES):
        found = cluster.read_pointer("sinks", name)
        assert found is not None
        assert found.value == b"%d" % number


def test_of_many_that_move_a_pointer_at_once_one_wins_each_time(tmp_path: Path) -> None:
    stores = [LmdbMetadataStore(str(tmp_path)) for _ in range(3)]
    clusters = [cluster_on(store) for store in stores]
    clusters[0].write_pointer("sinks", "app", b"0", None)

    def count(cluster: ClusterMetadata) -> None:
        done = 0
        while done < 10:
            found = cluster.read_pointer("sinks", "app")
            assert found is not None
            try:
                cluster.write_pointer("sinks", "app", b"%d" % (int(found.value) + 1), found.version)
            except MetadataVersionError:
                continue
            done += 1

    threads = [threading.Thread(target=count, args=(cluster,)) for cluster in clusters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = clusters[0].read_pointer("sinks", "app")
    assert found is not None
    assert found.value == b"30"
    for store in stores:
        store.close()


def test_bounds_are_named(world: World) -> None:
    cluster = cluster_on(world.open())
    cluster.write_pointer("sinks", "app", b"x" * POINTER_BYTES_MAX, None)
    with pytest.raises(UsageError, match=str(POINTER_BYTES_MAX)):
        cluster.write_pointer("sinks", "app", b"x" * (POINTER_BYTES_MAX + 1), 1)
    with pytest.raises(UsageError, match="128"):
        cluster.read_pointer("sinks", "")
    with pytest.raises(UsageError, match="str"):
        cluster.write_pointer("sinks", "app", "text", None)  # type: ignore[arg-type]


def test_a_pointer_made_without_the_secret_is_refused(world: World) -> None:
    store = world.open()
    cluster = cluster_on(store)
    key = "pointers/sinks/app"
    other = MetadataKeys.first(b"x" * 32)
    version = store.create(key, encode_authenticated(ValueKind.POINTER, key, bytes(16), b"{}", other, NEWEST_LEVEL))
    with pytest.raises(MetadataForgedError):
        cluster.read_pointer("sinks", "app")
    store.put(key, encode_authenticated(ValueKind.LOCK, key, bytes(16), b"{}", KEYS, NEWEST_LEVEL), version)
    with pytest.raises(CorruptError, match="LOCK where POINTER"):
        cluster.read_pointer("sinks", "app")


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REQUEST_LOST])
@pytest.mark.parametrize("operation", ["create", "put"])
def test_a_lost_answer_is_settled_by_reading_back(operation: str, fault: Fault) -> None:
    server = SimServer()
    lost: list[str] = []

    def lose(found: str, key: str) -> Fault | None:
        if found == operation and key.startswith("pointers/") and not lost:
            lost.append(key)
            return fault
        return None

    cluster = cluster_on(server.store(lose))
    version = cluster.write_pointer("sinks", "app", b"first", None)
    cluster.write_pointer("sinks", "app", b"second", version)
    assert lost
    found = cluster_on(server.store()).read_pointer("sinks", "app")
    assert found is not None
    assert found.value == b"second"
