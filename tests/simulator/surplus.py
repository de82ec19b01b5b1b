"""Bookies that drop surplus copies, re-replications that stand still at the worst time, and a writer that sleeps."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from pybk.replication import surplus
from pybk.replication.messages import (
    AnnounceDrop,
    Done,
    DropAnnounced,
    DropEnded,
    DropEntries,
    Event,
    Failed,
    MetadataRead,
    ReadMetadata,
    WriteMetadata,
)
from pybk.replication.surplus import SurplusDropMachine
from tests.simulator.clients import Client, Rereplication
from tests.simulator.plan import MS

if TYPE_CHECKING:
    from tests.simulator.bookies import SimBookie
    from tests.simulator.harness import Harness
    from tests.simulator.ledgers import SimLedger

LOOK_NS = 10 * MS
"""How often a bookie looks for surplus copies."""

ROUNDS = 2
"""How often bookies are replaced once the faults have stopped."""

PATIENCE = 200
"""How many looks it may take until the last surplus copy is dropped."""


class SlowRereplication(Rereplication):
    """Replicates one fragment, and may stand still before its compare-and-set, or in the middle of its copies."""

    def write_metadata(self, effect: WriteMetadata) -> None:
        chance = self.random.random()
        if chance < 0.5:
            delay = int(self.random.random() * 10 * self.ledger.plan.surplus_ns)
            self.ledger.clock.after(delay, self._write, self.machines, effect)
        else:
            super().write_metadata(effect)

    def _write(self, machine: int, effect: WriteMetadata) -> None:
        if machine == self.machines:
            super().write_metadata(effect)

    def step(self, event: Event) -> None:
        if not self.paused and self.random.random() < 0.05:
            self.paused = True
            self.waiting.append((self.machines, event))
            self.ledger.clock.after(int(self.random.random() * 10 * self.ledger.plan.surplus_ns), self.resume)
            return
        super().step(event)


class _Attempt(Client):
    """One look at the metadata and, if the copy was surplus for long enough, its drop.

    It ends with the process of its bookie.
    """

    def __init__(self, dropper: Dropper) -> None:
        super().__init__(dropper.ledger, f"dropper{dropper.host.number}")
        self.random = dropper.random
        self.dropper = dropper
        self.life = dropper.host.life
        self.performers |= {AnnounceDrop: self.announce, DropEntries: self.drop}

    def deliver_to(self, to: int, event: Event) -> None:
        if self.dropper.attempt is self and self.dropper.host.life == self.life:
            super().deliver_to(to, event)

    def step(self, event: Event) -> None:
        if self.machine is not None:
            super().step(event)
            return
        self.dropper.attempt = None
        if isinstance(event, MetadataRead) and event.metadata is not None and self.dropper.seen(event):
            self.dropper.attempt = self
            self.began = self.ledger.clock.now
            machine = SurplusDropMachine(event.metadata, event.version, self.dropper.host.bookie, self.random)
            self.take(machine)
            self.perform(machine.start(self.began))

    def announce(self, effect: AnnounceDrop) -> None:
        ready = self.dropper.host.machine.announce_drop(self.ledger.ledger_id)
        self.ledger.clock.after(int(self.random.random() * MS), self.deliver_to, self.machines, DropAnnounced(ready))

    def drop(self, effect: DropEntries) -> None:
        self.ledger.clock.after(int(self.random.random() * MS), self.drop_now)

    def drop_now(self) -> None:
        """Let the bookie drop its copy, and sometimes stop in the middle of that."""
        host = self.dropper.host
        if host.life != self.life:
            return
        if self.random.random() < 0.1:
            host.disks[self.ledger.ledger_id].stop_in_drop()
        dropped = host.drop_entries(self.ledger)
        if dropped is not False:
            self.ledger.checker.dropping(host.bookie, self.began)
        self.deliver_to(self.machines, DropEnded(bool(dropped)))

    def done(self, effect: Done) -> None:
        self.dropper.attempt = None

    def failed(self, effect: Failed) -> None:
        self.dropper.attempt = None


class Dropper:
    """Looks again and again whether a bookie's copy of one ledger is surplus (``healing/unnamed_copies.py``).

    It lives in the process of the bookie: what it knows ends with that.
    """

    def __init__(self, ledger: SimLedger, bookie: SimBookie) -> None:
        self.ledger = ledger
        self.host = bookie
        self.random: Random = Random(f"{ledger.source}/dropper{bookie.number}")
        self.life = bookie.life
        self.noted: tuple[int, int] | None = None
        """The version at which the copy was surplus, and since when."""
        self.attempt: _Attempt | None = None
        self.rests = 0
        """How many looks are left out, because the last one found nothing to drop."""

    def look(self) -> None:
        """Read the metadata, unless a drop is under way or there is nothing to drop."""
        host = self.host
        if host.life != self.life:
            self.life, self.noted, self.attempt = host.life, None, None
        if self.rests:
            self.rests -= 1
        elif host.up and self.attempt is None and not host.disks[self.ledger.ledger_id].empty:
            self.attempt = _Attempt(self)
            self.attempt.read_metadata(ReadMetadata())

    def seen(self, found: MetadataRead) -> bool:
        """Note what was read; return whether the copy was surplus at this version for long enough (SD1)."""
        now = self.ledger.clock.now
        assert found.metadata is not None
        if not surplus.is_surplus(found.metadata, self.host.bookie):
            self.noted = None
            self.rests = 4
            return False
        if self.noted is None or self.noted[0] != found.version:
            self.noted = found.version, now
        return now - self.noted[1] >= self.ledger.plan.surplus_ns


class SurplusDrops:
    """Lets all bookies drop surplus copies.

    Attributes:
        droppers: By bookie and ledger.
    """

    name = "surplus"

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.random = Random(f"{harness.seed}/surplus")
        self.droppers = [
            Dropper(ledger, bookie) for ledger in harness.ledgers.values() for bookie in harness.bookies.values()
        ]
        self.look()
        if harness.plan.sleeps:
            for ledger in harness.ledgers.values():
                harness.clock.after(int(self.random.random() * harness.plan.faults_ns), self.sleep, ledger)

    def look(self) -> None:
        """Let each bookie look at each ledger."""
        for dropper in self.droppers:
            dropper.look()
        self.harness.clock.after(LOOK_NS, self.look)

    def sleep(self, ledger: SimLedger) -> None:
        """Let a writer stand still until it is woken."""
        ledger.writer.asleep = ledger.writer.paused = True

    def settle(self) -> None:
        """Replace bookies, let them drop what they have, and then wake the writers: nothing is lost or taken."""
        harness = self.harness
        for ledger in harness.ledgers.values():
            for _ in range(ROUNDS):
                ledger.replicate()
                harness.clock.run(harness.clock.now + 4 * harness.plan.surplus_ns)
        for ledger in harness.ledgers.values():
            self._wait_for_drops(ledger)
            ledger.writer.asleep = False
            ledger.writer.resume()
        harness.clock.run(harness.clock.now + 20 * harness.plan.timeout_ns)
        for ledger in harness.ledgers.values():
            self._check_fences(ledger)
            ledger.read_all()

    def _wait_for_drops(self, ledger: SimLedger) -> None:
        """SD6: no surplus copy stays for ever, if all bookies have what the ledger names them for."""
        harness = self.harness
        if harness.plan.loses_data or ledger.metadata.current is None:
            return
        until = harness.clock.now + PATIENCE * max(LOOK_NS, harness.plan.surplus_ns)
        done = harness.clock.run(until, lambda: not self._surplus(ledger))
        ledger.checker.check(done, f"SD6: surplus copies stay at {', '.join(self._surplus(ledger))}")

    def _surplus(self, ledger: SimLedger) -> list[str]:
        """Return the bookies that have surplus copies."""
        metadata = ledger.metadata.current
        if metadata is None:
            return []
        unnamed = [each for each in self.harness.bookies.values() if surplus.is_surplus(metadata, each.bookie)]
        return [each.name for each in unnamed if not ledger.disks[each.bookie].empty]

    def _check_fences(self, ledger: SimLedger) -> None:
        """SD5: a bookie that was fenced is fenced, though it has nothing else of the ledger."""
        if ledger.metadata.current is None:
            return
        for bookie in ledger.checker.fenced:
            disk = ledger.disks[bookie]
            gone = self.harness.bookies[bookie.bookie_id].bookie != bookie
            state = disk.state(ledger.ledger_id)
            limbo = state is not None and state.gap
            ledger.checker.check(gone or limbo or disk.fenced, f"SD5: {bookie} lost its fence")
