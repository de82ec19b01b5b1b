"""What a bookie keeps: extents, what is there already, durability, reading, deleting."""

from __future__ import annotations

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import CorruptError, StorageFailedError, StorageFullError
from pybk.flags import LedgerType, StorageHint
from pybk.replication.messages import Status
from pybk.storage.extent import Extent
from pybk.storage.volumes import ENTRIES
from tests.replicaworld import (  # noqa: F401  # fixtures among them
    LEDGER,
    add,
    after_crash,
    assert_reads,
    check_disk,
    content,
    describe,
    entry,
    make_run,
    new_disk,
    new_replicas,
    no_room,
    open_replicas,
    state_of,
)
from tests.simdisk import SimFileSystem


def extents(replicas: Replicas) -> list[tuple[int, int, int]]:
    """Return first, stride and entries of the extents, as the store has them."""
    found = []
    for metadata in replicas.store.ledgers():
        extent = Extent.of(metadata)
        if extent is not None and metadata.ledger_type != LedgerType.FENCE:
            last = replicas.store.descriptor(metadata.ledger_id).last_durable
            found.append((extent.first, extent.stride, last + 1))
    return sorted(found)


# ---- extents -------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_appended_and_one_that_leaves_a_gap_begins_an_extent(replicas: Replicas) -> None:
    for first, count in ((0, 3), (3, 2), (10, 4), (14, 1), (5, 1)):
        assert add(replicas, make_run(first, count)) is Status.OK
    assert extents(replicas) == [(0, 1, 6), (10, 1, 5)]
    assert_reads(replicas, 0, 20, status=Status.NO_SUCH_ENTRY, upto=5)
    assert_reads(replicas, 6, 20, status=Status.NO_SUCH_ENTRY, upto=5)
    assert_reads(replicas, 10, 14)
    assert_reads(replicas, 12, 20, status=Status.NO_SUCH_ENTRY, upto=14)


def test_a_gap_that_is_filled_is_read_over(replicas: Replicas) -> None:
    for first, count in ((0, 5), (10, 5), (5, 5), (20, 2), (15, 5)):
        add(replicas, make_run(first, count))
    assert extents(replicas) == [(0, 1, 10), (10, 1, 10), (20, 1, 2)]
    assert_reads(replicas, 0, 21)
    assert_reads(replicas, 4, 20)


def test_entries_before_the_first_extent_begin_another(replicas: Replicas) -> None:
    add(replicas, make_run(10, 3))
    add(replicas, make_run(4, 2))
    assert extents(replicas) == [(4, 1, 2), (10, 1, 3)]
    assert_reads(replicas, 4, 10, status=Status.NO_SUCH_ENTRY, upto=5)


def test_pieces_of_a_body_may_be_many(replicas: Replicas) -> None:
    run = make_run(0, 4, whole=False)
    halves = [half for part in run.body for half in (part[:100], part[100:150], part[150:])]
    assert add(replicas, run._replace(body=halves)) is Status.OK
    assert_reads(replicas, 0, 3)


def test_a_striped_ledger_has_an_extent_for_each_residue_and_one_commit_for_a_message(replicas: Replicas) -> None:
    for batch in range(3):
        base = batch * 20
        lsn = replicas.store.log.durable_lsn
        for residue in (2, 1, 0):
            assert replicas.stage(LEDGER, make_run(base + residue, 4, 5), True) is Status.OK
        if batch:
            assert replicas.store.log.durable_lsn == lsn
        replicas.commit()
        if batch:
            assert replicas.store.log.durable_lsn == lsn + 1
    assert extents(replicas) == [(0, 5, 12), (1, 5, 12), (2, 5, 12)]
    for residue in (0, 1, 2):
        assert_reads(replicas, residue, 59, 5)
        assert_reads(replicas, 20 + residue, 80, 5, status=Status.NO_SUCH_ENTRY, upto=59)
    assert_reads(replicas, 3, 59, 5, status=Status.NO_SUCH_ENTRY, upto=2)
    assert_reads(replicas, 5, 20, status=Status.NO_SUCH_ENTRY, upto=7)


def test_reads_by_another_stride_than_the_extents(replicas: Replicas) -> None:
    add(replicas, make_run(0, 40))
    assert_reads(replicas, 3, 39, 4)
    for residue in range(3):
        add(replicas, make_run(40 + residue, 10, 3))
    assert_reads(replicas, 30, 69)
    assert_reads(replicas, 31, 69, 2)


