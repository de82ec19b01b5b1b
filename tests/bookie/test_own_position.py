"""A bookie whose directory was put back to an older state notices, and denies nothing that it may have acknowledged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pybk.bookie import keeper
from pybk.bookie.own_position import PositionRecorder
from pybk.errors import MetadataUnreachableError, PybkError
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.durable_positions import DurablePosition, DurablePositions
from pybk.replication.messages import Status
from tests.client.test_limbo_repair import payload
from tests.cluster.inside import inside
from tests.cluster.processes import BookieProcess, Cluster, running
from tests.internals import cluster_backend_of, service_of
from tests.storage.live_files import copy_below
from tests.waiting import wait_until

PASSWORD = b"correct horse"


def put_back(snapshot: Path, directory: Path) -> None:
    """Put copies of files in the place of what a directory holds; the directory itself stays."""
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(snapshot, directory, dirs_exist_ok=True)


def put_back_in_place(snapshot: Path, directory: Path) -> None:
    """Put older contents into the files of a directory, as a snapshot of its device does: the inodes stay."""
    for path in [path for path in directory.rglob("*") if path.is_file()]:
        if not (snapshot / path.relative_to(directory)).exists():
            path.unlink()
    for path in [path for path in snapshot.rglob("*") if path.is_file()]:
        (directory / path.relative_to(snapshot)).write_bytes(path.read_bytes())


def position_of(client: LedgerManager, name: str) -> DurablePosition | None:
    metadata = cluster_backend_of(client).membership.metadata
    assert isinstance(metadata, ClusterMetadata)
    return metadata.read_position(name)


def append(client: LedgerManager, cluster: Cluster) -> tuple[int, BookieProcess, Path]:
    """Have 30 entries acknowledged by two of three bookies; return the ledger, one of them and its copy at 10."""
    names = sorted(cluster.bookies)
    writer = client.create_ledger(password=PASSWORD, ensemble_size=3, write_quorum=3, ack_quorum=2)
    for number in range(10):
        writer.append(payload(number))
    older, away = cluster.bookies[names[1]], cluster.bookies[names[2]]
    snapshot = cluster.directory / "snapshot"
    copy_below(older.directory, snapshot)
    before = position_of(client, older.name)
    away.kill()
    for number in range(10, 30):
        writer.append(payload(number))
    assert before is not None
    wait_until(lambda: (found := position_of(client, older.name)) is not None and found.lsn >= before.lsn + 20)
    return writer.ledger_id, older, snapshot


def opened(client: LedgerManager, ledger_id: int) -> LedgerReader | None:
    """Open a ledger with recovery, if that is possible now."""
    try:
        return client.open_ledger(ledger_id, password=PASSWORD)
    except PybkError:
        return None


@pytest.mark.long
def test_a_ledger_is_not_closed_short_by_a_bookie_that_was_put_back(tmp_path: Path) -> None:
    with running(tmp_path, 3) as cluster:
        ledger_id, older, snapshot = append(cluster.connect(), cluster)
        first, away = (cluster.bookies[name] for name in ("bookie-0", "bookie-2"))
        for bookie in (older, first):
            bookie.kill()
        put_back_in_place(snapshot, older.directory)
        older.start()
        away.start()
        client = cluster.connect()
        with pytest.raises(PybkError):
            client.open_ledger(ledger_id, password=PASSWORD)
        assert "was put back to an older state" in older.child.complaint()
        first.start()
        reader = wait_until(lambda: opened(client, ledger_id))
        assert reader is not None
        with reader:
            assert [entry.payload for entry in reader.read(0, 29)] == [payload(number) for number in range(30)]


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "younger-than-the-last-record"])
def test_a_log_that_ends_before_its_recorded_position_is_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """Without a record that is younger than the older state, nothing shows that it was put back: that is the window."""
    with inside(tmp_path, count=1) as cluster:
        if not recorded:
            monkeypatch.setattr(PositionRecorder, "record", lambda _: None)
        bookie = cluster.bookies[0]
        directory, snapshot = tmp_path / "bookie-0", tmp_path / "snapshot"
        writer = bookie.create_ledger(password=PASSWORD, ensemble_size=1)
        writer.append(b"before")
        copy_below(directory, snapshot)
        writer.append(b"after")
        bookie.close()
        put_back_in_place(snapshot, directory)
        again = service_of(cluster.open_bookie(0))
        assert again.replicas.in_limbo() == ([writer.ledger_id] if recorded else [])
        status, _ = again.replicas.read(writer.ledger_id, 1, 1, 1, 100)
        assert status is (Status.UNKNOWN if recorded else Status.NO_SUCH_ENTRY)


@pytest.mark.parametrize("moved", [False, True])
def test_a_copy_that_was_put_back_is_known_by_its_files(tmp_path: Path, moved: bool) -> None:
    """The copy lacks nothing, which the bookie cannot know; an operator who moved it without loss says so."""
    with inside(tmp_path, count=1) as cluster:
        bookie = cluster.bookies[0]
        writer = bookie.create_ledger(password=PASSWORD, ensemble_size=1)
        writer.append(b"entry")
        bookie.close()
        directory = tmp_path / "bookie-0"
        shutil.copytree(directory, tmp_path / "snapshot")
        put_back(tmp_path / "snapshot", directory)
        again = service_of(cluster.open_bookie(0, moved=moved))
        assert again.replicas.in_limbo() == ([] if moved else [writer.ledger_id])


def test_an_unreachable_metadata_store_delays_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "POSITION_SECONDS", 3600.0)  # so that the test alone records it
    with inside(tmp_path, count=1) as cluster:
        manager = cluster.bookies[0]
        recorder = service_of(manager).keeper.position
        recorder.record()
        before = position_of(manager, "bookie-0")
        manager.create_ledger(password=PASSWORD, ensemble_size=1).append(b"entry")
        with monkeypatch.context() as patch:
            patch.setattr(DurablePositions, "record_position", unreachable)
            recorder.record()
        assert "durable position was not recorded" in caplog.text
        recorder.record()
        after = position_of(manager, "bookie-0")
        assert before is not None
        assert after is not None
        assert after.lsn > before.lsn


def unreachable(*_: object) -> bool:
    raise MetadataUnreachableError("the metadata store does not answer")
