"""Ledgers in the metadata store: created once, changed by compare-and-set, deleted for ever."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.errors import (
    CorruptError,
    LedgerDeletedError,
    LedgerExistsError,
    MetadataForgedError,
    MetadataVersionError,
    NoSuchLedgerError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import NEWEST_LEVEL
from pybk.flags import LedgerType
from pybk.ledger.ledger_metadata import Fragment, LedgerState
from pybk.metadata import ledgers
from pybk.metadata.authenticated_values import ValueKind, encode_authenticated
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import ID_BLOCK, LEDGER_ID_MAX, OtherLedger, ledger_path
from pybk.metadata.lmdb_rows import StoredValue, node_name, put_value
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.storage.io.lmdb_environment import WriteTransaction
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import KEYS, bookie, cluster_on, ledger
from tests.metadata.simulated_store import SimServer


def test_versions_of_ledgers_change_with_their_metadata(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    first, second = (one.create_ledger(ledger(number)) for number in (7, 8))
    assert one.ledger_versions([8, 9, 7]) == [second, None, first]
    assert two.ledger_versions([8, 9, 7], latest=True) == [second, None, first]
    newer = two.write_ledger(replace(ledger(7), version=1), first)
    two.delete_ledger(8, second)
    assert two.ledger_versions([7]) == [newer]
    (deleted,) = two.ledger_versions([8])
    assert deleted not in (None, second)
    assert two.ledger_versions([]) == two.ledger_versions([], latest=True) == []
    assert one.ledger_versions([7], latest=True) == [newer]


def test_a_ledger_lives_and_is_deleted_for_ever(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    made = ledger(7)
    version = one.create_ledger(made)
    assert two.read_ledger(7) == (made, version)
    closed = replace(made, state=LedgerState.CLOSED, last_entry_id=41, length=99, version=1)
    newer = two.write_ledger(closed, version)
    assert one.read_ledger(7) == (closed, newer)
    with pytest.raises(MetadataVersionError) as refused:
        one.write_ledger(made, version)
    assert not refused.value.outcome_unknown
    with pytest.raises(MetadataVersionError):
        one.delete_ledger(7, version)
    assert one.deletion_proofs([7]) == [None]
    one.delete_ledger(7, newer)
    for cluster in (one, two):
        assert cluster.deletion_proofs([7]) == [b""]
        with pytest.raises(LedgerDeletedError, match="7"):
            cluster.read_ledger(7)
        with pytest.raises(LedgerExistsError, match="given once"):
            cluster.create_ledger(made)
        with pytest.raises(MetadataVersionError):
            cluster.write_ledger(closed, newer)
        with pytest.raises(MetadataVersionError):
            cluster.delete_ledger(7, newer)


def test_a_ledger_that_was_never_created_does_not_count_as_deleted(world: World) -> None:
    cluster = cluster_on(world.open())
    assert cluster.deletion_proofs([3]) == [None]
    with pytest.raises(NoSuchLedgerError) as missing:
        cluster.read_ledger(3)
    assert not isinstance(missing.value, LedgerDeletedError)
    with pytest.raises(MetadataVersionError):
        cluster.write_ledger(ledger(3), 1)
    with pytest.raises(MetadataVersionError):
        cluster.delete_ledger(3, 1)


def test_an_id_is_taken_once(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    one.create_ledger(ledger(5))
    with pytest.raises(LedgerExistsError, match="5"):
        two.create_ledger(ledger(5, key_salt=b"x" * 16))


def test_ledgers_are_listed_by_pages_without_the_deleted(world: World) -> None:
    cluster = cluster_on(world.open())
    ids = [0, 1, 2, 9_999, 10_000, 10_001, 123_456_789, LEDGER_ID_MAX - 1, LEDGER_ID_MAX]
    for ledger_id in reversed(ids):
        version = cluster.create_ledger(ledger(ledger_id))
        if ledger_id in (1, 10_000):
            cluster.delete_ledger(ledger_id, version)
    live = [ledger_id for ledger_id in ids if ledger_id not in (1, 10_000)]
    assert cluster.list_ledgers() == live
    for count in (1, 2, 3, 7, 8):
        pages: list[int] = []
        while page := cluster.list_ledgers(after=pages[-1] if pages else -1, count=count):
            assert len(page) <= count
            pages += page
        assert pages == live
    assert cluster.list_ledgers(after=LEDGER_ID_MAX) == []
    found = cluster.read_ledgers([0, 1, 4, 9_999])
    assert [stored and stored.metadata.ledger_id for stored in found] == [0, None, None, 9_999]
    with pytest.raises(UsageError):
        cluster.list_ledgers(count=0)


def test_many_ledgers_are_listed_without_reading_what_is_not_wanted() -> None:
    server = SimServer()
    cluster = cluster_on(server.store())
    for ledger_id in range(0, 60_000, 100):
        cluster.create_ledger(ledger(ledger_id))
    calls: list[str] = []
    store = server.store(lambda operation, key: calls.append(f"{operation} {key}"))
    page = cluster_on(store).list_ledgers(after=30_049, count=10)
    assert page == list(range(30_100, 31_100, 100))
    assert sum(call.startswith("get ledgers/") for call in calls) == 10
    assert sum(call.startswith("children") for call in calls) < 10


@pytest.mark.parametrize(
    ("above", "wrong", "below"),
    [("000/0000/0000/0000", "12", ""), ("000/0000", "abcd", "/0000/0012"), ("000/0000", "00000", "/0000/0012")],
)
def test_a_key_that_is_not_of_a_ledger_is_logged_and_left_out(
    above: str, wrong: str, below: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = SimServer()
    cluster = cluster_on(server.store())
    server.store().create(f"ledgers/{above}/{wrong}{below}", b"x")
    cluster.create_ledger(ledger(7))
    assert cluster.list_ledgers() == [7]
    assert f"ledgers/{above}/'{wrong}'" in caplog.text


@pytest.mark.parametrize("ledger_id", [-1, LEDGER_ID_MAX + 1, True, 1.0, "1"])
def test_invalid_ledger_ids_are_refused(ledger_id: int) -> None:
    with pytest.raises(UsageError):
        ledger_path(ledger_id)


def test_paths_are_bookkeepers_long_ones() -> None:
    assert ledger_path(1234567890123456789) == "123/4567/8901/2345/6789"
    assert ledger_path(1) == "000/0000/0000/0000/0001"


def test_ids_come_in_blocks_and_never_twice(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    taken: list[int] = []

    def take(cluster: ClusterMetadata) -> None:
        taken.extend([cluster.new_ledger_id() for _ in range(ID_BLOCK + 10)])

    threads = [threading.Thread(target=take, args=(cluster,)) for cluster in (one, two, one)]
    for thread in threads:
        thread.start()
        if isinstance(world, SimWorld):  # knows no threads
            thread.join()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == len(taken) == 3 * (ID_BLOCK + 10)
    assert max(taken) < 6 * ID_BLOCK


def test_ids_cost_one_change_per_block() -> None:
    calls: list[str] = []
    server = SimServer()
    cluster_on(server.store())
    cluster = cluster_on(server.store(lambda operation, key: calls.append(operation)))
    for _ in range(2 * ID_BLOCK):
        cluster.new_ledger_id()
    assert calls.count("create") + calls.count("put") == 2


def test_ids_end() -> None:
    server = SimServer()
    cluster = cluster_on(server.store())
    cluster.create_value(ValueKind.IDS, ledgers.IDS_KEY, b'{"next":%d}' % (LEDGER_ID_MAX - ID_BLOCK + 2))
    with pytest.raises(UsageError, match="another cluster"):
        cluster.new_ledger_id()


def test_metadata_that_was_changed_by_others_than_members_is_refused(world: World) -> None:
    store = world.open()
    cluster = cluster_on(store)
    cluster.create_ledger(ledger(1))
    cluster.create_ledger(ledger(2))
    key, other = (f"ledgers/{ledger_path(number)}" for number in (1, 2))
    node, foreign = store.get(key), store.get(other)
    assert node is not None
    assert foreign is not None
    places = (0, 1, 2, 5, 20, 60, len(node.value) - 1)
    version = node.version
    for at in places:
        bad = bytearray(node.value)
        bad[at] ^= 1
        version = store.put(key, bytes(bad), version)
        with pytest.raises((MetadataForgedError, CorruptError, UnsupportedFormatError)):
            cluster.read_ledger(1)
    version = store.put(key, foreign.value, version)
    with pytest.raises(MetadataForgedError, match="secret"):
        cluster.read_ledger(1)
    assert cluster.list_ledgers() == [1, 2], "who lists ledgers sees a damaged one, too"
    store.put(key, node.value, version)
    assert cluster.read_ledger(1).metadata == ledger(1)


def test_a_watch_of_a_ledger_sees_its_changes(world: World) -> None:
    cluster, other = cluster_on(world.open()), cluster_on(world.open())
    version = cluster.create_ledger(ledger(1))
    states: list[LedgerState] = []
    cluster.watch_ledger(1, lambda: states.append(cluster.read_ledger(1).metadata.state))
    other.write_ledger(ledger(1, state=LedgerState.IN_RECOVERY), version)
    assert world.wait_for(lambda: LedgerState.IN_RECOVERY in states)


def test_large_metadata_fits(world: World) -> None:
    cluster = cluster_on(world.open())
    ensemble = (bookie(1), bookie(2), bookie(3))
    large = ledger(
        1,
        custom_metadata={"key": b"x" * 65_533},
        fragments=tuple(Fragment(number * 10, ensemble) for number in range(1000)),
    )
    cluster.create_ledger(large)
    assert cluster.read_ledger(1).metadata == large


def test_a_hundred_thousand_ledgers_are_listed_in_lmdb(tmp_path: Path) -> None:
    store = LmdbMetadataStore(str(tmp_path / "metadata"))
    cluster = cluster_on(store)
    encoded = ledger(0).encode()

    def fill(transaction: WriteTransaction, number: int) -> None:
        # One transaction for all, as a hundred thousand syncs would take a minute.
        for ledger_id in range(100_000):
            key = f"ledgers/{ledger_path(ledger_id)}"
            payload = encoded.replace(b'"ledger_id":0', b'"ledger_id":%d' % ledger_id)
            value = encode_authenticated(ValueKind.LEDGER, key, bytes(16), payload, KEYS, NEWEST_LEVEL)
            put_value(transaction, node_name(key), StoredValue(number, number, 0, value))

    store.change(fill)
    assert cluster.list_ledgers(after=98_998, count=1000) == list(range(98_999, 99_999))
    assert cluster.list_ledgers(after=99_990) == list(range(99_991, 100_000))
    assert cluster.list_ledgers(count=1500) == list(range(1500))
    cluster.close()


def test_pages_of_all_ledgers_have_what_changed_of_those_that_are_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "LISTED_KEYS", 3)
    cluster = cluster_on(world.open())
    versions = {each: cluster.create_ledger(ledger(each)) for each in (1, 2, 5, 10_001, 10_002, 90_000, 90_001)}
    changed = cluster.read_ledger(5)
    cluster.write_ledger(changed.metadata, changed.version)
    cluster.delete_ledger(10_002, versions[10_002])
    cluster.create_ledger(ledger(3))
    pages = list(cluster.ledger_pages(count=2, known=versions.get))
    assert [page.through for page in pages[:-1]] == sorted(each.through or 0 for each in pages[:-1])
    assert pages[-1].through is None
    assert {each for page in pages for each in page.ledgers} == {3, 5}
    assert {each for page in pages for each in page.deleted} == {10_002}
    assert {each for page in pages for each in page.same} == {1, 2, 10_001, 90_000, 90_001}
    assert [set(page.ledgers) for page in cluster_on(SimWorld().open()).ledger_pages()] == [set()]


def test_pages_of_one_type_have_others_by_their_types_alone(world: World) -> None:
    cluster = cluster_on(world.open())
    kinds = {1: "YQ==", 2: "other", 3: "YQ==", 4: ""}
    versions = {
        each: cluster.create_ledger(replace(ledger(each), ledger_type=LedgerType(kind), custom_metadata={}))
        for each, kind in kinds.items()
    }
    named = replace(ledger(5), ledger_type=LedgerType("other"), custom_metadata={"ledger_type": b"a"})
    cluster.create_ledger(named)
    (page,) = cluster.ledger_pages(ledger_type="YQ==")
    assert {*page.ledgers} == {1, 3, 5}, "metadata that may be of this type are decoded"
    assert page.others == {2: OtherLedger(LedgerType("other"), versions[2]), 4: OtherLedger(LedgerType(), versions[4])}
    (page,) = cluster.ledger_pages(ledger_type="YQ==", known=versions.get)
    assert ({*page.ledgers}, page.others, {*page.same}) == ({5}, {}, {1, 2, 3, 4})
    (page,) = cluster.ledger_pages()
    assert ({*page.ledgers}, page.others) == ({1, 2, 3, 4, 5}, {})


def test_changed_ledgers_are_reported_by_their_ids() -> None:
    world = SimWorld()
    cluster = cluster_on(world.open())
    found: list[frozenset[int] | None] = []
    watch = cluster.watch_ledgers(found.append)
    world.server.deliver()
    assert found == [None], "nothing is known of earlier changes"
    version = cluster.create_ledger(ledger(7))
    world.server.deliver()
    cluster.delete_ledger(7, version)
    world.open().create("ledgers/other", b"is no ledger")
    world.server.deliver()
    assert found[1:] == [frozenset({7})] * 2
    watch.cancel()