def test_mixed_strides_overlap_without_being_stored_twice(replicas: Replicas) -> None:
    add(replicas, make_run(0, 10, 2))
    assert add(replicas, make_run(4, 8)) is Status.OK
    assert add(replicas, make_run(0, 7, 3)) is Status.OK
    assert sum(count for _, _, count in extents(replicas)) == len({*range(0, 20, 2), *range(4, 12), *range(0, 21, 3)})
    assert_reads(replicas, 2, 12)


# ---- what is there already ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged_only", [False, True])
def test_the_same_again_is_fine_and_stored_once(replicas: Replicas, staged_only: bool) -> None:
    replicas.stage(LEDGER, make_run(0, 5), True)
    if not staged_only:
        replicas.commit()
    assert add(replicas, make_run(0, 5)) is Status.OK
    assert add(replicas, make_run(2, 2)) is Status.OK
    assert extents(replicas) == [(0, 1, 5)]


def test_of_a_partial_overlap_the_rest_is_staged(replicas: Replicas) -> None:
    add(replicas, make_run(5, 5))
    add(replicas, make_run(12, 2))
    assert add(replicas, make_run(3, 15)) is Status.OK
    assert_reads(replicas, 3, 17)
    assert sum(count for _, _, count in extents(replicas)) == 15


@pytest.mark.parametrize("first", [0, 3, 4])
def test_other_bytes_for_an_entry_are_a_conflict_and_nothing_is_staged(replicas: Replicas, first: int) -> None:
    add(replicas, make_run(3, 2))
    assert add(replicas, make_run(first, 6, seed=1), recovery=True) is Status.CONFLICT  # I14
    assert add(replicas, make_run(first, 6, size=299)) is Status.CONFLICT
    assert extents(replicas) == [(3, 1, 2)]
    assert_reads(replicas, 3, 4)


def test_bytes_that_are_not_the_entries_they_should_be_are_refused(replicas: Replicas) -> None:
    run = make_run(0, 3)
    sizes = run.sizes
    for wrong in (
        make_run(0, 3, ledger_id=8),
        run._replace(first=1),
        run._replace(stride=2),
        run._replace(first=-1),
        run._replace(stride=0),
        run._replace(sizes=sizes[:2]),
        run._replace(sizes=sizes[:0], body=[]),
        run._replace(sizes=sizes[:2] + type(sizes)("q", [30, sizes[2] - 30])),
        run._replace(body=[run.body[0][:-1]]),
    ):
        assert add(replicas, wrong) is Status.REFUSED
    assert extents(replicas) == []


def test_nothing_is_staged_for_a_ledger_that_was_not_made_known(replicas: Replicas) -> None:
    assert replicas.stage(8, make_run(0, 1, ledger_id=8), True) is Status.NO_SUCH_LEDGER
    assert replicas.state(8) is None
    assert replicas.read(8, 0, 0, 1, 100) == (Status.NO_SUCH_LEDGER, None)


# ---- durability --------------------------------------------------------------------------------------------------


