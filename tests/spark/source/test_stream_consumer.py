"""A streaming query that is a consumer: what it has read may go, and it finds all the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.errors import IllegalOperationError
from pybk.spark import consumers
from pybk.spark.connection import close_connections, connection
from pybk.spark.consumers import Selection, read_consumers
from pybk.spark.jobs.retain import retain
from pybk.spark.source.offsets import Offset
from tests.cluster.inside import SECRET, Inside, inside
from tests.spark.source.test_ledger_catalog import commit, fill
from tests.spark.source.test_ledger_changes import Query, metadata_of, options

pytestmark = pytest.mark.usefixtures("process_of_a_driver")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster
        close_connections()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "RECORD_SECONDS", 0.0)


def read_by(cluster: Inside, ledger_ids: list[int]) -> list[int]:
    """Return those of some ledgers that the consumer has finished."""
    [found] = read_consumers(metadata_of(cluster))
    assert (found.name, found.selection) == ("audit", Selection("t", None))
    manager = connection(options(cluster, ledger="0").where).manager
    return [each for each in ledger_ids if not found.needs(manager.ledger_metadata(each))]


def written(cluster: Inside, number: int, count: int = 3) -> list[int]:
    """Commit ledgers in a sink."""
    found = connection(options(cluster, ledger="0").where)
    ids = [fill(found.manager, "t", "app") for _ in range(count)]
    commit(found, "app", number, *ids)
    return ids


def test_the_record_is_never_ahead_of_the_checkpoint(cluster: Inside) -> None:
    first = written(cluster, 0)
    query = Query(options(cluster, ledgerType="t", consumer="audit"))
    assert read_consumers(metadata_of(cluster)) == [], "a query that only begins records nothing"
    end = query.latest()
    assert {*Offset.from_json(end).ended} == {*first}
    assert read_by(cluster, first) == []
    assert len(query.reader.partitions(query.offset, end)) == 1
    assert read_by(cluster, first) == [], "it is planned, and not complete"
    query.read(end)
    assert read_by(cluster, first) == first
    second = written(cluster, 1)
    start = query.offset
    query.batch_of(9)
    assert read_by(cluster, second) == second
    query.offset = start
    query.start()
    query.latest()
    assert read_by(cluster, [*first, *second]) == first, "an older checkpoint was restored"


def test_a_micro_batch_that_is_repeated_is_protected(cluster: Inside) -> None:
    """Spark repeats it before it asks for the next one: of an older checkpoint, or of a query without a consumer."""
    first = written(cluster, 0)
    query = Query(options(cluster, ledgerType="t", consumer="audit"))
    start, end = query.offset, query.latest()
    query.read(end)
    query.batch()
    assert read_by(cluster, first) == first
    query.start()
    assert query.reader.partitions(start, end)
    assert read_by(cluster, first) == []
    assert retain(cluster.url, "t", cluster_secret=SECRET, max_age_s=0) == {}
    query.offset = start
    assert query.read(end) == 9
    assert read_by(cluster, first) == first


def test_a_query_reads_everything_while_retention_deletes_what_it_has_read(cluster: Inside) -> None:
    def expire() -> list[int]:
        deleted = retain(cluster.url, "t", cluster_secret=SECRET, keep_read=False, max_age_s=0)
        return [ledger_id for ids in deleted.values() for ledger_id in ids]

    first = written(cluster, 0)
    query = Query(options(cluster, ledgerType="t", consumer="audit", maxEntriesPerTrigger="4"))
    query.latest()
    assert expire() == []
    for number in range(1, 6):
        query.batch()
        expire()
        written(cluster, number)
        if number % 2:
            query.start()
    while query.batch():
        expire()
    assert len(query.rows) == 18
    assert all(found == [0, 1, 2] for found in query.rows.values())
    assert {*query.rows} >= {*first}
    expire()
    assert list(connection(query.options.where).manager.list_ledgers("t")) == []
    assert query.batch() == 0


def test_a_query_that_ends_records_what_was_put_off(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    first = written(cluster, 0)
    query = Query(options(cluster, ledgerType="t", consumer="audit"))
    monkeypatch.setattr(consumers, "RECORD_SECONDS", 1000.0)
    query.batch()
    assert read_by(cluster, first) == []
    query.reader.stop()
    assert read_by(cluster, first) == first


def test_two_queries_do_not_share_a_consumer(cluster: Inside) -> None:
    written(cluster, 0)
    older, newer = (Query(options(cluster, ledgerType="t", consumer="audit")) for _ in range(2))
    older.latest()
    newer.latest()
    with pytest.raises(IllegalOperationError, match="give each query a consumer of its own"):
        older.batch()
    assert newer.batch() == 9


def test_a_query_without_a_consumer_records_nothing(cluster: Inside) -> None:
    written(cluster, 0)
    query = Query(options(cluster, ledgerType="t"))
    assert query.batch() == 9
    query.reader.stop()
    assert read_consumers(metadata_of(cluster)) == []
