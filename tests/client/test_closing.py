"""A client that closes: what is on record of bookies that were slow, and in which order its parts end."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pybk.client import driver
from pybk.client.append_queue import AppendQueue
from pybk.client.membership import Membership
from pybk.client.reader import LacReading
from pybk.client.remote_ledger import RemoteLedger
from pybk.client.wire import BookieWire
from pybk.client.writer import Writing
from pybk.errors import ClosedError, LedgerRecoveryError, NoSuchLedgerError, PybkError
from pybk.flags import WriteFlag
from pybk.manager.append_future import AppendFuture
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.threads.group_commit import Completion
from pybk.transport.client_links import Links
from tests.cluster.child import PATIENCE
from tests.cluster.inside import inside
from tests.cluster.processes import BookieProcess, Cluster, running
from tests.internals import cluster_backend_of, descriptor_of, digest_of, manager_of
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"correct horse"
ENTRIES = 200


@pytest.fixture(scope="module")
def three_bookies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("three"), 3) as cluster:
        yield cluster


@pytest.fixture
def slow(three_bookies: Cluster) -> Iterator[BookieProcess]:
    bookie = three_bookies.bookies["bookie-1"]
    yield bookie
    if bookie.alive:
        bookie.resume()
    else:
        bookie.start()


def write_while_stopped(client: LedgerManager, bookie: BookieProcess) -> int:
    """Write a ledger of which a bookie has one entry, and close it."""
    writer = client.create_ledger(password=PASSWORD, ensemble_size=3, write_quorum=3, ack_quorum=2)
    writer.append(b"entry 0")
    bookie.stop()
    for number in range(1, ENTRIES):
        writer.append(b"entry %d" % number)
    writer.close()
    return writer.ledger_id


def missing(client: LedgerManager, ledger_id: int) -> list[tuple[str, int]]:
    """Return who is on record as missing entries of a ledger, and from which one on."""
    records = cluster_backend_of(client).membership.metadata.marks(after=ledger_id - 1)
    return [(found.bookie.bookie_id, found.first_entry_id) for found in records if found.ledger_id == ledger_id]


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.parametrize("store_takes", [0.0, 0.6])
def test_entries_that_a_stopped_bookie_misses_are_on_record_when_the_client_has_closed(
    three_bookies: Cluster, slow: BookieProcess, store_takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = three_bookies.connect()
    membership = cluster_backend_of(client).membership
    report = membership.report_missing

    def report_slowly(*arguments: Any) -> None:
        time.sleep(store_takes)
        report(*arguments)

    monkeypatch.setattr(membership, "report_missing", report_slowly)
    ledger_id = write_while_stopped(client, slow)
    monkeypatch.setattr(driver, "REPORT_SECONDS", WAIT_S)
    client.close()
    ((bookie_id, first),) = missing(three_bookies.connect(), ledger_id)
    assert bookie_id == slow.name
    assert first <= 1
    slow.kill()
    slow.start()  # from now on it may also fetch them by itself

    other = three_bookies.connect()
    assert other.replicate(ledger_id).left == ()
    assert missing(other, ledger_id) == []


def test_a_bookie_that_answers_a_moment_late_is_not_recorded(
    three_bookies: Cluster, slow: BookieProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LATE_SECONDS", WAIT_S)
    for owner, name, value in PATIENCE:
        monkeypatch.setattr(owner, name, value)
    client = three_bookies.connect()
    ledger_id = write_while_stopped(client, slow)
    soon = threading.Timer(0.05, slow.resume)
    soon.start()
    client.close()
    soon.join()
    assert missing(three_bookies.connect(), ledger_id) == []


def test_a_client_whose_bookies_owe_nothing_closes_at_once(
    three_bookies: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LATE_SECONDS", WAIT_S)
    client = three_bookies.connect()
    with client.create_ledger(password=PASSWORD, ensemble_size=3) as writer:
        writer.append_many([b"entry"] * ENTRIES)
    time.sleep(0.1)  # the slowest of the three has answered, too; else it is waited for
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < WAIT_S


def test_no_watch_finds_the_links_of_a_client_half_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(None)
    here = threading.get_ident()  # threads of other clients close and wake, too
    written: list[int] = []
    closed: list[int] = []
    close, write = os.close, os.eventfd_write

    def close_and_wake(descriptor: int) -> None:
        """Close it, and do what a watch does that comes then: the number may be another file's."""
        close(descriptor)
        if threading.get_ident() == here:
            closed.append(descriptor)
            links.wake()

    def note(descriptor: int, value: int) -> None:
        if threading.get_ident() == here:
            written.append(descriptor)
        else:
            write(descriptor, value)

    monkeypatch.setattr(os, "eventfd_write", note)
    monkeypatch.setattr(os, "close", close_and_wake)
    links.close()
    links.wake()
    assert (len(closed), written) == (1, [])


