"""Ledger lists in a world of faults: writers that take over, roll, truncate, cut, seal and die at any step.

The steps of ``pybk.streams.ledger_list`` are performed here on models of the list's record and of ledgers. A ledger
acknowledges entries in order; once it is fenced it keeps those that it acknowledged, and as many after them as chance
has it. The record is changed by compare-and-set; an answer may be lost, and a change may take effect later.

In some seeds the log is renamed, by processes that ask no writer, while other logs come and go under the names that it
has left.

From ``LOSS_SEEDS`` on, ledgers of writers are lost, because too few bookies answer: they acknowledge nothing more.
Their writer recovers them, and appends what is not there to another ledger (rule T15); it appends transactions of
several records, too.

From ``PAGE_SEEDS`` on, the level is raised at some time, from when on records are of format 2: with pages of few
segments, and with bounds of subscriptions in a record of their own, whose changes are lost and late as those of the
list's record are. Changes of bounds fail while their owner continues.

From ``ADOPT_SEEDS`` on, drivers of queries commit detached ledgers as well, at the level that the record is raised to.
From ``MERGE_SEEDS`` on, mergers also merge closed segments. From ``CLASH_SEEDS`` on, the log is often cut, sealed and
swept meanwhile. From ``GIVE_UP_SEEDS`` on it is not, and another process gives up what drivers are committing.

``python -m tests.simulator.ledger_lists --seeds N [--seed S]`` runs seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, Final, NamedTuple

from pybk.errors import (
    IllegalOperationError,
    LogExistsError,
    LogFencedError,
    LogSealedError,
    NoSuchLedgerError,
    NoSuchLogError,
    PybkError,
    RewoundError,
    TruncateGuardError,
    UsageError,
)
from pybk.streams import ledger_list
from pybk.streams.ledger_list import (
    CONFLICT,
    LOST,
    UNKNOWN,
    CheckDetached,
    CloseLedger,
    CreateLedger,
    DeleteLedger,
    Found,
    MoveList,
    ReadBounds,
    ReadList,
    ReadPage,
    ReadShard,
    RecoverLedger,
    RecoverOwn,
    RemoveList,
    RemovePage,
    Shard,
    Step,
    Steps,
    SweepParts,
    SwitchTo,
    WriteBounds,
    WriteList,
    WritePage,
    WriteShard,
    Written,
)
from pybk.streams.list_record import (
    MERGES,
    PAGED_FORMAT,
    Bounds,
    Checkpoint,
    ListKind,
    ListRecord,
    Rows,
    Segment,
    SegmentEnd,
    decode_page,
    encode_page,
)
from tests.simulator.committers import QUERIES, Committers, Driver
from tests.simulator.committers import Written as WrittenLedger
from tests.simulator.mergers import KEPT_EVENTS, MERGERS, Merger, members_of, merge_of
from tests.simulator.subscribers import Subscriber, Subscribers

NAME: Final = "log"
NAMES: Final = (NAME, "other", "third")
UID: Final = bytes(16)
START_SEQ: Final = 1
EVENTS: Final = 1000
WRITERS: Final = 3
LOSS_SEEDS: Final = 1_000_000
PAGE_SEEDS: Final = 2_000_000
ADOPT_SEEDS: Final = 3_000_000
MERGE_SEEDS: Final = 4_000_000
CLASH_SEEDS: Final = 5_000_000
GIVE_UP_SEEDS: Final = 6_000_000


Change = WriteList | RemoveList | MoveList | WriteShard
Sweeping = SweepParts | RemovePage
Reading = ReadList | ReadPage | ReadBounds | ReadShard


class LogRecord(NamedTuple):
    """A record as its writer gave it."""

    generation: int
    seq: int
    value: object
    last: int
    """The last record of its transaction."""


class LedgerGoneError(Exception):
    """A ledger is not there."""


class LostAnswerError(PybkError):
    """A ledger operation failed, and nobody knows whether it was done."""


class ModelLedger:
    """A ledger: entries, how many of them are acknowledged, and whether it takes more."""

    def __init__(self, created: CreateLedger | WrittenLedger, uid: bytes) -> None:
        self.created = created
        self.uid = uid
        """That of the list that it was created for."""
        self.entries: list[LogRecord] = []
        self.acknowledged = 0
        self.closed = False
        self.lost = False
        """Whether its writer has ended because too few bookies answered."""
        self.recovering = ""
        """The process that has begun to recover it; empty for none."""

    def close(self, random: Random, *, by_writer: bool) -> None:
        """Establish the end."""
        if not self.closed:
            end = len(self.entries) if by_writer else random.randint(self.acknowledged, len(self.entries))
            del self.entries[end:]
            self.acknowledged = end
            self.closed = True

    def end(self) -> SegmentEnd:
        """Return what it holds."""
        whole = max((at for at, entry in enumerate(self.entries, 1) if entry.seq == entry.last), default=0)
        seqs = [entry.seq for entry in self.entries[:whole]]
        return SegmentEnd(seqs[0], seqs[-1], len(seqs)) if seqs else SegmentEnd(None, None, 0)


class Process:
    """One writer's process: an operation under way, and the records that it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = NAME
        """The name of the log that it operates on."""
        self.uid: bytes | None = None
        """The list that it owns; others of that name do not count."""
        self.target, self.moved = "", 0
        """The name that it gives the log, and how many names that had had before."""
        self.seen = UID
        """That of the list that it read last."""
        self.owned: ListRecord | None = None
        self.current = -1
        """The ledger that it appends to."""
        self.number = 0
        """The number of its segment."""
        self.next_seq = 0
        self.appended = 0
        self.pending: list[tuple[int, int, list[LogRecord]]] = []
        """Ledger, number of its entries up to there, and the records, of transactions that are not acknowledged."""
        self.fenced = False
        """Whether another has fenced the ledger that it appends to, and that was lost."""
        self.uploaded: tuple[int, Checkpoint] | None = None
        """A checkpoint whose blob is named in the record, and the epoch that named it."""
        """A checkpoint whose blob is written, and that is not listed yet."""
        self.steps: Steps[Any] | None = None
        self.what = ""
        self.answer: Any = None
        self.error: Exception | None = None
        self.driver: Driver | None = None
        """What it commits, if it is the driver of a query."""
        self.merger: Merger | None = None
        """What it merges, if it is a merger."""


