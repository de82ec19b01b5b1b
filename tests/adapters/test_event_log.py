"""The log of events: like the library's recorder in memory, whatever the disk does and whenever it is opened again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from eventsourcing.persistence import (
    DataError,
    IntegrityError,
    OperationalError,
    ProcessRecorder,
    StoredEvent,
    Tracking,
)
from eventsourcing.popo import POPOProcessRecorder

from pybk import LedgerManager, WriteAheadLog
from pybk.adapters.eventsourcing import PybkApplicationRecorder, PybkProcessRecorder
from pybk.adapters.eventsourcing.event_log import CHECKPOINT_EVENTS, EventLog
from pybk.adapters.eventsourcing.event_record import decode_event, encode_event
from pybk.adapters.eventsourcing.tracking_log import TrackingLog
from pybk.errors import CorruptError, PybkError, StorageFailedError, StorageFullError, UnsupportedFormatError
from pybk.streams.appender import RecordFuture
from tests.forking import all_locks_held, in_child
from tests.internals import has_inserts_wait, inserts_in_flight
from tests.sampling import every, sample
from tests.simdisk import SimCrash, SimFileSystem
from tests.simdisk.faults import ErrorName
from tests.storage.real_store import stop_syncing
from tests.storage.store_harness import abandon, open_world
from tests.waiting import WAIT_S, wait_until

UPSTREAM = "upstream"


def event(originator: UUID | str, version: int, topic: str = "topic", state: bytes = b"state") -> StoredEvent:
    return StoredEvent(originator, version, topic, state)


def opened(manager: LedgerManager) -> EventLog:
    return EventLog(WriteAheadLog.open(manager, "events", insecure=True), None)


def process_recorder(manager: LedgerManager) -> tuple[PybkProcessRecorder, Callable[[], None]]:
    """Return a recorder and what closes it."""
    events = opened(manager)
    tracking = TrackingLog(WriteAheadLog.open(manager, "tracking", insecure=True), None)

    def close() -> None:
        events.close()
        tracking.close()

    return PybkProcessRecorder(events, tracking), close


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with LedgerManager.open(tmp_path / "store") as manager:
        yield manager


# ---- the record ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("originator", [UUID(int=7), "", "person-1", "ä" * 1000])
@pytest.mark.parametrize("tracking", [None, Tracking("ünder", 1 << 62)])
def test_an_event_comes_back_from_its_bytes(originator: UUID | str, tracking: Tracking | None) -> None:
    stored = event(originator, -3, "töpic", bytes(range(256)))
    found = decode_event(encode_event(stored, tracking))
    assert found.stored_event() == stored
    assert found.tracking == tracking


@pytest.mark.parametrize("wrong", [event("x" * 70_000, 1), event("x", 1 << 63), event("x", 1, "t" * 70_000)])
def test_an_event_that_does_not_fit_is_refused(wrong: StoredEvent, manager: LedgerManager) -> None:
    recorder = PybkApplicationRecorder(opened(manager))
    with pytest.raises(DataError, match="65535"):
        recorder.insert_events([event("x", 1), wrong])
    assert recorder.max_notification_id() is None


def test_a_state_that_is_too_long_is_refused(manager: LedgerManager) -> None:
    recorder = PybkApplicationRecorder(opened(manager))
    with pytest.raises(DataError, match="at most"):
        recorder.insert_events([event("x", 1, state=bytes(64 << 20))])
    assert recorder.insert_events([event("x", 1)]) == [1]


def test_bytes_that_are_no_event_are_refused() -> None:
    data = encode_event(event("x", 1))
    with pytest.raises(CorruptError):
        decode_event(data[:5])
    with pytest.raises(UnsupportedFormatError):
        decode_event(b"\2" + data[1:])


# ---- the model -------------------------------------------------------------------------------------------------------


def random_step(source: Random) -> tuple[list[StoredEvent], Tracking | None]:
    """Return an insert, which often conflicts with one before."""
    originators: list[UUID | str] = [UUID(int=1), UUID(int=2), "text", "other"]
    events = [
        event(source.choice(originators), source.randint(0, 40), source.choice(["a", "b"]), source.randbytes(9))
        for _ in range(source.randint(0, 3))
    ]
    tracking = Tracking(UPSTREAM, source.randint(1, 60)) if source.random() < 0.3 else None
    return events, tracking


def insert(recorder: ProcessRecorder, step: tuple[list[StoredEvent], Tracking | None]) -> object:
    events, tracking = step
    try:
        return recorder.insert_events(events, tracking=tracking)
    except IntegrityError:
        return "conflict"


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("seed", range(5))
def test_it_does_what_the_recorder_in_memory_does(manager: LedgerManager, seed: int) -> None:
    source, model = Random(seed), POPOProcessRecorder()
    recorder, close = process_recorder(manager)
    for _ in range(120):
        if source.random() < 0.05:
            close()
            recorder, close = process_recorder(manager)
        step = random_step(source)
        assert insert(recorder, step) == insert(model, step)
        low, high = sorted(source.choices(range(-1, 42), k=2))
        for originator in (UUID(int=1), "text"):
            mine = recorder.select_events(originator, gt=low, lte=high, desc=seed % 2 == 1, limit=None)
            theirs = model.select_events(originator, gt=low, lte=high)
            assert mine == sorted(theirs, key=lambda each: each.originator_version, reverse=seed % 2 == 1)
        start, stop, limit = source.choice([None, 1, 9]), source.choice([None, 30]), source.randint(0, 9)
        for topics in ([], ["a"]):
            mine = recorder.select_notifications(start, limit + 1, stop, topics, inclusive_of_start=seed % 2 == 0)
            theirs = model.select_notifications(start, limit + 1, stop, topics, inclusive_of_start=seed % 2 == 0)
            assert mine == theirs
        assert recorder.max_tracking_id(UPSTREAM) == model.max_tracking_id(UPSTREAM)
        assert recorder.max_notification_id() == model.max_notification_id()
    close()


# ---- many threads ----------------------------------------------------------------------------------------------------


def test_one_of_many_that_insert_the_same_version_wins(manager: LedgerManager) -> None:
    recorder = PybkApplicationRecorder(opened(manager))

    def attempt(number: int) -> int:
        won = 0
        for version in range(1, 41):
            try:
                recorder.insert_events([event("one", version, state=b"%d" % number), event(f"{number}", version)])
                won += 1
            except IntegrityError:
                pass
        return won

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 40
    notifications = recorder.select_notifications(None, 1000)
    assert [each.id for each in notifications] == list(range(1, 81))
    for shared, own in zip(notifications[::2], notifications[1::2], strict=True):  # inserts do not interleave
        assert (shared.originator_id, own.originator_id) == ("one", shared.state.decode())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_it_while_a_thread_of_its_parent_writes_the_index(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = opened(manager)
    events.insert([event("one", 1)])
    monkeypatch.setattr("pybk.adapters.eventsourcing.event_log.CHECKPOINT_EVENTS", 1)
    go = stop_syncing(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        inserting = pool.submit(events.insert, [event("one", 2)])
        wait_until(lambda: inserts_in_flight(events))
        closing = pool.submit(events.close)
        wait_until(lambda: has_inserts_wait(events))
        in_child(events.close)
        go.set()
        assert inserting.result(WAIT_S) == [2]
        closing.result(WAIT_S)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_position_that_a_thread_of_its_parent_records(
    manager: LedgerManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, close = process_recorder(manager)
    insert, begun, go = TrackingLog.insert, threading.Event(), threading.Event()

    def slow(self: TrackingLog, tracking: Tracking) -> None:
        begun.set()
        assert go.wait(WAIT_S)
        insert(self, tracking)

    def in_the_child() -> None:
        monkeypatch.setattr(TrackingLog, "insert", insert)
        with pytest.raises(OperationalError, match="fork"):
            recorder.insert_tracking(Tracking(UPSTREAM, 2))

    monkeypatch.setattr(TrackingLog, "insert", slow)
    with ThreadPoolExecutor(1) as pool:
        inserting = pool.submit(recorder.insert_tracking, Tracking(UPSTREAM, 1))
        assert begun.wait(WAIT_S)
        in_child(in_the_child)
        go.set()
        inserting.result(WAIT_S)
    assert recorder.max_tracking_id(UPSTREAM) == 1
    close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_the_positions(manager: LedgerManager) -> None:
    recorder, close = process_recorder(manager)

    def in_the_child() -> None:
        with pytest.raises(OperationalError, match="fork"):
            recorder.insert_tracking(Tracking(UPSTREAM, 1))

    with all_locks_held():
        in_child(in_the_child)
    recorder.insert_tracking(Tracking(UPSTREAM, 1))
    close()


def test_a_subscriber_sees_every_notification_in_order(manager: LedgerManager) -> None:
    recorder = PybkApplicationRecorder(opened(manager))

    def work(number: int) -> None:
        for version in range(50):
            recorder.insert_events([event(f"{number}", version), event(f"{number}", version + 1000)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with recorder.subscribe() as subscription:
        for thread in threads:
            thread.start()
        seen = [next(subscription).id for _ in range(400)]
    for thread in threads:
        thread.join()
    assert seen == list(range(1, 401))


# ---- restarts --------------------------------------------------------------------------------------------------------


def fill(events: EventLog, count: int) -> None:
    """Insert events of 100 originators."""
    for first in range(0, count, 1000):
        events.insert([event(UUID(int=number % 100), number) for number in range(first, first + 1000)])


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("index", ["whole", "of another version"])
def test_a_restart_reads_the_index_and_what_came_after(manager: LedgerManager, index: str) -> None:
    events = opened(manager)
    fill(events, CHECKPOINT_EVENTS + 5000)
    events.close()
    with WriteAheadLog.open(manager, "events", insecure=True) as wal:
        assert [each.lsn for each in wal.checkpoints()] == [CHECKPOINT_EVENTS]
        assert wal.first_lsn() == 1
        if index != "whole":
            with wal.checkpoint(truncate=False) as file:
                file.write(b"an index of another version")
    events = opened(manager)
    assert events.last() == CHECKPOINT_EVENTS + 5000
    for version in (0, 700, CHECKPOINT_EVENTS, CHECKPOINT_EVENTS + 4900):
        with pytest.raises(IntegrityError):
            events.insert([event(UUID(int=0), version)])
    assert len(events.of_originator(UUID(int=5), None, None, desc=False, limit=None)) == CHECKPOINT_EVENTS // 100 + 50
    [newest] = events.of_originator(UUID(int=99), None, None, desc=True, limit=1)
    assert newest.originator_version == CHECKPOINT_EVENTS + 4999
    events.close()


def test_positions_without_events_do_not_pile_up(manager: LedgerManager, monkeypatch: pytest.MonkeyPatch) -> None:
    records = 500
    monkeypatch.setattr("pybk.adapters.eventsourcing.tracking_log.CHECKPOINT_RECORDS", records)
    recorder, close = process_recorder(manager)
    recorder.insert_events([event("x", 1)], tracking=Tracking("other", 7))
    for number in range(1, records + 11):
        recorder.insert_tracking(Tracking(UPSTREAM, number))
    assert recorder.max_notification_id() == 1
    close()
    with WriteAheadLog.open(manager, "tracking", insecure=True) as wal:
        assert len(wal) == 10
    recorder, close = process_recorder(manager)
    assert (recorder.max_tracking_id(UPSTREAM), recorder.max_tracking_id("other")) == (records + 10, 7)
    close()


# ---- logs and disks that fail ----------------------------------------------------------------------------------------

STEPS = 25

# Logs that the crash left are closed in threads, in which the machine is stopped, too.
ON_A_STOPPED_MACHINE = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Acknowledged:
    """What a workload was answered."""

    def __init__(self) -> None:
        self.done: list[tuple[Sequence[StoredEvent], Tracking | None]] = []
        self.unknown: list[tuple[Sequence[StoredEvent], Tracking | None]] = []
        """What is under way, at most one."""

    def work(self, recorder: PybkProcessRecorder, source: Random) -> None:
        """Insert; what fails is tried once more."""
        for number in range(STEPS):
            events = [event(f"{number}", version, state=source.randbytes(40)) for version in range(number % 4)]
            tracking = Tracking(UPSTREAM, number + 1) if number % 3 else None
            self.unknown.append((events, tracking))
            try:
                recorder.insert_events(events, tracking=tracking)
            except OperationalError:
                with suppress(IntegrityError):  # it was done after all
                    recorder.insert_events(events, tracking=tracking)
            self.done.append(self.unknown.pop())

    def check(self, recorder: PybkProcessRecorder) -> None:
        """Check that everything acknowledged is there once, what is unknown is there whole or not, and nothing else."""
        notifications = recorder.select_notifications(None, 10_000)
        assert [each.id for each in notifications] == list(range(1, len(notifications) + 1))
        states = [each.state for each in notifications]
        expected = [each.state for events, _ in self.done for each in events]
        assert states[: len(expected)] == expected
        maybe = [[each.state for each in events] for events, _ in self.unknown]
        assert states[len(expected) :] in ([], *maybe)
        tracked = [tracking.notification_id for _, tracking in self.done if tracking is not None]
        tried = [tracking.notification_id for _, tracking in self.unknown if tracking is not None]
        assert recorder.max_tracking_id(UPSTREAM) in {max(tracked, default=None), *tried}
        for events, _ in self.done:
            for each in events:
                assert each in recorder.select_events(each.originator_id)
                with pytest.raises(IntegrityError):
                    recorder.insert_events([each])


def run(fs: SimFileSystem, answered: Acknowledged) -> None:
    """Work on a disk until it stops or all is done, and check what can be read."""
    manager = open_world(fs)
    try:
        recorder, close = process_recorder(manager)
        with suppress(OperationalError):
            answered.work(recorder, Random(1))
            answered.check(recorder)
        close()
        manager.close()
    except BaseException:
        abandon(manager)
        raise


def check_after(fs: SimFileSystem, answered: Acknowledged) -> None:
    """Open what a disk holds, and check it."""
    manager = open_world(fs)
    recorder, close = process_recorder(manager)
    answered.check(recorder)
    assert recorder.insert_events([event("after", 1)]) is not None
    close()
    manager.close()


class Flaky(WriteAheadLog):
    """A log that refuses appends, or does them and answers that it does not know."""

    answers: Iterator[str] = iter(())

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.held, self.let_go = threading.Event(), threading.Event()

    def append_many_async(self, records: Iterable[bytes]) -> RecordFuture[range]:
        answer = next(self.answers)
        if answer == "refused":
            raise StorageFullError("no space")
        done = super().append_many_async(records)
        if answer == "done":
            return done
        if answer == "held":
            self.held.set()
            return Unknown(done, self.let_go)  # type: ignore[return-value]
        return Unknown(done)  # type: ignore[return-value]


def flaky(manager: LedgerManager) -> Flaky:
    wal = Flaky.open(manager, "events", insecure=True)
    assert isinstance(wal, Flaky)
    return wal


class Unknown:
    """The future of an append that happens, and of which this is not known."""

    def __init__(self, done: RecordFuture[range], let_go: threading.Event | None = None) -> None:
        self.done, self.let_go = done, let_go

    def result(self) -> range:
        if self.let_go is not None:
            assert self.let_go.wait(WAIT_S)
        raise StorageFailedError("it may have happened")


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(3))
def test_an_insert_that_failed_is_tried_again_and_done_once(manager: LedgerManager, seed: int) -> None:
    def answers(source: Random) -> Iterator[str]:
        while True:
            yield source.choice(["refused", "unknown"])
            yield "done"

    wal = flaky(manager)
    wal.answers = answers(Random(seed))
    tracking = TrackingLog(WriteAheadLog.open(manager, "tracking", insecure=True), None)
    recorder, answered = PybkProcessRecorder(EventLog(wal, None), tracking), Acknowledged()
    answered.work(recorder, Random(seed))
    wal.answers = repeat("done")
    answered.check(recorder)
    assert len(answered.done) == STEPS


def test_an_event_of_unknown_outcome_counts_when_one_after_it_is_durable(manager: LedgerManager) -> None:
    wal = flaky(manager)
    wal.answers = iter(["held", "done", "done"])
    recorder = PybkApplicationRecorder(EventLog(wal, None))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(recorder.insert_events, [event("x", 1)])
        wait_until(wal.held.is_set)
        assert recorder.insert_events([event("y", 1)]) == [2]
        wal.let_go.set()
        with pytest.raises(OperationalError):
            first.result()
    with pytest.raises(IntegrityError):
        recorder.insert_events([event("x", 1)])
    assert [each.originator_id for each in recorder.select_notifications(None, 10)] == ["x", "y"]
    assert len(recorder.select_events("x")) == 1


def test_an_originator_is_free_again_after_a_refusal(manager: LedgerManager) -> None:
    wal = flaky(manager)
    wal.answers = iter(["refused", "unknown", "done"])
    recorder = PybkApplicationRecorder(EventLog(wal, None))
    with pytest.raises(OperationalError) as refused:
        recorder.insert_events([event("x", 1), event("x", 2)])
    assert isinstance(refused.value.__cause__, StorageFullError)
    assert recorder.select_events("x") == []
    with pytest.raises(OperationalError):
        recorder.insert_events([event("x", 2)])
    with pytest.raises(IntegrityError):
        recorder.insert_events([event("x", 2)])
    assert recorder.insert_events([event("x", 1)]) == [2]
    assert [each.originator_version for each in recorder.select_events("x")] == [1, 2]


@pytest.mark.sampled
@ON_A_STOPPED_MACHINE
def test_nothing_acknowledged_is_lost_when_the_machine_stops_at_any_operation() -> None:
    whole = SimFileSystem(0)
    run(whole, Acknowledged())
    assert len(whole.operations) > 80, "the workload hardly touches the disk"
    for operation in sample("event log stops", range(0, len(whole.operations), every(3)), 3):
        fs, answered = SimFileSystem(operation), Acknowledged()
        fs.crash_at(operation)
        with suppress(SimCrash, PybkError):
            run(fs, answered)
        check_after(fs.crash() if operation % 2 else fs.kill(), answered)


@pytest.mark.sampled(one_in=2)
@ON_A_STOPPED_MACHINE
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_nothing_is_lost_or_done_twice_when_any_operation_fails(error: ErrorName) -> None:
    whole = SimFileSystem(0)
    run(whole, Acknowledged())
    for operation in sample(f"event log {error}", range(0, len(whole.operations), every(3)), 3):
        fs, answered = SimFileSystem(operation), Acknowledged()
        fs.fail_at(operation, error, forever=False)
        with suppress(PybkError):
            run(fs, answered)
        check_after(fs.crash() if operation % 2 else fs.kill(), answered)
