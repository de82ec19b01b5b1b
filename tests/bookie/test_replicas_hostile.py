"""What peers say of their ledgers names nothing of a bookie's own, and numbers from peers fit what the store holds."""

from __future__ import annotations

from array import array

import pytest

from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replicas import Replicas
from pybk.flags import LedgerType, WriteFlag
from pybk.replication.messages import EntryRun, Status
from tests.bookie.replica_harness import (
    LEDGER,
    ROOT,
    add,
    after_crash,
    after_kill,
    assert_reads,
    describe,
    entry,
    make_run,
    open_replicas,
    state_of,
)
from tests.simdisk import SimEnvironment, SimFileSystem
from tests.storage.store_harness import CONFIG

CLUSTER, INSTANCE = b"cluster", bytes(range(16))
OWN_TYPES = [LedgerType.BOOKIE, LedgerType.FENCE, LedgerType.LIMBO]


def named(kind: LedgerType, flags: WriteFlag = WriteFlag.NONE) -> LedgerHeader:
    return describe(flags=flags)._replace(ledger_type=kind)


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have extents stored under whatever type their description names, as older versions did."""
    monkeypatch.setattr(LedgerHeader, "stored_type", property(lambda described: described.ledger_type))


@pytest.mark.parametrize("kind", OWN_TYPES)
def test_no_extent_is_stored_as_a_record_of_the_bookies_own(
    fs: SimFileSystem, replicas: Replicas, kind: LedgerType
) -> None:
    replicas.record_start(CLUSTER, "a", INSTANCE)
    replicas.create(8, named(kind))
    assert add(replicas, make_run(0, 3, ledger_id=8), ledger_id=8) is Status.OK
    types = [metadata.ledger_type for metadata in replicas.store.ledgers()]
    assert sorted(types) == ["", LedgerType.BOOKIE]
    fs, replicas = after_crash(fs, replicas)
    assert state_of(replicas, 8).header == named(kind)
    assert not state_of(replicas, 8).fenced
    assert replicas.in_limbo() == []


@pytest.mark.parametrize("kind", OWN_TYPES)
@pytest.mark.parametrize("flags", [WriteFlag.NONE, WriteFlag.DEFERRED_FORCE])
def test_a_directory_that_took_a_bookies_own_type_from_a_peer_opens(
    fs: SimFileSystem, as_before: None, kind: LedgerType, flags: WriteFlag
) -> None:
    replicas = open_replicas(fs)
    replicas.record_start(CLUSTER, "a", INSTANCE)
    replicas.create(LEDGER, named(kind, flags))
    assert add(replicas, make_run(0, 5)) is Status.OK
    replicas.store.scheduler.checkpoint()
    assert add(replicas, make_run(7, 2, 2)) is Status.OK
    assert {metadata.ledger_type for metadata in replicas.store.ledgers()} == {kind, LedgerType.BOOKIE}
    fs, replicas = after_kill(fs, replicas)
    replicas.check_identity(CLUSTER, "a", INSTANCE, 1)
    assert replicas.record_start(CLUSTER, "a", INSTANCE, 1) == 2
    assert not state_of(replicas).fenced
    assert_reads(replicas, 0, 4)
    assert_reads(replicas, 7, 9, 2)
    # Its fence and its mark of limbo are distinguished from its entries, and lifting the mark deletes no entry.
    replicas.put_in_limbo({LEDGER: None})
    replicas.fence(LEDGER, None)
    fs, replicas = after_kill(fs, replicas)
    assert state_of(replicas).fenced
    assert replicas.in_limbo() == [LEDGER]
    replicas.end_limbo(LEDGER, closed=False)
    assert_reads(replicas, 0, 4)
    replicas.delete(LEDGER)
    fs, replicas = after_kill(fs, replicas)
    assert replicas.ledgers() == []


@pytest.mark.parametrize("kind", OWN_TYPES)
def test_a_directory_that_took_a_bookies_own_type_from_a_peer_can_be_salvaged(
    fs: SimFileSystem, as_before: None, kind: LedgerType
) -> None:
    replicas = open_replicas(fs)
    replicas.record_start(CLUSTER, "a", INSTANCE)
    replicas.create(LEDGER, named(kind))
    assert add(replicas, make_run(0, 5)) is Status.OK
    replicas.close()
    fs = fs.kill()
    salvaged = Replicas.open(
        ROOT, config=CONFIG, fs=fs, environment=lambda path: SimEnvironment(fs, path), salvage=True
    )
    salvaged.put_in_limbo(dict.fromkeys(salvaged.ledgers()))
    salvaged.store.keep_salvage()
    assert salvaged.identity is not None
    salvaged.close()


def with_header(lac: int, length: int, entry_id: int = 3) -> EntryRun:
    made = bytearray(entry(entry_id))
    made[16:24] = lac.to_bytes(8, "big", signed=True)
    made[24:32] = length.to_bytes(8, "big", signed=True)
    return EntryRun(entry_id, 1, array("q", [len(made)]), (bytes(made),))


@pytest.mark.parametrize(
    "run",
    [
        with_header(-2, 900),
        with_header(3, 900),
        with_header((1 << 63) - 1, 900),
        with_header(2, -1),
        with_header(2, -(1 << 63)),
        make_run(0, 1)._replace(stride=1 << 32),
        make_run(0, 1)._replace(stride=(1 << 63) - 1),
        make_run(0, 1)._replace(first=-1),
        make_run(0, 1)._replace(first=(1 << 63) - 1),
        make_run(0, 2)._replace(stride=1 << 63),
    ],
)
def test_numbers_that_the_store_cannot_hold_are_refused(replicas: Replicas, run: EntryRun) -> None:
    replicas.create(LEDGER, describe())
    assert replicas.stage(LEDGER, run, True) is Status.REFUSED
    assert add(replicas, make_run(0, 20)) is Status.OK
    many = make_run(20, 20)
    body = bytearray(many.body[0])
    body[24:32] = (-5).to_bytes(8, "big", signed=True)
    assert replicas.stage(LEDGER, many._replace(body=(bytes(body),)), True) is Status.REFUSED
    assert_reads(replicas, 0, 19)


def test_the_last_entry_that_there_can_be_is_taken(replicas: Replicas) -> None:
    replicas.create(LEDGER, describe())
    last = (1 << 63) - 1
    made = bytearray(entry(3))
    made[8:16] = last.to_bytes(8, "big", signed=True)
    run = EntryRun(last, (1 << 32) - 1, array("q", [len(made)]), (bytes(made),))
    assert replicas.stage(LEDGER, run, True) in (Status.OK, Status.REFUSED)
    replicas.commit()
    assert add(replicas, make_run(0, 20)) is Status.OK
