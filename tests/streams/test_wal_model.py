"""Write-ahead logs do what a list of records does, whatever happens to their writers."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pybk import LedgerManager
from pybk.errors import LogFencedError, TruncatedError, TruncateGuardError
from pybk.streams.log_record import WalRecord
from pybk.streams.wal import WriteAheadLog
from tests.sampling import some

DATA = st.binary(max_size=40)


class WalMachine(RuleBasedStateMachine):
    """A log, its writers, a follower, and the model: every record that was acknowledged and not dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        path = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.manager = self.stack.enter_context(LedgerManager.open(path))
        self.first = 1
        self.records: dict[int, bytes] = {}
        self.generation = 0
        self.given: set[tuple[int, int]] = set()
        self.fenced: list[WriteAheadLog] = []
        self.seen: list[WalRecord] = []
        self.seen_generation = 0
        self.checkpoints: list[tuple[int, bytes]] = []

    @property
    def last(self) -> int:
        return max(self.records, default=self.first - 1)

    def open(self, *, steal: bool = False) -> WriteAheadLog:
        return WriteAheadLog.open(self.manager, "a/wal", insecure=True, steal=steal, segment_bytes=400)

    @initialize()
    def begin(self) -> None:
        self.wal = self.open()

    def appended(self, lsn: int, data: bytes) -> None:
        assert lsn == self.last + 1
        assert (self.generation, lsn) not in self.given, "a position is given twice"
        self.given.add((self.generation, lsn))
        self.records[lsn] = data

    @rule(data=DATA)
    def append(self, data: bytes) -> None:
        self.appended(self.wal.append(data), data)

    @rule(data=DATA)
    def append_async(self, data: bytes) -> None:
        self.appended(self.wal.append_async(data).result(), data)

    @rule(batch=st.lists(DATA, min_size=1, max_size=9))
    def append_many(self, batch: list[bytes]) -> None:
        for lsn, data in zip(self.wal.append_many(batch), batch, strict=True):
            self.appended(lsn, data)

    @rule()
    def roll(self) -> None:
        self.wal.roll()

    @rule(number=st.integers(0, 20))
    def truncate_before(self, number: int) -> None:
        lsn = min(self.first + number, self.last + 1)
        if self.checkpoints and lsn > self.checkpoints[0][0] + 1:
            with pytest.raises(TruncateGuardError):
                self.wal.truncate_before(lsn)
            return
        self.wal.truncate_before(lsn)
        self.dropped_before(lsn)

    @rule(number=st.integers(0, 20))
    def truncate_after(self, number: int) -> None:
        lsn = max(self.first - 1, self.last - number)
        if self.checkpoints and lsn < self.checkpoints[-1][0]:
            with pytest.raises(TruncateGuardError):
                self.wal.truncate_after(lsn)
            return
        self.wal.truncate_after(lsn)
        self.generation += lsn < self.last
        for gone in [each for each in self.records if each > lsn]:
            del self.records[gone]
        assert self.wal.generation() == self.generation

    @rule(data=DATA, back=st.integers(0, 5), keep=st.integers(1, 3), whole=st.booleans())
    def checkpoint(self, data: bytes, back: int, keep: int, whole: bool) -> None:
        lsn = max(self.last - back, self.first - 1, *(lsn for lsn, _ in self.checkpoints), 0)
        if not whole:
            with suppress(ZeroDivisionError), self.wal.checkpoint(lsn) as file:
                file.write(data)
                raise ZeroDivisionError
            return
        with self.wal.checkpoint(lsn, keep=keep) as file:
            file.write(data)
        self.checkpoints = [*self.checkpoints, (lsn, data)][-keep:]
        self.dropped_before(self.checkpoints[0][0] + 1)

    def dropped_before(self, lsn: int) -> None:
        self.first = max(self.first, lsn)
        for gone in [each for each in self.records if each < self.first]:
            del self.records[gone]

    @rule()
    def reopen(self) -> None:
        self.wal.close()
        self.wal = self.open()

    @rule()
    def take_over(self) -> None:
        """A writer that does not know that it was succeeded."""
        self.fenced.append(self.wal)
        self.wal = self.open(steal=True)

    @precondition(lambda self: self.fenced)
    @rule(data=DATA)
    def zombie(self, data: bytes) -> None:
        wal = self.fenced[-1]
        try:
            wal.append(data)
        except LogFencedError:
            return
        raise AssertionError("a fenced writer appends")

    @rule()
    def follow(self) -> None:
        """Read what is new; begin again when told to."""
        try:
            begin = self.seen[-1].lsn + 1 if self.seen else self.first
            self.seen += list(self.wal.follow(begin, generation=self.seen_generation, timeout=0))
        except TruncatedError:  # or rewound
            self.seen = list(self.wal.follow(timeout=0))
        self.seen_generation = self.wal.generation()
        for record in self.seen:
            assert self.records.get(record.lsn, record.data) == record.data
        assert not self.seen or self.seen[-1].lsn <= self.last

    @invariant()
    def replays(self) -> None:
        found = list(self.wal.replay())
        assert [record.lsn for record in found] == list(range(self.first, self.last + 1))
        assert {record.lsn: record.data for record in found} == self.records
        assert self.wal.first_lsn() == self.first
        assert self.wal.last_lsn() == self.wal.durable_lsn() == self.last
        latest = self.wal.latest_checkpoint()
        assert [each.lsn for each in self.wal.checkpoints()] == [lsn for lsn, _ in self.checkpoints]
        if self.checkpoints:
            assert latest is not None
            with latest.open() as file:
                assert (latest.lsn, file.read()) == self.checkpoints[-1]
        if self.records:
            middle = (self.first + self.last) // 2
            assert self.wal.read(middle).data == self.records[middle]

    def teardown(self) -> None:
        if hasattr(self, "wal"):
            self.wal.close()
            listed = len(self.wal.ledgers()) + len(self.checkpoints)
            assert len(list(self.manager.list_ledgers())) == listed, "a ledger leaked"
        self.stack.close()


TestWal = WalMachine.TestCase
TestWal.settings = settings(max_examples=some(5, 600), stateful_step_count=40, deadline=None)
