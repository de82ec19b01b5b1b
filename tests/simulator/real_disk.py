"""A bookie's disk as it is: the library's own storage on the simulated disk, which tears what was not synced."""

from __future__ import annotations

from random import Random

from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replica_state import ReplicaState
from pybk.flags import LedgerType, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.replication.entry_runs import entries_of
from pybk.replication.messages import EntryRun, Status
from tests.bookie.replica_harness import drop, open_replicas
from tests.simdisk import SimFileSystem
from tests.simulator.disk import LEDGER
from tests.simulator.plan import Plan

ENTRIES_MAX = 100
STOPS = 0.02
"""How often the bookie stops in the middle of a sync."""


def suits(plan: Plan) -> bool:
    """Return whether a plan can be tried: what the storage refuses, or does by other threads, has tests of its own."""
    return plan.loses_data in ("", "wiped") and not plan.deferred and not plan.errors and plan.ledgers == 1


class RealDisk:
    """One bookie's storage."""

    def __init__(self, random: Random, plan: Plan) -> None:
        self.random = random
        flags = WriteFlag.DEFERRED_FORCE if plan.deferred else WriteFlag.NONE
        self.header: LedgerHeader = LedgerHeader(b"description", LedgerType(""), frozenset(), flags, DigestType.NONE)
        self._fs = SimFileSystem(random.getrandbits(32))
        self._replicas = open_replicas(self._fs)
        self._lost: dict[int, None] = {}
        self._gone = False
        self._calm = False

    # ---- what the machine asks -------------------------------------------------------------------------------------

    def state(self, ledger_id: int) -> ReplicaState | None:
        return self._replicas.state(ledger_id)

    def known_lac(self, ledger_id: int) -> int | None:
        return self._replicas.known_lac(ledger_id)

    def create(self, ledger_id: int, header: LedgerHeader) -> None:
        self._replicas.create(ledger_id, header)

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        self._may_stop()
        return self._replicas.stage(ledger_id, run, durable, recovery=recovery)

    def commit(self) -> None:
        self._may_stop()
        self._replicas.commit()

    def fence(self, ledger_id: int, header: LedgerHeader) -> None:
        self._may_stop()
        self._replicas.fence(ledger_id, header)

    def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        stride: int,
        bytes_max: int,
        *,
        checked: bool = False,
        recovery: bool = False,
    ) -> tuple[Status, EntryRun | None]:
        return self._replicas.read(ledger_id, first, last, stride, bytes_max, checked=checked, recovery=recovery)

    def lac_proof(self, ledger_id: int) -> tuple[int, bytes | memoryview] | None:
        return self._replicas.lac_proof(ledger_id)

    def lac_packet(self, ledger_id: int) -> tuple[int, bytes] | None:
        return self._replicas.lac_packet(ledger_id)

    def note_lac(self, ledger_id: int, lac: int, packet: bytes) -> None:
        self._replicas.note_lac(ledger_id, lac, packet)

    def delete(self, ledger_id: int) -> None:
        self._fs.heal()
        self._replicas.delete(ledger_id)

    def drop_entries(self, ledger_id: int) -> None:
        self._may_stop()
        self._replicas.drop_entries(ledger_id)

    def _may_stop(self) -> None:
        if not self._calm and self.random.random() < STOPS:
            self._fs.crash_at(self.random.randrange(2), only="write_durable")

    # ---- what the simulation asks ----------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        return self._fs.dead

    @property
    def lac(self) -> int:
        state = self.state(LEDGER)
        return -1 if state is None else state.lac

    @property
    def fenced(self) -> bool:
        state = self.state(LEDGER)
        return state is not None and state.fenced

    @property
    def fence_durable(self) -> bool:
        return self.fenced

    def held(self, entry_id: int) -> bytes | None:
        if self._gone:
            return None
        status, run = self.read(LEDGER, entry_id, entry_id, 1, 1 << 20)
        return bytes(entries_of(run)[0]) if status is Status.OK and run is not None else None

    def pending(self, entry_id: int) -> bytes | None:
        return None

    def has(self, entry_id: int) -> bool:
        return self.held(entry_id) is not None

    def had(self, entry_id: int) -> bool:
        return entry_id in self._lost or self.has(entry_id)

    def crash(self) -> None:
        """Lose power, or only the process."""
        self._fs = self._fs.crash() if self.random.random() < 0.5 else self._fs.kill()
        drop(self._replicas)
        self._replicas = open_replicas(self._fs)

    def lose(self) -> None:
        self._lost = {entry_id: None for entry_id in range(ENTRIES_MAX) if self.has(entry_id)}
        self._gone = True

    def forget(self) -> None:
        raise NotImplementedError("a disk that comes back empty under the same instance is refused by its cookie")

    def damage(self, random: Random) -> None:
        raise NotImplementedError("damaged files have tests of their own")

    def repair(self, entries: dict[int, bytes], *, closed: bool) -> None:
        raise NotImplementedError("limbo on the storage has tests of its own")

    def stop_in_drop(self) -> None:
        if not self._calm:
            self._fs.crash_at(self.random.randrange(3), only="write_durable")

    @property
    def empty(self) -> bool:
        return not any(self.has(entry_id) for entry_id in range(ENTRIES_MAX))

    def heal(self) -> None:
        self._calm = True
        self._fs.heal()

    def close(self) -> None:
        """Let go of the storage."""
        drop(self._replicas)
