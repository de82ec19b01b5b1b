"""A workload of a named log that says what it does, and the model of what the log has to hold then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from pybk import LedgerManager, Log, LogReader, LogWriter, NewRecord, TxId

Report = Callable[[str], object]


def opened(manager: LedgerManager) -> Log:
    """Open the log."""
    return Log.open(manager, "log", insecure=True)


def work(log: Log, writer: LogWriter, random: Random, report: Report) -> Iterator[None]:
    """Append, roll, read and truncate at random, for ever; yields after each step.

    Each truncation is reported before it begins, where it may be half done, and after it was done.
    """
    report(f"open {log.first_seq()} {writer.last_seq}")
    reader = log.reader()
    while True:
        chance = random.random()
        if chance < 0.5:
            new = new_record(random)
            position = writer.append(new.data, txid=new.txid, key=new.key, time_ns=new.time_ns)
            report(f"appended {position.seq} {new.txid} {new.data.hex()}")
        elif chance < 0.7:
            batch = [new_record(random) for _ in range(random.randint(1, 20))]
            for position, new in zip(writer.append_many(batch), batch, strict=True):
                report(f"appended {position.seq} {new.txid} {new.data.hex()}")
        elif chance < 0.78:
            writer.roll()
        elif chance < 0.86:
            seq = max(log.first_seq(), writer.last_seq + 1 - random.randint(0, 30))
            report(f"truncating {seq}")
            log.truncate(seq)
            report(f"truncated {seq}")
        else:
            read_on(reader, report)
        yield


def new_record(random: Random) -> NewRecord:
    """Return a record; neither transaction ids nor times ascend."""
    number = random.getrandbits(16)
    return NewRecord(b"%d " % number * random.randint(1, 9), number, b"key %d" % number, time_ns=number)


def read_on(reader: LogReader, report: Report) -> None:
    """Read what is new: all of it in order, or counted as skipped."""
    before, skipped = reader.seq, reader.skipped
    for record in reader:
        assert record.seq == before + reader.skipped - skipped
        before, skipped = record.seq + 1, reader.skipped
        report(f"read {record.seq} {record.txid} {record.data.hex()}")


class Model:
    """What the reports of all workloads so far say."""

    def __init__(self) -> None:
        self.records: dict[int, tuple[int, bytes]] = {}
        self.first = 0
        self.truncating: int | None = None

    def take(self, line: str) -> None:
        """Take one report."""
        what, *words = line.split()
        if what in ("appended", "read"):
            seq, record = int(words[0]), (int(words[1]), bytes.fromhex(words[2]))
            assert self.records.setdefault(seq, record) == record, f"record {seq} is another one"
        elif what == "truncating":
            self.truncating = int(words[0])
        elif what == "truncated":
            self.first, self.truncating = max(self.first, int(words[0])), None

    def check(self, log: Log) -> None:
        """Compare the log with the model; what was not finished may be done or not, and is taken from the log."""
        if log.first_seq() == self.truncating:
            self.first = self.truncating
        self.truncating = None
        assert log.first_seq() == self.first
        found = list(log.reader())
        assert [record.seq for record in found] == list(range(self.first, self.first + len(found)))
        kept = {record.seq: (record.txid or 0, record.data) for record in found}
        for seq, expected in self.records.items():
            if seq >= self.first:
                assert kept.get(seq) == expected, f"record {seq} was acknowledged or read"
        self.records = kept
        for record in found:
            assert (record.key, record.time_ns) == (b"key %d" % (record.txid or 0), record.txid)
        for wanted in sorted({record.txid or 0 for record in found})[::7]:
            first = next(record.position for record in found if (record.txid or 0) >= wanted)
            assert log.position_for(TxId(wanted)) == first
