"""A workload of a write-ahead log that says what it does, and the model of what the log has to hold then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from pybk import WriteAheadLog

Report = Callable[[str], object]


def work(wal: WriteAheadLog, random: Random, report: Report) -> Iterator[None]:
    """Append, roll, checkpoint and drop records at random, for ever; yields after each step.

    Each step is reported before it begins, where it may be half done, and after it was done.
    """
    report(f"open {wal.first_lsn()} {wal.last_lsn()} {wal.generation()}")
    while True:
        chance = random.random()
        if chance < 0.5:
            data = b"%d " % random.getrandbits(64) * random.randint(1, 9)
            report(f"appended {wal.append(data)} {data.hex()}")
        elif chance < 0.7:
            batch = [b"%d" % random.getrandbits(64) for _ in range(random.randint(1, 20))]
            for lsn, data in zip(wal.append_many(batch), batch, strict=True):
                report(f"appended {lsn} {data.hex()}")
        elif chance < 0.78:
            wal.roll()
        elif chance < 0.86:
            oldest = min((each.lsn + 1 for each in wal.checkpoints()), default=wal.last_lsn())
            lsn = max(wal.first_lsn(), min(oldest, wal.last_lsn() - random.randint(0, 30)))
            report(f"truncating {lsn}")
            wal.truncate_before(lsn)
            report(f"truncated {lsn}")
        elif chance < 0.93:
            newest = max((each.lsn for each in wal.checkpoints()), default=0)
            lsn = max(wal.first_lsn() - 1, newest, wal.last_lsn() - random.randint(0, 5))
            report(f"cutting {lsn}")
            wal.truncate_after(lsn)
            report(f"cut {lsn} {wal.generation()}")
        else:
            lsn, state = wal.last_lsn(), b"%d" % random.getrandbits(64)
            report(f"checkpointing {lsn} {state.hex()}")
            with wal.checkpoint(lsn) as file:
                file.write(state)
            report(f"checkpointed {lsn} {state.hex()}")
        yield


class Model:
    """What the reports of all workloads so far say."""

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.first = 1
        self.generation = 0
        self.checkpoints: list[tuple[int, bytes]] = []
        self.unfinished = ""

    def take(self, line: str) -> None:
        """Take one report."""
        what, *words = line.split()
        self.unfinished = line if what.endswith("ing") else ""
        if what == "appended":
            self.records[int(words[0])] = bytes.fromhex(words[1])
        elif what == "truncated":
            self.first = max(self.first, int(words[0]))
        elif what == "cut":
            self.cut(int(words[0]))
            assert int(words[1]) == self.generation
        elif what == "checkpointed":
            self.checkpoint(int(words[0]), bytes.fromhex(words[1]))

    def cut(self, last: int) -> None:
        """Forget the records after a cut."""
        self.generation += any(lsn > last for lsn in self.records)
        self.records = {lsn: data for lsn, data in self.records.items() if lsn <= last}

    def checkpoint(self, lsn: int, state: bytes) -> None:
        """Remember a checkpoint, and what it truncates."""
        self.checkpoints = [*self.checkpoints, (lsn, state)][-2:]
        self.first = max(self.first, self.checkpoints[0][0] + 1)

    def check(self, wal: WriteAheadLog) -> None:
        """Compare the log with the model; what was not finished may be done or not, and is taken from the log."""
        what, *words = self.unfinished.split() or [""]
        if what == "cutting" and wal.generation() == self.generation + 1:
            self.cut(int(words[0]))
        elif what == "truncating" and wal.first_lsn() == int(words[0]):
            self.first = wal.first_lsn()
        elif what == "checkpointing":
            self.take_checkpoint(wal, int(words[0]), bytes.fromhex(words[1]))
        self.unfinished = ""
        assert wal.generation() == self.generation
        assert wal.first_lsn() == self.first
        latest = wal.latest_checkpoint()
        assert [each.lsn for each in wal.checkpoints()] == [lsn for lsn, _ in self.checkpoints]
        if latest is not None:
            with latest.open() as file:
                assert file.read() == self.checkpoints[-1][1]
        found = list(wal.replay())
        assert [record.lsn for record in found] == list(range(wal.first_lsn(), wal.first_lsn() + len(found)))
        kept = {record.lsn: record.data for record in found}
        for lsn, data in self.records.items():
            if lsn >= self.first:
                assert kept.get(lsn) == data, f"record {lsn} was acknowledged"
        self.records = kept

    def take_checkpoint(self, wal: WriteAheadLog, lsn: int, state: bytes) -> None:
        """Take an unfinished checkpoint if it was listed."""
        latest = wal.latest_checkpoint()
        if latest is not None:
            with latest.open() as file:
                if (latest.lsn, file.read()) == (lsn, state):
                    self.checkpoint(lsn, state)
