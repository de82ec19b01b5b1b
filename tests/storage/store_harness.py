"""A store on a simulated disk, a workload that touches everything, and the proof of what must hold afterwards."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from pybk.config import StoreConfig
from pybk.errors import LedgerFencedError, NoSuchLedgerError, PybkError, StorageFailedError, StorageRefusedError
from pybk.flags import StorageHint, WriteFlag
from pybk.ledger import keys
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from pybk.manager.local_backend import StoreBackend
from pybk.storage import preallocation
from pybk.storage.format import catalog
from pybk.storage.store import Store
from tests.internals import store_of
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

RESERVE_BYTES = 15 << 19
"""What a store has reserved for deletes: 3 MiB of log files, 1 of the catalog, 1.5 of the index, 1 of entries."""


def open_store(
    fs: SimFileSystem,
    config: StoreConfig = CONFIG,
    *,
    first_file_bytes: int = 1 << 20,
    tiers: Mapping[StorageHint, Sequence[str]] | None = None,
) -> LedgerManager:
    """Open the store of a simulated disk; scrypt costs nothing here, and the first log file has the given size."""
    keys.SCRYPT_COST = 2  # type: ignore[misc]  # nothing that is tested depends on it
    preallocation.FIRST_FILE_BYTES = first_file_bytes  # type: ignore[misc]  # as above
    store = Store.open(ROOT, config=config, tiers=tiers, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    manager = LedgerManager(StoreBackend(store))
    weakref.finalize(manager, _end_thread, weakref.ref(store)).atexit = False
    return manager


def _end_thread(dropped: weakref.ref[Store]) -> None:
    """End the thread of a store that a test dropped without a close: it would keep the disk with all of its files."""
    store = dropped()
    if store is not None:
        with suppress(RuntimeError):  # the interpreter is ending
            _thread.start_new_thread(store.log.group.stop, ())


def open_world(fs: SimFileSystem) -> LedgerManager:
    """Open the store for a ``World``: with limits so low that log files and catalogs give way to others."""
    catalog.REWRITE_BYTES_MIN = 0  # type: ignore[misc]  # in production it is not worth it for small ones
    return open_store(fs, first_file_bytes=64 << 10)


def drop_reserve(fs: SimFileSystem) -> None:
    """Unlink the log files that are reserved for deletes."""
    for name in fs.list_directory(f"{ROOT}/nvme"):
        if name.startswith("reserve-"):
            fs.unlink(f"{ROOT}/nvme/{name}")


def abandon(manager: LedgerManager) -> None:
    """Let go of a store whose disk is dead: stop its thread, touch nothing."""
    log = store_of(manager).log
    log.group.stop()


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
        writer = self._writers[ledger_id]
        for _ in range(count):
            number = len(self.ledgers[ledger_id].given)
            payload = bytes([number % 251]) * (size + number)
            self._give(ledger_id, [payload], lambda payload=payload: writer.append(payload))  # type: ignore[misc]  # bound

    def append_many(self, ledger_id: int, count: int, size: int = 300) -> None:
        """Append a batch."""
        writer = self._writers[ledger_id]
        given = len(self.ledgers[ledger_id].given)
        batch = [bytes([(given + number) % 251]) * (size + number) for number in range(count)]
        self._give(ledger_id, batch, lambda: writer.append_many(batch))

    def _give(self, ledger_id: int, payloads: list[bytes], append: Callable[[], object]) -> None:
        given = self.ledgers[ledger_id].given
        given += payloads
        try:
            append()
        except PybkError as error:
            if not error.outcome_unknown:
                del given[len(given) - len(payloads) :]
            raise
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

    def steps(self, manager: LedgerManager) -> Iterator[Callable[[], object]]:
        """Append, checkpoint, move, compact, delete: yield one call after the other."""
        nvme, ssd, hdd, deferred, doomed, late = range(6)
        for hint in StorageHint:
            yield lambda hint=hint: self.create(manager, hint)  # type: ignore[misc]  # bound now
        yield lambda: self.create(manager, StorageHint.NVME, WriteFlag.DEFERRED_FORCE)
        for ledger_id in (nvme, ssd, hdd, deferred):
            yield lambda ledger_id=ledger_id: self.append(ledger_id, 2)  # type: ignore[misc]  # bound now
        yield lambda: self.append_many(nvme, 20)
        yield lambda: self.append_many(hdd, 30)
        yield lambda: self.force(deferred)
        yield lambda: self.append(deferred, 2)
        yield manager.checkpoint
        yield lambda: self.create(manager, StorageHint.HDD)
        yield lambda: self.append_many(doomed, 25)
        yield lambda: self.append(ssd, 3)
        yield lambda: self.append(nvme, 2)
        yield lambda: self.close(hdd)
        yield manager.checkpoint
        yield lambda: manager.move_ledger(hdd, StorageHint.SSD)
        yield lambda: self.append(nvme, 2)
        yield lambda: manager.move_ledger(nvme, StorageHint.HDD)
        yield lambda: self.delete(manager, doomed)
        yield lambda: self.append(nvme, 1)
        yield manager.checkpoint
        yield lambda: manager.move_ledger(hdd, StorageHint.NVME)
        yield lambda: self.append(deferred, 1)
        yield lambda: self.close(deferred)
        yield lambda: self.append(ssd, 1)
        yield lambda: self.delete(manager, ssd)
        yield lambda: self.append(nvme, 1)
        yield manager.checkpoint
        yield lambda: self.create(manager, StorageHint.NVME)
        yield lambda: self.append(late, 2)

    def run(self, manager: LedgerManager) -> None:
        """Do all steps."""
        for step in self.steps(manager):
            step()

    def run_through(self, manager: LedgerManager) -> list[PybkError]:
        """Do all steps that can be done although some fail; return what failed.

        Nothing but PybkError may come out of a step, or KeyError of one on a ledger that could not be created.
        """
        errors: list[PybkError] = []
        for step in self.steps(manager):
            try:
                step()
            except StorageRefusedError as error:
                errors.append(error)
                with suppress(StorageFailedError):
                    store_of(manager).scheduler.tick()
            except PybkError as error:
                errors.append(error)
            except KeyError:
                assert errors, "a ledger is not there although everything went well"
        return errors

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
            assert last + 1 >= ledger.acknowledged, (
                f"ledger {ledger_id} lost entries: {last + 1} < {ledger.acknowledged}"
            )
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
    manager = open_world(fs)
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
