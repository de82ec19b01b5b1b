"""Reads of ledgers that are merged before, during and after: each entry once, under its number."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pyspark.sql.streaming.datasource import ReadMaxRows

from pybk.client.backend import ClusterBackend
from pybk.errors import CorruptError, NoSuchLedgerError, UsageError
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.ledgers import LEDGERS_KEY
from pybk.metadata.pointers import Pointer
from pybk.spark.connection import Connection, close_connections, connection
from pybk.spark.options import SourceOptions, source_options
from pybk.spark.places import ITSELF, MERGED_KEY
from pybk.spark.sink import manifest
from pybk.spark.sink.manifest import SINK_KEY, SINKS, FollowedSink, Sink, WrittenLedger
from pybk.spark.sink.sink_record import Attempt
from pybk.spark.sink.sink_retention import SinkRetention
from pybk.spark.sink.upkeep import retain_ledgers
from pybk.spark.source.batch_reader import BatchReader
from pybk.spark.source.columns import schema_of
from pybk.spark.source.ledger_catalog import LedgerCatalog
from pybk.spark.source.offsets import Offset, between
from pybk.spark.source.planning import EntryRange
from pybk.spark.source.reading import payload_bytes
from pybk.streams.log_settings import RollPolicy
from tests.cluster.inside import Inside, inside
from tests.internals import metadata_store_of
from tests.sampling import mostly, some
from tests.spark.secret_files import cluster_options
from tests.spark.sink.merging import merge
from tests.spark.source.test_ledger_changes import Query
from tests.waiting import wait_until

pytestmark = [pytest.mark.sampled(one_in=2, using="cluster"), pytest.mark.usefixtures("process_of_a_driver")]


@pytest.fixture(params=mostly("lmdb", "zookeeper", among="cluster"))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Inside]:
    url = "" if request.param == "lmdb" else request.getfixturevalue("zookeeper_server").url()
    with inside(tmp_path / "cluster", count=1, url=url) as cluster:
        yield cluster
        close_connections()


def options(cluster: Inside, *, streaming: bool = True, **which: str) -> SourceOptions:
    given = {**cluster_options(cluster.url, cluster.directory), "ledgerType": "t", **which}
    if {"ledger", "ledgers"} & which.keys():
        del given["ledgerType"]
    return source_options(given, streaming=streaming)


def payload(ledger_id: int, entry_id: int) -> bytes:
    return b"entry %d of ledger %d" % (entry_id, ledger_id)


class Pipeline:
    """A sink that is written and merged.

    Attributes:
        written: The numbers of entries by ledger, in the order of commits.
    """

    def __init__(self, cluster: Inside, app: str = "app") -> None:
        self.cluster = cluster
        self.app = app
        self.written: dict[int, int] = {}
        self._number = 0

    @property
    def place(self) -> Connection:
        """The connection of this process."""
        return connection(options(self.cluster).where)

    @property
    def sink(self) -> Sink:
        """The sink."""
        assert self.place.metadata is not None
        return Sink(self.place.manager, self.place.metadata, self.app, quorums=(1, 1, 1))

    def write(self, entries: int = 3, kind: str = "t") -> WrittenLedger:
        """Write a ledger as a task does."""
        with self.place.manager.create_ledger(
            ledger_type=kind, custom_metadata={SINK_KEY: self.app.encode()}, ensemble_size=1, insecure=True
        ) as writer:
            writer.append_many([payload(writer.ledger_id, each) for each in range(entries)])
        return WrittenLedger(writer.ledger_id, entries, writer.length, writer.metadata.creation_time_ns)

    def commit(self, *written: WrittenLedger) -> list[int]:
        """Commit ledgers."""
        oldest_ns = min(each.created_ns for each in written)
        assert self.sink.commit(Attempt(self._number, oldest_ns), written)
        self._number += 1
        self.written |= {each.ledger_id: each.entries for each in written}
        return [each.ledger_id for each in written]

    def add(self, *entries: int) -> list[int]:
        """Write and commit ledgers."""
        return self.commit(*map(self.write, entries))

    def merge(self, *, release: bool = False, **limits: Any) -> int:
        """Merge ledgers; perhaps delete what merges have replaced."""
        made = merge(self.place, self.sink, keep_s=0.0, policy=RollPolicy(**limits)).ledgers
        if release:
            self.sink.release_replaced(time.time_ns())
        return made

    def expire(self) -> None:
        """Delete all ledgers as a retention does."""
        assert self.place.metadata is not None
        found = retain_ledgers(self.place.metadata, [self.sink], SinkRetention(max_bytes=0))
        assert sorted(found[self.app]) == sorted(self.written)

    @property
    def holders(self) -> set[int]:
        """The merged ledgers."""
        return {row.holder for row in self.sink.rows()} - {ITSELF}

    def expected(self) -> dict[int, list[int]]:
        """Return the entries by ledger."""
        return {ledger_id: [*range(count)] for ledger_id, count in sorted(self.written.items())}

    def batch(self, **which: str) -> dict[int, list[int]]:
        """Return the entries that a batch read returns, by ledger."""
        found = options(self.cluster, streaming=False, **which)
        return rows_of(BatchReader(found, schema_of(found)))


def rows_of(reader: BatchReader) -> dict[int, list[int]]:
    """Return the entries that a reader returns, by ledger; check their payloads."""
    rows: dict[int, list[int]] = {}
    for partition in reader.partitions():
        for batch in reader.read(partition):
            for row in batch.to_pylist():
                assert row["payload"] == payload(row["ledger_id"], row["entry_id"])
                assert row["length"] == len(row["payload"])
                rows.setdefault(row["ledger_id"], []).append(row["entry_id"])
    return dict(sorted(rows.items()))


class CheckedQuery(Query):
    """A streaming query that checks payloads."""

    def place(self, row: dict[str, Any]) -> tuple[int, int]:
        assert row["payload"] == payload(row["ledger_id"], row["entry_id"])
        return super().place(row)

    def settle(self, pipeline: Pipeline) -> None:
        """Run micro-batches until all was read."""

        def is_done() -> bool:
            self.batch()
            return {key: sorted(found) for key, found in sorted(self.rows.items())} == pipeline.expected()

        wait_until(is_done)
        self.batch()
        assert {key: sorted(found) for key, found in sorted(self.rows.items())} == pipeline.expected()


@pytest.fixture
def pipeline(cluster: Inside) -> Pipeline:
    return Pipeline(cluster)


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_reads_the_same_before_and_after(pipeline: Pipeline) -> None:
    pipeline.add(3, 1, 4)
    pipeline.add(1, 5)
    for _ in range(2):
        assert pipeline.batch() == pipeline.expected()
        pipeline.merge()
    pipeline.merge(release=True)
    manager = pipeline.place.manager
    for each in pipeline.written:
        with pytest.raises(NoSuchLedgerError):
            manager.ledger_metadata(each)
    assert pipeline.batch() == pipeline.expected()
    pipeline.add(2)
    pipeline.merge(release=True)
    assert pipeline.batch() == pipeline.expected()


def test_a_new_read_opens_merged_ledgers_alone(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.add(3, 1, 4, 1, 5)
    pipeline.merge()
    manager, opened = type(pipeline.place.manager), list[int]()
    open_ledger = manager.open_ledger

    def noted(self: Any, ledger_id: int, **more: Any) -> Any:
        opened.append(ledger_id)
        return open_ledger(self, ledger_id, **more)

    found = options(pipeline.cluster, streaming=False)
    reader = BatchReader(found, schema_of(found))
    planned = reader.partitions()
    with monkeypatch.context() as patch:
        patch.setattr(manager, "open_ledger", noted)
        for each in planned:
            list(reader.read(each))
    assert opened == [*pipeline.holders], "once for all five"


def test_ledgers_by_their_numbers(pipeline: Pipeline) -> None:
    ids = pipeline.add(3, 1, 4, 1, 5)
    pipeline.merge(release=True)
    [holder] = pipeline.holders
    whole = pipeline.expected()
    assert pipeline.batch(ledger=str(ids[2])) == {ids[2]: whole[ids[2]]}
    assert pipeline.batch(ledgers=f"{ids[1]},{ids[4]}") == {each: whole[each] for each in (ids[1], ids[4])}
    assert pipeline.batch(ledgers=f"0-{holder + 1000}") == whole
    assert pipeline.batch(startingOffsets=json.dumps({str(ids[2]): 2}))[ids[2]] == [2, 3]
    assert pipeline.batch(endingOffsets=json.dumps({str(ids[4]): 1}))[ids[4]] == [0, 1]
    assert pipeline.batch(startEntry="1", endEntry="2")[ids[4]] == [1, 2]
    LedgerCatalog(options(pipeline.cluster, streaming=False, ledger=str(ids[2]))).check_selection()
    LedgerCatalog(options(pipeline.cluster, streaming=False)).check_selection()
    with pytest.raises(UsageError, match=f"ledger {holder} has the entries of others of sink 'app'"):
        pipeline.batch(ledger=str(holder))
    with pytest.raises(NoSuchLedgerError, match=f"ledger {holder + 1000} was deleted"):
        pipeline.batch(ledgers=f"{ids[0]},{holder + 1000}")
    catalog = LedgerCatalog(options(pipeline.cluster, streaming=False, ledger=str(ids[2])))
    for _ in range(3):
        assert [*catalog.look()] == [ids[2]]
        assert catalog.missing == []


def test_a_damaged_record_of_another_sink_does_not_hide_which_ledger_is_missing(pipeline: Pipeline) -> None:
    [there] = pipeline.add(1)
    metadata = pipeline.place.metadata
    assert metadata is not None
    metadata.write_pointer(SINKS, "other", b"not a record", None)
    assert pipeline.batch(ledger=str(there)) == pipeline.expected()
    missing = there + 1000
    with pytest.raises(
        CorruptError, match=rf"ledger {missing} does not exist.*is not known: the record of sink 'other'"
    ):
        pipeline.batch(ledgers=f"{there},{missing}")


def test_columns_of_members(pipeline: Pipeline) -> None:
    ids = pipeline.add(2, 2)
    pipeline.merge(release=True)
    found = options(pipeline.cluster, streaming=False, includeMetadata="true")
    reader = BatchReader(found, schema_of(found))
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert [(row["ledger_id"], row["entry_id"]) for row in rows] == [(each, entry) for each in ids for entry in (0, 1)]
    assert {row["ledger_type"] for row in rows} == {"t"}
    assert [key for row in rows for key, _ in row["custom_metadata"]] == [SINK_KEY] * 4, f"and not {MERGED_KEY}"
    schema = schema_of(found)
    numbers = BatchReader(found, type(schema)([schema["ledger_id"], schema["entry_id"]]))
    assert [
        (row["ledger_id"], row["entry_id"])
        for part in numbers.partitions()
        for batch in numbers.read(part)
        for row in batch.to_pylist()
    ] == [(each, entry) for each in ids for entry in (0, 1)]


def test_a_seal_is_that_of_the_merged_ledger(pipeline: Pipeline) -> None:
    pipeline.add(3, 1)
    pipeline.merge(release=True)
    assert pipeline.batch(requireSeal="true") == pipeline.expected()


def test_a_merge_during_a_listing(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that was listed is gone; one that comes later in the listing, too."""
    there = LedgerCatalog.there
    for at in range(5):
        ids = pipeline.add(2, 2, 2)
        found = options(pipeline.cluster, streaming=False)
        reader = BatchReader(found, schema_of(found))

        def late(self: LedgerCatalog, found: Connection, at: int = at) -> Iterator[LedgerMetadata]:
            for number, metadata in enumerate(there(self, found)):
                if number == at:
                    monkeypatch.undo()
                    pipeline.merge(release=True)
                yield metadata

        monkeypatch.setattr(LedgerCatalog, "there", late)
        assert rows_of(reader) == pipeline.expected(), ids


