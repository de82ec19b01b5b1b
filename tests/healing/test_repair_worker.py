"""The workers of real bookies: lost copies are made again, and damaged ones filled up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk import threads
from pybk.client.membership import Membership
from pybk.client.remote_ledger import RemoteLedger
from pybk.client.rereplication import FragmentCopy
from pybk.errors import EntryUnknownError, StorageRefusedError
from pybk.healing import repair_worker
from pybk.healing.repair_worker import (
    BATCH,
    BUCKETS,
    PAUSE_MAX_S,
    SETTLE_MAX_S,
    TRIES,
    Candidate,
    RepairWorker,
    batches,
    bucket_of,
    overtaking,
)
from pybk.healing.throttle import ForegroundCap, TokenBucket
from pybk.ledger.ledger_metadata import Bookie, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import BookieState
from pybk.metadata.settings import ClusterSettings
from pybk.metadata.underreplication import RepairReason, RepairState
from pybk.metrics import REPAIR_COPIED_BYTES, Histogram, MetricKey
from pybk.operations import cluster_admin
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.replication.messages import Event, WriteMetadata
from tests.client.test_limbo_repair import PASSWORD, check, fill
from tests.cluster.inside import Inside, inside
from tests.healing.alone import LoneWorker
from tests.internals import cluster_backend_of, metadata_of, repairer_of, resting, service_of
from tests.test_spans import Recorder
from tests.waiting import WAIT_S, wait_until


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=4) as cluster:
        yield cluster


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LedgerManager], LoneWorker]]:
    """Return what starts the worker of a bookie; it looks often, and is stopped before the bookies are closed."""
    monkeypatch.setattr(repair_worker, "IDLE_S", 0.1)
    monkeypatch.setattr(repair_worker, "PAUSE_MIN_S", 0.01)
    with ExitStack() as stack:

        def started(manager: LedgerManager) -> LoneWorker:
            repairer = LoneWorker(manager)
            stack.callback(repairer.stop)
            return repairer

        yield started


def names(manager: LedgerManager, ledger_id: int) -> list[set[str]]:
    return [{bookie.bookie_id for bookie in each.ensemble} for each in manager.ledger_metadata(ledger_id).fragments]


def lose(cluster: Inside, place: int) -> Bookie:
    """Close a bookie, and mark each ledger that names it."""
    bookie = service_of(cluster.bookies[place]).bookie
    cluster.bookies[place].close()
    client = cluster.connect()
    metadata = metadata_of(client)
    for ledger_id in client.list_ledgers():
        fragments = client.ledger_metadata(ledger_id).fragments
        if any(bookie in fragment.ensemble for fragment in fragments):
            metadata.mark_under_replicated(ledger_id, bookie, 0, reason=RepairReason.LOST)
    return bookie


def ensemble_of(manager: LedgerManager, ledger_id: int) -> tuple[Bookie, ...]:
    return tuple(manager.ledger_metadata(ledger_id).fragments[0].ensemble)


def is_done(metadata: ClusterMetadata) -> Callable[[], bool]:
    return lambda: not list(metadata.marks())


def test_the_copies_of_a_lost_bookie_are_made_again(four: Inside, start: Callable[[LedgerManager], LoneWorker]) -> None:
    client = four.connect()
    ledgers = [fill(client, 40) for _ in range(30)]
    lost = lose(four, 0)
    workers = [start(manager) for manager in four.bookies[1:]]
    wait_until(is_done(metadata_of(client)))
    assert all(lost.bookie_id not in ensemble for ledger_id in ledgers for ensemble in names(client, ledger_id))
    assert sum(worker.copied_bytes for worker in workers) > 0
    assert sum(worker.repaired for worker in workers) <= len(ledgers), "no ledger is copied twice"
    four.bookies[1].close()  # what is left has to be enough: each entry is on the other two again
    for ledger_id in ledgers:
        check(client, ledger_id, 40)


def test_copies_are_made_where_the_system_gives_one_thread(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = four.connect()
    ledgers = [fill(client, 4) for _ in range(3)]
    lost = lose(four, 0)
    given = threads.start_thread

    def one_for_work(thread: threading.Thread) -> None:
        if thread.name.startswith("pybk-healing-work") and not thread.name.endswith("-0"):
            raise StorageRefusedError("no more threads")
        given(thread)

    monkeypatch.setattr(threads, "start_thread", one_for_work)
    start(four.bookies[1])
    start(four.bookies[2])
    start(four.bookies[3])
    wait_until(is_done(metadata_of(client)))
    assert all(lost.bookie_id not in ensemble for ledger_id in ledgers for ensemble in names(client, ledger_id))


def test_a_bookie_is_filled_up_by_its_own_worker(four: Inside, start: Callable[[LedgerManager], LoneWorker]) -> None:
    client = four.connect()
    ledger_id = fill(client, 40)
    metadata = metadata_of(client)
    bookie = metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble[1]
    place = next(place for place, manager in enumerate(four.bookies) if service_of(manager).bookie == bookie)
    service = service_of(four.bookies[place])
    service.replicas.delete(ledger_id)
    metadata.mark_under_replicated(ledger_id, bookie, 0, reason=RepairReason.DAMAGED)
    others = [start(manager) for number, manager in enumerate(four.bookies) if number != place]
    own = start(four.bookies[place])
    wait_until(is_done(metadata))
    wait_until(lambda: own.repaired == 1)
    assert [other.repaired for other in others] == [0, 0, 0]
    backend = cluster_backend_of(four.bookies[place])
    assert backend.membership.metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble[1] == bookie
    run = service.replicas.read(ledger_id, 0, 39, 1, 1 << 20)[1]
    assert run is not None
    assert run.last == 39


def test_bytes_count_as_they_are_copied(four: Inside, start: Callable[[LedgerManager], LoneWorker]) -> None:
    client = four.connect()
    with client.create_ledger(password=PASSWORD) as writer:
        writer.append_many([b"x" * 1000] * 500)
        four.wait_for_copies(writer.ledger_id, 500)
    metadata = metadata_of(client)
    rate(four, 64 << 10)
    bookie = metadata.read_ledger(writer.ledger_id).metadata.fragments[0].ensemble[0]
    manager = next(each for each in four.bookies if service_of(each).bookie == bookie)
    service_of(manager).replicas.delete(writer.ledger_id)
    metadata.mark_under_replicated(writer.ledger_id, bookie, 0, reason=RepairReason.DAMAGED)
    worker = start(manager)
    copied = MetricKey(REPAIR_COPIED_BYTES, labels=(("reason", "damaged"),))
    wait_until(lambda: manager.metrics().counters.get(copied))
    assert worker.repaired == 0, "counted before the fragment is whole"
    rate(four, 32 << 20)
    wait_until(lambda: worker.repaired == 1)
    assert manager.metrics().counters[copied] == worker.copied_bytes > 500_000


def rate(cluster: Inside, bytes_per_second: int) -> None:
    """Change the rate of repairs, and wait until all bookies know it."""

    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, bytes_per_second=bytes_per_second))

    known = [metadata_of(each) for each in cluster.bookies]
    known[0].change_settings(change)
    wait_until(lambda: all(each.current_settings().repair.bytes_per_second == bytes_per_second for each in known))


def test_a_bookie_that_is_back_keeps_its_places(four: Inside, start: Callable[[LedgerManager], LoneWorker]) -> None:
    client = four.connect()
    ledger_id = fill(client, 40)
    metadata = metadata_of(client)
    before = names(client, ledger_id)
    bookie = metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble[0]
    metadata.mark_under_replicated(ledger_id, bookie, 0, reason=RepairReason.LOST)
    worker = start(four.bookies[0])
    wait_until(is_done(metadata))
    assert names(client, ledger_id) == before
    assert worker.copied_bytes == 0


def test_space_that_a_bookie_has_got_is_seen_though_nothing_reports_it(
    tmp_path: Path, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration that changes wakes no watch, so each pass reads them anew."""
    monkeypatch.setattr("pybk.bookie.keeper.STATE_SECONDS", 1000.0)  # what a bookie has registered stays
    passes = Counter[RepairWorker]()
    look = RepairWorker.look

    def counted(worker: RepairWorker) -> bool:
        passes[worker] += 1
        return look(worker)

    monkeypatch.setattr(RepairWorker, "look", counted)
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        fill(client, 10)
        ensemble = client.ledger_metadata(next(client.list_ledgers())).fragments[0].ensemble
        (target,) = (each for each in cluster.bookies if service_of(each).bookie not in ensemble)
        registered, found = service_of(target).keeper.registered, service_of(target).keeper.registration()
        assert registered is not None
        size = dict.fromkeys(found.tiers, 10**9)
        registered.update(replace(found, capacity=size, tiers=dict.fromkeys(size, 10**8)))
        lose(cluster, int(ensemble[0].bookie_id[-1]))
        membership = cluster_backend_of(target).membership
        wait_until(lambda: ensemble[0].bookie_id not in membership.bookies)
        worker = start(target)
        wait_until(lambda: passes[worker] > 3)
        assert worker.repaired == 0, "its disks are fuller than copies may make them"
        registered.update(replace(found, capacity=size, tiers=dict.fromkeys(size, 9 * 10**8)))
        wait_until(is_done(metadata_of(client)))
        wait_until(lambda: worker.repaired)
        assert worker.repaired == 1
        worker.stop()  # before its bookie is closed


