"""Writers of records to logs, called as Spark calls them: what is committed, once, and what is left of what failed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import ArrayType, StructType

from pybk.errors import (
    IllegalOperationError,
    LogLockedError,
    LogSealedError,
    MetadataUnreachableError,
    NoSuchLedgerError,
    NoSuchLogError,
    UnauthorizedError,
    UsageError,
)
from pybk.manager.append_future import AppendFuture
from pybk.spark.log_sink import adoption, log_writers, open_logs, task_segments
from pybk.spark.log_sink.adoption import LogCommitMessage
from pybk.spark.log_sink.log_sink_options import log_sink_options
from pybk.spark.log_sink.log_writers import REMEMBER_SECONDS, LogBatchWriter, LogStreamWriter
from pybk.spark.log_sink.new_records import Rows, TaskRows
from pybk.spark.log_sink.task_segments import FEW_BYTES, MESSAGE_BYTES
from pybk.spark.sink.upkeep import collect
from pybk.streams import detached_writer
from pybk.streams.detached_writer import DetachedLedger, DetachedRecords
from pybk.streams.list_record import QUERY_IDLE_SECONDS
from pybk.streams.log import Log
from tests.cluster.inside import SECRET
from tests.spark.log_sink.writes import LARGE, TO_LOGS, VALUES, Place, Stream, pickled, rows, write_batch
from tests.spark.log_source.logs import PASSWORD
from tests.spark.secret_files import secret_file
from tests.streams.test_list_pages import record_of


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing wait for another owner of a log."""
    monkeypatch.setattr(log_writers, "refuse_live_writer", lambda log: open_logs.refuse_live_writer(log, 0.0))
    monkeypatch.setattr(adoption, "COMMIT_SECONDS", 0.0)


def large(first: int, count: int) -> list[bytes]:
    return [b"%d " % number + bytes(LARGE) for number in range(first, first + count)]


def numbers(data: list[bytes]) -> list[int]:
    return [int(each.split()[0].rstrip(b"\0")) for each in data]


def check_nothing_else_is_left(place: Place, *names: str) -> None:
    assert place.ledgers() == place.listed(*names)


# ---- ledgers ---------------------------------------------------------------------------------------------------------


def test_few_records_of_many_tasks_become_one_ledger(place: Place) -> None:
    stream = Stream(place)
    for number in range(3):
        stream.batch(number, *([b"%d" % (number * 80 + task * 10 + row) for row in range(10)] for task in range(8)))
    assert numbers(place.data()) == list(range(240))
    assert len(place.listed()) == 3
    check_nothing_else_is_left(place)


def test_records_are_in_the_order_of_tasks_whichever_make_ledgers(place: Place) -> None:
    tasks = [[b"0", b"1"], [], large(2, 5), large(7, 3), [b"10"], [b"11"], large(12, 4), [b"16"]]
    Stream(place).batch(0, *tasks)
    assert numbers(place.data()) == list(range(17))
    assert len(place.listed()) == 3 + 3, "one for each large task, and for neighbours that are not"
    assert len(large(0, 3)) * LARGE > FEW_BYTES
    check_nothing_else_is_left(place)


def test_a_message_is_small_however_many_logs_a_task_writes_to(place: Place) -> None:
    names = [f"log {number}" for number in range(12)]
    place.create(*names)
    values = [(name, number) for name in names for number in large(0, 2)]
    stream = Stream(place, TO_LOGS)
    [message] = stream.write(0, values)
    assert isinstance(message, LogCommitMessage)
    sizes = [sum(len(record.data) for record in part.records) for part in message.parts]
    assert MESSAGE_BYTES // 2 < sum(sizes) <= MESSAGE_BYTES
    stream.commit(0, [message])
    assert all(numbers(place.data(name)) == [0, 1] for name in names)


