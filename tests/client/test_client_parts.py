"""Parts of a client by themselves: what a bookie sent, taken apart and checked, and what is due when."""

from __future__ import annotations

import gc
import heapq
import time
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from pybk.client import limbo_repair, replica_check
from pybk.client import writer as writer_module
from pybk.client.driver import WAIT_MS, Conversation, Driver
from pybk.client.follower import Followers
from pybk.client.limbo_repair import PAUSE_MAX_SECONDS, RETRY_SECONDS, LimboRepair
from pybk.client.reader import REPLY_BYTES_MAX
from pybk.client.remote_ledger import RemoteLedger
from pybk.client.replica_check import check_replica
from pybk.client.writer import Writing
from pybk.errors import ClosedError, LedgerDeletedError, MetadataUnreachableError, NoSuchLedgerError
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.ledger_metadata import LedgerState
from pybk.metrics import Metrics
from pybk.replication.entry_runs import whole
from pybk.replication.messages import (
    Effect,
    EntryRun,
    Event,
    MetadataUnreachable,
    MetadataWritten,
    UnderReplicated,
    Woken,
    WriteMetadata,
)
from pybk.replication.replica_check import ReplicaCheckMachine
from pybk.threads.group_commit import GroupCommit
from tests.replication.driving import LEDGER, bookie, metadata
from tests.replication.driving import entry as named
from tests.replication.driving import run as run_of
from tests.waiting import wait_until


def remote(**changes: Any) -> RemoteLedger:
    return RemoteLedger(replace(metadata(), **changes), 1, b"")


# ---- entries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "wrong"), [(1, None), (3, None), (1, 0), (3, 2), (3, 4)])
def test_without_a_key_entries_count_up_to_the_first_that_has_another_name(stride: int, wrong: int | None) -> None:
    names = [7 + number * stride for number in range(5)]
    entries = [named(entry_id + (number == wrong)) for number, entry_id in enumerate(names)]
    run = EntryRun(7, stride, array("q", map(len, entries)), (b"".join(entries),))
    part = remote().sound_part(run, whole(run))
    good = entries[:wrong]
    assert (part.first, part.stride, list(part.sizes)) == (7, stride, [len(each) for each in good])
    assert bytes(whole(part)) == b"".join(good)


@pytest.mark.parametrize("sizes", [[], [84, 0], [42, 41], [42, 43]])
def test_without_a_key_impossible_sizes_are_read_as_no_entries(sizes: list[int]) -> None:
    body = whole(run_of(0, 1))
    assert len(body) == 84
    part = remote().sound_part(EntryRun(0, 1, array("q", sizes), (body,)), body)
    assert list(part.sizes) == []


def test_entries_count_up_to_the_first_whose_digest_is_wrong() -> None:
    digest = entry_digest(DigestType.CRC32C, LEDGER)
    entries = [bytearray(digest.prefix(number, -1, 10 * number, b"x" * 10) + b"x" * 10) for number in range(4)]
    entries[1][-1] ^= 1
    run = EntryRun(0, 1, array("q", map(len, entries)), (b"".join(entries),))
    ledger = remote(digest_type=DigestType.CRC32C)
    ledger.check_by(digest)
    part = ledger.sound_part(run, whole(run))
    assert bytes(whole(part)) == bytes(entries[0])
    assert list(part.sizes) == [len(entries[0])]


# ---- what is due when ------------------------------------------------------------------------------------------------


class WithoutEnd:
    """A conversation that is to be woken."""

    def __init__(self, wake_at_ns: int) -> None:
        self.wake_at_ns: int | None = wake_at_ns


