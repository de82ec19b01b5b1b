"""Clusters whose metadata store is put back to an older state, emptied, restored, or made again from directories."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pybk import (
    ClusterAdmin,
    CookieError,
    LedgerDeletedError,
    LedgerFencedError,
    LedgerManager,
    LedgerRecoveryError,
    LedgerState,
    MetadataForgedError,
    MetadataOutdatedError,
    MetadataRestoreReport,
    NoSuchLedgerError,
    SafetyCheckError,
    StoreConfig,
    UsageError,
    check_metadata,
    export_metadata,
    rebuild_metadata,
    restore_metadata,
)
from pybk.bookie import keeper
from pybk.credentials import ClusterSecret
from pybk.errors import MetadataExistsError, MetadataVersionError
from pybk.metadata.export import check_export, read_export
from pybk.metadata.url import open_metadata
from tests.cluster.inside import SECRET, make_cluster
from tests.internals import cluster_backend_of, service_of
from tests.storage.real_store import QUICK
from tests.waiting import wait_until
from tests.zookeeper_server import missing, zookeeper_server

pytestmark = pytest.mark.sampled(one_in=5, using="tmp_path")

__all__ = ["zookeeper_server"]

PASSWORD = b"correct horse"
NEXT = b"the secret that a cluster gets --"


class Running:
    """The bookies of a cluster in this process, and clients."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self._cluster = cluster
        self._stack = stack
        self.bookies: dict[int, LedgerManager] = {}

    def start(self, place: int, **options: Any) -> LedgerManager:
        """Start a bookie."""
        manager = LedgerManager.open(
            self._cluster.bookie(place),
            listen="tcp://127.0.0.1:*",
            metadata=self._cluster.url,
            cluster_secret=self._cluster.given,
            bookie_id=f"bookie-{place}",
            config=StoreConfig(**QUICK),
            **options,
        )
        self._stack.callback(manager.close)
        self.bookies[place] = manager
        return manager

    def connect(self) -> LedgerManager:
        """Return another client."""
        manager = LedgerManager.connect(
            self._cluster.url, cluster_secret=self._cluster.given, config=StoreConfig(**QUICK)
        )
        self._stack.callback(manager.close)
        return manager


class Cluster:
    """A cluster that is started and stopped, and whose metadata are put back, emptied and restored."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.url = make_cluster(directory, url=url)
        self.given: ClusterSecret = SECRET
        self._copies = itertools.count()

    def bookie(self, place: int) -> Path:
        """Return the directory of a bookie."""
        return self.directory / f"bookie-{place}"

    @contextmanager
    def running(self, count: int = 3) -> Iterator[Running]:
        """Run bookies."""
        with ExitStack() as stack:
            running = Running(self, stack)
            for place in range(count):
                running.start(place)
            yield running

    def copy(self) -> Path:
        """Return a new export."""
        path = self.directory / f"export-{next(self._copies)}"
        export_metadata(self.url, path, cluster_secret=self.given)
        return path

    def put_back(self, copy: Path) -> None:
        """Have the store be as it was when the copy was made, as its disk's older state would: bookies may run."""
        self.empty()
        store = open_metadata(self.url)
        for key, value in read_export(str(copy)):
            while True:
                try:
                    store.create(key, value)
                    break
                except MetadataExistsError:  # a bookie that runs has written it meanwhile
                    node = store.get(key, latest=True)
                    with suppress(MetadataVersionError):
                        store.delete(key, 0 if node is None else node.version)
        store.close()

    def empty(self) -> None:
        """Have the store forget everything."""
        store = open_metadata(self.url)
        for key, node in list(store.walk()):
            if key.partition("/")[0] not in ("bookies", "locks"):
                store.delete(key, node.version)
        store.close()

    def rebuild(self, *places: int, lost: bool = True, write: bool = True) -> MetadataRestoreReport:
        """Make the metadata again from the directories of bookies."""
        directories = [self.bookie(place) for place in places or (0, 1, 2)]
        return rebuild_metadata(self.url, directories, cluster_secret=self.given, all_directories=lost, write=write)

    def restore(self, copy: Path | None = None, **options: Any) -> MetadataRestoreReport:
        """Restore an export with a new epoch, or accept what the store has."""
        return restore_metadata(self.url, copy, cluster_secret=self.given, write=True, **options)


