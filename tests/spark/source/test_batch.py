"""``spark.read.format("pybk")`` in a real Spark: the rows are the entries, whatever options and filters say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.inside import Inside, inside
from tests.spark.secret_files import cluster_options, secret_file
from tests.storage.real_store import open_quick

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.sampled(one_in=6, using="spark")

PASSWORD = b"the ledgers' password"
PUSHING = "spark.sql.python.filterPushdown.enabled"

Rows = set[tuple[int, int, bytes]]


def payload(ledger_id: int, entry_id: int) -> bytes:
    """Return what entries have: every tenth nothing."""
    return b"" if entry_id % 10 == 9 else b"%d-%d " % (ledger_id, entry_id) + b"x" * (entry_id % 50)


def expected(ledgers: dict[int, range]) -> Rows:
    return {(each, entry, payload(each, entry)) for each, entries in ledgers.items() for entry in entries}


class Filled:
    """Ledgers 0, 1 and 2 of 300 entries each, written by turns; 3 without any; 4 still written: all of type orders
    but 1, which is of type audit.
    """

    def __init__(self, manager: LedgerManager, directory: Path, options: dict[str, str]) -> None:
        self.manager = manager
        self.options = {**options, "passwordFile": secret_file(directory, PASSWORD)}
        self.wrong = secret_file(directory, b"another", "wrong")
        kinds = ["orders", "audit", "orders", "orders", "orders"]
        self.writers = [
            manager.create_ledger(
                password=PASSWORD,
                ledger_type=kind,
                storage_hints={StorageHint.SSD},
                custom_metadata={"shop": b"\x00\x01"},
                digest_type=DigestType.CRC32C if kind == "audit" else DigestType.HMAC_SHA256,
            )
            for kind in kinds
        ]
        self.ids = [writer.ledger_id for writer in self.writers]
        for first in range(0, 300, 60):
            for writer in self.writers[:3]:
                writer.append_many([payload(writer.ledger_id, entry) for entry in range(first, first + 60)])
        self.writers[4].append_many([payload(self.ids[4], entry) for entry in range(20)])
        for writer in self.writers[:4]:
            writer.close()

    def ledgers(self, *places: int) -> dict[int, range]:
        """Return the ledgers in some places, and their entries."""
        counts = [300, 300, 300, 0, 20]
        return {self.ids[place]: range(counts[place]) for place in places}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    directory = tmp_path_factory.mktemp("batch")
    with open_quick(directory / "store") as manager:
        yield Filled(manager, directory, {"path": str(directory / "store")})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Inside, Filled]]:
    directory = tmp_path_factory.mktemp("batch")
    with inside(directory / "cluster") as cluster:
        yield cluster, Filled(cluster.connect(), directory, cluster_options(cluster.url))


def read(spark: SparkSession, filled: Filled, **options: Any) -> DataFrame:
    return spark.read.format("pybk").options(**{**filled.options, **options}).load()


def rows(frame: DataFrame) -> Rows:
    found = [(row.ledger_id, row.entry_id, bytes(row.payload)) for row in frame.collect()]
    assert len(found) == len(set(found))
    return set(found)


@contextmanager
def pushing(spark: SparkSession, on: bool) -> Iterator[None]:
    spark.conf.set(PUSHING, on)
    try:
        yield
    finally:
        spark.conf.unset(PUSHING)


def test_a_type_is_read_while_its_writer_runs(spark: SparkSession, store: Filled) -> None:
    frame = read(spark, store, ledgerType="orders", includeMetadata="true")
    assert rows(frame) == expected(store.ledgers(0, 2, 3, 4))
    assert {(row.ledger_type, *row.storage_hints, *row.custom_metadata.items()) for row in frame.collect()} == {
        ("orders", "ssd", ("shop", b"\x00\x01"))
    }
    assert frame.where("length != length(payload)").count() == 0
    store.writers[4].append(payload(store.ids[4], 20))
    more = {**store.ledgers(4), store.ids[4]: range(21)}
    assert rows(read(spark, store, ledger=store.ids[4])) == expected(more)
    store.writers[4].append(payload(store.ids[4], 21))  # the writer was not fenced


def test_a_cluster_is_read_and_its_writers_left_alone(spark: SparkSession, cluster: tuple[Inside, Filled]) -> None:
    filled = cluster[1]
    last = len(filled.ledgers(4)[filled.ids[4]])
    assert rows(read(spark, filled, ledgerType="orders")) >= expected(filled.ledgers(0, 2, 3))
    found = rows(read(spark, filled, ledgers=f"{filled.ids[0]}-{filled.ids[4]}"))
    assert found >= expected({**filled.ledgers(0, 1, 2), filled.ids[4]: range(last - 1)})
    assert found <= expected({**filled.ledgers(0, 1, 2), filled.ids[4]: range(last)})
    filled.writers[4].append(payload(filled.ids[4], last))


def test_ledgers_by_ids_and_bounds(spark: SparkSession, store: Filled) -> None:
    zero, one, two = store.ids[:3]
    options: dict[str, Any] = {
        "ledgers": f"{two},{zero}-{one}",
        "startEntry": 10,
        "endEntry": 200,
        "startingOffsets": json.dumps({zero: 150}),
        "endingOffsets": json.dumps({two: 20}),
    }
    wanted = expected({zero: range(150, 201), one: range(10, 201), two: range(10, 21)})
    assert rows(read(spark, store, **options)) == wanted
    some = read(spark, store, **options, maxEntries=60, entriesPerPartition=7)
    assert rows(some) == expected({zero: range(150, 201), one: range(10, 19)})
    assert some.rdd.getNumPartitions() == 9


def test_small_batches_have_the_same_rows(spark: SparkSession, store: Filled) -> None:
    assert rows(read(spark, store, ledger=store.ids[0], batchBytes="200")) == expected(store.ledgers(0))


def test_payloads_can_be_left_out(spark: SparkSession, store: Filled) -> None:
    frame = read(spark, store, ledger=store.ids[0], payload="false")
    assert frame.columns == ["ledger_id", "entry_id", "length"]
    assert {(row.entry_id, row.length) for row in frame.collect()} == {
        (entry, len(payload(store.ids[0], entry))) for entry in range(300)
    }


def test_a_schema_picks_columns(spark: SparkSession, store: Filled) -> None:
    reader = spark.read.format("pybk").options(**store.options, ledger=store.ids[0])
    frame = reader.schema("length BIGINT, custom_metadata MAP<STRING, BINARY>").load()
    assert frame.columns == ["length", "custom_metadata"]
    assert frame.count() == 300
    assert frame.first()["custom_metadata"] == {"shop": b"\x00\x01"}  # type: ignore[index]
    with pytest.raises(Exception, match="UsageError: the schema has column length as int; it is bigint"):
        reader.schema("length INT").load().count()


def test_an_empty_ledger_has_no_rows(spark: SparkSession, store: Filled) -> None:
    assert rows(read(spark, store, ledger=store.ids[3])) == set()
    assert rows(read(spark, store, ledgerType="nobody's", allowMissing="true")) == set()


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("entry_id >= 250 AND ledger_id IN (0, 2)", lambda each, entry, _: entry >= 250 and each != 1),
        ("entry_id < 5 OR entry_id = 299", lambda _, entry, __: entry < 5 or entry == 299),
        ("entry_id IN (3, 4, 100, 9999) AND length > 5", lambda _, entry, size: entry in (3, 4, 100) and size > 5),
        ("ledger_id > 0 AND ledger_id != 2 AND entry_id <=> 7", lambda each, entry, _: (each, entry) == (1, 7)),
        ("ledger_id = 1 AND ledger_id = 2", lambda *_: False),
        ("entry_id IS NULL", lambda *_: False),
        ("payload IS NOT NULL AND entry_id = 9 AND ledger_id < 99999999999", lambda _, entry, __: entry == 9),
    ],
)
def test_filters_leave_the_same_rows_pushed_or_not(
    spark: SparkSession, store: Filled, condition: str, wanted: Callable[[int, int, int], bool]
) -> None:
    assert store.ids[:3] == [0, 1, 2]
    every = expected(store.ledgers(0, 1, 2))
    found = []
    for on in (False, True):
        with pushing(spark, on):
            found.append(rows(read(spark, store, ledgers="0-3").where(condition)))
    assert found[0] == found[1]
    assert found[0] == {(each, entry, data) for each, entry, data in every if wanted(each, entry, len(data))}


def test_pushed_filters_save_reading(spark: SparkSession, store: Filled) -> None:
    """What is left out is not even planned."""
    with pushing(spark, True):
        frame = read(spark, store, ledgers="0-2", entriesPerPartition=10).where("ledger_id = 1 AND entry_id < 50")
        assert "Filter (" not in frame._jdf.queryExecution().executedPlan().toString()
        assert frame.rdd.getNumPartitions() == 5
        assert rows(frame) == expected({1: range(50)})


def test_the_first_entries_are_taken_before_filters_pushed_or_not(spark: SparkSession, store: Filled) -> None:
    for on in (False, True):
        with pushing(spark, on):
            assert rows(read(spark, store, ledger=0, maxEntries=20).where("entry_id >= 15")) == expected(
                {0: range(15, 20)}
            )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ledger": "0", "maxEntrys": "5"}, "did you mean maxEntries"),
        ({"ledger": "77"}, "ledger 77 was deleted or never existed.*failOnDataLoss=false"),
        ({"ledgers": "0,77,3-9"}, "ledger 77 was deleted"),
        ({"ledgerType": "order"}, "has type 'order'; there are orders, ...; option allowMissing=true waits for types"),
        ({"ledger": "0", "path": "/nowhere"}, "no directory /nowhere"),
    ],
)
def test_what_cannot_be_read_is_refused_at_analysis(
    spark: SparkSession, store: Filled, options: dict[str, str], said: str
) -> None:
    with pytest.raises(Exception, match=f"(?s){said}"):
        read(spark, store, **options)


def test_an_option_of_streams_is_refused_when_a_batch_is_planned(spark: SparkSession, store: Filled) -> None:
    with pytest.raises(Exception, match="maxEntriesPerTrigger is not one of a batch read"):
        read(spark, store, ledger=0, maxEntriesPerTrigger=5).count()


def test_a_wrong_password_raises(spark: SparkSession, store: Filled) -> None:
    with pytest.raises(Exception, match="UnauthorizedError: the password is not that of ledger 0") as refused:
        read(spark, store, ledger=0, passwordFile=store.wrong).count()
    assert "another" not in str(refused.value)


def test_a_cluster_is_not_read_without_its_secret(spark: SparkSession, cluster: tuple[Inside, Filled]) -> None:
    with pytest.raises(Exception, match="secret") as refused:
        read(spark, cluster[1], ledger=0, clusterSecretFile=cluster[1].wrong).count()
    assert "another" not in str(refused.value)


def test_deleted_ledgers(spark: SparkSession, cluster: tuple[Inside, Filled]) -> None:
    """One that is gone when tasks are planned, and one that goes before its task comes."""
    filled = cluster[1]
    with filled.manager.create_ledger(password=PASSWORD, ledger_type="doomed") as writer:
        writer.append(b"doomed")
    both = f"{filled.ids[0]},{writer.ledger_id}"
    planned = [read(spark, filled, ledgers=both, failOnDataLoss=bear) for bear in ("false", "true")]
    assert [frame.rdd.getNumPartitions() for frame in planned] == [1, 1]  # planned, and not read
    filled.manager.delete_ledger(writer.ledger_id, password=PASSWORD)
    assert rows(read(spark, filled, ledgers=both, failOnDataLoss="false")) == expected(filled.ledgers(0))
    with pytest.raises(Exception, match=f"ledger {writer.ledger_id} was deleted"):
        read(spark, filled, ledgers=both).count()
    assert planned[0].rdd.count() == 300
    with pytest.raises(Exception, match=f"ledger {writer.ledger_id} was deleted"):
        planned[1].rdd.count()