def test_only_durable_entries_are_read_and_staged_ones_are_not_denied(replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    replicas.stage(LEDGER, make_run(2, 2), True)
    assert_reads(replicas, 0, 3, status=Status.UNKNOWN, upto=1)
    assert_reads(replicas, 4, 4, status=Status.NO_SUCH_ENTRY, upto=3)
    replicas.commit()
    assert_reads(replicas, 0, 3)


def test_what_was_committed_survives_a_crash_and_extents_go_on(fs: SimFileSystem, replicas: Replicas) -> None:
    for residue in (0, 1):
        replicas.stage(LEDGER, make_run(residue, 5, 3), True)
    replicas.commit()
    add(replicas, make_run(20, 4))
    replicas.stage(LEDGER, make_run(24, 4), True)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == [LEDGER]
    state = state_of(replicas)
    assert (state.fenced, state.limbo, state.description) == (False, False, describe())
    assert_reads(replicas, 0, 14, 3, status=Status.OK, upto=12)
    assert_reads(replicas, 20, 23)
    assert add(replicas, make_run(15, 2, 3)) is Status.OK
    assert add(replicas, make_run(24, 6)) is Status.OK
    assert (0, 3, 7) in extents(replicas)
    assert_reads(replicas, 20, 29)
    replicas.close()
    check_disk(fs, 3)


def test_a_message_that_needs_new_extents_is_one_commit_too(fs: SimFileSystem, replicas: Replicas) -> None:
    lsn = replicas.store.log.durable_lsn
    for residue in range(3):
        replicas.stage(LEDGER, make_run(residue, 2, 5), True)
    assert replicas.store.log.durable_lsn == lsn
    replicas.commit()
    assert replicas.store.log.durable_lsn == lsn + 1
    fs, replicas = after_crash(fs, replicas)
    assert extents(replicas) == [(residue, 5, 2) for residue in range(3)]
    replicas.close()
    check_disk(fs, 3)


def test_an_extent_that_found_no_room_is_forgotten_and_begun_anew(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    no_room(fs, replicas)
    replicas.stage(LEDGER, make_run(10, 2), True)
    with pytest.raises(StorageFullError):
        replicas.commit()
    fs.heal()
    replicas.store.maintenance.tick()
    assert_reads(replicas, 10, 11, status=Status.NO_SUCH_ENTRY, upto=9)
    assert add(replicas, make_run(10, 3)) is Status.OK
    replicas.stage(LEDGER, make_run(20, 1), True)
    replicas.delete(LEDGER)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == []
    replicas.close()
    check_disk(fs, 0)


def test_deleting_what_found_no_room_leaves_a_sound_log(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    no_room(fs, replicas)
    replicas.stage(LEDGER, make_run(10, 2), True)
    with pytest.raises(StorageFullError):
        replicas.delete(LEDGER)
    fs.heal()
    replicas.store.maintenance.tick()
    replicas.delete(LEDGER)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == []


def test_a_failed_sync_is_final(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    replicas.stage(LEDGER, make_run(2, 2), True)
    fs.fail_at(0, "EIO", only="write_durable")
    with pytest.raises(StorageFailedError):
        replicas.commit()
    fs.heal()
    assert isinstance(replicas.health().error, StorageFailedError)
    with pytest.raises(StorageFailedError):
        replicas.stage(LEDGER, make_run(2, 2), True)
    assert_reads(replicas, 0, 1)
    assert_reads(replicas, 0, 3, status=Status.UNKNOWN, upto=1)


def test_a_commit_that_somebody_else_failed_is_told_to_who_staged(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    replicas.stage(LEDGER, make_run(2, 2), True)
    fs.fail_at(0, "EIO", only="write_durable")
    with pytest.raises(StorageFailedError):
        replicas.fence(8, None)
    with pytest.raises(StorageFailedError):
        replicas.commit()


def test_when_there_is_no_room_nothing_is_acknowledged_and_later_it_goes_on(
    fs: SimFileSystem, replicas: Replicas
) -> None:
    add(replicas, make_run(0, 2))
    no_room(fs, replicas)
    replicas.stage(LEDGER, make_run(2, 2), True)
    with pytest.raises(StorageFullError):
        replicas.commit()
    with pytest.raises(StorageFullError):
        replicas.stage(LEDGER, make_run(2, 2), True)
    fs.heal()
    replicas.store.maintenance.tick()
    assert_reads(replicas, 0, 3, status=Status.NO_SUCH_ENTRY, upto=1)
    assert add(replicas, make_run(2, 3)) is Status.OK
    assert_reads(replicas, 0, 4)


# ---- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", list(StorageHint))
def test_ranges_over_extents_and_tiers(fs: SimFileSystem, hint: StorageHint) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(hints={hint}))
    for first in (0, 30, 60):
        add(replicas, make_run(first, 25))
    replicas.store.maintenance.checkpoint()
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


def test_entries_are_read_without_copying_in_few_pieces(replicas: Replicas) -> None:
    add(replicas, make_run(0, 50))
    add(replicas, make_run(50, 50))
    status, run = replicas.read(LEDGER, 10, 89, 1, 1 << 20)
    assert run is not None
    assert status is Status.OK
    assert len(run.body) == 2
    views = [memoryview(view) for view in replicas.store.volumes.views.values()]
    assert all(any(memoryview(piece).obj is view.obj for view in views) for piece in run.body)


def test_an_entry_that_cannot_be_read_is_not_denied(fs: SimFileSystem, replicas: Replicas) -> None:
    replicas.create(8, describe(hints={StorageHint.HDD}))
    add(replicas, make_run(0, 4))
    replicas.stage(8, make_run(0, 4, ledger_id=8), True)
    replicas.commit()
    replicas.store.maintenance.checkpoint()
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
