"""Consumers in other processes: served over a socket, and what they held is handed out to others when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pybk import (
    ClosedError,
    ConsumerServer,
    IllegalOperationError,
    Log,
    LogEnd,
    LogWriter,
    NewRecord,
    RemoteConsumer,
    Subscription,
    TooManyRequestsError,
    UsageError,
)
from pybk.streams import remote_consumer
from pybk.streams.subscription import give_back_async
from tests.forking import in_child
from tests.internals import locked_elsewhere
from tests.paths import ROOT
from tests.test_fork import all_refused
from tests.waiting import wait_until

SOON = 60.0


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log.open(tmp_path / "store", "log", insecure=True) as log:
        yield log


@pytest.fixture
def writer(log: Log) -> LogWriter:
    writer = log.writer()
    writer.append_many([b"%d" % seq for seq in range(20)])
    return writer


@pytest.fixture
def subscription(log: Log, writer: LogWriter) -> Iterator[Subscription]:
    assert writer.last_seq == 19
    with log.subscribe("sub", start=LogEnd.EARLIEST, mode="shared", max_unacked=15) as subscription:
        yield subscription


@pytest.fixture
def path(tmp_path: Path, subscription: Subscription) -> Iterator[str]:
    path = str(tmp_path / "sub.sock")
    with ConsumerServer(subscription, path):
        yield path


def test_a_remote_consumer_does_what_a_local_one_does(path: str, subscription: Subscription) -> None:
    with RemoteConsumer.connect(path) as consumer:
        record = consumer.read(timeout=SOON)
        assert record is not None
        assert (record.seq, record.data) == (0, b"0")
        consumer.ack(record)
        assert subscription.first_unacked() == 1
        records = consumer.read_many(5)
        assert [each.seq for each in records] == [1, 2, 3, 4, 5]
        consumer.ack(records[1:], properties={"offset": 7})
        assert subscription.properties == {"offset": 7}
        assert consumer.nack(records[0]) == 1
        assert consumer.read() == records[0]
        assert consumer.redeliveries(1) == 1
        assert subscription.is_outstanding(1)
        assert not subscription.is_outstanding(2)
        assert len(consumer.read_many(100)) == 14
        with pytest.raises(TooManyRequestsError, match="15 records are outstanding"):
            consumer.read(timeout=0)
        with pytest.raises(UsageError, match="does not exist"):
            consumer.ack(20)
        with pytest.raises(UsageError):
            consumer.read_many(0)
        assert subscription.unacked_ranges() == [range(1, 2), range(6, 20)]


def test_records_come_whole(path: str, subscription: Subscription, writer: LogWriter) -> None:
    subscription.skip_all()
    given = NewRecord(os.urandom(100_000), txid=5, key=b"\xff", headers=[("h", b"\0"), ("h", b"")], time_ns=9)
    writer.append_many([given, b""])
    with RemoteConsumer.connect(path) as consumer:
        found = consumer.read_many(2, SOON)
    assert found[0][1:] == (given.data, 9, 5, b"\xff", (("h", b"\0"), ("h", b"")))
    assert found[1].data == b""
    assert found[1].key is None


def test_what_a_consumer_held_is_handed_out_when_it_leaves(path: str, subscription: Subscription) -> None:
    leaving, staying = RemoteConsumer.connect(path), RemoteConsumer.connect(path)
    held = leaving.read_many(15)
    leaving.ack(held[:5])
    rest = staying.read_many(9)
    staying.ack(rest)
    waiting = threading.Thread(target=lambda: staying.ack(staying.read_many(20)))
    waiting.start()
    leaving.close()
    waiting.join(SOON)
    wait_until(lambda: drained(staying) is not None and subscription.backlog() == 0)
    staying.close()


def drained(consumer: RemoteConsumer) -> int:
    """Acknowledge everything that there is."""
    count = 0
    while records := consumer.read_many(100, timeout=0):
        consumer.ack(records)
        count += len(records)
    return count


def test_a_consumer_that_leaves_while_it_waits_takes_nothing_along(
    path: str, subscription: Subscription, writer: LogWriter
) -> None:
    subscription.skip_all()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            connection.sendall(remote_frame(b'{"call":"read","most":1,"timeout":null}'))
    writer.append_many([b"x"] * 30)
    with RemoteConsumer.connect(path) as consumer:
        assert subscription.stats().outstanding <= 15
        found: list[int] = []
        while len(found) < 30:
            records = consumer.read_many(7, SOON)
            consumer.ack(records)
            found += [record.seq for record in records]
    assert set(found) == set(range(20, 50))


def remote_frame(header: bytes) -> bytes:
    return len(header).to_bytes(4, "little") + bytes(4) + header


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        remote_frame(b"[]"),
        remote_frame(b"{}"),
        remote_frame(b'{"call":"ack"}'),
        remote_frame(b'{"call":"read","most":1e999,"timeout":0}'),
        b"\x02\0\0\0\xff\xff\xff\xff{}",
        b"\0\0\0\x02\0\0\0\0{}",
    ],
)
def test_other_requests_end_the_connection(path: str, request_bytes: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(request_bytes)
        connection.settimeout(SOON)
        assert connection.recv(10) == b""
    with RemoteConsumer.connect(path) as consumer:
        assert consumer.read() is not None
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_request_that_is_too_long_is_refused_before_it_is_sent(path: str) -> None:
    with RemoteConsumer.connect(path) as consumer:
        assert consumer.read() is not None
        with pytest.raises(UsageError, match="at most 4194304: name fewer records"):
            consumer.ack(range(0, 1_000_000, 2))
        assert consumer.read() is not None


def test_a_consumer_does_not_wait_for_a_process_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_consumer, "GRACE_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sub.sock"))
        listener.listen()  # the kernel accepts for a process that is stopped
        consumer = RemoteConsumer.connect(tmp_path / "sub.sock")
        with pytest.raises(ClosedError, match="resume it if it is stopped") as caught:
            consumer.read(timeout=0.05)
        assert caught.value.outcome_unknown
        with pytest.raises(ClosedError):
            consumer.read(timeout=0)
        with pytest.raises(UsageError, match="timeout"):
            consumer.read(timeout=float("nan"))


@pytest.mark.parametrize("call", ["ack", "nack", "redeliveries"])
def test_no_call_waits_without_a_limit_for_a_process_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(remote_consumer, "ANSWER_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sub.sock"))
        listener.listen()
        consumer = RemoteConsumer.connect(tmp_path / "sub.sock")
        with pytest.raises(ClosedError, match=r"did not answer within 0\.05 seconds") as caught:
            getattr(consumer, call)(0)
        assert caught.value.outcome_unknown


def test_an_acknowledgement_does_not_wait_without_a_limit_for_a_read_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_consumer, "ANSWER_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(2) as threads:
        listener.bind(str(tmp_path / "sub.sock"))
        listener.listen()
        consumer = RemoteConsumer.connect(tmp_path / "sub.sock")
        connection, _ = listener.accept()
        with connection:
            reading = threads.submit(consumer.read)
            assert connection.recv(1), "the read is under way, and its process does not answer"
            acknowledging = threads.submit(consumer.ack, 0)
            try:
                with pytest.raises(TooManyRequestsError, match=r"another call .* nothing was done"):
                    acknowledging.result(SOON)
                assert not reading.done()
            finally:
                consumer.close()
        with pytest.raises(ClosedError):
            reading.result(SOON)


def test_a_forked_child_leaves_its_parents_connections_alone(subscription: Subscription, tmp_path: Path) -> None:
    path = tmp_path / "sub.sock"
    with ConsumerServer(subscription, path) as server, RemoteConsumer.connect(path) as consumer:
        assert consumer.read() is not None
        in_child(lambda: all_refused([lambda: consumer.read(0), lambda: consumer.ack(0), lambda: consumer.nack(0)]))
        in_child(consumer.close)
        in_child(server.close)
        consumer.ack(0)
        with RemoteConsumer.connect(path) as another:
            assert another.read() is not None


def forked(work: Callable[[], object]) -> int:
    """Return the process id of a forked child that does some work, and then waits to be killed."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(round(SOON))
            work()
            while True:
                signal.pause()
        finally:
            os._exit(1)
    return pid


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_the_end_of_a_consumer_is_noticed_while_a_child_of_it_lives_on(path: str, subscription: Subscription) -> None:
    read_end, write_end = os.pipe()

    def consume() -> None:
        consumer = RemoteConsumer.connect(path)
        assert len(consumer.read_many(15, SOON)) == 15
        os.write(write_end, b"%d\n" % forked(lambda: None))

    consuming = forked(consume)
    with open(read_end, "rb") as pipe:
        grandchild = int(pipe.readline())
    killed(consuming)
    try:
        record = subscription.read(timeout=SOON)
        assert record is not None
        assert record.seq == 0
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(write_end)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_the_end_of_a_server_is_noticed_while_a_child_of_it_lives_on(tmp_path: Path) -> None:
    (read_end, write_end), (go_end, start_end) = os.pipe(), os.pipe()

    def serve() -> None:
        log = Log.open(tmp_path / "other", "log", insecure=True)
        log.writer().append(b"x")
        subscription = log.subscribe("sub", start=LogEnd.EARLIEST, mode="shared")
        server = ConsumerServer(subscription, tmp_path / "sub.sock")
        os.read(go_end, 1)
        os.write(write_end, b"%d\n" % forked(lambda: server))

    serving = forked(serve)
    consumer = RemoteConsumer.connect(tmp_path / "sub.sock", wait=SOON)
    assert consumer.read(SOON) is not None
    os.write(start_end, b"x")
    with open(read_end, "rb") as pipe:
        grandchild = int(pipe.readline())
    killed(serving)
    try:
        with pytest.raises(ClosedError, match="was closed: "):
            consumer.read(timeout=SOON)
        with pytest.raises(ClosedError, match="no subscription is served"):
            RemoteConsumer.connect(tmp_path / "sub.sock")
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for each in (write_end, go_end, start_end):
            os.close(each)


