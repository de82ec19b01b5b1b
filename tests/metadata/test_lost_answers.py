"""Lost answers and stale reads: no change is made twice, forgotten, or taken for somebody else's (C8, C9, C10)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from pybk.errors import (
    LedgerDeletedError,
    LedgerExistsError,
    MetadataUnreachableError,
    MetadataVersionError,
)
from pybk.ledger.ledger_metadata import LedgerState
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import ID_BLOCK
from tests.metadata.records import bookie, cluster_on, ledger, registration
from tests.metadata.simulated_store import Fault, SimServer

LOST = (None, Fault.REPLY_LOST, Fault.REQUEST_LOST)
CHANGES = ("create", "put", "delete")


def _is_before(key: str) -> bool:
    """Return whether a call looks for a folded tombstone, which comes before the creation of a ledger."""
    return key.startswith("deleted/")


class World:
    """A cluster whose next calls go wrong as told, and one on the same store whose calls do not."""

    def __init__(self) -> None:
        self.server = SimServer()
        self.sure = cluster_on(self.server.store())
        self.store = self.server.store()
        self.cluster = cluster_on(self.store)

    def fail(self, faults: Iterable[Fault | None], operations: tuple[str, ...] = CHANGES) -> list[Fault | None]:
        """Have the next calls of some methods go wrong; returns what is left of that."""
        left = list(faults)

        def next_fault(operation: str, key: str) -> Fault | None:
            return left.pop(0) if left and operation in operations else None

        self.store.faults = next_fault
        return left

    def between(self, change: Callable[[], object]) -> None:
        """Lose the answer to the next change, and have somebody else change something before it is looked at."""
        steps = iter(("lost", "look"))

        def next_fault(operation: str, key: str) -> Fault | None:
            step = None if _is_before(key) else next(steps, None)
            if step == "lost":
                return Fault.REPLY_LOST
            if step == "look":
                change()
            return None

        self.store.faults = next_fault


SEQUENCES = [sequence for length in (1, 2, 3) for sequence in itertools.product(LOST, repeat=length)]


@pytest.mark.parametrize("faults", SEQUENCES)
def test_a_ledger_is_created_closed_and_deleted_once_whatever_is_lost(faults: tuple[Fault | None, ...]) -> None:
    world = World()
    world.fail(faults)
    version = world.cluster.create_ledger(ledger(1))
    assert world.sure.read_ledger(1) == (ledger(1), version)
    closed = replace(ledger(1), state=LedgerState.CLOSED, last_entry_id=3, version=1)
    left = world.fail(faults)
    newer = world.cluster.write_ledger(closed, version)
    assert world.sure.read_ledger(1) == (closed, newer)
    world.fail(faults)
    world.cluster.delete_ledger(1, newer)
    assert world.sure.deletion_proofs([1]) == [b""]
    assert len(left) < len(faults)


@pytest.mark.parametrize("faults", SEQUENCES)
def test_the_version_after_a_lost_answer_is_good_for_the_next_change(faults: tuple[Fault | None, ...]) -> None:
    world = World()
    version = world.cluster.create_ledger(ledger(1))
    for number in range(1, 5):
        world.fail(faults)
        version = world.cluster.write_ledger(ledger(1, length=number, version=number), version)
    assert world.sure.read_ledger(1).metadata.version == 4


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REQUEST_LOST])
def test_a_lost_answer_hides_no_conflict(fault: Fault) -> None:
    world = World()
    version = world.sure.create_ledger(ledger(1))
    current = world.sure.write_ledger(ledger(1, state=LedgerState.IN_RECOVERY, version=1), version)
    world.fail([fault])
    with pytest.raises(MetadataVersionError):
        world.cluster.write_ledger(ledger(1, length=9, version=1), version)
    assert world.sure.read_ledger(1) == (ledger(1, state=LedgerState.IN_RECOVERY, version=1), current)
    world.fail([fault])
    with pytest.raises(LedgerExistsError):
        world.cluster.create_ledger(ledger(1, key_salt=b"z" * 16))
    world.fail([fault])
    with pytest.raises(MetadataVersionError):
        world.cluster.delete_ledger(1, version)
    assert world.sure.deletion_proofs([1]) == [None]


def test_the_outcome_is_unknown_if_a_lost_change_may_have_been_overwritten() -> None:
    world = World()
    version = world.cluster.create_ledger(ledger(1))

    def recover() -> None:
        metadata, current = world.sure.read_ledger(1)
        assert metadata.length == 9
        world.sure.write_ledger(replace(metadata, state=LedgerState.IN_RECOVERY, version=2), current)

    world.between(recover)
    with pytest.raises(MetadataVersionError) as refused:
        world.cluster.write_ledger(ledger(1, length=9, version=1), version)
    assert refused.value.outcome_unknown
    assert world.sure.read_ledger(1).metadata.state == LedgerState.IN_RECOVERY


def test_a_ledger_that_was_created_and_changed_since_counts_as_created() -> None:
    world = World()
    world.between(lambda: world.sure.write_ledger(ledger(1, length=9, version=1), world.sure.read_ledger(1).version))
    version = world.cluster.create_ledger(ledger(1))
    assert world.sure.read_ledger(1) == (ledger(1, length=9, version=1), version)


def test_a_ledger_that_was_created_and_deleted_since_does_not_count_as_there() -> None:
    world = World()
    world.between(lambda: world.sure.delete_ledger(1, world.sure.read_ledger(1).version))
    with pytest.raises(LedgerExistsError):
        world.cluster.create_ledger(ledger(1))
    with pytest.raises(LedgerDeletedError):
        world.cluster.read_ledger(1)


@pytest.mark.parametrize("lost", [Fault.REPLY_LOST, Fault.REQUEST_LOST])
def test_an_outcome_that_cannot_be_determined_is_reported_as_unknown(lost: Fault) -> None:
    world = World()
    version = world.cluster.create_ledger(ledger(1))
    world.store.faults = lambda operation, key: lost
    with pytest.raises(MetadataUnreachableError) as unknown:
        world.cluster.write_ledger(ledger(1, length=9, version=1), version)
    assert unknown.value.outcome_unknown
    world.store.faults = lambda operation, key: lost if operation == "put" else None
    if lost is Fault.REQUEST_LOST:
        with pytest.raises(MetadataUnreachableError) as unknown:
            world.cluster.write_ledger(ledger(1, length=9, version=1), version)
        assert unknown.value.outcome_unknown


def test_a_change_that_was_not_sent_is_known_to_have_failed() -> None:
    world = World()
    world.store.faults = lambda operation, key: Fault.REFUSED
    with pytest.raises(MetadataUnreachableError) as refused:
        world.cluster.create_ledger(ledger(1))
    assert not refused.value.outcome_unknown
    assert refused.value.retryable


def test_a_retry_that_was_not_sent_after_a_lost_answer_leaves_the_outcome_unknown() -> None:
    world = World()
    faults = {"create": iter((Fault.REPLY_LOST,)), "get": iter((Fault.REFUSED,))}
    world.store.faults = lambda operation, key: None if _is_before(key) else next(faults.get(operation, iter(())), None)
    with pytest.raises(MetadataUnreachableError) as unknown:
        world.cluster.create_ledger(ledger(1))
    assert unknown.value.outcome_unknown
    assert world.sure.read_ledger(1).metadata == ledger(1)


def test_settling_never_trusts_a_stale_read() -> None:
    world = World()
    version = world.cluster.create_ledger(ledger(1))
    calls = {"put": iter((Fault.REPLY_LOST,))}
    world.store.faults = lambda operation, key: (
        Fault.STALE if operation == "get" else next(calls.get(operation, iter(())), None)
    )
    newer = world.cluster.write_ledger(ledger(1, length=9, version=1), version)
    assert world.sure.read_ledger(1) == (ledger(1, length=9, version=1), newer)


def test_the_read_of_a_ledger_is_never_stale() -> None:
    world = World()
    version = world.sure.create_ledger(ledger(1))
    world.sure.write_ledger(ledger(1, length=9, version=1), version)
    world.store.faults = lambda operation, key: Fault.STALE
    (stale,) = world.cluster.read_ledgers([1])
    assert stale is not None
    assert stale.metadata.length == 0
    assert world.cluster.read_ledger(1).metadata.length == 9


@pytest.mark.parametrize("faults", SEQUENCES)
def test_no_id_is_given_twice_whatever_is_lost(faults: tuple[Fault | None, ...]) -> None:
    world = World()
    given: list[int] = []
    for _ in range(3):
        world.fail(faults)
        given += [world.cluster.new_ledger_id() for _ in range(ID_BLOCK)]
        given += [world.sure.new_ledger_id() for _ in range(ID_BLOCK)]
    assert len(set(given)) == len(given)


@pytest.mark.parametrize("faults", SEQUENCES)
def test_one_cluster_is_made_whatever_is_lost(faults: tuple[Fault | None, ...]) -> None:
    server = SimServer()
    left = list(faults)
    store = server.store(lambda operation, key: left.pop(0) if left and operation == "create" else None)
    made = cluster_on(store).identity
    assert cluster_on(server.store()).identity == made
    assert cluster_on(store).identity == made


def test_two_processes_that_create_the_cluster_at_once_create_one() -> None:
    server = SimServer()
    other: list[ClusterMetadata] = []

    def first(operation: str, key: str) -> None:
        if operation == "create" and not other:
            other.append(cluster_on(server.store()))

    assert cluster_on(server.store(first)).identity == other[0].identity


@pytest.mark.parametrize("faults", SEQUENCES)
def test_locks_and_registrations_survive_lost_answers(faults: tuple[Fault | None, ...]) -> None:
    world = World()
    world.cluster.claim_cookie(bookie(1))
    world.fail(faults)
    lease = world.cluster.try_lock("audit", "one")
    assert lease is not None
    assert lease.held
    assert world.sure.try_lock("audit", "two") is None
    world.fail(faults)
    lease.release()
    assert world.sure.lock_owner("audit") is None
    world.fail(faults)
    registered = world.cluster.register(registration(bookie(1)))
    assert [found.bookie for found in world.sure.list_bookies()] == [bookie(1)]
    for load in (0.1, 0.2):
        world.fail(faults)
        registered.update(registration(bookie(1), load=load))
    assert world.sure.list_bookies()[0].load == 0.2
    world.fail(faults)
    registered.close()
    assert world.sure.list_bookies() == []


@pytest.mark.parametrize("faults", SEQUENCES)
def test_cookies_boots_and_missing_entries_survive_lost_answers(faults: tuple[Fault | None, ...]) -> None:
    world = World()
    world.fail(faults)
    world.cluster.claim_cookie(bookie(1))
    for boot in (1, 2):
        world.fail(faults)
        assert world.cluster.record_boot(bookie(1), boot)
    found = world.sure.read_cookie(bookie(1).bookie_id)
    assert found is not None
    assert (found.bookie, found.boots) == (bookie(1), 2)
    for first in (9, 5, 7):
        world.fail(faults)
        world.cluster.mark_under_replicated(4, bookie(1), first)
    (record,) = world.sure.marks()
    assert record[:3] == (4, bookie(1), 5)
    world.fail(faults)
    assert world.cluster.unmark_under_replicated(record)
    assert list(world.sure.marks()) == []


def test_a_lock_whose_taking_stayed_open_is_not_lost_for_ever() -> None:
    world = World()
    faults = {"create": iter((Fault.REPLY_LOST,)), "get": iter((Fault.REFUSED,))}
    world.store.faults = lambda operation, key: next(faults.get(operation, iter(())), None)
    with pytest.raises(MetadataUnreachableError):
        world.cluster.try_lock("lock", "one")
    assert world.sure.lock_owner("lock") == "one"
    assert world.sure.try_lock("lock", "two") is None
    lease = world.cluster.try_lock("lock", "one")
    assert lease is not None
    assert lease.held
    assert world.cluster.try_lock("lock", "one") is None, "held by this very client"
    lease.release()
    assert world.sure.try_lock("lock", "two") is not None


def test_a_registration_whose_making_stayed_open_is_made_again() -> None:
    world = World()
    world.cluster.claim_cookie(bookie(1))
    registered = world.cluster.register(registration(bookie(1)))
    world.server.expire(world.store.session())
    faults = {"create": iter((Fault.REPLY_LOST,)), "get": iter((None, Fault.REFUSED))}
    world.store.faults = lambda operation, key: next(faults.get(operation, iter(())), None)
    while world.server.deliver():
        pass
    assert registered.registered
    registered.update(registration(bookie(1), load=3.0))
    assert [found.load for found in world.sure.list_bookies()] == [3.0]


def test_a_record_of_missing_entries_that_changes_while_it_is_crossed_out_stays() -> None:
    world = World()
    world.cluster.mark_under_replicated(4, bookie(1), 5)
    (record,) = world.sure.marks()

    def more_is_missing(operation: str, key: str) -> None:
        if operation == "delete":
            world.store.faults = None
            world.sure.mark_under_replicated(4, bookie(1), 3)

    world.store.faults = more_is_missing
    assert not world.cluster.unmark_under_replicated(record)
    assert [mark[:3] for mark in world.sure.marks()] == [(4, bookie(1), 3)]


def test_the_name_of_a_lost_bookie_is_taken_by_one_change_and_not_looked_at_again() -> None:
    """Else two that take it at the same moment would take it from one another."""
    world = World()
    world.sure.claim_cookie(bookie(1))
    calls: list[str] = []

    def noted(operation: str, key: str) -> None:
        calls.append(operation)

    world.store.faults = noted
    another = bookie(1)._replace(instance=b"n" * 16)
    assert world.cluster.claim_cookie(another, replace=True).bookie == another
    assert calls == ["get", "put"]
