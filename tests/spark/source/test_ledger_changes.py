"""What catalogs of streams see: every change once, at the cost of what has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pybk.errors import MetadataUnreachableError, NoSuchLedgerError, UsageError
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.manager.ledger_reader import LedgerReader
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.ledgers import LedgerPage
from pybk.spark.connection import close_connections, connection
from pybk.spark.options import SourceOptions, source_options
from pybk.spark.source.columns import schema_of
from pybk.spark.source.ledger_catalog import LedgerCatalog
from pybk.spark.source.ledger_changes import LedgerChanges
from pybk.spark.source.stream import StreamReader
from pybk.streams.log import Log
from tests.cluster.inside import Inside, inside
from tests.sampling import mostly
from tests.spark.secret_files import cluster_options
from tests.spark.source.test_ledger_catalog import commit, fill
from tests.spark.stream_query import StreamQuery
from tests.waiting import wait_until


@pytest.fixture(scope="module", params=mostly("lmdb", "zookeeper", among="cluster"))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    url = "" if request.param == "lmdb" else request.getfixturevalue("zookeeper_server").url()
    with inside(tmp_path_factory.mktemp("changes") / "cluster", url=url) as cluster:
        yield cluster
        close_connections()


class Calls:
    """The calls of methods of the metadata store, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledgers: list[int] = []
        """The ledgers whose metadata was read."""
        self.lists = 0
        read, pages = ClusterMetadata.read_ledgers, ClusterMetadata.ledger_pages

        def read_ledgers(metadata: ClusterMetadata, ledger_ids: Any, **more: Any) -> Any:
            self.ledgers += ledger_ids
            return read(metadata, ledger_ids, **more)

        def ledger_pages(metadata: ClusterMetadata, **more: Any) -> Any:
            self.lists += 1
            return pages(metadata, **more)

        monkeypatch.setattr(ClusterMetadata, "read_ledgers", read_ledgers)
        monkeypatch.setattr(ClusterMetadata, "ledger_pages", ledger_pages)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def options(cluster: Inside, **which: str) -> SourceOptions:
    return source_options({**cluster_options(cluster.url, cluster.directory), **which}, streaming=True)


def metadata_of(cluster: Inside) -> ClusterMetadata:
    found = connection(options(cluster, ledger="0").where).metadata
    assert found is not None
    return found


def knows(changes: LedgerChanges, ledger_id: int) -> bool:
    changes.look()
    return changes.knows(ledger_id)


def sees(catalog: LedgerCatalog, *ledger_ids: int) -> Callable[[], bool]:
    return lambda: [*catalog.look(now=False)] == [*ledger_ids]


def test_each_change_is_seen_once(cluster: Inside, calls: Calls) -> None:
    manager = cluster.connect()
    before = fill(manager, "before")
    changes = LedgerChanges(metadata_of(cluster))
    assert before in {each.ledger_id for each in changes.look().ledgers}
    settled = fill(manager, "settled")  # a feed may report changes from just before it, too
    wait_until(lambda: knows(changes, settled))
    calls.ledgers.clear()
    new = fill(manager, "new")
    seen: set[int] = set()

    def see() -> bool:
        seen.update(each.ledger_id for each in changes.look().ledgers)
        return new in seen

    wait_until(see)
    assert seen <= {settled, new}
    assert {*calls.ledgers} <= {settled, new}
    assert changes.knows(new)
    manager.delete_ledger(before)
    wait_until(lambda: before in changes.look().gone)
    assert not changes.knows(before)
    assert calls.lists == 1
    changes.list_again()
    assert changes.look().ledgers == [], "nothing has another version"
    changes.begin_again()
    assert new in {each.ledger_id for each in changes.look().ledgers}
    changes.close()


def test_a_look_that_fails_is_made_up_for(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = cluster.connect()
    changes = LedgerChanges(metadata_of(cluster))
    changes.look()
    gone = fill(manager, "gone")
    wait_until(lambda: knows(changes, gone))
    manager.delete_ledger(gone)
    later = fill(manager, "later")

    def unreachable(*_: Any, **__: Any) -> Any:
        raise MetadataUnreachableError("gone for a moment")

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "ledger_pages", unreachable)
        changes.list_again()
        with pytest.raises(MetadataUnreachableError):
            changes.look()
    found = changes.look()
    assert (later in {each.ledger_id for each in found.ledgers}, gone in found.gone) == (True, True)
    changes.close()


