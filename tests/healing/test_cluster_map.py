"""The map of all ledgers, kept by deltas."""

from __future__ import annotations

import tracemalloc
from random import Random

from pybk.healing.cluster_map import ClusterMap
from pybk.ledger.ledger_metadata import LedgerMetadata
from tests.healing.clusters import bookie, ledger, mapped

MIB = 1 << 20


def held(cluster: ClusterMap) -> dict[str, set[int]]:
    """Return the ledgers of each bookie that has some."""
    found = {each.bookie_id: set(cluster.ledgers_of(number)) for number, each in enumerate(cluster.bookies)}
    return {name: each for name, each in found.items() if each}


def test_the_index_follows_each_change() -> None:
    cluster = mapped(ledger(1, (0, (0, 1))), ledger(2, (0, (1, 2)), last=None))
    assert held(cluster) == {"b0": {1}, "b1": {1, 2}, "b2": {2}}
    assert cluster.open_ledgers == {2}
    assert cluster.largest_open_ensemble == 2
    assert cluster.apply(2, ledger(2, (0, (1, 2)), (50, (1, 3)), last=None), 1)
    assert held(cluster) == {"b0": {1}, "b1": {1, 2}, "b2": {2}, "b3": {2}}
    assert cluster.apply(2, ledger(2, (0, (1, 3)), (50, (1, 3)), last=80), 2)
    assert held(cluster) == {"b0": {1}, "b1": {1, 2}, "b3": {2}}
    assert (cluster.open_ledgers, cluster.largest_open_ensemble) == (set(), 0)
    assert cluster.apply(1, None, 0)
    assert held(cluster) == {"b1": {2}, "b3": {2}}
    assert (len(cluster), list(cluster), 1 in cluster) == (1, [2], False)


def test_an_older_version_changes_nothing() -> None:
    cluster = mapped(ledger(1, (0, (0, 1)), version=5))
    assert not cluster.apply(1, ledger(1, (0, (2, 3))), 4)
    assert not cluster.apply(1, ledger(1, (0, (2, 3))), 5)
    assert held(cluster) == {"b0": {1}, "b1": {1}}


def test_fragments_end_where_the_next_one_begins() -> None:
    cluster = mapped(ledger(1, (0, (0, 1)), (40, (1, 2)), last=99), ledger(2, (0, (0,)), (7, (1,)), last=None))
    first = cluster.get(1)
    second = cluster.get(2)
    assert first is not None
    assert second is not None
    assert [tuple(each) for each in cluster.fragments(first)] == [(0, 39, (0, 1)), (40, 99, (1, 2))]
    assert [each.last_entry_id for each in cluster.fragments(second)] == [6, None]


def test_bytes_of_a_place_are_its_share_of_the_length() -> None:
    cluster = mapped(ledger(1, (0, (0, 1, 2)), (40, (1, 2, 3)), quorum=(2, 1), last=99, length=3000))
    found = cluster.get(1)
    assert found is not None
    assert [cluster.bytes_of_place(found, each) for each in cluster.fragments(found)] == [800, 1200]
    cluster = mapped(ledger(1, (0, (0,)), last=-1, length=0))
    found = cluster.get(1)
    assert found is not None
    assert cluster.bytes_of_place(found, cluster.fragments(found)[0]) == 0


def test_pages_remove_what_they_do_not_list() -> None:
    cluster = mapped(*(ledger(each, (0, (0,))) for each in (1, 2, 3, 4)))
    cluster.begin_read()
    assert cluster.apply_page(-1, 2, {2: (ledger(2, (0, (0,))), 0)}, unknown=()) == [1]
    assert cluster.apply_page(2, None, {5: (ledger(5, (0, (1,))), 0)}, unknown=(4,)) == [3, 5]
    assert sorted(cluster) == [2, 4, 5]


def test_pages_leave_alone_what_a_delta_has_changed() -> None:
    cluster = mapped(ledger(1, (0, (0,))), ledger(2, (0, (0,))))
    cluster.begin_read()
    cluster.apply(1, None, 0)
    cluster.apply(2, ledger(2, (0, (1,))), 3)
    cluster.apply(9, ledger(9, (0, (1,))), 0)
    page: dict[int, tuple[LedgerMetadata, int]] = {1: (ledger(1, (0, (0,))), 0), 2: (ledger(2, (0, (0,))), 0)}
    assert cluster.apply_page(-1, None, page, unknown=()) == []
    assert held(cluster) == {"b1": {2, 9}}


def test_a_page_that_is_newer_than_a_delta_counts() -> None:
    cluster = mapped(ledger(1, (0, (0,))))
    cluster.begin_read()
    cluster.apply(1, ledger(1, (0, (1,))), 1)
    assert cluster.apply_page(-1, None, {1: (ledger(1, (0, (2,))), 2)}, unknown=()) == [1]
    assert held(cluster) == {"b2": {1}}


def test_a_hundred_thousand_ledgers_are_small() -> None:
    source = Random(1)
    bookies = [bookie(each) for each in range(50)]
    tracemalloc.start()
    try:
        cluster = ClusterMap()
        count = 2000
        for each in range(count):
            cluster.apply(each, ledger(each, (0, source.sample(bookies, 3)), length=source.randrange(1 << 30)), 1000)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used * (100_000 / count) < 100 * MIB
