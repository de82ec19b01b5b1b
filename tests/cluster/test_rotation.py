"""The secret of a cluster is replaced while writers and readers are at work; then the old one opens nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pybk.credentials import Secret
from pybk.errors import IllegalOperationError, MetadataForgedError, PybkError, SafetyCheckError, UsageError
from pybk.feature_level import FeatureLevel
from pybk.manager.connect import open_cluster
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.operations.metadata_repair import check_metadata, export_metadata, restore_metadata
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import ClusterKeys
from pybk.transport.codec import Ping
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import cluster_backend_of
from tests.storage.real_store import contents
from tests.waiting import WAIT_S, wait_until
from tests.zookeeper_server import missing, zookeeper_server

__all__ = ["zookeeper_server"]

PASSWORD = b"a password of some length"
NEXT = b"the secret that a cluster gets --"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybk.bookie.keeper.STATE_SECONDS", 0.2)
    monkeypatch.setattr("pybk.bookie.keeper.POSITION_SECONDS", 0.1)
    monkeypatch.setattr("pybk.transport.server.OLD_SILENCE_NS", 10**9)
    monkeypatch.setattr("pybk.metadata.authenticated_values.SECRETS_AGE_SECONDS", 0.5)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


@contextmanager
def running(directory: Path, file: Path, url: str = "") -> Iterator[Inside]:
    with inside(directory, count=0, url=url) as cluster:
        cluster.given = Secret(file=str(file))
        cluster.bookies = [cluster.open_bookie(place) for place in range(3)]
        yield cluster


@pytest.fixture
def cluster(tmp_path: Path, file: Path, quick: None) -> Iterator[Inside]:
    with running(tmp_path / "cluster", file) as cluster:
        yield cluster


@pytest.fixture(params=["lmdb", pytest.param("zookeeper", marks=pytest.mark.long)])
def on_each_store(request: pytest.FixtureRequest, tmp_path: Path, file: Path, quick: None) -> Iterator[Inside]:
    if request.param == "zookeeper" and missing() is not None:
        pytest.skip(missing() or "")
    url = "" if request.param == "lmdb" else request.getfixturevalue("zookeeper_server").url()
    with running(tmp_path / "cluster", file, url) as cluster:
        yield cluster


class Load:
    """Appends and reads without a pause, until it is stopped; the first error ends it."""

    def __init__(self, cluster: Inside) -> None:
        self.manager, self.reading = cluster.connect(), cluster.connect()
        self.writer = self.manager.create_ledger(password=PASSWORD)
        self.count = 0
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,)) for each in (self._append, self._read)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, each: object) -> None:
        assert callable(each)
        try:
            while not self._stop.is_set():
                each()
        except BaseException as error:  # noqa: BLE001  # it is looked at in the end
            self.errors.append(error)

    def _append(self) -> None:
        assert self.writer.append(b"entry %d" % self.count) == self.count
        self.count += 1

    def _read(self) -> None:
        with self.reading.open_ledger(self.writer.ledger_id, password=PASSWORD, recover=False) as reader:
            last = reader.last_add_confirmed
            if last >= 0:
                assert [entry.payload for entry in reader.read(last, last)] == [b"entry %d" % last]

    def goes_on(self) -> None:
        """Wait until more was appended than now."""
        before = self.count
        wait_until(lambda: self.count > before + 20 or self.errors)
        assert not self.errors


def connects(url: str, secret: bytes) -> bool:
    try:
        LedgerManager.connect(url, cluster_secret=secret).close()
    except MetadataForgedError:
        return False
    return True


def test_a_secret_is_replaced_under_load_and_the_old_one_is_refused(
    on_each_store: Inside, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = on_each_store
    caplog.set_level(logging.DEBUG)
    with cluster.connect().create_ledger(password=PASSWORD) as closed:
        closed.append(b"made before")
    following = file.with_name("secret.next")
    with Load(cluster) as load:
        load.goes_on()
        following.write_bytes(NEXT)
        admin = ClusterAdmin(cluster.connect())
        admin.add_secret()
        wait_until(lambda: not admin.secret_status().lacking)
        assert not connects(cluster.url, NEXT), "it is not in use yet"
        with pytest.raises((SafetyCheckError, IllegalOperationError)):
            admin.retire_secret()
        load.goes_on()
        admin.switch_secret()
        load.goes_on()
        assert not connects(cluster.url, SECRET)
        assert connects(cluster.url, NEXT)
        with pytest.raises(SafetyCheckError, match="reseal"):
            admin.retire_secret()
        assert admin.reseal_metadata(values_per_second=10_000.0) > 5
        # A bookie that has not heard of the switch yet may write a value with the secret of before.
        wait_until(lambda: admin.reseal_metadata() == 0)
        load.goes_on()
        export_metadata(cluster.url, tmp_path / "export", cluster_secret=(SECRET, NEXT))
        wait_until(lambda: not admin.secret_status().hindrances)
        admin.retire_secret()
        following.replace(file)
        load.goes_on()
    assert not load.errors
    load.writer.close()
    with pytest.raises(MetadataForgedError, match="retired"):
        LedgerManager.connect(cluster.url, cluster_secret=SECRET)
    assert len(contents(cluster.connect(), load.writer.ledger_id, PASSWORD)) == load.count
    assert contents(cluster.connect(), closed.ledger_id, PASSWORD) == [b"made before"]
    metadata = cluster_backend_of(cluster.bookies[0]).membership.metadata
    check_that_a_bookie_refuses(metadata, SECRET)
    assert check_metadata(cluster.url, cluster_secret=NEXT).problems == ()
    assert check_metadata(tmp_path / "export", cluster_secret=(SECRET, NEXT)).problems == ()
    restored = f"lmdb://{tmp_path}/restored"
    restore_metadata(restored, tmp_path / "export", cluster_secret=NEXT, new_epoch=True, write=True)
    assert check_metadata(restored, cluster_secret=NEXT).problems == ()
    for text in (record.getMessage().encode() for record in caplog.records):
        assert not [form for each in (SECRET, NEXT) for form in (each, each.hex().encode()) if form in text]


def check_that_a_bookie_refuses(metadata: ClusterMetadata, secret: bytes) -> None:
    """Check that nobody with this secret alone gets a session with a bookie."""
    keys = ClusterKeys.derive(secret, metadata.cluster_id)
    found = next(each for each in metadata.list_bookies() if each.bookie.bookie_id == "bookie-0")
    with Links(keys) as links:
        link = links.connect(found.bookie, found.addresses[0], found.public_key)
        link.send(1, Ping(), int(WAIT_S * 1e9))
        got: list[object] = []

        def ended() -> bool:
            got.extend(reply for _, _, reply in links.poll(100))
            return bool(got)

        wait_until(ended)
        assert got == [None]
        assert "refused this client's key" in link.why_down


def test_ledgers_from_before_are_recovered_and_new_values_of_the_old_secret_are_refused(
    cluster: Inside, file: Path
) -> None:
    """A description keeps the MAC of its time, and is compared without it; a value never does."""
    writer = cluster.connect().create_ledger(password=PASSWORD)
    writer.append(b"first")
    old, _ = open_cluster(cluster.url, SECRET, create=False)
    file.with_name("secret.next").write_bytes(NEXT)
    admin = ClusterAdmin(cluster.connect())
    admin.add_secret()
    wait_until(lambda: not admin.secret_status().lacking)
    admin.switch_secret()
    admin.reseal_metadata()
    old.close()
    wait_until(lambda: not admin.secret_status().hindrances)
    admin.retire_secret()
    assert contents(cluster.connect(), writer.ledger_id, PASSWORD, recover=True) == [b"first"]


def test_steps_are_refused_out_of_turn(tmp_path: Path, quick: None) -> None:
    with inside(tmp_path, count=1) as cluster:  # its bookie has the first secret only
        with pytest.raises(UsageError, match="give the cluster's secret and the new one"):
            ClusterAdmin(cluster.connect()).add_secret()
        cluster.given = (SECRET, NEXT)
        admin = ClusterAdmin(cluster.connect())
        with pytest.raises(IllegalOperationError, match="add another one first"):
            admin.switch_secret()
        with pytest.raises(IllegalOperationError, match="none before it"):
            admin.retire_secret()
        admin.add_secret()
        admin.add_secret()
        with pytest.raises(SafetyCheckError, match="bookie-0 does not have secret 1"):
            admin.switch_secret()
        assert admin.secret_status().current == 0
        cluster.given = (SECRET, b"a third secret of the cluster ---")
        with pytest.raises(IllegalOperationError, match="two secrets already"):
            ClusterAdmin(cluster.connect()).add_secret()
    with inside(tmp_path / "older", count=0, level=FeatureLevel.SEALS) as older:
        older.given = (SECRET, NEXT)
        with pytest.raises(IllegalOperationError, match="feature level is 1"):
            ClusterAdmin(older.connect()).add_secret()
    with inside(tmp_path / "open", count=0, secret=None) as without, pytest.raises(PybkError, match="no secret"):
        ClusterAdmin(without.connect()).add_secret()