def test_a_conversation_is_woken_at_its_time_and_not_before() -> None:
    conversation, dropped, told = WithoutEnd(50), WithoutEnd(50), list[object]()
    driver: Any = SimpleNamespace(wakes=[], pass_event=lambda *what: told.append(what))
    heapq.heappush(driver.wakes, (50, 0, ref(conversation)))
    heapq.heappush(driver.wakes, (50, 1, ref(dropped)))
    del dropped
    Driver.wake_up(driver, 49)
    assert told == []
    Driver.wake_up(driver, 50)
    assert told == [(conversation, Woken())]
    heapq.heappush(driver.wakes, (60, 2, ref(conversation)))
    Driver.wake_up(driver, 60)
    assert len(told) == 1, "it is to be woken at another time, or not at all"


class Pauses:
    """Links on which nothing arrives; they note how long each pause may be."""

    waiting = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def begin_turn(self) -> None:
        """Begin a turn."""

    def poll(self, timeout_ms: int) -> list[object]:
        """Note the pause, and end it at once."""
        self.asked.append(timeout_ms)
        return []


def test_a_step_pauses_until_the_next_wake_up_at_most() -> None:
    wire, conversation = Pauses(), WithoutEnd(0)
    driver = Driver(wire, Recorder(fails=0))  # type: ignore[arg-type]  # as much as is needed
    driver.group.stop()  # this thread drives
    driver.active(conversation, waited=True)  # type: ignore[arg-type]  # as much as is needed
    for wait_ms in (WAIT_MS // 2, 1000 * WAIT_MS, -5):
        conversation.wake_at_ns = at_ns = time.monotonic_ns() + wait_ms * 1_000_000
        driver.wakes = [(at_ns, 0, ref(conversation))]  # type: ignore[arg-type]  # as above
        driver.pass_event = lambda *_: None  # type: ignore[method-assign]
        driver.step()
    driver.workers.close()
    soon, late, due = wire.asked
    assert 0 <= soon <= WAIT_MS // 2
    assert late == WAIT_MS
    assert due == 0


CLOSED = ClosedError("this client is closed")


class Recorder:
    """A metadata store that notes what it is asked for, and fails at first."""

    def __init__(self, *, fails: int) -> None:
        self.asked: list[object] = []
        self._fails = fails

    def report_missing(self, _: RemoteLedger, effect: UnderReplicated) -> None:
        if self._fails:
            self._fails -= 1
            raise MetadataUnreachableError("not now")
        self.asked.append(effect)

    def write(self, _: RemoteLedger, effect: WriteMetadata) -> Event:
        self.asked.append(effect)
        return MetadataWritten(8)


@pytest.mark.parametrize("fails", [0, 2, 5])
def test_missing_entries_are_recorded_before_the_metadata_name_other_bookies(fails: int) -> None:
    store, told = Recorder(fails=fails), list[Event]()
    driver = Driver(SimpleNamespace(interrupt=lambda: None), store)  # type: ignore[arg-type]  # as much as is needed
    driver.group.stop()  # this thread drives

    def step(event: Event, _: int) -> list[Effect]:
        told.append(event)
        return []

    conversation = Reporting(driver, remote(), SimpleNamespace(step=step))
    missing, change = UnderReplicated(bookie(1), 3), WriteMetadata(metadata(), 7)
    driver.perform(conversation, [missing, change])
    tries = 1
    while not any(isinstance(event, MetadataWritten) for event in told):
        wait_until(lambda: driver.posted)
        driver.do_posted()
        if isinstance(told[-1], MetadataUnreachable):
            tries += 1
            driver.perform(conversation, [change])
    assert store.asked == [missing, change]
    assert tries <= 1 + fails
    driver.workers.close(wait=True)
    driver.reports.close(0)


def quiet_driver(store: Recorder) -> Driver:
    """Return a driver to which no bookie says anything."""
    wire = SimpleNamespace(interrupt=lambda: None, poll=lambda _: [])
    return Driver(wire, store)  # type: ignore[arg-type]  # as much as is needed


def test_reports_do_not_hold_up_the_metadata_of_other_ledgers() -> None:
    class Slow(Recorder):
        def report_missing(self, ledger: RemoteLedger, effect: UnderReplicated) -> None:
            wait_until(lambda: change in self.asked)
            super().report_missing(ledger, effect)

    store, change = Slow(fails=0), WriteMetadata(metadata(), 7)
    driver = quiet_driver(store)
    missing = [UnderReplicated(bookie(number), 3) for number in range(8)]
    driver.perform(Reporting(driver, remote(), SimpleNamespace(step=lambda *_: [])), list(missing))
    driver.perform(Reporting(driver, remote(), SimpleNamespace(step=lambda *_: [])), [change])
    wait_until(lambda: len(store.asked) == 9)
    assert store.asked == [change, *missing]
    driver.close(CLOSED, CLOSED)


class Reporting(Conversation[Any]):
    """A conversation that reports what bookies miss."""

    def take(self, effect: Effect) -> None:
        assert isinstance(effect, UnderReplicated)
        self.driver.report_missing(self, effect)


def limbo_of(ledger_id: int, **parts: Any) -> LimboRepair:
    """Return the repair of a bookie with one ledger in limbo, which does nothing by itself."""
    nobody: Any = None
    membership: Any = SimpleNamespace(metadata=SimpleNamespace(**parts))
    host: Any = SimpleNamespace(bookie=bookie(0), in_limbo=lambda: [ledger_id])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limbo_repair, "start_thread", lambda thread: None)
        return LimboRepair(nobody, membership, host)


