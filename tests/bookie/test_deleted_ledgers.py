"""How a bookie finds the ledgers that were deleted: what it asks the metadata store, and what it never misses."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from pybk.bookie.deleted_ledgers import DeletedLedgers
from pybk.errors import MetadataUnreachableError
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import LEDGERS_PAGE
from tests.metadata.harness import SimWorld
from tests.metadata.records import bookie, cluster_on, ledger
from tests.metadata.simulated_store import Fault


class Bookie:
    """A bookie with fences of ledgers, and a count of what it asks the metadata store.

    Attributes:
        asked: How often each method of the store was called, for which kind of key.
        dropped: The ledgers that were to be dropped.
        keeps: It fails to drop them.
    """

    def __init__(self, world: SimWorld, ledgers: set[int]) -> None:
        self.store = world.open()
        self.metadata = cluster_on(self.store)
        self.metadata.claim_cookie(bookie(1))
        self.ledgers = ledgers
        self.asked: Counter[tuple[str, str]] = Counter()
        self.dropped: list[int] = []
        self.pauses: list[float] = []
        self.keeps = False
        self.store.faults = self.count
        self.begin()

    def begin(self) -> None:
        """Start the bookie, anew after the first time."""
        replicas: Any = SimpleNamespace(ledgers=lambda: sorted(self.ledgers), state=lambda ledger_id: None)
        self.deleted = DeletedLedgers(self.metadata, replicas, bookie(1), self.drop, self.pauses.append)

    def count(self, operation: str, key: str) -> Fault | None:
        self.asked[operation, key.split("/")[0]] += 1
        return None

    def drop(self, ledger_id: int) -> None:
        self.dropped.append(ledger_id)
        if not self.keeps:
            self.ledgers.discard(ledger_id)

    @property
    def position(self) -> int | None:
        return self.metadata.read_deletion_position(bookie(1))


def delete(cluster: ClusterMetadata, *ledger_ids: int) -> None:
    """Make ledgers, and delete them."""
    for ledger_id in ledger_ids:
        cluster.delete_ledger(ledger_id, cluster.create_ledger(ledger(ledger_id)))


def test_idle_ledgers_cost_one_read_a_minute_however_many_there_are() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.append_deletions([1])
    one = Bookie(world, set(range(5_000)))
    one.deleted.look()
    assert one.asked["get", "ledgers"] == 5_000, "once, at the start"
    assert len(one.pauses) == 5_000 / LEDGERS_PAGE - 1, "between pages"
    one.deleted.look()
    assert one.position == 1, "and not after the first look, as first entries may have been on their way"
    one.asked.clear()
    for _ in range(10):
        one.deleted.look()
    assert one.asked == {("get", "deletion-head"): 10}


def test_a_ledger_on_a_page_is_dropped_when_its_tombstone_is_seen_twice() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.begin_deletions()
    one = Bookie(world, {5, 6, 7})
    for _ in range(2):
        one.deleted.look()
    assert one.position == 0
    delete(auditor, 6, 900)
    auditor.create_ledger(ledger(5))
    auditor.append_deletions([5, 6, 900])
    one.asked.clear()
    one.deleted.look()
    assert one.dropped == []
    assert one.position == 0, "the page is not done yet"
    one.deleted.look()
    assert one.dropped == [6], "a ledger on a page that has no tombstone stays"
    one.deleted.look()
    assert one.position == 1
    assert one.asked["get", "ledgers"] <= 4, "ledgers of others are not looked at"


def test_the_position_advances_although_ledgers_are_deleted_all_the_time() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.begin_deletions()
    one = Bookie(world, set(range(100)))
    for ledger_id in range(10):
        delete(auditor, ledger_id)
        auditor.append_deletions([ledger_id])
        one.deleted.look()
    position = one.position
    assert position is not None
    assert position >= 7


def test_a_ledger_that_cannot_be_dropped_holds_the_position() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.begin_deletions()
    one = Bookie(world, {6, 7})
    for _ in range(2):
        one.deleted.look()
    delete(auditor, 6)
    auditor.append_deletions([6])
    one.keeps = True
    one.begin()
    for _ in range(4):
        auditor.append_deletions([900])
        one.deleted.look()
    assert one.position == 0
    assert one.dropped == [6, 6, 6]


def test_what_was_deleted_while_the_bookie_was_away_is_found_at_its_start() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    one = Bookie(world, {6, 7})
    delete(auditor, 6)
    auditor.append_deletions([6])
    for _ in range(3):
        one.deleted.look()
    assert (one.dropped, one.position) == ([6], 1)


def test_without_an_auditor_all_ledgers_are_looked_at_each_time() -> None:
    world = SimWorld()
    one = Bookie(world, {6, 7})
    one.deleted.look()
    delete(cluster_on(world.open()), 6)
    one.deleted.look()
    one.deleted.look()
    assert one.dropped == [6]
    assert one.position is None


def test_a_look_that_failed_is_made_again() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.begin_deletions()
    one = Bookie(world, {6, 7})
    one.deleted.look()
    delete(auditor, 6)
    auditor.append_deletions([6])
    one.store.faults = lambda operation, key: Fault.REFUSED if key.startswith("ledgers") else None
    with pytest.raises(MetadataUnreachableError):
        one.deleted.look()
    one.store.faults = None
    one.deleted.look()
    one.deleted.look()
    assert one.dropped == [6]


def test_a_page_that_is_missing_makes_the_bookie_look_at_all_its_ledgers() -> None:
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.begin_deletions()
    one = Bookie(world, {6, 7})
    one.deleted.look()
    delete(auditor, 6)
    auditor.append_deletions([6])
    store = world.open()
    node = store.get("deletions/0000000000000001")
    assert node is not None
    store.delete("deletions/0000000000000001", node.version)
    one.deleted.look()
    one.deleted.look()
    assert one.dropped == [6]


def test_a_bookie_that_ends_while_it_looks_records_nothing() -> None:
    world = SimWorld()
    cluster_on(world.open()).begin_deletions()
    one = Bookie(world, set(range(LEDGERS_PAGE + 1)))
    replicas: Any = SimpleNamespace(ledgers=lambda: sorted(one.ledgers), state=lambda ledger_id: None)
    DeletedLedgers(one.metadata, replicas, bookie(1), one.drop, lambda seconds: True).look()
    assert one.position is None


@pytest.mark.parametrize("again", [False, True])
def test_a_first_entry_that_arrives_after_its_page_was_read_is_dropped_before_the_page_counts(again: bool) -> None:
    """It was looked up before the deletion, during the first look of a process or a later one."""
    world = SimWorld()
    auditor = cluster_on(world.open())
    auditor.begin_deletions()
    one = Bookie(world, set())
    for _ in range(2 if again else 0):
        one.deleted.look()
    delete(auditor, 6)
    page = auditor.append_deletions([6])
    one.deleted.look()
    one.ledgers.add(6)
    auditor.append_deletions([6])  # by another auditor
    for _ in range(2):
        one.deleted.look()
        assert (one.position or 0) < page, "it is here, and needs its tombstone"
    assert one.ledgers == set()
    for _ in range(2):
        one.deleted.look()
    assert (one.position or 0) > page
