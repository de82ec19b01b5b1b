"""Pages of deleted ledgers: what auditors do to them that are stopped, suspended or doubled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from pybk.errors import CorruptError, UsageError
from pybk.metadata.authenticated_values import ValueKind, encode_json
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.deletions import PAGE_LEDGERS_MAX
from pybk.metadata.ledgers import LEDGERS_KEY, ledger_path
from pybk.metadata.registration import BookieState
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import bookie, cluster_on, ledger
from tests.metadata.simulated_store import Fault


def delete(cluster: ClusterMetadata, *ledger_ids: int) -> None:
    """Make ledgers, and delete them."""
    for ledger_id in ledger_ids:
        cluster.delete_ledger(ledger_id, cluster.create_ledger(ledger(ledger_id)), b"proof")


def pages(world: SimWorld) -> list[str]:
    """Return the names of the pages that are there."""
    return world.open().children("deletions")


def test_what_one_auditor_appends_is_read_by_all_bookies_once(world: World) -> None:
    auditor, reader = cluster_on(world.open()), cluster_on(world.open())
    assert reader.last_deletion_page() is None
    assert auditor.begin_deletions() == reader.begin_deletions() == 0
    assert reader.last_deletion_page() == 0
    assert auditor.append_deletions([7, 8, 7]) == 1
    assert auditor.append_deletions([9]) == 2
    assert reader.last_deletion_page() == 2
    assert reader.read_deletions(0, 2) == {7, 8, 9}
    assert reader.read_deletions(1, 2) == {9}
    assert reader.read_deletions(2, 2) == set()


def test_only_tombstones_are_listed_and_only_they_have_proofs() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.create_ledger(ledger(1))
    delete(cluster, 2, 3)
    world.open().create(f"{LEDGERS_KEY}/{ledger_path(4)}", b"nonsense")
    assert cluster.list_deleted(count=2) == ([2], 2)
    assert cluster.list_deleted(after=2, count=2) == ([3], 4)
    assert cluster.list_deleted(after=4, count=2) == ([], None)
    assert cluster.deletion_proofs([1, 2, 3, 4, 5]) == [None, b"proof", b"proof", None, None]


def test_an_append_that_was_stopped_is_finished_by_the_next_one() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.begin_deletions()
    cluster.create_value(ValueKind.DELETIONS, "deletions/0000000000000001", encode_json({"ledger_ids": [5]}))
    assert cluster.last_deletion_page() == 0, "it does not count yet"
    assert cluster.append_deletions([6]) == 2
    assert cluster.read_deletions(0, 2) == {5, 6}


@pytest.mark.parametrize("operation", ["create", "put"])
def test_two_auditors_at_once_lose_nothing(operation: str) -> None:
    world = SimWorld()
    store = world.open()
    cluster, other = cluster_on(store), cluster_on(world.open())
    cluster.begin_deletions()

    def another_is_faster(called: str, key: str) -> None:
        if called == operation:
            store.faults = None
            other.append_deletions([6])

    store.faults = another_is_faster
    cluster.append_deletions([5])
    last = cluster.last_deletion_page()
    assert last is not None
    assert cluster.read_deletions(0, last) == {5, 6}


def test_a_page_of_an_auditor_that_slept_counts_again_under_another_number() -> None:
    world = SimWorld()
    store = world.open()
    cluster, other = cluster_on(store), cluster_on(world.open())
    other.claim_cookie(bookie(1))
    cluster.begin_deletions()

    def sleep(called: str, key: str) -> None:
        if called == "create":
            store.faults = None
            for ledger_id in (6, 7):
                other.append_deletions([ledger_id])
            other.record_deletion_position(bookie(1), 2)
            assert other.trim_deletions() == 2

    store.faults = sleep
    assert cluster.append_deletions([5]) == 3
    assert cluster.read_deletions(2, 3) == {5}
    assert pages(world) == ["0000000000000001", "0000000000000003"]
    cluster.record_deletion_position(bookie(1), 3)
    assert cluster.trim_deletions() == 2
    assert cluster.append_deletions([8]) == 4, "numbers never begin again"


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REQUEST_LOST])
@pytest.mark.parametrize("operation", ["create", "put"])
def test_an_append_whose_answer_was_lost_is_made_once(fault: Fault, operation: str) -> None:
    world = SimWorld()
    store = world.open()
    cluster = cluster_on(store)
    cluster.begin_deletions()
    faults = iter((fault,))
    store.faults = lambda called, key: next(faults, None) if called == operation else None
    assert cluster.append_deletions([5]) == 1
    assert cluster.read_deletions(0, 1) == {5}


def test_pages_stay_until_every_bookie_is_past_them() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    for ledger_id in (5, 6, 7):
        cluster.append_deletions([ledger_id])
    assert cluster.oldest_deletion_position() is None
    for number in (1, 2):
        cluster.claim_cookie(bookie(number))
    cluster.record_deletion_position(bookie(1), 3)
    assert cluster.oldest_deletion_position() is None, "a bookie that has recorded nothing is behind"
    cluster.record_deletion_position(bookie(2), 1)
    assert cluster.oldest_deletion_position() == 1
    assert (cluster.trim_deletions(), cluster.trim_deletions()) == (1, 0)
    with pytest.raises(CorruptError, match="look at all ledgers"):
        cluster.read_deletions(0, 3)
    cluster.claim_cookie(bookie(2, instance=9), replace=True)
    assert cluster.oldest_deletion_position() is None, "the new instance has recorded nothing"
    for state in (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED):
        cluster.change_cookie(bookie(2).bookie_id, lambda found, state=state: replace(found, state=state))  # type: ignore[misc]
    assert cluster.oldest_deletion_position() == 3, "a bookie that was removed is waited for no longer"
    world.open().create("cookies/x", b"nonsense")
    with pytest.raises(CorruptError):
        cluster.trim_deletions()


def test_what_is_appended_is_bounded() -> None:
    cluster = cluster_on(SimWorld().open())
    for ids in ((), range(PAGE_LEDGERS_MAX + 1), (-1,)):
        with pytest.raises(UsageError):
            cluster.append_deletions(list(ids))
    assert cluster.append_deletions([(1 << 63) - 1 - each for each in range(PAGE_LEDGERS_MAX)]) == 1


HEAD = ValueKind.DELETION_HEAD, "deletion-head"
PAGE = ValueKind.DELETIONS, "deletions/0000000000000001"
POSITION = ValueKind.DELETION_POSITION, "deletion-positions/bookie-1%3A3181"


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        (*HEAD, {"last": -1}),
        (*HEAD, {"last": 1e300}),
        (*PAGE, {"ledger_ids": "7"}),
        (*PAGE, {"ledger_ids": [True]}),
        (*POSITION, {"page": 1}),
        (*POSITION, {"bookie_id": "other", "instance": "AAAAAAAAAAAAAAAAAAAAAA==", "page": 1}),
    ],
)
def test_other_values_are_refused(kind: ValueKind, key: str, values: dict[str, object]) -> None:
    cluster = cluster_on(SimWorld().open())
    cluster.create_value(kind, key, json.dumps(values).encode())
    read: dict[ValueKind, Callable[[], object]] = {
        ValueKind.DELETION_HEAD: cluster.last_deletion_page,
        ValueKind.DELETIONS: lambda: cluster.read_deletions(0, 1),
        ValueKind.DELETION_POSITION: lambda: cluster.read_deletion_position(bookie(1)),
    }
    with pytest.raises(CorruptError):
        read[kind]()
