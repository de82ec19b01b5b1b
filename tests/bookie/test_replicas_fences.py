"""What a bookie keeps beyond entries: fences and limbo, over kills and crashes."""

from __future__ import annotations

import pytest

from pybk.bookie.ledger_header import LedgerHeader
from pybk.bookie.replica import Replica
from pybk.bookie.replicas import Replicas
from pybk.errors import StorageFullError
from pybk.flags import LedgerType, WriteFlag
from pybk.replication.messages import Status
from pybk.storage.log.commit import Commit
from tests.bookie.replica_harness import (
    LEDGER,
    add,
    after_crash,
    after_kill,
    assert_reads,
    check_disk,
    content,
    describe,
    entry,
    make_run,
    no_space,
    open_replicas,
    state_of,
)
from tests.simdisk import SimFileSystem

DEFERRED = WriteFlag.DEFERRED_FORCE

# ---- fences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [after_kill, after_crash])
def test_a_fence_survives_and_takes_recoveries_alone(fs: SimFileSystem, replicas: Replicas, stop: object) -> None:
    add(replicas, make_run(0, 2))
    replicas.fence(LEDGER, None)
    replicas.fence(LEDGER, describe())
    assert callable(stop)
    fs, replicas = stop(fs, replicas)
    assert state_of(replicas).fenced  # I12
    assert add(replicas, make_run(2, 2)) is Status.FENCED  # AB2
    assert add(replicas, make_run(2, 2), recovery=True) is Status.OK
    assert_reads(replicas, 0, 3)
    assert sum(metadata.ledger_type == LedgerType.FENCE for metadata in replicas.store.ledgers()) == 1
    replicas.close()
    check_disk(fs, 2)


def test_an_unknown_ledger_is_fenced(fs: SimFileSystem, replicas: Replicas) -> None:
    replicas.fence(8, None)
    replicas.fence(9, describe(flags=DEFERRED))
    fs, replicas = after_crash(fs, replicas)
    assert replicas.ledgers() == [8, 9]
    for ledger_id in (8, 9):
        replicas.create(ledger_id, describe(flags=DEFERRED))
        assert replicas.stage(ledger_id, make_run(0, 1, ledger_id=ledger_id), True) is Status.FENCED
        assert state_of(replicas, ledger_id).header == describe(flags=DEFERRED)


def test_what_was_staged_before_a_fence_is_durable_with_it(replicas: Replicas) -> None:
    replicas.stage(LEDGER, make_run(0, 2), False)
    replicas.fence(LEDGER, None)
    assert_reads(replicas, 0, 1)


def test_a_full_store_can_be_fenced(fs: SimFileSystem, replicas: Replicas) -> None:
    add(replicas, make_run(0, 2))
    replicas.store.scheduler.full = "there is no space"
    replicas.store.space_checked()
    with pytest.raises(StorageFullError):
        replicas.stage(LEDGER, make_run(2, 2), True)
    replicas.fence(LEDGER, None)  # K8
    fs, replicas = after_crash(fs, replicas)
    assert state_of(replicas).fenced


