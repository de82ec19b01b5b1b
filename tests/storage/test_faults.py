"""Every disk operation of a whole workload fails: nothing is acknowledged wrongly, and the next open is consistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import Literal

import pytest

from pybk.errors import PybkError, StorageError, StorageFailedError, StorageFullError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from tests.internals import store_of
from tests.sampling import ALL, every
from tests.simdisk import READING, SimCrash, SimFileSystem, stopping
from tests.simdisk.faults import ErrorName
from tests.storage.store_harness import ROOT, World, abandon, open_world

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

_WRITES = ("write", "write_durable", "write_zeros")
_PASSES = ("create", "write", "write_zeros", "commit")
_FINAL = ("sync", "sync_directory", "write_durable")
_SHARDS = 8


_UNACKNOWLEDGED = ("create", "write_zeros", "sync", "punch")
"""Of a log file, these concern bytes that were not reported durable: it is made again, or its blocks stay."""


def operations() -> tuple[list[tuple[str, str]], range]:
    """Return the disk operations of the workload, opening and closing included, and which lie between the two."""
    fs = SimFileSystem(0)
    manager = open_world(fs)
    opened = len(fs.operations)
    World().run(manager)
    done = len(fs.operations)
    manager.close()
    return fs.operations, range(opened, done)


OPERATIONS, AT_WORK = operations()


def committers() -> int:
    """Return the number of threads that commit."""
    return sum(each.name.startswith("pybk-committer") for each in threading.enumerate())


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "crash"])
def test_an_open_that_fails_at_any_operation_leaves_no_thread(error: ErrorName | Literal["crash"]) -> None:
    for operation in range(AT_WORK.start):
        before, fs = committers(), SimFileSystem(operation)
        if error == "crash":
            fs.crash_at(operation)
        else:
            fs.fail_at(operation, error, forever=True)
        with suppress(PybkError, SimCrash):
            manager = open_world(fs)
            abandon(manager)
        assert committers() == before, f"operation {operation}: {OPERATIONS[operation]}"


def must_name_a_place(error: PybkError) -> None:
    assert ROOT in str(error), f"no path in {error!r}"


def open_and_check(fs: SimFileSystem, world: World) -> None:
    """Open after a fault or a crash, and find all that was acknowledged; write more, and find it again."""
    manager = open_world(fs)
    world.check(manager, recover=False)
    world.check(manager)
    manager.checkpoint()
    world.check(manager)
    manager.close()


def end(manager: LedgerManager) -> None:
    """Close a store whose disk may refuse it."""
    try:
        manager.close()
    except PybkError as error:
        must_name_a_place(error)
    finally:
        abandon(manager)


def run_with_fault(fs: SimFileSystem, world: World) -> tuple[list[PybkError], str]:
    """Run the workload on a disk that fails; return what was raised, and the state of the store in the end."""
    try:
        manager = open_world(fs)
    except PybkError as error:
        return [error], "not opened"
    try:
        errors = world.run_through(manager)
        world.check(manager, recover=False)
        state = manager.health().state
    finally:
        end(manager)
    return errors, state


def clear(errors: list[PybkError]) -> Iterator[PybkError]:
    """Yield the errors of the disk, each checked to name a place on it."""
    for error in errors:
        if isinstance(error, StorageError):
            must_name_a_place(error)
            yield error


def fail_and_check(operation: int, error: ErrorName, *, forever: bool, power_loss: bool) -> None:
    fs = SimFileSystem(operation)
    fs.fail_at(operation, error, forever=forever)
    world = World()
    errors, state = run_with_fault(fs, world)
    told = list(clear(errors))
    name, path = OPERATIONS[operation]
    if error != "EIO" and not forever and state != "not opened" and name in _PASSES and "tmp" not in path:
        assert state == "ok", f"a single lack of space ended the store: {told}"
        assert all(isinstance(one, StorageFullError) for one in told)
    if name == "reserve" or (path.endswith(".log") and name in _UNACKNOWLEDGED):
        if operation in AT_WORK and not forever:
            assert state in ("ok", "degraded"), f"bytes that hold nothing yet ended the store: {told}"
    elif operation in AT_WORK and (error == "EIO" or name in _FINAL):
        assert state == "failed", f"the store continues after a failure: {told}"
    if state == "failed":
        assert any(isinstance(one, StorageFailedError) for one in told)
    open_and_check(fs.crash() if power_loss else fs.kill(), world)


def sampled() -> list[int]:
    """Return every fourth operation, and the first of each kind on each file; all on demand."""
    first = [OPERATIONS.index(operation) for operation in dict.fromkeys(OPERATIONS)]
    return sorted({*range(0, len(OPERATIONS), every(4)), *first})


def faults(shard: int) -> Iterator[tuple[int, ErrorName, bool, bool]]:
    """Yield ways for each operation to fail: one of them, another one for the next operation, or all on demand."""
    for operation in sampled()[shard::_SHARDS]:
        errors: list[ErrorName] = ["EIO", "ENOSPC"]
        if OPERATIONS[operation][0] in _WRITES:
            errors.append("short")
        ways = [(operation, *way) for way in product(errors, (False, True), (False, True))]
        yield from ways if ALL else [ways[operation * 7 % len(ways)]]


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_a_failed_operation_loses_nothing_and_raises(shard: int) -> None:
    for operation, error, forever, power_loss in faults(shard):
        try:
            fail_and_check(operation, error, forever=forever, power_loss=power_loss)
        except BaseException as problem:
            problem.add_note(
                f"operation {operation} {OPERATIONS[operation]}: {error}{' for ever' * forever}, then "
                f"{'power loss' if power_loss else 'kill'}"
            )
            raise


def stopped_store(seed: int) -> tuple[SimFileSystem, World]:
    """Return the disk of a store that was stopped in the middle of the workload, after much was in the log's tail."""
    fs = SimFileSystem(seed)
    fs.crash_at(seed)
    world = World()
    manager = None
    with stopping(fs):
        manager = open_world(fs)
        world.run(manager)
    if manager is not None:
        abandon(manager)
    return (fs.crash() if seed % 2 else fs.kill()), world


