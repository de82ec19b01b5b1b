"""What goes wrong, as the plan of the seed says, until it stops."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from tests.simulator.clients import Rereplication
from tests.simulator.plan import MS
from tests.simulator.surplus import SlowRereplication

if TYPE_CHECKING:
    from tests.simulator.harness import Harness
    from tests.simulator.ledgers import SimLedger


class Faults:
    """Brings about one fault after the other."""

    name = "faults"

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.random = Random(f"{harness.seed}/faults")
        self.stopped = False
        self.losses: dict[str, None] = {}
        self.losses_max = min(ledger.plan.quorum.ack_quorum for ledger in harness.ledgers.values()) - 1
        plan = harness.plan
        kinds: list[tuple[bool, Callable[[], None]]] = [
            (plan.clogs, self.clog),
            (plan.clogs, self.clog),
            (plan.cuts, self.cut),
            (plan.pauses, self.pause),
            (plan.kills, self.kill),
            (plan.crashes, self.crash),
            (bool(plan.loses_data) or (plan.deferred and not plan.forces_early), self.lose),
            (plan.swaps, self.replicate),
            (plan.deletes, self.delete),
            (plan.fills, self.fill),
            (plan.surplus_ns > 0, self.replicate),
            (plan.surplus_ns > 0, self.replicate),
            (plan.surplus_ns > 0, self.replicate),
        ]
        self.kinds = [kind for enabled, kind in kinds if enabled]
        if self.kinds:
            self.later()

    def later(self) -> None:
        self.harness.clock.after(int(self.random.expovariate(1 / self.harness.plan.fault_every_ns)), self.strike)

    def stop(self) -> None:
        self.stopped = True

    def strike(self) -> None:
        """Do something bad."""
        if not self.stopped:
            self.random.choice(self.kinds)()
            self.later()

    def _any_ledger(self) -> SimLedger:
        ledgers = list(self.harness.ledgers.values())
        return ledgers[0] if len(ledgers) == 1 else self.random.choice(ledgers)

    def _clients(self) -> list[str]:
        return [
            client.name for ledger in self.harness.ledgers.values() for client in (ledger.writer, *ledger.recoverers)
        ]

    def _links(self) -> list[tuple[str, str]]:
        """Return one or two links, or all of one client or bookie; each way or one."""
        clients, bookies = self._clients(), list(self.harness.bookies)
        chance = self.random.random()
        if chance < 0.3:
            client = self.random.choice(clients)
            links = [(client, bookie) for bookie in bookies]
        elif chance < 0.4:
            bookie = self.random.choice(bookies)
            links = [(client, bookie) for client in clients]
        else:
            count = self.random.randint(1, 2)
            links = [(self.random.choice(clients), self.random.choice(bookies)) for _ in range(count)]
        way = self.random.random()
        back = [(bookie, client) for client, bookie in links]
        return links if way < 0.3 else back if way < 0.5 else links + back

    def clog(self) -> None:
        """Hold back messages for a while."""
        until = self.harness.clock.now + int(self.random.choice((5, 20, 100, 300)) * MS * self.random.random())
        for link in self._links():
            self.harness.network.clog(*link, until)

    def cut(self) -> None:
        """Lose messages for a while."""
        until = self.harness.clock.now + int(self.random.choice((5, 20, 100)) * MS * self.random.random())
        for link in self._links():
            self.harness.network.cut(*link, until)

    def pause(self) -> None:
        """Let a client stand still, for so long that others take it for dead."""
        ledger = self._any_ledger()
        client = self.random.choice([ledger.writer, ledger.writer, *ledger.recoverers])
        if not client.paused:
            client.paused = True
            self.harness.clock.after(int(self.random.choice((10, 100, 400)) * MS * self.random.random()), client.resume)

    def kill(self) -> None:
        """Let a client die in the middle of what it does; the recovery at the end always comes."""
        if self.random.random() < 0.2:
            ledger = self._any_ledger()
            self.random.choice([ledger.writer, *ledger.recoverers]).stopped = True

    def crash(self) -> None:
        """Stop a bookie; it comes back."""
        bookie = self.harness.bookies[self.random.choice(list(self.harness.bookies))]
        bookie.crash()
        self.harness.clock.after(int(self.random.choice((5, 50)) * MS * self.random.random()), bookie.restart)

    def lose(self) -> None:
        """Take away what a bookie has; of fewer bookies than acknowledge an entry, as more is lost for good."""
        harness = self.harness
        name = self.random.choice(list(harness.bookies))
        if name not in self.losses and len(self.losses) >= self.losses_max:
            return
        if name in self.losses and harness.plan.loses_data == "wiped":
            return  # each instance that is lost counts
        self.losses[name] = None
        bookie = harness.bookies[name]
        if not harness.plan.loses_data:
            bookie.crash()
            bookie.restart()
        elif harness.plan.loses_data == "forgets":
            bookie.forget()
        elif harness.plan.loses_data == "wiped":
            bookie.wipe()
        else:
            for disk in bookie.disks.values():
                disk.damage(self.random)

    def replicate(self) -> None:
        """Give the places of a bookie in some fragment to another, though nothing is wrong with it."""
        ledger = self._any_ledger()
        metadata = ledger.metadata.current
        drops = ledger.plan.surplus_ns
        if metadata is not None and len(ledger.copiers) < (20 if drops else 3):
            fragment = self.random.choice(metadata.fragments)
            lost = frozenset((self.random.choice(fragment.ensemble),))
            kind = SlowRereplication if drops else Rereplication
            copier = kind(ledger, len(ledger.copiers), fragment.first_entry_id, lost)
            ledger.copiers.append(copier)
            copier.begin()

    def fill(self) -> None:
        """Let a bookie run out of space: it takes recoveries' adds only."""
        self.harness.bookies[self.random.choice(list(self.harness.bookies))].fill()

    def delete(self) -> None:
        """Delete a ledger; bookies collect it one after the other."""
        ledger = self._any_ledger()
        if ledger.metadata.current is None:
            return
        ledger.metadata.delete()
        for bookie in self.harness.bookies.values():
            self.harness.clock.after(int(self.random.random() * 100 * MS), bookie.ledger_deleted, ledger)
