"""The backlog of streaming queries, as their progress shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import UnsupportedFormatError, UsageError
from pybk.spark import backlog, backlog_bytes
from pybk.spark.source.offsets import Offset
from tests.cluster.inside import Inside, inside
from tests.spark.log_source.logs import PASSWORD, Logs, password_file
from tests.spark.queries import run_to_end
from tests.spark.secret_files import cluster_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import StreamingQueryProgress


def source(end: Any, latest: Any, description: str = "PythonMicroBatchStream") -> dict[str, Any]:
    return {"description": description, "endOffset": end, "latestOffset": latest}


@pytest.mark.parametrize(
    ("end", "latest", "expected"),
    [
        ({"a": {"0": 3}, "b": {"0": 4}}, {"a": {"0": 10}, "b": {"0": 4}}, {"a": 7, "b": 0}),
        ({"a@0000beef": 3}, {"a@0000beef": 10}, {"a": 7}),
        ({"a@0000beef": 3}, {"a@0000cafe": 10}, {"a": 10}),  # made again
        ({}, {"a": {"0": 10}}, {"a": 10}),
        ({"of": {"0": 1}, "version": {"0": 2}}, {"of": {"0": 4}, "version": {"0": 2}}, {"of": 3, "version": 0}),
        ({"a": {"0": 5}}, {"a": {"0": 4}}, {"a": 0}),  # the end was seen late
        (Offset(at={7: 3}).to_json(), Offset(at={7: 5, 9: 1}, ended={8: 2}).to_json(), {7: 2, 8: 2, 9: 1}),
        (None, {"a": {"0": 10}}, {}),
        ({"a": {"0": 10}}, None, {}),
        ({"a": {"0": 3}}, {"a": {"0": 10}, ".backlogBytes": {"a": 700}}, {"a": 7}),
        ({"page": 3}, {"page": 10}, {}),  # another source in Python
    ],
)
def test_the_difference_of_two_offsets(end: Any, latest: Any, expected: dict[str | int, int]) -> None:
    assert backlog({"sources": [source(end, latest)]}) == expected
    assert backlog({"sources": [source(json.dumps(end), json.dumps(latest))]}) == expected


def test_the_bytes_are_those_that_the_source_told() -> None:
    ours = {"a": {"0": 3}}
    told = source(ours, {"a": {"0": 10}, ".backlogBytes": {"a": 700, "b": 0}})
    of_ledgers = Offset(at={7: 3}).to_json()
    others = [source({"page": 3}, {"page": 10}), source(of_ledgers, of_ledgers), source(ours, None)]
    assert backlog_bytes({"sources": [told, *others]}) == {"a": 700, "b": 0}
    assert backlog_bytes(None) == {}
    with pytest.raises(UsageError, match="backlogBytes=true"):
        backlog_bytes({"sources": [source(ours, {"a": {"0": 10}})]})


def test_other_sources_do_not_count() -> None:
    ours, kafka = {"a": {"0": 3}}, source({"t": {"0": 0}}, {"t": {"0": 9}}, "KafkaV2[Subscribe[t]]")
    more = [source(ours, {"a": {"0": end}}) for end in (5, 4)]
    assert backlog({"sources": [kafka, *more]}) == {"a": 2}
    assert backlog({"sources": []}) == backlog(None) == {}


def test_what_is_no_progress_is_refused() -> None:
    with pytest.raises(UsageError, match=r"it takes query\.lastProgress"):
        backlog({"source": []})
    later = {**Offset().to_json(), "version": 99}
    with pytest.raises(UnsupportedFormatError):
        backlog({"sources": [source(later, later)]})


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.mark.sampled(one_in=8, group="processes")
def test_queries_that_are_behind(spark: SparkSession, cluster: Inside, tmp_path: Path) -> None:
    """One of logs and one of ledgers, which read a part of what there is."""
    manager = cluster.connect()
    logs = Logs(manager)
    for name, count in (("orders", 30), ("returns", 10)):
        logs.append(name, [b"x"] * count)
        logs.roll(name)  # a reader may see the end of an open ledger late
    ledger = manager.create_ledger(password=PASSWORD, ledger_type="t")
    ledger.append_many([b"x"] * 25)
    ledger.close()
    given = {**cluster_options(cluster.url), "passwordFile": password_file(tmp_path)}

    def first(name: str, **options: str) -> StreamingQueryProgress:
        frame = spark.readStream.format("pybk").options(**given, **options).load()
        writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path / name))
        return run_to_end(writer.trigger(availableNow=True).start).recentProgress[0]

    given_logs = {"subscribe": "orders,returns", "startingOffsets": "earliest", "maxOffsetsPerTrigger": "12"}
    progress = first("logs", **given_logs, backlogBytes="true")
    assert progress["numInputRows"] == 12
    assert backlog(progress) == {"orders": 21, "returns": 7}
    [orders], [returns] = logs.sizes("orders"), logs.sizes("returns")
    assert backlog_bytes(progress) == {"orders": round(21 * orders / 30), "returns": round(7 * returns / 10)}
    with pytest.raises(UsageError, match="backlogBytes=true"):
        backlog_bytes(first("without", **given_logs))
    progress = first("ledgers", ledgerType="t", maxEntriesPerTrigger="10")
    assert backlog(progress) == {ledger.ledger_id: 15}
    logs.close()