def test_a_ledger_that_is_deleted_while_it_is_being_fenced_is_fenced_all_the_same(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an add that was on its way could make the ledger anew behind the back of a recovery."""
    add(replicas, make_run(0, 2))
    known = replicas.known

    def known_and_deleted(ledger_id: int, description: LedgerHeader | None) -> Replica:
        monkeypatch.undo()
        found = known(ledger_id, description)
        replicas.delete(ledger_id)
        return found

    monkeypatch.setattr(replicas, "known", known_and_deleted)
    replicas.fence(LEDGER, describe())
    assert add(replicas, make_run(2, 2)) is Status.FENCED
    fs, replicas = after_crash(fs, replicas)
    assert add(replicas, make_run(2, 2)) is Status.FENCED


def test_a_fence_that_could_not_be_stored_refuses_adds_and_is_stored_by_the_next_try(
    fs: SimFileSystem, replicas: Replicas
) -> None:
    add(replicas, make_run(0, 2))
    no_space(fs, replicas)
    with pytest.raises(StorageFullError):
        replicas.fence(LEDGER, None)
    assert replicas.stage(LEDGER, make_run(2, 2), True) is Status.FENCED
    fs.heal()
    replicas.fence(LEDGER, None)
    fs, replicas = after_crash(fs, replicas)
    assert state_of(replicas).fenced


# ---- limbo -------------------------------------------------------------------------------------------------------


def test_entries_that_were_acknowledged_before_they_were_durable_are_never_denied(
    fs: SimFileSystem, replicas: Replicas
) -> None:
    replicas.create(8, describe(flags=DEFERRED))
    add(replicas, make_run(0, 2))
    replicas.stage(8, make_run(0, 2, ledger_id=8), True)
    replicas.commit()
    replicas.stage(8, make_run(2, 2, ledger_id=8), False)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.in_limbo() == [8]
    assert replicas.read(8, 2, 2, 1, 100) == (Status.UNKNOWN, None)  # I17
    assert replicas.read(8, 0, 9, 1, 10_000)[0] is Status.UNKNOWN
    assert len(content(replicas.read(8, 0, 9, 1, 10_000)[1])) == 2
    assert_reads(replicas, 0, 2, status=Status.NO_SUCH_ENTRY, upto=1)
    assert replicas.stage(8, make_run(2, 2, ledger_id=8), True) is Status.LIMBO
    assert replicas.stage(8, make_run(2, 2, ledger_id=8), True, recovery=True) is Status.OK
    replicas.commit()
    replicas.end_limbo(8, closed=False)
    assert replicas.in_limbo() == []
    assert replicas.read(8, 4, 4, 1, 100) == (Status.NO_SUCH_ENTRY, None)
    assert replicas.stage(8, make_run(4, 2, ledger_id=8), True) is Status.OK


def test_after_a_durable_fence_a_recovery_is_denied_unforced_entries(fs: SimFileSystem) -> None:
    """D6: else a recovery of a deferred ledger would wait for ever, for bookies that wait for its end."""
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED))
    replicas.stage(LEDGER, make_run(0, 2), False)
    replicas.commit()
    replicas.stage(LEDGER, make_run(2, 2), False)
    fs, replicas = after_crash(fs, replicas)
    assert (state_of(replicas).limbo, state_of(replicas).gap) == (True, False)
    assert replicas.read(LEDGER, 2, 2, 1, 100, recovery=True) == (Status.UNKNOWN, None)
    for _ in range(2):
        replicas.fence(LEDGER, describe(flags=DEFERRED))
        status, run = replicas.read(LEDGER, 0, 9, 1, 10_000, recovery=True)
        assert (status, content(run)) == (Status.NO_SUCH_ENTRY, [entry(0), entry(1)])
        assert replicas.read(LEDGER, 2, 2, 1, 100) == (Status.UNKNOWN, None)
        fs, replicas = after_crash(fs, replicas)


def test_a_partly_deleted_ledger_is_not_denied(
    fs: SimFileSystem, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(replicas, make_run(0, 2))
    replicas.fence(LEDGER, None)

    def fail(descriptor: object) -> None:
        raise StorageFullError("no space to note that it was deleted")

    monkeypatch.setattr(replicas.store, "delete", fail)
    with pytest.raises(StorageFullError):
        replicas.delete(LEDGER)
    assert (state_of(replicas).limbo, state_of(replicas).gap) == (True, True)
    assert replicas.read(LEDGER, 2, 2, 1, 100, recovery=True) == (Status.UNKNOWN, None)


def test_an_extent_whose_entries_were_all_lost_hides_no_others(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED))
    add(replicas, make_run(0, 10))
    for first in (20, 30):
        replicas.stage(LEDGER, make_run(first, 2), False)
    fs, replicas = after_crash(fs, replicas)
    assert add(replicas, make_run(10, 28), recovery=True) is Status.OK
    for _ in range(2):
        assert_reads(replicas, 0, 37)
        assert_reads(replicas, 31, 33)
        fs, replicas = after_crash(fs, replicas)


def test_a_clean_end_leaves_no_limbo(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED))
    replicas.stage(LEDGER, make_run(0, 2), False)
    replicas.close()
    replicas = open_replicas(fs)
    assert replicas.in_limbo() == []
    assert_reads(replicas, 0, 2, status=Status.NO_SUCH_ENTRY, upto=1)


def test_a_new_ledger_lacks_nothing_and_a_doubted_one_lacks_something_after_a_crash_as_well(
    fs: SimFileSystem, replicas: Replicas
) -> None:
    add(replicas, make_run(0, 2))
    assert (state_of(replicas).limbo, state_of(replicas).gap) == (False, False)
    replicas.put_in_limbo({LEDGER: describe()})
    fs, replicas = after_crash(fs, replicas)
    assert (state_of(replicas).limbo, state_of(replicas).gap) == (True, True)


def test_limbo_survives_a_clean_end(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED))
    replicas.stage(LEDGER, make_run(0, 2), False)
    fs, replicas = after_crash(fs, replicas)
    assert replicas.in_limbo() == [LEDGER]
    for _ in range(2):
        replicas.close()
        replicas = open_replicas(fs)
        assert replicas.in_limbo() == [LEDGER]
    replicas.end_limbo(LEDGER, closed=True)
    replicas.close()
    assert open_replicas(fs).in_limbo() == []


def test_deferred_entries_that_found_no_space_put_the_ledger_in_limbo(fs: SimFileSystem) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED))
    add(replicas, make_run(0, 2))
    no_space(fs, replicas)
    assert replicas.stage(LEDGER, make_run(2, 2), False) is Status.OK
    with pytest.raises(StorageFullError):
        replicas.commit()
    fs.heal()
    replicas.store.scheduler.tick()
    assert_reads(replicas, 0, 3, status=Status.UNKNOWN, upto=1)
    assert replicas.in_limbo() == [LEDGER]
    assert add(replicas, make_run(2, 2)) is Status.LIMBO


def test_deferred_entries_lost_after_durable_ones_put_the_ledger_in_limbo(
    fs: SimFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED))
    add(replicas, make_run(0, 2))
    writer = replicas.store.log.writer
    write = writer.write

    def stage_more_and_write(commit: Commit) -> None:
        monkeypatch.undo()
        assert replicas.stage(LEDGER, make_run(4, 2), False) is Status.OK
        write(commit)

    monkeypatch.setattr(writer, "write", stage_more_and_write)
    assert replicas.stage(LEDGER, make_run(2, 2), False) is Status.OK
    replicas.commit()
    no_space(fs, replicas)
    with pytest.raises(StorageFullError):
        replicas.commit()
    assert_reads(replicas, 0, 5, status=Status.UNKNOWN, upto=3)
    assert replicas.in_limbo() == [LEDGER]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(25))
def test_nothing_acknowledged_is_denied_or_changed_after_a_crash(seed: int) -> None:
    fs = SimFileSystem(seed)
    replicas = open_replicas(fs)
    replicas.create(LEDGER, describe(flags=DEFERRED if seed % 3 == 0 else WriteFlag.NONE))
    acknowledged: set[int] = set()
    random = fs.random
    for _ in range(random.randrange(1, 12)):
        first, count, stride = random.randrange(40), random.randrange(1, 9), random.choice((1, 1, 3))
        durable = bool(seed % 3) or random.random() < 0.5
        assert replicas.stage(LEDGER, make_run(first, count, stride), durable) is Status.OK
        if durable:
            replicas.commit()
        acknowledged.update(range(first, first + count * stride, stride))
    if random.random() < 0.3:
        replicas.store.scheduler.checkpoint()
    replicas.stage(LEDGER, make_run(100, 5), True)
    fs, replicas = after_crash(fs, replicas)
    for entry_id in range(80):
        status, run = replicas.read(LEDGER, entry_id, entry_id, 1, 1)
        if status is Status.OK:
            assert content(run) == [entry(entry_id)]
        else:
            assert entry_id not in acknowledged or (seed % 3 == 0 and status is Status.UNKNOWN)  # I17
    replicas.close()
    check_disk(fs, len(list(open_replicas(fs).store.ledgers())))
