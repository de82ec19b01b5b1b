"""Options of reads of logs: what is taken, and what is refused before anything is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import UsageError
from pybk.spark.log_source.log_options import Seqs, Times, log_options
from pybk.spark.options import selects_logs, source_options
from pybk.streams.list_record import ListKind
from pybk.streams.log_reader import LogEnd

STORE = {"path": "/data/store"}
ONE = {**STORE, "log": "orders"}


def test_a_read_with_nothing_but_what_it_needs() -> None:
    found = log_options({"PATH": "/data/store", "LOG": "shop/a,b"}, streaming=False)
    assert (found.kind, found.names, found.pattern) == (ListKind.LOG, ("shop/a,b",), None)
    assert (found.starting, found.ending) == (LogEnd.EARLIEST, LogEnd.LATEST)
    assert (found.columns, found.include_headers, found.fail_on_data_loss) == ("kafka", False, True)
    assert not found.allow_missing
    assert not found.backlog_bytes
    assert (found.min_partitions, found.max_records_per_partition, found.batch_bytes) == (None, None, 8 << 20)
    assert found.max_trigger_delay_s == 900
    assert log_options(ONE, streaming=True).starting is LogEnd.LATEST


@pytest.mark.parametrize(
    ("option", "kind", "names"),
    [
        ({"subscribe": "orders, clicks,orders"}, ListKind.LOG, ("clicks", "orders")),
        ({"subscribe": "orders,,clicks, "}, ListKind.LOG, ("clicks", "orders")),  # as Kafka's source has it
        ({"assign": '{"orders": [0], "clicks": [0]}'}, ListKind.LOG, ("clicks", "orders")),
        ({"wal": "app"}, ListKind.WAL, ("app",)),
        ({"subscribePattern": "or.*"}, ListKind.LOG, ()),
    ],
)
def test_logs_are_selected_by_name(option: dict[str, str], kind: ListKind, names: tuple[str, ...]) -> None:
    assert selects_logs({name.lower(): value for name, value in option.items()})
    assert not selects_logs({**STORE, "ledgerType": "orders"})
    found = log_options({**STORE, **option})
    assert (found.kind, found.names, found.pattern) == (kind, names, option.get("subscribePattern"))


def test_options_of_a_stream() -> None:
    given = {
        **ONE,
        "maxOffsetsPerTrigger": "10",
        "minOffsetsPerTrigger": "5",
        "maxTriggerDelay": "90s",
        "minPartitions": "4",
        "maxRecordsPerPartition": "1000",
        "includeHeaders": "true",
        "startingOffsets": '{"orders": {"0": -2}}',
        "startingOffsetsByTimestampStrategy": "latest",
    }
    found = log_options({name.lower(): value for name, value in given.items()}, streaming=True)
    assert (found.max_offsets_per_trigger, found.min_offsets_per_trigger, found.max_trigger_delay_s) == (10, 5, 90)
    assert (found.min_partitions, found.max_records_per_partition, found.include_headers) == (4, 1000, True)
    assert (found.starting, found.latest_if_no_match) == (Seqs({"orders": -2}), True)


@pytest.mark.parametrize(("text", "seconds"), [("250", 0.25), ("1 s", 1), ("15m", 900), ("2min", 120), ("1h", 3600)])
def test_delays_have_sparks_units(text: str, seconds: float) -> None:
    assert log_options({**ONE, "maxTriggerDelay": text}).max_trigger_delay_s == seconds


def test_a_time_counts_before_offsets_as_in_kafkas_source() -> None:
    both = {**ONE, "startingTimestamp": "5", "startingOffsetsByTimestamp": '{"orders": 6}', "startingOffsets": "latest"}
    assert log_options(both).starting == Times(5, {})
    del both["startingTimestamp"]
    found: Any = log_options(both).starting
    assert (found, found.of("orders")) == (Times(None, {"orders": 6}), 6_000_000)


def test_limits_of_micro_batches_have_no_effect_on_a_batch_read(caplog: pytest.LogCaptureFixture) -> None:
    assert log_options({**ONE, "maxOffsetsPerTrigger": "5"}, streaming=False).max_offsets_per_trigger == 5
    assert "maxOffsetsPerTrigger is of streaming reads" in caplog.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (STORE, "exactly one of subscribe, subscribePattern, assign, log, wal; given are none"),
        ({**ONE, "subscribe": "orders"}, "exactly one of .*; given are subscribe, log"),
        ({"log": "orders"}, "give either path.*of a table Spark keeps no options, so give them with each use"),
        ({**ONE, "ledger": "5"}, "option ledger is not one of a read of logs"),
        ({**ONE, "log": "a//b"}, "empty part"),
        ({**STORE, "subscribe": " ,"}, "names of logs, separated by commas"),
        ({**STORE, "subscribe": ""}, "names of logs, separated by commas"),
        ({**STORE, "subscribePattern": "or(der"}, "not a regular expression"),
        ({**STORE, "assign": '{"orders": [0, 1]}'}, r"a log is partition 0 of its topic, and not \[0, 1\]"),
        ({**STORE, "assign": "orders"}, r'JSON by log such as \{"orders": \[0\]\}'),
        ({**ONE, "kafka.bootstrap.servers": "h:9092"}, "does not apply to a log of pybk: give metadataUri"),
        ({**ONE, "kafka.security.protocol": "SSL"}, "a setting of Kafka's client"),
        ({**ONE, "kafka.group.id": "g"}, "the checkpoint of the query has its position"),
        ({**ONE, "groupIdPrefix": "g"}, "the checkpoint of the query has its position"),
        ({**ONE, "fetchOffset.numRetries": "3"}, "leave it out"),
        ({**ONE, "kafkaConsumer.pollTimeoutMs": "3"}, "leave it out"),
        ({**ONE, "startEntry": "3"}, "give startingOffsets"),
        ({**ONE, "maxEntriesPerTrigger": "3"}, "give maxOffsetsPerTrigger"),
        ({**ONE, "password": "hush"}, "option password is a secret itself.*give passwordFile"),
        ({**ONE, "includeHeader": "true"}, "did you mean includeHeaders"),
        ({**ONE, "columns": "pulsar"}, "takes kafka or pybk"),
        ({**ONE, "maxTriggerDelay": "a while"}, "such as 30s"),
        ({**ONE, "maxOffsetsPerTrigger": "0"}, "from 1"),
        ({**ONE, "maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "is 6, and maxOffsetsPerTrigger 5"),
        ({**ONE, "backlogBytes": "yes"}, "takes true or false"),
        ({**ONE, "subscription": "q"}, "only logs of a cluster have subscriptions of queries"),
        ({"metadataUri": "lmdb:///m", "wal": "app", "subscription": "q"}, "only logs of a cluster"),
        ({"metadataUri": "lmdb:///m", "log": "orders", "subscription": "q@1"}, "has an @"),
        ({**ONE, "startingOffsets": "first"}, '"orders": 123'),
        ({**ONE, "startingOffsets": "{}"}, "no logs"),
        ({**ONE, "startingOffsets": '{"orders": {"1": 5}}'}, "partition 0"),
        ({**ONE, "startingOffsets": '{"orders": true}'}, "not a number from -2"),
        ({**ONE, "startingOffsets": "[" * 100_000}, '"orders": 123'),
        ({**ONE, "startingOffsets": '{"clicks": 5}'}, "names clicks, and the read is of orders"),
        ({**ONE, "startingOffsetsByTimestamp": '{"orders": -1}'}, "not a number from 0"),
        ({**ONE, "startingTimestamp": "now"}, "whole number"),
        ({**ONE, "startingOffsetsByTimestampStrategy": "first"}, "takes error or latest"),
        ({**ONE, "endingOffsets": "earliest"}, "before which there is nothing"),
        ({**ONE, "endingOffsets": '{"orders": -2}'}, "before which there is nothing"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_done(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        log_options(options)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"])
def test_a_stream_has_no_end(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is not one of a streaming read of logs"):
        log_options({**ONE, name: "latest"}, streaming=True)


@pytest.mark.parametrize("text", ["latest", '{"orders": -1}'])
def test_a_batch_read_does_not_begin_at_the_end(text: str) -> None:
    with pytest.raises(UsageError, match="finds nothing"):
        log_options({**ONE, "startingOffsets": text}, streaming=False)


def test_options_of_logs_are_refused_for_ledgers() -> None:
    with pytest.raises(UsageError, match="minPartitions is not one of a read"):
        source_options({**STORE, "ledger": "5", "minPartitions": "3"})
    with pytest.raises(UsageError, match="to read logs one of subscribe"):
        source_options(STORE)


def test_the_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_bytes(b"word\n")
    assert log_options({**ONE, "passwordFile": str(tmp_path / "password")}).given.read().password == b"word"
