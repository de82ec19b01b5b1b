"""Processes that share metadata, ledgers and logs: what they did has an order, and broken code is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.inside import Inside, inside
from tests.linearizability.campaign import (
    NotLinearizableError,
    Tally,
    compare_and_set,
    promotions,
    recoveries,
)
from tests.zookeeper_server import ZooKeeperServer, missing, zookeeper_server

__all__ = ["zookeeper_server"]

REJECTED_IN = 10
"""Histories in which a mutant is noticed; each is noticed in nearly every one."""


@pytest.fixture(params=["lmdb", pytest.param("zookeeper", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a metadata store of each kind."""
    if request.param == "lmdb":
        return f"lmdb://{tmp_path}/metadata"
    return zookeeper_url(request)


def zookeeper_url(request: pytest.FixtureRequest) -> str:
    """Return the URL of a metadata store on ZooKeeper, where that can be had."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    server: ZooKeeperServer = request.getfixturevalue("zookeeper_server")
    return server.url()


@pytest.fixture
def cluster(url: str, tmp_path: Path) -> Iterator[Inside]:
    """A cluster whose clients are processes of their own."""
    with inside(tmp_path / "cluster", url=url, scheme="ipc") as made:
        yield made


def assert_checked(tally: Tally, operations: int) -> None:
    """Assert that enough was done for the check to mean something."""
    assert tally.operations >= operations, tally


@pytest.mark.sampled(one_in=2, group="histories")
def test_compare_and_set_is_linearizable(url: str, tmp_path: Path) -> None:
    assert_checked(compare_and_set(url, tmp_path / "histories", "7"), 200)


@pytest.mark.sampled(one_in=2, group="histories")
def test_recoveries_of_a_ledger_agree_on_its_end_and_keep_what_was_acknowledged(
    cluster: Inside, tmp_path: Path
) -> None:
    assert_checked(recoveries(cluster.url, tmp_path / "histories", "7"), 50)


@pytest.mark.sampled(one_in=2, group="histories")
def test_standbys_of_a_cluster_see_all_records_and_append_only_while_they_own_the_log(
    cluster: Inside, tmp_path: Path
) -> None:
    assert_checked(promotions(cluster.url, tmp_path / "histories", "7"), 30)


@pytest.mark.sampled(one_in=2, group="histories")
def test_standbys_of_a_store_see_all_records_and_append_only_while_they_own_the_log(tmp_path: Path) -> None:
    assert_checked(promotions(str(tmp_path / "store"), tmp_path / "histories", "7", count=2), 15)


def is_rejected(run: Callable[[str], Tally]) -> bool:
    """Return whether one of some histories is rejected."""
    for seed in range(REJECTED_IN):
        try:
            run(str(seed))
        except NotLinearizableError:
            return True
    return False


@pytest.mark.sampled(one_in=3, group="rejected histories")
def test_a_compare_and_set_that_ignores_the_version_is_rejected(url: str, tmp_path: Path) -> None:
    mutant = "lmdb-cas" if url.startswith("lmdb") else "zookeeper-cas"
    assert is_rejected(lambda seed: compare_and_set(url, tmp_path / seed, seed, mutant=mutant))


@pytest.mark.sampled(one_in=3, group="rejected histories")
@pytest.mark.parametrize("mutant", ["no-fence", "no-reading"])
def test_a_wrong_recovery_is_rejected(cluster: Inside, tmp_path: Path, mutant: str) -> None:
    assert is_rejected(lambda seed: recoveries(cluster.url, tmp_path / seed, seed, mutant=mutant))


@pytest.mark.long
@pytest.mark.parametrize("mutant", ["no-fence", "no-reading"])
def test_a_promotion_without_a_right_recovery_is_rejected(cluster: Inside, tmp_path: Path, mutant: str) -> None:
    assert is_rejected(lambda seed: promotions(cluster.url, tmp_path / seed, seed, mutant=mutant))