@pytest.fixture(params=["lmdb", pytest.param("zookeeper", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Cluster:
    if request.param == "zookeeper" and missing() is not None:
        pytest.skip(missing() or "")
    url = "" if request.param == "lmdb" else request.getfixturevalue("zookeeper_server").url()
    return Cluster(tmp_path, url)


@pytest.fixture
def local(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path, "")


def payload(ledger_id: int, entry_id: int) -> bytes:
    return b"entry %d of ledger %d" % (entry_id, ledger_id)


def write(manager: LedgerManager, entries: int = 5, **options: Any) -> int:
    """Write a ledger and close it; return its id."""
    with manager.create_ledger(password=PASSWORD, **options) as writer:
        for entry_id in range(entries):
            writer.append(payload(writer.ledger_id, entry_id))
    return writer.ledger_id


def check(manager: LedgerManager, ledger_id: int, entries: int = 5) -> None:
    """Open a ledger with recovery, and read it."""
    with manager.open_ledger(ledger_id, password=PASSWORD) as reader:
        assert reader.last_add_confirmed == entries - 1
        found = [entry.payload for entry in reader.read(0, entries - 1)] if entries else []
    assert found == [payload(ledger_id, entry_id) for entry_id in range(entries)]
    assert manager.ledger_metadata(ledger_id).sealed


def refused(cluster: Cluster, match: str) -> None:
    """Check that bookies and clients are refused, each time, and told what to do."""
    for place in (0, 1, 0):
        with (
            pytest.raises(MetadataOutdatedError, match=rf"{match}.*pybk metadata restore.*pybk metadata rebuild"),
            ExitStack() as stack,
        ):
            Running(cluster, stack).start(place)


def test_a_store_that_was_put_back_is_refused_until_it_is_accepted(cluster: Cluster) -> None:
    with cluster.running() as running:
        before = [write(running.connect()) for _ in range(3)]
    copy = cluster.copy()
    with cluster.running() as running:
        after = [write(running.connect()) for _ in range(3)]
    cluster.put_back(copy)
    refused(cluster, "epoch is 0/3, and bookie bookie-0 has seen 0/4")
    with pytest.raises(MetadataOutdatedError, match="bookie bookie-0 has seen"):
        LedgerManager.connect(cluster.url, cluster_secret=SECRET)
    assert any(problem.key == "outdated" for problem in check_metadata(cluster.url, cluster_secret=SECRET).problems)
    accepted = cluster.restore()
    assert accepted.limbo
    assert accepted.epoch > 0
    assert accepted.next_id > 1_000_000
    found = cluster.rebuild()
    assert found.made == tuple(after)
    assert not found.limbo
    assert [found.corrected, found.suspects, found.undecidable, found.incomplete] == [()] * 4
    with cluster.running() as running:
        client = running.connect()
        assert list(client.list_ledgers()) == [*before, *after]
        assert client.ledger_metadata(after[0]).state is LedgerState.IN_RECOVERY
        for ledger_id in (*before, *after):
            check(client, ledger_id)
        assert write(client) >= found.next_id - 1_000_000
    with cluster.running() as running:
        check(running.connect(), before[0])
    assert not check_metadata(cluster.url, cluster_secret=SECRET).problems


def test_a_store_put_back_while_no_bookie_started_is_recognised_by_the_ledgers_it_lacks(cluster: Cluster) -> None:
    with cluster.running() as running:
        write(running.connect())
        copy = cluster.copy()
        late = [write(running.connect()) for _ in range(3)]
    cluster.put_back(copy)
    refused(cluster, rf"bookie-0 has entries of 3 ledgers that it never heard of \({late[0]}, {late[1]}, {late[2]}\)")
    cluster.restore()
    with cluster.running():  # the operator's choice: those ledgers are no evidence any more
        pass
    with cluster.running() as running:
        write(running.connect())


def test_a_running_bookie_that_sees_an_older_store_takes_no_more_entries(
    local: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STATE_SECONDS", 0.1)
    with local.running() as running:
        copy = local.copy()
    with local.running() as running:
        client = running.connect()
        done = write(client)
        local.put_back(copy)
        bookie = running.bookies[0]
        wait_until(lambda: bookie.health().state == "read_only")
        assert "put back" in bookie.health().reason
        with pytest.raises(MetadataOutdatedError):
            running.connect()
        assert service_of(bookie).serving
    local.rebuild()
    with local.running() as running:
        check(running.connect(), done)


def test_an_emptied_store_is_made_again_from_directories(cluster: Cluster) -> None:
    with cluster.running(4) as running:
        client = running.connect()
        shapes = [(3, 3, 2), (3, 2, 2), (4, 2, 1), (1, 1, 1)]
        names = ("ensemble_size", "write_quorum", "ack_quorum")
        closed = [
            write(client, 20, **dict(zip(names, shape, strict=True)), custom_metadata={"key": b"value"})
            for shape in shapes
        ]
        with client.create_ledger(password=PASSWORD) as empty:
            pass
        left = client.create_ledger(password=PASSWORD, ensemble_size=3, write_quorum=2, ledger_type="orders")
        for entry_id in range(10):
            left.append(payload(left.ledger_id, entry_id))
        first = left.metadata.fragments[0].ensemble[0].bookie_id
        running.bookies[int(first[-1])].close()
        for entry_id in range(10, 20):
            left.append(payload(left.ledger_id, entry_id))
        assert len(client.ledger_metadata(left.ledger_id).fragments) == 2
        before = {each: client.ledger_metadata(each) for each in closed}
    cluster.empty()
    with pytest.raises(MetadataOutdatedError, match=r"no cluster.*used before"), cluster.running(1):
        pass
    dry = cluster.rebuild(0, 1, 2, 3, write=False)
    assert not dry.written
    assert any("pointers" in note for note in dry.notes)
    found = cluster.rebuild(0, 1, 2, 3)
    assert found.made == dry.made == (*closed, left.ledger_id)
    assert found.next_id > 1_000_000
    with cluster.running(4) as running:
        client = running.connect()
        for ledger_id in found.made:
            check(client, ledger_id, 20)
            if ledger_id in before:
                now, was = client.ledger_metadata(ledger_id), before[ledger_id]
                assert (now.seal, now.last_digest, now.length) == (was.seal, was.last_digest, was.length)
                assert now.custom_metadata == was.custom_metadata
        with pytest.raises(NoSuchLedgerError):  # no bookie ever heard of it
            client.open_ledger(empty.ledger_id, password=PASSWORD)
        write(client)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.bookie.keeper.STATE_SECONDS", 0.1)
    monkeypatch.setattr("pybk.bookie.keeper.POSITION_SECONDS", 0.05)
    monkeypatch.setattr("pybk.transport.server.OLD_SILENCE_NS", 10**9 // 4)
    monkeypatch.setattr("pybk.metadata.authenticated_values.SECRETS_AGE_SECONDS", 0.1)


def rotate(cluster: Cluster, *, retire: bool = True) -> tuple[int, int]:
    """Replace the secret; return a ledger made while both were valid, and one made with the new one.

    The bookies have kept what the cluster says of itself on return.
    """
    cluster.given = (SECRET, NEXT)
    with cluster.running() as running:
        client = running.connect()
        admin = ClusterAdmin(client)
        admin.add_secret()
        between = write(client)
        wait_until(lambda: not admin.secret_status().lacking)
        admin.switch_secret()
        after = write(client)
        admin.reseal_metadata()
        if retire:
            wait_until(lambda: not admin.secret_status().hindrances)
            admin.retire_secret()
        about = cluster_backend_of(client).membership.metadata.about
        for bookie in running.bookies.values():
            replicas = service_of(bookie).replicas
            wait_until(lambda replicas=replicas: replicas.about == about)  # type: ignore[misc]
    return between, after


@pytest.mark.sampled(one_in=8, group="processes")
def test_the_metadata_of_a_cluster_whose_secret_was_replaced_are_made_again(local: Cluster, quick: None) -> None:
    with local.running(4) as running:
        client = running.connect()
        before = write(client)
        left = client.create_ledger(password=PASSWORD)
        left.append(payload(left.ledger_id, 0))
    between, after = rotate(local)  # while bookie-3 is away, and keeps what the cluster said before
    local.empty()
    local.given = SECRET
    with pytest.raises(MetadataForgedError, match="which was retired"):
        local.rebuild(0, 1, 2, 3)
    local.given = NEXT
    found = local.rebuild(0, 1, 2, 3)
    assert found.made == (before, left.ledger_id, between, after)
    assert not found.not_made
    with local.running(4) as running:
        client = running.connect()
        for ledger_id in found.made:
            check(client, ledger_id, 1 if ledger_id == left.ledger_id else 5)
        assert ClusterAdmin(client).secret_status().retired == (0,)
        check(client, write(client))
        with pytest.raises(MetadataForgedError, match="which was retired"):
            LedgerManager.connect(local.url, cluster_secret=SECRET)
    assert check_metadata(local.url, cluster_secret=NEXT).problems == ()


def test_an_export_of_before_a_rotation_is_restored_without_the_secret_that_was_retired(
    local: Cluster, quick: None
) -> None:
    """The directories have what the cluster said last; without them an export has the secrets of its time."""
    with local.running() as running:
        client = running.connect()
        before = write(client)
        cluster_backend_of(client).membership.metadata.write_pointer("logs", "a", b"value", None)
    copy = local.copy()
    between, after = rotate(local)
    local.empty()
    local.given = NEXT
    with pytest.raises(MetadataForgedError, match="not that of cluster"):
        local.restore(copy)
    directories = [local.bookie(place) for place in range(3)]
    local.given = SECRET
    with pytest.raises(MetadataForgedError, match="which was retired"):
        local.restore(copy, directories=directories, all_directories=True)
    local.given = NEXT
    found = local.restore(copy, directories=directories, all_directories=True)
    assert (found.known, found.made, found.not_made) == (1, (between, after), ())
    with local.running() as running:
        client = running.connect()
        for ledger_id in (before, between, after):
            check(client, ledger_id)
        assert ClusterAdmin(client).secret_status().valid == (1,)
        pointer = cluster_backend_of(client).membership.metadata.read_pointer("logs", "a")
        assert pointer is not None
        assert pointer.value == b"value"
    assert check_metadata(local.url, cluster_secret=NEXT).problems == ()


def test_a_deleted_ledger_stays_deleted_where_a_bookie_remembers_it_and_is_named_where_none_does(
    local: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "STATE_SECONDS", 0.1)
    monkeypatch.setattr(keeper, "COLLECT_SECONDS", 0.1)
    with local.running() as running:
        client = running.connect()
        deleted, kept = write(client), write(client)
        alone = write(client, ensemble_size=1)
        holder = int(client.ledger_metadata(alone).fragments[0].ensemble[0].bookie_id[-1])
        away = running.bookies[holder]
        away.close()
        client.delete_ledger(deleted, password=PASSWORD)
        client.delete_ledger(alone, password=PASSWORD)
        others = [service_of(running.bookies[place]) for place in range(3) if place != holder]
        wait_until(lambda: all(deleted not in each.replicas.ledgers() for each in others))
    local.empty()
    found = local.rebuild()
    assert found.deleted == (deleted,)
    assert set(found.made) == {kept, alone}
    assert not found.suspects  # with one copy, nothing shows that the others forgot it
    with local.running() as running:
        client = running.connect()
        with pytest.raises(LedgerDeletedError):
            client.open_ledger(deleted, password=PASSWORD)
        check(client, kept)
        here = service_of(running.bookies[holder])
        wait_until(lambda: deleted not in here.replicas.ledgers())


def test_a_deletion_that_no_bookie_remembers_is_named(local: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "STATE_SECONDS", 0.1)
    monkeypatch.setattr(keeper, "COLLECT_SECONDS", 0.1)
    with local.running() as running:
        client = running.connect()
        deleted = write(client)
        running.bookies[2].close()
        client.delete_ledger(deleted, password=PASSWORD)
        others = [service_of(running.bookies[place]) for place in range(2)]
        wait_until(lambda: all(deleted not in each.replicas.ledgers() for each in others))
    local.empty()
    found = local.rebuild(2, lost=True)
    assert found.made == found.suspects == (deleted,)
    assert any("deleted while" in note for note in found.notes)


def test_an_export_is_restored_with_a_new_epoch_and_without_a_look_at_directories(cluster: Cluster) -> None:
    with cluster.running() as running:
        client = running.connect()
        closed = write(client)
        left = client.create_ledger(password=PASSWORD)
        left.append(payload(left.ledger_id, 0))
        copy = cluster.copy()
        left.append(payload(left.ledger_id, 1))
        late = write(client)
    with pytest.raises(UsageError, match="not empty"):
        cluster.restore(copy)
    cluster.empty()
    assert cluster.restore(copy).limbo
    with cluster.running() as running:
        client = running.connect()
        check(client, closed)
        with pytest.raises(LedgerRecoveryError):
            client.open_ledger(left.ledger_id, password=PASSWORD)
        with pytest.raises(NoSuchLedgerError):
            client.open_ledger(late, password=PASSWORD)
        wait_until(lambda: closed not in service_of(running.bookies[0]).in_limbo())
    found = cluster.rebuild()
    assert found.made == (late,)
    with cluster.running() as running:
        client = running.connect()
        assert not service_of(running.bookies[0]).in_limbo()
        check(client, left.ledger_id, 2)
        check(client, late)
        check(client, closed)


def test_a_writer_of_before_is_fenced(local: Cluster) -> None:
    with local.running() as running, ExitStack() as stack:
        client = stack.enter_context(LedgerManager.connect(local.url, cluster_secret=SECRET))
        writer = client.create_ledger(password=PASSWORD)
        writer.append(payload(writer.ledger_id, 0))
        for manager in running.bookies.values():
            manager.close()
        local.rebuild()
        with local.running():
            with pytest.raises(LedgerFencedError):
                writer.append(b"too late")
            check(client, writer.ledger_id, 1)


def test_ensembles_of_an_old_export_are_corrected(local: Cluster) -> None:
    with local.running(4) as running:
        client = running.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=2, write_quorum=2, ack_quorum=2)
        for entry_id in range(10):
            writer.append(payload(writer.ledger_id, entry_id))
        copy = local.copy()
        for member in writer.metadata.fragments[0].ensemble:
            running.bookies[int(member.bookie_id[-1])].close()
        for entry_id in range(10, 20):
            writer.append(payload(writer.ledger_id, entry_id))
        writer.close()
        assert len(client.ledger_metadata(writer.ledger_id).fragments) > 1
    local.empty()
    found = local.restore(copy, directories=[local.bookie(place) for place in range(4)], all_directories=True)
    assert found.corrected == (writer.ledger_id,)
    with local.running(4) as running:
        check(running.connect(), writer.ledger_id, 20)


def test_metadata_are_neither_restored_nor_rebuilt_under_a_bookie_that_runs(cluster: Cluster) -> None:
    with cluster.running() as running:
        copy = cluster.copy()
        write(running.connect())
        seen = restore_metadata(cluster.url, copy, cluster_secret=SECRET, overwrite=True)
        assert any("bookie-0, bookie-1, bookie-2" in note for note in seen.notes)
        for options in ({}, {"new_epoch": False}):
            with pytest.raises(SafetyCheckError, match="must be closed first: bookie-0, bookie-1, bookie-2"):
                cluster.restore(copy, overwrite=True, **options)
        with pytest.raises(SafetyCheckError, match="must be closed first"):
            cluster.restore()
        assert check_metadata(cluster.url, cluster_secret=SECRET).ledgers == 1
        running.bookies.pop(2).close()
        with pytest.raises(SafetyCheckError, match="must be closed first: bookie-0, bookie-1;"):
            cluster.rebuild(2)
    assert cluster.rebuild().written


def test_a_bookie_that_starts_while_directories_are_looked_at_keeps_metadata_from_being_written(
    local: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local.running(3) as running:
        write(running.connect())
    copy = local.copy()
    with local.running(0) as running:
        starts = iter(range(1))

        def checked(path: str) -> None:
            for place in starts:  # after the store was read, and before anything is written
                running.start(place)
            check_export(path)

        monkeypatch.setattr("pybk.operations.metadata_restore.check_export", checked)
        with pytest.raises(SafetyCheckError, match=r"nothing was written to .*must be closed first: bookie-0;"):
            local.restore(copy, overwrite=True)
        assert check_metadata(local.url, cluster_secret=SECRET).ledgers == 1


def test_the_directory_of_a_bookie_that_was_removed_is_refused_before_anything_is_written(local: Cluster) -> None:
    with local.running(4) as running:
        client = running.connect()
        running.bookies.pop(3).close()
        ClusterAdmin(client).remove("bookie-3", accept_loss=())
        write(client)
    copy = local.copy()
    for write_it in (False, True):
        with pytest.raises(CookieError, match=r"bookie-3@\w+, which was removed from the cluster; leave it out"):
            local.rebuild(0, 1, 2, 3, write=write_it)
    with pytest.raises(CookieError, match=r"bookie-3@\w+, which was removed"):
        local.restore(copy, overwrite=True, directories=[local.bookie(3)])
    with local.running():
        assert check_metadata(local.url, cluster_secret=SECRET).ledgers == 1


def test_a_directory_that_takes_the_place_of_another_one_is_named(local: Cluster) -> None:
    with local.running() as running:
        write(running.connect())
    local.bookie(2).rename(local.directory / "before")
    with local.running(0) as running:
        running.start(2, replace=True)
    found = rebuild_metadata(local.url, [local.directory / "before"], cluster_secret=SECRET)
    assert re.search(r"bookie-2@\w+ of .*/before becomes a member instead of bookie-2@\w+", "\n".join(found.notes))
