"""The job that merges segments of logs: the same records in fewer ledgers, while they are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import NoSuchLogError, UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.spark.connection import close_connections
from pybk.spark.jobs import compact as compacting
from pybk.spark.jobs.compact import compact
from pybk.streams.log import Log
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import cluster_backend_of
from tests.spark.jobs.test_commands import Commands

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.sampled(one_in=6, using="spark")

PASSWORD = b"the password of most ledgers here"
EACH = 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster
        close_connections()


def small_segments(manager: LedgerManager, name: str, count: int, password: bytes = PASSWORD) -> Log:
    """Return a log with some closed segments of a few records."""
    log = Log.open(manager, name, password=password)
    for number in range(count):
        with log.writer() as writer:
            writer.append_many([b"%d of %d" % (each, number) for each in range(EACH)])
    return log


def data_of(log: Log) -> list[tuple[int, bytes]]:
    with log.reader() as reader:
        return [(record.seq, record.data) for record in reader]


def run(spark: SparkSession, cluster: Inside, *logs: str, **more: Any) -> dict[str, compacting.CompactedLog]:
    found = compact(spark, cluster.url, logs or None, cluster_secret=SECRET, password=PASSWORD, quiet=True, **more)
    return {each.log: each for each in found}


def test_segments_are_merged_by_executors(spark: SparkSession, cluster: Inside) -> None:
    manager = cluster.connect()
    log, other = small_segments(manager, "orders", 9), small_segments(manager, "sealed", 2)
    with other.writer() as writer:
        writer.seal()
    before, old = data_of(log), [each.ledger_id for each in log.segments()]
    with log.reader() as reader:
        assert len(reader.read_many(1)) == 1
        found = run(spark, cluster, segment_records=3 * EACH)
        assert found.keys() == {"orders"}, "one that is sealed is left out"
        assert (found["orders"].replaced, found["orders"].ledgers, found["orders"].failed) == (9, 3, ())
        assert (found["orders"].records, found["orders"].segments) == (9 * EACH, len(log.segments()))
        assert len([*reader]) == 9 * EACH - 1, "a reader under way continues"
    assert data_of(log) == before
    assert not {each.ledger_id for each in log.segments()}.intersection(old[:9])
    assert manager.ledger_metadata(old[4]).ledger_id == old[4], "the old ledgers are kept for a time"
    with log.writer() as writer:
        writer.append(b"one more")
    assert len(data_of(log)) == 9 * EACH + 1
    log.close()
    other.close()


def test_a_copy_that_fails_leaves_its_segments_as_they_were(
    spark: SparkSession, cluster: Inside, tmp_path: Path
) -> None:
    """The other copies count. A log that cannot be merged is reported, and does not stop those after it."""
    manager = cluster.connect()
    log, foreign = small_segments(manager, "damaged", 6), small_segments(manager, "foreign", 2, b"another password")
    last = small_segments(manager, "last", 2)
    manager.delete_ledger(log.segments()[1].ledger_id, password=PASSWORD)
    found = run(spark, cluster, segment_records=3 * EACH)
    assert (found["damaged"].replaced, found["damaged"].ledgers) == (3, 1)
    [reason] = found["damaged"].failed
    assert f"records 0 to {3 * EACH - 1} of log 'damaged'" in reason
    [reason] = found["foreign"].failed
    assert "password" in reason
    assert (found["foreign"].ledgers, found["last"].ledgers) == (0, 1)
    for each in (log, foreign, last):
        each.close()


def test_a_log_whose_record_is_damaged_is_reported(spark: SparkSession, cluster: Inside) -> None:
    """The others are compacted."""
    manager = cluster.connect()
    small_segments(manager, "sound", 2).close()
    metadata = cluster_backend_of(manager).membership.metadata
    version = metadata.write_pointer("logs", "a record", b"damaged", None)
    for names in ((), ("a record", "sound")):
        found = run(spark, cluster, *names)
        [reason] = found["a record"].failed
        assert "a record" in reason
        assert found["sound"].ledgers == (0 if names else 1)
    metadata.delete_pointer("logs", "a record", version)


def test_what_cannot_be_compacted_is_refused(spark: SparkSession, cluster: Inside, tmp_path: Path) -> None:
    small_segments(cluster.connect(), "there", 2).close()
    with pytest.raises(NoSuchLogError, match="nowhere"):
        run(spark, cluster, "there", "nowhere")
    with pytest.raises(UsageError, match="pybk log merge"):
        compact(spark, str(tmp_path))
    with pytest.raises(UsageError, match="keep_s is -1"):
        compact(spark, cluster.url, keep_s=-1)
    assert run(spark, cluster, "there")["there"].ledgers == 1
    assert run(spark, cluster, "there")["there"].ledgers == 0


def test_the_command(spark: SparkSession, cluster: Inside, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spark.getActiveSession() is not None
    commands = Commands(tmp_path, capsys)
    log = small_segments(cluster.connect(), "orders", 4)
    status, told = commands.json("compact", cluster.url, "--log", "orders", "--segment-records", f"{2 * EACH}")
    assert (status, [each["ledgers"] for each in told["logs"]]) == (0, [2])
    status, out, _ = commands.run("compact", cluster.url, "--keep", "0s")
    assert (status, "orders" in out) == (0, True)
    status, out, _ = commands.run("compact", cluster.url, "--log", "none")
    assert status == 2
    assert len(data_of(log)) == 4 * EACH
    log.close()
