"""A bookie's disk as a model: what is durable, what a crash or an error takes, and what was damaged."""

from __future__ import annotations

from array import array
from random import Random
from struct import Struct
from typing import NamedTuple, Protocol

from pybk.errors import StorageError, StorageFullError
from pybk.replication.bookie import BookieStorage, ReplicaStatus
from pybk.replication.entry_runs import entries_of
from pybk.replication.messages import EntryRun, Status
from tests.simdisk import SimCrash

LEDGER = 1
LAC_OFFSET = 16
_unpack_lac = Struct(">q").unpack_from


class State(NamedTuple):
    fenced: bool
    limbo: bool
    gap: bool
    lac: int


class Disk(BookieStorage, Protocol):
    """What the simulation asks of a bookie's disk, besides what its machine does."""

    @property
    def lac(self) -> int: ...

    @property
    def fenced(self) -> bool: ...

    @property
    def fence_durable(self) -> bool:
        """Whether the ledger is fenced, and would be after a crash."""

    @property
    def header(self) -> object: ...

    @property
    def stopped(self) -> bool:
        """Whether it stopped in the middle of something, so that nothing works until ``crash`` was called."""

    def held(self, entry_id: int) -> bytes | None:
        """Return an entry that is durable."""

    def pending(self, entry_id: int) -> bytes | None:
        """Return an entry that was taken and is not durable."""

    def has(self, entry_id: int) -> bool:
        """Return whether an entry can be read."""

    def had(self, entry_id: int) -> bool:
        """Return whether an entry is, or was, durable."""

    def crash(self) -> None:
        """Lose what is not durable."""

    def lose(self) -> None:
        """Lose everything, for ever."""

    def forget(self) -> None:
        """Lose everything, the fence included, and know that something may be lost."""

    def damage(self, random: Random) -> None:
        """Make an entry unreadable."""

    def repair(self, entries: dict[int, bytes], *, closed: bool) -> None:
        """End a limbo, given all that should be here."""

    def stop_in_drop(self) -> None:
        """Stop in the middle of the next drop."""

    @property
    def empty(self) -> bool:
        """Whether it has no entries that a drop would delete."""

    def heal(self) -> None:
        """Break no more."""

    def close(self) -> None:
        """Let go of what it holds."""


