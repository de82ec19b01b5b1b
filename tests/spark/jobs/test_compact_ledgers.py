"""The job that merges ledgers that Spark has written: the same rows in fewer ledgers, while queries write and read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.credentials import Credentials
from pybk.errors import NoSuchLedgerError, UsageError
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.spark.connection import close_connections, connection
from pybk.spark.jobs import copy as copying
from pybk.spark.jobs.compact import CompactedSink, compact_ledgers
from pybk.spark.jobs.copy import copy
from pybk.spark.jobs.export import export
from pybk.spark.jobs.import_ import import_
from pybk.spark.jobs.ledgers import selected_ledgers, where_of
from pybk.spark.jobs.retain import retain
from pybk.spark.jobs.transfer import plan_transfer, visible_in
from pybk.spark.sink.manifest import SINK_KEY, SINKS, Sink, WrittenLedger, is_merged
from pybk.spark.sink.sink_record import Attempt
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import cluster_backend_of
from tests.spark.jobs.test_commands import Commands
from tests.spark.jobs.test_jobs import PASSWORD
from tests.spark.secret_files import cluster_options, secret_file
from tests.spark.sink.merging import merge
from tests.spark.source.test_streams import Pipe
from tests.storage.real_store import contents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.sampled(one_in=6, using="spark")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster
        close_connections()


class Batches:
    """A query that writes a ledger in each of its micro-batches."""

    def __init__(self, cluster: Inside, app: str = "app", kind: str = "t", password: bytes = PASSWORD) -> None:
        self._manager = cluster.connect()
        self._app, self._kind, self._password = app, kind, password
        self.written: dict[int, int] = {}

    @property
    def manager(self) -> LedgerManager:
        """The ledgers."""
        return self._manager

    @property
    def sink(self) -> Sink:
        """The sink."""
        return Sink(self._manager, metadata_of(self._manager), self._app, given=Credentials(self._password))

    def add(self, count: int, entries: int = 5) -> list[int]:
        """Commit ledgers, one by one."""
        ids = []
        for _ in range(count):
            with self._manager.create_ledger(
                ledger_type=self._kind, custom_metadata={SINK_KEY: self._app.encode()}, password=self._password
            ) as writer:
                writer.append_many([b"%d" % number for number in range(entries)])
            created_ns = writer.metadata.creation_time_ns
            written = WrittenLedger(writer.ledger_id, entries, writer.length, created_ns)
            assert self.sink.commit(Attempt(len(self.written), created_ns), [written])
            self.written[writer.ledger_id] = entries
            ids.append(writer.ledger_id)
        return ids


def metadata_of(manager: LedgerManager) -> ClusterMetadata:
    return cluster_backend_of(manager).membership.metadata


def run(spark: SparkSession, cluster: Inside, kind: str | None = None, **more: Any) -> dict[str, CompactedSink]:
    found = compact_ledgers(spark, cluster.url, kind, cluster_secret=SECRET, password=PASSWORD, quiet=True, **more)
    return {each.sink: each for each in found}


def there(manager: LedgerManager, kind: str = "t") -> list[int]:
    return sorted(manager.list_ledgers(kind))


def test_a_query_over_merges(spark: SparkSession, cluster: Inside, tmp_path: Path) -> None:
    """It runs, is restarted with its checkpoint, and reads each entry once under its number; the ledgers are few."""
    batches = Batches(cluster)
    options = {**cluster_options(cluster.url), "maxEntriesPerTrigger": "12"}
    pipe = Pipe(spark, tmp_path, {**options, "passwordFile": secret_file(tmp_path, PASSWORD, "word")})
    pipe.written = batches.written
    batches.add(20)
    query = pipe.start(processingTime="0 seconds")
    found = run(spark, cluster)
    assert found["app"] == CompactedSink("app", 1, 20, 100, found["app"].bytes, 1)
    batches.add(5)
    query = pipe.wait(query)
    query.stop()
    batches.add(7)
    run(spark, cluster, keep_s=0)
    batches.add(3)
    run(spark, cluster, keep_s=0)
    run(spark, cluster, keep_s=0)
    query = pipe.start(processingTime="0 seconds")
    batches.add(5)
    run(spark, cluster, keep_s=0, segment_records=20)
    query = pipe.wait(query)
    run(spark, cluster, keep_s=0)
    query.stop()
    pipe.run()
    assert pipe.rows() == pipe.expected()
    rows = spark.read.format("pybk").options(**cluster_options(cluster.url), ledgerType="t")
    frame = rows.option("passwordFile", secret_file(tmp_path, PASSWORD, "word")).load().select("ledger_id", "entry_id")
    assert sorted((row.ledger_id, row.entry_id) for row in frame.collect()) == pipe.expected()
    merged = [each for each in there(batches.manager) if is_merged(batches.manager.ledger_metadata(each))]
    assert len(merged) <= 5
    assert len(there(batches.manager)) < len(batches.written)


def test_what_cannot_be_merged_is_reported(spark: SparkSession, cluster: Inside) -> None:
    foreign, mine, other = (
        Batches(cluster, "foreign", password=b"another password"),
        Batches(cluster, "mine"),
        Batches(cluster, "other", "another type"),
    )
    for each in (foreign, mine, other):
        each.add(3)
    found = run(spark, cluster, "t")
    [reason] = found["foreign"].failed
    assert "has another password" in reason
    assert (found["foreign"].ledgers, found["mine"].ledgers, found["other"].ledgers) == (0, 1, 0)
    assert len(there(mine.manager)) == 7
    merge(connection(where_of(cluster.url, SECRET)), foreign.sink, keep_s=0.0, given=Credentials(b"another password"))
    [reason] = run(spark, cluster, "t")["foreign"].failed
    assert reason.startswith(
        "3 ledgers that earlier merges have replaced were not deleted, and the next call tries again"
    )
    with pytest.raises(UsageError, match="Spark does not write ledgers to it"):
        compact_ledgers(spark, "/a/directory")
    with pytest.raises(UsageError, match="segment_bytes"):
        run(spark, cluster, segment_bytes=0)


def test_copies_and_exports_have_the_members(spark: SparkSession, cluster: Inside, tmp_path: Path) -> None:
    batches = Batches(cluster)
    ids = batches.add(4)
    run(spark, cluster, keep_s=0)
    ids += batches.add(1)
    run(spark, cluster, keep_s=0)
    with inside(tmp_path / "target") as target:
        given: dict[str, Any] = {"cluster_secret": SECRET, "password": PASSWORD, "quiet": True}
        found = copy(spark, cluster.url, target.url, target_secret=SECRET, **given)
        assert (sorted(found.ledgers), sorted(found.copied), found.failed) == (ids, ids, ())
        manager = target.connect()
        wanted = [b"%d" % number for number in range(5)]
        assert all(contents(manager, each, PASSWORD) == wanted for each in found.ledgers.values())
        again = copy(spark, cluster.url, target.url, target_secret=SECRET, **given)
        assert (again.copied, again.ledgers) == ((), found.ledgers)
        exported = export(spark, cluster.url, str(tmp_path / "export"), **given)
        assert sorted(exported.ledgers) == ids
        imported = import_(spark, target.url, str(tmp_path / "export"), **given)
        assert all(contents(manager, each, PASSWORD) == wanted for each in imported.ledgers.values())
        close_connections()


def test_the_command(spark: SparkSession, cluster: Inside, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spark.getActiveSession() is not None
    commands = Commands(tmp_path, capsys)
    batches = Batches(cluster, "orders")
    batches.add(4)
    status, told = commands.json("compact", cluster.url, "--type", "t", "--keep", "0s")
    assert (status, told["logs"], [each["replaced"] for each in told["sinks"]]) == (0, [], [4])
    status, out, _ = commands.run("compact", cluster.url)
    assert (status, "orders" in out, "merged ledgers" in out) == (0, True, True)
    assert len(there(batches.manager)) == 1
    deleted = retain(cluster.url, "t", max_bytes=0, cluster_secret=SECRET, password=PASSWORD)
    assert deleted == {"orders": [*batches.written]}
    assert there(batches.manager) == []


# ---- without Spark -----------------------------------------------------------------------------------------------


def merge_at_once(cluster: Inside, batches: Batches, *, keep_s: float = 0.0) -> int:
    """Merge all ledgers of a sink, and delete what was replaced and is not kept; return the merged ledger."""
    merge(connection(where_of(cluster.url, SECRET)), batches.sink, keep_s=keep_s, given=Credentials(PASSWORD))
    batches.sink.release_replaced(time.time_ns())
    [holder] = {row.holder for row in batches.sink.rows()}
    return holder


def copy_without_spark(cluster: Inside, target: Inside) -> copying.Copied:
    """Copy ledgers; the function ``spread`` of copies has to be replaced."""
    no_session: Any = None
    return copy(
        no_session, cluster.url, target.url, cluster_secret=SECRET, target_secret=SECRET, password=PASSWORD, quiet=True
    )


def test_a_ledger_that_was_merged_is_named_with_its_place(cluster: Inside) -> None:
    batches = Batches(cluster)
    ids = batches.add(4)
    holder = merge_at_once(cluster, batches)
    where = where_of(cluster.url, SECRET)
    with pytest.raises(NoSuchLedgerError, match=f"ledger {holder} of sink 'app' has its entries, from entry 10 on"):
        selected_ledgers(where, ids[2:])
    with pytest.raises(NoSuchLedgerError, match="the cluster has none of this id"):
        selected_ledgers(where, [holder + 1000])
    assert [each.ledger_id for each in selected_ledgers(where, [holder])] == [holder]


def test_a_damaged_record_of_another_sink_does_not_hide_that_a_ledger_does_not_exist(cluster: Inside) -> None:
    batches = Batches(cluster)
    batches.add(1)
    metadata_of(batches.manager).write_pointer(SINKS, "other", b"not a record", None)
    with pytest.raises(NoSuchLedgerError, match=r"none of this id.*is not known: the record of sink 'other'"):
        selected_ledgers(where_of(cluster.url, SECRET), [1000])


def test_a_copy_takes_the_merged_ledger_while_the_old_ones_are_kept(cluster: Inside) -> None:
    batches = Batches(cluster)
    ids = batches.add(4)
    holder = merge_at_once(cluster, batches, keep_s=3600.0)
    assert there(batches.manager) == sorted([*ids, holder])
    where, given = where_of(cluster.url, SECRET), Credentials(PASSWORD)
    plan = plan_transfer(connection(where), given, partial(selected_ledgers, where), open_too=False)
    assert plan.places == {each: (holder, 5 * at) for at, each in enumerate(ids)}
    plan = plan_transfer(connection(where), given, partial(selected_ledgers, where, ids[:1]), open_too=False)
    assert ([each.ledger_id for each in plan.headers], plan.places) == (ids[:1], {})


def test_merges_during_the_listings_of_a_copy(cluster: Inside) -> None:
    """Those that were committed before the first look at the record are found, wherever merges put them meanwhile."""
    batches = Batches(cluster)
    ids = batches.add(4)
    where = where_of(cluster.url, SECRET)
    holders: list[int] = []

    def listing() -> list[LedgerMetadata]:
        if len(holders) == 1:
            batches.add(4)
            holders.append(merge_at_once(cluster, batches))
        listed = selected_ledgers(where)
        if len(holders) in (0, 2):
            batches.add(4 * len(holders))
            holders.append(merge_at_once(cluster, batches))
        return listed

    found = visible_in(connection(where), listing)
    assert [(each.metadata.ledger_id, each.first) for each in found] == [(each, 5 * at) for at, each in enumerate(ids)]
    assert len(set(holders)) == 3
    assert {each.stored.ledger_id for each in found} == {holders[-1]}


def test_merges_while_ledgers_are_copied(cluster: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ledgers that merges move are copied; what was deleted is left out."""
    batches, other = Batches(cluster), Batches(cluster, "other")
    ids, [deleted] = batches.add(4), other.add(1)
    holders: list[int] = []

    def change_and_copy(_: object, work: Callable[[Any], Any], units: list[Any], **__: object) -> list[Any]:
        if not holders:
            other.manager.delete_ledger(deleted, password=PASSWORD)
        if len(holders) < 2:
            batches.add(4 * len(holders))
            holders.append(merge_at_once(cluster, batches))
        return [work(unit) for unit in units]

    monkeypatch.setattr(copying, "spread", change_and_copy)
    with inside(tmp_path / "target") as target:
        found = copy_without_spark(cluster, target)
        assert len(set(holders)) == 2
        assert (sorted(found.copied), sorted(found.ledgers), found.failed) == (ids, ids, ())
        wanted = [b"%d" % number for number in range(5)]
        assert all(contents(target.connect(), each, PASSWORD) == wanted for each in found.ledgers.values())
        close_connections()


def test_a_ledger_that_is_there_and_was_not_copied_is_reported(
    cluster: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [ledger_id] = Batches(cluster).add(1)
    monkeypatch.setattr(copying, "spread", lambda _, __, units, **___: [None] * len(units))
    with inside(tmp_path / "target") as target:
        [(failed, reason)] = copy_without_spark(cluster, target).failed
        assert (failed, reason.endswith("copy again")) == (ledger_id, True)
        close_connections()
