"""Reading a bookie's replicas: ranges over extents and tiers, damage and repair, last add confirmed, deleting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import CorruptError, StorageFailedError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.replication.bookie import BookieMachine, Respond
from pybk.replication.messages import Add, LacReply, Read, ReadLac, ReadReply, Reply, Status
from pybk.storage.format.extent import Extent
from pybk.storage.tiers import ENTRIES
from tests.bookie.replica_harness import (
    LEDGER,
    add,
    after_crash,
    assert_reads,
    check_disk,
    content,
    describe,
    entry,
    make_run,
    open_replicas,
    state_of,
)
from tests.simdisk import SimFileSystem

# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", list(StorageHint))
def test_ranges_over_extents_and_tiers(fs: SimFileSystem, hint: StorageHint) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(hints={hint}))
    for first in (0, 30, 60):
        add(replicas, make_run(first, 25))
    replicas.store.scheduler.checkpoint()
    add(replicas, make_run(25, 5))
    add(replicas, make_run(55, 5))
    add(replicas, make_run(85, 5))
    for moved in (None, StorageHint.HDD, StorageHint.SSD, StorageHint.NVME):
        if moved is not None:
            for metadata in list(replicas.store.ledgers()):
                replicas.store.move(replicas.store.descriptor(metadata.ledger_id), moved)
        assert_reads(replicas, 0, 89)
        assert_reads(replicas, 20, 95, status=Status.NO_SUCH_ENTRY, upto=89)
        assert_reads(replicas, 57, 57)
    tiers = {metadata.tier for metadata in replicas.store.ledgers()}
    assert tiers == {StorageHint.NVME}
    replicas.close()
    check_disk(fs, 3)


def test_ledgers_of_the_store_carry_what_tiers_and_metrics_need(replicas: Replicas) -> None:
    replicas.create(8, describe(hints={StorageHint.HDD}))
    replicas.stage(8, make_run(0, 1, ledger_id=8), True)
    replicas.commit()
    (metadata,) = replicas.store.ledgers()
    assert (metadata.ledger_type, metadata.tier) == ("wal", StorageHint.HDD)
    assert metadata.storage_hints == {StorageHint.HDD}


def test_a_read_takes_as_many_as_fit_and_at_least_one(replicas: Replicas) -> None:
    add(replicas, make_run(0, 10))
    add(replicas, make_run(20, 10))
    size = len(entry(0))
    for fit in (1, 2, 7):
        status, run = replicas.read(LEDGER, 0, 29, 1, fit * size + size // 2)
        assert status is Status.OK
        assert content(run) == [entry(n) for n in range(fit)]
    status, run = replicas.read(LEDGER, 3, 9, 2, 2 * size)
    assert (status, content(run)) == (Status.OK, [entry(3), entry(5)])
    status, run = replicas.read(LEDGER, 0, 9, 1, 0)
    assert (status, content(run)) == (Status.OK, [entry(0)])


def test_a_read_ends_before_an_extent_whose_first_entry_is_too_large_for_the_rest(replicas: Replicas) -> None:
    add(replicas, make_run(0, 10))
    add(replicas, make_run(20, 10, size=1000))
    add(replicas, make_run(10, 10))
    assert len(list(replicas.store.ledgers())) == 2, "20 begins the second"
    status, run = replicas.read(LEDGER, 0, 29, 1, 20 * len(entry(0)) + 500)
    assert status is Status.OK
    assert content(run) == [entry(n) for n in range(20)]


def test_entries_are_read_without_copying_in_few_pieces(replicas: Replicas) -> None:
    add(replicas, make_run(0, 50))
    add(replicas, make_run(50, 50))
    status, run = replicas.read(LEDGER, 10, 89, 1, 1 << 20)
    assert run is not None
    assert status is Status.OK
    assert len(run.body) == 2
    views = [mapped.view for mapped in replicas.store.volumes.views.values()]
    assert all(any(memoryview(piece).obj is view.obj for view in views) for piece in run.body)


def test_an_entry_that_cannot_be_read_is_not_denied(fs: SimFileSystem, replicas: Replicas) -> None:
    replicas.create(8, describe(hints={StorageHint.HDD}))
    add(replicas, make_run(0, 4))
    replicas.stage(8, make_run(0, 4, ledger_id=8), True)
    replicas.commit()
    replicas.store.scheduler.checkpoint()
    replicas.close()
    replicas = open_replicas(fs)
    for row in replicas.store.volumes.rows.values():
        path = replicas.store.volumes.path_of(row)
        if path.endswith(".cold"):
            fs.unlink(path)
    replicas.store.volumes.views.clear()
    assert replicas.read(8, 0, 3, 1, 10_000) == (Status.UNKNOWN, None)  # K5
    assert replicas.read(8, 1, 1, 1, 10_000) == (Status.UNKNOWN, None)
    assert replicas.stage(8, make_run(4, 1, ledger_id=8), True) is Status.OK


def damage(fs: SimFileSystem, replicas: Replicas, entry_id: int) -> None:
    """Change a byte of an entry's payload on the disk, wherever it lies."""
    data = entry(entry_id)
    for row in replicas.store.volumes.rows.values():
        if row.kind == ENTRIES:
            continue
        live = fs.inode(replicas.store.volumes.path_of(row)).live
        at = live.find(data)
        if at >= 0:
            live[at + 100] ^= 1
            return
    raise AssertionError(f"entry {entry_id} lies in no file")


