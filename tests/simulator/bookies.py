"""Bookies of the simulation: the real machine on a disk that forgets what was not synced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from pybk.errors import StorageError
from pybk.ledger.ledger_metadata import INSTANCE_BYTES, Bookie, LedgerMetadata, LedgerState
from pybk.replication.bookie import BookieEffect, BookieMachine, LookUp, Respond
from pybk.replication.fragments import fragment_end
from pybk.replication.messages import LacReply, ReadReply, Reply, Request, Status
from tests.simdisk import SimCrash
from tests.simulator.disk import Disk, DiskGroup
from tests.simulator.plan import MS

if TYPE_CHECKING:
    from tests.simulator.clients import Client
    from tests.simulator.harness import Harness
    from tests.simulator.ledgers import SimLedger


REPAIR_NS = 20 * MS
"""How soon a bookie gets back what it may have lost, once its ledger is closed."""


class Asked(NamedTuple):
    """A client that waits for a reply, and the request."""

    client: Client
    token: int
    request: Request
    life: int


class SimBookie:
    """A bookie under one name; a wiped one continues as another instance."""

    def __init__(self, harness: Harness, number: int) -> None:
        self.harness = harness
        self.number = number
        self.name = f"b{number}"
        self.random = Random(f"{harness.seed}/{self.name}")
        self.instances = 0
        self.life = 0
        self.up = True
        self.full = False
        self.leaves = False
        """Whether it is drained; its machine takes writers' entries no more a moment later."""
        self.lost_at: dict[tuple[Bookie, int], int] = {}
        """When each instance lost what it had of each ledger, until it has that again."""
        self.committing = False
        self.begin()

    def begin(self) -> None:
        """Be a new instance, with an empty disk."""
        self.instances += 1
        self.bookie = Bookie(self.name, bytes([self.number, self.instances]).ljust(INSTANCE_BYTES, b"-"))
        harness = self.harness
        self.disks: dict[int, Disk] = {}
        for ledger_id, ledger in harness.ledgers.items():
            own = self.random if ledger is harness.ledger else Random(f"{ledger.source}/{self.name}/{self.instances}")
            self.disks[ledger_id] = ledger.disks[self.bookie] = harness.make_disk(own, ledger.plan)
        first = self.disks[harness.ledger.ledger_id]
        self.replicas: Disk | DiskGroup = first if len(self.disks) == 1 else DiskGroup(self.disks)
        self.machine = BookieMachine(self.replicas)

    def deliver(self, client: Client, token: int, to: Bookie, request: Request) -> None:
        """Take a request that arrived."""
        if not self.up:
            return
        asked = Asked(client, token, request, self.life)
        if to != self.bookie:
            reply: Reply | LacReply | ReadReply = Reply(Status.WRONG_INSTANCE)
            self.harness.network.send(self.name, client.name, client.answered, token, reply, to)
            return
        header = self.disks[request.ledger_id].header
        self.let(lambda: self.machine.receive(asked, request, header, self.harness.clock.now))
        self.commit_soon()

    def commit_soon(self) -> None:
        """Sync in a moment, with what else comes until then."""
        if self.up and not self.committing:
            self.committing = True
            self.harness.clock.after(int(self.random.random() * MS / 2), self.commit, self.life)

    def commit(self, life: int) -> None:
        """Sync."""
        if life == self.life:
            self.committing = False
            self.let(self.machine.commit)

    def woken(self, life: int) -> None:
        """Let the machine look who waited long enough."""
        if life == self.life:
            self.perform(self.machine.woken(self.harness.clock.now))

    def looked_up(self, life: int, ledger_id: int, exists: bool | None) -> None:
        """Pass to the machine whether a ledger exists."""
        if life == self.life:
            self.let(lambda: self.machine.ledger_looked_up(ledger_id, exists, self.harness.clock.now))
            self.commit_soon()

    def ledger_deleted(self, ledger: SimLedger) -> None:
        """Collect a deleted ledger."""
        if self.up:
            ledger.checker.collected(self.bookie)
            self.let(lambda: self.machine.ledger_deleted(ledger.ledger_id))

    def drop_entries(self, ledger: SimLedger) -> bool | None:
        """Let the machine drop a surplus copy; return whether it did, None if it failed half-way."""
        dropped: bool | None = None

        def drop() -> list[BookieEffect]:
            nonlocal dropped
            try:
                dropped, effects = self.machine.drop_entries(ledger.ledger_id)
            except StorageError:
                return []
            return effects

        self.let(drop)
        return dropped

    def let(self, act: Callable[[], list[BookieEffect]]) -> None:
        """Let the machine do something, in the middle of which the bookie may stop."""
        effects: list[BookieEffect] = []
        with suppress(SimCrash):
            effects = act()
        if self.replicas.stopped:
            self.crash()
            self.harness.clock.after(5 * MS, self.restart)
            return
        self.perform(effects)

    def perform(self, effects: list[BookieEffect]) -> None:
        """Do what the machine asks for."""
        harness = self.harness
        for effect in effects:
            if isinstance(effect, Respond):
                asked: Asked = effect.sender
                asked.client.ledger.checker.replied(self.bookie, asked.request, effect.reply)
                harness.network.send(
                    self.name, asked.client.name, asked.client.answered, asked.token, effect.reply, self.bookie
                )
            elif isinstance(effect, LookUp):
                harness.ledgers[effect.ledger_id].metadata.look_up(self, self.life, effect.ledger_id)
            else:
                harness.clock.after(max(effect.time_ns - harness.clock.now, 0), self.woken, self.life)

    # ---- limbo -----------------------------------------------------------------------------------------------------

    def repair_soon(self, ledger: SimLedger) -> None:
        """Look in a moment whether the limbo can end; again and again only if more than the unforced may be lost."""
        state = self.disks[ledger.ledger_id].state(ledger.ledger_id)
        if state is not None and state.limbo and (state.gap or ledger.metadata.is_closed()):
            self.harness.clock.after(REPAIR_NS, self.repair, self.life, ledger)

    def repair(self, life: int, ledger: SimLedger) -> None:
        """Copy what ended fragments have for this bookie from its peers; leave limbo (``client/limbo_repair.py``)."""
        metadata = ledger.metadata.current
        if life != self.life or metadata is None:
            return
        if not self._has_end(metadata):
            self.repair_soon(ledger)
            return
        entries = ledger.checker.entries_of(self.bookie, metadata)
        self.disks[ledger.ledger_id].repair(entries, closed=metadata.state is LedgerState.CLOSED)
        ledger.checker.repaired(self.bookie, entries)
        self.lost_at.pop((self.bookie, ledger.ledger_id), None)

    def _has_end(self, metadata: LedgerMetadata) -> bool:
        """Return whether nothing more is added here to what the ledger has, and no fence may be lost."""
        if metadata.state is LedgerState.IN_RECOVERY:
            return False
        own = [n for n, fragment in enumerate(metadata.fragments) if self.bookie in fragment.ensemble]
        return all(fragment_end(metadata, number) is not None for number in own)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Stop at once; what was not synced may be lost."""
        if not self.up:
            return
        self.up = False
        self.life += 1
        self.committing = False
        for disk in self.disks.values():
            disk.crash()

    def restart(self) -> None:
        """Start again with what is durable."""
        if self.up:
            return
        self.up = True
        self.machine = BookieMachine(self.replicas)
        self.machine.read_only = self.full
        for ledger_id, ledger in self.harness.ledgers.items():
            ledger.checker.restarted(self.bookie, self.disks[ledger_id].fenced)
            self.repair_soon(ledger)
        self.harness.bookies_changed()

    def fill(self) -> None:
        """Be full from now on."""
        self.full = self.machine.read_only = True

    def make_space(self) -> None:
        """Be full no more; no watch of the registrations reports it."""
        self.full = self.machine.read_only = False

    def drain(self) -> None:
        """Be drained: it turns read-only, and the clients are notified, each at its time."""
        self.leaves = True
        clock = self.harness.clock
        clock.after(int(self.random.random() * 5 * MS), self.fill)
        clock.after(int(self.random.random() * 5 * MS), self.harness.bookies_changed)

    def forget(self) -> None:
        """Come back without the entries and the fence, in limbo."""
        self.crash()
        for ledger_id, disk in self.disks.items():
            self.lost_at[self.bookie, ledger_id] = self.harness.clock.now
            disk.forget()
        self.restart()

    def wipe(self) -> None:
        """Come back with empty directories, as another instance."""
        self.crash()
        for ledger_id, disk in self.disks.items():
            self.lost_at[self.bookie, ledger_id] = self.harness.clock.now
            disk.lose()
        self.begin()
        self.restart()