class ModelReplicas:
    """The replica of the one ledger that there is.

    It keeps no rule for the machine: a fence, for instance, refuses nothing here.
    """

    header: object = b"description"

    def __init__(self, random: Random, *, deferred: bool, short: float, errors: float = 0.0) -> None:
        self.random = random
        self.deferred = deferred
        self.short = short
        self.errors = errors
        self.durable: dict[int, bytes] = {}
        self.staged: dict[int, bytes] = {}
        self.lost: dict[int, bytes] = {}
        """What was durable once, and is gone for a fault that the protocol does not survive on more bookies."""
        self.corrupt: dict[int, None] = {}
        self.stopped = self.stops_in_drop = False
        self.known = self.known_durable = False
        self.fenced = self.fence_durable = False
        self.limbo = self.gap = False
        self.lac = -1
        self.packet: tuple[int, bytes] | None = None

    def state(self, ledger_id: int) -> State | None:
        if not (self.known or self.fenced or self.limbo):
            return None
        return State(self.fenced, self.limbo, self.gap, self.lac)

    def known_lac(self, ledger_id: int) -> int | None:
        return None if self.gap else self.lac

    def create(self, ledger_id: int, header: object) -> None:
        self.known = True

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        new: dict[int, bytes] = {}
        for entry_id, view in zip(range(run.first, run.last + 1, run.stride), entries_of(run), strict=True):
            entry = bytes(view)
            here = self.durable.get(entry_id) or self.staged.get(entry_id)
            if entry_id in self.corrupt:
                return Status.UNKNOWN
            if here is None:
                new[entry_id] = entry
            elif here != entry:
                return Status.CONFLICT
        error = self._error()
        if error is not None:
            self.staged.update({entry_id: entry for entry_id, entry in new.items() if self.random.random() < 0.5})
            raise error
        self.staged.update(new)
        return Status.OK

    def commit(self) -> None:
        error = self._error()
        if error is not None:
            self._commit_in_part()
            raise error
        self.durable.update(self.staged)
        self.staged.clear()
        self.known_durable = self.known

    def fence(self, ledger_id: int, header: object) -> None:
        error = self._error()
        if error is None:
            self.fenced = self.fence_durable = self.known = self.known_durable = True
            return
        if self.random.random() < 0.7:  # it is in memory, and on disk or not
            self.fenced = self.known = True
            if self.random.random() < 0.3:
                self.fence_durable = self.known_durable = True
        raise error

    def _error(self) -> StorageError | None:
        """Return what the storage raises now, if anything."""
        if not self.errors or self.random.random() >= self.errors:
            return None
        return StorageFullError("simulated") if self.random.random() < 0.3 else StorageError("simulated")

    def _commit_in_part(self) -> None:
        """Make some of what is staged durable, and drop some, unless it was acknowledged as deferred."""
        for entry_id, entry in list(self.staged.items()):
            chance = self.random.random()
            if chance < 0.3:
                self.durable[entry_id] = entry
                self.known_durable = True
            if chance < 0.3 or (chance < 0.6 and not self.deferred):
                del self.staged[entry_id]

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
        error = self._error()
        if error is not None:
            raise error
        entries: list[bytes] = []
        fit = self.random.randint(1, 3) if self.random.random() < self.short else last + 1
        status = Status.OK
        for entry_id in range(first, last + 1, stride):
            entry = self.durable.get(entry_id)
            if len(entries) >= fit:
                break
            if entry is None or entry_id in self.corrupt:
                unknown = entry_id in self.corrupt or entry_id in self.staged
                status = Status.UNKNOWN if unknown else Status.NO_SUCH_ENTRY
                break
            entries.append(entry)
        if not entries:
            return status, None
        return status, EntryRun(first, stride, array("q", map(len, entries)), (b"".join(entries),))

    def lac_proof(self, ledger_id: int) -> tuple[int, bytes] | None:
        error = self._error()
        if error is not None:
            raise error
        last = max(self.durable, default=-1)
        return None if last < 0 or last in self.corrupt else (last, self.durable[last])

    def lac_packet(self, ledger_id: int) -> tuple[int, bytes] | None:
        return self.packet

    def note_lac(self, ledger_id: int, lac: int, packet: bytes) -> None:
        self.lac = lac
        self.packet = lac, packet

    def delete(self, ledger_id: int) -> None:
        self.durable.clear()
        self.staged.clear()
        self.lost.clear()
        self.corrupt.clear()
        self.known = self.known_durable = self.fenced = self.fence_durable = self.limbo = self.gap = False
        self.lac, self.packet = -1, None

    def drop_entries(self, ledger_id: int) -> None:
        error = self._error()
        if error is not None or self.stops_in_drop:
            for entry_id in list(self.durable):
                if self.random.random() < 0.5:
                    del self.durable[entry_id]
                    self.corrupt.pop(entry_id, None)
            self.stopped = self.stops_in_drop
            raise SimCrash if error is None else error
        self.durable.clear()
        self.staged.clear()
        self.lost.clear()
        self.corrupt.clear()
        self.known = self.known_durable = self.fence_durable
        if not self.known:
            self.lac, self.packet = -1, None

    def stop_in_drop(self) -> None:
        self.stops_in_drop = True

    @property
    def empty(self) -> bool:
        return not self.durable and not self.staged

    # ---- faults ----------------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Lose what is not durable, each staged entry or not as it comes: the commit under way may be torn."""
        for entry_id, entry in self.staged.items():
            if self.random.random() < 0.5:
                self.durable[entry_id] = entry
                self.known_durable = True
        self.staged.clear()
        self.known = self.known_durable
        self.fenced = self.fence_durable
        # Of the last add confirmed, what the entries carry is left.
        self.lac = max((_unpack_lac(entry, LAC_OFFSET)[0] for entry in self.durable.values()), default=-1)
        self.packet = None
        self.limbo = self.limbo or self.deferred
        self.stopped = self.stops_in_drop = False

    def forget(self) -> None:
        self.lose()
        self.fenced = self.fence_durable = self.known = self.known_durable = False
        self.lac = -1
        self.limbo = True
        self.gap = True

    def lose(self) -> None:
        self.lost.update(self.durable)
        self.durable.clear()

    def damage(self, random: Random) -> None:
        if self.durable:
            self.corrupt[random.choice(sorted(self.durable))] = None

    def repair(self, entries: dict[int, bytes], *, closed: bool) -> None:
        for entry_id, entry in entries.items():
            self.durable.setdefault(entry_id, entry)
            self.lac = max(self.lac, _unpack_lac(entry, LAC_OFFSET)[0])
        self.known = self.known_durable = True
        self.fenced = self.fence_durable = self.fence_durable or (self.gap and closed)
        self.limbo = self.gap = False

    def heal(self) -> None:
        """Have no more errors."""
        self.errors = 0.0

    def close(self) -> None:
        """There is nothing to let go of."""

    def held(self, entry_id: int) -> bytes | None:
        return self.durable.get(entry_id)

    def pending(self, entry_id: int) -> bytes | None:
        return self.staged.get(entry_id)

    def has(self, entry_id: int) -> bool:
        return entry_id in self.durable and entry_id not in self.corrupt

    def had(self, entry_id: int) -> bool:
        return entry_id in self.durable or entry_id in self.lost


class DiskGroup(BookieStorage):
    """The disks of several ledgers of one bookie, which are synced and lost together."""

    def __init__(self, disks: dict[int, Disk]) -> None:
        self.disks = disks

    @property
    def stopped(self) -> bool:
        return any(disk.stopped for disk in self.disks.values())

    def state(self, ledger_id: int) -> ReplicaStatus | None:
        return self.disks[ledger_id].state(ledger_id)

    def known_lac(self, ledger_id: int) -> int | None:
        return self.disks[ledger_id].known_lac(ledger_id)

    def create(self, ledger_id: int, header: object) -> None:
        self.disks[ledger_id].create(ledger_id, header)

    def stage(self, ledger_id: int, run: EntryRun, durable: bool, *, recovery: bool = False) -> Status:
        return self.disks[ledger_id].stage(ledger_id, run, durable, recovery=recovery)

    def commit(self) -> None:
        for disk in self.disks.values():
            disk.commit()

    def fence(self, ledger_id: int, header: object) -> None:
        self.disks[ledger_id].fence(ledger_id, header)

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
        return self.disks[ledger_id].read(ledger_id, first, last, stride, bytes_max, checked=checked, recovery=recovery)

    def lac_proof(self, ledger_id: int) -> tuple[int, bytes | memoryview] | None:
        return self.disks[ledger_id].lac_proof(ledger_id)

    def lac_packet(self, ledger_id: int) -> tuple[int, bytes] | None:
        return self.disks[ledger_id].lac_packet(ledger_id)

    def note_lac(self, ledger_id: int, lac: int, packet: bytes) -> None:
        self.disks[ledger_id].note_lac(ledger_id, lac, packet)

    def delete(self, ledger_id: int) -> None:
        self.disks[ledger_id].delete(ledger_id)

    def drop_entries(self, ledger_id: int) -> None:
        self.disks[ledger_id].drop_entries(ledger_id)
