"""What a cluster mends by itself or when asked: lost bookies, damaged copies, limbo, and ledgers that were deleted."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk.bookie.replicas import Replicas
from pybk.bookie.server import BookieServer
from pybk.client.backend import ClusterBackend
from pybk.client.rereplication import Rereplicator
from pybk.config import StoreConfig
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataError,
    NoSuchLedgerError,
    StorageFullError,
    UnauthorizedError,
)
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger.ledger_metadata import Bookie, Fragment, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.ledgers import StoredLedger
from pybk.replication.messages import Add, EntryRun, Reply, Status
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import ClusterKeys
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, service_of
from tests.storage.real_store import QUICK, open_quick
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"correct horse"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path, count=4) as cluster:
        yield cluster


def payload(number: int) -> bytes:
    return b"entry %d " % number * 20


def fill(client: LedgerManager, count: int = 300, **options: Any) -> int:
    with client.create_ledger(password=PASSWORD, **options) as writer:
        for number in range(10):
            writer.append(payload(number))
        writer.append_many([payload(number) for number in range(10, count)])
    return writer.ledger_id


def check(client: LedgerManager, ledger_id: int, count: int = 300) -> None:
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        assert reader.last_add_confirmed == count - 1
        assert [entry.payload for entry in reader.read(0, count - 1)] == [payload(number) for number in range(count)]


def held(cluster: Inside, ledger_id: int) -> dict[str, list[int]]:
    """Return which entries each bookie that serves has of a ledger."""
    found = {}
    for manager in cluster.bookies:
        service = service_of(manager)
        if not service.stopping.is_set():
            read = service.replicas.read
            found[service.bookie.bookie_id] = [
                number for number in range(300) if read(ledger_id, number, number, 1, 1 << 20)[0] is Status.OK
            ]
    return found


@pytest.mark.parametrize("shape", [(3, 3, 2), (3, 2, 2)])
def test_a_lost_bookie_is_replaced_by_one_that_has_the_same_bytes(four: Inside, shape: tuple[int, int, int]) -> None:
    client = four.connect()
    ledger_id = fill(client, ensemble_size=shape[0], write_quorum=shape[1], ack_quorum=shape[2])
    ensemble = client.ledger_metadata(ledger_id).fragments[0].ensemble
    lost = ensemble[0].bookie_id
    wait_until(lambda: sum(map(len, held(four, ledger_id).values())) == 300 * shape[1], "the last bookie to have all")
    before = held(four, ledger_id)[lost]
    four.bookies[int(lost[-1])].close()
    wait_until(lambda: lost not in cluster_backend_of(client).membership.bookies)
    done = client.replicate(ledger_id)
    assert (done.ledgers, done.fragments, done.left) == (1, 1, ())
    after = client.ledger_metadata(ledger_id).fragments[0].ensemble
    assert after[1:] == ensemble[1:]
    assert after[0] not in ensemble
    assert held(four, ledger_id)[after[0].bookie_id] == before
    check(client, ledger_id)
    assert client.replicate(ledger_id).fragments == 0


def test_a_writer_shows_the_ensemble_that_it_writes_to(four: Inside) -> None:
    client = four.connect()
    with client.create_ledger(password=PASSWORD) as writer:
        writer.append(payload(0))
        lost = writer.metadata.fragments[0].ensemble[0]
        four.bookies[int(lost.bookie_id[-1])].close()
        writer.append(payload(1))
        wait_until(lambda: len(writer.metadata.fragments) == 2)
        assert writer.metadata == four.connect().ledger_metadata(writer.ledger_id)
        assert lost not in writer.metadata.fragments[1].ensemble


def test_all_ledgers_of_a_bookie_that_leaves_are_moved_off_it(four: Inside) -> None:
    client = four.connect()
    ledgers = [fill(client, 30, ensemble_size=3) for _ in range(4)]
    leaving = client.ledger_metadata(ledgers[0]).fragments[0].ensemble[0].bookie_id
    concerned = [
        ledger_id
        for ledger_id in ledgers
        if leaving in [bookie.bookie_id for bookie in client.ledger_metadata(ledger_id).fragments[0].ensemble]
    ]
    done = client.replicate(leaving)
    assert (done.ledgers, done.fragments, done.left) == (len(concerned), len(concerned), ())
    for ledger_id in ledgers:
        ensemble = client.ledger_metadata(ledger_id).fragments[0].ensemble
        assert leaving not in [bookie.bookie_id for bookie in ensemble]
        check(client, ledger_id, 30)


def test_the_open_end_of_a_ledger_waits_for_its_recovery(four: Inside) -> None:
    client = four.connect()
    writer = client.create_ledger(password=PASSWORD)
    writer.append(payload(0))
    lost = writer.metadata.fragments[0].ensemble[0].bookie_id
    done = client.replicate(lost)
    assert done.fragments == 0
    assert ", recover=True), then replicate again" in done.left[0]
    writer.close()
    assert client.replicate(lost).fragments == 1


def test_entries_that_could_not_be_copied_stay_on_record(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    client = four.connect()
    ledger_id = fill(client, 30, ensemble_size=3)
    backend = cluster_backend_of(client)
    short = client.ledger_metadata(ledger_id).fragments[0].ensemble[0]
    backend.membership.metadata.mark_under_replicated(ledger_id, short, 0)

    def fail(*arguments: object) -> None:
        raise StorageFullError("no space")

    with monkeypatch.context() as failing:
        failing.setattr(backend.driver, "run", fail)
        done = client.replicate(ledger_id)
    assert (done.fragments, len(done.left)) == (0, 1)
    assert "no space" in done.left[0]
    assert [mark[:3] for mark in backend.membership.metadata.marks()] == [(ledger_id, short, 0)]
    assert client.replicate(ledger_id).fragments == 1
    assert list(backend.membership.metadata.marks()) == []


def test_the_record_of_a_lost_bookie_that_nobody_replaces_stays(four: Inside) -> None:
    """It may come back, and would then count as one that has the entries that it missed."""
    client = four.connect()
    ledger_id = fill(client, 30, ensemble_size=3)
    metadata = cluster_backend_of(client).membership.metadata
    lost = client.ledger_metadata(ledger_id).fragments[0].ensemble[:2]
    for bookie in lost:
        metadata.mark_under_replicated(ledger_id, bookie, 7)
        four.bookies[int(bookie.bookie_id[-1])].close()
    wait_until(lambda: not {each.bookie_id for each in lost} & cluster_backend_of(client).membership.bookies.keys())
    done = client.replicate(ledger_id)
    (left,) = set(lost) & set(client.ledger_metadata(ledger_id).fragments[0].ensemble)
    assert left in [mark.bookie for mark in metadata.marks()]
    assert (done.fragments, len(done.left)) == (0, 1)
    assert f"the places of {left}: start more bookies" in done.left[0]


def with_a_spare(four: Inside) -> tuple[ClusterBackend, StoredLedger, Bookie]:
    """Return a client's backend, an open ledger on three bookies, and the fourth bookie."""
    client = four.connect()
    backend = cluster_backend_of(client)
    writer = client.create_ledger(password=PASSWORD, ensemble_size=3)
    writer.append(payload(0))
    stored = backend.membership.metadata.read_ledger(writer.ledger_id)
    (spare,) = (bookie for bookie in backend.membership.rank() if bookie not in stored.metadata.fragments[0].ensemble)
    return backend, stored, spare


