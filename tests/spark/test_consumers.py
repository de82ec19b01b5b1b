"""What streaming queries record of their progress: never more than their checkpoints have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pybk.credentials import Secret
from pybk.errors import (
    CorruptError,
    IllegalOperationError,
    MetadataUnreachableError,
    MetadataVersionError,
    UnsupportedFormatError,
)
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark import consumers
from pybk.spark.connection import StoreOrCluster, close_connections, connection
from pybk.spark.consumers import (
    CONSUMERS,
    Consumer,
    QueryConsumer,
    Selection,
    read_consumers,
    remove_consumer,
)
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.jobs.retain import forget_consumer, list_consumers
from tests.cluster.inside import SECRET, Inside, inside
from tests.metadata.records import ledger

TYPE = Selection("events", None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("consumers"), count=1) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def metadata(cluster: Inside) -> ClusterMetadata:
    found = connection(StoreOrCluster(metadata_uri=cluster.url, secret=Secret(SECRET))).metadata
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "RECORD_SECONDS", 0.0)


def upto(number: int) -> FinishedLedgers:
    return FinishedLedgers(done=((0, number),))


def recorded(metadata: ClusterMetadata, name: str) -> FinishedLedgers | None:
    found = {each.name: each.finished for each in read_consumers(metadata)}
    return found.get(name)


def test_a_query_records_where_it_begins_and_what_is_complete(metadata: ClusterMetadata) -> None:
    query = QueryConsumer(metadata, "one", TYPE)
    assert recorded(metadata, "one") is None
    query.begin(upto(3))
    query.begin(upto(9))
    assert recorded(metadata, "one") == upto(3), "it begins once"
    query.record(upto(4))
    assert recorded(metadata, "one") == upto(4)
    again = QueryConsumer(metadata, "one", TYPE)
    again.begin(upto(2))
    assert recorded(metadata, "one") == upto(2), "an older checkpoint was restored"
    query = QueryConsumer(metadata, "one", TYPE)
    query.record(upto(5))
    assert recorded(metadata, "one") == upto(5), "a commit may come before the first look"


def test_records_are_put_off(metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    query = QueryConsumer(metadata, "late", TYPE)
    monkeypatch.setattr(consumers, "RECORD_SECONDS", 1000.0)
    for number in range(3):
        query.record(upto(number))
    assert recorded(metadata, "late") == upto(0)
    query.close()
    assert recorded(metadata, "late") == upto(2)
    query.close()


def test_of_two_queries_with_one_name_the_older_ends(metadata: ClusterMetadata) -> None:
    older, newer = (QueryConsumer(metadata, "shared", TYPE) for _ in range(2))
    older.begin(upto(1))
    newer.begin(upto(2))
    with pytest.raises(IllegalOperationError, match=r"consumer 'shared' is recorded by run .* a consumer of its own"):
        older.record(upto(5))
    assert recorded(metadata, "shared") == upto(2)
    newer.record(upto(3))
    assert recorded(metadata, "shared") == upto(3)


def test_a_query_takes_no_consumer_that_reads_other_ledgers(metadata: ClusterMetadata) -> None:
    """What that one has not read would be protected no more."""
    QueryConsumer(metadata, "taken", TYPE).begin(upto(3))
    for other, told in (
        (Selection("logs", None), "type 'logs'"),
        (Selection(None, ((3, 5), (9, 9))), "ledgers 3-5,9"),
    ):
        query = QueryConsumer(metadata, "taken", other)
        with pytest.raises(
            IllegalOperationError,
            match=rf"consumer 'taken' reads type 'events', and this query {told}: .* --forget taken",
        ):
            query.begin(upto(0))
        assert recorded(metadata, "taken") == upto(3)
    remove_consumer(metadata, "taken")
    QueryConsumer(metadata, "taken", Selection("logs", None)).begin(upto(0))
    assert recorded(metadata, "taken") == upto(0)


def test_many_consumers_are_read_in_few_requests(metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"many-{number}" for number in range(40)}
    for name in names:
        QueryConsumer(metadata, name, TYPE).begin(upto(3))
    read, asked = ClusterMetadata.read_pointer, list[str]()

    def noted(self: ClusterMetadata, group: str, name: str) -> Any:
        asked.append(name)
        return read(self, group, name)

    monkeypatch.setattr(ClusterMetadata, "read_pointer", noted)
    found = [each.name for each in read_consumers(metadata)]
    assert found == sorted(found)
    assert names <= {*found}
    assert asked == [], "they are listed"
    for name in names:
        remove_consumer(metadata, name)


def test_what_the_store_does_not_take_is_recorded_later(
    metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    query = QueryConsumer(metadata, "lost", TYPE)
    change = ClusterMetadata.write_pointer

    def unreachable(*_: Any) -> int:
        raise MetadataUnreachableError("gone for a moment")

    def unanswered(*arguments: Any) -> int:
        change(*arguments)
        raise MetadataVersionError("another version", outcome_unknown=True)

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "write_pointer", unreachable)
        with pytest.raises(MetadataUnreachableError):
            query.begin(upto(0))
    query.begin(upto(0))
    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "write_pointer", unreachable)
        query.record(upto(1))
        query.close()
    assert recorded(metadata, "lost") == upto(0)
    assert "consumer 'lost' is recorded as of before: gone for a moment" in caplog.text
    query.record(upto(2))
    assert recorded(metadata, "lost") == upto(2)
    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "write_pointer", unanswered)
        query.record(upto(3))
    query.record(upto(4))
    assert recorded(metadata, "lost") == upto(4)


def test_consumers_are_listed_and_forgotten(
    cluster: Inside, metadata: ClusterMetadata, caplog: pytest.LogCaptureFixture
) -> None:
    query = QueryConsumer(metadata, "listed", Selection(None, ((3, 5), (9, 9))))
    query.begin(upto(1))
    [found] = [each for each in list_consumers(cluster.url, cluster_secret=SECRET) if each.name == "listed"]
    assert (found.selection, found.finished) == (Selection(None, ((3, 5), (9, 9))), upto(1))
    forget_consumer(cluster.url, "listed", cluster_secret=SECRET)
    assert recorded(metadata, "listed") is None
    with pytest.raises(IllegalOperationError, match=r"there is no consumer 'liste'; there are "):
        remove_consumer(metadata, "liste")
    caplog.clear()
    query.record(upto(2))
    assert recorded(metadata, "listed") == upto(2), "its query runs yet"
    assert "is recorded as of before" not in caplog.text


def test_a_consumer_that_records_meanwhile_is_removed(
    metadata: ClusterMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, delete = QueryConsumer(metadata, "busy", TYPE), ClusterMetadata.delete_pointer
    query.begin(upto(0))
    more = [upto(1), upto(2)]

    def record_first(*arguments: Any) -> None:
        if more:
            query.record(more.pop(0))
        delete(*arguments)

    monkeypatch.setattr(ClusterMetadata, "delete_pointer", record_first)
    remove_consumer(metadata, "busy")
    assert (more, recorded(metadata, "busy")) == ([], None)


def test_a_record_that_cannot_be_read_is_an_error(metadata: ClusterMetadata) -> None:
    sound = Consumer("sound", TYPE, upto(1), "run", 5).encode()
    assert Consumer.decode("sound", sound) == Consumer("sound", TYPE, upto(1), "run", 5)
    assert sound == (
        b'{"finished":{"before":0,"done":[[0,1]],"left":[],"upto":-1},"format":1,"ids":null,"recorded_ns":5,"run":"run",'
        b'"type":"events"}'
    )
    for wrong, error in (
        (sound[:-1], CorruptError),
        (sound.replace(b'"upto":-1', b'"upto":"x"'), CorruptError),
        (sound.replace(b'"format":1', b'"format":2'), UnsupportedFormatError),
    ):
        metadata.write_pointer(CONSUMERS, "wrong", wrong, None)
        with pytest.raises(error, match="consumer 'wrong'"):
            read_consumers(metadata)
        remove_consumer(metadata, "wrong")


def test_what_a_consumer_needs() -> None:
    by_type = Consumer("c", TYPE, upto(4), "run", 0)
    assert [by_type.needs(ledger(number)) for number in (4, 5)] == [False, True]
    assert not Consumer("c", Selection("other", None), upto(4), "run", 0).needs(ledger(5))
    by_id = Consumer("c", Selection(None, ((5, 6),)), upto(5), "run", 0)
    assert [by_id.needs(ledger(number)) for number in (4, 5, 6, 7)] == [False, False, True, False]
