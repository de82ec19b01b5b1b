"""Catalogs of streams of logs: a look reads the records of the logs that have changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.errors import MetadataUnreachableError
from pybk.manager.ledger_reader import LedgerReader
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark.connection import close_connections
from pybk.spark.log_source.log_catalog import LogCatalog
from pybk.spark.log_source.log_options import log_options
from tests.cluster.inside import Inside, inside
from tests.sampling import mostly
from tests.spark.log_source.logs import Logs, password_file
from tests.spark.secret_files import cluster_options
from tests.waiting import wait_until


@pytest.fixture(params=mostly("lmdb", "zookeeper", among="cluster"))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Inside]:
    url = "" if request.param == "lmdb" else request.getfixturevalue("zookeeper_server").url()
    with inside(tmp_path / "cluster", count=3, url=url) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def logs(cluster: Inside) -> Iterator[Logs]:
    logs = Logs(cluster.connect())
    yield logs
    logs.close()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the records that were read."""
    found: list[str] = []
    pointer = ClusterMetadata.read_pointer

    def read_pointer(metadata: ClusterMetadata, group: str, name: str) -> Any:
        found.append(name)
        return pointer(metadata, group, name)

    monkeypatch.setattr(ClusterMetadata, "read_pointer", read_pointer)
    return found


def catalog_of(cluster: Inside, tmp_path: Path, **which: str) -> LogCatalog:
    given = {**cluster_options(cluster.url, tmp_path), "passwordFile": password_file(tmp_path), **which}
    return LogCatalog(log_options(given, streaming=True), follow=True)


def ends(catalog: LogCatalog) -> dict[str, int]:
    return {name: state.end_seq for name, state in catalog.look(now=False).items()}


def shows(catalog: LogCatalog, **expected: int) -> Callable[[], bool]:
    return lambda: ends(catalog) == expected


def test_what_is_appended_and_rolled_is_seen(cluster: Inside, logs: Logs, read: list[str], tmp_path: Path) -> None:
    logs.append("orders", [b"x"] * 3)
    logs.append("returns", [b"x"])
    catalog = catalog_of(cluster, tmp_path, subscribe="orders,returns,later", allowMissing="true")
    wait_until(shows(catalog, orders=3, returns=1))
    read.clear()
    logs.append("orders", [b"x"] * 2)
    wait_until(shows(catalog, orders=5, returns=1))
    assert not {*read}.intersection({"orders", "returns"}), "the end of an open ledger moves without its log's record"
    logs.roll("orders")
    logs.append("orders", [b"x"])
    wait_until(shows(catalog, orders=6, returns=1))
    assert "returns" not in read
    logs.append("later", [b"x"])
    wait_until(shows(catalog, orders=6, returns=1, later=1))
    logs.delete("returns")
    wait_until(shows(catalog, orders=6, later=1))
    catalog.close()


def test_a_pattern_is_compared_with_names_that_are_new(
    cluster: Inside, logs: Logs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logs.append("a one", [b"x"])
    logs.append("b one", [b"x"])
    catalog = catalog_of(cluster, tmp_path, subscribePattern="a .*")
    assert catalog.look().keys() == {"a one"}
    lists = 0
    names = ClusterMetadata.pointer_names

    def counted(metadata: ClusterMetadata, group: str) -> list[str]:
        nonlocal lists
        lists += group == "logs"
        return names(metadata, group)

    monkeypatch.setattr(ClusterMetadata, "pointer_names", counted)
    logs.append("a two", [b"x"])
    logs.append("b two", [b"x"])
    wait_until(lambda: catalog.look(now=False).keys() == {"a one", "a two"})
    logs.delete("a one")
    wait_until(lambda: catalog.look(now=False).keys() == {"a two"})
    assert lists == 0
    catalog.close()


def test_a_look_that_fails_is_made_up_for(
    cluster: Inside, logs: Logs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logs.append("orders", [b"x"])
    catalog = catalog_of(cluster, tmp_path, subscribe="orders,returns", allowMissing="true")
    assert catalog.look().keys() == {"orders"}
    logs.append("returns", [b"x"])
    seen: list[str] = []

    def unreachable(_: ClusterMetadata, __: str, name: str) -> Any:
        seen.append(name)
        raise MetadataUnreachableError("gone for a moment")

    def fails() -> bool:
        try:
            catalog.look(now=False)
        except MetadataUnreachableError:
            return True
        return False

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "read_pointer", unreachable)
        wait_until(fails)
    assert ends(catalog) == {"orders": 1, "returns": 1}
    catalog.close()


def test_a_look_reads_the_ends_that_have_moved(
    cluster: Inside, logs: Logs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [f"log {number}" for number in range(6)]
    for name in names:
        logs.append(name, [b"x"])
    catalog = catalog_of(cluster, tmp_path, subscribe=",".join(names))
    wait_until(lambda: ends(catalog) == dict.fromkeys(names, 1))
    read: list[int] = []
    last = LedgerReader.read_last_add_confirmed

    def counted(reader: LedgerReader) -> int:
        read.append(reader.ledger_id)
        return last(reader)

    monkeypatch.setattr(LedgerReader, "read_last_add_confirmed", counted)

    def rests() -> bool:
        read.clear()
        return ends(catalog) == dict.fromkeys(names, 1) and not read

    wait_until(rests)
    logs.append(names[2], [b"x"])
    open_id = logs.segments(names[2])[-1][1]
    wait_until(lambda: ends(catalog) == {**dict.fromkeys(names, 1), names[2]: 2})
    assert {*read} == {open_id}
    catalog.close()
