"""What a bookie keeps: extents, entries that it has already, durability."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import replace

import pytest

from pybk.bookie.replicas import Replicas
from pybk.errors import NoSuchLedgerError, StorageFailedError, StorageFullError
from pybk.flags import LedgerType
from pybk.replication.messages import Status
from pybk.storage.descriptor import LedgerDescriptor
from pybk.storage.format.extent import Extent
from pybk.threads.group_commit import Completion
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
    no_space,
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


def test_a_run_that_continues_is_appended_and_one_that_leaves_a_gap_begins_an_extent(replicas: Replicas) -> None:
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


# ---- entries that it has already ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("fenced", [False, True])
def test_a_recovery_gets_no_entry_that_is_not_durable_alone_or_after_others(
    replicas: Replicas, *, fenced: bool, checked: bool
) -> None:
    """AB4; that recoveries write back what they get all the same is shown by survivor B3 of the simulator."""
    add(replicas, make_run(0, 2))
    if fenced:
        replicas.fence(LEDGER, None)
    replicas.stage(LEDGER, make_run(2, 2), True, recovery=True)

    def read(first: int, last: int) -> tuple[Status, list[bytes]]:
        status, run = replicas.read(LEDGER, first, last, 1, 1 << 20, checked=checked, recovery=True)
        return status, content(run) if run is not None else []

    assert read(0, 3) == (Status.UNKNOWN, [entry(0), entry(1)])
    assert read(2, 3) == read(2, 2) == read(3, 3) == (Status.UNKNOWN, []), "neither returned nor denied"
    assert replicas.lac_proof(LEDGER) == (1, entry(1))
    replicas.commit()
    assert read(0, 3) == (Status.OK, [entry(number) for number in range(4)])
    assert read(3, 3) == (Status.OK, [entry(3)])


def test_committed_entries_survive_a_crash_and_extents_continue(fs: SimFileSystem, replicas: Replicas) -> None:
    for residue in (0, 1):
        replicas.stage(LEDGER, make_run(residue, 5, 3), True)
    replicas.commit()
    add(replicas, make_run(20, 4))
    replicas.stage(LEDGER, make_run(24, 4), True)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == [LEDGER]
    state = state_of(replicas)
    assert (state.fenced, state.limbo, state.header) == (False, False, describe())
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


def test_an_extent_that_found_no_space_is_forgotten_and_begun_anew(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    no_space(fs, replicas)
    replicas.stage(LEDGER, make_run(10, 2), True)
    with pytest.raises(StorageFullError):
        replicas.commit()
    fs.heal()
    replicas.store.scheduler.tick()
    assert_reads(replicas, 10, 11, status=Status.NO_SUCH_ENTRY, upto=9)
    assert add(replicas, make_run(10, 3)) is Status.OK
    replicas.stage(LEDGER, make_run(20, 1), True)
    replicas.delete(LEDGER)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == []
    replicas.close()
    check_disk(fs, 0)


def test_deleting_an_extent_that_found_no_space_leaves_a_sound_log(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    no_space(fs, replicas)
    replicas.stage(LEDGER, make_run(10, 2), True)
    with pytest.raises(StorageFullError):
        replicas.delete(LEDGER)
    fs.heal()
    replicas.store.scheduler.tick()
    replicas.delete(LEDGER)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == []


@pytest.mark.parametrize("how", ["delete", "drop_entries"])
def test_a_ledger_of_which_nothing_could_be_stored_goes_without_space(
    fs: SimFileSystem, replicas: Replicas, how: str
) -> None:
    """A delete of an extent that was never created would need space in the log for nothing."""
    no_space(fs, replicas)
    replicas.stage(LEDGER, make_run(10, 2), True)
    getattr(replicas, how)(LEDGER)
    assert replicas.ledgers() == []
    with pytest.raises(StorageFullError):
        replicas.commit()


def test_a_delete_during_a_failing_creation_leaves_a_sound_log(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(replicas, make_run(0, 2))
    store = replicas.store
    delete = store.delete

    def delete_later(descriptor: LedgerDescriptor) -> None:
        with suppress(StorageFullError):
            store.log.flush()  # as another thread may, just before
        fs.heal()
        store.scheduler.tick()
        delete(descriptor)

    monkeypatch.setattr(store, "delete", delete_later)
    no_space(fs, replicas)
    replicas.stage(LEDGER, make_run(10, 2), True)
    replicas.delete(LEDGER)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == []


def test_a_ledger_is_not_there_before_its_creation_is_durable(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    store = replicas.store
    (known,) = store.ledgers()
    entry_bytes = entry(0)

    def stage(descriptor: LedgerDescriptor) -> Completion | None:
        size = len(entry_bytes)
        sizes = array("q", [size])
        return store.log.stage(
            descriptor, 0, sizes, [entry_bytes, b""], nbytes=size, base_length=0, overhead=36, wanted=True
        )

    made, commit = store.stage_create(replace(known, ledger_id=store.new_ledger_id()))
    with pytest.raises(NoSuchLedgerError):
        store.descriptor(made.ledger_id)
    assert stage(made) is commit
    store.log.wait(commit)
    assert store.descriptor(made.ledger_id) is made
    no_space(fs, replicas)
    lost, commit = store.stage_create(replace(known, ledger_id=store.new_ledger_id()))
    store.log.wait(commit)
    assert isinstance(commit.error, StorageFullError)
    fs.heal()
    store.scheduler.tick()
    with pytest.raises(StorageFullError):
        stage(lost)


def test_stripes_staged_twice_in_a_commit_have_the_length_of_their_last_entry(
    fs: SimFileSystem, replicas: Replicas
) -> None:
    for first in (0, 20, 40):
        replicas.stage(LEDGER, make_run(first, 4, 5), True)
    replicas.commit()
    replicas.store.scheduler.checkpoint()
    replicas.close()
    check_disk(fs, 1)


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


def test_a_commit_that_another_thread_failed_raises_where_it_was_staged(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    replicas.stage(LEDGER, make_run(2, 2), True)
    fs.fail_at(0, "EIO", only="write_durable")
    with pytest.raises(StorageFailedError):
        replicas.fence(8, None)
    with pytest.raises(StorageFailedError):
        replicas.commit()


def test_without_space_nothing_is_acknowledged_until_space_is_back(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    no_space(fs, replicas)
    replicas.stage(LEDGER, make_run(2, 2), True)
    with pytest.raises(StorageFullError):
        replicas.commit()
    with pytest.raises(StorageFullError):
        replicas.stage(LEDGER, make_run(2, 2), True)
    fs.heal()
    replicas.store.scheduler.tick()
    assert_reads(replicas, 0, 3, status=Status.NO_SUCH_ENTRY, upto=1)
    assert add(replicas, make_run(2, 3)) is Status.OK
    assert_reads(replicas, 0, 4)
