"""Connections of a process: one per place, made anew after a fork and where a directory was replaced."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.credentials import Secret
from pybk.errors import MetadataError, UsageError
from pybk.spark.connection import StoreOrCluster, close_connections, connection
from tests.cluster.inside import SECRET, Inside, inside
from tests.storage.real_store import contents, open_quick


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_connections()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster
        close_connections()


def filled(path: Path, payload: bytes) -> int:
    """Make a store with one ledger and return its id."""
    with open_quick(path) as manager, manager.create_ledger(insecure=True) as writer:
        writer.append(payload)
        return writer.ledger_id


def test_a_place_is_connected_to_once(tmp_path: Path) -> None:
    filled(tmp_path / "a", b"a")
    filled(tmp_path / "b", b"b")
    first = connection(StoreOrCluster(path=str(tmp_path / "a")))
    assert connection(StoreOrCluster(path=str(tmp_path / "a"))) is first
    assert connection(StoreOrCluster(path=str(tmp_path / "b"))) is not first
    assert first.manager.read_only
    assert first.metadata is None


def test_a_store_that_was_made_again_is_opened_again(tmp_path: Path) -> None:
    where = StoreOrCluster(path=str(tmp_path / "a"))
    old = filled(tmp_path / "a", b"old")
    assert contents(connection(where).manager, old) == [b"old"]
    new = filled(tmp_path / "b", b"new")
    os.rename(tmp_path / "a", tmp_path / "moved")
    os.rename(tmp_path / "b", tmp_path / "a")
    assert contents(connection(where).manager, new) == [b"new"]
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(UsageError, match="no directory"):
        connection(where)


def test_a_forked_child_makes_its_own(tmp_path: Path) -> None:
    where = StoreOrCluster(path=str(tmp_path / "a"))
    ledger_id = filled(tmp_path / "a", b"a")
    first = connection(where)
    child = os.fork()
    if not child:
        fresh = connection(where)
        well = fresh is not first and contents(fresh.manager, ledger_id) == [b"a"]
        os._exit(0 if well else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert connection(where) is first
    assert contents(first.manager, ledger_id) == [b"a"]


def test_a_cluster_needs_its_secret(cluster: Inside) -> None:
    found = connection(StoreOrCluster(metadata_uri=cluster.url, secret=Secret(SECRET)))
    assert found.metadata is not None
    assert len(found.metadata.list_bookies()) == 3
    with pytest.raises(MetadataError, match="secret"):
        connection(StoreOrCluster(metadata_uri=cluster.url, secret=Secret(b"another secret of the same length")))
    with pytest.raises(MetadataError, match="secret"):
        connection(StoreOrCluster(metadata_uri=cluster.url))


def test_the_near_bookie_comes_first(cluster: Inside) -> None:
    where = StoreOrCluster(metadata_uri=cluster.url, secret=Secret(SECRET))
    for name in ("bookie-0", "bookie-2"):
        near = connection(where, near=name)
        assert near is not connection(where)
        for _ in range(8):
            with near.manager.create_ledger(ensemble_size=1, insecure=True) as writer:
                assert writer.append(b"x") == 0
            [fragment] = near.manager.ledger_metadata(writer.ledger_id).fragments
            assert [bookie.bookie_id for bookie in fragment.ensemble] == [name]
    assert connection(where, near="nobody").manager.create_ledger(ensemble_size=1, insecure=True).append(b"x") == 0
