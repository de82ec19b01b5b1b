"""The feature level of a cluster: what is written below it, how it is raised, and what is refused above it."""

from __future__ import annotations

import pytest

from pybk.errors import MetadataForgedError, UnsupportedFormatError
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.metadata.authenticated_values import VALUE_FORMAT, VALUE_FORMAT_BASE
from pybk.metadata.cluster import CLUSTER_KEY, ClusterMetadata, proof_of
from pybk.metadata.store import MetadataStore
from tests.metadata.golden import CLUSTER
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import KEY, bookie, key_for, ledger, registration


def cluster_of(store: MetadataStore, level: FeatureLevel = FeatureLevel.BASE) -> ClusterMetadata:
    return ClusterMetadata(store, key_for=key_for, cost=2, level=level)


def value_format(store: MetadataStore, key: str) -> int:
    node = store.get(key, latest=True)
    assert node is not None
    return node.value[0]


def test_a_new_cluster_has_the_newest_level(world: World) -> None:
    cluster = ClusterMetadata(world.open(), key_for=key_for, cost=2)
    assert cluster.feature_level is NEWEST_LEVEL
    assert value_format(world.open(), CLUSTER_KEY) == VALUE_FORMAT


def test_below_a_level_its_formats_are_not_written(world: World) -> None:
    cluster, store = cluster_of(world.open()), world.open()
    cluster.claim_cookie(bookie(1))
    assert value_format(store, CLUSTER_KEY) == value_format(store, "cookies/bookie-1%3A3181") == VALUE_FORMAT_BASE


@pytest.mark.parametrize("level", [level for level in FeatureLevel if level < NEWEST_LEVEL])
def test_a_raised_level_is_taken_up_by_members_that_run(world: World, level: FeatureLevel) -> None:
    raising, running = cluster_of(world.open(), level), cluster_of(world.open())
    version = raising.create_ledger(ledger(1))
    assert raising.upgrade(finalize=False) == (level, NEWEST_LEVEL, (), ())
    assert running.feature_level is level
    assert raising.upgrade(finalize=True) == (NEWEST_LEVEL, NEWEST_LEVEL, (), ())
    assert world.wait_for(lambda: running.feature_level is NEWEST_LEVEL)
    assert running.identity == raising.identity
    assert running.read_ledger(1) == (ledger(1), version)
    running.claim_cookie(bookie(1))
    assert value_format(world.open(), "cookies/bookie-1%3A3181") == VALUE_FORMAT
    assert cluster_of(world.open()).feature_level is NEWEST_LEVEL
    assert raising.upgrade(finalize=True).level is NEWEST_LEVEL


def test_a_bookie_that_does_not_know_the_level_prevents_it() -> None:
    world = SimWorld()
    cluster = cluster_of(world.open())
    for number in (1, 2, 3):
        cluster.claim_cookie(bookie(number))
    old = cluster.register(registration(bookie(1), level_max=0, version=""))
    cluster.register(registration(bookie(2)))
    found = cluster.upgrade(finalize=True)
    assert found.level is FeatureLevel.BASE
    assert len(found.hindrances) == 1
    assert "bookie bookie-1:3181 runs pybk before 0.2" in found.hindrances[0]
    assert found.absent == ("bookie-3:3181",)
    old.update(registration(bookie(1), level_max=1, version="0.2.0"))
    assert "knows feature levels up to 1" in cluster.upgrade(finalize=True).hindrances[0]
    old.update(registration(bookie(1)))
    assert cluster.upgrade(finalize=True).level is NEWEST_LEVEL


def test_a_level_above_ours_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimWorld()
    cluster_of(world.open(), NEWEST_LEVEL)
    monkeypatch.setattr("pybk.metadata.cluster.NEWEST_LEVEL", FeatureLevel.SEALS)
    with pytest.raises(UnsupportedFormatError, match="feature level 4; this pybk knows levels up to 1"):
        cluster_of(world.open())


def test_a_level_that_was_changed_without_the_secret_is_refused() -> None:
    world = SimWorld()
    store = world.open()
    cluster_of(store, NEWEST_LEVEL)
    node = store.get(CLUSTER_KEY)
    assert node is not None
    store.put(CLUSTER_KEY, node.value.replace(b'"key_epoch":0,"level":4', b'"key_epoch":0,"level":3'), node.version)
    with pytest.raises((MetadataForgedError, UnsupportedFormatError)):
        cluster_of(world.open())


def test_each_level_has_another_proof_of_the_secret() -> None:
    assert len({proof_of(CLUSTER, KEY, level) for level in FeatureLevel}) == len(FeatureLevel)
