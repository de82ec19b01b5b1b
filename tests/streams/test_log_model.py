"""Named logs do what a list of records does, whatever happens to their writers, on a store and on a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pybk import (
    LedgerManager,
    Log,
    LogEnd,
    LogFencedError,
    LogReader,
    LogRecord,
    LogSealedError,
    LogWriter,
    NewRecord,
    Position,
    TruncatedError,
    TxId,
    UsageError,
)
from pybk.streams.log_reader import Start
from tests.cluster.inside import inside
from tests.sampling import some

VALUES = st.integers(0, 60)
NEW = st.builds(
    NewRecord,
    data=st.binary(max_size=40),
    txid=st.none() | VALUES,
    key=st.none() | st.binary(max_size=5),
    headers=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.binary(max_size=5)), max_size=2).map(tuple),
    time_ns=VALUES.map(lambda each: each * 1000),
)


def at(microseconds: int) -> datetime:
    """Return a time."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


class LogMachine(RuleBasedStateMachine):
    """A log, its writers, a reader, and the model: every record that was acknowledged and not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.manager = self.opened(Path(self.stack.enter_context(tempfile.TemporaryDirectory())))
        self.first = 0
        self.records: list[LogRecord] = []
        self.fenced: LogWriter | None = None
        self.sealed = False

    def opened(self, path: Path) -> LedgerManager:
        """Return the manager of a store."""
        return self.stack.enter_context(LedgerManager.open(path))

    @initialize()
    def begin(self) -> None:
        self.log = Log.open(self.manager, "a/log", insecure=True)
        self.writer = self.new_writer()
        self.reader = self.new_reader()

    def new_writer(self, **options: Any) -> LogWriter:
        return self.log.writer(ordered_txids=False, segment_records=7, segment_bytes=2000, **options)

    def new_reader(self) -> LogReader:
        self.seen = self.first
        return self.log.reader()

    @property
    def end(self) -> int:
        return self.first + len(self.records)

    def appended(self, positions: Sequence[Position], new: Sequence[NewRecord]) -> None:
        assert [each.seq for each in positions] == list(range(self.end, self.end + len(new)))
        for position, each in zip(positions, new, strict=True):
            assert each.time_ns is not None
            headers = tuple(each.headers)
            self.records.append(LogRecord(position, each.data, each.time_ns, each.txid, each.key, headers))

    @precondition(lambda self: not self.sealed)
    @rule(new=NEW, wait=st.booleans())
    def append(self, new: NewRecord, wait: bool) -> None:
        options: dict[str, Any] = new._asdict()
        found = self.writer.append(**options) if wait else self.writer.append_async(**options).result()
        self.appended([found], [new])

    @precondition(lambda self: not self.sealed)
    @rule(new=st.lists(NEW, min_size=1, max_size=9))
    def append_many(self, new: list[NewRecord]) -> None:
        self.appended(self.writer.append_many(new), new)

    @precondition(lambda self: not self.sealed)
    @rule()
    def roll(self) -> None:
        self.writer.roll()

    @rule(number=st.integers(-3, 12), by_position=st.booleans())
    def truncate(self, number: int, by_position: bool) -> None:
        seq = max(0, self.first + number)
        if seq > self.end:
            with pytest.raises(UsageError, match="cannot be dropped"):
                self.log.truncate(seq)
            return
        start = self.records[seq - self.first].position if by_position and self.first <= seq < self.end else seq
        self.dropped(self.log.truncate(start), max(self.first, seq))

    @rule(value=VALUES, by_time=st.booleans())
    def truncate_by_value(self, value: int, by_time: bool) -> None:
        start: Start = at(value) if by_time else TxId(value)
        if self.records and self.expected(start) == self.end:
            with pytest.raises(UsageError, match="all would be dropped"):
                self.log.truncate(start)
        else:
            self.dropped(self.log.truncate(start), self.expected(start))

    def dropped(self, found: int, seq: int) -> None:
        assert found == seq
        del self.records[: seq - self.first]
        self.first = seq

    def expected(self, start: Start) -> int:
        """Return the record at which reading begins, according to the model."""
        for each in self.records:
            if isinstance(start, datetime) and at(each.time_ns // 1000) >= start:
                return each.seq
            if isinstance(start, TxId) and each.txid is not None and each.txid >= start.value:
                return each.seq
        return self.end

    @precondition(lambda self: not self.sealed)
    @rule()
    def reopen(self) -> None:
        self.close()
        self.begin()

    def close(self) -> None:
        """Close the log, and with it a writer that was fenced."""
        if self.fenced is None:
            self.log.close()
        else:
            with pytest.raises(LogFencedError):
                self.log.close()
        self.fenced = None

    @precondition(lambda self: not self.sealed)
    @rule()
    def take_over(self) -> None:
        """A writer that does not know that it was succeeded."""
        if self.fenced is None:
            self.fenced, self.writer = self.writer, self.new_writer(steal=True)

    @precondition(lambda self: self.fenced is not None)
    @rule(new=NEW)
    def zombie(self, new: NewRecord) -> None:
        assert self.fenced is not None
        with pytest.raises(LogFencedError):
            self.fenced.append(**new._asdict())
        with pytest.raises(LogFencedError):
            self.fenced.close()
        self.fenced = None

    @precondition(lambda self: len(self.records) > 20 and not self.sealed)
    @rule()
    def seal(self) -> None:
        self.writer.seal()
        self.sealed = True
        with pytest.raises(LogSealedError):
            self.log.writer()
        assert [each.seq for each in self.log.reader(follow=True)] == [each.seq for each in self.records]

    @rule(most=st.integers(1, 30))
    def read_on(self, most: int) -> None:
        """Read what is new; what was truncated meanwhile is read yet, or counted."""
        skipped = self.reader.skipped
        try:
            found = self.reader.read_many(most, timeout=0)
        except LogSealedError:
            assert self.sealed
            found = []
        for each in found:
            assert each.seq == max(self.seen + self.reader.skipped - skipped, self.seen)
            skipped, self.seen = self.reader.skipped, each.seq + 1
            if each.seq >= self.first:
                assert each == self.records[each.seq - self.first]
        if not found:
            self.seen += self.reader.skipped - skipped
            assert self.seen == self.end
        assert self.reader.seq == self.seen

    @rule(value=VALUES)
    def find(self, value: int) -> None:
        """Values are in any order."""
        for start in (TxId(value), at(value)):
            seq = self.expected(start)
            found = self.log.position_for(start)
            assert found == (self.records[seq - self.first].position if seq < self.end else None)
            assert [each.seq for each in self.log.reader(start)] == list(range(seq, self.end))

    @rule(back=st.integers(1, 9))
    def begin_before(self, back: int) -> None:
        """Reading begins at a record that was truncated."""
        seq = max(0, self.first - back)
        with self.log.reader(seq) as reader:
            assert reader.skipped == self.first - seq
            assert [each.seq for each in reader] == list(range(self.first, self.end))
        if seq < self.first:
            with pytest.raises(TruncatedError):
                self.log.reader(seq, strict=True)

    @invariant()
    def holds_the_model(self) -> None:
        if not hasattr(self, "log"):
            return
        assert list(self.log.reader()) == self.records
        assert (self.log.first_seq(), self.log.last_seq(), len(self.log)) == (
            self.first,
            self.end - 1,
            len(self.records),
        )
        assert list(self.log.reader(LogEnd.LATEST)) == []
        if self.records:
            middle = self.records[len(self.records) // 2]
            assert self.log.read(middle.position) == self.log.read(middle.seq) == middle
            assert self.log.position_for(middle.seq) == middle.position
            assert (self.log.first(), self.log.last()) == (self.records[0], self.records[-1])

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.close()
            assert len(list(self.manager.list_ledgers())) == len(self.ledgers()), "a ledger leaked"
        self.stack.close()

    def ledgers(self) -> list[int]:
        """Return the ledgers of the log."""
        with Log.open(self.manager, "a/log", insecure=True) as log:
            return [each.ledger_id for each in log.segments()]


class ClusterLogMachine(LogMachine):
    """The same in a cluster."""

    def opened(self, path: Path) -> LedgerManager:
        """Return the manager of a cluster."""
        return self.stack.enter_context(self.stack.enter_context(inside(path)).connect())


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=some(4, 400), stateful_step_count=40, deadline=None)
TestClusterLog = ClusterLogMachine.TestCase
TestClusterLog.settings = settings(max_examples=some(1, 40), stateful_step_count=30, deadline=None)
