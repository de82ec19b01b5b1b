"""The machine stops at every disk operation of a workload that touches everything: what was acknowledged is back."""

from __future__ import annotations

import pytest

from pybk.manager import LedgerManager
from tests.simdisk import SimCrash, SimFileSystem
from tests.storeworld import World, abandon, count_operations, open_world

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

_SHARDS = 8


def crash_and_check(operation: int, seed: int, *, power_loss: bool) -> None:
    """Stop the machine at one operation, open again, and check; then go on, and check again."""
    fs = SimFileSystem(seed)
    fs.crash_at(operation)
    world = World()
    manager: LedgerManager | None = None
    try:
        manager = open_world(fs)
        world.run(manager)
        manager.close()
        manager = None
    except SimCrash:
        pass
    finally:
        if manager is not None:
            abandon(manager)
    after = fs.crash() if power_loss else fs.kill()
    manager = open_world(after)
    world.check(manager, recover=False)
    world.check(manager)
    manager.checkpoint()
    world.check(manager)
    manager.close()
    manager = open_world(after)
    world.check(manager)
    manager.close()


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_nothing_acknowledged_is_lost_when_power_fails_at_any_operation(shard: int) -> None:
    for operation in range(shard, count_operations(), _SHARDS):
        crash_and_check(operation, operation, power_loss=True)


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_nothing_acknowledged_is_lost_when_the_process_dies_at_any_operation(shard: int) -> None:
    for operation in range(shard, count_operations(), _SHARDS):
        crash_and_check(operation, operation, power_loss=False)