def test_a_damaged_entry_is_repaired_and_no_other_is_overwritten(fs: SimFileSystem, replicas: Replicas) -> None:
    for first in (0, 5, 10):
        add(replicas, make_run(first, 5))
    add(replicas, make_run(15, 1))
    for entry_id in (3, 5, 6, 15):
        damage(fs, replicas, entry_id)
    assert content(replicas.read(LEDGER, 5, 5, 1, 1)[1]) != [entry(5)]
    with pytest.raises(CorruptError, match="repaired from its other bookies"):
        replicas.stage(LEDGER, make_run(5, 2), True)
    assert add(replicas, make_run(10, 2, seed=1), recovery=True) is Status.CONFLICT
    assert add(replicas, make_run(1, 6), recovery=True) is Status.OK
    assert add(replicas, make_run(1, 6)) is Status.OK
    assert add(replicas, make_run(5, 2, seed=1), recovery=True) is Status.CONFLICT
    assert add(replicas, make_run(14, 2), recovery=True) is Status.OK
    for _ in range(2):
        assert_reads(replicas, 0, 15)
        assert_reads(replicas, 0, 15, 3)
        assert replicas.lac_proof(LEDGER) == (15, entry(15))
        fs, replicas = after_crash(fs, replicas)
    assert add(replicas, make_run(14, 3)) is Status.OK
    assert replicas.lac_proof(LEDGER) == (16, entry(16))
    replicas.delete(LEDGER)
    assert list(replicas.store.ledgers()) == []


# ---- last add confirmed ------------------------------------------------------------------------------------------


def test_the_last_entry_proves_the_last_add_confirmed(fs: SimFileSystem, replicas: Replicas) -> None:
    assert replicas.lac_proof(LEDGER) is None
    assert replicas.lac_proof(8) is None
    add(replicas, make_run(0, 3))
    add(replicas, make_run(10, 2, 5))
    add(replicas, make_run(6, 2))
    assert replicas.lac_proof(LEDGER) == (15, entry(15))
    replicas.stage(LEDGER, make_run(20, 1), True)
    assert replicas.lac_proof(LEDGER) == (15, entry(15))
    fs, replicas = after_crash(fs, replicas)
    assert replicas.lac_proof(LEDGER) == (15, entry(15))
    assert state_of(replicas).lac == 14


