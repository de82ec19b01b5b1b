"""A workload of a subscription that says what it does, and the model of what has to be acknowledged then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from pybk import LedgerManager, Log, LogEnd, LogWriter, Retention, Subscription
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_record import ListKind
from pybk.streams.log_settings import spec_of

Report = Callable[[str], object]
NAME = "sub"


def opened(manager: LedgerManager) -> Log:
    """Open the log."""
    return Log.open(manager, "log", insecure=True)


def work(log: Log, writer: LogWriter, random: Random, report: Report) -> Iterator[None]:
    """Append, read, acknowledge, seek, roll and open again at random, for ever; yields after each step.

    Each acknowledgement and seek is reported before it begins, where it may be half done, and after it was done.
    """
    log.set_retention(Retention())
    subscription = log.subscribe(NAME, start=LogEnd.EARLIEST, max_unacked=50)
    report(f"opened {writer.last_seq}")
    while True:
        chance = random.random()
        if chance < 0.3:
            batch = [b"%d" % random.getrandbits(64) for _ in range(random.randint(1, 9))]
            last = writer.append_many(batch)[-1].seq
            report(f"appended {last}")
        elif chance < 0.35:
            writer.roll()
        elif chance < 0.4:
            subscription.close()
            subscription = log.subscribe(NAME, max_unacked=50)
        elif chance < 0.45:
            seek(subscription, writer, random, report)
        elif chance < 0.95:
            acknowledge(subscription, random, report)
        else:
            report("clearing")
            subscription.skip_all()
            report(f"cleared {writer.last_seq}")
        yield


def seek(subscription: Subscription, writer: LogWriter, random: Random, report: Report) -> None:
    """Move somewhere."""
    seq = random.randint(max(0, subscription.first_unacked() - 20), writer.last_seq + 1)
    report(f"seeking {seq}")
    report(f"sought {subscription.seek(seq)}")


def acknowledge(subscription: Subscription, random: Random, report: Report) -> None:
    """Read some records, acknowledge some of them, and give the others back."""
    ready = subscription.stats().outstanding < 50
    records = subscription.read_many(random.randint(1, 9), timeout=0) if ready else []
    if not records:
        subscription.rewind()
        return
    chosen = sorted(record.seq for record in records if random.random() < 0.7)
    if chosen:
        told = " ".join(map(str, chosen))
        report(f"acking {told}")
        subscription.ack(chosen, properties={"last": chosen[-1]})
        report(f"acked {told}")
    subscription.nack(records)


class Model:
    """What the reports of all workloads so far say."""

    def __init__(self) -> None:
        self.last = -1
        self.acked: set[int] = set()
        self.property: int | None = None
        self.unfinished: list[str] = []

    def take(self, line: str) -> None:
        """Take one report."""
        what, *words = line.split()
        numbers = list(map(int, words))
        self.unfinished = [what, *words] if what.endswith("ing") else []
        if what == "appended":
            self.last = max(self.last, *numbers)
        elif what == "acked":
            self.acked |= set(numbers)
            self.property = numbers[-1]
        elif what == "sought":
            self.acked = set(range(*numbers))
        elif what == "cleared":
            self.acked = set(range(numbers[0] + 1))

    def may_be(self, log: Log) -> list[tuple[set[int], int | None]]:
        """Return what may be acknowledged, and the property."""
        what, *words = self.unfinished or [""]
        numbers = list(map(int, words))
        states = [(self.acked, self.property)]
        if what == "acking":
            states.append((self.acked | set(numbers), numbers[-1]))
        elif what == "seeking":
            states += [(set(range(seq)), self.property) for seq in (numbers[0], max(numbers[0], log.first_seq()))]
        elif what == "clearing":
            states.append((set(range(log.last_seq() + 1)), self.property))
        return states

    def check(self, manager: LedgerManager, log: Log) -> None:
        """Compare the subscription with the model; what was not finished may be done or not, and is taken from it."""
        steps = LedgerSteps(manager, "log", spec_of(ListKind.LOG, None, None, insecure=True))
        bound = steps.bound(NAME)
        assert log.last_seq() >= self.last, "an acknowledged append is gone"
        everything = set(range(log.last_seq() + 1))
        with log.subscribe(NAME, start=LogEnd.EARLIEST, max_unacked=1 << 30) as subscription:
            unacked = {seq for each in subscription.unacked_ranges() for seq in each}
            found = everything - unacked, subscription.properties.get("last")
            possible = [(acked & everything, value) for acked, value in self.may_be(log)]
            assert found in possible, f"{sorted(found[0])} are acknowledged, {self.unfinished} {sorted(self.acked)}"
            assert bound is None or bound.seq <= subscription.first_unacked(), "the bound passes the cursor"
            assert log.first_seq() <= subscription.first_unacked(), "a record was dropped that is not acknowledged"
            handed = []
            while records := subscription.read_many(100, timeout=0):
                handed += [record.seq for record in records]
            assert handed == sorted(unacked), "what is not acknowledged is handed out, each once, in order"
        self.last, self.unfinished = log.last_seq(), []
        self.acked, self.property = found
