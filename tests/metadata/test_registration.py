"""Bookies in the metadata store: whose cookie it is, who is there, and what their locks protect."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from pybk.errors import (
    ClosedError,
    CookieError,
    MetadataForgedError,
    MetadataUnreachableError,
    UsageError,
)
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata import underreplication
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import leaves_after
from pybk.metadata.locks import Election
from pybk.metadata.registration import BookieCookie, BookieRegistration
from pybk.metadata.store import Node
from pybk.metadata.underreplication import UNDER_REPLICATED_KEY, missing_key
from tests.metadata.harness import World
from tests.metadata.records import KEY, bookie, cluster_on, is_held, registration
from tests.metadata.simulated_store import Fault, SimServer


def test_a_cookie_is_one_instances_until_it_is_replaced(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    made = one.claim_cookie(bookie(1))
    assert made == BookieCookie(bookie(1), one.cluster_id)
    assert two.claim_cookie(bookie(1)) == made
    assert one.record_boot(bookie(1), 1)
    started = one.read_cookie(bookie(1).bookie_id)
    with pytest.raises(CookieError, match="replace"):
        two.claim_cookie(bookie(1, instance=9))
    assert one.read_cookie(bookie(1).bookie_id) == started
    assert two.claim_cookie(bookie(1, instance=9), replace=True).bookie == bookie(1, instance=9)
    assert two.record_boot(bookie(1, instance=9), 1)
    with pytest.raises(CookieError):
        one.claim_cookie(bookie(1))
    with pytest.raises(CookieError):
        one.record_boot(bookie(1), 1)
    with pytest.raises(CookieError):
        one.register(registration(bookie(1)))
    one.claim_cookie(bookie(2))
    assert [cookie.bookie for cookie in two.list_cookies()] == [bookie(1, instance=9), bookie(2)]


def test_directories_put_back_to_an_older_state_are_found_out(world: World) -> None:
    cluster = cluster_on(world.open())
    with pytest.raises(CookieError, match="claim"):
        cluster.record_boot(bookie(1), 1)
    cluster.claim_cookie(bookie(1))
    assert cluster.record_boot(bookie(1), 1)
    assert cluster.record_boot(bookie(1), 2)
    assert cluster.record_boot(bookie(1), 4), "a start that was not recorded, as the store was out of reach"
    assert not cluster.record_boot(bookie(1), 4)
    assert not cluster.record_boot(bookie(1), 3)
    found = cluster.read_cookie(bookie(1).bookie_id)
    assert found is not None
    assert found.boots == 4


def test_a_registration_lasts_as_long_as_its_bookie(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    one.claim_cookie(bookie(1))
    told: list[list[Bookie]] = []
    two.watch_bookies(lambda: told.append([found.bookie for found in two.list_bookies()]))
    with pytest.raises(CookieError, match="claim"):
        one.register(registration(bookie(2)))
    registered = one.register(registration(bookie(1)))
    assert registered.registered
    assert two.find_bookie(bookie(1).bookie_id) == registration(bookie(1))
    assert two.find_bookie("nobody") is None
    assert world.wait_for(lambda: told[-1:] == [[bookie(1)]])
    newer = registration(bookie(1), load=2.0, read_only=True, tiers={StorageHint.SSD: 5}, in_limbo=3)
    registered.update(newer)
    assert two.list_bookies() == [newer]
    with pytest.raises(UsageError):
        registered.update(registration(bookie(2)))
    registered.close()
    registered.close()
    assert not is_held(registered)
    assert two.list_bookies() == []
    assert world.wait_for(lambda: told[-1:] == [[]])
    with pytest.raises(ClosedError):
        registered.update(newer)


def test_a_restarted_bookie_takes_its_registration_over_at_once(world: World) -> None:
    old, new, other = (cluster_on(world.open()) for _ in range(3))
    old.claim_cookie(bookie(1))
    before = old.register(registration(bookie(1)))
    new.register(registration(bookie(1), addresses=("tcp://127.0.0.1:9",)))
    assert [found.addresses for found in other.list_bookies()] == [("tcp://127.0.0.1:9",)]
    with pytest.raises(CookieError, match="another process"):
        before.update(registration(bookie(1), load=3.0))
    before.close()
    old.close()
    assert [found.addresses for found in other.list_bookies()] == [("tcp://127.0.0.1:9",)]


def test_a_registration_that_was_taken_over_is_not_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    server = SimServer()
    store = server.store()
    old, new = cluster_on(store), cluster_on(server.store())
    old.claim_cookie(bookie(1))
    before = old.register(registration(bookie(1)))
    after = new.register(registration(bookie(1), addresses=("tcp://127.0.0.1:9",)))
    server.expire(store.session())
    while server.deliver():
        pass
    assert [found.addresses for found in new.list_bookies()] == [("tcp://127.0.0.1:9",)]
    assert is_held(after)
    assert not is_held(before)
    assert "registered by another process" in caplog.text
    with pytest.raises(CookieError, match="another process"):
        before.update(registration(bookie(1), load=3.0))
    new.close()
    while server.deliver():
        pass
    before.update(registration(bookie(1), load=3.0))
    assert [found.load for found in old.list_bookies()] == [3.0]


def test_another_instance_does_not_take_a_registration_over(world: World) -> None:
    old, new = cluster_on(world.open()), cluster_on(world.open())
    old.claim_cookie(bookie(1))
    registered = old.register(registration(bookie(1)))
    new.claim_cookie(bookie(1, instance=9), replace=True)
    with pytest.raises(CookieError, match="end that one first"):
        new.register(registration(bookie(1, instance=9)))
    registered.close()
    new.register(registration(bookie(1, instance=9)))
    assert [found.bookie for found in old.list_bookies()] == [bookie(1, instance=9)]


def test_a_bookie_whose_session_ended_is_registered_again_and_says_so_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    store = world.open()
    cluster, other = cluster_on(store), cluster_on(world.open())
    cluster.claim_cookie(bookie(1))
    registered = cluster.register(registration(bookie(1)))

    def lost() -> int:
        return sum("the registration is gone" in line for line in caplog.messages)

    for times in (1, 2):
        world.end_session(store)
        assert world.wait_for(lambda times=times: lost() == times and registered.registered)  # type: ignore[misc]
        assert world.wait_for(lambda: len(other.list_bookies()) == 1)
    assert lost() == 2
    registered.update(registration(bookie(1), load=7.0))
    assert other.list_bookies()[0].load == 7.0


def test_a_registration_that_was_removed_is_made_again(world: World) -> None:
    cluster = cluster_on(world.open())
    store = world.open()
    cluster.claim_cookie(bookie(1))
    registered = cluster.register(registration(bookie(1)))
    node = store.get(registered.key, latest=True)
    assert node is not None
    store.delete(registered.key, node.version)
    assert world.wait_for(lambda: len(cluster.list_bookies()) == 1)
    node = store.get(registered.key, latest=True)
    assert node is not None
    store.delete(registered.key, node.version)
    registered.update(registration(bookie(1), load=4.0))
    assert world.wait_for(lambda: [found.load for found in cluster.list_bookies()] == [4.0])


def test_a_bookie_does_not_decode_what_it_registered_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    store = world.open()
    cluster = cluster_on(store)
    cluster.claim_cookie(bookie(1))
    decoded: list[str] = []
    decode = ClusterMetadata.registration

    def count(metadata: ClusterMetadata, key: str, node: Node) -> Any:
        decoded.append(key)
        return decode(metadata, key, node)

    monkeypatch.setattr(ClusterMetadata, "registration", count)
    registered = cluster.register(registration(bookie(1)))
    seen: list[int] = []
    store.watch(registered.key, lambda: seen.append(1))
    registered.update(registration(bookie(1), load=4.0))
    assert registered.written.load == 4.0
    assert world.wait_for(lambda: bool(seen)), "its own watch of the registration was added before, and called before"
    assert decoded == []


def test_registering_again_is_retried_until_the_store_can_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    server = SimServer()
    store = server.store()
    cluster, other = cluster_on(store), cluster_on(server.store())
    cluster.claim_cookie(bookie(1))
    registered = cluster.register(registration(bookie(1)))
    store.faults = lambda operation, key: Fault.REFUSED if operation == "create" else None
    server.expire(store.session())
    for _ in range(3):
        assert server.deliver()
    assert not is_held(registered)
    registered.update(registration(bookie(1), load=9.0))
    assert registered.written.load != 9.0, "nobody knows it yet"
    store.faults = None
    while server.deliver():
        pass
    assert is_held(registered)
    assert sum("the registration is gone" in line for line in caplog.messages) == 1
    assert registered.written == other.list_bookies()[0]
    assert other.list_bookies()[0].load == 9.0


@pytest.mark.parametrize("name", ["a", "host:3181", "a/b", "..", ".", "%2E", "zwölf", "a b", "zookeeper", "x" * 128])
def test_any_name_that_can_be_printed_will_do_for_a_bookie(world: World, name: str) -> None:
    cluster = cluster_on(world.open())
    who = Bookie(name, b"i" * 16)
    cluster.claim_cookie(who)
    cluster.register(registration(who))
    assert [found.bookie for found in cluster.list_bookies()] == [who]
    assert [cookie.bookie for cookie in cluster.list_cookies()] == [who]


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ()},
        {"addresses": ("",)},
        {"addresses": ("tcp://127.0.0.1:1", "")},
        {"tiers": {StorageHint.SSD: -1}},
        {"tiers": {StorageHint.SSD: 1.5}},
        {"capacity": {StorageHint.SSD: -1}},
        {"load": -1.0},
        {"load": float("nan")},
        {"load": float("inf")},
    ],
)
def test_invalid_registrations_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        registration(bookie(1), **change)
    for name in ("", "x" * 129):
        with pytest.raises(UsageError):
            BookieRegistration(bookie=Bookie(name, b"i" * 16), addresses=("a",))
    with pytest.raises(UsageError):
        BookieRegistration(bookie=Bookie("a", b"short"), addresses=("a",))


def test_a_forged_registration_counts_as_absent(world: World, caplog: pytest.LogCaptureFixture) -> None:
    store = world.open()
    cluster = cluster_on(store)
    for number in (1, 2):
        cluster.claim_cookie(bookie(number))
        cluster.register(registration(bookie(number)))
    key = next(f"bookies/{name}" for name in store.children("bookies") if "1%3A" in name or "-1" in name)
    node = store.get(key)
    assert node is not None
    store.put(key, node.value.replace(b"127.0.0.1", b"127.0.0.2"), node.version)
    with caplog.at_level(logging.WARNING):
        assert [found.bookie for found in cluster.list_bookies()] == [bookie(2)]
    assert re.search(r"absent.*bookies/", caplog.text)
    with pytest.raises(MetadataForgedError):
        cluster.find_bookie(bookie(1).bookie_id)


def test_only_clients_with_the_secret_can_join(world: World) -> None:
    cluster = cluster_on(world.open())
    assert cluster_on(world.open()).identity == cluster.identity
    with pytest.raises(MetadataForgedError, match="secret given here is not"):
        ClusterMetadata(world.open(), key_for=lambda identity: [b"x" * 32])
    with pytest.raises(MetadataForgedError, match="give it"):
        ClusterMetadata(world.open())


def test_a_cluster_without_a_secret(world: World) -> None:
    cluster = ClusterMetadata(world.open(), cost=2)
    cluster.claim_cookie(bookie(1))
    cluster.register(registration(bookie(1)))
    assert [found.bookie for found in ClusterMetadata(world.open()).list_bookies()] == [bookie(1)]
    with pytest.raises(MetadataForgedError, match="give none"):
        ClusterMetadata(world.open(), key_for=lambda identity: [KEY])


def test_an_identity_that_was_changed_is_refused() -> None:
    server = SimServer()
    cluster_on(server.store())
    store = server.store()
    node = store.get("cluster")
    assert node is not None
    store.put("cluster", node.value.replace(b'"cost":2', b'"cost":4'), node.version)
    with pytest.raises(MetadataForgedError):
        cluster_on(server.store())


def test_locks_are_held_by_one(world: World) -> None:
    one, two = cluster_on(world.open()), cluster_on(world.open())
    lease = one.try_lock("ledger-7", "one")
    assert lease is not None
    assert is_held(lease)
    assert two.try_lock("ledger-7", "two") is None
    assert two.lock_owner("ledger-7") == "one"
    assert two.try_lock("ledger-8", "two") is not None
    lease.release()
    lease.release()
    assert not is_held(lease)
    assert two.lock_owner("ledger-7") is None
    other = two.try_lock("ledger-7", "two")
    assert other is not None
    two.close()
    assert world.wait_for(lambda: one.lock_owner("ledger-7") is None)
    assert not other.held


def test_a_lock_that_was_lost_is_not_released_from_others(world: World) -> None:
    store = world.open()
    one, two = cluster_on(store), cluster_on(world.open())
    lease = one.try_lock("lock", "one")
    assert lease is not None
    world.end_session(store)
    assert world.wait_for(lambda: not lease.held)
    other = two.try_lock("lock", "two")
    assert other is not None
    one.try_lock("another", "one")
    lease.release()
    assert two.lock_owner("lock") == "two"
    assert other.held


def test_one_leads_at_a_time_and_the_next_follows(world: World) -> None:
    stores = [world.open() for _ in range(3)]
    log: list[tuple[int, bool]] = []

    def note(number: int) -> Callable[[bool], None]:
        return lambda leads: log.append((number, leads))

    elections = [
        Election(cluster_on(store), "auditor", f"bookie-{number}", note(number)) for number, store in enumerate(stores)
    ]
    observer = cluster_on(world.open())
    assert [election.leads for election in elections] == [True, False, False]
    assert observer.lock_owner("auditor") == "bookie-0"
    elections[0].close()
    assert world.wait_for(lambda: elections[1].leads or elections[2].leads)
    leader = 1 if elections[1].leads else 2
    follower = 3 - leader
    world.end_session(stores[leader])
    assert world.wait_for(lambda: (leader, False) in log)
    assert world.wait_for(lambda: elections[leader].leads or elections[follower].leads)
    assert elections[leader].leads is not elections[follower].leads
    assert log[:3] == [(0, True), (leader, True), (leader, False)] or log[1] == (leader, True)
    for election in elections:
        election.close()
    assert observer.lock_owner("auditor") is None


def test_a_closed_candidate_does_not_lead_though_a_watch_still_calls(world: World) -> None:
    cluster = cluster_on(world.open())
    election = Election(cluster, "auditor", "bookie-1", lambda leads: None)
    election.close()
    election.campaign()
    assert not election.leads
    assert cluster.lock_owner("auditor") is None


def test_missing_entries_are_recorded_listed_and_crossed_out(world: World) -> None:
    cluster = cluster_on(world.open())
    for ledger_id, number, first in ((7, 1, 5), (7, 2, 0), (100_000, 1, 3), (7, 1, 9), (7, 1, 4)):
        cluster.mark_under_replicated(ledger_id, bookie(number), first)
    assert [mark[:3] for mark in cluster.marks()] == [
        (7, bookie(1), 4),
        (7, bookie(2), 0),
        (100_000, bookie(1), 3),
    ]
    assert [record.ledger_id for record in cluster.marks(after=7)] == [100_000]
    stale = next(cluster.marks())
    cluster.mark_under_replicated(7, bookie(1), 2)
    assert not cluster.unmark_under_replicated(stale), "more was found missing meanwhile"
    assert cluster.unmark_under_replicated(next(cluster.marks()))
    assert cluster.unmark_under_replicated(stale), "it is gone"
    assert [(record.ledger_id, record.bookie) for record in cluster.marks()] == [(7, bookie(2)), (100_000, bookie(1))]


def test_marks_are_read_in_pages_also_past_one_of_damaged_marks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(underreplication, "MARKS_PAGE", 1)
    store = world.open()
    cluster = cluster_on(store)
    for ledger_id, number in ((7, 1), (7, 2), (8, 1), (100_000, 1)):
        cluster.mark_under_replicated(ledger_id, bookie(number), 0)
    key = missing_key(8, bookie(1))
    node = store.get(key)
    assert node is not None
    store.put(key, b"damaged", node.version)
    assert [record.ledger_id for record in cluster.marks()] == [7, 7, 100_000]


@pytest.mark.parametrize("place", [0, 4, 5, 6, -1])
def test_a_damaged_record_of_missing_entries_is_replaced_by_one_of_all_entries(world: World, place: int) -> None:
    store = world.open()
    cluster = cluster_on(store)
    cluster.mark_under_replicated(7, bookie(1), 5)
    (key,) = [key for _, key in leaves_after(store, UNDER_REPLICATED_KEY, -1, 10)]
    node = store.get(key)
    assert node is not None
    damaged = bytearray(node.value)
    damaged[place] ^= 1
    store.put(key, bytes(damaged), node.version)
    assert list(cluster.marks()) == []
    cluster.mark_under_replicated(7, bookie(1), 5)
    assert [mark[:3] for mark in cluster.marks()] == [(7, bookie(1), 0)]


def test_waiters_for_under_replicated_ledgers_are_notified(world: World) -> None:
    cluster, other = cluster_on(world.open()), cluster_on(world.open())
    told: list[bool] = []
    other.watch_under_replicated(lambda: told.append(bool(list(other.marks()))))
    cluster.mark_under_replicated(7, bookie(1), 5)
    assert world.wait_for(lambda: told[-1:] == [True])


def test_a_short_key_is_refused() -> None:
    with pytest.raises(UsageError):
        ClusterMetadata(SimServer().store(), key_for=lambda identity: [b"short"])


def test_out_of_reach_is_said() -> None:
    server = SimServer()
    cluster = cluster_on(server.store())
    store = server.store()
    other = cluster_on(store)
    store.faults = lambda operation, key: Fault.REFUSED
    for call in (
        lambda: other.read_ledger(1),
        lambda: other.list_ledgers(),
        lambda: other.list_bookies(),
        lambda: other.try_lock("lock", "one"),
        lambda: other.claim_cookie(bookie(1)),
    ):
        with pytest.raises(MetadataUnreachableError):
            call()
    cluster.close()
