"""A mark of a bookie in a fragment without an end: what shows that it misses nothing, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.client.driver import Driver
from pybk.client.remote_ledger import RemoteLedger
from pybk.healing import repair_worker
from pybk.healing.open_fragment import misses_nothing, needed_of
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.underreplication import RepairReason
from pybk.replication.replica_check import Span
from tests.client.test_limbo_repair import PASSWORD, payload
from tests.cluster.inside import Inside, inside
from tests.healing.alone import LoneWorker
from tests.healing.clusters import bookie, ledger
from tests.healing.test_embedded_scrub import flip
from tests.internals import cluster_backend_of, metadata_of, service_of
from tests.waiting import wait_until


@pytest.fixture
def four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Inside]:
    monkeypatch.setattr(repair_worker, "IDLE_S", 0.2)
    monkeypatch.setattr(repair_worker, "PAUSE_MIN_S", 0.2)
    with inside(tmp_path, count=4) as cluster:
        yield cluster


@pytest.fixture
def start() -> Iterator[Callable[[LedgerManager], LoneWorker]]:
    """Start the workers of bookies."""
    started: list[LoneWorker] = []

    def begin(manager: LedgerManager) -> LoneWorker:
        started.append(LoneWorker(manager))
        return started[-1]

    yield begin
    for each in started:
        each.stop()


def manager_of(cluster: Inside, wanted: Bookie) -> LedgerManager:
    return next(each for each in cluster.bookies if service_of(each).bookie == wanted)


def bookie_of(manager: LedgerManager) -> Bookie:
    return service_of(manager).bookie


def marked(metadata: ClusterMetadata, ledger_id: int, bookie: Bookie) -> int | None:
    """Return the first entry of a bookie's mark."""
    return next((mark.first_entry_id for mark in metadata.marks_of(ledger_id) if mark.bookie == bookie), None)


def wait_until_it_holds(cluster: Inside, wanted: Bookie, ledger_id: int, entries: int) -> None:
    """Wait until a bookie holds all entries of a ledger: its writer waits for an ack quorum, and replaces a bookie that
    comes into limbo before it has answered."""
    replicas = service_of(manager_of(cluster, wanted)).replicas
    wait_until(lambda: replicas.count_entries(ledger_id) == entries, f"{wanted} to hold {entries} entries")


def second_fragment(metadata: ClusterMetadata, ledger_id: int) -> Fragment:
    """Return the fragment without the bookie that was closed; its writer may notice that after some more appends."""
    wait_until(lambda: len(metadata.read_ledger(ledger_id).metadata.fragments) == 2)
    return metadata.read_ledger(ledger_id).metadata.fragments[1]


def read(cluster: LedgerManager, ledger_id: int) -> RemoteLedger:
    metadata = metadata_of(cluster)
    stored = metadata.read_ledger(ledger_id)
    return RemoteLedger(*stored, metadata.describe(stored.metadata))


@pytest.mark.parametrize(
    ("places", "quorum", "held", "needed"),
    [
        ("012", (3, 2), {1: 7, 2: 5}, [Span(2, 5, 1)]),  # entry 7 has one copy, so it was not acknowledged
        ("012", (3, 1), {1: 7, 2: 5}, [Span(2, 7, 1)]),
        ("012", (3, 2), {2: 5}, [Span(2, 5, 1)]),
        ("012", (3, 1), {1: 7}, None),
        ("012", (3, 2), {}, None),
        ("012", (3, 3), {}, []),  # none is acknowledged without this bookie
        ("012", (3, 2), {1: 1, 2: -1}, []),
        ("01234", (3, 2), {1: 9, 2: 8, 3: 9, 4: 9}, [Span(5, 5, 5), Span(3, 8, 5), Span(4, 9, 5)]),
        ("01234", (3, 2), {1: 9, 2: 8, 3: 8, 4: 3}, [Span(5, 5, 5), Span(3, 3, 5)]),
    ],
)
def test_what_is_needed_is_what_enough_others_hold(
    places: str, quorum: tuple[int, int], held: dict[int, int], needed: list[Span] | None
) -> None:
    metadata = ledger(1, (0, (9, 1, 2, 3, 4)[: len(places)]), (2, map(int, places)), quorum=quorum, last=None)
    assert needed_of(metadata, bookie(0), {bookie(each): entry for each, entry in held.items()}) == needed


