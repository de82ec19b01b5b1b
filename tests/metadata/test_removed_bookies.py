"""What removed bookies have left goes, and nothing of others; what a bookie records again and again on every store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.durable_positions import DurablePosition
from pybk.metadata.registration import BookieState
from pybk.metadata.removed_bookies import collect_removed
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import bookie, cluster_on, registration


def leave(cluster: ClusterMetadata, which: Bookie) -> None:
    """Record what a bookie records of itself."""
    cluster.record_position(DurablePosition(which, 1, 2, 3, 4, 5))
    cluster.record_deletion_position(which, 7)
    cluster.write_scrub(which, {"kinds": {}})


def left(cluster: ClusterMetadata, which: Bookie) -> list[bool]:
    """Return what there is of that."""
    position = cluster.read_position(which.bookie_id)
    return [
        position is not None and position.bookie == which,
        cluster.read_deletion_position(which) is not None,
        cluster.read_scrub(which) is not None,
    ]


def remove(cluster: ClusterMetadata, which: Bookie) -> None:
    for state in (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED):
        cluster.change_cookie(which.bookie_id, lambda found, state=state: replace(found, state=state))  # type: ignore[misc]


def test_what_removed_bookies_left_is_collected(world: World) -> None:
    cluster = cluster_on(world.open())
    assert collect_removed(cluster) == 0
    for number in (1, 2, 3):
        cluster.claim_cookie(bookie(number))
        leave(cluster, bookie(number))
    running = cluster.register(registration(bookie(2)))
    remove(cluster, bookie(1))
    remove(cluster, bookie(2))
    assert collect_removed(cluster) == 3
    assert left(cluster, bookie(1)) == [False] * 3
    assert left(cluster, bookie(2)) == [True] * 3, "one that still runs writes its position when it ends"
    assert left(cluster, bookie(3)) == [True] * 3, "one that was not removed needs it"
    running.close()
    assert collect_removed(cluster) == 3
    assert collect_removed(cluster) == 0
    cookies = cluster.list_cookies(removed=True)
    assert {each.bookie for each in cookies} == {bookie(1), bookie(2), bookie(3)}, "cookies refuse the instances"


def test_a_new_instance_keeps_what_it_records_under_the_name_of_one_that_was_removed() -> None:
    world = SimWorld()
    store = world.open()
    cluster, other = cluster_on(store), cluster_on(world.open())
    old, new = bookie(1), bookie(1, instance=9)
    cluster.claim_cookie(old)
    leave(cluster, old)
    remove(cluster, old)
    leave(other, new)  # its cookie is claimed before that; here the collection has not seen it yet
    assert collect_removed(cluster) == 0
    assert left(cluster, new) == [True] * 3

    leave(other, old)

    def overtaken(called: str, key: str) -> Any:
        if called == "delete":
            store.faults = None
            leave(other, new)

    store.faults = overtaken
    assert collect_removed(cluster) == 0, "it was replaced between the read and the removal"
    assert left(cluster, new) == [True] * 3


def test_a_bookie_records_other_orphans_on_every_store(world: World) -> None:
    store = world.open()
    cluster = cluster_on(store)
    for found in ([5, 7], [5], []):
        cluster.record_orphans(bookie(1), found)
        (recorded,) = cluster.list_orphans()
        assert (recorded.bookie, recorded.total, recorded.ledger_ids) == (bookie(1), len(found), tuple(found))
    world.end_session(store)
    other = cluster_on(world.open())
    assert world.wait_for(lambda: not other.list_orphans())
