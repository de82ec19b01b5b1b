"""One run: the cluster, its ledgers, the faults, and what must come of it when they stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

from tests.simulator.bookies import SimBookie
from tests.simulator.checker import CutShortError
from tests.simulator.deceit import AlteringReplicas
from tests.simulator.disk import LEDGER, Disk, ModelReplicas
from tests.simulator.faults import Faults
from tests.simulator.ledgers import SimLedger
from tests.simulator.network import Clock, Network
from tests.simulator.plan import MS, Plan, draw, sibling_plan
from tests.simulator.surplus import SurplusDrops


def model_disk(random: Random, plan: Plan) -> Disk:
    """Make a disk that is a model."""
    make = AlteringReplicas if plan.alters else ModelReplicas
    return make(random, deferred=plan.deferred, short=plan.short, errors=plan.errors)


class Harness:
    """Everything of one seed.

    Attributes:
        ledgers: The ledgers by id; each seed has the first one.
        ledger: The first one.
    """

    def __init__(
        self, seed: int, *, traced: bool = False, make_disk: Callable[[Random, Plan], Disk] = model_disk
    ) -> None:
        self.seed = seed
        self.plan = draw(seed)
        self.clock = Clock(traced=traced)
        self.network = Network(seed, self.plan, self.clock)
        self.make_disk = make_disk
        self.bookies: dict[str, SimBookie] = {}
        self.ledger = SimLedger(self, LEDGER, self.plan, first=True)
        self.ledgers = {LEDGER: self.ledger}
        for ledger_id in range(LEDGER + 1, LEDGER + self.plan.ledgers):
            self.ledgers[ledger_id] = SimLedger(self, ledger_id, sibling_plan(seed, ledger_id, self.plan), first=False)
        for number in range(self.plan.quorum.ensemble_size + self.plan.spares):
            bookie = SimBookie(self, number)
            self.bookies[bookie.name] = bookie
        self._leave_some()
        self._drain_some()
        for ledger in self.ledgers.values():
            ledger.populate()
        self.surplus = SurplusDrops(self) if self.plan.surplus_ns else None
        self.faults = Faults(self)

    def _leave_some(self) -> None:
        """Have bookies be away, or full, when the ledgers are created; some take entries only after the faults."""
        random = Random(f"{self.seed}/away")
        for name in random.sample(list(self.bookies), self.plan.away):
            bookie = self.bookies[name]
            within_ns = random.choice((5 * MS, self.plan.faults_ns // 2, 2 * self.plan.faults_ns))
            due_ns = int(random.random() * within_ns)
            if random.random() < 0.3:
                bookie.fill()
                self.clock.after(due_ns, bookie.make_space)
            else:
                bookie.up = False
                self.clock.after(due_ns, bookie.restart)

    def _drain_some(self) -> None:
        """Have bookies be drained, most of them once the writer may write nothing."""
        random = Random(f"{self.seed}/drains")
        for name in random.sample(list(self.bookies), self.plan.drains):
            self.clock.after(int(random.random() * 1.2 * self.plan.faults_ns), self.bookies[name].drain)

    def bookies_changed(self) -> None:
        """A bookie registered."""
        for ledger in self.ledgers.values():
            ledger.bookies_changed()

    def run(self) -> None:
        """Let everything happen, and then require that it comes to a good end."""
        with suppress(CutShortError):
            self._run()

    def _run(self) -> None:
        self.clock.run(self.plan.faults_ns)
        self.heal()
        ledgers = self.ledgers.values()
        for ledger in ledgers if self.plan.drains else ():
            ledger.leave()
        for ledger in ledgers:
            ledger.settle()
        for ledger in ledgers:
            ledger.read_all()
            ledger.replicate()
            ledger.read_all()
        if self.surplus is not None:
            self.surplus.settle()

    def heal(self) -> None:
        """Stop all faults."""
        self.faults.stop()
        self.network.heal()
        for ledger in self.ledgers.values():
            ledger.heal()
            for disk in ledger.disks.values():
                disk.heal()
        for bookie in self.bookies.values():
            bookie.restart()
        for ledger in self.ledgers.values():
            ledger.resume()
        self.bookies_changed()

    def close(self) -> None:
        """Let go of the disks."""
        for ledger in self.ledgers.values():
            for disk in ledger.disks.values():
                disk.close()