def test_watches_end_before_the_links_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path, count=1) as cluster:
        client = cluster.connect()
        order: list[str] = []
        for owner in (Membership, BookieWire):

            def close(self: Any, name: str = owner.__name__, end: Callable[[Any], None] = owner.close) -> None:
                order.append(name)
                end(self)

            monkeypatch.setattr(owner, "close", close)
        wire = cluster_backend_of(client).wire
        client.close()
        assert order == ["Membership", "BookieWire"]
        wire.interrupt()  # of a watch that was under way


def test_calls_that_begin_while_the_client_closes_end_with_an_error(tmp_path: Path) -> None:
    """What threads that saw the client open begin when its links are closed: each gets ClosedError."""
    with inside(tmp_path / "cluster") as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1, write_flags=WriteFlag.DEFERRED_FORCE)
        writer.append(b"entry 0")
        other = client.create_ledger(password=PASSWORD, ensemble_size=1)
        backend, ledger, digest = cluster_backend_of(client), descriptor_of(other), digest_of(other)
        assert isinstance(ledger, RemoteLedger)
        client.close()

        def late() -> LedgerWriter:
            return LedgerWriter(backend, ledger, digest, client)

        for begin in (
            lambda: backend.driver.run(reading := LacReading(backend.driver, ledger, rank={}), reading.machine.start),
            lambda: late().append(b"x"),
            lambda: late().append_async(b"x").result(WAIT_S),
            lambda: late().append_many([b"x"]),
            lambda: backend.force_writing(writing_of(writer), 7),
        ):
            with pytest.raises(ClosedError):
                begin()


