"""A bookie whose disk has 0 bytes free takes fences and deletes, also after a restart, and gets its reserve back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import StorageFullError
from pybk.replication.messages import Status
from tests.bookie.replica_harness import (
    LEDGER,
    add,
    after_crash,
    after_kill,
    content,
    describe,
    make_run,
    open_replicas,
    state_of,
)
from tests.simdisk import SimFileSystem
from tests.storage.test_full_disk_packing import small_stores_have_a_reserve

MIB = 1 << 20
LEDGERS = range(LEDGER, LEDGER + 5)

Stop = Callable[[SimFileSystem, Replicas], tuple[SimFileSystem, Replicas]]


def stay(fs: SimFileSystem, replicas: Replicas) -> tuple[SimFileSystem, Replicas]:
    """Stop nothing."""
    return fs, replicas


def close(fs: SimFileSystem, replicas: Replicas) -> tuple[SimFileSystem, Replicas]:
    """Close the bookie and open it again."""
    replicas.close()
    return fs, open_replicas(fs)


def full_bookie(stop: Stop) -> tuple[SimFileSystem, Replicas]:
    """Return a bookie that has entries of some ledgers, on a disk that became full before it was stopped."""
    fs = SimFileSystem(1, capacity_bytes=64 * MIB)
    replicas = open_replicas(fs)
    for ledger_id in LEDGERS:
        replicas.create(ledger_id, describe())
        add(replicas, make_run(0, 50, ledger_id=ledger_id, size=3000), ledger_id=ledger_id)
    replicas.store.scheduler.checkpoint()
    for ledger_id in LEDGERS:
        add(replicas, make_run(50, 50, ledger_id=ledger_id, size=3000), ledger_id=ledger_id)
    replicas.store.scheduler.tick()
    fs.fill()
    fs, replicas = stop(fs, replicas)
    replicas.store.scheduler.tick()
    with pytest.raises(StorageFullError):  # noqa: PT012  # once the log file is full
        for first in range(100, 10_000):
            add(replicas, make_run(first, 1, size=3000))
    return fs, replicas


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("stop", [stay, close, after_kill, after_crash])
def test_a_full_bookie_takes_fences_and_deletes(stop: Stop) -> None:
    fs, replicas = full_bookie(stop)
    replicas.fence(LEDGER, None)
    assert state_of(replicas).fenced
    for ledger_id in LEDGERS[1:]:
        replicas.delete(ledger_id)
    assert replicas.ledgers() == [LEDGER]
    before = fs.used_bytes()
    replicas.store.scheduler.tick()
    replicas.store.scheduler.tick()
    assert fs.used_bytes() < before
    fs, replicas = after_kill(fs, replicas)
    assert state_of(replicas).fenced
    assert replicas.ledgers() == [LEDGER]
    fs.give_back(32 * MIB)
    replicas.store.scheduler.tick()
    assert replicas.store.supply.reserve.is_whole
    assert add(replicas, make_run(20_000, 1)) is Status.FENCED
    replicas.close()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("stop", [stay, close, after_kill, after_crash])
@small_stores_have_a_reserve()
def test_a_full_bookie_frees_the_space_of_deleted_ledgers_whose_entries_lie_among_those_of_others(stop: Stop) -> None:
    fs = SimFileSystem(2, capacity_bytes=64 * MIB)
    replicas = open_replicas(fs)
    for ledger_id in LEDGERS:
        replicas.create(ledger_id, describe())
    for first in range(0, 480, 5):
        for ledger_id in LEDGERS:
            add(replicas, make_run(first, 5, ledger_id=ledger_id, size=3200), ledger_id=ledger_id)
        if first % 120 == 115:
            replicas.store.scheduler.checkpoint()
    replicas.store.scheduler.tick()
    fs.fill()
    fs, replicas = stop(fs, replicas)
    replicas.store.scheduler.tick()
    before = fs.used_bytes()
    for ledger_id in LEDGERS[::2]:
        replicas.delete(ledger_id)
    replicas.store.scheduler.tick()
    assert fs.used_bytes() < before - 0.8 * len(LEDGERS[::2]) * 480 * 3200
    for ledger_id in LEDGERS[1::2]:
        for first in range(0, 480, 5):
            expected = content(make_run(first, 5, ledger_id=ledger_id, size=3200))
            status, found = replicas.read(ledger_id, first, first + 4, 1, MIB)
            assert (status, content(found)) == (Status.OK, expected)
    replicas.close()


def test_an_unknown_ledger_is_fenced_although_the_disk_is_full() -> None:
    fs, replicas = full_bookie(after_kill)
    replicas.fence(99, None)
    fs, replicas = after_kill(fs, replicas)
    assert state_of(replicas, 99).fenced
    replicas.close()