def test_a_look_costs_what_changed(cluster: Inside, calls: Calls) -> None:
    manager = cluster.connect()
    ours, other = [fill(manager, "ours") for _ in range(3)], fill(manager, "others")
    catalog = LedgerCatalog(options(cluster, ledgerType="ours"), follow=True)
    assert [*catalog.look()] == ours
    assert other in catalog.others
    settled = fill(manager, "others")
    wait_until(lambda: catalog.look(now=False) and settled in catalog.others)
    assert calls.lists == 1
    calls.ledgers.clear()
    new, another = fill(manager, "ours"), fill(manager, "others")
    wait_until(sees(catalog, *ours, new))
    wait_until(lambda: catalog.look(now=False) and another in catalog.others)
    assert calls.lists == 1
    assert {new, another} <= {*calls.ledgers} <= {settled, new, another}
    manager.delete_ledger(ours[0])
    wait_until(sees(catalog, *ours[1:], new))
    catalog.forget(lambda ledger_id, _: ledger_id <= ours[1])
    assert sees(catalog, ours[2], new)()
    assert [*catalog.look()] == [ours[2], new], "what was forgotten is not listed again"
    catalog.forget(lambda ledger_id, _: ledger_id <= new)
    assert sees(catalog)()
    catalog.remember()
    assert sees(catalog, *ours[1:], new)()
    catalog.close()