class Losing(deque[Callable[[], None]]):
    """Calls of which one is lost to an error in the main thread: that before which it takes so many others."""

    left = 0

    def popleft(self) -> Callable[[], None]:
        """Take a call; raise instead of returning the one that is lost."""
        call = super().popleft()
        self.left -= threading.current_thread() is threading.main_thread()
        if self.left == -1:
            self.left -= 1
            raise MemoryError
        return call


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("what", "before"), [("force", 0), *(("close", number) for number in range(4))])
def test_a_posted_call_that_an_error_loses_leaves_no_waiter(
    what: str, before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread drives, and has no memory as it takes the call that another thread waits for."""
    with inside(tmp_path / "cluster") as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1, write_flags=WriteFlag.DEFERRED_FORCE)
        writer.append_many([b"x"] * 10)
        writer.force()
        backend, drives, ended, failed = (
            cluster_backend_of(client),
            threading.Event(),
            threading.Event(),
            list[PybkError](),
        )
        driver, turn = threading.current_thread(), backend.driver.step

        def seen_turn() -> None:
            if threading.current_thread() is driver:  # the background may drive before
                drives.set()
            turn()

        monkeypatch.setattr(backend.driver, "step", seen_turn)
        calls: dict[str, Callable[[], object]] = {
            "close": client.close,
            "force": lambda: backend.force_writing(writing_of(writer), 99),
        }

        def other() -> None:
            drives.wait()
            try:
                calls[what]()
            except PybkError as error:
                failed.append(error)
            ended.set()

        waiting = threading.Thread(target=other)
        backend.driver.posted = losing = Losing(backend.driver.posted)
        losing.left = before
        waiting.start()
        with pytest.raises(MemoryError):
            backend.driver.group.wait(Completion())
        assert ended.wait(WAIT_S), "the thread that waits for the lost call is stranded"
        waiting.join()
        assert failed or what != "force", "entries that were not forced are said to be durable"


def test_a_ledger_begun_while_an_error_is_settled_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread creates it and appends when the writers that there were are given up."""
    with inside(tmp_path / "cluster", count=1) as cluster:
        client = cluster.connect()
        writers = [client.create_ledger(password=PASSWORD, ensemble_size=1)]
        give_up, begun = Writing.give_up, list[AppendFuture[int]]()

        def begin() -> None:
            writers.append(client.create_ledger(password=PASSWORD, ensemble_size=1))
            begun.append(writers[-1].append_async(b"x"))

        def give_up_beside(self: Writing, error: PybkError, under_way: PybkError) -> None:
            give_up(self, error, under_way)
            if not begun:
                other = threading.Thread(target=begin)
                other.start()
                other.join()

        monkeypatch.setattr(Writing, "give_up", give_up_beside)
        cluster_backend_of(client).driver.broken = True  # as an error in the middle of a turn leaves it
        with pytest.raises(LedgerRecoveryError):
            writers[0].append(b"x")
        wait_until(lambda: begun)  # the background thread may be the one that gives up
        assert begun[0].result(WAIT_S) == 0


def test_only_the_driver_fails_the_appends_of_a_ledger_that_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be finishing them just then."""
    with inside(tmp_path / "cluster", count=1) as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        driven, drivers = cluster_backend_of(client).driver, list[threading.Thread]()
        turn, fail, failed_by_driver = driven.step, AppendQueue.fail, list[bool]()

        def seen_turn() -> None:
            drivers.append(threading.current_thread())
            turn()
            drivers.pop()

        def seen_fail(self: AppendQueue, *errors: PybkError) -> None:
            failed_by_driver.append(drivers == [threading.current_thread()])
            fail(self, *errors)

        monkeypatch.setattr(driven, "step", seen_turn)
        monkeypatch.setattr(AppendQueue, "fail", seen_fail)
        client.delete_ledger(writer.ledger_id, password=PASSWORD)
        with pytest.raises(NoSuchLedgerError):
            writer.append(b"x")
        assert failed_by_driver == [True]


def test_a_signal_handler_may_delete_a_ledger_while_its_thread_drives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path / "cluster", count=1) as cluster:
        client = cluster.connect()
        writer, other = (client.create_ledger(password=PASSWORD, ensemble_size=1) for _ in range(2))
        driven, driver, deleted = cluster_backend_of(client).driver, threading.current_thread(), list[int]()
        turn = driven.step

        def turn_and_handler() -> None:
            if threading.current_thread() is driver and not deleted:
                deleted.append(other.ledger_id)
                client.delete_ledger(other.ledger_id, password=PASSWORD)
            turn()

        monkeypatch.setattr(driven, "step", turn_and_handler)
        for number in range(100):
            assert writer.append(b"x") == number
            if deleted:
                break
        assert deleted
        with pytest.raises(NoSuchLedgerError):
            other.append(b"x")


def test_entries_whose_outcome_is_not_unknown_were_not_appended(tmp_path: Path) -> None:
    """Appends that the close cut off: those that may be there say so."""
    with inside(tmp_path / "cluster", count=1) as cluster:
        for _ in range(3):
            client = cluster.connect()
            writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
            failed = append_while_closing(client, writer)
            with cluster.connect() as other, other.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
                last = reader.last_add_confirmed
                there = {entry.payload for entry in reader.read(0, last)} if last >= 0 else set()
            wrong = {payload for payload, error in failed.items() if not error.outcome_unknown and payload in there}
            assert wrong == set()


def test_the_outcome_of_a_batch_that_was_appended_in_part_is_unknown(tmp_path: Path) -> None:
    """The close comes while later pieces of it wait for admission."""
    with inside(tmp_path / "cluster", count=1) as cluster:
        client = cluster.connect(max_outstanding_bytes=16 << 20)
        writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
        errors = list[PybkError]()

        def append() -> None:
            try:
                writer.append_many([bytes(1 << 20)] * 60)
            except PybkError as error:
                errors.append(error)

        close_under(client, [threading.Thread(target=append)], lambda: writer.last_add_confirmed >= 0)
        assert [error for error in errors if not error.outcome_unknown] == []


def test_the_outcome_of_entries_staged_after_a_sent_part_of_their_batch_is_unknown(tmp_path: Path) -> None:
    with inside(tmp_path / "cluster", count=1) as cluster:
        writer = cluster.connect().create_ledger(password=PASSWORD, ensemble_size=1)
        writing, ledger = writing_of(writer), descriptor_of(writer)

        def stage_and_fail() -> Completion | None:
            commit = writing.appender.stage_entry(ledger, 0, b"prefix", b"x", 0, 6, wanted=True)
            writing.appender.fail(ClosedError("closed"), ClosedError("cut off", outcome_unknown=True))
            return commit

        # As the leader: another one would send the entry between the two calls, and could have it acknowledged.
        commit = writing.driver.group.lead(stage_and_fail)
        appender = writing.appender
        assert commit is not None
        assert commit.error is not None
        assert commit.error.outcome_unknown
        assert appender.error is not None
        assert not appender.error.outcome_unknown


def append_while_closing(client: LedgerManager, writer: LedgerWriter) -> dict[bytes, PybkError]:
    """Have threads append until the client is closed; return the error of each that failed, by payload."""
    failed: dict[bytes, PybkError] = {}

    def append(thread: int) -> None:
        for number in count():
            payload = b"%d of %d" % (number, thread)
            try:
                writer.append(payload)
            except PybkError as error:
                failed[payload] = error
                return

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(6)]
    close_under(client, threads, lambda: writer.last_add_confirmed > 20)
    assert len(failed) == len(threads), "each has ended"
    return failed


def close_under(client: LedgerManager, threads: list[threading.Thread], busy: Callable[[], object]) -> None:
    """Start threads, close the client once they are busy, and wait for their end."""
    for thread in threads:
        thread.start()
    wait_until(busy)
    client.close()
    for thread in threads:
        thread.join(WAIT_S)


def writing_of(writer: LedgerWriter) -> Writing:
    assert isinstance(descriptor_of(writer), RemoteLedger)
    return cluster_backend_of(manager_of(writer)).writing(descriptor_of(writer))


def test_readers_of_a_client_that_is_closed_meanwhile_end(tmp_path: Path) -> None:
    with inside(tmp_path / "cluster") as cluster:
        with cluster.connect() as client, client.create_ledger(password=PASSWORD, ensemble_size=1) as writer:
            writer.append_many([b"entry %d" % number for number in range(ENTRIES)])
        for _ in range(5):
            errors = read_while_closing(cluster.connect(), writer.ledger_id)
            assert [error for error in errors if not isinstance(error, ClosedError)] == []


def read_while_closing(client: LedgerManager, ledger_id: int) -> list[BaseException]:
    """Have threads read again and again, and close the client; return what they ended with."""
    errors: list[BaseException] = []
    reads = Counter[int]()

    def read(thread: int) -> None:
        with client.open_ledger(ledger_id, password=PASSWORD) as reader:
            try:
                while True:
                    reads[thread] += len(reader.read_batch(0))
            except BaseException as error:  # noqa: BLE001  # any error is handed to the test
                errors.append(error)

    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(3)]
    close_under(client, threads, lambda: len(reads) == len(threads))
    assert len(errors) == len(threads), "each has ended"
    return errors


def test_a_closed_client_has_closed_its_metadata_store(tmp_path: Path) -> None:
    with inside(tmp_path / "cluster", count=1) as cluster:
        client = cluster.connect()
        metadata = cluster_backend_of(client).membership.metadata
        assert len(metadata.list_bookies()) == 1
        client.close()
        with pytest.raises(ClosedError):
            metadata.list_bookies()
