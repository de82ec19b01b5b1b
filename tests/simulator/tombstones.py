"""Tombstones of deleted ledgers, and when they are folded: the real code of auditors and bookies on a simulated store.

Clients create, write and delete ledgers; two auditors announce deletions and fold tombstones; bookies look, stop, are
removed, replaced, or get their directory put back to an older state. Before each call of the store another actor may
act, and answers are lost, so that what an actor does is interleaved with what others do, and stops anywhere. No read is
stale: an object that has read the head of the pages sees the tombstones before it.

Rules are checked after each action, by what the world knows. At the end every bookie that belongs to the cluster runs;
then all tombstones of deleted ledgers must be folded, and nothing of them be left.

``python -m tests.simulator.tombstones SEEDS [FIRST]`` runs seeds.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from pybk.bookie.deleted_ledgers import DeletedLedgers
from pybk.errors import LedgerDeletedError, LedgerExistsError, MetadataUnreachableError, NoSuchLedgerError, PybkError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.metadata.ledgers import LEDGERS_KEY, ledger_path
from pybk.metadata.registration import BookieState
from tests.metadata.records import bookie, cluster_on, ledger
from tests.metadata.simulated_store import Fault, SimServer

ACTIONS = 120
DEPTH = 2
"""How deep actions of others are inside each other."""


class BrokenRuleError(AssertionError):
    """A rule is broken."""


def check(holds: bool, rule: str) -> None:
    """Raise BrokenRuleError if a rule does not hold."""
    if not holds:
        raise BrokenRuleError(rule)


class SimBookie:
    """A bookie: its directory, and the first entries that wait for the look-up of their ledger."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.instance = 0
        self.metadata = cluster_on(world.server.store(world.faults))
        self.ledgers: set[int] = set()
        self.left: set[int] = set()
        """What it has again because its directory was put back: nobody takes that for new."""
        self.saved: set[int] = set()
        self.removed = self.running = False
        self.start()

    @property
    def bookie(self) -> Any:
        """Its name and instance."""
        return bookie(self.number, self.instance)

    def start(self) -> None:
        """Start in its directory."""
        self.metadata.claim_cookie(self.bookie, replace=True)
        for ledger_id in sorted(self.ledgers):
            check(not self.metadata.is_unheard_of(ledger_id), f"ledger {ledger_id} was never heard of")
        self.looks = 0
        self.arriving: list[tuple[int, int]] = []
        """Ledgers that were found by a look-up, and how many looks had begun before it."""
        replicas: Any = SimpleNamespace(ledgers=lambda: sorted(self.ledgers), state=lambda ledger_id: None)
        self.deleted = DeletedLedgers(self.metadata, replicas, self.bookie, self.ledgers.discard, lambda seconds: None)
        self.running = True

    def take(self, ledger_id: int) -> None:
        """Take the first entry of a ledger, which is stored later."""
        with suppress(NoSuchLedgerError):
            looks = self.looks
            self.metadata.read_ledger(ledger_id)
            self.arriving.append((ledger_id, looks))

    def arrive(self, before: int) -> None:
        """Store the first entries whose look-up began before a look."""
        for ledger_id, _ in [each for each in self.arriving if each[1] < before]:
            self.ledgers.add(ledger_id)
            self.world.done["stored"] += 1
        self.arriving = [each for each in self.arriving if each[1] >= before]

    def look(self) -> None:
        """Look for deleted ledgers; look-ups that began before the look before have been answered by then."""
        self.arrive(self.looks)
        self.looks += 1
        self.deleted.look()


class SimAuditor:
    """A process that is the auditor, or believes so."""

    def __init__(self, world: World) -> None:
        self.metadata = cluster_on(world.server.store(world.faults))
        self.found: set[int] = set()

    def read_all(self) -> None:
        """Find all tombstones, as after an election."""
        self.metadata.begin_deletions()
        for page in self.metadata.ledger_pages(count=7):
            self.found.update(page.deleted)

    def announce(self) -> None:
        """Announce deletions, and fold what nobody needs any more."""
        wanted = sorted(self.found)
        proofs = self.metadata.deletion_proofs(wanted)
        if deleted := [each for each, proof in zip(wanted, proofs, strict=True) if proof is not None]:
            self.metadata.append_deletions(deleted)
        self.found.difference_update(wanted)
        self.metadata.trim_deletions()


