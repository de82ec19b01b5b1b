"""The states of bookies in their cookies: which may follow which, from which feature level on, and what keeps them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pybk.errors import CookieError, CorruptError, IllegalOperationError, UsageError
from pybk.feature_level import NEWEST_LEVEL, FeatureLevel
from pybk.metadata.authenticated_values import ValueKind
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import (
    TRANSITIONS,
    BookieCookie,
    BookieState,
    decode_cookie,
    encode_cookie,
)
from pybk.values import encode_json
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import bookie, cluster_on, key_for, registration
from tests.metadata.simulated_store import Fault

NAME = bookie(1).bookie_id
PLACE: dict[str, Any] = {"location": "zone/rack/host", "level_max": 2, "version": "0.2.0"}


def become(cluster: ClusterMetadata, state: BookieState, until_ns: int = 0) -> BookieCookie:
    """Give the bookie another state."""
    return cluster.change_cookie(NAME, lambda found: replace(found, state=state, until_ns=until_ns))


def in_state(state: BookieState) -> ClusterMetadata:
    """Return a cluster whose bookie is in a state."""
    cluster = cluster_on(SimWorld().open())
    cluster.claim_cookie(bookie(1))
    ways = {
        BookieState.MAINTENANCE: (BookieState.MAINTENANCE,),
        BookieState.DRAINING: (BookieState.DRAINING,),
        BookieState.DRAINED: (BookieState.DRAINING, BookieState.DRAINED),
        BookieState.REMOVED: (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED),
    }
    for each in ways.get(state, ()):
        become(cluster, each, int(each is BookieState.MAINTENANCE))
    return cluster


def test_a_new_bookie_has_a_name_that_can_be_printed() -> None:
    cluster = cluster_on(SimWorld().open())
    for name in ("b1\nb2", "b\x1b[2J", " "):
        with pytest.raises(UsageError, match="takes printable characters"):
            cluster.claim_cookie(bookie(1)._replace(bookie_id=name))
    for name in ("Bücherwurm 1", "..."):
        assert cluster.claim_cookie(bookie(1)._replace(bookie_id=name)).bookie.bookie_id == name


def test_an_instance_that_never_served_gives_way_to_a_new_one() -> None:
    cluster = cluster_on(SimWorld().open())
    stopped, new = bookie(1), bookie(1)._replace(instance=bytes(range(16)))
    cluster.claim_cookie(stopped)
    assert cluster.claim_cookie(new).bookie == new
    with pytest.raises(CookieError):
        cluster.record_boot(stopped, 1, **PLACE)
    assert cluster.record_boot(new, 1, **PLACE)
    with pytest.raises(CookieError, match="`pybk bookie --replace`"):
        cluster.claim_cookie(stopped)


def test_a_state_outlives_starts_and_keeps_its_time(world: World) -> None:
    cluster, other = cluster_on(world.open()), cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    assert cluster.record_boot(bookie(1), 1, **PLACE)
    told: list[BookieCookie | None] = []
    other.watch_cookie(NAME, lambda: told.append(other.read_cookie(NAME)))
    draining = become(cluster, BookieState.DRAINING)
    assert draining.state_since_ns > 0
    assert world.wait_for(lambda: told[-1:] == [draining])
    assert cluster.claim_cookie(bookie(1)) == draining
    assert cluster.record_boot(bookie(1), 2, **PLACE)
    assert other.read_cookie(NAME) == replace(draining, boots=2)
    assert (draining.location, draining.level_max, draining.version) == ("zone/rack/host", 2, "0.2.0")
    assert become(cluster, BookieState.DRAINING) == replace(draining, boots=2)


@pytest.mark.parametrize("target", BookieState)
@pytest.mark.parametrize("state", BookieState)
def test_only_the_listed_transitions_are_made(state: BookieState, target: BookieState) -> None:
    cluster = in_state(state)
    before = cluster.read_cookie(NAME)
    assert before is not None
    until_ns = int(target is BookieState.MAINTENANCE)
    if target is state or target in TRANSITIONS[state]:
        assert become(cluster, target, until_ns).state is target
    else:
        with pytest.raises(IllegalOperationError, match=rf"is {state} and cannot become {target}; it can become"):
            become(cluster, target, until_ns)
        assert cluster.read_cookie(NAME) == before


def test_a_removed_instance_does_not_come_back_but_its_name_may() -> None:
    cluster = in_state(BookieState.REMOVED)
    for call in (
        lambda: cluster.claim_cookie(bookie(1)),
        lambda: cluster.claim_cookie(bookie(1), replace=True),
        lambda: cluster.record_boot(bookie(1), 9),
        lambda: cluster.register(registration(bookie(1))),
        lambda: cluster.record_place(bookie(1), **PLACE),
    ):
        with pytest.raises(CookieError, match=r"was removed from the cluster.*empty directory"):
            call()
    assert cluster.list_cookies() == []
    assert [cookie.state for cookie in cluster.list_cookies(removed=True)] == [BookieState.REMOVED]
    made = cluster.claim_cookie(bookie(1, instance=9))
    assert made == BookieCookie(bookie(1, instance=9), cluster.cluster_id)
    assert cluster.list_cookies() == [made]
    assert cluster.record_boot(made.bookie, 1, **PLACE)
    with pytest.raises(CookieError, match="instance"):
        cluster.claim_cookie(bookie(1))


@pytest.mark.parametrize("level", [level for level in FeatureLevel if level < FeatureLevel.HEALING])
def test_below_the_level_there_are_no_states_and_older_members_lose_nothing(level: FeatureLevel) -> None:
    world = SimWorld()
    cluster = ClusterMetadata(world.open(), key_for=key_for, cost=2, level=level)
    cluster.claim_cookie(bookie(1))
    cluster.record_boot(bookie(1), 1, **PLACE)
    assert not cluster.record_place(bookie(1), **PLACE)
    assert cluster.read_cookie(NAME) == BookieCookie(bookie(1), cluster.cluster_id, 1)
    with pytest.raises(IllegalOperationError, match=rf"feature level {level.name}.*pybk cluster upgrade"):
        become(cluster, BookieState.DRAINING)
    assert cluster.upgrade(finalize=True).level is NEWEST_LEVEL
    assert cluster.record_place(bookie(1), **PLACE)
    assert become(cluster, BookieState.DRAINING).location == "zone/rack/host"


def test_a_member_that_has_not_seen_the_new_level_yet_keeps_the_state() -> None:
    world = SimWorld()
    old = ClusterMetadata(world.open(), key_for=key_for, cost=2, level=FeatureLevel.SEALS)
    new = ClusterMetadata(world.open(), key_for=key_for, cost=2)
    new.claim_cookie(bookie(1))
    new.upgrade(finalize=True)
    become(new, BookieState.DRAINING)
    assert old.feature_level is FeatureLevel.SEALS
    assert old.record_boot(bookie(1), 1, **PLACE)
    found = new.read_cookie(NAME)
    assert found is not None
    assert (found.state, found.boots) == (BookieState.DRAINING, 1)


def test_what_is_recorded_already_is_not_written_again() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    cluster.record_place(bookie(1), **PLACE)
    before = world.server.changes
    cluster.record_place(bookie(1), **PLACE)
    become(cluster, BookieState.ACTIVE)
    assert world.server.changes == before


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REQUEST_LOST])
def test_a_change_whose_answer_was_lost_is_made_once(fault: Fault) -> None:
    world = SimWorld()
    store = world.open()
    cluster = cluster_on(store)
    cluster.claim_cookie(bookie(1))
    faults = iter((fault,))
    store.faults = lambda operation, key: next(faults, None) if operation == "put" else None
    assert become(cluster, BookieState.DRAINING).state is BookieState.DRAINING
    assert become(cluster, BookieState.DRAINED).state is BookieState.DRAINED


def test_a_change_may_not_touch_anything_else() -> None:
    cluster = in_state(BookieState.ACTIVE)
    for values in ({"boots": 9}, {"location": "elsewhere"}, {"bookie": bookie(2)}, {"state_since_ns": 5}):
        with pytest.raises(UsageError, match="state and until_ns alone"):
            cluster.change_cookie(NAME, lambda found, values=values: replace(found, **values))  # type: ignore[misc]
    for state, until_ns in ((BookieState.MAINTENANCE, 0), (BookieState.DRAINING, 5), (BookieState.MAINTENANCE, -1)):
        with pytest.raises(UsageError, match="until_ns"):
            become(cluster, state, until_ns)
    with pytest.raises(CookieError, match="nobody"):
        cluster.change_cookie("nobody", lambda found: found)


def test_maintenance_can_be_made_longer() -> None:
    cluster = in_state(BookieState.MAINTENANCE)
    before = cluster.read_cookie(NAME)
    assert before is not None
    assert become(cluster, BookieState.MAINTENANCE, 99) == replace(before, until_ns=99)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", "asleep"),
        ("state", "maintenance"),
        ("until_ns", 5),
        ("boots", -1),
        ("level_max", "2"),
        ("location", "/a"),
        ("location", 7),
        ("version", "v" * 65),
        ("version", "\ud800"),
    ],
)
def test_a_stored_cookie_of_other_values_is_refused(name: str, value: object) -> None:
    cluster = cluster_on(SimWorld().open())
    values = json.loads(encode_cookie(BookieCookie(bookie(1), cluster.cluster_id, 3)))
    assert decode_cookie(values) == BookieCookie(bookie(1), cluster.cluster_id, 3)
    payload = json.dumps({**values, name: value}).encode()
    cluster.create_value(ValueKind.COOKIE, "cookies/bookie-1%3A3181", payload)
    with pytest.raises(CorruptError):
        cluster.read_cookie(NAME)


def test_a_cookie_of_defaults_is_written_as_it_ever_was() -> None:
    made = BookieCookie(bookie(1), bytes(16), 3)
    assert set(json.loads(encode_cookie(made))) == {"bookie_id", "instance", "cluster_id", "boots"}
    full = BookieCookie(bookie(1), bytes(16), 3, BookieState.MAINTENANCE, 5, 6, **PLACE)
    assert decode_cookie(json.loads(encode_cookie(full))) == full
    assert encode_json(json.loads(encode_cookie(full))) == encode_cookie(full)
