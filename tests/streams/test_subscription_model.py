"""Owners that take a subscription from each other, and do everything with it, compared with a set of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from pybk import LedgerManager, Log, LogEnd, LogFencedError, LogWriter, Subscription, TooManyRequestsError
from pybk.streams import cursor

STEPS = 150
OWNERS = 2
MAX_UNACKED = 20


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LedgerManager]:
    path: Path = tmp_path_factory.mktemp("model")
    with LedgerManager.open(path / "store") as manager:
        yield manager


class World:
    """A log, its owners of one subscription, and what is acknowledged."""

    def __init__(self, log: Log, writer: LogWriter, seed: int) -> None:
        self.log = log
        self.writer = writer
        self.random = Random(seed)
        self.owners: list[Subscription | None] = [None] * OWNERS
        self.present = -1
        """Which of them has it."""
        self.acked: set[int] = set()
        self.outstanding: set[int] = set()
        self.waiting: set[int] = set()
        """Outstanding records that were given back."""
        self.end = 0

    @property
    def unacked(self) -> list[int]:
        """The records that are not acknowledged."""
        return sorted(set(range(self.end)) - self.acked)

    def step(self) -> None:
        """Do one thing."""
        number = self.random.randrange(OWNERS)
        owner = self.owners[number]
        if owner is None or self.random.random() < 0.05:
            self.take(number)
        elif number != self.present:
            self.try_in_vain(owner)
            self.owners[number] = None
        else:
            what = self.random.choices(
                (self.append, self.read, self.ack, self.nack, self.seek, self.rewind, self.skip, self.truncate),
                (4, 8, 8, 4, 1, 1, 1, 2),
            )[0]
            what(owner)

    def take(self, number: int) -> None:
        """Open the subscription, which another may have open."""
        before = self.owners[number]
        owner = self.log.subscribe("sub", start=LogEnd.EARLIEST, max_unacked=MAX_UNACKED, steal=True)
        self.owners[number] = owner
        if before is not None:
            let_go(before)
        self.present = number
        self.outstanding, self.waiting = set(), set()
        assert [seq for each in owner.unacked_ranges() for seq in each] == self.unacked

    def try_in_vain(self, owner: Subscription) -> None:
        """Have an owner that was fenced do something."""
        if self.random.random() < 0.5 or not self.end:
            with pytest.raises(LogFencedError):
                owner.seek(0)
        else:
            with pytest.raises(LogFencedError):
                owner.ack(self.random.randrange(self.end))
        let_go(owner)

    def append(self, _: Subscription) -> None:
        """Append some records."""
        count = self.random.randint(1, 12)
        self.writer.append_many([b"x"] * count)
        self.end += count
        if self.random.random() < 0.2:
            self.writer.roll()

    def read(self, owner: Subscription) -> None:
        """Read: first what was given back, then fresh records in order."""
        fresh = [seq for seq in self.unacked if seq not in self.outstanding]
        if not fresh and not self.waiting:
            return
        most = self.random.randint(1, 9)
        try:
            found = [record.seq for record in owner.read_many(most, timeout=0)]
        except TooManyRequestsError:
            assert not self.waiting
            assert len(self.outstanding) >= MAX_UNACKED
            return
        if self.waiting:
            assert set(found) <= self.waiting
            assert len(found) == min(most, len(self.waiting))
            self.waiting -= set(found)
        else:
            assert found == fresh[: len(found)]
            assert found
            self.outstanding |= set(found)
            assert len(self.outstanding) <= MAX_UNACKED

    def ack(self, owner: Subscription) -> None:
        """Acknowledge records that were handed out."""
        if self.outstanding:
            chosen = self.random.sample(sorted(self.outstanding), self.random.randint(1, len(self.outstanding)))
            if self.random.random() < 0.5:
                owner.ack(chosen)
            else:
                for each in [owner.ack_async(seq) for seq in chosen]:
                    assert each.result() == 1
            self.settle(set(chosen))
        assert owner.backlog() == len(self.unacked)

    def settle(self, acked: set[int]) -> None:
        """Records were acknowledged."""
        self.acked |= acked
        self.outstanding -= acked
        self.waiting -= acked

    def nack(self, owner: Subscription) -> None:
        """Give records back."""
        given = {seq for seq in self.outstanding if self.random.random() < 0.4}
        if given:
            assert owner.nack(sorted(given)) == len(given)
            self.waiting |= given

    def seek(self, owner: Subscription) -> None:
        """Move somewhere."""
        wanted = self.random.randint(0, self.end)
        found = owner.seek(wanted)
        assert found == max(wanted, self.log.first_seq())
        self.acked = set(range(found))
        self.outstanding, self.waiting = set(), set()

    def rewind(self, owner: Subscription) -> None:
        """Begin again."""
        owner.rewind()
        self.outstanding, self.waiting = set(), set()

    def skip(self, owner: Subscription) -> None:
        """Skip some records."""
        count = self.random.randint(0, 5)
        skipped = set(self.unacked[:count])
        assert owner.skip(count) == len(skipped)
        self.settle(skipped)

    def truncate(self, owner: Subscription) -> None:
        """Drop what is acknowledged."""
        if self.random.random() < 0.5:
            owner.close()
            self.owners[self.present] = None
            self.present = -1
            self.outstanding, self.waiting = set(), set()
            self.log.truncate(min([*self.unacked, self.end]))


def let_go(owner: Subscription) -> None:
    """Close what was fenced."""
    with suppress(LogFencedError):
        owner.close()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", range(6))
def test_owners_agree_on_what_is_acknowledged(
    manager: LedgerManager, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursor, "CHANGES_BYTES", 500)
    monkeypatch.setattr(cursor, "CURSOR_SEGMENT_BYTES", 2000)
    with Log.open(manager, f"log {seed}", insecure=True) as log:
        world = World(log, log.writer(), seed)
        for _ in range(STEPS):
            world.step()
        world.take(0)
        for owner in filter(None, world.owners[1:]):
            let_go(owner)