def test_a_late_listing_has_no_ledger_taken_for_one_that_is_never_read(
    cluster: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offset joins finished ledgers over such ones, and would count it as finished once it is there."""
    manager = cluster.connect()
    first, second = fill(manager, "late"), fill(manager, "late")
    catalog = LedgerCatalog(options(cluster, ledgerType="late"), follow=True)
    assert sees(catalog, first, second)()
    pages = ClusterMetadata.ledger_pages

    def late(metadata: ClusterMetadata, **more: Any) -> Iterator[LedgerPage]:
        for page in pages(metadata, **more):
            ledgers = {each: found for each, found in page.ledgers.items() if each != second}
            yield page._replace(ledgers=ledgers, same=page.same - {second})

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "ledger_pages", late)
        assert [*catalog.look()] == [first]
    assert second not in catalog.others
    assert [*catalog.look()] == [first, second]
    manager.delete_ledger(first)
    wait_until(sees(catalog, second))
    assert first in catalog.others
    catalog.close()


def test_open_ledgers_are_followed_to_their_close(cluster: Inside) -> None:
    manager = cluster.connect()
    writer = manager.create_ledger(ledger_type="opened", ensemble_size=1, insecure=True)
    catalog = LedgerCatalog(options(cluster, ledgerType="opened"), follow=True)
    assert [each.closed for each in catalog.look().values()] == [False]
    writer.append_many([b"x"] * 3)
    writer.close()
    wait_until(lambda: [(each.end, each.closed) for each in catalog.look(now=False).values()] == [(3, True)])
    catalog.close()


def test_commits_are_seen_as_a_whole(cluster: Inside, calls: Calls) -> None:
    """A catalog is notified of some ledgers of a commit, and not of others yet."""
    manager, found = cluster.connect(), connection(options(cluster, ledger="0").where)
    catalog = LedgerCatalog(options(cluster, ledgerType="sunk"), follow=True)
    plain = fill(manager, "sunk")
    first = [fill(manager, "sunk", "app") for _ in range(2)]
    assert [*catalog.look()] == [plain]
    assert {*catalog.hidden} == {*first}
    commit(found, "app", 0, *first)
    wait_until(sees(catalog, plain, *first))
    assert catalog.hidden == {}
    catalog.forget(lambda ledger_id, _: ledger_id <= first[1])
    second = [fill(manager, "sunk", "app") for _ in range(2)]
    commit(found, "app", 1, *second)
    assert wait_until(lambda: [*catalog.look(now=False)]) == second
    calls.ledgers.clear()
    assert sees(catalog, *second)()
    assert not {*calls.ledgers}.intersection(first), "the names of an earlier commit are not looked at again"
    catalog.close()


def test_what_is_refused_is_refused_at_each_look(cluster: Inside) -> None:
    manager = cluster.connect()
    catalog = LedgerCatalog(options(cluster, ledgers="0-999999"), follow=True)
    catalog.look()
    with Log.open(manager, "refused", insecure=True) as log, log.writer() as writer:
        writer.append(b"x")

        def refuses() -> bool:
            try:
                catalog.look(now=False)
            except UsageError:
                return True
            return False

        wait_until(refuses)
        assert refuses()
    catalog.close()


class Query(StreamQuery[SourceOptions, int]):
    """A streaming query of ledgers, to which nothing but changes is reported."""

    def new_reader(self) -> StreamReader:
        return StreamReader(self.options, schema_of(self.options))

    def place(self, row: dict[str, Any]) -> tuple[int, int]:
        return row["ledger_id"], row["entry_id"]

    def batch_of(self, count: int) -> None:
        """Run micro-batches until some rows were read."""
        left = count
        while left > 0:
            found = self.reader.latestOffset(self.offset, self.reader.getDefaultReadLimit())
            left -= self.read(json.loads(json.dumps(found)))
        assert left == 0


@pytest.mark.usefixtures("process_of_a_driver")
def test_a_query_forgets_what_it_has_finished(tmp_path: Path, calls: Calls) -> None:
    with inside(tmp_path / "cluster", count=1) as cluster:
        manager = cluster.connect()
        written = [fill(manager, kind) for _ in range(40) for kind in ("t", "other")]
        query = Query(options(cluster, ledgerType="t"))
        query.batch_of(120)
        calls.ledgers.clear()
        for _ in range(5):
            new = [fill(manager, "t"), fill(manager, "other")]
            query.batch_of(3)
            written += new
            ranges = [each for _, part in query.offset["done"] for each in part]
            assert len(ranges) <= 4, "ledgers of the other type lie in between"
        query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
        assert query.reader.catalog.look(now=False) == {}
        assert not {*calls.ledgers}.intersection(written[:80])
        assert calls.lists == 1
        before = query.offset
        fill(manager, "t")
        query.batch_of(3)
        query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
        query.reader.latestOffset(before, query.reader.getDefaultReadLimit())
        assert len(query.reader.catalog.look()) == 1, "a query that goes back sees again what lies before it"
        assert all(found == [0, 1, 2] for found in query.rows.values())
        close_connections()


def test_a_look_reads_the_ends_that_have_moved(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = cluster.connect()
    read: list[int] = []
    ends = LedgerReader.read_last_add_confirmed

    def counted(reader: LedgerReader) -> int:
        read.append(reader.ledger_id)
        return ends(reader)

    with ExitStack() as opened:
        writers = [opened.enter_context(manager.create_ledger(ledger_type="moving", insecure=True)) for _ in range(6)]
        for writer in writers:
            writer.append(b"entry")
        catalog = LedgerCatalog(options(cluster, ledgerType="moving"), follow=True)
        wait_until(lambda: [each.end for each in catalog.look(now=False).values()] == [1] * 6)
        monkeypatch.setattr(LedgerReader, "read_last_add_confirmed", counted)

        def rests() -> bool:
            read.clear()
            catalog.look(now=False)
            return not read

        wait_until(rests)
        last = writers[3].append(b"entry")
        seen = cluster.connect().open_ledger(writers[3].ledger_id, recover=False)
        wait_until(lambda: ends(seen) == last)
        assert [each.end for each in catalog.look(now=False).values()] == [1, 1, 1, 2, 1, 1]
        assert read == [writers[3].ledger_id]
    assert all(each.closed for each in catalog.look(now=False).values()), "an end in the metadata needs no notice"
    catalog.close()


def test_a_look_at_all_ledgers_decodes_those_of_its_type(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = cluster.connect()
    wanted, other = fill(manager, "decoded"), fill(manager, "undecoded")
    metadata_of(cluster)
    found: list[int] = []
    decode = LedgerMetadata.decode

    def noted(data: bytes, *, where: str) -> LedgerMetadata:
        metadata = decode(data, where=where)
        found.append(metadata.ledger_id)
        return metadata

    monkeypatch.setattr(LedgerMetadata, "decode", noted)
    catalog = LedgerCatalog(options(cluster, ledgerType="decoded"), follow=True)
    assert [*catalog.look()] == [wanted]
    assert wanted in found
    assert other not in found
    assert other in catalog.others
    catalog.close()
    mistyped = LedgerCatalog(options(cluster, ledgerType="undecodet"), follow=True)
    assert mistyped.look() == {}
    with pytest.raises(NoSuchLedgerError, match="undecoded"):
        mistyped.check_type()
    mistyped.close()