@pytest.mark.parametrize("are_late", [False, True])
def test_a_task_keeps_little_however_many_logs_it_writes_to(
    place: Place, monkeypatch: pytest.MonkeyPatch, are_late: bool
) -> None:
    """Of late bookies, nothing is known to be durable without a wait."""
    names = [f"log {number}" for number in range(12)]
    place.create(*names)
    made: list[DetachedRecords] = []
    outstanding: Counter[int] = Counter()
    kept: list[int] = []
    begin, look, append, wait = DetachedRecords.__init__, TaskRows.of, DetachedLedger.append, DetachedLedger.wait

    def noted(self: DetachedRecords, ledger: DetachedLedger) -> None:
        made.append(self)
        begin(self, ledger)

    def appended(self: DetachedLedger, payloads: Sequence[bytes]) -> None:
        append(self, payloads)
        outstanding[id(self)] += sum(map(len, payloads))

    def waited(self: DetachedLedger) -> None:
        wait(self)
        del outstanding[id(self)]

    def before_each_batch(self: TaskRows, batch: pa.RecordBatch) -> list[Rows]:
        kept.append(outstanding.total() if are_late else sum(each.waiting_bytes for each in made))
        return look(self, batch)

    monkeypatch.setattr(DetachedRecords, "__init__", noted)
    monkeypatch.setattr(DetachedLedger, "append", appended)
    monkeypatch.setattr(DetachedLedger, "wait", waited)
    monkeypatch.setattr(TaskRows, "of", before_each_batch)
    monkeypatch.setattr(task_segments, "WAITING_BYTES", 6 * LARGE)
    if are_late:
        monkeypatch.setattr(detached_writer, "READY_MIN", 1)
        monkeypatch.setattr(AppendFuture, "done", lambda _: False)
    values = [(name, value) for value in large(0, 8) for name in names]
    Stream(place, TO_LOGS).batch(0, values)
    assert 4 * LARGE < max(kept) <= 6 * LARGE
    assert all(numbers(place.data(name)) == list(range(8)) for name in names)


def test_what_a_row_has_is_what_a_reader_and_a_subscription_get(place: Place) -> None:
    pair = StructType().add("key", "string").add("value", "binary")
    schema = StructType().add("key", "string").add("value", "string")
    schema = schema.add("headers", ArrayType(pair)).add("event_time", "timestamp").add("txid", "long")
    time = datetime(2026, 1, 1, tzinfo=UTC)
    headers = [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]
    with place.open() as log, log.subscribe("sub") as subscription:
        Stream(place, schema).batch(0, [("ann", "v", headers, time, 5), (None, "w", None, None, None)])
        first, second = place.records()
        assert subscription.read(0) == first
        assert subscription.read(0) == second
    assert (first.key, first.data, first.txid) == (b"ann", b"v", 5)
    assert first.headers == (("a", b"1"), ("a", b"2"))
    assert first.time_ns == int(time.timestamp()) * 10**9
    assert (second.key, second.data, second.headers, second.txid) == (None, b"w", (), None)
    assert second.time_ns > first.time_ns, "the time of the write"


# ---- once ------------------------------------------------------------------------------------------------------------


def test_a_batch_that_is_repeated_is_written_once(place: Place) -> None:
    stream = Stream(place)
    stream.batch(0, large(0, 4), [b"4"])
    for _ in range(2):  # the checkpoint lacks the commit, and Spark runs the tasks again
        stream.batch(1, large(5, 4), [b"9"])
        assert numbers(place.data()) == list(range(10))
        check_nothing_else_is_left(place)
    Stream(place).batch(2, [b"10"])
    assert numbers(place.data()) == list(range(11))


