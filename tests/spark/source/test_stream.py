"""The source of streams, called as Spark calls it: what it offers, plans and reads."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from pybk.errors import NoSuchLedgerError, UnauthorizedError, UsageError
from pybk.spark.connection import close_connections
from pybk.spark.options import SourceOptions, source_options
from pybk.spark.source.columns import schema_of
from pybk.spark.source.ledger_catalog import LedgerCatalog
from pybk.spark.source.stream import StreamReader
from tests.cluster.inside import inside
from tests.spark.secret_files import cluster_options, secret_file
from tests.spark.stream_query import StreamQuery
from tests.storage.real_store import python
from tests.waiting import PROCESS_S

pytestmark = [pytest.mark.sampled(one_in=8, using="store"), pytest.mark.usefixtures("process_of_a_driver")]

PASSWORD = b"pw"

WRITER = """
import sys
from pathlib import Path
from tests.storage.real_store import open_quick
with open_quick(Path(sys.argv[1])) as manager:
    writers = {}
    for line in sys.stdin:
        what, name, *rest = line.split()
        if what == "create":
            writers[name] = manager.create_ledger(password=b"pw", ledger_type=rest[0])
        elif what == "append":
            size = int(rest[1])
            writers[name].append_many([b"x" * size] * int(rest[0]))
        elif what == "close":
            writers[name].close()
        else:
            manager.delete_ledger(writers[name].ledger_id)
        print(writers[name].ledger_id, flush=True)
