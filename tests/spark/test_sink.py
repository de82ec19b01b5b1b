"""The sink in a real Spark: what is refused, what is written, and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pybk.credentials import Secret
from pybk.spark.connection import Connection, Where, close_connections, connection
from pybk.spark.manifest import SINK_KEY, Sink
from tests.cluster.inside import SECRET
from tests.cluster.processes import Cluster, running
from tests.realstore import contents

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("sink"), 1) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def place(cluster: Cluster) -> Connection:
    return connection(Where(metadata_uri=cluster.url, secret=Secret(SECRET)))


def options(cluster: Cluster, **more: Any) -> dict[str, Any]:
    return {"metadataUri": cluster.url, "clusterSecret": SECRET.decode(), "ensembleSize": "1", **more}


def counting(place: Connection, ledger_type: str) -> list[int]:
    """Return the ledgers of a type that count."""
    found: list[int] = []
    assert place.metadata is not None
    for ledger_id in place.manager.list_ledgers(ledger_type):
        app = place.manager.ledger_metadata(ledger_id).custom_metadata[SINK_KEY].decode()
        if ledger_id in Sink(place.manager, place.metadata, app).committed():
            found.append(ledger_id)
    return found


def rows(place: Connection, ledger_type: str) -> list[bytes]:
    """Return all that was committed to ledgers of a type, in the order of ledgers."""
    return [entry for ledger_id in counting(place, ledger_type) for entry in contents(place.manager, ledger_id)]


def numbers(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    return spark.range(0, count, 1, partitions).selectExpr("CAST(id AS STRING) AS value")


def expected(count: int) -> list[bytes]:
    return sorted(b"%d" % number for number in range(count))


def test_rows_become_entries(spark: SparkSession, cluster: Cluster, place: Connection) -> None:
    numbers(spark, 25_000).write.format("pybk").mode("append").options(**options(cluster, ledgerType="batch")).save()
    assert sorted(rows(place, "batch")) == expected(25_000)
    assert len(counting(place, "batch")) == 2


def test_a_stream_is_written_once(spark: SparkSession, cluster: Cluster, place: Connection, tmp_path: Path) -> None:
    numbers(spark, 1000).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    writer = stream.writeStream.format("pybk").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.options(**options(cluster, ledgerType="stream")).trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    assert sorted(rows(place, "stream")) == expected(1000)