def test_a_driver_that_is_late_changes_nothing(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    late, other = Stream(place), Stream(place)
    late.batch(0, [b"0"])
    behind = late.write(1, large(1, 4))
    other.batch(1, large(1, 4))
    other.batch(2, [b"5"])
    late.commit(1, behind)
    assert "skips 1: another driver has the checkpoint" in caplog.text
    assert numbers(place.data()) == list(range(6))
    check_nothing_else_is_left(place)


@pytest.mark.parametrize("first", [0, 1])
def test_a_new_checkpoint_with_an_old_name_is_refused(place: Place, first: int) -> None:
    """Also if its first micro-batches have no rows, or as many as those that the log has."""
    stream = Stream(place, appId="app")
    stream.batch(0, [b"0"])
    stream.batch(0, [b"0"])
    stream.batch(1, [b"1"])
    new = Stream(place, query="new", appId="app")
    if first:
        new.batch(0, [])
    messages = new.write(first, large(7, 4), [b"8"])
    with pytest.raises(IllegalOperationError, match="of appId 'app' of query query, and this is query new: "):
        new.commit(first, messages)
    new.abort(first, messages)
    assert numbers(place.data()) == [0, 1]
    check_nothing_else_is_left(place)
    Stream(place, query="new", appId="another").batch(0, [b"2"])
    Stream(place, query="new").batch(0, [b"3"])
    stream.batch(2, [b"4"])
    assert numbers(place.data()) == [0, 1, 2, 3, 4]


def test_a_checkpoint_that_was_restored_skips_what_the_log_has(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    stream = Stream(place, appId="app")
    for number in (0, 1, 0, 1, 2):
        stream.batch(number, [b"%d" % number])
    assert numbers(place.data()) == [0, 1, 2]
    assert caplog.text.count("an older one was restored") == 1


def test_a_deleted_log_is_not_made_again_to_delete_what_is_left(place: Place) -> None:
    place.create("gone")
    stream = Stream(place, topic="gone", createTopics=True)
    stream.batch(0, [b"0"])
    messages, writer = stream.write(1, large(1, 4)), stream.writer()
    Log.delete(place.manager, "gone", password=PASSWORD)
    writer.abort(messages, 1)
    assert Log.names(place.manager) == ["orders"]


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_commit_whose_answer_is_lost_is_completed(
    place: Place, monkeypatch: pytest.MonkeyPatch, took_effect: bool
) -> None:
    adopt = Log.adopt

    def lost(*arguments: Any, **options: Any) -> Any:
        if took_effect:
            adopt(*arguments, **options)
        raise MetadataUnreachableError("gone")

    stream, tasks = Stream(place), (large(0, 4), [b"4"], large(5, 4))
    messages = stream.write(0, *tasks)
    with monkeypatch.context() as patched:
        patched.setattr(Log, "adopt", lost)
        with pytest.raises(MetadataUnreachableError):
            stream.commit(0, messages)
    stream.abort(0, messages)  # as Spark does
    assert numbers(place.data()) == (list(range(9)) if took_effect else [])
    check_nothing_else_is_left(place)
    Stream(place).batch(0, *tasks)
    assert numbers(place.data()) == list(range(9))
    check_nothing_else_is_left(place)


def test_a_driver_that_dies_between_two_logs_completes_the_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.create("clicks")
    adopt = Log.adopt
    tasks = [[("orders", each), ("clicks", each)] for each in large(0, 4)]

    def dying(log: Log, *arguments: Any, **options: Any) -> Any:
        if log.name == "orders":
            raise KeyboardInterrupt
        return adopt(log, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Log, "adopt", dying)
        with pytest.raises(KeyboardInterrupt):
            Stream(place, TO_LOGS).batch(0, *tasks)
    assert (numbers(place.data("clicks")), place.data()) == ([0, 1, 2, 3], [])
    Stream(place, TO_LOGS).batch(0, *tasks)
    assert numbers(place.data("clicks")) == numbers(place.data()) == [0, 1, 2, 3]


def test_what_was_aborted_is_deleted_and_what_was_committed_is_not(place: Place) -> None:
    stream = Stream(place)
    messages = stream.write(0, large(0, 4), large(4, 4))
    stream.abort(0, [None, messages[1]])
    stream.abort(0, [None])
    assert len(place.ledgers()) == 1
    stream.abort(0, messages)
    check_nothing_else_is_left(place)
    messages = stream.write(0, large(0, 4), [b"4"])
    stream.commit(0, messages)
    stream.abort(0, messages)
    assert numbers(place.data()) == list(range(5))
    check_nothing_else_is_left(place)


def test_a_commit_lacks_no_task(place: Place) -> None:
    stream = Stream(place)
    messages = stream.write(0, [b"0"], [b"1"])
    with pytest.raises(IllegalOperationError, match="1 of 2 partitions"):
        stream.commit(0, [messages[0], None])
    assert place.data() == []


def test_the_first_commit_of_a_day_sweeps_what_processes_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(place)
    monkeypatch.setattr(adoption, "DAY_NS", 1 << 62)
    stream.write(0, large(0, 4))  # its process dies
    stream.batch(0, [b"0"])
    stream.batch(1, [b"1"])
    assert len(place.ledgers() - place.listed()) == 1
    monkeypatch.setattr(adoption, "DAY_NS", 1)
    stream.batch(2, [b"2"])
    check_nothing_else_is_left(place)
    assert numbers(place.data()) == [0, 1, 2]


def test_a_collection_deletes_what_no_later_commit_sweeps(place: Place, tmp_path: Path) -> None:
    """Such as what a batch write left whose driver died; with an age, as it may be under way."""
    stream = Stream(place)
    stream.batch(0, large(0, 4))
    messages = stream.write(1, large(4, 4))
    place.create("clicks")
    Stream(place, TO_LOGS, query="another").write(0, [("clicks", each) for each in large(0, 4)])
    left = place.ledgers() - place.listed("orders", "clicks")
    assert len(left) == 2
    given: dict[str, Any] = {"cluster_secret": SECRET, "password": PASSWORD}
    assert collect(place.url, **given) == {}
    assert collect(place.url, **{**given, "password": b"another password"}, older_than=0.0) == {}
    found = collect(place.url, **given, older_than=0.0)
    assert found.keys() == {"query", "another"}
    assert {each for ledgers in found.values() for each in ledgers} == left
    check_nothing_else_is_left(place, "orders", "clicks")
    with pytest.raises(NoSuchLedgerError, match="write it again"):
        stream.commit(1, messages)
    stream.batch(1, large(4, 4))
    assert numbers(place.data()) == list(range(8))
    assert collect(place.url, **given, older_than=0.0) == {}


# ---- batch writes ----------------------------------------------------------------------------------------------------


def test_a_version_is_written_once_and_a_write_without_one_each_time(place: Place) -> None:
    for version in (3, 4, 4, 3):
        write_batch(place, [b"%d" % version], [], txnAppId="daily", txnVersion=version)
    assert place.data() == [b"3", b"4"]
    for _ in range(2):
        write_batch(place, [b"5"])
    assert place.data() == [b"3", b"4", b"5", b"5"]
    producers = dict(record_of(place.manager, "logs/orders").producers)
    assert producers.pop("daily").epoch == 4
    now_ns = max(each.time_ns for each in producers.values()) + int((QUERY_IDLE_SECONDS - REMEMBER_SECONDS) * 1e9)
    assert abs(now_ns - place.records()[-1].time_ns) < 3600 * 10**9, "they are forgotten after an hour"
    assert len(producers) == 2


def test_nothing_is_overwritten(place: Place) -> None:
    for writer, streaming in ((LogBatchWriter, False), (LogStreamWriter, True)):
        options = log_sink_options({**place.options, "topic": "orders"}, streaming=streaming)
        with pytest.raises(IllegalOperationError, match="logs are only appended to"):
            writer(options, VALUES, overwrite=True)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_a_live_writer_is_refused_before_the_first_task_and_at_the_commit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(place)
    messages = stream.write(0, large(0, 4))
    with place.open() as log, log.writer() as writer:
        with pytest.raises(LogLockedError, match=f"'orders' has a live writer .*process {os.getpid()}.*close it there"):
            stream.writer()
        monkeypatch.setattr(sys, "argv", ["daemon.py", log_writers.COMMITTING])
        with pytest.raises(LogLockedError, match=f"live writer .*process {os.getpid()}"):
            stream.commit(0, messages)
        writer.append(b"0")
    check_nothing_else_is_left(place)
    stream.batch(0, [b"1"])
    assert place.data() == [b"0", b"1"]


def test_a_sealed_log_is_refused_before_the_first_task_and_at_the_commit(place: Place) -> None:
    named, by_rows = Stream(place), Stream(place, TO_LOGS)
    messages = by_rows.write(0, [("orders", each) for each in large(0, 4)])
    with place.open() as log:
        log.seal()
    with pytest.raises(LogSealedError, match="'orders' was sealed, and takes no more records: name another log"):
        named.writer()
    with pytest.raises(LogSealedError, match="'orders' was sealed after record -1"):
        by_rows.commit(0, messages)
    assert place.ledgers() == set()


def test_an_unknown_log_is_refused_with_the_nearest_names_or_created(place: Place) -> None:
    with pytest.raises(NoSuchLogError, match=r"no log 'ordrs' in .*; there are orders; option createTopics=true"):
        Stream(place, topic="ordrs").writer()
    with pytest.raises(NoSuchLogError, match="no log 'ordrs'"):
        Stream(place, TO_LOGS).write(0, [("ordrs", b"0")])
    assert Log.names(place.manager) == ["orders"]
    Stream(place, TO_LOGS, createTopics=True, digestType="crc32c").batch(0, [("shop/a", b"0"), ("orders", b"1")])
    assert (place.data("shop/a"), place.data()) == ([b"0"], [b"1"])
    with place.open("shop/a") as log:
        assert log.settings().quorums == (1, 1, 1)
        assert log.settings().digest_type.name == "CRC32C"  # type: ignore[union-attr]


def test_another_password_is_refused(place: Place, tmp_path: Path) -> None:
    Stream(place).batch(0, [b"0"])
    wrong = secret_file(tmp_path, b"hush", "wrong")
    with pytest.raises(UnauthorizedError) as refused:
        Stream(place, passwordFile=wrong).writer()
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([b"0", b"1", None], "row 3 of partition 1: column value is null"),
        ([b"0", bytes(6 << 20)], r"row 2 of partition 1: the record has 6291456 bytes; it takes at most"),
        ([*large(0, 5), bytes(6 << 20)], "row 6 of partition 1: the record has 6291456 bytes"),
    ],
)
def test_a_row_that_is_no_record_is_named_and_nothing_is_written(place: Place, values: list[Any], said: str) -> None:
    stream = Stream(place)
    with pytest.raises(UsageError, match=said) as refused:
        stream.write(0, [b"0"], values)
    assert "\n" not in str(refused.value)
    assert place.ledgers() == set()
    assert place.data() == []


def test_no_secret_goes_to_tasks_or_comes_from_them(place: Place) -> None:
    stream = Stream(place)
    for value in (stream.writer(), stream.write(0, large(0, 4))):
        moved = pickled(value)
        assert PASSWORD not in moved
        assert SECRET not in moved


def test_a_stream_is_not_written_outside_of_one(place: Place) -> None:
    writer = Stream(place).writer()
    TaskContext._taskContext = None
    with pytest.raises(IllegalOperationError, match="tasks of a streaming query"):
        writer.write(iter([rows(VALUES, b"0")]))
