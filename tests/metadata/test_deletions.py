"""Pages of deleted ledgers: what auditors do to them that are stopped, suspended or doubled."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from pybk.errors import (
    CorruptError,
    LedgerDeletedError,
    LedgerExistsError,
    MetadataForgedError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.metadata import deletions
from pybk.metadata.authenticated_values import ValueKind
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.deletions import PAGE_LEDGERS_MAX
from pybk.metadata.ledgers import LEDGERS_KEY, deleted_ids_key, ledger_path
from pybk.metadata.registration import BookieState
from pybk.metadata.store import MetadataStore
from pybk.values import encode_json
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import KEY, bookie, cluster_on, ledger
from tests.metadata.simulated_store import Fault


def delete(cluster: ClusterMetadata, *ledger_ids: int) -> None:
    """Make ledgers, and delete them."""
    for ledger_id in ledger_ids:
        cluster.delete_ledger(ledger_id, cluster.create_ledger(ledger(ledger_id)), b"proof")


def tombstones(cluster: ClusterMetadata) -> set[int]:
    """Return the ledgers that have a tombstone."""
    return {ledger_id for page in cluster.ledger_pages() for ledger_id in page.deleted}


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
    pages = [
        (set(page.ledgers), set(page.deleted), set(page.unknown), page.through)
        for page in cluster.ledger_pages(count=2)
    ]
    assert pages == [({1}, {2}, set(), 2), (set(), {3}, {4}, None)]
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


def deleted_on_a_page(cluster: ClusterMetadata, *ledger_ids: int) -> int:
    """Delete ledgers, and announce that; returns the number of the page."""
    delete(cluster, *ledger_ids)
    return cluster.append_deletions(ledger_ids)


def test_a_tombstone_is_folded_once_every_bookie_is_past_its_page(world: World) -> None:
    cluster = cluster_on(world.open())
    for number in (1, 2):
        cluster.claim_cookie(bookie(number))
    page = deleted_on_a_page(cluster, 7, 8, 30_000)
    cluster.create_ledger(ledger(9))
    cluster.record_deletion_position(bookie(1), page)
    assert cluster.trim_deletions() == 0
    assert tombstones(cluster) == {7, 8, 30_000}
    cluster.record_deletion_position(bookie(2), page)
    assert cluster.trim_deletions() == 1
    assert tombstones(cluster) == set()
    for ledger_id in (7, 8, 30_000):
        with pytest.raises(LedgerDeletedError):
            cluster.read_ledger(ledger_id)
        with pytest.raises(LedgerExistsError):
            cluster.create_ledger(ledger(ledger_id))
        assert cluster.deletion_proofs([ledger_id]) == [None]
        assert not cluster.is_unheard_of(ledger_id)
    assert cluster.is_unheard_of(6)
    assert world.open().children("deleted/000/0000/0000") == ["0000", "0003"], "a value for each ten thousand ids"
    page = deleted_on_a_page(cluster, 6)
    for number in (1, 2):
        cluster.record_deletion_position(bookie(number), page)
    assert (cluster.trim_deletions(), cluster.is_folded(6), cluster.is_folded(8)) == (1, True, True)
    assert cluster.read_ledger(9).metadata.ledger_id == 9


def test_a_damaged_value_of_deleted_ids_is_made_again_and_gives_none_of_them(world: World) -> None:
    cluster = cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    cluster.create_ledger(ledger(9))
    cluster.record_deletion_position(bookie(1), deleted_on_a_page(cluster, 7, 30_000))
    assert cluster.trim_deletions() == 1
    delete(cluster, 11)
    store, key = world.open(), deleted_ids_key(7)
    store.put(key, b"\x02damaged", store_version(store, key))
    for refused in (
        lambda: cluster.create_ledger(ledger(8)),
        lambda: cluster.read_ledger(7),
        lambda: cluster.is_unheard_of(8),
    ):
        with pytest.raises(CorruptError, match="`pybk metadata check URL --repair` makes it again"):
            refused()
    assert cluster.repair_deleted_ids(held={12}) == [key]
    assert cluster.repair_deleted_ids() == []
    assert [cluster.is_folded(each) for each in (7, 8, 9_999, 30_000)] == [True] * 4
    assert [cluster.is_folded(each) for each in (9, 11, 12, 10_000)] == [False] * 4
    assert cluster.read_ledger(9).metadata.ledger_id == 9
    with pytest.raises(LedgerExistsError):
        cluster.create_ledger(ledger(7))
    cluster.create_ledger(ledger(12))
    cluster.record_deletion_position(bookie(1), cluster.append_deletions([11]))
    assert (cluster.trim_deletions(), cluster.is_folded(11)) == (1, True)


def test_other_tombstones_are_folded_while_one_value_of_deleted_ids_is_damaged(world: World) -> None:
    cluster = cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    cluster.record_deletion_position(bookie(1), deleted_on_a_page(cluster, 7))
    assert cluster.trim_deletions() == 1
    delete(cluster, 8, 30_000, 30_001)
    store, key = world.open(), deleted_ids_key(7)
    store.put(key, b"\x02damaged", store_version(store, key))
    cluster.append_deletions([8, 30_000])
    cluster.record_deletion_position(bookie(1), cluster.append_deletions([30_001]))
    assert cluster.trim_deletions() == 1, "the page of the other tombstone stays until the value is repaired"
    assert tombstones(cluster) == {8}
    assert cluster.is_folded(30_000)
    assert cluster.is_folded(30_001)
    assert cluster.repair_deleted_ids() == [key]
    assert (cluster.trim_deletions(), cluster.is_folded(8), tombstones(cluster)) == (1, True, set())


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("bit", range(8 * 8))
def test_a_flipped_bit_in_the_header_of_deleted_ids_is_repaired(bit: int) -> None:
    """The header says which format the value has, and which secret: neither can be one that the cluster never had."""
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    cluster.record_deletion_position(bookie(1), deleted_on_a_page(cluster, 7))
    cluster.trim_deletions()
    store, key = world.open(), deleted_ids_key(7)
    node = store.get(key)
    assert node is not None
    value = bytearray(node.value)
    value[bit // 8] ^= 1 << bit % 8
    store.put(key, bytes(value), node.version)
    with pytest.raises((CorruptError, MetadataForgedError, UnsupportedFormatError)):
        cluster.is_folded(7)
    assert cluster.repair_deleted_ids() == [key]
    assert cluster.is_folded(7)


def test_deleted_ids_of_a_secret_that_is_not_given_here_are_not_repaired() -> None:
    world = SimWorld()
    secrets = [KEY, b"n" * 32]
    old = cluster_on(world.open())
    with_both = ClusterMetadata(world.open(), key_for=lambda identity: secrets, cost=2)
    with_both.add_secret()
    with_both.switch_secret()
    with_both.claim_cookie(bookie(1))
    with_both.record_deletion_position(bookie(1), deleted_on_a_page(with_both, 7))
    assert with_both.trim_deletions() == 1
    with pytest.raises(MetadataForgedError, match="secret"):
        old.repair_deleted_ids()
    assert with_both.is_folded(7)
    assert not with_both.is_folded(8)


def test_a_tombstone_that_is_removed_while_deleted_ids_are_made_again_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = SimWorld()
    store = world.open()
    cluster = cluster_on(store)
    cluster.claim_cookie(bookie(1))
    cluster.record_deletion_position(bookie(1), deleted_on_a_page(cluster, 7))
    cluster.trim_deletions()
    delete(cluster, 8)
    key, path = deleted_ids_key(7), f"{LEDGERS_KEY}/{ledger_path(8)}"
    store.put(key, b"\x02", store_version(store, key))
    listed = store.children

    def folded_meanwhile(key: str) -> list[str]:
        found = listed(key)
        if "0008" in found:
            store.delete(path, store_version(store, path))
        return found

    monkeypatch.setattr(store, "children", folded_meanwhile)
    assert cluster.repair_deleted_ids() == [key]
    assert cluster.is_folded(8)


def store_version(store: MetadataStore, key: str) -> int:
    """Return the version of a key."""
    node = store.get(key, latest=True)
    assert node is not None
    return node.version


def test_below_the_level_streams_tombstones_stay() -> None:
    """A bookie of an older pybk would take the metadata for outdated."""
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.feature_level = FeatureLevel.HEALING
    cluster.claim_cookie(bookie(1))
    cluster.record_deletion_position(bookie(1), deleted_on_a_page(cluster, 7))
    assert cluster.trim_deletions() == 1
    assert tombstones(cluster) == {7}


def test_a_call_folds_a_bounded_number_of_tombstones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "FOLDED_MAX", 3)
    world = SimWorld()
    cluster = cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    cluster.record_deletion_position(bookie(1), deleted_on_a_page(cluster, *range(7)))
    assert [cluster.trim_deletions() for _ in range(3)] == [0, 0, 1]
    assert all(map(cluster.is_folded, range(7)))
    assert pages(world) == []


def test_a_folded_tombstone_is_deleted_for_ever_also_for_two_auditors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was suspended folds again what the other has folded."""
    world = SimWorld()
    one, other = cluster_on(world.open()), cluster_on(world.open())
    one.claim_cookie(bookie(1))
    one.record_deletion_position(bookie(1), deleted_on_a_page(one, 1, 2))
    found = one.oldest_deletion_position

    def suspended() -> int | None:
        position = found()
        assert other.trim_deletions() == 1
        other.record_deletion_position(bookie(1), deleted_on_a_page(other, 3))
        return position

    monkeypatch.setattr(one, "oldest_deletion_position", suspended)
    assert one.trim_deletions() == 0
    assert [one.is_folded(each) for each in (1, 2, 3)] == [True, True, False]


def test_an_id_whose_tombstone_is_folded_while_it_is_taken_is_not_given_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor, store = cluster_on(world.open()), world.open()
    client = cluster_on(store)
    auditor.claim_cookie(bookie(1))
    page = deleted_on_a_page(auditor, 7)
    client.create_ledger(ledger(8))  # so that the value of folded tombstones is known
    create = store.create

    def folded_before(key: str, value: bytes, *, leased: bool = False) -> int:
        auditor.record_deletion_position(bookie(1), page)
        assert auditor.trim_deletions() == 1
        return create(key, value, leased=leased)

    monkeypatch.setattr(store, "create", folded_before)
    with pytest.raises(LedgerExistsError):
        client.create_ledger(ledger(7))
    with pytest.raises(LedgerDeletedError):
        auditor.read_ledger(7)


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
