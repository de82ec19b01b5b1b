"""A store on a simulated disk, a workload that touches everything, and the proof of what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pybk.config import StoreConfig
from pybk.digest import DigestType
from pybk.errors import LedgerFencedError, NoSuchLedgerError, PybkError
from pybk.flags import StorageHint, WriteFlag
from pybk.manager import LedgerManager
from pybk.storage import creation
from pybk.storage.store import Store
from pybk.writer import LedgerWriter
from tests.simdisk import SimCrash, SimEnvironment, SimFileSystem

ROOT = "/store"
CONFIG = StoreConfig(
    background=False,
    log_file_bytes=1 << 20,
    unchecked_tail_bytes=4 << 20,
    cold_block_bytes=4 << 10,
    ssd_block_bytes=4 << 10,
    free_bytes_low=0,
    free_bytes_ok=0,
)


def open_store(fs: SimFileSystem, config: StoreConfig = CONFIG) -> LedgerManager:
    """Open the store of a simulated disk; scrypt costs nothing here."""
    creation.SCRYPT_COST = 2
    return LedgerManager(
        Store.open(ROOT, config=config, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    )


def abandon(manager: LedgerManager) -> None:
    """Let go of a store whose disk is dead: stop its thread, touch nothing."""
    log = manager._store.log  # type: ignore[union-attr]  # a live store's
    log._stopping = True
    log._kick_committer()
    log._committer.join(5)


class Ledger:
    """What the workload knows of one ledger."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.acknowledged = 0
        self.created = False
        self.closed = False
        self.deleting = False
        self.deleted = False


class World:
    """A workload step by step, and what was acknowledged so far.

    The steps are fixed, so that the n-th disk operation is the same in every run.
    """

    def __init__(self) -> None:
        self.ledgers: dict[int, Ledger] = {}
        self._writers: dict[int, LedgerWriter] = {}
        self._next_id = 0

    def create(self, manager: LedgerManager, hint: StorageHint, flags: WriteFlag = WriteFlag.NONE) -> int:
        """Create a ledger."""
        ledger_id, self._next_id = self._next_id, self._next_id + 1
        ledger = self.ledgers[ledger_id] = Ledger()
        writer = manager.create_ledger(
            storage_hints={hint}, digest_type=DigestType.CRC32C, write_flags=flags, ledger_type=f"type {ledger_id}"
        )
        assert writer.ledger_id == ledger_id
        ledger.created = True
        self._writers[ledger_id] = writer
        return ledger_id

    def append(self, ledger_id: int, count: int = 1, size: int = 700) -> None:
        """Append one by one."""
        ledger = self.ledgers[ledger_id]
        for _ in range(count):
            payload = bytes([len(ledger.given) % 251]) * (size + len(ledger.given))
            ledger.given.append(payload)
            self._writers[ledger_id].append(payload)
            self._acknowledge(ledger_id)

    def append_many(self, ledger_id: int, count: int, size: int = 300) -> None:
        """Append a batch."""
        ledger = self.ledgers[ledger_id]
        batch = [bytes([(len(ledger.given) + number) % 251]) * (size + number) for number in range(count)]
        ledger.given += batch
        self._writers[ledger_id].append_many(batch)
        self._acknowledge(ledger_id)

    def _acknowledge(self, ledger_id: int) -> None:
        writer = self._writers[ledger_id]
        ledger = self.ledgers[ledger_id]
        ledger.acknowledged = writer.last_add_confirmed + 1

    def force(self, ledger_id: int) -> None:
        """Force a deferred ledger."""
        self._writers[ledger_id].force()
        self._acknowledge(ledger_id)

    def close(self, ledger_id: int) -> None:
        """Close a ledger."""
        self._writers[ledger_id].close()
        self.ledgers[ledger_id].closed = True
        self._acknowledge(ledger_id)

    def delete(self, manager: LedgerManager, ledger_id: int) -> None:
        """Delete a ledger."""
        self.ledgers[ledger_id].deleting = True
        manager.delete_ledger(ledger_id)
        self.ledgers[ledger_id].deleted = True

    def run(self, manager: LedgerManager) -> None:
        """Append, checkpoint, move, compact, delete."""
        nvme, ssd, hdd = (self.create(manager, hint) for hint in StorageHint)
        deferred = self.create(manager, StorageHint.NVME, WriteFlag.DEFERRED_FORCE)
        for ledger_id in (nvme, ssd, hdd, deferred):
            self.append(ledger_id, 2)
        self.append_many(nvme, 20)
        self.append_many(hdd, 30)
        self.force(deferred)
        self.append(deferred, 2)
        manager.checkpoint()
        doomed = self.create(manager, StorageHint.HDD)
        self.append_many(doomed, 25)
        self.append(ssd, 3)
        self.append(nvme, 2)
        self.close(hdd)
        manager.checkpoint()
        manager.move_ledger(hdd, StorageHint.SSD)
        self.append(nvme, 2)
        manager.move_ledger(nvme, StorageHint.HDD)
        self.delete(manager, doomed)
        self.append(nvme, 1)
        manager.checkpoint()
        manager.move_ledger(hdd, StorageHint.NVME)
        self.append(deferred, 1)
        self.close(deferred)
        self.append(ssd, 1)
        self.delete(manager, ssd)
        self.append(nvme, 1)
        manager.checkpoint()
        late = self.create(manager, StorageHint.NVME)
        self.append(late, 2)

    def check(self, manager: LedgerManager, *, recover: bool = True) -> None:
        """Assert that everything acknowledged is there byte for byte, and nothing that was never given."""
        listed = set(manager.list_ledgers())
        assert listed <= set(self.ledgers), "a ledger that was never created"
        for ledger_id, ledger in self.ledgers.items():
            if ledger.deleted or (ledger.deleting and ledger_id not in listed):
                assert ledger_id not in listed, "a deleted ledger is back"
                with suppress(NoSuchLedgerError):
                    manager.open_ledger(ledger_id)
                    raise AssertionError("a deleted ledger opens")
                continue
            if not ledger.created and ledger_id not in listed:
                continue
            assert ledger_id in listed, f"ledger {ledger_id} was created and is gone"
            reader = manager.open_ledger(ledger_id, recover=recover)
            last = reader.last_add_confirmed
            assert last + 1 >= ledger.acknowledged, f"ledger {ledger_id} lost entries: {last + 1} < {ledger.acknowledged}"
            found = [entry.payload for entry in reader.read(0, last)]
            assert found == ledger.given[: last + 1], f"ledger {ledger_id} holds other bytes than were given"
            if ledger.closed:
                assert len(found) == len(ledger.given)
                assert reader.is_closed


def count_operations(seed: int = 0, before: Callable[[SimFileSystem], None] | None = None) -> int:
    """Return how many disk operations the workload makes, opening and closing included."""
    fs = SimFileSystem(seed)
    if before is not None:
        before(fs)
    manager = open_store(fs)
    World().run(manager)
    manager.close()
    return len(fs.operations)


@contextmanager
def crashing(manager: LedgerManager) -> Iterator[None]:
    """Take the stop of the machine, and let go of the store then."""
    try:
        yield
    except (SimCrash, PybkError, LedgerFencedError):
        pass
    finally:
        abandon(manager)
