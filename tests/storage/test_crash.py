"""The machine stops at every disk operation of a workload that touches everything: what was acknowledged is back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.format.catalog import catalog_path, read_catalog
from pybk.storage.repair.rebuild import rebuild_index
from tests.internals import store_of
from tests.sampling import ALL, every, sample
from tests.simdisk import SimEnvironment, SimFileSystem, stopping
from tests.storage.store_harness import ROOT, World, abandon, count_operations, open_world

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

_SHARDS = 8


def stops(shard: int, *, power_loss: bool) -> Iterator[int]:
    """Yield operations to stop at: all on demand, else a quarter for power loss, and another one for the process."""
    for operation in range(shard, count_operations(), _SHARDS):
        if ALL or (operation // _SHARDS) % 4 == 2 * power_loss:
            yield operation


def stopped(operation: int, seed: int, *, power_loss: bool) -> tuple[SimFileSystem, World]:
    """Stop the machine at one operation of the workload; return what is found on the disk, and what must be there."""
    fs = SimFileSystem(seed)
    fs.crash_at(operation)
    world = World()
    manager: LedgerManager | None = None
    with stopping(fs):
        manager = open_world(fs)
        world.run(manager)
        manager.close()
        manager = None
    if manager is not None:
        abandon(manager)
    return (fs.crash() if power_loss else fs.kill()), world


def check_catalog(manager: LedgerManager) -> None:
    """Assert that the catalog says what the index says, so that the index can be made again."""
    store = store_of(manager)
    mark = store.index.mark()
    assert mark is not None
    path = catalog_path(ROOT, mark.catalog_file_id)
    known = read_catalog(store.fs, path, store.store_id, mark.catalog_file_id, at_least=mark.catalog_bytes)
    assert known.ledgers == {row.metadata.ledger_id: row for row in store.index.ledgers()}
    assert known.files == store.index.files()
    assert known.mark._replace(catalog_file_id=0) == mark._replace(catalog_file_id=0)
    assert list(store.index.check()) == []


def check(fs: SimFileSystem, world: World) -> None:
    """Open the store and check it; write more, and check it again."""
    manager = open_world(fs)
    world.check(manager, recover=False)
    check_catalog(manager)
    world.check(manager)
    manager.checkpoint()
    world.check(manager)
    check_catalog(manager)
    manager.close()
    manager = open_world(fs)
    world.check(manager)
    manager.close()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_nothing_acknowledged_is_lost_when_power_fails_at_any_operation(shard: int) -> None:
    for operation in stops(shard, power_loss=True):
        check(*stopped(operation, operation, power_loss=True))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_nothing_acknowledged_is_lost_when_the_process_dies_at_any_operation(shard: int) -> None:
    for operation in stops(shard, power_loss=False):
        check(*stopped(operation, operation, power_loss=False))


def check_without_index(fs: SimFileSystem, world: World) -> bool:
    """Lose the index, make it again, and check the store; False if the machine stopped before there was a store."""
    if not fs.exists(f"{ROOT}/cookie"):
        return False
    fs.unlink(f"{ROOT}/ssd/index/data.mdb")
    rebuild_index(ROOT, fs=fs, environment=lambda path: SimEnvironment(fs, path))
    check(fs, world)
    return True


@pytest.mark.sampled
def test_the_index_may_be_lost_with_any_stop() -> None:
    made = 0
    tried = sample("index", range(0, count_operations(), every(10)), 3)
    for operation in tried:
        made += check_without_index(*stopped(operation, operation, power_loss=operation % 20 == 0))
    assert made > len(tried) // 2