def test_a_merge_between_plan_and_read(pipeline: Pipeline) -> None:
    pipeline.add(2, 2, 2)
    found = options(pipeline.cluster, streaming=False)
    reader = BatchReader(found, schema_of(found))
    planned = [reader.partitions()]
    pipeline.merge(release=True)
    planned.append(reader.partitions())
    pipeline.add(3, 3, 3)
    pipeline.merge(release=True)
    assert len(pipeline.holders) == 1, "that of the second plan is gone, too"
    for partitions in planned:
        rows = [row for part in partitions for batch in reader.read(part) for row in batch.to_pylist()]
        assert len(rows) == 6
        assert all(row["payload"] == payload(row["ledger_id"], row["entry_id"]) for row in rows)


def test_a_member_that_retention_deleted_is_lost(pipeline: Pipeline) -> None:
    pipeline.add(2, 2)
    found = options(pipeline.cluster, streaming=False)
    reader = BatchReader(found, schema_of(found))
    pipeline.merge(release=True)
    planned = reader.partitions()
    pipeline.expire()
    with pytest.raises(NoSuchLedgerError, match="failOnDataLoss=false"):
        [*reader.read(planned[0])]
    left_out = options(pipeline.cluster, streaming=False, failOnDataLoss="false")
    assert sum(batch.num_rows for batch in BatchReader(left_out, schema_of(left_out)).read(planned[0])) == 0