def test_the_newest_packet_is_kept(replicas: Replicas) -> None:
    add(replicas, make_run(0, 3))
    for lac, packet in ((1, b"one"), (5, b"five"), (4, b"four"), (5, b"again"), (6, b"")):
        replicas.note_lac(LEDGER, lac, packet)
        assert state_of(replicas).lac == max(lac, 5 if packet != b"one" else 0)
    replicas.note_lac(8, 3, b"of nobody")
    assert replicas.lac_packet(LEDGER) == (5, b"five")
    assert replicas.lac_packet(8) is None
    assert state_of(replicas).lac == 6
    add(replicas, make_run(10, 1))
    assert state_of(replicas).lac == 9  # I13: never back


# ---- deleting ----------------------------------------------------------------------------------------------------


def test_deleting_removes_extents_and_fence(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 3))
    add(replicas, make_run(10, 3))
    replicas.fence(LEDGER, None)
    replicas.create(8, describe())
    replicas.stage(8, make_run(0, 1, ledger_id=8), True)
    replicas.commit()
    replicas.delete(LEDGER)
    replicas.delete(LEDGER)
    replicas.delete(9)
    assert replicas.ledgers() == [8]
    assert replicas.read(LEDGER, 0, 0, 1, 1) == (Status.NO_SUCH_LEDGER, None)
    assert replicas.stage(LEDGER, make_run(0, 3), True) is Status.NO_SUCH_LEDGER
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == [8]  # K10
    assert len(list(replicas.store.ledgers())) == 1


def test_a_ledger_of_which_only_a_part_was_deleted_denies_nothing(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 3))
    add(replicas, make_run(10, 3))
    fs.fail_at(1, "EIO", only="write_durable")
    with pytest.raises(StorageFailedError):
        replicas.delete(LEDGER)
    assert replicas.read(LEDGER, 0, 0, 1, 1)[0] in (Status.UNKNOWN, Status.OK)
    assert replicas.read(LEDGER, 50, 50, 1, 1)[0] is Status.UNKNOWN


def test_a_ledger_that_is_loaded_in_part_alone_denies_nothing(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load leaves no object behind that knows some of the extents."""
    add(replicas, make_run(0, 3))
    add(replicas, make_run(10, 3))
    fs, replicas = after_crash(fs, replicas)
    loaded: list[Extent | None] = []

    def failing(metadata: LedgerMetadata) -> Extent | None:
        loaded.append(None if loaded else Extent.of(metadata))
        return loaded[-1]

    with monkeypatch.context() as patched:
        patched.setattr("pybk.bookie.replicas.Extent", SimpleNamespace(of=failing))
        with pytest.raises(CorruptError, match="not one now"):
            replicas.read(LEDGER, 10, 12, 1, 1 << 20)
    assert len(loaded) == 2
    assert_reads(replicas, 0, 2)
    assert_reads(replicas, 10, 12)


def test_a_machine_answers_from_replicas(fs: SimFileSystem, replicas: Replicas) -> None:
    machine = BookieMachine(replicas)
    assert machine.receive("a", Add(LEDGER, (make_run(0, 3),), 1), None, 0) == []
    assert machine.commit() == [Respond("a", Reply(Status.OK))]
    (answer,) = machine.receive("a", Read(LEDGER, 1, 5, 1, 1 << 20), None, 0)
    assert isinstance(answer, Respond)
    assert isinstance(answer.reply, ReadReply)
    assert (answer.reply.status, content(answer.reply.run)) == (Status.NO_SUCH_ENTRY, [entry(1), entry(2)])
    (answer,) = machine.receive("a", ReadLac(LEDGER, fence=True), describe(), 0)
    assert isinstance(answer, Respond)
    assert answer.reply == LacReply(Status.OK, 1, entry_id=2, entry=entry(2))
    fs, replicas = after_crash(fs, replicas)
    machine = BookieMachine(replicas)
    assert machine.receive("a", Add(LEDGER, (make_run(3, 1),), 2), None, 0) == [Respond("a", Reply(Status.FENCED))]
    assert machine.receive("a", Add(LEDGER, (make_run(3, 1),), 2, recovery=True), None, 0) == []
    assert machine.commit() == [Respond("a", Reply(Status.OK))]