def test_a_record_of_a_bookie_that_came_into_the_ensemble_meanwhile_stays(four: Inside) -> None:
    backend, old, other = with_a_spare(four)
    ledger_id, ensemble = old.metadata.ledger_id, old.metadata.fragments[0].ensemble
    backend.membership.metadata.mark_under_replicated(ledger_id, other, 7)
    records = list(backend.membership.metadata.marks())
    replicator = Rereplicator(backend.driver, backend.membership)
    fragments = (*old.metadata.fragments, Fragment(5, (other, *ensemble[1:])))
    backend.membership.metadata.write_ledger(replace(old.metadata, version=2, fragments=fragments), old.version)
    assert len(replicator.replicate([old], None).left) == 1
    assert list(backend.membership.metadata.marks()) == records


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_records_of_a_ledger_that_is_being_recovered_stay(four: Inside, state: LedgerState) -> None:
    """The recovery may have put the bookie into an ensemble that it writes with the end alone."""
    backend, old, other = with_a_spare(four)
    ledger_id, ensemble = old.metadata.ledger_id, old.metadata.fragments[0].ensemble
    fragments = (Fragment(0, (other, *ensemble[1:])), Fragment(1, ensemble))
    changed = replace(old.metadata, state=state, version=2, fragments=fragments)
    backend.membership.metadata.write_ledger(changed, old.version)
    backend.membership.metadata.mark_under_replicated(ledger_id, other, 7)
    assert Rereplicator(backend.driver, backend.membership).replicate([old], None).left == ()
    assert bool(list(backend.membership.metadata.marks())) is (state is LedgerState.IN_RECOVERY)