"""


class Store:
    """A store that another process writes, as one process cannot have it open for writing and reading."""

    def __init__(self, path: Path) -> None:
        self.options = {"path": str(path), "passwordFile": secret_file(path.parent, PASSWORD)}
        self._process = python(WRITER, path)

    def _own_bookie(self, *words: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def create(self, name: str, count: int = 0, size: int = 10, *, kind: str = "t", close: bool = False) -> int:
        """Create a ledger."""
        ledger_id = self._own_bookie("create", name, kind)
        if count:
            self.append(name, count, size)
        if close:
            self.close(name)
        return ledger_id

    def append(self, name: str, count: int, size: int = 10) -> None:
        """Append entries to a ledger."""
        self._own_bookie("append", name, count, size)

    def close(self, name: str) -> None:
        """Close a ledger."""
        self._own_bookie("close", name)

    def delete(self, name: str) -> None:
        """Delete a ledger."""
        self._own_bookie("delete", name)

    def end(self) -> None:
        """End the writer."""
        self._process.communicate(timeout=PROCESS_S)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "store")
    store.create("first", kind="other")
    yield store
    store.end()


class Query(StreamQuery[SourceOptions, int]):
    """A streaming query of ledgers."""

    def __init__(self, options: dict[str, str], **more: Any) -> None:
        which = {} if "ledgers" in more else {"ledgerType": "t"}
        given = {**options, **which, **{name: str(value) for name, value in more.items()}}
        super().__init__(source_options(given, streaming=True))

    def new_reader(self) -> StreamReader:
        return StreamReader(self.options, schema_of(self.options))

    def place(self, row: dict[str, Any]) -> tuple[int, int]:
        return row["ledger_id"], row["entry_id"]

    def read(self, end: dict[str, Any]) -> int:
        count = super().read(end)
        assert all(found == list(range(len(found))) for found in self.rows.values())
        return count

    def counts(self) -> dict[int, int]:
        """Return how many entries were read of each ledger."""
        return {ledger_id: len(found) for ledger_id, found in self.rows.items()}


def test_open_ledgers_are_followed_and_new_ones_found(store: Store) -> None:
    one = store.create("one", 5)
    query = Query(store.options)
    assert query.batch() == 5
    assert query.latest() == query.offset  # nothing new
    store.append("one", 2)
    two = store.create("two", 3, close=True)
    store.create("three", 3, kind="other", close=True)
    assert query.batch() == 5
    query.start()
    store.append("one", 1)
    store.close("one")
    assert query.batch() == 1
    assert query.batch() == 0
    assert query.latest() == query.offset
    assert query.counts() == {one: 8, two: 3}
    assert (query.offset["at"], query.offset["ended"]) == ({}, {str(one): 8})


def test_batches_hold_the_limit_of_entries(store: Store) -> None:
    ids = [store.create(name, 7, close=name < "c") for name in "abc"]
    query = Query(store.options, maxEntriesPerTrigger=5)
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(5)
    assert [query.batch() for _ in range(6)] == [5, 5, 5, 5, 1, 0]
    assert query.counts() == dict.fromkeys(ids, 7)


def test_batches_hold_the_limit_of_bytes(store: Store) -> None:
    """To the byte, though sizes differ; only an entry that is larger by itself goes over."""
    one = store.create("one")
    for count, size in ((10, 100), (1, 3000), (5, 0), (3, 300)):
        store.append("one", count, size)
    two = store.create("two", 2, 150, close=True)
    query = Query(store.options, maxBytesPerTrigger=1000)
    assert query.reader.getDefaultReadLimit() == ReadMaxBytes(1000)
    assert [query.batch() for _ in range(5)] == [10, 1, 8, 2, 0]
    assert query.counts() == {one: 19, two: 2}


def test_both_limits_hold_and_a_query_may_do_without(store: Store) -> None:
    store.create("one", 20, 100)
    query = Query(store.options, maxBytesPerTrigger=1000, maxEntriesPerTrigger=3)
    assert query.batch() == 3
    store.append("one", 5, 900)
    assert [query.batch() for _ in range(7)] == [3] * 5 + [2, 1]
    assert query.batch(ReadAllAvailable()) == 4


def test_available_now_reads_the_present_entries_only(store: Store) -> None:
    one = store.create("one", 5)
    query = Query(store.options, maxEntriesPerTrigger=4)
    query.reader.prepareForTriggerAvailableNow()
    store.append("one", 5)
    store.create("two", 5)
    assert [query.batch() for _ in range(3)] == [4, 1, 0]
    assert query.counts() == {one: 5}


def test_where_a_query_begins(store: Store) -> None:
    store.create("closed", 5, close=True)
    one = store.create("one", 5)
    query = Query(store.options, startingOffsets="latest")
    store.append("one", 2)
    two = store.create("two", 1)
    assert [list(range(query.offset["at"][str(one)], 5)), query.latest()["at"]] == [[], {str(one): 7, str(two): 1}]
    named = Query(store.options, startingOffsets=json.dumps({one: 6}))
    [partition] = named.reader.partitions(named.offset, named.latest())
    assert [(entry_range.first, entry_range.last) for entry_range in vars(partition)["entry_ranges"]] == [
        (0, 4),
        (6, 6),
        (0, 0),
    ]


def test_partitions_are_the_same_each_time(store: Store) -> None:
    store.create("one", 500, 1000)
    store.create("two", 10)
    query = Query(store.options, entriesPerPartition=100)
    end = query.latest()
    found = query.reader.partitions(query.offset, end)
    assert len(found) == 6
    store.append("one", 100, 1)
    query.start()
    assert query.reader.partitions(query.offset, end) == found
    assert query.reader.partitions(end, end) == []


def test_how_far_a_query_is_behind(store: Store) -> None:
    one = store.create("one", 50)
    query = Query(store.options, maxEntriesPerTrigger=5)
    assert query.reader.reportLatestOffset() is None
    query.batch()
    found = query.reader.reportLatestOffset()
    assert found is not None
    assert (found["at"], query.offset["at"]) == ({str(one): 50}, {str(one): 5})


def test_a_ledger_that_goes_after_it_was_begun(store: Store) -> None:
    one = store.create("one", 5)
    query = Query(store.options, maxEntriesPerTrigger=3)
    query.batch()
    store.delete("one")
    with pytest.raises(NoSuchLedgerError, match=f"ledger {one} was deleted or never existed"):
        query.latest()
    query.start()
    with pytest.raises(NoSuchLedgerError, match=f"ledger {one} was deleted or never existed"):
        query.latest()


def test_a_ledger_that_goes_after_it_was_listed(store: Store) -> None:
    store.create("one", 5)
    two = store.create("two", 5)
    query = Query(store.options, maxEntriesPerTrigger=3)
    query.batch()
    store.delete("two")
    with pytest.raises(NoSuchLedgerError, match=f"ledger {two} was deleted or never existed"):
        query.latest()


@pytest.mark.parametrize("count", [5, 0])
def test_a_ledger_that_goes_unread_while_no_query_runs(store: Store, count: int) -> None:
    """No entry of it was read, and the driver that listed it has ended: the offset has it."""
    store.create("one", 5)
    two = store.create("two", count)
    query = Query(store.options, maxEntriesPerTrigger=3)
    query.batch()
    query.start()
    store.delete("two")
    with pytest.raises(NoSuchLedgerError, match=f"ledger {two} was deleted or never existed"):
        query.latest()
    query.options = replace(query.options, fail_on_data_loss=False)
    query.start()
    assert [query.batch() for _ in range(2)] == [2, 0]


def test_a_ledger_that_a_listing_misses_is_neither_lost_nor_read_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = store.create("one", 5)
    two = store.create("two", 5, close=True)
    store.create("three", 5)
    query = Query(store.options)
    query.batch()
    look = LedgerCatalog.look
    monkeypatch.setattr(
        LedgerCatalog,
        "look",
        lambda self, **when: {each: found for each, found in look(self, **when).items() if each not in (one, two)},
    )
    for _ in range(2):
        store.append("three", 1)
        assert query.batch() == 1
    monkeypatch.undo()
    store.append("one", 1)
    assert query.batch() == 1  # which asserts that rows come once and in order


@pytest.mark.parametrize("which", [{"ledgerType": "other"}, {"ledgers": "0-9"}, {"path": "other"}])
def test_a_checkpoint_of_other_ledgers_is_refused(store: Store, tmp_path: Path, which: dict[str, str]) -> None:
    store.create("one", 5)
    query = Query(store.options)
    query.batch()
    Store(tmp_path / "other").end()
    more = {"path": str(tmp_path / which["path"]), "ledgerType": "t"} if "path" in which else which
    query.options = source_options({**store.options, **more})
    query.start()
    with pytest.raises(UsageError, match="the checkpoint is of other ledgers"):
        query.latest()
    with pytest.raises(UsageError, match="the checkpoint is of other ledgers"):
        query.reader.partitions(query.offset, query.offset)


def test_ledgers_that_go_are_borne_if_that_is_asked_for(store: Store) -> None:
    one = store.create("one", 5)
    two = store.create("two", 5)
    query = Query(store.options, maxEntriesPerTrigger=3, failOnDataLoss="false")
    assert query.batch() == 3
    store.delete("one")
    store.delete("two")
    three = store.create("three", 2)
    assert query.batch() == 2
    store.append("three", 2)
    end = query.latest()
    store.delete("three")
    for partition in query.reader.partitions(query.offset, end):
        assert list(query.reader.read(partition)) == []
    assert query.counts() == {one: 3, three: 2}
    assert str(two) not in query.offset["at"]


def test_a_ledger_that_goes_between_planning_and_reading(store: Store) -> None:
    one = store.create("one", 5)
    query = Query(store.options)
    end = query.latest()
    store.delete("one")
    [partition] = query.reader.partitions(query.offset, end)
    with pytest.raises(NoSuchLedgerError, match=f"ledger {one} was deleted.*failOnDataLoss"):
        list(query.reader.read(partition))


def test_a_ledger_may_be_deleted_once_it_was_read(store: Store) -> None:
    store.create("one", 5, close=True)
    query = Query(store.options)
    assert query.batch() == 5
    store.delete("one")
    query.start()
    assert query.batch() == 0
    store.create("two", 1)
    assert query.batch() == 1
    assert query.batch() == 0


def test_named_ledgers(store: Store) -> None:
    one = store.create("one", 5)
    with pytest.raises(NoSuchLedgerError, match="ledger 77"):
        Query(store.options, ledgers=f"{one},77")
    query = Query(store.options, ledgers=f"{one}-{one + 1}")
    assert query.batch() == 5
    store.create("two", 2, kind="any")
    store.create("three", 2)
    assert query.batch() == 2


def test_a_wrong_password_raises_at_once(store: Store, tmp_path: Path) -> None:
    store.create("one", 5, close=True)
    with pytest.raises(UnauthorizedError):
        Query({**store.options, "passwordFile": secret_file(tmp_path, b"another", "wrong")})
    with pytest.raises(UsageError, match="streaming read"):
        Query(store.options, endEntry=5)


def test_stopping_lets_go(store: Store) -> None:
    store.create("one", 5)
    query = Query(store.options)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    query.reader.stop()
    query.reader.stop()
    assert query.batch() == 5


def test_a_cluster_is_followed(tmp_path: Path) -> None:
    with inside(tmp_path / "cluster") as cluster:
        manager = cluster.connect()
        writer = manager.create_ledger(password=PASSWORD, ledger_type="t")
        options = {**cluster_options(cluster.url), "passwordFile": secret_file(tmp_path, PASSWORD)}
        query = Query(options)
        for _ in range(3):
            writer.append_many([b"x"] * 5)
            query.batch()
        writer.close()
        query.batch()
        assert query.counts() == {writer.ledger_id: 15}
        assert query.offset["ended"] == {str(writer.ledger_id): 15}
        manager.delete_ledger(writer.ledger_id, password=PASSWORD)
        assert query.batch() == 0
        close_connections()
