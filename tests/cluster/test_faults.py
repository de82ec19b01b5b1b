"""Bookies and writers that are killed, stopped, wiped and moved, as real processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.errors import LedgerError, NotEnoughBookiesError
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.checker import check_ledger, check_writer, last_acked
from tests.cluster.child import PASSWORD, payload
from tests.cluster.processes import BookieProcess, Child, Cluster, running
from tests.internals import cluster_backend_of
from tests.storage.real_store import contents
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.sampled(one_in=8, using="cluster")


@pytest.fixture(scope="module")
def four_bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("four"), 4) as cluster:
        yield cluster


@pytest.fixture
def cluster(four_bookies: Cluster) -> Iterator[Cluster]:
    yield four_bookies
    for bookie in four_bookies.bookies.values():
        bookie.proxy.heal()
        if bookie.alive:
            bookie.resume()
        else:
            bookie.start()
    _wait_for_bookies(four_bookies.connect(), 4)


def _wait_for_bookies(client: LedgerManager, count: int) -> None:
    membership = cluster_backend_of(client).membership
    wait_until(lambda: len(membership.bookies) == count)


def _metadata(cluster: Cluster, writer: Child) -> LedgerMetadata:
    return cluster.connect().ledger_metadata(int(writer.said("ledger")[0]))


def _ensemble(cluster: Cluster, writer: Child) -> list[BookieProcess]:
    return [cluster.bookie(bookie) for bookie in _metadata(cluster, writer).fragments[-1].ensemble]


def _spare(cluster: Cluster, writer: Child) -> list[BookieProcess]:
    ensemble = _ensemble(cluster, writer)
    return [bookie for bookie in cluster.bookies.values() if bookie not in ensemble]


def _more(writer: Child, count: int = 200) -> None:
    """Wait until a writer has so many more entries acknowledged."""
    wanted = last_acked(writer) + count
    writer.wait_for(lambda: last_acked(writer) >= wanted)


def _under_replicated(cluster: Cluster, writer: Child) -> set[str]:
    ledger_id = int(writer.said("ledger")[0])
    store = cluster_backend_of(cluster.connect()).membership.metadata
    return {record.bookie.bookie_id for record in store.marks() if record.ledger_id == ledger_id}


# ---- bookies that are killed -----------------------------------------------------------------------------------------


def test_a_killed_bookie_is_replaced_by_the_spare_and_writing_continues(cluster: Cluster) -> None:
    writer = cluster.writer()
    _more(writer)
    killed, spare = _ensemble(cluster, writer)[1], _spare(cluster, writer)[0]
    killed.kill()
    _more(writer)
    wait_until(lambda: spare in _ensemble(cluster, writer))
    writer.kill()
    metadata = check_writer(cluster, writer)
    assert len(metadata.fragments) == 2
    assert killed.name not in {bookie.bookie_id for bookie in metadata.fragments[1].ensemble}


@pytest.mark.long
def test_without_a_spare_writing_continues_and_missing_entries_are_recorded(cluster: Cluster) -> None:
    writer = cluster.writer()
    _spare(cluster, writer)[0].kill()
    _wait_for_bookies(cluster.connect(), 3)
    _more(writer)
    first, second, third = _ensemble(cluster, writer)
    first.kill()
    _more(writer)
    wait_until(lambda: _under_replicated(cluster, writer) == {first.name})
    second.kill()
    refused = writer.wait_for(lambda: writer.said("error"))
    assert refused[0].startswith("NotEnoughBookiesError")
    assert "need 2 bookies of every 3" in refused[0]
    assert f"found were {third.name}" in refused[0]
    writer.join()
    with pytest.raises((NotEnoughBookiesError, LedgerError)):
        cluster.connect().open_ledger(int(writer.said("ledger")[0]), password=PASSWORD)
    first.start()
    second.start()
    check_writer(cluster, writer)


@pytest.mark.long
def test_all_bookies_are_killed_at_once_and_start_clean(cluster: Cluster) -> None:
    writers = [cluster.writer(shape=shape) for shape in ((3, 3, 2), (4, 3, 2), (4, 2, 2))]
    for writer in writers:
        _more(writer)
    before = {found.bookie for found in cluster_backend_of(cluster.connect()).membership.bookies.values()}
    for bookie in cluster.bookies.values():
        bookie.kill()
    for writer in writers:
        writer.kill()
    for bookie in cluster.bookies.values():
        bookie.begin()
    for bookie in cluster.bookies.values():
        bookie.serving()
    client = cluster.connect()
    _wait_for_bookies(client, 4)
    after = {found.bookie for found in cluster_backend_of(client).membership.bookies.values()}
    assert after == before, "a bookie is another instance after a restart"
    for writer in writers:
        check_writer(cluster, writer)


def test_a_bookie_that_was_killed_and_started_gives_what_it_acknowledged_and_takes_more(cluster: Cluster) -> None:
    for bookie in list(cluster.bookies.values())[3:]:
        bookie.kill()
    _wait_for_bookies(cluster.connect(), 3)
    writer = cluster.writer(shape=(3, 3, 3), pause_s=0.005)
    _more(writer, 50)
    killed = _ensemble(cluster, writer)[0]
    killed.kill()
    killed.start()
    writer.kill()
    metadata = check_writer(cluster, writer)  # every entry that was confirmed is on all three
    for bookie in cluster.bookies.values():
        if bookie is not killed and bookie.alive:
            bookie.kill()
    client = cluster.connect()
    assert contents(client, metadata.ledger_id, PASSWORD) == [
        payload(metadata.ledger_id, entry_id) for entry_id in range(metadata.last_entry_id + 1)
    ]
    with client.create_ledger(ensemble_size=1, insecure=True) as more:
        more.append(b"it takes new ledgers, too")
    assert more.metadata.fragments[0].ensemble[0].bookie_id == killed.name


# ---- bookies that are stopped, wiped or moved ------------------------------------------------------------------------


def test_a_stopped_bookie_delays_no_append_and_catches_up_when_it_resumes(cluster: Cluster) -> None:
    writer = cluster.writer(entries=1500, pause_s=0.001, patient=True)
    _more(writer, 50)
    slow = _ensemble(cluster, writer)[2]
    slow.stop()
    _more(writer, 200)
    slow.resume()
    assert writer.join() == 0
    metadata = check_writer(cluster, writer)
    assert len(metadata.fragments) == 1, "a short stop replaced the bookie"


@pytest.mark.long
def test_the_bytes_queued_for_a_stopped_bookie_are_bounded(cluster: Cluster) -> None:
    writer = cluster.writer(largest=200_000, entries=700, window=8)
    _more(writer, 20)
    before = _resident_bytes(writer)
    slow = _ensemble(cluster, writer)[0]
    slow.stop()
    assert writer.wait_for(lambda: writer.said("closed")) == ["699"]
    grown = _peak_bytes(writer) - before
    slow.resume()
    assert grown < 60 << 20, f"the writer grew by {grown >> 20} MiB"
    check_writer(cluster, writer, largest=200_000)


def _resident_bytes(child: Child) -> int:
    return _status(child, "VmRSS:")


def _peak_bytes(child: Child) -> int:
    return _status(child, "VmHWM:")


def _status(child: Child, name: str) -> int:
    lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def test_a_wiped_bookie_of_the_same_name_is_refused_with_the_remedy(cluster: Cluster) -> None:
    bookie = cluster.bookies["bookie-0"]
    bookie.kill()
    kept = bookie.directory.rename(bookie.directory.with_name("kept"))
    assert bookie.begin().join() != 0
    assert "bookie-0" in bookie.child.complaint()
    assert "another name" in bookie.child.complaint()
    bookie.wipe()
    kept.rename(bookie.directory)
    bookie.start()


@pytest.mark.parametrize("same_port", [pytest.param(True, marks=pytest.mark.long), False])
def test_clients_find_a_bookie_again_wherever_it_is(cluster: Cluster, same_port: bool) -> None:
    bookie = cluster.bookies["bookie-1"]
    client = cluster.connect()
    for other in cluster.bookies.values():
        if other is not bookie:
            other.kill()
    _wait_for_bookies(client, 1)
    writer = client.create_ledger(ensemble_size=1, password=PASSWORD)
    ledger_id = writer.ledger_id
    writer.append(payload(ledger_id, 0))
    address = bookie.proxy.target
    bookie.kill()
    assert (bookie.start(address if same_port else "tcp://127.0.0.1:*") == address) is same_port
    _wait_for_bookies(client, 1)
    reader = client.open_ledger(ledger_id, password=PASSWORD)
    assert [entry.payload for entry in reader.read(0, 0)] == [payload(ledger_id, 0)]
    with client.create_ledger(ensemble_size=1, insecure=True) as more:
        more.append(b"and it is written to")
    check_ledger(cluster, ledger_id, 0, 0)


# ---- writers that are killed or stopped ------------------------------------------------------------------------------


def test_a_killed_writers_ledger_is_recovered_with_all_that_was_acknowledged(cluster: Cluster) -> None:
    writer = cluster.writer(window=1000)
    _more(writer, 3000)
    writer.kill()
    check_writer(cluster, writer)


def test_a_writer_that_was_stopped_during_a_recovery_is_refused_when_it_resumes(cluster: Cluster) -> None:
    writer = cluster.writer(pause_s=0.0005)
    _more(writer)
    writer.stop()
    ledger_id = int(writer.said("ledger")[0])
    reader = cluster.connect().open_ledger(ledger_id, password=PASSWORD)
    closed = reader.metadata
    assert closed.state is LedgerState.CLOSED
    writer.signal(signal.SIGCONT)
    assert writer.join() == 0
    refused = writer.said("error")
    assert len(refused) == 6
    assert {line.split()[0] for line in refused} == {"LedgerFencedError"}
    metadata = check_writer(cluster, writer)
    assert (metadata.last_entry_id, metadata.length) == (closed.last_entry_id, closed.length)


def test_two_simultaneous_recoveries_agree(cluster: Cluster) -> None:
    writer = cluster.writer(window=200)
    _more(writer)
    ledger_id = int(writer.said("ledger")[0])
    clients = [cluster.connect() for _ in range(3)]
    ends: list[int] = []
    failed: list[LedgerError] = []

    def recover(client: LedgerManager) -> None:
        try:
            ends.append(client.open_ledger(ledger_id, password=PASSWORD).last_add_confirmed)
        except LedgerError as error:
            failed.append(error)

    threads = [threading.Thread(target=recover, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failed
    assert len(ends) == 3
    assert len(set(ends)) == 1
    writer.join()
    assert {line.split()[0] for line in writer.said("error")} == {"LedgerFencedError"}
    assert check_writer(cluster, writer).last_entry_id == ends[0]