class World:
    """Everything of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.server = SimServer()
        self.quiet = True
        self.busy: list[object] = []
        """The actors in the middle of something."""
        self.done: Counter[str] = Counter()
        self.live: dict[int, int] = {}
        """The ledgers that were not deleted, and their versions."""
        self.deleted: set[int] = set()
        self.client = cluster_on(self.server.store())
        self.bookies = [SimBookie(self, number) for number in range(4)]
        self.auditors = [SimAuditor(self) for _ in range(2)]
        self.quiet = False

    def faults(self, operation: str, key: str) -> Fault | None:
        """Let another actor do something before a call of the store, or let the call fail."""
        if self.quiet:
            return None
        if len(self.busy) <= DEPTH and self.random.random() < 0.15:
            self.act()
        chance = self.random.random()
        return self.random.choice((Fault.REPLY_LOST, Fault.REQUEST_LOST)) if chance < 0.02 else None

    def act(self) -> None:
        """Let an actor that does nothing do something."""
        random = self.random
        idle = [each for each in (*self.bookies, *self.auditors, self.client) if each not in self.busy]
        if not idle:
            return
        actor = random.choice(idle)
        self.busy.append(actor)
        with suppress(MetadataUnreachableError):
            if isinstance(actor, SimBookie):
                self._of_bookie(actor)
            elif isinstance(actor, SimAuditor):
                (actor.read_all if random.random() < 0.2 else actor.announce)()
            else:
                self._of_client()
        self.busy.remove(actor)

    def _of_client(self) -> None:
        random, chance = self.random, self.random.random()
        if chance < 0.4 or not self.live:
            ledger_id = self.client.new_ledger_id()
            self.live[ledger_id] = self.client.create_ledger(ledger(ledger_id, state=LedgerState.OPEN))
        elif chance < 0.8:
            ledger_id = random.choice(sorted(self.live))
            self.client.delete_ledger(ledger_id, self.live.pop(ledger_id), b"proof")
            self.deleted.add(ledger_id)
            random.choice(self.auditors).found.add(ledger_id)  # by its feed
        elif self.deleted:
            ledger_id = random.choice(sorted(self.deleted))
            with suppress(LedgerExistsError):
                self.client.create_ledger(ledger(ledger_id))
                raise BrokenRuleError(f"ledger {ledger_id} was deleted, and its id is given again")

    def _of_bookie(self, actor: SimBookie) -> None:
        random, chance = self.random, self.random.random()
        if not actor.running:
            if not actor.removed and chance < 0.3:
                actor.start()
        elif chance < 0.4:
            actor.look()
        elif chance < 0.65 and self.live:
            actor.take(random.choice(sorted(self.live)))
        elif chance < 0.8:
            actor.arrive(actor.looks + 1)
        elif chance < 0.87:
            actor.running = False
        elif chance < 0.9:
            actor.saved = set(actor.ledgers)
        elif chance < 0.92:
            actor.running, actor.ledgers = False, actor.ledgers | actor.saved
            actor.left |= actor.saved
            self.done["put back"] += 1
        elif chance < 0.94:
            actor.running, actor.ledgers, actor.saved, actor.left = False, set(), set(), set()
            actor.instance += 1
            self.done["replaced"] += 1
            actor.start()
        elif sum(not each.removed for each in self.bookies) > 2:
            self._remove(actor)

    def _remove(self, actor: SimBookie) -> None:
        """Remove a bookie for good, which may take several tries."""
        name, states = actor.bookie.bookie_id, list(BookieState)
        for to in (BookieState.DRAINING, BookieState.DRAINED, BookieState.REMOVED):
            found = actor.metadata.read_cookie(name)
            if found is not None and states.index(found.state) < states.index(to):
                actor.metadata.change_cookie(name, lambda found, to=to: replace(found, state=to))  # type: ignore[misc]
        actor.removed, actor.running = True, False
        self.done["removed"] += 1

    # ---- rules -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check what must hold at every moment."""
        for each in self.bookies:
            for ledger_id in () if each.removed else sorted(each.ledgers - each.left):
                key = f"{LEDGERS_KEY}/{ledger_path(ledger_id)}"
                check(key in self.server.nodes, f"DT1: {each.bookie} has ledger {ledger_id}, whose tombstone is folded")
        reader = cluster_on(self.server.store())
        for ledger_id in sorted(self.deleted):
            try:
                reader.read_ledger(ledger_id)
            except LedgerDeletedError:
                continue
            except PybkError as error:
                raise BrokenRuleError(f"DT3: ledger {ledger_id} was deleted: {error!r}") from error
            raise BrokenRuleError(f"DT3: ledger {ledger_id} is there again")

    def settle(self) -> None:
        """Let everything that is to be folded be folded."""
        self.quiet = True
        for each in self.bookies:
            if not each.running and not each.removed:
                each.start()
        for auditor in self.auditors:
            auditor.read_all()
        for _ in range(6):
            for auditor in self.auditors:
                auditor.announce()
            for each in self.bookies:
                if not each.removed:
                    each.arrive(each.looks + 1)
                    each.look()
            self.check()
        left = [each for page in self.client.ledger_pages() for each in page.deleted]
        check(not left, f"tombstones are left: {left}")
        for each in self.bookies:
            kept = sorted((each.ledgers & self.deleted) - each.left)
            check(each.removed or not kept, f"{each.bookie} still has {kept}")
        folded = sum(self.client.is_folded(each) for each in self.deleted)
        check(folded == len(self.deleted), "each deleted ledger is known as deleted")
        self.done["folded"] += folded


def run(seed: int) -> tuple[World, Exception | None]:
    """Run a seed; return its world and what was broken."""
    world = World(seed)
    try:
        for _ in range(ACTIONS):
            world.act()
            world.check()
        world.settle()
    except Exception as error:  # noqa: BLE001  # whatever is raised is a failure of the seed
        return world, error
    return world, None


def main() -> int:
    """Run seeds, and print those that fail."""
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    done: Counter[str] = Counter()
    failures = 0
    for seed in range(first, first + count):
        world, error = run(seed)
        done.update(world.done)
        if error is not None:
            failures += 1
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
    sys.stdout.write(f"{count} seeds, {failures} failures, {dict(done)}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
