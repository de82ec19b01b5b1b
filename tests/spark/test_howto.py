"""The how-to about Spark: its programs run as printed, in the session of the tests, and it has all options."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk import spark as jobs
from pybk.admin.cli import whole_parser
from pybk.errors import UsageError
from pybk.spark.connection import close_connections
from pybk.spark.log_sink.log_sink_options import log_sink_options
from pybk.spark.log_source.log_options import log_options
from pybk.spark.options import LOG_BATCH, LOG_READ, LOG_STREAM, WHERE, sink_options, source_options
from pybk.streams.log import Log
from pybk.streams.log_writer import NewRecord
from pybk.streams.wal import WriteAheadLog
from tests.cluster.inside import SECRET, Inside, inside
from tests.docs.walkthrough import DOCS, Block, blocks_of
from tests.spark.queries import run_to_end
from tests.spark.secret_files import secret_file
from tests.storage.real_store import open_quick

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAGE = "howto/spark.md"
PASSWORD = b"the password of all ledgers here"
URL = "zk://zk1:2181,zk2:2181/ledgers"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster", count=3) as cluster:
        yield cluster
        close_connections()


def programs() -> list[Block]:
    return [block for block in blocks_of(PAGE) if block.kind == "python"]


@pytest.mark.long
def test_the_programs_run_as_printed(
    spark: SparkSession, cluster: Inside, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, secret in (("secret", SECRET), ("password", PASSWORD)):
        (tmp_path / name).write_bytes(secret)
    with open_quick(tmp_path / "data") as store:
        for _ in range(10):
            with store.create_ledger(password=PASSWORD) as writer:
                writer.append(b"in a store")
        with WriteAheadLog.open(store, "app", password=PASSWORD) as wal:
            wal.append_many([b"begun", b"ready"])
    for name in ("purchases", "visits"):
        with Log.open(cluster.connect(), name, password=PASSWORD) as log, log.writer() as log_writer:
            log_writer.append(b"3 apples", key=b"ann", time_ns=10**18)
            log_writer.append(b"a pear", time_ns=10**18 + 1000)
    with cluster.connect().create_ledger(password=PASSWORD, ledger_type="orders") as writer:
        writer.append_many([b"one", b"two"])

    def own(text: str) -> str:
        text = text.replace("/etc/pybk/", f"{tmp_path}/").replace("/srv/", f"{tmp_path}/")
        return text.replace(URL, cluster.url)

    names: dict[str, Any] = {"spark": spark}
    [logs, writing_logs, reading, writing, retention, _, verifying] = programs()
    exec(own(logs.text), names)
    assert [row.text for row in names["customers"].orderBy("timestamp").collect()] == ["3 apples", "a pear"]
    assert names["following"].columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert [row.seq for row in names["states"].orderBy("seq").collect()] == [1, 2]
    exec(own(reading.text), names)
    assert [row.text for row in names["texts"].orderBy("entry_id").collect()] == ["one", "two"]
    assert sorted(row.ledger_id for row in names["some"].select("ledger_id").collect()) == [3, 5, 7, 8, 9]

    def write(text: str, query: str) -> Any:
        exec(own(text).replace(".start()", ".trigger(availableNow=True).start()"), names)
        return names[query]

    run_to_end(lambda: write(writing_logs.text, "copying"))
    with Log.open(cluster.connect(), "answers", password=PASSWORD, create=False) as log:
        answers = {record.data: (record.key, record.time_ns) for record in log.reader()}
    assert answers == {b"3 APPLES": (b"ann", 10**18), b"A PEAR": (None, 10**18 + 1000)}
    assert "copies" in Log.names(cluster.connect())
    run_to_end(lambda: write(writing.text, "query"))
    events: DataFrame = spark.read.format("pybk").options(**names["cluster"], ledgerType="events").load()
    found = [bytes(row.payload) for row in events.select("payload").collect()]
    assert found.count(b"one") == found.count(b"two") >= 2
    exec(own(retention.text), names)
    assert names["audit"].isStreaming
    capsys.readouterr()
    exec(own(verifying.text), names)
    assert capsys.readouterr().out.endswith("()\n")
    assert names["found"].sound


@pytest.mark.long
def test_the_right_side_of_kafka_and_delta_runs_as_printed(
    spark: SparkSession, cluster: Inside, tmp_path: Path
) -> None:
    manager = cluster.connect()
    for name in ("orders", "hours"):
        with Log.open(manager, name, password=PASSWORD) as log, log.writer() as writer:
            writer.append_many([NewRecord(b"apples", key=b"ann", time_ns=hour * 3600 * 10**9) for hour in range(3)])
    files = {"cluster-secret": SECRET, "password": PASSWORD}
    secret = {name: secret_file(tmp_path, value, name) for name, value in files.items()}
    names: dict[str, Any] = {
        "spark": spark,
        "cluster": {
            "metadataUri": cluster.url,
            "clusterSecretFile": secret["cluster-secret"],
            "passwordFile": secret["password"],
        },
        "frame": spark.createDataFrame([(b"a", b"pears")], "key BINARY, value BINARY"),
    }
    for block in blocks_of("howto/coming_from_kafka_and_delta.md"):
        if block.caption == "pybk":
            text = block.text.replace('"checkpoints/', f'"{tmp_path}/checkpoints/').replace(
                '"archive/', f'"{tmp_path}/archive/'
            )
            if ".start(" in text:
                run_to_end(partial(started, text.replace(".start(", ".trigger(availableNow=True).start("), names))
            else:
                exec(text, names)
    assert spark.read.parquet(f"{tmp_path}/archive/orders").count() == 3
    with Log.open(manager, "hours", password=PASSWORD) as log:
        counts = [json.loads(record.data) for record in log.reader(3)]
    assert [(each["item"], each["count"]) for each in counts] == [("apples", 1)]
    with Log.open(manager, "orders", password=PASSWORD) as log:
        assert [record.data for record in log.reader(3)] == [b"pears"]


def started(text: str, names: dict[str, Any]) -> Any:
    """Run a block whose last statement names a query, and return the query."""
    exec(text, names)
    last = ast.parse(text).body[-1]
    assert isinstance(last, ast.Assign)
    assert isinstance(last.targets[0], ast.Name)
    return names[last.targets[0].id]


def test_the_calls_and_the_command_have_arguments_that_exist() -> None:
    called = set()
    for block in programs():
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(jobs, node.func.id):
                call = {each.arg: None for each in node.keywords if each.arg}
                inspect.signature(getattr(jobs, node.func.id)).bind(*node.args, **call)
                called.add(node.func.id)
    assert called == {"configure", "start_bookies", "verify"}
    [command] = [block.text for block in blocks_of(PAGE) if block.kind == "sh"]
    assert whole_parser().parse_args(command.split()[1:]).parser.prog == "pybk spark verify"


Options = Callable[..., object]
"""What parses options."""


def table(heading: str, header: str) -> list[list[str]]:
    """Return the cells of the rows of the first table below a heading of the page that has a header."""
    text = (DOCS / PAGE).read_text(encoding="utf-8").partition(f"\n{heading}\n")[2].partition(f"\n{header}\n")[2]
    rows = takewhile(lambda line: line.startswith("|"), text.splitlines()[1:])
    return [[cell.strip() for cell in row.strip("|").split("|", 2)] for row in rows]


def options_in(cell: str) -> set[str]:
    """Return the options that a cell of a table names; values in brackets are left out."""
    names = set(re.findall(r"`([^`]+)`", re.sub(r"\([^#)]*\)", "", cell)))
    return names | set(WHERE) - {"path", "metadataUri"} if "(#secrets)" in cell else names


def options_of(parse: Options, given: dict[str, str], *, streaming: bool) -> set[str]:
    """Return the options that a read or a write takes, as the error of an unknown one names them."""
    with pytest.raises(UsageError) as refused:
        parse({**given, "q9": ""}, streaming=streaming)
    return set(str(refused.value).partition("there are ")[2].split(", "))


@pytest.mark.parametrize(
    ("heading", "parse", "given", "refused"),
    [
        ("### Options for logs", log_options, {"log": "orders"}, ()),
        ("### Options", source_options, {}, ()),
        ("## Writing logs", log_sink_options, {"topic": "orders"}, ("path",)),
    ],
)
def test_the_tables_have_all_options_and_no_others(
    heading: str, parse: Options, given: dict[str, str], refused: tuple[str, ...]
) -> None:
    batch, stream = (options_of(parse, given, streaming=streaming) - {*refused} for streaming in (False, True))
    if parse is log_options:
        batch -= set(LOG_STREAM)  # which have no effect there
    expected = {"all": batch & stream, "batch": batch - stream, "stream": stream - batch}
    found: dict[str, set[str]] = {kind: set() for kind in expected}
    for names, kind, _ in table(heading, "| option | of | meaning |"):
        found[kind] |= options_in(names)
    assert found == expected


def test_the_table_of_writes_of_ledgers_has_all_options_and_no_others() -> None:
    expected = {name for streaming in (True, False) for name in options_of(sink_options, {}, streaming=streaming)}
    rows = table("## Writing ledgers", "| Option | Meaning | Default |")
    assert {name for row in rows for name in options_in(row[0])} == expected - {"path"}


OF_KAFKA = (
    *("subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    *("startingOffsetsByTimestampStrategy", "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *("failOnDataLoss", "minPartitions", "maxRecordsPerPartition", "maxOffsetsPerTrigger", "minOffsetsPerTrigger"),
    *("maxTriggerDelay", "includeHeaders", "kafka.bootstrap.servers", "kafka.group.id", "kafka.security.protocol"),
    *("groupIdPrefix", "kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
)
"""The options of Spark's Kafka source, and one of its client."""


def test_each_option_of_kafkas_source_is_one_here_or_refused_with_what_to_do() -> None:
    known = {*LOG_READ, *LOG_BATCH, *LOG_STREAM}
    refused = {name for name in OF_KAFKA if name not in known}
    for name in refused:
        with pytest.raises(UsageError, match=f"option {name} does not apply to a log of pybk: .*(give|leave)"):
            log_options({"path": "/data", "log": "orders", name: "1"})
    rows = table("### Options for logs", "| option of Kafka | here |")
    named = {name for row in rows for name in options_in(row[0])}
    assert {name.replace("kafka.security.protocol", "kafka.…") for name in refused} == named