def test_a_bookie_with_the_last_copy_gives_it_at_the_urgent_rate(
    four: Inside, start: Callable[[LedgerManager], LoneWorker]
) -> None:
    """It has nothing to repair itself, and nobody says what its reads are for."""
    client = four.connect()
    metadata = metadata_of(client)
    ledger_id = fill(client, 40, ensemble_size=2, write_quorum=2, ack_quorum=2)
    source, gone = metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble
    managers = {service_of(each).bookie: each for each in four.bookies}
    worker = start(managers[source])
    pace = service_of(managers[source]).copy_reads.pace
    assert isinstance(pace, TokenBucket)
    settings = metadata.current_settings().repair
    assert pace.rate == settings.bytes_per_second
    lose(four, four.bookies.index(managers[gone]))
    wait_until(lambda: pace.rate == settings.urgent_bytes_per_second)
    assert worker.repaired == 0
    for each in metadata.marks_of(ledger_id):
        metadata.unmark_under_replicated(each)
    wait_until(lambda: pace.rate == settings.bytes_per_second, "nothing is urgent any more")


def test_a_bookie_that_was_removed_during_a_copy_gets_no_place(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """H14: the proof that no ledger named it was right, and its directory may be gone already."""
    monkeypatch.setattr(cluster_admin, "REQUESTS_SECONDS", 0.0)
    client = four.connect()
    metadata, admin = metadata_of(client), ClusterAdmin(client)
    ledger_id = fill(client, 40)
    before = ensemble_of(client, ledger_id)
    (target,) = (each for each in four.bookies if service_of(each).bookie not in before)
    own = service_of(target).bookie
    write = Membership.write

    def write_late(membership: Membership, ledger: RemoteLedger, effect: WriteMetadata) -> Event:
        if own.bookie_id in [each.name for each in admin.bookies()]:
            metadata.change_cookie(own.bookie_id, lambda found: replace(found, state=BookieState.DRAINING))
            wait_until(lambda: next(each.read_only for each in admin.bookies() if each.bookie == own))
            admin.remove(own.bookie_id, admin.ok_to_remove(own.bookie_id))
        return write(membership, ledger, effect)

    monkeypatch.setattr(Membership, "write", write_late)
    lost = lose(four, int(before[0].bookie_id[-1]))
    worker = start(target)
    wait_until(lambda: any(mark.error for mark in metadata.marks_of(ledger_id)))
    (mark,) = metadata.marks_of(ledger_id)
    assert mark.bookie == lost
    assert f"{own} took copies, and leaves the cluster by now" in mark.error
    assert (ensemble_of(client, ledger_id), worker.repaired) == (before, 0)


def test_marks_of_a_deleted_ledger_are_removed(four: Inside, start: Callable[[LedgerManager], LoneWorker]) -> None:
    client = four.connect()
    ledger_id = fill(client, 40)
    metadata = metadata_of(client)
    bookie = metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble[0]
    client.delete_ledger(ledger_id, password=b"correct horse")
    metadata.mark_under_replicated(ledger_id, bookie, 0)
    start(four.bookies[0])
    wait_until(is_done(metadata))


def test_a_repair_that_fails_is_stuck_after_a_while_and_says_why(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EntryUnknownError("entry 7 cannot be read from any of its bookies")

    monkeypatch.setattr(FragmentCopy, "__init__", fail)
    client = four.connect()
    ledger_id = fill(client, 40)
    lose(four, 0)
    metadata = metadata_of(client)
    for manager in four.bookies[1:]:
        start(manager)

    def is_stuck() -> bool:
        return all(mark.state is RepairState.STUCK for mark in metadata.marks_of(ledger_id))

    wait_until(is_stuck)
    for mark in metadata.marks_of(ledger_id):
        assert mark.tries >= TRIES
        assert "entry 7" in mark.error


def test_a_paused_repair_waits_and_continues_by_itself(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [10**18]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    client = four.connect()
    for _ in range(8):
        fill(client, 40)
    metadata = metadata_of(client)

    def paused(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, paused_until_ns=clock[0] + 1))

    metadata.change_settings(paused)
    lose(four, 0)
    seen = [metadata_of(manager) for manager in four.bookies[1:]]
    wait_until(lambda: all(each.current_settings().repair.paused_until_ns > 0 for each in seen))
    marked = len(list(metadata.marks()))
    workers = [start(manager) for manager in four.bookies[1:]]
    assert not any(worker.look() for worker in workers)
    assert len(list(metadata.marks())) == marked > 0
    clock[0] += 2
    wait_until(is_done(metadata))


def test_a_pause_stops_the_pass_under_way(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass may take long: it makes many batches, and a batch has many ledgers."""
    monkeypatch.setattr(repair_worker, "COPIES", 1)
    monkeypatch.setattr(repair_worker, "BUCKETS", 2)
    client = four.connect()
    metadata = metadata_of(client)
    ledgers = [fill(client, 5, ensemble_size=4, write_quorum=4) for _ in range(8)]
    own = metadata.read_ledger(ledgers[0]).metadata.fragments[0].ensemble[0]
    for ledger_id in ledgers:
        metadata.mark_under_replicated(ledger_id, own, 0, reason=RepairReason.DAMAGED)
    manager = next(manager for manager in four.bookies if service_of(manager).bookie == own)
    begin = FragmentCopy.__init__

    def paused_by_the_first(copy: FragmentCopy, *arguments: Any) -> None:
        until_ns = time.time_ns() + 3_600 * 10**9
        metadata.change_settings(lambda old: replace(old, repair=replace(old.repair, paused_until_ns=until_ns)))
        wait_until(lambda: metadata_of(manager).current_settings().repair.paused_until_ns == until_ns)
        begin(copy, *arguments)

    monkeypatch.setattr(FragmentCopy, "__init__", paused_by_the_first)
    leases: list[str] = []
    try_lock = ClusterMetadata.try_lock

    def counted(store: ClusterMetadata, name: str, owner: str) -> Any:
        leases.append(name)
        return try_lock(store, name, owner)

    monkeypatch.setattr(ClusterMetadata, "try_lock", counted)
    passes: list[bool] = []
    look = RepairWorker.look

    def watched(worker: RepairWorker) -> bool:
        passes.append(look(worker))
        return passes[-1]

    monkeypatch.setattr(RepairWorker, "look", watched)
    worker = start(manager)
    wait_until(lambda: passes[:2] == [True, False], "a pass, and one that the pause keeps from anything")
    assert (worker.repaired, len(leases)) == (1, 1)
    assert len(list(metadata.marks())) == 7


def test_the_most_urgent_ledgers_come_first_and_a_lease_covers_a_bucket() -> None:
    urgent = [Candidate(1, 3, number, number) for number in range(5)]
    many = [Candidate(2, 0, 9, BUCKETS * number) for number in range(BATCH + 3)]
    later = [Candidate(2, 4, 0, number) for number in range(10_000)]
    order = batches([*later, *many, *urgent])
    assert {each for batch in order[:5] for each in batch} == set(urgent)
    assert [each for batch in order[5:7] for each in batch] == many
    assert sorted(each for batch in order[7:] for each in batch) == later
    assert all(len(batch) <= BATCH and len({bucket_of(each.ledger_id) for each in batch}) == 1 for batch in order)


@pytest.mark.parametrize("buckets", [1, BUCKETS], ids=["in the batch", "in another one"])
def test_a_ledger_that_becomes_urgent_overtakes_the_batch_under_way(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch, buckets: int
) -> None:
    """A batch may take hours next to appends; what it copies then gets the urgent rate, as others wait for it."""
    monkeypatch.setattr(repair_worker, "COPIES", 1)
    monkeypatch.setattr(repair_worker, "BUCKETS", buckets)
    client = four.connect()
    metadata = metadata_of(client)
    rate(four, 64 << 10)
    ledgers = [fill(client, 2000, ensemble_size=4, write_quorum=4) for _ in range(5)]
    for each in ledgers:
        four.wait_for_copies(each, 2000)
    bookies = metadata.read_ledger(ledgers[0]).metadata.fragments[0].ensemble
    own, *others = bookies
    (manager,) = (each for each in four.bookies if service_of(each).bookie == own)
    for ledger_id in ledgers:
        service_of(manager).replicas.delete(ledger_id)
        metadata.mark_under_replicated(ledger_id, own, 0, reason=RepairReason.DAMAGED)
    copied: list[int] = []
    hurries = threading.Event()
    begin = FragmentCopy.__init__

    def begun(copy: FragmentCopy, driver: Any, ledger: RemoteLedger, *arguments: Any) -> None:
        copied.append(ledger.ledger_id)
        assert hurries.wait(WAIT_S)
        begin(copy, driver, ledger, *arguments)

    monkeypatch.setattr(FragmentCopy, "__init__", begun)
    start(manager)
    wait_until(lambda: copied)
    pace = service_of(manager).copy_reads.pace
    assert isinstance(pace, TokenBucket)
    assert pace.rate == 64 << 10
    urgent = next(ledger_id for ledger_id in reversed(ledgers) if ledger_id not in copied)
    for bookie in others[:2]:
        metadata.mark_under_replicated(urgent, bookie, 0, reason=RepairReason.DAMAGED)
    wait_until(lambda: pace.rate == metadata.current_settings().repair.urgent_bytes_per_second)
    hurries.set()
    wait_until(lambda: len(copied) > 2)
    assert copied[1] == urgent
    rate(four, 32 << 20)


@pytest.mark.parametrize(
    ("more", "leased", "overtakes"),
    [
        ([], set(), None),
        ([(2, 3, 5)], set(), None),
        ([(2, 2, 5)], set(), 5),
        ([(1, 3, 5), (2, 2, 6)], set(), 5),
        ([(1, 3, 5), (2, 2, 6)], {5}, 6),  # another worker has it, so copies here need not hurry for it
        ([(1, 3, 5), (1, 3, 5 + BUCKETS), (2, 2, 6)], {5, 6}, None),
        ([(1, 3, 7 + BUCKETS)], {7}, 7 + BUCKETS),  # the lease is that of the batch
    ],
)
def test_a_ledger_that_another_worker_repairs_overtakes_nothing(
    more: list[tuple[int, int, int]], leased: set[int], overtakes: int | None
) -> None:
    asked: list[int] = []

    def is_leased(bucket: int) -> bool:
        asked.append(bucket)
        return bucket in leased

    begun = Candidate(2, 3, 0, 7)
    candidates = [begun, *(Candidate(copies, rank, 0, ledger_id) for copies, rank, ledger_id in more)]
    found = overtaking(begun, candidates, is_leased)
    assert (None if found is None else found.ledger_id) == overtakes
    assert len(asked) == len(set(asked))


def test_an_open_ledger_whose_last_fragment_misses_entries_is_not_urgent_and_is_looked_at_soon(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody copies anything of that fragment; and an earlier failure must not make its mark stay for long."""
    listed: list[Candidate] = []

    def watched(candidates: list[Candidate]) -> list[list[Candidate]]:
        listed.extend(candidates)
        return batches(candidates)

    monkeypatch.setattr(repair_worker, "batches", watched)
    client = four.connect()
    metadata = metadata_of(client)
    with client.create_ledger(password=PASSWORD, ensemble_size=4, write_quorum=4, ack_quorum=2) as writer:
        writer.append(b"entry")
        ledger_id = writer.ledger_id
        bookies = metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble
        (manager,) = (each for each in four.bookies if service_of(each).bookie == bookies[0])
        replicas = service_of(manager).replicas
        wait_until(lambda: replicas.count_entries(ledger_id) == 1, "the entry, which two others acknowledged")
        replicas.delete(ledger_id)
        for bookie in bookies[:3]:
            metadata.mark_under_replicated(ledger_id, bookie, 0, reason=RepairReason.MISSING)
        worker = start(manager)
        wait_until(lambda: ledger_id in worker.failures)
        assert {each.copies for each in listed} == {4}
        worker.failures[ledger_id] = (PAUSE_MAX_S, 0.0)
        wait_until(lambda: worker.failures[ledger_id][1])
        assert worker.failures[ledger_id][1] <= time.monotonic() + 1.25 * SETTLE_MAX_S


def test_less_urgent_ledgers_wait_while_another_worker_has_the_lease_of_more_urgent_ones(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair_worker, "BUCKETS", 2)
    listed: list[int] = []

    def watched(candidates: list[Candidate]) -> list[list[Candidate]]:
        listed.append(len(candidates))
        return batches(candidates)

    monkeypatch.setattr(repair_worker, "batches", watched)
    client = four.connect()
    metadata = metadata_of(client)
    ledgers = [fill(client, 5, ensemble_size=4, write_quorum=4) for _ in range(6)]
    urgent, others = ledgers[0], ledgers[1::2]
    assert {bucket_of(urgent)}.isdisjoint(map(bucket_of, others))
    assert len(set(map(bucket_of, others))) == 1
    bookies = metadata.read_ledger(urgent).metadata.fragments[0].ensemble
    for bookie in bookies[:3]:
        metadata.mark_under_replicated(urgent, bookie, 0, reason=RepairReason.DAMAGED)
    for ledger_id in others:
        metadata.mark_under_replicated(ledger_id, bookies[0], 0, reason=RepairReason.DAMAGED)
    lease = metadata.try_lock(f"repair-{bucket_of(urgent)}", "another worker")
    assert lease is not None
    start(next(manager for manager in four.bookies if service_of(manager).bookie == bookies[0]))
    wait_until(lambda: {mark.ledger_id for mark in metadata.marks()} == {urgent})
    assert [count for count in dict.fromkeys(listed) if count > 1] == [4, 3, 2], "one at a time"
    lease.release()
    wait_until(lambda: len(list(metadata.marks())) == 2, "its turn")


@pytest.mark.parametrize(("listing_s", "news", "repaired"), [(0.01, True, 1), (1.0, True, 7), (1.0, False, 34)])
def test_a_pass_lasts_as_long_as_its_listing_makes_worth_while(
    monkeypatch: pytest.MonkeyPatch, listing_s: float, repaired: int, *, news: bool
) -> None:
    """Twenty times, and a hundred times while nothing was added that could be more urgent; each batch takes 3 s."""
    now = [0.0]

    def took(seconds: float) -> None:
        now[0] += seconds

    def list_marks() -> dict[int, list[Any]]:
        took(listing_s)
        return {each: [] for each in range(40)}

    def repair(batch: list[Candidate], marks: Any) -> bool:
        took(3.0)
        return True

    candidates = [Candidate(2, 0, 0, each) for each in range(40)]
    worker = repairer_of(list_marks, lambda ready: [candidates[each] for each in ready], repair, news=news)
    monkeypatch.setattr(repair_worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert RepairWorker.look(worker)
    assert round((now[0] - listing_s) / 3.0) == repaired


def test_neighbours_are_in_different_buckets() -> None:
    assert {bucket_of(ledger_id) for ledger_id in range(BUCKETS)} == set(range(BUCKETS))


def test_a_live_writer_is_not_fenced_however_long_it_is_idle(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bookies were started since its last append, so that only the writer itself can show them that it lives."""
    monkeypatch.setattr(repair_worker, "IDLE_S", 0.1)
    monkeypatch.setattr(repair_worker, "PAUSE_MIN_S", 0.01)
    client, other = four.connect(), four.connect()
    metadata = metadata_of(other)
    metadata.change_settings(lambda old: replace(old, repair=replace(old.repair, recover_abandoned=True)))
    writer = client.create_ledger(password=b"correct horse")
    writer.append(b"entry")
    ensemble = metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble
    places = [int(bookie.bookie_id[-1]) for bookie in ensemble]
    for place in places[1:]:
        four.bookies[place].close()
        four.bookies[place] = four.open_bookie(place)
    four.bookies[places[0]].close()
    wait_until(lambda: all(cluster_backend_of(each).membership.find(ensemble[0]) is None for each in (client, other)))
    metadata.mark_under_replicated(
        writer.ledger_id, ensemble[0], 0, reason=RepairReason.LOST, state=RepairState.WAITING_FOR_OWNER
    )
    backend = cluster_backend_of(four.bookies[places[1]])
    repairer = LoneWorker(four.bookies[places[1]], backend.recover_abandoned)
    with ExitStack() as stack:
        stack.callback(repairer.stop)
        wait_until(lambda: repairer.failures.get(writer.ledger_id, (0.0, 0.0))[0] > 0.1)  # it was asked several times
        assert other.ledger_metadata(writer.ledger_id).state is LedgerState.OPEN
        assert metadata.marks_of(writer.ledger_id)[0].tries == 0
        client.close()
        wait_until(lambda: other.ledger_metadata(writer.ledger_id).state is LedgerState.CLOSED)
    assert other.ledger_metadata(writer.ledger_id).last_entry_id == 0


def test_each_repair_has_a_span_with_its_requests(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_worker, "IDLE_S", 0.1)
    client, hook = four.connect(), Recorder()
    ledger_id = fill(client, 5)
    lost = client.ledger_metadata(ledger_id).fragments[0].ensemble[0]
    lose(four, int(lost.bookie_id[-1]))
    manager = next(each for each in four.bookies if service_of(each).bookie not in ensemble_of(client, ledger_id))
    repairer = LoneWorker(manager, on_span=hook)
    with ExitStack() as stack:
        stack.callback(repairer.stop)
        wait_until(is_done(metadata_of(client)))
    repairs = hook.of("bookie.repair")
    assert {each.attributes["pybk.ledger_id"] for each in repairs} == {ledger_id}
    assert [each for each in repairs if each.error is None]
    requests = [each for each in hook.spans if each.name.startswith("pybk.metadata.")]
    assert requests, "a repair reads the marks and the metadata of its ledger"
    assert {each.parent for each in requests} <= set(repairs)


def test_a_worker_at_rest_watches_the_appends_while_others_read_also_after_the_rest_of_all_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies that appends notice are slowed down at their source, which knows appends without copies by the rests."""
    now_ns, cap, bucket, appends = 5 * 10**9, ForegroundCap(1 << 16), TokenBucket(1 << 30, 0), Histogram()

    def wait(seconds: float) -> None:
        nonlocal now_ns
        until_ns = now_ns + max(1, round(seconds * 1e9))
        while now_ns < until_ns:
            reads = now_ns % 10**10 >= 1_100_000_000
            appends.record(8_000_000 if reads else 4_000_000, 20)
            if reads:
                bucket.charge(1 << 14, 0)
            now_ns = min(until_ns, now_ns + 50_000_000)

    def sample() -> None:
        nonlocal appends
        found, appends = appends, Histogram()
        cap.look(now_ns, found.snapshot(), bucket.charged_bytes)

    monkeypatch.setattr(repair_worker, "time", SimpleNamespace(monotonic=lambda: now_ns / 1e9))

    def look() -> bool:
        wait(0.3)  # and finds nothing to do here
        return False

    worker = resting(look, sample, lambda: cap.next_ns(now_ns) / 1e9, bucket)
    until_ns = now_ns + 120 * 10**9
    while now_ns < until_ns:
        work = RepairWorker.due(worker, now_ns / 1e9)
        if callable(work):
            work()
        else:
            wait(work - now_ns / 1e9)
    assert cap.rate == cap.least