def shown(value: Any) -> str:
    """Return a step or an answer as a line of the trace."""
    record = getattr(value, "record", None)
    if not isinstance(record, ListRecord):
        return str(value)
    segments = ", ".join(
        f"{each.number}:{each.ledger_id}[{each.first_seq}..{'' if each.is_open else each.last_seq}]"
        for each in record.segments
    )
    return (
        f"{type(value).__name__} v{value.version} epoch {record.epoch} generation {record.generation} "
        f"from {record.first_seq} to {record.end_seq}: {segments}; delete {record.pending_deletes}"
        f"{''.join(f'; {each.name} {each.uid} of epoch {each.epoch} from {each.seq}' for each in record.cursors)}"
    )


class World:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.faults = self.random.choice((0.0, 0.02, 0.1, 0.3))
        self.crashes = self.random.choice((0.0, 0.003, 0.02))
        self.clashes = CLASH_SEEDS <= seed < GIVE_UP_SEEDS
        self.rivalry = self.random.choice((0.01, 0.02, 0.03) if self.clashes else (0.003, 0.03, 0.3))
        self.lists: dict[str, Found] = {}
        """All records, by name."""
        self.versions = 0
        self.late: list[tuple[str, Change]] = []
        """Changes that may take effect yet, with the name that they change."""
        self.ledgers: dict[int, ModelLedger] = {}
        self.next_ledger = 100
        self.given: dict[tuple[int, int], object] = {}
        """Every record that was ever acknowledged."""
        self.log: dict[int, LogRecord] = {}
        """The acknowledged records that no cut dropped."""
        self.owners: dict[int, str] = {}
        self.processes = [Process(f"writer {number}") for number in range(WRITERS)]
        self.blobs: dict[int, int] = {}
        """The epoch of each blob's writer."""
        self.named_blobs: set[int] = set()
        """Blobs that a record named once."""
        self.cutting: dict[str, int] = {}
        self.losses = LOSS_SEEDS <= seed < PAGE_SEEDS
        self.assigned: dict[object, int] = {}
        """The number of each record, by its value."""
        self.trace: list[str] = []
        self.done: dict[str, int] = {}
        self.finishing = False
        self.subscribers = Subscribers(NAME, self.random, fail=seed >= PAGE_SEEDS) if seed % 3 == 1 else None
        """None in most seeds, because a log with subscriptions is not cut."""
        self.renamers = [Process("renamer 0"), Process("renamer 1")] if seed % 6 == 5 else []
        self.page_segments = self.random.choice((2, 3)) if seed >= PAGE_SEEDS else 0
        self.raised_at = self.random.randrange(EVENTS // 2) if seed >= PAGE_SEEDS else 0
        """The event before which the level is raised."""
        self.events = 0
        self.pages: dict[tuple[bytes, str], Rows] = {}
        """The pages of all lists, by uid and name."""
        self.shards: dict[str, Shard] = {}
        """Sets of bounds, which have one record each here, by name."""
        self.parts = 0
        """How many pages and sets there were."""
        self.committers = Committers(self.random) if seed >= ADOPT_SEEDS else None
        self.drivers = [driver_process(number) for number in range(len(QUERIES))] if seed >= ADOPT_SEEDS else []
        self.mergers = [merger_process(number) for number in range(MERGERS)] if seed >= MERGE_SEEDS else []
        self.discarders = [Process("discarder")] if seed >= GIVE_UP_SEEDS else []
        self.moved: list[str] = []
        """The names that the log got, in order."""
        self.others = 0
        """How many other logs there were."""

    @property
    def found(self) -> Found | None:
        """The record of the log, under whichever name."""
        found = [each for each in self.lists.values() if each.record.uid == UID]
        assert len(found) <= 1, "two records are of one log"
        return found[0] if found else None

    @property
    def log_name(self) -> str:
        """The name of the log."""
        return NAME if self.found is None else self.found.record.name

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Let everything happen; then take the log over without faults, and read it."""
        self.perform(ledger_list.create(NAME, ListKind.WAL, UID, START_SEQ))
        if self.mergers:
            self.late.clear()  # a creation that takes effect late would make the log again after it was renamed
        for _ in range(EVENTS):
            self.event()
            self.check()
        self.finish()

    def finish(self) -> None:
        """Take the log over, sweep, and read everything."""
        self.faults = 0.0
        self.finishing = True
        self.late.clear()
        for process in self.processes:
            self.crash(process)
        try:
            self.perform(ledger_list.take_over(self.log_name, lambda: 0))
        except LogSealedError:
            assert self.found is not None
            assert self.found.record.sealed
        self.check()
        assert self.found is not None
        for _ in range(2):
            if self.random.random() < 0.5:
                self.events += KEPT_EVENTS
                self.perform(ledger_list.release(self.log_name, self.events))
            if not self.found.record.sealed:
                epoch, generation = self.found.record.epoch, self.found.record.generation
                self.perform(ledger_list.truncate(self.log_name, epoch, generation, 0))
            self.perform(self.sweep())
        record = self.found.record
        parts = {name for uid, name in self.pages if uid == UID} | set(self.shards)
        assert parts <= ledger_list.named_parts(record), "a page or a set of bounds leaked"
        everything = list(self.read(record))
        assert len({entry.value for entry in everything}) == len(everything), "a record is there twice"
        read = {entry.seq: entry for entry in everything}
        for entry in everything:
            cut = entry.generation < record.generation
            assert cut or entry.last in read, f"the log has a part of the transaction of {entry}"
        assert sorted(read) == list(range(record.first_seq, record.end_seq)), "there are gaps"
        for seq, entry in self.log.items():
            if seq >= record.first_seq:
                assert read.get(seq) == entry, f"record {seq} was acknowledged as {entry}, and read as {read.get(seq)}"
        under_way = {each for each, query, epoch in self.detached() if not is_past(record, query, epoch)}
        listed = self.ledgers_of(record) | (self.replaced_by(record, before=0) & self.own_ledgers())
        assert (self.own_ledgers() - under_way) | set(self.blobs) == listed - under_way, "a ledger leaked"
        if self.committers is not None:
            self.committers.check()
        assert record.sealed or not record.pending_deletes
        if self.clashes:
            self.begin_drop(record)
        self.perform(self.watched_drop(ledger_list.drop(self.log_name)))
        self.check_dropped()

    def begin_drop(self, record: ListRecord) -> None:
        """Begin the deletion of the log, as ``Log.delete`` does; a sealed log may have been truncated to its end."""
        if record.sealed and self.random.random() < 0.5:
            with suppress(TruncateGuardError):
                steps = ledger_list.truncate(self.log_name, record.epoch, record.generation, record.end_seq, force=True)
                self.perform(steps)
        self.perform(ledger_list.begin_drop(self.log_name, [each.name for each in self.bounds()]))

    def watched_drop(self, steps: Steps[None]) -> Steps[None]:
        """Yield the steps of a deletion, and check that the record says so before anything is gone (rule T14)."""
        before, answer = self.found, None
        assert before is not None
        with suppress(StopIteration):
            while True:
                answer = yield steps.send(answer)
                self.check_told(before.record)

    def check_told(self, before: ListRecord) -> None:
        """Check that the log lists what it listed, or that its record says that it is deleted."""
        found = self.found
        told = found is None or found.record.dropped or self.ledgers_of(found.record) == self.ledgers_of(before)
        assert told, "a deleted log looks like a sealed one"

    def check_dropped(self) -> None:
        """Check that nothing is left of the log."""
        assert self.found is None
        assert self.own_ledgers() == {each for each, _, _ in self.detached()}, "a dropped log leaves ledgers"
        assert not self.blobs, "a dropped log leaves blobs"
        assert not self.shards, "a dropped log leaves bounds"
        assert all(uid != UID for uid, _ in self.pages), "a dropped log leaves pages"

    def read(self, record: ListRecord) -> Iterator[LogRecord]:
        """Yield the records that a reader finds, as the list has them."""
        for entry in self.read_of(tuple(self.segments_of(record))):
            if entry.seq >= record.first_seq:
                yield entry

    def entries_of(self, segment: Segment) -> list[LogRecord]:
        """Return the records of a segment's ledger as the list has them: those of an adopted one count from 0."""
        entries, first = self.ledgers[segment.ledger_id].entries, segment.first_seq
        if segment.before is None or first is None:
            return entries
        generation = segment.generation
        return [LogRecord(generation, first + each.seq, each.value, first + each.seq) for each in entries]

    def perform(self, steps: Steps[Any], log: str | None = None) -> Any:
        """Perform an operation without interruption, outside of any process."""
        outside = Process("outside")
        outside.log = self.log_name if log is None else log
        try:
            step = next(steps)
            while True:
                step = steps.send(self.step(outside, step))
        except StopIteration as stop:
            return stop.value

    def event(self) -> None:
        """Let one thing happen."""
        self.events += 1
        if self.late and self.random.random() < 0.2:
            self.apply(*self.late.pop(self.random.randrange(len(self.late))))
            return
        if self.renamers and self.random.random() < 0.2:
            self.rename(self.random.choice(self.renamers))
            return
        if self.drivers and self.random.random() < (0.02 if self.clashes else 0.2):
            self.commit(self.random.choice(self.drivers))
            return
        if self.mergers and self.random.random() < 0.2:
            self.merge(self.random.choice(self.mergers))
            return
        if self.discarders and self.random.random() < 0.1:
            self.give_up(self.random.choice(self.discarders))
            return
        if self.random.random() < (0.1 if self.clashes else 0.02):
            with suppress(LostAnswerError):
                # A sweeper knows a name that the log had once.
                self.perform(self.sweep(), self.random.choice(NAMES) if self.renamers else NAME)
            return
        if self.subscribers is not None and self.random.random() < 0.3:
            self.subscribe(self.subscribers)
            return
        process = self.random.choice(self.processes)
        if self.random.random() < self.crashes:
            self.crash(process)
        elif self.losses and process.steps is None and self.is_lost(process):
            self.begin(process)
        elif self.losses and self.random.random() < 0.05:
            self.lose(process)
        elif self.random.random() < 0.4:
            self.acknowledge(process)
        elif process.owned is not None and process.what != "cut" and self.random.random() < 0.5:
            self.append(process)
        elif process.steps is None:
            self.begin(process)
        else:
            self.advance(process)

    def subscribe(self, subscribers: Subscribers) -> None:
        """Let one thing happen to a subscription."""

        def perform(process: Subscriber, step: Step) -> Any:
            answer = self.step(Process(process.name), step)
            self.trace.append(f"{process.name}: {process.what}: {shown(step)} -> {shown(answer)}")
            return answer

        first = 0 if self.found is None else self.found.record.first_seq
        what = subscribers.event(first, max(self.log, default=START_SEQ - 1) + 1, perform)
        if what:
            self.trace.append(f"subscribers: {what} is done")
            self.done[what] = self.done.get(what, 0) + 1

    def commit(self, process: Process) -> None:
        """Let one thing happen to a driver: it looks for what is due, a task writes a ledger, or a commit continues."""
        driver, committers = process.driver, self.committers
        assert driver is not None
        assert committers is not None
        if process.steps is not None:
            if self.random.random() < 3 * self.crashes:
                self.crash(process)
            else:
                self.advance(process)
        elif driver.epoch is None:
            driver.epoch, driver.ledgers = committers.due[driver.query], []
        else:
            tasks = committers.tasks_of(driver.query, driver.epoch)
            if len(driver.ledgers) < len(tasks):
                values = tasks[len(driver.ledgers)]
                ledger_id = self.write_detached(driver.query, driver.epoch, values)
                if self.random.random() < 0.9:  # else the attempt has failed
                    driver.ledgers.append(committers.described(ledger_id, values))
                return
            process.log, process.uid = self.log_name, UID
            steps = ledger_list.adopt(
                process.log, tuple(driver.ledgers), driver.query, driver.epoch, lambda: self.events
            )
            self.operate(process, "adopt", steps)

    def give_up(self, process: Process) -> None:
        """Let one thing happen to a process that gives up what a driver has written, whatever the driver does then."""
        if process.steps is not None:
            if self.random.random() < 3 * self.crashes:
                self.crash(process)
            else:
                self.advance(process)
            return
        driver = self.random.choice(self.drivers).driver
        assert driver is not None
        if driver.ledgers:
            process.log, process.uid = self.log_name, UID
            given_up = [each.ledger_id for each in driver.ledgers]
            self.operate(process, "give up", ledger_list.discard(process.log, given_up))

    def merge(self, process: Process) -> None:
        """Let one thing happen to a merger: it begins a run, copies segments, lists the copy, or deletes ledgers."""
        merger = process.merger
        assert merger is not None
        if process.steps is not None:
            if self.random.random() < 3 * self.crashes:
                self.crash(process)
            else:
                self.advance(process)
            return
        process.log, process.uid = self.log_name, UID
        if self.random.random() < 0.1:
            self.operate(process, "release", ledger_list.release(process.log, self.events))
        elif merger.run is None:
            self.operate(process, "begin merges", ledger_list.begin_merges(process.log, lambda: self.events))
        elif merger.made is not None:
            self.operate(process, "merge", ledger_list.merge(process.log, merger.made))
        elif self.found is not None:
            record = self.found.record
            members = members_of(record, self.segments_of(record), self.random)
            if members:
                ledger_id = self.write_detached(MERGES, merger.run, [each.value for each in self.read_of(members)])
                merger.made = merge_of(merger.run, members, ledger_id, self.events + KEPT_EVENTS)

    def read_of(self, segments: Rows) -> Iterator[LogRecord]:
        """Yield the records of closed segments."""
        for segment in segments:
            for entry in self.entries_of(segment):
                if segment.last_seq is None or entry.seq <= segment.last_seq:
                    yield entry

    def write_detached(self, query: str, epoch: int, values: list[object]) -> int:
        """Write a detached ledger, and return it."""
        self.next_ledger += 1
        ledger = self.ledgers[self.next_ledger] = ModelLedger(WrittenLedger(query, epoch), UID)
        ledger.entries = [LogRecord(0, at, value, at) for at, value in enumerate(values)]
        ledger.acknowledged, ledger.closed = len(values), True
        return self.next_ledger

    def rename(self, process: Process) -> None:
        """Let one thing happen to names: a step of a rename, or of the life of another log."""
        if process.steps is not None:
            self.advance(process)
        elif self.random.random() < 0.3:
            process.log = self.log_name
            target = self.random.choice(NAMES)
            if target != process.log:
                process.target, process.moved = target, len(self.moved)
                self.operate(process, "rename", ledger_list.rename(process.log, target, lambda: 7))
        elif self.random.random() < 0.1:
            name = self.random.choice(NAMES)
            if name != self.log_name:
                with suppress(LostAnswerError, LogSealedError, NoSuchLogError):
                    self.live(name)

    def live(self, name: str) -> None:
        """Let another log be made and written to, or be dropped, under a name that the log does not have."""
        if name in self.lists:
            self.perform(ledger_list.drop(name), name)
            self.trace.append(f"another log {name} is dropped")
            return
        self.others += 1
        uid = self.others.to_bytes(16, "big")
        self.perform(ledger_list.create(name, ListKind.WAL, uid, START_SEQ), name)
        self.perform(ledger_list.take_over(name, lambda: 0), name)
        self.trace.append(f"another log {name} is made")

    def begin(self, process: Process) -> None:
        """Begin an operation."""
        now = lambda: 7  # noqa: E731
        owned = process.owned
        if owned is None and self.random.random() > self.rivalry:
            return
        if owned is None:
            process.log = self.log_name
            self.operate(process, "take over", ledger_list.take_over(process.log, now))
            return
        weights = (10, 3, 6, 2, 2, 3) if self.clashes else (10, 6, 3, 8, 2, 0.1)
        what = self.random.choices(("roll", "truncate", "cut", "checkpoint", "close", "seal"), weights)[0]
        if self.is_lost(process):  # before anything else
            self.operate(process, "repair", repaired(process.log, owned.epoch))
        elif what == "roll":
            self.operate(process, what, ledger_list.roll(process.log, owned.epoch, process.number, now))
        elif what == "truncate" and self.log:
            # Beyond what is acknowledged nothing may be dropped; the next record is the last that can be asked for.
            seq = self.random.choice(sorted(self.log)) + self.random.randint(0, 1)
            self.operate(process, what, ledger_list.truncate(process.log, owned.epoch, owned.generation, seq))
        elif what == "cut" and self.found is not None:
            low, high = self.found.record.first_seq - 1, process.next_seq - 1
            if low <= high:
                seq = self.random.randint(low, high)
                self.cutting[process.name] = seq
                self.operate(process, what, ledger_list.cut(process.log, owned.epoch, seq, now))
        elif what == "checkpoint" and process.uploaded is not None:
            epoch, made = process.uploaded
            listed = ledger_list.checkpoint(process.log, epoch, made, 2, truncate=self.random.random() < 0.8)
            self.operate(process, what, listed)
            process.uploaded = None
        elif what == "checkpoint" and self.log:
            self.next_ledger += 1
            self.blobs[self.next_ledger] = owned.epoch
            seq = self.random.choice(sorted(self.log))
            process.uploaded = owned.epoch, Checkpoint(seq, owned.generation, self.next_ledger, "", 0)
            self.operate(process, "upload", ledger_list.begin_upload(process.log, owned.epoch, self.next_ledger))
        elif what in ("close", "seal"):
            self.operate(process, what, ledger_list.close(process.log, owned.epoch, now, seal=what == "seal"))

    def operate(self, process: Process, what: str, steps: Steps[Any]) -> None:
        """Have a process perform an operation, step by step from now on."""
        process.steps, process.what, process.answer, process.error = steps, what, None, None

    def advance(self, process: Process) -> None:
        """Perform the next step of a process."""
        steps = process.steps
        assert steps is not None
        try:
            if process.error is not None:
                error, process.error = process.error, None
                step = steps.throw(error)
            else:
                step = steps.send(process.answer)
        except StopIteration as stop:
            self.completed(process, stop.value)
            return
        except LostAnswerError:
            self.trace.append(f"{process.name}: {process.what} fails")
            if process.what not in ("roll", "truncate", "checkpoint", "upload", "rename", "repair", "merge", "release"):
                self.crash(process)
            process.steps, process.what = None, ""
            self.done["failed"] = self.done.get("failed", 0) + 1
            return
        except (LogFencedError, LogSealedError, NoSuchLogError, LogExistsError) as error:
            self.trace.append(f"{process.name}: {process.what} ends with {error}")
            self.crash(process)
            return
        except NoSuchLedgerError:
            if not self.discarders:
                raise
            self.crash(process)
            self.done["given up"] = self.done.get("given up", 0) + 1
            return
        except IllegalOperationError:
            if process.what not in ("adopt", "begin merges"):
                raise
            process.steps, process.what = None, ""  # the level has no adopted ledgers and no merges yet
            return
        except (UsageError, RewoundError):
            self.cutting.pop(process.name, None)
            process.steps, process.what = None, ""
            return
        try:
            process.answer = self.step(process, step)
        except (LostAnswerError, LogFencedError) as error:
            process.error = error
        self.trace.append(f"{process.name}: {process.what}: {shown(step)} -> {shown(process.error or process.answer)}")

    def completed(self, process: Process, result: Any) -> None:
        """An operation came to its end."""
        what = process.what
        self.done[what] = self.done.get(what, 0) + 1
        self.trace.append(f"{process.name}: {what} is done")
        process.steps, process.what = None, ""
        if what == "take over" and result.record.uid != UID:
            self.crash(process)  # another log had the name by then
        elif what in ("take over", "cut"):
            record, segment = result
            process.uid = UID
            assert segment in record.segments
            process.owned = record
            process.current, process.number = segment.ledger_id, segment.number
            assert segment.first_seq is not None
            process.next_seq = segment.first_seq
            process.pending.clear()  # what was lost meanwhile
            if what == "take over":
                assert record.epoch not in self.owners, f"epoch {record.epoch} has two owners"
                self.owners[record.epoch] = process.name
        elif what == "rename":
            assert process.target in self.moved[process.moved :] or process.seen != UID, "the log was not renamed"
        elif what == "adopt":
            self.adopted(process, result)
        elif what in ("begin merges", "merge"):
            assert process.merger is not None
            process.merger.run = result if what == "begin merges" else process.merger.run
            process.merger.made = None
            self.done["listed merge"] = self.done.get("listed merge", 0) + (what == "merge" and result is not None)
        elif what in ("close", "seal"):
            process.owned = None
            process.pending.clear()
        if what == "cut":
            self.cutting.pop(process.name, None)

    def adopted(self, process: Process, result: ledger_list.Adopted) -> None:
        """A driver has made a commit: it will not make it again."""
        driver, committers = process.driver, self.committers
        assert driver is not None
        assert driver.epoch is not None
        assert committers is not None
        assert (driver.query, driver.epoch) in committers.committed, "a commit that is not done is reported as done"
        assert result.record.producers[driver.query].epoch >= driver.epoch
        committers.due[driver.query] = max(committers.due[driver.query], driver.epoch + 1)
        driver.epoch = None

    def crash(self, process: Process) -> None:
        """End a process and start another in its place."""
        self.trace.append(f"{process.name} crashes")
        if process.driver is not None and self.committers is not None:
            process.steps, process.what = None, ""
            self.committers.forgets(process.driver)
            return
        if process in self.renamers or process in self.discarders:
            process.steps, process.what = None, ""
            return
        if process.merger is not None:
            process.steps, process.what, process.merger = None, "", Merger()
            return
        self.cutting.pop(process.name, None)
        self.processes[self.processes.index(process)] = Process(process.name + "'")

    # ---- records -------------------------------------------------------------------------------------------------

    def append(self, process: Process) -> None:
        """Append a record to the current ledger."""
        ledger = self.ledgers.get(process.current)
        assert process.owned is not None
        if ledger is None or ledger.closed or ledger.lost or process.what == "repair":
            return
        assert isinstance(ledger.created, CreateLedger)
        records = []
        last = process.next_seq + (self.random.choice((0, 0, 1, 2)) if self.losses else 0)
        while process.next_seq <= last:
            process.appended += 1
            value = (process.name, process.appended)
            records.append(LogRecord(ledger.created.generation, process.next_seq, value, last))
            self.assigned[value] = process.next_seq
            process.next_seq += 1
        self.stage(process, records)

    def stage(self, process: Process, records: list[LogRecord]) -> None:
        """Append a transaction to the current ledger."""
        ledger = self.ledgers[process.current]
        ledger.entries += records
        process.pending.append((process.current, len(ledger.entries), records))
        self.trace.append(f"{process.name}: appends {records} to {process.current}")

    def lose(self, process: Process) -> None:
        """Have too few bookies answer the writer of the current ledger."""
        ledger = self.ledgers.get(process.current)
        if process.owned is not None and ledger is not None and not ledger.closed:
            ledger.lost = True
            self.trace.append(f"{process.name}: {process.current} is lost")

    def is_lost(self, process: Process) -> bool:
        """Return whether the ledger that a process appends to is lost."""
        ledger = self.ledgers.get(process.current)
        return ledger is not None and ledger.lost

    def resend(self, process: Process, end_seq: int) -> None:
        """Acknowledge what the list holds of a lost ledger, and append the others again to the current one."""
        owed = process.pending
        held = ledger_list.held_of([records[0].seq for _, _, records in owed], end_seq)
        process.pending = []
        for ledger_id, _, records in owed[:held]:
            for record in records:
                self.acknowledged(process, ledger_id, record)
        process.next_seq = end_seq
        ledger = self.ledgers.get(process.current)
        if ledger is None or ledger.closed:
            raise LogFencedError("the ledger was fenced")
        for _, _, records in owed[held:]:
            again = [each._replace(seq=process.next_seq + at) for at, each in enumerate(records)]
            process.next_seq += len(again)
            self.stage(process, again)
            self.done["again"] = self.done.get("again", 0) + 1

    def acknowledge(self, process: Process) -> None:
        """Have the ledgers of a process acknowledge entries, and the process the records that it may acknowledge."""
        for ledger_id in {ledger_id for ledger_id, _, _ in process.pending}:
            ledger = self.ledgers.get(ledger_id)
            if ledger is not None and not ledger.closed and not ledger.lost:
                ledger.acknowledged = self.random.randint(ledger.acknowledged, len(ledger.entries))
        self.confirm(process)

    def confirm(self, process: Process) -> None:
        """Acknowledge to the caller what may be."""
        while process.pending:
            ledger_id, entries, records = process.pending[0]
            ledger = self.ledgers.get(ledger_id)
            if ledger is None or ledger.lost or ledger.acknowledged < entries:
                return
            if ledger.entries[entries - 1] != records[-1]:
                return
            process.pending.pop(0)
            for record in records:
                self.acknowledged(process, ledger_id, record)

    def acknowledged(self, process: Process, ledger_id: int, record: LogRecord) -> None:
        """A writer reports to its caller that a record is durable."""
        self.trace.append(f"{process.name}: {record} of {ledger_id} is acknowledged")
        key = record.generation, record.seq
        assert key not in self.given, f"position {key} is given to {record.value} and to {self.given[key]}"
        assert self.assigned[record.value] == record.seq, f"{record} has another number than it was given"
        self.given[key] = record.value
        before = self.log.get(record.seq)
        assert before is None or before.generation < record.generation
        if self.found is None or record.seq <= self.found.record.kept_of(record.generation):
            self.log[record.seq] = record  # else a cut has dropped it, and its writer learns late that it was durable

    # ---- steps ---------------------------------------------------------------------------------------------------

    def step(self, process: Process, step: Step) -> Any:
        """Perform a step, and return its result."""
        fails = (self.page_segments or not isinstance(step, Sweeping)) and self.random.random() < self.faults / 4
        if fails and not isinstance(step, Reading | Change | Sweeping):
            raise LostAnswerError("before it was done")
        match step:
            case ReadList(other):
                return self.read_list(process) if other is None else self.lists.get(other)
            case WriteList() | RemoveList() | MoveList() | WriteShard():
                if isinstance(step, WriteList) and process.what == "repair":
                    self.check_repair(process, step.record)
                return self.write(process.log, step)
            case CreateLedger():
                self.next_ledger += 1
                self.ledgers[self.next_ledger] = ModelLedger(step, process.seen)
                return self.next_ledger
            case RecoverLedger(segment, counts):
                if segment.ledger_id not in self.ledgers:
                    assert segment.ledger_id not in self.listed(), "a listed ledger is gone"
                    return None
                ledger = self.existing(segment.ledger_id)
                self.fence(process, segment.ledger_id)
                ledger.close(self.random, by_writer=False)
                return ledger.end() if counts else SegmentEnd(None, None, 0)
            case SwitchTo(segment):
                lost = process.what == "repair"
                if not lost:
                    self.drain(process)
                process.current, process.number = segment.ledger_id, segment.number
                if lost:
                    assert segment.first_seq is not None
                    self.resend(process, segment.first_seq)
                return None
            case RecoverOwn(segment):
                ledger = self.existing(segment.ledger_id)
                if ledger.recovering not in ("", process.name):
                    raise LogFencedError("another has fenced the ledger")
                ledger.recovering = process.name
                ledger.close(self.random, by_writer=False)
                return ledger.end()
            case CloseLedger(segment):
                ledger = self.existing(segment.ledger_id)
                if ledger.lost:
                    return LOST
                if ledger.closed:
                    raise LogFencedError("the ledger was fenced")
                ledger.close(self.random, by_writer=True)
                self.confirm(process)
                return ledger.end()
            case CheckDetached(ledger, _, _):
                return ledger.ledger_id in self.ledgers
            case DeleteLedger(ledger_id):
                if self.random.random() < self.faults:
                    return False
                assert ledger_id not in self.listed(), "a listed ledger is deleted"
                self.ledgers.pop(ledger_id, None)
                self.blobs.pop(ledger_id, None)
                return True
            case _:
                return self.part_step(process, step)

    def part_step(self, process: Process, step: Step) -> Any:
        """Perform a step on pages or bounds, and return its result."""
        self.parts += 1
        what = type(step).__name__
        self.done[what] = self.done.get(what, 0) + 1
        match step:
            case ReadPage(name):
                return self.pages.get((process.seen, name))
            case WritePage(number, rows):
                name = f"p.{number}-{self.parts}"
                self.pages[process.seen, name] = decode_page(encode_page(rows), where="a page")
                return name
            case RemovePage(name):
                self.remove_part(process, name)
            case SweepParts(kept, below):
                parts = [name for uid, name in self.pages if uid == process.seen]
                for name in [*parts, *(self.shards if process.seen == UID else ())]:
                    if name not in kept and int(name.partition(".")[2].partition("-")[0]) < below:
                        self.remove_part(process, name)
            case ReadBounds(bound_set):
                return self.shards.get(bound_set, Shard((), None)).bounds
            case ReadShard(bound_set, _):
                return self.shards.get(bound_set, Shard((), None))
            case WriteBounds(number, bounds):
                name = f"b.{number}-{self.parts}"
                if bounds:
                    self.versions += 1
                    self.shards[name] = Shard(bounds, self.versions)
                return name
        return None

    def remove_part(self, process: Process, name: str) -> None:
        """Remove a page or a set of bounds, unless that fails."""
        if self.random.random() < self.faults / 4:
            return
        named = [ledger_list.named_parts(each.record) for each in self.lists.values() if not each.record.dropped]
        assert not any(name in each for each in named), "a page or a set of bounds is removed that a record names"
        self.pages.pop((process.seen, name), None)
        self.shards.pop(name, None)

    def fence(self, process: Process, ledger_id: int) -> None:
        """Note that a process recovers a ledger, which ends the writer of another one for good."""
        ledger = self.ledgers[ledger_id]
        if not ledger.closed:
            ledger.recovering = process.name
            for other in self.processes:
                other.fenced = other.fenced or (ledger.lost and other is not process and other.current == ledger_id)

    def check_repair(self, process: Process, record: ListRecord) -> None:
        """Check that a writer does not continue in another segment after another fenced the one that was lost."""
        listed = self.lists.get(process.log)
        adds = listed is not None and record.next_segment > listed.record.next_segment
        assert not (process.fenced and adds), "a writer continues although another has fenced its lost segment"

    def read_list(self, process: Process) -> Found | None:
        """Return the record that a process operates on (rule T13)."""
        found = self.lists.get(process.log)
        if found is None or process.uid not in (None, found.record.uid):
            return None
        process.seen = found.record.uid
        return found._replace(page_segments=self.page_segments if self.events >= self.raised_at else 0)

    def segments_of(self, record: ListRecord) -> list[Segment]:
        """Return the segments of a record that were not truncated, those of pages included."""
        in_pages = [each for page in record.pages for each in self.pages[record.uid, page.name][-page.segments :]]
        assert [page.segments > 0 for page in record.pages].count(False) == 0
        return [*in_pages, *record.segments]

    def ledgers_of(self, record: ListRecord) -> frozenset[int]:
        """Return the ledgers that a record lists, those of pages included."""
        return record.ledgers | {each.ledger_id for each in self.segments_of(record)}

    def listed(self) -> set[int]:
        """Return the ledgers that any list names."""
        records = [each.record for each in self.lists.values()]
        return {ledger_id for each in records for ledger_id in self.ledgers_of(each) | self.replaced_by(each)}

    def replaced_by(self, record: ListRecord, before: int | None = None) -> frozenset[int]:
        """Return the ledgers that merges have replaced and whose time is not over, by default now, as a record says."""
        now = self.events if before is None else before
        kept = [each.page for each in record.replaced if each.until_ns > now]
        return frozenset(row.ledger_id for page in kept for row in self.pages[record.uid, page])

    def drain(self, process: Process) -> None:
        """Have everything acknowledged that was appended to the current ledger (rule T3)."""
        ledger = self.ledgers.get(process.current)
        if ledger is None or (ledger.closed and process.pending):
            raise LogFencedError("the ledger was fenced")
        ledger.acknowledged = len(ledger.entries)
        self.confirm(process)

    def existing(self, ledger_id: int) -> ModelLedger:
        """Return a ledger that has to be there, unless the list does not name it any more."""
        if ledger_id not in self.ledgers:
            assert ledger_id not in self.listed(), "a listed ledger is gone"
            raise LogFencedError("the ledger was deleted")
        return self.ledgers[ledger_id]

    def write(self, name: str, step: Change) -> Any:
        """Perform a compare-and-set, maybe later or without an answer."""
        chance = self.random.random()
        if isinstance(step, WriteList | MoveList | WriteShard) and chance < self.faults / 3:
            self.late.append((name, step))
            return UNKNOWN
        if chance < self.faults * 2 / 3:
            return UNKNOWN
        result = self.apply(name, step)
        return UNKNOWN if chance < self.faults else result

    def apply(self, name: str, step: Change) -> Any:
        """Perform a compare-and-set."""
        if isinstance(step, WriteShard):
            return self.apply_to_shard(step)
        found = self.lists.get(name)
        if step.version != (None if found is None else found.version):
            return CONFLICT
        if isinstance(step, MoveList) and step.record.name in self.lists:
            return CONFLICT
        self.versions += 1
        if isinstance(step, MoveList) and step.record.uid == UID:
            self.moved.append(step.record.name)
        if isinstance(step, RemoveList | MoveList):
            del self.lists[name]
        if isinstance(step, RemoveList):
            return Written(self.versions)
        # Every write goes through bytes, as the real one.
        record = ListRecord.decode(step.record.encode(), where="the record")
        if found is not None:
            self.changed(found.record, record)
        self.lists[record.name] = Found(record, self.versions)
        return Written(self.versions)

    def apply_to_shard(self, step: WriteShard) -> Any:
        """Perform a compare-and-set of the record of a set of bounds."""
        if step.version != self.shards.get(step.bound_set, Shard((), None)).version:
            return CONFLICT
        self.versions += 1
        self.shards[step.bound_set] = Shard(step.bounds, self.versions)
        return Written(self.versions)

    def bounds(self) -> Bounds:
        """Return the bounds of all subscriptions of the log."""
        assert self.found is not None
        record = self.found.record
        if not record.bound_set:
            return record.cursors
        return self.shards.get(record.bound_set, Shard((), None)).bounds

    def changed(self, old: ListRecord, new: ListRecord) -> None:
        """Check that a record follows another."""
        assert new.uid == old.uid, "the record of a log is written over that of another"
        if new.uid != UID:
            return
        assert new.epoch >= old.epoch
        assert new.next_segment >= old.next_segment
        assert new.first_seq >= old.first_seq, "truncation moves backwards"
        assert not (old.sealed and not new.sealed), "a sealed log is open again"
        if any(name != MERGES and old.producers.get(name) != each for name, each in new.producers.items()):
            self.committed(old, new)
        if len(new.replaced) > len(old.replaced):
            assert list(self.read(new)) == list(self.read(old)), "a merge changes records"
        left = [each for each in old.replaced if each not in new.replaced]
        assert new.dropped or all(each.until_ns <= self.events for each in left), (
            "ledgers of merged segments are released too early"
        )
        if new.generation > old.generation:
            if self.subscribers is not None:
                self.subscribers.check_cut(self.bounds())
            for seq in [seq for seq in self.log if seq >= new.end_seq]:
                del self.log[seq]

    def committed(self, old: ListRecord, new: ListRecord) -> None:
        """A commit takes effect: from now on the log has its records."""
        assert self.committers is not None
        changed = {name: each for name, each in new.producers.items() if old.producers.get(name) != each}
        ((query, done),) = [each for each in changed.items() if each[0] != MERGES]
        added = [each for each in self.segments_of(new) if each.number >= old.next_segment]
        entries = [entry for segment in added for entry in self.entries_of(segment)]
        assert new.epoch not in self.owners, f"epoch {new.epoch} has two owners"
        self.owners[new.epoch] = query
        self.committers.took_effect(query, done.epoch, [entry.value for entry in entries])
        for entry in entries:
            assert self.log.get(entry.seq) is None or self.log[entry.seq].generation < entry.generation
            key = entry.generation, entry.seq
            assert key not in self.given, f"position {key} is given to {entry.value} and to {self.given[key]}"
            self.given[key], self.log[entry.seq] = entry.value, entry

    # ---- invariants ----------------------------------------------------------------------------------------------

    def candidates(self) -> list[tuple[int, int]]:
        """Return ledgers and their segment numbers, as their descriptions have them."""
        created = [(ledger_id, self.ledgers[ledger_id].created) for ledger_id in sorted(self.own_ledgers())]
        return [(ledger_id, each.number) for ledger_id, each in created if isinstance(each, CreateLedger)]

    def detached(self) -> list[tuple[int, str, int]]:
        """Return detached ledgers, their queries and the numbers of their commits, as their descriptions have them."""
        created = [(ledger_id, ledger.created) for ledger_id, ledger in self.ledgers.items()]
        return [(ledger_id, *each) for ledger_id, each in created if isinstance(each, WrittenLedger)]

    def sweep(self) -> Steps[list[int]]:
        """Return the steps of a sweep."""
        return ledger_list.sweep(UID, self.candidates(), list(self.blobs.items()), self.detached())

    def own_ledgers(self) -> set[int]:
        """Return the ledgers that were created for the log."""
        return {ledger_id for ledger_id, ledger in self.ledgers.items() if ledger.uid == UID}

    def check(self) -> None:
        """Check what always holds."""
        assert self.found is not None
        record = self.found.record
        pages = {each.name for each in record.pages} | {each.page for each in record.replaced}
        assert pages <= {name for uid, name in self.pages if uid == UID}, "a page is gone"
        assert self.replaced_by(record) <= self.ledgers.keys(), "a ledger of a merged segment is deleted too early"
        assert record.format != PAGED_FORMAT or self.page_segments, "a record has a format that its level has not"
        listed = [segment.ledger_id for segment in self.segments_of(record)]
        assert len(set(listed)) == len(listed), "a ledger is listed twice"
        assert all(ledger_id in self.ledgers for ledger_id in listed), "a listed ledger is gone"
        blobs = {checkpoint.ledger_id for checkpoint in record.checkpoints}
        assert blobs | set(record.uploads) <= set(self.blobs), "a blob that the record names is gone"
        self.named_blobs |= blobs | set(record.uploads)
        assert not self.replaced_by(record) & set(listed), "a ledger is listed, and in place of it another"
        gone = {each.ledger_id for page in record.gone_pages for each in self.pages.get((UID, page), ())}
        assert not gone & set(listed), "a ledger is listed, and in a page that was removed from the list"
        kept = record.ledgers | set(record.pending_deletes)
        assert self.named_blobs & set(self.blobs) <= kept, "a blob is forgotten before it is deleted"
        assert not record.checkpoints or record.first_seq <= record.checkpoints[0].seq + 1, "a checkpoint lacks records"
        assert sum(segment.is_open for segment in record.segments) <= 2
        if self.subscribers is not None:
            self.subscribers.check(record, self.bounds())
        for other in self.lists.values():
            uids = {self.ledgers[each.ledger_id].uid for each in self.segments_of(other.record)}
            assert uids <= {other.record.uid}, "a ledger of another log is listed"
        held = {entry for segment in self.segments_of(record) for entry in self.entries_of(segment)}
        for seq, entry in self.log.items():
            assert seq < record.first_seq or entry in held, f"acknowledged record {entry} is in no listed ledger"


def driver_process(number: int) -> Process:
    """Return the process of a query's driver."""
    process = Process(f"driver {number}")
    process.driver = Driver(QUERIES[number])
    return process


def merger_process(number: int) -> Process:
    """Return the process of a merger."""
    process = Process(f"merger {number}")
    process.merger = Merger()
    return process


def is_past(record: ListRecord, query: str, epoch: int) -> bool:
    """Return whether nothing will list a detached ledger of a commit any more."""
    return record.sealed or (query in record.producers and epoch < record.producers[query].epoch)


def repaired(name: str, epoch: int) -> Steps[Any]:
    """Recover what is lost, and continue in another segment, as ``ListWriter`` does."""
    yield from ledger_list.close(name, epoch, lambda: 7)
    return (yield from ledger_list.roll(name, epoch, 0, lambda: 7))


def run(seed: int) -> tuple[World, Exception | None]:
    """Run a seed, and return what came of it."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  # whatever is raised is a failure of the seed
        return world, error
    return world, None


def main(print_line: Callable[[str], object] = lambda line: sys.stdout.write(line + "\n")) -> int:
    """Run seeds; returns 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator.ledger_lists")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    arguments = parser.parse_args()
    done: dict[str, int] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        world, error = run(seed)
        for what, count in world.done.items():
            done[what] = done.get(what, 0) + count
        if error is not None:
            print_line("\n".join(world.trace[-60:]))
            print_line(f"seed {seed}: {type(error).__name__}: {error}")
            return 1
    print_line(f"{arguments.seeds} seeds, {done}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