def test_a_bookie_without_the_entries_misses_some(four: Inside) -> None:
    client = four.connect()
    driver = cluster_backend_of(client).driver
    with client.create_ledger(password=PASSWORD) as writer:
        for number in range(20):
            writer.append(payload(number))
        ledger_id = writer.ledger_id
        four.wait_for_copies(ledger_id, 20)
        metadata, version = metadata_of(client).read_ledger(ledger_id)
        ensemble = metadata.fragments[0].ensemble
        for each in ensemble:
            assert misses_nothing(driver, read(client, ledger_id), each)
        spare = next(own for each in four.bookies if (own := service_of(each).bookie) not in ensemble)
        other = replace(metadata, fragments=(Fragment(0, (spare, *ensemble[1:])),))
        changed = RemoteLedger(other, version, metadata_of(client).describe(other))
        assert not misses_nothing(driver, changed, spare), "it has nothing of the ledger"
        damaged = service_of(manager_of(four, ensemble[0])).replicas
        damaged.delete(ledger_id)
        assert not misses_nothing(driver, read(client, ledger_id), ensemble[0])
        manager_of(four, ensemble[1]).close()
        manager_of(four, ensemble[2]).close()
        assert not misses_nothing(driver, read(client, ledger_id), ensemble[0]), "nobody else has answered"


def test_a_bookie_with_the_last_entries_misses_some_if_one_before_is_damaged_or_it_is_silent(four: Inside) -> None:
    client = four.connect()
    driver = cluster_backend_of(client).driver
    with client.create_ledger(password=PASSWORD) as writer:
        for number in range(20):
            writer.append(payload(number))
        four.wait_for_copies(writer.ledger_id, 20)
        ledger = read(client, writer.ledger_id)
        damaged, silent, sound = ledger.metadata.fragments[0].ensemble
        flip(four.directory / damaged.bookie_id, payload(5))
        assert not misses_nothing(driver, ledger, damaged), "entry 5 is damaged"
        assert misses_nothing(driver, ledger, silent)
        manager_of(four, silent).close()
        assert not misses_nothing(driver, ledger, silent), "the others have answered, and it has not"
        assert misses_nothing(driver, ledger, sound)