def test_bytes_of_entries_of_members(pipeline: Pipeline) -> None:
    ids = pipeline.add(3, 2, 4)
    found = options(pipeline.cluster)
    sizes = [payload_bytes(found, EntryRange(each, 1, 1)) for each in ids]
    catalog = LedgerCatalog(found, follow=True)
    planned = catalog.placed([EntryRange(each, 1, 1) for each in ids], lambda *_: False)
    pipeline.merge(release=True)
    assert [payload_bytes(found, each) for each in planned] == sizes
    again = LedgerCatalog(found, follow=True).placed([EntryRange(each, 1, 1) for each in ids], lambda *_: False)
    assert [payload_bytes(found, each) for each in again] == sizes == [len(payload(each, 1)) for each in ids]


def test_a_ledger_is_not_deleted_because_a_listing_misses_the_merged_one(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members go at once, and a listing has passed the place of the merged ledger when that is created."""
    ids = pipeline.add(3, 1, 4)
    pipeline.merge(release=True)
    catalog = LedgerCatalog(options(pipeline.cluster, ledgers=",".join(map(str, ids))))
    nothing: Iterator[LedgerMetadata] = iter(())
    monkeypatch.setattr(ClusterBackend, "ledgers", lambda *_, **__: nothing)
    assert catalog.deleted([ids[0], ids[2] + 1000]) == {ids[2] + 1000}
    assert [*catalog.look()] == ids


def test_a_ledger_is_not_deleted_because_it_is_merged_again(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged ledger that a record names is gone when it is looked at, as one that has its entries, too, came."""
    ids, update = pipeline.add(2, 2), FollowedSink.update
    pipeline.merge(release=True)
    [first] = pipeline.holders
    pipeline.add(2, 2)
    with monkeypatch.context() as patch:

        def then_merge(followed: FollowedSink, found: Pointer | None) -> None:
            update(followed, found)
            patch.setattr(FollowedSink, "update", update)
            pipeline.merge(release=True)

        patch.setattr(FollowedSink, "update", then_merge)
        places = manifest.places_in_merged(pipeline.place, ids)
    [second] = pipeline.holders
    assert ({place.holder for place in places.values()}, [*places]) == ({second}, ids)
    assert second != first
    pipeline.place.manager.delete_ledger(second)
    assert manifest.places_in_merged(pipeline.place, ids) == {}, "its names outlive it for a while"


class Lagging:
    """Lists the keys of ledgers as they were, until a read asks for the latest state.

    So does a server of ZooKeeper that has not heard of the latest changes.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._get, self._list = store, store.get, store.children
        self._children: dict[str, list[str]] = {}
        self._note(LEDGERS_KEY)

    def _note(self, key: str) -> None:
        self._children[key] = self._list(key)
        for name in self._children[key]:
            if self._get(f"{key}/{name}") is None:
                self._note(f"{key}/{name}")

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer as of then from now on."""
        left = dict(self._children)

        def get(key: str, *, latest: bool = False) -> Any:
            if latest:
                left.clear()
            return self._get(key, latest=latest)

        monkeypatch.setattr(self._store, "children", lambda key: left[key] if key in left else self._list(key))
        monkeypatch.setattr(self._store, "get", get)


def test_a_look_sees_what_a_server_has_not_heard_of_yet(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = pipeline.add(3, 1)
    lagging = Lagging(metadata_store_of(pipeline.place.manager))
    ids += Pipeline(pipeline.cluster, "a new sink").add(2, 2)
    for follow in (False, True):
        catalog = LedgerCatalog(options(pipeline.cluster), follow=follow)
        lagging.begin(monkeypatch)
        assert [*catalog.look()] == ids
        catalog.close()


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_a_catalog_that_follows(pipeline: Pipeline) -> None:
    """It shows each ledger all the time, at its new place once the old one is gone."""
    ids = pipeline.add(3, 1, 4)
    catalog = LedgerCatalog(options(pipeline.cluster), follow=True)
    assert [*catalog.look()] == ids
    pipeline.merge(release=True)

    def has_moved() -> bool:
        found = catalog.look(now=False)
        assert [*found] == ids
        return {each.place.holder for each in found.values() if each.place is not None} == pipeline.holders

    wait_until(has_moved)
    catalog.close()


def test_a_query_over_merges(pipeline: Pipeline) -> None:
    pipeline.add(3, 1, 4)
    query = CheckedQuery(options(pipeline.cluster))
    query.batch(ReadMaxRows(4))
    for release in (False, True, False, True):
        pipeline.merge(release=release)
        pipeline.add(1, 5)
        query.batch()
    query.settle(pipeline)
    assert len(pipeline.holders) >= 1
    assert query.reader.catalog.hidden == {}, "a merged ledger is none that may be committed later"


def test_a_checkpoint_from_before_a_merge(pipeline: Pipeline) -> None:
    ids = pipeline.add(3, 1, 4)
    query = CheckedQuery(options(pipeline.cluster, maxEntriesPerTrigger="2"))
    query.batch()
    assert Offset.from_json(query.offset).at == {ids[0]: 2}
    start, end = query.offset, json.loads(json.dumps(query.latest()))
    query.read(end)
    pipeline.merge(release=True)
    query.start()
    again = CheckedQuery(options(pipeline.cluster))
    again.start()  # nothing was looked at
    again.offset = start
    again.read(end)
    assert again.rows == {ids[0]: [2], ids[1]: [0]}, "a micro-batch that is repeated has the same entries"
    query.settle(pipeline)


def test_a_query_that_is_behind_and_begins_again(pipeline: Pipeline) -> None:
    """It comes back to an offset after which ledgers were finished, merged and deleted."""
    pipeline.add(3, 1, 4)
    query = CheckedQuery(options(pipeline.cluster))
    first = query.offset
    query.batch()
    pipeline.merge(release=True)
    pipeline.add(2)
    wait_until(lambda: query.batch() == 2)
    query.rows.clear()
    query.offset = first
    query.settle(pipeline)


def test_a_query_that_does_not_see_merges_in_between(pipeline: Pipeline) -> None:
    """Its first look is before them, and the next after all of them."""
    pipeline.add(3, 1, 4)
    query = CheckedQuery(options(pipeline.cluster, maxEntriesPerTrigger="1"))
    query.batch()
    hidden = pipeline.write(2)
    query.latest()
    pipeline.commit(hidden)
    pipeline.merge(release=True)
    pipeline.add(2, 2, 2)
    pipeline.merge(release=True)
    pipeline.merge(release=True)
    query.settle(pipeline)


def test_a_query_that_is_restarted_between_members(pipeline: Pipeline) -> None:
    """Its catalog is new each time, and some members are finished."""
    pipeline.add(1, 2, 1)
    pipeline.merge(release=True)
    query = CheckedQuery(options(pipeline.cluster, maxEntriesPerTrigger="1"))
    for _ in range(4):
        assert query.batch() == 1
        query.start()
    assert query.batch() == 0
    assert query.rows == pipeline.expected()


def test_a_query_of_ledgers_that_are_named(pipeline: Pipeline) -> None:
    ids = pipeline.add(3, 1, 4)
    query = CheckedQuery(options(pipeline.cluster, ledgers=f"{ids[0]},{ids[2]}", maxEntriesPerTrigger="2"))
    query.batch()
    pipeline.merge(release=True)
    while query.batch():
        pass
    assert query.rows == {ids[0]: [0, 1, 2], ids[2]: [0, 1, 2, 3]}
    query.start()
    assert query.batch() == 0


def test_what_retention_deletes_is_a_loss(pipeline: Pipeline) -> None:
    pipeline.add(3, 1)
    query = CheckedQuery(options(pipeline.cluster, maxEntriesPerTrigger="1"))
    query.batch()
    pipeline.merge(release=True)
    query.batch()
    pipeline.expire()

    def is_lost() -> bool:
        try:
            query.latest()
        except NoSuchLedgerError as error:
            return "failOnDataLoss=false" in str(error)
        return False

    wait_until(is_lost)
    query.start(fail_on_data_loss=False)
    assert query.batch() == 0


def test_any_history(cluster: Inside) -> None:
    """Writes, commits, merges, deletions, restarts and repeated micro-batches in any order."""
    for seed in range(some(4, 60)):
        history(Pipeline(cluster, f"app {seed}"), random.Random(seed), f"type {seed}")
        close_connections()


def history(pipeline: Pipeline, drawn: random.Random, kind: str) -> None:
    which: dict[str, Any] = {"ledgerType": kind, "allowMissing": "true"}
    pipeline.commit(pipeline.write(drawn.randint(1, 4), kind))
    query = CheckedQuery(options(pipeline.cluster, **which))
    uncommitted: list[WrittenLedger] = []
    for _ in range(40):
        match drawn.randrange(8):
            case 0 | 1:
                uncommitted.append(pipeline.write(drawn.randint(1, 4), kind))
            case 2 if uncommitted:
                pipeline.commit(*uncommitted)
                uncommitted = []
            case 3 | 4:
                pipeline.merge(release=drawn.random() < 0.5, records=drawn.choice((5, 20, 1000)))
            case 5:
                query.batch(ReadMaxRows(drawn.randint(1, 9)) if drawn.random() < 0.7 else None)
            case 6:
                start, end = query.offset, json.loads(json.dumps(query.latest()))
                if drawn.random() < 0.5:
                    pipeline.merge(release=True)
                query.read(end)
                if drawn.random() < 0.5:
                    query.start()
                    check_repeated(pipeline, start, end, which)
            case 7:
                found = options(pipeline.cluster, streaming=False, **which)
                reader = BatchReader(found, schema_of(found))
                assert rows_of(reader) == pipeline.expected()
    query.settle(pipeline)
    new = CheckedQuery(options(pipeline.cluster, **which))
    new.settle(pipeline)


def check_repeated(pipeline: Pipeline, start: dict[str, Any], end: dict[str, Any], which: dict[str, Any]) -> None:
    """Repeat a micro-batch in a new process of the driver."""
    again = CheckedQuery(options(pipeline.cluster, **which))
    again.start()
    again.offset = start
    wanted = {
        each.ledger_id: [*range(each.first, each.last + 1)]
        for each in between(Offset.from_json(start), Offset.from_json(end))
    }
    again.read(end)
    assert again.rows == wanted