def test_the_socket_is_for_this_user_alone(path: str, subscription: Subscription, tmp_path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(UsageError, match="100 bytes"):
        ConsumerServer(subscription, tmp_path / ("x" * 100))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not a socket"):
        ConsumerServer(subscription, tmp_path / "file")
    left_behind = str(tmp_path / "old.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(left_behind)
    with ConsumerServer(subscription, left_behind), RemoteConsumer.connect(left_behind) as consumer:
        assert consumer.read() is not None
    with pytest.raises(ClosedError, match="no subscription is served"):
        RemoteConsumer.connect(left_behind)


def test_a_server_keeps_its_path_from_others_and_leaves_theirs_alone(
    path: str, subscription: Subscription, tmp_path: Path
) -> None:
    with pytest.raises(IllegalOperationError, match="served already"):
        ConsumerServer(subscription, path)
    first = ConsumerServer(subscription, tmp_path / "other.sock")
    (tmp_path / "other.sock").unlink()
    with ConsumerServer(subscription, tmp_path / "other.sock") as second:
        first.close()
        with RemoteConsumer.connect(second.path) as consumer:
            assert consumer.read(timeout=SOON) is not None


def test_an_exclusive_subscription_is_not_served(log: Log, tmp_path: Path) -> None:
    with log.subscribe("alone") as subscription, pytest.raises(IllegalOperationError, match="exclusive"):
        ConsumerServer(subscription, tmp_path / "sub.sock")


def test_a_server_that_ends_wakes_its_consumers(subscription: Subscription, tmp_path: Path) -> None:
    path = tmp_path / "sub.sock"

    async def run() -> None:
        async with ConsumerServer(subscription, path):
            consumer = await RemoteConsumer.connect_async(path)
            records = await consumer.read_many_async(100)
            waiting = asyncio.create_task(consumer.read_async())
        with pytest.raises(ClosedError) as caught:
            await waiting
        assert caught.value.outcome_unknown
        await consumer.close_async()
        assert subscription.nack(records) == len(records)
        assert len(await subscription.read_many_async(100)) == 15

    asyncio.run(run())


def read_now(consumer: RemoteConsumer) -> int:
    record = consumer.read(timeout=SOON)
    assert record is not None
    return record.seq


@pytest.fixture
def given_back(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What consumers that ended were asked to give back."""
    found: list[set[int]] = []

    async def noted(of: Subscription, held: Iterable[tuple[int, int]], *, delay: float = 0.0) -> int:
        seqs = list(held)
        count = await give_back_async(of, seqs, delay=delay)
        found.append({seq for seq, _ in seqs})
        return count

    monkeypatch.setattr(remote_consumer, "give_back_async", noted)
    return found


def test_what_others_acknowledged_is_forgotten(
    path: str, subscription: Subscription, given_back: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_consumer, "HELD_MAX", 5)
    with RemoteConsumer.connect(path) as consumer:
        subscription.ack(consumer.read_many(4))
        assert len(consumer.read_many(4)) == 4
    wait_until(lambda: bool(given_back))
    assert given_back == [{4, 5, 6, 7}]


def test_a_consumer_that_ends_gives_back_what_it_holds_now(
    path: str, subscription: Subscription, given_back: list[set[int]]
) -> None:
    with RemoteConsumer.connect(path) as holder:
        with RemoteConsumer.connect(path) as late:
            assert len(late.read_many(15)) == 15
            subscription.nack(range(10))  # as after a timeout
            assert [each.seq for each in holder.read_many(10)] == list(range(10))
        wait_until(lambda: bool(given_back))
        assert [each.seq for each in holder.read_many(15)] == list(range(10, 15))
        assert {subscription.redeliveries(seq) for seq in range(15)} == {1}
    wait_until(lambda: len(given_back) == 2)
    assert len(subscription.read_many(15, timeout=0)) == 15, "what it holds is given back"


def test_a_consumer_hands_back_only_what_it_holds_now(path: str, subscription: Subscription) -> None:
    with RemoteConsumer.connect(path) as late, RemoteConsumer.connect(path) as holder:
        assert read_now(late) == 0
        subscription.nack(0)
        assert read_now(holder) == 0
        assert late.nack(0) == 0
        assert subscription.redeliveries(0) == 1
        assert holder.nack(0) == 1
        assert read_now(late) == 0


@pytest.mark.usefixtures("writer")
def test_a_consumer_gives_nothing_back_after_a_rewind(path: str, subscription: Subscription) -> None:
    with RemoteConsumer.connect(path) as consumer:
        assert read_now(consumer) == 0
        subscription.rewind()
        assert subscription.read(timeout=0) is not None
        assert consumer.nack(0) == 0
        assert subscription.redeliveries(0) == 0


@pytest.mark.parametrize("asked_for", ["read_many", "nack", "redeliveries"])
def test_a_server_answers_while_a_request_waits_for_a_lock(
    path: str, subscription: Subscription, asked_for: str
) -> None:
    """A repair of the subscription's list, and a look at the log's end, hold it as long as bookies take."""
    with (
        RemoteConsumer.connect(path) as waiting,
        socket.socket(socket.AF_UNIX) as other,
        ThreadPoolExecutor() as threads,
    ):
        (record,) = waiting.read_many(1)
        calls: dict[str, tuple[Callable[[], int], int]] = {
            "read_many": (lambda: waiting.read_many(1)[0].seq, 1),
            "nack": (lambda: waiting.nack(record), 1),
            "redeliveries": (lambda: waiting.redeliveries(record), 0),
        }
        call, expected = calls[asked_for]
        with locked_elsewhere(subscription):
            answer = threads.submit(call)
            time.sleep(0.1)  # so that this request arrives first
            other.connect(path)
            other.sendall(remote_frame(b"{}"))
            assert other.recv(100) == b"", "the connection is ended"
            assert not answer.done()
        assert answer.result(SOON) == expected


def test_an_acknowledgement_costs_what_it_acknowledges(subscription: Subscription) -> None:
    class Ranges(list[range]):
        looked_at = 0

        def __iter__(self) -> Iterator[range]:
            for each in super().__iter__():
                Ranges.looked_at += 1
                yield each

    held = remote_consumer.Held(subscription)
    held.seqs = dict.fromkeys(range(9000), 1)
    held.discard(Ranges(range(seq, seq + 1) for seq in range(0, 4000, 2)))
    assert len(held.seqs) == 7000
    assert Ranges.looked_at == 2000
    held.discard([range(1 << 60)])
    assert held.seqs == {}


@pytest.mark.long
def test_persist_queue_136_processes_lose_nothing_when_some_are_killed(
    path: str, subscription: Subscription, writer: LogWriter
) -> None:
    writer.append_many([b"x"] * 2980)
    command = [sys.executable, "-m", "tests.streams.remote_consumer_child", path]
    children = [
        subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "src"}, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    lines: list[str] = []
    for child, count in zip(children[:2], (50, 200), strict=True):
        assert child.stdout is not None
        lines += [child.stdout.readline() for _ in range(count)]
        child.kill()
        lines += child.stdout.readlines()
    writer.seal()
    assert children[2].stdout is not None
    lines += children[2].stdout.readlines()
    for child in children:
        child.wait(SOON)
        assert child.stdout is not None
        child.stdout.close()
    assert subscription.backlog() == 0
    whole = [line.split() for line in lines if line.endswith("\n")]
    read = [int(words[1]) for words in whole if words[0] == "read"]
    acked = [int(words[1]) for words in whole if words[0] == "acked"]
    assert set(read) == set(range(3000))
    assert len(acked) == len(set(acked)), "a record was handed out again that was acknowledged"
    assert len(read) - 3000 <= 2, "each consumer that was killed held at most one record"