def test_a_failed_repair_is_tried_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tried = [100.0], list[int]()

    def repair(ledger_id: int) -> bool:
        tried.append(ledger_id)
        return True

    limbo = limbo_of(LEDGER)
    monkeypatch.setattr(limbo, "try_repair", repair)
    monkeypatch.setattr(limbo_repair, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    pause = RETRY_SECONDS
    for attempts in range(1, 10):
        assert limbo.look()
        assert len(tried) == attempts
        clock[0] += pause - 0.5
        assert limbo.look()
        assert len(tried) == attempts, "too early"
        clock[0] += 0.5
        pause = min(2 * pause, PAUSE_MAX_SECONDS)


@pytest.mark.parametrize(("error", "lines"), [(NoSuchLedgerError, 1), (LedgerDeletedError, 0)])
def test_ledgers_that_stay_in_limbo_for_want_of_metadata_are_named_once(
    error: type[NoSuchLedgerError], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    def read_ledger(ledger_id: int) -> None:
        raise error

    repair = limbo_of(LEDGER, read_ledger=read_ledger)
    for _ in range(3):
        assert repair.look(), "it is in limbo still"
    told = f"1 ledgers stay in limbo at {bookie(0)}, as they have neither metadata nor a tombstone: {LEDGER};"
    assert caplog.text.count(told) == lines == len(caplog.records)
    assert not repair.pauses


def test_a_ledger_in_limbo_is_marked_once_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mark would cost a request, and be added again after a worker has removed it."""
    monkeypatch.setattr(limbo_repair, "WAIT_SECONDS", 0.0)
    marked: list[int] = []
    repair = limbo_of(
        LEDGER,
        read_ledger=lambda ledger_id: (metadata(), 1),
        mark_under_replicated=lambda ledger_id, bookie, first: marked.append(ledger_id),
    )
    for _ in range(3):
        repair.look()
    assert marked == [LEDGER]


def test_nothing_is_repaired_of_a_ledger_that_is_being_recovered() -> None:
    """The recovery may have fenced it at this bookie, also where the last fragment is of others."""
    recovered = metadata((3, 3, 2), (0, (0, 1, 2)), (10, (1, 2, 3)))
    lifted: list[tuple[int, bool]] = []
    filled: list[int] = []

    def repair(state: LedgerState, last: int = -1) -> bool:
        found = replace(recovered, state=state, last_entry_id=last)
        stands: Any = SimpleNamespace(
            membership=SimpleNamespace(metadata=SimpleNamespace(read_ledger=lambda ledger_id: (found, 1))),
            bookie=SimpleNamespace(
                bookie=bookie(0), end_limbo=lambda ledger_id, closed: lifted.append((ledger_id, closed))
            ),
            fill=lambda metadata, version, first: filled.append(first),
        )
        return LimboRepair.repair(stands, LEDGER)

    assert not repair(LedgerState.IN_RECOVERY)
    assert (filled, lifted) == ([], [])
    assert repair(LedgerState.OPEN)
    assert repair(LedgerState.CLOSED, 12)
    assert (filled, lifted) == ([0, 0], [(LEDGER, False), (LEDGER, True)])


@pytest.mark.parametrize(
    ("forcing", "deferred", "outstanding", "done", "waited"),
    [
        (0, False, 0, False, False),
        (0, False, 3, False, True),
        (0, True, 3, False, False),
        (1, True, 3, False, True),
        (0, False, 3, True, False),
        (1, True, 3, True, False),
    ],
)
def test_the_driver_runs_while_any_thread_waits_for_a_writer(
    forcing: int, deferred: bool, outstanding: int, done: bool, waited: bool
) -> None:
    told: list[bool] = []
    writing: Any = SimpleNamespace(
        forcing=[(9, None)] * forcing,
        ledger=SimpleNamespace(deferred=deferred),
        appender=SimpleNamespace(sent=[None] * outstanding),
        completion=SimpleNamespace(done=done),
        driver=SimpleNamespace(active=lambda writer, waited: told.append(waited)),
    )
    Writing.report_activity(writing)
    assert told == [waited]


@pytest.mark.parametrize("ended", [False, True])
def test_bookies_are_told_of_the_end_of_a_writer_only_if_it_did_not_end(
    monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    """One that has ended was reported, or is closed; a request for each closed ledger would be for nothing."""
    told: list[int] = []
    monkeypatch.setattr(writer_module, "leave_soon", lambda driver, ledger, bookies: told.append(ledger.ledger_id))
    nobody: Any = None
    group = GroupCommit(nobody, "test-group")
    driver: Any = SimpleNamespace(
        group=group, **dict.fromkeys(("formed", "attach", "ended", "call_as_leader"), lambda *_: None)
    )
    options: Any = {"straggler_bytes": 1, "patience_s": 0.0, "outstanding_bytes_max": 1, "on_span": None}
    writing = Writing(driver, remote(), Metrics(), **options)
    if ended:
        writing.end()
    del writing
    wait_until(lambda: gc.collect() >= 0 and told == ([] if ended else [LEDGER]))


def test_nothing_is_followed_after_the_end() -> None:
    nobody: Any = None
    following = Followers(nobody, nobody)
    following.end()
    ledger = remote()
    following.follow(ledger)
    assert ledger.followed is None


@pytest.mark.parametrize(
    ("entry_bytes", "window"), [(0, REPLY_BYTES_MAX), (1000, REPLY_BYTES_MAX // 1000), (REPLY_BYTES_MAX, 64)]
)
def test_a_replica_check_requests_as_many_entries_as_fit_an_answer(
    monkeypatch: pytest.MonkeyPatch, entry_bytes: int, window: int
) -> None:
    asked: list[int] = []

    def watched(*arguments: Any, **named: Any) -> Any:
        asked.append(named["window"])
        return ReplicaCheckMachine(*arguments, **named)

    monkeypatch.setattr(replica_check, "ReplicaCheckMachine", watched)
    driver: Any = SimpleNamespace(run=lambda conversation, begin: None)
    closed = replace(metadata(), state=LedgerState.CLOSED, last_entry_id=9, length=100)
    check_replica(driver, RemoteLedger(closed, 1, b""), 0, 0, 9, digest=None, entry_bytes=entry_bytes)
    assert asked == [window]