def again(fs: SimFileSystem) -> SimFileSystem:
    """Return a copy of a disk that was not used since."""
    return fs.kill()


def stopped_recovery(fs: SimFileSystem, operation: int) -> SimFileSystem:
    """Return the disk of a recovery that was stopped at an operation."""
    fs.crash_at(operation)
    manager = None
    with stopping(fs):
        manager = open_world(fs)
        manager.close()
        manager = None
    if manager is not None:
        abandon(manager)
    return fs.crash() if operation % 4 < 2 else fs.kill()


_STOPS = range(60, len(OPERATIONS), every(31))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("seed", _STOPS)
def test_recovery_that_fails_or_is_stopped_can_be_done_again(seed: int) -> None:
    stopped, world = stopped_store(seed)
    probe = again(stopped)
    open_world(probe).close()
    count = len(probe.operations)
    assert count >= 3
    for operation in range(count):
        if ALL or operation % 2 == seed % 2:
            fs = again(stopped)
            fs.fail_at(operation, ("EIO", "ENOSPC", "short")[operation % 3])
            try:
                end(open_world(fs))
            except PybkError as error:
                must_name_a_place(error)
            open_and_check(fs.kill(), world)
        if ALL or operation % 2 != seed % 2:
            open_and_check(stopped_recovery(again(stopped), operation), world)


def test_a_failed_read_raises_and_a_later_one_works() -> None:
    fs = SimFileSystem(1)
    manager = open_world(fs)
    world = World()
    world.run(manager)
    for forever in (False, True):
        for n in range(30):
            fs.fail_at(n, forever=forever, only=READING)
            store_of(manager).volumes.views.clear()
            try:
                world.check(manager, recover=False)
            except PybkError as error:
                must_name_a_place(error)
            fs.heal()
    store_of(manager).volumes.views.clear()
    world.check(manager, recover=False)
    assert manager.health().state == "ok"
    manager.close()


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("seed", range(0, len(OPERATIONS), 5))
def test_an_open_that_cannot_read_raises_and_changes_nothing(seed: int) -> None:
    stopped, world = stopped_store(seed)
    probe = again(stopped)
    open_world(probe).close()
    for n in range(0, len(probe.readings), 3):
        fs = again(stopped)
        fs.fail_at(n, only=READING)
        try:
            end(open_world(fs))
        except PybkError as error:
            must_name_a_place(error)
    open_and_check(again(stopped), world)


# An interrupt that comes inside one of the interpreter's own weakref callbacks is reported there and lost.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_job_runs_does_the_store_no_harm() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    fs = SimFileSystem(1)
    manager = open_world(fs)
    world = World()
    ledger_id = world.create(manager, StorageHint.SSD)
    interrupted = 0
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(60):
            world.append(ledger_id, 2)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00005 * number)
                manager.move_ledger(ledger_id, list(StorageHint)[number % 3])
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert interrupted > 5
    assert manager.health().state == "ok"
    world.append(ledger_id)
    world.check(manager, recover=False)
    manager.close()
    open_and_check(fs.crash(), world)


def test_jobs_that_cannot_read_say_so() -> None:
    for n in range(0, 40, 1 if ALL else 3):
        fs = SimFileSystem(n)
        manager = open_world(fs)
        world = World()
        fs.fail_at(n, only=READING, forever=n % 2 == 1)
        errors = world.run_through(manager)
        list(clear(errors))
        fs.heal()
        world.check(manager, recover=False)
        end(manager)
        open_and_check(fs.kill(), world)
