"""``spark.readStream.format("pybk")`` in a real Spark: every entry once over restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from tests.cluster.inside import Inside, inside
from tests.spark.queries import LATE, run_to_end
from tests.spark.secret_files import cluster_options, secret_file
from tests.storage.real_store import open_quick
from tests.waiting import PROCESS_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.sampled(one_in=6, using="spark")

PASSWORD = b"a password to be kept"


class Pipe:
    """A query from ledgers to files, which may be begun again.

    Attributes:
        written: How many entries were appended, by ledger.
    """

    def __init__(self, spark: SparkSession, directory: Path, options: dict[str, str]) -> None:
        self._spark = spark
        self._out, self._checkpoint = str(directory / "out"), str(directory / "checkpoint")
        self._options = {"passwordFile": secret_file(directory, PASSWORD), "ledgerType": "t", **options}
        self.written: dict[int, int] = {}

    def append(self, writer: LedgerWriter, count: int) -> None:
        """Append entries."""
        writer.append_many([b"%d" % number for number in range(count)])
        self.written[writer.ledger_id] = self.written.get(writer.ledger_id, 0) + count

    def start(self, **trigger: Any) -> StreamingQuery:
        """Begin the query, or resume it."""
        stream = self._spark.readStream.format("pybk").options(**self._options).load()
        frame = stream.selectExpr("ledger_id", "entry_id", "CAST(payload AS STRING) AS text")
        writer = frame.writeStream.format("json").option("checkpointLocation", self._checkpoint)
        return writer.trigger(**trigger).start(self._out)

    def run(self) -> StreamingQuery:
        """Let through all entries so far."""
        return run_to_end(lambda: self.start(availableNow=True))

    def rows(self) -> list[tuple[int, int]]:
        """Return what has come through."""
        if not Path(self._out, "_spark_metadata").exists():
            return []
        schema = "ledger_id BIGINT, entry_id BIGINT, text STRING"
        return sorted(
            (row.ledger_id, row.entry_id) for row in self._spark.read.schema(schema).json(self._out).collect()
        )

    def expected(self) -> list[tuple[int, int]]:
        """Return what is to come through."""
        return sorted((ledger_id, entry) for ledger_id, count in self.written.items() for entry in range(count))

    def wait(self, query: StreamingQuery) -> StreamingQuery:
        """Wait until everything has come through, once; return the query, which may be another run of it."""
        deadline = time.monotonic() + PROCESS_S
        while self.rows() != self.expected():
            if LATE in str(query.exception()):
                query = self.start(processingTime="0 seconds")
            assert query.isActive, str(query.exception())
            assert time.monotonic() < deadline, (len(self.rows()), len(self.expected()))
            time.sleep(0.2)
        return query


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with open_quick(tmp_path / "store") as manager:
        yield manager


def create(manager: LedgerManager) -> LedgerWriter:
    return manager.create_ledger(password=PASSWORD, ledger_type="t")


@pytest.mark.long
def test_every_entry_once_over_restarts(spark: SparkSession, manager: LedgerManager, tmp_path: Path) -> None:
    """Three ledgers written by turns, one that appears and one that goes; two triggers, a limit, four runs."""
    pipe = Pipe(spark, tmp_path, {"path": str(tmp_path / "store"), "maxEntriesPerTrigger": "150"})
    writers = [create(manager) for _ in range(3)]
    for writer in (*writers, *writers):
        pipe.append(writer, 50)
    query = pipe.run()
    assert pipe.rows() == pipe.expected()
    assert [progress["numInputRows"] for progress in query.recentProgress] == [150, 150]
    for _ in range(2):
        query = pipe.start(processingTime="0 seconds")
        pipe.append(writers[0], 20)
        pipe.append(create(manager), 10)
        pipe.wait(query).stop()
        pipe.append(writers[1], 30)
    writers[2].close()
    pipe.run()
    assert pipe.rows() == pipe.expected()
    manager.delete_ledger(writers[2].ledger_id)
    pipe.run()


def test_a_lost_ledger_ends_the_query(spark: SparkSession, manager: LedgerManager, tmp_path: Path) -> None:
    pipe = Pipe(spark, tmp_path, {"path": str(tmp_path / "store")})
    writer = create(manager)
    create(manager)
    pipe.append(writer, 5)
    pipe.run()
    manager.delete_ledger(writer.ledger_id)
    with pytest.raises(Exception, match=f"(?s)ledger {writer.ledger_id} was deleted.*failOnDataLoss=false"):
        run_to_end(lambda: pipe.start(processingTime="0 seconds"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.sampled(one_in=8, group="processes")
def test_a_cluster_through_and_through(spark: SparkSession, cluster: Inside, tmp_path: Path) -> None:
    """What one query writes to ledgers another one reads, once."""
    where = cluster_options(cluster.url)
    guarded = {**where, "passwordFile": secret_file(tmp_path, PASSWORD)}
    manager = cluster.connect()
    writer = create(manager)
    pipe = Pipe(spark, tmp_path, {**where, "ledgerType": "copied"})
    source = spark.readStream.format("pybk").options(**guarded, ledgerType="t").load()
    copier = source.select("payload").writeStream.format("pybk").option("checkpointLocation", str(tmp_path / "copier"))
    copier = copier.options(**guarded, ledgerType="copied").trigger(availableNow=True)
    for count in (7, 5):
        writer.append_many([b"x"] * count)
        writer.append(b"the last add confirmed is one behind")
        run_to_end(copier.start)
        pipe.run()
    writer.close()
    run_to_end(copier.start)
    pipe.run()
    assert len(pipe.rows()) == len(set(pipe.rows())) == 14
