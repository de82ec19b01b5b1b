"""Tables and views of SQL that are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.spark.connection import Connection, close_connections
from tests.cluster.processes import Cluster, running
from tests.spark import kills
from tests.spark.kills import numbers, place_of, rows
from tests.spark.queries import run_to_end
from tests.spark.secret_files import cluster_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.sampled(one_in=3, using="spark")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("tables"), 1) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def place(cluster: Cluster) -> Connection:
    return place_of(cluster.url)


def test_a_table_that_is_new_is_refused_before_anything_is_written(
    spark: SparkSession, cluster: Cluster, place: Connection
) -> None:
    frame, options = numbers(spark, 10), kills.options_of(cluster.url, ledgerType="tables")
    saved = frame.write.format("pybk").options(**options)
    writes: list[Callable[[], None]] = [
        lambda: saved.saveAsTable("made"),
        lambda: saved.mode("append").saveAsTable("made"),
        lambda: frame.writeTo("made").using("pybk").options(**options).create(),
    ]
    for write in writes:
        with pytest.raises(Exception, match="a table of format pybk cannot be created together with rows"):
            write()
        assert not spark.catalog.tableExists("made")
    assert list(place.manager.list_ledgers("tables")) == []


def test_views_and_tables_that_exist_are_written_to(spark: SparkSession, cluster: Cluster, place: Connection) -> None:
    options = kills.options_of(cluster.url, ledgerType="inserted")
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW written (payload BINARY) USING pybk OPTIONS ({given})")
    spark.sql("INSERT INTO written VALUES (X'61')")
    spark.sql("CREATE TABLE kept (payload BINARY) USING pybk")
    try:
        each = ", ".join(f"{name} = '{value}'" for name, value in options.items())
        spark.sql(f"INSERT INTO kept WITH ({each}) VALUES (X'62')")
        frame = numbers(spark, 1).selectExpr("CAST(value AS BINARY) AS payload")
        frame.writeTo("kept").options(**options).append()
        frame.write.format("pybk").options(**options).mode("append").saveAsTable("kept")
        assert rows(place, "inserted") == [b"0", b"0", b"a", b"b"]
        with pytest.raises(Exception, match="give either path"):
            frame.write.options(**options).insertInto("kept")
    finally:
        spark.sql("DROP TABLE kept")


def test_a_stream_to_a_table_that_is_new_makes_one_without_options(
    spark: SparkSession, cluster: Cluster, place: Connection, tmp_path: Path
) -> None:
    """Spark makes the table before it asks the source for anything; the rows are where the options say."""
    options = kills.options_of(cluster.url, ledgerType="streamed")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0").write_text("a\nb\n")
    lines = spark.readStream.text(str(tmp_path / "in")).selectExpr("CAST(value AS BINARY) AS payload")
    writer = lines.writeStream.format("pybk").options(**options).trigger(availableNow=True)
    try:
        run_to_end(lambda: writer.option("checkpointLocation", str(tmp_path / "state")).toTable("streamed"))
        assert rows(place, "streamed") == [b"a", b"b"]
        with pytest.raises(Exception, match=r"no options, so give them with each use: SELECT ... FROM t WITH"):
            spark.sql("SELECT * FROM streamed").collect()
        given = {**cluster_options(cluster.url), "ledgerType": "streamed"}
        each = ", ".join(f"{name} = '{value}'" for name, value in given.items())
        found = spark.sql(f"SELECT payload FROM streamed WITH ({each})").collect()
        assert sorted(bytes(row.payload) for row in found) == [b"a", b"b"]
    finally:
        spark.sql("DROP TABLE IF EXISTS streamed")


def test_a_view_with_the_columns_of_a_read_is_refused_by_spark(spark: SparkSession, cluster: Cluster) -> None:
    options = {**cluster_options(cluster.url), "ledgers": "0-9"}
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW read USING pybk OPTIONS ({given})")
    with pytest.raises(Exception, match="INSERT_COLUMN_ARITY_MISMATCH"):
        spark.sql("INSERT INTO read VALUES (X'61')")