def test_metadata_that_cannot_be_read_again_are_left_and_stay_on_record(
    four: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = four.connect()
    backend = cluster_backend_of(client)
    stored = [backend.membership.metadata.read_ledger(fill(client, 3, ensemble_size=3)) for _ in range(2)]
    for found in stored:
        bookie = found.metadata.fragments[0].ensemble[0]
        backend.membership.metadata.mark_under_replicated(found.metadata.ledger_id, bookie, 0)
    read = backend.membership.metadata.read_ledger

    def fail_once(ledger_id: int) -> StoredLedger:
        if ledger_id == stored[0].metadata.ledger_id:
            raise CorruptError("its metadata is damaged")
        return read(ledger_id)

    monkeypatch.setattr(backend.membership.metadata, "read_ledger", fail_once)
    done = Rereplicator(backend.driver, backend.membership).replicate(stored, None)
    assert (done.ledgers, done.fragments) == (2, 1)
    assert done.left == (f"ledger {stored[0].metadata.ledger_id}: its metadata is damaged",)
    left = [record.ledger_id for record in backend.membership.metadata.marks()]
    assert left == [stored[0].metadata.ledger_id]


def test_records_of_a_ledger_that_is_deleted_or_closed_without_the_bookie_are_crossed_out(four: Inside) -> None:
    client = four.connect()
    backend = cluster_backend_of(client)
    for is_deleted in (False, True):
        ledger_id = fill(client, 3, ensemble_size=3)
        old = backend.membership.metadata.read_ledger(ledger_id)
        (other,) = (bookie for bookie in backend.membership.rank() if bookie not in old.metadata.fragments[0].ensemble)
        backend.membership.metadata.mark_under_replicated(ledger_id, other, 7)
        if is_deleted:
            client.delete_ledger(ledger_id, password=PASSWORD)
        assert Rereplicator(backend.driver, backend.membership).replicate([old], None).left == ()
        assert list(backend.membership.metadata.marks()) == []


def test_a_store_of_one_process_has_nothing_to_replicate(tmp_path: Path) -> None:
    with open_quick(tmp_path) as manager, pytest.raises(IllegalOperationError, match="one copy"):
        manager.replicate(0)


def test_a_damaged_copy_is_read_elsewhere_and_mended(four: Inside) -> None:
    client = four.connect()
    ledger_id = fill(client, 40, ensemble_size=3)
    ensemble = client.ledger_metadata(ledger_id).fragments[0].ensemble
    service = service_of(four.bookies[int(ensemble[0].bookie_id[-1])])
    wrong = 17
    # The ledger is closed once two of three have its entries; the third may be late.
    wait_until(lambda: service.replicas.read(ledger_id, wrong, wrong, 1, 1 << 20)[0] is Status.OK)
    damage(service, payload(wrong))
    # Read from the damaged bookie first.
    membership = cluster_backend_of(client).membership
    membership.near = service.bookie.bookie_id
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        assert [entry.payload for entry in reader.read(wrong, wrong)] == [payload(wrong)]

    def mended() -> bool:
        status, run = service.replicas.read(ledger_id, wrong, wrong, 1, 1 << 20, checked=True)
        return status is Status.OK and run is not None and payload(wrong) in b"".join(run.body)

    wait_until(mended)
    check(client, ledger_id, 40)


def damage(service: BookieServer, found: bytes) -> None:
    """Flip a bit of some bytes wherever a bookie keeps them; its checksums say so from then on."""
    store = service.replicas.store
    hits = 0
    for row in list(store.volumes.rows.values()):
        path = Path(store.volumes.path_of(row))
        if path.is_dir():
            continue
        data = path.read_bytes()
        at = data.find(found)
        if at >= 0:
            hits += 1
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
    assert hits == 1


def test_a_ledger_in_limbo_gets_back_what_it_lacks(four: Inside) -> None:
    client = four.connect()
    writer = client.create_ledger(password=PASSWORD, write_flags=WriteFlag.DEFERRED_FORCE)
    for number in range(20):
        writer.append(payload(number))
    writer.force()
    writer.close()
    name = writer.metadata.fragments[0].ensemble[0].bookie_id
    place = int(name[-1])
    read = service_of(four.bookies[place]).replicas.read
    wait_until(lambda: read(writer.ledger_id, 19, 19, 1, 1 << 20)[0] is Status.OK)  # others acknowledged it, too
    four.bookies[place].close()
    unclean(four.directory / name)
    again = four.open_bookie(place)
    wait_until(lambda: not service_of(again).in_limbo())
    assert service_of(again).replicas.read(writer.ledger_id, 20, 20, 1, 100)[0] is Status.NO_SUCH_ENTRY
    check(client, writer.ledger_id, 20)


def test_a_deferred_ledger_is_recovered_when_all_its_bookies_ended_by_accident(four: Inside) -> None:
    client = four.connect()
    writer = client.create_ledger(password=PASSWORD, write_flags=WriteFlag.DEFERRED_FORCE)
    for number in range(20):
        writer.append(payload(number))
    writer.force()
    running = [service_of(each).replicas for each in four.bookies]
    wait_until(
        lambda: sum(each.count_entries(writer.ledger_id) == 20 for each in running) == 3, "the last bookie to have all"
    )
    services = []
    for place in range(4):
        four.bookies[place].close()
        unclean(four.directory / f"bookie-{place}")
        services.append(service_of(four.open_bookie(place)))
    assert [service.in_limbo() for service in services].count([writer.ledger_id]) == 3
    check(four.connect(), writer.ledger_id, 20)
    wait_until(lambda: not any(service.in_limbo() for service in services))


def unclean(path: Path) -> None:
    """Have a store take its last end for one by accident."""
    replicas = Replicas.open(str(path), config=StoreConfig(**QUICK))
    replicas.store.close(clean=False)


def test_a_ledger_is_moved_by_all_bookies_that_have_it(four: Inside) -> None:
    client = four.connect()
    writer = client.create_ledger(password=PASSWORD, ensemble_size=3)
    for number in range(20):
        writer.append(payload(number))
    before = client.ledger_metadata(writer.ledger_id)
    client.move_ledger(writer.ledger_id, StorageHint.HDD, password=PASSWORD)
    after = client.ledger_metadata(writer.ledger_id)
    assert (after.tier, after.version) == (StorageHint.HDD, before.version + 1)
    for number in range(20, 40):
        writer.append(payload(number))
    writer.close()
    check(client, writer.ledger_id, 40)
    names = [bookie.bookie_id for bookie in writer.metadata.fragments[0].ensemble]
    for name in names:
        service = service_of(four.bookies[int(name[-1])])
        replica = service.replicas.replica(writer.ledger_id)
        assert replica is not None
        assert {descriptor.metadata.tier for descriptor in replica.parts()} == {StorageHint.HDD}
    client.move_ledgers([writer.ledger_id], StorageHint.SSD, password=PASSWORD)
    check(client, writer.ledger_id, 40)
    with pytest.raises(UnauthorizedError):
        client.move_ledger(writer.ledger_id, StorageHint.NVME, password=b"another")
    four.bookies[int(names[0][-1])].close()
    with pytest.raises(StorageFullError, match=names[0]):
        client.move_ledger(writer.ledger_id, StorageHint.NVME, password=PASSWORD)
    check(client, writer.ledger_id, 40)


def test_bookies_drop_a_deleted_ledger_when_they_see_its_tombstone_twice(four: Inside) -> None:
    client = four.connect()
    ledger_id = fill(client, 30)
    kept = fill(client, 30)
    with pytest.raises(UnauthorizedError):
        client.delete_ledger(ledger_id, password=b"another")
    client.delete_ledger(ledger_id, password=PASSWORD)
    with pytest.raises(NoSuchLedgerError):
        client.open_ledger(ledger_id, password=PASSWORD)
    services = [service_of(manager) for manager in four.bookies]
    for service in services:
        service.keeper.collect()
    assert any(ledger_id in service.replicas.ledgers() for service in services)
    for service in services:
        service.keeper.collect()
    wait_until(lambda: not any(ledger_id in service.replicas.ledgers() for service in services))
    check(client, kept, 30)


def test_a_tombstone_made_without_the_password_deletes_nothing(four: Inside) -> None:
    client = four.connect()
    ledger_id = fill(client, 30)
    metadata = cluster_backend_of(client).membership.metadata
    metadata.delete_ledger(ledger_id, metadata.read_ledger(ledger_id).version, bytes(64))
    for service in map(service_of, four.bookies):
        if ledger_id in service.replicas.ledgers():
            service.keeper.collect()
            service.keeper.collect()
            assert service.posted == service.posted.__class__()
            assert ledger_id in service.replicas.ledgers()


def test_a_client_without_the_right_may_add_only_copies_of_final_entries(four: Inside) -> None:
    client = four.connect()
    closed = fill(client, 10, ensemble_size=3)
    writer = client.create_ledger(password=PASSWORD, ensemble_size=3)
    writer.append(payload(0))
    sources = {closed: client.ledger_metadata(closed), writer.ledger_id: writer.metadata}
    keys = ClusterKeys.derive(four.secret or b"", cluster_backend_of(client).membership.metadata.cluster_id)
    with Links(keys) as links:
        for ledger_id, allowed in ((closed, True), (writer.ledger_id, False)):
            bookie = sources[ledger_id].fragments[0].ensemble[0]
            service = service_of(four.bookies[int(bookie.bookie_id[-1])])
            run = first_entry(service, ledger_id)
            address, public = cluster_backend_of(client).membership.find(bookie) or ("", None)
            link = links.connect(bookie, address, public)
            whole = EntryRun(0, 1, array("q", run.sizes), (b"".join(run.body),))
            copy = Add(ledger_id, (whole,), 0, recovery=True)
            beyond = copy._replace(runs=(EntryRun(10, 1, whole.sizes, whole.body),))
            plain = copy._replace(recovery=False)
            said = [ask(links, link, number, add) for number, add in enumerate((copy, beyond, plain))]
            refused = Status.UNAUTHORIZED
            assert said == [Status.OK if allowed else refused, refused, refused]


def first_entry(service: BookieServer, ledger_id: int) -> EntryRun:
    """Return a bookie's copy, which may come after the acknowledgement by others."""
    wait_until(lambda: service.replicas.read(ledger_id, 0, 0, 1, 1 << 20)[0] is Status.OK)
    _, run = service.replicas.read(ledger_id, 0, 0, 1, 1 << 20)
    assert run is not None
    return run


def ask(links: Links, link: Any, request_id: int, add: Add) -> Status:
    assert link.send(request_id, add, int(WAIT_S * 1e9))
    ((_, answered, reply),) = wait_until(lambda: links.poll(100))
    assert answered == request_id
    assert isinstance(reply, Reply)
    return reply.status


def test_a_failed_bookie_reports_its_failure(four: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = four.bookies[0]
    assert manager.health().state == "ok"
    assert manager.health().free_bytes
    assert [reason.code for reason in four.connect().health().reasons] == ["no_auditor"]
    service = service_of(manager)
    monkeypatch.setattr(service.machine, "commit", lambda: 1 / 0)
    service.post(list)  # what is posted is committed, so the failure need not wait for the upkeep of the bookie
    wait_until(lambda: manager.health().state == "failed")
    assert "serves no more: ZeroDivisionError" in manager.health().reason
    client = four.connect()
    wait_until(lambda: service.bookie.bookie_id not in cluster_backend_of(client).membership.bookies)
    check(client, fill(client, 30), 30)


def test_a_client_makes_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(MetadataError, match="start the first bookie"):
        LedgerManager.connect(f"lmdb://{tmp_path}/nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(MetadataError, match="no cluster in this metadata store"):
        LedgerManager.connect(f"lmdb://{tmp_path}/empty")