def test_a_mark_of_an_open_ledger_is_removed_once_its_bookie_is_whole(
    four: Inside, start: Callable[[LedgerManager], LoneWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Bookie] = []

    def watched(driver: Driver, ledger: RemoteLedger, bookie: Bookie) -> bool:
        looked.append(bookie)
        return misses_nothing(driver, ledger, bookie)

    monkeypatch.setattr(repair_worker, "misses_nothing", watched)
    client = four.connect()
    metadata = metadata_of(client)
    with client.create_ledger(password=PASSWORD) as writer:
        for number in range(20):
            writer.append(payload(number))
        first, second, third = metadata.read_ledger(writer.ledger_id).metadata.fragments[0].ensemble
        manager_of(four, third).close()
        for number in range(20, 40):
            writer.append(payload(number))
        last = second_fragment(metadata, writer.ledger_id)
        for each in (first, second):
            wait_until_it_holds(four, each, writer.ledger_id, 40)
        for each in (first, second):
            metadata.mark_under_replicated(writer.ledger_id, each, 5, reason=RepairReason.MISSING)
        service_of(manager_of(four, second)).replicas.delete(writer.ledger_id)
        whole, behind = start(manager_of(four, first)), start(manager_of(four, second))
        wait_until(lambda: marked(metadata, writer.ledger_id, first) is None)
        wait_until(lambda: marked(metadata, writer.ledger_id, second) == last.first_entry_id)
        wait_until(lambda: looked.count(second), "it misses entries of the last fragment")
        copied = behind.copied_bytes
        wait_until(lambda: looked.count(second) > 2, "it looks again")
        assert (whole.repaired, behind.repaired, behind.copied_bytes) == (1, 1, copied), "nothing is copied twice"
    wait_until(lambda: marked(metadata, writer.ledger_id, second) is None)
    run = service_of(manager_of(four, second)).replicas.read(writer.ledger_id, 0, 39, 1, 1 << 20)[1]
    assert run is not None
    assert run.last == 39


def test_a_mark_of_an_open_ledger_stays_while_its_bookie_is_in_limbo(
    four: Inside, start: Callable[[LedgerManager], LoneWorker]
) -> None:
    client = four.connect()
    metadata = metadata_of(client)
    with client.create_ledger(password=PASSWORD) as writer:
        for number in range(20):
            writer.append(payload(number))
        bookie = metadata.read_ledger(writer.ledger_id).metadata.fragments[0].ensemble[0]
        wait_until_it_holds(four, bookie, writer.ledger_id, 20)
        service_of(manager_of(four, bookie)).replicas.put_in_limbo({writer.ledger_id: None})
        metadata.mark_under_replicated(writer.ledger_id, bookie, 0, reason=RepairReason.MISSING)
        worker = start(manager_of(four, bookie))
        wait_until(lambda: writer.ledger_id in worker.failures, "it waits for the end of the fragment")
        assert marked(metadata, writer.ledger_id, bookie) == 0
    wait_until(lambda: marked(metadata, writer.ledger_id, bookie) is None)
    wait_until(lambda: not service_of(manager_of(four, bookie)).in_limbo())


def test_nothing_is_copied_twice_while_a_bookie_is_in_limbo(
    four: Inside, start: Callable[[LedgerManager], LoneWorker]
) -> None:
    client = four.connect()
    metadata = metadata_of(client)
    with client.create_ledger(password=PASSWORD) as writer:
        ledger_id = writer.ledger_id
        for number in range(20):
            writer.append(payload(number))
        bookie, _, third = metadata.read_ledger(ledger_id).metadata.fragments[0].ensemble
        manager_of(four, third).close()
        for number in range(20, 40):
            writer.append(payload(number))
        last = second_fragment(metadata, ledger_id)
        wait_until_it_holds(four, bookie, ledger_id, 40)
        service_of(manager_of(four, bookie)).replicas.put_in_limbo({ledger_id: None})
        metadata.mark_under_replicated(ledger_id, bookie, 5, reason=RepairReason.MISSING)
        worker = start(manager_of(four, bookie))
        wait_until(lambda: worker.failures.get(ledger_id, (0.0, 0.0))[0] > 0.5, "it has tried twice")
        assert worker.repaired == 1
        assert marked(metadata, ledger_id, bookie) == last.first_entry_id
    wait_until(lambda: marked(metadata, ledger_id, bookie) is None)


def test_nothing_is_copied_at_each_look_while_a_recovery_does_not_end(
    four: Inside, start: Callable[[LedgerManager], LoneWorker]
) -> None:
    client = four.connect()
    metadata = metadata_of(client)
    writer = client.create_ledger(password=PASSWORD)
    for number in range(20):
        writer.append(payload(number))
    found, version = metadata.read_ledger(writer.ledger_id)
    own, *others = found.fragments[0].ensemble
    spare = next(each for each in map(bookie_of, four.bookies) if each not in (own, *others))
    fragments = (found.fragments[0], Fragment(10, (spare, *others)))
    recovered = replace(found, fragments=fragments, state=LedgerState.IN_RECOVERY, version=found.version + 1)
    metadata.write_ledger(recovered, version)
    metadata.mark_under_replicated(writer.ledger_id, own, 0, reason=RepairReason.MISSING)
    worker = start(manager_of(four, own))
    wait_until(lambda: worker.failures.get(writer.ledger_id, (0.0, 0.0))[0] > 0.7, "it waits longer each time")
    assert worker.repaired
    assert marked(metadata, writer.ledger_id, own) == 0, "the recovery may have reported it, and may find more"
    with client.open_ledger(writer.ledger_id, password=PASSWORD, recover=True):
        wait_until(lambda: marked(metadata, writer.ledger_id, own) is None)
