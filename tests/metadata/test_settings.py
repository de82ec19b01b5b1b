"""The settings of a cluster: their limits, their changes, and what members of other versions keep."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pybk.errors import CorruptError, MetadataForgedError, MetadataUnreachableError, UsageError
from pybk.metadata.authenticated_values import ValueKind, decode_authenticated
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.settings import (
    SETTINGS_BYTES_MAX,
    SETTINGS_KEY,
    ClusterSettings,
    PlacementSettings,
    RepairSettings,
    ScrubSettings,
    encode_settings,
)
from pybk.metadata.store import MetadataStore
from pybk.values import encode_json
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import KEYS, cluster_on
from tests.metadata.simulated_store import Fault


def zones(count: int) -> ClusterSettings:
    """Return settings that differ from the defaults in one number."""
    return ClusterSettings(placement=PlacementSettings(min_zones=count))


def with_zones(count: int, now: ClusterSettings) -> ClusterSettings:
    """Change that one number."""
    return replace(now, placement=PlacementSettings(min_zones=count))


def once(fault: Fault) -> Callable[[str, str], Fault | None]:
    """Return what lets the first change fail."""
    faults = iter((fault,))
    return lambda operation, key: None if operation == "get" else next(faults, None)


def stored(store: MetadataStore) -> dict[str, Any]:
    """Return what is in the store."""
    node = store.get(SETTINGS_KEY, latest=True)
    assert node is not None
    found: dict[str, Any] = json.loads(decode_authenticated(SETTINGS_KEY, node.value, KEYS)[1])
    return found


def test_settings_are_changed_by_one_and_followed_by_all(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    assert one.current_settings() == two.read_settings() == ClusterSettings()
    assert two.current_settings().changed_ns == 0
    told: list[int] = []
    watch = two.watch_settings(lambda settings: told.append(settings.placement.min_zones))
    made = one.change_settings(lambda now: replace(now, placement=PlacementSettings(min_zones=2)), by="ops")
    assert one.current_settings() == made == zones(2)
    assert (made.changed_by, made.changed_ns > 0) == ("ops", True)
    assert world.wait_for(lambda: two.current_settings() == made)
    assert world.wait_for(lambda: told[-1:] == [2])
    assert (two.current_settings().changed_by, two.current_settings().changed_ns) == ("ops", made.changed_ns)
    watch.cancel()
    two.change_settings(lambda now: replace(now, repair=replace(now.repair, grace_s=5, accepted_losses=("a",))))
    assert world.wait_for(lambda: one.current_settings().repair.grace_s == 5.0)
    assert one.current_settings().placement.min_zones == 2
    assert one.current_settings().repair.accepted_losses == ("a",)


def test_the_same_value_writes_nothing_and_what_is_kept_costs_no_round_trip() -> None:
    world = SimWorld()
    store = world.open()
    cluster = cluster_on(store)
    cluster.change_settings(lambda now: zones(3), by="one")
    changes = world.server.changes
    assert cluster.change_settings(lambda now: zones(3), by="two").changed_by == "one"
    assert world.server.changes == changes
    assert cluster.current_settings() == zones(3)
    store.faults = lambda operation, key: Fault.REFUSED
    assert cluster.current_settings() == zones(3)
    with pytest.raises(MetadataUnreachableError):
        cluster.read_settings()


def test_two_changes_at_once_both_take_effect() -> None:
    world = SimWorld()
    store = world.open()
    cluster, other = cluster_on(store), cluster_on(world.open())

    def another_is_faster(operation: str, key: str) -> None:
        if operation in ("create", "put"):
            store.faults = None
            other.change_settings(lambda now: replace(now, repair=replace(now.repair, grace_s=grace_s)))

    for grace_s, count in ((1.0, 2), (2.0, 3)):
        store.faults = another_is_faster
        cluster.change_settings(partial(with_zones, count))
        assert other.read_settings() == replace(zones(count), repair=RepairSettings(grace_s=grace_s))


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REQUEST_LOST])
def test_a_change_whose_answer_was_lost_is_made_once(fault: Fault) -> None:
    world = SimWorld()
    store = world.open()
    cluster = cluster_on(store)
    for count in (2, 3):
        store.faults = once(fault)
        cluster.change_settings(partial(with_zones, count))
        assert cluster_on(world.open()).read_settings() == zones(count)


def test_what_a_newer_member_wrote_is_kept() -> None:
    world = SimWorld()
    store = world.open()
    cluster = cluster_on(store)
    newer = json.loads(encode_settings(zones(2), {}))
    newer["moon"] = {"phase": "full"}
    newer["repair"]["patience"] = 7
    del newer["scrub"]
    cluster.create_value(ValueKind.SETTINGS, SETTINGS_KEY, encode_json(newer))
    assert cluster.read_settings() == zones(2), "what is missing has its default"
    cluster.change_settings(lambda now: zones(4))
    found = stored(store)
    assert (found["moon"], found["repair"]["patience"]) == ({"phase": "full"}, 7)
    assert found["placement"]["min_zones"] == 4


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (RepairSettings, "grace_s", -1.0),
        (RepairSettings, "grace_s", math.nan),
        (RepairSettings, "open_grace_s", math.inf),
        (RepairSettings, "grace_s", "600"),
        (RepairSettings, "recover_abandoned", 1),
        (RepairSettings, "bytes_per_second", 1),
        (RepairSettings, "bytes_per_second", 1e6),
        (RepairSettings, "hold_below", 1.5),
        (RepairSettings, "paused_until_ns", -1),
        (RepairSettings, "paused_by", "x" * 129),
        (RepairSettings, "accepted_losses", "bookie-1"),
        (RepairSettings, "accepted_losses", ("b",) * 101),
        (RepairSettings, "accepted_losses", (5,)),
        (PlacementSettings, "min_zones", 0),
        (PlacementSettings, "min_zones", True),
        (PlacementSettings, "strict", None),
        (ScrubSettings, "deep_s", 0.0),
    ],
)
def test_a_setting_out_of_range_is_named(kind: Any, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"{kind.section}\.{name} is .*; it takes"):
        kind(**{name: value})


def test_numbers_get_their_own_type() -> None:
    made = RepairSettings(grace_s=5, hold_below=1)
    assert (type(made.grace_s), type(made.hold_below), type(made.bytes_per_second)) == (float, float, int)


@pytest.mark.parametrize(
    "values",
    [
        {"repair": {"grace_s": -5}},
        {"repair": 7},
        {"repair": ""},
        {"placement": {"min_zones": "two"}},
        {"changed_ns": -1},
        {"changed_by": 7},
        {"changed_by": "\ud800"},
        {"padding": "x" * SETTINGS_BYTES_MAX},
    ],
)
def test_stored_settings_that_cannot_be_used_are_refused_and_those_known_stay(values: dict[str, Any]) -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.change_settings(lambda now: zones(2))
    assert cluster.current_settings() == zones(2)
    store = world.open()
    spoil(cluster_on(store), store, values)
    world.wait_for(lambda: False)
    assert cluster.current_settings() == zones(2)
    for call in (cluster.read_settings, lambda: cluster.change_settings(lambda now: zones(3))):
        with pytest.raises(CorruptError):
            call()


def spoil(cluster: ClusterMetadata, store: MetadataStore, values: dict[str, Any]) -> None:
    """Replace the stored settings."""
    node = store.get(SETTINGS_KEY, latest=True)
    assert node is not None
    store.delete(SETTINGS_KEY, node.version)
    cluster.create_value(ValueKind.SETTINGS, SETTINGS_KEY, json.dumps(values).encode())


def test_settings_written_without_the_secret_are_refused() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    ClusterMetadata(SimWorld().open(), cost=2)
    world.open().create(SETTINGS_KEY, b"\x02\x0c" + bytes(22) + b"{}")
    with pytest.raises(MetadataForgedError):
        cluster.read_settings()


def test_settings_of_another_kind_are_refused() -> None:
    cluster = cluster_on(SimWorld().open())
    with pytest.raises(UsageError, match="repair"):
        ClusterSettings(repair=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ClusterSettings"):
        cluster.change_settings(lambda now: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match="changed_by"):
        cluster.change_settings(lambda now: zones(2), by="x" * 200)
    with pytest.raises(UsageError, match="can be printed"):
        cluster.change_settings(lambda now: zones(2), by="x\n\x1b[2J")
    assert cluster.read_settings() == ClusterSettings()
